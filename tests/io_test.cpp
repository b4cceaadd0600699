// Files and their formats at the limits: text that is cut or escaped, fields of JSON objects,
// atomic writes, headers of .npy and safetensors files, progress and workers.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <set>

#include "io/atomic_file.h"
#include "io/direct_file.h"
#include "io/json.h"
#include "io/json_fields.h"
#include "io/load_jobs.h"
#include "io/machine_json.h"
#include "io/npy.h"
#include "io/safetensors.h"
#include "io/shard_index.h"
#include "io/workers.h"
#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

std::string repeated(std::string_view text, int n) {
  std::string out;
  for (int i = 0; i < n; ++i) out += text;
  return out;
}

TEST(JsonText, EscapesWhatMustBe) {
  for (char32_t c = 0; c < 0x100; ++c) {
    const bool wanted = c < 32 || c == '"' || c == '\\';
    EXPECT_EQ(needs_json_escape(c), wanted) << static_cast<uint32_t>(c);
    // The library's own escapes, of JSON text whose single character this is.
    if (!wanted) continue;
    EXPECT_EQ("\"" + json_escape(c) + "\"", Json(std::string(1, static_cast<char>(c))).dump());
  }
  EXPECT_EQ(json_escape(0x7F), "\\u007f");
  EXPECT_EQ(json_escape(0x2028), "\\u2028");
  EXPECT_EQ(json_escape(0xFFFF), "\\uffff");
}

// Text of exactly 100 bytes with its quotation marks is whole; cuts never divide a character.
TEST(JsonText, IsCutAtAHundredBytes) {
  EXPECT_EQ(shown(repeated("x", 98)), "\"" + repeated("x", 98) + "\"");
  EXPECT_EQ(shown(repeated("x", 99)), "\"" + repeated("x", 99) + "..");
  EXPECT_EQ(shown(repeated("é", 60)), "\"" + repeated("é", 49) + "..");
  EXPECT_EQ(shown("x" + repeated("é", 60)), "\"x" + repeated("é", 49) + "..");
  EXPECT_EQ(shown("xx" + repeated("🙂", 60)), "\"xx" + repeated("🙂", 24) + "..");
  EXPECT_EQ(shown(Json({1, "a", nullptr})), R"([1,"a",null])");
  EXPECT_EQ(shown(nlohmann::ordered_json({{"b", 1}, {"a", "\xff"}})),
            "{\"b\":1,\"a\":\"\xef\xbf\xbd\"}");
}

TEST(JsonText, MessagesLoseTheirPrefixAndLineBreaks) {
  try {
    ADD_FAILURE() << Json::parse("[1,\n");
  } catch (const Json::exception& error) {
    const std::string message = json_message(error);
    EXPECT_EQ(message.rfind("parse error at line 2", 0), 0U) << message;
  }
}

// Objects that keep their order compare each key with all before it: 20 million times at most.
TEST(JsonText, BoundsTheKeysOfOrderedObjects) {
  const auto keys = [](int n) {
    std::string text = "{";
    for (int i = 0; i < n; ++i) text += "\"" + std::to_string(i) + "\":0,";
    text.back() = '}';
    return error_of([&] { parse_ordered_json(text, "x"); });
  };
  EXPECT_EQ(keys(6325), "no error");  // 6325 * 6324 / 2 = 19,999,650
  EXPECT_EQ(keys(6326), "x: its objects have too many keys: one may have about 6000");
}

TEST(Folders, AreRefusedUnlessTheyHoldSomething) {
  const TempDirectory dir;
  const std::string wanted = ": name the folder of a checkpoint";
  EXPECT_EQ(error_of([&] { require_folder(dir.path()); }), dir.path() + " is empty" + wanted);
  dir.write("f", "");
  EXPECT_EQ(error_of([&] { require_folder(dir.path()); }), "no error");
  EXPECT_EQ(error_of([&] { require_folder(dir.file("f")); }),
            dir.file("f") + " is not a folder" + wanted);
  EXPECT_EQ(error_of([&] { require_folder(dir.file("g")); }),
            dir.file("g") + " does not exist" + wanted);
  EXPECT_TRUE(says(error_of([&] { require_folder(dir.file("f") + "/g"); }), wanted));
  const std::string too_long = dir.file(std::string(300, 'x'));
  EXPECT_EQ(error_of([&] { require_folder(too_long); }),
            too_long + " cannot be read (File name too long)" + wanted);
}

// The limit of open files is an error that occurs for every user.
TEST(Folders, AreRefusedWhenTheyCannotBeListed) {
  const TempDirectory dir;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {0, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const std::string error = error_of([&] { require_folder(dir.path()); });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(error,
            dir.path() + " cannot be read (Too many open files): name the folder of a checkpoint");
}

TEST(JsonFields, ReadsNumbersWithinTheirLimits) {
  const Json object = Json::parse(
      R"({"i": 7, "r": 2.5, "w": 3.0, "n": null, "t": "x", "b": true, "l": [1, 2], "o": {"k": 1},
          "huge": 9007199254740993})");
  JsonFields f(object, "f.json");
  EXPECT_EQ(f.integer("i", 7, 7), 7);
  EXPECT_EQ(f.integer("w", 3, 3), 3);
  EXPECT_EQ(f.integer("n", 0, 9, 5), 5);
  EXPECT_EQ(f.integer("missing", 0, 9, 6), 6);
  EXPECT_EQ(f.whole("huge", 0, int64_t{1} << 60), 9007199254740993);
  EXPECT_EQ(f.positive("r", 2.5), 2.5);
  EXPECT_EQ(f.positive("i", 7), 7);
  EXPECT_EQ(f.positive("n", 7, 0), 0);
  EXPECT_EQ(f.text("t"), "x");
  EXPECT_EQ(f.text("n", "y"), "y");
  EXPECT_TRUE(f.boolean("b"));
  EXPECT_FALSE(f.boolean("n", false));
  EXPECT_TRUE(f.boolean("missing", true));
  EXPECT_EQ(f.list("l", 2).size(), 2U);
  EXPECT_EQ(f.object("o").integer("k", 0, 1), 1);
  EXPECT_EQ(f.object("o").path(), "f.json: o");
  EXPECT_TRUE(f.has("i"));
  EXPECT_FALSE(f.has("n"));
  EXPECT_FALSE(f.has("missing"));
  EXPECT_EQ(error_of([&] { f.refuse_others(); }), "no error");
  using Work = std::function<void()>;
  const std::pair<Work, const char*> refusals[] = {
      {[&] { f.integer("i", 8, 9); }, "f.json: i is 7: expected a whole number 8 .. 9"},
      {[&] { f.integer("i", 1, 6); }, "f.json: i is 7: expected a whole number 1 .. 6"},
      {[&] { f.integer("r", 0, 9); }, "f.json: r is 2.5: expected a whole number 0 .. 9"},
      {[&] { f.integer("t", 0, 9, 1); }, "f.json: t is \"x\": expected a whole number 0 .. 9"},
      {[&] { f.integer("n", 0, 9); }, "f.json: n is null: expected a whole number 0 .. 9"},
      {[&] { f.positive("r", 2.4); },
       "f.json: r is 2.5: expected a number above 0 and at most 2.4"},
      {[&] { f.positive("missing", 1); },
       "f.json: missing is missing: expected a number above 0 and at most 1"},
      {[&] { f.text("i"); }, "f.json: i is 7: expected a string"},
      {[&] { f.text("missing"); }, "f.json: missing is missing: expected a string"},
      {[&] { f.boolean("i"); }, "f.json: i is 7: expected true or false"},
      {[&] { f.boolean("missing"); }, "f.json: missing is missing: expected true or false"},
      {[&] { f.list("l", 1); }, "f.json: l is [1,2]: expected a list of at most 1 values"},
      {[&] { f.list("o", 9); }, "f.json: o is {\"k\":1}: expected a list"},
      {[&] { f.object("l"); }, "f.json: l is [1,2]: expected an object"}};
  for (const auto& [work, wanted] : refusals) EXPECT_EQ(error_of(work), wanted);

  JsonFields again(object, "f.json");
  for (const char* key : {"i", "r", "w", "n", "t", "l", "o", "huge"}) again.ignore(key);
  EXPECT_EQ(error_of([&] { again.refuse_others(); }),
            "f.json: \"b\" is no known field: remove or correct it");
  const Json zero = {{"z", 0}, {"below", -1}};
  EXPECT_TRUE(says(error_of([&] { JsonFields(zero, "z").positive("z", 1); }), "z is 0"));
  EXPECT_TRUE(says(error_of([&] { JsonFields(zero, "z").positive("below", 1); }), "below is -1"));
  EXPECT_EQ(error_of([&] { JsonFields(Json(3), "z"); }), "z: expected a JSON object, found 3");
}

int n_files(const TempDirectory& dir) {
  int n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(dir.path())) ++n;
  return n;
}

TEST(AtomicFile, IsThereWhenItIsWhole) {
  const TempDirectory dir;
  dir.write("f", "old");
  {
    AtomicFile file(dir.file("f"));
    file.write("new ");
    file.write("text");
    EXPECT_EQ(read_text_file(dir.file("f"), 9), "old");
    EXPECT_EQ(n_files(dir), 2);
    file.close();
    EXPECT_EQ(n_files(dir), 1);
  }
  EXPECT_EQ(read_text_file(dir.file("f"), 9), "new text");
  { AtomicFile(dir.file("f")).write("never closed"); }
  EXPECT_EQ(n_files(dir), 1);
  EXPECT_EQ(read_text_file(dir.file("f"), 9), "new text");
  write_new_file(dir.file("g"), "");
  EXPECT_EQ(read_text_file(dir.file("g"), 0), "");
}

TEST(AtomicFile, ReplacesPlainFilesOnly) {
  const TempDirectory dir;
  EXPECT_EQ(error_of([&] { AtomicFile{dir.path()}; }),
            dir.path() + " cannot be written (it is no plain file): choose another name");
  EXPECT_TRUE(says(error_of([] { AtomicFile{"/dev/null"}; }), "it is no plain file"));
  EXPECT_EQ(
      error_of([&] { AtomicFile{dir.file("no/f")}; }),
      dir.file("no/f") + " cannot be written (No such file or directory): choose another place");
  // A folder that takes the name while the file is written: nothing is left behind.
  AtomicFile file(dir.file("f"));
  file.write("x");
  std::filesystem::create_directory(dir.file("f"));
  EXPECT_TRUE(says(error_of([&] { file.close(); }), "cannot be written: is the disk full?"));
  EXPECT_EQ(n_files(dir), 1);
}

// Format 1.0 of numpy.lib.format: the header's length is a multiple of 64 bytes.
TEST(Npy, HasNumpysHeader) {
  const TempDirectory dir;
  for (const auto& [shape, text] : {std::pair{std::vector<int64_t>{3}, "3"},
                                    std::pair{std::vector<int64_t>{2, 5}, "2, 5"},
                                    {std::vector<int64_t>(22, 10), nullptr},
                                    {std::vector<int64_t>(80, 100), nullptr}}) {
    const float values[] = {1, -2.5f};
    NpyWriter file(dir.file("a.npy"), shape);
    file.write(values);
    file.close();
    const std::string bytes = read_text_file(dir.file("a.npy"), 4096);
    ASSERT_GT(bytes.size(), 18U);
    EXPECT_EQ(bytes.substr(0, 8), std::string("\x93NUMPY\x01\x00", 8));
    const size_t length =
        static_cast<unsigned char>(bytes[8]) + 256 * size_t{static_cast<unsigned char>(bytes[9])};
    EXPECT_EQ((10 + length) % 64, 0U);
    EXPECT_EQ(bytes.size(), 10 + length + sizeof values);
    const std::string header = bytes.substr(10, length);
    EXPECT_EQ(header.back(), '\n');
    if (text) {
      EXPECT_EQ(
          header.substr(0, header.find("  ")),
          std::string("{'descr': '<f4', 'fortran_order': False, 'shape': (") + text + ",), }");
    }
    const size_t end = header.find('}');
    EXPECT_EQ(header.find_first_not_of(' ', end + 1), header.size() - 1);
    EXPECT_LT(header.size() - end, 66U);
    EXPECT_EQ(bytes.substr(10 + length),
              std::string(reinterpret_cast<const char*>(values), sizeof values));
  }
}

// Each type of the format with its size.
TEST(SafetensorsTypes, HaveTheirSizes) {
  const std::pair<const char*, int> kinds[] = {
      {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
      {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
      {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
      {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
      {"I64", 64},        {"U64", 64}};
  const std::pair<const char*, DType> computed[] = {
      {"F8_E4M3", DType::kF8E4M3}, {"F16", DType::kF16}, {"BF16", DType::kBF16},
      {"I32", DType::kI32},        {"F32", DType::kF32}, {"I64", DType::kI64}};
  for (const auto& [name, bits] : kinds) {  // four elements
    const std::string header = std::string(R"({"a":{"dtype":")") + name +
                               R"(","shape":[4],"data_offsets":[0,)" + std::to_string(bits / 2) +
                               "]}}";
    const auto entries = parse_header(header, bits / 2, "f");
    ASSERT_EQ(entries.size(), 1U) << name;
    EXPECT_EQ(entries[0].type->name, name);
    std::optional<DType> wanted;
    for (const auto& [known, dtype] : computed)
      if (std::string_view(known) == name) wanted = dtype;
    EXPECT_EQ(entries[0].type->dtype, wanted) << name;
  }
  EXPECT_EQ(shape_text(std::vector<int64_t>(8, 1)), "[1, 1, 1, 1, 1, 1, 1, 1]");
}

TEST(ShardIndexLimits, NestingEndsAtSixtyFour) {
  const auto error = [](int n) {
    return error_of([&] {
      parse_shard_index(
          R"({"a":)" + std::string(n, '[') + std::string(n, ']') + R"(,"weight_map":{"t":"x"}})",
          "i");
    });
  };
  EXPECT_EQ(error(62), "no error");
  EXPECT_EQ(error(63), "i: nested deeper than 64 levels");
}

TEST(ProgressLine, SaysTheTimeLeft) {
  const auto left = [](double seconds) {  // half is done
    const std::string line = progress_line(1'000'000'000, 2'000'000'000, seconds, "packing");
    return line.substr(line.find("B/s") + 3);
  };
  EXPECT_EQ(left(59.4), "  59 s left");
  EXPECT_EQ(left(59.6), "  1:00 min left");
  EXPECT_EQ(left(61), "  1:01 min left");
  EXPECT_EQ(left(3599), "  59:59 min left");
  EXPECT_EQ(left(3600), "  1:00 h left");
  EXPECT_EQ(left(3661), "  1:01 h left");
  EXPECT_EQ(left(7199), "  1:59 h left");
  EXPECT_EQ(left(1e9), "  99:59 h left");
  EXPECT_EQ(progress_line(15, 16, 0, "packing"),
            "packing ███████████████░  93 % 0.00 of 0.00 GB  0.00 GB/s");
  EXPECT_EQ(progress_line(99'999'999, 400'000'000, 1, "fetching", 0),
            "fetching ███░░░░░░░░░░░░░  24 % 0.10 of 0.40 GB 100.00 MB/s  3 s left");
  EXPECT_EQ(progress_line(100'000'000, 400'000'000, 1, "fetching"),
            "fetching ████░░░░░░░░░░░░  25 % 0.10 of 0.40 GB  0.10 GB/s  3 s left");
  EXPECT_EQ(progress_line(200'000'000, 400'000'000, 2, "fetching", 190'000'000),
            "fetching ████████░░░░░░░░  50 % 0.20 of 0.40 GB  5.00 MB/s  40 s left");
  EXPECT_EQ(progress_line(0, 99'999'999'999, 0).find("0.00 of 100.00 GB") != std::string::npos,
            true);
  EXPECT_EQ(progress_line(0, 100'000'000'000, 0).find("0.0 of 100.0 GB") != std::string::npos,
            true);
}

TEST(LoadJobs, ThreadsAndReadsHaveTheseSizes) {
  EXPECT_EQ(load_workers(1), 2);
  EXPECT_EQ(load_workers(16), 32);
  EXPECT_EQ(load_workers(17), 33);
  EXPECT_EQ(load_read_bytes(1), 4 << 20);
  EXPECT_EQ(load_read_bytes(16), 4 << 20);
  EXPECT_EQ(load_read_bytes(32), 2 << 20);
  EXPECT_EQ(load_read_bytes(64), 1 << 20);
  EXPECT_EQ(load_read_bytes(100), 1 << 20);
  EXPECT_EQ(disk_page_down(4095), 0);
  EXPECT_EQ(disk_page_down(4096), 4096);
  EXPECT_EQ(disk_page_up(1), 4096);
  EXPECT_EQ(disk_page_up(4096), 4096);
  EXPECT_EQ(disk_page_up(4097), 8192);
}

TEST(Workers, DoEveryItemOnce) {
  for (const auto& [n_workers, n_items] : {std::pair{3, 50}, std::pair{8, 2}, {1, 5}, {4, 0}}) {
    std::mutex mutex;
    std::multiset<int64_t> done;
    std::set<int> workers;
    int n_reports = 0;
    Workers().run(
        n_workers, n_items,
        [&](int64_t item, int worker) {
          const std::lock_guard lock(mutex);
          done.insert(item);
          workers.insert(worker);
        },
        [&](double seconds) {
          EXPECT_GE(seconds, 0);
          ++n_reports;
        });
    ASSERT_EQ(done.size(), static_cast<size_t>(n_items));
    for (int i = 0; i < n_items; ++i) EXPECT_EQ(done.count(i), 1U);
    for (const int worker : workers) EXPECT_LT(worker, std::min(n_workers, n_items));
    for (const int worker : workers) EXPECT_GE(worker, 0);
    EXPECT_GE(n_reports, 1);
  }
}

TEST(Workers, StopAtTheFirstException) {
  Workers workers;
  int n_done = 0;
  EXPECT_EQ(error_of([&] {
              workers.run(
                  1, 10,
                  [&](int64_t item, int) {
                    ++n_done;
                    if (item == 3) fail("item {}", item);
                  },
                  [](double) {});
            }),
            "item 3");
  EXPECT_EQ(n_done, 4);
  EXPECT_TRUE(workers.stopped());
}

// A machine whose every figure differs, written and read.
TEST(MachineJson, HasEveryFigure) {
  const std::string text =
      R"({"name":"n","cpu":"c","isa":"amx","sockets":2,"numa_nodes":2,"cores":7,)"
      R"("memory_bytes":3001,"read_bytes_per_second":{"one_thread":11.5,"all":300.0,"cross":20.5},)"
      R"("peak_ops_per_second":{"fp32":1.5,"bf16":2.5,"int8":3.5,"fp8":4.5},)"
      R"("nodes":[{"cores":3,"memory_bytes":1000,"read_bytes_per_second":100.0},)"
      R"({"cores":4,"memory_bytes":2001,"read_bytes_per_second":200.0}],)"
      R"("gpus":[{"name":"g","memory_bytes":77,"read_bytes_per_second":88.5,)"
      R"("peak_ops_per_second":{"fp32":5.5,"bf16":6.5,"int8":null,"fp8":7.5},)"
      R"("h2d_bytes_per_second":41.5,"d2h_bytes_per_second":42.5,)"
      R"("h2d_pageable_bytes_per_second":31.5,"d2h_pageable_bytes_per_second":32.5,)"
      R"("datasheet_bf16_ops_per_second":8.5}],)"
      R"("efficiency":{"experts":{"fp8":[[1.0,0.5],[2.0,2.0]]},"restored":[[3.0,0.25]]},)"
      R"("disk_read_bytes_per_second":9.5,)"
      R"("gpu_link":{"bytes_per_second":51.5,"latency_seconds":0.5},"hosts":3,)"
      R"("network":{"bytes_per_second":61.5,"latency_seconds":1.0},"measured_at":123})";
  const Machine m = machine_from_json(text, "m.json");
  EXPECT_EQ(machine_to_json(m).dump(), text);
  EXPECT_EQ(m.nodes[1].memory_bytes, 2001);
  EXPECT_EQ(m.gpus[0].d2h_pageable_bytes_per_second, 32.5);
  EXPECT_EQ(m.peak.fp8, 4.5);

  // What stands for fields that are left out; the first node takes what does not divide.
  const Machine few =
      machine_from_json(R"({"cpu":"c","isa":"avx2","numa_nodes":2,"cores":4,"memory_bytes":3001,)"
                        R"("read_bytes_per_second":{"one_thread":1,"all":5,"cross":2},)"
                        R"("peak_ops_per_second":{"fp32":1}})",
                        "m.json");
  EXPECT_EQ(
      machine_to_json(few).dump(),
      R"({"name":"c","cpu":"c","isa":"avx2","sockets":1,"numa_nodes":2,"cores":4,)"
      R"("memory_bytes":3001,"read_bytes_per_second":{"one_thread":1.0,"all":5.0,"cross":2.0},)"
      R"("peak_ops_per_second":{"fp32":1.0,"bf16":null,"int8":null},)"
      R"("nodes":[{"cores":2,"memory_bytes":1501,"read_bytes_per_second":2.5},)"
      R"({"cores":2,"memory_bytes":1500,"read_bytes_per_second":2.5}],"gpus":[]})");
}

TEST(MachineJson, HasTheSmallestFigures) {
  const Json machine = Json::parse(
      R"({"name":"n","cpu":"c","isa":"avx2","sockets":1,"numa_nodes":1,"cores":1,"memory_bytes":1,
          "read_bytes_per_second":{"one_thread":0.5,"all":1.0,"cross":0.5},
          "peak_ops_per_second":{"fp32":1.0,"bf16":null,"int8":null,"fp8":0.5},
          "nodes":[{"cores":1,"memory_bytes":1,"read_bytes_per_second":1.0}],"gpus":[],
          "disk_read_bytes_per_second":0.5,"hosts":2,"measured_at":1,
          "gpu_link":{"bytes_per_second":0.5,"latency_seconds":0.5},
          "network":{"bytes_per_second":0.5,"latency_seconds":0.5}})");
  EXPECT_EQ(Json::parse(machine_to_json(machine_from_json(machine.dump(), "m.json")).dump()),
            machine);
}

// Figures of data sheets are rounded by up to a hundredth; more is a contradiction.
TEST(MachineJson, AllowsRounding) {
  const auto error = [](const char* patch) {
    Json machine = Json::parse(
        R"({"cpu":"c","isa":"avx2","numa_nodes":1,"cores":1,"memory_bytes":1,
            "read_bytes_per_second":{"one_thread":1,"all":100},"peak_ops_per_second":{"fp32":1}})");
    machine.merge_patch(Json::parse(patch));
    return error_of([&] { machine_from_json(machine.dump(), "m"); });
  };
  EXPECT_EQ(error("{}"), "no error");
  EXPECT_EQ(error(R"({"read_bytes_per_second":{"one_thread":100.9}})"), "no error");
  EXPECT_NE(error(R"({"read_bytes_per_second":{"one_thread":101.1}})"), "no error");
  EXPECT_EQ(error(R"({"read_bytes_per_second":{"one_thread":101.1},"measured_at":1})"), "no error");
  EXPECT_EQ(error(R"({"read_bytes_per_second":{"cross":100.9}})"), "no error");
  EXPECT_NE(error(R"({"read_bytes_per_second":{"cross":101.1}})"), "no error");
  EXPECT_EQ(error(R"({"nodes":[{"cores":1,"memory_bytes":1,"read_bytes_per_second":100.9}]})"),
            "no error");
  EXPECT_EQ(error(R"({"nodes":[{"cores":1,"memory_bytes":1,"read_bytes_per_second":99.1}]})"),
            "no error");
  EXPECT_NE(error(R"({"nodes":[{"cores":1,"memory_bytes":1,"read_bytes_per_second":98.9}]})"),
            "no error");
  EXPECT_NE(error(R"({"nodes":[{"cores":1,"memory_bytes":1,"read_bytes_per_second":101.1}]})"),
            "no error");
  EXPECT_NE(error(R"({"isa":"amx","peak_ops_per_second":{"bf16":1}})"), "no error");
  EXPECT_EQ(error(R"({"isa":"amx","peak_ops_per_second":{"bf16":1,"int8":1}})"), "no error");
  EXPECT_EQ(error(R"({"memory_bytes":1125899906842624})"), "no error");
  EXPECT_NE(error(R"({"memory_bytes":1125899906842625})"), "no error");
  EXPECT_EQ(error(R"({"cores":1048576})"), "no error");
  EXPECT_NE(error(R"({"cores":1048577})"), "no error");
  EXPECT_EQ(error(R"({"numa_nodes":1024,"cores":1024,"memory_bytes":1024,
                      "read_bytes_per_second":{"cross":1}})"),
            "no error");
  EXPECT_NE(error(R"({"numa_nodes":1025,"cores":1025,"memory_bytes":1025,
                      "read_bytes_per_second":{"cross":1}})"),
            "no error");
  EXPECT_EQ(error(R"({"disk_read_bytes_per_second":1e18})"), "no error");
  EXPECT_NE(error(R"({"disk_read_bytes_per_second":2e18})"), "no error");
}

}  // namespace
}  // namespace tandem
