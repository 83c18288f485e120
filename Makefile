# Atoll: everything a fresh clone needs. `make demo` and `make test` set themselves up.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PACKAGES := atoll coordinator worker hostos protos strategies compressors lab experiments
PROTOS := protos/atoll_job.proto protos/atoll_control.proto protos/atoll_apps.proto
MESSAGES := protos/atoll_compute.proto  # no service in it
BENCHMARKS := adaptive_compression asynchronous boundaries chaos checkpoint_deltas code_lines codecs commit consumer_fleet convergence curvature dashboard exchanges \
	federated_bandwidth federated_mnist fleet_of_jobs gossip gpu grids joined journal large large_plan link_adaptation local_steps \
	local_steps_lab lossless_real makespan memory messages noticed optimizers oracle packet_hashes peer_selection personal \
	pipeline_vs_torch planner population population_fleet prediction privacy published_planners reach reconstruction recovery relay \
	replicas restore ring round_codecs same_bits schedules secure_aggregation sessions side_by_side site_adapters sparse_formats split_finetuning split_lab \
	thin_memory thin_sites tied_plans \
	tiny_step transport two_parts upload vs_flower vs_hivemind vs_simulations wan_speedrun ways ways_lab
# One compute thread each: several processes share the machine, and results repeat exactly. And bytecode is kept, for
# pytest compiles every test again otherwise, with what its asserts show.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# So many processes run the default tests, a file at a time each; 0: none but pytest's own.
TEST_PROCESSES ?= 3
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
# One wing's tests, of each package that has a wing of this name: make test WING=planning, or WING=worker/links.
WING ?=
FOLDERS := $(if $(WING),$(wildcard tests/$(WING)/ tests/*/$(WING)/),tests)
WINGS := $(sort $(notdir $(patsubst %/,%,$(dir $(wildcard coordinator/*/__init__.py worker/*/__init__.py)))))
# Other Pythons that the package promises: `make pythons` tries each that this machine has.
PYTHONS ?= 3.12 3.13 3.14
DOCS_STAMP := $(VENV)/.docs-installed
# What looks at the dependencies has an environment of its own, and none of it is part of a check: an advisory that
# is published tomorrow must not fail what passed today.
SUPPLY := .venv-supply
SUPPLY_STAMP := $(SUPPLY)/.installed
LOCK := $(BIN)/uv pip compile -q --universal --generate-hashes --no-emit-package torch --no-emit-index-url \
	--no-annotate --custom-compile-command "make lock" --overrides locks/without-torch.in
EXTRAS := coordinator dashboard test dev hf quantised tensorboard flower simulation ray s3 postgresql
PIP := pip install -qq --disable-pip-version-check

# An environment of its own for the newest Flower that is supported; what it wants otherwise stands in the file.
VENV142 := .venv-flwr142
STAMP142 := $(VENV142)/.installed
CONSTRAINTS142 := constraints-flwr142.txt
FLOWER_TESTS := tests/coordinator/flower tests/coordinator/apps tests/worker/apps tests/compressors/test_flower.py \
	$(wildcard tests/strategies/test_flower_*.py tests/protos/test_flower_*.py tests/protos/test_app_*.py) \
	tests/examples/test_flower_digits.py tests/house/test_flower_imports.py \
	$(wildcard tests/e2e/test_flower_*.py) tests/e2e/test_same_weights.py

.PHONY: pythons help venv demo test test-all test-flwr142 folders packages fuzz check format bench protos docs clean lock sbom audit

help:
	@echo "make demo      train a GPT on 4 workers across an emulated WAN, and check the result"
	@echo "make test      the default tests (make test-all: the slow ones too); of one wing: WING=planning"
	@echo "make test-flwr142  the Flower tests under flwr 1.42, in $(VENV142)"
	@echo "make fuzz      hostile ops through a worker's own path for an hour (FUZZ='--seconds 60 --op lstm')"
	@echo "make check     formatting, lint, types and the arrows between packages"
	@echo "make bench     every benchmark, figures on the last line of each; what needs root or a GPU says so"
	@echo "make docs      the site, in build/site"
	@echo "make venv      only set up $(VENV)"
	@echo "make protos    regenerate the wire schema's code"
	@echo "make lock      the exact files of all dependencies, by their hashes, into locks/"
	@echo "make audit     known vulnerabilities of what is locked; make sbom: build/atoll.cdx.json"
	@echo "make clean     remove what was built, $(VENV) too"

venv: $(STAMP)

$(STAMP): pyproject.toml experiments/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no python3 found: install Python 3.11 or newer, or give PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: give PYTHON=/path/to/python3.11"; exit 1; }
	@echo "[1/3] making $(VENV) with $(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "venv failed: on Debian install python3-venv"; rm -rf $(VENV); exit 1; }
	@echo "[2/3] installing torch (the largest download)"
	@$(BIN)/python -m $(PIP) torch==2.13.0 -c constraints.txt
	@echo "[3/3] installing Atoll and its test tools"
	@$(BIN)/python -m $(PIP) -c constraints.txt -e '.[coordinator,dashboard,test,dev,hf,tensorboard,flower,simulation,s3,postgresql]' \
		-e ./experiments
	@touch $@
	@echo "ready: $(BIN)/atoll --help"

demo: $(STAMP)
	@$(TEST_ENV) $(BIN)/python -m examples.demo

# As root on Debian they are installed, else said; PACKAGES_BY=hand leaves the machine as it is.
packages:
	@test '$(PACKAGES_BY)' = hand || .ci/packages

folders:
	@test -n "$(FOLDERS)" || { echo "no folder tests/*/$(WING); the wings are: $(WINGS)"; exit 1; }

test: folders packages $(STAMP)
	$(PYTEST) -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" $(FOLDERS)

test-all: folders packages $(STAMP)
	$(PYTEST) $(FOLDERS)
	$(if $(WING),,$(MAKE) test-flwr142)

$(STAMP142): pyproject.toml constraints.txt $(CONSTRAINTS142)
	@echo "making $(VENV142)"
	@test -x $(VENV142)/bin/python || $(PYTHON) -m venv $(VENV142)
	@names=$$(sed -n 's/==.*/==/p' $(CONSTRAINTS142) | paste -sd '|' -); \
		{ grep -vE "^($$names)" constraints.txt; cat $(CONSTRAINTS142); } > $(VENV142)/constraints.txt
	@$(VENV142)/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0 -c $(VENV142)/constraints.txt
	@$(VENV142)/bin/python -m pip install -qq --disable-pip-version-check -c $(VENV142)/constraints.txt \
		-e '.[coordinator,test,flower,simulation]'
	@touch $@

test-flwr142: $(STAMP142)
	PATH="$(abspath $(VENV142))/bin:$$PATH" $(TEST_ENV) $(VENV142)/bin/python -m pytest $(FLOWER_TESTS)

FUZZ ?= --seconds 3600
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz $(FUZZ)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(foreach package,$(PACKAGES),-p $(package))
	$(BIN)/mypy -p benchmarks -p examples -p docs.pages
	$(BIN)/lint-imports
	$(PYTEST) -q tests/house/test_words.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	@failed=; for name in $(BENCHMARKS); do \
		echo "== benchmarks.$$name"; \
		$(TEST_ENV) $(BIN)/python -m benchmarks.$$name --json || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

protos: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. \
		--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy $(PROTOS)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --mypy_out=. \
		--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy $(MESSAGES)

# Torch is left out: each index has builds of its own, of one version and other bytes (docs/supply-chain.md).
lock: $(STAMP)
	echo 'setuptools>=77' | $(LOCK) --python-version 3.11 -c constraints.txt - -o locks/build.txt
	$(LOCK) --python-version 3.11 -c constraints.txt pyproject.toml locks/torch.in --extra coordinator --extra dashboard -o locks/runtime.txt
	$(LOCK) --python-version 3.11 -c constraints.txt pyproject.toml locks/torch.in $(EXTRAS:%=--extra %) -o locks/development.txt
	$(LOCK) --python-version 3.11.5 -c constraints.txt pyproject.toml locks/torch.in --extra coordinator --extra docs -o locks/docs.txt
	printf 'pip-audit\ncyclonedx-bom\n' | $(LOCK) --python-version 3.11 - -o locks/supply.txt

$(SUPPLY_STAMP): locks/supply.txt
	@echo "installing what looks at the dependencies, in $(SUPPLY)"
	@test -x $(SUPPLY)/bin/python || $(PYTHON) -m venv $(SUPPLY)
	@$(SUPPLY)/bin/python -m $(PIP) --no-deps --require-hashes -r $<
	@touch $@

# Of what the image and the wheel need, torch too: its version, whichever build of it is installed.
sbom: $(SUPPLY_STAMP)
	@mkdir -p build
	@{ cat locks/runtime.txt; grep '^torch==' constraints.txt; } | $(SUPPLY)/bin/cyclonedx-py requirements - \
		--pyproject pyproject.toml --output-reproducible --of JSON -o build/atoll.cdx.json
	@echo "build/atoll.cdx.json"

audit: $(SUPPLY_STAMP)
	@$(SUPPLY)/bin/python .ci/audit.py $(SUPPLY)/bin/pip-audit locks/runtime.txt locks/development.txt locks/docs.txt

$(DOCS_STAMP): $(STAMP)
	@echo "installing the site's tools"
	@$(BIN)/python -m $(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

# Without torch, whose builds for another Python are its index's: the daemons and both commands load none.
pythons:
	@for version in $(PYTHONS); do \
		python=$$(ls $$HOME/.pyenv/versions/$$version.*/bin/python 2> /dev/null | tail -n 1); \
		test -n "$$python" || python=$$(command -v python$$version); \
		test -n "$$python" || { echo "$$version: not on this machine"; continue; }; \
		test -x build/pythons/$$version/bin/python || $$python -m venv build/pythons/$$version || exit 1; \
		bin=build/pythons/$$version/bin; \
		$$bin/python -m $(PIP) --no-deps --require-hashes -r locks/build.txt -r locks/runtime.txt \
			&& $$bin/python -m $(PIP) --no-deps --no-build-isolation . \
			&& $$bin/python -W error -c "import coordinator.server, worker.daemon, atoll" \
			&& $$bin/python -m compileall -q -f atoll coordinator worker hostos protos strategies compressors \
			&& $$bin/atoll --help > /dev/null && $$bin/atoll-worker --help > /dev/null || exit 1; \
		echo "$$version: both commands and daemons load"; \
	done

docs: $(DOCS_STAMP)
	@$(BIN)/python -m docs.pages.build build/docs
	@$(BIN)/zensical build --clean --strict -f zensical.toml

clean:
	rm -rf $(VENV) $(VENV142) $(SUPPLY) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
