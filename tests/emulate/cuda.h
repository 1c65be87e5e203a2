/* cuda.h - CUDA C++ for a C++ compiler, as far as the kernels use it: included before each of their
 * sources (-include). With the headers beside it, which are found before those of kernels/cuda, the
 * same sources run on machine.h's threads. Arithmetic is IEEE's; approximations are in ptx.cuh. */
#ifndef KLD_TESTS_EMULATE_CUDA_H
#define KLD_TESTS_EMULATE_CUDA_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include "tests/emulate/machine.h"

#undef __constant__
#undef __device__
#undef __global__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __noinline__
#define __device__
#define __global__
#define __constant__ const
#define __shared__ static __thread
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __CUDA_ARCH__ 900

/* Objects and no macros: fields of cudaLaunchConfig_t have such names. */
template <emulate_size emulate_place::*OF> struct emulate_builtin {
    struct {
        operator uint32_t() const { return (emulate_here->*OF).x; }
    } x;
};
static const emulate_builtin<&emulate_place::thread> threadIdx = {};
static const emulate_builtin<&emulate_place::block> blockIdx = {};
static const emulate_builtin<&emulate_place::threads> blockDim = {};
static const emulate_builtin<&emulate_place::blocks> gridDim = {};

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

/* ---- Launches ------------------------------------------------------------------------------- */

template <class... PARAMETERS, class... ARGUMENTS>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config,
                                             void (*kernel)(PARAMETERS...),
                                             ARGUMENTS &&...arguments) {
    auto call = [&] { kernel(arguments...); };
    emulate_launch launch = {};
    launch.threads = {config->blockDim.x, config->blockDim.y, config->blockDim.z};
    launch.blocks = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
    launch.cluster = 1;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            launch.cluster = config->attrs[i].val.clusterDim.x;
    launch.shared_bytes = config->dynamicSmemBytes;
    launch.run = [](void *user) { (*(decltype(call) *)user)(); };
    launch.user = &call;
    return (cudaError_t)emulate_run(&launch);
}
template <class KERNEL>
static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *ret_attributes, KERNEL *) {
    *ret_attributes = {};
    ret_attributes->ptxVersion = 90;
    return cudaSuccess;
}
template <class KERNEL>
static inline cudaError_t cudaFuncSetAttribute(KERNEL *, cudaFuncAttribute, int) {
    return cudaSuccess;
}
/* Few: a block then has several rows one after the other, as on a card that is full. */
template <class KERNEL>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *ret_blocks, KERNEL *,
                                                                        int, size_t) {
    *ret_blocks = 1;
    return cudaSuccess;
}
template <class KERNEL>
static inline cudaError_t cudaOccupancyMaxActiveClusters(int *ret_clusters, KERNEL *,
                                                         const cudaLaunchConfig_t *) {
    *ret_clusters = 2;
    return cudaSuccess;
}

/* ---- Of a warp ------------------------------------------------------------------------------ */

/* Where: two lanes may not meet in different places. */
#define EMULATE_TEXT_(x) #x
#define EMULATE_TEXT(x) EMULATE_TEXT_(x)
#define EMULATE_WHERE(what) what " in " __FILE__ ":" EMULATE_TEXT(__LINE__)
#define __syncwarp(...) emulate_syncwarp(EMULATE_WHERE("__syncwarp()"), ##__VA_ARGS__)
#define __shfl_xor_sync(...) emulate_shuffle_xor(EMULATE_WHERE("__shfl_xor_sync()"), __VA_ARGS__)
#define __shfl_sync(...) emulate_shuffle(EMULATE_WHERE("__shfl_sync()"), __VA_ARGS__)
#define __ballot_sync(...) emulate_ballot(EMULATE_WHERE("__ballot_sync()"), __VA_ARGS__)
#define __any_sync(...) emulate_any(EMULATE_WHERE("__any_sync()"), __VA_ARGS__)
#define __reduce_max_sync(...) emulate_max(EMULATE_WHERE("__reduce_max_sync()"), __VA_ARGS__)
#define __reduce_add_sync(...) emulate_add(EMULATE_WHERE("__reduce_add_sync()"), __VA_ARGS__)

static inline void emulate_syncwarp(const char *where, uint32_t mask = UINT32_MAX) {
    emulate_meet(mask, where, 0);
}
static inline void __syncthreads() { emulate_block_sync(0, blockDim.x); }

template <class T> static inline uint64_t emulate_bits(T value) {
    static_assert(sizeof(T) <= 8, "a value of a lane");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T> static inline T emulate_value(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T>
static inline T emulate_shuffle_xor(const char *where, uint32_t mask, T value, uint32_t other,
                                    uint32_t width = 32) {
    uint32_t lane = threadIdx.x % 32, from = lane ^ other;
    const emulate_met *met = emulate_meet(mask, where, emulate_bits(value));
    return emulate_value<T>(emulate_value_of(met, from / width > lane / width ? lane : from));
}
template <class T>
static inline T emulate_shuffle(const char *where, uint32_t mask, T value, uint32_t lane,
                                uint32_t width = 32) {
    const emulate_met *met = emulate_meet(mask, where, emulate_bits(value));
    return emulate_value<T>(emulate_value_of(met, threadIdx.x % 32 / width * width + lane % width));
}
/* Of all that came. */
template <class T, class OP>
static inline T emulate_reduce(const char *where, uint32_t mask, T value, T first, OP op) {
    const emulate_met *met = emulate_meet(mask, where, emulate_bits(value));
    for (uint32_t lane = 0; lane < 32; lane++)
        if (met->lanes >> lane & 1)
            first = op(first, emulate_value<T>(met->value[lane]));
    return first;
}
static inline uint32_t emulate_ballot(const char *where, uint32_t mask, bool mine) {
    return emulate_reduce(where, mask, mine ? 1u << threadIdx.x % 32 : 0u, 0u,
                          [](uint32_t a, uint32_t b) { return a | b; });
}
static inline bool emulate_any(const char *where, uint32_t mask, bool mine) {
    return emulate_ballot(where, mask, mine) != 0;
}
template <class T> static inline T emulate_max(const char *where, uint32_t mask, T value) {
    return emulate_reduce(where, mask, value, value, [](T a, T b) { return a > b ? a : b; });
}
template <class T> static inline T emulate_add(const char *where, uint32_t mask, T value) {
    return emulate_reduce(where, mask, value, (T)0, [](T a, T b) { return (T)(a + b); });
}
template <class T> static inline T atomicAdd(T *at, T value) {
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}

/* ---- Memory --------------------------------------------------------------------------------- */

template <class T> static inline T __ldcs(const T *at) { return *at; }
template <class T> static inline void __stcs(T *at, T value) { *at = value; }

/* ---- Numbers -------------------------------------------------------------------------------- */

/* Not to be put together with what is done with it. */
static inline float emulate_apart(float x) {
    asm("" : "+x"(x));
    return x;
}
static inline double emulate_apart(double x) {
    asm("" : "+x"(x));
    return x;
}
static inline float __fmul_rn(float a, float b) { return emulate_apart(a * b); }
static inline float __fadd_rn(float a, float b) {
    return emulate_apart(emulate_apart(a) + emulate_apart(b));
}
/* Rounded up. */
static inline float __fsub_ru(float a, float b) {
    double exact = (double)a - (double)b;
    float near = (float)exact;
    return (double)near < exact ? std::nextafter(near, INFINITY) : near;
}
static inline double __dmul_rn(double a, double b) { return emulate_apart(a * b); }

static inline float __int_as_float(int x) { return emulate_value<float>(emulate_bits(x)); }
static inline float __uint_as_float(uint32_t x) { return emulate_value<float>(x); }
static inline int __float_as_int(float x) { return emulate_value<int>(emulate_bits(x)); }
static inline uint32_t __float_as_uint(float x) { return emulate_value<uint32_t>(emulate_bits(x)); }
static inline double __longlong_as_double(long long x) {
    return emulate_value<double>((uint64_t)x);
}
static inline long long __double_as_longlong(double x) { return (long long)emulate_bits(x); }
static inline int __double2hiint(double x) { return (int)(emulate_bits(x) >> 32); }
static inline double __hiloint2double(int high, int low) {
    return emulate_value<double>((uint64_t)(uint32_t)high << 32 | (uint32_t)low);
}
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t bits) {
    return (uint32_t)(((uint64_t)high << 32 | low) >> (bits & 31));
}
static inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t which) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++)
        result |= (uint32_t)(bytes >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

template <class A, class B> static inline typename std::common_type<A, B>::type min(A a, B b) {
    typedef typename std::common_type<A, B>::type T;
    return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B> static inline typename std::common_type<A, B>::type max(A a, B b) {
    typedef typename std::common_type<A, B>::type T;
    return (T)a < (T)b ? (T)b : (T)a;
}

/* Of 16 bits, twice. */
template <class OP> static inline uint32_t emulate_halves(uint32_t a, uint32_t b, OP op) {
    return (uint32_t)(uint16_t)op((uint16_t)a, (uint16_t)b) |
           (uint32_t)(uint16_t)op((uint16_t)(a >> 16), (uint16_t)(b >> 16)) << 16;
}
static inline uint32_t emulate_sum_u16x2(uint32_t a, uint32_t b) {
    return emulate_halves(a, b, [](uint16_t x, uint16_t y) { return x + y; });
}
static inline uint32_t __viaddmax_u16x2(uint32_t a, uint32_t b, uint32_t c) {
    return emulate_halves(emulate_sum_u16x2(a, b), c,
                          [](uint16_t x, uint16_t y) { return x > y ? x : y; });
}
static inline uint32_t __viaddmin_u16x2(uint32_t a, uint32_t b, uint32_t c) {
    return emulate_halves(emulate_sum_u16x2(a, b), c,
                          [](uint16_t x, uint16_t y) { return x < y ? x : y; });
}

#endif
