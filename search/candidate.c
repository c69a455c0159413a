/* Candidates as data, see candidate.h. */
#include "candidate.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "kernels/kernel_source.h"

enum {
    PARAMETERS_MAX = 32,
    PARAMETER_BYTES = 64
};

/* ---- Parameters ---- */

typedef struct parameter_list {
    char items[PARAMETERS_MAX][PARAMETER_BYTES];
    size_t count;
} parameter_list;

/* NAME=value: the length of its name, or 0 where it is none. */
static size_t name_length(const char *item)
{
    size_t name = strspn(item, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_");
    if (name == 0 || !isupper((unsigned char)item[0]) || item[name] != '=') {
        return 0;
    }
    const char *value = item + name + 1;
    size_t length = strspn(value, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_");
    return length > 0 && value[length] == '\0' ? name : 0;
}

static int compare_items(const void *a, const void *b)
{
    return strcmp(a, b);
}

static acr_status split_parameters(parameter_list *out, const char *text)
{
    out->count = 0;
    for (const char *at = text + strspn(text, " "); *at; at += strspn(at, " ")) {
        size_t length = strcspn(at, " ");
        if (out->count == PARAMETERS_MAX) {
            return acr__fail(ACR_INVALID, "parameters: more than %d of them", (int)PARAMETERS_MAX);
        }
        if (length >= PARAMETER_BYTES) {
            return acr__fail(ACR_INVALID, "parameters: \"%.*s...\" is longer than %d characters", 20, at,
                             PARAMETER_BYTES - 1);
        }
        char *item = out->items[out->count++];
        memcpy(item, at, length);
        item[length] = '\0';
        if (name_length(item) == 0) {
            return acr__fail(ACR_INVALID, "parameters: \"%s\" is not NAME=value", item);
        }
        at += length;
    }
    qsort(out->items, out->count, sizeof out->items[0], compare_items);
    for (size_t i = 1; i < out->count; ++i) {
        size_t name = name_length(out->items[i]);
        if (strncmp(out->items[i - 1], out->items[i], name + 1) == 0) {
            return acr__fail(ACR_INVALID, "parameters: %.*s is given twice", (int)name, out->items[i]);
        }
    }
    return ACR_OK;
}

/* The list as canonical text; the caller frees it. */
static char *join_parameters(const parameter_list *list)
{
    const size_t capacity = list->count * (PARAMETER_BYTES + 1) + 1;
    char *text = calloc(1, capacity);
    for (size_t i = 0, used = 0; text && i < list->count; ++i) {
        const int wrote = snprintf(text + used, capacity - used, "%s%s", i ? " " : "", list->items[i]);
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    return text;
}

void candidate_complete_set(char *set, size_t capacity, const char *others)
{
    for (const char *at = others + strspn(others, " "); *at; at += strspn(at, " ")) {
        const size_t item = strcspn(at, " "), length = strlen(set);
        if (!kernel_set_find(set, at, strcspn(at, "="))) {
            snprintf(set + length, capacity - length, " %.*s", (int)item, at);
        }
        at += item;
    }
}

/* ---- Making and freeing ---- */

static bool is_word(const char *text)
{
    size_t length = strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_");
    return length > 0 && length < 64 && text[length] == '\0';
}

static acr_status backend_of_arch(acr__backend_id *out, const char *arch)
{
    static const char *const cpu[] = {"portable", "avx2", "avx512", "avx512bf16"};
    for (size_t i = 0; i < sizeof cpu / sizeof cpu[0]; ++i) {
        if (strcmp(arch, cpu[i]) == 0) {
            *out = ACR__CPU;
            return ACR_OK;
        }
    }
    size_t digits = strspn(arch, "0123456789");
    if (digits < 2 || digits > 3 || strspn(arch + digits, "af") != strlen(arch + digits) || strlen(arch) > digits + 1) {
        return acr__fail(ACR_INVALID, "arch: \"%s\" is none of portable, avx2, avx512, avx512bf16, 80, 90a, ...", arch);
    }
    *out = ACR__CUDA;
    return ACR_OK;
}

static char *copy_or_null(const char *text)
{
    return text ? strdup(text) : NULL;
}

acr_status candidate_of_source(candidate *out, const char *name, const char *arch, const char *parameters,
                               const char *source, const char *descriptor)
{
    parameter_list list;
    candidate c = {.backend = ACR__CPU};
    if (!is_word(name)) {
        return acr__fail(ACR_INVALID, "family: \"%.64s\" is not a word of at most 63 characters", name);
    }
    acr_status status = backend_of_arch(&c.backend, arch);
    if (status == ACR_OK) {
        status = split_parameters(&list, parameters);
    }
    if (status != ACR_OK) {
        return status;
    }
    c.family = strdup(name);
    c.arch = strdup(arch);
    c.parameters = join_parameters(&list);
    c.source = copy_or_null(source);
    c.descriptor = copy_or_null(descriptor);
    if (!c.family || !c.arch || !c.parameters || (source && !c.source) || (descriptor && !c.descriptor)) {
        candidate_free(&c);
        return acr__fail(ACR_NO_MEMORY, "no memory for a candidate");
    }
    *out = c;
    return ACR_OK;
}

acr_status candidate_of_family(candidate *out, const char *family, const char *arch, const char *parameters)
{
    return candidate_of_source(out, family, arch, parameters, NULL, NULL);
}

/* ---- The lines of kernels.def ---- */

typedef struct table_line {
    const char *name, *family, *arch, *parameters;
} table_line;

static const table_line lines[] = {
#define KERNEL(kernel, family_name, arch_name, ...) {#kernel, #family_name, #arch_name, #__VA_ARGS__},
#include "kernels.def"
#undef KERNEL
};
enum {
    LINE_COUNT = sizeof lines / sizeof lines[0]
};

static const table_line *find_line(const char *kernel_name)
{
    for (size_t i = 0; i < LINE_COUNT; ++i) {
        if (strcmp(lines[i].name, kernel_name) == 0) {
            return &lines[i];
        }
    }
    return NULL;
}

acr_status candidate_of_kernel(candidate *out, const char *kernel_name)
{
    const table_line *line = find_line(kernel_name);
    return line ? candidate_of_family(out, line->family, line->arch, line->parameters)
                : acr__fail(ACR_INVALID, "kernel: \"%.100s\" is not in kernels.def", kernel_name);
}

bool candidate_name_is_listed(const char *kernel_name)
{
    return find_line(kernel_name) != NULL;
}

static bool same_items(const parameter_list *a, const parameter_list *b)
{
    for (size_t i = 0; i < a->count && a->count == b->count; ++i) {
        if (strcmp(a->items[i], b->items[i]) != 0) {
            return false;
        }
    }
    return a->count == b->count;
}

const char *candidate_listed_name(const char *family, const char *arch, const char *parameters)
{
    parameter_list wanted, of_line;
    if (split_parameters(&wanted, parameters) != ACR_OK) {
        return NULL;
    }
    for (size_t i = 0; i < LINE_COUNT; ++i) {
        if (strcmp(lines[i].family, family) == 0 && strcmp(lines[i].arch, arch) == 0 &&
            split_parameters(&of_line, lines[i].parameters) == ACR_OK && same_items(&wanted, &of_line)) {
            return lines[i].name;
        }
    }
    return NULL;
}

acr_status candidate_copy(candidate *out, const candidate *from)
{
    return candidate_of_source(out, from->family, from->arch, from->parameters, from->source, from->descriptor);
}

void candidate_free(candidate *c)
{
    free(c->family);
    free(c->arch);
    free(c->parameters);
    free(c->source);
    free(c->descriptor);
    *c = (candidate){.backend = ACR__CPU};
}

/* ---- Reading ---- */

void candidate_text(char out[CANDIDATE_TEXT_MAX], const candidate *c)
{
    int used =
        snprintf(out, CANDIDATE_TEXT_MAX, "%s %s%s%s", c->family, c->arch, *c->parameters ? " " : "", c->parameters);
    if (c->source && used > 0 && used < CANDIDATE_TEXT_MAX) {
        snprintf(out + used, CANDIDATE_TEXT_MAX - (size_t)used, " source=%016llx",
                 (unsigned long long)XXH3_64bits(c->source, strlen(c->source)));
    }
}

bool candidate_parameter(const candidate *c, const char *name, char *out, size_t capacity)
{
    const size_t length = strlen(name);
    const char *item = kernel_set_find(c->parameters, name, length);
    if (item) {
        const char *value = item + length + 1;
        snprintf(out, capacity, "%.*s", (int)strcspn(value, " "), value);
    }
    return item != NULL;
}
