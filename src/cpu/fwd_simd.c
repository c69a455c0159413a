/* Forward attention on a CPU: FlashAttention's tiled online softmax (Dao et al. 2022) with a query row in every vector lane.
 *
 * A work item is a tile of Q_TILE rows: positions of the query heads that share one key/value head. Its queries are transposed once, so that
 * a vector holds the same dim of LANES queries; scores and outputs then stay transposed too:
 *
 *     S[key][row]  = sum over dims of Q[dim][row] * K[key][dim]      vector * scalar, K read where it lies
 *     O[dim][row] += sum over keys of S[key][row] * V[key][dim]      vector * scalar, V read where it lies
 *
 * Maxima, sums and rescaling of the softmax run down the keys, lane by lane: nothing is ever reduced across a vector, K and V need no
 * packing, and neither lengths nor dims need padding. Both products are one register-blocked loop, multiply_block. 16-bit and 8-bit inputs
 * are widened to float32 a tile at a time. docs/kernels/fwd_simd.md has the budget of registers and caches, and what did not work.
 *
 * Parameters: DTYPE (ACR_F32...), DIM (largest head dim served), Q_TILE, KV_TILE, and the register block: ROW_VECS vectors of rows times
 * COLUMNS keys or dims; UNROLL steps of its loop. */
#include <stdbool.h>

#include "kernel.h"

#if defined KERNEL_ARCH_avx512 || defined KERNEL_ARCH_avx2
#include <immintrin.h>
#endif

#if defined KERNEL_ARCH_avx512
enum { LANES = 16, REGISTERS = 32, ISA = ACR__ISA_AVX512 };
#elif defined KERNEL_ARCH_avx2
enum { LANES = 8, REGISTERS = 16, ISA = ACR__ISA_AVX2 };
#elif defined __aarch64__
enum { LANES = 4, REGISTERS = 32, ISA = ACR__ISA_PORTABLE };
#else
enum { LANES = 4, REGISTERS = 16, ISA = ACR__ISA_PORTABLE };
#endif

enum {
    ROWS = ROW_VECS * LANES, /* of a register block */
    BLOCKS = Q_TILE / ROWS,
    ELEMENT_BYTES = DTYPE == ACR_F32 ? 4 : DTYPE == ACR_E4M3 ? 1 : 2,
    WIDENS = DTYPE != ACR_F32 /* K and V pass through a float32 tile */
};

_Static_assert(Q_TILE % ROWS == 0, "Q_TILE is not a multiple of ROW_VECS vectors");
_Static_assert(ROW_VECS * COLUMNS + ROW_VECS + 1 <= REGISTERS, "the block ROW_VECS x COLUMNS does not fit the registers");
_Static_assert(KV_TILE % COLUMNS == 0, "KV_TILE is not a multiple of COLUMNS");
_Static_assert(COLUMNS <= 12, "COLUMNS above 12 run out of address registers");
_Static_assert(Q_TILE <= 1024 && KV_TILE <= 1024, "tiles above 1024 leave the caches");

/* ---- Vectors ------------------------------------------------------------------------------------------------------ */

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t u16vec __attribute__((vector_size(LANES * 2)));
typedef uint8_t u8vec __attribute__((vector_size(LANES)));
/* The same in memory of any alignment and type. */
typedef vec vec_anywhere __attribute__((aligned(1), may_alias));
typedef u16vec u16vec_anywhere __attribute__((aligned(1), may_alias));
typedef u8vec u8vec_anywhere __attribute__((aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define PRAGMA_(text) _Pragma(#text)
#if defined __clang__
#define UNROLLED(times) PRAGMA_(clang loop unroll_count(times))
#else
#define UNROLLED(times) PRAGMA_(GCC unroll times)
#endif

INLINE vec splat(float x)
{
    return x - (vec){0};
}

INLINE uvec splat_bits(uint32_t x)
{
    return x - (uvec){0};
}

/* Where mask is -1 a, where it is 0 b. */
INLINE uvec select_bits(ivec mask, uvec a, uvec b)
{
    return ((uvec)mask & a) | (~(uvec)mask & b);
}

INLINE vec select(ivec mask, vec a, vec b)
{
    return (vec)select_bits(mask, (uvec)a, (uvec)b);
}

/* The larger; b where either is NaN. */
INLINE vec max_or_second(vec a, vec b)
{
#if defined KERNEL_ARCH_avx512
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined KERNEL_ARCH_avx2
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select(a > b, a, b);
#endif
}

static const float MINUS_INFINITY = -__builtin_inff();

/* 2^x for x <= 1, within 1.2 ulp; exactly 0 below 2^-126, also for -infinity; NaN for NaN. */
INLINE vec exp2_vec(vec x)
{
    /* 2^f on [-1/2, 1/2]: minimax polynomial of degree 5 with c0 = 1, relative error 2e-7... */
    const float c1 = 6.931471825e-1f, c2 = 2.402264923e-1f, c3 = 5.550357327e-2f, c4 = 9.618237615e-3f, c5 = 1.339262701e-3f;
    x = max_or_second(splat(-127.0f), x);
    const float round_at_bit_0 = 0x1.8p23f; /* added to a small number, leaves its nearest integer in the low bits */
    const vec shifted = x + round_at_bit_0;
    const vec f = x - (shifted - round_at_bit_0);
    const vec p = 1.0f + f * (c1 + f * (c2 + f * (c3 + f * (c4 + f * c5))));
    const ivec n = (ivec)shifted; /* its low bits; the rest is shifted out below */
    return p * (vec)((n + 127) << 23);
}
