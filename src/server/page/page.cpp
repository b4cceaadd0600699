#include "server/page/page.h"

namespace tandem {

std::string_view page() {
  return R"(<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>tandem</title>
<h1>tandem</h1>
<p>An OpenAI-compatible server. Point a client at <code>/v1</code> of this address.</p>
<ul>
<li><a href="/v1/models">/v1/models</a>, POST /v1/chat/completions, POST /v1/completions
<li><a href="/health">/health</a>, <a href="/metrics">/metrics</a>, <a href="/version">/version</a>
</ul>
</html>
)";
}

}  // namespace tandem
