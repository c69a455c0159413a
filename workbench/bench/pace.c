/* At which clock a kernel is timed, see pace.h. */
#include "pace.h"

#include <math.h>
#include <time.h>

#include "base/progress.h"
#include "internal.h"

double pace_joules(const pace_energy *energy)
{
    return energy->launches > 0 ? energy->joules / energy->launches : NAN;
}

static void pause_for(double seconds)
{
    struct timespec left = {(time_t)seconds, (long)(fmod(seconds, 1) * 1e9)};
    while (nanosleep(&left, &left) != 0)
        ;
}

/* Keeps the kernel running, without the gap that waiting for each replay would leave. The counter of the card is
 * coarse: what one warming up says is off by milliseconds, what all of a series say together is not. */
static acr_status warm_up(const pace_request *r)
{
    enum {
        AT_ONCE = 16
    };
    double ignored[AT_ONCE], before, after;
    const double start_s = monotonic_s();
    const bool known = r->energy && gpu_monitor_energy(r->monitor, &before);
    int taken = 0;
    acr_status status = ACR_OK;
    while (status == ACR_OK && monotonic_s() - start_s < PACE_WARM_UP_S) {
        status = r->take(r->arg, AT_ONCE, ignored);
        taken += AT_ONCE;
    }
    if (status == ACR_OK && known && gpu_monitor_energy(r->monitor, &after)) {
        r->energy->joules += after - before;
        r->energy->launches += (double)taken * r->launches;
    }
    return status;
}

static acr_status take_sustained(const pace_request *r, int count, double *seconds)
{
    const acr_status status = warm_up(r);
    return status == ACR_OK ? r->take(r->arg, count, seconds) : status;
}

/* *replay_s: of the sample before; one that takes longer than the start needs none. */
static acr_status take_after_pause(const pace_request *r, double *seconds, double *replay_s)
{
    double ignored;
    acr_status status = r->device->backend->synchronize(r->device);
    pause_for(PACE_PAUSE_S);
    const double start_s = monotonic_s();
    if (*replay_s < PACE_START_S) {
        do {
            status = status == ACR_OK ? r->take(r->arg, 1, &ignored) : status;
        } while (status == ACR_OK && monotonic_s() - start_s < PACE_START_S);
    }
    if (status == ACR_OK) {
        status = r->take(r->arg, 1, seconds);
        *replay_s = *seconds * r->launches;
    }
    return status;
}

acr_status pace_samples(const pace_request *request, bench_mode mode, int count, double *seconds)
{
    if (request->device->device.backend != ACR__CUDA) {
        return acr__fail(ACR_UNSUPPORTED, "%s mode: it is about a GPU's clock, and this is a CPU", mode_name(mode));
    }
    if (mode == MODE_SUSTAINED) {
        return take_sustained(request, count, seconds);
    }
    acr_status status = ACR_OK;
    double replay_s = 0;
    for (int i = 0; i < count && status == ACR_OK; ++i) {
        status = take_after_pause(request, &seconds[i], &replay_s);
    }
    return status;
}
