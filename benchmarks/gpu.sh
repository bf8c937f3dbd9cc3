#!/usr/bin/env bash
# What a GPU must be asked, in one go: `bash benchmarks/gpu.sh [FOLDER]`, written for one H200 and under 8 minutes there.
# Correctness against the CPU, then time and memory at Qwen3-4B's shapes with random weights. Nothing is downloaded.
# The exit status is 0 when everything passed, 1 when something failed, 2 without a CUDA device.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-.venv/bin/python}"
command -v "$python" > /dev/null || python=python3
folder="${1:-runs/gpu}"
mkdir -p "$folder"
status=0

# run NAME SECONDS COMMAND...: prints and keeps the command's lines; a part that hangs is ended, the others go on.
run() {
    local name="$1" limit="$2" code
    shift 2
    timeout "$limit" "$@" | tee "$folder/$name.jsonl"
    code="${PIPESTATUS[0]}"
    if [ "$code" -eq 2 ] && [ "$name" = checks ]; then exit 2; fi
    if [ "$code" -ne 0 ]; then echo "FAIL: $name ended with $code" >&2 && status=1; fi
}

run checks 190 "$python" benchmarks/cuda_checks.py --device cuda

run decoding 150 "$python" benchmarks/cuda_decoding.py --device cuda

# Time and peak memory of loss stage and step, beside its own matrix products.
run train_step 140 "$python" benchmarks/train_step.py --part step --cases chain,tree --device cuda --dtype bfloat16 \
    --vocab 151936 --hidden 2560 --anchors 512 --chunk 32

[ "$status" -eq 0 ] && echo "PASS: results in $folder" || echo "FAIL: see $folder"
exit "$status"
