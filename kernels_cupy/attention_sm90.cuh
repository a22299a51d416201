// Attention of one warpgroup on Hopper: 64 query rows in registers against keys and values in shared memory.
//
// Included after hopper.cuh. Constants: HEAD_DIM (64, 128), GROUP (query heads of a key-value head). A tile is 128 rows
// of HEAD_DIM elements, in panels of 64 columns under the 128-byte swizzle. A thread holds two rows of its warpgroup's
// 64: element i of an accumulator is row row_of(i), column column_of(i). Weights are rounded to elem for the tensor
// cores, sums are fp32.
// Source: online softmax (Milakov and Gimelshein, 2018) in the loop of FlashAttention-3 (Shah et al., 2024).

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef GROUP
#define GROUP 2
#endif

constexpr int ROWS = 128;                    // rows of a tile
constexpr int PANEL = ROWS * 128;            // bytes of 64 columns
constexpr int TILE = PANEL * HEAD_DIM / 64;  // bytes of a tile
constexpr int CHUNKS = HEAD_DIM / 8;         // 16-byte chunks of a row

// Byte of 16-byte chunk `chunk` of row `row` in a tile.
DEVICE int swizzled(int row, int chunk) { return (chunk >> 3) * PANEL + row * 128 + ((chunk & 7) ^ (row & 7)) * 16; }

DEVICE int row_of(int i) { return threadIdx.x % 128 / WARP_SIZE * 16 + threadIdx.x % WARP_SIZE / 4 + (i & 2) * 4; }
DEVICE int column_of(int i) { return 8 * (i >> 2) + 2 * (threadIdx.x & 3) + (i & 1); }

// Start s = Q K^T for as many keys as s has columns.
template <int N>
DEVICE void start_scores(float (&s)[N], const u32 (&q)[HEAD_DIM / 4], u32 keys) {
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k)
        wgmma<0>(s, q, k, descriptor(keys + (k / 4) * PANEL + (k % 4) * 32, 16), k > 0);
    wgmma_commit();
}

// Start o += P V for as many keys as p has columns.
template <int N>
DEVICE void start_values(float (&o)[HEAD_DIM / 2], const u32 (&p)[N], u32 values) {
#pragma unroll
    for (int k = 0; k < N / 4; ++k) wgmma<1>(o, p, k, descriptor(values + k * 16 * 128, PANEL), true);
    wgmma_commit();
}

struct Softmax {
    float top[2], sum[2];  // of raw scores; the sum is this thread's share of its rows

    // Turn scores into weights against the new maximum; `decay` is what older weights are worth now.
    template <int N>
    DEVICE void take(float (&s)[N], float (&decay)[2], float scale_log2) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float best = top[r], part = 0.f;
#pragma unroll
            for (int i = 2 * r; i < N; i += 4) best = fmaxf(best, fmaxf(s[i], s[i + 1]));
            best = warp_max<4>(best);
            decay[r] = exp2_approx((top[r] - best) * scale_log2);
            top[r] = best;
#pragma unroll
            for (int i = 2 * r; i < N; i += 4) {
                s[i] = exp2_approx(fmaf(s[i], scale_log2, -best * scale_log2));
                s[i + 1] = exp2_approx(fmaf(s[i + 1], scale_log2, -best * scale_log2));
                part += s[i] + s[i + 1];
            }
            sum[r] = fmaf(sum[r], decay[r], part);
        }
    }
};

// Bring o to the new maximum and round the weights for the tensor cores.
template <int N>
DEVICE void rescale_and_pack(float (&o)[HEAD_DIM / 2], const float (&decay)[2], u32 (&p)[N / 2], const float (&s)[N]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= decay[(i >> 1) & 1];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) p[i] = pack2<elem>(s[2 * i], s[2 * i + 1]);
}

// The A fragments of the rows of warpgroup `group` of a tile.
DEVICE void load_queries(u32 (&q)[HEAD_DIM / 4], u32 tile, int group) {
    int lane = threadIdx.x % WARP_SIZE, row = group * 64 + threadIdx.x % 128 / WARP_SIZE * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k)
        ldmatrix4(*reinterpret_cast<u32(*)[4]>(&q[4 * k]), tile + swizzled(row, 2 * k + lane / 16));
}

// Two stages of key blocks and two of their values, in shared memory: TILE bytes each, stage after stage. A block is
// full when TMA has brought it, and empty again when the eight warps of the consumers are done with it.
struct Stages {
    u64 k_full[2], k_empty[2], v_full[2], v_empty[2];
};

DEVICE void stages_init(Stages& stages) {
    for (int at = 0; at < 2; ++at) {
        barrier_init(stages.k_full[at], 1);
        barrier_init(stages.v_full[at], 1);
        barrier_init(stages.k_empty[at], 8);
        barrier_init(stages.v_empty[at], 8);
    }
}

// Zero the values past the last key: their weights are 0, but 0 times what a stale page holds may be NaN. Both
// warpgroups write the same zeros, each for itself, so that neither waits for the other.
DEVICE void zero_tail(u32 values, int keys, int group) {
    for (int i = keys * CHUNKS + threadIdx.x % 128; i < ROWS * CHUNKS; i += 128)
        zero16(values + swizzled(i / CHUNKS, i % CHUNKS));
    fence_async();
    sync_threads<128>(1 + group);
}

// The key blocks of a tile, `blocks` of them, at least one. Only the first may need a mask: if `cut`, element i of its
// scores counts only where !masked(i), and its values past `live` keys are zeroed. `turn` counts the blocks of this
// thread block: stage and phase. The softmax of a block overlaps the wgmma of the block before it.
template <typename Masked>
DEVICE void attend_blocks(float (&o)[HEAD_DIM / 2], Softmax& softmax, const u32 (&q)[HEAD_DIM / 4], u32 keys,
                          u32 values, Stages& stages, u32& turn, int blocks, int live, bool cut, Masked masked,
                          int group, float scale_log2) {
    float s[ROWS / 2], decay[2];
    u32 p[ROWS / 4];
    const bool signals = threadIdx.x % WARP_SIZE == 0;

    wait(stages.k_full[turn & 1], turn >> 1 & 1);
    wgmma_fence();
    start_scores(s, q, keys + (turn & 1) * TILE);
    wgmma_wait<0>();
    pin(s);
    if (signals) arrive(stages.k_empty[turn & 1]);
    if (cut) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i)
            if (masked(i)) s[i] = NEG_INF;
    }
    softmax.take(s, decay, scale_log2);
    rescale_and_pack(o, decay, p, s);
    wait(stages.v_full[turn & 1], turn >> 1 & 1);
    if (live < ROWS) zero_tail(values + (turn & 1) * TILE, live, group);

    for (int block = 1; block < blocks; ++block) {
        u32 next = turn + 1;
        wait(stages.k_full[next & 1], next >> 1 & 1);
        wgmma_fence();
        start_scores(s, q, keys + (next & 1) * TILE);
        start_values(o, p, values + (turn & 1) * TILE);
        wgmma_wait<1>();
        pin(s);
        softmax.take(s, decay, scale_log2);
        // K is free since the wait; asking for the sums (never negative) makes this a point that the wait for O, next,
        // cannot be moved across: the assembler would put it before the softmax that it shall overlap.
        if (signals && !(softmax.sum[0] + softmax.sum[1] < 0.f)) arrive(stages.k_empty[next & 1]);
        wgmma_wait<0>();
        pin(o);
        if (signals) arrive(stages.v_empty[turn & 1]);
        rescale_and_pack(o, decay, p, s);
        turn = next;
        wait(stages.v_full[turn & 1], turn >> 1 & 1);
    }
    wgmma_fence();
    start_values(o, p, values + (turn & 1) * TILE);
    wgmma_wait<0>();
    pin(o);
    if (signals) arrive(stages.v_empty[turn & 1]);
    ++turn;
}

// Row r (0, 1) of this thread. Neighbouring lanes trade halves, so that each stores 8 bytes and four fill 32.
DEVICE void store_row(elem* to, const float (&o)[HEAD_DIM / 2], int r, float factor) {
    const int lane = threadIdx.x & 3, odd = lane & 1;
#pragma unroll
    for (int i = 2 * r; i < HEAD_DIM / 2; i += 8) {
        u32 low = pack2<elem>(o[i] * factor, o[i + 1] * factor);
        u32 high = pack2<elem>(o[i + 4] * factor, o[i + 5] * factor);
        u32 other = __shfl_xor_sync(FULL_MASK, odd ? low : high, 1);
        uint2 words = odd ? make_uint2(other, high) : make_uint2(low, other);
        if (to) *reinterpret_cast<uint2*>(to + 2 * (i - 2 * r) + 8 * odd + 2 * (lane & 2)) = words;
    }
}
