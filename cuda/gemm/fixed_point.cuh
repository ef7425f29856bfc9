// The mainloop arithmetic of the decode GEMM for integer tiles: exact integer sums of codes times activations in 16-bit
// fixed point.
//
// Fixed point: the columns of x that share a group of weights (32 or 16) are scale * (256 * high + low), where `high`
// and `low` are signed bytes (low in -128 ... 127) and the 16-bit integer is at most 32512 in magnitude. The rounding
// error of x is at most 1/65024 of the group's largest |x|.
//
// Codes are unsigned bytes as they come out of a word. Tensor cores multiply them by each of the two pieces (high, low)
// and add integers, so the sum of a group is exact, and so is the subtraction of the codes' zero point. If codes are
// looked up in a table with values of both signs (SPLIT), two MMAs multiply the magnitudes of positive and of negative
// values and no zero point is needed, which saves look-ups. Then, in f32, per group
//
//     y += (256 * c(high) + c(low) - zero * sum(x)) * (scale * d)  [+ m * (scale * sum(x))]
//
// Slots: the groups of a chunk are divided into four slots of SETS adjacent groups each. A lane accumulates each slot
// over the whole row and adds the slots at the end as (0 + 1) + (2 + 3), for any number of tokens, so the result does
// not depend on the number of tokens.
//
// | tokens | columns of B                               | MMAs per group                                          |
// | 8      | 8 tokens                                   | 2, one per piece; a lane keeps four sums of each output |
// | 4      | 4 tokens x 2 pieces                        | 1                                                       |
// | 2      | 2 parts of the slots x 2 tokens x 2 pieces | 1; B is 0 for groups of the other part                  |
// | 1      | 4 parts of the slots x 2 pieces            | 1; B is 0 for groups of the other parts                 |
//
// With up to four tokens, lane (g, t) of the result has both pieces of one token in columns 2 t and 2 t + 1, and
// applies only the scales of the slots of its part.
#pragma once
#include "lib/mma.cuh"
#include "gemm/shared_storage.cuh"

template <class T>
struct FixedPoint {
    static constexpr int LARGEST = 127 * 256;  // largest 16-bit integer; both of its pieces are signed bytes
    static constexpr int SETS = T::GROUPS / 4;
    static constexpr int WORDS = T::GROUP / 16;         // a lane's words (four columns each) of one piece of a group
    static constexpr int LANE_BYTES = T::CHUNK_K / 16;  // of one piece of one slot of a chunk, for one lane t

    // Whether positive and negative values are multiplied by separate MMAs and subtracted.
    static constexpr bool SPLIT = T::VALUES::SPLIT;
    static constexpr int ZERO = SPLIT ? 0 : T::ZERO;

    // Byte offset of (slot, piece 0: high or 1: low, lane t) in x of a chunk: the words of the slot's sets.
    static __device__ __forceinline__ int offset(int slot, int piece, int t) {
        return ((slot * 2 + piece) * 4 + t) * LANE_BYTES;
    }
    // Factor by which the unpacked codes of the j-th 32 columns exceed their values; the scale of x compensates it.
    static __device__ __forceinline__ constexpr int factor(int j) {
        return SPLIT ? 1 : T::VALUES::SCALE << T::byte_shift(j);
    }
};

// Four columns in fixed point, bytes in the order of the tile's codes.
struct FixedPointWord {
    uint32_t high, low;
};

// Rounds x[i] * inverse to integers and splits them into pieces. The low bits of a float near 1.5 * 2^23 are an
// integer. The constant 0x8080 adds 0x80 for rounding `high` to nearest and makes both bytes unsigned; the XOR removes
// both offsets.
template <bool IN_ORDER>
__device__ __forceinline__ FixedPointWord fixed_word(float2 first, float2 second, float inverse) {
    constexpr float integers = 12582912.0f + 0x8080;
    const uint32_t a = __float_as_uint(fmaf(first.x, inverse, integers));
    const uint32_t b = __float_as_uint(fmaf(first.y, inverse, integers));
    const uint32_t c = __float_as_uint(fmaf(second.x, inverse, integers));
    const uint32_t d = __float_as_uint(fmaf(second.y, inverse, integers));
    const uint32_t low = __byte_perm(a, IN_ORDER ? b : c, 0x5410), high = __byte_perm(IN_ORDER ? c : b, d, 0x5410);
    return {__byte_perm(low, high, 0x7531) ^ 0x80808080u, __byte_perm(low, high, 0x6420) ^ 0x80808080u};
}

// Destination of eight columns of x in shared memory: the high pieces, the low pieces at a fixed distance after them,
// and the scale of their group.
template <class T>
struct FixedPointDst {
    using F = FixedPoint<T>;
    static_assert(8 * THREADS % T::CHUNK_K == 0, "a thread's next columns have the same place in another chunk");
    uint8_t* high;
    XScale* scale;
    bool odd;  // whether the columns are in an odd group of 32, whose codes may have another factor

    template <int COLS>
    __device__ __forceinline__ FixedPointDst(const DecodeSharedStorage<T, COLS>& storage, int token, int column) {
        const uint32_t at = column, in_chunk = at % T::CHUNK_K / T::GROUP, t = at % T::GROUP / (T::GROUP / 4);
        const uint32_t slot = in_chunk / F::SETS, set = in_chunk % F::SETS;
        high = storage.x_of(token, at / T::CHUNK_K * T::CHUNK_K) + set * F::WORDS * 4 + F::offset(slot, 0, t);
        scale = storage.scales_of(token, column);
        odd = at / 32 % 2;
    }
    // Keeps the addresses in registers across the wait.
    __device__ __forceinline__ void keep() { high = kept_shared(high), scale = kept_shared(scale); }
    __device__ __forceinline__ int made() const { return made_of(high) | made_of(scale); }
    // The destination `columns` further on, for whole chunks.
    __device__ __forceinline__ FixedPointDst offset_by(int columns) const {
        FixedPointDst dst = *this;
        dst.high += 2 * columns, dst.scale += columns / T::GROUP;
        return dst;
    }
};

// Converts eight columns of x to fixed point and stores them in shared memory, with the group's scale and its
// correction: the zero point times the sum, or the sum that minimums multiply. `most` is the largest |x| of the group
// and not 0. Every lane of the warp must call it, because the lanes of a group add up their sums by shuffles; lanes
// with `valid` = false store nothing. If x has a NaN or an infinity, the group's scale is NaN or infinite.
template <class T>
__device__ __forceinline__ void put_fixed_point(const FixedPointDst<T>& dst, bool valid, const float2 (&x)[4],
                                                float most) {
    using F = FixedPoint<T>;
    constexpr int lanes = T::GROUP / 8;
    const float inverse = static_cast<float>(F::LARGEST) * fast_reciprocal(most);
    const FixedPointWord first = fixed_word<T::IN_ORDER>(x[0], x[1], inverse);
    const FixedPointWord second = fixed_word<T::IN_ORDER>(x[2], x[3], inverse);
    constexpr int ones = 0x01010101;
    int sum = 256 * __dp4a(static_cast<int>(first.high), ones, __dp4a(static_cast<int>(second.high), ones, 0));
    sum = __dp4a(static_cast<int>(first.low), ones, __dp4a(static_cast<int>(second.low), ones, sum));
#pragma unroll
    for (int offset = 1; offset < lanes; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (!valid) return;
    uint8_t *const high = dst.high, *const low = high + F::offset(0, 1, 0);
    if constexpr (F::WORDS == 2) {
        *reinterpret_cast<uint2*>(high) = make_uint2(first.high, second.high);
        *reinterpret_cast<uint2*>(low) = make_uint2(first.low, second.low);
    } else {
        *reinterpret_cast<uint32_t*>(high) = first.high, *reinterpret_cast<uint32_t*>(low) = first.low;
        *reinterpret_cast<uint32_t*>(high + F::LANE_BYTES) = second.high;
        *reinterpret_cast<uint32_t*>(low + F::LANE_BYTES) = second.low;
    }
    if (threadIdx.x % lanes != 0) return;
    const float scale = most * (1.0f / F::LARGEST);
    XScale of;
    of.scale = scale * (dst.odd ? 1.0f / F::factor(1) : 1.0f / F::factor(0));
    if constexpr (T::MIN)
        of.sum = scale * static_cast<float>(sum);
    else
        of.start = -F::ZERO * (dst.odd ? F::factor(1) : F::factor(0)) * sum;
    *dst.scale = of;
}

// The same for f16 columns. The bits of |x| as an integer have the order of the values, with NaN largest.
template <class T>
__device__ __forceinline__ void put_fixed_point(const FixedPointDst<T>& dst, bool valid, const uint4& f16x8) {
    constexpr uint32_t size = 0x7fff7fffu;
    uint32_t largest = max_u16x2(f16x8.x & size, f16x8.y & size);
    largest = max_u16x2(largest, max_u16x2(f16x8.z & size, f16x8.w & size));
#pragma unroll
    for (int offset = 1; offset < T::GROUP / 8; offset *= 2)
        largest = max_u16x2(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    largest = max(max(largest & 0xffffu, largest >> 16), 1u);
    const float2 x[4] = {half2_to_float2(f16x8.x), half2_to_float2(f16x8.y), half2_to_float2(f16x8.z),
                         half2_to_float2(f16x8.w)};
    put_fixed_point(dst, valid, x, half2_to_float2(largest).x);
}
// The same for f32 columns. A group whose values are all below 2^-100 becomes 0.
template <class T>
__device__ __forceinline__ void put_fixed_point(const FixedPointDst<T>& dst, bool valid, const float2 (&x)[4]) {
    uint32_t largest = 0x0d800000u;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        largest = max(largest, max(__float_as_uint(fabsf(x[i].x)), __float_as_uint(fabsf(x[i].y))));
#pragma unroll
    for (int offset = 1; offset < T::GROUP / 8; offset *= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    put_fixed_point(dst, valid, x, __uint_as_float(largest));
}

// Integer sums of the codes of one group times one piece of x.
template <class T>
struct GroupSums {
    int added[4] = {}, taken[FixedPoint<T>::SPLIT ? 4 : 1] = {};
    __device__ __forceinline__ int of(int i) const {
        if constexpr (FixedPoint<T>::SPLIT) return added[i] - taken[i];
        return added[i];
    }
    __device__ __forceinline__ void add(const GroupSums& other) {
        static_assert(!FixedPoint<T>::SPLIT, "SPLIT sums are subtracted, not added");
#pragma unroll
        for (int i = 0; i < 4; ++i) added[i] += other.added[i];
    }
};

// acc += (256 * high + low + start) * scales, for one row and token.
template <class T>
__device__ __forceinline__ void add_scaled(float& acc, int high, int low, const XScale& x, float d, float m) {
    const int value = 256 * high + low + (FixedPoint<T>::ZERO != 0 ? x.start : 0);
    acc = fmaf(static_cast<float>(value), x.scale * d, acc);
    if (T::MIN) acc = fmaf(m, x.sum, acc);
}

// The A operand of group J of the chunk; PART selects all values, or only the added or the subtracted ones (SPLIT).
template <class T, int J, Part PART>
struct GroupCodes {
    uint32_t a[T::GROUP / 8];
    __device__ __forceinline__ GroupCodes(const ChunkCodes<T>& codes) {
        constexpr int j = T::GROUP == 32 ? J : J / 2, s = T::GROUP == 32 ? 0 : J % 2;
        a[0] = codes.template bytes<j, s, 0, PART>(), a[1] = codes.template bytes<j, s, 1, PART>();
        if constexpr (T::GROUP == 32)
            a[2] = codes.template bytes<j, 1, 0, PART>(), a[3] = codes.template bytes<j, 1, 1, PART>();
    }
    // d += codes times one piece of x.
    __device__ __forceinline__ void multiply(int (&d)[4], const uint32_t* b) const {
        if constexpr (T::GROUP == 32)
            mma_m16n8k32_u8s8(d, a, {b[0], b[1]});
        else
            mma_m16n8k16_u8s8(d, a, b[0]);
    }
};
template <class T, int J>
__device__ __forceinline__ void multiply_group(GroupSums<T>& sums, const ChunkCodes<T>& codes, const uint32_t* b) {
    if constexpr (FixedPoint<T>::SPLIT) {
        const GroupCodes<T, J, Part::ADDED> added(codes);
        const GroupCodes<T, J, Part::TAKEN> taken(codes);
        added.multiply(sums.added, b), taken.multiply(sums.taken, b);
    } else {
        GroupCodes<T, J, Part::ALL>(codes).multiply(sums.added, b);
    }
}

// ---- up to four tokens -------------------------------------------------------------------------------------------

// The columns of B are [part of the slots, 4 / COLS][token, COLS][high, low]. Lane t of the result has both pieces of
// one token in one part, which is COLS slots.
template <class T, int COLS>
struct FixedPointSums {
    using F = FixedPoint<T>;
    static constexpr int PARTS = 4 / COLS, FLOATS = 2 * COLS;
    // With one token, codes are loaded from the stage where they are multiplied, which takes fewer registers. (ptxas
    // copies codes that are looked up in this case, so these are loaded first.)
    static constexpr bool LAZY = COLS == 1 && !T::VALUES::TABLE;
    // If a slot is a single group, each part has accumulators of its own, so that no MMA waits for another one's
    // result.
    static constexpr int CHAINS = F::SETS == 1 && !F::SPLIT ? PARTS : 1;
    // Whether scales are loaded from the stage where they are applied, because all of them would take too many
    // registers.
    static constexpr bool IN_STAGE = LAZY || (COLS == 4 && (T::GROUP == 16 || T::HAS_SUB || T::VALUES::TABLE));
    float acc[COLS][2];  // [slot of the part][row g or g + 8]
    ChunkCodes<T> codes;
    ChunkScales<T, IN_STAGE ? F::SETS : COLS * F::SETS> scales;
    const uint8_t* in_stage;  // IN_STAGE: the chunk in the stage

    __device__ __forceinline__ float* floats() { return acc[0]; }
    // The first slot of the part that lane t sums.
    static __device__ __forceinline__ int first_slot(int t) { return t / COLS * COLS; }
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) {
        if constexpr (!LAZY) codes.load(chunk, lane);
        if constexpr (IN_STAGE)
            in_stage = chunk;
        else
            scales.load(chunk, lane / 4, first_slot(lane % 4) * F::SETS);
    }

    // The lane's addresses of x, computed before the wait and kept in registers.
    struct Lane {
        int lane;
        const uint8_t* x;
        const XScale* scales;
        uint32_t ones[PARTS];  // 1 for the lane's part

        __device__ __forceinline__ Lane(const DecodeSharedStorage<T, COLS>& storage, int lane_) : lane(lane_) {
            const int g = lane / 4, t = lane % 4, part = g / (2 * COLS);
            x = kept_shared(storage.x_of(storage.token_of(g / 2 % COLS), 0) + F::offset(part * COLS, g % 2, t));
            scales = kept_shared(storage.scales_of(storage.token_of(t % COLS), 0) + first_slot(t) * F::SETS);
#pragma unroll
            for (int i = 0; i < PARTS; ++i) ones[i] = kept<uint32_t>(part == i);
        }
    };
    __device__ __forceinline__ void multiply(const Lane& lane_storage, int column) {
        if constexpr (LAZY) codes.load(in_stage, lane_storage.lane);
        multiply_slot<0>(lane_storage.x + 2 * column, lane_storage.scales + column / T::GROUP, lane_storage.ones,
                         lane_storage.lane);
    }
    template <int SLOT>
    __device__ __forceinline__ void multiply_slot(const uint8_t* x, const XScale* of, const uint32_t (&ones)[PARTS],
                                                  int lane) {
        if constexpr (SLOT < COLS) {
            if constexpr (IN_STAGE) scales.load(in_stage, lane / 4, (first_slot(lane % 4) + SLOT) * F::SETS);
            uint32_t b[F::LANE_BYTES / 4];
            load_lane_words(b, x + F::offset(SLOT, 0, 0));
            XScale scale[F::SETS];
            load_x_scales(scale, of + SLOT * F::SETS);
            GroupSums<T> c[CHAINS][F::SETS];
            multiply_parts<SLOT, 0>(c, b, ones);
            if constexpr (CHAINS > 1)
#pragma unroll
                for (int n = CHAINS / 2; n > 0; n /= 2)
#pragma unroll
                    for (int i = 0; i < n; ++i) c[i][0].add(c[n + i][0]);
            add_sets<SLOT, 0>(c[0], scale);
            multiply_slot<SLOT + 1>(x, of, ones, lane);
        }
    }
    // Multiplies the I-th of the groups that belong to slot SLOT of any part.
    template <int SLOT, int I>
    __device__ __forceinline__ void multiply_parts(GroupSums<T> (&c)[CHAINS][F::SETS],
                                                   const uint32_t (&b)[F::LANE_BYTES / 4],
                                                   const uint32_t (&ones)[PARTS]) {
        if constexpr (I < PARTS * F::SETS) {
            constexpr int of = I / F::SETS, set = I % F::SETS;
            uint32_t words[F::WORDS];
#pragma unroll
            for (int i = 0; i < F::WORDS; ++i) {
                const uint32_t word = b[set * F::WORDS + i];
                words[i] = PARTS == 1 ? word : times(word, ones[of]);
            }
            multiply_group<T, (of * COLS + SLOT) * F::SETS + set>(c[of % CHAINS][set], codes, words);
            multiply_parts<SLOT, I + 1>(c, b, ones);
        }
    }
    template <int SLOT, int SET>
    __device__ __forceinline__ void add_sets(const GroupSums<T> (&c)[F::SETS], const XScale (&x)[F::SETS]) {
        if constexpr (SET < F::SETS) {
            const RowScales s = scales.template get<(IN_STAGE ? 0 : SLOT * F::SETS) + SET>();
#pragma unroll
            for (int h = 0; h < 2; ++h)
                add_scaled<T>(acc[SLOT][h], c[SET].of(2 * h), c[SET].of(2 * h + 1), x[SET], s.d[h], s.m[h]);
            add_sets<SLOT, SET + 1>(c, x);
        }
    }

    __device__ __forceinline__ void finish(float* part, int lane) const {
        const int g = lane / 4, t = lane % 4;
        if constexpr (COLS == 1) {
            // Lanes of even slots reduce row g, lanes of odd slots row g + 8.
            const bool odd = t & 1;
            float y = odd ? acc[0][1] : acc[0][0];
            y += __shfl_xor_sync(0xffffffffu, odd ? acc[0][0] : acc[0][1], 1);
            y += __shfl_xor_sync(0xffffffffu, y, 2);
            if (t < 2) part[g + 8 * t] = y;
        } else if constexpr (COLS == 2) {
            // Lanes of the first part reduce row g, lanes of the second part row g + 8.
            const float low = acc[0][0] + acc[1][0], high = acc[0][1] + acc[1][1];
            const bool second = t >= 2;
            float y = second ? high : low;
            y += __shfl_xor_sync(0xffffffffu, second ? low : high, 2);
            part[(g + (second ? 8 : 0)) * COLS + t % 2] = y;
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                part[(g + 8 * h) * COLS + t] = (acc[0][h] + acc[1][h]) + (acc[2][h] + acc[3][h]);
        }
    }
};

// ---- eight tokens -----------------------------------------------------------------------------------------------

template <class T>
struct FixedPointSums<T, 8> {
    using F = FixedPoint<T>;
    static constexpr int FLOATS = 16;
    // Whether scales are loaded from the stage where they are applied, because all of them would take too many
    // registers.
    static constexpr bool IN_STAGE = T::GROUP == 16 || T::HAS_SUB || T::VALUES::TABLE;
    float acc[4][4];  // [slot][2 h + i: row g + 8 h, token 2 t + i]
    ChunkCodes<T> codes;
    ChunkScales<T, IN_STAGE ? F::SETS : T::GROUPS> scales;
    const uint8_t* in_stage;  // IN_STAGE: the chunk in the stage

    __device__ __forceinline__ float* floats() { return acc[0]; }
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) {
        codes.load(chunk, lane);
        if constexpr (IN_STAGE)
            in_stage = chunk;
        else
            scales.load(chunk, lane / 4);
    }

    using Lane = LaneStorage<T, 8>;
    __device__ __forceinline__ void multiply(const Lane& lane_storage, int column) {
        const DecodeSharedStorage<T, 8>& storage = lane_storage.storage;
        const int g = lane_storage.lane / 4, t = lane_storage.lane % 4;
        const uint8_t* x = storage.x_of(storage.token_of(g), column) + t * F::LANE_BYTES;
        const XScale* of[2];
        for (int i = 0; i < 2; ++i) of[i] = storage.scales_of(storage.token_of(2 * t + i), column);
        multiply_slot<0>(x, of, g);
    }
    template <int SLOT>
    __device__ __forceinline__ void multiply_slot(const uint8_t* x, const XScale* const (&of)[2], int g) {
        if constexpr (SLOT < 4) {
            if constexpr (IN_STAGE) scales.load(in_stage, g, SLOT * F::SETS);
            uint32_t high[F::LANE_BYTES / 4], low[F::LANE_BYTES / 4];
            load_lane_words(high, x + F::offset(SLOT, 0, 0));
            load_lane_words(low, x + F::offset(SLOT, 1, 0));
            XScale scale[2][F::SETS];
#pragma unroll
            for (int i = 0; i < 2; ++i) load_x_scales(scale[i], of[i] + SLOT * F::SETS);
            multiply_set<SLOT, 0>(acc[SLOT], high, low, scale);
            multiply_slot<SLOT + 1>(x, of, g);
        }
    }
    template <int SLOT, int SET>
    __device__ __forceinline__ void multiply_set(float (&sums)[4], const uint32_t (&high)[F::LANE_BYTES / 4],
                                                 const uint32_t (&low)[F::LANE_BYTES / 4],
                                                 const XScale (&x)[2][F::SETS]) {
        if constexpr (SET < F::SETS) {
            constexpr int J = SLOT * F::SETS + SET;
            GroupSums<T> c[2];
            multiply_group<T, J>(c[0], codes, high + SET * F::WORDS);
            multiply_group<T, J>(c[1], codes, low + SET * F::WORDS);
            const RowScales s = scales.template get<IN_STAGE ? SET : J>();
#pragma unroll
            for (int i = 0; i < 4; ++i)
                add_scaled<T>(sums[i], c[0].of(i), c[1].of(i), x[i % 2][SET], s.d[i / 2], s.m[i / 2]);
            multiply_set<SLOT, SET + 1>(sums, high, low, x);
        }
    }

    __device__ __forceinline__ void finish(float* part, int lane) const {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            part[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
    }
};
