# The operator, the masters of jobs, and the demo on CPUs.
#
#   docker build -f docker/cpu.Dockerfile -t elastic-runtime:cpu .
#   docker run --rm elastic-runtime:cpu elasticctl operator --help
#
# TORCH_INDEX: a package index with torch for CPUs alone; without it the image has torch for GPUs, and
# is 5 GB larger.
ARG PYTHON=3.13-slim-bookworm
FROM python:${PYTHON} AS built
WORKDIR /source
COPY . .
RUN pip wheel --no-deps --wheel-dir /wheel .

FROM python:${PYTHON}
ARG TORCH_INDEX=
COPY constraints.txt /tmp/constraints.txt
COPY --from=built /wheel /wheel
# torch first and alone, as in the Makefile: what comes after finds it
RUN pip install --no-cache-dir -c /tmp/constraints.txt ${TORCH_INDEX:+--index-url $TORCH_INDEX} torch \
 && pip install --no-cache-dir -c /tmp/constraints.txt "$(ls /wheel/*.whl)[k8s,train]" \
 && rm -r /wheel /tmp/constraints.txt \
 && useradd --uid 65532 --create-home elastic
COPY examples /opt/elastic/examples
WORKDIR /opt/elastic
USER 65532:65532
CMD ["elasticctl", "operator"]
