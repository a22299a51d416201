// What the kernels of this folder share: element types, vector access, warp reductions, asynchronous copies, mma.
//
// The only file with an #include of the toolkit. A kernel says `#include "common.cuh"` once, near its top; the loader
// splices this text there, so that the compile cache sees every change of it.
//
// Constants: DTYPE, one of FP32, FP16, BF16 (default BF16), the compute dtype, here `elem`. The conversions are
// overloaded, so a kernel may name float, __half and __nv_bfloat16 itself as well.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define FP32 0
#define FP16 1
#define BF16 2
#ifndef DTYPE
#define DTYPE BF16
#endif

#define DEVICE __device__ __forceinline__

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#if DTYPE == FP32
typedef float elem;
#elif DTYPE == FP16
typedef __half elem;
#elif DTYPE == BF16
typedef __nv_bfloat16 elem;
#else
#error "DTYPE is one of FP32, FP16, BF16"
#endif

#define WARP_SIZE 32
#define FULL_MASK 0xffffffffu
#define NEG_INF __int_as_float(0xff800000)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

// --- conversions; to an element: one rounding to nearest even

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(__half x) { return __half2float(x); }
DEVICE float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
    return x;
}
template <>
DEVICE __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
DEVICE __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// Two 16-bit elements in one register, the lower address in the lower half.
template <typename T>
DEVICE u32 pack2(float lo, float hi);
template <>
DEVICE u32 pack2<__half>(float lo, float hi) {
    __half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<u32*>(&h);
}
template <>
DEVICE u32 pack2<__nv_bfloat16>(float lo, float hi) {
    __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<u32*>(&h);
}

template <typename T>
DEVICE float2 unpack2(u32 x);
template <>
DEVICE float2 unpack2<__half>(u32 x) {
    return __half22float2(*reinterpret_cast<__half2*>(&x));
}
template <>
DEVICE float2 unpack2<__nv_bfloat16>(u32 x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));  // bf16 is the top half of fp32
}

// --- vector access: N elements of T at an address that N * sizeof(T) divides

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
    T at[N];
};

template <typename T, int N>
DEVICE Vec<T, N> load_vec(const T* p) {
    return *reinterpret_cast<const Vec<T, N>*>(p);
}

template <typename T, int N>
DEVICE void store_vec(T* p, const Vec<T, N>& v) {
    *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// 16 bytes through the read-only path; the memory must not be written while the kernel runs.
DEVICE uint4 load16(const void* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }
DEVICE void store16(void* p, uint4 v) { *reinterpret_cast<uint4*>(p) = v; }

// 16 bytes as floats: eight 16-bit elements or four of fp32.
template <typename T>
DEVICE void widen16(uint4 v, float* out) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 pair = unpack2<T>(words[i]);
        out[2 * i] = pair.x;
        out[2 * i + 1] = pair.y;
    }
}
template <>
DEVICE void widen16<float>(uint4 v, float* out) {
    out[0] = __uint_as_float(v.x);
    out[1] = __uint_as_float(v.y);
    out[2] = __uint_as_float(v.z);
    out[3] = __uint_as_float(v.w);
}

// The other way: 16 bytes from eight floats (four for fp32).
template <typename T>
DEVICE uint4 narrow16(const float* in) {
    return make_uint4(pack2<T>(in[0], in[1]), pack2<T>(in[2], in[3]), pack2<T>(in[4], in[5]), pack2<T>(in[6], in[7]));
}
template <>
DEVICE uint4 narrow16<float>(const float* in) {
    return make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]), __float_as_uint(in[3]));
}

// --- reductions over a warp; every lane gets the result. Butterfly order is fixed, so sums are reproducible.
// WIDTH: lanes that reduce together, a power of two; groups are aligned.

template <int WIDTH = WARP_SIZE>
DEVICE float warp_sum(float x) {
#pragma unroll
    for (int d = WIDTH / 2; d > 0; d /= 2) x += __shfl_xor_sync(FULL_MASK, x, d);
    return x;
}

template <int WIDTH = WARP_SIZE>
DEVICE float warp_max(float x) {
#pragma unroll
    for (int d = WIDTH / 2; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, d));
    return x;
}

// --- asynchronous copies, global to shared (sm_80 and later)

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// 16 bytes past L1; zeros where `valid` is false (the source is then not read).
DEVICE void cp_async16(u32 to, const void* from, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// --- tensor cores: 16 x 8 x 16, 16-bit inputs, fp32 accumulators

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
DEVICE void ldmatrix4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

DEVICE void ldmatrix4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// c += a * b. Lane l holds, with g = l / 4 and t = l % 4:
//   a[0] row g     columns 2t, 2t+1      a[1] row g + 8, same columns      a[2], a[3] the same rows, columns + 8
//   b[0] rows 2t, 2t+1 of column g       b[1] rows + 8
//   c[0], c[1] row g, columns 2t, 2t+1   c[2], c[3] row g + 8
template <typename T>
DEVICE void mma_16x8x16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <>
DEVICE void mma_16x8x16<__nv_bfloat16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
DEVICE void mma_16x8x16<__half>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- small mathematics

DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// --- split-KV

// Keys that each split of a context takes, a multiple of 64; the last may take fewer, later ones none. It depends on
// the request's own length, and on `splits` and `min_split`, which follow from the shape of the bucket.
DEVICE int split_keys(int length, int splits, int min_split) {
    return max(ceil_div(ceil_div(length, splits), 64) * 64, min_split);
}
