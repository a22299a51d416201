// Exact selection, shared by the constrained and the free search. Included after common.cuh.
//
// Candidates have a position: slots in the order (parent rank, code), which is the order among equal scores. A
// candidate is compared as one integer, its score's key above the complement of its position, so all candidates are
// distinct.
//
// The search is by halves of this fact: cut the positions into groups, in order; then the K best candidates lie in the
// K best groups, where a group is compared by (its best score, its position). For if a candidate lies in none of them,
// each of those K groups holds a candidate that precedes it. So the maxima of leaf groups are enough to find the few
// groups that are looked at again, whatever the scores are and however many are equal.
//
//     positions   ................................................................
//     leaf groups |  max  |  max  |  max  |  max  |        LEAF positions each
//     groups      |      max      |      max      |        FAN leaf groups each

#define MAX_WIDTH 4096
#define SELECT_THREADS 1024
#define BIN_BITS 11
#define BINS (1 << BIN_BITS)

// --- candidates as integers; 0 is none

// Order-preserving bits of a score; the two zeros become one.
DEVICE u32 order_key(float score) {
    const u32 bits = __float_as_uint(__fadd_rn(score, 0.0f));
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

DEVICE float key_score(u32 key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }

DEVICE u64 pack_candidate(u32 key, u32 position) {
    return key == 0 ? 0 : (static_cast<u64>(key) << 32) | (0xffffffffu - position);
}
DEVICE u32 candidate_key(u64 candidate) { return static_cast<u32>(candidate >> 32); }
DEVICE u32 candidate_position(u64 candidate) { return 0xffffffffu - static_cast<u32>(candidate); }

// The score of a candidate, in this order of operations and with no FMA on every device.
DEVICE float beam_score(float logit, float log_z, float cum) { return __fadd_rn(__fsub_rn(logit, log_z), cum); }

// --- a block at work

// Exclusive prefix sum over the threads of a block. `totals` has a word for each warp, and is free again after the next
// barrier.
template <int THREADS>
DEVICE u32 block_scan(u32 x, u32* totals) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    u32 sum = x;
#pragma unroll
    for (int d = 1; d < WARP_SIZE; d *= 2) {
        const u32 below = __shfl_up_sync(FULL_MASK, sum, d);
        sum += lane >= d ? below : 0;
    }
    if (lane == WARP_SIZE - 1) totals[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        const u32 total = lane < THREADS / WARP_SIZE ? totals[lane] : 0;
        u32 upto = total;
#pragma unroll
        for (int d = 1; d < WARP_SIZE; d *= 2) {
            const u32 below = __shfl_up_sync(FULL_MASK, upto, d);
            upto += lane >= d ? below : 0;
        }
        if (lane < THREADS / WARP_SIZE) totals[lane] = upto - total;
    }
    __syncthreads();
    return totals[warp] + sum - x;
}

// get(i), get(i + THREADS), ...: eight loads under way at once; 0 from n on.
template <int THREADS, class Get>
DEVICE void fetch(u32 i, u32 n, Get get, u64 (&value)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] = i + j * THREADS < n ? get(i + j * THREADS) : 0;
}

// use(get(i)) for every i < n, in any order; values past the last are 0.
template <int THREADS, class Get, class Use>
DEVICE void for_each(u32 n, Get get, Use use) {
    for (u32 i = threadIdx.x; i < n; i += 8 * THREADS) {
        u64 value[8];
        fetch<THREADS>(i, n, get, value);
#pragma unroll
        for (int j = 0; j < 8; ++j) use(value[j]);
    }
}

// Sum of exponentials relative to the largest value so far, finite so that no infinities are subtracted.
struct ExpSum {
    float peak = -1e30f, sum = 0.0f;

    DEVICE void raise_peak(float x) {
        if (x > peak) sum *= exp2_approx((peak - x) * LOG2E), peak = x;
    }

    // Log-sum-exp of a block's sums, in every thread; `words` has two words for each warp.
    template <int THREADS>
    DEVICE float finish(float* words) const {
        constexpr int WARPS = THREADS / WARP_SIZE;
        const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
        float top = warp_max(peak), total = warp_sum(sum * exp2_approx((peak - top) * LOG2E));
        if (lane == 0) words[warp] = top, words[WARPS + warp] = total;
        __syncthreads();
        const float warp_top = lane < WARPS ? words[lane] : -1e30f,
                    warp_total = lane < WARPS ? words[WARPS + lane] : 0.0f;
        top = warp_max(warp_top);
        total = warp_sum(warp_total * exp2_approx((warp_top - top) * LOG2E));
        return top + logf(total);
    }
};

// Smallest, largest and number of the values that are not 0, over what each lane brings; every lane gets them.
DEVICE void warp_bounds(u64& low, u64& high, u32& found) {
#pragma unroll
    for (int d = WARP_SIZE / 2; d > 0; d /= 2) {
        const u64 other_low = __shfl_xor_sync(FULL_MASK, low, d), other_high = __shfl_xor_sync(FULL_MASK, high, d);
        low = other_low < low ? other_low : low;
        high = other_high > high ? other_high : high;
        found += __shfl_xor_sync(FULL_MASK, found, d);
    }
}

struct Scratch {
    u32 bins[BINS];
    u32 totals[WARP_SIZE];
    u64 low[WARP_SIZE], high[WARP_SIZE];
    u32 bin, above, inside;
    u32 counter;
};

struct Ignore {
    DEVICE void operator()(u64) const {}
};

struct Cut {
    u64 least;  // exactly min(want, found) values are at least this large
    u64 greatest;
    u32 found;  // values that are not 0
};

// Find the bin that holds the want-th largest of the counted values: its number, how many values lie above it and in
// it.
template <int THREADS>
DEVICE void find_bin(u32 want, Scratch& s) {
    constexpr int PER_THREAD = BINS / THREADS;
    const int top = BINS - 1 - threadIdx.x * PER_THREAD;
    u32 mine = 0;
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) mine += s.bins[top - j];
    u32 above = block_scan<THREADS>(mine, s.totals);
    if (above < want && want <= above + mine) {
        int bin = top;
        for (; above + s.bins[bin] < want; --bin) above += s.bins[bin];
        s.bin = bin, s.above = above, s.inside = s.bins[bin];
    }
    __syncthreads();
}

// Radix select over n values of which the nonzero ones are distinct. Digits start at the highest bit in which the
// values differ, so two or three rounds do; six are possible (ties of scores, told apart by position). A block
// that is alone on its processor has the registers to fetch up to eight values a thread once. Ends with take(v) for the
// values from the least on, in any order.
template <int THREADS, class Get, class Take = Ignore>
DEVICE Cut kth_largest(u32 n, Get get, u32 want, Scratch& s, Take take = {}) {
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    constexpr int WARPS = THREADS / WARP_SIZE;
    u64 kept[8];
    const auto visit = [&](auto use) {
        if constexpr (THREADS == SELECT_THREADS) {
            if (n <= 8 * THREADS) {
#pragma unroll
                for (int j = 0; j < 8; ++j) use(kept[j]);
                return;
            }
        }
        for_each<THREADS>(n, get, use);
    };
    if (THREADS == SELECT_THREADS && n <= 8 * THREADS) fetch<THREADS>(threadIdx.x, n, get, kept);
    u64 low = ~0ull, high = 0;
    u32 found = 0;
    visit([&](u64 v) {
        if (v == 0) return;
        low = v < low ? v : low;
        high = v > high ? v : high;
        ++found;
    });
    warp_bounds(low, high, found);
    if (lane == 0) s.low[warp] = low, s.high[warp] = high, s.totals[warp] = found;
    __syncthreads();
    if (warp == 0) {
        low = lane < WARPS ? s.low[lane] : ~0ull, high = lane < WARPS ? s.high[lane] : 0;
        found = lane < WARPS ? s.totals[lane] : 0;
        warp_bounds(low, high, found);
        if (lane == 0) s.low[0] = low, s.high[0] = high, s.totals[0] = found;
    }
    __syncthreads();
    low = s.low[0], high = s.high[0], found = s.totals[0];
    const u64 greatest = high;
    if (want == 0) low = ~0ull;
    const int rounds = want == 0 || found <= want ? 0 : 6;
    for (int round = 0; round < rounds; ++round) {
        const int shift = max(0, 64 - __clzll(static_cast<long long>(high - low)) - BIN_BITS);
        for (int i = threadIdx.x; i < BINS; i += THREADS) s.bins[i] = 0;
        __syncthreads();
        visit([&](u64 v) {
            if (v >= low && v <= high) atomicAdd(&s.bins[(v - low) >> shift], 1u);
        });
        __syncthreads();
        find_bin<THREADS>(want, s);
        low += static_cast<u64>(s.bin) << shift;
        high = low + min(high - low, (1ull << shift) - 1);  // low + the bin's size may be too large for 64 bits: NaN
        want -= s.above;
        if (s.inside == want || shift == 0) break;
    }
    __syncthreads();  // the scratch is free again
    visit([&](u64 v) {
        if (v >= low) take(v);
    });
    return {low, greatest, found};
}

// --- the steps of a selection

// Write `candidate` of every lane that has one (not 0) behind the survivors; the whole warp calls.
DEVICE void append_survivors(u64 candidate, u64* survivors, int* count) {
    const u32 mask = __ballot_sync(FULL_MASK, candidate != 0);
    if (mask == 0) return;
    const int lane = threadIdx.x % WARP_SIZE;
    int first = 0;
    if (lane == 0) first = atomicAdd(count, __popc(mask));
    first = __shfl_sync(FULL_MASK, first, 0);
    if (candidate != 0) survivors[first + __popc(mask & ((1u << lane) - 1))] = candidate;
}

// Pick the leaf groups of a request that can hold one of its `want` best candidates, from the maxima of its n groups
// and of their leaf groups, LEAVES each. A candidate below `floor_key` is not among the best.
//
// The least of the `want` best groups is such a floor, and mostly few leaf groups reach it. Smaller groups give a
// higher one: four leaf groups count as a group where their maxima fit into shared memory. Where more than `room` leaf
// groups reach it, or where there are not that many groups, the best leaf groups are selected exactly. Where there are
// fewer of those, too, the best two of each (`second_key`, unless null) may still be `want` candidates and give a floor.
template <int LEAVES>
DEVICE void pick_groups(const u32* group_key, const u32* leaf_key, const u32* second_key, u32 n, u32 want, u32 room,
                        int* picked, int* num_picked, u32* floor_key) {
    __shared__ Scratch s;
    __shared__ u32 list[MAX_WIDTH], four_key[MAX_WIDTH];
    int bits = 31 - __clz(LEAVES);
    if (n * LEAVES <= 4 * MAX_WIDTH) {
        bits = 2, n *= LEAVES / 4;
        for (u32 i = threadIdx.x; i < n; i += SELECT_THREADS) {
            const uint4 key = reinterpret_cast<const uint4*>(leaf_key)[i];
            four_key[i] = max(max(key.x, key.y), max(key.z, key.w));
        }
        group_key = four_key;
    }
    const bool all = n <= want;
    for (u32 i = threadIdx.x; all && i < n; i += SELECT_THREADS) list[i] = i;
    const auto group = [&](u32 i) { return pack_candidate(group_key[i], i); };
    const auto leaf = [&](u32 i) {
        const u32 id = (list[i >> bits] << bits) + (i & ((1 << bits) - 1));
        return pack_candidate(leaf_key[id], id);
    };
    const auto restart = [&] {
        __syncthreads();
        if (threadIdx.x == 0) s.counter = 0;
        __syncthreads();
    };
    // All are counted, the first `room` are picked.
    const auto pick = [&](u64 v) {
        const u32 at = atomicAdd(&s.counter, 1u);
        if (at < room) picked[at] = candidate_position(v);
    };
    u32 floor = 1;
    const auto raise_floor = [&](const Cut& cut) { floor = cut.found >= want ? candidate_key(cut.least) : 1; };
    bool exact = false;
    if (!all) {
        restart();
        const auto keep = [&](u64 v) { list[atomicAdd(&s.counter, 1u)] = candidate_position(v); };
        raise_floor(kth_largest<SELECT_THREADS>(n, group, want, s, keep));
        __syncthreads();
        n = s.counter;
    } else if (n << bits <= want) {
        const u32 leaves = n << bits;
        const auto two = [&](u32 i) { return pack_candidate(i < leaves ? leaf_key[i] : second_key[i - leaves], i); };
        if (second_key != nullptr && leaves * 2 >= want)
            raise_floor(kth_largest<SELECT_THREADS>(leaves * 2, two, want, s));
    } else {
        exact = true;
    }
    if (!exact) {
        restart();
        for_each<SELECT_THREADS>(n << bits, leaf, [&](u64 v) {
            if (candidate_key(v) >= floor) pick(v);
        });
        __syncthreads();
        exact = s.counter > room;
    }
    if (exact) {
        restart();
        raise_floor(kth_largest<SELECT_THREADS>(n << bits, leaf, want, s, pick));
        __syncthreads();
    }
    const u32 count = s.counter;
    if (threadIdx.x == 0) *num_picked = count, *floor_key = floor;
}

// What a selection writes for one request; see grinf.ops.contracts.Selection.
struct Beams {
    float* score;
    int* parent;
    int* token;
    int* node;
    int* count;

    DEVICE void write(u32 row, float beam_score, int beam_parent, int beam_token, int beam_node) const {
        score[row] = beam_score, parent[row] = beam_parent, token[row] = beam_token, node[row] = beam_node;
    }
};

// How many of the n candidates in shared memory score within `margin` of the best.
DEVICE u32 count_within(float margin, const u64* list, u32 n, Scratch& s) {
    const int lane = threadIdx.x % WARP_SIZE;
    u32 best = 0, within = 0;
    if (threadIdx.x == 0) s.bin = 0, s.counter = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < n; i += SELECT_THREADS) best = max(best, candidate_key(list[i]));
    best = __reduce_max_sync(FULL_MASK, best);
    if (lane == 0) atomicMax(&s.bin, best);
    __syncthreads();
    const float bottom = __fsub_rn(key_score(s.bin), margin);
    for (u32 i = threadIdx.x; i < n; i += SELECT_THREADS) within += key_score(candidate_key(list[i])) >= bottom;
    within = __reduce_add_sync(FULL_MASK, within);
    if (lane == 0) atomicAdd(&s.counter, within);
    __syncthreads();
    return s.counter;
}

// Which of a request's blocks ranks a candidate: any rule does on which they agree and that loads them alike.
DEVICE u32 block_of(u64 candidate) { return (candidate_position(candidate) * 0x9e3779b1u >> 16) % gridDim.x; }

// Order the best of a request's n survivors, drop those below the margin, and write all `width` rows, by any number of
// blocks. decode(position, parent, token, node) says what stands at a position.
//
// Nothing is sorted: the row of a survivor is the number of survivors above it. Every block lists all of them in shared
// memory, and counts for its own, one a lane, with a share of the list for each warp. Where they do not fit, every
// block cuts the list first.
template <class Decode>
DEVICE void finish_selection(const u64* survivors, u32 n, u32 want, float margin, u32 min_width, int width, Beams out,
                             Decode decode) {
    __shared__ Scratch s;
    __shared__ __align__(16) u64 list[MAX_WIDTH];
    __shared__ u32 num_own, rank[WARP_SIZE];
    static_assert(sizeof(s.bins) >= MAX_WIDTH * sizeof(u16));
    u16* own = reinterpret_cast<u16*>(s.bins);  // places in the list; the bins are free once the list is cut
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const auto survivor = [&](u32 i) { return survivors[i]; };
    u64 least = 1;
    if (n > MAX_WIDTH) least = kth_largest<SELECT_THREADS>(n, survivor, want, s).least;
    if (threadIdx.x == 0) s.counter = num_own = 0;
    if (warp == 0) rank[lane] = 0;
    __syncthreads();
    for_each<SELECT_THREADS>(n, survivor, [&](u64 v) {
        if (v < least) return;
        const u32 at = atomicAdd(&s.counter, 1u);
        list[at] = v;
        if (block_of(v) == blockIdx.x) own[atomicAdd(&num_own, 1u)] = at;
    });
    __syncthreads();
    const u32 found = s.counter;
    if (threadIdx.x == 0 && found % 2 == 1) list[found] = 0;  // the list is read in pairs
    __syncthreads();
    u32 count = min(want, found);
    if (margin < __int_as_float(0x7f800000)) count = min(count, max(count_within(margin, list, found, s), min_width));
    for (u32 start = 0; start < num_own; start += WARP_SIZE) {
        const u64 mine = start + lane < num_own ? list[own[start + lane]] : 0;
        u32 above = 0;
#pragma unroll 4
        for (u32 i = 2 * warp; i < found; i += 2 * SELECT_THREADS / WARP_SIZE) {
            const ulonglong2 pair = *reinterpret_cast<const ulonglong2*>(list + i);
            above += (pair.x > mine) + (pair.y > mine);
        }
        atomicAdd(&rank[lane], above);
        __syncthreads();
        if (warp == 0) {
            const u32 row = rank[lane];
            rank[lane] = 0;
            int parent = 0, token = 0, node = 0;
            if (mine != 0 && row < count) {
                decode(candidate_position(mine), parent, token, node);
                out.write(row, key_score(candidate_key(mine)), parent, token, node);
            }
        }
        __syncthreads();
    }
    for (u32 row = count + blockIdx.x * SELECT_THREADS + threadIdx.x; row < width; row += gridDim.x * SELECT_THREADS)
        out.write(row, NEG_INF, 0, 0, 0);
    if (blockIdx.x == 0 && threadIdx.x == 0) *out.count = count;
}
