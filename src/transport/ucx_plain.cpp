// Round trips by UCX alone, which benchmarks compare connections with.
#include <poll.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "core/check.h"
#include "core/memory.h"
#include "transport/message.h"
#include "transport/ucx_library.h"

namespace tandem {
namespace {

// One of two ends, for one thread.
class PlainEnd {
 public:
  PlainEnd(const UcxLibrary& ucx, int64_t out_bytes, int64_t in_bytes)
      : ucx_(ucx), out_(out_bytes), in_(in_bytes) {
    const UcxLibrary::Worker made = ucx_.make_worker(arrived, this);
    worker_ = made.worker;
    descriptor_ = made.descriptor;
  }
  ~PlainEnd() { ucx_.worker_destroy(worker_); }
  PlainEnd(const PlainEnd&) = delete;
  PlainEnd& operator=(const PlainEnd&) = delete;

  void connect(const PlainEnd& other) {
    ucp_address_t* address = nullptr;
    size_t n_bytes = 0;
    require_ok(ucx_.worker_get_address(other.worker_, &address, &n_bytes));
    ucp_ep_params_t params = {};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
    params.address = address;
    const ucs_status_t status = ucx_.ep_create(worker_, &params, &endpoint_);
    ucx_.worker_release_address(other.worker_, address);
    require_ok(status);
  }
  void send() {
    ucp_request_param_t how = {};
    const auto bytes = out_.span();
    wait_for(ucx_.am_send_nbx(endpoint_, 0, nullptr, 0, bytes.data(), bytes.size(), &how));
  }
  // Until a message has come; false: `ends` was set first.
  bool receive(const std::atomic<bool>& ends) {
    while (!has_message_) {
      if (ends) return false;
      progress_or_sleep();
    }
    has_message_ = false;
    if (is_remote_) {
      ucp_request_param_t how = {};
      wait_for(ucx_.am_recv_data_nbx(worker_, data_, in_.data(), in_.span().size(), &how));
    }
    return true;
  }

 private:
  static ucs_status_t arrived(void* end, const void*, size_t, void* data, size_t n_bytes,
                              const ucp_am_recv_param_t* how) {
    auto& self = *static_cast<PlainEnd*>(end);
    self.has_message_ = true;
    self.data_ = data;
    self.is_remote_ = (how->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
    if (self.is_remote_) return UCS_INPROGRESS;
    std::memcpy(self.in_.data(), data, n_bytes);
    return UCS_OK;
  }
  void progress_or_sleep() {
    if (ucx_.worker_progress(worker_) != 0) return;
    pollfd polled = {descriptor_, POLLIN, 0};
    if (ucx_.worker_arm(worker_) == UCS_OK) poll(&polled, 1, 20);
  }
  void wait_for(ucs_status_ptr_t request) {
    require_ok(UCS_PTR_STATUS(request));
    if (!UCS_PTR_IS_PTR(request)) return;
    while (ucx_.request_check_status(request) == UCS_INPROGRESS) progress_or_sleep();
    const ucs_status_t status = ucx_.request_check_status(request);
    ucx_.request_free(request);
    require_ok(status);
  }
  void require_ok(ucs_status_t status) const {
    if (status != UCS_OK && status != UCS_INPROGRESS) throw PathError(ucx_.text(status));
  }

  const UcxLibrary& ucx_;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  int descriptor_ = -1;
  Buffer out_, in_;
  bool has_message_ = false, is_remote_ = false;
  void* data_ = nullptr;
};

class PlainUcx final : public PlainRoundTrips {
 public:
  PlainUcx(int64_t there, int64_t back)
      : ucx_(UcxReach::kThisHost), near_(ucx_, there, back), far_(ucx_, back, there) {
    near_.connect(far_);
    far_.connect(near_);
    thread_ = std::thread([this] {
      while (far_.receive(ends_)) far_.send();
    });
  }
  ~PlainUcx() override {
    ends_ = true;
    thread_.join();
  }
  void round_trip() override {
    near_.send();
    near_.receive(ends_);
  }

 private:
  const UcxLibrary ucx_;
  PlainEnd near_, far_;
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

}  // namespace

std::unique_ptr<PlainRoundTrips> plain_ucx(int64_t there, int64_t back) {
  return std::make_unique<PlainUcx>(there, back);
}

}  // namespace tandem
