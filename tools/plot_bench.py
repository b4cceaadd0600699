"""Renders a report of tools/bench_report.sh as tables and, where matplotlib is installed, plots.

    python3 tools/plot_bench.py docs/measurements/CPU/report.json

Writes report.md, experts.png and attention.png beside the report.
"""
import argparse
import collections
import json
import pathlib
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="REPORT.json", type=pathlib.Path)
    path = parser.parse_args().path
    rows = collections.defaultdict(list)
    for row in json.loads(path.read_text(encoding="utf-8")):
        rows[row["bench"]].append(row)
    (path.parent / "report.md").write_text(markdown(rows), encoding="utf-8")
    plot(rows, path.parent)


def markdown(rows):
    parts = [machine(m) for m in rows["machine"]]
    parts += kernels("Routed experts", rows["experts"],
                     ["routing", "tokens", "rows an expert", "ms", "GB/s", "Gop/s", "of the roofline", "over uniform"])
    parts += kernels("Embedding", rows["embed"], ["tokens", "ms", "GB/s", "of the roofline"])
    parts += kernels("Dense products", rows["mlp"], ["what", "tokens", "ms", "GB/s", "Gop/s", "of the roofline"])
    parts += kernels("Attention", rows["attention"],
                     ["what", "tokens", "context", "ms", "MB", "Mop", "GB/s", "Gop/s", "of the roofline"])
    parts += kernels("MoE part of a layer", rows["moe"],
                     ["tokens", "rows an expert", "ms", "GB/s", "Gop/s", "of the roofline"])
    parts += kernels("Layers", rows["layer"], ["what", "tokens", "context", "ms", "GB/s", "Gop/s", "of the roofline"])
    parts += [generate(g) for g in rows["generate"]]
    if rows["left out"]:
        parts.append("## Left out\n\n" + "".join(f"* `tandem bench {r['command']}`: {r['reason']}\n"
                                                 for r in rows["left out"]))
    return "\n".join(parts)


def machine(m):
    read = table(["reading memory, GB/s", "1 thread", "all threads"],
                 [[r["loop"], giga(r["one_thread"]), giga(r["all"])] for r in m["read_loops"]])
    peak = table(["peak, Gop/s (a multiplication and an addition are two)", "type", "1 core", "all cores"],
                 [[i["instruction"], i["type"], giga(i["one_core"]), giga(i["all_cores"])] for i in m["instructions"]])
    return (f"# {m['cpu']}\n\n{m['cores']} cores, {m['threads']} threads, {m['numa_nodes']} NUMA node(s), "
            f"last-level cache {m['last_level_cache_bytes'] / 2 ** 20:.0f} MiB, instruction set {m['isa']}. "
            f"Medians; each row is held against bursts measured between its own runs.\n\n{read}\n{peak}")


COLUMNS = {
    "routing": lambda r: r["routing"],
    "what": lambda r: r["what"],
    "tokens": lambda r: str(r["tokens"]),
    "context": lambda r: str(r["context"]),
    "rows an expert": lambda r: f"{r['rows_per_expert']:.1f}",
    "ms": lambda r: f"{r['seconds'] * 1e3:.3f}",
    "MB": lambda r: f"{r['bytes'] * 1e-6:.4g}",
    "Mop": lambda r: f"{r['ops'] * 1e-6:.4g}",
    "GB/s": lambda r: giga(r["bytes_per_second"]),
    "Gop/s": lambda r: giga(r["ops_per_second"]),
    "of the roofline": lambda r: f"{r['roofline_ratio'] * 100:.0f} %",
    "over uniform": lambda r: f"{r['seconds_over_uniform']:.2f}" if "seconds_over_uniform" in r else "",
}


def kernels(title, rows, columns):
    for (config, form), group in by(rows, "config", "format").items():
        first = group[0]
        yield (f"## {title}: {config}, {form}\n\n{first['isa']}, {first['threads']} threads, {first['instruction']}; "
               f"measured beside them: reading {giga(median(group, 'read_bytes_per_second'))} GB/s, peak "
               f"{giga(median(group, 'peak_ops_per_second'))} Gop/s.\n\n"
               + table(columns, [[COLUMNS[c](r) for c in columns] for r in group]))


def generate(g):
    decode = table(["decode at context", "tokens/s", "GB a token", "of the roofline", "of the bandwidth"],
                   [[str(d["context"]), f"{d['tokens_per_second']:.2f}", f"{d['bytes_per_token'] * 1e-9:.3f}",
                     f"{d['roofline_ratio'] * 100:.0f} %", f"{d['bandwidth_ratio'] * 100:.0f} %"] for d in g["decode"]])
    prefill = table(["prompt", "tokens/s"], [[str(p["tokens"]), f"{p['tokens_per_second']:.1f}"] for p in g["prefill"]])
    return (f"## Generation: {g['config']} cut to {g['layers']} layers\n\n{g['dense_layers']} dense; "
            f"{g['resident_experts']} experts a layer in {g['experts']}, other matrices in {g['format']}.\n\n"
            f"{decode}\n{prefill}")


def by(rows, *keys):
    groups = collections.defaultdict(list)
    for row in rows:
        groups[tuple(row[k] for k in keys)].append(row)
    return groups


def median(rows, key):
    values = sorted(r[key] for r in rows)
    return values[len(values) // 2]


def giga(value):
    return f"{value * 1e-9:.1f}"


def table(head, rows):
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)] + rows
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def plot(rows, folder):
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no plots", file=sys.stderr)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    for bench, x in (("experts", "tokens"), ("mlp", "tokens"), ("attention", "context")):
        if not rows[bench]:
            continue
        figure, axes = plt.subplots(figsize=(7, 4.5))
        keys = ("config", "format", "routing") if bench == "experts" else ("config", "format", "what")
        for name, group in by(rows[bench], *keys).items():
            group = sorted(group, key=lambda r: r[x])
            axes.plot([r[x] for r in group], [100 * r["roofline_ratio"] for r in group], marker="o",
                      label=", ".join(name))
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.axhline(100, color="grey", linewidth=0.8)
        axes.set_xlabel(x)
        axes.set_ylabel("% of the roofline")
        axes.set_title(f"{bench}, {rows['machine'][0]['cpu']}" if rows["machine"] else bench)
        axes.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(folder / f"{bench}.png", dpi=120)


if __name__ == "__main__":
    main()
