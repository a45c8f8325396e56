# make demo   sets up .venv with the base dependencies (versions and hashes of scripts/base.lock) and runs the demonstration
# make test   adds the development tools (versions and hashes of scripts/dev.lock) and runs the tests;
#             FAST=1 leaves out those that start processes or browsers, run studies, or try very many or large cases;
#             ONLY=clocks runs those with that marker alone
# make lint   ruff, mypy --strict on src and the order of packages
# make docs   the documentation as a site in build/site, warnings as errors
# make dist   wheel and sdist, each installed in an empty environment and used there; and make sbom
# make sbom   the locked dependencies as build/sbom.json (CycloneDX)
# make lock   the lock files again, from the package index INDEX=https://...; locked versions stay
# make bench  the exact solver against its peers; BENCH=--quick for a minute of it
# make fuzz   damaged and hostile bytes for all readers of what others send; INPUTS=1000000 takes about 15 minutes
# make web-check   lints and type-checks web/, and checks that it gives exactly the bundle in src/fedkin/report/static
# make clean  removes .venv and what the tools left behind
# PYTHON is the interpreter to make .venv with: make demo PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
REPORT ?= demo-report
JOBS ?= 2
FAST ?=
ONLY ?=
BENCH ?=
INDEX ?=
INPUTS ?= 20000
SEED ?= 0

BIN := $(VENV)/bin
BASE := $(VENV)/.base-installed
DEV := $(VENV)/.dev-installed
# one thread per process; compiled modules are kept, because tests start hundreds of processes
QUICK := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(abspath $(VENV))/pycache
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --no-compile

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs dist sbom lock bench fuzz web web-check clean

help:
	@sed -n 's/^# //p' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Fedkin needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
		"say which one to use: make demo PYTHON=python3.12" >&2; exit 1; }
	@echo "setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml scripts/base.lock | $(BIN)/python
	@$(PIP) --require-hashes -r scripts/base.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(DEV): pyproject.toml scripts/base.lock scripts/dev.lock | $(BIN)/python
	@echo "installing the development tools into $(VENV) ..."
	@$(PIP) --require-hashes -r scripts/dev.lock
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@ $(BASE)

demo: $(BASE)
	@$(BIN)/fedkin demo --out $(REPORT)

test: $(DEV)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
		echo "no Chromium here: the tests that open pages are skipped"
	@$(QUICK) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(if $(ONLY),-m '$(ONLY)',$(if $(FAST),-m 'not processes and not studies and not browser and not exhaustive'))

lint: $(DEV)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo --no-cache

docs: $(DEV)
	@mkdir -p build
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict >build/docs.log 2>&1 || { cat build/docs.log >&2; exit 1; }
	@echo "build/site/index.html"

dist: $(DEV) sbom
	@$(BIN)/python scripts/smoke_test.py

sbom:
	@$(PYTHON) scripts/supply.py sbom build/sbom.json
	@echo "build/sbom.json"

lock: | $(BIN)/python
	@$(BIN)/python scripts/supply.py lock "$(INDEX)"

bench: $(DEV)
	@$(QUICK) $(BIN)/python benchmarks/run.py $(BENCH)

fuzz: $(DEV)
	@$(QUICK) $(BIN)/python tests/fuzzing.py $(INPUTS) $(SEED)

# for people who change web/: nothing else here needs node
web: | web/node_modules
	@cd web && npm run --silent build

web/node_modules: web/package-lock.json
	@cd web && npm install --silent --no-save --no-audit --no-fund
	@touch $@

web-check: | web/node_modules
	@cd web && npm run --silent check && FEDKIN_BUNDLE=../build/bundle npm run --silent build -- --logLevel error
	@diff -rq build/bundle src/fedkin/report/static || \
		{ echo "error: the bundle is not what web/ gives: run make web, and commit it" >&2; exit 1; }

clean:
	@rm -rf $(VENV) $(REPORT) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
