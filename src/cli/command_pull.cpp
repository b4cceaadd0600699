// tandem pull: fetches a checkpoint from a hub.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <nlohmann/json.hpp>

#include "cli/console.h"
#include "cli/options.h"
#include "core/memory.h"
#include "hub/pull.h"
#include "io/load_jobs.h"

namespace tandem {
namespace {

constexpr const char* kHub = "https://huggingface.co";
constexpr int kMaxConnections = 64, kMaxTries = 1000;
constexpr double kMaxIdleSeconds = 3600;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// What the engine reads, and what users want beside it.
std::vector<std::string> usual_files() {
  return {"*.safetensors", "*.json", "*.jinja", "tiktoken.model", "LICENSE*", "README.md"};
}

HubAddress address_of(const PullCommandOptions& o) {
  check_repository_name(o.repository);
  require(!o.revision.empty(), "--revision: name a branch, a tag or a commit");
  std::string endpoint = environment("HF_ENDPOINT");
  if (endpoint.empty()) endpoint = kHub;
  require(endpoint.starts_with("https://") || endpoint.starts_with("http://"),
          "HF_ENDPOINT is {}: it must begin with https:// or http://", endpoint);
  while (endpoint.ends_with('/')) endpoint.pop_back();
  return {.endpoint = endpoint, .repository = o.repository, .revision = o.revision};
}

PullOptions pull_options(const PullCommandOptions& o) {
  require(o.n_connections >= 1 && o.n_connections <= kMaxConnections,
          "--connections {}: must be 1 to {}", o.n_connections, kMaxConnections);
  require(o.n_tries >= 1 && o.n_tries <= kMaxTries, "--tries {}: must be 1 to {}", o.n_tries,
          kMaxTries);
  require(o.idle_seconds >= 1 && o.idle_seconds <= kMaxIdleSeconds, "--idle {}: must be 1 to {}",
          o.idle_seconds, kMaxIdleSeconds);
  const std::string name = o.repository.substr(o.repository.find('/') + 1);
  return {.address = address_of(o),
          .directory = o.directory.empty() ? name : o.directory,
          .include = o.include.empty() ? usual_files() : o.include,
          .token = environment("HF_TOKEN"),
          .n_connections = o.n_connections,
          .idle_seconds = o.idle_seconds,
          .n_tries = o.n_tries};
}

std::string size_text(int64_t bytes) {
  return bytes < 100'000'000 ? fmt::format("{:.1f} MB", static_cast<double>(bytes) * 1e-6)
                             : fmt::format("{:.1f} GB", gigabytes(bytes));
}

PullEvents printed(const PullOptions& options, std::mutex& mutex) {
  const bool terminal = isatty(STDERR_FILENO) != 0;
  PullEvents events;
  events.start = [&](const HubListing& listing, int missing, int64_t missing_bytes, int64_t kept) {
    fmt::print(
        "{} at {}: {} files, {}; to fetch: {} files, {}{}\n", options.address.repository,
        listing.commit.substr(0, 12), listing.files.size(), size_text(listing.bytes()), missing,
        size_text(missing_bytes - kept),
        kept > 0 ? fmt::format(" ({} are there from an earlier call)", size_text(kept)) : "");
    std::fflush(stdout);
  };
  events.checked = [&mutex, terminal](const HubFile& file) {
    const std::lock_guard lock(mutex);
    if (terminal) show_progress("");
    fmt::print("{}  {}  {}\n", file.path, size_text(file.bytes),
               file.digest.kind == Digest::Kind::kNone
                   ? "whole; the hub names no digest"
                   : fmt::format("whole, {} checked", digest_name(file.digest.kind)));
    std::fflush(stdout);
  };
  if (!terminal) return events;
  events.progress = [&mutex](int64_t done, int64_t received, int64_t total, double seconds) {
    const std::lock_guard lock(mutex);
    show_progress(done == total ? ""
                                : progress_line(done, total, seconds, "fetching", done - received));
  };
  events.checking = [&mutex](int64_t done, int64_t total, double seconds) {
    const std::lock_guard lock(mutex);
    show_progress(done == total ? "" : progress_line(done, total, seconds, "checking"));
  };
  return events;
}

}  // namespace

int pull_command(const Options& options) {
  const PullOptions pull_with = pull_options(options.pull);
  std::mutex mutex;
  const bool silent = options.quiet || options.json;
  const PullReport report = pull(pull_with, silent ? PullEvents{} : printed(pull_with, mutex));
  if (options.json) {
    const nlohmann::ordered_json json = {{"repository", pull_with.address.repository},
                                         {"revision", pull_with.address.revision},
                                         {"commit", report.commit},
                                         {"directory", pull_with.directory},
                                         {"files", report.n_files},
                                         {"bytes", report.bytes},
                                         {"fetched_files", report.n_fetched},
                                         {"fetched_bytes", report.fetched_bytes},
                                         {"unchecked_files", report.n_unchecked},
                                         {"seconds", report.seconds}};
    std::puts(json.dump().c_str());
  } else if (!options.quiet) {
    fmt::print("{}: {} files, {}, all whole; fetched {} in {:.1f} s ({:.1f} MB/s)\n",
               pull_with.directory, report.n_files, size_text(report.bytes),
               size_text(report.fetched_bytes), report.seconds,
               static_cast<double>(report.fetched_bytes) * 1e-6 / report.seconds);
  }
  return 0;
}

}  // namespace tandem
