/* One timing job a device: whoever times takes the device's lock first, in whichever process. */
#ifndef WORKBENCH_DEVICE_LOCK_H
#define WORKBENCH_DEVICE_LOCK_H

#include <stdint.h>

#include "acromion.h"

/* Waits until nobody else holds it: a file in /tmp, whose lock the system takes back from whoever dies. *stop (may be
 * NULL) set to 2 ends the wait. Errors: ACR_IO when the file cannot be made, or the wait was ended. */
acr_status device_lock(int *out, const char *backend, int32_t ordinal, const volatile int *stop);
void device_unlock(int lock);

#endif
