/* logits_short_tile.cuh - short rows between device memory and the shared memory of one warp: a
 * tile is a few rows one after the other, and travels in pieces of 16 bytes wherever its rows
 * begin. What is not packed, or lies otherwise in the output than in the input, goes by elements.
 * No barrier but the warp's own. No mathematics here. */
#ifndef KLD_KERNELS_CUDA_LOGITS_SHORT_TILE_CUH
#define KLD_KERNELS_CUDA_LOGITS_SHORT_TILE_CUH

#include "kernels/cuda/row.cuh"

namespace logits_short {

/* Rows one after the other between device memory, at any stride, and shared memory. The slow way.
 */
template <class T>
static __device__ __forceinline__ void load_elements(T *to, const char *from, uint64_t stride,
                                                     uint32_t classes, uint32_t rows) {
#pragma unroll 1
    for (uint32_t r = 0; r < rows; r++, from += stride, to += classes)
#pragma unroll 1
        for (uint32_t i = threadIdx.x % 32; i < classes; i += 32)
            to[i] = ((const T *)from)[i];
}
template <class T>
static __device__ __forceinline__ void store_elements(const T *from, char *to, uint64_t stride,
                                                      uint32_t classes, uint32_t rows) {
#pragma unroll 1
    for (uint32_t r = 0; r < rows; r++, to += stride, from += classes)
#pragma unroll 1
        for (uint32_t i = threadIdx.x % 32; i < classes; i += 32)
            ((T *)to)[i] = from[i];
}

/* A tensor as tiles see it. Made anew for each tile: its numbers are constants of the launch. */
template <class T> struct tile_tensor {
    const kld_cuda_tensor &tensor;
    uint32_t classes;
    bool packed;

    __device__ __forceinline__ tile_tensor(const kld_cuda_args &args,
                                           const kld_cuda_tensor &its_tensor)
        : tensor(its_tensor), classes((uint32_t)args.classes),
          packed(args.rows == 1 || its_tensor.stride_bytes == args.classes * sizeof(T)) {}

    __device__ __forceinline__ char *row(uint64_t index) const {
        return tensor.at + index * tensor.stride_bytes;
    }
    /* Where a tile's first element lies in its place. */
    __device__ __forceinline__ uint32_t offset(uint64_t index) const {
        return packed ? (uint32_t)((uintptr_t)row(index) & 15) : 0;
    }

    /* Begins to copy; the same threads wait. */
    __device__ __forceinline__ void load(char *place, uint64_t index, uint32_t rows) const {
        const char *from = row(index);
        uint32_t head = (uint32_t)((uintptr_t)from & 15);
        /* What lies before the first row is not the tensor's to read. */
        if (!packed || (index == 0 && head != 0)) {
            load_elements<T>((T *)(place + (packed ? head : 0)), from, tensor.stride_bytes, classes,
                             rows);
            return;
        }
        uint32_t end = head + rows * classes * (uint32_t)sizeof(T);
        from -= head;
#pragma unroll 1
        for (uint32_t i = 16 * (threadIdx.x % 32); i < end; i += 512)
            copy_piece(place + i, from + i, min(16u, end - i));
    }
    /* The tile at `place` + its offset there. */
    __device__ __forceinline__ void store(const char *place, uint32_t its_offset, uint64_t index,
                                          uint32_t rows) const {
        unsigned lane = threadIdx.x % 32;
        if (!packed || offset(index) != its_offset) {
            store_elements<T>((const T *)(place + its_offset), row(index), tensor.stride_bytes,
                              classes, rows);
            return;
        }
        char *to = row(index) - its_offset;
        uint32_t end = its_offset + rows * classes * (uint32_t)sizeof(T);
        uint32_t first = its_offset ? 16 : 0, last = end & ~15u;
#pragma unroll 1
        for (uint32_t i = first + 16 * lane; i < last; i += 512)
            __stcs((uint4 *)(to + i), *(const uint4 *)(place + i));
        uint32_t head = its_offset + lane * (uint32_t)sizeof(T);
        if (head < min(first, end))
            *(T *)(to + head) = *(const T *)(place + head);
        uint32_t tail = max(first, last) + lane * (uint32_t)sizeof(T);
        if (tail < end)
            *(T *)(to + tail) = *(const T *)(place + tail);
    }
};

/* The tiles of one warp: groups in turn, each from its first row to its last. */
struct tile_cursor {
    uint64_t group, row, end;
    uint32_t rows; /* 0: no more */

    __device__ __forceinline__ void open(const kld_cuda_args &args, uint64_t groups) {
        row = group * args.group_rows;
        end = min(row + args.group_rows, args.rows);
        rows = group < groups ? (uint32_t)min(end - row, (uint64_t)args.tile_rows) : 0;
    }
    __device__ __forceinline__ void next(const kld_cuda_args &args, uint64_t groups,
                                         uint64_t step) {
        row += rows;
        if (row < end) {
            rows = (uint32_t)min(end - row, (uint64_t)args.tile_rows);
        } else {
            group += step;
            open(args, groups);
        }
    }
};

} /* namespace logits_short */
#endif
