#!/usr/bin/env bash
# tune.sh BUNDLE [options of tune]: find the fastest setting of BUNDLE on this machine for the prompts beside this file.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}") bundle=$1
shift

# Threads, lanes, modes and limits beside plain decoding; what is faster beyond doubt is kept in the bundle.
wavekit tune "$bundle" --prompts "$here/prompts.jsonl" "$@"

# From now on `wavekit.load`, `generate` and `serve` open it so, on this machine, where they are told neither threads
# nor lanes.
wavekit inspect "$bundle" | grep -A 3 "^tuned for" || echo "plain decoding with all cores stays"
wavekit generate "$bundle" "The quick brown fox" --max-new-tokens 24 --stats
