#!/usr/bin/env bash
# Trains on all NVIDIA GPUs of one host, one or several, in one process.
# Needs: Python 3.11 or newer, a CUDA 13 driver; run it from the repository's root.
#   launch/gpu_host.sh experiments/quickstart.yaml [key=value ...]
# How GPUs share the work is the config's mesh: mesh.fsdp=-1 splits weights and optimizer over all of them.
set -euo pipefail
config=${1:?give a config file}
shift
python3 -m venv .venv
# shellcheck source=/dev/null
. .venv/bin/activate
pip install --quiet -e ".[cuda]"
python -c 'import jax; assert jax.default_backend() == "gpu", f"JAX sees no GPU, only {jax.devices()}"'
exec python -m recjax.train --config "$config" "$@"
