"""Every program of tools/ prints its purpose with --help and does nothing else.

    python3 tests/tools_test.py
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The packages of tools/requirements.txt and of the tokenizers' README by their import names. A tool may fail where
# they are missing.
OPTIONAL = {"numpy", "torch", "transformers", "safetensors", "tokenizers", "tiktoken", "jinja2"}


def programs():
    tools = [p for p in (ROOT / "tools").rglob("*.py") if not is_part_of_a_package(p)] + [*(ROOT / "tools").rglob("*.sh")]
    return sorted([*tools, *(ROOT / "tests" / "data").rglob("make_*.py"), ROOT / "tests" / "gpu_check.sh"])


def is_part_of_a_package(path):
    return re.search(r"^from \.", path.read_text(encoding="utf-8"), re.M) is not None


def is_program(path):
    return path.suffix == ".sh" or "__main__" in path.read_text(encoding="utf-8")


def asked_for_help(path, folder):
    command = [str(path)] if path.suffix == ".sh" else [sys.executable, str(path)]
    return subprocess.run([*command, "--help"], cwd=folder, capture_output=True, text=True, check=False, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"})


class Help(unittest.TestCase):
    def test_nothing_is_made(self):
        self.assertGreater(len(programs()), 30)
        for path in programs():
            with self.subTest(path.relative_to(ROOT)), tempfile.TemporaryDirectory() as folder:
                done = asked_for_help(path, folder)
                self.assertEqual(os.listdir(folder), [])
                missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", done.stderr)
                if missing and missing[1] in OPTIONAL:
                    continue
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(bool(done.stdout), is_program(path), "a program tells what it is for")

    def test_arguments_are_read_by_a_parser(self):
        for path in programs():
            if path.suffix == ".py" and is_program(path):
                with self.subTest(path.relative_to(ROOT)):
                    text = path.read_text(encoding="utf-8")
                    self.assertTrue("parse_args(" in text, "it has no parser")
                    self.assertFalse("sys.argv" in text, "it reads arguments beside its parser")


if __name__ == "__main__":
    unittest.main()
