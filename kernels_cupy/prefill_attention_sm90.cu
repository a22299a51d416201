// Prefill attention for Hopper: every token attends to itself and to the tokens before it in its own prompt.
//
//   out[t, h] = softmax(scale * q[t, h] . K) V,   K, V = keys and values of the prompt of t, up to t
//
// The tokens of a prompt times the query heads of a key-value head are the rows of one matrix: row r is token r / GROUP,
// query head r % GROUP. A tile is 128 rows of one prompt and key-value head. Its last token lies in its last key block
// of 128 keys, which is thus the only one to mask. Thread blocks are persistent: each takes tiles blockIdx.x,
// blockIdx.x + gridDim.x, ... of a list that begins with the tiles of most key blocks. One thread loads queries, keys and
// values by TMA, as they lie in the packed rows, into two stages of each; warpgroups 1 and 2 compute 64 rows each, from
// the last key block to the first.
//
// q_map              TMA map of the queries as [N, Hq, HEAD_DIM], box [128 / GROUP, GROUP, 64], 128-byte swizzle
// k_map, v_map       TMA maps of keys and values as [N, Hkv, HEAD_DIM], box [128, 1, 64], 128-byte swizzle
// cu_seqlens         int [batch + 1]; prompt b is rows cu_seqlens[b] to cu_seqlens[b + 1], which may be none
// out                elem [N, Hq, HEAD_DIM]; rows of no prompt are not written
//
// Launch: any grid (one block per multiprocessor), block 384, dynamic shared memory shared_bytes() of the binding.
// Constants: DTYPE (FP16, BF16), HEAD_DIM (64, 128), GROUP = Hq / Hkv (1, 2, 4, 8).
// Source: FlashAttention-3 (Shah et al., 2024).

#include "common.cuh"
#include "hopper.cuh"
#include "attention_sm90.cuh"

constexpr int TOKENS = ROWS / GROUP;  // of a tile

// Shared memory, in bytes from its start: two stages each of queries, keys and values, the rest.
enum { QUERIES = 0, KEYS = 2 * TILE, VALUES = 4 * TILE, CONTROL = 6 * TILE };

struct Control {
    u64 q_full[2], q_empty[2];
    Stages stages;
};

struct Args {
    const int* cu_seqlens;
    elem* out;
    int batch, kv_heads;
    float scale;
};

// Rows [start, start + length) are the prompt; `token`, the tile's first, counts from its start.
struct Tile {
    int start, length, token, head, blocks;
};

// --- device helpers

// Tokens of the longest prompt; for all lanes of a warp.
DEVICE int longest_prompt(const Args& args) {
    int longest = 0;
    for (int b = threadIdx.x % WARP_SIZE; b < args.batch; b += WARP_SIZE)
        longest = max(longest, args.cu_seqlens[b + 1] - args.cu_seqlens[b]);
    return __reduce_max_sync(FULL_MASK, longest);
}

// Calls take(tile) for every tile of this thread block, those with most key blocks first.
template <typename Take>
DEVICE void for_each_tile(const Args& args, int longest, Take take) {
    const int last = ceil_div(longest, TOKENS) - 1, tiles = args.batch * args.kv_heads;
    for (int at = blockIdx.x; at < (last + 1) * tiles; at += gridDim.x) {
        const int rest = at % tiles, b = rest / args.kv_heads;
        Tile tile;
        tile.start = args.cu_seqlens[b];
        tile.length = args.cu_seqlens[b + 1] - tile.start;
        tile.token = (last - at / tiles) * TOKENS;
        tile.head = rest % args.kv_heads;
        tile.blocks = tile.token / ROWS + 1;
        if (tile.token < tile.length) take(tile);
    }
}

DEVICE void load_tile(u32 to, const TensorMap& map, int head, int row, u64& full) {
    arrive_expecting(full, TILE);
#pragma unroll
    for (int panel = 0; panel < HEAD_DIM / 64; ++panel) copy_box(to + panel * PANEL, map, panel * 64, head, row, full);
}

// One thread: the queries of every tile and its key blocks, last first.
DEVICE void load(const Args& args, int longest, const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map,
                 u32 shared, Control& control) {
    Stages& stages = control.stages;
    u32 round = 0, turn = 0;
    for_each_tile(args, longest, [&](const Tile& tile) {
        const u32 stage = round & 1;
        wait(control.q_empty[stage], (round++ >> 1 & 1) ^ 1);
        load_tile(shared + QUERIES + stage * TILE, q_map, tile.head * GROUP, tile.start + tile.token,
                  control.q_full[stage]);
        for (int block = tile.blocks - 1; block >= 0; --block, ++turn) {
            const u32 at = turn & 1, parity = (turn >> 1 & 1) ^ 1;
            const int row = tile.start + block * ROWS;
            wait(stages.k_empty[at], parity);
            load_tile(shared + KEYS + at * TILE, k_map, tile.head, row, stages.k_full[at]);
            wait(stages.v_empty[at], parity);
            load_tile(shared + VALUES + at * TILE, v_map, tile.head, row, stages.v_full[at]);
        }
    });
}

DEVICE void write_rows(const Args& args, const Tile& tile, const float (&o)[HEAD_DIM / 2], const Softmax& softmax,
                       int group) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = group * 64 + row_of(2 * r), token = tile.token + row / GROUP;
        const int head = tile.head * GROUP + row % GROUP;
        const long long at = (long long)(tile.start + token) * args.kv_heads * GROUP + head;
        const float factor = __fdividef(1.f, warp_sum<4>(softmax.sum[r]));
        store_row(token < tile.length ? args.out + at * HEAD_DIM : nullptr, o, r, factor);
    }
}

// A consumer warpgroup: its rows of every tile.
DEVICE void attend(const Args& args, int longest, u32 shared, Control& control, int group) {
    const float scale_log2 = args.scale * LOG2E;
    u32 round = 0, turn = 0;
    for_each_tile(args, longest, [&](const Tile& tile) {
        u32 q[HEAD_DIM / 4];
        float o[HEAD_DIM / 2] = {};
        Softmax softmax = {{NEG_INF, NEG_INF}, {0.f, 0.f}};
        const u32 stage = round & 1;
        wait(control.q_full[stage], round++ >> 1 & 1);
        load_queries(q, shared + QUERIES + stage * TILE, group);
        const int key = (tile.blocks - 1) * ROWS, live = min(ROWS, tile.length - key);
        const int token = tile.token - key + group * (64 / GROUP);  // of this warpgroup's first row, in its last block
        attend_blocks(
            o, softmax, q, shared + KEYS, shared + VALUES, control.stages, turn, tile.blocks, live, true,
            [&](int i) { return column_of(i) > token + row_of(i) / GROUP; }, group, scale_log2);
        // Not before the products are done: nothing else makes sure that the loads of q are.
        if (threadIdx.x % WARP_SIZE == 0) arrive(control.q_empty[stage]);
        write_rows(args, tile, o, softmax, group);
    });
}

// --- kernel

extern "C" __global__ void __launch_bounds__(384, 1)
    grinf_prefill_attention_sm90(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                                 const __grid_constant__ TensorMap v_map, const int* cu_seqlens, elem* out, int batch,
                                 int kv_heads, float scale) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    const Args args = {cu_seqlens, out, batch, kv_heads, scale};
    const u32 shared = shared_address(bytes);
    Control& control = *reinterpret_cast<Control*>(bytes + CONTROL);

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < 2; ++stage) {
            barrier_init(control.q_full[stage], 1);
            barrier_init(control.q_empty[stage], 8);  // the consumers' warps
        }
        stages_init(control.stages);
        fence_async();
    }
    const int longest = longest_prompt(args);
    __syncthreads();

    if (threadIdx.x < 128) {
        give_registers<40>();
        if (threadIdx.x == 0) load(args, longest, q_map, k_map, v_map, shared, control);
    } else {
        take_registers<232>();
        attend(args, longest, shared, control, threadIdx.x / 128 - 1);
    }
}
