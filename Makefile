# make demo: set up, compile BERT, simulate it on 1,024 GPUs.   make test: set up, then the suite without slow tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
OUT := out
SOURCES := frontend ir models profiler proto simulator

.PHONY: demo test test-all bench lint setup setup-dev proto clean

demo: $(VENV)/.ready
	mkdir -p $(OUT)
	$(BIN)/echoc compile --model bert-base-uncased -o $(OUT)/graph.pb
	$(BIN)/echosim run $(OUT)/graph.pb --gpus 1024 -o $(OUT)/result.json --trace $(OUT)/trace.json

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

test-all: $(VENV)/.ready-dev
	$(BIN)/python -m coverage erase
	$(BIN)/python -m pytest -n 2 --dist loadfile --hypothesis-profile thorough --cov --cov-report=term:skip-covered

bench: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: $(VENV)/.ready-dev
	$(BIN)/python -m echograph.proto.generate

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "torch==2.13.0"
	$(PIP) --editable ".[torch]"
	$(BIN)/python -m compileall -q src $(SOURCES)  # pip compiles no sources of an editable project
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) --editable ".[torch,deepspeed,megatron,dev]"
	touch $@

clean:
	rm -rf $(VENV) $(OUT) .mypy_cache .ruff_cache .pytest_cache .hypothesis
