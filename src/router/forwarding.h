// One request on its way: to a backend, to another one if that fails before the client has got
// anything, and the answer back as it arrives.
#pragma once
#include "http/http_client.h"
#include "http/request_handler.h"
#include "router/backend_pool.h"
#include "router/retry.h"

namespace tandem {

struct ForwardedRequest {
  std::string method, target;  // target: with the query
  std::string fields;          // header lines for the backend, without Host and Content-Length
  std::string body;
  RequestSummary summary = {};
  bool generates = false;      // its time and tokens tell how fast the backend is
  std::string backend = {};    // address of the only one that may get it; empty: any
  bool needs_backend = false;  // it concerns one backend: it has to name one, unless there is one
};

// The lines of the fields that are sent on: without those about one connection (RFC 9110, section
// 7.6.1), the length of the body, Host, Expect and those of `without`, in lower case.
std::string forwarded_fields(const std::vector<HttpField>& fields,
                             const std::vector<std::string>& without);

// What all requests share.
struct ForwardContext {
  boost::asio::any_io_executor executor = {};
  BackendPool& pool;
  boost::asio::ssl::context& trust;  // as in HttpClient
  std::string backend_api_key = {};  // replaces the clients' Authorization; empty: theirs is sent
  bool replaces_cors = false;        // answers get the router's CORS headers
  HttpClient::Seconds connect_most{5}, send_most{30};
  HttpClient::Seconds first_byte_most{0};  // 0: as long as the backend answers checks
  // A request failed because of the backend.
  std::function<void(const BackendPool::Pointer&, const std::string& why)> on_failure;
  bool closed = false;  // connections are not kept any more
};

class Forwarding final : public RelayedAnswer {
 public:
  // `cors`: header lines for the answer. The context outlives the object.
  Forwarding(ForwardContext& context, ForwardedRequest request, std::string cors)
      : context_(context), request_(std::move(request)), cors_(std::move(cors)) {}

  boost::asio::awaitable<bool> write_to(AnswerWriter& client) override;
  void cancel() override;

 private:
  template <class T>
  using Task = boost::asio::awaitable<T>;
  using Pointer = BackendPool::Pointer;
  struct HeldAnswer {
    AnswerWriter::Head head;
    std::string body;
  };
  struct Try {
    Pointer backend;
    int64_t n_ups;  // Health::n_ups() then
  };
  class Running;
  struct Attempt;

  void require_possible() const;
  std::vector<Pointer> tried() const;
  BackendPool::Choice choose() const;
  Task<AttemptEnd> try_backend(Attempt& attempt, AnswerWriter& client);
  Task<AttemptEnd> exchange(Attempt& attempt, AnswerWriter& client);
  Task<std::string> send(Attempt& attempt);
  Task<std::string> receive_beginning(Attempt& attempt);
  Task<AttemptEnd> relay(Attempt& attempt, AnswerWriter& client);
  Task<AttemptEnd> hold_refusal(Attempt& attempt);
  Task<bool> pass_refusal_on(AnswerWriter& client);
  Task<bool> end_stream(const Attempt& attempt, AnswerWriter& client);
  void measure(const Attempt& attempt);
  void keep(const Attempt& attempt);
  AnswerWriter::Head head_of(const Attempt& attempt) const;
  HttpResponse unavailable() const;

  ForwardContext& context_;
  const ForwardedRequest request_;
  const std::string cors_;
  std::vector<Try> tries_;
  std::optional<HeldAnswer> refusal_;  // 429 or 503 of a backend
  std::string why_;                    // the last failure
  HttpClient* connection_ = nullptr;   // of the attempt in progress
  bool cancelled_ = false;
};

}  // namespace tandem
