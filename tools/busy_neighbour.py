"""The slowdown of routed experts by another process on one core: tools/busy_neighbour.py build/release/tandem
[FORMAT]

Alternates an undisturbed and a disturbed run of `tandem bench experts`; the disturbed run shares the last core with a
process that never sleeps. Prints the remaining share of the speed: 1 - 1 / (2 n) on n cores if work is distributed
perfectly.
"""
import argparse
import json
import os
import statistics
import subprocess

TOKENS = [1, 8, 128]
ROUNDS = 3


def seconds(command):
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in out.splitlines()]
    return {row["tokens"]: row["seconds"] for row in rows}


def busy(core):
    return subprocess.Popen(["taskset", "-c", str(core), "sh", "-c", "while :; do :; done"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem", metavar="TANDEM")
    parser.add_argument("experts", metavar="FORMAT", nargs="?", default="fp8")
    args = parser.parse_args()
    command = [args.tandem, "bench", "experts", "--json", "--config", "r1", "--experts", args.experts, "--tokens",
               ",".join(map(str, TOKENS))]
    ratios = {n: [] for n in TOKENS}
    for _ in range(ROUNDS):
        quiet = seconds(command)
        neighbour = busy(max(os.sched_getaffinity(0)))
        try:
            disturbed = seconds(command)
        finally:
            neighbour.kill()
            neighbour.wait()
        for n in TOKENS:
            ratios[n].append(quiet[n] / disturbed[n])
    for n in TOKENS:
        print(f"{n:4} tokens: {statistics.median(ratios[n]):.2f} of the quiet speed ({min(ratios[n]):.2f} to {max(ratios[n]):.2f})")


if __name__ == "__main__":
    main()
