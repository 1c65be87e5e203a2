/* test_layout.c - how the rows of a job are cut for the kernels that read them once: a warp or a
 * block must not be given more than its bits can tell apart. A build without CUDA has none of it.
 */
#include "kernels/backend.h"
#include "tests/unit/unit.h"

#ifdef KLD_WITH_CUDA
#include "kernels/cuda/launch.h"
#include "kernels/cuda/resident_team.h"

static uint64_t part_of(uint64_t classes, uint32_t dtype, uint32_t *ret_team) {
    struct kld_cuda_args args = {.rows = 1000, .classes = classes};
    args.p.dtype = args.q.dtype = dtype;
    args.p.form = args.q.form = KLD_FORM_LOGITS;
    args.rule = (struct kld_rule){.kind = KLD_RULE_KL, .of_p = 1};
    kld_cuda_resident_layout(&args, 227 * 1024);
    *ret_team = args.resident_team;
    return args.cluster ? args.slice * kld_dtype_bytes(dtype) : 0;
}

START_TEST(a_part_of_a_row_read_once_has_a_bit_for_each_unit) {
    uint32_t blocks = 0;
    for (int type = 0; type < 3; type++) {
        static const uint32_t dtypes[] = {KLD_DTYPE_FP32, KLD_DTYPE_FP16, KLD_DTYPE_BF16};
        for (uint64_t classes = 1024; classes <= 1 << 19; classes += classes % 4096 < 2 ? 1 : 61) {
            uint32_t team;
            uint64_t bytes = part_of(classes, dtypes[type], &team);
            if (!bytes || team < KLD_CUDA_ONEPASS_WARP)
                continue;
            ck_assert_msg(bytes <= (team == KLD_CUDA_ONEPASS_BLOCK ? KLD_CUDA_ONEPASS_BLOCK_BYTES
                                                                   : KLD_CUDA_ONEPASS_WARP_BYTES),
                          "%d bytes of %d classes", (int)bytes, (int)classes);
            blocks += team == KLD_CUDA_ONEPASS_BLOCK;
        }
        for (uint64_t power = 1 << 13; power <= 1 << 19; power *= 2)
            for (uint64_t classes = power - 2; classes <= power + 2; classes++) {
                uint32_t team;
                uint64_t bytes = part_of(classes, dtypes[type], &team);
                ck_assert(team != KLD_CUDA_ONEPASS_BLOCK || bytes <= KLD_CUDA_ONEPASS_BLOCK_BYTES);
            }
    }
    ck_assert_uint_gt(blocks, 1000);
}
END_TEST

/* Rows that are kept until their gradient is written: no block has more than it has room for, none
 * has nothing, and launches of unlike clusters have numbers of their own. So have those of unlike
 * kernels: both gradients that follow from a row's sums, and js. */
START_TEST(a_row_that_is_kept_fits_its_blocks) {
    uint32_t kept[3] = {0}, sizes[3] = {0};
    uint16_t table[KLD_CUDA_ACTIVE_CLUSTERS];
    uint32_t key_of[KLD_CUDA_ACTIVE_CLUSTERS] = {0};
    for (uint64_t classes = 4096; classes <= 300000; classes += classes % 4096 < 2 ? 1 : 61)
        for (uint32_t side = 0; side < 3; side++) {
            struct kld_cuda_args args = {.rows = 1000, .classes = classes};
            args.p.dtype = args.q.dtype = KLD_DTYPE_BF16;
            (side == 1 ? &args.grad_p : &args.grad_q)->dtype = KLD_DTYPE_BF16;
            args.p.form = args.q.form = KLD_FORM_LOGITS;
            args.rule = side == 2 ? (struct kld_rule){KLD_RULE_MIXTURE, 0.3, 0.7, 0.3, 0.7}
                                  : (struct kld_rule){.kind = KLD_RULE_KL, .of_p = 1};
            args.active_clusters = table;
            kld_cuda_resident_layout(&args, 227 * 1024);
            if (args.resident_team != KLD_CUDA_KEPT)
                continue;
            kept[side]++;
            ck_assert_uint_ge(args.cluster, 1);
            ck_assert_uint_le(args.cluster, 16);
            ck_assert_uint_le(args.slice * 2, KLD_CUDA_KEPT_SLICE_BYTES);
            ck_assert_uint_lt((args.cluster - 1) * args.slice, classes);
            ck_assert_uint_ge(args.cluster * args.slice, classes);
            long number = args.active_clusters - table;
            ck_assert(number >= 0 && number < KLD_CUDA_ACTIVE_CLUSTERS - KLD_CUDA_CLUSTER_SIZES);
            uint32_t key = 3 * args.cluster + side;
            sizes[side] += key_of[number] == 0;
            ck_assert(key_of[number] == 0 || key_of[number] == key);
            key_of[number] = key;
        }
    ck_assert_uint_gt(kept[0], 1000);
    for (uint32_t side = 0; side < 3; side++) {
        ck_assert_uint_eq(kept[side], kept[0]);
        ck_assert_uint_eq(sizes[side], 6);
    }
}
END_TEST

UNIT_MAIN("kernels/cuda/layout", a_part_of_a_row_read_once_has_a_bit_for_each_unit,
          a_row_that_is_kept_fits_its_blocks)

#else

#include "tests/unit/kernels/cuda/without.h"

UNIT_MAIN("kernels/cuda/layout", built_without_cuda)

#endif
