// What the router says about itself and its backends, as JSON and in Prometheus' text format.
#pragma once
#include <map>

#include "router/backend_pool.h"

namespace tandem {

// GET /backends: an object for each backend.
nlohmann::ordered_json backends_json(const BackendPool& pool, RouterClock::time_point now);
nlohmann::ordered_json backend_json(const BackendPool& pool, const Backend& backend,
                                    RouterClock::time_point now);
// GET /nodes/status: an object for each address, as lmdeploy's proxy has them.
nlohmann::ordered_json nodes_json(const BackendPool& pool);
// The entries of all backends' lists of models, each id once.
std::vector<Backend::Model> models_of(const BackendPool& pool);
// GET /metrics. `responses`: HTTP status to count.
std::string router_metrics(const BackendPool& pool, const std::map<int, int64_t>& responses);

}  // namespace tandem
