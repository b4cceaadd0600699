#include "bench/line_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace tandem {
namespace {

constexpr int kWidth = 860, kHeight = 480, kLeft = 70, kRight = 260, kTop = 46, kBottom = 56;
constexpr int kLegendStep = 20;
// Okabe and Ito, 2008: told apart by people who see few colours, too.
constexpr const char* kColors[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                   "#E69F00", "#56B4E9", "#000000"};

// From a logarithmic range, whose ends are powers of `base`, to pixels.
struct Axis {
  double base;
  int first, last;
  double from, to;
  double tick(int power) const { return std::pow(base, power); }
  double at(double value) const {
    const double part = (std::log2(value) / std::log2(base) - first) / (last - first);
    return from + part * (to - from);
  }
};

struct Range {
  double least = 1e300, most = 0;
  void take(double value) {
    least = std::min(least, value);
    most = std::max(most, value);
  }
};

// Powers of `base` around the range, two at least.
Axis axis_over(Range range, double base, double from, double to) {
  const double step = std::log(base);
  const int first = static_cast<int>(std::floor(std::log(range.least) / step + 1e-9));
  const int last = static_cast<int>(std::ceil(std::log(range.most) / step - 1e-9));
  return {base, first, std::max(last, first + 1), from, to};
}

std::string number(double value) { return fmt::format("{:.6g}", value); }

std::string polyline(const std::vector<std::pair<double, double>>& points, const Axis& x,
                     const Axis& y, const char* color, bool dashed) {
  std::string path;
  for (const auto& [a, b] : points) path += fmt::format("{:.1f},{:.1f} ", x.at(a), y.at(b));
  return fmt::format(R"svg(<polyline points="{}" fill="none" stroke="{}" stroke-width="{}"{}/>)svg"
                     "\n",
                     path, color, dashed ? 1 : 2, dashed ? R"svg( stroke-dasharray="4 3")svg" : "");
}

}  // namespace

std::string svg_text(const std::string& text) {
  std::string out;
  for (const char c : text)
    out += c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : std::string(1, c);
  return out;
}

std::string svg_of(const LineChart& chart) {
  Range xs, ys;
  for (const LineChart::Line& line : chart.lines)
    for (const auto* points : {&line.points, &line.bounds})
      for (const auto& [x, y] : *points) {
        xs.take(x);
        ys.take(y);
      }
  check(xs.most > 0 && ys.least > 0, "a chart of positive numbers");
  const Axis x = axis_over(xs, 2, kLeft, kWidth - kRight);
  const Axis y = axis_over(ys, 10, kHeight - kBottom, kTop);

  std::string svg = fmt::format(
      R"svg(<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}" )svg"
      R"svg(font-family="sans-serif" font-size="12">)svg"
      "\n"
      R"svg(<rect width="{0}" height="{1}" fill="white"/>)svg"
      "\n"
      R"svg(<text x="{2}" y="24" font-size="15">{3}</text>)svg"
      "\n",
      kWidth, kHeight, kLeft, svg_text(chart.title));
  for (int power = x.first; power <= x.last; ++power)
    svg += fmt::format(
        R"svg(<path d="M{0:.1f} {1:.1f}V{2:.1f}" stroke="#ddd"/><text x="{0:.1f}" y="{3:.1f}" )svg"
        R"svg(text-anchor="middle">{4}</text>)svg"
        "\n",
        x.at(x.tick(power)), y.from, y.to, y.from + 18, number(x.tick(power)));
  for (int power = y.first; power <= y.last; ++power)
    svg += fmt::format(
        R"svg(<path d="M{0:.1f} {1:.1f}H{2:.1f}" stroke="#ddd"/><text x="{3:.1f}" y="{4:.1f}" )svg"
        R"svg(text-anchor="end">{5}</text>)svg"
        "\n",
        x.from, y.at(y.tick(power)), x.to, x.from - 8, y.at(y.tick(power)) + 4,
        number(y.tick(power)));
  svg += fmt::format(
      R"svg(<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>)svg"
      R"svg(<text transform="translate(18 {:.1f}) rotate(-90)" text-anchor="middle">{}</text>)svg"
      "\n",
      (x.from + x.to) / 2, kHeight - 14, svg_text(chart.x_label), (y.from + y.to) / 2,
      svg_text(chart.y_label));

  double legend = kTop + 8;
  for (size_t i = 0; i < chart.lines.size(); ++i) {
    const LineChart::Line& line = chart.lines[i];
    const char* color = kColors[i % std::size(kColors)];
    svg += polyline(line.points, x, y, color, false) + polyline(line.bounds, x, y, color, true);
    for (const auto& [a, b] : line.points)
      svg += fmt::format(R"svg(<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>)svg", x.at(a),
                         y.at(b), color);
    svg += fmt::format(
        "\n"
        R"svg(<path d="M{} {}h22" stroke="{}" stroke-width="2"/><text x="{}" y="{}">{}</text>)svg"
        "\n",
        x.to + 16, legend, color, x.to + 44, legend + 4, svg_text(line.name));
    legend += kLegendStep;
  }
  const bool has_bounds =
      std::any_of(chart.lines.begin(), chart.lines.end(),
                  [](const LineChart::Line& line) { return !line.bounds.empty(); });
  if (has_bounds)
    svg += fmt::format(
        R"svg(<path d="M{} {}h22" stroke="#555" stroke-dasharray="4 3"/><text x="{}" y="{}">roofline</text>)svg"
        "\n",
        x.to + 16, legend, x.to + 44, legend + 4);
  return svg + "</svg>\n";
}

}  // namespace tandem
