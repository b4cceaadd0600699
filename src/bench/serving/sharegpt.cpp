#include <array>

#include "bench/serving/dataset.h"
#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

constexpr int64_t kMaxFileBytes = int64_t{4} << 30;
constexpr int kEntry = 2, kTurn = 4;  // depths: [ { "conversations": [ { "value"

// A SAX parser: the common file has 670 MB, and its tree would take several times that.
class Reader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit Reader(const std::string& path) : path_(path) {}

  std::vector<std::pair<std::string, std::string>> take() { return std::move(pairs_); }

  bool null() override { return other(); }
  bool boolean(bool) override { return other(); }
  bool number_integer(int64_t) override { return other(); }
  bool number_unsigned(uint64_t) override { return other(); }
  bool number_float(double, const std::string&) override { return other(); }
  bool binary(nlohmann::json::binary_t&) override { return other(); }

  bool string(std::string& text) override {
    if (depth_ != kTurn || !conversation_ || !is_value_) return other();
    if (conversation_->n_turns <= 2)
      conversation_->turns[conversation_->n_turns - 1] = std::move(text);
    return true;
  }
  bool key(std::string& name) override {
    if (depth_ == kEntry)
      conversation_ = name == "conversations"  ? &plural_
                      : name == "conversation" ? &singular_
                                               : nullptr;
    is_value_ = depth_ == kTurn && name == "value";
    return true;
  }
  bool start_object(size_t) override {
    if (depth_ == 0) refuse();
    if (++depth_ == kTurn && conversation_) ++conversation_->n_turns;
    if (depth_ == kEntry) plural_ = singular_ = {};
    return true;
  }
  bool end_object() override {
    if (depth_-- == kEntry) end_entry();
    return true;
  }
  bool start_array(size_t) override {
    if (++depth_ == kEntry + 1 && conversation_) conversation_->given = true;
    is_value_ = false;  // items of a list belong to no key
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) override {
    fail("{}: {}", path_, json_message(error));
  }

 private:
  struct Conversation {
    bool given = false;
    size_t n_turns = 0;
    std::array<std::optional<std::string>, 2> turns;
  };

  bool other() {
    if (depth_ == 0) refuse();
    return true;
  }
  void end_entry() {
    Conversation& taken = plural_.given ? plural_ : singular_;
    conversation_ = nullptr;
    if (taken.n_turns < 2) return;
    require(taken.turns[0] && taken.turns[1],
            "{}: conversation {} has a turn without a text as its \"value\"", path_,
            pairs_.size() + 1);
    pairs_.emplace_back(std::move(*taken.turns[0]), std::move(*taken.turns[1]));
  }
  [[noreturn]] void refuse() const { fail("{}: is not a list of conversations", path_); }

  const std::string& path_;
  std::vector<std::pair<std::string, std::string>> pairs_;
  Conversation plural_, singular_;
  Conversation* conversation_ = nullptr;  // of the current entry
  int depth_ = 0;
  bool is_value_ = false;
};

}  // namespace

std::vector<std::pair<std::string, std::string>> read_sharegpt(const std::string& path) {
  Reader reader(path);
  scan_json(read_text_file(path, kMaxFileBytes), path, reader);
  return reader.take();
}

}  // namespace tandem
