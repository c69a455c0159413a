/* See flaws.h. */
#include "flaws.h"

#include "check/cases.h"
#include "check/conformance.h"

static case_list list; /* too large for the stack */

static const test_case *case_at(const flawed_kernel *c, size_t i)
{
    return &list.items[c->last_first ? list.count - 1 - i : i];
}

/* Runs the control's cases until one fails; returns how many passed before. */
static size_t cases_passed(acr_ctx *ctx, const flawed_kernel *c, char failure[400])
{
    for (size_t i = 0; i < list.count; i++) {
        const test_case *t = case_at(c, i);
        const reference_request wanted = {&t->problem, t->inputs, 1, c->sampled_rows, LENGTHS_EDGES, 1};
        reference *ref = NULL;
        verdict v;
        assert_ok(reference_create(&ref, &wanted));
        assert_ok(conformance_check(&v, ctx, c->kernel, &t->problem, ref));
        reference_destroy(ref);
        memcpy(failure, v.failure, sizeof v.failure);
        if (!v.pass)
            return i;
    }
    return list.count;
}

void check_flaws(const flawed_kernel *c)
{
    acr_ctx *ctx = cpu_ctx(1);
    cases_make(&list, c->kernel, &acr__ctx_backend_device(ctx)->device, false);
    assert_true(list.count >= 20);
    for (int f = 0; f < c->count; f++) {
        char failure[400] = "";
        *c->present = f;
        const size_t passed = cases_passed(ctx, c, failure);
        if (f == 0 && passed != list.count) {
            char text[ACR_PROBLEM_TEXT_MAX];
            assert_ok(acr_problem_format(&case_at(c, passed)->problem, text, sizeof text));
            fail_msg("without a flaw, %s: %s", text, failure);
        }
        if (f != 0 && passed == list.count)
            fail_msg("nothing caught the flaw \"%s\"", c->names[f]);
        if (f != 0)
            print_message("%-22s caught by case %zu: %s\n", c->names[f], passed, failure);
    }
    acr_ctx_destroy(ctx);
}
