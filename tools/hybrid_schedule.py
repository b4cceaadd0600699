"""Predicts the schedule of a decode step that GPU and CPU share, in one micro-batch and in two, and the times of the
GPU's and the CPU's parts alone. Prints the table "Predicted by the planner" of docs/measurements/hybrid_schedule.md.
Every number is computed from the data sheets in machines/*.json; nothing is measured (`make hybrid-schedule` measures
the CPU).

    python3 tools/hybrid_schedule.py build/release/tandem
"""
import argparse
import json
import subprocess
import tempfile

MACHINES = ["2x6454s-4090", "2x9654-5090", "2x8452y-a100", "threadripper-4090"]
GPU_PARTS = ["projections", "attention", "router", "shared", "gpu_experts", "overhead"]


def plan(tandem, *arguments):
    done = subprocess.run([tandem, "plan", "r1", "--json", *arguments], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


def predicted_with(tandem, arguments, placement, micro_batches):
    placement |= {"micro_batches": micro_batches, "micro_batches_from_sequences": 2}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(placement, file)
        file.flush()
        return plan(tandem, *arguments, "--placement", file.name)["predicted"]["decode"]


def parts_of(decode):
    """Milliseconds that the GPU and the CPU would take alone for their parts of a step."""
    dense, moe = decode["dense_layer"], decode["moe_layer"]
    rest = decode["step_seconds"] - dense["layers"] * dense["seconds"] - moe["layers"] * moe["seconds"]
    gpu = dense["layers"] * dense["seconds"] + rest + moe["layers"] * sum(moe["parts"].get(p, 0) for p in GPU_PARTS)
    return 1e3 * gpu, 1e3 * moe["layers"] * moe["parts"].get("cpu_experts", 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem", metavar="TANDEM")
    tandem = parser.parse_args().tandem
    print("| machine | sequences | context | GPU alone (computed) | CPU alone (computed) | step (computed) | / the larger | two micro-batches |")
    print("|---|---|---|---|---|---|---|---|")
    for machine in MACHINES:
        for n, context in ((1, 1536), (8, 1536), (32, 1536), (8, 15360)):
            arguments = ["--machine", machine, "--concurrency", str(n), "--ctx", str(context + 1024), "--prompt", str(context - 512),
                         "--output", "1024"]
            found = plan(tandem, *arguments)
            if not found or "gpu" not in found["placement"]["backbone"]["stages"][0]["devices"][0]:
                continue
            one = predicted_with(tandem, arguments, found["placement"], 1)
            two = predicted_with(tandem, arguments, found["placement"], 2) if n > 1 else one
            gpu, cpu = parts_of(one)
            step, overlapped = 1e3 * one["step_seconds"], 1e3 * two["step_seconds"]
            print(f"| {machine} | {n} | {context:,} | {gpu:.1f} ms | {cpu:.1f} ms | {step:.1f} ms | {step / max(gpu, cpu):.2f} | "
                  f"{step / overlapped:.2f} x |")


if __name__ == "__main__":
    main()
