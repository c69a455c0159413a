/* Measuring, see timer.h. */
#include "timer.h"

#include <math.h>
#include <stdlib.h>

enum {
    LAUNCHES_MAX = 4000
};

/* How many launches fill the stretch. A lone launch carries the start of its replay, so the estimate is refined with
 * the count it led to. */
static acr_status choose_launches(acr__backend_device *device, acr__enqueue *enqueue, void *arg, double stretch_s,
                                  int *launches, double *launch_s)
{
    enum {
        ROUNDS = 3,
        PROBES = 3
    };
    *launches = 1;
    for (int round = 0; round < ROUNDS; ++round) {
        double probe[PROBES];
        acr_status status = device->backend->time(device, enqueue, arg, *launches, PROBES, probe);
        if (status != ACR_OK) {
            return status;
        }
        *launch_s = fmax(fmin(probe[0], fmin(probe[1], probe[2])), 1e-9);
        double wanted = fmin(ceil(stretch_s / *launch_s), LAUNCHES_MAX);
        if (wanted <= *launches) {
            return ACR_OK;
        }
        *launches = (int)wanted;
    }
    return ACR_OK;
}

static int clamp_count(double count, int min, int max)
{
    return count < min ? min : count > max ? max : (int)count;
}

acr_status timer_stream(timing *out, acr__backend_device *device, acr__enqueue *enqueue, void *arg,
                        const timer_limits *limits)
{
    double launch_s = 0;
    acr_status status = choose_launches(device, enqueue, arg, limits->stretch_s, &out->launches, &launch_s);
    if (status != ACR_OK) {
        return status;
    }
    double replay_s = launch_s * out->launches;
    int warm_up = clamp_count(ceil(limits->warm_up_s / replay_s), 1, 1 << 20);
    int samples = clamp_count(limits->budget_s / replay_s, limits->samples_min, limits->samples_max);
    double *values = malloc((size_t)(warm_up > samples ? warm_up : samples) * sizeof *values);
    if (!values) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %d samples", samples);
    }
    status = device->backend->time(device, enqueue, arg, out->launches, warm_up, values);
    if (status == ACR_OK) {
        status = device->backend->time(device, enqueue, arg, out->launches, samples, values);
    }
    if (status == ACR_OK) {
        for (int i = 0; i < samples; ++i) {
            values[i] *= 1e6;
        }
        out->stats = stats_summarise(values, (size_t)samples);
    }
    free(values);
    return status;
}
