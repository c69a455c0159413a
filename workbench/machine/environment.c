/* The conditions of a measurement, see environment.h. */
#include "environment.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "build_info.h"
#include "nvml.h"

void driver_text(char *out, size_t capacity, const acr__device *device)
{
    if (device->backend != ACR__CUDA) {
        snprintf(out, capacity, "none");
        return;
    }
    if (!nvml_driver_version(out, capacity)) {
        snprintf(out, capacity, "CUDA %d.%d", device->driver / 1000, device->driver % 1000 / 10);
    }
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
