"""The planner's predictions for machines with published measurements.

    python3 tools/published_systems.py TANDEM            prints the tables
    python3 tools/published_systems.py TANDEM --write    writes them into docs/published_systems.md
    python3 tools/published_systems.py TANDEM --check    exit status 1 if the page differs
"""
import argparse
import functools
import json
import pathlib
import re
import subprocess
import sys
import tempfile

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "published_systems.md"
ROUNDING = 0.01  # allowed difference between processors
COLUMNS = ["system", "machine", "what", "`tandem plan ..`", "published", "predicted", "predicted / published"]
H20_COLUMNS = ["machine", "GPUs", "requests at once", "tokens/s", "tokens/s a GPU", "tokens/s a user", "first token, s"]

KT2, KT3, SGLANG = "KTransformers 0.2.1, Q4_K_M", "KTransformers 0.3, INT8", "SGLang, INT8"
CLUSTER, LMDEPLOY, OSDI = "SGLang, 96 H100", "lmdeploy, 32 GPUs", "arXiv 2606.10493"


def rows():
    """System, machine, quantity, model and options, field of the plan, divisor, published value."""
    for tokens, published in ((1024, 13.5), (2048, 13.4), (4096, 13.2), (8192, 12.4)):
        yield (KT2, "2x6454s-4090", f"decode at {tokens}, tokens/s", f"r1 --experts int4 --prompt {tokens} --output 64 --ctx 16384",
               "decode_tokens_per_second", 1, published)
    for tokens, published in ((1024, 186.0), (2048, 255.3), (4096, 252.6), (8192, 195.6)):
        options = f"r1 --experts int8 --prompt {tokens} --output 64 --ctx 16384"
        yield KT3, "2x6454s-4090", f"prefill of {tokens}, tokens/s", options, "prefill_tokens_per_second", 1, published
        yield KT3, "2x6454s-4090", "the same in chunks of 512", options, "prefill_in_512", 1, published
    options = "r1 --experts int4 --prompt 1024 --output 256"
    yield "KTransformers, Q4, L40S", "2x9654-5090", "decode, tokens/s", options, "decode_tokens_per_second", 1, 10.8
    yield "KTransformers, Q4, L40S", "2x9654-5090", "prefill of 1024, tokens/s", options, "prefill_tokens_per_second", 1, 108
    yield "KTransformers, Q4, L40S", "2x9654-5090", "the same in chunks of 512", options, "prefill_in_512", 1, 108
    options = "r1 --experts int8 --prompt 1024 --output 1024"
    yield SGLANG, "2x6980p", "decode, tokens/s", options, "decode_tokens_per_second", 1, 14.7
    yield SGLANG, "2x6980p", "the same at 1,108 GB/s", options, "decode_at_1108", 1, 14.7
    yield SGLANG, "2x6980p", "first token of 1,024, s", options, "time_to_first_token_seconds", 1, 1.885
    options = "r1 --ep-rows fp8 --objective throughput --concurrency 0 --user-speed 20 --prompt 2000 --output 1000 --ctx 4096"
    yield CLUSTER, "12x8xh100", "decode, tokens/s a host", options, "decode_tokens_per_second", 12, 22_300
    yield CLUSTER, "12x8xh100", "prefill, tokens/s a host", options, "prefill_tokens_per_second", 12, 52_300
    options = "r1 --ep-rows fp8 --prompt 2048 --output 2048 --ctx 4096 --concurrency 1950"
    yield LMDEPLOY, "32xh800", "answers, tokens/s", options, "output_tokens_per_second", 1, 32_224
    yield LMDEPLOY, "32xh800", "each user, tokens/s", options, "tokens_per_second_per_user", 1, 19.5
    options = "r1 --ep-rows fp8 --prompt 4096 --output 1500 --ctx 8192"
    yield "SGLang, 8 H20-96G", "8xh20-96g", "prefill of 4096, tokens/s", options, "prefill_tokens_per_second", 1, 16_500
    for name, published in (("fp8", 20), ("int4", 30)):
        yield (f"fastllm, {name.upper()}", "2x9654-5090", "decode, tokens/s", f"r1 --experts {name} --prompt 1024 --output 256",
               "decode_tokens_per_second", 1, published)
    for name, published in (("fp8", 21.5), ("int4", 28)):
        yield (f"{OSDI}, {name.upper()}", "2x9355-5090", "decode, tokens/s",
               f"r1 --experts {name} --prompt 4096 --output 256", "decode_tokens_per_second", 1, published)
    options = "r1 --experts fp8 --prompt 32768 --output 256 --ctx 40960"
    yield f"{OSDI}, FP8", "2x9355-5090", "prefill of 32768, tokens/s", options, "prefill_tokens_per_second", 1, 1200
    options = "kimi-k2 --experts int4 --prompt 1024 --output 256"
    yield "KTransformers, Kimi-K2, Q4_K_M", "2x6454s-4090", "decode, tokens/s", options, "decode_tokens_per_second", 1, 14
    options = "kimi-k2 --experts int4-32 --prompt 8192 --output 256 --ctx 16384"
    yield "KTransformers, K2-Thinking", "2x6454s-4090", "prefill of 8192, tokens/s", options, "prefill_tokens_per_second", 1, 184


class Planner:
    def __init__(self, binary):
        self.binary = binary

    @functools.lru_cache(maxsize=None)
    def plan(self, machine, options):
        command = [self.binary, "plan", "--json", "--machine", machine, *options.split()]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def predicted(self, machine, options, key):
        if key == "prefill_in_512":
            return self.in_chunks(512, machine, options)["predicted"]["prefill_tokens_per_second"]
        if key == "decode_at_1108":
            return self.at_bandwidth(machine, options, 1108e9)["predicted"]["decode_tokens_per_second"]
        return self.plan(machine, options)["predicted"][key]

    def in_chunks(self, tokens, machine, options):
        """The same placement with another chunk length of prefill."""
        placement = self.plan(machine, options)["placement"]
        placement = {**placement, "prefill": {**placement["prefill"], "chunk_tokens": tokens}}
        return self.with_file(placement, lambda path: self.plan(machine, f"{options} --placement {path}"))

    def at_bandwidth(self, machine, options, rate):
        description = self.plan(machine, options)["machine"]
        scale = rate / description["read_bytes_per_second"]["all"]
        description = {**description, "read_bytes_per_second": {**description["read_bytes_per_second"], "all": rate}}
        description["nodes"] = [{**node, "read_bytes_per_second": node["read_bytes_per_second"] * scale}
                                for node in description["nodes"]]
        return self.with_file(description, lambda path: self.plan(path, options))

    @staticmethod
    def with_file(value, use):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(value, file)
            file.flush()
            return use(file.name)


def compared(planner):
    for system, machine, what, options, key, hosts, published in rows():
        predicted = planner.predicted(machine, options, key) / hosts
        yield [system, machine, what, f"`{options}`", figure(published), figure(predicted), f"{predicted / published:.2f}"]


def h20(planner):
    """Prompts and answers of 1,000 tokens on one and two hosts of H20: no measured figures are published."""
    for machine, gpus in (("8xh20-141g", 8), ("2x8xh20-141g", 16)):
        for requests in (8, 64, 2048):
            options = f"r1 --prompt 1000 --output 1000 --ctx 2000 --concurrency {requests}"
            speed, user, first = (planner.predicted(machine, options, key) for key in (
                "output_tokens_per_second", "tokens_per_second_per_user", "time_to_first_token_seconds"))
            yield [machine, str(gpus), str(requests), figure(speed), figure(speed / gpus), figure(user), figure(first)]


TABLES = {"compared": (COLUMNS, "---|---|---|---|---:|---:|---:", compared), "h20": (H20_COLUMNS, "---" + "|---:" * 6, h20)}


def tables(binary):
    """The text of each table by its name."""
    planner = Planner(binary)
    return {name: f"| {' | '.join(columns)} |\n|{alignment}|\n" + "".join(f"| {' | '.join(row)} |\n" for row in make(planner))
            for name, (columns, alignment, make) in TABLES.items()}


def place(name):
    """The pattern of a table's place in the page: what precedes it, the table, and what ends it."""
    return re.compile(rf"(<!-- {name} -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def figure(number):
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def differs(old, new):
    """Whether words differ, or numbers differ by more than ROUNDING."""
    numbers = re.compile(r"[0-9][0-9,]*\.?[0-9]*")
    if numbers.sub("#", old) != numbers.sub("#", new):
        return True
    pairs = zip((float(n.replace(",", "")) for n in numbers.findall(old)), (float(n.replace(",", "")) for n in numbers.findall(new)))
    return any(abs(a - b) > ROUNDING * max(a, b) for a, b in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tandem", metavar="TANDEM")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--write", action="store_true")
    modes.add_argument("--check", action="store_true")
    args = parser.parse_args()
    new = tables(args.tandem)
    if not (args.write or args.check):
        print("\n".join(new.values()), end="")
        return 0
    page = PAGE.read_text(encoding="utf-8")
    if args.write:
        for name, text in new.items():
            page = place(name).sub(lambda found, text=text: found[1] + text + found[3], page)
        PAGE.write_text(page, encoding="utf-8")
        return 0
    changed = [text for name, text in new.items() if differs(place(name).search(page)[2], text)]
    if changed:
        print(f"{PAGE.name} is no longer what the planner predicts: make it anew with --write and read its explanations again",
              *changed, sep="\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
