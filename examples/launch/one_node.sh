#!/usr/bin/env bash
# One machine: one process per GPU, rollouts by Grouper's own sampler on the same GPUs.
#
#   RECIPE=./mine.yaml GPUS=8 examples/launch/one_node.sh
#   RECIPE=demo GPUS=2 examples/launch/one_node.sh --dry-run
#
# It goes on where it stopped. What stands after the name is passed on: settings, --dry-run.
set -euo pipefail

exec grouper run "${RECIPE:?name a recipe or a file}" --nproc "${GPUS:-1}" --resume "$@"
