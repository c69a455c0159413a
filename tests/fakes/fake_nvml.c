/* The fake NVML: see fake_nvml.h. */
#include "fake_nvml.h"

#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    UNKNOWN_ERROR = 999,
    CLOCK_SM = 1
};

static struct {
    unsigned devices, sm_mhz, celsius, milliwatts, looks_left;
    int open, limited;
    unsigned long long reasons;
    char name[64], failing[48];
} fake = {1, 1980, 45, 300000, 0, 0, 0, 0, "NVIDIA H200", ""};

static int handles[8]; /* their addresses are the devices' handles */

EXPORT void fake_nvml_reset(void)
{
    const int open = fake.open;
    memset(&fake, 0, sizeof fake);
    fake.open = open;
    fake_nvml_set_devices(1, "NVIDIA H200");
    fake_nvml_set_state(1980, 45, 300000, 0);
}

EXPORT void fake_nvml_set_devices(unsigned count, const char *name)
{
    fake.devices = count;
    snprintf(fake.name, sizeof fake.name, "%s", name);
}

EXPORT void fake_nvml_set_state(unsigned sm_mhz, unsigned celsius, unsigned milliwatts, unsigned long long reasons)
{
    fake.sm_mhz = sm_mhz;
    fake.celsius = celsius;
    fake.milliwatts = milliwatts;
    fake.reasons = reasons;
}

EXPORT void fake_nvml_fail(const char *entry)
{
    snprintf(fake.failing, sizeof fake.failing, "%s", entry);
}

EXPORT void fake_nvml_reasons_for(unsigned looks)
{
    fake.limited = looks > 0;
    fake.looks_left = looks;
}

EXPORT int fake_nvml_open_count(void)
{
    return fake.open;
}

static int result_of(const char *entry)
{
    return strcmp(entry, fake.failing) == 0 ? UNKNOWN_ERROR : SUCCESS;
}

/* ---- What the workbench asks for ---- */

EXPORT int nvmlInit_v2(void);
EXPORT int nvmlShutdown(void);
EXPORT int nvmlDeviceGetCount_v2(unsigned *count);
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device);
EXPORT int nvmlDeviceGetName(void *device, char *name, unsigned length);

int nvmlInit_v2(void)
{
    fake.open += result_of("Init") == SUCCESS;
    return result_of("Init");
}

int nvmlShutdown(void)
{
    fake.open--;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = fake.devices;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    *device = &handles[index];
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length)
{
    (void)device;
    snprintf(name, length, "%s", fake.name);
    return SUCCESS;
}

#ifndef FAKE_NVML_BARE

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned length);
EXPORT int nvmlDeviceGetClockInfo(void *device, unsigned type, unsigned *mhz);
EXPORT int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *celsius);
EXPORT int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts);
EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons);
EXPORT int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules);

/* A number that the tests can tell: the power, as joules. */
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules)
{
    (void)device;
    *millijoules = 1000ull * fake.milliwatts;
    return result_of("DeviceGetTotalEnergyConsumption");
}

int nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    snprintf(version, length, "580.65.06");
    return result_of("SystemGetDriverVersion");
}

int nvmlDeviceGetClockInfo(void *device, unsigned type, unsigned *mhz)
{
    (void)device;
    if (type == CLOCK_SM && fake.limited && fake.looks_left > 0 && --fake.looks_left == 0)
        fake.reasons = 0;
    *mhz = type == CLOCK_SM ? fake.sm_mhz : 3201;
    return result_of("DeviceGetClockInfo");
}

int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *celsius)
{
    (void)device, (void)sensor;
    *celsius = fake.celsius;
    return result_of("DeviceGetTemperature");
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts)
{
    (void)device;
    *milliwatts = fake.milliwatts;
    return result_of("DeviceGetPowerUsage");
}

/* The older name: the newer one is not there, and must not be needed. */
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons)
{
    (void)device;
    *reasons = fake.reasons;
    return result_of("DeviceGetCurrentClocksThrottleReasons");
}

#endif
