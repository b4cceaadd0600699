"""Draws heat maps of how often experts are chosen and by which ranks they are computed, before and after they moved.

    curl localhost:8000/experts > before.json
    curl -X POST localhost:8000/rebalance
    curl localhost:8000/experts > after.json
    python3 tools/plot_experts.py before.json after.json moved.svg

A row is a layer. On the left a column is an expert, and experts are in the order of their ranks; the colour is the count
against the layer's mean. On the right a column is a rank, and the colour is its rows against those of the mean rank.
"""
import argparse
import json
import pathlib

import svg_plot


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", metavar="EXPERTS.json", type=pathlib.Path, nargs="+")
    parser.add_argument("picture", metavar="PICTURE.svg", type=pathlib.Path)
    args = parser.parse_args()
    plot([(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in args.answers], args.picture)


def by_rank(layer, n_ranks):
    """The layer's counts in the order of ranks, a replica's part for each, and the rows of each rank."""
    counts, rows = [], [0.0] * n_ranks
    for rank in range(n_ranks):
        for count, ranks in zip(layer["counts"], layer["ranks"]):
            if rank in ranks:
                counts.append(count / len(ranks))
                rows[rank] += counts[-1]
    return counts, rows


def against_mean(numbers):
    mean = sum(numbers) / len(numbers)
    return [number / mean if mean else 0 for number in numbers]


def plot(answers, picture):
    plt = svg_plot.pyplot()
    if not plt:
        return
    figure, axes = plt.subplots(len(answers), 2, figsize=(9, 0.7 + 2.1 * len(answers)), squeeze=False,
                                gridspec_kw={"width_ratios": (5, 1)})
    for (name, answer), (experts, ranks) in zip(answers, axes):
        n_ranks = len(answer["load"])
        layers = [by_rank(layer, n_ranks) for layer in answer["layers"]]
        image = experts.imshow([against_mean(counts) for counts, _ in layers], aspect="auto", cmap="viridis", vmin=0, vmax=4)
        figure.colorbar(image, ax=experts, label="count / mean", shrink=0.9)
        experts.set_title(f"{name}: experts, rank by rank", fontsize=9)
        image = ranks.imshow([against_mean(rows) for _, rows in layers], aspect="auto", cmap="coolwarm", vmin=0, vmax=2)
        figure.colorbar(image, ax=ranks, label="rows / mean", shrink=0.9)
        ranks.set_title(f"balancedness {answer['balancedness']:.3f}", fontsize=9)
        ranks.set_xticks(range(n_ranks))
        ranks.set_xlabel("rank", fontsize=8)
        experts.set_xlabel("expert", fontsize=8)
        for axis in (experts, ranks):
            axis.set_yticks(range(len(layers)), [str(layer["layer"]) for layer in answer["layers"]], fontsize=7)
            axis.set_ylabel("layer", fontsize=8)
            axis.tick_params(labelsize=7)
    svg_plot.save(plt, figure, picture)


if __name__ == "__main__":
    main()
