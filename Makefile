# Each target creates the virtual environment it needs; nothing else has to be set up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test check format benchmarks lock clean

help:  ## show what each target does
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

demo: $(VENV)/installed  ## prune the embedded digits network with three methods, calibration labels right and wrong
	$(BIN)/swap-prune demo --out demo-output --overwrite

test: $(VENV)/installed check  ## lint, type-check and run the tests
	$(BIN)/pytest

check: $(VENV)/installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed  ## format and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmarks: $(VENV)/installed  ## speed, ablations and robustness, as JSON (hours)
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.sample_complexity
	$(BIN)/python -m benchmarks.closed_form
	$(BIN)/python -m benchmarks.choices --sparsity 0.95 --seeds 2
	$(BIN)/python -m benchmarks.chita_rows
	$(BIN)/python -m benchmarks.published_network
	$(BIN)/python -m benchmarks.few_images --sparsities 0.9 0.95
	$(BIN)/python -m benchmarks.small_networks
	$(BIN)/python -m benchmarks.audit --networks mlpnet resnet20
	$(BIN)/python -m benchmarks.robustness --networks mlpnet --seeds 10
	$(BIN)/python -m benchmarks.ewr_time --samples-per-row 1 --repeats 3

clean:  ## remove the virtual environment and what the demo wrote
	rm -rf $(VENV) demo-output

lock:  ## pin anew what pyproject.toml asks for, from a fresh environment
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet torch==2.13.0 setuptools
	.venv-lock/bin/pip install --quiet --no-build-isolation -e '.[demo,test]'
	echo "# Every package of the development environment, pinned. Made from a fresh environment with: make lock" > requirements.lock
	.venv-lock/bin/pip freeze --all --exclude pip --exclude-editable | sed 's/+cpu//; / @ /d' >> requirements.lock
	rm -rf .venv-lock
