/* What a bare cuLaunchKernelEx costs the host: the measure of everything that a binding adds. A shared library for
 * tools/gpu_python.py; built with any C compiler, without CUDA's headers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

/* The driver's launch description, as cuda.h of CUDA 12 and 13 has it. */
typedef struct launch_config {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    void *attributes;
    unsigned attribute_count;
} launch_config;

typedef int load_data(void **module, const void *image);
typedef int get_function(void **function, void *module, const char *name);
typedef int launch(const launch_config *config, void *function, void **parameters, void **extra);

enum {
    PARAMETER_BYTES = 640 /* about what a kernel of the library gets: arguments and four tensor maps */
};

static const char empty_kernel[] = ".version 7.0\n.target sm_80\n.address_size 64\n"
                                   ".visible .entry empty(.param .align 64 .b8 parameter[640]) { ret; }\n";

static launch *launch_function;
static void *kernel;

double launch_cost_us(void *stream, int count);
int launch_cost_setup(void);

/* Loads an empty kernel into the current context. Returns the driver's error, -1 without a driver. */
int launch_cost_setup(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    void *entries[3] = {NULL, NULL, NULL}, *module = NULL;
    static const char *const names[] = {"cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernelEx"};
    for (int i = 0; i < 3; i++)
        if (!driver || !(entries[i] = dlsym(driver, names[i])))
            return -1;
    load_data *load;
    get_function *get;
    memcpy(&load, &entries[0], sizeof load); /* ISO C has no cast from an object pointer to a function's */
    memcpy(&get, &entries[1], sizeof get);
    memcpy(&launch_function, &entries[2], sizeof launch_function);
    const int result = load(&module, empty_kernel);
    return result ? result : get(&kernel, module, "empty");
}

/* Microseconds of host time a launch takes, over `count` in a row; negative: a launch failed. */
double launch_cost_us(void *stream, int count)
{
    static char parameter[PARAMETER_BYTES];
    void *parameters[] = {parameter};
    const launch_config config = {{128, 1, 1}, {384, 1, 1}, 0, stream, NULL, 0};
    struct timespec first, end;
    int failed = 0;
    clock_gettime(CLOCK_MONOTONIC, &first);
    for (int i = 0; i < count; i++)
        failed |= launch_function(&config, kernel, parameters, NULL);
    clock_gettime(CLOCK_MONOTONIC, &end);
    const double elapsed_us = (double)(end.tv_sec - first.tv_sec) * 1e6 + (double)(end.tv_nsec - first.tv_nsec) * 1e-3;
    return failed ? -1 : elapsed_us / count;
}
