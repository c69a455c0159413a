/* The CUDA backend over the fake driver: drivers that are too old or lack something, every driver call failing in turn,
 * device memory running out, stream capture, and that nothing is left behind whatever happens. No GPU is needed, and
 * none is used. */
#include "support.h"

#include <pthread.h>
#include <stdio.h>

#include "cuda/driver.h"
#include "ptxvm/driver/fake_driver.h"
#include "faults.h"

/* ---- Contexts over the fake driver --------------------------------------------------------------------------------
 * */

static acr_status open_cuda(acr_ctx **ctx)
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cuda";
    return acr_ctx_create(ctx, &options);
}

static acr_ctx *cuda_ctx(void)
{
    acr_ctx *ctx = NULL;
    assert_ok(open_cuda(&ctx));
    return ctx;
}

/* What was alive when the test began: left by a test that failed before. */
static fake_cuda_counters at_start;

/* Everything that the library took from the driver has been given back, and it was used as a real driver must be. */
static void assert_clean(const char *when)
{
    const fake_cuda_counters c = fake_cuda_count();
    const struct {
        const char *what;
        long left;
    } counters[] = {{"allocations", c.allocations - at_start.allocations},
                    {"libraries", c.libraries - at_start.libraries},
                    {"streams", c.streams - at_start.streams},
                    {"events", c.events - at_start.events},
                    {"graphs", c.graphs - at_start.graphs},
                    {"executable graphs", c.graph_execs - at_start.graph_execs},
                    {"retained contexts", c.contexts - at_start.contexts},
                    {"pushed contexts", c.pushed - at_start.pushed},
                    {"misuses", c.misuses}};
    for (size_t i = 0; i < COUNT_OF(counters); i++)
        if (counters[i].left != 0)
            fail_msg("%s: %ld %s left", when, counters[i].left, counters[i].what);
}

static int reset_driver(void **state)
{
    (void)state;
    fake_cuda_reset();
    unsetenv("ACR_FORCE_PTX");
    unsetenv("CUDA_FORCE_PTX_JIT");
    at_start = fake_cuda_count();
    return 0;
}

static int check_clean(void **state)
{
    (void)state;
    assert_clean("at the end of the test");
    return 0;
}

/* ---- Drivers that do not serve ------------------------------------------------------------------------------------
 * */

static void assert_no_device(const char *fragment)
{
    acr_ctx *const untouched = (acr_ctx *)(uintptr_t)64, *ctx = untouched;
    assert_fails(open_cuda(&ctx), ACR_NO_DEVICE, fragment);
    assert_ptr_equal(ctx, untouched);
    /* Without a name the context falls back to the cpu, which always works. */
    assert_ok(acr_ctx_create(&ctx, NULL));
    assert_string_equal(acr_ctx_backend(ctx), "cpu");
    acr_ctx_destroy(ctx);
}

static void an_old_driver_is_refused_with_both_versions(void **state)
{
    (void)state;
    fake_cuda_set_driver_version(12080);
    assert_no_device("12.8");
    assert_no_device("13.0");
    assert_no_device("R580");
    fake_cuda_set_driver_version(12000);
    assert_no_device("12.0");
    fake_cuda_set_driver_version(13010); /* newer is fine */
    acr_ctx_destroy(cuda_ctx());
}

static void a_machine_without_devices_is_refused(void **state)
{
    (void)state;
    fake_cuda_set_devices(0);
    assert_no_device("device");
    fake_cuda_set_devices(2);
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cuda";
    acr_ctx *ctx = NULL;
    for (options.device = 0; options.device < 2; options.device++) {
        assert_ok(acr_ctx_create(&ctx, &options));
        acr_ctx_destroy(ctx);
    }
    assert_fails(acr_ctx_create(&ctx, &options), ACR_NO_DEVICE, "device 2");
}

static void a_missing_entry_is_named(void **state)
{
    (void)state;
    static const char *const names[] = {
#define NAME(name, version) "cu" #name,
        ACR__CUDA_ENTRIES(NAME)
#undef NAME
    };
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        fake_cuda_hide_entry(names[i]);
        assert_no_device(names[i]);
    }
    fake_cuda_hide_entry(NULL);
}

static void a_usable_gpu_is_the_default(void **state)
{
    (void)state;
    static const int archs[] = {80, 86, 89, 90, 120};
    for (size_t i = 0; i < COUNT_OF(archs); i++) {
        char sm[16];
        snprintf(sm, sizeof sm, "sm_%d", archs[i]);
        fake_cuda_set_arch(archs[i]);
        acr_ctx *ctx = NULL;
        assert_ok(acr_ctx_create(&ctx, NULL));
        assert_string_equal(acr_ctx_backend(ctx), "cuda");
        assert_non_null(strstr(acr_ctx_device(ctx), sm));
        assert_int_equal(acr__ctx_backend_device(ctx)->device.arch, archs[i]);
        acr_ctx_destroy(ctx);
        assert_clean(sm);
    }
}

/* e4m3 by mma.sync: from sm_89 on the plan, below it refused by name; on Hopper only where fwd_fp8 cannot run. */
static void eight_bit_products_need_sm_89(void **state)
{
    (void)state;
    static const struct {
        int arch;
        const char *problem, *planned;
        const char *reason; /* of the 8-bit kernel that is forced, else NULL */
    } rows[] = {
        {80, "e4m3:b2:h8:s512:d64", "fwd_simt_", "compute capability is 8.0, the kernel needs 8.9"},
        {86, "e4m3:b2:h8:s512:d64", "fwd_simt_", "compute capability is 8.6, the kernel needs 8.9"},
        {89, "e4m3:b2:h8:s512:d64", "fwd_mma8_e4m3_d64_", NULL},
        {89, "e4m3:b2:h8/2:s77/1333:d128:causal:obf16:lse:kvlens", "fwd_mma8_e4m3_d128_", NULL},
        {120, "e4m3:b2:h8:s512:d256", "fwd_mma8_e4m3_d256_", NULL},
        {120, "e4m3:b2:h8:s512:d64:bshd:packed", "fwd_mma8_e4m3_d64_64x64_s3_r128_packed_", NULL},
        {90, "e4m3:b4:h16:s2048:d64", "fwd_fp8_", NULL},
        {90, "e4m3:b2:h8:s512:d64:ks=0,32768,64:vs=0,32768,64", "fwd_mma8_",
         NULL}, /* no tensor map has such a stride */
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        fake_cuda_set_arch(rows[i].arch);
        acr_ctx *ctx = cuda_ctx();
        const acr_problem p = canonical_of(rows[i].problem);
        acr_plan *plan = NULL;
        assert_ok(acr_plan_create(&plan, ctx, &p, ACR_ESTIMATE));
        if (strncmp(acr_plan_kernel(plan), rows[i].planned, strlen(rows[i].planned)) != 0)
            fail_msg("sm_%d, %s: planned %s", rows[i].arch, rows[i].problem, acr_plan_kernel(plan));
        acr_plan_destroy(plan);
        const acr__kernel *kernel = acr__kernel_find("fwd_mma8_e4m3_d64_64x64_s3_r120_sm89");
        assert_non_null(kernel);
        if (rows[i].reason)
            assert_fails(acr__plan_create_forced(&plan, ctx, &p, kernel), ACR_UNSUPPORTED, rows[i].reason);
        acr_ctx_destroy(ctx);
        assert_clean(rows[i].problem);
    }
}

/* ---- Device memory for executions ---------------------------------------------------------------------------------
 * */

/* Buffers of a problem in (fake) device memory. */
typedef struct device_buffers {
    acr__backend_device *device;
    acr_buffers buffers;
    void *memory[6];
} device_buffers;

static void *device_memory(acr__backend_device *device, int64_t bytes)
{
    void *memory = NULL;
    assert_ok(device->backend->mem_alloc(device, (size_t)bytes, &memory));
    return memory;
}

static device_buffers device_buffers_make(acr_ctx *ctx, const acr_problem *p)
{
    device_buffers b = {.device = acr__ctx_backend_device(ctx), .buffers = ACR_BUFFERS_INIT};
    b.buffers.q = b.memory[0] =
        device_memory(b.device, acr__span_bytes(p->batch, p->q_heads, p->q_len, p->qk_dim, &p->q, p->dtype));
    b.buffers.k = b.memory[1] =
        device_memory(b.device, acr__span_bytes(p->batch, p->kv_heads, p->kv_len, p->qk_dim, &p->k, p->dtype));
    b.buffers.v = b.memory[2] =
        device_memory(b.device, acr__span_bytes(p->batch, p->kv_heads, p->kv_len, p->v_dim, &p->v, p->dtype));
    b.buffers.o = b.memory[3] =
        device_memory(b.device, acr__span_bytes(p->batch, p->q_heads, p->q_len, p->v_dim, &p->o, p->out_dtype));
    if (p->flags & ACR_WANT_LSE)
        b.buffers.lse = b.memory[4] = device_memory(b.device, p->batch * p->q_heads * p->q_len * 4);
    if (p->flags & ACR_KV_LENS)
        b.buffers.kv_lens = b.memory[5] = device_memory(b.device, p->batch * 4);
    return b;
}

static void device_buffers_free(device_buffers *b)
{
    for (size_t i = 0; i < COUNT_OF(b->memory); i++)
        b->device->backend->mem_free(b->device, b->memory[i]);
}

/* A made-up CUDA kernel with workspace, as a candidate would be: its image is not in the table. */
enum {
    CANDIDATE_WORKSPACE = 1024
};

static const char *candidate_why_not(const acr_problem *p, const acr__device *device)
{
    (void)p, (void)device;
    return NULL;
}

static size_t candidate_workspace(const acr_problem *p, const acr__device *device)
{
    (void)p, (void)device;
    return CANDIDATE_WORKSPACE;
}

static double candidate_cost(const acr_problem *p, const acr__device *device)
{
    (void)p, (void)device;
    return 1e-6;
}

static void candidate_shape(const acr_problem *p, const acr__device *device, acr__launch *launch)
{
    (void)device;
    *launch = (acr__launch){{(uint32_t)p->q_len, (uint32_t)p->q_heads, (uint32_t)p->batch}, 128, 2, 4096};
}

static const unsigned char candidate_image[] = "not machine code, but the fake driver loads anything";
static const acr__kernel candidate = {.name = "fwd_candidate_f16_d64_1x1_sm90a",
                                      .family = "fwd_candidate",
                                      .backend = ACR__CUDA,
                                      .dtype = ACR_F16,
                                      .qk_dim_max = 256,
                                      .v_dim_max = 256,
                                      .q_tile = 1,
                                      .kv_tile = 1,
                                      .stages = 1,
                                      .why_not = candidate_why_not,
                                      .workspace = candidate_workspace,
                                      .cost = candidate_cost,
                                      .symbol = "candidate",
                                      .image = candidate_image,
                                      .image_end = candidate_image + sizeof candidate_image - 1,
                                      .arch_min = 80,
                                      .arch_max = 120,
                                      .shape = candidate_shape};

static acr__kernel candidate_with_maps(void)
{
    acr__kernel kernel = candidate;
    kernel.boxes = (acr__boxes){.q_rows = 64, .k_rows = 32, .v_rows = 32, .o_rows = 64};
    return kernel;
}

/* ---- Every call fails in turn -------------------------------------------------------------------------------------
 * */

/* One act of the library, under a context; undoes what it made. */
typedef acr_status act(acr_ctx *ctx);

static acr_status only_open(acr_ctx *ctx)
{
    (void)ctx;
    return ACR_OK;
}

static acr_status plan_with_effort(acr_ctx *ctx, acr_effort effort)
{
    const acr_problem p = problem_of("b1:h2:s16:d64:lse:kvlens");
    acr_plan *const untouched = (acr_plan *)(uintptr_t)64, *plan = untouched;
    const acr_status status = acr_plan_create(&plan, ctx, &p, effort);
    if (status == ACR_OK)
        acr_plan_destroy(plan);
    else
        assert_ptr_equal(plan, untouched);
    return status;
}

static acr_status plan_by_estimate(acr_ctx *ctx)
{
    return plan_with_effort(ctx, ACR_ESTIMATE);
}

static acr_status plan_by_measuring(acr_ctx *ctx)
{
    return plan_with_effort(ctx, ACR_MEASURE);
}

static acr_status plan_candidate(acr_ctx *ctx)
{
    const acr_problem p = problem_of("b1:h2:s16:d64");
    acr_plan *plan = NULL;
    const acr_status status = acr__plan_create_forced(&plan, ctx, &p, &candidate);
    acr_plan_destroy(plan);
    return status;
}

static acr_status plan_with_maps(acr_ctx *ctx)
{
    const acr_problem p = problem_of("b1:h2:s16:d64");
    const acr__kernel kernel = candidate_with_maps();
    acr_plan *plan = NULL;
    const acr_status status = acr__plan_create_forced(&plan, ctx, &p, &kernel);
    acr_plan_destroy(plan);
    return status;
}

static acr_status enqueue_nothing(void *arg, void *stream)
{
    (void)arg, (void)stream;
    return ACR_OK;
}

static acr_status time_cold(acr_ctx *ctx)
{
    acr__backend_device *device = acr__ctx_backend_device(ctx);
    acr__graph *graph = NULL;
    double seconds[2];
    acr_status status = device->backend->timing->graph_record(&graph, device, enqueue_nothing, NULL, 1);
    if (status == ACR_OK)
        status = device->backend->timing->graph_time_cold(graph, COUNT_OF(seconds), seconds);
    device->backend->timing->graph_free(graph);
    return status;
}

/* Memory copied and filled in the stream of a replay, then the replay behind a closed stream. */
static acr_status fill_and_copy(void *arg, void *stream)
{
    void *const *halves = arg;
    acr__backend_device *device = halves[2];
    acr_status status = device->backend->timing->fill_on_device(device, halves[0], 7, 64, stream);
    return status == ACR_OK ? device->backend->timing->copy_on_device(device, halves[1], halves[0], 64, stream)
                            : status;
}

static acr_status time_prepared(acr_ctx *ctx)
{
    acr__backend_device *device = acr__ctx_backend_device(ctx);
    acr__graph *graph = NULL;
    void *halves[3] = {NULL, NULL, device};
    unsigned char seen[64] = {0};
    double seconds = 0.0;
    acr_status status = device->backend->timing->graph_record(&graph, device, enqueue_nothing, NULL, 1);
    for (int i = 0; i < 2 && status == ACR_OK; i++)
        status = device->backend->mem_alloc(device, sizeof seen, &halves[i]);
    for (int i = 0; i < 2 && status == ACR_OK; i++) /* with a gate that is there, too */
        status = device->backend->timing->graph_time_prepared(graph, fill_and_copy, halves, &seconds);
    if (status == ACR_OK)
        status = device->backend->mem_download(device, seen, halves[1], sizeof seen);
    if (status == ACR_OK)
        assert_true(seen[0] == 7 && seen[sizeof seen - 1] == 7);
    device->backend->mem_free(device, halves[1]);
    device->backend->mem_free(device, halves[0]);
    device->backend->timing->graph_free(graph);
    return status;
}

/* How a fault is set: fake_cuda_fail_nth_call or fake_cuda_fail_nth_alloc. */
typedef void set_fault(long n);

/* Opens a context and runs the act with a fault at a place; what follows, freeing, is spared. Checks what every failure
 * must keep to and returns the status. */
static acr_status attempt(act *run, set_fault *fail_at, long place)
{
    char when[64];
    snprintf(when, sizeof when, "place %ld", place);
    fake_cuda_reset();
    fail_at(place);
    acr_ctx *ctx = NULL;
    const acr_status opened = open_cuda(&ctx);
    if (opened != ACR_OK) {
        if (opened != ACR_NO_DEVICE && opened != ACR_NO_MEMORY)
            fail_msg("%s: acr_ctx_create: status %d (%s)", when, (int)opened, acr_last_error());
        assert_clean(when);
        return opened;
    }
    const acr_status status = run(ctx);
    fail_at(0);
    if (status != ACR_OK) {
        if (status != ACR_DEVICE_FAULT && status != ACR_NO_MEMORY)
            fail_msg("%s: status %d (%s)", when, (int)status, acr_last_error());
        if (!strstr(acr_last_error(), "CUDA_ERROR_"))
            fail_msg("%s: \"%s\" does not name the driver's error", when, acr_last_error());
        assert_ok(run(ctx)); /* a fault that has passed leaves a context that works */
    }
    acr_ctx_destroy(ctx);
    return status;
}

/* What the driver still holds after an act that succeeded although one call failed: that call was one of cleaning up,
 * and what it should have freed is left for want of another way. At most a graph, its stream, and the memory that
 * empties L2. */
static void accept_leftovers(void)
{
    const fake_cuda_counters c = fake_cuda_count();
    const long before = at_start.allocations + at_start.libraries + at_start.streams + at_start.events +
                        at_start.graphs + at_start.graph_execs;
    const long now = c.allocations + c.libraries + c.streams + c.events + c.graphs + c.graph_execs;
    assert_in_range(now - before, 0, 3);
    const long contexts = at_start.contexts, pushed = at_start.pushed;
    at_start = c;
    at_start.contexts = contexts;
    at_start.pushed = pushed;
}

/* Fails each driver call in turn. Where the act fails, everything is given back. */
static void fail_every_call(act *run)
{
    fake_cuda_reset();
    acr_ctx *ctx = cuda_ctx();
    assert_ok(run(ctx));
    const long calls = fake_cuda_count().calls;
    acr_ctx_destroy(ctx);
    assert_clean("without faults");
    long failed = 0;
    for (long place = 1; place <= calls; place++) {
        char when[64];
        snprintf(when, sizeof when, "call %ld of %ld", place, calls);
        const acr_status status = attempt(run, fake_cuda_fail_nth_call, place);
        if (status == ACR_OK)
            accept_leftovers();
        failed += status != ACR_OK;
        assert_clean(when);
    }
    assert_true(failed > calls / 4);
}

/* ACR_FORCE_PTX: kernels without PTX are refused by name, and machine code taken all the same is noticed. */
static void forced_ptx_is_not_believed_unseen(void **state)
{
    (void)state;
    acr_problem problem;
    assert_ok(acr_problem_parse(&problem, "b2:h8:s512:d64", NULL));
    setenv("ACR_FORCE_PTX", "1", 1);
    acr_ctx *ctx = cuda_ctx();
    acr_plan *plan = NULL;
    assert_ok(acr_plan_create(&plan, ctx, &problem, ACR_ESTIMATE));
    assert_non_null(strstr(acr_plan_kernel(plan), "_sm80"));
    acr_plan_destroy(plan);
    for (size_t i = 0; i < acr__kernel_count; i++) {
        const char *reason = acr__why_not(acr__kernels[i], &problem, &acr__ctx_backend_device(ctx)->device);
        if (acr__kernels[i]->backend == ACR__CUDA && acr__kernels[i]->pass == problem.pass &&
            strstr(acr__kernels[i]->name, "_f16_d64") && strstr(acr__kernels[i]->name, "_sm90a"))
            assert_non_null(strstr(reason, "ACR_FORCE_PTX"));
    }
    acr_ctx_destroy(ctx);
    ctx = cuda_ctx(); /* images are loaded afresh */
    unsetenv("CUDA_FORCE_PTX_JIT");
    assert_fails(acr_plan_create(&plan, ctx, &problem, ACR_ESTIMATE), ACR_DEVICE_FAULT, "compute_90");
    acr_ctx_destroy(ctx);
    fake_cuda_set_arch(120); /* PTX of compute_89 */
    setenv("CUDA_FORCE_PTX_JIT", "1", 1);
    ctx = cuda_ctx();
    problem = canonical_of("e4m3:b2:h8:s512:d64");
    assert_ok(acr_plan_create(&plan, ctx, &problem, ACR_ESTIMATE));
    assert_non_null(strstr(acr_plan_kernel(plan), "_sm89"));
    acr_plan_destroy(plan);
    acr_ctx_destroy(ctx);
}

static void every_failing_call_of_opening_is_clean(void **state)
{
    (void)state;
    fail_every_call(only_open);
}

static void every_failing_call_of_planning_is_clean(void **state)
{
    (void)state;
    fail_every_call(plan_by_estimate);
    fail_every_call(plan_candidate);
    fail_every_call(plan_with_maps);
}

static void every_failing_call_of_measuring_is_clean(void **state)
{
    (void)state;
    fail_every_call(plan_by_measuring);
    fail_every_call(time_cold);
    fail_every_call(time_prepared);
}

static void every_failing_allocation_is_clean(void **state)
{
    (void)state;
    long place = 1;
    while (place < 100 && attempt(plan_by_measuring, fake_cuda_fail_nth_alloc, place) != ACR_OK) {
        assert_clean("after a failed allocation");
        place++;
    }
    assert_in_range(place, 7, 99); /* q, k, v, o, lse and kv_lens at least */
}

/* Host memory fails while the driver is well: whatever was taken from it by then is given back. */
static void every_failing_host_allocation_is_clean(void **state)
{
    (void)state;
    act *const acts[] = {only_open, plan_by_estimate, plan_candidate, plan_by_measuring};
    for (size_t i = 0; i < COUNT_OF(acts); i++) {
        bool fired = true;
        int place = 1;
        for (; fired && place < 200; place++) {
            char when[64];
            snprintf(when, sizeof when, "act %zu, host allocation %d", i, place);
            const int64_t blocks = fault_live_blocks();
            acr_ctx *ctx = NULL;
            fault_arm(FAULT_MEMORY, place);
            acr_status status = open_cuda(&ctx);
            if (status == ACR_OK)
                status = acts[i](ctx);
            fired = fault_fired();
            fault_arm(FAULT_MEMORY, 0);
            if (status != (fired ? ACR_NO_MEMORY : ACR_OK))
                fail_msg("%s: status %d (%s)", when, (int)status, acr_last_error());
            acr_ctx_destroy(ctx);
            if (fault_live_blocks() != blocks)
                fail_msg("%s: %lld blocks left", when, (long long)(fault_live_blocks() - blocks));
            assert_clean(when);
        }
        assert_in_range(place, 3, 199);
    }
}

/* ---- The backend's own functions ----------------------------------------------------------------------------------
 * */

static acr_status move_memory(acr_ctx *ctx)
{
    acr__backend_device *device = acr__ctx_backend_device(ctx);
    const acr__backend *backend = device->backend;
    unsigned char there[100], back[100];
    void *memory = NULL;
    int capturing = 7;
    for (size_t i = 0; i < sizeof there; i++)
        there[i] = (unsigned char)i;
    acr_status status = backend->mem_alloc(device, sizeof there, &memory);
    if (status == ACR_OK)
        status = backend->mem_upload(device, memory, there, sizeof there);
    if (status == ACR_OK)
        status = backend->mem_fill(device, (char *)memory + 10, 0xaa, 5);
    if (status == ACR_OK)
        status = backend->mem_zero_async(device, (char *)memory + 20, 5, NULL);
    if (status == ACR_OK)
        status = backend->synchronize(device);
    if (status == ACR_OK)
        status = backend->mem_download(device, back, memory, sizeof back);
    if (status == ACR_OK)
        status = backend->is_capturing(device, NULL, &capturing);
    if (status == ACR_OK) {
        memset(there + 10, 0xaa, 5);
        memset(there + 20, 0, 5);
        assert_memory_equal(there, back, sizeof there);
        assert_int_equal(capturing, 0);
    }
    backend->mem_free(device, memory);
    return status;
}

static void memory_moves_and_every_failing_call_is_clean(void **state)
{
    (void)state;
    fail_every_call(move_memory);
}

/* ---- Executions ---------------------------------------------------------------------------------------------------
 * */

/* A plan with buffers and workspace in device memory. */
typedef struct scene {
    acr_ctx *ctx;
    acr_problem problem;
    acr_plan *plan;
    device_buffers b;
    void *workspace;
    size_t workspace_bytes;
} scene;

static scene scene_make(const char *text, const acr__kernel *kernel)
{
    scene s = {.ctx = cuda_ctx(), .problem = canonical_of(text)};
    if (kernel)
        s.plan = forced_plan(s.ctx, &s.problem, kernel);
    else
        assert_ok(acr_plan_create(&s.plan, s.ctx, &s.problem, ACR_ESTIMATE));
    s.b = device_buffers_make(s.ctx, &s.problem);
    s.workspace_bytes = acr_plan_workspace(s.plan);
    s.workspace = s.workspace_bytes ? device_memory(s.b.device, (int64_t)s.workspace_bytes) : NULL;
    return s;
}

static void scene_free(scene *s)
{
    s->b.device->backend->mem_free(s->b.device, s->workspace);
    device_buffers_free(&s->b);
    acr_plan_destroy(s->plan);
    acr_ctx_destroy(s->ctx);
}

static acr_status scene_execute(const scene *s, void *stream)
{
    return acr_execute(s->plan, &s->b.buffers, s->workspace, s->workspace_bytes, stream);
}

static void a_launch_carries_the_arguments(void **state)
{
    (void)state;
    scene s = scene_make("b3:h4/2:s16/24:d64:causal", &candidate);
    assert_ok(acr_workspace_init(s.plan, s.workspace, s.workspace_bytes, NULL));
    assert_ok(scene_execute(&s, NULL));
    fake_cuda_launch launch = fake_cuda_last_launch();
    assert_true(launch.grid[0] == 16 && launch.grid[1] == 4 && launch.grid[2] == 3);
    assert_true(launch.block == 128 && launch.cluster == 2 && launch.smem_bytes == 4096);
    assert_int_equal(launch.overlap_previous, 0);
    fwd_args expected, got;
    memcpy(&got, launch.args, sizeof got);
    acr__fwd_args(&expected, &s.problem, &s.b.buffers, s.workspace);
    assert_memory_equal(&got, &expected, sizeof got);

    s.b.buffers.flags = ACR_OVERLAP_PREVIOUS;
    assert_ok(scene_execute(&s, NULL));
    assert_int_equal(fake_cuda_last_launch().overlap_previous, 1);
    assert_int_equal(fake_cuda_count().launches, 2);
    scene_free(&s);
}

/* Scales of heads are the device's memory: those of the host are noticed before the launch. */
static void scales_are_device_memory(void **state)
{
    (void)state;
    acr__kernel kernel = candidate;
    kernel.dtype = ACR_E4M3;
    scene s = scene_make("e4m3:b3:h4/2:s16/24:d64", &kernel);
    float *scales = device_memory(s.b.device, 3 * 6 * (int64_t)sizeof *scales);
    const float of_host[6] = {1, 1, 1, 1, 1, 1};
    assert_ok(acr_workspace_init(s.plan, s.workspace, s.workspace_bytes, NULL));
    s.b.buffers.q_scales = scales;
    s.b.buffers.k_scales = scales + 6;
    s.b.buffers.v_scales = scales + 12;
    assert_ok(scene_execute(&s, NULL));
    fwd_args got;
    memcpy(&got, fake_cuda_last_launch().args, sizeof got);
    assert_true(got.q_scales == scales && got.k_scales == scales + 6 && got.v_scales == scales + 12);
    const float **const pointers[] = {&s.b.buffers.q_scales, &s.b.buffers.k_scales, &s.b.buffers.v_scales};
    const char *const names[] = {"buffers.q_scales", "buffers.k_scales", "buffers.v_scales"};
    for (size_t i = 0; i < COUNT_OF(pointers); i++) {
        const float *of_device = *pointers[i];
        *pointers[i] = of_host;
        assert_fails(scene_execute(&s, NULL), ACR_INVALID, names[i]);
        *pointers[i] = of_device;
    }
    fake_cuda_fail_entry("cuPointerGetAttribute", CUDA_ERROR_UNKNOWN);
    assert_fails(scene_execute(&s, NULL), ACR_DEVICE_FAULT, "cuPointerGetAttribute");
    fake_cuda_fail_entry(NULL, 0);
    assert_int_equal(fake_cuda_count().launches, 1);
    s.b.device->backend->mem_free(s.b.device, scales);
    scene_free(&s);
}

/* How many rows a packed batch's tensors have, an execution says: its maps end there. */
static void maps_of_packed_batches_have_their_rows(void **state)
{
    (void)state;
    acr__kernel kernel = candidate_with_maps();
    kernel.traits |= ACR__TRAIT_PACKED;
    scene s = scene_make("b3:h4/2:s16/24:d64:bshd:packed", &kernel);
    int32_t *offsets = device_memory(s.b.device, 8 * (int64_t)sizeof *offsets);
    assert_ok(acr_workspace_init(s.plan, s.workspace, s.workspace_bytes, NULL));
    s.b.buffers.q_offsets = offsets;
    s.b.buffers.kv_offsets = offsets + 4;
    for (int64_t rows = 10; rows <= 14; rows += 4) {
        s.b.buffers.q_total = rows;
        s.b.buffers.kv_total = rows + 5;
        assert_ok(scene_execute(&s, NULL));
        const fake_cuda_launch launch = fake_cuda_last_launch();
        assert_int_equal(launch.map_bases[0], (uintptr_t)s.b.buffers.q);
        assert_int_equal(launch.map_rows[0], rows);
        assert_int_equal(launch.map_rows[1], rows + 5);
        assert_int_equal(launch.map_rows[2], rows + 5);
        assert_int_equal(launch.map_rows[3], rows);
    }
    s.b.device->backend->mem_free(s.b.device, offsets);
    scene_free(&s);
}

/* Maps are encoded with the plan; an execution only moves them to its tensors. */
static void maps_follow_the_tensors(void **state)
{
    (void)state;
    const acr__kernel kernel = candidate_with_maps();
    scene s = scene_make("b3:h4/2:s16/24:d64", &kernel);
    assert_ok(acr_workspace_init(s.plan, s.workspace, s.workspace_bytes, NULL));
    fake_cuda_fail_entry("cuTensorMapEncodeTiled", CUDA_ERROR_NOT_PERMITTED);
    for (int round = 0; round < 2; round++) {
        assert_ok(scene_execute(&s, NULL));
        const void *const bases[] = {s.b.buffers.q, s.b.buffers.k, s.b.buffers.v, s.b.buffers.o};
        const fake_cuda_launch launch = fake_cuda_last_launch();
        for (size_t i = 0; i < COUNT_OF(bases); i++)
            assert_int_equal(launch.map_bases[i], (uintptr_t)bases[i]);
        const void *const k = s.b.buffers.k; /* then with k and v exchanged */
        s.b.buffers.k = s.b.buffers.v;
        s.b.buffers.v = k;
    }
    fake_cuda_fail_entry("cuTensorMapReplaceAddress", CUDA_ERROR_UNKNOWN);
    assert_fails(scene_execute(&s, NULL), ACR_DEVICE_FAULT, "tensor map of q");
    fake_cuda_fail_entry(NULL, 0);
    scene_free(&s);
}

/* What the bench compares acr_execute with: as many launches, and nothing but launches. */
static void bare_launches_only_launch(void **state)
{
    (void)state;
    enum {
        LAUNCHES = 5
    };
    const acr__kernel kernel = candidate_with_maps();
    scene s = scene_make("b1:h2:s16:d64", &kernel);
    acr__prepared *prepared = NULL;
    acr__backend_device *device = s.b.device;
    assert_ok(device->backend->prepare(&prepared, device, &kernel, &s.problem));
    fwd_args args;
    double one = 0, five = 0;
    acr__fwd_args(&args, &s.problem, &s.b.buffers, s.workspace);
    const fake_cuda_counters before = fake_cuda_count();
    assert_ok(device->backend->timing->launch_bare(prepared, &args, NULL, 1, &one));
    const fake_cuda_counters between = fake_cuda_count();
    assert_ok(device->backend->timing->launch_bare(prepared, &args, NULL, LAUNCHES, &five));
    const fake_cuda_counters after = fake_cuda_count();
    assert_int_equal(between.launches - before.launches, 1);
    assert_int_equal(after.launches - between.launches, LAUNCHES);
    assert_int_equal((after.calls - between.calls) - (between.calls - before.calls), LAUNCHES - 1);
    assert_true(one > 0 && five > 0);
    fake_cuda_fail_entry("cuLaunchKernelEx", CUDA_ERROR_UNKNOWN);
    assert_fails(device->backend->timing->launch_bare(prepared, &args, NULL, 1, &one), ACR_DEVICE_FAULT,
                 "cuLaunchKernelEx");
    fake_cuda_fail_entry(NULL, 0);
    device->backend->release(prepared);
    scene_free(&s);
}

/* Each cold sample empties L2 first; a GPU without lines that can be marked says so, and that is no fault. */
static void cold_times_empty_the_cache(void **state)
{
    (void)state;
    acr_ctx *ctx = cuda_ctx();
    fake_cuda_fail_entry("cuCtxResetPersistingL2Cache", CUDA_ERROR_NOT_SUPPORTED);
    assert_ok(time_cold(ctx));
    fake_cuda_fail_entry("cuCtxResetPersistingL2Cache", CUDA_ERROR_UNKNOWN);
    assert_fails(time_cold(ctx), ACR_DEVICE_FAULT, "cuCtxResetPersistingL2Cache");
    fake_cuda_fail_entry("cuMemsetD8Async", CUDA_ERROR_UNKNOWN);
    assert_fails(time_cold(ctx), ACR_DEVICE_FAULT, "cuMemsetD8Async");
    fake_cuda_fail_entry(NULL, 0);
    acr_ctx_destroy(ctx);
}

static void executions_neither_allocate_nor_wait(void **state)
{
    (void)state;
    static const char *const forbidden[] = {"cuMemAlloc",          "cuMemFree",         "cuCtxSynchronize",
                                            "cuStreamSynchronize", "cuLibraryLoadData", "cuStreamCreate"};
    scene s = scene_make("b1:h2:s16:d64", NULL);
    assert_ok(acr_workspace_init(s.plan, s.workspace, s.workspace_bytes, NULL));
    assert_ok(acr_forward(s.ctx, &s.problem, &s.b.buffers, NULL));
    for (size_t i = 0; i < COUNT_OF(forbidden); i++) {
        fake_cuda_fail_entry(forbidden[i], CUDA_ERROR_NOT_PERMITTED);
        assert_ok(scene_execute(&s, NULL));
        assert_ok(acr_forward(s.ctx, &s.problem, &s.b.buffers, NULL));
    }
    fake_cuda_fail_entry(NULL, 0);
    scene_free(&s);
}

static void a_failed_launch_is_reported(void **state)
{
    (void)state;
    scene s = scene_make("b1:h2:s16:d64", &candidate);
    fake_cuda_fail_entry("cuLaunchKernelEx", CUDA_ERROR_UNKNOWN);
    assert_fails(scene_execute(&s, NULL), ACR_DEVICE_FAULT, "cuLaunchKernelEx");
    assert_fails(scene_execute(&s, NULL), ACR_DEVICE_FAULT, "CUDA_ERROR_UNKNOWN");
    fake_cuda_fail_entry("cuMemsetD8Async", CUDA_ERROR_UNKNOWN);
    assert_fails(acr_workspace_init(s.plan, s.workspace, s.workspace_bytes, NULL), ACR_DEVICE_FAULT, "cuMemsetD8Async");
    fake_cuda_fail_entry("cuCtxPushCurrent", CUDA_ERROR_UNKNOWN);
    assert_fails(scene_execute(&s, NULL), ACR_DEVICE_FAULT, "cuCtxPushCurrent");
    fake_cuda_fail_entry(NULL, 0);
    assert_ok(scene_execute(&s, NULL));
    scene_free(&s);
}

static void refused_executions_launch_nothing(void **state)
{
    (void)state;
    scene s = scene_make("b1:h2:s16:d64", &candidate);
    const acr_buffers good = s.b.buffers;
    const long before = fake_cuda_count().calls;
    s.b.buffers.q = NULL;
    assert_fails(scene_execute(&s, NULL), ACR_INVALID, "q");
    s.b.buffers = good;
    s.b.buffers.v = (const char *)good.v + 2;
    assert_fails(scene_execute(&s, NULL), ACR_ALIGNMENT, "v");
    s.b.buffers = good;
    s.b.buffers.k = good.o;
    assert_fails(scene_execute(&s, NULL), ACR_OVERLAP, "k");
    s.b.buffers = good;
    assert_fails(acr_execute(s.plan, &s.b.buffers, s.workspace, s.workspace_bytes - 1, NULL), ACR_WORKSPACE, "bytes");
    assert_fails(acr_execute(s.plan, &s.b.buffers, NULL, s.workspace_bytes, NULL), ACR_WORKSPACE, "NULL");
    assert_fails(acr_workspace_init(s.plan, (char *)s.workspace + 64, s.workspace_bytes, NULL), ACR_WORKSPACE,
                 "aligned");
    assert_int_equal(fake_cuda_count().calls, before);
    scene_free(&s);
}

static void plans_outlive_their_context(void **state)
{
    (void)state;
    scene s = scene_make("b1:h2:s16:d64", NULL);
    acr_ctx_destroy(s.ctx);
    assert_int_equal(fake_cuda_count().contexts, 1);
    assert_ok(scene_execute(&s, NULL));
    s.b.device->backend->mem_free(s.b.device, s.workspace);
    device_buffers_free(&s.b);
    acr_plan_destroy(s.plan); /* the last to go closes the device: check_clean sees it */
}

/* ---- Capture ------------------------------------------------------------------------------------------------------
 * */

/* A stream of the caller's, made with the driver as a caller would. */
typedef struct own_stream {
    acr__cuda_driver driver;
    CUcontext context;
    CUstream stream;
} own_stream;

static own_stream own_stream_make(void)
{
    own_stream s;
    assert_ok(acr__cuda_driver_open(&s.driver));
    assert_int_equal(s.driver.DevicePrimaryCtxRetain(&s.context, 0), CUDA_SUCCESS);
    assert_int_equal(s.driver.CtxPushCurrent(s.context), CUDA_SUCCESS);
    assert_int_equal(s.driver.StreamCreate(&s.stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    return s;
}

static void own_stream_begin(own_stream *s)
{
    assert_int_equal(s->driver.StreamBeginCapture(s->stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
}

static void own_stream_end(own_stream *s)
{
    CUgraph graph = NULL;
    assert_int_equal(s->driver.StreamEndCapture(s->stream, &graph), CUDA_SUCCESS);
    assert_int_equal(s->driver.GraphDestroy(graph), CUDA_SUCCESS);
}

static void own_stream_free(own_stream *s)
{
    CUcontext popped;
    s->driver.StreamDestroy(s->stream);
    s->driver.CtxPopCurrent(&popped);
    s->driver.DevicePrimaryCtxRelease(0);
    acr__cuda_driver_close(&s->driver);
}

static void planning_and_executing_may_be_captured(void **state)
{
    (void)state;
    scene s = scene_make("b1:h2:s16:d64", NULL);
    own_stream own = own_stream_make();
    own_stream_begin(&own);
    const acr_problem other = problem_of("f32:b1:h2:s16:d64"); /* a kernel that has not been loaded yet */
    acr_plan *plan = NULL;
    assert_ok(acr_plan_create(&plan, s.ctx, &other, ACR_ESTIMATE));
    assert_ok(acr_workspace_init(s.plan, s.workspace, s.workspace_bytes, own.stream));
    assert_ok(scene_execute(&s, own.stream));
    assert_ptr_equal(fake_cuda_last_launch().stream, own.stream);
    own_stream_end(&own);
    assert_int_equal(fake_cuda_count().launches, 0); /* captured, not run */
    acr_plan_destroy(plan);
    own_stream_free(&own);
    scene_free(&s);
}

/* Somebody else's graph is replayed and timed, and stays theirs. */
static void a_foreign_graph_is_adopted(void **state)
{
    (void)state;
    enum {
        LAUNCHES = 2,
        REPLAYS = 3
    };
    scene s = scene_make("b1:h2:s16:d64", &candidate);
    acr__backend_device *device = s.b.device;
    own_stream own = own_stream_make();
    CUgraph theirs = NULL;
    own_stream_begin(&own);
    for (int i = 0; i < LAUNCHES; i++)
        assert_ok(scene_execute(&s, own.stream));
    assert_int_equal(own.driver.StreamEndCapture(own.stream, &theirs), CUDA_SUCCESS);
    static const char *const failing[] = {"cuStreamCreate", "cuGraphInstantiateWithFlags", "cuGraphUpload"};
    acr__graph *graph = NULL;
    for (size_t i = 0; i < COUNT_OF(failing); i++) {
        fake_cuda_fail_entry(failing[i], CUDA_ERROR_UNKNOWN);
        assert_fails(device->backend->timing->graph_adopt(&graph, device, theirs, LAUNCHES), ACR_DEVICE_FAULT,
                     failing[i]);
    }
    fake_cuda_fail_entry(NULL, 0);
    assert_ok(device->backend->timing->graph_adopt(&graph, device, theirs, LAUNCHES));
    const long before = fake_cuda_count().launches;
    double seconds[REPLAYS];
    assert_ok(device->backend->timing->graph_time(graph, REPLAYS, seconds));
    assert_int_equal(fake_cuda_count().launches - before, LAUNCHES * (REPLAYS + 1)); /* one warms up */
    for (int i = 0; i < REPLAYS; i++)
        assert_true(seconds[i] > 0.499e-3 && seconds[i] < 0.501e-3); /* a replay takes 1 ms */
    device->backend->timing->graph_free(graph);
    assert_int_equal(own.driver.GraphDestroy(theirs), CUDA_SUCCESS); /* still there */
    own_stream_free(&own);
    scene_free(&s);
}

static void forward_makes_no_workspace_under_capture(void **state)
{
    (void)state;
    /* Over all GPUs of the fake driver and problems of several kinds: where the chosen kernel needs a workspace, the
     * first call under capture is refused and works after a call outside; where it needs none, it just works. */
    static const int archs[] = {80, 86, 89, 90, 120};
    static const char *const texts[] = {"b1:h2:s16:d64", "f32:b1:h1:s1/4096:d64", "b1:h1:s1/100000:d128",
                                        "bf16:b1:h32/8:s1/8192:d128:kvlens"};
    for (size_t i = 0; i < COUNT_OF(archs); i++)
        for (size_t n = 0; n < COUNT_OF(texts); n++) {
            fake_cuda_reset();
            fake_cuda_set_arch(archs[i]);
            scene s = scene_make(texts[n], NULL);
            own_stream own = own_stream_make();
            own_stream_begin(&own);
            if (s.workspace_bytes) {
                const long allocations = fake_cuda_count().allocations;
                assert_fails(acr_forward(s.ctx, &s.problem, &s.b.buffers, own.stream), ACR_WORKSPACE, "captured");
                assert_int_equal(fake_cuda_count().allocations, allocations);
                own_stream_end(&own);
                assert_ok(acr_forward(s.ctx, &s.problem, &s.b.buffers, own.stream));
                own_stream_begin(&own);
            }
            assert_ok(acr_forward(s.ctx, &s.problem, &s.b.buffers, own.stream));
            own_stream_end(&own);
            own_stream_free(&own);
            scene_free(&s);
            assert_clean(texts[n]);
        }
}

/* ---- Threads ------------------------------------------------------------------------------------------------------
 * */

typedef struct worker {
    pthread_t thread;
    acr_ctx *ctx;
    const scene *scene;
    bool passed;
} worker;

static void *plan_and_execute(void *arg)
{
    worker *w = arg;
    w->passed = true;
    for (int round = 0; round < 50 && w->passed; round++) {
        acr_plan *plan = NULL;
        w->passed =
            acr_plan_create(&plan, w->ctx, &w->scene->problem, ACR_ESTIMATE) == ACR_OK &&
            acr_execute(plan, &w->scene->b.buffers, w->scene->workspace, w->scene->workspace_bytes, NULL) == ACR_OK &&
            scene_execute(w->scene, NULL) == ACR_OK &&
            acr_forward(w->ctx, &w->scene->problem, &w->scene->b.buffers, NULL) == ACR_OK;
        acr_plan_destroy(plan);
    }
    return NULL;
}

static void threads_share_context_and_plan(void **state)
{
    (void)state;
    scene s = scene_make("b1:h2:s16:d64", NULL);
    worker workers[4];
    for (size_t i = 0; i < COUNT_OF(workers); i++) {
        workers[i] = (worker){.ctx = s.ctx, .scene = &s};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, plan_and_execute, &workers[i]), 0);
    }
    for (size_t i = 0; i < COUNT_OF(workers); i++) {
        assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
        assert_true(workers[i].passed);
    }
    assert_int_equal(fake_cuda_count().launches, 4 * 50 * 3);
    scene_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(an_old_driver_is_refused_with_both_versions, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(a_machine_without_devices_is_refused, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(a_missing_entry_is_named, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(a_usable_gpu_is_the_default, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(eight_bit_products_need_sm_89, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(forced_ptx_is_not_believed_unseen, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(every_failing_call_of_opening_is_clean, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(every_failing_call_of_planning_is_clean, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(every_failing_call_of_measuring_is_clean, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(every_failing_allocation_is_clean, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(every_failing_host_allocation_is_clean, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(memory_moves_and_every_failing_call_is_clean, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(a_launch_carries_the_arguments, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(maps_follow_the_tensors, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(scales_are_device_memory, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(maps_of_packed_batches_have_their_rows, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(bare_launches_only_launch, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(cold_times_empty_the_cache, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(executions_neither_allocate_nor_wait, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(a_failed_launch_is_reported, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(refused_executions_launch_nothing, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(plans_outlive_their_context, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(planning_and_executing_may_be_captured, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(a_foreign_graph_is_adopted, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(forward_makes_no_workspace_under_capture, reset_driver, check_clean),
        cmocka_unit_test_setup_teardown(threads_share_context_and_plan, reset_driver, check_clean),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
