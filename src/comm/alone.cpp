#include "comm/alone.h"

#include "comm/copy.h"
#include "comm/mapped_window.h"
#include "core/memory.h"

namespace tandem {
namespace {

class Alone final : public Group {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  int world_rank(int) const override { return 0; }
  void set_patience(Patience) override {}

  void barrier() override {}
  void broadcast(Bytes, int) override {}
  void all_gather(ConstBytes mine, Pieces<std::byte> out) override {
    copy_bytes(mine, out.all.data());
  }
  void all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) override {
    copy_bytes(in.all, out.all.data());
  }
  void reduce_scatter(Pieces<const float> in, std::span<float> out) override {
    copy_bytes(std::as_bytes(in.all), std::as_writable_bytes(out).data());
  }
  void all_reduce(std::span<float>) override {}

  std::unique_ptr<Group> split(int color) override {
    return color < 0 ? nullptr : std::make_unique<Alone>();
  }
  std::unique_ptr<Window> allocate_window(int64_t bytes) override {
    const auto memory = std::make_shared<Buffer>(MappedWindow::memory_bytes(bytes, 1));
    return std::make_unique<MappedWindow>(*this, bytes, std::vector{memory->data()}, memory);
  }
  void wait_for_rank(int, const std::function<bool()>& done) override {
    if (!done()) throw GroupError(-1, "one rank alone waits for itself");
  }
};

}  // namespace

std::unique_ptr<Group> make_alone() { return std::make_unique<Alone>(); }

}  // namespace tandem
