/* resident_team.h - the sizes of block that hold rows of logits in shared memory, and what there is
 * of each: the same code compiled some times. A warp has a fixed cost a row, and a row's way
 * through a block of many trades takes its time: long rows want many warps that divide the work,
 * short ones many small blocks, each of which does all of it by itself. Which team a row takes
 * follows from its bytes. */
#ifndef KLD_KERNELS_CUDA_RESIDENT_TEAM_H
#define KLD_KERNELS_CUDA_RESIDENT_TEAM_H

#include "kernels/cuda/launch.h"

/* Of one tensor: from this on rows are held in shared memory, up to these by the single warp, the
 * small team. */
#define KLD_CUDA_RESIDENT_LEAST_BYTES 1024
#define KLD_CUDA_RESIDENT_SINGLE_BYTES 4096
#define KLD_CUDA_RESIDENT_SMALL_BYTES 16384
/* Of rows of which only the value is wanted, which are read once (logits_onepass.cuh): from here
 * on, up to these by a warp, so many by a block of a cluster of up to eight. Below, other kernels
 * spend less on a row; a block's threads have 32 units of vectors each, a bit for each. */
#define KLD_CUDA_ONEPASS_LEAST_BYTES 2049
#define KLD_CUDA_ONEPASS_WARP_BYTES 16384
#define KLD_CUDA_ONEPASS_BLOCK_BYTES 131072
/* Of both tensors: what a warp reads before its block makes room for another; in clusters, which
 * take longer to start, more. With all warps of all multiprocessors 64 and 256 microseconds. Rows
 * that need another look get it at the end of a turn: after a short one they are still in the
 * second-level cache. */
#define KLD_CUDA_ONEPASS_TURN_BYTES (64 << 10)
#define KLD_CUDA_ONEPASS_CLUSTER_TURN_BYTES (256 << 10)

/* Of rows of which a gradient is wanted that follows from their sums, which are read twice, the
 * second time from the caches (logits_reread.cuh): from here on, up to these by a warp, by a block
 * of four. The rows at hand of all multiprocessors are what the second-level cache keeps. */
#define KLD_CUDA_REREAD_LEAST_BYTES 1028
#define KLD_CUDA_REREAD_WARP_BYTES 8192
#define KLD_CUDA_REREAD_BLOCK_BYTES 16384

/* Of longer ones (logits_kept.cuh): from here on, to 16 times what a block has room for, of one
 * tensor. With its eight warps three blocks fit a multiprocessor, of rows that start anywhere and
 * fill it two. */
#define KLD_CUDA_KEPT_LEAST_BYTES 16384
#define KLD_CUDA_KEPT_VALUES_LEAST_BYTES 8192 /* of js of 16 bits without a gradient */
#define KLD_CUDA_KEPT_WIDE_LEAST_BYTES 4097   /* of those that are summed in FP64 */
#define KLD_CUDA_KEPT_SLICE_BYTES 32768
#define KLD_CUDA_KEPT_TURN_BYTES (128 << 10) /* as above */

/* args->resident_team. */
enum kld_cuda_team {
    KLD_CUDA_TEAM_OF_ONE,
    KLD_CUDA_TEAM_OF_FOUR,
    KLD_CUDA_TEAM_OF_MANY,
    KLD_CUDA_ONEPASS_WARP,
    KLD_CUDA_ONEPASS_BLOCK,
    KLD_CUDA_REREAD_WARP,
    KLD_CUDA_REREAD_BLOCK,
    KLD_CUDA_KEPT
};

/* What a source file says before it includes resident.cuh. Warps that compute and how many groups
 * they form, warps that settle (0: the computing warps do everything), blocks on a multiprocessor
 * that registers are to leave room for. */
#if defined(KLD_CUDA_TEAM_SINGLE)
#define KLD_CUDA_TEAM single_team
#define KLD_CUDA_TEAM_WARPS 1
#define KLD_CUDA_TEAM_GROUPS 1
#define KLD_CUDA_TEAM_SETTLERS 0
#define KLD_CUDA_TEAM_BLOCKS 16
#elif defined(KLD_CUDA_TEAM_SMALL)
#define KLD_CUDA_TEAM small_team
#define KLD_CUDA_TEAM_WARPS 4
#define KLD_CUDA_TEAM_GROUPS 1
#define KLD_CUDA_TEAM_SETTLERS 0
#define KLD_CUDA_TEAM_BLOCKS 5
#elif defined(KLD_CUDA_TEAM_ONEPASS_WARP)
#define KLD_CUDA_TEAM onepass_warp_team
#define KLD_CUDA_TEAM_FAR 1
#define KLD_CUDA_TEAM_WARPS 1
#define KLD_CUDA_TEAM_GROUPS 1
#define KLD_CUDA_TEAM_SETTLERS 0
#define KLD_CUDA_TEAM_BLOCKS 32
#elif defined(KLD_CUDA_TEAM_ONEPASS_BLOCK)
#define KLD_CUDA_TEAM onepass_block_team
#define KLD_CUDA_TEAM_FAR 1
#define KLD_CUDA_TEAM_WARPS 4
#define KLD_CUDA_TEAM_GROUPS 1
#define KLD_CUDA_TEAM_SETTLERS 0
#define KLD_CUDA_TEAM_BLOCKS 8
#elif defined(KLD_CUDA_TEAM_REREAD_WARP)
#define KLD_CUDA_TEAM reread_warp_team
#define KLD_CUDA_TEAM_FAR 1
#define KLD_CUDA_TEAM_REREAD 1
#define KLD_CUDA_TEAM_WARPS 1
#define KLD_CUDA_TEAM_GROUPS 1
#define KLD_CUDA_TEAM_SETTLERS 0
#define KLD_CUDA_TEAM_BLOCKS 24
#elif defined(KLD_CUDA_TEAM_REREAD_BLOCK)
#define KLD_CUDA_TEAM reread_block_team
#define KLD_CUDA_TEAM_FAR 1
#define KLD_CUDA_TEAM_REREAD 1
#define KLD_CUDA_TEAM_WARPS 4
#define KLD_CUDA_TEAM_GROUPS 1
#define KLD_CUDA_TEAM_SETTLERS 0
#define KLD_CUDA_TEAM_BLOCKS 6
#elif defined(KLD_CUDA_TEAM_KEPT)
#define KLD_CUDA_TEAM kept_team
#define KLD_CUDA_TEAM_FAR 1
#define KLD_CUDA_TEAM_HOLDS 1
#define KLD_CUDA_TEAM_WARPS 8
#define KLD_CUDA_TEAM_GROUPS 1
#define KLD_CUDA_TEAM_SETTLERS 0
#define KLD_CUDA_TEAM_BLOCKS 3
#else
#define KLD_CUDA_TEAM large_team
#define KLD_CUDA_TEAM_WARPS 16
#define KLD_CUDA_TEAM_GROUPS 2
#define KLD_CUDA_TEAM_SETTLERS 2
#define KLD_CUDA_TEAM_BLOCKS 1
#endif

/* Rows stay in device memory and are read from there, once if all goes well. */
#ifndef KLD_CUDA_TEAM_FAR
#define KLD_CUDA_TEAM_FAR 0
#endif
/* And again, before long. */
#ifndef KLD_CUDA_TEAM_REREAD
#define KLD_CUDA_TEAM_REREAD 0
#endif

/* And what has been read stays in shared memory until the gradient is written. */
#ifndef KLD_CUDA_TEAM_HOLDS
#define KLD_CUDA_TEAM_HOLDS 0
#endif

/* Bytes of a block's static shared memory. */
#define KLD_CUDA_STATIC_MAX 4096

#define KLD_CUDA_TEAM_JOIN_(team, name) kld_cuda_##team##_##name
#define KLD_CUDA_TEAM_JOIN(team, name) KLD_CUDA_TEAM_JOIN_(team, name)
/* The function of the team that is being compiled. */
#define KLD_CUDA_TEAM_NAME(name) KLD_CUDA_TEAM_JOIN(KLD_CUDA_TEAM, name)

/* Do both sides of a mixture count alike? Kernels of their own then. */
static inline bool kld_cuda_is_even(const struct kld_rule *rule) {
    return rule->share == rule->rest && rule->of_p == rule->of_q;
}

#ifdef __cplusplus
extern "C" {
#endif

/* The launches: q - p and everything, by size and element type. */
#define KLD_CUDA_TEAM_MAP(X)                                                                       \
    X(single_team_difference_fp32)                                                                 \
    X(single_team_difference_fp16)                                                                 \
    X(single_team_difference_bf16)                                                                 \
    X(single_team_general_fp32)                                                                    \
    X(single_team_general_fp16)                                                                    \
    X(single_team_general_bf16)                                                                    \
    X(small_team_difference_fp32)                                                                  \
    X(small_team_difference_fp16)                                                                  \
    X(small_team_difference_bf16)                                                                  \
    X(small_team_general_fp32)                                                                     \
    X(small_team_general_fp16)                                                                     \
    X(small_team_general_bf16)                                                                     \
    X(large_team_difference_fp32)                                                                  \
    X(large_team_difference_fp16)                                                                  \
    X(large_team_difference_bf16)                                                                  \
    X(large_team_general_fp32)                                                                     \
    X(large_team_general_fp16)                                                                     \
    X(large_team_general_bf16)
#define X(name)                                                                                    \
    cudaError_t kld_cuda_##name(const struct kld_cuda_args *args, uint32_t groups,                 \
                                cudaStream_t stream);
KLD_CUDA_TEAM_MAP(X)
#undef X
/* And of rows that are read once. */
#define KLD_CUDA_ONEPASS_MAP(X)                                                                    \
    X(onepass_warp_team_fp32)                                                                      \
    X(onepass_warp_team_fp16)                                                                      \
    X(onepass_warp_team_bf16)                                                                      \
    X(onepass_block_team_fp32)                                                                     \
    X(onepass_block_team_fp16)                                                                     \
    X(onepass_block_team_bf16)
#define X(name)                                                                                    \
    cudaError_t kld_cuda_##name(const struct kld_cuda_args *args, uint32_t groups,                 \
                                cudaStream_t stream);
KLD_CUDA_ONEPASS_MAP(X)
#undef X
/* And of those that are read again. */
#define KLD_CUDA_REREAD_MAP(X)                                                                     \
    X(reread_warp_team_fp32)                                                                       \
    X(reread_warp_team_fp16)                                                                       \
    X(reread_warp_team_bf16)                                                                       \
    X(reread_block_team_fp32)                                                                      \
    X(reread_block_team_fp16)                                                                      \
    X(reread_block_team_bf16)
#define X(name)                                                                                    \
    cudaError_t kld_cuda_##name(const struct kld_cuda_args *args, uint32_t groups,                 \
                                cudaStream_t stream);
KLD_CUDA_REREAD_MAP(X)
#undef X
/* And of those that are kept. */
#define KLD_CUDA_KEPT_MAP(X)                                                                       \
    X(kept_team_fp32)                                                                              \
    X(kept_team_fp16)                                                                              \
    X(kept_team_bf16)
#define X(name)                                                                                    \
    cudaError_t kld_cuda_##name(const struct kld_cuda_args *args, uint32_t groups,                 \
                                cudaStream_t stream);
KLD_CUDA_KEPT_MAP(X)
X(kept_team_wide_fp32)
X(kept_team_shannon_fp16)
X(kept_team_shannon_bf16)
#undef X
void kld_cuda_large_team_layout(struct kld_cuda_args *args, uint32_t shared_bytes_max);

#ifdef __cplusplus
}
#endif
#endif
