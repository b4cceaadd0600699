// Sends requests to a server at their arrival times and reads the answers, on one thread that only
// waits and reads, so that a server on the same machine keeps its cores.
#pragma once
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "bench/serving/answer_reader.h"
#include "bench/serving/dataset.h"

namespace tandem {

// http://host:port/prefix
struct ServerAddress {
  std::string host, port, prefix;
  std::string url() const { return "http://" + host + ":" + port + prefix; }
};
// Throws Error for malformed text; the default port is 80.
ServerAddress parse_address(const std::string& base_url);

struct ServingLoadOptions {
  ServerAddress server;
  ServingApi api = ServingApi::kCompletions;
  std::string model, api_key;
  bool streams = true, ignore_eos = true, logprobs = false;
  nlohmann::ordered_json extra_body = nlohmann::ordered_json::object();
  double rate = 0;              // requests per second; infinite: all at once
  int most_at_once = 0;         // maximum in flight; 0: no limit
  bool shows_progress = false;  // a line on standard error
};

struct ServingLoadResult {
  std::vector<ServingOutput> outputs;  // [requests]
  double seconds = 0;
  bool interrupted = false;  // by SIGINT: unfinished requests are marked interrupted
};

// The body of one request.
std::string request_body(const ServingLoadOptions& options, const ServingRequest& request);

// `numpy` draws the gaps between arrivals. Throws std::runtime_error when the server's name cannot
// be resolved; errors of a request are stored in its output.
ServingLoadResult run_load(const ServingLoadOptions& options,
                           std::span<const ServingRequest> requests, NumpyRandom& numpy);

struct ServerReply {
  int status;
  std::string reason, body;
};
// A single request outside the load. Throws std::runtime_error when the server cannot be reached.
ServerReply ask_server(const ServingLoadOptions& options, const char* method,
                       const std::string& path);

}  // namespace tandem
