// Moves items of one size between ranks, any number of them from each rank to each other.
#pragma once
#include <memory>
#include <vector>

#include "comm/group.h"

namespace tandem {

class Courier {
 public:
  virtual ~Courier() = default;
  struct Arrived {
    std::vector<const std::byte*> items;  // [ranks] those of each rank, one after another
    std::vector<int64_t> n;               // [ranks]
    int64_t total() const;
  };
  // This rank, then the others in ascending order.
  const std::vector<int>& ranks_in_order() const { return order_; }

  // Begins an exchange in which n_to[r] items go to rank r.
  virtual void begin(std::span<const int64_t> n_to) = 0;
  // Where item `index` of those for `rank` is to be written, before end(). Items of this rank for
  // itself are not copied: they need not be written if they are not read.
  virtual std::byte* place(int rank, int64_t index) = 0;
  // Ends the exchange. Items are valid until this rank begins another exchange, numbers until it
  // ends one. n_from: [ranks] how many come from each rank; empty: not known.
  virtual const Arrived& end(std::span<const int64_t> n_from) = 0;
  // An exchange of items that lie one after another in the order of ranks_in_order(). They must not
  // change for as long as what arrives is valid: own items stay there.
  virtual const Arrived& exchange(const std::byte* items, std::span<const int64_t> n_to,
                                  std::span<const int64_t> n_from) = 0;

 protected:
  explicit Courier(const Group& group);

 private:
  std::vector<int> order_;
};

struct ItemSizes {
  int64_t bytes;            // of an item
  int64_t max;              // items from a rank to another one
  int64_t max_out, max_in;  // items of a rank to all ranks, from all ranks
};

// Bytes that a rank needs for the couriers below.
int64_t counting_courier_bytes(const ItemSizes& sizes);
int64_t window_courier_bytes(const ItemSizes& sizes, int n_ranks);

// Items travel by all_to_all, after their numbers where those are not known. Those that were
// written to place() lie one after another in the order of ranks_in_order() when they have arrived.
std::unique_ptr<Courier> make_counting_courier(Group& group, const ItemSizes& sizes);

// Items are written into a window, where each rank has a place for those of every other rank: a
// number, then items. Ranks use two couriers in turns and read what arrives by one before they
// begin the other: then every rank has read the items of the last exchange when those of the next
// one come.
std::unique_ptr<Courier> make_window_courier(Group& group, const ItemSizes& sizes);

}  // namespace tandem
