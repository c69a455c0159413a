/* The GPU's state by NVML, over a fake one: every field optional, which states count as throttled, what series of
 * samples discard, what records keep. Built twice: UNIT_NVML_BARE is the same over an NVML that lacks all that it may
 * lack. */
#include "support.h"

#include <jansson.h>
#include <math.h>

#include "bench/timer.h"
#include "fakes/fake_nvml.h"
#include "machine/environment.h"

static acr__device h200(void)
{
    return (acr__device){.backend = ACR__CUDA, .name = "NVIDIA H200", .clock_hz = 1.98e9, .driver = 13000};
}

static int reset(void **state)
{
    (void)state;
    fake_nvml_reset();
    return 0;
}

static int nothing_left_open(void **state)
{
    (void)state;
    assert_int_equal(fake_nvml_open_count(), 0);
    return 0;
}

static gpu_state read_state(void)
{
    const acr__device device = h200();
    gpu_monitor *m = gpu_monitor_open(&device, 0);
    gpu_state s;
    assert_non_null(m);
    gpu_monitor_read(m, &s);
    gpu_monitor_close(m);
    return s;
}

/* ---- Which GPU ---- */

static void the_device_is_found_by_name_and_place(void **state)
{
    (void)state;
    acr__device device = h200();
    unsetenv("CUDA_VISIBLE_DEVICES");
    fake_nvml_set_devices(2, "NVIDIA H200");
    gpu_monitor *m = gpu_monitor_open(&device, 1);
    assert_non_null(m);
    gpu_monitor_close(m);
    setenv("CUDA_VISIBLE_DEVICES", "1", 1); /* which of the two it is cannot be known */
    assert_null(gpu_monitor_open(&device, 1));
    unsetenv("CUDA_VISIBLE_DEVICES");
    fake_nvml_set_devices(1, "another GPU");
    assert_null(gpu_monitor_open(&device, 0));
    fake_nvml_set_devices(1, "NVIDIA H200");
    device.backend = ACR__CPU;
    assert_null(gpu_monitor_open(&device, 0));
    device.backend = ACR__CUDA;
    fake_nvml_fail("Init");
    assert_null(gpu_monitor_open(&device, 0));
}

static void nothing_is_known_without_a_monitor(void **state)
{
    (void)state;
    gpu_state s;
    gpu_monitor_read(NULL, &s);
    assert_int_equal(s.known, 0);
    assert_false(gpu_state_throttled(&s, 1e9));
}

#ifndef UNIT_NVML_BARE

static void every_field_is_read(void **state)
{
    (void)state;
    fake_nvml_set_state(1755, 61, 654321, GPU_POWER_CAP);
    const gpu_state s = read_state();
    assert_int_equal(s.known, GPU_SM_MHZ | GPU_MEMORY_MHZ | GPU_TEMPERATURE | GPU_POWER | GPU_REASONS);
    assert_int_equal(s.sm_mhz, 1755);
    assert_int_equal(s.memory_mhz, 3201);
    assert_int_equal(s.temperature_c, 61);
    assert_int_equal(s.power_mw, 654321);
    assert_int_equal(s.reasons, GPU_POWER_CAP);
}

static bool read_energy(double *joules)
{
    const acr__device device = h200();
    gpu_monitor *monitor = gpu_monitor_open(&device, 0);
    assert_non_null(monitor);
    const bool known = gpu_monitor_energy(monitor, joules);
    gpu_monitor_close(monitor);
    return known;
}

static void energy_is_read_in_joules(void **state)
{
    (void)state;
    double joules = 0;
    fake_nvml_set_state(1755, 61, 654321, 0);
    assert_true(read_energy(&joules));
    assert_true(joules == 654321.0);
    fake_nvml_fail("DeviceGetTotalEnergyConsumption");
    assert_false(read_energy(&joules));
}

static void every_field_may_fail_alone(void **state)
{
    (void)state;
    static const struct {
        const char *entry;
        unsigned lost;
    } fields[] = {{"DeviceGetClockInfo", GPU_SM_MHZ | GPU_MEMORY_MHZ},
                  {"DeviceGetTemperature", GPU_TEMPERATURE},
                  {"DeviceGetPowerUsage", GPU_POWER},
                  {"DeviceGetCurrentClocksThrottleReasons", GPU_REASONS}};
    const unsigned all = GPU_SM_MHZ | GPU_MEMORY_MHZ | GPU_TEMPERATURE | GPU_POWER | GPU_REASONS;
    for (size_t i = 0; i < COUNT_OF(fields); i++) {
        fake_nvml_fail(fields[i].entry);
        assert_int_equal(read_state().known, all & ~fields[i].lost);
    }
}

static void the_driver_names_itself(void **state)
{
    (void)state;
    const acr__device device = h200();
    char text[64];
    driver_text(text, sizeof text, &device);
    assert_string_equal(text, "580.65.06");
    fake_nvml_fail("SystemGetDriverVersion");
    driver_text(text, sizeof text, &device);
    assert_string_equal(text, "CUDA 13.0");
}

/* ---- Throttling ---- */

static void what_counts_as_throttled(void **state)
{
    (void)state;
    const unsigned both = GPU_SM_MHZ | GPU_REASONS;
    static const double NOMINAL_HZ = 2e9;
    const struct {
        gpu_state state;
        bool throttled;
    } cases[] = {
        {{both, 2000, 0, 0, 0, 0}, false},
        {{both, 1500, 0, 0, 0, 0}, false},
        {{both, 1499, 0, 0, 0, 0}, true},
        {{both, 345, 0, 0, 0, GPU_IDLE}, false}, /* an idle GPU clocks down */
        {{both, 1900, 0, 0, 0, GPU_POWER_CAP}, false},
        {{both, 1400, 0, 0, 0, GPU_POWER_CAP}, false}, /* whatever the cap leaves is the clock of a kernel under load */
        {{both, 1400, 0, 0, 0, GPU_POWER_CAP | GPU_SW_THERMAL}, true},
        {{both, 2000, 0, 0, 0, GPU_SW_THERMAL}, true},
        {{both, 2000, 0, 0, 0, GPU_HW_THERMAL}, true},
        {{both, 2000, 0, 0, 0, GPU_HW_SLOWDOWN}, true},
        {{both, 2000, 0, 0, 0, GPU_POWER_BRAKE | GPU_IDLE}, true},
        {{GPU_SM_MHZ, 1400, 0, 0, 0, GPU_HW_SLOWDOWN}, true},
        {{GPU_SM_MHZ, 2000, 0, 0, 0, GPU_HW_SLOWDOWN}, false}, /* reasons that are not known say nothing */
        {{GPU_REASONS, 0, 0, 0, 0, 0}, false},
        {{0, 0, 0, 0, 0, 0}, false},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        if (gpu_state_throttled(&cases[i].state, NOMINAL_HZ) != cases[i].throttled)
            fail_msg("case %zu", i);
}

static acr_status steady(void *arg, int count, double *seconds)
{
    (void)arg;
    for (int i = 0; i < count; i++)
        seconds[i] = 1e-6;
    return ACR_OK;
}

static void throttled_blocks_are_discarded_and_counted(void **state)
{
    (void)state;
    static const timer_limits limits = {0, 0, 40, 40}; /* 5 blocks */
    const acr__device device = h200();
    watch w;
    timing t;
    watch_open(&w, &device, 0);
    fake_nvml_set_state(1900, 50, 400000, GPU_HW_THERMAL);
    fake_nvml_reasons_for(6); /* five looks find them: two blocks and the beginning of a third */
    assert_ok(timer_series(&t, steady, NULL, &limits, &w));
    assert_int_equal(t.discarded, 3);
    assert_int_equal(t.stats.count, 40);
    fake_nvml_set_state(1900, 50, 400000, GPU_HW_THERMAL);
    fake_nvml_reasons_for(0);
    assert_fails(timer_series(&t, steady, NULL, &limits, &w), ACR_DEVICE_FAULT, "stays throttled");
    watch_close(&w);
}

static void records_keep_what_was_seen(void **state)
{
    (void)state;
    const acr__device device = h200();
    watch w;
    watch_open(&w, &device, 0);
    json_t *none = watch_json(&w);
    assert_true(json_is_null(json_object_get(none, "before")));
    json_decref(none);
    watch_disturbed(&w);
    fake_nvml_set_state(1500, 70, 650000, GPU_POWER_CAP);
    watch_disturbed(&w);
    fake_nvml_set_state(1800, 65, 600000, 0);
    watch_disturbed(&w);
    json_t *json = watch_json(&w);
    const json_t *range = json_object_get(json, "range"), *clock = json_object_get(range, "sm_mhz");
    assert_int_equal(json_integer_value(json_object_get(json_object_get(json, "before"), "sm_mhz")), 1980);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(json, "after"), "sm_mhz")), 1800);
    assert_int_equal((int)json_number_value(json_array_get(clock, 0)), 1500);
    assert_int_equal((int)json_number_value(json_array_get(clock, 1)), 1980);
    assert_string_equal(json_string_value(json_array_get(json_object_get(range, "reasons"), 0)), "power cap");
    assert_int_equal(json_array_size(json_object_get(json_object_get(json, "after"), "reasons")), 0);
    json_decref(json);
    fake_nvml_fail("DeviceGetTemperature");
    watch_restart(&w);
    watch_disturbed(&w);
    json = watch_json(&w);
    assert_null(json_object_get(json_object_get(json, "before"), "temperature_c"));
    assert_null(json_object_get(json_object_get(json, "range"), "temperature_c"));
    assert_non_null(json_object_get(json_object_get(json, "range"), "power_w"));
    json_decref(json);
    watch_close(&w);
}

static void reasons_have_names(void **state)
{
    (void)state;
    for (uint64_t reason = GPU_IDLE; reason <= GPU_DISPLAY_CLOCKS; reason <<= 1)
        assert_non_null(gpu_reason_name(reason));
    assert_null(gpu_reason_name(GPU_DISPLAY_CLOCKS << 1));
    assert_null(gpu_reason_name(GPU_IDLE | GPU_POWER_CAP));
}

#else

static void a_bare_library_is_no_fault(void **state)
{
    (void)state;
    fake_nvml_set_state(100, 99, 1, GPU_HW_THERMAL);
    const gpu_state s = read_state();
    assert_int_equal(s.known, 0);
    assert_false(gpu_state_throttled(&s, 2e9));
    const acr__device device = h200();
    char text[64];
    driver_text(text, sizeof text, &device);
    assert_string_equal(text, "CUDA 13.0");
    watch w;
    watch_open(&w, &device, 0);
    assert_false(watch_disturbed(&w));
    json_t *json = watch_json(&w);
    assert_true(json_is_null(json_object_get(json, "before")));
    assert_true(json_is_null(json_object_get(json, "range")));
    json_decref(json);
    watch_close(&w);
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_device_is_found_by_name_and_place, reset, nothing_left_open),
        cmocka_unit_test_setup_teardown(nothing_is_known_without_a_monitor, reset, nothing_left_open),
#ifndef UNIT_NVML_BARE
        cmocka_unit_test_setup_teardown(every_field_is_read, reset, nothing_left_open),
        cmocka_unit_test_setup_teardown(energy_is_read_in_joules, reset, nothing_left_open),
        cmocka_unit_test_setup_teardown(every_field_may_fail_alone, reset, nothing_left_open),
        cmocka_unit_test_setup_teardown(the_driver_names_itself, reset, nothing_left_open),
        cmocka_unit_test_setup_teardown(what_counts_as_throttled, reset, nothing_left_open),
        cmocka_unit_test_setup_teardown(throttled_blocks_are_discarded_and_counted, reset, nothing_left_open),
        cmocka_unit_test_setup_teardown(records_keep_what_was_seen, reset, nothing_left_open),
        cmocka_unit_test_setup_teardown(reasons_have_names, reset, nothing_left_open),
#else
        cmocka_unit_test_setup_teardown(a_bare_library_is_no_fault, reset, nothing_left_open),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
