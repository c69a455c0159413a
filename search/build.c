/* Compiling and loading candidates, see build.h. */
#include "build.h"

#include <dlfcn.h>
#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "admission.h"
#include "base/files.h"
#include "base/process.h"
#include "kernels/kernel_source.h"

enum {
    ARGS_MAX = 96,
    ARG_BYTES = PATH_MAX + 64,
    LOG_BYTES = 64 << 10
};

const char *build_source_root(const char *wanted)
{
    const char *named = getenv("ACROMION_SOURCE");
    return wanted ? wanted : named && *named ? named : ACR_SOURCE_ROOT;
}

/* ---- Files ---- */

static acr_status write_text(const char *folder, const char *file, const char *text)
{
    char path[PATH_MAX];
    const file_part part = {text, strlen(text)};
    acr_status status = file_path(path, folder, file, "");
    return status == ACR_OK ? file_write(path, &part, 1) : status;
}

/* The beginning of a file as text; the caller frees it. NULL after leaving the reason in acr_last_error(). */
static char *read_text(const char *folder, const char *file, size_t bytes_max)
{
    char path[PATH_MAX];
    size_t bytes;
    return file_path(path, folder, file, "") == ACR_OK ? file_text(path, bytes_max, &bytes) : NULL;
}

/* ---- Command lines ---- */

typedef struct command_line {
    const char *argv[ARGS_MAX + 1];
    char *texts[ARGS_MAX];
    size_t count;
    bool failed;
} command_line;

__attribute__((format(printf, 2, 3))) static void add(command_line *line, const char *format, ...)
{
    char text[ARG_BYTES];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (length < 0 || length >= ARG_BYTES || line->count == ARGS_MAX || !(line->texts[line->count] = strdup(text))) {
        line->failed = true;
        return;
    }
    line->argv[line->count] = line->texts[line->count];
    line->argv[++line->count] = NULL;
}

static void add_words(command_line *line, const char *prefix, const char *words)
{
    for (const char *at = words + strspn(words, " "); *at; at += strspn(at, " ")) {
        const size_t length = strcspn(at, " ");
        add(line, "%s%.*s", prefix, (int)length, at);
        at += length;
    }
}

static void free_line(command_line *line)
{
    for (size_t i = 0; i < line->count; ++i) {
        free(line->texts[i]);
    }
}

/* The lines of a log that say what is wrong, else its beginning. */
static void quote_log(char *out, size_t capacity, const char *folder, const char *log)
{
    char *text = read_text(folder, log, LOG_BYTES);
    size_t used = 0;
    out[0] = '\0';
    for (char *line = text; line && *line && used + 1 < capacity;) {
        char *end = strchr(line, '\n');
        const size_t length = end ? (size_t)(end - line) : strlen(line);
        char *const next = end ? end + 1 : line + length;
        line[length] = '\0';
        if (strstr(line, "error") || strstr(line, "undefined") || strstr(line, "cannot run")) {
            const int wrote = snprintf(out + used, capacity - used, "%s%s", used ? "\n" : "", line);
            used += wrote > 0 ? (size_t)wrote : 0;
        }
        line = next;
    }
    if (used == 0) {
        snprintf(out, capacity, "%s", text ? text : "no output");
    }
    free(text);
}

/* Runs a compiler. False after filling result, with status `failed` where it refused its input. */
static bool compile(const command_line *line, const artefact *a, const build_tools *tools, const char *log,
                    trial_result *result)
{
    char path[PATH_MAX], ended[96], temporary[PATH_MAX];
    process_limits limits = {
        .wall_s = tools->timeout_s, .memory_bytes = (int64_t)8 << 30, .file_bytes = (int64_t)512 << 20};
    process_outcome outcome;
    acr_status status = line->failed ? ACR_IO : file_path(path, a->folder, log, "");
    if (status == ACR_OK) {
        status = file_path(temporary, a->folder, "tmp", "");
    }
    if (status == ACR_OK && mkdir(temporary, 0700) != 0 && errno != EEXIST) {
        status = acr__fail(ACR_IO, "%s: %s", temporary, strerror(errno));
    }
    if (status == ACR_OK) {
        limits.temporary = temporary; /* a killed compiler removes nothing */
        status = process_run(&outcome, line->argv, path, &limits, tools->stop);
        folder_remove(temporary);
    }
    if (status != ACR_OK) {
        result->status = TRIAL_HARNESS_FAILED;
        snprintf(result->detail, sizeof result->detail, "%s",
                 line->failed ? "command line too long" : acr_last_error());
        return false;
    }
    if (outcome.end == PROCESS_EXITED && outcome.code == 0) {
        return true;
    }
    process_outcome_text(ended, &outcome);
    if (outcome.end == PROCESS_TIMED_OUT) {
        result->status = TRIAL_COMPILE_TIMEOUT;
        snprintf(result->detail, sizeof result->detail, "%s %s", line->argv[0], ended);
    } else if (outcome.end == PROCESS_STOPPED || (outcome.end == PROCESS_EXITED && outcome.code == 127)) {
        result->status = TRIAL_HARNESS_FAILED;
        snprintf(result->detail, sizeof result->detail, "%s: %s", line->argv[0], ended);
    } else {
        result->status = TRIAL_COMPILE_FAILED;
        quote_log(result->detail, sizeof result->detail, a->folder, log);
    }
    return false;
}

/* ---- Wrappers ---- */

/* "#define NAME value" for each parameter. */
static void write_defines(FILE *file, const char *parameters)
{
    for (const char *at = parameters + strspn(parameters, " "); *at; at += strspn(at, " ")) {
        const size_t length = strcspn(at, " "), name = strcspn(at, "=");
        fprintf(file, "#define %.*s %.*s\n", (int)name, at, (int)(length - name - 1), at + name + 1);
        at += length;
    }
}

static acr_status write_wrapper(const artefact *a, const candidate *c, const char *family_file)
{
    char *text = NULL;
    size_t size;
    FILE *file = open_memstream(&text, &size);
    if (!file) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a wrapper");
    }
    fprintf(file, "/* Generated: what is compiled of a candidate. */\n");
    write_defines(file, c->parameters);
    fprintf(file,
            "#define KERNEL_NAME " CANDIDATE_SYMBOL "\n#define KERNEL_TEXT \"" CANDIDATE_SYMBOL "\"\n"
            "#define KERNEL_ARCH \"%s\"\n#define KERNEL_ARCH_%s 1\n#include \"kernel.h\"\n",
            c->arch, c->arch);
    if (c->source) {
        fprintf(file, "__attribute__((visibility(\"default\"))) acr__cpu_run KERNEL_NAME;\n#include \"candidate.c\"\n");
    } else {
        fprintf(file,
                "#define KERNEL_DESCRIPTION " CANDIDATE_DESCRIPTION "\n"
                "extern const acr__kernel KERNEL_DESCRIPTION __attribute__((visibility(\"default\")));\n"
                "static const unsigned char no_image[1] = {0};\n#define KERNEL_IMAGE no_image\n"
                "#define KERNEL_IMAGE_END no_image\n#include \"%s\"\n",
                family_file);
    }
    acr_status status = fclose(file) == 0 && text ? write_text(a->folder, "wrapper.c", text)
                                                  : acr__fail(ACR_NO_MEMORY, "no memory for a wrapper");
    free(text);
    return status;
}

static acr_status write_inputs(const artefact *a, const candidate *c, const char *source_root)
{
    static const char exported[] = "{ global: " CANDIDATE_SYMBOL "; " CANDIDATE_DESCRIPTION "; local: *; };\n";
    char family_file[128] = "";
    acr_status status = c->source ? ACR_OK : admission_family_file(family_file, c, source_root);
    if (status == ACR_OK && c->source) {
        status = write_text(a->folder, c->backend == ACR__CPU ? "candidate.c" : "candidate.cu", c->source);
    }
    if (status == ACR_OK && c->descriptor) {
        status = write_text(a->folder, "descriptor.json", c->descriptor);
    }
    if (status == ACR_OK) {
        status = write_text(a->folder, "exported.map", exported);
    }
    return status == ACR_OK ? write_wrapper(a, c, family_file) : status;
}

/* ---- CPU ---- */

static const char *isa_flags(const char *arch)
{
#define AVX512_FLAGS "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c"
    return strcmp(arch, "avx512bf16") == 0 ? AVX512_FLAGS " -mavx512bf16"
           : strcmp(arch, "avx512") == 0   ? AVX512_FLAGS
           : strcmp(arch, "avx2") == 0     ? "-mavx2 -mfma -mf16c"
                                           : "";
}

static void add_includes(command_line *line, const build_tools *tools)
{
    add(line, "-I%s/src", tools->source_root);
    add(line, "-I%s/src/core", tools->source_root);
    add(line, "-I%s/include", tools->source_root);
}

/* What the compiler is told of a CPU candidate, whether it preprocesses or compiles. */
static void add_cpu_flags(command_line *line, const build_tools *tools, const candidate *c)
{
    add(line, "%s", tools->cc);
    add_words(line, "", "-std=c11 -O3 -ffp-contract=fast -fno-math-errno -ffreestanding -fPIC -fvisibility=hidden -w");
    add_words(line, "", "-fno-stack-protector -fno-asynchronous-unwind-tables -fno-unwind-tables -fno-ident");
#if defined __x86_64__
    add(line, "-fcf-protection=none");
#endif
    add_words(line, "", isa_flags(c->arch));
    add_includes(line, tools);
}

/* A source is looked at again as the preprocessor leaves it. */
static bool check_preprocessed(const artefact *a, const build_tools *tools, const candidate *c, trial_result *result)
{
    static const size_t BYTES_MAX = (size_t)256 << 20;
    command_line line = {.count = 0};
    if (!c->source) {
        return true;
    }
    add_cpu_flags(&line, tools, c);
    add(&line, "-E");
    add(&line, "%s/wrapper.c", a->folder);
    const bool done = compile(&line, a, tools, "preprocessed.txt", result);
    free_line(&line);
    char *text = done ? read_text(a->folder, "preprocessed.txt", BYTES_MAX) : NULL;
    const acr_status status = text ? admission_check_preprocessed(text, "candidate.c") : ACR_IO;
    free(text);
    if (done && status != ACR_OK) {
        result->status = status == ACR_INVALID ? TRIAL_INADMISSIBLE : TRIAL_HARNESS_FAILED;
        result->gate = GATE_ADMISSION;
        snprintf(result->detail, sizeof result->detail, "preprocessed: %s", acr_last_error());
    }
    return done && status == ACR_OK;
}

/* The core's only code that families call. */
static void add_core(command_line *line, const build_tools *tools)
{
    static const char *const files[] = {"terms.c", "visible.c"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
        add(line, "%s/src/core/%s", tools->source_root, files[i]);
}

static bool compile_cpu(const artefact *a, const build_tools *tools, const candidate *c, trial_result *result)
{
    command_line line = {.count = 0};
    if (!check_preprocessed(a, tools, c, result)) {
        return false;
    }
    add_cpu_flags(&line, tools, c);
    add_words(&line, "",
              "-shared -nostdlib -Wl,-Bsymbolic,--build-id=none,-z,noexecstack,-z,relro,-z,now,--hash-style=gnu");
    add(&line, "-Wl,--version-script=%s/exported.map", a->folder);
    add(&line, "-o");
    add(&line, "%s/code.so", a->folder);
    add(&line, "%s/wrapper.c", a->folder);
    if (!c->source) {
        add_core(&line, tools);
    }
    add(&line, "%s/search/freestanding.c", tools->source_root);
    bool done = compile(&line, a, tools, "compile.log", result);
    free_line(&line);
    if (!done) {
        return false;
    }
    command_line disassemble = {.count = 0};
    add_words(&disassemble, "", "objdump -d --no-show-raw-insn");
    add(&disassemble, "%s/code.so", a->folder);
    done = compile(&disassemble, a, tools, "code.txt", result);
    free_line(&disassemble);
    if (!done && result->status == TRIAL_COMPILE_FAILED) {
        result->status = TRIAL_HARNESS_FAILED;
    }
    return done;
}

/* ---- CUDA ---- */

/* One cubin: the portable families are compiled for the device that is here. */
static void cubin_arch(char out[16], const candidate *c, const acr__device *device)
{
    if (kernel_arch_is_portable(c->arch)) {
        snprintf(out, 16, "%d", (int)device->arch);
    } else {
        snprintf(out, 16, "%s", c->arch);
    }
}

static bool compile_image(const artefact *a, const build_tools *tools, const candidate *c, const char *source,
                          trial_result *result)
{
    char arch[16];
    cubin_arch(arch, c, tools->device);
    command_line line = {.count = 0};
    add_words(&line, "", "env KEEP_PTX=1 sh");
    add(&line, "%s/cmake/compile_image.sh", tools->source_root);
    add(&line, "%s", tools->nvcc);
    add(&line, "%s/image.bin", a->folder);
    add(&line, "%s", arch);
    add(&line, "%s", ""); /* no portable architectures: one cubin, whatever the architecture */
    add(&line, "SPILLS_OK=gate");
    add(&line, "%s", source);
    add_includes(&line, tools);
    if (access(ACR_CUDA_INCLUDE "/cuda_fp16.h", R_OK) == 0) { /* the build's, for toolkits whose nvcc does not know */
        add(&line, "-I" ACR_CUDA_INCLUDE);
    }
    add_words(&line, "-D", c->parameters);
    add(&line, "-DKERNEL_NAME=" CANDIDATE_SYMBOL);
    bool done = compile(&line, a, tools, "compile.log", result);
    free_line(&line);
    if (!done && result->status == TRIAL_COMPILE_FAILED && strstr(result->detail, "wgmma is serialised")) {
        result->status = TRIAL_RESOURCES;
        result->gate = GATE_RESOURCES;
    }
    return done;
}

static void add_host_flags(command_line *line, const build_tools *tools)
{
    add(line, "%s", tools->cc);
    add_words(line, "", "-std=c11 -O1 -fPIC -fvisibility=hidden -ffunction-sections -w -D_GNU_SOURCE -shared");
    add_words(line, "", "-Wl,--build-id=none");
    add_includes(line, tools);
}

/* What the C halves of all cuda families call. */
static void add_common_files(command_line *line, const build_tools *tools)
{
    /* What says of a problem's tensors what fwd_model.c asks. */
    static const char *const described_by[] = {"problem.c", "backward.c", "paging.c", "buffers.c", "error.c"};
    add(line, "%s/src/cuda/model/fwd_model.c", tools->source_root);
    add_core(line, tools);
    for (size_t i = 0; i < sizeof described_by / sizeof described_by[0]; i++)
        add(line, "%s/src/core/%s", tools->source_root, described_by[i]);
}

/* The C half of a family: ours, so it may be loaded. */
static bool compile_host(const artefact *a, const build_tools *tools, trial_result *result)
{
    command_line line = {.count = 0};
    add_host_flags(&line, tools);
    add(&line, "-Wl,--gc-sections");
    add(&line, "-o");
    add(&line, "%s/host.so", a->folder);
    add(&line, "%s/wrapper.c", a->folder);
    if (tools->common) {
        add(&line, "%s", tools->common);
    } else {
        add_common_files(&line, tools);
    }
    add(&line, "-lm");
    bool done = compile(&line, a, tools, "host.log", result);
    free_line(&line);
    return done;
}

bool build_common(const char *folder, const build_tools *tools, trial_result *result)
{
    artefact a = {.backend = ACR__CUDA};
    command_line line = {.count = 0};
    snprintf(a.folder, sizeof a.folder, "%s", folder);
    add_host_flags(&line, tools);
    add(&line, "-fvisibility=default");
    add(&line, "-o");
    add(&line, "%s/common.so", folder);
    add_common_files(&line, tools);
    add(&line, "-lm");
    const bool done = compile(&line, &a, tools, "common.log", result);
    free_line(&line);
    return done;
}

bool build_describe(const artefact *a, const build_tools *tools, const candidate *c, trial_result *result)
{
    if (write_inputs(a, c, tools->source_root) != ACR_OK) {
        result->status = TRIAL_HARNESS_FAILED;
        snprintf(result->detail, sizeof result->detail, "%s", acr_last_error());
        return false;
    }
    return compile_host(a, tools, result);
}

static bool compile_cuda(const artefact *a, const build_tools *tools, const candidate *c, trial_result *result)
{
    char file[128], source[PATH_MAX + 256];
    if (c->source) {
        snprintf(source, sizeof source, "%s/candidate.cu", a->folder);
        return compile_image(a, tools, c, source, result);
    }
    admission_family_file(file, c, tools->source_root);
    snprintf(source, sizeof source, "%s/src/%s", tools->source_root, file);
    return compile_image(a, tools, c, source, result) && compile_host(a, tools, result);
}

bool build_compile(artefact *a, const build_tools *tools, const candidate *c, trial_result *result)
{
    if (write_inputs(a, c, tools->source_root) != ACR_OK) {
        result->status = TRIAL_HARNESS_FAILED;
        snprintf(result->detail, sizeof result->detail, "%s", acr_last_error());
        return false;
    }
    return c->backend == ACR__CPU ? compile_cpu(a, tools, c, result) : compile_cuda(a, tools, c, result);
}

/* ---- Resources ---- */

/* The number before a phrase, of the last line that has it after the entry's own; 0 where none has. */
static int64_t number_before(const char *text, const char *phrase)
{
    const char *at = text ? strstr(text, phrase) : NULL;
    if (!at) {
        return 0;
    }
    while (at > text && at[-1] == ' ') {
        --at;
    }
    while (at > text && at[-1] >= '0' && at[-1] <= '9') {
        --at;
    }
    return strtoll(at, NULL, 10);
}

acr_status build_read_resources(const artefact *a, trial_resources *out)
{
    char *log = read_text(a->folder, "image.bin.ptxas", LOG_BYTES);
    if (!log) {
        return ACR_IO;
    }
    const char *entry = strstr(log, "Compiling entry function '" CANDIDATE_SYMBOL "'");
    const char *used = entry ? strstr(entry, "Used ") : NULL;
    acr_status status = used ? ACR_OK : acr__fail(ACR_FORMAT, "no kernel named KERNEL_NAME was compiled");
    if (used) {
        out->registers = strtoll(used + 5, NULL, 10);
        char *end = strchr(used, '\n');
        if (end) {
            *end = '\0';
        }
        out->smem_bytes = number_before(used, " bytes smem");
        if (end) {
            *end = '\n';
        }
        out->stack_bytes = number_before(entry, " bytes stack frame");
        out->spill_bytes = 0;
        for (const char *at = strstr(log, " bytes stack frame"); at; at = strstr(at + 1, " bytes stack frame")) {
            out->spill_bytes += number_before(at, " bytes spill stores") + number_before(at, " bytes spill loads");
        }
    }
    free(log);
    return status;
}

/* ---- Launches ---- */

/* Who says what is launched: the C half of a family, or, where kernel is NULL, a source's descriptor. */
typedef struct launcher {
    const descriptor *d;
    const acr__kernel *kernel;
} launcher;

/* A helper's launch, behind the kernel's own; nothing of one that there is not. */
static void add_helper(char *text, size_t capacity, size_t *used, const acr__helper *helper, const acr_problem *problem,
                       const acr__device *device)
{
    acr__launch launch = {.block = 1};
    if (!helper->symbol) {
        return;
    }
    helper->shape(problem, device, &launch);
    const int wrote = snprintf(text + *used, capacity - *used, "%s %u,%u,%u/%u/%u\n", helper->symbol, launch.grid[0],
                               launch.grid[1], launch.grid[2], launch.block, launch.smem_bytes);
    *used += wrote > 0 && (size_t)wrote < capacity - *used ? (size_t)wrote : 0;
}

static const char *launch_of(acr__launch *launch, size_t *workspace_bytes, acr__boxes *boxes, const launcher *l,
                             const acr_problem *problem, const acr__device *device)
{
    const char *reason =
        l->kernel ? acr__why_not(l->kernel, problem, device) : descriptor_why_not(l->d, problem, device);
    *launch = (acr__launch){.block = 1};
    if (reason) {
        return reason;
    }
    if (l->kernel) {
        *workspace_bytes = l->kernel->workspace ? l->kernel->workspace(problem, device) : 0;
        *boxes = l->kernel->boxes;
        l->kernel->shape(problem, device, launch);
        return NULL;
    }
    *workspace_bytes = descriptor_workspace(l->d, problem, device);
    *boxes = l->d->boxes;
    if (l->d->backend == ACR__CUDA) {
        descriptor_shape(l->d, problem, device, launch);
    }
    return NULL;
}

static const char *find_launches(build_launches *out, char *text, size_t capacity, const launcher *l,
                                 const acr__device *device, const judge_problem *problems, size_t problem_count)
{
    size_t used = 0;
    for (size_t i = 0; i < problem_count; ++i) {
        acr__launch launch;
        acr__boxes boxes;
        size_t workspace_bytes;
        const char *reason = launch_of(&launch, &workspace_bytes, &boxes, l, &problems[i].problem, device);
        if (reason) {
            return reason;
        }
        out->block = launch.block > out->block ? launch.block : out->block;
        out->smem_bytes = launch.smem_bytes > out->smem_bytes ? launch.smem_bytes : out->smem_bytes;
        const int wrote = snprintf(text + used, capacity - used, "%u,%u,%u/%u/%u/%u/%zu/%d,%d,%d,%d,%d/%d\n",
                                   launch.grid[0], launch.grid[1], launch.grid[2], launch.block, launch.cluster,
                                   launch.smem_bytes, workspace_bytes, boxes.q_rows, boxes.k_rows, boxes.v_rows,
                                   boxes.o_rows, boxes.out_rows, l->kernel ? 0 : (int)l->d->q_tile);
        used += wrote > 0 && (size_t)wrote < capacity - used ? (size_t)wrote : 0;
        if (l->kernel) {
            add_helper(text, capacity, &used, &l->kernel->before, &problems[i].problem, device);
            add_helper(text, capacity, &used, &l->kernel->after, &problems[i].problem, device);
        }
    }
    return NULL;
}

static acr_status open_library(void **handle, const artefact *a, const char *file);

acr_status build_find_launches(build_launches *out, char *text, size_t capacity, const char **reason, const artefact *a,
                               const descriptor *d, const acr__device *device, const judge_problem *problems,
                               size_t problem_count)
{
    static _Thread_local char kept[256];
    launcher l = {d, NULL};
    void *handle = NULL;
    *reason = NULL;
    if (!a->is_source && a->backend == ACR__CPU) {
        return ACR_OK; /* its description is part of the object, and so of the identity */
    }
    acr_status status = a->is_source ? ACR_OK : open_library(&handle, a, "host.so");
    if (status == ACR_OK && handle) {
        l.kernel = dlsym(handle, CANDIDATE_DESCRIPTION);
        status = l.kernel ? ACR_OK : acr__fail(ACR_FORMAT, "the family has no description");
    }
    if (status == ACR_OK) {
        *reason = find_launches(out, text, capacity, &l, device, problems, problem_count);
    }
    if (*reason) {
        snprintf(kept, sizeof kept, "%s", *reason); /* the family's own text goes with its library */
        *reason = kept;
    }
    if (handle) {
        dlclose(handle);
    }
    return status;
}

/* ---- The artefact on disk ---- */

acr_status build_save(const artefact *a)
{
    json_t *object = json_pack("{s:s, s:b, s:s, s:s}", "backend", a->backend == ACR__CPU ? "cpu" : "cuda", "source",
                               (int)a->is_source, "arch", a->arch, "identity", a->identity);
    char *text = object ? json_dumps(object, JSON_INDENT(1)) : NULL;
    acr_status status = text ? write_text(a->folder, "artefact.json", text)
                             : acr__fail(ACR_NO_MEMORY, "no memory for a trial's record");
    free(text);
    json_decref(object);
    return status;
}

static acr_status read_artefact(artefact *out, const char *folder)
{
    char path[PATH_MAX];
    json_error_t error;
    acr_status status = file_path(path, folder, "artefact.json", "");
    json_t *object = status == ACR_OK ? json_load_file(path, 0, &error) : NULL;
    if (!object) {
        return acr__fail(ACR_FORMAT, "%s: no readable artefact.json", folder);
    }
    const char *backend, *arch, *identity;
    int source;
    if (json_unpack(object, "{s:s, s:b, s:s, s:s}", "backend", &backend, "source", &source, "arch", &arch, "identity",
                    &identity) == 0) {
        out->backend = strcmp(backend, "cpu") == 0 ? ACR__CPU : ACR__CUDA;
        out->is_source = source != 0;
        snprintf(out->folder, sizeof out->folder, "%s", folder);
        snprintf(out->arch, sizeof out->arch, "%s", arch);
        snprintf(out->identity, sizeof out->identity, "%s", identity);
    } else {
        status = acr__fail(ACR_FORMAT, "%s: not an artefact", path);
    }
    json_decref(object);
    return status;
}

/* ---- Loading ---- */

/* Descriptors of the loaded sources. An acr__kernel's functions take no argument of their own, so each slot has its own
 * functions. */
static descriptor described[LOADED_SLOTS];

static uint32_t isa_of(const char *arch)
{
    return strcmp(arch, "avx512bf16") == 0 ? ACR__ISA_AVX512BF16
           : strcmp(arch, "avx512") == 0   ? ACR__ISA_AVX512
           : strcmp(arch, "avx2") == 0     ? ACR__ISA_AVX2
                                           : ACR__ISA_PORTABLE;
}

/* Only lanes to share the work among depend on it, and the model clock. */
static double described_cost(const acr_problem *problem, const acr__device *device)
{
    const double rows = (double)problem->batch * (double)problem->q_heads * (double)problem->q_len;
    const double work = rows * (double)problem->kv_len * (double)(problem->qk_dim + problem->v_dim);
    const double lanes = device->backend == ACR__CPU ? 16.0 * device->threads : 1024.0 * device->sm_count;
    return work / (lanes * device->clock_hz);
}

#define SLOT_FUNCTIONS(slot, suffix)                                                                                   \
    static const char *why_not_##suffix(const acr_problem *problem, const acr__device *device)                         \
    {                                                                                                                  \
        return descriptor_why_not(&described[slot], problem, device);                                                  \
    }                                                                                                                  \
    static size_t workspace_##suffix(const acr_problem *problem, const acr__device *device)                            \
    {                                                                                                                  \
        return descriptor_workspace(&described[slot], problem, device);                                                \
    }                                                                                                                  \
    static void shape_##suffix(const acr_problem *problem, const acr__device *device, acr__launch *launch)             \
    {                                                                                                                  \
        descriptor_shape(&described[slot], problem, device, launch);                                                   \
    }

SLOT_FUNCTIONS(LOADED_CANDIDATE, candidate)
SLOT_FUNCTIONS(LOADED_INCUMBENT, incumbent)

static acr_status describe(loaded *out, loaded_slot slot, const artefact *a, const acr__device *device)
{
    char *json = read_text(a->folder, "descriptor.json", CANDIDATE_SOURCE_BYTES_MAX);
    acr_status status = json ? descriptor_parse(&described[slot], a->backend, json) : ACR_IO;
    free(json);
    if (status != ACR_OK) {
        return status;
    }
    const descriptor *d = &described[slot];
    const bool first = slot == LOADED_CANDIDATE;
    out->kernel = (acr__kernel){.family = "source",
                                .backend = a->backend,
                                .pass = d->pass,
                                .dtype = d->dtype,
                                .qk_dim_max = d->qk_dim,
                                .v_dim_max = d->v_dim,
                                .q_tile = d->q_tile,
                                .kv_tile = d->kv_tile,
                                .stages = d->stages,
                                .why_not = first ? why_not_candidate : why_not_incumbent,
                                .workspace = first ? workspace_candidate : workspace_incumbent,
                                .cost = described_cost,
                                .symbol = CANDIDATE_SYMBOL,
                                .arch_min = device->arch,
                                .arch_max = device->arch,
                                .shape = first ? shape_candidate : shape_incumbent,
                                .boxes = d->boxes};
    if (a->backend == ACR__CPU && !(device->isa & isa_of(a->arch))) {
        return acr__fail(ACR_UNSUPPORTED, "this CPU lacks %s", a->arch);
    }
    return ACR_OK;
}

static acr_status open_library(void **handle, const artefact *a, const char *file)
{
    char path[PATH_MAX];
    acr_status status = file_path(path, a->folder, file, "");
    if (status != ACR_OK) {
        return status;
    }
    *handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    return *handle ? ACR_OK : acr__fail(ACR_FORMAT, "%s", dlerror());
}

acr_status build_describe_open(void **handle, const acr__kernel **out, const artefact *a)
{
    acr_status status = open_library(handle, a, "host.so");
    *out = status == ACR_OK ? dlsym(*handle, CANDIDATE_DESCRIPTION) : NULL;
    return status != ACR_OK || *out ? status : acr__fail(ACR_FORMAT, "the family has no description");
}

/* A family's description, and where in its object the kernel begins: the source is ours, the object has been looked
 * at, so it may be loaded. */
static acr_status describe_family(loaded *out, const artefact *a)
{
    acr_status status = open_library(&out->handle, a, "code.so");
    const acr__kernel *description = status == ACR_OK ? dlsym(out->handle, CANDIDATE_DESCRIPTION) : NULL;
    Dl_info place;
    if (status == ACR_OK && (!description || !description->run || dladdr(description, &place) == 0)) {
        status = acr__fail(ACR_FORMAT, "the family has no description");
    }
    if (status != ACR_OK) {
        return status;
    }
    uintptr_t run;
    memcpy(&run, &description->run, sizeof run); /* C has no cast from a function's to an object's address */
    out->kernel = *description;
    out->own_run = description->run;
    out->code.entry = run - (uintptr_t)place.dli_fbase;
    return out->code.entry < out->code.size ? ACR_OK : acr__fail(ACR_FORMAT, "the family's kernel is not its own");
}

static acr_status load_cpu(loaded *out, const artefact *a)
{
    char path[PATH_MAX];
    acr_status status = file_path(path, a->folder, "code.so", "");
    if (status == ACR_OK) {
        status = elf_code_read(&out->code, path, a->is_source ? CANDIDATE_SYMBOL : NULL);
    }
    if (status == ACR_OK && !a->is_source) {
        status = describe_family(out, a);
    }
    out->kernel.run = NULL;
    out->kernel.image = (const unsigned char *)out->identity;
    out->kernel.image_end = out->kernel.image + sizeof out->identity - 1;
    return status;
}

static acr_status load_cuda(loaded *out, const artefact *a)
{
    char path[PATH_MAX];
    acr_status status = a->is_source ? ACR_OK : open_library(&out->handle, a, "host.so");
    if (status == ACR_OK && !a->is_source) {
        const acr__kernel *description = dlsym(out->handle, CANDIDATE_DESCRIPTION);
        status = description ? ACR_OK : acr__fail(ACR_FORMAT, "the family has no description");
        if (description) {
            out->kernel = *description;
        }
    }
    if (status == ACR_OK) {
        status = file_path(path, a->folder, "image.bin", "");
    }
    if (status == ACR_OK) {
        status = file_map(path, &out->image, &out->image_bytes);
    }
    out->kernel.image = out->image;
    out->kernel.image_end = (const unsigned char *)out->image + out->image_bytes;
    return status;
}

acr_status build_load(loaded *out, loaded_slot slot, const char *folder, const acr__device *device)
{
    artefact a;
    *out = (loaded){.handle = NULL};
    acr_status status = read_artefact(&a, folder);
    if (status == ACR_OK && a.is_source) {
        status = describe(out, slot, &a, device);
    }
    if (status == ACR_OK) {
        memcpy(out->identity, a.identity, sizeof out->identity);
        status = a.backend == ACR__CPU ? load_cpu(out, &a) : load_cuda(out, &a);
    }
    if (status != ACR_OK) {
        build_unload(out);
        return status;
    }
    snprintf(out->name, sizeof out->name, "%s", slot == LOADED_CANDIDATE ? "candidate" : "incumbent");
    out->kernel.name = out->name;
    return ACR_OK;
}

void build_unload(loaded *l)
{
    file_unmap(l->image, l->image_bytes);
    elf_code_free(&l->code);
    if (l->handle) {
        dlclose(l->handle);
    }
    *l = (loaded){.handle = NULL};
}
