/* A kernel being timed, see timed_kernel.h. */
#include "timed_kernel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check/inputs.h"
#include "kernels/kernel_choice.h"
#include "timer.h"

enum {
    CHECK_EVERY = 16, /* stretches, of a problem of CHECKED_BYTES or less */
    CHECKED_BYTES = 64 << 20,
    /* Launches in a row of which each gets other values and is judged: after a checked stretch, and after the last. */
    RUN = 4,
    LAST_RUN = 16,
    GAP_MAX = 64,     /* before a run a number of launches below this, drawn, that nobody judges */
    STREAM_SIGN = 80, /* of random_bits */
    STREAM_CHECK = 81,
    STREAM_SET = 82,
    STREAM_GAP = 83
};
/* Gaps and the last run are shorter where a launch takes so long that they would take longer than this. */
static const double RUN_S = 0.1;

/* What goes before each execution of a step. It has inputs of its own, the same values, and leaves o and the
 * log-sum-exp to nobody: what is timed are the two passes one behind the other. */
typedef struct forward_pass {
    const acr__kernel *kernel; /* NULL: there is none */
    execution **sets;          /* as many as of the gradients */
} forward_pass;

struct timed_kernel {
    timed_kernel_request request;
    acr__backend_device *device;
    execution **sets;
    int set_count, next; /* next: set of the next launch */
    forward_pass forward;
    acr__graph *graph;    /* not in call modes */
    uint64_t stretches;   /* of samples, so far */
    uint64_t check_every; /* stretches: renewing the values of a large problem takes longer than timing it */
    pace_energy energy;
    double launch_s; /* the shortest time of a launch in the samples so far; INFINITY = none yet */
    bool wrong;      /* once: verdict says how */
    verdict verdict;
};

acr_status timed_kernel_sets(int *sets, const acr__device *device, const problem_work *d)
{
    static const double CACHES = 5;
    const double cache_bytes = (double)device->l2_bytes;
    if (!(cache_bytes > 0)) {
        return acr__fail(ACR_UNSUPPORTED, "rotating mode: the size of the cache is unknown");
    }
    const double wanted = fmax(2, ceil(CACHES * cache_bytes / d->bytes));
    if (wanted > TIMED_KERNEL_SETS_MAX) {
        return acr__fail(ACR_UNSUPPORTED,
                         "rotating mode: five times %.3g MiB of cache are %.3g sets of %.3g KiB, at most %d",
                         cache_bytes / 0x1p20, wanted, d->bytes / 0x1p10, TIMED_KERNEL_SETS_MAX);
    }
    if (wanted * d->bytes > 0.25 * (double)device->mem_bytes) {
        return acr__fail(ACR_UNSUPPORTED, "rotating mode: %d sets of %.3g MiB are more than a quarter of the memory",
                         (int)wanted, d->bytes / 0x1p20);
    }
    *sets = (int)wanted;
    return ACR_OK;
}

const char *timed_kernel_forward(const timed_kernel *s)
{
    return s->forward.kernel ? s->forward.kernel->name : "";
}

int timed_kernel_launches(const timed_kernel *s)
{
    return s->graph ? s->graph->launches : mode_calls(s->request.mode);
}

int timed_kernel_set_count(const timed_kernel *s)
{
    return s->set_count;
}

pace_energy timed_kernel_energy(const timed_kernel *s)
{
    return s->energy;
}

acr_status timed_kernel_enqueue(void *arg, void *stream)
{
    timed_kernel *s = arg;
    const int set = s->next;
    s->next = (s->next + 1) % s->set_count;
    acr_status status = s->forward.kernel ? execution_enqueue(s->forward.sets[set], stream) : ACR_OK;
    return status == ACR_OK ? execution_enqueue(s->sets[set], stream) : status;
}

/* ---- Making ---- */

static acr_status make_sets(timed_kernel *s)
{
    const timed_kernel_request *r = &s->request;
    const acr_buffers lengths = r->ref->buffers;
    const problem_work d = work_of(r->problem, &lengths);
    int count = 1;
    acr_status status = ACR_OK;
    s->check_every = CHECK_EVERY * (1 + (uint64_t)(d.bytes / CHECKED_BYTES));
    if (r->mode == MODE_ROTATING) {
        status = timed_kernel_sets(&count, &s->device->device, &d);
    }
    if (status != ACR_OK) {
        return status;
    }
    s->sets = calloc((size_t)count, sizeof *s->sets);
    if (!s->sets) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %d sets of buffers", count);
    }
    for (; s->set_count < count && status == ACR_OK; s->set_count += status == ACR_OK) {
        execution **made = &s->sets[s->set_count];
        status = s->set_count == 0 ? execution_create(made, r->ctx, r->kernel, r->problem, r->ref, false, r->flags,
                                                      ALLOCATOR_ALIGNMENT)
                                   : execution_create_sibling(made, s->sets[0], r->ref);
        /* Sets differ in their values, so that no launch can pass on another's output. */
        if (status == ACR_OK && random_bits(r->seed, STREAM_SIGN, (uint64_t)s->set_count) & 1) {
            status = execution_negate_values(*made);
        }
    }
    return status;
}

/* Readies the forward pass of each set. */
static acr_status make_forward(timed_kernel *s)
{
    const timed_kernel_request *r = &s->request;
    const acr_problem problem = reference_forward_problem(r->problem);
    const acr__kernel *kernel = NULL;
    acr_status status = kernel_planned(&kernel, r->ctx, &problem);
    if (status != ACR_OK) {
        return status;
    }
    s->forward.sets = calloc((size_t)s->set_count, sizeof(execution *));
    if (!s->forward.sets) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %d sets of the forward pass", s->set_count);
    }
    for (int i = 0; i < s->set_count && status == ACR_OK; ++i) {
        execution **made = &s->forward.sets[i];
        status = i == 0 ? execution_create(made, r->ctx, kernel, &problem, r->ref, false, r->flags, ALLOCATOR_ALIGNMENT)
                        : execution_create_sibling(made, s->forward.sets[0], r->ref);
        if (status == ACR_OK) {
            status = execution_run(*made);
        }
    }
    s->forward.kernel = kernel;
    return status;
}

static void free_forward(timed_kernel *s)
{
    for (int i = s->set_count - 1; i >= 0 && s->forward.sets; --i) {
        execution_destroy(s->forward.sets[i]);
    }
    free(s->forward.sets);
}

static acr_status record_launches(acr__graph **out, void *arg, int launches)
{
    timed_kernel *s = arg;
    s->next = 0; /* each replay goes through the sets in the same order */
    return s->device->backend->timing->graph_record(out, s->device, timed_kernel_enqueue, s, launches);
}

static acr_status make_recording(timed_kernel *s)
{
    double launch_s;
    switch (s->request.mode) {
    case MODE_STREAM:
    case MODE_SUSTAINED:
    case MODE_FULL_CLOCK:
    case MODE_ROTATING:
        return timer_fill(&s->graph, &launch_s, record_launches, s, TIMER_STRETCH_S, s->set_count);
    case MODE_COLD:
        return record_launches(&s->graph, s, 1);
    default:
        return ACR_OK;
    }
}

acr_status timed_kernel_create(timed_kernel **out, const timed_kernel_request *request)
{
    timed_kernel *s = calloc(1, sizeof *s);
    if (!s) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a timed kernel");
    }
    s->request = *request;
    s->launch_s = INFINITY;
    s->device = acr__ctx_backend_device(request->ctx);
    acr_status status = make_sets(s);
    for (int i = 0; i < s->set_count && status == ACR_OK; ++i) {
        status = execution_run(s->sets[i]);
    }
    if (status == ACR_OK && request->step) {
        status = make_forward(s);
    }
    if (status == ACR_OK) {
        status = make_recording(s);
    }
    if (status != ACR_OK) {
        timed_kernel_destroy(s);
        return status;
    }
    *out = s;
    return ACR_OK;
}

void timed_kernel_destroy(timed_kernel *s)
{
    if (!s) {
        return;
    }
    s->device->backend->timing->graph_free(s->graph);
    for (int i = s->set_count - 1; i >= 0; --i) { /* the first, whose plan the others use, goes last */
        execution_destroy(s->sets[i]);
    }
    free_forward(s);
    free(s->sets);
    free(s);
}

/* ---- Sampling ---- */

static acr_status take_replays(void *arg, int count, double *seconds)
{
    timed_kernel *s = arg;
    return s->device->backend->timing->graph_time(s->graph, count, seconds);
}

static acr_status take_in_mode(timed_kernel *s, int count, double *seconds)
{
    const pace_request paced = {take_replays, s, s->device, timed_kernel_launches(s), s->request.monitor, &s->energy};
    acr_status status = ACR_OK;
    switch (s->request.mode) {
    case MODE_STREAM:
    case MODE_ROTATING:
        return take_replays(s, count, seconds);
    case MODE_SUSTAINED:
    case MODE_FULL_CLOCK:
        return pace_samples(&paced, s->request.mode, count, seconds);
    case MODE_COLD:
        return s->device->backend->timing->graph_time_cold(s->graph, count, seconds);
    default:
        if (s->request.take) {
            return s->request.take(s->request.take_arg, count, seconds);
        }
        for (int i = 0; i < count && status == ACR_OK; ++i) {
            status = timer_calls(s->device, timed_kernel_enqueue, s, mode_calls(s->request.mode), &seconds[i]);
        }
        return status;
    }
}

static acr_status take_samples(timed_kernel *s, int count, double *seconds)
{
    const acr_status status = take_in_mode(s, count, seconds);
    for (int i = 0; i < count && status == ACR_OK; ++i) {
        s->launch_s = fmin(s->launch_s, seconds[i]);
    }
    return status;
}

typedef acr_status collect(execution *e, run_output *out);

/* Judges a set of buffers. Once something is wrong, it stays said. */
static acr_status judge_set(timed_kernel *s, int set, collect *take)
{
    run_output output;
    if (s->wrong) {
        return ACR_OK;
    }
    acr_status status = take(s->sets[set], &output);
    if (status == ACR_OK) {
        conformance_judge(&s->verdict, s->request.ref, &output);
        s->wrong = !s->verdict.pass;
        run_output_free(&output);
    }
    return status;
}

/* Other values, no output. */
static acr_status refresh(execution *set)
{
    acr_status status = execution_negate_values(set);
    return status == ACR_OK ? execution_poison(set) : status;
}

/* How many launches to make where `most` would do and `least` must be: as many as RUN_S allows. */
static int affordable_launches(const timed_kernel *s, int least, int most)
{
    const double fit = s->launch_s > 0 ? floor(RUN_S / s->launch_s) : most;
    return (int)fmin(fmax(fit, least), most);
}

/* Launches one after another, each with other values and no output before it, and each must be right.
 *
 * A kernel could leave launches out, and be right after a stretch, where the last launch hides what others did not do.
 * A launch that is judged alone does not show it: the number of launches from one judged launch to the next can be a
 * multiple of the kernel's period, and then the launches that it leaves out are never the judged ones. So the number of
 * launches before a run is drawn, and the run itself is longer than one. A run of r launches misses a kernel that
 * leaves out one launch in k with probability max(0, 1 - r / k), or (1 - 1 / k)^r where it chooses by chance; the
 * product over all runs of a series is in docs/internals/statistics.md. */
static acr_status check_run(timed_kernel *s, int set, int count, uint64_t draw)
{
    const uint64_t gaps = (uint64_t)affordable_launches(s, RUN, GAP_MAX);
    const int gap = (int)(random_bits(s->request.seed, STREAM_GAP, draw) % gaps);
    acr_status status = ACR_OK;
    for (int i = 0; i < gap && status == ACR_OK; ++i) {
        status = execution_enqueue(s->sets[set], NULL);
    }
    for (int i = 0; i < count && status == ACR_OK && !s->wrong; ++i) {
        status = s->device->backend->synchronize(s->device);
        if (status == ACR_OK) {
            status = refresh(s->sets[set]);
        }
        if (status == ACR_OK) {
            status = execution_enqueue(s->sets[set], NULL);
        }
        if (status == ACR_OK) {
            status = s->device->backend->synchronize(s->device);
        }
        if (status == ACR_OK) {
            status = judge_set(s, set, execution_collect_outputs);
        }
    }
    return status;
}

static bool is_checked(const timed_kernel *s, uint64_t stretch)
{
    const uint64_t group = stretch / s->check_every, place = stretch % s->check_every;
    return stretch == 0 || (group > 0 && place == random_bits(s->request.seed, STREAM_CHECK, group) % s->check_every);
}

acr_status timed_kernel_sample(void *arg, int count, double *seconds)
{
    timed_kernel *s = arg;
    const uint64_t stretch = s->stretches++;
    if (!is_checked(s, stretch)) {
        return take_samples(s, count, seconds);
    }
    const int set = (int)(random_bits(s->request.seed, STREAM_SET, stretch) % (uint64_t)s->set_count);
    acr_status status = s->device->backend->synchronize(s->device);
    if (status == ACR_OK) {
        status = refresh(s->sets[set]);
    }
    if (status == ACR_OK) {
        status = take_samples(s, count, seconds);
    }
    if (status == ACR_OK) {
        status = judge_set(s, set, execution_collect_outputs);
    }
    return status == ACR_OK ? check_run(s, set, RUN, stretch) : status;
}

/* ---- Judging ---- */

static acr_status refresh_all(timed_kernel *s)
{
    acr_status status = s->device->backend->synchronize(s->device);
    for (int i = 0; i < s->set_count && status == ACR_OK; ++i) {
        status = refresh(s->sets[i]);
    }
    return status;
}

static acr_status judge_all(timed_kernel *s, collect *take)
{
    acr_status status = s->device->backend->synchronize(s->device);
    for (int i = 0; i < s->set_count && status == ACR_OK; ++i) {
        status = judge_set(s, i, take);
    }
    return status;
}

acr_status timed_kernel_judge(timed_kernel *s, verdict *out)
{
    double ignored;
    acr_status status = refresh_all(s);
    if (status == ACR_OK) {
        status = take_samples(s, 1, &ignored);
    }
    if (status == ACR_OK) {
        status = judge_all(s, execution_collect_outputs);
    }
    if (status == ACR_OK) {
        status = refresh_all(s);
    }
    for (int i = 0; i < s->set_count && status == ACR_OK; ++i) {
        status = execution_enqueue(s->sets[i], NULL);
    }
    if (status == ACR_OK) {
        status = judge_all(s, execution_collect);
    }
    if (status == ACR_OK) {
        const int last_run = affordable_launches(s, RUN, s->check_every > CHECK_EVERY ? RUN : LAST_RUN);
        status = check_run(s, 0, last_run, s->stretches);
    }
    *out = s->verdict;
    return status;
}
