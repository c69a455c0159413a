/* Loading the CUDA driver. */
#include "cuda/driver.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct entry {
    const char *name;
    int version;   /* CUDA version of the signature */
    size_t offset; /* of the function pointer in acr__cuda_driver */
} entry;

static const entry entries[] = {
#define ENTRY(name, version) {"cu" #name, version, offsetof(acr__cuda_driver, name)},
    ACR__CUDA_ENTRIES(ENTRY)
#undef ENTRY
};

/* Finds one entry and writes its address to *function, a function pointer of the right type. */
static acr_status find(PFN_cuGetProcAddress_v12000 get, const char *name, int version, void *function)
{
    void *address = NULL;
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    CUresult result = get(name, &address, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &found);
    if (result != CUDA_SUCCESS || found != CU_GET_PROC_ADDRESS_SUCCESS || address == NULL)
        return acr__fail(ACR_NO_DEVICE, "libcuda.so.1 lacks %s of CUDA %d.%d", name, version / 1000,
                         version % 1000 / 10);
    memcpy(function, &address, sizeof address);
    return ACR_OK;
}

static acr_status check_version(PFN_cuGetProcAddress_v12000 get, int *version)
{
    PFN_cuDriverGetVersion_v2020 driver_version;
    acr_status status = find(get, "cuDriverGetVersion", 2020, &driver_version);
    if (status != ACR_OK)
        return status;
    CUresult result = driver_version(version);
    if (result != CUDA_SUCCESS)
        return acr__fail(ACR_NO_DEVICE, "cuDriverGetVersion failed with error %d", (int)result);
    if (*version < ACR__CUDA_VERSION_MIN)
        return acr__fail(
            ACR_NO_DEVICE, "the NVIDIA driver supports CUDA %d.%d; CUDA %d.%d is needed (driver R580 or newer)",
            *version / 1000, *version % 1000 / 10, ACR__CUDA_VERSION_MIN / 1000, ACR__CUDA_VERSION_MIN % 1000 / 10);
    return ACR_OK;
}

int acr__cuda_ptx_forced(void)
{
    const char *wanted = getenv("ACR_FORCE_PTX");
    return wanted != NULL && strcmp(wanted, "") != 0 && strcmp(wanted, "0") != 0;
}

/* The driver's own switch, which it reads when it initialises: so this must come first in the process. Whether it came
 * in time, loading a kernel shows. */
static void force_ptx(void)
{
    if (acr__cuda_ptx_forced())
        setenv("CUDA_FORCE_PTX_JIT", "1", 1);
}

static acr_status find_entries(acr__cuda_driver *driver)
{
    PFN_cuGetProcAddress_v12000 get;
    void *address = dlsym(driver->handle, "cuGetProcAddress_v2");
    if (address == NULL)
        return acr__fail(
            ACR_NO_DEVICE,
            "libcuda.so.1 lacks cuGetProcAddress_v2: its driver is older than CUDA 12.0; CUDA %d.%d is needed",
            ACR__CUDA_VERSION_MIN / 1000, ACR__CUDA_VERSION_MIN % 1000 / 10);
    memcpy(&get, &address, sizeof get);
    acr_status status = check_version(get, &driver->version);
    for (size_t i = 0; i < sizeof entries / sizeof entries[0] && status == ACR_OK; i++)
        status = find(get, entries[i].name, entries[i].version, (char *)driver + entries[i].offset);
    if (status != ACR_OK)
        return status;
    force_ptx();
    CUresult result = driver->Init(0);
    return result == CUDA_SUCCESS ? ACR_OK : acr__cuda_fail(driver, result, ACR_NO_DEVICE, "cuInit");
}

acr_status acr__cuda_driver_open(acr__cuda_driver *driver)
{
    driver->handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (driver->handle == NULL) {
        const char *text = dlerror();
        return acr__fail(ACR_NO_DEVICE, "no CUDA driver: %s", text != NULL ? text : "dlopen gave no reason");
    }
    acr_status status = find_entries(driver);
    if (status != ACR_OK)
        acr__cuda_driver_close(driver);
    return status;
}

void acr__cuda_driver_close(acr__cuda_driver *driver)
{
    dlclose(driver->handle);
    driver->handle = NULL;
}

acr_status acr__cuda_fail(const acr__cuda_driver *driver, CUresult result, acr_status status, const char *what)
{
    const char *name = NULL, *text = NULL;
    if (driver->GetErrorName(result, &name) != CUDA_SUCCESS || name == NULL)
        name = "unknown error";
    if (driver->GetErrorString(result, &text) != CUDA_SUCCESS || text == NULL)
        text = "no description";
    return acr__fail(result == CUDA_ERROR_OUT_OF_MEMORY ? ACR_NO_MEMORY : status, "%s: %s (%d): %s", what, name,
                     (int)result, text);
}
