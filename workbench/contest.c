/* Ours against peers, see contest.h. */
#include "contest.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_record.h"
#include "conformance.h"
#include "interleave.h"
#include "json.h"
#include "kernel_choice.h"
#include "text.h"
#include "timer.h"

enum {
    CALLS = 200 /* of one sample in call mode */
};

/* How one comparison came out: of ours, as the candidate, with something else. */
typedef struct encounter {
    stats_summary ours, theirs;
    stats_comparison comparison;
    int discarded;
} encounter;

typedef struct contestant {
    const struct contest *contest;
    const char *name;
    const acr__kernel *kernel; /* of ours; NULL = a peer */
    int32_t peer;              /* its number, or PEER_OURS */
    execution *execution;      /* ours */
    acr__graph *graph;         /* stream mode */
    bool out;                  /* takes no part, because of: */
    char text[PEER_TEXT_BYTES];
    verdict verdict;     /* of what the timed launches wrote */
    encounter encounter; /* a peer's with the first of ours; that of ours with the best peer, or with itself */
} contestant;

typedef struct contest {
    const contest_request *request;
    acr__backend_device *device;
    gpu_monitor *monitor;
    gpu_state before, after;
    contestant *ours, *peers;
    int ours_count, peer_count;
    char no_peers[PEER_TEXT_BYTES]; /* why there are none; "" otherwise */
    encounter control;              /* the first of ours with itself */
    double noise_floor;
    const contestant *best, *standard; /* peers: the fastest, and what the library takes by itself; NULL = none */
} contest;

/* ---- Taking part ---- */

static acr_status sample_stream(void *arg, int count, double *seconds)
{
    const contestant *c = arg;
    return c->graph->device->backend->graph_time(c->graph, count, seconds);
}

static int32_t enqueue_ours(void *arg, void *stream)
{
    return (int32_t)execution_enqueue(arg, stream);
}

static acr_status sample_calls(void *arg, int count, double *seconds)
{
    const contestant *c = arg;
    for (int i = 0; i < count; ++i) {
        char text[PEER_TEXT_BYTES] = "";
        if (c->contest->request->provider->call(c->peer, CALLS, enqueue_ours, c->execution, &seconds[i], text) != 0) {
            return acr__fail(ACR_UNSUPPORTED, "%s", text);
        }
    }
    return ACR_OK;
}

static acr_status record_peer(acr__graph **out, void *arg, int launches)
{
    contestant *c = arg;
    void *graph = NULL;
    c->text[0] = '\0';
    if (c->contest->request->provider->capture(c->peer, launches, &graph, c->text) != 0) {
        return acr__fail(ACR_UNSUPPORTED, "%s", c->text);
    }
    return c->contest->device->backend->graph_adopt(out, c->contest->device, graph, launches);
}

/* Readies a contestant for its samples. */
static acr_status make_ready(contestant *c)
{
    static const timer_limits limits = TIMER_LIMITS_DEFAULT;
    double seconds;
    if (c->contest->request->call_mode) {
        return sample_calls(c, 1, &seconds);
    }
    timer_work work = {c->contest->device, execution_enqueue, c->execution};
    return c->kernel ? timer_fill(&c->graph, &seconds, timer_record_work, &work, limits.stretch_s)
                     : timer_fill(&c->graph, &seconds, record_peer, c, limits.stretch_s);
}

/* The gate, then one of ours is ready; one that fails is counted and said. */
static acr_status admit_kernel(contest *t, const acr__kernel *kernel, contest_counts *counts)
{
    const contest_request *r = t->request;
    contestant *c = &t->ours[t->ours_count];
    *c = (contestant){.contest = t, .name = kernel->name, .kernel = kernel, .peer = PEER_OURS};
    acr_status status = conformance_check(&c->verdict, r->ctx, kernel, r->problem, r->ref);
    if (status != ACR_OK) {
        return status;
    }
    if (!c->verdict.pass) {
        ++counts->refused;
        fprintf(stderr, "FAIL %s: %s\n", kernel->name, c->verdict.failure);
        return ACR_OK;
    }
    ++t->ours_count; /* from here on contest_close frees it */
    status = execution_create(&c->execution, r->ctx, kernel, r->problem, r->ref, false,
                              r->overlap ? ACR_OVERLAP_PREVIOUS : 0, ALLOCATOR_ALIGNMENT);
    if (status == ACR_OK) {
        status = execution_run(c->execution);
    }
    return status == ACR_OK ? make_ready(c) : status;
}

static acr_status admit_ours(contest *t, contest_counts *counts)
{
    const char *pattern = t->request->pattern ? t->request->pattern : t->request->planned;
    acr_status status = ACR_OK;
    for (size_t i = 0; i < acr__kernel_count && status == ACR_OK; ++i) {
        const acr__kernel *kernel = acr__kernels[i];
        if (kernel_matches(kernel, pattern) && !acr__why_not(kernel, t->request->problem, &t->device->device)) {
            status = admit_kernel(t, kernel, counts);
        }
    }
    return status;
}

/* Peers describe tensors by their layout alone. */
static bool has_own_strides(const acr_problem *problem)
{
    acr_problem packed = *problem;
    const acr_strides none = {0, 0, 0};
    packed.q = packed.k = packed.v = packed.o = none;
    char with[ACR_PROBLEM_TEXT_MAX], without[ACR_PROBLEM_TEXT_MAX];
    return acr_problem_format(problem, with, sizeof with) != ACR_OK ||
           acr_problem_format(&packed, without, sizeof without) != ACR_OK || strcmp(with, without) != 0;
}

/* Why no peer can be given the problem, or NULL. */
static const char *inexpressible(const acr_problem *p)
{
    if (p->dtype == ACR_E4M3) {
        return "PyTorch's attention has no e4m3";
    }
    if (p->flags & ACR_KV_LENS) {
        return "PyTorch's attention takes no key lengths";
    }
    if (p->flags & ACR_PACKED) {
        return "PyTorch's attention takes no packed batches";
    }
    if (p->flags & ACR_WANT_LSE) {
        return "PyTorch's attention returns no log-sum-exp";
    }
    if (p->mask == ACR_MASK_CAUSAL && p->q_len != p->kv_len) {
        return "PyTorch's causal flag is top-left, this mask is bottom-right";
    }
    return has_own_strides(p) ? "peers are given packed tensors only" : NULL;
}

static acr_status begin_peers(const contest *t)
{
    const acr_problem *p = &t->request->ref->problem; /* whose scale is set */
    const acr_problem *laid_out = t->request->problem;
    const char *reason = inexpressible(laid_out);
    if (reason) {
        return acr__fail(ACR_UNSUPPORTED, "%s", reason);
    }
    const peer_problem problem = {
        .batch = p->batch,
        .q_heads = p->q_heads,
        .kv_heads = p->kv_heads,
        .q_len = p->q_len,
        .kv_len = p->kv_len,
        .qk_dim = p->qk_dim,
        .v_dim = p->v_dim,
        .device = t->request->ordinal,
        .dtype = (int32_t)p->dtype,
        .causal = p->mask != ACR_MASK_NONE,
        .bshd = laid_out->layout == ACR_BSHD,
        .scale = (double)p->scale,
        .q = t->request->ref->q,
        .k = t->request->ref->k,
        .v = t->request->ref->v,
    };
    char text[PEER_TEXT_BYTES] = "";
    return t->request->provider->begin(&problem, text) == 0 ? ACR_OK : acr__fail(ACR_UNSUPPORTED, "%s", text);
}

static void leave_out(contestant *c, const char *reason)
{
    c->out = true;
    snprintf(c->text, sizeof c->text, "%s", reason);
}

/* A peer that cannot is left out with its reason; only a lost device ends the contest. */
static acr_status admit_peers(contest *t)
{
    const peer_provider *provider = t->request->provider;
    if (begin_peers(t) != ACR_OK) {
        snprintf(t->no_peers, sizeof t->no_peers, "%s", acr_last_error());
        return ACR_OK;
    }
    for (int32_t i = 0; i < provider->count && t->peer_count < PEERS_MAX; ++i) {
        contestant *c = &t->peers[t->peer_count++];
        *c = (contestant){.contest = t, .name = provider->names[i], .peer = i};
        acr_status status = make_ready(c);
        if (status == ACR_DEVICE_FAULT) {
            return status;
        }
        if (status != ACR_OK) {
            leave_out(c, acr_last_error());
        }
    }
    return ACR_OK;
}

/* ---- Timing ---- */

static acr_status meet(encounter *out, contest *t, contestant *theirs, contestant *ours, double noise_floor)
{
    interleave_sample *sample = t->request->call_mode ? sample_calls : sample_stream;
    const interleave_subject baseline = {sample, theirs}, candidate = {sample, ours};
    const interleave_design design = {
        .blocks = t->request->blocks,
        .warm_up_s = 50e-3,
        .budget_s = 5.0,
        .seed = t->request->seed,
        .disturbed = gpu_monitor_throttled,
        .disturbed_arg = t->monitor,
    };
    interleave_result r;
    acr_status status = interleave_run(&r, &baseline, &candidate, &design);
    if (status != ACR_OK) {
        return status;
    }
    size_t blocks = (size_t)r.blocks, samples = blocks * INTERLEAVE_BLOCK_SAMPLES;
    if (theirs == ours) { /* the control makes the floor that it is then held to */
        t->noise_floor = noise_floor = stats_noise_floor(r.views, blocks);
    }
    *out = (encounter){.ours = stats_summarise(r.candidate_us, samples),
                       .theirs = stats_summarise(r.baseline_us, samples),
                       .comparison = stats_compare(r.views, blocks, noise_floor),
                       .discarded = r.discarded};
    interleave_free(&r);
    return ACR_OK;
}

/* An output as far off as this is no output of this problem: what was timed is not what was meant. Less may be a peer's
 * own way of rounding, and is shown as its error. */
static bool is_nonsense(const verdict *v)
{
    static const double FAR_BEYOND = 10;
    return !(v->err_rms <= FAR_BEYOND * v->tol_rms);
}

static acr_status judge_peer(contestant *c)
{
    const contest_request *r = c->contest->request;
    const acr_problem *p = r->problem;
    size_t bytes = (size_t)(p->batch * p->q_heads * p->q_len * p->v_dim) * (size_t)acr__dtype_bytes(p->out_dtype);
    char text[PEER_TEXT_BYTES] = "";
    run_output output = {.o = malloc(bytes), .o_bytes = bytes};
    if (!output.o) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %zu bytes of output", bytes);
    }
    if (r->provider->output(c->peer, output.o, (int64_t)bytes, text) != 0) {
        leave_out(c, text);
    } else {
        conformance_judge(&c->verdict, r->ref, &output);
        if (is_nonsense(&c->verdict)) {
            leave_out(c, c->verdict.failure);
        }
    }
    run_output_free(&output);
    return ACR_OK;
}

/* The first of ours meets every peer; the best and the standard one are known afterwards. */
static acr_status meet_peers(contest *t)
{
    for (int i = 0; i < t->peer_count; ++i) {
        contestant *peer = &t->peers[i];
        if (peer->out) {
            continue;
        }
        acr_status status = meet(&peer->encounter, t, peer, &t->ours[0], t->noise_floor);
        if (status == ACR_OK) {
            status = judge_peer(peer);
        }
        if (status != ACR_OK) {
            return status;
        }
        if (peer->out) {
            continue;
        }
        if (!t->best || peer->encounter.theirs.p50 < t->best->encounter.theirs.p50) {
            t->best = peer;
        }
        size_t length = strlen(peer->name);
        static const char ending[] = "-default";
        if (length >= sizeof ending && strcmp(peer->name + length + 1 - sizeof ending, ending) == 0) {
            t->standard = peer;
        }
    }
    return ACR_OK;
}

static acr_status judge_ours(contestant *c)
{
    run_output output;
    acr_status status = execution_collect(c->execution, &output);
    if (status == ACR_OK) {
        conformance_judge(&c->verdict, c->contest->request->ref, &output);
        run_output_free(&output);
    }
    return status;
}

/* Each of ours gets its encounter with the best peer, or without one with itself, and its verdict. */
static acr_status meet_best(contest *t)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < t->ours_count && status == ACR_OK; ++i) {
        contestant *c = &t->ours[i];
        if (i == 0) {
            c->encounter = t->best ? t->best->encounter : t->control;
        } else {
            contestant *rival = t->best ? &t->peers[t->best - t->peers] : &t->ours[0];
            status = meet(&c->encounter, t, rival, c, t->noise_floor);
        }
        if (status == ACR_OK) {
            status = judge_ours(c);
        }
    }
    return status;
}

static acr_status measure(contest *t)
{
    acr_status status = meet(&t->control, t, &t->ours[0], &t->ours[0], 0);
    if (status == ACR_OK) {
        status = meet_peers(t);
    }
    return status == ACR_OK ? meet_best(t) : status;
}

/* ---- Output ---- */

const char *contest_tier(double ratio_low, double noise_floor)
{
    static const struct {
        double from;
        const char *name;
    } tiers[] = {{13, "A+"}, {5, "A"}, {3, "B+"}, {2, "B"}};
    for (size_t i = 0; i < sizeof tiers / sizeof tiers[0]; ++i) {
        if (ratio_low >= tiers[i].from) {
            return tiers[i].name;
        }
    }
    return ratio_low >= 1 / (1 + noise_floor) ? "C" : "-";
}

static const char *tier_of(const contest *t, const encounter *e)
{
    return contest_tier(e->comparison.ci95.low, t->noise_floor);
}

static void print_header(const contest *t)
{
    const contest_request *r = t->request;
    char floor_us[24];
    printf("%s on %s, %s mode%s; peers: %s\n", r->text, t->device->device.name, r->call_mode ? "call" : "stream",
           r->overlap ? ", ours overlapping" : "", r->provider->version);
    printf("floor %s us, bound by %s; noise floor %.1f %%, control %s\n", us_text(floor_us, 1e6 * r->floor->warm_s),
           r->floor->warm_bound, 100 * t->noise_floor, stats_verdict_text(t->control.comparison.verdict));
    printf("  %-44s %9s %9s %9s %5s %8s %7s %15s %-9s %8s\n", "", "p50 us", "p90", "p99", "n",
           r->problem->q_len == 1 ? "GB/s" : "TFLOP/s", "ratio", "95 % interval", "verdict", "max err");
}

static void print_row(const contest *t, const contestant *c, const stats_summary *s, bool compared)
{
    const demand *d = t->request->demand;
    char p50[24], p90[24], p99[24], ratio[16] = "", interval[48] = "";
    if (compared) {
        const stats_comparison *k = &c->encounter.comparison;
        snprintf(ratio, sizeof ratio, "%.3f", k->speedup);
        snprintf(interval, sizeof interval, "%.3f - %.3f", k->ci95.low, k->ci95.high);
    }
    printf("%c %-44s %9s %9s %9s %5zu %8.4g %7s %15s %-9s %8.2g%s\n", c == t->best ? '*' : ' ', c->name,
           us_text(p50, s->p50), us_text(p90, s->p90), us_text(p99, s->p99), s->count,
           t->request->problem->q_len == 1 ? d->bytes / s->p50 / 1e3 : d->flops / s->p50 / 1e6, ratio, interval,
           compared ? stats_verdict_text(c->encounter.comparison.verdict) : "", c->verdict.err_max,
           c->verdict.pass ? "" : " beyond tolerance");
}

static void print_summary(const contest *t)
{
    int discarded = t->control.discarded;
    for (int i = 0; i < t->peer_count; ++i) {
        discarded += t->peers[i].encounter.discarded;
        if (t->peers[i].out) {
            printf("  %-44s takes no part: %s\n", t->peers[i].name, t->peers[i].text);
        } else if (*t->peers[i].text) {
            printf("  %-44s %s\n", t->peers[i].name, t->peers[i].text);
        }
    }
    if (*t->no_peers) {
        printf("  no peer takes part: %s\n", t->no_peers);
    }
    printf("ratio: how many times as fast ours is as the peer; of ours, as the best peer (*). %d blocks discarded\n",
           discarded);
    if (t->best && !t->ours[0].out) {
        printf("%s is %.2f times as fast as %s, tier %s", t->ours[0].name, t->best->encounter.comparison.speedup,
               t->best->name, tier_of(t, &t->best->encounter));
        if (t->standard) {
            printf("; %.2f times as fast as %s, tier %s", t->standard->encounter.comparison.speedup, t->standard->name,
                   tier_of(t, &t->standard->encounter));
        }
        printf("\n");
    }
    printf("\n");
    fflush(stdout);
}

static void print_table(const contest *t)
{
    print_header(t);
    for (int i = 0; i < t->ours_count; ++i) {
        const contestant *c = &t->ours[i];
        if (!c->out) {
            print_row(t, c, &c->encounter.ours, t->best != NULL);
        }
    }
    for (int i = 0; i < t->peer_count; ++i) {
        const contestant *c = &t->peers[i];
        if (!c->out) {
            print_row(t, c, &c->encounter.theirs, !t->ours[0].out);
        }
    }
    print_summary(t);
}

static json_t *record_of(const contest *t, const contestant *c)
{
    const contest_request *r = t->request;
    const bench_conditions conditions = {&t->device->device, r->text,  r->call_mode ? "call" : "stream",
                                         r->demand,          r->floor, r->seed};
    json_t *json = bench_record(&conditions, c->kernel ? &c->encounter.ours : &c->encounter.theirs,
                                c->graph ? c->graph->launches : CALLS, c->kernel && r->overlap, c->verdict.err_max,
                                &t->before, &t->after);
    json_object_set_new(json, "blocks", json_integer((json_int_t)c->encounter.comparison.blocks));
    json_object_set_new(json, "discarded", json_integer(c->encounter.discarded));
    return json;
}

static json_t *interval_json(const stats_interval *interval)
{
    return json_pack("[o,o]", json_number_or_null(interval->low), json_number_or_null(interval->high));
}

static json_t *record_of_ours(const contest *t, const contestant *c)
{
    json_t *json = record_of(t, c);
    bench_record_kernel(json, c->kernel);
    json_object_set_new(json, "planned", json_boolean(strcmp(c->name, t->request->planned) == 0));
    json_object_set_new(json, "noise_floor", json_real(t->noise_floor));
    json_object_set_new(json, "control", json_string(stats_verdict_text(t->control.comparison.verdict)));
    if (t->best) {
        const stats_comparison *k = &c->encounter.comparison;
        json_object_set_new(json, "best_peer", json_string(t->best->name));
        json_object_set_new(json, "ratio_to_best_peer", json_real(k->speedup));
        json_object_set_new(json, "ratio_ci95", interval_json(&k->ci95));
        json_object_set_new(json, "verdict", json_string(stats_verdict_text(k->verdict)));
        json_object_set_new(json, "tier", json_string(tier_of(t, &c->encounter)));
    }
    if (t->standard && c == &t->ours[0]) {
        const encounter *e = &t->standard->encounter;
        json_object_set_new(json, "default_peer", json_string(t->standard->name));
        json_object_set_new(json, "ratio_to_default", json_real(e->comparison.speedup));
        json_object_set_new(json, "ratio_to_default_ci95", interval_json(&e->comparison.ci95));
        json_object_set_new(json, "tier_to_default", json_string(tier_of(t, e)));
    }
    return json;
}

static json_t *record_of_peer(const contest *t, const contestant *c)
{
    json_t *json = record_of(t, c);
    json_object_set_new(json, "peer", json_string(c->name));
    json_object_set_new(json, "peer_version", json_string(t->request->provider->version));
    json_object_set_new(json, "within_tolerance", json_boolean(c->verdict.pass));
    return json;
}

/* Of ours only what is right and possible leaves a record. */
static void refuse_wrong(contest *t, contest_counts *counts)
{
    for (int i = 0; i < t->ours_count; ++i) {
        contestant *c = &t->ours[i];
        bool below_floor = c->encounter.ours.p50 < 0.9e6 * t->request->floor->warm_s;
        c->out = !c->verdict.pass || below_floor;
        *(c->out ? &counts->refused : &counts->measured) += 1;
        if (c->out) {
            fprintf(stderr, "REFUSED %s: %s\n", c->name,
                    c->verdict.pass ? "below 0.9 of the floor: the measurement or the kernel is wrong"
                                    : c->verdict.failure);
        }
    }
}

static void append_records(const contest *t, json_t *records)
{
    for (int i = 0; i < t->ours_count; ++i) {
        if (!t->ours[i].out) {
            json_array_append_new(records, record_of_ours(t, &t->ours[i]));
        }
    }
    for (int i = 0; i < t->peer_count; ++i) {
        if (!t->peers[i].out) {
            json_array_append_new(records, record_of_peer(t, &t->peers[i]));
        }
    }
}

/* ---- The whole ---- */

static void contest_close(contest *t)
{
    for (int i = 0; i < t->ours_count; ++i) {
        t->device->backend->graph_free(t->ours[i].graph);
        execution_destroy(t->ours[i].execution);
    }
    for (int i = 0; i < t->peer_count; ++i) {
        t->device->backend->graph_free(t->peers[i].graph);
    }
    t->request->provider->end();
    gpu_monitor_close(t->monitor);
    free(t->ours);
    free(t->peers);
}

static acr_status hold(contest *t, json_t *records, contest_counts *counts)
{
    acr_status status = admit_ours(t, counts);
    if (status != ACR_OK || t->ours_count == 0) {
        return status;
    }
    status = admit_peers(t);
    gpu_state_read(&t->before, &t->device->device, t->request->ordinal);
    if (status == ACR_OK) {
        status = measure(t);
    }
    gpu_state_read(&t->after, &t->device->device, t->request->ordinal);
    if (status != ACR_OK) {
        return status;
    }
    refuse_wrong(t, counts);
    append_records(t, records);
    if (!t->request->quiet) {
        print_table(t);
    }
    return ACR_OK;
}

acr_status contest_run(const contest_request *request, json_t *records, contest_counts *counts)
{
    contest t = {.request = request, .device = acr__ctx_backend_device(request->ctx)};
    t.monitor = gpu_monitor_open(&t.device->device, request->ordinal);
    t.ours = calloc(acr__kernel_count, sizeof *t.ours);
    t.peers = calloc(PEERS_MAX, sizeof *t.peers);
    acr_status status =
        t.ours && t.peers ? hold(&t, records, counts) : acr__fail(ACR_NO_MEMORY, "no memory for the contestants");
    contest_close(&t);
    return status;
}
