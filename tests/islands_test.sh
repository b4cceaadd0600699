#!/bin/sh
# islands_test.sh OBJECT... --emulated OBJECT...
# No island may define a weak symbol, because the linker could then use code for a newer CPU on an older one.
# No emulated island may define a symbol of a native one, because the linker would use either for both.
native= emulated= measured= list=native
for object in "$@"; do
  case $object in
    --emulated) list=emulated ;;
    */peaks_*) measured="$measured $object" ;;
    */avx*/* | */amx/* | */tables.*) eval "$list=\"\$$list \$object\"" ;;
  esac
done
[ -n "$native" ] || { echo "no island was given"; exit 1; }
for object in $native $measured; do
  if nm -C "$object" | grep -E ' [WVu] '; then
    echo "$object has weak symbols"
    exit 1
  fi
done

exported() { nm --defined-only "$@" | sed -n 's/.* T //p' | sort -u; }
[ "$(echo $emulated | wc -w)" = "$(echo $native | wc -w)" ] || { echo "not every island is emulated"; exit 1; }
both=$(printf '%s\n%s\n' "$(exported $native)" "$(exported $emulated)" | sort | uniq -d)
[ -z "$both" ] || { echo "native and emulated at once: $both"; exit 1; }
