/* What several tests need: cmocka in the right order, problems from text, tensors of a problem in host memory, a seeded
 * generator. */
#ifndef ACR_TESTS_SUPPORT_H
#define ACR_TESTS_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "internal.h"

#define COUNT_OF(list) (sizeof(list) / sizeof((list)[0]))

/* A call that must fail with this status and a sentence that contains the fragment. */
#define assert_fails(call, status, fragment) check_failure((call), (status), (fragment), #call, __FILE__, __LINE__)
void check_failure(acr_status got, acr_status wanted, const char *fragment, const char *call, const char *file,
                   int line);

/* A call that must succeed; prints acr_last_error() when it does not. */
#define assert_ok(call) check_success((call), #call, __FILE__, __LINE__)
void check_success(acr_status got, const char *call, const char *file, int line);

/* The problem of a text, as parsed; canonical. Both fail the test when the text is none. */
acr_problem problem_of(const char *text);
acr_problem canonical_of(const char *text);

/* A context of the cpu backend; a plan of the cpu backend for the text, by estimate or with the kernel named. */
acr_ctx *cpu_ctx(uint32_t threads);
acr_plan *estimate_plan(acr_ctx *ctx, const char *text);
acr_plan *forced_plan(acr_ctx *ctx, const acr_problem *problem, const acr__kernel *kernel);

/* The i-th forward kernel of the cpu backend that runs on this machine, or NULL when there are no more. */
const acr__kernel *cpu_kernel(const acr_ctx *ctx, size_t i);

/* A seeded generator: next_u64 is uniform, next_normal N(0, 1). */
typedef struct generator {
    uint64_t state;
} generator;
uint64_t next_u64(generator *g);
double next_normal(generator *g);

/* The four tensors of a problem, lse, kv_lens and offsets where its flags want them. q, k and v are N(0, 1), o and lse
 * all ones (a NaN). Of a packed batch the sequences have random lengths, with ROWS_AROUND rows before and behind. */
enum {
    ROWS_AROUND = 3
};
typedef struct tensors {
    acr_problem problem; /* canonical */
    acr_buffers buffers;
    void *q, *k, *v, *o;
    float *lse;
    int32_t *kv_lens, *q_offsets, *kv_offsets;
    size_t q_bytes, k_bytes, v_bytes, o_bytes, lse_bytes;
} tensors;
tensors tensors_make(const acr_problem *problem, uint64_t seed);
void tensors_free(tensors *t);
void tensors_poison_outputs(tensors *t);

/* Elements by their indices; head is a key/value head for k and v. */
double o_at(const tensors *t, int64_t batch, int64_t head, int64_t row, int64_t dim);
double lse_at(const tensors *t, int64_t batch, int64_t head, int64_t row);
int64_t element_of(const acr_strides *strides, int64_t batch, int64_t head, int64_t row, int64_t dim);

/* Plans with the kernel (NULL: by estimate), executes once with a workspace of its own, destroys the plan. */
void execute_once(acr_ctx *ctx, const acr__kernel *kernel, tensors *t);

/* False in a build without CUDA (-DACR_CUDA=OFF): what is said of CUDA's kernels has nothing to look at there. */
bool has_cuda_kernels(void);

/* A path in the tests' scratch folder (removed by the caller, or overwritten by the next run); static buffers, four at
 * a time. */
const char *scratch_path(const char *name);
/* A new folder there; and its end, with all that is in it. */
void make_folder(const char *path);
void remove_folder(const char *path);
void write_file(const char *path, const char *text);
char *read_file(const char *path); /* to be freed */

/* For tests that measure time: how many of the processors that this process may use others kept busy (the hypervisor
 * too) since cpu_use_now() was taken, on average; ended children count as this process. 0 where the system does not
 * tell. Beyond OTHERS_BUSY a figure says nothing: such a test skips, and says so, instead of failing. */
#define OTHERS_BUSY 0.15
typedef struct cpu_use {
    double others_s, at_s;
} cpu_use;
cpu_use cpu_use_now(void);
double others_busy_since(const cpu_use *start);

#endif
