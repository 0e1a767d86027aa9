#!/usr/bin/env bash
# Runs in an image of trainers, on one GPU: distca doctor, then a short training whose every step is
# compared with local attention, served by a node and in place. DEVICE=cpu tries it without a GPU.
set -euo pipefail

device="${DEVICE:-cuda}"
work="$(mktemp --directory)"
# On a CPU PyTorch sums the gradients of embeddings in bfloat16, which is wrong by more than --verify allows.
dtype=bfloat16
[[ "${device}" == cuda* ]] || dtype=float32
shape="8:2:64:${dtype}"
node_device="${device/%cuda/cuda:0}"

distca doctor --device="${node_device}" --shape="${shape}" --data-host=127.0.0.1 --one-host

# Ends what the script has started, however it ends.
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT

# start NAME ARGUMENTS: in the background, until it serves; the first control plane compiles the planner.
start() {
    distca "${@:2}" --address-file="${work}/$1.json" &
    local pid=$!
    for _ in {1..600}; do
        [[ ! -e "${work}/$1.json" ]] || return 0
        kill -0 "${pid}" 2>/dev/null || { echo "smoke: $1 has ended" >&2; return 1; }
        sleep 1
    done
    echo "smoke: $1 does not serve after 600 s" >&2
    return 1
}

start control-plane control-plane --listen=127.0.0.1:7700
start node attention-node --control-plane=127.0.0.1:7700 --device="${node_device}" \
    --shape="${shape}" --data-host=127.0.0.1 --one-host

torchrun --nproc-per-node=1 --module distca train --control-plane=127.0.0.1:7700 \
    --device="${device}" --placement=mixed --one-host --run-dir="${work}/smoke" --verify --steps=3 \
    --dtype="${dtype}" --hidden-size=512 --heads=8 --kv-heads=2 --layers=2 --tokens-per-rank=2048
echo "smoke: ${device} passed"
