/* kept_wide.cuh - rows of FP32 logits that are kept (logits_kept.cuh), of a divergence whose value
 * the sums do not give: js and the skewed KL, with the gradient by p's logits or none. The second
 * look is in FP64 (logits_wide.cuh). It sums the value and what the softmax takes off the gradient,
 * and where one is wanted leaves p and h of each class in the place of its logits, in FP32: the
 * third, which writes, is two multiplications. Of classes so near the mean that this shows, and
 * that have enough mass, the logits are read again. */
#ifndef KLD_KERNELS_CUDA_KEPT_WIDE_CUH
#define KLD_KERNELS_CUDA_KEPT_WIDE_CUH

#include "kernels/cuda/logits_kept.cuh"
#include "kernels/cuda/logits_wide.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

template <class BODY, bool UNEVEN, bool WRITES> struct kept_wide_rows : kept_rows<BODY, UNEVEN> {
    typedef kept_rows<BODY, UNEVEN> kept;
    typedef rows<BODY> base;
    typedef written_rows<BODY> written;
    typedef typename kept::copies copies;
    typedef typename kept::source source;
    static constexpr uint32_t V = kept::V;

    /* Of this block's slice. Vectors are those of its classes, wherever it starts: what a lane adds
     * up is not to depend on that. */
    struct extent {
        uint32_t at;               /* this lane's first place */
        uint32_t count, full, end; /* classes; steps that are whole; steps */

        __device__ __forceinline__ explicit extent(const kept_row &row)
            : at(kept::first_place()), count(row.bytes / 4),
              full(resident::far_slice::full_steps_of(count / V)),
              end(resident::far_slice::steps_of((count + V - 1) / V)) {}
    };
    static __device__ __forceinline__ uint32_t vector_of(uint32_t step) {
        return step * resident::GROUP_THREADS + resident::group_thread();
    }

    struct sums {
        double value = 0, h = 0, mass = 0;
        float largest = 0; /* of mass h */
    };

    /* A vector of each tensor. WRITES: they become p and h. */
    static __device__ __forceinline__ void vectors(const kld_cuda_args &args, uint4 &raw_p,
                                                   uint4 &raw_q, const temperature &t, sums &to) {
        const wide_row &row = base::shared().rows[0].numbers;
        float z_p[V], z_q[V], value = 0;
        alignas(16) float mass[V], h[V];
        unpack<float>(raw_p, z_p);
        unpack<float>(raw_q, z_q);
#pragma unroll
        for (uint32_t i = 0; i < V; i++) {
            const typename BODY::pair pair(z_p[i], z_q[i], row, args, t);
            value = fmaf(pair.mass, (float)pair.value, value);
            if constexpr (WRITES) {
                const double height = pair.h - row.origin;
                mass[i] = pair.mass_p();
                h[i] = (float)height;
                const double wide = wide_of(mass[i]);
                to.h = fma(wide, height, to.h);
                to.mass += wide;
                to.largest = fmaxf(to.largest, fabsf(mass[i] * h[i]));
            }
        }
        to.value += (double)value;
        if constexpr (WRITES) {
            raw_p = *(uint4 *)mass;
            raw_q = *(uint4 *)h;
        }
    }
    /* What of a vector is not the row's has no mass. */
    static __device__ __forceinline__ void clear_behind(uint32_t count, uint32_t vector,
                                                        uint4 &raw_p, uint4 &raw_q) {
        const uint32_t none = __float_as_uint(-CUDART_INF_F);
        uint32_t *p = (uint32_t *)&raw_p, *q = (uint32_t *)&raw_q;
#pragma unroll
        for (uint32_t i = 0; i < V; i++) {
            if (vector * V + i >= count)
                p[i] = q[i] = none;
        }
    }

    /* The second look, of which the third is to come. */
    static __device__ __forceinline__ void look(const kld_cuda_args &args, const kept_row &row) {
        const extent all(row);
        const source from = {all.at, row.shift_p, row.shift_q, 0};
        const temperature t = base::shared().t;
        sums mine;
#pragma unroll 1
        for (uint32_t step = 0; step < all.end; step++) {
            uint4 p, q;
            from.vectors(step, p, q);
            if (step >= all.full)
                clear_behind(all.count, vector_of(step), p, q);
            if (UNEVEN)
                __syncwarp(); /* before what another lane reads, too, is something else */
            vectors(args, p, q, t, mine);
            store_shared(all.at + step * source::PLACE, p);
            store_shared(all.at + step * source::PLACE + source::TENSOR, q);
        }
        const double sum[4] = {mine.value, mine.h, mine.mass, 0};
        part whole = resident::merge_row(
            sum, 0, 0,
            [](const part *parts, uint32_t count) {
                part to = logits_stats::plain_merge(parts, count);
                to.top[0] = logits_stats::warp_max(lane_top(parts, count));
                return to;
            },
            logits_stats::warp_max(mine.largest));
        if (threadIdx.x == 0) {
            auto &settled = base::shared().rows[0];
            settled.value = whole.sum[0] < 0.0 ? 0.0 : whole.sum[0]; /* NaN stays */
            settled.numbers.centre(whole.sum[1], whole.sum[2], whole.top[0], row.row.all.top[0],
                                   base::shared().t);
        }
        resident::group_sync();
    }

    /* The same where only the value is wanted: the next row's vectors are asked for. */
    static __device__ __forceinline__ void weigh(const kld_cuda_args &args, const kept_row &row,
                                                 const kept_row &next) {
        const extent all(row);
        const source from = {all.at, row.shift_p, row.shift_q, 0};
        const copies coming = copies::of(next);
        const temperature t = base::shared().t;
        auto bring = [&](uint32_t step) {
            if (UNEVEN)
                __syncwarp(); /* before what another lane reads, too, is something else */
            coming.bring(all.at, step);
        };
        double total[4] = {0, 0, 0, 0};
        uint32_t todo = (1u << all.end) - 1; /* in FP64: steps, a bit each */
        if (base::shared().rows[0].numbers.is_quick)
            todo = quickly(from, all, t, total, bring);
        sums mine;
#pragma unroll 1
        for (; todo; todo &= todo - 1) {
            const uint32_t step = (uint32_t)__ffs((int)todo) - 1;
            uint4 p, q;
            from.vectors(step, p, q);
            if (step >= all.full)
                clear_behind(all.count, vector_of(step), p, q);
            bring(step);
            vectors(args, p, q, t, mine);
        }
        coming.bring_from(all.at, all.end);
        copies_end();
        total[0] = mine.value;
        settle_value(args, total);
        if (base::shared().rows[0].numbers.is_quick &&
            !(base::shared().rows[0].value >= quick_row::VALUE_LEAST))
            weigh_far(args, row);
    }
    /* Whole steps without a heavy class, which the others' bits stand for. */
    template <class BRING>
    static __device__ __forceinline__ uint32_t quickly(const source &from, const extent &all,
                                                       const temperature &t, double (&total)[4],
                                                       BRING bring) {
        const quick_row row = base::shared().rows[0].numbers.quick;
        logits_stats::reference at;
        at.limit_p = row.heavy_p;
        at.limit_q = row.heavy_q;
        const logits_stats::top_of<float> top(at);
        uint32_t left_out = (1u << all.end) - (1u << min(all.full, all.end));
#pragma unroll 1
        for (uint32_t step = 0; step < all.full; step++) {
            uint4 p, q;
            from.vectors(step, p, q);
            const logits_stats::pair_of<float> z(p, q);
            quick_sums sum;
            float most = -CUDART_INF_F;
#pragma unroll
            for (uint32_t i = 0; i < V; i++)
                sum.add(z.p[i], z.q[i], row, t, most);
            if (__any_sync(KLD_FULL_WARP,
                           top.is_above(p, q, at) || most > quick_sums::POWER_MOST)) {
                left_out |= 1u << step;
                continue;
            }
            total[1] += (double)sum.p;
            total[2] += (double)sum.q;
            total[3] += (double)sum.mass_q;
            bring(step);
        }
        return left_out;
    }
    static __device__ __forceinline__ void settle_value(const kld_cuda_args &args,
                                                        const double (&total)[4]) {
        part all = resident::merge_row(total, 0, 0, logits_stats::plain_merge);
        if (threadIdx.x == 0) {
            auto &settled = base::shared().rows[0];
            double value = all.sum[0];
            if (settled.numbers.is_quick)
                value += settled.numbers.quick.value(args.rule, all.sum[1], all.sum[2], all.sum[3]);
            settled.value = value < 0.0 ? 0.0 : value; /* NaN stays */
        }
        resident::group_sync();
    }
    /* A row whose value turned out to be small: in FP64, from device memory. */
    static __device__ __noinline__ void weigh_far(const kld_cuda_args &args, const kept_row &row) {
        resident::group_sync(); /* all have seen that it is */
        if (threadIdx.x == 0)
            base::shared().rows[0].numbers.is_quick = false;
        sums mine;
        resident::far_slice::of<float>(args, row.row.index)
            .template pass<float>([&](uint32_t, auto left, const uint4 &raw_p, const uint4 &raw_q) {
                uint4 p = raw_p, q = raw_q;
                clear_behind((uint32_t)left.left, 0, p, q);
                vectors(args, p, q, base::shared().t, mine);
            });
        const double total[4] = {mine.value, 0, 0, 0};
        settle_value(args, total);
    }
    static __device__ __forceinline__ float lane_top(const part *parts, uint32_t count) {
        const uint32_t lane = threadIdx.x % 32;
        return lane < count ? parts[lane].top[0] : 0.0f;
    }

    /* Classes whose h differs from the mean by less than it is known to: mass times the difference
     * in units of center, in place of the mass, and h as if that were 1: `near` is not 0 here. */
    static __device__ __noinline__ void mend(const kld_cuda_args &args, const kept_row &row) {
        const wide_row &numbers = base::shared().rows[0].numbers;
        const temperature &t = base::shared().t;
        const extent all(row);
        const float *from_p = (const float *)(row.p + row.shift_p);
        const float *from_q = (const float *)(row.q + row.shift_q);
#pragma unroll 1
        for (uint32_t step = 0; step < all.end; step++) {
            const uint32_t place = all.at + step * source::PLACE, first = vector_of(step) * V;
            uint4 raw_p = load_shared(place), raw_h = load_shared(place + source::TENSOR);
            float *mass = (float *)&raw_p, *h = (float *)&raw_h;
            uint32_t which = 0; /* what is not the row's has no mass */
#pragma unroll
            for (uint32_t i = 0; i < V; i++)
                if (fabsf(h[i] - numbers.center) < numbers.near && mass[i] > numbers.least)
                    which |= 1u << i;
            if (!which)
                continue;
#pragma unroll
            for (uint32_t i = 0; i < V; i++)
                if (which >> i & 1) {
                    const typename BODY::pair pair(from_p[first + i], from_q[first + i], numbers,
                                                   args, t);
                    mass[i] *= (float)((pair.h - numbers.mean) / (double)numbers.center);
                    h[i] = 2.0f * numbers.center;
                }
            store_shared(place, raw_p);
            store_shared(place + source::TENSOR, raw_h);
        }
    }
    static __device__ __forceinline__ void write(const kept_row &row, const kept_row &next) {
        const extent all(row);
        const source from = {all.at, 0, 0, 0};
        const copies coming = copies::of(next);
        const row_writer<wide_pairs> writer(written::settled(), row.to, 0);
        bool whole = aligned16<float>(row.to), halved = false;
        if (whole)
            halved = kept::template full_steps<false>(writer, all.at, 0, all.full, coming);
        kept::template any<false, false>(writer, from, all.count, whole, whole ? all.full : 0,
                                         all.end, coming);
        coming.bring_from(all.at, all.end);
        if (!halved)
            copies_end();
    }

    /* The row at hand; then the next one is. */
    static __device__ __forceinline__ void take(const kld_cuda_args &args) {
        kept::settle(args, kept::sums(args, kept::row_at(kept::all().turn)));
        const auto &settled = base::shared().rows[0];
        const kept_row &row = kept::row_at(kept::all().turn - 1);
        const kept_row &next = kept::row_at(kept::all().turn);
        if (settled.way == ANY) {
            kept::skip(next);
        } else if constexpr (!WRITES) {
            weigh(args, row, next);
        } else {
            look(args, row);
            if (base::shared().divides) {
                if (settled.numbers.mends)
                    mend(args, row);
                write(row, next);
            } else {
                resident::clear<float>(row.to, resident::here().place.count,
                                       resident::group_thread(), resident::GROUP_THREADS);
                kept::skip(next);
            }
        }
        copies_end();
        kept::add(args, row);
    }
    static __device__ __forceinline__ void compute(const kld_cuda_args &args) {
        kept::template compute_by<kept_wide_rows>(args);
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
