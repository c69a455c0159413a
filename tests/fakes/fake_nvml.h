/* A fake NVML for tests: a libnvidia-ml.so.1 with GPUs whose state a test sets. Linked to a test, it is what the
 * workbench's dlopen finds. Built with FAKE_NVML_BARE it lacks every entry that the workbench can go without. */
#ifndef FAKE_NVML_H
#define FAKE_NVML_H

/* One GPU "NVIDIA H200" at 1980 and 3201 MHz, 45 C, 300 W, without a reason to be slow. */
void fake_nvml_reset(void);

void fake_nvml_set_devices(unsigned count, const char *name);
void fake_nvml_set_state(unsigned sm_mhz, unsigned celsius, unsigned milliwatts, unsigned long long reasons);

/* The entry of this name (without nvml) returns an error until reset. */
void fake_nvml_fail(const char *entry);

/* The reasons hold for the next so many looks only (each begins by reading the SM clock); 0 = for all. */
void fake_nvml_reasons_for(unsigned looks);

/* Initialised and not shut down. */
int fake_nvml_open_count(void);

#endif
