#!/usr/bin/env bash
# Ours and the peers, one process each, in this order, on one card. Each stage takes five to eight minutes on an H200.
#
#     bench/run_gpu.sh STAGE OUT_FOLDER COMMIT [MODEL]
#
# STAGE: short (16K, 32K, everyday rows, groups), long (128K), or shapes (the other models, ours alone).
# Prepare first: this package, peft and flash-attn-4 importable; Unsloth too, or its part is skipped with a message.
# Every process writes into OUT_FOLDER/train_step.json; a part that fails does not end the others.
set -uo pipefail
cd "$(dirname "$0")/.."
stage=${1:?short, long or shapes}
out=${2:?folder for the results}
commit=${3:?commit to note in the results}
model=${4:-Qwen3-4B}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
failed=0

part() {
  local seconds=$1
  shift
  echo "== $*"
  timeout "$seconds" python3 -m "$@" --out "$out/train_step.json" --commit "$commit" || { echo "!! failed or out of time: $*"; failed=1; }
}

mkdir -p "$out"
case $stage in
short)
  part 120 bench.train_step --model "$model" --lengths 16384,32768 --offload none --everyday --group 8 --prompts 8192,32768
  part 60 bench.train_step --model "$model" --lengths 16384,32768 --offload host
  part 90 bench.peers.transformers_step --model "$model" --lengths 16384,32768 --everyday
  part 180 bench.peers.unsloth_step --model "$model" --lengths 16384,32768 --everyday
  ;;
long)
  part 230 bench.train_step --model "$model" --lengths 131072 --offload host --save-attention
  part 320 bench.peers.unsloth_step --model "$model" --lengths 131072
  ;;
shapes)
  for other in Qwen3-8B Llama-3.1-8B Gemma-3-12B; do
    part 180 bench.train_step --model "$other" --lengths 16384,32768,131072 --offload host --repeats 3 --budget 100
  done
  ;;
*)
  echo "no stage $stage: short, long or shapes" >&2
  exit 2
  ;;
esac
exit $failed
