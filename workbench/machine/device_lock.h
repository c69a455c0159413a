/* One timing job a device: whoever times takes the device's lock first, in whichever process. */
#ifndef WORKBENCH_DEVICE_LOCK_H
#define WORKBENCH_DEVICE_LOCK_H

#include <stdint.h>

#include "acromion.h"

/* Waits until nobody else holds it: a file in /tmp, whose lock the system takes back from whoever dies. *stop (may be
 * NULL) set to 2 ends the wait. Errors: ACR_IO when the file cannot be made, or the wait was ended. */
acr_status device_lock(int *out, const char *backend, int32_t ordinal, const volatile int *stop);

/* Beside others that share it, for work that is not timed; nobody times meanwhile. Then alone with it, once all others
 * have left it: whoever asks for that is no longer among those that share it while it waits. Both wait as long as it
 * takes. Errors: ACR_IO. */
acr_status device_share(int *out, const char *backend, int32_t ordinal);
acr_status device_take(int lock);
void device_unlock(int lock);

#endif
