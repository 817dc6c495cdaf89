# Trains on a TPU VM, or on a GKE node with TPUs. Needs nothing but the TPU; libtpu comes from pip.
#   docker build -f launch/tpu.Dockerfile -t recjax-tpu .
#   docker run --stop-timeout 600 --privileged --net host -v "$PWD/runs:/recjax/runs" recjax-tpu --config experiments/quickstart.yaml
# After `docker stop` the run has 600 s to write a checkpoint; Docker's default is 10 s.
FROM python:3.12-slim-bookworm
WORKDIR /recjax
COPY setup.py pyproject.toml README.md LICENSE ./
COPY recjax recjax
COPY experiments experiments
RUN pip install --no-cache-dir -e ".[tpu]"
ENTRYPOINT ["python", "-m", "recjax.train"]
