"""The container recipe installs the packages of the libraries that the program needs, and no others.

    python3 tests/container_test.py PATH_OF_TANDEM

Skipped on systems other than the recipe's.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = 77
# apt, which is in every image of Debian, needs these; certificates are files, not a library.
IN_THE_BASE = {"libc6", "libgcc-s1", "libstdc++6"}
NO_LIBRARY = {"ca-certificates"}


def recipe():
    return (ROOT / "docs/serving/Containerfile").read_text(encoding="utf-8")


def listed_packages(text):
    """The packages of the last stage's apt-get install."""
    stage = text[text.rindex("\nFROM "):].replace("\\\n", " ")
    return set(re.search(r"apt-get install -y --no-install-recommends ([^&]*)&&", stage)[1].split())


def needed_libraries(program):
    """Names that the loader looks for, and the library that `tandem pull` opens."""
    dynamic = subprocess.run(["readelf", "-d", program], capture_output=True, text=True, check=True).stdout
    opened = re.search(r'kNames\[\] = \{"([^"]*)"', (ROOT / "src/hub/http.cpp").read_text(encoding="utf-8"))
    return {*re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic), opened[1]}


def package_of(library):
    """Debian's package of a library in the loader's cache."""
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    path = re.search(rf"^\s*{re.escape(library)} \(libc6,x86-64.*=> (\S+)$", cache, re.M)
    assert path, f"{library} is not in the loader's cache"
    inside_usr = "/usr" + path[1].removeprefix("/usr")  # /lib is a link to /usr/lib; packages list either
    for place in (inside_usr, inside_usr.removeprefix("/usr")):
        found = subprocess.run(["dpkg", "-S", place], capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.split(":")[0]
    raise AssertionError(f"no package has {path[1]}")


def main(program):
    base = re.search(r"^ARG BASE=\S*/(\w+):(\d+)", recipe(), re.M)
    system = dict(re.findall(r'^(\w+)="?([^"\n]*)', pathlib.Path("/etc/os-release").read_text(encoding="utf-8"), re.M))
    if (system.get("ID"), system.get("VERSION_ID")) != base.groups():
        print(f"skipped: this is {system.get('PRETTY_NAME')}, and the recipe's base is {base[1]} {base[2]}")
        return SKIPPED
    needed = {package_of(library) for library in needed_libraries(program)} - IN_THE_BASE
    listed = listed_packages(recipe()) - NO_LIBRARY
    for package in sorted(needed - listed):
        print(f"docs/serving/Containerfile lacks {package}, which {program} needs")
    for package in sorted(listed - needed):
        print(f"docs/serving/Containerfile installs {package}, which {program} does not need")
    print(f"needed: {' '.join(sorted(needed))}")
    return int(needed != listed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
