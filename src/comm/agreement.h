// What all ranks must agree on before they compute together.
#pragma once
#include <functional>
#include <string>
#include <string_view>

#include "comm/group.h"

namespace tandem {

// An error after which all ranks end, and that one of them reports.
struct AgreedError : Error {
  AgreedError(const std::string& message, bool is_reported_here, bool was_running)
      : Error(message), reported_here(is_reported_here), while_running(was_running) {}
  bool reported_here;
  bool while_running;  // RunError
};

// Runs `work` on all ranks. If it throws Error on some, all ranks throw AgreedError: the lowest of
// them with its message, and it reports it. A GroupError passes, and an AgreedError of a call in
// `work`.
void run_on_all(Group& group, const std::function<void()>& work);

// Throws Error on every rank whose `text` differs from rank 0's, naming the rank, `what` and both
// texts where they begin to differ. Use it inside of run_on_all().
void require_same(Group& group, std::string_view what, std::string_view text);

// Computes a text on all ranks and compares them by require_same(). Throws AgreedError.
void require_same_on_all(Group& group, std::string_view what,
                         const std::function<std::string()>& text);

// The least number of all ranks. Throws AgreedError when another rank fails in run_on_all()
// instead.
int64_t least_on_all(Group& group, int64_t number);

// The text of rank 0, on every rank.
std::string text_of_first(Group& group, std::string text);

}  // namespace tandem
