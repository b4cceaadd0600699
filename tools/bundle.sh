#!/bin/sh
# Makes a folder that measures any x86-64 Linux machine without building there:
#     tools/bundle.sh TANDEM FOLDER
# It contains the program, the shared libraries it needs besides the C library's, the models' configurations,
# bench_report.sh, and, if the program was built with CUDA, the tests of its GPU kernels and gpu_check.sh. FOLDER.tar.gz
# is the same in one file; on the other machine: tar xf, then FOLDER/measure.
set -eu
case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
tandem=$1
folder=$2
root=$(cd "$(dirname "$0")/.." && pwd)
rm -rf "$folder" "$folder.tar.gz"
mkdir -p "$folder/lib/c++" "$folder/models"
cp "$tandem" "$folder/tandem-program"
strip "$folder/tandem-program"
cp -r "$root/models/configs" "$root/models/tiny-r1" "$folder/models"
cp "$root/tools/bench_report.sh" "$root/tools/plot_bench.py" "$folder"
ldd "$tandem" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | while read -r library; do
  case $(basename "$library") in
    libc.so.* | libm.so.* | libpthread.so.* | libdl.so.* | librt.so.*) ;; # the machine's own: they must match its loader
    libstdc++.so.* | libgcc_s.so.*) cp -L "$library" "$folder/lib/c++" ;; # used if the machine's own are too old
    *) cp -L "$library" "$folder/lib" ;;
  esac
done
cat > "$folder/tandem" << 'SCRIPT'
#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
export LD_LIBRARY_PATH="$here/lib"
"$here/tandem-program" --help > /dev/null 2>&1 || LD_LIBRARY_PATH="$here/lib:$here/lib/c++"
exec "$here/tandem-program" "$@"
SCRIPT
cat > "$folder/measure" << 'SCRIPT'
#!/bin/sh
# Writes measurements/<cpu>/ beside itself, in under 8 minutes.
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/bench_report.sh" "$here/tandem" "$here/measurements"
SCRIPT
tests=$(dirname "$tandem")/tests/gpu_tests_cuda
if [ -x "$tests" ]; then
  mkdir -p "$folder/tests"
  strip -o "$folder/gpu_tests_cuda" "$tests"
  cp -r "$root/tests/golden" "$folder/tests"
  cp "$root/tests/gpu_check.sh" "$folder"
fi
# The oldest driver for each major version of the toolkit: https://docs.nvidia.com/deploy/cuda-compatibility, table 1.
nvcc=$(sed -n 's/^TANDEM_NVCC:[A-Z]*=//p' "$(dirname "$tandem")/CMakeCache.txt")
driver=""
case $("${nvcc:-false}" --version 2> /dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p') in
  12.*) driver=", and for its GPU an NVIDIA driver 525 or newer" ;;
  13.*) driver=", and for its GPU an NVIDIA driver 580 or newer" ;;
  ?*) driver=", and for its GPU an NVIDIA driver as new as $("$nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/CUDA \1/p')" ;;
esac
chmod +x "$folder/tandem" "$folder/measure" "$folder/bench_report.sh"
needed=$(cat "$folder"/tandem-program "$folder"/lib/*.so* | grep -ao 'GLIBC_[0-9]*\.[0-9.]*[0-9]' | sort -uV | tail -1)
tar -C "$(dirname "$folder")" -czf "$folder.tar.gz" "$(basename "$folder")"
megabytes=$(($(wc -c < "$folder.tar.gz") / 1000000 + 1))
echo "$folder.tar.gz: $megabytes MB; needs x86-64 Linux with ${needed}$driver"
if [ $megabytes -gt 60 ]; then
  echo "error: $folder.tar.gz has $megabytes MB: 60 are allowed; leave something out" >&2
  exit 1
fi
