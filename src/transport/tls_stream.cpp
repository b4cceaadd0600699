#include "transport/tls_stream.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "core/check.h"

namespace tandem {

// The socket below TLS. Records leave many at a time, because each call of a socket costs as much
// as the encryption of a record; and writing raises no signal when the other side is gone.
struct TlsSocket {
  static constexpr size_t kMostUnsent = 128 << 10;
  const int descriptor;
  std::vector<char> unsent = {};
  size_t n_sent = 0;  // of them

  bool is_flushed() const { return n_sent == unsent.size(); }
  // Returns false for an error other than that the socket takes no more.
  bool flush() {
    while (!is_flushed()) {
      const ssize_t n =
          send(descriptor, unsent.data() + n_sent, unsent.size() - n_sent, MSG_NOSIGNAL);
      if (n < 0) return would_block();
      n_sent += n;
    }
    unsent.clear();
    n_sent = 0;
    return true;
  }
  static bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }
};

namespace {

constexpr unsigned char kCipher[] = {0x13, 0x01};  // TLS_AES_128_GCM_SHA256
constexpr unsigned char kIdentity[] = "tandem";
constexpr size_t kRecord = 16 << 10;      // bytes that TLS encrypts together, at most
constexpr size_t kReadAhead = 128 << 10;  // bytes that are read from the socket at a time

// The session that both sides would have resumed.
std::unique_ptr<SSL_SESSION, decltype(&SSL_SESSION_free)> session_of(SSL* ssl,
                                                                     const SessionKey& key) {
  std::unique_ptr<SSL_SESSION, decltype(&SSL_SESSION_free)> session(SSL_SESSION_new(),
                                                                    SSL_SESSION_free);
  const SSL_CIPHER* const cipher = SSL_CIPHER_find(ssl, kCipher);
  const bool ok =
      session && cipher &&
      SSL_SESSION_set1_master_key(session.get(), reinterpret_cast<const unsigned char*>(key.data()),
                                  key.size()) == 1 &&
      SSL_SESSION_set_cipher(session.get(), cipher) == 1 &&
      SSL_SESSION_set_protocol_version(session.get(), TLS1_3_VERSION) == 1;
  check(ok, "a session of TLS 1.3");
  return session;
}

const SessionKey& key_of(SSL* ssl) {
  return *static_cast<const SessionKey*>(SSL_get_app_data(ssl));
}

int use_key(SSL* ssl, const EVP_MD*, const unsigned char** id, size_t* n, SSL_SESSION** session) {
  *id = kIdentity;
  *n = sizeof kIdentity - 1;
  *session = session_of(ssl, key_of(ssl)).release();
  return 1;
}

int find_key(SSL* ssl, const unsigned char* identity, size_t n, SSL_SESSION** session) {
  const bool is_known = n == sizeof kIdentity - 1 && std::memcmp(identity, kIdentity, n) == 0;
  *session = is_known ? session_of(ssl, key_of(ssl)).release() : nullptr;
  return 1;
}

TlsSocket& socket_of(BIO* bio) { return *static_cast<TlsSocket*>(BIO_get_data(bio)); }

int read_socket(BIO* bio, char* to, int n) {
  BIO_clear_retry_flags(bio);
  const ssize_t n_read = recv(socket_of(bio).descriptor, to, n, 0);
  if (n_read < 0 && TlsSocket::would_block()) BIO_set_retry_read(bio);
  return static_cast<int>(n_read);
}

int write_socket(BIO* bio, const char* from, int n) {
  BIO_clear_retry_flags(bio);
  TlsSocket& socket = socket_of(bio);
  if (socket.unsent.size() + n > TlsSocket::kMostUnsent) {
    if (!socket.flush()) return -1;
    if (!socket.is_flushed()) {
      BIO_set_retry_write(bio);
      return -1;
    }
  }
  socket.unsent.insert(socket.unsent.end(), from, from + n);
  return n;
}

// TLS itself asks for a flush in its handshake.
long control_socket(BIO* bio, int what, long, void*) {
  return what == BIO_CTRL_FLUSH && socket_of(bio).flush() ? 1 : 0;
}

BIO* bio_of(TlsSocket& socket) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* const made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket");
    check(made != nullptr, "memory for TLS");
    BIO_meth_set_read(made, read_socket);
    BIO_meth_set_write(made, write_socket);
    BIO_meth_set_ctrl(made, control_socket);
    return made;
  }();
  BIO* const bio = BIO_new(method);
  check(bio != nullptr, "memory for TLS");
  BIO_set_data(bio, &socket);
  BIO_set_init(bio, 1);
  return bio;
}

}  // namespace

struct TlsStream::State {
  explicit State(int descriptor) : socket{descriptor} {
    socket.unsent.reserve(TlsSocket::kMostUnsent);
  }
  SessionKey key;
  TlsSocket socket;
  std::array<std::byte, kRecord> record;
  std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context{nullptr, SSL_CTX_free};
  std::unique_ptr<SSL, decltype(&SSL_free)> ssl{nullptr, SSL_free};
};

TlsStream::TlsStream(int socket, const SessionKey& key, bool is_client)
    : state_(std::make_unique<State>(socket)) {
  state_->key = key;
  state_->context.reset(SSL_CTX_new(is_client ? TLS_client_method() : TLS_server_method()));
  SSL_CTX* const context = state_->context.get();
  check(context != nullptr, "TLS");
  bool ok = SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
            SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") == 1 &&
            SSL_CTX_set_num_tickets(context, 0) == 1;
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_read_ahead(context, 1);
  SSL_CTX_set_default_read_buffer_len(context, kReadAhead);
  SSL_CTX_set_psk_use_session_callback(context, use_key);
  SSL_CTX_set_psk_find_session_callback(context, find_key);
  state_->ssl.reset(SSL_new(context));
  SSL* const ssl = state_->ssl.get();
  ok = ok && ssl && SSL_set_app_data(ssl, &state_->key) == 1;
  check(ok, "TLS 1.3");
  BIO* const bio = bio_of(state_->socket);
  SSL_set_bio(ssl, bio, bio);  // which owns it
  if (is_client)
    SSL_set_connect_state(ssl);
  else
    SSL_set_accept_state(ssl);
}

TlsStream::~TlsStream() = default;

size_t TlsStream::read_some(std::span<std::byte> to) {
  size_t n = 0;
  ERR_clear_error();
  const int status = SSL_read_ex(state_->ssl.get(), to.data(), to.size(), &n);
  is_drained_ = status != 1;
  return result(status, n);
}

size_t TlsStream::write_some(std::span<const boost::asio::const_buffer> parts) {
  const void* from = parts[0].data();
  size_t n_bytes = std::min(parts[0].size(), kRecord);
  if (n_bytes < kRecord) {  // short parts share a record
    from = state_->record.data();
    n_bytes = boost::asio::buffer_copy(boost::asio::buffer(state_->record), parts);
  }
  size_t n = 0;
  ERR_clear_error();
  const int status = SSL_write_ex(state_->ssl.get(), from, n_bytes, &n);
  writing_needs_bytes_ =
      status != 1 && SSL_get_error(state_->ssl.get(), status) == SSL_ERROR_WANT_READ;
  return result(status, n);
}

void TlsStream::flush() {
  if (!state_->socket.flush()) throw ConnectionError(std::strerror(errno));
}

bool TlsStream::is_flushed() const { return state_->socket.is_flushed(); }

bool TlsStream::has_received() const {
  return !is_drained_ && SSL_has_pending(state_->ssl.get()) == 1;
}

size_t TlsStream::result(int status, size_t n_bytes) {
  if (status == 1) return n_bytes;
  switch (SSL_get_error(state_->ssl.get(), status)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
      return 0;
    case SSL_ERROR_ZERO_RETURN:
      throw ConnectionError("connection closed");
    case SSL_ERROR_SYSCALL:
      throw ConnectionError(errno != 0 ? std::strerror(errno) : "connection closed");
    default: {
      const unsigned long error = ERR_peek_error();
      if (ERR_GET_REASON(error) == SSL_R_UNEXPECTED_EOF_WHILE_READING)
        throw ConnectionError("connection closed");
      const char* const reason = ERR_reason_error_string(error);
      throw ConnectionError(fmt::format("the encrypted connection is broken ({})",
                                        reason ? reason : "unknown reason"));
    }
  }
}

}  // namespace tandem
