/* cuda.h - the functions of CUDA's runtime that nth.so counts: X(name). Not those that launch a
 * kernel: their error is what cudaGetLastError() says, which is here. */
#define NTH_CUDA_FUNCTIONS(X)                                                                      \
    X(cudaGetLastError)                                                                            \
    X(cudaSetDevice)                                                                               \
    X(cudaDeviceGetAttribute)                                                                      \
    X(cudaDeviceGetStreamPriorityRange)                                                            \
    X(cudaDeviceCanAccessPeer)                                                                     \
    X(cudaGetDeviceCount)                                                                          \
    X(cudaStreamSynchronize)                                                                       \
    X(cudaStreamDestroy)                                                                           \
    X(cudaStreamWaitEvent)                                                                         \
    X(cudaStreamQuery)                                                                             \
    X(cudaStreamCreateWithPriority)                                                                \
    X(cudaStreamCreateWithFlags)                                                                   \
    X(cudaMemcpyAsync)                                                                             \
    X(cudaMemsetAsync)                                                                             \
    X(cudaEventCreateWithFlags)                                                                    \
    X(cudaEventRecord)                                                                             \
    X(cudaEventQuery)                                                                              \
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
