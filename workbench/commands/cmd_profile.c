/* acromion profile: what one launch of a kernel does on the GPU. Hardware counters by Nsight Compute, or a timeline of
 * the kernel's steps by clock stamps. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/child.h"
#include "base/exit_code.h"
#include "base/json.h"
#include "base/options.h"
#include "base/text.h"
#include "check/conformance.h"
#include "commands.h"
#include "kernels/kernel_choice.h"
#include "machine/environment.h"
#include "profile/profile_diagnosis.h"
#include "profile/profile_ncu.h"
#include "profile/profile_timeline.h"

enum {
    ID_TIMELINE = OPTION_LONG_ONLY,
    ID_LAUNCH,
    ID_SOURCE,
    ID_TIMEOUT,
    ID_SEED
};
enum {
    KERNELS_MAX = 8,   /* columns of a comparison */
    PROFILED_ROWS = 32 /* compared with the oracle before a profile counts */
};

static const option_spec options[OPTIONS_MAX] = {
    {'k', "kernel", "KERNEL", "this kernel: a name, a family or a pattern; again: compare; default: the planner's"},
    {ID_TIMELINE, "timeline", NULL, "build the kernel with clock stamps at its steps: cycles a step; needs nvcc"},
    {ID_SOURCE, "source", "FOLDER",
     "with --timeline: src/ of the tree, if it is not in the program's folder or one above"},
    {ID_TIMEOUT, "timeout", "TIME", "of the tool or compiler, for one kernel; default 120s"},
    {ID_SEED, "seed", "N", "of the inputs; default 1"},
    {ID_LAUNCH, "launch", NULL, "only launch, a few times: what the tool is given to profile"},
    {'o', "output", "FILE", "add the records to this JSON file"},
};

typedef struct request {
    kernel_patterns patterns;
    const char *output, *source;
    bool timeline, launch;
    double timeout_s;
    uint64_t seed;
} request;

static const option_field fields[OPTIONS_MAX] = {
    {'o', OPTION_FILE, offsetof(request, output)},           {ID_TIMELINE, OPTION_FLAG, offsetof(request, timeline)},
    {ID_LAUNCH, OPTION_FLAG, offsetof(request, launch)},     {ID_SOURCE, OPTION_TEXT, offsetof(request, source)},
    {ID_TIMEOUT, OPTION_TIME, offsetof(request, timeout_s)}, {ID_SEED, OPTION_SEED, offsetof(request, seed)},
};

static const command_spec spec = {
    .usage = "profile [PROBLEM...]",
    .examples = "  acromion profile b2:h8:s512:d64\n"
                "  acromion profile b4:h16:s2048:d64 -k 'fwd_wgmma_f16_d64_256*' -k 'fwd_mma_f16_d64_128*'\n"
                "  acromion profile --timeline -k fwd_wgmma_f16_d64_128x128_s3_sm90a -o results/profile/mine.json\n",
    .about = "Runs Nsight Compute (ncu) on one launch of a kernel, clocks and caches left as they are, and says which "
             "resource binds it,\n"
             "what its warps wait for, and what share of the physical floor's rate it reaches. Several kernels stand "
             "side by side. With\n"
             "--timeline the kernel is compiled with clock stamps instead, and the cycles of its steps are listed.\n"
             "Without the tool, the permission (ERR_NVGPUCTRPERM) or a fitting driver there is a status and no number; "
             "exit code 4.\n",
    .options = options,
    .fields = fields,
    .common = COMMON_DEVICE | COMMON_JSON,
};

typedef struct session {
    const request *request;
    const common_options *common;
    acr_ctx *ctx;
    const acr__device *device;
    char program[PATH_MAX + 16];
    json_t *records;
} session;

/* One problem, the kernels to look at, and its floor. Functions call it `on`. */
typedef struct profiled {
    const acr_problem *problem;
    char text[ACR_PROBLEM_TEXT_MAX];
    const acr__kernel *kernels[KERNELS_MAX];
    int kernel_count;
    floor_times floor;
    double launch_s;
} profiled;

static bool take_option(void *arg, int id, const char *value) /* -k */
{
    request *r = arg;
    (void)id;
    if (r->patterns.count == KERNELS_MAX) {
        fprintf(stderr, "acromion profile: -k: at most %d times\n", KERNELS_MAX);
        return false;
    }
    return kernel_patterns_add(&r->patterns, value);
}

/* ---- Which kernels ---- */

static bool already(const profiled *on, const acr__kernel *kernel)
{
    for (int i = 0; i < on->kernel_count; ++i) {
        if (on->kernels[i] == kernel) {
            return true;
        }
    }
    return false;
}

/* In the order of the patterns: the first kernel is what the others are compared with. */
static void add_pattern(profiled *on, const session *s, const char *pattern)
{
    const kernel_patterns one = {{pattern}, 1};
    for (size_t i = 0; i < acr__kernel_count && on->kernel_count < KERNELS_MAX; ++i) {
        const acr__kernel *kernel = acr__kernels[i];
        if (kernel_matches(kernel, &one) && !acr__why_not(kernel, on->problem, s->device) && !already(on, kernel)) {
            on->kernels[on->kernel_count++] = kernel;
        }
    }
}

static int choose_kernels(profiled *on, const session *s)
{
    for (int i = 0; i < s->request->patterns.count; ++i) {
        add_pattern(on, s, s->request->patterns.items[i]);
    }
    if (s->request->patterns.count == 0) {
        on->kernels[0] = acr__choose(on->problem, s->device);
        on->kernel_count = on->kernels[0] ? 1 : 0;
    }
    if (on->kernel_count == 0) {
        fprintf(stderr, "acromion: %s: no kernel to profile; `acromion why` says why\n", on->text);
        return EXIT_CANNOT_RUN;
    }
    return EXIT_DONE;
}

/* ---- The profiled process ---- */

static acr_status make_reference(reference **out, const session *s, const acr_problem *problem)
{
    const reference_request wanted = {
        .problem = problem,
        .inputs = INPUT_NORMAL,
        .seed = s->request->seed,
        .sampled_rows = PROFILED_ROWS,
        .lengths = LENGTHS_FULL,
        .threads = thread_count(s->common),
    };
    return reference_create(out, &wanted);
}

/* Warms up, launches once more, and judges what that wrote. */
static acr_status launch_one(verdict *v, const session *s, const acr__kernel *kernel, const acr_problem *problem,
                             const reference *ref)
{
    execution *e = NULL;
    run_output output;
    acr_status status = execution_create(&e, s->ctx, kernel, problem, ref, false, 0, ALLOCATOR_ALIGNMENT);
    for (int i = 0; i < PROFILE_WARM_UPS && status == ACR_OK; ++i) {
        status = execution_enqueue(e, NULL);
    }
    if (status == ACR_OK) {
        status = execution_run(e);
    }
    if (status == ACR_OK) {
        status = execution_collect(e, &output);
    }
    if (status == ACR_OK) {
        conformance_judge(v, ref, &output);
        run_output_free(&output);
    }
    execution_destroy(e);
    return status;
}

static int launch_all(const session *s, const profiled *on)
{
    reference *ref = NULL;
    acr_status status = make_reference(&ref, s, on->problem);
    int exit_code = EXIT_DONE;
    for (int i = 0; i < on->kernel_count && status == ACR_OK; ++i) {
        verdict v;
        status = launch_one(&v, s, on->kernels[i], on->problem, ref);
        if (status == ACR_OK && !v.pass) {
            fprintf(stderr, "acromion: %s is wrong: %s\n", on->kernels[i]->name, v.failure);
            exit_code = EXIT_FAILED;
        }
    }
    reference_destroy(ref);
    return status == ACR_OK ? exit_code : report_failure(status, "profile");
}

/* ---- Records ---- */

static json_t *record_of(const session *s, const profiled *on, const acr__kernel *kernel, const char *kind)
{
    char digest[17];
    digest_text(digest, kernel);
    json_t *json = json_pack("{s:s, s:s, s:s, s:s, s:{s:I}}", "kind", kind, "problem", on->text, "kernel", kernel->name,
                             "image", digest, "seeds", "inputs", (json_int_t)s->request->seed);
    environment_add(json, s->device);
    return json;
}

static json_t *counters_record(const session *s, const profiled *on, const acr__kernel *kernel, const profile_run *run,
                               const diagnosis *d)
{
    json_t *json = record_of(s, on, kernel, "counters");
    json_t *more =
        json_pack("{s:s, s:s, s:s, s:i, s:f, s:s, s:f, s:s, s:o, s:s, s:o, s:o}", "tool", run->tool, "clock_control",
                  "none", "cache_control", "none", "warm_up_launches", PROFILE_WARM_UPS, "floor_us",
                  1e6 * on->floor.warm_s, "floor_bound", on->floor.warm_bound, "floor_share", d->floor_share, "bound",
                  d->bound, "busiest_pct", json_number_or_null(d->bound_pct), "diagnosis", d->text, "counters",
                  counters_json(&run->counters), "stalls", stalls_json(&run->counters));
    json_object_update(json, more);
    json_decref(more);
    return json;
}

/* The steps of a group in the order in which they end first. Returns how many it has. */
static int steps_in_order(int out[TRACE_STEPS], const timeline *t, int group)
{
    int count = 0;
    for (int i = 0; i < t->steps; ++i) {
        if (t->table[group][i].hits > 0) {
            int at = count++;
            for (; at > 0 && t->table[group][out[at - 1]].first_cycles > t->table[group][i].first_cycles; --at) {
                out[at] = out[at - 1];
            }
            out[at] = i;
        }
    }
    return count;
}

static json_t *timeline_record(const session *s, const profiled *on, const acr__kernel *kernel, const timeline *t)
{
    json_t *json = record_of(s, on, kernel, "timeline"), *groups = json_array();
    for (int group = 0; group < TRACE_GROUPS; ++group) {
        if (!t->group_seen[group]) {
            continue;
        }
        json_t *steps = json_array();
        int order[TRACE_STEPS], count = steps_in_order(order, t, group);
        for (int i = 0; i < count; ++i) {
            const timeline_step *step = &t->table[group][order[i]];
            json_array_append_new(steps, json_pack("{s:s, s:i, s:f, s:f, s:f, s:f, s:f}", "step", t->names[order[i]],
                                                   "hits", step->hits, "first_cycles", step->first_cycles,
                                                   "first_cycles_max", step->first_max, "cycles", step->each_cycles,
                                                   "cycles_max", step->each_max, "share", step->share));
        }
        json_array_append_new(groups, json_pack("{s:i, s:o}", "group", group, "steps", steps));
    }
    json_t *more = json_pack("{s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:b, s:b, s:o}", "ctas", t->ctas, "grid_ctas",
                             t->ctas_of_grid, "group_warps", t->warps_of_group, "cta_cycles", t->cta_cycles,
                             "cta_cycles_max", t->cta_max, "plain_us", t->plain_us, "marked_us", t->stamped_us,
                             "serialised", t->serialised, "spilled", t->spilled, "groups", groups);
    json_object_update(json, more);
    json_decref(more);
    return json;
}

/* ---- Text ---- */

/* A kernel's letter in the tables. */
static char letter_of(int i)
{
    return (char)('A' + i);
}

static void print_value(double value)
{
    if (isnan(value)) {
        printf(" %12s", "-");
    } else if (fabs(value) >= 1e6) {
        printf(" %12.5g", value);
    } else {
        printf(" %12.*f", value == floor(value) ? 0 : 2, value);
    }
}

/* One line a counter, one column a kernel; of two kernels also the second over the first. Nothing when none has it.
 */
static void print_row(const char *key, const char *unit, const double *values, int count)
{
    bool any = false;
    for (int i = 0; i < count; ++i) {
        any = any || !isnan(values[i]);
    }
    if (!any) {
        return;
    }
    printf("  %-24s %-5s", key, unit);
    for (int i = 0; i < count; ++i) {
        print_value(values[i]);
    }
    if (count == 2 && values[0] > 0 && values[1] >= 0) {
        printf("  x%.2f", values[1] / values[0]);
    }
    printf("\n");
}

static void print_counters(const profiled *on, const profile_run *runs, const diagnosis *diagnoses)
{
    double values[KERNELS_MAX];
    printf("  %-24s %-5s", "counter", "unit");
    for (int i = 0; i < on->kernel_count; ++i) {
        printf(" %12c", letter_of(i));
    }
    printf("%s\n", on->kernel_count == 2 ? "  B/A" : "");
    for (int c = 0; c < COUNTER_COUNT; ++c) {
        for (int i = 0; i < on->kernel_count; ++i) {
            values[i] = runs[i].counters.value[c];
        }
        print_row(counter_infos[c].key, counter_infos[c].unit, values, on->kernel_count);
    }
    for (int i = 0; i < on->kernel_count; ++i) {
        values[i] = 100 * diagnoses[i].floor_share;
    }
    print_row("floor's rate reached", "%", values, on->kernel_count);
    printf("  warps that wait, a cycle in which an instruction issues:\n");
    for (int c = 0; c < STALL_COUNT; ++c) {
        for (int i = 0; i < on->kernel_count; ++i) {
            values[i] = runs[i].counters.stall[c];
        }
        print_row(stall_infos[c].reason, "warps", values, on->kernel_count);
    }
}

static void print_timeline(const char *kernel, const timeline *t)
{
    printf("  %s: first %d of %d CTAs, %.0f cycles each (at most %.0f)\n", kernel, t->ctas, t->ctas_of_grid,
           t->cta_cycles, t->cta_max);
    printf("  the stamps cost %.1f %%: %.2f us a launch with them, %.2f without%s%s\n",
           100 * (t->stamped_us / t->plain_us - 1), t->stamped_us, t->plain_us,
           t->spilled ? "; registers spill with them" : "", t->serialised ? "; products are serialised with them" : "");
    for (int group = 0; group < TRACE_GROUPS; ++group) {
        if (!t->group_seen[group]) {
            continue;
        }
        printf("  warps %d to %d; cycles, median (most) of the CTAs\n", group * t->warps_of_group,
               (group + 1) * t->warps_of_group - 1);
        printf("    %-34s %20s %6s %20s %7s\n", "step", "first ends at", "times", "cycles each", "share");
        int order[TRACE_STEPS], count = steps_in_order(order, t, group);
        for (int i = 0; i < count; ++i) {
            const timeline_step *step = &t->table[group][order[i]];
            printf("    %-34s %10.0f (%7.0f) %6d %10.0f (%7.0f) %5.0f %%\n", t->names[order[i]], step->first_cycles,
                   step->first_max, step->hits, step->each_cycles, step->each_max, 100 * step->share);
        }
    }
}

/* ---- Profiles of a problem ---- */

static int refuse(const session *s, const profiled *on, const char *kernel, profile_status status, const char *detail)
{
    fprintf(stderr, "acromion: profile: %s: %s: %s\n", profile_status_name(status), kernel, detail);
    if (status == PROFILE_NO_PERMISSION) {
        fprintf(stderr, "  Only administrators may read the counters here. Run as root, or load the driver with "
                        "NVreg_RestrictProfilingToAdminUsers=0.\n");
    }
    if (s->common->json) {
        json_array_append_new(s->records, json_pack("{s:s, s:s, s:s, s:s}", "problem", on->text, "kernel", kernel,
                                                    "status", profile_status_name(status), "detail", detail));
    }
    return profile_status_exit(status);
}

static int profile_counters_of(const session *s, const profiled *on)
{
    profile_run runs[KERNELS_MAX];
    diagnosis diagnoses[KERNELS_MAX];
    for (int i = 0; i < on->kernel_count; ++i) {
        const char *name = on->kernels[i]->name;
        profile_with_ncu(&runs[i], s->program, name, on->text, s->common->device, s->request->timeout_s);
        if (runs[i].status != PROFILE_OK) {
            return refuse(s, on, name, runs[i].status, runs[i].detail);
        }
        diagnose(&diagnoses[i], &runs[i].counters, &on->floor, s->device, on->launch_s);
        json_array_append_new(s->records, counters_record(s, on, on->kernels[i], &runs[i], &diagnoses[i]));
    }
    if (!s->common->json) {
        printf("%s on %s, one launch, caches warm, clocks as they are (%s)\n", on->text, s->device->name, runs[0].tool);
        for (int i = 0; i < on->kernel_count; ++i) {
            printf("  %c = %s\n      %s\n", letter_of(i), on->kernels[i]->name, diagnoses[i].text);
        }
        print_counters(on, runs, diagnoses);
    }
    return EXIT_DONE;
}

static int profile_timeline_of(const session *s, const profiled *on)
{
    reference *ref = NULL;
    timeline *t = malloc(sizeof *t);
    acr_status status = t ? make_reference(&ref, s, on->problem) : acr__fail(ACR_NO_MEMORY, "no memory");
    int exit_code = EXIT_DONE;
    if (status == ACR_OK && !s->common->json) {
        printf("%s on %s, one launch\n", on->text, s->device->name);
    }
    for (int i = 0; i < on->kernel_count && status == ACR_OK && exit_code == EXIT_DONE; ++i) {
        const timeline_request wanted = {s->ctx, on->kernels[i],     on->problem,
                                         ref,    s->request->source, s->request->timeout_s};
        status = timeline_run(t, &wanted);
        if (status == ACR_OK && t->status != PROFILE_OK) {
            exit_code = refuse(s, on, on->kernels[i]->name, t->status, t->detail);
        } else if (status == ACR_OK) {
            json_array_append_new(s->records, timeline_record(s, on, on->kernels[i], t));
            if (!s->common->json) {
                print_timeline(on->kernels[i]->name, t);
            }
        }
    }
    free(t);
    reference_destroy(ref);
    return status == ACR_OK ? exit_code : report_failure(status, "profile");
}

static int profile_one(const session *s, const acr_problem *problem)
{
    profiled on = {.problem = problem};
    machine m;
    problem_work d = work_of(problem, NULL);
    acr_problem_format(problem, on.text, sizeof on.text);
    machine_of_gpu(&m, s->device);
    floor_of(&on.floor, &m, problem, &d);
    on.launch_s = m.launch_s;
    int exit_code = choose_kernels(&on, s);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    return s->request->launch     ? launch_all(s, &on)
           : s->request->timeline ? profile_timeline_of(s, &on)
                                  : profile_counters_of(s, &on);
}

static int profile_all(session *s, const problem_list *problems)
{
    s->device = &acr__ctx_backend_device(s->ctx)->device;
    if (s->device->backend != ACR__CUDA) {
        fprintf(stderr, "acromion: profile: NO_DEVICE: counters and clocks are a GPU's, and this context is %s\n",
                s->device->name);
        return EXIT_CANNOT_RUN;
    }
    s->records = json_array();
    int exit_code = EXIT_DONE;
    for (size_t i = 0; i < problems->count && exit_code == EXIT_DONE; ++i) {
        exit_code = profile_one(s, &problems->items[i]);
    }
    if (exit_code == EXIT_DONE && s->request->output && !s->request->launch) {
        acr_status saved = json_append(s->request->output, s->records);
        exit_code = saved == ACR_OK ? EXIT_DONE : report_failure(saved, "profile");
    }
    if (s->common->json && !s->request->launch) {
        json_print(s->records);
    } else {
        json_decref(s->records);
    }
    return exit_code;
}

int cmd_profile(int argc, char **argv)
{
    common_options common;
    request r = {.timeout_s = 120, .seed = 1};
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, take_option, &r, &exit_code);
    if (first < 0) {
        return exit_code;
    }
    const acr_status writable = r.output && !r.launch ? json_can_append(r.output) : ACR_OK;
    if (writable != ACR_OK) {
        return report_failure(writable, "profile --output");
    }
    problem_list problems;
    exit_code = problems_parse(argv + first, argc - first, &problems);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    session s = {.request = &r, .common = &common};
    ssize_t length = readlink("/proc/self/exe", s.program, sizeof s.program - 1);
    s.program[length > 0 ? length : 0] = '\0';
    exit_code = context_open(&common, &s.ctx);
    if (exit_code == EXIT_DONE) {
        exit_code = profile_all(&s, &problems);
    }
    acr_ctx_destroy(s.ctx);
    problems_free(&problems);
    return exit_code;
}
