#include <fmt/format.h>

#include <algorithm>

#include "bench/line_chart.h"
#include "cli/plan/plan_report.h"
#include "core/memory.h"

namespace tandem {
namespace {

constexpr double kWidth = 900, kLeft = 150, kBarWidth = 620, kBar = 18, kLine = 28;
constexpr size_t kMaxDevices = 12;
constexpr const char* kColours[kNumParts] = {"#4e79a7", "#f28e2b", "#e15759", "#76b7b2",
                                             "#59a14f", "#edc948", "#b07aa1", "#ff9da7",
                                             "#9c755f", "#bab0ac", "#444444"};

std::string label(double x, double y, const std::string& text, bool strong = false) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\"{}>{}</text>\n", x, y,
                     strong ? " font-weight=\"bold\"" : "", svg_text(text));
}

std::string box(double x, double y, double width, const char* colour, const std::string& title) {
  return fmt::format(
      "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\"><title>{}</title>"
      "</rect>\n",
      x, y, std::max(0.0, width), kBar, colour, svg_text(title));
}

// One bar per device, showing all of its memory.
std::string memory_bars(const Prediction& p, double& y) {
  std::string svg = label(20, y, "Memory by device: weights, KV cache, activations, reserve", true);
  y += kLine;
  const size_t n = std::min(p.memory.size(), kMaxDevices);
  for (size_t i = 0; i < n; ++i) {
    const DeviceMemory& m = p.memory[i];
    const auto width = [&](int64_t bytes) {
      return kBarWidth * static_cast<double>(bytes) / static_cast<double>(m.capacity_bytes);
    };
    svg += label(20, y + kBar - 4, device_name(m.device));
    double x = kLeft;
    svg += box(x, y, width(m.capacity_bytes), "#e8e8e8",
               fmt::format("{:.1f} GB, {:.2f} free", gigabytes(m.capacity_bytes),
                           gigabytes(m.free_bytes())));
    const auto part = [&](int64_t bytes, const char* colour, const char* what) {
      svg += box(x, y, width(bytes), colour, fmt::format("{} {:.2f} GB", what, gigabytes(bytes)));
      x += width(bytes);
    };
    part(m.weights_bytes, kColours[0], "weights");
    part(m.kv_bytes, kColours[1], "KV cache");
    part(m.activation_bytes, kColours[4], "activations");
    if (m.spare_bytes > 0) part(m.spare_bytes, kColours[3], "experts that move");
    part(m.reserve_bytes, kColours[9], "reserve");
    svg += label(kLeft + kBarWidth + 8, y + kBar - 4,
                 fmt::format("{:.0f} GB", gigabytes(m.capacity_bytes)));
    y += kLine;
  }
  if (p.memory.size() > n) {
    svg += label(kLeft, y + kBar - 4, fmt::format("and {} devices more", p.memory.size() - n));
    y += kLine;
  }
  return svg;
}

// The backbone's parts in one lane, concurrent parts in the next; the layer ends with the later
// one.
std::string layer_lanes(const LayerTime& layer, const std::string& name, double& y) {
  std::string svg = label(20, y, fmt::format("{}: {:.3f} ms", name, layer.seconds * 1e3), true);
  y += kLine / 2;
  double sum = 0;
  for (const double part : layer.parts) sum += part;
  const double scale = kBarWidth / std::max(sum, 1e-12);
  const bool beside = layer[Part::kCpuExperts] + layer[Part::kStreaming] > 0;
  double backbone = kLeft, other = kLeft;
  const auto add = [&](Part part, double& x, double lane) {
    const double width = layer[part] * scale;
    if (width <= 0) return;
    const std::string text = fmt::format("{} {:.3f} ms", name_of(part), layer[part] * 1e3);
    svg += box(x, y + lane, width, kColours[static_cast<int>(part)], text);
    if (width > 90) svg += label(x + 4, y + lane + kBar - 5, name_of(part));
    x += width;
  };
  svg += label(20, y + kBar - 4, "backbone");
  for (const Part part : {Part::kOverhead, Part::kProjections, Part::kAttention, Part::kAllReduce,
                          Part::kDense, Part::kRouter})
    add(part, backbone, 0);
  other = backbone;
  add(Part::kShared, backbone, 0);
  if (beside) {
    svg += label(20, y + kLine + kBar - 4, "beside it");
    if (layer[Part::kStreaming] > 0) other = kLeft;  // starts before the others
    for (const Part part : {Part::kExchange, Part::kCpuExperts, Part::kStreaming})
      add(part, other, kLine);
    add(Part::kGpuExperts, backbone, 0);
    y += kLine;
  } else {
    add(Part::kExchange, backbone, 0);
    add(Part::kGpuExperts, backbone, 0);
  }
  y += kLine * 1.5;
  return svg;
}

}  // namespace

std::string plan_plot(const PlanRequest& request, const Plan& plan) {
  double y = 30;
  std::string body =
      label(20, y, fmt::format("{} on {}", request.model_name, request.machine.name), true);
  y += kLine;
  body += memory_bars(plan.prediction, y);
  y += kLine;
  const auto layers = [&](const Phase& phase, const char* name) {
    if (phase.n_dense > 0)
      body += layer_lanes(phase.dense, fmt::format("{}, a dense layer", name), y);
    if (phase.n_moe > 0) body += layer_lanes(phase.moe, fmt::format("{}, a MoE layer", name), y);
  };
  layers(plan.prediction.decode, "Decoding");
  layers(plan.prediction.prefill, "Prefill");
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1:.0f}\" "
             "viewBox=\"0 0 {0} {1:.0f}\" font-family=\"sans-serif\" font-size=\"12\">\n"
             "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
             kWidth, y) +
         body + "</svg>\n";
}

}  // namespace tandem
