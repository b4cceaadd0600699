"""What the program says about bad input, compared with the files of tests/data/output.

    python3 tests/refusals_test.py PATH_OF_TANDEM

Every field of a machine, a placement, routing statistics and a config.json is removed or replaced by values of other
types and sizes; options of the command line get values out of range. The kept files list the `error:` line of
each, or that the value is accepted.
"""
import concurrent.futures
import json
import os
import pathlib
import re
import sys
import tempfile
import unittest

from kept_output import ROOT, KeptOutput, tandem

WRONG = {"removed": ..., "text": "x", "-1": -1, "0": 0, "0.5": 0.5, "huge": 10**18, "null": None}
TINY = str(ROOT / "models" / "tiny-r1")
STATUS = "exit status 2\n"


def fields(tree, path=()):
    """The paths of all values in a tree of JSON, of lists only the first two items."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:2]) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from fields(value, (*path, key))


def replaced(tree, path, value):
    copy = json.loads(json.dumps(tree))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    if value is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return copy


def is_object(tree, path):
    for key in path:
        tree = tree[key]
    return isinstance(tree, dict)


class Refusals(KeptOutput):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def answer(self, name, *arguments):
        """A line of the kept file. A refusal is one line on standard error and nothing else."""
        text = re.sub(re.escape(str(self.folder)) + r"/[^/:]*\.json", "FILE", tandem(*arguments))
        if not text.endswith(STATUS):
            self.assertNotIn("error:", text)
            return f"{name}: accepted\n"
        self.assertTrue(text.startswith("error: "), text)
        self.assertEqual(text.count("\n"), 2, text)
        return f"{name}: {text.removesuffix(STATUS)}"

    def answers(self, cases):
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return "".join(pool.map(lambda case: self.answer(*case), cases))

    def wrong_fields(self, tree, command, write, skip=()):
        cases = []
        for path in fields(tree):
            if path[0] in skip:
                continue
            for what, value in WRONG.items():
                name = ".".join(map(str, path)) + " " + what
                cases.append((name, *command(write(name.replace(" ", "_"), replaced(tree, path, value)))))
        for path in [(), *fields(tree)]:
            if is_object(tree, path) and (not path or path[0] not in skip):
                name = ".".join(map(str, path)) + " with a surplus field"
                cases.append((name, *command(write(name.replace(" ", "_"), replaced(tree, (*path, "surplus"), 1)))))
        return self.answers(cases)

    def write(self, name, tree):
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(tree))
        return str(path)

    def test_machines(self):
        for name in ("2x6454s-4090", "16xh800"):
            machine = json.loads((ROOT / "machines" / f"{name}.json").read_text())
            self.same(f"refused_machines_{name}.txt", self.wrong_fields(
                machine, lambda path: ("plan", "v2-lite", "--machine", path), self.write, skip=("sources",)))

    def test_placements(self):
        plan = ("plan", "v2-lite", "--machine", "2x6454s-4090", "--experts", "int8", "--ctx", "4096")
        tandem(*plan, "--out", str(self.folder / "sound.json"))
        placement = json.loads((self.folder / "sound.json").read_text())
        # Experts in the second group of each layer exceed the GPU's memory.
        full = replaced(placement, ("experts",), {"layers": [{"layers": "1-26", "groups": [
            {"experts": "0-5", "format": "bf16", "owners": ["host0.cpu"]},
            {"experts": "6-63", "format": "bf16", "owners": ["host0.gpu0"]}]}]})
        self.same("refused_placements.txt", self.wrong_fields(
            placement, lambda path: (*plan, "--placement", path), self.write, skip=("predicted",))
            + self.answer("a full GPU", *plan, "--placement", self.write("full", full)))

    def test_placements_that_are_executed(self):
        sound = {"backbone": {"format": "fp8", "stages": [{"layers": "0-2", "devices": ["host0.cpu"]}]},
                 "embedding": {"on": "cpu"}, "head": {"on": "cpu", "replicated": True}, "kv": {"tokens": 512, "type": "bf16"},
                 "experts": {"layers": [{"layers": "1-2", "groups": [
                     {"experts": "0-7", "format": "fp8", "owners": ["host0.cpu"]},
                     {"experts": "8-15", "format": "fp8", "owners": ["host0.cpu"]}]}]},
                 "prefill": {"chunk_tokens": 512, "stream_from_tokens": 0}, "micro_batches": 1}
        run = ("run", TINY, "-q", "--temp", "0", "-n", "1", "-p", "x", "--placement")
        stages = ("backbone", "stages")
        groups = ("experts", "layers", 0, "groups")
        changes = {
            "as it is": (("micro_batches",), 1), "two micro-batches": (("micro_batches",), 2),
            "backbone on the GPU": ((*stages, 0, "devices"), ["host0.gpu0"]), "another host": ((*stages, 0, "devices"), ["host1.cpu"]),
            "two stages": (stages, [{"layers": "0-1", "devices": ["host0.cpu"]}, {"layers": "2-2", "devices": ["host0.cpu"]}]),
            "layers left": ((*stages, 0, "layers"), "0-1"), "backbone in int8": (("backbone", "format"), "int8"),
            "embedding on the backbone": (("embedding", "on"), "backbone"), "head on the backbone": (("head", "on"), "backbone"),
            "an expert on the GPU": ((*groups, 1, "owners"), ["host0.gpu0"]), "an expert on another host": ((*groups, 1, "owners"), ["host1.cpu"]),
            "two owners": ((*groups, 1, "owners"), ["host0.cpu", "host0.gpu0"]), "two formats": ((*groups, 1, "format"), "int8"),
            "an expert twice": ((*groups, 1, "experts"), "7-15"), "an expert missing": ((*groups, 1, "experts"), "9-15"),
            "an expert too many": ((*groups, 1, "experts"), "8-16"), "a dense layer with experts": (("experts", "layers", 0, "layers"), "0-2"),
            "fp8 cache": (("kv", "type"), "fp8"), "no tokens": (("kv", "tokens"), 0), "a long chunk": (("prefill", "chunk_tokens"), 10**6),
            "streaming": (("prefill", "stream_from_tokens"), 100),
        }
        cases = [(name, *run, self.write(name.replace(" ", "_"), replaced(sound, path, value))) for name, (path, value) in changes.items()]
        self.same("refused_executions.txt", self.answers(cases))

    def test_statistics(self):
        sound = {"layers": 27, "experts": 64, "tokens": 1000, "experts_of_neighbours": [6, 11.5], "counts": [[93.75] * 64] * 26}
        plan = ("plan", "v2-lite", "--machine", "threadripper-4090", "--statistics")
        self.same("refused_statistics.txt", self.wrong_fields(sound, lambda path: (*plan, path), self.write))

    def test_configurations(self):
        """The same wrong values in two families, of which the command reads no more than config.json."""
        for family in ("r1", "v2-lite"):
            config = json.loads((ROOT / "models" / "configs" / f"{family}.json").read_text())
            plan = ("--machine", "2x6980p")
            self.same(f"refused_configurations_{family}.txt", self.wrong_fields(config, lambda path: ("plan", path, *plan), self.write))

    def test_options(self):
        run, plan = ("run", TINY, "-p", "x", "-q"), ("plan", "r1", "--machine", "8xh200")
        serve, bench = ("serve", TINY, "-q"), ("bench", "experts", "--config", TINY)
        route, registering = ("route", "-q"), ("route", "-q", "--accept-registration")
        options = {
            route: {"--backends": ("", "127.0.0.1:1", "ftp://a:1", "https://a:0", "http://a:1/v1", "http://a:1,", "http://a,http://A:80"),
                    "--backends-file": ("/no/such", "/tmp")},
            registering: {"--port": (-1, 65536), "--drain": (-1,), "--check-interval": (0, "nan", 86401), "--check-timeout": (0,), "--connect-timeout": (0,),
                          "--first-byte-timeout": (-1,), "--cors-origin": ("x",), "--cert": ("x",), "--backend-ca": ("/no/such",)},
            run: {"-n": (-1, 0), "--ctx": (-1, 1, 1 << 40), "--temp": (-0.1, "nan"), "--top-p": (-0.1, 0, 1.1), "--top-k": (-1,),
                  "--min-p": (-0.1, 1.1), "--repetition-penalty": (-0.1, 0), "--presence-penalty": (-101, 101),
                  "--frequency-penalty": (-101, 101), "--logprobs": (-1, 513), "--seed": ("x",),
                  "--logit-bias": ("512=1", "-1=1", "1", "=1", "1=", "1=x"), "--device": ("gpu",), "--isa": ("sse",),
                  "--experts": ("int3",), "--attention": ("fast",), "--kv": ("int8", "fp8"), "--activations": ("fp4", "fp8"), "--dense-products": ("mkl",),
                  "--ranks": (-1, 0, "x"), "--ep-dispatch": ("scatter",), "--ep-rows": ("bf16", "fp8")},
            plan: {"--ctx": (-1, 0, 163841), "--concurrency": (-1, 1 << 30), "--prompt": (0, 1 << 40), "--output": (0, 1 << 40),
                   "--user-speed": (-1, 1e7, "nan"), "--slo-ttft": (-1, 1e7, "nan"),
                   "--standbys": (-1, 1, "x"), "--request-rate": (1, "nan"), "--slo-gap": (0.1,),
                   "--draft-tokens": (-1, 9, "x"), "--acceptance": (-0.1, 1.1, "nan"),
                   "--preset": ("isl2k-osl2k", ""), "--objective": ("speed",), "--experts": ("int3",), "--kv": ("int8",), "--ep-rows": ("bf16", "")},
            serve: {"--simulate-routing": ("8", "", "/tmp", "balanced-ranks", "balanced-ranks:0", "balanced-ranks:x", "balanced-ranks:17", str(ROOT / "README.md")),
                    "--max-batch": (0, 1 << 20), "--chunk": (0, 1 << 20), "--kv-tokens": (-1, 5), "--kv-fraction": (0, 1),
                    "--balance-window": (-1, 100001, "x", 0.5), "--drain": (-1,), "--cors-origin": ("chat.example", "", "https://", "https://chat.example/"),
                    "--port": (-1, 65536), "--proxy-url": ("router:80", "ftp://router", "https://router/x"), "--proxy-ca": ("x",), "--node-url": ("http://a:1",),
                    "--nnodes": (2, 0, "x"), "--node-rank": (1, -1), "--backend": ("pytorch",), "--log-level": ("ERROR",)},
            ("plan", "v2-lite", "--machine", "home-32x4090", "--servers"): {"--request-rate": (-1, 1e7, "nan"), "--slo-gap": (-1, 1e7, "nan"),
                                                                              "--standbys": (1,)},
            ("plan", "r1", "--machine", "office-4090-3x256gb"): {"--standbys": (2, 3, 4)},
            ("plan", "r1", "--machine", "8xh200", "--preset", "isl1k-osl1k"): {"--standbys": (1,), "--out": ("x",), "--plot": ("x",), "--placement": ("x",)},
            ("bench", "serving", "--port", "1"): {
                "--preset": ("isl2k-osl2k",), "--gpus": (-1, 1 << 25), "--slo-ttft": (0, -1, "nan", 1e6), "--sweep-dir": ("x",),
                "--sweep-num-prompts": (5,), "--sweep-lengths": ("1024", "1024:", ":5", "1024:5x", "a:b", "", "0:5", "5:0", "1:1:1")},
            ("bench", "serving", "--sweep-lengths", "5:5", "--sweep-dir", "/proc/nothing"): {
                "--concurrency": (1,), "--slo-tps-user": (1,), "--slo-ttft": (1,), "--output-file": ("x",), "--sweep-num-prompts": (0,)},
            ("selftest",): {"--arch": ("r9", "no/r1", ""), "--layers": (0, 1001)},
            bench: {"--seconds": (0, 3601), "--tokens": (0, 65537, "x", ""), "--experts": ("int3",), "--isa": ("sse",)},
            ("bench", "layer", "--config", "v2-lite"): {"--simulate-routing": ("balanced", "balanced-ranks", "balanced-ranks:65")},
            ("bench", "mlp"): {"--baseline": ("jax", "numpy")},
            ("bench", "comm", "--config", TINY): {"--ranks": (0,), "--bytes": ("x",), "--seconds": (0,), "--as-network": ()},
            ("bench", "products"): {"--device": ("gpu",), "--isa": ("sse",)},
            ("bench", "generate", "--config", TINY): {"--draft-tokens": (-1, 9), "--acceptance": (-0.1, 1.1, "nan"), "--layers": (0, 1001), "--batch": (0, 1 << 20), "--ctx": (0, 1 << 25), "-n": (0, 1)},
            ("bench", "attention", "--variants", "--seconds", "0.001"): {"--config": ("v2-lite", "moonlight")},
            ("logits", TINY, "--out", str(self.folder / "x.json")): {"--tokens": ("", "1,", "512", "-1", "x", "@/no/such")},
            ("tokenize", TINY, "--decode"): {"-p": ("", "[", "[512]", "[-1]", "[0.5]", "{}")},
            ("tokenize", TINY, "--chat"): {"-p": ("", "[", "{}", "[1]", '[{"role": "x"}]', '[{"content": "x"}]')},
            ("eval", TINY, "-f", str(ROOT / "README.md")): {"--ctx": (1,), "--against": ("/no/such",), "--against-experts": ("int3",)},
        }
        cases = [(" ".join([*command, option, str(value)]).replace(str(ROOT), "ROOT").replace(str(self.folder), "FOLDER"), *command, option, str(value))
                 for command, values in options.items() for option, them in values.items() for value in them]
        self.same("refused_options.txt", self.answers(cases))

    def test_the_first_wrong_option_is_named(self):
        """Of several wrong options one is named; it is corrected or taken away, and so on until only one is left."""
        text = str(self.folder / "short.txt")
        pathlib.Path(text).write_text("a")
        commands = {
            ("serve", TINY, "-q"): {"--port": "-1", "--max-batch": "0", "--chunk": "0", "--kv-tokens": "-1", "--kv-fraction": "0", "--drain": "-1",
                                    "--cors-origin": "x", "--device": "gpu", "--isa": "sse", "--experts": "int3", "--attention": "x", "--kv": "x",
                                    "--activations": "x", "--ctx": "-1"},
            ("run", TINY, "-q", "-p", "x"): {"-f": "/no/such", "--temp": "-1", "--top-p": "2", "--top-k": "-1", "--min-p": "2", "--repetition-penalty": "0",
                                             "--presence-penalty": "3", "--logit-bias": "x", "-n": "-3", "--ctx": "-1", "--logprobs": "513",
                                             "--record-routing": "/no/such/r", "--timeline": "/no/such/t", "--placement": "/no/such/p"},
            ("eval", TINY, "-q"): {"-f": (text, str(ROOT / "README.md")), "--ctx": "1", "--against": "/no/such", "--against-experts": "auto", "--placement": "/no/such/p"},
            ("logits", TINY, "-q"): {"--tokens": ("1,2,x", "1"), "--out": ("/no/such/x.npy", str(self.folder / "x.npy")), "--ctx": "-1"},
            ("tokenize", TINY): {"-p": "{", "-f": "/no/such", "--decode": None, "--chat": None},
            ("plan", "r1", "--machine", "8xh200"): {"--ctx": "0", "--concurrency": "-1", "--prompt": "0", "--output": "0", "--user-speed": "-1",
                                                    "--statistics": "/no/such/s", "--placement": "/no/such/p", "--out": "/no/such/o", "--plot": "/no/such/f"},
            ("bench", "attention", "--variants"): {"--seconds": "0", "--tokens": "0", "--ctx": "0", "--batch": "1000", "--config": "/no/such",
                                                   "--plot": "/no/such/p"},
            ("bench", "generate", "--config", TINY): {"--seconds": "0", "--tokens": "0", "--ctx": "0", "--batch": "0", "-n": "0", "--layers": "0",
                                                      "--format": "int8"},
            ("selftest",): {"--layers": "0", "--arch": "/no/such"},
        }
        cases = []
        for command, options in commands.items():
            left, right = dict(options), []
            while left:
                wrong = {option: value[0] if isinstance(value, tuple) else value for option, value in left.items()}
                words = [word for option, value in wrong.items() for word in ([option] if value is None else [option, value])]
                line = self.answer("", *command, *right, *words)
                cases.append(f"{' '.join([*command, *left]).replace(str(ROOT), 'ROOT')}{line.replace(text, 'SHORT').replace(str(ROOT), 'ROOT')}")
                if line.endswith("accepted\n"):
                    break
                named = [option for option in wrong if re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", line)]
                named = named or [option for option, value in wrong.items() if value and value in line]
                self.assertTrue(named, line)
                value = left.pop(named[0])
                right += [named[0], value[1]] if isinstance(value, tuple) else []
        self.same("refused_in_order.txt", "".join(cases))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
