#!/usr/bin/env bash
# Runs in an image of trainers, on one GPU: distca doctor, then a short training whose every step is
# compared with local attention, served by a node and in place. DEVICE=cpu tries it without a GPU.
set -euo pipefail

device="${DEVICE:-cuda}"
work="$(mktemp --directory)"
shape=8:2:64:bfloat16
node_device="${device/%cuda/cuda:0}"

distca doctor --device="${node_device}" --shape="${shape}" --data-host=127.0.0.1 --one-host

# Ends what the script has started, however it ends.
trap 'jobs -p | xargs --no-run-if-empty kill 2>/dev/null; wait' EXIT
distca control-plane --listen=127.0.0.1:7700 &
distca attention-node --control-plane=127.0.0.1:7700 --device="${node_device}" --shape="${shape}" \
    --data-host=127.0.0.1 --one-host --connect-seconds=180 --address-file="${work}/node.json" &
for _ in {1..300}; do
    [[ -e "${work}/node.json" ]] && break
    # A process that has ended would be waited for in vain.
    [[ "$(jobs -pr | wc -l)" = 2 ]] || { echo "smoke: control plane or node has ended" >&2; exit 1; }
    sleep 1
done

torchrun --nproc-per-node=1 --module distca train --control-plane=127.0.0.1:7700 \
    --device="${device}" --placement=mixed --one-host --run-dir="${work}/smoke" --verify --steps=3 \
    --dtype=bfloat16 --hidden-size=512 --heads=8 --kv-heads=2 --layers=2 --tokens-per-rank=2048
echo "smoke: ${device} passed"
