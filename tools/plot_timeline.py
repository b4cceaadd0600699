"""Draws steps of the timeline of several ranks, below each other on one scale: for each rank a lane for its cores and
one for what it sends and receives.

    tandem bench overlap --ranks 4 --simulate-delay 1 --tokens 32 --timeline t.json
    python3 tools/plot_timeline.py t.json step.svg --step 3
    python3 tools/plot_timeline.py t.json overlap.svg --step 2 3 --rank 0
"""
import argparse
import json
import pathlib

import svg_plot

COLOURS = {"backbone": "#4c72b0", "experts": "#dd8452", "rows": "#55a868", "sums": "#8172b3"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timeline", metavar="TIMELINE.json", type=pathlib.Path)
    parser.add_argument("picture", metavar="PICTURE.svg", type=pathlib.Path)
    parser.add_argument("--step", type=int, nargs="+", default=[0], help="numbers of the steps, from 0")
    parser.add_argument("--rank", type=int, help="draw this rank only")
    args = parser.parse_args()
    plot(json.loads(args.timeline.read_text(encoding="utf-8"))["traceEvents"], args.step, args.rank, args.picture)


def plot(events, steps, rank, picture):
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X" and event["args"]["step"] in steps
             and rank in (None, event["pid"])]
    lanes = sorted({(span["pid"], span["tid"]) for span in spans})
    plt = svg_plot.pyplot()
    if not plt:
        return
    figure, axes = plt.subplots(len(steps), figsize=(9, 0.6 + (0.3 + 0.32 * len(lanes)) * len(steps)), sharex=True,
                                squeeze=False)
    for axis, step in zip(axes[:, 0], steps):
        plot_step(axis, [span for span in spans if span["args"]["step"] == step], lanes)
        axis.set_yticks(range(len(lanes)), [f"{names[pid].split(' on ')[0]}, {tracks[pid, tid]}" for pid, tid in lanes],
                        fontsize=7)
    used = [name for name in COLOURS if any(span["name"] == name for span in spans)]
    axes[0, 0].legend([plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in used], used, fontsize=7,
                      ncols=len(used), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    axes[-1, 0].set_xlabel("ms", fontsize=8)
    svg_plot.save(plt, figure, picture)


# Odd micro-batches are paler.
def plot_step(axis, spans, lanes):
    start = min(span["ts"] for span in spans)
    for span in spans:
        lane = lanes.index((span["pid"], span["tid"]))
        axis.barh(lane, span["dur"] / 1e3, left=(span["ts"] - start) / 1e3, height=0.75, edgecolor="white", linewidth=0.3,
                  color=COLOURS.get(span["name"], "#999999"), alpha=0.65 if span["args"]["half"] % 2 else 1)
    axis.invert_yaxis()
    axis.tick_params(labelsize=7)


if __name__ == "__main__":
    main()
