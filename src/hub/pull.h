// Fetches a checkpoint from a hub: the files of one commit, by several connections, each checked.
// What an interrupted call left is continued.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hub/repository.h"

namespace tandem {

struct PullOptions {
  HubAddress address;
  std::string directory;             // made if it does not exist
  std::vector<std::string> include;  // patterns of paths
  std::string token;                 // of the hub; may be empty
  int n_connections = 8;
  double idle_seconds = 30;  // a connection that receives nothing for so long is opened again
  int n_tries = 8;           // in a row that bring no byte, before giving up
};

struct PullReport {
  std::string commit;
  int n_files = 0, n_fetched = 0;
  int n_unchecked = 0;                   // files for which the hub names no digest
  int64_t bytes = 0, fetched_bytes = 0;  // of all files; received by this call
  double seconds = 0;
};

// Each may be empty.
struct PullEvents {
  // What is to be done, before it begins: files that are missing, and their bytes; those of them
  // that an earlier call received.
  std::function<void(const HubListing&, int missing, int64_t missing_bytes, int64_t kept_bytes)>
      start;
  std::function<void(const HubFile&)> checked;  // a file is whole; from any thread
  // About ten times a second: bytes that are there, and received by this call, of the missing ones.
  std::function<void(int64_t done, int64_t received, int64_t total, double seconds)> progress;
  std::function<void(int64_t done, int64_t total, double seconds)> checking;  // files found there
};

// Throws Error for what the user or the hub has wrong, RunError when the network fails for good.
// What was received stays for the next call, in DIRECTORY/.pull: files get their names when all are
// whole, config.json last, so that no loader takes what is there in between for a checkpoint, and
// an older commit in the same folder works until then.
PullReport pull(const PullOptions& options, const PullEvents& events);

}  // namespace tandem
