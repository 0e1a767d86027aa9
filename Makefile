# Everything needs Python 3.11 or newer as python3; the rest is installed into .venv.
#
#   make demo     train with core attention on attention nodes, then in place, both verified
#   make test     all tests
#   make lint     formatting, linter, types
#   make format   formats the code and repairs what the linter can
#   make stubs    generates distca/v1 from proto/
#   make clean    removes what the targets above made, but not the runs

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# On a machine without an NVIDIA GPU a plain requirement of torch would fetch gigabytes of CUDA, so
# the CPU build is installed first. To choose for yourself: make TORCH="torch==2.12.0".
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# UCX comes with wheels for CUDA 12 and 13; both run without a GPU.
EXTRAS ?= trainer,node,ucxx-cu13,dev

# Twelve steps are enough for the loss to fall. Documents may span both trainers, so that the second
# of them holds the expensive ends of long documents. Short pieces cost little on a CPU.
DEMO := --verify --steps 12 --span-ranks --min-backward-tokens 128 --overwrite

.PHONY: help demo test lint format stubs install clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

demo: $(INSTALLED)
	@echo "== 2 trainers and 2 attention nodes: core attention on the nodes"
	@$(BIN)/distca local --mode pool --name demo-pool $(DEMO)
	@echo
	@echo "== 2 trainers: core attention balanced over the trainers themselves"
	@$(BIN)/distca local --mode in-place --name demo-in-place $(DEMO)

test: $(INSTALLED)
	@$(BIN)/python -m pytest $(PYTEST)

lint: $(INSTALLED)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy .

format: $(INSTALLED)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

stubs: $(INSTALLED)
	@$(BIN)/python tools/generate_stubs.py

install: $(INSTALLED)

# Done again whenever pyproject.toml changes.
$(INSTALLED): pyproject.toml
	@echo "== Installing into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit("$(PYTHON) is %d.%d; DistCA needs 3.11 or newer: make PYTHON=..." \
	  % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -c 'import torch; assert (*map(int, torch.__version__.split(".")[:2]),) >= (2, 11)' \
	  2>/dev/null \
	  || command -v nvidia-smi >/dev/null \
	  || $(BIN)/pip install --quiet --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) "$(TORCH)"
	@$(BIN)/pip install --quiet --editable ".[$(EXTRAS)]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
