"""Renders two versions' shares of the roofline over the rows an expert, as a table and, where matplotlib is installed, a plot.

    tandem bench experts --experts fp8 --tokens 1,8,16,64,512 --json >> before.jsonl    # any number of formats and runs
    python3 tools/plot_rows.py before.jsonl after.jsonl docs/pictures/few_rows.svg

Medians over the runs of each file. "Possible" is the share that the counted instructions allow (bound_seconds).
"""
import argparse
import collections
import json
import pathlib
import statistics

import svg_plot


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE.jsonl", type=pathlib.Path)
    parser.add_argument("after", metavar="AFTER.jsonl", type=pathlib.Path)
    parser.add_argument("picture", metavar="PICTURE.svg", type=pathlib.Path)
    args = parser.parse_args()
    before, after = medians(args.before), medians(args.after)
    print(table(before, after))
    plot(before, after, args.picture)


def medians(path):
    """(format, rows an expert) -> fields, each the median over the file's rows."""
    rows = collections.defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows[row["format"], row["rows_per_expert"]].append(row)
    fields = ("seconds", "roofline_ratio", "bound_ratio")
    return {key: {field: statistics.median(row[field] for row in of_key) if field in of_key[0] else None for field in fields}
            for key, of_key in rows.items()}


def possible(row):
    return row["roofline_ratio"] / row["bound_ratio"] if row["bound_ratio"] else None


def table(before, after):
    lines = ["| format | rows an expert | before ms | ms | of the roofline before | of the roofline | possible |", "|---|---|---|---|---|---|---|"]
    for (form, rows), new in sorted(after.items()):
        old = before.get((form, rows))
        if old is None:
            continue
        allowed = possible(new)
        lines.append(f"| {form} | {rows:.1f} | {old['seconds'] * 1e3:.1f} | {new['seconds'] * 1e3:.1f} | {old['roofline_ratio']:.2f} "
                     f"| {new['roofline_ratio']:.2f} | {'' if allowed is None else f'{allowed:.2f}'} |")
    return "\n".join(lines)


def plot(before, after, path):
    plt = svg_plot.pyplot()
    if plt is None:
        return
    forms = sorted({form for form, _ in after})
    figure, all_axes = plt.subplots(1, len(forms), figsize=(3.2 * len(forms), 3.6), sharey=True, squeeze=False)
    for axes, form in zip(all_axes[0], forms):
        def line(rows, value, **style):
            points = sorted((key[1], value(row)) for key, row in rows.items() if key[0] == form and value(row) is not None)
            if points:
                axes.plot(*zip(*points), **style)
        line(before, lambda row: row["roofline_ratio"], color="C7", marker="o", label="before")
        line(after, lambda row: row["roofline_ratio"], color="C0", marker="o", label="after")
        line(after, possible, color="C1", linestyle="--", label="instructions allow")
        axes.set(xscale="log", xlabel="rows an expert", title=form, ylim=(0, 1.1))
        axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        axes.grid(alpha=0.3)
    all_axes[0][0].set_ylabel("share of the roofline")
    all_axes[0][0].legend()
    svg_plot.save(plt, figure, path)


if __name__ == "__main__":
    main()
