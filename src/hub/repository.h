// What a hub has of a model: the files of one commit of a repository, with sizes and digests.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hub/digest.h"
#include "hub/http.h"

namespace tandem {

struct HubFile {
  std::string path;  // relative, with slashes; none of its parts is "..", and it is not in .pull
  int64_t bytes = 0;
  Digest digest;
};

struct HubListing {
  std::string commit;          // 40 hexadecimal digits: later requests name it, not a branch
  std::vector<HubFile> files;  // by path

  int64_t bytes() const;
};

struct HubAddress {
  std::string endpoint;    // "https://huggingface.co", without a slash at the end
  std::string repository;  // "deepseek-ai/DeepSeek-R1"
  std::string revision;    // branch, tag or commit

  std::string listing_url() const;
  std::string file_url(const std::string& commit, const std::string& path) const;
};

// Throws Error unless `name` is OWNER/NAME.
void check_repository_name(const std::string& name);

// Reads the answer of /api/models/OWNER/NAME/revision/REVISION?blobs=true. `source` is named in
// messages. Throws Error for what is malformed, and for paths that would leave the folder.
HubListing parse_listing(std::string_view text, const std::string& source);

// Asks the hub. Throws RunError where it cannot be reached, Error where it refuses.
HubListing list_repository(HttpConnection& connection, const HubAddress& address, int n_tries);

// The files whose path, or last part of the path, matches one of the patterns (as in a shell).
// Throws Error if there is none.
HubListing only_matching(HubListing listing, const std::vector<std::string>& patterns);

}  // namespace tandem
