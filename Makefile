# `make demo` and `make test` prepare everything they need; run `make help` for the rest.
# Needs a Python >= 3.11 (with venv) on PATH and a package index that pip can reach.

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
ENV_STAMP := $(VENV)/.ready
MODEL := .cache/smollm2
RECIPE ?= mxfp8
PYTEST := $(PY) -m pytest
# What pip installs; CI has it check hashes: --require-hashes --no-deps -r requirements/hashes.txt
REQUIREMENTS ?= -r requirements/cpu.txt

.PHONY: help demo test lint unit wheel integration pages env model lock clean

help:
	@echo "make demo [RECIPE=mxfp8|nvfp4|kvfp4|mxfp4|mxfp8-nvfp4|bf16]  a real model answers, first with RECIPE"
	@echo "make test         lint, unit, wheel and integration"
	@echo "make lint         ruff and mypy"
	@echo "make unit         formats, kernels (interpreted) and plugin, without a running engine"
	@echo "make wheel        the built wheel in a fresh environment"
	@echo "make integration  the real engine with a real model"
	@echo "make pages        write the documents' tables and pictures from committed results"
	@echo "make env | model  only prepare the environment | the model"
	@echo "make lock         write requirements/lock.txt and hashes.txt from the environment"
	@echo "make clean        remove everything that make made"

demo: model
	$(PY) -m integration.demo --recipe $(RECIPE)

test: lint unit wheel integration

lint: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy integration

# A process for each core, a file in each: interpreted kernels use one thread, torch would use all.
unit: env
	OMP_NUM_THREADS=1 $(PYTEST) tests --ignore=tests/test_package.py -n auto --dist loadfile

wheel: env
	$(PYTEST) tests/test_package.py

integration: model
	$(PYTEST) integration

pages: env
	$(PY) -m integration.pages

env: $(ENV_STAMP)

$(ENV_STAMP): pyproject.toml requirements/cpu.txt requirements/lock.txt requirements/hashes.txt
	@python=; for name in python3 python3.12 python3.11 python3.13; do \
	  if $$name -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "no Python >= 3.11 with venv on PATH" >&2; exit 1; fi; \
	[ -x $(PY) ] || $$python -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(REQUIREMENTS)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

model: $(MODEL)/config.json

$(MODEL)/config.json: | env
	$(PY) -m integration.model --out $(MODEL)

lock: env
	{ head -2 requirements/lock.txt; \
	  $(PY) -m pip freeze --all --exclude pip --exclude-editable; } > requirements/lock.txt.new
	mv requirements/lock.txt.new requirements/lock.txt
	$(PY) requirements/hashes.py requirements/lock.txt > requirements/hashes.txt.new
	mv requirements/hashes.txt.new requirements/hashes.txt

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
