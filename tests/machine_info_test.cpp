// Memory and processor of this process, from made-up files of /proc and /sys.
#include "core/machine_info.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/temp_directory.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

class MadeUpMachine : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) const {
    fs::create_directories(fs::path(dir_.file(name)).parent_path());
    dir_.write(name, text);
  }
  void SetUp() override {
    write("proc/meminfo",
          "MemTotal:       1000000 kB\nMemFree:         500000 kB\nMemAvailable:    700000 kB\n");
    write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU: 9 GHz\nmodel name\t: Other\n");
    write("proc/self/cgroup", "12:cpuset:/old\n0::/system.slice/tandem.service\n");
  }
  int64_t total() const { return machine_info(dir_.path()).memory_bytes; }
  int64_t available() const { return available_memory_bytes(dir_.path()); }

  TempDirectory dir_;
};

TEST_F(MadeUpMachine, WithoutLimits) {
  EXPECT_EQ(machine_info(dir_.path()).cpu, "Some CPU: 9 GHz");
  EXPECT_EQ(total(), 1'024'000'000);
  EXPECT_EQ(available(), 716'800'000);
  write("sys/fs/cgroup/memory.max", "max\n");
  write("sys/fs/cgroup/memory.current", "900000000\n");
  EXPECT_EQ(total(), 1'024'000'000);
  EXPECT_EQ(available(), 716'800'000);
  write("proc/cpuinfo", "processor\t: 0\nmodel\t: 17\n");
  EXPECT_EQ(machine_info(dir_.path()).cpu, "unknown");
  EXPECT_GE(machine_info(dir_.path()).n_sockets, 1);
}

// A container sees its own group as the root.
TEST_F(MadeUpMachine, InAContainer) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/memory.max", "600000000\n");
  EXPECT_EQ(total(), 600'000'000);
  EXPECT_EQ(available(), 600'000'000);
  write("sys/fs/cgroup/memory.current", "450000000\n");
  EXPECT_EQ(available(), 150'000'000);
  // What it has read of a checkpoint can be given back; shared memory cannot.
  write("sys/fs/cgroup/memory.stat",
        "anon 100000000\nfile 350000000\nshmem 50000000\ninactive_file 200000000\n"
        "active_file 100000000\n");
  EXPECT_EQ(available(), 450'000'000);
  write("sys/fs/cgroup/memory.stat", "active_file 500000000\n");
  EXPECT_EQ(available(), 600'000'000);
  write("sys/fs/cgroup/memory.stat", "");
  write("sys/fs/cgroup/memory.current", "600000001\n");
  EXPECT_EQ(available(), 0);
  write("sys/fs/cgroup/memory.max", "2000000000\n");
  EXPECT_EQ(total(), 1'024'000'000);
  EXPECT_EQ(available(), 716'800'000);
}

// The limit of every group that contains the process holds.
TEST_F(MadeUpMachine, AsAServiceOfSystemd) {
  const std::string slice = "sys/fs/cgroup/system.slice/", service = slice + "tandem.service/";
  write(slice + "memory.max", "max\n");
  write(service + "memory.max", "500000000\n");
  write(service + "memory.current", "100000000\n");
  EXPECT_EQ(total(), 500'000'000);
  EXPECT_EQ(available(), 400'000'000);
  write(slice + "memory.max", "450000000\n");
  write(slice + "memory.current", "200000000\n");
  EXPECT_EQ(total(), 450'000'000);
  EXPECT_EQ(available(), 250'000'000);
}

// Version 1: each controller has its own hierarchy, and a container sees its own group as the
// hierarchy's root while /proc/self/cgroup states the path of the host.
TEST_F(MadeUpMachine, InAContainerOfVersion1) {
  write("proc/self/cgroup",
        "12:cpuset:/old\n7:cpu,cpuacct:/docker/1f\n4:memory:/docker/1f\n0::/\n");
  const std::string root = "sys/fs/cgroup/memory/";
  write(root + "memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(total(), 1'024'000'000);
  EXPECT_EQ(available(), 716'800'000);
  write(root + "memory.usage_in_bytes", "10000000\n");
  write(root + "memory.stat", "total_inactive_file 20000000\n");
  EXPECT_EQ(available(), 716'800'000) << "statistics that lag behind";
  write(root + "memory.limit_in_bytes", "600000000\n");
  write(root + "memory.usage_in_bytes", "450000000\n");
  write(root + "memory.stat",
        "inactive_file 1\nactive_file 2\ntotal_inactive_file 20000000\n"
        "total_active_file 30000000\n");
  EXPECT_EQ(total(), 600'000'000);
  EXPECT_EQ(available(), 200'000'000);
  // On the host the group has its path, and every group above it holds too.
  write(root + "docker/memory.limit_in_bytes", "550000000\n");
  write(root + "docker/1f/memory.limit_in_bytes", "500000000\n");
  write(root + "docker/1f/memory.usage_in_bytes", "400000000\n");
  EXPECT_EQ(total(), 500'000'000);
  EXPECT_EQ(available(), 100'000'000);
}

TEST_F(MadeUpMachine, QuotasOfProcessorTime) {
  const auto quota = [&] { return processor_quota(dir_.path()); };
  const double none = std::numeric_limits<double>::infinity();
  EXPECT_EQ(quota(), none);
  const std::string slice = "sys/fs/cgroup/system.slice/", service = slice + "tandem.service/";
  write(service + "cpu.max", "max 100000\n");
  EXPECT_EQ(quota(), none);
  write(service + "cpu.max", "250000 100000\n");
  EXPECT_EQ(quota(), 2.5);
  write(slice + "cpu.max", "80000 50000\n");
  EXPECT_EQ(quota(), 1.6);
  write("sys/fs/cgroup/cpu.max", "400000 100000\n");
  EXPECT_EQ(quota(), 1.6);
}

TEST_F(MadeUpMachine, QuotasOfVersion1) {
  write("proc/self/cgroup", "7:cpuacct,cpu:/docker/1f\n4:memory:/\n0::/\n");
  const auto quota = [&] { return processor_quota(dir_.path()); };
  const std::string root = "sys/fs/cgroup/cpu/";
  write(root + "cpu.cfs_period_us", "100000\n");
  write(root + "cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(quota(), std::numeric_limits<double>::infinity());
  write(root + "cpu.cfs_quota_us", "1250000\n");
  EXPECT_EQ(quota(), 12.5);
  write(root + "docker/1f/cpu.cfs_period_us", "50000\n");
  write(root + "docker/1f/cpu.cfs_quota_us", "150000\n");
  EXPECT_EQ(quota(), 3);
}

// Sockets and caches of machines in hwloc's synthetic format.
TEST_F(MadeUpMachine, WithSocketsAndCaches) {
  const auto info = [&](const char* machine) {
    setenv("HWLOC_SYNTHETIC", machine, 1);
    const MachineInfo found = machine_info(dir_.path());
    unsetenv("HWLOC_SYNTHETIC");
    return found;
  };
  const MachineInfo two = info("pack:2 l3:3(size=3221225472) core:2 pu:1");
  EXPECT_EQ(two.n_sockets, 2);
  EXPECT_EQ(two.last_level_cache_bytes, 6 * 3'221'225'472);
  const MachineInfo none = info("core:2 pu:1");
  EXPECT_EQ(none.n_sockets, 1);
  EXPECT_EQ(none.last_level_cache_bytes, 0);
}

TEST_F(MadeUpMachine, WithoutItsFiles) {
  const TempDirectory empty;
  EXPECT_EQ(machine_info(empty.path()).cpu, "unknown");
  EXPECT_EQ(available_memory_bytes(empty.path()), 0);
}

}  // namespace
}  // namespace tandem
