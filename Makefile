# Everything a developer runs. Needs Python 3.11+ with its venv module, and make; no root.
#   make demo    the system at work: one base model, several adapters, one batch, in the terminal
#   make test    the tests
# PYTHON=python3.12 chooses the interpreter of a new .venv.

PYTHON ?= python3
VENV := .venv
STUBS_VENV := .venv-stubs
DEPLOY_VENV := .venv-deploy
CLIENTS_VENVS := .venv-clients
BIN := $(abspath $(VENV))/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
PYTEST_ARGS ?= -n 2
TESTS ?= tests
MINUTES ?= 60
ROUNDS ?= 1000
SECONDS ?= 3600
MODULES ?= control_plane/scheduler/memory/block_pool.py
MUTANTS ?= 20
SEED ?= 0

# The server runs from the checkout; child processes find motet and redis-server in the environment.
export PATH := $(BIN):$(PATH)
export PYTHONPATH := $(CURDIR):$(CURDIR)/client
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-dev setup-bench test demo bench lint type check-stubs stubs format dist check-deploy check-clients check-monitoring manifests monitoring sdk-reference adapter-fields check gpu-check soak faults kills churn mutate clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 22

# ---- environments: one stamp file per finished step ----

$(VENV)/.stamp-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Motet needs Python 3.11 or newer; '$(PYTHON)' is older. Try: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
	  || { echo "$(PYTHON) has no venv module. On Debian: apt-get install python3-venv"; exit 1; }
	@echo "== creating $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "pip==26.3"
	@touch $@

# torch alone and first, so that no other package decides which build of it is taken.
$(VENV)/.stamp-torch: $(VENV)/.stamp-python
	@echo "== installing torch (the largest download)"
	$(PIP) install "torch==2.13.0"
	@touch $@

# A CUDA build of torch brings the triton that it was made with, and keeps it. A CPU build brings none: the tests then
# run the GPU kernels in triton's interpreter. On platforms that it has no package for those tests are left out.
$(VENV)/.stamp-triton: $(VENV)/.stamp-torch
	@$(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)' \
	  || $(PIP) install 'triton==3.6.0; platform_system == "Linux" and platform_machine == "x86_64"'
	@touch $@

$(VENV)/.stamp-server: $(VENV)/.stamp-triton pyproject.toml constraints.txt client/pyproject.toml
	@echo "== installing the server, the demo and the tests' needs"
	$(PIP) install -c constraints.txt --group dev
	$(PIP) install -c constraints.txt --build-constraint constraints.txt --editable client
	@$(PY) .ci/embedded_redis.py
	@touch $@

$(VENV)/.stamp-lint: $(VENV)/.stamp-server
	$(PIP) install -c constraints.txt --group lint
	@touch $@

$(VENV)/.stamp-bench: $(VENV)/.stamp-server
	$(PIP) install -c constraints.txt --group bench
	@touch $@

$(STUBS_VENV)/.stamp:
	$(PYTHON) -m venv $(STUBS_VENV)
	$(STUBS_VENV)/bin/python -m pip --disable-pip-version-check install \
	  "grpcio-tools==1.74.0" "grpcio==1.85.1" "protobuf==6.33.6" "googleapis-common-protos==1.76.0"
	@touch $@

$(DEPLOY_VENV)/.stamp: deploy/requirements.txt
	$(PYTHON) -m venv $(DEPLOY_VENV)
	$(DEPLOY_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r deploy/requirements.txt
	@touch $@

setup: $(VENV)/.stamp-server  ## the environment of the server, the demo and the tests
	@$(PY) -c 'from kernels.native.compiler import tell_missing_compiler; tell_missing_compiler()'

setup-dev: $(VENV)/.stamp-lint  ## the same, and the linters

setup-bench: $(VENV)/.stamp-bench  ## the same, and what the benchmarks draw with

# ---- running ----

demo: setup  ## train a small model and its adapters (once), then serve them side by side
	$(PY) -m benchmarks.demo

test: setup  ## every test but those that need a GPU; TESTS=path and PYTEST_ARGS=... narrow it
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m pytest -m "not gpu" $(PYTEST_ARGS) $(TESTS)

bench: setup-bench  ## a short serving benchmark; BENCH_ARGS=... for another
	$(PY) -m benchmarks.serving.run $(BENCH_ARGS)

soak: setup  ## faults, bad inputs, relations and steady traffic for MINUTES=60, by SEED=0; a verdict at the end
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m tests.hostile.soak --minutes $(MINUTES) --seed $(SEED)

faults: setup  ## ROUNDS=1000 rounds of faults under load, by SEED=0; a table and a verdict at the end
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m tests.hostile.faults --rounds $(ROUNDS) --seed $(SEED)

kills: setup  ## ROUNDS=1000 kills of a registry at random moments, by SEED=0; what was acknowledged has to be there
	OMP_NUM_THREADS=1 $(PY) -m tests.hostile.kills --rounds $(ROUNDS) --seed $(SEED)

churn: setup  ## adapters of all kinds come, go and move for SECONDS=3600, by SEED=0 (odd: no experts); compared with PEFT
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -W ignore -m tests.hostile.churn --seconds $(SECONDS) --seed $(SEED)

mutate: setup  ## small faults in MODULES="a.py b.py", MUTANTS=20 of each by SEED=0; names those that no test notices
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) .ci/mutate.py $(MODULES) --mutants $(MUTANTS) --seed $(SEED)

gpu-check:  ## on a CUDA machine with its own torch: kernels and a small generation on the GPU
	OMP_NUM_THREADS=4 $(PYTHON) .ci/gpu_check.py

# ---- checks ----

lint: setup-dev  ## ruff, the import contracts, the protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(PY) .ci/lint_protos.py

dist: setup  ## the wheels motet, motet-contract, motet-server and motet-worker in dist/, the same bytes for the same commit
	$(PY) deploy/wheels/build.py

format: setup-dev  ## let ruff and buf rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format -w protos/motet

type: setup-dev  ## mypy, strict; tests, examples/ and the programs of README.md too
	$(BIN)/mypy contract control_plane data_plane gateway kernels client/motet benchmarks deploy examples tests
	$(PY) .ci/readme_types.py

stubs: $(STUBS_VENV)/.stamp  ## regenerate the stubs from protos/, and protos/google
	PYTHONPATH= $(STUBS_VENV)/bin/python protos/generate.py

check-stubs: $(STUBS_VENV)/.stamp  ## fail if the stubs or protos/google are out of date
	PYTHONPATH= $(STUBS_VENV)/bin/python protos/generate.py --check

sdk-reference: setup  ## write docs/sdk.md anew from the SDK's docstrings
	$(PY) .ci/sdk_reference.py

adapter-fields: setup  ## write the lists in docs/adapters.md anew from the tables of fields and kinds
	$(PY) .ci/adapter_fields.py

check-deploy: $(DEPLOY_VENV)/.stamp  ## check images, manifests, chart and units in deploy/
	PATH="$(abspath $(DEPLOY_VENV))/bin:$$PATH" PYTHONPATH= $(DEPLOY_VENV)/bin/python deploy/check.py

check-clients: setup  ## other people's clients of OpenAI's API against a gateway, each in an environment of its own; needs npm
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m tests.clients.check --environments $(CLIENTS_VENVS)

check-monitoring: setup  ## every query of the dashboards and alerts on a live system; needs prometheus
	OMP_NUM_THREADS=1 $(PY) -m deploy.monitoring.check

monitoring: setup  ## write the dashboards and rules in deploy/monitoring/ anew
	$(PY) -m deploy.monitoring.generate

manifests: $(DEPLOY_VENV)/.stamp  ## render deploy/kubernetes/motet.yaml from the chart
	PATH="$(abspath $(DEPLOY_VENV))/bin:$$PATH" PYTHONPATH= $(DEPLOY_VENV)/bin/python deploy/check.py --write

check: lint type check-stubs check-deploy test  ## all of it

clean:  ## remove environments, caches and the demo's model
	rm -rf $(VENV) $(STUBS_VENV) $(DEPLOY_VENV) $(CLIENTS_VENVS) .motet .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
