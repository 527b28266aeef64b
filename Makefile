# `make solve` and `make test` do all the set-up on a machine with Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PROJECT := pyproject.toml constraints.txt smelt_budget/__init__.py

.PHONY: solve kernels test lint types docs bench gpu clean

solve: .venv/has-package
	$(BIN)/smelt-budget solve --baseline examples/base.yaml

# Compiles for every architecture; without it the first use compiles for the GPU that is there.
kernels: .venv/has-package
	command -v nvcc > /dev/null || test -x /usr/local/cuda/bin/nvcc || $(PIP) -e '.[cuda]'
	$(BIN)/python kernels/build.py

test: .venv/has-test
	$(BIN)/python -m pytest -n auto

lint: .venv/has-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/has-dev
	$(BIN)/pyright

docs: .venv/has-package
	$(BIN)/python docs/generate.py

bench: .venv/has-bench
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/against_optimisers.py

# Nothing is installed: the torch that sees the GPU, of .venv or of PYTHON. Results are in build/gpu.
gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) kernels/bench/gpu.py

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/has-package: .venv/bin/python $(PROJECT)
	$(PIP) -e .
	touch $@

.venv/has-test: .venv/has-package
	$(PIP) -e '.[test]'
	-$(PIP) --no-deps --only-binary :all: megatron-core==0.16.1
	touch $@

.venv/has-dev: .venv/has-test
	$(PIP) -e '.[test,dev]'
	touch $@

.venv/has-bench: .venv/has-package
	$(PIP) -e '.[bench]'
	touch $@

clean:
	rm -rf .venv .pytest_cache .hypothesis .ruff_cache dist
