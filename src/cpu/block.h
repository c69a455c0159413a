/* The register-blocked product of the CPU's families with rows in lanes: a block of ROW_VECS vectors of rows times
 * COLUMNS columns, in steps of which UNROLL are written out. The three are parameters of the line. */
#ifndef ACR_CPU_BLOCK_H
#define ACR_CPU_BLOCK_H

#include "cpu/simd.h"

#ifndef ROW_VECS /* no line of the list: a block of one register, for a look at the header by itself */
#define ROW_VECS 1
#define COLUMNS 1
#define UNROLL 1
#endif

_Static_assert(ROW_VECS *COLUMNS + ROW_VECS + 1 <= REGISTERS,
               "the block ROW_VECS x COLUMNS does not fit the registers");
_Static_assert(COLUMNS <= 12, "COLUMNS above 12 run out of address registers");

/* A block of registers: ROWS rows, innermost and in the lanes, times COLUMNS columns. */
enum {
    ROWS = ROW_VECS * LANES
};

/* A matrix of floats, or of PAIRS' words, as the products read it. */
typedef struct matrix {
    const float *at;
    int64_t row_stride; /* elements */
} matrix;

/* Blocks are COLUMNS wide; what that leaves over is done FEW at a time, then one by one. */
enum {
    FEW = COLUMNS < 4 ? COLUMNS : 4
};

INLINE int next_columns(int64_t left)
{
    return left >= COLUMNS ? COLUMNS : left >= FEW ? FEW : 1;
}

/* Steps of a product over `elements`. */
DESCRIBES static inline int64_t steps_of(int64_t elements)
{
    return PAIRS ? (elements + 1) / 2 : elements;
}

/* acc + rows * factor, of PAIRS the sum of both halves' products. */
INLINE vec add_product(vec acc, vec rows, vec factor)
{
#if defined KERNEL_ARCH_avx512bf16
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)rows, (__m512bh)factor);
#else
    return acc + rows * factor;
#endif
}

/* A float or a word in all lanes. */
INLINE vec splat_at(const float *at)
{
#if defined KERNEL_ARCH_avx512bf16
    int32_t word;
    __builtin_memcpy(&word, at, sizeof word);
    return (vec)_mm512_set1_epi32(word);
#else
    return splat(*at);
#endif
}

/* acc[c][rows] += sum over steps of a[step][rows] * b[c * column_stride + step * step_stride], for `columns`
 * columns. */
INLINE void multiply(vec acc[COLUMNS][ROW_VECS], const float *a, const float *b, int64_t column_stride,
                     int64_t step_stride, int64_t steps, int columns)
{
    UNROLLED(UNROLL)
    for (int64_t step = 0; step < steps; step++) {
        vec rows[ROW_VECS];
        FLATTENED
        for (int r = 0; r < ROW_VECS; r++) {
            rows[r] = *(const vec *)&a[step * ROWS + r * LANES];
        }
        FLATTENED
        for (int c = 0; c < columns; c++) {
            const vec factor = splat_at(&b[c * column_stride + step * step_stride]);
            FLATTENED
            for (int r = 0; r < ROW_VECS; r++) {
                acc[c][r] = add_product(acc[c][r], rows[r], factor);
            }
        }
    }
}

/* Whether the words have no infinity and no NaN in either half. */
static inline bool all_pairs_finite(matrix v, int64_t steps, int64_t dims)
{
    const uint32_t low = 0x7f80u, high = low << 16;
    uint32_t found = 0;
    for (int64_t step = 0; step < steps; step++) {
        for (int64_t dim = 0; dim < dims; dim++) {
            uint32_t word;
            __builtin_memcpy(&word, &v.at[step * v.row_stride + dim], sizeof word);
            found |= (uint32_t)((word & low) == low) | (uint32_t)((word & high) == high);
        }
    }
    return found == 0;
}

static inline bool all_finite(matrix v, int64_t rows, int64_t dims)
{
    if (PAIRS) {
        return all_pairs_finite(v, steps_of(rows), dims);
    }
    vec zeros = {0}; /* finite * 0 is 0, anything else NaN */
    for (int64_t row = 0; row < rows; row++) {
        const float *at = v.at + row * v.row_stride;
        int64_t dim = 0;
        for (; dim + LANES <= dims; dim += LANES) {
            zeros += *(const vec_anywhere *)&at[dim] * 0.0f;
        }
        for (; dim < dims; dim++) {
            zeros += at[dim] * 0.0f;
        }
    }
    for (int lane = 0; lane < LANES; lane++) {
        if (zeros[lane] != 0) {
            return false;
        }
    }
    return true;
}

#endif
