/* Devices from wisdom keys, see wisdom_device.h. */
#include "wisdom_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

bool wisdom_device(acr__device *out, const char *device_key)
{
    char name[WISDOM_DEVICE_MAX], trait[WISDOM_DEVICE_MAX] = "";
    snprintf(name, sizeof name, "%s", device_key);
    *out = (acr__device){.backend = ACR__CPU};
    char *count = strrchr(name, '/');
    if (count) {
        *count++ = '\0';
        out->sm_count = out->threads = (int32_t)strtol(count, NULL, 10);
    }
    char *slash = strrchr(name, '/');
    if (slash) {
        *slash = '\0';
        snprintf(trait, sizeof trait, "%s", slash + 1);
    }
    snprintf(out->name, sizeof out->name, "%.*s", (int)sizeof out->name - 1, name);
    if (strncmp(trait, "sm", 2) == 0) {
        out->backend = ACR__CUDA;
        out->arch = (int32_t)strtol(trait + 2, NULL, 10);
    }
    for (int i = 0; i < ACR__ISA_COUNT; ++i) {
        out->isa |= strcmp(trait, acr__isas[i].name) == 0 ? acr__isas[i].bit : 0;
    }
    char again[WISDOM_DEVICE_MAX];
    acr__wisdom_device_key(out, again);
    return strcmp(again, device_key) == 0;
}
