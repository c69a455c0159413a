/* Fits the cost models' rates (src/cuda/model/rates.def) to measured times, and judges what ESTIMATE would choose.
 *
 *     fit_cost --gpu NAME GRID.json               judges the rates as they are; exit code 1 when they fall short
 *     fit_cost --gpu NAME --fit FILE GRID.json    fits first and writes FILE (src/cuda/model/rates.def); then judges
 *     fit_cost --gpu NAME --unseen GRID.json      judges, and counts every problem as one that no fit has seen
 *
 * GRID.json is what `acromion why --measure --json` printed. Half of its problems, by a hash of their text, serve to
 * fit; the others, which the fit never sees, to judge: ESTIMATE must pick within 5 % of the fastest kernel for 95 % of
 * them. */
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cuda/model/fwd_model.h"
#include "internal.h"
#include "machine/gpus.h"

enum {
    PROBLEMS_MAX = 4096,
    TIMED_MAX = 96, /* kernels of one problem */
    KEYS_MAX = 96,  /* lines of rates.def */
    RATE_COUNT = 7,
    FOLDS = 5 /* of the fitting half, to choose blur and error_weight */
};
static const double NEAR_BEST = 1.05, SHARE_WANTED = 0.95;

/* By what share estimates are taken to be off at random, and so to choose another kernel: what the fit tries. */
static const double blurs[] = {0.01, 0.02, 0.03, 0.05, 0.08};

/* What an estimate's error weighs beside what the choices lose: what the fit tries. */
static const double error_weights[] = {0.1, 0.3, 1.0};

typedef struct timed {
    const acr__kernel *kernel;
    int key; /* of its line; -1 = its cost does not come from the shared model */
    double measured_s, estimate_s;
    double log_measured, log_estimate;
    double weight; /* of the estimate's error: of kernels near the fastest more than of slow ones */
    double loss;   /* by taking it rather than the fastest: beyond 5 % it counts as a miss besides */
} timed;

typedef struct row {
    char text[ACR_PROBLEM_TEXT_MAX];
    acr_problem problem;
    bool to_fit; /* else to judge */
    int fold;    /* of those to fit, 0 … FOLDS - 1 */
    timed timed[TIMED_MAX];
    int count;
} row;

typedef struct line {
    char name[96];
    double log_rates[RATE_COUNT];
} line;

typedef struct grid {
    const acr__device *device;
    row *rows;
    int row_count;
    line keys[KEYS_MAX];
    int key_count;
    double blur, error_weight; /* of those to try */
    int held_out;              /* a fold that the fit leaves aside; -1 = none */
    bool fitting;              /* only the fitting half needs estimates */
} grid;

static void die(const char *what, const char *detail)
{
    fprintf(stderr, "fit_cost: %s: %s\n", what, detail);
    exit(2);
}

/* ---- Reading ---- */

/* Where the search begins, and how far it may go: a rate that the measurements say little about stays plausible,
 * and none is more than the hardware can have. */
static const double first_rates[RATE_COUNT] = {2400.0, 14.0, 800.0, 3000.0, 0.9, 1000.0, 1000.0}, RANGE = 8.0,
                    most_rates[RATE_COUNT] = {8192.0, INFINITY, INFINITY, INFINITY, 1.0, 5000.0, 4000.0};

/* The index of a kernel's line, or -1 when trying a line for it changes nothing. */
static int key_of(grid *g, const acr__kernel *kernel, const acr_problem *problem)
{
    char name[96];
    acr__rates_key(name, sizeof name, kernel->name);
    for (int i = 0; i < g->key_count; i++)
        if (strcmp(g->keys[i].name, name) == 0)
            return i;
    const acr__fitted_rates slow = {name, g->device->arch, 1.0, 0.01, 1e7, 1e7, 0.01, 1e7, 1e7};
    const double before = kernel->cost(problem, g->device);
    acr__device trying = *g->device;
    trying.rates_on_trial = &slow;
    const double after = kernel->cost(problem, &trying);
    if (after == before)
        return -1;
    if (g->key_count == KEYS_MAX)
        die("too many kernels", name);
    snprintf(g->keys[g->key_count].name, sizeof g->keys->name, "%s", name);
    return g->key_count++;
}

static void read_kernel(grid *g, row *r, const json_t *entry)
{
    const json_t *measured = json_object_get(entry, "measured_us");
    const char *name = json_string_value(json_object_get(entry, "kernel"));
    const acr__kernel *kernel = name ? acr__kernel_find(name) : NULL;
    if (!json_is_number(measured) || !kernel || acr__why_not(kernel, &r->problem, g->device))
        return;
    if (r->count == TIMED_MAX)
        die("too many kernels for one problem", r->text);
    const double seconds = 1e-6 * json_number_value(measured);
    r->timed[r->count++] = (timed){
        .kernel = kernel, .key = key_of(g, kernel, &r->problem), .measured_s = seconds, .log_measured = log(seconds)};
}

/* The kernel whose time at `offset` in its timed is the least. */
static const timed *least(const row *r, size_t offset)
{
    const timed *best = &r->timed[0];
    for (int i = 1; i < r->count; i++)
        if (*(const double *)((const char *)&r->timed[i] + offset) < *(const double *)((const char *)best + offset))
            best = &r->timed[i];
    return best;
}

static const timed *fastest_of(const row *r)
{
    return least(r, offsetof(timed, measured_s));
}

static const timed *chosen_of(const row *r)
{
    return least(r, offsetof(timed, estimate_s));
}

static void weigh(row *r)
{
    const double fastest = fastest_of(r)->log_measured;
    for (int i = 0; i < r->count; i++) {
        timed *t = &r->timed[i];
        const double lost = t->log_measured - fastest;
        t->weight = exp(-4.0 * lost);
        t->loss = lost + (lost > log(NEAR_BEST) ? 0.05 : 0.0);
    }
}

static void read_row(grid *g, const json_t *answer)
{
    const char *text = json_string_value(json_object_get(answer, "problem"));
    row *r = &g->rows[g->row_count];
    if (!text || acr_problem_parse(&r->problem, text, NULL) != ACR_OK ||
        acr_problem_canonical(&r->problem, &r->problem) != ACR_OK)
        die("a problem of the grid", acr_last_error());
    snprintf(r->text, sizeof r->text, "%s", text);
    const XXH64_hash_t hash = XXH3_64bits(text, strlen(text));
    r->to_fit = hash % 2 == 0;
    r->fold = (int)(hash / 2 % FOLDS);
    size_t i;
    const json_t *entry;
    json_array_foreach(json_object_get(answer, "kernels"), i, entry) read_kernel(g, r, entry);
    if (r->count == 0)
        return;
    weigh(r);
    g->row_count++;
}

static void read_grid(grid *g, const char *path)
{
    json_error_t error;
    json_t *answers = json_load_file(path, 0, &error);
    if (!json_is_array(answers))
        die(path, answers ? "no array" : error.text);
    if (json_array_size(answers) > PROBLEMS_MAX)
        die(path, "too many problems");
    g->rows = calloc(PROBLEMS_MAX, sizeof *g->rows);
    if (!g->rows)
        die(path, "no memory");
    size_t i;
    const json_t *answer;
    json_array_foreach(answers, i, answer) read_row(g, answer);
    json_decref(answers);
}

/* ---- Estimating ---- */

static void estimate(const grid *g, const row *r, timed *t)
{
    t->estimate_s = t->kernel->cost(&r->problem, g->device);
    t->log_estimate = log(t->estimate_s);
}

/* With a line's rates as they are tried. */
static void estimate_key(grid *g, int key)
{
    const line *l = &g->keys[key];
    const acr__fitted_rates trial = {l->name,
                                     g->device->arch,
                                     exp(l->log_rates[0]),
                                     exp(l->log_rates[1]),
                                     exp(l->log_rates[2]),
                                     exp(l->log_rates[3]),
                                     exp(l->log_rates[4]),
                                     exp(l->log_rates[5]),
                                     exp(l->log_rates[6])};
    const acr__device *const usual = g->device;
    acr__device trying = *usual;
    trying.rates_on_trial = &trial;
    g->device = &trying;
    for (int i = 0; i < g->row_count; i++) {
        row *r = &g->rows[i];
        for (int j = 0; j < r->count && (r->to_fit || !g->fitting); j++)
            if (r->timed[j].key == key)
                estimate(g, r, &r->timed[j]);
    }
    g->device = usual;
}

/* With the rates that the library has. */
static void estimate_all(grid *g)
{
    for (int i = 0; i < g->row_count; i++)
        for (int j = 0; j < g->rows[i].count; j++)
            estimate(g, &g->rows[i], &g->rows[i].timed[j]);
}

/* ---- Fitting ---- */

/* Whether the fit may look at this problem. */
static bool is_seen(const grid *g, const row *r)
{
    return r->to_fit && r->fold != g->held_out;
}

/* How far the estimates of a line's kernels are off; -1 = of all. */
static double error_of(const grid *g, int key)
{
    double sum = 0.0;
    for (int i = 0; i < g->row_count; i++) {
        const row *r = &g->rows[i];
        if (!is_seen(g, r))
            continue;
        for (int j = 0; j < r->count; j++) {
            const timed *t = &r->timed[j];
            const double off = t->log_estimate - t->log_measured;
            if (key < 0 || t->key == key)
                sum += t->weight * off * off;
        }
    }
    return sum;
}

/* What the choices lose if each estimate is off by the blur: a kernel that comes near the lowest estimate counts as far
 * as it might be chosen, since for another problem like this one it would be. */
static double choice_loss(const grid *g, const row *r)
{
    const double lowest = chosen_of(r)->log_estimate;
    double loss = 0.0, shares = 0.0;
    for (int j = 0; j < r->count; j++) {
        const double above = (r->timed[j].log_estimate - lowest) / g->blur;
        if (above > 10.0)
            continue;
        const double share = exp(-above);
        shares += share;
        loss += share * r->timed[j].loss;
    }
    return loss / shares;
}

/* What the choices lose, and the errors, so that no rate wanders off. */
static double loss_of(const grid *g)
{
    double sum = g->error_weight * error_of(g, -1);
    for (int i = 0; i < g->row_count; i++)
        if (is_seen(g, &g->rows[i]))
            sum += choice_loss(g, &g->rows[i]);
    return sum;
}

typedef double objective(const grid *g, int key);

static double whole_loss(const grid *g, int key)
{
    (void)key;
    return loss_of(g);
}

/* One step of a pattern search: every rate of a line up and down; true when one of the moves helped. */
static bool try_moves(grid *g, int key, double step, objective *judge)
{
    bool moved = false;
    double best = judge(g, key);
    for (int i = 0; i < RATE_COUNT; i++)
        for (int sign = -1; sign <= 1; sign += 2) {
            const double before = g->keys[key].log_rates[i];
            g->keys[key].log_rates[i] = before + sign * step;
            if (fabs(before + sign * step - log(first_rates[i])) > log(RANGE) ||
                before + sign * step > log(most_rates[i])) {
                g->keys[key].log_rates[i] = before;
                continue;
            }
            estimate_key(g, key);
            const double now = judge(g, key);
            if (now < best - 1e-12) {
                best = now;
                moved = true;
            } else {
                g->keys[key].log_rates[i] = before;
            }
        }
    estimate_key(g, key);
    return moved;
}

static const double steps[] = {0.4, 0.15, 0.06, 0.025, 0.01};

static void fit(grid *g)
{
    enum {
        MOVES_MAX = 200,
        SWEEPS_MAX = 20
    };
    estimate_all(g);
    for (int key = 0; key < g->key_count; key++) {
        for (int i = 0; i < RATE_COUNT; i++)
            g->keys[key].log_rates[i] = log(first_rates[i]);
        estimate_key(g, key);
        for (size_t s = 0; s < sizeof steps / sizeof *steps; s++)
            for (int moves = 0; moves < MOVES_MAX && try_moves(g, key, steps[s], error_of); moves++)
                ;
    }
    for (size_t s = 1; s < sizeof steps / sizeof *steps; s++) {
        bool moved = true;
        for (int sweep = 0; sweep < SWEEPS_MAX && moved; sweep++) {
            moved = false;
            for (int key = 0; key < g->key_count; key++)
                moved |= try_moves(g, key, steps[s], whole_loss);
        }
    }
}

/* What the choices of each fold lose after a fit to the others. */
static double loss_held_out(grid *g)
{
    double sum = 0.0;
    for (g->held_out = 0; g->held_out < FOLDS; g->held_out++) {
        fit(g);
        for (int i = 0; i < g->row_count; i++) {
            const row *r = &g->rows[i];
            if (r->to_fit && r->fold == g->held_out)
                sum += chosen_of(r)->loss;
        }
    }
    g->held_out = -1;
    return sum;
}

/* Blur and weight by cross-validation within the fitting half, then the fit to all of it: the judged half has no say.
 */
static void choose_and_fit(grid *g)
{
    g->fitting = true;
    double best_loss = INFINITY, blur = 0.0, error_weight = 0.0;
    for (size_t w = 0; w < sizeof error_weights / sizeof *error_weights; w++)
        for (size_t b = 0; b < sizeof blurs / sizeof *blurs; b++) {
            g->error_weight = error_weights[w];
            g->blur = blurs[b];
            const double loss = loss_held_out(g);
            printf("blur %.2f, error's weight %.1f: choices of held-out folds lose %.4f\n", g->blur, g->error_weight,
                   loss);
            fflush(stdout);
            if (loss < best_loss) {
                best_loss = loss;
                blur = g->blur;
                error_weight = g->error_weight;
            }
        }
    g->blur = blur;
    g->error_weight = error_weight;
    fit(g);
    g->fitting = false;
    for (int key = 0; key < g->key_count; key++)
        estimate_key(g, key);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const line *)a)->name, ((const line *)b)->name);
}

static void write_rates(grid *g, const char *path)
{
    FILE *f = fopen(path, "w");
    if (!f)
        die(path, "cannot be written");
    fprintf(f, "/* Made by tools/fit_cost.c: RATES(kernel without its type, architecture, FLOP a cycle and SM, "
               "exponentials a\n"
               " * cycle and SM, shortest cycles of a step, cycles of a query tile besides, share of the memory's "
               "bandwidth,\n"
               " * more cycles of a causal query tile, cycles once). Measurements: results/grid/. */\n");
    qsort(g->keys, (size_t)g->key_count, sizeof *g->keys, by_name);
    for (int i = 0; i < g->key_count; i++) {
        const double *r = g->keys[i].log_rates;
        fprintf(f, "RATES(\"%s\", %d, %.5g, %.4g, %.5g, %.5g, %.3g, %.5g, %.5g)\n", g->keys[i].name,
                (int)g->device->arch, exp(r[0]), exp(r[1]), exp(r[2]), exp(r[3]), exp(r[4]), exp(r[5]), exp(r[6]));
    }
    if (fclose(f) != 0)
        die(path, "cannot be written");
}

/* ---- Judging ---- */

typedef struct score {
    int problems, near;
} score;

static void judge_row(const row *r, score *s)
{
    const timed *chosen = chosen_of(r), *fastest = fastest_of(r);
    const double ratio = chosen->measured_s / fastest->measured_s;
    s->problems++;
    if (ratio <= NEAR_BEST) {
        s->near++;
        return;
    }
    printf("%-6s %-36s %.3f times the fastest: %s %.2f us (estimated %.2f), %s %.2f us (%.2f)\n",
           r->to_fit ? "fit" : "judge", r->text, ratio, chosen->kernel->name, 1e6 * chosen->measured_s,
           1e6 * chosen->estimate_s, fastest->kernel->name, 1e6 * fastest->measured_s, 1e6 * fastest->estimate_s);
}

/* Exit code. */
static int judge(const grid *g)
{
    score scores[2] = {{0, 0}, {0, 0}};
    for (int i = 0; i < g->row_count; i++)
        judge_row(&g->rows[i], &scores[g->rows[i].to_fit]);
    for (int fitted = 1; fitted >= 0; fitted--)
        printf("%s half: within 5 %% of the fastest kernel for %d of %d problems (%.1f %%)\n",
               fitted ? "fitted" : "judged", scores[fitted].near, scores[fitted].problems,
               100.0 * scores[fitted].near / fmax(1.0, scores[fitted].problems));
    return scores[0].problems > 0 && scores[0].near >= SHARE_WANTED * scores[0].problems ? 0 : 1;
}

int main(int argc, char **argv)
{
    const char *gpu = NULL, *output = NULL, *path = NULL;
    bool unseen = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--gpu") == 0 && i + 1 < argc)
            gpu = argv[++i];
        else if (strcmp(argv[i], "--fit") == 0 && i + 1 < argc)
            output = argv[++i];
        else if (strcmp(argv[i], "--unseen") == 0)
            unseen = true;
        else if (argv[i][0] != '-' && !path)
            path = argv[i];
        else
            die("usage", "fit_cost --gpu NAME [--fit FILE | --unseen] GRID.json");
    }
    if (unseen && output)
        die("usage", "--fit and --unseen exclude each other");
    const gpu_model *model = gpu ? gpu_find(gpu) : NULL;
    if (!model || !path)
        die("usage", model ? "no grid" : "--gpu names no GPU of the table");
    static grid g;
    g.device = &model->device;
    g.held_out = -1;
    read_grid(&g, path);
    for (int i = 0; i < g.row_count && unseen; i++)
        g.rows[i].to_fit = false;
    estimate_all(&g);
    if (output) {
        choose_and_fit(&g);
        write_rates(&g, output);
    }
    const int code = judge(&g);
    free(g.rows);
    return code;
}
