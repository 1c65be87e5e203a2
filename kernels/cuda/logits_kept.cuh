/* logits_kept.cuh - rows of logits of which one gradient is wanted that follows from their sums, or
 * js, longer than the caches keep at hand: the blocks of a cluster hold a slice each in shared
 * memory, read from device memory once. Each lane brings its own vectors, looks at them twice, for
 * the statistics and for the gradient (js: once more in between), and as
 * soon as one is written asks for that of the next row in its place: so there is always something
 * on its way, no barrier stands between the copies and who reads them, and one place does for two
 * rows. While the first warp makes a row's numbers of its sums, others find the rows to come. A
 * row that needs another look is read again from device memory. */
#ifndef KLD_KERNELS_CUDA_LOGITS_KEPT_CUH
#define KLD_KERNELS_CUDA_LOGITS_KEPT_CUH

#include "kernels/cuda/kept_copies.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

template <class BODY, bool UNEVEN> struct kept_rows : written_rows<BODY> {
    typedef rows<BODY> base;
    typedef written_rows<BODY> written;
    typedef onepass_rows<BODY> one;
    typedef typename BODY::type T;
    typedef typename one::pass pass;
    typedef kept_copies<UNEVEN> copies;
    typedef typename copies::source source;
    static constexpr uint32_t V = packet<T>::V;

    /* Rows that are known at a time: the one at hand, the next, of which vectors come in while that
     * is written, and the one after, of which a sample does. */
    static constexpr uint32_t RING = 4;

    /* A block's. */
    struct state {
        kept_row rows[RING];
        uint32_t turn; /* of the row at hand; the first thread's, others read it between barriers */
        double total;  /* of the group's rows so far; the first thread's */
        uint32_t looked; /* at so many rows; the looker's */
        uint32_t found;  /* rows so far; this and what follows is the finder's */
        resident::row_walk walk;
        uint64_t last_group;
    };
    static __device__ __forceinline__ state &all() {
        __shared__ state state;
        return state;
    }
    static __device__ __forceinline__ kept_row &row_at(uint32_t turn) {
        return all().rows[turn % RING];
    }
    /* Warps that have nothing else to do while the first settles a row. */
    static constexpr uint32_t FINDER = 1, LOOKER = 2;
    static_assert(resident::WARPS > LOOKER, "");

    static __device__ __forceinline__ uint32_t first_place() {
        const uint32_t thread = thread_again();
        return shared_at(resident::here().data) +
               thread / 32 * resident::here().place.steps * source::PLACE + 16 * (thread % 32);
    }
    /* Copies are waited for in two parts: units that the first has, one or more. */
    static __device__ __forceinline__ uint32_t half() {
        return max(resident::here().place.steps / 4, 1u);
    }
    /* This lane's vectors of the sample of a row of that number: while one is looked at the next
     * one comes. */
    static __device__ __forceinline__ uint32_t sample_place(uint32_t number) {
        constexpr uint32_t EACH = UNEVEN ? 64 : 32;
        return shared_at(resident::here().data) +
               resident::WARPS * resident::here().place.steps * source::PLACE +
               number % resident::KEPT_SAMPLES * 32 * EACH + EACH * (threadIdx.x % 32);
    }
    /* A sample is 32 vectors spread over the slice. Returns how many classes this lane's has. */
    static __device__ __forceinline__ uint32_t sample(uint32_t &ret_vector) {
        const uint32_t count = resident::here().place.count, vectors = (count + V - 1) / V;
        const uint32_t lane = threadIdx.x % 32;
        ret_vector = vectors < 32 ? lane : lane * vectors / 32;
        return ret_vector * V < count ? min(count - ret_vector * V, V) : 0;
    }
    static __device__ __forceinline__ void
    bring_sample(uint32_t to, const char *from, uint32_t shift, uint32_t vector, uint32_t left) {
        if (left)
            copy_16(to, from + 16 * vector);
        if (UNEVEN && shift + left * sizeof(T) > 16)
            copy_16(to + 16, from + 16 * vector + 16);
    }

    /* The finder: the next row that is not masked, of which a sample is on its way then; zeros to
     * those before it. */
    static __device__ __forceinline__ void find(const kld_cuda_args &args) {
        state &state = all();
        const resident::place &at = resident::here().place;
        resident::row_walk walk = state.walk;
        const unsigned lane = threadIdx.x % 32;
        kept_row &to = row_at(state.found);
        __syncwarp(); /* the first lane writes to all of that */
        bool is = false;
        for (bool first; walk.next(args, at, first);) {
            is = !row_is_masked(args, walk.index);
            if (is)
                break;
            if (first && at.rank == 0 && lane == 0)
                args.scratch->partial[args.first_group + walk.group] = 0;
            resident::clear<T>(resident::part_of<T>(written::gradient(args), walk.index, at),
                               at.count, lane, 32);
            if (at.rank == 0 && lane == 0)
                row_store(args, walk.index, 0.0);
        }
        const char *p = nullptr, *q = nullptr;
        uint32_t shift_p = 0, shift_q = 0;
        if (is) {
            p = resident::part_of<T>(args.p, walk.index, at);
            q = resident::part_of<T>(args.q, walk.index, at);
            shift_p = resident::shift_of(p);
            shift_q = resident::shift_of(q);
            p -= shift_p;
            q -= shift_q;
            uint32_t vector, left = sample(vector);
            const uint32_t place = sample_place(state.found);
            bring_sample(place, p, shift_p, vector, left);
            bring_sample(place + (UNEVEN ? 32 : 16), q, shift_q, vector, left);
        }
        __syncwarp();
        if (lane == 0) {
            to.is = is;
            to.bytes = is ? at.count * (uint32_t)sizeof(T) : 0;
            to.p = p;
            to.q = q;
            to.shift_p = shift_p;
            to.shift_q = shift_q;
            if (is) {
                row opened = row_open(args, walk.index);
                to.row.index = walk.index;
                to.row.group = walk.group;
                to.row.first = walk.group != state.last_group;
                to.row.masked = false;
                to.weight = opened.weight;
                to.factor = opened.gradient * args.inverse_temperature;
                to.to = resident::part_of<T>(written::gradient(args), walk.index, at);
                state.last_group = walk.group;
            }
            state.walk = walk;
            state.found++;
        }
        __syncwarp();
    }
    /* The looker: what to count from in the next row, whose sample has come. */
    static __device__ __forceinline__ void look() {
        const uint32_t number = all().looked;
        kept_row &to = row_at(number);
        const uint32_t at = sample_place(number);
        uint32_t vector, left = sample(vector);
        uint4 raw_p = {}, raw_q = {};
        if (left) {
            raw_p = source::load(at, to.shift_p);
            raw_q = source::load(at + (UNEVEN ? 32 : 16), to.shift_q);
        }
        auto from = logits_stats::reference::of<T>(logits_stats::pair_of<T>(raw_p, raw_q), left,
                                                   base::shared().t, base::shared().span,
                                                   base::shared().classes);
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            to.at = from;
            all().looked = number + 1;
        }
        __syncwarp();
    }

    /* The row's sums, to all lanes of the first warp. */
    static __device__ __forceinline__ part sums(const kld_cuda_args &args, const kept_row &row) {
        typename pass::extent extent = pass::extent_of(row.bytes / sizeof(T));
        part *mine = resident::here().extra_warps + threadIdx.x / 32;
        if (threadIdx.x % 32 == 0)
            one::aside().at = row.at;
        __syncwarp();
        if (!extent.all) { /* its classes, if it has any, one by one */
            copies_wait<0>();
            if (threadIdx.x % 32 == 0) {
                one::aside().heavy = 0;
                one::aside().listed = 0;
                *mine = part{{0, 0, 0, 0}, {0, 0}, {-CUDART_INF_F, -CUDART_INF_F}};
            }
            __syncwarp();
            one::close_rest(args, row.row.index, false, mine);
        } else {
            one::sum_from(source{first_place(), row.shift_p, row.shift_q, half()}, args,
                          row.row.index, extent, mine);
        }
        return resident::merge_parts(
            [](const part *parts) {
                part all = logits_stats::fast_merge_alike(parts, row_at(kept_rows::all().turn).at,
                                                          base::shared().t.scale.high);
                if (BODY::EXTRA == logits_stats::ROUGH)
                    logits_stats::spoil_if_above(all);
                return all;
            },
            [](const part *parts, uint32_t count) {
                return logits_stats::fast_merge<BODY::EXTRA>(parts, count);
            });
    }
    /* The whole group: a row whose mean is to be better than its sums left it. */
    static __device__ __noinline__ void recentre(const kept_row &row) {
        const typename BODY::template pairs<true> pairs(base::shared().rows[0].numbers,
                                                        base::shared().t, &written::pairs_aside());
        const source from = {first_place(), row.shift_p, row.shift_q, 0};
        const uint32_t count = row.bytes / (uint32_t)sizeof(T);
        const uint32_t end = resident::far_slice::steps_of((count + V - 1) / V);
        double total[4] = {0, 0, 0, 0};
        for (uint32_t step = 0; step < end; step++) {
            const uint32_t vector = step * resident::GROUP_THREADS + resident::group_thread();
            uint4 p, q;
            from.vectors(step, p, q);
            written::add_distances(pairs, p, q, count > vector * V ? count - vector * V : 0, total);
        }
        written::put_right(total);
    }
    static __device__ __forceinline__ void settle(const kld_cuda_args &args, const part &sums) {
        if (resident::group_thread() < 32) {
            kept_row &row = row_at(all().turn);
            written::tell(args, row.row, row.factor, sums);
            if (threadIdx.x == 0)
                all().turn++;
        }
        if (threadIdx.x / 32 == LOOKER)
            look();
        if (threadIdx.x / 32 == FINDER)
            find(args);
        resident::group_sync();
        kept_row &row = row_at(all().turn - 1);
        if (base::shared().rows[0].way == AGAIN)
            written::settle_again(args, row.row, row.factor);
        if constexpr (BODY::CENTRES && !BODY::LOOKS_AGAIN)
            if (written::is_far())
                recentre(row);
    }

    /* Steps of any kind. JOIN: as the row lies, and not as the tensors do. */
    template <bool JOIN, bool CAREFUL>
    static __device__ __forceinline__ void
    any(const row_writer<typename BODY::template pairs<CAREFUL>> &writer, const source &from,
        uint32_t count, bool whole, uint32_t step, uint32_t end, const copies &coming) {
#pragma unroll 1
        for (; step < end; step++) {
            uint32_t vector = step * resident::GROUP_THREADS + resident::group_thread();
            uint32_t left = count > vector * V ? count - vector * V : 0;
            uint4 p, q;
            if (JOIN) {
                from.vectors(step, p, q);
            } else {
                p = load_shared(from.at + step * source::PLACE);
                q = load_shared(from.at + step * source::PLACE + source::TENSOR);
            }
            uint4 y = writer.of(p, q);
            resident::put_raw<T>(writer.to, whole, count, writer.head, vector,
                                 resident::some_of{left}, y);
            if (JOIN)
                __syncwarp();
            coming.bring(from.at, step);
        }
    }
    /* All lanes have all of a vector, and it is written as it lies. Returns whether it came across
     * the end of the first part of what it asked for. */
    template <bool CAREFUL>
    static __device__ __forceinline__ bool
    full_steps(const row_writer<typename BODY::template pairs<CAREFUL>> &writer, uint32_t at,
               uint32_t step, uint32_t end, const copies &coming) {
        const uint32_t first = step * copies::STEP;
        char *out = writer.to + 16 * thread_again() + first;
        const char *p = coming.p + first, *q = coming.q + first;
        const bool more = coming.left_p > (int32_t)first; /* a row like this one */
        auto one_step = [&](uint32_t i) {
            const uint32_t place = at + (step + i) * source::PLACE;
            uint4 raw_p = load_shared(place), raw_q = load_shared(place + source::TENSOR);
            __stcs((uint4 *)(out + i * copies::STEP), writer.of(raw_p, raw_q));
            if (UNEVEN) {
                coming.bring(at, step + i);
            } else if (more) {
                copy_16(place, p + i * copies::STEP);
                copy_16(place + source::TENSOR, q + i * copies::STEP);
            }
        };
        constexpr uint32_t MANY = 2;
        const uint32_t part = half() * pass::UNIT;
        bool halved = false;
#pragma unroll 1
        for (; step + MANY <= end; step += MANY) {
            if (!halved && step >= part) {
                copies_end();
                halved = true;
            }
#pragma unroll
            for (uint32_t i = 0; i < MANY; i++)
                one_step(i);
            out += MANY * copies::STEP;
            p += MANY * copies::STEP;
            q += MANY * copies::STEP;
        }
        if (step < end)
            one_step(0);
        return halved;
    }
    template <bool CAREFUL>
    static __device__ __forceinline__ void write(const kept_row &row, const kept_row &next) {
        char *to = row.to;
        const copies coming = copies::of(next);
        uint32_t head = 0, count = row.bytes / (uint32_t)sizeof(T);
        const uint32_t shift = resident::shift_of(to);
        bool alike = row.shift_p == shift && row.shift_q == shift &&
                     (!UNEVEN || (count + shift / (uint32_t)sizeof(T) + V - 1) / V <=
                                     resident::here().place.steps * resident::GROUP_THREADS);
        if (alike) {
            head = shift / (uint32_t)sizeof(T);
            to -= shift;
            count += head;
        }
        source from = {first_place(), row.shift_p, row.shift_q, 0};
        const row_writer<typename BODY::template pairs<CAREFUL>> writer(written::settled(), to,
                                                                        head);
        const uint32_t end = resident::far_slice::steps_of((count + V - 1) / V);
        bool halved = false;
        if (!alike) {
            any<true>(writer, from, count, aligned16<T>(to), 0, end, coming);
        } else {
            const uint32_t full = resident::far_slice::full_steps_of(count / V);
            uint32_t step = 0;
            if (head && resident::group_thread() < 32 && full) {
                any<false>(writer, from, count, true, 0, 1, coming);
                step = 1;
            }
            halved = full_steps(writer, from.at, step, full, coming);
            any<false>(writer, from, count, true, full, end, coming);
        }
        coming.bring_from(from.at, end);
        if (!halved)
            copies_end();
    }

    /* Another look at the row, which sums what its numbers are still to be made of. last: and
     * nobody will look at it again, so that the next one's vectors come in. */
    static __device__ __forceinline__ void
    look_twice(const kld_cuda_args &args, const kept_row &row, const kept_row &next, bool last) {
        auto &settled = base::shared().rows[0];
        const copies coming = copies::of(next);
        const source from = {first_place(), row.shift_p, row.shift_q, 0};
        const uint32_t count = row.bytes / (uint32_t)sizeof(T);
        const uint32_t end = resident::far_slice::steps_of((count + V - 1) / V);
        const bool careful = settled.numbers.is_careful;
        const uint32_t full = careful ? 0 : resident::far_slice::full_steps_of(count / V);
        logits_stats::reference at;
        at.limit_p = settled.numbers.heavy_p;
        at.limit_q = settled.numbers.heavy_q;
        const logits_stats::top_of<T> top(at);
        typename BODY::look look(settled.numbers, base::shared().t);
        double total[4] = {0, 0, 0, 0};
        uint32_t left_out = 0; /* steps, a bit each: a call would spill the loop's registers */
        auto bring = [&](uint32_t step) {
            if (UNEVEN)
                __syncwarp();
            coming.bring(from.at, step);
        };
#pragma unroll 1
        for (uint32_t step = 0; step < full; step++) {
            uint4 p, q;
            from.vectors(step, p, q);
            if (__any_sync(KLD_FULL_WARP, top.is_above(p, q, at)) || !look.add(p, q))
                left_out |= 1u << step;
            else if (last)
                bring(step);
            if (step % 2)
                look.flush(total);
        }
        look.flush(total);
        left_out |= (1u << end) - (1u << min(full, end));
#pragma unroll 1
        for (; left_out; left_out &= left_out - 1) {
            const uint32_t step = (uint32_t)__ffs((int)left_out) - 1;
            const uint32_t vector = step * resident::GROUP_THREADS + resident::group_thread();
            const uint32_t left = count > vector * V ? min(count - vector * V, V) : 0;
            uint4 p, q;
            from.vectors(step, p, q);
            auto more = BODY::by_itself(args, p, q, left, settled.numbers, base::shared().t);
            total[0] += more.sum[0];
            total[1] += more.sum[1];
            if (last)
                bring(step);
        }
        if (last) {
            coming.bring_from(from.at, end);
            copies_end();
        }
        part all = resident::merge_row(total, 0, 0, logits_stats::plain_merge);
        if (threadIdx.x == 0) {
            settled.value =
                settled.numbers.center(args, all.sum, row.row.all.top[0], base::shared().t);
            if (!last)
                written::pairs_aside() = typename BODY::aside(settled.numbers, base::shared().t);
        }
        resident::group_sync();
    }
    /* The same carefully, of the row as it lies in device memory. */
    static __device__ __noinline__ void look_far(const kld_cuda_args &args,
                                                 const onepass_row &row) {
        auto &settled = base::shared().rows[0];
        double total[4] = {0, 0, 0, 0};
        resident::far_slice::of<T>(args, row.index)
            .template pass<T>([&](uint32_t, auto left, const uint4 &p, const uint4 &q) {
                auto more = BODY::by_itself(args, p, q, (uint32_t)left.left, settled.numbers,
                                            base::shared().t);
                total[0] += more.sum[0];
                total[1] += more.sum[1];
            });
        part all = resident::merge_row(total, 0, 0, logits_stats::plain_merge);
        if (threadIdx.x == 0)
            settled.value = settled.numbers.center(args, all.sum, row.all.top[0], base::shared().t);
        resident::group_sync();
    }
    static __device__ __forceinline__ void skip(const kept_row &next) {
        copies::of(next).bring_from(first_place(), 0);
        copies_end();
    }

    /* The whole group: a row of logits_flat.cuh. */
    static __device__ __noinline__ void write_flat(const kld_cuda_args &args, const kept_row &row) {
        const source from = {first_place(), row.shift_p, row.shift_q, 0};
        const uint32_t count = row.bytes / (uint32_t)sizeof(T);
        const uint32_t end = resident::far_slice::steps_of((count + V - 1) / V);
        BODY::flat::write(base::shared().rows[0].numbers.careful, args.rule, base::shared().t,
                          row.to, count, [&](auto function) {
                              for (uint32_t step = 0; step < end; step++) {
                                  const uint32_t first = step * resident::GROUP_THREADS;
                                  const uint32_t at = first + resident::group_thread();
                                  uint4 p, q;
                                  from.vectors(step, p, q);
                                  resident::some_of left = {count > at * V ? count - at * V : 0};
                                  function(at, left, p, q);
                              }
                          });
        __syncwarp(); /* the next row comes in its place, where a vector may lie in two */
    }
    static __device__ __forceinline__ bool is_flat() {
        if constexpr (BODY::FLATTENS)
            return base::shared().rows[0].numbers.is_flat;
        return false;
    }

    /* The row at hand; then the next one is. */
    static __device__ __forceinline__ void take(const kld_cuda_args &args) {
        settle(args, sums(args, row_at(all().turn)));
        const auto &settled = base::shared().rows[0];
        const kept_row &row = row_at(all().turn - 1), &next = row_at(all().turn);
        const bool writes = written::gradient(args).at && base::shared().divides;
        if constexpr (BODY::LOOKS_AGAIN) {
            bool again = settled.way != ANY;
            while (again) {
                const bool careful = settled.numbers.is_careful;
                look_twice(args, row, next, !writes);
                again = settled.numbers.is_careful != careful;
                if (again && !writes) { /* what was here is gone */
                    look_far(args, row.row);
                    again = false;
                }
            }
        }
        if (settled.way == ANY) {
            skip(next);
        } else if (!writes) {
            resident::clear<T>(row.to, resident::here().place.count, resident::group_thread(),
                               resident::GROUP_THREADS);
            if (!BODY::LOOKS_AGAIN)
                skip(next);
        } else if (is_flat()) {
            if constexpr (BODY::FLATTENS)
                write_flat(args, row);
            skip(next);
        } else if (written::is_careful()) {
            write<true>(row, next);
        } else {
            write<false>(row, next);
        }
        copies_end();
        add(args, row);
    }
    /* The row's value, where it belongs. */
    static __device__ __forceinline__ void add(const kld_cuda_args &args, const kept_row &row) {
        if (threadIdx.x == 0 && resident::here().place.rank == 0) {
            double value = base::shared().rows[0].value * row.weight;
            row_store(args, row.row.index, value);
            all().total = row.row.first ? value : all().total + value;
            args.scratch->partial[args.first_group + row.row.group] = all().total;
        }
    }
    static __device__ __forceinline__ void compute(const kld_cuda_args &args) {
        compute_by<kept_rows>(args);
    }
    /* ROWS::take() each row. */
    template <class ROWS>
    static __device__ __forceinline__ void compute_by(const kld_cuda_args &args) {
        state &state = all();
        if (threadIdx.x / 32 == FINDER) {
            if (threadIdx.x % 32 == 0) {
                state.turn = state.looked = state.found = 0;
                state.walk.start(resident::here().place);
                state.last_group = UINT64_MAX;
            }
            __syncwarp();
            find(args);
            copies_end();
            copies_wait<0>();
            look();
            find(args);
        }
        resident::group_sync();
        copies::of(state.rows[0]).bring_from(first_place(), 0);
        copies_end();
        copies_end();
#pragma unroll 1
        while (row_at(state.turn).is)
            ROWS::take(args);
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
