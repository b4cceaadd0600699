"""A file includes only its own folder and folders to its left; folders of one level do not include each other.

core > io, comm, transport, cpu_kernels, gpu_kernels > hub, http, text, model > offload/balance, ops > offload/plan, scheduling > engine, offload, offload/servers > offload/parts, offload/simulation > loader/weights > loader >
api, prefill, server, bench > router, with_gpu, without_gpu > cli > main.cpp. cpu_kernels include not even core. The include path of GPU kernels chooses
their device.h. Islands (files of one instruction set) include nothing but their own headers and <immintrin.h>.
"""
import pathlib
import re
import sys

ORDER = {"include": 0, "src/core": 0, "src/io": 1, "src/comm": 1, "src/transport": 1, "cpu_kernels": 1, "gpu_kernels": 1, "src/hub": 2, "src/http": 2, "src/text": 2, "src/model": 2,
         "offload/balance": 3, "src/ops": 3, "offload/plan": 4, "src/scheduling": 4, "src/engine": 5, "offload": 5, "offload/servers": 5, "offload/parts": 6, "offload/simulation": 6, "src/loader/weights": 7, "src/loader": 8,
         "src/api": 9, "src/server": 9, "src/prefill": 9, "src/bench": 9, "src/router": 10, "src/with_gpu": 10, "src/without_gpu": 10, "src/cli": 11, "src": 12}


def folder_of(path):
    while path and path not in ORDER:
        path = path.rpartition("/")[0]
    return path


def included_folder(target):
    return folder_of(target.rpartition("/")[0]) or folder_of("src/" + target.rpartition("/")[0]) or "src"


def violations(root):
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        here = folder_of(name.rpartition("/")[0])
        if path.suffix not in (".h", ".cpp", ".cu") or not here or name.startswith("build"):
            continue
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r'#include "([^"]+)"', text):
            there = here if here == "gpu_kernels" and target in ("device.h", "packed.h", "clock.h") else included_folder(target)
            if there != here and (ORDER[there] >= ORDER[here] or here == "cpu_kernels"):
                yield f"{name} includes {target}: {here} may not use {there}"
        if here == "cpu_kernels" and re.match(r"cpu_kernels/(avx|amx)", name):
            for system in re.findall(r"#include <([^>]+)>", text):
                if system != "immintrin.h":
                    yield f"{name} includes <{system}>: an island includes only <immintrin.h>"


# Weights are written long before a kernel reads them; everything else must wait for earlier kernels.
READS_WEIGHTS = {"gpu_kernels/products/skinny_product.cu": "load_group<kType>(a.w,",
                 "gpu_kernels/products/per_head_product.cu": "load_weights<kType>(a, 0,"}


def late_begins(root):
    """Kernels that start early (LaunchShape::early) and do something before begin_early(). Copies of arguments and what
    READS_WEIGHTS names are allowed."""
    for path in sorted((root / "gpu_kernels").rglob("*.cu")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        bodies = re.findall(r"__global__ [^{;]*\{\n(.*?)\n\}\n", text, re.DOTALL)
        if ".early = true" in text and not any("begin_early();" in body for body in bodies):
            yield f"{name}: a kernel starts early without begin_early()"
        for body in bodies:
            before = body.partition("begin_early();")[0] if "begin_early();" in body else ""
            if before.strip() and READS_WEIGHTS.get(name, "begin_early") not in before.strip().split("\n")[-1]:
                yield f"{name}: begin_early() comes after {before.strip()!r}"


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    found = [*violations(root), *late_begins(root)]
    print("\n".join(found) or "every include points to the left")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
