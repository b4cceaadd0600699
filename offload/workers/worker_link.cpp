#include "offload/workers/worker_link.h"

#include <algorithm>
#include <utility>

#include "offload/workers/shards.h"
#include "offload/workers/worker_fit.h"
#include "transport/handshake.h"

namespace tandem {
namespace {

constexpr std::chrono::milliseconds kAgain(500);  // between two tries to connect
// Until a worker is asked again for what it has refused: another backbone may have left.
constexpr std::chrono::seconds kAskAgain(1);

ClientHandshake::Options handshake_with(const WorkerLinkOptions& options) {
  return {.address = options.address,
          .peer = "the worker " + options.address,
          .option = "--worker-secret",
          .secret = options.secret};
}

}  // namespace

// Takes what a worker sends after the handshake.
class WorkerLink::Receiver final : public MessageSink {
 public:
  // `answers` is null where no request is under way.
  Receiver(WorkerLink& link, AnswerSink* answers) : link_(link), answers_(answers) {}
  std::span<std::byte> place(const MessageHeader& header) override {
    if (header.kind == MessageKind::kAnswer && answers_)
      return answers_->place_of_answer(header.number, header.n_bytes);
    if (header.kind == MessageKind::kLoading && (link_.is_standby() || link_.moves_experts()) &&
        header.n_bytes <= kMostLoadAnswerBytes) {
      link_.load_answer_.resize(header.n_bytes);
      return link_.load_answer_;
    }
    const bool is_known = header.kind == MessageKind::kBeat || header.kind == MessageKind::kGoodbye;
    if (!is_known || header.n_bytes != 0)
      throw ProtocolError(fmt::format("an unexpected message of kind {} and {} bytes",
                                      static_cast<int>(header.kind), header.n_bytes));
    return {};
  }
  void arrived(const MessageHeader& header) override {
    if (header.kind == MessageKind::kGoodbye && link_.state_ != State::kLeaving) {
      if (link_.state_ == State::kUp) link_.down_since_ = Clock::now();
      link_.state_ = State::kLeaving;
    }
    if (header.kind == MessageKind::kLoading) link_.load_answered();
    if (header.kind != MessageKind::kAnswer) return;
    --link_.n_requests_;
    answers_->answered(header.number);
  }

 private:
  WorkerLink& link_;
  AnswerSink* const answers_;
};

WorkerLink::WorkerLink(Transport& transport, WorkerLinkOptions options)
    : transport_(transport), options_(std::move(options)), thread_([this] { run(); }) {}

WorkerLink::~WorkerLink() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  woken_.notify_all();
  thread_.join();
  connection_.reset();  // before the memory that it sends and receives
}

WorkerWelcome WorkerLink::ask() {
  const ClientHandshake::Options how = handshake_with(options_);
  ClientHandshake handshake(transport_, how);
  WorkerWelcome welcome = welcome_from(handshake.welcome(kMostWelcomeBytes));
  if (options_.path == PathUse::kAlways) handshake.use_path();
  return welcome;
}

void WorkerLink::keep(const WorkerWelcome& expected, int max_rows, MessageWaiter& changed) {
  expected_ = expected;
  is_standby_ = expected.is_standby;
  moves_experts_ = expected.moves_experts;
  is_known_ = true;
  begin(max_rows, changed);
}

void WorkerLink::keep_newcomer(RequireFits require_fits, int max_rows, MessageWaiter& changed) {
  require_fits_ = std::move(require_fits);
  begin(max_rows, changed);
}

void WorkerLink::begin(int max_rows, MessageWaiter& changed) {
  {
    const std::lock_guard lock(mutex_);
    max_rows_ = max_rows;
    changed_ = &changed;
    down_since_ = Clock::now();
    begins_ = true;
  }
  woken_.notify_all();
}

void WorkerLink::run() {
  std::unique_lock lock(mutex_);
  woken_.wait(lock, [&] { return begins_ || stops_; });
  while (!stops_ && !(leaves_ && state_ == State::kDown)) {
    lock.unlock();
    const bool was_down = state_ == State::kDown;
    if (was_down)
      connect_again();
    else
      listen();
    const auto pause = state_ == State::kDown && was_down ? kAgain : longest_pause();
    lock.lock();
    woken_.wait_for(lock, pause, [&] { return stops_ || is_woken_; });
    is_woken_ = false;
  }
}

// Until the thread looks again. An order that is not sent yet, because a step uses the connection
// or fills it, leaves soon after.
std::chrono::milliseconds WorkerLink::longest_pause() const {
  constexpr std::chrono::milliseconds kShortest(5);
  const std::lock_guard lock(mutex_);
  const bool has_order =
      state_ != State::kDown && (is_ordered_ || is_use_ordered_) && (is_standby_ || moves_experts_);
  return has_order ? kShortest : std::max(kShortest, options_.deadline / 4);
}

void WorkerLink::connect_again() {
  try {
    try {
      connect(options_.path != PathUse::kNever);
    } catch (const PathError& error) {
      if (options_.path == PathUse::kAlways) throw;
      options_.note(
          fmt::format("worker {}: TCP is used, because {}", options_.address, error.what()));
      connect(false);
    }
  } catch (const Error& error) {
    const std::lock_guard lock(mutex_);
    if (why_down_ != error.what())
      options_.note(fmt::format("worker {} {}: {}", options_.address,
                                is_known_ ? "is down" : "has not joined", error.what()));
    why_down_ = error.what();
  }
}

// The setup and its answer go by the path if it is used, so a worker that is up is reached by it in
// both directions.
void WorkerLink::connect(bool uses_path) {
  const ClientHandshake::Options how = handshake_with(options_);
  ClientHandshake handshake(transport_, how);
  const WorkerWelcome welcome = welcome_from(handshake.welcome(kMostWelcomeBytes));
  require_expected(welcome);
  const auto beat = std::max<int64_t>(1, options_.deadline.count() / 5);
  const WorkerSetup setup = {.beat_ms = static_cast<uint32_t>(beat),
                             .max_rows = static_cast<uint32_t>(max_rows_)};
  if (uses_path) handshake.use_path();
  try {
    handshake.send(MessageKind::kSetup, std::as_bytes(std::span(&setup, 1)));
    handshake.receive(MessageKind::kReady, 0);
  } catch (const ConnectionError& error) {
    if (!uses_path) throw;
    throw PathError(fmt::format("nothing comes by UCX: {}", error.what()));
  }
  connected(welcome, handshake.take(), uses_path);
}

// A standby that was started again has lost what it had loaded, and loads it before it is up. So
// does a worker whose experts move, which may give away what has left it.
void WorkerLink::connected(const WorkerWelcome& welcome,
                           std::unique_ptr<MessageConnection> connection, bool uses_path) {
  ExpertsOfLayers lacking;
  {
    const std::lock_guard lock(mutex_);
    if (!is_known_) expected_ = welcome;
    lacking = layers_without(expected_.experts, welcome.experts);
    if (welcome.moves_experts) {
      here_ = welcome.experts;
      is_use_ordered_ = true;
      gives_up_load_ = false;
    } else {
      add_layers(welcome.experts, expected_.experts);
    }
    load_.refused.clear();
    load_.why.clear();
    load_.answer = {};
  }
  const bool has_all = !has_any(lacking);
  is_standby_ = welcome.is_standby;
  moves_experts_ = welcome.moves_experts;
  has_grown_ = is_known_.exchange(true) && is_standby_;
  {
    const std::lock_guard lock(in_use_);
    connection_ = std::move(connection);
    n_requests_ = 0;
    heard_ = Clock::now();
    state_ = has_all ? State::kUp : State::kLacking;
  }
  if (!has_all) {
    const std::lock_guard lock(mutex_);
    why_down_ = fmt::format("it loads experts {} again", text_of_layers(lacking));
    return order(lacking);
  }
  changed_->wake();
  options_.note(fmt::format("worker {} is up{}", options_.address, uses_path ? ", by UCX" : ""));
}

void WorkerLink::require_expected(const WorkerWelcome& welcome) const {
  if (!is_known_) return require_fits_(welcome);
  WorkerWelcome same = welcome;
  if ((is_standby_ || moves_experts_) && has_model(same, expected_) &&
      same.n_layers == expected_.n_layers)
    same.experts = expected_.experts;
  // How many experts fit a GPU depends on what else is in its memory.
  const std::vector<bool> on_gpu = std::exchange(same.on_gpu, expected_.on_gpu);
  require(
      same != expected_ || on_gpu == expected_.on_gpu,
      "it has experts {} on its GPU, and had {} there before, whose sums have other bits: start "
      "it when as much memory of the GPU is free",
      text_of_experts(listed(on_gpu)), text_of_experts(listed(expected_.on_gpu)));
  same.on_gpu = on_gpu;
  require(same == expected_,
          "it has another model, other experts or other kernels than before: start it as it was");
}

// Between steps.
void WorkerLink::listen() {
  const std::unique_lock lock(in_use_, std::try_to_lock);
  if (!lock.owns_lock() || !connection_) return;
  if (leaves_) return lose("it is not listed any more", false);
  class Nothing final : public AnswerSink {
    std::span<std::byte> place_of_answer(uint64_t number, uint64_t) override {
      throw ProtocolError(fmt::format("an answer to request {}, which was not made", number));
    }
    void answered(uint64_t) override {}
  } nothing;
  try {
    ask_again();
    send_order();
    Receiver receiver(*this, &nothing);
    if (connection_->progress(receiver)) heard_ = Clock::now();
    if (state_ == State::kLeaving) return lose("it has said goodbye", false);
    if (Clock::now() - heard_ > options_.deadline)
      lose(fmt::format("silent for {} ms", options_.deadline.count()), true);
  } catch (const Error& error) {
    lose(error.what(), state_ != State::kLeaving);
  }
}

void WorkerLink::lose(const std::string& why, bool is_failure) {
  connection_.reset();
  n_requests_ = 0;
  if (state_ == State::kUp) down_since_ = Clock::now();
  if (is_failure) ++n_failures_;
  {
    const std::lock_guard lock(mutex_);
    why_down_ = why;
    load_.is_under_way = is_ordered_ = false;
    state_ = State::kDown;
  }
  options_.note(fmt::format("worker {} is down: {}", options_.address, why));
}

std::string WorkerLink::why_down() const {
  const std::lock_guard lock(mutex_);
  return why_down_;
}

WorkerWelcome WorkerLink::welcome() const {
  const std::lock_guard lock(mutex_);
  return expected_;
}

WorkerLink::Load WorkerLink::load() const {
  const std::lock_guard lock(mutex_);
  return load_;
}

bool WorkerLink::ask_to_load(const ExpertsOfLayers& experts) {
  const std::lock_guard lock(mutex_);
  if (!is_up() || load_.is_under_way) return false;
  ExpertsOfLayers all(expected_.n_layers, std::vector<bool>(expected_.experts[0].size()));
  add_layers(experts, all);
  order(std::move(all));
  wake();
  return true;
}

void WorkerLink::give_up_load() {
  const std::lock_guard lock(mutex_);
  gives_up_load_ = load_.is_under_way;
  is_use_ordered_ = true;
  wake();
}

void WorkerLink::hold(const ExpertsOfLayers& experts) {
  const std::lock_guard lock(mutex_);
  expected_.experts = experts;
  is_use_ordered_ = true;
  wake();
}

// With the mutex: the thread sends what is ordered.
void WorkerLink::wake() {
  is_woken_ = true;
  woken_.notify_all();
}

// With the mutex.
void WorkerLink::order(ExpertsOfLayers experts) {
  load_.is_under_way = is_ordered_ = true;
  load_.experts = std::move(experts);
  load_.why.clear();
  load_.answer = {};
  load_.got_on = Clock::now();
}

// Who uses the connection sends what another thread has asked for.
void WorkerLink::send_order() {
  if ((!is_standby_ && !moves_experts_) || !connection_->is_sent()) return;
  bool tells_uses = false, asks = false;
  {
    const std::lock_guard lock(mutex_);
    tells_uses = std::exchange(is_use_ordered_, false);
    asks = std::exchange(is_ordered_, false);
    if (tells_uses) uses_ = bytes_of(common_layers(here_, expected_.experts));
    if (asks) order_ = bytes_of(load_.experts);
  }
  const MessageBytes uses = uses_, order = order_;
  if (tells_uses) connection_->send(MessageKind::kUses, 0, std::span(&uses, 1));
  if (asks) connection_->send(MessageKind::kLoad, 0, std::span(&order, 1));
}

// A worker whose experts move is down while it has no room for what this backbone needs.
void WorkerLink::ask_again() {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kLacking || !moves_experts_ || load_.is_under_way) return;
  if (Clock::now() - load_.got_on >= kAskAgain) order(layers_without(expected_.experts, here_));
}

void WorkerLink::load_answered() {
  const LoadAnswer answer = load_answer_from(load_answer_);
  std::string said;
  {
    const std::lock_guard lock(mutex_);
    require_protocol(load_.is_under_way && !is_ordered_, "an answer to a load that was not asked");
    if (answer != load_.answer) load_.got_on = Clock::now();
    load_.answer = answer;
    if (answer.state == LoadAnswer::State::kLoading) return;
    load_.is_under_way = false;
    load_.why = answer.why;
    const bool is_loaded = answer.state == LoadAnswer::State::kLoaded;
    if (!is_loaded)
      add_layers(load_.experts, load_.refused);
    else
      add_layers(load_.experts, moves_experts_ ? here_ : expected_.experts);
    said = fmt::format("worker {} {} experts {}{}", options_.address,
                       is_loaded ? "has loaded" : "does not load", text_of_layers(load_.experts),
                       is_loaded ? "" : ": " + answer.why);
    if (state_ == State::kLacking && std::exchange(why_down_, answer.why) == answer.why)
      said.clear();
    if (state_ == State::kLacking && is_loaded) state_ = State::kUp;
    if (is_loaded && is_standby_) has_grown_ = true;
    if (std::exchange(gives_up_load_, false)) is_use_ordered_ = true;
  }
  changed_->wake();
  if (!said.empty()) options_.note(said);
}

WorkerStatus WorkerLink::status() const {
  const std::lock_guard lock(mutex_);
  return {.address = options_.address,
          .is_up = is_up(),
          .has_joined = is_known_ && require_fits_,
          .is_standby = is_standby_,
          .n_experts = std::ssize(in_any_layer(expected_.experts)),
          .n_on_gpu = std::ssize(listed(expected_.on_gpu)),
          .is_loading = load_.is_under_way,
          .n_requests = n_all_requests_,
          .n_failures = n_failures_,
          .seconds = seconds_};
}

bool WorkerLink::take() {
  if (!is_up()) return false;
  in_use_.lock();
  if (is_up()) return true;
  in_use_.unlock();
  return false;
}

bool WorkerLink::request(uint64_t number, std::span<const MessageBytes> body) {
  if (n_requests_ == 0) heard_ = Clock::now();
  ++n_requests_;
  ++n_all_requests_;
  try {
    connection_->send(MessageKind::kRequest, number, body);
    return true;
  } catch (const Error& error) {
    lose(error.what(), state_ != State::kLeaving);
    return false;
  }
}

bool WorkerLink::progress(AnswerSink& sink) {
  try {
    send_order();
    Receiver receiver(*this, &sink);
    if (connection_->progress(receiver)) heard_ = Clock::now();
    if (n_requests_ == 0 || Clock::now() - heard_ <= options_.deadline) return true;
    lose(fmt::format("silent for {} ms", options_.deadline.count()), true);
  } catch (const Error& error) {
    lose(error.what(), true);
  }
  return false;
}

void WorkerLink::drop() { lose("its requests were given up", false); }

}  // namespace tandem
