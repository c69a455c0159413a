/* acromion evolve: the search for a faster kernel. Options, the definition of a new run, signals; the work is in
 * search/engine.c. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/exit_code.h"
#include "base/json.h"
#include "base/options.h"
#include "check/inputs.h"
#include "commands.h"
#include "evolve_retrospect.h"
#include "evolve_survey.h"
#include "search/engine.h"
#include "search/summary.h"
#include "search/tree.h"

enum {
    ID_TIME = OPTION_LONG_ONLY,
    ID_PROPOSER,
    ID_PROPOSER_TIMEOUT,
    ID_PROPOSER_FOLDER,
    ID_RESUME,
    ID_STORE,
    ID_FROM,
    ID_FAMILY,
    ID_GENERATION,
    ID_CASES,
    ID_CLOCK,
    ID_INSIGHTS,
    ID_PEERS,
    ID_PYTHON_PATH,
    ID_NO_PROFILE,
    ID_GPUS,
    ID_JUDGES,
    ID_LAUNCHER,
    ID_WORKERS,
    ID_SURVEY,
    ID_ALL,
    ID_GPU,
    ID_RESULTS,
    ID_MEASURE,
    ID_CONFIRM,
    ID_TRY,
    ID_TOP,
    ID_INTO,
    ID_TREE,
    ID_SURROGATE,
    ID_RACE,
    ID_RETROSPECT
};

static const option_spec options[OPTIONS_MAX] = {
    {'n', "trials", "N", "distinct trials of the search, and as many of the random control; default 45"},
    {ID_TIME, "time", "T", "end this slice when its time is up (8s, 480s); --resume goes on"},
    {'s', "seed", "N", "of the proposals: the same seed proposes the same trials; default 1"},
    {ID_STORE, "store", "FILE", "the run's file; default evolve.db"},
    {ID_RESUME, "resume", NULL, "go on with the run in --store; everything else about it is in there"},
    {ID_CONFIRM, "confirm", NULL, "with --resume: propose nothing more, confirm what the run has found so far"},
    {ID_FROM, "from", "KERNEL",
     "start from this kernel and beat it: a name, or 'family arch NAME=value...'; default: the table's fastest"},
    {ID_TRY, "try", "SET", "begin with this set, 'family arch NAME=value...', in both arms; again: several"},
    {ID_FAMILY, "family", "PATTERN", "search in these families only ('fwd_mma', 'fwd_*'); default: all that can"},
    {ID_PROPOSER, "proposer", "COMMAND",
     "ask this program for each trial (docs/manual/evolve.md); default: the built-in one"},
    {ID_PROPOSER_TIMEOUT, "proposer-timeout", "T", "for one answer; default 120s"},
    {ID_PROPOSER_FOLDER, "proposer-folder", "DIR",
     "take the trials from this folder's files instead, in order of name; verdicts are written beside them"},
    {ID_INSIGHTS, "insights", "FILE", "a text that an external proposer is told"},
    {ID_PEERS, "peers", "torch", "time PyTorch beside the first slice, for the record"},
    {ID_PYTHON_PATH, "python-path", "DIR", "with --peers: where the Python package is"},
    {ID_NO_PROFILE, "no-profile", NULL, "cuda: take no Nsight Compute counters of the elites"},
    {ID_GPUS, "gpus", "N",
     "cuda: judge on so many GPUs side by side, equal ones from --device on; default 1; said again to --resume"},
    {ID_JUDGES, "judges", "N",
     "cuda: so many trials at once on each GPU, timed one by one; default 1; said again to --resume"},
    {ID_LAUNCHER, "launcher", "COMMAND",
     "judge by workers that this starts ('srun -n1 --gpus=1', 'ssh host'); said again to --resume"},
    {ID_WORKERS, "workers", "N", "so many at once, each with ACROMION_WORKER=0, 1, ...; default 1"},
    {ID_SURVEY, "survey", NULL,
     "rank problems by expected gain instead: those of a grid that nobody tuned, or the given"},
    {ID_ALL, "all", NULL, "with --survey: all of them, not ten"},
    {ID_GPU, "gpu", "NAME", "with --survey: for a GPU that is not here (`acromion roofline --gpu help`)"},
    {ID_RESULTS, "results", "FILE", "with --survey: times and peers as bench wrote them; else the cost models' word"},
    {ID_MEASURE, "measure", "T", "with --survey: time the kernels of each problem here, for so long in all"},
    {ID_INTO, "into", "DIR",
     "with --survey: search by rank for --time in all, a store for each problem in this folder"},
    {ID_TOP, "top", "N", "with --into: so many problems at most; default 10"},
    {ID_GENERATION, "generation", "N", "proposals of an arm made from the same archive; default 8, external 1"},
    {ID_CASES, "cases", "N", "visible and as many hidden cases of the correctness gate; default 8"},
    {ID_TREE, "tree", "DIR", "the source tree to compile from; default: where this program is"},
    {ID_SURROGATE, "surrogate", "on|off",
     "time what a model of the run's own trials expects most of; default on, off: a random move"},
    {ID_RACE, "race", "on|off", "stop timing a candidate as soon as its interval says that it cannot win; default on"},
    {ID_RETROSPECT, "retrospect", NULL,
     "show instead how soon searches find what people found by hand, and what `trials export` files hold"},
    {ID_CLOCK, "clock", "real|model", "model: nothing is timed, for tests of the search itself"},
};

typedef struct request {
    definition definition; /* what of it the options say */
    bool fixed;            /* an option that is fixed when a run begins was given */
    bool resume, confirm, peers, no_profiles;
    int gpus, judges, workers; /* workers 0: not said */
    bool survey, retrospect, all;
    const gpu_model *gpu;
    const char *results, *into;
    int top;
    const char *store, *from, *insights, *python_path, *tree, *launcher;
    double time_s, measure_s, proposer_timeout_s;
} request;

static const option_field fields[OPTIONS_MAX] = {
    {ID_TIME, OPTION_TIME, offsetof(request, time_s)},
    {ID_MEASURE, OPTION_TIME, offsetof(request, measure_s)},
    {ID_CONFIRM, OPTION_FLAG, offsetof(request, confirm)},
    {ID_PROPOSER_TIMEOUT, OPTION_TIME, offsetof(request, proposer_timeout_s)},
    {ID_RESUME, OPTION_FLAG, offsetof(request, resume)},
    {ID_STORE, OPTION_TEXT, offsetof(request, store)},
    {ID_INSIGHTS, OPTION_TEXT, offsetof(request, insights)},
    {ID_PYTHON_PATH, OPTION_TEXT, offsetof(request, python_path)},
    {ID_NO_PROFILE, OPTION_FLAG, offsetof(request, no_profiles)},
    {ID_LAUNCHER, OPTION_TEXT, offsetof(request, launcher)},
    {ID_SURVEY, OPTION_FLAG, offsetof(request, survey)},
    {ID_RETROSPECT, OPTION_FLAG, offsetof(request, retrospect)},
    {ID_ALL, OPTION_FLAG, offsetof(request, all)},
    {ID_RESULTS, OPTION_TEXT, offsetof(request, results)},
    {ID_INTO, OPTION_TEXT, offsetof(request, into)},
    {ID_TREE, OPTION_TEXT, offsetof(request, tree)},
};

static const command_spec spec = {
    .usage = "evolve [PROBLEM[@WEIGHT]...]",
    .examples = "  acromion evolve b2:h8:s512:d64 b2:h8:s512:d64:causal --time 480s --store mission.db\n"
                "  acromion evolve --resume --store mission.db --time 480s\n"
                "  acromion evolve --backend cpu f32:b1:h8:s256:d64 --trials 12\n"
                "  acromion trials list --store mission.db\n",
    .about = "Searches for a kernel that runs all the problems faster than the fastest of the table. Every candidate\n"
             "passes the gates of docs/manual/evolve.md in a process of its own; times are interleaved with the\n"
             "incumbent's; a random search with the same budget runs beside it; a winner counts once a fresh\n"
             "process with fresh seeds has confirmed it. No improvement is a result. Ctrl-C ends with the trial in\n"
             "flight, a second one at once. Exit code 0: the budget is used; 7: --resume goes on; 1: the proposer\n"
             "fails.\n",
    .options = options,
    .fields = fields,
    .common = COMMON_DEVICE | COMMON_JSON,
};

static bool take_text(const char *option, const char *value, char *out, size_t capacity)
{
    if (strlen(value) >= capacity) {
        fprintf(stderr, "acromion: --%s: longer than %zu characters\n", option, capacity - 1);
        return false;
    }
    snprintf(out, capacity, "%s", value);
    return true;
}

static bool take_switch(const char *option, const char *value, bool *out)
{
    *out = strcmp(value, "on") == 0;
    if (!*out && strcmp(value, "off") != 0) {
        fprintf(stderr, "acromion: --%s: '%s' is neither on nor off\n", option, value);
        return false;
    }
    return true;
}

/* A run goes on from wherever it is called. */
static bool take_folder(const char *value, char out[DEFINITION_TEXT_MAX])
{
    char *whole = realpath(value, NULL);
    if (!whole || access(whole, R_OK | W_OK | X_OK) != 0) {
        fprintf(stderr, "acromion: --proposer-folder: %s: %s\n", value, strerror(errno));
        free(whole);
        return false;
    }
    const bool fits = take_text("proposer-folder", whole, out, DEFINITION_TEXT_MAX);
    free(whole);
    return fits;
}

/* The options that are fixed when a run begins. */
static bool take_definition(request *r, int id, const char *value)
{
    definition *d = &r->definition;
    int64_t seed = 0;
    r->fixed = true;
    switch (id) {
    case 'n':
        return option_int32("trials", value, 1, 100000, &d->trials);
    case 's':
        if (!option_int("seed", value, 0, INT64_MAX, &seed)) {
            return false;
        }
        d->seed = (uint64_t)seed;
        return true;
    case ID_FROM:
        r->from = value;
        return true;
    case ID_TRY:
        if (!definition_add_try(d, value)) {
            fprintf(stderr, "acromion: --try: no ';', and all of them together shorter than %d characters\n",
                    DEFINITION_TEXT_MAX);
            return false;
        }
        return true;
    case ID_FAMILY:
        return take_text("family", value, d->families, sizeof d->families);
    case ID_PROPOSER:
        return take_text("proposer", value, d->proposer, sizeof d->proposer);
    case ID_PROPOSER_FOLDER:
        return take_folder(value, d->folder);
    case ID_SURROGATE:
        return take_switch("surrogate", value, &d->surrogate);
    case ID_RACE:
        return take_switch("race", value, &d->race);
    case ID_GENERATION:
        return option_int32("generation", value, 1, 256, &d->generation);
    case ID_CASES:
        if (!option_int32("cases", value, 1, 64, &d->visible_cases)) {
            return false;
        }
        d->hidden_cases = d->visible_cases;
        return true;
    default: /* ID_CLOCK */
        d->clock = strcmp(value, "model") == 0 ? GATES_CLOCK_MODEL : GATES_CLOCK_REAL;
        if (d->clock == GATES_CLOCK_REAL && strcmp(value, "real") != 0) {
            fprintf(stderr, "acromion: --clock: '%s' is neither real nor model\n", value);
            return false;
        }
        return true;
    }
}

static bool take_option(void *arg, int id, const char *value)
{
    request *r = arg;
    switch (id) {
    case ID_PEERS:
        r->peers = strcmp(value, "torch") == 0;
        if (!r->peers) {
            fprintf(stderr, "acromion: --peers: '%s' is not torch\n", value);
        }
        return r->peers;
    case ID_GPUS:
        return option_int32("gpus", value, 1, ENGINE_GPUS_MAX, &r->gpus);
    case ID_JUDGES:
        return option_int32("judges", value, 1, ENGINE_JUDGES_MAX, &r->judges);
    case ID_GPU:
        return gpu_asked(value, &r->gpu);
    case ID_TOP:
        return option_int32("top", value, 1, 1000, &r->top);
    case ID_WORKERS:
        return option_int32("workers", value, 1, ENGINE_WORKERS_MAX, &r->workers);
    default:
        return take_definition(r, id, value);
    }
}

/* ---- Problems ---- */

/* Splits PROBLEM@WEIGHT in place; false after saying what is wrong. */
static bool split_weight(char *operand, double *weight)
{
    char *at = strchr(operand, '@');
    *weight = 1.0;
    if (at) {
        *at = '\0';
        return option_double("weight", at + 1, 1e-3, 1e3, weight);
    }
    return true;
}

/* What all problems of one search share, since one kernel serves them all. */
static bool alike(const acr_problem *a, const acr_problem *b)
{
    return a->pass == b->pass && a->dtype == b->dtype && a->qk_dim == b->qk_dim && a->v_dim == b->v_dim;
}

/* The field in which two that are not alike differ. */
static const char *unlike_field(const acr_problem *a, const acr_problem *b)
{
    return a->pass != b->pass     ? "pass is bwd in some and fwd in others"
           : a->dtype != b->dtype ? "dtype differs"
                                  : "head dims differ";
}

/* What a problem's cache has beyond plain keys and values of q's type; NULL = nothing. */
static const char *cache_field(const acr_problem *p)
{
    return p->flags & ACR_PAGED               ? "page"
           : p->kv_dtype != ACR_DTYPE_DEFAULT ? "kv_dtype"
           : p->flags & ACR_V_IN_K            ? "v-in-k"
                                              : NULL;
}

static int take_problems(definition *d, char **operands, int count)
{
    double weights[DEFINITION_PROBLEMS_MAX] = {1.0};
    if (count > DEFINITION_PROBLEMS_MAX) {
        fprintf(stderr, "acromion evolve: at most %d problems\n", DEFINITION_PROBLEMS_MAX);
        return EXIT_USAGE;
    }
    for (int i = 0; i < count; ++i) {
        if (!split_weight(operands[i], &weights[i])) {
            return EXIT_USAGE;
        }
    }
    problem_list problems;
    int exit_code = problems_parse(operands, count, &problems);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    for (size_t i = 0; i < problems.count && exit_code == EXIT_DONE; ++i) {
        d->problems[i] = (gates_problem){problems.items[i], weights[i]};
        if (!alike(&problems.items[i], &problems.items[0])) {
            fprintf(stderr,
                    "acromion evolve: %s: the problems of one search share pass, type and head dims; search for each "
                    "kind by itself\n",
                    unlike_field(&problems.items[i], &problems.items[0]));
            exit_code = EXIT_USAGE;
        }
        const char *cache = cache_field(&problems.items[i]);
        if (cache) { /* the inputs of timed runs are drawn for plain tensors of one type */
            fprintf(stderr, "acromion evolve: %s is given: kernels for plain keys and values alone are searched for\n",
                    cache);
            exit_code = EXIT_CANNOT_RUN;
        }
    }
    d->problem_count = problems.count;
    problems_free(&problems);
    return exit_code;
}

/* ---- A new run ---- */

/* Hidden seeds nobody knows; with the model clock they follow from the seed, so that runs can be compared. */
static void choose_seeds(definition *d)
{
    enum {
        STREAM_VISIBLE = 101,
        STREAM_HIDDEN
    };
    d->visible_seed = random_bits(d->seed, STREAM_VISIBLE, 0);
    d->hidden_seed = random_bits(d->seed, STREAM_HIDDEN, 0);
    uint64_t chance = 0;
    if (d->clock == GATES_CLOCK_REAL && getrandom(&chance, sizeof chance, 0) == (ssize_t)sizeof chance) {
        d->hidden_seed = chance;
    }
}

static int define(request *r, const common_options *common, const char *tree)
{
    definition *d = &r->definition;
    acr_ctx *ctx = NULL;
    int exit_code = context_open(common, &ctx);
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    const acr__device *device = &acr__ctx_backend_device(ctx)->device;
    snprintf(d->backend, sizeof d->backend, "%s", device->backend == ACR__CUDA ? "cuda" : "cpu");
    d->threads = thread_count(common);
    d->generation = d->generation ? d->generation : definition_is_external(d) ? 1 : GENERATION_DEFAULT;
    choose_seeds(d);
    acr_status status = r->from ? definition_set_incumbent(d, r->from) : ACR_OK;
    if (status == ACR_OK && d->proposer[0] && d->folder[0]) {
        status = acr__fail(ACR_INVALID, "--proposer and --proposer-folder: one of the two");
    }
    if (status == ACR_OK && definition_is_external(d) && d->generation != 1) {
        status = acr__fail(ACR_INVALID, "--generation is 1 with an external proposer");
    }
    if (status == ACR_OK) {
        status = engine_define(d, ctx, tree);
    }
    acr_ctx_destroy(ctx);
    return status == ACR_OK ? EXIT_DONE : report_failure(status, "evolve");
}

static int check_gpus(const request *r)
{
    if (r->gpus > 1 && (r->launcher || r->workers)) {
        fprintf(stderr, "acromion evolve: --gpus is for GPUs of this machine, --launcher and --workers for workers: "
                        "one of the two\n");
        return EXIT_USAGE;
    }
    if (r->judges > 1 && (r->launcher || r->workers)) {
        fprintf(stderr, "acromion evolve: --judges is for GPUs of this machine, --workers says how many there are\n");
        return EXIT_USAGE;
    }
    if (r->gpus * r->judges > 1 && strcmp(r->definition.backend, "cuda") != 0) {
        fprintf(stderr, "acromion evolve: --gpus and --judges are for the backend cuda: a CPU is one device\n");
        return EXIT_USAGE;
    }
    return EXIT_DONE;
}

static acr_status create_store(store **out, const char *path, const definition *d)
{
    acr_status status = store_open(out, path, STORE_CREATE);
    json_t *json = definition_json(d);
    if (status == ACR_OK) {
        status = store_set_run(*out, json);
    }
    json_decref(json);
    return status;
}

static int begin(request *r, const common_options *common, const char *tree, store **out)
{
    if (access(r->store, F_OK) == 0) {
        fprintf(stderr, "acromion evolve: %s is there already: --resume goes on with it, another --store begins anew\n",
                r->store);
        return EXIT_FILE;
    }
    int exit_code = define(r, common, tree);
    exit_code = exit_code == EXIT_DONE ? check_gpus(r) : exit_code;
    if (exit_code != EXIT_DONE) {
        return exit_code;
    }
    acr_status status = create_store(out, r->store, &r->definition);
    return status == ACR_OK ? EXIT_DONE : report_failure(status, "store");
}

/* ---- An old run ---- */

static acr_status read_definition(definition *d, store *s)
{
    json_t *json = NULL;
    acr_status status = store_run(s, &json);
    if (status == ACR_OK) {
        status = definition_read(d, json);
    }
    json_decref(json);
    return status;
}

static int resume(request *r, const common_options *common, store **out)
{
    acr_status status = store_open(out, r->store, STORE_WRITE);
    if (status == ACR_OK) {
        status = read_definition(&r->definition, *out);
    }
    if (status == ACR_OK && common->backend && strcmp(common->backend, r->definition.backend) != 0) {
        status = acr__fail(ACR_UNSUPPORTED, "the run is one of the %s backend", r->definition.backend);
    }
    return status == ACR_OK ? check_gpus(r) : report_failure(status, "resume");
}

/* ---- Running ---- */

/* 1: finish the trial in flight; 2: end it. */
static volatile int stop_wanted;
static volatile pid_t searching; /* a survey's search, in a process group of its own; 0 = none */

static void want_stop(int signal_number)
{
    stop_wanted = stop_wanted == 0 ? 1 : 2;
    if (searching > 0) {
        kill(searching, signal_number);
    }
    if (stop_wanted == 2) {
        signal(signal_number, SIG_DFL);
    }
}

static void catch_signals(void)
{
    struct sigaction action = {.sa_handler = want_stop, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

static char *read_insights(const char *path)
{
    enum {
        BYTES_MAX = 64 << 10
    };
    FILE *file = fopen(path, "r");
    char *text = file ? calloc(1, BYTES_MAX + 1) : NULL;
    if (text && fread(text, 1, BYTES_MAX, file) == 0) {
        text[0] = '\0';
    }
    if (file) {
        fclose(file);
    }
    return text;
}

static acr_status print_summary(store *s, const definition *d, const char *path, bool json)
{
    if (!json) {
        return summary_print(stdout, s, d, path);
    }
    json_t *document = NULL;
    acr_status status = summary_json(&document, s, d, path);
    if (status == ACR_OK) {
        json_print(document);
    }
    return status;
}

static int exit_code_of(engine_end end)
{
    return end == ENGINE_COMPLETE ? EXIT_DONE : end == ENGINE_PROPOSER ? EXIT_FAILED : EXIT_UNFINISHED;
}

static int run(request *r, const common_options *common, const char *tree, store *s)
{
    char folder[512];
    snprintf(folder, sizeof folder, "%.500s.work", r->store);
    char *insights = r->insights ? read_insights(r->insights) : NULL;
    if (r->insights && !insights) {
        fprintf(stderr, "acromion evolve: %s: cannot be read\n", r->insights);
        return EXIT_FILE;
    }
    const engine_request wanted = {
        .definition = &r->definition,
        .resume = r->resume,
        .confirm = r->confirm,
        .store = s,
        .tree = tree,
        .folder = folder,
        .insights = insights,
        .peers_python = r->peers ? r->python_path : NULL,
        .no_profiles = r->no_profiles,
        .time_s = r->time_s,
        .proposer_timeout_s = r->proposer_timeout_s,
        .ordinal = common->device,
        .gpus = r->gpus,
        .judges = r->judges,
        .launcher = r->launcher || r->workers == 0 ? r->launcher : "",
        .workers = r->workers > 0 ? r->workers : 1,
        .threads = thread_count(common),
        .stop = &stop_wanted,
    };
    engine_end end = ENGINE_FAULT;
    catch_signals();
    acr_status status = engine_run(&wanted, &end);
    int exit_code = status == ACR_OK ? exit_code_of(end) : report_failure(status, "evolve");
    if (status == ACR_OK && end == ENGINE_PROPOSER) {
        fprintf(stderr, "acromion evolve: the proposer failed too often in a row; `acromion trials list` says how\n");
    }
    if (status == ACR_OK) {
        status = print_summary(s, &r->definition, r->store, common->json);
        exit_code = status == ACR_OK ? exit_code : report_failure(status, "summary");
    }
    free(insights);
    return exit_code;
}

/* --survey: what belongs to it, and nothing that it would leave aside. */
static int survey(const request *r, const common_options *common, int argc, char **argv, int first)
{
    const bool spends = r->into != NULL;
    const char *wrong = r->resume                      ? "--resume is for one run; a survey goes on by itself"
                        : spends && !(r->time_s > 0.0) ? "--into needs --time, which is what is spent"
                        : spends && (r->gpu != NULL)   ? "--into searches here, --gpu asks for a GPU that is not here"
                        : r->gpu && r->measure_s > 0.0 ? "--measure times here, --gpu asks for a GPU that is not here"
                        : !spends && r->time_s > 0.0   ? "--time is spent on searches: --into DIR says where to"
                        : spends && common->json       ? "--into prints its searches: no --json"
                                                       : NULL;
    if (wrong) {
        fprintf(stderr, "acromion evolve: --survey: %s\n", wrong);
        return EXIT_USAGE;
    }
    const survey_request wanted = {.common = common,
                                   .gpu = r->gpu,
                                   .measure_s = r->measure_s,
                                   .results = r->results,
                                   .all = r->all,
                                   .top = r->top,
                                   .into = r->into,
                                   .time_s = r->time_s,
                                   .problems = argv + first,
                                   .problem_count = argc - first,
                                   .options = argv + 1,
                                   .option_count = first - 1,
                                   .stop = &stop_wanted,
                                   .searching = &searching};
    catch_signals();
    return evolve_survey(&wanted);
}

/* --retrospect: its operands are files. */
static int retrospect(const request *r, const common_options *common, int argc, char **argv, int first)
{
    char tree[TREE_PATH_MAX];
    acr_status status = tree_find(tree, r->tree);
    if (status != ACR_OK) {
        return report_failure(status, "tree");
    }
    const definition *d = &r->definition;
    const retrospect_request wanted = {.common = common,
                                       .gpu = r->gpu ? r->gpu : gpu_find("h200"),
                                       .tree = tree,
                                       .only = d->families,
                                       .trials = d->trials,
                                       .generation = d->generation ? d->generation : GENERATION_DEFAULT,
                                       .recorded = argv + first,
                                       .recorded_count = argc - first,
                                       .threads = thread_count(common),
                                       .stop = &stop_wanted};
    catch_signals();
    return evolve_retrospect(&wanted);
}

int cmd_evolve(int argc, char **argv)
{
    common_options common;
    request r = {.definition = {.trials = TRIALS_DEFAULT,
                                .seed = 1,
                                .visible_cases = 8,
                                .hidden_cases = 8,
                                .surrogate = true,
                                .race = true},
                 .store = "evolve.db",
                 .python_path = "",
                 .gpus = 1,
                 .judges = 1,
                 .top = 10,
                 .proposer_timeout_s = 120.0};
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, take_option, &r, &exit_code);
    if (first < 0) {
        return exit_code;
    }
    if (r.retrospect) {
        return retrospect(&r, &common, argc, argv, first);
    }
    if (r.survey) {
        return survey(&r, &common, argc, argv, first);
    }
    if (r.all || r.gpu || r.results || r.into || r.measure_s > 0.0) {
        fprintf(stderr, "acromion evolve: --all, --gpu, --results, --measure and --into belong to --survey, --gpu to "
                        "--retrospect, too\n");
        return EXIT_USAGE;
    }
    if (r.confirm && !r.resume) {
        fprintf(stderr, "acromion evolve: --confirm belongs to --resume: a new run has found nothing yet\n");
        return EXIT_USAGE;
    }
    if (r.resume && (r.fixed || first < argc)) {
        fprintf(stderr, "acromion evolve: problems, trials, seed, proposer and the like are fixed when a run begins; "
                        "leave them out with --resume\n");
        return EXIT_USAGE;
    }
    char tree[TREE_PATH_MAX];
    acr_status status = tree_find(tree, r.tree);
    if (status != ACR_OK) {
        return report_failure(status, "tree");
    }
    store *s = NULL;
    exit_code = r.resume ? EXIT_DONE : take_problems(&r.definition, argv + first, argc - first);
    if (exit_code == EXIT_DONE) {
        exit_code = r.resume ? resume(&r, &common, &s) : begin(&r, &common, tree, &s);
    }
    if (exit_code == EXIT_DONE) {
        exit_code = run(&r, &common, tree, s);
    }
    store_close(s);
    definition_free(&r.definition);
    return exit_code;
}
