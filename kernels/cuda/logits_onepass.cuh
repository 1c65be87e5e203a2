/* logits_onepass.cuh - the sums of a row of logits, as it comes: read once, from device memory
 * straight to registers, by a warp or by the blocks of a cluster. Sums and decisions are those of
 * logits_stats.cuh; a row that needs another look is read again, mostly from the second-level
 * cache. Other rows of the multiprocessor compute while one waits. What rows they are, and what
 * becomes of the sums, is others' business: logits_values.cuh, logits_reread.cuh. */
#ifndef KLD_KERNELS_CUDA_LOGITS_ONEPASS_CUH
#define KLD_KERNELS_CUDA_LOGITS_ONEPASS_CUH

#include "kernels/cuda/logits_list.cuh"
#include "kernels/cuda/logits_resident.cuh"
#include "kernels/cuda/onepass_units.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* What a warp has found in its part of a row besides the sums. In shared memory. */
struct row_aside {
    logits_stats::reference at;
    uint64_t heavy;  /* steps that were left out, a bit each */
    uint32_t listed; /* classes in the list */
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
    static __device__ __forceinline__ extent extent_of(uint32_t count) {
        static_assert(UNIT >= 2, "what is behind the whole units is no more than one");
        extent row;
        row.whole = resident::far_slice::full_steps_of(count / V) / UNIT;
        row.all = (resident::far_slice::steps_of((count + V - 1) / V) + UNIT - 1) / UNIT;
        row.all = row.whole ? row.all : 0;
        row.bytes = ((int32_t)count - (int32_t)(resident::group_thread() * V)) * (int32_t)sizeof(T);
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
    /* What is asked for before a row's turn: its first unit and, of each tensor, a vector from some
     * units on. The first classes may be unlike the others: reserved ones, masked ones. Not so many
     * units that by then the vector has left the second-level cache and is read from memory twice:
     * from the middle of a row it is 3 % more. */
    static constexpr uint32_t MORE = 3;
    struct head {
        unit first;
        uint4 more_p[1], more_q[1];
    };
    template <class FROM>
    static __device__ __forceinline__ void ask(FROM &from, const extent &row, head &ret) {
        if constexpr (!FROM::IS_HERE)
            from.peek(min(row.whole / 2, MORE), ret.more_p[0], ret.more_q[0]);
        from.start(row, ret.first);
    }
    /* The same, but only to the second-level cache. */
    static __device__ __forceinline__ void fetch(const resident::far_slice &slice,
                                                 const extent &row) {
        const uint32_t more = min(row.whole / 2, MORE) * UNIT * STEP;
#pragma unroll
        for (uint32_t i = 0; i < UNIT; i++) {
            resident::far_slice::fetch(slice.p + i * STEP);
            resident::far_slice::fetch(slice.q + i * STEP);
        }
        resident::far_slice::fetch(slice.p + more);
        resident::far_slice::fetch(slice.q + more);
    }
    /* All units, of which `u` holds what was asked for. Classes that count one by one go to the
     * list. Step by step: those of the next unit are asked for as soon as these are through. No
     * call in here, and little that outlives the loop: registers are what is on its way. What is
     * seldom looked at lies in `aside`, in shared memory. */
    template <class FROM>
    static __device__ __forceinline__ sums run(FROM &from, const extent &row, head &h,
                                               const temperature t, float span, uint32_t classes,
                                               logits_stats::heavy_list<T> &list,
                                               row_aside &aside) {
        unit &u = h.first;
        from.open(u);
        sums r = {{0, 0, 0, 0}, 0, 0};
        logits_stats::reference at;
        if constexpr (FROM::IS_HERE) {
            at = aside.at; /* found before */
        } else {
            logits_stats::top_of<T>::most(u.p, r.p);
            logits_stats::top_of<T>::most(u.q, r.q);
            float top_p, top_q;
            logits_stats::top_of<T>::most(h.more_p, top_p);
            logits_stats::top_of<T>::most(h.more_q, top_q);
            at = logits_stats::reference::of_most<T>(fmaxf(r.p, top_p), fmaxf(r.q, top_q), t, span,
                                                     classes, UNIT + 1);
            aside.at = at;
        }
        aside.heavy = 0;
        aside.listed = 0;
        __syncwarp();
        logits_stats::top_of<T> top(at);
        logits_stats::chunk_sums<EXTRA> sum;
        auto add = [&](uint32_t number, bool look) {
            from.ask(row, number + source::RING);
#pragma unroll
            for (uint32_t i = 0; i < UNIT; i++) {
                bool leave = false;
                if (__any_sync(KLD_FULL_WARP, top.add_raw(u.p[i], u.q[i], at) || look))
                    leave = put_aside(u.p[i], u.q[i], number * UNIT + i, list, aside);
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
            pad(u, row, aside.at);
            add(row.whole,
                !logits_stats::heavy_list<T>::can_take(aside.at)); /* there are no pads then */
        }
        sum.template flush<T>(r.sum);
        top.get_mine(r.p, r.q);
        return r;
    }
    /* The whole warp: the classes of a step that count one by one, to the list; or, as that has no
     * room, the step is left out. Returns if so. */
    static __device__ __forceinline__ bool put_aside(uint4 &p, uint4 &q, uint32_t step,
                                                     logits_stats::heavy_list<T> &list,
                                                     row_aside &aside) {
        const auto &at = aside.at;
        uint32_t count = aside.listed;
        bool leave = !logits_stats::heavy_list<T>::can_take(at);
        if (!leave)
            list.take(p, q, at, count);
        leave = leave || count > logits_stats::heavy_list<T>::MOST;
        __syncwarp(); /* of what it has put there beyond that, too: it is overwritten */
        if (threadIdx.x % 32 == 0) {
            aside.heavy |= leave ? 1ull << step : 0;
            aside.listed = leave ? aside.listed : count;
        }
        __syncwarp();
        return leave;
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
    /* The classes of the list, to this lane's sums. */
    static __device__ __forceinline__ void add_listed(const row_aside &aside, const temperature &t,
                                                      const logits_stats::heavy_list<T> &list,
                                                      double (&to)[4]) {
        const logits_stats::reference &at = aside.at;
        logits_stats::heavy_sums one_by_one = {{0, 0, 0, 0}};
#pragma unroll 1
        for (uint32_t i = threadIdx.x % 32; i < aside.listed; i += 32)
            logits_stats::add_heavy<T, EXTRA>(one_by_one, list.p[i], list.q[i], at, t);
        logits_stats::add_to<EXTRA>(to, one_by_one);
        __syncwarp(); /* before the next row's */
    }
    /* The steps that were left out, or all where run() was not. */
    static __device__ __noinline__ sums rest(resident::far_slice slice, bool in_units,
                                             const row_aside *aside, const temperature *t) {
        sums r = {{0, 0, 0, 0}, -CUDART_INF_F, -CUDART_INF_F};
        logits_stats::reference at = aside->at;
        for (uint64_t heavy = aside->heavy; heavy; heavy &= heavy - 1)
            add_step(slice, (uint32_t)__ffsll((long long)heavy) - 1, at, *t, r);
        if (!in_units)
            for (uint32_t step = 0; step < slice.steps_of((slice.count + V - 1) / V); step++)
                add_step(slice, step, at, *t, r);
        __syncwarp();
        return r;
    }
    /* The same as run() where the warp has no whole unit, which no row is short enough for today:
     * what to count from. */
    static __device__ __noinline__ void peek(resident::far_slice slice, const temperature *t,
                                             float span, uint32_t classes, row_aside *ret) {
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
        ret->at = logits_stats::reference::of_most<T>(top_p, top_q, *t, span, classes, 1);
        ret->heavy = 0;
        ret->listed = 0;
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

/* A warp's part of rows that are summed as they come. */
template <class BODY> struct onepass_rows : rows<BODY> {
    typedef rows<BODY> base;
    typedef typename BODY::type T;
    typedef onepass<T, BODY::EXTRA> pass;
    typedef typename pass::source source;

    static __device__ __forceinline__ row_aside &aside() {
        __shared__ row_aside all[resident::WARPS];
        return all[threadIdx.x / 32];
    }
    static __device__ __forceinline__ logits_stats::heavy_list<T> &list() {
        typedef logits_stats::heavy_list<T> list;
        if constexpr (resident::HOLDS) { /* where nothing is stored meanwhile */
            static_assert(sizeof(list) <= sizeof *resident::here().stage, "");
            return *(list *)resident::here().stage[threadIdx.x / 32];
        } else {
            __shared__ list all[resident::WARPS];
            return all[threadIdx.x / 32];
        }
    }
    template <class FROM>
    static __device__ __forceinline__ typename pass::sums
    run(FROM &from, const typename pass::extent &row, typename pass::head &head) {
        return pass::run(from, row, head, base::shared().t, base::shared().span,
                         base::shared().classes, list(), aside());
    }
    /* The part of the row that run() has summed, to `to`, in shared memory. MARKS: and what its
     * marks are, which all warps of a row have in common where they count from the same. */
    template <bool MARKS>
    static __device__ __forceinline__ void close(const kld_cuda_args &args, const uint64_t &index,
                                                 typename pass::sums &mine, part *to) {
        const row_aside &aside = onepass_rows::aside();
        const logits_stats::reference &at = aside.at;
        float scale = base::shared().t.scale.high;
        if (aside.listed)
            pass::add_listed(aside, base::shared().t, list(), mine.sum);
        float top_p = logits_stats::warp_max(mine.p), top_q = logits_stats::warp_max(mine.q);
        int32_t mark_p = 0, mark_q = 0;
        if (MARKS) {
            mark_p = logits_stats::reference::mark(at.c_p, top_p, at.limit_p, scale);
            mark_q = logits_stats::reference::mark(at.c_q, top_q, at.limit_q, scale);
        }
        resident::store_part(to, mine.sum, mark_p, mark_q, top_p, top_q);
        /* Nothing is to be kept in registers meanwhile: they would be stored in each row. */
        if (aside.heavy)
            close_rest(args, index, true, to);
    }
    /* Adds the steps that run() has left out, or all, as there was no whole unit. */
    static __device__ __noinline__ void close_rest(const kld_cuda_args &args, uint64_t index,
                                                   bool in_units, part *to) {
        const row_aside &aside = onepass_rows::aside();
        const logits_stats::reference &at = aside.at;
        float scale = base::shared().t.scale.high;
        auto more = pass::rest(resident::far_slice::of<T>(args, index), in_units, &aside,
                               &base::shared().t);
        float top_p = fmaxf(to->top[0], logits_stats::warp_max(more.p));
        float top_q = fmaxf(to->top[1], logits_stats::warp_max(more.q));
        double sum = resident::warp_sums(more.sum);
        unsigned lane = threadIdx.x % 32;
        __syncwarp();
        if (lane % 8 == 0)
            to->sum[lane / 8] += sum;
        if (lane == 0) {
            to->top[0] = top_p;
            to->top[1] = top_q;
            to->mark[0] = logits_stats::reference::mark(at.c_p, top_p, at.limit_p, scale);
            to->mark[1] = logits_stats::reference::mark(at.c_q, top_q, at.limit_q, scale);
        }
        __syncwarp();
    }
    /* The same of a row without a whole unit. */
    static __device__ __noinline__ void sum_without_units(const kld_cuda_args &args, uint64_t index,
                                                          part *to) {
        pass::peek(resident::far_slice::of<T>(args, index), &base::shared().t, base::shared().span,
                   base::shared().classes, &aside());
        if (threadIdx.x % 32 == 0)
            *to = part{{0, 0, 0, 0}, {0, 0}, {-CUDART_INF_F, -CUDART_INF_F}};
        __syncwarp();
        close_rest(args, index, false, to);
    }

    template <class FROM>
    static __device__ __forceinline__ void sum_from(FROM from, const kld_cuda_args &args,
                                                    const uint64_t &index,
                                                    const typename pass::extent &row, part *to) {
        typename pass::head head;
        pass::ask(from, row, head);
        typename pass::sums mine = run(from, row, head);
        __syncwarp();
        close<!FROM::IS_HERE>(args, index, mine, to);
    }
    /* All warps' sums over a row, to all lanes of the first. */
    static __device__ __forceinline__ part sums(const kld_cuda_args &args, const uint64_t &index) {
        auto slice = resident::far_slice::of<T>(args, index);
        typename pass::extent row = pass::extent_of(slice.count);
        part *parts = resident::here().extra_warps, *mine = parts + threadIdx.x / 32;
        if (!row.all)
            sum_without_units(args, index, mine);
        else if (slice.shift_p || slice.shift_q)
            sum_from(source::template from_memory<true>::of(slice), args, index, row, mine);
        else
            sum_from(source::template from_memory<false>::of(slice), args, index, row, mine);
        if constexpr (resident::GROUP_WARPS == 1)
            return *parts;
        return resident::merge_parts([](const part *parts, uint32_t count) {
            return logits_stats::fast_merge<BODY::EXTRA>(parts, count);
        });
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
    /* One thread: a row's value, if its sums give it. */
    static __device__ __forceinline__ bool judge(const kld_cuda_args &args, onepass_row &row,
                                                 const row_stats &stats, double &ret_value) {
        ret_value = BODY::value(args, stats);
        note(row, stats);
        return stats.good;
    }
    /* One thread: what another look at the row is to know. */
    static __device__ __forceinline__ void note(onepass_row &row, const row_stats &stats) {
        row.missed = stats.missed;
        row.shift = stats.shift;
        row.powers[0] = stats.powers[0];
        row.powers[1] = stats.powers[1];
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
