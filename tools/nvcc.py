"""What programs about the compiled GPU kernels share: how they are compiled, and their names."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def compiled(file, arch, cubin, *options):
    """Compiles a file of gpu_kernels for sm_<arch> as the build does, and returns what nvcc reported."""
    command = ["nvcc", "-std=c++20", "-O3", "--expt-relaxed-constexpr", *options, "-cubin", "-o", str(cubin),
               f"-I{ROOT}", f"-I{ROOT}/src", f"-I{ROOT}/gpu_kernels/cuda", f"-arch=sm_{arch}", str(file)]
    return output_of(command).stderr


def output_of(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done


def demangled(name):
    """A kernel's name and template arguments: skinny<(tandem::Number)1,2>."""
    plain = output_of(["c++filt", name]).stdout
    found = re.search(r"(\w+?)(?:_kernel)?(<.*>)?\(", plain.replace("(anonymous namespace)::", "").replace("tandem::gpu::", ""))
    return found[1] + (found[2] or "").replace(", ", ",")
