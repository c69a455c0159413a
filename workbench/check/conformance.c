/* The correctness gate, see conformance.h. Comparisons are written !(error <= tolerance), so that NaN fails. */
#include "conformance.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "invariance.h"
#include "oracle.h"

/* Keeps the first failure. */
__attribute__((format(printf, 2, 3))) static void fail(verdict *v, const char *format, ...)
{
    if (!v->pass) {
        return;
    }
    v->pass = false;
    va_list args;
    va_start(args, format);
    vsnprintf(v->failure, sizeof v->failure, format, args);
    va_end(args);
}

/* ---- Comparison ---- */

/* Whether there is one among 16-bit elements. Every element of every output comes by here: no branch, so that the
 * compiler makes vectors of it. */
static bool any_nan_16(const uint16_t *elements, int64_t count, uint16_t infinity)
{
    unsigned found = 0;
    for (int64_t i = 0; i < count; ++i) {
        found |= (elements[i] & 0x7fffu) > infinity;
    }
    return found != 0;
}

/* The first NaN of a row's elements; count if there is none. It looks at bits: widening each element would be most of a
 * judgement. */
static int64_t first_nan(acr_dtype dtype, const void *base, int64_t first, int64_t count)
{
    int64_t i = 0;
    if (dtype == ACR_F32) {
        const float *at = (const float *)base + first;
        while (i < count && !isnan(at[i])) {
            ++i;
        }
    } else if (dtype == ACR_F16 || dtype == ACR_BF16) {
        const uint16_t *at = (const uint16_t *)base + first;
        const uint16_t infinity = dtype == ACR_F16 ? 0x7c00 : 0x7f80;
        i = any_nan_16(at, count, infinity) ? 0 : count;
        while (i < count && (at[i] & 0x7fff) <= infinity) {
            ++i;
        }
    } else {
        while (i < count && !isnan(acr__load_element(dtype, base, first + i))) {
            ++i;
        }
    }
    return i;
}

/* Every element of every row, compared or not, has been written with a number. That rows of no sequence have not been
 * written at all is the execution's to see. */
static void judge_written(verdict *v, const reference *ref, const run_output *output)
{
    const acr_problem *p = &ref->problem;
    int64_t rows = ref->entries * p->q_heads * ref->q_rows;
    for (int64_t row = 0; row < rows; ++row) {
        if (ref->q_owner && ref->q_owner[row % ref->q_rows] < 0) {
            continue;
        }
        const int64_t d = first_nan(p->out_dtype, output->o, row * p->v_dim, p->v_dim);
        if (d < p->v_dim) {
            fail(v, "o[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "] is NaN or was never written",
                 row / ref->q_rows / p->q_heads, row / ref->q_rows % p->q_heads, row % ref->q_rows, d);
            return;
        }
        if (output->lse && isnan(output->lse[row])) {
            fail(v, "lse[%" PRId64 ",%" PRId64 ",%" PRId64 "] is NaN or was never written",
                 row / ref->q_rows / p->q_heads, row / ref->q_rows % p->q_heads, row % ref->q_rows);
            return;
        }
    }
}

static void judge_output(verdict *v, const reference *ref, const run_output *output)
{
    enum {
        CHUNK = 64
    };
    const acr_problem *p = &ref->problem;
    double square = 0;
    int64_t worst_row = 0, worst_d = 0;
    for (int64_t i = 0; i < ref->rows; ++i) {
        const int64_t row = reference_row(ref, i).row;
        double got[CHUNK];
        for (int64_t d = 0; d < p->v_dim; ++d) {
            if (d % CHUNK == 0) {
                const int64_t count = p->v_dim - d < CHUNK ? p->v_dim - d : CHUNK;
                acr__load_elements(got, p->out_dtype, output->o, row * p->v_dim + d, count);
            }
            const double error = fabs(got[d % CHUNK] - ref->o[i * p->v_dim + d]);
            square += error * error;
            if (!(error <= v->err_max)) {
                v->err_max = isnan(error) ? INFINITY : error;
                worst_row = i;
                worst_d = d;
            }
        }
    }
    v->err_rms = sqrt(square / (double)(ref->rows * p->v_dim));
    if (!(v->err_max <= v->tol_max)) {
        row_place at = reference_row(ref, worst_row);
        fail(v, "max error %.3g > %.3g at o[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "]: got %.6g, expected %.6g",
             v->err_max, v->tol_max, at.batch, at.head, at.position, worst_d,
             acr__load_element(p->out_dtype, output->o, at.row * p->v_dim + worst_d),
             ref->o[worst_row * p->v_dim + worst_d]);
    }
    if (!(v->err_rms <= v->tol_rms)) {
        fail(v, "RMS error %.3g > %.3g", v->err_rms, v->tol_rms);
    }
    if (!(v->err_rms <= v->tol_floor)) {
        fail(v, "RMS error %.3g > %.3g, which 8-bit weights alone account for", v->err_rms, v->tol_floor);
    }
}

/* An output of float32 beside 16-bit inputs that was rounded to 16 bits on its way keeps within the tolerance, which
 * allows for rounded weights. But of right elements that 16 bits do not hold, one in thousands looks as if they did;
 * more where inputs let one key decide, so that only normal ones are judged. */
static void judge_width(verdict *v, const reference *ref, const run_output *output)
{
    enum {
        ELEMENTS_MIN = 64
    };
    const acr_problem *p = &ref->problem;
    int64_t asked = 0, held = 0;
    if (p->out_dtype != ACR_F32 || p->dtype == ACR_F32 || ref->inputs != INPUT_NORMAL) {
        return;
    }
    for (int64_t i = 0; i < ref->rows * p->v_dim; ++i) {
        const int64_t at = reference_row(ref, i / p->v_dim).row * p->v_dim + i % p->v_dim;
        const double expected = ref->o[i], got = acr__load_element(ACR_F32, output->o, at);
        uint16_t bits;
        acr__store_element(p->dtype, &bits, 0, expected);
        if (!(fabs(acr__load_element(p->dtype, &bits, 0) - expected) > 0x1p-15 * fabs(expected))) {
            continue; /* too near to what 16 bits hold */
        }
        acr__store_element(p->dtype, &bits, 0, got);
        ++asked;
        held += acr__load_element(p->dtype, &bits, 0) == got;
    }
    if (asked >= ELEMENTS_MIN && held == asked) {
        fail(v, "o is float32, but all %" PRId64 " elements that %s does not hold are rounded to it", asked,
             acr__dtype_text(p->dtype));
    }
}

static void judge_lse(verdict *v, const reference *ref, const run_output *output)
{
    for (int64_t i = 0; i < ref->rows; ++i) {
        row_place at = reference_row(ref, i);
        double got = (double)output->lse[at.row], expected = ref->lse[i];
        const bool both_lowest = expected < ORACLE_LOWEST && got < ORACLE_LOWEST && isfinite(expected) && isfinite(got);
        double error = got == expected || both_lowest ? 0 : fabs(got - expected); /* equal infinities: no keys */
        v->err_lse = fmax(v->err_lse, error);
        if (!(error <= v->tol_lse)) {
            fail(v,
                 "log-sum-exp error %.3g > %.3g at lse[%" PRId64 ",%" PRId64 ",%" PRId64 "]: got %.6g, expected %.6g",
                 error, v->tol_lse, at.batch, at.head, at.position, got, expected);
        }
    }
}

/* Every element that is judged, by itself: what does not exist for the pass, as a row of no sequence, has been seen
 * untouched. */
static void judge_gradients(verdict *v, const reference *ref, const run_output *output)
{
    static const char *const names[] = {"dq", "dk", "dv", "dsinks"};
    const acr_problem *p = &ref->problem;
    const gradients *g = ref->grads;
    double square = 0, allowed = 0, worst = -1;
    v->tol_lse = 1; /* there is none */
    for (int which = 0; which < 4; ++which) {
        const int64_t dims = which == 2 ? p->v_dim : p->qk_dim, rows = which == 0 ? ref->q_rows : ref->kv_rows;
        const int32_t *owner = which == 0 ? ref->q_owner : ref->kv_owner;
        const uint8_t *judged = which == 3 ? NULL : which == 0 ? g->rows : g->keys;
        const acr_dtype dtype = which == 3 ? ACR_F32 : p->grad_dtype;
        for (int64_t i = 0; i < g->elements[which]; ++i) {
            if (which < 3 && owner && owner[i / dims % rows] < 0) {
                continue;
            }
            const double got = acr__load_element(dtype, output->grads[which], i), expected = g->expected[which][i];
            if (judged && !judged[i / dims]) {
                if (isnan(got)) {
                    fail(v, "element %" PRId64 " of %s was not written, or is NaN", i, names[which]);
                }
                continue;
            }
            const double error = fabs(got - expected), tolerance = g->tolerance[which][i];
            square += error * error;
            allowed += tolerance * tolerance;
            if (!(error / tolerance <= worst)) {
                worst = isnan(error) ? INFINITY : error / tolerance;
                v->err_max = isnan(error) ? INFINITY : error;
                v->tol_max = tolerance;
            }
            if (!(error <= tolerance)) {
                fail(v, "error %.3g > %.3g at element %" PRId64 " of %s: got %.6g, expected %.6g", error, tolerance, i,
                     names[which], got, expected);
            }
        }
    }
    v->err_rms = sqrt(square);
    v->tol_rms = allowed > 0 ? sqrt(allowed) : 1;
    v->tol_floor = INFINITY;
}

void conformance_judge(verdict *out, const reference *ref, const run_output *output)
{
    *out = (verdict){.pass = true,
                     .rows = ref->rows,
                     .tol_max = ref->tol_max,
                     .tol_rms = ref->tol_rms,
                     .tol_lse = ref->tol_lse,
                     .tol_floor = ref->tol_floor};
    if (output->violation[0]) {
        fail(out, "%s", output->violation);
    }
    if (ref->grads) {
        judge_gradients(out, ref, output);
        return;
    }
    judge_written(out, ref, output);
    judge_output(out, ref, output);
    judge_width(out, ref, output);
    if (output->lse) {
        judge_lse(out, ref, output);
    }
}

void verdict_add_json(json_t *to, const verdict *v)
{
    const struct {
        const char *name;
        double value;
    } numbers[] = {{"err_max", v->err_max}, {"tol_max", v->tol_max}, {"err_rms", v->err_rms},
                   {"tol_rms", v->tol_rms}, {"err_lse", v->err_lse}, {"tol_lse", v->tol_lse}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; ++i) {
        json_object_set_new(to, numbers[i].name, json_number_or_null(numbers[i].value));
    }
}

double verdict_share(const verdict *v)
{
    double share = fmax(v->err_max / v->tol_max, v->err_rms / fmin(v->tol_rms, v->tol_floor));
    return fmax(share, v->err_lse / v->tol_lse);
}

/* ---- Running ---- */

/* A failing step of a run: the verdict, or, when the device or the memory is gone, the end. */
static acr_status failed_step(verdict *v, acr_status status, const char *step)
{
    fail(v, "%s: %s", step, acr_last_error());
    return status == ACR_DEVICE_FAULT || status == ACR_NO_MEMORY ? status : ACR_OK;
}

static bool same_output(const run_output *a, const run_output *b)
{
    for (int i = 0; i < 4; ++i) {
        if (a->grads[i] && memcmp(a->grads[i], b->grads[i], a->grad_bytes[i]) != 0) {
            return false;
        }
    }
    if (!a->o) {
        return true;
    }
    return memcmp(a->o, b->o, a->o_bytes) == 0 && (!a->lse || memcmp(a->lse, b->lse, a->lse_bytes) == 0);
}

/* More runs of the same execution give the same bits; the workspace is as the run before left it. Where sums may be
 * taken in any order, every run is judged by itself. */
static acr_status check_repeat(verdict *v, execution *e, const reference *ref, const run_output *first, int reruns)
{
    const bool any_order = execution_problem(e)->flags & ACR_FAST_ATOMICS;
    for (int run = 2; run <= reruns + 1 && v->pass; ++run) {
        char step[32];
        run_output next;
        snprintf(step, sizeof step, "run %d", run);
        acr_status status = execution_run(e);
        if (status == ACR_OK) {
            status = execution_collect(e, &next);
        }
        if (status != ACR_OK) {
            return failed_step(v, status, step);
        }
        if (any_order) {
            verdict own;
            conformance_judge(&own, ref, &next);
            if (!own.pass) {
                fail(v, "%s: %s", step, own.failure);
            }
        } else if (!same_output(first, &next)) {
            fail(v, "run %d on the same inputs gives other bits than the first", run);
        }
        if (next.violation[0]) {
            fail(v, "%s: %s", step, next.violation);
        }
        run_output_free(&next);
    }
    return ACR_OK;
}

/* ---- Row independence ---- */

/* What becomes of a query row when its neighbours are tried. */
typedef enum row_fate {
    ROW_KEPT,
    ROW_ZERO,
    ROW_NAN,
    ROW_INFINITE,
    ROW_HUGE
} row_fate;

/* Rows go through spans in which nearly all rows are kept, half of them, or one alone in tens. */
static row_fate fate_of(uint64_t seed, int64_t row)
{
    enum {
        STREAM_SPAN = 40,
        STREAM_ROW,
        SPAN = 96 /* no multiple of a tile of 64 or 128 rows */
    };
    static const unsigned kept_of_64[] = {60, 32, 2};
    const uint64_t span = random_bits(seed, STREAM_SPAN, (uint64_t)(row / SPAN));
    const uint64_t bits = random_bits(seed, STREAM_ROW, (uint64_t)row);
    return bits % 64 < kept_of_64[span % 3] ? ROW_KEPT : (row_fate)(ROW_ZERO + bits / 64 % 4);
}

static double value_of(row_fate fate, acr_dtype dtype, bool negative)
{
    static const double huge[] = {[ACR_F32] = 1e30, [ACR_F16] = 6e4, [ACR_BF16] = 1e30, [ACR_E4M3] = 448};
    const double value = fate == ROW_ZERO   ? 0
                         : fate == ROW_NAN  ? NAN
                         : fate == ROW_HUGE ? huge[dtype]
                                            : INFINITY; /* e4m3 has none and takes its largest number */
    return negative ? -value : value;
}

/* The reference's queries with the fates of their rows; NULL when out of memory. */
static void *disturbed_queries(const reference *ref)
{
    enum {
        STREAM_SIGN = 42
    };
    const acr_problem *p = &ref->problem;
    const int64_t rows = ref->entries * p->q_heads * ref->q_rows;
    const size_t bytes = (size_t)(rows * p->qk_dim) * (size_t)acr__dtype_bytes(p->dtype);
    void *q = malloc(bytes);
    for (int64_t row = 0; q && row < rows; ++row) {
        const row_fate fate = fate_of(ref->seed, row);
        const size_t row_bytes = bytes / (size_t)rows, first = (size_t)row * row_bytes;
        if (fate == ROW_KEPT) {
            memcpy((char *)q + first, (const char *)ref->buffers.q + first, row_bytes);
            continue;
        }
        for (int64_t d = 0; d < p->qk_dim; ++d) {
            const int64_t at = row * p->qk_dim + d;
            const bool negative = random_bits(ref->seed, STREAM_SIGN, (uint64_t)at) & 1;
            acr__store_element(p->dtype, q, at, value_of(fate, p->dtype, negative));
        }
    }
    return q;
}

/* Whether queries share memory: then a row cannot be changed by itself. */
static bool queries_repeat(const acr_problem *p)
{
    return (p->q.batch == 0 && p->batch > 1 && !(p->flags & ACR_PACKED)) || (p->q.head == 0 && p->q_heads > 1);
}

/* What the rows' own output is: o, or of a backward problem dq. dk and dv are of all rows. */
static void compare_kept_rows(verdict *v, const reference *ref, const run_output *alone, const run_output *beside)
{
    const acr_problem *p = &ref->problem;
    const bool backward = p->pass == ACR_BACKWARD;
    const int64_t rows = ref->entries * p->q_heads * ref->q_rows;
    const size_t row_bytes = (backward ? alone->grad_bytes[0] : alone->o_bytes) / (size_t)rows;
    const char *before = backward ? alone->grads[0] : alone->o, *after = backward ? beside->grads[0] : beside->o;
    for (int64_t row = 0; row < rows && v->pass; ++row) {
        if (fate_of(ref->seed, row) != ROW_KEPT || (ref->q_owner && ref->q_owner[row % ref->q_rows] < 0)) {
            continue;
        }
        const char *a = before + (size_t)row * row_bytes, *b = after + (size_t)row * row_bytes;
        if (memcmp(a, b, row_bytes) != 0 || (alone->lse && memcmp(&alone->lse[row], &beside->lse[row], 4) != 0)) {
            fail(v,
                 "row [%" PRId64 ",%" PRId64 ",%" PRId64 "]%s has other bits beside rows that are zero, NaN, infinite "
                 "or huge",
                 row / ref->q_rows / p->q_heads, row / ref->q_rows % p->q_heads, row % ref->q_rows,
                 backward ? " of dq" : "");
        }
    }
}

/* An output row depends on its own query row, bit for bit: most other rows are replaced. */
static acr_status check_row_independence(verdict *v, execution *e, const reference *ref, const run_output *first)
{
    reference disturbed = *ref;
    run_output output;
    if (ref->entries * ref->q_rows == 0 || queries_repeat(execution_problem(e))) {
        return ACR_OK;
    }
    void *queries = disturbed_queries(ref);
    disturbed.buffers.q = queries;
    if (!queries) {
        return failed_step(v, acr__fail(ACR_NO_MEMORY, "no memory for the queries"), "row independence");
    }
    acr_status status = execution_replace_inputs(e, &disturbed);
    if (status == ACR_OK) {
        status = execution_run(e);
    }
    if (status == ACR_OK) {
        status = execution_collect(e, &output);
    }
    if (status == ACR_OK) {
        compare_kept_rows(v, ref, first, &output);
        if (output.violation[0]) {
            fail(v, "beside rows that are not finite: %s", output.violation);
        }
        run_output_free(&output);
    } else {
        status = failed_step(v, status, "run beside rows that are not finite");
    }
    free(queries);
    return status;
}

static acr_status check_invariance(verdict *v, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                                   const reference *ref, const run_output *first)
{
    char failure[256];
    const acr_status status = invariance_check(failure, ctx, kernel, problem, ref, first);
    if (failure[0]) {
        fail(v, "%s", failure);
    }
    return status;
}

/* rows: whether rows are tried beside others, too. */
static acr_status check_first(verdict *v, acr_ctx *ctx, const acr__kernel *kernel, execution *e, const reference *ref,
                              int reruns, bool rows)
{
    run_output output;
    acr_status status = execution_run(e);
    if (status == ACR_OK) {
        status = execution_collect(e, &output);
    }
    if (status != ACR_OK) {
        return failed_step(v, status, "run");
    }
    conformance_judge(v, ref, &output);
    status = check_repeat(v, e, ref, &output, reruns);
    if (status == ACR_OK && v->pass && rows) {
        status = check_row_independence(v, e, ref, &output);
    }
    const acr_problem *problem = execution_problem(e);
    if (status == ACR_OK && v->pass && rows && problem->flags & ACR_INVARIANT) {
        status = check_invariance(v, ctx, kernel, problem, ref, &output);
    }
    run_output_free(&output);
    return status;
}

/* Attention does not depend on the order of its keys. The verdict keeps the errors of the ordinary order. */
static acr_status check_reversed_keys(verdict *v, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                                      const reference *ref)
{
    verdict reversed = {.pass = true};
    execution *e = NULL;
    acr_status status = execution_create(&e, ctx, kernel, problem, ref, true, 0, 0);
    if (status != ACR_OK) {
        return failed_step(v, status, "with the keys reversed");
    }
    status = check_first(&reversed, ctx, kernel, e, ref, 0, false);
    execution_destroy(e);
    if (!reversed.pass) {
        fail(v, "with the keys reversed: %s", reversed.failure);
    }
    return status;
}

acr_status conformance_check_reruns(verdict *out, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                                    const reference *ref, int reruns)
{
    *out = (verdict){.pass = true};
    execution *e = NULL;
    acr_status status = execution_create(&e, ctx, kernel, problem, ref, false, 0, 0);
    if (status != ACR_OK) {
        return failed_step(out, status, "plan");
    }
    status = check_first(out, ctx, kernel, e, ref, reruns, !(problem->flags & ACR_FAST_ATOMICS));
    execution_destroy(e);
    const uint32_t unordered = FWD_TERM_CAP | FWD_TERM_SINKS; /* every other term looks at a key's position */
    bool order_matters = problem->pass == ACR_BACKWARD || visible_is_limited(acr__rule_of(problem)) ||
                         acr__terms_of(problem) & ~unordered || problem->flags & (ACR_KV_LENS | ACR_PACKED);
    if (status == ACR_OK && out->pass && !order_matters && problem->kv_len > 1) {
        status = check_reversed_keys(out, ctx, kernel, problem, ref);
    }
    return status;
}

acr_status conformance_check(verdict *out, acr_ctx *ctx, const acr__kernel *kernel, const acr_problem *problem,
                             const reference *ref)
{
    return conformance_check_reruns(out, ctx, kernel, problem, ref, 1);
}
