# make                   builds the program, the tests and the benchmarks
# make run               builds the program and asks the embedded model a question
# make test              builds the program and the tests, and runs them
# make test-long         runs the longest tests and each fuzz target for 3 seconds
# make install           installs the program, the library and its models below PREFIX (/usr/local) in DESTDIR
# make bench-report      measures this machine in under 8 minutes, into docs/measurements/
# make bundle            makes build/tandem-bench.tar.gz, which measures machines that cannot build
# make validate-planner  compares predictions with this machine, into docs/planner_validation.md
# make hybrid-schedule   measures steps shared by a simulated GPU and this CPU; prints the table of
#                        docs/measurements/hybrid_schedule.md
# make mutation-score    counts the random mutations of 100 that the tests catch (SEED=1)
# make lint-changed      clang-tidy over the LINT_CHANGED sources changed last; make lint: over all
# Other targets: bench, asan, tsan, fuzz, mutants, format, clean. Targets install missing packages;
# everything is built below build/.
.PHONY: all configure build run test test-long install deps bench bench-report validate-planner hybrid-schedule bundle \
        asan tsan fuzz mutants mutation-score format format-check lint lint-changed clean

PACKAGES := cmake g++ ninja-build pkg-config libhwloc-dev libgtest-dev libbenchmark-dev libeigen3-dev libdnnl-dev \
            nlohmann-json3-dev libboost-dev libssl-dev libcurl4-openssl-dev libcli11-dev libfmt-dev libpcre2-dev libxxhash-dev \
            libucx-dev python3 python3-venv python3-jinja2
TEST_PACKAGES := openmpi-bin iproute2 curl openssl
LINT_PACKAGES := clang-format-14 clang-tidy-14
JOBS := $(shell nproc)
# Some tests wait for servers and timeouts most of their time.
TEST_JOBS := $(shell expr $(JOBS) + 2)
FUZZ_SECONDS ?= 600
LINT_CHANGED ?= 5
SEED ?= 1
PREFIX ?= /usr/local

all: build

run: configure
	@cmake --build build/release -j$(JOBS) --target tandem
	@ln -sf release/tandem build/tandem
	@./build/release/tandem run --temp 0 -p "What is 478 + 356?"

test: configure
	@tools/install_packages.sh $(TEST_PACKAGES)
	@tools/client_packages.sh clients packaging & cmake --build build/release -j$(JOBS) --target tandem tests/all && wait
	@ln -sf release/tandem build/tandem
	@ctest --test-dir build/release --output-on-failure -j$(TEST_JOBS) -LE long

test-long: build
	@tools/client_packages.sh
	@tools/fuzz.sh 3
	@ctest --test-dir build/release --output-on-failure -j$(TEST_JOBS) -L long

install: deps
	@cmake --preset release -DCMAKE_INSTALL_PREFIX=$(PREFIX) > build/configure.log 2>&1 || (cat build/configure.log; exit 1)
	@cmake --build build/release -j$(JOBS) --target tandem tandem_library
	@DESTDIR="$(DESTDIR)" cmake --install build/release

configure: deps
	@cmake --preset release > build/configure.log 2>&1 || (cat build/configure.log; exit 1)

build: configure
	@cmake --build build/release -j$(JOBS)
	@ln -sf release/tandem build/tandem

deps:
	@mkdir -p build
	@tools/install_packages.sh $(PACKAGES)

bench: build
	@for b in build/release/benchmarks/*_bench; do echo "== $$b"; $$b || exit 1; done

bench-report: configure
	@cmake --build build/release -j$(JOBS) --target tandem
	@tools/bench_report.sh build/release/tandem docs/measurements

validate-planner: configure
	@cmake --build build/release -j$(JOBS) --target tandem
	@python3 tools/validate_planner.py build/release/tandem docs/planner_validation.md

hybrid-schedule: configure
	@cmake --build build/release -j$(JOBS) --target hybrid_schedule
	@build/release/benchmarks/hybrid_schedule

bundle: deps
	@cmake --preset release -B build/bundle -DTANDEM_CUDA=all > build/configure.log 2>&1 || (cat build/configure.log; exit 1)
	@cmake --build build/bundle -j$(JOBS) --target tandem gpu_tests_cuda
	@tools/bundle.sh build/bundle/tandem build/tandem-bench

asan tsan: deps
	@cmake --preset $@ > build/configure.log 2>&1 || (cat build/configure.log; exit 1)
	@cmake --build build/$@ -j$(JOBS)
	@ctest --test-dir build/$@ --output-on-failure -j$(JOBS)

fuzz: deps
	@tools/fuzz.sh $(FUZZ_SECONDS)

mutants: build
	@python3 tools/mutants.py

mutation-score: deps
	@python3 tools/mutation_score.py --seed $(SEED)

format: deps
	@tools/install_packages.sh $(LINT_PACKAGES)
	@git ls-files '*.cpp' '*.h' '*.cu' | xargs clang-format-14 -i

format-check: deps
	@tools/install_packages.sh clang-format-14
	@git ls-files '*.cpp' '*.h' '*.cu' | xargs -P$(JOBS) -n64 clang-format-14 --dry-run -Werror

# All sources, or the LINT_CHANGED that were changed last; not what is built without a library's headers alone.
LINTED := 'src/*.cpp' 'offload/*.cpp' 'cpu_kernels/*.cpp' ':!src/*/without_*.cpp'
lint lint-changed: deps
	@tools/install_packages.sh $(LINT_PACKAGES)
	@cmake --preset debug > build/configure.log 2>&1 || (cat build/configure.log; exit 1)
	@if [ $@ = lint ]; then git ls-files $(LINTED); \
	 elif [ "$$(git rev-parse --is-shallow-repository)" = true ]; then \
	   echo "nothing is linted: a shallow clone does not know what changed last" >&2; \
	 else git log --diff-merges=first-parent --name-only --pretty=format: -- $(LINTED) | awk 'NF && !seen[$$0]++' | \
	   while read -r file; do [ ! -e "$$file" ] || echo "$$file"; done | head -n $(LINT_CHANGED); fi | \
	  python3 tools/lint.py --jobs $(JOBS)

clean:
	@rm -rf build
