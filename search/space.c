/* Spaces of kernel families, see space.h. */
#include "space.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "candidate.h"
#include "expression.h"

enum {
    LINE_MAX_BYTES = 400
};

/* ---- Reading ---- */

/* The next word of a line; NULL at its end. */
static char *next_word(char **at)
{
    while (isspace((unsigned char)**at)) {
        ++*at;
    }
    if (!**at) {
        return NULL;
    }
    char *word = *at;
    while (**at && !isspace((unsigned char)**at)) {
        ++*at;
    }
    if (**at) {
        *(*at)++ = '\0';
    }
    return word;
}

static bool parse_value(const char *text, int64_t *out)
{
    char *end = NULL;
    *out = strtoll(text, &end, 10);
    return end != text && !*end;
}

static bool is_name(const char *text)
{
    if (!text || !(isupper((unsigned char)*text)) || strlen(text) >= SPACE_NAME_MAX) {
        return false;
    }
    return strspn(text, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") == strlen(text);
}

/* NAME VALUE... [default VALUE] [tag TAG] */
static const char *read_gene(space_gene *g, char *rest)
{
    const char *name = next_word(&rest);
    if (!is_name(name)) {
        return "a parameter's name in capitals is missing";
    }
    *g = (space_gene){.count = 0};
    snprintf(g->name, sizeof g->name, "%s", name);
    for (char *word = next_word(&rest); word; word = next_word(&rest)) {
        int64_t value = 0;
        if (strcmp(word, "default") == 0) {
            word = next_word(&rest);
            if (!word || !parse_value(word, &g->default_value)) {
                return "default needs a value";
            }
            g->has_default = true;
        } else if (strcmp(word, "tag") == 0) {
            word = next_word(&rest);
            if (!word || strlen(word) >= sizeof g->tag) {
                return "tag needs a few letters";
            }
            snprintf(g->tag, sizeof g->tag, "%s", word);
        } else if (!parse_value(word, &value)) {
            return "a value is no whole number";
        } else if (g->count == SPACE_VALUES_MAX) {
            return "too many values";
        } else if (g->count > 0 && value <= g->values[g->count - 1]) {
            return "the values do not ascend";
        } else {
            g->values[g->count++] = value;
        }
    }
    return g->count > 0 ? NULL : "values are missing";
}

static const char *read_archs(space *s, char *rest)
{
    for (char *word = next_word(&rest); word; word = next_word(&rest)) {
        if (s->arch_count == SPACE_ARCHS_MAX || strlen(word) >= SPACE_NAME_MAX) {
            return "too many architectures";
        }
        snprintf(s->archs[s->arch_count++], SPACE_NAME_MAX, "%s", word);
    }
    return s->arch_count > 0 ? NULL : "architectures are missing";
}

static const char *read_dtype(space *s, char *rest)
{
    static const char *const names[] = {[ACR_F32] = "f32", [ACR_F16] = "f16", [ACR_BF16] = "bf16", [ACR_E4M3] = "e4m3"};
    const char *word = next_word(&rest);
    for (size_t dtype = 0; word && dtype < sizeof names / sizeof names[0]; ++dtype) {
        if (names[dtype] && strcmp(names[dtype], word) == 0 && s->dtype_count <= ACR_E4M3) {
            space_dtype *d = &s->dtypes[s->dtype_count++];
            d->dtype = (acr_dtype)dtype;
            const char *parameter = next_word(&rest);
            snprintf(d->parameters, sizeof d->parameters, "%s", parameter ? parameter : "");
            return next_word(&rest) ? "a type has one parameter at most" : NULL;
        }
    }
    return "the type is none of f32 f16 bf16 e4m3";
}

static const char *read_pass(space *s, char *rest)
{
    const char *word = next_word(&rest);
    if (!word || next_word(&rest) || (strcmp(word, "fwd") != 0 && strcmp(word, "bwd") != 0)) {
        return "pass needs fwd or bwd";
    }
    s->pass = strcmp(word, "bwd") == 0 ? ACR_BACKWARD : ACR_FORWARD;
    return NULL;
}

/* none, or the parameter of the variants for packed batches. */
static const char *read_packed(space *s, char *rest)
{
    const char *word = next_word(&rest);
    if (!word || next_word(&rest) || (strcmp(word, "none") != 0 && !strchr(word, '='))) {
        return "packed needs `none` or one NAME=value";
    }
    s->refuses_packed = strcmp(word, "none") == 0;
    snprintf(s->packed_parameter, sizeof s->packed_parameter, "%s", s->refuses_packed ? "" : word);
    return NULL;
}

/* What follows the '=' of a let, or a condition; the reason comes after '#'. */
static const char *read_rule(space *s, bool let, char *rest, const char *comment)
{
    if (s->rule_count == SPACE_CONDITIONS_MAX) {
        return "too many lets and conditions";
    }
    space_rule *rule = &s->rules[s->rule_count++];
    *rule = (space_rule){.name = ""};
    if (let) {
        const char *name = next_word(&rest), *equals = next_word(&rest);
        if (!is_name(name) || !equals || strcmp(equals, "=") != 0) {
            return "not NAME = expression";
        }
        snprintf(rule->name, sizeof rule->name, "%s", name);
    }
    while (isspace((unsigned char)*rest)) {
        ++rest;
    }
    size_t length = strlen(rest);
    while (length > 0 && isspace((unsigned char)rest[length - 1])) {
        --length;
    }
    if (length == 0 || length >= SPACE_TEXT_MAX) {
        return "the expression is missing or too long";
    }
    snprintf(rule->expression, sizeof rule->expression, "%.*s", (int)length, rest);
    while (isspace((unsigned char)*comment)) {
        ++comment;
    }
    if (!let && !*comment) {
        return "a condition needs its reason: require EXPRESSION # reason";
    }
    snprintf(rule->reason, sizeof rule->reason, "%s", comment);
    return NULL;
}

static const char *read_listed_gene(space *s, bool macro, char *rest)
{
    if (s->gene_count == SPACE_GENES_MAX) {
        return "too many parameters";
    }
    space_gene *g = &s->genes[s->gene_count];
    const char *wrong = read_gene(g, rest);
    g->macro = macro;
    if (!wrong && macro && s->gene_count > 0 && !s->genes[s->gene_count - 1].macro) {
        return "macro parameters come before micro ones";
    }
    ++s->gene_count;
    return wrong;
}

static const char *read_line(space *s, char *line)
{
    char *comment = strchr(line, '#');
    if (comment) {
        *comment++ = '\0';
    }
    char *rest = line;
    const char *directive = next_word(&rest);
    if (!directive) {
        return NULL;
    }
    if (strcmp(directive, "pass") == 0) {
        return read_pass(s, rest);
    }
    if (strcmp(directive, "arch") == 0) {
        return read_archs(s, rest);
    }
    if (strcmp(directive, "dtype") == 0) {
        return read_dtype(s, rest);
    }
    if (strcmp(directive, "dim") == 0) {
        return s->dim.count ? "a second head dim" : read_gene(&s->dim, rest);
    }
    if (strcmp(directive, "v_dim") == 0) {
        return s->v_dim.count ? "a second head dim of values" : read_gene(&s->v_dim, rest);
    }
    if (strcmp(directive, "packed") == 0) {
        return read_packed(s, rest);
    }
    if (strcmp(directive, "constant") == 0) {
        bool room = s->constant_count < (int)(sizeof s->constants / sizeof s->constants[0]);
        return room ? read_gene(&s->constants[s->constant_count++], rest) : "too many constants";
    }
    if (strcmp(directive, "macro") == 0 || strcmp(directive, "micro") == 0) {
        return read_listed_gene(s, directive[1] == 'a', rest);
    }
    if (strcmp(directive, "let") == 0 || strcmp(directive, "require") == 0) {
        return read_rule(s, directive[0] == 'l', rest, comment ? comment : "");
    }
    return "none of pass arch dtype dim v_dim packed constant macro micro let require";
}

static acr_status read_text(space *out, const char *path, const char *text, size_t size)
{
    int number = 0;
    for (const char *at = text, *end = text + size; at < end; ++number) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        size_t length = stop ? (size_t)(stop - at) : (size_t)(end - at);
        char line[LINE_MAX_BYTES];
        const char *wrong = "the line is too long";
        if (length < sizeof line) {
            snprintf(line, sizeof line, "%.*s", (int)length, at);
            wrong = read_line(out, line);
        }
        if (wrong) {
            return acr__fail(ACR_FORMAT, "%s:%d: %s", path, number + 1, wrong);
        }
        at += length + 1;
    }
    if (!out->arch_count || !out->dtype_count || !out->dim.count || !out->gene_count) {
        return acr__fail(ACR_FORMAT, "%s: arch, dtype, dim or parameters are missing", path);
    }
    return ACR_OK;
}

acr_status space_read(space *out, const char *path)
{
    *out = (space){.arch_count = 0};
    const char *name = strrchr(path, '/');
    name = name ? name + 1 : path;
    snprintf(out->family, sizeof out->family, "%.*s", (int)strcspn(name, "."), name);
    const void *bytes = NULL;
    size_t size = 0;
    acr_status status = file_map(path, &bytes, &size);
    if (status == ACR_OK) {
        status = read_text(out, path, bytes, size);
        file_unmap(bytes, size);
    }
    return status;
}

/* ---- Binding and legality ---- */

static bool arch_runs(const char *arch, const acr__device *device)
{
    if (device->backend == ACR__CPU) {
        uint32_t isa = strcmp(arch, "portable") == 0     ? ACR__ISA_PORTABLE
                       : strcmp(arch, "avx2") == 0       ? ACR__ISA_AVX2
                       : strcmp(arch, "avx512") == 0     ? ACR__ISA_AVX512
                       : strcmp(arch, "avx512bf16") == 0 ? ACR__ISA_AVX512BF16
                                                         : 0;
        return (device->isa & isa) != 0;
    }
    char *end = NULL;
    long capability = strtol(arch, &end, 10);
    return end != arch && (*end == 'a' ? device->arch == capability : device->arch >= capability);
}

/* The smallest value of a head dim's parameter that serves `wanted`; 0 = none. */
static int64_t smallest_serving(const space_gene *dim, int64_t wanted)
{
    int64_t value = 0;
    for (int i = dim->count - 1; i >= 0 && dim->values[i] >= wanted; --i) {
        value = dim->values[i];
    }
    return value;
}

static const char *dtype_parameter(const space *s, acr_dtype dtype)
{
    for (int i = 0; i < s->dtype_count; ++i) {
        if (s->dtypes[i].dtype == dtype) {
            return s->dtypes[i].parameters;
        }
    }
    return NULL;
}

static bool any_packed(const search_scene *scene, bool packed)
{
    for (size_t i = 0; i < scene->count; ++i) {
        if (((scene->problems[i].flags & ACR_PACKED) != 0) == packed) {
            return true;
        }
    }
    return false;
}

/* An empty text adds nothing. */
static void append(char *out, size_t capacity, const char *separator, const char *text)
{
    size_t length = strlen(out);
    if (*text) {
        snprintf(out + length, capacity - length, "%s%s", length > 0 ? separator : "", text);
    }
}

/* Binds what the head dims decide. */
static bool bind_dims(space *s, const acr_problem *p, char reason[SPACE_REASON_MAX])
{
    s->dim_value = smallest_serving(&s->dim, p->qk_dim > p->v_dim ? p->qk_dim : p->v_dim);
    if (!s->dim_value) {
        snprintf(reason, SPACE_REASON_MAX, "%s serves head dims up to %lld", s->family,
                 (long long)s->dim.values[s->dim.count - 1]);
        return false;
    }
    const int64_t v_dim = s->v_dim.count > 0 ? smallest_serving(&s->v_dim, p->v_dim) : 0;
    s->v_dim_value = v_dim > 0 && v_dim < s->dim_value ? v_dim : s->dim_value;
    if (s->v_dim_value != s->dim_value) {
        char text[SPACE_NAME_MAX + 24];
        snprintf(text, sizeof text, "%s=%lld", s->v_dim.name, (long long)s->v_dim_value);
        append(s->fixed, sizeof s->fixed, " ", text);
    }
    return true;
}

static bool bind_packed(space *s, char reason[SPACE_REASON_MAX])
{
    const bool some = any_packed(s->scene, true);
    s->is_packed = s->packed_parameter[0] && some;
    if (some && s->refuses_packed) {
        snprintf(reason, SPACE_REASON_MAX, "%s takes no packed batches", s->family);
    } else if (s->is_packed && any_packed(s->scene, false)) {
        snprintf(reason, SPACE_REASON_MAX, "%s has variants for packed batches alone, and not all problems are packed",
                 s->family);
    } else {
        append(s->fixed, sizeof s->fixed, " ", s->is_packed ? s->packed_parameter : "");
        return true;
    }
    return false;
}

bool space_bind(space *s, const search_scene *scene, char reason[SPACE_REASON_MAX])
{
    const char *dtype = dtype_parameter(s, scene->problems[0].dtype);
    s->scene = scene;
    if (s->pass != scene->problems[0].pass) {
        snprintf(reason, SPACE_REASON_MAX, "%s computes %s", s->family,
                 s->pass == ACR_BACKWARD ? "gradients" : "the forward pass");
        return false;
    }
    if (!dtype) {
        snprintf(reason, SPACE_REASON_MAX, "%s does not serve this dtype", s->family);
        return false;
    }
    snprintf(s->fixed, sizeof s->fixed, "%s", dtype);
    if (!bind_dims(s, &scene->problems[0], reason) || !bind_packed(s, reason)) {
        return false;
    }
    for (int i = 0; i < s->arch_count; ++i) {
        if (arch_runs(s->archs[i], scene->device)) {
            return true;
        }
    }
    snprintf(reason, SPACE_REASON_MAX, "%s has no architecture that runs on %s", s->family, scene->device->name);
    return false;
}

/* What expressions can name: parameters, lets before this one, the problem, the device. */
typedef struct names {
    const space *space;
    const genome *genome;
    const acr_problem *problem;
    int let_count;
    int64_t lets[SPACE_CONDITIONS_MAX]; /* by index of the rule */
} names;

static bool same(const char *name, size_t length, const char *known)
{
    return strlen(known) == length && strncmp(name, known, length) == 0;
}

static bool lookup_choice(const names *n, const char *name, size_t length, int64_t *value)
{
    const space *s = n->space;
    for (int i = 0; i < s->gene_count; ++i) {
        if (same(name, length, s->genes[i].name)) {
            *value = s->genes[i].values[n->genome->choice[i]];
            return true;
        }
    }
    for (int i = 0; i < s->constant_count; ++i) {
        if (same(name, length, s->constants[i].name)) {
            *value = s->constants[i].values[0];
            return true;
        }
    }
    for (int i = 0; i < n->let_count; ++i) {
        if (s->rules[i].name[0] && same(name, length, s->rules[i].name)) {
            *value = n->lets[i];
            return true;
        }
    }
    if (same(name, length, s->dim.name)) {
        *value = s->dim_value;
        return true;
    }
    if (s->v_dim.count > 0 && same(name, length, s->v_dim.name)) {
        *value = s->v_dim_value;
        return true;
    }
    return false;
}

static bool lookup(void *arg, const char *name, size_t length, int64_t *value)
{
    const names *n = arg;
    const acr_problem *p = n->problem;
    const acr__device *d = n->space->scene->device;
    if (lookup_choice(n, name, length, value)) {
        return true;
    }
    if (length > 5 && strncmp(name, "arch_", 5) == 0) {
        *value = same(name + 5, length - 5, n->space->archs[n->genome->arch]);
        return true;
    }
    if (length > 6 && strncmp(name, "dtype_", 6) == 0) {
        *value = same(name + 6, length - 6, acr__dtype_text(p->dtype));
        return true;
    }
    const struct {
        const char *name;
        int64_t value;
    } known[] = {
        {"batch", p->batch},
        {"q_heads", p->q_heads},
        {"kv_heads", p->kv_heads},
        {"q_len", p->q_len},
        {"kv_len", p->kv_len},
        {"qk_dim", p->qk_dim},
        {"v_dim", p->v_dim},
        {"elem_bytes", acr__dtype_bytes(p->dtype)},
        {"masked", visible_is_limited(acr__rule_of(p))},
        {"terms", acr__terms_of(p)},
        {"packed", (p->flags & ACR_PACKED) != 0},
        {"capability", d->arch},
        {"sm_count", d->sm_count},
        {"smem_per_cta_bytes", d->smem_per_cta_bytes},
        {"threads", d->threads},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; ++i) {
        if (same(name, length, known[i].name)) {
            *value = known[i].value;
            return true;
        }
    }
    return false;
}

static bool legal_for(const space *s, const genome *g, const acr_problem *problem, char reason[SPACE_REASON_MAX])
{
    names n = {.space = s, .genome = g, .problem = problem};
    for (int i = 0; i < s->rule_count; ++i) {
        const space_rule *rule = &s->rules[i];
        char error[EXPRESSION_ERROR_MAX];
        int64_t value = 0;
        if (!expression_eval(rule->expression, lookup, &n, &value, error)) {
            snprintf(reason, SPACE_REASON_MAX, "%s.space: %.60s: %.120s", s->family, rule->expression, error);
            return false;
        }
        n.lets[i] = value;
        n.let_count = i + 1;
        if (!rule->name[0] && !value) {
            snprintf(reason, SPACE_REASON_MAX, "%s", rule->reason);
            return false;
        }
    }
    return true;
}

bool space_legal(const space *s, const genome *g, char reason[SPACE_REASON_MAX])
{
    if (!arch_runs(s->archs[g->arch], s->scene->device)) {
        snprintf(reason, SPACE_REASON_MAX, "%s does not run on %s", s->archs[g->arch], s->scene->device->name);
        return false;
    }
    for (size_t i = 0; i < s->scene->count; ++i) {
        if (!legal_for(s, g, &s->scene->problems[i], reason)) {
            return false;
        }
    }
    return true;
}

/* ---- Text ---- */

static void append_value(char *out, size_t capacity, const char *separator, const char *name, int64_t value)
{
    char text[64];
    snprintf(text, sizeof text, "%s%lld", name, (long long)value);
    append(out, capacity, separator, text);
}

static void append_genes(const space *s, const genome *g, bool macro_only, char out[SPACE_PARAMETERS_MAX])
{
    for (int i = 0; i < s->gene_count; ++i) {
        const space_gene *gene = &s->genes[i];
        int64_t value = gene->values[g->choice[i]];
        bool named = macro_only ? gene->macro : !gene->has_default || value != gene->default_value;
        if (named) {
            char name[SPACE_NAME_MAX + 1];
            snprintf(name, sizeof name, "%s=", gene->name);
            append_value(out, SPACE_PARAMETERS_MAX, " ", name, value);
        }
    }
}

/* A gene with its first value; nothing of one that the space does not have. */
static void append_first(char out[SPACE_PARAMETERS_MAX], const space_gene *gene)
{
    char name[SPACE_NAME_MAX + 1];
    snprintf(name, sizeof name, "%s=", gene->name);
    if (gene->count > 0) {
        append_value(out, SPACE_PARAMETERS_MAX, " ", name, gene->values[0]);
    }
}

void space_names(const space *s, char out[SPACE_PARAMETERS_MAX])
{
    snprintf(out, SPACE_PARAMETERS_MAX, "%s", s->packed_parameter);
    for (int i = 0; i < s->dtype_count; ++i) {
        const size_t length = strlen(out);
        snprintf(out + length, SPACE_PARAMETERS_MAX - length, " %s", s->dtypes[i].parameters);
    }
    append_first(out, &s->dim);
    append_first(out, &s->v_dim);
    for (int i = 0; i < s->gene_count; ++i) {
        append_first(out, &s->genes[i]);
    }
}

void space_parameters(const space *s, const genome *g, char out[SPACE_PARAMETERS_MAX])
{
    char dim[SPACE_NAME_MAX + 1];
    snprintf(dim, sizeof dim, "%s=", s->dim.name);
    snprintf(out, SPACE_PARAMETERS_MAX, "%s", s->fixed);
    append_value(out, SPACE_PARAMETERS_MAX, " ", dim, s->dim_value);
    append_genes(s, g, false, out);
}

void space_cell(const space *s, const genome *g, char out[SPACE_PARAMETERS_MAX])
{
    snprintf(out, SPACE_PARAMETERS_MAX, "%s %s", s->family, s->archs[g->arch]);
    append_genes(s, g, true, out);
}

/* The value of a parameter, a constant or a let at a point; false where there is none of that name. */
static bool value_at(const space *s, const genome *g, const char *name, int64_t *value)
{
    names n = {.space = s, .genome = g, .problem = &s->scene->problems[0]};
    char error[EXPRESSION_ERROR_MAX];
    for (; n.let_count < s->rule_count; ++n.let_count) {
        const space_rule *rule = &s->rules[n.let_count];
        if (rule->name[0] && !expression_eval(rule->expression, lookup, &n, &n.lets[n.let_count], error)) {
            return false;
        }
    }
    return lookup_choice(&n, name, strlen(name), value);
}

/* A parameter that is on or off: its tag is a word of the name, without the value. */
static bool is_switch(const space_gene *g)
{
    return g->count == 2 && g->values[0] == 0 && g->values[1] == 1;
}

/* What a name tells of the parameters that have a tag. */
typedef enum name_detail {
    NAME_SHORT, /* those that are not at their default, and the switches that are on */
    NAME_WHOLE, /* defaults, too */
    NAME_EVERY  /* switches that are off, too */
} name_detail;

/* By the naming rule. */
static void compose_name(const space *s, const genome *g, name_detail detail, char out[WISDOM_KERNEL_MAX])
{
    static const char *const dtype_names[] = {
        [ACR_F32] = "f32", [ACR_F16] = "f16", [ACR_BF16] = "bf16", [ACR_E4M3] = "e4m3"};
    const char *arch = s->archs[g->arch];
    int64_t q_tile = 0, kv_tile = 0, stages = 0;
    char traits[WISDOM_KERNEL_MAX] = "", words[WISDOM_KERNEL_MAX] = "";
    value_at(s, g, "Q_TILE", &q_tile);
    value_at(s, g, "KV_TILE", &kv_tile);
    snprintf(out, WISDOM_KERNEL_MAX, "%s_%s_d%lld_%lldx%lld", s->family, dtype_names[s->scene->problems[0].dtype],
             (long long)s->dim_value, (long long)q_tile, (long long)kv_tile);
    if (value_at(s, g, "STAGES", &stages)) {
        append_value(out, WISDOM_KERNEL_MAX, "_", "s", stages);
    }
    for (int i = 0; i < s->gene_count; ++i) {
        const space_gene *gene = &s->genes[i];
        int64_t value = gene->values[g->choice[i]];
        if (is_switch(gene)) {
            append(words, sizeof words, "_", value || detail == NAME_EVERY ? gene->tag : "");
            append(words, sizeof words, "", value || detail != NAME_EVERY ? "" : "0");
        } else if (gene->tag[0] && (detail >= NAME_WHOLE || !gene->has_default || value != gene->default_value)) {
            append_value(traits, sizeof traits, "", gene->tag, value);
        }
    }
    if (s->v_dim_value != s->dim_value) {
        append_value(traits, sizeof traits, "", "v", s->v_dim_value);
    }
    append(words, sizeof words, "_", s->is_packed ? "packed" : "");
    append(out, WISDOM_KERNEL_MAX, "_", traits);
    append(out, WISDOM_KERNEL_MAX, "_", words);
    append(out, WISDOM_KERNEL_MAX, isdigit((unsigned char)arch[0]) ? "_sm" : "_", arch);
}

void space_kernel_name(const space *s, const genome *g, char out[WISDOM_KERNEL_MAX])
{
    char parameters[SPACE_PARAMETERS_MAX];
    space_parameters(s, g, parameters);
    const char *listed = candidate_listed_name(s->family, s->archs[g->arch], parameters);
    if (listed) {
        snprintf(out, WISDOM_KERNEL_MAX, "%s", listed);
        return;
    }
    for (name_detail detail = NAME_SHORT; detail <= NAME_EVERY; ++detail) {
        compose_name(s, g, detail, out);
        if (!candidate_name_is_listed(out)) {
            return;
        }
    }
}

/* ---- From text ---- */

static int index_of_value(const space_gene *g, int64_t value)
{
    for (int i = 0; i < g->count; ++i) {
        if (g->values[i] == value) {
            return i;
        }
    }
    return -1;
}

/* The n-th of the parameters that every set has, as a word; false after the last. */
static bool fixed_word(const space *s, int n, char out[SPACE_TEXT_MAX])
{
    char text[SPACE_TEXT_MAX];
    snprintf(text, sizeof text, "%s", s->fixed);
    char *rest = text, *word = next_word(&rest);
    for (; word && n > 0; --n) {
        word = next_word(&rest);
    }
    snprintf(out, SPACE_TEXT_MAX, "%s", word ? word : "");
    return word != NULL;
}

enum {
    FIXED_BIT = 16 /* the first of those for fixed parameters, behind a bit for each gene */
};
_Static_assert((int)SPACE_GENES_MAX <= (int)FIXED_BIT, "bits of genes and of fixed parameters are apart");

/* Takes NAME=value into the point; false with the reason. */
static bool take_parameter(const space *s, genome *g, uint32_t *given, char *word, char reason[SPACE_REASON_MAX])
{
    char fixed[SPACE_TEXT_MAX];
    for (int i = 0; fixed_word(s, i, fixed); ++i) {
        if (strcmp(word, fixed) == 0) {
            *given |= 1u << (FIXED_BIT + i);
            return true;
        }
    }
    char *equals = strchr(word, '=');
    int64_t value = 0;
    if (!equals || !parse_value(equals + 1, &value)) {
        snprintf(reason, SPACE_REASON_MAX, "'%.60s' is not NAME=whole number, and not one of '%.80s'", word, s->fixed);
        return false;
    }
    *equals = '\0';
    if (strcmp(word, s->dim.name) == 0) {
        bool fits = value == s->dim_value;
        if (!fits) {
            snprintf(reason, SPACE_REASON_MAX, "%s is %lld for these problems", word, (long long)s->dim_value);
        }
        return fits;
    }
    for (int i = 0; i < s->gene_count; ++i) {
        if (strcmp(s->genes[i].name, word) == 0) {
            g->choice[i] = index_of_value(&s->genes[i], value);
            *given |= 1u << i;
            if (g->choice[i] < 0) {
                snprintf(reason, SPACE_REASON_MAX, "%s=%lld is not among the values of %s.space", word,
                         (long long)value, s->family);
            }
            return g->choice[i] >= 0;
        }
    }
    snprintf(reason, SPACE_REASON_MAX, "%s has no parameter %.60s", s->family, word);
    return false;
}

bool space_point(const space *s, const char *arch, const char *parameters, genome *out, char reason[SPACE_REASON_MAX])
{
    char text[SPACE_PARAMETERS_MAX];
    genome g = {.arch = -1};
    uint32_t given = 0;
    for (int i = 0; i < s->arch_count; ++i) {
        g.arch = strcmp(s->archs[i], arch) == 0 ? i : g.arch;
    }
    if (g.arch < 0) {
        snprintf(reason, SPACE_REASON_MAX, "%s has no arch %.60s", s->family, arch);
        return false;
    }
    if (strlen(parameters) >= sizeof text) {
        snprintf(reason, SPACE_REASON_MAX, "the parameters are longer than %d characters", SPACE_PARAMETERS_MAX - 1);
        return false;
    }
    snprintf(text, sizeof text, "%s", parameters);
    char *rest = text;
    for (char *word = next_word(&rest); word; word = next_word(&rest)) {
        if (!take_parameter(s, &g, &given, word, reason)) {
            return false;
        }
    }
    char fixed[SPACE_TEXT_MAX];
    for (int i = 0; fixed_word(s, i, fixed); ++i) {
        if (!(given & 1u << (FIXED_BIT + i))) {
            snprintf(reason, SPACE_REASON_MAX, "%s is missing", fixed);
            return false;
        }
    }
    for (int i = 0; i < s->gene_count; ++i) {
        const space_gene *gene = &s->genes[i];
        if (!(given & 1u << i)) {
            g.choice[i] = gene->has_default ? index_of_value(gene, gene->default_value) : -1;
        }
        if (g.choice[i] < 0) {
            snprintf(reason, SPACE_REASON_MAX, "%s=... is missing", gene->name);
            return false;
        }
    }
    g.space = out->space;
    *out = g;
    return true;
}
