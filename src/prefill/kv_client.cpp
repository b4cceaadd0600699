#include "prefill/kv_client.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <thread>

#include "transport/handshake.h"

namespace tandem {
namespace {

constexpr std::chrono::milliseconds kAgain(500);  // between two tries to connect
constexpr size_t kMostKeptPages = 32;             // memory of pages that is used again

}  // namespace

// One prefill server.
class KvClient::Link final : public MessageSink {
 public:
  Link(KvClient& client, int index, Transport& transport, std::string address)
      : client_(client),
        index_(index),
        transport_(transport),
        address_(std::move(address)),
        waiter_(transport.waiter()),
        thread_([this] { run(); }) {}
  ~Link() override { stop(); }

  bool is_up() const { return is_up_; }
  int index() const { return index_; }
  int64_t n_pending() const { return n_pending_; }  // tokens that are asked for
  PrefixServerStatus status() const {
    return {address_, is_up_, n_fetches_, n_failures_, n_pages_, n_pending_};
  }

  void fetch(uint64_t id, std::vector<int32_t> tokens, int first_page, Receiver receiver) {
    const std::lock_guard lock(mutex_);
    n_pending_ += std::ssize(tokens);
    ++n_fetches_;
    orders_.push_back({id, {first_page, std::move(tokens)}, std::move(receiver)});
    waiter_->wake();
  }
  void cancel(uint64_t id) {
    const std::lock_guard lock(mutex_);
    cancelled_.push_back(id);
    waiter_->wake();
  }
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stops_ = true;
      changed_.notify_all();
    }
    waiter_->wake();
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Fetch {
    uint64_t id;
    KvRequest request;
    Receiver receiver;
    int next_page = 0;
    bool is_wanted = true;  // the engine takes more pages
  };

  void run() {
    while (!waits(std::chrono::milliseconds(0))) {
      try {
        connect();
        listen();
      } catch (const Error& error) {
        say(fmt::format("prefill server {} is down: {}", address_, error.what()));
      }
      if (is_up_.exchange(false)) lost();
      connection_.reset();
      sending_.clear();
      end_all();
      if (waits(kAgain)) break;
    }
    end_all();
  }

  // A server that comes back may have another cache.
  void lost() {
    if (!is_leaving_) ++n_failures_;
    const std::lock_guard lock(client_.mutex_);
    client_.computed_.forget(index_);
  }

  // Returns whether the thread is to end.
  bool waits(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [&] { return stops_; });
  }

  void say(const std::string& line) {
    if (line != said_) client_.options_.note(line);
    said_ = line;
  }

  void connect() {
    const ClientHandshake::Options options = {.address = address_,
                                              .peer = "the prefill server " + address_,
                                              .option = "--kv-secret",
                                              .secret = client_.options_.secret,
                                              .version = kKvProtocolVersion};
    ClientHandshake handshake(transport_, options);
    const KvWelcome theirs = kv_welcome_from(handshake.welcome(kMostKvWelcomeBytes));
    const KvWelcome& own = client_.own_;
    require(theirs.model == own.model, "it has another model than this server");
    require(theirs.key_bytes == own.key_bytes && theirs.page_size == own.page_size &&
                theirs.cache_type == own.cache_type,
            "its KV cache has pages of {} tokens and {} bytes in {}, and this server's of {} and "
            "{} in {}: give both the same --kv",
            theirs.page_size, theirs.key_bytes, theirs.cache_type, own.page_size, own.key_bytes,
            own.cache_type);
    max_tokens_ = theirs.max_tokens;
    connection_ = handshake.take();
    heard_ = Clock::now();
    is_up_ = true;
    say(fmt::format("prefill server {} is up{}", address_,
                    theirs.arithmetic == own.arithmetic
                        ? ""
                        : fmt::format(": it computes by {}, and this server by {}, so answers may "
                                      "differ in rare tokens from those of one server",
                                      theirs.arithmetic, own.arithmetic)));
  }

  void listen() {
    while (!waits(std::chrono::milliseconds(0))) {
      take_orders();
      if (connection_->progress(*this)) heard_ = Clock::now();
      if (connection_->is_sent()) sending_.clear();
      if (is_leaving_) throw ConnectionError("it has ended");
      const auto silent = Clock::now() - heard_;
      if (silent > client_.options_.deadline)
        throw ConnectionError(fmt::format("silent for {} ms", client_.options_.deadline.count()));
      MessageConnection* const connection = connection_.get();
      waiter_->wait(std::span(&connection, 1), nullptr, client_.options_.deadline - silent);
    }
  }

  void take_orders() {
    std::deque<Fetch> orders;
    std::vector<uint64_t> cancelled;
    {
      const std::lock_guard lock(mutex_);
      std::swap(orders, orders_);
      std::swap(cancelled, cancelled_);
    }
    for (Fetch& fetch : orders) {
      fetch.next_page = fetch.request.first_page;
      if (std::ssize(fetch.request.tokens) > max_tokens_) {
        end(fetch);
        continue;
      }
      const uint64_t number = ++last_number_;
      send(MessageKind::kRequest, number, bytes_of(fetch.request));
      fetches_.emplace(number, std::move(fetch));
    }
    for (const uint64_t id : cancelled) {
      const auto it = std::find_if(fetches_.begin(), fetches_.end(),
                                   [&](const auto& entry) { return entry.second.id == id; });
      if (it != fetches_.end()) give_up(it);
    }
  }

  void send(MessageKind kind, uint64_t number, std::vector<std::byte> bytes) {
    const MessageBytes body = sending_.emplace_back(std::move(bytes));
    connection_->send(kind, number, std::span(&body, 1));
  }

  std::span<std::byte> place(const MessageHeader& header) override {
    const uint64_t n = header.n_bytes;
    const bool fits =
        header.kind == MessageKind::kAnswer
            ? n == static_cast<uint64_t>(client_.own_.key_bytes)
            : n == 0 && (header.kind == MessageKind::kEnd || header.kind == MessageKind::kBeat ||
                         header.kind == MessageKind::kGoodbye);
    if (!fits)
      throw ProtocolError(fmt::format("an unexpected message of kind {} and {} bytes",
                                      static_cast<int>(header.kind), n));
    if (n == 0) return {};
    page_ = pages_.take();
    return page_.span();
  }

  void arrived(const MessageHeader& header) override {
    if (header.kind == MessageKind::kGoodbye) is_leaving_ = true;
    if (header.kind == MessageKind::kEnd)
      if (const auto it = fetches_.find(header.number); it != fetches_.end()) {
        end(it->second);
        fetches_.erase(it);
      }
    if (header.kind != MessageKind::kAnswer) return;
    const auto it = fetches_.find(request_of_page(header.number));
    if (it == fetches_.end()) return;  // it was given up
    Fetch& fetch = it->second;
    const int index = fetch.next_page++;
    require_protocol(index_of_page(header.number) == index, "page {} came instead of page {}",
                     index_of_page(header.number), index);
    require_protocol(int64_t{index} * client_.own_.page_size < std::ssize(fetch.request.tokens) - 1,
                     "page {} of {} tokens", index, fetch.request.tokens.size());
    ++n_pages_;
    const bool wants_more = fetch.receiver.page(index, std::move(page_));
    if (!wants_more) give_up(it);
  }

  void give_up(std::map<uint64_t, Fetch>::iterator it) {
    send(MessageKind::kCancel, it->first, {});
    end(it->second);
    fetches_.erase(it);
  }

  void end(Fetch& fetch) {
    n_pending_ -= std::ssize(fetch.request.tokens);
    {
      const std::lock_guard lock(client_.mutex_);
      client_.link_of_.erase(fetch.id);
    }
    fetch.receiver.ended();
  }

  void end_all() {
    is_leaving_ = false;
    for (auto& [number, fetch] : fetches_) end(fetch);
    fetches_.clear();
    std::deque<Fetch> orders;
    {
      const std::lock_guard lock(mutex_);
      std::swap(orders, orders_);
      cancelled_.clear();
    }
    for (Fetch& fetch : orders) end(fetch);
  }

  KvClient& client_;
  const int index_;
  Transport& transport_;
  const std::string address_;
  const std::unique_ptr<MessageWaiter> waiter_;
  std::atomic<bool> is_up_ = false;
  std::atomic<int64_t> n_pending_ = 0, n_fetches_ = 0, n_failures_ = 0, n_pages_ = 0;

  // The link's thread alone uses what follows.
  std::unique_ptr<MessageConnection> connection_;
  int64_t max_tokens_ = 0;
  Clock::time_point heard_{};
  bool is_leaving_ = false;
  std::deque<std::vector<std::byte>> sending_;  // until the connection has sent all of it
  BlockPool pages_{static_cast<size_t>(client_.own_.key_bytes), kMostKeptPages};
  BlockPool::Block page_;              // that arrives
  std::map<uint64_t, Fetch> fetches_;  // by the numbers of their requests
  uint64_t last_number_ = 0;
  std::string said_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Fetch> orders_;
  std::vector<uint64_t> cancelled_;
  bool stops_ = false;
  std::thread thread_;  // the last member: it uses all others
};

KvClient::KvClient(Transport& transport, Options options, const KvWelcome& own)
    : options_(std::move(options)), own_(kv_welcome_from(bytes_of(own))) {  // cut as theirs are
  for (const std::string& address : options_.addresses)
    links_.push_back(std::make_unique<Link>(*this, n_servers(), transport, address));
}

KvClient::~KvClient() { stop(); }

int KvClient::n_up() const {
  return static_cast<int>(
      std::count_if(links_.begin(), links_.end(), [](const auto& link) { return link->is_up(); }));
}

bool KvClient::pays(int64_t n_tokens) const {
  return n_tokens >= options_.least_tokens && n_up() > 0;
}

std::vector<PrefixServerStatus> KvClient::servers() const {
  std::vector<PrefixServerStatus> all;
  for (const auto& link : links_) all.push_back(link->status());
  return all;
}

void KvClient::fetch(uint64_t id, std::vector<int32_t> tokens, int first_page, Receiver receiver) {
  Link* best = nullptr;
  {
    const std::lock_guard lock(mutex_);
    best = best_for(tokens);
    if (best) link_of_[id] = best;
  }
  if (!best) return receiver.ended();
  best->fetch(id, std::move(tokens), first_page, std::move(receiver));
}

// Null if no server is up.
KvClient::Link* KvClient::best_for(const std::vector<int32_t>& tokens) {
  constexpr int64_t kTokensOfBlock = kPrefixBlockBytes / sizeof(int32_t);
  const std::vector<uint64_t> blocks = prefix_hashes(
      {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t)});
  const std::map<int, size_t> known = computed_.find(blocks);
  Link* best = nullptr;
  int64_t least = 0;
  for (const auto& link : links_) {
    if (!link->is_up()) continue;
    const auto blocks_of = known.find(link->index());
    const int64_t n_known =
        blocks_of == known.end() ? 0 : static_cast<int64_t>(blocks_of->second) * kTokensOfBlock;
    const int64_t n_tokens = link->n_pending() + std::ssize(tokens) - n_known;
    if (!best || n_tokens < least) best = link.get(), least = n_tokens;
  }
  if (best) computed_.add(blocks, best->index());
  return best;
}

void KvClient::cancel(uint64_t id) {
  Link* link = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto it = link_of_.find(id);
    if (it == link_of_.end()) return;
    link = it->second;
  }
  link->cancel(id);
}

void KvClient::stop() {
  for (const auto& link : links_) link->stop();
}

}  // namespace tandem
