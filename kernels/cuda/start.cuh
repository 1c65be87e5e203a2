/* start.cuh - puts a kernel on a stream. Enqueues only; an error of the launch is returned, and not
 * to be found again by the next one. */
#ifndef KLD_KERNELS_CUDA_START_CUH
#define KLD_KERNELS_CUDA_START_CUH

#include <cstddef>
#include <cstdint>

template <class... PARAMETERS, class... ARGUMENTS>
static cudaError_t start(const cudaLaunchConfig_t &config, void (*kernel)(PARAMETERS...),
                         const ARGUMENTS &...arguments) {
    cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
    cudaGetLastError();
    return error;
}

template <class... PARAMETERS, class... ARGUMENTS>
static cudaError_t start(void (*kernel)(PARAMETERS...), uint32_t blocks, uint32_t threads,
                         size_t shared_bytes, cudaStream_t stream, const ARGUMENTS &...arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    return start(config, kernel, arguments...);
}

#endif
