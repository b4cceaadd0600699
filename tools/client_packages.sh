#!/bin/sh
# The openai package for tests/serve_test.py, in a virtual environment below build/. Where no package index can be reached,
# that test is skipped.
set -eu
cd "$(dirname "$0")/.."
folder=build/clients
[ ! -e "$folder/complete" ] || exit 0
echo "installing the openai package into $folder"
mkdir -p build
if python3 -m venv "$folder" >build/clients.log 2>&1 && "$folder/bin/pip" install -q openai==3.54.0 >>build/clients.log 2>&1; then
  touch "$folder/complete"
else
  echo "it cannot be installed ($(tail -n 1 build/clients.log)): its test is skipped"
fi
