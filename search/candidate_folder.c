/* Prepared candidates, see candidate_folder.h. */
#include "candidate_folder.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "answers.h"
#include "base/files.h"
#include "internal.h"

/* ---- Which comes next ---- */

static bool note_taken(void *arg, const json_t *trial, const json_t *answer)
{
    const char *file = answers_text(answer, "file");
    return !*file || json_object_set(arg, file, json_object_get(trial, "id")) == 0;
}

/* Whether a file is a candidate: not what this program writes, and not hidden. */
static bool is_candidate(const char *file)
{
    const char *dot = strrchr(file, '.');
    const size_t stem = dot ? (size_t)(dot - file) : 0;
    static const char verdict[] = ".verdict";
    const bool ours = strcmp(file, "request.json") == 0 ||
                      (stem > strlen(verdict) && strncmp(file + stem - strlen(verdict), verdict, strlen(verdict)) == 0);
    return stem > 0 && stem < FOLDER_NAME_MAX && file[0] != '.' && strcmp(dot, ".json") == 0 && !ours;
}

acr_status folder_next(char name[FOLDER_NAME_MAX], bool *closed, const char *folder, store *s)
{
    json_t *taken = json_object();
    name[0] = '\0';
    *closed = false;
    acr_status status = answers_each(s, note_taken, taken);
    DIR *directory = status == ACR_OK ? opendir(folder) : NULL;
    if (status == ACR_OK && !directory) {
        status = acr__fail(ACR_IO, "%s: %s", folder, strerror(errno));
    }
    for (const struct dirent *entry; directory && (entry = readdir(directory)) != NULL;) {
        const char *file = entry->d_name;
        char stem[FOLDER_NAME_MAX];
        *closed = *closed || strcmp(file, "complete") == 0;
        if (!is_candidate(file) || json_object_get(taken, file)) {
            continue;
        }
        snprintf(stem, sizeof stem, "%.*s", (int)(strrchr(file, '.') - file), file);
        if (!*name || strcmp(stem, name) < 0) {
            memcpy(name, stem, sizeof stem);
        }
    }
    if (directory) {
        closedir(directory);
    }
    json_decref(taken);
    return status;
}

/* ---- Reading ---- */

/* A file's text, malloc'd; NULL when it is not there, or too long for an answer. */
static char *read_file(const char *folder, const char *name, const char *ending)
{
    char path[PATH_MAX];
    const void *bytes = NULL;
    size_t size = 0;
    if (file_path(path, folder, name, ending) != ACR_OK || file_map(path, &bytes, &size) != ACR_OK) {
        return NULL;
    }
    char *text = size < PROPOSER_ANSWER_BYTES_MAX ? malloc(size + 1) : NULL;
    if (text && size > 0) {
        memcpy(text, bytes, size);
    }
    if (text) {
        text[size] = '\0';
    }
    file_unmap(bytes, size);
    return text;
}

/* A key that the object lacks and a file beside it has. */
static void take_file(json_t *object, const char *key, const char *folder, const char *name, const char *ending)
{
    char *text = json_object_get(object, key) ? NULL : read_file(folder, name, ending);
    if (text) {
        json_object_set_new(object, key, json_string(text));
    }
    free(text);
}

void folder_read(proposer_answer *out, const char *folder, const char *name)
{
    char file[FOLDER_NAME_MAX + 8];
    json_error_t error;
    *out = (proposer_answer){.status = PROPOSER_ANSWERED};
    snprintf(file, sizeof file, "%s.json", name);
    char *text = read_file(folder, name, ".json");
    json_t *object = text ? json_loads(text, JSON_REJECT_DUPLICATES, &error) : NULL;
    if (json_is_object(object)) {
        take_file(object, "source", folder, name, ".c");
        take_file(object, "source", folder, name, ".cu");
        take_file(object, "rationale", folder, name, ".md");
        out->text = json_dumps(object, JSON_COMPACT);
        proposer_read(out);
        if (out->json && !json_object_get(object, "rationale")) {
            out->status = PROPOSER_MALFORMED;
            snprintf(out->detail, sizeof out->detail, "no rationale, in %s or beside it in %.100s.md", file, name);
        }
    } else {
        json_decref(object);
        object = json_object();
        out->status = PROPOSER_MALFORMED;
        snprintf(out->detail, sizeof out->detail, "%s: %s", file,
                 !text         ? "cannot be read, or has 1 MiB or more"
                 : *error.text ? error.text
                               : "not a JSON object");
    }
    json_object_set_new(object, "file", json_string(file)); /* so that it is not taken again */
    free(out->text);
    out->text = json_dumps(object, JSON_COMPACT);
    json_decref(object);
    free(text);
}

/* ---- Writing ---- */

acr_status folder_write(const char *folder, const char *name, const char *ending, const char *text)
{
    char path[PATH_MAX];
    char *before = read_file(folder, name, ending);
    const bool there = before && strcmp(before, text) == 0;
    free(before);
    if (there) {
        return ACR_OK;
    }
    const file_part part = {text, strlen(text)};
    acr_status status = file_path(path, folder, name, ending);
    return status == ACR_OK ? file_write(path, &part, 1) : status;
}
