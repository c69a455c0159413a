/* Watching the GPU, see watch.h. */
#include "watch.h"

void watch_open(watch *w, const acr__device *device, int32_t ordinal)
{
    *w = (watch){.monitor = gpu_monitor_open(device, ordinal), .nominal_hz = device->clock_hz};
}

void watch_close(watch *w)
{
    gpu_monitor_close(w->monitor);
    w->monitor = NULL;
}

void watch_restart(watch *w)
{
    w->seen = 0;
}

static void widen(unsigned *low, unsigned *high, unsigned value)
{
    *low = value < *low ? value : *low;
    *high = value > *high ? value : *high;
}

bool watch_disturbed(void *arg)
{
    watch *w = arg;
    gpu_monitor_read(w->monitor, &w->last);
    if (w->seen++ == 0) {
        w->first = w->low = w->high = w->last;
    }
    /* What is known at one moment is known at the others: the library does not change under us. */
    widen(&w->low.sm_mhz, &w->high.sm_mhz, w->last.sm_mhz);
    widen(&w->low.memory_mhz, &w->high.memory_mhz, w->last.memory_mhz);
    widen(&w->low.temperature_c, &w->high.temperature_c, w->last.temperature_c);
    widen(&w->low.power_mw, &w->high.power_mw, w->last.power_mw);
    w->high.reasons |= w->last.reasons;
    return gpu_state_throttled(&w->last, w->nominal_hz);
}

static json_t *reasons_json(uint64_t reasons)
{
    json_t *names = json_array();
    for (int i = 0; i < 64; ++i) {
        const uint64_t bit = (uint64_t)1 << i;
        if (reasons & bit) {
            const char *name = gpu_reason_name(bit);
            json_array_append_new(names, name ? json_string(name) : json_sprintf("reason %d", i));
        }
    }
    return names;
}

static json_t *state_json(const gpu_state *s)
{
    if (!s->known) {
        return json_null();
    }
    json_t *json = json_object();
    if (s->known & GPU_SM_MHZ) {
        json_object_set_new(json, "sm_mhz", json_integer(s->sm_mhz));
    }
    if (s->known & GPU_MEMORY_MHZ) {
        json_object_set_new(json, "memory_mhz", json_integer(s->memory_mhz));
    }
    if (s->known & GPU_TEMPERATURE) {
        json_object_set_new(json, "temperature_c", json_integer(s->temperature_c));
    }
    if (s->known & GPU_POWER) {
        json_object_set_new(json, "power_w", json_real(s->power_mw / 1000.0));
    }
    if (s->known & GPU_REASONS) {
        json_object_set_new(json, "reasons", reasons_json(s->reasons));
    }
    return json;
}

static void add_range(json_t *json, const char *name, bool known, double low, double high)
{
    if (known) {
        json_object_set_new(json, name, json_pack("[f,f]", low, high));
    }
}

static json_t *range_json(const watch *w)
{
    const unsigned known = w->first.known;
    if (!known) {
        return json_null();
    }
    json_t *json = json_object();
    add_range(json, "sm_mhz", known & GPU_SM_MHZ, w->low.sm_mhz, w->high.sm_mhz);
    add_range(json, "memory_mhz", known & GPU_MEMORY_MHZ, w->low.memory_mhz, w->high.memory_mhz);
    add_range(json, "temperature_c", known & GPU_TEMPERATURE, w->low.temperature_c, w->high.temperature_c);
    add_range(json, "power_w", known & GPU_POWER, w->low.power_mw / 1000.0, w->high.power_mw / 1000.0);
    if (known & GPU_REASONS) {
        json_object_set_new(json, "reasons", reasons_json(w->high.reasons));
    }
    return json;
}

json_t *watch_json(const watch *w)
{
    const gpu_state unknown = {.known = 0};
    const bool any = w->seen > 0;
    return json_pack("{s:f, s:o, s:o, s:o}", "nominal_mhz", w->nominal_hz / 1e6, "before",
                     state_json(any ? &w->first : &unknown), "after", state_json(any ? &w->last : &unknown), "range",
                     any ? range_json(w) : json_null());
}
