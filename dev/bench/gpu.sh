#!/bin/bash
# Measures all that needs a GPU, the most important first, within 8 minutes. Each part prints as soon
# as it is there and stays in its JSON, also when the rest is cut off.
#
#   PYTHON=python3 SECONDS_MOST=480 dev/bench/gpu.sh [DIRECTORY]
#
# QUICK=1 measures a tiny model, also without a GPU, only to show that it works. That Python needs
# torch with CUDA, safetensors, numpy and prometheus-client, as the image has them.
set -u
cd "$(dirname "$0")/../.."
to=$(realpath -m "${1:-dev/bench/results}")
python=${PYTHON:-python3}
most=${SECONDS_MOST:-480}
export PYTHONPATH=$PWD/contract/src:$PWD/trainer/src:$PWD/tools/src PYTHONUNBUFFERED=1
mkdir -p "$to"
failed=0

part() { # name, command
    local left=$((most - SECONDS))
    echo "== $1: $left of $most s are left"
    [ "$left" -gt 0 ] || { failed=1; return; }
    timeout --kill-after 10 "$left" "${@:2}" 2>&1 | tee "$to/$1.txt"
    local code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || { echo "== $1: exit code $code"; failed=1; }
}

bench() { # part of dev/bench/gpu.py, more options
    part "gpu-$1" "$python" dev/bench/gpu.py --parts "$1" --json "$to/gpu-$1.json" ${QUICK:+--quick} "${@:2}"
}

bench restart --kills "${KILLS:-2}"
bench speed
part gpu-check "$python" -m ddpjob_tools gpu-check --checks 5 --json "$to/gpu-check.json"
bench stall
bench launch --kills 1
exit $failed
