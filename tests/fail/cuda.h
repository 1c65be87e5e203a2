/* cuda.h - the functions of CUDA's runtime that nth.so counts: X(name). Not those that launch a
 * kernel: their error is what cudaGetLastError() says, which is here. Those that ask whether
 * something has ended are apart: how often that is asked is chance. */
#define NTH_CUDA_LOOKS(X)                                                                          \
    X(cudaStreamQuery)                                                                             \
    X(cudaEventQuery)
#define NTH_CUDA_FUNCTIONS(X)                                                                      \
    X(cudaGetLastError)                                                                            \
    X(cudaSetDevice)                                                                               \
    X(cudaDeviceGetAttribute)                                                                      \
    X(cudaDeviceGetStreamPriorityRange)                                                            \
    X(cudaDeviceCanAccessPeer)                                                                     \
    X(cudaGetDevice)                                                                               \
    X(cudaGetDeviceCount)                                                                          \
    X(cudaStreamSynchronize)                                                                       \
    X(cudaStreamDestroy)                                                                           \
    X(cudaStreamWaitEvent)                                                                         \
    X(cudaStreamCreateWithPriority)                                                                \
    X(cudaStreamCreateWithFlags)                                                                   \
    X(cudaMemcpyAsync)                                                                             \
    X(cudaMemcpy2DAsync)                                                                           \
    X(cudaMemsetAsync)                                                                             \
    X(cudaEventCreate)                                                                             \
    X(cudaEventCreateWithFlags)                                                                    \
    X(cudaEventRecord)                                                                             \
    X(cudaEventDestroy)                                                                            \
    X(cudaEventSynchronize)                                                                        \
    X(cudaEventElapsedTime)                                                                        \
    X(cudaFuncSetAttribute)                                                                        \
    X(cudaFuncGetAttributes)                                                                       \
    X(cudaOccupancyMaxActiveBlocksPerMultiprocessor)                                               \
    X(cudaOccupancyMaxActiveClusters)                                                              \
    X(cudaMallocFromPoolAsync)                                                                     \
    X(cudaMalloc)                                                                                  \
    X(cudaFree)                                                                                    \
    X(cudaFreeAsync)                                                                               \
    X(cudaHostAlloc)                                                                               \
    X(cudaFreeHost)                                                                                \
    X(cudaHostGetDevicePointer)                                                                    \
    X(cudaHostRegister)                                                                            \
    X(cudaHostUnregister)                                                                          \
    X(cudaPointerGetAttributes)                                                                    \
    X(cudaMemPoolCreate)                                                                           \
    X(cudaMemPoolDestroy)                                                                          \
    X(cudaMemPoolSetAttribute)                                                                     \
    X(cudaMemPoolTrimTo)                                                                           \
    X(cudaIpcOpenMemHandle)                                                                        \
    X(cudaIpcCloseMemHandle)                                                                       \
    X(cudaIpcGetMemHandle)                                                                         \
    X(cudaIpcOpenEventHandle)                                                                      \
    X(cudaIpcGetEventHandle)
