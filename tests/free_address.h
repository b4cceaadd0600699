// Addresses of this host at which a test can start a server again after it has ended. The system
// takes the ports of other listeners and connections from a range that begins at 32768, so that a
// port below it stays free meanwhile, whatever other tests do.
#pragma once
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <random>
#include <stdexcept>
#include <string>

namespace tandem::test {

inline std::string free_address() {
  static std::mt19937 random(std::random_device{}());
  for (int i = 0; i < 100; ++i) {
    const int port = std::uniform_int_distribution(10000, 32767)(random);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool is_free =
        bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    close(socket);
    if (is_free) return "127.0.0.1:" + std::to_string(port);
  }
  throw std::runtime_error("no port from 10000 to 32767 is free");
}

// Options of a server, whose address they leave open.
template <typename Options>
Options at_a_free_address(Options options) {
  if (options.address == Options().address) options.address = free_address();
  return options;
}

}  // namespace tandem::test
