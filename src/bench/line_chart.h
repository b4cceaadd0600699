// A chart with two logarithmic axes, as a self-contained SVG file.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace tandem {

struct LineChart {
  struct Line {
    std::string name;
    std::vector<std::pair<double, double>> points;  // x ascending; all positive
    std::vector<std::pair<double, double>> bounds;  // dashed, in the same colour
  };
  std::string title, x_label, y_label;
  std::vector<Line> lines;  // at least one, with a point
};

// Escapes text for use between SVG tags.
std::string svg_text(const std::string& text);

std::string svg_of(const LineChart& chart);

}  // namespace tandem
