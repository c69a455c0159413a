/* The conditions of a measurement, see environment.h. NVML is opened with dlopen and may be missing. */
#include "environment.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "build_info.h"

/* ---- NVML: the few entries that are used, declared here so that its header is not needed ---- */

typedef struct nvmlDevice_st *nvml_device;

typedef struct nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*driver_version)(char *version, unsigned length);
    int (*device_count)(unsigned *count);
    int (*device_by_index)(unsigned index, nvml_device *device);
    int (*device_name)(nvml_device device, char *name, unsigned length);
    int (*clock)(nvml_device device, unsigned type, unsigned *mhz);
    int (*temperature)(nvml_device device, unsigned sensor, unsigned *celsius);
    int (*power)(nvml_device device, unsigned *milliwatts);
} nvml;

enum {
    NVML_CLOCK_SM = 1,
    NVML_CLOCK_MEMORY = 2,
    NVML_SENSOR_GPU = 0
};

static bool nvml_open(nvml *n)
{
    *n = (nvml){.library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)};
    if (!n->library) {
        return false;
    }
    const struct {
        const char *name;
        void *entry;
    } entries[] = {
        {"nvmlInit_v2", &n->init},
        {"nvmlShutdown", &n->shutdown},
        {"nvmlSystemGetDriverVersion", &n->driver_version},
        {"nvmlDeviceGetCount_v2", &n->device_count},
        {"nvmlDeviceGetHandleByIndex_v2", &n->device_by_index},
        {"nvmlDeviceGetName", &n->device_name},
        {"nvmlDeviceGetClockInfo", &n->clock},
        {"nvmlDeviceGetTemperature", &n->temperature},
        {"nvmlDeviceGetPowerUsage", &n->power},
    };
    bool complete = true;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; ++i) {
        void *symbol = dlsym(n->library, entries[i].name);
        complete = complete && symbol;
        memcpy(entries[i].entry, &symbol, sizeof symbol); /* ISO C has no cast from void * to a function pointer */
    }
    if (complete && n->init() == 0) {
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

void gpu_state_read(gpu_state *out, const acr__device *device, int32_t ordinal)
{
    *out = (gpu_state){.known = false};
    nvml n;
    if (device->backend != ACR__CUDA || !nvml_open(&n)) {
        return;
    }
    nvml_device gpu = NULL;
    if (nvml_find(&n, device, ordinal, &gpu)) {
        out->known =
            n.clock(gpu, NVML_CLOCK_SM, &out->sm_mhz) == 0 && n.clock(gpu, NVML_CLOCK_MEMORY, &out->memory_mhz) == 0;
        n.temperature(gpu, NVML_SENSOR_GPU, &out->temperature_c);
        n.power(gpu, &out->power_mw);
    }
    nvml_close(&n);
}

struct gpu_monitor {
    nvml nvml;
    nvml_device gpu;
    double throttled_mhz;
};

gpu_monitor *gpu_monitor_open(const acr__device *device, int32_t ordinal)
{
    static const double THROTTLED_SHARE = 0.75;
    gpu_monitor *m = device->backend == ACR__CUDA ? calloc(1, sizeof *m) : NULL;
    if (!m || !nvml_open(&m->nvml)) {
        free(m);
        return NULL;
    }
    if (!nvml_find(&m->nvml, device, ordinal, &m->gpu)) {
        gpu_monitor_close(m);
        return NULL;
    }
    m->throttled_mhz = THROTTLED_SHARE * device->clock_hz / 1e6;
    return m;
}

void gpu_monitor_close(gpu_monitor *monitor)
{
    if (monitor) {
        nvml_close(&monitor->nvml);
        free(monitor);
    }
}

bool gpu_monitor_throttled(void *arg)
{
    const gpu_monitor *m = arg;
    unsigned mhz = 0;
    return m && m->nvml.clock(m->gpu, NVML_CLOCK_SM, &mhz) == 0 && mhz < m->throttled_mhz;
}

void driver_text(char *out, size_t capacity, const acr__device *device)
{
    if (device->backend != ACR__CUDA) {
        snprintf(out, capacity, "none");
        return;
    }
    char version[64];
    nvml n;
    bool known = false;
    if (nvml_open(&n)) {
        known = n.driver_version(version, sizeof version) == 0;
        nvml_close(&n);
    }
    if (known) {
        snprintf(out, capacity, "%s", version);
    } else {
        snprintf(out, capacity, "CUDA %d.%d", device->driver / 1000, device->driver % 1000 / 10);
    }
}

/* ---- The rest ---- */

static json_t *state_json(const gpu_state *state)
{
    if (!state->known) {
        return json_null();
    }
    return json_pack("{s:i, s:i, s:i, s:f}", "sm_mhz", (int)state->sm_mhz, "memory_mhz", (int)state->memory_mhz,
                     "temperature_c", (int)state->temperature_c, "power_w", state->power_mw / 1000.0);
}

json_t *clocks_json(const acr__device *device, const gpu_state *before, const gpu_state *after)
{
    return json_pack("{s:f, s:o, s:o}", "nominal_mhz", device->clock_hz / 1e6, "before", state_json(before), "after",
                     state_json(after));
}

/* The first processor's "model name"; some architectures have none. */
static void processor_name(char *out, size_t capacity)
{
    snprintf(out, capacity, "unnamed processor");
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (!file) {
        return;
    }
    char line[256];
    while (fgets(line, sizeof line, file)) {
        const char *value = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && value && value[1]) {
            snprintf(out, capacity, "%.*s", (int)strcspn(value + 2, "\n"), value + 2);
            break;
        }
    }
    fclose(file);
}

void host_text(char *out, size_t capacity)
{
    char name[128];
    processor_name(name, sizeof name);
    cpu_set_t set;
    int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    snprintf(out, capacity, "%s, %d threads", name, count);
}

void date_text(char out[24])
{
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(out, 24, "%Y-%m-%dT%H:%M:%SZ", &utc);
}

void environment_add(json_t *record, const acr__device *device)
{
    char driver[64], host[192], date[24];
    driver_text(driver, sizeof driver, device);
    host_text(host, sizeof host);
    date_text(date);
    json_object_set_new(record, "device", json_string(device->name));
    json_object_set_new(record, "driver", json_string(driver));
    json_object_set_new(record, "host", json_string(host));
    json_object_set_new(record, "library", json_string(acr_version()));
    json_object_set_new(record, "git_sha", json_string(BUILD_GIT_SHA));
    json_object_set_new(record, "dirty", json_boolean(BUILD_GIT_DIRTY));
    json_object_set_new(record, "date", json_string(date));
}
