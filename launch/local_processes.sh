#!/usr/bin/env bash
# Trains in two processes of two CPU devices each on this machine: what many hosts do, without them.
# Needs: the project installed (pip install -e .) for the `python` in PATH, and bash 4.3.
#   launch/local_processes.sh experiments/quickstart.yaml [key=value ...]
set -euo pipefail
config=${1:?give a config file}
shift
export JAX_PLATFORMS=cpu XLA_FLAGS="--xla_force_host_platform_device_count=2"
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
processes=()
# Whichever way this ends, both write a checkpoint if they can, and nothing stays behind.
trap 'kill "${processes[@]}" 2> /dev/null || true; wait' EXIT
for number in 0 1; do
  python -m recjax.train --config "$config" --coordinator "127.0.0.1:$port" --processes 2 --process_id "$number" "$@" &
  processes+=($!)
done
# The first to fail ends the run.
wait -n
wait -n
