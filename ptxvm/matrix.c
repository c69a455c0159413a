/* Matrix instructions: ldmatrix, stmatrix, mma, wmma and wgmma, on whole warps.
 *
 * All of them share one picture. A tile of an operand is 16 (or fewer) rows of 32 bytes, 16 elements of 16 bits or 32
 * of 8, and lane l, of quad g = l / 4 with place q = l % 4 in it, holds 4 bytes of a row in a register. Accumulators
 * have rows g and g + 8, and of each eight columns two neighbours. Products are summed in float, in no order that a GPU
 * promises; tensor cores truncate where this rounds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vm.h"

enum {
    TILE_ROWS = 16,    /* of a warp's part of a product */
    ROW_BYTES = 32,    /* of an operand: what one instruction sums over */
    MAX_DEPTH = 32,    /* elements in ROW_BYTES */
    MAX_COLUMNS = 256, /* of wgmma */
    CHUNK_BYTES = 16,  /* what stays together in shared memory under every swizzle */
    WMMA_SIDE = 16
};

typedef enum element_type {
    E_F16,
    E_BF16,
    E_E4M3
} element_type;

/* What decoded[] holds, by instruction. */
enum {
    MMA_ELEMENT,
    MMA_HALF_SUMS, /* the accumulators are f16 pairs */
    WGMMA_ELEMENT = 0,
    WGMMA_COLUMNS,
    WMMA_A_BY_COLUMNS = 0, /* .col of A; wmma is f16 only */
    WMMA_B_BY_COLUMNS,
    COPY_COUNT = 0, /* ldmatrix, stmatrix: of matrices */
    COPY_TRANSPOSED,
    SUMS_BY_COLUMNS = 0 /* wmma.load.c, wmma.store.d: .col */
};

static const char *check_whole(const warp *w, uint32_t active)
{
    if (active != (uint32_t)FULL_WARP)
        return fail("a matrix instruction needs all 32 lanes; lanes %08x of warp %d execute it", active, w->index);
    return NULL;
}

static const char *check_vector(const operand *o, int count)
{
    if (o->kind == O_VECTOR ? o->count != count : count != 1)
        return fail("an operand has %d registers; the instruction's shape has %d", o->kind == O_VECTOR ? o->count : 1,
                    count);
    return NULL;
}

static const operand *item_of(const operand *o, int index)
{
    return o->kind == O_VECTOR ? &o->items[index] : o;
}

/* ---- Elements ---- */

static int depth_of(element_type type)
{
    return type == E_E4M3 ? ROW_BYTES : ROW_BYTES / 2;
}

/* float_of_half without a branch, for loops: the float with the same fields is 2^112 too small, denormals too. */
static inline float float_of_half_flat(uint16_t bits)
{
    const uint32_t magnitude = (uint32_t)(bits & 0x7fff) << 13;
    const uint32_t finite = bits_of_float(float_of_bits(magnitude) * 0x1p112f);
    const uint32_t other = magnitude | 0x7f800000;
    return float_of_bits((magnitude >= 0x7c00 << 13 ? other : finite) | (uint32_t)(bits & 0x8000) << 16);
}

static void convert_elements(element_type type, const unsigned char *bytes, int count, float *out)
{
    uint16_t bits;
    switch (type) {
    case E_F16:
        for (int i = 0; i < count; i++) {
            memcpy(&bits, bytes + 2 * i, sizeof bits);
            out[i] = float_of_half_flat(bits);
        }
        break;
    case E_BF16:
        for (int i = 0; i < count; i++) {
            memcpy(&bits, bytes + 2 * i, sizeof bits);
            out[i] = float_of_bits((uint32_t)bits << 16);
        }
        break;
    case E_E4M3:
        for (int i = 0; i < count; i++)
            out[i] = float_of_e4m3(bytes[i]);
        break;
    }
}

static void transpose(const float *from, int rows, int columns, float *to)
{
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++)
            to[column * rows + row] = from[row * columns + column];
}

/* sums[16][columns] += a[16][depth] * b[depth][columns]; depth is a multiple of 4. */
static void multiply_add(float *restrict sums, const float *restrict a, const float *restrict b, int columns, int depth)
{
    for (int row = 0; row < TILE_ROWS; row++) {
        float *restrict sum = sums + row * columns;
        for (int k = 0; k < depth; k += 4) {
            const float *left = a + row * depth + k;
            const float a0 = left[0], a1 = left[1], a2 = left[2], a3 = left[3];
            const float *restrict b0 = b + k * columns;
            const float *restrict b1 = b0 + columns, *restrict b2 = b1 + columns, *restrict b3 = b2 + columns;
            for (int column = 0; column < columns; column++)
                sum[column] += a0 * b0[column] + a1 * b1[column] + (a2 * b2[column] + a3 * b3[column]);
        }
    }
}

/* ---- Fragments: what of a tile lies in which register of which lane ---- */

/* Register r of A has rows g (r even) or g + 8, and the row's first (r < 2) or second 16 bytes: 4q to 4q + 3. */
static void read_a(const warp *w, const operand *fragment, unsigned char tile[TILE_ROWS][ROW_BYTES])
{
    for (int r = 0; r < 4; r++)
        for (int lane = 0; lane < LANES; lane++) {
            const uint32_t word = (uint32_t)value_of(w, &fragment->items[r], lane);
            memcpy(&tile[lane / 4 + 8 * (r & 1)][16 * (r >> 1) + 4 * (lane % 4)], &word, sizeof word);
        }
}

static void write_a(warp *w, const operand *fragment, int first, unsigned char tile[TILE_ROWS][ROW_BYTES])
{
    for (int r = 0; r < 4; r++)
        for (int lane = 0; lane < LANES; lane++) {
            uint32_t word;
            memcpy(&word, &tile[lane / 4 + 8 * (r & 1)][16 * (r >> 1) + 4 * (lane % 4)], sizeof word);
            set_register(w, &fragment->items[first + r], lane, word);
        }
}

/* Register r of B has column g, and of it the first or second 16 bytes: 4q to 4q + 3. */
static void read_b(const warp *w, const operand *fragment, unsigned char tile[8][ROW_BYTES])
{
    for (int r = 0; r < 2; r++)
        for (int lane = 0; lane < LANES; lane++) {
            const uint32_t word = (uint32_t)value_of(w, &fragment->items[r], lane);
            memcpy(&tile[lane / 4][16 * r + 4 * (lane % 4)], &word, sizeof word);
        }
}

/* Accumulator i has row g + 8 * (bit 1 of i) and column 8 * (i / 4) + 2q + (bit 0 of i). */
static int place_of_sum(int i, int lane, int columns)
{
    return (lane / 4 + 8 * (i >> 1 & 1)) * columns + 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
}

static void read_sums(const warp *w, const operand *fragment, int columns, float *sums)
{
    for (int i = 0; i < columns / 2; i++)
        for (int lane = 0; lane < LANES; lane++)
            sums[place_of_sum(i, lane, columns)] = float_of_bits((uint32_t)value_of(w, &fragment->items[i], lane));
}

static void write_sums(warp *w, const operand *fragment, int columns, const float *sums)
{
    for (int i = 0; i < columns / 2; i++)
        for (int lane = 0; lane < LANES; lane++)
            set_register(w, &fragment->items[i], lane, bits_of_float(sums[place_of_sum(i, lane, columns)]));
}

/* The same, packed: accumulators 2r and 2r + 1 are the halves of register r. */
static void read_half_sums(const warp *w, const operand *fragment, int columns, float *sums)
{
    for (int i = 0; i < columns / 2; i++)
        for (int lane = 0; lane < LANES; lane++) {
            const uint32_t pair = (uint32_t)value_of(w, &fragment->items[i / 2], lane);
            sums[place_of_sum(i, lane, columns)] = float_of_half((uint16_t)(pair >> 16 * (i & 1)));
        }
}

static void write_half_sums(warp *w, const operand *fragment, int columns, const float *sums)
{
    for (int i = 0; i < columns / 2; i += 2)
        for (int lane = 0; lane < LANES; lane++) {
            const uint32_t low = half_of_float(sums[place_of_sum(i, lane, columns)]);
            const uint32_t high = half_of_float(sums[place_of_sum(i + 1, lane, columns)]);
            set_register(w, &fragment->items[i / 2], lane, low | high << 16);
        }
}

/* ---- ldmatrix, stmatrix: 8x8 matrices of 16-bit elements, rows of 16 bytes ---- */

/* Row r of matrix m is where lane 8m + r says. */
static const char *rows_of_matrices(warp *w, const operand *address, int count, access_kind kind,
                                    unsigned char *rows[LANES])
{
    for (int lane = 0; lane < 8 * count; lane++) {
        const char *error = NULL;
        rows[lane] = shared_at(w, value_of(w, address, lane), CHUNK_BYTES, CHUNK_BYTES, &error);
        if (!rows[lane])
            return error;
        if (w->cta->races)
            races_access(w, lane, kind, value_of(w, address, lane), CHUNK_BYTES);
    }
    return NULL;
}

/* Where lane l's two elements of a matrix are: 2q and 2q + 1 of row g, or of column g where it is transposed. */
static void place_in_matrix(int lane, int half, int is_transposed, int *row, int *column)
{
    *row = is_transposed ? 2 * (lane % 4) + half : lane / 4;
    *column = is_transposed ? lane / 4 : 2 * (lane % 4) + half;
}

/* The rows of matrices in shared memory; the registers are the other operand, the first of a read. */
static const char *find_rows(warp *w, const instruction *in, uint32_t active, access_kind access,
                             unsigned char *rows[LANES])
{
    const int count = (int)in->decoded[COPY_COUNT], registers_at = access == ACCESS_READ ? 0 : 1;
    const char *error = check_whole(w, active);
    if (!error)
        error = check_vector(&in->operands[registers_at], count);
    return error ? error : rows_of_matrices(w, &in->operands[1 - registers_at], count, access, rows);
}

/* Where lane l's element of a half of its register of matrix m is. */
static unsigned char *element_at(const instruction *in, unsigned char *const rows[LANES], int m, int lane, int half)
{
    int row, column;
    place_in_matrix(lane, half, (int)in->decoded[COPY_TRANSPOSED], &row, &column);
    return rows[8 * m + row] + 2 * column;
}

static const char *execute_ldmatrix(warp *w, const instruction *in, uint32_t active)
{
    unsigned char *rows[LANES];
    const char *error = find_rows(w, in, active, ACCESS_READ, rows);
    if (error)
        return error;
    for (int n = 0; n < (int)in->decoded[COPY_COUNT] * LANES; n++) {
        uint16_t halves[2];
        for (int half = 0; half < 2; half++)
            memcpy(&halves[half], element_at(in, rows, n / LANES, n % LANES, half), sizeof halves[half]);
        set_register(w, item_of(&in->operands[0], n / LANES), n % LANES, halves[0] | (uint32_t)halves[1] << 16);
    }
    return NULL;
}

static const char *execute_stmatrix(warp *w, const instruction *in, uint32_t active)
{
    const int count = (int)in->decoded[COPY_COUNT];
    unsigned char *rows[LANES];
    const char *error = find_rows(w, in, active, ACCESS_WRITE, rows);
    for (int m = 0; m < count && !error; m++)
        for (int lane = 0; lane < LANES; lane++) {
            const uint32_t word = (uint32_t)value_of(w, item_of(&in->operands[1], m), lane);
            const uint16_t halves[2] = {(uint16_t)word, (uint16_t)(word >> 16)};
            for (int half = 0; half < 2; half++)
                memcpy(element_at(in, rows, m, lane, half), &halves[half], sizeof halves[half]);
        }
    for (int lane = 0; lane < 8 * count && !error; lane++)
        shared_written(w, value_of(w, &in->operands[0], lane), CHUNK_BYTES);
    return error;
}

/* ---- mma.sync m16n8: D, A, B, C ---- */

static const char *execute_mma(warp *w, const instruction *in, uint32_t active)
{
    const element_type type = (element_type)in->decoded[MMA_ELEMENT];
    const int has_half_sums = (int)in->decoded[MMA_HALF_SUMS], columns = 8, depth = depth_of(type);
    const int sum_registers = has_half_sums ? 2 : 4;
    const char *error = check_whole(w, active);
    if (!error)
        error = check_vector(&in->operands[0], sum_registers);
    if (!error)
        error = check_vector(&in->operands[1], 4);
    if (!error)
        error = check_vector(&in->operands[2], 2);
    if (!error)
        error = check_vector(&in->operands[3], sum_registers);
    if (error)
        return error;
    unsigned char a_bytes[TILE_ROWS][ROW_BYTES], b_bytes[8][ROW_BYTES];
    float a[TILE_ROWS * MAX_DEPTH], b_by_columns[8 * MAX_DEPTH], b[MAX_DEPTH * 8], sums[TILE_ROWS * 8];
    read_a(w, &in->operands[1], a_bytes);
    read_b(w, &in->operands[2], b_bytes);
    convert_elements(type, a_bytes[0], TILE_ROWS * depth, a);
    convert_elements(type, b_bytes[0], columns * depth, b_by_columns);
    transpose(b_by_columns, columns, depth, b);
    (has_half_sums ? read_half_sums : read_sums)(w, &in->operands[3], columns, sums);
    multiply_add(sums, a, b, columns, depth);
    (has_half_sums ? write_half_sums : write_sums)(w, &in->operands[0], columns, sums);
    return NULL;
}

/* ---- wmma m16n16k16: PTX leaves the layout of fragments open ----
 *
 * Here a fragment of A or B is the tile as memory had it, row by row, in the layout of mma's A, and once more in
 * registers 4 to 7; .row and .col count when it is used. Who names another layout in wmma.mma than in wmma.load gets
 * other numbers, as on a GPU. */

static const char *execute_wmma_load(warp *w, const instruction *in, uint32_t active)
{
    unsigned char tile[TILE_ROWS][ROW_BYTES];
    const char *error = check_whole(w, active);
    if (!error)
        error = check_vector(&in->operands[0], 8);
    if (error)
        return error;
    const uint64_t address = value_of(w, &in->operands[1], 0);
    const uint64_t stride = in->operand_count > 2 ? value_of(w, &in->operands[2], 0) : WMMA_SIDE;
    for (unsigned row = 0; row < WMMA_SIDE; row++) {
        const unsigned char *bytes = shared_at(w, address + 2 * stride * row, ROW_BYTES, CHUNK_BYTES, &error);
        if (!bytes)
            return error;
        if (w->cta->races)
            races_access(w, 0, ACCESS_READ, address + 2 * stride * row, ROW_BYTES);
        memcpy(tile[row], bytes, ROW_BYTES);
    }
    write_a(w, &in->operands[0], 0, tile);
    write_a(w, &in->operands[0], 4, tile);
    return NULL;
}

static const char *execute_wmma_mma(warp *w, const instruction *in, uint32_t active)
{
    unsigned char tile[TILE_ROWS][ROW_BYTES];
    float read[WMMA_SIDE * WMMA_SIDE], a[WMMA_SIDE * WMMA_SIDE], b[WMMA_SIDE * WMMA_SIDE];
    float sums[WMMA_SIDE * WMMA_SIDE];
    const char *error = check_whole(w, active);
    for (int i = 0; i < 4 && !error; i++)
        error = check_vector(&in->operands[i], 8);
    if (error)
        return error;
    read_a(w, &in->operands[1], tile);
    convert_elements(E_F16, tile[0], WMMA_SIDE * WMMA_SIDE, read);
    if (in->decoded[WMMA_A_BY_COLUMNS])
        transpose(read, WMMA_SIDE, WMMA_SIDE, a);
    else
        memcpy(a, read, sizeof a);
    read_a(w, &in->operands[2], tile);
    convert_elements(E_F16, tile[0], WMMA_SIDE * WMMA_SIDE, read);
    if (in->decoded[WMMA_B_BY_COLUMNS])
        transpose(read, WMMA_SIDE, WMMA_SIDE, b);
    else
        memcpy(b, read, sizeof b);
    read_sums(w, &in->operands[3], WMMA_SIDE, sums);
    multiply_add(sums, a, b, WMMA_SIDE, WMMA_SIDE);
    write_sums(w, &in->operands[0], WMMA_SIDE, sums);
    return NULL;
}

/* Accumulators to and from shared memory, f32, rows or columns `stride` elements apart. */
static uint64_t address_of_sums(const warp *w, const instruction *in, int address_at, int row)
{
    const uint64_t stride = in->operand_count > 2 ? value_of(w, &in->operands[2], 0) : WMMA_SIDE;
    return value_of(w, &in->operands[address_at], 0) + sizeof(float) * stride * (unsigned)row;
}

static const char *sums_in_memory(warp *w, const instruction *in, int address_at, unsigned char *rows[WMMA_SIDE])
{
    const char *error = NULL;
    const size_t bytes = WMMA_SIDE * sizeof(float);
    for (int row = 0; row < WMMA_SIDE; row++) {
        const uint64_t address = address_of_sums(w, in, address_at, row);
        rows[row] = shared_at(w, address, bytes, CHUNK_BYTES, &error);
        if (!rows[row])
            return error;
        if (w->cta->races)
            races_access(w, 0, address_at == 0 ? ACCESS_WRITE : ACCESS_READ, address, bytes);
    }
    return NULL;
}

/* The rows of sums in memory; the registers are the other operand. */
static const char *find_sums(warp *w, const instruction *in, uint32_t active, int address_at,
                             unsigned char *rows[WMMA_SIDE])
{
    const char *error = check_whole(w, active);
    if (!error)
        error = check_vector(&in->operands[1 - address_at], 8);
    return error ? error : sums_in_memory(w, in, address_at, rows);
}

static const char *execute_wmma_load_sums(warp *w, const instruction *in, uint32_t active)
{
    unsigned char *rows[WMMA_SIDE];
    float read[WMMA_SIDE * WMMA_SIDE], sums[WMMA_SIDE * WMMA_SIDE];
    const char *error = find_sums(w, in, active, 1, rows);
    if (error)
        return error;
    for (int row = 0; row < WMMA_SIDE; row++)
        memcpy(read + row * WMMA_SIDE, rows[row], WMMA_SIDE * sizeof(float));
    transpose(read, WMMA_SIDE, WMMA_SIDE, sums);
    write_sums(w, &in->operands[0], WMMA_SIDE, in->decoded[SUMS_BY_COLUMNS] ? sums : read);
    return NULL;
}

static const char *execute_wmma_store_sums(warp *w, const instruction *in, uint32_t active)
{
    unsigned char *rows[WMMA_SIDE];
    float sums[WMMA_SIDE * WMMA_SIDE], turned[WMMA_SIDE * WMMA_SIDE];
    const char *error = find_sums(w, in, active, 0, rows);
    if (error)
        return error;
    read_sums(w, &in->operands[1], WMMA_SIDE, sums);
    transpose(sums, WMMA_SIDE, WMMA_SIDE, turned);
    const float *from = in->decoded[SUMS_BY_COLUMNS] ? turned : sums;
    for (int row = 0; row < WMMA_SIDE; row++) {
        memcpy(rows[row], from + row * WMMA_SIDE, WMMA_SIDE * sizeof(float));
        shared_written(w, address_of_sums(w, in, 0, row), WMMA_SIDE * sizeof(float));
    }
    return NULL;
}

/* ---- wgmma ---- */

/* A matrix descriptor's fields, in bytes. */
typedef struct descriptor {
    uint32_t address, leading, stride;
    uint32_t base_offset;
    uint32_t swizzle; /* 0, 32, 64, 128: bytes of a swizzled row */
} descriptor;

static descriptor descriptor_of(uint64_t bits)
{
    static const uint32_t swizzles[] = {0, 128, 64, 32};
    return (descriptor){
        .address = (uint32_t)(bits & 0x3fff) << 4,
        .leading = (uint32_t)(bits >> 16 & 0x3fff) << 4,
        .stride = (uint32_t)(bits >> 32 & 0x3fff) << 4,
        .base_offset = (uint32_t)(bits >> 49 & 7),
        .swizzle = swizzles[bits >> 62],
    };
}

/* Swizzles exchange 16-byte chunks by address bits alone: bits 4 and up are xored with as many from bit 7. */
static uint32_t swizzled(uint32_t address, uint32_t swizzle)
{
    return swizzle ? address ^ (address >> 3 & (swizzle - CHUNK_BYTES)) : address;
}

/* Offset of 16 bytes along K (chunk 0 or 1 of an instruction's 32) of row `row` of a K-major matrix. */
static uint32_t offset_by_k(const descriptor *d, uint32_t row, uint32_t chunk)
{
    if (!d->swizzle) /* groups of 8 rows of one chunk, 128 bytes each */
        return row / 8 * d->stride + row % 8 * CHUNK_BYTES + chunk * d->leading;
    return row / 8 * d->stride + row % 8 * d->swizzle + chunk * CHUNK_BYTES;
}

/* Offset of 8 elements along M or N (the chunk-th eight) at place k of a 16-bit MN-major matrix. */
static uint32_t offset_by_mn(const descriptor *d, uint32_t k, uint32_t chunk)
{
    if (!d->swizzle)
        return chunk * d->stride + k / 8 * d->leading + k % 8 * CHUNK_BYTES;
    const uint32_t chunks_per_row = d->swizzle / CHUNK_BYTES;
    return chunk / chunks_per_row * d->leading + chunk % chunks_per_row * CHUNK_BYTES + k / 8 * d->stride +
           k % 8 * d->swizzle;
}

/* Rows (of A) or columns (of B) [first, first + count) of a matrix, in memory's order: `rows` runs of `chunks`, which
 * are along K, or, where the matrix is MN-major, along M or N. */
typedef struct region {
    descriptor matrix;
    int is_mn_major;
    uint32_t first, rows, chunks;
} region;

static region region_of(uint64_t bits, element_type type, int is_mn_major, uint32_t first, uint32_t count)
{
    return (region){.matrix = descriptor_of(bits),
                    .is_mn_major = is_mn_major,
                    .first = first,
                    .rows = is_mn_major ? (uint32_t)depth_of(type) : count,
                    .chunks = is_mn_major ? count / 8 : ROW_BYTES / CHUNK_BYTES};
}

/* Where a chunk lies; NULL and *error where wgmma must not read it. */
static const unsigned char *chunk_at(warp *w, const region *r, uint32_t row, uint32_t chunk, uint32_t *address,
                                     const char **error)
{
    const descriptor *d = &r->matrix;
    const uint32_t offset =
        r->is_mn_major ? offset_by_mn(d, row, chunk + r->first / 8) : offset_by_k(d, r->first + row, chunk);
    *address = swizzled(d->address + offset, d->swizzle);
    return shared_at(w, *address, CHUNK_BYTES, CHUNK_BYTES, error);
}

/* The region as floats [count][depth], or, where the matrix is MN-major, [depth][count]. */
static const char *read_region(warp *w, const region *r, element_type type, float *out)
{
    static _Thread_local unsigned char tile[MAX_COLUMNS * ROW_BYTES];
    for (uint32_t row = 0; row < r->rows; row++)
        for (uint32_t chunk = 0; chunk < r->chunks; chunk++) {
            const char *error = NULL;
            uint32_t address;
            const unsigned char *bytes = chunk_at(w, r, row, chunk, &address, &error);
            if (bytes)
                error = shared_for_async(w, address, CHUNK_BYTES);
            if (error)
                return error;
            memcpy(tile + (row * r->chunks + chunk) * CHUNK_BYTES, bytes, CHUNK_BYTES);
        }
    const uint32_t elements_per_chunk = type == E_E4M3 ? CHUNK_BYTES : CHUNK_BYTES / 2;
    convert_elements(type, tile, (int)(r->rows * r->chunks * elements_per_chunk), out);
    return NULL;
}

/* To the race detector, when the product is issued. */
static const char *tell_of_region(warp *w, const region *r)
{
    for (uint32_t row = 0; row < r->rows; row++)
        for (uint32_t chunk = 0; chunk < r->chunks; chunk++) {
            const char *error = NULL;
            uint32_t address;
            if (!chunk_at(w, r, row, chunk, &address, &error))
                return error;
            races_access(w, 0, ACCESS_WGMMA_READ, address, CHUNK_BYTES);
        }
    return NULL;
}

/* A wgmma between its issue and its wait. Descriptors and scale-d are taken at issue; the matrices, A's registers and
 * the accumulators are the program's again only after the wait, so they are read when the product is made. */
typedef struct wgmma {
    const instruction *instruction;
    uint64_t a, b;
    int accumulate;
} wgmma;

/* Whether A (B) of this wgmma is M-major (N-major): 16-bit types say so behind the scales. */
static int a_is_m_major(const instruction *in)
{
    return in->operand_count == 8 && in->operands[6].imm;
}

static int b_is_n_major(const instruction *in)
{
    return in->operand_count > 6 && in->operands[in->operand_count - 1].imm;
}

/* The warp's 16 rows of A. */
static region region_of_a(const warp *w, const wgmma *product)
{
    const instruction *in = product->instruction;
    return region_of(product->a, (element_type)in->decoded[WGMMA_ELEMENT], a_is_m_major(in),
                     (uint32_t)(w->index % WARPS_PER_GROUP * TILE_ROWS), TILE_ROWS);
}

static region region_of_b(const wgmma *product)
{
    const instruction *in = product->instruction;
    return region_of(product->b, (element_type)in->decoded[WGMMA_ELEMENT], b_is_n_major(in), 0,
                     (uint32_t)in->decoded[WGMMA_COLUMNS]);
}

/* [16][depth] */
static const char *read_wgmma_a(warp *w, const wgmma *product, element_type type, float *a)
{
    const instruction *in = product->instruction;
    const int depth = depth_of(type);
    if (in->operands[1].kind == O_VECTOR) {
        unsigned char tile[TILE_ROWS][ROW_BYTES];
        read_a(w, &in->operands[1], tile);
        convert_elements(type, tile[0], TILE_ROWS * depth, a);
        return NULL;
    }
    const region r = region_of_a(w, product);
    if (!r.is_mn_major)
        return read_region(w, &r, type, a);
    float by_m[MAX_DEPTH * TILE_ROWS];
    const char *error = read_region(w, &r, type, by_m);
    if (!error)
        transpose(by_m, depth, TILE_ROWS, a);
    return error;
}

/* [depth][columns] */
static const char *read_wgmma_b(warp *w, const wgmma *product, element_type type, int columns, float *b)
{
    static _Thread_local float by_columns[MAX_COLUMNS * MAX_DEPTH];
    const region r = region_of_b(product);
    if (r.is_mn_major)
        return read_region(w, &r, type, b);
    const char *error = read_region(w, &r, type, by_columns);
    if (!error)
        transpose(by_columns, columns, depth_of(type), b);
    return error;
}

static const char *multiply_late(warp *w, void *data)
{
    static _Thread_local float sums[TILE_ROWS * MAX_COLUMNS], b[MAX_DEPTH * MAX_COLUMNS];
    const wgmma *product = data;
    const instruction *in = product->instruction;
    const element_type type = (element_type)in->decoded[WGMMA_ELEMENT];
    const int columns = (int)in->decoded[WGMMA_COLUMNS], depth = depth_of(type);
    float a[TILE_ROWS * MAX_DEPTH];
    const char *error = read_wgmma_a(w, product, type, a);
    if (!error)
        error = read_wgmma_b(w, product, type, columns, b);
    if (error)
        return error;
    if ((in->operands[4].imm < 0) != (in->operands[5].imm < 0)) /* scale-a, scale-b: 1 or -1 */
        for (int i = 0; i < TILE_ROWS * depth; i++)
            a[i] = -a[i];
    if (product->accumulate)
        read_sums(w, &in->operands[0], columns, sums);
    else
        memset(sums, 0, sizeof(float) * TILE_ROWS * (size_t)columns);
    multiply_add(sums, a, b, columns, depth);
    write_sums(w, &in->operands[0], columns, sums);
    return NULL;
}

/* The value of an operand that all lanes must agree on. */
static const char *common_value(const warp *w, const operand *o, const char *what, uint64_t *value)
{
    *value = value_of(w, o, 0);
    for (int lane = 1; lane < LANES; lane++)
        if (value_of(w, o, lane) != *value)
            return fail("%s of a wgmma differs between lanes 0 and %d", what, lane);
    return NULL;
}

static const char *tell_of_product(warp *w, const wgmma *product)
{
    const region a = region_of_a(w, product), b = region_of_b(product);
    const char *error = product->instruction->operands[1].kind == O_VECTOR ? NULL : tell_of_region(w, &a);
    return error ? error : tell_of_region(w, &b);
}

static const char *check_group(const warp *w, uint32_t active)
{
    if (w->cta->warp_count < (w->index / WARPS_PER_GROUP + 1) * WARPS_PER_GROUP)
        return fail("wgmma in a block of %d warps: warp %d is in no whole warpgroup", w->cta->warp_count, w->index);
    return check_whole(w, active);
}

/* That the warp issues this wgmma as the other warps of its warpgroup do: on a GPU they wait for it otherwise. */
static const char *tell_of_issue(warp *w, const instruction *in)
{
    const int first = w->index / WARPS_PER_GROUP * WARPS_PER_GROUP;
    product_ring *ring = &w->cta->products[w->index / WARPS_PER_GROUP];
    const instruction **at = &ring->issued[w->products % PRODUCTS_KEPT];
    if (w->products == ring->count) {
        for (int k = first; k < first + WARPS_PER_GROUP; k++)
            if (!w->cta->warps[k].alive)
                return fail("a wgmma of warp %d, when warp %d of its warpgroup has exited", w->index, k);
        *at = in;
        ring->count++;
    } else if (ring->count - w->products > PRODUCTS_KEPT)
        return fail("warp %d is over %d wgmmas behind its warpgroup", w->index, PRODUCTS_KEPT);
    else if (*at != in)
        return fail("warp %d issues this wgmma where another of its warpgroup has issued that of line %d", w->index,
                    (*at)->line);
    w->products++;
    return NULL;
}

static const char *execute_wgmma(warp *w, const instruction *in, uint32_t active)
{
    const int a_in_registers = in->operands[1].kind == O_VECTOR;
    wgmma issued = {.instruction = in};
    uint64_t scale_d = 0;
    const char *error = check_group(w, active);
    if (!error)
        error = check_vector(&in->operands[0], (int)in->decoded[WGMMA_COLUMNS] / 2);
    if (!error && a_in_registers)
        error = check_vector(&in->operands[1], 4);
    if (!error && !a_in_registers)
        error = common_value(w, &in->operands[1], "A's descriptor", &issued.a);
    if (!error)
        error = common_value(w, &in->operands[2], "B's descriptor", &issued.b);
    if (!error)
        error = common_value(w, &in->operands[3], "scale-d", &scale_d);
    if (error)
        return error;
    issued.accumulate = predicate_of(w, &in->operands[3], 0);
    if ((!a_in_registers && descriptor_of(issued.a).base_offset) || descriptor_of(issued.b).base_offset)
        return fail("a matrix descriptor with a base offset: only 0 is known here");
    error = tell_of_issue(w, in);
    if (!error && w->cta->races)
        error = tell_of_product(w, &issued);
    if (error)
        return error;
    wgmma *kept = malloc(sizeof *kept);
    if (!kept)
        return fail("no memory for a wgmma");
    *kept = issued;
    return async_add(w, ASYNC_WGMMA, multiply_late, kept);
}

/* What a fence orders, registers written before it, is done already. */
static const char *execute_wgmma_fence(warp *w, const instruction *in, uint32_t active)
{
    (void)in;
    return check_group(w, active);
}

static const char *execute_wgmma_commit(warp *w, const instruction *in, uint32_t active)
{
    (void)in;
    const char *error = check_group(w, active);
    if (!error)
        async_commit(w, ASYNC_WGMMA);
    return error;
}

static const char *execute_wgmma_wait(warp *w, const instruction *in, uint32_t active)
{
    const char *error = check_group(w, active);
    return error ? error : async_wait(w, ASYNC_WGMMA, (int)in->operands[0].imm);
}

/* ---- Mnemonics ---- */

/* Those that are one instruction each, with their operands and decoded[0..1]. */
static const struct {
    const char *mnemonic;
    int operands_min;
    executor execute;
    uint64_t decoded[2];
} known[] = {
    {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 4, execute_mma, {E_F16, 0}},
    {"mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", 4, execute_mma, {E_F16, 1}},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 4, execute_mma, {E_BF16, 0}},
    {"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", 4, execute_mma, {E_E4M3, 0}},
    {"mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e4m3.f16", 4, execute_mma, {E_E4M3, 1}},
    {"wmma.load.a.sync.aligned.row.m16n16k16.shared.f16", 2, execute_wmma_load, {0}},
    {"wmma.load.a.sync.aligned.col.m16n16k16.shared.f16", 2, execute_wmma_load, {0}},
    {"wmma.load.b.sync.aligned.row.m16n16k16.shared.f16", 2, execute_wmma_load, {0}},
    {"wmma.load.b.sync.aligned.col.m16n16k16.shared.f16", 2, execute_wmma_load, {0}},
    {"wmma.load.c.sync.aligned.row.m16n16k16.shared.f32", 2, execute_wmma_load_sums, {0}},
    {"wmma.load.c.sync.aligned.col.m16n16k16.shared.f32", 2, execute_wmma_load_sums, {1}},
    {"wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32", 4, execute_wmma_mma, {0, 0}},
    {"wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32", 4, execute_wmma_mma, {0, 1}},
    {"wmma.mma.sync.aligned.col.row.m16n16k16.f32.f32", 4, execute_wmma_mma, {1, 0}},
    {"wmma.mma.sync.aligned.col.col.m16n16k16.f32.f32", 4, execute_wmma_mma, {1, 1}},
    {"wmma.store.d.sync.aligned.row.m16n16k16.shared.f32", 2, execute_wmma_store_sums, {0}},
    {"wmma.store.d.sync.aligned.col.m16n16k16.shared.f32", 2, execute_wmma_store_sums, {1}},
    {"wgmma.fence.sync.aligned", 0, execute_wgmma_fence, {0}},
    {"wgmma.commit_group.sync.aligned", 0, execute_wgmma_commit, {0}},
    {"wgmma.wait_group.sync.aligned", 1, execute_wgmma_wait, {0}},
};

/* {ld,st}matrix.sync.aligned.m8n8.{x1,x2,x4}{,.trans}.shared{,::cta}.b16 */
static executor find_matrix_copy(instruction *in)
{
    static const char *const spaces[] = {"shared", "shared::cta"};
    const int is_store = begins_with(in->mnemonic, "stmatrix.");
    if ((!is_store && !begins_with(in->mnemonic, "ldmatrix.")) || in->operand_count != 2)
        return NULL;
    for (unsigned count = 1; count <= 4; count *= 2)
        for (unsigned is_transposed = 0; is_transposed < 2; is_transposed++)
            for (int space = 0; space < 2; space++) {
                char form[sizeof in->mnemonic];
                snprintf(form, sizeof form, "%smatrix.sync.aligned.m8n8.x%u%s.%s.b16", is_store ? "st" : "ld", count,
                         is_transposed ? ".trans" : "", spaces[space]);
                if (strcmp(form, in->mnemonic))
                    continue;
                in->decoded[COPY_COUNT] = count;
                in->decoded[COPY_TRANSPOSED] = is_transposed;
                return is_store ? execute_stmatrix : execute_ldmatrix;
            }
    return NULL;
}

/* wgmma.mma_async.sync.aligned.m64nNkK.f32.TYPE.TYPE: D, A, B, scale-d, scale-a, scale-b, and of 16-bit types trans-a
 * where A is in memory, and trans-b. */
static executor find_wgmma(instruction *in)
{
    static const struct {
        const char *name;
        unsigned depth;
    } types[] = {[E_F16] = {"f16", 16}, [E_BF16] = {"bf16", 16}, [E_E4M3] = {"e4m3", 32}};
    char form[sizeof in->mnemonic];
    unsigned columns = 0;
    if (sscanf(in->mnemonic, "wgmma.mma_async.sync.aligned.m64n%uk", &columns) != 1 || columns % 8 || columns < 8 ||
        columns > MAX_COLUMNS || in->operand_count < 6)
        return NULL;
    const int transposes = in->operands[1].kind == O_VECTOR ? 1 : 2;
    for (int type = E_F16; type <= E_E4M3; type++) {
        snprintf(form, sizeof form, "wgmma.mma_async.sync.aligned.m64n%uk%u.f32.%s.%s", columns, types[type].depth,
                 types[type].name, types[type].name);
        if (strcmp(form, in->mnemonic) || in->operand_count != 6 + (type == E_E4M3 ? 0 : transposes))
            continue;
        in->decoded[WGMMA_ELEMENT] = (uint64_t)type;
        in->decoded[WGMMA_COLUMNS] = columns;
        return execute_wgmma;
    }
    return NULL;
}

executor find_executor_matrix(instruction *in)
{
    executor found = find_matrix_copy(in);
    if (!found)
        found = find_wgmma(in);
    for (size_t i = 0; i < sizeof known / sizeof known[0] && !found; i++)
        if (!strcmp(known[i].mnemonic, in->mnemonic) && in->operand_count >= known[i].operands_min) {
            memcpy(in->decoded, known[i].decoded, sizeof known[i].decoded);
            found = known[i].execute;
        }
    if (found)
        in->is_convergent = 1;
    return found;
}
