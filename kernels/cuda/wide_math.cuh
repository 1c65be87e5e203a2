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
