// Messages over TCP, by Boost.Asio's sockets without its event loop.
#pragma once
#include <vector>

#include "transport/transport.h"

namespace tandem {

// Addresses are HOST:PORT, with an IPv6 address in brackets; the port of listen() may be 0, which
// is any. A connection whose peer has acknowledged nothing for 15 s is lost.
std::unique_ptr<Transport> tcp_transport();
// The address with another port, of one that listen() has taken.
std::string with_port(const std::string& address, int port);
// The addresses of a name, in the resolver's order; an address of numbers is its only one. Throws
// Error for an address that is malformed, and ConnectionError for a name that is not known.
std::vector<std::string> tcp_addresses_of(const std::string& address);
// Throws Error for an address that is malformed.
void require_tcp_address(const std::string& address);

}  // namespace tandem
