// A server in front of several others: it answers paths of its own and forwards all others to the
// backend that is expected to answer first.
#pragma once
#include <map>
#include <span>

#include "http/request_handler.h"
#include "router/checks.h"
#include "router/forwarding.h"

namespace tandem {

class Router final : public RequestHandler {
 public:
  struct Options {
    std::string api_key;                         // clients send it; empty: none is required
    std::string backend_api_key = {};            // of the backends; empty: clients' and api_key
    std::vector<std::string> cors_origins = {};  // empty: the backends decide
    std::string backends_file = {};              // is read again when it changes; empty: none
    std::string backend_ca = {};                 // of trusting_context(), for https
    bool accepts_registration = false;           // by POST /nodes/add
    HttpClient::Seconds check_interval{1}, check_most{2}, connect_most{5};
    HttpClient::Seconds first_byte_most{0};  // 0: no limit
    std::function<void(const std::string&)> log = [](const std::string&) {};
  };

  // The router must outlive the server that it is given to.
  Router(Options options, const std::vector<HttpAddress>& backends);

  Result handle(const HttpRequest& request) noexcept override;
  // Bodies up to this size are read in tens of microseconds.
  static constexpr size_t kQuickBytes = 8 << 10;
  bool handles_quickly(const HttpRequest& request) const override {
    return request.body.size() <= kQuickBytes;
  }
  HttpResponse error_response(const ApiError& error) override;
  std::string cors(const HttpRequest& request) const override;
  void count_response(int status) override { ++responses_[status]; }
  void set_stopping() override { stopping_ = true; }
  void begin(const boost::asio::any_io_executor& executor) override;
  void end() override;

 private:
  struct Own;
  static std::span<const Own> own_paths();

  Result route(const HttpRequest& request);
  Result answer_own(const Own& own, const HttpRequest& request);
  Result forward(const HttpRequest& request);

  HttpResponse health(const HttpRequest& request);
  HttpResponse metrics(const HttpRequest& request);
  HttpResponse models(const HttpRequest& request);
  HttpResponse backends(const HttpRequest& request);
  HttpResponse drain(const HttpRequest& request);
  HttpResponse add_node(const HttpRequest& request);
  HttpResponse remove_node(const HttpRequest& request);
  HttpResponse nodes(const HttpRequest& request);
  void require_registration() const;

  boost::asio::awaitable<void> keep_house(boost::asio::any_io_executor executor);
  void read_backends_file();

  const Options options_;
  BackendPool pool_;
  boost::asio::ssl::context trust_;  // of HttpClient
  Checks checks_;
  ForwardContext context_;
  std::map<int, int64_t> responses_;  // HTTP status: count
  std::string file_text_;             // of the file of backends, as last read
  bool file_is_bad_ = false;
  bool stopping_ = false;
};

}  // namespace tandem
