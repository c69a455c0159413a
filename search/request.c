/* Requests to external proposers and their answers, see request.h. */
#include "request.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "answers.h"
#include "base/json.h"
#include "tree.h"

enum {
    FAILURES_TOLD = 8 /* the latest */
};

/* ---- The task ---- */

static acr_status task_json(const request_inputs *in, json_t **out)
{
    const definition *d = in->definition;
    json_t *profile = NULL;
    acr_status status = store_profile_json(in->store, 0, &profile);
    if (status != ACR_OK) {
        return status;
    }
    json_t *problems = json_array();
    for (size_t i = 0; i < in->control->timing_count; ++i) {
        const trial_timing *t = &in->control->timings[i];
        json_array_append_new(problems, json_pack("{s:s, s:f, s:o, s:o}", "problem", t->problem, "weight", t->weight,
                                                  "floor_us", json_number_or_null(t->floor_us), "incumbent_us",
                                                  json_number_or_null(t->incumbent.p50)));
    }
    json_t *incumbent =
        json_pack("{s:s, s:s, s:s, s:s, s:o}", "kernel", d->incumbent_kernel, "family", d->incumbent.family, "arch",
                  d->incumbent.arch, "parameters", d->incumbent.parameters, "profile", profile);
    *out = json_pack("{s:s, s:o, s:o, s:o}", "goal",
                     "a kernel that runs all problems correctly in less time than the incumbent: the weighted "
                     "geometric mean of the speed-ups counts",
                     "problems", problems, "incumbent", incumbent, "noise_floor",
                     json_number_or_null(in->control->overall.noise_floor));
    return ACR_OK;
}

static json_t *device_json(const acr__device *d)
{
    if (d->backend == ACR__CPU) {
        return json_pack("{s:s, s:s, s:i, s:I}", "backend", "cpu", "name", d->name, "threads", (int)d->threads,
                         "last_level_cache_bytes", (json_int_t)d->l2_bytes);
    }
    return json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:I}", "backend", "cuda", "name", d->name, "capability",
                     (int)d->arch, "sm_count", (int)d->sm_count, "smem_per_cta_bytes", (int)d->smem_per_cta_bytes,
                     "smem_per_sm_bytes", (int)d->smem_per_sm_bytes, "regs_per_sm", (int)d->regs_per_sm, "l2_bytes",
                     (json_int_t)d->l2_bytes);
}

/* ---- Spaces ---- */

static json_t *gene_json(const space_gene *g)
{
    json_t *values = json_array();
    for (int i = 0; i < g->count; ++i) {
        json_array_append_new(values, json_integer(g->values[i]));
    }
    json_t *json = json_pack("{s:s, s:b, s:o}", "name", g->name, "macro", (int)g->macro, "values", values);
    if (g->has_default) {
        json_object_set_new(json, "default", json_integer(g->default_value));
    }
    return json;
}

static json_t *space_json(const space *s)
{
    json_t *archs = json_array(), *parameters = json_array(), *rules = json_array();
    for (int i = 0; i < s->arch_count; ++i) {
        json_array_append_new(archs, json_string(s->archs[i]));
    }
    for (int i = 0; i < s->gene_count; ++i) {
        json_array_append_new(parameters, gene_json(&s->genes[i]));
    }
    for (int i = 0; i < s->rule_count; ++i) {
        const space_rule *rule = &s->rules[i];
        json_array_append_new(
            rules, rule->name[0] ? json_pack("{s:s, s:s}", "let", rule->name, "is", rule->expression)
                                 : json_pack("{s:s, s:s}", "require", rule->expression, "reason", rule->reason));
    }
    return json_pack("{s:s, s:o, s:s, s:s, s:I, s:o, s:o}", "family", s->family, "archs", archs, "fixed", s->fixed,
                     "dim", s->dim.name, "dim_value", (json_int_t)s->dim_value, "parameters", parameters, "rules",
                     rules);
}

/* ---- Trials ---- */

/* Takes keys over from an object. */
static void take_keys(json_t *to, json_t *from, const char *const *keys)
{
    for (; *keys; ++keys) {
        json_object_set(to, *keys, json_object_get(from, *keys));
    }
}

static json_t *elite_json(const request_inputs *in, int64_t trial, acr_status *status)
{
    static const char *const keys[] = {"id",      "cell",        "kernel",       "family",  "arch",      "parameters",
                                       "speedup", "speedup_low", "speedup_high", "verdict", "resources", "timings",
                                       "profile", "source_text", "rationale",    NULL};
    json_t *whole = NULL, *elite = NULL;
    *status = store_trial_json(in->store, trial, false, &whole);
    if (*status == ACR_OK) {
        elite = json_object();
        take_keys(elite, whole, keys);
        json_decref(whole);
    }
    return elite;
}

static acr_status elites_json(const request_inputs *in, json_t **out)
{
    const member *elites[ARCHIVE_ELITES];
    int count = archive_elites(&in->fold->learnt[ARM_SEARCH], elites);
    acr_status status = ACR_OK;
    *out = json_array();
    for (int i = 0; i < count && status == ACR_OK; ++i) {
        if (elites[i]->trial > 0) { /* the incumbent is in the task */
            json_array_append_new(*out, elite_json(in, elites[i]->trial, &status));
        }
    }
    return status;
}

/* Whether the case that failed is one that proposers must not learn of. */
static bool failed_hidden(const json_t *whole)
{
    const json_t *cases = json_object_get(whole, "cases");
    for (size_t i = 0; i < json_array_size(cases); ++i) {
        const json_t *c = json_array_get(cases, i);
        if (!json_integer_value(json_object_get(c, "pass"))) {
            return json_integer_value(json_object_get(c, "hidden")) != 0;
        }
    }
    return false;
}

static json_t *failure_json(const request_inputs *in, int64_t trial, acr_status *status)
{
    static const char *const keys[] = {"id",   "kernel", "family",      "arch",        "parameters", "status",
                                       "gate", "detail", "source_text", "answer_text", "rationale",  NULL};
    json_t *whole = NULL, *failure = NULL;
    *status = store_trial_json(in->store, trial, false, &whole);
    if (*status == ACR_OK) {
        failure = json_object();
        take_keys(failure, whole, keys);
        if (failed_hidden(whole)) {
            json_object_set_new(failure, "detail", json_string("a hidden case failed"));
        }
        json_decref(whole);
    }
    return failure;
}

static acr_status failures_json(const request_inputs *in, json_t **out)
{
    const archive *learnt = &in->fold->learnt[ARM_SEARCH];
    acr_status status = ACR_OK;
    *out = json_array();
    for (size_t i = learnt->count; i-- > 0 && json_array_size(*out) < FAILURES_TOLD && status == ACR_OK;) {
        if (!learnt->items[i].valid) {
            json_array_append_new(*out, failure_json(in, learnt->items[i].trial, &status));
        }
    }
    return status;
}

/* ---- History: every trial of the search in a few words ---- */

static bool add_history(void *arg, const trial_view *v)
{
    if (v->row.arm == ARM_SEARCH && v->finished) {
        json_array_append_new(arg, json_pack("{s:I, s:s, s:s, s:s, s:s, s:o}", "id", (json_int_t)v->row.id, "family",
                                             v->row.family, "arch", v->row.arch, "parameters", v->row.parameters,
                                             "status", v->status, "speedup", json_number_or_null(v->speedup)));
    }
    return true;
}

/* ---- Insights: what single values of parameters did ---- */

typedef struct effect {
    int tries, valid;
    double best, log_sum;
} effect;

static void add_effect(effect *e, const member *m)
{
    ++e->tries;
    if (m->valid && isfinite(m->speedup)) {
        e->best = e->valid == 0 || m->speedup > e->best ? m->speedup : e->best;
        e->log_sum += log(m->speedup);
        ++e->valid;
    }
}

static void append_effects(json_t *to, const space_list *spaces, int family, int gene, const archive *learnt)
{
    const space_gene *g = &spaces->items[family].genes[gene];
    effect effects[SPACE_VALUES_MAX] = {{0, 0, 0.0, 0.0}};
    for (size_t i = 0; i < learnt->count; ++i) {
        const member *m = &learnt->items[i];
        if (m->has_genome && m->genome.space == family && m->trial > 0) {
            add_effect(&effects[m->genome.choice[gene]], m);
        }
    }
    for (int v = 0; v < g->count; ++v) {
        const effect *e = &effects[v];
        if (e->tries > 0) {
            json_array_append_new(
                to, json_pack("{s:s, s:s, s:I, s:i, s:i, s:o, s:o}", "family", spaces->items[family].family,
                              "parameter", g->name, "value", (json_int_t)g->values[v], "trials", e->tries, "valid",
                              e->valid, "best_speedup", e->valid ? json_real(e->best) : json_null(), "mean_speedup",
                              e->valid ? json_real(exp(e->log_sum / e->valid)) : json_null()));
        }
    }
}

/* Text that grows. */
typedef struct notes {
    char *text;
    size_t length;
} notes;

static bool append_note(notes *n, const char *line)
{
    const size_t added = strlen(line);
    char *text = realloc(n->text, n->length + added + 1);
    if (text) {
        memcpy(text + n->length, line, added + 1);
        n->text = text;
        n->length += added;
    }
    return text != NULL;
}

/* What a proposer said that it had learnt when it proposed the trial, and how that ended. */
static bool add_insight(void *arg, const json_t *trial, const json_t *answer)
{
    const char *insight = answers_text(answer, "insight"), *status = answers_text(trial, "status");
    const json_t *speedup = json_object_get(trial, "speedup");
    if (!*insight) {
        return true;
    }
    char line[2048], figure[40] = "";
    if (json_is_number(speedup)) {
        snprintf(figure, sizeof figure, ", %.3f times", json_number_value(speedup));
    }
    snprintf(line, sizeof line, "[trial %lld, %s: %s%s] %.1800s\n",
             (long long)json_integer_value(json_object_get(trial, "id")), answers_text(trial, "kernel"),
             *status ? status : "in flight", figure, insight);
    return append_note(arg, line);
}

/* The user's words first; they grow with the run. NULL = none; malloc'd. */
static char *notes_of(const request_inputs *in, acr_status *status)
{
    notes n = {NULL, 0};
    if (in->insights) {
        append_note(&n, in->insights);
        append_note(&n, n.length > 0 && n.text[n.length - 1] != '\n' ? "\n" : "");
    }
    *status = answers_each(in->store, add_insight, &n);
    return n.text;
}

static json_t *insights_json(const request_inputs *in, acr_status *status)
{
    json_t *effects = json_array();
    char *text = notes_of(in, status);
    for (int s = 0; s < in->spaces->count; ++s) {
        for (int g = 0; g < in->spaces->items[s].gene_count; ++g) {
            append_effects(effects, in->spaces, s, g, &in->fold->learnt[ARM_SEARCH]);
        }
    }
    json_t *json = json_pack("{s:o, s:s?}", "effects", effects, "notes", text);
    free(text);
    return json;
}

/* ---- The request ---- */

static acr_status sources_json(const request_inputs *in, json_t **out)
{
    acr_status status = ACR_OK;
    *out = json_object();
    for (int i = 0; i < in->spaces->count && status == ACR_OK; ++i) {
        char *text = NULL;
        status = tree_family_source(&text, in->tree, in->spaces->items[i].family);
        if (status == ACR_OK) {
            json_object_set_new(*out, in->spaces->items[i].family, json_string(text));
        }
        free(text);
    }
    return status;
}

acr_status request_make(char **out, const request_inputs *in)
{
    const arm_counts *c = &in->fold->counts[ARM_SEARCH];
    json_t *spaces = json_array(), *history = json_array(), *elites = NULL, *failures = NULL, *sources = NULL;
    json_t *task = NULL;
    for (int i = 0; i < in->spaces->count; ++i) {
        json_array_append_new(spaces, space_json(&in->spaces->items[i]));
    }
    acr_status status = elites_json(in, &elites);
    if (status == ACR_OK) {
        status = failures_json(in, &failures);
    }
    if (status == ACR_OK) {
        status = sources_json(in, &sources);
    }
    if (status == ACR_OK) {
        status = task_json(in, &task);
    }
    if (status == ACR_OK) {
        status = store_trials(in->store, add_history, history);
    }
    json_t *insights = status == ACR_OK ? insights_json(in, &status) : NULL;
    json_t *counts =
        json_pack("{s:I, s:I, s:I, s:I, s:i}", "proposed", (json_int_t)c->proposed, "distinct", (json_int_t)c->distinct,
                  "valid", (json_int_t)c->valid, "improved", (json_int_t)c->improved, "budget", in->definition->trials);
    json_t *request = json_pack("{s:i, s:I, s:o*, s:o, s:o, s:o, s:o*, s:o*, s:o*, s:o, s:o*}", "protocol", 1, "trial",
                                (json_int_t)in->trial, "task", task, "device", device_json(in->device), "counts",
                                counts, "spaces", spaces, "elites", elites, "failures", failures, "sources", sources,
                                "history", history, "insights", insights);
    *out = status == ACR_OK && request ? json_dumps(request, JSON_INDENT(1)) : NULL;
    json_decref(request);
    return status == ACR_OK && !*out ? acr__fail(ACR_NO_MEMORY, "no memory for a request") : status;
}

acr_status request_verdict(char **out, const request_inputs *in, int64_t trial)
{
    static const char *const keys[] = {
        "id",          "kernel",      "status",  "gate",    "detail",      "is_distinct",
        "original",    "is_improved", "verdict", "speedup", "speedup_low", "speedup_high",
        "noise_floor", "resources",   "timings", "profile", NULL};
    json_t *whole = NULL, *insights = NULL;
    *out = NULL;
    acr_status status = store_trial_json(in->store, trial, false, &whole);
    if (status == ACR_OK) {
        insights = insights_json(in, &status);
    }
    json_t *verdict_told = json_object();
    if (status == ACR_OK) {
        take_keys(verdict_told, whole, keys);
        if (failed_hidden(whole)) {
            json_object_set_new(verdict_told, "detail", json_string("a hidden case failed"));
        }
        json_object_set(verdict_told, "confirmations", json_object_get(whole, "confirmations"));
        json_object_set(verdict_told, "insights", insights);
        *out = json_dumps(verdict_told, JSON_INDENT(1));
    }
    json_decref(verdict_told);
    json_decref(insights);
    json_decref(whole);
    return status == ACR_OK && !*out ? acr__fail(ACR_NO_MEMORY, "no memory for a verdict") : status;
}

/* ---- The answer ---- */

static void refuse(request_trial *t, proposer_status status, const char *what)
{
    t->status = status;
    snprintf(t->detail, sizeof t->detail, "%s", what);
}

static void take_text(char *out, size_t capacity, const json_t *answer, const char *key)
{
    const char *text = json_string_value(json_object_get(answer, key));
    snprintf(out, capacity, "%s", text ? text : "");
}

/* {"Q_TILE": 64} or {"DTYPE": "ACR_F32"} as NAME=value words. */
static void take_parameters(request_trial *t, json_t *parameters)
{
    if (!json_is_object(parameters)) {
        const char *text = json_string_value(parameters);
        snprintf(t->parameters, sizeof t->parameters, "%s", text ? text : "");
        return;
    }
    const char *name = NULL;
    json_t *value = NULL;
    size_t at = 0;
    json_object_foreach(parameters, name, value)
    {
        char text[64];
        if (json_is_integer(value)) {
            snprintf(text, sizeof text, "%lld", (long long)json_integer_value(value));
        } else {
            snprintf(text, sizeof text, "%s", json_is_string(value) ? json_string_value(value) : "?");
        }
        int length = snprintf(t->parameters + at, sizeof t->parameters - at, "%s%s=%s", at > 0 ? " " : "", name, text);
        at += length > 0 && (size_t)length < sizeof t->parameters - at ? (size_t)length : 0;
    }
}

static char *copy_member(const json_t *answer, const char *key)
{
    const json_t *value = json_object_get(answer, key);
    const char *text = json_string_value(value);
    return json_is_object(value) ? json_dumps(value, JSON_COMPACT) : text ? strdup(text) : NULL;
}

/* Fixed parameters may be given or left out: they are added where they are missing. */
static void complete_parameters(request_trial *t, const space *s)
{
    char fixed[SPACE_PARAMETERS_MAX];
    snprintf(fixed, sizeof fixed, "%s %s=%lld", s->fixed, s->dim.name, (long long)s->dim_value);
    candidate_complete_set(t->parameters, sizeof t->parameters, fixed);
}

static void accept_set(request_trial *t, const space_list *spaces, const archive *proposed)
{
    char reason[SPACE_REASON_MAX] = "no such family to search in";
    for (int i = 0; i < spaces->count; ++i) {
        const space *s = &spaces->items[i];
        genome g = {.space = i};
        if (strcmp(s->family, t->family) != 0) {
            continue;
        }
        complete_parameters(t, s);
        if (!space_point(s, t->arch, t->parameters, &g, reason) || !space_legal(s, &g, reason)) {
            break;
        }
        space_parameters(s, &g, t->parameters);
        space_kernel_name(s, &g, t->kernel);
        space_cell(s, &g, t->cell);
        if (archive_has(proposed, spaces, &g)) {
            refuse(t, PROPOSER_REPEATED, "this set was proposed before");
        }
        return;
    }
    refuse(t, PROPOSER_ILLEGAL, reason);
}

static void accept_source(request_trial *t, const json_t *answer)
{
    candidate c = {.family = NULL};
    take_text(t->family, sizeof t->family, answer, "name");
    t->source = copy_member(answer, "source");
    t->descriptor = copy_member(answer, "descriptor");
    if (candidate_of_source(&c, t->family, t->arch, t->parameters, t->source ? t->source : "", t->descriptor) !=
        ACR_OK) {
        refuse(t, PROPOSER_MALFORMED, acr_last_error());
        return;
    }
    snprintf(t->kernel, sizeof t->kernel, "%.64s", t->family); /* words have at most 63 characters */
    snprintf(t->parameters, sizeof t->parameters, "%s", c.parameters);
    const char *macro = json_string_value(json_object_get(answer, "macro"));
    snprintf(t->cell, sizeof t->cell, "source %s %.200s", t->arch, macro ? macro : t->family);
    candidate_free(&c);
}

void request_accept(request_trial *out, const json_t *answer, const space_list *spaces, const archive *proposed)
{
    *out = (request_trial){.status = PROPOSER_ANSWERED};
    take_text(out->family, sizeof out->family, answer, "family");
    take_text(out->arch, sizeof out->arch, answer, "arch");
    take_parameters(out, json_object_get(answer, "parameters"));
    out->rationale = copy_member(answer, "rationale");
    if (json_object_get(answer, "source")) {
        accept_source(out, answer);
    } else {
        accept_set(out, spaces, proposed);
    }
}

void request_trial_free(request_trial *trial)
{
    free(trial->source);
    free(trial->descriptor);
    free(trial->rationale);
    *trial = (request_trial){.status = PROPOSER_ANSWERED};
}
