// K1: every beam of a request attends to the request's shared context, on tensor cores (mma.sync).
//
//   out[b, w, i, :] = sum_j softmax_j(scale * q[b, w, i, :] . K[b, j, h, :]) V[b, j, h, :],   h = i / GROUP
//   lse[b, w, i]    = ln sum_j exp(scale * q . K[j])
//
// The rows of a block are the beams times the GQA group of one key-value head (row r: beam r / GROUP, query head
// h * GROUP + r % GROUP), so that a block reads each context key once for all of them.
//
// Split-KV: split s of a request takes keys [s * n, (s + 1) * n), n = split_keys(context_len, splits, min_split),
// a function of the request's own length, never of its batch-mates. Splits past the context hold nothing.
//
// FUSED 0, grinf_context_attention: each split of a request writes (out, lse), fp32; an empty one lse = -inf.
// FUSED 1, grinf_decode_attention: a request whose context is one split goes on to its beams' own keys (K2) and
//   writes the finished rows (K3): the keys of a warp's beams are one more tile, gathered through `ancestor`,
//   under a mask that leaves each row its own beam's. The splits of other requests are left to grinf_beam_merge.
//
// Layouts
//   q            elem [B, W, KV_HEADS * GROUP, HEAD_DIM], strides q_batch and q_row in elements
//   k, v         elem [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM], page_chunks * 8 elements apart, 64 GiB at most
//   page_table   int [B, table_width]          context_len, width   int [B]
//   part         float [splits, B, W, KV_HEADS * GROUP, HEAD_DIM]    part_lse   float, the same without HEAD_DIM
//   k_beams, v_beams   elem [slots, T, W_max, KV_HEADS, HEAD_DIM], strides slot_stride and step_stride
//   ancestor     int [B, steps, W]             slot, step   int [B]
//   out          elem [B, W, KV_HEADS * GROUP, HEAD_DIM]; it and the beams' arguments are read if FUSED alone
// Launch: grid (ceil(W * GROUP / BLOCK_M), KV_HEADS, B * splits), block 128,
//   dynamic shared bytes (BLOCK_M + 4 * BLOCK_N) * HEAD_DIM * 2, BLOCK_M = 64 * M_TILES.
// Constants: DTYPE (FP16, BF16), HEAD_DIM (64, 128), GROUP, KV_HEADS, PAGE_SIZE (a power of two, 16 or more),
//   M_TILES (1, 2: sixteens of rows per warp), BLOCK_N (32, 64: keys of a tile), FUSED.
// Source: FlashAttention-2 (Dao, 2023) for the loop, Flash-Decoding (Dao et al., 2023) for the splits.

#include "common.cuh"
#include "mma_tile.cuh"

#define HEADS (KV_HEADS * GROUP)
#define KEY_STRIDE (KV_HEADS * HEAD_DIM)
#define KEY_CHUNKS (KV_HEADS * CHUNKS)
#define STAGE_BYTES (BLOCK_N * ROW_BYTES)
#define PASS_ROWS (THREADS / CHUNKS)
#define SEGMENT (PAGE_SIZE < BLOCK_N ? PAGE_SIZE : BLOCK_N)
// Beams that the rows of a warp belong to, and the keys of theirs that it takes at a time.
#define WARP_BEAMS (WARP_ROWS % GROUP == 0 ? WARP_ROWS / GROUP : (WARP_ROWS + GROUP - 2) / GROUP + 1)
#define CHUNK_KEYS 16
#if FUSED
#define ENTRY grinf_decode_attention
#else
#define ENTRY grinf_context_attention
#endif

// --- device helpers

// The block copies its rows of q; rows at and past `end` become zeros.
DEVICE void load_queries(u32 tile, const elem* q, long long q_row, int first, int end) {
    int chunk = threadIdx.x % CHUNKS;
#pragma unroll
    for (int i = 0; i < BLOCK_M; i += PASS_ROWS) {
        int row = i + threadIdx.x / CHUNKS;
        int r = min(first + row, end - 1);
        const elem* from = q + r / GROUP * q_row + r % GROUP * HEAD_DIM + chunk * 8;
        cp_async16(tile_address(tile, row, chunk), from, first + row < end);
    }
}

struct Context {
    const elem *k, *v;
    const int* page_table;
    u32 page_chunks;
    u32 table;       // first entry of the request's page table
    int first, end;  // keys of this split
};

// Where a thread takes part in copying tiles: always the same chunk, of every PASS_ROWS-th key.
struct Copier {
    u32 k, v;  // shared addresses in the first tiles
    u32 from;  // chunk in page 0 of the pools; 32 bits of 16 bytes reach 64 GiB
    int left;  // keys from the thread's first one to the end of the split
};

// The block copies keys and values of tile t of its split into stage t % 2; zeros past the end of the split.
DEVICE void load_tile(const Context& context, const Copier& copier, int t) {
    u32 stage = t % 2 * STAGE_BYTES;
    int left = copier.left - t * BLOCK_N;
#pragma unroll
    for (int segment = 0; segment < BLOCK_N; segment += SEGMENT) {
        u32 start = context.first + t * BLOCK_N + segment;
        u32 page = segment < left ? __ldg(context.page_table + context.table + start / PAGE_SIZE) : 0;
        u32 at = page * context.page_chunks + start % PAGE_SIZE * KEY_CHUNKS + copier.from;
        const elem* from_k = context.k + 8ull * at;
        const elem* from_v = context.v + 8ull * at;
#pragma unroll
        for (int i = 0; i < SEGMENT; i += PASS_ROWS) {
            u32 to = stage + (segment + i) * ROW_BYTES;
            cp_async16(copier.k + to, from_k + i * KEY_STRIDE, segment + i < left);
            cp_async16(copier.v + to, from_v + i * KEY_STRIDE, segment + i < left);
        }
    }
}

// Only the first `keys` of the tile are keys.
DEVICE void mask_tail(float (&s)[M_TILES][BLOCK_N / 8][4], int keys) {
    int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (n * 8 + lane % 4 * 2 + i % 2 >= keys)
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) s[m][n][i] = NEG_INF;
}

// Fold the keys of the split into the rows. The queries are on their way into shared memory; the tiles, two stages
// of keys and two of values, are free, and free again on return.
DEVICE void attend_context(Rows& rows, const Context& context, int head, u32 q_lane, u32 k_tile, u32 v_tile, bool live,
                           float scale_log2) {
    u32 k_lane = lane_of_b(k_tile, 0), v_lane = lane_of_a(v_tile, 0);
    int keys = context.end - context.first, tiles = max(ceil_div(keys, BLOCK_N), 0);
    int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    Copier copier = {tile_address(k_tile, row, chunk), tile_address(v_tile, row, chunk),
                     u32(row * KEY_CHUNKS + head * CHUNKS + chunk), keys - row};
    if (tiles > 0) load_tile(context, copier, 0);
    cp_async_commit();
    for (int t = 0; t < tiles; ++t) {
        cp_async_wait<0>();
        __syncthreads();  // tile t is there, and nobody reads tile t - 1 any more
        if (t + 1 < tiles) load_tile(context, copier, t + 1);
        cp_async_commit();
        if (!live) continue;
        float s[M_TILES][BLOCK_N / 8][4];
        score(s, q_lane, k_lane + t % 2 * STAGE_BYTES);
        if (t + 1 == tiles) mask_tail(s, keys - t * BLOCK_N);
        raise(s, rows, scale_log2);
        soften(s, rows, scale_log2);
        gather_values(s, rows, v_lane + t % 2 * STAGE_BYTES);
    }
    cp_async_wait<0>();
    __syncthreads();  // the queries are there, and nobody reads the last tile any more
}

#if FUSED
struct Beams {
    const elem *k, *v;    // the request's slot and head
    const int* ancestor;  // [steps, W] of the request
    long long step_stride;
    int ancestor_row;  // W
    int width;
    int steps;  // keys of each beam
};

// Offset of virtual key `index` of this warp in the beam pools, -1 past the last. The virtual keys of a warp are its
// beams' keys of step 0, then those of step 1, ...: index = step * WARP_BEAMS + beam.
DEVICE long long beam_key(const Beams& beams, int first_beam, int index) {
    int step = index / WARP_BEAMS;
    int beam = first_beam + index % WARP_BEAMS;
    if (step >= beams.steps || beam >= beams.width) return -1;
    return step * beams.step_stride + (long long)__ldg(beams.ancestor + step * beams.ancestor_row + beam) * KEY_STRIDE;
}

// The warp copies its CHUNK_KEYS virtual keys (or values); lane i % 16 holds the offset of key i.
DEVICE void load_beam_keys(u32 tile, int first_row, const elem* pool, long long offset) {
    int lane = threadIdx.x % WARP_SIZE;
    int chunk = lane % CHUNKS;
#pragma unroll
    for (int i = 0; i < CHUNK_KEYS; i += WARP_SIZE / CHUNKS) {
        int row = i + lane / CHUNKS;
        long long from = __shfl_sync(FULL_MASK, offset, row);
        cp_async16(tile_address(tile, first_row + row, chunk), pool + max(from, 0ll) + chunk * 8, from >= 0);
    }
}

// A row sees the keys of its own beam alone.
DEVICE void mask_beams(float (&s)[M_TILES][CHUNK_KEYS / 8][4], int first_key, int keys, int first_beam, int first_row) {
    int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < CHUNK_KEYS / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int index = first_key + n * 8 + lane % 4 * 2 + i % 2;
                int row = first_row + m * 16 + lane / 4 + i / 2 * 8;
                if (index >= keys || row / GROUP != first_beam + index % WARP_BEAMS) s[m][n][i] = NEG_INF;
            }
}

// Fold the beams' own keys into the rows, CHUNK_KEYS at a time, through the warp's own part of the free key and value
// tiles: no other warp has a say in it.
DEVICE void attend_beams(Rows& rows, const Beams& beams, u32 q_lane, u32 k_tile, u32 v_tile, int first_row,
                         float scale_log2) {
    int own = threadIdx.x / WARP_SIZE * CHUNK_KEYS;
    int first_beam = first_row / GROUP;
    int keys = beams.steps * WARP_BEAMS;
    u32 k_lane = lane_of_b(k_tile, own);
    u32 v_lane = lane_of_a(v_tile, own);
    long long offset = beam_key(beams, first_beam, threadIdx.x % CHUNK_KEYS);
    load_beam_keys(k_tile, own, beams.k, offset);
    cp_async_commit();
    for (int first = 0; first < keys; first += CHUNK_KEYS) {
        load_beam_keys(v_tile, own, beams.v, offset);
        cp_async_commit();
        cp_async_wait<1>();
        __syncwarp();
        float s[M_TILES][CHUNK_KEYS / 8][4];
        score(s, q_lane, k_lane);
        __syncwarp();
        if (first + CHUNK_KEYS < keys) {
            offset = beam_key(beams, first_beam, first + CHUNK_KEYS + threadIdx.x % CHUNK_KEYS);
            load_beam_keys(k_tile, own, beams.k, offset);
        }
        cp_async_commit();
        mask_beams(s, first, keys, first_beam, first_row);
        raise(s, rows, scale_log2);
        soften(s, rows, scale_log2);
        cp_async_wait<1>();
        __syncwarp();
        gather_values(s, rows, v_lane);
        __syncwarp();
    }
}
#endif

// fp32 rows of one split, and their log-sum-exp.
DEVICE void store_partial(const Rows& rows, float* part, float* lse, int first_row, int end_row) {
    int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = rows.sum[m][half];
            int r = first_row + m * 16 + half * 8 + lane / 4;
            if (r >= end_row) continue;
            int at = r / GROUP * HEADS + r % GROUP;
            if (lane % 4 == 0) lse[at] = sum == 0.0f ? NEG_INF : LN2 * (rows.top[m][half] + log2_approx(sum));
            float* to = part + (long long)at * HEAD_DIM + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n)
                store_vec<float, 2>(to + n * 8, {rows.out[m][n][2 * half], rows.out[m][n][2 * half + 1]});
        }
}

#if FUSED
// Finished rows, through the warp's own rows of the q tile so that global stores are 16 bytes wide.
DEVICE void store_final(const Rows& rows, elem* out, elem* tile, int first_row, int end_row) {
    int lane = threadIdx.x % WARP_SIZE;
    int tile_row = threadIdx.x / WARP_SIZE * WARP_ROWS;
    char* bytes = reinterpret_cast<char*>(tile);
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = tile_row + m * 16 + half * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n)
                *reinterpret_cast<u32*>(bytes + tile_address(0, row, n) + lane % 4 * 4) =
                    pack2<elem>(rows.out[m][n][2 * half], rows.out[m][n][2 * half + 1]);
        }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i += WARP_SIZE / CHUNKS) {
        int row = i + lane / CHUNKS;
        int r = first_row + row;
        if (r >= end_row) continue;
        uint4 piece = *reinterpret_cast<const uint4*>(bytes + tile_address(0, tile_row + row, lane % CHUNKS));
        store16(out + (long long)(r / GROUP * HEADS + r % GROUP) * HEAD_DIM + lane % CHUNKS * 8, piece);
    }
}
#endif

// --- kernel

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    ENTRY(const elem* __restrict__ q, const elem* __restrict__ k, const elem* __restrict__ v,
          const int* __restrict__ page_table, const int* __restrict__ context_len, const int* __restrict__ width,
          float* __restrict__ part, float* __restrict__ part_lse, long long q_batch, long long q_row, u32 page_chunks,
          int table_width, int beams_per_request, int splits, int min_split, float scale_log2,
          const elem* __restrict__ k_beams, const elem* __restrict__ v_beams, const int* __restrict__ slot,
          const int* __restrict__ ancestor, const int* __restrict__ step, elem* __restrict__ out, long long slot_stride,
          long long step_stride, int steps) {
    extern __shared__ __align__(1024) elem shared[];
    // Splits vary slowest: the blocks of a request that is not split come first and spread over all multiprocessors.
    int batch = gridDim.z / splits, b = blockIdx.z % batch, split = blockIdx.z / batch, head = blockIdx.y;
    int length = context_len[b];
    int n = split_keys(length, splits, min_split);
    int first_key = split * n, end_key = min(first_key + n, length);
    int first_row = blockIdx.x * BLOCK_M, end_row = width[b] * GROUP;
    if (first_row >= end_row) return;
#if FUSED
    bool whole = length <= n;
    if (whole ? split > 0 : first_key >= length) return;
#endif

    int warp_row = first_row + threadIdx.x / WARP_SIZE * WARP_ROWS;
    bool live = warp_row < end_row;
    u32 q_tile = shared_address(shared), k_tile = q_tile + BLOCK_M * ROW_BYTES, v_tile = k_tile + 2 * STAGE_BYTES;
    u32 q_lane = lane_of_a(q_tile, warp_row - first_row);
    Context context = {k, v, page_table, page_chunks, u32(b * table_width), first_key, end_key};
    Rows rows;
    clear(rows);
    load_queries(q_tile, q + b * q_batch + head * GROUP * HEAD_DIM, q_row, first_row, end_row);
    attend_context(rows, context, head, q_lane, k_tile, v_tile, live, scale_log2);
    if (!live) return;
    long long row_of_request = (long long)b * beams_per_request * HEADS + head * GROUP;
#if FUSED
    if (whole) {
        long long pool = slot[b] * slot_stride + head * HEAD_DIM;
        Beams beams = {k_beams + pool, v_beams + pool,    ancestor + (long long)b * steps * beams_per_request,
                       step_stride,    beams_per_request, width[b],
                       step[b] + 1};
        attend_beams(rows, beams, q_lane, k_tile, v_tile, warp_row, scale_log2);
        finish(rows);
        store_final(rows, out + row_of_request * HEAD_DIM, shared, warp_row, end_row);
        return;
    }
#endif
    finish(rows);
    row_of_request += (long long)split * batch * beams_per_request * HEADS;
    store_partial(rows, part + row_of_request * HEAD_DIM, part_lse + row_of_request, warp_row, end_row);
}
