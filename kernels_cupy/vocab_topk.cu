// Exact top-K over live beams x vocabulary (SelectUnconstrained), and the normaliser of rows of logits (RowLogSumExp).
//
// Formula: score = (logit - log_z[row]) + cum[row], log_z = m + log(sum over columns of exp(logit - m)).
//
// The logits are read once, 16 bytes at a time: a block streams a row, keeps an online sum of exponentials and the
// maxima of tiles of columns, and scores the maxima when the row's normaliser is known. Rounding is monotone, so the
// score of a tile's largest logit is its largest score. Only the K best tiles are read again. See selection.cuh.
//
// `topk` scores: the normaliser and the candidates are the row's score_k best logits, ties to the smaller column. They
// lie in the row's score_k best tiles; the block finds them before it scores the tiles.
//
// Kernels:
//   grinf_row_logsumexp      grid (rows), block ROW_THREADS
//   grinf_group_columns      grid (W, B), block ROW_THREADS, dynamic shared memory: 4 bytes a tile, for MODE TOPK also
//                            8 * LIST bytes. MODE: GIVEN (log_z is read), FULL or TOPK (log_z is written)
//   grinf_pick_groups        grid (B), block 1024: the tiles that matter, and a floor for their candidates
//   grinf_rescan_columns     grid (ceil(P / 4), B), block 128: the candidates of those tiles above the floor
//   grinf_finish_selection   grid (any, B), block 1024: survivors in order; each block ranks a share of them
//
// Layouts:
//   logits [B, W, columns], DTYPE; log_z float [B, W]; cut u64 [B, W] (least (logit key, column); null: no cut)
//   slot, next_width, score_k, min_width int32 [B]; margin float [B]
//   pool_cum float [slots + 1, pool_width]; pool_width_of int32 [slots + 1] (live beams)
// Workspace, for G groups of 4096 columns a row, F tiles a group (past the row's end they have key 0), and P tiles that
// are looked at again; a tile is a leaf group of T columns:
//   group_key u32 [B, W, G]; tile_key u32 [B, W, G, F]; picked int32 [B, P]; num_picked int32 [B]; floor_key u32 [B]
//   survivors u64 [B, P * T]; num_survivors int32 [B]
// A position is row * columns + column, below 2^32.
//
// Constants: DTYPE, type of the logits; ALIGNED, 1 where every row starts at a multiple of 16 bytes; ROW_THREADS; MODE;
// TILE, 512 or 128, for MODE TOPK 128.
// Source: online softmax (Milakov and Gimelshein, 2018).

#include "common.cuh"
#include "selection.cuh"

#define GIVEN 0
#define FULL 1
#define TOPK 2

#ifndef ALIGNED
#define ALIGNED 1
#endif
#ifndef ROW_THREADS
#define ROW_THREADS 256
#endif
#ifndef MODE
#define MODE FULL
#endif
#ifndef TILE
#define TILE 512
#endif

#define PACK (16 / static_cast<int>(sizeof(elem)))  // columns of one 16-byte load
#define PART 128                                    // columns that a group of lanes loads at once
#define LANES (PART / PACK)
#define UNROLL 4  // parts that they have under way, one after the other in the row
#define TILE_PARTS (TILE / PART)
#define FAN (4096 / TILE)                                     // tiles of a group
#define LIST 4096                                             // candidates of a row that are selected in shared memory
#define LIVE_THREADS (ALIGNED && MODE != TOPK ? 1280 : 1024)  // of a multiprocessor; more would spill registers
#define SCAN_THREADS 128
#define FIXED_POINT 1099511627776.0f  // 2^40
#define NEG_INF_BITS (DTYPE == FP32 ? 0xff800000u : DTYPE == FP16 ? 0xfc00fc00u : 0xff80ff80u)

// --- device helpers

DEVICE float largest_of(const float (&x)[PACK]) {
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < PACK; ++i) largest = fmaxf(largest, x[i]);
    return largest;
}

DEVICE void add_exponentials(ExpSum& sum, const float (&x)[PACK], float largest) {
    sum.raise_peak(largest);
    const float shift = sum.peak * LOG2E;
    float part[PACK];
#pragma unroll
    for (int i = 0; i < PACK; ++i) part[i] = exp2_approx(fmaf(x[i], LOG2E, -shift));
#pragma unroll
    for (int d = PACK / 2; d > 0; d /= 2) {
#pragma unroll
        for (int i = 0; i < d; ++i) part[i] += part[i + d];
    }
    sum.sum += part[0];
}

// Columns of this thread in a part of the row: consecutive ones, but in rows that are not aligned dealt out to the
// lanes one by one, so that loads stay coalesced.
DEVICE int part_column(int part, int i) {
    const int lane = threadIdx.x % LANES;
    return part * PART + (ALIGNED ? lane * PACK + i : i * LANES + lane);
}

// What this thread loads of a part; -inf past the row's end.
struct Pack {
#if ALIGNED
    uint4 raw;

    DEVICE void load(const elem* row, int columns, int part) {
        raw = make_uint4(NEG_INF_BITS, NEG_INF_BITS, NEG_INF_BITS, NEG_INF_BITS);
        if (part_column(part, 0) < columns) raw = load16(row + part_column(part, 0));
    }
    DEVICE void widen(float (&x)[PACK]) const { widen16<elem>(raw, x); }
#else
    float value[PACK];

    DEVICE void load(const elem* row, int columns, int part) {
#pragma unroll
        for (int i = 0; i < PACK; ++i)
            value[i] = part_column(part, i) < columns ? to_float(row[part_column(part, i)]) : NEG_INF;
    }
    DEVICE void widen(float (&x)[PACK]) const {
#pragma unroll
        for (int i = 0; i < PACK; ++i) x[i] = value[i];
    }
#endif
};

// visit(part, this thread's columns) for every part of a row, -inf past its end and in parts that are not wanted. The
// lanes of a part visit it together, and UNROLL parts in a row one after the other.
template <class Wanted, class Visit>
DEVICE void stream_row(const elem* row, int columns, Wanted wanted, Visit visit) {
    constexpr int STEP = ROW_THREADS / LANES * UNROLL;
    for (int start = 0; start * PART < columns; start += STEP) {
        const int first = start + threadIdx.x / LANES * UNROLL;
        Pack pack[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int part = first + u;
            pack[u].load(row, part * PART < columns && wanted(part) ? columns : 0, part);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            float x[PACK];
            pack[u].widen(x);
            visit(first + u, x);
        }
    }
}

DEVICE u64 logit_candidate(float logit, int column) { return pack_candidate(order_key(logit), column); }

// The row's score_k best logits: the least of them, and their log-sum-exp. Terms are added as fixed-point numbers,
// since the list has no fixed order and integer sums need none.
DEVICE u64 best_logits(const elem* row, int columns, const float* tile_max, int tiles, int score_k, u64* list,
                       Scratch& s, float& log_z) {
    const auto tile = [&](u32 t) { return logit_candidate(tile_max[t], t); };
    const u32 floor = tiles > score_k ? candidate_key(kth_largest<ROW_THREADS>(tiles, tile, score_k, s).least) : 0;
    __shared__ u64 total;
    if (threadIdx.x == 0) s.counter = 0, total = 0;
    __syncthreads();
    const auto wanted = [&](int t) { return order_key(tile_max[t]) >= floor; };
    stream_row(row, columns, wanted, [&](int part, const float(&x)[PACK]) {
#pragma unroll
        for (int i = 0; i < PACK; ++i) {
            const int column = part_column(part, i);
            if (column >= columns || order_key(x[i]) < floor) continue;
            const u32 at = atomicAdd(&s.counter, 1u);
            if (at < LIST) list[at] = logit_candidate(x[i], column);
        }
    });
    __syncthreads();
    const bool listed = s.counter <= LIST;
    const auto candidate = [&](u32 i) {
        if (listed) return list[i];
        const u64 v = logit_candidate(to_float(row[i]), i);
        return candidate_key(v) >= floor ? v : 0;
    };
    const u32 n = listed ? s.counter : columns;
    const Cut cut = kth_largest<ROW_THREADS>(n, candidate, score_k, s);
    const float peak = key_score(candidate_key(cut.greatest));
    u64 sum = 0;
    for_each<ROW_THREADS>(n, candidate, [&](u64 v) {
        if (v < cut.least) return;
        sum += __float2ull_rn(exp2_approx((key_score(candidate_key(v)) - peak) * LOG2E) * FIXED_POINT);
    });
#pragma unroll
    for (int d = WARP_SIZE / 2; d > 0; d /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, d);
    if (threadIdx.x % WARP_SIZE == 0) atomicAdd(&total, sum);
    __syncthreads();
    log_z = peak > NEG_INF ? peak + logf(__ull2float_rn(total) / FIXED_POINT) : 0.0f;
    return cut.least;
}

// --- kernels

extern "C" __global__ void __launch_bounds__(ROW_THREADS, LIVE_THREADS / ROW_THREADS)
    grinf_row_logsumexp(const elem* logits, int columns, float* log_z) {
    const elem* row = logits + static_cast<size_t>(blockIdx.x) * columns;
    __shared__ float partial[2 * ROW_THREADS / WARP_SIZE];
    ExpSum sum;
    stream_row(
        row, columns, [](int) { return true; },
        [&](int, const float(&x)[PACK]) { add_exponentials(sum, x, largest_of(x)); });
    const float value = sum.finish<ROW_THREADS>(partial);
    if (threadIdx.x == 0) log_z[blockIdx.x] = value;
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS, LIVE_THREADS / ROW_THREADS)
    grinf_group_columns(const elem* logits, int columns, int groups, const int* slot, const float* pool_cum,
                        const int* pool_width_of, int pool_width, const int* score_k, float* log_z, u64* cut,
                        u32* group_key, u32* tile_key, int* num_survivors) {
    extern __shared__ __align__(16) unsigned char smem[];
    const int b = blockIdx.y, w = blockIdx.x, tiles = ceil_div(columns, TILE);
    if (w == 0 && threadIdx.x == 0) num_survivors[b] = 0;
    if (w >= pool_width_of[slot[b]]) return;
    const size_t at = static_cast<size_t>(b) * gridDim.x + w;
    const elem* row = logits + at * columns;
    float* tile_max = reinterpret_cast<float*>(smem);
    __shared__ float partial[2 * ROW_THREADS / WARP_SIZE];
    ExpSum sum;
    float largest = NEG_INF;
    stream_row(
        row, columns, [](int) { return true; },
        [&](int part, const float(&x)[PACK]) {
            const float here = largest_of(x);
            if (MODE == FULL) add_exponentials(sum, x, here);
            largest = fmaxf(largest, here);
            if (part % TILE_PARTS != TILE_PARTS - 1) return;  // the tile goes on
            largest = warp_max<LANES>(largest);
            const int tile = part / TILE_PARTS;
            if (threadIdx.x % LANES == 0 && tile < tiles) tile_max[tile] = largest;
            largest = NEG_INF;
        });
    float z = 0.0f;
    u64 least = 1;
    if (MODE == FULL) z = sum.finish<ROW_THREADS>(partial);
    __syncthreads();
    if (MODE == GIVEN) z = log_z[at];
    if (MODE == TOPK) {
        __shared__ Scratch s;
        u64* list = reinterpret_cast<u64*>(smem + ceil_div(tiles, 4) * 16);
        least = best_logits(row, columns, tile_max, tiles, score_k[b], list, s, z);
        if (threadIdx.x == 0) cut[at] = least;
    }
    if (MODE != GIVEN && threadIdx.x == 0) log_z[at] = z;

    const float cum = pool_cum[static_cast<size_t>(slot[b]) * pool_width + w];
    for (int start = 0; start < groups * FAN; start += ROW_THREADS) {
        const int t = start + threadIdx.x;
        u32 key = 0;
        // A tile counts while its first column, with its largest logit, would: so do the ties up to the last one kept.
        if (t < tiles && logit_candidate(tile_max[t], t * TILE) >= least)
            key = order_key(beam_score(tile_max[t], z, cum));
        u32 best = key;
#pragma unroll
        for (int d = FAN / 2; d > 0; d /= 2) best = max(best, __shfl_xor_sync(FULL_MASK, best, d));
        if (t >= groups * FAN) continue;
        tile_key[at * groups * FAN + t] = key;
        if (t % FAN == 0) group_key[at * groups + t / FAN] = best;
    }
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    grinf_pick_groups(const int* slot, const int* pool_width_of, int rows, int groups, const u32* group_key,
                      const u32* tile_key, const int* next_width, int max_picked, int* picked, int* num_picked,
                      u32* floor_key) {
    const int b = blockIdx.x;
    const size_t row = static_cast<size_t>(b) * rows * groups;
    pick_groups<FAN>(group_key + row, tile_key + row * FAN, nullptr, min(pool_width_of[slot[b]], rows) * groups,
                     next_width[b], max_picked, picked + static_cast<size_t>(b) * max_picked, num_picked + b,
                     floor_key + b);
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS)
    grinf_rescan_columns(const elem* logits, int rows, int columns, int groups, const int* slot, const float* pool_cum,
                         int pool_width, const float* log_z, const u64* cut, const int* picked, const int* num_picked,
                         const u32* floor_key, int max_picked, u64* survivors, int* num_survivors) {
    const int b = blockIdx.y, lane = threadIdx.x % WARP_SIZE;
    const int pick = (blockIdx.x * SCAN_THREADS + threadIdx.x) / WARP_SIZE;
    if (pick >= num_picked[b]) return;
    const int tile = picked[static_cast<size_t>(b) * max_picked + pick];
    const int w = tile / (groups * FAN), start = tile % (groups * FAN) * TILE;
    const size_t at = static_cast<size_t>(b) * rows + w;
    const float z = log_z[at], cum = pool_cum[static_cast<size_t>(slot[b]) * pool_width + w];
    const u64 least = cut == nullptr ? 1 : cut[at];
    const u32 floor = floor_key[b];
    for (int first = start + lane; first < start + TILE; first += PART) {
        float logit[PART / WARP_SIZE];
#pragma unroll
        for (int i = 0; i < PART / WARP_SIZE; ++i) {
            const int column = first + i * WARP_SIZE;
            logit[i] = to_float(logits[at * columns + min(column, columns - 1)]);
        }
#pragma unroll
        for (int i = 0; i < PART / WARP_SIZE; ++i) {
            const int column = first + i * WARP_SIZE;
            const u32 key = order_key(beam_score(logit[i], z, cum));
            const bool counts = column < columns && key >= floor && logit_candidate(logit[i], column) >= least;
            const u64 candidate = counts ? pack_candidate(key, static_cast<u32>(w) * columns + column) : 0;
            append_survivors(candidate, survivors + static_cast<size_t>(b) * max_picked * TILE, num_survivors + b);
        }
    }
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    grinf_finish_selection(const u64* survivors, const int* num_survivors, const int* next_width, const float* margin,
                           const int* min_width, int columns, int width, int max_picked, float* out_score,
                           int* out_parent, int* out_token, int* out_node, int* out_count) {
    const int b = blockIdx.y;
    const size_t row = static_cast<size_t>(b) * width;
    const Beams out = {out_score + row, out_parent + row, out_token + row, out_node + row, out_count + b};
    const auto decode = [&](u32 position, int& parent, int& token, int&) {
        parent = position / static_cast<u32>(columns), token = position % static_cast<u32>(columns);
    };
    finish_selection(survivors + static_cast<size_t>(b) * max_picked * TILE, num_survivors[b], next_width[b], margin[b],
                     min_width[b], width, out, decode);
}
