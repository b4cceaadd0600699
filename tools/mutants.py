"""Plants bugs one by one and shows that the tests catch every one.

A copy of the sources below build/mutants is changed, built and tested; the checkout is never touched. Writes the table
docs/mutants.md with --write. Exit status 1 when a mutant survives or no longer applies.

    python3 tools/mutants.py [--only NAME] [--write]
"""
import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutants"
FOLDERS = ["src", "cpu_kernels", "gpu_kernels", "offload", "tests", "benchmarks", "models", "machines", "docs/measurements"]
FILES = ["CMakeLists.txt"]
# Cheapest first: a mutant is done with at the first test that fails. Those of its file come before all others.
TESTS = ["topology_test", "team_test", "scheduler_test", "swapping_test", "server_test", "grammar_test", "plan_rules_test", "assign_test", "placement_test", "executed_parts_test",
         "routing_recorder_test", "measured_curves_test", "expert_division_test", "simulate_test", "machine_test", "serving_bench_test", "plan_test", "rope_test", "router_test", "sampler_test",
         "int4_words_test", "config_refusals_test", "checkpoint_test", "packed_cache_test", "quantized_weights_test", "emulated_byte_products_test",
         "experts_test", "attention_test", "cpu_kernels_test", "gpu_kernels_test", "gpu_router_test", "gpu_plain_test", "gpu_products_test", "gpu_experts_test", "gpu_attention_test", "gpu_signals_test", "gpu_sampling_test", "gpu_kv_test", "gpu_hand_off_test", "gpu_unpack_test", "gpu_hybrid_test", "gpu_hybrid_streaming_test", "gpu_hybrid_allocations_test", "load_weights_test", "model_test", "generator_test", "engine_test", "golden_test", "gpu_engine_test", "gpu_engine_graphs_test", "gpu_hybrid_engine_test", "gpu_engine_swap_test"]
TESTS_OF = {
    "src/ops/cuda_ops": ["gpu_engine_graphs_test", "gpu_engine_test"],
    "src/ops/cuda": ["gpu_engine_test"],
    "src/server/cors": ["serve_process_test.py"],
    "src/server/tls": ["serve_process_test.py"],
    "gpu_kernels/hand_off": ["gpu_hand_off_test"],
    "gpu_kernels/unpack": ["gpu_unpack_test"],
    "offload/hybrid": ["gpu_hybrid_test", "gpu_hybrid_allocations_test"],
    "offload/expert_division": ["expert_division_test", "gpu_hybrid_allocations_test"],
    "offload/cuda_streaming": ["gpu_hybrid_streaming_test"],
    "offload/cuda_routing": ["gpu_hybrid_engine_test"],
    "offload/cuda": ["gpu_hybrid_test"],
    "offload/timeline": ["gpu_hybrid_test"],
    "src/with_gpu/": ["gpu_hybrid_engine_test"],
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
    "gpu_kernels/elementwise": ["gpu_kernels_test"],
    "gpu_kernels/sort_pairs": ["gpu_kernels_test"],
    "gpu_kernels/grouped": ["gpu_experts_test"],
    "gpu_kernels/mla": ["gpu_attention_test"],
    "gpu_kernels/signals": ["gpu_signals_test"],
    "gpu_kernels/sampling": ["gpu_sampling_test"],
    "gpu_kernels/append_fp8": ["gpu_kv_test"],
    "gpu_kernels/e4m3": ["gpu_kv_test", "gpu_products_test"],
    "gpu_kernels/": ["gpu_products_test", "gpu_experts_test"],
    "src/ops/cpu_attention": ["attention_test"],
    "src/ops/cpu_weights": ["quantized_weights_test", "experts_test", "load_weights_test"],
    "src/ops/router": ["router_test"],
    "src/ops/cpu_ops": ["rope_test", "model_test"],
    "src/model/rope": ["rope_test"],
    "src/engine/sampler": ["sampler_test"],
    "src/engine/generator": ["generator_test"],
    "src/engine/step_arrays": ["generator_test"],
    "src/engine/scheduler": ["scheduler_test", "swapping_test"],
    "src/engine/page_pool": ["scheduler_test", "swapping_test"],
    "src/engine/swapping": ["swapping_test"],
    "src/engine/host_pages": ["gpu_engine_swap_test"],
    "src/engine/engine": ["engine_test"],
    "src/engine/stop_text": ["stop_text_test"],
    "src/server/": ["server_test"],
    "src/io/grammar/": ["grammar_test"],
    "src/engine/token_constraint": ["engine_test"],
    "src/engine/deepseek": ["model_test"],
    "src/io/packed": ["packed_cache_test"],
    "src/load_weights": ["load_weights_test"],
    "src/model_cache": ["load_weights_test"],
    "src/pack_weights": ["load_weights_test", "experts_test"],
    "src/core/tensor": ["experts_test"],
    "src/core/topology": ["topology_test"],
    "src/core/team": ["team_test"],
    "offload/plan/executed_parts": ["executed_parts_test"],
    "offload/routing_recorder": ["routing_recorder_test"],
    "src/bench/serving/": ["serving_bench_test"],
    "src/bench/measured_curves": ["measured_curves_test"],
    "src/ops/experts_layout": ["executed_parts_test", "load_weights_test"],
    "offload/plan/": ["plan_rules_test", "assign_test", "placement_test", "simulate_test", "plan_test"],
    "offload/": ["experts_test"],
    "src/io/json_fields": ["machine_test"],
    "src/io/machine_json": ["machine_test"],
}

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
    ("second layer takes the first layer's experts", "offload/expert_slice.cpp", [("w_.layers[batch.layer]", "w_.layers[c_.n_layers - 1]")]),
    ("a token sees its successor", "src/ops/cpu_attention.cpp", [("s.n_tokens + 1 - first_key", "s.n_tokens + 2 - first_key")]),
    ("a token does not see itself", "src/ops/cpu_attention.cpp", [("s.n_tokens + 1 - first_key", "s.n_tokens - first_key")]),
    ("the last, partly filled page is forgotten", "src/ops/cpu_attention.cpp",
     [("(s.kv_length + kPageSize - 1) / kPageSize", "std::max(1, s.kv_length / kPageSize)")]),
    ("pages taken in physical order", "src/ops/cpu_attention.cpp",
     [("int64_t{s.kv_pages[position / kPageSize]} * kPageSize", "int64_t{s.kv_pages[0] + position / kPageSize} * kPageSize")]),
    ("naive form takes keys for values", "src/ops/cpu_attention.cpp", [("own.cols_from(m.nope_dim, m.v_dim)", "own.cols_from(0, m.v_dim)")]),
    ("naive form takes head 0 for every head", "src/ops/cpu_attention.cpp", [(".first_row = int64_t{head} * cols,", ".first_row = 0,")]),
    ("naive form: every product restores the first tokens", "src/ops/cpu_attention.cpp", [("+ first * x.stride;", "+ 0 * x.stride;")]),
    ("naive form: threads that share a head skip a piece", "src/ops/cpu_attention.cpp", [("piece += n_shares)", "piece += n_shares + 1)")]),
    ("naive form forgets its maximum between pages", "src/ops/cpu_attention.cpp", [("max[i] = page == 0 ? kNoMax : maxima[row(i)];", "max[i] = kNoMax;")]),
    ("a merge of parts keeps the wrong maximum", "src/ops/cpu_attention.cpp", [("    max = top;", "    max = added_max;")]),
    ("a merge of parts does not rescale the sum", "src/ops/cpu_attention.cpp", [("sum = sum * keep + added_sum * take;", "sum = sum + added_sum * take;")]),
    ("the second part begins with the first part's pages", "src/ops/cpu_attention.cpp", [("page_of(a, s, part.first_page + p);", "page_of(a, s, p);")]),
    ("rope keys at the wrong column", "src/ops/cpu_attention.cpp", [("keys.cols_from(rank, a.mla.rope_dim).data, keys.data,", "keys.cols_from(0, a.mla.rope_dim).data, keys.data,")]),
    ("rope step offset of packed queries", "cpu_kernels/avx512_attention.h", [("a.rope_dim, rope_step(a), s);", "a.rope_dim, a.dim / 2, s);")]),
    ("visible off by one in the kernel", "cpu_kernels/avx512_attention.h", [("_mm512_set1_epi32(block.visible))", "_mm512_set1_epi32(block.visible + 1))")]),
    ("visible off by one for whole tiles of keys", "cpu_kernels/avx512_attention.h", [("scores.all[i] = keys_seen(block, s.token[query]);", "scores.all[i] = keys_seen(block, s.token[query] + 1);")]),
    ("weights of odd keys lost", "cpu_kernels/avx512_attention.h", [("_mm512_cvtne2ps_pbh(w[2 * j + 1], w[2 * j])", "_mm512_cvtne2ps_pbh(w[2 * j], w[2 * j])")]),
    ("the second 128 queries go on from the first", "cpu_kernels/avx512_attention.h", [("a.out + query * a.out_stride", "a.out + i * a.out_stride")]),
    ("what was summed keeps its size when the maximum grows", "cpu_kernels/avx512_attention.h", [("  if (grown) rescale(a, query, grown, shrink, s);\n", "")]),
    ("two blocks' scores in one place", "cpu_kernels/avx512_attention.cpp", [("s.scores + i * kMaxKeys, s);", "s.scores, s);")]),
    ("the key after the last is multiplied", "cpu_kernels/avx512_attention.h", [("key + 1 < n_keys ? mask : 0", "mask")]),
    ("values of the second block are the first's", "cpu_kernels/avx512_attention.h", [("bytes(b.blocks[i].v)", "bytes(b.blocks[0].v)")]),
    ("tiles: the second panel's scores lost", "cpu_kernels/amx_attention.cpp", [("if constexpr (kPanels == 2) _tile_dpbf16ps(3, 5, 7);", "")]),
    ("tiles: the last keys are not copied", "cpu_kernels/amx_attention.cpp", [("first + i < block.n_keys", "first + i < block.n_keys - 1")]),
    ("tiles: sums begin anew with every block", "cpu_kernels/amx_attention.cpp", [("  _tile_loadd(0, out, kBytesApart);", "  _tile_zero(0);")]),
    ("tiles: dimensions that leave a tile unfilled", "cpu_kernels/amx_attention.cpp", [("a.dim % kTileColumns != 0 ||", "false ||")]),
    ("tiles: rope keys left out", "cpu_kernels/amx_attention.cpp", [("a.rope_dim / kTileColumns, {nullptr, 0});", "0, {nullptr, 0});")]),
    ("running softmax not rescaled", "cpu_kernels/reference.cpp", [("out[c] *= rescale;", "out[c] *= 1;")]),
    ("FP8 subnormals flushed to zero", "cpu_kernels/reference.cpp",
     [("exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)", "exponent == 0 ? 0 * std::ldexp(static_cast<float>(mantissa), -9)")]),
    ("scale block of the wrong row", "cpu_kernels/reference.cpp", [("(w.row0 + row) / w.block_rows", "(w.row0 + row + 1) / w.block_rows")]),
    ("panels: scale block of the wrong row", "cpu_kernels/panels.h", [("const int64_t row = w.row0 + panel * kPanelRows;", "const int64_t row = panel * kPanelRows;")]),
    ("scale block of the wrong column", "cpu_kernels/reference.cpp", [("scales[(w.col0 + col + c) / w.block_cols]", "scales[(col + c) / w.block_cols]")]),
    ("panels: scale blocks begin with the first column", "cpu_kernels/panels.h", [("left_ = width_ - w.col0 % width_;", "left_ = width_;")]),
    ("panels: columns begin in the first scale block", "cpu_kernels/panels.h", [("next_ = w.col0 / width_;", "next_ = 0;")]),
    ("scales of a part converted as if it were the whole", "src/ops/cpu_weights.cpp", [("(stored.col0 + c) / stored.block_cols", "c / stored.block_cols")]),
    ("panels: one scale for rows of two blocks", "cpu_kernels/panels.h", [("if (first == last) return", "if (first <= last) return")]),
    ("panels: scale of the wrong group of columns", "cpu_kernels/panels.h", [("groups_ + block * kScalePanels * kPanelRows, sizeof(half)", "groups_ + 0 * block, sizeof(half)")]),
    ("panels: a scale reaches into the next block", "cpu_kernels/panels.h", [("const int taken = min(n, left_);", "const int taken = n;")]),
    ("panels: rows of x from the wrong place", "cpu_kernels/panels.h", [("x_row(a.x, first + i + r)", "x_row(a.x, i + r)")]),
    ("panels: rows before the first one not skipped", "cpu_kernels/panels.h", [("const int skip = static_cast<int>(a.first_row % kPanelRows);", "const int skip = 0;")]),
    ("panels: the panel that skipping adds is left out", "cpu_kernels/panels.h", [("(skip + a.n + kPanelRows - 1) / kPanelRows", "(a.n + kPanelRows - 1) / kPanelRows")]),
    ("panels: the last, smaller group computes one panel", "cpu_kernels/panels.h", [("p < b.n_panels; ++p) t.one", "p < 1; ++p) t.one")]),
    ("panels: row sums not subtracted", "cpu_kernels/panels.h", [("(sum[r] * unit - offset[r]) * scale", "sum[r] * unit * scale")]),
    ("panels: row sums of the first panels", "cpu_kernels/panels.h", [("sums_of_rows(a.w, range.first + panel + p)", "sums_of_rows(a.w, panel + p)")]),
    ("panels: scales of x in the order of the output", "cpu_kernels/panels.h", [("a.x.scales[a.x.rows ? a.x.rows[i] : i]", "a.x.scales[i]")]),
    ("panels: parts of a block do not move on to their scales", "cpu_kernels/panels.h", [("    next_ += n_parts;\n", "")]),
    ("panels: parts across a block of scales cut before it", "cpu_kernels/panels.h", [("if (n < part || (width_ > 0 && (part != width_ || left_ != width_))) return 0;", "if (n < part) return 0;")]),
    ("AVX-512 all parts have the scales of the first", "cpu_kernels/avx512_panels.h", [("b.scale[panel + p] + part * kPanelRows", "b.scale[panel + p] + 0 * part")]),
    ("one row: the sums of the panel before subtracted", "cpu_kernels/avx512_one_row.h", [("sums_of_rows(a.w, panel + p)", "sums_of_rows(a.w, panel)")]),
    ("panels of INT4: row sums of the last panel of four", "cpu_kernels/row_scales.h", [("(kScalePanels - panel % kScalePanels) * kPanelRows", "kPanelRows")]),
    ("panels of INT4: scales of the first panel of four", "cpu_kernels/panels.h", [("panel % kScalePanels * kPanelRows;", "0;")]),
    ("one row: all parts have the scales of the first", "cpu_kernels/avx512_one_row.h", [("        scale[p] += scale_step;\n", "")]),
    ("one row: scales of the first rows", "cpu_kernels/avx512_one_row.h", [("(w.row0 + panel * kPanelRows) / w.block_rows", "w.row0 / w.block_rows")]),
    ("one row: scales of a part from the first rows", "cpu_kernels/avx512_one_row.h", [("(w.row0 + panel * kPanelRows) / w.block_rows", "panel * kPanelRows / w.block_rows")]),
    ("one row: a part that begins within a block of columns", "cpu_kernels/avx512_one_row.h", [("w.col0 != 0 || ", "")]),
    ("one row: a panel with the scales of two blocks", "cpu_kernels/avx512_one_row.h", [(" || w.row0 % kPanelRows != 0", "")]),
    ("one row: each part has the first columns of x", "cpu_kernels/avx512_one_row.h", [("      x += n / kStepBytes * Format::kXBytes;\n", "")]),
    ("one row: the last columns left out", "cpu_kernels/avx512_one_row.h", [("left > 0;) {", "left >= part_bytes;) {")]),
    ("one row: outputs from the first on", "cpu_kernels/avx512_one_row.h", [("(panel * kPanelRows - a.first_row)", "0 * panel")]),
    ("one row: scale of the first row of x", "cpu_kernels/avx512_one_row.h", [("a.x.rows ? a.x.rows[0] : 0", "0")]),
    ("AVX2 all parts have the scales of the first", "cpu_kernels/avx2_int8.h", [("b.scale[panel + p] + part * kPanelRows", "b.scale[panel + p] + 0 * part")]),
    ("AVX2 FP8 in the wrong unit", "cpu_kernels/avx2_products.cpp", [("kUnit = 0x1p72f", "kUnit = 0x1p64f")]),
    ("AVX2 FP8: kept weights not lifted", "cpu_kernels/avx2_products.cpp", [("w[j] = lift<Type>(w[j]);", "")]),
    ("AVX2 FP8: products of small x subnormal", "cpu_kernels/avx2_products.cpp", [("kLift = 0x1p48f, kUnit = 0x1p72f", "kLift = 0x1p1f, kUnit = 0x1p119f")]),
    ("AVX-512 FP8 by halves: the first two panels twice", "cpu_kernels/avx512_bf16.cpp", [("tile_e4m3<M, N, kKeep>(x, b, p, sums)", "tile_e4m3<M, N, kKeep>(x, b, 0, sums)")]),
    ("AVX-512 INT4 by halves: the first two panels twice", "cpu_kernels/avx512_int8.cpp", [("tile_i4<M, N, kKeep, kTwoLevel>(x, b, p, sums)", "tile_i4<M, N, kKeep, kTwoLevel>(x, b, 0, sums)")]),
    ("AVX2 multiplies past the end of x", "cpu_kernels/avx2_products.cpp", [("if (j > 0 && j >= left) continue;", "")]),
    ("AVX2 wrong nibble of INT4", "cpu_kernels/avx2_int8.h", [("_mm256_and_si256(_mm256_slli_epi16(codes, 4), upper)", "_mm256_and_si256(codes, upper)")]),
    ("AVX2 bytes: odd weights unsigned", "cpu_kernels/avx2_int8.cpp", [("odd_w = _mm256_srai_epi16(w, 8)", "odd_w = _mm256_srli_epi16(w, 8)")]),
    ("AVX-512 wrong nibble of INT4", "cpu_kernels/avx512_i4.h", [("*first = _mm512_and_si512(_mm512_slli_epi16(step, 4), high);", "*first = _mm512_and_si512(step, high);")]),
    ("AVX-512 two levels: no multiplier is negative", "cpu_kernels/avx512_i4.h", [("const __mmask16 negative = _mm512_movepi32_mask(m);", "const __mmask16 negative = 0;")]),
    ("AVX-512 two levels: a part has the multipliers of its first group", "cpu_kernels/avx512_int8.cpp", [("b.multipliers[panel + p] + g * kMultipliers", "b.multipliers[panel + p] + 0 * g * kMultipliers")]),
    ("AVX-512 two levels, one row: parts of half the columns", "cpu_kernels/avx512_one_row.h", [("block_left -= part;", "block_left -= 2 * part;")]),
    ("AVX-512 two levels, one row: the first panel's scales for all", "cpu_kernels/avx512_one_row.h", [("_mm512_loadu_ps(two_level_scales(a.w, panel + p))", "_mm512_loadu_ps(two_level_scales(a.w, panel))")]),
    ("AMX two levels: the multipliers of the first group", "cpu_kernels/amx_int8.cpp", [("(s >> shift) * kMultipliers", "0 * (s >> shift) * kMultipliers")]),
    ("AVX2 two levels: multipliers of the upper rows for the lower", "cpu_kernels/avx2_int8.cpp", [("c / b.group * kMultipliers + h * 8", "c / b.group * kMultipliers")]),
    ("AVX2 VNNI two levels: 8 for all", "cpu_kernels/avx2_int8.h", [("_mm256_and_si256(bytes, negative)", "_mm256_setzero_si256()")]),
    ("two levels: a multiplier of sixteen", "cpu_kernels/kernels.h", [("kMaxMultiplier = 15;", "kMaxMultiplier = 17;")]),
    ("two levels: no negative multipliers", "cpu_kernels/two_level.cpp", [("for (const int signed_m : {m, -m})", "for (const int signed_m : {m})")]),
    ("two levels: only the nearest multiplier above", "cpu_kernels/two_level.cpp", [("int m = std::max(1, about - 1)", "int m = std::max(1, about + 1)")]),
    ("a thread keeps its core until it is taken", "src/core/core_turns.h", [("kTurn = 2'000'000", "kTurn = 8'000'000")]),
    ("a thread yields for ever once its core was taken", "src/core/core_turns.h", [("if (now - last_ < kNobody) is_shared_ = false;", "")]),
    ("AVX2 INT4: sums of words saturate", "cpu_kernels/avx2_int8.cpp", [("constexpr int kStepsInWords = 8;", "constexpr int kStepsInWords = 16;")]),
    ("AVX2 INT4: the last words of a part not added", "cpu_kernels/avx2_int8.cpp", [("c < b.part; c += kColumnsInWords", "c == 0; c += kColumnsInWords")]),
    ("AVX2 INT4: a code with the wrong sign", "cpu_kernels/avx2_int8.cpp", [("6, 7, -8, -7, -6, -5, -4, -3, -2, -1, 0", "6, 7, 8, -7, -6, -5, -4, -3, -2, -1, 0")]),
    ("AVX-512 INT4 sixteen times too large", "cpu_kernels/avx512_int8.cpp", [("kI4Unit = 1 / 16.f", "kI4Unit = 1")]),
    ("rows after the widening ones start anew", "cpu_kernels/panels.h", [("sums + kWidening);", "sums);")]),
    ("AVX-512 FP8 words not exchanged when packed", "cpu_kernels/avx512_products.cpp", [("steps[i] = exchange_words(steps[i]);", "{}")]),
    ("AVX-512 FP8 subnormals off by one power", "cpu_kernels/avx512_e4m3.h", [("(121 - shift) << 7", "(120 - shift) << 7")]),
    ("AVX-512 FP8 sign lost", "cpu_kernels/avx512_e4m3.h", [("codes, t.sign, 0xf8)", "codes, t.sign, 0xf0)")]),
    ("widened panels in the room of the first", "cpu_kernels/panels.h", [("b.w[p] = room + p * panel_bytes;", "b.w[p] = room;")]),
    ("AVX-512 last rows of a panel not packed", "cpu_kernels/avx512_products.cpp", [("i < n_rows ? mask : 0", "i < n_rows - 1 ? mask : 0")]),
    ("AMX: the last results never added", "cpu_kernels/amx_tiles.h", [("  pending.add(pending.n_rows);\n", "")]),
    ("AMX: results not added while the next product runs", "cpu_kernels/amx_tiles.h", [("    pending.add(rows_per_tile);\n", "")]),
    ("AMX: the end of x not masked", "cpu_kernels/amx_tiles.h", [("masks[t] = left <= 0 ? 0 : left < kStepBytes ? (__mmask64{1} << left) - 1 : ~__mmask64{0};", "masks[t] = left < kStepBytes ? ~__mmask64{0} : ~__mmask64{0};")]),
    ("AMX: INT4 sixteen times too large", "cpu_kernels/amx_int8.cpp", [("kI4 ? 1 / 16.f : 1", "kI4 ? 1 : 1")]),
    ("AMX: tile 5 loaded from the first rows", "cpu_kernels/amx_tiles.h", [("_tile_loadd(5, x[1] + at, kStepBytes)", "_tile_loadd(5, x[0] + at, kStepBytes)")]),
    ("AMX: tile 3 multiplied from the first rows", "cpu_kernels/amx_tiles.h", [("_tile_dpbf16ps(3, 5, 7)", "_tile_dpbf16ps(3, 4, 7)")]),
    ("AMX: byte tile 3 multiplied from the first rows", "cpu_kernels/amx_tiles.h", [("_tile_dpbusd(3, 5, 7)", "_tile_dpbusd(3, 4, 7)")]),
    ("AMX: one row adds odd products to even ones", "cpu_kernels/amx_bf16.cpp", [("o = _mm512_dpbf16_ps(o, (__m512bh)x_odd,", "e = _mm512_dpbf16_ps(e, (__m512bh)x_odd,")]),
    ("INT4 scales of the wrong row", "src/ops/cpu_weights.cpp", [("(first) + at % together, together", "(first) + (at + 1) % together, together")]),
    ("stored scales of the wrong row when converted", "src/ops/cpu_weights.cpp", [("decode_row(source, stored, first_row + r, row);", "decode_row(source, stored, r, row);")]),
    ("packed INT4: halves of a word exchanged", "src/ops/int4_words.cpp", [("spread(w & 0xffff) | spread(w >> 16) << 4", "spread(w >> 16) | spread(w & 0xffff) << 4")]),
    ("packed INT4: numbers keep the 8 that was added", "src/ops/int4_words.cpp", [("<< 4) ^ 0x88888888;", "<< 4);")]),
    ("packed INT4 converted with another offset", "src/ops/int4_words.cpp", [("static_cast<int>(nibble) - 8", "static_cast<int>(nibble) - 7")]),
    ("packed INT4 converted from the highest bits on", "src/ops/int4_words.cpp", [("i % kPerWord * 4 & 15", "(7 - i % kPerWord) * 4 & 15")]),
    ("packed INT4: sums of codes off by their offset", "src/ops/int4_words.cpp", [("int64_t sum = -8 * n;", "int64_t sum = 0;")]),
    ("packed INT4: one scale for all groups of a row", "src/ops/cpu_weights.cpp", [("row_scales(packed, r).set(row, 0);", "row_scales(packed, r).set(std::vector<float>(n_groups, row[0]), 0);")]),
    ("packed INT4: sums with the scale of the first group", "src/ops/cpu_weights.cpp", [("static_cast<double>(scales.get(c / group))", "static_cast<double>(scales.get(0))")]),
    ("stored scales of the first block when converted", "src/ops/cpu_weights.cpp", [("row[c] *= scales[(stored.col0 + c) / stored.block_cols];", "row[c] *= scales[0];")]),
    ("packed INT4: columns of the stored shape not checked", "src/model/checkpoint.cpp", [("found[0] != rows || found[1] != cols", "found[0] != rows")]),
    ("packed INT4: scales beside the rows, not before them", "src/pack_weights.cpp", [("m.way == Way::kPackWords ? jobs.first : jobs.rest", "jobs.rest")]),
    ("packed INT4 may be asymmetric", "src/model/config.cpp", [("if (!weights.boolean(\"symmetric\", true))", "if (false)")]),
    ("INT8 rounds down", "cpu_kernels/reference.cpp", [("static_cast<int8_t>(std::lrint(from[i] * inverse))", "static_cast<int8_t>(from[i] * inverse)")]),
    ("INT4 never uses its code -8", "cpu_kernels/reference.cpp", [("-8L, 7L", "-7L, 7L")]),
    ("expert outputs added without their weight", "offload/expert_slice.cpp", [("to[r] += weight * part", "to[r] += part")]),
    ("SiLU on the wrong branch", "offload/expert_slice.cpp", [("kernels_.silu_mul({gate, up + i * kRows, gate, n_rows});", "kernels_.silu_mul({up + i * kRows, gate, gate, n_rows});")]),
    ("gate multiplied twice, up never", "offload/expert_slice.cpp", [("product.w = up_weight;", "product.w = kernel_weight(weights.gate);")]),
    ("a group is encoded one piece early", "offload/expert_slice.cpp", [("std::memory_order_acq_rel) > 2)", "std::memory_order_acq_rel) > 3)")]),
    ("weight of another token's pair", "offload/expert_slice.cpp", [("pairs_->weights[group.first + i]", "pairs_->weights[group.first]")]),
    ("output of another token's pair", "offload/expert_slice.cpp", [("pairs_->tokens[group.first + i])", "pairs_->tokens[group.first])")]),
    ("second group of an expert takes the first one's tokens", "offload/expert_slice.cpp", [("product.x.rows = pairs_->tokens.data() + group.first;", "product.x.rows = pairs_->tokens.data() + group.first % kGroupTokens;")]),
    ("scales of encoded rows of another pair", "offload/expert_slice.cpp", [("act_scales_.data() + group.first}", "act_scales_.data()}")]),
    ("sums of experts not cleared", "offload/expert_slice.cpp", [("std::fill_n(sum_.row<float>(t) + first_row, end - first_row, 0.f);", "(void)end;")]),
    ("long items of the second pass end early", "offload/expert_slice.cpp", [("row < end; row += kRows", "row < end - kRows || row == first_row; row += kRows")]),
    ("a node takes the first node's slice", "offload/expert_slice.cpp", [("+ int64_t{node_} * c_.router.n_experts", "")]),
    ("the second pass does not wait for the first", "offload/expert_slice.cpp", [("unfinished_[g].load(std::memory_order_acquire) == 0;", "unfinished_[g].load(std::memory_order_acquire) >= 0;")]),
    ("the last node's sum is not added", "offload/cpu_experts.cpp", [("if (slice->is_empty()) continue;", "if (slice->is_empty() || (slice != slices_.front() && slice == slices_.back())) continue;")]),
    ("columns of a slice from the matrix's first", "src/pack_weights.cpp", [("data + (q.row_data(row) - m.stored.q.row_data(first_row))", "data + (begin - first_row) * stride")]),
    ("every slice has the first one's rows", "src/pack_weights.cpp", [(".rows_from(spec.first_row, spec.rows)", ".rows_from(0, spec.rows)")]),
    ("a slice's scales from the matrix's first columns", "src/core/tensor.h", [("scale.cols_from(block,", "scale.cols_from(0,")]),
    ("a slice begins with a whole block of columns", "src/core/tensor.h", [("static_cast<int>(begin % block_cols)", "0")]),
    ("a slice's scales from the matrix's first rows", "src/core/tensor.h", [("scale.rows_from(block,", "scale.rows_from(0,")]),
    ("a slice begins with a whole block of rows", "src/core/tensor.h", [("static_cast<int>(begin % block_rows)", "0")]),
    ("converted slices take scales of the first columns", "src/ops/cpu_weights.cpp", [("(stored.col0 + c) / stored.block_cols", "c / stored.block_cols")]),
    ("converted slices take scales of the first rows", "src/ops/cpu_weights.cpp", [("(stored.row0 + at) / stored.block_rows", "at / stored.block_rows")]),
    ("kernels take scales of the first columns", "cpu_kernels/panels.h", [("left_ = width_ - w.col0 % width_;", "left_ = width_;")]),
    ("a packed cache for other nodes is read", "src/model_cache.cpp", [('cut += fmt::format(" {}", slice.n);', "(void)slice;")]),
    ("experts lie with the wrong node", "src/ops/cpu_weights.h", [("1 + spec.slice : kSharedRegion", "1 : kSharedRegion")]),
    ("slices in no proportion to cores", "src/core/topology.cpp", [("n += std::ssize(topology.nodes[i].cpus);", "n += topology.nodes[i].cpus.empty() ? 0 : 1;")]),
    ("threads of other nodes take a node's items", "src/core/team.cpp", [("for_node_[places_[thread].node].claim_and_run(thread)", "(for_node_[0].claim_and_run(thread) || for_node_[places_[thread].node].claim_and_run(thread))")]),
    ("checksum of packed blocks not checked", "src/io/packed_cache.cpp", [("require_sound(checksum_of(block) ==", "require_sound(true || checksum_of(block) ==")]),
    ("checksum of the packed header not checked", "src/io/packed_header.cpp", [("require_sound(start.checksum == seal_of(text),", "require_sound(true || start.checksum == seal_of(text),")]),
    ("a packed cache of another checkpoint is read", "src/io/packed_cache.cpp", [("if (header_.key != key) throw", "if (false) throw")]),
    ("scales of the checkpoint are not checked", "src/pack_weights.cpp", [("  check_scales(m.name +", "  if (false) check_scales(m.name +")]),
    ("an unsound packed cache stays", "src/load_weights.cpp", [("if (file) file->discard();", ""), ("found == Cache::kUnsound || ", "")]),
    ("the prefix cache gives the page with the last token too", "src/engine/scheduler.cpp", [("s.next_logits / kPageSize", "n / kPageSize")]),
    ("a prompt that is scored takes pages from the prefix cache", "src/engine/scheduler.cpp", [("s.next_logits / kPageSize", "(n - 1) / kPageSize")]),
    ("a preempted prompt is scored twice", "src/engine/scheduler.cpp", [("    s.next_logits = std::max(s.next_logits, s.n_done);\n", "    if (s.n_pending() == 0) s.next_logits = s.n_done;\n")]),
    ("prompts take more rows of logits than there are", "src/engine/scheduler.cpp", [("n_without + limits_.max_logits - n_planned_logits_", "s.n_pending()")]),
    ("the row of a prompt's token scores the token itself", "src/engine/engine.cpp", [("prompt[row.position + 1]", "prompt[row.position]")]),
    ("pages are found by their hash alone, whatever stood before", "src/engine/page_pool.cpp",
     [("uint64_t hash = combined(0, parent);", "uint64_t hash = combined(0, 0 * parent);"), ("page.parent == parent &&", "true &&")]),
    ("the oldest gives up its pages", "src/engine/scheduler.cpp", [("const auto youngest = std::prev(running_.end());", "const auto youngest = running_.begin();")]),
    ("a request is let in although nothing is left for those that run", "src/engine/scheduler.cpp",
     [("running_.empty() ? 0 : static_cast<int>(running_.size())", "0")]),
    ("a request that is not let in keeps the pages it found", "src/engine/scheduler.cpp", [("    pool_.release(s.pages);\n    return false", "    return false")]),
    ("the beginning of a text is given up before its end", "src/engine/page_pool.cpp",
     [("for (size_t i = pages.size(); i-- > 0;) remove_user(pages[i]);", "for (size_t i = 0; i < pages.size(); ++i) remove_user(pages[i]);")]),
    ("a page counts as full when it is begun", "src/engine/scheduler.cpp",
     [("page < s.n_done / kPageSize", "page < (s.n_done + kPageSize - 1) / kPageSize && size_t(kPageSize) * (page + 1) <= s.tokens.size()")]),
    ("a page is taken while it can still be found", "src/engine/page_pool.cpp", [("    unpublish(pages_[page]);\n    free_", "    free_")]),
    ("prompts come before decodes", "src/engine/scheduler.cpp", [("  plan_decodes();\n  plan_prompts();", "  plan_prompts();\n  plan_decodes();")]),
    ("swapping: another page of host memory comes back", "src/engine/scheduler.cpp", [("page - s.first_swapped]", "page - n_found]")]),
    ("swapping: pages that came back cannot be found", "src/engine/scheduler.cpp", [("    publish(s, n_found);\n", "")]),
    ("swapping: shared pages that were lost are not missed", "src/engine/scheduler.cpp", [("s.host_pages.empty() || n_found < s.first_swapped ? 0", "s.host_pages.empty() ? 0")]),
    ("swapping: the last page does not come back", "src/engine/scheduler.cpp", [("page < pages_for(n_swapped)", "page < n_swapped / kPageSize")]),
    ("swapping: an aborted request keeps its pages of host memory", "src/engine/scheduler.cpp", [("  release_host_pages(it->second);\n", "")]),
    ("swapping: pages of the card that are shared count as kept when they cannot be found", "src/engine/page_pool.h",
     [("pages_[page].n_users > 1 && pages_[page].serial != kUnpublished", "pages_[page].n_users > 1")]),
    ("swapping: the way back costs nothing", "src/engine/swapping.cpp", [(" + bytes / r.to_card_bytes_per_second", "")]),
    ("swapping: a step that was only enqueued counts as computed", "src/engine/swapping.cpp", [("  if (!waited) return;\n", "")]),
    ("swapping: all layers of a page at one place", "src/engine/host_pages.cpp", [(", host += layer_bytes_)", ")")]),
    ("a sampler is made anew for each token", "src/engine/engine.cpp", [("if (!r.sampler)", "if (true)")]),
    ("an answer that met its stop string goes on", "src/engine/engine.cpp", [("!event.token.finish) abort(event.id)", "!event.token.finish) {}")]),
    ("an aborted request keeps its pages", "src/engine/engine.cpp",
     [("if (running_.erase(id) > 0) scheduler_.remove(id);", "running_.erase(id);")]),
    ("half a mark of thinking is given out", "src/server/reasoning.cpp", [("held_.size() - begun_mark(held_, kClose)", "held_.size()")]),
    ("tokens that go on beyond a rule are not looked at", "src/io/grammar/grammar_tokens.cpp", [("if (tokens.exits.empty()) continue;", "continue;")]),
    ("a rule's end forgets who called it", "src/io/grammar/text_states.cpp", [("if (callers.size() > n) changed.push_back(all_frames_[id].node);", "")]),
    ("a property may come again", "src/io/grammar/schema_grammar.cpp", [("if (!begin->is_name) g_.bytes(node,", "g_.bytes(node,")]),
    ("a required property may be left out", "src/io/grammar/schema_grammar.cpp", [("if (!property.required) {", "if (true) {")]),
    ("one item too many", "src/io/grammar/schema_grammar.cpp", [("i < n && i != max; ++i", "i < n && i != max + 1; ++i")]),
    ("quotes in a pattern are not escaped", "src/io/json_escape.cpp", [("c < 0x20 || c == '\"' || c == '\\\\'", "c < 0x20 || c == '\\\\'")]),
    ("an excluded bound is in", "src/io/grammar/number_grammar.cpp", [("const bool has_max = m.max && !m.below_max", "const bool has_max = m.max")]),
    ("half a pair of surrogates is a character", "src/io/grammar/json_rules.cpp", [("hex(g, d, 0, 7, hex2);", "hex(g, d, 0, 15, hex2);")]),
    ("a grammar holds while the model thinks", "src/engine/token_constraint.cpp", [("thinking_(options_.after_thinking)", "thinking_(false)")]),
    ("an answer may end before its text does", "src/engine/token_constraint.cpp", [("set(mask_, token, states_.may_end(state_));", "set(mask_, token, true);")]),
    ("positions start anew in every chunk", "src/engine/step_arrays.h", [("positions_.push_back(i);", "positions_.push_back(i - first);")]),
    ("logits of the token before", "src/engine/step_arrays.h", [("logit_rows_.push_back(begin + i);", "logit_rows_.push_back(begin + i > 0 ? begin + i - 1 : 0);")]),
    ("temperature multiplies", "src/engine/sampler.cpp", [("(logits[t] - max) / params_.temperature", "(logits[t] - max) * params_.temperature")]),
    ("every token uses experts of its own", "offload/plan/workload.cpp",
     [("1.0 - std::pow(1.0 - share, tokens)", "std::min(1.0, share * tokens)")]),
    ("tensor parallel ranks share the latent cache", "offload/plan/placement.cpp",
     [("at(d).kv_bytes += kv;", "at(d).kv_bytes += kv / stage.tp;")]),
    ("dispatch in BF16", "offload/plan/cost.cpp", [("(c.dim + c.dim / kScaleColumns * kFloatBytes)", "(2 * c.dim + 0 * kScaleColumns)")]),
    ("INT4 scales left out of an expert's bytes", "offload/plan/cost.cpp", [("scale_bytes = rows * blocks(cols, format.group) * kBf16Bytes;", "scale_bytes = 0;")]),
    ("more hot experts than fit", "offload/plan/assign.cpp", [("    --slots[top.seat];\n", "")]),
    ("an exact search that gives up too early", "offload/plan/assign.cpp", [("if (least >= best_) return;", "if (least * 1.2 >= best_) return;")]),
    ("an expert without owner passes", "offload/plan/placement.cpp", [("require(owned[e], ", "require(owned[e] || true, ")]),
    ("exceeded memory passes", "offload/plan/placement.cpp", [("require(m.free_bytes() >= 0,", "require(m.free_bytes() >= 0 || true,")]),
    ("a rank is as busy as the mean one", "offload/plan/expert_load.cpp", [("if (n <= 1) return mean;", "if (n <= 1e9) return mean;")]),
    ("all tokens of a rank leave it", "offload/plan/layer_time.cpp", [("if (load.owner == backbone) continue;", "")]),
    ("a multiply-add is one operation at the ridge", "offload/plan/rules.cpp", [("kOpsPerWeight = 2;", "kOpsPerWeight = 1;")]),
    ("links send everything at once", "offload/plan/simulate.cpp", [("free_at = std::max(from, free_at) + seconds;", "free_at = from + seconds;")]),
    ("figures of zero pass", "src/io/json_fields.cpp", [("if (!(number > 0 && number <= max))", "if (!(number >= 0 && number <= max))")]),
    ("unknown fields pass", "src/io/json_fields.cpp", [("require(known_.contains(key),", "require(known_.contains(key) || true,")]),
    ("an expert on another device passes", "offload/plan/executed_parts.cpp", [("      for (const Device d : group.owners)\n        require(runs_on(d),", "      for (const Device d : group.owners)\n        require(d.host == 0,")]),
    ("a layer's second format passes", "offload/plan/executed_parts.cpp", [("require(group.format == first->format,", "require(group.format == first->format || true,")]),
    ("a format as stored is converted all the same", "offload/plan/executed_parts.cpp", [("if (format && *format != stored) formats[l] = format;", "formats[l] = format;")]),
    ("NUMA slices of a placement are not obeyed", "src/pack_weights.cpp", [("if (!experts.node_columns().empty()) {", "if (false) {")]),
    ("every layer gets the first format", "src/ops/experts_layout.h", [("of_layers_.empty() ? all_ : of_layers_[layer];", "of_layers_.empty() ? all_ : of_layers_[layer > 0];")]),
    ("the packed cache forgets the layers' formats", "src/model_cache.cpp", [("for (const auto& format : experts.of_layers()) names += ", "for (const auto& format : experts.of_layers()) if (false) names += ")]),
    ("memory is full an expert later", "offload/plan/placement.cpp", [("if (room >= 0 && room < bytes)", "if (room >= bytes && room < 2 * bytes)")]),
    ("choices of all layers are counted as one's", "offload/routing_recorder.cpp", [("counts_.of_layer[batch.layer]", "counts_.of_layer.back()")]),
    ("a token's last choice is not counted", "offload/routing_recorder.cpp", [("k < ids.cols; ++k", "k + 1 < ids.cols; ++k")]),
    ("statistics count choices as tokens", "offload/plan/workload.cpp", [("chosen / std::max(1, c.router.n_active)", "chosen")]),
    ("a machine's own curves are not used", "offload/plan/rates.cpp", [("m.peak, m.isa, m.curves,", "m.peak, m.isa, {},")]),
    ("curves of the machine's CPUs are used for attention alone", "offload/plan/expert_load.cpp", [("rows / used, rates.measured)", "rows / used)")]),
    ("skewed routing is measured efficiency too", "src/bench/measured_curves.cpp", [(' && row.value("routing", "") == "uniform"', "")]),
    ("several models' rows make one curve", "src/bench/measured_curves.cpp", [("if (s.model == model && at > 0)", "if (at > 0)")]),
    ("curves may descend", "src/io/machine_json.cpp", [("if (!(x > before &&", "if (!(x > 0 * before &&")]),
    ("nodes may contradict the machine's memory", "src/io/machine_json.cpp", [("if (m.memory_bytes() != memory)", "if (false)")]),
    ("FP8 codes of a word exchanged on the card", "gpu_kernels/e4m3.h", [("0x1404", "0x0414")]),
    ("skinny product: the second row takes the first one's scale", "gpu_kernels/skinny_product.cu", [("scale[1] = of_rows[8];", "scale[1] = of_rows[0];")]),
    ("skinny product: counters left as they are", "gpu_kernels/skinny_product.cu", [("    if (s.last) *counter = 0;\n", "")]),
    ("skinny product: columns of one block forgotten", "gpu_kernels/skinny_product.cu", [("split < gridDim.y; ++split", "split + 1 < gridDim.y; ++split")]),
    ("per head: scale of the first columns for all", "gpu_kernels/per_head_product.cu", [("a.w.scale + blockIdx.x * kColumns / a.w.block_cols", "a.w.scale")]),
    ("matrix tile: a copy is used before it is done", "gpu_kernels/matrix_tile.h", [("cp_async_wait<kStages - 2>();", "cp_async_wait<kStages - 1>();")]),
    ("matrix tile: scales of the next block come too early", "gpu_kernels/matrix_tile.h", [("s.scale[(block + 1) % 2]", "s.scale[block % 2]")]),
    ("grouped experts: gate and up exchanged", "gpu_kernels/grouped_product.cu", [("g = sum[m][n][i + e], u = sum[m][n + kHalf][i + e]", "u = sum[m][n][i + e], g = sum[m][n + kHalf][i + e]")]),
    ("grouped experts: a tile reaches into the next expert", "gpu_kernels/grouped_product.cu", [("min(tile_rows, end - first)", "tile_rows")]),
    ("GPU decode: a token sees its successor", "gpu_kernels/mla_decode.cu", [("w.before + 1 + (w.first_row", "w.before + 2 + (w.first_row")]),
    ("GPU decode: sums rescaled only where the first row asks", "gpu_kernels/mla_decode.cu", [("rescale[lane] != 1", "rescale[0] != 1")]),
    ("GPU decode: no barrier between weights and their use", "gpu_kernels/mla_decode.cu", [("    tiles.advance(tile + 1, s);\n    __syncthreads();", "    tiles.advance(tile + 1, s);")]),
    ("GPU decode: shares joined as if they were equal", "gpu_kernels/mla_decode.cu", [("exp2_approx(a.partial_lse[i * a.n_rows + row] - max);", "1;")]),
    ("GPU decode: every tile in the first page", "gpu_kernels/mla_tiles.h", [("      page_ = page_of(tile + 1);  // long before it is needed\n", "")]),
    ("GPU decode: FP8 latents with the first scale alone", "gpu_kernels/mla_tiles.h", [("kMaxKvRank)[chunk / 8]", "kMaxKvRank)[0]")]),
    ("GPU prefill: a token does not see itself", "gpu_kernels/mla_prefill.cu", [("before + 1 + first_token - tile", "before + first_token - tile")]),
    ("GPU prefill: later heads take the first heads' scales", "gpu_kernels/mla_prefill.cu", [("    w.row0 += first * head_dim;\n", "")]),
    ("GPU: sums of a norm miss a warp", "gpu_kernels/reduce.h", [("for (int warp = 0; warp < kThreads / 32; ++warp) sum", "for (int warp = 1; warp < kThreads / 32; ++warp) sum")]),
    ("GPU: a warp's sum stops at eight lanes", "gpu_kernels/reduce.h", [("for (int distance = 16; distance > 0; distance /= 2) v += ", "for (int distance = 4; distance > 0; distance /= 2) v += ")]),
    ("GPU: RoPE turns the other way", "gpu_kernels/elementwise.cu", [("p[1] = even * sin + odd * cos;", "p[1] = odd * cos - even * sin;")]),
    ("GPU: SiLU without its sigmoid", "gpu_kernels/elementwise.cu", [("x / (1 + expf(-x)) * a", "x * a")]),
    ("GPU: rows of the cache by token, not by page", "src/ops/cuda_batch.cpp", [("s.kv_pages[position / kPageSize] * kPageSize + position % kPageSize;", "position;")]),
    ("GPU: groups ranked by their best expert", "gpu_kernels/router.cu", [("kind == GroupScore::kSumOfBestTwo && size > 1", "false")]),
    ("GPU: bias goes into the experts' weights", "gpu_kernels/router.cu", [("s.choice[best] = -INFINITY;\n      ids[k] = best;\n      weights[k] = s.score[best];", "ids[k] = best;\n      weights[k] = s.choice[best];\n      s.choice[best] = -INFINITY;")]),
    ("GPU: of equal scores the higher expert wins", "gpu_kernels/router.cu", [("a.value == b.value && a.at < b.at", "a.value == b.value && a.at > b.at")]),
    ("experts of the card are kept in host memory too", "offload/plan/executed_parts.cpp", [("  parts.experts.keep_elsewhere(parts.card->experts);\n", "")]),
    ("an expert on a GPU without the backbone passes", "offload/plan/executed_parts.cpp", [("      require(on_gpu,\n", "      require(true,\n")]),
    ("GPU: experts left out are sorted as rows", "gpu_kernels/sort_pairs.cu", [("< 0) a.row_of[pair] = -1;", "< 0) a.row_of[pair] = 0;")]),
    ("GPU: an expert of the card is handed down too", "gpu_kernels/hand_off.cu", [("place < 0 ? id : -1;", "id;")]),
    ("GPU: bytes are handed down as they would be signed", "gpu_kernels/hand_off.cu", [("static_cast<uint32_t>(128 + ", "static_cast<uint32_t>(127 + ")]),
    ("GPU: zeros behind a row are left out", "gpu_kernels/hand_off.cu", [("first + i < a.dim ? x[first + i] : 0;", "x[min(first + i, a.dim - 1)];")]),
    ("GPU: panels of FP8 are read as those of BF16", "gpu_kernels/unpack.cu", [("if (!fp8) return", "if (true) return")]),
    ("GPU: rows of panels are unpacked in steps of 8", "gpu_kernels/unpack.cu", [("step * kStepBytes + row / 4 * 16", "step * kStepBytes + row / 8 * 32")]),
    ("hybrid: the CPU does not wait for the card", "offload/hybrid_experts.cpp", [("  await_card(layer);\n", "")]),
    ("hybrid: the card does not wait for the CPU", "offload/hybrid_experts.cpp", [("    sum_is_there_.await(stream_);\n", "")]),
    ("hybrid: a failed step holds the card up", "offload/hybrid_experts.cpp", [("  for (int i = 0; i < n_layers; ++i) sum_is_there_.raise();\n", "")]),
    ("hybrid: a failed step is forgotten", "offload/hybrid_experts.cpp", [("  failed_ = true;\n", "")]),
    ("hybrid: the sum is added to the one before", "offload/hybrid_experts.cpp", [("  std::memset(sum.data, 0, static_cast<size_t>(sum.rows * sum.row_bytes()));\n", "")]),
    ("hybrid: a replay is not followed through its last layer", "offload/hybrid_experts.cpp", [("for (int layer = 0; layer < std::ssize(layers_); ++layer) {", "for (int layer = 0; layer + 2 < std::ssize(layers_); ++layer) {")]),
    ("streaming: the CPU computes what is brought, too", "offload/cuda_streaming.cpp", [("if (places[id] >= 0) id = -1;", "(void)id;")]),
    ("streaming: the CPU's part is not added", "offload/cuda_streaming.cpp", [("if (any_on_cpu_) hand_up(step.sum, y);", "if (any_on_cpu_) cpu_.compute_below(c_.router.n_experts);")]),
    ("streaming: the sum is added to the one before", "offload/cuda_streaming.cpp", [("[&](int64_t t, int) { std::fill_n(sum.row<float>(t), c_.dim, 0.f); }", "[&](int64_t, int) {}")]),
    ("streaming: experts with few rows are brought ahead", "offload/cuda_streaming.cpp", [("return rows_asked_[a] > rows_asked_[b];", "return rows_asked_[a] < rows_asked_[b];")]),
    ("streaming: the card does not wait for the link", "offload/cuda_streaming.cpp", [("  stream_.wait_for(stage.copied);\n", "")]),
    ("streaming: the link does not wait for the card", "offload/cuda_streaming.cpp", [("  copies_.wait_for(stage.unpacked);\n", "")]),
    ("streaming: the team does not wait for the link", "offload/cuda_streaming.cpp", [("  stage.copied.wait();\n", "")]),
    ("GPU: the choices of replayed steps are not counted", "offload/cuda_routing_recorder.cpp", [("  experts_.follow(n_tokens);\n  count(n_tokens);", "  experts_.follow(n_tokens);")]),
    ("GPU: choices are counted while a step is recorded", "offload/cuda_routing_recorder.cpp", [(" && !stream_.is_recording()", "")]),
    ("GPU: choices of all layers are one's", "offload/cuda_routing_recorder.cpp", [("int64_t{layer} * max_tokens_ * n_active", "int64_t{0} * layer * max_tokens_ * n_active")]),
    ("hybrid: a decode step allocates", "offload/hybrid_experts.cpp", [("cpu_.submit(batch_on_cpu(layer, n_tokens));", "cpu_.submit(*std::make_unique<ExpertBatch>(batch_on_cpu(layer, n_tokens)));")]),
    ("streaming: a division allocates", "offload/expert_division.cpp", [("order.resize(rows.size());", "order = std::vector<int>(rows.size());")]),
    ("streaming: two experts have the scales of one", "offload/cuda_streaming.cpp", [("w.scale_stride = (place_of(layer, experts.back()) - first) * each;", "w.scale_stride = 0;")]),
    ("experts in parts: each clears the sum", "offload/expert_slice.cpp", [("is_first_ && t < n_tokens_", "t < n_tokens_")]),
    ("division: experts with few rows are brought", "offload/expert_division.cpp", [("rows[a] > rows[b] : a < b", "rows[a] < rows[b] : a < b")]),
    ("division: the team copies for nothing", "offload/expert_division.cpp", [("cpu += rates.copy_seconds - ", "cpu -= ")]),
    ("division: the link brings again what is ahead", "offload/expert_division.cpp", [("double link = 0, card = 0, cpu = 0;", "double link = rates.link_seconds * static_cast<double>(ahead.size()), card = 0, cpu = 0;")]),
    ("pages of any origin may read answers", "src/server/cors.cpp", [("} else if (has(page.origin)) {", "} else {")]),
    ("a page of one origin is cached for all", "src/server/cors.cpp", [("\\r\\nVary: Origin\\r\\n", "\\r\\n")]),
    ("TLS ends without a word", "src/server/tls.cpp", [("co_await tls_->async_shutdown(asio::redirect_error(asio::use_awaitable, error));", "socket_.shutdown(Socket::shutdown_send, error);")]),
    ("plain HTTP at a port for TLS gets no answer", "src/server/tls.cpp", [("if (spoke_plain_http(error))", "if (false)")]),
    ("streaming: all experts have the first one's scales", "offload/cuda_streaming.cpp", [(".as<float>() + first * each + scales_before(m)", ".as<float>() + scales_before(m)")]),
    ("a replayed step is not followed", "src/engine/deepseek.cpp", [("experts_.follow(batch.n());", "{}")]),
    ("GPU: pairs are sorted without their experts' offsets", "gpu_kernels/sort_pairs.cu", [("for (int e = 0; e < expert; ++e) row += s.count[e];", "")]),
    ("GPU: attention sees the token after its own", "gpu_kernels/plain_attention.cu", [("n_keys = a.at.positions[token] + 1;", "n_keys = a.at.positions[token] + 2;")]),
    ("GPU: old keys are not rescaled", "gpu_kernels/plain_attention.cu", [("acc[i] = acc[i] * rescale + tile;", "acc[i] += tile;")]),
    ("GPU: an expert's scales are the first one's", "gpu_kernels/plain_products.cu", [("if (own.scale) own.scale += expert * w.scale_stride;", "")]),
    ("GPU: the last rows of a matrix stay behind", "src/ops/cuda_weights.cpp", [("std::min(at_once, n_rows - done), row", "std::min(at_once, n_rows - done) - (n_rows > 1), row")]),
    ("GPU: sequences of one form begin with the batch's first", "src/ops/cuda_batch.cpp", [(".first_token = at(first_token_) + first,", ".first_token = at(first_token_),")]),
    ("Python's shuffle takes the low bits of a word", "src/bench/serving/python_random.cpp", [("words_()) >> unused_bits", "words_()) & (UINT32_MAX >> unused_bits)")]),
    ("numpy draws for a range of one number", "src/bench/serving/python_random.cpp", [("if (most == 0) return low;", "if (most == 0) words_();")]),
    ("the seed's state is mixed once too rarely", "src/bench/serving/python_random.cpp", [("for (size_t i = 1; i < n; ++i, step())", "for (size_t i = 2; i < n; ++i, step())")]),
    ("usage beside empty texts counts", "src/bench/serving/answer_reader.cpp", [("  if (text.empty()) return;\n  count_gap(seconds);\n  output_.text += text;\n  take_usage(event, output_.output_tokens);", "  take_usage(event, output_.output_tokens);\n  if (text.empty()) return;\n  count_gap(seconds);\n  output_.text += text;")]),
    ("an event without choices is passed over", "src/bench/serving/answer_reader.cpp", [("  const json& choice = first_choice(event, data);\n  require(choice.contains(\"text\")", "  if (!event.contains(\"choices\") || event[\"choices\"].empty()) return;\n  const json& choice = first_choice(event, data);\n  require(choice.contains(\"text\")")]),
    ("an empty answer is a success", "src/bench/serving/answer_reader.cpp", [("  require(any_, \"the answer is empty\");\n", "")]),
    ("percentiles take the nearest value", "src/bench/serving/serving_report.cpp", [("(at - static_cast<double>(low))", "0")]),
    ("interrupted answers count as they were asked", "src/bench/serving/serving_report.cpp", [("o.success ? o.output_tokens : n_text", "o.output_tokens")]),
    ("a point that ties is off the front", "src/bench/serving/serving_report.cpp", [("other.metrics.output_per_second() > it.output_per_second() &&\n           other.metrics.user_speed() > it.user_speed()", "other.metrics.output_per_second() >= it.output_per_second() &&\n           other.metrics.user_speed() >= it.user_speed()")]),
    ("the search stops at the first power of two", "src/bench/serving/serving_bench.cpp", [("while (bad - good > std::max(1, good / 20))", "while (false && bad - good > std::max(1, good / 20))")]),
    ("prompts of one offset are alike", "src/bench/serving/dataset.cpp", [("(static_cast<size_t>(offsets[i]) + i + j) %", "(static_cast<size_t>(offsets[i]) + j) %")]),
    ("GPU: a stream does not wait for the CPU", "gpu_kernels/signals.cu", [("load_acquire(a.word) - n) < 0)", "load_acquire(a.word) - n) < -1)")]),
    ("GPU: every raise is the first", "gpu_kernels/signals.cu", [("  *a.count = n;\n  store_release", "  store_release")]),
    ("GPU: an await is not counted", "gpu_kernels/signals.cu", [("  }\n  *a.count = n;\n", "  }\n")]),
    ("drawing on the card: of equals the higher token", "gpu_kernels/sampling.cu", [("(0xffffffffu - static_cast<uint32_t>(token))", "static_cast<uint32_t>(token)")]),
    ("drawing on the card: min-p forgotten", "gpu_kernels/sampling.cu", [("&& w >= how.min_p ?", "?")]),
    ("drawing on the card: top-p of all tokens, not of top-k", "gpu_kernels/sampling.cu", [("return key_of(w, t) >= of_top_k ? whole(w) : 0;", "return whole(w);")]),
    ("drawing on the card: top-p keeps one more", "gpu_kernels/sampling.cu", [("for (; s.of_digit[digit] < wanted; --digit)", "for (; s.of_digit[digit] <= wanted && digit > lane * kEach; --digit)")]),
    ("drawing on the card: the token before the drawn one", "gpu_kernels/sampling.cu", [("for (; s.of_warp[part] <= left; ++part)", "for (; s.of_warp[part] < left; ++part)")]),
    ("drawing on the card: holes are drawn", "gpu_kernels/sampling.cu", [("row[t] = is_allowed(a, t) ? expf(", "row[t] = true ? expf(")]),
    ("FP8 cache: ties away from even", "gpu_kernels/e4m3.h", [(" + 0x7ffff + (u >> 20 & 1);", " + 0x80000;")]),
    ("FP8 cache: scales use half of the range", "gpu_kernels/append_fp8.cu", [("largest / 448 : 1", "largest / 224 : 1")]),
    ("FP8 cache: what is not a number becomes one", "gpu_kernels/append_fp8.cu", [("fabsf(v[i]) < INFINITY ? fabsf(v[i]) : INFINITY", "fabsf(v[i])")]),
    ("GPU decode: keys of an FP8 cache behind the latents that are used", "gpu_kernels/mla_decode.cu", [("a.cache.fp8 ? kMaxKvRank : rank;", "rank;")]),
    ("GPU: one graph for all numbers of sequences", "src/ops/cuda_ops.cpp", [("{memory, batch_.n_tokens(), batch_.n_logits()};", "{memory, 1, 1};")]),
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


def build(tests):
    built = run(["cmake", "--build", str(COPY / "build"), "--target", *tests])
    if built.returncode != 0:
        raise ValueError(f"does not compile: {built.stdout[-400:]}")


def program(test):
    folder = COPY / "build" / "tests"
    return folder / "emulate" / test if test.startswith("emulated") else folder / test


def first_failing_test(tests):
    for test in tests:
        if test.endswith(".py"):
            build(["tandem"])
            command = [sys.executable, str(ROOT / "tests" / test), str(COPY / "build" / "tandem"), "--failfast"]
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
        first = next((tests for start, tests in TESTS_OF.items() if path.startswith(start)), [])
        return first_failing_test([*first, *(test for test in TESTS if test not in first)])
    finally:
        target.write_text(original, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="part of a mutant's name")
    parser.add_argument("--write", action="store_true", help="write docs/mutants.md")
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
        table = "\n".join(["# Mutation check", "",
                           f"`make mutants` plants these bugs one by one; the tests caught {len(chosen) - missed} of {len(chosen)}.",
                           "", "| planted bug | in | caught first by |", "|---|---|---|", *rows, ""])
        (ROOT / "docs" / "mutants.md").write_text(table, encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
