// Tensor-core mma and matrix loads with the hardware's layout of lanes and registers, and asynchronous copies. The
// functions in cuda/lib/ that wrap the PTX instructions call these functions.
#pragma once

namespace emulator {

// Computes one lane's part of D += A B, A[16, K], B[K, 8]: see the PTX manual's figures for mma.m16n8k8/k16/k32.
template <typename D>
struct MultiplyRecord {
    const uint32_t *a, *b;
    D* d;
};

struct F16 {
    static constexpr int PER_REGISTER = 2;
    static double get(uint32_t bits, int i) { return emulator_bits<__half>(uint16_t(bits >> 16 * i)); }
};
struct Bf16 {
    static constexpr int PER_REGISTER = 2;
    static double get(uint32_t bits, int i) { return double(emulator_bits<float>(bits >> 16 * i << 16)); }
};
struct S8 {
    static constexpr int PER_REGISTER = 4;
    static int get(uint32_t bits, int i) { return int8_t(bits >> 8 * i); }
};
struct U8 {
    static constexpr int PER_REGISTER = 4;
    static int get(uint32_t bits, int i) { return uint8_t(bits >> 8 * i); }
};

struct E4m3 {
    static constexpr int PER_REGISTER = 4;
    static double get(uint32_t bits, int i) {
        uint32_t code = bits >> 8 * i & 0xff, mantissa = code & 7;
        int exponent = int(code >> 3 & 15);
        if ((code & 0x7f) == 0x7f) return std::nan("");
        double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
        return code & 0x80 ? -size : size;
    }
};

// KREGS: registers of B; each register, over four lanes, covers one part of K. A: the element type of A, if it differs
// from that of B.
template <typename T, int KREGS, typename A, typename D>
void complete_multiply(MultiplyRecord<D>* const* records, unsigned lanes) {
    constexpr int E = T::PER_REGISTER, K = KREGS * 4 * E;
    if (lanes != ~0u) emulator_fail("mma: only lanes %08x take part", lanes);
    using Wide = decltype(T::get(0, 0));
    Wide a[16][K], b[K][8];
    for (int lane = 0; lane < 32; ++lane)
        for (int r = 0; r < KREGS; ++r)
            for (int e = 0; e < E; ++e) {
                int k = r * 4 * E + lane % 4 * E + e;
                a[lane / 4][k] = A::get(records[lane]->a[2 * r], e);
                a[lane / 4 + 8][k] = A::get(records[lane]->a[2 * r + 1], e);
                b[k][lane / 4] = T::get(records[lane]->b[r], e);
            }
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            Wide sum = 0;
            for (int k = 0; k < K; ++k) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
            if constexpr (std::is_integral_v<D>)
                records[lane]->d[i] = D(unsigned(records[lane]->d[i]) + unsigned(sum));
            else
                records[lane]->d[i] = D(records[lane]->d[i] + sum);
        }
}

template <typename T, int KREGS, typename A = T, typename D>
void multiply(D* d, const uint32_t* a, const uint32_t* b, Site site) {
    MultiplyRecord<D> record{a, b, d};
    meet<MultiplyRecord<D>, complete_multiply<T, KREGS, A, D>>(~0u, record, site);
}

// wgmma with A in registers. A warp computes its 16 rows of D[64][N], whenever the other warps of its warpgroup do. B
// lies in dynamic shared memory at the offset that `b` has in units of 16 bytes; the upper half of the descriptor says
// how many bytes eight rows take, and how pieces of 16 bytes are swizzled: see cuda/lib/wgmma.cuh.
template <int N, bool ADD>
struct WgmmaRecord {
    const uint32_t* a;
    float* d;
    uint32_t b, lines;
};

template <int N, bool ADD>
void complete_wgmma(WgmmaRecord<N, ADD>* const* records, unsigned lanes) {
    if (lanes != ~0u) emulator_fail("wgmma: only lanes %08x take part", lanes);
    const uint32_t lines = records[0]->lines, eight_rows = (lines & 0x3fff) * 16, row = eight_rows / 8;
    const char* memory = static_cast<const char*>(dynamic_shared());
    const uint32_t base = uint32_t(reinterpret_cast<uintptr_t>(memory));
    const uint32_t start = ((records[0]->b << 4) - base) & 0x3ffff;
    double a[16][16], b[16];
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 8; ++i)
            a[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2] = F16::get(records[lane]->a[i / 2], i % 2);
    for (int n = 0; n < N; ++n) {
        for (int k = 0; k < 16; ++k) {
            uint32_t at = start + n * row + 2 * k;
            at ^= (at >> 7 & (row / 16 - 1)) << 4;
            uint16_t bits;
            memcpy(&bits, memory + at, 2);
            b[k] = F16::get(bits, 0);
        }
        for (int m = 0; m < 16; ++m) {
            double sum = 0;
            for (int k = 0; k < 16; ++k) sum += a[m][k] * b[k];
            float& d = records[m % 8 * 4 + n % 8 / 2]->d[n / 8 * 4 + m / 8 * 2 + n % 2];
            d = float(ADD ? d + sum : sum);
        }
    }
}

template <int N, bool ADD>
void wgmma(float* d, const uint32_t* a, uint32_t b, uint32_t lines, Site site) {
    WgmmaRecord<N, ADD> record{a, d, b, lines};
    meet<WgmmaRecord<N, ADD>, complete_wgmma<N, ADD>>(~0u, record, site);
}

// A lane's part of A[64][16] in shared memory, as the registers that wgmma takes; `a` as b of complete_wgmma.
inline void wgmma_rows(uint32_t* registers, uint32_t a) {
    const char* memory = static_cast<const char*>(dynamic_shared());
    const uint32_t base = uint32_t(reinterpret_cast<uintptr_t>(memory)), start = ((a << 4) - base) & 0x3ffff;
    const uint32_t lane = emulator_current->lane, warp = emulator_current->warp % 4;
    for (int i = 0; i < 4; ++i) {
        const uint32_t row = warp * 16 + lane / 4 + i % 2 * 8, column = i / 2 * 8 + lane % 4 * 2;
        uint32_t at = start + row * 128 + 2 * column;
        at ^= (at >> 7 & 7) << 4;
        memcpy(registers + i, memory + at, 4);
    }
}

// What Device.tensor_map of the emulated device makes: an f16 matrix [rows][columns], and the box of a copy.
struct TensorMap {
    uint64_t address, rows, columns, box_rows, box_columns, unused[11];
};

// Copies a box to `to`, which is in some CTA's shared memory where `local` is in this CTA's; returns its bytes. A row
// of the box takes 128 bytes, swizzled as by tensor copies.
inline int copy_box(void* to, const void* local, const TensorMap& map, int row, int column) {
    const auto* shared = static_cast<const char*>(dynamic_shared());
    const uint32_t start = uint32_t(static_cast<const char*>(local) - shared);
    if (start % 1024 || map.box_columns != 64) emulator_fail("a box of %d columns at %u", int(map.box_columns), start);
    char* first = static_cast<char*>(to) - start;
    for (uint64_t r = 0; r < map.box_rows; ++r)
        for (uint64_t c = 0; c < map.box_columns; ++c) {
            uint16_t value = 0;
            if (row + r < map.rows && column + c < map.columns)
                memcpy(&value, reinterpret_cast<const uint16_t*>(map.address) + (row + r) * map.columns + column + c,
                       2);
            uint32_t at = start + uint32_t(r * 128 + c * 2);
            at ^= (at >> 7 & 7) << 4;
            memcpy(first + at, &value, 2);
        }
    return int(map.box_rows * map.box_columns * 2);
}

struct MatrixRecord {
    const void* row;
    uint32_t* out;
};

template <int COUNT, bool TRANSPOSED>
void complete_load_matrix(MatrixRecord* const* records, unsigned lanes) {
    if (lanes != ~0u) emulator_fail("ldmatrix: only lanes %08x take part", lanes);
    for (int matrix = 0; matrix < COUNT; ++matrix) {
        uint16_t m[8][8];
        for (int row = 0; row < 8; ++row) memcpy(m[row], records[matrix * 8 + row]->row, 16);
        for (int lane = 0; lane < 32; ++lane) {
            int i = lane / 4, j = lane % 4 * 2;
            uint32_t low = TRANSPOSED ? m[j][i] : m[i][j], high = TRANSPOSED ? m[j + 1][i] : m[i][j + 1];
            records[lane]->out[matrix] = high << 16 | low;
        }
    }
}

template <int COUNT, bool TRANSPOSED>
void load_matrix(uint32_t* out, const void* row, Site site) {
    if (lane() < COUNT * 8 && reinterpret_cast<uintptr_t>(row) % 16)
        emulator_fail("ldmatrix at %s:%d: a row's address is no multiple of 16", site.file, site.line);
    MatrixRecord record{row, out};
    meet<MatrixRecord, complete_load_matrix<COUNT, TRANSPOSED>>(~0u, record, site);
}

// cp.async. async_wait performs the copy, so a kernel that does not wait reads poison. This function touches source and
// destination, so a sanitizer reports a bad address at the line of the copy.
inline void async_copy(void* to, const void* from, unsigned bytes, unsigned valid, Site site) {
    if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
        emulator_fail("cp.async at %s:%d: an address is no multiple of %u", site.file, site.line, bytes);
    for (unsigned i = 0; i < bytes; ++i) {
        (void)static_cast<const volatile char*>(to)[i];
        if (i < valid) (void)static_cast<const volatile char*>(from)[i];
    }
    emulator_async_copy(to, from, bytes, valid);
}

}  // namespace emulator
