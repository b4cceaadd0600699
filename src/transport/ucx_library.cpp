#include "transport/ucx_library.h"

#include <array>
#include <cstdlib>

#include "transport/message.h"

namespace tandem {
namespace {

constexpr std::array kServices = {"libucs.so.0"};
constexpr std::array kLibrary = {"libucp.so.0"};
constexpr unsigned kMajor = 1, kMinor = 13;  // the oldest version that is used

// Options of UCX, unless the user's environment has them. Those that a version does not know have
// no effect.
void configure(decltype(ucp_config_modify)* modify, ucp_config_t* config, UcxReach reach) {
  const auto set = [&](const std::string& name, const char* value) {
    if (!std::getenv(("UCX_" + name).c_str())) modify(config, name.c_str(), value);
  };
  // Sockets of UCX would be open to strangers, and are not faster than those of tcp.h.
  set("TLS", "shm,ib");
  if (reach == UcxReach::kThisHost) {
    if (modify(config, "TLS", "shm") != UCS_OK)
      throw PathError("UCX cannot be restricted to shared memory, and it does not encrypt");
    set("RNDV_THRESH", "56k");  // shorter messages are copied, which wakes the sender less often
  }
  set("MM_SEG_SIZE", "60k");  // and are not divided; UCX counts the bytes of a piece with 16 bits
  set("MM_RX_BUFS_GROW", "64");
  set("MM_ERROR_HANDLING", "y");  // or 1.13 leaves shared memory out,
  set("MEMORY_INVALIDATE", "y");  // and divides longer messages instead of reading them at once
  set("MAX_EAGER_RAILS", "1");    // messages arrive in order
}

}  // namespace

UcxLibrary::UcxLibrary(UcxReach reach) : reach_(reach), services_(kServices), library_(kLibrary) {
  if (!services_ || !library_)
    throw PathError("libucp.so.0 is not installed (package libucx0, or UCX of openucx.org)");
  const auto find_service = [&](auto*& function, const char* name) {
    if (!services_.find(function, name)) throw PathError(fmt::format("libucs has no {}", name));
  };
  find_service(status_string_, "ucs_status_string");
  // By itself UCX writes warnings to the standard output and catches signals.
  void (*disable_signals)();
  ucs_status_t (*set_option)(const char* name, const char* value);
  if (services_.find(disable_signals, "ucs_debug_disable_signals")) disable_signals();
  if (services_.find(set_option, "ucs_global_opts_set_value") && !std::getenv("UCX_LOG_LEVEL"))
    set_option("LOG_LEVEL", "fatal");

  decltype(ucp_config_read)* config_read;
  decltype(ucp_config_modify)* config_modify;
  decltype(ucp_config_release)* config_release;
  decltype(ucp_init_version)* init_version;
  find(config_read, "ucp_config_read");
  find(config_modify, "ucp_config_modify");
  find(config_release, "ucp_config_release");
  find(init_version, "ucp_init_version");
  find(cleanup_, "ucp_cleanup");
  find(worker_create_, "ucp_worker_create");
  find(worker_destroy, "ucp_worker_destroy");
  find(worker_get_address, "ucp_worker_get_address");
  find(worker_release_address, "ucp_worker_release_address");
  find(worker_set_am_recv_handler_, "ucp_worker_set_am_recv_handler");
  find(worker_get_efd_, "ucp_worker_get_efd");
  find(worker_arm, "ucp_worker_arm");
  find(worker_progress, "ucp_worker_progress");
  find(ep_create, "ucp_ep_create");
  find(ep_close_nbx, "ucp_ep_close_nbx");
  find(am_send_nbx, "ucp_am_send_nbx");
  find(am_recv_data_nbx, "ucp_am_recv_data_nbx");
  find(am_data_release, "ucp_am_data_release");
  find(request_check_status, "ucp_request_check_status");
  find(request_free, "ucp_request_free");

  ucp_config_t* config = nullptr;
  ucs_status_t status = config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) throw PathError("UCX does not read its settings: " + text(status));
  configure(config_modify, config, reach);
  ucp_params_t params = {};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;  // each connection has a thread at a time, and its own worker
  status = init_version(kMajor, kMinor, &params, config, &context_);
  config_release(config);
  if (status != UCS_OK) throw PathError("UCX does not start: " + text(status));
}

UcxLibrary::~UcxLibrary() { cleanup_(context_); }

UcxLibrary::Worker UcxLibrary::make_worker(ucp_am_recv_callback_t arrived, void* arg) const {
  Worker made = {};
  ucp_worker_params_t params = {};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  ucs_status_t status = worker_create_(context_, &params, &made.worker);
  if (status != UCS_OK) throw PathError("UCX has no path: " + text(status));
  ucp_am_handler_param_t handler = {};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                       UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  handler.flags = UCP_AM_FLAG_WHOLE_MSG;
  handler.cb = arrived;
  handler.arg = arg;
  status = worker_set_am_recv_handler_(made.worker, &handler);
  if (status == UCS_OK) status = worker_get_efd_(made.worker, &made.descriptor);
  if (status == UCS_OK) return made;
  worker_destroy(made.worker);
  throw PathError("UCX has no path: " + text(status));
}

template <class F>
void UcxLibrary::find(F*& function, const char* name) {
  if (!library_.find(function, name))
    throw PathError(fmt::format("libucp has no {}: UCX 1.13 or newer is needed", name));
}

}  // namespace tandem
