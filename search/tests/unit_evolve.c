/* The search without a candidate: expressions, spaces, moves, the archive, the built-in proposer, the store, external
 * proposers and what their answers mean. */
#include "support.h"

#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/json.h"
#include "base/process.h"
#include "machine/gpus.h"
#include "search/elites.h"
#include "search/expression.h"
#include "search/fold.h"
#include "search/judge.h"
#include "search/parametric.h"
#include "search/proposer.h"
#include "search/request.h"
#include "search/retrospect.h"
#include "search/store.h"
#include "search/survey.h"
#include "search/summary.h"
#include "search/tree.h"

/* ---- Expressions ---- */

static bool known_names(void *arg, const char *name, size_t length, int64_t *value)
{
    (void)arg;
    *value = 7;
    return length == 5 && strncmp(name, "seven", 5) == 0;
}

static void test_expressions(void **state)
{
    static const struct {
        const char *text;
        int64_t value;
    } good[] = {
        {"1 + 2 * 3", 7},
        {"(1 + 2) * 3 - -4", 13},
        {"17 % 5 == 2 && 17 / 5 == 3", 1},
        {"seven >= 7 && seven <= 7 && !(seven != 7)", 1},
        {"seven < 7 || seven > 7", 0},
        {"2 + 3 && 0", 0},
        {"5 || 0", 1},
        {"0 ? 1 / 0 : seven", 7},
        {"1 || 1 / 0", 1},
        {"0 && 1 % 0", 0},
        {"1 ? 2 : 0 ? 3 : 4", 2},
        {"min(3, max(1, 2)) + ceil_div(9, 4)", 5},
        {"9223372036854775807 - 1 + 1", INT64_MAX},
    };
    static const char *const bad[] = {"",
                                      "1 +",
                                      "(1",
                                      "1 2",
                                      "nine",
                                      "1 / 0",
                                      "1 % 0",
                                      "min(1)",
                                      "ceil_div(1,0)",
                                      "1 = 1",
                                      "- - - (",
                                      "seven 7",
                                      "9223372036854775807 + 1"};
    (void)state;
    char error[EXPRESSION_ERROR_MAX];
    int64_t value = 0;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; ++i) {
        assert_true(expression_eval(good[i].text, known_names, NULL, &value, error));
        assert_int_equal(value, good[i].value);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        assert_false(expression_eval(bad[i], known_names, NULL, &value, error));
        assert_true(error[0]);
    }
    char deep[512];
    memset(deep, '(', sizeof deep - 1);
    deep[sizeof deep - 1] = '\0';
    assert_false(expression_eval(deep, known_names, NULL, &value, error));
}

/* ---- Spaces ---- */

static const acr__device cpu = {.backend = ACR__CPU,
                                .name = "test",
                                .isa = ACR__ISA_PORTABLE | ACR__ISA_AVX2 | ACR__ISA_AVX512 | ACR__ISA_AVX512BF16,
                                .threads = 2,
                                .clock_hz = 3e9};
static const acr__device h200 = {.backend = ACR__CUDA,
                                 .name = "test",
                                 .arch = 90,
                                 .sm_count = 132,
                                 .smem_per_cta_bytes = 232448,
                                 .smem_per_sm_bytes = 233472,
                                 .regs_per_sm = 65536};

typedef struct world {
    acr_problem problem;
    space_list spaces;
} world;

static void make_world(world *w, const char *problem, const acr__device *device)
{
    assert_int_equal(acr_problem_parse(&w->problem, problem, NULL), ACR_OK);
    assert_int_equal(acr_problem_canonical(&w->problem, &w->problem), ACR_OK);
    const search_scene scene = {&w->problem, 1, device};
    if (tree_spaces(&w->spaces, ".", &scene, NULL) != ACR_OK) {
        fail_msg("%s: %s", problem, acr_last_error());
    }
}

/* The families that a search leaves out: little or nothing to choose in two, rungs of a ladder. */
static bool has_no_space(const char *family)
{
    return strcmp(family, "fwd_simt") == 0 || strcmp(family, "fwd_wide") == 0 ||
           strncmp(family, "fwd_ladder", strlen("fwd_ladder")) == 0;
}

/* Lines for features and for few key tiles of the forward pass, whose parameters no space has: nothing that a search
 * would vary. */
static bool is_outside_spaces(const acr__kernel *kernel, const candidate *c)
{
    static const char *const names[] = {"TERMS", "SLICES", "PAGED", "OUT_F32"};
    char value[8];
    for (size_t i = 0; i < sizeof names / sizeof names[0] && kernel->pass == ACR_FORWARD; ++i) {
        if (candidate_parameter(c, names[i], value, sizeof value)) {
            return true;
        }
    }
    return false;
}

/* A small problem that the line is made for. */
static void problem_of_line(char out[ACR_PROBLEM_TEXT_MAX], const acr__kernel *kernel, const candidate *c)
{
    static const char *const dtypes[] = {
        [ACR_F32] = "f32", [ACR_F16] = "f16", [ACR_BF16] = "bf16", [ACR_E4M3] = "e4m3"};
    char value[8];
    const bool is_packed = candidate_parameter(c, "PACKED", value, sizeof value),
               is_exact = candidate_parameter(c, "EXACT", value, sizeof value),
               has_terms = kernel->pass == ACR_BACKWARD && candidate_parameter(c, "TERMS", value, sizeof value);
    const char *const term = !has_terms ? "" : strcmp(value, "4") == 0 ? ":mask/0,0,64" : ":cap30";
    snprintf(out, ACR_PROBLEM_TEXT_MAX, "%s%s:b2:h1:s64/%d:d%d/%d%s%s", kernel->pass == ACR_BACKWARD ? "bwd:" : "",
             dtypes[kernel->dtype], is_exact ? kernel->stages * kernel->kv_tile : 64, (int)kernel->qk_dim_max,
             (int)kernel->v_dim_max, is_packed ? ":bshd:packed" : "", term);
}

/* Every line of kernels.def is a legal point of its family's space, and comes back as it is written there, under its
 * name: lists and spaces do not drift apart. */
static void test_lines_are_points(void **state)
{
    (void)state;
    int points = 0;
    for (size_t k = 0; k < acr__kernel_count; ++k) {
        const acr__kernel *kernel = acr__kernels[k];
        candidate c, again;
        genome g;
        world w;
        char problem[ACR_PROBLEM_TEXT_MAX], parameters[SPACE_PARAMETERS_MAX], reason[SPACE_REASON_MAX];
        char name[WISDOM_KERNEL_MAX];
        if (has_no_space(kernel->family)) {
            continue;
        }
        assert_int_equal(candidate_of_kernel(&c, kernel->name), ACR_OK);
        if (is_outside_spaces(kernel, &c)) {
            candidate_free(&c);
            continue;
        }
        problem_of_line(problem, kernel, &c);
        make_world(&w, problem, kernel->backend == ACR__CUDA ? &h200 : &cpu);
        if (!fold_point(&w.spaces, c.family, c.arch, c.parameters, &g)) {
            fail_msg("%s is no point of %s.space", kernel->name, c.family);
        }
        const space *s = &w.spaces.items[g.space];
        if (!space_legal(s, &g, reason)) {
            fail_msg("%s is no legal point: %s", kernel->name, reason);
        }
        space_parameters(s, &g, parameters);
        if (candidate_of_family(&again, s->family, s->archs[g.arch], parameters) != ACR_OK) {
            fail_msg("%s: %s: %s", kernel->name, parameters, acr_last_error());
        }
        assert_string_equal(again.parameters, c.parameters);
        space_kernel_name(s, &g, name);
        assert_string_equal(name, kernel->name);
        candidate_free(&again);
        candidate_free(&c);
        ++points;
    }
    assert_true(points >= (has_cuda_kernels() ? 100 : 10));
}

/* No set has the name of a line that is another set; the traits of sets are all in their names. */
static void test_names_are_unique(void **state)
{
    static const struct {
        const char *problem, *family, *parameters, *name;
    } sets[] = {
        {"b2:h8:s512:d64", "fwd_short", "DIM=64 Q_TILE=64 STAGES=4", "fwd_short_f16_d64_64x128_s4_l0_sm90a"},
        {"b2:h8:s512:d64", "fwd_short", "DIM=64 Q_TILE=128 STAGES=5 RING=1 LAG=100",
         "fwd_short_f16_d64_128x64_s5_l100_ring_sm90a"},
        {"e4m3:b2:h8:s512:d128", "fwd_fp8", "DIM=128 Q_TILE=192 KV_TILE=64 STAGES=2 Q_STAGES=2 PROMOTE_TILES=4",
         "fwd_fp8_e4m3_d128_192x64_s2_q2f4_sm90a"},
        {"b2:h8:s512:d192/128", "fwd_wgmma", "DIM=192 V_DIM=128 Q_TILE=128 KV_TILE=80 STAGES=2",
         "fwd_wgmma_f16_d192_128x80_s2_v128_sm90a"},
        {"b2:h8:s512:d64:bshd:packed", "fwd_mma", "DIM=64 Q_TILE=128 KV_TILE=64 STAGES=3 WARP_ROWS=32 PACKED=1",
         "fwd_mma_f16_d64_128x64_s3_w32_packed_sm80"},
        {"bwd:b2:h8:s512:d64", "bwd_short", "DIM=64 STAGES=4",
         "bwd_short_f16_d64_128x64_s4_early0_shared0_mixed0_sm90a"},
        {"bwd:b2:h8:s512:d64", "bwd_short", "DIM=64 STAGES=4 LINES_IN_SHARED=1",
         "bwd_short_f16_d64_128x64_s4_shared_sm90a"},
        {"bwd:b2:h8:s512:d64", "bwd_mma", "DIM=64 Q_TILE=128 KV_TILE=32 STAGES=2 WARP_ROWS=32 TERMS=0",
         "bwd_mma_f16_d64_128x32_s2_t0w32_sm80"},
        {"bwd:b2:h8:s512:d64", "bwd_wgmma", "DIM=64 Q_TILE=128 HEADS_MEMORY=4096",
         "bwd_wgmma_f16_d64_128x128_s2_m4096_sm90a"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof sets / sizeof sets[0]; ++i) {
        world w;
        genome g;
        char name[WISDOM_KERNEL_MAX];
        make_world(&w, sets[i].problem, &h200);
        assert_true(fold_point(&w.spaces, sets[i].family, strstr(sets[i].family, "_mma") ? "80" : "90a",
                               sets[i].parameters, &g));
        space_kernel_name(&w.spaces.items[g.space], &g, name);
        assert_string_equal(name, sets[i].name);
    }
}

/* Packed batches: variants of their own, or none; never both kinds in one search. */
static void test_packed_spaces(void **state)
{
    (void)state;
    world w;
    make_world(&w, "b2:h8:s512:d64:bshd:packed", &h200);
    for (int i = 0; i < w.spaces.count; ++i) {
        assert_true(w.spaces.items[i].is_packed);
        assert_non_null(strstr(w.spaces.items[i].fixed, "PACKED=1"));
    }
    assert_int_equal(w.spaces.count, 2); /* fwd_mma, fwd_wgmma */
    acr_problem both[2] = {w.problem, w.problem};
    assert_int_equal(acr_problem_parse(&both[1], "b2:h8:s512:d64:bshd", NULL), ACR_OK);
    assert_int_equal(acr_problem_canonical(&both[1], &both[1]), ACR_OK);
    const search_scene scene = {both, 2, &h200};
    space_list spaces;
    assert_int_equal(tree_spaces(&spaces, ".", &scene, NULL), ACR_UNSUPPORTED);
    assert_non_null(strstr(acr_last_error(), "not all problems are packed"));
}

/* A search has families of its problems' pass alone, and each says why it refuses a set. */
static void test_passes_are_apart(void **state)
{
    (void)state;
    static const struct {
        const char *problem;
        const acr__device *device;
        const char *families;
    } scenes[] = {
        {"bwd:f32:b1:h2:s64:d64", &cpu, "bwd_simd "},
        {"f32:b1:h2:s64:d64", &cpu, "fwd_row fwd_simd "},
        {"bwd:b1:h2:s64:d64", &h200, "bwd_mma bwd_short bwd_wgmma "},
        {"bwd:b1:h2:s64:d128", &h200, "bwd_mma bwd_wgmma "},
        {"bwd:b1:h2:s64:d64:bshd:packed", &h200, "bwd_mma bwd_wgmma "},
    };
    for (size_t i = 0; i < sizeof scenes / sizeof scenes[0]; ++i) {
        world w;
        char families[256] = "";
        make_world(&w, scenes[i].problem, scenes[i].device);
        for (int f = 0; f < w.spaces.count; ++f) {
            const size_t used = strlen(families);
            snprintf(families + used, sizeof families - used, "%s ", w.spaces.items[f].family);
        }
        assert_string_equal(families, scenes[i].families);
    }
    static const struct {
        const char *problem, *family, *parameters, *says;
    } illegal[] = {
        {"bwd:b1:h2:s64:d64", "bwd_mma", "DIM=64 Q_TILE=64 KV_TILE=64 STAGES=2 WARP_ROWS=32 TERMS=0", "registers"},
        {"bwd:b1:h2:s64:d64", "bwd_mma", "DIM=64 Q_TILE=96 KV_TILE=64 STAGES=2 TERMS=0", "whole"},
        {"bwd:b1:h2:s64:d64", "bwd_mma", "DIM=64 Q_TILE=256 KV_TILE=32 STAGES=6 TERMS=0", "divide evenly"},
        {"bwd:b1:h2:s64:d64:cap30", "bwd_mma", "DIM=64 Q_TILE=64 KV_TILE=32 STAGES=2 TERMS=0", "with a softcap"},
        {"bwd:b1:h2:s64:d64:alibi", "bwd_mma", "DIM=64 Q_TILE=64 KV_TILE=32 STAGES=2 TERMS=0", "ALiBi"},
        {"bwd:b1:h2:s64:d64:bias-f16/0,0,64", "bwd_mma", "DIM=64 Q_TILE=64 KV_TILE=32 STAGES=2 TERMS=75", "biases"},
        {"bwd:b1:h2:s64:d128", "bwd_wgmma", "DIM=128 Q_TILE=128", "dQ is parts of 64 x 64"},
        {"bwd:b1:h2:s64:d64", "bwd_wgmma", "DIM=64 Q_TILE=128 TERMS=1", "softcap"},
        {"bwd:b1:h2:s64:d64", "bwd_short", "DIM=64 STAGES=2", "not yet released"},
        {"bwd:b1:h2:s64:d64", "bwd_short", "DIM=64 STAGES=8", "227 KB"},
        {"bwd:b1:h2:s64:d64", "bwd_short", "DIM=64 STAGES=4 EARLY=1", "registers"},
        {"bwd:b1:h2:s64:d128:bshd:packed", "bwd_wgmma", "DIM=128 Q_TILE=64 PACKED=1", "pairs alone"},
        {"bwd:b1:h2:s64:d64:sinks", "bwd_short", "DIM=64 STAGES=4", "sinks"},
    };
    for (size_t i = 0; i < sizeof illegal / sizeof illegal[0]; ++i) {
        world w;
        genome g;
        char reason[SPACE_REASON_MAX] = "";
        make_world(&w, illegal[i].problem, &h200);
        assert_true(fold_point(&w.spaces, illegal[i].family, strstr(illegal[i].family, "_mma") ? "80" : "90a",
                               illegal[i].parameters, &g));
        if (space_legal(&w.spaces.items[g.space], &g, reason) || !strstr(reason, illegal[i].says)) {
            fail_msg("%s on %s: \"%s\"", illegal[i].parameters, illegal[i].problem, reason);
        }
    }
}

static void test_space_texts(void **state)
{
    (void)state;
    world w;
    genome g;
    char name[WISDOM_KERNEL_MAX], cell[SPACE_PARAMETERS_MAX], reason[SPACE_REASON_MAX];
    make_world(&w, "b2:h8:s512:d64", &h200);
    assert_true(
        fold_point(&w.spaces, "fwd_mma", "80", "DIM=64 Q_TILE=64 KV_TILE=32 STAGES=2 KV_GROUPS=4 WARP_ROWS=32", &g));
    space_kernel_name(&w.spaces.items[g.space], &g, name);
    space_cell(&w.spaces.items[g.space], &g, cell);
    assert_string_equal(name, "fwd_mma_f16_d64_64x32_s2_g4w32_sm80");
    assert_string_equal(cell, "fwd_mma 80 KV_GROUPS=4 WARP_ROWS=32");
    const space *s = &w.spaces.items[g.space];
    assert_false(space_point(s, "80", "DIM=64 Q_TILE=65 KV_TILE=32 STAGES=2", &g, reason));
    assert_non_null(strstr(reason, "Q_TILE=65"));
    assert_false(space_point(s, "80", "DIM=128 Q_TILE=64 KV_TILE=32 STAGES=2", &g, reason));
    assert_false(space_point(s, "80", "DIM=64 Q_TILE=64 KV_TILE=32", &g, reason));
    assert_non_null(strstr(reason, "STAGES"));
    assert_false(space_point(s, "90a", "DIM=64 Q_TILE=64 KV_TILE=32 STAGES=2", &g, reason));
    assert_true(space_point(s, "80", "DIM=64 Q_TILE=48 KV_TILE=32 STAGES=2 WARP_ROWS=32", &g, reason));
    assert_false(space_legal(s, &g, reason));
    assert_non_null(strstr(reason, "whole warps"));
    acr__device small = h200;
    small.smem_per_cta_bytes = 48 << 10;
    const search_scene scene = {&w.problem, 1, &small};
    space_list spaces;
    assert_int_equal(tree_spaces(&spaces, ".", &scene, "fwd_mma"), ACR_OK);
    assert_true(space_point(&spaces.items[0], "80", "DIM=64 Q_TILE=128 KV_TILE=64 STAGES=3", &g, reason));
    assert_false(space_legal(&spaces.items[0], &g, reason));
    assert_non_null(strstr(reason, "shared memory"));
}

/* A malformed space is refused with file and line. */
static void test_bad_spaces(void **state)
{
    static const char *const bad[] = {
        "arch 80\ndtype f16\ndim DIM 64\nmicro A 1 2\nrequire A > 0\n",      /* no reason */
        "arch 80\ndtype f99\n",                                              /* type */
        "arch 80\ndtype f16\ndim DIM 64\nmicro A 2 1\n",                     /* order */
        "arch 80\ndtype f16\ndim DIM 64\nmicro a 1 2\n",                     /* small letters */
        "arch 80\ndtype f16\ndim DIM 64\nmicro A 1\nmacro B 1\n",            /* macro after micro */
        "arch 80\ndtype f16\ndim DIM 64\nmicro A 1 default\n",               /* default */
        "arch 80\ndtype f16\ndim DIM 64\n",                                  /* no parameters */
        "arch 80\ndtype f16\ndim DIM 64\nmicro A 1 2\nlet B A + 1\n",        /* no = */
        "arch 80\ndtype f16\ndim DIM 64\nmicro A 1 2\nforbid A > 1 # why\n", /* directive */
        "arch 80\ndtype f16\ndim DIM 64\npacked\nmicro A 1 2\n",             /* packed: how */
        "arch 80\ndtype f16\ndim DIM 64\npacked maybe\nmicro A 1 2\n",       /* the same */
        "arch 80\ndtype f16\ndim DIM 64\nv_dim V 8\nv_dim V 9\nmicro A 1\n", /* twice */
        "pass\narch 80\ndtype f16\ndim DIM 64\nmicro A 1\n",                 /* pass: which */
        "pass back\narch 80\ndtype f16\ndim DIM 64\nmicro A 1\n",            /* the same */
    };
    (void)state;
    char path[256];
    snprintf(path, sizeof path, "%s/bad.space", getenv("ACR_TEST_SCRATCH") ? getenv("ACR_TEST_SCRATCH") : "/tmp");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        FILE *file = fopen(path, "w");
        assert_non_null(file);
        fputs(bad[i], file);
        fclose(file);
        space s;
        assert_int_equal(space_read(&s, path), ACR_FORMAT);
        assert_non_null(strstr(acr_last_error(), "bad.space"));
    }
    unlink(path);
}

/* ---- Moves and proposals ---- */

static void test_moves_are_legal(void **state)
{
    (void)state;
    static const struct {
        const char *problem;
        const acr__device *device;
    } worlds[] = {{"f32:b1:h2:s128:d64", &cpu}, {"b2:h8:s512:d64", &h200}};
    for (size_t i = 0; i < 2; ++i) {
        world w;
        make_world(&w, worlds[i].problem, worlds[i].device);
        for (int64_t trial = 0; trial < 200; ++trial) {
            dice d = dice_of(5, 1, trial);
            genome a, b, child;
            assert_true(genome_random(&w.spaces, &d, &a) && genome_legal(&w.spaces, &a));
            assert_true(genome_random(&w.spaces, &d, &b) && genome_legal(&w.spaces, &b));
            if (genome_step(&w.spaces, &d, &a, &child)) {
                assert_true(genome_legal(&w.spaces, &child) && !genome_same(&w.spaces, &child, &a));
                char cell_a[SPACE_PARAMETERS_MAX], cell[SPACE_PARAMETERS_MAX];
                space_cell(&w.spaces.items[a.space], &a, cell_a);
                space_cell(&w.spaces.items[child.space], &child, cell);
                assert_string_equal(cell, cell_a);
            }
            if (genome_leap(&w.spaces, &d, &a, &child)) {
                assert_true(genome_legal(&w.spaces, &child) && !genome_same(&w.spaces, &child, &a));
            }
            if (genome_cross(&w.spaces, &d, &a, &b, &child)) {
                assert_true(genome_legal(&w.spaces, &child));
            }
        }
    }
}

/* A made-up result for a point: what the archive is fed with. */
static member judged(const space_list *spaces, int64_t trial, const genome *g)
{
    member m = {.trial = trial,
                .has_genome = true,
                .genome = *g,
                .distinct = true,
                .valid = trial % 7 != 3,
                .noise_floor = 0.01};
    const space *s = &spaces->items[g->space];
    space_cell(s, g, m.cell);
    double score = 0.0;
    for (int i = 0; i < s->gene_count; ++i) {
        score -= 0.1 * abs(g->choice[i] - s->genes[i].count / 2);
    }
    m.speedup = exp(score);
    return m;
}

static void run_rounds(const world *w, uint64_t seed, bool control, int rounds, archive *out)
{
    const parametric p = {.spaces = &w->spaces, .seed = seed, .control = control};
    for (int round = 0; round < rounds; ++round) {
        archive proposed = {NULL, 0, 0};
        genome made[4];
        for (size_t i = 0; i < out->count; ++i) {
            assert_true(archive_add(&proposed, &out->items[i]));
        }
        for (int i = 0; i < 4; ++i) {
            proposal next;
            assert_true(parametric_propose(&p, out, &proposed, 4 * round + i, &next));
            assert_true(genome_legal(&w->spaces, &next.genome));
            assert_false(archive_has(&proposed, &w->spaces, &next.genome));
            member m = {.has_genome = true, .genome = next.genome};
            assert_true(archive_add(&proposed, &m));
            made[i] = next.genome;
        }
        for (int i = 0; i < 4; ++i) {
            member m = judged(&w->spaces, 4 * round + i + 1, &made[i]);
            assert_true(archive_add(out, &m));
        }
        archive_free(&proposed);
    }
}

static bool same_archives(const space_list *spaces, const archive *a, const archive *b)
{
    for (size_t i = 0; i < a->count; ++i) {
        if (!genome_same(spaces, &a->items[i].genome, &b->items[i].genome)) {
            return false;
        }
    }
    return a->count == b->count;
}

/* The same seed proposes the same trials, also when it goes on from the middle; another seed others. */
static void test_proposals_repeat(void **state)
{
    (void)state;
    world w;
    make_world(&w, "f32:b1:h2:s128:d64", &cpu);
    for (int control = 0; control < 2; ++control) {
        archive once = {NULL, 0, 0}, again = {NULL, 0, 0}, other = {NULL, 0, 0};
        run_rounds(&w, 11, control, 10, &once);
        run_rounds(&w, 11, control, 10, &again);
        run_rounds(&w, 12, control, 10, &other);
        assert_true(same_archives(&w.spaces, &once, &again));
        assert_false(same_archives(&w.spaces, &once, &other));
        archive_free(&once);
        archive_free(&again);
        archive_free(&other);
    }
}

/* On a smooth hill the search gets further than the control. */
static void test_search_climbs(void **state)
{
    (void)state;
    world w;
    make_world(&w, "f32:b1:h2:s128:d64", &cpu);
    double sum = 0.0;
    for (uint64_t seed = 1; seed <= 10; ++seed) {
        archive search = {NULL, 0, 0}, control = {NULL, 0, 0};
        run_rounds(&w, seed, false, 15, &search);
        run_rounds(&w, seed, true, 15, &control);
        sum += log(archive_best(&search, NULL, NULL)->speedup / archive_best(&control, NULL, NULL)->speedup);
        archive_free(&search);
        archive_free(&control);
    }
    assert_true(sum / 10 > 0.05);
}

/* It knows what it has seen, is less sure of the rest, and takes the unfinished for as good as seen. */
static void test_surrogate_knows_what_it_saw(void **state)
{
    (void)state;
    world w;
    surrogate *fitted = NULL;
    archive seen = {NULL, 0, 0}, proposed = {NULL, 0, 0};
    make_world(&w, "e4m3:b4:h16:s2048:d128", &h200);
    assert_int_equal(surrogate_create(&fitted, &w.spaces), ACR_OK);
    assert_false(surrogate_fit(fitted, &seen, &proposed));
    run_rounds(&w, 3, true, 8, &seen);
    assert_true(surrogate_fit(fitted, &seen, &proposed));
    for (size_t i = 0; i < seen.count; ++i) {
        const surrogate_view view = surrogate_predict(fitted, &seen.items[i].genome);
        assert_true(!seen.items[i].valid || fabs(view.mean - log(seen.items[i].speedup)) < 4.0 * view.deviation + 0.05);
    }
    size_t count = 0, at = 0;
    const genome *points = surrogate_points(fitted, &count);
    surrogate_view widest = {0.0, 0.0, 0.0};
    assert_int_equal(count, genome_count(&w.spaces, INT64_MAX, NULL, NULL));
    for (size_t i = 0; i < count; ++i) {
        const surrogate_view view = surrogate_predict(fitted, &points[i]);
        assert_true(view.improvement >= 0.0 && isfinite(view.mean));
        if (view.deviation > widest.deviation) {
            widest = view;
            at = i;
        }
    }
    const genome asked = points[at];
    const member pending = {.has_genome = true, .genome = asked};
    assert_true(archive_add(&proposed, &pending));
    assert_true(surrogate_fit(fitted, &seen, &proposed));
    assert_true(surrogate_predict(fitted, &asked).deviation < 0.5 * widest.deviation);
    archive_free(&seen);
    archive_free(&proposed);
    surrogate_free(fitted);
}

/* What ends the timing of a candidate early: an interval below 1, and never fewer than six blocks. */
static void test_racing(void **state)
{
    enum {
        BLOCKS = 13
    };
    (void)state;
    double incumbent[BLOCKS], slower[BLOCKS], alike[BLOCKS];
    stats_block lost[BLOCKS], open[BLOCKS];
    for (int i = 0; i < BLOCKS; ++i) {
        incumbent[i] = 10.0 + 0.01 * (i % 3);
        slower[i] = incumbent[i] * (i == 7 ? 0.99 : 1.02); /* one lucky block */
        alike[i] = incumbent[i] * (i % 2 ? 0.99 : 1.01);
        lost[i] = (stats_block){&incumbent[i], &slower[i], 1, 1};
        open[i] = (stats_block){&incumbent[i], &alike[i], 1, 1};
    }
    assert_false(judge_is_slower(lost, 5));
    assert_true(judge_is_slower(lost, 6));
    assert_false(judge_is_slower(lost, 8));
    assert_true(judge_is_slower(lost, 9));
    for (int blocks = 1; blocks <= BLOCKS; ++blocks) {
        assert_false(judge_is_slower(open, blocks));
    }
    /* Far behind in every sample: two blocks are enough, and one good sample keeps it in the race. */
    for (int i = 0; i < BLOCKS; ++i) {
        slower[i] = 1.1 * incumbent[i];
    }
    assert_false(judge_is_slower(lost, 1));
    assert_true(judge_is_slower(lost, 2));
    slower[1] = 1.04 * incumbent[1];
    assert_false(judge_is_slower(lost, 2));
}

/* ---- Looking back ---- */

/* Every gain that the retrospect looks for, and the set that it took the place of, is a legal point. */
static void test_spaces_hold_wins(void **state)
{
    (void)state;
    const gpu_model *gpu = gpu_find("h200");
    for (size_t i = 0; i < retrospect_win_count; ++i) {
        const retrospect_win *win = &retrospect_wins[i];
        const char *const sets[] = {win->before, win->after};
        world w;
        make_world(&w, win->problem, &gpu->device);
        for (size_t k = 0; k < 2; ++k) {
            char parameters[SPACE_PARAMETERS_MAX], reason[SPACE_REASON_MAX] = "the family does not serve the problem";
            genome g = {.space = 0};
            while (g.space < w.spaces.count && strcmp(w.spaces.items[g.space].family, win->family) != 0) {
                ++g.space;
            }
            const bool served = g.space < w.spaces.count;
            const space *s = &w.spaces.items[served ? g.space : 0];
            snprintf(parameters, sizeof parameters, "%s %s", sets[k], s->fixed);
            if (!served || !space_point(s, win->arch, parameters, &g, reason) || !space_legal(s, &g, reason)) {
                fail_msg("%s: %s: %s", win->what, sets[k], reason);
            }
        }
    }
}

/* In a table whose best point is one of some hundred, the surrogate finds it before the control does; curves rise; and
 * the same seeds find the same. */
static void test_retrospect(void **state)
{
    (void)state;
    world w;
    make_world(&w, "e4m3:b2:h8:s512:d256", &h200);
    retrospect_table t = {.spaces = &w.spaces, .start = 0};
    static retrospect_found found, random, again;
    surrogate *all = NULL;
    archive none = {NULL, 0, 0};
    run_rounds(&w, 1, true, 2, &none);
    assert_int_equal(surrogate_create(&all, &w.spaces), ACR_OK);
    assert_true(surrogate_fit(all, &none, &none));
    const genome *points = surrogate_points(all, &t.count);
    t.points = malloc(t.count * sizeof *t.points);
    t.speedups = malloc(t.count * sizeof *t.speedups);
    assert_true(t.points && t.speedups && t.count > 20);
    for (size_t i = 0; i < t.count; ++i) {
        t.points[i] = points[i];
        t.speedups[i] = judged(&w.spaces, 1, &points[i]).speedup / judged(&w.spaces, 1, &points[0]).speedup;
        t.goal = fmax(t.goal, t.speedups[i]);
    }
    const retrospect_setup setup = {.seeds = 7, .trials = 40, .generation = 8};
    assert_int_equal(retrospect_search(&random, &t, &setup, RETROSPECT_RANDOM), ACR_OK);
    assert_int_equal(retrospect_search(&found, &t, &setup, RETROSPECT_SURROGATE), ACR_OK);
    assert_int_equal(retrospect_search(&again, &t, &setup, RETROSPECT_SURROGATE), ACR_OK);
    assert_memory_equal(found.trials, again.trials, sizeof found.trials);
    for (int seed = 0; seed < setup.seeds; ++seed) {
        assert_true(found.best[seed][0] >= 1.0 && found.best[seed][0] <= found.best[seed][RETROSPECT_MARKS - 1]);
        assert_int_equal(found.best[seed][RETROSPECT_MARKS - 1] >= t.goal, found.trials[seed] <= setup.trials);
    }
    assert_true(stats_percentile(found.trials, 7, 0.5) < stats_percentile(random.trials, 7, 0.5));
    free(t.points);
    free(t.speedups);
    archive_free(&none);
    surrogate_free(all);
}

/* A space of few points is used up, each once, and then says so. */
static void test_exhaustion(void **state)
{
    (void)state;
    world w;
    make_world(&w, "e4m3:b2:h8:s512:d256", &h200);
    const search_scene scene = w.spaces.scene;
    assert_int_equal(tree_spaces(&w.spaces, ".", &scene, "fwd_fp8"), ACR_OK);
    const int64_t points = genome_count(&w.spaces, 1000, NULL, NULL);
    assert_true(points >= 1 && points < 100);
    const parametric p = {.spaces = &w.spaces, .seed = 1};
    archive learnt = {NULL, 0, 0};
    proposal next;
    for (int64_t i = 0; i < points; ++i) {
        assert_true(parametric_propose(&p, &learnt, &learnt, i, &next));
        member m = judged(&w.spaces, i + 1, &next.genome);
        assert_true(archive_add(&learnt, &m));
    }
    assert_false(parametric_propose(&p, &learnt, &learnt, points, &next));
    archive_free(&learnt);
}

/* ---- The archive ---- */

static void add_member(archive *a, int64_t trial, const char *cell, double speedup, int64_t registers)
{
    member m = {.trial = trial,
                .distinct = true,
                .valid = speedup > 0.0,
                .speedup = speedup,
                .noise_floor = 0.02,
                .registers = registers};
    snprintf(m.cell, sizeof m.cell, "%s", cell);
    assert_true(archive_add(a, &m));
}

static void test_archive(void **state)
{
    (void)state;
    archive a = {NULL, 0, 0};
    add_member(&a, 1, "x", 1.50, 100);
    add_member(&a, 2, "x", 1.49, 90); /* a tie with 1, and leaner */
    add_member(&a, 3, "x", 1.40, 80);
    add_member(&a, 4, "y", 0.90, 80);
    add_member(&a, 5, "z", 0.0, 10); /* not valid */
    const member *elites[ARCHIVE_ELITES];
    assert_int_equal(archive_best(&a, NULL, NULL)->trial, 2);
    assert_int_equal(archive_elites(&a, elites), 3); /* two of x at most */
    assert_int_equal(elites[0]->trial, 2);
    assert_int_equal(elites[1]->trial, 1);
    assert_int_equal(elites[2]->trial, 4);
    archive_cell cells[ARCHIVE_CELLS_MAX];
    assert_int_equal(archive_cells(&a, cells), 3);
    assert_int_equal(cells[0].tries, 3);
    assert_true(cells[0].live && cells[1].live && cells[2].live);
    assert_null(cells[2].best);
    for (int64_t i = 0; i < ARCHIVE_QUOTA; ++i) { /* a cell with its quota used and nothing valid is evicted */
        add_member(&a, 6 + i, "z", 0.0, 10);
    }
    archive_cells(&a, cells);
    assert_false(cells[2].live);
    for (int cell = 0; cell < ARCHIVE_LIVE_CELLS;
         ++cell) { /* so is one that enough others beat, but it keeps its best */
        char text[16];
        snprintf(text, sizeof text, "c%d", cell);
        add_member(&a, 100 + cell, text, 1.2, 10);
    }
    for (int64_t i = 0; i < ARCHIVE_QUOTA; ++i) {
        add_member(&a, 200 + i, "y", 0.8, 10);
    }
    archive_cells(&a, cells);
    assert_false(cells[1].live);
    assert_int_equal(cells[1].best->trial, 4);
    archive_free(&a);
}

/* ---- The store ---- */

static const char *scratch_file(const char *name)
{
    static char path[256];
    const char *folder = getenv("ACR_TEST_SCRATCH");
    snprintf(path, sizeof path, "%s/%s.%d", folder ? folder : "/tmp", name, (int)getpid());
    return path;
}

static void remove_store(const char *path)
{
    char other[300];
    unlink(path);
    snprintf(other, sizeof other, "%s-wal", path);
    unlink(other);
    snprintf(other, sizeof other, "%s-shm", path);
    unlink(other);
}

static bool count_trials(void *arg, const trial_view *v)
{
    trial_view *seen = arg;
    seen[v->row.id - 1] = *v;
    return v->row.id < 2;
}

static void test_store(void **state)
{
    (void)state;
    const char *path = scratch_file("store");
    remove_store(path);
    store *s = NULL;
    assert_int_equal(store_open(&s, path, STORE_WRITE), ACR_IO);
    assert_int_equal(store_open(&s, path, STORE_CREATE), ACR_OK);
    json_t *run = json_pack("{s:i}", "x", 1), *back = NULL;
    assert_int_equal(store_run(s, &back), ACR_FORMAT);
    assert_int_equal(store_set_run(s, run), ACR_OK);
    assert_int_equal(store_run(s, &back), ACR_OK);
    assert_true(json_equal(run, back));
    int64_t slice = 0;
    assert_int_equal(store_begin_slice(s, run, &slice), ACR_OK);
    trial_row rows[2] = {{.id = 1,
                          .operation = "seed",
                          .kernel = "k1",
                          .family = "f",
                          .arch = "80",
                          .parameters = "A=1",
                          .cell = "f 80"},
                         {.id = 2,
                          .number = 1,
                          .operation = "cross",
                          .parent_count = 2,
                          .parents = {1, 0},
                          .kernel = "k2",
                          .family = "f",
                          .arch = "80",
                          .parameters = "",
                          .cell = "c",
                          .source = "text \"quoted\"\n",
                          .descriptor = "{}",
                          .rationale = "why",
                          .request = "ask",
                          .answer = "say"}};
    assert_int_equal(store_propose(s, slice, rows, 2), ACR_OK);
    assert_int_equal(store_propose(s, slice, rows, 1), ACR_IO); /* the same number twice: nothing is written */
    double samples[4] = {1.0, 2.0, 3.0, 0.1};
    trial_timing timing = {.problem = "b1:h1:s1:d1",
                           .weight = 1.0,
                           .samples = 4,
                           .incumbent_us = samples,
                           .candidate_us = samples,
                           .comparison = {.speedup = 1.25, .blocks = 13}};
    trial_case one_case = {
        .problem = "p", .inputs = "normal", .seed = UINT64_MAX, .hidden = true, .pass = true, .err_max = NAN};
    trial_result result;
    trial_result_init(&result);
    result.status = TRIAL_VALID;
    result.gate = GATE_PERFORMANCE;
    snprintf(result.identity, sizeof result.identity, "%032d", 5);
    result.resources = (trial_resources){40, 1024, 0, -1, 5000, 2};
    result.cases = &one_case;
    result.case_count = 1;
    result.timings = &timing;
    result.timing_count = 1;
    result.overall = (stats_comparison){1.25, {1.2, 1.3}, 0.01, STATS_FASTER, 13};
    const trial_end end = {.id = 2,
                           .status = "valid",
                           .detail = "",
                           .original = -1,
                           .distinct = true,
                           .improved = true,
                           .wall_s = 1.5,
                           .result = &result};
    assert_int_equal(store_finish(s, slice, &end), ACR_OK);
    assert_int_equal(store_finish(s, slice, &end), ACR_INVALID); /* only what is in flight */
    assert_int_equal(store_confirm(s, slice, 2, 0, &result), ACR_OK);
    /* One writer at a time; readers are welcome. */
    store *second = NULL;
    assert_int_equal(store_open(&second, path, STORE_WRITE), ACR_IO);
    assert_non_null(strstr(acr_last_error(), "locked"));
    assert_int_equal(store_open(&second, path, STORE_READ), ACR_OK);
    store_close(second);
    store_close(s);
    assert_int_equal(store_open(&s, path, STORE_WRITE), ACR_OK);
    store_close(s);

    store *reader = NULL;
    assert_int_equal(store_open(&reader, path, STORE_CREATE), ACR_IO);
    assert_int_equal(store_open(&reader, path, STORE_READ), ACR_OK);
    trial_view seen[2];
    assert_int_equal(store_trials(reader, count_trials, seen), ACR_OK);
    assert_false(seen[0].finished);
    assert_true(seen[1].finished && seen[1].distinct && seen[1].improved && seen[1].confirmed);
    assert_int_equal(seen[1].original, -1);
    assert_int_equal(seen[1].row.parents[1], 0);
    assert_int_equal(seen[1].resources.registers, 40);
    assert_int_equal(seen[1].resources.stack_bytes, -1);
    assert_true(seen[1].confirmed_low == 1.2);
    json_t *trial = NULL;
    assert_int_equal(store_trial_json(reader, 3, false, &trial), ACR_INVALID);
    assert_int_equal(store_trial_json(reader, 2, true, &trial), ACR_OK);
    assert_string_equal(json_string_value(json_object_get(trial, "source_text")), "text \"quoted\"\n");
    assert_string_equal(json_string_value(json_object_get(trial, "request_text")), "ask");
    json_t *timings = json_object_get(trial, "timings");
    assert_int_equal(json_array_size(timings), 2); /* the search's and the confirmation's */
    json_t *raw = json_object_get(json_array_get(timings, 0), "candidate_us");
    assert_int_equal(json_array_size(raw), 4);
    assert_true(json_real_value(json_array_get(raw, 3)) == 0.1);
    json_t *checked = json_array_get(json_object_get(trial, "cases"), 0);
    assert_string_equal(json_string_value(json_object_get(checked, "seed")), "18446744073709551615");
    assert_true(json_is_null(json_object_get(checked, "err_max")));
    json_decref(trial);
    json_decref(run);
    json_decref(back);
    store_close(reader);
    remove_store(path);

    FILE *file = fopen(path, "w"); /* something else */
    assert_non_null(file);
    fputs("not a database, but long enough to look like something that somebody wants to keep\n", file);
    fclose(file);
    acr_status status = store_open(&reader, path, STORE_WRITE);
    assert_true(status == ACR_FORMAT || status == ACR_IO);
    unlink(path);
}

/* A store with one confirmed trial, 2.31 times as fast, on a machine with this noise floor. */
static json_t *summary_of_confirmed(double noise_floor, stats_verdict control_verdict)
{
    const char *path = scratch_file("claim");
    remove_store(path);
    store *s = NULL;
    definition d = {.problem_count = 1,
                    .problems = {{canonical_of("f32:b1:h1:s8:d8"), 1.0}},
                    .backend = "cpu",
                    .trials = 1,
                    .incumbent_kernel = "slow_one"};
    json_t *environment = json_object(), *found = NULL;
    int64_t slice = 0;
    trial_result control, result;
    assert_ok(candidate_of_family(&d.incumbent, "fwd_simd", "avx2", "DIM=8"));
    assert_int_equal(store_open(&s, path, STORE_CREATE), ACR_OK);
    assert_int_equal(store_begin_slice(s, environment, &slice), ACR_OK);
    trial_result_init(&control);
    control.status = TRIAL_VALID;
    control.overall = (stats_comparison){1.0, {0.99, 1.01}, noise_floor, control_verdict, 13};
    assert_int_equal(store_slice_control(s, slice, 0, &control), ACR_OK);
    const trial_row row = {.id = 1,
                           .operation = "seed",
                           .kernel = "quick_one",
                           .family = "f",
                           .arch = "avx2",
                           .parameters = "A=1",
                           .cell = "f avx2"};
    assert_int_equal(store_propose(s, slice, &row, 1), ACR_OK);
    trial_result_init(&result);
    result.status = TRIAL_VALID;
    result.gate = GATE_PERFORMANCE;
    result.overall = (stats_comparison){2.31, {1.6, 2.9}, noise_floor, STATS_FASTER, 13};
    const trial_end end = {.id = 1,
                           .status = "valid",
                           .detail = "",
                           .original = -1,
                           .distinct = true,
                           .improved = true,
                           .wall_s = 1.0,
                           .result = &result};
    assert_int_equal(store_finish(s, slice, &end), ACR_OK);
    assert_int_equal(store_confirm(s, slice, 1, 0, &result), ACR_OK);
    assert_int_equal(store_end_slice(s, slice, "complete"), ACR_OK);
    assert_ok(summary_json(&found, s, &d, path));
    json_decref(environment);
    definition_free(&d);
    store_close(s);
    remove_store(path);
    return found;
}

/* Only what is beyond the machine's own unrest is claimed. */
static void test_claims(void **state)
{
    (void)state;
    static const struct {
        double noise_floor;
        stats_verdict control;
        const char *says;
        bool claimed;
    } cases[] = {
        {0.02, STATS_SAME, "quick_one (trial 1) is 2.310 times as fast", true},
        {0.779, STATS_SAME, "No claim: quick_one (trial 1) came out as 2.310 times as fast", false},
        {0.02, STATS_SLOWER, "the incumbent against itself was not SAME", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        json_t *found = summary_of_confirmed(cases[i].noise_floor, cases[i].control);
        const char *conclusion = json_string_value(json_object_get(found, "conclusion"));
        if (!strstr(conclusion, cases[i].says)) {
            fail_msg("%s", conclusion);
        }
        const json_t *won = json_object_get(json_object_get(found, "search"), "confirmed");
        assert_int_equal(json_is_true(json_object_get(won, "beyond_noise")), cases[i].claimed);
        json_decref(found);
    }
}

/* ---- External proposers ---- */

static void test_proposer_outcomes(void **state)
{
    static const struct {
        const char *command;
        double timeout_s;
        proposer_status status;
        const char *detail; /* part of it */
    } cases[] = {
        {"cat > /dev/null; echo '{\"family\": \"f\", \"arch\": \"80\", \"parameters\": {\"A\": 1}}'", 10,
         PROPOSER_ANSWERED, ""},
        {"echo '{\"family\": \"f\", \"arch\": \"80\", \"parameters\": {\"A\": 1}}'", 10, PROPOSER_ANSWERED, ""},
        {"cat > /dev/null; sleep 60", 0.3, PROPOSER_TIMEOUT, "time"},
        {"cat > /dev/null; exec 1>&-; sleep 60", 0.3, PROPOSER_TIMEOUT, "time"},
        {"cat > /dev/null; (sleep 60; echo late) & echo '{}'", 0.5, PROPOSER_TIMEOUT, "time"},
        {"yes", 10, PROPOSER_FLOOD, "1048575"},
        {"echo broken >&2; exit 3", 10, PROPOSER_CRASHED, "broken"},
        {"kill -SEGV $$", 10, PROPOSER_CRASHED, "signal"},
        {"/no/such/program", 10, PROPOSER_CRASHED, "not found"},
        {"true", 10, PROPOSER_MALFORMED, "not JSON"},
        {"echo '[1]'", 10, PROPOSER_MALFORMED, "object"},
        {"echo '{\"family\": \"f\"}'", 10, PROPOSER_MALFORMED, "arch"},
        {"echo '{\"family\": 3, \"arch\": \"80\"}'", 10, PROPOSER_MALFORMED, "type"},
        {"echo '{\"arch\": \"80\", \"source\": \"x\"}'", 10, PROPOSER_MALFORMED, "descriptor"},
        {"echo '{\"arch\": \"80\", \"speedup\": \"9\"}'", 10, PROPOSER_MALFORMED, "unknown"},
        {"echo '{\"arch\": \"80\"} trailing'", 10, PROPOSER_MALFORMED, "not JSON"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        proposer_answer a;
        proposer_ask(&a, cases[i].command, "{\"some\": \"request\"}", cases[i].timeout_s, NULL);
        if (a.status != cases[i].status || !strstr(a.detail, cases[i].detail)) {
            print_message("%s: %s %s\n", cases[i].command, proposer_status_name(a.status), a.detail);
        }
        assert_int_equal(a.status, cases[i].status);
        assert_non_null(strstr(a.detail, cases[i].detail));
        assert_true((a.json != NULL) == (a.status == PROPOSER_ANSWERED));
        proposer_answer_free(&a);
    }
    const volatile int stop = 2;
    proposer_answer a;
    proposer_ask(&a, "sleep 60", "{}", 30.0, &stop);
    assert_int_equal(a.status, PROPOSER_STOPPED);
    proposer_answer_free(&a);
}

/* A proposer that has left its process group, once and twice removed, is ended with it; others' children are not. */
static void test_no_proposer_survives(void **state)
{
    (void)state;
    char command[1200];
    const char *path = scratch_path("proposer.pids");
    const char *const argv[] = {"sleep", "60", NULL};
    const process_limits limits = {.wall_s = 60};
    const int nothing = open("/dev/null", O_RDWR);
    pid_t other;
    assert_true(nothing >= 0);
    assert_int_equal(process_start(&other, argv, NULL, (const int[]){nothing, nothing, nothing}, &limits), ACR_OK);
    snprintf(command, sizeof command,
             "rm -f '%s'; setsid sh -c 'echo $$ >> \"%s\"; (setsid sh -c \"echo \\$\\$ >> %s; exec sleep 60\" &); "
             "exec sleep 60' > /dev/null 2>&1 & while [ \"$(wc -l < '%s' 2> /dev/null)\" != 2 ]; do :; done; "
             "echo '{\"family\": \"f\", \"arch\": \"80\", \"parameters\": \"A=1\"}'",
             path, path, path, path);
    proposer_answer a;
    proposer_ask(&a, command, "{}", 60.0, NULL);
    assert_int_equal(a.status, PROPOSER_ANSWERED);
    proposer_answer_free(&a);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    int pid, count = 0;
    while (fscanf(file, "%d", &pid) == 1) {
        assert_int_equal(kill(pid, 0), -1);
        ++count;
    }
    fclose(file);
    unlink(path);
    assert_int_equal(count, 2);
    assert_int_equal(kill(other, 0), 0);
    process_outcome outcome;
    process_wait(&outcome, other, 0.0, NULL);
    assert_int_equal(outcome.end, PROCESS_TIMED_OUT);
    close(nothing);
}

/* What a proposer says is printed as it is written, never as the terminal would take it. */
static void test_escape_sequences_are_written_out(void **state)
{
    (void)state;
    json_t *said = json_pack("{s:s, s:[s, i]}", "rationale", "\x1b]0;title\a and\ttabs\n", "list",
                             "\xc2\x9b"
                             "31m caf\xc3\xa9 \x7f",
                             3);
    assert_non_null(said);
    json_make_printable(said);
    assert_string_equal(json_string_value(json_object_get(said, "rationale")), "\\x1b]0;title\\x07 and\ttabs\n");
    assert_string_equal(json_string_value(json_array_get(json_object_get(said, "list"), 0)),
                        "\\x9b31m caf\xc3\xa9 \\x7f");
    json_decref(said);
}

/* A large request reaches a proposer that reads slowly, whole. */
static void test_large_request(void **state)
{
    (void)state;
    enum {
        BYTES = 1 << 20
    };
    char *request = malloc(BYTES + 1);
    assert_non_null(request);
    memset(request, 'x', BYTES);
    request[BYTES] = '\0';
    proposer_answer a;
    proposer_ask(&a, "printf '{\"family\": \"f\", \"arch\": \"80\", \"parameters\": \"A=%s\"}' $(wc -c)", request, 20.0,
                 NULL);
    assert_int_equal(a.status, PROPOSER_ANSWERED);
    assert_string_equal(json_string_value(json_object_get(a.json, "parameters")), "A=1048576");
    proposer_answer_free(&a);
    free(request);
}

static void check_answer(const world *w, const archive *proposed, const char *text, proposer_status status,
                         const char *parameters)
{
    json_t *json = json_loads(text, 0, NULL);
    request_trial t;
    assert_non_null(json);
    request_accept(&t, json, &w->spaces, proposed);
    if (t.status != status) {
        print_message("%s: %s %s\n", text, proposer_status_name(t.status), t.detail);
    }
    assert_int_equal(t.status, status);
    if (parameters) {
        assert_string_equal(t.parameters, parameters);
    }
    request_trial_free(&t);
    json_decref(json);
}

static void test_answers(void **state)
{
    (void)state;
    world w;
    make_world(&w, "b2:h8:s512:d64", &h200);
    archive proposed = {NULL, 0, 0};
    check_answer(&w, &proposed,
                 "{\"family\":\"fwd_mma\",\"arch\":\"80\",\"parameters\":{\"Q_TILE\":64,\"KV_TILE\":64,\"STAGES\":2}}",
                 PROPOSER_ANSWERED, "DIM=64 Q_TILE=64 KV_TILE=64 STAGES=2");
    check_answer(&w, &proposed,
                 "{\"family\":\"fwd_mma\",\"arch\":\"80\",\"parameters\":\"WARP_ROWS=16 STAGES=2 DIM=64 KV_TILE=64 "
                 "Q_TILE=64\"}",
                 PROPOSER_ANSWERED, "DIM=64 Q_TILE=64 KV_TILE=64 STAGES=2");
    check_answer(&w, &proposed,
                 "{\"family\":\"fwd_mma\",\"arch\":\"80\",\"parameters\":{\"Q_TILE\":8,\"KV_TILE\":64,\"STAGES\":2}}",
                 PROPOSER_ILLEGAL, NULL);
    check_answer(&w, &proposed,
                 "{\"family\":\"fwd_mma\",\"arch\":\"80\",\"parameters\":{\"Q_TILE\":48,\"KV_TILE\":64,\"STAGES\":2,"
                 "\"WARP_ROWS\":32}}",
                 PROPOSER_ILLEGAL, NULL);
    check_answer(&w, &proposed, "{\"family\":\"fwd_none\",\"arch\":\"80\",\"parameters\":{}}", PROPOSER_ILLEGAL, NULL);
    genome g;
    assert_true(fold_point(&w.spaces, "fwd_mma", "80", "DIM=64 Q_TILE=64 KV_TILE=64 STAGES=2", &g));
    member m = {.has_genome = true, .genome = g};
    assert_true(archive_add(&proposed, &m));
    check_answer(&w, &proposed,
                 "{\"family\":\"fwd_mma\",\"arch\":\"80\",\"parameters\":{\"Q_TILE\":64,\"KV_TILE\":64,\"STAGES\":2}}",
                 PROPOSER_REPEATED, NULL);
    check_answer(&w, &proposed, "{\"name\":\"mine\",\"arch\":\"90a\",\"source\":\"x\",\"descriptor\":{\"block\":128}}",
                 PROPOSER_ANSWERED, "");
    check_answer(&w, &proposed, "{\"name\":\"mine!\",\"arch\":\"90a\",\"source\":\"x\",\"descriptor\":{}}",
                 PROPOSER_MALFORMED, NULL);
    archive_free(&proposed);
}

/* ---- Profiles ---- */

static profile_run counted(void)
{
    profile_run run = {.status = PROFILE_OK, .tool = "Nsight Compute 1", .counters = profile_no_counters()};
    run.counters.value[COUNTER_DURATION] = 7.5;
    run.counters.value[COUNTER_TENSOR] = 25.5;
    run.counters.stall[STALL_wait] = 1.48;
    return run;
}

/* A store with a run of one valid trial, 1.5 times as fast as the incumbent. */
static store *store_with_a_trial(const char *path, const char *parameters, int64_t *slice)
{
    store *s = NULL;
    json_t *run = json_object();
    remove_store(path);
    assert_int_equal(store_open(&s, path, STORE_CREATE), ACR_OK);
    assert_int_equal(store_set_run(s, run), ACR_OK);
    assert_int_equal(store_begin_slice(s, run, slice), ACR_OK);
    json_decref(run);
    const trial_row row = {.id = 1,
                           .operation = "seed",
                           .kernel = "k1",
                           .family = "fwd_mma",
                           .arch = "80",
                           .parameters = parameters,
                           .cell = "fwd_mma 80"};
    trial_result result;
    trial_result_init(&result);
    result.gate = GATE_PERFORMANCE;
    result.overall = (stats_comparison){1.5, {1.4, 1.6}, 0.01, STATS_FASTER, 13};
    const trial_end end = {.id = 1,
                           .status = "valid",
                           .detail = "",
                           .original = -1,
                           .distinct = true,
                           .improved = true,
                           .result = &result};
    assert_int_equal(store_propose(s, *slice, &row, 1), ACR_OK);
    assert_int_equal(store_finish(s, *slice, &end), ACR_OK);
    return s;
}

/* What the machine refuses is asked again in another slice, what the trial does is not. */
static void test_profiles_are_stored(void **state)
{
    (void)state;
    const char *path = scratch_file("profiles");
    int64_t slice = 0;
    store *s = store_with_a_trial(path, "DIM=64", &slice);
    bool profiled = true;
    assert_int_equal(store_is_profiled(s, 1, &profiled), ACR_OK);
    assert_false(profiled);
    profile_run run = {.status = PROFILE_NO_PERMISSION, .detail = "ERR_NVGPUCTRPERM", .tool = "Nsight Compute 1"};
    const store_profile_row refused = {1, 0, "b1:h1:s1:d1", &run, ""};
    assert_int_equal(store_profile(s, slice, &refused), ACR_OK);
    assert_int_equal(store_is_profiled(s, 1, &profiled), ACR_OK);
    assert_false(profiled);
    json_t *json = NULL;
    assert_int_equal(store_profile_json(s, 1, &json), ACR_OK);
    assert_string_equal(json_string_value(json_object_get(json_array_get(json, 0), "status")), "NO_PERMISSION");
    assert_int_equal(json_object_size(json_object_get(json_array_get(json, 0), "counters")), 0); /* and no number */
    json_decref(json);
    run = counted();
    const store_profile_row done = {1, 0, "b1:h1:s1:d1", &run, "Bound by latency."};
    assert_int_equal(store_profile(s, slice, &done), ACR_OK);
    run.status = PROFILE_TIMEOUT;
    const store_profile_row slow = {1, 1, "b1:h1:s2:d1", &run, ""};
    assert_int_equal(store_profile(s, slice, &slow), ACR_OK);
    assert_int_equal(store_is_profiled(s, 1, &profiled), ACR_OK);
    assert_true(profiled);
    json_t *trial = NULL;
    assert_int_equal(store_trial_json(s, 1, false, &trial), ACR_OK);
    const json_t *profile = json_object_get(trial, "profile"), *first = json_array_get(profile, 0);
    assert_int_equal(json_array_size(profile), 2);
    assert_string_equal(json_string_value(json_object_get(first, "status")), "OK");
    assert_string_equal(json_string_value(json_object_get(first, "diagnosis")), "Bound by latency.");
    const json_t *counters = json_object_get(first, "counters");
    assert_int_equal(json_object_size(counters), 3); /* what the tool did not count is not there */
    assert_true(json_number_value(json_object_get(counters, "tensor_pct")) == 25.5);
    assert_true(json_number_value(json_object_get(counters, "stall_wait")) == 1.48);
    assert_int_equal(json_object_size(json_object_get(json_array_get(profile, 1), "counters")), 0);
    json_decref(trial);
    store_close(s);
    remove_store(path);
}

/* What takes a store back to version 2. */
#define WITHOUT_DEVICES "DROP TABLE slice_device; ALTER TABLE trial DROP COLUMN device; PRAGMA user_version = 2;"

/* A store of version 1 is read as it is, and becomes one of today's when a run in it goes on. */
static void test_an_old_store(void **state)
{
    (void)state;
    static const char down[] =
        WITHOUT_DEVICES "DROP TABLE profiled; DROP TABLE profile; PRAGMA user_version = 1;"
                        "CREATE TABLE profile (trial INTEGER NOT NULL REFERENCES trial, name TEXT NOT NULL,"
                        "  value REAL, unit TEXT NOT NULL, PRIMARY KEY (trial, name)) WITHOUT ROWID;";
    const char *path = scratch_file("old");
    int64_t slice = 0;
    store *s = store_with_a_trial(path, "DIM=64", &slice);
    store_close(s);
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, down, NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
    json_t *trial = NULL;
    assert_int_equal(store_open(&s, path, STORE_READ), ACR_OK);
    assert_int_equal(store_trial_json(s, 1, true, &trial), ACR_OK);
    assert_int_equal(json_array_size(json_object_get(trial, "profile")), 0);
    json_decref(trial);
    store_close(s);
    assert_int_equal(store_open(&s, path, STORE_WRITE), ACR_OK);
    const profile_run run = counted();
    const store_profile_row row = {1, 0, "b1:h1:s1:d1", &run, "Bound by latency."};
    assert_int_equal(store_profile(s, slice, &row), ACR_OK);
    store_close(s);
    assert_int_equal(store_open(&s, path, STORE_READ), ACR_OK);
    bool profiled = false;
    assert_int_equal(store_is_profiled(s, 1, &profiled), ACR_OK);
    assert_true(profiled);
    store_close(s);
    remove_store(path);
}

/* So is one of version 2, which keeps its profiles. */
static void test_a_store_before_devices(void **state)
{
    (void)state;
    const char *path = scratch_file("before");
    int64_t slice = 0, next = 0;
    bool profiled = false;
    store *s = store_with_a_trial(path, "DIM=64", &slice);
    const profile_run run = counted();
    const store_profile_row row = {1, 0, "b1:h1:s1:d1", &run, "Bound by latency."};
    assert_int_equal(store_profile(s, slice, &row), ACR_OK);
    store_close(s);
    sqlite3 *db = NULL;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, WITHOUT_DEVICES, NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
    json_t *slices = NULL, *trial = NULL;
    assert_int_equal(store_open(&s, path, STORE_READ), ACR_OK);
    assert_int_equal(store_slices(s, &slices), ACR_OK);
    assert_int_equal(json_array_size(json_object_get(json_array_get(slices, 0), "devices")), 0);
    assert_int_equal(store_trial_json(s, 1, true, &trial), ACR_OK);
    assert_null(json_object_get(trial, "device"));
    json_decref(slices);
    json_decref(trial);
    store_close(s);
    assert_int_equal(store_open(&s, path, STORE_WRITE), ACR_OK);
    assert_int_equal(store_is_profiled(s, 1, &profiled), ACR_OK);
    assert_true(profiled);
    trial_result control;
    trial_result_init(&control);
    json_t *environment = json_object();
    assert_int_equal(store_begin_slice(s, environment, &next), ACR_OK);
    json_decref(environment);
    for (int device = 0; device < 2; ++device) {
        control.overall.noise_floor = 0.01 + 0.01 * device;
        assert_int_equal(store_slice_control(s, next, device, &control), ACR_OK);
    }
    store_close(s);
    assert_int_equal(store_open(&s, path, STORE_READ), ACR_OK);
    assert_int_equal(store_slices(s, &slices), ACR_OK);
    const json_t *devices = json_object_get(json_array_get(slices, 1), "devices");
    assert_int_equal(json_array_size(devices), 2);
    assert_true(json_real_value(json_object_get(json_array_get(devices, 1), "noise_floor")) == 0.02);
    assert_true(json_real_value(json_object_get(json_array_get(slices, 1), "noise_floor")) == 0.01);
    json_decref(slices);
    store_close(s);
    remove_store(path);
}

/* The proposer is told what binds the incumbent and the elites, and the next to be profiled is the next of them. */
static void test_requests_tell_profiles(void **state)
{
    (void)state;
    const char *path = scratch_file("told");
    const char *const set = "DIM=64 Q_TILE=64 KV_TILE=32 STAGES=3";
    int64_t slice = 0, next = -1;
    store *s = store_with_a_trial(path, set, &slice);
    world w;
    fold f;
    make_world(&w, "b2:h8:s512:d64", &h200);
    definition d = {.problem_count = 1, .problems = {{w.problem, 1.0}}, .trials = 4};
    assert_int_equal(definition_set_incumbent(&d, "fwd_mma_f16_d64_64x32_s2_g4w32_sm80"), ACR_OK);
    assert_int_equal(fold_read(&f, s, &d, &w.spaces), ACR_OK);
    profile_run run = counted();
    for (int64_t trial = 0; trial < 2; ++trial) {
        assert_int_equal(elites_next(&next, s, &f.learnt[ARM_SEARCH]), ACR_OK);
        assert_int_equal(next, trial);
        const store_profile_row row = {trial, 0, "b2:h8:s512:d64", &run, trial ? "of the elite" : "of the incumbent"};
        assert_int_equal(store_profile(s, slice, &row), ACR_OK);
    }
    assert_int_equal(elites_next(&next, s, &f.learnt[ARM_SEARCH]), ACR_OK);
    assert_int_equal(next, -1);
    trial_result control;
    trial_result_init(&control);
    const request_inputs inputs = {&d, &h200, &w.spaces, &f, s, ".", &control, NULL, 2};
    char *text = NULL;
    assert_int_equal(request_make(&text, &inputs), ACR_OK);
    json_t *request = json_loads(text, 0, NULL);
    const json_t *incumbent = json_object_get(json_object_get(request, "task"), "incumbent");
    const json_t *elite = json_array_get(json_object_get(request, "elites"), 0);
    const json_t *const told[] = {incumbent, elite};
    for (size_t i = 0; i < 2; ++i) {
        const json_t *profile = json_array_get(json_object_get(told[i], "profile"), 0);
        assert_string_equal(json_string_value(json_object_get(profile, "diagnosis")),
                            i ? "of the elite" : "of the incumbent");
        assert_true(json_number_value(json_object_get(json_object_get(profile, "counters"), "tensor_pct")) == 25.5);
    }
    json_decref(request);
    free(text);
    fold_free(&f);
    definition_free(&d);
    store_close(s);
    remove_store(path);
}

/* ---- For evolve_spaces.py: points of every space, each with what the space says of it ---- */

static void print_point(const world *w, const genome *g)
{
    char parameters[SPACE_PARAMETERS_MAX];
    const space *s = &w->spaces.items[g->space];
    space_parameters(s, g, parameters);
    printf("%s %s %s %s\n", s->family, s->archs[g->arch], genome_legal(&w->spaces, g) ? "legal" : "illegal",
           parameters);
}

static void print_points(int count)
{
    static const struct {
        const char *problem;
        const acr__device *device;
    } scenes[] = {{"f32:b1:h1:s64:d64", &cpu},
                  {"f16:b1:h1:s64:d64", &h200},
                  {"bf16:b1:h1:s64:d128", &h200},
                  {"f16:b1:h1:s64:d96", &h200},
                  {"f16:b1:h1:s64:d256", &h200},
                  {"f16:b1:h1:s64:d192/128", &h200},
                  {"e4m3:b1:h1:s64:d64", &h200},
                  {"e4m3:b1:h1:s64:d128", &h200},
                  {"f16:b1:h1:s64:d64:bshd:packed", &h200},
                  {"bf16:b1:h1:s64:d128:bshd:packed", &h200},
                  {"bf16:b1:h1:s64:d64", &cpu},
                  {"bwd:f32:b1:h1:s64:d64", &cpu},
                  {"bwd:bf16:b1:h1:s64:d64", &cpu},
                  {"bwd:f16:b1:h1:s64:d64", &h200},
                  {"bwd:bf16:b1:h1:s64:d128", &h200},
                  {"bwd:bf16:b1:h1:s64:d64:cap30", &h200},
                  {"bwd:f16:b1:h1:s64:d128:bshd:packed", &h200}};
    for (size_t i = 0; i < sizeof scenes / sizeof scenes[0]; ++i) {
        world w;
        make_world(&w, scenes[i].problem, scenes[i].device);
        for (int family = 0; family < w.spaces.count; ++family) {
            const space *s = &w.spaces.items[family];
            for (int trial = 0; trial < count; ++trial) {
                dice d = dice_of(i, (uint64_t)family, trial);
                genome g = {.space = family, .arch = (int)dice_below(&d, s->arch_count)};
                do { /* every other point is a legal one */
                    for (int gene = 0; gene < s->gene_count; ++gene) {
                        g.choice[gene] = (int)dice_below(&d, s->genes[gene].count);
                    }
                } while (trial % 2 && !genome_legal(&w.spaces, &g) && d.draw < 20000);
                print_point(&w, &g);
            }
        }
    }
}

static survey_item item_of(const char *text, double time_us, double attainable_us, double peer_us)
{
    survey_item item = {.ranked = true, .time_us = time_us, .attainable_us = attainable_us, .peer_us = peer_us};
    assert_int_equal(acr_problem_parse(&item.problem, text, NULL), ACR_OK);
    assert_int_equal(acr_problem_canonical(&item.problem, &item.problem), ACR_OK);
    snprintf(item.text, sizeof item.text, "%s", text);
    return item;
}

/* Four problems that reach half of what is attainable, one beside them a fifth, one whose peer is faster, one that
 * nothing runs. */
static void test_survey_ranks(void **state)
{
    (void)state;
    survey_item items[] = {
        item_of("b1:h8:s512:d64", 20, 10, NAN),  item_of("b1:h8:s513:d64", 50, 10, NAN),
        item_of("b1:h8:s514:d64", 20, 10, 5),    item_of("b1:h8:s515:d64", 20, 10, NAN),
        item_of("b1:h8:s516:d64", NAN, 10, NAN), item_of("b1:h8:s517:d64", 20, 10, 40),
    };
    const size_t count = sizeof items / sizeof items[0];
    survey_rank(items, count);
    assert_string_equal(items[0].text, "b1:h8:s514:d64"); /* what a peer does can be done, all of it */
    assert_int_equal(items[0].reason, SURVEY_PEER);
    assert_true(fabs(items[0].gain - 4.0) < 1e-12);
    assert_string_equal(items[1].text, "b1:h8:s513:d64"); /* 2.5 times what its neighbours take, to 0.75 */
    assert_int_equal(items[1].reason, SURVEY_NEIGHBOURS);
    assert_true(fabs(items[1].to_neighbours - 2.5) < 1e-12 && fabs(items[1].gain - pow(2.5, 0.75)) < 1e-12);
    for (size_t i = 2; i < 5; ++i) { /* a quarter of the way to the roofline; a slower peer promises nothing */
        assert_int_equal(items[i].reason, SURVEY_ROOFLINE);
        assert_true(fabs(items[i].gain - pow(2.0, 0.25)) < 1e-12);
    }
    assert_string_equal(items[2].text, "b1:h8:s512:d64"); /* of equal ones by text */
    assert_string_equal(items[5].text, "b1:h8:s516:d64"); /* nothing is known: last */
    assert_true(items[5].gain == 1.0);
    /* Gradients are no neighbours of the forward pass while that has five others. */
    survey_item passes[] = {item_of("bwd:b1:h8:s512:d64", 20, 10, NAN), item_of("bwd:b1:h8:s513:d64", 20, 10, NAN),
                            item_of("bwd:b1:h8:s514:d64", 20, 10, NAN), item_of("bwd:b1:h8:s515:d64", 20, 10, NAN),
                            item_of("bwd:b1:h8:s516:d64", 20, 10, NAN), item_of("bwd:b1:h8:s517:d64", 20, 10, NAN),
                            item_of("b1:h8:s512:d64", 10, 10, NAN),     item_of("b1:h8:s513:d64", 10, 10, NAN),
                            item_of("b1:h8:s514:d64", 10, 10, NAN)};
    survey_rank(passes, sizeof passes / sizeof passes[0]);
    for (size_t i = 0; i < 6; ++i) {
        assert_true(passes[i].problem.pass == ACR_BACKWARD && passes[i].to_neighbours == 1.0);
    }
    /* The budget by the gains' logarithms, of what is left. */
    double left_s = 100, first_s = survey_share(items, 2, left_s);
    assert_true(fabs(first_s - 100 * log(4.0) / (log(4.0) + 0.75 * log(2.5))) < 1e-9);
    assert_true(fabs(survey_share(items + 1, 1, left_s - first_s) - (left_s - first_s)) < 1e-9);
    assert_true(survey_share(items + 5, 1, left_s) == 0.0);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--points") == 0) {
        print_points((int)strtol(argv[2], NULL, 10));
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_expressions),
        cmocka_unit_test(test_lines_are_points),
        cmocka_unit_test(test_names_are_unique),
        cmocka_unit_test(test_packed_spaces),
        cmocka_unit_test(test_passes_are_apart),
        cmocka_unit_test(test_space_texts),
        cmocka_unit_test(test_bad_spaces),
        cmocka_unit_test(test_moves_are_legal),
        cmocka_unit_test(test_proposals_repeat),
        cmocka_unit_test(test_search_climbs),
        cmocka_unit_test(test_surrogate_knows_what_it_saw),
        cmocka_unit_test(test_racing),
        cmocka_unit_test(test_spaces_hold_wins),
        cmocka_unit_test(test_retrospect),
        cmocka_unit_test(test_exhaustion),
        cmocka_unit_test(test_archive),
        cmocka_unit_test(test_store),
        cmocka_unit_test(test_claims),
        cmocka_unit_test(test_proposer_outcomes),
        cmocka_unit_test(test_no_proposer_survives),
        cmocka_unit_test(test_escape_sequences_are_written_out),
        cmocka_unit_test(test_large_request),
        cmocka_unit_test(test_answers),
        cmocka_unit_test(test_profiles_are_stored),
        cmocka_unit_test(test_an_old_store),
        cmocka_unit_test(test_a_store_before_devices),
        cmocka_unit_test(test_requests_tell_profiles),
        cmocka_unit_test(test_survey_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
