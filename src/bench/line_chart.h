// A chart on two logarithmic axes as an SVG file that needs nothing else.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace tandem {

struct LineChart {
  struct Line {
    std::string name;
    std::vector<std::pair<double, double>> points;  // x ascending; all above 0
    std::vector<std::pair<double, double>> bounds;  // dashed, in the same colour
  };
  std::string title, x_label, y_label;
  std::vector<Line> lines;  // at least one, with a point
};

// Text as it stands between the tags of an SVG file.
std::string svg_text(const std::string& text);

std::string svg_of(const LineChart& chart);

}  // namespace tandem
