// BeamPath on the device: append a selection (ExtendPath).
//
// Formulas, for the request in row `slot` that has chosen `level`, and its new beam k with parent p:
//   token[slot, level, k] = selection.token;  cum, node likewise;  width[slot] = count, 0 in the last row (padding)
//   ancestor[slot, s, k] = p for s == level - 1, ancestor[slot, s, p] for the other steps (later ones mean nothing yet)
//
// Old ancestors are read while new ones are written to the same place: a block owns a request, and every thread holds
// what it read of a step in registers before any thread writes that step.
//
// Kernel: grinf_extend_path, grid (B), block 1024
// Layouts:
//   slot, level, step, count int32 [B]; selection score float, parent, token, node int32 [B, K]
//   token int32 [slots + 1, levels, pool_width]; ancestor int32 [slots + 1, steps, pool_width]
//   cum float, node int32 [slots + 1, pool_width]; width int32 [slots + 1]
// Constants: none. K is at most 4096.

#include "common.cuh"

#define EXTEND_THREADS 1024
#define PER_THREAD 4

// --- kernel

extern "C" __global__ void __launch_bounds__(EXTEND_THREADS)
    grinf_extend_path(const int* slot, const int* level, const float* new_score, const int* new_parent,
                      const int* new_token, const int* new_node, const int* count, int beams, int* token, int* ancestor,
                      float* cum, int* node, int* width, int levels, int steps, int pool_width, int scratch) {
    const int b = blockIdx.x, chosen = level[b];
    const size_t from = static_cast<size_t>(b) * beams, row = slot[b];
    token += (row * levels + chosen) * pool_width;
    ancestor += row * steps * pool_width;
    int parent[PER_THREAD];
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) {
        const int k = threadIdx.x + j * EXTEND_THREADS;
        if (k >= beams) continue;
        parent[j] = new_parent[from + k];
        token[k] = new_token[from + k];
        cum[row * pool_width + k] = new_score[from + k];
        node[row * pool_width + k] = new_node[from + k];
    }
    for (int s = 0; s < steps; ++s) {
        int* step = ancestor + static_cast<size_t>(s) * pool_width;
        int kept[PER_THREAD];
#pragma unroll
        for (int j = 0; j < PER_THREAD; ++j) {
            if (threadIdx.x + j * EXTEND_THREADS < beams) kept[j] = s == chosen - 1 ? parent[j] : step[parent[j]];
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PER_THREAD; ++j) {
            const int k = threadIdx.x + j * EXTEND_THREADS;
            if (k < beams) step[k] = kept[j];
        }
    }
    if (threadIdx.x == 0) width[row] = row == scratch ? 0 : count[b];
}
