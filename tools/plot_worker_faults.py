"""Draws tokens/s over the time of a run with faults of expert workers, the faults marked below, and prints its table.

    python3 tools/worker_faults.py build/release/tandem --report faults.json
    python3 tools/plot_worker_faults.py faults.json docs/pictures/worker_faults.svg
"""
import argparse
import json
import pathlib
import statistics

import svg_plot

COLOURS = {"kill": "#c44e52", "stop": "#8172b3", "cut": "#dd8452", "silence": "#937860", "drain": "#4c72b0", "restart": "#55a868"}
BIN_SECONDS = 0.5
ZOOM_SECONDS = 20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", metavar="REPORT.json", type=pathlib.Path)
    parser.add_argument("picture", metavar="PICTURE.svg", type=pathlib.Path)
    args = parser.parse_args()
    report = json.loads(args.report.read_text(encoding="utf-8"))
    print(table(report))
    plot(report, args.picture)


def table(report):
    kinds = {kind: [fault for fault in report["faults"] if fault["kind"] == kind] for kind in COLOURS}
    lines = [f"{report['processor']}, load {report['load']}, {report['streams']} streams, {len(report['faults'])} faults, "
             f"seed {report['seed']}",
             f"{report['answers']} answers, {report['answers_under_faults']} of them under faults: {report['lost']} lost, "
             f"{report['different']} with another text", "",
             "| | s | tokens/s | gaps | median ms | p99 ms | p99.9 ms | longest ms |", "|---|---|---|---|---|---|---|---|"]
    for name, title in (("quiet", "without faults"), ("under_faults", "with faults")):
        part = report[name]
        times = " | ".join(f"{part[key] * 1e3:.0f}" if part["gaps"] else "" for key in ("median", "p99", "p999", "longest"))
        rate = part["tokens"] / max(part["seconds"], 1e-9)
        lines.append(f"| {title} | {part['seconds']:.0f} | {rate:.0f} | {part['gaps']} | {times} |")
    lines += ["", "| fault | number | while no other worker was silent | longest gap then, median ms | worst ms | s until used again, median |",
              "|---|---|---|---|---|---|"]
    for kind, faults in kinds.items():
        if faults:
            gaps = [fault["longest_gap"] * 1e3 for fault in faults if is_apart(fault, report)]
            times = f"{statistics.median(gaps):.0f} | {max(gaps):.0f}" if gaps else " | "
            again = statistics.median(fault["used"] - fault["over"] for fault in faults)
            lines.append(f"| {kind} | {len(faults)} | {len(gaps)} | {times} | {again:.2f} |")
    return "\n".join(lines)


def is_apart(fault, report):
    """Whether no other worker was stopped or silent, which delays streams, while a fault was measured."""
    def span(one):
        return one["begin"], max(one["over"], one["begin"] + 2 * report["deadline_ms"] / 1e3)
    begin, end = span(fault)
    silent = [span(other) for other in report["faults"] if other is not fault and other["kind"] in ("stop", "silence")]
    return not any(since < end and begin < until for since, until in silent)


def plot(report, path):
    plt = svg_plot.pyplot()
    if plt is None:
        return
    end = len(report["tokens"]) * report["bin_seconds"]
    middle = (report["first_fault"] + report["last_fault"]) / 2
    zoom = (max(0, middle - ZOOM_SECONDS / 2), min(end, middle + ZOOM_SECONDS / 2))
    figure, axes = plt.subplots(2, figsize=(9, 6.4))
    plot_part(axes[0], report, (0, end), BIN_SECONDS)
    plot_part(axes[1], report, zoom, report["bin_seconds"])
    for kind, colour in COLOURS.items():
        begins = [fault["begin"] for fault in report["faults"] if fault["kind"] == kind]
        axes[0].plot(begins, [lane_of(axes[0], kind)] * len(begins), "|", color=colour, markersize=5)
    for fault in report["faults"]:
        if fault["begin"] < zoom[1] and fault["used"] > zoom[0]:
            colour, y = COLOURS[fault["kind"]], lane_of(axes[1], fault["kind"])
            axes[1].axvline(fault["begin"], color=colour, linewidth=0.6, alpha=0.6)
            for since, until, width in ((fault["begin"], fault["over"], 4), (fault["over"], fault["used"], 1)):
                axes[1].plot([since, until], [y, y], color=colour, linewidth=width, solid_capstyle="butt")
    axes[0].set_title(f"{report['streams']} streams, {len(report['faults'])} faults of expert workers: {report['lost']} answers "
                      f"lost, {report['different']} with another text", fontsize=9)
    axes[1].set_title("A part of it: thick while a fault lasts, thin until the worker is used again", fontsize=9)
    axes[1].set_xlabel("seconds", fontsize=8)
    svg_plot.save(plt, figure, path)


def plot_part(axis, report, span, seconds):
    """Tokens/s in bins of so many seconds, and a lane below for each kind of fault."""
    n = round(seconds / report["bin_seconds"])
    tokens = report["tokens"]
    bins = {i * report["bin_seconds"]: sum(tokens[i:i + n]) / seconds for i in range(0, len(tokens) - n + 1, n)}
    shown = {at: rate for at, rate in bins.items() if span[0] - seconds <= at < span[1]}
    top = 1.05 * max([1, *shown.values()])
    axis.step(list(shown), list(shown.values()), where="post", color="#333333", linewidth=0.8)
    axis.axhline(0, color="#999999", linewidth=0.6)
    axis.set(xlim=span, ylim=(-0.05 * top * (len(COLOURS) + 1), top))
    ticks = [tick for tick in axis.get_yticks() if 0 <= tick <= top]
    lanes = [lane_of(axis, kind) for kind in COLOURS]
    axis.set_yticks(lanes + ticks, [*COLOURS, *(f"{tick:,.0f}" for tick in ticks)], fontsize=7)
    for label, colour in zip(axis.get_yticklabels(), COLOURS.values()):
        label.set_color(colour)
    axis.set_ylabel(f"tokens/s, in bins of {seconds:g} s", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(alpha=0.3, axis="x")


def lane_of(axis, kind):
    return -0.05 * axis.get_ylim()[1] * (list(COLOURS).index(kind) + 1)


if __name__ == "__main__":
    main()
