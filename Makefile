# `make demo` and `make test` set up everything in .venv first, and only once: see scripts/setup.
# What can be changed from outside: PYTHON, VENV, TORCH_INDEX, PYTEST_ARGS, DEMO_ARGS, KILLS, STOPS, DRILL_ARGS,
# STRESS_ARGS, MUTANTS_ARGS, CLIENTS, TORCHES, ROOMS, NATIVE.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3.14 python3) python3)
VENV ?= .venv
KILLS ?= 500
STOPS ?= 100
NATIVE ?=
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
export PYTHON VENV

PYTHON_TREES := src tests drills scripts $(wildcard examples benchmarks)
CPP_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' 2>/dev/null)
NATIVE_SOURCES := CMakeLists.txt src/dure/version.py scripts/build_version.py $(CPP_SOURCES)
SPELLED := README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md SECURITY.md Makefile pyproject.toml \
    docs csrc $(PYTHON_TREES)

.PHONY: help demo test drill stress mutants kills clients stores versions pictures docs native-build native-test lint format wheel wheel-pure \
    wheel-test setup clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | \
	    while IFS=$$'\t' read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done

demo: $(STAMPS)/package ## train on real images with 2 ranks, and write runs/demo/report.html
	@$(BIN)/dure demo $(DEMO_ARGS)

test: $(STAMPS)/package $(STAMPS)/test ## run all tests but the long drills, or PYTEST_ARGS=tests/...
	@$(BIN)/python scripts/tests.py $(PYTEST_ARGS)

drill: $(STAMPS)/package $(STAMPS)/test ## run the long tests, and then `make kills`
	@$(BIN)/python -m pytest -rs -m slow $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory kills

stress: $(STAMPS)/package $(STAMPS)/test ## run tests of shared memory, RPC and faults 20 times on a busy machine
	@$(BIN)/python scripts/stress $(STRESS_ARGS)

mutants: $(STAMPS)/package $(STAMPS)/test ## put each fault of tests/mutants into a copy of the sources: its test must fail
	@$(BIN)/python scripts/mutants $(MUTANTS_ARGS)

kills: $(STAMPS)/package $(STAMPS)/test ## kill 500 random processes of jobs (KILLS=500), end 100 jobs (STOPS=100)
	@$(BIN)/python -m drills --kills $(KILLS) $(DRILL_ARGS)
	@$(BIN)/python -m drills --stops $(STOPS) $(DRILL_ARGS)

clients: ## compare programs of Hugging Face, Lightning, ignite and others with Gloo, or CLIENTS="fabric ..."
	@$(MAKE) --no-print-directory VENV=build/clients build/clients/stamps/package
	@build/clients/bin/python -m pip install --quiet -c constraints.txt -r tests/clients/requirements.txt
	@build/clients/bin/python -m tests.clients $(CLIENTS)

stores: ## try checkpoints at URLs with a server that stands for S3
	@$(MAKE) --no-print-directory VENV=build/stores build/stores/stamps/package build/stores/stamps/test
	@build/stores/bin/python -m pip install --quiet -c constraints.txt -r tests/checkpoint/stores.txt
	@build/stores/bin/python -c 'import moto.server, s3fs' # without them the tests would be skipped
	@build/stores/bin/python -m pytest -q tests/checkpoint/procs/test_s3.py

versions: ## run the tests that use torch most with torch 2.11 to 2.15, or TORCHES="2.15.0 ..."
	@.ci/run versions

native-build: $(STAMPS)/venv ## build the C++ tests, plain and under the sanitizers, or NATIVE="plain thread"
	@PATH="$(abspath $(BIN)):$$PATH" scripts/native-test --build $(NATIVE)

native-test: $(STAMPS)/venv ## run the C++ tests, plain and under the sanitizers
	@PATH="$(abspath $(BIN)):$$PATH" scripts/native-test $(NATIVE)

lint: $(STAMPS)/package $(STAMPS)/test $(STAMPS)/lint ## run every static check
	@scripts/lint check $(PYTHON_TREES) -- $(CPP_SOURCES) -- $(wildcard $(SPELLED))

format: $(STAMPS)/venv $(STAMPS)/lint ## rewrite the sources in the project's layout
	@scripts/lint format $(PYTHON_TREES) -- $(CPP_SOURCES) --

pictures: $(STAMPS)/package ## draw the schedules of docs/pipelines.md anew
	@for each in gpipe:4 1f1b:4 interleaved-1f1b:8 looped-bfs:8 interleaved-zero-bubble:8 zb-v:8 \
	    dualpipe-v:8 forward-only:8; do \
	    $(BIN)/dure plan pipeline --schedule $${each%:*} --stages $${each#*:} --ranks 4 \
	        --microbatches 8 --svg docs/pictures/$${each%:*}.svg > /dev/null; \
	done

docs: $(STAMPS)/docs ## build the site: site/index.html, which needs no server and no network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean # not --quiet, which counts no warnings

wheel: $(STAMPS)/release ## build dist/: sdist, wheel for Linux systems like this, smoke.py
	@scripts/wheel build

wheel-pure: $(STAMPS)/release ## build the wheel without the engine, for macOS
	@scripts/wheel pure

wheel-test: $(STAMPS)/release ## try the wheel in an empty environment; write dist/sbom.json
	@scripts/wheel try dist/dure-*manylinux*.whl

setup: $(STAMPS)/package $(STAMPS)/extras ## install everything, run nothing

clean: ## remove what was built and installed
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# Each stamp names one finished step of scripts/setup; a step is repeated when what it reads changes.
$(STAMPS)/venv: constraints.txt scripts/setup
	@scripts/setup venv
	@mkdir -p $(@D) && touch $@

$(STAMPS)/package: $(STAMPS)/venv pyproject.toml $(NATIVE_SOURCES)
	@scripts/setup package
	@touch $@

# One pip for all of them takes less time than one for each.
$(STAMPS)/extras: $(STAMPS)/venv pyproject.toml
	@scripts/setup extra test lint docs release
	@touch $(addprefix $(STAMPS)/,test lint docs release extras)

$(STAMPS)/test: $(STAMPS)/venv pyproject.toml
	@scripts/setup extra test
	@touch $@

$(STAMPS)/lint: $(STAMPS)/venv pyproject.toml
	@scripts/setup extra lint
	@touch $@

$(STAMPS)/release: $(STAMPS)/venv pyproject.toml
	@scripts/setup extra release
	@touch $@

$(STAMPS)/docs: $(STAMPS)/venv pyproject.toml
	@scripts/setup extra docs
	@touch $@
