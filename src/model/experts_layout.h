// How routed experts are stored in host memory: which of them, in what format per layer, and how
// they are sliced among NUMA nodes.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "model/weight_format.h"
#include "model/weights.h"

namespace tandem {

// What of a model is stored elsewhere.
struct Elsewhere {
  // [layers][n_experts], empty for a dense layer: true for experts that are. Empty: nothing is.
  std::vector<std::vector<bool>> experts = {};
  bool backbone = true;                     // everything except routed experts is, if any expert is
  std::optional<BackboneShare> share = {};  // what of the backbone is here; nothing: as said above
};

class ExpertsLayout {
 public:
  // All layers have the same format; empty: as stored.
  ExpertsLayout(std::optional<WeightFormat> format = {}) : all_(format) {}
  ExpertsLayout(WeightFormat format) : all_(format) {}
  // A format for each layer, and the columns of each node's slice; empty: by the nodes' cores.
  ExpertsLayout(std::vector<std::optional<WeightFormat>> of_layers, std::vector<int> node_columns)
      : of_layers_(std::move(of_layers)), node_columns_(std::move(node_columns)) {
    const auto differs = [&](const auto& format) { return format != of_layers_.front(); };
    if (std::any_of(of_layers_.begin(), of_layers_.end(), differs)) return;
    if (!of_layers_.empty()) all_ = of_layers_.front();
    of_layers_.clear();
  }

  const std::optional<WeightFormat>& format(int layer) const {
    // MTP layers are kept as the last layer.
    return of_layers_.empty() ? all_ : of_layers_[std::min<size_t>(layer, of_layers_.size() - 1)];
  }
  // [layers]; empty: all layers have the same format.
  const std::vector<std::optional<WeightFormat>>& of_layers() const { return of_layers_; }
  const std::vector<int>& node_columns() const { return node_columns_; }

  void keep_elsewhere(Elsewhere elsewhere) { elsewhere_ = std::move(elsewhere); }
  const Elsewhere& elsewhere() const { return elsewhere_; }
  bool keeps(const WeightSpec& spec) const {
    if (elsewhere_.experts.empty()) return true;
    if (spec.use != WeightUse::kExpert) return !elsewhere_.backbone;
    return !elsewhere_.experts[spec.layer][spec.expert];
  }

  // Formats other than the stored one, without repetition.
  std::vector<WeightFormat> conversions() const {
    std::vector<WeightFormat> formats;
    const auto add = [&](const std::optional<WeightFormat>& f) {
      if (f && std::find(formats.begin(), formats.end(), *f) == formats.end())
        formats.push_back(*f);
    };
    add(all_);
    for (const auto& format : of_layers_) add(format);
    return formats;
  }

 private:
  std::optional<WeightFormat> all_;
  std::vector<std::optional<WeightFormat>> of_layers_;
  std::vector<int> node_columns_;
  Elsewhere elsewhere_;
};

}  // namespace tandem
