#!/usr/bin/env bash
# Tests and measures the Python package on a machine with a GPU, PyTorch and transformers, without touching its Python:
#   tools/gpu-python.sh WHEEL OUTPUT-FOLDER
# Needs a C compiler. Everything goes into OUTPUT-FOLDER: test logs, python.json, python_aten.json (results/README.md),
# and python_jax.json where JAX is.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
wheel=$1 out=$2
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
mkdir -p "$out"

python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheel" || exit 1
export PYTHONPATH=$site PYTHONUNBUFFERED=1
cc -O2 -shared -fPIC -o "$site/launch_cost.so" tools/launch_cost.c -ldl || exit 1

# part NAME LIMIT_S COMMAND...
failed=()
part() {
    local name=$1 limit_s=$2
    shift 2
    echo "==> $name"
    timeout "$limit_s" "$@" >"$out/$name.log" 2>&1 || failed+=("$name ($?)")
    tail -n 12 "$out/$name.log"
}
part measure 100 python3 tools/gpu_python.py "$site/launch_cost.so" "$out/python.json"
part measure_aten 60 python3 tools/gpu_aten.py "$out/python_aten.json"
part test_torch 80 python3 tests/python/test_torch.py
part test_aten 60 python3 tests/python/test_aten.py
part test_models 60 python3 tests/python/test_models.py
part test_transformers 60 python3 tests/python/test_transformers.py
part test_arrays 30 python3 tests/python/test_arrays.py
if python3 -c 'import jax' 2>/dev/null; then
    part measure_jax 120 python3 tools/measure_jax.py "$out/python_jax.json"
else
    echo "==> measure_jax: no JAX here"
fi
part docs 60 python3 tests/python/run_docs.py docs/manual/python.md
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}"; exit 1; }
