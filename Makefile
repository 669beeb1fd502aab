# make demo   sets everything up and shows Hora at work
# make test   sets everything up and runs the whole suite
# make check  lint, format, types, and the suite
# All of them need python3 (3.11 or newer for the pinned packages) and make, nothing else; each is quick the second time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check lint format clean

demo: $(READY)
	@$(BIN)/hora demo

test: $(READY)
	$(BIN)/python -m pytest

check: lint test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) cannot make a virtual environment (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
