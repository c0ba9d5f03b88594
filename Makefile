# HyDra-CP. `make help` lists what there is; every target sets up what it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.DEFAULT_GOAL := help

##@ Run

.PHONY: run
run: setup ## Start the scheduler and train a small model through it (ARGS="--exit" stops after the summary)
	$(BIN)/hydra-cp quickstart $(ARGS)

##@ Develop

.PHONY: setup
setup: $(VENV)/.ready ## Make .venv with everything that the other targets need

$(VENV)/.ready: pyproject.toml constraints.txt hatch_build.py $(wildcard protos/hydracp/v1/*.proto) $(shell find scheduler_service/dashboard/ui -type f -not -path '*/node_modules/*' 2>/dev/null)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt --group dev -e '.[service,parquet,training]'
	touch $@

.PHONY: browser
browser: ## Install Chromium for the dashboard's tests, if it is missing and this user may
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	  || echo "no chromium, and not allowed to install it: the dashboard's browser tests will be skipped"

.PHONY: test
test: setup browser ## All tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

.PHONY: test-fast
test-fast: setup ## The tests that take seconds
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" $(ARGS)

.PHONY: lint
lint: setup ## ruff, mypy, import contracts, protos
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos

.PHONY: format
format: setup ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What we measure ourselves against lives in a folder of its own: nothing of ours depends on it.
MEGATRON_CORE := 0.16.1
MEGATRON_CORE_AT := build/bench/megatron-core-$(MEGATRON_CORE)
RINGMASTER := 0.2.7
YUNCHANG := 0.6.4
ATTENTION_AT := build/bench/attention-$(RINGMASTER)-$(YUNCHANG)

.PHONY: bench
bench: setup $(MEGATRON_CORE_AT) $(ATTENTION_AT) ## Measure planning and the engine, beside others; JSON and plots in build/bench/ (ARGS=--help lists parts)
	OMP_NUM_THREADS=1 PYTHONPATH=$(MEGATRON_CORE_AT):$(ATTENTION_AT) $(BIN)/python -W ignore -m tests.benchmarks $(ARGS)

$(MEGATRON_CORE_AT): | setup
	-$(BIN)/python -m pip install --quiet --no-deps --target $@.part megatron-core==$(MEGATRON_CORE) && mv $@.part $@

$(ATTENTION_AT): | setup
	-$(BIN)/python -m pip install --quiet --no-deps --target $@.part axolotl-ringmaster==$(RINGMASTER) yunchang==$(YUNCHANG) && mv $@.part $@

.PHONY: parity
parity: setup ## Train the reference model for 1,000 iterations by the plans of each policy, and compare (half an hour on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.parity $(ARGS)

.PHONY: gpu-check
gpu-check: setup ## On a machine with a GPU: kernel contract, kernel times, overlap (exit code 2 where there is none)
	$(BIN)/python -m tests.benchmarks.gpu_check

.PHONY: pictures
pictures: setup ## Draw the pictures of docs/planning.md from real plans
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.pictures

.PHONY: fuzz
fuzz: setup ## Put 100,000 random and adversarial batches to every policy (ARGS=--help says which get fewer, and how to choose)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(ARGS)

##@ Build

.PHONY: ui
ui: ## Refresh the dashboard's copy of the REST schema and build it
	test -e $(VENV)/.ready || $(MAKE) setup
	$(BIN)/python -m scheduler_service.api.openapi > scheduler_service/dashboard/ui/openapi.json
	$(MAKE) setup

.PHONY: image
image: ## Build the two container images (needs a Docker engine)
	docker build -f deploy/docker/scheduler.Dockerfile -t hydra-cp-scheduler:$(VERSION) .
	docker build -f deploy/docker/agent.Dockerfile -t hydra-cp-agent:$(VERSION) .

##@ Help

.PHONY: help
help: ## This list
	@awk 'BEGIN {FS = ":.*##"} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*##/ {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
