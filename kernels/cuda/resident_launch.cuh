/* resident_launch.cuh - the kernel of a body, and its launch on a stream: how many clusters, how
 * much shared memory. Enqueues only. */
#ifndef KLD_KERNELS_CUDA_RESIDENT_LAUNCH_CUH
#define KLD_KERNELS_CUDA_RESIDENT_LAUNCH_CUH

#include "kernels/cuda/logits_resident.cuh"

namespace logits_resident {
inline namespace KLD_CUDA_TEAM {

template <class BODY>
static __global__ void __launch_bounds__(resident::THREADS, KLD_CUDA_TEAM_BLOCKS)
    kernel(const __grid_constant__ kld_cuda_args args) {
#if __CUDA_ARCH__ >= 900
    resident::run<rows<BODY>>(args);
#endif
}

/* How many clusters run at a time; registers decide that, and `fits` has left room for as many.
 * Also lets the kernel have its shared memory, any size of it: once for all launches. Not
 * supported: the code was built for older devices only, or no cluster fits. */
static cudaError_t active_clusters(const cudaLaunchConfig_t &config,
                                   void (*function)(kld_cuda_args), int *ret_clusters) {
    cudaFuncAttributes code;
    cudaError_t error = cudaFuncGetAttributes(&code, function);
    if (error)
        return error;
    if (code.ptxVersion < 90 && (!resident::FAR || resident::HOLDS || config.numAttrs))
        return cudaErrorNotSupported;
    int device, most;
    if ((error = cudaGetDevice(&device)) ||
        (error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)))
        return error;
    error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - (int)code.sharedSizeBytes);
    if (error)
        return error;
    if (resident::CLUSTER_MAX > resident::CLUSTER_PORTABLE &&
        (error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)))
        return error;
    /* Of clusters of one block it counts eight a multiprocessor at most, however small they are. */
    if (config.numAttrs == 0) {
        int blocks, multiprocessors;
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &blocks, function, (int)config.blockDim.x, config.dynamicSmemBytes);
        if (!error)
            error =
                cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
        *ret_clusters = error ? 0 : blocks * multiprocessors;
    } else {
        error = cudaOccupancyMaxActiveClusters(ret_clusters, function, &config);
    }
    return error || *ret_clusters ? error : cudaErrorNotSupported;
}

/* How many clusters share rows that are read once. Each has some one after the other, so that it
 * starts but once; not so many that others' kernels wait long for a place. As many clusters as run
 * at a time or a multiple, so that all end together. */
static uint32_t far_clusters(const kld_cuda_args &args, size_t element, uint32_t groups,
                             uint32_t clusters) {
    uint64_t most = resident::HOLDS    ? KLD_CUDA_KEPT_TURN_BYTES
                    : args.cluster > 1 ? KLD_CUDA_ONEPASS_CLUSTER_TURN_BYTES
                                       : KLD_CUDA_ONEPASS_TURN_BYTES;
    uint64_t group_bytes = 2 * element * args.classes * args.group_rows;
    uint64_t turn = most * resident::WARPS * args.cluster / group_bytes; /* groups */
    uint64_t each = (groups + clusters - 1) / clusters;
    uint64_t turns = turn ? (each + turn - 1) / turn : each;
    return turns * clusters < groups ? (uint32_t)turns * clusters : groups;
}

static cudaError_t launch_kernel(void (*function)(kld_cuda_args), size_t element,
                                 const kld_cuda_args &args, uint32_t groups, uint32_t threads,
                                 cudaStream_t stream) {
    size_t shared = resident::bytes(args, element);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {args.cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(args.cluster);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    /* Eight blocks of held rows a multiprocessor are better than the twice as many that fit: what
     * registers spill has more of the first-level cache. */
    config.numAttrs = !resident::FAR || args.cluster > 1;
    int clusters = args.active_clusters ? *args.active_clusters : 0;
    if (!clusters) {
        cudaError_t error = active_clusters(config, function, &clusters);
        if (error)
            return error;
        if (args.active_clusters)
            *args.active_clusters = (uint16_t)clusters;
    }
    uint32_t used = groups < (uint32_t)clusters ? groups : (uint32_t)clusters;
    if (resident::REREAD) /* who comes later gets a place as soon as any row is done */
        used = groups;
    else if (resident::FAR)
        used = far_clusters(args, element, groups, (uint32_t)clusters);
    config.gridDim = dim3(used * args.cluster);
    return start(config, function, args);
}

template <class BODY>
static cudaError_t launch(const kld_cuda_args &args, uint32_t groups, cudaStream_t stream) {
    static_assert(sizeof(typename rows<BODY>::shared_type) +
                          resident::GROUPS * sizeof(team_shared) <=
                      KLD_CUDA_STATIC_MAX,
                  "see share()");
    return launch_kernel(kernel<BODY>, sizeof(typename BODY::T), args, groups, resident::THREADS,
                         stream);
}

} /* namespace KLD_CUDA_TEAM */
} /* namespace logits_resident */
#endif
