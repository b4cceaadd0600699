// Registers this server at a router (`tandem route`, or lmdeploy's proxy) while it can answer.
#pragma once
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "http/http_client.h"

namespace tandem {

// POST /nodes/add {"url": ..} is sent again and again, so a router that starts later, or that is
// started anew, knows the server within a period. Members may be called from any thread.
class Registration {
 public:
  struct Options {
    HttpAddress router;
    std::string url;  // under which the router reaches this server; empty: the IP address of
                      // the connection to the router
    std::string scheme = "http://";  // of such a URL
    std::string router_ca = {};      // of trusting_context(), for a router's https
    bool adds_port = true;           // that of set_port(), to the URL
    std::string api_key = {};        // of the router; empty: none
    std::function<void(const std::string&)> log = [](const std::string&) {};
    HttpClient::Seconds period{2}, most{2};  // from one call to the next, and for each
  };

  explicit Registration(Options options)
      : options_(std::move(options)), trust_(trusting_context(options_.router_ca, "--proxy-ca")) {}
  ~Registration() { stop(); }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  // Before start().
  void set_port(int port) { port_ = port; }
  // Begins to register, on a thread of its own. Does nothing after stop() or begin_to_stop().
  void start();
  // Calls POST /nodes/remove if the router knows this server, without waiting for it.
  void begin_to_stop();
  // Waits for what begin_to_stop() does, which takes at most `most`, twice.
  void stop();

 private:
  boost::asio::awaitable<void> register_again_and_again();
  boost::asio::awaitable<void> find_url();
  void set_url(const std::string& url);
  boost::asio::awaitable<void> add();
  void report(const std::string& line);
  HttpQuestion question(const std::string& target, const std::string& body) const;

  const Options options_;
  boost::asio::ssl::context trust_;
  int port_ = 0;
  boost::asio::io_context io_{1};
  boost::asio::steady_timer pause_{io_};
  std::string url_, last_line_;
  bool registered_ = false, stopping_ = false;  // of the thread
  std::mutex mutex_;                            // guards the members below
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace tandem
