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

#include "base/exit_code.h"
#include "base/json.h"
#include "base/progress.h"
#include "bench/interleave.h"
#include "bench/timer.h"
#include "build.h"
#include "check/cases.h"
#include "check/conformance.h"
#include "check/reference_cache.h"
#include "kernels/kernel_choice.h"
#include "machine/device_lock.h"
#include "machine/roofline.h"
#include "sandbox.h"

/* ---- The job ---- */

static const char *const stage_names[] = {"floors", "correctness", "performance", "profile", "probe", "judgement"};

json_t *judge_job_json(const judge_job *job)
{
    json_t *problems = json_array();
    for (size_t i = 0; i < job->problem_count; ++i) {
        const judge_problem *p = &job->problems[i];
        json_array_append_new(problems, json_pack("{s:s, s:f, s:f}", "text", p->text, "floor_us", p->floor_us,
                                                  "memory_us", p->memory_us));
    }
    /* Seeds are 64 bits, JSON's integers are signed: the same bits. */
    return json_pack("{s:s, s:s, s:i, s:i, s:s, s:s, s:o, s:I, s:I, s:i, s:i, s:i, s:f, s:f, s:f, s:i, s:b, s:b, s:b,"
                     "s:b, s:b}",
                     "stage", stage_names[job->stage], "backend", job->backend, "device", (int)job->device, "threads",
                     (int)job->threads, "candidate", job->candidate ? job->candidate : "", "incumbent",
                     job->incumbent ? job->incumbent : "", "problems", problems, "visible_seed",
                     (json_int_t)job->visible_seed, "hidden_seed", (json_int_t)job->hidden_seed, "visible_cases",
                     job->visible_cases, "hidden_cases", job->hidden_cases, "blocks", job->blocks, "case_timeout_s",
                     job->case_timeout_s, "timing_timeout_s", job->timing_timeout_s, "budget_s", job->budget_s,
                     "references", job->references, "swapped", (int)job->swapped, "model_clock", (int)job->model_clock,
                     "race", (int)job->race, "locks", (int)job->locks, "thorough", (int)job->thorough);
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
    int device, threads, swapped, model_clock, race, locks, thorough;
    json_int_t visible_seed, hidden_seed;
    json_error_t error;
    if (json_unpack_ex((json_t *)(uintptr_t)object, &error, 0,
                       "{s:s, s:s, s:i, s:i, s:s, s:s, s:o, s:I, s:I, s:i, s:i, s:i, s:F, s:F, s:F, s:i, s:b, s:b, s:b,"
                       "s:b, s:b}",
                       "stage", &stage, "backend", &job->backend, "device", &device, "threads", &threads, "candidate",
                       &job->candidate, "incumbent", &job->incumbent, "problems", &problems, "visible_seed",
                       &visible_seed, "hidden_seed", &hidden_seed, "visible_cases", &job->visible_cases, "hidden_cases",
                       &job->hidden_cases, "blocks", &job->blocks, "case_timeout_s", &job->case_timeout_s,
                       "timing_timeout_s", &job->timing_timeout_s, "budget_s", &job->budget_s, "references",
                       &job->references, "swapped", &swapped, "model_clock", &model_clock, "race", &race, "locks",
                       &locks, "thorough", &thorough) != 0) {
        return acr__fail(ACR_FORMAT, "the job: %s", error.text);
    }
    job->device = device;
    job->threads = (uint32_t)threads;
    job->visible_seed = (uint64_t)visible_seed;
    job->hidden_seed = (uint64_t)hidden_seed;
    job->swapped = swapped != 0;
    job->model_clock = model_clock != 0;
    job->race = race != 0;
    job->locks = locks != 0;
    job->thorough = thorough != 0;
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
    reference_cache *references; /* made before; NULL = none */
    json_t *cases, *timings, *floors;
    trial_status status;
    trial_gate gate;
    bool slower_so_far;              /* the candidate, on every problem that was timed */
    int lock;                        /* of the device; -1 = the job asks for none */
    double started_s, correctness_s; /* STAGE_JUDGEMENT: how long the process took as far as that, without waiting */
    double waited_s;                 /* for the device */
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
        const problem_work d = work_of(p, NULL);
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
    STREAM_CHOSEN,
    STREAM_ORACLE,
    STREAM_POOL, /* and the next three */
    STREAM_PLACES = STREAM_POOL + INPUT_D_O + 1,
    STREAM_LOOKED /* and the next */
};

/* What one of the task's problems is judged with. */
typedef enum task_inputs {
    TASK_VISIBLE,
    TASK_HIDDEN,
    TASK_SPECIAL,                                    /* each kind of inputs but the normal one, in order */
    TASK_FIRST = TASK_SPECIAL + INPUT_SHIFTED_V - 1, /* and the second in its place */
    TASK_SECOND,
    TASK_TIMED,
    TASK_INPUTS
} task_inputs;
_Static_assert((int)TASK_INPUTS == (int)JUDGE_REQUESTS, "judge_requests returns all of them");

/* Whether inputs of the problem's type can be like that. */
static bool has_task_inputs(const judge_job *job, size_t problem, task_inputs which)
{
    const int kinds = input_kind_count(acr__kv_dtype(&job->problems[problem].problem));
    return which < TASK_SPECIAL || which >= TASK_FIRST || 1 + (int)which - (int)TASK_SPECIAL < kinds;
}

static reference_request task_request(const judge_job *job, size_t problem, task_inputs which)
{
    static const uint64_t streams[TASK_INPUTS] = {
        [TASK_HIDDEN] = 0, [TASK_FIRST] = 200, [TASK_SECOND] = 300, [TASK_TIMED] = 400};
    const bool special = which >= TASK_SPECIAL && which < TASK_FIRST;
    const uint64_t stream = special ? 1000u * (uint64_t)(1 + which - TASK_SPECIAL) : streams[which];
    return (reference_request){.problem = &job->problems[problem].problem,
                               .inputs = special ? (input_kind)(1 + which - TASK_SPECIAL) : INPUT_NORMAL,
                               .seed = which == TASK_VISIBLE ? job->visible_seed + problem
                                                             : job->hidden_seed + stream + problem,
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
            if (has_task_inputs(job, i, (task_inputs)which)) {
                out[count++] = task_request(job, i, (task_inputs)which);
            }
        }
    }
    return count;
}

/* One that was made before, else a new one. */
static acr_status find_reference(reference **out, const session *s, const reference_request *wanted)
{
    *out = NULL;
    acr_status status = s->references ? reference_cache_take(out, s->references, wanted) : ACR_OK;
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

/* Whether keys and values are plain tensors of q's type, as those of every problem that is searched for. */
static bool is_plain(const acr_problem *p)
{
    return !(p->flags & (ACR_PAGED | ACR_V_IN_K | ACR_INVARIANT)) && p->kv_dtype == ACR_DTYPE_DEFAULT;
}

/* The task's own problems, visible; cases of the kernel's list, the first visible and others, which the hidden seed
 * chooses, hidden; the task's problems with every kind of inputs and hidden seeds: what a kernel assumes of its inputs
 * shows with one of them, and which one nobody has to guess. */
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
        if (is_plain(&list.items[i].problem) && is_small(&list.items[i].problem, s->device->device.backend)) {
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
        for (int which = TASK_HIDDEN; which < TASK_FIRST; ++which) {
            if (has_task_inputs(job, i, (task_inputs)which)) {
                plan_task(plan, job, i, (task_inputs)which);
            }
        }
    }
}

static void record_case(session *s, const planned_case *c, const verdict *v)
{
    char text[ACR_PROBLEM_TEXT_MAX] = "";
    acr_problem_format(&c->problem, text, sizeof text);
    json_t *record = json_pack("{s:s, s:s, s:I, s:b, s:b}", "problem", text, "inputs", input_kind_name(c->inputs),
                               "seed", (json_int_t)c->seed, "hidden", (int)c->hidden, "pass", (int)v->pass);
    verdict_add_json(record, v);
    json_array_append_new(s->cases, record);
}

/* What the sandboxes say outweighs what became of the output. */
static acr_status check_sandboxes(session *s, const char *where)
{
    static const trial_status ends[] = {[SANDBOX_FINE] = TRIAL_VALID,
                                        [SANDBOX_CRASHED] = TRIAL_CRASHED,
                                        [SANDBOX_HUNG] = TRIAL_HUNG,
                                        [SANDBOX_FORBIDDEN] = TRIAL_FORBIDDEN,
                                        [SANDBOX_BROKEN] = TRIAL_HARNESS_FAILED};
    char text[160];
    const sandbox_fault fault = sandbox_look(SANDBOX_CANDIDATE, text);
    if (fault != SANDBOX_FINE) {
        return end_trial(s, ends[fault], "%s: %s", where, text);
    }
    return sandbox_look(SANDBOX_INCUMBENT, text) == SANDBOX_FINE
               ? ACR_OK
               : end_trial(s, TRIAL_HARNESS_FAILED, "%s: the incumbent: %s", where, text);
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

static void set_workspace(const session *s, sandbox_slot slot, const acr__kernel *kernel, const acr_problem *problem)
{
    const acr__device *device = &s->device->device;
    sandbox_set_workspace(slot, kernel->workspace ? kernel->workspace(problem, device) : 0,
                          kernel->shared ? kernel->shared(problem) : 0, device->threads);
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
    set_workspace(s, SANDBOX_CANDIDATE, kernel, &c->problem);
    acr_status status = conformance_check(&v, s->ctx, kernel, &c->problem, ref);
    reference_destroy(ref);
    char text[ACR_PROBLEM_TEXT_MAX] = "";
    acr_problem_format(&c->problem, text, sizeof text);
    record_case(s, c, &v);
    if (status != ACR_OK) {
        return end_trial(s, status == ACR_DEVICE_FAULT ? TRIAL_CRASHED : TRIAL_HARNESS_FAILED, "%s: %s", text,
                         v.failure);
    }
    status = check_sandboxes(s, text);
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
    set_workspace(s, SANDBOX_CANDIDATE, kernel, problem);
    if (status == ACR_OK) {
        status = execution_create(&e, s->ctx, kernel, problem, first, false, 0, 0);
    }
    status = status == ACR_OK ? run_replaced(s, e, second, &v) : end_with(s, status, "second inputs");
    execution_destroy(e);
    if (status == ACR_OK) {
        status = check_sandboxes(s, "second inputs");
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

/* Every timed launch has inputs that no launch before it has had, an output of NaN and a workspace as it is given for
 * the first time. So whatever a kernel remembers, it never meets again. Of each sample one launch, drawn by chance, is
 * compared with what the incumbent computes of the same inputs; and a few, drawn by chance among the samples that
 * count, have inputs whose result the oracle knows, and are judged as strictly as any case.
 *
 * A sample on a GPU is as many launches as take the incumbent TIMER_STRETCH_S, the same number of both kernels: what
 * events resolve is then nothing beside it. It is several replays, since the inputs of one have to lie in L2 together;
 * between them the device itself copies new inputs from a pool that it holds. */

enum {
    SETS_MAX = 32,     /* of buffers on a GPU, one for each launch of a replay */
    REPLAYS_MAX = 16,  /* of a sample on a GPU */
    LAUNCHES_MAX = 64, /* of a sample on a CPU */
    POOL_GRANULE = 16, /* bytes: a GPU copies from such addresses at full speed */
    POOL_WINDOW = 1 << 20,
    ORACLE_LAUNCHES = TASK_TIMED - TASK_FIRST + 1 /* of a measurement; each has a reference of its own */
};

typedef struct timed_pair timed_pair;

/* One kernel on one problem, ready to be timed. On a CPU a sample's launches have one set of buffers, and the sandbox's
 * clock; on a GPU each of a replay has its own, and the replay is timed by events. */
typedef struct timed_kernel {
    timed_pair *pair;
    sandbox_slot slot;
    execution *sets[SETS_MAX];
    int set_count;
    int launches;                 /* of a sample on a CPU, of a replay on a GPU */
    int turn;                     /* while recording */
    int chosen;                   /* the set of the replay to come that is looked at; -1 = none */
    uint64_t drawn;               /* inputs so far */
    run_output forward[SETS_MAX]; /* of a backward problem: the o and lse that are in a set */
    acr__graph *repeated, *fresh;
} timed_kernel;

struct timed_pair {
    session *s;
    const judge_problem *problem;
    reference *ref, *oracles[ORACLE_LAUNCHES];
    int64_t oracle_at[ORACLE_LAUNCHES]; /* the candidate's samples in which they are met */
    int64_t samples;                    /* of the candidate, so far */
    int sets, replays;                  /* of a sample on a GPU, of both kernels; 0 = not known yet */
    unsigned char *pool;                /* of random numbers, from which inputs are cut */
    void *device_pool;                  /* the same on a GPU; NULL = inputs are written by the host */
    size_t elem_bytes;
    execution *forward;                       /* of a backward problem: makes o and lse of drawn inputs; else NULL */
    double gradient_most[4], gradient_rms[4]; /* of the tolerances of a backward problem */
    timed_kernel candidate, incumbent;
};

/* ---- Fresh inputs ---- */

/* Those that are drawn: q, k and v, and of a backward problem the gradient of o. */
static int drawn_tensors(const acr_problem *p)
{
    return p->pass == ACR_BACKWARD ? INPUT_D_O + 1 : INPUT_V + 1;
}

static int64_t drawn_elements(const timed_pair *d, input_tensor which)
{
    const acr_problem *p = &d->problem->problem;
    const bool of_queries = which == INPUT_Q || which == INPUT_D_O;
    return d->ref->entries * (of_queries ? p->q_heads * d->ref->q_rows : p->kv_heads * d->ref->kv_rows) *
           (which == INPUT_Q || which == INPUT_K ? p->qk_dim : p->v_dim);
}

static acr_status make_pool(timed_pair *d)
{
    enum {
        DIM = 64
    };
    const acr_problem *p = &d->problem->problem;
    int64_t most = 0;
    for (int i = 0; i < drawn_tensors(p); ++i) {
        const int64_t elements = drawn_elements(d, (input_tensor)i);
        most = elements > most ? elements : most;
    }
    const int64_t rows = (most + POOL_WINDOW) / DIM + 1;
    acr_problem filled = {.dtype = p->dtype, .q_heads = 1, .qk_dim = DIM};
    filled.q.batch = filled.q.head = 1;
    d->elem_bytes = (size_t)acr__dtype_bytes(p->dtype);
    d->pool = malloc((size_t)(rows * DIM) * d->elem_bytes);
    if (!d->pool) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %lld random numbers", (long long)(rows * DIM));
    }
    input_fill(d->pool, &filled, INPUT_Q, 1, rows, INPUT_NORMAL, d->s->job.hidden_seed + STREAM_POOL,
               d->s->job.threads ? d->s->job.threads : 1);
    acr__backend_device *device = d->s->device;
    if (device->device.backend == ACR__CPU) {
        return ACR_OK;
    }
    const size_t bytes = (size_t)(rows * DIM) * d->elem_bytes;
    acr_status status = device->backend->mem_alloc(device, bytes, &d->device_pool);
    return status == ACR_OK ? device->backend->mem_upload(device, d->device_pool, d->pool, bytes) : status;
}

static void leave_device_pool(timed_pair *d)
{
    d->s->device->backend->mem_free(d->s->device, d->device_pool);
    d->device_pool = NULL;
}

/* Where in the pool a launch's tensor begins, bytes. */
static size_t drawn_offset(const timed_pair *d, input_tensor which, uint64_t counter)
{
    const uint64_t granule = d->device_pool ? POOL_GRANULE / d->elem_bytes : 1;
    const uint64_t at = random_bits(d->s->job.hidden_seed, STREAM_POOL + (uint64_t)which, counter) % POOL_WINDOW;
    return (size_t)(at / granule * granule) * d->elem_bytes;
}

/* The reference with the counter's inputs instead of its own; it judges nothing. Tensors are cut from anywhere in the
 * window: there are 2^60 triples of them, by granules 2^51 of two bytes an element and 2^48 of one. */
static reference inputs_drawn(const timed_pair *d, uint64_t counter)
{
    void *cut[INPUT_D_O + 1];
    reference fresh = *d->ref;
    for (int i = 0; i <= INPUT_D_O; ++i) {
        cut[i] = d->pool + drawn_offset(d, (input_tensor)i, counter);
    }
    fresh.buffers.q = cut[INPUT_Q];
    fresh.buffers.k = cut[INPUT_K];
    fresh.buffers.v = cut[INPUT_V];
    if (d->forward) {
        fresh.buffers.d_o = cut[INPUT_D_O];
    }
    return fresh;
}

/* o and lse of drawn inputs, as gradients need them: by the library's own forward kernel. They are the set's until it
 * is drawn anew. */
static acr_status run_forward(timed_kernel *k, int set, reference *drawn)
{
    execution *forward = k->pair->forward;
    run_output *out = &k->forward[set];
    run_output_free(out);
    acr_status status = execution_renew(forward, drawn);
    if (status == ACR_OK) {
        status = execution_rerun(forward);
    }
    if (status == ACR_OK) {
        status = execution_collect_outputs(forward, out);
    }
    drawn->buffers.o = out->o;
    drawn->buffers.lse = out->lse;
    return status;
}

/* Written by the host. */
static acr_status refresh(timed_kernel *k, int set, uint64_t counter)
{
    reference fresh = inputs_drawn(k->pair, counter);
    const acr_status status = k->pair->forward ? run_forward(k, set, &fresh) : ACR_OK;
    return status == ACR_OK ? execution_renew(k->sets[set], &fresh) : status;
}

/* Copied by the device, enqueued on a stream. A kernel that changes the pool changes nothing but its own inputs: what
 * it is compared with is made of the host's numbers. */
static acr_status refresh_on_device(timed_kernel *k, int set, uint64_t counter, void *stream)
{
    const timed_pair *d = k->pair;
    const unsigned char *pool = d->device_pool;
    const void *sources[ACR__BUFFERS] = {NULL};
    sources[ACR__Q] = pool + drawn_offset(d, INPUT_Q, counter);
    sources[ACR__K] = pool + drawn_offset(d, INPUT_K, counter);
    sources[ACR__V] = pool + drawn_offset(d, INPUT_V, counter);
    acr_status status = ACR_OK;
    if (d->forward) {
        status = execution_renew_on_device(d->forward, sources, stream);
        status = status == ACR_OK ? execution_enqueue(d->forward, stream) : status;
        sources[ACR__D_O] = pool + drawn_offset(d, INPUT_D_O, counter);
        sources[ACR__O] = execution_buffer(d->forward, ACR__O);
        sources[ACR__LSE] = execution_buffer(d->forward, ACR__LSE);
    }
    return status == ACR_OK ? execution_renew_on_device(k->sets[set], sources, stream) : status;
}

/* What the oracle knows of the chosen launch of the sample to come; NULL = nothing. */
static const reference *oracle_of(const timed_kernel *k)
{
    const timed_pair *d = k->pair;
    const reference *found = NULL;
    for (int i = 0; i < ORACLE_LAUNCHES && k->slot == SANDBOX_CANDIDATE; ++i) {
        found = d->oracle_at[i] == d->samples ? d->oracles[i] : found;
    }
    return found;
}

/* How far two results of the same inputs may be from each other. Each is within the tolerance of the truth: these
 * inputs' own is not known, so the timed problem's counts twice over. */
static const double SLACK = 4.0;

/* What an element of a gradient may be off by, and all of them in the mean: each element of the timed problem has a
 * tolerance of its own, and with other inputs another. */
static void bound_gradients(timed_pair *d)
{
    const acr_problem *p = &d->problem->problem;
    const gradients *g = d->ref->grads;
    const int64_t dims[4] = {p->qk_dim, p->qk_dim, p->v_dim, 1};
    const uint8_t *const judged[4] = {g->rows, g->keys, g->keys, NULL};
    for (int i = 0; i < 4; ++i) {
        double square = 0;
        int64_t count = 0;
        for (int64_t at = 0; at < g->elements[i]; ++at) {
            if (!judged[i] || judged[i][at / dims[i]]) {
                d->gradient_most[i] = fmax(d->gradient_most[i], g->tolerance[i][at]);
                square += g->tolerance[i][at] * g->tolerance[i][at];
                ++count;
            }
        }
        d->gradient_rms[i] = sqrt(square / (double)(count > 0 ? count : 1));
    }
}

/* Whether no element is off by more than `most`, where one is expected; *square: the mean of the errors' squares. Of
 * large tensors it looks at every so many-th piece, from a place that chance has drawn. */
static bool elements_agree(double *square, const timed_pair *d, acr_dtype dtype, const void *got, const void *expected,
                           int64_t count, double most)
{
    enum {
        CHUNK = 512,
        CHUNKS_MOST = 1024
    };
    double found[CHUNK], wanted[CHUNK];
    const size_t bytes = (size_t)acr__dtype_bytes(dtype);
    const int64_t chunks = (count + CHUNK - 1) / CHUNK, step = (chunks + CHUNKS_MOST - 1) / CHUNKS_MOST;
    const uint64_t drawn = random_bits(d->s->job.hidden_seed, STREAM_PLACES, d->candidate.drawn);
    int64_t looked = 0;
    bool agree = true;
    *square = 0;
    for (int64_t i = chunks > 0 ? (int64_t)(drawn % (uint64_t)step) : 0; i < chunks && agree; i += step) {
        const int64_t at = i * CHUNK, now = count - at < CHUNK ? count - at : CHUNK;
        const size_t from = (size_t)at * bytes;
        looked += now;
        if (memcmp((const char *)got + from, (const char *)expected + from, (size_t)now * bytes) == 0) {
            continue;
        }
        acr__load_elements(found, dtype, got, at, now);
        acr__load_elements(wanted, dtype, expected, at, now);
        for (int64_t k = 0; k < now; ++k) {
            const double error = isnan(wanted[k]) ? 0 : fabs(found[k] - wanted[k]);
            agree = agree && error <= most;
            *square += error * error;
        }
    }
    *square /= (double)(looked > 0 ? looked : 1);
    return agree;
}

/* Whether two gradients are of the same numbers. */
static bool gradients_agree(const timed_pair *d, const run_output *got, const run_output *expected)
{
    const acr_dtype types[4] = {d->problem->problem.grad_dtype, d->problem->problem.grad_dtype,
                                d->problem->problem.grad_dtype, ACR_F32};
    for (int i = 0; i < 4; ++i) {
        const int64_t elements = (int64_t)expected->grad_bytes[i] / acr__dtype_bytes(types[i]);
        double square;
        if (!elements_agree(&square, d, types[i], got->grads[i], expected->grads[i], elements,
                            SLACK * d->gradient_most[i])) {
            return false;
        }
        if (elements > 0 && !(sqrt(square) <= SLACK * d->gradient_rms[i])) {
            return false;
        }
    }
    return true;
}

/* Whether two outputs are of the same numbers. */
static bool outputs_agree(const timed_pair *d, const run_output *got, const run_output *expected)
{
    const acr_problem *p = &d->problem->problem;
    const int64_t rows = d->ref->entries * p->q_heads * d->ref->q_rows;
    double square;
    if (!elements_agree(&square, d, p->out_dtype, got->o, expected->o, rows * p->v_dim, SLACK * d->ref->tol_max)) {
        return false;
    }
    for (int64_t i = 0; got->lse && i < rows; ++i) {
        const double wanted = expected->lse[i], value = got->lse[i];
        if (!isnan(wanted) && value != wanted && !(fabs(value - wanted) <= SLACK * d->ref->tol_lse)) {
            return false;
        }
    }
    return sqrt(square) <= SLACK * d->ref->tol_rms;
}

/* What a timed launch of the candidate wrote, beside what the incumbent makes of the same inputs. */
static acr_status compare_launch(timed_pair *d, int set, uint64_t counter)
{
    run_output got = {.o = NULL}, expected = {.o = NULL};
    acr_status status = execution_collect_outputs(d->candidate.sets[set], &got);
    if (status == ACR_OK) {
        status = refresh(&d->incumbent, 0, counter);
    }
    if (status == ACR_OK) {
        status = execution_rerun(d->incumbent.sets[0]);
    }
    if (status == ACR_OK) {
        status = execution_collect_outputs(d->incumbent.sets[0], &expected);
    }
    if (status == ACR_OK && !(d->forward ? gradients_agree : outputs_agree)(d, &got, &expected)) {
        status = end_trial(d->s, TRIAL_WRONG, "%s: a timed launch did not compute what the incumbent computes",
                           d->problem->text);
    }
    run_output_free(&got);
    run_output_free(&expected);
    return status;
}

/* The same beside the oracle. */
static acr_status judge_launch(const timed_pair *d, int set, const reference *ref)
{
    run_output output;
    verdict v;
    acr_status status = execution_collect(d->candidate.sets[set], &output);
    if (status != ACR_OK) {
        return status;
    }
    conformance_judge(&v, ref, &output);
    run_output_free(&output);
    return v.pass ? ACR_OK : end_trial(d->s, TRIAL_WRONG, "%s: while timed: %s", d->problem->text, v.failure);
}

/* What the incumbent was timed on: a candidate that changed the pool would choose that. On a CPU the host has written
 * it. */
static acr_status check_inputs(const timed_kernel *k, int set, uint64_t counter)
{
    const timed_pair *d = k->pair;
    bool holds = true;
    if (!d->device_pool) {
        return ACR_OK;
    }
    const reference drawn = inputs_drawn(d, counter);
    acr_status status = execution_holds_inputs(&holds, k->sets[set], &drawn);
    return status == ACR_OK && !holds
               ? end_trial(d->s, TRIAL_WRONG, "%s: inputs of the incumbent were changed while it was timed",
                           d->problem->text)
               : status;
}

/* Whatever is known of the chosen launch of a sample. */
static acr_status check_launch(timed_kernel *k, int set, uint64_t counter, const reference *oracle)
{
    if (k->slot != SANDBOX_CANDIDATE) {
        return check_inputs(k, set, counter);
    }
    return oracle ? judge_launch(k->pair, set, oracle) : compare_launch(k->pair, set, counter);
}

/* Whether a sample without an oracle's launch is looked at: always, unless a device holds tensors so large that copies
 * of them would take most of a trial's time. Of those a share is, drawn from the hidden seed, of either kernel; eight
 * times as large where a claim depends on it. */
static bool is_looked_at(const timed_kernel *k)
{
    enum {
        WHOLE_BYTES = 4 << 20, /* of inputs that are drawn: all samples are looked at */
        THOROUGHLY = 8
    };
    const timed_pair *d = k->pair;
    double bytes = 0;
    for (int i = 0; i < drawn_tensors(&d->problem->problem); ++i) {
        bytes += (double)d->elem_bytes * (double)drawn_elements(d, (input_tensor)i);
    }
    const uint64_t bits = random_bits(d->s->job.hidden_seed, STREAM_LOOKED + (uint64_t)k->slot, k->drawn);
    const double whole = (double)WHOLE_BYTES * (d->s->job.thorough ? THOROUGHLY : 1);
    return !d->device_pool || (double)(bits >> 11) * 0x1p-53 * bytes <= whole;
}

/* ---- Samples ---- */

static acr_status call_once(const timed_kernel *k, double *seconds)
{
    acr_status status = execution_enqueue(k->sets[0], NULL);
    *seconds = sandbox_seconds(k->slot);
    return status == ACR_OK ? check_sandboxes(k->pair->s, k->pair->problem->text) : status;
}

/* An interleave_sample: the same inputs over and over, output and workspace as the last launch left them. */
static acr_status sample_repeated(void *arg, int count, double *seconds)
{
    timed_kernel *k = arg;
    if (k->repeated) {
        return k->repeated->device->backend->timing->graph_time(k->repeated, count, seconds);
    }
    acr_status status = ACR_OK;
    for (int i = 0; i < count && status == ACR_OK; ++i) {
        double sum = 0, one = 0;
        for (int launch = 0; launch < k->launches && status == ACR_OK; ++launch) {
            status = call_once(k, &one);
            sum += one;
        }
        seconds[i] = sum / k->launches;
    }
    return status;
}

static int chosen_launch(const timed_kernel *k, int of)
{
    return (int)(random_bits(k->pair->s->job.hidden_seed, STREAM_CHOSEN, k->drawn) % (uint64_t)of);
}

static acr_status sample_calls(timed_kernel *k, double *seconds)
{
    const int chosen = chosen_launch(k, k->launches);
    const reference *oracle = oracle_of(k);
    double sum = 0, one = 0;
    acr_status status = ACR_OK;
    for (int launch = 0; launch < k->launches && status == ACR_OK; ++launch) {
        status = launch == chosen && oracle ? execution_renew(k->sets[0], oracle) : refresh(k, 0, k->drawn);
        if (status == ACR_OK) {
            status = call_once(k, &one);
        }
        if (status == ACR_OK && launch == chosen) {
            status = check_launch(k, 0, k->drawn, oracle);
        }
        sum += one;
        ++k->drawn;
    }
    *seconds = sum / k->launches;
    return status;
}

/* An acr__enqueue, called before a replay: all sets of buffers anew. */
static acr_status refresh_sets(void *arg, void *stream)
{
    timed_kernel *k = arg;
    const reference *oracle = oracle_of(k);
    acr_status status = ACR_OK;
    for (int i = 0; i < k->set_count && status == ACR_OK; ++i) {
        const uint64_t counter = k->drawn + (uint64_t)i;
        status = i == k->chosen && oracle ? execution_renew(k->sets[i], oracle)
                 : k->pair->device_pool   ? refresh_on_device(k, i, counter, stream)
                                          : refresh(k, i, counter);
    }
    return status;
}

static acr_status sample_replays(timed_kernel *k, int replays, double *seconds)
{
    const acr__timing *device = k->fresh->device->backend->timing;
    const reference *oracle = oracle_of(k);
    const int chosen = chosen_launch(k, replays * k->set_count);
    const bool looked = oracle || is_looked_at(k);
    double sum = 0, one = 0;
    acr_status status = ACR_OK;
    for (int i = 0; i < replays && status == ACR_OK; ++i) {
        k->chosen = chosen / k->set_count == i ? chosen % k->set_count : -1;
        status = device->graph_time_prepared(k->fresh, refresh_sets, k, &one);
        if (status == ACR_OK && k->chosen >= 0 && looked) {
            status = check_launch(k, k->chosen, k->drawn + (uint64_t)k->chosen, oracle);
        }
        sum += one;
        k->drawn += (uint64_t)k->set_count;
    }
    *seconds = sum / replays;
    return status;
}

static acr_status take_fresh(timed_kernel *k, int replays, int count, double *seconds)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < count && status == ACR_OK; ++i) {
        status = k->fresh ? sample_replays(k, replays, &seconds[i]) : sample_calls(k, &seconds[i]);
        k->pair->samples += k->slot == SANDBOX_CANDIDATE;
    }
    return status;
}

/* An interleave_sample: every launch on inputs of its own. */
static acr_status sample_fresh(void *arg, int count, double *seconds)
{
    timed_kernel *k = arg;
    return take_fresh(k, k->pair->replays, count, seconds);
}

/* ---- Getting ready ---- */

/* What is recorded. */
typedef struct work {
    acr__backend_device *device;
    acr__enqueue *enqueue;
    void *arg;
} work;

static acr_status record_work(acr__graph **out, void *arg, int launches)
{
    const work *w = arg;
    return w->device->backend->timing->graph_record(out, w->device, w->enqueue, w->arg, launches);
}

static acr_status enqueue_next(void *arg, void *stream)
{
    timed_kernel *k = arg;
    return execution_enqueue(k->sets[k->turn++ % k->set_count], stream);
}

/* Sets of buffers for a replay: as many as fill a stretch, and no more than half of L2 holds, so that launches find
 * their inputs as near as repeated ones do; but 4 at least. */
static int sets_wanted(const timed_kernel *k, int launches)
{
    enum {
        LEAST = 4
    };
    const timed_pair *d = k->pair;
    const acr_problem *p = &d->problem->problem;
    double bytes = 0;
    for (int i = 0; i < drawn_tensors(p); ++i) {
        const int times = i == INPUT_D_O ? 2 : 1; /* o is as large */
        bytes += times * (double)d->elem_bytes * (double)drawn_elements(d, (input_tensor)i);
    }
    const double fit = fmax(LEAST, 0.5 * (double)d->s->device->device.l2_bytes / bytes);
    return (int)fmin(fmin(launches, fit), SETS_MAX);
}

/* Whether the device can copy inputs: tensors without gaps, those of a forward pass before a backward one, too. */
static bool takes_device_inputs(const timed_pair *d, const execution *e)
{
    return execution_takes_device_inputs(e) && (!d->forward || execution_takes_device_inputs(d->forward));
}

static acr_status record_graphs(timed_kernel *k)
{
    session *s = k->pair->s;
    work repeated = {s->device, execution_enqueue, k->sets[0]}, fresh = {s->device, enqueue_next, k};
    double ignored;
    acr_status status = timer_fill(&k->repeated, &ignored, record_work, &repeated, TIMER_STRETCH_S, 1);
    timed_pair *d = k->pair;
    if (status == ACR_OK && d->device_pool && !takes_device_inputs(d, k->sets[0])) {
        leave_device_pool(d);
    }
    if (status == ACR_OK && d->sets == 0) { /* the incumbent's pace is that of both */
        d->sets = sets_wanted(k, k->repeated->launches);
        d->replays = (k->repeated->launches + d->sets - 1) / d->sets;
        d->replays = !d->device_pool            ? 1 /* the host would write all of them */
                     : d->replays < REPLAYS_MAX ? d->replays
                                                : REPLAYS_MAX;
    }
    while (k->set_count < d->sets && status == ACR_OK) {
        status = execution_create_sibling(&k->sets[k->set_count], k->sets[0], d->ref);
        k->set_count += status == ACR_OK;
    }
    k->launches = k->set_count;
    if (status == ACR_OK) {
        status = record_work(&k->fresh, &fresh, k->launches);
    }
    /* What a driver does at a graph's first launch alone it shall not have to do behind a closed stream. */
    return status == ACR_OK ? s->device->backend->timing->graph_time(k->fresh, 1, &ignored) : status;
}

/* As many calls as fill a stretch. */
static acr_status count_calls(timed_kernel *k)
{
    enum {
        PROBES = 3
    };
    double least_s = INFINITY, one = 0;
    acr_status status = ACR_OK;
    for (int i = 0; i < PROBES && status == ACR_OK; ++i) {
        status = call_once(k, &one);
        least_s = fmin(least_s, fmax(one, 1e-9));
    }
    k->launches = (int)fmin(ceil(TIMER_STRETCH_S / least_s), LAUNCHES_MAX);
    return status;
}

static acr_status make_timed(timed_kernel *k, timed_pair *d, sandbox_slot slot, const acr__kernel *kernel)
{
    session *s = d->s;
    *k = (timed_kernel){.pair = d, .slot = slot, .launches = 1};
    set_workspace(s, slot, kernel, &d->problem->problem);
    acr_status status =
        execution_create(&k->sets[0], s->ctx, kernel, &d->problem->problem, d->ref, false, 0, ALLOCATOR_ALIGNMENT);
    k->set_count = status == ACR_OK;
    if (status == ACR_OK) {
        status = execution_run(k->sets[0]);
    }
    if (status == ACR_OK) {
        status = check_sandboxes(s, d->problem->text);
    }
    if (status == ACR_OK) {
        status = s->device->device.backend == ACR__CPU ? count_calls(k) : record_graphs(k);
    }
    return status;
}

/* The forward pass of a backward problem; without one nothing can be timed, whatever the candidate. */
static acr_status make_forward(timed_pair *d)
{
    session *s = d->s;
    if (d->problem->problem.pass != ACR_BACKWARD) {
        return ACR_OK;
    }
    const acr_problem problem = reference_forward_problem(&d->problem->problem);
    const acr__kernel *kernel = NULL;
    acr_status status = kernel_planned(&kernel, s->ctx, &problem);
    if (status == ACR_OK) {
        status = execution_create(&d->forward, s->ctx, kernel, &problem, d->ref, false, 0, ALLOCATOR_ALIGNMENT);
    }
    bound_gradients(d);
    return status == ACR_OK
               ? ACR_OK
               : end_trial(s, TRIAL_HARNESS_FAILED, "the forward pass of %s: %s", d->problem->text, acr_last_error());
}

static acr_status make_pair(timed_pair *d, session *s, size_t problem)
{
    *d = (timed_pair){.s = s, .problem = &s->job.problems[problem]};
    announce(s, "timing", &d->problem->problem);
    acr_status status = ACR_OK;
    for (int i = 0; i < ORACLE_LAUNCHES && status == ACR_OK; ++i) {
        const reference_request wanted = task_request(&s->job, problem, (task_inputs)(TASK_FIRST + i));
        status = find_reference(&d->oracles[i], s, &wanted);
        d->oracle_at[i] = -1;
    }
    d->ref = d->oracles[0];
    if (status == ACR_OK) {
        status = make_forward(d);
    }
    if (status == ACR_OK) {
        status = make_pool(d);
    }
    if (status == ACR_OK) {
        status = make_timed(&d->incumbent, d, SANDBOX_INCUMBENT, &s->incumbent.kernel);
    }
    if (status == ACR_OK) {
        status = make_timed(&d->candidate, d, SANDBOX_CANDIDATE, &s->candidate.kernel);
    }
    return status == ACR_OK ? ACR_OK : end_with(s, status, "timing");
}

static void free_timed(timed_kernel *k, acr__backend_device *device)
{
    device->backend->timing->graph_free(k->repeated);
    device->backend->timing->graph_free(k->fresh);
    for (int i = k->set_count - 1; i >= 0; --i) { /* the first owns the plan */
        execution_destroy(k->sets[i]);
        run_output_free(&k->forward[i]);
    }
}

static void free_pair(timed_pair *d)
{
    free_timed(&d->candidate, d->s->device);
    free_timed(&d->incumbent, d->s->device);
    execution_destroy(d->forward);
    for (int i = 0; i < ORACLE_LAUNCHES; ++i) {
        reference_destroy(d->oracles[i]);
    }
    if (d->device_pool) {
        leave_device_pool(d);
    }
    free(d->pool);
}

/* ---- Plausibility ---- */

typedef struct paces {
    double repeated_us, fresh_us;
} paces;

static acr_status measure_paces(paces *out, timed_kernel *k)
{
    enum {
        TURNS = 4,
        SLOT = 4,
        SAMPLES = TURNS * SLOT
    };
    double repeated[SAMPLES], fresh[SAMPLES];
    for (int i = 0; i < TURNS; ++i) {
        acr_status status = sample_repeated(k, SLOT, &repeated[i * SLOT]);
        if (status == ACR_OK) {
            status = take_fresh(k, 1, SLOT, &fresh[i * SLOT]);
        }
        if (status != ACR_OK) {
            return status;
        }
    }
    out->repeated_us = 1e6 * stats_percentile(repeated, SAMPLES, 0.5);
    out->fresh_us = 1e6 * stats_percentile(fresh, SAMPLES, 0.5);
    return ACR_OK;
}

/* Whether the candidate gains more than the incumbent when inputs repeat: it remembers results. What is timed later has
 * nothing to remember, so this refuses what would only be slow there. Caches make a difference too, to both. Noise must
 * not look like it, so it must show three times. */
static acr_status check_memory(timed_pair *d, paces ours)
{
    enum {
        LOOKS = 3
    };
    static const double GAIN = 1.4;
    paces theirs;
    for (int i = 0; i < LOOKS; ++i) {
        acr_status status = i == 0 ? ACR_OK : measure_paces(&ours, &d->candidate);
        if (status == ACR_OK) {
            status = measure_paces(&theirs, &d->incumbent);
        }
        if (status != ACR_OK) {
            return end_with(d->s, status, d->problem->text);
        }
        const double usual = fmax(1.0, theirs.fresh_us / theirs.repeated_us);
        const double from_memory_us = 2.0 * d->problem->memory_us; /* what does not fit the caches several times over */
        if (ours.fresh_us <= fmax(GAIN * usual * ours.repeated_us, from_memory_us)) {
            return ACR_OK;
        }
    }
    return end_trial(d->s, TRIAL_IMPLAUSIBLE, "%s: %.3f us when inputs repeat, %.3f us when they alternate",
                     d->problem->text, ours.repeated_us, ours.fresh_us);
}

static acr_status check_floor(timed_pair *d, paces *ours)
{
    static const double UNDER = 0.9;
    acr_status status = measure_paces(ours, &d->candidate);
    if (status != ACR_OK) {
        return end_with(d->s, status, d->problem->text);
    }
    if (!(ours->repeated_us >= UNDER * d->problem->floor_us)) {
        return end_trial(d->s, TRIAL_IMPLAUSIBLE, "%s: %.3f us, the floor is %.3f us", d->problem->text,
                         ours->repeated_us, d->problem->floor_us);
    }
    return ACR_OK;
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

/* Draws the samples of the measurement to come that meet the oracle, from all but the first few: as many as there are
 * are sure to be taken after those of warming up. */
static void draw_oracles(timed_pair *d)
{
    const uint64_t least = (uint64_t)INTERLEAVE_BLOCK_SAMPLES * INTERLEAVE_BLOCKS_SEARCH;
    for (int i = 0; i < ORACLE_LAUNCHES; ++i) {
        const uint64_t share = least / ORACLE_LAUNCHES; /* each in a part of its own: none meets another */
        d->oracle_at[i] =
            d->samples +
            (int64_t)((uint64_t)i * share + random_bits(d->s->job.hidden_seed, STREAM_ORACLE, (uint64_t)i) % share);
    }
}

bool judge_is_slower(const stats_block *views, int blocks)
{
    enum {
        BLOCKS_LEAST = 2 /* fewer have one mirror image, and meet one state of the machine */
    };
    static const double FAR_BEHIND = 0.95; /* what drifts within two blocks is not as much */
    return (blocks >= BLOCKS_LEAST && stats_compare_few(views, (size_t)blocks, 0.0).ci95.high < FAR_BEHIND) ||
           (blocks >= STATS_BLOCKS_LEAST && stats_compare(views, (size_t)blocks, 0.0).ci95.high < 1.0);
}

/* Of the last problem, when all before it were slower as well: whatever the weights, the candidate cannot win. */
static bool cannot_win(void *arg, const stats_block *views, int blocks)
{
    session *s = arg;
    return s->slower_so_far && json_array_size(s->timings) + 1 == s->job.problem_count &&
           judge_is_slower(views, blocks);
}

static acr_status time_pair(timed_pair *d, uint64_t seed)
{
    session *s = d->s;
    const interleave_side theirs = {sample_fresh, &d->incumbent}, ours = {sample_fresh, &d->candidate};
    const interleave_design design = {.blocks = s->job.blocks,
                                      .warm_up_s = 20e-3,
                                      .budget_s = s->job.budget_s,
                                      .seed = seed,
                                      .enough = s->job.race ? cannot_win : NULL,
                                      .enough_arg = s};
    interleave_result r;
    draw_oracles(d);
    acr_status status = interleave_run(&r, s->job.swapped ? &ours : &theirs, s->job.swapped ? &theirs : &ours, &design);
    if (status != ACR_OK) {
        return end_with(s, status, d->problem->text);
    }
    record_timing(s, d->problem, &r);
    s->slower_so_far = s->slower_so_far && judge_is_slower(r.views, r.blocks);
    interleave_free(&r);
    return ACR_OK;
}

static acr_status time_problem(session *s, size_t problem)
{
    timed_pair d;
    paces ours = {0, 0};
    s->gate = GATE_PLAUSIBILITY;
    acr_status status = make_pair(&d, s, problem);
    if (status == ACR_OK) {
        announce(s, "timing", &d.problem->problem);
        status = check_floor(&d, &ours);
    }
    if (status == ACR_OK) {
        status = check_memory(&d, ours);
    }
    if (status == ACR_OK) {
        s->gate = GATE_PERFORMANCE;
        status = time_pair(&d, s->job.hidden_seed + problem);
    }
    free_pair(&d);
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
    for (size_t i = 0; i < s->job.problem_count && status == ACR_OK; ++i) {
        status = time_problem(s, i);
    }
    return status;
}

/* Correctness beside that of others, timing alone. Waiting is nobody's fault: no alarm runs meanwhile. */
static acr_status wait_for_device(session *s, bool alone)
{
    const double start_s = monotonic_s();
    if (!s->job.locks) {
        return ACR_OK;
    }
    alarm(0);
    acr_status status = alone ? device_take(s->lock) : device_share(&s->lock, s->job.backend, s->job.device);
    s->waited_s += monotonic_s() - start_s;
    return status == ACR_OK ? ACR_OK : end_trial(s, TRIAL_HARNESS_FAILED, "%s", acr_last_error());
}

static acr_status judge_both(session *s)
{
    acr_status status = judge_correctness(s);
    s->correctness_s = monotonic_s() - s->started_s - s->waited_s;
    s->job.case_timeout_s = s->job.timing_timeout_s;
    if (status == ACR_OK) {
        status = wait_for_device(s, true);
    }
    return status == ACR_OK ? judge_performance(s) : status;
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
    for (int i = 0; i < TRIAL_PROFILE_LAUNCHES && status == ACR_OK; ++i) {
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

/* An acr_parallel_for: the sandbox has a process for each lane, so that lane 0's call does the work of all. */
static void call_in_turn(void *user, size_t count, acr_task task, void *task_arg)
{
    (void)user;
    for (size_t i = 0; i < count; ++i) {
        task(task_arg, i);
    }
}

/* Whether the incumbent is there, too. */
static bool is_timed(const session *s)
{
    return s->job.stage == STAGE_PERFORMANCE || s->job.stage == STAGE_JUDGEMENT;
}

static acr_status open_context(session *s)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = s->job.backend;
    options.device = s->job.device;
    const bool cpu = strcmp(s->job.backend, "cpu") == 0;
    options.threads = !cpu ? 0 : s->job.stage == STAGE_CORRECTNESS ? 1 : s->job.threads;
    options.parallel_for = cpu && s->job.stage == STAGE_PERFORMANCE ? call_in_turn : NULL;
    acr_status status = acr_ctx_create(&s->ctx, &options);
    if (status != ACR_OK) {
        return end_trial(s, TRIAL_HARNESS_FAILED, "%s", acr_last_error());
    }
    s->device = acr__ctx_backend_device(s->ctx);
    return ACR_OK;
}

static acr_status open_references(session *s)
{
    acr_status status = s->job.references > 0 ? reference_cache_open(&s->references, s->job.references) : ACR_OK;
    return status == ACR_OK ? ACR_OK : end_trial(s, TRIAL_HARNESS_FAILED, "%s", acr_last_error());
}

static acr_status open_sandbox(session *s, sandbox_slot slot, loaded *l, acr__cpu_run *run)
{
    if (l->kernel.backend != ACR__CPU) {
        return ACR_OK;
    }
    l->kernel.run = run;
    acr_status status = sandbox_begin(slot, &l->code, l->kernel.pass, l->kernel.dtype, s->job.case_timeout_s);
    sandbox_share_work(slot, s->job.stage == STAGE_PERFORMANCE);
    return status;
}

/* A source that lies about its ISA, or an image that no driver takes, is the candidate's failure. */
static acr_status load_sides(session *s)
{
    acr_status status = build_load(&s->candidate, LOADED_CANDIDATE, s->job.candidate, &s->device->device);
    if (status != ACR_OK) {
        return end_trial(s, status == ACR_IO ? TRIAL_HARNESS_FAILED : TRIAL_UNSUPPORTED, "%s", acr_last_error());
    }
    status = open_sandbox(s, SANDBOX_CANDIDATE, &s->candidate, sandbox_run_candidate);
    if (status == ACR_OK && is_timed(s)) {
        status = build_load(&s->incumbent, LOADED_INCUMBENT, s->job.incumbent, &s->device->device);
        if (status == ACR_OK) {
            status = open_sandbox(s, SANDBOX_INCUMBENT, &s->incumbent, sandbox_run_incumbent);
        }
        return status == ACR_OK ? ACR_OK : end_trial(s, TRIAL_HARNESS_FAILED, "the incumbent: %s", acr_last_error());
    }
    return status == ACR_OK ? ACR_OK : end_trial(s, TRIAL_HARNESS_FAILED, "%s", acr_last_error());
}

/* The device has been opened: that was it. */
static acr_status probe(session *s)
{
    (void)s;
    return ACR_OK;
}

static void do_stage(session *s)
{
    static const trial_gate first_gates[] = {GATE_PERFORMANCE, GATE_CORRECTNESS, GATE_PLAUSIBILITY,
                                             GATE_PROFILE,     GATE_CORRECTNESS, GATE_CORRECTNESS};
    static acr_status (*const stages[])(session *) = {
        find_floors, judge_correctness, judge_performance, launch_for_profile, probe, judge_both};
    const bool wants_kernels = s->job.stage != STAGE_FLOORS && s->job.stage != STAGE_PROBE;
    s->gate = first_gates[s->job.stage];
    acr_status status = wait_for_device(s, false); /* before the driver starts: that is work for the device, too */
    if (status == ACR_OK) {
        status = open_context(s);
    }
    if (status == ACR_OK) {
        status = open_references(s);
    }
    if (status == ACR_OK && wants_kernels) {
        status = load_sides(s);
    }
    if (status == ACR_OK) {
        stages[s->job.stage](s);
    }
    char ignored[160];
    sandbox_end(SANDBOX_CANDIDATE, ignored);
    sandbox_end(SANDBOX_INCUMBENT, ignored);
}

/* The device as wisdom knows it: a CPU with the threads of the job, whatever this stage uses of them. */
static void device_key(char key[WISDOM_DEVICE_MAX], const session *s)
{
    key[0] = '\0';
    if (s->device) {
        acr__device device = s->device->device;
        device.threads = device.backend == ACR__CPU ? (int32_t)s->job.threads : device.threads;
        acr__wisdom_device_key(&device, key);
    }
}

static json_t *result_json(const session *s, const char *detail)
{
    char key[WISDOM_DEVICE_MAX];
    device_key(key, s);
    return json_pack("{s:s, s:s, s:s, s:s, s:f, s:f, s:O, s:O, s:O}", "status", trial_status_name(s->status), "gate",
                     trial_gate_name(s->gate), "detail", detail, "device", key, "correctness_s", s->correctness_s,
                     "waited_s", s->waited_s, "cases", s->cases, "timings", s->timings, "floors_us", s->floors);
}

static bool write_result(const session *s, int file)
{
    json_t *result = result_json(s, s->detail);
    if (!result) { /* a detail that is no UTF-8 */
        result = result_json(s, "(not text)");
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
    s.started_s = monotonic_s();
    s.slower_so_far = true;
    s.lock = -1;
    s.cases = json_array();
    s.timings = json_array();
    s.floors = json_array();
    do_stage(&s);
    const bool written = write_result(&s, file);
    _exit(written ? EXIT_DONE : EXIT_FAULT); /* on a GPU the driver may have been left in any state */
}
