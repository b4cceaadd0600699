// A GPU of benchmarks that computes nothing and records what it is asked for, as lines of text.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/benchmark.h"

namespace tandem {

// Calls with the shapes and places of their matrices: "#2+64[5,256]" is 64 bytes into the second
// allocation. A section ends after the first two runs: how many follow depends on the time.
class CallLog {
 public:
  std::vector<std::string> lines;
  int runs_of_section = 2;

  void add(std::string line) {
    if (n_runs_ < runs_of_section) lines.push_back(std::move(line));
  }
  void begin_section(std::string line) {
    n_runs_ = 0;
    lines.push_back(std::move(line));
  }
  // A run ends with a wait, and so do copies.
  void wait() {
    add("wait");
    const bool of_copies = lines.size() > 1 && lines[lines.size() - 2].starts_with("to_gpu");
    if (!of_copies) ++n_runs_;
  }
  // Memory that lives as long as the log, so that every place has one name.
  Buffer allocate(int64_t bytes) {
    const auto& owner = allocations_.emplace_back(std::make_shared<Buffer>(bytes));
    add(fmt::format("allocate #{}: {} bytes", allocations_.size(), bytes));
    return {owner->span(), owner};
  }
  // Gives each wanted tensor a place of its own, which is not read.
  void name_weights(ModelWeights& weights, const GpuBenchOptions& options) {
    weights_.push_back(std::make_unique<Names>());
    Names& own = *weights_.back();
    const auto each = [&](auto visit) {
      for_each_weight(weights, options.config, [&](const WeightSpec& spec, QuantView& slot) {
        if (options.wanted(spec)) visit(spec, slot);
      });
    };
    each([&](const WeightSpec& spec, QuantView&) { own.names.push_back(spec.name); });
    own.places.resize(own.names.size());
    int64_t i = 0;
    each([&](const WeightSpec& spec, QuantView& slot) {
      slot.q = {own.places.data() + i++, spec.rows, spec.cols, spec.cols, DType::kBF16};
    });
  }

  std::string of(const TensorView& m) const {
    std::string text = place_of(m.data) + fmt::format("[{},{}", m.rows, m.cols);
    if (m.stride != m.cols) text += fmt::format("/{}", m.stride);
    return text + "]" + (m.dtype == DType::kF32 ? "" : std::string(name_of(m.dtype)));
  }
  std::string of(const QuantView& w) const {
    for (const auto& model : weights_)
      for (size_t i = 0; i < model->names.size(); ++i)
        if (w.q.data == &model->places[i]) return model->names[i];
    return of(w.q);
  }
  static std::string of(std::span<const int32_t> numbers) {
    return fmt::format("({})", fmt::join(numbers.begin(), numbers.end(), " "));
  }
  static std::string of(const Sequence& s) {
    return fmt::format("{{{} {} {} {}}}", s.first_token, s.n_tokens, s.kv_length, of(s.kv_pages));
  }

 private:
  struct Names {
    std::vector<std::string> names;
    std::vector<std::byte> places;
  };
  std::string place_of(const void* data) const {
    if (!data) return "null";
    for (size_t i = 0; i < allocations_.size(); ++i) {
      const int64_t at = static_cast<const std::byte*>(data) - allocations_[i]->data();
      if (at >= 0 && at < allocations_[i]->bytes())
        return fmt::format("#{}", i + 1) + (at == 0 ? "" : fmt::format("+{}", at));
    }
    return "host";
  }

  int n_runs_ = 0;
  std::vector<std::shared_ptr<Buffer>> allocations_;
  std::vector<std::unique_ptr<Names>> weights_;
};

class RecordedDevice final : public Device {
 public:
  explicit RecordedDevice(CallLog& log) : log_(log) {}
  Buffer allocate(int64_t bytes) override { return log_.allocate(bytes); }
  void copy(const void* from, int64_t bytes, void* to) override {
    log_.add(fmt::format("copy {} to {}", log_.of(TensorView{const_cast<void*>(from), 1, bytes}),
                         log_.of(TensorView{to, 1, bytes})));
  }
  void to_host(TensorView x, TensorView out) override {
    for (int64_t r = 0; r < x.rows; ++r) std::memset(out.row_data(r), 0, out.cols * 4);
  }

 private:
  CallLog& log_;
};

class RecordedOps final : public Ops {
 public:
  explicit RecordedOps(CallLog& log) : log_(log) {}
  void begin(const Batch& b) override {
    std::string text = "begin " + CallLog::of(b.tokens) + " at " + CallLog::of(b.positions);
    for (const Sequence& s : b.sequences) text += " " + CallLog::of(s);
    log_.add(text);
  }
  void embed(std::span<const int32_t> tokens, const QuantView& table, TensorView out) override {
    add("embed " + CallLog::of(tokens), table, out);
  }
  void rms_norm(TensorView x, const QuantView& gain, float, TensorView out) override {
    add("rms_norm", x, gain, out);
  }
  void add(TensorView x, TensorView delta) override { add("add", x, delta); }
  void clear(TensorView x) override { add("clear", x); }
  void linear(TensorView x, const QuantView& w, TensorView out) override {
    add("linear", x, w, out);
  }
  void linear_per_head(const LinearPerHead& a) override {
    add(fmt::format("linear_per_head {} from {} by {}{}", a.n_heads, a.first_row, a.rows_per_head,
                    a.transposed ? " transposed" : ""),
        a.x, a.w, a.out);
  }
  void rope(TensorView x, std::span<const int32_t> positions, const RopeTable&) override {
    add("rope at " + CallLog::of(positions), x);
  }
  void append_kv(const Batch& batch, TensorView kv, TensorView cache) override {
    add("append_kv " + CallLog::of(batch.sequences[0]), kv, cache);
  }
  void mla_absorbed(const MlaArgs& a) override { attend("mla_absorbed", a); }
  void mla_naive(const MlaArgs& a, const QuantView& kv_b) override {
    attend("mla_naive " + log_.of(kv_b), a);
  }
  void silu_mul(TensorView gate, TensorView up) override { add("silu_mul", gate, up); }
  void route(const RouteArgs& a) override {
    add("route", a.x, a.w, a.bias, a.logits, a.out.ids, a.out.weights);
  }
  void gather_rows(TensorView x, std::span<const int32_t> rows, TensorView out) override {
    add("gather_rows " + CallLog::of(rows), x, out);
  }

 private:
  void add(std::string line, const auto&... matrices) {
    ((line += " " + log_.of(matrices)), ...);
    log_.add(std::move(line));
  }
  void attend(std::string name, const MlaArgs& a) {
    for (const Sequence& s : a.sequences) name += " " + CallLog::of(s);
    add(fmt::format("{} scale {:.4f}", name, a.softmax_scale), a.q, a.q_rope, a.cache, a.out);
  }

  CallLog& log_;
};

class RecordedExperts final : public ExpertPool {
 public:
  explicit RecordedExperts(CallLog& log) : log_(log) {}
  void add_to(Ticket ticket, TensorView y) override {
    log_.add(fmt::format("add ticket {} to ", ticket) + log_.of(y));
  }

 private:
  Ticket start(const ExpertBatch& b) override {
    log_.add(fmt::format("submit of layer {}: {} {} {}", b.layer, log_.of(b.x),
                         log_.of(b.routing.ids), log_.of(b.routing.weights)));
    return b.layer % kMaxTickets;
  }

  CallLog& log_;
};

class RecordedBenchModel final : public GpuBenchModel {
 public:
  RecordedBenchModel(const GpuBenchOptions& o, CallLog& log)
      : log_(log), device_(log), ops_(log), experts_(log) {
    log.add(fmt::format("model of {} layers, {} dense, {} experts, {} and {}, {} tokens, ctx {}",
                        o.config.n_layers, o.config.n_dense_layers, o.config.router.n_experts,
                        format_name(o.formats.backbone), format_name(o.formats.experts),
                        o.max_tokens, o.context));
    log.name_weights(weights_, o);
  }
  const ModelWeights& weights() const override { return weights_; }
  Device& device() override { return device_; }
  Ops& ops() override { return ops_; }
  ExpertPool& experts() override { return experts_; }
  std::unique_ptr<HybridBenchModel> share(CpuExperts&, ExpertPool&, int) override { return {}; }
  QuantView repeated(TensorView rows, int64_t n_rows) override {
    log_.add(fmt::format("repeat {} to {} rows", log_.of(rows), n_rows));
    return {.q = {device_.allocate(1).data(), n_rows, rows.cols, rows.cols, rows.dtype},
            .scale = {}};
  }
  int n_nodes_of_last_step() const override { return 0; }
  void to_gpu(TensorView from, TensorView to) override {
    log_.add("to_gpu " + log_.of(from) + " " + log_.of(to));
    std::memcpy(to.data, from.data, from.rows * from.row_bytes());
  }
  void wait() override { log_.wait(); }

 private:
  CallLog& log_;
  ModelWeights weights_;
  RecordedDevice device_;
  RecordedOps ops_;
  RecordedExperts experts_;
};

}  // namespace tandem
