#!/usr/bin/env bash
# Trains on all hosts of a TPU slice; each runs the same command, and JAX finds the others by itself.
# Needs: gcloud, logged in, with a project; a slice that runs, such as the one that this makes:
#     gcloud compute tpus tpu-vm create NAME --zone ZONE --accelerator-type v5litepod-16 --version v2-alpha-tpuv5-lite
#   Python 3.11 or newer on its hosts; an `output` that all of them see, such as a mounted Filestore or bucket;
#   what is to run, committed: HEAD is copied. Run it from the repository's root.
#   TPU=NAME ZONE=us-west4-a launch/tpu_pod.sh experiments/gsm8k/sync_interval.yaml output=/mnt/shared/run [key=value ...]
# Given again, it copies HEAD again and goes on from the newest checkpoint. A preempted TPU has 30 s for a checkpoint.
set -euo pipefail
: "${TPU:?give the name of the TPU VM as TPU}" "${ZONE:?give its zone as ZONE}"
config=${1:?give a config file}
archive=$(mktemp --suffix=.tar.gz)
trap 'rm -f "$archive"' EXIT
git archive --format=tar.gz --output="$archive" HEAD
gcloud compute tpus tpu-vm scp "$archive" "$TPU:recjax.tar.gz" --zone="$ZONE" --worker=all
printf -v arguments ' %q' --config "$config" "${@:2}"
gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="
  set -eu
  mkdir -p recjax && tar -xzf recjax.tar.gz -C recjax && cd recjax
  python3 -m venv .venv && . .venv/bin/activate
  pip install --quiet -e '.[tpu]'
  python -m recjax.train$arguments"
