/* logits_reread.cuh - rows of logits whose gradient is q - p, so short that the caches keep those
 * at hand: a warp reads its row from device memory for the statistics and again, mostly from the
 * caches, for the gradient. The other warps of the multiprocessor compute while it waits. */
#ifndef KLD_KERNELS_CUDA_LOGITS_REREAD_CUH
#define KLD_KERNELS_CUDA_LOGITS_REREAD_CUH

#include "kernels/cuda/logits_difference.cuh"
#include "kernels/cuda/logits_onepass.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* The second time. Whole vectors that go out whole; the same arithmetic as difference_body's. */
template <class T, bool CAREFUL> struct difference_writer {
    static constexpr uint32_t V = packet<T>::V;
    typedef onepass<T, logits_stats::NOTHING> pass;

    const difference_row &row;
    const temperature &t;
    float rest; /* what FP32 left of the shift */
    char *to;
    bool whole;
    uint32_t head;

    __device__ __forceinline__ difference_writer(const difference_row &row, const temperature &t,
                                                 char *to, uint32_t head)
        : row(row), t(t), to(to), whole(aligned16<T>(to)), head(head) {
        rest = fmaf(row.shift.high * t.inverse.low, reciprocal(t.inverse.high), -row.shift.low);
    }
    template <class LEFT>
    __device__ __forceinline__ void put(uint32_t step, LEFT left, uint32_t count, const uint4 &p,
                                        const uint4 &q) const {
        float z_p[V], z_q[V];
        unpack<T>(p, z_p);
        unpack<T>(q, z_q);
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (uint32_t i = 0; i < V; i++)
                z_q[i] = difference_fp32<CAREFUL>(z_p[i], z_q[i], row, t);
        } else {
            difference_of_16<T>(z_p, z_q, row, rest, t);
        }
        resident::put<T>(to, whole, count, head,
                         step * resident::GROUP_THREADS + resident::group_thread(), left, z_q);
    }
    template <bool SHIFTED>
    __device__ __forceinline__ void run(const resident::far_slice &slice) const {
        const char *at_p = slice.p, *at_q = slice.q;
        uint32_t steps = slice.full_steps_of(slice.count / V), units = steps / pass::UNIT;
        typename pass::unit u;
        if (units)
#pragma unroll
            for (uint32_t i = 0; i < pass::UNIT; i++)
                u.template load<SHIFTED>(i, at_p, at_q, slice.shift_p, slice.shift_q);
#pragma unroll 1
        for (uint32_t number = 0; number < units; number++) {
            at_p += pass::UNIT * pass::STEP;
            at_q += pass::UNIT * pass::STEP;
#pragma unroll
            for (uint32_t i = 0; i < pass::UNIT; i++) {
                const uint4 p = u.p[i], q = u.q[i];
                if (number + 1 < units)
                    u.template load<SHIFTED>(i, at_p, at_q, slice.shift_p, slice.shift_q);
                put(number * pass::UNIT + i, resident::all_of(), slice.count, p, q);
            }
        }
        uint32_t all = slice.steps_of((slice.count + V - 1) / V);
#pragma unroll 1
        for (uint32_t step = units * pass::UNIT; step < all; step++) {
            uint32_t left = slice.left_of(step, V);
            uint4 p = {}, q = {};
            if (left) {
                p = slice.template load<T>(slice.p, slice.shift_p, step, left);
                q = slice.template load<T>(slice.q, slice.shift_q, step, left);
            }
            put(step, resident::some_of{left}, slice.count, p, q);
        }
    }
};

template <class BODY> struct reread_rows : onepass_rows<BODY> {
    typedef rows<BODY> base;
    typedef onepass_rows<BODY> sums_of_rows;
    typedef typename BODY::type T;
    static_assert(resident::GROUP_WARPS == 1, "all that a block shares, a warp does");

    /* A block's; its first thread writes. */
    struct state {
        resident::row_walk walk;
        logits_stats::reference at;
        double total; /* of the group's rows so far */
        double weight, factor;
        onepass_row row;
        bool more;
    };
    static __device__ __forceinline__ state &all() {
        __shared__ state state;
        return state;
    }

    /* One thread: the next row, and what is known of it before it is read. */
    static __device__ __forceinline__ void next(const kld_cuda_args &args) {
        state &to = all();
        bool first;
        to.more = to.walk.next(args, resident::here().place, first);
        if (!to.more)
            return;
        to.row.index = to.walk.index;
        to.row.group = to.walk.group;
        to.row.first = first;
        to.row.masked = row_is_masked(args, to.row.index);
        row opened = row_open(args, to.row.index);
        to.weight = opened.weight;
        to.factor = opened.gradient * args.inverse_temperature;
    }

    /* From a row's sums to base::shared().rows[0]; what the fast way does not serve is summed
     * again, or done by any.cuh to its end. */
    static __device__ __forceinline__ void settle(const kld_cuda_args &args, const part &sums) {
        row_stats stats = base::fast_row(args, sums);
        auto *settled = &base::shared().rows[0];
        if (threadIdx.x == 0) {
            double value;
            sums_of_rows::judge(args, all().row, stats, value);
            all().row.all = sums;
        }
        base::tell(args, stats, all().factor, FAST, settled);
        __syncwarp();
        if (!stats.good)
            settle_again(args);
    }
    static __device__ __noinline__ void settle_again(const kld_cuda_args &args) {
        sums_of_rows::do_again(args, all().row, all().factor);
        auto *settled = &base::shared().rows[0];
        if (settled->way == ANY) {
            double value = row_by_any(args, all().row.index);
            if (threadIdx.x == 0)
                settled->value = value;
            __syncwarp();
        }
    }

    static __device__ __forceinline__ void write(const kld_cuda_args &args) {
        const resident::place &at = resident::here().place;
        const auto &settled = base::shared().rows[0];
        char *to = resident::part_of<T>(args.grad_q, all().row.index, at);
        auto slice = resident::far_slice::of<T>(args, all().row.index);
        /* From the 16 bytes in which all three start, if they start alike: no vector needs two. */
        uint32_t head = 0;
        if (slice.shift_p == slice.shift_q && slice.shift_p == resident::shift_of(to)) {
            head = slice.shift_p / (uint32_t)sizeof(T);
            to -= slice.shift_p;
            slice.count += head;
            slice.shift_p = slice.shift_q = 0;
        }
        const temperature &t = base::shared().t;
        if (settled.way == CAREFUL)
            difference_writer<T, true>(settled.numbers, t, to, head).template run<true>(slice);
        else if (slice.shift_p || slice.shift_q)
            difference_writer<T, false>(settled.numbers, t, to, head).template run<true>(slice);
        else
            difference_writer<T, false>(settled.numbers, t, to, head).template run<false>(slice);
    }

    /* A row that is not masked: its value, to the first thread. */
    static __device__ __forceinline__ double take(const kld_cuda_args &args) {
        settle(args, sums_of_rows::sums(args, all().row.index, all().at));
        const auto &settled = base::shared().rows[0];
        if (settled.way != ANY && base::shared().divides)
            write(args);
        else if (settled.way != ANY)
            clear(args);
        return settled.value;
    }
    static __device__ __forceinline__ void clear(const kld_cuda_args &args) {
        const resident::place &at = resident::here().place;
        resident::clear<T>(resident::part_of<T>(args.grad_q, all().row.index, at), at.count,
                           threadIdx.x, 32);
    }

    static __device__ __forceinline__ void compute(const kld_cuda_args &args) {
        if (threadIdx.x == 0) {
            all().walk.start(resident::here().place);
            next(args);
        }
        __syncwarp();
        while (all().more) {
            double value = 0.0;
            if (all().row.masked)
                clear(args);
            else
                value = take(args);
            __syncwarp();
            if (threadIdx.x == 0) {
                value = all().row.masked ? 0.0 : value * all().weight;
                row_store(args, all().row.index, value);
                all().total = all().row.first ? value : all().total + value;
                args.scratch->partial[args.first_group + all().row.group] = all().total;
                next(args);
            }
            __syncwarp();
        }
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
