#!/bin/sh
# What there is to see on a machine with an NVIDIA GPU, in under 9 minutes:
#     tests/gpu_check.sh FOLDER [BUILD]
# runs every test of BUILD/tests/gpu_tests_cuda (in a bundle: beside this script), compute-sanitizer on the tests of kernels
# where it is installed, one answer of tiny-r1 on the CPU and on the GPU, and benchmarks of R1's shapes with
# their GPU columns, as many as there is time for. Writes FOLDER/gpu.json, FOLDER/gpu.log and the rows, FOLDER/bench.jsonl.
# Exit status 1 when anything failed, 77 when there is no GPU.
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?give the folder for gpu.json and gpu.log}
if [ -x "$here/gpu_tests_cuda" ]; then
  tests="$here/gpu_tests_cuda" tandem="$here/tandem" root="$here"
else
  root=$(dirname "$here") build=${2:-$(dirname "$here")/build/release}
  tests="$build/tests/gpu_tests_cuda" tandem="$build/tandem"
fi
export TANDEM_TEST_ROOT="$root"
if [ -d "$root/lib" ]; then  # a bundle's; the machine's own C++ library, if it will do
  export LD_LIBRARY_PATH="$root/lib"
  "$tests" --help > /dev/null 2>&1 || LD_LIBRARY_PATH="$root/lib:$root/lib/c++"
fi
mkdir -p "$out"
log="$out/gpu.log" json="$out/gpu.json"
: > "$log"
command -v nvidia-smi > /dev/null && nvidia-smi >> "$log" 2>&1
end=$(($(date +%s) + 500))
failed=0 ran=0 results=""

# measure NAME COMMAND..: one line of the JSON, and everything in the log.
measure() {
  name=$1
  shift
  left=$((end - $(date +%s)))
  [ "$left" -gt 5 ] || left=5
  echo "== $name: $*" >> "$log"
  start=$(date +%s)
  timeout "$left" "$@" >> "$log" 2>&1
  status=$?
  case $status in
    0) result=passed ;;
    77) result=skipped ;;
    124) result="out of time" failed=1 ;;
    *) result=failed failed=1 ;;
  esac
  [ $status = 77 ] || ran=$((ran + 1))
  echo "$name: $result, $(($(date +%s) - start)) s"
  results="$results${results:+,}
    {\"name\": \"$name\", \"result\": \"$result\", \"seconds\": $(($(date +%s) - start))}"
}

suites=$("$tests" --gtest_list_tests 2>> "$log")
if [ $? = 77 ]; then
  echo "$suites"
  exit 77
fi
suites=$(echo "$suites" | sed -n 's/^\([A-Za-z][A-Za-z0-9_/]*[.]\).*$/\1/p')
for suite in $suites; do
  measure "${suite%.}" "$tests" --gtest_filter="$suite*"
done
if [ $ran -gt 0 ]; then
  if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck synccheck; do
      for suite in $suites; do
        case $suite in # whole models
          *Engine* | *Golden* | *Graphs* | *Swap* | GpuBench* | GpuCache* | Hybrid.*) continue ;;
        esac
        measure "$tool ${suite%.}" compute-sanitizer --tool $tool --error-exitcode 1 "$tests" --gtest_filter="$suite*"
      done
    done
  fi
  for device in cpu cuda; do
    measure "tiny-r1 on $device" "$tandem" run --device $device --temp 0 --json -p "What is 478 + 356?"
  done
  bench() {
    what=$1
    shift
    [ $((end - $(date +%s))) -gt 30 ] || return 0
    measure "bench $what" sh -c '"$0" bench "$@" --json --seconds 0.1 >> "$ROWS"' "$tandem" "$what" --config r1 --memory 8 "$@"
  }
  export ROWS="$out/bench.jsonl"
  : > "$ROWS"
  bench embed
  bench mlp --tokens 1,8,64,512
  bench attention --ctx 4096,16384
  bench attention --variants --ctx 4096
  bench moe --tokens 1,8,64,512 --layers 1
  bench layer --tokens 1,8 --ctx 4096 --layers 1
  bench generate --layers 3 --ctx 1024 --batch 1,8 --tokens 512
fi
card=$(sed -n 's/^on \(.*\), compute capability.*/\1/p' "$log" | head -1)
printf '{\n  "card": "%s",\n  "date": "%s",\n  "results": [%s\n  ]\n}\n' "$card" "$(date -u +%F)" "$results" > "$json"
[ $ran -gt 0 ] || exit 77
exit $failed
