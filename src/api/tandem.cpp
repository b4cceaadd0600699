// The functions of include/tandem.h. No exception leaves them.
#include <new>

#include "api/api_model.h"
#include "api/api_structs.h"
#include "core/run_error.h"

struct tandem_model {
  tandem::ApiModel model;
};

namespace tandem {
namespace {

thread_local std::string last_error;

// Calls `work` and stores what it throws.
template <class Work>
tandem_status guarded(const Work& work) noexcept {
  try {
    try {
      work();
      return TANDEM_OK;
    } catch (const RunError& e) {
      last_error = e.what();
    } catch (const Error& e) {
      last_error = e.what();
      return TANDEM_INVALID;
    } catch (const std::bad_alloc&) {
      last_error = "no memory is left: use a smaller model or a smaller context";
    } catch (const std::exception& e) {
      last_error = e.what();
    }
  } catch (...) {  // no memory for the message
    last_error.clear();
  }
  return TANDEM_FAILED;
}

// The requests, whose structures may be smaller than this library's.
std::vector<tandem_request> copies_of(const tandem_request* requests, size_t n) {
  std::vector<tandem_request> copies;
  const char* next = reinterpret_cast<const char*>(requests);
  for (size_t i = 0; i < n; ++i) {
    copies.push_back(copy_of(reinterpret_cast<const tandem_request*>(next), "tandem_request"));
    require(copies.back().size == copies.front().size,
            "tandem_request.size is {} in request {}, and {} in the first", copies.back().size, i,
            copies.front().size);
    next += copies.back().size;
  }
  return copies;
}

}  // namespace
}  // namespace tandem

using tandem::guarded;

extern "C" {

tandem_status tandem_open(const char* directory, const tandem_options* options,
                          tandem_model** model) {
  return guarded([&] {
    tandem::require(model != nullptr, "model is NULL");
    *model = nullptr;
    const tandem_options o =
        options ? tandem::copy_of(options, "tandem_options") : tandem_options{};
    const std::string folder = directory ? directory : tandem::embedded_model();
    *model = new tandem_model{tandem::ApiModel(folder, o)};
  });
}

void tandem_close(tandem_model* model) { delete model; }

tandem_status tandem_generate(tandem_model* model, const tandem_request* requests,
                              size_t n_requests, const tandem_hooks* hooks) {
  return guarded([&] {
    tandem::require(model != nullptr, "model is NULL");
    tandem::require(hooks != nullptr, "hooks is NULL");
    model->model.generate(tandem::copies_of(requests, n_requests), *hooks);
  });
}

int64_t tandem_count_tokens(tandem_model* model, const tandem_request* request, int32_t* ids,
                            size_t capacity) {
  int64_t n = -1;
  guarded([&] {
    tandem::require(model != nullptr, "model is NULL");
    tandem::require(capacity == 0 || ids != nullptr, "ids is NULL, and its capacity {}", capacity);
    const auto prompt = model->model.prompt(tandem::copy_of(request, "tandem_request"));
    std::copy_n(prompt.begin(), std::min(capacity, prompt.size()), ids);
    n = std::ssize(prompt);
  });
  return n;
}

const char* tandem_describe(const tandem_model* model) {
  return model ? model->model.description().c_str() : "";
}

const char* tandem_error(void) { return tandem::last_error.c_str(); }

const char* tandem_version(void) { return TANDEM_VERSION; }

}  // extern "C"
