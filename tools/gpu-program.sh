# shellcheck shell=bash
# Read by gpu-*.sh, in whose folder it lies: `here` becomes the folder, `program` $ACROMION, or else the program that
# lies there, or in build/workbench.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=${ACROMION:-}
for at in "$here/acromion" "$here/../build/workbench/acromion"; do
    [[ -n $program || ! -x $at ]] || program=$at
done
