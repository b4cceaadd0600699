"""What the planner predicts against what this machine does.

    python3 tools/validate_planner.py TANDEM OUTPUT.md

Runs `tandem bench generate` on cut models and writes a table of every cell: sequences at a time, context or
length of the prompt, measured and predicted time, and by which part the prediction is off.
"""
import json
import pathlib
import statistics
import subprocess
import sys

MODELS = [("r1", 3, ["fp8", "int8", "int4"]), ("v2-lite", 4, ["bf16", "int8", "int4"]), ("k2", 2, ["fp8", "int8", "int4"])]
BATCHES, CONTEXTS, PROMPTS = "1,4,16", "128,4096", "32,128,512,2048"
MOST, USUAL = 0.25, 0.10  # how far off a cell and the median may be


def main():
    binary, output = sys.argv[1], pathlib.Path(sys.argv[2])
    reports = [measure(binary, model, layers, form) for model, layers, forms in MODELS for form in forms]
    machine = json.loads(run(binary, "machine", "--seconds", "0.02"))
    cells = [cell for report in reports for cell in cells_of(report)]
    output.write_text(page(machine, cells), encoding="utf-8")
    print(summary(cells))


def measure(binary, model, layers, form):
    print(f"{model}, experts in {form}", file=sys.stderr)
    return json.loads(run(binary, "generate", "--config", model, "--layers", str(layers), "--experts", form, "--batch",
                          BATCHES, "--ctx", CONTEXTS, "--tokens", PROMPTS, "-n", "8", "--seconds", "2"))


def run(binary, *arguments):
    return subprocess.run([binary, "bench", *arguments, "--json"], check=True, capture_output=True, text=True).stdout


def cells_of(report):
    for row in report["decode"]:
        yield [report["config"], report["experts"], "decode", row["batch"], row["context"], row]
    for row in report["prefill"]:
        yield [report["config"], report["experts"], "prefill", 1, row["tokens"], row]


def errors_of(cells):
    return [abs(cell[-1]["prediction_error"]) for cell in cells]


def summary(cells):
    errors = errors_of(cells)
    far = sum(error > MOST for error in errors)
    return (f"{len(cells)} cells: median {statistics.median(errors):.0%} off, worst {max(errors):.0%}; "
            f"{far} more than {MOST:.0%} off")


def page(machine, cells):
    lines = [
        "# Predicted and measured",
        "",
        f"`make validate-planner` on {machine['cpu']} ({machine['isa']}, {machine['threads']} threads): models cut to a few layers with random "
        "weights, run by the engine; the planner's cost model with the rates that were measured right before and after each step.",
        "",
        summary(cells) + f" (wanted: median {USUAL:.0%}, none above {MOST:.0%}).",
        "",
        "| model | experts | | sequences | context or prompt | measured ms | predicted ms | off |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for model, form, phase, batch, tokens, row in cells:
        lines.append(f"| {model} | {form} | {phase} | {batch} | {tokens} | {row['seconds'] * 1e3:.1f} | "
                     f"{row['predicted_seconds'] * 1e3:.1f} | {row['prediction_error']:+.0%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
