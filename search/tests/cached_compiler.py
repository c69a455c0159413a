#!/usr/bin/env python3
"""A compiler that remembers what it made, for tests that compile the same candidates over and over.

Called by the name of a link to it, `cc` or `nvcc`, with the real compiler in CACHED_CC or CACHED_NVCC and the cache's
folder in CACHED_IN. What a call makes hangs on the compiler, the arguments (but for the folders in them) and the
contents of all files named, of the sources beside them, and of folders of includes. Only successful calls with an
output are kept; any other goes to the compiler as it is. With CACHED_PAUSE_S a call takes at least so many seconds.
"""
import hashlib
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tempfile
import time


def files_of(folder):
    """What includes can find; a toolkit's folder, which nothing changes, is known by its name."""
    if (folder / "cuda_fp16.h").exists():
        return [str(folder)]
    return [part for path in sorted(folder.rglob("*")) if path.is_file()
            for part in (str(path.relative_to(folder)), path.read_bytes())]


def key_of(compiler, arguments, outputs):
    digest = hashlib.sha256()

    def add(part):
        part = part if isinstance(part, bytes) else part.encode()
        digest.update(len(part).to_bytes(8, "little") + part)

    status = os.stat(compiler)
    add(f"{compiler} {status.st_size} {status.st_mtime_ns}")
    for argument in arguments:
        option, place = ("-I", argument[2:]) if argument.startswith("-I") else ("", argument)
        option, place = argument.split("=", 1) if argument.startswith("-Wl,--version-script=") else (option, place)
        path = pathlib.Path(place)
        add(option)
        if argument in outputs:
            add("an output")
        elif path.is_absolute() and path.is_dir():
            for part in files_of(path):
                add(part)
        elif path.is_absolute() and path.is_file():
            for source in sorted(path.parent.glob("*.[ch]*")):  # what it may include lies beside it
                add(source.name)
                add(source.read_bytes())
            add(path.name)
            add(path.read_bytes())
        else:
            add(argument)
    return digest.hexdigest()


def behind(arguments, option):
    return arguments[arguments.index(option) + 1] if option in arguments[:-1] else None


def contents(output, dependencies, kept):
    """Of what a call made: its output, and of nvcc the list of what it read and the PTX on the way."""
    return {"output": output.read_bytes(), "dependencies": dependencies and dependencies.read_bytes(),
            "kept": {path.name: path.read_bytes() for path in kept.glob("*.ptx")} if kept else {},
            "mode": output.stat().st_mode}


def main():
    name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
    compiler, cache = os.environ["CACHED_" + name.upper()], pathlib.Path(os.environ["CACHED_IN"])
    output, dependencies, kept = (place and pathlib.Path(place) for place in
                                  (behind(arguments, option) for option in ("-o", "-MF", "--keep-dir")))
    if not output:
        os.execv(compiler, [compiler, *arguments])
    time.sleep(float(os.environ.get("CACHED_PAUSE_S", 0)))
    outputs = {str(place) for place in (output, dependencies, kept) if place} | {behind(arguments, "-MT")}
    place = cache / key_of(compiler, arguments, outputs)
    if not place.exists():
        done = subprocess.run([compiler, *arguments], capture_output=True)
        sys.stdout.buffer.write(done.stdout)
        sys.stderr.buffer.write(done.stderr)
        if done.returncode == 0:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
                pickle.dump(contents(output, dependencies, kept) | {"told": (done.stdout, done.stderr)}, file)
            os.replace(file.name, place)
        sys.exit(done.returncode if done.returncode >= 0 else 1)
    made = pickle.loads(place.read_bytes())
    output.write_bytes(made["output"])
    output.chmod(made["mode"])
    if dependencies:
        dependencies.write_bytes(made["dependencies"])
    for file, content in made["kept"].items():
        (kept / file).write_bytes(content)
    sys.stdout.buffer.write(made["told"][0])
    sys.stderr.buffer.write(made["told"][1])


def use(cache):
    """Puts it in the place of the compilers of whatever this process starts."""
    cache = pathlib.Path(cache).resolve()
    links = cache / "bin"
    links.mkdir(parents=True, exist_ok=True)
    os.environ["CACHED_IN"] = str(cache)
    usual_nvcc = "/usr/local/cuda/bin/nvcc"
    for name, usual in (("cc", None), ("nvcc", usual_nvcc if os.path.exists(usual_nvcc) else None)):
        found = shutil.which(os.environ.get(name.upper()) or name) or usual
        if found:
            link = links / name
            if not link.is_symlink():
                try:
                    link.symlink_to(pathlib.Path(__file__).resolve())
                except FileExistsError:
                    pass  # a test beside this one was faster
            os.environ["CACHED_" + name.upper()] = os.path.abspath(found)
            os.environ[name.upper()] = str(link)


def forget():
    """Undoes use(), in a process whose environment named no compilers."""
    for name in ("CC", "NVCC"):
        os.environ.pop(name, None)


if __name__ == "__main__":
    main()
