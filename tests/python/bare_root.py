#!/usr/bin/env python3
"""Installs a wheel into bare roots: bare_root.py WHEEL

For each CPython from 3.10 on that is here a folder is made that holds that interpreter, its standard library, its pip,
the C library, and nothing else; there, as in an empty container, without network, pip installs the wheel, and a program
without NumPy computes attention with it. Prints what it found and how long installing took; fails when an interpreter
fails, exits with 77 when the oldest one or 3.13 is not here, or when there is no way to change the root."""
import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

OLDEST, NEWEST = 10, 15  # minor versions that are looked for
WANTED = (OLDEST, 13)  # without these the check is not whole
WHERE = "import sys, sysconfig; print(sysconfig.get_path('stdlib'), sysconfig.get_path('platstdlib'), sys.base_prefix)"

# What a user without NumPy can do: tensors that ctypes owns, handed over by DLPack.
PROGRAM = '''
import ctypes, sys
import acromion

class Tensor:
    """float32 [1, 1, rows, 16] in memory of ctypes."""
    class Managed(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                    ("type", ctypes.c_uint8 * 2), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
                    ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
                    ("deleter", ctypes.c_void_p)]
    def __init__(self, rows, value):
        self.memory = (ctypes.c_char * (rows * 64 + 64))()
        self.at = -ctypes.addressof(self.memory) % 64
        self.values = (ctypes.c_float * (rows * 16)).from_buffer(self.memory, self.at)
        self.values[:] = [value] * (rows * 16)
        self.shape = (ctypes.c_int64 * 4)(1, 1, rows, 16)
        self.managed = self.Managed(ctypes.addressof(self.values), (1, 0), 4, (2, 32), 1,
                                    ctypes.addressof(self.shape), None, 0, None, None)
    def __dlpack_device__(self):
        return 1, 0
    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor", None)

q, k, v, out = Tensor(5, 1.0), Tensor(7, 2.0), Tensor(7, 3.0), Tensor(5, 0.0)
acromion.sdpa(q, k, v, out=out)
assert all(abs(value - 3.0) < 1e-5 for value in out.values), list(out.values)
try:
    acromion.sdpa(q, k, 1, out=out)
except TypeError as error:
    print(f"acromion {acromion.__version__} in Python {sys.version.split()[0]}: computed, and refuses: {error}")
'''


def interpreters():
    """Minor version and path of one interpreter for each version that is here and has pip."""
    for minor in range(OLDEST, NEWEST + 1):
        name = f"python3.{minor}"
        pyenv = sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/3.{minor}.*/bin/{name}")))
        places = [shutil.which(name), *pyenv, sys.executable if sys.version_info[1] == minor else None]
        for place in filter(None, places):
            asked = subprocess.run([place, "-I", "-c", "import pip"], capture_output=True)
            if asked.returncode == 0:
                yield minor, os.path.realpath(place)
                break


def libraries(path):
    """What the loader takes for a program or a module."""
    told = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
    return re.findall(r"(?:=> |^\s*)(/\S+)", told, re.MULTILINE)


def copy(source, root):
    target = root / os.path.abspath(source).lstrip("/")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def make_root(python, root):
    """An interpreter with its standard library and pip."""
    found = subprocess.run([python, "-I", "-c", WHERE], capture_output=True, text=True, check=True).stdout.split()
    pip = subprocess.run([python, "-I", "-c", "import pip; print(pip.__path__[0])"], capture_output=True, text=True,
                         check=True).stdout.strip()
    for folder in dict.fromkeys(found[:2]):
        shutil.copytree(folder, root / folder.lstrip("/"), dirs_exist_ok=True, symlinks=True,
                        ignore=shutil.ignore_patterns("test", "tests", "__pycache__", "site-packages", "dist-packages",
                                                      "config-*", "idlelib", "tkinter", "*.a"))
    shutil.copytree(pip, root / "pip/pip", ignore=shutil.ignore_patterns("__pycache__"))
    modules = glob.glob(f"{found[1]}/lib-dynload/*.so")
    copy(python, root)
    for path in {library for file in [python, *modules] for library in libraries(file)}:
        copy(path, root)
    (root / "tmp").mkdir(exist_ok=True)


def inside(root, *command):
    """Runs a command with that folder as its root and hardly an environment."""
    change = [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
    return subprocess.run([*change, "chroot", str(root), *command], capture_output=True, text=True,
                          env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": "/pip:/site", "HOME": "/tmp"})


def check(python, wheel):
    """Why the wheel is of no use there; None when it is."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        make_root(python, root)
        shutil.copy(wheel, root / wheel.name)
        started = inside(root, python, "-c", "import ctypes, ssl, zipfile")
        if started.returncode != 0:
            print(f"skipped: {python} does not start in a root of its own: {started.stderr.strip()[-300:]}")
            sys.exit(77)
        before = time.monotonic()
        installed = inside(root, python, "-m", "pip", "install", "--no-index", "--disable-pip-version-check",
                           "--root-user-action=ignore", "--target", "/site", f"/{wheel.name}")
        seconds = time.monotonic() - before
        if installed.returncode != 0:
            return installed.stdout + installed.stderr
        done = inside(root, python, "-c", PROGRAM)
        if done.returncode != 0 or not done.stdout:
            return done.stdout + done.stderr
        print(f"installed in {seconds:.1f} s; {done.stdout.strip()}")


def main():
    wheel = pathlib.Path(sys.argv[1]).resolve()
    found = dict(interpreters())
    for python in found.values():
        wrong = check(python, wheel)
        if wrong:
            print(f"{python}: {wrong}")
            return 1
    missing = [f"3.{minor}" for minor in WANTED if minor not in found]
    if missing:
        print(f"skipped: no CPython {' and '.join(missing)} with pip is here")
    return 77 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
