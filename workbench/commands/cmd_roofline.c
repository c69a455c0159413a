/* acromion roofline: the physical floor of a problem, on a GPU that need not be here. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/exit_code.h"
#include "base/json.h"
#include "base/options.h"
#include "base/text.h"
#include "commands.h"
#include "kernels/kernel_choice.h"
#include "machine/gpus.h"
#include "machine/roofline.h"

enum {
    ID_GPUS = OPTION_LONG_ONLY,
    ID_LINK
};

static const option_spec options[OPTIONS_MAX] = {
    {'g', "gpu", "NAME", "l4 a100 h100 h200 rtx4090 ..., cpu, or help for the list; default: this machine's device"},
    {'t', "target", "TIME", "judge a target like 5us: impossible, implausible, hard or open"},
    {ID_GPUS, "gpus", "N", "the floor over N such GPUs of one host, with the link between them"},
    {ID_LINK, "link", "GB/S", "with --gpus: what a GPU receives from the others; default: as published"},
};

typedef struct request {
    const char *gpu; /* NULL = the device that is here */
    double target_s; /* 0 = none */
    const char *gpus, *link;
} request;

static const option_field fields[] = {
    {'g', OPTION_TEXT, offsetof(request, gpu)},
    {'t', OPTION_TIME, offsetof(request, target_s)},
    {ID_GPUS, OPTION_TEXT, offsetof(request, gpus)},
    {ID_LINK, OPTION_TEXT, offsetof(request, link)},
    {0},
};

static const command_spec spec = {
    .usage = "roofline [PROBLEM...]",
    .examples = "  acromion roofline --gpu l4 --target 5us\n"
                "  acromion roofline --gpu h200 b4:h16:s2048:d64:causal b32:h32/8:s1/8192:d128\n"
                "  acromion roofline --gpu h200 --gpus 4 bf16:b1:h16:s32768:d128:causal\n",
    .about = "Computes the time below which no kernel can solve a problem, whatever it does: multiply-adds on the "
             "tensor cores at the dense\n"
             "rate, exponentials, and every byte moved once. The warm floor has the inputs in the L2 cache, as a "
             "stream of launches over the\n"
             "same buffers does; the cold one has them in DRAM. Products are summed in float32, as every kernel here "
             "does: GeForce\n"
             "cards have twice the rate with float16 sums. --gpu cpu measures this machine's processors, by the "
             "time that they gave to it.\n",
    .options = options,
    .fields = fields,
    .common = COMMON_DEVICE | COMMON_JSON,
};

static int list_gpus(void)
{
    for (size_t i = 0; i < gpu_model_count; ++i) {
        machine m;
        machine_of_gpu(&m, &gpu_models[i].device);
        printf("%-10s %-26s %4.0f TFLOP/s fp16, %5.0f GB/s, link %3.0f GB/s   %s\n", gpu_models[i].name, m.name,
               m.multiply_add_flops[ACR_F16] / 1e12, m.memory_bytes_per_s / 1e9, m.link_bytes_per_s / 1e9, m.source);
    }
    printf("%-10s this machine's processors, measured\n", "cpu");
    return EXIT_DONE;
}

/* ---- Output ---- */

static void print_line(const char *what, double time_s, const char *format, double rate)
{
    char text[64], us[24];
    snprintf(text, sizeof text, format, rate);
    printf("  %-26s %10s us   at %s\n", what, us_text(us, 1e6 * time_s), text);
}

static void print_target(const machine *m, const floor_times *f, double target_s)
{
    const double target_us = 1e6 * target_s, floor_us = 1e6 * f->warm_s, launch_us = 1e6 * m->launch_s;
    char target[24], bound[24], left[24], launch[24];
    us_text(target, target_us);
    us_text(bound, floor_us);
    us_text(left, target_us - floor_us);
    us_text(launch, launch_us);
    switch (judge_target(m, f, target_s)) {
    case TARGET_IMPOSSIBLE:
        printf("  target %s us: impossible. The %s alone need %s us, whatever the kernel, summing in float32.\n",
               target, f->warm_bound, bound);
        break;
    case TARGET_IMPLAUSIBLE:
        printf("  target %s us: implausible. It leaves %s us above the floor, and an empty launch takes about %s us.\n",
               target, left, launch);
        break;
    case TARGET_HARD:
        printf("  target %s us: hard. After the launch the kernel would have to run at %.0f %% of the floor's rate.\n",
               target, 100 * floor_us / (target_us - launch_us));
        break;
    case TARGET_OPEN:
        printf("  target %s us: open. It is %.1f times the floor; physics does not forbid it.\n", target,
               target_us / floor_us);
        break;
    }
}

/* Whether other programs took so much of the processors that the floor is less sure than on an idle machine: their
 * caches, clocks and memory are shared, too. */
static bool is_busy(const machine *m)
{
    return m->cpu_share < 0.9;
}

/* Of a problem on one GPU, or over several. */
static void find_floor(shared_floor *out, const machine *m, const acr_problem *problem, const problem_work *d,
                       int64_t gpus)
{
    *out = (shared_floor){.link_bytes = 0};
    if (gpus > 0) {
        floor_over_gpus(out, m, problem, d, gpus);
    } else {
        floor_of(&out->times, m, problem, d);
    }
}

static void print_floor(const acr_problem *problem, const char *text, const machine *m, int64_t gpus, double target_s)
{
    problem_work d = work_of(problem, NULL);
    shared_floor shared;
    find_floor(&shared, m, problem, &d, gpus);
    const floor_times f = shared.times;
    if (gpus > 0) {
        printf("%s over %lld x %s, each with its share\n", text, (long long)gpus, m->name);
    } else {
        printf("%s on %s\n", text, m->name);
    }
    printf("  %.4g GFLOP, %.3g million exponentials, %.4g MB\n", d.flops / 1e9, d.exps / 1e6, d.bytes / 1e6);
    bool tensor = !m->shared_lanes && problem->dtype != ACR_F32;
    print_line(tensor ? "tensor cores" : "float32 multiply-adds", f.multiply_add_s,
               tensor ? "%.4g TFLOP/s, dense, float32 sums" : "%.4g TFLOP/s",
               m->multiply_add_flops[problem->dtype] / 1e12);
    print_line("exponentials", f.exp_s, "%.3g T/s", m->exps_per_s_most / 1e12);
    print_line(m->shared_lanes ? "memory at this size" : "L2", f.cache_s, "%.0f GB/s", m->cache_bytes_per_s / 1e9);
    if (m->memory_bytes_per_s > 0) {
        print_line("DRAM", f.memory_cold_s, "%.0f GB/s", m->memory_bytes_per_s / 1e9);
    }
    if (gpus > 0) {
        char what[40];
        snprintf(what, sizeof what, "link, %.4g MB received", shared.link_bytes / 1e6);
        print_line(what, shared.link_s, "%.4g GB/s", m->link_bytes_per_s / 1e9);
    }
    char us[24];
    printf("  %-26s %10s us   bound by %s\n", "floor, inputs in cache", us_text(us, 1e6 * f.warm_s), f.warm_bound);
    printf("  %-26s %10s us   bound by %s\n", "floor, inputs in DRAM", us_text(us, 1e6 * f.cold_s), f.cold_bound);
    if (m->launch_s > 0) {
        printf("  an empty launch takes about %s us; it is not part of the floor\n", us_text(us, 1e6 * m->launch_s));
    }
    if (problem->flags & ACR_KV_LENS) {
        printf("  key lengths are counted as full; shorter ones lower the floor\n");
    }
    if (problem->flags & ACR_PACKED) {
        printf("  every sequence is counted as the longest; shorter ones lower the floor\n");
    }
    if (target_s > 0) {
        print_target(m, &f, target_s);
    }
    printf("  rates: %s\n", m->source);
    if (is_busy(m)) {
        printf(
            "  the machine is busy: this process had %.0f %% of its processors' time; rates are of the time it ran\n",
            100 * m->cpu_share);
    }
}

static json_t *floor_json(const acr_problem *problem, const char *text, const machine *m, int64_t gpus, double target_s)
{
    problem_work d = work_of(problem, NULL);
    shared_floor shared;
    find_floor(&shared, m, problem, &d, gpus);
    const floor_times f = shared.times;
    json_t *json = json_pack(
        "{s:s, s:s, s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:s, s:f, s:s, s:f}", "problem", text, "machine",
        m->name, "source", m->source, "cpu_share", m->cpu_share, "flops", d.flops, "exps", d.exps, "bytes", d.bytes,
        "multiply_add_us", 1e6 * f.multiply_add_s, "exp_us", 1e6 * f.exp_s, "l2_us", 1e6 * f.cache_s, "dram_us",
        1e6 * f.memory_cold_s, "floor_warm_us", 1e6 * f.warm_s, "warm_bound", f.warm_bound, "floor_cold_us",
        1e6 * f.cold_s, "cold_bound", f.cold_bound, "launch_us", 1e6 * m->launch_s);
    if (gpus > 0) {
        json_object_set_new(json, "gpus", json_integer(gpus));
        json_object_set_new(json, "link_bytes", json_real(shared.link_bytes));
        json_object_set_new(json, "link_gb_s", json_real(m->link_bytes_per_s / 1e9));
        json_object_set_new(json, "link_us", json_real(1e6 * shared.link_s));
    }
    if (target_s > 0) {
        json_object_set_new(json, "target_us", json_real(1e6 * target_s));
        json_object_set_new(json, "verdict", json_string(target_verdict_text(judge_target(m, &f, target_s))));
    }
    return json;
}

/* ---- The machine ---- */

/* What --gpu means. For the CPU the working set matters, so the machine is measured for each problem. */
typedef struct target {
    acr__device device;
    uint32_t threads;
    int64_t gpus;            /* 0: one, without links */
    double link_bytes_per_s; /* 0: as published */
} target;

/* --gpus and --link. */
static bool read_several(target *out, const request *r)
{
    double gb_s = 0;
    if (r->link && !r->gpus) {
        fprintf(stderr, "acromion: --link: goes with --gpus\n");
        return false;
    }
    if ((r->gpus && !option_int("gpus", r->gpus, 1, 1024, &out->gpus)) ||
        (r->link && !option_double("link", r->link, 1e-3, 1e6, &gb_s))) {
        return false;
    }
    out->link_bytes_per_s = gb_s * 1e9;
    return true;
}

/* Whether there is a floor of all problems over the GPUs. */
static bool can_share(const target *t, const problem_list *problems)
{
    machine m;
    if (t->gpus == 0) {
        return true;
    }
    if (t->device.backend != ACR__CUDA) {
        fprintf(stderr, "acromion: --gpus: the device is a CPU\n");
        return false;
    }
    machine_of_gpu(&m, &t->device);
    if (m.link_bytes_per_s <= 0 && t->link_bytes_per_s <= 0) {
        fprintf(stderr, "acromion: --gpus: the link of %s is not known: give --link\n", m.name);
        return false;
    }
    for (size_t i = 0; i < problems->count; ++i) {
        const char *reason = not_shared(&problems->items[i]);
        if (reason) {
            char text[ACR_PROBLEM_TEXT_MAX];
            acr_problem_format(&problems->items[i], text, sizeof text);
            fprintf(stderr, "acromion: --gpus: %s: %s\n", text, reason);
            return false;
        }
    }
    return true;
}

static int find_target(target *out, const request *r, const common_options *common)
{
    out->threads = thread_count(common);
    if (r->gpu && strcmp(r->gpu, "cpu") != 0) {
        const gpu_model *model = gpu_find(r->gpu);
        if (!model) {
            fprintf(stderr, "acromion: --gpu: no GPU '%s' in the table; `acromion roofline --gpu help` lists it\n",
                    r->gpu);
            return EXIT_USAGE;
        }
        out->device = model->device;
        return EXIT_DONE;
    }
    common_options here = *common;
    here.backend = r->gpu ? "cpu" : common->backend;
    acr_ctx *ctx = NULL;
    int exit_code = context_open(&here, &ctx);
    if (exit_code == EXIT_DONE) {
        out->device = acr__ctx_backend_device(ctx)->device;
        acr_ctx_destroy(ctx);
    }
    return exit_code;
}

static void report(const problem_list *problems, const target *s, double target_s, bool as_json)
{
    json_t *list = json_array();
    for (size_t i = 0; i < problems->count; ++i) {
        const acr_problem *problem = &problems->items[i];
        machine m;
        if (s->device.backend == ACR__CUDA) {
            machine_of_gpu(&m, &s->device);
        } else {
            machine_of_cpu(&m, &s->device, s->threads, work_of(problem, NULL).bytes);
        }
        if (s->link_bytes_per_s > 0) {
            m.link_bytes_per_s = s->link_bytes_per_s;
        }
        char text[ACR_PROBLEM_TEXT_MAX];
        acr_problem_format(problem, text, sizeof text);
        if (as_json) {
            json_array_append_new(list, floor_json(problem, text, &m, s->gpus, target_s));
        } else {
            print_floor(problem, text, &m, s->gpus, target_s);
        }
    }
    if (as_json) {
        json_print(list);
    } else {
        json_decref(list);
    }
}

int cmd_roofline(int argc, char **argv)
{
    common_options common;
    request r = {0};
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, NULL, &r, &exit_code);
    if (first < 0) {
        return exit_code;
    }
    if (r.gpu && strcmp(r.gpu, "help") == 0) {
        return list_gpus();
    }
    problem_list problems;
    exit_code = problems_parse(argv + first, argc - first, &problems);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    target s = {.gpus = 0};
    exit_code = read_several(&s, &r) ? find_target(&s, &r, &common) : EXIT_USAGE;
    if (exit_code == EXIT_DONE && !can_share(&s, &problems)) {
        exit_code = EXIT_USAGE;
    }
    if (exit_code == EXIT_DONE) {
        report(&problems, &s, r.target_s, common.json);
    }
    problems_free(&problems);
    return exit_code;
}
