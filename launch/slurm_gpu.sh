#!/usr/bin/env bash
# Trains on GPUs of several nodes under SLURM: one process a GPU, which JAX finds by SLURM's variables.
# Needs: an environment with the project, pip install -e ".[cuda]", in .venv, and an `output`, both on a file system
#   that all nodes see; nodes with a CUDA 13 driver. Set --nodes and both 8s to the GPUs of a node; submit it from
#   the repository's root:
#   sbatch launch/slurm_gpu.sh experiments/gsm8k/sync_interval.yaml mesh.fsdp=-1 [key=value ...]
# A job that was requeued goes on from its newest checkpoint. 10 minutes before its time limit a job gets SIGTERM, writes
# a checkpoint and ends; submit it again to go on.
#SBATCH --job-name=recjax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail
config=${1:?give a config file}
shift
# shellcheck source=/dev/null
. .venv/bin/activate
# A process that fails must take the others down, or they would wait for it.
exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  python -m recjax.train --config "$config" "$@"
