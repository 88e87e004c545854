#!/usr/bin/env bash
# One machine: GPU 0 trains, every other one is a vLLM server for rollouts. They end with the run.
#
#   RECIPE=./mine.yaml SERVERS=1,2,3 examples/launch/vllm_own_cards.sh
#
# On two machines: grouper serve-rollouts on the other one, and sampling.vllm.urls here; see
# docs/vllm.md.
set -euo pipefail

exec grouper run "${RECIPE:?name a recipe or a file}" --resume \
    sampling.engine=vllm \
    "sampling.vllm={mode: server, devices: [${SERVERS:?GPUs for vLLM, as 1,2,3}]}" "$@"
