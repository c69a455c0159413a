/* Timelines, see profile_timeline.h. */
#include "profile_timeline.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/child.h"
#include "base/files.h"
#include "bench/timer.h"
#include "kernels/kernel_source.h"

/* ---- The source: names of the steps, and the build ---- */

/* One past a C comment that begins here, or the same place. */
static const char *skip_comment(const char *at)
{
    if (at[0] == '/' && at[1] == '*') {
        const char *end = strstr(at + 2, "*/");
        return end ? end + 2 : at + strlen(at);
    }
    return at;
}

int timeline_names(char names[TRACE_STEPS][64], const char *source)
{
    static const char macro[] = "ACR_TRACE_POINT(";
    int count = 0;
    for (const char *at = source; *at && count < TRACE_STEPS;) {
        const char *after = skip_comment(at);
        if (after != at) {
            at = after;
        } else if (strncmp(at, macro, sizeof macro - 1) == 0) {
            const char *first = strchr(at, '"'), *end = first ? strchr(first + 1, '"') : NULL;
            if (!end) {
                break;
            }
            snprintf(names[count++], sizeof names[0], "%.*s", (int)(end - first - 1), first + 1);
            at = end;
        } else {
            ++at;
        }
    }
    return count;
}

enum {
    ARGUMENTS_MAX = 48,
    TEXT_MAX = 512
};

/* The compiler's command line, in memory that lives as long as it does. */
typedef struct compilation {
    char nvcc[PATH_MAX], include[PATH_MAX + 2], core[PATH_MAX + 8], file[PATH_MAX], gencode[64], name[160], at[64],
        output[64];
    char parameters[TEXT_MAX];
    const char *arguments[ARGUMENTS_MAX];
} compilation;

static void fill_arguments(compilation *c, const kernel_line *line, const acr__device *device)
{
    char arch[32];
    size_t count = 0;
    snprintf(arch, sizeof arch, "%s", line->arch);
    if (kernel_arch_is_portable(line->arch)) {
        snprintf(arch, sizeof arch, "%d", device->arch);
    }
    snprintf(c->gencode, sizeof c->gencode, "-gencode=arch=compute_%.15s,code=sm_%.15s", arch, arch);
    const char *const fixed[] = {c->nvcc, "-cubin",  c->gencode, "-std=c++17", "-O3",   "-Xptxas", "-v",
                                 "-o",    c->output, c->file,    c->include,   c->core, c->name,   c->at};
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; ++i) {
        c->arguments[count++] = fixed[i];
    }
    char *rest = NULL, *end = c->parameters;
    char words[sizeof line->parameters];
    memcpy(words, line->parameters, sizeof words);
    for (char *word = strtok_r(words, " ", &rest); word && count < ARGUMENTS_MAX - 1;
         word = strtok_r(NULL, " ", &rest)) {
        if (strncmp(word, "SPILLS_OK", strlen("SPILLS_OK")) != 0) {
            c->arguments[count++] = end;
            end += snprintf(end, sizeof c->parameters - (size_t)(end - c->parameters), "-D%s", word) + 1;
        }
    }
    c->arguments[count] = NULL;
}

static bool has_spills(const char *said)
{
    for (const char *at = strstr(said, " bytes spill stores"); at; at = strstr(at + 1, " bytes spill stores")) {
        if (at > said && (at[-1] != '0' || (at - 1 > said && at[-2] != ' ' && at[-2] != ','))) {
            return true;
        }
    }
    return false;
}

/* Runs the compiler and reads what it made. */
static profile_status compile(timeline *out, compilation *c, double limit_s, char **image, size_t *image_bytes)
{
    child_result result;
    if (child_run(&result, c->arguments, NULL, limit_s) != ACR_OK) {
        return profile_fail(&out->status, out->detail, PROFILE_NO_TOOL, "%s", acr_last_error());
    }
    if (result.timed_out) {
        profile_fail(&out->status, out->detail, PROFILE_TIMEOUT, "the compiler was killed after %g s", limit_s);
    } else if (result.exit_code != 0) {
        const char *error = strstr(result.err, "error");
        while (error && error > result.err && error[-1] != '\n') {
            --error;
        }
        profile_fail(&out->status, out->detail, PROFILE_COMPILE_FAILED, "%s with stamps does not compile: %.600s",
                     c->file, error ? error : result.err);
    } else {
        out->serialised = strstr(result.err, "Potential Performance Loss") != NULL;
        out->spilled = has_spills(result.err);
        *image = file_text(c->output, SIZE_MAX, image_bytes);
        if (!*image) {
            profile_fail(&out->status, out->detail, PROFILE_COMPILE_FAILED, "%s", acr_last_error());
        }
    }
    child_result_free(&result);
    return out->status;
}

/* The machine code of the kernel with stamps, which it is to leave at stamps_at in its workspace. */
static profile_status build(timeline *out, const timeline_request *r, size_t stamps_at, char **image,
                            size_t *image_bytes)
{
    char folder[PATH_MAX];
    kernel_line line;
    compilation c = {.output = "/tmp/acromion-timeline-XXXXXX"};
    if (!kernel_source_folder(folder, r->source) || !kernel_source_line(&line, folder, r->kernel->name) ||
        !kernel_source_file(c.file, folder, line.family)) {
        return profile_fail(&out->status, out->detail, PROFILE_NO_SOURCE,
                            "the source of %s is not here; --source names the folder src of its tree", r->kernel->name);
    }
    size_t bytes = 0;
    char *source = file_text(c.file, SIZE_MAX, &bytes);
    out->steps = source ? timeline_names(out->names, source) : 0;
    free(source);
    if (out->steps == 0) {
        return profile_fail(&out->status, out->detail, PROFILE_NO_MARKS, "%s has no ACR_TRACE_POINT: no step to time",
                            c.file);
    }
    if (!kernel_find_nvcc(c.nvcc)) {
        return profile_fail(&out->status, out->detail, PROFILE_NO_TOOL,
                            "no nvcc here: neither ACR_NVCC, nor on PATH, nor in CUDA_HOME/bin or /usr/local/cuda/bin");
    }
    int fd = mkstemp(c.output);
    if (fd < 0) {
        return profile_fail(&out->status, out->detail, PROFILE_COMPILE_FAILED, "no temporary file can be made");
    }
    close(fd);
    snprintf(c.include, sizeof c.include, "-I%s", folder);
    snprintf(c.core, sizeof c.core, "-I%s/core", folder);
    snprintf(c.name, sizeof c.name, "-DKERNEL_NAME=%s", r->kernel->symbol);
    snprintf(c.at, sizeof c.at, "-DACR_TRACE_AT=%zu", stamps_at);
    fill_arguments(&c, &line, &acr__ctx_backend_device(r->ctx)->device);
    compile(out, &c, r->limit_s, image, image_bytes);
    unlink(c.output);
    return out->status;
}

/* ---- Launching ---- */

enum {
    TRACE_WORDS = TRACE_HEADER_WORDS + TRACE_CTAS * TRACE_GROUPS * TRACE_STEPS * TRACE_HITS
};

/* Of the kernel with stamps; a kernel's workspace is asked for by a function without an argument for it. */
static size_t stamped_workspace_bytes;

static size_t stamped_workspace(const acr_problem *problem, const acr__device *device)
{
    (void)problem;
    (void)device;
    return stamped_workspace_bytes;
}

/* Time of a launch in a stream of them: a few replays are enough for what the stamps cost. */
static acr_status time_launch(double *us, acr__backend_device *device, execution *e)
{
    enum {
        LAUNCHES = 20,
        REPLAYS = 40
    };
    double seconds[REPLAYS];
    const acr_status status = device->backend->time(device, execution_enqueue, e, LAUNCHES, REPLAYS, seconds);
    if (status == ACR_OK) {
        *us = 1e6 * stats_summarise(seconds, REPLAYS).p50;
    }
    return status;
}

static acr_status launch_plain(timeline *out, const timeline_request *r)
{
    execution *e = NULL;
    acr_status status = execution_create(&e, r->ctx, r->kernel, r->problem, r->ref, false, 0, ALLOCATOR_ALIGNMENT);
    if (status == ACR_OK) {
        status = execution_run(e);
    }
    if (status == ACR_OK) {
        status = time_launch(&out->plain_us, acr__ctx_backend_device(r->ctx), e);
    }
    execution_destroy(e);
    return status;
}

/* Lets the kernel hand its stamps over, launches once so that it forgets those of all launches before, launches again
 * and reads. */
static acr_status read_stamps(uint32_t *words, execution *e, size_t stamps_at)
{
    const uint32_t asked = 1;
    acr_status status =
        execution_write_workspace(e, stamps_at + TRACE_ASKED_WORD * sizeof *words, &asked, sizeof asked);
    for (int i = 0; i < 2 && status == ACR_OK; ++i) {
        status = execution_run(e);
    }
    if (status == ACR_OK) {
        status = execution_read_workspace(e, stamps_at, words, TRACE_WORDS * sizeof *words);
    }
    return status;
}

/* Times many launches, then makes one alone and reads its stamps. */
static acr_status launch_stamped(timeline *out, const timeline_request *r, const acr__kernel *stamped, size_t stamps_at)
{
    acr__backend_device *device = acr__ctx_backend_device(r->ctx);
    execution *e = NULL;
    uint32_t *words = calloc(TRACE_WORDS, sizeof *words);
    acr_status status = words ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for the stamps");
    if (status == ACR_OK) {
        status = execution_create(&e, r->ctx, stamped, r->problem, r->ref, false, 0, ALLOCATOR_ALIGNMENT);
    }
    if (status == ACR_OK) {
        status = execution_run(e);
    }
    if (status == ACR_OK) {
        status = time_launch(&out->stamped_us, device, e);
    }
    if (status == ACR_OK) {
        status = read_stamps(words, e, stamps_at);
    }
    if (status == ACR_OK) {
        timeline_evaluate(out, words);
    }
    execution_destroy(e);
    free(words);
    return status;
}

acr_status timeline_run(timeline *out, const timeline_request *r)
{
    const acr__device *device = &acr__ctx_backend_device(r->ctx)->device;
    size_t own = r->kernel->workspace ? r->kernel->workspace(r->problem, device) : 0;
    size_t stamps_at = (own + 255) / 256 * 256, image_bytes = 0;
    char *image = NULL;
    *out = (timeline){.status = PROFILE_OK};
    if (build(out, r, stamps_at, &image, &image_bytes) != PROFILE_OK) {
        return ACR_OK;
    }
    acr__launch shape = {.block = 0};
    r->kernel->shape(r->problem, device, &shape);
    out->ctas_of_grid = (int)(shape.grid[0] * shape.grid[1] * shape.grid[2]);
    acr__kernel stamped = *r->kernel;
    stamped.image = (const unsigned char *)image;
    stamped.image_end = stamped.image + image_bytes;
    stamped.workspace = stamped_workspace;
    stamped_workspace_bytes = stamps_at + TRACE_WORDS * sizeof(uint32_t);
    acr_status status = launch_plain(out, r);
    if (status == ACR_OK) {
        status = launch_stamped(out, r, &stamped, stamps_at);
    }
    free(image);
    if (status == ACR_OK && out->ctas == 0) {
        profile_fail(&out->status, out->detail, PROFILE_NO_KERNEL, "the launch of %s left no stamp", r->kernel->name);
    }
    return status;
}

/* ---- Evaluating ---- */

typedef struct stamp {
    int32_t cycles; /* since the CTA's first */
    int step;
} stamp;

static int by_time(const void *a, const void *b)
{
    const stamp *x = a, *y = b;
    return x->cycles != y->cycles ? (x->cycles < y->cycles ? -1 : 1) : x->step - y->step;
}

static bool is_stamp(uint32_t word)
{
    return word != 0 && word != UINT32_MAX;
}

static const uint32_t *group_words(const uint32_t *words, int cta, int group)
{
    return words + TRACE_HEADER_WORDS + (cta * TRACE_GROUPS + group) * TRACE_STEPS * TRACE_HITS;
}

/* The earliest stamp of a CTA; clocks wrap, and differences within a launch do not. */
static bool first_clock(uint32_t *out, const uint32_t *words, int cta)
{
    bool any = false;
    for (int group = 0; group < TRACE_GROUPS; ++group) {
        const uint32_t *at = group_words(words, cta, group);
        for (int i = 0; i < TRACE_STEPS * TRACE_HITS; ++i) {
            if (is_stamp(at[i]) && (!any || (int32_t)(at[i] - *out) < 0)) {
                *out = at[i];
                any = true;
            }
        }
    }
    return any;
}

static int group_stamps(stamp *out, const uint32_t *at, uint32_t first)
{
    int count = 0;
    for (int step = 0; step < TRACE_STEPS; ++step) {
        for (int hit = 0; hit < TRACE_HITS; ++hit) {
            uint32_t word = at[step * TRACE_HITS + hit];
            if (is_stamp(word)) {
                out[count++] = (stamp){(int32_t)(word - first), step};
            }
        }
    }
    qsort(out, (size_t)count, sizeof *out, by_time);
    return count;
}

/* What one CTA says of one step of one group; hits 0 = nothing. */
typedef struct observation {
    double hits, first, each, share;
} observation;

/* Every CTA's, [step][cta] of one group. */
typedef struct observations {
    observation of[TRACE_STEPS][TRACE_CTAS];
} observations;

static void observe(observations *all, int cta, const stamp *stamps, int count)
{
    double total = count > 0 ? stamps[count - 1].cycles : 0;
    for (int i = 0; i < count; ++i) {
        observation *o = &all->of[stamps[i].step][cta];
        double spent = stamps[i].cycles - (i > 0 ? stamps[i - 1].cycles : 0);
        o->first = o->hits > 0 ? o->first : stamps[i].cycles;
        o->hits += 1;
        o->each += spent; /* the sum, until below */
        o->share += total > 0 ? spent / total : 0;
    }
    for (int step = 0; step < TRACE_STEPS; ++step) {
        observation *o = &all->of[step][cta];
        o->each /= fmax(o->hits, 1);
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of one field of the observations that have hits. */
static double median_of(const observation *row, size_t offset, double *most)
{
    double values[TRACE_CTAS];
    size_t count = 0;
    for (int cta = 0; cta < TRACE_CTAS; ++cta) {
        if (row[cta].hits > 0) {
            values[count++] = *(const double *)((const char *)&row[cta] + offset);
        }
    }
    if (count == 0) {
        return 0;
    }
    qsort(values, count, sizeof values[0], by_value);
    *most = values[count - 1];
    return (values[(count - 1) / 2] + values[count / 2]) / 2;
}

static void summarise(timeline *out, int group, const observations *all)
{
    for (int step = 0; step < out->steps; ++step) {
        const observation *row = all->of[step];
        timeline_step *s = &out->table[group][step];
        double unused = 0;
        s->hits = (int)lround(median_of(row, offsetof(observation, hits), &unused));
        s->first_cycles = median_of(row, offsetof(observation, first), &s->first_max);
        s->each_cycles = median_of(row, offsetof(observation, each), &s->each_max);
        s->share = median_of(row, offsetof(observation, share), &unused);
        out->group_seen[group] = out->group_seen[group] || s->hits > 0;
    }
}

void timeline_evaluate(timeline *out, const uint32_t *words)
{
    observations *all = calloc(TRACE_GROUPS, sizeof *all);
    stamp *stamps = calloc(TRACE_STEPS * TRACE_HITS, sizeof *stamps);
    observation *ends = calloc(TRACE_CTAS, sizeof *ends);
    out->warps_of_group = (int)words[TRACE_WARPS_WORD];
    out->ctas = 0;
    for (int cta = 0; cta < TRACE_CTAS && all && stamps && ends; ++cta) {
        uint32_t first = 0;
        if (!first_clock(&first, words, cta)) {
            continue;
        }
        ++out->ctas;
        for (int group = 0; group < TRACE_GROUPS; ++group) {
            int count = group_stamps(stamps, group_words(words, cta, group), first);
            observe(&all[group], cta, stamps, count);
            if (count > 0) {
                ends[cta] = (observation){1, fmax(ends[cta].first, stamps[count - 1].cycles), 0, 0};
            }
        }
    }
    for (int group = 0; group < TRACE_GROUPS && out->ctas > 0; ++group) {
        summarise(out, group, &all[group]);
    }
    if (out->ctas > 0) {
        out->cta_cycles = median_of(ends, offsetof(observation, first), &out->cta_max);
    }
    free(all);
    free(stamps);
    free(ends);
}
