#!/bin/sh
# Installs Python packages that only tests and tools need, each in a virtual environment below build/: openai for
# tests/serve_test.py, scikit-build-core for tests/wheel_test.py, libclang for tools/mutation_score.py. If no package
# index can be reached, their tests are skipped.
#
#     tools/client_packages.sh [clients|packaging|libclang]..     all of them without an argument
set -eu
case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
cd "$(dirname "$0")/.."
mkdir -p build

install() {
  folder=build/$1
  [ ! -e "$folder/complete" ] || return 0
  echo "installing $2 into $folder"
  if python3 -m venv "$folder" >build/$1.log 2>&1 && "$folder/bin/pip" install -q "$2" >>build/$1.log 2>&1; then
    touch "$folder/complete"
  else
    echo "it cannot be installed ($(tail -n 1 build/$1.log)): its test is skipped"
  fi
}

[ $# -gt 0 ] || set -- clients packaging libclang
for name; do
  case $name in
  clients) install clients openai==3.54.0 ;;
  packaging) install packaging scikit-build-core==1.1.2 ;;
  libclang) install libclang libclang==18.1.1 ;;
  *) echo "error: $name: clients, packaging or libclang" >&2 && exit 2 ;;
  esac
done
