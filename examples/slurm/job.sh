#!/bin/bash
#SBATCH --job-name=distca
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# Trains on the GPUs of all hosts of a job, with a control plane of the job's own. Six of a host's GPUs
# train, and two compute core attention for all: NODES=0 gives all of them to trainers, which then serve
# one another (PLACEMENT=in-place).
set -euo pipefail

NODES=${NODES:-2}
RANKS=${RANKS:-6}
SHAPE=${SHAPE:-32:8:128:bfloat16}
TRAIN=${TRAIN:-train.py}
export DISTCA_PLACEMENT=${PLACEMENT:-mixed}

# On a file system that all hosts share.
address_file=$PWD/distca-$SLURM_JOB_ID.json
export DISTCA_CONTROL_PLANE=file:$address_file
here=(srun --overlap --ntasks-per-node=1)

# Nodes take the last GPUs, trainers the first.
"${here[@]}" --job-name=pool bash -c '
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ] && [ "$1" -gt 0 ]; then
        CUDA_VISIBLE_DEVICES=$(tr , "\n" <<<"$CUDA_VISIBLE_DEVICES" | tail -n "$1" | paste -sd,)
    fi
    exec distca up --address-file "$2" --nodes "$1" --shape "$3"
' up "$NODES" "$address_file" "$SHAPE" &
pool=$!
# Until they have joined.
srun --overlap --nodes=1 --ntasks=1 distca top --once --wait-seconds 600 \
    --expect-servers $((NODES * SLURM_NNODES))

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
status=0
"${here[@]}" torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$RANKS" --rdzv-backend=c10d \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="${RENDEZVOUS:-$first}" $TRAIN || status=$?

# By the step: srun itself would kill at a signal.
scancel --signal=TERM "$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' | awk '$2 == "pool" { print $1 }')"
wait "$pool" || true
exit "$status"
