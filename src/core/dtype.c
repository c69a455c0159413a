/* The types that tensors are stored in, see dtype.h: binary formats narrower than float32, element by element. */
#include "dtype.h"

#include <math.h>
#include <string.h>

/* A binary floating-point format narrower than float32. */
typedef struct narrow_format {
    int mantissa_bits; /* stored, without the leading one */
    int exponent_min;  /* of the smallest normal number; the bias is 1 - exponent_min */
    double max_finite;
    uint32_t nan; /* a quiet NaN, positive */
    /* What values beyond max_finite become: infinity; for e4m3, which has none, the largest number, as in the
     * hardware's saturating conversion. */
    uint32_t overflow;
    int sign_bit;
} narrow_format;

static const narrow_format f16_format = {10, -14, 65504.0, 0x7e00, 0x7c00, 15};
static const narrow_format bf16_format = {7, -126, 0x1.fep127, 0x7fc0, 0x7f80, 15};
static const narrow_format e4m3_format = {3, -6, 448.0, 0x7f, 0x7e, 7};

static const narrow_format *format_of(acr_dtype dtype)
{
    return dtype == ACR_F16 ? &f16_format : dtype == ACR_BF16 ? &bf16_format : &e4m3_format;
}

static uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double double_of(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* 2^exponent, for exponents of normal doubles. */
static double power_of_two(int exponent)
{
    return double_of((uint64_t)(exponent + 1023) << 52);
}

/* What a double's exponent is more than the format's, at its place there. Exponent and mantissa are adjacent in both
 * formats, so only the bias differs. */
static inline uint64_t bias_difference(const narrow_format *format)
{
    return (uint64_t)(format->exponent_min - 1 + 1023) << format->mantissa_bits;
}

/* The sign goes in as a bit: of random numbers a branch would be guessed wrong every other time. */
static inline double decode(const narrow_format *format, uint32_t bits)
{
    const uint32_t magnitude = bits & ((1u << format->sign_bit) - 1);
    const uint64_t sign = (uint64_t)(bits >> format->sign_bit & 1) << 63;
    if (format == &e4m3_format ? magnitude == format->nan : magnitude > format->overflow) {
        return NAN;
    }
    if (format != &e4m3_format && magnitude == format->overflow) {
        return double_of(bits_of(INFINITY) | sign);
    }
    if (magnitude >> format->mantissa_bits == 0) {
        const double value = (int32_t)magnitude * power_of_two(format->exponent_min - format->mantissa_bits);
        return double_of(bits_of(value) | sign);
    }
    return double_of((magnitude + bias_difference(format)) << (52 - format->mantissa_bits) | sign);
}

/* The nearest value of the format, ties to even, as if its exponent had no upper end. magnitude >= 0 and finite. */
static inline double round_magnitude(const narrow_format *format, double magnitude)
{
    const double smallest_normal = power_of_two(format->exponent_min);
    if (magnitude < smallest_normal) {
        /* Adding a number whose own last bit is the format's smallest step leaves the rounding to the adder. */
        const double step_at_bit_0 = smallest_normal * power_of_two(52 - format->mantissa_bits);
        return magnitude + step_at_bit_0 - step_at_bit_0;
    }
    const int dropped = 52 - format->mantissa_bits;
    const uint64_t bits = bits_of(magnitude);
    const uint64_t half_or_less = ((uint64_t)1 << (dropped - 1)) - 1 + (bits >> dropped & 1);
    return double_of((bits + half_or_less) >> dropped << dropped);
}

static inline uint32_t encode(const narrow_format *format, double value)
{
    if (isnan(value)) {
        return format->nan;
    }
    const uint32_t sign = (signbit(value) ? 1u : 0u) << format->sign_bit;
    if (isinf(value)) {
        return sign | format->overflow;
    }
    const double rounded = round_magnitude(format, fabs(value));
    if (rounded > format->max_finite) {
        return sign | format->overflow;
    }
    if (rounded < power_of_two(format->exponent_min)) {
        return sign | (uint32_t)(rounded * power_of_two(format->mantissa_bits - format->exponent_min));
    }
    return sign | (uint32_t)((bits_of(rounded) >> (52 - format->mantissa_bits)) - bias_difference(format));
}

/* Inline where the type is a constant, too: the compiler folds the format into the arithmetic. */
#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE double load(acr_dtype dtype, const void *base, int64_t index)
{
    switch (dtype) {
    case ACR_F32:
        return ((const float *)base)[index];
    case ACR_F16:
        return decode(&f16_format, ((const uint16_t *)base)[index]);
    case ACR_BF16:
        return decode(&bf16_format, ((const uint16_t *)base)[index]);
    case ACR_E4M3:
        return decode(&e4m3_format, ((const uint8_t *)base)[index]);
    case ACR_BOOL8:
        return ((const uint8_t *)base)[index] != 0;
    case ACR_DTYPE_DEFAULT:
        break;
    }
    return NAN;
}

ALWAYS_INLINE void store(acr_dtype dtype, void *base, int64_t index, double value)
{
    switch (dtype) {
    case ACR_F32:
        ((float *)base)[index] = (float)value;
        return;
    case ACR_F16:
        ((uint16_t *)base)[index] = (uint16_t)encode(&f16_format, value);
        return;
    case ACR_BF16:
        ((uint16_t *)base)[index] = (uint16_t)encode(&bf16_format, value);
        return;
    case ACR_E4M3:
        ((uint8_t *)base)[index] = (uint8_t)encode(&e4m3_format, value);
        return;
    case ACR_BOOL8:
        ((uint8_t *)base)[index] = value != 0.0;
        return;
    case ACR_DTYPE_DEFAULT:
        return;
    }
}

double acr__load_element(acr_dtype dtype, const void *base, int64_t index)
{
    return load(dtype, base, index);
}

void acr__store_element(acr_dtype dtype, void *base, int64_t index, double value)
{
    store(dtype, base, index, value);
}

/* Calls a function with the type, which is a constant for each of the common ones: a loop of its own. */
#define BY_TYPE(dtype, function, ...)                                                                                  \
    do {                                                                                                               \
        switch (dtype) {                                                                                               \
        case ACR_F32:                                                                                                  \
            function(ACR_F32, __VA_ARGS__);                                                                            \
            break;                                                                                                     \
        case ACR_F16:                                                                                                  \
            function(ACR_F16, __VA_ARGS__);                                                                            \
            break;                                                                                                     \
        case ACR_BF16:                                                                                                 \
            function(ACR_BF16, __VA_ARGS__);                                                                           \
            break;                                                                                                     \
        default:                                                                                                       \
            function(dtype, __VA_ARGS__);                                                                              \
        }                                                                                                              \
    } while (0)

ALWAYS_INLINE void load_all(acr_dtype dtype, double *to, const void *base, int64_t first, int64_t count)
{
    for (int64_t i = 0; i < count; ++i) {
        to[i] = load(dtype, base, first + i);
    }
}

void acr__load_elements(double *to, acr_dtype dtype, const void *base, int64_t first, int64_t count)
{
    BY_TYPE(dtype, load_all, to, base, first, count);
}

ALWAYS_INLINE void store_all(acr_dtype dtype, void *base, int64_t first, int64_t count, const double *from)
{
    for (int64_t i = 0; i < count; ++i) {
        store(dtype, base, first + i, from[i]);
    }
}

void acr__store_elements(acr_dtype dtype, void *base, int64_t first, int64_t count, const double *from)
{
    BY_TYPE(dtype, store_all, base, first, count, from);
}

double acr__round_magnitude(acr_dtype dtype, double magnitude)
{
    return round_magnitude(format_of(dtype), magnitude);
}
