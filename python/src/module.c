/* The module acromion._native: its functions and their documentation. */
#include "arguments.h"
#include "aten.h"
#include "aten_stack.h"
#include "common.h"
#include "operand.h"
#include "ops.h"
#include "plans.h"
#include "ranks.h"
#include "sdpa.h"
#include "torch_side.h"
#include "xla.h"

PyDoc_STRVAR(
    sdpa_doc,
    "sdpa(q=None, k=None, v=None, attn_mask=None, dropout_p=0.0, is_causal=False, *, causal_align=None, scale=None, "
    "enable_gqa=False, kv_lens=None, return_lse=False, layout='bhsd', out=None, q_scale=None, k_scale=None, "
    "v_scale=None, window=None, softcap=None, sinks=None, kv_starts=None, alibi_slopes=None, chunk=None, ranges=None, "
    "tree=None, q_offsets=None, kv_offsets=None, max_q_len=None, max_kv_len=None, page_table=None, v_dim=None, "
    "invariant=False)\n"
    "--\n\n"
    "Scaled dot-product attention: softmax(scale * q @ k.T + mask) @ v, per batch entry and head.\n"
    "\n"
    "q, k, v: tensors of four dimensions, float16, bfloat16, float32 or float8_e4m3fn, all of one dtype, on one\n"
    "    device, CUDA or CPU; PyTorch's, NumPy's, or any other that speaks DLPack. Read in place, through any strides\n"
    "    whose last is 1.\n"
    "    query, key and value are PyTorch's names for them.\n"
    "    With q_offsets and kv_offsets: of three dimensions, [total, heads, dim].\n"
    "attn_mask: bool (False hides), or a float type, which is added to the scores; any shape that broadcasts to\n"
    "    [batch, heads, q_len, kv_len]. A tensor of PyTorch whose keys do not lie side by side is copied.\n"
    "dropout_p: as PyTorch has it; any but 0 is refused.\n"
    "is_causal: query i sees keys 0..i, and what causal_align says where the lengths differ.\n"
    "causal_align: 'top_left' (query i sees keys 0..i, PyTorch's rule) or 'bottom_right' (the last query sees\n"
    "    the last key, FlashAttention's rule). Required with is_causal where the two could differ: q_len\n"
    "    is not kv_len, or kv_lens is given.\n"
    "scale: positive; None is 1 / sqrt(head dim).\n"
    "window: how many keys a query sees up to its own, that included (as sliding_window in Transformers), or\n"
    "    (left, right) with the number of keys behind it; None for no limit. Query i stands at key i with\n"
    "    causal_align='top_left', else at key i + kv_len - q_len.\n"
    "chunk: a query sees the keys of its own chunk of so many, counted from kv_starts.\n"
    "ranges: int32 tensor [batch, ranges, 2] of half-open ranges of keys: a query that stands in one sees all of it,\n"
    "    whatever is_causal, window and chunk say.\n"
    "tree: uint8 tensor [batch, q_len, ceil(q_len / 8)]: bit j % 8 of byte j / 8 says whether a query sees key j\n"
    "    of the last q_len.\n"
    "softcap: positive c: a score s becomes c * tanh(s / c). None and 0 are none.\n"
    "sinks: float32 tensor [heads of q]: exp(sink) is added to the sum that the softmax divides by.\n"
    "alibi_slopes: float32 tensor [heads of q]: slope * |i - j| is subtracted, of positions among the keys.\n"
    "enable_gqa: allow fewer key/value heads than query heads; their number must divide.\n"
    "kv_lens: int32 tensor [batch] on the same device: keys from kv_lens[b] on do not exist in batch entry b.\n"
    "q_offsets, kv_offsets: int32 tensors [sequences + 1] on the same device: sequence b has the rows from\n"
    "    q_offsets[b] to q_offsets[b + 1] of q and out, likewise of k and v. cu_seqlens_q and cu_seqlens_k are\n"
    "    FlashAttention's names for them.\n"
    "max_q_len, max_kv_len: the longest sequence; longer ones are cut there. None is all rows, which is always "
    "enough,\n"
    "    and may choose a slower kernel. max_seqlen_q and max_seqlen_k are FlashAttention's names.\n"
    "kv_starts: int32 tensor [batch] on the same device: keys before kv_starts[b] do not exist in batch entry b.\n"
    "return_lse: also return the log-sum-exp of the scores, float32 [batch, heads, q_len];\n"
    "    of packed sequences [heads, total].\n"
    "layout: 'bhsd' for [batch, heads, length, dim], 'bshd' for [batch, length, heads, dim].\n"
    "page_table, v_dim, invariant: see sdpa_paged.\n"
    "out: a tensor to write to and return; must not overlap an input. None makes one: of the inputs' dtype; for\n"
    "    float8_e4m3fn of float16, and out may be bfloat16.\n"
    "q_scale, k_scale, v_scale: with float8_e4m3fn, what is stored times this is the value: a positive number, or\n"
    "    a float32 tensor [batch, heads of k] on the same device, one for each key/value head and the query\n"
    "    heads that read it. None is 1.\n"
    "\n"
    "Returns the output, or (output, lse). On CUDA the work is enqueued on the current stream of the tensors'\n"
    "library, without waiting. Raises instead of computing something else.");

PyDoc_STRVAR(
    paged_doc,
    "sdpa_paged(q, k_cache, v_cache, page_table, kv_lens, *, q_offsets=None, max_q_len=None, max_kv_len=None, "
    "layout='bhsd', is_causal=False, v_dim=None, invariant=False, out=None, return_lse=False, **arguments_of_sdpa)\n"
    "--\n\n"
    "sdpa whose keys and values lie in pages, as serving engines keep them.\n"
    "\n"
    "q: [batch, heads, length, dim]; with q_offsets [total, heads, dim].\n"
    "k_cache, v_cache: [pages, heads, page, dim], with layout='bshd' [pages, page, heads, dim]; any strides whose\n"
    "    last is 1. Of q's type, or float8_e4m3fn with k_scale and v_scale. Fewer heads than q has need no "
    "enable_gqa.\n"
    "page_table: int32 tensor [batch, pages of a sequence]: key j of sequence b is row j % page of page\n"
    "    page_table[b, j // page]. What lies behind a sequence's last page is never read; several may name one page.\n"
    "    The rows of a sequence with a number outside the cache hold anything, no others do.\n"
    "kv_lens: int32 tensor [batch]: how many keys a sequence has, those of its newest queries included.\n"
    "q_offsets: int32 tensor [batch + 1]: sequence b has the rows from q_offsets[b] to q_offsets[b + 1] of q.\n"
    "max_q_len, max_kv_len: the longest that a sequence may be; None is all rows of q, and what the table holds.\n"
    "is_causal: the last query sees the last key (bottom right), unless causal_align says otherwise.\n"
    "v_dim: values are the first v_dim elements of each key, and v_cache is None; scale has no default then.\n"
    "invariant: a row's bits depend on its own query and keys, not on what else is computed with it.\n"
    "Every other argument is sdpa's; sdpa and explain take page_table by name.\n"
    "\n"
    "Lengths, offsets and table are read when the work runs: a captured graph may be replayed with others. There are\n"
    "no gradients. Returns the output, or (output, lse).");

PyDoc_STRVAR(explain_doc, "explain(q, k, v, **arguments_of_sdpa)\n"
                          "--\n\n"
                          "Which kernel sdpa would run for these arguments, and why: one line of text. Runs nothing.");

static PyMethodDef methods[] = {
    {"sdpa", (PyCFunction)(void (*)(void))sdpa_call, METH_FASTCALL | METH_KEYWORDS, sdpa_doc},
    {"sdpa_paged", (PyCFunction)(void (*)(void))sdpa_paged_call, METH_FASTCALL | METH_KEYWORDS, paged_doc},
    {"explain", (PyCFunction)(void (*)(void))sdpa_explain, METH_FASTCALL | METH_KEYWORDS, explain_doc},
    {"run", (PyCFunction)(void (*)(void))sdpa_run, METH_FASTCALL | METH_KEYWORDS,
     "run(q, k, v, **arguments_of_sdpa)\n--\n\nsdpa below PyTorch's dispatcher: what the operator calls."},
    {"gradients", (PyCFunction)(void (*)(void))sdpa_gradients, METH_FASTCALL | METH_KEYWORDS,
     "gradients(d_o, o, lse, dq, dk, dv, dsinks, q, k, v, **arguments_of_sdpa)\n--\n\n"
     "Writes the gradients of sdpa below PyTorch's dispatcher: what the operator calls."},
    {"bind_torch", torch_bind, METH_VARARGS, "bind_torch(...)\n--\n\nCalled once, by acromion._torch."},
    {"bind_aten", aten_bind, METH_VARARGS, "bind_aten(...)\n--\n\nCalled once, by acromion._aten."},
    {"aten_operator", aten_operator, METH_VARARGS,
     "aten_operator(name, call, keys, counts, tell)\n--\n\nWhat computes an operator of ATen: see acromion._aten."},
    {"aten_stack_raise", aten_stack_raise, METH_NOARGS,
     "aten_stack_raise()\n--\n\nRaises what a call of an operator has to raise."},
    {"aten_stack_bind", aten_stack_bind, METH_O,
     "aten_stack_bind(raising)\n--\n\nWhether PyTorch's dispatcher can call without Python: see acromion._aten."},
    {"aten_stack_register", aten_stack_register, METH_VARARGS,
     "aten_stack_register(name, key, operator, arguments, keywords, results)\n--\n\nSee acromion._aten."},
    {"merge", ops_merge, METH_VARARGS, "merge(outs, lses, out, out_lse, layout)\n--\n\nSee acromion._ops."},
    {"append", ops_append, METH_VARARGS, "append(tensors, numbers)\n--\n\nSee acromion._ops."},
    {"forget_plans", sdpa_forget, METH_NOARGS, "forget_plans()\n--\n\nDrops every cached plan and workspace."},
    {"problem", (PyCFunction)(void (*)(void))sdpa_problem, METH_FASTCALL | METH_KEYWORDS,
     "problem(q, k, v, **arguments_of_sdpa)\n--\n\nChecks arguments whose tensors are (shape, strides or None, type), "
     "and returns\nthe acr_problem that they make, as bytes; None where there is nothing to compute."},
    {"plan_text", sdpa_plan_text, METH_VARARGS,
     "plan_text(problem, device_type, device)\n--\n\nWhich kernel runs a problem on a device, or why none does."},
    {"gradient_problem", sdpa_gradient_problem, METH_VARARGS,
     "gradient_problem(problem)\n--\n\nThe backward pass of a problem: of its gradients, each has its tensor's "
     "strides, and\nthat of the output the output's."},
    {"xla_handlers", xla_handlers, METH_NOARGS,
     "xla_handlers()\n--\n\nThe functions that XLA calls, for the CPU and for CUDA, in capsules."},
    {"group_id", ranks_id, METH_VARARGS, "group_id(library)\n--\n\nSee acromion.distributed, as for all of group_*."},
    {"group_open", ranks_open, METH_VARARGS,
     "group_open(device_type, device, rank, ranks, id, library, timeout_ms, max_ctas, transfers)\n--\n\n"
     "A group, in a capsule."},
    {"group_close", ranks_close, METH_VARARGS, "group_close(group)\n--\n\nFrees its plans and leaves it."},
    {"group_wait", ranks_wait, METH_VARARGS, "group_wait(group, stream, timeout_ms)\n--\n\nacr_group_wait."},
    {"group_plan", ranks_plan, METH_VARARGS,
     "group_plan(group)\n--\n\n(text, bytes of memory, bytes sent) of the last call's plan, or None."},
    {"group_refuse", ranks_refuse, METH_VARARGS,
     "group_refuse(group, text)\n--\n\nTells the other ranks, in the place of a call, why this rank makes none."},
    {"group_sdpa", (PyCFunction)(void (*)(void))ranks_sdpa, METH_FASTCALL | METH_KEYWORDS,
     "group_sdpa(group, schedule, placement, q_len, kv_len, q, k, v, **arguments_of_sdpa)\n--\n\nsdpa over ranks."},
    {"parse_problem", ranks_parse_problem, METH_VARARGS,
     "parse_problem(text)\n--\n\n(canonical text, {field: number}) of a problem's text."},
    {"shard_rows", ranks_rows, METH_VARARGS,
     "shard_rows(length, ranks, rank, placement)\n--\n\n((first, count), (first, count)): acr_shard_rows."},
    {"import_wisdom", sdpa_import_wisdom, METH_VARARGS,
     "import_wisdom(path, device_type, device)\n--\n\nSee acromion.import_wisdom."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "acromion._native",
    .m_doc = "The compiled half of acromion. Use the names of the package acromion.",
    .m_size = -1, /* one interpreter: contexts and plans are shared by everything in the process */
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void);
PyMODINIT_FUNC PyInit__native(void)
{
    if (common_setup() || arguments_setup() || operand_setup() || plans_setup() || xla_setup())
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddStringConstant(module, "version", acr_version()))
        Py_CLEAR(module);
    return module;
}
