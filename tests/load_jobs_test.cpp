// Load jobs: every byte of every job is loaded once, from the page cache and from disk; failures
// stop loading; the progress line.
#include "io/load_jobs.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "core/memory.h"
#include "io/direct_file.h"
#include "io/json.h"
#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"

namespace tandem {
namespace {

std::string random_text(size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

// Three files whose sizes are no multiples of a page; jobs have odd sizes and gaps between them.
struct Files {
  TempDirectory dir;
  std::vector<std::string> texts;
  std::vector<MappedFile> files;

  Files() {
    for (const size_t bytes : {size_t{9'000'001}, size_t{77}, size_t{1'300'000}}) {
      const std::string name = "f" + std::to_string(texts.size());
      texts.push_back(random_text(bytes, static_cast<unsigned>(bytes)));
      dir.write(name, texts.back());
      files.emplace_back(dir.file(name));
    }
  }

  void evict() const {
    for (const MappedFile& file : files) {
      fsync(file.fd());
      posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
    }
  }
};

struct Range {
  int file;
  int64_t begin, bytes;
};

std::vector<Range> ranges_of(const Files& f) {
  std::vector<Range> ranges;
  std::mt19937 random(3);
  const int64_t sizes[] = {1, 77, 4096, 65'537, 524'288, 5'000'000};
  for (int i = 0; i < 3; ++i) {
    const int64_t end = f.files[i].bytes();
    for (int64_t at = 0; at < end;) {
      const int64_t bytes = std::min(end - at, sizes[random() % 6]);
      ranges.push_back({i, at, bytes});
      at += bytes + (random() % 3 == 0 ? random() % 200'000 : 0);
    }
  }
  std::shuffle(ranges.begin(), ranges.end(), random);
  return ranges;
}

void expect_all_loaded(const Files& f, int n_threads) {
  const std::vector<Range> ranges = ranges_of(f);
  std::vector<std::string> loaded(ranges.size());
  std::vector<LoadJob> jobs;
  int64_t total = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Range& r = ranges[i];
    total += r.bytes;
    jobs.push_back({f.files[r.file].data() + r.begin, r.bytes, [&, i](const std::byte* data) {
                      loaded[i].append(reinterpret_cast<const char*>(data), ranges[i].bytes);
                    }});
  }
  int64_t last_done = -1, last_total = -1;
  run_load_jobs(
      f.files, std::move(jobs),
      {.n_threads = n_threads, .progress = [&](int64_t done, int64_t all, double seconds) {
         EXPECT_GE(done, last_done);
         EXPECT_GE(seconds, 0);
         last_done = done;
         last_total = all;
       }});
  EXPECT_EQ(last_done, total);
  EXPECT_EQ(last_total, total);
  for (size_t i = 0; i < ranges.size(); ++i)
    EXPECT_EQ(loaded[i], f.texts[ranges[i].file].substr(ranges[i].begin, ranges[i].bytes)) << i;
}

TEST(LoadJobs, LoadEveryByteOnceFromThePageCache) {
  const Files f;
  for (const int n_threads : {1, 2, 7}) expect_all_loaded(f, n_threads);
}

TEST(LoadJobs, LoadEveryByteOnceFromDisk) {
  const Files f;
  for (const int n_threads : {1, 2, 7}) {
    f.evict();
    expect_all_loaded(f, n_threads);
  }
}

bool is_cached(const MappedFile& file, int64_t at) {
  unsigned char resident = 0;
  check(mincore(const_cast<std::byte*>(file.data()) + at / 4096 * 4096, 1, &resident) == 0,
        "mincore");
  return resident & 1;
}

// Half of the pages that a range touches, and not one less.
TEST(LoadJobs, ARangeIsCachedIfHalfOfItsPagesAre) {
  const TempDirectory dir;
  dir.write("f", random_text(8 * 4096, 1));
  const MappedFile file(dir.file("f"));
  const auto cache = [&](std::initializer_list<int> pages) {
    fsync(file.fd());
    posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
    posix_fadvise(file.fd(), 0, 0, POSIX_FADV_RANDOM);  // no read-ahead
    for (const int page : pages) {
      char byte;
      EXPECT_EQ(pread(file.fd(), &byte, 1, page * 4096), 1);
    }
    int n = 0;
    for (int page = 0; page < 8; ++page) n += is_cached(file, page * 4096) ? 1 : 0;
    return n == std::ssize(pages);
  };
  if (!cache({})) GTEST_SKIP() << "the file system keeps its page cache";
  ASSERT_TRUE(cache({1, 2, 6}));
  EXPECT_FALSE(mostly_cached(file, 0, 8 * 4096));
  EXPECT_TRUE(mostly_cached(file, 4096, 4 * 4096)) << "pages 1 to 4";
  EXPECT_FALSE(mostly_cached(file, 4096, 4 * 4096 + 1));
  EXPECT_TRUE(mostly_cached(file, 4095, 3)) << "pages 0 and 1";
  EXPECT_FALSE(mostly_cached(file, 4095, 1));
  EXPECT_FALSE(mostly_cached(file, 3 * 4096 - 1, 8192)) << "pages 2 to 4";
  EXPECT_TRUE(mostly_cached(file, 4096, 1));
  ASSERT_TRUE(cache({0, 3, 5, 7}));
  EXPECT_TRUE(mostly_cached(file, 0, 8 * 4096));
}

// Reads end with the file, and writes with the last whole page.
TEST(DirectFile, CountsWhatItReadsAndWrites) {
  const TempDirectory dir;
  const std::string text = random_text(3 * 4096 + 100, 2);
  dir.write("f", text);
  const int fd = open(dir.file("f").c_str(), O_RDWR);
  const Buffer memory(8 * 4096);
  const DirectFile direct(fd, O_RDWR);
  if (direct.read(0, 4096, memory.data()) == 0) GTEST_SKIP() << "no O_DIRECT here";
  EXPECT_EQ(direct.read(4096, 8192, memory.data()), 8192);
  EXPECT_EQ(std::memcmp(memory.data(), text.data() + 4096, 8192), 0);
  EXPECT_EQ(direct.read(8192, 5 * 4096, memory.data()), 4196);
  EXPECT_EQ(std::memcmp(memory.data(), text.data() + 8192, 4196), 0);
  EXPECT_EQ(direct.read(5 * 4096, 4096, memory.data()), 0);
  std::memset(memory.data(), 7, 8192);
  EXPECT_EQ(direct.write(4096, 8192, memory.data()), 8192);
  EXPECT_EQ(direct.write(0, 0, memory.data()), 0);
  const int other = open("/proc/self/status", O_RDONLY);
  const DirectFile none(other, O_RDONLY);
  EXPECT_EQ(none.read(0, 4096, memory.data()), 0);
  EXPECT_EQ(none.write(0, 4096, memory.data()), 0);
  close(other);
  close(fd);
  const std::string now = read_text_file(dir.file("f"), 1 << 20);
  EXPECT_EQ(now, text.substr(0, 4096) + std::string(8192, 7) + text.substr(3 * 4096));
}

// A job that begins and ends within a page needs a buffer that is one page larger than its bytes.
TEST(LoadJobs, LoadWholeHugePagesFromAnOddPlace) {
  const Files f;
  const int64_t bytes = 4 << 20;
  for (const bool cached : {true, false}) {
    if (!cached) f.evict();
    std::string loaded;
    const auto keep = [&](const std::byte* data) {
      loaded.assign(reinterpret_cast<const char*>(data), bytes);
    };
    run_load_jobs(f.files, {{f.files[0].data() + 4095, bytes, keep}}, {.n_threads = 1});
    EXPECT_EQ(loaded, f.texts[0].substr(4095, bytes)) << cached;
  }
}

// Data is not cached in the page cache, where it would take as much memory as the weights.
TEST(LoadJobs, ReadPastThePageCache) {
  const Files f;
  const int direct = open(f.files[0].path().c_str(), O_RDONLY | O_DIRECT);
  alignas(4096) static char page[4096];
  const bool works = direct >= 0 && pread(direct, page, 4096, 0) == 4096;
  close(direct);
  f.evict();
  if (!works || is_cached(f.files[0], 5'000'000))
    GTEST_SKIP() << "this file system has no way past its page cache";
  expect_all_loaded(f, 2);
  EXPECT_FALSE(is_cached(f.files[0], 5'000'000));
}

TEST(LoadJobs, RunInTheOrderOfTheFiles) {
  const Files f;
  std::vector<int64_t> order;
  std::vector<LoadJob> jobs;
  for (const int64_t at : {60'000, 0, 8'000'000, 500})
    jobs.push_back({f.files[0].data() + at, 10, [&order, at](const std::byte*) {
                      static std::mutex mutex;
                      const std::lock_guard lock(mutex);
                      order.push_back(at);
                    }});
  run_load_jobs(f.files, std::move(jobs), {.n_threads = 1});
  ASSERT_EQ(order.size(), 4u);
  const auto place = [&](int64_t at) { return std::find(order.begin(), order.end(), at); };
  EXPECT_LT(place(0), place(500));
  EXPECT_LT(place(500), place(60'000));
}

TEST(LoadJobs, KeepTheAlignmentOfTheirSource) {
  const Files f;
  for (const bool cached : {true, false}) {
    if (!cached) f.evict();
    std::vector<LoadJob> jobs;
    for (const int64_t at : {64, 4096 + 128, 1'000'000 / 64 * 64})
      jobs.push_back({f.files[0].data() + at, 100, [](const std::byte* data) {
                        EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 64, 0u);
                      }});
    run_load_jobs(f.files, std::move(jobs), {.n_threads = 2});
  }
}

TEST(LoadJobs, NoneIsFine) {
  int calls = 0;
  run_load_jobs({}, {}, {.n_threads = 2, .progress = [&](int64_t, int64_t, double) { ++calls; }});
  EXPECT_EQ(calls, 1);
}

TEST(LoadJobs, AJobsExceptionStopsTheRest) {
  const Files f;
  std::atomic<int> n_run = 0;
  std::vector<LoadJob> jobs;
  for (int64_t i = 0; i < 9000; ++i)
    jobs.push_back({f.files[0].data() + i * 1000, 1000, [&n_run](const std::byte*) {
                      if (++n_run == 5) throw std::runtime_error("five");
                      std::this_thread::sleep_for(std::chrono::microseconds(100));
                    }});
  try {
    run_load_jobs(f.files, std::move(jobs), {.n_threads = 2});
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "five");
  }
  EXPECT_LT(n_run, 1000);
}

TEST(LoadJobs, ProgressMayStopLoading) {
  const Files f;
  std::atomic<int> n_run = 0;
  std::vector<LoadJob> jobs;
  for (int64_t i = 0; i < 9000; ++i)
    jobs.push_back({f.files[0].data() + i * 1000, 1000, [&n_run](const std::byte*) {
                      ++n_run;
                      std::this_thread::sleep_for(std::chrono::milliseconds(1));
                    }});
  const LoadOptions options = {.n_threads = 2, .progress = [](int64_t, int64_t, double) {
                                 fail("interrupted: start again");
                               }};
  EXPECT_EQ(error_of([&] { run_load_jobs(f.files, std::move(jobs), options); }),
            "interrupted: start again");
  EXPECT_LT(n_run, 9000);
}

TEST(LoadJobs, AFileCutShortIsAnError) {
  const Files f;
  const auto cut = [&] { std::filesystem::resize_file(f.files[0].path(), 4'000'000); };
  // The loader notices a truncated file at the start.
  cut();
  const auto load = [&](const std::function<void()>& first) {
    std::vector<LoadJob> jobs;
    for (int64_t at = 0; at < 9'000'000; at += 100'000)
      jobs.push_back({f.files[0].data() + at, 100'000, [&, at](const std::byte*) {
                        if (at == 0) first();
                      }});
    return error_of([&] { run_load_jobs(f.files, std::move(jobs), {.n_threads = 1}); });
  };
  EXPECT_TRUE(says(load([] {}), "when it was opened and has 4000000 now"));
  // The loader notices a file that is truncated during loading.
  std::filesystem::resize_file(f.files[0].path(), f.files[0].bytes());
  EXPECT_TRUE(says(load(cut), "cut short"));
}

// Columns on a terminal: UTF-8 bytes without continuation bytes.
int64_t columns(const std::string& line) {
  return std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

TEST(ProgressLine, SaysEverythingInOneShortLine) {
  EXPECT_EQ(progress_line(1'000'000'000, 4'000'000'000, 2),
            "loading ████░░░░░░░░░░░░  25 % 1.00 of 4.00 GB  0.50 GB/s  6 s left");
  EXPECT_EQ(progress_line(0, 4'000'000'000, 0),
            "loading ░░░░░░░░░░░░░░░░   0 % 0.00 of 4.00 GB  0.00 GB/s");
  EXPECT_EQ(progress_line(688'574'839'360, 688'574'839'360, 100),
            "loading ████████████████ 100 % 688.6 of 688.6 GB  6.89 GB/s  0 s left");
  EXPECT_NE(progress_line(1, 0, 1), "");
}

TEST(ProgressLine, FitsATerminal) {
  for (const int64_t total : {int64_t{1}, int64_t{99'999'999'999}, int64_t{1'500'000'000'000}})
    for (const double share : {0.0, 1e-9, 0.01, 0.999, 1.0})
      for (const double seconds : {0.0, 1e-6, 1.0, 3'000.0, 1e6, 1e12})
        EXPECT_LE(columns(progress_line(static_cast<int64_t>(share * total), total, seconds)), 79)
            << progress_line(static_cast<int64_t>(share * total), total, seconds);
}

TEST(RowsPerLoadJob, AreAtLeastOne) {
  EXPECT_EQ(rows_per_load_job(7168), 73);
  EXPECT_EQ(rows_per_load_job(kLoadJobBytes), 1);
  EXPECT_EQ(rows_per_load_job(kLoadJobBytes + 1), 1);
  EXPECT_EQ(rows_per_load_job(1), kLoadJobBytes);
}

}  // namespace
}  // namespace tandem
