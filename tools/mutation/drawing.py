"""Draws the mutants to plant, some in every folder.

n is divided among the folders by the square root of their lines, at least one each. Within a folder a file is drawn
by the number of its sites, then a kind of change by the square root of its sites in the file, then a site of that
kind and one of its changes, all from the seed. To read only drawn files, a file is drawn by its lines and accepted by
its sites per line. A mutant that overlaps with an earlier one, or does not compile, is replaced by the next draw.
"""
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import random
import re
import shlex

from .schemata import Site, one_line_diff

PRODUCT = ["src", "offload", "cpu_kernels", "gpu_kernels"]
# The emulated GPU is a part of the tests, and code that calls CUDA is only compiled where CUDA is.
NOT_PRODUCT = ["gpu_kernels/emulated", "gpu_kernels/cuda"]
DRAWS_AHEAD = 2  # files drawn ahead for each mutant
MOST_IDLE_DRAWS = 3000
SITES_PER_LINE = 2  # more sites per line count as this many


@dataclasses.dataclass
class Mutant:
    number: int
    file: str
    line: int
    choice: int
    site: Site
    before: str = ""
    after: str = ""

    def record(self):
        return dataclasses.asdict(self)

    @staticmethod
    def of(record):
        return Mutant(**{**record, "site": Site(**record["site"])})


def product_files(tree, only=""):
    files = []
    for folder in PRODUCT:
        for path in sorted((tree / folder).rglob("*")):
            name = path.relative_to(tree).as_posix()
            if path.suffix in (".cpp", ".h", ".cu") and not any(name.startswith(f + "/") for f in NOT_PRODUCT):
                files.append(name)
    only = only.rstrip("/")
    return [f for f in files if not only or f == only or f.startswith(only + "/")]


def folder_of(file):
    return os.path.dirname(file)


def shares(sizes, n):
    """Divides n by the square roots of the sizes, at least one each if n is enough, by largest remainders."""
    roots = {name: math.sqrt(size) for name, size in sizes.items()}
    exact = {name: n * root / sum(roots.values()) for name, root in roots.items()}
    share = {name: max(1, math.floor(x)) if n >= len(sizes) else math.floor(x) for name, x in exact.items()}
    by_need = sorted(exact, key=lambda name: share[name] - exact[name])
    while sum(share.values()) < n:
        share[by_need[0]] += 1
        by_need.append(by_need.pop(0))
    while sum(share.values()) > n:
        share[max(share, key=lambda name: share[name] - exact[name] if share[name] > 1 else -1)] -= 1
    return share


class Units:
    """The command that compiles each file, or for a header the first file that includes it, in a copy of the tree."""

    def __init__(self, tree, copy, compile_commands):
        self.tree, self.copy = str(tree), str(copy)
        self.commands = {}
        for entry in compile_commands:
            self.commands.setdefault(os.path.relpath(os.path.normpath(entry["file"]), copy), entry)
        self.users = {}
        for file in product_files(tree):
            for target in re.findall(r'#include "([^"]+)"', (tree / file).read_text(encoding="utf-8")):
                for base in (folder_of(file), "src", ""):
                    found = os.path.normpath(os.path.join(base, target))
                    if (tree / found).exists():
                        self.users.setdefault(found, []).append(file)
                        break

    def command(self, file):
        """The entry of compile_commands.json, or None if no unit contains this file."""
        seen, waiting = {file}, [file]
        while waiting:
            file = waiting.pop(0)
            if file in self.commands:
                return self.commands[file]
            new = [user for user in self.users.get(file, []) if user not in seen]
            seen.update(new)
            waiting.extend(new)
        return None


    def in_tree(self, file):
        """The unit and the flags that compile `file` in the tree itself."""
        _, source, flags = in_words(self.command(file))
        return source.replace(self.copy, self.tree), [flag.replace(self.copy, self.tree) for flag in flags]


def in_words(entry):
    """The compiler, the source and the flags of an entry of compile_commands.json."""
    words = [w for w in shlex.split(entry["command"]) if os.path.basename(w) != "ccache"]
    flags, skip = [], False
    for word in words[1:]:
        if not skip and word not in ("-o", "-c"):
            flags.append(word)
        skip = not skip and word in ("-o", "-c")
    return words[0], entry["file"], flags


def read_sites(path, unit, flags, system, cache):
    """Reads the sites of a file in a separate process and caches them by the file's content."""
    from . import sites  # needs libclang, which the other processes do not load
    content = pathlib.Path(path).read_bytes() + pathlib.Path(sites.__file__).read_bytes() + " ".join(flags).encode()
    kept = pathlib.Path(cache) / (hashlib.sha256(content).hexdigest()[:24] + ".json")
    if kept.exists():
        return [Site(**record) for record in json.loads(kept.read_text(encoding="utf-8"))]
    found = sites.sites_of(path, unit, flags, system)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps([dataclasses.asdict(s) for s in found]), encoding="utf-8")
    return found


class Folder:
    """Draws in one folder, with separate random streams for files and sites, so that files can be read ahead."""

    def __init__(self, tree, seed, name, files):
        self.files = files
        self.lines = [sum(1 for _ in open(tree / f, "rb")) for f in files]
        self.file_stream = random.Random(f"{seed} {name} files")
        self.site_stream = random.Random(f"{seed} {name} sites")
        self.ahead = []

    def look_ahead(self, n):
        while len(self.ahead) < n:
            self.ahead.append(self.file_stream.choices(self.files, self.lines)[0])
        return self.ahead[:n]

    def file(self):
        self.look_ahead(1)
        return self.ahead.pop(0)

    def takes(self, file, sites):
        """Whether a drawn file is accepted, with a probability proportional to its sites per line."""
        lines = self.lines[self.files.index(file)]
        return self.site_stream.random() < len(sites) / (SITES_PER_LINE * lines)

    def site(self, sites):
        kinds = {}
        for site in sites:
            kinds.setdefault(site.kind, []).append(site)
        names = sorted(kinds)
        kind = self.site_stream.choices(names, [math.sqrt(len(kinds[name])) for name in names])[0]
        site = self.site_stream.choice(kinds[kind])
        return site, self.site_stream.randrange(len(site.changed))


class Draw:
    """The mutants of a seed. `read` returns the sites of several files at once: {file: [Site]}."""

    def __init__(self, tree, units, seed, n, only, read):
        self.tree, self.read = tree, read
        by_folder = {}
        for file in product_files(tree, only):
            if units.command(file):
                by_folder.setdefault(folder_of(file), []).append(file)
        self.folders = {name: Folder(tree, seed, name, files) for name, files in by_folder.items()}
        self.share = shares({name: sum(f.lines) for name, f in self.folders.items()}, n) if self.folders else {}
        self.mutants, self.tried, self.sites, self.texts = [], set(), {}, {}

    def fill(self):
        """Draws until every folder has its share or no more sites."""
        wanted = {f for name, folder in self.folders.items() for f in folder.look_ahead(DRAWS_AHEAD * self.missing(name))}
        self.sites.update(self.read(sorted(wanted - set(self.sites))))
        for name in self.folders:
            idle = 0
            while self.missing(name) > 0 and idle < MOST_IDLE_DRAWS:
                idle = 0 if self.draw(name) else idle + 1

    def missing(self, folder):
        return max(0, self.share[folder] - sum(folder_of(m.file) == folder for m in self.mutants))

    def draw(self, folder):
        file = self.folders[folder].file()
        if file not in self.sites:
            self.sites.update(self.read([file]))
        if not self.folders[folder].takes(file, self.sites[file]):
            return False
        site, choice = self.folders[folder].site(self.sites[file])
        overlaps = any(m.file == file and m.site.start < site.end and site.start < m.site.end for m in self.mutants)
        if overlaps or (file, site.start, site.end, choice, site.kind) in self.tried:
            return False
        self.tried.add((file, site.start, site.end, choice, site.kind))
        if file not in self.texts:
            self.texts[file] = (self.tree / file).read_bytes().decode("latin-1")
        text = self.texts[file]
        mutant = Mutant(len(self.tried), file, text.count("\n", 0, site.start) + 1, choice, site)
        mutant.before, mutant.after = one_line_diff(text, mutant)
        self.mutants.append(mutant)
        return True

    def drop(self, numbers):
        self.mutants = [m for m in self.mutants if m.number not in numbers]
