#include "ops/cpu_weights.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <variant>

#include "core/rounding.h"
#include "ops/int4_words.h"

namespace tandem {

namespace {

// Matrix shape that the arena stores: rows, or panels.
struct Shape {
  int64_t rows, cols;
};

constexpr int64_t kScaleRows =
    cpu::kScalePanels * cpu::kPanelRows;  // rows whose INT4 scales are stored together

int64_t n_panels(int64_t rows) { return ceil_div(rows, cpu::kPanelRows); }

Shape packed_shape(cpu::Layout layout, int64_t rows, int64_t cols, DType dtype) {
  if (layout == cpu::Layout::kRows) return {rows, cols};
  return {n_panels(rows), cpu::panel_bytes(kernel_type(dtype), cols) * 8 / bits_of(dtype)};
}

int64_t bytes_of(Shape shape, DType dtype) {
  return Arena::padded_bytes(shape.rows * shape.cols * bits_of(dtype) / 8);
}

// Matrix of floats for the row scales in the layout of cpu::Weight.
Shape row_scale_shape(cpu::Layout layout, int64_t rows, int64_t n_groups, DType dtype) {
  if (layout == cpu::Layout::kRows) return {rows, n_groups};
  if (!is_i4(dtype)) return {n_panels(rows), (n_groups + 1) * cpu::kPanelRows};
  const int64_t of_groups =
      dtype == DType::kI4 ? n_groups * kScaleRows / 2 : n_groups * kScaleRows / 4 + kScaleRows;
  return {ceil_div(rows, kScaleRows), of_groups + kScaleRows};
}

int64_t group_of(WeightFormat format, int64_t cols) {
  switch (format.dtype) {
    case DType::kI8:
      return cols;
    case DType::kI4:
    case DType::kI4TwoLevel:
      return format.group;
    case DType::kF8E4M3:
      return 128;
    default:
      return 0;
  }
}

}  // namespace

// The scales of one row of a matrix with several per row, one for each group of columns, at the
// addresses where cpu::Weight reads them. In panels also 128 times the sum of the row's values.
class CpuWeights::RowScales {
 public:
  struct TwoLevels {
    int8_t* multipliers;
    float* row_scale;
  };
  // The first scale and its type: float, BF16 or multipliers, `step` of them from one group to the
  // next.
  RowScales(std::variant<float*, cpu::bf16*, TwoLevels> first, int64_t step, float* sum)
      : first_(first), step_(step), sum_(sum) {}

  // The BF16 scale of a group.
  float get(int64_t group) const {
    return std::bit_cast<float>(uint32_t{std::get<cpu::bf16*>(first_)[group * step_]} << 16);
  }
  // With BF16 every scale must be a BF16 number, with two levels a multiple of `row_scale`.
  void set(std::span<const float> scales, float row_scale) const {
    for (size_t g = 0; g < scales.size(); ++g) set(static_cast<int64_t>(g), scales[g], row_scale);
    if (const auto* two = std::get_if<TwoLevels>(&first_)) *two->row_scale = row_scale;
  }
  bool has_sum() const { return sum_; }
  void set_sum(float sum) const { *sum_ = 128 * sum; }

 private:
  void set(int64_t group, float scale, float row_scale) const {
    if (const auto* floats = std::get_if<float*>(&first_)) {
      (*floats)[group * step_] = scale;
    } else if (const auto* two = std::get_if<TwoLevels>(&first_)) {
      two->multipliers[group * step_] =
          static_cast<int8_t>(row_scale > 0 ? std::lrint(scale / row_scale) : 0);
    } else {
      std::get<cpu::bf16*>(first_)[group * step_] =
          static_cast<cpu::bf16>(std::bit_cast<uint32_t>(scale) >> 16);
    }
  }

  std::variant<float*, cpu::bf16*, TwoLevels> first_;
  int64_t step_;
  float* sum_;
};

std::vector<Slice> CpuWeights::expert_slices(int64_t expert_dim, DType dtype) const {
  return slices(expert_dim, topology_, slice_multiple(dtype));
}

int64_t CpuWeights::slice_multiple(DType dtype) {
  const bool in_blocks = dtype == DType::kF8E4M3 || is_i4(dtype) || dtype == DType::kI4Words;
  return in_blocks ? 128 : 64;
}

int64_t CpuWeights::next_region(int64_t begin, int64_t bytes) {
  constexpr int64_t kPage = 4096;
  return round_up(begin + bytes, kPage);
}

void CpuWeights::allocate(const std::vector<int64_t>& region_bytes) {
  int64_t begin = 0;
  std::vector<int64_t> begins;
  for (const int64_t bytes : region_bytes) {
    begins.push_back(begin);
    begin = next_region(begin, bytes);
  }
  memory_ = Buffer(begins.back() + region_bytes.back());
  regions_.clear();
  is_bound_ = true;
  for (size_t i = 0; i < begins.size(); ++i) {
    const std::span<std::byte> region = memory_.span().subspan(begins[i], region_bytes[i]);
    regions_.emplace_back(region);
    if (topology_.n_nodes() == 1 || region_bytes.size() == 1) continue;
    is_bound_ &= i == kSharedRegion ? bind_to_all_nodes(topology_, region)
                                    : bind_to_node(topology_, region, static_cast<int>(i) - 1);
  }
}

int64_t CpuWeights::packed_bytes(const QuantView& stored) const {
  if (stored.q.dtype == DType::kI4Words)
    return converted_bytes(stored, {DType::kI4, stored.block_cols});
  const Shape shape = packed_shape(kernels_.layout, stored.q.rows, stored.q.cols, stored.q.dtype);
  return bytes_of(shape, stored.q.dtype) +
         bytes_of({stored.scale.rows, stored.scale.cols}, DType::kF32);
}

// The stride of the result is the distance from one row, or panel, to the next.
TensorView CpuWeights::reserve_codes(int64_t rows, int64_t cols, DType dtype, int region) {
  const Shape shape = packed_shape(kernels_.layout, rows, cols, dtype);
  TensorView codes = regions_[region].matrix(shape.rows, shape.cols, dtype);
  codes.rows = rows;
  codes.cols = cols;
  return codes;
}

QuantView CpuWeights::reserve(const QuantView& stored, int region) {
  if (stored.q.dtype == DType::kI4Words)
    return reserve_converted(stored, {DType::kI4, stored.block_cols}, region);
  QuantView packed = stored;
  packed.q = reserve_codes(stored.q.rows, stored.q.cols, stored.q.dtype, region);
  const int columns = cpu::columns_of_step(kernel_type(stored.q.dtype));
  require(stored.scale.empty() || (stored.block_cols % columns == 0 && stored.col0 % columns == 0),
          "weights with scales for blocks of {} columns: must be a multiple of {}",
          stored.block_cols, columns);
  if (stored.scale.empty()) return packed;
  packed.scale = regions_[region].matrix(stored.scale.rows, stored.scale.cols, DType::kF32);
  return packed;
}

void CpuWeights::pack(const void* rows, const QuantView& packed, int64_t first_row,
                      int64_t n_rows) const {
  kernels_.pack({.from = rows,
                 .to = packed.q.data,
                 .type = kernel_type(packed.q.dtype),
                 .first_row = first_row,
                 .n_rows = n_rows,
                 .cols = packed.q.cols});
}

void CpuWeights::pack_scales(const void* scales, const QuantView& packed) {
  std::memcpy(packed.scale.data, scales, packed.scale.rows * packed.scale.row_bytes());
}

void CpuWeights::pack_words(const void* rows, const QuantView& packed, int64_t first_row,
                            int64_t n_rows) const {
  const int64_t cols = packed.q.cols, group = packed.block_cols;
  const int64_t row_bytes = cpu::row_bytes(cpu::WeightType::kI4, cols);
  std::vector<std::byte> codes(n_rows * row_bytes);
  int4_codes(rows, n_rows * cols, codes.data());
  for (int64_t r = 0; r < n_rows; ++r) {
    const RowScales scales = row_scales(packed, first_row + r);
    if (!scales.has_sum()) break;
    double sum = 0;
    for (int64_t c = 0; c < cols; c += group)
      sum += static_cast<double>(scales.get(c / group)) *
             static_cast<double>(int4_sum(codes.data() + r * row_bytes + c / 2, group));
    scales.set_sum(static_cast<float>(sum));
  }
  pack(codes.data(), packed, first_row, n_rows);
}

void CpuWeights::pack_words_scales(const void* scales, const QuantView& packed) const {
  const int64_t n_groups = packed.q.cols / packed.block_cols;
  std::vector<float> row(n_groups);
  for (int64_t r = 0; r < packed.q.rows; ++r) {
    const auto* source =
        static_cast<const std::byte*>(scales) + r * n_groups * size_of(DType::kBF16);
    kernels_.decode({source, cpu::WeightType::kBF16, row.data(), n_groups});
    row_scales(packed, r).set(row, 0);
  }
}

CpuWeights::RowScales CpuWeights::row_scales(const QuantView& packed, int64_t at) const {
  if (kernels_.layout == cpu::Layout::kRows) return {packed.scale.row<float>(at), 1, nullptr};
  const int64_t together = is_i4(packed.q.dtype) ? kScaleRows : cpu::kPanelRows;
  float* const first = packed.scale.row<float>(at / together);
  float* const sum = first + packed.scale.cols - together + at % together;
  if (packed.q.dtype == DType::kI4)
    return {reinterpret_cast<cpu::bf16*>(first) + at % together, together, sum};
  if (packed.q.dtype == DType::kI4TwoLevel)
    return {RowScales::TwoLevels{reinterpret_cast<int8_t*>(first) + at % together, sum - together},
            together, sum};
  return {first + at % together, together, sum};
}

int64_t CpuWeights::converted_bytes(const QuantView& stored, WeightFormat format) const {
  const int64_t rows = stored.q.rows, cols = stored.q.cols, group = group_of(format, cols);
  const int64_t codes =
      bytes_of(packed_shape(kernels_.layout, rows, cols, format.dtype), format.dtype);
  if (group == 0) return codes;
  return codes +
         bytes_of(row_scale_shape(kernels_.layout, rows, cols / group, format.dtype), DType::kF32);
}

QuantView CpuWeights::reserve_converted(const QuantView& stored, WeightFormat format, int region) {
  const int64_t rows = stored.q.rows, cols = stored.q.cols, group = group_of(format, cols);
  require(group > 0 || format.dtype == DType::kBF16,
          "weights stored as {} cannot be kept as {}: choose fp8, bf16, int8 or int4",
          name_of(stored.q.dtype), name_of(format.dtype));
  require(group == 0 || (cols % group == 0 && group % 8 == 0),
          "groups of {} numbers do not divide the {} columns of a matrix: choose another format",
          group, cols);
  QuantView packed{.q = reserve_codes(rows, cols, format.dtype, region), .scale = {}};
  if (group == 0) return packed;
  const Shape shape = row_scale_shape(kernels_.layout, rows, cols / group, format.dtype);
  packed.scale = regions_[region].matrix(shape.rows, shape.cols, DType::kF32);
  packed.block_rows = 1;
  packed.block_cols = static_cast<int>(group);
  return packed;
}

void CpuWeights::convert(const void* rows, const QuantView& stored, const QuantView& packed,
                         int64_t first_row, int64_t n_rows) const {
  const int64_t cols = packed.q.cols;
  const cpu::WeightType to = kernel_type(packed.q.dtype);
  std::vector<float> row(cols);
  std::vector<std::byte> codes(n_rows * cpu::row_bytes(to, cols));
  for (int64_t r = 0; r < n_rows; ++r) {
    const auto* source = static_cast<const std::byte*>(rows) + r * stored.q.row_bytes();
    decode_row(source, stored, first_row + r, row);
    std::byte* const target = codes.data() + r * cpu::row_bytes(to, cols);
    if (packed.scale.empty()) {
      kernels_.encode_bf16({row.data(), reinterpret_cast<cpu::bf16*>(target), cols});
    } else {
      quantize(row, target, packed, first_row + r);
    }
  }
  pack(codes.data(), packed, first_row, n_rows);
}

// Decodes row `at` of a stored matrix to float. Codes and scales may be at any address.
void CpuWeights::decode_row(const std::byte* codes, const QuantView& stored, int64_t at,
                            std::vector<float>& row) const {
  const int64_t cols = stored.q.cols;
  if (stored.q.dtype == DType::kI4Words) {
    int4_values(codes, cols, row.data());
  } else {
    kernels_.decode({codes, kernel_type(stored.q.dtype), row.data(), cols});
  }
  if (stored.scale.empty()) return;
  std::vector<float> scales(stored.scale.cols);
  kernels_.decode({stored.scale.row_data((stored.row0 + at) / stored.block_rows),
                   kernel_type(stored.scale.dtype), scales.data(), stored.scale.cols});
  for (int64_t c = 0; c < cols; ++c) row[c] *= scales[(stored.col0 + c) / stored.block_cols];
}

void CpuWeights::quantize(const std::vector<float>& row, std::byte* codes, const QuantView& packed,
                          int64_t at) const {
  const int64_t n_groups = packed.q.cols / packed.block_cols;
  std::vector<float> scales(n_groups);
  float sum, row_scale = 0;
  kernels_.quantize({.from = row.data(),
                     .k = packed.q.cols,
                     .type = kernel_type(packed.q.dtype),
                     .group = packed.block_cols,
                     .codes = codes,
                     .scales = scales.data(),
                     .sum = &sum,
                     .row_scale = &row_scale});
  const RowScales target = row_scales(packed, at);
  target.set(scales, row_scale);
  if (target.has_sum()) target.set_sum(sum);
}

int64_t CpuWeights::table_bytes(const QuantView& stored) {
  return Arena::padded_bytes(stored.q.rows * stored.q.cols * size_of(stored.q.dtype));
}

QuantView CpuWeights::reserve_table(const QuantView& stored) {
  return {.q = regions_[kSharedRegion].matrix(stored.q.rows, stored.q.cols, stored.q.dtype),
          .scale = {}};
}

int64_t CpuWeights::vector_bytes(const QuantView& stored) {
  return Arena::padded_bytes(stored.q.cols * size_of(DType::kF32));
}

QuantView CpuWeights::keep_vector(const QuantView& stored) {
  const TensorView kept = regions_[kSharedRegion].matrix(1, stored.q.cols, DType::kF32);
  kernels_.decode({stored.q.data, kernel_type(stored.q.dtype), kept.row<float>(0), stored.q.cols});
  return {.q = kept, .scale = {}};
}

cpu::WeightType kernel_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return cpu::WeightType::kF32;
    case DType::kF16:
      return cpu::WeightType::kF16;
    case DType::kBF16:
      return cpu::WeightType::kBF16;
    case DType::kF8E4M3:
      return cpu::WeightType::kF8E4M3;
    case DType::kI8:
      return cpu::WeightType::kI8;
    case DType::kI4:
      return cpu::WeightType::kI4;
    case DType::kI4TwoLevel:
      return cpu::WeightType::kI4TwoLevel;
    case DType::kI32:
    case DType::kI64:
    case DType::kI4Words:
      break;
  }
  check(false, "a type that no kernel multiplies");
  return {};
}

cpu::ActivationType activation_for(const cpu::KernelTable& kernels, DType weights) {
  return kernels.activation[static_cast<int>(kernel_type(weights))];
}

cpu::Weight kernel_weight(const QuantView& w) {
  return {.data = w.q.data,
          .stride = w.q.row_bytes(),
          .type = kernel_type(w.q.dtype),
          .scales = static_cast<const float*>(w.scale.data),
          .scale_stride = w.scale.stride,
          .n_scale_rows = w.scale.rows,
          .block_rows = w.block_rows,
          .block_cols = w.block_cols,
          .row0 = w.row0,
          .col0 = w.col0};
}

}  // namespace tandem
