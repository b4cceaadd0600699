#include "tests/golden_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace tandem::test {

std::vector<std::string> golden_families(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.is_directory()) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> families_without_ties(const std::string& folder) {
  std::vector<std::string> all = golden_families(folder);
  std::erase(all, "t1");
  return all;
}

GoldenFile::GoldenFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  bytes_.assign(std::istreambuf_iterator<char>(file), {});
  uint64_t length = 0;
  if (bytes_.size() < sizeof(length)) throw std::runtime_error("no golden file " + path);
  std::memcpy(&length, bytes_.data(), sizeof(length));
  header_ = std::make_unique<nlohmann::json>(
      nlohmann::json::parse(bytes_.begin() + 8, bytes_.begin() + 8 + static_cast<int64_t>(length)));
  data_ = 8 + length;
}

GoldenFile::~GoldenFile() = default;

bool GoldenFile::has(const std::string& name) const { return header_->contains(name); }

std::vector<int32_t> GoldenFile::ints(const std::string& name) const {
  return values<int32_t>(name, "I32");
}

std::vector<float> GoldenFile::floats(const std::string& name) const {
  return values<float>(name, "F32");
}

template <class T>
std::vector<T> GoldenFile::values(const std::string& name, const char* dtype) const {
  const auto& entry = header_->at(name);
  if (entry.at("dtype") != dtype) throw std::runtime_error(name + " is not " + dtype);
  const size_t begin = entry.at("data_offsets")[0], end = entry.at("data_offsets")[1];
  std::vector<T> out((end - begin) / sizeof(T));
  std::memcpy(out.data(), bytes_.data() + data_ + begin, end - begin);
  return out;
}

}  // namespace tandem::test
