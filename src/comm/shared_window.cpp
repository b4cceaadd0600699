#include "comm/shared_window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "comm/mapped_window.h"

namespace tandem {
namespace {

// What a rank says of its memory. The mark stands at the memory's begin: a process of the same
// number on another host has another one.
struct Place {
  int64_t bytes, process, file;
  uint64_t mark;
};
constexpr int64_t kHead = 64;  // before the window

class Mapping {
 public:
  Mapping(int file, int64_t bytes) : bytes_(bytes) {
    struct stat facts {};
    if (file < 0 || fstat(file, &facts) != 0 || facts.st_size != bytes) return;
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at != MAP_FAILED) data_ = static_cast<std::byte*>(at);
  }
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  ~Mapping() {
    if (data_) munmap(data_, bytes_);
  }
  uint64_t* mark() const { return reinterpret_cast<uint64_t*>(data_); }
  std::byte* window() const { return data_ + kHead; }
  explicit operator bool() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  const int64_t bytes_;
};

class File {
 public:
  explicit File(int number) : number_(number) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (number_ >= 0) close(number_);
  }
  operator int() const { return number_; }

 private:
  const int number_;
};

}  // namespace

std::unique_ptr<Window> map_shared_window(Group& group, int64_t bytes) {
  const int64_t all_bytes = kHead + MappedWindow::memory_bytes(bytes, group.size());
  const File file(memfd_create("tandem window", MFD_CLOEXEC));
  const bool has_memory = file >= 0 && ftruncate(file, all_bytes) == 0;
  Mapping own(file, has_memory ? all_bytes : -1);
  std::random_device random;
  const Place place{all_bytes, getpid(), file, uint64_t{random()} << 32 | random()};
  if (own) *own.mark() = place.mark;
  std::vector<Place> places(group.size());
  group.all_gather_values(place, std::span(places));

  const auto mappings = std::make_shared<std::vector<Mapping>>();
  std::vector<std::byte*> memory;
  int unmapped = -1;  // a rank whose memory is not mapped here
  for (int r = 0; r < group.size(); ++r) {
    const std::string path = fmt::format("/proc/{}/fd/{}", places[r].process, places[r].file);
    const File theirs(open(path.c_str(), O_RDWR | O_CLOEXEC));
    const Mapping& mapping = mappings->emplace_back(theirs, all_bytes);
    if (mapping && *mapping.mark() == places[r].mark)
      memory.push_back(mapping.window());
    else
      unmapped = r;
  }
  std::vector<int> all_unmapped(group.size());
  group.all_gather_values(unmapped, std::span(all_unmapped));
  for (int r = 0; r < group.size(); ++r)
    require(all_unmapped[r] < 0, "ranks {} and {} do not share memory, or their windows differ",
            group.world_rank(r), group.world_rank(all_unmapped[r]));
  return std::make_unique<MappedWindow>(group, bytes, std::move(memory), mappings);
}

}  // namespace tandem
