/* The state of a GPU, from NVML: clocks, temperature, power, and what holds the clock down. The library is opened with
 * dlopen and may be missing, whole or in parts: every field says whether it is known. */
#ifndef WORKBENCH_NVML_H
#define WORKBENCH_NVML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "internal.h"

/* The fields of a state, as bits of gpu_state.known. */
enum {
    GPU_SM_MHZ = 1u << 0,
    GPU_MEMORY_MHZ = 1u << 1,
    GPU_TEMPERATURE = 1u << 2,
    GPU_POWER = 1u << 3,
    GPU_REASONS = 1u << 4
};

/* Why the clock is not at its highest, as NVML numbers the reasons. */
enum {
    GPU_IDLE = 1u << 0,
    GPU_APPLICATION_CLOCKS = 1u << 1,
    GPU_POWER_CAP = 1u << 2, /* by software: the ordinary limit of a card under full load */
    GPU_HW_SLOWDOWN = 1u << 3,
    GPU_SYNC_BOOST = 1u << 4,
    GPU_SW_THERMAL = 1u << 5,
    GPU_HW_THERMAL = 1u << 6,
    GPU_POWER_BRAKE = 1u << 7, /* by hardware, from outside the card */
    GPU_DISPLAY_CLOCKS = 1u << 8
};

typedef struct gpu_state {
    unsigned known; /* which of the following are */
    unsigned sm_mhz, memory_mhz, temperature_c, power_mw;
    uint64_t reasons;
} gpu_state;

/* The name of one reason: "power cap"; NULL for a bit that has none. */
const char *gpu_reason_name(uint64_t reason);

/* NVML held open for one GPU. */
typedef struct gpu_monitor gpu_monitor;

/* NULL where there is no NVML, no GPU, not the one that the device is, or no memory. Close with gpu_monitor_close (NULL
 * is a no-op). */
gpu_monitor *gpu_monitor_open(const acr__device *device, int32_t ordinal);
void gpu_monitor_close(gpu_monitor *monitor);

/* The state now. A NULL monitor knows nothing. */
void gpu_monitor_read(const gpu_monitor *monitor, gpu_state *out);

/* Joules that the whole card has taken since some moment, a counter of steps of milliseconds. Returns false where it is
 * not known. */
bool gpu_monitor_energy(const gpu_monitor *monitor, double *joules);

/* Whether a state says that times taken in it are not those of this GPU: the hardware or the temperature holds the
 * clock down, or it is below 75 % of nominal for no reason that NVML names. The power cap is no fault, however low it
 * holds the clock: that is how this GPU runs this kernel. */
bool gpu_state_throttled(const gpu_state *state, double nominal_hz);

/* The driver's version as its vendor writes it ("580.65.06"). Returns false where NVML does not tell. */
bool nvml_driver_version(char *out, size_t capacity);

#endif
