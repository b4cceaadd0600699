// A second provider of dense products beside the CPU kernels (docs/kernels.md says what it is for).
#pragma once
#include <memory>
#include <span>
#include <string>

#include "core/team.h"
#include "core/tensor.h"
#include "cpu_kernels/kernels.h"

namespace tandem {

constexpr int kPieceRows = 64;  // rows of w per work item: those that the kernels compute together

// Multiplies with matrices that interleave() rearranged; it keeps none of its own.
class ProductProvider {
 public:
  virtual ~ProductProvider() = default;
  virtual std::string name() const = 0;  // "oneDNN 2.6.3"
  // Prepares products of weights of a type and number of columns, with activations of the same
  // type. False: it has no fast product for them on this CPU.
  virtual bool prepare(DType weights, int64_t cols) = 0;
  // Like KernelTable::gemm with n = kPieceRows; the rows of x lie side by side. Which bits a row
  // has may depend on the number of rows. Each thread of the team may run one at a time.
  virtual void multiply(const cpu::GemmArgs& args, int thread) = 0;
};

// oneDNN for a team of n_threads, opened at run time: no program links it. Opens the first of
// `names` that exists. Null where it cannot be used; `why_not` then says why.
std::unique_ptr<ProductProvider> open_onednn(std::span<const char* const> names, int n_threads,
                                             std::string& why_not);
std::span<const char* const> onednn_names();  // on the loader's path

// Whether interleave() takes a matrix of these kernels: panels of whole pieces, with activations of
// the weights' own type.
bool can_interleave(const cpu::KernelTable& kernels, const TensorView& w);
// Rearranges a packed matrix in place for providers: in each piece the steps of its four panels
// alternate. The kernels cannot read it any more.
void interleave(const TensorView& w, Team& team);

}  // namespace tandem
