/* resident.cuh - rows that stay in shared memory between the passes over them, read from device
 * memory once: the blocks of a cluster hold a slice of the row each; what the warps found is
 * exchanged across the cluster. No mathematics here.
 *
 * Of a large block the warps have four trades. WARPS of them compute, in GROUPS that take the rows
 * in turn: while one group waits for its row, the other computes. One copies: it brings rows ahead,
 * and it decides what a row is: where its gradient goes, whether it counts at all; of masked rows
 * it writes the zeros itself, and the others never see them. A scout looks at what has come, for
 * what the computing warps count from. SETTLERS put together what a group of all blocks found in a
 * row. Meanwhile the group goes on where there is room: it takes a row's statistics `lag` of its
 * rows before it writes that row's gradient. In a block that works ALONE on short rows the
 * computing warps do all of it one after the other, each for itself or its first for all; the
 * others of a multiprocessor's many blocks compute while it waits.
 *
 * Slots and chunks. A block has `slots` places for a slice of both tensors, cut into chunks of
 * CHUNK vectors. A chunk's `full` barrier says that it has come, its `empty` barrier that all warps
 * are done with it. Who waits for a phase of a barrier must have seen the one before: so what
 * groups wait for has two barriers in turn, as a slot's rows may go to one group and the other.
 * What is known of a row lies in a ring at least twice as long: the next row may come to a slot
 * whose last one is read and not yet settled. */
#ifndef KLD_KERNELS_CUDA_RESIDENT_CUH
#define KLD_KERNELS_CUDA_RESIDENT_CUH

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/resident_team.h"
#include "kernels/cuda/row.cuh"

namespace resident {
inline namespace KLD_CUDA_TEAM {

constexpr uint32_t WARPS = KLD_CUDA_TEAM_WARPS, COMPUTING = 32 * WARPS;
constexpr uint32_t GROUPS = KLD_CUDA_TEAM_GROUPS;
constexpr uint32_t GROUP_WARPS = WARPS / GROUPS, GROUP_THREADS = 32 * GROUP_WARPS;
constexpr uint32_t SETTLERS = KLD_CUDA_TEAM_SETTLERS;
constexpr bool ALONE = SETTLERS == 0, FAR = KLD_CUDA_TEAM_FAR, REREAD = KLD_CUDA_TEAM_REREAD;
constexpr uint32_t THREADS = ALONE ? COMPUTING : COMPUTING + 64 + 32 * SETTLERS;
constexpr uint32_t CHUNK = (ALONE ? 128 : 64) * WARPS;    /* vectors of 16 bytes, of each tensor */
constexpr uint32_t CHUNKS_MAX = FAR ? 1 : ALONE ? 8 : 16; /* of all slots of a block */
constexpr uint32_t STEPS = CHUNK / GROUP_THREADS;         /* of a thread in a chunk */
constexpr uint32_t EDGE = 16;    /* bytes behind a slice: rows need not start at a multiple of 16 */
constexpr uint32_t BEYOND = 528; /* bytes that a warp may read behind the last slice */
constexpr uint32_t SLOTS_MAX = ALONE ? 2 : 4, RING_MAX = FAR ? 1 : 2 * SLOTS_MAX;
constexpr bool HOLDS = KLD_CUDA_TEAM_HOLDS;
constexpr uint32_t CLUSTER_MAX = FAR && !REREAD && !HOLDS && WARPS > 1 ? 8
                                 : ALONE && !HOLDS                     ? 1
                                                                       : 16;
constexpr uint32_t CLUSTER_PORTABLE = 8; /* larger ones are not to be had on every device */

/* What was found in a part of a row. What the numbers mean is the passes' business. */
struct part {
    double sum[4];
    int32_t mark[2]; /* what it means is the merging function's business */
    float top[2];    /* the largest of p and of q */
};

/* What is said of a row before its statistics are taken: by the copying warp and, `reference`, by
 * the scout. */
struct alignas(16) row_info {
    float reference[4];        /* what it means is the passes' business */
    uint32_t shift_p, shift_q; /* bytes after a multiple of 16 at which the slice starts */
    uint32_t head;             /* what both start after; 0 if they differ: see slice */
    bool whole_p, whole_q;     /* gradients start `head` bytes after a multiple of 16 */
    bool last;                 /* there is no such row */
    char *grad_p, *grad_q;     /* this block's part; NULL: not asked for */
    uint64_t index, group;
};

/* One block's place in the launch. */
struct place {
    uint32_t rank, cluster; /* of the cluster: this block, how many */
    uint64_t first_group, groups_step, groups;
    uint32_t slice;                              /* classes of every block but the last */
    uint32_t count, chunks, slots, tensor_bytes; /* of this one */
    uint32_t lag;
    uint32_t steps;      /* HOLDS: of a slice */
    uint32_t ring_power; /* the ring has 2^ring_power places a slot */
};

/* The slots one after the other, and how often all have been taken. */
struct cursor {
    uint32_t slot, turn;

    __device__ __forceinline__ void advance(uint32_t slots, uint32_t rows = 1) {
        for (slot += rows; slot >= slots; slot -= slots)
            turn++;
    }
};

/* The rows of this cluster, in order. */
struct row_walk {
    uint64_t group, index, end;

    __device__ __forceinline__ void start(const place &at) {
        group = at.first_group - at.groups_step;
        index = end = 0;
    }
    /* ret_first: of its group. */
    __device__ __forceinline__ bool next(const kld_cuda_args &args, const place &at,
                                         bool &ret_first) {
        ret_first = index + 1 >= end;
        if (!ret_first) {
            index++;
            return true;
        }
        group += at.groups_step;
        index = group * args.group_rows;
        end = min(index + args.group_rows, args.rows);
        return group < at.groups;
    }
};

/* How far copying has come. */
struct feed {
    row_walk walk;
    cursor next; /* slot to fill */
};

/* What is needed once a row lies here and not in registers: spilled, it would not even find room in
 * the first-level cache beside this much shared memory. */
struct block_shared {
    struct place place;
    row_info info[RING_MAX];
    barrier full[2 * CHUNKS_MAX], empty[CHUNKS_MAX];
    /* The reference is known, the warps' sums are there, the blocks' parts, the row is settled. */
    barrier ready[RING_MAX], found[RING_MAX], arrived[RING_MAX], settled[RING_MAX];
    /* Of exchanges that a group waits for. */
    barrier extra_arrived[GROUPS][2];
    uint32_t extra_exchanges[GROUPS]; /* so far; its first warp */
    /* GROUPS > 1, in the first block: a phase for each row, over when the row has been added; the
     * next one's group may add then. `total` of those of `group`. */
    barrier added;
    double total;
    uint64_t group;
    struct feed feed; /* ALONE: what has been brought; the first warp */
    double sums[RING_MAX][FAR ? 1 : GROUP_WARPS][16]; /* of a warp: 4 partial sums of each of 4 */
    float tops[RING_MAX][GROUP_WARPS][2]; /* the largest that it has seen of p and of q */
    part blocks[RING_MAX][FAR ? 1 : CLUSTER_MAX];
    part extra_warps[WARPS], extra_blocks[GROUPS][2][CLUSTER_MAX];
    uint4 stage[WARPS][32];                    /* of stores to unaligned rows */
    alignas(KLD_CUDA_LINE_BYTES) uint4 data[]; /* [slots][2][tensor_bytes] */
};

static __device__ __forceinline__ block_shared &here() { return *(block_shared *)dynamic_shared(); }

/* Of a computing thread. Of a block that is one warp nvcc spills less with all of the division. */
static constexpr bool IS_GROUP = GROUPS == 1 && GROUP_WARPS > 1;
static __device__ __forceinline__ uint32_t group_number() {
    return IS_GROUP ? 0 : threadIdx.x / GROUP_THREADS;
}
/* HOLDS: the number itself would be stored and read back, over and over. */
static __device__ __forceinline__ uint32_t group_thread() {
    return HOLDS ? thread_again() : IS_GROUP ? threadIdx.x : threadIdx.x % GROUP_THREADS;
}
static __device__ __forceinline__ void group_sync() {
    static_assert(GROUPS <= 2, "see struct team's wait()");
    if (GROUP_WARPS == 1)
        __syncwarp();
    else if (GROUPS == 1 || group_number() == 0)
        block_sync<1>(GROUP_THREADS);
    else
        block_sync<2>(GROUP_THREADS);
}

/* Of the row in a slot: its place in the ring, and the parity of the ring's barriers. */
static __device__ __forceinline__ uint32_t ring_of(uint32_t slot, uint32_t turn) {
    uint32_t power = here().place.ring_power;
    return (slot << power) + (turn & ((1u << power) - 1));
}
static __device__ __forceinline__ uint32_t ring_parity(uint32_t turn) {
    return turn >> here().place.ring_power & 1;
}

/* Of a chunk of a slot, by its turn. */
static __device__ __forceinline__ barrier *full_of(uint32_t chunk, uint32_t turn) {
    return &here().full[2 * chunk + (turn & 1)];
}
static __device__ __forceinline__ uint32_t full_parity(uint32_t turn) { return turn >> 1 & 1; }

/* Address in shared memory of a slot's tensor: 0 p, 1 q. */
static __device__ __forceinline__ char *tensor_of(uint32_t slot, uint32_t which) {
    block_shared &block = here();
    return (char *)block.data + (2 * slot + which) * block.place.tensor_bytes;
}

/* Does every row start at a multiple of 16 bytes? */
static __host__ __device__ __forceinline__ bool is_even(const kld_cuda_tensor &tensor) {
    return (((uintptr_t)tensor.at | tensor.stride_bytes) & 15) == 0;
}
/* Of a slice that is kept: how often each thread has 16 bytes of each tensor. */
static __host__ __device__ __forceinline__ uint32_t kept_steps(uint32_t slice, size_t element) {
    return (uint32_t)((slice * element + 16 * GROUP_THREADS - 1) / (16 * GROUP_THREADS));
}
/* What a warp has of a step, of one tensor: where rows start anywhere the last lane needs 16 bytes
 * more. */
template <bool UNEVEN> constexpr uint32_t KEPT_BYTES = 16 * (UNEVEN ? 33 : 32);
/* All of that, and behind it samples of two rows, which a warp may read for a step that it has not.
 */
static constexpr uint32_t KEPT_SAMPLES = 2;
static inline size_t kept_bytes(const kld_cuda_args &args, size_t element) {
    bool even = is_even(args.p) && is_even(args.q);
    uint32_t step = 2 * (even ? KEPT_BYTES<false> : KEPT_BYTES<true>);
    return kept_steps(args.slice, element) * WARPS * step +
           KEPT_SAMPLES * 2 * 32 * 16 * (even ? 1 : 2);
}

/* Dynamic shared memory of a block. */
static inline size_t bytes(const kld_cuda_args &args, size_t element) {
    if (HOLDS)
        return sizeof(block_shared) + kept_bytes(args, element);
    if (FAR)
        return sizeof(block_shared);
    return sizeof(block_shared) + (size_t)args.slots * 2 * (args.slice * element + EDGE) + BEYOND;
}

template <class T> static __device__ void find_place(const kld_cuda_args &args, place &at) {
    at.rank = cluster_rank();
    at.cluster = args.cluster;
    at.first_group = blockIdx.x / args.cluster;
    at.groups_step = gridDim.x / args.cluster;
    at.groups = (args.rows + args.group_rows - 1) / args.group_rows;
    at.slice = args.slice;
    uint64_t first = (uint64_t)at.rank * args.slice;
    uint64_t rest = first < args.classes ? args.classes - first : 0;
    at.count = (uint32_t)min(rest, (uint64_t)args.slice);
    uint32_t bytes = at.count * (uint32_t)sizeof(T);
    bytes += is_even(args.p) && is_even(args.q) ? 0 : 15; /* before it in its first 16 */
    at.chunks = (bytes + 16 * CHUNK - 1) / (16 * CHUNK);
    at.chunks = at.chunks ? at.chunks : 1; /* an empty one: barriers are passed all the same */
    at.steps = kept_steps(args.slice, sizeof(T));
    at.slots = args.slots;
    at.lag = args.lag;
    at.ring_power = args.slots == 1 ? 2 : 1;
    at.tensor_bytes = (uint32_t)(args.slice * sizeof(T)) + EDGE;
}

/* ---- the warp that copies ---------------------------------------------------------------------
 */

static __device__ __forceinline__ uint32_t shift_of(const void *at) {
    return (uint32_t)((uintptr_t)at & 15);
}

/* One chunk of a slice that starts at `from`, to the slot's tensor at `to`. Everything moves by the
 * copy engine, in whole 16 bytes: also those around the ends of the slice, where `before` and
 * `behind` say that the tensor goes on there; what is not the slice's is not looked at. Else the
 * lanes bring the elements at the ends. */
template <class T>
static __device__ __forceinline__ void bring(char *to, const char *from, uint32_t bytes,
                                             uint32_t chunk, bool before, bool behind,
                                             barrier *full, unsigned lane) {
    uint32_t shift = shift_of(from), end_of_slice = shift + bytes;
    uint32_t slice_end = (end_of_slice + 15) & ~15u;
    from -= shift;
    /* A shifted chunk ends 16 bytes later, where its last vector ends. */
    uint32_t late = shift ? 16 : 0;
    uint32_t begin = chunk ? chunk * 16 * CHUNK + late : 0;
    uint32_t end = min((chunk + 1) * 16 * CHUNK + late, slice_end);
    bool head = chunk == 0 && shift && !before;
    bool tail = end == slice_end && begin < end && (end_of_slice & 15) && !behind;
    if (head || tail) {
        uint32_t element = lane % 8 * (uint32_t)sizeof(T);
        if (head) {
            begin = 16;
            if (lane < 8 && element < 16 && element >= shift && element < end_of_slice)
                *(T *)(to + element) = *(const T *)(from + element);
        }
        if (tail) {
            end -= 16;
            element += end;
            if (lane >= 8 && lane < 16 && element < end_of_slice && element >= shift)
                *(T *)(to + element) = *(const T *)(from + element);
        }
        fence_copies();
        __syncwarp();
    }
    if (lane == 0 && end > begin && bytes) {
        barrier_expect(full, end - begin);
        copy_bulk(to + begin, from + begin, end - begin, full);
    } else if (arrives_for_warp()) {
        barrier_arrive(full);
    }
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

/* Fills slot after slot. One warp; what it knows between rows is the caller's to keep. */
template <class T> struct copier {
    const kld_cuda_args &args;
    const place &at;
    feed now;
    unsigned lane = threadIdx.x % 32;

    __device__ __forceinline__ void wait(uint32_t chunk) const {
        if (now.next.turn > 0)
            barrier_wait(&here().empty[now.next.slot * at.chunks + chunk], (now.next.turn - 1) & 1);
    }
    __device__ __forceinline__ void describe(uint64_t index, uint64_t group, bool last) const {
        wait(0);
        if (lane == 0) {
            char *grad_p = part_of<T>(args.grad_p, index, at);
            char *grad_q = part_of<T>(args.grad_q, index, at);
            row_info &info = here().info[ring_of(now.next.slot, now.next.turn)];
            info.shift_p = shift_of(part_of<T>(args.p, index, at));
            info.shift_q = shift_of(part_of<T>(args.q, index, at));
            info.head = info.shift_p == info.shift_q && at.count ? info.shift_p : 0;
            info.whole_p = aligned16<T>(grad_p - info.head);
            info.whole_q = aligned16<T>(grad_q - info.head);
            info.last = last;
            info.grad_p = grad_p;
            info.grad_q = grad_q;
            info.index = index;
            info.group = group;
        }
    }
    __device__ __forceinline__ void bring_row(uint64_t index) const {
        uint32_t slice_bytes = at.count * (uint32_t)sizeof(T);
        const char *p = part_of<T>(args.p, index, at), *q = part_of<T>(args.q, index, at);
        bool before = index > 0 || at.rank > 0, behind = index + 1 < args.rows;
        behind = behind || (uint64_t)at.rank * at.slice + at.count < args.classes;
        for (uint32_t chunk = 0; chunk < at.chunks; chunk++) {
            if (chunk > 0)
                wait(chunk);
            if (chunk + 1 < at.chunks && (shift_of(p) || shift_of(q)))
                wait(chunk + 1);
            barrier *full = full_of(now.next.slot * at.chunks + chunk, now.next.turn);
            bring<T>(tensor_of(now.next.slot, 0), p, slice_bytes, chunk, before, behind, full,
                     lane);
            bring<T>(tensor_of(now.next.slot, 1), q, slice_bytes, chunk, before, behind, full,
                     lane);
        }
    }
    /* The next row that is not masked; zeros to those before it. False: there is none. */
    __device__ __forceinline__ bool bring_next() {
        for (bool first; now.walk.next(args, at, first);) {
            uint64_t index = now.walk.index;
            if (first && at.rank == 0 && lane == 0) /* of masked rows nobody else writes it */
                args.scratch->partial[args.first_group + now.walk.group] = 0;
            if (row_is_masked(args, index)) {
                clear<T>(part_of<T>(args.grad_p, index, at), at.count, lane, 32);
                clear<T>(part_of<T>(args.grad_q, index, at), at.count, lane, 32);
                if (at.rank == 0 && lane == 0)
                    row_store(args, index, 0.0);
                continue;
            }
            describe(index, now.walk.group, false);
            bring_row(index);
            now.next.advance(at.slots);
            return true;
        }
        return false;
    }
    /* In a row's place: that there is none. */
    __device__ __forceinline__ void bring_end() {
        describe(0, 0, true);
        if (arrives_for_warp()) {
            barrier *full = full_of(now.next.slot * at.chunks, now.next.turn);
            barrier_arrive(full);
            barrier_arrive(full);
        }
        now.next.advance(at.slots);
    }
};

/* A warp that does nothing else. */
template <class T> static __device__ void copy_rows(const kld_cuda_args &args) {
    const place at = here().place;
    copier<T> copies = {args, at};
    copies.now.walk.start(at);
    copies.now.next = {0, 0};
    while (copies.bring_next()) {
    }
    for (uint32_t group = 0; group < GROUPS; group++)
        copies.bring_end();
}

/* ALONE, the first warp: one more row, or word that there is none. */
template <class T> static __device__ __forceinline__ void copy_one(const kld_cuda_args &args) {
    block_shared &block = here();
    copier<T> copies = {args, block.place, block.feed};
    if (!copies.bring_next())
        copies.bring_end();
    __syncwarp();
    if (copies.lane == 0)
        block.feed = copies.now;
    __syncwarp();
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace resident */
#endif
