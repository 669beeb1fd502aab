# make demo             sets everything up and shows Hora at work
# make test             sets everything up and runs the tests that prove every promise
# make test-all         those, and the long ones and all combinations
# make chaos            random faults, many times
# make test-ecosystems  other frameworks' runtimes
# make test-cuda        what needs a GPU
# make check            lint, format, types, and make test
# All of them need python3 (3.11 or newer for the pinned packages) and make, nothing else; each is quick the second time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all chaos test-ecosystems test-cuda check lint format clean

demo: $(READY)
	@$(BIN)/hora demo

PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadgroup

test: $(READY)
	$(PYTEST) -m "not full and not chaos and not ecosystem"

test-all: $(READY)
	$(PYTEST) -m "not chaos and not ecosystem"

chaos: $(READY)
	$(PYTEST) -m chaos

test-ecosystems: $(READY)
	$(BIN)/python -m pytest -m ecosystem

test-cuda: $(READY)
	$(BIN)/python -m pytest tests/cuda

check: lint test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): requirements.txt pyproject.toml benchmarks/pyproject.toml
	$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) cannot make a virtual environment (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . --editable ./benchmarks
	@$(BIN)/python -m compileall -q src benchmarks
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info benchmarks/*.egg-info .pytest_cache .mypy_cache .ruff_cache
