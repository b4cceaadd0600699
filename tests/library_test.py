"""The shared library as a C programmer has it: exported symbols, header, an installation, the example.

    library_test.py BUILD_FOLDER
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
EXAMPLE = ROOT / "examples/generate.c"
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def output(*command, **more):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=120, **more)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


class Library(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = pathlib.Path(self.folder.name)

    def test_it_exports_the_functions_of_its_header_and_nothing_else(self):
        symbols = output("nm", "-D", "--defined-only", BUILD / "libtandem.so")
        exported = {line.split()[-1] for line in symbols.splitlines()}
        header = (ROOT / "include/tandem.h").read_text(encoding="utf-8")
        declared = {part.split("(")[0].split()[-1].lstrip("*") for part in header.split("TANDEM_API ")[2:]}
        self.assertEqual(exported, declared)
        self.assertIn("tandem_generate", declared)

    def test_the_header_is_c99_and_c11_and_cpp(self):
        for standard in ("c99", "c11"):
            output("cc", f"-std={standard}", *STRICT, "-I", ROOT / "include", "-fsyntax-only", EXAMPLE)
        output("c++", "-std=c++11", *STRICT, "-x", "c++", "-fsyntax-only", ROOT / "include/tandem.h")

    def test_an_installation_is_enough(self):
        prefix = self.path / "installed"
        output("cmake", "--install", BUILD, "--prefix", prefix)
        pc = next(prefix.rglob("tandem.pc"))
        environment = dict(os.environ, PKG_CONFIG_PATH=str(pc.parent))
        flags = output("pkg-config", f"--define-variable=prefix={prefix}", "--cflags", "--libs", "tandem",
                       env=environment).split()
        library = next(prefix.rglob("libtandem.so")).parent
        output("cc", EXAMPLE, *flags, "-o", self.path / "generate")
        environment["LD_LIBRARY_PATH"] = str(library)
        # Another folder than the repository's, so that the model of the installation is found.
        text = output(self.path / "generate", "", "What is 478 + 356?", cwd=self.path, env=environment)
        self.assertTrue(text.endswith("The answer is 834.\n(17 tokens in the first prompt)\n"), text)
        text = output(self.path / "generate", prefix / "share/tandem/models/tiny-r1", 'say "a\\b"\t', "What is 4 + 3?",
                      env=environment)
        self.assertIn("\n1: 7\n", text)
        wrong = subprocess.run([self.path / "generate", "/no/such", "x"], env=environment, capture_output=True,
                               text=True, timeout=60)
        self.assertEqual(wrong.returncode, 2)
        self.assertEqual(wrong.stderr, "error: /no/such does not exist: name the folder of a checkpoint\n")


if __name__ == "__main__":
    unittest.main()
