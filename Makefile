# `make demo` and `make test` set everything up by themselves, in .venv.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
# Without an NVIDIA GPU a CPU build is asked for first: the default build fetches gigabytes of CUDA.
CPU_BUILD := $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && [ ! -e /dev/nvidia0 ] && \
	! command -v nvidia-smi >/dev/null && echo +cpu)
# What pip installs as torch: another version, or a requirement with pip options such as an index of CPU builds.
TORCH ?= torch==2.13.0$(CPU_BUILD)
# Of two processors: a third of what tests of servers and of ranks take is waiting for processes and for clocks. With
# three workers, the long files last, the processors stood still for a quarter of a run.
WORKERS ?= 4
TESTS ?= tests
ARGS ?=
SOURCE ?=

BIN := $(VENV)/bin
ROOTS := src/fastlayers models/fastlayers_models server/fastlayers_server
CPU_TESTS := not gpu and not multigpu and not slow and not realmodel and not compile
# One thread a worker, and nothing is downloaded; what pytest makes of the tests' files is kept for the next run.
TEST_ENV := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# The tests start about a hundred processes, and each compiles what it imports where PYTHONDONTWRITEBYTECODE is set.
BYTECODE := $(BIN)/python -m compileall -q $(ROOTS)
SETUP := PYTHON='$(PYTHON)' TORCH='$(TORCH)' bash tools/setup_env.sh $(VENV)
SETUP_INPUTS := pyproject.toml constraints.txt tools/setup_env.sh $(VENV)/.torch

export CPU_TESTS WORKERS PYTHON TORCH

.PHONY: help demo serve test test-browser test-compile test-matrix test-oldest test-transformers lint format wheel clean FORCE

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 16
	@echo
	@echo "Variables: TORCH='$(TORCH)' PYTHON=$(PYTHON) WORKERS=$(WORKERS) TESTS=$(TESTS) ARGS='$(ARGS)'"

demo: $(VENV)/.stamp-run  ## set up, then run `fastlayers demo` (ARGS='...' is passed on)
	@$(BIN)/fastlayers demo $(ARGS)

test: $(VENV)/.stamp-dev  ## set up, then run the tests that need no GPU (TESTS=..., ARGS='...')
	@$(BYTECODE)
	@$(TEST_ENV) TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "$(CPU_TESTS)" -n $(WORKERS) --dist loadfile $(TESTS) $(ARGS)

serve: $(VENV)/.stamp-serve  ## set up, then serve the tiny model (ARGS='--port 8001' is passed on)
	@$(BIN)/fastlayers serve $(ARGS)

test-browser: $(VENV)/.stamp-dev  ## the page in a headless Chromium, where one is installed
	@$(TEST_ENV) $(BIN)/python -m pytest -rs tests/server/front/test_page.py $(ARGS)

test-compile: $(VENV)/.stamp-dev  ## compile every Triton kernel for sm_90, one launch of each for other cards, without a GPU
	@TRITON_INTERPRET=0 $(TEST_ENV) $(BIN)/python -m pytest -m compile -n $(WORKERS) tests/compile $(ARGS)

test-matrix: $(VENV)/.stamp-dev  ## newest triton, oldest and newest transformers, stubbed kernel packages (COLUMNS='...')
	@$(TEST_ENV) bash tools/test_matrix.sh $(VENV) "$(TESTS)" $(COLUMNS)

test-transformers: $(VENV)/.stamp-dev  ## transformers' own tests on patched models (SOURCE=checkout of the installed tag)
	@$(TEST_ENV) bash tools/test_transformers.sh $(VENV) "$(SOURCE)" $(ARGS)

test-oldest: $(VENV)/.stamp-dev  ## tests that lean on the standard library, under the oldest Python here
	@$(BYTECODE)
	@$(TEST_ENV) TRITON_INTERPRET=1 bash tools/test_oldest.sh $(VENV)

lint: $(VENV)/.stamp-dev  ## ruff and mypy
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted; run: make format"; $(BIN)/ruff format --check .; }
	@$(BIN)/mypy $(ROOTS) benchmarks tools

format: $(VENV)/.stamp-dev  ## ruff format, and the fixes that ruff knows
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

wheel: $(VENV)/.stamp-run  ## build dist/fastlayers-*.whl
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls -l dist/*.whl

clean:  ## remove the environments, caches and builds
	rm -rf $(VENV) $(VENV)-oldest .venv-matrix dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(wildcard src models server tests benchmarks tools) -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-run: $(SETUP_INPUTS)
	@$(SETUP)
	@touch $@

$(VENV)/.stamp-serve: $(SETUP_INPUTS)
	@$(SETUP) server
	@touch $(VENV)/.stamp-run $@

$(VENV)/.stamp-dev: $(SETUP_INPUTS)
	@$(SETUP) dev,server
	@touch $(VENV)/.stamp-run $(VENV)/.stamp-serve $@

# Rewritten only when TORCH changes, so that another value sets up again and the same one does not.
$(VENV)/.torch: FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@
