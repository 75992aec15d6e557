# Everything is built and run from here. `make` alone lists what there is.

# All parts must agree on where cargo builds; a relative folder is taken from here.
export CARGO_TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))
# A target set in the environment would move the libraries to a folder of its own.
unexport CARGO_BUILD_TARGET
# Cargo uses every core by default: make JOBS=2 keeps it to two.
ifdef JOBS
export CARGO_BUILD_JOBS := $(JOBS)
endif

RELEASE := $(CARGO_TARGET_DIR)/release
PLUGINS := $(CURDIR)/build/plugins
VENV := build/venv
PREFIX ?= /usr/local
BINDIR ?= $(PREFIX)/bin
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
PLUGINDIR ?= $(LIBDIR)/kvrail/plugins
CARGO ?= cargo
# Features of the root crate that are linted one by one, beside the default set and all of them.
FEATURES := sim tracing

.DEFAULT_GOAL := help
# Cargo runs its own jobs; two cargo runs at once only wait for each other.
.NOTPARALLEL:
.PHONY: help demo test test-rbln test-vllm nightly lab bench bench-local lint lib command plugin \
	wheel install clean venv tools-rust tools-cxx

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS="..."     options of demo, bench and bench-local: make demo ARGS="--help"'
	@echo '  PARTS="..."    parts of test to run: make test PARTS="cargo loom"; PARTS=list shows them'
	@echo '  SUITES="..."   suites of lab: make lab SUITES="boot verbs" RAILS=4; ARGS=--list shows them'
	@echo '  JOBS=N         build jobs; default: one for each core'
	@echo '  PREFIX=DIR     where install puts things; default /usr/local; DESTDIR is put in front'
	@echo '  PYTHON=, CXX=  other tools than the first Python 3.10+ and g++'

demo: lib plugin venv ## build all, then move a KV cache between two NIXL agents [ARGS=...]
	@PYTHONPATH=bindings/python NIXL_PLUGIN_DIR="$(PLUGINS)" \
		$(VENV)/bin/python -m kvrail_demo $(ARGS)

test: tools-rust tools-cxx ## run every check, then say what passed, failed or was skipped [PARTS=...]
	@python=$$(scripts/python.sh) && "$$python" scripts/test.py $(PARTS)

test-vllm: tools-rust tools-cxx ## stock vLLM as a pair over the plugin [SPOIL=1, ARGS="--backends RBLN,UCX"]
	@python=$$(scripts/python.sh) && SPOIL="$(SPOIL)" PYTEST_ADDOPTS="$(ARGS)" VERBOSE=1 \
		"$$python" scripts/test.py vllm

# Any base seed will do; without one, each day has its own.
# The parts after it meet other programs; docs/versions.md then says with which versions.
nightly: tools-rust plugin ## fleets of simulated engines, drives, versions [SEED=N, DESCRIPTORS=N]
	@SEED="$${SEED:-$$(date +%Y%m%d)0000}" $(CARGO) test --quiet --profile fleet -p kvrail \
		--features sim --test fleet_sim nightly -- --ignored --nocapture
	@KVRAIL_TEST_CYCLES=10000 $(CARGO) test --quiet --profile fleet -p kvrail --features sim \
		--test verbs_engine registrations_leave_nothing -- --nocapture
	@python=$$(scripts/python.sh) && status=0; \
		KVRAIL_TEST_CYCLES=10000 "$$python" scripts/test.py rbln || status=1; \
		"$$python" scripts/test.py nixl || status=1; \
		KVRAIL_VLLM_NEXT=1 "$$python" scripts/test.py vllm || status=1; \
		mv build/test-logs/vllm.xml build/test-logs/vllm-next.xml; \
		PYTEST_ADDOPTS="--backends=RBLN,UCX" "$$python" scripts/test.py vllm || status=1; \
		mkdir -p build/test-logs; log=build/test-logs/drive.log; \
		scripts/drive.sh --nightly > $$log || status=1; tail -n 60 $$log; \
		"$$python" scripts/versions.py && exit $$status

test-rbln: plugin ## the published connector of vllm-rbln moves caches through the plugin [ARGS=...]
	@scripts/drive.sh $(ARGS)

lab: ## suites over the real libibverbs, in a kernel with Soft-RoCE [SUITES=, RAILS=N, ARGS=]
	@scripts/lab.sh $(if $(RAILS),--rails $(RAILS)) $(ARGS) $(SUITES)

bench: plugin ## cost of a descriptor beside NIXL with UCX, Mooncake, a loop in C [ARGS=...]
	@python=$$(scripts/python.sh) && "$$python" benches/peers/bench.py $(ARGS)

bench-local: lib plugin venv ## speed beside UCX and a bare copy, in one run [ARGS=...]
	@env -u NIXL_PLUGIN_DIR PYTHONPATH=bindings/python \
		$(VENV)/bin/python benches/local/bench.py $(ARGS)

lint: tools-rust ## formatting, clippy on every feature set, documentation, scripts
	@scripts/lint.sh $(FEATURES)

lib: tools-rust ## libkvrail.so and libkvrail.a, optimised
	@$(CARGO) build --release -p kvrail-ffi

command: tools-rust ## the command kvrail, optimised
	@$(CARGO) build --release -p kvrail-cli

plugin: tools-cxx lib ## the NIXL plugin, build/plugins/libplugin_RBLN.so
	@bindings/nixl/build.sh --out "$(PLUGINS)" --kvrail-lib "$(RELEASE)" >&2

wheel: plugin ## nixl_rbln with the plugin as a wheel, in build/wheels
	@python=$$(scripts/python.sh) && "$$python" bindings/rbln/wheel.py \
		--plugin "$(PLUGINS)/libplugin_RBLN.so" --out build/wheels

# As another user, who may have no cargo: make lib command plugin && sudo make install NOBUILD=1
install: $(if $(NOBUILD),,lib command plugin) ## command, header, libraries, plugin [PREFIX=, DESTDIR=, NOBUILD=1]
	@PREFIX="$(PREFIX)" BINDIR="$(BINDIR)" LIBDIR="$(LIBDIR)" INCLUDEDIR="$(INCLUDEDIR)" PLUGINDIR="$(PLUGINDIR)" \
		BUILT="$(RELEASE)" PLUGINS="$(PLUGINS)" scripts/install.sh

clean: ## remove what was built (build/ and cargo's folder)
	@rm -rf build
	@$(CARGO) clean --quiet

venv:
	@scripts/venv.sh demo

tools-rust:
	@scripts/tools.sh rust

tools-cxx:
	@scripts/tools.sh cxx
