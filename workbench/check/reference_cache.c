/* References in a sealed memory file, see reference_cache.h.
 *
 * Layout: a header, the index, and from offsets that mmap takes one image a reference: its tensors and lists, one after
 * another, at multiples of 64 bytes. */
#include "reference_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

enum {
    IMAGE_ALIGNMENT = 1 << 16, /* a page on every machine */
    PART_ALIGNMENT = 64,
    SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE
};

static const char magic[16] = "acr-references1";

/* Inputs, by their number as buffers, o, lse and d_o of a backward problem among them; and what else a reference points
 * to. */
enum {
    PART_Q_OWNER = ACR__DQ,
    PART_KV_OWNER,
    PART_ROW_LIST,
    PART_O,
    PART_LSE,
    PART_EXPECTED, /* of dq, dk, dv and dsinks */
    PART_TOLERANCE = PART_EXPECTED + 4,
    PART_JUDGED_ROWS = PART_TOLERANCE + 4,
    PART_JUDGED_KEYS,
    PARTS
};

/* A reference in the file. Two requests of the same key, inputs, seed, lengths and rows want the same. */
typedef struct entry {
    char key[ACR_PROBLEM_TEXT_MAX + 16];
    input_kind inputs;
    uint64_t seed;
    int64_t sampled_rows;
    length_pattern lengths;
    reference ref;         /* without its buffers and lists */
    int64_t offset, bytes; /* of its image in the file */
    int64_t parts[PARTS];  /* offsets in the image, -1 = a NULL */
    bool has_gradients;
    int64_t gradient_elements[4];
} entry;

typedef struct header {
    char magic[16];
    uint64_t entry_bytes, count;
} header;

struct reference_cache {
    int fd;
    size_t count;
    entry *entries;
};

static int64_t round_up(int64_t bytes, int64_t multiple)
{
    return (bytes + multiple - 1) / multiple * multiple;
}

/* ---- Making ---- */

/* What a backward problem has; NULL = none of it. */
static const void *gradient_part(const gradients *g, int part)
{
    return !g                         ? NULL
           : part == PART_JUDGED_ROWS ? (const void *)g->rows
           : part == PART_JUDGED_KEYS ? (const void *)g->keys
           : part >= PART_TOLERANCE   ? (const void *)g->tolerance[part - PART_TOLERANCE]
                                      : (const void *)g->expected[part - PART_EXPECTED];
}

static int64_t gradient_bytes(const reference *ref, int part)
{
    const acr_problem *p = &ref->problem;
    switch (part) {
    case PART_JUDGED_ROWS:
        return ref->entries * p->q_heads * ref->q_rows;
    case PART_JUDGED_KEYS:
        return ref->entries * p->kv_heads * ref->kv_rows;
    default:
        return ref->grads->elements[(part - PART_EXPECTED) % 4] * (int64_t)sizeof(double);
    }
}

static const void *part_of(const reference *ref, int part)
{
    if (part >= PART_EXPECTED) {
        return gradient_part(ref->grads, part);
    }
    switch (part) {
    case PART_Q_OWNER:
        return ref->q_owner;
    case PART_KV_OWNER:
        return ref->kv_owner;
    case PART_ROW_LIST:
        return ref->row_list;
    case PART_O:
        return ref->o;
    case PART_LSE:
        return ref->lse;
    default:
        return acr__pointer_at(&ref->buffers, acr__buffer_fields[part].in_buffers);
    }
}

/* Tensors are without gaps here, whatever strides the problem has for them. */
static int64_t input_bytes(const reference *ref, acr__buffer which)
{
    const int64_t q_rows = ref->entries * ref->problem.q_heads * ref->q_rows;
    return which == ACR__LSE ? q_rows * (int64_t)sizeof(float)
           : which == ACR__O || which == ACR__D_O
               ? q_rows * ref->problem.v_dim * acr__dtype_bytes(ref->problem.out_dtype)
               : acr__buffer_bytes(&ref->problem, which, reference_extents(ref));
}

static int64_t part_bytes(const reference *ref, int part)
{
    const acr_problem *p = &ref->problem;
    if (part >= PART_EXPECTED) {
        return gradient_bytes(ref, part);
    }
    switch (part) {
    case PART_Q_OWNER:
        return ref->q_rows * (int64_t)sizeof *ref->q_owner;
    case PART_KV_OWNER:
        return ref->kv_rows * (int64_t)sizeof *ref->kv_owner;
    case PART_ROW_LIST:
        return ref->rows * (int64_t)sizeof *ref->row_list;
    case PART_O:
        return ref->rows * p->v_dim * (int64_t)sizeof *ref->o;
    case PART_LSE:
        return ref->rows * (int64_t)sizeof *ref->lse;
    default:
        return input_bytes(ref, (acr__buffer)part);
    }
}

/* What is to be said of a reference, and where its parts go in its image. */
static void lay_out(entry *e, const reference *ref, const reference_request *request)
{
    reference_key(e->key, request->problem);
    e->inputs = request->inputs;
    e->seed = request->seed;
    e->sampled_rows = request->sampled_rows;
    e->lengths = request->lengths;
    const acr_buffers totals = {.size = sizeof totals,
                                .q_total = ref->buffers.q_total,
                                .kv_total = ref->buffers.kv_total,
                                .table_stride = ref->buffers.table_stride,
                                .pages = ref->buffers.pages};
    e->ref = (reference){.problem = ref->problem,
                         .buffers = totals,
                         .inputs = ref->inputs,
                         .seed = ref->seed,
                         .entries = ref->entries,
                         .q_rows = ref->q_rows,
                         .kv_rows = ref->kv_rows,
                         .rows = ref->rows,
                         .tol_max = ref->tol_max,
                         .tol_rms = ref->tol_rms,
                         .tol_lse = ref->tol_lse,
                         .tol_floor = ref->tol_floor};
    e->has_gradients = ref->grads != NULL;
    if (ref->grads) {
        memcpy(e->gradient_elements, ref->grads->elements, sizeof e->gradient_elements);
    }
    for (int p = 0; p < PARTS; ++p) {
        const bool there = part_of(ref, p) != NULL;
        e->parts[p] = there ? e->bytes : -1;
        e->bytes += there ? round_up(part_bytes(ref, p), PART_ALIGNMENT) : 0;
    }
    e->bytes = round_up(e->bytes, IMAGE_ALIGNMENT);
}

static acr_status put(int fd, const void *bytes, int64_t count, int64_t offset)
{
    for (int64_t done = 0; done < count;) {
        const ssize_t written =
            pwrite(fd, (const unsigned char *)bytes + done, (size_t)(count - done), (off_t)(offset + done));
        if (written <= 0 && errno != EINTR) {
            return acr__fail(ACR_IO, "references: %s", strerror(errno));
        }
        done += written > 0 ? written : 0;
    }
    return ACR_OK;
}

/* Makes a reference and puts it at *end, the end of the file, unless the file would become longer than bytes_max. */
static acr_status put_reference(entry *e, int fd, const reference_request *request, int64_t *end, int64_t bytes_max)
{
    reference *ref = NULL;
    acr_status status = reference_create(&ref, request);
    if (status != ACR_OK) {
        return status;
    }
    lay_out(e, ref, request);
    e->offset = *end;
    const bool fits = e->offset + e->bytes <= bytes_max;
    for (int p = 0; p < PARTS && fits && status == ACR_OK; ++p) {
        if (e->parts[p] >= 0) {
            status = put(fd, part_of(ref, p), part_bytes(ref, p), e->offset + e->parts[p]);
        }
    }
    reference_destroy(ref);
    *end += fits ? e->bytes : 0;
    return status;
}

static bool describes(const entry *e, const reference_request *request)
{
    char key[sizeof e->key];
    reference_key(key, request->problem);
    return e->inputs == request->inputs && e->seed == request->seed && e->sampled_rows == request->sampled_rows &&
           e->lengths == request->lengths && strcmp(e->key, key) == 0;
}

static acr_status put_all(int fd, entry *entries, const reference_request *requests, size_t count, int64_t bytes_max)
{
    header h = {.entry_bytes = sizeof *entries};
    memcpy(h.magic, magic, sizeof h.magic);
    int64_t end = round_up((int64_t)(sizeof h + count * sizeof *entries), IMAGE_ALIGNMENT);
    acr_status status = ACR_OK;
    for (bool room = true; room && h.count < count && status == ACR_OK;) {
        const int64_t before = end;
        status = put_reference(&entries[h.count], fd, &requests[h.count], &end, bytes_max);
        room = end > before;
        h.count += room;
    }
    if (status == ACR_OK) {
        status = put(fd, &h, sizeof h, 0);
    }
    if (status == ACR_OK) {
        status = put(fd, entries, (int64_t)(h.count * sizeof *entries), sizeof h);
    }
    /* The last image's end is no part. */
    const bool sealed = status == ACR_OK && ftruncate(fd, (off_t)end) == 0 && fcntl(fd, F_ADD_SEALS, SEALS) == 0;
    return status != ACR_OK || sealed ? status : acr__fail(ACR_IO, "references: %s", strerror(errno));
}

acr_status reference_cache_make(int *fd, const reference_request *requests, size_t count, int64_t bytes_max)
{
    entry *entries = calloc(count + 1, sizeof *entries);
    const int file = memfd_create("references", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    acr_status status = !entries   ? acr__fail(ACR_NO_MEMORY, "no memory for %zu references", count)
                        : file < 0 ? acr__fail(ACR_IO, "references: %s", strerror(errno))
                                   : put_all(file, entries, requests, count, bytes_max);
    free(entries);
    if (status != ACR_OK && file >= 0) {
        close(file);
    }
    *fd = status == ACR_OK ? file : -1;
    return status;
}

/* ---- Taking ---- */

static bool get(int fd, void *bytes, size_t count, int64_t offset)
{
    return pread(fd, bytes, count, (off_t)offset) == (ssize_t)count;
}

acr_status reference_cache_open(reference_cache **out, int fd)
{
    header h;
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS) {
        return acr__fail(ACR_FORMAT, "references: descriptor %d is no sealed memory file", fd);
    }
    if (!get(fd, &h, sizeof h, 0) || memcmp(h.magic, magic, sizeof magic) != 0 || h.entry_bytes != sizeof(entry)) {
        return acr__fail(ACR_FORMAT, "references: descriptor %d holds none, or another program's", fd);
    }
    reference_cache *s = calloc(1, sizeof *s);
    entry *entries = s ? calloc(h.count + 1, sizeof *entries) : NULL;
    if (!entries) {
        free(s);
        return acr__fail(ACR_NO_MEMORY, "no memory for an index of references");
    }
    *s = (reference_cache){fd, h.count, entries};
    if (!get(fd, entries, h.count * sizeof *entries, sizeof h)) {
        reference_cache_close(s);
        return acr__fail(ACR_IO, "references: the index is not whole");
    }
    *out = s;
    return ACR_OK;
}

void reference_cache_close(reference_cache *s)
{
    if (s) {
        free(s->entries);
        free(s);
    }
}

/* A part of a mapped image; NULL for what the reference does not have. */
static void *mapped_part(const entry *e, unsigned char *image, int part)
{
    return e->parts[part] < 0 ? NULL : image + e->parts[part];
}

static void map_gradients(gradients *g, const entry *e, unsigned char *image)
{
    for (int i = 0; i < 4; ++i) {
        g->elements[i] = e->gradient_elements[i];
        g->expected[i] = mapped_part(e, image, PART_EXPECTED + i);
        g->tolerance[i] = mapped_part(e, image, PART_TOLERANCE + i);
    }
    g->rows = mapped_part(e, image, PART_JUDGED_ROWS);
    g->keys = mapped_part(e, image, PART_JUDGED_KEYS);
}

static acr_status map(reference **out, const reference_cache *s, const entry *e)
{
    reference *ref = malloc(sizeof *ref);
    gradients *g = e->has_gradients ? calloc(1, sizeof *g) : NULL;
    if (!ref || (e->has_gradients && !g)) {
        free(ref);
        free(g);
        return acr__fail(ACR_NO_MEMORY, "no memory for a reference");
    }
    void *image = mmap(NULL, (size_t)e->bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, s->fd, (off_t)e->offset);
    if (image == MAP_FAILED) {
        free(ref);
        free(g);
        return acr__fail(ACR_IO, "references: %s", strerror(errno));
    }
    *ref = e->ref;
    ref->mapping = image;
    ref->mapping_bytes = (size_t)e->bytes;
    for (acr__buffer i = 0; i < ACR__DQ; ++i) {
        acr__set_pointer_at(&ref->buffers, acr__buffer_fields[i].in_buffers, mapped_part(e, image, (int)i));
    }
    ref->q_owner = mapped_part(e, image, PART_Q_OWNER);
    ref->kv_owner = mapped_part(e, image, PART_KV_OWNER);
    ref->row_list = mapped_part(e, image, PART_ROW_LIST);
    ref->o = mapped_part(e, image, PART_O);
    ref->lse = mapped_part(e, image, PART_LSE);
    ref->grads = g;
    if (g) {
        map_gradients(g, e, image);
    }
    *out = ref;
    return ACR_OK;
}

acr_status reference_cache_take(reference **out, const reference_cache *s, const reference_request *wanted)
{
    *out = NULL;
    for (size_t i = 0; i < s->count; ++i) {
        if (describes(&s->entries[i], wanted)) {
            return map(out, s, &s->entries[i]);
        }
    }
    return ACR_OK;
}
