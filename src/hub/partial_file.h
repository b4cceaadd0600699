// A file of a repository while it is fetched: its bytes, several ranges at once, and a record of
// which are there, both in a folder that no loader reads. Only a whole file whose digest is right
// gets its own name.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "hub/repository.h"

namespace tandem {

class PartialFile {
 public:
  // Continues what `folder` has of this file, if its record names the same size and digest.
  // `folder` must exist. Opens nothing before the first write.
  PartialFile(HubFile file, const std::string& folder);
  PartialFile(const PartialFile&) = delete;
  ~PartialFile();

  const HubFile& file() const { return file_; }
  int n_ranges() const { return static_cast<int>(ranges_.size()); }
  // The next byte to fetch of a range, and its end.
  int64_t next(int range) const;
  int64_t end(int range) const;
  int64_t bytes_done() const;

  // Adds bytes at next(range). One thread per range at a time. Throws Error if the disk is full.
  void write(int range, std::span<const std::byte> bytes);
  void restart(int range);  // from the range's beginning
  // Writes the record; write() does so about once a second.
  void save();

  // Whether the bytes, all of which are there, have the right digest; the record remembers it.
  // False also when `go_on` said no.
  bool check(const std::function<bool()>& go_on);
  bool checked() const;
  const std::string& data_path() const { return data_path_; }
  // Gives the checked file its name in `directory` and removes the record.
  void put_in_place(const std::string& directory);

 private:
  struct Range {
    int64_t begin, end, next;
  };
  void open_data();
  void read_record();
  void save_locked();

  const HubFile file_;
  const std::string data_path_, record_path_;
  mutable std::mutex mutex_;
  std::vector<Range> ranges_;
  std::chrono::steady_clock::time_point saved_;
  bool checked_ = false;
  int fd_ = -1;
};

}  // namespace tandem
