"""The program from the command line: installed, copied, and one clear error line for every bad input.

    python3 tests/cli_errors_test.py PATH_OF_TANDEM
"""
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

from cli_test import ROOT, TANDEM, TINY, tandem


class Installed(unittest.TestCase):
    """The program outside of the source tree, with and without the files that `make install` puts beside it."""

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def run_at(self, program, *arguments):
        return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=120)

    def test_installed(self):
        build = pathlib.Path(TANDEM).resolve().parent
        subprocess.run(["cmake", "--install", str(build)], env={**os.environ, "DESTDIR": self.folder}, check=True, capture_output=True)
        (program,) = pathlib.Path(self.folder).rglob("bin/tandem")
        result = self.run_at(program, "run", "-q", "--temp", "0", "-p", "What is 12 + 7?")
        self.assertIn("The answer is 19.", result.stdout, result.stderr)
        result = self.run_at(program, "plan", "kimi-k2", "--machine", "12x8xh100", "--objective", "throughput", "--concurrency", "256")
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_a_lone_copy_says_where_it_looked(self):
        home = os.path.join(self.folder, "1", "2", "3", "4")
        os.makedirs(home)
        program = shutil.copy(os.path.realpath(TANDEM), home)
        result = self.run_at(program, "run", "-p", "x")
        if result.returncode == 0:
            self.skipTest("an installation on this machine was found")
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, r"^error: the embedded model is missing .*`make install`.*\n$")
        for place in (home, os.path.join(self.folder, "1"), os.path.join(self.folder, "1", "2", "3", "share", "tandem")):
            self.assertIn(os.path.join(place, "models", "tiny-r1"), result.stderr)
        self.assertIn(os.path.join(home, "machines"), self.run_at(program, "plan", TINY, "--machine", "8xh200").stderr)
        self.assertIn(os.path.join(home, "models", "configs"), self.run_at(program, "bench", "experts", "--config", "r1").stderr)

    def test_a_lone_copy_needs_no_embedded_model_where_another_is_named(self):
        program = shutil.copy(os.path.realpath(TANDEM), self.folder)
        for command in (("inspect", TINY), ("plan", str(ROOT / "models/configs/r1.json"), "--machine", str(ROOT / "machines/8xh200.json"))):
            result = self.run_at(program, *command)
            self.assertEqual((result.returncode, result.stderr), (0, ""))


class Refuses(unittest.TestCase):
    """Every bad input gives exit status 2 (or 1), no standard output, and one line that begins with "error: "."""

    def refused(self, words, *arguments, statuses=(1, 2), **more):
        result = tandem(*arguments, **more)
        self.assertIn(result.returncode, statuses, result)
        self.assertEqual(result.stdout, "")
        lines = result.stderr.splitlines()
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith("error: "), lines[0])
        for word in words:
            self.assertIn(word, lines[0])

    def test_memory_of_a_benchmark_is_that_of_the_machine(self):
        self.refused("must be between 0 and the", "bench", "experts", "--config", "v2-lite", "--memory", "100000")
        self.refused("must be between 0 and the", "bench", "experts", "--config", "v2-lite", "--memory", "-1")

    def test_benchmarks(self):
        with tempfile.TemporaryDirectory() as folder:
            plot = pathlib.Path(folder) / "rows.svg"
            for words, what, *arguments in ((["--seconds 0"], "embed", "--seconds", "0"), (["--tokens 0"], "embed", "--tokens", "0"),
                                            (["--ctx 16777217"], "layer", "--ctx", "16777217"), (["--batch 513"], "generate", "--batch", "513"),
                                            (["-n 1"], "generate", "-n", "1"), (["--variants", "--batch"], "attention", "--variants", "--batch", "2"),
                                            (["--context-limit"], "attention", "--variants", "--context-limit", "70"),
                                            (["--context-limit 63", "64 tokens"], "attention", "--ctx", "5,64", "--context-limit", "63"),
                                            (["--context-limit 16383", "16384 tokens"], "attention", "--context-limit", "16383"),
                                            (["--context-limit -1"], "attention", "--context-limit", "-1"),
                                            (["--context-limit 16777216 --batch 8", "GB may be used"], "attention", "--ctx", "5", "--batch", "8",
                                             "--context-limit", "16777216", "--memory", "0.05"),
                                            (["--format int8", "--experts"], "mlp", "--format", "int8"), (["int3"], "moe", "--experts", "int3"),
                                            (["nothing to measure"], "layer", "--layers", "2", "--ctx", "16", "--tokens", "40", "--seconds", "0.001",
                                             "--memory", "0.05"),
                                            (["--memory"], "experts", "--memory", "0.0001")):
                self.refused(words, "bench", what, *arguments, "--config", TINY)
            self.refused(["--tokens 0"], "bench", "embed", "--tokens", "0", "--plot", str(plot))
            self.assertFalse(plot.exists())

    def refused_by_plan(self, words, *arguments):
        self.refused(words, "plan", *arguments, statuses=(2,))

    def damaged(self, change):
        """A copy of tiny-r1 that `change(folder)` has damaged."""
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        model = pathlib.Path(folder) / "model"
        shutil.copytree(TINY, model)
        change(model)
        return str(model)

    def test_plan(self):
        plan = ("r1", "--machine")
        self.refused_by_plan(["no-such-model", "moonlight"], "no-such-model", "--machine", "8xh200")
        self.refused_by_plan(["no-such", "8xh200"], *plan, "no-such")
        self.refused_by_plan(["does not fit", "lacks", "GB more"], *plan, "desktop-192gb")
        self.refused_by_plan(["--ctx 0"], *plan, "8xh200", "--ctx", "0")
        self.refused_by_plan(["fp7"], *plan, "8xh200", "--experts", "fp7")
        self.refused_by_plan(["objective"], *plan, "8xh200", "--objective", "fun")
        self.refused(["cannot open"], "bench", "machine", "--curves", "no-such-file")
        self.refused(["8xh200.json"], "bench", "machine", "--curves", str(ROOT / "machines" / "8xh200.json"))
        self.refused_by_plan(["cannot open"], *plan, "8xh200", "--placement", "no-such-file")
        self.refused_by_plan(["cannot open"], *plan, "8xh200", "--statistics", "no-such-file")
        self.refused_by_plan(["spread over GPUs, or over the CPUs of several hosts"], *plan, "2x6454s-4090", "--simulate")
        self.refused_by_plan(["skew"], "kimi-k2", "--machine", "16xh800", "--objective", "throughput", "--concurrency", "256",
                     "--ctx", "4096", "--simulate", "--skew", "-1")
        self.refused_by_plan(["/no/such", "cannot be written"], *plan, "8xh200", "--out", "/no/such/folder/p.json")
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            machine = json.loads((ROOT / "machines" / "8xh200.json").read_text())
            machine["cores"] = 0
            json.dump(machine, file)
            file.flush()
            self.refused_by_plan(["cores is 0"], *plan, file.name)

    def test_placement(self):
        path = pathlib.Path(tempfile.mkdtemp()) / "p.json"
        self.addCleanup(shutil.rmtree, path.parent)
        sound = {"backbone": {"format": "fp8", "stages": [{"layers": "0-2", "devices": ["host0.cpu"]}]},
                 "embedding": {"on": "cpu"}, "head": {"on": "cpu", "replicated": True}, "kv": {"tokens": 512, "type": "bf16"},
                 "experts": {"layers": [{"layers": "1-2", "groups": [
                     {"experts": "0-15", "format": "fp8", "owners": ["host0.cpu"]}]}]},
                 "prefill": {"chunk_tokens": 512, "stream_from_tokens": 0}, "micro_batches": 1}
        ask = ("run", "-p", "What is 1 + 2?", "--placement", str(path))

        def refused(words, *arguments, **experts):
            placement = json.loads(json.dumps(sound))
            placement["experts"]["layers"][0]["groups"][0].update(experts)
            path.write_text(json.dumps(placement))
            self.refused(words, *ask, *arguments)
        path.write_text(json.dumps(sound))
        self.assertEqual(tandem(*ask, "-n", "1").returncode, 0)
        refused(["layer 1", "expert 15 has no owner"], experts="0-14")
        refused(["layer 1", "expert 0 is on host0.gpu3", "runs experts on host0.cpu only"], owners=["host0.gpu3"])
        refused(["both --placement and --experts int4"], "--experts", "int4")
        refused(["--ctx 600", "512 tokens"], "--ctx", "600")
        sound["kv"]["tokens"] = 10**12
        refused(["host0.cpu holds", "elsewhere"])
        self.refused(["cannot open"], "run", "-p", "x", "--placement", "/no/such/p.json")

    def test_options(self):
        self.refused(["no-such"], "run", "no-such-directory", "-p", "x")
        self.refused(["flavour"], "run", "--flavour", "-p", "x")
        self.refused(["empty"], "run")
        self.refused(["empty"], "run", "-p", "")
        self.refused(["both"], "run", "-p", "x", "-f", "y")
        self.refused(["no/such/file"], "run", "-f", "no/such/file")
        self.refused(["temperature", "-1"], "run", "-p", "x", "--temp", "-1")
        self.refused(["top-p", "1.5"], "run", "-p", "x", "--top-p", "1.5")
        self.refused(["threads", "100000"], "run", "-p", "x", "--threads", "100000")
        self.refused(["sse9", "avx2"], "run", "-p", "x", "--isa", "sse9")
        self.refused(["sse9"], "run", "-p", "x", env={"TANDEM_ISA": "sse9"})
        self.refused(["sse9"], "run", "-p", "x", "--isa", "auto", env={"TANDEM_ISA": "sse9"})
        self.refused(["--ctx 1073741825"], "run", "-p", "x", "--ctx", "1073741825")
        self.refused(["--device gpu: choose auto, cpu or cuda"], "run", "-p", "x", "--device", "gpu")
        self.refused(["--kv int4: choose auto, bf16 or fp8"], "run", "-p", "x", "--kv", "int4")
        self.refused(["--kv fp8", "bf16", "--device cuda"], "run", "-p", "x", "--kv", "fp8")
        self.refused(["--activations int8: choose bf16 or fp8"], "run", "-p", "x", "--activations", "int8")
        self.refused(["int3"], "run", "-p", "x", "--experts", "int3")
        self.refused(["logit-bias"], "run", "-p", "x", "--logit-bias", "five")
        self.refused(["600"], "run", "-p", "x", "--logit-bias", "600=1")
        self.refused(["0 new tokens"], "run", "-p", "x", "-n", "0")
        self.refused(["/no/such", "cannot be written"], "run", "-p", "x", "--record-routing", "/no/such/folder/r.json")
        self.refused(["/dev/null", "no plain file"], "run", "-p", "x", "--record-routing", "/dev/null")

    def test_pack(self):
        self.refused(["/proc/no-such"], "pack", "--cache", "/proc/no-such")
        self.refused(["no-such-directory"], "pack", "no-such-directory")
        self.refused(["HOME", "--cache"], "pack", env={"XDG_CACHE_HOME": "", "HOME": ""})
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run(f"ulimit -f 1000; {TANDEM} pack --cache {folder}", shell=True, capture_output=True,
                                    text=True, check=False)
            self.assertEqual((result.returncode, result.stdout), (2, ""))
            self.assertRegex(result.stderr, r"^error: .* cannot be written: File too large\n$")
            self.assertEqual(os.listdir(folder), [], "nothing half-written")

    def test_prompts(self):
        self.refused(["--ctx", "64"], "run", "-p", "long " * 100, "--ctx", "64")
        result = subprocess.run([TANDEM, "run", "-f", "-"], input=b"\xff\xfe", capture_output=True, check=False)
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr.decode(), r"^error: .*\n$")
        with tempfile.TemporaryDirectory() as folder:
            self.refused(["600", "512"], "logits", "--tokens", "600", "--out", os.path.join(folder, "x.npy"))
            self.assertEqual(os.listdir(folder), [], "no partial file is left behind")
        self.refused(["tokens"], "logits", "--tokens", "1,,2", "--out", "x.npy")
        self.refused(["3 tokens are more than --ctx 2"], "logits", "--tokens", "1,2,3", "--out", "x.npy", "--ctx", "2")
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            for text, words in (("[1.5]", "is not a JSON array of token ids"), ("{}", "is not a JSON array"), ("[4294967297]", "2147483647"), ("[-7]", "-1")):
                file.seek(0)
                file.truncate()
                file.write(text)
                file.flush()
                self.refused([words], "logits", "--tokens", "@" + file.name, "--out", "x.npy")
        self.refused(["JSON"], "tokenize", "--decode", "-p", "[1, -2]")
        self.refused(["999999"], "tokenize", "--decode", "-p", "[999999]")
        self.refused(["list of messages"], "tokenize", "--chat", "-p", "{}")
        self.refused(["/no/such"], "logits", "--tokens", "1", "--out", "/no/such/folder/x.npy")

    def test_output_that_cannot_be_written(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            result = subprocess.run([TANDEM, "run", "-p", "What is 1 + 1?", "-q"], stdout=full, stderr=subprocess.PIPE,
                                    text=True, check=False)
        self.assertIn(result.returncode, (1, 2))
        self.assertTrue(result.stderr.startswith("error: "), result.stderr)

    def test_no_memory(self):
        self.refused(["memory"], "run", "-p", "x", "--ctx", "1000000000")

    def test_wrong_folders(self):
        folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        (folder / "empty").mkdir()
        (folder / "file").write_text("{}")
        (folder / "loop").symlink_to("loop")
        (folder / "other").mkdir()
        (folder / "other" / "file").write_text("{}")
        wrong = {"nope": "does not exist", "file/nope": "does not exist", "file": "is not a folder", "empty": "is empty",
                 "loop": "cannot be read"}
        if os.geteuid() != 0:  # root can read everything
            (folder / "locked").mkdir(mode=0)
            wrong["locked"] = "cannot be read"
        text = ("-f", str(ROOT / "README.md"))
        tokens = ("--tokens", "1", "--out", str(folder / "x.npy"))
        commands = [("run",), ("run", "-p", "x"), ("chat",), ("serve", "--port", "0"), ("inspect",), ("tokenize", "-p", "x"),
                    ("logits", *tokens), ("eval", *text), ("pack",)]
        for name, word in wrong.items():
            path = str(folder / name)
            for command, *options in commands:
                self.refused([path + " ", word], command, path, *options, statuses=(2,))
            self.refused([path + " ", word], "eval", *text, "--against", path, statuses=(2,))
        for name in ("nope", "empty", "file", "loop"):
            self.refused_by_plan([str(folder / name)], str(folder / name), "--machine", "8xh200")
            self.refused_by_plan([str(folder / name)], "r1", "--machine", str(folder / name))
            self.refused([str(folder / name)], "bench", "experts", "--config", str(folder / name))
        for command in ("inspect", "pack", "logits"):
            options = tokens if command == "logits" else ()
            self.refused([str(folder / "other"), "has no config.json"], command, str(folder / "other"), *options)

    def test_folders_for_files(self):
        for command in (("run", "-f"), ("tokenize", "-f"), ("eval", "-f"), ("logits", "--out", "x.npy", "--tokens")):
            at = "@" if command[0] == "logits" else ""
            self.refused(["/no/such: No such file or directory"], *command, at + "/no/such")
            self.refused([f"{ROOT}: Is a directory"], *command, at + str(ROOT))

    def test_damaged_checkpoints(self):
        def cut(model):
            path = model / "model.safetensors"
            os.truncate(path, path.stat().st_size // 2)
        self.refused(["model.safetensors"], "run", self.damaged(cut), "-p", "x")
        self.refused(["config.json"], "run", self.damaged(lambda m: (m / "config.json").unlink()), "-p", "x")
        self.refused(["config.json"], "inspect", self.damaged(lambda m: (m / "config.json").write_text("[" * 100000)))
        self.refused(["tokenizer"], "run", self.damaged(lambda m: (m / "tokenizer.json").unlink()), "-p", "x")
        self.refused(["tokenizer.json"], "run", self.damaged(lambda m: (m / "tokenizer.json").write_text("{}")), "-p", "x")

        def set_config(**values):
            def change(model):
                config = json.loads((model / "config.json").read_text())
                (model / "config.json").write_text(json.dumps({**config, **values}))
            return change
        self.refused(["num_hidden_layers", "-3"], "inspect", self.damaged(set_config(num_hidden_layers=-3)))
        self.refused(["LlamaForCausalLM"], "inspect", self.damaged(set_config(architectures=["LlamaForCausalLM"])))
        self.refused(["model.embed_tokens.weight"], "run", self.damaged(set_config(vocab_size=513)), "-p", "x")
        self.refused(["layers.2"], "run", self.damaged(set_config(num_hidden_layers=2, num_nextn_predict_layers=0)), "-p", "x")

        def nan_scale(model):
            path = model / "model.safetensors"
            data = bytearray(path.read_bytes())
            length = struct.unpack("<Q", data[:8])[0]
            header = json.loads(data[8:8 + length])
            begin = 8 + length + header["model.layers.0.self_attn.o_proj.weight_scale_inv"]["data_offsets"][0]
            data[begin:begin + 4] = struct.pack("<f", float("nan"))
            path.write_bytes(data)
        self.refused(["model.layers.0.self_attn.o_proj"], "run", self.damaged(nan_scale), "-p", "x")

    def test_damaged_template(self):
        def break_template(model):
            path = model / "tokenizer_config.json"
            config = json.loads(path.read_text())
            config["chat_template"] = "{% for m in messages %}"
            path.write_text(json.dumps(config))
        self.refused(["template"], "run", self.damaged(break_template), "-p", "x")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
