/* What `acromion run` takes beyond q, k, v, a mask and a window: soft caps, sinks, biases and boolean masks, ALiBi,
 * chunks, key starts, ranges and trees, as options and .npy files. cmd_run.c calls the functions in this order: take,
 * open, describe, upload, set, free, close. */
#ifndef WORKBENCH_RUN_FEATURES_H
#define WORKBENCH_RUN_FEATURES_H

#include <stdbool.h>
#include <stdint.h>

#include "acromion.h"
#include "base/npy.h"
#include "base/options.h"
#include "internal.h"

/* Options of these features: ids from RUN_FEATURE_FIRST on, so that cmd_run.c's own stay below. */
enum {
    RUN_FEATURE_FIRST = OPTION_LONG_ONLY + 100,
    RUN_SOFTCAP = RUN_FEATURE_FIRST,
    RUN_CHUNK,
    RUN_MASK, /* from here on: one file each */
    RUN_SINKS,
    RUN_ALIBI,
    RUN_KV_STARTS,
    RUN_RANGES,
    RUN_TREE,
    RUN_FEATURE_END,
    RUN_FEATURE_FILES = RUN_FEATURE_END - RUN_MASK
};

/* clang-format off */
#define RUN_FEATURE_OPTIONS                                                                                            \
    {RUN_MASK, "mask", "FILE",                                                                                         \
     "booleans (true: seen) or what scores gain; broadcasts to [batch, heads, q len, kv len]"}, \
    {RUN_SOFTCAP, "softcap", "X", "scores become X * tanh(score / X)"},                                                \
    {RUN_SINKS, "sinks", "FILE", "a score that each head's softmax has besides, 1-D float32, one a head of q"},        \
    {RUN_ALIBI, "alibi", "FILE", "ALiBi slopes, 1-D float32, one a head of q"},                                        \
    {RUN_CHUNK, "chunk", "N", "a query sees keys of its own chunk of N positions"},                                    \
    {RUN_KV_STARTS, "kv-starts", "FILE", "first key of each batch entry (left padding), 1-D int32 or int64"},          \
    {RUN_RANGES, "ranges", "FILE",                                                                                     \
     "[batch, ranges, 2] int32 or int64: a query and a key in one range see each other"},                  \
    {RUN_TREE, "tree", "FILE", "[batch, query length, bytes] uint8: bits of the last keys that each query sees"}
/* clang-format on */

typedef struct run_features {
    double softcap; /* 0 = none */
    int64_t chunk;  /* 0 = none */
    const char *paths[RUN_FEATURE_FILES];
    npy_file files[RUN_FEATURE_FILES];
    void *memory[RUN_FEATURE_FILES]; /* the device's */
} run_features;

/* An option from RUN_FEATURE_FIRST on. False after a message. */
bool run_features_take(run_features *f, int id, const char *value);

/* Maps the files and checks what they hold by themselves. */
acr_status run_features_open(run_features *f);

/* Adds the features to a problem that has its extents, and checks the files' shapes against them. */
acr_status run_features_describe(const run_features *f, acr_problem *problem);

acr_status run_features_upload(run_features *f, const acr_problem *problem, acr__backend_device *device);

void run_features_set(const run_features *f, acr_buffers *buffers);

/* The device's memory, and the files. */
void run_features_free(run_features *f, acr__backend_device *device);
void run_features_close(run_features *f);

#endif
