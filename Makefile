# What there is to do here: make demo, test, test-all, test-torch, costs, check, golden, docs, install.
# The system's Python where it is of the same version and can do as much: distributions build theirs with the profile of
# a run, which one built at home mostly lacks. It is a fifth of the tests' time.
SAME   := import sys; print(*sys.version_info[:2])
ABLE   := import ensurepip, os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")
PYTHON ?= $(shell test "`python3 -c '$(SAME)'`" = "`/usr/bin/python3 -c '$(ABLE); $(SAME)' 2> /dev/null`" \
            && echo /usr/bin/python3 || echo python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DOCS_VENV := .venv-docs
JOBS   ?= 3  # test processes: some of them wait for ranks that they started

.PHONY: demo test test-all test-torch costs check types golden docs install clean

# Four local processes train a small GPT, then one device does the same.
demo: $(STAMP)
	$(BIN)/python examples/demo.py

# What Python and pytest made of the sources is kept for the next process, and for the next run.
test test-all costs: export PYTHONDONTWRITEBYTECODE =

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# And what takes minutes: the programs that Inductor compiles, and of dear tests the cases that their budget
# (tests/support/costs.py) does not pay for. Twice as long, and more.
test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m ""

# All tests but the slow ones, and tests/costs.csv anew: what the functions take that cost more than their budget.
# The cases that `make test` leaves out alone: .venv/bin/python -m pytest -n 3 -m beyond
costs: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu" --costs

# The tests with another torch, in an environment of its own: make test-torch TORCH=2.14.1
test-torch:
	test -n "$(TORCH)" || { echo "say which: make test-torch TORCH=2.14.1"; exit 2; }
	test -x .venv-torch-$(TORCH)/bin/python || $(PYTHON) -m venv .venv-torch-$(TORCH)
	.venv-torch-$(TORCH)/bin/python -m pip install -q "torch==$(TORCH)" -e ".[test]"
	.venv-torch-$(TORCH)/bin/python -m pytest -n $(JOBS) --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) -s types

# mypy wants the packages where they are installed to: passes/ as autopar/passes, runtime/ as autopar/runtime.
types: $(STAMP)
	rm -rf build/types && mkdir -p build/types/autopar
	cd build/types/autopar && ln -s ../../../autopar/* ../../../passes ../../../runtime .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

# Write the expected texts of tests/passes/golden anew; read the diff like code.
golden: $(STAMP)
	AUTOPAR_GOLDEN=write $(BIN)/python -m pytest tests -k golden

# The site, in build/site; a dead link is an error. Its tools live in an environment of their own: they read the source
# and never import it, so that neither torch nor autopar is installed there.
# To read it with its search: python -m http.server -d build/site
docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/mkdocs build --strict

install: $(STAMP)

# torch first: where pip is given a CPU build of one version, the plain range would pass it by and fetch CUDA's packages.
# Where that version is not to be had, the range in pyproject.toml decides.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q "torch==2.13.0" \
	    || echo "torch 2.13.0 is not available here; taking what pyproject.toml allows"
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

$(DOCS_VENV)/.installed: pyproject.toml
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -c "import tomllib; \
	    print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" \
	    > $(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/python -m pip install -q -r $(DOCS_VENV)/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) build dist *.egg-info .mypy_cache .ruff_cache
