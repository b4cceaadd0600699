#include "offload/plan/placement_json.h"

#include <charconv>

#include "core/check.h"
#include "io/json.h"
#include "io/json_fields.h"
#include "model/batch.h"

namespace tandem {

namespace {

using Json = nlohmann::ordered_json;

constexpr int kMaxLayers = 1 << 16, kMaxExperts = 1 << 16, kMaxDevices = 1 << 16;
constexpr int kMaxTokens = 1 << 30;
const char* const kOnBackbone = "backbone";
const char* const kOnCpu = "cpu";
const char *const kBf16 = "bf16", *const kFp8 = "fp8";

Json stage_to_json(const Stage& stage);
Json layers_to_json(const LayerExperts& layers);
Json names_of(const std::vector<DeviceId>& devices);
WeightFormat read_format(JsonFields& fields);
void read_backbone(JsonFields fields, Placement& p);
bool read_on_cpu(JsonFields& fields, const std::string& key);
NumaColumns read_numa_columns(JsonFields& fields);
void read_experts(JsonFields fields, Placement& p);
ExpertRows read_expert_rows(JsonFields& fields);
LayerExperts read_layers(JsonFields fields);
ExpertGroup read_group(JsonFields fields);
std::vector<DeviceId> read_devices(JsonFields& fields, const std::string& key);
void read_span(JsonFields& fields, int& first, int& last);
DeviceId parse_device(const nlohmann::json& name, const std::string& where);

}  // namespace

Json placement_to_json(const Placement& p) {
  Json stages = Json::array(), layers = Json::array();
  for (const Stage& stage : p.stages) stages.push_back(stage_to_json(stage));
  for (const LayerExperts& l : p.layers) layers.push_back(layers_to_json(l));
  Json backbone = {{"format", format_name(p.backbone)}, {"stages", stages}};
  if (!p.dense_replicated) backbone["dense_replicated"] = false;
  Json experts = {{"layers", layers}};
  if (p.numa_columns.size() == 1) experts["numa_columns"] = p.numa_columns[0];
  if (p.numa_columns.size() > 1) experts["numa_columns"] = p.numa_columns;
  if (!p.hosts_of_kinds.empty()) experts["hosts_of_kinds"] = p.hosts_of_kinds;
  if (p.room_to_move) experts["room_to_move"] = true;
  if (p.expert_rows != ExpertRows::kExact) experts["ep_rows"] = name_of(p.expert_rows);
  return {
      {"model", p.model},
      {"machine", p.machine},
      {"backbone", backbone},
      {"embedding", {{"on", p.embedding_on_cpu ? kOnCpu : kOnBackbone}}},
      {"head", {{"on", p.head_on_cpu ? kOnCpu : kOnBackbone}, {"replicated", p.head_replicated}}},
      {"kv", {{"tokens", p.kv_tokens}, {"type", p.kv_type == DType::kBF16 ? kBf16 : kFp8}}},
      {"experts", experts},
      {"prefill",
       {{"chunk_tokens", p.prefill_chunk_tokens}, {"stream_from_tokens", p.stream_from_tokens}}},
      {"micro_batches", p.micro_batches},
      {"micro_batches_from_sequences", p.micro_batches_from_sequences}};
}

Placement placement_from_json(std::string_view text, const std::string& source) {
  const nlohmann::json tree = parse_json(text, source);
  JsonFields fields(tree, source);
  Placement p;
  p.model = fields.text("model", "");
  p.machine = fields.text("machine", "");
  read_backbone(fields.object("backbone"), p);
  JsonFields embedding = fields.object("embedding");
  p.embedding_on_cpu = read_on_cpu(embedding, "on");
  embedding.refuse_others();
  JsonFields head = fields.object("head");
  p.head_on_cpu = read_on_cpu(head, "on");
  p.head_replicated = head.boolean("replicated");
  head.refuse_others();
  JsonFields kv = fields.object("kv");
  p.kv_tokens = kv.whole("tokens", 1, int64_t{1} << 40);
  const std::string type = kv.text("type");
  if (type != kBf16 && type != kFp8) kv.refuse("type", "expected bf16 or fp8");
  p.kv_type = type == kFp8 ? DType::kF8E4M3 : DType::kBF16;
  kv.refuse_others();
  if (fields.has("experts")) read_experts(fields.object("experts"), p);
  JsonFields prefill = fields.object("prefill");
  p.prefill_chunk_tokens = prefill.integer("chunk_tokens", 1, kMaxStepTokens);
  p.stream_from_tokens = prefill.integer("stream_from_tokens", 0, kMaxTokens);
  prefill.refuse_others();
  p.micro_batches = fields.integer("micro_batches", 1, 2);
  p.micro_batches_from_sequences = fields.integer("micro_batches_from_sequences", 2, kMaxTokens, 2);
  fields.ignore("predicted");  // planned_layers.h
  fields.refuse_others();
  return p;
}

Placement placement_from_file(const std::string& path) {
  return placement_from_json(read_text_file(path, kMaxPlacementBytes), path);
}

std::string ranges_text(const std::vector<int>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    if (!text.empty()) text += ',';
    text += end - i > 1 ? fmt::format("{}-{}", numbers[i], numbers[end - 1])
                        : fmt::format("{}", numbers[i]);
    i = end;
  }
  return text;
}

std::vector<int> parse_ranges(const std::string& text, int end, const std::string& where) {
  std::vector<int> numbers;
  const char *at = text.data(), *const stop = at + text.size();
  const auto refuse = [&] {
    fail("{} is {}: expected ascending numbers below {} like \"0-3,7\"", where, shown(text), end);
  };
  const auto number = [&] {
    int n = -1;
    const auto [next, error] = std::from_chars(at, stop, n);
    if (error != std::errc() || n < 0 || n >= end) refuse();
    at = next;
    return n;
  };
  while (true) {
    const int first = number();
    int last = first;
    if (at < stop && *at == '-') {
      ++at;
      last = number();
    }
    if (last < first || (!numbers.empty() && first <= numbers.back())) refuse();
    for (int n = first; n <= last; ++n) numbers.push_back(n);
    if (at == stop) return numbers;
    if (*at++ != ',') refuse();
  }
}

namespace {

Json stage_to_json(const Stage& s) {
  return {{"layers", fmt::format("{}-{}", s.first, s.last)},
          {"devices", names_of(s.devices)},
          {"tp", s.tp}};
}

Json layers_to_json(const LayerExperts& l) {
  Json groups = Json::array();
  for (const ExpertGroup& g : l.groups) {
    groups.push_back({{"experts", ranges_text(g.experts)},
                      {"format", format_name(g.format)},
                      {"owners", names_of(g.owners)}});
    if (g.sliced) groups.back()["sliced"] = true;
  }
  return {{"layers", fmt::format("{}-{}", l.first, l.last)}, {"groups", groups}};
}

Json names_of(const std::vector<DeviceId>& devices) {
  Json names = Json::array();
  for (const DeviceId d : devices) names.push_back(device_name(d));
  return names;
}

void read_backbone(JsonFields fields, Placement& p) {
  p.backbone = read_format(fields);
  const auto& stages = fields.list("stages", kMaxLayers);
  p.dense_replicated = fields.boolean("dense_replicated", true);
  fields.refuse_others();
  for (size_t i = 0; i < stages.size(); ++i) {
    JsonFields stage(stages[i], fmt::format("{}: stages[{}]", fields.path(), i));
    Stage s;
    read_span(stage, s.first, s.last);
    s.devices = read_devices(stage, "devices");
    s.tp = stage.integer("tp", 1, kMaxDevices, 1);
    stage.refuse_others();
    p.stages.push_back(std::move(s));
  }
}

WeightFormat read_format(JsonFields& fields) {
  const auto format = find_weight_format(fields.text("format"));
  if (!format) fields.refuse("format", "expected one of " + weight_format_names());
  return *format;
}

bool read_on_cpu(JsonFields& fields, const std::string& key) {
  const std::string where = fields.text(key);
  if (where != kOnCpu && where != kOnBackbone) fields.refuse(key, "expected cpu or backbone");
  return where == kOnCpu;
}

// A list of numbers or, for several kinds of hosts, a list of such lists.
NumaColumns read_numa_columns(JsonFields& fields) {
  constexpr const char* kKey = "numa_columns";
  const auto& list = fields.list(kKey, kMaxDevices);
  const auto columns = [&](const nlohmann::json& numbers) {
    std::vector<int> all;
    for (const auto& n : numbers) {
      if (!n.is_number_integer() || n.get<double>() < 0 || n.get<double>() > kMaxTokens)
        fields.refuse(kKey, "expected whole numbers, or lists of them for each kind of hosts");
      all.push_back(n.get<int>());
    }
    return all;
  };
  if (list.empty()) return {};
  if (!list[0].is_array()) return {columns(list)};
  NumaColumns by_kind;
  for (const auto& of_kind : list) {
    if (!of_kind.is_array() || of_kind.size() > kMaxDevices)
      fields.refuse(kKey, "expected a list for each kind of hosts");
    by_kind.push_back(columns(of_kind));
  }
  return by_kind;
}

void read_experts(JsonFields fields, Placement& p) {
  const auto& layers = fields.list("layers", kMaxLayers);
  if (fields.has("numa_columns")) p.numa_columns = read_numa_columns(fields);
  if (fields.has("hosts_of_kinds"))
    for (const auto& n : fields.list("hosts_of_kinds", kMaxDevices)) {
      if (!n.is_number_integer() || n.get<double>() < 1 || n.get<double>() > kMaxDevices)
        fields.refuse("hosts_of_kinds", "expected the number of hosts of each kind");
      p.hosts_of_kinds.push_back(n.get<int>());
    }
  if (fields.has("room_to_move")) p.room_to_move = fields.boolean("room_to_move");
  if (fields.has("ep_rows")) p.expert_rows = read_expert_rows(fields);
  fields.refuse_others();
  for (size_t i = 0; i < layers.size(); ++i)
    p.layers.push_back(read_layers({layers[i], fmt::format("{}: layers[{}]", fields.path(), i)}));
}

ExpertRows read_expert_rows(JsonFields& fields) {
  const std::string rows = fields.text("ep_rows");
  for (const ExpertRows known : {ExpertRows::kExact, ExpertRows::kFp8})
    if (rows == name_of(known)) return known;
  fields.refuse("ep_rows", "expected exact or fp8");
}

LayerExperts read_layers(JsonFields fields) {
  LayerExperts l;
  read_span(fields, l.first, l.last);
  const auto& groups = fields.list("groups", kMaxExperts);
  fields.refuse_others();
  for (size_t i = 0; i < groups.size(); ++i)
    l.groups.push_back(read_group({groups[i], fmt::format("{}: groups[{}]", fields.path(), i)}));
  return l;
}

ExpertGroup read_group(JsonFields fields) {
  ExpertGroup g;
  g.experts = parse_ranges(fields.text("experts"), kMaxExperts, fields.path() + ": experts");
  g.format = read_format(fields);
  g.owners = read_devices(fields, "owners");
  g.sliced = fields.boolean("sliced", false);
  fields.refuse_others();
  return g;
}

std::vector<DeviceId> read_devices(JsonFields& fields, const std::string& key) {
  std::vector<DeviceId> devices;
  for (const auto& name : fields.list(key, kMaxDevices))
    devices.push_back(parse_device(name, fields.path() + ": " + key));
  return devices;
}

void read_span(JsonFields& fields, int& first, int& last) {
  const std::vector<int> span =
      parse_ranges(fields.text("layers"), kMaxLayers, fields.path() + ": layers");
  first = span.front();
  last = span.back();
  if (static_cast<int>(span.size()) != last - first + 1)
    fields.refuse("layers", "expected one range like \"3-60\"");
}

DeviceId parse_device(const nlohmann::json& name, const std::string& where) {
  const std::string text = name.is_string() ? name.get<std::string>() : std::string();
  const char *at = text.data(), *const stop = at + text.size();
  const auto number_after = [&](std::string_view word) {
    int n = -1;
    if (!std::string_view(at, stop - at).starts_with(word)) return -1;
    at += word.size();
    const auto [next, error] = std::from_chars(at, stop, n);
    at = next;
    return error == std::errc() && n < kMaxDevices ? n : -1;
  };
  const int host = number_after("host");
  const bool is_cpu = host >= 0 && std::string_view(at, stop - at) == ".cpu";
  const int gpu = host < 0 || is_cpu ? -1 : number_after(".gpu");
  require(host >= 0 && (is_cpu || (gpu >= 0 && at == stop)),
          "{}: {} is not a device: expected a name like host0.cpu or host0.gpu0", where,
          shown(name));
  return {host, gpu};
}

}  // namespace

std::vector<PlannedLayer> planned_layers(std::string_view placement, const std::string& source) {
  constexpr double kTokenLimit = 1e9, kSecondsLimit = 1e6;
  const nlohmann::json tree = parse_json(placement, source);
  std::vector<PlannedLayer> layers;
  JsonFields fields(tree, source);
  if (!fields.has("predicted")) return layers;
  JsonFields predicted = fields.object("predicted");
  for (const char* phase : {"decode", "prefill"}) {
    JsonFields step = predicted.object(phase);
    if (!step.has("moe_layer")) continue;
    PlannedLayer planned = {step.positive("tokens", kTokenLimit), {}};
    JsonFields layer = step.object("moe_layer");
    planned.time.seconds = layer.positive("seconds", kSecondsLimit);
    JsonFields parts = layer.object("parts");
    for (int i = 0; i < kNumParts; ++i)
      planned.time.parts[i] = parts.positive(name_of(static_cast<Part>(i)), kSecondsLimit, 0);
    parts.refuse_others();
    layers.push_back(planned);
  }
  return layers;
}

}  // namespace tandem
