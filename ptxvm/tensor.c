/* The copy engine of the PTX machine: boxes of tensor maps and plain runs of bytes, between global memory and shared
 * memory. */
#include <stdlib.h>
#include <string.h>

#include "vm.h"

enum {
    BULK_UNIT_BYTES = 16,
    BOX_ALIGNMENT_BYTES = 128, /* of a box in shared memory */
    MAP_ALIGNMENT_BYTES = 64,
    MAX_RANK = 5
};

/* ---- Boxes ---- */

/* Work on its way: a box of a tensor. */
typedef struct box_copy {
    tensor_map map; /* as it was when the copy was issued */
    int32_t first[MAX_RANK];
    uint64_t shared, barrier;
} box_copy;

static uint32_t box_bytes(const tensor_map *map)
{
    uint32_t bytes = map->element_bytes;
    for (int d = 0; d < map->rank; d++)
        bytes *= map->box[d];
    return bytes;
}

/* Where the box's byte at this shared address really lies: chunks of 16 bytes change places by the number of their
 * 128-byte line. */
static uint64_t swizzled(uint64_t address, int swizzle)
{
    const uint64_t mask = swizzle == 128 ? 7 : swizzle == 64 ? 3 : swizzle == 32 ? 1 : 0;
    return address ^ ((address >> 7 & mask) << 4);
}

/* A row of a box: the elements along the tensor's first dimension. */
typedef struct box_row {
    uint64_t global; /* address of the box's first element, which may lie outside */
    int is_inside;   /* by the other coordinates */
} box_row;

static box_row row_of(const box_copy *copy, uint32_t number)
{
    const tensor_map *map = &copy->map;
    box_row row = {map->base + (uint64_t)((int64_t)copy->first[0] * map->element_bytes), 1};
    for (int d = 1; d < map->rank; d++) {
        const int64_t at = (int64_t)copy->first[d] + number % map->box[d];
        number /= map->box[d];
        row.is_inside &= at >= 0 && (uint64_t)at < map->extents[d];
        row.global += (uint64_t)at * map->strides[d - 1];
    }
    return row;
}

/* Bytes [*begin, *end) of every row lie inside the tensor. */
static void clip(const box_copy *copy, uint64_t *begin, uint64_t *end)
{
    const tensor_map *map = &copy->map;
    const int64_t first = copy->first[0], extent = (int64_t)map->extents[0], box = map->box[0];
    const int64_t inside_first = first < 0 ? -first : 0, inside_end = extent - first < box ? extent - first : box;
    *begin = (uint64_t)(inside_first < box ? inside_first : box) * map->element_bytes;
    *end = inside_end <= 0 ? 0 : (uint64_t)inside_end * map->element_bytes;
    if (*end < *begin)
        *end = *begin;
}

/* Calls for every run of bytes of a row that stay together in shared memory: within the same 16 bytes of it. */
typedef const char *(*run_action)(warp *w, unsigned char *shared, uint64_t global, size_t bytes, int is_inside);

static const char *for_each_run(warp *w, const box_copy *copy, run_action action)
{
    const tensor_map *map = &copy->map;
    const uint64_t row_bytes = (uint64_t)map->box[0] * map->element_bytes;
    const uint32_t rows = (uint32_t)(box_bytes(map) / row_bytes);
    const char *error = NULL;
    uint64_t begin, end;
    clip(copy, &begin, &end);
    for (uint32_t r = 0; r < rows; r++) {
        const box_row row = row_of(copy, r);
        for (uint64_t at = 0; at < row_bytes;) {
            const int is_inside = row.is_inside && at >= begin && at < end;
            const uint64_t limit = at < begin ? begin : at < end ? end : row_bytes;
            const uint64_t place = copy->shared + r * row_bytes + at, left = BULK_UNIT_BYTES - place % BULK_UNIT_BYTES;
            const size_t bytes = (size_t)(limit - at < left ? limit - at : left);
            unsigned char *shared = shared_at(w, swizzled(place, map->swizzle), bytes, 1, &error);
            if (shared == NULL)
                return error;
            error = action(w, shared, row.global + at, bytes, is_inside);
            if (error != NULL)
                return error;
            at += bytes;
        }
    }
    return NULL;
}

static const char *load_run(warp *w, unsigned char *shared, uint64_t global, size_t bytes, int is_inside)
{
    if (!is_inside) {
        memset(shared, 0, bytes);
        return NULL;
    }
    const char *error = NULL;
    const unsigned char *from = global_at(w, global, bytes, 1, &error);
    if (from == NULL)
        return error;
    memcpy(shared, from, bytes);
    return NULL;
}

static const char *store_run(warp *w, unsigned char *shared, uint64_t global, size_t bytes, int is_inside)
{
    if (!is_inside)
        return NULL;
    const char *error = NULL;
    unsigned char *to = global_at(w, global, bytes, 1, &error);
    if (to == NULL)
        return error;
    memcpy(to, shared, bytes);
    w->cta->launch->counts.bytes_global_written += bytes;
    return NULL;
}

/* From the moment of its issue on a copy may write: who still reads what was there reads NaN. */
static const char *poison_run(warp *w, unsigned char *shared, uint64_t global, size_t bytes, int is_inside)
{
    (void)w, (void)global, (void)is_inside;
    memset(shared, POISON, bytes);
    return NULL;
}

static const char *load_box(warp *issuer, void *data)
{
    const box_copy *copy = data;
    const char *error = for_each_run(issuer, copy, load_run);
    return error != NULL ? error : mbarrier_complete_bytes(issuer, copy->barrier, box_bytes(&copy->map));
}

static const char *store_box(warp *issuer, void *data)
{
    const box_copy *copy = data;
    const char *error = shared_for_async(issuer, copy->shared, box_bytes(&copy->map));
    return error != NULL ? error : for_each_run(issuer, copy, store_run);
}

/* Reads the operand [map, {c0, c1, ...}]. */
static const char *read_map(warp *w, const operand *o, int lane, box_copy *copy)
{
    const char *error = NULL;
    const unsigned char *map = global_at(w, value_of(w, o, lane), 128, MAP_ALIGNMENT_BYTES, &error);
    if (map == NULL)
        return error;
    memcpy(&copy->map, map, sizeof copy->map);
    if (copy->map.magic != TENSOR_MAP_MAGIC)
        return fail("no tensor map is at %p", (const void *)map);
    if (copy->map.rank != o->count)
        return fail("%d coordinates for a tensor map of rank %d", o->count, copy->map.rank);
    for (int d = 0; d < o->count; d++)
        copy->first[d] = (int32_t)value_of(w, &o->items[d], lane);
    return NULL;
}

/* To the race detector; the barrier's bytes are accessed too. */
static const char *tell_of_copy(warp *w, int lane, uint64_t address, uint32_t bytes, uint64_t barrier)
{
    const char *error = NULL;
    const mbarrier *b = mbarrier_at(w, barrier, &error);
    if (b == NULL)
        return error;
    races_access(w, lane, ACCESS_READ, barrier, sizeof(uint64_t));
    races_copy(w, lane, address, bytes, b);
    return NULL;
}

/* One copy of a load, to the CTA that its addresses name. */
static const char *issue_load(warp *w, int lane, const box_copy *copy)
{
    const char *error = NULL;
    const uint32_t bytes = box_bytes(&copy->map);
    if (shared_at(w, copy->shared, bytes, BOX_ALIGNMENT_BYTES, &error) == NULL ||
        shared_at(w, copy->barrier, 8, 8, &error) == NULL)
        return error;
    error = shared_for_async(w, copy->shared, bytes); /* a store without a fence might come behind the copy */
    if (error == NULL)
        error = for_each_run(w, copy, poison_run);
    if (error == NULL && w->cta->races != NULL)
        error = tell_of_copy(w, lane, copy->shared, bytes, copy->barrier);
    if (error != NULL)
        return error;
    box_copy *kept = malloc(sizeof *kept);
    if (kept == NULL)
        return fail("no memory");
    *kept = *copy;
    return async_add(w, ASYNC_BULK, load_box, kept);
}

/* decoded[0]: .multicast::cluster, a mask of CTAs follows the barrier */
static const char *execute_load(warp *w, const instruction *i, uint32_t active)
{
    const uint32_t ranks = cluster_size(w->cta->launch->asked);
    for (int lane = 0; lane < LANES; lane++) {
        if (!(active >> lane & 1))
            continue;
        box_copy copy;
        const char *error = read_map(w, &i->operands[1], lane, &copy);
        copy.shared = value_of(w, &i->operands[0], lane);
        copy.barrier = value_of(w, &i->operands[2], lane);
        if (error == NULL && !i->decoded[0])
            error = issue_load(w, lane, &copy);
        const uint32_t mask = i->decoded[0] ? (uint32_t)value_of(w, &i->operands[3], lane) & 0xFFFF : 0;
        if (error == NULL && mask >> ranks != 0)
            error = fail("a copy to CTAs %#x: the cluster has %u", mask, ranks);
        for (uint32_t rank = 0; rank < ranks && error == NULL; rank++) {
            if (!(mask >> rank & 1))
                continue;
            box_copy one = copy;
            one.shared = shared_address_in(copy.shared, rank);
            one.barrier = shared_address_in(copy.barrier, rank);
            error = issue_load(w, lane, &one);
        }
        if (error != NULL)
            return error;
    }
    return NULL;
}

static const char *execute_store(warp *w, const instruction *i, uint32_t active)
{
    for (int lane = 0; lane < LANES; lane++) {
        if (!(active >> lane & 1))
            continue;
        box_copy copy;
        const char *error = read_map(w, &i->operands[0], lane, &copy);
        if (error != NULL)
            return error;
        copy.shared = value_of(w, &i->operands[1], lane);
        copy.barrier = 0;
        box_copy *kept = NULL;
        if (shared_at(w, copy.shared, box_bytes(&copy.map), BOX_ALIGNMENT_BYTES, &error) != NULL)
            kept = malloc(sizeof *kept);
        if (kept == NULL)
            return error != NULL ? error : fail("no memory");
        *kept = copy;
        if (w->cta->races != NULL)
            races_access(w, lane, ACCESS_STORE_READ, copy.shared, box_bytes(&copy.map));
        error = async_add(w, ASYNC_STORE, store_box, kept);
        if (error != NULL)
            return error;
    }
    return NULL;
}

/* ---- Plain runs of bytes ---- */

/* Where the runs of a plain copy lie. */
typedef enum way {
    GLOBAL_TO_SHARED,
    SHARED_TO_SHARED, /* of another CTA */
    SHARED_TO_GLOBAL,
    ADDED_TO_GLOBAL /* float32 */
} way;

static int is_store(way w)
{
    return w == SHARED_TO_GLOBAL || w == ADDED_TO_GLOBAL;
}

typedef struct plain_copy {
    way way;
    uint64_t to, from, barrier;
    uint32_t bytes;
} plain_copy;

static unsigned char *end_of_copy(warp *w, uint64_t address, uint32_t bytes, int is_global, const char **error)
{
    return is_global ? global_at(w, address, bytes, BULK_UNIT_BYTES, error)
                     : shared_at(w, address, bytes, BULK_UNIT_BYTES, error);
}

static void add_floats(unsigned char *to, const unsigned char *from, uint32_t bytes)
{
    for (uint32_t at = 0; at < bytes; at += sizeof(float)) {
        float sum, addend;
        memcpy(&sum, to + at, sizeof sum);
        memcpy(&addend, from + at, sizeof addend);
        sum += addend;
        memcpy(to + at, &sum, sizeof sum);
    }
}

static const char *copy_plainly(warp *issuer, void *data)
{
    const plain_copy *copy = data;
    const char *error = copy->way == GLOBAL_TO_SHARED ? NULL : shared_for_async(issuer, copy->from, copy->bytes);
    if (error != NULL)
        return error;
    unsigned char *to = end_of_copy(issuer, copy->to, copy->bytes, is_store(copy->way), &error);
    const unsigned char *from = end_of_copy(issuer, copy->from, copy->bytes, copy->way == GLOBAL_TO_SHARED, &error);
    if (to == NULL || from == NULL)
        return error;
    if (copy->way == ADDED_TO_GLOBAL)
        add_floats(to, from, copy->bytes);
    else
        memcpy(to, from, copy->bytes);
    if (!is_store(copy->way))
        return mbarrier_complete_bytes(issuer, copy->barrier, copy->bytes);
    issuer->cta->launch->counts.bytes_global_written += copy->bytes;
    return NULL;
}

static const char *issue_plain(warp *w, int lane, const plain_copy *copy)
{
    const char *error = NULL;
    if (copy->bytes == 0 || copy->bytes % BULK_UNIT_BYTES != 0)
        return fail("a copy of %u bytes: a multiple of %d", copy->bytes, BULK_UNIT_BYTES);
    unsigned char *to = end_of_copy(w, copy->to, copy->bytes, is_store(copy->way), &error);
    if (to == NULL || end_of_copy(w, copy->from, copy->bytes, copy->way == GLOBAL_TO_SHARED, &error) == NULL)
        return error;
    error = is_store(copy->way) ? NULL : shared_for_async(w, copy->to, copy->bytes);
    if (error != NULL)
        return error;
    if (!is_store(copy->way))
        memset(to, POISON, copy->bytes);
    if (w->cta->races != NULL && is_store(copy->way))
        races_access(w, lane, ACCESS_STORE_READ, copy->from, copy->bytes);
    else if (w->cta->races != NULL)
        error = tell_of_copy(w, lane, copy->to, copy->bytes, copy->barrier);
    if (error != NULL)
        return error;
    plain_copy *kept = malloc(sizeof *kept);
    if (kept == NULL)
        return fail("no memory");
    *kept = *copy;
    return async_add(w, is_store(copy->way) ? ASYNC_STORE : ASYNC_BULK, copy_plainly, kept);
}

/* decoded[0]: the way */
static const char *execute_plain(warp *w, const instruction *i, uint32_t active)
{
    const char *error = NULL;
    for (int lane = 0; lane < LANES && error == NULL; lane++) {
        if (!(active >> lane & 1))
            continue;
        const plain_copy copy = {
            .way = (way)i->decoded[0],
            .to = value_of(w, &i->operands[0], lane),
            .from = value_of(w, &i->operands[1], lane),
            .bytes = (uint32_t)value_of(w, &i->operands[2], lane),
            .barrier = is_store((way)i->decoded[0]) ? 0 : value_of(w, &i->operands[3], lane),
        };
        error = issue_plain(w, lane, &copy);
    }
    return error;
}

static const char *execute_nothing(warp *w, const instruction *i, uint32_t active)
{
    (void)w, (void)i, (void)active;
    return NULL;
}

/* ---- All of them ---- */

static executor find_tensor_copy(instruction *i)
{
    const int is_tile = !has_modifier(i, "im2col") && !has_modifier(i, "tile::gather4");
    const int hints = strstr(i->mnemonic, "L2::cache_hint") != NULL;
    if (!is_tile)
        return NULL;
    if (has_modifier(i, "bulk_group"))
        return strstr(i->mnemonic, ".global.shared::cta") != NULL && i->operand_count == 2 + hints ? execute_store
                                                                                                   : NULL;
    i->decoded[0] = strstr(i->mnemonic, "multicast::cluster") != NULL;
    const int is_load =
        strstr(i->mnemonic, ".shared::cluster.global") != NULL || strstr(i->mnemonic, ".shared::cta.global") != NULL;
    return is_load && i->operand_count == 3 + (int)i->decoded[0] + hints ? execute_load : NULL;
}

static executor find_plain_copy(instruction *i)
{
    static const char *const beginnings[] = {
        [GLOBAL_TO_SHARED] = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes",
        [SHARED_TO_SHARED] = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes",
        [SHARED_TO_GLOBAL] = "cp.async.bulk.global.shared::cta.bulk_group",
        [ADDED_TO_GLOBAL] = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"};
    const int hints = strstr(i->mnemonic, "L2::cache_hint") != NULL;
    for (int n = 0; n < (int)(sizeof beginnings / sizeof beginnings[0]); n++)
        if (begins_with(i->mnemonic, beginnings[n]) && strstr(i->mnemonic, "multicast") == NULL &&
            i->operand_count == (is_store((way)n) ? 3 : 4) + hints) {
            i->decoded[0] = (uint64_t)n;
            return execute_plain;
        }
    return NULL;
}

executor find_executor_tensor(instruction *i)
{
    /* Groups of stores. With .read, too, they are waited for whole: that shared memory has been read is what both
     * promise. */
    const executor group = find_async_group(i, "cp.async.bulk.", ASYNC_STORE);
    if (group != NULL)
        return group;
    if (begins_with(i->mnemonic, "cp.async.bulk.prefetch."))
        return execute_nothing;
    if (begins_with(i->mnemonic, "cp.async.bulk.tensor."))
        return find_tensor_copy(i);
    return begins_with(i->mnemonic, "cp.async.bulk.") || begins_with(i->mnemonic, "cp.reduce.async.bulk.")
               ? find_plain_copy(i)
               : NULL;
}
