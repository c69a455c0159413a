/* What a candidate's text may contain, see admission.h. */
#include "admission.h"

#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/kernel_source.h"

/* ---- The text as the compiler's first phases see it ---- */

/* Takes out line splices: a backslash and a newline, with blanks between them as compilers allow. */
static void splice_lines(char *text)
{
    char *to = text;
    for (const char *at = text; *at;) {
        const size_t blanks = *at == '\\' ? strspn(at + 1, " \t\r\v\f") : 0;
        if (*at == '\\' && at[1 + blanks] == '\n') {
            at += 2 + blanks;
        } else {
            *to++ = *at++;
        }
    }
    *to = '\0';
}

/* Past a literal that begins at `at`: at its closing quote, the end of the line, or of the text. */
static const char *literal_end(const char *at)
{
    const char quote = *at++;
    while (*at && *at != quote && *at != '\n') {
        at += *at == '\\' && at[1] ? 2 : 1;
    }
    return at;
}

/* Past a comment that begins at `at`: at its last character, or the end of the text. */
static const char *comment_end(const char *at)
{
    const char *end = at[1] == '/' ? strchr(at, '\n') : strstr(at + 2, "*/");
    return end ? end + (at[1] == '/' ? -1 : 1) : at + strlen(at);
}

/* Takes out comments; literals stay, lines stay where they are. False for a raw literal, which would be taken for an
 * ordinary one here. */
static bool strip_comments(char *text)
{
    char *to = text;
    bool plain = true;
    for (const char *at = text; *at;) {
        const bool comment = at[0] == '/' && (at[1] == '/' || at[1] == '*'), literal = *at == '"' || *at == '\'';
        const char *last = comment ? comment_end(at) : literal ? literal_end(at) : at;
        plain = plain && !(*at == '"' && to > text && to[-1] == 'R');
        for (; *at && at <= last; ++at) {
            if (!comment || *at == '\n') {
                *to++ = *at;
            }
        }
        if (comment && *at) {
            *to++ = ' '; /* in place of two characters at least */
        }
    }
    *to = '\0';
    return plain;
}

static int line_of(const char *text, const char *at)
{
    int line = 1;
    for (; text < at; ++text) {
        line += *text == '\n';
    }
    return line;
}

static bool is_word_character(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == '$';
}

/* ---- Words ---- */

typedef struct banned {
    const char *word; /* "x*" = every word that begins with x */
    const char *why;
} banned;

static const banned banned_everywhere[] = {
    {"__has_include", "looks at other files"},   {"__has_include_next", "looks at other files"},
    {"__has_embed", "looks at other files"},     {"__FILE__", "depends on where it lies"},
    {"__DATE__", "depends on the time"},         {"__TIME__", "depends on the time"},
    {"__TIMESTAMP__", "depends on the time"},    {"_Pragma", "changes the compiler's ways"},
    {"__pragma", "changes the compiler's ways"}, {NULL, NULL}};

static const banned banned_cpu[] = {{"asm", "machine code of its own"},
                                    {"__asm", "machine code of its own"},
                                    {"__asm__", "machine code of its own"},
                                    {"_Thread_local", "state between calls"},
                                    {"__thread", "state between calls"},
                                    {"__builtin_return_address", "looks at its caller"},
                                    {"__builtin_frame_address", "looks at its caller"},
                                    {"__builtin_extract_return_addr", "looks at its caller"},
                                    {"__builtin_thread_pointer", "looks at its caller"},
                                    {"__builtin_apply*", "looks at its caller"},
                                    {"__builtin_ia32_rd*", "reads a clock or a register of the system"},
                                    {"__builtin_readcyclecounter", "reads a clock"},
                                    {"__rdtsc*", "reads a clock"},
                                    {"__declspec", "places code"},
                                    {"_rdtsc*", "reads a clock"},
                                    {"_rd*", "reads a register of the system"},
                                    {"_wr*", "writes a register of the system"},
                                    {NULL, NULL}};

static const banned banned_cuda[] = {{"clock", "reads a clock"},
                                     {"clock64", "reads a clock"},
                                     {"globaltimer*", "reads a clock"},
                                     {"__globaltimer*", "reads a clock"},
                                     {"__managed__", "state between calls"},
                                     {"cudaLaunch*", "launches kernels of its own"},
                                     {"printf", "talks to the host"},
                                     {"__nanosleep", "waits"},
                                     {NULL, NULL}};

/* In PTX, whose words are inside literals. */
static const banned banned_ptx[] = {{"%clock", "reads a clock"},
                                    {"%globaltimer", "reads a clock"},
                                    {"nanosleep", "waits"},
                                    {".global .", "state between calls"},
                                    {".visible", "declares symbols"},
                                    {".extern", "declares symbols"},
                                    {NULL, NULL}};

static const banned *find_word(const banned *list, const char *word, size_t length)
{
    for (; list->word; ++list) {
        size_t known = strlen(list->word);
        bool prefix = list->word[known - 1] == '*';
        known -= prefix;
        if (strncmp(list->word, word, known) == 0 && (prefix ? length >= known : length == known)) {
            return list;
        }
    }
    return NULL;
}

static acr_status check_words(const char *text, acr__backend_id backend)
{
    for (const char *at = text; *at;) {
        size_t length = 0;
        while (is_word_character(at[length])) {
            ++length;
        }
        if (length == 0) {
            ++at;
            continue;
        }
        const banned *found = find_word(banned_everywhere, at, length);
        if (!found) {
            found = find_word(backend == ACR__CPU ? banned_cpu : banned_cuda, at, length);
        }
        if (found) {
            return acr__fail(ACR_INVALID, "line %d: %.*s: %s", line_of(text, at), (int)length, at, found->why);
        }
        at += length;
    }
    for (const banned *b = banned_ptx; backend == ACR__CUDA && b->word; ++b) {
        const char *at = strstr(text, b->word);
        if (at) {
            return acr__fail(ACR_INVALID, "line %d: %s: %s", line_of(text, at), b->word, b->why);
        }
    }
    return ACR_OK;
}

/* Spellings that would hide words from check_words and check_directives. */
static acr_status check_spellings(const char *text, acr__backend_id backend)
{
    static const banned spellings[] = {{"\?\?", "trigraphs hide what is written"},
                                       {"%:", "digraphs hide what is written"},
                                       {"<:", "digraphs hide what is written"},
                                       {"\\u", "universal names hide what is written"},
                                       {"\\U", "universal names hide what is written"},
                                       {"##", "pasted words hide what is written"},
                                       {NULL, NULL}};
    for (const banned *b = spellings; b->word; ++b) {
        if (backend == ACR__CUDA && strcmp(b->word, "##") == 0) {
            continue; /* no word is forbidden there that the object does not show as well */
        }
        const char *at = strstr(text, b->word);
        if (at) {
            return acr__fail(ACR_INVALID, "line %d: %s: %s", line_of(text, at), b->word, b->why);
        }
    }
    for (const char *at = text;
         backend == ACR__CPU && (at = strchr(at, '[')) != NULL;) { /* no expression has two of them in a row */
        at += 1 + strspn(at + 1, " \t\n");
        if (*at == '[') {
            return acr__fail(ACR_INVALID, "line %d: attributes in double brackets", line_of(text, at));
        }
    }
    for (const char *at = text; *at; ++at) {
        if ((unsigned char)*at >= 0x80 || (iscntrl((unsigned char)*at) && !isspace((unsigned char)*at))) {
            return acr__fail(ACR_INVALID, "line %d: a byte that is no ASCII text", line_of(text, at));
        }
    }
    return ACR_OK;
}

/* Attributes of the CPU's compilers that change what code is, not when it runs. */
static acr_status check_attributes(const char *text)
{
    static const char *const allowed[] = {"always_inline", "noinline", "vector_size", "aligned", "may_alias",
                                          "unused",        "hot",      "const",       "pure",    "flatten"};
    for (const char *at = text; (at = strstr(at, "__attribute")) != NULL;) {
        at += strlen("__attribute");
        at += strspn(at, "_");
        const char *name = at + strspn(at, " \t\n(_");
        size_t length = strspn(name, "abcdefghijklmnopqrstuvwxyz_");
        while (length > 0 && name[length - 1] == '_') {
            --length;
        }
        bool known = false;
        for (size_t i = 0; i < sizeof allowed / sizeof allowed[0]; ++i) {
            known = known || (strlen(allowed[i]) == length && memcmp(allowed[i], name, length) == 0);
        }
        /* One attribute a list: what follows a comma at its own level is refused. */
        int depth = 0;
        for (const char *end = at; known && *end; ++end) {
            depth += (*end == '(') - (*end == ')');
            known = !(*end == ',' && depth <= 2);
            if (depth == 0 && *end == ')') {
                break;
            }
        }
        if (!known) {
            return acr__fail(ACR_INVALID,
                             "line %d: __attribute__((%.*s...)): only one a list, of those that place no code",
                             line_of(text, at), (int)length, name);
        }
    }
    return ACR_OK;
}

/* ---- Directives ---- */

static bool in_list(const char *const *list, const char *name, size_t length)
{
    for (; *list; ++list) {
        if (strlen(*list) == length && memcmp(*list, name, length) == 0) {
            return true;
        }
    }
    return false;
}

/* A file of cuda/device, for nvcc alone or for both compilers. */
static bool is_device_header(const char *name, size_t length)
{
    static const char folder[] = "cuda/device/", device[] = ".cuh", both[] = ".h";
    const size_t start = sizeof folder - 1;
    const size_t end = length > 4 && memcmp(name + length - 4, device, 4) == 0 ? sizeof device - 1 : sizeof both - 1;
    if (length <= start + end || memcmp(name, folder, start) != 0 ||
        memcmp(name + length - end, end == sizeof both - 1 ? both : device, end) != 0) {
        return false;
    }
    return strspn(name + start, "abcdefghijklmnopqrstuvwxyz0123456789_/") == length - start - end;
}

static bool may_include(const char *name, size_t length, bool quoted, acr__backend_id backend)
{
    static const char *const cpu[] = {"stdint.h",    "stddef.h", "stdbool.h", "stdatomic.h",
                                      "immintrin.h", "float.h",  "limits.h",  NULL};
    static const char *const cuda[] = {"stdint.h", "cuda_fp16.h",      "cuda_bf16.h", "cuda_fp8.h", "cuda_pipeline.h",
                                       "mma.h",    "math_constants.h", "float.h",     NULL};
    static const char *const own[] = {"fwd_args.h", "bwd_args.h", "kernel.h", "acromion.h", NULL};
    if (quoted) {
        return in_list(own, name, length) || (backend == ACR__CUDA && is_device_header(name, length));
    }
    return in_list(backend == ACR__CUDA ? cuda : cpu, name, length);
}

static acr_status check_include(const char *text, const char *at, acr__backend_id backend)
{
    const char *name = at + strspn(at, " \t");
    const char close = *name == '<' ? '>' : '"';
    const char *end = *name == '<' || *name == '"' ? strpbrk(name + 1, "\n>\"") : NULL;
    if (!end || *end != close || !may_include(name + 1, (size_t)(end - name - 1), close == '"', backend)) {
        return acr__fail(ACR_INVALID, "line %d: #include%.*s: not one of the headers that candidates may include",
                         line_of(text, at), (int)strcspn(at, "\n"), at);
    }
    return ACR_OK;
}

static acr_status check_pragma(const char *text, const char *at)
{
    static const char *const allowed[] = {"unroll", "GCC unroll", "GCC ivdep", "clang loop", "nounroll"};
    const char *words = at + strspn(at, " \t");
    for (size_t i = 0; i < sizeof allowed / sizeof allowed[0]; ++i) {
        const size_t length = strlen(allowed[i]);
        if (strncmp(words, allowed[i], length) == 0 && !is_word_character(words[length])) {
            return ACR_OK;
        }
    }
    return acr__fail(ACR_INVALID, "line %d: #pragma%.*s: only those that unroll loops", line_of(text, at),
                     (int)strcspn(at, "\n"), at);
}

static acr_status check_directives(const char *text, acr__backend_id backend)
{
    static const char *const harmless[] = {"define", "undef", "if",    "ifdef", "ifndef",
                                           "elif",   "else",  "endif", "error", NULL};
    for (const char *line = text; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        const char *at = line + strspn(line, " \t\v\f\r");
        if (*at != '#') {
            continue;
        }
        at += 1 + strspn(at + 1, " \t");
        size_t length = 0;
        while (is_word_character(at[length])) {
            ++length;
        }
        acr_status status = ACR_OK;
        if (length == 7 && memcmp(at, "include", 7) == 0) {
            status = check_include(text, at + 7, backend);
        } else if (length == 6 && memcmp(at, "pragma", 6) == 0) {
            status = check_pragma(text, at + 6);
        } else if (length > 0 && !in_list(harmless, at, length)) {
            status = acr__fail(ACR_INVALID, "line %d: #%.*s is not allowed", line_of(text, at), (int)length, at);
        }
        if (status != ACR_OK) {
            return status;
        }
    }
    return ACR_OK;
}

/* ---- After preprocessing ---- */

/* Blanks what the preprocessor took from other files: lines behind a mark `# 12 "file"` of another file. */
static void blank_other_files(char *text, const char *name)
{
    bool own = false;
    const size_t length = strlen(name);
    for (char *line = text; line && *line;) {
        char *end = strchr(line, '\n');
        const size_t bytes = end ? (size_t)(end - line) : strlen(line);
        const char *quote = line[0] == '#' && line[1] == ' ' ? memchr(line, '"', bytes) : NULL;
        if (quote) {
            const char *last = memchr(quote + 1, '"', bytes - (size_t)(quote + 1 - line));
            own = last && (size_t)(last - quote) > length && memcmp(last - length, name, length) == 0;
        }
        if (quote || !own) {
            memset(line, ' ', bytes);
        }
        line = end ? end + 1 : NULL;
    }
}

acr_status admission_check_preprocessed(char *text, const char *name)
{
    blank_other_files(text, name);
    acr_status status = check_words(text, ACR__CPU);
    if (status == ACR_OK) {
        status = check_attributes(text);
    }
    const char *pragma = status == ACR_OK ? strstr(text, "#pragma") : NULL;
    while (pragma && status == ACR_OK) {
        status = check_pragma(text, pragma + 7);
        pragma = strstr(pragma + 1, "#pragma");
    }
    return status;
}

/* ---- Whole candidates ---- */

static acr_status check_source(const candidate *c, descriptor *out)
{
    const size_t bytes = strlen(c->source);
    if (bytes == 0 || bytes > CANDIDATE_SOURCE_BYTES_MAX) {
        return acr__fail(ACR_INVALID, "the source has %zu bytes: 1 to %d are allowed", bytes,
                         (int)CANDIDATE_SOURCE_BYTES_MAX);
    }
    if (!c->descriptor) {
        return acr__fail(ACR_INVALID, "a source needs a launch descriptor");
    }
    if (!strstr(c->source, "KERNEL_NAME")) {
        return acr__fail(ACR_INVALID, "the source does not define its entry point, KERNEL_NAME");
    }
    char *text = strdup(c->source);
    if (!text) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a copy of the source");
    }
    splice_lines(text);
    acr_status status = strip_comments(text) ? check_spellings(text, c->backend)
                                             : acr__fail(ACR_INVALID, "raw literals hide what is written");
    if (status == ACR_OK) {
        status = check_directives(text, c->backend);
    }
    if (status == ACR_OK) {
        status = check_words(text, c->backend);
    }
    if (status == ACR_OK && c->backend == ACR__CPU) {
        status = check_attributes(text);
    }
    free(text);
    return status == ACR_OK ? descriptor_parse(out, c->backend, c->descriptor) : status;
}

acr_status admission_family_file(char out[128], const candidate *c, const char *source_root)
{
    char sources[PATH_MAX], path[PATH_MAX];
    if (snprintf(sources, sizeof sources, "%s/src", source_root) >= PATH_MAX) {
        return acr__fail(ACR_IO, "%s: the path is too long", source_root);
    }
    const size_t length = strlen(sources);
    const bool found = kernel_source_file(path, sources, c->family) && strlen(path + length + 1) < 128;
    const char *ending = found ? strrchr(path, '.') : "";
    if (!found || (strcmp(ending, ".c") == 0) != (c->backend == ACR__CPU)) {
        return acr__fail(ACR_INVALID, "family: there is no file for \"%s\" under %s, for arch %s", c->family, sources,
                         c->arch);
    }
    snprintf(out, 128, "%s", path + length + 1);
    return ACR_OK;
}

/* A parameter that the family does not read would build the kernel as it was, under another name. */
static acr_status check_parameters(const candidate *c, const char *source_root, const char *file)
{
    char path[PATH_MAX];
    kernel_parameters declared;
    if (snprintf(path, sizeof path, "%s/src/%s", source_root, file) >= PATH_MAX) {
        return acr__fail(ACR_IO, "%s: the path is too long", source_root);
    }
    acr_status status = kernel_parameters_read(&declared, path);
    return status == ACR_OK ? kernel_parameters_check(&declared, c->parameters, true) : status;
}

acr_status admission_check(const candidate *c, const char *source_root, descriptor *out)
{
    char file[128];
    static const char *const reserved[] = {"KERNEL_", "SPILLS_", "ACR_", "FWD_"};
    for (size_t i = 0; i < sizeof reserved / sizeof reserved[0]; ++i) {
        const char *at = strstr(c->parameters, reserved[i]);
        if (at && (at == c->parameters || at[-1] == ' ')) {
            return acr__fail(ACR_INVALID, "parameters: names that begin with %s are the build's", reserved[i]);
        }
    }
    if (c->source) {
        return check_source(c, out);
    }
    if (strspn(c->family, "abcdefghijklmnopqrstuvwxyz0123456789_") != strlen(c->family)) {
        return acr__fail(ACR_INVALID, "family: \"%s\" has other characters than a-z, 0-9 and _", c->family);
    }
    acr_status status = admission_family_file(file, c, source_root);
    return status == ACR_OK ? check_parameters(c, source_root, file) : status;
}
