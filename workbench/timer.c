/* Measuring, see timer.h. */
#include "timer.h"

#include <math.h>
#include <stdlib.h>

enum {
    LAUNCHES_MAX = 4000
};

acr_status timer_record_work(acr__graph **out, void *work, int launches)
{
    const timer_work *w = work;
    return w->device->backend->graph_record(out, w->device, w->enqueue, w->arg, launches);
}

/* A lone launch carries the start of its replay, so the estimate is refined with the count it led to. */
acr_status timer_fill(acr__graph **out, double *launch_s, timer_record *record, void *arg, double stretch_s)
{
    enum {
        ROUNDS = 3,
        PROBES = 3
    };
    int launches = 1;
    for (int round = 0;; ++round) {
        acr__graph *graph = NULL;
        double probe[PROBES];
        acr_status status = record(&graph, arg, launches);
        if (status != ACR_OK) {
            return status;
        }
        const acr__backend *backend = graph->device->backend;
        status = backend->graph_time(graph, PROBES, probe);
        if (status != ACR_OK) {
            backend->graph_free(graph);
            return status;
        }
        *launch_s = fmax(fmin(probe[0], fmin(probe[1], probe[2])), 1e-9);
        double wanted = fmin(ceil(stretch_s / *launch_s), LAUNCHES_MAX);
        if (wanted <= launches || round == ROUNDS - 1) {
            *out = graph;
            return ACR_OK;
        }
        backend->graph_free(graph); /* first: a peer's next recording reuses its memory */
        launches = (int)wanted;
    }
}

static int clamp_count(double count, int min, int max)
{
    return count < min ? min : count > max ? max : (int)count;
}

static acr_status sample_graph(timing *out, acr__graph *graph, double launch_s, const timer_limits *limits)
{
    const acr__backend *backend = graph->device->backend;
    double replay_s = launch_s * graph->launches;
    int warm_up = clamp_count(ceil(limits->warm_up_s / replay_s), 1, 1 << 20);
    int samples = clamp_count(limits->budget_s / replay_s, limits->samples_min, limits->samples_max);
    double *values = malloc((size_t)(warm_up > samples ? warm_up : samples) * sizeof *values);
    if (!values) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %d samples", samples);
    }
    acr_status status = backend->graph_time(graph, warm_up, values);
    if (status == ACR_OK) {
        status = backend->graph_time(graph, samples, values);
    }
    if (status == ACR_OK) {
        for (int i = 0; i < samples; ++i) {
            values[i] *= 1e6;
        }
        out->launches = graph->launches;
        out->stats = stats_summarise(values, (size_t)samples);
    }
    free(values);
    return status;
}

acr_status timer_stream(timing *out, acr__backend_device *device, acr__enqueue *enqueue, void *arg,
                        const timer_limits *limits)
{
    double launch_s = 0;
    acr__graph *graph = NULL;
    timer_work work = {device, enqueue, arg};
    acr_status status = timer_fill(&graph, &launch_s, timer_record_work, &work, limits->stretch_s);
    if (status == ACR_OK) {
        status = sample_graph(out, graph, launch_s, limits);
    }
    device->backend->graph_free(graph);
    return status;
}
