#!/usr/bin/env bash
# bring.sh MODEL HEAD FOLDER [options of verify]: a bundle of MODEL with the EAGLE-3 head HEAD, checked, in FOLDER.
set -euo pipefail
model=$1 head=$2 folder=$3
shift 3

# The head may be in any of the formats that `wavekit convert-draft --help` lists.
wavekit export "$model" -o "$folder/bundle" --draft "$head"

# Against the checkpoint in transformers: layers and logits, every mode's texts, and tau in torch beside tau in the engines.
wavekit verify "$folder/bundle" --checkpoint "$model" --draft "$head" -o "$folder/report" "$@"

# The same head for vLLM.
wavekit convert-draft "$head" -o "$folder/for-vllm" --to speculators --target "$model"
