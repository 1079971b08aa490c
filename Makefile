# Everything runs in .venv, made on the first call from the pinned versions in constraints.txt.
#   make test     set-up, every check, the default suite   (PYTEST_ARGS="-k rendezvous" narrows it)
#   make lint     ruff, mypy, import contracts
#   make kubernetes  etcd and kube-apiserver for the tests, built once, about 5 minutes
#   make soak     the tests that run for minutes to hours
#   make bench    the benchmarks                            (BENCH_ARGS)
#   make demo     a job that loses ranks, and goes on       (DEMO_ARGS)
#   make demo-k8s  an ElasticJob on an API server and pods of this machine, through faults; as root
#   make protos   generate proto/*_pb2* again
#   make crd      write the CRD, k8s/manifests and docs/elasticjob.md again
#   make clean    remove .venv and every cache
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
# -qq: errors only; the stamp is taken under a lock, so that two calls of make may run at once.
PIP := $(PY) -m pip --disable-pip-version-check install -qq -c constraints.txt

.PHONY: test lint unit kubernetes soak bench demo demo-k8s protos crd clean venv
.DELETE_ON_ERROR:

test: unit

unit: lint kubernetes
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

# Where it cannot be had, its tests are skipped; in CI that is a failure.
kubernetes: $(STAMP)
	$(PY) -m scripts.kubernetes.assets

soak: $(STAMP)
	$(PY) -m pytest -m soak --timeout 0 $(PYTEST_ARGS)

bench: $(STAMP)
	$(PY) -m benchmarks $(BENCH_ARGS)

demo: $(STAMP)
	$(PY) scripts/demo.py $(DEMO_ARGS)

demo-k8s: kubernetes
	$(PY) -m scripts.demo_k8s

protos: $(STAMP)
	$(PY) -m scripts.protos

crd: $(STAMP)
	$(PY) -m elastic.k8s.crd
	$(PY) -m scripts.kubernetes.manifests

venv: $(STAMP)

# torch first and alone, so that what comes after finds it and does not choose a build of its own.
$(STAMP): constraints.txt pyproject.toml setup.py
	@exec 9<Makefile && flock 9 && \
	if [ ! -e $@ ] || [ -n "$$(find $^ -newer $@)" ]; then \
	  echo "setting up $(VENV)" && \
	  $(PYTHON) -m venv $(VENV) && \
	  $(PIP) pip setuptools && \
	  $(PIP) torch && \
	  $(PIP) --no-build-isolation --group dev -e '.[train,k8s]' && \
	  touch $@; \
	fi

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache .grimp_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
