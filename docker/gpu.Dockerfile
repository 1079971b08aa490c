# Training on GPUs: each worker's image, and good for operator and masters, too.
#
#   docker build -f docker/gpu.Dockerfile -t elastic-runtime:gpu .
#
# BASE has CUDA, NCCL and torch for the cluster's driver; what it has is kept, and Elastic with all else
# that it needs is added beside it.
ARG PYTHON=3.13-slim-bookworm
ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-runtime
FROM python:${PYTHON} AS built
WORKDIR /source
COPY . .
RUN pip wheel --no-deps --wheel-dir /wheel .

FROM ${BASE}
COPY constraints.txt /tmp/constraints.txt
COPY --from=built /wheel /wheel
# every pin but torch's: the base decides that one
RUN grep -v '^torch==' /tmp/constraints.txt > /tmp/pins.txt \
 && pip install --no-cache-dir -c /tmp/pins.txt "$(ls /wheel/*.whl)[k8s,train]" \
 && rm -r /wheel /tmp/constraints.txt /tmp/pins.txt \
 && useradd --uid 65532 --create-home elastic
COPY examples /opt/elastic/examples
WORKDIR /opt/elastic
USER 65532:65532
CMD ["elastic-run", "--help"]
