/* Positive controls of the gate for gradients, as gate_controls.c has them for the forward pass: a plain kernel passes
 * its cases, and each of its sisters with one mistake is caught. */
#include "flaws.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

enum flaw {
    NO_FLAW,
    D_MISSING,          /* dS = P dP */
    GROUP_NOT_SUMMED,   /* dk and dv of the group's last query head alone */
    MASK_TRANSPOSED,    /* key i is taken as what sees row j */
    DQ_TWICE,           /* added to what was there, and there was the same */
    CAP_NOT_DERIVED,    /* its derivative taken as 1 */
    SCALE_FORGOTTEN,    /* in dk */
    UNSEEN_NOT_WRITTEN, /* keys that nothing sees keep what was there */
    SINKS_KEPT,         /* the sign of dsinks */
    UNSTEADY,
    FLAWS
};

static const char *const flaw_names[FLAWS] = {"none",       "D missing",       "group not summed", "mask transposed",
                                              "dq twice",   "cap not derived", "scale forgotten",  "unseen not written",
                                              "sinks kept", "unsteady"};

static int present; /* the flaw that the kernel has now */
static unsigned runs;

static const char *why_not(const acr_problem *p, const acr__device *device)
{
    (void)device;
    return p->q_len * p->kv_len * p->batch * p->q_heads > 40000 ? "lengths make more work than the control is for"
                                                                : NULL;
}

static double cost(const acr_problem *p, const acr__device *device)
{
    (void)p, (void)device;
    return 1.0;
}

static double element(acr_dtype dtype, const void *base, int64_t row, int64_t d)
{
    return acr__load_element(dtype, base, row + d);
}

static int64_t row_of(const fwd_strides *s, int64_t batch, int64_t head, int64_t row)
{
    return batch * s->batch + head * s->head + row * s->row;
}

/* A batch entry. */
typedef struct entry {
    int64_t batch, q_first, q_len, kv_first, kv_len;
} entry;

static entry entry_of(const fwd_args *a, int64_t batch)
{
    if (a->q_offsets) {
        const fwd_sequence q = fwd_sequence_of(a->q_offsets, batch, a->q_total, a->q_len),
                           kv = fwd_sequence_of(a->kv_offsets, batch, a->kv_total, a->kv_len);
        return (entry){batch, q.first, q.length, kv.first, kv.length};
    }
    const int64_t keys = a->kv_lens ? a->kv_lens[batch] : a->kv_len;
    return (entry){batch, 0, a->q_len, 0, keys < 0 ? 0 : keys > a->kv_len ? a->kv_len : keys};
}

static bool sees(const fwd_args *a, const entry *e, int64_t i, int64_t j)
{
    const int64_t row = present == MASK_TRANSPOSED ? j : i, key = present == MASK_TRANSPOSED ? i : j;
    const int64_t position = row + (a->mask == FWD_MASK_TOP_LEFT ? 0 : e->kv_len - e->q_len);
    return (a->mask == FWD_MASK_NONE || key <= position) && (a->window_left == 0 || key > position - a->window_left) &&
           (a->window_right == 0 || key <= position + a->window_right);
}

/* The gradients of an entry and key/value head, in float64. */
static void differentiate(const bwd_args *b, int64_t batch, int64_t kv_head, double *dsinks)
{
    const fwd_args *a = &b->fwd;
    const entry e = entry_of(a, batch);
    const int64_t all_keys = a->q_offsets ? e.kv_len : a->kv_len;
    const acr_dtype grad = b->grad_f32 ? ACR_F32 : ACR_F16;
    double *dk = calloc((size_t)(all_keys * a->qk_dim) + 1, sizeof *dk),
           *dv = calloc((size_t)(all_keys * a->v_dim) + 1, sizeof *dv), *dq = calloc((size_t)a->qk_dim, sizeof *dq);
    assert_true(dk && dv && dq);
    for (int64_t head = kv_head * a->group; head < (kv_head + 1) * a->group; head++) {
        if (present == GROUP_NOT_SUMMED) {
            memset(dk, 0, (size_t)(all_keys * a->qk_dim) * sizeof *dk);
            memset(dv, 0, (size_t)(all_keys * a->v_dim) * sizeof *dv);
        }
        for (int64_t i = 0; i < e.q_len; i++) {
            const int64_t q = row_of(&a->q_stride, batch, head, e.q_first + i),
                          o = row_of(&a->o_stride, batch, head, e.q_first + i),
                          d_o = row_of(&b->d_o_stride, batch, head, e.q_first + i),
                          at = row_of(&b->dq_stride, batch, head, e.q_first + i);
            const double lse = a->q_offsets ? a->lse[head * a->q_total + e.q_first + i]
                                            : a->lse[(batch * a->q_heads + head) * a->q_len + i];
            double delta = 0;
            for (int64_t d = 0; d < a->v_dim; d++)
                delta += element(ACR_F16, b->d_o, d_o, d) * element(ACR_F16, a->o, o, d);
            memset(dq, 0, (size_t)a->qk_dim * sizeof *dq);
            for (int64_t j = 0; j < e.kv_len; j++) {
                const int64_t k = row_of(&a->k_stride, batch, kv_head, e.kv_first + j),
                              v = row_of(&a->v_stride, batch, kv_head, e.kv_first + j);
                double s = 0, dp = 0, slope = 1;
                if (!sees(a, &e, i, j))
                    continue;
                for (int64_t d = 0; d < a->qk_dim; d++)
                    s += element(ACR_F16, a->q, q, d) * element(ACR_F16, a->k, k, d);
                for (int64_t d = 0; d < a->v_dim; d++)
                    dp += element(ACR_F16, b->d_o, d_o, d) * element(ACR_F16, a->v, v, d);
                s *= (double)a->scale;
                if (a->softcap > 0) {
                    const double t = tanh(s / (double)a->softcap);
                    s = (double)a->softcap * t;
                    slope = present == CAP_NOT_DERIVED ? 1 : 1 - t * t;
                }
                const double p = exp(s - lse), ds = p * (dp - (present == D_MISSING ? 0 : delta)) * slope;
                for (int64_t d = 0; d < a->qk_dim; d++) {
                    dq[d] += ds * (double)a->scale * element(ACR_F16, a->k, k, d);
                    dk[j * a->qk_dim + d] +=
                        ds * (present == SCALE_FORGOTTEN ? 1 : (double)a->scale) * element(ACR_F16, a->q, q, d);
                }
                for (int64_t d = 0; d < a->v_dim; d++)
                    dv[j * a->v_dim + d] += p * element(ACR_F16, b->d_o, d_o, d);
            }
            for (int64_t d = 0; d < a->qk_dim; d++)
                acr__store_element(grad, b->dq, at + d, (present == DQ_TWICE ? 2 : 1) * dq[d]);
            if (a->sinks && a->sinks[head] > -INFINITY)
                dsinks[head] -= (present == SINKS_KEPT ? -1 : 1) * exp((double)a->sinks[head] - lse) * delta;
        }
    }
    for (int64_t j = 0; j < (present == UNSEEN_NOT_WRITTEN ? e.kv_len : all_keys); j++) {
        for (int64_t d = 0; d < a->qk_dim; d++)
            acr__store_element(grad, b->dk, row_of(&b->dk_stride, batch, kv_head, e.kv_first + j) + d,
                               dk[j * a->qk_dim + d]);
        for (int64_t d = 0; d < a->v_dim; d++)
            acr__store_element(grad, b->dv, row_of(&b->dv_stride, batch, kv_head, e.kv_first + j) + d,
                               dv[j * a->v_dim + d]);
    }
    free(dk);
    free(dv);
    free(dq);
}

static void run(const fwd_args *a, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)
{
    (void)lane, (void)lanes, (void)queue, (void)scratch;
    const bwd_args *b = bwd_args_of(a);
    double *dsinks = calloc((size_t)a->q_heads, sizeof *dsinks);
    assert_non_null(dsinks);
    for (int64_t index = 0; index < (int64_t)a->batch * a->kv_heads; index++)
        differentiate(b, index / a->kv_heads, index % a->kv_heads, dsinks);
    for (int64_t head = 0; b->dsinks && head < a->q_heads; head++)
        b->dsinks[head] = (float)dsinks[head];
    if (present == UNSTEADY && entry_of(a, 0).q_len > 0 && !a->q_offsets)
        *(uint16_t *)b->dq ^= (uint16_t)(runs++ & 1);
    free(dsinks);
}

static const unsigned char identity[] = "control";
static const acr__kernel control = {.name = "bwd_control_f16_d64_16x16_portable",
                                    .family = "bwd_control",
                                    .backend = ACR__CPU,
                                    .pass = ACR_BACKWARD,
                                    .dtype = ACR_F16,
                                    .qk_dim_max = 64,
                                    .v_dim_max = 64,
                                    .q_tile = 16,
                                    .kv_tile = 16,
                                    .stages = 1,
                                    .traits = ACR__TRAIT_PACKED,
                                    .terms = FWD_TERM_CAP | FWD_TERM_SINKS,
                                    .why_not = why_not,
                                    .cost = cost,
                                    .run = run,
                                    .image = identity,
                                    .image_end = identity + sizeof identity - 1};

static void every_flaw_is_caught(void **state)
{
    (void)state;
    check_flaws(&(flawed_kernel){&control, &present, FLAWS, flaw_names, 0, false});
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_flaw_is_caught)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
