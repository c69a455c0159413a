/* Wisdom: what import takes, skips and refuses, what export keeps, and what plans make of it. Files are written here by
 * hand, with a checksum of our own, so that reader and writer are not only tested against each other. */
#include "support.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "wisdom.h"

static const char *const PROBLEM = "f32:b1:h2:s16:d64", *const OTHER_PROBLEM = "f32:b1:h2:s24:d64";

/* ---- Files --------------------------------------------------------------------------------------------------------
 * */

/* CRC-32 by polynomial division, bit by bit: the definition, not the library's code. */
static uint32_t crc_of(const char *text, size_t count)
{
    uint32_t remainder = 0xffffffffu;
    for (size_t i = 0; i < count; i++)
        for (int bit = 0; bit < 8; bit++) {
            const uint32_t input = (uint32_t)((unsigned char)text[i] >> bit & 1);
            remainder = (remainder >> 1) ^ (((remainder ^ input) & 1) ? 0xedb88320u : 0u);
        }
    return ~remainder;
}

/* A whole file from its lines between the first and the last. */
static char *file_of(const char *body, unsigned facts)
{
    const size_t capacity = strlen(body) + 128;
    char *text = malloc(capacity);
    assert_non_null(text);
    snprintf(text, capacity, "acromion-wisdom 1\n%s", body);
    const uint32_t crc = crc_of(text, strlen(text));
    snprintf(text + strlen(text), capacity - strlen(text), "end facts=%u crc32=%08" PRIx32 "\n", facts, crc);
    return text;
}

static void fact_line(char line[1024], const char *problem, const acr__kernel *kernel, const char *effort,
                      double median_ns)
{
    snprintf(line, 1024, "%s = %s img=%016" PRIx64 " effort=%s median_ns=%.1f mad_ns=2.5 n=15\n", problem, kernel->name,
             acr__kernel_digest(kernel), effort, median_ns);
}

/* A context, its device line, and the kernels of its backend that can run PROBLEM. */
typedef struct scene {
    acr_ctx *ctx;
    char device_line[WISDOM_DEVICE_MAX + 16];
    const acr__kernel *kernels[64];
    size_t kernel_count;
} scene;

static scene scene_make(void)
{
    scene s = {.ctx = cpu_ctx(2)};
    const acr__device *device = &acr__ctx_backend_device(s.ctx)->device;
    char key[WISDOM_DEVICE_MAX];
    acr__wisdom_device_key(device, key);
    snprintf(s.device_line, sizeof s.device_line, "device %s\n", key);
    const acr_problem p = canonical_of(PROBLEM);
    for (size_t i = 0; i < acr__kernel_count && s.kernel_count < COUNT_OF(s.kernels); i++)
        if (!acr__why_not(acr__kernels[i], &p, device))
            s.kernels[s.kernel_count++] = acr__kernels[i];
    assert_true(s.kernel_count >= 1);
    return s;
}

/* Imports a body; the report goes to *report. */
static acr_status import_body(const scene *s, const char *body, unsigned facts, acr_wisdom_report *report)
{
    const char *path = scratch_path("import");
    char *text = file_of(body, facts);
    write_file(path, text);
    free(text);
    const acr_status status = acr_wisdom_import(s->ctx, path, report);
    unlink(path);
    return status;
}

/* Imports "device line, fact line"s that must be accepted; returns the report. */
static acr_wisdom_report import_fact(const scene *s, const char *problem, const acr__kernel *kernel, const char *effort,
                                     double median_ns)
{
    char line[1024], body[2048];
    fact_line(line, problem, kernel, effort, median_ns);
    snprintf(body, sizeof body, "%s%s", s->device_line, line);
    acr_wisdom_report report = ACR_WISDOM_REPORT_INIT;
    assert_ok(import_body(s, body, 1, &report));
    return report;
}

static acr_status plan_by_wisdom(const scene *s, const char *problem, acr_plan **plan)
{
    const acr_problem p = problem_of(problem);
    return acr_plan_create(plan, s->ctx, &p, ACR_WISDOM_ONLY);
}

static void assert_no_wisdom(const scene *s, const char *problem)
{
    acr_plan *plan = NULL;
    assert_fails(plan_by_wisdom(s, problem, &plan), ACR_NO_WISDOM, problem);
    assert_null(plan);
}

/* The plan by wisdom uses this kernel and says the median (in microseconds, as acr_plan_text prints it). */
static void assert_wisdom(const scene *s, const char *problem, const acr__kernel *kernel, const char *median_us)
{
    acr_plan *plan = NULL;
    assert_ok(plan_by_wisdom(s, problem, &plan));
    assert_string_equal(acr_plan_kernel(plan), kernel->name);
    assert_non_null(strstr(acr_plan_text(plan), "wisdom"));
    if (!strstr(acr_plan_text(plan), median_us))
        fail_msg("\"%s\" does not say %s", acr_plan_text(plan), median_us);
    acr_plan_destroy(plan);
}

/* Files in the scratch folder that begin with the path's name: the file itself and any temporary beside it. */
static int files_beside(const char *path)
{
    char folder[512];
    snprintf(folder, sizeof folder, "%s", path);
    char *slash = strrchr(folder, '/');
    *slash = '\0';
    const char *name = slash + 1;
    DIR *directory = opendir(folder);
    assert_non_null(directory);
    int count = 0;
    for (const struct dirent *entry; (entry = readdir(directory));)
        count += strncmp(entry->d_name, name, strlen(name)) == 0;
    closedir(directory);
    return count;
}

/* ---- Import -------------------------------------------------------------------------------------------------------
 * */

static void a_fact_decides_the_plan(void **state)
{
    (void)state;
    /* Each kernel in turn, the slowest included: wisdom is believed, not second-guessed. */
    for (size_t i = 0;; i++) {
        scene s = scene_make();
        assert_no_wisdom(&s, PROBLEM);
        const acr_wisdom_report report = import_fact(&s, PROBLEM, s.kernels[i], "measure", 7900.0);
        assert_int_equal(report.imported, 1);
        assert_int_equal(report.skipped, 0);
        assert_int_equal(report.other, 0);
        assert_wisdom(&s, PROBLEM, s.kernels[i], "7.90 us");
        assert_no_wisdom(&s, OTHER_PROBLEM);
        const acr_problem p = problem_of(PROBLEM);
        acr_plan *plan = NULL;
        assert_ok(acr_plan_create(&plan, s.ctx, &p, ACR_ESTIMATE)); /* every effort uses wisdom */
        assert_string_equal(acr_plan_kernel(plan), s.kernels[i]->name);
        acr_plan_destroy(plan);
        const size_t count = s.kernel_count;
        acr_ctx_destroy(s.ctx);
        if (i + 1 == count)
            break;
    }
}

static void higher_effort_wins_and_equal_effort_renews(void **state)
{
    (void)state;
    scene s = scene_make();
    const acr__kernel *a = s.kernels[0], *b = s.kernels[s.kernel_count - 1];
    import_fact(&s, PROBLEM, a, "measure", 1000.0);
    assert_wisdom(&s, PROBLEM, a, "1.00 us");
    import_fact(&s, PROBLEM, b, "measure", 2000.0); /* equal effort: the newer, though slower */
    assert_wisdom(&s, PROBLEM, b, "2.00 us");
    import_fact(&s, PROBLEM, a, "patient", 3000.0); /* higher */
    assert_wisdom(&s, PROBLEM, a, "3.00 us");
    import_fact(&s, PROBLEM, b, "measure", 4000.0); /* lower */
    assert_wisdom(&s, PROBLEM, a, "3.00 us");
    import_fact(&s, PROBLEM, b, "patient", 5000.0);
    assert_wisdom(&s, PROBLEM, b, "5.00 us");
    acr_ctx_destroy(s.ctx);
}

static void facts_that_no_longer_hold_are_skipped_and_counted(void **state)
{
    (void)state;
    scene s = scene_make();
    const acr__kernel *k = s.kernels[0];
    char body[4096], good[1024];
    fact_line(good, OTHER_PROBLEM, k, "measure", 1000.0);
    snprintf(body, sizeof body,
             "%s"
             "%s = fwd_never_f32_d64_1x1_nowhere img=%016" PRIx64
             " effort=patient median_ns=1.0 mad_ns=0.0 n=1\n"                           /* unknown kernel */
             "%s = %s img=%016" PRIx64 " effort=patient median_ns=1.0 mad_ns=0.0 n=1\n" /* changed machine code */
             "b1:h2:s16:d64 = %s img=%016" PRIx64 " effort=patient median_ns=1.0 mad_ns=0.0 n=1\n" /* of another type */
             "%s"
             "device another machine\n"
             "%s = %s img=%016" PRIx64 " effort=patient median_ns=1.0 mad_ns=0.0 n=1\n",
             s.device_line, PROBLEM, acr__kernel_digest(k), PROBLEM, k->name, acr__kernel_digest(k) ^ 1, k->name,
             acr__kernel_digest(k), good, PROBLEM, k->name, acr__kernel_digest(k));
    acr_wisdom_report report = ACR_WISDOM_REPORT_INIT;
    assert_ok(import_body(&s, body, 5, &report));
    assert_int_equal(report.size, sizeof report);
    assert_int_equal(report.imported, 1);
    assert_int_equal(report.skipped, 3);
    assert_int_equal(report.other, 1);
    assert_no_wisdom(&s, PROBLEM);
    assert_wisdom(&s, OTHER_PROBLEM, k, "1.00 us");
    acr_ctx_destroy(s.ctx);
}

static void kernels_have_digests_of_their_own(void **state)
{
    (void)state;
    for (size_t i = 0; i < acr__kernel_count; i++) {
        assert_int_equal(acr__kernel_digest(acr__kernels[i]), acr__kernel_digest(acr__kernels[i]));
        for (size_t j = 0; j < i; j++)
            if (acr__kernel_digest(acr__kernels[i]) == acr__kernel_digest(acr__kernels[j]))
                fail_msg("%s and %s have one digest", acr__kernels[i]->name, acr__kernels[j]->name);
    }
}

static void an_empty_file_is_valid_and_report_may_be_null(void **state)
{
    (void)state;
    scene s = scene_make();
    acr_wisdom_report report = {(uint32_t)sizeof report, 9, 9, 9};
    assert_ok(import_body(&s, "", 0, &report));
    assert_true(report.imported == 0 && report.skipped == 0 && report.other == 0);
    assert_ok(import_body(&s, s.device_line, 0, NULL));
    acr_ctx_destroy(s.ctx);
}

/* A malformed file: the line at fault and what is said about it. A good fact of PROBLEM stands before, at line 3. */
static const struct {
    const char *line; /* follows that fact, as line 4 */
    const char *reason;
} bad_lines[] = {
    {"\n", "line 4"},
    {"nonsense\n", "line 4"},
    {"# a comment\n", "line 4"},
    {"device \n", "line 4: the device's name"},
    {"f32:b1:h2:s24:d64\n", "line 4: expected ' = '"},
    {"f32:b1:h2:s24:d64 = \n", "line 4: expected a kernel name"},
    {"f32:b1:h2:s24:d64 = Fwd-x img=0123456789abcdef effort=measure median_ns=1.0 mad_ns=0.0 n=1\n",
     "line 4: expected a kernel name"},
    {"f32:b1:h2:s24:d64 = k img=0123456789abcde effort=measure median_ns=1.0 mad_ns=0.0 n=1\n",
     "line 4: expected img="},
    {"f32:b1:h2:s24:d64 = k img=0123456789abcdeg effort=measure median_ns=1.0 mad_ns=0.0 n=1\n",
     "line 4: expected img="},
    {"f32:b1:h2:s24:d64 = k effort=measure img=0123456789abcdef median_ns=1.0 mad_ns=0.0 n=1\n",
     "line 4: expected img="},
    {"f32:b1:h2:s24:d64 = k img=0123456789abcdef effort=lazy median_ns=1.0 mad_ns=0.0 n=1\n",
     "line 4: expected effort="},
    {"f32:b1:h2:s24:d64 = k img=0123456789abcdef effort=measure median_ns=fast mad_ns=0.0 n=1\n",
     "line 4: expected median_ns="},
    {"f32:b1:h2:s24:d64 = k img=0123456789abcdef effort=measure median_ns=-1.0 mad_ns=0.0 n=1\n",
     "line 4: expected median_ns="},
    {"f32:b1:h2:s24:d64 = k img=0123456789abcdef effort=measure median_ns=1e9 mad_ns=0.0 n=1\n",
     "line 4: expected median_ns="},
    {"f32:b1:h2:s24:d64 = k img=0123456789abcdef effort=measure median_ns=1.0 mad_ns= n=1\n",
     "line 4: expected mad_ns="},
    {"f32:b1:h2:s24:d64 = k img=0123456789abcdef effort=measure median_ns=1.0 mad_ns=0.0\n", "line 4: expected n="},
    {"f32:b1:h2:s24:d64 = k img=0123456789abcdef effort=measure median_ns=1.0 mad_ns=0.0 n=-1\n",
     "line 4: expected n="},
    {"f32:b1:h2:s24:d64 = k img=0123456789abcdef effort=measure median_ns=1.0 mad_ns=0.0 n=1 more\n",
     "line 4: unexpected text"},
    {"f32:b1:h2:s24:d64  = k img=0123456789abcdef effort=measure median_ns=1.0 mad_ns=0.0 n=1\n", "line 4"},
    {"f32:d64:b1:h2:s24 = k img=0123456789abcdef effort=measure median_ns=1.0 mad_ns=0.0 n=1\n",
     "line 4: the problem is not in canonical form"},
    {"b1:h2:s24:d64:cap50 = k img=0123456789abcdef effort=measure median_ns=1.0 mad_ns=0.0 n=1\n",
     "line 4: the problem is not in canonical form"}, /* every softcap is called cap1 */
    {"f32:b1:h2:s24 = k img=0123456789abcdef effort=measure median_ns=1.0 mad_ns=0.0 n=1\n", "line 4: the problem"},
    {"acromion-wisdom 1\n", "line 4"},
};

static void malformed_lines_are_named_and_nothing_is_imported(void **state)
{
    (void)state;
    scene s = scene_make();
    for (size_t i = 0; i < COUNT_OF(bad_lines); i++) {
        char good[1024], body[4096];
        fact_line(good, PROBLEM, s.kernels[0], "measure", 1000.0);
        snprintf(body, sizeof body, "%s%s%s", s.device_line, good, bad_lines[i].line);
        acr_wisdom_report report = {(uint32_t)sizeof report, 7, 7, 7};
        const acr_status status = import_body(&s, body, 2, &report);
        if (status != ACR_FORMAT || !strstr(acr_last_error(), bad_lines[i].reason))
            fail_msg("after %s: status %d, \"%s\"; expected %d, \"%s\"", bad_lines[i].line, (int)status,
                     acr_last_error(), (int)ACR_FORMAT, bad_lines[i].reason);
        assert_true(report.imported == 7 && report.skipped == 7 && report.other == 7); /* written only on success */
        assert_no_wisdom(&s, PROBLEM);
    }
    acr_ctx_destroy(s.ctx);
}

static void malformed_frames_are_refused(void **state)
{
    (void)state;
    scene s = scene_make();
    char good[1024], body[2048], huge[2048];
    fact_line(good, PROBLEM, s.kernels[0], "measure", 1000.0);
    snprintf(body, sizeof body, "%s%s", s.device_line, good);
    /* the count of facts */
    assert_fails(import_body(&s, body, 0, NULL), ACR_FORMAT, "line 4");
    assert_fails(import_body(&s, body, 2, NULL), ACR_FORMAT, "line 4");
    /* a fact before any device */
    assert_fails(import_body(&s, good, 1, NULL), ACR_FORMAT, "line 2");
    /* a line longer than any fact can be */
    memset(huge, 'x', sizeof huge);
    huge[sizeof huge - 2] = '\n';
    huge[sizeof huge - 1] = '\0';
    assert_fails(import_body(&s, huge, 0, NULL), ACR_FORMAT, "line 2: the line is too long");
    /* files that are none */
    const char *path = scratch_path("frame");
    const char *texts[] = {"",
                           "\n",
                           "acromion-wisdom 2\nend facts=0 crc32=00000000\n",
                           "acromion-wisdom 1",
                           "acromion-wisdom 1\n",
                           "end facts=0 crc32=00000000\n",
                           "acromion-wisdom 1\nend facts=0 crc32=00000000\n"};
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        write_file(path, texts[i]);
        assert_fails(acr_wisdom_import(s.ctx, path, NULL), ACR_FORMAT, "line");
    }
    /* something after the end */
    char *whole = file_of(body, 1);
    char longer[4096];
    snprintf(longer, sizeof longer, "%s\n", whole);
    write_file(path, longer);
    assert_fails(acr_wisdom_import(s.ctx, path, NULL), ACR_FORMAT, "line 5");
    free(whole);
    unlink(path);
    assert_no_wisdom(&s, PROBLEM);
    acr_ctx_destroy(s.ctx);
}

static void torn_and_damaged_files_import_nothing(void **state)
{
    (void)state;
    scene s = scene_make();
    char good[1024], body[2048];
    fact_line(good, PROBLEM, s.kernels[0], "measure", 1000.0);
    snprintf(body, sizeof body, "%s%s", s.device_line, good);
    char *whole = file_of(body, 1);
    const size_t length = strlen(whole);
    const char *path = scratch_path("torn");
    for (size_t cut = 0; cut < length; cut++) {
        char *torn = strdup(whole);
        torn[cut] = '\0';
        write_file(path, torn);
        free(torn);
        assert_int_equal(acr_wisdom_import(s.ctx, path, NULL), ACR_FORMAT);
    }
    for (size_t at = 0; at < length; at++) {
        char *damaged = strdup(whole);
        damaged[at] = (char)(damaged[at] ^ (at % 2 ? 1 : 4)); /* never makes a zero byte of text */
        write_file(path, damaged);
        free(damaged);
        assert_int_equal(acr_wisdom_import(s.ctx, path, NULL), ACR_FORMAT);
    }
    assert_no_wisdom(&s, PROBLEM);
    write_file(path, whole); /* untouched, it is fine */
    assert_ok(acr_wisdom_import(s.ctx, path, NULL));
    free(whole);
    unlink(path);
    acr_ctx_destroy(s.ctx);
}

static void zero_bytes_are_malformed(void **state)
{
    (void)state;
    /* The checksum is right; what a C string would hide is not. */
    static const char body[] = "acromion-wisdom 1\ndevice one\0two\n";
    scene s = scene_make();
    char end[64];
    snprintf(end, sizeof end, "end facts=0 crc32=%08" PRIx32 "\n", crc_of(body, sizeof body - 1));
    const char *path = scratch_path("zero");
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(body, 1, sizeof body - 1, file), sizeof body - 1);
    assert_true(fputs(end, file) >= 0);
    fclose(file);
    assert_fails(acr_wisdom_import(s.ctx, path, NULL), ACR_FORMAT, "line 2");
    unlink(path);
    acr_ctx_destroy(s.ctx);
}

static void unreadable_files_are_io_errors(void **state)
{
    (void)state;
    scene s = scene_make();
    const char *missing = scratch_path("missing");
    unlink(missing);
    assert_fails(acr_wisdom_import(s.ctx, missing, NULL), ACR_IO, missing);
    assert_fails(acr_wisdom_import(s.ctx, "/", NULL), ACR_IO, "/");
    assert_fails(acr_wisdom_import(s.ctx, "/dev/null", NULL), ACR_IO, "/dev/null");
    assert_fails(acr_wisdom_import(NULL, missing, NULL), ACR_INVALID, "ctx");
    assert_fails(acr_wisdom_import(s.ctx, NULL, NULL), ACR_INVALID, "path");
    acr_wisdom_report report = {4, 0, 0, 0};
    assert_fails(acr_wisdom_import(s.ctx, missing, &report), ACR_INVALID, "size");
    acr_ctx_destroy(s.ctx);
}

/* ---- Export -------------------------------------------------------------------------------------------------------
 * */

static void export_writes_what_import_reads(void **state)
{
    (void)state;
    scene s = scene_make(), other = scene_make();
    import_fact(&s, PROBLEM, s.kernels[0], "measure", 1234.5);
    import_fact(&s, OTHER_PROBLEM, s.kernels[0], "patient", 2345.0);
    const char *path = scratch_path("export");
    unlink(path);
    assert_ok(acr_wisdom_export(s.ctx, path));

    /* It is the file that we would have written by hand. */
    char first[1024], second[1024], body[4096];
    fact_line(first, PROBLEM, s.kernels[0], "measure", 1234.5);
    fact_line(second, OTHER_PROBLEM, s.kernels[0], "patient", 2345.0);
    snprintf(body, sizeof body, "%s%s%s", s.device_line, first, second);
    char *expected = file_of(body, 2), *written = read_file(path);
    assert_string_equal(written, expected);
    free(expected);

    acr_wisdom_report report = ACR_WISDOM_REPORT_INIT;
    assert_ok(acr_wisdom_import(other.ctx, path, &report));
    assert_int_equal(report.imported, 2);
    assert_wisdom(&other, PROBLEM, s.kernels[0], "1.23 us");
    /* exporting the same again changes nothing */
    assert_ok(acr_wisdom_export(other.ctx, path));
    char *again = read_file(path);
    assert_string_equal(again, written);
    free(again);
    free(written);
    assert_int_equal(files_beside(path), 1); /* no temporary is left */
    unlink(path);
    acr_ctx_destroy(s.ctx);
    acr_ctx_destroy(other.ctx);
}

static void export_keeps_other_devices_and_problems(void **state)
{
    (void)state;
    scene s = scene_make();
    const char *path = scratch_path("keep");
    char stale[1024], foreign[1024], unknown[1024], body[8192];
    fact_line(stale, PROBLEM, s.kernels[0], "measure", 9000.0);
    fact_line(foreign, PROBLEM, s.kernels[0], "measure", 8000.0);
    /* a fact about this device and a kernel that this build lacks: another build's, to be kept */
    snprintf(unknown, sizeof unknown,
             "%s = fwd_never_f32_d64_1x1_nowhere img=0123456789abcdef effort=patient median_ns=1.0 mad_ns=0.0 n=1\n",
             OTHER_PROBLEM);
    snprintf(body, sizeof body, "device another machine\n%s%s%s%s", foreign, s.device_line, stale, unknown);
    char *old = file_of(body, 3);
    write_file(path, old);
    free(old);

    import_fact(&s, PROBLEM, s.kernels[0], "measure", 1000.0);
    assert_ok(acr_wisdom_export(s.ctx, path));
    char *text = read_file(path);
    char fresh[1024];
    fact_line(fresh, PROBLEM, s.kernels[0], "measure", 1000.0);
    assert_non_null(strstr(text, foreign));
    assert_non_null(strstr(text, unknown));
    assert_non_null(strstr(text, fresh));
    assert_null(strstr(text, "median_ns=9000.0")); /* the context knows better */
    assert_non_null(strstr(text, "end facts=3 "));
    free(text);
    acr_wisdom_report report = ACR_WISDOM_REPORT_INIT;
    assert_ok(acr_wisdom_import(s.ctx, path, &report));
    assert_true(report.imported == 1 && report.skipped == 1 && report.other == 1);
    unlink(path);
    acr_ctx_destroy(s.ctx);
}

static void export_never_touches_a_file_that_is_no_wisdom(void **state)
{
    (void)state;
    scene s = scene_make();
    import_fact(&s, PROBLEM, s.kernels[0], "measure", 1000.0);
    const char *path = scratch_path("precious");
    write_file(path, "my precious notes\n");
    assert_fails(acr_wisdom_export(s.ctx, path), ACR_FORMAT, "line 1");
    char *text = read_file(path);
    assert_string_equal(text, "my precious notes\n");
    free(text);
    assert_int_equal(files_beside(path), 1);
    unlink(path);
    acr_ctx_destroy(s.ctx);
}

/* In a process of its own, with a fact of its own. */
static void export_in_child(const acr__device *device, const char *path, int number)
{
    acr__wisdom *wisdom = acr__wisdom_create(device);
    acr__fact fact = {.digest = 1, .effort = ACR_MEASURE, .median_ns = 1.0, .samples = 1};
    snprintf(fact.problem, sizeof fact.problem, "f32:b1:h2:s%d:d64", number);
    snprintf(fact.kernel, sizeof fact.kernel, "some_kernel");
    const bool written =
        wisdom && acr__wisdom_put(wisdom, &fact) == ACR_OK && acr__wisdom_write(wisdom, path) == ACR_OK;
    _exit(written ? 0 : 1);
}

static void exports_at_once_keep_all_facts(void **state)
{
    (void)state;
    enum {
        EXPORTS = 40,
        AT_ONCE = 8
    };
    scene s = scene_make();
    const char *path = scratch_path("exports_at_once.wisdom");
    unlink(path);
    int running = 0, ended = 0, failed = 0;
    for (int started = 0; ended < EXPORTS; ended++, running--) {
        for (; started < EXPORTS && running < AT_ONCE; started++, running++) {
            const pid_t child = fork();
            assert_true(child >= 0);
            if (child == 0)
                export_in_child(&acr__ctx_backend_device(s.ctx)->device, path, started + 1);
        }
        int result = -1;
        assert_true(wait(&result) > 0);
        failed += result != 0;
    }
    assert_int_equal(failed, 0);
    char *text = read_file(path);
    uint32_t facts = 0;
    assert_ok(acr__wisdom_check(text, strlen(text), &facts));
    assert_int_equal(facts, EXPORTS);
    free(text);
    unlink(path);
    acr_ctx_destroy(s.ctx);
}

static void export_replaces_in_one_step(void **state)
{
    (void)state;
    /* Whoever has the old file open goes on reading the old file, whole. */
    scene s = scene_make();
    const char *path = scratch_path("atomic");
    unlink(path);
    assert_ok(acr_wisdom_export(s.ctx, path));
    char *old = read_file(path);
    const int open_file = open(path, O_RDONLY);
    assert_true(open_file >= 0);
    import_fact(&s, PROBLEM, s.kernels[0], "measure", 1000.0);
    assert_ok(acr_wisdom_export(s.ctx, path));
    struct stat before, after;
    assert_int_equal(fstat(open_file, &before), 0);
    assert_int_equal(stat(path, &after), 0);
    assert_true(before.st_ino != after.st_ino);
    char content[4096] = "";
    assert_int_equal(read(open_file, content, sizeof content - 1), strlen(old));
    assert_string_equal(content, old);
    free(old);
    close(open_file);
    unlink(path);
    acr_ctx_destroy(s.ctx);
}

static void unwritable_places_are_io_errors(void **state)
{
    (void)state;
    scene s = scene_make();
    assert_fails(acr_wisdom_export(s.ctx, "/nonexistent/folder/wisdom"), ACR_IO, "/nonexistent/folder/wisdom");
    assert_fails(acr_wisdom_export(s.ctx, "/"), ACR_IO, "/");
    char path[4096]; /* the system takes it, but not the name of the temporary file beside it */
    for (size_t i = 0; i < sizeof path - 2; i++)
        path[i] = i % 2 ? '.' : '/';
    memcpy(path + sizeof path - 2, "w", 2);
    assert_fails(acr_wisdom_export(s.ctx, path), ACR_IO, "longer than");
    assert_fails(acr_wisdom_export(NULL, "x"), ACR_INVALID, "ctx");
    assert_fails(acr_wisdom_export(s.ctx, NULL), ACR_INVALID, "path");
    acr_ctx_destroy(s.ctx);
}

/* ---- Planning and forgetting --------------------------------------------------------------------------------------
 * */

static void measuring_makes_wisdom(void **state)
{
    (void)state;
    scene s = scene_make();
    const acr_problem p = problem_of(PROBLEM);
    acr_plan *plan = NULL;
    assert_ok(acr_plan_create(&plan, s.ctx, &p, ACR_MEASURE));
    assert_non_null(strstr(acr_plan_text(plan), "measured"));
    const char *winner = acr_plan_kernel(plan);
    acr_plan_destroy(plan);

    assert_ok(plan_by_wisdom(&s, PROBLEM, &plan));
    assert_string_equal(acr_plan_kernel(plan), winner);
    assert_non_null(strstr(acr_plan_text(plan), "wisdom"));
    assert_non_null(strstr(acr_plan_text(plan), "measure"));
    acr_plan_destroy(plan);
    assert_ok(acr_plan_create(&plan, s.ctx, &p, ACR_MEASURE)); /* once is enough */
    assert_non_null(strstr(acr_plan_text(plan), "wisdom"));
    acr_plan_destroy(plan);
    assert_ok(acr_plan_create(&plan, s.ctx, &p, ACR_PATIENT)); /* but patience is another thing */
    assert_non_null(strstr(acr_plan_text(plan), "measured"));
    acr_plan_destroy(plan);
    assert_ok(plan_by_wisdom(&s, PROBLEM, &plan));
    assert_non_null(strstr(acr_plan_text(plan), "patient"));
    acr_plan_destroy(plan);

    /* It survives a file. */
    const char *path = scratch_path("measured");
    unlink(path);
    assert_ok(acr_wisdom_export(s.ctx, path));
    scene fresh = scene_make();
    acr_wisdom_report report = ACR_WISDOM_REPORT_INIT;
    assert_ok(acr_wisdom_import(fresh.ctx, path, &report));
    assert_int_equal(report.imported, 1);
    assert_ok(plan_by_wisdom(&fresh, PROBLEM, &plan));
    acr_plan_destroy(plan);
    unlink(path);
    acr_ctx_destroy(fresh.ctx);
    acr_ctx_destroy(s.ctx);
}

static void equal_problems_share_wisdom(void **state)
{
    (void)state;
    scene s = scene_make();
    import_fact(&s, PROBLEM, s.kernels[0], "measure", 1000.0);
    assert_wisdom(&s, "d64/64:s16/16:h2/2:b1:f32:align16:bhsd", s.kernels[0], "1.00 us");
    acr_ctx_destroy(s.ctx);
}

static void forgetting_drops_every_fact(void **state)
{
    (void)state;
    scene s = scene_make();
    import_fact(&s, PROBLEM, s.kernels[0], "measure", 1000.0);
    acr_wisdom_forget(s.ctx);
    assert_no_wisdom(&s, PROBLEM);
    const char *path = scratch_path("forgotten");
    unlink(path);
    assert_ok(acr_wisdom_export(s.ctx, path));
    char *text = read_file(path);
    assert_non_null(strstr(text, "end facts=0 "));
    free(text);
    unlink(path);
    acr_ctx_destroy(s.ctx);
}

/* What threads do with one context at once. */
typedef struct learner {
    pthread_t thread;
    const scene *scene;
    const char *path; /* of its own */
    bool passed;
} learner;

static void *learn_often(void *arg)
{
    learner *l = arg;
    const acr_problem p = problem_of(PROBLEM);
    l->passed = true;
    for (int round = 0; round < 30 && l->passed; round++) {
        acr_plan *plan = NULL;
        l->passed = acr_wisdom_export(l->scene->ctx, l->path) == ACR_OK &&
                    acr_wisdom_import(l->scene->ctx, l->path, NULL) == ACR_OK;
        const acr_status status = acr_plan_create(&plan, l->scene->ctx, &p, ACR_WISDOM_ONLY);
        l->passed = l->passed && (status == ACR_OK || status == ACR_NO_WISDOM);
        acr_plan_destroy(plan);
        if (round % 10 == 9)
            acr_wisdom_forget(l->scene->ctx);
    }
    return NULL;
}

static void threads_share_wisdom(void **state)
{
    (void)state;
    scene s = scene_make();
    import_fact(&s, PROBLEM, s.kernels[0], "measure", 1000.0);
    learner learners[] = {
        {.path = scratch_path("learner0")}, {.path = scratch_path("learner1")}, {.path = scratch_path("learner2")}};
    for (size_t i = 0; i < COUNT_OF(learners); i++) {
        unlink(learners[i].path);
        learners[i].scene = &s;
        assert_int_equal(pthread_create(&learners[i].thread, NULL, learn_often, &learners[i]), 0);
    }
    for (size_t i = 0; i < COUNT_OF(learners); i++) {
        assert_int_equal(pthread_join(learners[i].thread, NULL), 0);
        assert_true(learners[i].passed);
        unlink(learners[i].path);
    }
    acr_ctx_destroy(s.ctx);
}

static void text_in_memory_is_checked_as_import_does(void **state)
{
    (void)state;
    scene s = scene_make();
    char line[1024], body[2048];
    fact_line(line, PROBLEM, s.kernels[0], "measure", 1000.0);
    snprintf(body, sizeof body, "%s%s", s.device_line, line);
    char *text = file_of(body, 1);
    uint32_t facts = 99;
    assert_ok(acr__wisdom_check(text, strlen(text), &facts));
    assert_int_equal(facts, 1);
    assert_fails(acr__wisdom_check(text, strlen(text) - 1, &facts), ACR_FORMAT, "line 4");
    assert_int_equal(facts, 1);
    free(text);
    acr_ctx_destroy(s.ctx);
}

/* ---- Links ------------------------------------------------------------------------------------------------------- */

static const char LINK[] =
    "link ranks=4 hosts=1 bytes_per_s=350000000000.0 latency_ns=12000.5 copy_bytes_per_s=2000000000000.0 n=7\n";

/* A file of version 2 with the device line and a body. */
static acr_status import_links(const scene *s, const char *body, unsigned facts, acr_wisdom_report *report)
{
    const char *path = scratch_path("links");
    char text[4096];
    snprintf(text, sizeof text, "acromion-wisdom 2\n%s%s", s->device_line, body);
    const uint32_t crc = crc_of(text, strlen(text));
    snprintf(text + strlen(text), sizeof text - strlen(text), "end facts=%u crc32=%08" PRIx32 "\n", facts, crc);
    write_file(path, text);
    const acr_status status = acr_wisdom_import(s->ctx, path, report);
    unlink(path);
    return status;
}

static void links_are_read_kept_and_written(void **state)
{
    (void)state;
    scene s = scene_make();
    acr_link link;
    acr_wisdom_report report = ACR_WISDOM_REPORT_INIT;
    assert_fails(acr_wisdom_find_link(s.ctx, 4, 1, &link), ACR_NO_WISDOM, "a link of 4 ranks on 1 hosts");
    assert_ok(import_links(&s, LINK, 1, &report));
    assert_int_equal(report.imported, 1);
    assert_ok(acr_wisdom_find_link(s.ctx, 4, 1, &link));
    assert_true(link.bytes_per_s == 350e9 && link.copy_bytes_per_s == 2e12 && link.samples == 7);
    assert_true(link.latency_s > 12.0004e-6 && link.latency_s < 12.0006e-6);
    assert_fails(acr_wisdom_find_link(s.ctx, 4, 2, &link), ACR_NO_WISDOM, "2 hosts");
    /* Another of as many ranks and hosts takes its place; one of two hosts stands beside it. */
    link.bytes_per_s = 1e9;
    assert_ok(acr_wisdom_add_link(s.ctx, &link));
    link.hosts = 2;
    assert_ok(acr_wisdom_add_link(s.ctx, &link));
    const char *path = scratch_path("links_out");
    assert_ok(acr_wisdom_export(s.ctx, path));
    acr_wisdom_forget(s.ctx);
    assert_fails(acr_wisdom_find_link(s.ctx, 4, 1, &link), ACR_NO_WISDOM, "link");
    /* What the file holds survives an export that knows none, and comes back. */
    assert_ok(acr_wisdom_export(s.ctx, path));
    assert_ok(acr_wisdom_import(s.ctx, path, &report));
    assert_int_equal(report.imported, 2);
    assert_ok(acr_wisdom_find_link(s.ctx, 4, 1, &link));
    assert_true(link.bytes_per_s == 1e9 && link.hosts == 1);
    unlink(path);
    acr_ctx_destroy(s.ctx);
}

static void wrong_links_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *line, *fragment;
    } cases[] = {
        {"link ranks=1 hosts=1 bytes_per_s=1.0 latency_ns=1.0 copy_bytes_per_s=1.0 n=1\n", "ranks is 1"},
        {"link ranks=2 hosts=3 bytes_per_s=1.0 latency_ns=1.0 copy_bytes_per_s=1.0 n=1\n",
         "hosts is 3, must be 1 to 2"},
        {"link ranks=2 hosts=1 bytes_per_s=0.0 latency_ns=1.0 copy_bytes_per_s=1.0 n=1\n", "bytes_per_s is 0"},
        {"link ranks=2 hosts=1 bytes_per_s=1.0 latency_ns=x copy_bytes_per_s=1.0 n=1\n", "expected latency_ns="},
        {"link ranks=2 hosts=1 bytes_per_s=1.0 latency_ns=1.0 copy_bytes_per_s=1.0 n=0\n", "samples is 0"},
        {"link ranks=2 hosts=1 bytes_per_s=1.0 latency_ns=1.0 copy_bytes_per_s=1.0 n=1 x\n", "unexpected text"}};
    scene s = scene_make();
    acr_link link = ACR_LINK_INIT;
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        assert_fails(import_links(&s, cases[i].line, 1, NULL), ACR_FORMAT, cases[i].fragment);
    /* Version 1 has none. */
    char body[2048];
    snprintf(body, sizeof body, "%s%s", s.device_line, LINK);
    assert_fails(import_body(&s, body, 1, NULL), ACR_FORMAT, "line 3");
    assert_fails(acr_wisdom_add_link(s.ctx, &link), ACR_INVALID, "link.ranks is 0");
    link.size = 8;
    assert_fails(acr_wisdom_add_link(s.ctx, &link), ACR_INVALID, "ACR_LINK_INIT");
    acr_ctx_destroy(s.ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_fact_decides_the_plan),
        cmocka_unit_test(higher_effort_wins_and_equal_effort_renews),
        cmocka_unit_test(facts_that_no_longer_hold_are_skipped_and_counted),
        cmocka_unit_test(kernels_have_digests_of_their_own),
        cmocka_unit_test(an_empty_file_is_valid_and_report_may_be_null),
        cmocka_unit_test(malformed_lines_are_named_and_nothing_is_imported),
        cmocka_unit_test(malformed_frames_are_refused),
        cmocka_unit_test(torn_and_damaged_files_import_nothing),
        cmocka_unit_test(zero_bytes_are_malformed),
        cmocka_unit_test(unreadable_files_are_io_errors),
        cmocka_unit_test(export_writes_what_import_reads),
        cmocka_unit_test(export_keeps_other_devices_and_problems),
        cmocka_unit_test(export_never_touches_a_file_that_is_no_wisdom),
        cmocka_unit_test(exports_at_once_keep_all_facts),
        cmocka_unit_test(export_replaces_in_one_step),
        cmocka_unit_test(unwritable_places_are_io_errors),
        cmocka_unit_test(measuring_makes_wisdom),
        cmocka_unit_test(equal_problems_share_wisdom),
        cmocka_unit_test(forgetting_drops_every_fact),
        cmocka_unit_test(threads_share_wisdom),
        cmocka_unit_test(text_in_memory_is_checked_as_import_does),
        cmocka_unit_test(links_are_read_kept_and_written),
        cmocka_unit_test(wrong_links_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
