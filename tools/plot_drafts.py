"""Renders what speculative decoding brings as a table and, where matplotlib is installed, a plot.

    tandem bench generate --draft-tokens 1,2,3,4 --acceptance 0,0.5,0.85,1 --json > report.json
    python3 tools/plot_drafts.py report.json docs/pictures/drafts.svg

Prints the table of measured and predicted steps of the report's first context and batch, and draws tokens/s against
acceptance.
"""
import argparse
import json
import pathlib

import svg_plot


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", metavar="REPORT.json", type=pathlib.Path)
    parser.add_argument("picture", metavar="PICTURE.svg", type=pathlib.Path)
    args = parser.parse_args()
    report = json.loads(args.report.read_text(encoding="utf-8"))
    plain = report["decode"][0]
    rows = [row for row in report["drafts"] if (row["context"], row["batch"]) == (plain["context"], plain["batch"])]
    print(table(plain, rows))
    plot(plain, rows, args.picture)


def table(plain, rows):
    lines = ["| k | acceptance | tokens a step | ms a step | predicted | times the tokens/s | predicted | off |",
             "|---|---|---|---|---|---|---|---|",
             f"| 0 | | 1 | {plain['seconds'] * 1e3:.1f} | {plain['predicted_seconds'] * 1e3:.1f} | 1 | 1 | |"]
    for row in rows:
        off = row["predicted_times_without"] / row["times_without"] - 1
        lines.append(f"| {row['draft_tokens']} | {row['acceptance']:g} | {row['tokens_per_step']:.2f} | {row['seconds'] * 1e3:.1f} | "
                     f"{row['predicted_seconds'] * 1e3:.1f} | {row['times_without']:.2f} | {row['predicted_times_without']:.2f} | {off:+.0%} |")
    return "\n".join(lines)


def plot(plain, rows, path):
    plt = svg_plot.pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(7, 4.5))
    axes.axhline(plain["tokens_per_second"], color="C0", label="k = 0")
    axes.axhline(1 / plain["predicted_seconds"], color="C0", linestyle="--")
    for k in sorted({row["draft_tokens"] for row in rows}):
        of_k = sorted((row for row in rows if row["draft_tokens"] == k), key=lambda row: row["acceptance"])
        at = [row["acceptance"] for row in of_k]
        predicted = [row["predicted_times_without"] / plain["predicted_seconds"] for row in of_k]
        axes.plot(at, [row["tokens_per_second"] for row in of_k], color=f"C{k}", marker="o", label=f"k = {k}")
        axes.plot(at, predicted, color=f"C{k}", marker="x", linestyle="--")
    axes.set(xlabel="acceptance", ylabel="tokens/s", title="measured (solid) and predicted (dashed)", ylim=(0, None))
    axes.legend()
    svg_plot.save(plt, figure, path)


if __name__ == "__main__":
    main()
