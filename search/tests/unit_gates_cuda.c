/* The gates on a GPU, as far as they come without one: nvcc compiles for the H200 that the fake driver shows, objects
 * and resources are looked at; the fake driver launches nothing, so nothing passes the gate of correctness. On a GPU,
 * exploits/gpu.sh goes the whole way. Skipped where there is no nvcc. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bench/interleave.h"
#include "profile/profile_counters.h"
#include "ptxvm/driver/fake_driver.h"
#include "search/elites.h"
#include "search/judge.h"

typedef struct fixture {
    gates_problem problem;
    gates *gates;
    char *source, *descriptor, folder[512];
} fixture;

static int make_fixture(void **state)
{
    static fixture f;
    f = (fixture){.problem = {canonical_of("b2:h8:s512:d64"), 1.0}};
    f.source = read_file("tests/exploits/attention.cu");
    f.descriptor = read_file("tests/exploits/attention.cuda.json");
    snprintf(f.folder, sizeof f.folder, "%s", scratch_path("unit_gates_cuda"));
    make_folder(f.folder);
    const gates_setup setup = {.backend = "cuda",
                               .problems = &f.problem,
                               .problem_count = 1,
                               .visible_cases = 1,
                               .hidden_cases = 1,
                               .case_timeout_s = 8,
                               .folder = f.folder,
                               .source_root = "."};
    assert_ok(gates_open(&f.gates, &setup));
    *state = &f;
    return 0;
}

static int free_fixture(void **state)
{
    fixture *f = *state;
    gates_close(f->gates);
    remove_folder(f->folder);
    free(f->source);
    free(f->descriptor);
    return 0;
}

static void skip_without_nvcc(const trial_result *result)
{
    if (result->status == TRIAL_HARNESS_FAILED && strstr(result->detail, "127")) {
        printf("nvcc is needed\n");
        exit(77);
    }
}

/* Runs a variant of the exploits' source. */
static void run_variant(const fixture *f, const char *parameters, const char *prefix, const char *json,
                        trial_result *result)
{
    candidate c;
    char *source = NULL;
    assert_true(asprintf(&source, "%s%s", prefix, f->source) > 0);
    assert_ok(candidate_of_source(&c, "attention", "80", parameters, source, json ? json : f->descriptor));
    gates_run(f->gates, &c, "variant", result);
    free(source);
    candidate_free(&c);
    skip_without_nvcc(result);
}

static void assert_end(const trial_result *result, trial_status status, trial_gate gate, const char *says)
{
    if (result->status != status || result->gate != gate || !strstr(result->detail, says)) {
        fail_msg("%s at %s: %s", trial_status_name(result->status), trial_gate_name(result->gate), result->detail);
    }
}

static void an_honest_source_comes_as_far_as_its_output(void **state)
{
    trial_result result;
    run_variant(*state, "", "", NULL, &result);
    assert_end(&result, TRIAL_WRONG, GATE_CORRECTNESS, "never written");
    assert_true(result.resources.registers > 16 && result.resources.registers <= 255);
    assert_int_equal(result.resources.spill_bytes, 0);
    assert_int_equal(result.resources.smem_bytes, 0);
    assert_true(result.resources.ctas_per_sm >= 1 && result.resources.ctas_per_sm <= 8);
    assert_true(result.resources.code_bytes > 1000);
    assert_int_equal(strlen(result.identity), 32);
    assert_int_equal(result.case_count, 1);
    assert_false(result.cases[0].pass);
    /* Its child was given what it is judged by. */
    char path[600];
    snprintf(path, sizeof path, "%s/variant/correctness.job.json", ((const fixture *)*state)->folder);
    json_t *job = json_load_file(path, 0, NULL);
    assert_true(json_integer_value(json_object_get(job, "references")) > 2);
    json_decref(job);
    trial_result_free(&result);
}

static void names_and_comments_are_no_identity(void **state)
{
    trial_result first, second, third;
    run_variant(*state, "", "", NULL, &first);
    run_variant(*state, "", "// renamed\n#define attend compute_everything\n#define top m_i\n", NULL, &second);
    run_variant(*state, "CHEAT_SCALE=1", "", NULL, &third);
    assert_string_equal(first.identity, second.identity);
    assert_string_not_equal(first.identity, third.identity);
    const trial_result *const all[] = {&first, &second, &third};
    for (size_t i = 0; i < COUNT_OF(all); ++i) {
        trial_result_free((trial_result *)(uintptr_t)all[i]);
    }
}

static void resources_are_looked_at(void **state)
{
    trial_result result;
    run_variant(*state, "CHEAT_SPILLS=1", "", NULL, &result);
    assert_end(&result, TRIAL_RESOURCES, GATE_RESOURCES, "registers spill");
    assert_true(result.resources.spill_bytes > 0);
    static const char much[] = "{\"dtype\": \"f16\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 8, \"kv_tile\": 32, "
                               "\"grid\": [1], \"block\": 256, \"smem_bytes\": 200000, \"workspace_bytes\": 64}";
    run_variant(*state, "CHEAT_SHARED=1", "", much, &result);
    assert_end(&result, TRIAL_RESOURCES, GATE_RESOURCES, "shared memory: 244000 bytes");
    static const char wide[] = "{\"dtype\": \"f16\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 8, \"kv_tile\": 32, "
                               "\"grid\": [\"0 * q_len\"], \"block\": 256}";
    run_variant(*state, "", "", wide, &result);
    assert_end(&result, TRIAL_UNSUPPORTED, GATE_RESOURCES, "grid[0] is 0");
}

static void objects_are_looked_at(void **state)
{
    trial_result result;
    run_variant(*state, "CHEAT_STATE=1", "", NULL, &result);
    assert_end(&result, TRIAL_INADMISSIBLE, GATE_COMPILE, "writable global memory");
    run_variant(*state, "", "this is no code\n", NULL, &result);
    assert_end(&result, TRIAL_COMPILE_FAILED, GATE_COMPILE, "error");
    run_variant(*state, "", "#define KERNEL_NAME_ x\n#undef KERNEL_NAME\n#define KERNEL_NAME other\n", NULL, &result);
    assert_end(&result, TRIAL_COMPILE_FAILED, GATE_RESOURCES, "no kernel named KERNEL_NAME");
}

/* What no word of the text shows stands in the PTX. */
static void ptx_is_looked_at(void **state)
{
    trial_result result;
    run_variant(*state, "CHEAT_PASTED_CLOCK=1", "", NULL, &result);
    assert_end(&result, TRIAL_INADMISSIBLE, GATE_COMPILE, "clock");
    run_variant(*state, "CHEAT_CLOCK_IN_PIECES=1", "", NULL, &result);
    assert_end(&result, TRIAL_INADMISSIBLE, GATE_COMPILE, "clock");
}

/* The stage that times, as far as it comes where no kernel runs: launches are recorded, prepared, timed and looked at;
 * the oracle's inputs end it, since nothing is written. */
static void launches_are_prepared_and_judged(void **state)
{
    const fixture *f = *state;
    char path[600], job_path[600], result_path[600];
    process_outcome outcome;
    trial_result result;
    run_variant(f, "", "", NULL, &result);
    assert_end(&result, TRIAL_WRONG, GATE_CORRECTNESS, "never written");
    trial_result_free(&result);
    snprintf(path, sizeof path, "%s/variant/correctness.job.json", f->folder);
    snprintf(job_path, sizeof job_path, "%s/timing.job.json", f->folder);
    snprintf(result_path, sizeof result_path, "%s/timing.result.json", f->folder);
    json_t *job = json_load_file(path, 0, NULL);
    json_object_set_new(job, "stage", json_string("performance"));
    json_object_set(job, "incumbent", json_object_get(job, "candidate"));
    json_object_set_new(job, "references", json_integer(0));
    json_t *problem = json_array_get(json_object_get(job, "problems"), 0);
    json_object_set_new(problem, "floor_us", json_real(0));
    json_object_set_new(problem, "memory_us", json_real(1e9));
    assert_int_equal(json_dump_file(job, job_path, 0), 0);
    json_decref(job);
    const char *const argv[] = {"/proc/self/exe", GATES_CHILD, job_path, result_path, NULL};
    const process_limits limits = {.wall_s = 3600};
    assert_ok(process_run(&outcome, argv, scratch_path("timing.log"), &limits, NULL));
    json_t *answer = json_load_file(result_path, 0, NULL);
    assert_non_null(answer);
    const char *status = json_string_value(json_object_get(answer, "status"));
    const char *detail = json_string_value(json_object_get(answer, "detail"));
    if (strcmp(status, "wrong") != 0 || !strstr(detail, "while timed: o[0,0,0,0] is NaN or was never written")) {
        fail_msg("%s: %s", status, detail);
    }
    json_decref(answer);
    unlink(scratch_path("timing.log"));
}

/* ---- The host's pace ---- */

enum {
    AA_LAUNCHES = 4, /* of a replay, 5 us each */
    AA_BYTES = 64
};

typedef struct aa_side {
    acr__graph *graph;
    int replays; /* of a sample */
} aa_side;

static acr_status prepare_nothing(void *arg, void *stream)
{
    (void)arg, (void)stream;
    return ACR_OK;
}

static acr_status zero_memory(void *arg, void *stream)
{
    acr__graph *of = arg; /* its device is all that is set */
    static void *memory;
    acr_status status = memory ? ACR_OK : of->device->backend->mem_alloc(of->device, AA_BYTES, &memory);
    return status == ACR_OK ? of->device->backend->mem_zero_async(of->device, memory, AA_BYTES, stream) : status;
}

static acr_status sample_prepared(void *arg, int count, double *seconds)
{
    const aa_side *side = arg;
    for (int i = 0; i < count; ++i) {
        seconds[i] = 0;
        for (int replay = 0; replay < side->replays; ++replay) {
            double one = 0;
            acr_status status =
                side->graph->device->backend->timing->graph_time_prepared(side->graph, prepare_nothing, NULL, &one);
            if (status != ACR_OK) {
                return status;
            }
            seconds[i] += one / side->replays;
        }
    }
    return ACR_OK;
}

/* What a search would call the noise floor: one kernel against itself. */
static double floor_of_samples(const aa_side *side)
{
    const interleave_side same = {sample_prepared, (void *)(uintptr_t)side};
    const interleave_design design = {.blocks = INTERLEAVE_BLOCKS_SEARCH, .budget_s = 60, .seed = 3};
    interleave_result r;
    assert_ok(interleave_run(&r, &same, &same, &design));
    const double noise_floor = stats_noise_floor(r.views, (size_t)r.blocks);
    interleave_free(&r);
    return noise_floor;
}

/* A host that takes up to 10 us to queue a replay of 20 us, as that of an H100 that others kept busy
 * (results/evolve/README.md): behind a gate it is not seen; without one, several replays a sample make it less. */
static void a_busy_host_is_not_timed(void **state)
{
    (void)state;
    acr_ctx *ctx = NULL;
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cuda";
    fake_cuda_reset();
    fake_cuda_set_clock(5, 10);
    assert_ok(acr_ctx_create(&ctx, &options));
    acr__graph of = {.device = acr__ctx_backend_device(ctx)};
    aa_side single = {.replays = 1}, several = {.replays = 10};
    assert_ok(of.device->backend->timing->graph_record(&single.graph, of.device, zero_memory, &of, AA_LAUNCHES));
    several.graph = single.graph;
    const double gated = floor_of_samples(&single);
    fake_cuda_fail_entry("cuStreamWaitValue32", 801); /* CUDA_ERROR_NOT_SUPPORTED */
    const double open = floor_of_samples(&single), longer = floor_of_samples(&several);
    print_message("noise floors: %.3f gated, %.3f not, %.3f with ten replays a sample\n", gated, open, longer);
    assert_true(gated <= 0.01 && open > 0.05 && longer < 0.5 * open);
    of.device->backend->timing->graph_free(single.graph);
    acr_ctx_destroy(ctx);
    assert_int_equal(fake_cuda_count().misuses, 0);
    fake_cuda_reset();
}

static void families_are_compiled_as_the_build_does(void **state)
{
    const fixture *f = *state;
    static const char *const kernels[] = {"fwd_mma_f16_d64_64x64_s2_g2w32_sm80", "fwd_wgmma_f16_d64_256x64_s4_sm90a"};
    for (size_t i = 0; i < COUNT_OF(kernels); ++i) {
        candidate c;
        trial_result result;
        assert_ok(candidate_of_kernel(&c, kernels[i]));
        gates_run(f->gates, &c, "family", &result);
        skip_without_nvcc(&result);
        assert_end(&result, TRIAL_WRONG, GATE_CORRECTNESS, "never written");
        assert_true(result.resources.smem_bytes > 1024 && result.resources.registers > 64);
        trial_result_free(&result);
        candidate_free(&c);
    }
    candidate c;
    trial_result result;
    assert_ok(candidate_of_family(&c, "fwd_mma", "80", "DIM=64 Q_TILE=64 KV_TILE=64 STAGES=1"));
    gates_run(f->gates, &c, "family", &result);
    assert_end(&result, TRIAL_COMPILE_FAILED, GATE_COMPILE, "STAGES: one tile is computed on");
    candidate_free(&c);
    assert_ok(candidate_of_family(&c, "fwd_mma", "80", "DIM=32 Q_TILE=64 KV_TILE=64 STAGES=2"));
    gates_run(f->gates, &c, "family", &result);
    assert_end(&result, TRIAL_UNSUPPORTED, GATE_RESOURCES, "the kernel serves up to 32");
    candidate_free(&c);
}

/* The profiler wraps the child and prints where it is told to. */
static void a_profiler_wraps_the_child(void **state)
{
    const fixture *f = *state;
    static const char *const profiler[] = {"sh", "-c", "echo profiled >&2; exec \"$0\" \"$@\"", NULL};
    static const char *const missing[] = {"/no/such/profiler", "--csv", NULL};
    candidate c;
    artefact *a;
    trial_result result;
    gates_profiled done;
    assert_ok(candidate_of_source(&c, "attention", "80", "", f->source, f->descriptor));
    gates_prepare(&a, f->gates, &c, "profiled", &result);
    skip_without_nvcc(&result);
    assert_non_null(a);
    gates_profile(&done, f->gates, a, 0, profiler, 60);
    assert_end(&done.result, TRIAL_VALID, GATE_PROFILE, "");
    assert_int_equal(done.outcome.code, 0);
    char *text = read_file(done.log);
    assert_non_null(strstr(text, "profiled\nat: profile b2:h8:s512:d64"));
    free(text);
    gates_profile(&done, f->gates, a, 0, missing, 60);
    assert_end(&done.result, TRIAL_HARNESS_FAILED, GATE_PROFILE, "No such file");
    assert_int_equal(done.outcome.code, -1);
    gates_profile(&done, f->gates, NULL, 0, profiler, 60);
    assert_end(&done.result, TRIAL_HARNESS_FAILED, GATE_PROFILE, "no incumbent");
    artefact_free(a);
    candidate_free(&c);
}

/* A tool that runs what it is given, then prints what Nsight Compute printed on an H200, about our kernel. */
static const char fake_ncu[] = "#!/bin/sh\n"
                               "[ \"$1\" = --version ] && { echo 'Version 2025.3.1.0 (build 1)'; exit; }\n"
                               "while [ \"${1#--}\" != \"$1\" ]; do\n"
                               "    [ \"$1\" = --kernel-name ] && kernel=$2\n"
                               "    [ \"$1\" = --csv ] && shift || shift 2\n"
                               "done\n"
                               "\"$@\" || exit\n"
                               "sed \"s/fwd_wgmma_f16_d64_128x128_s3_sm90a/$kernel/\" tests/data/ncu-2025.3-h200.csv\n";
static const char refusing_ncu[] = "#!/bin/sh\n"
                                   "echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'\n"
                                   "exit 1\n";

static void write_program(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    assert_int_equal(chmod(path, 0755), 0);
}

/* Profiles one trial with this program as `ncu`, and returns what the store then says of it; the caller drops it. */
static json_t *profile_with(const fixture *f, const char *program, const artefact *a, bool *works)
{
    char path[600], search_path[2048];
    store *s = NULL;
    int64_t slice = 0;
    json_t *empty = json_object(), *said = NULL;
    definition d = {.problem_count = 1, .problems = {f->problem}};
    snprintf(path, sizeof path, "%s/ncu", f->folder);
    write_program(path, program);
    snprintf(search_path, sizeof search_path, "%s:%s", f->folder, getenv("PATH"));
    char *before = strdup(getenv("PATH"));
    setenv("PATH", search_path, 1);
    snprintf(path, sizeof path, "%s/profiles.db", f->folder);
    assert_ok(store_open(&s, path, STORE_CREATE));
    assert_ok(store_begin_slice(s, empty, &slice));
    const elite_profiler profiler = {f->gates, s, slice, &d};
    assert_ok(elites_profile(&profiler, 1, a, works));
    assert_ok(store_profile_json(s, 1, &said));
    store_close(s);
    setenv("PATH", before, 1);
    unlink(path);
    free(before);
    json_decref(empty);
    assert_int_equal(json_array_size(said), 1);
    return said;
}

/* From a candidate to counters in the store and a sentence about them; or to the reason why there are none. */
static void elites_get_counters(void **state)
{
    const fixture *f = *state;
    candidate c;
    artefact *a;
    trial_result result;
    bool works = false;
    assert_ok(candidate_of_source(&c, "attention", "80", "", f->source, f->descriptor));
    gates_prepare(&a, f->gates, &c, "elite", &result);
    skip_without_nvcc(&result);
    json_t *said = profile_with(f, fake_ncu, a, &works);
    const json_t *profile = json_array_get(said, 0);
    assert_string_equal(json_string_value(json_object_get(profile, "status")), "OK");
    assert_string_equal(json_string_value(json_object_get(profile, "tool")), "Nsight Compute 2025.3.1.0");
    assert_true(json_number_value(json_object_get(json_object_get(profile, "counters"), "registers")) == 168);
    assert_int_equal(json_object_size(json_object_get(profile, "counters")), COUNTER_COUNT + STALL_COUNT);
    assert_non_null(strstr(json_string_value(json_object_get(profile, "diagnosis")), "64 CTAs for 132 SMs"));
    assert_true(works);
    json_decref(said);
    said = profile_with(f, refusing_ncu, a, &works);
    profile = json_array_get(said, 0);
    assert_string_equal(json_string_value(json_object_get(profile, "status")), "NO_PERMISSION");
    assert_int_equal(json_object_size(json_object_get(profile, "counters")), 0);
    assert_false(works); /* nor will others have any */
    json_decref(said);
    said = profile_with(f, "#!/bin/sh\necho no table\n", a, &works);
    assert_string_equal(json_string_value(json_object_get(json_array_get(said, 0), "status")), "BAD_OUTPUT");
    assert_true(works);
    json_decref(said);
    artefact_free(a);
    candidate_free(&c);
}

/* Runs the honest source where the fake driver is set up so; it ends at the gate of correctness. */
static void assert_end_with(const fixture *f, const char *variable, const char *value, trial_status status,
                            const char *says)
{
    trial_result result;
    setenv(variable, value, 1);
    run_variant(f, "", "", NULL, &result);
    unsetenv(variable);
    assert_end(&result, status, GATE_CORRECTNESS, says);
    trial_result_free(&result);
}

/* A device that is gone is not the candidate's doing. */
static void a_missing_device_is_not_held_against_it(void **state)
{
    assert_end_with(*state, "FAKE_CUDA_DEVICES", "0", TRIAL_HARNESS_FAILED, "0 devices");
}

/* A kernel that never ends: the child's own alarm ends it, before the parent's limit of all cases. */
static void what_never_ends_is_hung(void **state)
{
    assert_end_with(*state, "FAKE_CUDA_ENDLESS", "cuCtxSynchronize", TRIAL_HUNG, "a call did not end in its time");
}

int main(int argc, char **argv)
{
    int exit_code;
    if (gates_child(argc, argv, &exit_code)) {
        return exit_code;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_honest_source_comes_as_far_as_its_output),
        cmocka_unit_test(names_and_comments_are_no_identity),
        cmocka_unit_test(resources_are_looked_at),
        cmocka_unit_test(objects_are_looked_at),
        cmocka_unit_test(ptx_is_looked_at),
        cmocka_unit_test(launches_are_prepared_and_judged),
        cmocka_unit_test(a_busy_host_is_not_timed),
        cmocka_unit_test(families_are_compiled_as_the_build_does),
        cmocka_unit_test(a_profiler_wraps_the_child),
        cmocka_unit_test(elites_get_counters),
        cmocka_unit_test(a_missing_device_is_not_held_against_it),
        cmocka_unit_test(what_never_ends_is_hung),
    };
    return cmocka_run_group_tests(tests, make_fixture, free_fixture);
}
