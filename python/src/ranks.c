/* Groups of ranks, each with its plans: see ranks.h. A group lives in a capsule, which ranks_close empties; one that
 * nobody closes stays until the process ends, since leaving a communicator may wait for other ranks. */
#include "ranks.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "acromion_nccl.h"
#include "operand.h"
#include "plans.h"
#include "sdpa.h"

static const char CAPSULE[] = "acromion.group";

enum {
    RANK_PLANS_MAX = 32 /* beyond, the oldest goes: on every rank the same one, since calls come in one order */
};

/* A plan with what it was asked for. */
typedef struct rank_plan {
    acr_problem problem; /* its bytes are the key */
    acr_schedule schedule;
    acr_placement placement;
    acr_group_plan *plan;
} rank_plan;

typedef struct py_group {
    acr_group *group;
    dl_device device;
    int rank, ranks;
    uint32_t timeout_ms;
    bool is_busy; /* in a call that lets other threads run */
    rank_plan plans[RANK_PLANS_MAX];
    int plan_count, last; /* the plan of the last call; -1: none yet */
} py_group;

static int raise_status(acr_status status)
{
    return acr_py_refuse(status, acr_group_last_error());
}

static py_group *group_of(PyObject *capsule)
{
    py_group *g = PyCapsule_GetPointer(capsule, CAPSULE);
    if (g && !g->group)
        acr_py_invalid("the group is closed");
    else if (g && g->is_busy)
        acr_py_invalid("the group is in use by another thread, must be used by one at a time");
    return g && g->group && !g->is_busy ? g : NULL;
}

/* ---- Groups ------------------------------------------------------------------------------------------------------ */

PyObject *ranks_id(PyObject *module, PyObject *args)
{
    (void)module;
    const char *library;
    acr_group_id id;
    if (!PyArg_ParseTuple(args, "z:group_id", &library))
        return NULL;
    const acr_status status = acr_group_id_create(&id, library);
    if (status != ACR_OK) {
        raise_status(status);
        return NULL;
    }
    return PyBytes_FromStringAndSize(id.bytes, sizeof id.bytes);
}

static acr_status join(py_group *g, acr_ctx *ctx, const acr_group_options *options)
{
    acr_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = acr_group_create(&g->group, ctx, options);
    Py_END_ALLOW_THREADS;
    return status;
}

PyObject *ranks_open(PyObject *module, PyObject *args)
{
    (void)module;
    acr_group_options options = ACR_GROUP_OPTIONS_INIT;
    acr_group_id id;
    acr_ctx *ctx;
    const char *bytes;
    Py_ssize_t count;
    int transfers;
    py_group *g = calloc(1, sizeof *g);
    if (!g)
        return PyErr_NoMemory();
    if (!PyArg_ParseTuple(args, "iiiiy#zIIi:group_open", &g->device.type, &g->device.id, &g->rank, &g->ranks, &bytes,
                          &count, &options.library, &options.timeout_ms, &options.max_ctas, &transfers))
        goto failed;
    if (count != (Py_ssize_t)sizeof id) {
        acr_py_invalid("an id has %zd bytes, must have %zu", count, sizeof id);
        goto failed;
    }
    memcpy(&id, bytes, sizeof id);
    options.id = &id;
    options.transfers = (acr_transfers)transfers;
    options.rank = g->rank;
    options.ranks = g->ranks;
    options.device = g->device.type == DL_CUDA ? g->device.id : 0;
    g->timeout_ms = options.timeout_ms;
    g->last = -1;
    if (plans_context(&ctx, g->device))
        goto failed;
    const acr_status status = join(g, ctx, &options);
    if (status != ACR_OK) {
        raise_status(status);
        goto failed;
    }
    PyObject *capsule = PyCapsule_New(g, CAPSULE, NULL);
    if (capsule)
        return capsule;
    acr_group_destroy(g->group);
failed:
    free(g);
    return NULL;
}

PyObject *ranks_close(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "O:group_close", &capsule))
        return NULL;
    py_group *g = group_of(capsule);
    if (!g)
        return NULL;
    acr_group *group = g->group;
    g->group = NULL; /* from here on it is closed for every thread */
    Py_BEGIN_ALLOW_THREADS;
    for (int i = 0; i < g->plan_count; i++)
        acr_group_plan_destroy(g->plans[i].plan);
    acr_group_destroy(group);
    Py_END_ALLOW_THREADS;
    g->plan_count = 0;
    Py_RETURN_NONE;
}

PyObject *ranks_wait(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *capsule;
    unsigned long long stream;
    unsigned timeout_ms;
    if (!PyArg_ParseTuple(args, "OKI:group_wait", &capsule, &stream, &timeout_ms))
        return NULL;
    py_group *g = group_of(capsule);
    if (!g)
        return NULL;
    acr_status status;
    g->is_busy = true;
    Py_BEGIN_ALLOW_THREADS;
    status = acr_group_wait(g->group, (void *)(uintptr_t)stream, timeout_ms);
    Py_END_ALLOW_THREADS;
    g->is_busy = false;
    if (status != ACR_OK) {
        raise_status(status);
        return NULL;
    }
    Py_RETURN_NONE;
}

PyObject *ranks_rows(PyObject *module, PyObject *args)
{
    (void)module;
    long long len;
    int ranks, rank, placement;
    acr_rows rows[2];
    if (!PyArg_ParseTuple(args, "Liii:shard_rows", &len, &ranks, &rank, &placement))
        return NULL;
    const acr_status status = acr_shard_rows(rows, len, ranks, rank, (acr_placement)placement);
    if (status != ACR_OK) {
        raise_status(status);
        return NULL;
    }
    return Py_BuildValue("((LL)(LL))", (long long)rows[0].first, (long long)rows[0].count, (long long)rows[1].first,
                         (long long)rows[1].count);
}

PyObject *ranks_parse_problem(PyObject *module, PyObject *args)
{
    (void)module;
    const char *given;
    char text[ACR_PROBLEM_TEXT_MAX];
    acr_problem p;
    if (!PyArg_ParseTuple(args, "s:parse_problem", &given))
        return NULL;
    acr_status status = acr_problem_parse(&p, given, NULL);
    if (status == ACR_OK)
        status = acr_problem_canonical(&p, &p);
    if (status == ACR_OK)
        status = acr_problem_format(&p, text, sizeof text);
    if (status != ACR_OK) {
        acr_py_raise(status);
        return NULL;
    }
    return Py_BuildValue("(s{sisisLsLsLsLsLsLsL})", text, "dtype", (int)p.dtype, "mask", (int)p.mask, "batch",
                         (long long)p.batch, "q_heads", (long long)p.q_heads, "kv_heads", (long long)p.kv_heads,
                         "q_len", (long long)p.q_len, "kv_len", (long long)p.kv_len, "qk_dim", (long long)p.qk_dim,
                         "v_dim", (long long)p.v_dim);
}

PyObject *ranks_plan(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "O:group_plan", &capsule))
        return NULL;
    const py_group *g = group_of(capsule);
    if (!g)
        return NULL;
    if (g->last < 0)
        Py_RETURN_NONE;
    const acr_group_plan *plan = g->plans[g->last].plan;
    return Py_BuildValue("(snn)", acr_group_plan_text(plan), (Py_ssize_t)acr_group_plan_memory(plan),
                         (Py_ssize_t)acr_group_plan_traffic(plan));
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

/* One call: the schedule, and the lengths of the whole sequence. */
typedef struct rank_call {
    py_group *g;
    int schedule, placement;
    long long q_len, kv_len; /* 0: as many rows on every rank as here */
    bool has_met;            /* the other ranks: they learn from the library what fails from then on */
} rank_call;

/* Tells the other ranks why this one makes no call. What becomes of that, the caller's own error says more. */
static void tell_others(py_group *g, const char *text)
{
    g->is_busy = true;
    Py_BEGIN_ALLOW_THREADS;
    acr_group_refuse(g->group, ACR_INVALID, text);
    Py_END_ALLOW_THREADS;
    g->is_busy = false;
}

/* The same of the exception that is set, which stays set. */
static void tell_exception(py_group *g)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL, *bytes = text ? PyUnicode_AsUTF8String(text) : NULL;
    const char *said = bytes ? PyBytes_AsString(bytes) : NULL;
    PyErr_Clear();
    tell_others(g, said ? said : "an exception without a text");
    Py_XDECREF(bytes);
    Py_XDECREF(text);
    PyErr_Restore(type, value, trace);
}

PyObject *ranks_refuse(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *capsule;
    const char *text;
    if (!PyArg_ParseTuple(args, "Os:group_refuse", &capsule, &text))
        return NULL;
    py_group *g = group_of(capsule);
    if (!g)
        return NULL;
    tell_others(g, text);
    Py_RETURN_NONE;
}

static bool is_packed(const acr_problem *p, const acr_strides *s, int64_t heads, int64_t rows, int64_t dim)
{
    const bool is_bshd = p->layout == ACR_BSHD;
    return (p->batch == 1 || s->batch == heads * rows * dim) && s->head == (is_bshd ? dim : rows * dim) &&
           s->row == (is_bshd ? heads * dim : dim);
}

static int check_packed(const acr_problem *p)
{
    const char *name = !is_packed(p, &p->q, p->q_heads, p->q_len, p->qk_dim)     ? "q"
                       : !is_packed(p, &p->k, p->kv_heads, p->kv_len, p->qk_dim) ? "k"
                       : !is_packed(p, &p->v, p->kv_heads, p->kv_len, p->v_dim)  ? "v"
                       : !is_packed(p, &p->o, p->q_heads, p->q_len, p->v_dim)    ? "out"
                                                                                 : NULL;
    return name ? acr_py_invalid("%s is not contiguous, must be: give %s.contiguous()", name, name) : 0;
}

/* From the rows that this rank has to those of the whole sequence. */
static int widen(const rank_call *c, const char *name, int64_t *len, long long whole)
{
    const int64_t held = *len, whole_len = whole ? whole : held * c->g->ranks;
    acr_rows rows[2];
    const acr_status status = acr_shard_rows(rows, whole_len, c->g->ranks, c->g->rank, (acr_placement)c->placement);
    if (status != ACR_OK)
        return raise_status(status);
    const long long wanted = rows[0].count + rows[1].count;
    if (wanted != held)
        return acr_py_invalid("%s has %lld rows on rank %d of %d, must have %lld there of a sequence of %lld", name,
                              (long long)held, c->g->rank, c->g->ranks, wanted, (long long)whole_len);
    *len = whole_len;
    return 0;
}

static int to_whole_sequence(const rank_call *c, acr_problem *p)
{
    const acr_strides packed = {0, 0, 0};
    if (check_packed(p) || widen(c, "q", &p->q_len, c->q_len) || widen(c, "k", &p->kv_len, c->kv_len))
        return -1;
    p->q = p->k = p->v = p->o = packed;
    return 0;
}

/* Room for one more plan. What is enqueued with the oldest has to end first. */
static acr_status make_room(py_group *g, void *stream)
{
    if (g->plan_count < RANK_PLANS_MAX)
        return ACR_OK;
    const acr_status status = acr_group_wait(g->group, stream, g->timeout_ms);
    if (status != ACR_OK)
        return status;
    acr_group_plan_destroy(g->plans[0].plan);
    memmove(&g->plans[0], &g->plans[1], (size_t)--g->plan_count * sizeof g->plans[0]);
    return ACR_OK;
}

static acr_status find_plan(const rank_call *c, const acr_problem *problem, void *stream)
{
    py_group *g = c->g;
    for (g->last = 0; g->last < g->plan_count; g->last++) {
        const rank_plan *plan = &g->plans[g->last];
        if ((int)plan->schedule == c->schedule && (int)plan->placement == c->placement &&
            memcmp(&plan->problem, problem, sizeof *problem) == 0)
            return ACR_OK;
    }
    g->last = -1;
    acr_status status = make_room(g, stream);
    rank_plan *made = &g->plans[g->plan_count];
    *made = (rank_plan){
        .problem = *problem, .schedule = (acr_schedule)c->schedule, .placement = (acr_placement)c->placement};
    if (status == ACR_OK)
        status = acr_group_plan_create(&made->plan, g->group, problem, made->schedule, made->placement, ACR_ESTIMATE);
    if (status == ACR_OK)
        g->last = g->plan_count++;
    return status;
}

/* The way in which sdpa executes here: see sdpa.h. */
static int execute(void *own, acr_problem *problem, const acr_buffers *buffers, const operand *q)
{
    rank_call *c = own;
    py_group *g = c->g;
    void *stream;
    acr_status status;
    if (q->device.type != g->device.type || q->device.id != g->device.id)
        return acr_py_invalid("q is on device %d of type %d, the group on device %d of type %d", (int)q->device.id,
                              (int)q->device.type, (int)g->device.id, (int)g->device.type);
    if ((c->schedule != ACR_SHARDED_KEYS && to_whole_sequence(c, problem)) || operand_stream(q, &stream))
        return -1;
    g->is_busy = true;
    c->has_met = true;
    Py_BEGIN_ALLOW_THREADS;
    status = find_plan(c, problem, stream);
    if (status == ACR_OK)
        status = acr_group_execute(g->plans[g->last].plan, buffers, stream);
    Py_END_ALLOW_THREADS;
    g->is_busy = false;
    return status == ACR_OK ? 0 : raise_status(status);
}

PyObject *ranks_sdpa(PyObject *module, PyObject *const *args, Py_ssize_t positional, PyObject *keyword_names)
{
    (void)module;
    enum {
        OWN = 5 /* arguments before those of sdpa */
    };
    rank_call c = {0};
    long long own[OWN] = {0};
    if (positional < OWN)
        return PyErr_Format(PyExc_TypeError, "group_sdpa() takes a group, schedule, placement, q_len, kv_len, then "
                                             "sdpa's arguments");
    for (int i = 1; i < OWN; i++)
        if ((own[i] = PyLong_AsLongLong(args[i])) == -1 && PyErr_Occurred())
            return NULL;
    if (!(c.g = group_of(args[0])))
        return NULL;
    c.schedule = (int)own[1];
    c.placement = (int)own[2];
    c.q_len = own[3];
    c.kv_len = own[4];
    PyObject *out = sdpa_call_by(execute, &c, args + OWN, positional - OWN, keyword_names);
    if (!out && !c.has_met)
        tell_exception(c.g);
    return out;
}
