/* Helpers of the tests: see support.h. */
#include "support.h"

#include <errno.h>
#include <ftw.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

void check_failure(acr_status got, acr_status wanted, const char *fragment, const char *call, const char *file,
                   int line)
{
    if (got != wanted) {
        print_error("%s: status %d (%s), expected %d (%s); last error: %s\n", call, (int)got, acr_status_text(got),
                    (int)wanted, acr_status_text(wanted), acr_last_error());
        _fail(file, line);
    }
    if (!strstr(acr_last_error(), fragment)) {
        print_error("%s: \"%s\" does not mention \"%s\"\n", call, acr_last_error(), fragment);
        _fail(file, line);
    }
}

void check_success(acr_status got, const char *call, const char *file, int line)
{
    if (got != ACR_OK) {
        print_error("%s: status %d (%s): %s\n", call, (int)got, acr_status_text(got), acr_last_error());
        _fail(file, line);
    }
}

acr_problem problem_of(const char *text)
{
    acr_problem problem;
    size_t position = 0;
    const acr_status status = acr_problem_parse(&problem, text, &position);
    if (status != ACR_OK)
        fail_msg("\"%s\", character %zu: %s", text, position, acr_last_error());
    return problem;
}

acr_problem canonical_of(const char *text)
{
    acr_problem problem = problem_of(text);
    assert_ok(acr_problem_canonical(&problem, &problem));
    return problem;
}

acr_ctx *cpu_ctx(uint32_t threads)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cpu";
    options.threads = threads;
    acr_ctx *ctx = NULL;
    assert_ok(acr_ctx_create(&ctx, &options));
    return ctx;
}

acr_plan *estimate_plan(acr_ctx *ctx, const char *text)
{
    const acr_problem problem = problem_of(text);
    acr_plan *plan = NULL;
    assert_ok(acr_plan_create(&plan, ctx, &problem, ACR_ESTIMATE));
    return plan;
}

acr_plan *forced_plan(acr_ctx *ctx, const acr_problem *problem, const acr__kernel *kernel)
{
    acr_plan *plan = NULL;
    assert_ok(acr__plan_create_forced(&plan, ctx, problem, kernel));
    return plan;
}

const acr__kernel *cpu_kernel(const acr_ctx *ctx, size_t i)
{
    /* A small problem of the kernel's own type that any kernel for this machine can run. */
    const acr__device *device = &acr__ctx_backend_device(ctx)->device;
    for (size_t n = 0; n < acr__kernel_count; n++) {
        const acr__kernel *kernel = acr__kernels[n];
        if (kernel->backend != ACR__CPU)
            continue;
        acr_problem problem = canonical_of("b1:h1:s16:d64");
        problem.dtype = kernel->dtype;
        problem.out_dtype = kernel->dtype == ACR_E4M3 ? ACR_F16 : kernel->dtype;
        if (!acr__why_not(kernel, &problem, device) && i-- == 0)
            return kernel;
    }
    return NULL;
}

uint64_t next_u64(generator *g)
{
    /* splitmix64 */
    uint64_t z = g->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double next_normal(generator *g)
{
    /* The sum of twelve uniform numbers: within +-6, close enough to normal, and without a logarithm of zero. */
    double sum = -6.0;
    for (int i = 0; i < 12; i++)
        sum += (double)(next_u64(g) >> 11) * 0x1p-53;
    return sum;
}

static size_t span(int64_t batch, int64_t heads, int64_t rows, int64_t dim, const acr_strides *strides, acr_dtype dtype)
{
    return (size_t)acr__span_bytes(batch, heads, rows, dim, strides, dtype);
}

static void *aligned_memory(size_t bytes)
{
    void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    assert_non_null(memory);
    return memory;
}

static void *normal_tensor(size_t bytes, acr_dtype dtype, generator *g)
{
    void *memory = aligned_memory(bytes);
    for (int64_t i = 0; i < (int64_t)bytes / acr__dtype_bytes(dtype); i++)
        acr__store_element(dtype, memory, i, next_normal(g));
    return memory;
}

/* Of sequences with 0 to `longest` rows; *total: the tensor's rows. */
static int32_t *random_offsets(int64_t batch, int64_t longest, int64_t *total, generator *g)
{
    int32_t *offsets = aligned_memory((size_t)(batch + 1) * sizeof *offsets);
    offsets[0] = ROWS_AROUND;
    for (int64_t b = 0; b < batch; b++)
        offsets[b + 1] = offsets[b] + (int32_t)(next_u64(g) % (uint64_t)(longest + 1));
    *total = offsets[batch] + ROWS_AROUND;
    return offsets;
}

tensors tensors_make(const acr_problem *problem, uint64_t seed)
{
    tensors t = {.buffers = ACR_BUFFERS_INIT};
    assert_ok(acr_problem_canonical(&t.problem, problem));
    const acr_problem *p = &t.problem;
    generator g = {seed};
    int64_t entries = p->batch, q_rows = p->q_len, kv_rows = p->kv_len;
    if (p->flags & ACR_PACKED) {
        entries = 1;
        t.q_offsets = random_offsets(p->batch, p->q_len, &q_rows, &g);
        t.kv_offsets = random_offsets(p->batch, p->kv_len, &kv_rows, &g);
        t.buffers.q_offsets = t.q_offsets;
        t.buffers.kv_offsets = t.kv_offsets;
        t.buffers.q_total = q_rows;
        t.buffers.kv_total = kv_rows;
    }
    t.q_bytes = span(entries, p->q_heads, q_rows, p->qk_dim, &p->q, p->dtype);
    t.k_bytes = span(entries, p->kv_heads, kv_rows, p->qk_dim, &p->k, p->dtype);
    t.v_bytes = span(entries, p->kv_heads, kv_rows, p->v_dim, &p->v, p->dtype);
    t.o_bytes = span(entries, p->q_heads, q_rows, p->v_dim, &p->o, p->out_dtype);
    t.buffers.q = t.q = normal_tensor(t.q_bytes, p->dtype, &g);
    t.buffers.k = t.k = normal_tensor(t.k_bytes, p->dtype, &g);
    t.buffers.v = t.v = normal_tensor(t.v_bytes, p->dtype, &g);
    t.buffers.o = t.o = aligned_memory(t.o_bytes);
    if (p->flags & ACR_WANT_LSE) {
        t.lse_bytes = (size_t)(entries * p->q_heads * q_rows) * sizeof(float);
        t.buffers.lse = t.lse = aligned_memory(t.lse_bytes);
    }
    if (p->flags & ACR_KV_LENS) {
        t.kv_lens = aligned_memory((size_t)p->batch * sizeof(int32_t));
        for (int64_t b = 0; b < p->batch; b++)
            t.kv_lens[b] = (int32_t)(next_u64(&g) % (uint64_t)(p->kv_len + 1));
        t.buffers.kv_lens = t.kv_lens;
    }
    tensors_poison_outputs(&t);
    return t;
}

void tensors_poison_outputs(tensors *t)
{
    memset(t->o, 0xff, t->o_bytes);
    if (t->lse)
        memset(t->lse, 0xff, t->lse_bytes);
}

void tensors_free(tensors *t)
{
    free(t->q);
    free(t->k);
    free(t->v);
    free(t->o);
    free(t->lse);
    free(t->kv_lens);
    free(t->q_offsets);
    free(t->kv_offsets);
}

int64_t element_of(const acr_strides *strides, int64_t batch, int64_t head, int64_t row, int64_t dim)
{
    return batch * strides->batch + head * strides->head + row * strides->row + dim;
}

double o_at(const tensors *t, int64_t batch, int64_t head, int64_t row, int64_t dim)
{
    return acr__load_element(t->problem.out_dtype, t->o, element_of(&t->problem.o, batch, head, row, dim));
}

double lse_at(const tensors *t, int64_t batch, int64_t head, int64_t row)
{
    return (double)t->lse[(batch * t->problem.q_heads + head) * t->problem.q_len + row];
}

void execute_once(acr_ctx *ctx, const acr__kernel *kernel, tensors *t)
{
    acr_plan *plan = NULL;
    if (kernel)
        assert_ok(acr__plan_create_forced(&plan, ctx, &t->problem, kernel));
    else
        assert_ok(acr_plan_create(&plan, ctx, &t->problem, ACR_ESTIMATE));
    const size_t bytes = acr_plan_workspace(plan);
    void *workspace = bytes ? aligned_memory(bytes) : NULL;
    assert_ok(acr_workspace_init(plan, workspace, bytes, NULL));
    assert_ok(acr_execute(plan, &t->buffers, workspace, bytes, NULL));
    free(workspace);
    acr_plan_destroy(plan);
}

bool has_cuda_kernels(void)
{
    for (size_t n = 0; n < acr__kernel_count; n++)
        if (acr__kernels[n]->backend == ACR__CUDA)
            return true;
    return false;
}

const char *scratch_path(const char *name)
{
    static char paths[4][512];
    static unsigned next;
    char *path = paths[next++ % COUNT_OF(paths)];
    const char *folder = getenv("ACR_TEST_SCRATCH");
    if (!folder)
        folder = "/tmp/acromion-tests";
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        fail_msg("%s: %s", folder, strerror(errno));
    snprintf(path, sizeof paths[0], "%s/%ld-%s", folder, (long)getpid(), name);
    return path;
}

void make_folder(const char *path)
{
    if (mkdir(path, 0777) != 0)
        fail_msg("%s: %s", path, strerror(errno));
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *walk)
{
    (void)status;
    (void)type;
    (void)walk;
    return remove(path);
}

void remove_folder(const char *path)
{
    const int open_folders = 8;
    if (nftw(path, remove_entry, open_folders, FTW_DEPTH | FTW_PHYS) != 0)
        fail_msg("%s: %s", path, strerror(errno));
}

void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
}

char *read_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        fail_msg("%s: %s", path, strerror(errno));
    size_t bytes = 0, capacity = 4096;
    char *text = malloc(capacity);
    assert_non_null(text);
    size_t got;
    while ((got = fread(text + bytes, 1, capacity - bytes - 1, file)) > 0) {
        bytes += got;
        if (capacity - bytes < 2)
            text = realloc(text, capacity *= 2);
        assert_non_null(text);
    }
    text[bytes] = '\0';
    fclose(file);
    return text;
}

static double own_seconds(int who)
{
    struct rusage use;
    assert_int_equal(getrusage(who, &use), 0);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

/* Seconds that the processors of this process have worked since the machine started, for whomever; 0 = unknown. */
static double busy_seconds(void)
{
    cpu_set_t allowed;
    FILE *file = fopen("/proc/stat", "r");
    if (!file || sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        if (file)
            fclose(file);
        return 0;
    }
    char line[512];
    double ticks = 0;
    while (fgets(line, sizeof line, file)) {
        unsigned cpu;
        double user, nice, system, idle, wait, irq, softirq, steal;
        if (sscanf(line, "cpu%u %lf %lf %lf %lf %lf %lf %lf %lf", &cpu, &user, &nice, &system, &idle, &wait, &irq,
                   &softirq, &steal) == 9 &&
            cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed))
            ticks += user + nice + system + irq + softirq + steal;
    }
    fclose(file);
    return ticks / (double)sysconf(_SC_CLK_TCK);
}

cpu_use cpu_use_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (cpu_use){busy_seconds() - own_seconds(RUSAGE_SELF) - own_seconds(RUSAGE_CHILDREN),
                     (double)now.tv_sec + 1e-9 * (double)now.tv_nsec};
}

double others_busy_since(const cpu_use *start)
{
    const cpu_use now = cpu_use_now();
    return fmax(0, now.others_s - start->others_s) / fmax(now.at_s - start->at_s, 1e-3);
}
