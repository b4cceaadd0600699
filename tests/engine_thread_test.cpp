// An engine that has failed lives until its thread is told to stop, because receivers of answers
// refer to it.
#include "loader/engine_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>

#include "scheduling/prefix_source.h"
#include "tests/error_of.h"
#include "tests/whole_models.h"
#include "text/tokenizer.h"

namespace tandem::test {
namespace {

// Fetches nothing, and says when it is destroyed: after the engine that uses it.
class NoKeys final : public PrefixSource {
 public:
  explicit NoKeys(std::atomic<bool>& is_gone) : is_gone_(is_gone) {}
  ~NoKeys() override { is_gone_ = true; }
  bool pays(int64_t) const override { return false; }
  void fetch(uint64_t, std::vector<int32_t>, int, Receiver) override {}
  void cancel(uint64_t) override {}
  void stop() override {}

 private:
  std::atomic<bool>& is_gone_;
};

TEST(EngineThread, AFailedEngineLivesUntilItIsStopped) {
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  std::atomic<bool> is_gone = false;
  std::promise<void> failed;
  EngineThread thread(
      tokenizer,
      {.model = for_many_sequences({.directory = kTinyR1, .n_threads = 1, .context = 64},
                                   ModelConfig::from_directory(kTinyR1), 2, 0),
       .max_running = 2,
       .prefixes = [&](LoadedModel&) { return std::make_unique<NoKeys>(is_gone); }},
      {.on_ready = [](Engine&, LoadedModel&) { fail("a lost GPU"); },
       .on_failed = [&] { failed.set_value(); }});
  failed.get_future().wait();
  // What ends the thread would come at once.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(is_gone);
  thread.stop();
  EXPECT_TRUE(is_gone);
  EXPECT_EQ(error_of([&] { thread.rethrow(); }), "a lost GPU");
}

}  // namespace
}  // namespace tandem::test
