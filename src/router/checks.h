// Asks every backend again and again whether it answers, and for its models.
#pragma once
#include "http/http_client.h"
#include "router/backend_pool.h"

namespace tandem {

class Checks {
 public:
  struct Options {
    HttpClient::Seconds interval{1}, most{2};  // from one check to the next, and for its answer
    std::string api_key = {};                  // of the backends, for GET /v1/models
    std::function<void(const std::string&)> log = [](const std::string&) {};
  };

  // `trust` as in HttpClient. It and the pool outlive the object, and the object all coroutines of
  // the executor.
  Checks(BackendPool& pool, boost::asio::ssl::context& trust, Options options)
      : pool_(pool), trust_(trust), options_(std::move(options)) {}

  // Checks the backend until it is removed from the pool.
  void start(const boost::asio::any_io_executor& executor, const BackendPool::Pointer& backend);
  // A request failed because of the backend, which is not chosen until checks succeed; the first of
  // them begins at once.
  void on_failure(const BackendPool::Pointer& backend, const std::string& why);

 private:
  template <class T>
  using Task = boost::asio::awaitable<T>;

  Task<void> check_again_and_again(boost::asio::any_io_executor executor,
                                   BackendPool::Pointer backend);
  Task<void> check(const boost::asio::any_io_executor& executor, Backend& backend,
                   bool asks_for_models);
  void went_down(Backend& backend);
  void close_silent(Backend& backend) const;

  BackendPool& pool_;
  boost::asio::ssl::context& trust_;
  const Options options_;
};

// The entries of the answer to GET /v1/models. Throws Error when it is something else.
std::vector<Backend::Model> models_of(const std::string& answer);

}  // namespace tandem
