// The server's paths with a ready engine, whose steps the test runs: exact answers, limits, and the
// error, status and parameter of every refusal.
#include "server/service.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

#include "loader/loaded_model.h"
#include "scheduling/expert_loads.h"
#include "tests/error_of.h"
#include "tests/repository.h"

namespace tandem::test {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kContext = 512;

class ReadyService : public testing::Test {
 protected:
  ReadyService() { service_.set_ready(engine_); }

  static std::unique_ptr<Service> service_with(const Tokenizer& tokenizer, bool chats) {
    Service::Options options;
    options.model_id = "the/model";
    options.root = "/root";
    return std::make_unique<Service>(
        tokenizer, chats ? std::make_unique<ChatFormat>(kTinyR1, tokenizer) : nullptr,
        SamplingDefaults{.temperature = 0}, options);
  }
  HttpResponse reply(Service& service, const std::string& method, const std::string& path,
                     const std::string& body = {}) {
    Service::Result result = service.handle({method, path, {}, body});
    if (auto* response = std::get_if<HttpResponse>(&result)) return *response;
    HttpResponse response;
    std::get<std::shared_ptr<StreamedAnswer>>(result)->start(
        [&](const StreamedAnswer::Output& part) {
          response.status = part.status;
          response.body += part.bytes;
        });
    while (engine_.step()) {
    }
    return response;
  }
  HttpResponse get(const std::string& path) { return reply(service_, "GET", path); }
  HttpResponse post(const std::string& path, const Json& body) {
    return reply(service_, "POST", path, body.dump());
  }
  Json answer(const std::string& path, const Json& body) {
    const HttpResponse response = post(path, body);
    EXPECT_EQ(response.status, 200) << response.body;
    return Json::parse(response.body);
  }
  // "400 prompt: the message"
  static std::string refusal(const HttpResponse& response) {
    const Json error = Json::parse(response.body)["error"];
    return fmt::format("{} {}: {}", response.status,
                       error["param"].is_null() ? "-" : error["param"].get<std::string>(),
                       error["message"].get<std::string>());
  }
  std::string refused(const std::string& path, const Json& body) {
    return refusal(post(path, body));
  }

  const Tokenizer tokenizer_ = Tokenizer::from_directory(kTinyR1);
  LoadedModel loaded_{{.directory = kTinyR1,
                       .n_threads = 1,
                       .context = kContext,
                       .max_kv_tokens = 4 * kContext,
                       .step_tokens = 128,
                       .max_logits = 8}};
  Engine engine_{loaded_.model(), loaded_.cache(), {loaded_.config().vocab, {}}, kContext, {}};
  std::unique_ptr<Service> owner_ = service_with(tokenizer_, true);
  Service& service_ = *owner_;
};

TEST_F(ReadyService, SaysWhatItIs) {
  EXPECT_EQ(get("/health").body, R"({"status":"ready"})");
  EXPECT_EQ(get("/health").status, 200);
  EXPECT_EQ(get("/ping").body, get("/health").body);
  EXPECT_EQ(get("/server_info").body,
            R"({"model_path":"/root","served_model_name":"the/model","version":"0.1.0",)"
            R"("internal_states":[{}],"context_length":512,"kv_tokens":512,)"
            R"("dp_size":1,"tp_size":1})");
  EXPECT_EQ(get("/get_model_info").body, get("/server_info").body);
  EXPECT_TRUE(says(get("/metrics").body, "tandem:ready{model_name=\"the/model\",engine=\"0\"} 1"));
  EXPECT_STREQ(get("/metrics").content_type, "text/plain; version=0.0.4; charset=utf-8");
  EXPECT_STREQ(get("/").content_type, "text/html; charset=utf-8");
  EXPECT_STREQ(get("/openapi.json").content_type, "application/json");
  service_.set_stopping();
  EXPECT_EQ(get("/health").status, 503);
  EXPECT_EQ(get("/health").body, R"({"status":"stopping"})");
  EXPECT_EQ(refused("/v1/completions", {{"prompt", "x"}}), "503 -: the server is stopping");
  EXPECT_EQ(post("/v1/completions", {{"prompt", "x"}}).retry_after_seconds, 5);
  EXPECT_EQ(post("/tokenize", Json::object()).retry_after_seconds, 0);
}

TEST_F(ReadyService, UsesOfExpertsAreCountedIfTheEngineDoes) {
  EXPECT_EQ(refusal(get("/experts")),
            "404 -: uses of experts are not counted: start the server with a --balance-window "
            "above 0");
  EXPECT_FALSE(says(get("/metrics").body, "expert"));
  loaded_.model().count_experts();
  const auto counting_engine = [&](const ExpertHomes& homes) {
    return std::make_unique<Engine>(loaded_.model(), loaded_.cache(),
                                    Vocabulary{loaded_.config().vocab, {}}, kContext,
                                    Engine::Options{.expert_window = 20, .homes = homes});
  };
  const auto submit = [&](Engine& engine, int n_tokens) {
    EngineRequest request;
    request.request.prompt.assign(n_tokens, 20);
    request.request.max_new_tokens = 1;
    request.on_event = [](const TokenEvent&) { return true; };
    engine.submit(std::move(request));
    while (engine.step()) {
    }
  };
  const auto counting = counting_engine(loaded_.expert_homes());
  service_.set_ready(*counting);
  submit(*counting, 9);
  Json json = Json::parse(get("/experts").body);
  EXPECT_EQ(json["window_steps"], 20);
  EXPECT_EQ(json["steps"], 1);
  EXPECT_EQ(json["tokens"], 9);
  EXPECT_EQ(json["load"], Json::array({2 * 9 * 4.0})) << "two layers, four experts a token";
  EXPECT_EQ(json["balancedness"], 1);
  EXPECT_FALSE(json.contains("gpu_share"));
  ASSERT_EQ(json["layers"].size(), 2u);
  auto uses = counting->expert_uses();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(json["layers"][i]["layer"], i + 1) << "layer 0 is dense";
    EXPECT_EQ(json["layers"][i]["counts"], Json(uses->of_layer[i + 1]));
    EXPECT_EQ(json["layers"][i]["ranks"], nullptr);
    EXPECT_FALSE(json["layers"][i].contains("gpu"));
  }
  const std::string labels = "{model_name=\"the/model\",engine=\"0\"";
  std::string text = get("/metrics").body;
  EXPECT_TRUE(says(text, "\ntandem:expert_window_steps" + labels + "} 1\n"));
  EXPECT_TRUE(says(text, "\ntandem:expert_balancedness" + labels + "} 1\n"));
  for (const char* absent : {"layer_expert", "rank_expert", "gpu_share"})
    EXPECT_FALSE(says(text, absent)) << absent;

  // The same counts if rank 1 had experts 8 and more, and expert 0 as well.
  ExpertHomes homes = loaded_.expert_homes();
  homes.n_ranks = 2;
  homes.ranks_of_layer.assign(3, {0, 2});
  for (auto& layer : homes.ranks)
    for (size_t e = 0; e < layer.size(); ++e)
      layer[e] = e == 0 ? std::vector<int>{0, 1} : std::vector<int>{e < 8 ? 0 : 1};
  homes.on_gpu = {{}, std::vector<bool>(16, true), std::vector<bool>(16)};
  homes.on_gpu[2][5] = true;
  const auto on_two_ranks = counting_engine(homes);
  submit(*on_two_ranks, 9);
  uses = on_two_ranks->expert_uses();
  service_.set_ready(*on_two_ranks);
  json = Json::parse(get("/experts").body);
  const ExpertLoads loads = loads_of(*uses, homes);
  EXPECT_EQ(json["load"], Json(loads.of_rank));
  EXPECT_EQ(json["load"][0].get<double>() + json["load"][1].get<double>(), 72);
  EXPECT_EQ(json["layers"][0]["ranks"][0], Json({0, 1}));
  EXPECT_EQ(json["layers"][1]["ranks"][9], Json::array({1}));
  EXPECT_EQ(json["layers"][1]["gpu"], Json::array({5}));
  EXPECT_EQ(json["layers"][0]["gpu"].size(), 16u);
  EXPECT_EQ(json["layers"][0]["gpu_share"], 1);
  text = get("/metrics").body;
  const auto line = [&](const std::string& name, const std::string& more, double value) {
    EXPECT_TRUE(says(text, fmt::format("\ntandem:{}{}{}}} {}\n", name, labels, more, value)))
        << name << " in " << text;
  };
  line("layer_expert_balancedness", ",layer=\"1\"", loads.layers[1].balancedness);
  line("layer_expert_balancedness", ",layer=\"2\"", loads.layers[2].balancedness);
  EXPECT_FALSE(says(text, "layer=\"0\""));
  line("rank_expert_load_share", ",rank=\"0\"", loads.of_rank[0] / 72);
  line("rank_expert_load_share", ",rank=\"1\"", loads.of_rank[1] / 72);
  line("expert_balancedness", "", loads.balancedness);
  line("expert_gpu_share", "", loads.gpu_share);
  service_.set_ready(engine_);
}

TEST_F(ReadyService, ExpertsOfOneProcessDoNotMove) {
  const std::string why =
      "404 -: experts do not move: start the server on several ranks, or with workers, with "
      "--rebalance on-request "
      "or auto, or with a GPU and the CPU beside it with --hot-experts live";
  EXPECT_EQ(refusal(get("/rebalance")), why);
  EXPECT_EQ(refused("/rebalance", Json::object()), why);
  EXPECT_EQ(reply(service_, "PUT", "/rebalance").allow, "GET, HEAD, POST");
}

TEST_F(ReadyService, ModelsAreFoundByTheirIds) {
  const Json list = Json::parse(get("/v1/models").body);
  ASSERT_EQ(list["data"].size(), 1u);
  EXPECT_EQ(list["data"][0]["id"], "the/model");
  EXPECT_EQ(list["data"][0]["max_model_len"], kContext);
  EXPECT_EQ(Json::parse(get("/v1/models/the/model").body), list["data"][0]);
  EXPECT_EQ(Json::parse(get("/v1/models/the%2Fmodel").body), list["data"][0]);
  EXPECT_EQ(refusal(get("/v1/models/other")), "404 model: the model \"other\" does not exist");
  EXPECT_EQ(refusal(get("/v1/models/")), "404 model: the model \"\" does not exist");
  EXPECT_EQ(refusal(get("/v1/modelsx")), "404 -: GET \"/v1/modelsx\" does not exist");
  EXPECT_EQ(refused("/v1/completions", {{"prompt", "x"}, {"model", "other"}}),
            "404 model: the model \"other\" is not served here, only \"the/model\"");
  EXPECT_EQ(answer("/v1/completions",
                   {{"prompt", "x"}, {"model", "the/model"}, {"max_tokens", 1}})["model"],
            "the/model");
}

TEST_F(ReadyService, OtherMethodsAreNamed) {
  const auto allowed = [&](const std::string& method, const std::string& path) {
    const HttpResponse response = reply(service_, method, path);
    return response.status == 405 ? response.allow : std::to_string(response.status);
  };
  EXPECT_EQ(allowed("POST", "/health"), "GET, HEAD");
  EXPECT_EQ(allowed("HEAD", "/health"), "200");
  EXPECT_EQ(allowed("GET", "/tokenize"), "POST");
  EXPECT_EQ(allowed("HEAD", "/tokenize"), "POST");
  EXPECT_EQ(allowed("DELETE", "/v1/models/x"), "GET, HEAD");
  EXPECT_EQ(allowed("OPTIONS", "/health"), "GET, HEAD") << "without a page that asks";
  EXPECT_EQ(refusal(reply(service_, "PUT", "/tokenize")),
            "405 -: PUT \"/tokenize\" is not allowed");
}

// 509 tokens and 3 new ones fill the context; one more of either is too many.
TEST_F(ReadyService, ThePromptAndItsAnswerFitTheContext) {
  const auto ids = [](int n) { return Json(std::vector<int>(n, 20)); };
  const auto too_many = [](int all, int prompt, int completion) {
    return fmt::format(
        "400 prompt: This model's maximum context length is 512 tokens. However, you requested {} "
        "tokens ({} in the prompt, {} in the completion). Please reduce the length of the prompt "
        "or of the completion.",
        all, prompt, completion);
  };
  const Json fits =
      answer("/v1/completions", {{"prompt", ids(509)}, {"max_tokens", 3}, {"ignore_eos", true}});
  EXPECT_EQ(fits["usage"]["completion_tokens"], 3);
  EXPECT_EQ(refused("/v1/completions", {{"prompt", ids(510)}, {"max_tokens", 3}}),
            too_many(513, 510, 3));
  EXPECT_EQ(refused("/v1/completions", {{"prompt", ids(509)}, {"max_tokens", 4}}),
            too_many(513, 509, 4));
  EXPECT_EQ(refused("/generate", {{"input_ids", ids(385)}}), too_many(513, 385, 128));
  EXPECT_EQ(refused("/v1/completions", {{"prompt", ids(497)}}), too_many(513, 497, 16));
  std::string long_text;
  for (int i = 0; i < 600; ++i) long_text += "1 ";
  const Json messages = Json::array({{{"role", "user"}, {"content", long_text}}});
  EXPECT_TRUE(says(refused("/v1/chat/completions", {{"messages", messages}}),
                   "400 messages: This model's maximum context length is 512 tokens"));
}

TEST_F(ReadyService, PromptsAreChecked) {
  const int vocab = tokenizer_.vocab_size();
  const auto prompt = [&](const Json& p, Json more = Json::object()) {
    more["prompt"] = p;
    more["max_tokens"] = 1;
    return refused("/v1/completions", more);
  };
  EXPECT_EQ(prompt(Json::array({vocab})),
            fmt::format("400 prompt: token {} is not in the vocabulary", vocab));
  EXPECT_EQ(prompt(Json::array({Json::array({5}), Json::array({vocab})})),
            fmt::format("400 prompt: token {} is not in the vocabulary", vocab));
  EXPECT_EQ(prompt("", {{"add_special_tokens", false}}), "400 prompt: the prompt is empty");
  const std::vector<std::vector<int>> many(1024, {vocab});
  EXPECT_EQ(prompt(many, {{"n", 5}}),
            "400 n: the request asks for 5120 answers: must be at most 4096");
  EXPECT_TRUE(says(prompt(many, {{"n", 4}}), "is not in the vocabulary")) << "4096 are allowed";
  EXPECT_TRUE(says(refusal(reply(service_, "POST", "/v1/completions", "{")), "400 -: "));
}

TEST_F(ReadyService, TextIsTokensAndBack) {
  const Json with = answer("/tokenize", {{"prompt", "Let me"}});
  const Json without = answer("/tokenize", {{"prompt", "Let me"}, {"add_special_tokens", false}});
  EXPECT_EQ(without["tokens"].get<std::vector<int32_t>>(), tokenizer_.encode("Let me"));
  EXPECT_EQ(with["count"], without["count"].get<int>() + 1);
  EXPECT_EQ(with["count"], with["tokens"].size());
  EXPECT_EQ(with["max_model_len"], kContext);
  EXPECT_EQ(refused("/tokenize", Json::object()),
            "400 prompt: prompt is missing: must be given, unless messages are");
  EXPECT_EQ(answer("/detokenize", {{"tokens", without["tokens"]}})["prompt"], "Let me");
  const int vocab = tokenizer_.vocab_size();
  EXPECT_EQ(refused("/detokenize", {{"tokens", Json::array({1, vocab})}}),
            fmt::format("400 tokens: token {} is not in the vocabulary", vocab));
  EXPECT_EQ(refused("/detokenize", Json::object()),
            "400 tokens: tokens is missing: must be a list of token ids");
  const auto plain = service_with(tokenizer_, false);
  plain->set_ready(engine_);
  const Json messages = Json::array({{{"role", "user"}, {"content", "x"}}});
  const std::string asked = Json{{"messages", messages}}.dump();
  for (const char* path : {"/tokenize", "/v1/chat/completions"})
    EXPECT_EQ(refusal(reply(*plain, "POST", path, asked)),
              "400 messages: the model has no chat template: use /v1/completions");
}

TEST_F(ReadyService, AnswersHaveIdsOfTheirEndpointsAndOwnSeeds) {
  const Json messages = Json::array({{{"role", "user"}, {"content", "Hello"}}});
  const Json completion = {
      {"prompt", "Hello"}, {"max_tokens", 8}, {"temperature", 2}, {"ignore_eos", true}};
  std::set<std::string> ids, texts;
  for (int i = 0; i < 4; ++i) {
    const Json done = answer("/v1/completions", completion);
    ids.insert(done["id"]);
    texts.insert(done["choices"][0]["text"]);
    EXPECT_TRUE(done["id"].get<std::string>().starts_with("cmpl-"));
    EXPECT_EQ(done["id"].get<std::string>().size(), 5u + 32);
  }
  EXPECT_EQ(ids.size(), 4u);
  EXPECT_GT(texts.size(), 1u);
  const Json chat = answer("/v1/chat/completions", {{"messages", messages}, {"max_tokens", 4}});
  EXPECT_TRUE(chat["id"].get<std::string>().starts_with("chatcmpl-"));
  EXPECT_FALSE(chat["choices"][0]["message"]["reasoning_content"].get<std::string>().empty());
  const Json whole =
      answer("/v1/chat/completions",
             {{"messages", messages}, {"max_tokens", 4}, {"separate_reasoning", false}});
  EXPECT_FALSE(whole["choices"][0]["message"]["content"].get<std::string>().empty());
}

TEST_F(ReadyService, TheCacheCanBeEmptied) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += fmt::format("{} and ", i);
  const auto cached = [&] {
    const Json done = answer("/v1/completions", {{"prompt", text}, {"max_tokens", 1}});
    return done["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>();
  };
  EXPECT_EQ(cached(), 0);
  EXPECT_GT(cached(), kPageSize);
  for (const char* path : {"/flush_cache", "/reset_prefix_cache"}) {
    EXPECT_EQ(reply(service_, "POST", path).body, "the prefix cache has been emptied\n");
    engine_.step();
    EXPECT_EQ(cached(), 0);
  }
}

}  // namespace
}  // namespace tandem::test
