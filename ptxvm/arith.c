/* The PTX machine's arithmetic: integers, f32, the 16-bit and 8-bit floating-point formats, comparisons, conversions,
 * moves. One executor for each operation and type, whose loop over the lanes the compiler vectorises; a table tells
 * which mnemonic it serves. Lanes that are not active are computed too and thrown away, so no operation may trap. */
#include <math.h>
#include <string.h>

#include "vm.h"

__extension__ typedef __int128 s128;
__extension__ typedef unsigned __int128 u128;

/* ---- Formats ---- */

static int is_nan_bits(uint32_t bits)
{
    return (bits & 0x7fffffff) > 0x7f800000;
}

float float_of_half(uint16_t bits)
{
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    if (magnitude < 0x400) /* subnormal: counts 2^-24 */
        return float_of_bits(sign | bits_of_float((float)magnitude * 0x1p-24f));
    const uint32_t exponent_shift = magnitude < 0x7c00 ? 127 - 15 : 255 - 31;
    return float_of_bits(sign | ((magnitude << 13) + (exponent_shift << 23)));
}

float float_of_bfloat(uint16_t bits)
{
    return float_of_bits((uint32_t)bits << 16);
}

float float_of_e4m3(uint8_t bits)
{
    const uint32_t sign = (uint32_t)(bits & 0x80) << 24, magnitude = bits & 0x7f;
    if (magnitude == 0x7f)
        return float_of_bits(sign | 0x7fffffff);
    if (magnitude < 8) /* subnormal: counts 2^-9 */
        return float_of_bits(sign | bits_of_float((float)magnitude * 0x1p-9f));
    return float_of_bits(sign | ((magnitude << 20) + ((127 - 7) << 23)));
}

/* The magnitude's upper bits, rounded to nearest even, without the lowest `dropped`. */
static uint32_t round_bits(uint32_t magnitude, int dropped)
{
    const uint32_t below_half = (1u << (dropped - 1)) - 1, is_odd = (magnitude >> dropped) & 1;
    return (magnitude + below_half + is_odd) >> dropped;
}

/* How many `unit`s a small magnitude is: adding a number whose last bit counts `unit` rounds. */
static uint32_t count_units(uint32_t magnitude, float unit)
{
    const float anchor = unit * 0x1p23f;
    return bits_of_float(float_of_bits(magnitude) + anchor) - bits_of_float(anchor);
}

uint16_t half_of_float(float value)
{
    const uint32_t bits = bits_of_float(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (is_nan_bits(bits))
        return 0x7fff;
    if (magnitude >= 0x477ff000) /* 65520: halfway beyond the largest */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) /* 2^-14 */
        return (uint16_t)(sign | count_units(magnitude, 0x1p-24f));
    return (uint16_t)(sign | (round_bits(magnitude, 13) - ((127 - 15) << 10)));
}

uint16_t bfloat_of_float(float value)
{
    const uint32_t bits = bits_of_float(value);
    return is_nan_bits(bits) ? 0x7fff : (uint16_t)((bits >> 16 & 0x8000) | round_bits(bits & 0x7fffffff, 16));
}

uint8_t e4m3_of_float_satfinite(float value)
{
    const uint32_t bits = bits_of_float(value), sign = (bits >> 24) & 0x80, magnitude = bits & 0x7fffffff;
    if (is_nan_bits(bits))
        return 0x7f;
    if (magnitude >= 0x43e00000) /* 448, the largest */
        return (uint8_t)(sign | 0x7e);
    if (magnitude < 0x3c800000) /* 2^-6 */
        return (uint8_t)(sign | count_units(magnitude, 0x1p-9f));
    return (uint8_t)(sign | (round_bits(magnitude, 20) - ((127 - 7) << 3)));
}

/* The double rounded to odd: a result that is not exact has its last bit set, so that rounding it once more to a format
 * with two bits less rounds as if once. */
static float float_to_odd(double value)
{
    const float nearest = (float)value;
    const uint32_t bits = bits_of_float(nearest);
    if ((double)nearest == value || value != value || bits & 1)
        return nearest;
    const int is_too_large = fabs((double)nearest) > fabs(value);
    return float_of_bits(is_too_large ? bits - 1 : bits + 1);
}

/* a * b + c, rounded to odd: the product of two 16-bit numbers is exact, their sum's error tells what was lost. */
static float fma_to_odd(double a, double b, double c)
{
    const double product = a * b, sum = product + c;
    if (!isfinite(sum))
        return (float)sum;
    const double c_part = sum - product, error = (product - (sum - c_part)) + (c - c_part);
    if (error == 0)
        return float_to_odd(sum);
    const double toward = error > 0 ? INFINITY : -INFINITY; /* the exact value lies between sum and its neighbour */
    const float here = float_to_odd(sum), there = float_to_odd(nextafter(sum, toward));
    return bits_of_float(here) & 1 ? here : there;
}

/* ---- Sources and results ---- */

/* What the executors call the types; as_TYPE takes the low bits that count. */
typedef uint16_t u16;
typedef int16_t s16;
typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;
typedef int64_t s64;
typedef float f32;
typedef float f32_ftz; /* subnormal numbers count as zero */
typedef double f64;

static inline u16 as_u16(uint64_t bits)
{
    return (u16)bits;
}

static inline s16 as_s16(uint64_t bits)
{
    return (s16)bits;
}

static inline u32 as_u32(uint64_t bits)
{
    return (u32)bits;
}

static inline s32 as_s32(uint64_t bits)
{
    return (s32)bits;
}

static inline u64 as_u64(uint64_t bits)
{
    return bits;
}

static inline s64 as_s64(uint64_t bits)
{
    return (s64)bits;
}

static inline f32 as_f32(uint64_t bits)
{
    return float_of_bits((uint32_t)bits);
}

static inline uint32_t flush(uint32_t bits)
{
    return bits & 0x7f800000 ? bits : bits & 0x80000000;
}

static inline f32_ftz as_f32_ftz(uint64_t bits)
{
    return float_of_bits(flush((uint32_t)bits));
}

/* A result of f32 arithmetic: a GPU has one NaN. */
static inline uint64_t of_f32(float value)
{
    return value != value ? 0x7fffffff : bits_of_float(value);
}

static inline uint64_t of_f32_ftz(float value)
{
    return value != value ? 0x7fffffff : flush(bits_of_float(value));
}

/* The operand's value in every lane; an immediate is spread in `space`. */
static inline const uint64_t *source(const warp *w, const operand *o, uint64_t *space)
{
    if (o->kind == O_REGISTER)
        return register_of(w, o->reg);
    for (int lane = 0; lane < LANES; lane++)
        space[lane] = (uint64_t)o->imm;
    return space;
}

/* Writes the results of the active lanes. */
static inline const char *finish(warp *w, const operand *o, const uint64_t *results, uint32_t active)
{
    if (o->kind != O_REGISTER)
        return NULL;
    uint64_t *d = register_of(w, o->reg);
    if (active == (uint32_t)FULL_WARP) {
        memcpy(d, results, LANES * sizeof *d);
    } else {
        for (int lane = 0; lane < LANES; lane++)
            d[lane] = active >> lane & 1 ? results[lane] : d[lane];
    }
    return NULL;
}

/* An executor of `count` sources of one type: `values` declares what a lane has of them, a, b, c, and `result` is the
 * lane's register value. */
#define EXECUTOR(name, count, values, result)                                                                          \
    static const char *name(warp *w, const instruction *i, uint32_t active)                                            \
    {                                                                                                                  \
        uint64_t results[LANES], space[count][LANES];                                                                  \
        const uint64_t *sources[count];                                                                                \
        for (int n = 0; n < (count); n++)                                                                              \
            sources[n] = source(w, &i->operands[1 + n], space[n]);                                                     \
        for (int lane = 0; lane < LANES; lane++) {                                                                     \
            values;                                                                                                    \
            results[lane] = (u64)(result);                                                                             \
        }                                                                                                              \
        return finish(w, &i->operands[0], results, active);                                                            \
    }
#define OF_SOURCE(type, n) as_##type(sources[n][lane])
#define UNARY(name, type, result) EXECUTOR(name, 1, const type a = OF_SOURCE(type, 0), result)
#define BINARY(name, type, result)                                                                                     \
    EXECUTOR(name, 2, const type a = OF_SOURCE(type, 0); const type b = OF_SOURCE(type, 1), result)
#define TERNARY(name, type, result)                                                                                    \
    EXECUTOR(name, 3, const type a = OF_SOURCE(type, 0); const type b = OF_SOURCE(type, 1);                            \
             const type c = OF_SOURCE(type, 2), result)

/* ---- Integers ---- */

static inline s64 divide(s64 a, s64 b)
{
    if (b == 0)
        return -1; /* any value would do */
    return b == -1 ? (s64)(0 - (u64)a) : a / b;
}

static inline s64 remainder_of(s64 a, s64 b)
{
    return b == 0 || b == -1 ? 0 : a % b;
}

BINARY(add_16, u16, (u16)(a + b))
BINARY(add_32, u32, a + b)
BINARY(add_64, u64, a + b)
BINARY(sub_16, u16, (u16)(a - b))
BINARY(sub_32, u32, a - b)
BINARY(sub_64, u64, a - b)
BINARY(mul_lo_16, u32, (u16)(a *b))
BINARY(mul_lo_32, u32, a *b)
BINARY(mul_lo_64, u64, a *b)
BINARY(mul_hi_u32, u32, (u64)a *b >> 32)
BINARY(mul_hi_s32, s32, (u32)((s64)a *b >> 32))
BINARY(mul_hi_u64, u64, (u64)((u128)a *b >> 64))
BINARY(mul_hi_s64, s64, (u64)((s128)a *b >> 64))
BINARY(mul_wide_u16, u16, (u32)a *b)
BINARY(mul_wide_s16, s16, (u32)((s32)a *b))
BINARY(mul_wide_u32, u32, (u64)a *b)
BINARY(mul_wide_s32, s32, (u64)((s64)a *b))
BINARY(div_u16, u16, b ? (u16)(a / b) : 0xffff)
BINARY(div_u32, u32, b ? a / b : 0xffffffff)
BINARY(div_u64, u64, b ? a / b : (u64)-1)
BINARY(div_s16, s16, (u16)divide(a, b))
BINARY(div_s32, s32, (u32)divide(a, b))
BINARY(div_s64, s64, (u64)divide(a, b))
BINARY(rem_u16, u16, b ? (u16)(a % b) : 0)
BINARY(rem_u32, u32, b ? a % b : 0)
BINARY(rem_u64, u64, b ? a % b : 0)
BINARY(rem_s16, s16, (u16)remainder_of(a, b))
BINARY(rem_s32, s32, (u32)remainder_of(a, b))
BINARY(rem_s64, s64, (u64)remainder_of(a, b))
BINARY(min_u16, u16, a < b ? a : b)
BINARY(min_u32, u32, a < b ? a : b)
BINARY(min_u64, u64, a < b ? a : b)
BINARY(min_s16, s16, (u16)(a < b ? a : b))
BINARY(min_s32, s32, (u32)(a < b ? a : b))
BINARY(min_s64, s64, (u64)(a < b ? a : b))
BINARY(max_u16, u16, a > b ? a : b)
BINARY(max_u32, u32, a > b ? a : b)
BINARY(max_u64, u64, a > b ? a : b)
BINARY(max_s16, s16, (u16)(a > b ? a : b))
BINARY(max_s32, s32, (u32)(a > b ? a : b))
BINARY(max_s64, s64, (u64)(a > b ? a : b))
UNARY(neg_16, u16, (u16)(0 - a))
UNARY(neg_32, u32, 0 - a)
UNARY(neg_64, u64, 0 - a)
UNARY(abs_s16, s16, (u16)(a < 0 ? 0 - (u32)a : (u32)a))
UNARY(abs_s32, s32, a < 0 ? 0 - (u32)a : (u32)a)
UNARY(abs_s64, s64, a < 0 ? 0 - (u64)a : (u64)a)

/* ---- Bits ---- */

static inline u64 reverse_bits(u64 a)
{
    u64 reversed = 0;
    for (int bit = 0; bit < 64; bit++)
        reversed |= (a >> bit & 1) << (63 - bit);
    return reversed;
}

/* Number of zeros above the highest one. */
static inline u64 leading_zeros(u64 a)
{
    return a ? (u64)__builtin_clzll(a) : 64;
}

/* Position and length of bfe and bfi: their low bytes. */
static inline u64 extract_unsigned(u64 a, u64 position, u64 length)
{
    position &= 0xff;
    length &= 0xff;
    const u64 shifted = position < 64 ? a >> position : 0;
    return length < 64 ? shifted & ((1ull << length) - 1) : shifted;
}

/* The bits above the sign extend it; `width` of the type. */
static inline u64 extract_signed(s64 a, u64 position, u64 length, u64 width)
{
    position &= 0xff;
    length &= 0xff;
    if (length == 0)
        return 0;
    const u64 top = position + length - 1 < width ? position + length - 1 : width - 1;
    const u64 sign = (u64)a >> top & 1, kept = extract_unsigned((u64)a, position, length);
    const u64 bits_kept = position <= top ? top - position + 1 : 0;
    return sign && bits_kept < 64 ? kept | ~0ull << bits_kept : kept;
}

static inline u32 permute_bytes(u32 a, u32 b, u32 selector)
{
    const u64 bytes = (u64)b << 32 | a;
    u32 result = 0;
    for (int k = 0; k < 4; k++) {
        const u32 choice = selector >> 4 * k & 15, byte = bytes >> 8 * (choice & 7) & 0xff;
        const u32 sign = byte & 0x80 ? 0xff : 0;
        result |= (choice & 8 ? sign : byte) << 8 * k;
    }
    return result;
}

BINARY(and_64, u64, a &b)
BINARY(and_32, u32, a &b)
BINARY(and_16, u16, (u16)(a &b))
BINARY(or_64, u64, a | b)
BINARY(or_32, u32, a | b)
BINARY(or_16, u16, (u16)(a | b))
BINARY(xor_64, u64, a ^ b)
BINARY(xor_32, u32, a ^ b)
BINARY(xor_16, u16, (u16)(a ^ b))
UNARY(not_64, u64, ~a)
UNARY(not_32, u32, ~a)
UNARY(not_16, u16, (u16)~a)
BINARY(shl_16, u32, b < 16 ? (u16)(a << b) : 0)
BINARY(shl_32, u32, b < 32 ? a << b : 0)
BINARY(shl_64, u64, (u32)b < 64 ? a << (b & 63) : 0)
BINARY(shr_u16, u32, b < 16 ? (u16)a >> b : 0)
BINARY(shr_u32, u32, b < 32 ? a >> b : 0)
BINARY(shr_u64, u64, (u32)b < 64 ? a >> (b & 63) : 0)
BINARY(shr_s16, u32, (u16)((s16)a >> (b < 15 ? b : 15)))
BINARY(shr_s32, u32, (u32)((s32)a >> (b < 31 ? b : 31)))
BINARY(shr_s64, u64, (u64)((s64)a >> ((u32)b < 63 ? (b & 63) : 63)))
TERNARY(shf_l_wrap, u32, (u32)(((u64)b << 32 | a) << (c & 31) >> 32))
TERNARY(shf_l_clamp, u32, (u32)(((u64)b << 32 | a) << (c < 32 ? c : 32) >> 32))
TERNARY(shf_r_wrap, u32, (u32)(((u64)b << 32 | a) >> (c & 31)))
TERNARY(shf_r_clamp, u32, (u32)(((u64)b << 32 | a) >> (c < 32 ? c : 32)))
TERNARY(prmt_32, u32, permute_bytes(a, b, c))
TERNARY(bfe_u32, u32, (u32)extract_unsigned(a, b, c))
TERNARY(bfe_s32, s32, (u32)extract_signed(a, (u64)b, (u64)c, 32))
TERNARY(bfe_u64, u64, extract_unsigned(a, b, c))
TERNARY(bfe_s64, s64, extract_signed(a, (u64)b, (u64)c, 64))
UNARY(popc_32, u32, (u64)__builtin_popcount(a))
UNARY(popc_64, u64, (u64)__builtin_popcountll(a))
UNARY(clz_32, u32, leading_zeros(a) - 32)
UNARY(clz_64, u64, leading_zeros(a))
UNARY(brev_32, u32, reverse_bits(a) >> 32)
UNARY(brev_64, u64, reverse_bits(a))
TERNARY(mad_lo_16, u32, (u16)(a *b + c))
TERNARY(mad_lo_32, u32, a *b + c)
TERNARY(mad_lo_64, u64, a *b + c)
TERNARY(mad_hi_u32, u32, (u32)((u64)a *b >> 32) + c)
TERNARY(mad_hi_s32, s32, (u32)((s64)a *b >> 32) + (u32)c)

/* mad.wide: the third source is twice as wide, so its own width is taken from u64. */
TERNARY(mad_wide_u16, u64, (u32)((u32)(u16)a *(u16)b + (u32)c))
TERNARY(mad_wide_s16, u64, (u32)((s16)a *(s16)b) + (u32)c)
TERNARY(mad_wide_u32, u64, (u64)(u32)a *(u32)b + c)
TERNARY(mad_wide_s32, u64, (u64)((s64)(s32)a *(s32)b) + c)

/* bfi.b32 d, a, b, position, length: a's low bits into b; decoded[0] is the type's width. */
static const char *bfi(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], space[4][LANES];
    const uint64_t *s[4];
    for (int k = 0; k < 4; k++)
        s[k] = source(w, &i->operands[k + 1], space[k]);
    const u64 width = i->decoded[0], all = width == 64 ? ~0ull : 0xffffffff;
    for (int lane = 0; lane < LANES; lane++) {
        const u64 position = s[2][lane] & 0xff, length = s[3][lane] & 0xff;
        const u64 field = length < 64 ? (1ull << length) - 1 : ~0ull;
        const u64 mask = position < width ? field << position & all : 0;
        const u64 inserted = position < width ? s[0][lane] << position : 0;
        results[lane] = (inserted & mask) | (s[1][lane] & all & ~mask);
    }
    return finish(w, &i->operands[0], results, active);
}

/* lop3.b32 d, a, b, c, table: the table's bit a*4 + b*2 + c. */
static const char *lop3(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES] = {0}, space[3][LANES];
    const uint64_t *s[3];
    for (int k = 0; k < 3; k++)
        s[k] = source(w, &i->operands[k + 1], space[k]);
    for (int row = 0; row < 8; row++) {
        if (!(i->operands[4].imm >> row & 1))
            continue;
        const u64 flip_a = row & 4 ? 0 : ~0ull, flip_b = row & 2 ? 0 : ~0ull, flip_c = row & 1 ? 0 : ~0ull;
        for (int lane = 0; lane < LANES; lane++)
            results[lane] |= (u32)((s[0][lane] ^ flip_a) & (s[1][lane] ^ flip_b) & (s[2][lane] ^ flip_c));
    }
    return finish(w, &i->operands[0], results, active);
}

/* A part of a register as a number: `bits` of it from `shift` on. */
static s64 part_of(u64 value, unsigned shift, unsigned bits, u64 is_signed_part)
{
    const u64 top = value << (64 - shift - bits);
    return is_signed_part ? (s64)top >> (64 - bits) : (s64)(top >> (64 - bits));
}

/* dp2a.lo, dp2a.hi, dp4a d, a, b, c: c and the products of a's halves with b's lower or upper bytes, or of all bytes.
 * decoded: [0] bits of a part of a, [1] where b's bytes begin, [2] whether a is signed, [3] whether b is. */
static const char *dot_product(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], space[3][LANES];
    const uint64_t *as = source(w, &i->operands[1], space[0]), *bs = source(w, &i->operands[2], space[1]),
                   *cs = source(w, &i->operands[3], space[2]);
    const unsigned a_bits = (unsigned)i->decoded[0], first = (unsigned)i->decoded[1];
    for (int lane = 0; lane < LANES; lane++) {
        u32 sum = (u32)cs[lane];
        for (unsigned k = 0; k < 32 / a_bits; k++)
            sum += (u32)(part_of(as[lane], k * a_bits, a_bits, i->decoded[2]) *
                         part_of(bs[lane], first + 8 * k, 8, i->decoded[3]));
        results[lane] = sum;
    }
    return finish(w, &i->operands[0], results, active);
}

/* ---- f32 ---- */

/* Of a number and a NaN the number; -0 lies below +0. */
static inline float lesser(float a, float b)
{
    if (a != a || b != b)
        return a != a ? b : a;
    if (a == b)
        return signbit(a) ? a : b;
    return a < b ? a : b;
}

static inline float greater(float a, float b)
{
    if (a != a || b != b)
        return a != a ? b : a;
    if (a == b)
        return signbit(a) ? b : a;
    return a > b ? a : b;
}

/* min.NaN and max.NaN: a NaN wins. */
static inline float nan_or(float a, float b, float otherwise)
{
    return a != a || b != b ? NAN : otherwise;
}

static inline float copy_sign(float sign, float magnitude)
{
    return copysignf(magnitude, sign);
}

/* What is computed alike with denormal numbers and with zeros in their place. */
#define FLOAT_EXECUTORS(type)                                                                                          \
    BINARY(add_##type, type, of_##type(a + b))                                                                         \
    BINARY(sub_##type, type, of_##type(a - b))                                                                         \
    BINARY(mul_##type, type, of_##type(a *b))                                                                          \
    BINARY(div_##type, type, of_##type(a / b))                                                                         \
    BINARY(min_##type, type, of_##type(lesser(a, b)))                                                                  \
    BINARY(max_##type, type, of_##type(greater(a, b)))                                                                 \
    UNARY(sqrt_##type, type, of_##type(sqrtf(a)))                                                                      \
    UNARY(rcp_##type, type, of_##type(1 / a))                                                                          \
    UNARY(rsqrt_##type, type, of_##type((float)(1 / sqrt((double)a))))                                                 \
    UNARY(ex2_##type, type, of_##type(exp2f(a)))                                                                       \
    UNARY(lg2_##type, type, of_##type(log2f(a)))                                                                       \
    UNARY(sin_##type, type, of_##type(sinf(a)))                                                                        \
    UNARY(cos_##type, type, of_##type(cosf(a)))                                                                        \
    TERNARY(fma_##type, type, of_##type(fmaf(a, b, c)))
FLOAT_EXECUTORS(f32)
FLOAT_EXECUTORS(f32_ftz)
BINARY(min_nan_f32, f32, of_f32(nan_or(a, b, lesser(a, b))))
BINARY(max_nan_f32, f32, of_f32(nan_or(a, b, greater(a, b))))
BINARY(copysign_f32, f32, bits_of_float(copy_sign(a, b)))
UNARY(neg_f32, u32, a ^ 0x80000000)
UNARY(abs_f32, u32, a & 0x7fffffff)
UNARY(tanh_f32, f32, of_f32(tanhf(a)))
UNARY(neg_f32_ftz, f32_ftz, bits_of_float(a) ^ 0x80000000)
UNARY(abs_f32_ftz, f32_ftz, bits_of_float(a) & 0x7fffffff)

#if defined(__x86_64__)
/* fma_f32 with the processor's instruction: the commonest operation of all, and a call of libm's without. */
__attribute__((target("avx2,fma"))) static const char *fma_f32_fast(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], space[3][LANES];
    const uint64_t *as = source(w, &i->operands[1], space[0]), *bs = source(w, &i->operands[2], space[1]),
                   *cs = source(w, &i->operands[3], space[2]);
    for (int lane = 0; lane < LANES; lane++)
        results[lane] = of_f32(fmaf(as_f32(as[lane]), as_f32(bs[lane]), as_f32(cs[lane])));
    return finish(w, &i->operands[0], results, active);
}
#endif

/* ---- f16 and bf16, one or two in a register ---- */

/* What an operation on 16-bit numbers gives; numbers are exact in float, results rounded to odd. */
typedef float (*short_operation)(float a, float b, float c);

static float short_add(float a, float b, float c)
{
    (void)c;
    return fma_to_odd((double)a, 1, (double)b);
}

static float short_sub(float a, float b, float c)
{
    (void)c;
    return fma_to_odd((double)a, 1, -(double)b);
}

static float short_mul(float a, float b, float c)
{
    (void)c;
    return float_to_odd((double)a * (double)b);
}

static float short_fma(float a, float b, float c)
{
    return fma_to_odd((double)a, (double)b, (double)c);
}

static float short_min(float a, float b, float c)
{
    (void)c;
    return lesser(a, b);
}

static float short_max(float a, float b, float c)
{
    (void)c;
    return greater(a, b);
}

static float short_min_nan(float a, float b, float c)
{
    (void)c;
    return nan_or(a, b, lesser(a, b));
}

static float short_max_nan(float a, float b, float c)
{
    (void)c;
    return nan_or(a, b, greater(a, b));
}

static const struct {
    const char *name; /* of the mnemonic, without its type */
    short_operation operation;
    int sources;
} short_operations[] = {{"add", short_add, 2},         {"add.rn", short_add, 2}, {"sub", short_sub, 2},
                        {"sub.rn", short_sub, 2},      {"mul", short_mul, 2},    {"mul.rn", short_mul, 2},
                        {"min", short_min, 2},         {"max", short_max, 2},    {"min.NaN", short_min_nan, 2},
                        {"max.NaN", short_max_nan, 2}, {"fma.rn", short_fma, 3}};

/* decoded: [0] the operation's row, [1] how many numbers, [2] whether bf16, [3] sources. */
static const char *short_arithmetic(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES] = {0}, space[3][LANES];
    const uint64_t *s[3];
    const short_operation operation = short_operations[i->decoded[0]].operation;
    const int sources = (int)i->decoded[3];
    for (int k = 0; k < 3; k++)
        s[k] = source(w, &i->operands[k < sources ? k + 1 : 1], space[k]);
    for (int lane = 0; lane < LANES; lane++) {
        for (unsigned shift = 0; shift < 16 * i->decoded[1]; shift += 16) {
            float v[3];
            for (int k = 0; k < 3; k++) {
                const u16 bits = (u16)(s[k][lane] >> shift);
                v[k] = i->decoded[2] ? float_of_bfloat(bits) : float_of_half(bits);
            }
            const float result = operation(v[0], v[1], v[2]);
            results[lane] |= (u64)(i->decoded[2] ? bfloat_of_float(result) : half_of_float(result)) << shift;
        }
    }
    return finish(w, &i->operands[0], results, active);
}

static int is_short(scalar_type type)
{
    return type == T_F16 || type == T_BF16 || type == T_F16X2 || type == T_BF16X2;
}

static executor find_short_arithmetic(instruction *i)
{
    const char *type = strrchr(i->mnemonic, '.');
    if (!is_short(i->type) || i->to != T_NONE || !type)
        return NULL;
    const size_t length = (size_t)(type - i->mnemonic);
    for (size_t row = 0; row < sizeof short_operations / sizeof short_operations[0]; row++) {
        if (strlen(short_operations[row].name) != length ||
            memcmp(i->mnemonic, short_operations[row].name, length) != 0)
            continue;
        i->decoded[0] = row;
        i->decoded[1] = i->type == T_F16X2 || i->type == T_BF16X2 ? 2 : 1;
        i->decoded[2] = i->type == T_BF16 || i->type == T_BF16X2;
        i->decoded[3] = (u64)short_operations[row].sources;
        return i->operand_count == short_operations[row].sources + 1 ? short_arithmetic : NULL;
    }
    return NULL;
}

UNARY(neg_short, u16, a ^ 0x8000)
UNARY(neg_short_x2, u32, a ^ 0x80008000)
UNARY(abs_short, u16, a & 0x7fff)
UNARY(abs_short_x2, u32, a & 0x7fff7fff)

/* ---- Comparisons and predicates ---- */

/* What a comparison may find, as bits: setp's decoded[0] says which make it true. */
enum {
    LESS = 1,
    EQUAL = 2,
    GREATER = 4,
    UNORDERED = 8
};

static const struct {
    const char *name;
    unsigned found;
    int for_unsigned, for_float; /* lo, ls, hi, hs; equ … nan */
} comparisons[] = {{"eq", EQUAL, 0, 0},
                   {"ne", LESS | GREATER, 0, 0},
                   {"lt", LESS, 0, 0},
                   {"le", LESS | EQUAL, 0, 0},
                   {"gt", GREATER, 0, 0},
                   {"ge", GREATER | EQUAL, 0, 0},
                   {"lo", LESS, 1, 0},
                   {"ls", LESS | EQUAL, 1, 0},
                   {"hi", GREATER, 1, 0},
                   {"hs", GREATER | EQUAL, 1, 0},
                   {"equ", EQUAL | UNORDERED, 0, 1},
                   {"neu", LESS | GREATER | UNORDERED, 0, 1},
                   {"ltu", LESS | UNORDERED, 0, 1},
                   {"leu", LESS | EQUAL | UNORDERED, 0, 1},
                   {"gtu", GREATER | UNORDERED, 0, 1},
                   {"geu", GREATER | EQUAL | UNORDERED, 0, 1},
                   {"num", LESS | EQUAL | GREATER, 0, 1},
                   {"nan", UNORDERED, 0, 1}};

enum {
    COMBINE_NOT,
    COMBINE_AND,
    COMBINE_OR,
    COMBINE_XOR
};

static inline u64 combine(u64 how, u64 compared, u64 with)
{
    switch (how) {
    case COMBINE_AND:
        return compared & with;
    case COMBINE_OR:
        return compared | with;
    case COMBINE_XOR:
        return compared ^ with;
    default:
        return compared;
    }
}

/* decoded: [0] what makes it true, [1] how it is combined, [2] index of the first source. */
static const char *finish_setp(warp *w, const instruction *i, const uint64_t *compared, uint32_t active)
{
    const int first = (int)i->decoded[2];
    const u64 how = i->decoded[1];
    if (first == 1 && how == COMBINE_NOT)
        return finish(w, &i->operands[0], compared, active);
    uint64_t results[2][LANES];
    for (int lane = 0; lane < LANES; lane++) {
        const u64 with = how == COMBINE_NOT ? 0 : (u64)predicate_of(w, &i->operands[first + 2], lane);
        results[0][lane] = combine(how, compared[lane], with);
        results[1][lane] = combine(how, compared[lane] ^ 1, with);
    }
    finish(w, &i->operands[0], results[0], active);
    return first == 2 ? finish(w, &i->operands[1], results[1], active) : NULL;
}

#define COMPARE(name, type)                                                                                            \
    static const char *name(warp *w, const instruction *i, uint32_t active)                                            \
    {                                                                                                                  \
        uint64_t compared[LANES], space[2][LANES];                                                                     \
        const operand *sources = &i->operands[i->decoded[2]];                                                          \
        const uint64_t *as = source(w, &sources[0], space[0]), *bs = source(w, &sources[1], space[1]);                 \
        const unsigned wanted = (unsigned)i->decoded[0];                                                               \
        for (int lane = 0; lane < LANES; lane++) {                                                                     \
            const type a = as_##type(as[lane]), b = as_##type(bs[lane]);                                               \
            const unsigned found =                                                                                     \
                (a < b ? (unsigned)LESS : 0u) | (a == b ? (unsigned)EQUAL : 0u) | (a > b ? (unsigned)GREATER : 0u);    \
            compared[lane] = ((found ? found : (unsigned)UNORDERED) & wanted) != 0;                                    \
        }                                                                                                              \
        return finish_setp(w, i, compared, active);                                                                    \
    }

typedef float f16;
typedef float bf16;

static inline f16 as_f16(uint64_t bits)
{
    return float_of_half((u16)bits);
}

static inline bf16 as_bf16(uint64_t bits)
{
    return float_of_bfloat((u16)bits);
}

COMPARE(setp_u16, u16)
COMPARE(setp_s16, s16)
COMPARE(setp_u32, u32)
COMPARE(setp_s32, s32)
COMPARE(setp_u64, u64)
COMPARE(setp_s64, s64)
COMPARE(setp_f32, f32)
COMPARE(setp_f32_ftz, f32_ftz)
COMPARE(setp_f16, f16)
COMPARE(setp_bf16, bf16)

static executor comparison_of(const instruction *i)
{
    switch (i->type) {
    case T_B16:
    case T_U16:
        return setp_u16;
    case T_S16:
        return setp_s16;
    case T_B32:
    case T_U32:
        return setp_u32;
    case T_S32:
        return setp_s32;
    case T_B64:
    case T_U64:
        return setp_u64;
    case T_S64:
        return setp_s64;
    case T_F32:
        return has_modifier(i, "ftz") ? setp_f32_ftz : setp_f32;
    case T_F16:
        return setp_f16;
    case T_BF16:
        return setp_bf16;
    default:
        return NULL;
    }
}

static int is_float(scalar_type type)
{
    return type == T_F32 || is_short(type);
}

static int is_register_or_sink(const operand *o)
{
    return o->kind == O_REGISTER || o->kind == O_NONE;
}

static int is_value(const operand *o)
{
    return o->kind == O_REGISTER || o->kind == O_IMMEDIATE;
}

/* setp.CMP[.BOOL][.ftz].TYPE p[|q], a, b[, c] */
static executor find_setp(instruction *i)
{
    if (!begins_with(i->mnemonic, "setp."))
        return NULL;
    const size_t length = strcspn(i->mnemonic + 5, ".");
    for (size_t c = 0; c < sizeof comparisons / sizeof comparisons[0]; c++) {
        if (strlen(comparisons[c].name) != length || memcmp(comparisons[c].name, i->mnemonic + 5, length) != 0)
            continue;
        if (is_float(i->type) ? comparisons[c].for_unsigned : comparisons[c].for_float)
            return NULL;
        i->decoded[0] = comparisons[c].found;
    }
    i->decoded[1] = has_modifier(i, "and")   ? COMBINE_AND
                    : has_modifier(i, "or")  ? COMBINE_OR
                    : has_modifier(i, "xor") ? COMBINE_XOR
                                             : COMBINE_NOT;
    const int sources = i->decoded[1] == COMBINE_NOT ? 2 : 3, results = i->operand_count - sources;
    if (i->decoded[0] == 0 || results < 1 || results > 2)
        return NULL;
    i->decoded[2] = (u64)results;
    for (int k = 0; k < i->operand_count; k++)
        if (k < results ? !is_register_or_sink(&i->operands[k]) : !is_value(&i->operands[k]))
            return NULL;
    return comparison_of(i);
}

/* Predicates are 0 or 1 in a register; a source may be negated. */
static const char *and_pred(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES];
    for (int lane = 0; lane < LANES; lane++)
        results[lane] = (u64)(predicate_of(w, &i->operands[1], lane) & predicate_of(w, &i->operands[2], lane));
    return finish(w, &i->operands[0], results, active);
}

static const char *or_pred(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES];
    for (int lane = 0; lane < LANES; lane++)
        results[lane] = (u64)(predicate_of(w, &i->operands[1], lane) | predicate_of(w, &i->operands[2], lane));
    return finish(w, &i->operands[0], results, active);
}

static const char *xor_pred(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES];
    for (int lane = 0; lane < LANES; lane++)
        results[lane] = (u64)(predicate_of(w, &i->operands[1], lane) ^ predicate_of(w, &i->operands[2], lane));
    return finish(w, &i->operands[0], results, active);
}

static const char *not_pred(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES];
    for (int lane = 0; lane < LANES; lane++)
        results[lane] = (u64)!predicate_of(w, &i->operands[1], lane);
    return finish(w, &i->operands[0], results, active);
}

/* ---- Moves ---- */

static u64 bits_mask(int bits)
{
    return bits == 64 ? ~0ull : (1ull << bits) - 1;
}

static int bits_of_type(scalar_type type)
{
    switch (type) {
    case T_NONE:
        return 0;
    case T_PRED:
        return 1;
    case T_B8:
    case T_U8:
    case T_S8:
        return 8;
    case T_B16:
    case T_U16:
    case T_S16:
    case T_F16:
    case T_BF16:
        return 16;
    case T_B64:
    case T_U64:
    case T_S64:
    case T_F64:
        return 64;
    default:
        return 32;
    }
}

/* decoded[0]: the type's bits that count, here and in selp. */
static const char *mov(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], space[LANES];
    const uint64_t *as = source(w, &i->operands[1], space);
    for (int lane = 0; lane < LANES; lane++)
        results[lane] = as[lane] & i->decoded[0];
    return finish(w, &i->operands[0], results, active);
}

static const char *mov_pred(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES];
    for (int lane = 0; lane < LANES; lane++)
        results[lane] = (u64)predicate_of(w, &i->operands[1], lane);
    return finish(w, &i->operands[0], results, active);
}

/* mov.b64 d, {a, b}: the first item lies lowest; decoded[1] is an item's width. */
static const char *mov_pack(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES] = {0}, space[LANES];
    const operand *from = &i->operands[1];
    for (int k = 0; k < from->count; k++) {
        const uint64_t *items = source(w, &from->items[k], space);
        const u64 mask = bits_mask((int)i->decoded[1]), shift = (u64)k * i->decoded[1];
        for (int lane = 0; lane < LANES; lane++)
            results[lane] |= (items[lane] & mask) << shift;
    }
    return finish(w, &i->operands[0], results, active);
}

static const char *mov_unpack(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], copy[LANES], space[LANES];
    const operand *to = &i->operands[0];
    memcpy(copy, source(w, &i->operands[1], space), sizeof copy); /* an item may be the source */
    for (int k = 0; k < to->count; k++) {
        const u64 mask = bits_mask((int)i->decoded[1]), shift = (u64)k * i->decoded[1];
        for (int lane = 0; lane < LANES; lane++)
            results[lane] = copy[lane] >> shift & mask;
        finish(w, &to->items[k], results, active);
    }
    return NULL;
}

/* The special registers of a launch, a CTA or a warp; those of a lane are special_of_lane's. */
static u64 special_of_warp(const warp *w, int64_t which)
{
    const cta *c = w->cta;
    const launch *l = c->launch;
    const ptxvm_launch *asked = l->asked;
    const uint32_t cluster = cluster_size(asked);
    const int64_t axis = which < S_CLUSTER_CTARANK ? which % 3 : 0; /* every vector begins at a multiple of three */
    switch (which - axis) {
    case S_NTID:
        return asked->block[axis];
    case S_CTAID:
        return c->id[axis];
    case S_NCTAID:
        return asked->grid[axis];
    case S_CLUSTERID:
        return axis == 0 ? c->id[0] / cluster : c->id[axis];
    case S_NCLUSTERID:
        return axis == 0 ? asked->grid[0] / cluster : asked->grid[axis];
    case S_CLUSTER_CTAID:
        return axis == 0 ? c->rank : 0;
    case S_CLUSTER_NCTAID:
        return axis == 0 ? cluster : 1;
    case S_CLUSTER_CTARANK:
        return c->rank;
    case S_CLUSTER_NCTARANK:
        return cluster;
    case S_WARPID:
        return (u64)w->index;
    case S_NWARPID:
        return (u64)c->warp_count;
    case S_SMID:
        return c->sm;
    case S_NSMID:
        return asked->sm_count;
    case S_CLOCK:
        return l->clock;
    case S_DYNAMIC_SMEM_SIZE:
        return asked->dynamic_smem_bytes;
    default:
        return c->shared_bytes; /* S_TOTAL_SMEM_SIZE */
    }
}

static u64 special_of_lane(const warp *w, int64_t which, unsigned lane)
{
    const uint32_t *block = w->cta->launch->asked->block;
    const uint32_t thread = (uint32_t)w->index * LANES + lane, bit = 1u << lane;
    switch (which) {
    case S_TID:
        return thread % block[0];
    case S_TID + 1:
        return thread / block[0] % block[1];
    case S_TID + 2:
        return thread / block[0] / block[1];
    case S_LANEID:
        return lane;
    case S_LANEMASK_EQ:
        return bit;
    case S_LANEMASK_LE:
        return bit | (bit - 1);
    case S_LANEMASK_LT:
        return bit - 1;
    case S_LANEMASK_GE:
        return (uint32_t) ~(bit - 1);
    default:
        return (uint32_t) ~(bit | (bit - 1)); /* S_LANEMASK_GT */
    }
}

static const char *mov_special(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES];
    const int64_t which = i->operands[1].imm;
    const int of_lane = which < S_NTID || which == S_LANEID || (which >= S_LANEMASK_EQ && which <= S_LANEMASK_GT);
    const u64 of_warp = of_lane ? 0 : special_of_warp(w, which);
    for (unsigned lane = 0; lane < LANES; lane++)
        results[lane] = (of_lane ? special_of_lane(w, which, lane) : of_warp) & i->decoded[0];
    return finish(w, &i->operands[0], results, active);
}

static executor find_mov(instruction *i)
{
    if (!begins_with(i->mnemonic, "mov.") || strchr(i->mnemonic + 4, '.') || i->operand_count != 2)
        return NULL;
    const operand *to = &i->operands[0], *from = &i->operands[1];
    const int bits = bits_of_type(i->type);
    i->decoded[0] = bits_mask(bits);
    const operand *items = to->kind == O_VECTOR ? to : from->kind == O_VECTOR ? from : NULL;
    if (items) {
        if (items->count != 2 && items->count != 4)
            return NULL;
        i->decoded[1] = (u64)(bits / items->count);
    }
    if (to->kind == O_VECTOR) {
        for (int k = 0; k < to->count; k++)
            if (!is_register_or_sink(&to->items[k]))
                return NULL;
        return bits >= 16 && from->kind == O_REGISTER ? mov_unpack : NULL;
    }
    if (bits == 0 || !is_register_or_sink(to))
        return NULL;
    if (from->kind == O_VECTOR) {
        for (int k = 0; k < from->count; k++)
            if (!is_value(&from->items[k]))
                return NULL;
        return bits >= 16 ? mov_pack : NULL;
    }
    if (from->kind == O_SPECIAL)
        return mov_special;
    return !is_value(from) ? NULL : i->type == T_PRED ? mov_pred : mov;
}

static const char *selp(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], space[2][LANES];
    const uint64_t *as = source(w, &i->operands[1], space[0]), *bs = source(w, &i->operands[2], space[1]);
    for (int lane = 0; lane < LANES; lane++)
        results[lane] = (predicate_of(w, &i->operands[3], lane) ? as[lane] : bs[lane]) & i->decoded[0];
    return finish(w, &i->operands[0], results, active);
}

/* Global addresses are the same in every state space; a parameter's is that of the launch's copy. */
static const char *cvta_param(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES];
    for (int lane = 0; lane < LANES; lane++)
        results[lane] = (u64)(uintptr_t)w->cta->launch->parameters + value_of(w, &i->operands[1], lane);
    return finish(w, &i->operands[0], results, active);
}

static const char *trap(warp *w, const instruction *i, uint32_t active)
{
    (void)w;
    (void)i;
    return fail("lanes %08x trap", active);
}

/* ---- Conversions ---- */

enum {
    ROUND_NONE,
    ROUND_NEAREST, /* .rni */
    ROUND_ZERO,    /* .rzi */
    ROUND_DOWN,    /* .rmi */
    ROUND_UP       /* .rpi */
};

static double round_double(u64 how, double value)
{
    switch (how) {
    case ROUND_NEAREST:
        return rint(value);
    case ROUND_ZERO:
        return trunc(value);
    case ROUND_DOWN:
        return floor(value);
    case ROUND_UP:
        return ceil(value);
    default:
        return value;
    }
}

static int is_signed(scalar_type type)
{
    return type == T_S8 || type == T_S16 || type == T_S32 || type == T_S64;
}

static int is_integer(scalar_type type)
{
    return is_signed(type) || type == T_U8 || type == T_U16 || type == T_U32 || type == T_U64;
}

/* decoded: [0] the source's bits, [1] whether it is signed, [2] the result's mask. */
static const char *cvt_integer(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], space[LANES];
    const uint64_t *as = source(w, &i->operands[1], space), mask = i->decoded[2];
    const unsigned shift = 64 - (unsigned)i->decoded[0];
    if (i->decoded[1]) {
        for (int lane = 0; lane < LANES; lane++)
            results[lane] = (u64)((s64)(as[lane] << shift) >> shift) & mask;
    } else {
        for (int lane = 0; lane < LANES; lane++)
            results[lane] = as[lane] << shift >> shift & mask;
    }
    return finish(w, &i->operands[0], results, active);
}

/* The same, .sat: what does not fit becomes the nearest that does. decoded[3]: whether the result is signed. */
static const char *cvt_integer_sat(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], space[LANES];
    const uint64_t *as = source(w, &i->operands[1], space);
    const unsigned shift = 64 - (unsigned)i->decoded[0];
    const s128 last = (s128)(i->decoded[3] ? i->decoded[2] >> 1 : i->decoded[2]), first = i->decoded[3] ? -last - 1 : 0;
    for (int lane = 0; lane < LANES; lane++) {
        const u64 bits = as[lane] << shift;
        const s128 value = i->decoded[1] ? (s128)((s64)bits >> shift) : (s128)(bits >> shift);
        results[lane] = (u64)(value < first ? first : value > last ? last : value) & i->decoded[2];
    }
    return finish(w, &i->operands[0], results, active);
}

/* A register's number of a floating-point type. */
static float float_of_type(scalar_type type, u64 bits)
{
    return type == T_F16 ? as_f16(bits) : type == T_BF16 ? as_bf16(bits) : as_f32(bits);
}

static u64 bits_in_type(scalar_type type, float value)
{
    return type == T_F16 ? half_of_float(value) : type == T_BF16 ? bfloat_of_float(value) : of_f32(value);
}

/* decoded: [0] the source's bits, [1] whether it is signed. Integers beyond 32 bits go to f32 only. */
static const char *cvt_to_float(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], space[LANES];
    const uint64_t *as = source(w, &i->operands[1], space);
    const unsigned shift = 64 - (unsigned)i->decoded[0];
    for (int lane = 0; lane < LANES; lane++) {
        const u64 bits = as[lane] << shift;
        const s64 as_signed = (s64)bits >> shift;
        const u64 as_unsigned = bits >> shift;
        if (i->to == T_F32)
            results[lane] = of_f32(i->decoded[1] ? (float)as_signed : (float)as_unsigned);
        else
            results[lane] = bits_in_type(i->to, float_to_odd(i->decoded[1] ? (double)as_signed : (double)as_unsigned));
    }
    return finish(w, &i->operands[0], results, active);
}

/* The nearest integer of the type; NaN is 0. */
static u64 saturate(double value, u64 mask, u64 to_signed)
{
    const u64 last = to_signed ? mask >> 1 : mask, first = to_signed ? mask & ~last : 0;
    if (value != value)
        return 0;
    if (value >= (double)last)
        return last;
    if (to_signed)
        return value <= -(double)last - 1 ? first : (u64)(s64)value & mask;
    return value <= 0 ? 0 : (u64)value;
}

/* decoded: [0] rounding, [1] whether subnormal numbers count as 0, [2] the result's mask, [3] whether it is signed. */
static const char *cvt_to_integer(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], space[LANES];
    const uint64_t *as = source(w, &i->operands[1], space);
    for (int lane = 0; lane < LANES; lane++) {
        const u64 bits = i->decoded[1] ? flush((u32)as[lane]) : as[lane];
        const double value = (double)float_of_type(i->type, bits);
        results[lane] = saturate(round_double(i->decoded[0], value), i->decoded[2], i->decoded[3]);
    }
    return finish(w, &i->operands[0], results, active);
}

enum { /* decoded[1] of conversions between floating-point types */
    FLUSH = 1,
    SATURATE_01 = 2, /* .sat: into [0, 1] */
    RELU = 4
};

static float limit(u64 how, float value)
{
    if (how & SATURATE_01)
        return value != value ? 0 : lesser(greater(value, 0), 1);
    return how & RELU && value < 0 ? 0 : value;
}

/* decoded: [0] rounding to an integer, [1] limits. */
static const char *cvt_float(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], space[LANES];
    const uint64_t *as = source(w, &i->operands[1], space);
    for (int lane = 0; lane < LANES; lane++) {
        const u64 bits = i->decoded[1] & FLUSH && i->type == T_F32 ? flush((u32)as[lane]) : as[lane];
        const float value = (float)round_double(i->decoded[0], (double)float_of_type(i->type, bits));
        results[lane] = bits_in_type(i->to, limit(i->decoded[1], value));
        if (i->decoded[1] & FLUSH && i->to == T_F32)
            results[lane] = flush((u32)results[lane]);
    }
    return finish(w, &i->operands[0], results, active);
}

/* Most conversions neither round to integers nor limit anything. */
UNARY(cvt_f32_f16, f16, of_f32(a))
UNARY(cvt_f32_bf16, bf16, of_f32(a))
UNARY(cvt_f16_f32, f32, half_of_float(a))
UNARY(cvt_bf16_f32, f32, bfloat_of_float(a))

static executor plain_cvt_float(scalar_type to, scalar_type from)
{
    if (to == T_F32)
        return from == T_F16 ? cvt_f32_f16 : from == T_BF16 ? cvt_f32_bf16 : cvt_float;
    return from != T_F32 ? cvt_float : to == T_F16 ? cvt_f16_f32 : cvt_bf16_f32;
}

/* cvt.rn.f16x2.f32 d, a, b: a goes to the upper half. */
static const char *cvt_pack(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], space[2][LANES];
    const uint64_t *as = source(w, &i->operands[1], space[0]), *bs = source(w, &i->operands[2], space[1]);
    const scalar_type to = i->to == T_F16X2 ? T_F16 : T_BF16;
    for (int lane = 0; lane < LANES; lane++)
        results[lane] = bits_in_type(to, limit(i->decoded[1], as_f32(as[lane]))) << 16 |
                        bits_in_type(to, limit(i->decoded[1], as_f32(bs[lane])));
    return finish(w, &i->operands[0], results, active);
}

static const char *cvt_e4m3x2_f32(warp *w, const instruction *i, uint32_t active)
{
    uint64_t results[LANES], space[2][LANES];
    const uint64_t *as = source(w, &i->operands[1], space[0]), *bs = source(w, &i->operands[2], space[1]);
    for (int lane = 0; lane < LANES; lane++)
        results[lane] = (u64)e4m3_of_float_satfinite(as_f32(as[lane])) << 8 | e4m3_of_float_satfinite(as_f32(bs[lane]));
    return finish(w, &i->operands[0], results, active);
}

UNARY(cvt_e4m3x2_f16x2, u32, (u64)e4m3_of_float_satfinite(as_f16(a >> 16)) << 8 | e4m3_of_float_satfinite(as_f16(a)))
UNARY(cvt_f16x2_e4m3x2, u16,
      (u64)half_of_float(float_of_e4m3((uint8_t)(a >> 8))) << 16 | half_of_float(float_of_e4m3((uint8_t)a)))

static u64 rounding_of(const instruction *i)
{
    return has_modifier(i, "rni")   ? ROUND_NEAREST
           : has_modifier(i, "rzi") ? ROUND_ZERO
           : has_modifier(i, "rmi") ? ROUND_DOWN
           : has_modifier(i, "rpi") ? ROUND_UP
                                    : ROUND_NONE;
}

/* Whether every modifier in front of the types is one of these words. */
static int has_only(const instruction *i, const char *words)
{
    size_t known = strlen("cvt");
    const char *word = words;
    while (*word) {
        const size_t length = strcspn(word, " ");
        char modifier[16] = "";
        memcpy(modifier, word, length < sizeof modifier ? length : 0);
        known += has_modifier(i, modifier) ? length + 1 : 0;
        word += length + (word[length] == ' ');
    }
    const char *types = i->mnemonic + strlen(i->mnemonic);
    for (int dots = 0; types > i->mnemonic && dots < 2; dots += *types == '.')
        types--;
    return (size_t)(types - i->mnemonic) == known;
}

static executor find_cvt_pack(instruction *i)
{
    if ((i->to != T_F16X2 && i->to != T_BF16X2) || i->type != T_F32 || i->operand_count != 3 ||
        !is_value(&i->operands[2]) || !has_modifier(i, "rn") || !has_only(i, "rn relu"))
        return NULL;
    i->decoded[1] = has_modifier(i, "relu") ? RELU : 0;
    return cvt_pack;
}

/* cvt[.rounding][.ftz][.sat].TO.FROM d, a with scalar types. */
static executor find_cvt(instruction *i)
{
    if (!begins_with(i->mnemonic, "cvt.") || i->operand_count < 2 || !is_register_or_sink(&i->operands[0]) ||
        !is_value(&i->operands[1]))
        return NULL;
    if (i->operand_count != 2)
        return find_cvt_pack(i);
    const int from_integer = is_integer(i->type), to_integer = is_integer(i->to);
    const u64 from_bits = (u64)bits_of_type(i->type), to_mask = i->to ? bits_mask(bits_of_type(i->to)) : 0;
    const int from_float = i->type == T_F32 || i->type == T_F16 || i->type == T_BF16;
    const int to_float = i->to == T_F32 || i->to == T_F16 || i->to == T_BF16;
    const u64 rounding = rounding_of(i);
    if (from_integer && to_integer && has_only(i, "sat")) {
        memcpy(i->decoded, (u64[]){from_bits, (u64)is_signed(i->type), to_mask, (u64)is_signed(i->to)},
               sizeof i->decoded);
        return has_modifier(i, "sat") ? cvt_integer_sat : cvt_integer;
    }
    if (from_integer && to_float && has_modifier(i, "rn") && has_only(i, "rn")) {
        memcpy(i->decoded, (u64[]){from_bits, (u64)is_signed(i->type), 0, 0}, sizeof i->decoded);
        return from_bits <= 32 || i->to == T_F32 ? cvt_to_float : NULL;
    }
    if (from_float && to_integer && rounding && has_only(i, "rni rzi rmi rpi ftz sat")) {
        memcpy(i->decoded, (u64[]){rounding, (u64)has_modifier(i, "ftz"), to_mask, (u64)is_signed(i->to)},
               sizeof i->decoded);
        return cvt_to_integer;
    }
    if (from_float && to_float && has_only(i, "rn rni rzi rmi rpi ftz sat relu")) {
        const u64 limits = (has_modifier(i, "ftz") ? FLUSH : 0u) | (has_modifier(i, "sat") ? SATURATE_01 : 0u) |
                           (has_modifier(i, "relu") ? RELU : 0u);
        memcpy(i->decoded, (u64[]){rounding, limits, 0, 0}, sizeof i->decoded);
        return rounding == ROUND_NONE && limits == 0 ? plain_cvt_float(i->to, i->type) : cvt_float;
    }
    return NULL;
}

/* dp2a.{lo,hi}.{u32,s32}.{u32,s32}, dp4a.{u32,s32}.{u32,s32} */
static executor find_dot_product(instruction *i)
{
    const int halves = begins_with(i->mnemonic, "dp2a.lo.") || begins_with(i->mnemonic, "dp2a.hi.");
    const size_t length = halves ? strlen("dp2a.lo.") : strlen("dp4a.");
    if ((!halves && strncmp(i->mnemonic, "dp4a.", length) != 0) || strlen(i->mnemonic) != length + strlen("u32.u32") ||
        (i->to != T_U32 && i->to != T_S32) || (i->type != T_U32 && i->type != T_S32) || i->operand_count != 4 ||
        !is_register_or_sink(&i->operands[0]))
        return NULL;
    for (int k = 1; k < 4; k++)
        if (!is_value(&i->operands[k]))
            return NULL;
    i->decoded[0] = halves ? 16 : 8;
    i->decoded[1] = has_modifier(i, "hi") ? 16 : 0;
    i->decoded[2] = i->to == T_S32;
    i->decoded[3] = i->type == T_S32;
    return dot_product;
}

/* ---- Which executor serves which mnemonic ---- */

static const struct {
    const char *mnemonic;
    executor execute;
    int sources;
} rows[] = {
    {"add.s16", add_16, 2},
    {"add.u16", add_16, 2},
    {"add.s32", add_32, 2},
    {"add.u32", add_32, 2},
    {"add.s64", add_64, 2},
    {"add.u64", add_64, 2},
    {"sub.s16", sub_16, 2},
    {"sub.u16", sub_16, 2},
    {"sub.s32", sub_32, 2},
    {"sub.u32", sub_32, 2},
    {"sub.s64", sub_64, 2},
    {"sub.u64", sub_64, 2},
    {"mul.lo.s16", mul_lo_16, 2},
    {"mul.lo.u16", mul_lo_16, 2},
    {"mul.lo.s32", mul_lo_32, 2},
    {"mul.lo.u32", mul_lo_32, 2},
    {"mul.lo.s64", mul_lo_64, 2},
    {"mul.lo.u64", mul_lo_64, 2},
    {"mul.hi.s32", mul_hi_s32, 2},
    {"mul.hi.u32", mul_hi_u32, 2},
    {"mul.hi.s64", mul_hi_s64, 2},
    {"mul.hi.u64", mul_hi_u64, 2},
    {"mul.wide.s16", mul_wide_s16, 2},
    {"mul.wide.u16", mul_wide_u16, 2},
    {"mul.wide.s32", mul_wide_s32, 2},
    {"mul.wide.u32", mul_wide_u32, 2},
    {"mad.lo.s16", mad_lo_16, 3},
    {"mad.lo.u16", mad_lo_16, 3},
    {"mad.lo.s32", mad_lo_32, 3},
    {"mad.lo.u32", mad_lo_32, 3},
    {"mad.lo.s64", mad_lo_64, 3},
    {"mad.lo.u64", mad_lo_64, 3},
    {"mad.hi.s32", mad_hi_s32, 3},
    {"mad.hi.u32", mad_hi_u32, 3},
    {"mad.wide.s16", mad_wide_s16, 3},
    {"mad.wide.u16", mad_wide_u16, 3},
    {"mad.wide.s32", mad_wide_s32, 3},
    {"mad.wide.u32", mad_wide_u32, 3},
    {"div.s16", div_s16, 2},
    {"div.u16", div_u16, 2},
    {"div.s32", div_s32, 2},
    {"div.u32", div_u32, 2},
    {"div.s64", div_s64, 2},
    {"div.u64", div_u64, 2},
    {"rem.s16", rem_s16, 2},
    {"rem.u16", rem_u16, 2},
    {"rem.s32", rem_s32, 2},
    {"rem.u32", rem_u32, 2},
    {"rem.s64", rem_s64, 2},
    {"rem.u64", rem_u64, 2},
    {"min.s16", min_s16, 2},
    {"min.u16", min_u16, 2},
    {"min.s32", min_s32, 2},
    {"min.u32", min_u32, 2},
    {"min.s64", min_s64, 2},
    {"min.u64", min_u64, 2},
    {"max.s16", max_s16, 2},
    {"max.u16", max_u16, 2},
    {"max.s32", max_s32, 2},
    {"max.u32", max_u32, 2},
    {"max.s64", max_s64, 2},
    {"max.u64", max_u64, 2},
    {"neg.s16", neg_16, 1},
    {"neg.s32", neg_32, 1},
    {"neg.s64", neg_64, 1},
    {"abs.s16", abs_s16, 1},
    {"abs.s32", abs_s32, 1},
    {"abs.s64", abs_s64, 1},

    {"and.b16", and_16, 2},
    {"and.b32", and_32, 2},
    {"and.b64", and_64, 2},
    {"and.pred", and_pred, 2},
    {"or.b16", or_16, 2},
    {"or.b32", or_32, 2},
    {"or.b64", or_64, 2},
    {"or.pred", or_pred, 2},
    {"xor.b16", xor_16, 2},
    {"xor.b32", xor_32, 2},
    {"xor.b64", xor_64, 2},
    {"xor.pred", xor_pred, 2},
    {"not.b16", not_16, 1},
    {"not.b32", not_32, 1},
    {"not.b64", not_64, 1},
    {"not.pred", not_pred, 1},
    {"shl.b16", shl_16, 2},
    {"shl.b32", shl_32, 2},
    {"shl.b64", shl_64, 2},
    {"shr.b16", shr_u16, 2},
    {"shr.u16", shr_u16, 2},
    {"shr.s16", shr_s16, 2},
    {"shr.b32", shr_u32, 2},
    {"shr.u32", shr_u32, 2},
    {"shr.s32", shr_s32, 2},
    {"shr.b64", shr_u64, 2},
    {"shr.u64", shr_u64, 2},
    {"shr.s64", shr_s64, 2},
    {"shf.l.wrap.b32", shf_l_wrap, 3},
    {"shf.l.clamp.b32", shf_l_clamp, 3},
    {"shf.r.wrap.b32", shf_r_wrap, 3},
    {"shf.r.clamp.b32", shf_r_clamp, 3},
    {"prmt.b32", prmt_32, 3},
    {"bfe.u32", bfe_u32, 3},
    {"bfe.s32", bfe_s32, 3},
    {"bfe.u64", bfe_u64, 3},
    {"bfe.s64", bfe_s64, 3},
    {"bfi.b32", bfi, 4},
    {"bfi.b64", bfi, 4},
    {"lop3.b32", lop3, 4},
    {"popc.b32", popc_32, 1},
    {"popc.b64", popc_64, 1},
    {"clz.b32", clz_32, 1},
    {"clz.b64", clz_64, 1},
    {"brev.b32", brev_32, 1},
    {"brev.b64", brev_64, 1},

    {"add.f32", add_f32, 2},
    {"add.rn.f32", add_f32, 2},
    {"add.ftz.f32", add_f32_ftz, 2},
    {"add.rn.ftz.f32", add_f32_ftz, 2},
    {"sub.f32", sub_f32, 2},
    {"sub.rn.f32", sub_f32, 2},
    {"sub.ftz.f32", sub_f32_ftz, 2},
    {"sub.rn.ftz.f32", sub_f32_ftz, 2},
    {"mul.f32", mul_f32, 2},
    {"mul.rn.f32", mul_f32, 2},
    {"mul.ftz.f32", mul_f32_ftz, 2},
    {"mul.rn.ftz.f32", mul_f32_ftz, 2},
    {"fma.rn.f32", fma_f32, 3},
    {"fma.rn.ftz.f32", fma_f32_ftz, 3},
    {"div.rn.f32", div_f32, 2},
    {"div.full.f32", div_f32, 2},
    {"div.approx.f32", div_f32, 2},
    {"div.rn.ftz.f32", div_f32_ftz, 2},
    {"div.full.ftz.f32", div_f32_ftz, 2},
    {"div.approx.ftz.f32", div_f32_ftz, 2},
    {"min.f32", min_f32, 2},
    {"min.ftz.f32", min_f32_ftz, 2},
    {"min.NaN.f32", min_nan_f32, 2},
    {"max.f32", max_f32, 2},
    {"max.ftz.f32", max_f32_ftz, 2},
    {"max.NaN.f32", max_nan_f32, 2},
    {"neg.f32", neg_f32, 1},
    {"neg.ftz.f32", neg_f32_ftz, 1},
    {"abs.f32", abs_f32, 1},
    {"abs.ftz.f32", abs_f32_ftz, 1},
    {"copysign.f32", copysign_f32, 2},
    {"rcp.rn.f32", rcp_f32, 1},
    {"rcp.approx.f32", rcp_f32, 1},
    {"rcp.rn.ftz.f32", rcp_f32_ftz, 1},
    {"rcp.approx.ftz.f32", rcp_f32_ftz, 1},
    {"sqrt.rn.f32", sqrt_f32, 1},
    {"sqrt.approx.f32", sqrt_f32, 1},
    {"sqrt.rn.ftz.f32", sqrt_f32_ftz, 1},
    {"sqrt.approx.ftz.f32", sqrt_f32_ftz, 1},
    {"rsqrt.approx.f32", rsqrt_f32, 1},
    {"rsqrt.approx.ftz.f32", rsqrt_f32_ftz, 1},
    {"ex2.approx.f32", ex2_f32, 1},
    {"ex2.approx.ftz.f32", ex2_f32_ftz, 1},
    {"lg2.approx.f32", lg2_f32, 1},
    {"lg2.approx.ftz.f32", lg2_f32_ftz, 1},
    {"sin.approx.f32", sin_f32, 1},
    {"sin.approx.ftz.f32", sin_f32_ftz, 1},
    {"cos.approx.f32", cos_f32, 1},
    {"cos.approx.ftz.f32", cos_f32_ftz, 1},
    {"tanh.approx.f32", tanh_f32, 1},

    {"neg.f16", neg_short, 1},
    {"neg.bf16", neg_short, 1},
    {"neg.f16x2", neg_short_x2, 1},
    {"neg.bf16x2", neg_short_x2, 1},
    {"abs.f16", abs_short, 1},
    {"abs.bf16", abs_short, 1},
    {"abs.f16x2", abs_short_x2, 1},
    {"abs.bf16x2", abs_short_x2, 1},

    {"selp.b16", selp, 3},
    {"selp.u16", selp, 3},
    {"selp.s16", selp, 3},
    {"selp.f16", selp, 3},
    {"selp.b32", selp, 3},
    {"selp.u32", selp, 3},
    {"selp.s32", selp, 3},
    {"selp.f32", selp, 3},
    {"selp.b64", selp, 3},
    {"selp.u64", selp, 3},
    {"selp.s64", selp, 3},
    {"cvta.to.global.u64", mov, 1},
    {"cvta.global.u64", mov, 1},
    {"cvta.param.u64", cvta_param, 1},

    {"cvt.rn.satfinite.e4m3x2.f32", cvt_e4m3x2_f32, 2},
    {"cvt.rn.satfinite.e4m3x2.f16x2", cvt_e4m3x2_f16x2, 1},
    {"cvt.rn.f16x2.e4m3x2", cvt_f16x2_e4m3x2, 1},
};

/* The one to take on this processor. */
static executor faster(executor execute)
{
#if defined(__x86_64__)
    if (execute == fma_f32 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return fma_f32_fast;
#endif
    return execute;
}

/* An executor of the table, if the operands are a register and that many values. */
static executor find_row(instruction *i)
{
    for (size_t row = 0; row < sizeof rows / sizeof rows[0]; row++) {
        if (strcmp(rows[row].mnemonic, i->mnemonic) != 0)
            continue;
        if (i->operand_count != rows[row].sources + 1 || !is_register_or_sink(&i->operands[0]))
            return NULL;
        for (int k = 1; k < i->operand_count; k++)
            if (!is_value(&i->operands[k]))
                return NULL;
        if (rows[row].execute == lop3 && i->operands[4].kind != O_IMMEDIATE)
            return NULL;
        i->decoded[0] = rows[row].execute == bfi ? (u64)bits_of_type(i->type) : bits_mask(bits_of_type(i->type));
        return faster(rows[row].execute);
    }
    return NULL;
}

executor find_executor_arith(instruction *i)
{
    if (strcmp(i->mnemonic, "trap") == 0 && i->operand_count == 0)
        return trap;
    executor (*const find[])(instruction *) = {find_row,        find_mov, find_setp, find_cvt, find_short_arithmetic,
                                               find_dot_product};
    for (size_t k = 0; k < sizeof find / sizeof find[0]; k++) {
        executor execute = find[k](i);
        if (execute)
            return execute;
    }
    return NULL;
}
