#include "loader/weights/model_cache.h"

#include <sys/stat.h>

#include <bit>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "io/json.h"
#include "io/packed_cache.h"
#include "ops/cpu_weights.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxConfigBytes = 10'000'000;

uint64_t checksum_of_text(std::string_view text) {
  return checksum_of(std::as_bytes(std::span(text)));
}

std::string format_text(const std::optional<WeightFormat>& format) {
  if (!format) return "stored";
  const std::string group = format->group > 0 ? fmt::format("-{}", format->group) : std::string();
  return fmt::format("{}{}", name_of(format->dtype), group);
}

std::string formats_of_layers(const ExpertsLayout& experts) {
  std::string names;
  for (const auto& format : experts.of_layers()) names += format_text(format) + " ";
  return names;
}

// The part of the backbone that is kept, and the experts that are kept elsewhere, one character
// each; empty if everything is kept.
std::string elsewhere_text(const ExpertsLayout& experts) {
  const Elsewhere& elsewhere = experts.elsewhere();
  std::string text = elsewhere.experts.empty() || elsewhere.backbone ? "" : "backbone ";
  if (elsewhere.share) {
    const BackboneShare& share = *elsewhere.share;
    for (const Slice part : {share.heads, share.dense, share.shared, share.head()})
      text += fmt::format("{}+{} ", part.first, part.n);
    if (share.layers.n > 0)
      text += fmt::format("layers {}+{} ", share.layers.first, share.layers.n);
  }
  for (const auto& layer : elsewhere.experts) {
    for (const bool is_elsewhere : layer) text += is_elsewhere ? '1' : '0';
    text += '\n';
  }
  return text;
}

std::string layout_name(const PackedLayout& layout) {
  std::string base = layout.kernels.layout == cpu::Layout::kPanels ? "panels" : "rows";
  if (!layout.experts.elsewhere().experts.empty())
    base += fmt::format("-part-{:08x}",
                        static_cast<uint32_t>(checksum_of_text(elsewhere_text(layout.experts))));
  if (!layout.experts.of_layers().empty())
    return fmt::format("{}-{:08x}", base,
                       static_cast<uint32_t>(checksum_of_text(formats_of_layers(layout.experts))));
  const std::optional<WeightFormat>& format = layout.experts.format(0);
  return format ? base + "-" + format_text(format) : base;
}

// Checksum of a few numbers of each type in the table's layout: a changed layout changes the key
// without a version number.
uint64_t layout_checksum(const PackedLayout& layout) {
  constexpr int64_t kRows = 33, kCols = 384;  // partial panels; groups of every size
  constexpr int kGroup = 32;
  std::vector<float> numbers(kRows * kCols);
  std::mt19937 random(1);
  for (float& number : numbers) number = static_cast<float>(random()) * 0x1p-32f - 0.5f;
  const auto stored = [&](DType type) {
    return QuantView{.q = {numbers.data(), kRows, kCols, kCols, type}, .scale = {}};
  };
  constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3};
  std::vector<uint16_t> halves;  // the same numbers as BF16
  halves.reserve(numbers.size());
  for (const float number : numbers)
    halves.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(number) >> 16));
  QuantView words = stored(DType::kI4Words);
  words.scale = {halves.data(), kRows, kCols / kGroup, kCols / kGroup, DType::kBF16};
  words.block_rows = 1;
  words.block_cols = kGroup;
  CpuWeights home(layout.kernels);
  int64_t bytes = home.packed_bytes(words);
  for (const WeightFormat format : layout.experts.conversions())
    bytes += home.converted_bytes(stored(DType::kF32), format);
  for (const DType type : kTypes) bytes += home.packed_bytes(stored(type));
  home.allocate(bytes);
  for (const DType type : kTypes) home.pack(numbers.data(), home.reserve(stored(type)), 0, kRows);
  const QuantView packed = home.reserve(words);
  home.pack_words_scales(words.scale.data, packed);
  home.pack_words(words.q.data, packed, 0, kRows);
  for (const WeightFormat format : layout.experts.conversions()) {
    const QuantView converted = home.reserve_converted(stored(DType::kF32), format);
    home.convert(numbers.data(), stored(DType::kF32), converted, 0, kRows);
  }
  return checksum_of(home.bytes());
}

std::string headers_text(const WeightStore& store) {
  std::string text;
  for (const StoredTensor& t : store.tensors()) {
    text += fmt::format("{} {} {} {}", t.name, t.type->name, t.file,
                        t.data - store.files()[t.file].data());
    for (const int64_t n : t.shape) text += fmt::format(" {}", n);
    text += '\n';
  }
  return text;
}

}  // namespace

uint64_t tensors_checksum(const WeightStore& store) {
  return checksum_of_text(headers_text(store));
}

std::string default_cache_directory() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache && *cache == '/') return (fs::path(cache) / "tandem").string();
  const char* home = std::getenv("HOME");
  return home && *home ? (fs::path(home) / ".cache" / "tandem").string() : std::string();
}

std::string packed_cache_path(const std::string& cache_directory,
                              const std::string& model_directory, const PackedLayout& layout) {
  std::error_code error;
  const fs::path model = fs::canonical(model_directory, error);
  require(!error, "{}: {}", model_directory, error.message());
  return (fs::path(cache_directory) /
          fmt::format("{}-{:08x}-{}{}", model.filename().string(),
                      static_cast<uint32_t>(checksum_of_text(model.string())), layout_name(layout),
                      kPackedExtension))
      .string();
}

std::string packed_cache_key(const WeightStore& store, const PackedLayout& layout,
                             const std::vector<Slice>& slices) {
  const std::string config = (fs::path(store.directory()) / "config.json").string();
  std::string cut = "experts in slices of";
  for (const Slice& slice : slices) cut += fmt::format(" {}", slice.n);
  std::string key = fmt::format(
      "{}\nlayout {} {}{:016x}\nconfig.json {:016x}\ntensors {:016x}\n", cut, layout_name(layout),
      formats_of_layers(layout.experts), layout_checksum(layout),
      checksum_of_text(read_text_file(config, kMaxConfigBytes)), tensors_checksum(store));
  if (const std::string elsewhere = elsewhere_text(layout.experts); !elsewhere.empty())
    key += fmt::format("elsewhere {:016x}\n", checksum_of_text(elsewhere));
  for (const MappedFile& file : store.files()) {
    struct stat status {};
    require(fstat(file.fd(), &status) == 0, "cannot read {}", file.path());
    key += fmt::format("{} {} {}.{:09}\n", fs::path(file.path()).filename().string(),
                       status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
  }
  return key;
}

}  // namespace tandem
