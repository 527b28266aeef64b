# `make solve` and `make test` do all the set-up on a machine with Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INTEROP := tests/interop/requirements
PROJECT := pyproject.toml constraints.txt smelt_budget/__init__.py

.PHONY: solve kernels test lint types interop docs bench gpu clean

solve: .venv/has-package
	$(BIN)/smelt-budget solve --baseline examples/base.yaml

# Compiles for every architecture; without it the first use compiles for the GPU that is there.
kernels: .venv/has-package
	command -v nvcc > /dev/null || test -x /usr/local/cuda/bin/nvcc || $(PIP) -e '.[cuda]'
	$(BIN)/python kernels/build.py

# Without the trainers, which have environments of their own: make interop.
test: .venv/has-test
	$(BIN)/python -m pytest -n auto $(addprefix --ignore=tests/interop/,$(sort $(shell sed -n 's/^# tests: //p' $(INTEROP)/*.txt)))

lint: .venv/has-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/has-dev
	$(BIN)/pyright

# The real trainers, each in an environment of its own: NAME.txt pins it, its first line names its tests. What says
# "# on demand" is left to `make interop-NAME`; "# python: 3.12" says which interpreter, "# alone: PACKAGE" what is
# installed without what it asks for.
OTHERS := -m pip install --quiet --disable-pip-version-check
COMMON := -c constraints.txt torch numpy scipy sympy pydantic ruamel.yaml safetensors pytest pytest-xdist
interop:
	@failed=0; for file in $$(grep -L '^# on demand' $(INTEROP)/*.txt); do \
	  $(MAKE) --no-print-directory interop-$$(basename $$file .txt) || failed=1; \
	done; $(PYTHON) tests/interop/summary.py && exit $$failed

interop-%: .venv-interop/%/ready
	.venv-interop/$*/bin/python -m pytest -q -n auto --junitxml=.venv-interop/$*.xml \
	  $(addprefix tests/interop/,$(shell sed -n 's/^# tests: //p' $(INTEROP)/$*.txt))

.venv-interop/base/ready: constraints.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(OTHERS) $(COMMON)
	touch $@

# A copy of the base, by hard links: what is common is installed once, and pip replaces files, it does not write into them.
.PRECIOUS: .venv-interop/%/ready
.venv-interop/%/ready: $(INTEROP)/%.txt .venv-interop/base/ready
	rm -rf $(@D) .venv-interop/$*.xml
	version=$$(sed -n 's/^# python: //p' $<); if test -n "$$version"; \
	  then "python$$version" -m venv $(@D) && $(@D)/bin/python $(OTHERS) $(COMMON); \
	  else cp -al .venv-interop/base $(@D) && rm $@; fi
	$(@D)/bin/python $(OTHERS) --no-compile -r $<
	$(if $(shell sed -n 's/^# alone: //p' $<),$(@D)/bin/python $(OTHERS) --no-deps --no-compile $(shell sed -n 's/^# alone: //p' $<))
	$(@D)/bin/python $(OTHERS) --no-deps -e .
	touch $@

docs: .venv/has-package
	$(BIN)/python docs/generate.py

bench: .venv/has-bench
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/against_optimisers.py
	$(BIN)/python benchmarks/law_fit.py

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
	touch $@

.venv/has-dev: .venv/has-test
	$(PIP) -e '.[test,dev]'
	touch $@

.venv/has-bench: .venv/has-package
	$(PIP) -e '.[bench]'
	touch $@

clean:
	rm -rf .venv .venv-interop .pytest_cache .hypothesis .ruff_cache dist
