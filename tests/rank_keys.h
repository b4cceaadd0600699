// Engines of one or several ranks that compute keys of prompts for each other, and what is
// compared: pages byte by byte on every rank, and answers with all their bits. Ranks are threads.
#pragma once
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "cli/conversation.h"
#include "loader/loaded_model.h"
#include "tests/other_engine.h"
#include "tests/rank_grids.h"
#include "tests/repository.h"
#include "tests/whole_models.h"
#include "text/chat_format.h"
#include "text/tokenizer.h"

namespace tandem::test::rank_keys {

using Prompt = std::vector<int32_t>;

inline RankGrid grid_of(int dp, int tp, int pp) { return {dp, tp, ExpertDispatch::kGather, pp}; }
// Without replicas ranks exchange no rows.
inline RankGrid grid_without_rows(int tp, int pp) { return {1, tp, ExpertDispatch::kAuto, pp}; }

inline ModelOptions tiny(int64_t context = 1024) {
  return {.directory = kTinyR1,
          .n_threads = 1,
          .context = context,
          .kv_fraction = 0.9,
          .max_kv_tokens = 4 * context,
          .step_tokens = 128,
          .max_logits = 8,
          .draft = DraftChoice::kOff,
          .largest_mtp_share = 1,
          .attention = AttentionForm::kAbsorbed};
}

// The bytes of each page, other ones for each replica.
inline std::byte byte_of(int replica, int page, int64_t i) {
  return static_cast<std::byte>(replica * 101 + page * 37 + i * 7 + i / 251);
}
inline std::vector<std::byte> keys_of(int replica, int page, int64_t n) {
  std::vector<std::byte> keys(n);
  for (int64_t i = 0; i < n; ++i) keys[i] = byte_of(replica, page, i);
  return keys;
}

inline void write_pattern(LoadedModel& loaded, std::byte value) {
  for (int page = 0; page < loaded.cache().n_pages(); ++page)
    loaded.cache().for_each_piece(page, [&](std::span<std::byte> piece) {
      const std::vector<std::byte> bytes(piece.size(), value);
      loaded.model().device().copy(bytes.data(), std::ssize(bytes), piece.data());
      loaded.model().device().wait();
    });
}

inline std::vector<std::byte> bytes_of_page(LoadedModel& loaded, int page) {
  std::vector<std::byte> all;
  loaded.cache().for_each_piece(page, [&](std::span<std::byte> piece) {
    const size_t before = all.size();
    all.resize(before + piece.size());
    loaded.model().device().copy(piece.data(), std::ssize(piece), all.data() + before);
    loaded.model().device().wait();
  });
  return all;
}

// Rank 0 writes pages of every replica. They are then on all ranks of that replica, on each the
// layers of its stage, and nothing else has changed.
inline void expect_pages_where_they_belong(const RankGrid& grid, ModelOptions options) {
  constexpr auto kUntouched = std::byte{0xab};
  SCOPED_TRACE(grid.name());
  options.n_replicas = grid.dp;
  options.tp = grid.tp;
  options.n_stages = grid.pp;
  options.dispatch = grid.dispatch;
  run_local_ranks({grid.dp * grid.tp * grid.pp}, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(on_rank(options, group, &steps));
    StepRunner& model = loaded.model();
    KvCache& cache = loaded.cache();
    const int64_t n_bytes = model.key_bytes(cache);
    const int n_layers = loaded.config().n_layers;
    const std::vector<int> written = {0, 3, cache.n_pages() - 1};
    write_pattern(loaded, kUntouched);
    if (steps.leads()) {
      for (const int page : written)
        for (int replica = 0; replica < grid.dp; ++replica) {
          std::vector<std::byte> keys = keys_of(replica, page, n_bytes);
          model.write_page(cache, replica, page, keys);
          EXPECT_EQ(keys, keys_of(replica, page, n_bytes)) << "they stay as they are";
        }
      for (const int page : written)
        for (int replica = grid.dp - 1; replica >= 0; --replica) {
          std::vector<std::byte> keys(n_bytes);
          model.read_page(cache, replica, page, keys);
          EXPECT_EQ(keys, keys_of(replica, page, n_bytes)) << replica << ", page " << page;
        }
      steps.end();
    } else {
      steps.follow();
    }
    const int stage = group.rank() / (grid.dp * grid.tp);
    const int replica = group.rank() / grid.tp % grid.dp;
    const int first = n_layers * stage / grid.pp, end = n_layers * (stage + 1) / grid.pp;
    const int64_t of_layer = n_bytes / n_layers;
    for (int page = 0; page < cache.n_pages(); ++page) {
      std::vector<std::byte> want(cache.page_bytes(), kUntouched);
      if (std::ranges::find(written, page) != written.end()) {
        const std::vector<std::byte> keys = keys_of(replica, page, n_bytes);
        std::copy(keys.begin() + first * of_layer, keys.begin() + end * of_layer, want.begin());
      }
      ASSERT_EQ(bytes_of_page(loaded, page), want) << "rank " << group.rank() << ", " << page;
    }
  });
}

inline const Tokenizer& tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  return tokenizer;
}

inline Prompt prompt_of(int number, int n_sums = 12) {
  std::string text = "Tell me. ";
  for (int i = 0; i < n_sums; ++i)
    text += fmt::format("What is {} + {}? ", number * 50 + i, 1000 - i);
  return ChatFormat(kTinyR1, tokenizer()).prompt(first_messages("", text + "What is 478 + 356?"));
}

struct Questions {
  std::vector<Prompt> prompts;
  int n_tokens = 12;  // of each answer
};

// An answer with all its bits.
struct Answer {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  bool operator==(const Answer&) const = default;
};
struct Answered {
  std::vector<Answer> answers;
  int n_cached = 0;  // tokens of all prompts
  EngineCounts counts;
};

inline Engine engine_of(LoadedModel& loaded, PrefixSource* prefixes = nullptr) {
  return {loaded.model(),
          loaded.cache(),
          vocabulary_of(tokenizer(), loaded.config().vocab),
          loaded.context(),
          {.max_running = 8, .drafting = loaded.drafting(), .prefixes = prefixes}};
}

inline EngineRequest request_of(const Prompt& prompt, int n_tokens, Answer& answer) {
  EngineRequest request;
  request.request.prompt = prompt;
  request.request.max_new_tokens = n_tokens;
  request.request.sampling.temperature = 0;
  request.on_event = [&answer](const TokenEvent& event) {
    EXPECT_TRUE(event.error.empty()) << event.error;
    if (event.token) {
      answer.tokens.push_back(*event.token);
      answer.logprobs.push_back(event.logprob);
    }
    return true;
  };
  return request;
}

// All prompts at once, as clients of a server ask.
inline Answered answers_of(Engine& engine, const Questions& asked) {
  Answered all;
  all.answers.resize(asked.prompts.size());
  std::atomic<int> n_left = static_cast<int>(asked.prompts.size());
  for (size_t i = 0; i < asked.prompts.size(); ++i) {
    EngineRequest request = request_of(asked.prompts[i], asked.n_tokens, all.answers[i]);
    request.on_event = [&, take = std::move(request.on_event)](const TokenEvent& event) {
      take(event);
      if (!event.finish) return true;
      all.n_cached += event.cached_tokens;
      if (--n_left == 0) engine.stop();
      return true;
    };
    engine.submit(std::move(request));
  }
  engine.run();
  all.counts = engine.counts();
  return all;
}

inline Answered computed_by(const RankGrid& grid, const ModelOptions& options,
                            const Questions& asked) {
  Answered all;
  on_grid(grid, options, [&](LoadedModel& loaded) {
    Engine engine = engine_of(loaded);
    all = answers_of(engine, asked);
  });
  return all;
}

struct Fetched {
  Answered answered;
  int n_fetches, n_pages;
};

// One grid computes the prompts, the other one the answers.
inline Fetched fetched_by(const RankGrid& decode, const RankGrid& prefill,
                          const ModelOptions& options, const ModelOptions& of_prefill,
                          const Questions& asked, int most_pages = 1 << 30) {
  Fetched all{};
  on_grid(prefill, of_prefill, [&](LoadedModel& prefill_loaded) {
    Engine computing = engine_of(prefill_loaded);
    OtherEngine other(computing);
    other.most_pages = most_pages;
    std::thread decoding([&] {
      on_grid(decode, options, [&](LoadedModel& loaded) {
        Engine engine = engine_of(loaded, &other);
        all.answered = answers_of(engine, asked);
      });
      computing.stop();
    });
    computing.run();
    decoding.join();
    all.n_fetches = other.n_fetches;
    all.n_pages = other.n_pages;
  });
  return all;
}

// Prompts of which a page or more can be fetched, and their tokens before the last.
struct Fetchable {
  int n_prompts = 0, n_tokens = 0;
};
inline Fetchable fetchable(const Questions& asked) {
  Fetchable all;
  for (const Prompt& prompt : asked.prompts) {
    if (std::ssize(prompt) <= kPageSize) continue;
    ++all.n_prompts;
    all.n_tokens += static_cast<int>(prompt.size()) - 1;
  }
  return all;
}

inline std::vector<std::vector<int32_t>> tokens_of(const Answered& all) {
  std::vector<std::vector<int32_t>> tokens;
  for (const Answer& answer : all.answers) tokens.push_back(answer.tokens);
  return tokens;
}

}  // namespace tandem::test::rank_keys
