# What a person types. The set-up is stamped: a second run starts at once.
#
#   make demo         trains a 419 M-parameter Llama, its states on disk, under a 1250 MiB cap
#   make test         the tests (not those marked slow or soak)
#   make test-all     also the slow ones; installs what all examples and the site need
#   make soak         only the soak; seeds and totals go to build/soak
#   make native-test  floor 0 under sanitizers  make lint    what CI checks before it tests
#   make native-test-arm   floor 0's arithmetic for aarch64, under qemu: the bits that x86-64 recorded. ARM_TESTS chooses
#                     among its tests. Needs Debian's g++-aarch64-linux-gnu and qemu-user
#   make gpu          what to run first on a GPU: its link, its tests, small trainings watched and traced, an 8B shape beside
#                     peers; build/gpu.json, build/gpu.png and one table. GPU_OPTIONS="--part ..." chooses (docs/gpu.md).
#                     On a bare machine, with packages and the native module in PYTHONPATH: make gpu GPU_PYTHON=python3
#   make docs        the site, in build/site: without internet once its packages are installed, without warnings
#   make measure      appends rows to docs/measured/*.json and writes docs/measured.md. Takes an hour; MEASURE="--path DIR --only io"
#   make report       docs/parity.md: what was tried on this machine and commit, and what was seen. Takes minutes
#   make bench RUN="overlap --path DIR"   an instrument of tests/bench: overlap, ranks, curves or peers; --help tells its options
#   make yardsticks   build/yardsticks/{bare_loop,bare_stream,bench_native}, which benchmarks and people measure against
#   make clean        removes what was built, and .venv

DEMO ?= .venv/bin/tiermem train --preset 419m --offload nvme --memory 1250MiB --steps 10

BIN := .venv/bin
# Errors are printed, warnings are not: they are about indexes and caches of the machine, and nothing here depends on them.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
NATIVE := $(wildcard native/*.cpp native/*.h native/*.py native/CMakeLists.txt)
NATIVE_CODE := $(wildcard native/*.cpp native/*.h tests/native/*.cpp tests/native/*.h)
CMAKE := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cmake -G Ninja

.PHONY: demo test test-all soak gpu bench docs report measure lint native-test native-test-arm yardsticks wheel clean
.DELETE_ON_ERROR:

demo: .venv/.installed
	$(DEMO)

# Four processes with one thread of maths each keep two cores busy while tests wait for disks and for one another's ranks;
# threads of OpenMP would wait in its spinning barrier for one another.
# Bytecode is written, also where the environment says otherwise: the tests start Python some hundred times.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --workers 4

test: .venv/.installed
	@$(PYTEST)

test-all: .venv/.installed .venv/.trl .venv/.docs
	@$(PYTEST) -m "not soak"

soak: .venv/.installed .venv/.fuzz
	@mkdir -p build/soak
	@TIERMEM_SOAK_TOTALS=$(CURDIR)/build/soak $(BIN)/python -m pytest -q -m soak --timeout=0

gpu: $(if $(GPU_PYTHON)$(SITTING),,.venv/.installed)
	@mkdir -p build
ifdef SITTING
	@bash tests/gpu/sitting.sh $(SITTING)
else
	@PYTHONPATH=tests:$$PYTHONPATH $(or $(GPU_PYTHON),$(BIN)/python) -m bench.gpu --json build/gpu.json $(GPU_OPTIONS)
endif

bench: .venv/.installed
	@PYTHONPATH=tests $(BIN)/python -m bench $(RUN)

docs: .venv/.installed .venv/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

report: .venv/.installed
	@PYTHONPATH=tests $(BIN)/python -m bench.parity --out docs/parity.md

measure: .venv/.installed yardsticks
	@PYTHONPATH=tests $(BIN)/python -m bench.measure $(MEASURE)

lint: .venv/.installed .venv/.tools
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_CODE)
	$(BIN)/codespell
	@$(BIN)/python tests/test_weight.py

THREADED := map queue queue_options latency faults gradient checksum pass program strips
SPACE := $() $()
# AddressSanitizer and UndefinedBehaviorSanitizer over everything, ThreadSanitizer over what has threads of its own.
native-test: .venv/.tools
	$(CMAKE) -S native -B build/asan -DTIERMEM_STRICT=ON -DTIERMEM_TESTS=ON -DTIERMEM_SANITIZE=address,undefined
	$(BIN)/cmake --build build/asan
	$(BIN)/ctest --test-dir build/asan --output-on-failure -j 2
	$(CMAKE) -S native -B build/tsan -DTIERMEM_STRICT=ON -DTIERMEM_TESTS=ON -DTIERMEM_SANITIZE=thread
	$(BIN)/cmake --build build/tsan --target $(THREADED:%=test_%)
	$(BIN)/ctest --test-dir build/tsan --output-on-failure -j 2 -R "^($(subst $(SPACE),|,$(THREADED)))$$"

# What is there of the machine's own (threads, disks) is not tested under an emulator.
ARM_TESTS ?= workers|parts|blocks|rounding|optimizer_.*|gradient|checksum|pass
native-test-arm: .venv/.tools
	$(CMAKE) -S native -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/native/aarch64.cmake -DTIERMEM_STRICT=ON -DTIERMEM_TESTS=ON
	$(BIN)/cmake --build build/aarch64
	$(BIN)/ctest --test-dir build/aarch64 --output-on-failure -R "^($(ARM_TESTS))$$"

# The programs of tests/native that measure, as fast as they can be.
yardsticks: .venv/.tools
	$(CMAKE) -S native -B build/yardsticks -DTIERMEM_TESTS=ON -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_RUNTIME_OUTPUT_DIRECTORY=$(CURDIR)/build/yardsticks
	$(BIN)/cmake --build build/yardsticks --target bare_loop bare_stream bench_native

# An sdist, the wheel built from it, and a wheel for aarch64 where Debian's cross compiler and its packages are (see
# native/arm_packages.sh). Their tags say the oldest C library that they work with; their symbols are in the stable ABI.
ARM := build/aarch64-sysroot
wheel: .venv/.tools
	rm -rf dist build/wheels
	$(BIN)/python -m build --outdir build/wheels .
	@if native/arm_packages.sh $(ARM); then PATH="$(CURDIR)/$(BIN):$$PATH" _PYTHON_HOST_PLATFORM=linux-aarch64 \
	  SKBUILD_CMAKE_ARGS="-DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/native/aarch64.cmake;-DTIERMEM_SYSROOT=$(CURDIR)/$(ARM);-DPython_INCLUDE_DIR=$$(ls -d $(CURDIR)/$(ARM)/usr/include/python3.*)" \
	  $(BIN)/python -m build --wheel --no-isolation --outdir build/wheels .; else echo "no wheel for aarch64"; fi
	@for wheel in build/wheels/*.whl; do \
	  PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist $$wheel || exit 1; done
	$(BIN)/abi3audit --strict dist/*.whl
	mv build/wheels/*.tar.gz dist

clean:
	rm -rf build dist .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The first Python that works: it starts, is new enough, and can make environments.
.venv/bin/python:
	@for python in python3.12 python3.11 python3.10 python3; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	    echo "making .venv with $$python"; exec $$python -m venv .venv; \
	  fi; \
	done; \
	echo "no Python of 3.10 or newer that can make environments (Debian: apt-get install python3-venv)"; exit 1

# torch first and alone: asked for with the rest, pip may take a build of several gigabytes.
.venv/.torch: constraints.txt | .venv/bin/python
	@echo "installing torch (some 200 MB) and numpy into .venv"
	@$(PIP) install "$$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' constraints.txt)" numpy -c constraints.txt
	@touch $@

.venv/.installed: pyproject.toml constraints.txt $(NATIVE) .venv/.torch
	@native/system_packages.sh $(CURDIR)/.venv/bin/python
	@echo "building the native code; installing tiermem and what its tests, plots and models need"
	@$(PIP) install -c constraints.txt -e ".[plots,hf]" $$($(BIN)/python .ci/extra.py test)
	@touch $@

# Coverage-guided fuzzing. There are wheels for Python 3.11 to 3.13 on x86-64; elsewhere its tests are skipped.
.venv/.fuzz: pyproject.toml constraints.txt .venv/.installed
	-$(PIP) install -c constraints.txt --only-binary=:all: $$($(BIN)/python .ci/extra.py fuzz)
	@touch $@

# TRL, PEFT, Lightning, TensorBoard and Triton, whose tests are skipped elsewhere: some 500 MB.
.venv/.trl: pyproject.toml constraints.txt .venv/.installed
	@echo "installing TRL, PEFT, Lightning, TensorBoard and Triton"
	@$(PIP) install -c constraints.txt $$($(BIN)/python .ci/extra.py trl) $$($(BIN)/python .ci/extra.py lightning) \
	  $$($(BIN)/python .ci/extra.py tensorboard) $$($(BIN)/python .ci/extra.py triton)
	@touch $@

.venv/.docs: pyproject.toml constraints.txt .venv/.installed
	@echo "installing what builds the site"
	@$(PIP) install -c constraints.txt $$($(BIN)/python .ci/extra.py docs)
	@touch $@

.venv/.tools: pyproject.toml constraints.txt | .venv/bin/python
	@native/system_packages.sh $(CURDIR)/.venv/bin/python
	@echo "installing the tools of developers"
	@$(PIP) install -c constraints.txt $$($(BIN)/python .ci/extra.py dev)
	@touch $@
