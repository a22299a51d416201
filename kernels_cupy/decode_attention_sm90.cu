// Decode attention of beam search, fused, for Hopper: every live beam attends to the context of its request and to the
// keys of its own path, in one softmax.
//
//   out[b, w, h] = softmax(scale * q[b, w, h] . K) V,   K, V = context of b  ++  own keys of beam w at steps 0..step[b]
//
// The beams of a request times the query heads of a key-value head are the rows of one matrix: row r is beam r / GROUP,
// query head r % GROUP. A tile is 128 rows of one request and key-value head. Thread blocks are persistent: each takes
// tiles blockIdx.x, blockIdx.x + gridDim.x, ... Its warps work apart and meet through mbarriers in shared memory:
//   warp 0           loads context blocks of 128 keys by TMA, a page a lane, into two stages of K and two of V
//   warps 1 to 3     gather the "front" of a tile, its queries and own keys, while the tile before is computed
//   warpgroups 1, 2  64 rows each: S = Q K^T by wgmma, softmax in registers, O += P V by wgmma
// Own keys come first, as one more kind of key block: 64 keys per warpgroup (GROUP steps of its beams), of which a row
// sees those of its own beam. Context blocks follow from last to first, so that only the first has a tail to mask; the
// softmax of a block overlaps the wgmma of the block before it.
// OWN_LAST: where a thread block has a single tile, no tile before hides the gathering of its front. Then own keys come
// last, and are asked for once the queries are here, so that they do not take their bandwidth.
// splits > 1: a tile takes one part of the context, cut by the request's own context_len, and part 0 the own keys; the
// parts are joined by grinf_merge_attention.
//
// q                  elem [B, W, Hq, HEAD_DIM], strides q_batch, q_row of the first two axes in elements
// k_map, v_map       TMA maps of the page pools as [rows, Hkv, HEAD_DIM], box [BOX, 1, 64], 128-byte swizzle
// page_table         int [B, page_columns]; key j of request b: row j % PAGE_SIZE of page page_table[b, j / PAGE_SIZE]
// k_beams, v_beams   elem [slots, steps, max_width, Hkv, HEAD_DIM]
// ancestor           int [B, steps, W]              context_len, slot, step, width   int [B]
// out                elem [B, W, Hq, HEAD_DIM]; written if splits == 1
// part, part_lse     float [splits, B, W, Hq, HEAD_DIM] and [splits, B, W, Hq], natural log; written if splits > 1. A
//                    part without keys has lse -inf and rows that mean nothing.
// Rows w >= width[b] are not written.
//
// Launch: any grid (one block per multiprocessor; with splits > 1 as many as there are tiles, since a tile without own
// keys gives its queries back before they are used), block 384, dynamic shared memory shared_bytes() of the binding.
// Constants: DTYPE (FP16, BF16), HEAD_DIM (64, 128), GROUP = Hq / Hkv (1, 2, 4, 8), PAGE_SIZE (a power of two >= 16),
// OWN_LAST (1 only where the grid has a block for every tile).
// Source: warp specialisation and the overlap of softmax with wgmma after FlashAttention-3 (Shah et al., 2024), splits
// after Flash-Decoding (Dao et al., 2023), one read of a shared context for all its queries after Hydragen (Juravsky et
// al., 2024).

#include "common.cuh"
#include "hopper.cuh"
#include "attention_sm90.cuh"

#ifndef PAGE_SIZE
#define PAGE_SIZE 64
#endif
#ifndef OWN_LAST
#define OWN_LAST 0
#endif

constexpr int BEAMS = 64 / GROUP;                         // beams of a warpgroup
constexpr int BOX = PAGE_SIZE < ROWS ? PAGE_SIZE : ROWS;  // keys of one TMA copy; a context block has ROWS keys

// Shared memory, in bytes from its start: the three parts of a front, two stages each of context K and V, the rest.
enum { QUERIES = 0, OWN_K = TILE, OWN_V = 2 * TILE, CONTEXT_K = 3 * TILE, CONTEXT_V = 5 * TILE, CONTROL = 7 * TILE };

// A tile as the consumers see it; request < 0 ends them.
struct Work {
    int request, slot, head, row, split, width, length, steps, lo, hi;
};

struct Control {
    u64 front_full, front_empty, queries_full;
    Stages stages;
    Work work;
    int rows[3][ROWS];  // where each row of the front's parts starts, in chunks; -1: zeros
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

// Calls take(work) for every tile of this thread block that has live rows.
template <typename Take>
DEVICE void for_each_tile(const Args& args, Take take) {
    const int row_tiles = ceil_div(args.beams * GROUP, ROWS), tiles = args.kv_heads * row_tiles * args.splits;
    for (int tile = blockIdx.x; tile < args.batch * tiles; tile += gridDim.x) {
        Work work;
        work.request = tile / tiles;  // first of all, so that what hangs on it loads early
        work.slot = args.slot[work.request];
        work.width = args.width[work.request];
        work.length = args.context_len[work.request];
        work.steps = args.step[work.request] + 1;
        int rest = tile % tiles;
        work.split = rest % args.splits;
        work.row = rest / args.splits % row_tiles * ROWS;
        work.head = rest / args.splits / row_tiles;
        if (work.split > 0) work.steps = 0;
        int blocks = ceil_div(work.length, ROWS), share = ceil_div(blocks, args.splits);
        work.lo = min(work.split * share, blocks);
        work.hi = min(work.lo + share, blocks);
        if (work.row < work.width * GROUP) take(work);
    }
}

// --- device helpers: the producers

// One stage of K or V: each lane copies its page's part of a block that has `keys` keys left.
DEVICE void load_stage(u32 to, const TensorMap& map, int head, int row, int keys, u64& full, u64& empty, u32 parity) {
    int lane = threadIdx.x % WARP_SIZE, boxes = min(ROWS / BOX, ceil_div(keys, BOX));
    wait(empty, parity);
    if (lane == 0) arrive_expecting(full, boxes * BOX * HEAD_DIM * 2);
    __syncwarp();
    if (lane >= boxes) return;
#pragma unroll
    for (int panel = 0; panel < HEAD_DIM / 64; ++panel)
        copy_box(to + panel * PANEL + lane * BOX * 128, map, panel * 64, head, row, full);
}

// Warp 0: the context blocks of every tile, last first.
DEVICE void load_context(const Args& args, const TensorMap& k_map, const TensorMap& v_map, u32 shared, Stages& to) {
    u32 turn = 0;
    for_each_tile(args, [&](const Work& work) {
        for (int block = work.hi - 1; block >= work.lo; --block, ++turn) {
            int key = block * ROWS + threadIdx.x * BOX, keys = work.length - block * ROWS, row = 0, at = turn & 1;
            if (threadIdx.x < ROWS / BOX && key < work.length)
                row = args.page_table[work.request * args.page_columns + key / PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE;
            u32 stage = shared + at * TILE, parity = (turn >> 1 & 1) ^ 1;
            load_stage(stage + CONTEXT_K, k_map, work.head, row, keys, to.k_full[at], to.k_empty[at], parity);
            load_stage(stage + CONTEXT_V, v_map, work.head, row, keys, to.v_full[at], to.v_empty[at], parity);
        }
    });
}

// Where row n of a tile's queries starts in q, in chunks; -1: no such row.
DEVICE int query_at(const Args& args, const Work& work, int n) {
    int beam = (work.row + n) / GROUP, head = work.head * GROUP + n % GROUP;
    long long at = work.request * args.q_batch + beam * args.q_row + head * HEAD_DIM;
    return beam < work.width ? int(at / 8) : -1;
}

// Where the own keys of n = lane, lane + 32, ... start in BeamKV, in chunks; key n is step first + n % 64 / BEAMS of its
// beam; -1: no such key. Every thread asks for its ancestors at once, for some valid entry where there is no key.
DEVICE void own_at(const Args& args, const Work& work, int first, int lane, int* at) {
    int row[ROWS / WARP_SIZE];
    auto step_of = [&](int n) { return first + n % 64 / BEAMS; };
    auto beam_of = [&](int n) { return work.row / GROUP + n / 64 * BEAMS + n % BEAMS; };
#pragma unroll
    for (int i = 0; i < ROWS / WARP_SIZE; ++i) {
        int n = i * WARP_SIZE + lane, s = min(step_of(n), args.steps - 1), beam = min(beam_of(n), args.beams - 1);
        row[i] = args.ancestor[(work.request * args.steps + s) * args.beams + beam];
    }
    pin(row);
#pragma unroll
    for (int i = 0; i < ROWS / WARP_SIZE; ++i) {
        int n = i * WARP_SIZE + lane;
        row[i] += (work.slot * args.steps + step_of(n)) * args.max_width;
        bool live = step_of(n) < work.steps && beam_of(n) < work.width;
        at[n] = live ? (row[i] * args.kv_heads + work.head) * CHUNKS : -1;
    }
}

// Warps 1 to 3, each its part of every front: queries, own keys, own values; GROUP steps of own keys at a time.
DEVICE void gather_fronts(const Args& args, u32 shared, Control& control) {
    constexpr int STRIDE = WARP_SIZE / CHUNKS;  // rows that a warp copies at a time
    const int part = threadIdx.x / WARP_SIZE - 1, lane = threadIdx.x % WARP_SIZE;
    const elem* start = part == 0 ? args.q : part == 1 ? args.k_beams : args.v_beams;
    const uint4* source = reinterpret_cast<const uint4*>(start) + lane % CHUNKS;
    const u32 to = shared + part * TILE + swizzled(lane / CHUNKS, lane % CHUNKS);
    int* rows = control.rows[part];
    const auto gathered = [&] {
        if (OWN_LAST && part == 0) arrive(control.queries_full);
        arrive(control.front_full);
    };
    u32 round = 0;
    for_each_tile(args, [&](const Work& work) {
        for (int first = 0; first == 0 || first < work.steps; first += GROUP, ++round) {
            // Where the rows lie is asked for while the consumers still read the round before.
            __syncwarp();
            if (part > 0)
                own_at(args, work, first, lane, rows);
            else
                for (int n = lane; n < ROWS; n += WARP_SIZE) rows[n] = query_at(args, work, n);
            __syncwarp();
            wait(control.front_empty, (round & 1) ^ 1);
            if (part == 0 && lane == 0) control.work = work;
            if (OWN_LAST && part > 0) wait(control.queries_full, round & 1);
            if (part == 0 ? first == 0 : work.steps > 0) {
#pragma unroll 1
                for (int n = 0; n < ROWS; n += 4 * STRIDE) {
                    int at[4];  // several at once: the copies below keep loads from moving up
#pragma unroll
                    for (int i = 0; i < 4; ++i) at[i] = rows[n + i * STRIDE + lane / CHUNKS];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        u32 row = (to ^ (i * STRIDE & 7) * 16) + (n + i * STRIDE) * 128;  // n is a multiple of 8
                        cp_async16(row, source + max(at[i], 0), at[i] >= 0);
                    }
                }
            }
            cp_async_commit();
            cp_async_wait<0>();
            fence_async();
            gathered();
        }
    });
    wait(control.front_empty, (round & 1) ^ 1);
    if (part == 0 && lane == 0) control.work.request = -1;
    gathered();
}

// --- device helpers: the consumers

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
    for (int i = 0; i < 32; ++i) {
        const int eight = i / 4, beam = row_of(i) / GROUP;  // columns come in eights, each of one step
        bool mine = beam / 8 == eight % (BEAMS / 8) && beam % 8 == column_of(i) % 8;
        if (!mine || eight / (BEAMS / 8) >= steps) s[i] = NEG_INF;
    }
    softmax.take(s, decay, scale_log2);
    rescale_and_pack(o, decay, p, s);
    wgmma_fence();
    start_values(o, p, shared + OWN_V + group * 64 * 128);
    wgmma_wait<0>();
    pin(o);
}

// Rows live in `out`, or in this split's part with their log-sum-exp.
DEVICE void write_rows(const Args& args, const Work& work, const float (&o)[HEAD_DIM / 2], const Softmax& softmax,
                       int group) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = warp_sum<4>(softmax.sum[r]), factor = __fdividef(1.f, sum);
        int row = work.row + group * 64 + row_of(2 * r), beam = row / GROUP;
        int heads = args.kv_heads * GROUP, head = work.head * GROUP + row % GROUP;
        long long at = ((long long)work.request * args.beams + beam) * heads + head;
        bool live = beam < work.width;
        if (args.splits == 1) {
            store_row(live ? args.out + at * HEAD_DIM : nullptr, o, r, factor);
        } else if (live) {
            at += (long long)work.split * args.batch * args.beams * heads;
            if (threadIdx.x % 4 == 0) args.part_lse[at] = softmax.top[r] * args.scale + logf(sum);
#pragma unroll
            for (int i = 2 * r; i < HEAD_DIM / 2; i += 4)
                store_vec<float, 2>(args.part + at * HEAD_DIM + column_of(i), {o[i] * factor, o[i + 1] * factor});
        }
    }
}

// A consumer warpgroup: its rows of every front it is given.
DEVICE void attend(const Args& args, u32 shared, Control& control, int group) {
    const float scale_log2 = args.scale * LOG2E;
    u32 round = 0, turn = 0;
    for (;;) {
        wait(OWN_LAST ? control.queries_full : control.front_full, round & 1);
        Work work = control.work;
        if (work.request < 0) break;
        u32 q[HEAD_DIM / 4];
        float o[HEAD_DIM / 2] = {};
        Softmax softmax = {{NEG_INF, NEG_INF}, {0.f, 0.f}};
        load_queries(q, shared + QUERIES, group);
        const auto own = [&] {
            for (int first = 0;;) {
                if (work.steps) attend_own(o, softmax, q, shared, work.steps - first, group, scale_log2);
                arrive(control.front_empty);
                ++round;
                first += GROUP;
                if (first >= work.steps) break;
                wait(control.front_full, round & 1);
            }
        };
        if (!OWN_LAST) own();
        const int live = min(ROWS, work.length - (work.hi - 1) * ROWS);
        if (work.lo < work.hi)
            attend_blocks(
                o, softmax, q, shared + CONTEXT_K, shared + CONTEXT_V, control.stages, turn, work.hi - work.lo, live,
                live < ROWS, [&](int i) { return column_of(i) >= live; }, group, scale_log2);
        if (OWN_LAST) {
            wait(control.front_full, round & 1);
            work = control.work;  // again, so that no register held it all the while
            own();
        }
        write_rows(args, work, o, softmax, group);
    }
}

// --- kernel

extern "C" __global__ void __launch_bounds__(384, 1)
    grinf_decode_attention_sm90(const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                                const elem* q, const elem* k_beams, const elem* v_beams, const int* page_table,
                                const int* context_len, const int* slot, const int* ancestor, const int* step,
                                const int* width, elem* out, float* part, float* part_lse, long long q_batch,
                                long long q_row, int batch, int beams, int kv_heads, int page_columns, int steps,
                                int max_width, int splits, float scale) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    const Args args = {q,        k_beams,      v_beams, page_table, context_len, slot,  ancestor, step,
                       width,    out,          part,    part_lse,   q_batch,     q_row, batch,    beams,
                       kv_heads, page_columns, steps,   max_width,  splits,      scale};
    const u32 shared = shared_address(bytes);
    Control& control = *reinterpret_cast<Control*>(bytes + CONTROL);

    if (threadIdx.x == 0) {
        barrier_init(control.queries_full, 32);  // warp 1
        barrier_init(control.front_full, 96);    // warps 1 to 3
        barrier_init(control.front_empty, 256);  // the consumers
        stages_init(control.stages);
        fence_async();
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        give_registers<56>();
        if (threadIdx.x < WARP_SIZE)
            load_context(args, k_map, v_map, shared, control.stages);
        else
            gather_fronts(args, shared, control);
    } else {
        take_registers<224>();
        attend(args, shared, control, threadIdx.x / 128 - 1);
    }
}
