// Exact top-K over the children of the live beams (SelectConstrained), and the normalisers over those children.
//
// Formula: score = (logit - log_z[parent]) + cum[parent]; a beam that has ended its SID hands its own score on.
//
// The candidates of a request are laid out flat: slot = offset[parent] + rank of the child among its siblings. That is
// the order (parent rank, code), because siblings ascend by code. A thread finds the parent of its slot by a search
// among the few parents of its group of slots; nothing is padded to the widest node, and no score is ever written to
// memory. See selection.cuh for why the maxima of groups of slots are enough.
//
// Kernels, in this order, each with one grid row (y, or x alone) a request:
//   grinf_lay_out_children   grid (B), block 1024: offset, first child, span -> parent
//   grinf_child_normaliser   grid (W, B), block ROW_THREADS: log_z and cut of each beam, where they are not given;
//                            4 * STAGED bytes of dynamic shared memory for `topk` scores
//   grinf_group_children     grid (any, B), block 128: maxima of groups, best two of leaf groups; blocks stride
//   grinf_pick_groups        grid (B), block 1024: the leaf groups that matter, and a floor for their candidates
//   grinf_rescan_children    grid (ceil(P / 4), B), block 128: the candidates of those leaf groups above the floor
//   grinf_finish_selection   grid (any, B), block 1024: survivors in order; each block ranks a share of them
//
// Layouts:
//   logits [B, W, columns], DTYPE; log_z float [B, W]; cut u64 [B, W] (least (logit key, child rank); null: no cut)
//   slot, level, next_width, score_k, min_width int32 [B]; margin float [B]
//   pool_cum float, pool_node int32 [slots + 1, pool_width]; pool_width_of int32 [slots + 1] (live beams)
//   first_child int32 [inner + 1]; code [nodes]; column, token int32 [levels, codes]; end_code int32 [levels]
//   live int32 [views, words] or null; view int32 [B]
// Workspace, for G groups of 256 slots a request at most and P leaf groups that are looked at again:
//   offset int32 [B, W + 1]; first int32 [B, W] (complemented where the beam has ended); cum float [B, W]
//   span_parent int32 [B, ceil(G / 4) + 1] (parent of a span's first slot); total int32 [B] (slots)
//   group_key u32 [B, G]; leaf_key, second_key u32 [B, G, 8] (the best two of a leaf group)
//   picked int32 [B, P]; num_picked int32 [B]; floor_key u32 [B]
//   survivors u64 [B, P * 32]; num_survivors int32 [B]
//
// Constants: DTYPE, type of the logits; CODE_BITS, 16 or 32; ROW_THREADS, of a normaliser.
// Source: flat load balancing as in Merge Path (Green et al., 2012); the rest is told in selection.cuh.

#include "common.cuh"
#include "selection.cuh"

#ifndef CODE_BITS
#define CODE_BITS 16
#endif
#ifndef ROW_THREADS
#define ROW_THREADS 128
#endif

#define LEAF 32  // slots of a leaf group, one a lane
#define FAN 8    // leaf groups of a group, which is a warp's
#define GROUP (LEAF * FAN)
#define SPAN_GROUPS 4  // groups of a span, whose first parent is remembered
#define SPAN (GROUP * SPAN_GROUPS)
#define SCAN_THREADS 128
#define STAGED 8192  // children whose keys are held in shared memory

#if CODE_BITS == 16
typedef unsigned short code_t;
#else
typedef u32 code_t;
#endif

// --- device helpers

// One request's candidates.
struct Children {
    const elem* logits;
    const int *offset, *first, *span_parent;
    const code_t* code;
    const int* column;
    const u32* live;
    int columns;
    u32 total;

    // Parents of N slots of one span: the last parent whose offset does not exceed the slot, bit by bit from `low`.
    template <int N>
    DEVICE void find_parents(int span, const u32 (&slot)[N], int (&parent)[N]) const {
        const int low = span_parent[span], high = span_parent[span + 1];
#pragma unroll
        for (int n = 0; n < N; ++n) parent[n] = low;
        int step = high > low ? 1 << (31 - __clz(high - low)) : 0;
        for (; step > 0; step /= 2) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int next = parent[n] + step;
                if (next <= high && offset[next] <= static_cast<int>(slot[n])) parent[n] = next;
            }
        }
    }

    DEVICE int node(int parent, u32 slot) const {
        const int start = first[parent];
        return (start < 0 ? ~start : start) + static_cast<int>(slot) - offset[parent];
    }

    DEVICE bool is_live(int node) const { return live == nullptr || (live[node / 32] >> (node % 32)) & 1; }

    DEVICE int column_of(int node) const {
        const int c = code[node];
        return column == nullptr ? c : column[c];
    }

    DEVICE float logit(int parent, int at) const {
        return to_float(logits[static_cast<size_t>(parent) * columns + at]);
    }
};

#define CHILDREN_PARAMS                                                                                      \
    const elem *logits, const int *offset, const int *first, const int *span_parent, const int *total,       \
        const code_t *code, const int *column, const u32 *live, const int *view, const int *level, int rows, \
        int columns, int codes, int words, int max_groups

#define CHILDREN_OF(b)                                                               \
    {logits + static_cast<size_t>(b) * rows * columns,                               \
     offset + static_cast<size_t>(b) * (rows + 1),                                   \
     first + static_cast<size_t>(b) * rows,                                          \
     span_parent + static_cast<size_t>(b) * (ceil_div(max_groups, SPAN_GROUPS) + 1), \
     code,                                                                           \
     column == nullptr ? nullptr : column + static_cast<size_t>(level[b]) * codes,   \
     live == nullptr ? nullptr : live + static_cast<size_t>(view[b]) * words,        \
     columns,                                                                        \
     static_cast<u32>(total[b])}

// Keys of N slots of one span; 0 where there is no candidate. log_z, cut and cum are the request's. Every load is made
// for all N slots, whatever they hold, so that N loads are under way at once.
template <int N>
DEVICE void candidate_keys(const Children& children, const float* log_z, const u64* cut, const float* cum, int span,
                           const u32 (&slot)[N], u32 (&key)[N]) {
    u32 inside[N];
    int parent[N], start[N], node[N], place[N];
    float logit[N];
#pragma unroll
    for (int n = 0; n < N; ++n) inside[n] = min(slot[n], children.total - 1);
    children.find_parents(span, inside, parent);
#pragma unroll
    for (int n = 0; n < N; ++n) start[n] = children.first[parent[n]];
#pragma unroll
    for (int n = 0; n < N; ++n) node[n] = children.node(parent[n], inside[n]);
#pragma unroll
    for (int n = 0; n < N; ++n) place[n] = children.code[node[n]];
    if (children.column != nullptr) {
#pragma unroll
        for (int n = 0; n < N; ++n) place[n] = children.column[place[n]];
    }
#pragma unroll
    for (int n = 0; n < N; ++n) logit[n] = children.logit(parent[n], start[n] < 0 ? 0 : place[n]);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float own = cum[parent[n]];  // a beam that has ended hands its own score on
        key[n] = order_key(start[n] < 0 ? own : beam_score(logit[n], log_z[parent[n]], own));
        if (slot[n] >= children.total || !children.is_live(node[n])) key[n] = 0;
    }
    if (cut == nullptr) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const u32 rank = inside[n] - children.offset[parent[n]];
        if (start[n] >= 0 && pack_candidate(order_key(logit[n]), rank) < cut[parent[n]]) key[n] = 0;
    }
}

// --- kernels

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    grinf_lay_out_children(const int* slot, const float* pool_cum, const int* pool_node, const int* pool_width_of,
                           int pool_width, const int* level, const int* first_child, const code_t* code,
                           const int* end_code, int rows, int max_groups, int* offset, int* first, float* cum,
                           int* span_parent, int* total, int* num_survivors) {
    __shared__ u32 totals[WARP_SIZE + 1];
    const int b = blockIdx.x;
    const size_t pool_row = static_cast<size_t>(slot[b]) * pool_width;
    const int live = min(pool_width_of[slot[b]], rows);
    const int end = level[b] > 0 ? end_code[level[b] - 1] : -1;
    offset += static_cast<size_t>(b) * (rows + 1);
    first += static_cast<size_t>(b) * rows;
    cum += static_cast<size_t>(b) * rows;
    const int max_spans = ceil_div(max_groups, SPAN_GROUPS);
    span_parent += static_cast<size_t>(b) * (max_spans + 1);
    int before = 0;  // children of the beams before this round
    for (int start = 0; start < live; start += SELECT_THREADS) {
        const int w = start + threadIdx.x;
        int degree = 0;
        if (w < live) {
            const int node = pool_node[pool_row + w], child = first_child[node];
            degree = first_child[node + 1] - child;
            first[w] = end >= 0 && static_cast<int>(code[node]) == end ? ~child : child;
            cum[w] = pool_cum[pool_row + w];
        }
        const int at = before + block_scan<SELECT_THREADS>(degree, totals);
        if (w < live) offset[w] = at;
        for (int i = ceil_div(at, SPAN); i * SPAN < at + degree && i < max_spans; ++i) span_parent[i] = w;
        if (threadIdx.x == SELECT_THREADS - 1) totals[WARP_SIZE] = at + degree;
        __syncthreads();
        before = totals[WARP_SIZE];
    }
    if (threadIdx.x == 0) {
        before = min(before, max_groups * GROUP);
        offset[live] = before;
        span_parent[ceil_div(before, SPAN)] = max(live - 1, 0);
        total[b] = before;
        num_survivors[b] = 0;
    }
}

// Log-sum-exp over a beam's legal children; with score_k, over the score_k[b] best of them, of which `cut` is the last.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    grinf_child_normaliser(CHILDREN_PARAMS, const int* slot, const int* pool_width_of, const int* score_k, float* log_z,
                           u64* cut) {
    extern __shared__ u32 staged[];
    __shared__ Scratch s;
    __shared__ float partial[2 * ROW_THREADS / WARP_SIZE];
    const int b = blockIdx.y, w = blockIdx.x;
    if (w >= pool_width_of[slot[b]]) return;
    const Children children = CHILDREN_OF(b);
    const u32 start = children.offset[w], degree = children.offset[w + 1] - start;
    if (children.first[w] < 0) return;  // the beam has ended: its score is handed on, there is nothing to normalise
    const auto child_key = [&](u32 i) {
        const int node = children.node(w, start + i);
        return children.is_live(node) ? order_key(children.logit(w, children.column_of(node))) : 0;
    };
    const bool cuts = score_k != nullptr && degree > static_cast<u32>(score_k[b]), stages = cuts && degree <= STAGED;
    if (stages) {
#pragma unroll 4
        for (u32 i = threadIdx.x; i < degree; i += ROW_THREADS) staged[i] = child_key(i);
        __syncthreads();
    }
    const auto child = [&](u32 i) { return pack_candidate(stages ? staged[i] : child_key(i), i); };
    const u64 least = cuts ? kth_largest<ROW_THREADS>(degree, child, score_k[b], s).least : 1;
    ExpSum sum;
    for_each<ROW_THREADS>(degree, child, [&](u64 v) {
        if (v < least) return;
        const float x = key_score(candidate_key(v));
        sum.raise_peak(x);
        sum.sum += exp2_approx((x - sum.peak) * LOG2E);
    });
    const float value = sum.finish<ROW_THREADS>(partial);
    if (threadIdx.x != 0) return;
    log_z[static_cast<size_t>(b) * rows + w] = value > NEG_INF ? value : 0.0f;
    if (cut != nullptr) cut[static_cast<size_t>(b) * rows + w] = least;
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 5)
    grinf_group_children(CHILDREN_PARAMS, const float* log_z, const u64* cut, const float* cum, u32* group_key,
                         u32* leaf_key, u32* second_key) {
    constexpr int WARPS = SCAN_THREADS / WARP_SIZE;
    const int b = blockIdx.y, lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const Children children = CHILDREN_OF(b);
    const size_t row = static_cast<size_t>(b) * rows;
    const int groups = ceil_div(children.total, GROUP);
    for (int group = blockIdx.x * WARPS + warp; group < groups; group += gridDim.x * WARPS) {
        u32 slots[FAN], key[FAN], mine = 0, second = 0, peak = 0;
#pragma unroll
        for (int n = 0; n < FAN; ++n) slots[n] = group * GROUP + n * LEAF + lane;
        candidate_keys(children, log_z + row, cut == nullptr ? nullptr : cut + row, cum + row, group / SPAN_GROUPS,
                       slots, key);
#pragma unroll
        for (int n = 0; n < FAN; ++n) {
            const u32 best = __reduce_max_sync(FULL_MASK, key[n]);
            const bool leads = lane == __ffs(__ballot_sync(FULL_MASK, key[n] == best)) - 1;
            const u32 next = __reduce_max_sync(FULL_MASK, leads ? 0 : key[n]);
            mine = lane == n ? best : mine;
            second = lane == n ? next : second;
            peak = max(peak, best);
        }
        const size_t group_at = static_cast<size_t>(b) * max_groups + group;
        if (lane < FAN) leaf_key[group_at * FAN + lane] = mine, second_key[group_at * FAN + lane] = second;
        if (lane == 0) group_key[group_at] = peak;
    }
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    grinf_pick_groups(const int* total, const u32* group_key, const u32* leaf_key, const u32* second_key,
                      int max_groups, const int* next_width, int max_picked, int* picked, int* num_picked,
                      u32* floor_key) {
    const int b = blockIdx.x;
    const size_t row = static_cast<size_t>(b) * max_groups;
    pick_groups<FAN>(group_key + row, leaf_key + row * FAN, second_key + row * FAN, ceil_div(total[b], GROUP),
                     next_width[b], max_picked, picked + static_cast<size_t>(b) * max_picked, num_picked + b,
                     floor_key + b);
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS)
    grinf_rescan_children(CHILDREN_PARAMS, const float* log_z, const u64* cut, const float* cum, const int* picked,
                          const int* num_picked, const u32* floor_key, int max_picked, u64* survivors,
                          int* num_survivors) {
    const int b = blockIdx.y, lane = threadIdx.x % WARP_SIZE;
    const int pick = (blockIdx.x * SCAN_THREADS + threadIdx.x) / WARP_SIZE;
    if (pick >= num_picked[b]) return;
    const Children children = CHILDREN_OF(b);
    const size_t row = static_cast<size_t>(b) * rows;
    const int leaf = picked[static_cast<size_t>(b) * max_picked + pick];
    const u32 slots[1] = {static_cast<u32>(leaf * LEAF + lane)};
    u32 key[1];
    candidate_keys(children, log_z + row, cut == nullptr ? nullptr : cut + row, cum + row, leaf * LEAF / SPAN, slots,
                   key);
    const u64 candidate = key[0] >= floor_key[b] ? pack_candidate(key[0], slots[0]) : 0;
    append_survivors(candidate, survivors + static_cast<size_t>(b) * max_picked * LEAF, num_survivors + b);
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    grinf_finish_selection(CHILDREN_PARAMS, const u64* survivors, const int* num_survivors, const int* next_width,
                           const float* margin, const int* min_width, const int* token, int width, int max_picked,
                           float* out_score, int* out_parent, int* out_token, int* out_node, int* out_count) {
    const int b = blockIdx.y;
    const Children children = CHILDREN_OF(b);
    const size_t row = static_cast<size_t>(b) * width;
    const Beams out = {out_score + row, out_parent + row, out_token + row, out_node + row, out_count + b};
    const int* token_of = token + static_cast<size_t>(level[b]) * codes;
    const auto decode = [&](u32 position, int& parent, int& token, int& node) {
        const u32 slots[1] = {position};
        int parents[1];
        children.find_parents(position / SPAN, slots, parents);
        parent = parents[0], node = children.node(parent, position), token = token_of[code[node]];
    };
    finish_selection(survivors + static_cast<size_t>(b) * max_picked * LEAF, num_survivors[b], next_width[b], margin[b],
                     min_width[b], width, out, decode);
}
