/* Limits of layouts, and the cost model, that the kernel families share. */
#include "cuda/model/fwd_model.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "buffers.h"
#include "paging.h"
#include "problem.h"

/* Returns how many there are. A packed batch never counts as a single row: its tensors may hold more. */
static int describe(acr__tensor out[ACR__TENSORS_MOST], const acr_problem *p)
{
    const int count = acr__tensor_count(p);
    const int packed = (p->flags & ACR_PACKED) != 0;
    const int64_t pages = acr__pages_of_entry(p);
    const acr__rows rows = {packed ? p->batch * p->q_len + 1 : p->q_len, packed ? p->batch * p->kv_len + 1 : p->kv_len,
                            p->batch * pages + 1, pages};
    for (int i = 0; i < count; i++)
        out[i] = acr__tensor_of(p, acr__tensors[i], rows);
    return count;
}

/* Why lengths are so long that tile arithmetic in 32 bits could overflow; NULL when they are not. */
static const char *length_why_not(const acr_problem *p)
{
    const int64_t length_max = INT32_MAX - 1024; /* a tile beyond the end is still a 32-bit number */
    if (p->q_len > length_max)
        return "q_len is above 2^31 - 1025";
    return p->kv_len > length_max ? "kv_len is above 2^31 - 1025" : NULL;
}

enum {
    COPY_BYTES = 16
};

/* A stride of an extent of 1 is never used. */
static int stride_is_multiple(int64_t extent, int64_t stride, acr_dtype dtype)
{
    return extent == 1 || stride % (COPY_BYTES / acr__dtype_bytes(dtype)) == 0;
}

static int strides_are_multiples(const acr__tensor *t)
{
    return stride_is_multiple(t->batch, t->strides.batch, t->dtype) &&
           stride_is_multiple(t->heads, t->strides.head, t->dtype) &&
           stride_is_multiple(t->rows, t->strides.row, t->dtype);
}

/* Why rows cannot be copied in pieces of 16 bytes: pointers, head dims or strides that are no multiple of it. NULL when
 * they can. */
static const char *vector_why_not(const acr_problem *p)
{
    static const char *const stride_reason[ACR__TENSORS_MOST] = {
        "a stride of q is not a multiple of 16 bytes",   "a stride of k is not a multiple of 16 bytes",
        "a stride of v is not a multiple of 16 bytes",   "a stride of o is not a multiple of 16 bytes",
        "a stride of d_o is not a multiple of 16 bytes", "a stride of dq is not a multiple of 16 bytes",
        "a stride of dk is not a multiple of 16 bytes",  "a stride of dv is not a multiple of 16 bytes"};
    acr__tensor tensors[ACR__TENSORS_MOST];
    const int count = describe(tensors, p);
    if (p->alignment < COPY_BYTES)
        return "alignment is below 16 bytes";
    if (p->qk_dim * acr__dtype_bytes(p->dtype) % COPY_BYTES != 0)
        return "rows of q and k (qk_dim) are not a multiple of 16 bytes";
    if (p->v_dim * acr__dtype_bytes(p->dtype) % COPY_BYTES != 0)
        return "rows of v (v_dim) are not a multiple of 16 bytes";
    if (p->qk_dim * acr__dtype_bytes(acr__kv_dtype(p)) % COPY_BYTES != 0)
        return "rows of k (qk_dim in kv_dtype) are not a multiple of 16 bytes";
    if (p->v_dim * acr__dtype_bytes(acr__kv_dtype(p)) % COPY_BYTES != 0)
        return "rows of v (v_dim in kv_dtype) are not a multiple of 16 bytes";
    for (int i = 0; i < count; i++)
        if (!strides_are_multiples(&tensors[i]))
            return stride_reason[i];
    return NULL;
}

/* The strides of a tensor map: positive, below 2^40 bytes. */
static int stride_fits_map(int64_t extent, int64_t stride, acr_dtype dtype)
{
    return extent == 1 || (stride > 0 && stride < (INT64_C(1) << 40) / acr__dtype_bytes(dtype));
}

static int strides_fit_map(const acr__tensor *t)
{
    return stride_fits_map(t->batch, t->strides.batch, t->dtype) &&
           stride_fits_map(t->heads, t->strides.head, t->dtype) && stride_fits_map(t->rows, t->strides.row, t->dtype);
}

/* Why these tensor maps, if any, cannot be made: beyond vector_why_not, a stride that is zero or 2^40 bytes and more.
 * NULL when they can. */
static const char *boxes_why_not(const acr_problem *p, const acr__boxes *boxes)
{
    static const char *const stride_reason[] = {"tensor map of q: a stride is 0 or not below 2^40 bytes",
                                                "tensor map of k: a stride is 0 or not below 2^40 bytes",
                                                "tensor map of v: a stride is 0 or not below 2^40 bytes",
                                                "tensor map of o: a stride is 0 or not below 2^40 bytes",
                                                "tensor map of d_o: a stride is 0 or not below 2^40 bytes"};
    enum {
        O = 3,
        D_O = 4 /* places in acr__tensors */
    };
    const int backward = p->pass == ACR_BACKWARD;
    const uint16_t box_rows[] = {boxes->q_rows, boxes->k_rows, boxes->v_rows,
                                 backward ? boxes->out_rows : boxes->o_rows, backward ? boxes->o_rows : 0};
    acr__tensor tensors[ACR__TENSORS_MOST];
    describe(tensors, p);
    for (int i = 0; i <= (backward ? D_O : O); i++)
        if (box_rows[i] != 0 && !strides_fit_map(&tensors[i]))
            return stride_reason[i];
    return vector_why_not(p);
}

int64_t acr__q_tiles(const acr_problem *p, int32_t q_tile)
{
    return (p->q_len + q_tile - 1) / q_tile;
}

/* Why a grid of {query tiles, q_heads, batch} is too large for a launch; NULL when it is not. */
static const char *grid_why_not(const acr_problem *p, int32_t q_tile)
{
    enum {
        GRID_YZ_MAX = 65535
    };
    if (p->q_heads > GRID_YZ_MAX)
        return "q_heads is above 65535";
    if (p->batch > GRID_YZ_MAX)
        return "batch is above 65535";
    if (acr__q_tiles(p, q_tile) * p->q_heads > INT32_MAX / p->batch)
        return "the grid would have more than 2^31 - 1 CTAs";
    return NULL;
}

int64_t acr__row_tiles(const acr_problem *problem, int32_t q_tile)
{
    return (problem->q_heads / problem->kv_heads * problem->q_len + q_tile - 1) / q_tile;
}

/* Why the grid of ACR__WORK_HEAD_ROWS would be too large, or the keys, shared out in 32-bit numbers, too many; NULL
 * when they are not. */
static const char *row_tiles_why_not(const acr_problem *problem, int32_t q_tile)
{
    if (problem->batch > 65535)
        return "batch is above 65535";
    if (problem->kv_len > INT32_MAX - 32768)
        return "kv_len is above 2^31 - 32769";
    if (acr__row_tiles(problem, q_tile) * problem->kv_heads > 65535)
        return "q_heads * q_len has more than 65535 tiles of rows";
    return NULL;
}

/* Of all heads of a batch entry. */
static int64_t query_tiles_of_entry(const acr__tiling *t, const acr_problem *p)
{
    const int32_t heads = t->heads_in_tile > 0 ? t->heads_in_tile : 1;
    return acr__q_tiles(p, t->q_tile / heads) * (p->q_heads / heads);
}

static int64_t count_query_tiles(const acr__tiling *t, const acr_problem *p)
{
    return query_tiles_of_entry(t, p) * p->batch;
}

/* Why the queue would be too long, or tiles would mix heads of several key heads; NULL when neither. */
static const char *queue_why_not(const acr__tiling *t, const acr_problem *p)
{
    if (t->heads_in_tile > 0 && p->q_heads / p->kv_heads % t->heads_in_tile != 0)
        return "q_heads / kv_heads is no multiple of the heads in a query tile (HEADS_IN_TILE)";
    return query_tiles_of_entry(t, p) > INT32_MAX / p->batch ? "batch * q_heads has more than 2^31 - 1 query tiles"
                                                             : NULL;
}

static const char *work_why_not(const acr__tiling *t, const acr_problem *p)
{
    switch (t->work) {
    case ACR__WORK_TILES:
        return grid_why_not(p, t->q_tile);
    case ACR__WORK_QUEUE:
        return queue_why_not(t, p);
    case ACR__WORK_HEAD_ROWS:
        return row_tiles_why_not(p, t->q_tile);
    case ACR__WORK_OWN:
        break;
    }
    return NULL;
}

const char *acr__tiling_why_not(const acr__tiling *t, const acr__boxes *boxes, const acr_problem *p,
                                const acr__device *device)
{
    const char *reason = length_why_not(p);
    if (reason == NULL && t->packed_only && !(p->flags & ACR_PACKED))
        reason = "serves packed batches only (ACR_PACKED)";
    if (reason == NULL && t->caches_only && !(p->flags & ACR_PAGED) && p->kv_dtype == ACR_DTYPE_DEFAULT)
        reason = "serves caches only, paged (ACR_PAGED) or of another type (kv_dtype)";
    if (reason == NULL && t->narrow_only && p->kv_dtype == ACR_DTYPE_DEFAULT)
        reason = "kv_dtype: the kernel is compiled for keys and values of e4m3 (KV_E4M3)";
    if (reason == NULL && t->no_windows && (p->window_left || p->window_right))
        reason = "window: the kernel has no registers left for sliding windows (window_left, window_right)";
    if (reason == NULL && !t->any_strides)
        reason = boxes_why_not(p, boxes);
    if (reason == NULL)
        reason = work_why_not(t, p);
    if (reason == NULL && t->smem_bytes > device->smem_per_cta_bytes)
        reason = "a CTA's tiles need more shared memory than this device has";
    return reason;
}

/* ---- Launches ---- */

size_t acr__tiling_workspace(const acr__tiling *t, const acr_problem *p, const acr__device *device)
{
    return t->work == ACR__WORK_QUEUE && count_query_tiles(t, p) > device->sm_count ? sizeof(uint32_t) : 0;
}

acr__launch acr__tiling_launch(const acr__tiling *t, const acr_problem *p, const acr__device *device)
{
    acr__launch launch = {.block = (uint32_t)t->threads, .smem_bytes = (uint32_t)t->smem_bytes};
    if (t->work == ACR__WORK_QUEUE) {
        const int64_t tiles = count_query_tiles(t, p), sms = device->sm_count;
        launch.grid[0] = (uint32_t)(tiles < sms ? tiles : sms);
        launch.grid[1] = launch.grid[2] = 1;
    } else {
        launch.grid[0] = (uint32_t)acr__q_tiles(p, t->q_tile);
        launch.grid[1] = (uint32_t)p->q_heads;
        launch.grid[2] = (uint32_t)p->batch;
    }
    return launch;
}

int32_t acr__ctas_per_sm(const acr__device *device, int32_t smem_bytes, int32_t regs_per_thread, int32_t threads)
{
    const int32_t reserved_bytes = 1024; /* of shared memory, for each CTA */
    const int32_t by_smem = device->smem_per_sm_bytes / (smem_bytes + reserved_bytes),
                  by_regs = device->regs_per_sm / (regs_per_thread * threads);
    const int32_t fewer = by_smem < by_regs ? by_smem : by_regs;
    return fewer > 0 ? fewer : 1;
}

int acr__accumulates_slowly(const acr__device *device)
{
    return strstr(device->name, "GeForce") != NULL;
}

/* Half the tensor pipe, behind which the rest hides better, and a quarter. */
double acr__mma_share(const acr__device *device)
{
    if (device->arch == 80 || device->arch == 90)
        return 1.0;
    return acr__accumulates_slowly(device) ? 0.33 : 0.55;
}

/* ---- Fitted rates ---- */

static const acr__fitted_rates fitted[] = {
#define RATES(...) {__VA_ARGS__}, /* in the order of the fields */
#include "cuda/model/rates.def"
#undef RATES
};

/* <pass>_<family>_<dtype>_<rest>: the third part goes. */
void acr__rates_key(char *out, size_t capacity, const char *kernel)
{
    const char *pass_end = strchr(kernel, '_');
    const char *type = pass_end ? strchr(pass_end + 1, '_') : NULL;
    const char *rest = type ? strchr(type + 1, '_') : NULL;
    if (rest)
        snprintf(out, capacity, "%.*s%s", (int)(type - kernel), kernel, rest);
    else
        snprintf(out, capacity, "%s", kernel);
}

static int is_line_of(const acr__fitted_rates *line, const char *key, int32_t arch)
{
    return line && line->arch == arch && strcmp(line->kernel, key) == 0;
}

/* NULL: nobody has fitted this kernel on such a GPU. */
static const acr__fitted_rates *find_fitted(const char *kernel, const acr__device *device)
{
    char key[96];
    acr__rates_key(key, sizeof key, kernel);
    if (is_line_of(device->rates_on_trial, key, device->arch))
        return device->rates_on_trial;
    for (size_t i = 0; i < sizeof fitted / sizeof fitted[0]; i++)
        if (is_line_of(&fitted[i], key, device->arch))
            return &fitted[i];
    return NULL;
}

static acr__fwd_rates with_fitted(const acr__fwd_rates *rates, const acr__device *device)
{
    acr__fwd_rates out = *rates;
    const acr__fitted_rates *line = rates->kernel ? find_fitted(rates->kernel, device) : NULL;
    if (line) {
        out.mma_flop_per_cycle = line->mma_flop_per_cycle;
        out.exp_per_cycle = line->exp_per_cycle;
        out.step_cycles = line->step_cycles;
        out.cta_cycles = line->cta_cycles;
        out.memory_share = line->memory_share;
        out.mask_cycles = line->mask_cycles;
        out.first_cycles = line->first_cycles;
    }
    return out;
}

/* ---- Cost ---- */

static int32_t heads_in_tile(const acr__fwd_rates *r)
{
    return r->heads_in_tile > 0 ? r->heads_in_tile : 1;
}

/* The key tiles that a query tile visits; tile 0 is the first. */
static double count_steps(const acr_problem *p, const acr__fwd_rates *r, double tile)
{
    const int32_t positions = r->q_tile / heads_in_tile(r);
    const visible_keys keys = visible_to_rows(acr__longest_entry(p), (int32_t)tile * positions, positions);
    const visible_tiles tiles = visible_tiles_of(keys, r->kv_tile);
    return (double)(tiles.end - tiles.first);
}

enum {
    CLASSES_MAX = 8,
    ROUNDS_MAX = 8 /* CTAs of a slot, one after another, that are followed one by one */
};

/* The query tiles of all heads, as work for CTAs: classes of equal length, the longest first. */
typedef struct load {
    int classes;
    double ctas, steps[CLASSES_MAX], steps_mean; /* ctas: of all classes; each has as many */
} load;

static load count_load(const acr_problem *p, const acr__fwd_rates *r)
{
    const int32_t heads = heads_in_tile(r);
    const int64_t head_tiles = p->q_heads / heads;
    const double tiles = (double)acr__q_tiles(p, r->q_tile / heads);
    load l = {.ctas = tiles * (double)head_tiles * (double)p->batch};
    l.classes = !visible_is_limited(acr__rule_of(p)) ? 1 : tiles < CLASSES_MAX ? (int)tiles : CLASSES_MAX;
    for (int i = 0; i < l.classes; i++) {
        l.steps[i] = count_steps(p, r, tiles - 1.0 - floor((i + 0.5) / l.classes * tiles));
        l.steps_mean += l.steps[i] / l.classes;
    }
    return l;
}

/* Bytes of the bias that are distinct, as far as rows see keys. */
static double count_bias_bytes(const acr_problem *p)
{
    if (p->bias_dtype == ACR_DTYPE_DEFAULT)
        return 0.0;
    const visible_entry entry = acr__longest_entry(p);
    const double elems = p->bias.row == 0 ? acr__visible_keys(entry) : acr__visible_pairs(entry);
    return elems * (p->bias.head == 0 ? 1.0 : (double)p->q_heads) * (p->bias.batch == 0 ? 1.0 : (double)p->batch) *
           acr__dtype_bytes(p->bias_dtype);
}

/* Of the four tensors, as far as some row sees the keys, and of the bias. */
static double count_bytes(const acr_problem *p)
{
    acr__tensor tensors[ACR__TENSORS_MOST];
    const int count = describe(tensors, p);
    const double share_seen = acr__visible_keys(acr__longest_entry(p)) / (double)p->kv_len;
    double bytes = count_bias_bytes(p);
    for (int i = 0; i < count; i++) {
        const acr__tensor *t = &tensors[i];
        const double rows = (double)t->rows * (i == 1 || i == 2 ? share_seen : 1.0);
        bytes += (double)t->batch * (double)t->heads * rows * (double)t->dim * acr__dtype_bytes(t->dtype);
    }
    return bytes;
}

acr_problem acr__padded(const acr_problem *p, int32_t qk_dim, int32_t v_dim)
{
    acr_problem padded = *p;
    padded.qk_dim = qk_dim;
    padded.v_dim = v_dim;
    return padded;
}

double acr__memory_rate(const acr_problem *p, const acr__device *device, double readers)
{
    const double l2_bytes_per_cycle_sm = 32.0, dram_default = 300e9;
    const double l2_rate = l2_bytes_per_cycle_sm * device->sm_count * device->clock_hz;
    if (count_bytes(p) < 0.8 * (double)device->l2_bytes)
        return l2_rate;
    return fmin(l2_rate, readers * (device->dram_bytes_per_s > 0.0 ? device->dram_bytes_per_s : dram_default));
}

/* Slots that end at the same time. */
typedef struct slot_group {
    double end_cycles, slots;
} slot_group;

/* Adds slots that end then to groups in ascending order. */
static int add_slots(slot_group *groups, int count, slot_group added)
{
    int at = count;
    while (at > 0 && groups[at - 1].end_cycles > added.end_cycles)
        at--;
    if (at > 0 && groups[at - 1].end_cycles == added.end_cycles) {
        groups[at - 1].slots += added.slots;
        return count;
    }
    memmove(groups + at + 1, groups + at, (size_t)(count - at) * sizeof *groups);
    groups[at] = added;
    return count + 1;
}

/* When the last CTA ends if each slot takes the longest CTA left as soon as it is free. */
static double last_end_cycles(const load *l, double slots, double start_cycles, double step_cycles)
{
    if (l->ctas > ROUNDS_MAX * slots) /* all slots end together, but for half of a short CTA */
        return l->ctas / slots * (start_cycles + l->steps_mean * step_cycles) +
               0.5 * (start_cycles + l->steps[l->classes - 1] * step_cycles);
    slot_group groups[CLASSES_MAX + 2] = {{0.0, slots}}; /* each class divides one group at most */
    int count = 1;
    for (int i = 0; i < l->classes; i++) {
        const double cta_cycles = start_cycles + l->steps[i] * step_cycles;
        for (double left = l->ctas / l->classes; left > 1e-6;) {
            const double taken = fmin(left, groups[0].slots);
            const slot_group busy = {groups[0].end_cycles + cta_cycles, taken};
            left -= taken;
            groups[0].slots -= taken;
            if (groups[0].slots <= 1e-6)
                memmove(groups, groups + 1, (size_t)--count * sizeof *groups);
            count = add_slots(groups, count, busy);
        }
    }
    return groups[count - 1].end_cycles;
}

double acr__fwd_seconds(const acr_problem *p, const acr__device *device, const acr__fwd_rates *rates)
{
    const acr__fwd_rates fitted_or_given = with_fitted(rates, device), *r = &fitted_or_given;
    const load l = count_load(p, r);
    double pair_flop = 2.0 * r->q_tile * r->kv_tile * (double)(p->qk_dim + p->v_dim);
    double mma = pair_flop / r->mma_flop_per_cycle, exps = (double)r->q_tile * r->kv_tile / r->exp_per_cycle;
    if (p->softcap > 0.0f) /* tanh takes the same unit, and nothing else: at its own rate, not at the fitted one */
        exps += (double)r->q_tile * r->kv_tile / 16.0;
    double pipe = fmax(mma, exps) + 0.3 * fmin(mma, exps); /* the two overlap, but not perfectly */
    double start_cycles = r->cta_cycles + (visible_is_limited(acr__rule_of(p)) ? r->mask_cycles : 0.0);
    double ctas_on_fullest_sm = ceil(l.ctas / device->sm_count);
    double pipes = start_cycles + ctas_on_fullest_sm * l.steps_mean * pipe;
    double slots = (double)device->sm_count * r->ctas_per_sm;
    double last_end = last_end_cycles(&l, slots, start_cycles, fmax(r->step_cycles, pipe));
    double cycles = r->first_cycles + fmax(pipes, last_end);
    double memory_rate = acr__memory_rate(p, device, 1.0) * (r->memory_share > 0.0 ? r->memory_share : 1.0);
    return ACR__LAUNCH_SECONDS + fmax(cycles / device->clock_hz, count_bytes(p) / memory_rate);
}
