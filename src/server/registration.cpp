#include "server/registration.h"

#include <fmt/format.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/post.hpp>

#include "server/answer_json.h"

namespace tandem {
namespace {

namespace asio = boost::asio;

}  // namespace

void Registration::start() {
  const std::lock_guard lock(mutex_);
  if (stopped_ || thread_.joinable()) return;
  asio::co_spawn(
      io_, [this] { return register_again_and_again(); }, asio::detached);
  thread_ = std::thread([this] {
    try {
      io_.run();
    } catch (const std::exception& error) {
      options_.log(fmt::format("registration has ended: {}", error.what()));
    }
  });
}

void Registration::begin_to_stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  asio::post(io_, [this] {
    stopping_ = true;
    pause_.cancel();
  });
}

void Registration::stop() {
  begin_to_stop();
  if (thread_.joinable()) thread_.join();
}

asio::awaitable<void> Registration::register_again_and_again() {
  if (!options_.url.empty()) set_url(options_.url);
  while (!stopping_) {
    if (url_.empty()) co_await find_url();
    if (!url_.empty() && !stopping_) co_await add();
    if (stopping_) break;
    boost::system::error_code cancelled;
    pause_.expires_after(std::chrono::duration_cast<asio::steady_timer::duration>(options_.period));
    co_await pause_.async_wait(into(cancelled));
  }
  if (!registered_) co_return;
  const HttpQuestion goodbye = question("/nodes/remove?node_url=" + url_, "");
  co_await ask(io_.get_executor(), trust_, options_.router, goodbye, options_.most);
}

// The address of this end of a connection to the router is one that the router reaches.
asio::awaitable<void> Registration::find_url() {
  HttpQuestion about_health;
  about_health.target = "/health";
  const ServerAnswer reply =
      co_await ask(io_.get_executor(), trust_, options_.router, about_health, options_.most);
  if (reply.local_host.empty()) {
    report(fmt::format("not registered at {} yet: {}", options_.router.url(), reply.error));
  } else {
    set_url(options_.scheme + reply.local_host);
  }
}

void Registration::set_url(const std::string& url) {
  url_ = options_.adds_port ? fmt::format("{}:{}", url, port_) : url;
}

asio::awaitable<void> Registration::add() {
  const HttpQuestion asked = question("/nodes/add", dump_json({{"url", url_}}));
  const ServerAnswer reply =
      co_await ask(io_.get_executor(), trust_, options_.router, asked, options_.most);
  registered_ = registered_ || reply.status == 200;
  if (reply.status == 200) {
    report(fmt::format("registered at {} as {}", options_.router.url(), url_));
  } else if (reply.status == 0) {
    report(fmt::format("not registered at {} yet: {}", options_.router.url(), reply.error));
  } else {
    report(fmt::format("not registered at {}: status {}: {}", options_.router.url(), reply.status,
                       reply.body));
  }
}

// A line that repeats the last one is left out.
void Registration::report(const std::string& line) {
  if (line != last_line_) options_.log(line);
  last_line_ = line;
}

HttpQuestion Registration::question(const std::string& target, const std::string& body) const {
  return {.method = "POST",
          .target = target,
          .authorization = options_.api_key.empty() ? "" : "Bearer " + options_.api_key,
          .body = body};
}

}  // namespace tandem
