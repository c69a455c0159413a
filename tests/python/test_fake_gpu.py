#!/usr/bin/env python3
"""The CUDA side of the extension without a GPU and without PyTorch: ptxvm/driver plays the driver, a class of a
few lines plays torch.Tensor.

    test_fake_gpu.py LIBCUDA [unittest arguments]

The fake driver launches nothing and its device memory is host memory, so NumPy's arrays play device memory; workspaces
come from the driver, which fills no memory of strangers. What counts is what is launched, with which workspace, and
what happens when others get a turn in between."""
import ctypes
import sys
import unittest

import numpy as np

import acromion
from acromion import _native

DL_CUDA = 2
DL_FLOAT8_E4M3FN = 10


class Counters(ctypes.Structure):
    """struct fake_cuda_counters"""
    _fields_ = [(name, ctypes.c_long) for name in ("calls", "launches", "allocations", "libraries", "streams", "events",
                                                   "graphs", "graph_execs", "contexts", "pushed", "misuses")]


class Launch(ctypes.Structure):
    """struct fake_cuda_launch"""
    _fields_ = [("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32), ("cluster", ctypes.c_uint32),
                ("smem_bytes", ctypes.c_uint32), ("overlap_previous", ctypes.c_int), ("stream", ctypes.c_void_p),
                ("args", ctypes.c_ubyte * 512), ("map_bases", ctypes.c_uint64 * 4), ("map_rows", ctypes.c_uint64 * 4)]


def entry(name):
    """A function of the driver."""
    found = ctypes.c_void_p()
    assert driver.cuGetProcAddress_v2(name.encode(), ctypes.byref(found), 13000, ctypes.c_uint64(0), None) == 0
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 2)(found.value)


def in_context(name, out, argument):
    """Calls a function of the driver that makes something, in the device's context."""
    context, popped = ctypes.c_void_p(), ctypes.c_void_p()
    for called, first, second in (("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0),
                                  ("cuCtxPushCurrent", None, None), (name, ctypes.byref(out), argument),
                                  ("cuCtxPopCurrent", ctypes.byref(popped), 0)):
        first = context if called == "cuCtxPushCurrent" else ctypes.cast(first, ctypes.c_void_p)
        assert entry(called)(first, second) == 0, called
    return out.value


def device_memory(size):
    """An array of bytes in the driver's memory, never freed."""
    address = in_context("cuMemAlloc", ctypes.c_uint64(), size)
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8)


class Tensor:
    """A NumPy array that says it is on a CUDA device, with what the extension uses of torch.Tensor."""
    requires_grad = False
    made = []  # by new_empty: workspaces
    on_new_empty = staticmethod(lambda: None)

    def __init__(self, array, device=0):
        self.array, self.device = array, device

    def is_neg(self):
        return False

    def __dlpack_device__(self):
        return DL_CUDA, self.device

    def __dlpack__(self, **keywords):
        if "max_version" in keywords:
            raise TypeError("an older library")
        assert keywords == {"stream": 1}
        capsule = self.array.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        device = ctypes.c_int32.from_address(get(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))
        device.value = DL_CUDA  # behind the data pointer: device type, device id, dimensions, and the type
        ctypes.c_int32.from_address(ctypes.addressof(device) + 4).value = self.device
        if self.array.dtype == np.uint8 and self.array.ndim == 4:
            ctypes.c_uint8.from_address(ctypes.addressof(device) + 12).value = DL_FLOAT8_E4M3FN
        return capsule

    def new_empty(self, shape, dtype=None):
        self.on_new_empty()
        memory = device_memory(shape[0])
        memory[:] = 0xEE
        self.made.append(Tensor(memory, self.device))
        return self.made[-1]

    @property
    def address(self):
        return self.array.ctypes.data


class Subclass(Tensor):
    pass


class State:
    grad, depth, capturing = False, 0, False


def tensor(*shape):
    return Tensor(np.empty(shape, np.float16))


def long_causal(length):
    """A problem whose kernel shares work out by a counter in a workspace."""
    return [tensor(2, 16, length, 128) for _ in range(4)]


class FakeGpu(unittest.TestCase):
    def setUp(self):
        State.grad, State.depth, State.capturing = False, 0, False
        Tensor.on_new_empty = staticmethod(lambda: None)
        _native.forget_plans()
        Tensor.made.clear()

    def run_causal(self, tensors):
        q, k, v, out = tensors
        self.assertIs(acromion.sdpa(q, k, v, is_causal=True, out=out), out)
        self.assertEqual(driver.fake_cuda_count().misuses, 0)
        return bytes(driver.fake_cuda_last_launch().args)

    def check_uses(self, args, workspace):
        """The launch was given this workspace, which is clear."""
        self.assertIn(workspace.address.to_bytes(8, "little"), args)
        self.assertFalse(workspace.array.any())

    def test_one_launch_a_call(self):
        q = tensor(2, 8, 512, 64)
        before = driver.fake_cuda_count().launches
        out = acromion.sdpa(q, q, q)
        self.assertEqual(out.array.shape, q.array.shape)
        self.assertEqual(driver.fake_cuda_count().launches - before, 1)
        self.assertTrue(driver.fake_cuda_last_launch().overlap_previous)
        self.assertIn("sm90a", acromion.explain(q, q, q))

    def test_scales_of_fp8(self):
        """Tensors are passed on as they are; NumPy has no 8-bit floats, so bytes play them."""
        q, out = Tensor(np.zeros((2, 4, 64, 64), np.uint8)), tensor(2, 4, 64, 64)
        scales = [Tensor(device_memory(4 * 8).view(np.float32).reshape(2, 4)) for _ in range(3)]
        named = dict(zip(("q_scale", "k_scale", "v_scale"), scales))
        acromion.sdpa(q, q, q, out=out, **named)
        args = bytes(driver.fake_cuda_last_launch().args)
        for scale in scales:
            self.assertIn(scale.address.to_bytes(8, "little"), args)
        self.assertIn("e4m3", acromion.explain(q, q, q, q_scale=2.0))
        with self.assertRaisesRegex(ValueError, "v_scale is .*the device cannot read"):
            acromion.sdpa(q, q, q, out=out, v_scale=Tensor(np.ones((2, 4), np.float32)))
        with self.assertRaisesRegex(ValueError, "k_scale is on cuda:1 and q on cuda:0"):
            acromion.sdpa(q, q, q, out=out, k_scale=Tensor(scales[0].array, device=1))
        State.depth = 1
        self.assertEqual(acromion.sdpa(q, q, q, q_scale=scales[0])[2], {"q_scale": scales[0]})

    def test_a_workspace_is_kept_and_cleared_for_another_plan(self):
        first, second = long_causal(2048), long_causal(3000)
        self.check_uses(self.run_causal(first), Tensor.made[0])
        Tensor.made[0].array[:] = 1  # what the first plan leaves for itself must stay
        self.run_causal(first)
        self.assertTrue(Tensor.made[0].array.all())
        self.check_uses(self.run_causal(second), Tensor.made[0])
        Tensor.made[0].array[:] = 1
        self.check_uses(self.run_causal(first), Tensor.made[0])
        self.assertEqual(len(Tensor.made), 1)

    def test_a_capture_has_its_own(self):
        tensors = long_causal(2048)
        self.run_causal(tensors)
        State.capturing = True
        for count in (2, 3):
            self.assertIn(self.run_causal_made(tensors, count).address.to_bytes(8, "little"), self.args)
        State.capturing = False
        self.run_causal(tensors)
        self.assertEqual(len(Tensor.made), 3)

    def run_causal_made(self, tensors, count):
        self.args = self.run_causal(tensors)
        self.assertEqual(len(Tensor.made), count)
        return Tensor.made[-1]

    def test_others_get_a_turn_while_allocating(self):
        """PyTorch's allocator lets other threads run: they may drop every plan, or make the workspace first."""
        tensors, others = long_causal(2048), long_causal(3000)

        def turn():
            Tensor.on_new_empty = staticmethod(lambda: None)
            _native.forget_plans()
            self.run_causal(others)
            _native.forget_plans()
        Tensor.on_new_empty = staticmethod(turn)
        args = self.run_causal(tensors)
        self.check_uses(args, Tensor.made[-1])
        self.assertIn(tensors[0].address.to_bytes(8, "little"), args)

    def test_gradients_and_dispatch(self):
        q = tensor(1, 8, 64, 64)
        State.grad, q.requires_grad = True, True
        self.assertEqual(acromion.sdpa(q, q, q), ("dispatched", 3, {}))
        mask = tensor(1, 8, 64, 64)
        mask.requires_grad = True
        with self.assertRaisesRegex(NotImplementedError, "attn_mask requires a gradient"):
            acromion.sdpa(q, q, q, mask)
        State.grad = False
        self.assertIsInstance(acromion.sdpa(q, q, q), Tensor)
        State.depth = 1
        self.assertEqual(acromion.sdpa(q, q, v=q, scale=0.5), ("dispatched", 2, {"v": q, "scale": 0.5}))
        State.depth = 0
        self.assertEqual(acromion.sdpa(q, Subclass(q.array), q)[0], "dispatched")

    def test_no_such_device(self):
        q = Tensor(np.empty((1, 8, 64, 64), np.float16), device=1)
        with self.assertRaisesRegex(acromion.DeviceError, "the driver has 1 device") as raised:
            acromion.sdpa(q, q, q, out=q)
        self.assertEqual(raised.exception.status, -3)
        with self.assertRaisesRegex(ValueError, "k is on cuda:0 and q on cuda:1, must be the same"):
            acromion.sdpa(q, tensor(1, 8, 64, 64), q)


# ---- XLA, played by structures of python/src/xla_ffi.h ----

WORD = ctypes.c_void_p


def words(addresses):
    return (WORD * len(addresses))(*addresses)


class Text(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char_p), ("length", ctypes.c_size_t)]


class XlaArray(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int32), ("count", ctypes.c_size_t), ("data", WORD)]


class XlaBuffer(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extension", WORD), ("dtype", ctypes.c_int32), ("data", WORD),
                ("rank", ctypes.c_int64), ("dims", WORD)]


class XlaList(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extension", WORD), ("count", ctypes.c_int64), ("types", WORD),
                ("items", WORD)]


class XlaAttributes(ctypes.Structure):
    _fields_ = [*XlaList._fields_[:4], ("names", WORD), ("values", WORD)]


class XlaGet(ctypes.Structure):
    """Arguments of the functions for the stream and for the device."""
    _fields_ = [("size", ctypes.c_size_t), ("extension", WORD), ("ctx", WORD), ("stream", WORD)]


class XlaError(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extension", WORD), ("message", ctypes.c_char_p), ("code", ctypes.c_int32)]


class XlaApi(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extension", WORD), ("version", WORD * 3), ("internal", WORD),
                ("functions", WORD * 18)]  # create_error is 0, get_stream 4, get_device_ordinal 17


class XlaFrame(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("extension", WORD), ("api", WORD), ("ctx", WORD), ("stage", ctypes.c_int32),
                ("arguments", XlaList), ("results", XlaList), ("attributes", XlaAttributes), ("future", WORD)]


FUNCTION = ctypes.CFUNCTYPE(WORD, WORD)


class Xla(unittest.TestCase):
    """The handler for CUDA, as XLA calls it, without JAX."""
    EXECUTE, ORDINAL_OFFSET = 3, 24

    def setUp(self):
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = WORD, [ctypes.py_object, ctypes.c_char_p]
        self.handlers = [FUNCTION(get(capsule, None)) for capsule in _native.xla_handlers()]
        self.stream, self.device, self.errors = 0, 0, []
        self.functions = {0: FUNCTION(self.create_error), 4: FUNCTION(self.get_stream),
                          17: FUNCTION(self.get_device)}
        table = (WORD * 18)()
        for place, function in self.functions.items():
            table[place] = ctypes.cast(function, WORD)
        self.api = XlaApi(ctypes.sizeof(XlaApi), None, (WORD * 3)(), None, table)

    def create_error(self, args):
        error = XlaError.from_address(args)
        self.errors.append((error.code, error.message.decode()))
        return 1  # not NULL

    def get_stream(self, args):
        XlaGet.from_address(args).stream = self.stream
        return None

    def get_device(self, args):
        ctypes.c_int32.from_address(args + self.ORDINAL_OFFSET).value = self.device
        return None

    def call(self, arrays, results, names="q k v", stage=EXECUTE, **arguments):
        """Calls the handler; (code, text) of its error, or None."""
        shown = [(x.shape, None, x.dtype.name) for x in arrays]
        problem = _native.problem(**dict(zip(names.split(), shown)), **arguments)
        held = [problem]  # what the structures point to

        def pointer(x):
            held.append(x)
            return ctypes.addressof(x)

        def buffers(tensors):
            shapes = [(ctypes.c_int64 * x.ndim)(*x.shape) for x in tensors]
            made = [XlaBuffer(ctypes.sizeof(XlaBuffer), None, 0, x.ctypes.data, x.ndim, pointer(shape))
                    for x, shape in zip(tensors, shapes)]
            kinds = (ctypes.c_int32 * len(made))(*[1] * len(made))
            return XlaList(ctypes.sizeof(XlaList), None, len(made), pointer(kinds),
                           pointer(words([pointer(x) for x in made])))
        values = [Text(names.encode(), len(names)),
                  XlaArray(5, len(problem) // 8, ctypes.cast(ctypes.c_char_p(problem), WORD))]
        keys = [Text(b"operands", 8), Text(b"problem", 7)]
        attributes = XlaAttributes(
            ctypes.sizeof(XlaAttributes), None, 2, pointer((ctypes.c_int32 * 2)(4, 1)),
            pointer(words([pointer(x) for x in keys])), pointer(words([pointer(x) for x in values])))
        frame = XlaFrame(ctypes.sizeof(XlaFrame), None, ctypes.addressof(self.api), None, stage, buffers(arrays),
                         buffers(results), attributes, None)
        failed = self.handlers[1](ctypes.addressof(frame))
        self.assertEqual(driver.fake_cuda_count().misuses, 0)
        self.assertEqual(failed is not None, bool(self.errors))
        return self.errors.pop() if self.errors else None

    def test_sizes(self):
        for struct, size in ((XlaApi, 192), (XlaBuffer, 48), (XlaList, 40), (XlaAttributes, 48), (XlaFrame, 176),
                             (XlaError, 32), (XlaGet, 32)):
            self.assertEqual(ctypes.sizeof(struct), size, struct.__name__)

    def test_one_launch_on_the_stream_of_the_call(self):
        q, out = np.zeros((2, 8, 512, 64), np.float16), np.zeros((2, 8, 512, 64), np.float16)
        for self.stream in (None, in_context("cuStreamCreate", ctypes.c_void_p(), 0)):
            before = driver.fake_cuda_count().launches
            self.assertIsNone(self.call([q, q, q], [out], is_causal=True))
            self.assertEqual(driver.fake_cuda_count().launches - before, 1)
            launch = driver.fake_cuda_last_launch()
            self.assertEqual(launch.stream, self.stream)
            self.assertTrue(launch.overlap_previous)
            for array in (q, out):
                self.assertIn(array.ctypes.data.to_bytes(8, "little"), bytes(launch.args) + bytes(launch.map_bases))

    def test_every_stage_but_one_does_nothing(self):
        q = np.zeros((2, 8, 512, 64), np.float16)
        before = driver.fake_cuda_count().launches
        for stage in range(self.EXECUTE):
            self.assertIsNone(self.call([q, q, q], [q.copy()], stage=stage))
        self.assertEqual(driver.fake_cuda_count().launches, before)

    def test_a_workspace_is_made_once(self):
        """For a stream; the library's own, while XLA's allocator knows nothing of it."""
        arrays = [x.array for x in long_causal(2048)]
        self.stream = in_context("cuStreamCreate", ctypes.c_void_p(), 0)
        found = [driver.fake_cuda_count().allocations]
        for _ in range(3):
            self.assertIsNone(self.call(arrays[:3], arrays[3:], is_causal=True))
            found.append(driver.fake_cuda_count().allocations)
        self.assertGreater(found[1], found[0])
        self.assertEqual(found[1:], found[1:2] * 3)

    def test_errors(self):
        q = np.zeros((2, 8, 64, 64), np.float16)
        code, text = self.call([q, q, q], [q.copy(), q.copy()])
        self.assertEqual((code, text), (3, "acromion.jax.sdpa: q, k, v or a result is missing"))
        code, text = self.call([q, q, q], [q])
        self.assertEqual(code, 13)
        self.assertRegex(text, "overlaps")
        self.device = 1
        code, text = self.call([q, q, q], [q.copy()])
        self.assertEqual(code, 14)
        self.assertRegex(text, "the driver has 1 device")
        self.device = 64
        code, text = self.call([q, q, q], [q.copy()])
        self.assertEqual((code, text), (3, "acromion.jax.sdpa: device 64: at most 64 are supported"))
        self.device, self.api.size = 0, ctypes.sizeof(XlaApi) - 8
        code, text = self.call([q, q, q], [q.copy()])
        self.assertEqual(code, 12)
        self.assertRegex(text, "JAX 0.6 or newer is needed")


if __name__ == "__main__":
    driver = ctypes.CDLL(sys.argv.pop(1), mode=ctypes.RTLD_GLOBAL)  # the library's dlopen finds it by its soname
    driver.fake_cuda_count.restype, driver.fake_cuda_last_launch.restype = Counters, Launch
    for name, struct in (("fake_cuda_counters", Counters), ("fake_cuda_launch", Launch)):
        size = ctypes.c_size_t.in_dll(driver, name + "_bytes").value
        assert size == ctypes.sizeof(struct), f"{struct.__name__} is not {name} of fake_driver.h: {size} bytes"
    _native.bind_torch(
        Tensor, type("Parameter", (Tensor,), {}), lambda *args, **keywords: ("dispatched", len(args), keywords),
        lambda *args, **keywords: ("dispatched, paged", len(args), keywords),
        lambda: State.grad, lambda: State.depth, lambda: State.capturing,
        lambda like: Tensor(np.empty_like(like.array)), lambda mask, keys: Tensor(np.broadcast_to(
            mask.array, (*mask.array.shape[:-1], keys)).copy()), "float16", "float32", "uint8", "int64", "uint64", ())
    unittest.main()
