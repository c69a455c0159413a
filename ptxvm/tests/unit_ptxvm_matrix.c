/* The PTX machine's matrix instructions against plain loops.
 *
 * Each case is a kernel of one instruction: it copies an image of shared memory, loads a lane's registers from arrays
 * [thread][register], executes, and stores the results' registers. Operands are laid out here as the PTX ISA documents
 * it, element by element, in sentences of its own: nothing is taken from ptxvm/matrix.c. Elements are integers
 * that every type holds exactly, so sums are exact and compared for equality. */
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ptxvm/ptxvm.h"

enum {
    THREADS_MAX = 128,
    REGISTERS_MAX = 160, /* of a thread, in or out */
    SMEM_BYTES = 96 * 1024,
    TEXT_BYTES = 64 * 1024
};

/* ---- Element types ---- */

typedef struct number_format {
    const char *name;
    int exponent_bits, mantissa_bits;
} number_format;

static const number_format f16 = {"f16", 5, 10}, bf16 = {"bf16", 8, 7}, e4m3 = {"e4m3", 4, 3};

static int bytes_of(const number_format *format)
{
    return (1 + format->exponent_bits + format->mantissa_bits) / 8;
}

/* The bits of a small integer. */
static uint32_t encode(const number_format *format, int value)
{
    int exponent;
    const double fraction = frexp(abs(value), &exponent); /* value = fraction * 2^exponent, fraction in [1/2, 1) */
    if (value == 0)
        return 0;
    const uint32_t sign = value < 0, bias = (1U << (format->exponent_bits - 1)) - 1;
    const uint32_t mantissa = (uint32_t)ldexp(2 * fraction - 1, format->mantissa_bits);
    return (sign << format->exponent_bits | ((uint32_t)(exponent - 1) + bias)) << format->mantissa_bits | mantissa;
}

static float decode_half(uint16_t bits)
{
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                                            : (exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24));
    return (float)(bits >> 15 ? -magnitude : magnitude);
}

/* ---- A kernel of one instruction ---- */

typedef struct experiment {
    unsigned threads;
    size_t smem_bytes;         /* copied in before, and out behind */
    int in_floats, in_words;   /* %f0.. and %r0.. of a thread before */
    int out_floats, out_words; /* and behind */
    char body[TEXT_BYTES / 2]; /* the instructions */
    uint64_t seed;
    int eager;
    unsigned char smem[SMEM_BYTES]; /* first in memory's order; the arrays below follow it */
    uint32_t in[THREADS_MAX][REGISTERS_MAX];
    uint32_t out[THREADS_MAX][REGISTERS_MAX];
} experiment;

static experiment *experiment_make(unsigned threads)
{
    experiment *e = calloc(1, sizeof *e);
    assert_non_null(e);
    e->threads = threads;
    memset(e->smem, 0x7f, sizeof e->smem); /* NaN or huge: who reads a wrong place shows it */
    return e;
}

static void say(experiment *e, const char *format, ...)
{
    const size_t length = strlen(e->body);
    va_list arguments;
    va_start(arguments, format);
    assert_true(vsnprintf(e->body + length, sizeof e->body - length, format, arguments) <
                (int)(sizeof e->body - length));
    va_end(arguments);
}

/* "{%f0, %f1, …}" */
static void say_registers(experiment *e, const char *kind, int first, int count)
{
    for (int i = 0; i < count; i++)
        say(e, "%s%%%s%d", i ? ", " : "{", kind, first + i);
    say(e, "}");
}

static int in_experiment(void *user, uint64_t address, size_t bytes)
{
    const uint64_t first = (uint64_t)(uintptr_t)user;
    return address >= first && address + bytes <= first + sizeof(experiment);
}

/* The module around the body. Registers: %f and %r below REGISTERS_MAX are the case's; rd0 its arrays' address. */
static void write_module(const experiment *e, char *text)
{
    size_t length = 0;
#define LINE(...)                                                                                                      \
    do {                                                                                                               \
        length += (size_t)snprintf(text + length, TEXT_BYTES - length, __VA_ARGS__);                                   \
        assert_true(length < TEXT_BYTES);                                                                              \
    } while (0)
    LINE(".version 8.7\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n");
    LINE(".visible .entry test(.param .u64 test_param_0)\n{\n");
    LINE(".reg .pred %%p<4>;\n.reg .f32 %%f<%d>;\n.reg .b32 %%r<%d>;\n.reg .b64 %%rd<16>;\n", REGISTERS_MAX,
         REGISTERS_MAX + 16);
    const int tid = REGISTERS_MAX, at = tid + 1, word = tid + 2;
    LINE("ld.param.u64 %%rd0, [test_param_0];\ncvta.to.global.u64 %%rd0, %%rd0;\nmov.u32 %%r%d, %%tid.x;\n", tid);
    /* shared memory in, four bytes a thread at a time */
    LINE("shl.b32 %%r%d, %%r%d, 2;\n$in:\nsetp.ge.u32 %%p0, %%r%d, %zu;\n@%%p0 bra $in_done;\n", at, tid, at,
         e->smem_bytes);
    LINE("cvt.u64.u32 %%rd1, %%r%d;\nadd.s64 %%rd1, %%rd0, %%rd1;\nld.global.u32 %%r%d, [%%rd1+%zu];\n", at, word,
         offsetof(experiment, smem));
    LINE("st.shared.u32 [%%r%d], %%r%d;\nadd.s32 %%r%d, %%r%d, %u;\nbra.uni $in;\n$in_done:\n", at, word, at, at,
         4 * e->threads);
    LINE("fence.proxy.async;\nbar.sync 0;\n");
    LINE("mul.wide.u32 %%rd2, %%r%d, %d;\nadd.s64 %%rd2, %%rd0, %%rd2;\n", tid, 4 * REGISTERS_MAX);
    for (int i = 0; i < e->in_floats; i++)
        LINE("ld.global.f32 %%f%d, [%%rd2+%zu];\n", i, offsetof(experiment, in) + 4 * (size_t)i);
    for (int i = 0; i < e->in_words; i++)
        LINE("ld.global.u32 %%r%d, [%%rd2+%zu];\n", i, offsetof(experiment, in) + 4 * (size_t)(e->in_floats + i));
    LINE("%s", e->body);
    for (int i = 0; i < e->out_floats; i++)
        LINE("st.global.f32 [%%rd2+%zu], %%f%d;\n", offsetof(experiment, out) + 4 * (size_t)i, i);
    for (int i = 0; i < e->out_words; i++)
        LINE("st.global.u32 [%%rd2+%zu], %%r%d;\n", offsetof(experiment, out) + 4 * (size_t)(e->out_floats + i), i);
    /* and out */
    LINE("bar.sync 0;\nshl.b32 %%r%d, %%r%d, 2;\n$out:\nsetp.ge.u32 %%p0, %%r%d, %zu;\n@%%p0 bra $out_done;\n", at, tid,
         at, e->smem_bytes);
    LINE("cvt.u64.u32 %%rd1, %%r%d;\nadd.s64 %%rd1, %%rd0, %%rd1;\nld.shared.u32 %%r%d, [%%r%d];\n", at, word, at);
    LINE("st.global.u32 [%%rd1+%zu], %%r%d;\nadd.s32 %%r%d, %%r%d, %u;\nbra.uni $out;\n$out_done:\nret;\n}\n",
         offsetof(experiment, smem), word, at, at, 4 * e->threads);
#undef LINE
}

/* Runs it; returns what ptxvm_run does, its text in `error`. */
static int run_in(experiment *e, char *error, size_t error_bytes)
{
    char *text = malloc(TEXT_BYTES);
    assert_non_null(text);
    write_module(e, text);
    ptxvm_module *module = ptxvm_load(text, error, error_bytes);
    if (!module) {
        print_error("%s\n%s\n", error, text);
        fail();
    }
    free(text);
    void *arrays = e;
    void *const parameters[] = {&arrays};
    const ptxvm_launch launch = {.module = module,
                                 .entry = "test",
                                 .grid = {1, 1, 1},
                                 .block = {e->threads, 1, 1},
                                 .dynamic_smem_bytes = (uint32_t)SMEM_BYTES,
                                 .parameters = parameters,
                                 .sm_count = 1,
                                 .is_allocated = in_experiment,
                                 .user = e,
                                 .seed = e->seed,
                                 .eager = e->eager};
    const int result = ptxvm_run(&launch, NULL, error, error_bytes);
    ptxvm_free(module);
    return result;
}

static void run_experiment(experiment *e)
{
    char error[512] = "";
    if (run_in(e, error, sizeof error))
        fail_msg("%s\n%s", error, e->body);
}

static void check_error(experiment *e, const char *fragment)
{
    char error[512] = "";
    assert_int_equal(run_in(e, error, sizeof error), -1);
    if (!strstr(error, fragment))
        fail_msg("\"%s\" does not say \"%s\"", error, fragment);
    free(e);
}

/* ---- Small integers ---- */

typedef struct matrix {
    int rows, columns;
    int at[64 * 256];
} matrix;

static matrix *random_matrix(generator *g, int rows, int columns)
{
    matrix *m = malloc(sizeof *m);
    assert_non_null(m);
    m->rows = rows, m->columns = columns;
    for (int i = 0; i < rows * columns; i++)
        m->at[i] = (int)(next_u64(g) % 15) - 7;
    return m;
}

static int *element(matrix *m, int row, int column)
{
    assert_true(row >= 0 && row < m->rows && column >= 0 && column < m->columns);
    return &m->at[row * m->columns + column];
}

/* c = sign * a * b + c */
static void multiply(matrix *c, matrix *a, matrix *b, int sign)
{
    assert_int_equal(a->columns, b->rows);
    for (int row = 0; row < c->rows; row++)
        for (int column = 0; column < c->columns; column++)
            for (int k = 0; k < a->columns; k++)
                *element(c, row, column) += sign * *element(a, row, k) * *element(b, k, column);
}

static uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void check_sum(uint32_t bits, int wanted, const experiment *e, int row, int column)
{
    float got;
    memcpy(&got, &bits, sizeof got);
    if (got != (float)wanted)
        fail_msg("row %d, column %d: got %g, wanted %d\n%.200s", row, column, (double)got, wanted, e->body);
}

/* Element `index` of a register that holds elements of this format, lowest bits first. */
static void put_element(uint32_t *word, const number_format *format, int index, int value)
{
    *word |= encode(format, value) << (8 * bytes_of(format) * index);
}

/* ---- ldmatrix, stmatrix ---- */

/* Thread t holds elements 2(t%4), 2(t%4)+1 of row t/4, or, transposed, of column t/4. Row r of matrix m starts at the
 * address of thread 8m + r: here at a shuffled place among 32. */
static void copies_matrices(int count, int is_transposed, int is_store)
{
    generator g = {(uint64_t)(count * 4 + is_transposed * 2 + is_store)};
    experiment *e = experiment_make(32);
    e->smem_bytes = 512;
    e->in_words = 1 + (is_store ? count : 0);
    e->out_words = is_store ? 0 : count;
    uint16_t image[4][8][8], wanted_smem[256];
    int place_of_row[32];
    for (int i = 0; i < 32; i++)
        place_of_row[i] = i * 11 % 32;
    for (int i = 0; i < 256; i++)
        (&image[0][0][0])[i] = (uint16_t)next_u64(&g);
    memcpy(wanted_smem, e->smem, sizeof wanted_smem);
    for (int m = 0; m < count; m++)
        for (int row = 0; row < 8; row++)
            memcpy(wanted_smem + 8 * place_of_row[8 * m + row], image[m][row], 16);
    if (!is_store)
        memcpy(e->smem, wanted_smem, sizeof wanted_smem);
    for (int t = 0; t < 32; t++) { /* threads beyond 8 * count: addresses that do not count */
        e->in[t][0] = t < 8 * count ? (uint32_t)(16 * place_of_row[t]) : 0xfffffff1;
        for (int m = 0; m < count && is_store; m++)
            for (int i = 0; i < 2; i++) {
                const int line = t / 4, along = 2 * (t % 4) + i;
                const uint16_t bits = is_transposed ? image[m][along][line] : image[m][line][along];
                e->in[t][1 + m] |= (uint32_t)bits << 16 * i;
            }
    }
    const char *trans = is_transposed ? ".trans" : "";
    if (is_store) {
        say(e, "stmatrix.sync.aligned.m8n8.x%d%s.shared.b16 [%%r0], ", count, trans);
        say_registers(e, "r", 1, count);
        say(e, ";\n");
    } else {
        say(e, "ldmatrix.sync.aligned.m8n8.x%d%s.shared.b16 ", count, trans);
        say_registers(e, "r", 0, count); /* over the address's register */
        say(e, ", [%%r0];\n");
    }
    run_experiment(e);
    assert_memory_equal(e->smem, wanted_smem, sizeof wanted_smem);
    for (int t = 0; t < 32 && !is_store; t++)
        for (int m = 0; m < count; m++)
            for (int i = 0; i < 2; i++) {
                const int line = t / 4, along = 2 * (t % 4) + i;
                assert_int_equal(e->out[t][m] >> 16 * i & 0xffff,
                                 is_transposed ? image[m][along][line] : image[m][line][along]);
            }
    free(e);
}

static void matrices_are_loaded_and_stored(void **state)
{
    (void)state;
    for (int count = 1; count <= 4; count *= 2)
        for (int form = 0; form < 4; form++)
            copies_matrices(count, form & 1, form >> 1);
}

/* ---- mma ---- */

/* The ISA's tables, element by element: of A a0..a7 (16-bit) or a0..a15 (8-bit), of B b0..b3 or b0..b7, of C c0..c3. */
static void place_of_a(int t, int i, int element_bytes, int *row, int *k)
{
    const int group = t >> 2, in_group = t % 4;
    if (element_bytes == 2) { /* m16n8k16 */
        *row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
        *k = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
    } else { /* m16n8k32 */
        *row = i < 4 || (i >= 8 && i < 12) ? group : group + 8;
        *k = in_group * 4 + (i & 3) + (i >= 8 ? 16 : 0);
    }
}

static void place_of_b(int t, int i, int element_bytes, int *k, int *column)
{
    const int in_group = t % 4;
    *column = t >> 2;
    if (element_bytes == 2)
        *k = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
    else
        *k = in_group * 4 + (i & 3) + (i >= 4 ? 16 : 0);
}

static void place_of_c(int t, int i, int *row, int *column)
{
    *row = i < 2 ? t >> 2 : (t >> 2) + 8;
    *column = t % 4 * 2 + (i & 1);
}

static void multiplies_by_mma(const number_format *format, int has_half_sums)
{
    const int depth = 32 / bytes_of(format), per_word = 4 / bytes_of(format), sums = has_half_sums ? 2 : 4;
    generator g = {(uint64_t)depth + (uint64_t)has_half_sums};
    experiment *e = experiment_make(32);
    matrix *a = random_matrix(&g, 16, depth), *b = random_matrix(&g, depth, 8), *c = random_matrix(&g, 16, 8);
    const char *sum_type = has_half_sums ? "f16" : "f32";
    e->in_floats = e->out_floats = has_half_sums ? 0 : 4;
    e->in_words = 6 + (has_half_sums ? 2 : 0);
    e->out_words = has_half_sums ? 8 : 0;
    for (int t = 0; t < 32; t++) {
        int row, column, k;
        uint32_t *word = e->in[t] + e->in_floats;
        for (int i = 0; i < 4 * per_word; i++) {
            place_of_a(t, i, bytes_of(format), &row, &k);
            put_element(&word[i / per_word], format, i % per_word, *element(a, row, k));
        }
        for (int i = 0; i < 2 * per_word; i++) {
            place_of_b(t, i, bytes_of(format), &k, &column);
            put_element(&word[4 + i / per_word], format, i % per_word, *element(b, k, column));
        }
        for (int i = 0; i < 4; i++) {
            place_of_c(t, i, &row, &column);
            if (has_half_sums)
                put_element(&word[6 + i / 2], &f16, i % 2, *element(c, row, column));
            else
                e->in[t][i] = float_bits((float)*element(c, row, column));
        }
    }
    say(e, "mma.sync.aligned.m16n8k%d.row.col.%s.%s.%s.%s ", depth, sum_type, format->name, format->name, sum_type);
    say_registers(e, has_half_sums ? "r" : "f", has_half_sums ? 6 : 0, sums);
    say(e, ", {%%r0, %%r1, %%r2, %%r3}, {%%r4, %%r5}, ");
    say_registers(e, has_half_sums ? "r" : "f", has_half_sums ? 6 : 0, sums);
    say(e, ";\n");
    run_experiment(e);
    multiply(c, a, b, 1);
    for (int t = 0; t < 32; t++)
        for (int i = 0; i < 4; i++) {
            int row, column;
            place_of_c(t, i, &row, &column);
            const uint32_t got = has_half_sums
                                     ? float_bits(decode_half((uint16_t)(e->out[t][6 + i / 2] >> 16 * (i % 2))))
                                     : e->out[t][i];
            check_sum(got, *element(c, row, column), e, row, column);
        }
    free(a), free(b), free(c), free(e);
}

static void warps_multiply(void **state)
{
    (void)state;
    multiplies_by_mma(&f16, 0);
    multiplies_by_mma(&f16, 1);
    multiplies_by_mma(&bf16, 0);
    multiplies_by_mma(&e4m3, 0);
    multiplies_by_mma(&e4m3, 1);
}

/* Every fp16 number through a product with the unit matrix: 128 of them at once (the eight columns that B has). */
static void every_half_is_converted(void **state)
{
    (void)state;
    for (uint32_t first = 0; first < 65536; first += 128) {
        if ((first >> 10 & 31) == 31)
            continue; /* infinity times 0 */
        experiment *e = experiment_make(32);
        e->in_floats = e->out_floats = 4;
        e->in_words = 6;
        for (int t = 0; t < 32; t++) {
            for (int i = 0; i < 8; i++) {
                int row, k;
                place_of_a(t, i, 2, &row, &k);
                if (k < 8)
                    e->in[t][4 + i / 2] |= (first + (uint32_t)(8 * row + k)) << 16 * (i % 2);
            }
            for (int i = 0; i < 4; i++) {
                int k, column;
                place_of_b(t, i, 2, &k, &column);
                put_element(&e->in[t][8 + i / 2], &f16, i % 2, k == column);
            }
        }
        say(e, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%%f0, %%f1, %%f2, %%f3}, {%%r0, %%r1, %%r2, %%r3}, "
               "{%%r4, %%r5}, {%%f0, %%f1, %%f2, %%f3};\n");
        run_experiment(e);
        for (int t = 0; t < 32; t++)
            for (int i = 0; i < 4; i++) {
                int row, column;
                float got;
                place_of_c(t, i, &row, &column);
                memcpy(&got, &e->out[t][i], sizeof got);
                assert_true(got == decode_half((uint16_t)(first + (uint32_t)(8 * row + column))));
            }
        free(e);
    }
}

/* ---- wmma ---- */

/* A at 0, B at 2048, C at 4096 and D at 8192 in shared memory, rows (or columns) 24 and 20 elements apart. */
static void multiplies_by_wmma(int a_by_columns, int b_by_columns, int c_by_columns)
{
    generator g = {(uint64_t)(4 * a_by_columns + 2 * b_by_columns + c_by_columns)};
    experiment *e = experiment_make(32);
    matrix *a = random_matrix(&g, 16, 16), *b = random_matrix(&g, 16, 16), *c = random_matrix(&g, 16, 16);
    const char *orders[] = {"row", "col"};
    e->smem_bytes = 12288;
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            const uint16_t of_a = (uint16_t)encode(&f16, a_by_columns ? *element(a, j, i) : *element(a, i, j));
            const uint16_t of_b = (uint16_t)encode(&f16, b_by_columns ? *element(b, j, i) : *element(b, i, j));
            const float of_c = (float)(c_by_columns ? *element(c, j, i) : *element(c, i, j));
            memcpy(e->smem + 2 * (24 * i + j), &of_a, 2);
            memcpy(e->smem + 2048 + 2 * (24 * i + j), &of_b, 2);
            memcpy(e->smem + 4096 + 4 * (20 * i + j), &of_c, 4);
        }
    say(e, "mov.u32 %%r40, 24;\nmov.u32 %%r41, 20;\nmov.u32 %%r42, 2048;\nmov.u32 %%r43, 0;\n");
    say(e, "wmma.load.a.sync.aligned.%s.m16n16k16.shared.f16 ", orders[a_by_columns]);
    say_registers(e, "r", 0, 8);
    say(e, ", [%%r43], %%r40;\nwmma.load.b.sync.aligned.%s.m16n16k16.shared.f16 ", orders[b_by_columns]);
    say_registers(e, "r", 8, 8);
    say(e, ", [%%r42], %%r40;\nwmma.load.c.sync.aligned.%s.m16n16k16.shared.f32 ", orders[c_by_columns]);
    say_registers(e, "f", 0, 8);
    say(e, ", [%%r42+2048], %%r41;\nwmma.mma.sync.aligned.%s.%s.m16n16k16.f32.f32 ", orders[a_by_columns],
        orders[b_by_columns]);
    say_registers(e, "f", 8, 8);
    say(e, ", ");
    say_registers(e, "r", 0, 8);
    say(e, ", ");
    say_registers(e, "r", 8, 8);
    say(e, ", ");
    say_registers(e, "f", 0, 8);
    say(e, ";\nwmma.store.d.sync.aligned.%s.m16n16k16.shared.f32 [%%r42+6144], ", orders[!c_by_columns]);
    say_registers(e, "f", 8, 8);
    say(e, ", %%r41;\n");
    run_experiment(e);
    multiply(c, a, b, 1);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            const int row = c_by_columns ? i : j, column = c_by_columns ? j : i; /* stored the other way round */
            uint32_t bits;
            memcpy(&bits, e->smem + 8192 + 4 * (20 * i + j), 4);
            check_sum(bits, *element(c, row, column), e, row, column);
        }
    free(a), free(b), free(c), free(e);
}

static void wmma_multiplies(void **state)
{
    (void)state;
    for (int form = 0; form < 8; form++)
        multiplies_by_wmma(form & 1, form >> 1 & 1, form >> 2);
}

/* ---- wgmma ---- */

/* Where 16-byte chunk `chunk` of row `row` lies in a tile of rows of `span` bytes as the copy engine writes it with a
 * swizzle of that span: within each 8 (4, 2) rows of 128 (64, 32) bytes' period, chunks trade places. */
static size_t swizzled_place(int span, int row, int chunk)
{
    switch (span) {
    case 128:
        return (size_t)(row * 128 + (chunk ^ row % 8) * 16);
    case 64:
        return (size_t)(row * 64 + (chunk ^ row / 2 % 4) * 16);
    default:
        return (size_t)(row * 32 + (chunk ^ row / 4 % 2) * 16);
    }
}

/* An operand of wgmma in shared memory: element (line, k), where a line is a row of A or a column of B. */
typedef struct placement {
    int span;        /* of the swizzle; 0 = none */
    int is_mn_major; /* lines are contiguous, else k */
    int step;        /* the instruction's place in the span: K-major, in 32 bytes; MN-major, in 16 k */
    size_t base;     /* of the tile */
    int lines;
} placement;

/* Distances that the descriptor states. No swizzle: odd ones, to tell them apart. */
static void distances(const placement *p, size_t *leading, size_t *stride)
{
    if (p->span) {
        *leading = p->is_mn_major ? (size_t)(16 * (p->step + 1) * p->span + 1024) / 1024 * 1024 : 16;
        *stride = 8 * (size_t)p->span;
    } else {
        *leading = p->is_mn_major ? 128 : 128 * (size_t)(p->lines / 8) + 48;
        *stride = p->is_mn_major ? 2 * 128 + 16 : 128;
    }
}

static size_t place_of(const placement *p, int line, int k, int element_bytes)
{
    size_t leading, stride;
    distances(p, &leading, &stride);
    const int per_chunk = 16 / element_bytes;
    if (!p->is_mn_major && p->span) {
        const int byte = 32 * p->step + k * element_bytes;
        return p->base + swizzled_place(p->span, line, byte / 16) + (size_t)(byte % 16);
    }
    if (!p->is_mn_major)
        return p->base + (size_t)(line / 8) * stride + (size_t)(line % 8) * 16 + (size_t)(k / per_chunk) * leading +
               (size_t)(k % per_chunk * element_bytes);
    if (p->span) { /* 16-bit from here on */
        const int per_panel = p->span / 2, within = line % per_panel;
        return p->base + (size_t)(line / per_panel) * leading + swizzled_place(p->span, 16 * p->step + k, within / 8) +
               (size_t)(within % 8 * 2);
    }
    return p->base + (size_t)(line / 8) * stride + (size_t)(k / 8) * leading + (size_t)(k % 8) * 16 +
           (size_t)(line % 8 * 2);
}

static uint64_t descriptor_of(const placement *p)
{
    size_t leading, stride, address = p->base;
    distances(p, &leading, &stride);
    if (p->span)
        address += p->is_mn_major ? (size_t)(16 * p->step * p->span) : 32 * (size_t)p->step;
    const uint64_t mode = p->span == 128 ? 1 : p->span == 64 ? 2 : p->span == 32 ? 3 : 0;
    return mode << 62 | (uint64_t)(stride / 16) << 32 | (uint64_t)(leading / 16) << 16 | address / 16;
}

static void put_matrix(experiment *e, const placement *p, const number_format *format, matrix *m, int lines_are_columns)
{
    const int depth = 32 / bytes_of(format);
    for (int line = 0; line < p->lines; line++)
        for (int k = 0; k < depth; k++) {
            const int value = lines_are_columns ? *element(m, k, line) : *element(m, line, k);
            const uint32_t bits = encode(format, value);
            const size_t at = place_of(p, line, k, bytes_of(format));
            assert_true(at + 2 <= SMEM_BYTES);
            memcpy(e->smem + at, &bits, (size_t)bytes_of(format)); /* little-endian */
            if (e->smem_bytes < at + 16)
                e->smem_bytes = at / 16 * 16 + 16;
        }
}

typedef struct product {
    const number_format *format;
    int columns;
    int a_in_registers, a_span, a_is_m_major, b_span, b_is_n_major, step;
    int accumulate, sign_a, sign_b;
} product;

/* D's element i of thread t of the warpgroup: row 16 (t / 32) + (t % 32) / 4, of odd pairs 8 below; columns by pairs,
 * of four elements 8 further. */
static void place_of_d(int t, int i, int *row, int *column)
{
    *row = 16 * (t / 32) + t % 32 / 4 + (i % 4 >= 2 ? 8 : 0);
    *column = i / 4 * 8 + t % 4 * 2 + i % 2;
}

static experiment *prepare_product(const product *p, generator *g, matrix **wanted)
{
    const int depth = 32 / bytes_of(p->format), per_word = 4 / bytes_of(p->format), sums = p->columns / 2;
    experiment *e = experiment_make(128);
    matrix *a = random_matrix(g, 64, depth), *b = random_matrix(g, depth, p->columns);
    matrix *c = random_matrix(g, 64, p->columns);
    const placement of_a = {.span = p->a_span, .is_mn_major = p->a_is_m_major, .step = p->step, .lines = 64};
    const placement of_b = {
        .span = p->b_span, .is_mn_major = p->b_is_n_major, .step = p->step, .lines = p->columns, .base = 32768};
    put_matrix(e, &of_b, p->format, b, 1);
    if (!p->a_in_registers)
        put_matrix(e, &of_a, p->format, a, 0);
    e->in_floats = e->out_floats = sums;
    e->in_words = 4;
    for (int t = 0; t < 128; t++) {
        int row, column, k;
        for (int i = 0; i < sums; i++) {
            place_of_d(t, i, &row, &column);
            e->in[t][i] = float_bits((float)*element(c, row, column));
        }
        for (int i = 0; i < 4 * per_word; i++) { /* a warp's 16 rows are laid out as mma's A */
            place_of_a(t % 32, i, bytes_of(p->format), &row, &k);
            put_element(&e->in[t][sums + i / per_word], p->format, i % per_word, *element(a, row + t / 32 * 16, k));
        }
    }
    if (!p->accumulate)
        memset(c->at, 0, sizeof c->at);
    multiply(c, a, b, p->sign_a * p->sign_b);
    *wanted = c;
    free(a), free(b);
    say(e, "mov.u64 %%rd5, %llu;\nmov.u64 %%rd6, %llu;\nsetp.ne.u32 %%p1, %d, 0;\n",
        (unsigned long long)descriptor_of(&of_a), (unsigned long long)descriptor_of(&of_b), p->accumulate);
    say(e, "wgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n%dk%d.f32.%s.%s ", p->columns, depth,
        p->format->name, p->format->name);
    say_registers(e, "f", 0, sums);
    say(e, p->a_in_registers ? ", {%%r0, %%r1, %%r2, %%r3}" : ", %%rd5");
    say(e, ", %%rd6, %%p1, %d, %d", p->sign_a, p->sign_b);
    if (p->format != &e4m3 && !p->a_in_registers)
        say(e, ", %d", p->a_is_m_major);
    if (p->format != &e4m3)
        say(e, ", %d", p->b_is_n_major);
    say(e, ";\nwgmma.commit_group.sync.aligned;\n");
    return e;
}

static void multiplies_by_wgmma(const product *p, generator *g)
{
    matrix *wanted;
    experiment *e = prepare_product(p, g, &wanted);
    say(e, "wgmma.wait_group.sync.aligned 0;\n");
    e->seed = next_u64(g);
    e->eager = (int)(next_u64(g) & 1);
    run_experiment(e);
    for (int t = 0; t < 128; t++)
        for (int i = 0; i < p->columns / 2; i++) {
            int row, column;
            place_of_d(t, i, &row, &column);
            check_sum(e->out[t][i], *element(wanted, row, column), e, row, column);
        }
    free(wanted), free(e);
}

static const int spans[] = {0, 32, 64, 128};

static void warpgroups_multiply_16_bits(void **state)
{
    (void)state;
    generator g = {1};
    const int widths[] = {8, 64, 80, 128};
    for (size_t a = 0; a < COUNT_OF(spans); a++)
        for (size_t b = 0; b < COUNT_OF(spans); b++)
            for (int form = 0; form < 4; form++) {
                product p = {.format = (a + b + (size_t)form) % 2 ? &f16 : &bf16,
                             .columns = widths[(a + b) % COUNT_OF(widths)],
                             .a_span = spans[a],
                             .b_span = spans[b],
                             .a_is_m_major = form & 1,
                             .b_is_n_major = form >> 1,
                             .accumulate = (int)(next_u64(&g) & 1),
                             .sign_a = 1,
                             .sign_b = 1};
                multiplies_by_wgmma(&p, &g);
                p.a_in_registers = 1;
                p.a_is_m_major = 0;
                multiplies_by_wgmma(&p, &g);
            }
}

static void warpgroups_multiply_8_bits(void **state)
{
    (void)state;
    generator g = {2};
    const int widths[] = {8, 72, 136, 192};
    for (size_t a = 0; a < COUNT_OF(spans); a++)
        for (size_t b = 0; b < COUNT_OF(spans); b++)
            for (int in_registers = 0; in_registers < 2; in_registers++) {
                const product p = {.format = &e4m3,
                                   .columns = widths[(a + b) % COUNT_OF(widths)],
                                   .a_in_registers = in_registers,
                                   .a_span = spans[a],
                                   .b_span = spans[b],
                                   .accumulate = (int)(next_u64(&g) & 1),
                                   .sign_a = 1,
                                   .sign_b = 1};
                multiplies_by_wgmma(&p, &g);
            }
}

/* Every width of the ISA, in the layouts of this project's kernels. */
static void every_width_is_multiplied(void **state)
{
    (void)state;
    generator g = {3};
    for (int columns = 8; columns <= 256; columns += 8)
        for (int form = 0; form < 3; form++) {
            const product p = {.format = form == 2 ? &e4m3 : &f16,
                               .columns = columns,
                               .a_in_registers = form == 1,
                               .a_span = 128,
                               .b_span = 128,
                               .b_is_n_major = form == 1,
                               .accumulate = 1,
                               .sign_a = 1,
                               .sign_b = 1};
            multiplies_by_wgmma(&p, &g);
        }
}

/* The next instructions along K: descriptors that start within a swizzled tile. */
static void descriptors_start_within_a_swizzled_tile(void **state)
{
    (void)state;
    generator g = {4};
    for (int step = 1; step < 4; step++)
        for (int form = 0; form < 3; form++) {
            const product p = {.format = form == 2 ? &e4m3 : &bf16,
                               .columns = 96,
                               .a_span = 128,
                               .b_span = step < 2 ? 64 : 128,
                               .a_is_m_major = form == 1,
                               .b_is_n_major = form == 1,
                               .step = step,
                               .accumulate = 1,
                               .sign_a = 1,
                               .sign_b = 1};
            multiplies_by_wgmma(&p, &g);
        }
}

static void operands_are_negated(void **state)
{
    (void)state;
    generator g = {5};
    for (int form = 0; form < 4; form++) {
        const product p = {.format = &f16,
                           .columns = 16,
                           .a_in_registers = form & 1,
                           .accumulate = 1,
                           .a_span = 128,
                           .b_span = 128,
                           .sign_a = form & 1 ? -1 : 1,
                           .sign_b = form & 2 ? -1 : 1};
        multiplies_by_wgmma(&p, &g);
    }
}

/* Whether the launch succeeds and D is right where the program overwrites something between issue and wait. */
static int survives(const char *overwrite, int a_in_registers, uint64_t seed, int eager)
{
    generator g = {6};
    matrix *wanted;
    const product p = {.format = &f16,
                       .columns = 8,
                       .a_in_registers = a_in_registers,
                       .a_span = 128,
                       .b_span = 128,
                       .accumulate = 1,
                       .sign_a = 1,
                       .sign_b = 1};
    experiment *e = prepare_product(&p, &g, &wanted);
    say(e, "%s", overwrite);
    say(e, "wgmma.wait_group.sync.aligned 0;\n");
    e->seed = seed;
    e->eager = eager;
    char error[512];
    if (run_in(e, error, sizeof error)) {
        free(wanted), free(e);
        return 0;
    }
    int same = 1;
    for (int t = 0; t < 128; t++)
        for (int i = 0; i < 4; i++) {
            int row, column;
            place_of_d(t, i, &row, &column);
            same &= e->out[t][i] == float_bits((float)*element(wanted, row, column));
        }
    free(wanted), free(e);
    return same;
}

/* Operands that change before the wait spoil the product, unless the launch is eager or the seed early; what was taken
 * at issue may change. */
static void operands_are_read_late(void **state)
{
    (void)state;
    const struct {
        const char *overwrite;
        int a_in_registers, is_fault;
    } cases[] = {
        {"bar.sync 0;\nmov.u32 %r5, 0;\nmov.u32 %r6, 32768;\nst.shared.u32 [%r6], %r5;\n", 0, 1},
        {"bar.sync 0;\nmov.u32 %r5, 0;\nst.shared.u32 [%r5], %r5;\n", 0, 1},
        {"mov.u32 %r0, 0;\n", 1, 1},
        {"mov.f32 %f0, 0f42c80000;\n", 0, 1},
        {"mov.u64 %rd5, 0;\nmov.u64 %rd6, 0;\nsetp.ne.u32 %p1, 0, 0;\n", 0, 0},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int spoilt = 0;
        for (uint64_t seed = 0; seed < 32; seed++)
            spoilt += !survives(cases[i].overwrite, cases[i].a_in_registers, seed, 0);
        if (cases[i].is_fault ? spoilt == 0 : spoilt != 0)
            fail_msg("case %zu: %d of 32 seeds spoilt", i, spoilt);
    }
    for (size_t i = 0; i < 3; i++)
        assert_true(survives(cases[i].overwrite, cases[i].a_in_registers, 0, 1));
}

/* ---- What is refused ---- */

static void faults_are_named(void **state)
{
    (void)state;
    experiment *e = experiment_make(32);
    say(e, "mov.u32 %%r0, 8;\nldmatrix.sync.aligned.m8n8.x1.shared.b16 {%%r1}, [%%r0];\n");
    check_error(e, "ldmatrix");
    e = experiment_make(32);
    say(e, "mov.u32 %%r0, %d;\nldmatrix.sync.aligned.m8n8.x1.shared.b16 {%%r1}, [%%r0];\n", SMEM_BYTES);
    check_error(e, "ldmatrix");
    e = experiment_make(16); /* half a warp */
    say(e, "mov.u32 %%r0, 0;\nldmatrix.sync.aligned.m8n8.x1.shared.b16 {%%r1}, [%%r0];\n");
    check_error(e, "needs all 32 lanes");
    e = experiment_make(32);
    say(e, "mov.u32 %%r0, 0;\nldmatrix.sync.aligned.m8n8.x2.shared.b16 {%%r1}, [%%r0];\n");
    check_error(e, "an operand has 1 registers; the instruction's shape has 2");
    e = experiment_make(96); /* no whole warpgroup */
    say(e, "wgmma.fence.sync.aligned;\n");
    check_error(e, "in no whole warpgroup");
    const char *wgmma =
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd5, %rd6, 1, 1, 1, 0, "
        "0;\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n";
    e = experiment_make(128); /* a base offset */
    say(e, "mov.u64 %%rd5, %llu;\nmov.u64 %%rd6, 0;\n%s", 1ULL << 49, wgmma);
    check_error(e, "base offset");
    e = experiment_make(128); /* behind the end of shared memory */
    say(e, "mov.u64 %%rd5, 0;\nmov.u64 %%rd6, %d;\n%s", SMEM_BYTES / 16, wgmma);
    check_error(e, "wgmma");
    e = experiment_make(128); /* descriptors that lanes do not agree on */
    say(e, "mov.u32 %%r0, %%tid.x;\ncvt.u64.u32 %%rd5, %%r0;\nmov.u64 %%rd6, 0;\n%s", wgmma);
    check_error(e, "A's descriptor of a wgmma differs between lanes 0 and 1");
}

/* A GPU waits for ever where a warp of a warpgroup leaves out a product, or takes another one. */
static void warps_of_a_group_go_together(void **state)
{
    (void)state;
    const char *wgmma = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd5, %rd6, 1, 1, 1, "
                        "0, 0;\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n";
    const char *is_warp_2 = "mov.u64 %rd5, 0;\nmov.u64 %rd6, 0;\nmov.u32 %r0, %tid.x;\nshr.u32 %r0, %r0, 5;\n"
                            ".reg .pred %two;\nsetp.eq.u32 %two, %r0, 2;\n";
    experiment *e = experiment_make(128);
    say(e, "%s@%%two bra $behind;\n%s$behind:\n", is_warp_2, wgmma);
    check_error(e, "its warpgroup");
    e = experiment_make(128);
    say(e, "%s@%%two bra $other;\n%sbra $behind;\n$other:\n%s$behind:\n", is_warp_2, wgmma, wgmma);
    check_error(e, "issues this wgmma where another of its warpgroup has issued that of line");
    e = experiment_make(128); /* as many, and one more later */
    say(e, "%s%s@!%%two bra $behind;\n%s$behind:\n", is_warp_2, wgmma, wgmma);
    check_error(e, "its warpgroup");
}

static void other_shapes_are_unknown(void **state)
{
    (void)state;
    const char *bodies[] = {
        "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%r0, %r1}, {%r0, %r1}, {%r2}, {%r0, %r1};",
        "ldmatrix.sync.aligned.m8n16.x1.shared.b8 {%r0}, [%r1];",
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16 {%f0}, %rd5, %rd6, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.f16.f16 {%f0}, %rd5, %rd6, 1, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%f0}, %rd5, %rd6, 1, 1, 1, 0, 0;", /* 8 bits: none */
    };
    char text[1024], error[512];
    for (size_t i = 0; i < COUNT_OF(bodies); i++) {
        snprintf(text, sizeof text,
                 ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry test()\n{\n.reg .f32 %%f<4>;\n"
                 ".reg .b32 %%r<4>;\n.reg .b64 %%rd<8>;\n%s\nret;\n}\n",
                 bodies[i]);
        assert_null(ptxvm_load(text, error, sizeof error));
        assert_non_null(strstr(error, "line 9"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matrices_are_loaded_and_stored),
        cmocka_unit_test(warps_multiply),
        cmocka_unit_test(every_half_is_converted),
        cmocka_unit_test(wmma_multiplies),
        cmocka_unit_test(warpgroups_multiply_16_bits),
        cmocka_unit_test(warpgroups_multiply_8_bits),
        cmocka_unit_test(every_width_is_multiplied),
        cmocka_unit_test(descriptors_start_within_a_swizzled_tile),
        cmocka_unit_test(operands_are_negated),
        cmocka_unit_test(operands_are_read_late),
        cmocka_unit_test(faults_are_named),
        cmocka_unit_test(warps_of_a_group_go_together),
        cmocka_unit_test(other_shapes_are_unknown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
