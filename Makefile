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
.PHONY: help demo test nightly lab bench-local lint lib command plugin install clean venv \
	tools-rust tools-cxx

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  ARGS="..."     options of demo and bench-local: make demo ARGS="--help"'
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

# Any base seed will do; without one, each day has its own.
nightly: tools-rust ## fleets of simulated engines, 100 million descriptors [SEED=N, DESCRIPTORS=N]
	@SEED="$${SEED:-$$(date +%Y%m%d)0000}" $(CARGO) test --quiet --profile fleet -p kvrail \
		--features sim --test fleet_sim nightly -- --ignored --nocapture

lab: ## suites over the real libibverbs, in a kernel with Soft-RoCE [SUITES=, RAILS=N, ARGS=]
	@scripts/lab.sh $(if $(RAILS),--rails $(RAILS)) $(ARGS) $(SUITES)

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
