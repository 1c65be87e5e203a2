/* logits_onepass.cuh - rows of logits of which only the value is wanted: read once, from device
 * memory straight to registers, by a warp or by the blocks of a cluster. Sums and decisions are
 * those of logits_stats.cuh; a row that needs another look is read again, mostly from the
 * second-level cache. Other rows of the multiprocessor compute while one waits. */
#ifndef KLD_KERNELS_CUDA_LOGITS_ONEPASS_CUH
#define KLD_KERNELS_CUDA_LOGITS_ONEPASS_CUH

#include "kernels/cuda/logits_list.cuh"
#include "kernels/cuda/logits_resident.cuh"
#include "kernels/cuda/onepass_units.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* What rows<> is told of a value: see there. */
template <class T_, int EXTRA_> struct value_body {
    typedef T_ T;
    typedef T_ type;
    static constexpr bool KNOWN = true;
    static constexpr int EXTRA = EXTRA_;

    struct numbers {
        __device__ __forceinline__ numbers() {}
        __device__ __forceinline__ numbers(const kld_cuda_args &, const row_stats &, double) {}
    };
    static __device__ __forceinline__ double value(const kld_cuda_args &args,
                                                   const row_stats &stats) {
        return EXTRA == logits_stats::ENTROPY ? stats.entropy
               : EXTRA == logits_stats::REVERSE
                   ? args.rule.of_p * stats.forward + args.rule.of_q * stats.reverse
                   : args.rule.of_p * stats.forward;
    }
};

/* The sums of one thread over its part of a row, as it comes. */
template <class T, int EXTRA> struct onepass {
    static constexpr uint32_t V = packet<T>::V;
    static constexpr uint32_t UNIT = 2; /* steps whose vectors are on their way */
    static constexpr uint32_t FLUSH = UNIT < 4 ? 4 / UNIT : 1; /* units in FP32 */
    static_assert(KLD_CUDA_ONEPASS_WARP_BYTES <= 32 * UNIT * 16 * 32 &&
                      KLD_CUDA_ONEPASS_BLOCK_BYTES <= 32 * UNIT * 16 * 128 && 32 * UNIT <= 64,
                  "a bit for each step");
    static constexpr int SUMS = EXTRA == logits_stats::NOTHING ? 3 : 4;

    struct sums {
        double sum[4];
        float p, q; /* the largest */
    };

    typedef onepass_units<UNIT> source;
    typedef typename source::unit unit;
    typedef typename source::extent extent;
    static constexpr uint32_t STEP = source::STEP;

    /* Of a warp's part of the row; without a whole unit there is none at all. A warp's steps are
     * whole but for the last one, and so is a unit. */
    static __device__ __forceinline__ extent extent_of(const resident::far_slice &slice) {
        static_assert(UNIT >= 2, "what is behind the whole units is no more than one");
        extent row;
        row.whole = slice.full_steps_of(slice.count / V) / UNIT;
        row.all = (slice.steps_of((slice.count + V - 1) / V) + UNIT - 1) / UNIT;
        row.all = row.whole ? row.all : 0;
        row.bytes = ((int32_t)slice.count - (int32_t)(resident::group_thread() * V)) *
                    (int32_t)sizeof(T);
        return row;
    }
    /* What of the last unit is behind the row. */
    static __device__ __forceinline__ void pad(unit &u, const extent &row,
                                               const logits_stats::reference &at) {
#pragma unroll
        for (uint32_t i = 0; i < UNIT; i++) {
            int32_t left = row.left(row.whole, i) / (int32_t)sizeof(T);
            logits_stats::heavy_list<T>::pad(u.p[i], left, at.pad_p);
            logits_stats::heavy_list<T>::pad(u.q[i], left, at.pad_q);
        }
    }
    /* All units. Classes that count one by one go to the list, so many: ret_listed. ret_heavy:
     * steps left out, as the list had no room. Step by step: those of the next unit are asked for
     * as soon as these are through. No call in here, and little that outlives the loop: registers
     * are what is on its way. */
    template <bool SHIFTED, class FROM>
    static __device__ __forceinline__ sums run(FROM from, const extent &row, const temperature &t,
                                               float span, uint32_t classes,
                                               logits_stats::reference *ret_at,
                                               logits_stats::heavy_list<T> &list,
                                               uint32_t &ret_listed, uint64_t &ret_heavy) {
        /* The first classes may be unlike the others: reserved ones, masked ones. */
        const uint32_t middle = row.whole / 2 * UNIT * STEP;
        const uint4 more_p[1] = {
            resident::far_slice::load_whole<SHIFTED>(from.p + middle, from.shift_p, 0)};
        const uint4 more_q[1] = {
            resident::far_slice::load_whole<SHIFTED>(from.q + middle, from.shift_q, 0)};
        unit u;
        from.start(row, u);
        sums r = {{0, 0, 0, 0}, 0, 0};
        logits_stats::top_of<T>::most(u.p, r.p);
        logits_stats::top_of<T>::most(u.q, r.q);
        float top_p, top_q;
        logits_stats::top_of<T>::most(more_p, top_p);
        logits_stats::top_of<T>::most(more_q, top_q);
        auto at = logits_stats::reference::of_most<T>(fmaxf(r.p, top_p), fmaxf(r.q, top_q), t, span,
                                                      classes, UNIT + 1);
        *ret_at = at;
        __syncwarp();
        logits_stats::top_of<T> top(at);
        logits_stats::chunk_sums<EXTRA> sum;
        uint64_t heavy = 0;
        uint32_t listed = 0;
        auto add = [&](uint32_t number, bool look) {
            from.ask(row, number + source::RING);
#pragma unroll
            for (uint32_t i = 0; i < UNIT; i++) {
                bool leave = false;
                if (__any_sync(KLD_FULL_WARP, top.add_raw(u.p[i], u.q[i], at) || look)) {
                    uint32_t count = listed;
                    leave = !logits_stats::heavy_list<T>::can_take(at);
                    if (!leave)
                        list.take(u.p[i], u.q[i], at, count);
                    leave = leave || count > logits_stats::heavy_list<T>::MOST;
                    if (leave) /* what it has put there is overwritten */
                        __syncwarp();
                    heavy |= leave ? 1ull << (number * UNIT + i) : 0;
                    listed = leave ? listed : count;
                }
                if (!leave)
                    logits_stats::fast_pairs<T, EXTRA>(logits_stats::pair_of<T>(u.p[i], u.q[i]), at,
                                                       t, sum);
                from.refill(row, number + 1, i, u);
            }
            from.take(number + 1 < row.all, u);
            if (number % FLUSH == FLUSH - 1)
                sum.template flush<T>(r.sum);
        };
#pragma unroll 1
        for (uint32_t number = 0; number < row.whole; number++)
            add(number, false);
        if (row.whole < row.all) {
            pad(u, row, at);
            add(row.whole, !logits_stats::heavy_list<T>::can_take(at)); /* there are no pads then */
        }
        sum.template flush<T>(r.sum);
        top.get_mine(r.p, r.q);
        ret_listed = listed;
        ret_heavy = heavy;
        return r;
    }

    /* One step of any kind, its heavy classes one by one. */
    static __device__ __forceinline__ void add_step(const resident::far_slice &slice, uint32_t step,
                                                    const logits_stats::reference &at,
                                                    const temperature &t, sums &to) {
        uint32_t left = slice.left_of(step, V);
        if (!left)
            return;
        uint4 p = slice.load<T>(slice.p, slice.shift_p, step, left);
        uint4 q = slice.load<T>(slice.q, slice.shift_q, step, left);
        logits_stats::add_to<EXTRA>(to.sum,
                                    logits_stats::heavy_vector<T, EXTRA>(p, q, left, at, t));
        logits_stats::pair_of<T> z(p, q);
        z.pad(resident::some_of{left}, -CUDART_INF_F, -CUDART_INF_F);
#pragma unroll
        for (int i = 0; i < V; i++) {
            to.p = fmaxf(to.p, z.p[i]);
            to.q = fmaxf(to.q, z.q[i]);
        }
    }
    /* The steps that were left out, or all where run() was not, and the classes of the list. */
    static __device__ __noinline__ sums rest(resident::far_slice slice, uint64_t heavy,
                                             bool in_units,
                                             const logits_stats::reference *from,
                                             const temperature *t,
                                             logits_stats::heavy_list<T> *list, uint32_t listed) {
        sums r = {{0, 0, 0, 0}, -CUDART_INF_F, -CUDART_INF_F};
        logits_stats::reference at = *from;
        for (; heavy; heavy &= heavy - 1)
            add_step(slice, (uint32_t)__ffsll((long long)heavy) - 1, at, *t, r);
        if (!in_units)
            for (uint32_t step = 0; step < slice.steps_of((slice.count + V - 1) / V); step++)
                add_step(slice, step, at, *t, r);
        __syncwarp();
        logits_stats::heavy_sums one_by_one = {{0, 0, 0, 0}};
        for (uint32_t i = threadIdx.x % 32; i < listed; i += 32)
            logits_stats::add_heavy<T, EXTRA>(one_by_one, list->p[i], list->q[i], at, *t);
        logits_stats::add_to<EXTRA>(r.sum, one_by_one);
        __syncwarp();
        return r;
    }
    /* The same as run() where the warp has no whole unit, which no row is short enough for today:
     * what to count from. */
    static __device__ __noinline__ void peek(resident::far_slice slice, const temperature *t,
                                             float span, uint32_t classes,
                                             logits_stats::reference *ret) {
        float top_p = -CUDART_INF_F, top_q = -CUDART_INF_F;
        uint32_t left = slice.left_of(0, V);
        if (left) {
            logits_stats::pair_of<T> z(slice.load<T>(slice.p, slice.shift_p, 0, left),
                                       slice.load<T>(slice.q, slice.shift_q, 0, left));
            z.pad(resident::some_of{left}, -CUDART_INF_F, -CUDART_INF_F);
#pragma unroll
            for (int i = 0; i < V; i++) {
                top_p = fmaxf(top_p, z.p[i]);
                top_q = fmaxf(top_q, z.q[i]);
            }
        }
        *ret = logits_stats::reference::of_most<T>(top_p, top_q, *t, span, classes, 1);
        __syncwarp();
    }
};

/* A row that is summed and not yet judged. */
struct onepass_row {
    part all;
    uint64_t index, group;
    double shift, one; /* one: its weighted value */
    float powers[2];
    bool first, masked, missed;
};

/* What a warp keeps while it sums a row: not in registers. */
struct onepass_warp {
    /* A row's numbers take one thread as long as a warp: a warp that has rows for itself judges
     * many at a time, one in each lane. */
    static constexpr uint32_t ROWS = resident::GROUP_WARPS == 1 ? 32 : 1;

    resident::row_walk walk;
    logits_stats::reference at;
    double total; /* of the group's rows so far */
    uint32_t count;
    bool more, first;
    onepass_row rows[ROWS];
};

/* RING: units come by way of shared memory. */
template <class BODY, bool RING = false> struct onepass_rows : rows<BODY> {
    typedef rows<BODY> base;
    typedef typename BODY::type T;
    typedef onepass<T, BODY::EXTRA> pass;

    static __device__ __forceinline__ onepass_warp &warp() {
        __shared__ onepass_warp all[resident::WARPS];
        return all[threadIdx.x / 32];
    }

    static __device__ __forceinline__ typename pass::source::from_ring
    ring_of(const resident::far_slice &slice) {
        __shared__ typename pass::source::ring rings[resident::WARPS];
        return {slice.p,
                slice.q,
                slice.shift_p,
                slice.shift_q,
                shared_at(&rings[threadIdx.x / 32].at[0][0][0][threadIdx.x % 32]),
                0};
    }
    /* All warps' sums over the row, to all lanes of the first. at: this warp's, in shared memory,
     * as is index. */
    static __device__ __forceinline__ part sums(const kld_cuda_args &args, const uint64_t &index,
                                                logits_stats::reference &at) {
        typename pass::sums mine = {{0, 0, 0, 0}, -CUDART_INF_F, -CUDART_INF_F};
        uint64_t heavy = 0;
        uint32_t listed = 0;
        __shared__ logits_stats::heavy_list<T> lists[resident::WARPS];
        logits_stats::heavy_list<T> &list = lists[threadIdx.x / 32];
        auto slice = resident::far_slice::of<T>(args, index);
        typename pass::extent row = pass::extent_of(slice);
        if (!row.all)
            pass::peek(slice, &base::shared().t, base::shared().span, base::shared().classes, &at);
        else if constexpr (RING)
            mine = pass::template run<true>(ring_of(slice), row, base::shared().t,
                                            base::shared().span, base::shared().classes, &at, list,
                                            listed, heavy);
        else if (slice.shift_p || slice.shift_q)
            mine = pass::template run<true>(
                typename pass::source::template from_memory<true>{slice.p, slice.q, slice.shift_p,
                                                                  slice.shift_q},
                row, base::shared().t, base::shared().span, base::shared().classes, &at, list,
                listed, heavy);
        else
            mine = pass::template run<false>(
                typename pass::source::template from_memory<false>{slice.p, slice.q, 0, 0}, row,
                base::shared().t, base::shared().span, base::shared().classes, &at, list, listed,
                heavy);
        __syncwarp();
        slice = resident::far_slice::of<T>(args, index);
        uint32_t all_units = pass::extent_of(slice).all;
        if (heavy || listed || !all_units) {
            auto more = pass::rest(slice, heavy, all_units != 0, &at, &base::shared().t, &list,
                                   listed);
#pragma unroll
            for (int i = 0; i < pass::SUMS; i++)
                mine.sum[i] += more.sum[i];
            mine.p = fmaxf(mine.p, more.p);
            mine.q = fmaxf(mine.q, more.q);
        }
        float scale = base::shared().t.scale.high;
        part all;
        all.top[0] = logits_stats::warp_max(mine.p);
        all.top[1] = logits_stats::warp_max(mine.q);
        all.mark[0] = logits_stats::reference::mark(at.c_p, all.top[0], at.limit_p, scale);
        all.mark[1] = logits_stats::reference::mark(at.c_q, all.top[1], at.limit_q, scale);
        if constexpr (resident::GROUP_WARPS == 1) {
            logits_stats::sums_of(all, mine.sum);
            return all;
        }
        return resident::merge_row(
            mine.sum, all.mark[0], all.mark[1],
            [](const part *parts, uint32_t count) {
                return logits_stats::fast_merge<BODY::EXTRA>(parts, count);
            },
            all.top[0], all.top[1]);
    }

    /* A row whose sums did not do, to base::shared().rows[0]. The whole group. */
    static __device__ __forceinline__ void do_again(const kld_cuda_args &args,
                                                    const onepass_row &from, double factor) {
        auto *row = &base::shared().rows[0];
        if (resident::group_thread() == 0) {
            resident::here().info[0].index = from.index;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                row->top[i] = from.all.top[i];
                row->powers[i] = from.powers[i];
            }
            row->missed = from.missed;
            row->shift = from.shift;
            row->factor = factor;
            row->way = AGAIN;
        }
        resident::group_sync();
        base::again(args, 0, 0);
    }
    /* Its value, by the group's first thread. */
    static __device__ __noinline__ double again(const kld_cuda_args &args,
                                                const onepass_row &from) {
        auto *row = &base::shared().rows[0];
        uint64_t index = from.index;
        do_again(args, from, 0.0);
        double value = row->value;
        if (row->way == ANY)
            value = resident::here().place.rank == 0 ? row_by_any(args, index) : 0.0;
        resident::group_sync();
        return value;
    }
    /* One thread: a row's value, if its sums give it. */
    static __device__ __forceinline__ bool judge(const kld_cuda_args &args, onepass_row &row,
                                                 const row_stats &stats, double &ret_value) {
        ret_value = BODY::value(args, stats);
        row.missed = stats.missed;
        row.shift = stats.shift;
        row.powers[0] = stats.powers[0];
        row.powers[1] = stats.powers[1];
        return stats.good;
    }
    static __device__ __forceinline__ void store(const kld_cuda_args &args, onepass_row &row,
                                                 double value) {
        row.one = row.masked ? 0.0 : value * row_open(args, row.index).weight;
        row_store(args, row.index, row.one);
    }
    /* One thread: rows are added in order. */
    static __device__ __forceinline__ void add(const kld_cuda_args &args, const onepass_row &row) {
        warp().total = row.first ? row.one : warp().total + row.one;
        args.scratch->partial[args.first_group + row.group] = warp().total;
    }

    /* A warp with rows for itself: all that it has. */
    static __device__ __noinline__ void settle_many(const kld_cuda_args &args) {
        uint32_t lane = threadIdx.x % 32, count = warp().count;
        onepass_row &row = warp().rows[lane];
        bool mine = lane < count, good = true;
        double value = 0.0;
        if (mine && !row.masked) {
            logits_stats::fast_side p(row.all.sum[0], row.all.mark[0]);
            logits_stats::fast_side q(row.all.sum[1], row.all.mark[1]);
            row_stats stats =
                logits_stats::fast_row<BODY::EXTRA>(row.all, p, q, base::bounds(args));
            good = judge(args, row, stats, value);
        }
        __syncwarp();
        for (uint32_t bad = __ballot_sync(KLD_FULL_WARP, !good); bad; bad &= bad - 1) {
            uint32_t which = (uint32_t)__ffs((int)bad) - 1;
            double found = again(args, warp().rows[which]);
            found = __shfl_sync(KLD_FULL_WARP, found, 0);
            value = lane == which ? found : value;
        }
        if (mine)
            store(args, row, value);
        __syncwarp();
        if (lane == 0)
            for (uint32_t i = 0; i < count; i++)
                add(args, warp().rows[i]);
        __syncwarp();
    }
    /* Several warps with one row. */
    static __device__ __forceinline__ void settle_one(const kld_cuda_args &args, const part &all) {
        __shared__ bool good;
        onepass_row &row = warp().rows[0];
        double value = 0.0;
        if (resident::group_thread() < 32) {
            row_stats stats = base::fast_row(args, all);
            if (threadIdx.x == 0) {
                row.all = all;
                good = judge(args, row, stats, value);
            }
        }
        resident::group_sync();
        if (!good)
            value = again(args, row);
        if (threadIdx.x == 0 && resident::here().place.rank == 0) {
            store(args, row, value);
            add(args, row);
        }
    }

    static __device__ __forceinline__ void compute(const kld_cuda_args &args) {
        resident::block_shared &block = resident::here();
        if (threadIdx.x % 32 == 0) {
            warp().walk.start(block.place);
            warp().count = 0;
        }
        __syncwarp();
        for (;;) {
            if (threadIdx.x % 32 == 0) {
                bool first;
                warp().more = warp().walk.next(args, block.place, first);
                onepass_row &row = warp().rows[warp().count];
                row.index = warp().walk.index;
                row.group = warp().walk.group;
                row.first = first;
                row.masked = warp().more && row_is_masked(args, row.index);
            }
            __syncwarp();
            if (!warp().more)
                break;
            bool masked = warp().rows[warp().count].masked;
            __syncwarp(); /* before the first lane goes on to the next */
            if constexpr (resident::GROUP_WARPS == 1) {
                part all = {};
                if (!masked)
                    all = sums(args, warp().walk.index, warp().at);
                if (threadIdx.x % 32 == 0)
                    warp().rows[warp().count++].all = all;
                __syncwarp();
                if (warp().count == onepass_warp::ROWS) {
                    settle_many(args);
                    if (threadIdx.x % 32 == 0)
                        warp().count = 0;
                    __syncwarp();
                }
            } else if (!masked) {
                settle_one(args, sums(args, warp().walk.index, warp().at));
            } else if (threadIdx.x == 0 && block.place.rank == 0) {
                store(args, warp().rows[0], 0.0);
                add(args, warp().rows[0]);
            }
        }
        if (resident::GROUP_WARPS == 1 && warp().count)
            settle_many(args);
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
