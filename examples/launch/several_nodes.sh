#!/usr/bin/env bash
# Several machines: start it on each of them, with the same HEAD (a host and a free port there).
# output_dir must be one folder on a file system that all of them see.
#
#   RECIPE=./mine.yaml NODES=2 GPUS=8 HEAD=node-0:29500 examples/launch/several_nodes.sh
#
# RESTARTS=3 goes on from the last checkpoint when a process was lost, up to three times.
#
# Under Slurm: srun --nodes 2 --ntasks-per-node 1 examples/launch/several_nodes.sh, with
# HEAD="$(scontrol show hostnames | head -1):29500".
set -euo pipefail

# Seconds to finish the step and save after a signal; torchrun's own 30 are often too few.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
# With restarts: otherwise processes look for each other where they were before.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun \
    --nnodes "${NODES:?number of machines}" \
    --nproc-per-node "${GPUS:-1}" \
    --max-restarts "${RESTARTS:-0}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:?host:port of the first machine}" \
    --rdzv-id "${RUN:-grouper}" \
    -m grouper run "${RECIPE:?name a recipe or a file}" --resume "$@"
