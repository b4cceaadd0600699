// Messages over TCP, by Boost.Asio's sockets without its event loop.
#pragma once
#include "transport/transport.h"

namespace tandem {

// Addresses are HOST:PORT, with an IPv6 address in brackets; the port of listen() may be 0, which
// is any. A connection whose peer has acknowledged nothing for 15 s is lost.
std::unique_ptr<Transport> tcp_transport();
// The address with another port, of one that listen() has taken.
std::string with_port(const std::string& address, int port);
// Throws Error for an address that is malformed.
void require_tcp_address(const std::string& address);

}  // namespace tandem
