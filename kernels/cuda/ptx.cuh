/* ptx.cuh - what the hardware has and CUDA C++ has no words for, on any card: approximations,
 * selections without a branch, loads from an address of shared memory, copies that go on beside the
 * thread, barriers of a part of a block. Thin wrappers; sm_90's own are in cluster.cuh. All
 * assembler of the kernels is in these two: tests/emulate has both in C++, for a host. */
#ifndef KLD_KERNELS_CUDA_PTX_CUH
#define KLD_KERNELS_CUDA_PTX_CUH

#include <cstdint>

#include "kernels/cuda/launch.h"

/* 1 / x within 1 ulp; 0 where that is subnormal, infinite where x is. */
static __device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x to 20 bits or so, from the upper half of it; for normal x. */
static __device__ __forceinline__ double reciprocal_wide(double x) {
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
    return y;
}

/* log2(x) within 2e-7 of it, or of 1 near 1. */
static __device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 2^x within 2 ulp; 0 where that is subnormal. */
static __device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The larger; NaN if one of them is. */
static __device__ __forceinline__ float max_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

/* a or b, both computed: neighbouring lanes differ, and a branch would keep the work of other
 * elements from filling the waits of this one's. */
static __device__ __forceinline__ float pick(bool first, float a, float b) {
    float y;
    asm("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nselp.f32 %0, %1, %2, p;\n}"
        : "=f"(y)
        : "f"(a), "f"(b), "r"((unsigned)first));
    return y;
}

/* The lanes of this warp before this thread's. */
static __device__ __forceinline__ uint32_t lanes_before() {
    uint32_t lanes;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lanes));
    return lanes;
}

/* This thread's number in its block, each time again: where what is made of it would not stay in a
 * register, but be stored and read back. */
static __device__ __forceinline__ uint32_t thread_again() {
    uint32_t number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return number;
}

/* What the launch has given each block, from the start of a line on: see KLD_CUDA_LINE_BYTES. */
static __device__ __forceinline__ uint4 *dynamic_shared() {
    extern __shared__ __align__(KLD_CUDA_LINE_BYTES) uint4 kld_dynamic_shared[];
    return kld_dynamic_shared;
}

static __device__ __forceinline__ uint32_t shared_at(const void *at) {
    return (uint32_t)__cvta_generic_to_shared(at);
}

/* Each time again: the compiler does not keep what it has read. */
static __device__ __forceinline__ float load_shared_float(uint32_t at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
    return x;
}
static __device__ __forceinline__ float4 load_shared_float4(uint32_t at) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(at));
    return x;
}
static __device__ __forceinline__ uint4 load_shared(uint32_t at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at));
    return x;
}
static __device__ __forceinline__ void store_shared(uint32_t at, const uint4 &x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

/* 16 bytes that the second-level cache is to keep before all others. FIRST_TOO: and the first-level
 * one as usual. */
template <bool FIRST_TOO> static __device__ __forceinline__ uint4 load_evict_last(const uint4 *at) {
    uint4 x;
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
    if (FIRST_TOO)
        asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "l"(at), "l"(policy));
    else
        asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "l"(at), "l"(policy));
    return x;
}

/* To the second-level cache. */
static __device__ __forceinline__ void prefetch_l2(const void *at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

/* 16 bytes to an address of shared memory, from device memory, beside what the thread does; both
 * aligned. */
static __device__ __forceinline__ void copy_16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
/* The same, of which `bytes` are read and the rest is 0. */
static __device__ __forceinline__ void copy_piece(void *to, const void *from, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_at(to)), "l"(from),
                 "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void copies_end() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* This thread's copies have landed, but those of the last GROUPS times from one copies_end() to the
 * next. */
template <int GROUPS> static __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

/* All of `threads` threads of this block; NAME 0 to 15: of the 64 barriers of a multiprocessor a
 * block takes as many as the largest, and all 16 where the name is no constant. */
template <int NAME> static __device__ __forceinline__ void block_sync(uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"n"(NAME), "r"(threads) : "memory");
}

#endif
