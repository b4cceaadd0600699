#include "model/checkpoint.h"

#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>

#include "io/json.h"

namespace tandem {
namespace {

constexpr size_t kNamedProblems = 3;

class Problems {
 public:
  void add(std::string text) {
    if (count_++ < kNamedProblems) text_ += (text_.empty() ? "" : "; ") + std::move(text);
  }
  template <class Work>
  void add_if_thrown(Work work) {
    try {
      work();
    } catch (const Error& error) {
      add(error.what());
    }
  }
  void throw_if_any(const std::string& directory) const {
    if (count_ == 0) return;
    const size_t more = count_ - std::min(count_, kNamedProblems);
    fail("{} does not hold the model that its config.json describes: {}{}: download it again",
         directory, text_, more > 0 ? fmt::format("; and {} more tensors", more) : "");
  }

 private:
  size_t count_ = 0;
  std::string text_;
};

// Norms and biases have no blocks to scale, the router is too small for FP8 to be worth its error,
// and the embedding's rows are looked up without scales.
bool may_be_fp8(WeightUse use) {
  return !is_vector(use) && use != WeightUse::kRouter && use != WeightUse::kEmbedding;
}

std::string expected_text(const WeightSpec& spec) {
  return fmt::format("{}BF16, F16 or F32 {}", may_be_fp8(spec.use) ? "F8_E4M3, " : "",
                     is_vector(spec.use) ? fmt::format("[{}]", spec.cols)
                                         : fmt::format("[{}, {}]", spec.rows, spec.cols));
}

bool fits(const StoredTensor& t, const WeightSpec& spec) {
  const bool shape = is_vector(spec.use) ? t.shape.size() == 1 && t.shape[0] == spec.cols
                                         : t.shape.size() == 2 && t.shape[0] == spec.rows &&
                                               t.shape[1] == spec.cols;
  const auto type = t.type->dtype;
  return shape && (type == DType::kBF16 || type == DType::kF16 || type == DType::kF32 ||
                   (type == DType::kF8E4M3 && may_be_fp8(spec.use)));
}

std::string missing_text(const WeightStore& store, const WeightSpec& spec) {
  if (!store.find(spec.name + kInt4Parts[0])) return fmt::format("{} is missing", spec.name);
  return fmt::format(
      "{} is packed INT4, which only routed experts may be, and only if quantization_config of "
      "config.json says so",
      spec.name);
}

// `scales` may be unaligned.
float scale_at(const TensorView& scales, int64_t r, int64_t c) {
  const std::byte* at = scales.row_data(r) + c * size_of(scales.dtype);
  float value;
  if (scales.dtype == DType::kBF16) {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return std::bit_cast<float>(uint32_t{bits} << 16);
  }
  std::memcpy(&value, at, sizeof value);
  return value;
}

bool is_rotary_buffer(std::string_view name) {
  return name.ends_with(".rotary_emb.inv_freq") || name.ends_with(".rotary_emb.cos_cached") ||
         name.ends_with(".rotary_emb.sin_cached");
}

// Whether a tensor of an MTP layer is not used: the layer is not, or the tensor is its copy of the
// model's embedding or head.
bool is_unused_mtp(std::string_view name, const ModelConfig& config) {
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) return false;
  name.remove_prefix(kLayers.size());
  int layer = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  if (error != std::errc() || end == name.data() + name.size() || *end != '.' ||
      layer < config.n_layers || layer - config.n_layers >= config.n_mtp_layers)
    return false;
  const std::string_view part(end + 1, name.data() + name.size());
  return layer >= config.n_all_layers() || part == "embed_tokens.weight" ||
         part == "shared_head.head.weight";
}

}  // namespace

ModelWeights stored_weights(const WeightStore& store, const ModelConfig& config) {
  ModelWeights weights;
  Problems problems;
  std::vector<bool> used(store.tensors().size());
  const auto mark_used = [&](const StoredTensor* t) {
    if (t) used[t - store.tensors().data()] = true;
  };
  for_each_weight(weights, config, [&](const WeightSpec& spec, QuantView& slot) {
    if (spec.group > 0) {
      for (const char* part : kInt4Parts) mark_used(store.find(spec.name + part));
      return problems.add_if_thrown(
          [&] { slot = store.int4_view(spec.name, spec.rows, spec.cols, spec.group); });
    }
    const StoredTensor* t = store.find(spec.name);
    if (!t) return problems.add(missing_text(store, spec));
    mark_used(t);
    if (t->type->dtype == DType::kF8E4M3) mark_used(store.find(spec.name + "_scale_inv"));
    if (!fits(*t, spec))
      return problems.add(fmt::format("{} is {} {}, expected {}", spec.name, t->type->name,
                                      shape_text(t->shape), expected_text(spec)));
    problems.add_if_thrown([&] { slot = store.quant_view(*t, config.scale_block); });
  });
  if (config.tied_head) weights.head = weights.embed;

  for (size_t i = 0; i < used.size(); ++i) {
    const StoredTensor& t = store.tensors()[i];
    if (!used[i] && !is_passed_over(t.name, config))
      problems.add(fmt::format("{} {} {} of {} is not part of the model", shown(t.name),
                               t.type->name, shape_text(t.shape), store.files()[t.file].path()));
  }
  problems.throw_if_any(store.directory());
  return weights;
}

std::vector<std::string> checkpoint_warnings(const ModelWeights& weights) {
  int rounded = 0;
  for (const LayerWeights& layer : weights.layers)
    rounded += !layer.router_bias.empty() && layer.router_bias.q.dtype != DType::kF32;
  if (rounded == 0) return {};
  return {
      fmt::format("the router biases (e_score_correction_bias) of {} layers are stored in 16 "
                  "bits instead of F32: experts may be chosen differently from the original",
                  rounded)};
}

void check_scales(std::string_view name, const TensorView& scales) {
  for (int64_t r = 0; r < scales.rows; ++r)
    for (int64_t c = 0; c < scales.cols; ++c) {
      const float scale = scale_at(scales, r, c);
      if (!(scale >= 0 && std::isfinite(scale)))
        fail(
            "{}[{}][{}] is {}: a scale must be a finite number of at least 0; download the "
            "checkpoint again",
            name, r, c, scale);
    }
}

void check_int4_shape(const StoredTensor& shape, const std::byte* data, int64_t rows,
                      int64_t cols) {
  int64_t found[2];
  for (int i = 0; i < 2; ++i) {
    int32_t narrow;
    if (shape.type->dtype == DType::kI64) {
      std::memcpy(&found[i], data + i * sizeof found[i], sizeof found[i]);
    } else {
      std::memcpy(&narrow, data + i * sizeof narrow, sizeof narrow);
      found[i] = narrow;
    }
  }
  if (found[0] != rows || found[1] != cols)
    fail("{} says [{}, {}], expected [{}, {}]: download the checkpoint again", shape.name, found[0],
         found[1], rows, cols);
}

bool is_passed_over(std::string_view name, const ModelConfig& config) {
  return is_unused_mtp(name, config) || is_rotary_buffer(name) ||
         (config.tied_head && name == "lm_head.weight");
}

}  // namespace tandem
