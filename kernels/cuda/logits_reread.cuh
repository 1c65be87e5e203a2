/* logits_reread.cuh - rows of logits of which one gradient is wanted that follows from their sums
 * (logits_difference.cuh, logits_centred.cuh), so short that the caches keep those at hand: a warp
 * or a block reads its row from device memory for the statistics and again, mostly from the caches,
 * for the gradient. The other rows of the multiprocessor compute while one waits.
 */
#ifndef KLD_KERNELS_CUDA_LOGITS_REREAD_CUH
#define KLD_KERNELS_CUDA_LOGITS_REREAD_CUH

#include "kernels/cuda/logits_centred.cuh"
#include "kernels/cuda/logits_onepass.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* The second time: what BODY::pairs makes of each vector goes to the gradient. */
template <class PAIRS> struct row_writer : PAIRS {
    typedef typename PAIRS::T T;
    static constexpr uint32_t V = packet<T>::V;
    typedef onepass<T, logits_stats::NOTHING> pass;

    char *to;
    uint32_t head;

    template <class ROW>
    __device__ __forceinline__ row_writer(const ROW &row, char *to, uint32_t head)
        : PAIRS(row.numbers, row.t, row.aside), to(to), head(head) {}

    template <class LEFT>
    __device__ __forceinline__ void put(uint32_t step, LEFT left, uint32_t count, const uint4 &p,
                                        const uint4 &q) const {
        resident::put_raw<T>(to, aligned16<T>(to), count, head,
                             step * resident::GROUP_THREADS + resident::group_thread(), left,
                             PAIRS::of(p, q));
    }
    static __device__ __forceinline__ uint32_t all_steps(const resident::far_slice &slice) {
        return slice.steps_of((slice.count + V - 1) / V);
    }
    /* Steps of any kind, from `first` up to `end`, wherever the three start. */
    __device__ __forceinline__ void any(const resident::far_slice &slice, uint32_t first,
                                        uint32_t end) const {
#pragma unroll 1
        for (uint32_t step = first; step < end; step++) {
            uint32_t left = slice.left_of(step, V);
            uint4 p = {}, q = {};
            if (left) {
                p = slice.template load<T>(slice.p, slice.shift_p, step, left);
                q = slice.template load<T>(slice.q, slice.shift_q, step, left);
            }
            put(step, resident::some_of{left}, slice.count, p, q);
        }
    }
    /* All, where all three start at multiples of 16 bytes. In the loop nothing else is provided
     * for: it spilled its registers otherwise, which took twice as long as all it saved. */
    __device__ __forceinline__ void run(const resident::far_slice &slice) const {
        uint32_t units = slice.full_steps_of(slice.count / V) / pass::UNIT, number = 0;
        if (head && resident::group_thread() < 32 && units) {
            any(slice, 0, pass::UNIT);
            number = 1;
        }
        const uint32_t UNIT_BYTES = pass::UNIT * pass::STEP;
        const char *at_p = slice.p + number * UNIT_BYTES, *at_q = slice.q + number * UNIT_BYTES;
        char *out = to + number * UNIT_BYTES + 16 * resident::group_thread();
        typename pass::unit u;
        if (number < units)
#pragma unroll
            for (uint32_t i = 0; i < pass::UNIT; i++)
                u.template load<false, true>(i, at_p, at_q, 0, 0);
#pragma unroll 1
        for (; number < units; number++) {
            at_p += UNIT_BYTES;
            at_q += UNIT_BYTES;
#pragma unroll
            for (uint32_t i = 0; i < pass::UNIT; i++) {
                uint4 y = PAIRS::of(u.p[i], u.q[i]);
                if (number + 1 < units)
                    u.template load<false, true>(i, at_p, at_q, 0, 0);
                __stcs((uint4 *)(out + i * pass::STEP), y);
            }
            out += UNIT_BYTES;
        }
        any(slice, units * pass::UNIT, all_steps(slice));
    }
};

/* Rows of which the sums are there and the gradient is to be written. */
template <class BODY> struct written_rows : onepass_rows<BODY> {
    typedef rows<BODY> base;
    typedef onepass_rows<BODY> sums_of_rows;

    typedef typename BODY::type T;

    /* Of the row that is settled, what is seldom looked at; the first thread writes. */
    static __device__ __forceinline__ typename BODY::aside &pairs_aside() {
        __shared__ typename BODY::aside aside;
        return aside;
    }
    static __device__ __forceinline__ void tell_aside() {
        if (!BODY::LOOKS_AGAIN && threadIdx.x == 0)
            pairs_aside() = typename BODY::aside(base::shared().rows[0].numbers, base::shared().t);
    }
    struct settled_row {
        const typename BODY::numbers &numbers;
        const temperature &t;
        const typename BODY::aside *aside;
    };
    static __device__ __forceinline__ settled_row settled() {
        return {base::shared().rows[0].numbers, base::shared().t, &pairs_aside()};
    }
    /* The tensor that the gradient goes to. */
    static __device__ __forceinline__ const kld_cuda_tensor &gradient(const kld_cuda_args &args) {
        return BODY::OF_P ? args.grad_p : args.grad_q;
    }
    /* Are those rows that were summed the careful way to be written otherwise? */
    static __device__ __forceinline__ bool is_careful() {
        if constexpr (BODY::LOOKS_AGAIN)
            return base::shared().rows[0].numbers.is_careful;
        else
            return BODY::WRITES_CAREFULLY && base::shared().rows[0].way == CAREFUL;
    }
    /* The first warp: from a row's sums to base::shared().rows[0]. All others wait for it: nothing
     * is done here that only a few rows need. */
    static __device__ __forceinline__ void tell(const kld_cuda_args &args, onepass_row &row,
                                                double factor, const part &sums) {
        row_stats stats = base::fast_row(args, sums);
        if (threadIdx.x == 0) {
            auto &settled = base::shared().rows[0];
            const typename BODY::numbers numbers(args, stats, factor);
            settled.numbers = numbers;
            if constexpr (!BODY::LOOKS_AGAIN)
                pairs_aside() = typename BODY::aside(numbers, base::shared().t);
            settled.value = BODY::value(args, stats);
            settled.way = stats.good ? FAST : AGAIN;
            if (BODY::LOOKS_AGAIN || !stats.good) {
                sums_of_rows::note(row, stats);
                row.all = sums;
            }
        }
        __syncwarp();
    }
    /* What a vector, the first `left` classes of it, adds to the mean's error: of PAIRS' masses and
     * of their distances from it. */
    template <class PAIRS>
    static __device__ __forceinline__ void add_distances(const PAIRS &pairs, const uint4 &raw_p,
                                                         const uint4 &raw_q, uint32_t left,
                                                         double (&total)[4]) {
        const logits_stats::pair_of<T> z(raw_p, raw_q);
        float sum[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < packet<T>::V; i++) {
            float mass, distance;
            pairs.pair(z.p[i], z.q[i], mass, distance);
            bool is = i < left && mass != 0.0f; /* else the distance may be infinite */
            if constexpr (sizeof(T) == 2) { /* seldom, and where one class may have all the mass */
                total[0] += is ? (double)mass : 0.0;
                total[1] += is ? (double)mass * (double)distance : 0.0;
            } else {
                sum[0] += is ? mass : 0.0f;
                sum[1] = is ? fmaf(mass, distance, sum[1]) : sum[1];
            }
        }
        total[0] += (double)sum[0];
        total[1] += (double)sum[1];
    }
    /* The whole group, with what each thread has added up. */
    static __device__ __forceinline__ void put_right(const double (&total)[4]) {
        part all = resident::merge_row(total, 0, 0, logits_stats::plain_merge);
        if (threadIdx.x == 0 && fabs(all.sum[1]) < 1e300 && all.sum[0] != 0.0)
            base::shared().rows[0].numbers.rest -= (float)(all.sum[1] / all.sum[0]);
        resident::group_sync();
    }
    static __device__ __forceinline__ bool is_far() {
        const auto &settled = base::shared().rows[0];
        if constexpr (BODY::CENTRES && !BODY::LOOKS_AGAIN)
            return settled.way != ANY && settled.numbers.is_far;
        else
            return false;
    }
    /* The whole group: what the sums do not tell; summed again, or done by any.cuh to its end. */
    static __device__ __noinline__ void settle_again(const kld_cuda_args &args, onepass_row &row,
                                                     double factor) {
        resident::group_sync(); /* all have seen that it is */
        sums_of_rows::do_again(args, row, factor);
        auto *settled = &base::shared().rows[0];
        tell_aside();
        resident::group_sync();
        if (settled->way == ANY) {
            double value = resident::here().place.rank == 0 ? row_by_any(args, row.index) : 0.0;
            resident::group_sync();
            if (threadIdx.x == 0)
                settled->value = value;
            resident::group_sync();
        }
    }
};

template <class BODY> struct reread_rows : written_rows<BODY> {
    typedef rows<BODY> base;
    typedef written_rows<BODY> written;
    typedef onepass_rows<BODY> sums_of_rows;
    typedef typename BODY::type T;

    /* A block's; its first thread writes. */
    struct state {
        resident::row_walk walk;
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

    /* The whole group: a row whose mean is to be better than its sums left it. */
    static __device__ __noinline__ void recentre(const kld_cuda_args &args) {
        const typename BODY::template pairs<true> pairs(base::shared().rows[0].numbers,
                                                        base::shared().t, &written::pairs_aside());
        double total[4] = {0, 0, 0, 0};
        resident::far_slice::of<T>(args, all().row.index)
            .template pass<T>([&](uint32_t, auto left, const uint4 &p, const uint4 &q) {
                written::add_distances(pairs, p, q, (uint32_t)left.left, total);
            });
        written::put_right(total);
    }
    static __device__ __forceinline__ void settle(const kld_cuda_args &args, const part &sums) {
        if (resident::group_thread() < 32)
            written::tell(args, all().row, all().factor, sums);
        resident::group_sync();
        if (base::shared().rows[0].way == AGAIN)
            written::settle_again(args, all().row, all().factor);
        if constexpr (BODY::CENTRES)
            if (written::is_far())
                recentre(args);
    }

    static __device__ __forceinline__ void write(const kld_cuda_args &args) {
        const resident::place &at = resident::here().place;
        const auto &settled = base::shared().rows[0];
        char *to = resident::part_of<T>(written::gradient(args), all().row.index, at);
        auto slice = resident::far_slice::of<T>(args, all().row.index);
        /* From the 16 bytes in which all three start, if they start alike: no vector needs two. */
        uint32_t head = 0;
        if (slice.shift_p == slice.shift_q && slice.shift_p == resident::shift_of(to)) {
            head = slice.shift_p / (uint32_t)sizeof(T);
            to -= slice.shift_p;
            slice.count += head;
            slice.shift_p = slice.shift_q = 0;
        }
        if (written::is_careful()) {
            row_writer<typename BODY::template pairs<true>> writer(written::settled(), to, head);
            writer.any(slice, 0, writer.all_steps(slice));
            return;
        }
        row_writer<typename BODY::template pairs<false>> writer(written::settled(), to, head);
        if (slice.shift_p || slice.shift_q || !aligned16<T>(to))
            writer.any(slice, 0, writer.all_steps(slice));
        else
            writer.run(slice);
    }

    /* A row that is not masked: its value, to the first thread. */
    static __device__ __forceinline__ double take(const kld_cuda_args &args) {
        settle(args, sums_of_rows::sums(args, all().row.index));
        const auto &settled = base::shared().rows[0];
        if (settled.way != ANY && base::shared().divides)
            write(args);
        else if (settled.way != ANY)
            clear(args);
        return settled.value;
    }
    static __device__ __forceinline__ void clear(const kld_cuda_args &args) {
        const resident::place &at = resident::here().place;
        resident::clear<T>(resident::part_of<T>(written::gradient(args), all().row.index, at),
                           at.count, resident::group_thread(), resident::GROUP_THREADS);
    }

    static __device__ __forceinline__ void compute(const kld_cuda_args &args) {
        if (threadIdx.x == 0) {
            all().walk.start(resident::here().place);
            next(args);
        }
        resident::group_sync();
        while (all().more) {
            double value = 0.0;
            if (all().row.masked)
                clear(args);
            else
                value = take(args);
            resident::group_sync();
            if (threadIdx.x == 0) {
                value = all().row.masked ? 0.0 : value * all().weight;
                /* It always is. Without these two conditions nvcc 13.0 spills 272 bytes in place
                 * of 88. */
                if (resident::here().place.rank == 0) {
                    row_store(args, all().row.index, value);
                    all().total = all().row.first ? value : all().total + value;
                    args.scratch->partial[args.first_group + all().row.group] = all().total;
                }
                next(args);
            }
            resident::group_sync();
        }
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
