/* Closing the shared library while a context lives: unit_dlclose LIBRARY. The context's threads go on running its
 * code. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "acromion.h"

int main(int argc, char **argv)
{
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) {
        fprintf(stderr, "unit_dlclose: %s\n", argc == 2 ? dlerror() : "wants the library's path");
        return 1;
    }
    acr_status (*create)(acr_ctx **, const acr_ctx_options *);
    void *symbol = dlsym(library, "acr_ctx_create");
    memcpy(&create, &symbol, sizeof create);
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cpu";
    options.threads = 4;
    acr_ctx *ctx;
    if (!symbol || create(&ctx, &options) != ACR_OK || dlclose(library) != 0)
        return 1;
    usleep(50 * 1000); /* spinning workers go to sleep meanwhile, in the library's code */
    return 0;
}
