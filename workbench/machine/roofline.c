/* Physical floors, see roofline.h. */
#include "roofline.h"

#include <math.h>
#include <stdio.h>

#include "cpu_peak.h"
#include "gpus.h"

/* An SM takes at most 64 bytes a clock from L2: the bound where the chip's own is not known. */
static const double sm_port_bytes_per_clk = 64;
/* A softmax that computes a quarter of its exponentials by polynomial on the multiply-add lanes balances the two units
 * (docs/manual/measuring.md). */
static const double polynomial_gain = 4.0 / 3.1;
/* Vector operations an exponential takes on a CPU at least: range reduction 2, polynomial of degree 4. */
static const double cpu_exp_ops = 6;

void machine_of_gpu(machine *out, const acr__device *device)
{
    const gpu_model *model = gpu_of_device(device);
    sm_rates rates = gpu_sm_rates(device);
    double clocks_per_s = device->clock_hz * device->sm_count;
    *out = (machine){.source = model ? model->source
                                     : "no line in the table: rates by architecture, clocks and sizes from the driver",
                     .cpu_share = 1};
    snprintf(out->name, sizeof out->name, "%s", device->name);
    out->multiply_add_flops[ACR_F32] = rates.f32 * clocks_per_s;
    out->multiply_add_flops[ACR_F16] = out->multiply_add_flops[ACR_BF16] = rates.f16 * clocks_per_s;
    out->multiply_add_flops[ACR_E4M3] = rates.e4m3 * clocks_per_s;
    out->exps_per_s = rates.exp2 * clocks_per_s;
    out->exps_per_s_most = out->exps_per_s * polynomial_gain;
    double known = model ? model->l2_bytes_per_clk * device->clock_hz : 0;
    out->cache_bytes_per_s = known > 0 ? known : sm_port_bytes_per_clk * clocks_per_s;
    out->cache_bytes = (double)device->l2_bytes;
    out->memory_bytes_per_s = device->dram_bytes_per_s;
    out->launch_s = model ? model->launch_s : 1e-6;
    out->link_bytes_per_s = model ? model->link_gb_s * 1e9 : 0;
}

void machine_of_cpu(machine *out, const acr__device *device, uint32_t threads, double bytes)
{
    enum {
        MEMORY_TEST_BYTES = 256 << 20
    }; /* beyond most last-level caches */
    double share = 0, flops = cpu_peak_flops(device->isa, threads, &share);
    *out = (machine){.source = "measured just now", .shared_lanes = true, .cpu_share = share};
    snprintf(out->name, sizeof out->name, "%s", device->name);
    for (int dtype = 0; dtype <= ACR_E4M3; ++dtype) {
        out->multiply_add_flops[dtype] = flops; /* narrow types are widened to float32 */
    }
    out->exps_per_s = out->exps_per_s_most = flops / 2 / cpu_exp_ops;
    out->cache_bytes_per_s =
        cpu_peak_read_bytes_per_s(device->isa, (size_t)fmin(fmax(bytes, 64 << 10), MEMORY_TEST_BYTES), threads);
    out->cache_bytes = INFINITY;
    out->memory_bytes_per_s = cpu_peak_read_bytes_per_s(device->isa, MEMORY_TEST_BYTES, threads);
}

/* Of each position: repeated batch entries or heads (stride 0) are the same memory. */
static double distinct_rows(const acr_strides *strides, int64_t batch, int64_t heads)
{
    return (strides->batch == 0 ? 1.0 : (double)batch) * (strides->head == 0 ? 1.0 : (double)heads);
}

/* Queries and keys of one batch entry. */
typedef struct entry_lengths {
    int64_t queries, keys;
} entry_lengths;

static entry_lengths lengths_of(const acr_problem *p, const acr_buffers *lengths, int64_t batch)
{
    int64_t queries = p->q_len, keys = lengths && lengths->kv_lens ? lengths->kv_lens[batch] : p->kv_len;
    if (lengths && lengths->q_offsets)
        queries = fwd_sequence_of(lengths->q_offsets, batch, lengths->q_total, p->q_len).length;
    if (lengths && lengths->kv_offsets) /* packed queries over pages have none */
        keys = fwd_sequence_of(lengths->kv_offsets, batch, lengths->kv_total, p->kv_len).length;
    return (entry_lengths){queries, keys < 0 ? 0 : keys > p->kv_len ? p->kv_len : keys};
}

/* The first key of a batch entry that exists. */
static int32_t first_key_of(const acr_problem *p, const acr_buffers *lengths, int64_t batch, int64_t keys)
{
    const int32_t first = p->flags & ACR_KV_STARTS && lengths && lengths->kv_starts ? lengths->kv_starts[batch] : 0;
    return first < 0 ? 0 : first > keys ? (int32_t)keys : first;
}

/* Bytes of the bias that one batch entry needs: where rows, heads or entries share it they count once. */
static double bias_bytes(const acr_problem *p, visible_entry seen, int64_t batch)
{
    if (p->bias_dtype == ACR_DTYPE_DEFAULT || (p->bias.batch == 0 && batch > 0))
        return 0;
    const double elems = p->bias.row == 0 ? acr__visible_keys(seen) : acr__visible_pairs(seen);
    return elems * (p->bias.head == 0 ? 1.0 : (double)p->q_heads) * acr__dtype_bytes(p->bias_dtype);
}

/* What rows see at most. Only who made a mask knows what it hides: one with rows is taken to hide what those of check
 * and bench do (inputs.h), all keys right of the diagonal. */
static visible_rule rule_of(const acr_problem *p)
{
    visible_rule rule = acr__rule_of(p);
    if (p->bias_dtype == ACR_BOOL8 && p->bias.row != 0 && rule.mask == FWD_MASK_NONE) {
        rule.mask = FWD_MASK_BOTTOM_RIGHT;
        rule.window_right = 0;
    }
    return rule;
}

problem_work work_of(const acr_problem *p, const acr_buffers *lengths)
{
    double pairs = 0, keys_total = 0, queries_total = 0, bias = 0;
    for (int64_t batch = 0; batch < p->batch; ++batch) {
        entry_lengths entry = lengths_of(p, lengths, batch);
        const visible_entry seen = {rule_of(p), (int32_t)entry.queries, (int32_t)entry.keys,
                                    first_key_of(p, lengths, batch, entry.keys)};
        pairs += acr__visible_pairs(seen) * (double)p->q_heads;
        keys_total += acr__visible_keys(seen);
        queries_total += (double)entry.queries;
        const visible_entry looked_at = {acr__rule_of(p), seen.q_len, seen.kv_len, seen.kv_start};
        bias += bias_bytes(p, looked_at, batch); /* what a mask hides has to be read in it */
    }
    double in_bytes = acr__dtype_bytes(p->dtype), out_bytes = acr__dtype_bytes(p->out_dtype);
    /* A packed batch is one entry of the tensors, with the rows of all. */
    int64_t entries = p->flags & ACR_PACKED ? 1 : p->batch;
    double q_rows = (double)p->q_heads * queries_total;
    double keys_mean = keys_total / (double)entries, queries_mean = queries_total / (double)entries;
    double k_elems = distinct_rows(&p->k, entries, p->kv_heads) * keys_mean * (double)p->qk_dim;
    double v_elems = distinct_rows(&p->v, entries, p->kv_heads) * keys_mean * (double)p->v_dim;
    v_elems = p->flags & ACR_V_IN_K ? 0 : v_elems; /* they are loaded with the keys */
    double q_elems = distinct_rows(&p->q, entries, p->q_heads) * queries_mean * (double)p->qk_dim;
    /* The tanh of a softcap takes the same unit as an exponential. */
    problem_work d = {.flops = 2 * pairs * (double)(p->qk_dim + p->v_dim), .exps = p->softcap > 0 ? 2 * pairs : pairs};
    d.bytes = in_bytes * q_elems + acr__dtype_bytes(acr__kv_dtype(p)) * (k_elems + v_elems) +
              out_bytes * q_rows * (double)p->v_dim + bias;
    d.bytes += p->flags & ACR_WANT_LSE ? (double)sizeof(float) * q_rows : 0;
    if (p->pass == ACR_BACKWARD) {
        /* S, dQ and dK over the dims of queries, dP and dV over those of values; o, above, is read like its gradient */
        const double k_rows = (double)p->kv_heads * keys_total;
        d.flops = 2 * pairs * (double)(3 * p->qk_dim + 2 * p->v_dim);
        d.bytes += out_bytes * distinct_rows(&p->d_o, entries, p->q_heads) * queries_mean * (double)p->v_dim;
        d.bytes +=
            acr__dtype_bytes(p->grad_dtype) * (q_rows * (double)p->qk_dim + k_rows * (double)(p->qk_dim + p->v_dim));
    }
    return d;
}

/* The longest of the times and its name. */
typedef struct bound {
    double time_s;
    const char *name;
} bound;

static void raise(bound *b, double time_s, const char *name)
{
    if (time_s > b->time_s) {
        *b = (bound){time_s, name};
    }
}

void floor_of(floor_times *out, const machine *m, const acr_problem *problem, const problem_work *d)
{
    double beyond_cache = fmax(0.0, d->bytes - m->cache_bytes);
    *out = (floor_times){
        .multiply_add_s = d->flops / m->multiply_add_flops[problem->dtype],
        .exp_s = d->exps / m->exps_per_s_most,
        .exp_sfu_s = d->exps / m->exps_per_s,
        .cache_s = d->bytes / m->cache_bytes_per_s,
    };
    if (m->memory_bytes_per_s > 0) { /* 0: not known */
        out->memory_cold_s = d->bytes / m->memory_bytes_per_s;
        out->memory_warm_s = beyond_cache / m->memory_bytes_per_s;
    }
    bound compute = {0, "nothing"};
    if (m->shared_lanes) {
        raise(&compute, out->multiply_add_s + out->exp_s, "multiply-adds and exponentials");
    } else {
        raise(&compute, out->multiply_add_s, problem->dtype == ACR_F32 ? "float32 multiply-adds" : "tensor cores");
        raise(&compute, out->exp_s, "exponentials");
    }
    bound warm = compute, cold = compute;
    raise(&warm, out->cache_s, m->shared_lanes ? "memory at this size" : "L2");
    raise(&warm, out->memory_warm_s, "DRAM");
    raise(&cold, out->memory_cold_s, "DRAM");
    out->warm_s = warm.time_s;
    out->warm_bound = warm.name;
    out->cold_s = cold.time_s;
    out->cold_bound = cold.name;
}

const char *not_shared(const acr_problem *p)
{
    if (p->pass != ACR_FORWARD)
        return "gradients are not computed over several GPUs";
    if (p->flags & ~(uint32_t)(ACR_WANT_LSE | ACR_SINKS | ACR_V_IN_K) || p->bias_dtype != ACR_DTYPE_DEFAULT)
        return "over several GPUs there is a floor of plain problems: without lengths, pages, packed batches or biases";
    if (p->window_left || p->window_right || p->chunk)
        return "of windows and chunks no floor over several GPUs is known";
    return NULL;
}

void floor_over_gpus(shared_floor *out, const machine *m, const acr_problem *p, const problem_work *d, int64_t gpus)
{
    const problem_work share = {d->flops / (double)gpus, d->exps / (double)gpus, d->bytes / (double)gpus};
    const double kv_dims = (double)(p->qk_dim + (p->flags & ACR_V_IN_K ? 0 : p->v_dim)),
                 kv_bytes = (double)(p->batch * p->kv_heads * p->kv_len) * kv_dims * acr__dtype_bytes(acr__kv_dtype(p)),
                 part_bytes = (double)(p->batch * p->q_heads * p->q_len) *
                              ((double)p->v_dim * acr__dtype_bytes(p->out_dtype) + sizeof(float)),
                 others = (double)(gpus - 1);
    floor_of(&out->times, m, p, &share);
    out->link_bytes = others * kv_bytes / (double)gpus;
    if (p->mask == ACR_MASK_NONE || p->q_len == 1)
        out->link_bytes = fmin(out->link_bytes, others * part_bytes);
    out->link_s = out->link_bytes / m->link_bytes_per_s;
    bound warm = {out->times.warm_s, out->times.warm_bound}, cold = {out->times.cold_s, out->times.cold_bound};
    raise(&warm, out->link_s, "link");
    raise(&cold, out->link_s, "link");
    out->times.warm_s = warm.time_s;
    out->times.warm_bound = warm.name;
    out->times.cold_s = cold.time_s;
    out->times.cold_bound = cold.name;
}

target_verdict judge_target(const machine *m, const floor_times *f, double target_s)
{
    if (target_s < f->warm_s) {
        return TARGET_IMPOSSIBLE;
    }
    if (target_s < f->warm_s + m->launch_s) {
        return TARGET_IMPLAUSIBLE;
    }
    return f->warm_s > 0.7 * (target_s - m->launch_s) ? TARGET_HARD : TARGET_OPEN;
}

const char *target_verdict_text(target_verdict verdict)
{
    static const char *const texts[] = {[TARGET_IMPOSSIBLE] = "impossible",
                                        [TARGET_IMPLAUSIBLE] = "implausible",
                                        [TARGET_HARD] = "hard",
                                        [TARGET_OPEN] = "open"};
    return texts[verdict];
}
