/* resident_slice.cuh - what the computing warps see of a row held in shared memory: its vectors,
 * pass by pass, and how their gradients leave. No mathematics here. */
#ifndef KLD_KERNELS_CUDA_RESIDENT_SLICE_CUH
#define KLD_KERNELS_CUDA_RESIDENT_SLICE_CUH

#include "kernels/cuda/resident.cuh"

namespace resident {
inline namespace KLD_CUDA_TEAM {

/* How many classes of a vector there are: all, or `left`. */
struct all_of {
    static constexpr bool ALL = true;
    static constexpr uint32_t left = UINT32_MAX;
};
struct some_of {
    static constexpr bool ALL = false;
    uint32_t left;
};

/* 16 bytes from byte `shift` of x on, which y follows. */
static __device__ __forceinline__ uint4 joined(uint4 x, const uint4 &y, uint32_t shift) {
    bool two = shift & 8, one = shift & 4;
    uint32_t a = two ? x.z : x.x, b = two ? x.w : x.y, c = two ? y.x : x.z;
    uint32_t d = two ? y.y : x.w, e = two ? y.z : y.x, f = two ? y.w : y.y;
    a = one ? b : a;
    b = one ? c : b;
    c = one ? d : c;
    d = one ? e : d;
    e = one ? f : e;
    uint32_t bits = (shift & 2) * 8;
    x.x = __funnelshift_r(a, b, bits);
    x.y = __funnelshift_r(b, c, bits);
    x.z = __funnelshift_r(c, d, bits);
    x.w = __funnelshift_r(d, e, bits);
    return x;
}

/* This block's slice of the row at hand. Vectors are put together from two where it does not start
 * at a multiple of 16 bytes: which thread adds which classes follows from the row, not from where
 * it lies. */
struct slice {
    uint32_t p, q; /* shared memory addresses: this thread's first vector, less the shift */
    uint32_t count, chunks;
    uint32_t head; /* classes by which both tensors start after a multiple of 16 bytes, or 0 */
    uint32_t first_chunk; /* number of its first chunk among those of all slots */
    uint32_t turn;
    uint32_t shift_p, shift_q; /* bytes */

    /* 16 bytes from `shift` on. Of a tensor without one, 16 more are read and not looked at, where
     * a chunk may be on its way; not by racecheck's build: kernels/README.md has the cost. */
    template <bool SHIFTED>
    static __device__ __forceinline__ uint4 load(uint32_t at, uint32_t shift) {
        uint4 x = load_shared(at);
        uint32_t next = KLD_RACECHECK && !shift ? at : at + 16;
        return SHIFTED ? joined(x, load_shared(next), shift) : x;
    }
    /* `at`, where a lane reads its vector of a tensor whose first lies at `first`. Lanes behind the
     * last class read on, and nobody looks; in racecheck's build they read the last vector. */
    __device__ __forceinline__ uint32_t within(uint32_t at, uint32_t first, uint32_t V) const {
        return KLD_RACECHECK ? min(at, first + 16 * ((count - 1) / V - group_thread())) : at;
    }

    /* The same from `head` classes earlier on, so that no vector needs two: for a pass that adds
     * nothing up. What lies before the row is undefined. */
    template <class T> __device__ __forceinline__ slice evened() const {
        slice other = *this;
        other.count += head;
        other.shift_p -= head * (uint32_t)sizeof(T);
        other.shift_q -= head * (uint32_t)sizeof(T);
        return other;
    }
    /* A vector of each lane, spread over the first chunk once that has come. Returns how many
     * classes it has. */
    template <class T>
    __device__ __forceinline__ uint32_t sample(uint4 &ret_p, uint4 &ret_q) const {
        constexpr uint32_t V = packet<T>::V;
        uint32_t vectors = min((count + V - 1) / V, CHUNK), lane = threadIdx.x % 32;
        uint32_t vector = vectors < 32 ? lane : lane * vectors / 32;
        if (vector * V >= count)
            return 0;
        ret_p = load<true>(p + 16 * (vector - group_thread()), shift_p);
        ret_q = load<true>(q + 16 * (vector - group_thread()), shift_q);
        return min(count - vector * V, V);
    }
    /* FUNCTION(vector, left, raw p, raw q) for every vector of this thread: its number and how many
     * classes are left from its first on, as `all_of` where the whole warp has whole vectors. Where
     * it is less than V (or nothing), what lies beyond is undefined. The whole warp comes along as
     * long as one of its lanes has a class. DONE(chunk) after each chunk. WAITS: chunks may still
     * be on their way. */
    template <bool SHIFTED, bool WAITS, int UNROLL = 2, class FUNCTION, class DONE>
    __device__ __forceinline__ void pass_of(uint32_t V, FUNCTION function, DONE done) const {
        uint32_t at_p = p, at_q = q, first = group_thread();
        for (uint32_t chunk = 0; chunk < chunks; chunk++) {
            if (WAITS)
                barrier_wait(full_of(first_chunk + chunk, turn), full_parity(turn));
            if ((chunk + 1) * CHUNK * V <= count) {
#pragma unroll UNROLL
                for (uint32_t step = 0; step < STEPS; step++)
                    function(first + step * GROUP_THREADS, all_of(),
                             load<SHIFTED>(at_p + step * GROUP_THREADS * 16, shift_p),
                             load<SHIFTED>(at_q + step * GROUP_THREADS * 16, shift_q));
            } else {
#pragma unroll 1
                for (uint32_t step = 0; step < STEPS; step++) {
                    uint32_t vector = first + step * GROUP_THREADS;
                    if ((vector | 31u) * V + V <= count)
                        function(vector, all_of(),
                                 load<SHIFTED>(at_p + step * GROUP_THREADS * 16, shift_p),
                                 load<SHIFTED>(at_q + step * GROUP_THREADS * 16, shift_q));
                    else if ((vector & ~31u) * V < count)
                        function(
                            vector, some_of{count > vector * V ? count - vector * V : 0},
                            load<SHIFTED>(within(at_p + step * GROUP_THREADS * 16, p, V), shift_p),
                            load<SHIFTED>(within(at_q + step * GROUP_THREADS * 16, q, V), shift_q));
                }
            }
            done(chunk);
            first += CHUNK;
            at_p += CHUNK * 16;
            at_q += CHUNK * 16;
        }
    }
    /* Which step of its chunk a vector of this thread is, and that vector again, if any class is
     * left from its first on. Returns how many are. */
    static __device__ __forceinline__ uint32_t step_of(uint32_t vector) {
        static_assert(STEPS <= 32, "a bit each");
        return vector % CHUNK / GROUP_THREADS;
    }
    template <bool SHIFTED>
    __device__ __forceinline__ uint32_t vector_of(uint32_t chunk, uint32_t step, uint32_t V,
                                                  uint4 &ret_p, uint4 &ret_q) const {
        uint32_t behind = chunk * CHUNK + step * GROUP_THREADS;
        uint32_t first = (behind + group_thread()) * V;
        if (first >= count) /* behind the row may be the end of shared memory */
            return 0;
        ret_p = load<SHIFTED>(p + behind * 16, shift_p);
        ret_q = load<SHIFTED>(q + behind * 16, shift_q);
        return count - first;
    }
    /* One in between. SPLIT: code of its own for rows that are not shifted. */
    template <bool SPLIT, int UNROLL = 2, class FUNCTION, class DONE>
    __device__ __forceinline__ void middle_pass(uint32_t V, FUNCTION function, DONE done) const {
        if (!SPLIT || shift_p || shift_q)
            pass_of<true, false, UNROLL>(V, function, done);
        else
            pass_of<false, false, UNROLL>(V, function, done);
    }
    template <class T, class FUNCTION>
    __device__ __forceinline__ void pass(FUNCTION function) const {
        middle_pass<false>(packet<T>::V, function, [](uint32_t) {});
    }
    /* The last one: each chunk may be overwritten after it. */
    template <bool SPLIT, int UNROLL = 2, class FUNCTION>
    __device__ __forceinline__ void last_pass(uint32_t V, FUNCTION function) const {
        middle_pass<SPLIT, UNROLL>(V, function, [&](uint32_t chunk) { release(chunk); });
    }
    __device__ __forceinline__ void release(uint32_t chunk) const {
        __syncwarp();
        if (arrives_for_warp())
            barrier_arrive(&here().empty[first_chunk + chunk]);
    }
    __device__ __forceinline__ void release() const {
        __syncwarp();
        if (arrives_for_warp())
            for (uint32_t chunk = 0; chunk < chunks; chunk++)
                barrier_arrive(&here().empty[first_chunk + chunk]);
    }
};

/* The same slice in device memory: once it has been let go here, or from the start. Of a granule of
 * 16 bytes that holds a byte of the row all may be read: allocations consist of whole ones. */
struct far_slice {
    const char *p, *q;         /* this thread's first vector, less the shift */
    uint32_t count;            /* classes */
    uint32_t shift_p, shift_q; /* bytes after a multiple of 16 */

    template <class T>
    static __device__ __forceinline__ far_slice of(const kld_cuda_args &args, uint64_t index) {
        const place &at = here().place;
        far_slice slice;
        const char *p = part_of<T>(args.p, index, at), *q = part_of<T>(args.q, index, at);
        slice.count = at.count;
        slice.shift_p = shift_of(p);
        slice.shift_q = shift_of(q);
        slice.p = p - slice.shift_p + 16 * group_thread();
        slice.q = q - slice.shift_q + 16 * group_thread();
        return slice;
    }
    /* Of the vector that a thread comes to in `step`: how many classes are left from its first. */
    __device__ __forceinline__ uint32_t left_of(uint32_t step, uint32_t V) const {
        uint32_t first = (step * GROUP_THREADS + group_thread()) * V;
        return count > first ? count - first : 0;
    }
    /* 16 bytes that are read again before long by somebody of this row: the second-level cache is
     * to keep them before all others. Of a warp's row, so short that the first-level cache may keep
     * it, as usual. TWICE: by a neighbour, too. */
    template <bool TWICE> static __device__ __forceinline__ uint4 load_kept(const uint4 *at) {
        return !REREAD || GROUP_WARPS == 1 ? *at : load_evict_last<TWICE>(at);
    }
    /* A whole vector. LAST: of a row that is read again, the last time. */
    template <bool SHIFTED, bool LAST = false>
    static __device__ __forceinline__ uint4 load_whole(const char *from, uint32_t shift,
                                                       uint32_t step) {
        const uint4 *at = (const uint4 *)from + step * GROUP_THREADS;
        if (!SHIFTED)
            return REREAD && !LAST ? load_kept<false>(at) : __ldcs(at);
        if (LAST)
            return joined(*at, at[shift ? 1 : 0], shift);
        return joined(load_kept<true>(at), load_kept<true>(at + (shift ? 1 : 0)), shift);
    }
    /* One of which `bytes` are left, more than none; undefined beyond. */
    template <bool SHIFTED>
    static __device__ __forceinline__ uint4 load_begun(const char *from, uint32_t shift,
                                                       uint32_t step, uint32_t bytes) {
        if (!SHIFTED)
            return load_whole<false>(from, 0, step);
        const uint4 *at = (const uint4 *)from + step * GROUP_THREADS;
        return joined(load_kept<true>(at), load_kept<true>(at + (shift + bytes > 16 ? 1 : 0)),
                      shift);
    }
    /* To the second-level cache, where that is of use; of a row, or behind it. */
    static __device__ __forceinline__ void fetch(const char *at) { prefetch_l2(at); }
    /* Any, of which `left` classes are left; undefined beyond. */
    template <class T>
    static __device__ __forceinline__ uint4 load(const char *from, uint32_t shift, uint32_t step,
                                                 uint32_t left) {
        if (left >= packet<T>::V)
            return load_whole<true>(from, shift, step);
        return load_edge<T>((const T *)(from + shift) +
                                (uint64_t)step * GROUP_THREADS * packet<T>::V,
                            0, left, ::to<T>(0.0f));
    }
    template <class T, class FUNCTION>
    __device__ __forceinline__ void pass(FUNCTION function) const {
        constexpr uint32_t V = packet<T>::V;
        for (uint32_t step = 0; (step * GROUP_THREADS + (group_thread() & ~31u)) * V < count;
             step++) {
            uint32_t left = left_of(step, V);
            function(step * GROUP_THREADS + group_thread(), some_of{left},
                     load<T>(p, shift_p, step, left), load<T>(q, shift_q, step, left));
        }
    }
    /* Of so many vectors of the slice: how many steps the whole warp takes, and in how many of
     * these all its lanes have one. */
    static __device__ __forceinline__ uint32_t steps_of(uint32_t vectors) {
        uint32_t first = group_thread() & ~31u;
        return vectors > first ? (vectors - first + GROUP_THREADS - 1) / GROUP_THREADS : 0;
    }
    static __device__ __forceinline__ uint32_t full_steps_of(uint32_t vectors) {
        uint32_t last = group_thread() | 31u;
        return vectors > last ? (vectors - last - 1) / GROUP_THREADS + 1 : 0;
    }
};

/* One vector to a row of `classes` without the first `head`, as 16 bytes where the row allows. The
 * whole warp. */
template <class T, class LEFT>
static __device__ __forceinline__ void put_raw(char *to_row, bool whole, uint32_t classes,
                                               uint32_t head, uint32_t vector, LEFT, uint4 y) {
    constexpr int V = packet<T>::V;
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t first = (vector - lane) * V; /* of the warp's 32 vectors */
    if (LEFT::ALL && whole && first >= head) {
        __stcs((uint4 *)to_row + vector, y);
        return;
    }
    uint32_t skip = first < head ? head : 0;
    uint4 *stage = here().stage[warp];
    __syncwarp();
    stage[lane] = y;
    __syncwarp();
    const T *staged = (const T *)stage;
    T *out = (T *)to_row + first;
    uint32_t count = classes > first ? min(classes - first, 32u * V) : 0;
    if (sizeof(T) == 4 || ((uintptr_t)out & 3) != 0) {
#pragma unroll
        for (uint32_t i = lane; i < 32 * V; i += 32)
            if (i < count && i >= skip)
                out[i] = staged[i];
    } else {
#pragma unroll
        for (uint32_t i = 2 * lane; i < 32 * V; i += 64) {
            if (i + 1 < count && i >= skip)
                *(uint32_t *)(out + i) = *(const uint32_t *)(staged + i);
            else
                for (uint32_t j = i; j < i + 2; j++)
                    if (j < count && j >= skip)
                        out[j] = staged[j];
        }
    }
}
/* The same of V values. */
template <class T, class LEFT>
static __device__ __forceinline__ void put(char *to_row, bool whole, uint32_t classes,
                                           uint32_t head, uint32_t vector, LEFT left,
                                           const float (&x)[packet<T>::V]) {
    alignas(16) T y[packet<T>::V];
#pragma unroll
    for (int i = 0; i < packet<T>::V; i++)
        y[i] = to<T>(x[i]);
    put_raw<T>(to_row, whole, classes, head, vector, left, *(uint4 *)y);
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace resident */
#endif
