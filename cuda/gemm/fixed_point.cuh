// Integer tiles times the few tokens of a decode step, exactly: activations in 16-bit fixed point.
//
// Of the columns of one group of weights (32 or 16), x = scale * (256 * high + low): integers of 16 bits, the largest
// +-32512, in two signed bytes, low in -128 ... 127. What x loses so is at most 1/65024 of the group's largest |x|. The
// codes are unsigned bytes as they come out of a word; tensor cores multiply both pieces by them and add up integers,
// so that a group's sum is exact, and so is what the codes' zero point takes off it. Codes that are looked up, half of
// them for values of one sign and half of the other, take two products, of their sizes, and no zero point: that saves
// look-ups. Then comes, in float32,
//
//     y += (256 * c(high) + c(low) - zero * sum(x)) * (scale * d)  [+ m * (scale * sum(x))]
//
// A chunk's groups belong to four "slots", adjacent groups to the same one: SETS of them to each. A sum over a row goes
// by slots, which are added up at its end, (0 + 1) + (2 + 3), for any number of tokens. For eight tokens the eight
// columns of B are tokens, each group takes a product for each piece, and a lane keeps four sums of each output. Up to
// four tokens have a column for each piece, so that a group takes one product; one or two tokens also share the slots
// out: a lane has a piece of its slots' groups, and zeros for the other groups. Lane (g, t) of the product has both
// pieces of one token, and applies the scales of its slots only.
#pragma once
#include "lib/mma.cuh"
#include "gemm/shared_storage.cuh"

template <class T>
struct FixedPoint {
    static constexpr int LARGEST = 127 * 256;  // of 16 bits, so that both pieces are signed bytes
    static constexpr int SETS = T::GROUPS / 4;
    static constexpr int WORDS = T::GROUP / 16;    // a lane's words (four columns) of a group's piece
    static constexpr int LANE_BYTES = T::CHUNK_K / 16;  // of a piece of one slot of a chunk
    // Bytes of a word as tile codes have them (ChunkCodes::bytes): elements in order, or 0, 2, 1, 3.
    static constexpr bool IN_ORDER = T::BASE_BITS == 8 || T::VALUES::TABLE;

    // Products of sizes, of values of either sign, that are added and taken off.
    static constexpr bool SPLIT = T::VALUES::SPLIT;
    static constexpr int ZERO = SPLIT ? 0 : T::ZERO;

    // The bytes of (slot, piece 0: high, 1: low, lane t) of a chunk's x: words of sets.
    static __device__ __forceinline__ int offset(int slot, int piece, int t) {
        return ((slot * 2 + piece) * 4 + t) * LANE_BYTES;
    }
    // What the codes of a group's 32 columns are multiplied by, besides what they stand for.
    static __device__ __forceinline__ constexpr int factor(int j) {
        return SPLIT ? 1 : T::VALUES::SCALE << T::byte_shift(j);
    }
};

// Four columns in fixed point: bytes in the order of a tile's, and their sum.
struct FixedWord {
    uint32_t high, low;
};

// x[i] * inverse, to the nearest integers. The low bits of a float near 1.5 * 2^23 are an integer, to which half a piece is
// added for the rounding of `high`, and what makes it unsigned: both are taken off both pieces by one XOR.
template <bool IN_ORDER>
__device__ __forceinline__ FixedWord fixed_word(float2 first, float2 second, float inverse) {
    constexpr float integers = 12582912.0f + 0x8080;
    const uint32_t a = __float_as_uint(fmaf(first.x, inverse, integers));
    const uint32_t b = __float_as_uint(fmaf(first.y, inverse, integers));
    const uint32_t c = __float_as_uint(fmaf(second.x, inverse, integers));
    const uint32_t d = __float_as_uint(fmaf(second.y, inverse, integers));
    const uint32_t low = __byte_perm(a, IN_ORDER ? b : c, 0x5410), high = __byte_perm(IN_ORDER ? c : b, d, 0x5410);
    return {__byte_perm(low, high, 0x7531) ^ 0x80808080u, __byte_perm(low, high, 0x6420) ^ 0x80808080u};
}

// Where eight columns of a token go in shared memory: pieces `high` and behind them `low`, and their group's scale.
template <class T>
struct FixedPlace {
    using F = FixedPoint<T>;
    static_assert(8 * THREADS % T::CHUNK_K == 0, "a thread's next columns have the same place in another chunk");
    uint8_t* high;
    XScale* scale;
    bool odd;  // groups of 32 columns, whose codes may be multiplied by something else

    template <int COLS>
    __device__ __forceinline__ FixedPlace(const Room<T, COLS>& room, int token, int column) {
        const uint32_t at = column, in_chunk = at % T::CHUNK_K / T::GROUP, t = at % T::GROUP / (T::GROUP / 4);
        const uint32_t slot = in_chunk / F::SETS, set = in_chunk % F::SETS;
        high = room.x_of(token, at / T::CHUNK_K * T::CHUNK_K) + set * F::WORDS * 4 + F::offset(slot, 0, t);
        scale = room.scales_of(token, column);
        odd = at / 32 % 2;
    }
    // In registers from here on, whatever is waited for meanwhile.
    __device__ __forceinline__ void keep() { high = kept_shared(high), scale = kept_shared(scale); }
    __device__ __forceinline__ int made() const { return made_of(high) | made_of(scale); }
    // So many columns further on, where these are whole chunks.
    __device__ __forceinline__ FixedPlace behind(int columns) const {
        FixedPlace place = *this;
        place.high += 2 * columns, place.scale += columns / T::GROUP;
        return place;
    }
};

// Eight columns of a token go to shared memory as fixed point, and their group's scale beside them, with what the codes'
// zero point takes off, or what minimums are multiplied by. `most`: the group's largest |x|, not 0. Every lane of the warp
// calls it, since sums pass between lanes; those that are not `valid` write nothing. A NaN or an infinity makes the scale
// one.
template <class T>
__device__ __forceinline__ void put_fixed_point(const FixedPlace<T>& place, bool valid, const float2 (&x)[4],
                                                float most) {
    using F = FixedPoint<T>;
    constexpr int lanes = T::GROUP / 8;
    const float inverse = static_cast<float>(F::LARGEST) * fast_reciprocal(most);
    const FixedWord first = fixed_word<F::IN_ORDER>(x[0], x[1], inverse);
    const FixedWord second = fixed_word<F::IN_ORDER>(x[2], x[3], inverse);
    constexpr int ones = 0x01010101;
    int sum = 256 * __dp4a(static_cast<int>(first.high), ones, __dp4a(static_cast<int>(second.high), ones, 0));
    sum = __dp4a(static_cast<int>(first.low), ones, __dp4a(static_cast<int>(second.low), ones, sum));
#pragma unroll
    for (int offset = 1; offset < lanes; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (!valid) return;
    uint8_t *const high = place.high, *const low = high + F::offset(0, 1, 0);
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
    of.scale = scale * (place.odd ? 1.0f / F::factor(1) : 1.0f / F::factor(0));
    if constexpr (T::MIN)
        of.sum = scale * static_cast<float>(sum);
    else
        of.start = -F::ZERO * (place.odd ? F::factor(1) : F::factor(0)) * sum;
    *place.scale = of;
}

// Halves. The bits of |x| have the order of numbers, with NaN as the largest.
template <class T>
__device__ __forceinline__ void put_fixed_point(const FixedPlace<T>& place, bool valid, const uint4& halves) {
    constexpr uint32_t size = 0x7fff7fffu;
    uint32_t largest = max_u16x2(halves.x & size, halves.y & size);
    largest = max_u16x2(largest, max_u16x2(halves.z & size, halves.w & size));
#pragma unroll
    for (int offset = 1; offset < T::GROUP / 8; offset *= 2)
        largest = max_u16x2(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    largest = max(max(largest & 0xffffu, largest >> 16), 1u);
    const float2 x[4] = {half2_to_float2(halves.x), half2_to_float2(halves.y), half2_to_float2(halves.z),
                         half2_to_float2(halves.w)};
    put_fixed_point(place, valid, x, half2_to_float2(largest).x);
}
// Floats; those of a group that are all less than 2^-100 become 0.
template <class T>
__device__ __forceinline__ void put_fixed_point(const FixedPlace<T>& place, bool valid, const float2 (&x)[4]) {
    uint32_t largest = 0x0d800000u;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        largest = max(largest, max(__float_as_uint(fabsf(x[i].x)), __float_as_uint(fabsf(x[i].y))));
#pragma unroll
    for (int offset = 1; offset < T::GROUP / 8; offset *= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    put_fixed_point(place, valid, x, __uint_as_float(largest));
}

// Codes of a group x a piece of x.
template <class T>
struct GroupSums {
    int added[4] = {}, taken[FixedPoint<T>::SPLIT ? 4 : 1] = {};
    __device__ __forceinline__ int of(int i) const {
        if constexpr (FixedPoint<T>::SPLIT) return added[i] - taken[i];
        return added[i];
    }
    __device__ __forceinline__ void add(const GroupSums& other) {
        static_assert(!FixedPoint<T>::SPLIT, "nothing is taken");
#pragma unroll
        for (int i = 0; i < 4; ++i) added[i] += other.added[i];
    }
};

// 256 * high + low, which begins at the group's start, times the scales: rows of the tile in one of a lane's columns.
template <class T>
__device__ __forceinline__ void add_scaled(float& acc, int high, int low, const XScale& x, float d, float m) {
    const int value = 256 * high + low + (FixedPoint<T>::ZERO != 0 ? x.start : 0);
    acc = fmaf(static_cast<float>(value), x.scale * d, acc);
    if (T::MIN) acc = fmaf(m, x.sum, acc);
}

// The A operand of a group (J, counted over the chunk), PART of its codes.
template <class T, int J, Part PART>
struct GroupCodes {
    uint32_t a[T::GROUP / 8];
    __device__ __forceinline__ GroupCodes(const ChunkCodes<T>& codes) {
        constexpr int j = T::GROUP == 32 ? J : J / 2, s = T::GROUP == 32 ? 0 : J % 2;
        a[0] = codes.template bytes<j, s, 0, PART>(), a[1] = codes.template bytes<j, s, 1, PART>();
        if constexpr (T::GROUP == 32)
            a[2] = codes.template bytes<j, 1, 0, PART>(), a[3] = codes.template bytes<j, 1, 1, PART>();
    }
    // D += codes x a piece of x.
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

// The columns of B are 4 / COLS parts of the slots, of each part the tokens, of each token high and low pieces. Lane t
// of the sums has both pieces of one token in one part; these are COLS slots.
template <class T, int COLS>
struct FixedPointSums {
    using F = FixedPoint<T>;
    static constexpr int PARTS = 4 / COLS, FLOATS = 2 * COLS;
    // Codes of one token are read where they are multiplied, which takes fewer registers. (Of those that are looked up
    // ptxas makes copies then.)
    static constexpr bool LATE = COLS == 1 && !T::VALUES::TABLE;
    // Where a slot is one group, parts have sums of their own, so that no product waits for another.
    static constexpr int CHAINS = F::SETS == 1 && !F::SPLIT ? PARTS : 1;
    // Scales that would take too many registers.
    static constexpr bool IN_RING = LATE || (COLS == 4 && (T::GROUP == 16 || T::HAS_SUB || T::VALUES::TABLE));
    float acc[COLS][2];  // [slot of the part][row g or g + 8]
    ChunkCodes<T> codes;
    ChunkScales<T, IN_RING ? F::SETS : COLS * F::SETS> scales;
    const uint8_t* in_ring;  // the chunk, where IN_RING

    __device__ __forceinline__ float* floats() { return acc[0]; }
    // The first slot of the part that lane t sums.
    static __device__ __forceinline__ int first_slot(int t) { return t / COLS * COLS; }
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) {
        if constexpr (!LATE) codes.load(chunk, lane);
        if constexpr (IN_RING)
            in_ring = chunk;
        else
            scales.load(chunk, lane / 4, first_slot(lane % 4) * F::SETS);
    }

    // How a lane reads x: found before that is awaited, and kept.
    struct Lane {
        int lane;
        const uint8_t* x;
        const XScale* scales;
        uint32_t ones[PARTS];  // 1 for the lane's part

        __device__ __forceinline__ Lane(const Room<T, COLS>& room, int lane_) : lane(lane_) {
            const int g = lane / 4, t = lane % 4, part = g / (2 * COLS);
            x = kept_shared(room.x_of(room.token_of(g / 2 % COLS), 0) + F::offset(part * COLS, g % 2, t));
            scales = kept_shared(room.scales_of(room.token_of(t % COLS), 0) + first_slot(t) * F::SETS);
#pragma unroll
            for (int i = 0; i < PARTS; ++i) ones[i] = kept<uint32_t>(part == i);
        }
    };
    __device__ __forceinline__ void multiply(const Lane& at, int column) {
        if constexpr (LATE) codes.load(in_ring, at.lane);
        multiply_slot<0>(at.x + 2 * column, at.scales + column / T::GROUP, at.ones, at.lane);
    }
    template <int SLOT>
    __device__ __forceinline__ void multiply_slot(const uint8_t* x, const XScale* of, const uint32_t (&ones)[PARTS],
                                                  int lane) {
        if constexpr (SLOT < COLS) {
            if constexpr (IN_RING) scales.load(in_ring, lane / 4, (first_slot(lane % 4) + SLOT) * F::SETS);
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
    // The I-th of the groups that slot SLOT of each part has.
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
            const RowScales s = scales.template get<(IN_RING ? 0 : SLOT * F::SETS) + SET>();
#pragma unroll
            for (int h = 0; h < 2; ++h)
                add_scaled<T>(acc[SLOT][h], c[SET].of(2 * h), c[SET].of(2 * h + 1), x[SET], s.d[h], s.m[h]);
            add_sets<SLOT, SET + 1>(c, x);
        }
    }

    __device__ __forceinline__ void finish(float* part, int lane) const {
        const int g = lane / 4, t = lane % 4;
        if constexpr (COLS == 1) {
            // Even slots' lanes go on with row g, odd ones with row g + 8.
            const bool odd = t & 1;
            float y = odd ? acc[0][1] : acc[0][0];
            y += __shfl_xor_sync(0xffffffffu, odd ? acc[0][0] : acc[0][1], 1);
            y += __shfl_xor_sync(0xffffffffu, y, 2);
            if (t < 2) part[g + 8 * t] = y;
        } else if constexpr (COLS == 2) {
            // The first part's lanes go on with row g, the second's with row g + 8.
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
    // Scales that would take too many registers.
    static constexpr bool IN_RING = T::GROUP == 16 || T::HAS_SUB || T::VALUES::TABLE;
    float acc[4][4];  // [slot][row half, token 2 t or 2 t + 1]
    ChunkCodes<T> codes;
    ChunkScales<T, IN_RING ? F::SETS : T::GROUPS> scales;
    const uint8_t* in_ring;  // the chunk, where IN_RING

    __device__ __forceinline__ float* floats() { return acc[0]; }
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) {
        codes.load(chunk, lane);
        if constexpr (IN_RING)
            in_ring = chunk;
        else
            scales.load(chunk, lane / 4);
    }

    using Lane = LaneOfRoom<T, 8>;
    __device__ __forceinline__ void multiply(const Lane& at, int column) {
        const Room<T, 8>& room = at.room;
        const int g = at.lane / 4, t = at.lane % 4;
        const uint8_t* x = room.x_of(room.token_of(g), column) + t * F::LANE_BYTES;
        const XScale* of[2];
        for (int i = 0; i < 2; ++i) of[i] = room.scales_of(room.token_of(2 * t + i), column);
        multiply_slot<0>(x, of, g);
    }
    template <int SLOT>
    __device__ __forceinline__ void multiply_slot(const uint8_t* x, const XScale* const (&of)[2], int g) {
        if constexpr (SLOT < 4) {
            if constexpr (IN_RING) scales.load(in_ring, g, SLOT * F::SETS);
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
            const RowScales s = scales.template get<IN_RING ? SET : J>();
#pragma unroll
            for (int i = 0; i < 4; ++i)
                add_scaled<T>(sums[i], c[0].of(i), c[1].of(i), x[i % 2][SET], s.d[i / 2], s.m[i / 2]);
            multiply_set<SLOT, SET + 1>(sums, high, low, x);
        }
    }

    __device__ __forceinline__ void finish(float* part, int lane) const {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            part[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] =
                (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
    }
};
