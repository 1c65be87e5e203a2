/* resident.cuh - rows that stay in shared memory between the passes over them, read from device
 * memory once: the blocks of a cluster hold a slice of the row each; one warp of a block brings the
 * next row while the others compute on this one; what the warps found is exchanged across the
 * cluster. No mathematics here.
 *
 * The copying warp also decides what a row is: where its gradient goes, whether it counts at all;
 * of masked rows it writes the zeros itself, and the others never see them.
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
constexpr uint32_t BEYOND = 512; /* bytes that a warp may read behind the last slice */
constexpr uint32_t EDGE = 16; /* bytes behind a slice: rows at odd addresses start 2 bytes late */

/* What one warp found in its part of a row. What the numbers mean is the passes' business. */
struct part {
    double sum[4];
    int32_t mark[2];
};

/* What the copying warp says of the row in a slot. Valid from `full` to `empty` of its first chunk.
 */
struct row_info {
    uint64_t index, group;
    char *grad_p, *grad_q; /* this block's part; NULL: not asked for */
    bool odd_p, odd_q, whole_p, whole_q, end;
};

struct block_shared {
    row_info info[KLD_CUDA_RESIDENT_SLOTS_MAX];
    barrier full[KLD_CUDA_RESIDENT_CHUNKS_MAX], empty[KLD_CUDA_RESIDENT_CHUNKS_MAX];
    barrier exchanged[2];
    uint4 stage[WARPS][32]; /* of stores to unaligned rows */
};

/* Dynamic shared memory of a block. */
static inline size_t bytes(const kld_cuda_args &args, size_t element) {
    return sizeof(block_shared) + 2 * args.cluster * WARPS * sizeof(part) +
           (size_t)args.slots * 2 * (args.slice * element + EDGE) + BEYOND;
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
    at.chunks = at.chunks ? at.chunks : 1; /* an empty one: barriers are passed all the same */
    at.slots = args.slots;
    at.tensor_bytes = (uint32_t)(args.slice * sizeof(T)) + EDGE;
    at.shared = (block_shared *)dynamic;
    at.parts = (part *)(dynamic + sizeof(block_shared));
    at.data = dynamic + sizeof(block_shared) + 2 * at.cluster * WARPS * sizeof(part);
    return at;
}

/* The rows of this cluster, in order: FUNCTION(index, group, first of its group). */
template <class FUNCTION>
static __device__ __forceinline__ void each_row(const kld_cuda_args &args, const place &at,
                                                FUNCTION function) {
    uint64_t groups = (args.rows + args.group_rows - 1) / args.group_rows;
    for (uint64_t group = at.first_group; group < groups; group += at.groups_step) {
        uint64_t begin = group * args.group_rows;
        uint64_t end = min(begin + args.group_rows, args.rows);
        for (uint64_t index = begin; index < end; index++)
            function(index, group, index == begin);
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
        if (lane == 31 && end) { /* has no class of the tail to store before it arrives */
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
    else if (lane != 31 || !end)
        barrier_arrive(full);
}

/* Zeros over this block's part of a gradient row. */
template <class T>
static __device__ void clear(char *to, uint32_t count, unsigned lane, unsigned lanes) {
    constexpr uint32_t V = packet<T>::V;
    uint32_t vectors = to && aligned16<T>(to) ? count / V : 0;
    const T to_zero = ::to<T>(0.0f);
    for (uint32_t i = lane; i < vectors; i += lanes)
        __stcs((uint4 *)to + i, make_uint4(0, 0, 0, 0));
    for (uint32_t i = vectors * V + lane; to && i < count; i += lanes)
        ((T *)to)[i] = to_zero;
}

template <class T>
static __device__ __forceinline__ char *part_of(const kld_cuda_tensor &tensor, uint64_t index,
                                                const place &at) {
    char *row = at_row(tensor, index);
    return row ? row + (uint64_t)at.rank * at.slice * sizeof(T) : nullptr;
}

template <class T> static __device__ void copy_rows(const kld_cuda_args &args, const place &at) {
    unsigned lane = threadIdx.x % 32;
    uint32_t slot = 0, turn = 0;
    auto describe = [&](uint64_t index, uint64_t group, bool end) {
        if (turn > 0)
            barrier_wait(&at.shared->empty[slot * at.chunks], (turn - 1) & 1);
        if (lane == 0) {
            char *grad_p = part_of<T>(args.grad_p, index, at);
            char *grad_q = part_of<T>(args.grad_q, index, at);
            at.shared->info[slot] = {index,
                                     group,
                                     grad_p,
                                     grad_q,
                                     is_odd(part_of<T>(args.p, index, at)),
                                     is_odd(part_of<T>(args.q, index, at)),
                                     aligned16<T>(grad_p),
                                     aligned16<T>(grad_q),
                                     end};
        }
    };
    each_row(args, at, [&](uint64_t index, uint64_t group, bool first) {
        if (first && at.rank == 0 &&
            lane == 0) /* of a group of masked rows nobody else writes it */
            args.scratch->partial[args.first_group + group] = 0;
        if (row_is_masked(args, index)) {
            clear<T>(part_of<T>(args.grad_p, index, at), at.count, lane, 32);
            clear<T>(part_of<T>(args.grad_q, index, at), at.count, lane, 32);
            if (at.rank == 0 && lane == 0)
                row_store(args, index, 0.0);
            return;
        }
        describe(index, group, false);
        const char *p = part_of<T>(args.p, index, at), *q = part_of<T>(args.q, index, at);
        for (uint32_t chunk = 0; chunk < at.chunks; chunk++) {
            uint32_t i = slot * at.chunks + chunk, begin = chunk * CHUNK * 16;
            uint32_t bytes = min(CHUNK * 16, (uint32_t)(at.count * sizeof(T)) - begin);
            if (turn > 0 && chunk > 0)
                barrier_wait(&at.shared->empty[i], (turn - 1) & 1);
            /* What starts 2 bytes late ends in the next chunk. */
            if (turn > 0 && chunk + 1 < at.chunks && (is_odd(p) || is_odd(q)))
                barrier_wait(&at.shared->empty[i + 1], (turn - 1) & 1);
            bring<T>(at.tensor(slot, 0) + begin, p + begin, bytes, &at.shared->full[i], lane);
            bring<T>(at.tensor(slot, 1) + begin, q + begin, bytes, &at.shared->full[i], lane);
        }
        if (++slot == at.slots) {
            slot = 0;
            turn++;
        }
    });
    describe(0, 0, true);
    barrier_arrive(&at.shared->full[slot * at.chunks]);
    barrier_arrive(&at.shared->full[slot * at.chunks]);
}

/* ---- the warps that compute -------------------------------------------------------------------
 */

/* How many classes of a vector there are: all, or `left`. */
struct all_of {
    static constexpr bool ALL = true;
    static constexpr uint32_t left = UINT32_MAX;
};
struct some_of {
    static constexpr bool ALL = false;
    uint32_t left;
};

/* This block's slice of the row at hand. */
struct slice {
    const char *p, *q; /* in shared memory, this thread's first vector */
    uint32_t count, chunks;
    barrier *full, *empty; /* of its first chunk */
    uint32_t parity;
    bool odd_p, odd_q;
    bool arrived; /* all chunks have been waited for */

    template <bool ODD> static __device__ __forceinline__ uint4 load(const char *at, bool odd) {
        uint4 x = *(const uint4 *)at;
        if (ODD && odd) {
            uint32_t next = *(const uint32_t *)(at + 16);
            x.x = __funnelshift_r(x.x, x.y, 16);
            x.y = __funnelshift_r(x.y, x.z, 16);
            x.z = __funnelshift_r(x.z, x.w, 16);
            x.w = __funnelshift_r(x.w, next, 16);
        }
        return x;
    }

    /* The first vectors of this thread's warp. */
    __device__ __forceinline__ void peek(uint4 &ret_p, uint4 &ret_q) const {
        ret_p = load<true>(p, odd_p);
        ret_q = load<true>(q, odd_q);
    }

    /* FUNCTION(vector, left, raw p, raw q) for every vector of this thread: its number and how many
     * classes are left from its first on, as `all_of` where the whole warp has whole vectors. Where
     * it is less than V (or nothing), what lies beyond is undefined. The whole warp comes along as
     * long as one of its lanes has a class. */
    template <bool ODD, class FUNCTION, class FLUSH, class DONE>
    __device__ __forceinline__ void pass_of(uint32_t V, FUNCTION function, FLUSH flush,
                                            DONE done) const {
        const char *at_p = p, *at_q = q;
        uint32_t first = threadIdx.x;
        for (uint32_t chunk = 0; chunk < chunks; chunk++) {
            if (!arrived)
                barrier_wait(&full[chunk], parity);
            if ((chunk + 1) * CHUNK * V <= count) {
#pragma unroll
                for (uint32_t step = 0; step < STEPS; step++)
                    function(first + step * COMPUTING, all_of(),
                             load<ODD>(at_p + step * COMPUTING * 16, odd_p),
                             load<ODD>(at_q + step * COMPUTING * 16, odd_q));
            } else {
#pragma unroll 1
                for (uint32_t step = 0; step < STEPS; step++) {
                    uint32_t vector = first + step * COMPUTING;
                    if ((vector & ~31u) * V < count)
                        function(vector, some_of{count > vector * V ? count - vector * V : 0},
                                 load<ODD>(at_p + step * COMPUTING * 16, odd_p),
                                 load<ODD>(at_q + step * COMPUTING * 16, odd_q));
                }
            }
            flush();
            done(chunk);
            first += CHUNK;
            at_p += CHUNK * 16;
            at_q += CHUNK * 16;
        }
    }
    /* SPLIT: code of its own for rows that are not odd. */
    template <bool SPLIT, class FUNCTION, class FLUSH>
    __device__ __forceinline__ void pass(uint32_t V, FUNCTION function, FLUSH flush) {
        auto done = [](uint32_t) {};
        if (!SPLIT || odd_p || odd_q)
            pass_of<true>(V, function, flush, done);
        else
            pass_of<false>(V, function, flush, done);
        arrived = true;
    }
    /* The last pass: each chunk may be overwritten after it. */
    template <bool SPLIT, class FUNCTION>
    __device__ __forceinline__ void last_pass(uint32_t V, FUNCTION function) {
        auto done = [&](uint32_t chunk) {
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                barrier_arrive(&empty[chunk]);
        };
        if (odd_p || odd_q)
            pass_of<true>(
                V, function, [] {}, done);
        else
            pass_of<false>(
                V, function, [] {}, done);
    }
    __device__ __forceinline__ void release() {
        for (uint32_t chunk = 0; chunk < chunks; chunk++) {
            if (!arrived)
                barrier_wait(&full[chunk], parity);
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                barrier_arrive(&empty[chunk]);
        }
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
    if (threadIdx.x == 0 && at.cluster > 1)
        barrier_expect(done, all * sizeof(part));
    double sum = warp_sums(sums);
    uint64_t marks = (uint64_t)(uint32_t)mark_1 << 32 | (uint64_t)(uint32_t)mark_0;
    if (at.cluster == 1) {
        if (lane % 8 == 0)
            to->sum[lane / 8] = sum;
        if (lane == 0)
            *(uint64_t *)to->mark = marks;
        __syncwarp();
        if (lane == 0)
            barrier_arrive(done);
        return;
    }
    for (uint32_t rank = lane % 8; rank < at.cluster; rank += 8)
        cluster_send(&to->sum[lane / 8], done, rank, (uint64_t)__double_as_longlong(sum));
    if (lane < at.cluster)
        cluster_send(to->mark, done, lane, marks);
}

static __device__ __forceinline__ const part *wait_for_parts(const place &at, uint32_t turn) {
    barrier_wait(&at.shared->exchanged[turn & 1], (turn >> 1) & 1);
    return at.parts + (turn & 1) * at.cluster * WARPS;
}

/* V values of one vector to a row, as 16 bytes where the row allows. The whole warp. */
template <class T, class LEFT>
static __device__ __forceinline__ void put(const place &at, char *to_row, bool whole,
                                           uint32_t vector, LEFT, const float (&x)[packet<T>::V]) {
    constexpr int V = packet<T>::V;
    alignas(16) T y[V];
#pragma unroll
    for (int i = 0; i < V; i++)
        y[i] = to<T>(x[i]);
    if (LEFT::ALL && whole) {
        __stcs((uint4 *)to_row + vector, *(uint4 *)y);
        return;
    }
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t first = (vector - lane) * V; /* of the warp's 32 vectors */
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
    if (threadIdx.x < 2) /* a block alone counts its warps, a cluster the bytes */
        barrier_init(&at.shared->exchanged[threadIdx.x], at.cluster == 1 ? WARPS : 1);
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
