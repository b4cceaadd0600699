// Reads the tensors of tests/golden/*/golden.safetensors without the engine's own reader, which the
// goldens also test.
#pragma once
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace tandem::test {

// The subfolders of a folder of goldens, by name.
std::vector<std::string> golden_families(const std::string& folder);
// Without t1, which has near ties between experts that a BF16 cache decides differently.
std::vector<std::string> families_without_ties(const std::string& folder);

class GoldenFile {
 public:
  explicit GoldenFile(const std::string& path);
  ~GoldenFile();

  bool has(const std::string& name) const;
  std::vector<int32_t> ints(const std::string& name) const;
  std::vector<float> floats(const std::string& name) const;

 private:
  template <class T>
  std::vector<T> values(const std::string& name, const char* dtype) const;

  std::string bytes_;
  std::unique_ptr<const nlohmann::json> header_;
  size_t data_;
};

}  // namespace tandem::test
