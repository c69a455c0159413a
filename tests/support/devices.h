/* Devices that need not exist here, for tests of planning. */
#ifndef ACR_TESTS_DEVICES_H
#define ACR_TESTS_DEVICES_H

#include "kernel.h"

typedef struct named_device {
    const char *label;
    acr__device device;
} named_device;

enum {
    TEST_DEVICES = 8
};
extern const named_device test_devices[TEST_DEVICES];

#endif
