# Trains on NVIDIA GPUs. Needs a CUDA 13 driver and the NVIDIA container toolkit on the host; CUDA itself comes from pip.
#   docker build -f launch/cuda.Dockerfile -t recjax-cuda .
#   docker run --stop-timeout 600 --gpus all --shm-size 8g -v "$PWD/runs:/recjax/runs" recjax-cuda --config experiments/quickstart.yaml
# After `docker stop` the run has 600 s to write a checkpoint; Docker's default is 10 s.
FROM python:3.12-slim-bookworm
WORKDIR /recjax
COPY setup.py pyproject.toml README.md LICENSE ./
COPY recjax recjax
COPY experiments experiments
RUN pip install --no-cache-dir -e ".[cuda]"
ENTRYPOINT ["python", "-m", "recjax.train"]
