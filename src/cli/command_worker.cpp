// tandem worker: serves routed experts to backbones. The main thread loads and computes; another
// one has the connections.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "cli/command_options.h"
#include "cli/console.h"
#include "cli/typed_options.h"
#include "core/memory.h"
#include "io/json.h"
#include "loader/loaded_experts.h"
#include "offload/parts/placed_workers.h"
#include "offload/plan/placement_json.h"
#include "transport/tcp.h"

namespace tandem {
namespace {

// Set by SIGTERM and Ctrl-C, which end the program while it loads.
volatile sig_atomic_t is_asked_to_end = 0;

void end_after_signals() {
  struct sigaction action {};
  action.sa_handler = [](int) { is_asked_to_end = 1; };
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
}

// Text of this command's own, ended by a newline. Scripts wait for it, so it is written at once.
void print_now(std::FILE* to, const std::string& line) {
  fmt::print(to, "{}\n", line);
  std::fflush(to);
}

std::string name_of_this_host() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  const std::string whole = name.data();
  return whole.substr(0, whole.find('.'));  // without the domain
}

// The experts, their format and the device that the placement gives to this worker.
void place(const Options& options, LoadedExpertsOptions& out) {
  const ExpertWorkerOptions& w = options.worker;
  const Placement placement = placement_from_file(w.placement);
  const PlacedWorker worker =
      placed_worker(ModelConfig::from_directory(options.model.directory), placement,
                    worker_called(placement, w.host, name_of_this_host()));
  out.experts = ranges_text(worker.experts);
  out.device = worker.device.is_cpu() ? DeviceChoice::kCpu : DeviceChoice::kCuda;
  out.format = worker.format;
  out.max_rows = std::max(out.max_rows, worker.max_rows);
}

// The placement says what these options say without it.
void require_placed_alone(const CLI::App& worker, const ExpertWorkerOptions& w) {
  require(!w.placement.empty() || w.host.empty(),
          "--host {}: it names a worker of --placement: add that, or leave --host out", w.host);
  for (const char* const option : {"--experts", "--device", "--format"}) {
    const CLI::Option* const given = worker.get_option(option);
    require(w.placement.empty() || given->count() == 0,
            "--placement {} and {} {}: the placement says it: leave one of them out", w.placement,
            option, given->count() == 0 ? "" : given->results().front());
  }
}

}  // namespace

int worker_command(const Options& options) {
  const ExpertWorkerOptions& w = options.worker;
  require(w.chunk >= 1 && w.chunk <= kMaxStepTokens, "--chunk {}: must be between 1 and {}",
          w.chunk, kMaxStepTokens);
  const auto note = [&](const std::string& line) {
    if (!options.quiet) print_now(stderr, line);
  };
  const Secret secret = w.secret.read();
  const ChosenTransport chosen = chosen_transport(w.transport, secret, "--worker-transport");
  if (!chosen.why_not.empty()) note("rows travel by TCP: " + chosen.why_not);
  ExpertServer server(*chosen.transport, {.address = w.listen,
                                          .secret = secret,
                                          .is_asked_to_end = [] { return is_asked_to_end != 0; },
                                          .note = note});
  LoadedExpertsOptions what = {.directory = options.model.directory,
                               .experts = w.experts,
                               .device = options.model.device,
                               .isa = options.model.isa,
                               .n_threads = options.model.n_threads,
                               .format = w.format,
                               .max_rows = w.chunk,
                               .draft = w.draft,
                               .moves_experts = w.experts_move,
                               .cache = options.model.cache,
                               .cache_use = options.model.cache_use,
                               .progress = load_progress(options.quiet),
                               .write_progress = options.model.write_progress,
                               .warn = options.model.warn};
  if (!w.placement.empty()) place(options, what);
  LoadedExperts loaded(what);
  end_after_signals();
  if (const StandbyExperts* const standby = loaded.standby())
    note(fmt::format("standby: {} of {} experts fit the free memory, {:.2f} GB each",
                     standby->n_fitting(), loaded.served().config.router.n_experts,
                     gigabytes(standby->expert_bytes())));
  else
    note(loaded.places());
  if (loaded.spare_bytes() > 0)
    note(fmt::format("experts move: {:.3f} GB of memory are for those that come",
                     gigabytes(loaded.spare_bytes())));
  print_now(stdout, "listening on " + with_port(w.listen, server.port()));
  server.run(loaded.served());
  return 0;
}

void add_worker(CLI::App& app, Options& options, Command& command) {
  ExpertWorkerOptions& w = options.worker;
  CLI::App* worker =
      app.add_subcommand("worker", "compute routed experts for backbones (--workers)");
  worker->footer(
      "Examples:\n"
      "  tandem worker ./DeepSeek-R1 --experts 0-127 --listen 10.0.0.2:9000 --worker-secret key\n"
      "  tandem worker ./DeepSeek-R1 --experts 128-255 --listen 10.0.0.3:9000 --worker-secret key\n"
      "  tandem worker ./DeepSeek-R1 --placement plan.json --host host2 --listen 10.0.0.3:9000 "
      "--worker-secret key\n"
      "  tandem worker ./DeepSeek-R1 --experts standby --listen 10.0.0.4:9000 --worker-secret key\n"
      "  tandem serve ./DeepSeek-R1 --workers 10.0.0.2:9000,10.0.0.3:9000,10.0.0.4:9000 "
      "--worker-secret key\n"
      "After SIGTERM a worker tells its backbones, answers what it has, and ends.");
  worker->callback([&options, &command, worker] {
    command = worker_command;
    require_placed_alone(*worker, options.worker);
    if (options.model.directory.empty()) options.model.directory = embedded_model();
    require_folder(options.model.directory);
  });
  worker->add_option("MODEL", options.model.directory,
                     "Hugging Face model directory; without it, the embedded tiny-r1");
  add_value(*worker, "--experts", w.experts,
            "experts of every layer that it computes, such as 0-127 or 0-3,8-11; auto: all; "
            "standby: none at first, and those whose workers are lost once a backbone asks for "
            "them");
  worker->add_flag("--experts-move", w.experts_move,
                   "let backbones with --rebalance move its experts to other workers with this "
                   "option, and theirs to it; takes memory for one layer's experts more");
  worker->add_option("--placement", w.placement,
                     "placement file written by `tandem plan --out`, which says what this worker "
                     "has, instead of --experts, --device and --format");
  worker->add_option("--host", w.host,
                     "which worker of the placement this is: host2, or host2.gpu1 where several "
                     "are on a host; without it, the one on the host with this machine's name");
  add_value(*worker, "--listen", w.listen,
            "HOST:PORT to listen on, which is printed on standard output once the experts are "
            "loaded; port 0: any free port");
  add_secret(*worker, "--worker", w.secret,
             "file with a secret that backbones must know; needed where other machines can "
             "connect");
  add_transport(*worker, "--worker", w.transport);
  add_format(
      *worker, "--format", w.format,
      "format of the experts in memory: auto (as stored, or int8 or int4 where memory is too "
      "small), fp8, bf16, int8, int4, int4-32 or int4-128");
  std::vector<std::pair<std::string, DraftChoice>> drafts;
  for (const auto draft : {DraftChoice::kOff, DraftChoice::kAuto, DraftChoice::kMtp})
    drafts.emplace_back(name_of(draft), draft);
  add_choice(*worker, "--draft", w.draft, drafts,
             "whether it has experts of the layer for multi-token prediction too, with which "
             "backbones draft (--draft); auto: where that layer is small beside the model and fits "
             "the memory");
  add_value(*worker, "--chunk", w.chunk, "most rows of a request: tokens per step of a backbone");
  add_device(
      *worker, options.model.device,
      "what computes: cpu, cuda (a GPU, which keeps as many of the experts as fit its memory, "
      "and the CPU for the others) or auto (a GPU if there is one)");
  add_threads(*worker, options.model.n_threads);
  add_isa(*worker, options.model.isa,
          "instruction set: auto, reference, avx2, avx512 or amx; workers with the same expert use "
          "the same, or all a GPU for it");
  worker->add_option("--cache", options.model.cache,
                     "folder of the packed cache; without it, $XDG_CACHE_HOME/tandem or "
                     "~/.cache/tandem is read");
  worker->add_flag("-q,--quiet", options.quiet, "print no progress and no backbones");
}

void add_workers(CLI::App& command, WorkerOptions& workers) {
  command
      .add_option("--workers", workers.addresses,
                  "HOST:PORT of processes that compute routed experts (`tandem worker`), separated "
                  "by commas, where a name with several addresses means all of them; this process "
                  "computes the experts that none of them has")
      ->delimiter(',')
      ->allow_extra_args(false);
  add_secret(command, "--worker", workers.secret, "file with the secret of the workers");
  add_transport(command, "--worker", workers.transport);
  command
      .add_option_function<double>(
          "--worker-deadline",
          [&workers](double ms) {
            require(ms >= 20 && ms <= 60'000,
                    "--worker-deadline {:g}: must be between 20 and "
                    "60000",
                    ms);
            workers.deadline = std::chrono::milliseconds(static_cast<int>(ms));
          },
          "ms after which a silent worker is replaced by another one that has its experts")
      ->default_str(fmt::format("{}", workers.deadline.count()));
  command
      .add_option_function<double>(
          "--worker-patience",
          [&workers](double seconds) {
            require(seconds >= 0 && seconds <= 86'400,
                    "--worker-patience {:g}: must be between 0 and 86400", seconds);
            workers.patience = std::chrono::duration<double>(seconds);
          },
          "seconds that answers wait for experts all of whose workers are down, before they "
          "fail; they wait on while a standby gets on with loading them")
      ->default_str(fmt::format("{:g}", workers.patience.count()));
}

void add_workers_file(CLI::App& command, WorkerOptions& workers) {
  command.add_option("--workers-file", workers.file,
                     "file with the workers, an address a line, # comments; it is read again when "
                     "it changes: workers then come and go while answers are computed");
}

}  // namespace tandem
