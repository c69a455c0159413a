/* Variants made: compiled and loaded as candidates are. See variant.h and kernels/variant.h. */
#include "variant.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "admission.h"
#include "base/files.h"
#include "base/progress.h"
#include "build.h"
#include "kernels/kernel_source.h"
#include "tree.h"

enum {
    NAME_MAX_BYTES = 240, /* a folder's name too */
    COMPILE_LIMIT_S = 600
};

typedef struct variant {
    loaded code;
    acr__kernel kernel; /* the loaded one under its own name */
    char name[NAME_MAX_BYTES], base[128];
} variant;

static struct {
    variant items[VARIANTS_MAX];
    size_t count;
    char folder[PATH_MAX]; /* of those compiled here, "" = none; removed at the end */
} all;

/* ---- The text ---- */

/* Splits BASE:NAME=VALUE,... and makes the name, BASE+NAME=VALUE,... */
static acr_status split(const char *text, char base[128], char changes[CANDIDATE_TEXT_MAX], char name[NAME_MAX_BYTES])
{
    const size_t length = strcspn(text, ":");
    if (text[length] != ':' || length == 0 || length >= 128 || strlen(text) >= NAME_MAX_BYTES) {
        return acr__fail(ACR_INVALID, "variant: \"%.100s\" is not KERNEL:NAME=VALUE,NAME=VALUE", text);
    }
    snprintf(base, 128, "%.*s", (int)length, text);
    snprintf(changes, CANDIDATE_TEXT_MAX, "%s", text + length + 1);
    snprintf(name, NAME_MAX_BYTES, "%s+%s", base, text + length + 1);
    for (char *comma = changes; (comma = strchr(comma, ',')) != NULL;) {
        *comma = ' ';
    }
    return strpbrk(name, "/ ") ? acr__fail(ACR_INVALID, "variant: \"%.100s\" has blanks or slashes", text) : ACR_OK;
}

/* The listed kernel's parameters with the changes; the caller frees the candidate. */
static acr_status candidate_of_text(candidate *out, const char *base, const char *changes)
{
    char parameters[2 * CANDIDATE_TEXT_MAX];
    candidate listed;
    acr_status status = candidate_of_kernel(&listed, base);
    if (status == ACR_OK) {
        snprintf(parameters, sizeof parameters, "%s", changes);
        candidate_complete_set(parameters, sizeof parameters, listed.parameters);
        status = candidate_of_family(out, listed.family, listed.arch, parameters);
        candidate_free(&listed);
    }
    return status;
}

/* ---- Compiling ---- */

/* A CPU kernel's identity is what its digest is made of. */
static acr_status identify(artefact *a)
{
    char path[PATH_MAX + 16];
    const void *bytes = NULL;
    size_t size = 0;
    snprintf(path, sizeof path, "%s/%s", a->folder, a->backend == ACR__CPU ? "code.so" : "image.bin");
    acr_status status = file_map(path, &bytes, &size);
    if (status == ACR_OK) {
        const XXH128_hash_t hash = XXH3_128bits(bytes, size);
        snprintf(a->identity, sizeof a->identity, "%016llx%016llx", (unsigned long long)hash.high64,
                 (unsigned long long)hash.low64);
        file_unmap(bytes, size);
    }
    return status;
}

static acr_status compile(artefact *a, const candidate *c, const acr__device *device)
{
    char root[TREE_PATH_MAX], nvcc[PATH_MAX] = "";
    const char *cc = getenv("CC");
    acr_status status = tree_find(root, NULL);
    if (status != ACR_OK) {
        return status;
    }
    if (c->backend == ACR__CUDA && !kernel_find_nvcc(nvcc)) {
        return acr__fail(ACR_UNSUPPORTED, "no nvcc here: neither ACR_NVCC, nor on PATH, nor in CUDA_HOME/bin or "
                                          "/usr/local/cuda/bin");
    }
    descriptor unused; /* a source's alone */
    status = admission_check(c, root, &unused);
    if (status != ACR_OK) {
        return status;
    }
    const build_tools tools = {
        .cc = cc && *cc ? cc : "cc",
        .nvcc = nvcc,
        .source_root = root,
        .device = device,
        .timeout_s = COMPILE_LIMIT_S,
    };
    trial_result result;
    trial_result_init(&result);
    status = build_compile(a, &tools, c, &result)
                 ? ACR_OK
                 : acr__fail(ACR_UNSUPPORTED, "%s: %.600s", trial_status_name(result.status), result.detail);
    trial_result_free(&result);
    return status;
}

/* What ptxas counted, to standard error: spills are allowed here, unseen they are not. */
static acr_status report(const artefact *a, const char *name, double seconds)
{
    trial_resources used = {0};
    if (a->backend == ACR__CPU) {
        fprintf(stderr, "variant %s: compiled in %.0f s\n", name, seconds);
        return ACR_OK;
    }
    acr_status status = build_read_resources(a, &used);
    if (status == ACR_OK) {
        fprintf(stderr, "variant %s: %d registers, %d bytes of spills; compiled in %.0f s\n", name, (int)used.registers,
                (int)used.spill_bytes, seconds);
    }
    return status;
}

/* A new folder in `into`, to be renamed when all that belongs there is there: what fails leaves nothing behind. "" when
 * it cannot be made. */
static acr_status make_empty(char folder[PATH_MAX], const char *into)
{
    const int length = snprintf(folder, PATH_MAX, "%s/.variant-XXXXXX", into);
    if (length < PATH_MAX - NAME_MAX_BYTES && mkdtemp(folder) && chmod(folder, 0755) == 0) {
        return ACR_OK;
    }
    *folder = '\0';
    return acr__fail(ACR_IO, "%s: %s", into, length < PATH_MAX - NAME_MAX_BYTES ? strerror(errno) : "too long a path");
}

/* Puts the folder in the place of an older one of the variant's name; `folder` becomes its new path. */
static acr_status take_name(char folder[PATH_MAX], const char *into, const char *name)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", into, name) >= PATH_MAX) {
        return acr__fail(ACR_IO, "%s: too long a path", into);
    }
    folder_remove(path);
    if (rename(folder, path) != 0) {
        return acr__fail(ACR_IO, "%s: %s", path, strerror(errno));
    }
    snprintf(folder, PATH_MAX, "%s", path);
    return ACR_OK;
}

acr_status variant_build(const char *text, const char *into, const acr__device *device)
{
    char base[128], changes[CANDIDATE_TEXT_MAX], name[NAME_MAX_BYTES];
    artefact a = {.is_source = false};
    candidate c;
    acr_status status = split(text, base, changes, name);
    if (status == ACR_OK) {
        status = candidate_of_text(&c, base, changes);
    }
    if (status != ACR_OK) {
        return status;
    }
    a.backend = c.backend;
    snprintf(a.arch, sizeof a.arch, "%s", c.arch);
    const double start_s = monotonic_s();
    status = make_empty(a.folder, into);
    if (status == ACR_OK) {
        status = compile(&a, &c, device);
    }
    if (status == ACR_OK) {
        status = identify(&a);
    }
    if (status == ACR_OK) {
        status = build_save(&a);
    }
    if (status == ACR_OK) {
        status = take_name(a.folder, into, name);
    }
    if (status == ACR_OK) {
        status = report(&a, name, monotonic_s() - start_s);
    } else if (*a.folder) {
        folder_remove(a.folder);
    }
    candidate_free(&c);
    return status;
}

/* ---- Loading ---- */

static acr_status load_one(const char *folder, const char *name, const acr__device *device)
{
    if (all.count == VARIANTS_MAX) {
        return acr__fail(ACR_INVALID, "variants: more than %d", VARIANTS_MAX);
    }
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= PATH_MAX) {
        return acr__fail(ACR_IO, "%s: the path is too long", folder);
    }
    variant *v = &all.items[all.count];
    acr_status status = build_load(&v->code, LOADED_CANDIDATE, path, device);
    if (status == ACR_OK) {
        snprintf(v->name, sizeof v->name, "%s", name);
        snprintf(v->base, sizeof v->base, "%.*s", (int)strcspn(name, "+"), name);
        v->kernel = v->code.kernel;
        if (v->kernel.backend == ACR__CPU) { /* its image is its identity, which lies in the variant */
            v->kernel.run = v->code.own_run;
            v->kernel.image = (const unsigned char *)v->code.identity;
            v->kernel.image_end = v->kernel.image + sizeof v->code.identity - 1;
        }
        v->kernel.name = v->name;
        variant_add(&v->kernel, v->base);
        ++all.count;
    }
    return status;
}

static int is_variant_folder(const struct dirent *entry)
{
    return strchr(entry->d_name, '+') != NULL;
}

/* Every variant of a folder, in the order of their names. */
static acr_status load_folder(const char *folder, const acr__device *device)
{
    struct dirent **entries = NULL;
    const int count = scandir(folder, &entries, is_variant_folder, alphasort);
    acr_status status =
        count > 0 ? ACR_OK : acr__fail(ACR_IO, "%s: no variants here; `acromion variant -o` makes them", folder);
    for (int i = 0; i < count; ++i) {
        if (status == ACR_OK) {
            status = load_one(folder, entries[i]->d_name, device);
        }
        free(entries[i]);
    }
    free(entries);
    return status;
}

static acr_status make_folder(void)
{
    if (all.folder[0]) {
        return ACR_OK;
    }
    const char *tmp = getenv("TMPDIR");
    const int length =
        snprintf(all.folder, sizeof all.folder, "%s/acromion-variants-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (length >= (int)sizeof all.folder || !mkdtemp(all.folder)) {
        all.folder[0] = '\0';
        return acr__fail(ACR_IO, "no temporary folder for variants: %s", strerror(errno));
    }
    return ACR_OK;
}

static acr_status build_and_load(const char *text, const acr__device *device)
{
    char base[128], changes[CANDIDATE_TEXT_MAX], name[NAME_MAX_BYTES];
    acr_status status = split(text, base, changes, name);
    if (status == ACR_OK) {
        status = make_folder();
    }
    if (status == ACR_OK) {
        status = variant_build(text, all.folder, device);
    }
    return status == ACR_OK ? load_one(all.folder, name, device) : status;
}

static acr_status load(const char *asked, const acr__device *device)
{
    struct stat found;
    const bool is_folder = stat(asked, &found) == 0 && S_ISDIR(found.st_mode);
    return is_folder ? load_folder(asked, device) : build_and_load(asked, device);
}

static void unload(void)
{
    for (size_t i = 0; i < all.count; ++i) {
        build_unload(&all.items[i].code);
    }
    if (all.folder[0]) {
        folder_remove(all.folder);
    }
    all.count = 0;
    all.folder[0] = '\0';
}

const variant_maker search_variant_maker = {load, unload};
