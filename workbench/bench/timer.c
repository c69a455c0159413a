/* Taking times, see timer.h. */
#include "timer.h"

#include <math.h>
#include <stdlib.h>

#include "base/progress.h"

/* A lone launch carries the start of its replay, so the estimate is refined with the count it led to. */
acr_status timer_fill(acr__graph **out, double *launch_s, timer_record *record, void *arg, double stretch_s,
                      int granule)
{
    enum {
        ROUNDS = 3,
        PROBES = 3
    };
    int launches = granule;
    for (int round = 0;; ++round) {
        acr__graph *graph = NULL;
        double probe[PROBES];
        acr_status status = record(&graph, arg, launches);
        if (status != ACR_OK) {
            return status;
        }
        const acr__backend *backend = graph->device->backend;
        status = backend->timing->graph_time(graph, PROBES, probe);
        if (status != ACR_OK) {
            backend->timing->graph_free(graph);
            return status;
        }
        *launch_s = fmax(fmin(probe[0], fmin(probe[1], probe[2])), 1e-9);
        double rounds_of_granule =
            fmin(ceil(stretch_s / *launch_s / granule), floor((double)TIMER_LAUNCHES_MAX / granule));
        int wanted = (int)rounds_of_granule * granule;
        if (wanted <= launches || round == ROUNDS - 1) {
            *out = graph;
            return ACR_OK;
        }
        backend->timing->graph_free(graph); /* first: a peer's next recording reuses its memory */
        launches = wanted;
    }
}

acr_status timer_calls(acr__backend_device *device, acr__enqueue *enqueue, void *arg, int calls, double *seconds)
{
    acr_status status = device->backend->synchronize(device);
    double start_s = monotonic_s();
    for (int i = 0; i < calls && status == ACR_OK; ++i) {
        status = enqueue(arg, NULL);
    }
    acr_status ended = device->backend->synchronize(device); /* also after a failure */
    *seconds = (monotonic_s() - start_s) / calls;
    return status == ACR_OK ? ended : status;
}

static acr_status enqueue_nothing(void *arg, void *stream)
{
    (void)arg;
    (void)stream;
    return ACR_OK;
}

acr_status timer_empty_cold(acr__backend_device *device, double *seconds)
{
    enum {
        SAMPLES = 16
    };
    double samples[SAMPLES];
    acr__graph *graph = NULL;
    acr_status status = device->backend->timing->graph_record(&graph, device, enqueue_nothing, NULL, 1);
    if (status == ACR_OK) {
        status = device->backend->timing->graph_time_cold(graph, SAMPLES, samples);
    }
    device->backend->timing->graph_free(graph);
    *seconds = stats_percentile(samples, SAMPLES, 0.5);
    return status;
}

/* Repeats single samples for a while; *sample_s becomes the mean time of taking one. */
static acr_status warm_up(interleave_sample *sample, void *arg, double seconds, double *sample_s)
{
    double start_s = monotonic_s(), ignored;
    int taken = 0;
    acr_status status = ACR_OK;
    do {
        status = sample(arg, 1, &ignored);
        ++taken;
        *sample_s = (monotonic_s() - start_s) / taken;
    } while (status == ACR_OK && *sample_s * taken < seconds);
    return status;
}

/* How many blocks the limits allow when a sample takes so long. */
static int blocks_wanted(const timer_limits *limits, double sample_s)
{
    double samples = fmin(fmax(limits->budget_s / fmax(sample_s, 1e-9), limits->samples_min), limits->samples_max);
    return (int)ceil(samples / INTERLEAVE_BLOCK_SAMPLES);
}

static acr_status sample_blocks(timing *out, double *values, int wanted, interleave_sample *sample, void *arg,
                                watch *watched)
{
    int blocks = 0;
    out->discarded = 0;
    while (blocks < wanted) {
        double *block = values + (size_t)blocks * INTERLEAVE_BLOCK_SAMPLES;
        bool disturbed = watch_disturbed(watched);
        acr_status status = sample(arg, INTERLEAVE_BLOCK_SAMPLES, block);
        if (status != ACR_OK) {
            return status;
        }
        disturbed = watch_disturbed(watched) || disturbed;
        *(disturbed ? &out->discarded : &blocks) += 1;
        if (out->discarded > wanted) {
            return acr__fail(ACR_DEVICE_FAULT, "%d blocks were discarded: the GPU stays throttled", out->discarded);
        }
    }
    return ACR_OK;
}

acr_status timer_series(timing *out, interleave_sample *sample, void *arg, const timer_limits *limits, watch *watched)
{
    double sample_s = 0;
    acr_status status = warm_up(sample, arg, limits->warm_up_s, &sample_s);
    if (status != ACR_OK) {
        return status;
    }
    int blocks = blocks_wanted(limits, sample_s);
    size_t count = (size_t)blocks * INTERLEAVE_BLOCK_SAMPLES;
    double *values = malloc(count * sizeof *values);
    if (!values) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %zu samples", count);
    }
    status = sample_blocks(out, values, blocks, sample, arg, watched);
    if (status == ACR_OK) {
        for (size_t i = 0; i < count; ++i) {
            values[i] *= 1e6;
        }
        out->stats = stats_summarise(values, count);
    }
    free(values);
    return status;
}
