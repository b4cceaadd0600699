// Which experts of host memory a long step brings to the card, and which the CPU computes
// meanwhile, as a function of numbers: bringing an expert costs the same for any number of rows,
// computing it does not, so the card gets those with the most.
#pragma once
#include <span>
#include <vector>

namespace tandem {

// What an expert of so many rows takes. Linear between the points; fewer rows than the first take
// as long as those, for its weights are read all the same, and more than the last in proportion.
struct SecondsByRows {
  struct Point {
    int rows;
    double seconds;
  };
  std::vector<Point> points;  // at least one, rows ascending from 1 or more
  double at(int rows) const;  // 0 rows: nothing
};

// Of one expert.
struct ExpertRates {
  double link_seconds;  // on its way to the card
  double copy_seconds;  // of the CPU's team, which copies it to where the link takes it from
  SecondsByRows gpu, cpu;
};

struct Division {
  std::vector<int> order;  // all experts, those of the card first
  int n_on_gpu = 0;
};

// Makes link, card and CPU, who work at the same time, end together as nearly as whole experts
// allow. rows: [experts]; those `ahead` are on their way already: they are the card's, and the
// first of the order; all others follow by their rows, the most first, and the card gets the first
// of them. No other division is faster where the card computes faster than the link brings.
// Allocates nothing if out.order has room.
void divide_experts(std::span<const int> rows, std::span<const int> ahead, const ExpertRates& rates,
                    Division& out);

}  // namespace tandem
