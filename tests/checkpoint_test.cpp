// Checks of a checkpoint's tensors against its configuration, with errors that name the tensor.
#include "model/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>

#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"

namespace tandem {
namespace {

// One dense and two MoE layers, FP8 in blocks of 4 that do not divide the matrices, one MTP layer.
ModelConfig small_config() {
  ModelConfig c;
  c.dim = 18;
  c.vocab = 11;
  c.n_layers = 3;
  c.n_dense_layers = 1;
  c.dense_dim = 10;
  c.expert_dim = 6;
  c.scale_block = 4;
  c.mla = {.n_heads = 2, .q_rank = 7, .kv_rank = 5, .nope_dim = 3, .rope_dim = 2, .v_dim = 4};
  c.router.n_experts = 4;
  c.router.n_active = 2;
  c.router.n_groups = 2;
  c.router.n_active_groups = 1;
  return c;
}

using Tensors = std::vector<FakeTensor>;

FakeTensor& tensor(Tensors& tensors, const std::string& name) {
  const auto found =
      std::find_if(tensors.begin(), tensors.end(), [&](const auto& t) { return t.name == name; });
  check(found != tensors.end(), name);
  return *found;
}
void drop(Tensors& tensors, const std::string& name) {
  tensors.erase(tensors.begin() + (&tensor(tensors, name) - tensors.data()));
}

// The error of stored_weights() for these tensors, or "no error".
std::string error_with(const ModelConfig& config, const Tensors& tensors) {
  const TempDirectory dir;
  write_checkpoint(dir.path(), tensors, 2);
  const WeightStore store(dir.path());
  return error_of([&] { stored_weights(store, config); });
}
// The error of stored_weights() after `change` to a valid checkpoint of small_config().
std::string error_after(const std::function<void(Tensors&)>& change) {
  Tensors tensors = tensors_of(small_config());
  change(tensors);
  return error_with(small_config(), tensors);
}

const std::string kExpert = "model.layers.2.mlp.experts.3.up_proj.weight";

TEST(Checkpoint, FillsEverySlotWithItsOwnTensor) {
  const ModelConfig config = small_config();
  const TempDirectory dir;
  write_checkpoint(dir.path(), tensors_of(config), 3);
  const WeightStore store(dir.path());
  ModelWeights weights = stored_weights(store, config);
  int n = 0;
  for_each_weight(weights, config, [&](const WeightSpec& spec, const QuantView& w) {
    ++n;
    EXPECT_EQ(w.q.data, store.find(spec.name)->data) << spec.name;
    EXPECT_EQ(w.q.rows, spec.rows) << spec.name;
    EXPECT_EQ(w.q.cols, spec.cols) << spec.name;
    const StoredTensor* scale = store.find(spec.name + "_scale_inv");
    EXPECT_EQ(w.scale.data, scale ? scale->data : nullptr) << spec.name;
  });
  EXPECT_EQ(n, 67);
  EXPECT_TRUE(checkpoint_warnings(weights).empty());
}

TEST(Checkpoint, NamesWhatIsMissing) {
  EXPECT_EQ(error_after([](Tensors&) {}), "no error");
  EXPECT_TRUE(says(error_after([](Tensors& t) { drop(t, kExpert); }), kExpert + " is missing"));
  EXPECT_TRUE(says(error_after([](Tensors& t) { drop(t, "lm_head.weight"); }),
                   "lm_head.weight is missing"));
  EXPECT_TRUE(says(error_after([](Tensors& t) { drop(t, kExpert + "_scale_inv"); }),
                   kExpert + "_scale_inv\" is missing"));
}

TEST(Checkpoint, NamesAWrongShapeWithExpectedAndFound) {
  EXPECT_TRUE(says(error_after([](Tensors& t) {
                     tensor(t, kExpert).shape = {18, 6};
                   }),
                   kExpert + " is F8_E4M3 [18, 6], expected F8_E4M3, BF16, F16 or F32 [6, 18]"));
  EXPECT_TRUE(says(error_after([](Tensors& t) {
                     tensor(t, "model.norm.weight").shape = {1, 18};
                   }),
                   "model.norm.weight is BF16 [1, 18], expected BF16, F16 or F32 [18]"));
  EXPECT_TRUE(says(error_after([](Tensors& t) {
                     tensor(t, kExpert + "_scale_inv").shape = {5, 2};
                   }),
                   "is F32 [5, 2], expected F32 [2, 5]"));
}

TEST(Checkpoint, NamesAWrongType) {
  const auto error = [](const std::string& name, const std::string& dtype) {
    return error_after([&](Tensors& t) { tensor(t, name).dtype = dtype; });
  };
  const std::string embed = "model.embed_tokens.weight", norm = "model.norm.weight",
                    gate = "model.layers.1.mlp.gate.weight",
                    bias = "model.layers.1.mlp.gate.e_score_correction_bias";
  EXPECT_TRUE(
      says(error(embed, "F8_E5M2"), embed + " is F8_E5M2 [11, 18], expected BF16, F16 or F32"));
  EXPECT_TRUE(
      says(error(embed, "F8_E4M3"), embed + " is F8_E4M3 [11, 18], expected BF16, F16 or F32"));
  EXPECT_TRUE(says(error(embed, "I64"), embed + " is I64"));
  EXPECT_TRUE(says(error("lm_head.weight", "F8_E4M3"), "lm_head.weight_scale_inv\" is missing"));
  EXPECT_TRUE(says(error(norm, "F8_E4M3"), norm + " is F8_E4M3 [18], expected BF16, F16 or F32"));
  EXPECT_TRUE(says(error(gate, "F8_E4M3"), gate + " is F8_E4M3"));
  for (const std::string& name : {embed, norm, gate, bias})
    for (const char* dtype : {"BF16", "F16", "F32"}) EXPECT_EQ(error(name, dtype), "no error");
  ModelConfig plain = small_config();
  plain.scale_block = 0;
  EXPECT_TRUE(says(error_with(plain, tensors_of(small_config())), "no quantization_config"));
  EXPECT_EQ(error_with(plain, tensors_of(plain)), "no error");
}

TEST(Checkpoint, NamesWhatDoesNotBelong) {
  const auto error = [](const std::string& name) {
    return error_after([&](Tensors& t) { t.push_back({name, "BF16", {3}}); });
  };
  EXPECT_TRUE(says(error("visual.patch"), "\"visual.patch\" BF16 [3] of "));
  EXPECT_TRUE(says(error("visual.patch"), "model-00002-of-000002.safetensors is not part of"));
  EXPECT_TRUE(says(error_after([](Tensors& t) {
                     t.insert(t.begin(), {"visual.first", "BF16", {3}});
                   }),
                   "\"visual.first\" BF16 [3] of "));
  EXPECT_TRUE(says(error("model.layers.4.input_layernorm.weight"), "not part of"));
  EXPECT_TRUE(says(error("model.layers.3x.weight"), "not part of"));
  EXPECT_TRUE(says(error("model.layers.3"), "not part of"));
  EXPECT_TRUE(says(error("model.norm.weight_scale_inv"), "not part of"));
  EXPECT_TRUE(says(error("model.layers.0.self_attn.o_proj.bias"), "not part of"));
}

TEST(Checkpoint, IgnoresWhatTheMainModelDoesNotUse) {
  const auto error = [](const std::string& name) {
    return error_after([&](Tensors& t) { t.push_back({name, "F32", {3}}); });
  };
  EXPECT_EQ(error("model.layers.3.any.thing"), "no error");
  EXPECT_EQ(error("model.layers.0.self_attn.rotary_emb.inv_freq"), "no error");
  EXPECT_EQ(error("model.layers.0.self_attn.rotary_emb.cos_cached"), "no error");
  EXPECT_EQ(error("model.layers.0.self_attn.rotary_emb.sin_cached"), "no error");
  ModelConfig without_mtp = small_config();
  without_mtp.n_mtp_layers = 0;
  EXPECT_TRUE(says(error_with(without_mtp, tensors_of(small_config())), "\"model.layers.3."));
}

TEST(Checkpoint, ATiedHeadIsTheEmbedding) {
  ModelConfig tied = small_config();
  tied.tied_head = true;
  const TempDirectory dir;
  write_checkpoint(dir.path(), tensors_of(tied), 1);
  const WeightStore store(dir.path());
  EXPECT_EQ(store.find("lm_head.weight"), nullptr);
  const ModelWeights weights = stored_weights(store, tied);
  EXPECT_EQ(weights.head.q.data, store.find("model.embed_tokens.weight")->data);
  // A separate head beside a tied embedding is ignored.
  EXPECT_EQ(error_with(tied, tensors_of(small_config())), "no error");
}

TEST(Checkpoint, SaysHowManyMoreProblemsThereAre) {
  const std::string error = error_after([](Tensors& t) {
    std::erase_if(t, [](const auto& x) { return x.name.starts_with("model.layers.1."); });
  });
  EXPECT_TRUE(says(error, "model.layers.1.input_layernorm.weight is missing; "));
  EXPECT_TRUE(says(error, "; and 23 more tensors"));
}

TEST(Checkpoint, WarnsOfRoundedRouterBiases) {
  Tensors tensors = tensors_of(small_config());
  tensor(tensors, "model.layers.1.mlp.gate.e_score_correction_bias").dtype = "BF16";
  const TempDirectory dir;
  write_checkpoint(dir.path(), tensors, 1);
  const WeightStore store(dir.path());
  const auto warnings = checkpoint_warnings(stored_weights(store, small_config()));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_TRUE(says(warnings[0], "of 1 layers are stored in 16 bits"));
}

TEST(Checkpoint, RefusesScalesThatAreNoNumbers) {
  const auto error = [](float bad) {
    Tensors tensors = tensors_of(small_config());
    FakeTensor& scale = tensor(tensors, kExpert + "_scale_inv");
    std::vector<float> values(10, 0.5f);
    values[7] = bad;
    scale.data.resize(40);
    std::memcpy(scale.data.data(), values.data(), 40);
    // One odd byte before the scales, so that no float is aligned.
    tensors.insert(tensors.begin(), {"model.layers.3.odd", "F8_E4M3", {1}});
    const TempDirectory dir;
    write_checkpoint(dir.path(), tensors, 1);
    const WeightStore store(dir.path());
    const ModelWeights weights = stored_weights(store, small_config());
    const TensorView& scales = weights.layers[2].experts[3].up.scale;
    return error_of([&] { check_scales(kExpert + "_scale_inv", scales); });
  };
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(error(0), "no error");
  EXPECT_TRUE(says(error(std::nanf("")), kExpert + "_scale_inv[1][2] is nan"));
  EXPECT_TRUE(says(error(inf), "is inf"));
  EXPECT_TRUE(says(error(-0.5f), "is -0.5"));
}

ModelConfig int4_config() {
  ModelConfig c = small_config();
  c.dim = 64;
  c.expert_dim = 32;
  c.scale_block = 0;
  c.expert_group = 32;
  c.n_mtp_layers = 0;
  return c;
}

std::string int4_error_after(const std::function<void(Tensors&)>& change) {
  Tensors tensors = tensors_of(int4_config());
  change(tensors);
  return error_with(int4_config(), tensors);
}

TEST(Checkpoint, PackedInt4FillsTheExperts) {
  const TempDirectory dir;
  write_checkpoint(dir.path(), tensors_of(int4_config()), 2);
  const WeightStore store(dir.path());
  const ModelWeights weights = stored_weights(store, int4_config());
  const QuantView& down = weights.layers[2].experts[3].down;
  const std::string name = "model.layers.2.mlp.experts.3.down_proj.weight";
  EXPECT_EQ(down.q.data, store.find(name + "_packed")->data);
  EXPECT_EQ(down.q.dtype, DType::kI4Words);
  EXPECT_EQ(down.q.rows, 64);
  EXPECT_EQ(down.q.cols, 32);
  EXPECT_EQ(down.scale.data, store.find(name + "_scale")->data);
  EXPECT_EQ(down.scale.dtype, DType::kBF16);
  EXPECT_EQ(down.block_rows, 1);
  EXPECT_EQ(down.block_cols, 32);
  EXPECT_EQ(weights.layers[2].experts[3].up.scale.cols, 2);
  EXPECT_EQ(weights.layers[2].ffn.up.q.dtype, DType::kBF16);
}

TEST(Checkpoint, NamesWhatIsWrongWithPackedInt4) {
  const auto error = [](const std::string& part, const FakeTensor& other) {
    return int4_error_after([&](Tensors& t) {
      FakeTensor& found = tensor(t, kExpert + part);
      found.dtype = other.dtype;
      found.shape = other.shape;
    });
  };
  EXPECT_EQ(int4_error_after([](Tensors&) {}), "no error");
  for (const char* part : {"_packed", "_scale", "_shape"})
    EXPECT_TRUE(says(int4_error_after([&](Tensors& t) { drop(t, kExpert + part); }),
                     kExpert + part + " is missing: the weight is packed INT4 in groups of 32"));
  EXPECT_TRUE(says(error("_packed", {"", "I32", {32, 4}}),
                   kExpert + "_packed is I32 [32, 4], expected I32 [32, 8]"));
  EXPECT_TRUE(says(error("_packed", {"", "F32", {32, 8}}), "_packed is F32 [32, 8], expected I32"));
  EXPECT_TRUE(says(error("_scale", {"", "BF16", {32, 1}}),
                   kExpert + "_scale is BF16 [32, 1], expected BF16 [32, 2]"));
  EXPECT_TRUE(says(error("_scale", {"", "F32", {32, 2}}), "_scale is F32 [32, 2], expected BF16"));
  EXPECT_TRUE(says(error("_shape", {"", "I64", {3}}), "_shape is I64 [3], expected I64 [2]"));
  EXPECT_TRUE(says(error("_shape", {"", "F32", {2}}), "_shape is F32 [2], expected I64 [2]"));
  EXPECT_EQ(error("_shape", {"", "I32", {2}}), "no error");

  const auto with = [](const std::string& name) {
    return int4_error_after([&](Tensors& t) { t.push_back({name, "BF16", {3}}); });
  };
  EXPECT_TRUE(says(with(kExpert), "\"" + kExpert + "\" BF16 [3] of "));
  EXPECT_TRUE(says(with(kExpert + "_zero_point"), "_zero_point\" BF16 [3] of "));
  EXPECT_TRUE(says(with("model.norm.weight_scale"), "not part of"));
  const std::string o_proj = "model.layers.1.self_attn.o_proj.weight";
  EXPECT_TRUE(says(int4_error_after([&](Tensors& t) { tensor(t, o_proj).name += "_packed"; }),
                   o_proj + " is packed INT4, which only routed experts may be"));
  ModelConfig plain = int4_config();
  plain.expert_group = 0;
  EXPECT_TRUE(says(error_with(plain, tensors_of(int4_config())), "is packed INT4, which only"));
}

TEST(Checkpoint, ChecksTheShapeBesidePackedInt4) {
  const auto error = [](const std::string& dtype, const std::vector<int32_t>& halves) {
    const StoredType type = {dtype, 0, dtype == "I64" ? DType::kI64 : DType::kI32};
    StoredTensor shape{};
    shape.name = kExpert + "_shape";
    shape.type = &type;
    std::vector<std::byte> data(halves.size() * 4 + 1);
    std::memcpy(data.data() + 1, halves.data(), halves.size() * 4);
    return error_of([&] { check_int4_shape(shape, data.data() + 1, 32, 64); });
  };
  EXPECT_EQ(error("I64", {32, 0, 64, 0}), "no error");
  EXPECT_EQ(error("I32", {32, 64}), "no error");
  EXPECT_TRUE(
      says(error("I64", {32, 0, 48, 0}), kExpert + "_shape says [32, 48], expected [32, 64]"));
  EXPECT_TRUE(says(error("I64", {32, 1, 64, 0}), "says [4294967328, 64]"));
  EXPECT_TRUE(says(error("I32", {64, 32}), "says [64, 32]"));
}

// Bytes of the files that are in memory.
int64_t bytes_in_memory(const WeightStore& store) {
  constexpr int64_t kPage = 4096, kBeginning = 16 << 20;
  int64_t count = 0;
  std::vector<unsigned char> pages(kBeginning / kPage);
  for (const MappedFile& file : store.files()) {
    const int64_t bytes = std::min(file.bytes(), kBeginning);
    check(mincore(const_cast<std::byte*>(file.data()), bytes, pages.data()) == 0, "mincore");
    for (int64_t p = 0; p < (bytes + kPage - 1) / kPage; ++p) count += pages[p] & 1;
  }
  return count * kPage;
}

// Elements and tensors computed from the published shapes of R1 (Hugging Face shows 685B
// parameters).
TEST(Checkpoint, OfR1HasItsTensorsAndReadsHeadersOnly) {
  const ModelConfig r1;
  const TempDirectory dir;
  write_checkpoint(dir.path(), tensors_of(r1), 163);
  const WeightStore store(dir.path());
  stored_weights(store, r1);
  EXPECT_EQ(store.files().size(), 163u);
  EXPECT_EQ(store.tensors().size(), 91'991u);
  EXPECT_EQ(store.total_bytes(), 688'574'839'360);
  std::map<std::string_view, int64_t> elements;
  for (const StoredTensor& t : store.tensors())
    elements[t.type->name] += t.bytes / (t.type->bits / 8);
  EXPECT_EQ(elements["F8_E4M3"], 680'571'043'840);
  EXPECT_EQ(elements["BF16"], 3'918'786'560);
  EXPECT_EQ(elements["F32"], 41'555'600);
  EXPECT_LT(bytes_in_memory(store), 32 << 20);  // the headers take 12 MB
}

// Layers for multi-token prediction are checked where they are in use, and only there.
TEST(Checkpoint, TensorsOfMtpLayersInUse) {
  ModelConfig used = small_config();
  used.n_used_mtp_layers = 1;
  EXPECT_EQ(error_with(used, tensors_of(small_config())), "no error");
  const std::string layer = "model.layers.3.";
  for (const std::string name :
       {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight",
        "input_layernorm.weight", "mlp.gate.weight", "mlp.experts.2.up_proj.weight"}) {
    Tensors without = tensors_of(small_config()), wrong = without;
    drop(without, layer + name);
    EXPECT_TRUE(says(error_with(used, without), layer + name + " is missing")) << name;
    EXPECT_EQ(error_with(small_config(), without), "no error");
    ++tensor(wrong, layer + name).shape.back();
    EXPECT_TRUE(says(error_with(used, wrong), layer + name)) << name;
    EXPECT_EQ(error_with(small_config(), wrong), "no error");
  }
  Tensors strange = tensors_of(small_config());
  tensor(strange, layer + "enorm.weight").name = layer + "norm.weight";
  EXPECT_TRUE(says(error_with(used, strange), layer + "norm.weight\" BF16 [18] of"));
  ModelConfig with_two = small_config();
  with_two.n_mtp_layers = with_two.n_used_mtp_layers = 2;
  EXPECT_TRUE(says(error_with(with_two, tensors_of(small_config())), "model.layers.4."))
      << "fewer are stored than the configuration says";
}

// Copies of embedding and head are tensors of their own where they differ from the model's.
TEST(Checkpoint, CopiesOfEmbeddingAndHead) {
  ModelConfig used = small_config();
  used.n_used_mtp_layers = 1;
  used.mtp_has_embedding = used.mtp_has_head = true;
  const TempDirectory dir;
  write_checkpoint(dir.path(), tensors_of(small_config()), 2);
  const WeightStore store(dir.path());
  const ModelWeights weights = stored_weights(store, used);
  EXPECT_EQ(weights.mtp[0].embed.q.data, store.find("model.layers.3.embed_tokens.weight")->data);
  EXPECT_EQ(weights.mtp[0].head.q.data, store.find("model.layers.3.shared_head.head.weight")->data);
  used.mtp_has_embedding = used.mtp_has_head = false;
  const ModelWeights shared = stored_weights(store, used);
  EXPECT_TRUE(shared.mtp[0].embed.empty() && shared.mtp[0].head.empty());
}

}  // namespace
}  // namespace tandem
