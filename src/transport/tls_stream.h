// TLS 1.3 over a connected socket that does not block, between two processes that share a key
// (RFC 8446, section 2.2: an external pre-shared key with (EC)DHE), by OpenSSL. No certificates.
#pragma once
#include <boost/asio/buffer.hpp>
#include <memory>
#include <span>

#include "transport/message.h"
#include "transport/secret.h"

namespace tandem {

class TlsStream {
 public:
  // The socket outlives the object, which makes the handshake while it reads and writes.
  TlsStream(int socket, const SessionKey& key, bool is_client);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;

  // Both return the number of bytes, 0 where nothing can be read or written now, and throw
  // ConnectionError when the connection has ended or what came was not encrypted with the key.
  size_t read_some(std::span<std::byte> to);
  // Encrypts parts that follow one another. What was not taken is given to it again, perhaps with
  // more behind it. Some of what was taken leaves with flush().
  size_t write_some(std::span<const boost::asio::const_buffer> parts);
  // Writes what it can of what was taken. Throws ConnectionError.
  void flush();
  bool is_flushed() const;
  // Nothing can be written before more bytes come.
  bool writing_needs_bytes() const { return writing_needs_bytes_; }
  // Whether read_some() may return bytes that have left the socket already.
  bool has_received() const;

 private:
  struct State;
  size_t result(int status, size_t n_bytes);

  std::unique_ptr<State> state_;
  bool writing_needs_bytes_ = false;
  bool is_drained_ = true;  // the last read_some() found no whole record
};

}  // namespace tandem
