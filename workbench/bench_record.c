/* Records of measurements, see bench_record.h. */
#include "bench_record.h"

#include "json.h"
#include "kernel_choice.h"

json_t *bench_record(const bench_conditions *on, const stats_summary *stats, int launches, bool overlap, double err_max,
                     const gpu_state *before, const gpu_state *after)
{
    json_t *json = json_pack(
        "{s:s, s:s, s:b, s:f, s:f, s:f, s:f, s:I, s:i, s:[o,o], s:o, s:f, s:s, s:f, s:{s:I}}", "problem", on->problem,
        "mode", on->mode, "overlap", overlap, "p50_us", stats->p50, "p90_us", stats->p90, "p99_us", stats->p99,
        "min_us", stats->min, "n", (json_int_t)stats->count, "launches", launches, "ci95_us",
        json_number_or_null(stats->p50_ci95.low), json_number_or_null(stats->p50_ci95.high), "err_max",
        json_number_or_null(err_max), "floor_us", 1e6 * on->floor->warm_s, "floor_bound", on->floor->warm_bound,
        "tflops", on->demand->flops / stats->p50 / 1e6, "seeds", "inputs", (json_int_t)on->seed);
    json_object_set_new(json, "clocks", clocks_json(on->device, before, after));
    environment_add(json, on->device);
    return json;
}

void bench_record_kernel(json_t *record, const acr__kernel *kernel)
{
    char digest[17];
    digest_text(digest, kernel);
    json_object_set_new(record, "kernel", json_string(kernel->name));
    json_object_set_new(record, "image", json_string(digest));
}
