/* Wisdom: the table of facts, and the reader and writer of its file.
 *
 * The file, line by line (fields separated by one space; docs/manual/wisdom-format.md):
 *
 *     acromion-wisdom 1
 *     device NVIDIA H200/sm90/132
 *     b2:h8:s512:d64 = fwd_mma_f16_d64_64x64_s2_sm80 img=0123456789abcdef effort=measure median_ns=7900.0 mad_ns=12.5
 * n=105
 *     end facts=1 crc32=89abcdef
 *
 * Version 2 has links, too, as facts of their device; a text without any is written as version 1:
 *
 *     link ranks=4 hosts=1 bytes_per_s=350000000000.0 latency_ns=12000.0 copy_bytes_per_s=2000000000000.0 n=15
 *
 * A device line applies to the facts after it. crc32 (IEEE 802.3, reflected) covers every byte before the end line.
 * Nothing may follow that line. A text is read whole before any of its facts counts: one that is malformed teaches
 * nothing. */
#include "wisdom.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

static const size_t MAX_FILE_BYTES = (size_t)64 << 20;

/* ---- The table --------------------------------------------------------------------------------------------------- */

/* A growing list of facts. Linear search by problem: a table holds a few hundred. */
typedef struct fact_list {
    acr__fact *items;
    uint32_t count, capacity;
} fact_list;

struct acr__wisdom {
    char device_key[WISDOM_DEVICE_MAX];
    fact_list facts;
    acr_link *links; /* of each count of ranks and hosts one */
    uint32_t link_count;
};

void acr__wisdom_device_key(const acr__device *device, char key[WISDOM_DEVICE_MAX])
{
    if (device->backend == ACR__CUDA)
        snprintf(key, WISDOM_DEVICE_MAX, "%s/sm%d/%d", device->name, device->arch, device->sm_count);
    else
        snprintf(key, WISDOM_DEVICE_MAX, "%s/%s/%d threads", device->name, acr__isa_widest(device->isa),
                 device->threads);
}

acr__wisdom *acr__wisdom_create(const acr__device *device)
{
    acr__wisdom *wisdom = calloc(1, sizeof *wisdom);
    if (wisdom)
        acr__wisdom_device_key(device, wisdom->device_key);
    return wisdom;
}

void acr__wisdom_destroy(acr__wisdom *wisdom)
{
    if (!wisdom)
        return;
    free(wisdom->facts.items);
    free(wisdom->links);
    free(wisdom);
}

void acr__wisdom_clear(acr__wisdom *wisdom)
{
    wisdom->facts.count = 0;
    wisdom->link_count = 0;
}

acr_status acr__wisdom_problem(char text[ACR_PROBLEM_TEXT_MAX], const acr_problem *problem)
{
    acr_problem p;
    const acr_status status = acr_problem_canonical(&p, problem);
    if (status != ACR_OK)
        return status;
    if (p.softcap > 0.0f)
        p.softcap = 1.0f;
    return acr_problem_format(&p, text, ACR_PROBLEM_TEXT_MAX);
}

const acr__fact *acr__wisdom_find(const acr__wisdom *wisdom, const char *problem)
{
    for (uint32_t i = 0; i < wisdom->facts.count; i++)
        if (strcmp(wisdom->facts.items[i].problem, problem) == 0)
            return &wisdom->facts.items[i];
    return NULL;
}

static acr_status reserve_one(fact_list *list)
{
    if (list->count < list->capacity)
        return ACR_OK;
    const uint32_t capacity = list->capacity ? 2 * list->capacity : 16;
    acr__fact *items = realloc(list->items, capacity * sizeof *items);
    if (!items)
        return acr__fail(ACR_NO_MEMORY, "no memory for %u facts of wisdom", capacity);
    list->items = items;
    list->capacity = capacity;
    return ACR_OK;
}

acr_status acr__wisdom_put(acr__wisdom *wisdom, const acr__fact *fact)
{
    acr__fact *known = (acr__fact *)acr__wisdom_find(wisdom, fact->problem);
    if (known) {
        if (fact->effort >= known->effort)
            *known = *fact;
        return ACR_OK;
    }
    const acr_status status = reserve_one(&wisdom->facts);
    if (status == ACR_OK)
        wisdom->facts.items[wisdom->facts.count++] = *fact;
    return status;
}

/* ---- Links ------------------------------------------------------------------------------------------------------- */

/* What the decimals of the file hold. */
static bool is_rate(double value)
{
    return value >= 0.1 && value < 1e15; /* false for NaN */
}

const char *acr__link_why_not(const acr_link *link)
{
    static _Thread_local char reason[128];
    const struct {
        const char *name;
        double value, unit; /* a rate in units */
    } rates[] = {{"bytes_per_s", link->bytes_per_s, 1.0},
                 {"latency_s", link->latency_s, 1e-9},
                 {"copy_bytes_per_s", link->copy_bytes_per_s, 1.0}};
    if (link->ranks < 2)
        snprintf(reason, sizeof reason, "ranks is %d, must be at least 2", (int)link->ranks);
    else if (link->hosts < 1 || link->hosts > link->ranks)
        snprintf(reason, sizeof reason, "hosts is %d, must be 1 to %d", (int)link->hosts, (int)link->ranks);
    else if (link->samples < 1 || link->samples > 999999999)
        snprintf(reason, sizeof reason, "samples is %u, must be 1 to 999999999", link->samples);
    else {
        for (size_t i = 0; i < sizeof rates / sizeof rates[0]; i++)
            if (!is_rate(rates[i].value / rates[i].unit)) {
                snprintf(reason, sizeof reason, "%s is %g, must be positive and in range", rates[i].name,
                         rates[i].value);
                return reason;
            }
        return NULL;
    }
    return reason;
}

const acr_link *acr__wisdom_find_link(const acr__wisdom *wisdom, int32_t ranks, int32_t hosts)
{
    for (uint32_t i = 0; i < wisdom->link_count; i++)
        if (wisdom->links[i].ranks == ranks && wisdom->links[i].hosts == hosts)
            return &wisdom->links[i];
    return NULL;
}

static acr_status reserve_links(acr__wisdom *wisdom, uint32_t more)
{
    const uint32_t count = wisdom->link_count + more;
    acr_link *links = realloc(wisdom->links, (count ? count : 1) * sizeof *links);
    if (!links)
        return acr__fail(ACR_NO_MEMORY, "no memory for %u links of wisdom", count);
    wisdom->links = links;
    return ACR_OK;
}

/* There is room for one more. */
static void put_link(acr__wisdom *wisdom, const acr_link *link)
{
    acr_link *known = (acr_link *)acr__wisdom_find_link(wisdom, link->ranks, link->hosts);
    if (!known)
        known = &wisdom->links[wisdom->link_count++];
    *known = *link;
}

acr_status acr__wisdom_put_link(acr__wisdom *wisdom, const acr_link *link)
{
    const acr_status status = reserve_links(wisdom, 1);
    if (status == ACR_OK)
        put_link(wisdom, link);
    return status;
}

bool acr__wisdom_usable(const acr__fact *fact, const acr__device *device)
{
    const acr__kernel *kernel = acr__kernel_find(fact->kernel);
    acr_problem parsed, canonical;
    return kernel && acr__kernel_digest(kernel) == fact->digest &&
           acr_problem_parse(&parsed, fact->problem, NULL) == ACR_OK &&
           acr_problem_canonical(&canonical, &parsed) == ACR_OK && !acr__why_not(kernel, &canonical, device);
}

/* ---- Reading ----------------------------------------------------------------------------------------------------- */

static uint32_t crc32_of(const char *bytes, size_t count)
{
    uint32_t crc = 0xffffffffu;
    for (size_t i = 0; i < count; i++) {
        crc ^= (unsigned char)bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

/* A line of the text, without its newline, NUL-terminated in a buffer. */
enum {
    LINE_MAX_BYTES = 1024
};

static acr_status line_error(int number, const char *reason)
{
    return acr__fail(ACR_FORMAT, "line %d: %s", number, reason);
}

/* Copies the next line into `line`; false at the end of the text. Too long or NUL inside: an error. */
static acr_status next_line(const char *text, size_t bytes, size_t *at, int number, char line[LINE_MAX_BYTES])
{
    const char *newline = memchr(text + *at, '\n', bytes - *at);
    if (!newline)
        return line_error(number, *at == bytes ? "the end line is missing" : "the line is cut off");
    const size_t length = (size_t)(newline - (text + *at));
    if (length >= LINE_MAX_BYTES)
        return line_error(number, "the line is too long");
    if (memchr(text + *at, '\0', length))
        return line_error(number, "the line holds a zero byte");
    memcpy(line, text + *at, length);
    line[length] = '\0';
    *at += length + 1;
    return ACR_OK;
}

static bool copy_bounded(char *to, size_t capacity, const char *from, size_t length)
{
    if (length == 0 || length >= capacity)
        return false;
    memcpy(to, from, length);
    to[length] = '\0';
    return true;
}

/* Splits off the next word, ended by a space or the end of the line; "" when there is none. */
static char *next_word(char **rest)
{
    char *word = *rest;
    char *space = strchr(word, ' ');
    if (space) {
        *space = '\0';
        *rest = space + 1;
    } else {
        *rest = word + strlen(word);
    }
    return word;
}

/* The value of "name=value", or NULL when the word is another. */
static const char *value_of(const char *word, const char *name)
{
    const size_t length = strlen(name);
    return strncmp(word, name, length) == 0 && word[length] == '=' ? word + length + 1 : NULL;
}

static bool read_hex(const char *text, size_t digits, uint64_t *value)
{
    if (!text || strlen(text) != digits || strspn(text, "0123456789abcdef") != digits)
        return false;
    *value = strtoull(text, NULL, 16);
    return true;
}

static bool read_count(const char *text, uint32_t *value)
{
    if (!text || !*text || strlen(text) > 9 || strspn(text, "0123456789") != strlen(text))
        return false;
    *value = (uint32_t)strtoul(text, NULL, 10);
    return true;
}

/* A plain decimal, as the writer prints: digits, point, digits. Not strtod, whose reading depends on the locale. */
static bool read_decimal(const char *text, double *value)
{
    if (!text)
        return false;
    const size_t whole = strspn(text, "0123456789");
    const size_t fraction = text[whole] == '.' ? strspn(text + whole + 1, "0123456789") : 0;
    if (whole == 0 || whole > 15 || fraction == 0 || fraction > 3 || text[whole + 1 + fraction] != '\0')
        return false;
    double number = 0.0, unit = 1.0;
    for (const char *c = text; *c; c++) {
        if (*c == '.')
            continue;
        number = 10.0 * number + (*c - '0');
        unit *= c > text + whole ? 10.0 : 1.0;
    }
    *value = number / unit;
    return true;
}

static bool read_effort(const char *text, acr_effort *effort)
{
    if (!text)
        return false;
    *effort = strcmp(text, "patient") == 0 ? ACR_PATIENT : ACR_MEASURE;
    return strcmp(text, "patient") == 0 || strcmp(text, "measure") == 0;
}

/* What is left of a line, and the first failure to read it: nothing is read behind that. */
typedef struct line_rest {
    char *text;
    int number;
    acr_status status;
} line_rest;

static void take_count(line_rest *rest, const char *name, uint32_t *value)
{
    if (rest->status == ACR_OK && !read_count(value_of(next_word(&rest->text), name), value))
        rest->status = acr__fail(ACR_FORMAT, "line %d: expected %s= and a count", rest->number, name);
}

static void take_decimal(line_rest *rest, const char *name, double *value)
{
    if (rest->status == ACR_OK && !read_decimal(value_of(next_word(&rest->text), name), value))
        rest->status = acr__fail(ACR_FORMAT, "line %d: expected %s= and a decimal", rest->number, name);
}

/* n=, the last word of a line. */
static acr_status take_samples(line_rest *rest, uint32_t *value)
{
    take_count(rest, "n", value);
    return rest->status == ACR_OK && *rest->text ? line_error(rest->number, "unexpected text after n=") : rest->status;
}

/* "<problem> = <kernel> img=... effort=... median_ns=... mad_ns=... n=..." */
static acr_status read_fact(char *line, int number, acr__fact *fact)
{
    memset(fact, 0, sizeof *fact);
    char *rest = line;
    const char *problem = next_word(&rest);
    if (!copy_bounded(fact->problem, sizeof fact->problem, problem, strlen(problem)))
        return line_error(number, "expected a problem");
    if (strcmp(next_word(&rest), "=") != 0)
        return line_error(number, "expected ' = ' after the problem");
    const char *kernel = next_word(&rest);
    if (!copy_bounded(fact->kernel, sizeof fact->kernel, kernel, strlen(kernel)) ||
        strspn(kernel, "abcdefghijklmnopqrstuvwxyz0123456789_") != strlen(kernel))
        return line_error(number, "expected a kernel name");
    if (!read_hex(value_of(next_word(&rest), "img"), 16, &fact->digest))
        return line_error(number, "expected img= and 16 hexadecimal digits");
    if (!read_effort(value_of(next_word(&rest), "effort"), &fact->effort))
        return line_error(number, "expected effort=measure or effort=patient");
    line_rest numbers = {rest, number, ACR_OK};
    take_decimal(&numbers, "median_ns", &fact->median_ns);
    take_decimal(&numbers, "mad_ns", &fact->mad_ns);
    const acr_status status = take_samples(&numbers, &fact->samples);
    if (status != ACR_OK)
        return status;
    acr_problem parsed;
    char canonical[ACR_PROBLEM_TEXT_MAX];
    if (acr_problem_parse(&parsed, fact->problem, NULL) != ACR_OK ||
        acr__wisdom_problem(canonical, &parsed) != ACR_OK || strcmp(canonical, fact->problem) != 0)
        return line_error(number, "the problem is not in canonical form");
    return ACR_OK;
}

/* What follows "link ": "ranks=... hosts=... bytes_per_s=... latency_ns=... copy_bytes_per_s=... n=..." */
static acr_status read_link(char *rest, int number, acr_link *link)
{
    uint32_t ranks = 0, hosts = 0;
    *link = (acr_link)ACR_LINK_INIT;
    line_rest numbers = {rest, number, ACR_OK};
    take_count(&numbers, "ranks", &ranks);
    take_count(&numbers, "hosts", &hosts);
    take_decimal(&numbers, "bytes_per_s", &link->bytes_per_s);
    take_decimal(&numbers, "latency_ns", &link->latency_s);
    take_decimal(&numbers, "copy_bytes_per_s", &link->copy_bytes_per_s);
    const acr_status status = take_samples(&numbers, &link->samples);
    if (status != ACR_OK)
        return status;
    link->ranks = (int32_t)ranks;
    link->hosts = (int32_t)hosts;
    link->latency_s *= 1e-9;
    const char *reason = acr__link_why_not(link);
    return reason ? line_error(number, reason) : ACR_OK;
}

static acr_status read_end(char *line, int number, uint32_t facts, uint32_t crc, bool more)
{
    char *rest = line;
    uint32_t count;
    uint64_t expected;
    next_word(&rest); /* "end" */
    if (!read_count(value_of(next_word(&rest), "facts"), &count) ||
        !read_hex(value_of(next_word(&rest), "crc32"), 8, &expected) || *rest)
        return line_error(number, "expected end facts=N crc32=XXXXXXXX");
    if (count != facts)
        return line_error(number, "the count of facts is wrong: lines were lost or added");
    if (expected != crc)
        return line_error(number, "the checksum is wrong: the file was changed or damaged");
    if (more)
        return line_error(number + 1, "text after the end line");
    return ACR_OK;
}

/* A line behind the first two kinds: a fact, or in version 2 a link. */
static acr_status visit_line(char *line, int number, int version, const char *device_key,
                             const acr__wisdom_visitor *visitor, void *user)
{
    acr__fact fact;
    acr_link link;
    acr_status status;
    if (!*device_key)
        return line_error(number, "expected a device line before the first fact");
    if (strncmp(line, "link ", 5) == 0 && version > 1) {
        status = read_link(line + 5, number, &link);
        return status == ACR_OK && visitor->link ? visitor->link(user, device_key, &link) : status;
    }
    status = read_fact(line, number, &fact);
    return status == ACR_OK && visitor->fact ? visitor->fact(user, device_key, &fact) : status;
}

acr_status acr__wisdom_parse(const char *text, size_t bytes, const acr__wisdom_visitor *visitor, void *user)
{
    char line[LINE_MAX_BYTES], device_key[WISDOM_DEVICE_MAX] = "";
    size_t at = 0;
    uint32_t facts = 0;
    int version = 0;
    for (int number = 1;; number++) {
        const size_t line_first = at;
        acr_status status = next_line(text, bytes, &at, number, line);
        if (status != ACR_OK)
            return status;
        if (number == 1) {
            version = strcmp(line, "acromion-wisdom 1") == 0 ? 1 : strcmp(line, "acromion-wisdom 2") == 0 ? 2 : 0;
            if (version == 0)
                return line_error(1, "expected 'acromion-wisdom 1' or 'acromion-wisdom 2'");
        } else if (strncmp(line, "device ", 7) == 0) {
            if (!copy_bounded(device_key, sizeof device_key, line + 7, strlen(line + 7)))
                return line_error(number, "the device's name is empty or too long");
        } else if (strncmp(line, "end ", 4) == 0) {
            return read_end(line, number, facts, crc32_of(text, line_first), at != bytes);
        } else {
            if ((status = visit_line(line, number, version, device_key, visitor, user)) != ACR_OK)
                return status;
            facts++;
        }
    }
}

static acr_status count_fact(void *user, const char *device_key, const acr__fact *fact)
{
    (void)device_key, (void)fact;
    ++*(uint32_t *)user;
    return ACR_OK;
}

static acr_status count_link(void *user, const char *device_key, const acr_link *link)
{
    (void)device_key, (void)link;
    ++*(uint32_t *)user;
    return ACR_OK;
}

acr_status acr__wisdom_check(const char *text, size_t bytes, uint32_t *facts)
{
    static const acr__wisdom_visitor visitor = {count_fact, count_link};
    uint32_t count = 0;
    const acr_status status = acr__wisdom_parse(text, bytes, &visitor, &count);
    if (status == ACR_OK)
        *facts = count;
    return status;
}

/* Reads a whole file; *text is the caller's to free. A missing file is ACR_IO with *missing set. */
static acr_status read_file(const char *path, char **text, size_t *bytes, bool *missing)
{
    *missing = false;
    const int handle = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a FIFO would wait for its writer */
    FILE *file = handle >= 0 ? fdopen(handle, "rb") : NULL;
    if (!file) {
        const int error = errno;
        if (handle >= 0)
            close(handle);
        *missing = error == ENOENT;
        return acr__fail(ACR_IO, "%s: %s", path, strerror(error));
    }
    struct stat info;
    if (fstat(fileno(file), &info) != 0 || !S_ISREG(info.st_mode) || (size_t)info.st_size > MAX_FILE_BYTES) {
        fclose(file);
        return acr__fail(ACR_IO, "%s is not a regular file of at most 64 MiB", path);
    }
    const size_t size = (size_t)info.st_size;
    char *content = malloc(size + 1);
    if (!content) {
        fclose(file);
        return acr__fail(ACR_NO_MEMORY, "no memory to read %s (%zu bytes)", path, size);
    }
    const size_t got = fread(content, 1, size, file);
    fclose(file);
    if (got != size) {
        free(content);
        return acr__fail(ACR_IO, "cannot read %s", path);
    }
    *text = content;
    *bytes = size;
    return ACR_OK;
}

/* Of a file's content that was refused: the message, with the file's name before it. */
static acr_status in_file(acr_status status, const char *path)
{
    char detail[512];
    snprintf(detail, sizeof detail, "%s", acr_last_error());
    return acr__fail(status, "%s: %s", path, detail);
}

/* ---- Import ------------------------------------------------------------------------------------------------------ */

typedef struct import_state {
    const char *device_key;
    const acr__device *device;
    acr__wisdom *staged; /* facts wait here until the whole file has been read */
    acr_wisdom_report report;
} import_state;

static acr_status import_fact(void *user, const char *device_key, const acr__fact *fact)
{
    import_state *state = user;
    if (strcmp(device_key, state->device_key) != 0)
        state->report.other++;
    else if (!acr__wisdom_usable(fact, state->device))
        state->report.skipped++;
    else {
        state->report.imported++;
        return acr__wisdom_put(state->staged, fact);
    }
    return ACR_OK;
}

static acr_status import_link(void *user, const char *device_key, const acr_link *link)
{
    import_state *state = user;
    if (strcmp(device_key, state->device_key) != 0) {
        state->report.other++;
        return ACR_OK;
    }
    state->report.imported++;
    return acr__wisdom_put_link(state->staged, link);
}

/* Moves staged facts into the table, all or none. */
static acr_status commit_facts(acr__wisdom *wisdom, const acr__wisdom *staged)
{
    const uint32_t needed = wisdom->facts.count + staged->facts.count;
    if (needed > wisdom->facts.capacity) {
        acr__fact *items = realloc(wisdom->facts.items, needed * sizeof *items);
        if (!items)
            return acr__fail(ACR_NO_MEMORY, "no memory for %u facts of wisdom", needed);
        wisdom->facts.items = items;
        wisdom->facts.capacity = needed;
    }
    const acr_status status = reserve_links(wisdom, staged->link_count);
    if (status != ACR_OK)
        return status;
    for (uint32_t i = 0; i < staged->link_count; i++)
        put_link(wisdom, &staged->links[i]);
    for (uint32_t i = 0; i < staged->facts.count; i++)
        acr__wisdom_put(wisdom, &staged->facts.items[i]); /* there is room: cannot fail */
    return ACR_OK;
}

/* Hands a file's lines to the visitor. *missing: there is no such file, which is a failure, too. */
static acr_status parse_file(const char *path, const acr__wisdom_visitor *visitor, void *user, bool *missing)
{
    char *text = NULL;
    size_t bytes = 0;
    acr_status status = read_file(path, &text, &bytes, missing);
    if (status != ACR_OK)
        return status;
    status = acr__wisdom_parse(text, bytes, visitor, user);
    free(text);
    return status == ACR_FORMAT ? in_file(status, path) : status;
}

acr_status acr__wisdom_read(acr__wisdom *wisdom, const acr__device *device, const char *path, acr_wisdom_report *report)
{
    static const acr__wisdom_visitor visitor = {import_fact, import_link};
    bool missing;
    import_state state = {wisdom->device_key, device, acr__wisdom_create(device), ACR_WISDOM_REPORT_INIT};
    acr_status status = state.staged ? parse_file(path, &visitor, &state, &missing)
                                     : acr__fail(ACR_NO_MEMORY, "no memory to import wisdom");
    if (status == ACR_OK)
        status = commit_facts(wisdom, state.staged);
    if (status == ACR_OK && report)
        *report = state.report;
    acr__wisdom_destroy(state.staged);
    return status;
}

/* ---- Export ------------------------------------------------------------------------------------------------------ */

/* Text that grows; `failed` once memory ran out. */
typedef struct text_buffer {
    char *bytes;
    size_t used, capacity;
    bool failed;
} text_buffer;

static void append(text_buffer *b, const char *text)
{
    const size_t length = strlen(text);
    if (!b->failed && b->used + length + 1 > b->capacity) {
        const size_t capacity = 2 * (b->used + length + 1);
        char *bytes = realloc(b->bytes, capacity);
        if (bytes) {
            b->bytes = bytes;
            b->capacity = capacity;
        } else {
            b->failed = true;
        }
    }
    if (b->failed)
        return;
    memcpy(b->bytes + b->used, text, length + 1);
    b->used += length;
}

/* "123.4": printed without %f, whose decimal point depends on the locale. */
static void print_decimal(char text[32], double value)
{
    const uint64_t tenths = (uint64_t)llround(value * 10.0);
    snprintf(text, 32, "%" PRIu64 ".%" PRIu64, tenths / 10, tenths % 10);
}

static void append_fact(text_buffer *b, const acr__fact *fact)
{
    char line[LINE_MAX_BYTES], median[32], mad[32];
    print_decimal(median, fact->median_ns);
    print_decimal(mad, fact->mad_ns);
    snprintf(line, sizeof line, "%s = %s img=%016" PRIx64 " effort=%s median_ns=%s mad_ns=%s n=%u\n", fact->problem,
             fact->kernel, fact->digest, fact->effort == ACR_PATIENT ? "patient" : "measure", median, mad,
             fact->samples);
    append(b, line);
}

static void append_link(text_buffer *b, const acr_link *link)
{
    char line[LINE_MAX_BYTES], rate[32], latency[32], copies[32];
    print_decimal(rate, link->bytes_per_s);
    print_decimal(latency, link->latency_s * 1e9);
    print_decimal(copies, link->copy_bytes_per_s);
    snprintf(line, sizeof line, "link ranks=%d hosts=%d bytes_per_s=%s latency_ns=%s copy_bytes_per_s=%s n=%u\n",
             (int)link->ranks, (int)link->hosts, rate, latency, copies, link->samples);
    append(b, line);
}

typedef struct export_state {
    const acr__wisdom *wisdom;
    text_buffer text;
    char device_key[WISDOM_DEVICE_MAX]; /* of the last device line written */
    uint32_t facts, links;              /* facts: the links, too */
} export_state;

static void export_device(export_state *state, const char *device_key)
{
    if (strcmp(state->device_key, device_key) != 0) {
        snprintf(state->device_key, sizeof state->device_key, "%s", device_key);
        append(&state->text, "device ");
        append(&state->text, device_key);
        append(&state->text, "\n");
    }
}

static void export_fact(export_state *state, const char *device_key, const acr__fact *fact)
{
    export_device(state, device_key);
    append_fact(&state->text, fact);
    state->facts++;
}

static void export_link(export_state *state, const char *device_key, const acr_link *link)
{
    export_device(state, device_key);
    append_link(&state->text, link);
    state->facts++;
    state->links++;
}

/* Keeps a fact of the old file unless the table knows better. */
static acr_status keep_fact(void *user, const char *device_key, const acr__fact *fact)
{
    export_state *state = user;
    const bool ours = strcmp(device_key, state->wisdom->device_key) == 0;
    if (!ours || !acr__wisdom_find(state->wisdom, fact->problem))
        export_fact(state, device_key, fact);
    return ACR_OK;
}

static acr_status keep_link(void *user, const char *device_key, const acr_link *link)
{
    export_state *state = user;
    const bool ours = strcmp(device_key, state->wisdom->device_key) == 0;
    if (!ours || !acr__wisdom_find_link(state->wisdom, link->ranks, link->hosts))
        export_link(state, device_key, link);
    return ACR_OK;
}

static acr_status write_all(int file, const char *bytes, size_t count)
{
    while (count > 0) {
        const ssize_t wrote = write(file, bytes, count);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0)
            return ACR_IO;
        bytes += wrote;
        count -= (size_t)wrote;
    }
    return ACR_OK;
}

/* The folder of a file, opened; -1 with errno. */
static int open_folder(const char *path)
{
    char folder[4096];
    const char *slash = strrchr(path, '/');
    const size_t length = slash ? (size_t)(slash - path) : 0;
    if (length >= sizeof folder) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(folder, path, length);
    folder[length] = '\0';
    return open(length ? folder : slash ? "/" : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* Waits until no other export is between reading and replacing a file of this folder: the folder is what both lock,
 * since the file itself is another one after each export. Closing the folder unlocks it. A file system that cannot lock
 * a folder (NFS) is no error: there exports of one file must not run at once, as the header says. */
static acr_status lock_folder(int *folder, const char *path)
{
    *folder = open_folder(path);
    if (*folder < 0)
        return acr__fail(ACR_IO, "cannot open the folder of %s: %s", path, strerror(errno));
    while (flock(*folder, LOCK_EX) != 0 && errno == EINTR)
        continue;
    return ACR_OK;
}

/* Replaces a file in one step: whoever reads it sees the old content or the new, whatever happens meanwhile. The rename
 * is durable once the folder has reached the disk; a file system that cannot say so is no error. */
static acr_status replace_file(const char *path, int folder, const char *bytes, size_t count)
{
    char temporary[4096];
    const int length = snprintf(temporary, sizeof temporary, "%s.XXXXXX", path);
    if (length < 0 || (size_t)length >= sizeof temporary)
        return acr__fail(ACR_IO, "path is longer than %zu bytes", sizeof temporary - 8);
    const int file = mkstemp(temporary);
    if (file < 0)
        return acr__fail(ACR_IO, "cannot create %s: %s", temporary, strerror(errno));
    const bool written = write_all(file, bytes, count) == ACR_OK && fchmod(file, 0644) == 0 && fsync(file) == 0;
    const int write_error = errno;
    const bool closed = close(file) == 0;
    if (written && closed && rename(temporary, path) == 0) {
        fsync(folder);
        return ACR_OK;
    }
    const int error = written ? errno : write_error;
    unlink(temporary);
    return acr__fail(ACR_IO, "cannot write %s: %s", path, strerror(error));
}

/* The facts of the file that is about to be replaced. */
static acr_status keep_old_file(export_state *state, const char *path)
{
    static const acr__wisdom_visitor visitor = {keep_fact, keep_link};
    bool missing;
    const acr_status status = parse_file(path, &visitor, state, &missing);
    return missing ? ACR_OK : status;
}

static acr_status write_locked(const acr__wisdom *wisdom, const char *path, int folder)
{
    export_state state = {.wisdom = wisdom};
    append(&state.text, "acromion-wisdom 1\n");
    acr_status status = keep_old_file(&state, path);
    for (uint32_t i = 0; i < wisdom->link_count; i++)
        export_link(&state, wisdom->device_key, &wisdom->links[i]);
    for (uint32_t i = 0; i < wisdom->facts.count; i++)
        export_fact(&state, wisdom->device_key, &wisdom->facts.items[i]);
    if (status == ACR_OK && !state.text.failed) {
        char end[64];
        if (state.links > 0)
            state.text.bytes[strlen("acromion-wisdom ")] = '2';
        snprintf(end, sizeof end, "end facts=%u crc32=%08x\n", state.facts,
                 crc32_of(state.text.bytes, state.text.used));
        append(&state.text, end);
    }
    if (status == ACR_OK && state.text.failed)
        status = acr__fail(ACR_NO_MEMORY, "no memory to write wisdom");
    if (status == ACR_OK)
        status = replace_file(path, folder, state.text.bytes, state.text.used);
    free(state.text.bytes);
    return status;
}

acr_status acr__wisdom_write(const acr__wisdom *wisdom, const char *path)
{
    int folder;
    acr_status status = lock_folder(&folder, path);
    if (status == ACR_OK) {
        status = write_locked(wisdom, path, folder);
        close(folder);
    }
    return status;
}
