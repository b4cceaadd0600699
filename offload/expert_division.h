// Decides which experts in host memory a long step streams to the GPU, and which the CPU computes
// meanwhile. Streaming an expert costs the same for any number of rows and computing it does not,
// so the GPU gets the experts with the most rows.
#pragma once
#include <span>
#include <vector>

namespace tandem {

// Time of one expert by its number of rows. Linear between the points; below the first it is
// constant, because the weights are read anyway, and beyond the last it is proportional.
struct SecondsByRows {
  struct Point {
    int rows;
    double seconds;
  };
  std::vector<Point> points;  // at least one, rows ascending from 1 or more
  double at(int rows) const;  // 0 for 0 rows
};

// Times of one expert.
struct ExpertRates {
  double link_seconds;  // transfer to the GPU
  double copy_seconds;  // copy to pinned memory by the CPU team
  SecondsByRows gpu, cpu;
};

struct Division {
  std::vector<int> order;  // all experts, those of the GPU first
  int n_on_gpu = 0;
};

// Divides experts so that link, GPU and CPU, which work at the same time, end together as nearly as
// whole experts allow. rows: [experts]. The experts `ahead` are already being streamed, so they
// belong to the GPU and come first in the order; the others follow, the most rows first, and the
// GPU gets the first of them. No division is faster if the GPU computes faster than the link
// transfers. Allocates nothing if out.order has enough capacity.
void divide_experts(std::span<const int> rows, std::span<const int> ahead, const ExpertRates& rates,
                    Division& out);

}  // namespace tandem
