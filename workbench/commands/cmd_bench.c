/* acromion bench: the gates, then the time of every kernel that can run a problem, and its distance from the physical
 * floor. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/exit_code.h"
#include "base/json.h"
#include "base/options.h"
#include "base/progress.h"
#include "base/text.h"
#include "bench/bench_record.h"
#include "bench/comparison.h"
#include "bench/host_cost.h"
#include "bench/interleave.h"
#include "bench/ladder.h"
#include "bench/mode.h"
#include "bench/peers/cublas.h"
#include "bench/peers/python_exec.h"
#include "bench/timed_kernel.h"
#include "bench/timer.h"
#include "check/conformance.h"
#include "commands.h"
#include "kernels/kernel_choice.h"
#include "kernels/variant.h"
#include "machine/roofline.h"

enum {
    ID_LADDER = OPTION_LONG_ONLY,
    ID_OVERLAP,
    ID_SEED,
    ID_LENGTHS,
    ID_QUICK,
    ID_PEERS,
    ID_PUBLISH,
    ID_MODE,
    ID_HOST_COST,
    ID_STEP,
    ID_VARIANT,
    ID_PYTHON_PATH,
    ID_GPUS
};

static const option_spec options[OPTIONS_MAX] = {
    {'k', "kernel", "KERNEL",
     "only this kernel: a name, a family, or a pattern like 'fwd_mma_*_d64_*'; as often as wanted"},
    {ID_VARIANT, "variant", "VARIANT",
     "also KERNEL:NAME=VALUE,..., or a folder of `acromion variant`; beside what -k names"},
    {ID_LADDER, "ladder", NULL, "also the teaching ladder, and the gain of each rung next to the gain predicted"},
    {ID_OVERLAP, "overlap", NULL, "launches may overlap their predecessor (programmatic dependent launch); cuda"},
    {ID_SEED, "seed", "N", "of the inputs; default 1"},
    {ID_LENGTHS, "lengths", "PATTERN",
     "with kvlens or packed: full (default), skewed, one-long or mixed: docs/manual/measuring.md"},
    {ID_QUICK, "quick", NULL, "about 0.3 s a kernel: for a look, not for publishing"},
    {ID_PEERS, "peers", "torch,fa3,fa3-fwd,fa4,cublas",
     "PyTorch (or torch-cudnn, ...), FlashAttention-3 (two wheels) and -4, cuBLAS"},
    {ID_MODE, "mode", "MODE", "stream (default), sustained, full-clock, rotating, cold, call, call-single"},
    {ID_STEP, "step", NULL, "of bwd: problems: the forward pass, by the planner's kernel, and behind it the gradients"},
    {ID_HOST_COST, "host-cost", NULL, "what calls cost the host: bare launch, acr_execute, acr_forward, first call"},
    {ID_PUBLISH, "publish", NULL, "with --peers: 50 blocks a pair (400 samples a side) instead of 13"},
    {ID_GPUS, "gpus", "N", "over N GPUs of this host, with --peers torch beside PyTorch's context_parallel"},
    {ID_PYTHON_PATH, "python-path", "FOLDER", "that holds the Python package acromion, if it is not found"},
    {'o', "output", "FILE", "add the records to this JSON file"},
};

typedef struct request {
    kernel_patterns patterns;
    const char *output, *python_path;
    bool ladder, overlap, quick, cublas, publish, host_cost, step;
    bool python; /* peers that Python brings were asked for: torch, fa3, fa3-fwd, fa4 */
    bench_mode mode;
    length_pattern lengths;
    uint64_t seed;
    int64_t gpus; /* 0: not over several */
} request;

static const option_field fields[OPTIONS_MAX] = {
    {'o', OPTION_FILE, offsetof(request, output)},
    {ID_LADDER, OPTION_FLAG, offsetof(request, ladder)},
    {ID_OVERLAP, OPTION_FLAG, offsetof(request, overlap)},
    {ID_QUICK, OPTION_FLAG, offsetof(request, quick)},
    {ID_PUBLISH, OPTION_FLAG, offsetof(request, publish)},
    {ID_HOST_COST, OPTION_FLAG, offsetof(request, host_cost)},
    {ID_STEP, OPTION_FLAG, offsetof(request, step)},
    {ID_PYTHON_PATH, OPTION_TEXT, offsetof(request, python_path)},
    {ID_SEED, OPTION_SEED, offsetof(request, seed)},
};

static const command_spec spec = {
    .usage = "bench [PROBLEM...]",
    .examples = "  acromion bench\n"
                "  acromion bench b2:h8:s512:d64 b4:h16:s2048:d64:causal -o results/mine.json\n"
                "  acromion bench -k fwd_simt --ladder --json\n"
                "  acromion bench b2:h8:s512:d64 --mode cold\n"
                "  acromion bench b2:h8:s512:d64 --peers torch,cublas --publish -o results/mine.json\n"
                "  acromion bench bf16:b1:h16:s32768:d128:causal --gpus 4 --peers torch\n",
    .about = "Checks each kernel on the problem, then measures it, in stream mode where no other is asked for: a "
             "sequence of back-to-back\n"
             "launches over the same buffers, replayed; a sample is the time a launch of one replay. What the timed "
             "launches wrote is judged\n"
             "too. A kernel that fails is not timed, a time below 0.9 of the physical floor is refused; both make the "
             "exit code 1. * marks the\n"
             "kernel the planner takes.\n"
             "How to repeat a measurement: docs/manual/measuring.md.\n",
    .options = options,
    .fields = fields,
    .common = COMMON_DEVICE | COMMON_JSON,
};

typedef struct session {
    const request *request;
    const common_options *common;
    acr_ctx *ctx;
    const acr__device *device;
    uint32_t threads;
    const peer_provider *providers[COMPARISON_PROVIDERS_MAX];
    int provider_count; /* 0 = ours alone */
    watch watched;
    double empty_us; /* cold mode: what no launch at all takes */
    json_t *records;
    size_t saved; /* of the records: in the output file */
    int measured, refused;
    int unsupported; /* problems that cannot be had in this mode */
} session;

/* One problem and what all its kernels are compared with. Functions call it `on`. */
typedef struct bench_problem {
    const acr_problem *problem;
    char text[ACR_PROBLEM_TEXT_MAX];
    reference *ref;
    problem_work work;
    floor_times floor;
    char planned[128]; /* the planner's kernel, "" = none */
} bench_problem;

/* One kernel's result. */
typedef struct measurement {
    const acr__kernel *kernel;
    verdict verdict; /* of what the timed launches wrote */
    timing timing;
    int launches, sets;
    double joules;     /* a launch; NaN: unknown */
    char forward[128]; /* of a step: the kernel of the forward pass */
} measurement;

static bool unknown_word(const char *option, const char *value)
{
    fprintf(stderr, "acromion bench: --%s: '%s' is unknown; `acromion bench --help` says what there is\n", option,
            value);
    return false;
}

/* Words separated by commas. */
static bool take_peers(request *r, const char *value)
{
    static const struct {
        const char *name;
        bool python;
    } peers[] = {{"torch", true}, {"fa3", true}, {"fa3-fwd", true}, {"fa4", true}, {"cublas", false}};
    for (const char *word = value;; ++word) {
        const size_t length = strcspn(word, ",");
        bool known = false;
        for (size_t i = 0; i < sizeof peers / sizeof peers[0]; ++i) {
            const size_t known_length = strlen(peers[i].name);
            /* torch-cudnn: one of PyTorch's, whose names Python knows */
            const bool is_part = i == 0 && length > known_length + 1 && word[known_length] == '-';
            if ((length == known_length || is_part) && strncmp(word, peers[i].name, known_length) == 0) {
                known = true;
                r->python = r->python || peers[i].python;
                r->cublas = r->cublas || !peers[i].python;
            }
        }
        if (!known) {
            return unknown_word("peers", value);
        }
        word += length;
        if (!*word) {
            return true;
        }
    }
}

/* The words of --lengths and of records. */
static const char *const length_words[] = {
    [LENGTHS_FULL] = "full", [LENGTHS_SKEWED] = "skewed", [LENGTHS_ONE_LONG] = "one-long", [LENGTHS_MIXED] = "mixed"};

static bool take_lengths(request *r, const char *value)
{
    for (size_t i = 0; i < sizeof length_words / sizeof length_words[0]; ++i) {
        if (length_words[i] && strcmp(value, length_words[i]) == 0) {
            r->lengths = (length_pattern)i;
            return true;
        }
    }
    return unknown_word("lengths", value);
}

static bool take_option(void *arg, int id, const char *value)
{
    request *r = arg;
    switch (id) {
    case 'k':
        return kernel_patterns_add(&r->patterns, value);
    case ID_VARIANT:
        return variant_ask(value);
    case ID_PEERS:
        return take_peers(r, value);
    case ID_GPUS:
        return option_int("gpus", value, 1, 1024, &r->gpus);
    case ID_LENGTHS:
        return take_lengths(r, value);
    default: /* ID_MODE */
        return mode_parse(value, &r->mode) || unknown_word("mode", value);
    }
}

/* ---- One kernel ---- */

/* Gate, time, judge again. Returns ACR_OK with measurement->verdict.pass telling whether the times count. */
static acr_status measure(measurement *m, session *s, const bench_problem *on)
{
    static const timer_limits thorough = TIMER_LIMITS_DEFAULT;
    static const timer_limits quick = {20e-3, 0.3, 16, 100};
    acr_status status = conformance_check(&m->verdict, s->ctx, m->kernel, on->problem, on->ref);
    if (status != ACR_OK || !m->verdict.pass) {
        return status;
    }
    const timed_kernel_request wanted_kernel = {
        .ctx = s->ctx,
        .kernel = m->kernel,
        .problem = on->problem,
        .ref = on->ref,
        .mode = s->request->mode,
        .flags = s->request->overlap ? ACR_OVERLAP_PREVIOUS : 0,
        .seed = s->request->seed,
        .step = s->request->step,
        .monitor = s->watched.monitor,
    };
    timed_kernel *timed = NULL;
    status = timed_kernel_create(&timed, &wanted_kernel);
    if (status != ACR_OK) {
        return status;
    }
    watch_restart(&s->watched);
    m->launches = timed_kernel_launches(timed);
    m->sets = timed_kernel_set_count(timed);
    snprintf(m->forward, sizeof m->forward, "%s", timed_kernel_forward(timed));
    status = timer_series(&m->timing, timed_kernel_sample, timed, s->request->quick ? &quick : &thorough, &s->watched);
    if (status == ACR_OK) {
        status = timed_kernel_judge(timed, &m->verdict);
    }
    const pace_energy energy = timed_kernel_energy(timed);
    m->joules = pace_joules(&energy);
    timed_kernel_destroy(timed);
    return status;
}

/* A floor from the table of GPUs is a gate; one that was measured here, the CPU's, is only printed. */
static bool below_floor(const session *s, const bench_problem *on, const measurement *m)
{
    return s->device->backend == ACR__CUDA && m->timing.stats.p50 < 0.9e6 * mode_floor_s(s->request->mode, &on->floor);
}

/* ---- Output ---- */

static json_t *record_json(const session *s, const bench_problem *on, const measurement *m)
{
    const bench_conditions conditions = {
        .device = s->device,
        .problem = on->text,
        .mode = s->request->mode,
        .empty_us = s->empty_us,
        .work = &on->work,
        .floor = &on->floor,
        .seed = s->request->seed,
        .watched = &s->watched,
    };
    const bench_series series = {&m->timing.stats,    m->launches,        m->sets,  m->timing.discarded,
                                 s->request->overlap, m->verdict.err_max, m->joules};
    json_t *json = bench_record(&conditions, &series);
    if (s->request->lengths != LENGTHS_FULL) {
        json_object_set_new(json, "lengths", json_string(length_words[s->request->lengths]));
    }
    bench_record_step(json, s->request->step);
    bench_record_kernel(json, m->kernel);
    if (s->request->step) {
        json_object_set_new(json, "forward_kernel", json_string(m->forward));
    }
    return json;
}

static void print_header(const session *s, const bench_problem *on)
{
    const bench_mode mode = s->request->mode;
    char floor_us[24];
    printf("%s%s on %s, %s mode%s\n", on->text, s->request->step ? " behind its forward pass" : "", s->device->name,
           mode_name(mode), s->request->overlap ? ", overlapping launches" : "");
    printf("floor %s us, bound by %s\n", us_text(floor_us, 1e6 * mode_floor_s(mode, &on->floor)),
           mode_floor_bound(mode, &on->floor));
    if (mode == MODE_COLD) {
        printf("no launch at all: %s us, part of each time\n", us_text(floor_us, s->empty_us));
    }
    printf("  %-44s %9s %19s %9s %9s %5s %8s %7s %8s\n", "kernel", "p50 us", "95 % interval", "p90", "p99", "n",
           "TFLOP/s", "x floor", "max err");
}

static void print_measurement(const session *s, const bench_problem *on, const measurement *m)
{
    const stats_summary *t = &m->timing.stats;
    char p50[24], p90[24], p99[24], low[24], high[24], interval[64];
    snprintf(interval, sizeof interval, "%s - %s", us_text(low, t->p50_ci95.low), us_text(high, t->p50_ci95.high));
    printf("%c %-44s %9s %19s %9s %9s %5zu %8.3g %7.2f %8.2g\n", strcmp(on->planned, m->kernel->name) == 0 ? '*' : ' ',
           m->kernel->name, us_text(p50, t->p50), interval, us_text(p90, t->p90), us_text(p99, t->p99), t->count,
           on->work.flops / t->p50 / 1e6, t->p50 / (1e6 * mode_floor_s(s->request->mode, &on->floor)),
           m->verdict.err_max);
    if (m->joules > 0) {
        printf("  %-44s %.4g J a launch, %.4g GFLOP a joule\n", "", m->joules, on->work.flops / m->joules / 1e9);
    }
    fflush(stdout);
}

static void refuse(session *s, const bench_problem *on, const measurement *m)
{
    ++s->refused;
    if (m->verdict.pass) {
        char p50[24], floor_us[24];
        fprintf(stderr,
                "REFUSED %s: %s us is below 0.9 of the floor of %s us: the measurement or the kernel is wrong\n",
                m->kernel->name, us_text(p50, m->timing.stats.p50),
                us_text(floor_us, 1e6 * mode_floor_s(s->request->mode, &on->floor)));
    } else {
        fprintf(stderr, "FAIL %s: %s\n     acromion check %s -k %s --seed %" PRIu64 " --inputs normal --backend %s\n",
                m->kernel->name, m->verdict.failure, on->text, m->kernel->name, s->request->seed,
                backend_name(m->kernel->backend));
    }
}

/* ---- The ladder ---- */

/* The rungs measured at one problem. */
typedef struct climb {
    double us[LADDER_RUNGS]; /* NaN = not measured */
    bool any;
} climb;

static void climb_begin(climb *c)
{
    c->any = false;
    for (int rung = 0; rung < LADDER_RUNGS; ++rung) {
        c->us[rung] = NAN;
    }
}

/* How many times as fast a rung is as the one below it, NaN where one of the two is missing. */
static double climb_gain(const climb *c, int rung)
{
    return rung > 0 ? c->us[rung - 1] / c->us[rung] : NAN;
}

/* Notes a rung, and what its record says beyond others. */
static void climb_step(climb *c, const measurement *m, const bench_problem *on, json_t *record)
{
    const int rung = ladder_rung(m->kernel);
    if (rung < 0) {
        return;
    }
    c->us[rung] = m->timing.stats.p50;
    c->any = true;
    json_object_set_new(record, "rung", json_integer(rung));
    json_object_set_new(record, "gain", json_number_or_null(climb_gain(c, rung)));
    json_object_set_new(record, "gain_predicted", json_number_or_null(ladder_predicted_gain(rung, on->text)));
}

static void print_or_dash(int width, int digits, double value)
{
    if (isnan(value)) {
        printf(" %*s", width, "-");
    } else {
        printf(" %*.*g", width, digits, value);
    }
}

static void climb_print(const climb *c, const bench_problem *on)
{
    printf("the ladder on %s; predictions are for an H200, stream mode\n", on->text);
    printf("  %-4s %-38s %9s %12s %6s %14s\n", "rung", "idea", "p50 us", "predicted us", "gain", "predicted gain");
    for (int rung = 0; rung < LADDER_RUNGS; ++rung) {
        printf("  %-4d %-38s", rung, ladder_idea(rung));
        print_or_dash(9, 4, c->us[rung]);
        print_or_dash(12, 4, ladder_predicted_us(rung, on->text));
        print_or_dash(6, 3, climb_gain(c, rung));
        print_or_dash(14, 3, ladder_predicted_gain(rung, on->text));
        printf("\n");
    }
    printf("  all rungs: ");
    print_or_dash(0, 3, c->us[0] / c->us[LADDER_RUNGS - 1]);
    printf(" times\n\n");
    fflush(stdout);
}

/* ---- All kernels of a problem ---- */

static bool wanted(const session *s, const acr__kernel *kernel, const acr_problem *problem)
{
    if (!kernel_matches(kernel, &s->request->patterns) || acr__why_not(kernel, problem, s->device)) {
        return false;
    }
    return !(kernel->traits & ACR__TRAIT_NEVER_PLANNED) || s->request->ladder || s->request->patterns.count > 0;
}

static acr_status bench_kernels(session *s, const bench_problem *on)
{
    progress line;
    char best[64] = "";
    double best_us = INFINITY;
    climb climbed;
    climb_begin(&climbed);
    progress_begin(&line, "bench", (int64_t)kernel_total());
    acr_status status = ACR_OK;
    for (size_t i = 0; i < kernel_total() && status == ACR_OK; ++i) {
        measurement m = {.kernel = kernel_at(i)};
        if (!wanted(s, m.kernel, on->problem)) {
            continue;
        }
        progress_step(&line, (int64_t)i, m.kernel->name, best);
        status = measure(&m, s, on);
        progress_clear(&line);
        if (status != ACR_OK) {
            break;
        }
        if (!m.verdict.pass || below_floor(s, on, &m)) {
            refuse(s, on, &m);
            continue;
        }
        ++s->measured;
        json_t *record = record_json(s, on, &m);
        climb_step(&climbed, &m, on, record);
        json_array_append_new(s->records, record);
        if (!s->common->json) {
            print_measurement(s, on, &m);
        }
        if (m.timing.stats.p50 < best_us) {
            best_us = m.timing.stats.p50;
            char us[24];
            snprintf(best, sizeof best, "%s us", us_text(us, best_us));
        }
    }
    if (climbed.any && !s->common->json && status == ACR_OK) {
        climb_print(&climbed, on);
    }
    return status;
}

static void plan_name(char *out, size_t capacity, acr_ctx *ctx, const acr_problem *problem)
{
    acr_plan *plan = NULL;
    out[0] = '\0';
    if (acr_plan_create(&plan, ctx, problem, ACR_ESTIMATE) == ACR_OK) {
        snprintf(out, capacity, "%s", acr_plan_kernel(plan));
        acr_plan_destroy(plan);
    }
}

static void find_floor(const session *s, bench_problem *on)
{
    machine m;
    const acr_buffers lengths = on->ref->buffers;
    on->work = work_of(on->problem, &lengths);
    if (s->request->step) {
        const acr_problem forward = reference_forward_problem(on->problem);
        const problem_work before = work_of(&forward, &lengths);
        on->work.flops += before.flops;
        on->work.exps += before.exps;
        on->work.bytes += before.bytes;
    }
    if (s->device->backend == ACR__CUDA) {
        machine_of_gpu(&m, s->device);
    } else {
        machine_of_cpu(&m, s->device, s->threads, on->work.bytes);
    }
    floor_of(&on->floor, &m, on->problem, &on->work);
}

/* The same beside peers. */
static acr_status bench_comparison(session *s, const bench_problem *on)
{
    const comparison_request wanted_comparison = {
        .ctx = s->ctx,
        .ordinal = s->common->device,
        .problem = on->problem,
        .text = on->text,
        .ref = on->ref,
        .work = &on->work,
        .floor = &on->floor,
        .patterns = &s->request->patterns,
        .planned = on->planned,
        .providers = s->providers,
        .provider_count = s->provider_count,
        .mode = s->request->mode,
        .empty_us = s->empty_us,
        .overlap = s->request->overlap,
        .step = s->request->step,
        .blocks = s->request->publish ? INTERLEAVE_BLOCKS_PUBLISH : INTERLEAVE_BLOCKS_SEARCH,
        .seed = s->request->seed,
        .quiet = s->common->json,
    };
    comparison_counts counts = {0, 0};
    acr_status status = comparison_run(&wanted_comparison, s->records, &counts);
    s->measured += counts.measured;
    s->refused += counts.refused;
    if (status == ACR_OK && counts.measured + counts.refused == 0) {
        fprintf(stderr, "acromion: %s: no kernel of ours to measure; `acromion why` says why\n", on->text);
    }
    return status;
}

static acr_status bench_one(session *s, const acr_problem *problem)
{
    enum {
        GATE_ROWS = 128
    };
    bench_problem on = {.problem = problem};
    acr_problem_format(problem, on.text, sizeof on.text);
    if (s->request->step && problem->pass != ACR_BACKWARD) {
        return acr__fail(ACR_UNSUPPORTED, "%s: --step goes with bwd: problems", on.text);
    }
    const uint32_t with_lengths = s->request->lengths == LENGTHS_MIXED ? ACR_PACKED : ACR_PACKED | ACR_KV_LENS;
    if (s->request->lengths != LENGTHS_FULL && !(problem->flags & with_lengths)) {
        return acr__fail(ACR_UNSUPPORTED, "%s: --lengths %s goes with %s", on.text, length_words[s->request->lengths],
                         s->request->lengths == LENGTHS_MIXED ? "packed queries" : "kvlens or packed");
    }
    plan_name(on.planned, sizeof on.planned, s->ctx, problem);
    reference_request wanted_reference = {
        .problem = problem,
        .inputs = INPUT_NORMAL,
        .seed = s->request->seed,
        .sampled_rows = GATE_ROWS,
        .lengths = s->request->lengths,
        .threads = s->threads,
    };
    acr_status status = reference_create(&on.ref, &wanted_reference);
    if (status != ACR_OK) {
        return status;
    }
    find_floor(s, &on);
    if (s->provider_count > 0) {
        status = bench_comparison(s, &on);
    } else {
        if (!s->common->json) {
            print_header(s, &on);
        }
        status = bench_kernels(s, &on);
    }
    reference_destroy(on.ref);
    return status;
}

/* Adds the records from `saved` on to the output file, problem by problem: a run cut short keeps what it has. */
static acr_status save(session *s)
{
    size_t count = json_array_size(s->records);
    if (!s->request->output || s->saved == count) {
        return ACR_OK;
    }
    json_t *added = json_array();
    for (; s->saved < count; ++s->saved) {
        json_array_append(added, json_array_get(s->records, s->saved));
    }
    acr_status status = json_append(s->request->output, added);
    json_decref(added);
    return status;
}

static int finish(const session *s, acr_status status)
{
    int exit_code = status == ACR_OK ? EXIT_DONE : report_failure(status, "bench");
    if (s->common->json) {
        json_print(json_incref(s->records));
    }
    if (exit_code == EXIT_DONE && s->measured + s->refused + s->unsupported == 0) {
        fprintf(stderr, "acromion: nothing was measured; `acromion why` says why\n");
    }
    if (exit_code != EXIT_DONE || s->refused > 0) {
        return exit_code != EXIT_DONE ? exit_code : EXIT_FAILED;
    }
    return s->unsupported > 0 ? EXIT_CANNOT_RUN : s->measured == 0 ? EXIT_FAILED : EXIT_DONE;
}

/* Gathers the peers that were asked for. Returns EXIT_DONE, or after printing the reason EXIT_CANNOT_RUN when there are
 * none. */
static int find_providers(session *s, const peer_provider *torch)
{
    if (torch) {
        s->providers[s->provider_count++] = torch;
    }
    if (!torch && !s->request->cublas) {
        return EXIT_DONE;
    }
    if (s->device->backend != ACR__CUDA) {
        fprintf(stderr, "acromion bench: peers are met on a GPU, and this context is %s\n", s->device->name);
        return EXIT_CANNOT_RUN;
    }
    if (s->request->cublas) {
        if (cublas_open(&s->providers[s->provider_count], s->ctx) == ACR_OK) {
            ++s->provider_count;
        } else {
            fprintf(stderr, "acromion bench: --peers cublas: %s\n", acr_last_error());
        }
    }
    return s->provider_count > 0 ? EXIT_DONE : EXIT_CANNOT_RUN;
}

static acr_status find_empty_time(session *s)
{
    if (s->request->mode != MODE_COLD) {
        return ACR_OK;
    }
    double seconds = 0;
    acr_status status = timer_empty_cold(acr__ctx_backend_device(s->ctx), &seconds);
    s->empty_us = 1e6 * seconds;
    return status;
}

static int bench_all(session *s, const problem_list *problems, const peer_provider *torch)
{
    s->device = &acr__ctx_backend_device(s->ctx)->device;
    int exit_code = find_providers(s, torch);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    if (s->request->overlap && s->device->backend != ACR__CUDA) {
        fprintf(stderr, "acromion bench: --overlap: launches overlap on a GPU, and this context is %s\n",
                s->device->name);
        return EXIT_CANNOT_RUN;
    }
    acr_status status = variants_load(s->device);
    if (status != ACR_OK) {
        return report_failure(status, "variant");
    }
    s->records = json_array();
    watch_open(&s->watched, s->device, s->common->device);
    status = find_empty_time(s);
    for (size_t i = 0; i < problems->count && status == ACR_OK; ++i) {
        status = bench_one(s, &problems->items[i]);
        if (status == ACR_UNSUPPORTED) { /* this problem in this mode; others may do */
            ++s->unsupported;
            status = ACR_OK;
            fprintf(stderr, "acromion bench: not measured: %s\n", acr_last_error());
        }
        acr_status saved = save(s);
        status = status == ACR_OK ? saved : status;
    }
    exit_code = finish(s, status);
    watch_close(&s->watched);
    json_decref(s->records);
    if (s->request->cublas) {
        cublas_close();
    }
    return exit_code;
}

/* ---- Host cost ---- */

static acr_status host_cost_one(session *s, const acr_problem *problem, const host_cost_cold *cold)
{
    char text[ACR_PROBLEM_TEXT_MAX];
    acr_problem_format(problem, text, sizeof text);
    const host_cost_request wanted_cost = {s->ctx, problem, text, cold, &s->watched, s->common->json};
    acr_status status = host_cost_run(&wanted_cost, s->records);
    s->measured += status == ACR_OK;
    acr_status saved = save(s);
    return status == ACR_OK ? saved : status;
}

/* The cold processes of all problems come first: they must be made before this process opens a context. */
static int bench_host_cost(session *s, const problem_list *problems)
{
    acr_ctx_options options_of_ctx = ACR_CTX_OPTIONS_INIT;
    options_of_ctx.backend = s->common->backend;
    options_of_ctx.device = s->common->device;
    options_of_ctx.threads = s->common->threads;
    host_cost_cold(*cold)[HOST_COST_COLD_RUNS] = calloc(problems->count, sizeof *cold);
    acr_status status = cold ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for the cold runs");
    for (size_t i = 0; i < problems->count && status == ACR_OK; ++i) {
        status = host_cost_measure_cold(cold[i], &options_of_ctx, &problems->items[i]);
    }
    int exit_code = status == ACR_OK ? context_open(s->common, &s->ctx) : report_failure(status, "bench --host-cost");
    if (exit_code == EXIT_DONE) {
        s->device = &acr__ctx_backend_device(s->ctx)->device;
        s->records = json_array();
        watch_open(&s->watched, s->device, s->common->device);
        for (size_t i = 0; i < problems->count && status == ACR_OK; ++i) {
            status = host_cost_one(s, &problems->items[i], cold[i]);
        }
        exit_code = finish(s, status);
        watch_close(&s->watched);
        json_decref(s->records);
        acr_ctx_destroy(s->ctx);
    }
    free(cold);
    return exit_code;
}

/* ---- The command ---- */

/* Says what does not go together; NULL when all does. */
static const char *conflict_of(const request *r)
{
    const bool peers = r->python || r->cublas;
    if (r->step && (r->ladder || r->host_cost)) {
        return "--step goes with bwd: problems alone";
    }
    if (r->gpus && (r->cublas || r->publish || r->host_cost || r->patterns.count > 0 || r->ladder || r->overlap ||
                    variant_asked() || r->mode != MODE_STREAM || r->lengths != LENGTHS_FULL || r->step)) {
        return "--gpus goes with problems, --peers torch, --quick, --json and -o alone";
    }
    if (r->publish && !peers) {
        return "--publish goes with --peers";
    }
    if (r->host_cost &&
        (peers || r->patterns.count > 0 || r->ladder || r->overlap || variant_asked() || r->mode != MODE_STREAM)) {
        return "--host-cost goes with problems, --json and -o alone";
    }
    return NULL;
}

int bench_with_peers(int argc, char **argv, const peer_provider *torch)
{
    common_options common;
    request r = {.seed = 1, .lengths = LENGTHS_FULL};
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, take_option, &r, &exit_code);
    if (first < 0) {
        return exit_code;
    }
    r.python = r.python || torch;
    const char *conflict = conflict_of(&r);
    if (conflict) {
        fprintf(stderr, "acromion bench: %s\n", conflict);
        return EXIT_USAGE;
    }
    const acr_status writable = r.output ? json_can_append(r.output) : ACR_OK;
    if (writable != ACR_OK) {
        return report_failure(writable, "bench --output");
    }
    problem_list problems;
    exit_code = problems_parse(argv + first, argc - first, &problems);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    session s = {.request = &r, .common = &common, .threads = thread_count(&common)};
    if (r.gpus) {
        exit_code = python_exec_gpus(argc, argv, r.python_path);
    } else if (r.python && !torch) {
        exit_code = python_exec_bench(argc, argv, r.python_path);
    } else if (r.host_cost) {
        exit_code = bench_host_cost(&s, &problems);
    } else {
        exit_code = context_open(&common, &s.ctx);
        exit_code = exit_code == EXIT_DONE ? bench_all(&s, &problems, torch) : exit_code;
        acr_ctx_destroy(s.ctx);
        variants_unload();
    }
    problems_free(&problems);
    return exit_code;
}

int cmd_bench(int argc, char **argv)
{
    return bench_with_peers(argc, argv, NULL);
}
