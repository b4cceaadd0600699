// The decode side: fetches the keys of prompts from prefill servers. A thread a server connects,
// connects again when the server was lost, and gives pages to the engine as they come. A prompt
// goes to the server that would have the fewest tokens to compute: those of prompts before it, and
// those of its own that the server has not computed lately.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "prefill/kv_messages.h"
#include "scheduling/prefix_source.h"
#include "text/prefix_table.h"
#include "transport/secret.h"
#include "transport/transport.h"

namespace tandem {

class KvClient final : public PrefixSource {
 public:
  struct Options {
    std::vector<std::string> addresses;
    Secret secret = {};
    int64_t least_tokens = 256;                // fewer are computed here
    std::chrono::milliseconds deadline{2000};  // a server that is silent for so long is lost
    // Called with one line when a server is lost or comes back, from the thread that notices it.
    std::function<void(const std::string&)> note = [](const std::string&) {};
  };
  // `own`: what this server would tell as a prefill server; others are used if they have the same
  // model, and pages of the same bytes. The transport outlives the object.
  KvClient(Transport& transport, Options options, const KvWelcome& own);
  ~KvClient() override;

  bool pays(int64_t n_tokens) const override;
  void fetch(uint64_t id, std::vector<int32_t> tokens, int first_page, Receiver receiver) override;
  void cancel(uint64_t id) override;
  void stop() override;

  std::vector<PrefixServerStatus> servers() const override;
  int n_servers() const { return static_cast<int>(links_.size()); }
  int n_up() const;  // thread-safe

 private:
  class Link;
  Link* best_for(const std::vector<int32_t>& tokens);

  const Options options_;
  const KvWelcome own_;
  std::vector<std::unique_ptr<Link>> links_;
  std::mutex mutex_;                   // guards what follows
  std::map<uint64_t, Link*> link_of_;  // of fetches
  PrefixTable computed_;               // by links, in order
};

}  // namespace tandem
