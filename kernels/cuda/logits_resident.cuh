/* logits_resident.cuh - rows of logits, both tensors of one dtype, held in shared memory: the way
 * of a row from its statistics to loss and gradients. What is made of the statistics is a BODY:
 *
 *     EXTRA                   the fourth sum of the statistics
 *     numbers                 what its passes need to know of a row, made once by one warp
 *     value(args, stats)      the row's value, where the statistics give it
 *     passes<CAREFUL>(...)    the passes over the row; returns its value
 *
 * logits_difference.cuh and logits_general.cuh are the two that all teams know. Where a row is
 * looked at again by logits_reread.cuh or logits_kept.cuh it is, in place of passes(),
 *
 *     pairs<CAREFUL>          the gradient of a vector, of numbers and of
 *     aside                   what is seldom looked at
 *     WRITES_CAREFULLY        rows that were summed carefully take pairs<true>
 *
 * logits_centred.cuh and logits_shannon.cuh are made for these alone. */
#ifndef KLD_KERNELS_CUDA_LOGITS_RESIDENT_CUH
#define KLD_KERNELS_CUDA_LOGITS_RESIDENT_CUH

#include "kernels/cuda/any.cuh"
#include "kernels/cuda/logits_careful.cuh"
#include "kernels/cuda/logits_fast.cuh"
#include "kernels/cuda/resident_run.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

using logits_stats::row_stats;
using resident::part;

/* What a BODY may say otherwise: its gradient is what is left of a mean, which no class that has
 * much of the mass is to spoil; it is p's and not q's; a second look at the row sums what its
 * numbers are still to be made of; mixtures of 16 bits, of which some rows take logits_flat.cuh
 * (all but the first: logits_kept.cuh). */
struct usual_body {
    static constexpr bool CENTRES = false, OF_P = false, LOOKS_AGAIN = false, FLATTENS = false;
};

/* What is known of a settled row. The settling warp writes it; the first computing warp where the
 * fast statistics did not do. */
enum way { FAST, AGAIN, CAREFUL, ANY };
template <class BODY> struct row_shared {
    typename BODY::numbers numbers;
    double value, weight, factor; /* the loss is weight * value; of the gradient */
    double shift;                 /* by the fast statistics; NaN: they could not say */
    enum way way;
    bool missed;             /* the scout did not see the heaviest class */
    float top[2], powers[2]; /* the largest of p and of q, and what all of it adds up to */
};

/* A row in the hands of a body. */
template <class BODY> struct row_at_hand {
    resident::slice slice;
    temperature t;
    row_shared<BODY> *shared;
    const kld_rule *rule;
    char *grad_p, *grad_q; /* NULL: not to be written */
    bool whole_p, whole_q;
};

/* What no fast way serves: the first block of the cluster takes the whole row. */
static __device__ __noinline__ double row_by_any(const kld_cuda_args &args, uint64_t index) {
    __shared__ team_shared shared[resident::GROUPS];
    team team;
    team.size = resident::GROUP_THREADS;
    team.lane = resident::group_thread();
    team.mask = KLD_FULL_WARP;
    team.shared = &shared[resident::group_number()];
    team.name = 1 + resident::group_number();
    double value = any_body::value(args, row_open(args, index), team);
    row_zero(args, index, false, team); /* where weights sum to 0 */
    return value;
}

template <class BODY> struct flat_rows; /* logits_flat.cuh */

template <class BODY> struct rows {
    typedef typename BODY::type T;
    typedef row_shared<BODY> row_type;

    /* Where a warp is. In shared memory, as nothing is to stay in registers from row to row. */
    struct walk {
        uint8_t slot[2], turn[2]; /* of the next row to read, and to write; a turn but for 256 */
        uint8_t between;          /* rows read and not yet written */
        bool over;                /* all are read */
        uint32_t row;             /* the next to write, of all that the block takes */

        __device__ __forceinline__ void advance(int which, uint32_t slots) {
            if (threadIdx.x % 32 == 0) {
                resident::cursor at = {slot[which], turn[which]};
                at.advance(slots, resident::GROUPS);
                slot[which] = (uint8_t)at.slot;
                turn[which] = (uint8_t)at.turn;
                between += which ? -1 : 1;
                row += which ? resident::GROUPS : 0;
            }
            __syncwarp();
        }
    };

    /* Beside block_shared, and for the same reason here. */
    struct shared_type {
        row_type rows[resident::RING_MAX];
        temperature t;
        float span;
        uint32_t classes;
        bool divides;
        bool streams;  /* the statistics are all that is wanted: rows are let go as they are read */
        bool finished; /* all rows are written */
        bool last[resident::GROUPS]; /* the group was the last to be through */
        uint32_t through;            /* groups that are */
        walk walks[resident::WARPS];
    };
    static __device__ __forceinline__ shared_type &shared() {
        __shared__ shared_type all;
        return all;
    }
    /* One thread, before all else. */
    static __device__ __forceinline__ void prepare(const kld_cuda_args &args) {
        shared_type &all = shared();
        all.t = temperature(args.inverse_temperature);
        all.span = (float)(300.0 / (args.inverse_temperature * LOG2_E));
        all.classes = (uint32_t)min(args.classes, (uint64_t)UINT32_MAX);
        all.streams = BODY::KNOWN && !args.grad_p.at && !args.grad_q.at;
        all.finished = false;
        all.through = 0;
        for (uint32_t warp = 0; warp < resident::WARPS; warp++) {
            uint32_t group = warp / resident::GROUP_WARPS;
            resident::cursor first = {0, 0};
            first.advance(args.slots, group);
            uint8_t slot = (uint8_t)first.slot, turn = (uint8_t)first.turn;
            all.walks[warp] = walk{{slot, slot}, {turn, turn}, 0, false, group};
        }
        all.divides = args.divisor != 0 || args.scratch->divisor != 0;
    }

    static __device__ __forceinline__ const resident::row_info &info_of(uint32_t slot,
                                                                        uint32_t turn) {
        return resident::here().info[resident::ring_of(slot, turn)];
    }

    static __device__ __forceinline__ row_type &row_of(uint32_t slot, uint32_t turn) {
        return shared().rows[resident::ring_of(slot, turn)];
    }

    static __device__ __forceinline__ resident::slice slice_of(uint32_t slot, uint32_t turn) {
        resident::block_shared &block = resident::here();
        resident::slice slice;
        const resident::row_info &info = info_of(slot, turn);
        slice.head = info.head / (uint32_t)sizeof(T);
        slice.shift_p = info.shift_p;
        slice.shift_q = info.shift_q;
        slice.p = shared_at(resident::tensor_of(slot, 0)) + 16 * resident::group_thread();
        slice.q = shared_at(resident::tensor_of(slot, 1)) + 16 * resident::group_thread();
        slice.count = block.place.count;
        slice.chunks = block.place.chunks;
        slice.first_chunk = slot * slice.chunks;
        slice.turn = turn;
        return slice;
    }

    static __device__ __forceinline__ void tell(const kld_cuda_args &args, const row_stats &stats,
                                                double factor, enum way way,
                                                row_shared<BODY> *shared) {
        if (threadIdx.x % 32 != 0)
            return;
        shared->numbers = typename BODY::numbers(args, stats, factor);
        shared->value = BODY::value(args, stats);
        shared->way = way;
    }

    /* What to count from, of a row whose first chunk has come. A whole warp. */
    static __device__ __forceinline__ logits_stats::reference look(uint32_t slot, uint32_t turn) {
        uint4 raw_p = {}, raw_q = {};
        uint32_t has = slice_of(slot, turn).template sample<T>(raw_p, raw_q);
        logits_stats::pair_of<T> z(raw_p, raw_q);
        return logits_stats::reference::of<T>(z, has, shared().t, shared().span, shared().classes);
    }
    static __device__ __forceinline__ void tell(const logits_stats::reference &from,
                                                resident::row_info &info) {
        if (threadIdx.x % 32 != 0)
            return;
        info.reference[0] = from.c_p;
        info.reference[1] = from.c_q;
        info.reference[2] = from.limit_p;
        info.reference[3] = from.limit_q;
    }

    /* The scout. */
    static __device__ __forceinline__ void scout() {
        resident::block_shared &block = resident::here();
        uint32_t groups = resident::GROUPS;
        for (resident::cursor at = {0, 0}; groups > 0; at.advance(block.place.slots)) {
            barrier_wait(resident::full_of(at.slot * block.place.chunks, at.turn),
                         resident::full_parity(at.turn));
            uint32_t ring = resident::ring_of(at.slot, at.turn);
            resident::row_info &info = block.info[ring];
            if (info.last) {
                groups--;
            } else {
                tell(look(at.slot, at.turn), info);
            }
            __syncwarp();
            if (arrives_for_warp())
                barrier_arrive(&block.ready[ring]);
        }
    }

    static __device__ __forceinline__ logits_stats::fast_bounds bounds(const kld_cuda_args &args) {
        const double least = BODY::EXTRA >= logits_stats::SQUARES ? logits_stats::MIXTURE_MIN
                                                                  : logits_stats::FAST_MIN<T>;
        logits_stats::fast_bounds r = {least, logits_stats::FAST_SUM_MAX<T>,
                                       BODY::CENTRES ? CUDART_INF : logits_stats::HEAVY_MIN<T>, 1.0,
                                       logits_stats::APART_MOST};
        if (sizeof(T) == 2) {
            r.stretch = args.stretch; /* FP32 uses both parts of the scale */
            r.shift = (double)logits_stats::APART_MIN * args.inverse_temperature;
        }
        return r;
    }
    static __device__ __forceinline__ row_stats fast_row(const kld_cuda_args &args,
                                                         const part &all) {
        return logits_stats::fast_row<BODY::EXTRA>(all, bounds(args));
    }

    /* One warp: from what all warps of a group, and of the other blocks, have found in a row to
     * what is needed of it. */
    static __device__ __forceinline__ void settle_row(const kld_cuda_args &args, uint32_t slot,
                                                      uint32_t turn) {
        resident::block_shared &block = resident::here();
        uint32_t ring = resident::ring_of(slot, turn);
        row_type &settled = shared().rows[ring];
        const resident::row_info &info = block.info[ring];
        row row = row_open(args, info.index);
        part all;
        resident::load_sums(block.sums[ring], all.sum);
        unsigned lane = threadIdx.x % 32, warp = min(lane, resident::GROUP_WARPS - 1);
        all.top[0] = logits_stats::warp_max(block.tops[ring][warp][0]);
        all.top[1] = logits_stats::warp_max(block.tops[ring][warp][1]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            all.mark[i] = logits_stats::reference::mark(
                info.reference[i], all.top[i], info.reference[2 + i], shared().t.scale.high);
        }
        if (resident::CLUSTER_MAX > 1 && block.place.cluster > 1) {
            resident::exchange(all, block.blocks[ring], &block.arrived[ring],
                               resident::ring_parity(turn));
            all = logits_stats::fast_merge<BODY::EXTRA>(block.blocks[ring], block.place.cluster);
        }
        row_stats stats = fast_row(args, all);
        double factor = row.gradient * args.inverse_temperature;
        tell(args, stats, factor, stats.good ? FAST : AGAIN, &settled);
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                settled.top[i] = all.top[i];
                settled.powers[i] = stats.powers[i];
            }
            settled.missed = stats.missed;
            settled.shift = stats.shift;
            settled.weight = row.weight;
            settled.factor = factor;
        }
        if (arrives_for_warp())
            barrier_arrive(&block.settled[ring]);
    }

    /* A settling warp: every SETTLERS-th row. */
    static __device__ void settle(const kld_cuda_args &args) {
        resident::block_shared &block = resident::here();
        static_assert(resident::SETTLERS <= 2, "a place in the ring is one settler's");
        resident::cursor at = {0, 0};
        at.advance(block.place.slots, threadIdx.x / 32 - resident::WARPS - 2);
        for (;; at.advance(block.place.slots, resident::SETTLERS)) {
            barrier_wait(&block.found[resident::ring_of(at.slot, at.turn)],
                         resident::ring_parity(at.turn));
            if (shared().finished)
                break;
            settle_row(args, at.slot, at.turn);
        }
    }

    /* SUM(slice) of this warp's part of a row, wherever that is now. */
    template <class SUM>
    static __device__ __forceinline__ part part_again(const kld_cuda_args &args, uint32_t slot,
                                                      uint32_t turn, SUM sum) {
        if constexpr (resident::FAR)
            return sum(resident::far_slice::of<T>(args, info_of(slot, turn).index));
        else
            return shared().streams
                       ? sum(resident::far_slice::of<T>(args, info_of(slot, turn).index))
                       : sum(slice_of(slot, turn));
    }

    /* A row of which the scout knew too little: once more, from what it holds. To all. */
    static __device__ __noinline__ void look_again(const kld_cuda_args &args, uint32_t slot,
                                                   uint32_t turn) {
        row_type *row = &row_of(slot, turn);
        const temperature &t = shared().t;
        const float top[2] = {row->top[0], row->top[1]};
        auto from = logits_stats::reference::of_tops(top[0], top[1], t, shared().span);
        from.limit_p = logits_stats::reference::limit_at<T>(row->powers[0], t.scale.high);
        from.limit_q = logits_stats::reference::limit_at<T>(row->powers[1], t.scale.high);
        part mine = part_again(args, slot, turn, [&](auto slice) {
            return logits_stats::fast_again<T, BODY::EXTRA>(slice, t, from);
        });
        part all = resident::merge_row(
            mine.sum, mine.mark[0], mine.mark[1],
            [](const part *parts, uint32_t count) {
                return logits_stats::fast_merge<BODY::EXTRA>(parts, count);
            },
            top[0], top[1]);
        if (resident::group_thread() < 32) {
            row_stats stats = fast_row(args, all);
            tell(args, stats, row->factor, stats.good ? FAST : AGAIN, row);
            if (threadIdx.x % 32 == 0)
                row->shift = stats.shift;
        }
        resident::group_sync();
    }

    /* The same where the fast statistics do not tell how far apart the sides are. */
    static __device__ __noinline__ void weigh(const kld_cuda_args &args, uint32_t slot,
                                              uint32_t turn) {
        row_type *row = &row_of(slot, turn);
        const temperature &t = shared().t;
        auto from = logits_stats::reference::of_tops(row->top[0], row->top[1], t, shared().span);
        part mine = part_again(args, slot, turn,
                               [&](auto slice) { return logits_stats::masses<T>(slice, t, from); });
        part all = resident::merge_row(mine.sum, 0, 0, logits_stats::plain_merge);
        if (resident::group_thread() < 32)
            row->shift =
                ((double)from.c_p - (double)from.c_q) * LN_2 + log(all.sum[0]) - log(all.sum[1]);
        resident::group_sync();
    }

    /* A row that is too close for the fast statistics, or not finite. */
    static __device__ __noinline__ void again(const kld_cuda_args &args, uint32_t slot,
                                              uint32_t turn) {
        row_type *row = &row_of(slot, turn);
        resident::group_sync(); /* all have seen that it is */
        if (row->missed) {
            look_again(args, slot, turn);
            if (row->way == FAST)
                return;
            resident::group_sync(); /* likewise */
        }
        bool known = isfinite(row->shift);
        resident::group_sync();
        if (!known)
            weigh(args, slot, turn);
        auto at = logits_stats::careful_reference::of<T>(
            row->top[1], row->shift, args.inverse_temperature, shared().t, shared().span);
        part mine = part_again(args, slot, turn, [&](auto slice) {
            return logits_stats::careful<T, BODY::EXTRA>(slice, shared().t, at);
        });
        part all = resident::merge_row(mine.sum, 0, 0, logits_stats::plain_merge);
        if (resident::group_thread() < 32) {
            row_stats stats = logits_stats::careful_row<BODY::EXTRA>(
                all, at, logits_stats::CAREFUL_ENTROPY_MIN<T>);
            tell(args, stats, row->factor, stats.good ? CAREFUL : ANY, row);
        }
        resident::group_sync();
    }

    /* From a settled row to its gradients and, by the first thread, its value. */
    static __device__ __forceinline__ double finish(const kld_cuda_args &args, uint32_t slot,
                                                    uint32_t turn) {
        if (row_of(slot, turn).way == AGAIN)
            again(args, slot, turn);
        row_type *row = &row_of(slot, turn);
        if (shared().streams) {
            if (row->way != ANY)
                return row->value;
            return resident::here().place.rank == 0 ? row_by_any(args, info_of(slot, turn).index)
                                                    : 0.0;
        }
        const resident::row_info &info = info_of(slot, turn);
        bool divides = shared().divides;
        row_at_hand<BODY> hand = {slice_of(slot, turn),
                                  shared().t,
                                  row,
                                  &args.rule,
                                  divides && info.grad_p ? info.grad_p - info.head : nullptr,
                                  divides && info.grad_q ? info.grad_q - info.head : nullptr,
                                  info.whole_p,
                                  info.whole_q};
        if (row->way != ANY) {
            double value = row->way == FAST ? BODY::template passes<false>(hand)
                                            : BODY::template passes<true>(hand);
            if constexpr (BODY::FLATTENS)
                if (flat_rows<BODY>::is_one(args, slot, turn))
                    flat_rows<BODY>::write(args, slot, turn);
            return value;
        }
        hand.slice.release();
        return resident::here().place.rank == 0 ? row_by_any(args, info_of(slot, turn).index) : 0.0;
    }

    /* First thread of each group in the cluster's first block: rows are added in order. */
    static __device__ __forceinline__ void add(const kld_cuda_args &args, uint32_t row,
                                               const resident::row_info &info, double value) {
        resident::block_shared &block = resident::here();
        static_assert(resident::GROUPS <= 2, "the phase before that of the last row is one's own");
        if (resident::GROUPS > 1)
            barrier_wait(&block.added, (row - 1) & 1);
        row_store(args, info.index, value);
        block.total = block.group == info.group ? block.total + value : value;
        block.group = info.group;
        args.scratch->partial[args.first_group + info.group] = block.total;
        if (resident::GROUPS > 1)
            barrier_arrive(&block.added);
    }

    /* Weights sum to 0, and gradients are 0; row_by_any() does that itself. */
    static __device__ __noinline__ void clear_row(const kld_cuda_args &args, uint64_t index) {
        const resident::place &at = resident::here().place;
        resident::clear<T>(resident::part_of<T>(args.grad_p, index, at), at.count,
                           resident::group_thread(), resident::GROUP_THREADS);
        resident::clear<T>(resident::part_of<T>(args.grad_q, index, at), at.count,
                           resident::group_thread(), resident::GROUP_THREADS);
    }

    static __device__ __forceinline__ void write_row(const kld_cuda_args &args, uint32_t slot,
                                                     uint32_t turn) {
        barrier_wait(&resident::here().settled[resident::ring_of(slot, turn)],
                     resident::ring_parity(turn));
        double value = finish(args, slot, turn);
        if (!shared().divides && row_of(slot, turn).way != ANY)
            clear_row(args, info_of(slot, turn).index);
        if (resident::group_thread() == 0 && resident::here().place.rank == 0)
            add(args, shared().walks[threadIdx.x / 32].row, info_of(slot, turn),
                row_of(slot, turn).weight * value);
    }

    static __device__ __forceinline__ void compute_alone(const kld_cuda_args &args) {
        resident::block_shared &block = resident::here();
        bool first_warp = threadIdx.x < 32;
        if (first_warp)
            resident::copy_one<T>(args);
        for (resident::cursor at = {0, 0};; at.advance(block.place.slots)) {
            uint32_t ring = resident::ring_of(at.slot, at.turn);
            resident::row_info &info = block.info[ring];
            barrier_wait(resident::full_of(at.slot * block.place.chunks, at.turn),
                         resident::full_parity(at.turn));
            if (info.last)
                break;
            if (first_warp)
                resident::copy_one<T>(args);
            logits_stats::reference from = look(at.slot, at.turn);
            if (first_warp)
                tell(from, info);
            logits_stats::fast<T, BODY::EXTRA>(slice_of(at.slot, at.turn), shared().t, from, ring,
                                               shared().streams);
            if (first_warp) {
                barrier_wait(&block.found[ring], resident::ring_parity(at.turn));
                settle_row(args, at.slot, at.turn);
            }
            write_row(args, at.slot, at.turn);
        }
    }

    /* False: there is none. */
    static __device__ __forceinline__ bool read_row(uint32_t slot, uint32_t turn) {
        barrier_wait(&resident::here().ready[resident::ring_of(slot, turn)],
                     resident::ring_parity(turn));
        const resident::row_info &info = info_of(slot, turn);
        if (info.last) {
            slice_of(slot, turn).release(0); /* with one slot the other group's end comes here */
            return false;
        }
        logits_stats::fast<T, BODY::EXTRA>(slice_of(slot, turn), shared().t,
                                           logits_stats::reference(info.reference, shared().span),
                                           resident::ring_of(slot, turn), shared().streams);
        return true;
    }

    /* The computing warps. */
    static __device__ __forceinline__ void compute(const kld_cuda_args &args) {
        resident::block_shared &block = resident::here();
        for (;;) {
            walk &at = shared().walks[threadIdx.x / 32];
            if (!at.over) {
                if (read_row(at.slot[0], at.turn[0]))
                    at.advance(0, block.place.slots);
                else if (threadIdx.x % 32 == 0)
                    at.over = true;
                __syncwarp();
            }
            if (at.between > (at.over ? 0 : block.place.lag)) {
                write_row(args, at.slot[1], at.turn[1]);
                __syncwarp();
                shared().walks[threadIdx.x / 32].advance(1, block.place.slots);
            } else if (at.over) {
                break;
            }
        }
        leave(block.place.slots << block.place.ring_power);
    }

    /* Whoever settles sees the last of its rows followed by this. */
    static __device__ __forceinline__ void leave(uint32_t ring) {
        uint32_t group = resident::group_number();
        resident::group_sync();
        if (resident::group_thread() == 0) {
            shared().last[group] = atomicAdd(&shared().through, 1u) + 1 == resident::GROUPS;
            if (shared().last[group])
                shared().finished = true;
        }
        resident::group_sync();
        if (shared().last[group] && arrives_for_warp())
            for (uint32_t i = 0; i < ring; i++)
                barrier_arrive(&resident::here().found[i]);
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
