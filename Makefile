# `make demo` shows the engine at work, `make test` checks it. Each target installs what it needs.
PYTHON        ?= python3
VENV          := .venv
BIN           := $(VENV)/bin
READY         := $(VENV)/.ready
CLIENTS_READY := $(VENV)/.clients
PIP           := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on
JOBS          ?= 8

# One OpenMP thread per test process: xdist starts a process per core.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=12
XDIST  := -n auto --dist worksteal

# Tests whose bits may depend on the instruction set, and the instruction sets of this CPU for ATen. With its AVX2
# the C++ kernels are built for AVX2, too.
KERNEL_TESTS     := tests/kernels tests/model/test_fused_layer.py tests/model/test_fused_stack.py \
  tests/model/test_native_modules.py tests/verify tests/execute
INSTRUCTION_SETS := default $(shell for isa in avx2 avx512f; do \
  grep -qw $$isa /proc/cpuinfo 2>/dev/null && echo $${isa%f}; done)

.PHONY: help setup demo test test-full test-kernels test-clients test-gpu check format bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## virtual environment and dependencies
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; try: make PYTHON=python3.12 setup"; exit 1; }
	@echo "== setting up $(VENV) (once; torch is the large part)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) 'torch==2.13.0'
	@$(PIP) -e '.[dev]'
	@touch $(READY)

$(CLIENTS_READY): $(READY)
	@echo "== setting up clients (once)"
	@$(PIP) -e '.[dev,clients]'
	@touch $(CLIENTS_READY)

demo: $(READY) ## the embedded model answers, with the same bits each time
	@$(BIN)/samewise demo

test: check ## checks and all tests but the slow ones: about 8 minutes on two cores
	@echo "== tests"
	@$(PYTEST) $(XDIST) -m "not gpu and not slow" --ignore tests/clients

test-full: test-kernels ## the slow tests, and the kernels on each instruction set
	@echo "== slow tests"
	@$(PYTEST) $(XDIST) -m "slow and not gpu and not real" --ignore tests/clients
	@echo "== slow tests of the embedded model, on all threads"
	@$(BIN)/python -m pytest --durations=12 -m "slow and real and not gpu" --ignore tests/clients

test-kernels: $(READY) ## kernel and probe tests on each instruction set, and with portable C++ kernels
	@for isa in $(INSTRUCTION_SETS); do \
	  echo "== kernels, ATen on $$isa"; \
	  if [ $$isa = avx2 ] && command -v c++ >/dev/null; then export CXX="$(CURDIR)/tests/kernels/avx2-c++"; else unset CXX; fi; \
	  ATEN_CPU_CAPABILITY=$$isa $(PYTEST) $(XDIST) -m "not gpu and not slow" $(KERNEL_TESTS) || exit 1; \
	done
	@echo "== kernels, portable C++"
	@SAMEWISE_PORTABLE=1 $(PYTEST) $(XDIST) -m "not gpu and not slow" $(KERNEL_TESTS)

test-clients: $(CLIENTS_READY) ## openai, anthropic, lm-evaluation-harness, schemathesis, TRL against a server; Ray
	@echo "== clients"
	@$(PYTEST) tests/clients tests/scale/test_channel.py

# On a CUDA machine with torch, transformers and pytest: no virtual environment, nothing is installed.
test-gpu: ## the tests marked gpu, one process per file, JOBS=8 at a time
	@set -e; dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; export PYTHONPATH=src; \
	$(PYTHON) -m pytest -q --collect-only -m gpu tests > "$$dir/collected" || { cat "$$dir/collected"; exit 1; }; \
	sed -n 's/::.*//p' "$$dir/collected" | sort -u | \
	  TORCHINDUCTOR_COMPILE_THREADS=2 xargs -P $(JOBS) -I FILE sh -c \
	  'log="$$1/$$$$"; $(PYTHON) -m pytest -q -m gpu FILE > "$$log" 2>&1; code=$$?; \
	   echo "== FILE"; tail -n 40 "$$log"; exit $$code' - "$$dir"

check: $(READY) ## format, lint, types, the order of the packages, their surface
	@echo "== format";  $(BIN)/ruff format --check .
	@echo "== lint";    $(BIN)/ruff check .
	@echo "== types";   $(BIN)/mypy
	@echo "== imports"; $(BIN)/lint-imports
	@echo "== surface"; $(BIN)/python -m pytest -q tests/laws/test_surface.py

format: $(READY) ## format the code and fix what the linter can
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: $(READY) ## time per frame on this machine
	@$(BIN)/python bench/frame.py

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
