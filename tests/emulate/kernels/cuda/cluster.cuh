/* cluster.cuh - for a host: what kernels/cuda/cluster.cuh has in assembler. */
#ifndef KLD_KERNELS_CUDA_CLUSTER_CUH
#define KLD_KERNELS_CUDA_CLUSTER_CUH

#include "kernels/cuda/ptx.cuh"

typedef uint64_t barrier;

#define KLD_RACECHECK 0
static constexpr uint32_t WARP_ARRIVALS = 1;
static inline bool arrives_for_warp() { return threadIdx.x % 32 == 0; }

static inline void barrier_init(barrier *at, uint32_t count) { emulate_barrier_init(at, count); }
static inline void barrier_init_done() {}
static inline void barrier_arrive(barrier *at) { emulate_barrier_arrive(at, 0); }
static inline void barrier_expect(barrier *at, uint32_t bytes) {
    emulate_barrier_arrive(at, bytes);
}
static inline void barrier_wait(barrier *at, uint32_t parity) { emulate_barrier_wait(at, parity); }

static inline void copy_bulk(void *to, const void *from, uint32_t bytes, barrier *at) {
    emulate_copy_bulk(to, from, bytes, at);
}
static inline void fence_copies() {}
static inline void await_kernel_ahead() {}

static inline uint32_t cluster_rank() { return emulate_here->rank; }
static inline void cluster_sync() { emulate_cluster_sync(); }
template <class T> static inline const T *cluster_at(const T *at, uint32_t rank) {
    return (const T *)emulate_of_rank(at, rank);
}
static inline void cluster_send(void *to, barrier *at, uint32_t rank, uint64_t value) {
    memcpy(emulate_of_rank(to, rank), &value, sizeof value);
    emulate_barrier_complete((barrier *)emulate_of_rank(at, rank), sizeof value);
}

#endif
