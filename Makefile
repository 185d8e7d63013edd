# Every target sets up .venv by itself; `make clean` removes it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench clean

.venv/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt --editable .
	touch $@

.venv/.develop: .venv/.run
	$(BIN)/pip install --quiet -c constraints.txt "datasets>=3" pytest pytest-xdist hypothesis mypy ruff import-linter
	# Not in constraints.txt: there it would clash with the one that torch's builds for GPUs bring along.
	$(BIN)/pip install --quiet triton==3.6.0
	touch $@

demo: .venv/.run  ## ten silos train, one deletes 2 % of all samples, every silo retrains, and the proof that nothing is left
	$(BIN)/fedforget demo

lint: .venv/.develop  ## style, types and import tiers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint  ## the gate: lint, then every test
	$(BIN)/pytest -n 2

bench: .venv/.run  ## the benchmarks at a size for two cores, into .bench
	$(BIN)/python benchmarks/demo_rates.py --out .bench
	$(BIN)/python benchmarks/paper_rule.py --dataset digits --out .bench

clean:  ## remove the environment and what the targets left
	rm -rf .venv .bench
