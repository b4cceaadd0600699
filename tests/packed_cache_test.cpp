// Packed cache files: a reader gets what was written, any damage is detected, and an incomplete
// file is never read.
#include "io/packed_cache.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "core/memory.h"
#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"

namespace {
bool fsync_fails = false;
std::atomic<int> n_fsyncs = 0;
}  // namespace

// Replaces libc's, to be a disk that fails when its own cache is written.
extern "C" int fsync(int) {
  ++n_fsyncs;
  if (fsync_fails) errno = EIO;
  return fsync_fails ? -1 : 0;
}

namespace tandem {
namespace {

const std::string kKey = "layout panels 1\nconfig.json 2\na.safetensors 3 4.5\n";
const std::string kManifest = "where things lie";
constexpr int64_t kBytes = 5'000'001;  // no multiple of a block or a page

// Memory that is not page-aligned cannot be written past the page cache.
Buffer random_bytes(int64_t bytes, unsigned seed) {
  Buffer buffer(bytes);
  std::mt19937 random(seed);
  for (int64_t i = 0; i < bytes; ++i) buffer.data()[i] = static_cast<std::byte>(random());
  return buffer;
}

std::span<const std::byte> span_of(const Buffer& buffer) {
  return {buffer.data(), static_cast<size_t>(buffer.bytes())};
}

struct Cache {
  TempDirectory dir;
  Buffer data = random_bytes(kBytes, 1);
  std::string path = dir.file("new/folder/model.tandempack");

  void write(const std::string& key = kKey) const {
    write_packed_file(path, {key, kManifest, span_of(data)}, {.n_threads = 2});
  }
  // The defect of the file, or "" if it is complete and correct.
  std::string fault(const std::string& key = kKey) const {
    try {
      auto file = PackedFile::open(path);
      if (!file) return "there is none";
      file->read_header(key);
      EXPECT_EQ(file->manifest(), kManifest);
      EXPECT_EQ(file->data_bytes(), kBytes);
      const Buffer out(file->data_bytes());
      file->read(out.data(), {.n_threads = 2});
      EXPECT_EQ(std::memcmp(out.data(), data.data(), kBytes), 0);
      return "";
    } catch (const PackedError& error) {
      EXPECT_STRNE(error.what(), "");
      EXPECT_EQ(std::strchr(error.what(), '\n'), nullptr);
      return error.what();
    }
  }
  int64_t file_bytes() const { return static_cast<int64_t>(std::filesystem::file_size(path)); }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder()))
      names.push_back(entry.path().filename().string());
    return names;
  }
  std::string folder() const { return std::filesystem::path(path).parent_path().string(); }
};

// Flips one bit of a file.
void flip(const std::string& path, int64_t at, int bit) {
  const int fd = open(path.c_str(), O_RDWR);
  char byte = 0;
  ASSERT_EQ(pread(fd, &byte, 1, at), 1);
  byte = static_cast<char>(byte ^ (1 << bit));
  ASSERT_EQ(pwrite(fd, &byte, 1, at), 1);
  close(fd);
}

TEST(PackedCache, ReadsWhatWasWritten) {
  const Cache cache;
  EXPECT_EQ(cache.fault(), "there is none");
  cache.write();
  EXPECT_EQ(cache.fault(), "");
  EXPECT_EQ(cache.files(), std::vector<std::string>{"model.tandempack"});
  const int fd = open(cache.path.c_str(), O_RDONLY);
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  EXPECT_EQ(cache.fault(), "") << "from disk";
  const std::vector<char> all(cache.file_bytes());
  ASSERT_EQ(read(fd, const_cast<char*>(all.data()), all.size()), cache.file_bytes());
  close(fd);
  EXPECT_EQ(cache.fault(), "") << "from the page cache";
}

// The data must be on the disk before its name is, and then the name.
TEST(PackedCache, IsFlushedWithItsFolder) {
  const Cache cache;
  const int before = n_fsyncs;
  cache.write();
  EXPECT_EQ(n_fsyncs - before, 2);
}

TEST(PackedCache, HoldsEverySize) {
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{4096}, kPackedBlockBytes,
                              kPackedBlockBytes + 4097, 4 * kPackedBlockBytes}) {
    const TempDirectory dir;
    const Buffer data = random_bytes(bytes, 2);
    const std::string path = dir.file("x.tandempack");
    write_packed_file(path, {kKey, kManifest, span_of(data)}, {.n_threads = 3});
    auto file = PackedFile::open(path);
    file->read_header(kKey);
    ASSERT_EQ(file->data_bytes(), bytes);
    const Buffer out(bytes);
    file->read(out.data(), {.n_threads = 3});
    EXPECT_EQ(bytes == 0 ? 0 : std::memcmp(out.data(), data.data(), bytes), 0) << bytes;
  }
}

// Flips every byte of the header, and the first and the last byte of each block of data.
TEST(PackedCache, NoticesEveryFlippedByte) {
  const Cache cache;
  cache.write();
  const int64_t header = cache.file_bytes() - kBytes;
  std::vector<int64_t> places;
  for (int64_t at = 0; at < header; ++at) places.push_back(at);
  for (int64_t at = 0; at < kBytes; at += kPackedBlockBytes) {
    places.push_back(header + at);
    places.push_back(header + std::min(kBytes, at + kPackedBlockBytes) - 1);
    places.push_back(header + std::min(kBytes - 1, at + 12'345));
  }
  for (const int64_t at : places) {
    flip(cache.path, at, static_cast<int>(at % 8));
    ASSERT_NE(cache.fault(), "") << "byte " << at;
    flip(cache.path, at, static_cast<int>(at % 8));
  }
  EXPECT_EQ(cache.fault(), "");
}

TEST(PackedCache, NoticesACutOrLongerFile) {
  const Cache cache;
  cache.write();
  const int64_t whole = cache.file_bytes(), header = whole - kBytes;
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{63}, int64_t{64},
                              int64_t{4095}, header, header + 1, whole - 1, whole + 1, 2 * whole}) {
    cache.write();
    std::filesystem::resize_file(cache.path, bytes);
    EXPECT_NE(cache.fault(), "") << bytes;
    std::filesystem::remove(cache.path);
  }
}

TEST(PackedCache, SaysWhichBytesAreWrong) {
  const Cache cache;
  cache.write();
  const int64_t header = cache.file_bytes() - kBytes;
  const auto fault_after = [&](int64_t at) {
    flip(cache.path, header + at, 0);
    std::string fault = cache.fault();
    flip(cache.path, header + at, 0);
    return fault;
  };
  const auto bytes = [&](int64_t first, int64_t end) {
    return fmt::format("its bytes from {} to {} do not have their checksum", header + first,
                       header + end);
  };
  EXPECT_EQ(fault_after(2 * kPackedBlockBytes),
            bytes(2 * kPackedBlockBytes, 3 * kPackedBlockBytes));
  EXPECT_EQ(fault_after(kBytes - 1), bytes(19 * kPackedBlockBytes, kBytes));
  const int64_t whole = cache.file_bytes();
  for (const int64_t more : {-1, 1}) {
    std::filesystem::resize_file(cache.path, whole + more);
    EXPECT_EQ(cache.fault(),
              fmt::format("it has {} bytes where {} are expected: it was cut short or "
                          "its header is damaged",
                          whole + more, whole));
    std::filesystem::remove(cache.path);
    cache.write();
  }
  std::filesystem::resize_file(cache.path, 63);
  EXPECT_EQ(cache.fault(), "it is not a packed cache, or its beginning is damaged");
  std::filesystem::resize_file(cache.path, 64);
  EXPECT_EQ(cache.fault(), "its header is damaged or the file was cut short");
}

// Two keys differ in their first line, or one continues where the other ends. Long lines are cut.
TEST(PackedCache, ShowsTheFirstDifferentLine) {
  const Cache cache;
  cache.write("one\ntwo\nthree\n");
  EXPECT_EQ(cache.fault("One\ntwo\nthree\n"), "it was made for \"one\", now it is \"One\"");
  EXPECT_EQ(cache.fault("one\ntwo"), "it was made for \"three\", now it is \"nothing more\"");
  EXPECT_EQ(cache.fault("one\ntwo\nthree\nfour"),
            "it was made for \"nothing more\", now it is \"four\"");
  const std::string line(101, 'x');
  EXPECT_EQ(cache.fault(line), "it was made for \"one\", now it is \"" + line.substr(1) + "\"");
}

TEST(PackedCache, NoticesAFileCutWhileItIsRead) {
  const Cache cache;
  cache.write();
  auto file = PackedFile::open(cache.path);
  file->read_header(kKey);
  std::filesystem::resize_file(cache.path, cache.file_bytes() - 1'000'000);
  const Buffer out(kBytes);
  EXPECT_THROW(file->read(out.data(), {.n_threads = 2}), PackedError);
}

TEST(PackedCache, NoticesExchangedBlocks) {
  const Cache cache;
  cache.write();
  const int64_t header = cache.file_bytes() - kBytes;
  const int fd = open(cache.path.c_str(), O_RDWR);
  for (const int64_t to : {int64_t{0}, kPackedBlockBytes})
    ASSERT_EQ(
        pwrite(fd, cache.data.data() + kPackedBlockBytes - to, kPackedBlockBytes, header + to),
        kPackedBlockBytes);
  close(fd);
  EXPECT_TRUE(says(cache.fault(), "checksum"));
}

TEST(PackedCache, IsForOneKeyAndSaysWhatDiffers) {
  const Cache cache;
  cache.write();
  EXPECT_EQ(cache.fault("layout panels 1\nconfig.json 2\na.safetensors 3 9.5\n"),
            "it was made for \"a.safetensors 3 4.5\", now it is \"a.safetensors 3 9.5\"");
  EXPECT_TRUE(says(cache.fault("layout rows 1\n"), "now it is \"layout rows 1\""));
  EXPECT_TRUE(says(cache.fault(kKey + "b.safetensors 3 4.5\n"), "b.safetensors"));
  EXPECT_TRUE(says(cache.fault("layout panels 1\n"), "nothing more"));
  EXPECT_TRUE(says(cache.fault(""), "nothing more"));
}

TEST(PackedCache, RefusesAnotherVersionByName) {
  const Cache cache;
  cache.write();
  flip(cache.path, 8, 3);
  EXPECT_EQ(cache.fault(), "it has format 9, and this program writes format 1");
}

// A negative length is damage, even where the sum of all lengths is right.
TEST(PackedCache, RefusesNegativeLengths) {
  const std::string sound = packed_header_text({kKey, kManifest, 0, {}});
  const auto file_bytes = static_cast<int64_t>(sound.size());
  EXPECT_EQ(packed_header_bytes(sound, file_bytes), file_bytes);
  constexpr size_t kKeyBytes = 32, kManifestBytes = 40;
  for (const auto& [less, more] :
       {std::pair{kKeyBytes, kManifestBytes}, std::pair{kManifestBytes, kKeyBytes}}) {
    std::string text = sound;
    const auto add = [&](size_t at, int64_t n) {
      int64_t value = 0;
      std::memcpy(&value, text.data() + at, sizeof value);
      value += n;
      std::memcpy(text.data() + at, &value, sizeof value);
    };
    add(less, -100);
    add(more, 100);
    EXPECT_THROW(packed_header_bytes(text, file_bytes), PackedError);
  }
}

TEST(PackedCache, ReplacesWhatHasAnotherKey) {
  const Cache cache;
  cache.write("old\n");
  cache.write();
  EXPECT_EQ(cache.fault(), "");
  struct stat before {
  }, after{};
  stat(cache.path.c_str(), &before);
  cache.write();
  stat(cache.path.c_str(), &after);
  EXPECT_EQ(before.st_ino, after.st_ino) << "what is there under the same key stays";
}

TEST(PackedCache, DiscardsOnlyItsOwnFile) {
  const Cache cache;
  cache.write("old\n");
  const auto file = PackedFile::open(cache.path);
  cache.write();
  file->discard();
  EXPECT_EQ(cache.fault(), "") << "another process has renewed it";
  PackedFile::open(cache.path)->discard();
  EXPECT_EQ(cache.fault(), "there is none");
}

TEST(PackedCache, LeavesNoHalfFileWhenItsWriterIsKilled) {
  const Cache cache;
  const pid_t writer = fork();
  ASSERT_GE(writer, 0);
  if (writer == 0) {
    const LoadOptions options = {
        .n_threads = 1, .progress = [](int64_t, int64_t, double) { kill(getpid(), SIGKILL); }};
    write_packed_file(cache.path, {kKey, kManifest, span_of(cache.data)}, options);
    _exit(0);
  }
  int status = 0;
  waitpid(writer, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(cache.fault(), "there is none");
  ASSERT_EQ(cache.files(), std::vector<std::string>{"model.tandempack.tmp"});
  std::filesystem::resize_file(cache.path + ".tmp", 3 * kBytes);  // as of a larger model
  cache.write();
  EXPECT_EQ(cache.fault(), "");
  EXPECT_EQ(cache.files(), std::vector<std::string>{"model.tandempack"});
}

TEST(PackedCache, RemovesStaleTemporariesOnly) {
  const TempDirectory dir;
  for (const char* name : {"a.tandempack.tmp", "b.tandempack.tmp", "c.tandempack", "d.tmp"})
    dir.write(name, "text");
  const int writer = open(dir.file("b.tandempack.tmp").c_str(), O_RDWR);
  ASSERT_EQ(flock(writer, LOCK_EX), 0);
  remove_stale_packed_files(dir.path());
  EXPECT_FALSE(std::filesystem::exists(dir.file("a.tandempack.tmp")));
  for (const char* name : {"b.tandempack.tmp", "c.tandempack", "d.tmp"})
    EXPECT_TRUE(std::filesystem::exists(dir.file(name))) << name;
  close(writer);
  remove_stale_packed_files(dir.path());
  EXPECT_FALSE(std::filesystem::exists(dir.file("b.tandempack.tmp")));
  remove_stale_packed_files(dir.file("no such folder"));
}

TEST(PackedCache, HasOneWriterAtATime) {
  const Cache cache;
  const LoadOptions options = {
      .n_threads = 1, .progress = [&](int64_t, int64_t, double) {
        EXPECT_TRUE(says(error_of([&] { cache.write(); }), "another process is writing it"));
      }};
  write_packed_file(cache.path, {kKey, kManifest, span_of(cache.data)}, options);
  EXPECT_EQ(cache.fault(), "");
}

// With concurrent readers and writers a reader finds no file or a complete one.
TEST(PackedCache, IsWholeWheneverItIsThere) {
  const Cache cache;
  std::atomic<int> n_writing = 3;
  std::vector<std::jthread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20; ++i) {
        error_of([&] { cache.write(fmt::format("{} {}\n", t, i)); });
        remove_stale_packed_files(cache.folder());
      }
      --n_writing;
    });
  int n_read = 0;
  while (n_writing > 0) {
    const std::string fault = cache.fault();
    if (fault == "there is none") continue;
    EXPECT_TRUE(fault.starts_with("it was made for")) << fault;
    ++n_read;
  }
  EXPECT_GT(n_read, 0);
}

TEST(PackedCache, RefusesAReadOnlyPlace) {
  EXPECT_TRUE(says(error_of([] {
                     write_packed_file("/proc/no/x.tandempack", {kKey, kManifest, {}}, {});
                   }),
                   "cannot be created"));
  EXPECT_TRUE(says(error_of([] {
                     write_packed_file("/proc/x.tandempack", {kKey, kManifest, {}}, {});
                   }),
                   "cannot be written"));
}

TEST(PackedCache, LeavesNothingOnAFullDisk) {
  const Cache cache;
  cache.write("old\n");
  struct rlimit before {};
  getrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small = {1'000'000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string error = error_of([&] { cache.write(); });
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(error, cache.path + ".tmp (0.005 GB) cannot be written: File too large");
  EXPECT_EQ(cache.files(), std::vector<std::string>{"model.tandempack"});
  EXPECT_EQ(cache.fault("old\n"), "") << "what was there stays";
}

TEST(PackedCache, LeavesNothingOnADiskThatFailsInTheEnd) {
  const Cache cache;
  cache.write("old\n");
  fsync_fails = true;
  const std::string error = error_of([&] { cache.write(); });
  fsync_fails = false;
  EXPECT_EQ(error, cache.path + ".tmp (0.005 GB) cannot be written: Input/output error");
  EXPECT_EQ(cache.files(), std::vector<std::string>{"model.tandempack"});
  EXPECT_EQ(cache.fault("old\n"), "") << "what was there stays";
}

TEST(PackedCache, LeavesNothingWhenProgressStopsIt) {
  const Cache cache;
  const LoadOptions options = {.n_threads = 1, .progress = [](int64_t, int64_t, double) {
                                 fail("interrupted: start again");
                               }};
  EXPECT_EQ(error_of([&] {
              write_packed_file(cache.path, {kKey, kManifest, span_of(cache.data)}, options);
            }),
            "interrupted: start again");
  EXPECT_TRUE(cache.files().empty());
}

}  // namespace
}  // namespace tandem
