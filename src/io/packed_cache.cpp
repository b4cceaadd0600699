#include "io/packed_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "core/check.h"
#include "io/packed_pieces.h"

namespace tandem {
namespace {

// Describes the first line in which two keys differ, as the reason why a cache is not used.
std::string difference(std::string_view cached, std::string_view wanted) {
  const auto line = [](std::string_view text, size_t at) {
    return text.substr(at, std::min(text.find('\n', at), text.size()) - at);
  };
  size_t begin = 0;
  while (begin < std::min(cached.size(), wanted.size()) &&
         line(cached, begin) == line(wanted, begin))
    begin += line(cached, begin).size() + 1;
  const auto shown_line = [&](std::string_view text) {
    return begin < text.size() ? line(text, begin) : std::string_view("nothing more");
  };
  return fmt::format("it was made for \"{:.100}\", now it is \"{:.100}\"", shown_line(cached),
                     shown_line(wanted));
}

// Turns read errors into PackedError: the caller treats them as damage.
template <class Work>
auto read_soundly(const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    throw PackedError(error.what());
  }
}

}  // namespace

std::optional<PackedFile> PackedFile::open(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::exists(path, error) && !error) return std::nullopt;
  return read_soundly([&] { return std::optional(PackedFile(path)); });
}

void PackedFile::read_header(std::string_view key) {
  const auto read_start = [&](int64_t bytes) {
    std::string text(bytes, '\0');
    read_soundly([&] { file_.read(0, std::as_writable_bytes(std::span(text))); });
    return text;
  };
  const std::string start = read_start(std::min(kPackedStartBytes, file_.bytes()));
  const std::string text = read_start(packed_header_bytes(start, file_.bytes()));
  header_ = parse_packed_header(text, file_.bytes());
  if (header_.key != key) throw PackedError(difference(header_.key, key));
}

void PackedFile::read(std::byte* to, const LoadOptions& options) const {
  const DirectFile direct(file_.fd(), O_RDONLY);
  for_each_packed_piece(data_bytes(), options, [&](int64_t begin, int64_t bytes) {
    read_piece(begin, bytes, to + begin, direct);
  });
}

void PackedFile::read_piece(int64_t begin, int64_t bytes, std::byte* to,
                            const DirectFile& direct) const {
  const int64_t offset = data_offset() + begin;
  const int64_t read =
      mostly_cached(file_, offset, bytes) ? 0 : direct.read(offset, disk_page_down(bytes), to);
  for (int64_t at = 0; at < bytes; at += kPackedBlockBytes) {
    const std::span block(to + at, std::min(kPackedBlockBytes, bytes - at));
    const int64_t size = static_cast<int64_t>(block.size());
    if (at + size > read) read_soundly([&] { file_.read(offset + at, block); });
    require_sound(checksum_of(block) == header_.checksums[(begin + at) / kPackedBlockBytes],
                  "its bytes from {} to {} do not have their checksum", offset + at,
                  offset + at + size);
  }
}

void PackedFile::discard() const {
  if (still_names(file_.path(), file_.fd())) unlink(file_.path().c_str());
}

bool still_names(const std::string& path, int fd) {
  struct stat open_file {
  }, named{};
  return fstat(fd, &open_file) == 0 && stat(path.c_str(), &named) == 0 &&
         open_file.st_ino == named.st_ino && open_file.st_dev == named.st_dev;
}

}  // namespace tandem
