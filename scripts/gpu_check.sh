#!/usr/bin/env bash
# Every check and a short benchmark that need a GPU, in under 8 minutes: a table, and one JSON file.
#
#     scripts/gpu_check.sh [-o FILE.json] [MODEL]
#
# MODEL is a checkpoint folder or a bundle to measure as well; without it a small random model is all there is. Installs
# nothing and fetches nothing. What this machine or environment lacks is skipped, and said. PYTHON names the interpreter.
set -euo pipefail

output=gpu_check.json
while getopts "o:h" option; do
  case $option in
    o) output=$OPTARG ;;
    *) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;;
  esac
done
shift $((OPTIND - 1))
output=$(realpath -m -- "$output")
model=()
[ $# -eq 0 ] || model=("$(realpath -- "$1")")

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
python=${PYTHON:-python}

echo "== GPU"
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
else
  echo "NOT RUN: there is no NVIDIA GPU here (no nvidia-smi). Nothing below ran on one."
fi

echo "== tests (pytest -m gpu)"
tests=0
timeout 240 "$python" -m pytest -q -m gpu -rs || tests=$?
# 5: nothing was collected, which no checkout of ours should be.
[ $tests -eq 0 ] || echo "FAILED: the tests ended with $tests (124: not in 4 minutes)"

echo "== benchmark"
benchmark=0
timeout 220 "$python" scripts/gpu_benchmark.py -o "$output" --tests "$tests" "${model[@]}" || benchmark=$?
[ $benchmark -eq 0 ] || echo "FAILED: the benchmark ended with $benchmark"
exit $((tests != 0 || benchmark != 0))
