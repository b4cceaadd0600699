"""Draws one step of the timeline of several ranks: a lane for each rank's cores and one for what it sends and receives.

    tandem bench overlap --ranks 4 --simulate-delay 1 --tokens 32 --timeline t.json
    python3 tools/plot_timeline.py t.json step.svg --step 3
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
    parser.add_argument("--step", type=int, default=0, help="number of the step, from 0")
    args = parser.parse_args()
    plot(json.loads(args.timeline.read_text(encoding="utf-8"))["traceEvents"], args.step, args.picture)


def plot(events, step, picture):
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X" and event["args"]["step"] == step]
    lanes = sorted({(span["pid"], span["tid"]) for span in spans})
    start = min(span["ts"] for span in spans)
    plt = svg_plot.pyplot()
    if not plt:
        return
    figure, axis = plt.subplots(figsize=(9, 0.9 + 0.32 * len(lanes)))
    for span in spans:
        lane = lanes.index((span["pid"], span["tid"]))
        axis.barh(lane, span["dur"] / 1e3, left=(span["ts"] - start) / 1e3, height=0.75, edgecolor="white", linewidth=0.3,
                  color=COLOURS.get(span["name"], "#999999"), alpha=0.65 if span["args"]["half"] % 2 else 1)
    used = [name for name in COLOURS if any(span["name"] == name for span in spans)]
    axis.legend([plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in used], used, fontsize=7, ncols=len(used),
                loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    axis.set_yticks(range(len(lanes)), [f"{names[pid].split(' on ')[0]}, {tracks[pid, tid]}" for pid, tid in lanes], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("ms", fontsize=8)
    axis.tick_params(labelsize=7)
    svg_plot.save(plt, figure, picture)


if __name__ == "__main__":
    main()
