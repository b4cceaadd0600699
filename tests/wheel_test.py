"""The wheel of `pip install .`, packed from a finished build: what is in it, and that it runs by itself.

    wheel_test.py BUILD_FOLDER

Skipped (status 77) where tools/client_packages.sh could not install scikit-build-core.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
PYTHON = ROOT / "build/packaging/bin/python"


def output(*command, **more):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300, **more)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


class Wheel(unittest.TestCase):
    def test_it_runs_by_itself(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            output(PYTHON, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", path,
                   "-C", f"cmake.define.TANDEM_PREBUILT={BUILD}", "-C", f"build-dir={path / 'build'}", ROOT)
            wheel, = path.glob("tandem_engine-*-py3-none-linux_*.whl")
            names = zipfile.ZipFile(wheel).namelist()
            for name in ("tandem/libtandem.so", "tandem/tandem", "tandem/llm.py", "tandem/models/tiny-r1/config.json",
                         "tandem/models/configs/r1.json", "tandem/machines/2x6454s-4090.json"):
                self.assertIn(name, names)
            self.assertEqual({name.split("/")[0].split("-")[0] for name in names}, {"tandem", "tandem_engine"})

            packages = path / "packages"
            output(PYTHON, "-m", "pip", "install", "-q", "--no-deps", "--target", packages, wheel)
            here = dict(os.environ, PYTHONPATH=str(packages))
            here.pop("TANDEM_LIBRARY", None)
            text = output(sys.executable, ROOT / "examples/generate.py", cwd=path, env=here)
            self.assertEqual(text.splitlines()[0], "What is 478 + 356? -> The answer is 834.")
            program = packages / "bin/tandem"
            answer = output(sys.executable, program, "run", "-q", "--temp", "0", "-p", "What is 12 * 7?", cwd=path, env=here)
            self.assertIn("The answer is 84.", answer)
            self.assertIn("RTX 4090", output(sys.executable, "-m", "tandem", "plan", "r1", "--machine", "2x6454s-4090",
                                             cwd=path, env=here))


if __name__ == "__main__":
    if not PYTHON.exists():
        print("scikit-build-core is missing: run tools/client_packages.sh packaging")
        sys.exit(77)
    unittest.main()
