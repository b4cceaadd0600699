"""The Python package on the shared library of a build, without an installation.

    python_test.py BUILD_FOLDER
"""
import contextlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import unittest
from ctypes import sizeof

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
os.environ["TANDEM_LIBRARY"] = str(BUILD / "libtandem.so")
sys.path.insert(0, str(ROOT / "python"))
sys.dont_write_bytecode = True
from tandem import LLM, SamplingParams, _library  # noqa: E402
import tandem  # noqa: E402

TINY = str(ROOT / "models/tiny-r1")
GREEDY = SamplingParams(temperature=0, max_tokens=None)


def question(text):
    return [{"role": "user", "content": text}]


class Structures(unittest.TestCase):
    def test_they_are_those_of_the_header(self):
        """Sizes and names, in their order, as a C compiler sees them."""
        header = (ROOT / "include/tandem.h").read_text(encoding="utf-8")
        header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
        names = {"tandem_options": _library.Options, "tandem_request": _library.Request, "tandem_token": _library.Token,
                 "tandem_hooks": _library.Hooks, "tandem_bias": _library.Bias, "tandem_logprob": _library.TokenLogprob}
        program = '#include <stdio.h>\n#include <stddef.h>\n#include "tandem.h"\nint main(void) {\n'
        for name, kind in names.items():
            body = re.search(r"typedef struct %s \{(.*?)\} %s;" % (name, name), header, re.S).group(1)
            members = []
            for line in body.split(";"):
                function = re.search(r"\(\*(\w+)\)", line)
                members += [function.group(1)] if function else re.findall(r"(\w+)\s*(?=,|$)", line.strip())
            self.assertEqual(members, [field[0] for field in kind._fields_], name)
            program += f'  printf("%zu", sizeof({name}));\n'
            for member in members:
                program += f'  printf(" %zu", offsetof({name}, {member}));\n'
            program += '  printf("\\n");\n'
        self.assertEqual(len(names), 6)
        exe = BUILD / "tests/header_layout"
        subprocess.run(["cc", "-x", "c", "-", "-I", ROOT / "include", "-o", exe], input=program + "}\n", text=True,
                       check=True)
        lines = subprocess.run([exe], capture_output=True, text=True, check=True).stdout.splitlines()
        for line, kind in zip(lines, names.values()):
            offsets = [sizeof(kind)] + [getattr(kind, field[0]).offset for field in kind._fields_]
            self.assertEqual(line, " ".join(map(str, offsets)), kind)


class Python(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.llm = LLM(model=TINY, allow_async_output_proc=True)

    @classmethod
    def tearDownClass(cls):
        cls.llm.close()

    def test_chats(self):
        outputs = self.llm.chat([question("What is 478 + 356?"), question("What is 12 * 7?")], GREEDY)
        self.assertEqual([o.outputs[0].text.splitlines()[-1] for o in outputs],
                         ["The answer is 834.", "The answer is 84."])
        first = outputs[0]
        self.assertEqual((first.request_id, first.finished, first.outputs[0].finish_reason), ("0", True, "stop"))
        self.assertEqual(first.prompt, question("What is 478 + 356?"))
        self.assertEqual(first.prompt_token_ids, self.llm.tokenize(question("What is 478 + 356?")))
        self.assertEqual(len(first.prompt_token_ids), 17)
        self.assertIsNone(first.outputs[0].logprobs)
        self.assertEqual(self.llm.chat(question("What is 4 + 3?"), GREEDY)[0].outputs[0].text.splitlines()[-1],
                         "The answer is 7.")

    def test_prompts_have_several_forms(self):
        short = SamplingParams(temperature=0, max_tokens=3)
        ids = self.llm.tokenize("What is")
        texts = [o.outputs[0].text for o in self.llm.generate(
            ["What is", {"prompt": "What is"}, {"prompt_token_ids": ids}], short)]
        self.assertEqual(len(set(texts)), 1)
        one = self.llm.generate("What is", short)
        self.assertEqual((one[0].outputs[0].text, one[0].prompt), (texts[0], "What is"))
        self.assertIsNone(self.llm.generate({"prompt_token_ids": ids}, short)[0].prompt)
        for wrong in (7, ["a"]):
            with self.assertRaisesRegex(ValueError, "a prompt is a text or a dictionary, not"):
                self.llm.generate([wrong])
        with self.assertRaisesRegex(ValueError, "one of prompt, prompt_token_ids and messages"):
            self.llm.generate({"text": "x"})
        with self.assertRaisesRegex(ValueError, r"U\+0000"):
            self.llm.generate("a\0b")

    def test_each_prompt_can_have_its_parameters(self):
        params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 5)]
        outputs = self.llm.generate(["What", "What"], params)
        self.assertEqual([len(o.outputs[0].token_ids) for o in outputs], [2, 5])
        self.assertEqual(outputs[0].outputs[0].finish_reason, "length")
        with self.assertRaisesRegex(ValueError, "2 prompts and 1 sampling_params"):
            self.llm.generate(["a", "b"], params[:1])
        endless = self.llm.generate("What", SamplingParams(ignore_eos=True))[0].outputs[0]
        self.assertEqual(len(endless.token_ids), 16, "vLLM's default")

    def test_seeds(self):
        def texts(seed, n=1, llm=None):
            params = SamplingParams(n=n, temperature=5.0, seed=seed, max_tokens=12)
            return [c.text for c in (llm or self.llm).generate("What", params)[0].outputs]
        three = texts(5, 3)
        self.assertEqual(len(set(three)), 3)
        self.assertEqual([texts(5)[0], texts(6)[0], texts(7)[0]], three)
        self.assertNotEqual(texts(None), texts(None))
        with LLM(model=TINY, seed=5) as seeded:
            self.assertEqual(texts(None, llm=seeded), three[:1])

    def test_stops(self):
        def text(**params):
            return self.llm.chat(question("What is 478 + 356?"), SamplingParams(
                temperature=0, max_tokens=200, **params))[0].outputs[0].text
        self.assertTrue(text(stop="tens").endswith("got 4\n"))
        self.assertTrue(text(stop=["x?", "tens"], include_stop_str_in_output=True).endswith("got 4\ntens"))
        self.assertTrue(text(ignore_eos=True, skip_special_tokens=False).count("<｜end▁of▁sentence｜>"))
        tens = self.llm.tokenize("tens")[-1]
        self.assertLess(len(text(stop_token_ids=[tens])), len(text()))
        whole = self.llm.chat(question("What is 478 + 356?"), GREEDY)[0].outputs[0].token_ids
        self.assertNotEqual(text(logit_bias={whole[0]: -100}), text())
        self.assertGreater(len(self.llm.chat(question("What is 478 + 356?"), SamplingParams(
            temperature=0, max_tokens=200, min_tokens=len(whole) + 4))[0].outputs[0].token_ids), len(whole) + 3)

    def test_logprobs(self):
        answer = self.llm.generate("What is", SamplingParams(temperature=0, max_tokens=3, logprobs=2))[0].outputs[0]
        self.assertEqual(len(answer.logprobs), 3)
        for token, reported in zip(answer.token_ids, answer.logprobs):
            self.assertEqual(len(reported), 2)
            self.assertEqual(reported[token].rank, 1)
        self.assertAlmostEqual(answer.cumulative_logprob,
                               sum(r[t].logprob for t, r in zip(answer.token_ids, answer.logprobs)))
        plain = self.llm.generate("What is", SamplingParams(temperature=0, max_tokens=3, logprobs=0))[0].outputs[0]
        self.assertEqual([list(r) for r in plain.logprobs], [[t] for t in answer.token_ids])

    def test_streams(self):
        pieces = list(self.llm.stream(question("What is 478 + 356?"), GREEDY))
        self.assertGreater(len(pieces), 20)
        self.assertEqual("".join(pieces),
                         self.llm.chat(question("What is 478 + 356?"), GREEDY)[0].outputs[0].text)
        endless = self.llm.stream("What", SamplingParams(temperature=1, ignore_eos=True, max_tokens=None))
        next(endless)
        endless.close()
        self.assertEqual(sum(t.name.startswith("Thread-") for t in threading.enumerate()), 0)
        with self.assertRaisesRegex(ValueError, "temperature -1"):
            list(self.llm.stream("What", SamplingParams(temperature=-1)))
        with self.assertRaisesRegex(ValueError, "n 2: a stream has one answer"):
            next(self.llm.stream("What", SamplingParams(n=2)))

    def test_threads(self):
        texts = [None] * 4

        def ask(i):
            texts[i] = self.llm.chat(question(f"What is {i} + 1?"), GREEDY)[0].outputs[0].text
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([text.splitlines()[-1] for text in texts], [f"The answer is {i + 1}." for i in range(4)])

    def test_prefix_cache(self):
        for caches in (True, False):
            with LLM(model=TINY, enable_prefix_caching=caches, max_num_seqs=2) as llm:
                cached = [llm.generate("7" * 300, SamplingParams(max_tokens=1))[0].num_cached_tokens for _ in "12"]
                self.assertEqual([cached[0], cached[1] > 200], [0, caches])

    def test_drafts_change_no_answer(self):
        with LLM(model=TINY, num_speculative_tokens=4, draft="lookup") as llm:
            texts = [m.chat(question("What is 478 + 356?"), GREEDY)[0].outputs[0].text for m in (llm, self.llm)]
        self.assertEqual(texts[0], texts[1])

    def test_describes(self):
        with LLM(model=TINY, max_model_len=100, threads=1) as llm:
            about = llm.describe()
        self.assertEqual((about["context"], about["threads"], about["model"]), (100, 1, TINY))
        with self.assertRaisesRegex(ValueError, "the model is closed"):
            llm.describe()
        llm.close()
        self.assertEqual(tandem.__version__, re.search(r"VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text(
            encoding="utf-8").split("project(")[1]).group(1))

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "/no/such does not exist"):
            LLM(model="/no/such")
        with self.assertRaisesRegex(ValueError, "device tpu: choose auto, cpu or cuda"):
            LLM(model=TINY, device="tpu")
        with self.assertRaisesRegex(ValueError, "tensor_parallel_size 2"):
            LLM(model=TINY, tensor_parallel_size=2)
        with self.assertRaises(TypeError):
            LLM(model=TINY, tensor_paralel_size=2)
        for params in ({"n": 0}, {"max_tokens": 0}, {"top_p": 0}, {"top_p": 1.5}, {"repetition_penalty": 0}):
            with self.assertRaisesRegex(ValueError, next(iter(params))):
                SamplingParams(**params)
        with self.assertRaisesRegex(ValueError, "the prompt has 600"):
            with LLM(model=TINY, max_model_len=100) as llm:
                llm.generate({"prompt_token_ids": [5] * 600})

    def test_warnings(self):
        code = ("import os; os.sched_setaffinity(0, {0}); from tandem import LLM; "
                f"LLM({TINY!r}, threads=99, on_warning=lambda line: print('heard', line)).close()")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                              env=dict(os.environ, PYTHONPATH=str(ROOT / "python")))
        self.assertTrue("heard" in done.stdout or "threads 99" in done.stderr, done)

    def test_ctrl_c_ends_the_answers(self):
        endless = SamplingParams(temperature=1, ignore_eos=True, max_tokens=None, seed=1)
        with LLM(model=TINY, max_model_len=8192) as llm:
            timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
            with self.assertRaises(KeyboardInterrupt):
                timer.start()  # not while the model is loaded, which a busy machine does slowly
                llm.generate(["What"] * 8, endless)
            timer.join()

    def test_progress_is_for_terminals(self):
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            self.llm.generate(["What", "is"], SamplingParams(max_tokens=1))
            self.assertEqual(shown.getvalue(), "")
            shown.isatty = lambda: True
            self.llm.generate(["What", "is"], SamplingParams(max_tokens=1), use_tqdm=False)
            self.assertEqual(shown.getvalue(), "")
            self.llm.generate(["What", "is"], SamplingParams(max_tokens=1))
        self.assertEqual(shown.getvalue(), "1 of 2 answers\r2 of 2 answers\n")


class Example(unittest.TestCase):
    def test_it_runs(self):
        text = subprocess.run([sys.executable, ROOT / "examples/generate.py", TINY], capture_output=True, text=True,
                              check=True, timeout=60, env=dict(os.environ, PYTHONPATH=str(ROOT / "python"))).stdout
        self.assertEqual(text.splitlines()[:2], ["What is 478 + 356? -> The answer is 834.",
                                                 "What is 12 * 7? -> The answer is 84."])
        self.assertEqual(text.splitlines()[-1], "The answer is 5.")


if __name__ == "__main__":
    unittest.main()
