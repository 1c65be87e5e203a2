/* copy.c - rows of a staged tensor, to the device or back: enqueued on the job's stream. Under
 * device->work. */
#include "kernels/cuda/plan.h"

static cudaError_t copy_rows(char *to, uint64_t to_stride, const char *from, uint64_t from_stride,
                             uint64_t row_bytes, uint64_t rows, cudaStream_t stream) {
    if (rows == 1 || (to_stride == row_bytes && from_stride == row_bytes))
        return cudaMemcpyAsync(to, from, row_bytes * rows, cudaMemcpyDefault, stream);
    if (to_stride <= INT32_MAX && from_stride <= INT32_MAX)
        return cudaMemcpy2DAsync(to, to_stride, from, from_stride, row_bytes, rows,
                                 cudaMemcpyDefault, stream);
    cudaError_t error = cudaSuccess;
    for (uint64_t i = 0; i < rows && !error; i++)
        error = cudaMemcpyAsync(to + i * to_stride, from + i * from_stride, row_bytes,
                                cudaMemcpyDefault, stream);
    return error;
}

/* Kernels that read a row from device memory take whole granules of 16 bytes and drop what is not
 * the row's (struct far_slice): of a staged tensor's last one, too, all is to be somebody's. */
static cudaError_t clear_tail(const struct cuda_flight *flight, char *end) {
    size_t rest = (size_t)(-(uintptr_t)end & 15);
    return rest ? cudaMemsetAsync(end, 0, rest, cuda_stream_of(flight)) : cudaSuccess;
}

/* Tiles [first, first + tiles) of a slot of a flat job. */
static cudaError_t copy_tiles(const struct cuda_flight *flight, int slot, uint64_t first,
                              uint64_t tiles, bool back) {
    const struct kld_slot_geometry *at = &flight->job->geometry.slot[slot];
    uint64_t tile_bytes = cuda_plan_row_bytes(flight, slot);
    uint64_t bytes = tiles * tile_bytes, rest = at->rows * at->row_bytes - first * tile_bytes;
    if (bytes > rest)
        bytes = rest;
    char *host = cuda_address_of(&flight->job->place[slot]) + first * tile_bytes;
    char *staged = flight->staging + flight->staging_at[slot];
    return cudaMemcpyAsync(back ? host : staged, back ? staged : host, bytes, cudaMemcpyDefault,
                           cuda_stream_of(flight));
}

cudaError_t cuda_copy_slot(const struct cuda_flight *flight, int slot, uint64_t first,
                           uint64_t rows, bool back) {
    const struct kld_job *job = flight->job;
    const struct kld_slot_geometry *at = &job->geometry.slot[slot];
    bool tall = cuda_slot_is_tall(job, slot);
    if (tall && flight->args.elements)
        return copy_tiles(flight, slot, first, rows, back);
    char *host = cuda_address_of(&job->place[slot]) + (tall ? first * at->stride_bytes : 0);
    char *staged = flight->staging + flight->staging_at[slot];
    uint64_t count = tall ? rows : 1;
    if (back)
        return copy_rows(host, at->stride_bytes, staged, at->row_bytes, at->row_bytes, count,
                         cuda_stream_of(flight));
    cudaError_t error = copy_rows(staged, at->row_bytes, host, at->stride_bytes, at->row_bytes,
                                  count, cuda_stream_of(flight));
    bool read_so = slot == KLD_SLOT_PREDICTIONS || slot == KLD_SLOT_TARGETS;
    return error || !read_so ? error : clear_tail(flight, staged + count * at->row_bytes);
}
