/* row.cuh - what every row kernel shares: how a block walks its group of rows, how the threads of a
 * team add up, how 16 bytes of a row are loaded and stored.
 *
 * Order. Thread t of a team of n holds the elements [(k n + t) V, (k n + t + 1) V), k = 0, 1, ...,
 * and every sum runs over them in one fixed tree. All of it follows from C and the dtype: an
 * unaligned row is loaded in narrower pieces, but by the same threads, so its bits are the same. */
#ifndef KLD_KERNELS_CUDA_ROW_CUH
#define KLD_KERNELS_CUDA_ROW_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/start.cuh"

#define KLD_FULL_WARP 0xffffffffu

/* Shared memory for one block-wide sum: three values of each of 32 warps, and the result. */
struct team_shared {
    double sum[3][32];
    double result[3];
};

/* The threads that share a row. size is a power of 2 up to 32, or whole warps, as many as a power
 * of 2. */
struct team {
    unsigned lane, size;
    unsigned mask; /* the lanes of this warp that belong to the team */
    team_shared *shared;
    unsigned name = 0; /* of the barrier of a team of warps: 0 to 2 */

    template <int COUNT> __device__ void sum(double (&value)[COUNT]) const {
        unsigned width = size < 32 ? size : 32;
        for (unsigned step = width / 2; step; step /= 2)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                value[i] += __shfl_xor_sync(mask, value[i], step);
        if (size <= 32)
            return;
        combine(value, [](double a, double b) { return a + b; });
    }
    template <class REAL, int COUNT> __device__ void max(REAL (&value)[COUNT]) const {
        unsigned width = size < 32 ? size : 32;
        for (unsigned step = width / 2; step; step /= 2)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                value[i] = fmax(value[i], __shfl_xor_sync(mask, value[i], step));
        if (size <= 32)
            return;
        double wide[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            wide[i] = value[i];
        combine(wide, [](double a, double b) { return fmax(a, b); });
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            value[i] = (REAL)wide[i];
    }

  private:
    /* The team only: a block may have other threads. The names are constants: a kernel with one
     * that is not takes all 16 of its block, and a multiprocessor has 64. */
    __device__ void wait() const {
        if (name == 0)
            block_sync<0>(size);
        else if (name == 1)
            block_sync<1>(size);
        else
            block_sync<2>(size);
    }
    /* Warp results to one value for the block; the number of warps is a power of 2. */
    template <int COUNT, class OP> __device__ void combine(double (&value)[COUNT], OP op) const {
        unsigned warps = size / 32, warp = lane / 32;
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                shared->sum[i][warp] = value[i];
        wait();
        if (warp == 0) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                double x = shared->sum[i][threadIdx.x % warps];
                for (unsigned step = warps / 2; step; step /= 2)
                    x = op(x, __shfl_xor_sync(KLD_FULL_WARP, x, step));
                if (lane == 0)
                    shared->result[i] = x;
            }
        }
        /* Also keeps the next sum's warps from overwriting what warp 0 still reads. */
        wait();
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            value[i] = shared->result[i];
    }
};

/* What a row's kernel body gets to know. */
struct row {
    const char *p, *q;
    char *grad_p, *grad_q; /* NULL: not asked for */
    const char *go;        /* grad_output of each element, or NULL */
    char *loss;            /* loss of each element, or NULL */
    double gradient;       /* factor of the gradients */
    double weight;         /* w * scale, of the loss */
    uint64_t classes;
};

static __device__ __forceinline__ double load_double(const char *at, uint32_t dtype) {
    switch (dtype) {
    case KLD_DTYPE_FP64: return *(const double *)at;
    case KLD_DTYPE_FP16: return (double)__half2float(*(const __half *)at);
    case KLD_DTYPE_BF16: return (double)__bfloat162float(*(const __nv_bfloat16 *)at);
    default: return (double)*(const float *)at;
    }
}

static __device__ __forceinline__ void store_double(char *at, uint32_t dtype, double value) {
    switch (dtype) {
    case KLD_DTYPE_FP64: *(double *)at = value; break;
    case KLD_DTYPE_FP16: *(__half *)at = __double2half(value); break;
    case KLD_DTYPE_BF16: *(__nv_bfloat16 *)at = __double2bfloat16(value); break;
    default: *(float *)at = (float)value;
    }
}

static __host__ __device__ __forceinline__ uint32_t dtype_bytes(uint32_t dtype) {
    return dtype == KLD_DTYPE_FP64 ? 8 : dtype == KLD_DTYPE_FP32 ? 4 : 2;
}

static __device__ void zero_row(char *at, uint32_t dtype, uint64_t classes, const team &team) {
    if (at)
        for (uint64_t i = team.lane; i < classes; i += team.size)
            store_double(at + i * dtype_bytes(dtype), dtype, 0.0);
}

static __device__ __forceinline__ char *at_row(const kld_cuda_tensor &tensor, uint64_t index) {
    return tensor.at ? tensor.at + index * tensor.stride_bytes : nullptr;
}

/* Of a row: does it count? A masked one is not read. */
static __device__ __forceinline__ bool row_is_masked(const kld_cuda_args &args, uint64_t index) {
    if (args.masked)
        return args.masked[index / 32] >> index % 32 & 1;
    return args.mask.at && *at_row(args.mask, index) == 0;
}
/* The same to all threads of a team, whatever its owner writes to the mask meanwhile: those that
 * disagree would wait for each other for ever. */
static __device__ __forceinline__ bool row_is_masked(const kld_cuda_args &args, uint64_t index,
                                                     const team &team) {
    if (!args.mask.at)
        return false;
    double found[1] = {team.lane == 0 && row_is_masked(args, index) ? 1.0 : 0.0};
    team.sum(found);
    return found[0] != 0;
}

/* Where the parts of an unmasked row lie, and its factors. */
static __device__ __forceinline__ row row_open(const kld_cuda_args &args, uint64_t index) {
    row row;
    double divisor = args.divisor != 0 ? args.divisor : args.scratch->divisor;
    double weight = args.weights.at ? (double)*(const float *)at_row(args.weights, index) : 1.0;
    row.classes = args.classes;
    row.p = at_row(args.p, index);
    row.q = at_row(args.q, index);
    row.grad_p = divisor != 0 ? at_row(args.grad_p, index) : nullptr;
    row.grad_q = divisor != 0 ? at_row(args.grad_q, index) : nullptr;
    row.loss = args.loss_extent == KLD_CUDA_ELEMENTS ? at_row(args.loss, index) : nullptr;
    row.weight = weight * args.scale;
    row.gradient = args.gradient_scale * weight / divisor;
    row.go = nullptr;
    if (args.grad_output_extent == KLD_CUDA_ELEMENTS)
        row.go = at_row(args.grad_output, index);
    else if (args.grad_output.at)
        row.gradient *= load_double(
            at_row(args.grad_output, args.grad_output_extent == KLD_CUDA_ROWS ? index : 0),
            args.grad_output.dtype);
    return row;
}

/* Zeros where a masked row's outputs lie, and the gradients where weights sum to 0. Last: a
 * gradient may lie over what was read. */
static __device__ __forceinline__ void row_zero(const kld_cuda_args &args, uint64_t index,
                                                bool masked, const team &team) {
    double divisor = args.divisor != 0 ? args.divisor : args.scratch->divisor;
    if (masked && args.loss_extent == KLD_CUDA_ELEMENTS)
        zero_row(at_row(args.loss, index), args.loss.dtype, args.classes, team);
    if (masked || divisor == 0) {
        zero_row(at_row(args.grad_p, index), args.grad_p.dtype, args.classes, team);
        zero_row(at_row(args.grad_q, index), args.grad_q.dtype, args.classes, team);
    }
}

static __device__ __forceinline__ void row_store(const kld_cuda_args &args, uint64_t index,
                                                 double value) {
    if (args.row_loss.at)
        store_double(at_row(args.row_loss, index), args.row_loss.dtype, value);
    if (args.loss_extent == KLD_CUDA_ROWS && args.loss.at)
        store_double(at_row(args.loss, index), args.loss.dtype, value);
}

/* One row from its index. Returns w * scale * value. */
template <class BODY>
static __device__ double do_row(const kld_cuda_args &args, uint64_t index, const team &team) {
    bool masked = row_is_masked(args, index, team);
    double value = 0;
    if (!masked) {
        row row = row_open(args, index);
        value = BODY::value(args, row, team) * row.weight;
    }
    row_zero(args, index, masked, team);
    if (team.lane == 0)
        row_store(args, index, value);
    return value;
}

/* One block: the rows of one group. Slot s of the block takes rows s, s + slots, ... of it. */
template <class BODY> static __device__ void do_group(const kld_cuda_args &args) {
    __shared__ team_shared shared;
    team team;
    team.size = args.team;
    team.lane = threadIdx.x % args.team;
    team.mask = args.team >= 32
                    ? KLD_FULL_WARP
                    : ((1u << args.team) - 1) << (threadIdx.x % 32 / args.team * args.team);
    team.shared = &shared;
    uint64_t first = blockIdx.x * args.group_rows;
    uint64_t end = min(first + args.group_rows, args.rows);
    double total[1] = {0};
    for (uint64_t index = first + threadIdx.x / args.team; index < end;
         index += blockDim.x / args.team)
        total[0] += do_row<BODY>(args, index, team);
    if (team.lane != 0)
        total[0] = 0;
    __syncthreads();
    team.lane = threadIdx.x;
    team.size = blockDim.x;
    team.mask = KLD_FULL_WARP;
    team.sum(total);
    if (threadIdx.x == 0)
        args.scratch->partial[args.first_group + blockIdx.x] = total[0];
}

/* ---- 16 bytes of a row, as float --------------------------------------------------------------
 */

template <class T> struct packet { static constexpr int V = 16 / sizeof(T); };

static __device__ __forceinline__ void unpack(const uint4 &raw, float (&x)[4]) {
    x[0] = __uint_as_float(raw.x);
    x[1] = __uint_as_float(raw.y);
    x[2] = __uint_as_float(raw.z);
    x[3] = __uint_as_float(raw.w);
}
template <class T> static __device__ __forceinline__ void unpack2(unsigned raw, float &a, float &b);
template <>
__device__ __forceinline__ void unpack2<__nv_bfloat16>(unsigned raw, float &a, float &b) {
    a = __uint_as_float(raw << 16);
    b = __uint_as_float(raw & 0xffff0000u);
}
template <> __device__ __forceinline__ void unpack2<__half>(unsigned raw, float &a, float &b) {
    float2 both = __half22float2(*reinterpret_cast<const __half2 *>(&raw));
    a = both.x;
    b = both.y;
}
template <class T>
static __device__ __forceinline__ void unpack(const uint4 &raw, float (&x)[packet<T>::V]) {
    if constexpr (sizeof(T) == 4) {
        unpack(raw, x);
    } else {
        unpack2<T>(raw.x, x[0], x[1]);
        unpack2<T>(raw.y, x[2], x[3]);
        unpack2<T>(raw.z, x[4], x[5]);
        unpack2<T>(raw.w, x[6], x[7]);
    }
}

template <class T> static __device__ __forceinline__ T to(float x);
template <> __device__ __forceinline__ float to<float>(float x) { return x; }
template <> __device__ __forceinline__ __half to<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 to<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

template <class T> static __device__ __forceinline__ bool aligned16(const void *at) {
    return ((uintptr_t)at & 15) == 0;
}

/* Elements [at, at + V) of a row; those at C and beyond are pad. */
template <class T>
static __device__ __forceinline__ uint4 load_edge(const T *from, uint64_t at, uint64_t classes,
                                                  T pad) {
    constexpr int V = packet<T>::V;
    alignas(16) T x[V];
#pragma unroll
    for (int i = 0; i < V; i++)
        x[i] = at + i < classes ? from[at + i] : pad;
    return *reinterpret_cast<uint4 *>(x);
}
/* Not marked to leave the caches first, though nobody reads it again, and nor is what is stored:
 * the second-level cache would keep what others' kernels have left in it, and have little room to
 * put writes together. */
template <class T> static __device__ __forceinline__ uint4 load_full(const T *from, uint64_t at) {
    return *reinterpret_cast<const uint4 *>(from + at);
}

template <class T>
static __device__ __forceinline__ void store(T *to_row, uint64_t at, uint64_t classes, bool whole,
                                             const float (&x)[packet<T>::V]) {
    constexpr int V = packet<T>::V;
    alignas(16) T y[V];
#pragma unroll
    for (int i = 0; i < V; i++)
        y[i] = to<T>(x[i]);
    if (whole && at + V <= classes) {
        *reinterpret_cast<uint4 *>(to_row + at) = *reinterpret_cast<uint4 *>(y);
    } else {
#pragma unroll
        for (int i = 0; i < V; i++)
            if (at + i < classes)
                to_row[at + i] = y[i];
    }
}

#endif
