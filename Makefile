# A newcomer needs two commands: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-full lint bench clean

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/tokensworth demo --out report.html

test: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow'

test-full: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python benchmarks/reuse.py
	$(BIN)/python benchmarks/runner.py
	$(BIN)/python benchmarks/solvers.py
	$(BIN)/python benchmarks/tosa.py
	$(BIN)/python benchmarks/tokens.py --compiled
	$(BIN)/python benchmarks/allocator.py

clean:
	rm -rf $(VENV) dist build report.html
