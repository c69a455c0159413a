/* The definition of a run, see definition.h. */
#include "definition.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tree.h"

void definition_free(definition *d)
{
    candidate_free(&d->incumbent);
}

/* ---- To JSON ---- */

/* 64 bits as text: JSON's numbers are doubles to many readers. */
static json_t *bits_json(uint64_t value)
{
    return json_sprintf("%llu", (unsigned long long)value);
}

static json_t *problems_json(const definition *d)
{
    json_t *problems = json_array();
    for (size_t i = 0; i < d->problem_count; ++i) {
        char text[ACR_PROBLEM_TEXT_MAX];
        acr_problem_format(&d->problems[i].problem, text, sizeof text);
        json_array_append_new(problems, json_pack("{s:s, s:f}", "problem", text, "weight", d->problems[i].weight));
    }
    return problems;
}

static json_t *spaces_json(const definition *d)
{
    json_t *spaces = json_object();
    for (int i = 0; i < d->space_count; ++i) {
        json_object_set_new(spaces, d->spaces[i].family, json_string(d->spaces[i].digest));
    }
    return spaces;
}

bool definition_is_external(const definition *d)
{
    return d->proposer[0] || d->folder[0];
}

json_t *definition_json(const definition *d)
{
    const candidate *c = &d->incumbent;
    json_t *incumbent = json_pack("{s:s, s:s, s:s, s:s, s:b}", "kernel", d->incumbent_kernel, "family", c->family,
                                  "arch", c->arch, "parameters", c->parameters, "chosen_by_user", d->from);
    return json_pack(
        "{s:o, s:s, s:s, s:i, s:o, s:o, s:o, s:i, s:i, s:i, s:i, s:i, s:s, s:s, s:s, s:s, s:s, s:b, s:b, s:o, s:o}",
        "problems", problems_json(d), "backend", d->backend, "device", d->device_key, "threads", (int)d->threads,
        "seed", bits_json(d->seed), "visible_seed", bits_json(d->visible_seed), "hidden_seed",
        bits_json(d->hidden_seed), "trials", d->trials, "generation", d->generation, "blocks", d->blocks,
        "visible_cases", d->visible_cases, "hidden_cases", d->hidden_cases, "families", d->families, "proposer",
        d->proposer, "proposer_folder", d->folder, "tries", d->tries, "clock",
        d->clock == GATES_CLOCK_MODEL ? "model" : "real", "surrogate", (int)d->surrogate, "race", (int)d->race,
        "incumbent", incumbent, "spaces", spaces_json(d));
}

/* ---- From JSON ---- */

static bool read_text(const json_t *json, const char *key, char *out, size_t capacity)
{
    const char *text = json_string_value(json_object_get(json, key));
    bool fits = text && strlen(text) < capacity;
    snprintf(out, capacity, "%s", fits ? text : "");
    return fits;
}

static bool read_int(const json_t *json, const char *key, int *out)
{
    const json_t *value = json_object_get(json, key);
    *out = (int)json_integer_value(value);
    return json_is_integer(value);
}

static bool read_bits(const json_t *json, const char *key, uint64_t *out)
{
    const char *text = json_string_value(json_object_get(json, key));
    *out = text ? strtoull(text, NULL, 10) : 0;
    return text != NULL;
}

static acr_status read_problems(definition *d, const json_t *problems)
{
    d->problem_count = json_array_size(problems);
    if (d->problem_count < 1 || d->problem_count > DEFINITION_PROBLEMS_MAX) {
        return acr__fail(ACR_FORMAT, "the run has no problems, or more than %d", DEFINITION_PROBLEMS_MAX);
    }
    acr_status status = ACR_OK;
    for (size_t i = 0; i < d->problem_count && status == ACR_OK; ++i) {
        const json_t *entry = json_array_get(problems, i);
        const char *text = json_string_value(json_object_get(entry, "problem"));
        d->problems[i].weight = json_number_value(json_object_get(entry, "weight"));
        status = acr_problem_parse(&d->problems[i].problem, text ? text : "", NULL);
        if (status == ACR_OK) {
            status = acr_problem_canonical(&d->problems[i].problem, &d->problems[i].problem);
        }
    }
    return status;
}

static acr_status read_incumbent(definition *d, const json_t *json)
{
    char family[DEFINITION_TEXT_MAX], arch[SPACE_NAME_MAX], parameters[DEFINITION_TEXT_MAX];
    bool complete = read_text(json, "kernel", d->incumbent_kernel, sizeof d->incumbent_kernel) &&
                    read_text(json, "family", family, sizeof family) && read_text(json, "arch", arch, sizeof arch) &&
                    read_text(json, "parameters", parameters, sizeof parameters);
    d->from = json_is_true(json_object_get(json, "chosen_by_user"));
    return complete ? candidate_of_family(&d->incumbent, family, arch, parameters)
                    : acr__fail(ACR_FORMAT, "the run's incumbent is incomplete");
}

static void read_spaces(definition *d, const json_t *spaces)
{
    const char *family = NULL;
    json_t *digest = NULL;
    json_object_foreach((json_t *)(uintptr_t)spaces, family, digest)
    {
        if (d->space_count < SPACES_MAX && json_is_string(digest)) {
            snprintf(d->spaces[d->space_count].family, SPACE_NAME_MAX, "%s", family);
            snprintf(d->spaces[d->space_count].digest, 17, "%s", json_string_value(digest));
            ++d->space_count;
        }
    }
}

acr_status definition_read(definition *out, const json_t *json)
{
    *out = (definition){.problem_count = 0};
    char clock[8];
    int threads = 0;
    bool complete =
        read_text(json, "backend", out->backend, sizeof out->backend) &&
        read_text(json, "device", out->device_key, sizeof out->device_key) && read_int(json, "threads", &threads) &&
        read_bits(json, "seed", &out->seed) && read_bits(json, "visible_seed", &out->visible_seed) &&
        read_bits(json, "hidden_seed", &out->hidden_seed) && read_int(json, "trials", &out->trials) &&
        read_int(json, "generation", &out->generation) && read_int(json, "blocks", &out->blocks) &&
        read_int(json, "visible_cases", &out->visible_cases) && read_int(json, "hidden_cases", &out->hidden_cases) &&
        read_text(json, "families", out->families, sizeof out->families) &&
        read_text(json, "proposer", out->proposer, sizeof out->proposer) &&
        read_text(json, "clock", clock, sizeof clock);
    if (!complete) {
        return acr__fail(ACR_FORMAT, "the definition of the run is incomplete");
    }
    (void)read_text(json, "proposer_folder", out->folder, sizeof out->folder); /* older runs have none */
    (void)read_text(json, "tries", out->tries, sizeof out->tries);
    out->surrogate = json_is_true(json_object_get(json, "surrogate"));
    out->race = json_is_true(json_object_get(json, "race"));
    out->threads = (uint32_t)threads;
    out->clock = strcmp(clock, "model") == 0 ? GATES_CLOCK_MODEL : GATES_CLOCK_REAL;
    read_spaces(out, json_object_get(json, "spaces"));
    acr_status status = read_problems(out, json_object_get(json, "problems"));
    return status == ACR_OK ? read_incumbent(out, json_object_get(json, "incumbent")) : status;
}

/* ---- Spaces and the incumbent ---- */

acr_status definition_note_spaces(definition *d, const space_list *spaces, const char *tree)
{
    acr_status status = ACR_OK;
    d->space_count = spaces->count;
    for (int i = 0; i < spaces->count && status == ACR_OK; ++i) {
        snprintf(d->spaces[i].family, SPACE_NAME_MAX, "%s", spaces->items[i].family);
        status = tree_space_digest(d->spaces[i].digest, tree, spaces->items[i].family);
    }
    return status;
}

/* The digest that the run began with; NULL = the family had no part in it. */
static const char *digest_of(const definition *d, const char *family)
{
    for (int i = 0; i < d->space_count; ++i) {
        if (strcmp(d->spaces[i].family, family) == 0) {
            return d->spaces[i].digest;
        }
    }
    return NULL;
}

static void note_difference(char *out, size_t capacity, const char *family, const char *what)
{
    size_t length = strlen(out);
    snprintf(out + length, capacity - length, "%s%s.space %s", length > 0 ? ", " : "", family, what);
}

acr_status definition_check_spaces(const definition *d, const space_list *spaces, const char *tree)
{
    char found[400] = "";
    for (int i = 0; i < d->space_count; ++i) {
        char digest[17];
        if (tree_space_digest(digest, tree, d->spaces[i].family) != ACR_OK) {
            note_difference(found, sizeof found, d->spaces[i].family, "is gone");
        } else if (strcmp(digest, d->spaces[i].digest) != 0) {
            note_difference(found, sizeof found, d->spaces[i].family, "has changed");
        }
    }
    for (int i = 0; spaces && i < spaces->count; ++i) {
        if (!digest_of(d, spaces->items[i].family)) {
            note_difference(found, sizeof found, spaces->items[i].family, "is new");
        }
    }
    return found[0] ? acr__fail(ACR_FORMAT,
                                "the spaces are not those that the run began with (%s), so its proposals would not "
                                "follow from its seed any more: begin another run with another --store; `acromion "
                                "trials` still reads this one",
                                found)
                    : ACR_OK;
}

bool definition_add_try(definition *d, const char *text)
{
    const size_t length = strlen(d->tries);
    const int more = snprintf(d->tries + length, sizeof d->tries - length, "%s%s", length > 0 ? ";" : "", text);
    return !strchr(text, ';') && length + (size_t)more < sizeof d->tries;
}

bool definition_next_try(definition_try *out, const char **at)
{
    char text[DEFINITION_TEXT_MAX];
    int rest = 0;
    const size_t length = strcspn(*at, ";");
    if (length == 0) {
        return false;
    }
    snprintf(text, sizeof text, "%.*s", (int)length, *at);
    *at += length + ((*at)[length] == ';');
    *out = (definition_try){.family = ""};
    (void)sscanf(text, "%31s %31s %n", out->family, out->arch, &rest);
    snprintf(out->parameters, sizeof out->parameters, "%s", text + rest);
    return true;
}

acr_status definition_set_incumbent(definition *d, const char *text)
{
    char family[SPACE_NAME_MAX], arch[SPACE_NAME_MAX];
    int rest = 0;
    d->from = true;
    candidate_free(&d->incumbent);
    if (!strchr(text, ' ')) {
        snprintf(d->incumbent_kernel, sizeof d->incumbent_kernel, "%s", text);
        return candidate_of_kernel(&d->incumbent, text);
    }
    if (sscanf(text, "%31s %31s %n", family, arch, &rest) < 2) {
        return acr__fail(ACR_INVALID, "'%s' is neither a kernel's name nor `family arch NAME=value...`", text);
    }
    acr_status status = candidate_of_family(&d->incumbent, family, arch, text + rest);
    if (status == ACR_OK) {
        snprintf(d->incumbent_kernel, sizeof d->incumbent_kernel, "%s %s (given)", family, arch);
    }
    return status;
}
