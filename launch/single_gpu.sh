#!/usr/bin/env bash
# Trains on one NVIDIA GPU. Needs Python 3.12 or newer and a CUDA 13 driver; run it from the repository's root.
#   launch/single_gpu.sh experiments/quickstart.yaml [key=value ...]
set -euo pipefail
config=${1:?give a config file}
shift
python3 -m venv .venv
. .venv/bin/activate
pip install --quiet -e ".[cuda]"
python -c 'import jax; assert jax.default_backend() == "gpu", f"JAX sees no GPU, only {jax.devices()}"'
exec python -m recjax.train --config "$config" "$@"
