/* ptx.cuh - for a host: what kernels/cuda/ptx.cuh has in assembler. Approximations are rounded to
 * the nearest; with KLD_EMULATE_ROUGH=1 they are as far off as the hardware's may be, up or down as
 * the number falls, which is more than they mostly are. */
#ifndef KLD_KERNELS_CUDA_PTX_CUH
#define KLD_KERNELS_CUDA_PTX_CUH

#include "tests/emulate/cuda.h"

#ifndef KLD_EMULATE_ROUGH
#define KLD_EMULATE_ROUGH 0
#endif

/* Subnormal numbers are 0. */
static inline float emulate_flushed(float x) {
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}
/* x as the hardware might have it: so many units in the last place beside. */
static inline float emulate_rough(float x, int units) {
    if (!KLD_EMULATE_ROUGH || std::fpclassify(x) != FP_NORMAL)
        return emulate_flushed(x);
    uint32_t bits = __float_as_uint(x);
    float beside = __uint_as_float(bits + ((bits * 0x9e3779b1u) >> 31 ? units : -units));
    return std::fpclassify(beside) == FP_NORMAL ? beside : x;
}

static inline float reciprocal(float x) {
    return emulate_rough((float)(1.0 / (double)emulate_flushed(x)), 1);
}
/* The lower half is 0. */
static inline double reciprocal_wide(double x) {
    return __hiloint2double(__double2hiint(1.0 / __hiloint2double(__double2hiint(x), 0)), 0);
}
/* Near 1 by 2e-7, which is more than a unit there. */
static inline float log2_fast(float x) {
    float y = emulate_rough((float)std::log2((double)emulate_flushed(x)), 1);
    bool up = (__float_as_uint(x) * 0x9e3779b1u) >> 31;
    return KLD_EMULATE_ROUGH && x != 1.0f && std::fabs(y) < 1.0f ? y + (up ? 2e-7f : -2e-7f) : y;
}
/* Whole powers are exact. */
static inline float exp2_fast(float x) {
    float y = (float)std::exp2((double)emulate_flushed(x));
    return x == std::floor(x) ? emulate_flushed(y) : emulate_rough(y, 2);
}
static inline float max_nan(float a, float b) { return isnan(a) || isnan(b) ? NAN : a > b ? a : b; }
static inline float pick(bool first, float a, float b) { return first ? a : b; }
static inline uint32_t thread_again() { return threadIdx.x; }
static inline uint32_t lanes_before() { return (1u << threadIdx.x % 32) - 1; }

static inline uint4 *dynamic_shared() { return (uint4 *)emulate_shared; }
static inline uint32_t shared_at(const void *at) { return emulate_shared_at(at); }
static inline float load_shared_float(uint32_t at) { return *(const float *)emulate_shared_of(at); }
static inline float4 load_shared_float4(uint32_t at) {
    return *(const float4 *)emulate_shared_of(at);
}
static inline uint4 load_shared(uint32_t at) { return *(const uint4 *)emulate_shared_of(at); }
static inline void store_shared(uint32_t at, const uint4 &x) {
    *(uint4 *)emulate_shared_of(at) = x;
}

template <bool FIRST_TOO> static inline uint4 load_evict_last(const uint4 *at) { return *at; }
static inline void prefetch_l2(const void *) {}

static inline void copy_16(uint32_t to, const void *from) {
    emulate_copy(emulate_shared_of(to), from, 16, 16);
}
static inline void copy_piece(void *to, const void *from, uint32_t bytes) {
    emulate_copy(to, from, bytes, 16);
}
static inline void copies_end() { emulate_copies_end(); }
template <int GROUPS> static inline void copies_wait() { emulate_copies_wait(GROUPS); }

template <int NAME> static inline void block_sync(uint32_t threads) {
    emulate_block_sync(NAME, threads);
}

#endif
