# Everything a checkout needs. `make help` lists the targets.
# A fresh machine needs Python >= 3.11 and make; clusters and images also need root and Go.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

ROOT := $(CURDIR)
export PYTHONPATH := $(ROOT)/contract/src:$(ROOT)/operator/src:$(ROOT)/trainer/src:$(ROOT)/tools/src:$(ROOT)/plugin/src:$(ROOT)/dev/devcluster/src
export PYTHONUNBUFFERED := 1

# The first Python that starts and is new enough; 3.11 is what the image and the tests use.
ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$p -c '$(ENOUGH)' >/dev/null 2>&1 && echo $$p && break; done)

BIN := .venv/bin
FOREIGN := .venv-foreign/bin
FOREIGN_TESTS := $(addprefix tests/,trainer/test_foreign.py trainer/test_audit_foreign.py \
	unit/trainer/test_snapshot_remote.py)
DEVCLUSTER = $(PYTHON) dev/devcluster/devcluster
PYTEST := $(BIN)/python -m pytest
# Beside the environments: a fresh checkout need not look at all of it again.
export MYPY_CACHE_DIR := $(or $(DDPJOB_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ddpjob)/mypy
# The oldest that the trainer takes, and the newest: trainer/pyproject.toml says the same.
TORCH_VERSIONS := 2.9.0 2.15.0
TORCH_TESTS := tests/unit/trainer $(addprefix tests/trainer/test_,bitwise_resume.py run_options.py \
	elastic.py parting.py nan_policy.py)
# More arguments for a level's pytest, a demo or a benchmark: make unit ARGS='-k restart -x'
ARGS ?=
# Several files at a time (tests/support/sharing.py). ARGS=-n0: one after the other
SIDE_BY_SIDE := -n auto --max-worker-restart=0
TYPED := contract/src operator/src trainer/src tools/src plugin/src dev/devcluster/src

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The three tiers (tests/support/tiers.py), each with all tests of those before it.
.PHONY: check
check: setup lint programs ## before each commit: lint, pure code, models, the chart; no cluster (3 minutes)
	@$(PYTEST) --tier check tests/unit tests/model tests/chart $(SIDE_BY_SIDE) $(ARGS)

.PHONY: test
test: setup lint programs images ## the gate, before each landing: of each kind of fault the shortest test (15 minutes)
	@$(PYTEST) --tier gate $(SIDE_BY_SIDE) $(ARGS)

.PHONY: test-all
test-all: setup lint programs images ## before an issue ends: all tests, a share of the soak (1 hour); writes docs/
	@$(PYTEST) $(SIDE_BY_SIDE) --test-durations $(ARGS)
	@$(MAKE) --no-print-directory foreign
	@$(MAKE) --no-print-directory soak SOAK=$(SHARE)

.PHONY: setup
setup: ## make the virtual environment (once per set of pins, kept in the cache)
	@if [ -z "$(PYTHON)" ]; then \
		echo "setup: Python 3.11 or newer is needed; install it or run make PYTHON=/path/to/python" >&2; \
		exit 1; fi
	@$(PYTHON) -m devcluster.venv --link .venv

.PHONY: lint
lint: setup ## ruff, mypy --strict, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict $(TYPED)
	@$(BIN)/lint-imports --config pyproject.toml

.PHONY: format
format: setup ## let ruff format and sort imports
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: unit
unit: setup ## tests of pure code and of the operator in a model of a cluster, a minute
	@$(PYTEST) $(wildcard tests/unit tests/model) $(ARGS)

.PHONY: mutations
mutations: setup ## decisive lines made wrong, each of which a test must find out; writes tests/mutations/mutations.md
	@PYTHONPATH=tests $(BIN)/python -m mutations

# Hours: every pair of faults, and as many random stories. SOAK=2/8 plays the second of eight shares.
SOAK ?= 1/1
# What test-all plays of them, other stories every day.
SHARE ?= $(shell expr $$(date +%j) % 160 + 1)/160
.PHONY: soak
soak: setup programs ## models and plans whole, of which others play a sample (hours; SOAK=1/8: a share)
	@DDPJOB_SOAK=$(SOAK) $(PYTEST) tests/model tests/api/test_plans.py $(SIDE_BY_SIDE) $(ARGS)

.PHONY: soak-cluster
soak-cluster: setup programs images ## jobs on a real cluster under random faults (ARGS='--minutes 30 --seed 7')
	@PYTHONPATH=$$PYTHONPATH:$(ROOT)/tests $(BIN)/python -m soak.run $(ARGS)

.PHONY: chart
chart: setup programs ## tests of what the Helm chart renders
	@$(PYTEST) tests/chart $(ARGS)

.PHONY: api
api: setup programs ## the operator against a real API server and etcd
	@$(PYTEST) tests/api $(ARGS)

.PHONY: trainer
trainer: setup ## training processes on this machine
	@$(PYTEST) tests/trainer $(ARGS)

.PHONY: foreign
foreign: setup ## scripts of Lightning, accelerate and transformers, and S3
	@$(PYTHON) -m devcluster.venv --also foreign --link .venv-foreign
	@$(PYTHON) -m devcluster.venv --only foreign-broken \
		--link .venv-foreign-broken
	@$(FOREIGN)/python -m pytest $(FOREIGN_TESTS) $(ARGS)

.PHONY: torch-versions
torch-versions: ## what depends on torch, with the oldest and the newest (5 GB each, not in make test-all)
	@for version in $(TORCH_VERSIONS); do \
		$(PYTHON) -m devcluster.venv --torch $$version --link .venv-torch-$$version; \
		.venv-torch-$$version/bin/python -m pytest $(TORCH_TESTS) $(ARGS); done

.PHONY: cluster
cluster: setup programs images ## all of it on a real cluster with kubelets and containers
	@$(PYTEST) tests/cluster $(ARGS)

.PHONY: programs
programs: setup ## build Kubernetes and its tools (once, kept in the cache)
	@$(DEVCLUSTER) build >/dev/null

.PHONY: images
images: setup ## build the operator's and the trainer's image
	@$(DEVCLUSTER) image build operator trainer

# The same bytes from the same source: timestamps are those of the newest commit.
.PHONY: wheel
wheel: ## build dist/*.whl of contract, operator, trainer (with the tools) and plugin
	@$(PYTHON) dev/release/release.py wheels; ls dist/*.whl

# Python's own modules only, so it runs on any machine with Python 3.11 or newer and kubectl.
DIST ?= dist
.PHONY: plugin
plugin: ## make dist/kubectl-ddp, the kubectl plugin in a single file
	@$(PYTHON) dev/release/release.py plugin --out $(DIST)
	@echo "$(DIST)/kubectl-ddp: copy it to a directory on PATH, then: kubectl ddp --help"

.PHONY: release
release: ## chart, wheels, plugin, images, bills of materials, notes, checksums (docs/internals/releasing.md)
	@$(PYTHON) dev/release/release.py $(ARGS)

.PHONY: base-image
base-image: ## pin the Dockerfile's base by the digest that its registry has today (needs that registry)
	@$(PYTHON) dev/release/release.py base-image

.PHONY: site
site: ## dist/site: README and docs/ as a site, every link checked
	@$(PYTHON) -m devcluster.venv --only site --link .venv-site
	@.venv-site/bin/mkdocs build --strict && echo dist/site/index.html

.PHONY: try
try: setup ## train on this machine alone, kill a process, compare the weights: no root, Go or cluster
	@$(BIN)/python dev/demo/local.py $(ARGS)

.PHONY: demo
demo: setup ## train a job on a local cluster, kill a process, delete a pod, compare the weights
	@$(BIN)/python dev/demo/run.py $(ARGS)

.PHONY: down
down: ## remove the clusters of the demo and of the tests
	@names=$$($(DEVCLUSTER) list); failed=0; for name in $$names; do case $$name in \
		demo|t-*) $(DEVCLUSTER) --name $$name down || failed=1;; esac; done; exit $$failed

.PHONY: bench
bench: setup ## measure; each benchmark prints a table and writes JSON
	@for script in dev/bench/*.py; do [ -e "$$script" ] || continue; $(BIN)/python $$script $(ARGS); done

# On a machine that does nothing else; scaling comes first, claims reads it.
.PHONY: studies
studies: setup ## what the literature says of DDP, settled with figures (studies/README.md, 15 minutes)
	@$(PYTEST) tests/trainer/test_studies.py
	@$(BIN)/python studies/scaling.py --json studies/scaling.json --page studies/scaling.md
	@$(BIN)/python studies/claims.py --json studies/claims.json --page studies/claims.md
	@$(BIN)/python studies/recordings.py --into studies
	@$(BIN)/python studies/pictures.py

SOAK_PAGE := --minutes 30 --seed 7 --json tests/soak/soak.json --page tests/soak/soak.md
.PHONY: evidence
evidence: studies mutations programs ## write the pages of evidence, which make check does not compare
	@DDPJOB_WRITE_PAGES=1 $(PYTEST) tests/api/test_odd_manifests.py
	@echo "tests/soak/soak.md takes as long as you like: make soak-cluster ARGS='$(SOAK_PAGE)'"

.PHONY: manifests
manifests: setup ## what is made from other files: manifests/, docs/reference/api.md, docs/llms.txt, diagrams, pictures, diffs
	@$(BIN)/python charts/render.py
	@$(BIN)/python docs/internals/architecture.py
	@$(BIN)/python docs/reference/run.py
	@$(BIN)/python docs/guides/ladder.py
	@$(BIN)/python docs/llms.py
	@$(BIN)/python studies/pictures.py

.PHONY: lock
lock: ## pin dev/requirements/*.in again (ARGS=--upgrade: at the newest allowed versions)
	@$(PYTHON) -m devcluster.venv --lock $(ARGS)

.PHONY: clean
clean: ## remove what tools left in the checkout (the cache stays)
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
