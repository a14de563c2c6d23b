# Every target does its own set-up into .venv; only Python 3.11 or newer is needed.
.PHONY: setup demo test rig check bench evidence evidence-tables clean
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.foreshock-ready

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Foreshock needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)" numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/foreshock demo attention

test: setup
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile
	$(BIN)/python -m pytest -m "slow and not rig" -n 2 --dist load

# What starts and kills whole jobs, one at a time.
rig: setup
	$(BIN)/python -m pytest -m rig

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Many seeds; resumable: a run that is already in evidence/ is not made again.
evidence: setup
	$(BIN)/python benchmarks/evidence.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/schedules.py
	$(BIN)/python benchmarks/chaos.py

evidence-tables: setup
	$(BIN)/python benchmarks/evidence.py --tables

bench: setup
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/stream.py

clean:
	rm -rf .venv build dist foreshock_demo
