#include "comm/agreement.h"

#include <algorithm>
#include <new>
#include <optional>
#include <vector>

namespace tandem {

void run_on_all(Group& group, const std::function<void()>& work) {
  struct Failure {
    std::string message;
    bool while_running;
  };
  std::optional<Failure> mine;
  try {
    work();
  } catch (const AgreedError&) {
    throw;
  } catch (const GroupError&) {
    throw;
  } catch (const RunError& error) {
    mine = {error.what(), true};
  } catch (const Error& error) {
    mine = {error.what(), false};
  } catch (const std::bad_alloc&) {
    mine = {kNoMemoryLeft, true};
  } catch (const std::exception& error) {
    mine = {error.what(), true};
  }
  enum : uint8_t { kDone, kFailed, kFailedWhileRunning };
  std::vector<uint8_t> states(group.size());
  const uint8_t state = !mine ? kDone : mine->while_running ? kFailedWhileRunning : kFailed;
  group.all_gather_values(state, std::span(states));
  const auto first =
      std::find_if(states.begin(), states.end(), [](uint8_t s) { return s != kDone; });
  if (first == states.end()) return;
  const bool here = first - states.begin() == group.rank();
  throw AgreedError(here ? mine->message : "another rank reports an error", here,
                    *first == kFailedWhileRunning);
}

int64_t least_on_all(Group& group, int64_t number) {
  run_on_all(group, [] {});
  std::vector<int64_t> all(group.size());
  group.all_gather_values(number, std::span(all));
  return *std::min_element(all.begin(), all.end());
}

std::string text_of_first(Group& group, std::string text) {
  int64_t n = std::ssize(text);
  group.broadcast(std::as_writable_bytes(std::span(&n, 1)), 0);
  text.resize(n);
  group.broadcast(std::as_writable_bytes(std::span(text)), 0);
  return text;
}

void require_same(Group& group, std::string_view what, std::string_view text) {
  constexpr size_t kBefore = 20, kShown = 60;
  const std::string first = text_of_first(group, std::string(text));
  const auto [differs, unused] =
      std::mismatch(text.begin(), text.end(), first.begin(), first.end());
  const size_t at = differs - text.begin(), from = at - std::min(at, kBefore);
  require(
      text == first,
      "the {} of rank {} differs from that of rank 0: \"{}\" instead of \"{}\"; start all ranks "
      "alike",
      what, group.rank(), text.substr(std::min(from, text.size()), kShown),
      first.substr(std::min(from, first.size()), kShown));
}

void require_same_on_all(Group& group, std::string_view what,
                         const std::function<std::string()>& text) {
  std::string mine;
  run_on_all(group, [&] { mine = text(); });
  run_on_all(group, [&] { require_same(group, what, mine); });
}

}  // namespace tandem
