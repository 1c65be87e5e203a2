/* launch.h - what the host side hands to the kernels: one struct of plain numbers a launch, and the
 * functions that start them on a stream. C on the host side, CUDA C++ behind it.
 * Every function only enqueues; errors of the launch itself are returned. Device thread only,
 * except kld_cuda_launch_read/_read_write (measure_ceiling). */
#ifndef KLD_KERNELS_CUDA_LAUNCH_H
#define KLD_KERNELS_CUDA_LAUNCH_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/rule.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows are summed in groups, one group a block. A group's rows follow from the job's shape alone,
 * so that the order of a sum does not depend on how a job is cut into launches. */
#define KLD_CUDA_MASK_ROWS (512u << 10)   /* of one segment, where blocks share a masked row */
#define KLD_CUDA_GROUPS_MAX 32768u        /* of one segment: partial sums kept at a time */
#define KLD_CUDA_DIVISOR_ROWS (1u << 20)  /* rows of one launch of the sum of weights */
#define KLD_CUDA_DIVISOR_BLOCK_ROWS 1024u /* of one block of it */

/* Of device memory and of shared memory. What a warp copies to shared memory by 16 bytes a lane is
 * written a line of it for a line of device memory where they start alike, and else two for one:
 * what rows are copied to starts with a line. */
#define KLD_CUDA_LINE_BYTES 128

/* Of the kernels of short rows: most bytes of a tensor that a warp takes at a time. */
#define KLD_CUDA_SHORT_TILE_BYTES 2048
#define KLD_CUDA_WIDE_TILE_BYTES 4096 /* of those that work in FP64 */

/* Kernels that hold rows in shared memory, read them once, read them again or keep them, times
 * rules, times sizes of their clusters or slots, of which kept rows have up to six twice. */
#define KLD_CUDA_CLUSTER_SIZES 12
#define KLD_CUDA_CLUSTER_RULES 14
#define KLD_CUDA_ACTIVE_CLUSTERS                                                                   \
    ((18 + 6 + 6 + 3) * KLD_CUDA_CLUSTER_RULES * KLD_CUDA_CLUSTER_SIZES)

/* Device memory of one job in flight; the only memory beyond inputs and outputs (328 KiB). */
struct kld_cuda_scratch {
    double divisor; /* sum of weights so far (rowmean without normalizer) */
    double total;   /* sum of the finished segments */
    double partial[KLD_CUDA_GROUPS_MAX];
    uint32_t masked[KLD_CUDA_MASK_ROWS / 32]; /* see struct kld_cuda_args */
};

/* A tensor on the device, from the launch's first row on. */
struct kld_cuda_tensor {
    char *at; /* NULL: absent */
    uint64_t stride_bytes;
    uint32_t dtype;
    uint32_t form;
};

/* Who reads or writes [N, C], [N] or [1] values. */
enum kld_cuda_extent { KLD_CUDA_SCALAR, KLD_CUDA_ROWS, KLD_CUDA_ELEMENTS };

struct kld_cuda_args {
    struct kld_rule rule;
    /* In the roles of the rule. p is targets, but where only q weighs terms (reverse_kl,
     * skew_reverse_kl) the two have changed places: of KL and MIXTURE of_p is not 0, until a kernel
     * of mixtures has them change for a gradient by p (kept_launch.cuh). */
    struct kld_cuda_tensor p, q, grad_p, grad_q;
    struct kld_cuda_tensor weights, mask, grad_output, loss, row_loss;
    uint32_t grad_output_extent; /* enum kld_cuda_extent */
    uint32_t loss_extent;        /* KLD_CUDA_SCALAR: the row kernels do not write it */
    uint32_t team;               /* threads that share a row: 4, 8, 16, 32 or a whole block */
    uint32_t cached;             /* vectors a thread keeps in shared memory (logits) */
    /* Not 0: the row is held in shared memory by so many blocks, `slice` classes each, with room
     * for `slots` rows, of which it is `lag` rows behind when it writes (resident.cuh). */
    uint32_t cluster, slice, slots, lag;
    uint32_t resident_team; /* enum kld_cuda_team: how many warps do so, or read it once */
    /* Not 0: short rows, so many of them at a time; elements of a lane, and how many of these lie
     * side by side (logits_short.cuh). */
    uint32_t tile_rows, lane_elements, lane_width;
    uint64_t rows, classes; /* of this launch */
    /* Not 0: flat. Rows do not matter, the tensors are this many elements one after the other; rows
     * and classes are then tiles of it and the elements of one, of which the last may be short. */
    uint64_t elements;
    uint32_t multiprocessors;
    bool begins_early; /* the final sum, before the rows' kernel has ended: kld_cuda_begins_early()
                        */
    bool has_fp64;     /* at half the speed of FP32, and not at a 32nd of it or less */
    uint64_t group_rows;
    uint64_t first_group; /* where this launch's partial sums go */
    double inverse_temperature;
    double stretch;        /* log2(e) / T over what FP32 makes of it */
    double scale;          /* of the loss */
    double gradient_scale; /* scale * grad_output as a number */
    double divisor;        /* 0: scratch->divisor */
    struct kld_cuda_scratch *scratch;
    /* Where blocks share a row: a bit for each of the launch's, 1 where it is masked, in device
     * memory. kld_cuda_launch_rows() writes them before all else, from the mask, whose owner may
     * write to it meanwhile: blocks that disagree about a row would wait for each other for ever.
     * NULL: the mask itself is read. */
    uint32_t *masked;
    /* Host memory of the device: how many clusters of a kernel run at a time; 0: not asked yet.
     * NULL: ask each time. From kld_cuda_layout() on that of this launch's kernel. */
    uint16_t *active_clusters;
};

/* Can the job be flat, as far as the kernels are concerned: every term by itself, nothing by row?
 */
bool kld_cuda_can_be_flat(const struct kld_cuda_args *args);
/* Chooses the layout: threads of a row by dtypes, forms and C alone, rows of a group also by the
 * job's rows. Fills team, cached, group_rows; of a flat job also classes. */
void kld_cuda_layout(struct kld_cuda_args *args, uint64_t job_rows, uint32_t shared_bytes_max);
/* Adds the weights of args->rows rows (<= KLD_CUDA_DIVISOR_ROWS) to scratch->divisor. */
cudaError_t kld_cuda_launch_divisor(const struct kld_cuda_args *args, bool first,
                                    cudaStream_t stream);
/* Loss and gradients of args->rows rows; at most KLD_CUDA_GROUPS_MAX groups. */
cudaError_t kld_cuda_launch_rows(const struct kld_cuda_args *args, cudaStream_t stream);
/* Adds `groups` partial sums to scratch->total; `last`: also writes the loss tensor (if present)
 * and *result, the same number as a double in pinned host memory. */
cudaError_t kld_cuda_launch_finish(const struct kld_cuda_args *args, uint32_t groups, bool first,
                                   bool last, uint32_t loss_dtype, double *result,
                                   cudaStream_t stream);

/* Was the final sum built for this device so that it may begin early and wait? */
bool kld_cuda_begins_early(void);

/* Where rows of logits are long enough, and the device can: fills cluster, slice, slots, lag, team.
 */
void kld_cuda_resident_layout(struct kld_cuda_args *args, uint32_t shared_bytes_max);
cudaError_t kld_cuda_resident_rows(const struct kld_cuda_args *args, uint32_t groups,
                                   cudaStream_t stream);

/* Where rows of logits are short enough: fills team, tile_rows, group_rows. */
void kld_cuda_short_layout(struct kld_cuda_args *args, uint64_t job_rows);
cudaError_t kld_cuda_short_rows(const struct kld_cuda_args *args, uint32_t groups, cudaStream_t s);
/* One per element type, behind that. */
cudaError_t kld_cuda_short_fp32(const struct kld_cuda_args *args, uint32_t groups, cudaStream_t s);
cudaError_t kld_cuda_short_fp16(const struct kld_cuda_args *args, uint32_t groups, cudaStream_t s);
cudaError_t kld_cuda_short_bf16(const struct kld_cuda_args *args, uint32_t groups, cudaStream_t s);
cudaError_t kld_cuda_short_general_fp32(const struct kld_cuda_args *args, uint32_t groups,
                                        cudaStream_t s);
cudaError_t kld_cuda_short_general_fp16(const struct kld_cuda_args *args, uint32_t groups,
                                        cudaStream_t s);
cudaError_t kld_cuda_short_general_bf16(const struct kld_cuda_args *args, uint32_t groups,
                                        cudaStream_t s);
cudaError_t kld_cuda_short_wide(const struct kld_cuda_args *args, uint32_t groups, cudaStream_t s);
cudaError_t kld_cuda_short_wide_others(const struct kld_cuda_args *args, uint32_t groups,
                                       cudaStream_t s);

/* One per element type, behind kld_cuda_launch_rows(). */
cudaError_t kld_cuda_rows_fp32(const struct kld_cuda_args *args, uint32_t groups, cudaStream_t s);
cudaError_t kld_cuda_rows_fp16(const struct kld_cuda_args *args, uint32_t groups, cudaStream_t s);
cudaError_t kld_cuda_rows_bf16(const struct kld_cuda_args *args, uint32_t groups, cudaStream_t s);
cudaError_t kld_cuda_elementwise_fp32(const struct kld_cuda_args *args, uint32_t groups,
                                      cudaStream_t s);
cudaError_t kld_cuda_elementwise_fp16(const struct kld_cuda_args *args, uint32_t groups,
                                      cudaStream_t s);
cudaError_t kld_cuda_elementwise_bf16(const struct kld_cuda_args *args, uint32_t groups,
                                      cudaStream_t s);
cudaError_t kld_cuda_rows_any(const struct kld_cuda_args *args, uint32_t groups, cudaStream_t s);

/* Reads a and b, `bytes` each, as fast as the device can; `write`: also writes out. */
cudaError_t kld_cuda_launch_ceiling(const void *a, const void *b, void *out, uint64_t bytes,
                                    bool write, uint32_t blocks, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
