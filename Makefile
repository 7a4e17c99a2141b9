# make run    sets up an environment if there is none, then tunes the training of a classifier on real digits
# make test   sets up and runs all tests
# make lint   ruff and mypy
# make suites accelerate's own test scripts against the look-alike, import lines swapped
# TORCH=...   choose your own torch build, e.g. make run TORCH="torch==2.11.0"
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

ifdef TORCH
TORCH_INSTALL := $(TORCH)
PINS :=
else
TORCH_INSTALL := -c constraints.txt torch
PINS := -c constraints.txt
endif

.PHONY: run test lint types env suites bench-env clean

run: $(BIN)/.ready
	$(BIN)/hotloop tune --budget 130s --out tuned examples/digits.py

test: $(BIN)/.ready
	$(BIN)/python -m pytest $(ARGS)

lint: $(BIN)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.ready
	$(BIN)/mypy

env: $(BIN)/.ready

# torch goes first and alone, so that no later package's range picks another build of it
$(BIN)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q $(TORCH_INSTALL)
	$(PIP) install -q $(PINS) -e ".[dev,track]"
	touch $@

suites: $(BIN)/.ready
	$(BIN)/python tests/accelerate_suites/run_suites.py

# what the benchmarks measure beside hotloop; none of it asks for another torch than the one that is there
bench-env: $(BIN)/.ready
	$(PIP) install -q $(PINS) accelerate==1.15.0 lightning-fabric==2.6.6 onnx onnxruntime openvino ml_dtypes flatbuffers

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache runs tuned
