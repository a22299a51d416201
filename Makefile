# `make demo` and `make test` need Python >= 3.11 and nothing else; the first of them makes .venv.
PYTHON ?= python3
PIP_FLAGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt $(PIP_FLAGS)
INSTALLED := .venv/.installed
LINTERS := .venv/.linters

.PHONY: demo test lint kernels

demo: $(INSTALLED)
	$(BIN)/grinf demo $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

lint: $(LINTERS)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/pyright

# Every instance of every kernel with nvcc, not only the defaults that `make test` compiles.
kernels: $(INSTALLED)
	$(BIN)/python -m pytest tests/arch/test_kernels.py --all-instances $(ARGS)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("grinf needs Python 3.11 or newer: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(PIP) -e ".[demo,dev,duckdb,sids]"
	@touch $@

$(LINTERS): $(INSTALLED)
	$(PIP) -e ".[lint]"
	@touch $@
