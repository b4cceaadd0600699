"""Plants bugs one by one and shows that the tests catch every one.

A copy of the sources below build/mutants is changed, built and tested; the checkout is never touched. Writes the table
docs/mutants.md with --write. Exit status 1 when a mutant survives or no longer applies.

    python3 tools/mutants.py [--only NAME] [--write]
"""
import argparse
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutants"
FOLDERS = ["src", "cpu_kernels", "offload", "tests", "benchmarks", "models"]
FILES = ["CMakeLists.txt"]
# Cheapest first: a mutant is done with at the first test that fails.
TESTS = ["rope_test", "router_test", "sampler_test", "cpu_kernels_test", "model_test", "generator_test", "golden_test"]

MUTANTS = [
    ("RoPE rotates halves, not adjacent pairs", "src/ops/cpu_ops.cpp",
     [("float* pair = x.row<float>(r) + 2 * i;", "float* pair = x.row<float>(r) + i;"),
      ("b = pair[1];", "b = pair[table.frequencies.size()];"),
      ("pair[1] = a * sin", "pair[table.frequencies.size()] = a * sin")]),
    ("RoPE turns the other way", "src/ops/cpu_ops.cpp", [("pair[0] = a * cos - b * sin;", "pair[0] = a * cos + b * sin;"),
                                                       ("pair[1] = a * sin + b * cos;", "pair[1] = b * cos - a * sin;")]),
    ("YaRN left out", "src/model/rope.cpp", [("rope.yarn ? std::clamp((i - low) / (high - low), 0.0, 1.0) : 0", "0.0")]),
    ("YaRN ramp reversed", "src/model/rope.cpp", [("slow + plain * (1 - slow)", "(1 - slow) + plain * slow")]),
    ("YaRN magnitude not squared", "src/model/rope.cpp", [("m * m / std::sqrt", "m / std::sqrt")]),
    ("softmax scale from the absorbed dimension", "src/model/rope.cpp", [("config.mla.qk_dim()", "config.mla.cache_dim()")]),
    ("routed_scaling_factor left out", "src/ops/router.cpp", [("scale / (sum + 1e-20f) : scale;", "1 / (sum + 1e-20f) : 1;")]),
    ("V2 scales renormalised weights too", "src/ops/router.cpp", [("normalize && !router.scale_normalized ? 1 : router.scale", "router.scale")]),
    ("weights not renormalised", "src/ops/router.cpp", [("normalize ? scale / (sum + 1e-20f) : scale;", "scale;")]),
    ("group mask left out", "src/ops/router.cpp", [("router.method != TopkMethod::kGreedy && router.n_groups > 1", "false")]),
    ("V3 groups ranked by their best expert alone", "src/ops/router.cpp", [("first + second : first", "first : first")]),
    ("masked experts get score 0, not minus infinity", "src/ops/router.cpp",
     [("std::fill_n(choice.begin() + worst * size, size, kOut);", "std::fill_n(choice.begin() + worst * size, size, 0.f);")]),
    ("correction bias used in the weight", "src/ops/router.cpp", [("weights[k] = score[ids[k]];", "weights[k] = choice[ids[k]];")]),
    ("shared expert counted twice", "src/engine/deepseek.cpp",
     [("  experts_.add_to(a.y);", "  ops_.add(a.y, a.y);\n  experts_.add_to(a.y);")]),
    ("latent norms use rms_norm_eps", "src/engine/deepseek.cpp", [("w.kv_a_norm, c_.latent_norm_eps", "w.kv_a_norm, c_.norm_eps")]),
    ("key rope left unrotated", "src/engine/deepseek.cpp",
     [("  ops_.rope(a.kv.cols_from(m.kv_rank, m.rope_dim), batch.positions, rope_);\n", "")]),
    ("final norm left out", "src/engine/deepseek.cpp", [("  ops_.rms_norm(last, w_.final_norm, c_.norm_eps, last);\n", "")]),
    ("values restored from the key rows", "src/engine/deepseek.cpp", [(".first_row = m.nope_dim,", ".first_row = 0,")]),
    ("every layer in the first layer's cache", "src/engine/deepseek.cpp", [("cache.layer(layer), a)", "cache.layer(0), a)")]),
    ("second layer takes the first layer's experts", "offload/cpu_experts.cpp", [("w_.layers[batch.layer]", "w_.layers[c_.n_layers - 1]")]),
    ("a token sees its successor", "src/ops/cpu_attention.cpp", [("s.n_tokens + 1 - first_key", "s.n_tokens + 2 - first_key")]),
    ("a token does not see itself", "src/ops/cpu_attention.cpp", [("s.n_tokens + 1 - first_key", "s.n_tokens - first_key")]),
    ("the last, partly filled page is forgotten", "src/ops/cpu_attention.cpp",
     [("(s.kv_length + kPageSize - 1) / kPageSize", "std::max(1, s.kv_length / kPageSize)")]),
    ("pages taken in physical order", "src/ops/cpu_attention.cpp",
     [("int64_t{s.kv_pages[position / kPageSize]} * kPageSize", "int64_t{s.kv_pages[0] + position / kPageSize} * kPageSize")]),
    ("naive form takes keys for values", "src/ops/cpu_attention.cpp", [(".v = k + m.nope_dim,", ".v = k,")]),
    ("running softmax not rescaled", "cpu_kernels/reference.cpp", [("out[c] *= rescale;", "out[c] *= 1;")]),
    ("FP8 subnormals flushed to zero", "cpu_kernels/reference.cpp",
     [("exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)", "exponent == 0 ? 0 * std::ldexp(static_cast<float>(mantissa), -9)")]),
    ("scale block of the wrong row", "cpu_kernels/reference.cpp", [("(w.row0 + row) / w.block_rows", "(w.row0 + row + 1) / w.block_rows")]),
    ("AVX2 scale block of the wrong column", "cpu_kernels/avx2_products.cpp", [("scales[at / w.block_cols]", "scales[c / w.block_cols]")]),
    ("expert outputs added without their weight", "offload/cpu_experts.cpp", [("to[r] += weight * part", "to[r] += part")]),
    ("SiLU on the wrong branch", "offload/cpu_experts.cpp",
     [("product(group.weights->gate, act_);", "product(group.weights->up, act_);"),
      ("product(group.weights->up, up_);", "product(group.weights->gate, up_);")]),
    ("positions start anew in every chunk", "src/engine/generator.cpp", [("step.positions.push_back(i);", "step.positions.push_back(i - r.n_done);")]),
    ("logits of the token before", "src/engine/generator.cpp", [("step.logit_rows.push_back(first + n - 1);", "step.logit_rows.push_back(std::max(0, first + n - 2));")]),
    ("temperature multiplies", "src/engine/sampler.cpp", [("(logits[t] - max) / params_.temperature", "(logits[t] - max) * params_.temperature")]),
]


def run(command, **more):
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def copy_if_changed(source, target):
    """With a new time, so that what an interrupted run left built is built again."""
    target = pathlib.Path(target)
    if not target.exists() or target.read_bytes() != pathlib.Path(source).read_bytes():
        shutil.copyfile(source, target)


def copy_sources():
    COPY.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, COPY / name, dirs_exist_ok=True, copy_function=copy_if_changed)
    for name in FILES:
        copy_if_changed(ROOT / name, COPY / name)


def build():
    return run(["cmake", "--build", str(COPY / "build"), "--target", *TESTS])


def first_failing_test():
    for test in TESTS:
        result = run([str(COPY / "build" / "tests" / test), "--gtest_brief=1", "--gtest_fail_fast"], timeout=600)
        if result.returncode != 0:
            failed = [line for line in result.stdout.splitlines() if line.startswith("[  FAILED  ]")]
            case = failed[0].split("]", 1)[1].split(",")[0].split("(")[0].strip() if failed else "aborted"
            return f"{test}: {case}"
    return None


def try_mutant(path, changes):
    """Returns what caught it; None if nothing did; raises ValueError if it does not apply."""
    target = COPY / path
    original = (ROOT / path).read_text(encoding="utf-8")
    text = original
    for old, new in changes:
        if old not in text:
            raise ValueError(f"{path} no longer contains: {old}")
        text = text.replace(old, new, 1)
    target.write_text(text, encoding="utf-8")
    try:
        built = build()
        if built.returncode != 0:
            raise ValueError(f"does not compile: {built.stdout[-400:]}")
        return first_failing_test()
    finally:
        target.write_text(original, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="part of a mutant's name")
    parser.add_argument("--write", action="store_true", help="write docs/mutants.md")
    options = parser.parse_args()

    copy_sources()
    configured = run(["cmake", "-G", "Ninja", "-S", str(COPY), "-B", str(COPY / "build"), "-DCMAKE_CXX_FLAGS_RELEASE=-O1"])
    if configured.returncode != 0 or build().returncode != 0:
        sys.exit("error: the unchanged copy does not build")
    survivor = first_failing_test()
    if survivor:
        sys.exit(f"error: the unchanged copy fails {survivor}")

    rows, missed = [], 0
    chosen = [m for m in MUTANTS if not options.only or options.only in m[0]]
    start = time.time()
    for number, (name, path, changes) in enumerate(chosen, 1):
        try:
            caught = try_mutant(path, changes)
        except ValueError as problem:
            caught = None
            print(problem)
        missed += caught is None
        rows.append(f"| {name} | {path} | {caught or '**survived**'} |")
        left = (time.time() - start) / number * (len(chosen) - number)
        print(f"{number}/{len(chosen)} {name}: {caught or 'SURVIVED'} ({left:.0f} s left)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    if options.write:
        table = "\n".join(["# Mutation check", "",
                           f"`make mutants` plants these bugs one by one; the tests caught {len(chosen) - missed} of {len(chosen)}.",
                           "", "| planted bug | in | caught first by |", "|---|---|---|", *rows, ""])
        (ROOT / "docs" / "mutants.md").write_text(table, encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
