// UCX of this machine, opened at run time: the program links none. Its functions are those of
// version 1.13 or newer.
#pragma once
#include <ucp/api/ucp.h>

#include <string>

#include "core/shared_library.h"
#include "transport/ucx.h"

namespace tandem {

class UcxLibrary {
 public:
  // Opens libucp and prepares it for this reach. Throws PathError with the reason where UCX is
  // missing or does not start. The library stays loaded.
  explicit UcxLibrary(UcxReach reach);
  ~UcxLibrary();
  UcxLibrary(const UcxLibrary&) = delete;
  UcxLibrary& operator=(const UcxLibrary&) = delete;

  UcxReach reach() const { return reach_; }
  ucp_context_h context() const { return context_; }
  std::string text(ucs_status_t status) const { return status_string_(status); }

  // A set of queues for one thread at a time, and the descriptor that poll() waits for. Active
  // messages of number 0 that have come as a whole are given to arrived(arg, ..). Throws PathError.
  struct Worker {
    ucp_worker_h worker;
    int descriptor;
  };
  Worker make_worker(ucp_am_recv_callback_t arrived, void* arg) const;

  decltype(ucp_worker_destroy)* worker_destroy;
  decltype(ucp_worker_get_address)* worker_get_address;
  decltype(ucp_worker_release_address)* worker_release_address;
  decltype(ucp_worker_arm)* worker_arm;
  decltype(ucp_worker_progress)* worker_progress;
  decltype(ucp_ep_create)* ep_create;
  decltype(ucp_ep_close_nbx)* ep_close_nbx;
  decltype(ucp_am_send_nbx)* am_send_nbx;
  decltype(ucp_am_recv_data_nbx)* am_recv_data_nbx;
  decltype(ucp_am_data_release)* am_data_release;
  decltype(ucp_request_check_status)* request_check_status;
  decltype(ucp_request_free)* request_free;

 private:
  template <class F>
  void find(F*& function, const char* name);

  const UcxReach reach_;
  SharedLibrary services_, library_;  // libucs, and libucp, which needs it
  decltype(ucs_status_string)* status_string_;
  decltype(ucp_cleanup)* cleanup_;
  decltype(ucp_worker_create)* worker_create_;
  decltype(ucp_worker_set_am_recv_handler)* worker_set_am_recv_handler_;
  decltype(ucp_worker_get_efd)* worker_get_efd_;
  ucp_context_h context_ = nullptr;
};

}  // namespace tandem
