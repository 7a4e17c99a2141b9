/* Vectors of 16 floats by GCC's vector extension: one zmm register, two ymm, four neon. Where the compiler
 * has AVX-512 or AVX2, masked loads, rounding and reciprocals are theirs. Errors in units of the last place (ulp)
 * were measured against float64 over the stated range. NaN passes through everything. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <stdlib.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef float F __attribute__((may_alias));
typedef int32_t I32 __attribute__((may_alias));
typedef float V __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(64), aligned(4), may_alias));
#define INL static inline __attribute__((always_inline))

INL V bc(float x) { return (V){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INL I bi(int32_t x) { return (I){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INL V ld(const F *p) { return *(const V *)p; }
INL void st(F *p, V x) { *(V *)p = x; }
#if defined(__AVX512F__)
INL V ldn(const F *p, int n) { return (V)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
INL V ldf(const F *p, int n, float fill) {
    return (V)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), (__mmask16)((1u << n) - 1), p);
}
INL void stn(F *p, V x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x); }
INL V gat(const F *p, int s) {
    __m512i at = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(s));
    return (V)_mm512_i32gather_ps(at, p, 4);
}
INL V gatn(const F *p, int s, int n, float fill) {
    __m512i at = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(s));
    return (V)_mm512_mask_i32gather_ps(_mm512_set1_ps(fill), (__mmask16)((1u << n) - 1), at, p, 4);
}
INL V sel(I m, V a, V b) { return (V)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)m), (__m512)b, (__m512)a); }
/* of two numbers the second is kept where either is not a number: so write the unknown one second */
INL V max2(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }
INL V min2(V a, V b) { return (V)_mm512_min_ps((__m512)a, (__m512)b); }
INL V vsqrt(V x) { return (V)_mm512_sqrt_ps((__m512)x); }
INL V vfloor(V x) { return (V)_mm512_roundscale_ps((__m512)x, 0x09); }
INL V vceil(V x) { return (V)_mm512_roundscale_ps((__m512)x, 0x0A); }
INL V vround(V x) { return (V)_mm512_roundscale_ps((__m512)x, 0x08); }
INL V vtrunc(V x) { return (V)_mm512_roundscale_ps((__m512)x, 0x0B); }
INL V scale2(V x, V n) { return (V)_mm512_scalef_ps((__m512)x, (__m512)n); }
/* 1 / y for 2^-120 < |y| < 2^120: 14 bits, then one Newton step; 1 ulp */
INL V recip(V y) {
    V r = (V)_mm512_rcp14_ps((__m512)y);
    return r + r * (1.0f - y * r);
}
INL float hsum(V x) { return _mm512_reduce_add_ps((__m512)x); }
INL float hmax(V x) { return _mm512_reduce_max_ps((__m512)x); }
INL float hmin(V x) { return _mm512_reduce_min_ps((__m512)x); }
#else
INL V ldf(const F *p, int n, float fill) {
    V x = bc(fill);
    for (int i = 0; i < n; i++) x[i] = p[i];
    return x;
}
INL V gat(const F *p, int s) {
    V x;
    for (int i = 0; i < 16; i++) x[i] = p[i * s];
    return x;
}
INL V gatn(const F *p, int s, int n, float fill) {
    V x = bc(fill);
    for (int i = 0; i < n; i++) x[i] = p[i * s];
    return x;
}
INL V sel(I m, V a, V b) { return (V)((m & (I)a) | (~m & (I)b)); }
#if defined(__AVX2__)
typedef union { V v; __m256 h[2]; } HALVES;
INL __m256i mask8(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
}
INL V ldn(const F *p, int n) {
    HALVES x;
    x.h[0] = n >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, mask8(n));
    x.h[1] = n > 8 ? _mm256_maskload_ps(p + 8, mask8(n - 8)) : _mm256_setzero_ps();
    return x.v;
}
INL void stn(F *p, V v, int n) {
    HALVES x = {v};
    if (n >= 8) _mm256_storeu_ps(p, x.h[0]);
    else _mm256_maskstore_ps(p, mask8(n), x.h[0]);
    if (n > 8) _mm256_maskstore_ps(p + 8, mask8(n - 8), x.h[1]);
}
#define EACH(f) HALVES x = {a}, y = {b}; x.h[0] = f(x.h[0], y.h[0]); x.h[1] = f(x.h[1], y.h[1]); return x.v
#define ALONE(...) HALVES x = {a}; for (int i = 0; i < 2; i++) { __m256 h = x.h[i]; x.h[i] = __VA_ARGS__; } return x.v
INL V max2(V a, V b) { EACH(_mm256_max_ps); }
INL V min2(V a, V b) { EACH(_mm256_min_ps); }
INL V vsqrt(V a) { ALONE(_mm256_sqrt_ps(h)); }
INL V vfloor(V a) { ALONE(_mm256_floor_ps(h)); }
INL V vceil(V a) { ALONE(_mm256_ceil_ps(h)); }
INL V vround(V a) { ALONE(_mm256_round_ps(h, 0x08)); }
INL V vtrunc(V a) { ALONE(_mm256_round_ps(h, 0x0B)); }
#else
INL V ldn(const F *p, int n) { return ldf(p, n, 0.0f); }
INL void stn(F *p, V x, int n) { for (int i = 0; i < n; i++) p[i] = x[i]; }
INL V max2(V a, V b) { return sel((I)(a > b), a, b); }
INL V min2(V a, V b) { return sel((I)(a < b), a, b); }
INL V vsqrt(V a) { for (int i = 0; i < 16; i++) a[i] = __builtin_sqrtf(a[i]); return a; }
INL V magnitude(V x) { return (V)((I)x & bi(0x7fffffff)); }
/* whole from 2^23 on */
INL V vround(V x) {
    V big = sel((I)(x < 0.0f), bc(-8388608.0f), bc(8388608.0f));
    return sel((I)(magnitude(x) < 8388608.0f), x + big - big, x);
}
INL V vtrunc(V x) { V r = vround(x); return r - sel((I)(magnitude(r) > magnitude(x)), sel((I)(x < 0.0f), bc(-1), bc(1)), bc(0)); }
INL V vfloor(V x) { V r = vround(x); return r - sel((I)(r > x), bc(1), bc(0)); }
INL V vceil(V x) { V r = vround(x); return r + sel((I)(r < x), bc(1), bc(0)); }
#endif
/* in two factors, so that neither exponent overflows; |n| < 252 */
INL V scale2(V x, V n) {
    I k = __builtin_convertvector(n, I), half = k >> 1;
    return x * (V)((half + 127) << 23) * (V)((k - half + 127) << 23);
}
INL V recip(V y) { return 1.0f / y; }
INL float hsum(V x) {
    float s[8];
    for (int i = 0; i < 8; i++) s[i] = x[i] + x[i + 8];
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}
INL float hmax(V x) { float m = x[0]; for (int i = 1; i < 16; i++) m = x[i] > m ? x[i] : m; return m; }
INL float hmin(V x) { float m = x[0]; for (int i = 1; i < 16; i++) m = x[i] < m ? x[i] : m; return m; }
#endif
INL void scat(F *p, int s, V x, int n) { for (int i = 0; i < n; i++) p[i * s] = x[i]; }

INL V vabs(V x) { return (V)((I)x & bi(0x7fffffff)); }
INL V vneg(V x) { return (V)((I)x ^ bi((int32_t)0x80000000)); }
/* not a number in either operand gives not a number, as in torch.maximum */
INL V vmax(V a, V b) { V m = max2(a, b); return sel((I)(a == a), m, a); }
INL V vmin(V a, V b) { V m = min2(a, b); return sel((I)(a == a), m, a); }
INL V vbool(I m) { return (V)(m & bi(0x3f800000)); }
INL V vsign(V x) { return sel((I)(x == x), vbool((I)(x > 0.0f)) - vbool((I)(x < 0.0f)), x); }

/* `value`, or not a number if any of x is not one */
INL float hkeep(V x, float value) {
    V bad = vbool((I)(x != x));
    return hmax(bad) > 0.0f ? __builtin_nanf("") : value;
}

/* exp(r) = 1 + expm1 on |r| <= ln2 / 2; minimax, relative error 1.4e-8 before rounding */
INL V small_expm1(V r) {
    V q = 0.001388257065f * r + 0.008366510009f;
    q = q * r + 0.041667198547f;
    q = q * r + 0.166665437062f;
    q = q * r + 0.499999981602f;
    return q * (r * r) + r;
}
INL V reduce_exp(V x, V *r) {
    V n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    *r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    return n;
}
/* 2 ulp on -87 … 88.7; 0 below, infinity above */
INL V vexp(V x) {
    V r, n;
    x = max2(bc(-104.0f), min2(bc(89.0f), x));
    n = reduce_exp(x, &r);
    return scale2(small_expm1(r) + 1.0f, n);
}
/* 3 ulp */
INL V vexpm1(V x) {
    V r, n, s;
    x = max2(bc(-30.0f), min2(bc(89.0f), x));
    n = reduce_exp(x, &r);
    /* half of it, so that 2^128 is not needed */
    s = scale2(bc(0.5f), n);
    return 2.0f * (s * small_expm1(r) + (s - 0.5f));
}
/* 4 ulp everywhere, also near 0: e / (e + 2) with e = exp(2x) - 1 */
INL V vtanh(V x) {
    V r, n, s, e;
    x = max2(bc(-10.0f), min2(bc(10.0f), x));
    n = reduce_exp(x + x, &r);
    s = (V)((__builtin_convertvector(n, I) + 127) << 23);
    e = s * small_expm1(r) + (s - 1.0f);
    return e * recip(e + 2.0f);
}
/* 3 ulp for x > -69; below that 1e-30 */
INL V vsigmoid(V x) {
    V r, n, s;
    x = max2(bc(-69.0f), min2(bc(69.0f), x));
    n = reduce_exp(-x, &r);
    s = (V)((__builtin_convertvector(n, I) + 127) << 23);
    return recip(1.0f + (s * small_expm1(r) + s));
}
INL V vsilu(V x) { return x * vsigmoid(x); }
/* 2 * atanh(s) on |s| <= 1/3; relative error 1e-8 before rounding */
INL V twice_atanh(V s) {
    V z = s * s, q = 0.102541139521f * z + 0.087682685989f;
    q = q * z + 0.111291457906f;
    q = q * z + 0.142852693580f;
    q = q * z + 0.200000038924f;
    q = q * z + 0.333333333285f;
    return 2.0f * (s * z * q + s);
}
/* 2 ulp for normal x > 0; -infinity at 0, not a number below */
INL V vlog(V x) {
    I bits = (I)x, shift = (bits - 0x3f3504f3) >> 23;
    V m = (V)(bits - (shift << 23)), e = __builtin_convertvector(shift, V);
    V y = twice_atanh((m - 1.0f) / (m + 1.0f));
    y = e * 0.693359375f + (e * -2.12194440e-4f + y);
    y = sel((I)(x < __builtin_inff()), y, x);
    y = sel((I)(x < 1.17549435e-38f), bc(-__builtin_inff()), y);
    return sel((I)(x < 0.0f), bc(__builtin_nanf("")), y);
}
INL V vlog1p(V x) {
    V w = 1.0f + x, y = vlog(w), near = twice_atanh(x / (2.0f + x));
    return sel((I)(vabs(x) < 0.4f), near, y);
}
/* max(x, 0) + log1p(exp(-|x|)); 2 ulp */
INL V vsoftplus(V x) {
    V u = vexp(vneg(vabs(x)));
    return max2(bc(0.0f), x) + twice_atanh(u / (2.0f + u));
}
/* erfc(z) = t exp(-z^2) P(t), t = 1 / (1 + z / 2), z >= 0; P minimax, relative error 4e-8 before rounding */
INL V verfc_positive(V z) {
    V t, q;
    z = min2(bc(10.0f), z);
    t = recip(1.0f + 0.5f * z);
    q = -0.059068757189f * t + 0.284573885938f;
    q = q * t - 0.487197426486f;
    q = q * t + 0.278063964363f;
    q = q * t - 0.026623133486f;
    q = q * t + 0.202685621166f;
    q = q * t + 0.243104131485f;
    q = q * t + 0.282375249626f;
    q = q * t + 0.282086421712f;
    return q * t * vexp(-z * z);
}
INL V verf(V x) {
    V z = vabs(x), y = 1.0f - verfc_positive(z), s = x * x, near;
    near = 1.1283791671f * x * (1.0f + s * (-0.3333333333f + s * (0.1f + s * (-0.0238095238f + s * 0.0046296296f))));
    return sel((I)(z < 0.4f), near, (V)((I)y | ((I)x & bi((int32_t)0x80000000))));
}
/* x times the normal distribution, 1e-6 relative also in the tail */
INL V vgelu(V x) {
    V half = 0.5f * verfc_positive(vabs(x) * 0.70710678f);
    return x * sel((I)(x < 0.0f), half, 1.0f - half);
}
INL V vgelu_tanh(V x) {
    return x * vsigmoid(1.5957691216f * x * (1.0f + 0.044715f * x * x));
}
/* |x| < 8000: error 2e-7 absolute */
INL V sine(V x, int quarter) {
    V n = (x * 0.63661977f + 12582912.0f) - 12582912.0f;
    V r = ((x - n * 1.5703125f) - n * 4.8351288e-4f) - n * 3.1391647e-7f, z = r * r, s, c;
    I k = __builtin_convertvector(n, I) + quarter;
    s = r + r * z * (-0.166666652726f + z * (0.008332859872f + z * -0.000196107439f));
    c = 1.0f - 0.5f * z + z * z * (0.04166664439f + z * (-0.001388683588f + z * 2.434052156e-5f));
    s = sel((I)((k & 1) == 0), s, c);
    return sel((I)((k & 2) == 0), s, -s);
}
INL V vsin(V x) { return sine(x, 0); }
INL V vcos(V x) { return sine(x, 1); }
INL V vpow(V x, V y) {
    V whole = vround(y), p = vexp(y * vlog(vabs(x)));
    I odd = (__builtin_convertvector(whole, I) & 1) != 0;
    V negative = sel((I)(whole == y), sel(odd, -p, p), bc(__builtin_nanf("")));
    p = sel((I)(x < 0.0f), negative, p);
    p = sel((I)(x == 0.0f), sel((I)(y > 0.0f), bc(0.0f), bc(__builtin_inff())), p);
    return sel((I)(y == 0.0f), bc(1.0f), p);
}
