// K3: one softmax from partial ones over disjoint key sets.
//
//   lse[r] = ln sum_i exp(lse_i[r]),   out[r, :] = sum_i exp(lse_i[r] - lse[r]) out_i[r, :]
//
// over COUNT partials `a` that lie behind each other (the splits of a context) and, if given, one more `b` (the beams'
// own keys). A partial whose lse is -inf holds no key: its rows are not read. No key at all: out 0, lse -inf.
//
// Layouts: out_a float [count, rows, HEAD_DIM], lse_a float [count, rows]; out_b float [rows, HEAD_DIM] or null, lse_b
//   float [rows]; out elem [rows, HEAD_DIM]; lse float [rows] or null.
// Launch: grid (ceil(rows / TEAMS)), block 128; TEAMS = 512 / HEAD_DIM: a team of HEAD_DIM / 4 lanes holds a row.
// Constants: DTYPE (of out: FP32, FP16, BF16), HEAD_DIM (64, 128).

#include "common.cuh"

#define THREADS 128
#define LANES (HEAD_DIM / 4)

// --- device helpers

DEVICE void store4(float* to, const float (&x)[4]) { store_vec<float, 4>(to, {x[0], x[1], x[2], x[3]}); }
template <typename T>
DEVICE void store4(T* to, const float (&x)[4]) {
    store_vec<u32, 2>(reinterpret_cast<u32*>(to), {pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3])});
}

// --- kernel

extern "C" __global__ void __launch_bounds__(THREADS)
    grinf_merge_attention(const float* __restrict__ out_a, const float* __restrict__ lse_a,
                          const float* __restrict__ out_b, const float* __restrict__ lse_b, elem* __restrict__ out,
                          float* __restrict__ lse, int count, int rows) {
    int row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    int lane = threadIdx.x % LANES;
    if (row >= rows) return;
    float top = out_b ? lse_b[row] : NEG_INF;
    for (int i = 0; i < count; ++i) top = fmaxf(top, lse_a[(long long)i * rows + row]);
    float sum = 0.0f, x[4] = {};
    auto fold = [&](const float* part, float part_lse) {
        if (part_lse == NEG_INF) return;
        float weight = exp2_approx((part_lse - top) * LOG2E);
        Vec<float, 4> piece = load_vec<float, 4>(part + lane * 4);
        sum += weight;
#pragma unroll
        for (int d = 0; d < 4; ++d) x[d] = fmaf(weight, piece.at[d], x[d]);
    };
    for (int i = 0; i < count; ++i) {
        long long at = (long long)i * rows + row;
        fold(out_a + at * HEAD_DIM, lse_a[at]);
    }
    if (out_b) fold(out_b + (long long)row * HEAD_DIM, lse_b[row]);
    float norm = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int d = 0; d < 4; ++d) x[d] *= norm;
    store4(out + (long long)row * HEAD_DIM + lane * 4, x);
    if (lse && lane == 0) lse[row] = sum == 0.0f ? NEG_INF : top + log2_approx(sum) * LN2;
}
