/* Judging by a command, see worker.h. */
#include "worker.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/exit_code.h"
#include "base/files.h"
#include "base/progress.h"
#include "build_info.h"
#include "internal.h"
#include "judge.h"
#include "machine/device_lock.h"

enum {
    PROTOCOL = 1,
    JOB_BYTES_MAX = 512 << 20,
    COMPLAINT_BYTES = 300, /* the end of a launcher's stderr that is told */
    CHILD_FILE_BYTES = 256 << 20
};
#define RESULT_KEY "acromion_judged"
#define JOB_KEY "acromion_job"

void worker_last_place(char out[WORKER_PLACE_MAX], const char *log_path)
{
    char line[WORKER_PLACE_MAX];
    FILE *file = fopen(log_path, "r");
    out[0] = '\0';
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "at: ", 4) == 0) {
            snprintf(out, WORKER_PLACE_MAX, "%s", line + 4);
        }
    }
    if (file) {
        fclose(file);
    }
}

/* ---- Files as text ---- */

static char *to_hex(const unsigned char *bytes, size_t size)
{
    static const char digits[] = "0123456789abcdef";
    char *text = malloc(2 * size + 1);
    for (size_t i = 0; text && i < size; ++i) {
        text[2 * i] = digits[bytes[i] >> 4];
        text[2 * i + 1] = digits[bytes[i] & 15];
    }
    if (text) {
        text[2 * size] = '\0';
    }
    return text;
}

static int digit_of(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* NULL when it is no such text. */
static unsigned char *from_hex(const char *text, size_t length)
{
    unsigned char *bytes = length % 2 == 0 ? malloc(length / 2 + 1) : NULL;
    for (size_t i = 0; bytes && i < length; i += 2) {
        const int high = digit_of(text[i]), low = digit_of(text[i + 1]);
        if (high < 0 || low < 0) {
            free(bytes);
            return NULL;
        }
        bytes[i / 2] = (unsigned char)(16 * high + low);
    }
    return bytes;
}

/* What build_load reads of a folder; what the compilers said stays here. */
static bool is_wanted(const char *name)
{
    static const char *const wanted[] = {"artefact.json", "descriptor.json", "code.so", "host.so", "image.bin"};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; ++i) {
        if (strcmp(name, wanted[i]) == 0) {
            return true;
        }
    }
    return false;
}

static acr_status pack_file(json_t *files, const char *folder, const char *name)
{
    char path[PATH_MAX];
    const void *bytes = NULL;
    size_t size = 0;
    acr_status status = file_path(path, folder, name, "");
    if (status == ACR_OK) {
        status = file_map(path, &bytes, &size);
    }
    if (status != ACR_OK) {
        return status;
    }
    char *text = to_hex(bytes, size);
    const bool packed = text && json_object_set_new(files, name, json_string(text)) == 0;
    free(text);
    file_unmap(bytes, size);
    return packed ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for %s", path);
}

/* {} of no folder. */
static acr_status pack_folder(json_t *packed, const char *key, const char *folder)
{
    json_t *files = json_object();
    DIR *directory = folder ? opendir(folder) : NULL;
    acr_status status = folder && !directory ? acr__fail(ACR_IO, "%s: %s", folder, strerror(errno)) : ACR_OK;
    for (const struct dirent *entry; status == ACR_OK && directory && (entry = readdir(directory)) != NULL;) {
        status = is_wanted(entry->d_name) ? pack_file(files, folder, entry->d_name) : ACR_OK;
    }
    if (directory) {
        closedir(directory);
    }
    json_object_set_new(packed, key, files);
    return status;
}

static acr_status unpack_folder(const json_t *packed, const char *key, const char *folder)
{
    const char *name;
    json_t *value;
    if (mkdir(folder, 0700) != 0) {
        return acr__fail(ACR_IO, "%s: %s", folder, strerror(errno));
    }
    json_object_foreach(json_object_get(packed, key), name, value)
    {
        char path[PATH_MAX];
        const size_t length = json_string_length(value);
        unsigned char *bytes =
            is_wanted(name) && json_is_string(value) ? from_hex(json_string_value(value), length) : NULL;
        acr_status status = bytes ? file_path(path, folder, name, "")
                                  : acr__fail(ACR_FORMAT, "the job: %s: %.40s is no file of a trial", key, name);
        if (status == ACR_OK) {
            const file_part part = {bytes, length / 2};
            status = file_write(path, &part, 1);
        }
        free(bytes);
        if (status != ACR_OK) {
            return status;
        }
    }
    return ACR_OK;
}

/* Writes a document on one line for nobody else to read. */
static acr_status write_private(const json_t *document, const char *path)
{
    unlink(path);
    const int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    const bool written = file >= 0 && json_dumpfd(document, file, JSON_COMPACT) == 0 && write(file, "\n", 1) == 1;
    const int reason = errno;
    if (file >= 0) {
        close(file);
    }
    return written ? ACR_OK : acr__fail(ACR_IO, "%s: cannot be written: %s", path, strerror(reason));
}

/* ---- Asking ---- */

static acr_status pack(json_t **out, const worker_job *job)
{
    json_t *packed = json_pack("{s:i, s:O, s:f, s:b}", JOB_KEY, PROTOCOL, "job", job->job, "timeout_s", job->timeout_s,
                               "timed", (int)job->timed);
    acr_status status =
        packed ? pack_folder(packed, "candidate", job->candidate) : acr__fail(ACR_NO_MEMORY, "no memory for a job");
    if (status == ACR_OK) {
        status = pack_folder(packed, "incumbent", job->incumbent);
    }
    *out = packed;
    return status;
}

/* The launcher and the judge behind it, from a file and into files: no pipe can fill up. */
static acr_status launch(process_outcome *outcome, const worker *w, double wall_s, const char *const paths[3])
{
    char script[4096], number[16];
    const int flags[3] = {O_RDONLY, O_WRONLY | O_CREAT | O_TRUNC, O_WRONLY | O_CREAT | O_TRUNC};
    int streams[3];
    acr_status status = ACR_OK;
    *outcome = (process_outcome){.end = PROCESS_EXITED, .code = -1};
    snprintf(number, sizeof number, "%d", w->number);
    /* Through a pipe: Open MPI 4.1's mpirun crashes more often when its input is a file. */
    const int length = snprintf(script, sizeof script,
                                "ACROMION_WORKER=$0; export ACROMION_WORKER; cat | { %s \"$@\"; }", w->launcher);
    if (length >= (int)sizeof script) {
        return acr__fail(ACR_IO, "the launcher is longer than %zu characters", sizeof script - 80);
    }
    for (int i = 0; i < 3; ++i) {
        streams[i] = open(paths[i], flags[i] | O_CLOEXEC, 0600);
        if (streams[i] < 0 && status == ACR_OK) {
            status = acr__fail(ACR_IO, "%s: %s", paths[i], strerror(errno));
        }
    }
    const char *const argv[] = {"/bin/sh", "-c", script, number, w->program, "judge", NULL};
    const process_limits limits = {.wall_s = wall_s};
    pid_t pid;
    if (status == ACR_OK) {
        status = process_start(&pid, argv, NULL, streams, &limits);
    }
    for (int i = 0; i < 3; ++i) {
        if (streams[i] >= 0) {
            close(streams[i]);
        }
    }
    if (status == ACR_OK) {
        process_wait(outcome, pid, monotonic_s() + wall_s, w->stop);
    }
    return status;
}

/* The judge's own line among whatever else a launcher prints; NULL = there is none. */
static json_t *find_answer(const char *path)
{
    const void *bytes = NULL;
    size_t size = 0;
    json_t *found = NULL;
    if (file_map(path, &bytes, &size) != ACR_OK) {
        return NULL;
    }
    const char *at = bytes, *const end = at ? at + size : NULL;
    while (at < end && !found) {
        const char *newline = memchr(at, '\n', (size_t)(end - at));
        const char *next = newline ? newline + 1 : end;
        json_t *line = *at == '{' ? json_loadb(at, (size_t)(next - at), 0, NULL) : NULL;
        if (json_object_get(line, RESULT_KEY)) {
            found = json_incref(line);
        }
        json_decref(line);
        at = next;
    }
    file_unmap(bytes, size);
    return found;
}

/* The end of a file, on one line. */
static void read_tail(char out[COMPLAINT_BYTES + 1], const char *path)
{
    const void *bytes = NULL;
    size_t size = 0, length = 0;
    out[0] = '\0';
    if (file_map(path, &bytes, &size) == ACR_OK && bytes) {
        length = size < COMPLAINT_BYTES ? size : COMPLAINT_BYTES;
        memcpy(out, (const char *)bytes + size - length, length);
        out[length] = '\0';
    }
    file_unmap(bytes, size);
    for (size_t i = 0; i < length; ++i) {
        out[i] = (char)(out[i] == '\0' || out[i] == '\n' ? ' ' : out[i]);
    }
    while (length > 0 && out[length - 1] == ' ') {
        out[--length] = '\0';
    }
}

static const char *const end_names[] = {
    [PROCESS_EXITED] = "exited",
    [PROCESS_SIGNALLED] = "signalled",
    [PROCESS_TIMED_OUT] = "timed_out",
    [PROCESS_STOPPED] = "stopped",
};

static const char *text_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

/* What the judge's line says. Errors: that it is another build's, or that the judge could not judge. */
static acr_status read_answer(worker_answer *out, const json_t *line)
{
    const char *host = text_of(line, "host"), *end = text_of(line, "end");
    if (strcmp(text_of(line, "git_sha"), BUILD_GIT_SHA) != 0 || strcmp(text_of(line, "version"), acr_version()) != 0 ||
        json_integer_value(json_object_get(line, RESULT_KEY)) != PROTOCOL) {
        return acr__fail(ACR_IO, "%s has acromion %s (%s), this is %s (%s)", host, text_of(line, "version"),
                         text_of(line, "git_sha"), acr_version(), BUILD_GIT_SHA);
    }
    if (json_object_get(line, "error")) {
        return acr__fail(ACR_IO, "%s: %s", host, text_of(line, "error"));
    }
    for (size_t i = 0; i < sizeof end_names / sizeof end_names[0]; ++i) {
        if (strcmp(end, end_names[i]) == 0) {
            out->outcome.end = (process_end)i;
        }
    }
    out->outcome.code = (int)json_integer_value(json_object_get(line, "code"));
    out->outcome.wall_s = json_number_value(json_object_get(line, "wall_s"));
    snprintf(out->place, sizeof out->place, "%s", text_of(line, "place"));
    json_t *result = json_object_get(line, "result");
    out->result = json_is_object(result) ? json_incref(result) : NULL;
    return ACR_OK;
}

acr_status worker_ask(worker_answer *out, const worker *w, const worker_job *job, const char *folder, const char *name)
{
    static const char *const endings[3] = {".job.json", ".result.json", ".log"};
    char paths[3][PATH_MAX];
    process_outcome outcome;
    json_t *packed = NULL;
    *out = (worker_answer){.outcome = {.end = PROCESS_EXITED, .code = -1}};
    acr_status status = pack(&packed, job);
    for (int i = 0; i < 3 && status == ACR_OK; ++i) {
        status = file_path(paths[i], folder, name, endings[i]);
    }
    if (status == ACR_OK) {
        status = write_private(packed, paths[0]);
    }
    json_decref(packed);
    if (status == ACR_OK) {
        status = launch(&outcome, w, job->timeout_s + w->wait_s, (const char *const[]){paths[0], paths[1], paths[2]});
    }
    if (status != ACR_OK) {
        return status;
    }
    json_t *line = find_answer(paths[1]);
    if (line) {
        status = read_answer(out, line);
    } else {
        char how[96], complaint[COMPLAINT_BYTES + 1];
        process_outcome_text(how, &outcome);
        read_tail(complaint, paths[2]);
        status = acr__fail(ACR_IO, "no answer: %s%s%s", how, *complaint ? "; stderr: " : "", complaint);
    }
    json_decref(line);
    return status;
}

/* ---- Serving ---- */

/* 2: end the child, tidy up, and say so. */
static volatile int stop_wanted;

static void want_stop(int signal_number)
{
    (void)signal_number;
    stop_wanted = 2;
}

static pid_t launcher_pid;

/* Whose launcher has died has nobody left who waits for the result. */
static void look_for_launcher(int signal_number)
{
    (void)signal_number;
    if (getppid() != launcher_pid) {
        stop_wanted = 2;
    }
}

static void catch_signals(void)
{
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP};
    const struct itimerval often = {{0, 200000}, {0, 200000}};
    struct sigaction action = {.sa_handler = want_stop, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; ++i) {
        sigaction(ends[i], &action, NULL);
    }
    launcher_pid = getppid();
    action.sa_handler = look_for_launcher;
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
}

/* The first line of stdin: some launchers never close it. NULL without one. */
static json_t *read_job(char what[160])
{
    char *text = NULL;
    size_t capacity = 0;
    json_error_t error;
    const ssize_t length = getline(&text, &capacity, stdin);
    json_t *job = length > 0 && length < JOB_BYTES_MAX ? json_loadb(text, (size_t)length, 0, &error) : NULL;
    if (length <= 0) {
        snprintf(what, 160,
                 "no job on standard input: a launcher starts one judge and hands its input on "
                 "(mpirun -n 1, srun -n1); --workers says how many at once");
    } else if (!job) {
        snprintf(what, 160, "the job is not JSON: %.100s", error.text);
    } else if (json_integer_value(json_object_get(job, JOB_KEY)) != PROTOCOL) {
        snprintf(what, 160, "not a job of protocol %d", PROTOCOL);
        json_decref(job);
        job = NULL;
    }
    free(text);
    return job;
}

/* The child, alone on its device where it times, beside others that check where it checks. */
static acr_status run_child(process_outcome *outcome, const json_t *packed, const char *const paths[3])
{
    const json_t *job = json_object_get(packed, "job");
    const process_limits limits = {.wall_s = json_number_value(json_object_get(packed, "timeout_s")),
                                   .file_bytes = CHILD_FILE_BYTES};
    const char *const argv[] = {"/proc/self/exe", GATES_CHILD, paths[0], paths[1], NULL};
    int lock = -1;
    acr_status status = ACR_OK;
    if (json_is_true(json_object_get(packed, "timed"))) {
        const int32_t device = (int32_t)json_integer_value(json_object_get(job, "device"));
        status = device_lock(&lock, text_of(job, "backend"), device, &stop_wanted);
    } else if (strcmp(text_of(job, "backend"), "cuda") == 0 && !json_is_true(json_object_get(job, "model_clock"))) {
        status = device_share(&lock, "cuda", (int32_t)json_integer_value(json_object_get(job, "device")));
    }
    if (status == ACR_OK) {
        status = process_run(outcome, argv, paths[2], &limits, &stop_wanted);
    }
    if (lock >= 0) {
        device_unlock(lock);
    }
    return status;
}

/* Does the job in a folder of its own. */
static acr_status judge_in(json_t *line, json_t *packed, const char *folder)
{
    char candidate_folder[PATH_MAX], incumbent_folder[PATH_MAX], paths[3][PATH_MAX], place[WORKER_PLACE_MAX];
    static const char *const names[3] = {"job.json", "result.json", "log"};
    json_t *job = json_object_get(packed, "job");
    acr_status status = file_path(candidate_folder, folder, "candidate", "");
    for (int i = 0; i < 3 && status == ACR_OK; ++i) {
        status = file_path(paths[i], folder, names[i], "");
    }
    if (status == ACR_OK) {
        status = file_path(incumbent_folder, folder, "incumbent", "");
    }
    if (status == ACR_OK) {
        status = unpack_folder(packed, "candidate", candidate_folder);
    }
    if (status == ACR_OK) {
        status = unpack_folder(packed, "incumbent", incumbent_folder);
    }
    if (status == ACR_OK) {
        json_object_set_new(job, "candidate", json_string(candidate_folder));
        json_object_set_new(job, "incumbent", json_string(incumbent_folder));
        json_object_set_new(job, "references", json_integer(0)); /* descriptors stay on their machine */
        status = write_private(job, paths[0]);
    }
    process_outcome outcome;
    if (status == ACR_OK) {
        status = run_child(&outcome, packed, (const char *const[]){paths[0], paths[1], paths[2]});
    }
    if (status != ACR_OK) {
        return status;
    }
    worker_last_place(place, paths[2]);
    json_t *result = json_load_file(paths[1], 0, NULL);
    json_object_set_new(line, "end", json_string(end_names[outcome.end]));
    json_object_set_new(line, "code", json_integer(outcome.code));
    json_object_set_new(line, "wall_s", json_real(outcome.wall_s));
    json_object_set_new(line, "place", json_string(place));
    json_object_set_new(line, "result", result ? result : json_null());
    return ACR_OK;
}

static acr_status judge(json_t *line, json_t *packed)
{
    char folder[PATH_MAX];
    const char *temporary = getenv("TMPDIR");
    acr_status status = file_path(folder, temporary && *temporary ? temporary : "/tmp", "acromion-judge-XXXXXX", "");
    if (status == ACR_OK && !mkdtemp(folder)) { /* nobody else can look into it */
        status = acr__fail(ACR_IO, "%s: %s", folder, strerror(errno));
    }
    if (status == ACR_OK) {
        status = judge_in(line, packed, folder);
        folder_remove(folder);
    }
    return status;
}

int worker_serve(void)
{
    char host[128] = "", what[160] = "";
    catch_signals();
    (void)gethostname(host, sizeof host - 1);
    json_t *packed = read_job(what);
    if (!packed) {
        fprintf(stderr, "acromion judge: %s\n", what);
        return EXIT_BAD_INPUT;
    }
    json_t *line = json_pack("{s:i, s:s, s:s, s:s}", RESULT_KEY, PROTOCOL, "version", acr_version(), "git_sha",
                             BUILD_GIT_SHA, "host", host);
    acr_status status = line ? judge(line, packed) : acr__fail(ACR_NO_MEMORY, "no memory for a result");
    if (line && status != ACR_OK) {
        json_object_set_new(line, "error", json_string(acr_last_error()));
    }
    const bool written = line && json_dumpf(line, stdout, JSON_COMPACT) == 0 && putchar('\n') != EOF;
    json_decref(line);
    json_decref(packed);
    return !written ? EXIT_FILE : status == ACR_OK ? EXIT_DONE : EXIT_FAULT;
}
