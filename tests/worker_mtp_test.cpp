// Drafts of the layers for multi-token prediction (MTP) whose experts workers have, which are
// threads here: logits and drafts of one process, workers without these layers, and steps that fail
// while they draft.
#include <fstream>
#include <map>

#include "cli/conversation.h"
#include "engine/completion.h"
#include "engine/drafts/mtp_drafts.h"
#include "tests/error_of.h"
#include "tests/golden_file.h"
#include "tests/mtp_logits.h"
#include "tests/temp_directory.h"
#include "tests/whole_models.h"
#include "tests/worker_backbones.h"
#include "tests/worker_models.h"

namespace tandem::test {
namespace {

using std::chrono::milliseconds;

class WorkerMtp : public testing::TestWithParam<std::string> {};

TEST_P(WorkerMtp, HasTheGoldenLogits) {
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  // t1 has near ties between experts, which only float32 decides as the golden values do.
  const auto isa = GetParam() == "t1" ? std::optional(cpu::Isa::kReference) : std::nullopt;
  const double tolerance = isa ? 2e-4 : 2e-2;
  ModelOptions options = drafting(directory);
  options.isa = isa;
  LoadedModel alone(options);
  const int n = alone.config().router.n_experts;
  std::vector<int32_t> tokens, next;
  for (int i = 0; i < 30; ++i) {
    tokens.push_back((i * 7 + 3) % 30);
    next.push_back((i * 7 + 10) % 30);
  }
  const auto want = mtp_logits(alone, tokens, next, 13);
  const std::string first = fmt::format("0-{}", n / 2 - 1),
                    last = fmt::format("{}-{}", n / 2, n - 1);
  for (const auto& division : std::vector<std::vector<std::string>>{
           {"auto"}, {"auto", "auto"}, {first, last}, {last, first, first}, {last}}) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(division, " | ")));
    LoadedExpertsOptions of_worker = with_mtp(directory, "");
    of_worker.isa = isa;
    const Workers workers(of_worker, division);
    options.workers.addresses = workers.addresses;
    LoadedModel loaded(options);
    if (division[0] == "auto") {
      EXPECT_EQ(mtp_logits(loaded, tokens, next, 13), want) << "one shard";
    }
    EXPECT_GE(compare_with_golden(loaded, golden, 64, tolerance), GetParam() == "t1" ? 5 : 19);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, WorkerMtp, testing::Values("t1", "v3_fp8", "v3_1_fp8"),
                         [](const auto& info_of) { return info_of.param; });

// The same tokens, of which as many were drafted.
TEST(WorkerDrafts, AreThoseOfOneProcess) {
  ModelOptions options = drafting(kTinyR1);
  options.max_logits = 32;
  options.draft_tokens = 2;
  const Drafted want = drafted(options);
  EXPECT_GT(want.n_accepted, 30);
  ModelOptions off = options;
  off.draft = DraftChoice::kOff;
  EXPECT_EQ(drafted(off).tokens, want.tokens);
  for (const auto& division : std::vector<std::vector<std::string>>{
           {"auto"}, {"auto", "auto"}, {"0-7", "8-15"}, {"8-15"}}) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(division, " | ")));
    const Workers workers(with_mtp(kTinyR1, ""), division);
    options.workers.addresses = workers.addresses;
    for (const int micro_batches : {1, 2}) {
      options.micro_batches = micro_batches;
      const Drafted got = drafted(options);
      EXPECT_EQ(got.tokens, want.tokens);
      EXPECT_EQ(got.n_accepted, want.n_accepted);
      EXPECT_EQ(got.n_rejected, want.n_rejected);
    }
  }
}

// Also the experts of the MTP layer are with the worker, and not in the backbone.
TEST(WorkerDrafts, ReadTheLayersPartsOnce) {
  const std::string directory = kGolden + "v3_fp8";
  const int64_t all = LoadedModel(drafting(directory)).load_report().bytes;
  const int64_t main_layers = LoadedExperts(served(directory, "auto")).load_report().bytes;
  const int64_t half = LoadedExperts(with_mtp(directory, "0-3")).load_report().bytes;
  EXPECT_EQ(LoadedExperts(with_mtp(directory, "4-7")).load_report().bytes, half);
  EXPECT_EQ(4 * half, 3 * main_layers) << "three layers instead of two";
  const Workers workers(with_mtp(directory, ""), {"0-3"});
  EXPECT_EQ(LoadedModel(drafting(directory, workers.addresses)).load_report().bytes, all - half);
}

TEST(WorkerDrafts, AreRefusedOrLookedUpWhereAWorkerLacksTheLayer) {
  const Workers workers(with_mtp(kTinyR1, ""), {"0-7", "8-15"});
  const WorkerThread without(served(kTinyR1, "8-15"));
  const std::vector<std::string>& a = workers.addresses;
  const std::string lacks = "the worker " + without.address() +
                            " has no experts of the layer for multi-token prediction: start it "
                            "with --draft mtp";
  EXPECT_EQ(error_of([&] {
              LoadedModel loaded(drafting(kTinyR1, {a[0], without.address()}));
            }),
            "--draft mtp: " + lacks + ", or use --draft lookup");
  const auto source_of = [&](const std::string& second, double largest_share, Lines& notes) {
    ModelOptions options = drafting(kTinyR1, {a[0], second});
    options.draft = DraftChoice::kAuto;
    options.largest_mtp_share = largest_share;
    options.note = notes.sink();
    return LoadedModel(options).drafting().source;
  };
  Lines of_two, of_one, of_small;
  EXPECT_EQ(source_of(a[1], 1, of_two), Drafting::Source::kMtp);
  EXPECT_EQ(of_two.count("drafts are looked up"), 0);
  EXPECT_EQ(source_of(without.address(), 1, of_one), Drafting::Source::kLookup);
  EXPECT_EQ(of_one.count("drafts are looked up in the text: " + lacks), 1);
  EXPECT_EQ(source_of(without.address(), 0.25, of_small), Drafting::Source::kLookup);
  EXPECT_EQ(of_small.count("drafts are looked up"), 0) << "the layer would not be used anyway";
  // One that has the layer is an owner like any other where nothing is drafted with it.
  ModelOptions off = tiny_r1(DeviceChoice::kCpu);
  const std::vector<std::vector<int32_t>> want = answers(off, 3);
  off.workers.addresses = {a[0], a[1], without.address()};
  EXPECT_EQ(answers(off, 3), want);
}

TEST(WorkerDrafts, AWorkerDecidesWhetherItHasTheLayer) {
  std::vector<std::string> warnings;
  LoadedExpertsOptions options = served(kTinyR1, "auto");
  options.warn = [&](const std::string& line) { warnings.push_back(line); };
  const auto n_layers = [&] { return LoadedExperts(options).served().welcome.n_layers; };
  EXPECT_EQ(n_layers(), 3);
  options.draft = DraftChoice::kMtp;
  EXPECT_EQ(n_layers(), 4);
  options.draft = DraftChoice::kAuto;
  EXPECT_EQ(n_layers(), 3) << "a draft would read most of what a step reads";
  options.largest_mtp_share = 1;
  EXPECT_EQ(n_layers(), 4);
  options.directory = kGolden + "v2_lite";
  const int n_of_lite = ModelConfig::from_directory(options.directory).n_layers;
  EXPECT_EQ(n_layers(), n_of_lite);
  options.draft = DraftChoice::kMtp;
  EXPECT_TRUE(says(error_of(n_layers), "--draft mtp: " + options.directory +
                                           " has no layer for multi-token prediction"));
  EXPECT_TRUE(warnings.empty());
}

TEST(WorkerDrafts, ANewcomerNeedsTheLayerWhereItIsUsed) {
  const WorkerThread first(with_mtp(kTinyR1, "auto")), with(with_mtp(kTinyR1, "auto")),
      without(served(kTinyR1, "auto"));
  const TempDirectory folder;
  for (const DraftChoice draft : {DraftChoice::kMtp, DraftChoice::kOff}) {
    const std::string file = folder.file("workers");
    std::ofstream(file, std::ios::trunc) << first.address() << "\n";
    Lines notes;
    ModelOptions options = drafting(kTinyR1);
    options.draft = draft;
    options.note = notes.sink();
    options.workers.file = file;
    options.workers.list_period = milliseconds(5);
    LoadedModel loaded(options);
    std::ofstream(file, std::ios::app) << with.address() << "\n" << without.address() << "\n";
    notes.await("worker " + with.address() + " is up");
    if (draft == DraftChoice::kMtp)
      notes.await("worker " + without.address() +
                  " has not joined: it has experts of 3 layers, and steps use 4 with those for "
                  "multi-token prediction: start it with --draft mtp");
    else
      notes.await("worker " + without.address() + " is up");
  }
}

// A worker that says it had the experts of the MTP layer, and ends the connection when it is asked
// for them: steps succeed, and drafts fail.
std::unique_ptr<WorkerThread> false_worker(
    const std::string& address = ExpertServer::Options().address) {
  return std::make_unique<WorkerThread>(served(kTinyR1, "auto"),
                                        ExpertServer::Options{.address = address},
                                        [](WorkerWelcome& welcome) {
                                          ++welcome.n_layers;
                                          welcome.experts.push_back(welcome.experts.back());
                                        });
}

void await_worker(const std::function<bool()>& is_up) {
  for (int i = 0; i < 2000 && !is_up(); ++i) std::this_thread::sleep_for(milliseconds(5));
  ASSERT_TRUE(is_up());
}

// Requests fail whose drafts do, but not one that has ended with the same step.
TEST(WorkerDrafts, AStepThatFailsInItsDraftsKeepsAnswersThatAreComplete) {
  const auto worker = false_worker();
  ModelOptions options = drafting(kTinyR1, {worker->address()});
  options.max_logits = 8;
  LoadedModel loaded(options);
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  Engine engine = engine_for(loaded, tokenizer);
  std::map<size_t, TokenEvent> ends;
  std::vector<Request> requests = questions(kTinyR1, tokenizer, 3);
  requests[1].max_new_tokens = 1;
  // No page of one text is copied for another one: rows behind such a copy are not filled.
  for (int i = 0; i < 3; ++i)
    for (int32_t& token : requests[i].prompt) token = (token * 7 + 31 * i) % 200 + 20;
  for (size_t i = 0; i < requests.size(); ++i) {
    EngineRequest request;
    request.request = requests[i];
    request.on_event = [&ends, &engine, i](const TokenEvent& event) {
      if (event.finish) ends[i] = event;
      if (ends.size() == 3) engine.stop();
      return true;
    };
    engine.submit(std::move(request));
  }
  engine.run();
  EXPECT_EQ(engine.counts().scheduler.n_running, 0);
  EXPECT_TRUE(ends[1].finish == FinishReason::kLength) << ends[1].error;
  for (const size_t i : {0, 2}) {
    EXPECT_TRUE(ends[i].finish == FinishReason::kFailed) << i;
    EXPECT_TRUE(says(ends[i].error, "experts 0-15")) << ends[i].error;
  }
}

// Rows of the layer's cache that a failed step has left empty are not attended to later.
TEST(WorkerDrafts, RowsOfFailedDraftsAreNotFilled) {
  auto worker = false_worker();
  const std::string address = worker->address();
  LoadedModel loaded(drafting(kTinyR1, {address}));
  StepRunner& model = loaded.model();
  const int vocab = loaded.config().vocab;
  model.set_vocabulary({allowed_bits({.size = vocab}), vocab});
  MtpDrafts drafts(model, loaded.cache(), 0);
  std::vector<int32_t> text(100);
  for (int i = 0; i < 100; ++i) text[i] = (i * 37 + i / 5) % 200 + 20;
  const auto advance = [&](const std::vector<int32_t>& pages, int first, int n) {
    StepArrays step(n);
    step.add(text, pages, first, n, 1);
    drafts.will_compute(0, pages, first, n);
    model.forward(step.batch(), loaded.cache());
    const auto known = std::span(text).first(first + n + 1);
    const Advance of = {1, 0, known, pages, first, n, 0, 2};
    drafts.step_done({&of, 1}, true);
    return drafts.draft(1, known, 2).size();
  };
  EXPECT_THROW(advance({0, 1}, 0, 70), StepFailed);
  worker.reset();
  worker = std::make_unique<WorkerThread>(with_mtp(kTinyR1, "auto"),
                                          ExpertServer::Options{.address = address});
  await_worker([&] { return model.workers()[0].is_up; });
  EXPECT_EQ(advance({0, 1}, 70, 1), 0u) << "a row before it is missing";
  EXPECT_EQ(advance({0, 1}, 71, 1), 0u);
  EXPECT_EQ(advance({2, 3}, 0, 70), 2u);
  EXPECT_EQ(advance({2, 3}, 70, 1), 2u);
}

}  // namespace
}  // namespace tandem::test
