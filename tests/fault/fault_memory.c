/* Running out of memory, threads or disk, at every place in turn: each call either succeeds or says ACR_NO_MEMORY
 * (ACR_IO), writes none of its outputs, and gives back all that it took. And the promise that executions allocate
 * nothing. */
#include "support.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "check/oracle.h"
#include "faults.h"
#include "probe_kernel.h"

/* Bounds the search for the last allocation of a call. */
enum {
    PLACES_MAX = 500
};

static acr_ctx_options cpu_options(uint32_t threads)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cpu";
    options.threads = threads;
    return options;
}

/* One call of the library under test, with what it needs prepared in advance. Returns its status; on success undoes
 * what it made. */
typedef acr_status attempt(void *arg);

/* Fails each place of a kind in turn until the call gets through untouched. */
static void fail_everywhere(attempt *call, void *arg, fault_kind kind, acr_status expected)
{
    int place = 1;
    for (; place <= PLACES_MAX; place++) {
        const int64_t blocks = fault_live_blocks();
        const int threads = fault_live_threads();
        fault_arm(kind, place);
        const acr_status status = call(arg);
        const bool fired = fault_fired();
        fault_arm(kind, 0);
        if (fault_live_blocks() != blocks || fault_live_threads() != threads)
            fail_msg("place %d: %lld blocks and %d threads were left", place, (long long)(fault_live_blocks() - blocks),
                     fault_live_threads() - threads);
        if (!fired) {
            assert_ok(status);
            break;
        }
        if (status != expected)
            fail_msg("place %d: status %d (%s), expected %d", place, (int)status, acr_last_error(), (int)expected);
        assert_true(strlen(acr_last_error()) > 0);
    }
    assert_in_range(place, 2, PLACES_MAX); /* there was something to fail */
}

/* ---- Contexts ---- */

static acr_status create_context(void *arg)
{
    const acr_ctx_options *options = arg;
    acr_ctx *const untouched = (acr_ctx *)(uintptr_t)64, *ctx = untouched;
    const acr_status status = acr_ctx_create(&ctx, options);
    if (status == ACR_OK)
        acr_ctx_destroy(ctx);
    else
        assert_ptr_equal(ctx, untouched);
    return status;
}

static void contexts_survive_lack_of_memory(void **state)
{
    (void)state;
    acr_ctx_options options = cpu_options(1);
    fail_everywhere(create_context, &options, FAULT_MEMORY, ACR_NO_MEMORY);
    options.threads = 4;
    fail_everywhere(create_context, &options, FAULT_MEMORY, ACR_NO_MEMORY);
}

static void contexts_survive_lack_of_threads(void **state)
{
    (void)state;
    acr_ctx_options options = cpu_options(5);
    fail_everywhere(create_context, &options, FAULT_THREAD, ACR_NO_MEMORY);
}

/* ---- Plans ---- */

typedef struct plan_call {
    acr_ctx *ctx;
    acr_problem problem;
    acr_effort effort;
    const acr__kernel *kernel; /* forced, or NULL */
} plan_call;

static acr_status create_plan(void *arg)
{
    const plan_call *call = arg;
    acr_plan *const untouched = (acr_plan *)(uintptr_t)64, *plan = untouched;
    const acr_status status = call->kernel ? acr__plan_create_forced(&plan, call->ctx, &call->problem, call->kernel)
                                           : acr_plan_create(&plan, call->ctx, &call->problem, call->effort);
    if (status == ACR_OK)
        acr_plan_destroy(plan);
    else
        assert_ptr_equal(plan, untouched);
    return status;
}

static void plans_survive_lack_of_memory(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    plan_call calls[] = {
        {ctx, problem_of("b1:h2:s16:d64"), ACR_ESTIMATE, NULL},
        {ctx, problem_of("b1:h2:s16:d64"), ACR_ESTIMATE, &probe_kernel},
    };
    for (size_t i = 0; i < COUNT_OF(calls); i++)
        fail_everywhere(create_plan, &calls[i], FAULT_MEMORY, ACR_NO_MEMORY);
    acr_ctx_destroy(ctx);
}

/* Measuring keeps its result, so every attempt needs a context that knows nothing yet. */
static void measuring_survives_lack_of_memory(void **state)
{
    (void)state;
    int place = 1;
    bool fired = true;
    for (; fired && place <= PLACES_MAX; place++) {
        const int64_t before = fault_live_blocks();
        plan_call call = {cpu_ctx(1), problem_of("f32:b1:h1:s4:d8:lse:kvlens"), ACR_MEASURE, NULL};
        fault_arm(FAULT_MEMORY, place);
        const acr_status status = create_plan(&call);
        fired = fault_fired();
        fault_arm(FAULT_MEMORY, 0);
        assert_int_equal(status, fired ? ACR_NO_MEMORY : ACR_OK);
        acr_ctx_destroy(call.ctx);
        assert_int_equal(fault_live_blocks(), before);
    }
    assert_in_range(place, 6, PLACES_MAX); /* runners, plan, and scratch for six tensors at least */
}

/* ---- The one call ---- */

static void forward_survives_lack_of_memory(void **state)
{
    (void)state;
    const acr_problem p = problem_of("b1:h2:s16:d64");
    tensors t = tensors_make(&p, 1);
    int place = 1;
    bool fired = true;
    for (; fired && place <= PLACES_MAX; place++) {
        const int64_t before = fault_live_blocks();
        acr_ctx *ctx = cpu_ctx(2);
        tensors_poison_outputs(&t);
        fault_arm(FAULT_MEMORY, place);
        const acr_status status = acr_forward(ctx, &p, &t.buffers, NULL);
        fired = fault_fired();
        fault_arm(FAULT_MEMORY, 0);
        assert_int_equal(status, fired ? ACR_NO_MEMORY : ACR_OK);
        if (fired) { /* nothing half-written, and the next call works */
            for (size_t i = 0; i < t.o_bytes; i++)
                assert_int_equal(((const unsigned char *)t.o)[i], 0xff);
            assert_ok(acr_forward(ctx, &p, &t.buffers, NULL));
        }
        acr_ctx_destroy(ctx);
        assert_int_equal(fault_live_blocks(), before);
    }
    assert_in_range(place, 3, PLACES_MAX);
    tensors_free(&t);
}

/* What two calls take by turns is kept for both, however much more the second takes. */
static void calls_by_turns_allocate_nothing(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    const acr_problem problems[] = {problem_of("f32:b1:h1:s1/4096:d64"), problem_of("f32:b1:h1:s1/65536:d256")};
    tensors t[] = {tensors_make(&problems[0], 1), tensors_make(&problems[1], 1)};
    size_t bytes[2];
    for (int i = 0; i < 2; i++) {
        acr_plan *plan = NULL;
        assert_ok(acr_plan_create(&plan, ctx, &problems[i], ACR_ESTIMATE));
        bytes[i] = acr_plan_workspace(plan);
        acr_plan_destroy(plan);
    }
    assert_true(0 < bytes[0] && bytes[0] < bytes[1]);
    for (int i = 0; i < 2; i++)
        assert_ok(acr_forward(ctx, &problems[i], &t[i].buffers, NULL));
    fault_arm(FAULT_MEMORY, 1);
    for (int turn = 0; turn < 3; turn++)
        for (int i = 0; i < 2; i++)
            assert_ok(acr_forward(ctx, &problems[i], &t[i].buffers, NULL));
    assert_int_equal(fault_calls(FAULT_MEMORY), 0);
    fault_arm(FAULT_MEMORY, 0);
    for (int i = 0; i < 2; i++)
        tensors_free(&t[i]);
    acr_ctx_destroy(ctx);
}

static void executions_allocate_nothing(void **state)
{
    (void)state;
    acr_ctx *ctx = cpu_ctx(2);
    const char *const texts[] = {"f32:b1:h8:s200:d64", "bf16:b2:h2:s100:d128:causal:lse:kvlens", "b1:h1:s1/500:d64"};
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        const acr_problem p = problem_of(texts[i]);
        tensors t = tensors_make(&p, 1);
        acr_plan *plan = NULL;
        assert_ok(acr_plan_create(&plan, ctx, &p, ACR_ESTIMATE));
        const size_t bytes = acr_plan_workspace(plan);
        void *workspace = bytes ? aligned_alloc(256, (bytes + 255) / 256 * 256) : NULL;
        fault_arm(FAULT_MEMORY, 1); /* the first one would fail it */
        assert_ok(acr_workspace_init(plan, workspace, bytes, NULL));
        for (int round = 0; round < 10; round++)
            assert_ok(acr_execute(plan, &t.buffers, workspace, bytes, NULL));
        assert_int_equal(fault_calls(FAULT_MEMORY), 0);
        assert_int_equal(fault_calls(FAULT_THREAD), 0);
        fault_arm(FAULT_MEMORY, 0);

        assert_ok(acr_forward(ctx, &p, &t.buffers, NULL));
        fault_arm(FAULT_MEMORY, 1); /* after the first call for a problem and stream it allocates nothing either */
        for (int round = 0; round < 10; round++)
            assert_ok(acr_forward(ctx, &p, &t.buffers, NULL));
        assert_int_equal(fault_calls(FAULT_MEMORY), 0);
        fault_arm(FAULT_MEMORY, 0);
        free(workspace);
        acr_plan_destroy(plan);
        tensors_free(&t);
    }
    acr_ctx_destroy(ctx);
}

/* ---- Wisdom ---- */

typedef struct wisdom_call {
    acr_ctx *ctx;
    const char *path;
} wisdom_call;

/* A context that has learnt, and its wisdom in a file. */
static wisdom_call wisdom_call_make(const char *name)
{
    static const char *const texts[] = {"f32:b1:h1:s4:d8", "f32:b1:h1:s5:d8"};
    wisdom_call call = {cpu_ctx(1), scratch_path(name)};
    unlink(call.path);
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        const acr_problem p = problem_of(texts[i]);
        acr_plan *plan = NULL;
        assert_ok(acr_plan_create(&plan, call.ctx, &p, ACR_MEASURE));
        acr_plan_destroy(plan);
    }
    assert_ok(acr_wisdom_export(call.ctx, call.path));
    return call;
}

static acr_status import_afresh(void *arg)
{
    const wisdom_call *call = arg;
    acr_wisdom_report report = {(uint32_t)sizeof report, 7, 7, 7};
    const acr_status status = acr_wisdom_import(call->ctx, call->path, &report);
    assert_int_equal(report.imported, status == ACR_OK ? 2 : 7);
    return status;
}

static void import_survives_lack_of_memory(void **state)
{
    (void)state;
    wisdom_call call = wisdom_call_make("import-faults");
    int place = 1;
    bool fired = true;
    for (; fired && place <= PLACES_MAX; place++) {
        const int64_t before = fault_live_blocks();
        const wisdom_call fresh = {cpu_ctx(1), call.path};
        fault_arm(FAULT_MEMORY, place);
        const acr_status status = import_afresh((void *)(uintptr_t)&fresh);
        fired = fault_fired();
        fault_arm(FAULT_MEMORY, 0);
        assert_int_equal(status, fired ? ACR_NO_MEMORY : ACR_OK);
        const acr_problem p = problem_of("f32:b1:h1:s4:d8");
        acr_plan *plan = NULL;
        assert_int_equal(acr_plan_create(&plan, fresh.ctx, &p, ACR_WISDOM_ONLY), fired ? ACR_NO_WISDOM : ACR_OK);
        acr_plan_destroy(plan);
        acr_ctx_destroy(fresh.ctx);
        assert_int_equal(fault_live_blocks(), before);
    }
    assert_in_range(place, 4, PLACES_MAX);
    unlink(call.path);
    acr_ctx_destroy(call.ctx);
}

/* Files beside a path whose names begin with its name: itself, and temporaries. */
static int files_beside(const char *path)
{
    char folder[512];
    snprintf(folder, sizeof folder, "%s", path);
    char *const slash = strrchr(folder, '/');
    *slash = '\0';
    DIR *directory = opendir(folder);
    assert_non_null(directory);
    int count = 0;
    for (const struct dirent *entry; (entry = readdir(directory));)
        count += strncmp(entry->d_name, slash + 1, strlen(slash + 1)) == 0;
    closedir(directory);
    return count;
}

/* Exports over an older file, which must be whole afterwards: the old content after a failure, the new after success.
 * */
static acr_status export_over_old(void *arg)
{
    static const char old[] = "acromion-wisdom 1\nend facts=0 crc32=8863b1e9\n";
    const wisdom_call *call = arg;
    FILE *file = fopen(call->path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(old, 1, sizeof old - 1, file), sizeof old - 1);
    fclose(file);
    const acr_status status = acr_wisdom_export(call->ctx, call->path);
    char content[4096] = "";
    file = fopen(call->path, "rb");
    assert_non_null(file);
    assert_true(fread(content, 1, sizeof content - 1, file) > 0);
    fclose(file);
    if (status != ACR_OK && strcmp(content, old) != 0)
        fail_msg("the old file was touched: %s", content);
    if (status == ACR_OK)
        assert_non_null(strstr(content, "end facts=2 "));
    assert_int_equal(files_beside(call->path), 1);
    return status;
}

static void export_survives_lack_of_memory(void **state)
{
    (void)state;
    wisdom_call call = wisdom_call_make("export-faults");
    fail_everywhere(export_over_old, &call, FAULT_MEMORY, ACR_NO_MEMORY);
    unlink(call.path);
    acr_ctx_destroy(call.ctx);
}

static void export_survives_a_full_disk(void **state)
{
    (void)state;
    wisdom_call call = wisdom_call_make("disk-faults");
    /* mkstemp, write, fchmod, fsync, rename fail the export; the sync of the folder after the rename may fail unseen.
     * */
    for (int place = 1; place <= 5; place++) {
        fault_arm(FAULT_FILE, place);
        const acr_status status = export_over_old(&call);
        assert_true(fault_fired());
        fault_arm(FAULT_FILE, 0);
        assert_int_equal(status, ACR_IO);
    }
    assert_ok(export_over_old(&call));
    unlink(call.path);
    acr_ctx_destroy(call.ctx);
}

/* ---- The judge ---- */

static acr_status judge(void *arg)
{
    const tensors *t = arg;
    double o[16 * 8], lse[16];
    return oracle_forward(&t->problem, &t->buffers, NULL, 16, o, lse);
}

static acr_status judge_unfused(void *arg)
{
    const tensors *t = arg;
    double o[16 * 8];
    return oracle_unfused(&t->problem, &t->buffers, NULL, 16, 1.0f, o);
}

static void the_oracle_survives_lack_of_memory(void **state)
{
    (void)state;
    const acr_problem p = problem_of("b1:h2:s8:d8");
    tensors t = tensors_make(&p, 1);
    fail_everywhere(judge, &t, FAULT_MEMORY, ACR_NO_MEMORY);
    fail_everywhere(judge_unfused, &t, FAULT_MEMORY, ACR_NO_MEMORY);
    tensors_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(contexts_survive_lack_of_memory), cmocka_unit_test(contexts_survive_lack_of_threads),
        cmocka_unit_test(plans_survive_lack_of_memory),    cmocka_unit_test(measuring_survives_lack_of_memory),
        cmocka_unit_test(forward_survives_lack_of_memory), cmocka_unit_test(executions_allocate_nothing),
        cmocka_unit_test(import_survives_lack_of_memory),  cmocka_unit_test(export_survives_lack_of_memory),
        cmocka_unit_test(export_survives_a_full_disk),     cmocka_unit_test(the_oracle_survives_lack_of_memory),
        cmocka_unit_test(calls_by_turns_allocate_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
