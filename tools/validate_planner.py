"""Compares the planner's predictions with this machine.

    python3 tools/validate_planner.py TANDEM OUTPUT.md

Runs `tandem bench generate` on cut models and writes a table. A cell has the number of sequences, the context or the
length of the prompt, measured and predicted time, and the error of the prediction. Cells with too large an error are
measured a second time by themselves, because other programs on a shared machine may have disturbed them; the table
has both results.
"""
import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import sys

MODELS = [("r1", 3, ["fp8", "int8", "int4"]), ("v2-lite", 4, ["bf16", "int8", "int4"]), ("k2", 2, ["fp8", "int8", "int4"])]
BATCHES, CONTEXTS, PROMPTS = "1,4,16", "128,4096", "32,128,512,2048"
MOST, USUAL = 0.25, 0.10  # largest allowed error of a cell, and of the median


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", metavar="TANDEM")
    parser.add_argument("output", metavar="OUTPUT.md", type=pathlib.Path)
    args = parser.parse_args()
    binary, output = args.binary, args.output
    cells = [cell for model, layers, forms in MODELS for form in forms for cell in measure(binary, model, layers, form)]
    for cell in cells:
        if abs(error_of(cell)) > MOST:
            cell["first"], cell["row"] = cell["row"], measured_again(binary, cell)
    machine = json.loads(run(binary, "machine", "--seconds", "0.02"))
    output.write_text(page(machine, cells), encoding="utf-8")
    print(summary(cells))


def measure(binary, model, layers, form, batches=BATCHES, contexts=CONTEXTS, prompts=PROMPTS):
    print(f"{model}, experts in {form}", file=sys.stderr)
    report = json.loads(run(binary, "generate", "--config", model, "--layers", str(layers), "--experts", form, "--batch",
                            batches, "--ctx", contexts, "--tokens", prompts, "-n", "8", "--seconds", "2"))
    of_report = {"model": model, "layers": layers, "form": form}
    return ([{**of_report, "phase": "decode", "batch": row["batch"], "tokens": row["context"], "row": row} for row in report["decode"]]
            + [{**of_report, "phase": "prefill", "batch": 1, "tokens": row["tokens"], "row": row} for row in report["prefill"]])


def measured_again(binary, cell):
    alone = {"contexts": str(cell["tokens"])} if cell["phase"] == "decode" else {"contexts": "128", "prompts": str(cell["tokens"])}
    cells = measure(binary, cell["model"], cell["layers"], cell["form"], batches=str(cell["batch"]), **{"prompts": "32", **alone})
    return next(c["row"] for c in cells if c["phase"] == cell["phase"] and c["tokens"] == cell["tokens"])


def run(binary, *arguments):
    return subprocess.run([binary, "bench", *arguments, "--json"], check=True, capture_output=True, text=True).stdout


def error_of(cell):
    return cell["row"]["prediction_error"]


def summary(cells):
    errors = [abs(error_of(cell)) for cell in cells]
    far = sum(error > MOST for error in errors)
    again = sum("first" in cell for cell in cells)
    return (f"{len(cells)} cells: median error {statistics.median(errors):.0%}, largest {max(errors):.0%}; {far} above {MOST:.0%}; "
            f"{again} measured a second\ntime because the first error was above {MOST:.0%}.")


def page(machine, cells):
    lines = [
        "# Predicted and measured",
        "",
        f"Command: `make validate-planner`. Machine: {machine['cpu']} ({machine['isa']}, {machine['threads']} threads). "
        f"Measured on {datetime.date.today()}.",
        "",
        "The engine runs models that are cut to a few layers, with random weights. The planner's cost model predicts",
        "each step from rates that were measured right before and after it.",
        "",
        summary(cells),
        f"Targets: a median of at most {USUAL:.0%}, and no error above {MOST:.0%}.",
        "",
        "| model | experts | | sequences | context or prompt | measured ms | predicted ms | error |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for cell in cells:
        row = cell["row"]
        first = f" (first {cell['first']['seconds'] * 1e3:.1f} ms: {cell['first']['prediction_error']:+.0%})" if "first" in cell else ""
        lines.append(f"| {cell['model']} | {cell['form']} | {cell['phase']} | {cell['batch']} | {cell['tokens']} | {row['seconds'] * 1e3:.1f} | "
                     f"{row['predicted_seconds'] * 1e3:.1f} | {row['prediction_error']:+.0%}{first} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
