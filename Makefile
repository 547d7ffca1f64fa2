# Everything runs in .venv, made on first use from pinned and hashed versions.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
INPUTS ?= 10000
JOBS_TRIED ?= 10000
SAMPLE ?= 0.2

.PHONY: help setup demo test storm check docs bench fuzz matrix crash invariants mutants lowest lock clean

help:
	@echo "make demo        measure this machine, train, predict held-out runs, search (about 5 minutes)"
	@echo "make test        all tests"
	@echo "make storm       tests of many processes at once (minutes; PostgreSQL where it is installed)"
	@echo "make check       ruff, mypy, who imports whom, and the English of docs and docstrings"
	@echo "make docs        take its pictures, build the documentation in site/, check its links, and run its tutorials"
	@echo "make bench       speed figures, printed and written to bench.json"
	@echo "make fuzz        INPUTS=10000 mutated inputs for every reader (hours; INPUTS=1000 before a release)"
	@echo "make matrix      capture a script of every strategy with every feature, and write docs/reference/captures.md (ten minutes)"
	@echo "make crash       fail every write of the commands that write, one after the other (about an hour)"
	@echo "make invariants  what holds for every job, on JOBS_TRIED=10000 random ones (about half an hour)"
	@echo "make mutants     change the simulator's core in one place, and see whether a test fails, for SAMPLE=0.2 of the places"
	@echo "make lowest      the quick tests with the lowest versions that pyproject.toml allows"
	@echo "make lock        write requirements-dev.txt anew: the versions of constraints.txt with their hashes"
	@echo "make setup       only build .venv"

# Hashes are those of PyPI.  torch has none, because its wheel differs from place to place (PyPI's comes with CUDA,
# machines without a GPU have the CPU build); constraints.txt pins its version.  It comes last, so that what else it
# needs is there with its hash.  The package itself is built by the setuptools that is locked.
.venv/.installed: pyproject.toml constraints.txt requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, got " + sys.version.split()[0])'
	@echo "setting up .venv (one to two minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) --no-deps --require-hashes -r requirements-dev.txt
	@$(PIP) -c constraints.txt torch
	@$(PIP) --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null || true  # quicker than pip's own, one file at a time
	@touch $@

# Where mypy, the import linter and the docs find every folder under the package's name.
.types/stepsight: stepsight
	@rm -rf $@ && mkdir -p $@
	@ln -s $(addprefix ../../,dataset experiments features gnn simulator training $(wildcard stepsight/*.py stepsight/[a-z]*/)) $@/

setup test check docs: .types/stepsight

setup: .venv/.installed

demo: .venv/.installed
	$(BIN)/stepsight demo --out runs/demo

test: .venv/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

storm: .venv/.installed
	$(BIN)/python -m pytest -m storm

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@cd .types && PYTHONPATH=.. ../$(BIN)/lint-imports --config ../pyproject.toml --no-cache --no-logo
	$(BIN)/python -m tests.prose

docs: .venv/.installed
	$(BIN)/python docs/hooks/screenshots.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	$(BIN)/python -m pytest -m tutorial tests/docs tests/examples

bench: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/stepsight experiment bench --out bench.json

fuzz: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --inputs $(INPUTS)

matrix: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.dataset.capture.matrix

crash: .venv/.installed
	CRASH_POINTS=all $(BIN)/python -m pytest -s tests/crash

invariants: .venv/.installed
	INVARIANT_JOBS=$(JOBS_TRIED) $(BIN)/python -m pytest tests/simulator/test_invariants.py \
		tests/training/shipped/test_small_steps.py

# Apart from CI, and so apart from the lock: cosmic-ray brings ten packages that nothing else needs.
mutants: .venv/.installed
	@$(PIP) -c constraints.txt cosmic-ray==8.7.0
	$(BIN)/python -m tests.mutation.run_mutants --sample $(SAMPLE)

# torch is the pinned one here too: its lowest version has no wheel without CUDA on PyPI.
lowest: .venv/.installed
	@grep '^torch==' constraints.txt > .venv/torch.txt
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-lowest
	$(BIN)/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct --override .venv/torch.txt \
		$(foreach folder,$(PIP_FIND_LINKS),--find-links $(folder)) -e '.[dev]'
	.venv-lowest/bin/python -m pytest $(LOWEST_TESTS)

LOWEST_TESTS := tests/dataset/tables tests/dataset/traces tests/dataset/job tests/features tests/gnn tests/simulator \
	tests/training/kernels tests/training/collectives tests/training/predictor tests/training/fitting/test_train_runs.py \
	tests/training/tracking tests/experiments/search tests/experiments/evaluation tests/stepsight/test_cli.py

lock: .venv/.installed
	grep -v '^torch==' constraints.txt > .venv/pins.txt
	$(BIN)/uv pip compile --quiet --generate-hashes --no-annotate --no-header --python-version 3.11 .venv/pins.txt -o requirements-dev.txt

clean:
	rm -rf .venv .venv-lowest fuzz-failures build dist *.egg-info
