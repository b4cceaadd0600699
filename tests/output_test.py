"""What the program prints from arguments alone, compared with the files of tests/data/output.

    python3 tests/output_test.py PATH_OF_TANDEM

Help pages; plans of the machines in machines/ with their charts, placements and simulations; inspections of checkpoints.
"""
import json
import pathlib
import re
import sys
import tempfile
import unittest

from kept_output import ROOT, KeptOutput, tandem

PLANS = {
    "r1_workstation": ("r1", "--machine", "2x6454s-4090", "--ctx", "32768"),
    "r1_workstation_5090": ("r1", "--machine", "2x9654-5090", "--ctx", "131072", "--kv", "fp8"),
    "r1_a100": ("r1", "--machine", "2x8452y-a100", "--experts", "int4", "--concurrency", "4"),
    "r1_no_gpu": ("r1", "--machine", "2x6980p", "--prompt", "8000", "--output", "100"),
    "r1_desktop": ("r1", "--machine", "desktop-192gb"),
    "r1_8xh200": ("r1", "--machine", "8xh200", "--concurrency", "64"),
    "r1_8xh200_fast_users": ("r1", "--machine", "8xh200", "--objective", "throughput", "--concurrency", "0", "--user-speed", "50"),
    "r1_8xh20": ("r1", "--machine", "8xh20-96g", "--ctx", "65536"),
    "r1_8xh20_141": ("r1", "--machine", "8xh20-141g", "--objective", "throughput", "--concurrency", "256"),
    "r1_home": ("r1", "--machine", "home-32x4090"),
    "r1_16xh800": ("r1", "--machine", "16xh800", "--objective", "throughput", "--concurrency", "1024"),
    "r1_12x8xh100": ("r1", "--machine", "12x8xh100", "--objective", "throughput", "--concurrency", "4096", "--prompt", "4000"),
    "r1_slow_first_token": ("r1", "--machine", "2x6454s-4090", "--slo-ttft", "1", "--prompt", "4000"),
    "r1_both_objectives": ("r1", "--machine", "8xh200", "--objective", "throughput", "--concurrency", "0", "--slo-tps-user", "30",
                           "--slo-ttft", "0.2"),
    "r1_batch_table": ("r1", "--machine", "12x8xh100", "--objective", "throughput", "--concurrency", "4096", "--batch-table"),
    "r1_preset": ("r1", "--machine", "8xh20-141g", "--preset", "isl1k-osl1k"),
    "v2_lite_preset_no_gpu": ("v2-lite", "--machine", "desktop-192gb", "--preset", "isl1k-osl1k"),
    "k2_cluster": ("kimi-k2", "--machine", "12x8xh100", "--objective", "throughput", "--concurrency", "0", "--user-speed", "20"),
    "k2_workstation": ("kimi-k2", "--machine", "2x9654-5090"),
    "k2_thinking": ("k2-thinking", "--machine", "2x6454s-4090", "--experts", "int4"),
    "v2_lite_threadripper": ("v2-lite", "--machine", "threadripper-4090", "--concurrency", "8"),
    "v2_lite_desktop": ("v2-lite", "--machine", "desktop-192gb", "--concurrency", "0", "--objective", "throughput"),
    "moonlight_desktop": ("moonlight", "--machine", "desktop-192gb", "--ctx", "4096"),
    "v2_threadripper": ("v2", "--machine", "threadripper-4090", "--experts", "int4-32"),
    "r1_office_standby": ("r1", "--machine", "office-4090-3x256gb", "--standbys", "1", "--faults", "6"),
    "v2_lite_servers": ("v2-lite", "--machine", "home-32x4090", "--servers", "--concurrency", "64", "--prompt", "4096", "--output", "256",
                        "--slo-gap", "0.05"),
    "r1_servers": ("r1", "--machine", "32xh800", "--servers", "--request-rate", "0.25"),
    "v3_home": ("v3.1", "--machine", "home-32x4090", "--objective", "throughput", "--concurrency", "128"),
}
SIMULATIONS = {
    "k2_simulated": ("kimi-k2", "--machine", "16xh800", "--objective", "throughput", "--concurrency", "256", "--ctx", "4096", "--skew", "1"),
    "r1_simulated": ("r1", "--machine", "16xh800", "--objective", "throughput", "--concurrency", "512", "--experts", "int4"),
}
AS_JSON = ("r1_office_standby", "v2_lite_servers", "r1_batch_table", "r1_preset", "r1_workstation", "r1_8xh200_fast_users", "v2_lite_threadripper", "r1_no_gpu", "r1_16xh800")
CHARTS = ("r1_workstation", "r1_no_gpu", "k2_cluster", "r1_a100", "r1_16xh800")  # the last streams experts
CHECKPOINTS = ("v2_lite", "v3_fp8", "kimi_k2_thinking", "moonlight_tied")
COMMANDS = ("run", "chat", "serve", "route", "inspect", "tokenize", "logits", "eval", "pack", "worker", "pull", "plan", "selftest", "bench", "bench machine", "bench embed",
            "bench experts", "bench mlp", "bench head", "bench attention", "bench moe", "bench layer", "bench generate", "bench kernels",
            "bench products", "bench hybrid", "bench comm", "bench serving")


def words_of_help(text):
    """A help page without what versions of CLI11 format differently: breaks, capitals of headings, types and choices."""
    text = re.sub(r"^usage:.*$", "", text, flags=re.IGNORECASE | re.MULTILINE)
    text = re.sub(r"^(Options|Positionals|Subcommands):$", lambda m: m[0].upper(), text, flags=re.MULTILINE | re.IGNORECASE)
    text = re.sub(r" (TEXT|INT|UINT|FLOAT|ENUM)(:value in \{.*?\} OR \{.*?\})?(?=[ =\n])", "", text)
    return re.sub(r" (?=--?\w)", "\n", re.sub(r"\s+", " ", text).strip()) + "\n"


class Output(KeptOutput):
    def test_help(self):
        pages = {name: words_of_help(tandem(*name.split(), "--help")) for name in COMMANDS}
        self.same("help.txt", "".join(f"tandem {name}\n{page}\n" for name, page in {"": words_of_help(tandem("--help")), **pages}.items()))

    def test_plans(self):
        for name, arguments in PLANS.items():
            with self.subTest(name):
                self.same(f"plan_{name}.txt", tandem("plan", *arguments))

    def test_plans_as_json(self):
        for name in AS_JSON:
            with self.subTest(name):
                report = json.loads(tandem("plan", *PLANS[name], "--json"))
                shown = json.dumps(report, indent=1, ensure_ascii=False)
                self.same(f"plan_{name}.json", re.sub(r"\d+\.\d+(e-?\d+)?", lambda m: f"{float(m[0]):.6g}", shown) + "\n")

    def test_charts_of_plans(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "plan.svg"
            for name in CHARTS:
                with self.subTest(name):
                    tandem("plan", *PLANS[name], "--plot", str(path))
                    self.same(f"plan_{name}.svg", path.read_text(encoding="utf-8"))

    def test_simulations(self):
        for name, arguments in SIMULATIONS.items():
            with self.subTest(name):
                self.same(f"plan_{name}.txt", tandem("plan", *arguments, "--simulate"))

    def test_expert_frequencies_and_edited_placements(self):
        with tempfile.TemporaryDirectory() as folder:
            statistics, placement = pathlib.Path(folder) / "statistics.json", pathlib.Path(folder) / "placement.json"
            model = ("v2-lite", "--machine", "threadripper-4090", "--ctx", "4096")
            shares = [(e + 1) ** -0.5 for e in range(64)]  # of six experts a token, in another order in each layer
            rows = [[round(6000 * shares[(e * 37 + layer * 11) % 64] / sum(shares), 3) for e in range(64)] for layer in range(26)]
            statistics.write_text(json.dumps({"layers": 27, "experts": 64, "tokens": 1000, "counts": rows}))
            self.same("plan_v2_lite_by_frequency.txt", tandem("plan", *model, "--statistics", str(statistics), "--out", str(placement)))
            edited = json.loads(placement.read_text())
            edited["prefill"]["chunk_tokens"] = 1024
            placement.write_text(json.dumps(edited))
            self.same("plan_v2_lite_edited.txt", tandem("plan", *model, "--placement", str(placement)))

    def test_inspect(self):
        for name in CHECKPOINTS:
            with self.subTest(name):
                model = str(ROOT / "tests" / "golden" / name)
                self.same(f"inspect_{name}.txt", tandem("inspect", model, "--tensors"))
                report = json.loads(tandem("inspect", model, "--json"))
                self.same(f"inspect_{name}.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
