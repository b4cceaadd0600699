// Messages between prefill and decode servers: what is written is read, and what is malformed is
// refused.
#include "prefill/kv_messages.h"

#include <gtest/gtest.h>

#include "tests/error_of.h"

namespace tandem {
namespace {

TEST(KvMessages, WelcomesAreReadAsTheyAreWritten) {
  const KvWelcome welcome = {.model = 0x0123456789abcdef,
                             .key_bytes = 4'497'408,
                             .page_size = 64,
                             .max_tokens = 163'840,
                             .cache_type = "fp8",
                             .arithmetic = "emulated GPU of compute capability 8.9"};
  std::vector<std::byte> body = bytes_of(welcome);
  EXPECT_LE(body.size(), kMostKvWelcomeBytes);
  const KvWelcome read = kv_welcome_from(body);
  EXPECT_EQ(read.model, welcome.model);
  EXPECT_EQ(read.key_bytes, welcome.key_bytes);
  EXPECT_EQ(read.page_size, welcome.page_size);
  EXPECT_EQ(read.max_tokens, welcome.max_tokens);
  EXPECT_EQ(read.cache_type, welcome.cache_type);
  EXPECT_EQ(read.arithmetic, welcome.arithmetic);
  for (size_t n = 0; n < body.size(); ++n)
    EXPECT_THROW(kv_welcome_from(std::span(body).first(n)), ProtocolError) << n;
  body.push_back({});
  EXPECT_THROW(kv_welcome_from(body), ProtocolError);
  // Many workers make a long text.
  const std::string text(70'000, 'w');
  const KvWelcome many =
      kv_welcome_from(bytes_of(KvWelcome{.cache_type = "bf16", .arithmetic = text}));
  EXPECT_EQ(many.cache_type, "bf16");
  EXPECT_EQ(many.arithmetic, text.substr(0, 4000));
}

TEST(KvMessages, RequestsAreReadAsTheyAreWritten) {
  const KvRequest request = {.first_page = 1, .tokens = {5, 6, 7, 8, 9, 0, 3, 4, 1}};
  const std::vector<std::byte> body = bytes_of(request);
  EXPECT_EQ(body.size(), most_bytes_of_request(9));
  const KvRequest read = kv_request_from(body, 4, 10);
  EXPECT_EQ(read.first_page, 1);
  EXPECT_EQ(read.tokens, request.tokens);
}

TEST(KvMessages, MalformedRequestsAreRefused) {
  const auto refusal = [](const KvRequest& request, int page_size) {
    return error_of([&] { kv_request_from(bytes_of(request), page_size, 10); });
  };
  const std::vector<int32_t> tokens = {5, 6, 7, 8, 2};
  EXPECT_EQ(refusal({0, tokens}, 4), "no error");
  EXPECT_EQ(refusal({1, tokens}, 3), "no error") << "a page that is partly filled";
  EXPECT_TRUE(says(refusal({0, {5}}, 4), "with 1 tokens")) << "none wanted";
  EXPECT_TRUE(says(refusal({0, {}}, 4), "with 0 tokens"));
  EXPECT_TRUE(says(refusal({1, tokens}, 4), "page 1 of 5"));
  EXPECT_TRUE(says(refusal({-1, tokens}, 4), "page -1 of 5"));
  EXPECT_TRUE(says(refusal({0, {5, 6, 7, 8, 10}}, 4), "token 10 of 10"));
  EXPECT_TRUE(says(refusal({0, {5, -1, 7, 8, 9}}, 4), "token -1 of 10"));
  std::vector<std::byte> body = bytes_of(KvRequest{0, tokens});
  body.pop_back();
  EXPECT_THROW(kv_request_from(body, 4, 10), ProtocolError);
  EXPECT_THROW(kv_request_from(std::span(body).first(7), 4, 10), ProtocolError);
}

TEST(KvMessages, PagesAreNumberedByRequestAndIndex) {
  const uint64_t number = page_number(0xfffffffe, 2'559);
  EXPECT_EQ(request_of_page(number), 0xfffffffe);
  EXPECT_EQ(index_of_page(number), 2'559);
}

}  // namespace
}  // namespace tandem
