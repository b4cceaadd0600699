// What a waiter that sleeps in poll() needs of connections and listeners.
#pragma once
#include <poll.h>

#include <vector>

#include "transport/transport.h"

namespace tandem {

class PolledConnection : public MessageConnection {
 public:
  // Appends what poll() is to wait for. Returns whether progress() may do something before that.
  virtual bool add_polled(std::vector<pollfd>& polled) = 0;
};

class PolledListener : public MessageListener {
 public:
  virtual pollfd polled() = 0;
};

}  // namespace tandem
