// Decode attention of beam search, fused, for Hopper: every live beam attends to the context of its request and to the
// keys of its own path, in one softmax.
//
//   out[b, w, h] = softmax(scale * q[b, w, h] . K) V,   K, V = context of b  ++  own keys of beam w at steps 0..step[b]
//
// The beams of a request and the query heads of a key-value head are the rows of one matrix: row r is beam r / GROUP,
// query head r % GROUP of its key-value head. A tile is 128 rows of one (request, key-value head). A block is persistent:
// it takes tiles blockIdx.x, blockIdx.x + gridDim.x, ... and skips those past width[b]. Its warpgroups work apart and
// meet through mbarriers in shared memory:
//   warp 0           loads context blocks of 128 keys by TMA, a page a lane, into two stages of K and two of V
//   warps 1 to 3     gather the "front" of a tile: its queries and its own keys, while the tile before is computed
//   warpgroups 1, 2  64 rows each: S = Q K^T by wgmma, softmax in registers, O += P V by wgmma
// Own keys come first, as one more kind of key block: 64 keys per warpgroup (GROUP steps of its beams), of which a row
// sees those of its own beam. Context blocks follow from last to first, so that only the first has a tail to mask; the
// softmax of a block overlaps the wgmma of the block before it.
// splits > 1: a tile takes one part of the context, own keys belong to part 0, grinf_merge_splits joins the parts. The
// request's own context_len cuts them.
//
// q                  elem [B, W, Hq, HEAD_DIM], strides q_batch, q_row of the first two axes in elements
// k_map, v_map       TMA maps of the page pools as [rows, Hkv, HEAD_DIM], box [BOX, 1, 64], 128-byte swizzle
// page_table         int [B, page_columns]; key j of request b is row j % PAGE_SIZE of page page_table[b, j / PAGE_SIZE]
// k_beams, v_beams   elem [slots, steps, max_width, Hkv, HEAD_DIM]
// ancestor           int [B, steps, W]              context_len, slot, step, width   int [B]
// out                elem [B, W, Hq, HEAD_DIM]; written if splits == 1, else by grinf_merge_splits
// part, part_lse     float [splits, B, W, Hq, HEAD_DIM] and [splits, B, W, Hq], natural log; used if splits > 1
// Rows w >= width[b] are not written.
//
// Launch: any grid (one block per multiprocessor), block 384, dynamic shared memory shared_bytes() of the binding.
//   grinf_merge_splits: grid (ceil(B * W * Hq / 8)), block 256.
// Constants: DTYPE (FP16, BF16), HEAD_DIM (64, 128), GROUP = Hq / Hkv (1, 2, 4, 8), PAGE_SIZE (a power of two >= 16).
// Source: warp specialisation and the overlap of softmax with wgmma after FlashAttention-3 (Shah et al., 2024), splits
// after Flash-Decoding (Dao et al., 2023), one read of a shared context for all its queries after Hydragen (Juravsky et
// al., 2024).

#include "common.cuh"
#include "hopper.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef GROUP
#define GROUP 2
#endif
#ifndef PAGE_SIZE
#define PAGE_SIZE 64
#endif

constexpr int ROWS = 128;                                 // rows of a tile; keys of a context block
constexpr int BEAMS = 64 / GROUP;                         // beams of a warpgroup
constexpr int PANEL = ROWS * 128;                         // bytes of 64 columns of 128 rows
constexpr int TILE = PANEL * HEAD_DIM / 64;               // bytes of 128 rows
constexpr int CHUNKS = HEAD_DIM / 8;                      // 16-byte chunks of a row
constexpr int BOX = PAGE_SIZE < ROWS ? PAGE_SIZE : ROWS;  // keys of one TMA copy
constexpr int GATHERERS = 96;                             // threads that gather fronts

// Shared memory, in bytes from its start. K and V of the context have two stages each.
enum { QUERIES = 0, OWN_K = TILE, OWN_V = 2 * TILE, CONTEXT_K = 3 * TILE, CONTEXT_V = 5 * TILE, CONTROL = 7 * TILE };

// Named barriers; the first two are one a consumer warpgroup.
enum { CONSUMERS = 1, GATHER = 3, TURNS = 4 };

// A tile as the consumers see it; request < 0 ends them.
struct Work {
    int request, head, row, split, width, length, steps, lo, hi;
};

struct Control {
    u64 front_full, front_empty, k_full[2], k_empty[2], v_full[2], v_empty[2];
    Work work;
    int own_row[ROWS];
};

struct Args {
    const elem *q, *k_beams, *v_beams;
    const int *page_table, *context_len, *slot, *ancestor, *step, *width;
    elem* out;
    float *part, *part_lse;
    long long q_batch, q_row;
    int batch, beams, kv_heads, page_columns, steps, max_width, splits;
    float scale;
};

// --- device helpers: tiles

DEVICE int split_blocks(int length, int splits) { return ceil_div(ceil_div(length, ROWS), splits); }

// Calls take(work) for every tile of this block that has rows and keys.
template <typename Take>
DEVICE void for_each_tile(const Args& args, Take take) {
    int row_tiles = ceil_div(args.beams * GROUP, ROWS), tiles = args.batch * args.kv_heads * row_tiles * args.splits;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Work work;
        int rest = tile / args.splits;
        work.split = tile % args.splits;
        work.row = rest % row_tiles * ROWS;
        work.head = rest / row_tiles % args.kv_heads;
        work.request = rest / row_tiles / args.kv_heads;
        work.width = args.width[work.request];
        work.length = args.context_len[work.request];
        work.steps = work.split ? 0 : args.step[work.request] + 1;
        int blocks = ceil_div(work.length, ROWS), share = split_blocks(work.length, args.splits);
        work.lo = min(work.split * share, blocks);
        work.hi = min(work.lo + share, blocks);
        if (work.row < work.width * GROUP && (work.split == 0 || work.lo < work.hi)) take(work);
    }
}

// Byte of 16-byte chunk `chunk` of row `row` in a tile.
DEVICE int swizzled(int row, int chunk) { return (chunk >> 3) * PANEL + row * 128 + ((chunk & 7) ^ (row & 7)) * 16; }

// --- device helpers: the producers

// One stage of K or V: each lane copies its page's part of a block that has `keys` keys left.
DEVICE void load_stage(u32 to, const TensorMap& map, int head, int row, int keys, u64& full, u64& empty, u32 parity) {
    int lane = threadIdx.x % WARP_SIZE, boxes = min(ROWS / BOX, ceil_div(keys, BOX));
    wait(empty, parity);
    if (lane == 0) arrive_expecting(full, boxes * BOX * HEAD_DIM * 2);
    __syncwarp();
#ifdef ALT_LANE
    for (int box = 0; box < boxes; ++box) {
        int r = __shfl_sync(FULL_MASK, row, box);
        if (lane == 0)
            for (int panel = 0; panel < HEAD_DIM / 64; ++panel)
                copy_box(to + panel * PANEL + box * BOX * 128, map, panel * 64, head, r, full);
    }
    return;
#endif
    if (lane >= boxes) return;
#pragma unroll
    for (int panel = 0; panel < HEAD_DIM / 64; ++panel)
        copy_box(to + panel * PANEL + lane * BOX * 128, map, panel * 64, head, row, full);
}

// Warp 0: the context blocks of every tile, last first.
DEVICE void load_context(const Args& args, const TensorMap& k_map, const TensorMap& v_map, u32 shared, Control& control) {
    u32 turn = 0;
    for_each_tile(args, [&](const Work& work) {
        for (int block = work.hi - 1; block >= work.lo; --block, ++turn) {
            int key = block * ROWS + threadIdx.x * BOX, keys = work.length - block * ROWS, row = 0, stage = turn & 1;
            if (threadIdx.x < ROWS / BOX && key < work.length)
                row = args.page_table[work.request * args.page_columns + key / PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE;
            u32 to = shared + stage * TILE, parity = (turn >> 1 & 1) ^ 1;
            load_stage(to + CONTEXT_K, k_map, work.head, row, keys, control.k_full[stage], control.k_empty[stage], parity);
            load_stage(to + CONTEXT_V, v_map, work.head, row, keys, control.v_full[stage], control.v_empty[stage], parity);
        }
    });
}

// Row of BeamKV that holds key n of the own keys from step `first` on; -1: none.
DEVICE int own_row(const Args& args, const Work& work, int first, int n) {
    int s = first + n % 64 / BEAMS, beam = work.row / GROUP + n / 64 * BEAMS + n % BEAMS;
    if (s >= work.steps || beam >= work.width) return -1;
    int ancestor = args.ancestor[(work.request * args.steps + s) * args.beams + beam];
    return (args.slot[work.request] * args.steps + s) * args.max_width + ancestor;
}

// Warps 1 to 3: the fronts of every tile, GROUP steps of own keys at a time.
DEVICE void gather_fronts(const Args& args, u32 shared, Control& control) {
    const int id = threadIdx.x - WARP_SIZE, chunk = id % CHUNKS;
    u32 round = 0;
    for_each_tile(args, [&](const Work& work) {
        int first = 0;
        do {
            // Where the own keys lie is looked up while the consumers still read the round before.
            sync_threads<GATHERERS>(GATHER);
            for (int n = id; n < ROWS; n += GATHERERS) control.own_row[n] = own_row(args, work, first, n);
            wait(control.front_empty, (round & 1) ^ 1);
            sync_threads<GATHERERS>(GATHER);
            if (id == 0) control.work = work;
            for (int row = id / CHUNKS; first == 0 && row < ROWS; row += GATHERERS / CHUNKS) {
                int beam = (work.row + row) / GROUP, head = work.head * GROUP + row % GROUP;
                bool live = beam < work.width;
                const elem* from = args.q + work.request * args.q_batch + (live ? beam : 0) * args.q_row + head * HEAD_DIM;
                cp_async16(shared + QUERIES + swizzled(row, chunk), from + chunk * 8, live);
            }
            for (int row = id / CHUNKS; work.steps && row < ROWS; row += GATHERERS / CHUNKS) {
                int at = control.own_row[row];
                long long from = ((long long)max(at, 0) * args.kv_heads + work.head) * HEAD_DIM + chunk * 8;
                cp_async16(shared + OWN_K + swizzled(row, chunk), args.k_beams + from, at >= 0);
                cp_async16(shared + OWN_V + swizzled(row, chunk), args.v_beams + from, at >= 0);
            }
            cp_async_commit();
            cp_async_wait<0>();
            fence_async();
            arrive(control.front_full);
            ++round;
            first += GROUP;
        } while (first < work.steps);
    });
    wait(control.front_empty, (round & 1) ^ 1);
    if (id == 0) control.work.request = -1;
    arrive(control.front_full);
}

// --- device helpers: the consumers. A thread holds two rows of its warpgroup's 64: element i of an accumulator is row
// row_of(i), column column_of(i).

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

DEVICE void load_queries(u32 (&q)[HEAD_DIM / 4], u32 tile, int group) {
    int lane = threadIdx.x % WARP_SIZE, row = group * 64 + threadIdx.x % 128 / WARP_SIZE * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k)
        ldmatrix4(*reinterpret_cast<u32(*)[4]>(&q[4 * k]), tile + swizzled(row, 2 * k + lane / 16));
}

// The own keys of a front: key n of this warpgroup is step n / BEAMS of beam n % BEAMS.
DEVICE void attend_own(float (&o)[HEAD_DIM / 2], Softmax& softmax, const u32 (&q)[HEAD_DIM / 4], u32 shared, int steps,
                       int group, float scale_log2) {
    float s[32], decay[2];
    u32 p[16];
    wgmma_fence();
    start_scores(s, q, shared + OWN_K + group * 64 * 128);
    wgmma_wait<0>();
    pin(s);
#pragma unroll
    for (int i = 0; i < 32; ++i)
        if (column_of(i) % BEAMS != row_of(i) / GROUP || column_of(i) / BEAMS >= steps) s[i] = NEG_INF;
    softmax.take(s, decay, scale_log2);
    rescale_and_pack(o, decay, p, s);
    wgmma_fence();
    start_values(o, p, shared + OWN_V + group * 64 * 128);
    wgmma_wait<0>();
    pin(o);
}

// Zero the values past the last key: their weights are 0, but 0 times what a stale page holds may be NaN. Both
// warpgroups write the same zeros, each for itself, so that neither waits for the other.
DEVICE void zero_tail(u32 values, int keys, int group) {
    for (int i = keys * CHUNKS + threadIdx.x % 128; i < ROWS * CHUNKS; i += 128)
        zero16(values + swizzled(i / CHUNKS, i % CHUNKS));
    fence_async();
    sync_threads<128>(CONSUMERS + group);
}

// Context blocks [lo, hi), last first. `turn` counts the blocks of this thread block: stage and phase.
DEVICE void attend_context(float (&o)[HEAD_DIM / 2], Softmax& softmax, const u32 (&q)[HEAD_DIM / 4], u32 shared,
                           Control& control, const Work& work, u32& turn, int group, float scale_log2) {
    float s[ROWS / 2], decay[2];
    u32 p[ROWS / 4];
    const bool signals = threadIdx.x % WARP_SIZE == 0;
    const int keys = min(ROWS, work.length - (work.hi - 1) * ROWS);

    wait(control.k_full[turn & 1], turn >> 1 & 1);
    wgmma_fence();
    start_scores(s, q, shared + CONTEXT_K + (turn & 1) * TILE);
    wgmma_wait<0>();
    pin(s);
    if (signals) arrive(control.k_empty[turn & 1]);
    if (keys < ROWS) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i)
            if (column_of(i) >= keys) s[i] = NEG_INF;
    }
    softmax.take(s, decay, scale_log2);
    rescale_and_pack(o, decay, p, s);
    wait(control.v_full[turn & 1], turn >> 1 & 1);
    if (keys < ROWS) zero_tail(shared + CONTEXT_V + (turn & 1) * TILE, keys, group);

    for (int block = work.hi - 2; block >= work.lo; --block) {
        u32 next = turn + 1;
        wait(control.k_full[next & 1], next >> 1 & 1);
#ifdef PINGPONG
        sync_threads<256>(TURNS + group);
#endif
        wgmma_fence();
        start_scores(s, q, shared + CONTEXT_K + (next & 1) * TILE);
        start_values(o, p, shared + CONTEXT_V + (turn & 1) * TILE);
#ifdef PINGPONG
        arrive_threads<256>(TURNS + (group ^ 1));
#endif
        wgmma_wait<1>();
        pin(s);
#ifdef EARLY
        if (signals) arrive(control.k_empty[next & 1]);
        softmax.take(s, decay, scale_log2);
#else
        softmax.take(s, decay, scale_log2);
        // K is free since the wait; asking for the sums (never negative) makes this a point that the wait for O, next,
        // cannot be moved across: the assembler would put it before the softmax that it shall overlap.
        if (signals && !(softmax.sum[0] + softmax.sum[1] < 0.f)) arrive(control.k_empty[next & 1]);
#endif
        wgmma_wait<0>();
        pin(o);
        if (signals) arrive(control.v_empty[turn & 1]);
        rescale_and_pack(o, decay, p, s);
        turn = next;
        wait(control.v_full[turn & 1], turn >> 1 & 1);
    }
    wgmma_fence();
    start_values(o, p, shared + CONTEXT_V + (turn & 1) * TILE);
    wgmma_wait<0>();
    pin(o);
    if (signals) arrive(control.v_empty[turn & 1]);
    ++turn;
}

// Row r (0, 1) of this thread. Neighbouring lanes trade halves, so that each stores 8 bytes and four fill 32.
DEVICE void store_row(elem* to, const float (&o)[HEAD_DIM / 2], int r, float factor) {
    const int lane = threadIdx.x & 3, odd = lane & 1;
#pragma unroll
    for (int i = 2 * r; i < HEAD_DIM / 2; i += 8) {
        u32 low = pack2<elem>(o[i] * factor, o[i + 1] * factor), high = pack2<elem>(o[i + 4] * factor, o[i + 5] * factor);
        u32 other = __shfl_xor_sync(FULL_MASK, odd ? low : high, 1);
        uint2 words = odd ? make_uint2(other, high) : make_uint2(low, other);
        if (to) *reinterpret_cast<uint2*>(to + 2 * (i - 2 * r) + 8 * odd + 2 * (lane & 2)) = words;
    }
}

DEVICE void write_rows(const Args& args, const Work& work, const float (&o)[HEAD_DIM / 2], const Softmax& softmax, int group) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = warp_sum<4>(softmax.sum[r]);
        int row = work.row + group * 64 + row_of(2 * r), beam = row / GROUP;
        int heads = args.kv_heads * GROUP, head = work.head * GROUP + row % GROUP;
        long long at = ((long long)work.request * args.beams + beam) * heads + head;
        bool live = beam < work.width;
        if (args.splits == 1) {
            store_row(live ? args.out + at * HEAD_DIM : nullptr, o, r, 1.f / sum);
        } else if (live) {
            at += (long long)work.split * args.batch * args.beams * heads;
            if (threadIdx.x % 4 == 0) args.part_lse[at] = softmax.top[r] * args.scale + logf(sum);
#pragma unroll
            for (int i = 2 * r; i < HEAD_DIM / 2; i += 4)
                *reinterpret_cast<float2*>(args.part + at * HEAD_DIM + column_of(i)) = make_float2(o[i] / sum, o[i + 1] / sum);
        }
    }
}

// A consumer warpgroup: its rows of every front it is given.
DEVICE void attend(const Args& args, u32 shared, Control& control, int group) {
    const float scale_log2 = args.scale * LOG2E;
    u32 round = 0, turn = 0;
    for (;;) {
        wait(control.front_full, round & 1);
        const Work work = control.work;
        if (work.request < 0) break;
        u32 q[HEAD_DIM / 4];
        float o[HEAD_DIM / 2] = {};
        Softmax softmax = {{NEG_INF, NEG_INF}, {0.f, 0.f}};
        load_queries(q, shared + QUERIES, group);
        for (int first = 0;;) {
            if (work.steps) attend_own(o, softmax, q, shared, work.steps - first, group, scale_log2);
            __syncwarp();
            if (threadIdx.x % WARP_SIZE == 0) arrive(control.front_empty);
            ++round;
            first += GROUP;
            if (first >= work.steps) break;
            wait(control.front_full, round & 1);
        }
        if (work.lo < work.hi) attend_context(o, softmax, q, shared, control, work, turn, group, scale_log2);
        write_rows(args, work, o, softmax, group);
    }
}

// --- kernels

extern "C" __global__ void __launch_bounds__(384, 1) grinf_decode_attention_sm90(
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const elem* q, const elem* k_beams,
    const elem* v_beams, const int* page_table, const int* context_len, const int* slot, const int* ancestor,
    const int* step, const int* width, elem* out, float* part, float* part_lse, long long q_batch, long long q_row,
    int batch, int beams, int kv_heads, int page_columns, int steps, int max_width, int splits, float scale) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    const Args args = {q,    k_beams,  v_beams, page_table, context_len, slot,  ancestor, step,         width, out,
                       part, part_lse, q_batch, q_row,      batch,       beams, kv_heads, page_columns, steps, max_width,
                       splits, scale};
    const u32 shared = shared_address(bytes);
    Control& control = *reinterpret_cast<Control*>(bytes + CONTROL);

    if (threadIdx.x == 0) {
        barrier_init(control.front_full, GATHERERS);
        barrier_init(control.front_empty, 8);
        for (int stage = 0; stage < 2; ++stage) {
            barrier_init(control.k_full[stage], 1);
            barrier_init(control.v_full[stage], 1);
            barrier_init(control.k_empty[stage], 8);  // the consumers' warps
            barrier_init(control.v_empty[stage], 8);
        }
        fence_async();
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        give_registers<56>();
        if (threadIdx.x < WARP_SIZE)
            load_context(args, k_map, v_map, shared, control);
        else
            gather_fronts(args, shared, control);
    } else {
        take_registers<224>();
#ifdef PINGPONG
        if (threadIdx.x >= 256) arrive_threads<256>(TURNS);
#endif
        attend(args, shared, control, threadIdx.x / 128 - 1);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    grinf_merge_splits(const float* part, const float* part_lse, const int* context_len, const int* width, elem* out,
                       int rows, int beams, int heads, int splits) {
    constexpr int N = HEAD_DIM / WARP_SIZE;
    const int row = blockIdx.x * 8 + threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    if (row >= rows || row / heads % beams >= width[row / heads / beams]) return;
    const int length = context_len[row / heads / beams], share = split_blocks(length, splits);
    const int parts = share ? ceil_div(ceil_div(length, ROWS), share) : 1;  // part 0 has the own keys
    float top = NEG_INF, total = 0.f, sum[N] = {};
    for (int i = 0; i < parts; ++i) top = fmaxf(top, part_lse[(long long)i * rows + row]);
    for (int i = 0; i < parts; ++i) {
        long long at = (long long)i * rows + row;
        float weight = exp2_approx((part_lse[at] - top) * LOG2E);
        Vec<float, N> o = load_vec<float, N>(part + at * HEAD_DIM + lane * N);
        total += weight;
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = fmaf(weight, o.at[j], sum[j]);
    }
    Vec<elem, N> o;
#pragma unroll
    for (int j = 0; j < N; ++j) o.at[j] = from_float<elem>(sum[j] / total);
    store_vec(out + (long long)row * HEAD_DIM + lane * N, o);
}
