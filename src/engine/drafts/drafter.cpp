#include "engine/drafts/drafter.h"

#include "core/clock.h"
#include "engine/drafts/mtp_drafts.h"
#include "scheduling/drafts/lookup_drafts.h"

namespace tandem {
namespace {

std::unique_ptr<DraftSource> make_source(StepRunner& model, KvCache& cache, Drafting::Source source,
                                         int n_host_pages) {
  switch (source) {
    case Drafting::Source::kMtp:
      return std::make_unique<MtpDrafts>(model, cache, n_host_pages);
    case Drafting::Source::kLookup:
      return std::make_unique<LookupDrafts>();
    case Drafting::Source::kNone:
      break;
  }
  return nullptr;
}

}  // namespace

Drafter::Drafter(StepRunner& model, KvCache& cache, Drafting drafting, int n_host_pages)
    : drafting_(drafting),
      own_(make_source(model, cache, drafting.source, n_host_pages)),
      source_(drafting.given ? drafting.given : own_.get()),
      policy_(drafting.n_tokens) {}

std::vector<int32_t> Drafter::draft(SequenceId id, std::span<const int32_t> tokens) {
  return source_->draft(id, tokens, sequences_[id].n_drafts);
}

void Drafter::copied(int replica, const PageCopy& copy) {
  if (is_on()) source_->copied(replica, copy);
}

void Drafter::will_compute(int replica, std::span<const int32_t> pages, int first, int n) {
  if (is_on()) source_->will_compute(replica, pages, first, n);
}

void Drafter::ended(SequenceId id) {
  if (!is_on()) return;
  source_->ended(id);
  sequences_.erase(id);
}

void Drafter::step_done(const Step& step) {
  const auto start = Clock::now();
  for (const Result& r : step.results) {
    if (r.n_drafts == 0) continue;
    const bool rejected = r.n_accepted < r.n_drafts;
    sequences_[r.advance.id].acceptance.add(r.n_accepted, rejected);
    policy_.compared(r.n_accepted, rejected);
  }
  if (step.decodes)
    policy_.measured({step.n_sequences, step.n_drafts, step.longest, step.seconds, seconds_});
  choose(step.results);
  std::vector<Advance> advances;
  for (const Result& r : step.results) advances.push_back(r.advance);
  source_->step_done(advances, !drafting_.decides || policy_.follows());
  seconds_ = seconds_since(start);
}

// Sets n_drafts of the sequences and of their advances.
void Drafter::choose(std::span<Result> results) {
  std::vector<const Acceptance*> acceptances;
  std::vector<Result*> decoding;
  for (Result& r : results) {
    r.advance.n_drafts = std::min(r.advance.n_drafts, drafting_.n_tokens);
    if (r.advance.n_drafts == 0) continue;
    acceptances.push_back(&sequences_[r.advance.id].acceptance);
    decoding.push_back(&r);
  }
  if (drafting_.decides) {
    std::vector<int> chosen(decoding.size());
    policy_.choose(acceptances, chosen);
    for (size_t i = 0; i < decoding.size(); ++i)
      decoding[i]->advance.n_drafts = std::min(decoding[i]->advance.n_drafts, chosen[i]);
  }
  for (const Result& r : results) sequences_[r.advance.id].n_drafts = r.advance.n_drafts;
}

}  // namespace tandem
