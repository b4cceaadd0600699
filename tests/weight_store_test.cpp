// Checkpoints on disk: which files are opened, what the index must agree with, and views with
// scales.
#include "io/weight_store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <utility>

#include "io/shard_index.h"
#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"

namespace tandem {
namespace {

const std::vector<FakeTensor> kThree = {{"a", "F32", {3}, "123456789012"},
                                        {"b", "BF16", {2, 3}, "abcdefghijkl"},
                                        {"c", "I64", {1}, "........"}};

std::string open_error(const TempDirectory& dir) {
  return error_of([&] { const WeightStore store(dir.path()); });
}
std::string shard(int i) { return fmt::format("model-{:05}-of-000003.safetensors", i); }

TEST(WeightStore, ReadsFilesThroughTheIndex) {
  const TempDirectory dir;
  write_checkpoint(dir.path(), kThree, 3);
  const WeightStore store(dir.path());
  ASSERT_EQ(store.tensors().size(), 3u);
  EXPECT_EQ(store.files().size(), 3u);
  EXPECT_EQ(store.total_bytes(), 32);
  const StoredTensor* b = store.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(store.files()[b->file].path(), dir.file(shard(2)));
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(b->data), b->bytes), "abcdefghijkl");
  EXPECT_EQ(store.find("d"), nullptr);
}

TEST(WeightStore, PrefersTheIndexThenOneFileThenAll) {
  const TempDirectory dir;
  write_safetensors(dir.file("y.safetensors"), {kThree[1]});
  write_safetensors(dir.file("x.safetensors"), {kThree[0]});
  dir.write("notes.txt", "no weights");
  EXPECT_EQ(WeightStore(dir.path()).tensors()[0].name, "a");
  EXPECT_EQ(WeightStore(dir.path()).tensors()[1].name, "b");
  write_safetensors(dir.file("model.safetensors"), {kThree[2]});
  EXPECT_EQ(WeightStore(dir.path()).tensors().size(), 1u);
  EXPECT_NE(WeightStore(dir.path()).find("c"), nullptr);
  dir.write("model.safetensors.index.json", R"({"weight_map":{"b":"y.safetensors"}})");
  EXPECT_EQ(WeightStore(dir.path()).tensors().size(), 1u);
  EXPECT_NE(WeightStore(dir.path()).find("b"), nullptr);
}

TEST(WeightStore, TouchesNoWeights) {
  const TempDirectory dir;
  write_checkpoint(dir.path(), {{"a", "BF16", {1 << 20, 1 << 18}}, {"b", "F32", {5}}}, 2);
  const WeightStore store(dir.path());  // half a terabyte of file holes
  EXPECT_EQ(store.total_bytes(), (int64_t{1} << 39) + 20);
}

TEST(WeightStore, RefusesWhatIsNoCheckpoint) {
  const TempDirectory dir;
  EXPECT_TRUE(says(open_error(dir), "has no *.safetensors file"));
  EXPECT_TRUE(says(error_of([&] { WeightStore store(dir.file("none")); }), "is not a directory"));
  dir.write("model.safetensors", "");
  EXPECT_TRUE(says(open_error(dir), "has only 0 bytes"));
  dir.write("model.safetensors", "version https://git-lfs.github.com/spec/v1\n");
  EXPECT_TRUE(says(open_error(dir), "Git LFS"));
  dir.write("model.safetensors", std::string(7, '\0'));
  EXPECT_TRUE(says(open_error(dir), "has only 7 bytes"));
  dir.write("model.safetensors", std::string(8, '\0'));
  EXPECT_TRUE(says(open_error(dir), "its header is no JSON object")) << "the header has 0 bytes";
  std::filesystem::remove(dir.file("model.safetensors"));
  std::filesystem::create_directory(dir.file("model.safetensors"));
  EXPECT_TRUE(says(open_error(dir), "not a regular file"));
}

TEST(WeightStore, RefusesAFileCutShort) {
  const TempDirectory dir;
  write_checkpoint(dir.path(), kThree, 3);
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(dir.file(shard(2))));
  for (const int64_t kept :
       {bytes - 1, bytes - 12, bytes - 20, int64_t{9}, int64_t{8}, int64_t{7}}) {
    std::filesystem::resize_file(dir.file(shard(2)), kept);
    EXPECT_TRUE(says(open_error(dir), shard(2))) << kept;
  }
}

TEST(WeightStore, NamesMissingFiles) {
  const TempDirectory dir;
  write_checkpoint(dir.path(), kThree, 3);
  std::filesystem::remove(dir.file(shard(2)));
  EXPECT_TRUE(says(open_error(dir), "1 of its 3 files are missing, the first is \"" + shard(2)));
}

TEST(WeightStore, TheIndexMustSayWhatTheFilesHold) {
  const TempDirectory dir;
  write_checkpoint(dir.path(), kThree, 3);
  write_safetensors(dir.file(shard(2)), {{"other", "F32", {1}}});
  EXPECT_TRUE(says(open_error(dir), shard(2) + ": tensor \"b\" is not in it"));
  write_safetensors(dir.file(shard(2)), {kThree[0], kThree[1]});
  EXPECT_TRUE(says(open_error(dir), "tensor \"a\" is in"));
  write_safetensors(dir.file(shard(2)), {{"other", "F32", {1}}});
  write_safetensors(dir.file(shard(3)), {kThree[1], kThree[2]});
  EXPECT_TRUE(says(open_error(dir), shard(2) + ": tensor \"b\" is not in it"));
  write_safetensors(dir.file(shard(3)), {kThree[2]});
  write_safetensors(dir.file(shard(2)), {kThree[1], {"unlisted", "F32", {1}}});
  EXPECT_NE(WeightStore(dir.path()).find("unlisted"), nullptr);
}

TEST(ShardIndex, KeepsTheOrderOfTheFilesNames) {
  const ShardIndex index = parse_shard_index(
      R"({"metadata":{"total_size":[1,{"weight_map":2}]},"weight_map":{"x":"2","y":"1","z":"2"}})",
      "i");
  EXPECT_EQ(index.files, (std::vector<std::string>{"1", "2"}));
  ASSERT_EQ(index.entries.size(), 3u);
  EXPECT_EQ(index.entries[0].tensor, "x");
  EXPECT_EQ(index.entries[0].file, 1);
  EXPECT_EQ(index.entries[1].file, 0);
}

TEST(ShardIndex, RefusesBrokenOnes) {
  const auto error = [](const std::string& text) {
    return error_of([&] { parse_shard_index(text, "index.json"); });
  };
  for (const std::string file : {"../x", "/x", "a/../../x", "..", "", "./../x"})
    EXPECT_TRUE(says(error(R"({"weight_map":{"t":")" + file + R"("}})"),
                     "of tensor \"t\" is not inside the model's directory"))
        << file;
  EXPECT_EQ(error(R"({"weight_map":{"t":"sub/x..safetensors"}})"), "no error");
  EXPECT_TRUE(says(error("{}"), "weight_map is missing"));
  EXPECT_TRUE(says(error("[]"), "weight_map is missing"));
  EXPECT_TRUE(says(error(R"({"weight_map":{}})"), "missing or empty"));
  EXPECT_TRUE(says(error(R"({"weight_map":{"a":"x"},"weight_map":{"b":"y"}})"),
                   "weight_map appears twice"));
  EXPECT_TRUE(says(error(R"({"weight_map":"x"})"), "missing or empty"));
  EXPECT_TRUE(says(error(R"({"weight_map":{"t":1}})"), "of \"t\" is not a file name"));
  EXPECT_TRUE(says(error(R"({"weight_map":{"t":null}})"), "not a file name"));
  EXPECT_TRUE(says(error(R"({"weight_map":{"t":{}}})"), "not a file name"));
  EXPECT_TRUE(says(error(R"({"weight_map":{"t":["x"]}})"), "not a file name"));
  EXPECT_TRUE(says(error(R"({"weight_map":{"t":"x","t":"x"}})"), "\"t\" appears twice"));
  EXPECT_TRUE(says(error(R"({"weight_map":{"t":"x"},"weight_map":{"u":"x"}})"), "appears twice"));
  EXPECT_TRUE(says(error(R"({"weight_map":{"t":"x"})"), "broken JSON"));
  EXPECT_TRUE(says(error(R"({"a":)" + std::string(1'000'000, '[')), "nested deeper"));
}

TEST(QuantView, OfPlainTensors) {
  const TempDirectory dir;
  write_checkpoint(dir.path(), kThree, 1);
  const WeightStore store(dir.path());
  const QuantView b = store.quant_view(*store.find("b"), 128);
  EXPECT_EQ(b.q.rows, 2);
  EXPECT_EQ(b.q.cols, 3);
  EXPECT_EQ(b.q.stride, 3);
  EXPECT_EQ(b.q.dtype, DType::kBF16);
  EXPECT_EQ(b.q.data, store.find("b")->data);
  EXPECT_TRUE(b.scale.empty());
  const QuantView a = store.quant_view(*store.find("a"), 0);
  EXPECT_EQ(a.q.rows, 1);
  EXPECT_EQ(a.q.cols, 3);
}

TEST(QuantView, HasScalesOfRaggedBlocksFromAnyFile) {
  const TempDirectory dir;
  write_checkpoint(dir.path(), {{"w", "F8_E4M3", {576, 130}}, {"w_scale_inv", "F32", {5, 2}}}, 2);
  const WeightStore store(dir.path());
  const QuantView w = store.quant_view(*store.find("w"), 128);
  EXPECT_EQ(w.scale.rows, 5);
  EXPECT_EQ(w.scale.cols, 2);
  EXPECT_EQ(w.scale.dtype, DType::kF32);
  EXPECT_EQ(w.scale.data, store.find("w_scale_inv")->data);
  EXPECT_EQ(w.block_rows, 128);
  EXPECT_EQ(w.block_cols, 128);
  EXPECT_EQ(w.row0, 0);
}

TEST(QuantView, RefusesWrongScales) {
  const auto error = [](const FakeTensor& scale, int block) {
    const TempDirectory dir;
    write_checkpoint(dir.path(), {{"w", "F8_E4M3", {576, 130}}, scale}, 1);
    const WeightStore store(dir.path());
    return error_of([&] { store.quant_view(*store.find("w"), block); });
  };
  EXPECT_TRUE(says(error({"w_scale_inv", "F32", {4, 2}}, 128), "F32 [4, 2], expected F32 [5, 2]"));
  EXPECT_TRUE(says(error({"w_scale_inv", "F32", {10}}, 128), "F32 [10], expected F32 [5, 2]"));
  EXPECT_TRUE(says(error({"w_scale_inv", "BF16", {5, 2}}, 128), "BF16 [5, 2], expected F32"));
  EXPECT_TRUE(says(error({"w_scale", "F32", {5, 2}}, 128), "\"w_scale_inv\" is missing"));
  EXPECT_TRUE(says(error({"w_scale_inv", "F32", {5, 2}}, 0), "quantization_config"));
  EXPECT_EQ(error({"w_scale_inv", "F32", {9, 3}}, 64), "no error");
}

TEST(QuantView, RefusesWhatIsNoMatrix) {
  const TempDirectory dir;
  write_checkpoint(dir.path(),
                   {{"scalar", "F32", {}}, {"cube", "F32", {1, 2, 3}}, {"odd", "F8_E5M2", {2, 2}}},
                   1);
  const WeightStore store(dir.path());
  const auto error = [&](const char* name) {
    return error_of([&] { store.quant_view(*store.find(name), 128); });
  };
  EXPECT_TRUE(says(error("scalar"), "has shape []"));
  EXPECT_TRUE(says(error("cube"), "has shape [1, 2, 3]"));
  EXPECT_TRUE(says(error("odd"), "is F8_E5M2"));
}

// Moved or not, a file is unmapped and closed once.
TEST(MappedFile, GivesBackWhatItTook) {
  const TempDirectory dir;
  dir.write("f", std::string(5000, 'x'));
  std::byte* at = nullptr;
  int fd = -1;
  {
    MappedFile first(dir.file("f"));
    const MappedFile file(std::move(first));
    at = const_cast<std::byte*>(file.data());
    fd = file.fd();
    EXPECT_EQ(file.bytes(), 5000);
    EXPECT_EQ(msync(at, 5000, MS_ASYNC), 0) << "mapped";
    EXPECT_GE(fcntl(fd, F_GETFD), 0);
  }
  EXPECT_EQ(msync(at, 5000, MS_ASYNC), -1);
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
}

TEST(MappedFile, NoticesThatItsFileChanged) {
  const TempDirectory dir;
  write_checkpoint(dir.path(), kThree, 1);
  const WeightStore store(dir.path());
  store.require_unchanged();
  const MappedFile& file = store.files()[0];
  std::filesystem::resize_file(file.path(), file.bytes() - 4);
  EXPECT_TRUE(says(error_of([&] { store.require_unchanged(); }), "when it was opened and has"));
  std::vector<std::byte> out(8);
  file.read(file.bytes() - 12, out);
  EXPECT_TRUE(says(error_of([&] { file.read(file.bytes() - 8, out); }), "cut short"));
}

}  // namespace
}  // namespace tandem
