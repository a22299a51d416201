// The element-wise work around the matrix products of a layer: AddRmsNorm, QkNormRopeWrite, SwiGlu.
//
// Formulas, all in fp32 with one rounding at each store:
//   total = x + residual;  out = total * rsqrt(mean(total^2) + eps) * weight
//   q, k: norm as above over a head, then rotate: low' = low cos - high sin, high' = high cos + low sin; v: copied
//   out = gate / (1 + exp(-gate)) * up
//
// Every access is 16 bytes wide and every tensor is contiguous. A row of hidden states belongs to ROW_THREADS threads,
// which keep it in registers between the sum and the scaling. A head belongs to HEAD_DIM / 16 lanes: each holds eight
// dimensions of the lower half and the eight that they rotate with, so that the rotation needs no exchange.
//
// Kernels:
//   grinf_add_rms_norm        grid (ceil(rows / (BLOCK / ROW_THREADS))), block BLOCK
//   grinf_qk_norm_rope_write  grid so that a warp takes ROUNDS * 512 / HEAD_DIM heads of one token, block 256
//   grinf_swiglu              grid (ceil(rows * FEATURES / 8 / (256 * 4))), block 256
// Layouts:
//   x, residual (or null), out, total (null where residual is) [rows, HIDDEN]; weight [HIDDEN]
//   qkv [tokens, q_heads + 2 * kv_heads, HEAD_DIM]; q_norm, k_norm [HEAD_DIM] or null
//   cos_sin float [positions, HEAD_DIM]; position int32 [tokens]; pool_row int64 [tokens]
//   k_pool, v_pool [pool rows, kv_heads, HEAD_DIM]
//   gate_up [rows, 2 * FEATURES]; out [rows, FEATURES]
//
// Constants: DTYPE, FP16 or BF16; HIDDEN and ROW_THREADS; HEAD_DIM; FEATURES. Widths are multiples of 8.
// Source: RMSNorm (Zhang and Sennrich, 2019), RoPE (Su et al., 2021) in HF's layout, SwiGLU (Shazeer, 2020).

#include "common.cuh"

#ifndef HIDDEN
#define HIDDEN 1024
#endif
#ifndef ROW_THREADS
#define ROW_THREADS 32
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef FEATURES
#define FEATURES 3072
#endif

#define PACK 8  // elements of one 16-byte access
#define BLOCK (ROW_THREADS > 256 ? ROW_THREADS : 256)
#define UNROLL 4
#ifndef ROUNDS
#define ROUNDS 2  // heads that a lane takes part in
#endif

// --- device helpers

DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Sum over the threads of a row of hidden states; `partial` has a word for each warp of the block.
DEVICE float row_sum(float x, float* partial) {
    x = warp_sum(x);
    if (ROW_THREADS == WARP_SIZE) return x;
    if (threadIdx.x % WARP_SIZE == 0) partial[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    const int first = threadIdx.x / ROW_THREADS * (ROW_THREADS / WARP_SIZE);
    x = 0.0f;
    for (int w = 0; w < ROW_THREADS / WARP_SIZE; ++w) x += partial[first + w];
    return x;
}

// --- kernels

extern "C" __global__ void __launch_bounds__(BLOCK)
    grinf_add_rms_norm(const elem* x, const elem* residual, const elem* weight, elem* out, elem* total, int rows,
                       float eps) {
    constexpr int PACKS = HIDDEN / PACK, PER_THREAD = (PACKS + ROW_THREADS - 1) / ROW_THREADS;
    __shared__ float partial[BLOCK / WARP_SIZE];
    const int row = blockIdx.x * (BLOCK / ROW_THREADS) + threadIdx.x / ROW_THREADS, lane = threadIdx.x % ROW_THREADS;
    const size_t start = static_cast<size_t>(row) * HIDDEN;
    uint4 a[PER_THREAD], r[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int p = lane + i * ROW_THREADS;
        const bool inside = row < rows && p < PACKS;
        a[i] = r[i] = make_uint4(0, 0, 0, 0);
        if (inside) a[i] = load16(x + start + p * PACK);
        if (inside && residual != nullptr) r[i] = load16(residual + start + p * PACK);
    }
    float sum[PER_THREAD][PACK], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        float other[PACK];
        widen16<elem>(a[i], sum[i]);
        widen16<elem>(r[i], other);
#pragma unroll
        for (int j = 0; j < PACK; ++j) {
            sum[i][j] += other[j];
            squares += sum[i][j] * sum[i][j];
        }
    }
    const float scale = rsqrtf(row_sum(squares, partial) / HIDDEN + eps);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int p = lane + i * ROW_THREADS;
        if (row >= rows || p >= PACKS) continue;
        if (total != nullptr) store16(total + start + p * PACK, narrow16<elem>(sum[i]));
        float factor[PACK];
        widen16<elem>(load16(weight + p * PACK), factor);
#pragma unroll
        for (int j = 0; j < PACK; ++j) sum[i][j] *= scale * factor[j];
        store16(out + start + p * PACK, narrow16<elem>(sum[i]));
    }
}

extern "C" __global__ void __launch_bounds__(256)
    grinf_qk_norm_rope_write(elem* qkv, const elem* q_norm, const elem* k_norm, float eps, const float* cos_sin,
                             const int* position, elem* k_pool, elem* v_pool, const long long* pool_row, int tokens,
                             int q_heads, int kv_heads, int keep_k) {
    constexpr int HEAD_LANES = HEAD_DIM / 16, HEADS = WARP_SIZE / HEAD_LANES, HALF = HEAD_DIM / 2;
    const int heads = q_heads + 2 * kv_heads, warps = ceil_div(heads, HEADS * ROUNDS);  // of a token
    const int warp = (blockIdx.x * 256 + threadIdx.x) / WARP_SIZE, token = warp / warps;
    if (token >= tokens) return;
    const int at = threadIdx.x % HEAD_LANES * PACK;
    const int start = warp % warps * HEADS * ROUNDS + threadIdx.x % WARP_SIZE / HEAD_LANES;
    elem* row = qkv + static_cast<size_t>(token) * heads * HEAD_DIM + at;
    uint4 raw[ROUNDS][2];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int head = min(start + r * HEADS, heads - 1);  // a head too many is read, not written
        raw[r][0] = *reinterpret_cast<const uint4*>(row + head * HEAD_DIM);
        raw[r][1] = *reinterpret_cast<const uint4*>(row + head * HEAD_DIM + HALF);
    }
    const float* angles = cos_sin + static_cast<size_t>(position[token]) * HEAD_DIM + at;
    const size_t pool_at = static_cast<size_t>(pool_row[token]) * kv_heads * HEAD_DIM + at;
    float cosine[PACK], sine[PACK];
#pragma unroll
    for (int j = 0; j < PACK; j += 4) {
        widen16<float>(load16(angles + j), cosine + j);
        widen16<float>(load16(angles + HALF + j), sine + j);
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        const int head = start + r * HEADS;
        const bool is_q = head < q_heads, is_v = head >= q_heads + kv_heads;
        float low[PACK], high[PACK], squares = 0.0f;
        widen16<elem>(raw[r][0], low);
        widen16<elem>(raw[r][1], high);
#pragma unroll
        for (int j = 0; j < PACK; ++j) squares += low[j] * low[j] + high[j] * high[j];
        squares = warp_sum<HEAD_LANES>(squares);
        if (head >= heads) continue;
        const elem* weight = is_q ? q_norm : k_norm;
        if (!is_v && weight != nullptr) {
            const float scale = rsqrtf(squares / HEAD_DIM + eps);
            float factor[2][PACK];
            widen16<elem>(load16(weight + at), factor[0]);
            widen16<elem>(load16(weight + at + HALF), factor[1]);
#pragma unroll
            for (int j = 0; j < PACK; ++j) low[j] *= scale * factor[0][j], high[j] *= scale * factor[1][j];
        }
        if (!is_v) {
#pragma unroll
            for (int j = 0; j < PACK; ++j) {
                const float turned = low[j] * cosine[j] - high[j] * sine[j];
                high[j] = high[j] * cosine[j] + low[j] * sine[j];
                low[j] = turned;
            }
            raw[r][0] = narrow16<elem>(low), raw[r][1] = narrow16<elem>(high);
        }
        if (is_q || (keep_k && !is_v)) {
            store16(row + head * HEAD_DIM, raw[r][0]);
            store16(row + head * HEAD_DIM + HALF, raw[r][1]);
        }
        if (!is_q) {
            elem* to = (is_v ? v_pool : k_pool) + pool_at + (head - q_heads) % kv_heads * HEAD_DIM;
            store16(to, raw[r][0]);
            store16(to + HALF, raw[r][1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) grinf_swiglu(const elem* gate_up, elem* out, int rows) {
    constexpr int PACKS = FEATURES / PACK;
    const long long count = static_cast<long long>(rows) * PACKS;
    const long long start = static_cast<long long>(blockIdx.x) * (256 * UNROLL) + threadIdx.x;
    uint4 gates[UNROLL], ups[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long i = start + u * 256;
        if (i >= count) break;
        const elem* from = gate_up + (i / PACKS * 2 * PACKS + i % PACKS) * PACK;
        gates[u] = load16(from);
        ups[u] = load16(from + FEATURES);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long i = start + u * 256;
        if (i >= count) break;
        float gate[PACK], up[PACK];
        widen16<elem>(gates[u], gate);
        widen16<elem>(ups[u], up);
#pragma unroll
        for (int j = 0; j < PACK; ++j) gate[j] = gate[j] * sigmoid(gate[j]) * up[j];
        store16(out + i * PACK, narrow16<elem>(gate));
    }
}
