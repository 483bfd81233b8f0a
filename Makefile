# Two commands: `make demo` runs the main job and names its report, `make test` passes the tests. Both set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)

.PHONY: help demo test bench lint install install-dev lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, compare placements of 64 H100 in the simulator, name the report"
	@echo "make test    set up, run the tests"
	@echo "make bench   measure the simulator's speed (benchmarks/results.json)"
	@echo "make lint    ruff, mypy, import rules"
	@echo "make clean   remove the virtual environment and run folders"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: requirements.lock pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	@touch $@

install: $(VENV)/.base

install-dev: $(VENV)/.dev

demo: install
	$(BIN)/testbed compare scenarios/examples/placement_64xh100_qwen3_32b.yaml

test: install-dev
	$(BIN)/python -m pytest -x -q -n $(JOBS) --dist loadfile --hypothesis-seed=0

bench: install
	$(BIN)/python -m benchmarks --json benchmarks/results.json

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

lock: install-dev
	$(BIN)/python -m pip install --quiet pip-tools
	for which in base dev; do \
	  out=requirements.lock; extra=; \
	  if [ $$which = dev ]; then out=requirements-dev.lock; extra="--extra dev"; fi; \
	  $(BIN)/pip-compile --quiet --strip-extras --no-header --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
	    --no-annotate $$extra --output-file $$out pyproject.toml; \
	done

clean:
	rm -rf $(VENV) runs build *.egg-info
