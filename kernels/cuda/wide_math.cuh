/* wide_math.cuh - exponentials, logarithms and reciprocals in FP64 without a branch: those of
 * several classes are computed side by side, where the library's functions would wait for one at a
 * time. No memory, no threads. */
#ifndef KLD_KERNELS_CUDA_WIDE_MATH_CUH
#define KLD_KERNELS_CUDA_WIDE_MATH_CUH

#include "kernels/cuda/logits_math.cuh"

/* 2^(x scale) to 1e-12 of it, 1 of 0 exactly; for |x scale| <= 1000. */
static __device__ __forceinline__ double wide_power(double x, double scale) {
    const double round = 6755399441055744.0; /* 1.5 * 2^52: its last bits are the whole number */
    double at = fma(x, scale, round), r = fma(x, scale, -(at - round));
    /* 2^r on [-1/2, 1/2], minimax */
    double y = fma(r, 1.317893563986946e-6, 1.5309156112425249e-5);
    y = fma(y, r, 1.5403825451524313e-4);
    y = fma(y, r, 1.3333454860787013e-3);
    y = fma(y, r, 9.6181286161417127e-3);
    y = fma(y, r, 5.5504109352660924e-2);
    y = fma(y, r, 0.24022650698110506);
    y = fma(y, r, 0.69314718054821234);
    y = fma(y, r, 1.0);
    int power = (int)((uint32_t)(int)__double_as_longlong(at) << 20);
    return __hiloint2double(__double2hiint(y) + power, (int)__double_as_longlong(y));
}

/* 2^r on [-1/2, 1/2], minimax, to 2e-16 of it, the highest power first. As numbers they would be
 * moved to registers before they are used, one instruction for each half; from constant memory an
 * instruction takes them as they are. (Where several classes share the moves that is slower:
 * logits_short_wide.cuh, by up to a third.) */
static __constant__ double WIDE_POWER[11] = {7.0372791317480845e-9,
                                             1.0208537903289228e-7,
                                             1.3215662834036175e-6,
                                             1.5252658116550125e-5,
                                             1.54035299611317e-4,
                                             1.3333558228561526e-3,
                                             9.618129108034593e-3,
                                             5.550410866445883e-2,
                                             0.24022650695908768,
                                             0.6931471805599497,
                                             1.0};

/* 2^(x scale) to 3e-16 of it; for |x scale| <= 1000. */
static __device__ __forceinline__ double wide_power_finely(double x, double scale) {
    const double round = 6755399441055744.0;
    double at = fma(x, scale, round), r = fma(x, scale, -(at - round));
    double y = fma(r, WIDE_POWER[0], WIDE_POWER[1]);
#pragma unroll
    for (int i = 2; i < 11; i++)
        y = fma(y, r, WIDE_POWER[i]);
    int power = (int)((uint32_t)(int)__double_as_longlong(at) << 20);
    return __hiloint2double(__double2hiint(y) + power, (int)__double_as_longlong(y));
}

/* 1 / x for normal x, to some steps of FP64. */
static __device__ __forceinline__ double wide_inverse(double x) {
    double y = reciprocal_wide(x), e = fma(-x, y, 1.0);
    e = fma(e, e, e);
    return fma(y, e, y);
}

/* ln x for normal x > 0, to 3e-14 of it; less: x - 1, as exactly as it is known. */
static __device__ __forceinline__ double wide_ln(double x, double less) {
    int power = (__double2hiint(x) - 0x3fe6a09e) & (int)0xfff00000; /* x in 2^k [0.7, 1.4) */
    x = __hiloint2double(__double2hiint(x) - power, (int)__double_as_longlong(x));
    double s = (power == 0 ? less : x - 1.0) * wide_inverse(x + 1.0), z = __dmul_rn(s, s);
    /* 2 atanh(s) / s for |s| <= 0.1717, minimax */
    double y = fma(z, 0.19611303795104115, 0.22174030068385551);
    y = fma(y, z, 0.28572171388841956);
    y = fma(y, z, 0.39999994841135105);
    y = fma(y, z, 0.66666666679749457);
    y = fma(y, z, 1.9999999999999463);
    /* The whole number k + 2^31 as the last bits of 1.5 * 2^52. */
    double k = __hiloint2double(0x43380000, power >> 20 ^ (int)0x80000000) - 6755401588539392.0;
    return fma(k, LN_2, __dmul_rn(s, y));
}

/* x as a double, where it is 0 or normal and not negative: of 0 some 1e-38. It takes turns with
 * what the units of conversions have to do. */
static __device__ __forceinline__ double wide_of(float x) {
    uint32_t bits = __float_as_uint(x);
    return __hiloint2double((int)((bits >> 3) + 0x38000000u), (int)(bits << 29));
}

/* (x - 1 + e^-x) / x^2 for |x| <= WIDE_NEAR, to 1e-12 of it. */
#define WIDE_NEAR 0.35
static __device__ __forceinline__ double wide_excess(double x) {
    double y = fma(x, -2.757775407433625e-6, 2.4869134553529701e-5);
    y = fma(y, x, -1.9841310646994628e-4);
    y = fma(y, x, 1.3888837210916478e-3);
    y = fma(y, x, -8.3333332910924482e-3);
    y = fma(y, x, 4.1666666793083327e-2);
    y = fma(y, x, -0.16666666666744472);
    return fma(y, x, 0.49999999999951742);
}

#endif
