# make demo   the whole loop on your machine, in minutes      make test   everything CI checks
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Two small BLAS pools fighting over two cores are slower than one thread each.
export OMP_NUM_THREADS ?= 1
# What collectors import must run with Python 3.10; server, trainer and dashboard need 3.11.
OLD_PYTHON := stepwell workbench collector amago_model
# Files of tests at once, one more than there are cores, as tests wait for processes: three to five;
# 0 runs them one after another in one process.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n > 4 ? 5 : n < 2 ? 3 : n + 1 )))
# In the order of tests/conftest.py; xdist itself begins with the files that have the most tests.
SIDE_BY_SIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all lint format types imports unit faults floors mutants bench learn-checks serve dash clean help

help:
	@sed -n '1p' Makefile; echo "also: test-all lint format types imports unit faults floors mutants bench learn-checks serve dash clean"

# torch first: its pin in constraints.txt takes the build that pip finds for this machine, and the
# rest then installs nothing more of it.
$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Stepwell needs Python 3.11+")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(BIN)/.installed
	$(BIN)/stepwell demo $(ARGS)

test: lint types imports unit

# With the long grids, which make test samples: before each release.
test-all: lint types imports
	$(BIN)/python -m pytest --all $(SIDE_BY_SIDE) $(ARGS)

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vermin --quiet --no-tips --target=3.10- --violations $(OLD_PYTHON)

format: $(BIN)/.installed
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

types: $(BIN)/.installed
	$(BIN)/mypy

imports: $(BIN)/.installed
	$(BIN)/lint-imports

unit: $(BIN)/.installed
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

# Fifty kills of the live service instead of six, a thousand flipped bits instead of forty, two
# hundred damages of the index instead of six, fifty sessions of the dashboard instead of twelve,
# fifty backups instead of three.
faults: $(BIN)/.installed
	STEPWELL_KILLS=50 STEPWELL_FLIPS=1000 STEPWELL_INDEX_FLIPS=200 STEPWELL_SESSIONS=50 \
	STEPWELL_BACKUPS=50 \
		$(BIN)/python -m pytest --all tests/faults tests/browser/test_sessions.py $(ARGS)

# A collector with Python 3.10 and the oldest packages that pyproject.toml allows; OLD= names another.
OLD ?= python3.10
floors: $(BIN)/.installed
	STEPWELL_FLOORS=$(OLD) $(BIN)/python -m pytest tests/test_floors.py $(ARGS)

# Small defects, one at a time: do the tests notice? Hours; ARGS='--help' says how to ask for less.
mutants: $(BIN)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	$(BIN)/python -m benchmarks.mutants $(ARGS)

# The gate of the demo: three training seeds on both datasets, written to benchmarks/results/.
bench: $(BIN)/.installed
	$(BIN)/python -m benchmarks.demo_gate $(ARGS)

# Does `stepwell run` learn small tasks, and how soon? Needs two quiet cores; ARGS='c5 c6' for some.
learn-checks: $(BIN)/.installed
	$(BIN)/python -m benchmarks.learn_checks $(ARGS)

serve: $(BIN)/.installed
	$(BIN)/stepwell serve --data ./data $(ARGS)

dash: $(BIN)/.installed
	$(BIN)/stepwell dash $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
