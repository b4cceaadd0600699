// Remembers which files of a folder were read and had the digest that the hub lists, so that a
// later call need not read hundreds of gigabytes again.
#pragma once
#include <cstdint>
#include <map>
#include <string>

#include "hub/repository.h"

namespace tandem {

class CheckedFiles {
 public:
  // Reads the record; one that is missing or malformed is empty.
  explicit CheckedFiles(std::string record_path);

  // Whether the file at `path` is the one that was checked: the same digest, size and time of its
  // last change.
  bool has(const HubFile& file, const std::string& path) const;
  void add(const HubFile& file, const std::string& path);  // the file as it is at `path`
  void save() const;

 private:
  const std::string record_path_;
  std::map<std::string, std::string> states_;  // by path in the repository
};

}  // namespace tandem
