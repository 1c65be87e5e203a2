/* resident.cuh - rows that stay in shared memory between the passes over them, read from device
 * memory once: the blocks of a cluster hold a slice of the row each; one warp of a block brings the
 * next row while the others compute on this one; what the warps found is exchanged across the
 * cluster. No mathematics here.
 *
 * Slots and chunks. A block has `slots` places for a slice of both tensors, cut into chunks of
 * CHUNK vectors. A chunk's `full` barrier says that it has come, its `empty` barrier that all warps
 * are done with it. Threads of the block: WARPS warps that compute, one that copies. */
#ifndef KLD_KERNELS_CUDA_RESIDENT_CUH
#define KLD_KERNELS_CUDA_RESIDENT_CUH

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/row.cuh"

namespace resident {

constexpr uint32_t WARPS = KLD_CUDA_RESIDENT_WARPS, COMPUTING = 32 * WARPS;
constexpr uint32_t THREADS = COMPUTING + 32;
constexpr uint32_t CHUNK = KLD_CUDA_RESIDENT_CHUNK; /* vectors of 16 bytes, of each tensor */
constexpr uint32_t STEPS = CHUNK / COMPUTING;       /* of a thread in a chunk */
constexpr uint32_t EDGE = 16; /* bytes behind a slice: rows at odd addresses start 2 bytes late */

/* What one warp found in its part of a row. What the numbers mean is the passes' business. */
struct part {
    double sum[4];
    int32_t mark[2];
};

struct block_shared {
    barrier full[KLD_CUDA_RESIDENT_CHUNKS_MAX], empty[KLD_CUDA_RESIDENT_CHUNKS_MAX];
    barrier exchanged[2];
    uint4 stage[WARPS][32]; /* of stores to unaligned rows */
};

/* Dynamic shared memory of a block. */
static inline size_t bytes(const kld_cuda_args &args, size_t element) {
    return sizeof(block_shared) + 2 * args.cluster * WARPS * sizeof(part) +
           (size_t)args.slots * 2 * (args.slice * element + EDGE);
}

/* One block's place in the launch. */
struct place {
    uint32_t rank, cluster; /* of the cluster: this block, how many */
    uint64_t first_group, groups_step;
    uint32_t slice, count; /* classes: of every block but the last, of this one */
    uint32_t chunks;       /* of this block's slice */
    uint32_t slots, tensor_bytes;
    block_shared *shared;
    part *parts; /* [2][cluster * WARPS] */
    char *data;  /* [slots][2][tensor_bytes] */

    __device__ __forceinline__ char *tensor(uint32_t slot, uint32_t which) const {
        return data + (size_t)(2 * slot + which) * tensor_bytes;
    }
};

template <class T> static __device__ place place_of(const kld_cuda_args &args, char *dynamic) {
    place at;
    at.rank = cluster_rank();
    at.cluster = args.cluster;
    at.first_group = blockIdx.x / args.cluster;
    at.groups_step = gridDim.x / args.cluster;
    at.slice = args.slice;
    uint64_t first = (uint64_t)at.rank * args.slice;
    uint64_t rest = first < args.classes ? args.classes - first : 0;
    at.count = (uint32_t)min(rest, (uint64_t)args.slice);
    at.chunks = (uint32_t)((at.count * sizeof(T) + 16 * CHUNK - 1) / (16 * CHUNK));
    at.slots = args.slots;
    at.tensor_bytes = (uint32_t)(args.slice * sizeof(T)) + EDGE;
    at.shared = (block_shared *)dynamic;
    at.parts = (part *)(dynamic + sizeof(block_shared));
    at.data = dynamic + sizeof(block_shared) + 2 * at.cluster * WARPS * sizeof(part);
    return at;
}

/* The rows of this cluster, in order: FUNCTION(index, group, last of its group). */
template <class FUNCTION>
static __device__ __forceinline__ void each_row(const kld_cuda_args &args, const place &at,
                                                FUNCTION function) {
    uint64_t groups = (args.rows + args.group_rows - 1) / args.group_rows;
    for (uint64_t group = at.first_group; group < groups; group += at.groups_step) {
        uint64_t end = min((group + 1) * args.group_rows, args.rows);
        for (uint64_t index = group * args.group_rows; index < end; index++)
            function(index, group, index + 1 == end);
    }
}

/* ---- the warp that copies ---------------------------------------------------------------------
 */

/* Does a row start 2 bytes after a multiple of 4? Its slice then lies 2 bytes late. */
static __device__ __forceinline__ bool is_odd(const void *at) { return ((uintptr_t)at & 3) == 2; }

template <class T>
static __device__ void bring(char *to, const char *from, uint32_t bytes, barrier *full,
                             unsigned lane) {
    constexpr uint32_t SIZE = sizeof(T);
    uint32_t first, end; /* bytes in between go in words or in bulk, the rest in elements */
    if (((uintptr_t)from & 15) == 0) {
        first = 0;
        end = bytes & ~15u;
        if (lane == 0 && end) {
            barrier_expect(full, end);
            copy_bulk(to, from, end, full);
        }
    } else {
        bool odd = is_odd(from);
        to += odd ? 2 : 0;
        first = odd ? 2 : 0;
        end = first + ((bytes - first) & ~3u);
        for (uint32_t i = first + 4 * lane; i < end; i += 128)
            copy_word(to + i, from + i);
    }
    if (lane < first / SIZE)
        *(T *)to = *(const T *)from;
    else if (lane - first / SIZE < (bytes - end) / SIZE)
        *(T *)(to + end + (lane - first / SIZE) * SIZE) =
            *(const T *)(from + end + (lane - first / SIZE) * SIZE);
    fence_copies();
    if (((uintptr_t)from & 15) != 0)
        barrier_arrive_after_copies(full);
    else if (lane != 0 || !end)
        barrier_arrive(full);
}

template <class T> static __device__ void copy_rows(const kld_cuda_args &args, const place &at) {
    unsigned lane = threadIdx.x % 32;
    uint32_t slot = 0, turn = 0;
    uint64_t offset = (uint64_t)at.rank * at.slice * sizeof(T);
    each_row(args, at, [&](uint64_t index, uint64_t, bool) {
        if (row_is_masked(args, index))
            return;
        const char *p = at_row(args.p, index) + offset, *q = at_row(args.q, index) + offset;
        for (uint32_t chunk = 0; chunk < at.chunks; chunk++) {
            uint32_t i = slot * at.chunks + chunk, begin = chunk * CHUNK * 16;
            uint32_t bytes = min(CHUNK * 16, (uint32_t)(at.count * sizeof(T)) - begin);
            if (turn > 0)
                barrier_wait(&at.shared->empty[i], (turn - 1) & 1);
            bring<T>(at.tensor(slot, 0) + begin, p + begin, bytes, &at.shared->full[i], lane);
            bring<T>(at.tensor(slot, 1) + begin, q + begin, bytes, &at.shared->full[i], lane);
        }
        if (++slot == at.slots) {
            slot = 0;
            turn++;
        }
    });
}

/* ---- the warps that compute -------------------------------------------------------------------
 */

/* This block's slice of the row at hand. */
struct slice {
    const char *p, *q; /* in shared memory */
    bool odd_p, odd_q;
    uint32_t count, vectors, chunks;
    barrier *full, *empty; /* of its first chunk */
    uint32_t parity;
    bool arrived; /* all chunks have been waited for */

    static __device__ __forceinline__ uint4 load(const char *from, uint32_t vector, bool odd) {
        const char *at = from + 16 * vector;
        uint4 x = *(const uint4 *)at;
        if (odd) {
            uint32_t next = *(const uint32_t *)(at + 16);
            x.x = __funnelshift_r(x.x, x.y, 16);
            x.y = __funnelshift_r(x.y, x.z, 16);
            x.z = __funnelshift_r(x.z, x.w, 16);
            x.w = __funnelshift_r(x.w, next, 16);
        }
        return x;
    }

    /* The first vectors of this thread's warp. */
    __device__ __forceinline__ void peek(uint4 &ret_p, uint4 &ret_q, uint32_t &ret_vector) {
        if (chunks && !arrived)
            barrier_wait(&full[0], parity);
        ret_vector = threadIdx.x;
        uint32_t vector = min(threadIdx.x, vectors ? vectors - 1 : 0);
        ret_p = load(p, vector, odd_p);
        ret_q = load(q, vector, odd_q);
    }
    /* FUNCTION(vector, raw p, raw q) for every vector of this thread; the whole warp comes along as
     * long as one of its lanes has one. What lies beyond `count` is undefined. FLUSH() after each
     * chunk. RELEASE: the last pass, each chunk may be overwritten after it. */
    template <bool RELEASE, class FUNCTION, class FLUSH>
    __device__ __forceinline__ void pass(FUNCTION function, FLUSH flush) {
        unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (uint32_t chunk = 0; chunk < chunks; chunk++) {
            if (!arrived)
                barrier_wait(&full[chunk], parity);
#pragma unroll
            for (uint32_t step = 0; step < STEPS; step++) {
                uint32_t base = chunk * CHUNK + step * COMPUTING + warp * 32;
                uint32_t vector = min(base + lane, vectors - 1);
                if (base < vectors)
                    function(base + lane, load(p, vector, odd_p), load(q, vector, odd_q));
            }
            flush();
            if (RELEASE) {
                __syncwarp();
                if (lane == 0)
                    barrier_arrive(&empty[chunk]);
            }
        }
        arrived = true;
    }
    __device__ __forceinline__ void release() {
        for (uint32_t chunk = 0; chunk < chunks; chunk++) {
            if (!arrived)
                barrier_wait(&full[chunk], parity);
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                barrier_arrive(&empty[chunk]);
        }
        arrived = true;
    }
};

/* Four sums over the warp: lane l gets number l / 8. */
static __device__ __forceinline__ double warp_sums(const double (&x)[4]) {
    unsigned lane = threadIdx.x % 32;
    bool upper = lane & 16;
    double keep[2] = {upper ? x[2] : x[0], upper ? x[3] : x[1]};
    keep[0] += __shfl_xor_sync(KLD_FULL_WARP, upper ? x[0] : x[2], 16);
    keep[1] += __shfl_xor_sync(KLD_FULL_WARP, upper ? x[1] : x[3], 16);
    upper = lane & 8;
    double sum = upper ? keep[1] : keep[0];
    sum += __shfl_xor_sync(KLD_FULL_WARP, upper ? keep[0] : keep[1], 8);
#pragma unroll
    for (int step = 4; step; step /= 2)
        sum += __shfl_xor_sync(KLD_FULL_WARP, sum, step);
    return sum;
}

/* Every warp's part to every block of the cluster; wait_for_parts() gets them all. `turn` counts
 * the exchanges: two places alternate, because a block can be one exchange ahead of another. */
static __device__ __forceinline__ void send_part(const place &at, const double (&sums)[4],
                                                 int32_t mark_0, int32_t mark_1, uint32_t turn) {
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t which = turn & 1, all = at.cluster * WARPS;
    part *to = at.parts + which * all + at.rank * WARPS + warp;
    barrier *done = &at.shared->exchanged[which];
    if (threadIdx.x == 0)
        barrier_expect(done, all * sizeof(part));
    uint64_t sum = (uint64_t)__double_as_longlong(warp_sums(sums));
    for (uint32_t rank = lane % 8; rank < at.cluster; rank += 8)
        cluster_send(&to->sum[lane / 8], done, rank, sum);
    if (lane < at.cluster)
        cluster_send(to->mark, done, lane,
                     (uint64_t)(uint32_t)mark_1 << 32 | (uint64_t)(uint32_t)mark_0);
}

static __device__ __forceinline__ const part *wait_for_parts(const place &at, uint32_t turn) {
    barrier_wait(&at.shared->exchanged[turn & 1], (turn >> 1) & 1);
    return at.parts + (turn & 1) * at.cluster * WARPS;
}

/* V values of one vector to a row, as 16 bytes where the row allows. The whole warp. */
template <class T>
static __device__ __forceinline__ void put(const place &at, char *to_row, bool whole,
                                           uint32_t vector, const float (&x)[packet<T>::V]) {
    constexpr int V = packet<T>::V;
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    alignas(16) T y[V];
#pragma unroll
    for (int i = 0; i < V; i++)
        y[i] = to<T>(x[i]);
    uint32_t first = (vector - lane) * V; /* of the warp's 32 vectors */
    if (whole && first + 32 * V <= at.count) {
        __stcs((uint4 *)to_row + vector, *(uint4 *)y);
        return;
    }
    uint4 *stage = at.shared->stage[warp];
    __syncwarp();
    stage[lane] = *(uint4 *)y;
    __syncwarp();
    const T *staged = (const T *)stage;
    T *out = (T *)to_row + first;
    uint32_t count = at.count > first ? min(at.count - first, 32u * V) : 0;
    if (sizeof(T) == 4 || ((uintptr_t)out & 3) != 0) {
#pragma unroll
        for (uint32_t i = lane; i < 32 * V; i += 32)
            if (i < count)
                out[i] = staged[i];
    } else {
#pragma unroll
        for (uint32_t i = 2 * lane; i < 32 * V; i += 64) {
            if (i + 1 < count)
                *(uint32_t *)(out + i) = *(const uint32_t *)(staged + i);
            else if (i < count)
                out[i] = staged[i];
        }
    }
}

/* A kernel of BODY: its first warps compute, the last copies. */
template <class BODY> static __device__ void run(const kld_cuda_args &args) {
    extern __shared__ uint4 dynamic[];
    typedef typename BODY::type T;
    place at = place_of<T>(args, (char *)dynamic);
    uint32_t chunks = at.slots * at.chunks;
    if (threadIdx.x < chunks) {
        barrier_init(&at.shared->full[threadIdx.x], 64);
        barrier_init(&at.shared->empty[threadIdx.x], WARPS);
    }
    if (threadIdx.x < 2)
        barrier_init(&at.shared->exchanged[threadIdx.x], 1);
    barrier_init_done();
    cluster_sync();
    if (threadIdx.x >= COMPUTING)
        copy_rows<T>(args, at);
    else
        BODY::compute(args, at);
    __syncwarp();
    cluster_sync(); /* nobody leaves while another may write to its shared memory */
}

} /* namespace resident */
#endif
