#!/bin/sh
# No island may bring a weak symbol: the linker could then pick code for a newer CPU and run it on an older one.
checked=0
for object in "$@"; do
  case $object in
    *avx* | *amx*)
      checked=$((checked + 1))
      if nm -C "$object" | grep -E ' [WVu] '; then
        echo "$object has weak symbols"
        exit 1
      fi
      ;;
  esac
done
[ "$checked" -gt 0 ] || { echo "no island was given"; exit 1; }
