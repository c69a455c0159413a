/* The gates on the CPU (search/gates.h), each with what it must refuse, and the parts they are made of: candidates as
 * data, descriptors, admission, identity. The cheats that only a whole run shows are in exploits/. */
#include "support.h"

#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench/interleave.h"
#include "check/inputs.h"
#include "kernels/kernel_source.h"
#include "search/admission.h"
#include "search/gates.h"
#include "search/identity.h"

/* ---- Names ---- */

static void names_are_stable(void **state)
{
    (void)state;
    for (int i = 0; i < TRIAL_STATUS_COUNT; ++i) {
        trial_status status;
        assert_true(trial_status_parse(trial_status_name((trial_status)i), &status));
        assert_int_equal(status, i);
        assert_true(strlen(trial_status_meaning((trial_status)i)) > 10);
    }
    for (int i = 0; i < GATE_COUNT; ++i) {
        trial_gate gate;
        assert_true(trial_gate_parse(trial_gate_name((trial_gate)i), &gate));
        assert_int_equal(gate, i);
    }
    trial_status status;
    trial_gate gate;
    assert_false(trial_status_parse("fine", &status));
    assert_false(trial_gate_parse("", &gate));
    assert_string_equal(trial_status_name(TRIAL_COMPILE_TIMEOUT), "compile_timeout"); /* what stores hold */
    assert_string_equal(trial_gate_name(GATE_PLAUSIBILITY), "plausibility");
}

/* ---- Candidates ---- */

static void parameters_have_one_form(void **state)
{
    (void)state;
    candidate a, b, c;
    char text[CANDIDATE_TEXT_MAX], value[32];
    assert_ok(candidate_of_family(&a, "fwd_simd", "avx2", "  KV_TILE=64 DIM=1024  COLUMNS=6"));
    assert_string_equal(a.parameters, "COLUMNS=6 DIM=1024 KV_TILE=64");
    assert_int_equal(a.backend, ACR__CPU);
    assert_true(candidate_parameter(&a, "DIM", value, sizeof value));
    assert_string_equal(value, "1024");
    assert_false(candidate_parameter(&a, "TILE", value, sizeof value));
    candidate_text(text, &a);
    assert_string_equal(text, "fwd_simd avx2 COLUMNS=6 DIM=1024 KV_TILE=64");
    assert_ok(candidate_copy(&b, &a));
    assert_string_equal(b.parameters, a.parameters);
    assert_ok(candidate_of_kernel(&c, "fwd_wgmma_f16_d64_256x64_s4_sm90a"));
    assert_int_equal(c.backend, ACR__CUDA);
    assert_string_equal(c.arch, "90a");
    assert_string_equal(c.parameters, "DIM=64 KV_TILE=64 Q_STAGES=2 Q_TILE=256 STAGES=4");
    candidate_free(&a);
    candidate_free(&b);
    candidate_free(&c);
    candidate_free(&c); /* of nothing */
}

static void malformed_candidates_are_named(void **state)
{
    (void)state;
    candidate c;
    assert_fails(candidate_of_family(&c, "fwd_simd", "avx2", "dim=3"), ACR_INVALID, "dim=3");
    assert_fails(candidate_of_family(&c, "fwd_simd", "avx2", "DIM"), ACR_INVALID, "NAME=value");
    assert_fails(candidate_of_family(&c, "fwd_simd", "avx2", "DIM=1;x"), ACR_INVALID, "NAME=value");
    assert_fails(candidate_of_family(&c, "fwd_simd", "avx2", "DIM=1 DIM=2"), ACR_INVALID, "DIM is given twice");
    assert_fails(candidate_of_family(&c, "../fwd_simd", "avx2", ""), ACR_INVALID, "family");
    assert_fails(candidate_of_family(&c, "fwd_simd", "sse9", ""), ACR_INVALID, "sse9");
    assert_fails(candidate_of_kernel(&c, "fwd_none"), ACR_INVALID, "fwd_none");
}

/* ---- Descriptors ---- */

static const char small_descriptor[] =
    "{\"dtype\": \"f32\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 16, \"kv_tile\": 16}";

static void malformed_descriptors_are_named(void **state)
{
    (void)state;
    static const struct {
        const char *json, *says;
    } cases[] = {
        {"", "descriptor"},
        {"[]", "not a JSON object"},
        {"{\"dtype\": \"f32\",}", "descriptor: line 1"},
        {"{\"dtype\": \"f32\", \"dtype\": \"f16\"}", "duplicate"},
        {"{}", "dtype"},
        {"{\"dtype\": \"f33\"}", "dtype"},
        {"{\"pass\": \"both\"}", "pass: \"fwd\" or \"bwd\" is wanted"},
        {"{\"pass\": 1}", "pass: \"fwd\" or \"bwd\" is wanted"},
        {"{\"dtype\": \"f16\"}", "qk_dim: an integer from 1 to 1024 is missing"},
        {"{\"dtype\": \"f16\", \"qk_dim\": 2000}", "qk_dim: an integer from 1 to 1024 is wanted"},
        {"{\"dtype\": \"f16\", \"qk_dim\": 64.5}", "qk_dim"},
        {"{\"dtype\": \"f16\", \"code\": \"x\"}", "code: no such key in a cuda descriptor"},
        {"{\"dtype\": \"f16\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 16, \"kv_tile\": 16}", "grid"},
        {"{\"dtype\": \"f16\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 16, \"kv_tile\": 16, \"grid\": [1]}",
         "block"},
        {"{\"dtype\": \"f16\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 16, \"kv_tile\": 16, \"grid\": [\"n\"],"
         "\"block\": 1}",
         "unknown name"},
        {"{\"dtype\": \"f16\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 16, \"kv_tile\": 16, \"grid\": [1],"
         "\"block\": 1, \"boxes\": {\"q\": 300}}",
         "boxes: q"},
        {"{\"dtype\": \"f16\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 16, \"kv_tile\": 16, \"grid\": [1],"
         "\"block\": 1, \"boxes\": {\"out\": 64}}",
         "boxes: out: of sources for gradients alone"},
        {"{\"dtype\": \"f16\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 16, \"kv_tile\": 16, \"grid\": [1],"
         "\"block\": 1, \"boxes\": {\"d_o\": 64}}",
         "boxes: only q, k, v, o and out are known"},
        {"{\"dtype\": \"f16\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 16, \"kv_tile\": 16, \"grid\": [1],"
         "\"block\": 1, \"when\": \"q_len <\"}",
         "when: "},
    };
    for (size_t i = 0; i < COUNT_OF(cases); ++i) {
        descriptor d;
        const acr_status status = descriptor_parse(&d, ACR__CUDA, cases[i].json);
        if (status != ACR_FORMAT || !strstr(acr_last_error(), cases[i].says)) {
            fail_msg("%s: status %d: %s", cases[i].json, (int)status, acr_last_error());
        }
    }
    descriptor d;
    assert_ok(descriptor_parse(&d, ACR__CPU, small_descriptor));
    assert_int_equal(d.stages, 1);
    assert_fails(descriptor_parse(&d, ACR__CPU, "{\"dtype\": \"f32\", \"grid\": [1]}"), ACR_FORMAT,
                 "grid: no such key");
}

static void expressions_compute_as_in_c(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t value;
    } good[] = {
        {"1 + 2 * 3", 7},
        {"(1 + 2) * 3", 9},
        {"7 / 2 - 7 % 4", 0},
        {"-3 + 1", -2},
        {"--3", 3},
        {"!0 + !5", 1},
        {"q_len", 100},
        {"ceil_div(q_len, q_tile)", 7},
        {"min(q_len, 5) + max(q_len, 5)", 105},
        {"q_len <= 100 && kv_len > 100", 0},
        {"q_len == 100 || 1 / 0", 1},
        {"q_len != 100 ? 1 / 0 : group", 4},
        {"causal + 2 * causal_tl + 4 * lse + 8 * packed", 9},
        {"1 ? 2 : 3 ? 4 : 5", 2},
        {" 1<2 ", 1},
    };
    static const char *const bad[] = {"",
                                      "1 +",
                                      "(1",
                                      "1 2",
                                      "q_len +* 2",
                                      "nonsense",
                                      "min(1)",
                                      "1 / 0",
                                      "5 % (3 - 3)",
                                      "1 ? 2",
                                      "system(1)",
                                      "1; 2",
                                      "0x10",
                                      "\"1\"",
                                      "9223372036854775807 + 1",
                                      "99999999999999999999",
                                      "q_len = 3"};
    const acr_problem problem = canonical_of("b1:h8/2:s100:d64:causal");
    const acr__device device = {.sm_count = 4};
    const descriptor d = {.q_tile = 16, .kv_tile = 16};
    int64_t value;
    for (size_t i = 0; i < COUNT_OF(good); ++i) {
        assert_ok(descriptor_evaluate(&value, good[i].text, &d, &problem, &device));
        if (value != good[i].value) {
            fail_msg("%s is %lld", good[i].text, (long long)value);
        }
    }
    for (size_t i = 0; i < COUNT_OF(bad); ++i) {
        if (descriptor_evaluate(&value, bad[i], &d, &problem, &device) != ACR_FORMAT) {
            fail_msg("%s is %lld", bad[i], (long long)value);
        }
    }
    char deep[DESCRIPTOR_EXPRESSION_BYTES];
    memset(deep, '(', sizeof deep - 1);
    deep[sizeof deep - 1] = '\0';
    assert_fails(descriptor_evaluate(&value, deep, &d, &problem, &device), ACR_FORMAT, "too deep");
}

/* Sources from before there were windows do not see them. */
static void windows_are_for_who_names_them(void **state)
{
    (void)state;
    descriptor d;
    const acr__device device = {.sm_count = 4};
    const acr_problem plain = canonical_of("f32:b1:h1:s64:d32:causal"),
                      narrow = canonical_of("f32:b1:h1:s64:d32:causal:win16");
    assert_ok(descriptor_parse(&d, ACR__CPU, small_descriptor));
    assert_null(descriptor_why_not(&d, &plain, &device));
    assert_non_null(strstr(descriptor_why_not(&d, &narrow, &device), "window_left"));
    assert_ok(descriptor_parse(&d, ACR__CPU,
                               "{\"dtype\": \"f32\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 16, \"kv_tile\": 16,"
                               "\"when\": \"window_left <= 16\"}"));
    assert_null(descriptor_why_not(&d, &narrow, &device));
}

/* Sources of one pass are not offered problems of the other; gradients of another type are for who names them. */
static void passes_are_for_who_names_them(void **state)
{
    (void)state;
    descriptor d;
    const acr__device device = {.sm_count = 4};
    const acr_problem forward = canonical_of("f16:b1:h1:s64:d32"), backward = canonical_of("bwd:f16:b1:h1:s64:d32"),
                      wider = canonical_of("bwd:f16:b1:h1:s64:d32:grad-f32");
    static const char either[] = "{\"pass\": \"%s\", \"dtype\": \"f16\", \"qk_dim\": 64, \"v_dim\": 64, "
                                 "\"q_tile\": 16, \"kv_tile\": 16, \"when\": \"%s\"}";
    char text[256];
    snprintf(text, sizeof text, either, "fwd", "1");
    assert_ok(descriptor_parse(&d, ACR__CPU, text));
    assert_null(descriptor_why_not(&d, &forward, &device));
    assert_non_null(strstr(descriptor_why_not(&d, &backward, &device), "pass is bwd"));
    snprintf(text, sizeof text, either, "bwd", "packed");
    assert_ok(descriptor_parse(&d, ACR__CPU, text));
    assert_null(descriptor_why_not(&d, &backward, &device));
    assert_non_null(strstr(descriptor_why_not(&d, &forward, &device), "pass is fwd"));
    assert_non_null(strstr(descriptor_why_not(&d, &wider, &device), "grad_f32"));
    snprintf(text, sizeof text, either, "bwd", "grad_f32");
    assert_ok(descriptor_parse(&d, ACR__CPU, text));
    assert_null(descriptor_why_not(&d, &wider, &device));
    assert_non_null(strstr(descriptor_why_not(&d, &backward, &device), "excludes"));
    const acr_problem strided = canonical_of("bwd:f16:b1:h1:s64:d32:dqs=4096,4096,64");
    snprintf(text, sizeof text, either, "bwd", "packed");
    assert_ok(descriptor_parse(&d, ACR__CPU, text));
    assert_non_null(strstr(descriptor_why_not(&d, &strided, &device), "excludes"));
}

/* ---- Admission ---- */

static void admission_names_what_it_refuses(void **state)
{
    (void)state;
    static const struct {
        const char *arch, *source, *says; /* NULL = admitted */
    } cases[] = {
        {"portable", "void KERNEL_NAME(void)\n{\n}\n", NULL},
        {"portable", "void f(void)\n{\n}\n", "KERNEL_NAME"},
        {"portable", "/* asm */ // __asm__\nvoid KERNEL_NAME(void);", NULL},
        {"portable", "KERNEL_NAME\nas\\\nm", "line 2: asm"},
        {"portable", "KERNEL_NAME\nas\\ \t\nm", "line 2: asm"},
        {"portable", "KERNEL_NAME // \\\n asm", NULL},
        {"portable", "KERNEL_NAME '\"' /* asm */ \"/*\" asm", "asm"},
        {"portable", "KERNEL_NAME \"\\\"\" asm", "asm"},
        {"portable", "KERNEL_NAME /* never ended", NULL},
        {"portable", "KERNEL_NAME \"never ended", NULL},
        {"90a", "KERNEL_NAME R\"(\" /*)\";\n#include \"/etc/passwd\"\n// */", "raw literals"},
        {"90a", "KERNEL_NAME asm(\"mov R1, R\");", NULL},
        {"portable", "KERNEL_NAME\n__asm__(\"\");", "line 2: __asm__"},
        {"portable", "KERNEL_NAME\n#define A as##m", "pasted"},
        {"portable", "KERNEL_NAME\n#include <stdio.h>", "line 2: #include <stdio.h>"},
        {"portable", "KERNEL_NAME\n#  include \"../x.h\"", "#include"},
        {"portable", "KERNEL_NAME\n#/**/include \"/etc/passwd\"", "#include"},
        {"portable", "KERNEL_NAME\n#include HEADER", "#include"},
        {"portable", "KERNEL_NAME\n#include <stdint.h>\n#include \"fwd_args.h\"", NULL},
        {"portable", "KERNEL_NAME\n#include \"bwd_args.h\"", NULL},
        {"portable", "KERNEL_NAME\n#include \"cuda/device/isa/mma.cuh\"", "#include"},
        {"portable", "KERNEL_NAME\n#import <stdint.h>", "#import"},
        {"portable", "KERNEL_NAME\n#line 3", "#line"},
        {"portable", "KERNEL_NAME\n#pragma GCC unroll 4", NULL},
        {"portable", "KERNEL_NAME\n#pragma GCC optimize(\"O0\")", "#pragma"},
        {"portable", "KERNEL_NAME\n_Pragma(\"x\")", "_Pragma"},
        {"portable", "KERNEL_NAME\n__attribute__((always_inline)) int f;", NULL},
        {"portable", "KERNEL_NAME\n__attribute__((vector_size(16), ifunc(\"f\"))) int f;", "attribute"},
        {"portable", "KERNEL_NAME\n__attribute__((section(\".init\"))) int f;", "attribute"},
        {"portable", "KERNEL_NAME\n_Thread_local int x;", "_Thread_local"},
        {"portable", "KERNEL_NAME \xc3\xa4", "ASCII"},
        {"portable", "KERNEL_NAME\n__builtin_ia32_rdtscp(0);", "clock"},
        {"90a", "KERNEL_NAME\n#include \"cuda/device/isa/mma.cuh\"\nasm volatile(\"mma\");", NULL},
        {"90a",
         "KERNEL_NAME\n#include \"bwd_args.h\"\n#include \"cuda/device/attention/gradients.h\"\n"
         "#include \"cuda/device/attention/gradient_lines.cuh\"",
         NULL},
        {"90a", "KERNEL_NAME\n#include \"cuda/device/../../x.cuh\"", "#include"},
        {"90a", "KERNEL_NAME\n#include \"cuda/device/../../x.h\"", "#include"},
        {"90a", "KERNEL_NAME\nasm(\"mov.u64 %0, %globaltimer;\");", "globaltimer"},
        {"90a", "KERNEL_NAME\nclock64();", "clock"},
        {"90a", "KERNEL_NAME\n__managed__ int x;", "__managed__"},
    };
    static const char cuda_descriptor[] = "{\"dtype\": \"f16\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 16, "
                                          "\"kv_tile\": 16, \"grid\": [1], \"block\": 1}";
    for (size_t i = 0; i < COUNT_OF(cases); ++i) {
        candidate c;
        descriptor d;
        const bool cuda = cases[i].arch[0] == '9';
        assert_ok(candidate_of_source(&c, "x", cases[i].arch, "", cases[i].source,
                                      cuda ? cuda_descriptor : small_descriptor));
        const acr_status status = admission_check(&c, ".", &d);
        const bool good =
            cases[i].says ? status == ACR_INVALID && strstr(acr_last_error(), cases[i].says) : status == ACR_OK;
        if (!good) {
            fail_msg("%s: status %d: %s", cases[i].source, (int)status, acr_last_error());
        }
        candidate_free(&c);
    }
}

static void families_and_sizes_are_checked(void **state)
{
    (void)state;
    candidate c;
    descriptor d;
    assert_ok(candidate_of_family(&c, "fwd_none", "avx2", ""));
    assert_fails(admission_check(&c, ".", &d), ACR_INVALID, "fwd_none");
    candidate_free(&c);
    assert_ok(candidate_of_family(&c, "fwd_simd", "avx2", "KERNEL_NAME=x"));
    assert_fails(admission_check(&c, ".", &d), ACR_INVALID, "KERNEL_");
    candidate_free(&c);
    assert_ok(candidate_of_source(&c, "x", "avx2", "", "KERNEL_NAME", NULL));
    assert_fails(admission_check(&c, ".", &d), ACR_INVALID, "descriptor");
    candidate_free(&c);
    char *large = malloc(CANDIDATE_SOURCE_BYTES_MAX + 2);
    assert_non_null(large);
    memset(large, ' ', CANDIDATE_SOURCE_BYTES_MAX + 1);
    large[CANDIDATE_SOURCE_BYTES_MAX + 1] = '\0';
    assert_ok(candidate_of_source(&c, "x", "avx2", "", large, small_descriptor));
    assert_fails(admission_check(&c, ".", &d), ACR_INVALID, "bytes");
    candidate_free(&c);
    free(large);
}

/* ---- Whole gates: a family's kernel made slow, and what is proposed against it ---- */

static const char slow[] = "DTYPE=ACR_F32 DIM=1024 Q_TILE=16 KV_TILE=16 ROW_VECS=1 COLUMNS=1 UNROLL=1";
static const char quick[] = "DTYPE=ACR_F32 DIM=1024 Q_TILE=64 KV_TILE=64 ROW_VECS=2 COLUMNS=6 UNROLL=2";

typedef struct fixture {
    gates_problem problems[2];
    candidate incumbent;
    gates_setup setup;
    char folder[512], found[64];
    const char *known; /* the identity that the store has, or NULL */
} fixture;

static bool find(void *arg, const char *identity, char original[64])
{
    const fixture *f = arg;
    snprintf(original, 64, "trial 12");
    return f->known && strcmp(f->known, identity) == 0;
}

static int make_fixture(void **state)
{
    static fixture f;
    f = (fixture){
        .problems = {{canonical_of("f32:b1:h2:s64:d32"), 2.0}, {canonical_of("f32:b1:h1:s97:d32:causal"), 1.0}}};
    assert_ok(candidate_of_family(&f.incumbent, "fwd_simd", "portable", slow));
    snprintf(f.folder, sizeof f.folder, "%s", scratch_path("unit_gates"));
    make_folder(f.folder);
    f.setup = (gates_setup){.backend = "cpu",
                            .threads = 1,
                            .problems = f.problems,
                            .problem_count = 2,
                            .incumbent = &f.incumbent,
                            .visible_seed = 3,
                            .hidden_seed = 0xfedcba9876543210u,
                            .visible_cases = 2,
                            .hidden_cases = 2,
                            .case_timeout_s = 10,
                            .clock = GATES_CLOCK_MODEL,
                            .folder = f.folder,
                            .source_root = ".",
                            .find = find,
                            .find_arg = &f};
    *state = &f;
    return 0;
}

static int free_fixture(void **state)
{
    fixture *f = *state;
    candidate_free(&f->incumbent);
    remove_folder(f->folder);
    return 0;
}

static gates *open_gates(const fixture *f)
{
    gates *g = NULL;
    assert_ok(gates_open(&g, &f->setup));
    return g;
}

/* Runs one candidate and checks where it ended. */
static void run_expecting(gates *g, const candidate *c, trial_result *result, trial_status status, trial_gate gate,
                          const char *says)
{
    gates_run(g, c, "trial", result);
    if (result->status != status || result->gate != gate || !strstr(result->detail, says)) {
        fail_msg("%s at %s: %s", trial_status_name(result->status), trial_gate_name(result->gate), result->detail);
    }
}

static void a_better_kernel_passes_every_gate(void **state)
{
    fixture *f = *state;
    gates *g = open_gates(f);
    candidate c;
    trial_result result, again;
    artefact *a;
    assert_true(strlen(gates_incumbent(g)->identity) == 32);
    assert_ok(candidate_of_family(&c, "fwd_simd", "portable", quick));
    run_expecting(g, &c, &result, TRIAL_VALID, GATE_PERFORMANCE, "");
    assert_int_equal(result.timing_count, 2);
    assert_int_equal(result.timings[0].samples, INTERLEAVE_BLOCKS_SEARCH * INTERLEAVE_BLOCK_SAMPLES);
    assert_string_equal(result.timings[1].problem, "f32:b1:h1:s97:d32:causal");
    assert_true(result.overall.ci95.low <= result.overall.speedup &&
                result.overall.speedup <= result.overall.ci95.high);
    assert_true(result.case_count >= 2 + 2 + 2 + 2 * 7);
    int hidden = 0;
    for (size_t i = 0; i < result.case_count; ++i) {
        assert_true(result.cases[i].pass && result.cases[i].tol_max > 0);
        hidden += result.cases[i].hidden;
    }
    assert_int_equal(hidden, 2 + 2 * 7);
    /* The overall speed-up lies between those of the problems. */
    const double first = result.timings[0].comparison.speedup, second = result.timings[1].comparison.speedup;
    assert_true((result.overall.speedup - first * 0.99) * (result.overall.speedup - second * 1.01) <= 0 ||
                (result.overall.speedup - first * 1.01) * (result.overall.speedup - second * 0.99) <= 0);
    assert_true(result.gate_s[GATE_COMPILE] > 0 && result.gate_s[GATE_CORRECTNESS] > 0);
    /* The model clock: the same candidate has the same samples. */
    gates_prepare(&a, g, &c, "again", &again);
    assert_non_null(a);
    gates_judge(g, a, &again);
    assert_string_equal(again.identity, result.identity);
    assert_memory_equal(again.timings[0].candidate_us, result.timings[0].candidate_us,
                        result.timings[0].samples * sizeof(double));
    trial_result_free(&again);
    gates_confirm(g, a, 0, &again);
    assert_true(again.status == TRIAL_VALID || again.status == TRIAL_UNCONFIRMED);
    assert_int_equal(again.gate, GATE_CONFIRMATION);
    assert_int_equal(again.timings[0].samples,
                     GATES_CONFIRM_PROCESSES * INTERLEAVE_BLOCKS_SEARCH * INTERLEAVE_BLOCK_SAMPLES);
    assert_int_equal(again.overall.blocks, GATES_CONFIRM_PROCESSES);
    trial_result_free(&again);
    gates_control(g, &again);
    assert_int_equal(again.status, TRIAL_VALID);
    assert_int_equal(again.overall.verdict, STATS_SAME);
    artefact_free(a);
    trial_result_free(&again);
    trial_result_free(&result);
    candidate_free(&c);
    gates_close(g);
}

/* What a child of this trial was told. */
static json_t *read_job(const gates_setup *setup, const char *trial, const char *stage)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s/%s.job.json", setup->folder, trial, stage);
    json_t *job = json_load_file(path, 0, NULL);
    assert_non_null(job);
    return job;
}

/* What is expected of the task's problems is made once, for every child that judges. */
static void references_are_handed_on(void **state)
{
    fixture *f = *state;
    gates *g = open_gates(f);
    candidate c;
    trial_result result;
    assert_ok(candidate_of_family(&c, "fwd_simd", "portable", quick));
    run_expecting(g, &c, &result, TRIAL_VALID, GATE_PERFORMANCE, "");
    static const char *const stages[] = {"correctness", "performance"};
    for (size_t i = 0; i < COUNT_OF(stages); ++i) {
        json_t *job = read_job(&f->setup, "trial", stages[i]);
        assert_true(json_integer_value(json_object_get(job, "references")) > 0);
        json_decref(job);
    }
    trial_result_free(&result);
    candidate_free(&c);
    gates_close(g);
}

/* Every kind of inputs on every problem of the task, whatever the seeds. */
static void every_kind_of_inputs_runs(void **state)
{
    fixture *f = *state;
    gates *g = open_gates(f);
    const trial_result *result = gates_incumbent(g);
    for (size_t problem = 0; problem < 2; ++problem) {
        for (int kind = 0; kind < input_kind_count(ACR_F32); ++kind) {
            char text[ACR_PROBLEM_TEXT_MAX];
            bool found = false;
            assert_ok(acr_problem_format(&f->problems[problem].problem, text, sizeof text));
            for (size_t i = 0; i < result->case_count; ++i) {
                const trial_case *c = &result->cases[i];
                found = found || (c->hidden && strcmp(c->problem, text) == 0 &&
                                  strcmp(c->inputs, input_kind_name((input_kind)kind)) == 0);
            }
            if (!found) {
                fail_msg("%s was not tried with %s inputs", text, input_kind_name((input_kind)kind));
            }
        }
    }
    gates_close(g);
}

static void the_incumbent_is_not_confirmed_against_itself(void **state)
{
    fixture *f = *state;
    gates *g = open_gates(f);
    trial_result result;
    artefact *a;
    gates_prepare(&a, g, &f->incumbent, "self", &result);
    assert_non_null(a);
    assert_string_equal(result.identity, gates_incumbent(g)->identity);
    gates_confirm(g, a, 1, &result);
    assert_int_equal(result.status, TRIAL_UNCONFIRMED);
    assert_non_null(strstr(result.detail, "SAME"));
    artefact_free(a);
    trial_result_free(&result);
    gates_close(g);
}

static void illegal_sets_are_refused_by_the_compiler(void **state)
{
    fixture *f = *state;
    gates *g = open_gates(f);
    candidate c;
    trial_result result;
    assert_ok(candidate_of_family(&c, "fwd_simd", "portable",
                                  "DTYPE=ACR_F32 DIM=64 Q_TILE=24 KV_TILE=64 ROW_VECS=4 COLUMNS=9 UNROLL=2"));
    run_expecting(g, &c, &result, TRIAL_COMPILE_FAILED, GATE_COMPILE, "does not fit the registers");
    candidate_free(&c);
    assert_ok(candidate_of_family(&c, "fwd_simd", "portable",
                                  "DTYPE=ACR_F32 DIM=16 Q_TILE=16 KV_TILE=16 ROW_VECS=1 COLUMNS=1 UNROLL=1"));
    run_expecting(g, &c, &result, TRIAL_UNSUPPORTED, GATE_CORRECTNESS, "qk_dim is 32");
    trial_result_free(&result);
    candidate_free(&c);
    assert_ok(candidate_of_kernel(&c, "fwd_wgmma_f16_d64_256x64_s4_sm90a"));
    run_expecting(g, &c, &result, TRIAL_INADMISSIBLE, GATE_ADMISSION, "other backend");
    candidate_free(&c);
    gates_close(g);
}

static void parameters_are_those_of_the_family(void **state)
{
    (void)state;
    static const struct {
        const char *parameters, *says; /* NULL = admitted */
    } cases[] = {
        {"DTYPE=ACR_F32 DIM=64 Q_TILE=16 KV_TILE=16 ROW_VECS=1 COLUMNS=1 UNROLL=1", NULL},
        {"DTYPE=ACR_F32 DIM=64 Q_TILE=16 KV_TILE=16 ROW_VECS=1 COLUMNS=1 UNROLL=1 TYPO=7", "no parameter TYPO"},
        {"DTYPE=F16 DIM=64 Q_TILE=16 KV_TILE=16 ROW_VECS=1 COLUMNS=1 UNROLL=1", "DTYPE=F16 is not ACR_F32"},
        {"DTYPE=ACR_F32 DIM=wide Q_TILE=16 KV_TILE=16 ROW_VECS=1 COLUMNS=1 UNROLL=1", "DIM=wide is not a whole number"},
        {"DTYPE=ACR_F32 DIM=64 Q_TILE=16 KV_TILE=16 ROW_VECS=1 COLUMNS=1", "UNROLL is missing"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); ++i) {
        candidate c;
        descriptor d;
        assert_ok(candidate_of_family(&c, "fwd_simd", "portable", cases[i].parameters));
        const acr_status status = admission_check(&c, ".", &d);
        if (cases[i].says ? status != ACR_INVALID || !strstr(acr_last_error(), cases[i].says) : status != ACR_OK) {
            fail_msg("%s: status %d: %s", cases[i].parameters, (int)status, acr_last_error());
        }
        candidate_free(&c);
    }
}

static void a_declaration_may_have_several_lines(void **state)
{
    (void)state;
    static const struct {
        const char *text, *says; /* NULL = TWO=2 is known, and ONE required */
    } cases[] = {
        {"/* A family.\n *\n * PARAMETERS: ONE\n * TWO=1 */\n#define ONE 3\n", NULL},
        {"/* PARAMETERS: ONE TWO=1\n */\n", NULL},
        {"/* PARAMETERS: ONE\n * TWO=1", "the comment does not end"},
        {"/* PARAMETERS: ONE\n * =1 */", "neither NAME nor NAME=default"},
        {"/* A family. */", "is missing"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); ++i) {
        char path[] = "/tmp/acromion-parameters-XXXXXX";
        const int fd = mkstemp(path);
        assert_true(fd >= 0);
        assert_int_equal(write(fd, cases[i].text, strlen(cases[i].text)), (ssize_t)strlen(cases[i].text));
        close(fd);
        kernel_parameters declared;
        const acr_status status = kernel_parameters_read(&declared, path);
        unlink(path);
        if (cases[i].says) {
            assert_int_equal(status, ACR_FORMAT);
            assert_non_null(strstr(acr_last_error(), cases[i].says));
            continue;
        }
        assert_ok(status);
        assert_ok(kernel_parameters_check(&declared, "ONE=5 TWO=2", true));
        assert_int_equal(kernel_parameters_check(&declared, "TWO=2", true), ACR_INVALID);
    }
}

static void a_known_identity_is_a_duplicate(void **state)
{
    fixture *f = *state;
    gates *g = open_gates(f);
    candidate c;
    trial_result first, second;
    assert_ok(candidate_of_family(&c, "fwd_simd", "portable", quick));
    run_expecting(g, &c, &first, TRIAL_VALID, GATE_PERFORMANCE, "");
    f->known = first.identity;
    run_expecting(g, &c, &second, TRIAL_DUPLICATE, GATE_IDENTITY, "earlier");
    assert_string_equal(second.original, "trial 12");
    assert_int_equal(second.case_count, 0);
    f->known = NULL;
    trial_result_free(&first);
    trial_result_free(&second);
    candidate_free(&c);
    gates_close(g);
}

/* ---- Identity ---- */

static const char identity_source[] =
    "#include \"fwd_args.h\"\n"
    "static float twice(float x)\n{\n    return 2.0f * x;\n}\n"
    "void KERNEL_NAME(const fwd_args *a, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)\n"
    "{\n    for (int i = 0; i < a->q_len; ++i) {\n        ((float *)a->o)[i] = twice(((const float *)a->q)[i]);\n    "
    "}\n}\n";
static const char renamed_source[] =
    "#include \"fwd_args.h\"\n/* quite another kernel */\n#define MANY 2.0f\n"
    "static float y_of(float y) { return MANY * y; }\n\n"
    "static const int never_used = 3;\n"
    "void KERNEL_NAME(const fwd_args *what, int32_t l, int32_t m, _Atomic int64_t *n, void *o) {\n"
    "  int j = 0; while (j < what->q_len) { ((float *)what->o)[j] = y_of(((const float *)what->q)[j]); j++; } }\n";
static const char other_source[] =
    "#include \"fwd_args.h\"\n"
    "void KERNEL_NAME(const fwd_args *a, int32_t lane, int32_t lanes, _Atomic int64_t *queue, void *scratch)\n"
    "{\n    for (int i = 0; i < a->q_len; ++i) {\n        ((float *)a->o)[i] = 3.0f * ((const float *)a->q)[i];\n    "
    "}\n}\n";

static void identity_of(char out[33], gates *g, const char *source, const char *json)
{
    candidate c;
    artefact *a;
    trial_result result;
    assert_ok(candidate_of_source(&c, "x", "portable", "", source, json));
    gates_prepare(&a, g, &c, "identity", &result);
    if (!a) {
        fail_msg("%s: %s", trial_status_name(result.status), result.detail);
    }
    memcpy(out, result.identity, sizeof result.identity);
    artefact_free(a);
    candidate_free(&c);
}

static void identity_is_machine_code_and_launch(void **state)
{
    const fixture *f = *state;
    gates *g = open_gates(f);
    char original[33], renamed[33], other[33], relaunched[33], respelled[33];
    identity_of(original, g, identity_source, small_descriptor);
    identity_of(renamed, g, renamed_source, small_descriptor);
    identity_of(other, g, other_source, small_descriptor);
    identity_of(relaunched, g, identity_source,
                "{\"dtype\": \"f32\", \"qk_dim\": 64, \"v_dim\": 64, \"q_tile\": 32, \"kv_tile\": 16}");
    identity_of(
        respelled, g, identity_source,
        "{\"kv_tile\": 16, \"q_tile\": 16, \"v_dim\": 64, \"qk_dim\": 64, \"when\": \"1 + 1\", \"dtype\": \"f32\"}");
    assert_int_equal(strlen(original), 32);
    assert_string_equal(original, renamed);
    assert_string_equal(original, respelled);
    assert_string_not_equal(original, other);
    assert_string_not_equal(original, relaunched);
    gates_close(g);
}

/* ---- Objects that no text has been looked at of ---- */

/* Compiles as candidates are, without any gate before; more are words for the compiler. */
static void look_at_source(object_facts *facts, const char *source, const char *more)
{
    char script[2048], source_path[512], object_path[512];
    process_outcome outcome;
    snprintf(source_path, sizeof source_path, "%s", scratch_path("object.c"));
    snprintf(object_path, sizeof object_path, "%s", scratch_path("object.so"));
    write_file(source_path, source);
    snprintf(script, sizeof script,
             "exec ${CC:-cc} -O1 -ffreestanding -fPIC -fvisibility=hidden -w -fno-stack-protector -shared -nostdlib "
             "-Wl,-Bsymbolic,--build-id=none,-z,noexecstack,-z,relro,-z,now,--hash-style=gnu -o %s %s %s",
             object_path, source_path, more);
    const char *const argv[] = {"sh", "-c", script, NULL};
    const process_limits limits = {.wall_s = 60};
    assert_ok(process_run(&outcome, argv, scratch_path("object.log"), &limits, NULL));
    if (outcome.end != PROCESS_EXITED || outcome.code != 0) {
        char *log = read_file(scratch_path("object.log"));
        fail_msg("%s: %s", source, log);
    }
    assert_ok(object_look(facts, object_path, ACR__CPU, ""));
    unlink(source_path);
    unlink(object_path);
    unlink(scratch_path("object.log"));
}

#define EXPORTED "__attribute__((visibility(\"default\"))) void acr_candidate(void);\n"

static void objects_are_refused_by_what_they_are(void **state)
{
    (void)state;
    static const struct {
        const char *name, *source, *more, *says; /* NULL = nothing is wrong with it */
    } cases[] = {
        {"honest", EXPORTED "static const int t[] = {1, 2};\nvoid acr_candidate(void) { *(volatile int *)8 = t[0]; }\n",
         "", NULL},
        {"addresses of its own",
         EXPORTED "static void f(void) {}\nvoid (*const t[])(void) = {f, acr_candidate};\n"
                  "void acr_candidate(void) { t[*(volatile int *)8](); }\n",
         "", NULL},
        {"constructor", EXPORTED "__attribute__((constructor)) void acr_candidate(void) {}\n", "", "is loaded"},
        {"destructor", EXPORTED "__attribute__((destructor)) void acr_candidate(void) {}\n", "", "is loaded"},
        {"constructor by its section",
         EXPORTED "void acr_candidate(void) {}\n"
                  "__attribute__((section(\".init_array.7\"), used)) static void *f = acr_candidate;\n",
         "", "is loaded"},
        {"constructor of old",
         EXPORTED "void acr_candidate(void) {}\n"
                  "__attribute__((section(\".ctors\"), used)) static void *f = acr_candidate;\n",
         "", "is loaded"},
        {"code for the loader", EXPORTED "__attribute__((section(\".init\"))) void acr_candidate(void) {}\n", "",
         "is loaded"},
        {"code that the linker knows by name", EXPORTED "void _init(void) {}\nvoid acr_candidate(void) {}\n", "",
         "asked of the loader"},
        {"code that the linker is told of", EXPORTED "void acr_candidate(void) {}\n", "-Wl,-fini=acr_candidate",
         "asked of the loader"},
#if defined __x86_64__
        {"resolver",
         EXPORTED "static void f(void) {}\nstatic void *pick(void) { return f; }\n"
                  "static void g(void) __attribute__((ifunc(\"pick\")));\nvoid acr_candidate(void) { g(); }\n",
         "", ""},
        {"resolver under another name",
         EXPORTED "static void f(void) {}\nstatic void *pick(void) { return f; }\n"
                  "void h(void) __attribute__((ifunc(\"pick\")));\nvoid g(void) __attribute__((alias(\"h\")));\n"
                  "void acr_candidate(void) { g(); }\n",
         "-s", ""},
        {"resolver without a call",
         EXPORTED "static void f(void) {}\nstatic void *pick(void) { return f; }\n"
                  "void h(void) __attribute__((ifunc(\"pick\")));\nvoid (*const t)(void) = h;\n"
                  "void acr_candidate(void) { *(void (*volatile *)(void))8 = t; }\n",
         "-s", ""},
#endif
        {"another library", EXPORTED "void acr_candidate(void) {}\n", "-Wl,--no-as-needed -lc", "another library"},
        {"another's symbol", EXPORTED "extern int puts(const char *);\nvoid acr_candidate(void) { puts(\"\"); }\n", "",
         "outside of it"},
        {"another's symbol, if there is one",
         EXPORTED "extern int puts(const char *) __attribute__((weak));\n"
                  "void acr_candidate(void) { if (puts) puts(\"\"); }\n",
         "", "outside of it"},
        {"state", EXPORTED "static int n;\nvoid acr_candidate(void) { *(volatile int *)8 = ++n; }\n", "", "state"},
        {"state with a value", EXPORTED "static int n = 3;\nvoid acr_candidate(void) { *(volatile int *)8 = ++n; }\n",
         "", "state"},
        {"state where addresses are",
         EXPORTED "__attribute__((section(\".got.state\"))) static int n = 1;\n"
                  "void acr_candidate(void) { *(volatile int *)8 = ++n; }\n",
         "", "state"},
        {"state that is read-only until it is not",
         EXPORTED "__attribute__((section(\".data.rel.ro.local.x\"))) static int n = 1;\n"
                  "void acr_candidate(void) { *(volatile int *)8 = ++n; }\n",
         "-Wl,-z,norelro", "state"},
        {"state of a thread",
         EXPORTED "static _Thread_local int n;\nvoid acr_candidate(void) { *(volatile int *)8 = ++n; }\n", "", ""},
        {"code beside the code", EXPORTED "__attribute__((section(\".note.x\"))) void acr_candidate(void) {}\n", "",
         "code outside"},
        {"a stack with code", EXPORTED "void acr_candidate(void) {}\n", "-Wl,-z,execstack", "executable"},
        {"a section of its own",
         EXPORTED "__attribute__((section(\"mine\"), used)) static const int n = 1;\n"
                  "void acr_candidate(void) { *(volatile int *)8 = n; }\n",
         "", "no kernel needs"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); ++i) {
        object_facts facts;
        look_at_source(&facts, cases[i].source, cases[i].more);
        const bool good = cases[i].says ? facts.refusal[0] && strstr(facts.refusal, cases[i].says) : !facts.refusal[0];
        if (!good) {
            fail_msg("%s: \"%s\"", cases[i].name, facts.refusal);
        }
    }
}

/* ---- Compilers that do not behave ---- */

static void write_script(const char *path, const char *text)
{
    write_file(path, text);
    chmod(path, 0755);
}

/* The gates opened without an incumbent, so that nothing is compiled yet. */
static void run_with_compiler(const fixture *f, const char *compiler, trial_status status, trial_gate gate,
                              const char *says)
{
    gates_setup setup = f->setup;
    setup.incumbent = NULL;
    setup.cc = compiler;
    setup.compile_timeout_s = 1.0;
    gates *g = NULL;
    trial_result result;
    assert_ok(gates_open(&g, &setup));
    run_expecting(g, &f->incumbent, &result, status, gate, says);
    trial_result_free(&result);
    gates_close(g);
}

static void compilers_have_their_time(void **state)
{
    const fixture *f = *state;
    char script[512];
    snprintf(script, sizeof script, "%s", scratch_path("compiler.sh"));
    write_script(script, "#!/bin/sh\necho left > \"$TMPDIR/cc.s\" || exit 3\nsleep 30\n");
    char temporary[512], left[600]; /* a killed compiler removes nothing: what it writes must lie with the trial */
    snprintf(temporary, sizeof temporary, "%s", scratch_path("compiler.tmp"));
    snprintf(left, sizeof left, "%s/cc.s", temporary);
    const char *before = getenv("TMPDIR");
    make_folder(temporary);
    assert_int_equal(setenv("TMPDIR", temporary, 1), 0);
    run_with_compiler(f, script, TRIAL_COMPILE_TIMEOUT, GATE_COMPILE, "did not end within");
    assert_int_equal(before ? setenv("TMPDIR", before, 1) : unsetenv("TMPDIR"), 0);
    assert_int_equal(access(left, F_OK), -1);
    snprintf(left, sizeof left, "find '%s' -name cc.s | grep -q .", f->folder);
    assert_int_not_equal(system(left), 0); /* NOLINT(cert-env33-c): our own words */
    remove_folder(temporary);
    write_script(script, "#!/bin/sh\necho 'internal error: out of ideas' >&2\nexit 4\n");
    run_with_compiler(f, script, TRIAL_COMPILE_FAILED, GATE_COMPILE, "out of ideas");
    write_script(script, "#!/bin/sh\nkill -SEGV $$\n");
    run_with_compiler(f, script, TRIAL_COMPILE_FAILED, GATE_COMPILE, "");
    run_with_compiler(f, "/no/such/compiler", TRIAL_HARNESS_FAILED, GATE_COMPILE, "No such file");
    unlink(script);
}

static void setups_are_checked(void **state)
{
    const fixture *f = *state;
    gates *g = NULL;
    gates_setup setup = f->setup;
    setup.folder = "/no/such/folder";
    assert_fails(gates_open(&g, &setup), ACR_IO, "/no/such/folder");
    setup = f->setup;
    candidate bad;
    assert_ok(candidate_of_family(&bad, "fwd_simd", "portable", "DIM=3"));
    setup.incumbent = &bad;
    assert_fails(gates_open(&g, &setup), ACR_UNSUPPORTED, "the incumbent does not pass the gate admission");
    candidate_free(&bad);
    gates_problem weightless = {f->problems[0].problem, 0.0};
    setup = f->setup;
    setup.problems = &weightless;
    setup.problem_count = 1;
    assert_fails(gates_open(&g, &setup), ACR_INVALID, "weight");
    const volatile int stop = 2;
    setup = f->setup;
    setup.incumbent = NULL;
    setup.stop = &stop;
    assert_ok(gates_open(&g, &setup));
    trial_result result;
    run_expecting(g, &f->incumbent, &result, TRIAL_HARNESS_FAILED, GATE_COMPILE, "stopped");
    artefact *a;
    gates_prepare(&a, g, &f->incumbent, "../out", &result);
    assert_null(a);
    assert_non_null(strstr(result.detail, "a name of other characters"));
    gates_close(g);
}

/* Skips a test whose figure is not as it should be while others used the processors, and says so. */
static void skip_if_noisy(const cpu_use *start, const char *seen)
{
    const double others = others_busy_since(start);
    if (others > OTHERS_BUSY) {
        print_message("skipped: others kept %.2f processors busy meanwhile, so nothing follows from: %s\n", others,
                      seen);
        skip();
    }
}

/* Without this the test below would call every failure noise, or none. */
static void a_busy_neighbour_is_noticed(void **state)
{
    (void)state;
    const cpu_use start = cpu_use_now();
    const pid_t neighbour = fork();
    assert_true(neighbour >= 0);
    if (neighbour == 0) {
        for (volatile long i = 0;; ++i)
            ;
    }
    const struct timespec a_while = {.tv_nsec = 500000000};
    nanosleep(&a_while, NULL);
    const double others = others_busy_since(&start);
    assert_int_equal(kill(neighbour, SIGKILL), 0);
    assert_int_equal(waitpid(neighbour, NULL, 0), neighbour);
    assert_true(others > OTHERS_BUSY);
    const cpu_use again = cpu_use_now();
    assert_true(others_busy_since(&again) >= 0);
}

/* The real clock, once: the detuned kernel is beaten. */
static void the_real_clock_tells_quick_from_slow(void **state)
{
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
    skip(); /* the floor is measured by code that a sanitizer has made slow; the candidate is compiled without it */
#endif
    const fixture *f = *state;
    gates_setup setup = f->setup;
    gates_problem larger = {canonical_of("f32:b1:h1:s256:d64"), 1.0};
    setup.problems = &larger;
    setup.problem_count = 1;
    setup.clock = GATES_CLOCK_REAL;
    gates *g = NULL;
    candidate c;
    trial_result result;
    const cpu_use start = cpu_use_now();
    assert_ok(gates_open(&g, &setup));
    assert_ok(candidate_of_family(&c, "fwd_simd", "portable", quick));
    gates_run(g, &c, "trial", &result);
    /* What a clock alone can be wrong about: the floor, a time limit, the gain. */
    if (result.status == TRIAL_IMPLAUSIBLE || result.status == TRIAL_HUNG || result.status == TRIAL_COMPILE_TIMEOUT)
        skip_if_noisy(&start, result.detail);
    if (result.status == TRIAL_VALID && !(result.overall.speedup > 1.0))
        skip_if_noisy(&start, "the detuned kernel is not beaten");
    if (result.status != TRIAL_VALID || result.gate != GATE_PERFORMANCE)
        fail_msg("%s at %s: %s", trial_status_name(result.status), trial_gate_name(result.gate), result.detail);
    assert_true(result.timings[0].floor_us > 0);
    assert_true(result.overall.speedup > 1.0);
    trial_result_free(&result);
    candidate_free(&c);
    gates_close(g);
}

int main(int argc, char **argv)
{
    int exit_code;
    if (gates_child(argc, argv, &exit_code)) {
        return exit_code;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_stable),
        cmocka_unit_test(parameters_have_one_form),
        cmocka_unit_test(malformed_candidates_are_named),
        cmocka_unit_test(malformed_descriptors_are_named),
        cmocka_unit_test(expressions_compute_as_in_c),
        cmocka_unit_test(windows_are_for_who_names_them),
        cmocka_unit_test(passes_are_for_who_names_them),
        cmocka_unit_test(admission_names_what_it_refuses),
        cmocka_unit_test(families_and_sizes_are_checked),
        cmocka_unit_test(a_better_kernel_passes_every_gate),
        cmocka_unit_test(references_are_handed_on),
        cmocka_unit_test(every_kind_of_inputs_runs),
        cmocka_unit_test(the_incumbent_is_not_confirmed_against_itself),
        cmocka_unit_test(illegal_sets_are_refused_by_the_compiler),
        cmocka_unit_test(parameters_are_those_of_the_family),
        cmocka_unit_test(a_declaration_may_have_several_lines),
        cmocka_unit_test(a_known_identity_is_a_duplicate),
        cmocka_unit_test(identity_is_machine_code_and_launch),
        cmocka_unit_test(objects_are_refused_by_what_they_are),
        cmocka_unit_test(compilers_have_their_time),
        cmocka_unit_test(setups_are_checked),
        cmocka_unit_test(a_busy_neighbour_is_noticed),
        cmocka_unit_test(the_real_clock_tells_quick_from_slow),
    };
    return cmocka_run_group_tests(tests, make_fixture, free_fixture);
}
