/* acromion variant: compiles listed kernels with other parameters, for `bench --variant` and `check --variant` on
 * another machine or another day. Needs no GPU. */
#include <stdio.h>
#include <string.h>

#include "base/exit_code.h"
#include "base/options.h"
#include "commands.h"
#include "machine/gpus.h"
#include "search/variant.h"

static const option_spec options[OPTIONS_MAX] = {
    {'o', "output", "FOLDER", "that receives a folder for each variant; it exists"},
    {'g', "gpu", "NAME", "for this GPU; default h200 (`acromion roofline --gpu help` lists them)"},
};

typedef struct request {
    const char *output;
    const gpu_model *gpu;
} request;

static const option_field fields[] = {{'o', OPTION_TEXT, offsetof(request, output)}, {0}};

static const command_spec spec = {
    .usage = "variant KERNEL:NAME=VALUE,... [...]",
    .examples = "  acromion variant -o variants fwd_short_f16_d64_128x64_s6_ring_sm90a:LAG=200\n"
                "  acromion bench --variant variants b1:h16:s1024:d64\n"
                "  acromion bench --variant fwd_short_f16_d64_128x64_s6_ring_sm90a:LAG=200 b1:h16:s1024:d64\n",
    .about =
        "Compiles kernels of kernels.def with other parameters, and says what each takes: an experiment's kernels, "
        "which no plan\n"
        "ever takes. `bench --variant` and `check --variant` run them, or compile them themselves. Needs the "
        "sources, a C compiler\n"
        "and nvcc. A variant that does not compile does not keep the others from it; the exit code is then 1.\n",
    .options = options,
    .fields = fields,
    .common = 0,
};

static bool take_gpu(void *arg, int id, const char *value)
{
    (void)id;
    return gpu_asked(value, &((request *)arg)->gpu);
}

int cmd_variant(int argc, char **argv)
{
    common_options common;
    request r = {NULL, gpu_find("h200")};
    int exit_code = EXIT_DONE;
    int first = options_parse(&spec, argc, argv, &common, take_gpu, &r, &exit_code);
    if (first < 0) {
        return exit_code;
    }
    if (first == argc || !r.output) {
        fprintf(stderr, "acromion variant: %s; `acromion variant --help` explains\n",
                r.output ? "which variants?" : "-o FOLDER is missing");
        return EXIT_USAGE;
    }
    exit_code = EXIT_DONE;
    for (int i = first; i < argc; ++i) {
        acr_status status = variant_build(argv[i], r.output, &r.gpu->device);
        if (status == ACR_UNSUPPORTED) { /* this one; others may do */
            fprintf(stderr, "FAIL %s: %s\n", argv[i], acr_last_error());
            exit_code = EXIT_FAILED;
        } else if (status != ACR_OK) {
            return report_failure(status, argv[i]);
        }
    }
    return exit_code;
}
