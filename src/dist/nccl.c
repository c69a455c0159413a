/* Loading NCCL. */
#include "nccl.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#include "error.h"

typedef struct entry {
    const char *name;
    size_t offset; /* of the function pointer in dist_nccl */
} entry;

static const entry entries[] = {{"ncclGetLastError", offsetof(dist_nccl, GetLastError)},
#define ENTRY(name, arguments) {"nccl" #name, offsetof(dist_nccl, name)},
                                NCCL_ENTRIES(ENTRY)
#undef ENTRY
};

acr_status dist_nccl_open(dist_nccl *nccl, const char *library)
{
    const char *name = library ? library : "libnccl.so.2";
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!handle) {
        const char *text = dlerror();
        return dist_fail(ACR_NO_DEVICE, "no NCCL: %s", text ? text : "dlopen gave no reason");
    }
    acr_status status = ACR_OK;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0] && status == ACR_OK; i++) {
        void *address = dlsym(handle, entries[i].name);
        memcpy((char *)nccl + entries[i].offset, &address, sizeof address);
        if (!address)
            status = dist_fail(ACR_NO_DEVICE, "%s lacks %s", name, entries[i].name);
    }
    if (status == ACR_OK && (nccl->GetVersion(&nccl->version) != NCCL_SUCCESS || nccl->version < NCCL_VERSION_MIN))
        status = dist_fail(ACR_NO_DEVICE, "%s is version %d; %d (2.18) or newer is needed", name, nccl->version,
                           NCCL_VERSION_MIN);
    dlclose(handle); /* loaded for ever all the same */
    return status;
}

const char *dist_nccl_text(nccl_result result)
{
    static const char *const texts[] = {"no error",           "a CUDA call failed",   "a system call failed",
                                        "internal error",     "an argument is wrong", "calls do not fit each other",
                                        "another rank ended", "in progress"};
    return (unsigned)result < sizeof texts / sizeof texts[0] ? texts[result] : "unknown error";
}

acr_status dist_nccl_status(nccl_result result)
{
    return result == NCCL_REMOTE_ERROR || result == NCCL_INVALID_USAGE ? ACR_PEER : ACR_DEVICE_FAULT;
}
