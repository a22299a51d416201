// Attention over shared tiles with mma.sync: 16 * M_TILES rows of queries a warp against tiles of keys and values,
// under an online softmax. Constants: DTYPE (FP16, BF16), HEAD_DIM (64, 128), M_TILES.

#define WARPS 4
#define THREADS (WARPS * WARP_SIZE)
#define WARP_ROWS (16 * M_TILES)
#define BLOCK_M (WARPS * WARP_ROWS)
#define CHUNKS (HEAD_DIM / 8)
#define ROW_BYTES (HEAD_DIM * 2)

// A shared tile: rows of HEAD_DIM elements in 16-byte chunks; chunk c of row r lies at c ^ (r % 8), so that the eight
// rows which one ldmatrix phase reads fall into eight different bank groups.
DEVICE u32 tile_address(u32 tile, int row, int chunk) { return tile + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4); }

// Online softmax of this warp's rows. A lane holds rows l / 4 and l / 4 + 8 of each m-tile, as mma lays out its result.
struct Rows {
    float out[M_TILES][HEAD_DIM / 8][4];
    float top[M_TILES][2];  // what exponents are relative to, in base 2: at most SLACK below the largest so far
    float sum[M_TILES][2];  // this lane's share
};

// Weights may reach 2^SLACK before the rows are rescaled to a new maximum. They lose nothing by it, in fp16 neither,
// and after the first tile rescaling is rare.
#define SLACK 8.0f
#define LOWEST -1e30f  // below any score, and finite: no key and masked keys need no case of their own

DEVICE void clear(Rows& rows) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) rows.out[m][n][i] = 0.0f;
        rows.top[m][0] = rows.top[m][1] = LOWEST;
        rows.sum[m][0] = rows.sum[m][1] = 0.0f;
    }
}

// s = q k^T for 8 * N keys.
template <int N>
DEVICE void score(float (&s)[M_TILES][N][4], u32 q_lane, u32 k_lane) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; ++d) {
        u32 a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) ldmatrix4(a[m], (q_lane ^ (d << 5)) + m * 16 * ROW_BYTES);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 b[4];
            ldmatrix4(b, (k_lane ^ (d << 5)) + n * 8 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                mma_16x8x16<elem>(s[m][n], a[m], b[0], b[1]);
                mma_16x8x16<elem>(s[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Moves the reference of the rows where the scores s leave it behind.
template <int N>
DEVICE void raise(const float (&s)[M_TILES][N][4], Rows& rows, float scale_log2) {
    float keep[M_TILES][2];
    bool raised = false;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = s[m][0][2 * half];
#pragma unroll
            for (int n = 0; n < N; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            top = warp_max<4>(top) * scale_log2;
            bool moves = top > rows.top[m][half] + SLACK;
            raised |= moves;
            keep[m][half] = moves ? exp2_approx(rows.top[m][half] - top) : 1.0f;
            rows.top[m][half] = moves ? top : rows.top[m][half];
        }
    if (!__any_sync(FULL_MASK, raised)) return;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i % 2 == 0) rows.sum[m][i / 2] *= keep[m][i / 2];
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n) rows.out[m][n][i] *= keep[m][i / 2];
        }
}

// Replaces the scores s by their weights exp(scale * s), relative to the rows' reference. A masked score is -inf.
template <int N>
DEVICE void soften(float (&s)[M_TILES][N][4], Rows& rows, float scale_log2) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[m][n][i] = exp2_approx(s[m][n][i] * scale_log2 - rows.top[m][i / 2]);
                rows.sum[m][i / 2] += s[m][n][i];
            }
}

// rows.out += p V for 8 * N keys.
template <int N>
DEVICE void gather_values(const float (&p)[M_TILES][N][4], Rows& rows, u32 v_lane) {
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        u32 a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            a[m][0] = pack2<elem>(p[m][k][0], p[m][k][1]);
            a[m][1] = pack2<elem>(p[m][k][2], p[m][k][3]);
            a[m][2] = pack2<elem>(p[m][k + 1][0], p[m][k + 1][1]);
            a[m][3] = pack2<elem>(p[m][k + 1][2], p[m][k + 1][3]);
        }
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 16; ++d) {
            u32 b[4];
            ldmatrix4_trans(b, (v_lane ^ (d << 5)) + k * 8 * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                mma_16x8x16<elem>(rows.out[m][2 * d], a[m], b[0], b[1]);
                mma_16x8x16<elem>(rows.out[m][2 * d + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Where a lane points ldmatrix at, in a tile whose first row is `row`; further sixteens of columns by ^ (d << 5).
DEVICE u32 lane_of_a(u32 tile, int row) {  // q as the left operand, v (transposed) as the right one
    int lane = threadIdx.x % WARP_SIZE;
    return tile_address(tile, row + lane % 16, lane / 16);
}
DEVICE u32 lane_of_b(u32 tile, int row) {  // k as the right operand
    int lane = threadIdx.x % WARP_SIZE;
    return tile_address(tile, row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Normalises the rows; a row that saw no key becomes 0. rows.sum becomes the sum over the row's four lanes.
DEVICE void finish(Rows& rows) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = warp_sum<4>(rows.sum[m][half]);
            float norm = sum == 0.0f ? 0.0f : __fdividef(1.0f, sum);
            rows.sum[m][half] = sum;
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; ++n) {
                rows.out[m][n][2 * half] *= norm;
                rows.out[m][n][2 * half + 1] *= norm;
            }
        }
}
