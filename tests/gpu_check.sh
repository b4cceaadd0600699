#!/bin/sh
# Tests and measures a machine with an NVIDIA GPU in under 9 minutes:
#     tests/gpu_check.sh FOLDER [BUILD]
# runs every test of BUILD/tests/gpu_tests_cuda (in a bundle: beside this script), `tandem selftest`, one answer of
# tiny-r1 on the CPU and on the GPU, benchmarks of R1's shapes with their GPU columns, and compute-sanitizer on the kernel tests with the
# remaining time. Writes FOLDER/gpu.json with the GPU, the driver and every row of the benchmarks, and FOLDER/gpu.log.
# After the time limit nothing is started; remaining items are "not run". Exit status 1 if a test or tiny-r1 did not
# pass, or anything else failed; 77 if there is no GPU. GPU_CHECK_SECONDS sets another limit.
set -u
case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?give the folder for gpu.json and gpu.log}
if [ -x "$here/gpu_tests_cuda" ]; then
  tests="$here/gpu_tests_cuda" tandem="$here/tandem" root="$here"
else
  root=$(dirname "$here") build=${2:-$(dirname "$here")/build/release}
  tests="$build/tests/gpu_tests_cuda" tandem="$build/tandem"
fi
export TANDEM_TEST_ROOT="$root"
total=${GPU_CHECK_SECONDS:-520}
end=$(($(date +%s) + total))
grace=$((total / 100 + 1)) # seconds between SIGTERM and SIGKILL
if [ -d "$root/lib" ]; then  # a bundle: uses the machine's C++ library if the tests start with it
  export LD_LIBRARY_PATH="$root/lib"
  timeout -k "$grace" 20 "$tests" --help > /dev/null 2>&1 || LD_LIBRARY_PATH="$root/lib:$root/lib/c++"
fi
mkdir -p "$out"
log="$out/gpu.log" json="$out/gpu.json" rows="$out/bench.jsonl"
export ROWS="$rows"
: > "$log"
: > "$rows"
failed=0 ran=0 results=""

# record NAME RESULT SECONDS
record() {
  echo "$1: $2, $3 s"
  results="$results${results:+,}
    {\"name\": \"$1\", \"result\": \"$2\", \"seconds\": $3}"
}

# phase SECONDS REQUIRED: the following items have this time together, at least 3 s, and each at most half of it.
# REQUIRED is 1 if the check fails when an item runs out of time.
phase() {
  now=$(date +%s)
  phase_end=$((now + ($1 > 3 ? $1 : 3))) required=$2
  [ $phase_end -le $end ] || phase_end=$end
  most=$(((phase_end - now + 1) / 2))
}
# share PARTS: PARTS / 520 of the total time.
share() { echo $((total * $1 / 520)); }

# measure NAME COMMAND..: adds one result to the JSON and all output to the log.
measure() {
  name=$1
  shift
  start=$(date +%s)
  left=$((phase_end - start))
  [ $left -le $most ] || left=$most
  if [ $left -le 0 ]; then
    [ "$required" = 0 ] || failed=1
    record "$name" "not run" 0
    return
  fi
  echo "== $name: $*" >> "$log"
  timeout -k "$grace" "$left" "$@" >> "$log" 2>&1
  status=$?
  case $status in
    0) result=passed ;;
    77) result=skipped ;;
    124 | 137)
      result="out of time"
      [ "$required" = 0 ] || failed=1
      ;;
    *) result=failed failed=1 ;;
  esac
  [ $status = 77 ] || ran=$((ran + 1))
  record "$name" "$result" $(($(date +%s) - start))
}

# text SED_EXPRESSION: its first match in the log, as a JSON string.
text() { printf '"%s"' "$(sed -n "$1" "$log" | head -1 | tr -d '"\\' | tr -cd '[:print:]')"; }

finish() {
  {
    printf '{\n  "card": %s,\n' "$(text 's/^on \(.*\), compute capability.*/\1/p')"
    printf '  "compute_capability": %s,\n' "$(text 's/^on .*, compute capability \([0-9.]*\).*/\1/p')"
    printf '  "cuda": {"program": %s, "driver": %s},\n' "$(text 's/^on .*, built with CUDA \([0-9.]*\).*/\1/p')" \
      "$(text 's/^on .*, driver for CUDA \([0-9.]*\).*/\1/p')"
    printf '  "driver_version": %s,\n' "$(text 's/.*Driver Version: *\([0-9.]*\).*/\1/p')"
    printf '  "date": "%s",\n  "seconds": %s,\n' "$(date -u +%F)" $(($(date +%s) - end + total))
    printf '  "results": [%s\n  ],\n' "$results"
    # Rows of an ended program may be incomplete.
    printf '  "benchmarks": [\n%s\n  ]\n}\n' "$(sed -n 's/^{.*}$/    &/p' "$rows" | sed '$!s/$/,/')"
  } > "$json"
  [ $ran -gt 0 ] || exit 77
  exit $failed
}

if command -v nvidia-smi > /dev/null; then timeout -k "$grace" 20 nvidia-smi >> "$log" 2>&1; fi
suites=$(timeout -k "$grace" 60 "$tests" --gtest_list_tests 2>> "$log")
status=$?
printf '%s\n' "$suites" >> "$log"
if [ $status != 0 ]; then
  printf '%s\n' "$suites"
  [ $status = 77 ] || ran=1 failed=1
  [ $status = 77 ] && record "list of tests" skipped 0 || record "list of tests" failed 0
  finish
fi
suites=$(printf '%s\n' "$suites" | sed -n 's/^\([A-Za-z][A-Za-z0-9_/]*[.]\).*$/\1/p')
phase "$(share 200)" 1
for suite in $suites; do
  measure "${suite%.}" "$tests" --gtest_filter="$suite*"
done
[ $ran -gt 0 ] || finish

phase "$(share 80)" 1
measure "self-test" "$tandem" selftest --layers 2
for device in cpu cuda; do
  measure "tiny-r1 on $device" "$tandem" run --device $device --temp 0 --json -p "What is 478 + 356?"
done

capability=$(sed -n 's/^on .*, compute capability \([0-9]*\)\.\([0-9]*\).*/\1\2/p' "$log" | head -1)
# Benchmarks with a target come first (docs/gpu_benchmarks.md).
phase "$(share 140)" 0
bench() {
  what=$1
  shift
  measure "bench $what $*" \
    sh -c '"$0" bench "$@" --json >> "$ROWS"' "$tandem" "$what" --config r1 --memory 8 --seconds 0.1 "$@"
  [ -z "$(tail -c 1 "$rows")" ] || echo >> "$rows" # ends an incomplete row
}
measure "bench machine" sh -c '"$0" bench machine --json --seconds 0.1 >> "$ROWS"' "$tandem"
bench attention --ctx 4096,16384 --batch 1,4,16 --tokens 1
bench mlp --tokens 1,8,512
bench kernels --tokens 1,8,512
bench products --tokens 512,4096
bench hybrid --layers 3 --ctx 4096 --batch 1,8,16,32 --tokens 512
# Kernels that start before the one before has ended: compute capability 9.0 and later, not the default.
if [ "${capability:-0}" -ge 90 ]; then
  export TANDEM_GPU_EARLY=1
  for suite in $suites; do
    case $suite in
      GpuAttention. | GpuProducts. | GpuEngine* | Families/GpuGolden.)
        measure "early ${suite%.}" "$tests" --gtest_filter="$suite*"
        ;;
    esac
  done
  bench hybrid --layers 3 --ctx 4096 --batch 1
  unset TANDEM_GPU_EARLY
fi
bench attention --ctx 8192 --tokens 512
bench attention --ctx 65536 --batch 1,16 --tokens 1 # the first row is decode; restoring so many keys takes the CPU long
bench products --tokens 512,4096 --format bf16
bench generate --layers 3 --ctx 4096 --batch 1,8 --tokens 512
bench moe --tokens 1,512 --layers 1
if [ "${capability:-0}" -ge 89 ]; then
  bench mlp --tokens 512 --activations fp8
  bench moe --tokens 512 --layers 1 --activations fp8
fi
bench layer --tokens 1,8 --ctx 4096 --layers 1
bench embed --tokens 1,64,512
bench head --tokens 1,64
bench attention --variants --ctx 4096
# A short context in a cache made for a long one, then the long one, which takes the CPU longest.
bench attention --ctx 4096,65536 --context-limit 65536 --tokens 512

if command -v compute-sanitizer > /dev/null; then
  n_left=4
  for tool in memcheck racecheck synccheck initcheck; do # each gets half of the remaining time, the last one all
    left=$((end - $(date +%s)))
    [ $n_left = 1 ] || left=$((left / 2))
    n_left=$((n_left - 1))
    phase $left 0
    for suite in $suites; do
      # Whole models, cuBLAS and benchmarks would take all the time. Tests in which the GPU waits for the CPU skip
      # themselves if the tool makes launches wait for their kernels.
      case $suite in
        *Engine* | *Golden* | *Graphs* | *Swap* | *Bench* | *Drafts. | Cublas* | SelfTest* | *Row. | *Rates. | \
          GpuProbes. | KernelGap. | GpuCache. | Families/*)
          continue ;;
      esac
      measure "$tool ${suite%.}" compute-sanitizer --tool $tool --error-exitcode 1 "$tests" --gtest_filter="$suite*"
    done
  done
else
  record compute-sanitizer "not installed" 0
fi
finish
