#!/bin/sh
# Measures this machine and the engine in under 8 minutes:
#     tools/bench_report.sh TANDEM FOLDER
# writes FOLDER/<cpu>/report.json (every row of `tandem bench`), and with Python 3 report.md and plots beside it.
# Benchmarks that do not fit into the time or the memory are left out, and the report names them.
set -eu
case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
tandem=$1
here=$(cd "$(dirname "$0")" && pwd)
budget=${BENCH_SECONDS:-450}
longest=120 # seconds of one command

value_of() { sed -n "s/^$1[[:space:]]*: //p" /proc/cpuinfo | head -1; }
cpu=$(value_of "model name")
case $cpu in
  *[0-9]*) ;;
  *) cpu="$cpu family $(value_of "cpu family") model $(value_of "model")" ;; # virtual machines hide the model name
esac
folder=$2/$(echo "${cpu:-unknown}" | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9\n' '-' | sed 's/-$//')
mkdir -p "$folder"
rows=$(mktemp)
errors=$(mktemp)
trap 'rm -f "$rows" "$errors"' EXIT
start=$(date +%s)

bench() {
  left=$((start + budget - $(date +%s)))
  if [ "$left" -lt 10 ]; then
    echo "{\"bench\": \"left out\", \"command\": \"$*\", \"reason\": \"no time was left\"}" >> "$rows"
    return
  fi
  echo "tandem bench $*" >&2
  [ "$left" -lt "$longest" ] || left=$longest
  before=$(wc -l < "$rows")
  timeout "$left" "$tandem" bench "$@" --json >> "$rows" 2> "$errors" && return
  reason=$(head -1 "$errors" | tr -d '"\\')
  [ "$(wc -l < "$rows")" -gt "$before" ] && reason="only the first rows: ${reason:-no time was left}"
  echo "{\"bench\": \"left out\", \"command\": \"$*\", \"reason\": \"${reason:-no time was left}\"}" >> "$rows"
}

bench machine
bench experts --config r1 --experts fp8 --tokens 1,4,16,64,128,512 --skew
bench generate --config r1 --layers 5 --experts fp8 --ctx 1024,16384
bench attention --config r1 --tokens 512
bench attention --config r1 --variants --ctx 4096
bench mlp --config r1 --format fp8 --tokens 1,8,64,512
for format in int8 int4 bf16; do
  bench experts --config r1 --experts $format --tokens 1,4,16,64,128,512
done
bench experts --config k2 --experts int4-32-bf16 --tokens 1,8,64,512
bench experts --config v2-lite --experts bf16 --tokens 1,8,64,512
bench mlp --config r1 --format bf16 --tokens 1,8,64,512
bench generate --config v2-lite --layers 6 --ctx 1024
bench attention --config v2-lite --ctx 4096 --tokens 512
bench experts --config r1 --experts fp8 --tokens 2,8,32,2048
bench embed --config r1 --seconds 0.1
bench moe --config r1 --layers 1 --tokens 1,16,128 --seconds 0.2
bench layer --config r1 --layers 3 --ctx 4096 --tokens 1,32,512

{ echo "["; sed '$!s/$/,/' "$rows"; echo "]"; } > "$folder/report.json"
"$tandem" bench machine --seconds 0.1 --curves "$folder/report.json" > /dev/null # `tandem plan` uses these curves from now on
if command -v python3 > /dev/null; then
  python3 "$here/plot_bench.py" "$folder/report.json"
fi
echo "$folder"
