// Keys of prompts from a prefill server to a decode server of this machine, over loopback, beside
// plain TCP with the same bytes in the same pieces, from as much memory to as much.
//  keys/TOKENS/ENCRYPTED: pages of 61 layers of R1's latents, 4.5 MB each. Both engines have tiny
//  dense layers and a thread each. The prefill server has the prompt in its prefix cache, so it
//  computes one token, and the decode server another; two such steps of a server that has the
//  prompt are subtracted.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <future>
#include <numeric>
#include <thread>

#include "bench/cpu_bench_model.h"
#include "bench/machine/machine_speed.h"
#include "engine/engine.h"
#include "prefill/kv_client.h"
#include "prefill/kv_server.h"
#include "transport/tcp.h"

namespace tandem {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;

constexpr int kVocabulary = 256;

ModelConfig deep_and_narrow() {
  ModelConfig c;
  c.dim = 128;
  c.vocab = kVocabulary;
  c.n_layers = c.n_dense_layers = 61;
  c.dense_dim = 128;
  c.n_shared_experts = 0;
  c.n_mtp_layers = 0;
  c.mla.n_heads = 1;
  c.mla.q_rank = 0;
  c.router = {};
  return c;
}

Engine::Options options_with(PrefixSource* source) {
  Engine::Options options;
  options.max_running = 4;
  options.prefixes = source;
  return options;
}

// An engine on a thread of its own.
class Server {
 public:
  explicit Server(int64_t n_tokens, PrefixSource* source = nullptr)
      : thread_([this, n_tokens, source] { run(n_tokens, source); }) {
    engine_ = ready_.get_future().get();
  }
  ~Server() {
    engine_->stop();
    thread_.join();
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  Engine* operator->() const { return engine_; }
  Engine& engine() const { return *engine_; }
  int64_t page_bytes() const { return page_bytes_; }

  // Until the first token of an answer to the prompt.
  double seconds_to_first(const std::vector<int32_t>& prompt) const {
    std::promise<void> over;
    EngineRequest request;
    request.request.prompt = prompt;
    request.request.max_new_tokens = 1;
    request.on_event = [&](const TokenEvent& event) {
      if (event.finish) over.set_value();
      return true;
    };
    const Stopwatch watch;
    engine_->submit(std::move(request));
    over.get_future().wait();
    return watch.seconds();
  }

 private:
  void run(int64_t n_tokens, PrefixSource* source) {
    const ModelConfig config = deep_and_narrow();
    const auto kernels = cpu::kernels_for(cpu::best_isa());
    Team team(1);
    CpuBenchModel model(config, {{DType::kBF16}, {DType::kBF16}}, kernels, team,
                        {.max_tokens = 256, .max_logits = 4}, n_tokens + 256);
    page_bytes_ = model.model.key_bytes(model.cache);
    Engine engine(model.model, model.cache, Vocabulary{kVocabulary, {}}, n_tokens + 128,
                  options_with(source));
    ready_.set_value(&engine);
    engine.run();
  }

  int64_t page_bytes_ = 0;
  std::promise<Engine*> ready_;
  Engine* engine_ = nullptr;
  std::thread thread_;
};

// Pieces from one memory to another, over one connection.
class PlainTcp {
 public:
  PlainTcp(int n_pieces, int64_t piece)
      : piece_(piece), from_(n_pieces * piece), to_(from_.bytes()) {
    std::fill_n(from_.data(), from_.bytes(), std::byte{1});
    std::fill_n(to_.data(), to_.bytes(), std::byte{2});
    tcp::acceptor acceptor(io_, {asio::ip::make_address("127.0.0.1"), 0});
    near_.connect(acceptor.local_endpoint());
    far_ = acceptor.accept();
  }
  double seconds() {
    std::thread sender([&] {
      for (int64_t at = 0; at < from_.bytes(); at += piece_)
        asio::write(far_, asio::buffer(from_.data() + at, piece_));
    });
    const Stopwatch watch;
    for (int64_t at = 0; at < to_.bytes(); at += piece_)
      asio::read(near_, asio::buffer(to_.data() + at, piece_));
    const double seconds = watch.seconds();
    sender.join();
    return seconds;
  }

 private:
  const int64_t piece_;
  Buffer from_, to_;
  asio::io_context io_;
  tcp::socket near_{io_}, far_{io_};
};

void keys(benchmark::State& state) {
  const auto n_tokens = static_cast<int>(state.range(0));
  const Secret secret = state.range(1) != 0 ? Secret("a secret of this benchmark") : Secret();
  const std::unique_ptr<Transport> transport = tcp_transport();
  Server prefill(n_tokens);
  KvServer server(*transport, {.secret = secret});
  const KvWelcome welcome = {.model = 1,
                             .key_bytes = prefill.page_bytes(),
                             .page_size = kPageSize,
                             .max_tokens = n_tokens + 1,
                             .cache_type = "bf16",
                             .arithmetic = "the same"};
  server.begin(prefill.engine(), welcome);
  KvClient client(*transport,
                  {.addresses = {fmt::format("127.0.0.1:{}", server.port())},
                   .secret = secret,
                   .least_tokens = 64},
                  welcome);
  while (client.n_up() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  Server decode(n_tokens, &client);
  std::vector<int32_t> prompt(n_tokens + 1);
  for (int i = 0; i <= n_tokens; ++i) prompt[i] = (i * 7 + i / 50) % kVocabulary;
  prefill.seconds_to_first(prompt);

  const int n_pages = n_tokens / kPageSize;
  PlainTcp plain(n_pages, prefill.page_bytes());
  const double bytes = static_cast<double>(n_pages) * static_cast<double>(prefill.page_bytes());
  std::vector<double> own, raw, ratios;
  while (state.KeepRunning()) {
    decode->forget_pages();
    const double fetched = decode.seconds_to_first(prompt);
    const double cached = decode.seconds_to_first(prompt);
    own.push_back(fetched - 2 * cached);
    raw.push_back(plain.seconds());
    ratios.push_back(raw.back() / own.back());
    state.SetIterationTime(own.back());
  }
  check(decode->counts().n_fetched_tokens == int64_t{n_tokens} * std::ssize(own), "all came");
  state.counters["GB_per_s"] = bytes / median(own) * 1e-9;
  state.counters["tcp_GB_per_s"] = bytes / median(raw) * 1e-9;
  state.counters["of_tcp"] = median(ratios);
  server.end();
}
BENCHMARK(keys)
    ->ArgsProduct({{1024, 4096}, {0, 1}})
    ->ArgNames({"tokens", "encrypted"})
    ->Iterations(9)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tandem

BENCHMARK_MAIN();
