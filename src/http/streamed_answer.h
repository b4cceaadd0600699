// An answer whose parts come from another thread than the one that writes them to the client.
#pragma once
#include <functional>
#include <string>

namespace tandem {

class StreamedAnswer {
 public:
  // A part of the HTTP response: the whole body, or some events of a stream. An error before the
  // first event is sent as a whole body.
  struct Output {
    int status = 200;
    std::string bytes;
    bool last = false;
    bool is_complete_body = false;
    bool aborts_stream = false;  // the last event is an error; the connection is closed after it
  };
  using Send = std::function<void(Output)>;

  virtual ~StreamedAnswer() = default;
  // Begins; `send` is called from another thread until an Output has `last`. Throws ApiError for a
  // request that is refused.
  virtual void start(Send send) = 0;
  // Gives the answer up; called when the client has disconnected.
  virtual void cancel() = 0;
};

}  // namespace tandem
