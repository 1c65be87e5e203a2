/* logits_values.cuh - rows of logits of which only the value is wanted, each read once
 * (logits_onepass.cuh): a warp, or the blocks of a cluster, takes one after the other, and asks for
 * the next one's first vectors before it is done with the last. Warps of a block do not wait for
 * each other meanwhile: what each has found is kept, and many rows are judged at a time, one in
 * each lane, for a row's numbers take one thread as long as a warp. */
#ifndef KLD_KERNELS_CUDA_LOGITS_VALUES_CUH
#define KLD_KERNELS_CUDA_LOGITS_VALUES_CUH

#include <type_traits>

#include "kernels/cuda/logits_onepass.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

/* What rows<> is told of a value: see there. */
template <class T_, int EXTRA_> struct value_body : usual_body {
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

/* Rows in the order in which a block takes them, from before they are summed until they are judged:
 * what many of them need is found a row a lane, as it takes one lane as long as a warp. */
struct value_batch {
    /* Of blocks with rings of their own eight find room on a multiprocessor, with no more rows. */
    static constexpr uint32_t ROWS = resident::GROUP_WARPS == 1 ? 32 : 8;
    /* Of each row what each warp has found. A single warp's goes to the row itself. */
    static constexpr uint32_t PARTS = resident::GROUP_WARPS == 1 ? 0 : resident::GROUP_WARPS;

    onepass_row rows[ROWS];
    part parts[PARTS ? ROWS : 1][PARTS ? PARTS : 1];
    uint32_t count;
    uint32_t at[resident::WARPS]; /* the row that each warp is at: not in registers, nor in a stack,
                                     which other data drive out of the first-level cache */
    uint32_t bad;                 /* rows whose sums do not give their value, a bit each */
    double total;                 /* of the group's rows so far */
};

/* UNEVEN: rows may start anywhere. */
template <class BODY, bool UNEVEN> struct value_rows : onepass_rows<BODY> {
    typedef onepass_rows<BODY> one;
    typedef typename one::base base;
    typedef typename one::pass pass;
    typedef typename BODY::type T;
    /* Of one warp to a block there is no shared memory for so many rings. */
    typedef
        typename std::conditional<UNEVEN && (resident::GROUP_WARPS > 1),
                                  typename pass::source::from_ring,
                                  typename pass::source::template from_memory<UNEVEN>>::type source;

    static __device__ __forceinline__ value_batch &batch() {
        __shared__ value_batch all;
        return all;
    }
    static __device__ __forceinline__ part &part_of(uint32_t row) {
        return value_batch::PARTS ? batch().parts[row][threadIdx.x / 32] : batch().rows[row].all;
    }

    /* The block's rows from number `first` on, as many as a batch holds. The whole group. */
    static __device__ __forceinline__ void plan(const kld_cuda_args &args, uint32_t first) {
        if (resident::group_thread() < 32) {
            const resident::place &at = resident::here().place;
            const uint32_t lane = threadIdx.x;
            /* A block's rows, of 2 KiB at least, are fewer than 2^32. */
            const uint32_t number = first + lane, group_rows = (uint32_t)args.group_rows;
            const uint32_t turn = number / group_rows, of_group = number % group_rows;
            const uint64_t group = at.first_group + turn * at.groups_step;
            const uint64_t index = group * group_rows + of_group;
            bool is = lane < value_batch::ROWS && group < at.groups && index < args.rows;
            if (is) {
                onepass_row &row = batch().rows[lane];
                row.index = index;
                row.group = group;
                row.first = of_group == 0;
                row.masked = row_is_masked(args, index);
            }
            uint32_t all = __ballot_sync(KLD_FULL_WARP, is);
            if (lane == 0)
                batch().count = (uint32_t)__popc(all);
        }
        resident::group_sync();
    }

    /* From what was found in a row to its value, if its sums give it: one thread. */
    static __device__ __forceinline__ bool judge(const kld_cuda_args &args, onepass_row &row,
                                                 double &ret_value) {
        logits_stats::fast_side p(row.all.sum[0], row.all.mark[0]);
        logits_stats::fast_side q(row.all.sum[1], row.all.mark[1]);
        row_stats stats = logits_stats::fast_row<BODY::EXTRA>(row.all, p, q, base::bounds(args));
        return one::judge(args, row, stats, ret_value);
    }
    static __device__ __forceinline__ void weigh(const kld_cuda_args &args, onepass_row &row,
                                                 double value) {
        row.one = row.masked ? 0.0 : value * row_open(args, row.index).weight;
        if (resident::here().place.rank == 0)
            row_store(args, row.index, row.one);
    }
    /* A row's value by another look at it, to the group's first thread. The whole group. */
    static __device__ __noinline__ double again(const kld_cuda_args &args,
                                                const onepass_row &from) {
        auto *row = &base::shared().rows[0];
        uint64_t index = from.index;
        one::do_again(args, from, 0.0);
        double value = row->value;
        if (row->way == ANY)
            value = resident::here().place.rank == 0 ? row_by_any(args, index) : 0.0;
        resident::group_sync();
        return value;
    }
    /* The first warp, a row to each of `count` lanes: what all warps found, and all blocks. The
     * others come along. */
    static __device__ __forceinline__ void merge(uint32_t count) {
        uint32_t lane = threadIdx.x;
        bool mine = lane < count && !batch().rows[lane].masked;
        if (value_batch::PARTS && mine)
            batch().rows[lane].all = logits_stats::fast_merge_by_one<BODY::EXTRA>(
                resident::GROUP_WARPS, [&](uint32_t i) { return batch().parts[lane][i]; });
        const uint32_t cluster = resident::here().place.cluster;
        if (resident::CLUSTER_MAX == 1 || cluster == 1)
            return;
        __syncwarp();
        cluster_sync();
        part all = {};
        if (mine)
            all = logits_stats::fast_merge_by_one<BODY::EXTRA>(
                cluster, [&](uint32_t i) { return *cluster_at(&batch().rows[lane].all, i); });
        __syncwarp();
        cluster_sync(); /* all have read it */
        if (mine)
            batch().rows[lane].all = all;
    }
    /* All rows of the batch. The whole group. */
    static __device__ __noinline__ void settle(const kld_cuda_args &args) {
        value_batch &batch = value_rows::batch();
        const uint32_t count = batch.count, lane = resident::group_thread();
        resident::group_sync();
        merge(count);
        if (lane < 32) {
            bool mine = lane < count, good = true;
            double value = 0.0;
            if (mine && !batch.rows[lane].masked)
                good = judge(args, batch.rows[lane], value);
            if (mine && good)
                weigh(args, batch.rows[lane], value);
            uint32_t bad = __ballot_sync(KLD_FULL_WARP, !good);
            if (lane == 0)
                batch.bad = bad;
        }
        resident::group_sync();
        for (uint32_t bad = batch.bad; bad; bad &= bad - 1) {
            onepass_row &row = batch.rows[__ffs((int)bad) - 1];
            double value = again(args, row);
            if (lane == 0)
                weigh(args, row, value);
        }
        if (lane == 0 && resident::here().place.rank == 0) /* rows are added in order */
            for (uint32_t i = 0; i < count; i++) {
                const onepass_row &row = batch.rows[i];
                batch.total = row.first ? row.one : batch.total + row.one;
                args.scratch->partial[args.first_group + row.group] = batch.total;
            }
        __syncwarp(); /* before plan() */
    }

    /* The warp's part of a row of the batch. */
    static __device__ __forceinline__ void sum(const kld_cuda_args &args, const uint32_t &number) {
        const uint64_t &index = batch().rows[number].index;
        const auto slice = resident::far_slice::of<T>(args, index);
        const auto row = pass::extent_of(slice.count);
        if (!row.all) {
            one::sum_without_units(args, index, &part_of(number));
            return;
        }
        auto from = source::of(slice);
        typename pass::head head;
        pass::ask(from, row, head);
        typename pass::sums mine = one::run(from, row, head);
        __syncwarp();
        /* What is left of a row takes a while in which memory is to work. Single warps do that for
         * each other. */
        if (resident::GROUP_WARPS > 1 && number + 1 < batch().count &&
            !batch().rows[number + 1].masked)
            pass::fetch(resident::far_slice::of<T>(args, batch().rows[number + 1].index), row);
        one::template close<true>(args, index, mine, &part_of(number));
    }
    static __device__ __forceinline__ void compute(const kld_cuda_args &args) {
        for (uint32_t first = 0;; first += value_batch::ROWS) {
            plan(args, first);
            uint32_t &at = batch().at[resident::WARPS > 1 ? threadIdx.x / 32 : 0];
            if (threadIdx.x % 32 == 0)
                at = 0;
            __syncwarp();
            while (at < batch().count) {
                if (!batch().rows[at].masked)
                    sum(args, at);
                __syncwarp();
                if (threadIdx.x % 32 == 0)
                    at++;
                __syncwarp();
            }
            /* Behind settle() the first warp may have planned the next batch. */
            const bool is_last = batch().count < value_batch::ROWS;
            if (batch().count)
                settle(args);
            if (is_last)
                break;
        }
    }
};

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
