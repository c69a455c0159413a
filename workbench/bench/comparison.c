/* Ours against peers, see comparison.h. */
#include "comparison.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/text.h"
#include "bench_record.h"
#include "check/conformance.h"
#include "interleave.h"
#include "kernels/kernel_choice.h"
#include "timed_kernel.h"
#include "timer.h"

/* How one comparison came out: of ours, as the candidate, with something else. */
typedef struct pair {
    stats_summary ours, theirs;
    stats_comparison comparison;
    int discarded;
} pair;

/* A provider in this comparison. */
typedef struct bench_of_peers {
    const peer_provider *provider;
    char none[PEER_TEXT_BYTES]; /* why none of its peers takes part; "" otherwise */
} bench_of_peers;

typedef struct entrant {
    const struct comparison *comparison;
    const char *name;
    const acr__kernel *kernel; /* of ours; NULL = a peer */
    /* A peer's, and its number there. Of ours: who makes the calls in call mode, the same as its rival's. */
    const peer_provider *provider;
    int32_t peer;
    timed_kernel *timed; /* ours */
    acr__graph *graph;   /* a peer's, not in call modes */
    bool uncaptured;     /* a peer's calls are made by its provider: in a stretch as many as: */
    int stretch;
    pace_energy energy; /* a peer's, as timed_kernel_energy */
    int32_t next_set;   /* a peer's next inputs, while its provider enqueues */
    bool out;           /* takes no part, because of: */
    char text[PEER_TEXT_BYTES];
    verdict verdict; /* of what the timed launches wrote */
    pair pair;       /* a peer's with the first of ours; that of ours with the best peer, or with itself */
} entrant;

typedef struct comparison {
    const comparison_request *request;
    acr__backend_device *device;
    watch watched;
    int sets; /* of a peer's inputs */
    bench_of_peers providers[COMPARISON_PROVIDERS_MAX];
    entrant *ours, *peers;
    int ours_count, peer_count;
    pair control; /* the first of ours with itself */
    double noise_floor;
    const entrant *best, *standard; /* peers: the fastest, and what the library takes by itself; NULL = none */
} comparison;

/* ---- Taking part ---- */

static int32_t enqueue_ours(void *arg, void *stream)
{
    return (int32_t)timed_kernel_enqueue(arg, stream);
}

/* An acr__enqueue: one call of a peer whose provider enqueues. */
static acr_status enqueue_peer(void *arg, void *stream)
{
    entrant *c = arg;
    const int32_t set = c->next_set;
    c->next_set = (set + 1) % c->comparison->sets;
    c->text[0] = '\0';
    if (c->provider->enqueue(c->peer, set, stream, c->text) != 0) {
        return acr__fail(ACR_UNSUPPORTED, "%s", c->text);
    }
    return ACR_OK;
}

/* Call modes: by the provider's own loop, in its own language, or by ours where it has none. */
static acr_status sample_calls(void *arg, int count, double *seconds)
{
    entrant *c = arg;
    const int calls = mode_calls(c->comparison->request->mode);
    for (int i = 0; i < count; ++i) {
        acr_status status = ACR_OK;
        char text[PEER_TEXT_BYTES] = "";
        if (!c->provider->call) {
            status = c->kernel ? timer_calls(c->comparison->device, timed_kernel_enqueue, c->timed, calls, &seconds[i])
                               : timer_calls(c->comparison->device, enqueue_peer, c, calls, &seconds[i]);
        } else if (c->provider->call(c->kernel ? PEER_OURS : c->peer, calls, enqueue_ours, c->timed, &seconds[i],
                                     text) != 0) {
            status = acr__fail(ACR_UNSUPPORTED, "%s", text);
        }
        if (status != ACR_OK) {
            return status;
        }
    }
    return ACR_OK;
}

static acr_status make_stretches(entrant *c, int launches, int count, double *seconds)
{
    for (int i = 0; i < count; ++i) {
        c->text[0] = '\0';
        if (c->provider->stretch(c->peer, launches, &seconds[i], c->text) != 0) {
            return acr__fail(ACR_UNSUPPORTED, "%s", c->text);
        }
    }
    return ACR_OK;
}

static acr_status replay_peer(void *arg, int count, double *seconds)
{
    entrant *c = arg;
    return c->uncaptured ? make_stretches(c, c->stretch, count, seconds)
                         : c->comparison->device->backend->timing->graph_time(c->graph, count, seconds);
}

/* Launches that a sample of a peer makes; of a stretch also the two made alone and the one more
 * (peer_interface.h). */
static int sample_launches(const entrant *c)
{
    return c->uncaptured ? c->stretch + 3 : c->graph->launches;
}

static acr_status sample_peer(void *arg, int count, double *seconds)
{
    entrant *c = arg;
    const comparison *t = c->comparison;
    const bench_mode mode = t->request->mode;
    if (mode_is_call(mode)) {
        return sample_calls(c, count, seconds);
    }
    if (mode_is_paced(mode)) {
        const pace_request paced = {replay_peer, c, t->device, sample_launches(c), t->watched.monitor, &c->energy};
        return pace_samples(&paced, mode, count, seconds);
    }
    return mode == MODE_COLD ? t->device->backend->timing->graph_time_cold(c->graph, count, seconds)
                             : replay_peer(c, count, seconds);
}

static acr_status record_peer(acr__graph **out, void *arg, int launches)
{
    entrant *c = arg;
    acr__backend_device *device = c->comparison->device;
    void *graph = NULL;
    if (!c->provider->capture) {
        c->next_set = 0;
        return device->backend->timing->graph_record(out, device, enqueue_peer, c, launches);
    }
    c->text[0] = '\0';
    if (c->provider->capture(c->peer, launches, &graph, c->text) != 0) {
        return acr__fail(ACR_UNSUPPORTED, "%s", c->text);
    }
    if (!graph) {
        c->uncaptured = true;
        return acr__fail(ACR_UNSUPPORTED, "its calls are not captured: measure in one of the modes stream, sustained, "
                                          "full-clock, call and call-single");
    }
    return device->backend->timing->graph_adopt(out, device, graph, launches);
}

/* A peer whose calls cannot be captured: a stretch of them is as long as the mode lets it be, since its ends are seen
 * by the host, which is a few microseconds late. */
static acr_status ready_stretch(entrant *c)
{
    static const double SHORTEST_S = 50e-6; /* the host makes a call in less */
    const double stretch_s = c->comparison->request->mode == MODE_FULL_CLOCK ? 3e-3 : 20e-3;
    double probes[2]; /* the first compiles */
    const acr_status status = make_stretches(c, 2, 2, probes);
    if (status != ACR_OK) {
        return status;
    }
    if (probes[1] < SHORTEST_S) {
        return acr__fail(ACR_UNSUPPORTED,
                         "a call takes it %.0f us, so that the host shows in calls that are not captured: "
                         "measure in call mode",
                         1e6 * probes[1]);
    }
    c->stretch = (int)fmax(2, ceil(stretch_s / probes[1]));
    return ACR_OK;
}

/* Readies a peer for its samples. */
static acr_status ready_peer(entrant *c)
{
    const bench_mode mode = c->comparison->request->mode;
    double seconds;
    acr_status filled;
    switch (mode) {
    case MODE_STREAM:
    case MODE_SUSTAINED:
    case MODE_FULL_CLOCK:
    case MODE_ROTATING:
        filled = timer_fill(&c->graph, &seconds, record_peer, c, TIMER_STRETCH_S, c->comparison->sets);
        return c->uncaptured && mode != MODE_ROTATING ? ready_stretch(c) : filled;
    case MODE_COLD: {
        acr_status status = record_peer(&c->graph, c, 1);
        return status == ACR_OK ? sample_peer(c, 1, &seconds) : status;
    }
    default:
        return sample_calls(c, 1, &seconds);
    }
}

/* The gate, then one of ours is ready; one that fails is counted and said. */
static acr_status admit_kernel(comparison *t, const acr__kernel *kernel, comparison_counts *counts)
{
    const comparison_request *r = t->request;
    entrant *c = &t->ours[t->ours_count];
    *c = (entrant){.comparison = t, .name = kernel->name, .kernel = kernel, .provider = r->providers[0]};
    acr_status status = conformance_check(&c->verdict, r->ctx, kernel, r->problem, r->ref);
    if (status != ACR_OK) {
        return status;
    }
    if (!c->verdict.pass) {
        ++counts->refused;
        fprintf(stderr, "FAIL %s: %s\n", kernel->name, c->verdict.failure);
        return ACR_OK;
    }
    ++t->ours_count; /* from here on comparison_close frees it */
    const timed_kernel_request wanted = {
        .ctx = r->ctx,
        .kernel = kernel,
        .problem = r->problem,
        .ref = r->ref,
        .mode = r->mode,
        .flags = r->overlap ? ACR_OVERLAP_PREVIOUS : 0,
        .seed = r->seed,
        .monitor = t->watched.monitor,
        .step = r->step,
        .take = sample_calls,
        .take_arg = c,
    };
    return timed_kernel_create(&c->timed, &wanted);
}

static acr_status admit_ours(comparison *t, comparison_counts *counts)
{
    const kernel_patterns planned = {{t->request->planned}, 1};
    const kernel_patterns *patterns = t->request->patterns->count > 0 ? t->request->patterns : &planned;
    acr_status status = ACR_OK;
    for (size_t i = 0; i < kernel_total() && status == ACR_OK; ++i) {
        const acr__kernel *kernel = kernel_at(i);
        if (kernel_matches(kernel, patterns) && !acr__why_not(kernel, t->request->problem, &t->device->device)) {
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
    packed.d_o = packed.dq = packed.dk = packed.dv = none;
    char with[ACR_PROBLEM_TEXT_MAX], without[ACR_PROBLEM_TEXT_MAX];
    return acr_problem_format(problem, with, sizeof with) != ACR_OK ||
           acr_problem_format(&packed, without, sizeof without) != ACR_OK || strcmp(with, without) != 0;
}

static bool is_scaled(float scale)
{
    return scale != 0 && scale != 1;
}

/* Why no peer can be given the problem, or NULL. What only some cannot, their providers say. */
static const char *inexpressible(const acr_problem *p)
{
    if (is_scaled(p->q_scale) || is_scaled(p->k_scale) || is_scaled(p->v_scale)) {
        return "peers are given no scales of e4m3";
    }
    if (p->flags & ACR_KV_LENS) {
        return "peers are given no key lengths";
    }
    if (p->kv_dtype != ACR_DTYPE_DEFAULT || p->flags & ACR_V_IN_K) {
        return "peers are given keys and values of their own in q's type";
    }
    if (p->flags & ACR_PACKED) {
        return "PyTorch's attention takes no packed batches";
    }
    if (p->flags & ACR_WANT_LSE && p->pass != ACR_BACKWARD) {
        return "peers return no log-sum-exp";
    }
    if (p->flags & (ACR_KV_STARTS | ACR_RANGES | ACR_TREE)) {
        return "peers are given no key starts, ranges or trees";
    }
    if (p->pass == ACR_BACKWARD && p->grad_dtype != p->dtype) {
        return "peers give gradients in q's type";
    }
    if (p->pass == ACR_BACKWARD && p->flags & ACR_SINKS) {
        return "peers give no gradients of sinks";
    }
    return has_own_strides(p) ? "peers are given packed tensors only" : NULL;
}

static int32_t mask_of(const acr_problem *p)
{
    if (p->mask == ACR_MASK_NONE) {
        return PEER_MASK_NONE;
    }
    return p->mask == ACR_MASK_CAUSAL && p->q_len != p->kv_len ? PEER_MASK_BOTTOM_RIGHT : PEER_MASK_TOP_LEFT;
}

static acr_status begin_peers(const comparison *t, const peer_provider *provider)
{
    const acr_problem *p = &t->request->ref->problem; /* whose scale is set */
    const acr_problem *laid_out = t->request->problem;
    const char *reason = inexpressible(laid_out);
    if (reason) {
        return acr__fail(ACR_UNSUPPORTED, "%s", reason);
    }
    const int64_t bias_bytes = acr__buffer_bytes(p, ACR__BIAS, (acr__rows){0});
    const int64_t bias_elements = p->bias_dtype ? bias_bytes / acr__dtype_bytes(p->bias_dtype) : 0;
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
        .mask = mask_of(p),
        .bshd = laid_out->layout == ACR_BSHD,
        .sets = t->sets,
        .pass = p->pass != ACR_BACKWARD ? PEER_FORWARD
                : t->request->step      ? PEER_STEP
                                        : PEER_BACKWARD,
        .scale = (double)p->scale,
        .q = t->request->ref->buffers.q,
        .k = t->request->ref->buffers.k,
        .v = t->request->ref->buffers.v,
        .window_left = p->window_left,
        .window_right = p->window_right,
        .chunk = p->chunk,
        .softcap = (double)p->softcap,
        .sinks = t->request->ref->buffers.sinks,
        .slopes = t->request->ref->buffers.slopes,
        .bias = t->request->ref->buffers.bias,
        .bias_batch = p->bias.batch,
        .bias_head = p->bias.head,
        .bias_row = p->bias.row,
        .bias_elements = bias_elements,
        .bias_dtype = (int32_t)p->bias_dtype,
        .out_dtype = (int32_t)p->out_dtype,
        .d_o = t->request->ref->buffers.d_o,
    };
    char text[PEER_TEXT_BYTES] = "";
    return provider->begin(&problem, text) == 0 ? ACR_OK : acr__fail(ACR_UNSUPPORTED, "%s", text);
}

static void leave_out(entrant *c, const char *reason)
{
    c->out = true;
    snprintf(c->text, sizeof c->text, "%s", reason);
}

/* A peer that cannot is left out with its reason; only a lost device ends the comparison. */
static acr_status admit_from(comparison *t, bench_of_peers *from)
{
    const peer_provider *provider = from->provider;
    if (begin_peers(t, provider) != ACR_OK) {
        snprintf(from->none, sizeof from->none, "%s", acr_last_error());
        return ACR_OK;
    }
    for (int32_t i = 0; i < provider->count && t->peer_count < PEERS_MAX; ++i) {
        entrant *c = &t->peers[t->peer_count++];
        *c = (entrant){.comparison = t, .name = provider->names[i], .provider = provider, .peer = i};
        acr_status status = ready_peer(c);
        if (status == ACR_DEVICE_FAULT) {
            return status;
        }
        if (status != ACR_OK) {
            leave_out(c, acr_last_error());
        }
    }
    return ACR_OK;
}

static acr_status admit_peers(comparison *t)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < t->request->provider_count && status == ACR_OK; ++i) {
        status = admit_from(t, &t->providers[i]);
    }
    return status;
}

/* ---- Timing ---- */

static interleave_side side_of(entrant *c)
{
    return c->kernel ? (interleave_side){timed_kernel_sample, c->timed} : (interleave_side){sample_peer, c};
}

static acr_status meet(pair *out, comparison *t, entrant *theirs, entrant *ours, double noise_floor)
{
    ours->provider = theirs->provider; /* so that both are called in the same way */
    const interleave_side baseline = side_of(theirs), candidate = side_of(ours);
    const interleave_design design = {
        .blocks = t->request->blocks,
        .warm_up_s = 50e-3,
        .budget_s = 5.0,
        .seed = t->request->seed,
        .disturbed = watch_disturbed,
        .disturbed_arg = &t->watched,
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
    *out = (pair){.ours = stats_summarise(r.candidate_us, samples),
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

/* dq, dk and dv out of the one memory in which a peer leaves them. */
static bool split_gradients(run_output *to, const reference *ref, const char *from)
{
    const size_t elem_bytes = (size_t)acr__dtype_bytes(ref->problem.grad_dtype);
    for (int i = 0; i < 3; ++i) {
        to->grad_bytes[i] = (size_t)ref->grads->elements[i] * elem_bytes;
        to->grads[i] = malloc(to->grad_bytes[i]);
        if (!to->grads[i]) {
            return false;
        }
        memcpy(to->grads[i], from, to->grad_bytes[i]);
        from += to->grad_bytes[i];
    }
    return true;
}

/* What a peer's output has: of a backward problem dq, dk and dv. */
static size_t output_bytes(const reference *ref)
{
    const acr_problem *p = &ref->problem;
    if (!ref->grads) {
        return (size_t)(p->batch * p->q_heads * p->q_len * p->v_dim) * (size_t)acr__dtype_bytes(p->out_dtype);
    }
    const int64_t *elements = ref->grads->elements;
    return (size_t)(elements[0] + elements[1] + elements[2]) * (size_t)acr__dtype_bytes(p->grad_dtype);
}

static acr_status judge_peer(entrant *c)
{
    const reference *ref = c->comparison->request->ref;
    const size_t bytes = output_bytes(ref);
    char text[PEER_TEXT_BYTES] = "";
    run_output output = {.o = malloc(bytes), .o_bytes = bytes};
    acr_status status = output.o ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for %zu bytes of output", bytes);
    if (status == ACR_OK && c->provider->output(c->peer, output.o, (int64_t)bytes, text) != 0) {
        leave_out(c, text);
    } else if (status == ACR_OK && ref->grads && !split_gradients(&output, ref, output.o)) {
        status = acr__fail(ACR_NO_MEMORY, "no memory for a peer's gradients");
    } else if (status == ACR_OK) {
        conformance_judge(&c->verdict, ref, &output);
        if (is_nonsense(&c->verdict)) {
            leave_out(c, c->verdict.failure);
        }
    }
    run_output_free(&output);
    return status;
}

/* The first of ours meets every peer; the best and the standard one are known afterwards. */
static acr_status meet_peers(comparison *t)
{
    for (int i = 0; i < t->peer_count; ++i) {
        entrant *peer = &t->peers[i];
        if (peer->out) {
            continue;
        }
        acr_status status = meet(&peer->pair, t, peer, &t->ours[0], t->noise_floor);
        if (status == ACR_OK) {
            status = judge_peer(peer);
        }
        if (status != ACR_OK) {
            return status;
        }
        if (peer->out) {
            continue;
        }
        if (!t->best || peer->pair.theirs.p50 < t->best->pair.theirs.p50) {
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

/* Each of ours gets its pair with the best peer, or without one with itself, and its verdict. */
static acr_status meet_best(comparison *t)
{
    acr_status status = ACR_OK;
    for (int i = 0; i < t->ours_count && status == ACR_OK; ++i) {
        entrant *c = &t->ours[i];
        if (i == 0) {
            c->pair = t->best ? t->best->pair : t->control;
        } else {
            entrant *rival = t->best ? &t->peers[t->best - t->peers] : &t->ours[0];
            status = meet(&c->pair, t, rival, c, t->noise_floor);
        }
        if (status == ACR_OK) {
            status = timed_kernel_judge(c->timed, &c->verdict);
        }
    }
    return status;
}

static acr_status measure(comparison *t)
{
    acr_status status = meet(&t->control, t, &t->ours[0], &t->ours[0], 0);
    if (status == ACR_OK) {
        status = meet_peers(t);
    }
    return status == ACR_OK ? meet_best(t) : status;
}

/* ---- Output ---- */

const char *comparison_tier(double ratio_low, double noise_floor)
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

static const char *tier_of(const comparison *t, const pair *e)
{
    return comparison_tier(e->comparison.ci95.low, t->noise_floor);
}

static void print_header(const comparison *t)
{
    const comparison_request *r = t->request;
    char floor_us[24];
    printf("%s%s on %s, %s mode%s; peers:", r->text, r->step ? " behind its forward pass" : "", t->device->device.name,
           mode_name(r->mode), r->overlap ? ", ours overlapping" : "");
    for (int i = 0; i < r->provider_count; ++i) {
        printf("%s %s", i ? ";" : "", r->providers[i]->version);
    }
    printf("\nfloor %s us, bound by %s; noise floor %.1f %%, control %s\n",
           us_text(floor_us, 1e6 * mode_floor_s(r->mode, r->floor)), mode_floor_bound(r->mode, r->floor),
           100 * t->noise_floor, stats_verdict_text(t->control.comparison.verdict));
    if (r->mode == MODE_COLD) {
        printf("no launch at all: %s us, part of each time\n", us_text(floor_us, r->empty_us));
    }
    printf("  %-44s %9s %9s %9s %5s %8s %7s %15s %-9s %8s\n", "", "p50 us", "p90", "p99", "n",
           r->problem->q_len == 1 ? "GB/s" : "TFLOP/s", "ratio", "95 % interval", "verdict", "max err");
}

static void print_row(const comparison *t, const entrant *c, const stats_summary *s, bool compared)
{
    const problem_work *d = t->request->work;
    char p50[24], p90[24], p99[24], ratio[16] = "", interval[48] = "";
    if (compared) {
        const stats_comparison *k = &c->pair.comparison;
        snprintf(ratio, sizeof ratio, "%.3f", k->speedup);
        snprintf(interval, sizeof interval, "%.3f - %.3f", k->ci95.low, k->ci95.high);
    }
    printf("%c %-44s %9s %9s %9s %5zu %8.4g %7s %15s %-9s %8.2g%s\n", c == t->best ? '*' : ' ', c->name,
           us_text(p50, s->p50), us_text(p90, s->p90), us_text(p99, s->p99), s->count,
           t->request->problem->q_len == 1 ? d->bytes / s->p50 / 1e3 : d->flops / s->p50 / 1e6, ratio, interval,
           compared ? stats_verdict_text(c->pair.comparison.verdict) : "", c->verdict.err_max,
           c->verdict.pass ? "" : " beyond tolerance");
}

static double joules_of(const entrant *c)
{
    const pace_energy energy = c->kernel ? timed_kernel_energy(c->timed) : c->energy;
    return pace_joules(&energy);
}

/* Sustained mode: what a launch takes of the card's power, and what it gives for it. */
static void print_energy(const comparison *t, const entrant *c)
{
    const double joules = joules_of(c);
    if (!c->out && joules > 0) {
        printf("  %-44s %.4g J a launch, %.4g GFLOP a joule\n", c->name, joules,
               t->request->work->flops / joules / 1e9);
    }
}

static void print_summary(const comparison *t)
{
    for (int i = 0; i < t->ours_count; ++i) {
        print_energy(t, &t->ours[i]);
    }
    for (int i = 0; i < t->peer_count; ++i) {
        print_energy(t, &t->peers[i]);
    }
    int discarded = t->control.discarded;
    for (int i = 0; i < t->peer_count; ++i) {
        discarded += t->peers[i].pair.discarded;
        if (t->peers[i].out) {
            printf("  %-44s takes no part: %s\n", t->peers[i].name, t->peers[i].text);
        } else if (*t->peers[i].text) {
            printf("  %-44s %s\n", t->peers[i].name, t->peers[i].text);
        }
    }
    for (int i = 0; i < t->request->provider_count; ++i) {
        if (*t->providers[i].none) {
            printf("  %s: no peer takes part: %s\n", t->providers[i].provider->version, t->providers[i].none);
        }
    }
    printf("ratio: how many times as fast ours is as the peer; of ours, as the best peer (*). %d blocks discarded\n",
           discarded);
    if (t->best && !t->ours[0].out) {
        printf("%s is %.2f times as fast as %s, tier %s", t->ours[0].name, t->best->pair.comparison.speedup,
               t->best->name, tier_of(t, &t->best->pair));
        if (t->standard) {
            printf("; %.2f times as fast as %s, tier %s", t->standard->pair.comparison.speedup, t->standard->name,
                   tier_of(t, &t->standard->pair));
        }
        printf("\n");
    }
    printf("\n");
    fflush(stdout);
}

static void print_table(const comparison *t)
{
    print_header(t);
    for (int i = 0; i < t->ours_count; ++i) {
        const entrant *c = &t->ours[i];
        if (!c->out) {
            print_row(t, c, &c->pair.ours, t->best != NULL);
        }
    }
    for (int i = 0; i < t->peer_count; ++i) {
        const entrant *c = &t->peers[i];
        if (!c->out) {
            print_row(t, c, &c->pair.theirs, !t->ours[0].out);
        }
    }
    print_summary(t);
}

static json_t *record_of(const comparison *t, const entrant *c)
{
    const comparison_request *r = t->request;
    const bench_conditions conditions = {
        .device = &t->device->device,
        .problem = r->text,
        .mode = r->mode,
        .empty_us = r->empty_us,
        .work = r->work,
        .floor = r->floor,
        .seed = r->seed,
        .watched = &t->watched,
    };
    const bench_series series = {
        .stats = c->kernel ? &c->pair.ours : &c->pair.theirs,
        .launches = c->kernel       ? timed_kernel_launches(c->timed)
                    : c->graph      ? c->graph->launches
                    : c->uncaptured ? c->stretch
                                    : mode_calls(r->mode),
        .sets = t->sets,
        .discarded = c->pair.discarded,
        .overlap = c->kernel && r->overlap,
        .err_max = c->verdict.err_max,
        .joules = joules_of(c),
    };
    json_t *json = bench_record(&conditions, &series);
    bench_record_step(json, r->step);
    json_object_set_new(json, "blocks", json_integer((json_int_t)c->pair.comparison.blocks));
    return json;
}

static json_t *interval_json(const stats_interval *interval)
{
    return json_pack("[o,o]", json_number_or_null(interval->low), json_number_or_null(interval->high));
}

static json_t *record_of_ours(const comparison *t, const entrant *c)
{
    json_t *json = record_of(t, c);
    bench_record_kernel(json, c->kernel);
    if (t->request->step) {
        json_object_set_new(json, "forward_kernel", json_string(timed_kernel_forward(c->timed)));
    }
    json_object_set_new(json, "planned", json_boolean(strcmp(c->name, t->request->planned) == 0));
    json_object_set_new(json, "noise_floor", json_real(t->noise_floor));
    json_object_set_new(json, "control", json_string(stats_verdict_text(t->control.comparison.verdict)));
    if (t->best) {
        const stats_comparison *k = &c->pair.comparison;
        json_object_set_new(json, "best_peer", json_string(t->best->name));
        json_object_set_new(json, "ratio_to_best_peer", json_real(k->speedup));
        json_object_set_new(json, "ratio_ci95", interval_json(&k->ci95));
        json_object_set_new(json, "verdict", json_string(stats_verdict_text(k->verdict)));
        json_object_set_new(json, "tier", json_string(tier_of(t, &c->pair)));
    }
    if (t->standard && c == &t->ours[0]) {
        const pair *e = &t->standard->pair;
        json_object_set_new(json, "default_peer", json_string(t->standard->name));
        json_object_set_new(json, "ratio_to_default", json_real(e->comparison.speedup));
        json_object_set_new(json, "ratio_to_default_ci95", interval_json(&e->comparison.ci95));
        json_object_set_new(json, "tier_to_default", json_string(tier_of(t, e)));
    }
    return json;
}

static json_t *record_of_peer(const comparison *t, const entrant *c)
{
    json_t *json = record_of(t, c);
    json_object_set_new(json, "peer", json_string(c->name));
    json_object_set_new(json, "peer_version", json_string(c->provider->version));
    json_object_set_new(json, "within_tolerance", json_boolean(c->verdict.pass));
    if (*c->text) {
        json_object_set_new(json, "peer_note", json_string(c->text));
    }
    return json;
}

/* Of ours only what is right and possible leaves a record. */
static void refuse_wrong(comparison *t, comparison_counts *counts)
{
    for (int i = 0; i < t->ours_count; ++i) {
        entrant *c = &t->ours[i];
        bool below_floor = c->pair.ours.p50 < 0.9e6 * mode_floor_s(t->request->mode, t->request->floor);
        c->out = !c->verdict.pass || below_floor;
        *(c->out ? &counts->refused : &counts->measured) += 1;
        if (c->out) {
            fprintf(stderr, "REFUSED %s: %s\n", c->name,
                    c->verdict.pass ? "below 0.9 of the floor: the measurement or the kernel is wrong"
                                    : c->verdict.failure);
        }
    }
}

static void append_records(const comparison *t, json_t *records)
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

static void comparison_close(comparison *t)
{
    for (int i = 0; i < t->ours_count; ++i) {
        timed_kernel_destroy(t->ours[i].timed);
    }
    for (int i = 0; i < t->peer_count; ++i) {
        t->device->backend->timing->graph_free(t->peers[i].graph);
    }
    for (int i = 0; i < t->request->provider_count; ++i) {
        t->request->providers[i]->end();
    }
    watch_close(&t->watched);
    free(t->ours);
    free(t->peers);
}

static acr_status hold(comparison *t, json_t *records, comparison_counts *counts)
{
    acr_status status = admit_ours(t, counts);
    if (status != ACR_OK || t->ours_count == 0) {
        return status;
    }
    t->sets = timed_kernel_set_count(t->ours[0].timed);
    status = admit_peers(t);
    if (status == ACR_OK) {
        status = measure(t);
    }
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

acr_status comparison_run(const comparison_request *request, json_t *records, comparison_counts *counts)
{
    comparison t = {.request = request, .device = acr__ctx_backend_device(request->ctx)};
    t.ours = calloc(kernel_total(), sizeof *t.ours);
    t.peers = calloc(PEERS_MAX, sizeof *t.peers);
    if (!t.ours || !t.peers) {
        free(t.ours);
        free(t.peers);
        return acr__fail(ACR_NO_MEMORY, "no memory for the entrants");
    }
    watch_open(&t.watched, &t.device->device, request->ordinal);
    for (int i = 0; i < request->provider_count; ++i) {
        t.providers[i].provider = request->providers[i];
    }
    acr_status status = hold(&t, records, counts);
    comparison_close(&t);
    return status;
}
