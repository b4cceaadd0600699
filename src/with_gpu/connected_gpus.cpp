#include "with_gpu/connected_gpus.h"

#include "comm/agreement.h"

namespace tandem {

std::unique_ptr<gpu::Collectives> connected(Group& ranks) {
  gpu::Collectives::Id id = {};
  run_on_all(ranks, [&] {
    if (ranks.rank() == 0) id = gpu::Collectives::make_id();
  });
  ranks.broadcast(std::as_writable_bytes(std::span(id)), 0);
  std::unique_ptr<gpu::Collectives> all;
  run_on_all(ranks,
             [&] { all = std::make_unique<gpu::Collectives>(id, ranks.rank(), ranks.size()); });
  return all;
}

}  // namespace tandem
