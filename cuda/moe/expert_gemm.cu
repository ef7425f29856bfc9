// Grouped GEMM of prefill steps: rows of x that are sorted by expert (sort.cu), each times the matrix of its expert. A
// CTA makes a work tile of up to TOKENS rows, as a CTA of the prefill GEMM does (gemm_prefill.cu).
//
// Launch: grid (work tiles at most, tile rows / 8; GLU: / 4). Tiles beyond the last one end at once.
#include "gemm/gemm_prefill.cu"

struct ExpertGemmArgs : GemmPrefillArgs {
    const int4* work;       // (expert, first row, end row, 0); expert -1: no work
    uint64_t expert_bytes;  // from the tiles of one expert to those of the next
};

template <class T, int EPILOGUE>
__global__ void __launch_bounds__(Q_THREADS, 1) expert_gemm(const ExpertGemmArgs p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int4 work = __ldcg(p.work + blockIdx.x);
    if (work.x < 0) return;
    GemmPrefillArgs q = p;
    q.x = p.x + static_cast<size_t>(work.y) * p.k, q.n_tokens = work.z - work.y;
    const uint64_t offset = static_cast<uint64_t>(work.x) * p.expert_bytes;
#pragma unroll
    for (int s = 0; s < 3; ++s) {
        if (p.segment[s].tiles == nullptr) continue;
        const size_t first = static_cast<size_t>(work.y) * p.segment[s].n_rows;
        q.segment[s].tiles += offset;
        q.segment[s].out = EPILOGUE == GLU ? static_cast<void*>(static_cast<__half*>(p.segment[s].out) + first)
                                           : static_cast<void*>(static_cast<float*>(p.segment[s].out) + first);
    }
    prefill_tile<T, EPILOGUE>(q, 0, blockIdx.y);
}
