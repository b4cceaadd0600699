#include "hub/partial_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/check.h"
#include "core/rounding.h"
#include "io/atomic_file.h"
#include "io/json.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// Long enough that a hub is asked a few thousand times for the largest models, short enough that
// several connections share one file.
constexpr int64_t kRangeBytes = int64_t{256} << 20;
constexpr int64_t kMaxPartRecordBytes = 64 << 20;

// One file of the folder for each path of the repository.
std::string flat_name(const std::string& path) { return url_encoded(path, false); }

}  // namespace

PartialFile::PartialFile(HubFile file, const std::string& folder)
    : file_(std::move(file)),
      data_path_(folder + "/" + flat_name(file_.path) + ".part"),
      record_path_(data_path_ + ".json") {
  const int64_t n_ranges = std::max<int64_t>(1, ceil_div(file_.bytes, kRangeBytes));
  for (int64_t i = 0; i < n_ranges; ++i)
    ranges_.push_back(
        {i * kRangeBytes, std::min((i + 1) * kRangeBytes, file_.bytes), i * kRangeBytes});
  read_record();
}

PartialFile::~PartialFile() {
  if (fd_ >= 0) close(fd_);
}

void PartialFile::read_record() {
  std::error_code error;
  if (!fs::exists(record_path_, error)) return;
  try {
    const nlohmann::json record =
        parse_json(read_text_file(record_path_, kMaxPartRecordBytes), record_path_);
    const auto& next = record.at("next").get_ref<const nlohmann::json::array_t&>();
    if (record.at("bytes") != file_.bytes || record.at("digest") != file_.digest.hex ||
        next.size() != ranges_.size() ||
        fs::file_size(data_path_) != static_cast<uintmax_t>(file_.bytes))
      return;
    for (size_t i = 0; i < ranges_.size(); ++i) {
      const auto at = next[i].get<int64_t>();
      if (at >= ranges_[i].begin && at <= ranges_[i].end) ranges_[i].next = at;
    }
    checked_ = record.at("checked").get<bool>();
  } catch (const std::exception&) {
    // A record that cannot be read is no record: the file is fetched from its beginning.
  }
}

int64_t PartialFile::next(int range) const {
  const std::lock_guard lock(mutex_);
  return ranges_[range].next;
}

int64_t PartialFile::end(int range) const { return ranges_[range].end; }

int64_t PartialFile::bytes_done() const {
  const std::lock_guard lock(mutex_);
  int64_t sum = 0;
  for (const Range& range : ranges_) sum += range.next - range.begin;
  return sum;
}

void PartialFile::open_data() {
  const std::lock_guard lock(mutex_);
  if (fd_ >= 0) return;
  fd_ = open(data_path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  require(fd_ >= 0 && ftruncate(fd_, file_.bytes) == 0, "{} cannot be written: {}", data_path_,
          std::strerror(errno));
}

void PartialFile::write(int range, std::span<const std::byte> bytes) {
  open_data();
  for (int64_t at = next(range); !bytes.empty();) {
    const ssize_t n = pwrite(fd_, bytes.data(), bytes.size(), at);
    if (n < 0 && errno == EINTR) continue;
    require(n > 0, "{} cannot be written: {}", data_path_, std::strerror(errno));
    at += n;
    bytes = bytes.subspan(n);
    const std::lock_guard lock(mutex_);
    ranges_[range].next = at;
  }
  const std::lock_guard lock(mutex_);
  if (std::chrono::steady_clock::now() - saved_ > std::chrono::seconds(1)) save_locked();
}

void PartialFile::restart(int range) {
  const std::lock_guard lock(mutex_);
  ranges_[range].next = ranges_[range].begin;
  checked_ = false;
}

void PartialFile::save() {
  const std::lock_guard lock(mutex_);
  save_locked();
}

void PartialFile::save_locked() {
  nlohmann::ordered_json record = {{"bytes", file_.bytes},
                                   {"digest", file_.digest.hex},
                                   {"checked", checked_},
                                   {"next", nlohmann::json::array()}};
  for (const Range& range : ranges_) record["next"].push_back(range.next);
  write_new_file(record_path_, record.dump());
  saved_ = std::chrono::steady_clock::now();
}

bool PartialFile::checked() const {
  const std::lock_guard lock(mutex_);
  return checked_;
}

bool PartialFile::check(const std::function<bool()>& go_on) {
  open_data();
  if (!(digest_of(fd_, file_.bytes, file_.digest.kind, go_on) == file_.digest)) return false;
  require(fsync(fd_) == 0, "{} cannot be written: {}", data_path_, std::strerror(errno));
  const std::lock_guard lock(mutex_);
  checked_ = true;
  save_locked();
  close(std::exchange(fd_, -1));
  return true;
}

void PartialFile::put_in_place(const std::string& directory) {
  const fs::path target = fs::path(directory) / file_.path;
  std::error_code error;
  fs::create_directories(target.parent_path(), error);
  fs::rename(data_path_, target, error);
  require(!error, "{} cannot be written: {}", target.string(), error.message());
  fs::remove(record_path_, error);
}

}  // namespace tandem
