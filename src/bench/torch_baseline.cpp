#include "bench/torch_baseline.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "bench/bench_model.h"
#include "core/check.h"

namespace tandem {
namespace {

// Answers each line of JSON with one. Weights are made once for each shape.
constexpr const char* kScript = R"python(
import json, statistics, sys, time
def say(**answer):
    print(json.dumps(answer), flush=True)
try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    say(error=str(error))
    sys.exit()
torch.set_num_threads(int(sys.argv[1]))
torch.set_grad_enabled(False)
seconds, cold_bytes, made = float(sys.argv[2]), int(sys.argv[3]), {}

def copies(*shapes):
    """As many equal sets of matrices as come from memory, not from a cache."""
    if shapes not in made:
        made.clear()
        size = sum(2 * rows * cols for rows, cols in shapes)
        one = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
        made[shapes] = [one] + [[m.clone() for m in one] for _ in range(-(-cold_bytes // size) - 1)]
    return made[shapes]

def median(run):
    run(0)
    times = []
    while len(times) < 3 or sum(times) < seconds:
        begin = time.perf_counter()
        run(len(times) + 1)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)

def embed(vocab, dim, tokens):
    table = copies((vocab, dim))[0][0]
    ids = [torch.randint(0, vocab, (tokens,)) for _ in range(64)]
    return lambda i: F.embedding(ids[i % 64], table)

def linear(rows, cols, tokens):
    all, x = copies((rows, cols)), torch.randn((tokens, cols)).to(torch.bfloat16)
    return lambda i: F.linear(x, all[i % len(all)][0])

def feed_forward(dim, width, tokens):
    all, x = copies((width, dim), (width, dim), (dim, width)), torch.randn((tokens, dim)).to(torch.bfloat16)
    def run(i):
        gate, up, down = all[i % len(all)]
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    return run

say(version=torch.__version__)
for line in sys.stdin:
    request = json.loads(line)
    try:
        say(seconds=median(globals()[request.pop("what")](**request)))
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
)python";

}  // namespace

TorchBaseline::TorchBaseline(int n_threads, double seconds) {
  int in[2], out[2];
  require(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0, "--baseline torch: {}",
          std::strerror(errno));
  const std::string threads = std::to_string(n_threads), time = fmt::format("{}", seconds),
                    cold = std::to_string(cold_bytes());
  const char* const arguments[] = {"python3",    "-c",         kScript, threads.c_str(),
                                   time.c_str(), cold.c_str(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  const int error = posix_spawnp(&pid_, "python3", &actions, nullptr,
                                 const_cast<char* const*>(arguments), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(in[0]);
  close(out[1]);
  to_ = in[1];
  from_ = out[0];
  if (error != 0) pid_ = -1;
  try {
    require(error == 0, "--baseline torch: python3 does not start: {}", std::strerror(error));
    const nlohmann::json greeting = read();
    require(greeting.contains("version"), "--baseline torch: python3 cannot import torch ({})",
            greeting.value("error", "it ended"));
    version_ = greeting["version"];
  } catch (...) {
    end();
    throw;
  }
}

TorchBaseline::~TorchBaseline() { end(); }

void TorchBaseline::end() {
  close(to_);
  close(from_);
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
}

nlohmann::json TorchBaseline::read() {
  size_t end;
  while ((end = received_.find('\n')) == std::string::npos) {
    char buffer[4096];
    const ssize_t n = ::read(from_, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return nlohmann::json::object();
    received_.append(buffer, n);
  }
  const auto line = nlohmann::json::parse(received_.substr(0, end), nullptr, false);
  received_.erase(0, end + 1);
  return line.is_object() ? line : nlohmann::json::object();
}

double TorchBaseline::ask(const nlohmann::json& request) {
  const std::string line = request.dump() + "\n";
  const bool sent = write(to_, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  const nlohmann::json answer = sent ? read() : nlohmann::json::object();
  if (!answer.contains("seconds"))
    throw std::runtime_error("--baseline torch: PyTorch fails: " +
                             answer.value("error", "its process ended"));
  return answer["seconds"];
}

double TorchBaseline::embed(int64_t vocab, int64_t dim, int n_tokens) {
  return ask({{"what", "embed"}, {"vocab", vocab}, {"dim", dim}, {"tokens", n_tokens}});
}

double TorchBaseline::linear(int64_t rows, int64_t cols, int n_tokens) {
  return ask({{"what", "linear"}, {"rows", rows}, {"cols", cols}, {"tokens", n_tokens}});
}

double TorchBaseline::feed_forward(int64_t dim, int64_t width, int n_tokens) {
  return ask({{"what", "feed_forward"}, {"dim", dim}, {"width", width}, {"tokens", n_tokens}});
}

}  // namespace tandem
