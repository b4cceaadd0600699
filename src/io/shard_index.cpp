#include "io/shard_index.h"

#include <algorithm>
#include <filesystem>
#include <unordered_map>
#include <unordered_set>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

constexpr int64_t kMaxIndexBytes = 1 << 30;

// Receives the events of the JSON parser; building a tree of R1's index, 8 MB, would be slow.
// Ignores everything outside weight_map.
class IndexReader : public nlohmann::json::json_sax_t {
 public:
  explicit IndexReader(std::string_view source) : source_(source) {}

  ShardIndex index;
  bool has_map = false;

  bool start_object(size_t) override {
    if (depth_ == 1 && key_ == "weight_map") {
      require(!has_map, "{}: weight_map appears twice", source_);
      in_map_ = has_map = true;
    } else {
      refuse_in_map();
    }
    return enter();
  }
  bool end_object() override {
    in_map_ = false;
    return leave();
  }
  bool start_array(size_t) override {
    refuse_in_map();
    return enter();
  }
  bool end_array() override { return leave(); }

  bool key(std::string& text) override {
    if (in_map_ || depth_ == 1) key_ = std::move(text);
    return true;
  }
  bool string(std::string& text) override {
    if (!in_map_) return true;
    const int file = file_number(text);
    index.entries.push_back({std::move(key_), file});
    return true;
  }

  bool null() override { return refuse_in_map(); }
  bool boolean(bool) override { return refuse_in_map(); }
  bool number_integer(int64_t) override { return refuse_in_map(); }
  bool number_unsigned(uint64_t) override { return refuse_in_map(); }
  bool number_float(double, const std::string&) override { return refuse_in_map(); }
  bool binary(nlohmann::json::binary_t&) override { return refuse_in_map(); }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    fail("{}: broken JSON: {}: download it again", source_, json_message(error));
  }

 private:
  bool enter() {
    require(++depth_ < 64, "{}: nested deeper than 64 levels", source_);
    return true;
  }
  bool leave() {
    --depth_;
    return true;
  }
  bool refuse_in_map() const {
    if (in_map_) fail("{}: weight_map of {} is not a file name", source_, shown(key_));
    return true;
  }

  int file_number(const std::string& file) {
    const auto [found, is_new] = numbers_.try_emplace(file, static_cast<int>(index.files.size()));
    if (!is_new) return found->second;
    const std::filesystem::path path = std::filesystem::path(file).lexically_normal();
    if (file.empty() || file.find('\0') != file.npos || path.is_absolute() || *path.begin() == "..")
      fail("{}: the file {} of tensor {} is not inside the model's directory", source_, shown(file),
           shown(key_));
    index.files.push_back(file);
    return found->second;
  }

  std::string_view source_;
  int depth_ = 0;
  bool in_map_ = false;
  std::string key_;
  std::unordered_map<std::string, int> numbers_;  // file name -> index in index.files
};

void sort_files(ShardIndex& index) {
  const std::vector<std::string> old = index.files;
  std::sort(index.files.begin(), index.files.end());
  std::vector<int> place(old.size());
  for (size_t i = 0; i < old.size(); ++i)
    place[i] = static_cast<int>(std::lower_bound(index.files.begin(), index.files.end(), old[i]) -
                                index.files.begin());
  for (ShardIndex::Entry& entry : index.entries) entry.file = place[entry.file];
}

}  // namespace

ShardIndex read_shard_index(const std::string& path) {
  return parse_shard_index(read_text_file(path, kMaxIndexBytes), path);
}

ShardIndex parse_shard_index(std::string_view text, std::string_view source) {
  IndexReader reader(source);
  scan_json(text, source, reader);
  require(reader.has_map && !reader.index.entries.empty(), "{}: weight_map is missing or empty",
          source);
  std::unordered_set<std::string_view> names;
  for (const ShardIndex::Entry& entry : reader.index.entries)
    if (!names.insert(entry.tensor).second)
      fail("{}: tensor {} appears twice in weight_map", source, shown(entry.tensor));
  sort_files(reader.index);
  return std::move(reader.index);
}

}  // namespace tandem
