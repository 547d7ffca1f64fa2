# Everything runs in .venv, made on first use from pinned constraints.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: help setup demo test storm check bench clean

help:
	@echo "make demo    measure this machine, train, predict held-out runs, search (about 5 minutes)"
	@echo "make test    all tests"
	@echo "make storm   tests of many processes at once, some killed (minutes; PostgreSQL's where a server is installed)"
	@echo "make check   ruff, mypy and who imports whom"
	@echo "make bench   speed figures, printed and written to bench.json"
	@echo "make setup   only build .venv"

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, got " + sys.version.split()[0])'
	@echo "setting up .venv (one to two minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(INSTALL) torch
	@$(INSTALL) -e .
	@$(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null || true  # quicker than pip's own, one file at a time
	@touch $@

.venv/.developing: .venv/.installed
	@$(INSTALL) -e '.[dev]'
	@touch $@

setup: .venv/.installed

demo: .venv/.installed
	$(BIN)/stepsight demo --out runs/demo

test: .venv/.developing
	$(BIN)/python -m pytest

storm: .venv/.developing
	$(BIN)/python -m pytest -m storm

check: .venv/.developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@cd .types && PYTHONPATH=.. ../$(BIN)/lint-imports --config ../pyproject.toml --no-cache --no-logo

bench: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m stepsight.experiments.studies.bench --out bench.json

clean:
	rm -rf .venv build dist *.egg-info
