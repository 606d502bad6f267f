# Two commands: `make demo` shows what it does, `make test` proves it. Both set up what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
GUESTS := $(VENV)/.clients
JOBS   ?= 8

.PHONY: demo test test-clients check format test-gpu bench clean setup
.DEFAULT_GOAL := help

help: ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## virtual environment and dependencies
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; try: make PYTHON=python3.12 setup"; exit 1; }
	@echo "== setting up $(VENV) (once; torch is the large part)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on 'torch==2.13.0'
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -e '.[dev]'
	@touch $(READY)

demo: $(READY) ## watch the embedded model answer, the same way every time
	@$(BIN)/samewise demo

test: check ## everything that can be proved on this machine
	@echo "== tests"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" --ignore tests/clients -n auto --dist worksteal --durations=12

test-clients: $(GUESTS) ## openai, lm-evaluation-harness and schemathesis against a server process
	@echo "== clients"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clients --durations=12

$(GUESTS): $(READY)
	@echo "== setting up clients (once)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -e '.[dev,clients]'
	@touch $(GUESTS)

check: $(READY) ## format, lint, types, layers
	@echo "== format";  $(BIN)/ruff format --check .
	@echo "== lint";    $(BIN)/ruff check .
	@echo "== types";   $(BIN)/mypy
	@echo "== layers";  $(BIN)/python -m pytest -q tests/laws/test_layers.py

format: $(READY) ## put the code in order
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

test-gpu: ## the laws on a CUDA machine (needs torch, transformers and pytest there); JOBS=8 at once
	@grep -lE "gpu|setup|trial|plain" tests/test_*.py tests/laws/test_*.py | \
	  PYTHONPATH=src TORCHINDUCTOR_COMPILE_THREADS=2 xargs -P $(JOBS) -n 1 sh -c \
	  '$(PYTHON) -m pytest -q -m gpu "$$0" > "/tmp/samewise-gpu-$$$$" 2>&1; code=$$?; \
	   echo "== $$0"; tail -n 40 "/tmp/samewise-gpu-$$$$"; rm -f "/tmp/samewise-gpu-$$$$"; test $$code = 0 -o $$code = 5'

bench: $(READY) ## what a frame costs here
	@$(BIN)/python bench/frame.py

clean: ## forget the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
