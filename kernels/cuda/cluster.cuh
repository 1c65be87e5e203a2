/* cluster.cuh - what sm_90 has and CUDA C++ has no words for: barriers in shared memory that count
 * arrivals and bytes, copies by the bulk copy engine, stores to the shared memory of another block
 * of the cluster. Thin wrappers, and which lanes of a warp arrive. On older hardware the bodies are
 * empty: no kernel that calls them is launched there. */
#ifndef KLD_KERNELS_CUDA_CLUSTER_CUH
#define KLD_KERNELS_CUDA_CLUSTER_CUH

#include <cstdint>

#include "kernels/cuda/ptx.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define SM_90(...) asm volatile(__VA_ARGS__)
#else
#define SM_90(...)
#endif

/* A phase of a barrier ends when `count` arrivals and all expected bytes have come. */
typedef uint64_t barrier;

static __device__ __forceinline__ void barrier_init(barrier *at, uint32_t count) {
    SM_90("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(at)), "r"(count) : "memory");
}
/* Makes initialised barriers known to the copy engine and to the cluster. */
static __device__ __forceinline__ void barrier_init_done() {
    SM_90("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* A warp arrives by its first lane, behind a __syncwarp() where others have stored or read.
 * racecheck of compute-sanitizer does not carry that into the lane's arrival and would report the
 * others: built with KLD_RACECHECK=1, for it alone, every lane arrives. Of a barrier that warps
 * arrive at by arrives_for_warp() the count is WARP_ARRIVALS for each. */
#ifndef KLD_RACECHECK
#define KLD_RACECHECK 0
#endif
static constexpr uint32_t WARP_ARRIVALS = KLD_RACECHECK ? 32 : 1;
static __device__ __forceinline__ bool arrives_for_warp() {
    return KLD_RACECHECK || threadIdx.x % 32 == 0;
}
static __device__ __forceinline__ void barrier_arrive(barrier *at) {
    SM_90("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_at(at)) : "memory");
}
/* One arrival, and `bytes` that copies will bring. */
static __device__ __forceinline__ void barrier_expect(barrier *at, uint32_t bytes) {
    SM_90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(at)), "r"(bytes)
          : "memory");
}
/* Until the phase of this parity is over. */
static __device__ __forceinline__ void barrier_wait(barrier *at, uint32_t parity) {
    uint32_t done = 1;
    do {
        SM_90("{\n"
              ".reg .pred p;\n"
              "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
              "selp.u32 %0, 1, 0, p;\n"
              "}\n"
              : "=r"(done)
              : "r"(shared_at(at)), "r"(parity)
              : "memory");
    } while (!done);
}

/* 16-byte aligned, a multiple of 16 bytes; counts on `at`. */
static __device__ __forceinline__ void copy_bulk(void *to, const void *from, uint32_t bytes,
                                                 barrier *at) {
    SM_90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
          "[%3];" ::"r"(shared_at(to)),
          "l"(from), "r"(bytes), "r"(shared_at(at))
          : "memory");
}
/* Orders this thread's stores to shared memory before later copies of the engine. */
static __device__ __forceinline__ void fence_copies() {
    SM_90("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Until the kernel ahead on the stream has ended, and what it wrote is there: of a kernel that was
 * launched to begin before that. */
static __device__ __forceinline__ void await_kernel_ahead() {
    SM_90("griddepcontrol.wait;" ::: "memory");
}

static __device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank = 0;
    SM_90("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
static __device__ __forceinline__ void cluster_sync() {
    SM_90("barrier.cluster.arrive.release.aligned;" ::: "memory");
    SM_90("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/* Where `at`, in shared memory, lies in block `rank`. */
template <class T>
static __device__ __forceinline__ const T *cluster_at(const T *at, uint32_t rank) {
    uint64_t there = (uint64_t)at;
    SM_90("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(at), "r"(rank));
    return (const T *)there;
}
/* 8 bytes to where `to` lies in block `rank`; counts them on that block's `at`. */
static __device__ __forceinline__ void cluster_send(void *to, barrier *at, uint32_t rank,
                                                    uint64_t value) {
    SM_90("{\n"
          ".reg .u32 to, at;\n"
          "mapa.shared::cluster.u32 to, %0, %2;\n"
          "mapa.shared::cluster.u32 at, %1, %2;\n"
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [to], %3, [at];\n"
          "}\n" ::"r"(shared_at(to)),
          "r"(shared_at(at)), "r"(rank), "l"(value)
          : "memory");
}
#endif
