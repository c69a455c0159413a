/* Host cost, see host_cost.h. */
#include "host_cost.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/json.h"
#include "base/progress.h"
#include "base/text.h"
#include "bench_record.h"
#include "machine/environment.h"
#include "stats.h"

enum {
    CALLS = 100, /* of a sample: the driver's queue holds them without waiting */
    ROUNDS_WARM_UP = 5,
    ROUNDS = 200,
    ROUNDS_MIN = 20 /* also where the budget is spent: slow kernels are waited for after every sample */
};
static const double budget_s = 5;

/* What is measured. */
typedef enum step {
    BARE,
    EXECUTE,
    FORWARD,
    LOOKUP,
    STEPS
} step;

static const char *const step_names[STEPS] = {"bare launch", "acr_execute", "acr_forward", "plan look-up"};
static const char cold_step[] = "first call, cold process";

/* Buffers of a problem: what is in them does not matter. */
typedef struct arena {
    acr__backend_device *device;
    void *memory[ACR__BUFFERS];
    void *workspace;
    acr_buffers buffers;
} arena;

/* ---- Buffers ---- */

static void arena_free(arena *a)
{
    for (int i = 0; i < ACR__BUFFERS; ++i) {
        a->device->backend->mem_free(a->device, a->memory[i]);
    }
    a->device->backend->mem_free(a->device, a->workspace);
}

/* Zeros; nothing where there are no bytes. */
static acr_status make_zeros(acr__backend_device *device, size_t bytes, void **out)
{
    const acr_status status = bytes > 0 ? device->backend->mem_alloc(device, bytes, out) : ACR_OK;
    return status == ACR_OK && bytes > 0 ? device->backend->mem_fill(device, *out, 0, bytes) : status;
}

static acr_status arena_make(arena *a, acr__backend_device *device, const acr_problem *p, size_t workspace_bytes)
{
    const int64_t pages = acr__pages_of_entry(p);
    const acr__rows rows = {p->q_len, p->kv_len, p->batch * pages, pages};
    *a = (arena){.device = device, .buffers = ACR_BUFFERS_INIT};
    a->buffers.pages = rows.pages;
    a->buffers.table_stride = rows.table_stride;
    acr_status status = make_zeros(device, workspace_bytes, &a->workspace);
    for (acr__buffer i = 0; i < ACR__BUFFERS && status == ACR_OK; ++i) {
        const int64_t bytes = acr__buffer_is_wanted(p, i) ? acr__buffer_bytes(p, i, rows) : 0;
        status = make_zeros(device, (size_t)bytes, &a->memory[i]);
        acr__set_pointer_at(&a->buffers, acr__buffer_fields[i].in_buffers, a->memory[i]);
    }
    if (status != ACR_OK) {
        arena_free(a);
    }
    return status;
}

/* ---- The first call of a process ---- */

/* What a child sends. */
typedef struct cold_report {
    host_cost_cold cold;
    acr_status status;
    char detail[200];
} cold_report;

static acr_status run_cold(host_cost_cold *out, const acr_ctx_options *options, const acr_problem *problem)
{
    acr_ctx *ctx = NULL;
    arena a;
    double start_s = monotonic_s();
    acr_status status = acr_ctx_create(&ctx, options);
    out->open_s = monotonic_s() - start_s;
    if (status == ACR_OK) {
        status = arena_make(&a, acr__ctx_backend_device(ctx), problem, 0);
    }
    if (status != ACR_OK) {
        acr_ctx_destroy(ctx);
        return status;
    }
    start_s = monotonic_s();
    status = acr_forward(ctx, problem, &a.buffers, NULL);
    acr_status ended = a.device->backend->synchronize(a.device);
    out->first_call_s = monotonic_s() - start_s;
    arena_free(&a);
    acr_ctx_destroy(ctx);
    return status == ACR_OK ? ended : status;
}

static void be_child(int to, const acr_ctx_options *options, const acr_problem *problem)
{
    cold_report report = {.status = ACR_OK};
    report.status = run_cold(&report.cold, options, problem);
    if (report.status != ACR_OK) {
        snprintf(report.detail, sizeof report.detail, "%s", acr_last_error());
    }
    const bool sent = write(to, &report, sizeof report) == (ssize_t)sizeof report;
    _exit(sent ? 0 : 1);
}

static acr_status run_child(host_cost_cold *out, const acr_ctx_options *options, const acr_problem *problem)
{
    int ends[2];
    cold_report report;
    if (pipe(ends) != 0) {
        return acr__fail(ACR_IO, "no pipe for a child process");
    }
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        close(ends[0]);
        be_child(ends[1], options, problem);
    }
    close(ends[1]);
    const bool received = child > 0 && read(ends[0], &report, sizeof report) == (ssize_t)sizeof report;
    close(ends[0]);
    if (child > 0) {
        waitpid(child, NULL, 0);
    }
    if (!received) {
        return acr__fail(ACR_IO, child > 0 ? "the cold process died" : "a cold process could not be made");
    }
    if (report.status != ACR_OK) {
        return acr__fail(report.status, "%s", report.detail);
    }
    *out = report.cold;
    return ACR_OK;
}

acr_status host_cost_measure_cold(host_cost_cold runs[HOST_COST_COLD_RUNS], const acr_ctx_options *options,
                                  const acr_problem *problem)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < HOST_COST_COLD_RUNS && status == ACR_OK; ++i) {
        status = run_child(&runs[i], options, problem);
    }
    return status;
}

/* ---- Warm calls ---- */

typedef struct bench {
    const host_cost_request *request;
    acr__backend_device *device;
    acr_plan *plan;
    acr__prepared *prepared; /* of the plan's kernel: the same function */
    arena arena;
    bool has_bare;
    size_t rounds; /* made */
    double us[STEPS][ROUNDS], above_us[ROUNDS];
} bench;

static acr_status open_bench(bench *b)
{
    const host_cost_request *r = b->request;
    b->device = acr__ctx_backend_device(r->ctx);
    b->has_bare = b->device->device.backend == ACR__CUDA;
    acr_status status = acr_plan_create(&b->plan, r->ctx, r->problem, ACR_ESTIMATE);
    if (status == ACR_OK) {
        const acr__kernel *kernel = acr__kernel_find(acr_plan_kernel(b->plan));
        status = b->device->backend->prepare(&b->prepared, b->device, kernel, r->problem);
    }
    if (status == ACR_OK) {
        status = arena_make(&b->arena, b->device, r->problem, acr_plan_workspace(b->plan));
    }
    if (status == ACR_OK) {
        status = acr_workspace_init(b->plan, b->arena.workspace, acr_plan_workspace(b->plan), NULL);
    }
    return status;
}

static void close_bench(bench *b)
{
    if (b->arena.device) {
        arena_free(&b->arena);
    }
    if (b->prepared) {
        b->device->backend->release(b->prepared);
    }
    acr_plan_destroy(b->plan);
}

static acr_status call_once(const bench *b, step s)
{
    const host_cost_request *r = b->request;
    switch (s) {
    case EXECUTE:
        return acr_execute(b->plan, &b->arena.buffers, b->arena.workspace, acr_plan_workspace(b->plan), NULL);
    case FORWARD:
        return acr_forward(r->ctx, r->problem, &b->arena.buffers, NULL);
    default:
        return acr__plan_lookup(r->ctx, r->problem);
    }
}

/* Seconds a call on the host, which waits for nothing meanwhile. */
static acr_status sample(const bench *b, step s, double *seconds)
{
    acr_status status = ACR_OK;
    if (s == BARE) {
        acr__args args;
        acr__fill_args(&args, b->request->problem, &b->arena.buffers, b->arena.workspace);
        status = b->device->backend->timing->launch_bare(b->prepared, &args.fwd, NULL, CALLS, seconds);
    } else {
        const double start_s = monotonic_s();
        for (int i = 0; i < CALLS && status == ACR_OK; ++i) {
            status = call_once(b, s);
        }
        *seconds = (monotonic_s() - start_s) / CALLS;
    }
    acr_status ended = b->device->backend->synchronize(b->device);
    return status == ACR_OK ? ended : status;
}

static acr_status run_rounds(bench *b)
{
    acr_status status = ACR_OK;
    watch_restart(b->request->watched);
    watch_disturbed(b->request->watched); /* the host's time does not depend on the GPU's clock: only recorded */
    const double start_s = monotonic_s();
    for (int round = -ROUNDS_WARM_UP; round < ROUNDS && status == ACR_OK; ++round) {
        if (round >= ROUNDS_MIN && monotonic_s() - start_s > budget_s) {
            break;
        }
        double seconds[STEPS] = {0};
        for (int i = 0; i < STEPS && status == ACR_OK; ++i) { /* each round begins with another step */
            const step s = (step)((i + round + ROUNDS_WARM_UP) % STEPS);
            status = s == BARE && !b->has_bare ? ACR_OK : sample(b, s, &seconds[s]);
        }
        for (int s = 0; s < STEPS && round >= 0; ++s) {
            b->us[s][round] = 1e6 * seconds[s];
        }
        if (round >= 0) {
            b->above_us[round] = b->us[EXECUTE][round] - b->us[BARE][round];
            b->rounds = (size_t)round + 1;
        }
    }
    watch_disturbed(b->request->watched);
    return status;
}

/* ---- Output ---- */

static stats_summary summary_of_cold(const host_cost_request *r, double *open_us)
{
    double open[HOST_COST_COLD_RUNS], first[HOST_COST_COLD_RUNS];
    for (int i = 0; i < HOST_COST_COLD_RUNS; ++i) {
        open[i] = 1e6 * r->cold[i].open_s;
        first[i] = 1e6 * r->cold[i].first_call_s;
    }
    *open_us = stats_percentile(open, HOST_COST_COLD_RUNS, 0.5);
    return stats_summarise(first, HOST_COST_COLD_RUNS);
}

static void print_row(const char *name, const stats_summary *s)
{
    char p50[24], p90[24], p99[24];
    printf("  %-26s %9s %9s %9s %5zu\n", name, us_text(p50, s->p50), us_text(p90, s->p90), us_text(p99, s->p99),
           s->count);
}

static void print_target(const char *what, double value, double target, const char *unit)
{
    printf("%s: %.3g %s, wanted at most %g: %s\n", what, value, unit, target, value <= target ? "met" : "missed");
}

static void print_table(const bench *b, const stats_summary steps[STEPS])
{
    double open_us;
    const host_cost_request *r = b->request;
    const stats_summary cold = summary_of_cold(r, &open_us);
    printf("%s on %s, host cost; %s\n", r->text, b->device->device.name, acr_plan_kernel(b->plan));
    printf("  %-26s %9s %9s %9s %5s\n", "us a call", "p50", "p90", "p99", "n");
    for (int s = 0; s < STEPS; ++s) {
        if (s == BARE && !b->has_bare) {
            printf("  %-26s none: a cpu kernel is called, no driver launches it\n", step_names[s]);
        } else {
            print_row(step_names[s], &steps[s]);
        }
    }
    print_row(cold_step, &cold);
    if (b->has_bare) {
        const stats_interval i = stats_percentile_interval(b->above_us, b->rounds, 0.5);
        const double above = stats_percentile(b->above_us, b->rounds, 0.5);
        printf("acr_execute above the bare launch: %.3f us (%.3f - %.3f), wanted at most 1: %s\n", above, i.low, i.high,
               i.high <= 1 ? "met" : "missed");
    }
    print_target("plan look-up", steps[LOOKUP].p50, 1, "us");
    print_target("first call of a cold process", cold.p50 / 1e3, 150, "ms");
    printf("(opening the device before it took %.1f ms)\n\n", open_us / 1e3);
    fflush(stdout);
}

static json_t *record_of(const bench *b, const char *name, const stats_summary *s, int calls)
{
    const host_cost_request *r = b->request;
    json_t *json =
        json_pack("{s:s, s:s, s:s, s:b, s:f, s:f, s:f, s:f, s:I, s:i, s:[o,o], s:n, s:{}}", "problem", r->text, "mode",
                  "host", "step", name, "overlap", 0, "p50_us", s->p50, "p90_us", s->p90, "p99_us", s->p99, "min_us",
                  s->min, "n", (json_int_t)s->count, "launches", calls, "ci95_us", json_number_or_null(s->p50_ci95.low),
                  json_number_or_null(s->p50_ci95.high), "err_max", "seeds");
    json_object_set_new(json, "clocks", watch_json(r->watched));
    bench_record_kernel(json, acr__kernel_find(acr_plan_kernel(b->plan)));
    environment_add(json, &b->device->device);
    return json;
}

static void append_records(const bench *b, const stats_summary steps[STEPS], json_t *records)
{
    double open_us;
    const stats_summary cold = summary_of_cold(b->request, &open_us);
    for (int s = 0; s < STEPS; ++s) {
        if (s == BARE && !b->has_bare) {
            continue;
        }
        json_t *json = record_of(b, step_names[s], &steps[s], CALLS);
        if (s == EXECUTE && b->has_bare) {
            const stats_interval i = stats_percentile_interval(b->above_us, b->rounds, 0.5);
            json_object_set_new(json, "above_bare_us", json_real(stats_percentile(b->above_us, b->rounds, 0.5)));
            json_object_set_new(json, "above_bare_ci95", json_pack("[f,f]", i.low, i.high));
        }
        json_array_append_new(records, json);
    }
    json_t *json = record_of(b, cold_step, &cold, 1);
    json_object_set_new(json, "open_us", json_real(open_us));
    json_array_append_new(records, json);
}

acr_status host_cost_run(const host_cost_request *request, json_t *records)
{
    bench *b = calloc(1, sizeof *b);
    if (!b) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the samples");
    }
    b->request = request;
    acr_status status = open_bench(b);
    if (status == ACR_OK) {
        status = run_rounds(b);
    }
    if (status == ACR_OK) {
        stats_summary steps[STEPS];
        for (int s = 0; s < STEPS; ++s) {
            steps[s] = stats_summarise(b->us[s], b->rounds);
        }
        append_records(b, steps, records);
        if (!request->quiet) {
            print_table(b, steps);
        }
    }
    close_bench(b);
    free(b);
    return status;
}
