/* From a candidate to a kernel: the compilers, with limits, and the loading of what they made.
 *
 * A trial's folder holds what was compiled (candidate.c or .cu, wrapper.c, descriptor.json), what came of it (code.so
 * of a CPU candidate; image.bin and, of a family, host.so with its C half), the compilers' words (*.log), and
 * artefact.json, from which another process loads the kernel. */
#ifndef SEARCH_BUILD_H
#define SEARCH_BUILD_H

#include <limits.h>

#include "candidate.h"
#include "descriptor.h"
#include "elf_object.h"
#include "trial.h"

/* The names of a candidate's entry point and description. */
#define CANDIDATE_SYMBOL "acr_candidate"
#define CANDIDATE_DESCRIPTION "acr_candidate_description"

typedef struct artefact {
    acr__backend_id backend;
    bool is_source;
    char folder[PATH_MAX];
    char arch[16];
    char identity[33];
} artefact;

typedef struct build_tools {
    const char *cc, *nvcc, *source_root;
    const acr__device *device;
    const char *common; /* build_common's library, for the C halves of cuda families; NULL = compile it into each */
    double timeout_s;
    const volatile int *stop;
} build_tools;

/* The folder of this process's own tree: what was asked for, ACROMION_SOURCE, or where the program was built. */
const char *build_source_root(const char *wanted);

/* Compiles into a->folder, which exists. Where it fails, result's status and detail say how, and false is returned. */
bool build_compile(artefact *a, const build_tools *tools, const candidate *c, trial_result *result);

/* For whoever asks many sets of cuda families for their costs alone, without nvcc. build_common compiles what all of
 * their C halves share into folder/common.so, whose path tools->common names afterwards; build_describe the C half of
 * one into a->folder; build_describe_open loads it, until dlclose of *handle. Errors of the last: ACR_IO, ACR_FORMAT.
 * The others leave what is wrong in result. */
bool build_common(const char *folder, const build_tools *tools, trial_result *result);
bool build_describe(const artefact *a, const build_tools *tools, const candidate *c, trial_result *result);
acr_status build_describe_open(void **handle, const acr__kernel **out, const artefact *a);

/* Registers, shared memory and spills of a compiled cuda candidate, from ptxas. */
acr_status build_read_resources(const artefact *a, trial_resources *out);

/* What the task's problems launch: the largest block and dynamic shared memory. */
typedef struct build_launches {
    int64_t block, smem_bytes;
} build_launches;

/* The launches of the problems, as text that is part of a candidate's identity. *reason becomes why one of them cannot
 * be run (valid until the thread asks again), else NULL. d is a source's descriptor. */
acr_status build_find_launches(build_launches *out, char *text, size_t capacity, const char **reason, const artefact *a,
                               const descriptor *d, const acr__device *device, const judge_problem *problems,
                               size_t problem_count);

acr_status build_save(const artefact *a);

/* A kernel in this process. Two can be loaded at a time. */
typedef enum loaded_slot {
    LOADED_CANDIDATE,
    LOADED_INCUMBENT,
    LOADED_SLOTS
} loaded_slot;

typedef struct loaded {
    acr__kernel kernel;
    char name[64];
    char identity[33];
    elf_code code;         /* cpu: what a sandbox runs; kernel.run is for the caller to set */
    acr__cpu_run *own_run; /* cpu: a family's function as it lies in this process, for variants; NULL of a source */
    void *handle;          /* of a family's description */
    const void *image;
    size_t image_bytes;
} loaded;

/* Loads what a folder holds. device: whose architecture a source was compiled for. Nothing of a source's object runs in
 * this process, not even a loader's part of it. Errors: ACR_IO, ACR_FORMAT. Free with build_unload. */
acr_status build_load(loaded *out, loaded_slot slot, const char *folder, const acr__device *device);
void build_unload(loaded *l);

#endif
