/* Sustained and full-clock mode: what runs before a sample, and how long. Bounds are from below, so that a busy machine
 * changes nothing. */
#include <math.h>
#include <time.h>

#include "base/progress.h"
#include "bench/pace.h"
#include "support.h"

enum {
    MOST = 4096
};

/* A kernel whose sample takes no time of its own. */
typedef struct fake_kernel {
    double takes_s;
    int calls, samples;
    double at_s[MOST]; /* when each call came */
    int count[MOST];
} fake_kernel;

static acr_status take(void *arg, int count, double *seconds)
{
    fake_kernel *k = arg;
    assert_in_range(k->calls, 0, MOST - 1);
    k->at_s[k->calls] = monotonic_s();
    k->count[k->calls++] = count;
    const struct timespec nap = {0, 1000000};
    nanosleep(&nap, NULL);
    for (int i = 0; i < count; i++)
        seconds[i] = k->takes_s;
    k->samples += count;
    return ACR_OK;
}

static acr_status synchronize(acr__backend_device *device)
{
    (void)device;
    return ACR_OK;
}

static const acr__backend backend = {.synchronize = synchronize};

static acr__backend_device device_of(acr__backend_id id)
{
    return (acr__backend_device){.backend = &backend, .device = {.backend = id}};
}

static void sustained_samples_follow_their_own_kernel(void **state)
{
    (void)state;
    acr__backend_device device = device_of(ACR__CUDA);
    fake_kernel kernel = {.takes_s = 1e-4};
    pace_energy energy = {0, 0};
    const pace_request request = {take, &kernel, &device, 3, NULL, &energy};
    double seconds[4] = {0};
    const double start_s = monotonic_s();
    assert_ok(pace_samples(&request, MODE_SUSTAINED, 4, seconds));
    assert_int_equal(kernel.count[kernel.calls - 1], 4); /* taken together, last */
    assert_true(kernel.at_s[kernel.calls - 1] - start_s >= PACE_WARM_UP_S);
    assert_true(seconds[0] == 1e-4 && seconds[3] == 1e-4);
    assert_true(isnan(pace_joules(&energy))); /* without NVML nothing is known */
}

static void a_full_clock_sample_follows_a_pause(void **state)
{
    (void)state;
    acr__backend_device device = device_of(ACR__CUDA);
    fake_kernel kernel = {.takes_s = 1e-5};
    const pace_request request = {take, &kernel, &device, 10, NULL, NULL};
    double seconds[3] = {0};
    const double start_s = monotonic_s();
    assert_ok(pace_samples(&request, MODE_FULL_CLOCK, 3, seconds));
    assert_true(kernel.at_s[0] - start_s >= PACE_PAUSE_S);
    assert_true(kernel.calls >= 6); /* each after at least one that warms up */
    int pauses = 0;
    for (int i = 1; i < kernel.calls; i++)
        pauses += kernel.at_s[i] - kernel.at_s[i - 1] >= PACE_PAUSE_S;
    assert_true(pauses >= 2);
    assert_true(kernel.samples == kernel.calls && seconds[2] == 1e-5);
}

/* A replay that takes longer than the start would have the card at its limit before the sample. */
static void a_long_replay_is_its_own_start(void **state)
{
    (void)state;
    acr__backend_device device = device_of(ACR__CUDA);
    fake_kernel kernel = {.takes_s = 2e-3};
    const pace_request request = {take, &kernel, &device, 1, NULL, NULL};
    double seconds[3] = {0};
    assert_ok(pace_samples(&request, MODE_FULL_CLOCK, 3, seconds));
    int after_pause = 0;
    for (int i = 1; i < kernel.calls; i++)
        after_pause += kernel.at_s[i] - kernel.at_s[i - 1] >= PACE_PAUSE_S;
    assert_true(kernel.calls >= 4 && after_pause >= 2);
    assert_true(kernel.at_s[kernel.calls - 1] - kernel.at_s[kernel.calls - 2] >= PACE_PAUSE_S); /* nothing between */
}

static void a_cpu_is_refused_by_name(void **state)
{
    (void)state;
    acr__backend_device device = device_of(ACR__CPU);
    fake_kernel kernel = {.takes_s = 1e-5};
    const pace_request request = {take, &kernel, &device, 1, NULL, NULL};
    double seconds;
    assert_fails(pace_samples(&request, MODE_SUSTAINED, 1, &seconds), ACR_UNSUPPORTED, "sustained mode");
    assert_fails(pace_samples(&request, MODE_FULL_CLOCK, 1, &seconds), ACR_UNSUPPORTED, "full-clock mode");
    assert_int_equal(kernel.calls, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sustained_samples_follow_their_own_kernel),
        cmocka_unit_test(a_full_clock_sample_follows_a_pause),
        cmocka_unit_test(a_long_replay_is_its_own_start),
        cmocka_unit_test(a_cpu_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
