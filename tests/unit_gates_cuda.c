/* The gates on a GPU, as far as they come without one: nvcc compiles for the H200 that the fake driver shows, objects
 * and resources are looked at; the fake driver launches nothing, so nothing passes the gate of correctness. On a GPU,
 * exploits/gpu.sh goes the whole way. Skipped where there is no nvcc. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>

#include "evolve/gates.h"

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
    assert_end(&result, TRIAL_UNSUPPORTED, GATE_RESOURCES, "qk_dim is above 32");
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
    char log[600];
    assert_ok(candidate_of_source(&c, "attention", "80", "", f->source, f->descriptor));
    gates_prepare(&a, f->gates, &c, "profiled", &result);
    skip_without_nvcc(&result);
    assert_non_null(a);
    gates_profile(f->gates, a, profiler, log, sizeof log, &result);
    assert_end(&result, TRIAL_VALID, GATE_PROFILE, "");
    char *text = read_file(log);
    assert_non_null(strstr(text, "profiled\nat: profile b2:h8:s512:d64"));
    free(text);
    gates_profile(f->gates, a, missing, log, sizeof log, &result);
    assert_end(&result, TRIAL_HARNESS_FAILED, GATE_PROFILE, "No such file");
    artefact_free(a);
    candidate_free(&c);
}

/* A device that is gone is not the candidate's doing. */
static void a_missing_device_is_not_held_against_it(void **state)
{
    trial_result result;
    setenv("FAKE_CUDA_DEVICES", "0", 1);
    run_variant(*state, "", "", NULL, &result);
    unsetenv("FAKE_CUDA_DEVICES");
    assert_end(&result, TRIAL_HARNESS_FAILED, GATE_CORRECTNESS, "0 devices");
    trial_result_free(&result);
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
        cmocka_unit_test(families_are_compiled_as_the_build_does),
        cmocka_unit_test(a_profiler_wraps_the_child),
        cmocka_unit_test(a_missing_device_is_not_held_against_it),
    };
    return cmocka_run_group_tests(tests, make_fixture, free_fixture);
}
