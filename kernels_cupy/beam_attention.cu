// K2: every beam attends to the keys of its own decoded tokens, which it finds through BeamPath's ancestor index.
//
//   out[b, w, i, :] = sum_s softmax_s(scale * q[b, w, i, :] . K[slot[b], s, ancestor[b, s, w], h, :]) V[...]
//   lse[b, w, i]    = ln sum_s exp(scale * q . K[s]),   h = i / GROUP, s = 0 .. step[b]
//
// Bound by memory: a team of HEAD_DIM / 8 lanes holds one key-value head of one beam, 16 bytes a lane, asks for all
// its keys and values at once and keeps everything in registers. Neighbouring teams take neighbouring heads of a beam,
// whose keys of a step are neighbours in memory.
//
// MERGE 0, grinf_beam_attention: write (out, lse), fp32.
// MERGE 1, grinf_beam_merge: K2 and K3 in one pass: fold in the partials that grinf_decode_attention left (splits of
//   the context) and write finished rows. Requests whose context is one split are finished and left alone.
//
// Layouts
//   q            elem [B, W, KV_HEADS * GROUP, HEAD_DIM], strides q_batch and q_row in elements
//   k, v         elem [slots, STEPS, W_max, KV_HEADS, HEAD_DIM], strides slot_stride and step_stride in elements
//   ancestor     int [B, STEPS, W]             slot, step, width, context_len   int [B]
//   out          float (MERGE 0) or elem (MERGE 1) [B, W, KV_HEADS * GROUP, HEAD_DIM]
//   lse          float [B, W, KV_HEADS * GROUP]
//   part         float [splits, B, W, KV_HEADS * GROUP, HEAD_DIM]     part_lse   float, the same without HEAD_DIM
// Launch: grid (ceil(W * KV_HEADS / TEAMS), B), block 128; TEAMS = 1024 / HEAD_DIM.
// Constants: DTYPE (FP16, BF16), HEAD_DIM (64, 128), GROUP, KV_HEADS, STEPS, MERGE.

#include "common.cuh"

#define THREADS 128
#define LANES (HEAD_DIM / 8)
#define TEAMS (THREADS / LANES)
#define HEADS (KV_HEADS * GROUP)

// --- device helpers

// One query row against all keys: softmax weights in place of the scores, returns the log-sum-exp in base 2.
DEVICE float soften(float (&score)[STEPS], int steps) {
    float top = NEG_INF;
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
        if (s < steps) top = fmaxf(top, score[s]);
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        score[s] = s < steps ? exp2_approx(score[s] - top) : 0.0f;
        sum += score[s];
    }
    float norm = 1.0f / sum;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) score[s] *= norm;
    return top + log2_approx(sum);
}

#if MERGE
// Folds the context's splits into a row: `row` is its index in part_lse, `rows` the rows of one split.
DEVICE void merge_splits(float (&out)[8], float lse_log2, const float* part, const float* part_lse, long long row,
                         long long rows, int count) {
    float top = lse_log2;
    for (int i = 0; i < count; ++i) top = fmaxf(top, part_lse[i * rows + row] * LOG2E);
    float weight = exp2_approx(lse_log2 - top);
    float sum = weight;
#pragma unroll
    for (int d = 0; d < 8; ++d) out[d] *= weight;
    for (int i = 0; i < count; ++i) {
        const float* from = part + (i * rows + row) * HEAD_DIM + threadIdx.x % LANES * 8;
        Vec<float, 4> low = load_vec<float, 4>(from), high = load_vec<float, 4>(from + 4);
        weight = exp2_approx(part_lse[i * rows + row] * LOG2E - top);
        sum += weight;
#pragma unroll
        for (int d = 0; d < 4; ++d) {
            out[d] += weight * low.at[d];
            out[d + 4] += weight * high.at[d];
        }
    }
    float norm = 1.0f / sum;
#pragma unroll
    for (int d = 0; d < 8; ++d) out[d] *= norm;
}
#endif

// --- kernel

extern "C" __global__ void __launch_bounds__(THREADS, 2)
#if MERGE
    grinf_beam_merge(
#else
    grinf_beam_attention(
#endif
        const elem* __restrict__ q, const elem* __restrict__ k, const elem* __restrict__ v,
        const int* __restrict__ slot, const int* __restrict__ ancestor, const int* __restrict__ step,
        const int* __restrict__ width, long long q_batch, long long q_row, long long slot_stride, long long step_stride,
        int beams_per_request, float scale_log2,
#if MERGE
        elem* __restrict__ out, const int* __restrict__ context_len, const float* __restrict__ part,
        const float* __restrict__ part_lse, int splits, int min_split
#else
        float* __restrict__ out, float* __restrict__ lse
#endif
    ) {
    int b = blockIdx.y;
    int unit = blockIdx.x * TEAMS + threadIdx.x / LANES;
    int beam = unit / KV_HEADS, head = unit % KV_HEADS, lane = threadIdx.x % LANES;
    bool live = beam < width[b];
#if MERGE
    int keys_per_split = split_keys(context_len[b], splits, min_split);
    int parts = ceil_div(context_len[b], keys_per_split);
    if (parts <= 1) return;
#endif
    if (__syncthreads_or(live) == 0) return;
    int steps = live ? step[b] + 1 : 0;
    uint4 key[STEPS], value[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        key[s] = value[s] = make_uint4(0, 0, 0, 0);
        if (s >= steps) continue;
        int row = __ldg(ancestor + ((long long)b * STEPS + s) * beams_per_request + beam);
        long long at =
            slot[b] * slot_stride + s * step_stride + ((long long)row * KV_HEADS + head) * HEAD_DIM + lane * 8;
        key[s] = load16(k + at);
        value[s] = load16(v + at);
    }
    const elem* query = q + b * q_batch + beam * q_row + head * GROUP * HEAD_DIM + lane * 8;
    float score[GROUP][STEPS];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        float x[8];
        widen16<elem>(live ? load16(query + g * HEAD_DIM) : make_uint4(0, 0, 0, 0), x);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            float y[8], dot = 0.0f;
            widen16<elem>(key[s], y);
#pragma unroll
            for (int d = 0; d < 8; ++d) dot = fmaf(x[d], y[d], dot);
            score[g][s] = warp_sum<LANES>(dot) * scale_log2;
        }
    }
    if (!live) return;
    long long first_row = ((long long)b * beams_per_request + beam) * HEADS + head * GROUP;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        float lse_log2 = soften(score[g], steps);
        float sum[8] = {};
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            float y[8];
            widen16<elem>(value[s], y);
#pragma unroll
            for (int d = 0; d < 8; ++d) sum[d] = fmaf(score[g][s], y[d], sum[d]);
        }
        long long row = first_row + g;
#if MERGE
        merge_splits(sum, lse_log2, part, part_lse, row, (long long)gridDim.y * beams_per_request * HEADS, parts);
        store16(out + row * HEAD_DIM + lane * 8, narrow16<elem>(sum));
#else
        store16(out + row * HEAD_DIM + lane * 8, narrow16<float>(sum));
        store16(out + row * HEAD_DIM + lane * 8 + 4, narrow16<float>(sum + 4));
        if (lane == 0) lse[row] = lse_log2 * LN2;
#endif
    }
}
