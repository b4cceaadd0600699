"""The program from the command line: outputs and exit statuses.

    python3 tests/cli_test.py PATH_OF_TANDEM
"""
import fcntl
import json
import math
import os
import pathlib
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import unittest

TANDEM = sys.argv[1] if len(sys.argv) > 1 else "build/tandem"
ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = str(ROOT / "models" / "tiny-r1")


def read_all(terminal):
    text = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            part = b""
        if not part:
            return text.decode()
        text += part


def tandem(*arguments, text=None, env=None):
    return subprocess.run([TANDEM, *arguments], input=text, capture_output=True, text=True, check=False, timeout=120,
                          env={**os.environ, **(env or {})})


def rewrite_tensors(path, change):
    """Rewrites a safetensors file. change({name: bytes}, header) may replace bytes and types; offsets are recomputed."""
    raw = path.read_bytes()
    begin = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:begin])
    header.pop("__metadata__", None)
    data = {name: raw[begin + entry["data_offsets"][0]:begin + entry["data_offsets"][1]] for name, entry in header.items()}
    change(data, header)
    at = 0
    for name, entry in header.items():
        entry["data_offsets"] = [at, at + len(data[name])]
        at += len(data[name])
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data[name] for name in header))


class Works(unittest.TestCase):
    def ok(self, *arguments, **more):
        result = tandem(*arguments, **more)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def test_run_thinks_and_answers(self):
        out = self.ok("run", "--temp", "0", "-p", "What is 478 + 356?")
        thinking, answer = out.split("</think>")
        self.assertIn("ones 8+6+0=14 got 4", thinking)
        self.assertIn("The answer is 834.", answer)
        self.assertNotIn("\033", out, "no colours in a pipe")

    def test_a_terminal_sees_the_prompt_computed(self):
        shown = []
        for prompt in ("a b c d " * 300, "Hi"):
            terminal, end = pty.openpty()
            subprocess.run([TANDEM, "run", "--temp", "0", "-n", "1", "-p", prompt], stdout=subprocess.DEVNULL, stderr=end, check=True, timeout=120)
            os.close(end)
            shown.append(re.findall(r"prompt (\d+) of (\d+) tokens", read_all(terminal)))
            os.close(terminal)
        long, short = shown
        self.assertEqual(short, [])
        total = int(long[0][1])
        self.assertGreater(total, 1024)
        self.assertEqual([int(done) for done, _ in long], list(range(512, total, 512)))

    def test_selftest(self):
        out = self.ok("selftest", "--arch", TINY)
        lines = out.splitlines()
        self.assertRegex(lines[1], r"fp8 +cpu +reference +\[2, 512\] +0\.00000 .* passed$")
        self.assertRegex(lines[-1], r"^\d+ passed, 0 failed$")
        rows = [json.loads(line) for line in self.ok("selftest", "--arch", TINY + "," + TINY, "--json").splitlines()]
        self.assertEqual(len(rows) % 6, 0, "two models, three formats")
        self.assertEqual({row["experts"] for row in rows}, {"fp8", "int8", "int4"})
        self.assertTrue(all(row["passed"] and row["finite"] and row["error"] <= row["bound"] for row in rows), rows)

    def test_run_json(self):
        report = json.loads(self.ok("run", "--temp", "0", "-p", "What is 12 + 7?", "--json"))
        self.assertIn("The answer is 19.", report["text"])
        self.assertEqual(report["finish_reason"], "stop")
        self.assertEqual(len(report["token_ids"]), report["generated_tokens"])
        for key in ("prompt_tokens", "prefill_tokens_per_second", "decode_tokens_per_second", "load_seconds",
                    "load_bytes_per_second", "peak_rss_bytes", "model_bytes"):
            self.assertGreater(report[key], 0, key)

    def test_run_says_how_fast_it_was(self):
        result = tandem("run", "--temp", "0", "-p", "What is 12 + 7?", "--threads", "1", "--isa", "reference")
        n_prompt = len(json.loads(self.ok("tokenize", "--chat", "-p", '[{"role": "user", "content": "What is 12 + 7?"}]')))
        report = json.loads(self.ok("run", "--temp", "0", "-p", "What is 12 + 7?", "--isa", "reference", "--json"))
        self.assertEqual(report["prompt_tokens"], n_prompt)
        rate = r"\d+\.\d/s"
        self.assertRegex(result.stderr, rf"^\nloaded {report['model_bytes'] * 1e-6:.1f} MB in \d+\.\d\d s; prompt {n_prompt} tokens at {rate} \(0 from the cache\), "
                         rf"answer {report['generated_tokens']} tokens at {rate}, 1 threads, reference(; \d\.\d\d tokens a step, \d+ % of \d+ drafts accepted)?\n$")
        self.assertEqual(tandem("run", "-q", "-p", "Hi", "-n", "1").stderr, "")

    def test_run_reads_standard_input_and_files(self):
        self.assertIn("19", self.ok("run", "--temp", "0", "-f", "-", text="What is 12 + 7?"))
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("What is 12 + 7?")
            file.flush()
            self.assertIn("19", self.ok("run", "--temp", "0", "-f", file.name))

    def test_seed_and_limits(self):
        same = [self.ok("run", "--raw", "-p", "Let me", "--temp", "2", "--top-p", "1", "--seed", "5", "-n", "30", "-q")
                for _ in range(2)]
        self.assertEqual(same[0], same[1])
        other = self.ok("run", "--raw", "-p", "Let me", "--temp", "2", "--top-p", "1", "--seed", "6", "-n", "30", "-q")
        self.assertNotEqual(same[0], other)
        report = json.loads(self.ok("run", "-p", "What is 12 + 7?", "-n", "4", "--json"))
        self.assertEqual((report["generated_tokens"], report["finish_reason"]), (4, "length"))

    def test_stop_text_and_ignore_eos(self):
        report = json.loads(self.ok("run", "--temp", "0", "-p", "What is 478 + 356?", "--stop", "tens", "--json"))
        self.assertTrue(report["text"].endswith("got 4\n"), report["text"])
        self.assertEqual(report["finish_reason"], "stop")
        report = json.loads(self.ok("run", "--temp", "0", "-p", "What is 1 + 2?", "--ignore-eos", "-n", "120", "--json"))
        self.assertEqual(report["generated_tokens"], 120)

    def test_logit_bias_and_logprobs(self):
        report = json.loads(self.ok("run", "--temp", "0", "-p", "What is 1 + 2?", "--logit-bias", "1=100", "--json"))
        self.assertEqual(report["generated_tokens"], 0, "the end of sentence was forced")
        report = json.loads(self.ok("run", "--temp", "0", "-p", "What is 1 + 2?", "--logprobs", "2", "--json"))
        first = report["logprobs"][0]
        self.assertEqual(first["id"], first["top"][0]["id"])
        self.assertLess(first["top"][1]["logprob"], first["logprob"])
        self.assertLessEqual(first["logprob"], 0)

    def test_forced_instruction_sets_agree(self):
        texts = {isa: json.loads(self.ok("run", "--temp", "0", "-p", "What is 95 - 38?", "--isa", isa, "--json"))
                 for isa in ("reference", "auto")}
        self.assertEqual(texts["reference"]["isa"], "reference")
        self.assertEqual(texts["reference"]["text"], texts["auto"]["text"])
        forced = json.loads(self.ok("run", "--temp", "0", "-p", "What is 95 - 38?", "--json", env={"TANDEM_ISA": "reference"}))
        self.assertEqual(forced["isa"], "reference")

    def test_nothing_is_said_where_sys_is_missing(self):
        with tempfile.TemporaryDirectory() as empty:
            result = tandem("run", "-q", "--temp", "0", "-p", "What is 1 + 2?", env={"HWLOC_FSROOT": empty})
        self.assertEqual((result.returncode, result.stderr), (0, ""))

    def test_attention_forms_agree(self):
        texts = {self.ok("run", "--temp", "0", "-p", "What is 95 - 38?", "--attention", form, "-q") for form in ("naive", "absorb", "auto")}
        self.assertEqual(len(texts), 1)

    def test_chat_keeps_history(self):
        out = self.ok("chat", "--temp", "0", text="What is 12 + 7?\nWhat is 30 - 4?\n")
        self.assertIn("The answer is 19.", out)
        self.assertIn("The answer is 26.", out)

    def test_chat_reuses_the_cache(self):
        result = tandem("chat", "--temp", "0", text="What is 12 + 7?\nWhat is 30 - 4?\n")
        self.assertRegex(result.stderr, r"\(([1-9][0-9]*) from the cache\)")

    def test_tokenize_round_trip(self):
        ids = json.loads(self.ok("tokenize", "-p", "Hello world, 123!"))
        self.assertEqual(self.ok("tokenize", "--decode", "-p", json.dumps(ids)), "Hello world, 123!\n")
        chat = json.loads(self.ok("tokenize", "--chat", "-p", '[{"role": "user", "content": "Hello"}]'))
        self.assertEqual(chat[0], 0)
        self.assertEqual(self.ok("tokenize", "--decode", "-p", json.dumps(chat[-3:])), "<｜Assistant｜><think>\n\n")

    def test_inspect(self):
        report = json.loads(self.ok("inspect", "--json"))
        self.assertEqual(report["architecture"], "DeepseekV3ForCausalLM")
        self.assertEqual(report["layers"], 3)
        for key in ("total", "activated", "routed_experts", "attention", "shared_experts", "dense_mlp", "embedding", "head",
                    "router", "mtp"):
            self.assertGreater(report["parameters"][key], 0, key)
        self.assertIn("F8_E4M3", report["bytes"])
        self.assertEqual(report["kv_bytes_per_token"], 3 * 160 * 2)
        self.assertIn("routed experts", self.ok("inspect").lower())

    def test_warnings_of_a_checkpoint(self):
        def round_biases(data, header):
            for name, entry in header.items():
                if name.endswith("e_score_correction_bias"):
                    begin, end = entry["data_offsets"]
                    data[name] = b"".join(data[name][i + 2:i + 4] for i in range(0, end - begin, 4))
                    entry["dtype"] = "BF16"
        with tempfile.TemporaryDirectory() as folder:
            model = os.path.join(folder, "model")
            shutil.copytree(TINY, model)
            rewrite_tensors(pathlib.Path(model) / "model.safetensors", round_biases)
            result = tandem("run", model, "--temp", "0", "-n", "2", "-p", "What is 1 + 2?", "-q")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertRegex(result.stderr, r"^warning: the router biases .* of 2 layers .*\n$")
            self.assertIn("warning: the router biases", self.ok("inspect", model))
            self.assertEqual(len(json.loads(self.ok("inspect", model, "--json"))["warnings"]), 1)

    def test_logits(self):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "logits.npy")
            one_form = ("--attention", "absorb")  # the form that auto chooses depends on the number of tokens of a step
            self.ok("logits", "--tokens", "0,500,10,501", "--out", out, "--all", *one_form)
            with open(out, "rb") as file:
                data = file.read()
            self.assertTrue(data.startswith(b"\x93NUMPY\x01\x00"))
            header = data[10:10 + struct.unpack("<H", data[8:10])[0]]
            self.assertIn(b"'shape': (4, 512,)", header)
            self.assertEqual(len(data), 10 + len(header) + 4 * 512 * 4)
            self.assertEqual(os.listdir(folder), ["logits.npy"])
            ids = os.path.join(folder, "ids.json")
            pathlib.Path(ids).write_text("[0, 500, 10, 501]")
            last = os.path.join(folder, "last.npy")
            self.ok("logits", "--tokens", "@" + ids, "--out", last, *one_form)
            with open(last, "rb") as file:
                self.assertEqual(file.read()[-2048:], data[-2048:])
            report = json.loads(self.ok("logits", "--tokens", "1,2,3", "--out", last, "--json", "--isa", "reference", "--ctx", "3"))
            self.assertEqual(report, {"out": last, "tokens": 3, "vocab": 512, "isa": "reference"})

    def test_eval(self):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("Let me add 478+356.\nones 8+6+0=14 got 4\n" * 20)
            file.flush()
            report = json.loads(self.ok("eval", "-f", file.name, "--json"))
            self.assertGreater(report["perplexity"], 1)
            same = json.loads(self.ok("eval", TINY, "-f", file.name, "--against", TINY, "--json"))
            self.assertAlmostEqual(same["perplexity"], report["perplexity"])
            self.assertEqual((same["mean_kl_divergence"], same["top1_agreement"]), (0, 1))
            narrow = json.loads(self.ok("eval", "-f", file.name, "--experts", "int4", "--against-experts", "auto", "--json"))
            self.assertGreater(narrow["mean_kl_divergence"], 0)

    def logits_of(self, folder, tokens, *more):
        """The logits after each token, as lists."""
        out = os.path.join(folder, "logits.npy")
        self.ok("logits", TINY, "--tokens", ",".join(map(str, tokens)), "--out", out, "--all", "--attention", "absorb", *more)
        data = pathlib.Path(out).read_bytes()
        numbers = struct.unpack(f"<{len(tokens) * 512}f", data[-len(tokens) * 512 * 4:])
        return [numbers[i * 512:(i + 1) * 512] for i in range(len(tokens))]

    def test_eval_computes_from_logits(self):
        """Perplexity, divergence and agreement of three windows, the last of which is shorter."""
        text = "Let me add 478+356.\nones 8+6+0=14 got 4\n"
        ids = json.loads(self.ok("tokenize", TINY, "-p", text))
        bos = json.loads(self.ok("tokenize", TINY, "--chat", "-p", '[{"role": "user", "content": ""}]'))[0]
        self.assertEqual(bos, 0)
        self.assertEqual(len(ids), 26)  # without the beginning of a sentence

        def log_softmax(row):
            largest = max(row)
            total = largest + math.log(sum(math.exp(v - largest) for v in row))
            return [v - total for v in row]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "text.txt")
            pathlib.Path(path).write_text(text)
            n = loss = divergence = agreed = 0
            for at in range(0, len(ids), 11):
                window = [bos, *ids[at:at + 11]]
                for i, (p, q) in enumerate(zip(self.logits_of(folder, window), self.logits_of(folder, window, "--experts", "int4"))):
                    if i + 1 == len(window):
                        continue
                    p, q = log_softmax(p), log_softmax(q)
                    n += 1
                    loss -= p[window[i + 1]]
                    divergence += sum(math.exp(a) * (a - b) for a, b in zip(p, q))
                    agreed += p.index(max(p)) == q.index(max(q))
            asked = ("eval", TINY, "-f", path, "--ctx", "12", "--attention", "absorb", "--against-experts", "int4")
            report = json.loads(self.ok(*asked, "--json"))
            self.assertEqual((report["tokens"], report["window"], n), (26, 12, 26))
            self.assertAlmostEqual(report["perplexity"], math.exp(loss / n), delta=1e-4 * report["perplexity"])
            self.assertAlmostEqual(report["mean_kl_divergence"], divergence / n, delta=1e-4)
            self.assertEqual(report["top1_agreement"], agreed / n)
            self.assertEqual(self.ok(*asked), f"perplexity {report['perplexity']:.4f} over 26 tokens in windows of 12\n"
                             f"against experts as int4: mean KL divergence {report['mean_kl_divergence']:.3g} nats, "
                             f"top-1 agreement {100 * report['top1_agreement']:.2f} %\n")

    def test_eval_on_a_terminal_shows_where_it_is(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "text.txt"
            path.write_text("Let me add 478+356.\n" * 4)
            terminal, end = pty.openpty()
            subprocess.run([TANDEM, "eval", TINY, "-f", str(path), "--ctx", "30"], stdout=subprocess.DEVNULL, stderr=end, check=True, timeout=120)
            os.close(end)
            shown = read_all(terminal)
            os.close(terminal)
        total = len(json.loads(self.ok("tokenize", TINY, "-p", "Let me add 478+356.\n" * 4)))
        done = [tuple(map(int, found)) for found in re.findall(r"\r\x1b\[K(\d+) of (\d+) tokens, perplexity \d", shown)]
        self.assertEqual(done, [(min(at + 29, total), total) for at in range(0, total, 29)])
        self.assertTrue(shown.endswith("\r\x1b[K"))

    def on_terminal(self, steps, *arguments):
        """What a program with a terminal shows while it is told these: text to wait for, and then bytes to send."""
        terminal, end = pty.openpty()
        process = subprocess.Popen([TANDEM, *arguments], stdin=end, stdout=end, stderr=subprocess.DEVNULL, start_new_session=True,
                                   preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(end)
        shown = ""
        for wanted, keys in steps:
            at = len(shown)
            while wanted not in shown[at:]:
                shown += os.read(terminal, 65536).decode()
            os.write(terminal, keys)
        shown += read_all(terminal)
        os.close(terminal)
        self.assertEqual(process.wait(timeout=60), 0)
        return shown.replace("\r\n", "\n")

    def test_chat_on_a_terminal(self):
        """Thinking is dimmed, an empty line and Ctrl-C ask again, a turn that is too long does not count, Ctrl-D leaves."""
        shown = self.on_terminal([("> ", b"\n"), ("> ", b"\x03"), ("> ", b"What is 12 + 7?\n"), ("> ", b"a b c d " * 100 + b"\n"),
                                  ("> ", b"What is 30 - 4?\n"), ("> ", b"\x04")], "chat", TINY, "--temp", "0", "-q", "--ctx", "256")
        self.assertEqual(shown.count("\n(Ctrl-D leaves)"), 1)
        self.assertRegex(shown, r"\x1b\[2m[^\x1b]*</think>\x1b\[0m\s*The answer is 19\.\n")
        self.assertRegex(shown, r"\x1b\[2m[^\x1b]*</think>\x1b\[0m\s*The answer is 26\.\n")
        self.assertEqual(shown.count("\x1b[2m"), 3, "one of which is of the turn that is too long")
        self.assertEqual(shown.count("\n> "), 6)
        self.assertTrue(shown.endswith("\n"))

    def test_chat_draws_other_numbers_in_each_turn(self):
        ask = ("chat", TINY, "-q", "--temp", "5", "-n", "12", "--ignore-eos", "--seed")
        twice = [self.ok(*ask, str(seed), text="Hi\n") for seed in (3, 4)]
        self.assertNotEqual(*twice)
        both = self.ok(*ask, "3", text="Hi\nHi\n")
        self.assertTrue(both.startswith(twice[0]))
        self.assertNotEqual(both[len(twice[0]):], twice[0])

    def rows(self, what, *arguments):
        text = self.ok("bench", what, *arguments, "--config", TINY, "--memory", "0.02", "--seconds", "0.0005", "--json")
        return [json.loads(line) for line in text.splitlines()]

    def test_benchmarks(self):
        """Each measures what its lists ask for, or its own lists."""
        steps = [2 ** i for i in range(12)]
        self.assertEqual([r["tokens"] for r in self.rows("embed")], steps)
        few = ("--tokens", "3,5")
        self.assertEqual([r["tokens"] for r in self.rows("embed", *few)], [3, 5])
        self.assertEqual([(r["tokens"], r["format"]) for r in self.rows("experts", *few, "--experts", "int8")], [(3, "int8"), (5, "int8")])
        self.assertEqual({(r["tokens"], r["format"]) for r in self.rows("mlp", *few, "--format", "bf16")}, {(3, "bf16"), (5, "bf16")})
        self.assertEqual({r["tokens"] for r in self.rows("moe", *few, "--layers", "2")}, {3, 5})
        self.assertEqual({(r["context"], r["tokens"]) for r in self.rows("layer", *few, "--layers", "2")}, {(4096, 3), (4096, 5)})
        self.assertEqual({r["context"] for r in self.rows("layer", *few, "--layers", "2", "--ctx", "64,128")}, {64, 128})
        self.assertEqual(self.rows("embed", "--tokens", "1", "--isa", "reference")[0]["isa"], "reference")
        decoded = self.rows("generate", "--layers", "2", "--ctx", "64,96", "--batch", "1,2", "--tokens", "8", "-n", "2")[0]["decode"]
        self.assertEqual([(r["context"], r["batch"]) for r in decoded], [(64, 1), (64, 2), (96, 1), (96, 2)])
        text = self.ok("bench", "embed", "--config", TINY, "--memory", "0.02", "--seconds", "0.0005", "--tokens", "1,2", "--csv")
        self.assertEqual(len(text.splitlines()), 3)
        self.assertEqual({line.count(",") for line in text.splitlines()}, {text.splitlines()[0].count(",")})
        with tempfile.TemporaryDirectory() as folder:
            plot = pathlib.Path(folder) / "rows.svg"
            self.rows("embed", "--tokens", "1,2", "--plot", str(plot))
            self.assertIn("</svg>", plot.read_text())

    def test_pack(self):
        with tempfile.TemporaryDirectory() as folder:
            env = {"XDG_CACHE_HOME": folder}
            self.ok("run", "--temp", "0", "-p", "What is 1 + 2?", "-n", "1", env=env)
            self.assertEqual(os.listdir(folder), [], "a run writes no cache unless it is asked to")
            report = json.loads(self.ok("pack", "--json", env=env))
            self.assertTrue(report["written"])
            self.assertTrue(report["cache"].startswith(os.path.join(folder, "tandem", "tiny-r1-")))
            self.assertGreaterEqual(os.path.getsize(report["cache"]), report["packed_bytes"])
            again = json.loads(self.ok("pack", "--json", env=env))
            self.assertEqual((again["cache"], again["written"]), (report["cache"], False))
            size = f"({report['packed_bytes'] * 1e-6:.1f} MB)"
            self.assertEqual(self.ok("pack", env=env), f"{report['cache']} {size} was there already and is sound\n")
            self.assertEqual(self.ok("pack", "-q", env=env), "")
            os.remove(report["cache"])
            self.assertRegex(self.ok("pack", env=env), rf"^{re.escape(report['cache'] + ' ' + size)} written in \d+\.\d\d s\n$")
            plain = json.loads(self.ok("run", "--temp", "0", "-p", "What is 12 + 7?", "--json", env={"XDG_CACHE_HOME": "/no/such"}))
            packed = json.loads(self.ok("run", "--temp", "0", "-p", "What is 12 + 7?", "--json", env=env))
            self.assertEqual(plain["token_ids"], packed["token_ids"])

    def test_a_damaged_cache_is_one_warning(self):
        with tempfile.TemporaryDirectory() as folder:
            run = ("run", "--temp", "0", "-p", "What is 12 + 7?", "-q", "--cache", folder)
            answer = self.ok(*run)
            (name,) = os.listdir(folder)
            path = os.path.join(folder, name)
            with open(path, "r+b") as file:
                file.seek(-1000, os.SEEK_END)
                byte = file.read(1)
                file.seek(-1000, os.SEEK_END)
                file.write(bytes([byte[0] ^ 1]))
            result = tandem(*run)
            self.assertEqual((result.returncode, result.stdout), (0, answer))
            self.assertRegex(result.stderr, r"^warning: the packed cache .* checksum.*\n$")
            self.assertEqual(tandem(*run).stderr, "", "it was packed again")
            self.assertEqual(os.listdir(folder), [name])

    def test_a_cache_that_cannot_be_written_is_one_warning(self):
        result = tandem("run", "--temp", "0", "-p", "What is 12 + 7?", "-q", "--cache", "/proc/no-such")
        self.assertIn("19", result.stdout)
        self.assertRegex(result.stderr, r"^warning: no packed cache is written: .*/proc/no-such.*\n$")

    def test_help_teaches_by_example(self):
        for command in ((), ("run",), ("chat",), ("inspect",), ("tokenize",), ("logits",), ("eval",), ("pack",)):
            self.assertIn("Examples:", self.ok(*command, "--help"))

    def test_plan(self):
        folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        arguments = ("plan", "r1", "--machine", "2x6454s-4090", "--ctx", "32768")
        text = self.ok(*arguments, "--out", str(folder / "p.json"), "--plot", str(folder / "p.svg"))
        for words in ("decode", "why", "embedding on", "effect of single changes", "host0.gpu0"):
            self.assertIn(words, text)
        svg = (folder / "p.svg").read_text()
        self.assertTrue(svg.endswith("</svg>\n"))
        self.assert_labels_of_a_bar_in_a_line(svg)
        report = json.loads(self.ok(*arguments, "--json"))
        self.assertEqual(report["placement"], json.loads((folder / "p.json").read_text()))
        self.assertEqual(report["placement"]["predicted"], report["predicted"])
        self.assertGreater(report["predicted"]["decode_tokens_per_second"], 5)
        self.assertIn("cpu_experts", report["predicted"]["time_per_layer_seconds"])
        self.assertEqual(set(report["memory"]), {"host0.cpu", "host0.gpu0"})
        for key in ("weights_bytes", "kv_bytes", "activation_bytes", "free_bytes"):
            self.assertGreaterEqual(report["memory"]["host0.gpu0"][key], 0)
        again = json.loads(self.ok(*arguments, "--placement", str(folder / "p.json"), "--json"))
        self.assertEqual(again["predicted"], report["predicted"])
        cluster = ("plan", "kimi-k2", "--machine", "16xh800", "--objective", "throughput", "--concurrency", "256", "--ctx", "4096")
        self.assertIn("expert parallel", self.ok(*cluster))
        # With more sequences the experts' rows, and not reading them, take the time.
        many = [*cluster[:-3], "1024", *cluster[-2:]]
        simulation = json.loads(self.ok(*many, "--simulate", "--skew", "1", "--json"))["simulation"]
        self.assertEqual(len(simulation), 4)
        self.assertLess(simulation[2]["seconds"], simulation[0]["seconds"], "balancing helps skewed routing")

    def test_record_routing(self):
        folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        path = folder / "routing.json"
        question = ("run", "--temp", "0", "-p", "What is 12 + 7?", "--json")
        report = json.loads(self.ok(*question, "--record-routing", str(path)))
        self.assertEqual(report["token_ids"], json.loads(self.ok(*question))["token_ids"])
        statistics = json.loads(path.read_text())
        self.assertEqual(report["finish_reason"], "stop")  # the end token itself is not computed
        self.assertEqual(statistics["tokens"], report["prompt_tokens"] + report["generated_tokens"])
        self.assertEqual([len(row) for row in statistics["counts"]], [16, 16])
        for row in statistics["counts"]:
            self.assertEqual(sum(row), 4 * statistics["tokens"])
        self.assertEqual(os.listdir(folder), ["routing.json"], "nothing else is left")
        plan = ("--machine", "2x6454s-4090", "--prompt", "64", "--output", "64", "--ctx", "128")
        self.ok("plan", *plan, "--statistics", str(path))
        refused = tandem("plan", "v2-lite", *plan, "--statistics", str(path))
        self.assertEqual(refused.returncode, 2)
        self.assertIn("of another model", refused.stderr)

    def test_placement_is_obeyed(self):
        folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        env = {"XDG_CACHE_HOME": str(folder)}
        path = folder / "p.json"
        self.ok("bench", "machine", "--json", "--seconds", "0.01", "--memory", "0.05", env=env)
        workload = ("--ctx", "1024", "--prompt", "100", "--output", "100")
        self.ok("plan", *workload, "--out", str(path), env=env)
        ask = ("run", "--temp", "0", "-p", "What is 478 + 356?", "--json")
        plain = json.loads(self.ok(*ask))
        planned = json.loads(self.ok(*ask, "--placement", str(path)))
        self.assertEqual(planned["token_ids"], plain["token_ids"])
        text = ("-f", str(ROOT / "README.md"), "--json", "--ctx", "512")
        perplexity = json.loads(self.ok("eval", *text))["perplexity"]
        self.assertEqual(json.loads(self.ok("eval", *text, "--placement", str(path)))["perplexity"], perplexity)

        placement = json.loads(path.read_text())
        placement["prefill"]["chunk_tokens"] = 700  # longer steps that give the same numbers
        placement["kv"]["tokens"] = 4096
        path.write_text(json.dumps(placement))
        longer = ("-f", str(ROOT / "README.md"), "--json", "--ctx", "2048")
        self.assertAlmostEqual(json.loads(self.ok("eval", *longer, "--placement", str(path)))["perplexity"],
                               json.loads(self.ok("eval", *longer))["perplexity"], places=3)
        groups = placement["experts"]["layers"][0]["groups"]
        groups[0]["format"] = "int4"
        path.write_text(json.dumps(placement))
        as_int4 = json.loads(self.ok("eval", *text, "--placement", str(path)))["perplexity"]
        self.assertEqual(as_int4, json.loads(self.ok("eval", *text, "--experts", "int4"))["perplexity"])
        placement["experts"]["layers"] = [{"layers": "1-1", "groups": groups},
                                          {"layers": "2-2", "groups": [{**groups[0], "format": "int8"}]}]
        path.write_text(json.dumps(placement))
        mixed = json.loads(self.ok("eval", *text, "--placement", str(path)))["perplexity"]
        self.assertNotIn(mixed, (perplexity, as_int4))

    def test_plan_on_this_machine(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        env = {"XDG_CACHE_HOME": folder}
        measured = json.loads(self.ok("bench", "machine", "--json", "--seconds", "0.01", "--memory", "0.05", env=env))
        kept = list(pathlib.Path(folder).rglob("machine-*.json"))
        self.assertEqual(json.loads(kept[0].read_text()), measured)
        result = tandem("plan", env=env)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("this machine as measured just now", result.stderr)
        self.assertIn("defaults of " + measured["isa"], result.stdout)
        quick = ("--seconds", "0.01", "--memory", "0.05")
        rows = pathlib.Path(folder) / "rows.json"
        rows.write_text(self.ok("bench", "experts", "--config", "v2-lite", "--tokens", "1,8", "--json", *quick[:2], "--memory", "0.3"))
        curves = json.loads(self.ok("bench", "machine", "--curves", str(rows), "--json", *quick, env=env))["efficiency"]
        self.assertEqual(len(curves["experts"]["bf16"]), 2)
        again = json.loads(self.ok("bench", "machine", "--json", *quick, env=env))
        self.assertEqual(again["efficiency"], curves, "kept until they are measured again")
        self.assertIn("as measured on this machine for bf16 experts", self.ok("plan", env=env))
        report = json.loads(self.ok("plan", "--json", env=env))
        self.assertEqual(report["machine"]["cores"], measured["cores"])
        for quiet in ("--json", "-q"):
            self.assertEqual(tandem("plan", quiet, env=env).stderr, "")

    def assert_labels_of_a_bar_in_a_line(self, svg):
        """Name and size of a device are on one line, and different devices are on different lines."""
        lines = {}
        for y, label in re.findall(r'<text x="[^"]*" y="([^"]*)"[^>]*>([^<]*)</text>', svg):
            lines.setdefault(float(y), []).append(label)
        devices = [labels for labels in lines.values() if any(l.startswith("host0.") for l in labels)]
        self.assertEqual(len(devices), 2)
        for labels in devices:
            self.assertTrue(any(re.fullmatch(r"\d+ GB", l) for l in labels), labels)

    def test_ctrl_c_ends_cleanly(self):
        process = subprocess.Popen([TANDEM, "run", "-p", "What is 1 + 1?", "--ignore-eos", "-n", "100000", "--ctx", "200000", "-q"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual((process.returncode, err), (0, ""))
        self.assertTrue(out.endswith("\n"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=1)
