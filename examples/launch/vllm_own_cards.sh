#!/usr/bin/env bash
# One machine: GPU 0 trains, every other one is a vLLM server for rollouts. They end with the run.
#
#   RECIPE=./mine.yaml SERVERS=cuda:1,cuda:2,cuda:3 examples/launch/vllm_own_cards.sh
#
# On two machines: grouper serve-rollouts on the other one, and its address in SERVERS here;
# see docs/vllm.md.
set -euo pipefail

exec grouper run "${RECIPE:?name a recipe or a file}" --resume \
    sampling.engine=vllm \
    "sampling.vllm={mode: server, servers: [${SERVERS:?GPUs for vLLM, as cuda:1,cuda:2}]}" "$@"
