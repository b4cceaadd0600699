#include "hub/repository.h"

#include <fnmatch.h>

#include <algorithm>
#include <set>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

constexpr size_t kMaxListingBytes = 64 << 20;
constexpr int64_t kMaxFileBytes = int64_t{1} << 44;
constexpr size_t kMaxFiles = 1 << 18;  // so that a sum of sizes cannot overflow
constexpr size_t kCommitDigits = 40, kGitDigits = 40, kSha256Digits = 64;
constexpr size_t kMaxPathBytes = 1000;

bool is_hex(std::string_view text, size_t digits) {
  return text.size() == digits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// Whether a path names a file below the folder it is relative to, other than our own.
bool stays_inside(const std::string& path) {
  if (path.empty() || path.size() > kMaxPathBytes) return false;
  for (const char c : path)
    if (static_cast<unsigned char>(c) < 0x20 || c == '\\' || c == 0x7f) return false;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string part = path.substr(begin, end - begin);
    if (part.empty() || part == "." || part == ".." || (begin == 0 && part == ".pull"))
      return false;
    begin = end + 1;
  }
  return true;
}

std::string text_of(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

int64_t size_of(const nlohmann::json& object) {
  const auto found = object.find("size");
  if (found == object.end() || !found->is_number_integer()) return -1;
  if (found->is_number_unsigned() && found->get<uint64_t>() > uint64_t{kMaxFileBytes}) return -1;
  return found->get<int64_t>();
}

HubFile file_of(const nlohmann::json& entry, const std::string& source) {
  require(entry.is_object(), "{}: {} is no file of a repository", source, shown(entry));
  HubFile file{.path = text_of(entry, "rfilename"), .bytes = size_of(entry), .digest = {}};
  require(stays_inside(file.path), "{}: the file {} is refused: its name would leave the folder",
          source, shown(file.path));
  require(file.bytes >= 0 && file.bytes <= kMaxFileBytes, "{}: {} has no size", source,
          shown(file.path));
  const auto lfs = entry.find("lfs");
  const std::string sha256 = lfs != entry.end() && lfs->is_object() ? text_of(*lfs, "sha256") : "";
  const std::string blob = text_of(entry, "blobId");
  if (is_hex(sha256, kSha256Digits))
    file.digest = {Digest::Kind::kSha256, sha256};
  else if (is_hex(blob, kGitDigits))
    file.digest = {Digest::Kind::kGit, blob};
  return file;
}

}  // namespace

int64_t HubListing::bytes() const {
  int64_t sum = 0;
  for (const HubFile& file : files) sum += file.bytes;
  return sum;
}

std::string HubAddress::listing_url() const {
  return fmt::format("{}/api/models/{}/revision/{}?blobs=true", endpoint, repository,
                     url_encoded(revision, false));
}

std::string HubAddress::file_url(const std::string& commit, const std::string& path) const {
  return fmt::format("{}/{}/resolve/{}/{}", endpoint, repository, commit, url_encoded(path, true));
}

void check_repository_name(const std::string& name) {
  const size_t slash = name.find('/');
  const bool two_parts = slash != std::string::npos && slash > 0 && slash + 1 < name.size();
  bool ok = two_parts && name.find('/', slash + 1) == std::string::npos && name[0] != '.' &&
            name[slash + 1] != '.';
  for (const char c : name)
    ok = ok && (std::isalnum(static_cast<unsigned char>(c)) ||
                std::string_view("-._/").find(c) != std::string_view::npos);
  require(ok, "{} is no name of a repository: give OWNER/NAME, such as deepseek-ai/DeepSeek-R1",
          shown(name));
}

HubListing parse_listing(std::string_view text, const std::string& source) {
  const nlohmann::json answer = parse_json(text, source);
  require(answer.is_object(), "{}: the answer is no object: is this a hub?", source);
  HubListing listing{.commit = text_of(answer, "sha"), .files = {}};
  require(is_hex(listing.commit, kCommitDigits), "{}: the answer names no commit: is this a hub?",
          source);
  const auto files = answer.find("siblings");
  require(files != answer.end() && files->is_array(), "{}: the answer lists no files", source);
  require(files->size() <= kMaxFiles, "{}: {} files are more than {}", source, files->size(),
          kMaxFiles);
  std::set<std::string> paths;
  for (const nlohmann::json& entry : *files) {
    listing.files.push_back(file_of(entry, source));
    const std::string& path = listing.files.back().path;
    require(paths.insert(path).second, "{}: the file {} is listed twice", source, shown(path));
  }
  std::ranges::sort(listing.files, {}, &HubFile::path);
  return listing;
}

HubListing list_repository(HttpConnection& connection, const HubAddress& address, int n_tries) {
  const std::string url = address.listing_url();
  Retries retries(n_tries);
  std::string text;
  const auto sink = [&](const HttpReply&, std::span<const std::byte> bytes) {
    text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return text.size() <= kMaxListingBytes;
  };
  for (;;) {
    text.clear();
    const HttpReply reply = connection.get(url, sink);
    if (reply.ok() && reply.problem.empty()) break;
    retries.wait(url, reply, [] { return true; });
  }
  require(text.size() <= kMaxListingBytes, "{}: the answer is longer than {} MB", url,
          kMaxListingBytes >> 20);
  return parse_listing(text, url);
}

HubListing only_matching(HubListing listing, const std::vector<std::string>& patterns) {
  std::erase_if(listing.files, [&](const HubFile& file) {
    const std::string name = file.path.substr(file.path.find_last_of('/') + 1);
    return std::ranges::none_of(patterns, [&](const std::string& pattern) {
      return fnmatch(pattern.c_str(), file.path.c_str(), 0) == 0 ||
             fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
    });
  });
  require(!listing.files.empty(), "--include: no file of the repository matches {}",
          fmt::join(patterns, " or "));
  return listing;
}

}  // namespace tandem
