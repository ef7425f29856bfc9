// Products of a token with the experts that it chose, for decode steps: the decode GEMM of one token (gemm_decode.cu)
// for each (token, expert) pair. An expert's matrix is found by its id in device memory.
//
// Launch: grid (CTAs of a pair, pairs). The CTAs of a pair do not depend on the number of tokens, so neither do the
// bits. Epilogues STORE, f32 [pairs, rows] of up to three matrices, and GLU, f16 [pairs, rows] of gate and up.
#include "gemm/gemm_decode.cu"

struct ExpertGemvArgs : GemmDecodeArgs {
    const int* ids;         // [pairs]
    uint64_t expert_bytes;  // from the tiles of one expert to those of the next
    int pairs_per_x;        // pairs that multiply the same row of x
    int ids_ready;          // the kernel before this one lets it start only when ids are there
};

template <class T, int EPILOGUE, bool WHOLE>
__global__ void __launch_bounds__(THREADS, 1) expert_gemv(const ExpertGemvArgs p) {
    if (!p.ids_ready) grid_dependency_wait();  // else the first weights are requested before x is there
    const int pair = blockIdx.y;
    GemmDecodeArgs q = p;
    q.x = static_cast<const __half*>(p.x) + static_cast<size_t>(pair / p.pairs_per_x) * p.k;
    const uint64_t offset = static_cast<uint64_t>(__ldcg(p.ids + pair)) * p.expert_bytes;
#pragma unroll
    for (int s = 0; s < 3; ++s) {
        if (p.segment[s].tiles == nullptr) continue;
        const size_t first = static_cast<size_t>(pair) * p.segment[s].n_rows;
        q.segment[s].tiles += offset;
        q.segment[s].out = EPILOGUE == GLU ? static_cast<void*>(static_cast<__half*>(p.segment[s].out) + first)
                                           : static_cast<void*>(static_cast<float*>(p.segment[s].out) + first);
    }
    multiply<T, 1, PLAIN, EPILOGUE, WHOLE>(q);
}
