"""The result of a run as a Markdown page: a table by folder, then the mutants that no test caught."""
import json
import math

from .drawing import folder_of

CAUGHT = ["failed", "crashed", "timed out"]
MISSED = ["survived", "not reached"]
FIELDS = {"file", "before", "after", "reason"}


class BadEquivalents(Exception):
    pass


def read_equivalents(path):
    """{(file, before, after): reason} of mutants without an observable effect, argued one by one."""
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as problem:
        raise BadEquivalents(f"{path}: {problem}") from None
    for number, entry in enumerate(entries, 1):
        texts = isinstance(entry, dict) and set(entry) == FIELDS and all(isinstance(v, str) for v in entry.values())
        if not texts or not all(v for name, v in entry.items() if name != "after"):  # nothing is after a statement left out
            raise BadEquivalents(f"{path}: entry {number} is not {', '.join(sorted(FIELDS))}, each a text")
    return {(e["file"], e["before"], e["after"]): e["reason"] for e in entries}


def interval(caught, n):
    """Wilson's 95 % confidence interval of a share."""
    if n == 0:
        return 0, 1
    z, share = 1.96, caught / n
    middle = share + z * z / (2 * n)
    width = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - width) / (1 + z * z / n), (middle + width) / (1 + z * z / n)


def score(rows):
    caught = sum(status in CAUGHT for status in rows)
    left = len(rows) - rows.count("equivalent")
    return caught, left


def table(rows_of):
    """rows_of: {folder: [status]}."""
    columns = [*CAUGHT, *MISSED, "equivalent"]
    lines = ["| folder | mutants | " + " | ".join(columns) + " | caught of those not equivalent |", "|---|" + "---|" * (len(columns) + 2)]
    for folder, rows in [*sorted(rows_of.items()), ("all", sum(rows_of.values(), []))]:
        caught, left = score(rows)
        counts = " | ".join(str(rows.count(column)) for column in columns)
        lines.append(f"| {folder} | {len(rows)} | {counts} | {caught} of {left}" + (f" ({caught / left:.2f}) |" if left else " |"))
    return lines


def page(title, mutants, results, equivalents, notes):
    rows_of, missed, argued = {}, [], []
    for mutant in sorted(mutants, key=lambda m: (m.file, m.site.start)):
        result = results[mutant.number]
        reason = equivalents.get((mutant.file, mutant.before, mutant.after))
        status = "equivalent" if reason and result["status"] in MISSED else result["status"]
        rows_of.setdefault(folder_of(mutant.file), []).append(status)
        shown = [f"- {mutant.file}:{mutant.line}, {mutant.site.kind}, {result['status']}"
                 + (f", {result['tests']} tests reach it" if result["tests"] else ""),
                 f"  - `{mutant.before}`", f"  - `{mutant.after or '(left out)'}`"]
        if status == "equivalent":
            argued += [*shown, f"  - {reason}"]
        elif status in MISSED:
            missed += shown
        elif reason:
            notes = [*notes, f"argued to be equivalent, yet {result['test']} catches it: {mutant.file}:{mutant.line} `{mutant.after}`"]
    caught, left = score(sum(rows_of.values(), []))
    low, high = interval(caught, left)
    lines = [f"# {title}", "", *table(rows_of), "",
             f"Score: {caught / max(left, 1):.2f}; the confidence interval of 95 % is {low:.2f} to {high:.2f}.", ""]
    for heading, part in (("Missed", missed), ("Equivalent", argued), ("Notes", [f"- {note}" for note in notes])):
        if part:
            lines += [f"## {heading}", "", *part, ""]
    return "\n".join(lines)
