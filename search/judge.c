/* Loading, checking and timing one candidate in a process of its own, see judge.h. */
#include "judge.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/command.h"
#include "base/json.h"
#include "bench/interleave.h"
#include "bench/timer.h"
#include "build.h"
#include "check/cases.h"
#include "check/conformance.h"
#include "check/reference_shelf.h"
#include "machine/roofline.h"
#include "sandbox.h"

/* ---- The job ---- */

static const char *const stage_names[] = {"floors", "correctness", "performance", "profile"};

json_t *judge_job_json(const judge_job *job)
{
    json_t *problems = json_array();
    for (size_t i = 0; i < job->problem_count; ++i) {
        const judge_problem *p = &job->problems[i];
        json_array_append_new(problems, json_pack("{s:s, s:f, s:f}", "text", p->text, "floor_us", p->floor_us,
                                                  "memory_us", p->memory_us));
    }
    /* Seeds are 64 bits, JSON's integers are signed: the same bits. */
    return json_pack("{s:s, s:s, s:i, s:i, s:s, s:s, s:o, s:I, s:I, s:i, s:i, s:i, s:f, s:f, s:i, s:b, s:b}", "stage",
                     stage_names[job->stage], "backend", job->backend, "device", (int)job->device, "threads",
                     (int)job->threads, "candidate", job->candidate ? job->candidate : "", "incumbent",
                     job->incumbent ? job->incumbent : "", "problems", problems, "visible_seed",
                     (json_int_t)job->visible_seed, "hidden_seed", (json_int_t)job->hidden_seed, "visible_cases",
                     job->visible_cases, "hidden_cases", job->hidden_cases, "blocks", job->blocks, "case_timeout_s",
                     job->case_timeout_s, "budget_s", job->budget_s, "references", job->references, "swapped",
                     (int)job->swapped, "model_clock", (int)job->model_clock);
}

static acr_status read_problems(judge_job *job, const json_t *problems)
{
    job->problem_count = json_array_size(problems);
    job->problems = calloc(job->problem_count + 1, sizeof *job->problems);
    if (!job->problems) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %zu problems", job->problem_count);
    }
    for (size_t i = 0; i < job->problem_count; ++i) {
        const char *text;
        judge_problem *p = &job->problems[i];
        if (json_unpack(json_array_get(problems, i), "{s:s, s:F, s:F}", "text", &text, "floor_us", &p->floor_us,
                        "memory_us", &p->memory_us) != 0) {
            return acr__fail(ACR_FORMAT, "problem %zu of the job is none", i);
        }
        snprintf(p->text, sizeof p->text, "%s", text);
        acr_status status = acr_problem_parse(&p->problem, text, NULL);
        if (status == ACR_OK) {
            status = acr_problem_canonical(&p->problem, &p->problem);
        }
        if (status != ACR_OK) {
            return status;
        }
    }
    return ACR_OK;
}

static acr_status read_job(judge_job *job, const json_t *object)
{
    const char *stage;
    json_t *problems;
    int device, threads, swapped, model_clock;
    json_int_t visible_seed, hidden_seed;
    json_error_t error;
    if (json_unpack_ex((json_t *)(uintptr_t)object, &error, 0,
                       "{s:s, s:s, s:i, s:i, s:s, s:s, s:o, s:I, s:I, s:i, s:i, s:i, s:F, s:F, s:i, s:b, s:b}", "stage",
                       &stage, "backend", &job->backend, "device", &device, "threads", &threads, "candidate",
                       &job->candidate, "incumbent", &job->incumbent, "problems", &problems, "visible_seed",
                       &visible_seed, "hidden_seed", &hidden_seed, "visible_cases", &job->visible_cases, "hidden_cases",
                       &job->hidden_cases, "blocks", &job->blocks, "case_timeout_s", &job->case_timeout_s, "budget_s",
                       &job->budget_s, "references", &job->references, "swapped", &swapped, "model_clock",
                       &model_clock) != 0) {
        return acr__fail(ACR_FORMAT, "the job: %s", error.text);
    }
    job->device = device;
    job->threads = (uint32_t)threads;
    job->visible_seed = (uint64_t)visible_seed;
    job->hidden_seed = (uint64_t)hidden_seed;
    job->swapped = swapped != 0;
    job->model_clock = model_clock != 0;
    for (size_t i = 0; i < sizeof stage_names / sizeof stage_names[0]; ++i) {
        if (strcmp(stage, stage_names[i]) == 0) {
            job->stage = (judge_stage)i;
        }
    }
    return read_problems(job, problems);
}

/* ---- The verdict as it grows ---- */

typedef struct session {
    judge_job job;
    acr_ctx *ctx;
    acr__backend_device *device;
    loaded candidate, incumbent;
    shelf *references; /* made before; NULL = none */
    json_t *cases, *timings, *floors;
    trial_status status;
    trial_gate gate;
    char detail[1024];
} session;

/* Keeps the first. Returns ACR_UNSUPPORTED, which ends the stage. */
__attribute__((format(printf, 3, 4))) static acr_status end_trial(session *s, trial_status status, const char *format,
                                                                  ...)
{
    if (s->status == TRIAL_VALID) {
        s->status = status;
        va_list args;
        va_start(args, format);
        vsnprintf(s->detail, sizeof s->detail, format, args);
        va_end(args);
    }
    return ACR_UNSUPPORTED;
}

/* A status of the library as the trial's end: what the device reports is the candidate's doing. */
static acr_status end_with(session *s, acr_status status, const char *what)
{
    char why[512];
    snprintf(why, sizeof why, "%s", acr_last_error());
    const trial_status end = status == ACR_DEVICE_FAULT  ? TRIAL_CRASHED
                             : status == ACR_UNSUPPORTED ? TRIAL_UNSUPPORTED
                                                         : TRIAL_HARNESS_FAILED;
    return end_trial(s, end, "%s: %s", what, why);
}

/* ---- Floors ---- */

static acr_status find_floors(session *s)
{
    enum {
        TRIES = 3 /* of a peak that other work on the machine can only lower: the highest counts */
    };
    for (size_t i = 0; i < s->job.problem_count; ++i) {
        const acr_problem *p = &s->job.problems[i].problem;
        const demand d = demand_of(p, NULL);
        double least_us = INFINITY, memory_us = 0;
        for (int try = 0; try < TRIES; ++try) {
            machine m;
            floor_times f;
            if (s->device->device.backend == ACR__CUDA) {
                machine_of_gpu(&m, &s->device->device);
                try = TRIES;
            } else {
                machine_of_cpu(&m, &s->device->device, (uint32_t)s->device->device.threads, d.bytes);
            }
            floor_of(&f, &m, p, &d);
            least_us = fmin(least_us, 1e6 * f.warm_s);
            memory_us = fmax(memory_us, 1e6 * f.memory_cold_s);
        }
        json_array_append_new(s->floors, json_pack("[f, f]", least_us, memory_us));
    }
    return ACR_OK;
}

/* ---- Inputs ---- */

enum {
    STREAM_HIDDEN = 80, /* of random_bits */
    STREAM_KINDS,
    SETS = 3 /* of inputs, to alternate while timing */
};

/* What one of the task's problems is judged with. */
typedef enum task_inputs {
    TASK_VISIBLE,
    TASK_HIDDEN,
    TASK_SPECIAL,
    TASK_FIRST, /* and the second in its place */
    TASK_SECOND,
    TASK_TIMED, /* and SETS - 1 more */
    TASK_INPUTS = TASK_TIMED + SETS
} task_inputs;
_Static_assert((int)TASK_INPUTS == (int)JUDGE_REQUESTS, "judge_requests returns all of them");

static input_kind special_kind(const judge_job *job, size_t problem)
{
    const uint64_t bits = random_bits(job->hidden_seed, STREAM_KINDS, problem);
    const int kinds = input_kind_count(job->problems[problem].problem.dtype);
    return (input_kind)(1 + bits % (uint64_t)(kinds - 1));
}

static reference_request task_request(const judge_job *job, size_t problem, task_inputs which)
{
    const uint64_t seeds[TASK_INPUTS] = {[TASK_VISIBLE] = job->visible_seed + problem,
                                         [TASK_HIDDEN] = job->hidden_seed + problem,
                                         [TASK_SPECIAL] = job->hidden_seed + 50 + problem,
                                         [TASK_FIRST] = job->hidden_seed + 200 + 2 * problem,
                                         [TASK_SECOND] = job->hidden_seed + 201 + 2 * problem};
    const bool timed = which >= TASK_TIMED;
    const uint64_t timed_seed = job->hidden_seed + 300 + SETS * problem + (uint64_t)(which - TASK_TIMED);
    return (reference_request){.problem = &job->problems[problem].problem,
                               .inputs = which == TASK_SPECIAL ? special_kind(job, problem) : INPUT_NORMAL,
                               .seed = timed ? timed_seed : seeds[which],
                               .sampled_rows = REFERENCE_SAMPLED_ROWS,
                               .lengths = which >= TASK_FIRST ? LENGTHS_FULL : LENGTHS_EDGES,
                               .threads = job->threads ? job->threads : 1};
}

size_t judge_requests(reference_request *out, const judge_job *job)
{
    const int wanted = job->model_clock ? TASK_TIMED : TASK_INPUTS;
    size_t count = 0;
    for (int which = 0; which < wanted; ++which) {
        for (size_t i = 0; i < job->problem_count; ++i) {
            out[count++] = task_request(job, i, (task_inputs)which);
        }
    }
    return count;
}

/* One that was made before, else a new one. */
static acr_status find_reference(reference **out, const session *s, const reference_request *wanted)
{
    *out = NULL;
    acr_status status = s->references ? shelf_take(out, s->references, wanted) : ACR_OK;
    return status == ACR_OK && !*out ? reference_create(out, wanted) : status;
}

/* ---- Correctness ---- */

typedef struct planned_case {
    acr_problem problem;
    input_kind inputs;
    uint64_t seed;
    bool hidden;
} planned_case;

enum {
    PLANNED_MAX = 256
};

typedef struct case_plan {
    planned_case items[PLANNED_MAX];
    size_t count;
} case_plan;

static void plan_case(case_plan *plan, const acr_problem *problem, input_kind inputs, uint64_t seed, bool hidden)
{
    if (plan->count < PLANNED_MAX) {
        plan->items[plan->count++] = (planned_case){*problem, inputs, seed, hidden};
    }
}

/* Of the task's own problems. */
static void plan_task(case_plan *plan, const judge_job *job, size_t problem, task_inputs which)
{
    const reference_request wanted = task_request(job, problem, which);
    plan_case(plan, wanted.problem, wanted.inputs, wanted.seed, which != TASK_VISIBLE);
}

/* Multiply-adds of a case: searches make many trials, so they take the small cases. */
static bool is_small(const acr_problem *p, acr__backend_id backend)
{
    const double rows = (double)p->batch * (double)p->q_heads * (double)p->q_len;
    return rows * (double)p->kv_len * (double)(p->qk_dim + p->v_dim) <= (backend == ACR__CPU ? 2e7 : 2e8);
}

/* The task's own problems, visible; cases of the kernel's list, the first visible and others, which the hidden seed
 * chooses, hidden; the task's problems with other inputs and hidden seeds. */
static void plan_cases(case_plan *plan, const session *s)
{
    static case_list list; /* too large for the stack */
    const judge_job *job = &s->job;
    plan->count = 0;
    for (size_t i = 0; i < job->problem_count; ++i) {
        plan_task(plan, job, i, TASK_VISIBLE);
    }
    cases_make(&list, &s->candidate.kernel, &s->device->device, false);
    size_t small = 0;
    for (size_t i = 0; i < list.count; ++i) {
        if (is_small(&list.items[i].problem, s->device->device.backend)) {
            list.items[small++] = list.items[i];
        }
    }
    const size_t visible = (size_t)job->visible_cases < small ? (size_t)job->visible_cases : small;
    for (size_t i = 0; i < visible; ++i) {
        plan_case(plan, &list.items[i].problem, list.items[i].inputs, job->visible_seed + 100 + i, false);
    }
    for (size_t i = 0, left = small - visible; i < (size_t)job->hidden_cases && left > 0; ++i, --left) {
        test_case *chosen = &list.items[visible + i + random_bits(job->hidden_seed, STREAM_HIDDEN, i) % left];
        plan_case(plan, &chosen->problem, chosen->inputs, job->hidden_seed + 100 + i, true);
        *chosen = list.items[visible + i];
    }
    for (size_t i = 0; i < job->problem_count; ++i) {
        plan_task(plan, job, i, TASK_HIDDEN);
        plan_task(plan, job, i, TASK_SPECIAL);
    }
}

static void record_case(session *s, const planned_case *c, const verdict *v)
{
    char text[ACR_PROBLEM_TEXT_MAX] = "";
    acr_problem_format(&c->problem, text, sizeof text);
    json_t *record = json_pack("{s:s, s:s, s:I, s:b, s:b}", "problem", text, "inputs", input_kind_name(c->inputs),
                               "seed", (json_int_t)c->seed, "hidden", (int)c->hidden, "pass", (int)v->pass);
    const struct {
        const char *key;
        double value;
    } numbers[] = {{"err_max", v->err_max}, {"err_rms", v->err_rms}, {"err_lse", v->err_lse},
                   {"tol_max", v->tol_max}, {"tol_rms", v->tol_rms}, {"tol_lse", v->tol_lse}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; ++i) {
        json_object_set_new(record, numbers[i].key, json_number_or_null(numbers[i].value));
    }
    json_array_append_new(s->cases, record);
}

/* What the sandbox says outweighs what became of the output. */
static acr_status check_sandbox(session *s, const char *where)
{
    static const trial_status ends[] = {[SANDBOX_FINE] = TRIAL_VALID,
                                        [SANDBOX_CRASHED] = TRIAL_CRASHED,
                                        [SANDBOX_HUNG] = TRIAL_HUNG,
                                        [SANDBOX_FORBIDDEN] = TRIAL_FORBIDDEN,
                                        [SANDBOX_BROKEN] = TRIAL_HARNESS_FAILED};
    char text[160];
    const sandbox_fault fault = sandbox_look(text);
    return fault == SANDBOX_FINE ? ACR_OK : end_trial(s, ends[fault], "%s: %s", where, text);
}

/* The parent reads where a child died from the last such line. What hangs on a GPU ends by the alarm; on a CPU the
 * sandbox has a clock of its own. */
static void announce(const session *s, const char *what, const acr_problem *problem)
{
    char text[ACR_PROBLEM_TEXT_MAX] = "";
    acr_problem_format(problem, text, sizeof text);
    fprintf(stderr, "at: %s %s\n", what, text);
    fflush(stderr);
    if (s->device->device.backend == ACR__CUDA) {
        alarm((unsigned)ceil(s->job.case_timeout_s));
    }
}

static acr_status check_case(session *s, const planned_case *c)
{
    reference *ref = NULL;
    verdict v;
    const acr__kernel *kernel = &s->candidate.kernel;
    const reference_request wanted = {.problem = &c->problem,
                                      .inputs = c->inputs,
                                      .seed = c->seed,
                                      .sampled_rows = REFERENCE_SAMPLED_ROWS,
                                      .lengths = LENGTHS_EDGES,
                                      .threads = s->job.threads ? s->job.threads : 1};
    announce(s, "case", &c->problem);
    if (find_reference(&ref, s, &wanted) != ACR_OK) {
        return end_with(s, ACR_NO_MEMORY, "reference");
    }
    sandbox_set_workspace(kernel->workspace ? kernel->workspace(&c->problem, &s->device->device) : 0);
    acr_status status = conformance_check(&v, s->ctx, kernel, &c->problem, ref);
    reference_destroy(ref);
    char text[ACR_PROBLEM_TEXT_MAX] = "";
    acr_problem_format(&c->problem, text, sizeof text);
    record_case(s, c, &v);
    if (status != ACR_OK) {
        return end_trial(s, status == ACR_DEVICE_FAULT ? TRIAL_CRASHED : TRIAL_HARNESS_FAILED, "%s: %s", text,
                         v.failure);
    }
    status = check_sandbox(s, text);
    return status == ACR_OK && !v.pass
               ? end_trial(s, TRIAL_WRONG, "%s with %s inputs: %s", text, input_kind_name(c->inputs), v.failure)
               : status;
}

/* The same buffers with other inputs, outputs and workspace as the last run left them: what is not computed anew is
 * stale. */
static acr_status run_replaced(session *s, execution *e, const reference *second, verdict *v)
{
    run_output output;
    acr_status status = execution_run(e);
    if (status == ACR_OK) {
        status = execution_replace_inputs(e, second);
    }
    if (status == ACR_OK) {
        status = execution_rerun(e);
    }
    if (status == ACR_OK) {
        status = execution_collect(e, &output);
    }
    if (status != ACR_OK) {
        return end_with(s, status, "second inputs");
    }
    conformance_judge(v, second, &output);
    run_output_free(&output);
    return ACR_OK;
}

static acr_status check_replaced(session *s, size_t problem_index)
{
    const acr_problem *problem = &s->job.problems[problem_index].problem;
    const reference_request first_wanted = task_request(&s->job, problem_index, TASK_FIRST),
                            second_wanted = task_request(&s->job, problem_index, TASK_SECOND);
    reference *first = NULL, *second = NULL;
    execution *e = NULL;
    verdict v = {.pass = true};
    const acr__kernel *kernel = &s->candidate.kernel;
    announce(s, "inputs replaced", problem);
    acr_status status = find_reference(&first, s, &first_wanted);
    if (status == ACR_OK) {
        status = find_reference(&second, s, &second_wanted);
    }
    sandbox_set_workspace(kernel->workspace ? kernel->workspace(problem, &s->device->device) : 0);
    if (status == ACR_OK) {
        status = execution_create(&e, s->ctx, kernel, problem, first, false, 0, 0);
    }
    status = status == ACR_OK ? run_replaced(s, e, second, &v) : end_with(s, status, "second inputs");
    execution_destroy(e);
    if (status == ACR_OK) {
        status = check_sandbox(s, "second inputs");
    }
    if (status == ACR_OK && !v.pass) {
        char text[ACR_PROBLEM_TEXT_MAX] = "";
        acr_problem_format(problem, text, sizeof text);
        status = end_trial(s, TRIAL_WRONG, "%s, inputs replaced in place, outputs left: %s", text, v.failure);
    }
    reference_destroy(first);
    reference_destroy(second);
    return status;
}

static acr_status check_admits(session *s)
{
    for (size_t i = 0; i < s->job.problem_count; ++i) {
        const judge_problem *p = &s->job.problems[i];
        const char *reason = acr__why_not(&s->candidate.kernel, &p->problem, &s->device->device);
        if (reason) {
            return end_trial(s, TRIAL_UNSUPPORTED, "%s: %s", p->text, reason);
        }
    }
    return ACR_OK;
}

static acr_status judge_correctness(session *s)
{
    static case_plan plan;
    acr_status status = check_admits(s);
    if (status != ACR_OK) {
        return status;
    }
    plan_cases(&plan, s);
    for (size_t i = 0; i < plan.count && status == ACR_OK; ++i) {
        status = check_case(s, &plan.items[i]);
    }
    for (size_t i = 0; i < s->job.problem_count && status == ACR_OK; ++i) {
        status = check_replaced(s, i);
    }
    return status;
}

/* ---- Timing ---- */

/* One kernel on one problem, ready to be timed: on the same inputs over and over, which is stream mode, and on
 * alternating ones with the same output and workspace. */
typedef struct fighter {
    execution *sets[SETS]; /* the first has the outputs and the workspace */
    size_t turn;
    acr__graph *repeated, *alternating;
} fighter;

typedef struct duel {
    const judge_problem *problem;
    reference *refs[SETS];
    fighter candidate, incumbent;
} duel;

static acr_status sample_graph(void *arg, int count, double *seconds)
{
    acr__graph *graph = arg;
    return graph->device->backend->graph_time(graph, count, seconds);
}

static acr_status enqueue_alternating(void *arg, void *stream)
{
    fighter *f = arg;
    f->turn = (f->turn + 1) % SETS;
    return execution_enqueue_with(f->sets[0], f->sets[f->turn], stream);
}

static acr_status make_fighter(fighter *f, session *s, const acr__kernel *kernel, const duel *d)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < SETS && status == ACR_OK; ++i) {
        status = execution_create(&f->sets[i], s->ctx, kernel, &d->problem->problem, d->refs[i], false, 0,
                                  ALLOCATOR_ALIGNMENT);
    }
    return status;
}

static acr_status make_duel(session *s, duel *d, size_t problem)
{
    d->problem = &s->job.problems[problem];
    announce(s, "timing", &d->problem->problem);
    acr_status status = ACR_OK;
    for (int i = 0; i < SETS && status == ACR_OK; ++i) {
        const reference_request wanted = task_request(&s->job, problem, (task_inputs)(TASK_TIMED + i));
        status = find_reference(&d->refs[i], s, &wanted);
    }
    if (status == ACR_OK) {
        status = make_fighter(&d->candidate, s, &s->candidate.kernel, d);
    }
    if (status == ACR_OK) {
        status = make_fighter(&d->incumbent, s, &s->incumbent.kernel, d);
    }
    return status == ACR_OK ? ACR_OK : end_with(s, status, "timing");
}

/* What is recorded. */
typedef struct work {
    acr__backend_device *device;
    acr__enqueue *enqueue;
    void *arg;
} work;

static acr_status record_work(acr__graph **out, void *arg, int launches)
{
    const work *w = arg;
    return w->device->backend->graph_record(out, w->device, w->enqueue, w->arg, launches);
}

static acr_status record_fighter(fighter *f, session *s)
{
    work repeated = {s->device, execution_enqueue, f->sets[0]}, alternating = {s->device, enqueue_alternating, f};
    double ignored;
    acr_status status = execution_run(f->sets[0]);
    if (status == ACR_OK) {
        status = timer_fill(&f->repeated, &ignored, record_work, &repeated, TIMER_STRETCH_S, 1);
    }
    return status == ACR_OK ? timer_fill(&f->alternating, &ignored, record_work, &alternating, TIMER_STRETCH_S, 1)
                            : status;
}

/* ---- Plausibility ---- */

typedef struct paces {
    double repeated_us, alternating_us;
} paces;

static acr_status measure_paces(paces *out, const fighter *f)
{
    enum {
        TURNS = 4,
        SLOT = 4,
        SAMPLES = TURNS * SLOT
    };
    double repeated[SAMPLES], alternating[SAMPLES];
    for (int i = 0; i < TURNS; ++i) {
        acr_status status = sample_graph(f->repeated, SLOT, &repeated[i * SLOT]);
        if (status == ACR_OK) {
            status = sample_graph(f->alternating, SLOT, &alternating[i * SLOT]);
        }
        if (status != ACR_OK) {
            return status;
        }
    }
    out->repeated_us = 1e6 * stats_percentile(repeated, SAMPLES, 0.5);
    out->alternating_us = 1e6 * stats_percentile(alternating, SAMPLES, 0.5);
    return ACR_OK;
}

/* Whether the candidate gains more than the incumbent when inputs repeat: it remembers results. Caches make a
 * difference too, to both. Noise must not look like it, so it must show three times. */
static acr_status check_memory(session *s, const duel *d)
{
    enum {
        LOOKS = 3
    };
    static const double GAIN = 1.4;
    paces ours = {0, 0}, theirs;
    for (int i = 0; i < LOOKS; ++i) {
        acr_status status = measure_paces(&ours, &d->candidate);
        if (status == ACR_OK) {
            status = measure_paces(&theirs, &d->incumbent);
        }
        if (status != ACR_OK) {
            return end_with(s, status, d->problem->text);
        }
        const double usual = fmax(1.0, theirs.alternating_us / theirs.repeated_us);
        const double from_memory_us = 2.0 * d->problem->memory_us; /* what does not fit the caches several times over */
        if (ours.alternating_us <= fmax(GAIN * usual * ours.repeated_us, from_memory_us)) {
            return ACR_OK;
        }
    }
    return end_trial(s, TRIAL_IMPLAUSIBLE, "%s: %.3f us when inputs repeat, %.3f us when they alternate",
                     d->problem->text, ours.repeated_us, ours.alternating_us);
}

static acr_status check_floor(session *s, const duel *d)
{
    static const double UNDER = 0.9;
    paces p;
    acr_status status = measure_paces(&p, &d->candidate);
    if (status != ACR_OK) {
        return end_with(s, status, d->problem->text);
    }
    if (!(p.repeated_us >= UNDER * d->problem->floor_us)) {
        return end_trial(s, TRIAL_IMPLAUSIBLE, "%s: %.3f us, the floor is %.3f us", d->problem->text, p.repeated_us,
                         d->problem->floor_us);
    }
    return ACR_OK;
}

static acr_status check_plausible(session *s, duel *d)
{
    acr_status status = record_fighter(&d->candidate, s);
    if (status == ACR_OK) {
        status = record_fighter(&d->incumbent, s);
    }
    if (status != ACR_OK) {
        return end_with(s, status, d->problem->text);
    }
    status = check_floor(s, d);
    return status == ACR_OK ? check_memory(s, d) : status;
}

/* ---- Performance ---- */

static json_t *series_json(const double *values, size_t count)
{
    json_t *array = json_array();
    for (size_t i = 0; i < count; ++i) {
        json_array_append_new(array, json_real(values[i]));
    }
    return array;
}

static void record_timing(session *s, const judge_problem *problem, const interleave_result *r)
{
    const size_t samples = (size_t)r->blocks * INTERLEAVE_BLOCK_SAMPLES;
    const double *ours = s->job.swapped ? r->baseline_us : r->candidate_us;
    const double *theirs = s->job.swapped ? r->candidate_us : r->baseline_us;
    json_array_append_new(s->timings,
                          json_pack("{s:s, s:o, s:o}", "problem", problem->text, "incumbent_us",
                                    series_json(theirs, samples), "candidate_us", series_json(ours, samples)));
}

/* What the timed launches wrote is right too, on the inputs that they had last. */
static acr_status judge_timed(session *s, const duel *d)
{
    run_output output;
    verdict v;
    acr_status status = execution_collect(d->candidate.sets[0], &output);
    if (status != ACR_OK) {
        return end_with(s, status, d->problem->text);
    }
    conformance_judge(&v, d->refs[0], &output);
    run_output_free(&output);
    return v.pass ? ACR_OK : end_trial(s, TRIAL_WRONG, "%s: while timed: %s", d->problem->text, v.failure);
}

static acr_status fight(session *s, const duel *d, uint64_t seed)
{
    const interleave_subject theirs = {sample_graph, d->incumbent.repeated},
                             ours = {sample_graph, d->candidate.repeated};
    const interleave_design design = {
        .blocks = s->job.blocks, .warm_up_s = 20e-3, .budget_s = s->job.budget_s, .seed = seed};
    interleave_result r;
    acr_status status = interleave_run(&r, s->job.swapped ? &ours : &theirs, s->job.swapped ? &theirs : &ours, &design);
    if (status != ACR_OK) {
        return end_with(s, status, d->problem->text);
    }
    record_timing(s, d->problem, &r);
    interleave_free(&r);
    return judge_timed(s, d);
}

static void free_fighter(fighter *f, acr__backend_device *device)
{
    device->backend->graph_free(f->repeated);
    device->backend->graph_free(f->alternating);
    for (int i = 0; i < SETS; ++i) {
        execution_destroy(f->sets[i]);
    }
}

static void free_duel(duel *d, acr__backend_device *device)
{
    free_fighter(&d->candidate, device);
    free_fighter(&d->incumbent, device);
    for (int i = 0; i < SETS; ++i) {
        reference_destroy(d->refs[i]);
    }
}

static acr_status time_duels(session *s, duel *duels)
{
    acr_status status = ACR_OK;
    for (size_t i = 0; i < s->job.problem_count && status == ACR_OK; ++i) {
        status = make_duel(s, &duels[i], i);
    }
    if (status == ACR_OK && s->device->device.backend == ACR__CPU) {
        status = sandbox_seal(); /* from here on a foreign kernel runs in this process */
        status = status == ACR_OK ? ACR_OK : end_with(s, ACR_NO_DEVICE, "timing");
    }
    for (size_t i = 0; i < s->job.problem_count && status == ACR_OK; ++i) {
        s->gate = GATE_PLAUSIBILITY;
        announce(s, "timing", &duels[i].problem->problem);
        status = check_plausible(s, &duels[i]);
        if (status == ACR_OK) {
            s->gate = GATE_PERFORMANCE;
            status = fight(s, &duels[i], s->job.hidden_seed + i);
        }
    }
    return status;
}

/* ---- The model clock ---- */

/* Samples of the machine that does not exist: the cost, within 1 %. */
static void model_series(double *out, size_t count, const session *s, const loaded *l, const acr_problem *problem)
{
    enum {
        STREAM_MODEL = 96
    };
    acr__device device = s->device->device;
    device.clock_hz = 3e9;
    device.threads = 2;
    device.l2_bytes = (int64_t)32 << 20;
    const double us = 1e6 * l->kernel.cost(problem, &device);
    uint64_t identity = 0;
    for (const char *at = l->identity; *at; ++at) {
        identity = identity * 31 + (unsigned char)*at;
    }
    for (size_t i = 0; i < count; ++i) {
        const uint64_t bits = random_bits(identity ^ s->job.hidden_seed, STREAM_MODEL, i);
        out[i] = us * (1.0 + 0.01 * ((double)(bits >> 11) * 0x1p-53 - 0.5));
    }
}

static acr_status time_by_model(session *s)
{
    s->gate = GATE_PERFORMANCE;
    const size_t samples = (size_t)s->job.blocks * INTERLEAVE_BLOCK_SAMPLES;
    double *series = calloc(2 * samples, sizeof *series);
    if (!series) {
        return end_trial(s, TRIAL_HARNESS_FAILED, "no memory for %zu samples", samples);
    }
    for (size_t i = 0; i < s->job.problem_count; ++i) {
        const judge_problem *p = &s->job.problems[i];
        model_series(series, samples, s, &s->incumbent, &p->problem);
        model_series(series + samples, samples, s, &s->candidate, &p->problem);
        json_array_append_new(s->timings, json_pack("{s:s, s:o, s:o}", "problem", p->text, "incumbent_us",
                                                    series_json(series, samples), "candidate_us",
                                                    series_json(series + samples, samples)));
    }
    free(series);
    return ACR_OK;
}

static acr_status judge_performance(session *s)
{
    acr_status status = check_admits(s);
    if (status != ACR_OK || s->job.model_clock) {
        return status == ACR_OK ? time_by_model(s) : status;
    }
    duel *duels = calloc(s->job.problem_count + 1, sizeof *duels);
    if (!duels) {
        return end_trial(s, TRIAL_HARNESS_FAILED, "no memory for %zu problems", s->job.problem_count);
    }
    status = time_duels(s, duels);
    for (size_t i = 0; i < s->job.problem_count; ++i) {
        free_duel(&duels[i], s->device);
    }
    free(duels);
    return status;
}

/* ---- Profile ---- */

/* The launches of one problem; a profiler takes the last. */
static acr_status launch_often(session *s, size_t problem_index)
{
    const acr_problem *problem = &s->job.problems[problem_index].problem;
    const reference_request wanted = task_request(&s->job, problem_index, TASK_TIMED);
    reference *ref = NULL;
    execution *e = NULL;
    announce(s, "profile", problem);
    acr_status status = find_reference(&ref, s, &wanted);
    if (status == ACR_OK) {
        status = execution_create(&e, s->ctx, &s->candidate.kernel, problem, ref, false, 0, ALLOCATOR_ALIGNMENT);
    }
    for (int i = 0; i < GATES_PROFILE_LAUNCHES && status == ACR_OK; ++i) {
        status = execution_rerun(e);
    }
    execution_destroy(e);
    reference_destroy(ref);
    return status;
}

static acr_status launch_for_profile(session *s)
{
    acr_status status = check_admits(s);
    for (size_t i = 0; i < s->job.problem_count && status == ACR_OK; ++i) {
        status = launch_often(s, i);
        status = status == ACR_OK ? ACR_OK : end_with(s, status, s->job.problems[i].text);
    }
    return status;
}

/* ---- The process ---- */

static acr_status open_context(session *s)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = s->job.backend;
    options.device = s->job.device;
    const bool cpu = strcmp(s->job.backend, "cpu") == 0;
    options.threads = !cpu ? 0 : s->job.stage == STAGE_CORRECTNESS ? 1 : s->job.threads;
    acr_status status = acr_ctx_create(&s->ctx, &options);
    if (status != ACR_OK) {
        return end_trial(s, TRIAL_HARNESS_FAILED, "%s", acr_last_error());
    }
    s->device = acr__ctx_backend_device(s->ctx);
    return ACR_OK;
}

/* References that the parent has made are for the children of a GPU alone: a foreign CPU kernel would share this
 * process's memory with them. */
static acr_status open_references(session *s)
{
    if (s->job.references <= 0) {
        return ACR_OK;
    }
    acr_status status = s->device->device.backend == ACR__CPU
                            ? acr__fail(ACR_INVALID, "references of the parent for a CPU kernel")
                            : shelf_open(&s->references, s->job.references);
    return status == ACR_OK ? ACR_OK : end_trial(s, TRIAL_HARNESS_FAILED, "%s", acr_last_error());
}

/* A source that lies about its ISA, or an image that no driver takes, is the candidate's failure. */
static acr_status load_subjects(session *s)
{
    acr_status status = build_load(&s->candidate, LOADED_CANDIDATE, s->job.candidate, &s->device->device);
    if (status != ACR_OK) {
        return end_trial(s, status == ACR_IO ? TRIAL_HARNESS_FAILED : TRIAL_UNSUPPORTED, "%s", acr_last_error());
    }
    if (s->job.stage == STAGE_PERFORMANCE) {
        status = build_load(&s->incumbent, LOADED_INCUMBENT, s->job.incumbent, &s->device->device);
        return status == ACR_OK ? ACR_OK : end_trial(s, TRIAL_HARNESS_FAILED, "the incumbent: %s", acr_last_error());
    }
    if (s->candidate.kernel.backend == ACR__CPU && s->job.stage == STAGE_CORRECTNESS) {
        status = sandbox_begin(s->candidate.kernel.run, s->candidate.kernel.dtype, s->job.case_timeout_s);
        s->candidate.kernel.run = sandbox_run;
    }
    return status == ACR_OK ? ACR_OK : end_trial(s, TRIAL_HARNESS_FAILED, "%s", acr_last_error());
}

static void do_stage(session *s)
{
    static const trial_gate first_gates[] = {GATE_PERFORMANCE, GATE_CORRECTNESS, GATE_PLAUSIBILITY, GATE_PROFILE};
    static acr_status (*const stages[])(session *) = {find_floors, judge_correctness, judge_performance,
                                                      launch_for_profile};
    s->gate = first_gates[s->job.stage];
    acr_status status = open_context(s);
    if (status == ACR_OK) {
        status = open_references(s);
    }
    if (status == ACR_OK && s->job.stage != STAGE_FLOORS) {
        status = load_subjects(s);
    }
    if (status == ACR_OK) {
        stages[s->job.stage](s);
    }
    char ignored[160];
    sandbox_end(ignored);
}

/* A sealed process opens no files: the result's is open from the start. */
static bool write_result(const session *s, int file)
{
    json_t *result = json_pack("{s:s, s:s, s:s, s:O, s:O, s:O}", "status", trial_status_name(s->status), "gate",
                               trial_gate_name(s->gate), "detail", s->detail, "cases", s->cases, "timings", s->timings,
                               "floors_us", s->floors);
    if (!result) { /* a detail that is no UTF-8 */
        result = json_pack("{s:s, s:s, s:s, s:O, s:O, s:O}", "status", trial_status_name(s->status), "gate",
                           trial_gate_name(s->gate), "detail", "(not text)", "cases", s->cases, "timings", s->timings,
                           "floors_us", s->floors);
    }
    const bool written = result && json_dumpfd(result, file, JSON_COMPACT) == 0;
    json_decref(result);
    return written;
}

int judge_run(const char *job_path, const char *result_path)
{
    static session s;
    json_error_t error;
    json_t *object = json_load_file(job_path, 0, &error);
    const int file = open(result_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (!object || file < 0 || read_job(&s.job, object) != ACR_OK) {
        fprintf(stderr, "%s: not a job, or %s cannot be written: %s\n", job_path, result_path,
                !object    ? error.text
                : file < 0 ? strerror(errno)
                           : acr_last_error());
        return EXIT_BAD_INPUT;
    }
    s.status = TRIAL_VALID;
    s.cases = json_array();
    s.timings = json_array();
    s.floors = json_array();
    do_stage(&s);
    const bool written = write_result(&s, file);
    _exit(written ? EXIT_DONE : EXIT_FAULT); /* nothing more runs: a foreign kernel was in this process */
}
