#include "hub/http.h"

#include <curl/curl.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <exception>
#include <string_view>
#include <thread>
#include <utility>

#include "core/run_error.h"
#include "core/shared_library.h"
#include "io/json.h"

namespace tandem {
namespace {

constexpr size_t kMaxRefusalBytes = 1000;
constexpr long kConnectSeconds = 20, kMaxRedirects = 10;
constexpr int kOk = 200;
constexpr double kFirstWait = 0.25, kMaxWait = 60, kMaxAskedWait = 600;  // seconds
constexpr long kReceiveBytes = 512 << 10;  // libcurl's largest receive buffer

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return result;
}

bool read_number(std::string_view& text, int64_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0) return false;
  text.remove_prefix(end - text.data());
  return true;
}

bool may_pass(int status) { return status == 0 || status == 408 || status == 429 || status >= 500; }

std::string refusal_message(const std::string& url, const HttpReply& reply) {
  const int status = reply.status;
  std::string message = fmt::format("{}: the answer is {}", url, status);
  if (!reply.refusal.empty()) message += " " + shown(reply.refusal);
  if (status == 401 || status == 403)
    message += ": it is private or asks for consent: set HF_TOKEN to a token that may read it";
  if (status == 404) message += ": there is no such repository, revision or file";
  return message;
}

// "bytes 100-199/1000". Anything else leaves the reply as it is.
void read_content_range(std::string_view text, HttpReply& reply) {
  constexpr std::string_view kUnit = "bytes ";
  int64_t begin, last, total;
  if (!text.starts_with(kUnit)) return;
  text.remove_prefix(kUnit.size());
  if (!read_number(text, begin) || !text.starts_with('-')) return;
  text.remove_prefix(1);
  if (!read_number(text, last) || !text.starts_with('/')) return;
  text.remove_prefix(1);
  if (!read_number(text, total)) return;
  reply.range_begin = begin;
  reply.total_bytes = total;
}

}  // namespace

// The functions of libcurl, opened at its first use: linked, its 25 libraries would be loaded at
// every start of the program, and would have to be wherever the program is copied to.
struct HttpConnection::Curl {
  static const Curl& get() {
    static const Curl curl;
    return curl;
  }

  decltype(&curl_easy_init) init;
  decltype(&curl_easy_cleanup) cleanup;
  decltype(&curl_easy_reset) reset;
  decltype(&curl_easy_setopt) setopt;
  decltype(&curl_easy_perform) perform;
  decltype(&curl_easy_getinfo) getinfo;
  decltype(&curl_slist_append) append;
  decltype(&curl_slist_free_all) free_all;

 private:
  Curl() {
    static constexpr const char* kNames[] = {"libcurl.so.4", "libcurl-gnutls.so.4"};
    const SharedLibrary library(kNames);
    require(bool{library}, "libcurl.so.4 is needed and is not installed: apt install libcurl4");
    decltype(&curl_global_init) global_init;
    find(library, global_init, "curl_global_init");
    find(library, init, "curl_easy_init");
    find(library, cleanup, "curl_easy_cleanup");
    find(library, reset, "curl_easy_reset");
    find(library, setopt, "curl_easy_setopt");
    find(library, perform, "curl_easy_perform");
    find(library, getinfo, "curl_easy_getinfo");
    find(library, append, "curl_slist_append");
    find(library, free_all, "curl_slist_free_all");
    require(global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK, "libcurl does not start");
  }
  template <class F>
  static void find(const SharedLibrary& library, F& function, const char* name) {
    require(library.find(function, name), "libcurl.so.4 has no {}: install a newer libcurl4", name);
  }
};

struct HttpConnection::State {
  explicit State(HttpOptions o) : options(std::move(o)), handle(curl.init()) {
    require(handle != nullptr, "libcurl makes no handle");
    const std::string line = "Authorization: Bearer " + options.token;
    if (!options.token.empty()) headers = curl.append(headers, line.c_str());
  }
  State(const State&) = delete;
  ~State() {
    curl.free_all(headers);
    curl.cleanup(handle);
  }

  template <class T>
  T info(CURLINFO name) const {
    T value = 0;
    curl.getinfo(handle, name, &value);
    return value;
  }

  void header(std::string_view line) {
    if (line.starts_with("HTTP/")) reply = {};  // of the next answer, after a redirect
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos || lower(line.substr(0, colon)) != "content-range") return;
    line.remove_prefix(std::min(line.find_first_not_of(' ', colon + 1), line.size()));
    read_content_range(line, reply);
  }

  bool body(std::span<const std::byte> bytes) {
    if (reply.status == 0) read_status();
    if (reply.ok()) return (*sink)(reply, bytes);
    const auto* text = reinterpret_cast<const char*>(bytes.data());
    reply.refusal.append(text, std::min(bytes.size(), kMaxRefusalBytes - reply.refusal.size()));
    return true;
  }

  void read_status() {
    reply.status = static_cast<int>(info<long>(CURLINFO_RESPONSE_CODE));
    if (reply.status == kOk)
      reply.total_bytes = info<curl_off_t>(CURLINFO_CONTENT_LENGTH_DOWNLOAD_T);
    reply.retry_seconds = static_cast<double>(info<curl_off_t>(CURLINFO_RETRY_AFTER));
  }

  // libcurl's callbacks; an exception must not pass through its code.
  static size_t on_header(char* data, size_t, size_t bytes, State* state) {
    state->header({data, bytes});
    return bytes;
  }
  static size_t on_body(char* data, size_t, size_t bytes, State* state) {
    try {
      if (state->body(std::as_bytes(std::span(data, bytes)))) return bytes;
      state->ended_by_sink = true;
    } catch (...) {
      state->exception = std::current_exception();
    }
    return 0;
  }

  const Curl& curl = Curl::get();
  const HttpOptions options;
  CURL* const handle;
  curl_slist* headers = nullptr;
  char message[CURL_ERROR_SIZE];

  // State of the current request.
  const Sink* sink = nullptr;
  HttpReply reply;
  bool ended_by_sink = false;
  std::exception_ptr exception;
};

HttpConnection::HttpConnection(HttpOptions options)
    : state_(std::make_unique<State>(std::move(options))) {}
HttpConnection::HttpConnection(HttpConnection&&) noexcept = default;
HttpConnection::~HttpConnection() = default;

HttpReply HttpConnection::get(const std::string& url, const Sink& sink, int64_t begin,
                              int64_t end) {
  State& s = *state_;
  s.sink = &sink;
  s.reply = {};
  s.ended_by_sink = false;
  s.exception = nullptr;
  s.message[0] = '\0';
  const auto set = [&](CURLoption option, auto value) { s.curl.setopt(s.handle, option, value); };
  s.curl.reset(s.handle);  // keeps the open connections
  set(CURLOPT_URL, url.c_str());
  set(CURLOPT_HTTPHEADER, s.headers);  // libcurl sends Authorization to the first host only
  set(CURLOPT_USERAGENT, "tandem");
  set(CURLOPT_FOLLOWLOCATION, 1L);
  set(CURLOPT_MAXREDIRS, kMaxRedirects);
  set(CURLOPT_PROTOCOLS_STR, "http,https");
  set(CURLOPT_REDIR_PROTOCOLS_STR, url.starts_with("https:") ? "https" : "http,https");
  set(CURLOPT_NOSIGNAL, 1L);
  set(CURLOPT_ERRORBUFFER, s.message);
  set(CURLOPT_BUFFERSIZE, kReceiveBytes);
  set(CURLOPT_CONNECTTIMEOUT, kConnectSeconds);
  set(CURLOPT_LOW_SPEED_LIMIT, 1L);  // bytes per second
  set(CURLOPT_LOW_SPEED_TIME, std::max(1L, static_cast<long>(s.options.idle_seconds)));
  set(CURLOPT_HEADERFUNCTION, &State::on_header);
  set(CURLOPT_HEADERDATA, &s);
  set(CURLOPT_WRITEFUNCTION, &State::on_body);
  set(CURLOPT_WRITEDATA, &s);
  const std::string range = fmt::format("{}-{}", begin, end - 1);
  if (end > 0) set(CURLOPT_RANGE, range.c_str());

  const CURLcode code = s.curl.perform(s.handle);
  if (s.exception) std::rethrow_exception(s.exception);
  if (s.reply.status == 0) s.read_status();
  if (code != CURLE_OK && !s.ended_by_sink)
    s.reply.problem = s.message[0] ? s.message : fmt::format("libcurl's error {}", int{code});
  return s.reply;
}

void Retries::wait(const std::string& url, const HttpReply& reply,
                   const std::function<bool()>& go_on) {
  require(reply.ok() || may_pass(reply.status), "{}", refusal_message(url, reply));
  ++n_failures_;
  if (n_failures_ >= n_tries_) {
    require_run(reply.ok() || reply.status == 0, "{}", refusal_message(url, reply));
    throw RunError(fmt::format("{}: {}", url,
                               reply.problem.empty() ? "the answer ended early" : reply.problem));
  }
  const double seconds = reply.retry_seconds > 0
                             ? std::min(reply.retry_seconds, kMaxAskedWait)
                             : std::min(std::ldexp(kFirstWait, n_failures_ - 1), kMaxWait);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end && go_on())
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

std::string url_encoded(const std::string& text, bool keep_slashes) {
  constexpr std::string_view kKept = "-._~";
  std::string result;
  for (const char c : text) {
    const bool alphanumeric =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (alphanumeric || kKept.find(c) != std::string_view::npos || (c == '/' && keep_slashes))
      result += c;
    else
      result += fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return result;
}

}  // namespace tandem
