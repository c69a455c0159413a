/* XLA's typed FFI: from a call frame to an enqueued execution. XLA calls these functions from threads of its own,
 * several at once, without the GIL: nothing here touches Python but the functions at the end.
 *
 * The custom call has two attributes: `problem`, an acr_problem as 64-bit words, and `operands`, the names of the
 * arguments in their order. Both were made and checked while the program was traced; programs are kept in files, so
 * another version of the package may have made them. */
#include "xla.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "dlpack.h"
#include "plans.h"
#include "xla_ffi.h"

#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])

enum {
    MESSAGE_MAX = 1024
};

/* Executions on one stream of acr_forward come from one thread at a time; JAX may enqueue from several. */
static pthread_mutex_t enqueueing[PLANS_DEVICES_MAX];

/* ---- Errors ------------------------------------------------------------------------------------------------------ */

static xla_error *fail(const xla_call_frame *frame, int32_t code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static xla_error *fail(const xla_call_frame *frame, int32_t code, const char *format, ...)
{
    char message[MESSAGE_MAX] = "acromion.jax.sdpa: ";
    const size_t used = strlen(message);
    va_list values;
    va_start(values, format);
    vsnprintf(message + used, sizeof message - used, format, values);
    va_end(values);
    xla_error_create args = {.size = sizeof args, .message = message, .code = code};
    return frame->api->create_error(&args);
}

static xla_error *fail_status(const xla_call_frame *frame, acr_status status)
{
    static const struct {
        acr_status status;
        int32_t code;
    } codes[] = {{ACR_INVALID, XLA_INVALID_ARGUMENT},
                 {ACR_ALIGNMENT, XLA_INVALID_ARGUMENT},
                 {ACR_UNSUPPORTED, XLA_UNIMPLEMENTED},
                 {ACR_NO_DEVICE, XLA_UNAVAILABLE},
                 {ACR_NO_MEMORY, XLA_RESOURCE_EXHAUSTED}};
    int32_t code = XLA_INTERNAL;
    for (size_t i = 0; i < COUNT_OF(codes); i++)
        if (codes[i].status == status)
            code = codes[i].code;
    return fail(frame, code, "%s", acr_last_error());
}

/* ---- Reading the call -------------------------------------------------------------------------------------------- */

/* The value of an attribute, or NULL. */
static const void *attribute(const xla_call_frame *frame, const char *name, int32_t type)
{
    const xla_attributes *a = &frame->attributes;
    for (int64_t i = 0; i < a->count; i++)
        if (a->types[i] == type && a->names[i]->length == strlen(name) &&
            memcmp(a->names[i]->bytes, name, strlen(name)) == 0)
            return a->values[i];
    return NULL;
}

static xla_error *read_problem(acr_problem *out, const xla_call_frame *frame)
{
    const xla_array *words = attribute(frame, "problem", XLA_ATTRIBUTE_ARRAY);
    if (!words || words->dtype != XLA_S64 || words->count == 0)
        return fail(frame, XLA_INVALID_ARGUMENT, "the attribute problem is missing or no array of 64-bit words");
    const size_t bytes = words->count * sizeof(int64_t);
    uint32_t size;
    memcpy(&size, words->data, sizeof size); /* acr_problem begins with it */
    if (size != bytes || bytes > sizeof *out)
        return fail(
            frame, XLA_INVALID_ARGUMENT,
            "the attribute problem has %zu bytes and says %u, at most %zu are known: another version of acromion "
            "compiled this program",
            bytes, (unsigned)size, sizeof *out);
    memset(out, 0, sizeof *out);
    memcpy(out, words->data, bytes);
    return NULL;
}

/* Where an argument goes. */
static const struct place {
    const char *name;
    size_t offset; /* of a pointer in acr_buffers */
} places[] = {
    {"q", offsetof(acr_buffers, q)},
    {"k", offsetof(acr_buffers, k)},
    {"v", offsetof(acr_buffers, v)},
    {"attn_mask", offsetof(acr_buffers, bias)},
    {"q_scale", offsetof(acr_buffers, q_scales)},
    {"k_scale", offsetof(acr_buffers, k_scales)},
    {"v_scale", offsetof(acr_buffers, v_scales)},
    {"kv_lens", offsetof(acr_buffers, kv_lens)},
    {"q_offsets", offsetof(acr_buffers, q_offsets)},
    {"kv_offsets", offsetof(acr_buffers, kv_offsets)},
    {"kv_starts", offsetof(acr_buffers, kv_starts)},
    {"sinks", offsetof(acr_buffers, sinks)},
    {"alibi_slopes", offsetof(acr_buffers, slopes)},
    {"ranges", offsetof(acr_buffers, ranges)},
    {"tree", offsetof(acr_buffers, tree)},
    {"o", offsetof(acr_buffers, o)}, /* these three of gradients alone */
    {"lse", offsetof(acr_buffers, lse)},
    {"d_o", offsetof(acr_buffers, d_o)},
};

static const struct place *place_of(const char *name, size_t length)
{
    for (size_t i = 0; i < COUNT_OF(places); i++)
        if (strlen(places[i].name) == length && memcmp(places[i].name, name, length) == 0)
            return &places[i];
    return NULL;
}

/* Goes through the names, which spaces part, and the arguments side by side. */
static xla_error *read_arguments(acr_buffers *out, const xla_call_frame *frame)
{
    const xla_text *names = attribute(frame, "operands", XLA_ATTRIBUTE_STRING);
    if (!names)
        return fail(frame, XLA_INVALID_ARGUMENT, "the attribute operands is missing or no text");
    int64_t count = 0;
    for (size_t begin = 0, end; begin < names->length; begin = end + 1) {
        for (end = begin; end < names->length && names->bytes[end] != ' ';)
            end++;
        const struct place *place = place_of(names->bytes + begin, end - begin);
        if (!place)
            return fail(frame, XLA_INVALID_ARGUMENT,
                        "the operand %.*s is not known: another version of acromion "
                        "compiled this program",
                        (int)(end - begin), names->bytes + begin);
        if (count < frame->arguments.count)
            memcpy((char *)out + place->offset, &frame->arguments.buffers[count]->data, sizeof(void *));
        count++;
    }
    if (count != frame->arguments.count)
        return fail(frame, XLA_INVALID_ARGUMENT, "%lld operands are named and %lld given", (long long)count,
                    (long long)frame->arguments.count);
    return NULL;
}

/* Hands out the results, in their order: the output and the log-sum-exp, or the gradients. */
static xla_error *read_results(acr_buffers *b, const acr_problem *p, const xla_call_frame *frame)
{
    static const size_t outputs[] = {offsetof(acr_buffers, o), offsetof(acr_buffers, lse)};
    static const size_t gradients[] = {offsetof(acr_buffers, dq), offsetof(acr_buffers, dk), offsetof(acr_buffers, dv),
                                       offsetof(acr_buffers, dsinks)};
    const bool is_backward = p->pass == ACR_BACKWARD;
    const int64_t count = is_backward ? 3 + ((p->flags & ACR_SINKS) != 0) : 1 + ((p->flags & ACR_WANT_LSE) != 0);
    if (!b->q || !b->k || !b->v || (is_backward && (!b->o || !b->lse || !b->d_o)) || frame->results.count != count)
        return fail(frame, XLA_INVALID_ARGUMENT, "q, k, v or a result is missing");
    for (int64_t i = 0; i < count; i++)
        memcpy((char *)b + (is_backward ? gradients : outputs)[i], &frame->results.buffers[i]->data, sizeof(void *));
    return NULL;
}

static xla_error *read_call(acr_problem *p, acr_buffers *b, const xla_call_frame *frame)
{
    xla_error *error = read_problem(p, frame);
    if (error || (error = read_arguments(b, frame)) || (error = read_results(b, p, frame)))
        return error;
    if (p->flags & ACR_PACKED) { /* [total, heads, dim]; q and k are the first two */
        b->q_total = frame->arguments.buffers[0]->dims[0];
        b->kv_total = frame->arguments.buffers[1]->dims[0];
    }
    p->alignment = acr_py_alignment((uintptr_t)b->q | (uintptr_t)b->k | (uintptr_t)b->v | (uintptr_t)b->o |
                                    (uintptr_t)b->d_o | (uintptr_t)b->dq | (uintptr_t)b->dk | (uintptr_t)b->dv);
    return NULL;
}

/* ---- Executing --------------------------------------------------------------------------------------------------- */

/* What XLA asks of a handler before it calls: the version of the interface, which later ones serve too, and what may be
 * done with calls. They are not captured into command buffers: a kernel's workspace is made at its first
 * execution, when acr_forward must be free to allocate. */
static xla_error *answer_metadata(const xla_call_frame *frame)
{
    xla_metadata *metadata = ((const xla_metadata_extension *)(const void *)frame->extension)->metadata;
    metadata->api_version.major = XLA_MAJOR;
    metadata->api_version.minor = XLA_MINOR;
    metadata->traits = 0;
    return NULL;
}

/* Whether this is a call to compute something; where it is not, XLA wants no more than success. */
static bool is_execution(const xla_call_frame *frame)
{
    return frame->stage == XLA_EXECUTE;
}

static bool asks_for_metadata(const xla_call_frame *frame)
{
    return frame->extension && frame->extension->type == XLA_METADATA;
}

static xla_error *call_on_cpu(xla_call_frame *frame)
{
    static _Thread_local char stream; /* its address: acr_forward keeps a workspace for each that calls at once */
    acr_problem problem;
    acr_buffers buffers = ACR_BUFFERS_INIT;
    acr_ctx *ctx;
    if (asks_for_metadata(frame))
        return answer_metadata(frame);
    if (!is_execution(frame))
        return NULL;
    xla_error *error = read_call(&problem, &buffers, frame);
    if (error)
        return error;
    acr_status status = plans_open(&ctx, (dl_device){DL_CPU, 0});
    if (status == ACR_OK)
        status = acr_forward(ctx, &problem, &buffers, &stream);
    return status == ACR_OK ? NULL : fail_status(frame, status);
}

static xla_error *find_device(const xla_call_frame *frame, dl_device *device, void **stream)
{
    const xla_api *api = frame->api;
    if (api->size < sizeof *api)
        return fail(frame, XLA_UNIMPLEMENTED,
                    "this jaxlib does not say which device a call runs on: JAX 0.6 or newer "
                    "is needed");
    xla_device_ordinal_get ordinal = {.size = sizeof ordinal, .ctx = frame->ctx};
    xla_stream_get got = {.size = sizeof got, .ctx = frame->ctx};
    xla_error *error = api->get_device_ordinal(&ordinal);
    if (error || (error = api->get_stream(&got)))
        return error;
    if (ordinal.ordinal < 0 || ordinal.ordinal >= PLANS_DEVICES_MAX)
        return fail(frame, XLA_INVALID_ARGUMENT, "device %d: at most %d are supported", (int)ordinal.ordinal,
                    PLANS_DEVICES_MAX);
    *device = (dl_device){DL_CUDA, ordinal.ordinal};
    *stream = got.stream;
    return NULL;
}

static xla_error *call_on_cuda(xla_call_frame *frame)
{
    acr_problem problem;
    acr_buffers buffers = ACR_BUFFERS_INIT;
    acr_ctx *ctx;
    dl_device device = {DL_CUDA, 0};
    void *stream = NULL;
    if (asks_for_metadata(frame))
        return answer_metadata(frame);
    if (!is_execution(frame))
        return NULL;
    xla_error *error = read_call(&problem, &buffers, frame);
    if (error || (error = find_device(frame, &device, &stream)))
        return error;
    buffers.flags = ACR_OVERLAP_PREVIOUS; /* the order of the stream holds all the same: see acromion.h */
    acr_status status = plans_open(&ctx, device);
    if (status == ACR_OK) {
        pthread_mutex_lock(&enqueueing[device.id]);
        status = acr_forward(ctx, &problem, &buffers, stream);
        pthread_mutex_unlock(&enqueueing[device.id]);
    }
    return status == ACR_OK ? NULL : fail_status(frame, status);
}

/* ---- Python ------------------------------------------------------------------------------------------------------ */

/* A pointer to a function in a capsule; ISO C has no cast for it, POSIX has the representation. */
static PyObject *capsule_of(xla_error *(*handler)(xla_call_frame *))
{
    void *address;
    _Static_assert(sizeof address == sizeof handler, "functions and objects have addresses of one size");
    memcpy(&address, &handler, sizeof address);
    return PyCapsule_New(address, NULL, NULL);
}

PyObject *xla_handlers(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *cpu = capsule_of(call_on_cpu), *cuda = capsule_of(call_on_cuda), *both = NULL;
    if (cpu && cuda)
        both = PyTuple_Pack(2, cpu, cuda);
    Py_XDECREF(cpu);
    Py_XDECREF(cuda);
    return both;
}

int xla_setup(void)
{
    for (size_t i = 0; i < COUNT_OF(enqueueing); i++)
        if (pthread_mutex_init(&enqueueing[i], NULL)) {
            PyErr_NoMemory();
            return -1;
        }
    return 0;
}
