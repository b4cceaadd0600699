"""Plants bugs one by one and shows that the tests catch every one.

Changes, builds and tests a copy of the sources below build/mutants; the checkout is never changed. --write writes the
table docs/measurements/planted_bugs.md. Exit status 1 if a mutant survives or no longer applies.

    python3 tools/mutants.py [--only NAME] [--write]
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import time

from planted_bugs import MUTANTS

ROOT = pathlib.Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutants"
FOLDERS = ["src", "cpu_kernels", "gpu_kernels", "offload", "tests", "benchmarks", "models", "machines", "docs/measurements"]
FILES = ["CMakeLists.txt"]
# Cheapest first, because the first failing test ends a mutant. The tests of its file run before all others.
TESTS = ["topology_test", "team_test", "scheduler_test", "swapping_test", "server_test", "chat_template_test", "grammar_test", "plan_rules_test", "assign_test", "placement_test", "executed_parts_test", "fit_test", "decision_test",
         "routing_recorder_test", "measured_curves_test", "expert_division_test", "simulate_test", "machine_test", "serving_bench_test", "plan_test", "rope_test", "router_test", "sampler_test",
         "int4_words_test", "config_refusals_test", "checkpoint_test", "packed_cache_test", "quantized_weights_test", "emulated_byte_products_test",
         "experts_test", "attention_test", "cpu_kernels_test", "gpu_kernels_test", "gpu_router_test", "gpu_plain_test", "gpu_products_test", "gpu_fp8_products_test", "gpu_experts_test", "gpu_attention_test", "gpu_decode_cost_test", "gpu_packed_test", "gpu_signals_test", "gpu_sampling_test", "gpu_kv_test", "gpu_hand_off_test", "gpu_unpack_test", "gpu_grids_test", "gpu_hybrid_test", "gpu_hybrid_fp8_test", "gpu_hybrid_streaming_test", "gpu_hybrid_allocations_test", "load_weights_test", "model_test", "completion_test", "engine_test", "golden_test", "gpu_engine_test", "gpu_engine_fp8_test", "gpu_engine_graphs_test", "gpu_hybrid_engine_test", "gpu_engine_swap_test", "gpu_engine_both_test", "gpu_engine_batches_test", "gpu_hybrid_steps_test", "gpu_facts_test", "gpu_engine_fallback_test", "gpu_engine_lost_test", "gpu_engine_bench_test", "gpu_engine_rates_test", "bench_machine_test", "bench_test"]
TESTS_OF = {
    "src/ops/cuda_batch": ["gpu_hybrid_engine_test", "gpu_hybrid_allocations_test", "gpu_engine_batches_test"],
    "src/ops/cuda_ops": ["gpu_engine_graphs_test", "gpu_engine_test", "gpu_hybrid_allocations_test"],
    "src/ops/cuda_products": ["gpu_hybrid_fp8_test"],
    "src/ops/cuda": ["gpu_engine_test"],
    "src/bench/random_weights": ["bench_test"],
    "src/with_gpu/gpu_model": ["gpu_engine_fallback_test"],
    "src/main.cpp": ["cli_test.py", "cli_errors_test.py", "gpu_cli_test.py"],
    "src/core/program_files": ["cli_errors_test.py"],
    "src/text/utf8": ["utf8_test", "unicode_test"],
    "src/text/unicode": ["unicode_test"],
    "src/text/tokenizer": ["unicode_test", "tokenizer_test"],
    "src/cli/command_serve": ["gpu_cli_test.py"],
    "src/loader/loaded_model": ["gpu_engine_fallback_test"],
    "src/loader/decision": ["decision_test", "gpu_engine_fallback_test", "gpu_engine_test"],
    "gpu_kernels/gpu_facts": ["gpu_facts_test"],
    "tests/gpu_check": ["gpu_check_test.py"],
    "src/server/cors": ["serve_process_test.py"],
    "src/server/tls": ["serve_process_test.py"],
    "src/server/generation.cpp": ["serve_test.py"],
    "gpu_kernels/hand_off": ["gpu_hand_off_test"],
    "gpu_kernels/stamp": ["gpu_hand_off_test"],
    "gpu_kernels/unpack": ["gpu_unpack_test"],
    "offload/hybrid": ["gpu_hybrid_test", "gpu_hybrid_allocations_test"],
    "offload/expert_division": ["expert_division_test", "gpu_hybrid_allocations_test"],
    "offload/cuda_streaming": ["gpu_hybrid_streaming_test"],
    "offload/cuda_expert_upload": ["gpu_hybrid_streaming_test"],
    "offload/cuda_routing": ["gpu_hybrid_engine_test"],
    "offload/cuda_expert_rows": ["gpu_hybrid_fp8_test"],
    "offload/cuda": ["gpu_hybrid_test"],
    "offload/timeline": ["gpu_hybrid_test"],
    "src/with_gpu/cublas": ["gpu_engine_cublas_test"],
    "src/with_gpu/small_kernels": ["gpu_engine_kernel_bench_test"],
    "src/with_gpu/products_on_gpu": ["gpu_engine_kernel_bench_test"],
    "src/with_gpu/kernel_gap": ["gpu_engine_kernel_bench_test"],
    "src/with_gpu/hand_off_speed": ["gpu_engine_kernel_bench_test"],
    "src/with_gpu/": ["gpu_engine_fallback_test", "gpu_engine_swap_test", "gpu_hybrid_engine_test"],
    "src/core/team_watch": ["team_test"],
    "src/bench/parts/attention_variants": ["attention_variants_test"],
    "src/bench/roofline": ["bench_test"],
    "src/bench/gpu/hybrid": ["gpu_engine_bench_test", "gpu_engine_kernel_bench_test"],
    "src/bench/gpu/": ["gpu_engine_kernel_bench_test"],
    "gpu_kernels/emulated/stream_flags": ["gpu_signals_test"],
    "src/bench/machine/": ["bench_machine_test", "gpu_engine_rates_test"],
    "src/bench/random_inputs": ["bench_test"],
    "gpu_kernels/peaks": ["gpu_engine_rates_test"],
    "src/model/attention_form": ["plan_rules_test"],
    "src/engine/deepseek": ["model_test", "gpu_engine_both_test"],
    "offload/plan/layer_time": ["plan_rules_test", "plan_test"],
    "offload/plan/plan.": ["plan_test"],
    "cpu_kernels/amx": ["emulated_byte_products_test", "quantized_weights_test", "cpu_kernels_test"],
    "cpu_kernels/avx512_int8": ["quantized_weights_test"],
    "cpu_kernels/avx512_i4": ["quantized_weights_test"],
    "cpu_kernels/avx512_one_row": ["emulated_byte_products_test"],
    "cpu_kernels/two_level": ["quantized_weights_test"],
    "src/core/core_turns": ["core_turns_test"],
    "cpu_kernels/avx2_int8": ["quantized_weights_test"],
    "cpu_kernels/": ["cpu_kernels_test", "quantized_weights_test"],
    "gpu_kernels/router": ["gpu_router_test"],
    "gpu_kernels/plain": ["gpu_plain_test"],
    "gpu_kernels/reduce": ["gpu_kernels_test"],
    "gpu_kernels/elementwise": ["gpu_grids_test", "gpu_kernels_test"],
    "gpu_kernels/sort_pairs": ["gpu_kernels_test"],
    "gpu_kernels/grouped": ["gpu_experts_test"],
    "gpu_kernels/mla": ["gpu_grids_test", "gpu_attention_test", "gpu_decode_cost_test"],
    "gpu_kernels/signals": ["gpu_signals_test"],
    "gpu_kernels/sampling": ["gpu_sampling_test"],
    "gpu_kernels/append_fp8": ["gpu_kv_test"],
    "gpu_kernels/e4m3": ["gpu_kv_test", "gpu_products_test"],
    "gpu_kernels/fp8_rows": ["gpu_fp8_products_test", "gpu_experts_test"],
    "gpu_kernels/matrix_tile": ["gpu_products_test", "gpu_fp8_products_test", "gpu_experts_test"],
    "gpu_kernels/": ["gpu_grids_test", "gpu_products_test", "gpu_experts_test"],
    "src/ops/cpu_attention": ["attention_test"],
    "src/ops/cpu_weights": ["quantized_weights_test", "experts_test", "load_weights_test"],
    "src/ops/router": ["router_test"],
    "src/ops/cpu_ops": ["rope_test", "model_test", "dense_products_test"],
    "src/ops/dense_products": ["dense_products_test"],
    "src/ops/onednn": ["dense_products_test"],
    "src/loader/dense_choice": ["dense_products_test"],
    "src/bench/parts/products": ["bench_calls_test"],
    "src/model/rope": ["rope_test"],
    "src/engine/sampler": ["sampler_test"],
    "src/engine/completion": ["completion_test"],
    "src/engine/step_arrays": ["completion_test"],
    "src/engine/scheduler": ["scheduler_test", "swapping_test"],
    "src/engine/page_pool": ["scheduler_test", "swapping_test"],
    "src/engine/swapping": ["swapping_test"],
    "src/engine/host_pages": ["gpu_engine_swap_test"],
    "src/engine/engine": ["engine_test", "gpu_engine_lost_test"],
    "src/engine/stop_text": ["stop_text_test"],
    "src/server/": ["server_test"],
    "src/text/grammar/": ["grammar_test"],
    "src/text/jinja/": ["chat_template_test"],
    "src/text/chat_": ["chat_template_test"],
    "src/engine/token_constraint": ["engine_test"],
    "src/io/packed": ["packed_cache_test"],
    "src/loader/load_weights": ["load_weights_test"],
    "src/loader/model_cache": ["load_weights_test"],
    "src/loader/pack_weights": ["load_weights_test", "experts_test"],
    "src/core/tensor": ["experts_test"],
    "src/core/topology": ["topology_test"],
    "src/core/machine_info": ["machine_info_test"],
    "src/core/team": ["team_test"],
    "offload/plan/fit": ["fit_test"],
    "offload/plan/executed_parts": ["executed_parts_test"],
    "offload/routing_recorder": ["routing_recorder_test"],
    "src/bench/serving/": ["serving_bench_test"],
    "src/bench/measured_curves": ["measured_curves_test"],
    "src/model/experts_layout": ["executed_parts_test", "load_weights_test"],
    "offload/plan/": ["plan_rules_test", "assign_test", "placement_test", "simulate_test", "plan_test"],
    "offload/": ["experts_test"],
    "src/io/json_fields": ["machine_test"],
    "src/io/machine_json": ["machine_test"],
}


# The arguments of a script, if not the program.
PROGRAMS_OF = {"gpu_cli_test.py": ["tests/tandem_emulated", "tandem"], "gpu_check_test.py": []}


def run(command, **more):
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)


def copy_if_changed(source, target):
    """Copies a changed file with a new time, so that it is built again after an interrupted run."""
    target = pathlib.Path(target)
    if not target.exists() or target.read_bytes() != pathlib.Path(source).read_bytes():
        shutil.copyfile(source, target)


def copy_sources():
    COPY.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, COPY / name, dirs_exist_ok=True, copy_function=copy_if_changed)
    for name in FILES:
        copy_if_changed(ROOT / name, COPY / name)


def build(tests):
    if not tests:
        return
    built = run(["cmake", "--build", str(COPY / "build"), "--target", *tests])
    if built.returncode != 0:
        raise ValueError(f"does not compile: {built.stdout[-400:]}")


def program(test):
    folder = COPY / "build" / "tests"
    return folder / "emulate" / test if test.startswith("emulated") else folder / test


def first_failing_test(tests):
    for test in tests:
        if test.endswith(".py"):
            programs = PROGRAMS_OF.get(test, ["tandem"])
            build(programs)
            paths = [str(COPY / "build" / p) for p in programs]
            command = [sys.executable, str(COPY / "tests" / test), *paths, "--failfast"]
        else:
            build([test])
            command = [str(program(test)), "--gtest_brief=1", "--gtest_fail_fast"]
        try:
            result = run(command, timeout=300)
        except subprocess.TimeoutExpired:
            return f"{test}: hangs"
        if result.returncode != 0:
            failed = re.search(r"^(?:\[  FAILED  \]|FAIL:|ERROR:) ([^\s,(]+)", result.stdout + result.stderr, re.M)
            return f"{test}: {failed[1] if failed else 'aborted'}"
    return None


def try_mutant(path, changes):
    """Returns the test that caught the mutant, or None; raises ValueError if the mutant does not apply."""
    target = COPY / path
    original = (ROOT / path).read_text(encoding="utf-8")
    text = original
    for old, new in changes:
        if old not in text:
            raise ValueError(f"{path} no longer contains: {old}")
        text = text.replace(old, new, 1)
    target.write_text(text, encoding="utf-8")
    try:
        first = next((tests for start, tests in TESTS_OF.items() if path.startswith(start)), [])
        return first_failing_test([*first, *(test for test in TESTS if test not in first)])
    finally:
        target.write_text(original, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="part of a mutant's name")
    parser.add_argument("--write", action="store_true", help="write docs/measurements/planted_bugs.md")
    options = parser.parse_args()

    copy_sources()
    configured = run(["cmake", "-G", "Ninja", "-S", str(COPY), "-B", str(COPY / "build"), "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -DNDEBUG", "-DTANDEM_CUDA=off"])
    if configured.returncode != 0:
        sys.exit("error: the unchanged copy does not configure")
    build(TESTS)
    failing = first_failing_test(TESTS)
    if failing:
        sys.exit(f"error: the unchanged copy fails {failing}")

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
        table = "\n".join(["# Planted bugs and the tests that caught them", "",
                           f"`make mutants`, {time.strftime('%Y-%m-%d')}: the tests caught {len(chosen) - missed} of {len(chosen)}.",
                           "", "| planted bug | in | caught first by |", "|---|---|---|", *rows, ""])
        (ROOT / "docs" / "measurements" / "planted_bugs.md").write_text(table, encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
