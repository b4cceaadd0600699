"""Draws how evenly experts are used on ranks: what `tandem plan --statistics --redundant` reaches, EPLB, and experts in order.

    python3 tools/plot_balance.py build/release/tandem docs/pictures/expert_balance.svg

The model is R1 on hosts of 8 H200. In each layer the n-th expert, in an order of the layer's own, is chosen in proportion
to n^-skew, 8 different ones for each of 4,000 tokens. Prints the means of the layers' balancedness as a table.
"""
import argparse
import json
import pathlib
import random
import subprocess
import tempfile

import svg_plot

RANKS, REDUNDANT, SKEWS = (8, 16, 32, 64, 96), (0, 32, 64, 128), (0.5, 1.0)
LAYERS, EXPERTS, ACTIVE, TOKENS = 58, 256, 8, 4000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem", metavar="TANDEM", type=pathlib.Path)
    parser.add_argument("picture", metavar="PICTURE.svg", type=pathlib.Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for skew in SKEWS:
            counts = skewed_counts(skew)
            statistics = pathlib.Path(folder) / "routing.json"
            statistics.write_text(json.dumps({"layers": LAYERS + 3, "experts": EXPERTS, "tokens": TOKENS, "counts": counts}))
            for ranks in RANKS:
                for redundant in REDUNDANT:
                    found = planned(args.tandem, pathlib.Path(folder), statistics, ranks, redundant)
                    if found:
                        rows.append((skew, ranks, redundant, found["placed"], found["eplb"], in_order(counts, ranks)))
    print(table(rows))
    plot(rows, args.picture)


def skewed_counts(skew):
    """[layers][experts] how often each expert is chosen; a token's experts differ."""
    rng = random.Random(29)
    # The smallest of exponential draws with these means choose without repetition. The counts of each layer are those of one,
    # in another order.
    means = [(n + 1) ** skew for n in range(EXPERTS)]
    counts = [0] * EXPERTS
    for _ in range(TOKENS):
        draws = sorted((rng.expovariate(1) * mean, n) for n, mean in enumerate(means))
        for _, n in draws[:ACTIVE]:
            counts[n] += 1
    return [rng.sample(counts, EXPERTS) for _ in range(LAYERS)]


def planned(tandem, folder, statistics, ranks, redundant):
    """The report's expert_balance; None where the plan has another number of ranks."""
    machine = json.loads((pathlib.Path(__file__).parent.parent / "machines/8xh200.json").read_text(encoding="utf-8"))
    machine.update(hosts=ranks // 8, network={"bytes_per_second": 400e9, "latency_seconds": 5e-6})
    path = folder / "machine.json"
    path.write_text(json.dumps(machine))
    out = subprocess.run([tandem, "plan", "r1", "--machine", path, "--statistics", statistics, "--redundant", str(redundant),
                          "--objective", "throughput", "--concurrency", str(64 * ranks), "--ctx", "2048", "--json"],
                         check=True, capture_output=True, text=True)
    report = json.loads(out.stdout)
    owners = {owner for group in report["placement"]["experts"]["layers"][0]["groups"] for owner in group["owners"]}
    return report["expert_balance"] if len(owners) == ranks else None


def in_order(counts, ranks):
    """Mean balancedness of experts 0 .. on rank 0 and so on."""
    total = 0
    for layer in counts:
        load = [0] * ranks
        for expert, n in enumerate(layer):
            load[expert * ranks // EXPERTS] += n
        total += sum(load) / ranks / max(load)
    return total / len(counts)


def table(rows):
    lines = ["| skew | ranks | redundant | tandem plan | EPLB | in order |", "|---|---|---|---|---|---|"]
    for skew, ranks, redundant, placed, eplb, ordered in rows:
        lines.append(f"| {skew} | {ranks} | {redundant} | {placed:.3f} | {f'{eplb:.3f}' if eplb else ''} | {ordered:.3f} |")
    return "\n".join(lines)


def plot(rows, path):
    plt = svg_plot.pyplot()
    if plt is None:
        return
    figure, all_axes = plt.subplots(1, len(SKEWS), figsize=(4.4 * len(SKEWS), 3.6), sharey=True)
    for axes, skew in zip(all_axes, SKEWS):
        for color, redundant in zip(("tab:gray", "tab:blue", "tab:orange", "tab:green"), REDUNDANT):
            of = [row for row in rows if row[0] == skew and row[2] == redundant]
            axes.plot([row[1] for row in of], [row[3] for row in of], "o-", color=color, label=f"{redundant} redundant")
            theirs = [row for row in of if row[4]]
            axes.plot([row[1] for row in theirs], [row[4] for row in theirs], "x:", color=color,
                      label="the same by EPLB" if redundant == REDUNDANT[-1] else None)
        of = [row for row in rows if row[0] == skew and row[2] == 0]
        axes.plot([row[1] for row in of], [row[5] for row in of], "k--", linewidth=1, label="in order, no replicas")
        axes.set(title=f"skew {skew}", xlabel="ranks", ylim=(0, 1.03))
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("mean load over the busiest rank's")
    all_axes[0].legend(fontsize=8)
    svg_plot.save(plt, figure, path)


if __name__ == "__main__":
    main()
