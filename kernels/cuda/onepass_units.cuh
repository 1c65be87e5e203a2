/* onepass_units.cuh - where the vectors of a row that is read once come from, unit by unit: device
 * memory, straight to registers or by way of a ring in shared memory. The last unit of a warp may
 * be there in part: what of it is not is undefined. No mathematics here. */
#ifndef KLD_KERNELS_CUDA_ONEPASS_UNITS_CUH
#define KLD_KERNELS_CUDA_ONEPASS_UNITS_CUH

#include "kernels/cuda/resident_slice.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* A unit is what a warp takes in UNIT steps: a vector of each tensor for each lane and step. */
template <uint32_t UNIT> struct onepass_units {
    static constexpr uint32_t STEP = 16 * resident::GROUP_THREADS; /* bytes */

    /* What a thread has of each tensor in the steps of a unit. */
    struct unit {
        uint4 p[UNIT], q[UNIT];

        /* LAST: nobody will want them again. */
        template <bool SHIFTED, bool LAST = false>
        __device__ __forceinline__ void load(uint32_t i, const char *at_p, const char *at_q,
                                             uint32_t shift_p, uint32_t shift_q) {
            p[i] = resident::far_slice::load_whole<SHIFTED, LAST>(at_p, shift_p, i);
            q[i] = resident::far_slice::load_whole<SHIFTED, LAST>(at_q, shift_q, i);
        }
    };

    /* How many units come, of which so many are whole, and where the row ends: bytes from this
     * thread's first vector on. */
    struct extent {
        uint32_t whole, all;
        int32_t bytes;

        /* What is left from the vector on that the thread takes in a step of a unit. */
        __device__ __forceinline__ int32_t left(uint32_t number, uint32_t i) const {
            return bytes - (int32_t)((number * UNIT + i) * STEP);
        }
    };

    /* Where a warp's units come from. IS_HERE: from shared memory, and what to count from is known.
     * Straight to registers: a step's are asked for again as soon
     * as its registers are free. */
    template <bool SHIFTED> struct from_memory {
        static constexpr bool IS_HERE = false;
        const char *p, *q;
        uint32_t shift_p, shift_q;

        static __device__ __forceinline__ from_memory of(const resident::far_slice &slice) {
            return {slice.p, slice.q, SHIFTED ? slice.shift_p : 0, SHIFTED ? slice.shift_q : 0};
        }

        __device__ __forceinline__ void start(const extent &, unit &u) {
#pragma unroll
            for (uint32_t i = 0; i < UNIT; i++)
                u.template load<SHIFTED>(i, p, q, shift_p, shift_q);
            p += UNIT * STEP;
            q += UNIT * STEP;
        }
        __device__ __forceinline__ void open(unit &) const {}
        /* A vector of each tensor, some units on from the first. */
        __device__ __forceinline__ void peek(uint32_t units, uint4 &ret_p, uint4 &ret_q) const {
            ret_p = resident::far_slice::load_whole<SHIFTED>(p + units * UNIT * STEP, shift_p, 0);
            ret_q = resident::far_slice::load_whole<SHIFTED>(q + units * UNIT * STEP, shift_q, 0);
        }
        __device__ __forceinline__ void ask(const extent &, uint32_t) {}
        /* Step i of the unit of that number, the next one. */
        __device__ __forceinline__ void refill(const extent &row, uint32_t number, uint32_t i,
                                               unit &u) const {
            int32_t left = row.left(number, i); /* no branch, but two loads that may not be */
            if (left > 0) {
                u.p[i] = resident::far_slice::load_begun<SHIFTED>(p, shift_p, i, left);
                u.q[i] = resident::far_slice::load_begun<SHIFTED>(q, shift_q, i, left);
            }
        }
        __device__ __forceinline__ void take(bool, unit &) {
            p += UNIT * STEP;
            q += UNIT * STEP;
        }
    };

    /* By way of a ring in shared memory, of RING units that are asked for ahead. For rows that
     * start anywhere: what vectors are put together from comes from device memory once, and not
     * twice. */
    static constexpr uint32_t RING = 2;
    struct ring {
        uint4 at[RING][UNIT][2][33]; /* one more than lanes */
    };
    struct from_ring {
        static constexpr bool IS_HERE = false;
        static constexpr uint32_t TENSOR = 33 * 16, PLACE = UNIT * 2 * TENSOR;
        const char *p, *q; /* of the unit to be asked for next */
        uint32_t shift_p, shift_q;
        uint32_t at, place; /* this lane's in the ring's first place; to be filled next, bytes */

        static __device__ __forceinline__ from_ring of(const resident::far_slice &slice) {
            __shared__ ring rings[resident::WARPS];
            return {slice.p,
                    slice.q,
                    slice.shift_p,
                    slice.shift_q,
                    shared_at(&rings[threadIdx.x / 32].at[0][0][0][threadIdx.x % 32]),
                    0};
        }

        static __device__ __forceinline__ void bring(uint32_t to, const char *from,
                                                     uint32_t shift) {
            copy_16(to, from);
            if (threadIdx.x % 32 == 31 && shift)
                copy_16(to + 16, from + 16);
        }
        /* 16 bytes that begin before the row's end. */
        static __device__ __forceinline__ void bring_begun(uint32_t to, const char *from,
                                                           int32_t left) {
            if (left > 0)
                copy_16(to, from);
            if (threadIdx.x % 32 == 31 && left > 16)
                copy_16(to + 16, from + 16);
        }
        /* The unit of that number. */
        __device__ __forceinline__ void ask(const extent &row, uint32_t number) {
            if (number < row.whole) {
#pragma unroll
                for (uint32_t i = 0; i < UNIT; i++) {
                    bring(at + place + 2 * i * TENSOR, p + i * STEP, shift_p);
                    bring(at + place + (2 * i + 1) * TENSOR, q + i * STEP, shift_q);
                }
                p += UNIT * STEP;
                q += UNIT * STEP;
            } else if (number < row.all) {
#pragma unroll
                for (uint32_t i = 0; i < UNIT; i++) {
                    int32_t left = row.left(number, i);
                    bring_begun(at + place + 2 * i * TENSOR, p + i * STEP, left + (int32_t)shift_p);
                    bring_begun(at + place + (2 * i + 1) * TENSOR, q + i * STEP,
                                left + (int32_t)shift_q);
                }
            }
            place = place + PLACE == RING * PLACE ? 0 : place + PLACE;
            copies_end();
        }
        static __device__ __forceinline__ uint4 load(uint32_t from, uint32_t shift) {
            return resident::joined(load_shared(from), load_shared(from + (shift ? 16 : 0)), shift);
        }
        /* The unit asked for longest ago, whose place is the next to be filled. */
        __device__ __forceinline__ void take(bool more, unit &u) const {
            if (!more)
                return;
            copies_wait<RING - 1>();
            __syncwarp();
#pragma unroll
            for (uint32_t i = 0; i < UNIT; i++) {
                u.p[i] = load(at + place + 2 * i * TENSOR, shift_p);
                u.q[i] = load(at + place + (2 * i + 1) * TENSOR, shift_q);
            }
            __syncwarp(); /* before another lane's copy takes the place */
        }
        __device__ __forceinline__ void start(const extent &row, unit &) {
#pragma unroll
            for (uint32_t i = 0; i < RING; i++)
                ask(row, i);
        }
        __device__ __forceinline__ void open(unit &u) const { take(true, u); }
        __device__ __forceinline__ void peek(uint32_t units, uint4 &ret_p, uint4 &ret_q) const {
            ret_p = resident::far_slice::load_whole<true>(p + units * UNIT * STEP, shift_p, 0);
            ret_q = resident::far_slice::load_whole<true>(q + units * UNIT * STEP, shift_q, 0);
        }
        __device__ __forceinline__ void refill(const extent &, uint32_t, uint32_t, unit &) const {}
    };

    /* What lies in shared memory already (logits_kept.cuh), to be looked at a second time. UNEVEN:
     * rows may start anywhere. */
    template <bool UNEVEN> struct from_kept {
        static constexpr bool IS_HERE = true;
        static constexpr uint32_t TENSOR = resident::KEPT_BYTES<UNEVEN>, PLACE = 2 * TENSOR;
        uint32_t at; /* this lane's first 16 bytes of p, q's are behind the warp's */
        uint32_t shift_p, shift_q;
        uint32_t half; /* units whose copies were the first to be asked for */

        static __device__ __forceinline__ uint4 load(uint32_t from, uint32_t shift) {
            if (!UNEVEN)
                return load_shared(from);
            return resident::joined(load_shared(from), load_shared(from + (shift ? 16 : 0)), shift);
        }
        __device__ __forceinline__ void vectors(uint32_t step, uint4 &ret_p, uint4 &ret_q) const {
            ret_p = load(at + step * PLACE, shift_p);
            ret_q = load(at + step * PLACE + TENSOR, shift_q);
        }
        __device__ __forceinline__ void start(const extent &, unit &u) {
            copies_wait<1>();
            if (UNEVEN)
                __syncwarp();
#pragma unroll
            for (uint32_t i = 0; i < UNIT; i++)
                vectors(i, u.p[i], u.q[i]);
            at += UNIT * PLACE;
        }
        __device__ __forceinline__ void open(unit &) const {}
        __device__ __forceinline__ void ask(const extent &, uint32_t) {}
        __device__ __forceinline__ void refill(const extent &row, uint32_t number, uint32_t i,
                                               unit &u) const {
            if (number == half && i == 0) {
                copies_wait<0>();
                if (UNEVEN)
                    __syncwarp();
            }
            /* A step that the slice has not is read and not looked at; not by racecheck's build. */
            const bool none = KLD_RACECHECK && number * UNIT + i >= resident::here().place.steps;
            if (number < row.all && !none)
                vectors(i, u.p[i], u.q[i]);
        }
        __device__ __forceinline__ void take(bool, unit &) { at += UNIT * PLACE; }
    };
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
