/* NVML by dlopen, see nvml.h. */
#include "nvml.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* The few entries that are used, declared here so that NVML's header is not needed. Those after device_name may be
 * NULL. */
typedef struct nvmlDevice_st *nvml_device;

typedef struct nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*device_count)(unsigned *count);
    int (*device_by_index)(unsigned index, nvml_device *device);
    int (*device_name)(nvml_device device, char *name, unsigned length);
    int (*driver_version)(char *version, unsigned length);
    int (*clock)(nvml_device device, unsigned type, unsigned *mhz);
    int (*temperature)(nvml_device device, unsigned sensor, unsigned *celsius);
    int (*power)(nvml_device device, unsigned *milliwatts);
    int (*reasons)(nvml_device device, unsigned long long *reasons);
    int (*energy)(nvml_device device, unsigned long long *millijoules);
} nvml;

enum {
    NVML_CLOCK_SM = 1,
    NVML_CLOCK_MEMORY = 2,
    NVML_SENSOR_GPU = 0
};

struct gpu_monitor {
    nvml nvml;
    nvml_device gpu;
};

const char *gpu_reason_name(uint64_t reason)
{
    static const char *const names[] = {
        "idle",        "application clocks",       "power cap",   "hardware slowdown", "sync boost",
        "temperature", "temperature, by hardware", "power brake", "display clocks"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
        if (reason == (uint64_t)1 << i) {
            return names[i];
        }
    }
    return NULL;
}

/* Finds the entries; false when one that nothing goes without is missing. */
static bool find_entries(nvml *n)
{
    const struct {
        const char *name, *older; /* what earlier releases call it, or NULL */
        void *entry;
        bool needed;
    } entries[] = {
        {"nvmlInit_v2", NULL, &n->init, true},
        {"nvmlShutdown", NULL, &n->shutdown, true},
        {"nvmlDeviceGetCount_v2", NULL, &n->device_count, true},
        {"nvmlDeviceGetHandleByIndex_v2", NULL, &n->device_by_index, true},
        {"nvmlDeviceGetName", NULL, &n->device_name, true},
        {"nvmlSystemGetDriverVersion", NULL, &n->driver_version, false},
        {"nvmlDeviceGetClockInfo", NULL, &n->clock, false},
        {"nvmlDeviceGetTemperature", NULL, &n->temperature, false},
        {"nvmlDeviceGetPowerUsage", NULL, &n->power, false},
        {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons", &n->reasons, false},
        {"nvmlDeviceGetTotalEnergyConsumption", NULL, &n->energy, false},
    };
    bool complete = true;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; ++i) {
        void *symbol = dlsym(n->library, entries[i].name);
        if (!symbol && entries[i].older) {
            symbol = dlsym(n->library, entries[i].older);
        }
        complete = complete && (symbol || !entries[i].needed);
        memcpy(entries[i].entry, &symbol, sizeof symbol); /* ISO C has no cast from void * to a function pointer */
    }
    return complete;
}

static bool nvml_open(nvml *n)
{
    *n = (nvml){.library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)};
    if (!n->library) {
        return false;
    }
    if (find_entries(n) && n->init() == 0) {
        return true;
    }
    dlclose(n->library);
    return false;
}

static void nvml_close(nvml *n)
{
    n->shutdown();
    dlclose(n->library);
}

/* NVML counts all GPUs in bus order, CUDA the visible ones in its own: the one with the device's name is it when there
 * is only one such, else the one at the ordinal if its name agrees and nothing is hidden. */
static bool nvml_find(const nvml *n, const acr__device *device, int32_t ordinal, nvml_device *out)
{
    unsigned count = 0, matches = 0;
    bool at_ordinal = false;
    n->device_count(&count);
    for (unsigned i = 0; i < count; ++i) {
        nvml_device candidate;
        char name[96] = "";
        if (n->device_by_index(i, &candidate) != 0 || n->device_name(candidate, name, sizeof name) != 0 ||
            strcmp(name, device->name) != 0) {
            continue;
        }
        ++matches;
        if (!at_ordinal) {
            *out = candidate;
            at_ordinal = i == (unsigned)ordinal;
        }
    }
    return matches == 1 || (at_ordinal && !getenv("CUDA_VISIBLE_DEVICES"));
}

gpu_monitor *gpu_monitor_open(const acr__device *device, int32_t ordinal)
{
    gpu_monitor *m = device->backend == ACR__CUDA ? calloc(1, sizeof *m) : NULL;
    if (!m || !nvml_open(&m->nvml)) {
        free(m);
        return NULL;
    }
    if (!nvml_find(&m->nvml, device, ordinal, &m->gpu)) {
        gpu_monitor_close(m);
        return NULL;
    }
    return m;
}

void gpu_monitor_close(gpu_monitor *monitor)
{
    if (monitor) {
        nvml_close(&monitor->nvml);
        free(monitor);
    }
}

void gpu_monitor_read(const gpu_monitor *monitor, gpu_state *out)
{
    *out = (gpu_state){.known = 0};
    if (!monitor) {
        return;
    }
    const nvml *n = &monitor->nvml;
    unsigned long long reasons = 0;
    out->known |= n->clock && n->clock(monitor->gpu, NVML_CLOCK_SM, &out->sm_mhz) == 0 ? GPU_SM_MHZ : 0;
    out->known |= n->clock && n->clock(monitor->gpu, NVML_CLOCK_MEMORY, &out->memory_mhz) == 0 ? GPU_MEMORY_MHZ : 0;
    out->known |=
        n->temperature && n->temperature(monitor->gpu, NVML_SENSOR_GPU, &out->temperature_c) == 0 ? GPU_TEMPERATURE : 0;
    out->known |= n->power && n->power(monitor->gpu, &out->power_mw) == 0 ? GPU_POWER : 0;
    out->known |= n->reasons && n->reasons(monitor->gpu, &reasons) == 0 ? GPU_REASONS : 0;
    out->reasons = reasons;
}

bool gpu_monitor_energy(const gpu_monitor *monitor, double *joules)
{
    unsigned long long millijoules = 0;
    if (!monitor || !monitor->nvml.energy || monitor->nvml.energy(monitor->gpu, &millijoules) != 0) {
        return false;
    }
    *joules = (double)millijoules / 1e3;
    return true;
}

bool gpu_state_throttled(const gpu_state *state, double nominal_hz)
{
    static const double THROTTLED_SHARE = 0.75;
    const uint64_t faults = GPU_HW_SLOWDOWN | GPU_SW_THERMAL | GPU_HW_THERMAL | GPU_POWER_BRAKE;
    if (state->known & GPU_REASONS && state->reasons & faults) {
        return true;
    }
    const bool explained = state->known & GPU_REASONS && state->reasons & (GPU_IDLE | GPU_POWER_CAP);
    return !explained && state->known & GPU_SM_MHZ && state->sm_mhz < THROTTLED_SHARE * nominal_hz / 1e6;
}

bool nvml_driver_version(char *out, size_t capacity)
{
    nvml n;
    if (!nvml_open(&n)) {
        return false;
    }
    const bool known = n.driver_version && n.driver_version(out, (unsigned)capacity) == 0;
    nvml_close(&n);
    return known;
}
