/* Records of measurements, see bench_record.h. */
#include "bench_record.h"

#include "base/json.h"
#include "kernels/kernel_choice.h"

json_t *bench_record(const bench_conditions *on, const bench_series *series)
{
    const stats_summary *s = series->stats;
    json_t *json = json_pack(
        "{s:s, s:s, s:b, s:f, s:f, s:f, s:f, s:I, s:i, s:i, s:i, s:[o,o], s:o, s:f, s:s, s:f, s:{s:I}}", "problem",
        on->problem, "mode", mode_name(on->mode), "overlap", series->overlap, "p50_us", s->p50, "p90_us", s->p90,
        "p99_us", s->p99, "min_us", s->min, "n", (json_int_t)s->count, "launches", series->launches, "buffer_sets",
        series->sets, "discarded", series->discarded, "ci95_us", json_number_or_null(s->p50_ci95.low),
        json_number_or_null(s->p50_ci95.high), "err_max", json_number_or_null(series->err_max), "floor_us",
        1e6 * mode_floor_s(on->mode, on->floor), "floor_bound", mode_floor_bound(on->mode, on->floor), "tflops",
        on->work->flops / s->p50 / 1e6, "seeds", "inputs", (json_int_t)on->seed);
    if (on->mode == MODE_COLD) {
        json_object_set_new(json, "empty_us", json_number_or_null(on->empty_us));
    }
    if (on->mode == MODE_SUSTAINED) {
        json_object_set_new(json, "joules", json_number_or_null(series->joules));
    }
    json_object_set_new(json, "clocks", watch_json(on->watched));
    environment_add(json, on->device);
    return json;
}

void bench_record_step(json_t *record, bool step)
{
    if (step) {
        json_object_set_new(record, "with_forward", json_true());
    }
}

void bench_record_kernel(json_t *record, const acr__kernel *kernel)
{
    char digest[17];
    digest_text(digest, kernel);
    json_object_set_new(record, "kernel", json_string(kernel->name));
    json_object_set_new(record, "image", json_string(digest));
}
