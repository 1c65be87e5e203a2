/* resident_team.h - the sizes of block that hold rows of logits in shared memory, and what there is
 * of each: the same code compiled twice. A warp has a fixed cost a row, and a row's way through a
 * block takes its time: long rows want many warps, short ones many blocks. Which team a row takes
 * follows from its bytes. */
#ifndef KLD_KERNELS_CUDA_RESIDENT_TEAM_H
#define KLD_KERNELS_CUDA_RESIDENT_TEAM_H

#include "kernels/cuda/launch.h"

/* Of one tensor: up to this the small team. */
#define KLD_CUDA_RESIDENT_SMALL_BYTES 16384

/* What a source file says before it includes resident.cuh. Warps that compute and how many groups
 * they form, warps that settle, blocks on a multiprocessor. */
#if defined(KLD_CUDA_TEAM_SMALL)
#define KLD_CUDA_TEAM small_team
#define KLD_CUDA_TEAM_WARPS 4
#define KLD_CUDA_TEAM_GROUPS 1
#define KLD_CUDA_TEAM_SETTLERS 2
#define KLD_CUDA_TEAM_BLOCKS 3
#else
#define KLD_CUDA_TEAM large_team
#define KLD_CUDA_TEAM_WARPS 16
#define KLD_CUDA_TEAM_GROUPS 2
#define KLD_CUDA_TEAM_SETTLERS 2
#define KLD_CUDA_TEAM_BLOCKS 1
#endif

/* Bytes of a block's static shared memory. */
#define KLD_CUDA_STATIC_MAX 4096

#define KLD_CUDA_TEAM_JOIN_(team, name) kld_cuda_##team##_##name
#define KLD_CUDA_TEAM_JOIN(team, name) KLD_CUDA_TEAM_JOIN_(team, name)
/* The function of the team that is being compiled. */
#define KLD_CUDA_TEAM_NAME(name) KLD_CUDA_TEAM_JOIN(KLD_CUDA_TEAM, name)

#ifdef __cplusplus
extern "C" {
#endif

/* The launches: q - p and everything, by size and element type. */
#define KLD_CUDA_TEAM_MAP(X)                                                                       \
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
void kld_cuda_small_team_layout(struct kld_cuda_args *args, uint32_t shared_bytes_max);
void kld_cuda_large_team_layout(struct kld_cuda_args *args, uint32_t shared_bytes_max);

#ifdef __cplusplus
}
#endif
#endif
