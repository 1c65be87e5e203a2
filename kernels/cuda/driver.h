/* driver.h - functions of the driver that the CUDA runtime does not offer, found at run time, so
 * that nothing here links against the driver's library and the program starts where there is none.
 * Any thread. */
#ifndef KLD_KERNELS_CUDA_DRIVER_H
#define KLD_KERNELS_CUDA_DRIVER_H

#include <cuda.h>
#include <stdbool.h>

struct cuda_driver {
    /* The context that the calling thread works in; NULL: none. */
    CUresult (*get_current)(CUcontext *context);
    CUresult (*set_current)(CUcontext context);
    /* Of the calling thread; in place of the number is what it was. */
    CUresult (*exchange_capture_mode)(CUstreamCaptureMode *mode);
    CUresult (*address_range)(CUdeviceptr *base, size_t *bytes, CUdeviceptr at);
    /* Writes a number to memory when what the stream has before it has ended. */
    CUresult (*write_value)(CUstream stream, CUdeviceptr at, cuuint32_t number, unsigned flags);
    /* Allocations that are mapped by hand (VMM). */
    CUresult (*import_handle)(CUmemGenericAllocationHandle *handle, void *os_handle,
                              CUmemAllocationHandleType type);
    CUresult (*handle_properties)(CUmemAllocationProp *properties,
                                  CUmemGenericAllocationHandle handle);
    CUresult (*granularity)(size_t *bytes, const CUmemAllocationProp *properties,
                            CUmemAllocationGranularity_flags option);
    CUresult (*release_handle)(CUmemGenericAllocationHandle handle);
    CUresult (*reserve)(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wanted,
                        unsigned long long flags);
    CUresult (*unreserve)(CUdeviceptr at, size_t bytes);
    CUresult (*map)(CUdeviceptr at, size_t bytes, size_t offset,
                    CUmemGenericAllocationHandle handle, unsigned long long flags);
    CUresult (*unmap)(CUdeviceptr at, size_t bytes);
    CUresult (*set_access)(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access,
                           size_t count);
};

/* Looked up once. A function that the driver does not have is NULL; mappable: all of VMM is there.
 */
const struct cuda_driver *cuda_driver_get(bool *ret_mappable);

#endif
