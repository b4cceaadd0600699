#!/bin/sh
# Builds the fuzz targets and runs each for the given number of seconds (10) from its seed corpus, as many at a
# time as there are cores:
#     tools/fuzz.sh [SECONDS]
set -eu
case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
cd "$(dirname "$0")/.."
seconds=${1:-10}
mkdir -p build
# Debian 12's clang cannot read the <chrono> of GCC 13, so Ubuntu 24.04 uses its own version.
version=14
[ ! -d /usr/include/c++/13 ] || version=18
tools/install_packages.sh "clang-$version" "libclang-rt-$version-dev"
# Before a short run, compiling optimised code would take longer than it saves, and checks of undefined behaviour
# double the time to compile.
built=build/fuzz optimised=-O2 checks=address,undefined
[ "$seconds" -ge 60 ] || { built=build/fuzz-short optimised=-O0 checks=address; }
cmake --preset fuzz -B "$built" "-DTANDEM_SANITIZE=$checks" -DCMAKE_CXX_COMPILER="clang++-$version" \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="$optimised -gline-tables-only -DNDEBUG" >build/configure-fuzz.log 2>&1 ||
  { cat build/configure-fuzz.log; exit 1; }
cmake --build "$built" -j"$(nproc)"
# The entropic schedule would take half of the time for targets whose inputs have thousands of features.
run_target='
  name=$(basename "$1" _fuzz)
  mkdir -p "build/fuzz/found/$name"
  "$1" -max_total_time="$2" -timeout=10 -rss_limit_mb=4096 -entropic=0 -print_final_stats=1 -verbosity=0 \
    -artifact_prefix="build/fuzz/found/" "build/fuzz/found/$name" "tests/fuzz/corpus/$name" \
    >"build/fuzz/$name.log" 2>&1 || { tail -n 40 "build/fuzz/$name.log"; echo "fuzz target $name failed"; exit 1; }
  echo "fuzz $name: $(sed -n "s/^stat::number_of_executed_units: *//p" "build/fuzz/$name.log") executions, no crash"
'
printf '%s\n' "$built"/tests/fuzz/*_fuzz | xargs -P "$(nproc)" -I TARGET sh -c "$run_target" run_target TARGET "$seconds"
