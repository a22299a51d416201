// Hopper's own instructions for kernels of sm_90a: mbarriers, the tensor memory accelerator (TMA), wgmma.
//
// Included after common.cuh; DTYPE (FP16, BF16) is the type of wgmma's operands, accumulators are fp32.
// Tiles in shared memory are panels of 64 columns, 128 bytes a row, in the order that TMA and wgmma call 128-byte
// swizzle: 16-byte chunk c of row r of a panel lies at chunk c ^ (r % 8). Panels start at multiples of 1024 bytes.
// Source: the PTX ISA, sections on mbarrier, cp.async.bulk.tensor and wgmma.

// --- mbarriers and the asynchronous proxy

DEVICE void barrier_init(u64& bar, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&bar)), "r"(arrivals) : "memory");
}

DEVICE void arrive(u64& bar) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&bar)) : "memory");
}

// Arrive, and let the phase also wait for `bytes` of TMA copies.
DEVICE void arrive_expecting(u64& bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&bar)), "r"(bytes)
                 : "memory");
}

// Wait for the end of the phase of this parity; a fresh barrier counts as past a phase of parity 1.
DEVICE void wait(u64& bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(&bar)),
        "r"(parity)
        : "memory");
}

// What this thread wrote to shared memory by ordinary stores becomes visible to wgmma and TMA.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier `id` among THREADS threads of the block.
template <int THREADS>
DEVICE void sync_threads(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

DEVICE void zero16(u32 to) { asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory"); }

// A warpgroup's registers a thread: what some give, others take.
template <int N>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// --- TMA

struct alignas(64) TensorMap {
    char opaque[128];
};

// Copy the map's box at coordinates (x, y, z), innermost first; `full` counts its bytes.
DEVICE void copy_box(u32 to, const TensorMap& map, int x, int y, int z, u64& full) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&full))
        : "memory");
}

// --- wgmma

// Descriptor of an operand in swizzled panels: 8 rows take 1024 bytes; `leading` bytes lead from panel to panel where
// an instruction spans several (columns are N), and mean nothing elsewhere.
DEVICE u64 descriptor(u32 address, int leading) {
    return (1ull << 62) | (64ull << 32) | (u64(leading >> 4) << 16) | (address >> 4);
}

// Before the first wgmma of a group: orders register accesses.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// All of d is in registers here, as far as the compiler knows, and may have changed. After the wait for a wgmma it keeps
// uses of the accumulator behind that wait.
template <int N>
DEVICE void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
DEVICE void pin(int (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#if DTYPE == BF16
#define OPERANDS "f32.bf16.bf16"
#else
#define OPERANDS "f32.f16.f16"
#endif
#define F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(d, i) F4(d, i), F4(d, i + 4), F4(d, i + 8), F4(d, i + 12)
#define D32                                                                                                \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D64                                                                                                 \
    D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
        "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d = a * b, or d += a * b if `accumulate`: 64 rows a warpgroup, 64 or 128 columns by the size of d, 16 of the inner
// dimension. a: registers a[4 * k] .. a[4 * k + 3], laid out as mma.m16n8k16's for each warp's 16 rows.
// b: N_MAJOR 1 if its columns are contiguous in memory, 0 if the inner dimension is.
template <int N_MAJOR, int A>
DEVICE void wgmma(float (&d)[64], const u32 (&a)[A], int k, u64 b, bool accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16." OPERANDS " {" D64
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
                 : F16(d, 0), F16(d, 16), F16(d, 32), F16(d, 48)
                 : "r"(a[4 * k]), "r"(a[4 * k + 1]), "r"(a[4 * k + 2]), "r"(a[4 * k + 3]), "l"(b), "r"(int(accumulate)),
                   "n"(N_MAJOR));
}

template <int N_MAJOR, int A>
DEVICE void wgmma(float (&d)[32], const u32 (&a)[A], int k, u64 b, bool accumulate) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16." OPERANDS " {" D32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
                 : F16(d, 0), F16(d, 16)
                 : "r"(a[4 * k]), "r"(a[4 * k + 1]), "r"(a[4 * k + 2]), "r"(a[4 * k + 3]), "l"(b), "r"(int(accumulate)),
                   "n"(N_MAJOR));
}
