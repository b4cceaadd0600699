#include "io/machine_json.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/check.h"
#include "io/json.h"
#include "io/json_fields.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxFileBytes = 1 << 20;
constexpr int64_t kMaxMemory = int64_t{1} << 50;  // bytes
constexpr double kMaxRate = 1e18;
constexpr int kMaxNodes = 1024, kMaxCores = 1 << 20, kMaxGpus = 256, kMaxHosts = 1 << 16,
              kMaxKinds = 16;
constexpr double kRounding = 1.01;  // figures of data sheets are rounded

HostKind read_kind(JsonFields& fields, bool measured);
void read_kinds(JsonFields& fields, Machine& m);
void read_cpu(JsonFields& fields, HostKind& m);
PeakRates read_peak(JsonFields fields, bool gpu);
void read_nodes(JsonFields& fields, HostKind& m);
void read_curves(JsonFields fields, HostKind& m);
void read_gpus(JsonFields& fields, HostKind& m, bool measured);
Link read_link(JsonFields& fields, const std::string& key);
void require_consistent(const HostKind& m, bool measured, const std::string& source);
Json kind_to_json(const HostKind& m);
Json peak_to_json(const PeakRates& peak, bool gpu);
Json link_to_json(const Link& link);

}  // namespace

Machine machine_from_json(std::string_view text, const std::string& source) {
  const nlohmann::json tree = parse_json(text, source);
  JsonFields fields(tree, source);
  Machine m;
  m.measured_at = fields.whole("measured_at", 0, int64_t{1} << 40, 0);
  if (fields.has("kinds"))
    read_kinds(fields, m);
  else
    static_cast<HostKind&>(m) = read_kind(fields, m.measured_at > 0);
  m.name = fields.text("name", m.cpu);
  m.request_seconds = fields.positive("request_seconds", 1, 0);
  for (const char* key :
       {"sources", "bench", "threads", "last_level_cache_bytes", "read_loops", "instructions",
        "disk", "notes"})  // for human readers, or further results of the benchmark
    fields.ignore(key);
  fields.refuse_others();
  return m;
}

Machine machine_from_file(const std::string& path) {
  return machine_from_json(read_text_file(path, kMaxFileBytes), path);
}

Json curves_to_json(const std::vector<EfficiencyCurve>& curves) {
  Json out = Json::object();
  for (const EfficiencyCurve& c : curves)
    (c.format.empty() ? out[c.work] : out[c.work][c.format]) = c.points;
  return out;
}

Json machine_to_json(const Machine& m) {
  Json out = {{"name", m.name}};
  if (m.other_kinds.empty()) {
    out.update(kind_to_json(m));
  } else {
    Json kinds = Json::array();
    for (int i = 0; i < m.n_kinds(); ++i) kinds.push_back(kind_to_json(m.of_kind(i)));
    out["kinds"] = kinds;
    out["network"] = link_to_json(m.between_kinds);
  }
  if (m.request_seconds > 0) out["request_seconds"] = m.request_seconds;
  if (m.measured_at > 0) out["measured_at"] = m.measured_at;
  return out;
}

namespace {

Json kind_to_json(const HostKind& m) {
  Json nodes = Json::array(), gpus = Json::array();
  for (const NumaNode& node : m.nodes)
    nodes.push_back({{"cores", node.cores},
                     {"memory_bytes", node.memory_bytes},
                     {"read_bytes_per_second", node.read_bytes_per_second}});
  for (const Gpu& gpu : m.gpus) gpus.push_back(gpu_to_json(gpu));
  Json read = {{"one_thread", m.one_thread_read_bytes_per_second},
               {"all", m.read_bytes_per_second()}};
  if (m.cross_read_bytes_per_second > 0) read["cross"] = m.cross_read_bytes_per_second;
  Json out = Json::object();
  if (!m.label.empty()) out["kind"] = m.label;
  out.update({{"cpu", m.cpu},
              {"isa", m.isa},
              {"sockets", m.sockets},
              {"numa_nodes", m.nodes.size()},
              {"cores", m.cores()},
              {"memory_bytes", m.memory_bytes()},
              {"read_bytes_per_second", read},
              {"peak_ops_per_second", peak_to_json(m.peak, false)},
              {"nodes", nodes},
              {"gpus", gpus}});
  if (!m.curves.empty()) out["efficiency"] = curves_to_json(m.curves);
  if (m.disk_read_bytes_per_second > 0)
    out["disk_read_bytes_per_second"] = m.disk_read_bytes_per_second;
  if (m.gpu_link.bytes_per_second > 0) out["gpu_link"] = link_to_json(m.gpu_link);
  if (m.hosts > 1) out["hosts"] = m.hosts;
  if (m.network.bytes_per_second > 0) out["network"] = link_to_json(m.network);
  return out;
}

// The fields of hosts that are alike. Reads no more: others may follow in the same object.
HostKind read_kind(JsonFields& fields, bool measured) {
  HostKind m;
  m.cpu = fields.text("cpu");
  read_cpu(fields, m);
  read_nodes(fields, m);
  if (fields.has("efficiency")) read_curves(fields.object("efficiency"), m);
  m.disk_read_bytes_per_second = fields.positive("disk_read_bytes_per_second", kMaxRate, 0);
  read_gpus(fields, m, measured);
  m.gpu_link = read_link(fields, "gpu_link");
  m.hosts = fields.integer("hosts", 1, kMaxHosts, 1);
  m.network = read_link(fields, "network");
  require_consistent(m, measured, fields.path());
  return m;
}

// Hosts of several kinds. `network` connects the kinds, and the hosts of a kind that has none of
// its own.
void read_kinds(JsonFields& fields, Machine& m) {
  const auto& list = fields.list("kinds", kMaxKinds);
  if (list.empty()) fields.refuse("kinds", "expected at least one kind of hosts");
  m.between_kinds = read_link(fields, "network");
  require(list.size() == 1 || m.between_kinds.bytes_per_second > 0,
          "{}: network is missing: say how the {} kinds of hosts are connected", fields.path(),
          list.size());
  int n_hosts = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    nlohmann::json object = list[i];
    if (object.is_object() && !object.contains("network") && fields.has("network"))
      object["network"] = link_to_json(m.between_kinds);
    JsonFields of_kind(object, fmt::format("{}: kinds[{}]", fields.path(), i));
    HostKind kind = read_kind(of_kind, m.measured_at > 0);
    kind.label = of_kind.text("kind", kind.cpu);
    for (const char* key : {"sources", "notes"}) of_kind.ignore(key);
    of_kind.refuse_others();
    n_hosts += kind.hosts;
    if (n_hosts > kMaxHosts)
      of_kind.refuse("hosts", fmt::format("expected at most {} in all", kMaxHosts));
    if (i == 0)
      static_cast<HostKind&>(m) = std::move(kind);
    else
      m.other_kinds.push_back(std::move(kind));
  }
}

void read_cpu(JsonFields& fields, HostKind& m) {
  m.isa = fields.text("isa");
  constexpr std::array kIsas = {"reference", "avx2", "avx512", "amx"};
  if (std::find(kIsas.begin(), kIsas.end(), m.isa) == kIsas.end())
    fields.refuse("isa", "expected reference, avx2, avx512 or amx");
  m.peak = read_peak(fields.object("peak_ops_per_second"), false);
  if (m.isa == "amx" && (m.peak.bf16 == 0 || m.peak.int8 == 0))
    fields.refuse("isa", "amx multiplies BF16 and INT8: give peak_ops_per_second of both");
}

PeakRates read_peak(JsonFields fields, bool gpu) {
  PeakRates peak;
  peak.fp32 = fields.positive("fp32", kMaxRate);
  peak.bf16 = fields.positive("bf16", kMaxRate, gpu ? std::optional<double>() : 0.0);
  peak.fp8 = fields.positive("fp8", kMaxRate, 0);
  peak.int8 = fields.positive("int8", kMaxRate, 0);
  fields.refuse_others();
  return peak;
}

// Without the list `nodes`, all nodes are identical.
void read_nodes(JsonFields& fields, HostKind& m) {
  m.sockets = fields.integer("sockets", 1, kMaxNodes, 1);
  const int n = fields.integer("numa_nodes", 1, kMaxNodes);
  const int cores = fields.integer("cores", n, kMaxCores);
  const int64_t memory = fields.whole("memory_bytes", n, kMaxMemory);
  JsonFields read = fields.object("read_bytes_per_second");
  m.one_thread_read_bytes_per_second = read.positive("one_thread", kMaxRate);
  const double all = read.positive("all", kMaxRate);
  m.cross_read_bytes_per_second =
      n > 1 ? read.positive("cross", kMaxRate) : read.positive("cross", kMaxRate, 0);
  read.refuse_others();
  if (!fields.has("nodes")) {
    if (cores % n != 0)
      fields.refuse("cores", fmt::format("not a multiple of {} numa_nodes: list `nodes`", n));
    m.nodes.assign(n, {cores / n, memory / n, all / n});
    m.nodes[0].memory_bytes += memory % n;
    return;
  }
  const auto& list = fields.list("nodes", kMaxNodes);
  if (static_cast<int>(list.size()) != n)
    fields.refuse("numa_nodes", fmt::format("`nodes` lists {}: make them agree", list.size()));
  for (size_t i = 0; i < list.size(); ++i) {
    JsonFields node(list[i], fmt::format("{}: nodes[{}]", fields.path(), i));
    m.nodes.push_back({node.integer("cores", 1, kMaxCores),
                       node.whole("memory_bytes", 1, kMaxMemory),
                       node.positive("read_bytes_per_second", kMaxRate)});
    node.refuse_others();
  }
  if (m.cores() != cores)
    fields.refuse("cores", fmt::format("`nodes` have {}: make them agree", m.cores()));
  if (m.memory_bytes() != memory)
    fields.refuse("memory_bytes",
                  fmt::format("`nodes` have {}: make them agree", m.memory_bytes()));
  if (std::abs(m.read_bytes_per_second() - all) > (kRounding - 1) * all)
    read.refuse("all",
                fmt::format("`nodes` read {:g}: make them agree", m.read_bytes_per_second()));
}

EfficiencyCurve read_curve(JsonFields& fields, const std::string& key) {
  constexpr int kMaxPoints = 1000;
  constexpr double kMaxX = 1e9;
  EfficiencyCurve curve;
  for (const auto& point : fields.list(key, kMaxPoints)) {
    const bool pair =
        point.is_array() && point.size() == 2 && point[0].is_number() && point[1].is_number();
    const double x = pair ? point[0].get<double>() : 0, ratio = pair ? point[1].get<double>() : 0;
    const double before = curve.points.empty() ? 0 : curve.points.back().first;
    if (!(x > before && x <= kMaxX && ratio > 0 && ratio <= kMaxEfficiency))
      fields.refuse(key, "expected pairs of an ascending number above 0 and a ratio up to 2");
    curve.points.emplace_back(x, ratio);
  }
  if (curve.points.empty()) fields.refuse(key, "expected at least one pair");
  return curve;
}

void read_curves(JsonFields fields, HostKind& m) {
  const auto add = [&](JsonFields& from, const std::string& key, const char* work,
                       const char* format) {
    if (!from.has(key)) return;
    m.curves.push_back(read_curve(from, key));
    m.curves.back().work = work;
    m.curves.back().format = format;
  };
  for (const char* work : {"experts", "dense"}) {
    if (!fields.has(work)) continue;
    JsonFields formats = fields.object(work);
    for (const char* format : {"fp8", "bf16", "int8", "int4", "int4-bf16"})
      add(formats, format, work, format);
    formats.refuse_others();
  }
  for (const char* work : {"absorbed", "restored"}) add(fields, work, work, "");
  fields.refuse_others();
}

void read_gpus(JsonFields& fields, HostKind& m, bool measured) {
  if (!fields.has("gpus")) return;
  const auto& list = fields.list("gpus", kMaxGpus);
  for (size_t i = 0; i < list.size(); ++i) {
    JsonFields gpu(list[i], fmt::format("{}: gpus[{}]", fields.path(), i));
    if (measured && !gpu.has("read_bytes_per_second")) {
      ++m.n_unmeasured_gpus;
      continue;
    }
    const int count = gpu.integer("count", 1, kMaxGpus, 1);
    Gpu g{.name = gpu.text("name"),
          .memory_bytes = gpu.whole("memory_bytes", 1, kMaxMemory),
          .read_bytes_per_second = gpu.positive("read_bytes_per_second", kMaxRate),
          .peak = read_peak(gpu.object("peak_ops_per_second"), true),
          .h2d_bytes_per_second = gpu.positive("h2d_bytes_per_second", kMaxRate),
          .d2h_bytes_per_second = gpu.positive("d2h_bytes_per_second", kMaxRate),
          .h2d_pageable_bytes_per_second = gpu.positive("h2d_pageable_bytes_per_second", kMaxRate),
          .d2h_pageable_bytes_per_second = gpu.positive("d2h_pageable_bytes_per_second", kMaxRate),
          .datasheet_bf16_ops_per_second =
              gpu.positive("datasheet_bf16_ops_per_second", kMaxRate, 0)};
    gpu.refuse_others();
    if (!measured && g.h2d_pageable_bytes_per_second > kRounding * g.h2d_bytes_per_second)
      gpu.refuse("h2d_pageable_bytes_per_second", "more than pinned memory: exchange the two");
    if (!measured && g.d2h_pageable_bytes_per_second > kRounding * g.d2h_bytes_per_second)
      gpu.refuse("d2h_pageable_bytes_per_second", "more than pinned memory: exchange the two");
    if (!m.gpus.empty() && (m.gpus[0].name != g.name || m.gpus[0].memory_bytes != g.memory_bytes))
      gpu.refuse("name", fmt::format("the GPUs of a host must be alike and the first is {}: "
                                     "describe one kind",
                                     shown(m.gpus[0].name)));
    if (static_cast<int>(m.gpus.size()) + count > kMaxGpus)
      gpu.refuse("count", fmt::format("expected at most {} GPUs in a host", kMaxGpus));
    m.gpus.insert(m.gpus.end(), count, g);
  }
}

Link read_link(JsonFields& fields, const std::string& key) {
  if (!fields.has(key)) return {};
  JsonFields link = fields.object(key);
  const Link read = {link.positive("bytes_per_second", kMaxRate),
                     link.positive("latency_seconds", 1)};
  link.refuse_others();
  return read;
}

// Rates measured on a busy machine may contradict each other, so only described ones are checked
// against each other.
void require_consistent(const HostKind& m, bool measured, const std::string& source) {
  const double all = m.read_bytes_per_second();
  require(m.sockets <= static_cast<int>(m.nodes.size()),
          "{}: sockets is {} with {} numa_nodes: a socket is at least one node", source, m.sockets,
          m.nodes.size());
  require(measured || m.one_thread_read_bytes_per_second <= kRounding * all,
          "{}: read_bytes_per_second: one_thread is {:g}, more than all with {:g}: correct one",
          source, m.one_thread_read_bytes_per_second, all);
  require(measured || m.cross_read_bytes_per_second <= kRounding * all,
          "{}: read_bytes_per_second: cross is {:g}, more than all with {:g}: correct one", source,
          m.cross_read_bytes_per_second, all);
  require(m.gpus.size() <= 1 || m.gpu_link.bytes_per_second > 0,
          "{}: gpu_link is missing: say how the {} GPUs of a host are connected", source,
          m.gpus.size());
  require(m.hosts == 1 || m.network.bytes_per_second > 0,
          "{}: network is missing: say how the {} hosts are connected", source, m.hosts);
}

Json peak_to_json(const PeakRates& peak, bool gpu) {
  const auto rate = [](double r) { return r > 0 ? Json(r) : Json(); };
  Json json = {{"fp32", rate(peak.fp32)}, {"bf16", rate(peak.bf16)}, {"int8", rate(peak.int8)}};
  if (gpu || peak.fp8 > 0) json["fp8"] = rate(peak.fp8);
  return json;
}

Json link_to_json(const Link& link) {
  return {{"bytes_per_second", link.bytes_per_second}, {"latency_seconds", link.latency_seconds}};
}

}  // namespace

Json gpu_to_json(const Gpu& gpu) {
  Json object = {{"name", gpu.name},
                 {"memory_bytes", gpu.memory_bytes},
                 {"read_bytes_per_second", gpu.read_bytes_per_second},
                 {"peak_ops_per_second", peak_to_json(gpu.peak, true)},
                 {"h2d_bytes_per_second", gpu.h2d_bytes_per_second},
                 {"d2h_bytes_per_second", gpu.d2h_bytes_per_second},
                 {"h2d_pageable_bytes_per_second", gpu.h2d_pageable_bytes_per_second},
                 {"d2h_pageable_bytes_per_second", gpu.d2h_pageable_bytes_per_second}};
  if (gpu.datasheet_bf16_ops_per_second > 0)
    object["datasheet_bf16_ops_per_second"] = gpu.datasheet_bf16_ops_per_second;
  return object;
}

}  // namespace tandem
