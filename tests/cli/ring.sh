#!/bin/bash
# ring.sh RING FAKE_NCCL: examples/ring.c over three ranks, told their numbers as Open MPI's mpirun does. The first that
# fails ends the others.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export RING_FILE=$folder/id OMPI_COMM_WORLD_SIZE=3
pids=()
for rank in 0 1 2; do
    OMPI_COMM_WORLD_RANK=$rank "$1" "$2" &
    pids+=($!)
done
for _ in "${pids[@]}"; do
    if ! wait -n; then
        kill "${pids[@]}" 2>/dev/null
        exit 1
    fi
done
