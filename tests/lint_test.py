"""tools/lint.py: what is checked again and what is not.

    python3 tests/lint_test.py
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

LINT = pathlib.Path(__file__).resolve().parent.parent / "tools" / "lint.py"
# Fails for a source with the word "bad", and writes down what it was asked.
TIDY = """#!/bin/sh
for source; do :; done
basename "$source" >> "$ASKED"
! grep bad "$source"
"""


class Lint(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name).resolve() / "a repository"
        for part in ("tools", "src", "build/debug"):
            (self.root / part).mkdir(parents=True)
        shutil.copy(LINT, self.root / "tools")
        self.write("src/a.h", "int a();\n")
        self.write("src/a.cpp", '#include "a.h"\n#include <cstddef>\nint a() { return 1; }\n')
        self.write("src/b.cpp", "int b() { return 2; }\n")
        self.write(".clang-tidy", "Checks: '*'\n")
        self.commands()
        tidy = self.root / "tools" / "clang-tidy-14"
        tidy.write_text(TIDY, encoding="utf-8")
        tidy.chmod(0o755)

    def write(self, name, text):
        (self.root / name).write_text(text, encoding="utf-8")

    def commands(self, *options):
        build = str(self.root / "build" / "debug")
        self.write("build/debug/compile_commands.json", json.dumps(
            [{"directory": build, "file": str(source), "command": " ".join(["c++", *options, "-o", "x.o", "-c", f"'{source}'"])}
             for source in (self.root / "src" / name for name in ("a.cpp", "b.cpp"))]))

    def lint(self, *names):
        """The sources that were checked, the exit status and what was printed."""
        asked = self.root / "asked"
        asked.write_text("", encoding="utf-8")
        environment = {**os.environ, "PATH": f"{self.root / 'tools'}:{os.environ['PATH']}", "ASKED": str(asked)}
        done = subprocess.run([sys.executable, str(self.root / "tools" / "lint.py"), *names], capture_output=True, text=True,
                              input="src/a.cpp\nsrc/b.cpp\n", cwd=self.root, env=environment, check=False)
        return sorted(asked.read_text(encoding="utf-8").split()), done.returncode, done.stdout + done.stderr

    def test_sources_that_passed_are_not_checked_again(self):
        self.assertEqual(self.lint(), (["a.cpp", "b.cpp"], 0, "lint: 2 passed (0 of them before), 0 failed\n"))
        self.assertEqual(self.lint(), ([], 0, "lint: 2 passed (2 of them before), 0 failed\n"))
        self.assertEqual(self.lint("src/b.cpp"), ([], 0, "lint: 1 passed (1 of them before), 0 failed\n"))
        self.write("src/a.h", "int a();  // the answer\n")
        self.assertEqual(self.lint()[:2], (["a.cpp"], 0))
        self.write(".clang-tidy", "Checks: 'bugprone-*'\n")
        self.assertEqual(self.lint()[:2], (["a.cpp", "b.cpp"], 0))
        self.commands("-DNAME=1")
        self.assertEqual(self.lint()[:2], (["a.cpp", "b.cpp"], 0))
        self.assertEqual(self.lint()[:2], ([], 0))

    def test_what_failed_is_checked_again(self):
        self.write("src/b.cpp", "int bad() { return 2; }\n")
        for checked in (["a.cpp", "b.cpp"], ["b.cpp"]):
            asked, status, text = self.lint()
            self.assertEqual((asked, status), (checked, 1))
            self.assertIn("src/b.cpp:\nint bad()", text)
            self.assertTrue(text.endswith("1 failed\n"), text)
        self.write("src/b.cpp", "int b( { broken\n")  # the compiler lists no files, but what is wrong is clang-tidy's to say
        self.assertEqual(self.lint()[:2], (["b.cpp"], 0))

    def test_a_source_that_is_not_built_is_an_error(self):
        self.write("src/c.cpp", "int c();\n")
        asked, status, text = self.lint("src/c.cpp")
        self.assertEqual((asked, status), ([], 1))
        self.assertRegex(text, r"\Aerror: the build does not compile .*/src/c\.cpp: .*\n\Z")


if __name__ == "__main__":
    unittest.main()
