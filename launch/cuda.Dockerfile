# Trains on NVIDIA GPUs. Needs a CUDA 13 driver and the NVIDIA container toolkit on the host; CUDA itself comes from pip.
#   docker build -f launch/cuda.Dockerfile -t recjax-cuda .
#   docker run --gpus all --shm-size 8g -v "$PWD/runs:/recjax/runs" recjax-cuda --config experiments/quickstart.yaml
FROM python:3.12-slim-bookworm
WORKDIR /recjax
COPY setup.py pyproject.toml README.md LICENSE ./
COPY recjax recjax
COPY experiments experiments
RUN pip install --no-cache-dir -e ".[cuda]"
ENTRYPOINT ["python", "-m", "recjax.train"]
