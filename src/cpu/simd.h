/* What the CPU's kernels have in common: vectors of an instruction set, their exponentials, stored elements, scratch.
 * Each line of kernels.def compiles it for itself, with its arch. A rule of attention does not belong here. */
#ifndef ACR_CPU_SIMD_H
#define ACR_CPU_SIMD_H

#include <stdbool.h>

#include "kernel.h"

#if defined KERNEL_ARCH_avx512bf16
#define KERNEL_ARCH_avx512 1 /* and more */
#endif
#if defined KERNEL_ARCH_avx512 || defined KERNEL_ARCH_avx2
#include <immintrin.h>
#endif

/* The instruction set: floats in a vector, vector registers, and vector multiply-adds in ten cycles, which cost()
 * counts: as many as a Zen 4 has been seen to do. Later processors and Intel's servers do twice as many of 512 bits. */
enum {
#if defined KERNEL_ARCH_avx512bf16
    ISA = ACR__ISA_AVX512BF16,
    LANES = 16,
    REGISTERS = 32,
    PRODUCTS_IN_TEN_CYCLES = 10
#elif defined KERNEL_ARCH_avx512
    ISA = ACR__ISA_AVX512,
    LANES = 16,
    REGISTERS = 32,
    PRODUCTS_IN_TEN_CYCLES = 10
#elif defined KERNEL_ARCH_avx2
    ISA = ACR__ISA_AVX2,
    LANES = 8,
    REGISTERS = 16,
    PRODUCTS_IN_TEN_CYCLES = 19
#elif defined __aarch64__
    ISA = ACR__ISA_PORTABLE,
    LANES = 4,
    REGISTERS = 32,
    PRODUCTS_IN_TEN_CYCLES = 20
#else
    ISA = ACR__ISA_PORTABLE,
    LANES = 4,
    REGISTERS = 16,
    PRODUCTS_IN_TEN_CYCLES = 10 /* SSE2 multiplies and adds separately */
#endif
};

/* Whether an operand of the products is a word of two neighbouring bf16 elements, whose products a lane sums. */
enum {
#if defined KERNEL_ARCH_avx512bf16
    PAIRS = 1
#else
    PAIRS = 0
#endif
};

/* ---- Vectors --------------------------------------------------------------------------------------------------- */

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t u16vec __attribute__((vector_size(LANES * 2)));
typedef uint8_t u8vec __attribute__((vector_size(LANES)));
typedef int16_t i16vec __attribute__((vector_size(LANES * 2)));
typedef int8_t i8vec __attribute__((vector_size(LANES)));
typedef uint16_t u32halves __attribute__((vector_size(LANES * 4)));
/* The same in memory, wherever it lies and whatever type it has there. */
typedef vec vec_anywhere __attribute__((aligned(1), may_alias));
typedef u16vec u16vec_anywhere __attribute__((aligned(1), may_alias));
typedef u8vec u8vec_anywhere __attribute__((aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define PRAGMA_(text) _Pragma(#text)
/* UNROLLED: the following loop, `times` steps at once. FLATTENED: all of it; it has a constant count of at most 16. */
#if defined __clang__
#define UNROLLED(times) PRAGMA_(clang loop unroll_count(times))
#define FLATTENED PRAGMA_(clang loop unroll(full))
#else
#define UNROLLED(times) PRAGMA_(GCC unroll times)
#define FLATTENED PRAGMA_(GCC unroll 16)
#endif

/* DESCRIBES: a function that a line's description calls. Such functions run on every machine, also on one that lacks
 * the line's instruction set: to say so, or to plan for another machine. */
#if defined KERNEL_ARCH_avx512 || defined KERNEL_ARCH_avx2
#define DESCRIBES __attribute__((target("no-avx")))
#else
#define DESCRIBES
#endif

static const float minus_infinity = -__builtin_inff();

INLINE vec splat(float x)
{
    return x - (vec){0};
}

/* Where mask is -1 a, where it is 0 b. */
INLINE uvec pick_bits(ivec mask, uvec a, uvec b)
{
    return ((uvec)mask & a) | (~(uvec)mask & b);
}

INLINE vec pick(ivec mask, vec a, vec b)
{
    return (vec)pick_bits(mask, (uvec)a, (uvec)b);
}

/* The larger; b where either is NaN. */
INLINE vec max_or_second(vec a, vec b)
{
#if defined KERNEL_ARCH_avx512
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined KERNEL_ARCH_avx2
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return pick(a > b, a, b);
#endif
}

/* 2^(x * scale) for x * scale <= 1, within 1 ulp of the exact product's; exactly 0 for x * scale < -126.5,
 * -infinity included; NaN for NaN. least is -127 / scale. */
INLINE vec exp2_scaled(vec x, float scale, float least)
{
    const float round_at_bit_0 = 0x1.8p23f; /* added to a small number, leaves its nearest integer in the low bits */
    x = max_or_second(splat(least), x);
    const vec shifted = x * scale + round_at_bit_0;
    const vec f = x * scale - (shifted - round_at_bit_0); /* fused: the product is not rounded */
    /* 2^f on [-1/2, 1/2]: minimax in relative error (2e-9) with the constant term held at 1. */
    vec p = 0x1.41fbbcp-13f * f + 0x1.5f3e52p-10f;
    p = p * f + 0x1.3b2d4cp-7f;
    p = p * f + 0x1.c6aee8p-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e430p-1f;
    p = p * f + 1.0f;
    return p *
           (vec)(((uvec)shifted + 127) << 23); /* the shift drops all of `shifted` but the integer; -127 gives 0.0 */
}

/* 2^x within 3e-6 of it, which bf16 does not tell from it: exactly 1 for 0, exactly 0 for -infinity, NaN for NaN. */
INLINE vec exp2_of_bf16(vec x)
{
#if defined KERNEL_ARCH_avx512bf16
    const vec f = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x - floor(x) */
    vec p = 0x1.b7f744p-7f * f + 0x1.abf860p-5f; /* 2^f on [0, 1): minimax, the constant term held at 1 */
    p = p * f + 0x1.ee2452p-3f;
    p = p * f + 0x1.62d6c6p-1f;
    p = p * f + 1.0f;
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)x); /* p * 2^floor(x) */
#else
    return exp2_scaled(x, 1.0f, -127.0f);
#endif
}

/* ln(x) for normal x > 0, within 2 ulp; NaN for NaN. */
INLINE vec ln_vec(vec x)
{
    /* x = 2^e * m with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh(t), t = (m - 1) / (m + 1). */
    const uvec above_sqrt_half = (uvec)x - 0x3f3504f3u;
    const ivec e = (ivec)above_sqrt_half >> 23;
    const vec m = (vec)((above_sqrt_half & 0x7fffffu) + 0x3f3504f3u);
    const vec t = (m - 1.0f) / (m + 1.0f);
    const vec t2 = t * t;
    const vec series = 1.0f + t2 * (1.0f / 3 + t2 * (1.0f / 5 + t2 * (1.0f / 7 + t2 * (1.0f / 9))));
    const float ln_2 = 0.69314718055994530942f;
    return __builtin_convertvector(e, vec) * ln_2 + 2.0f * t * series + (x - x); /* x - x: NaN stays NaN */
}

/* tanh(x) within 3 ulp; NaN for NaN. */
INLINE vec tanh_vec(vec x)
{
    const float log2_e = 1.44269504088896340736f;
    const uvec sign = (uvec)x & 0x80000000u;
    const vec magnitude = (vec)((uvec)x ^ sign), z = x * x;
    /* Below 0.625 x + x^3 p(x^2), p interpolating at Chebyshev's nodes (2e-8 in relative error); above it there is no
     * cancellation in (1 - e) / (1 + e) with e = exp(-2 |x|). */
    vec p = -0x1.8f8de4p-8f * z + 0x1.58048ep-6f;
    p = p * z - 0x1.b9258ap-5f;
    p = p * z + 0x1.110e1cp-3f;
    p = p * z - 0x1.555552p-2f;
    const vec small = x + x * (z * p);
    const vec e = exp2_scaled(magnitude * -2.0f, log2_e, -127.0f / log2_e);
    const vec large = (vec)((uvec)((1.0f - e) / (1.0f + e)) | sign);
    return pick(magnitude < 0.625f, small, large);
}

/* In place, v[i][j] becomes v[j][i]: each round interleaves the vectors of the lower half with those of the upper. */
INLINE void transpose(vec v[LANES])
{
    FLATTENED
    for (int round = 1; round < LANES; round *= 2) {
        vec next[LANES];
        FLATTENED
        for (int i = 0; i < LANES / 2; i++) {
            const vec a = v[i], b = v[i + LANES / 2];
#if defined KERNEL_ARCH_avx512
            next[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            next[2 * i + 1] =
                __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined KERNEL_ARCH_avx2
            next[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
            next[2 * i + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
            next[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            next[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
        }
        FLATTENED
        for (int i = 0; i < LANES; i++) {
            v[i] = next[i];
        }
    }
}

/* ---- Stored elements ------------------------------------------------------------------------------------------- */

/* Longer integers, by the instruction where there is one: gcc makes four of __builtin_convertvector, and goes by way of
 * memory for bytes. */
INLINE uvec extend_16(u16vec x)
{
#if defined KERNEL_ARCH_avx512
    return (uvec)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined KERNEL_ARCH_avx2
    return (uvec)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, uvec);
#endif
}

/* Of signed numbers. */
INLINE u16vec extend_8(u8vec x)
{
#if defined KERNEL_ARCH_avx512
    return (u16vec)_mm256_cvtepi8_epi16((__m128i)x);
#elif defined KERNEL_ARCH_avx2
    return (u16vec)_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)&x));
#else
    return (u16vec) __builtin_convertvector((i8vec)x, i16vec);
#endif
}

INLINE vec widen_f16(u16vec bits)
{
#if defined KERNEL_ARCH_avx512
    return (vec)_mm512_cvtph_ps((__m256i)bits);
#elif defined KERNEL_ARCH_avx2
    return (vec)_mm256_cvtph_ps((__m128i)bits);
#else
    const uvec wide = extend_16(bits);
    const uvec magnitude = wide & 0x7fffu;
    const uvec normal = (magnitude << 13) + (112u << 23);
    const uvec infinity_or_nan = magnitude << 13 | 0x7f800000u;
    const vec subnormal = __builtin_convertvector((ivec)magnitude, vec) * 0x1p-24f;
    uvec value = pick_bits((ivec)(magnitude > 0x7bffu), infinity_or_nan, normal);
    value = pick_bits((ivec)(magnitude < 0x400u), (uvec)subnormal, value);
    return (vec)(value | (wide & 0x8000u) << 16);
#endif
}

INLINE vec widen_bf16(u16vec bits)
{
    return (vec)(extend_16(bits) << 16);
}

/* e4m3 is the upper part of a float16, but for an exponent bias of 7 instead of 15 and its only NaN, 0x7f. */
INLINE vec widen_e4m3(u8vec bits)
{
    const u16vec wide = extend_8(bits);     /* the sign in bits 7 to 15 */
    const u16vec carry = wide ^ (wide + 1); /* bit 7: the seven below it are ones, NaN; it goes into the exponent */
    return widen_f16(((carry & 0x80) | (wide & 0xff7f)) << 7) * 256.0f;
}

INLINE u16vec narrow_bf16(vec x)
{
    const uvec bits = (uvec)x;
    const uvec rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16; /* to nearest, ties to even */
    return __builtin_convertvector(pick_bits((ivec)(x != x), bits >> 16 | 0x40u, rounded), u16vec);
}

INLINE u16vec narrow_f16(vec x)
{
#if defined KERNEL_ARCH_avx512
    return (u16vec)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined KERNEL_ARCH_avx2
    return (u16vec)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
    const uvec sign = (uvec)x >> 31 << 15;
    const uvec magnitude = (uvec)x & 0x7fffffffu;
    const uvec rebiased = magnitude - (112u << 23);
    const uvec normal = (rebiased + 0xfffu + (rebiased >> 13 & 1u)) >> 13;
    /* Below 2^-14: 0.5's last bit is float16's smallest step, so that the sum rounds to it. */
    const uvec subnormal = (uvec)((vec)magnitude + 0.5f) - 0x3f000000u;
    uvec bits = pick_bits((ivec)(magnitude < 0x38800000u), subnormal, normal);
    bits = pick_bits((ivec)(magnitude >= 0x477ff000u), (uvec){0} + 0x7c00u, bits); /* from 65520 infinity */
    bits = pick_bits((ivec)(x != x), (uvec){0} + 0x7e00u, bits);
    return __builtin_convertvector(bits | sign, u16vec);
#endif
}

/* Bytes of an element; of a type that is a constant a constant. */
INLINE int64_t bytes_of(acr_dtype dtype)
{
    return dtype == ACR_F32 ? 4 : dtype == ACR_E4M3 ? 1 : 2;
}

/* Elements [index, index + LANES) of an input as floats. */
INLINE vec load_floats(acr_dtype dtype, const void *base, int64_t index)
{
    const char *at = (const char *)base + index * bytes_of(dtype);
    switch (dtype) {
    case ACR_F16:
        return widen_f16(*(const u16vec_anywhere *)at);
    case ACR_BF16:
        return widen_bf16(*(const u16vec_anywhere *)at);
    case ACR_E4M3:
        return widen_e4m3(*(const u8vec_anywhere *)at);
    default:
        return *(const vec_anywhere *)at;
    }
}

/* As load_floats, of `count` elements; the rest is 0. */
INLINE vec load_some_floats(acr_dtype dtype, const void *base, int64_t index, int64_t count)
{
    if (count >= LANES) {
        return load_floats(dtype, base, index);
    }
    char elements[LANES * 4] = {0};
    const char *at = (const char *)base + index * bytes_of(dtype);
    for (int64_t byte = 0; byte < count * bytes_of(dtype); byte++) {
        elements[byte] = at[byte];
    }
    return load_floats(dtype, elements, 0);
}

/* Elements [index, index + count) of a bias as floats, count <= LANES; the rest is 0. bias_type is FWD_BIAS_*; a mask
 * gives 1 and 0. */
INLINE vec load_some_bias(int32_t bias_type, const void *base, int64_t index, int64_t count)
{
    const int64_t bytes = bias_type == FWD_BIAS_F32 ? 4 : bias_type == FWD_BIAS_MASK ? 1 : 2;
    char elements[LANES * 4] = {0};
    const char *at = (const char *)base + index * bytes;
    if (count >= LANES) {
        __builtin_memcpy(elements, at, (size_t)(LANES * bytes));
    } else {
        __builtin_memcpy(elements, at, (size_t)(count * bytes));
    }
    switch (bias_type) {
    case FWD_BIAS_F16:
        return widen_f16(*(const u16vec_anywhere *)elements);
    case FWD_BIAS_BF16:
        return widen_bf16(*(const u16vec_anywhere *)elements);
    case FWD_BIAS_MASK:
        return pick(__builtin_convertvector(*(const u8vec_anywhere *)elements, ivec) != 0, splat(1.0f), (vec){0});
    default:
        return *(const vec_anywhere *)elements;
    }
}

/* Rounds to f32, f16 or bf16 and stores elements [index, index + count), count <= LANES. */
INLINE void store_some_floats(acr_dtype dtype, void *base, int64_t index, int64_t count, vec x)
{
    char *at = (char *)base + index * bytes_of(dtype);
    char elements[sizeof x];
    char *to = count >= LANES ? at : elements;
    if (dtype == ACR_F32) {
        *(vec_anywhere *)to = x;
    } else {
        *(u16vec_anywhere *)to = dtype == ACR_BF16 ? narrow_bf16(x) : narrow_f16(x);
    }
    for (int64_t byte = 0; to == elements && byte < count * bytes_of(dtype); byte++) {
        at[byte] = elements[byte];
    }
}

/* Elements [index, index + LANES) of an input as bf16; behind `count` they are 0. bf16 holds dtype exactly. */
INLINE u16vec load_some_bf16(acr_dtype dtype, const void *base, int64_t index, int64_t count)
{
    if (dtype != ACR_BF16) {
        return narrow_bf16(load_some_floats(dtype, base, index, count));
    }
    const char *at = (const char *)base + index * 2;
    if (count >= LANES) {
        return *(const u16vec_anywhere *)at;
    }
    char elements[LANES * 2] = {0};
    __builtin_memcpy(elements, at, (size_t)(count * 2));
    return *(const u16vec_anywhere *)elements;
}

/* The words of a and b, both rounded to bf16, a in the lower half; NaN for NaN, 0 for what is denormal. */
INLINE vec pair_of(vec a, vec b)
{
#if defined KERNEL_ARCH_avx512bf16
    const uvec both = (uvec)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    const u32halves halves = (u32halves)both;
    return (vec)__builtin_shufflevector(halves, halves, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24,
                                        9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
    const uvec low = extend_16(narrow_bf16(a)), high = extend_16(narrow_bf16(b));
    return (vec)(low | high << 16);
#endif
}

/* ---- Scratch --------------------------------------------------------------------------------------------------- */

DESCRIBES static inline int64_t round_up(int64_t value, int64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

/* The next part of a lane's scratch, 64-byte aligned as all are; *used counts the bytes. scratch NULL: to count
 * alone. */
DESCRIBES static inline void *cut(char *scratch, int64_t *used, int64_t elements)
{
    void *part = scratch ? scratch + *used : NULL;
    *used += round_up(elements * 4, 64);
    return part;
}

/* ---- A family's description ---- */

/* What the descriptions of the CPU's families share. The family has functions why_not, workspace, cost and run, and
 * the parameters DTYPE, DIM, Q_TILE and KV_TILE. */
#define SIMD_KERNEL(family_text)                                                                                       \
    .name = KERNEL_TEXT, .family = family_text, .backend = ACR__CPU, .dtype = DTYPE, .qk_dim_max = DIM,                \
    .v_dim_max = DIM, .q_tile = Q_TILE, .kv_tile = KV_TILE, .image = KERNEL_IMAGE, .image_end = KERNEL_IMAGE_END,      \
    .why_not = why_not, .workspace = workspace, .cost = cost, .run = run

#endif
