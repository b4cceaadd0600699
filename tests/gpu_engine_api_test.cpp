// The C API with a model on the GPU, and with a GPU that is lost: loading and answers fail with its
// message, and the model can be closed.
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "include/tandem.h"
#include "tests/lost_gpu.h"

namespace tandem::test {
namespace {

constexpr const char* kQuestion = R"([{"role": "user", "content": "What is 4 + 3?"}])";

tandem_status open_on_gpu(tandem_model** model) {
  tandem_options o = {};
  o.size = sizeof o;
  o.device = "cuda";
  o.context = 128;
  o.max_running = 4;
  o.step_tokens = 16;
  return tandem_open(TANDEM_SOURCE_DIR "/models/tiny-r1", &o, model);
}

tandem_status ask(tandem_model* model, std::string& text) {
  tandem_request r = {};
  r.size = sizeof r;
  r.messages = kQuestion;
  tandem_hooks hooks = {};
  hooks.user = &text;
  hooks.on_token = [](void* user, const tandem_token* token) {
    static_cast<std::string*>(user)->append(token->text, token->text_bytes);
    return 0;
  };
  return tandem_generate(model, &r, 1, &hooks);
}

TEST(GpuEngineApi, AnswersOnTheGpu) {
  tandem_model* model = nullptr;
  ASSERT_EQ(open_on_gpu(&model), TANDEM_OK) << tandem_error();
  std::string text;
  EXPECT_EQ(ask(model, text), TANDEM_OK) << tandem_error();
  EXPECT_TRUE(text.ends_with("The answer is 7.")) << text;
  EXPECT_EQ(std::string(tandem_describe(model)).find(R"("device":"cpu")"), std::string::npos);
  tandem_close(model);
}

TEST(GpuEngineApi, ALostGpuIsReported) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "a GPU that works is not lost";
  int n_loading = 0, n_answering = 0;
  for (int64_t n = 1;; n += 2 + n) {
    ASSERT_LT(n, 10'000'000);
    const LostAfter lost(n);
    gpu::open_gpu();
    auto* model = reinterpret_cast<tandem_model*>(1);
    if (open_on_gpu(&model) != TANDEM_OK) {
      EXPECT_EQ(model, nullptr);
      EXPECT_TRUE(std::string(tandem_error()).starts_with(kLost)) << tandem_error();
      ++n_loading;
      continue;
    }
    std::string text;
    tandem_status status = ask(model, text);
    if (status == TANDEM_OK) {
      tandem_close(model);
      break;
    }
    EXPECT_EQ(status, TANDEM_FAILED);
    EXPECT_TRUE(std::string(tandem_error()).starts_with(kLost)) << tandem_error();
    // The model lives until it is closed, however long that takes.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(ask(model, text), TANDEM_FAILED) << "later requests fail too";
    EXPECT_TRUE(std::string(tandem_error()).starts_with(kLost)) << tandem_error();
    tandem_close(model);
    ++n_answering;
  }
  EXPECT_GT(n_loading, 0);
  EXPECT_GT(n_answering, 0);
}

}  // namespace
}  // namespace tandem::test
