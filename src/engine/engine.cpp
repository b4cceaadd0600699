#include "engine/engine.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <utility>

#include "core/run_error.h"

namespace tandem {
namespace {

// Prompt tokens whose keys may be fetched. The last one is computed here, for its logits, and
// tokens that are scored too.
int n_fetchable(const EngineRequest& request) {
  return request.first_scored.value_or(static_cast<int>(request.request.prompt.size()) - 1);
}

constexpr size_t kMaxArrivedPages = 32;  // that wait for a step's end; R1: 144 MB

// Pages in host memory of each replica.
int n_host_pages(const StepRunner& model) {
  return model.host_pages() ? model.host_pages()->n_pages() : 0;
}

Scheduler::Limits scheduler_limits(const StepRunner& model, const KvCache& cache,
                                   const Engine::Options& options) {
  const int most = std::min(model.limits().max_tokens, model.limits().max_logits);
  return {.n_pages = cache.n_pages(),
          .n_host_pages = n_host_pages(model),
          .max_tokens = model.limits().max_tokens,
          .max_running = std::min(options.max_running, most),
          .max_logits = model.limits().max_logits,
          .keeps_pages = options.keeps_pages};
}

}  // namespace

Engine::Engine(StepRunner& model, KvCache& cache, Vocabulary vocabulary, int64_t context,
               Options options)
    : model_(model),
      cache_(cache),
      vocabulary_(std::move(vocabulary)),
      context_(context),
      options_(options),
      chooser_(model, vocabulary_),
      replicas_(model.n_replicas(), scheduler_limits(model, cache, options)),
      drafter_(model, cache, options.drafting, n_host_pages(model)),
      steps_(model.n_replicas(), StepArrays(model.limits().max_tokens)),
      batches_(model.n_replicas()) {
  const int64_t longest = replicas_.at(0).longest_sequence();
  require(context <= longest,
          "the context of {} tokens does not fit the KV cache of {} tokens: lower --ctx or "
          "raise --kv-tokens",
          context, longest);
  counts_.scheduler = replicas_.counts();
  homes_ = std::make_shared<ExpertHomes>(options.homes);
  check(!options.rebalance || options.expert_window > 0, "experts move by their use");
  check(!options.prefixes || options.keeps_pages, "pages of the prefix cache");
  if (options.rebalance) rebalancer_.emplace(model, options.homes, *options.rebalance);
  if (options.expert_window == 0) return;
  const ModelConfig& config = model.config();
  read_uses_.resize(int64_t{config.n_all_layers()} * config.router.n_experts);
  model.read_expert_uses(read_uses_);
  expert_window_.emplace(config, options.expert_window, read_uses_);
  expert_uses_ = std::make_shared<ExpertUses>(expert_window_->uses());
}

Engine::~Engine() {
  stop();  // receivers of pages wait for nothing more
  if (options_.prefixes) options_.prefixes->stop();
}

bool Engine::step() {
  take_orders();
  end_overdue();
  const Plan& plan = schedule();
  const bool computes = is_computing();
  n_tokens_ = 0;
  if (computes) {
    const auto start = Clock::now();
    forward(plan);
    if (std::ssize(in_flight_) == (flows_ ? model_.grid().n_stages : 1)) {
      end_step(in_flight_.front(), start);
      in_flight_.pop_front();
    }
  }
  if (!is_computing()) in_flight_.clear();
  count_step();
  std::shared_ptr<const ExpertUses> news;
  if (expert_window_) news = read_expert_uses();
  if (rebalancer_) rebalancer_->between_steps(news);
  deliver();
  return computes;
}

// Chooses the tokens of a step that all stages have computed.
void Engine::end_step(const Step& step, Clock::time_point start) {
  if (step.plan.empty()) return;
  n_tokens_ = step.n_tokens;
  sample(step.plan);
  const double seconds = seconds_since(start);
  speed_.add(n_tokens_, seconds, !rows_.empty());
  try {
    if (drafter_.is_on()) draft_next(step.plan, seconds);
  } catch (const StepFailed& error) {  // the step itself has its tokens
    fail_parts(step.plan, error.what());
  }
}

void Engine::run() {
  try {
    while (wait_for_orders()) {
      try {
        step();
      } catch (const StepFailed& error) {
        fail_step(error.what());
      }
    }
  } catch (const std::exception& error) {
    fail_all(error.what());
    throw;
  }
  take_orders();
  while (!running_.empty()) end(running_.begin()->first, FinishReason::kCancelled);
  while (!arriving_.empty()) end_arriving(arriving_.begin(), FinishReason::kCancelled);
  deliver();
}

// Sleeps while there is nothing to do. Returns false after stop().
bool Engine::wait_for_orders() {
  constexpr std::chrono::milliseconds kMoving(5);      // experts are loaded meanwhile
  constexpr std::chrono::milliseconds kArriving(100);  // a deadline may pass meanwhile
  const auto is_ordered = [&] {
    return !replicas_.empty() || !orders_.requests.empty() || !orders_.pages.empty() ||
           !orders_.arrived.empty() || orders_.forget || stopped_;
  };
  const auto moves = [&] { return rebalancer_ && rebalancer_->is_busy(); };
  std::unique_lock lock(mutex_);
  ordered_.wait(lock, [&] { return is_ordered() || moves() || !arriving_.empty(); });
  if (!is_ordered()) ordered_.wait_for(lock, moves() ? kMoving : kArriving, is_ordered);
  return !stopped_;
}

void Engine::take_orders() {
  Orders orders;
  {
    const std::lock_guard lock(mutex_);
    std::swap(orders, orders_);
    // What is in flight may still write to the pages of a sequence that has ended, which are free.
    pages_wait_ = !in_flight_.empty() && !(orders.pages.empty() && orders.arrived.empty());
    if (pages_wait_) {
      std::swap(orders.pages, orders_.pages);
      std::swap(orders.arrived, orders_.arrived);
    }
    pages_taken_.notify_all();
  }
  // First: requests that came later do not find the pages.
  if (orders.forget) replicas_.forget_pages();
  for (auto& [id, request] : orders.requests) {
    auto receiver = std::make_shared<Receiver>(std::move(request.on_event));
    if (fetches(id, request))
      arriving_.emplace(id, Arriving{std::move(request), std::move(receiver)});
    else
      begin(id, {std::move(request), std::move(receiver)});
  }
  for (const ArrivedPage& page : orders.pages) adopt(page);
  for (const SequenceId id : orders.arrived) arrived(id);
  for (const SequenceId id : orders.aborts) {
    if (arriving_.erase(id) > 0) stop_fetching(id);
    if (running_.erase(id) == 0) continue;
    replicas_.remove(id);
    drafter_.ended(id);
  }
}

void Engine::begin(SequenceId id, Arriving request) {
  EngineRequest& asked = request.asked;
  const auto n = static_cast<int>(asked.request.prompt.size());
  const int first_page = asked.first_page;
  replicas_.add(id, asked.request.prompt, n - asked.first_scored.value_or(n - 1));
  running_.emplace(id, Running{.asked = std::move(asked),
                               .receiver = std::move(request.receiver),
                               .sampler = nullptr,
                               .prompt = {},
                               .n_generated = 0,
                               .n_given_pages = first_page,
                               .started = {}});
}

// Begins to fetch what the prefix cache does not have of a prompt.
bool Engine::fetches(SequenceId id, const EngineRequest& request) {
  if (!options_.prefixes || request.on_page) return false;
  const std::vector<int32_t>& prompt = request.request.prompt;
  const int n = n_fetchable(request);
  const int replica = replicas_.best_for(prompt);
  const auto n_cached =
      static_cast<int>(std::min<int64_t>(n, replicas_.at(replica).n_cached(prompt)));
  if (!options_.prefixes->pays(n - n_cached)) return false;
  replicas_.expect(id, replica);
  const auto page = [this, id](int index, BlockPool::Block keys) {
    return push_page({id, index, std::move(keys)});
  };
  const auto ended = [this, id] {
    const std::lock_guard lock(mutex_);
    orders_.arrived.push_back(id);
    ordered_.notify_one();
  };
  options_.prefixes->fetch(id, {prompt.begin(), prompt.begin() + n + 1}, n_cached / kPageSize,
                           {page, ended});
  return true;
}

// From any thread. Returns whether more pages are needed.
bool Engine::push_page(ArrivedPage page) {
  std::unique_lock lock(mutex_);
  const auto is_over = [&] { return stopped_ || !failure_.empty(); };
  pages_taken_.wait(lock, [&] { return orders_.pages.size() < kMaxArrivedPages || is_over(); });
  if (is_over()) return false;
  orders_.pages.push_back(std::move(page));
  ordered_.notify_one();
  return true;
}

void Engine::adopt(const ArrivedPage& page) {
  const auto it = arriving_.find(page.id);
  if (it == arriving_.end()) return;
  const EngineRequest& asked = it->second.asked;
  const auto prompt = std::span(asked.request.prompt).first(n_fetchable(asked));
  const std::span<std::byte> keys = page.keys.span();
  const int replica = replicas_.expected_on(page.id);
  const auto write = [&](int32_t to) {
    model_.write_page(cache_, replica, to, keys);
    drafter_.will_compute(replica, std::span(&to, 1), 0, kPageSize);
    n_fetched_tokens_ += std::min<int64_t>(kPageSize, std::ssize(prompt) - page.index * kPageSize);
  };
  const bool fits = std::ssize(keys) == model_.key_bytes(cache_);
  const bool is_there = fits && replicas_.at(replica).adopt_page(prompt, page.index, write);
  if (is_there) return;
  options_.prefixes->cancel(page.id);  // later pages would not be found
  arrived(page.id);
}

void Engine::arrived(SequenceId id) {
  if (auto entry = arriving_.extract(id)) begin(id, std::move(entry.mapped()));
}

// A draft is accepted exactly if it equals the token that is then sampled, with the random number
// of its position, so drafts change no answer.
void Engine::draft() {
  if (!drafter_.is_on()) return;
  for (const auto& [id, r] : running_) {
    Scheduler& scheduler = replicas_.of(id);
    if (scheduler.is_decoding(id)) scheduler.draft(id, drafter_.draft(id, scheduler.tokens(id)));
  }
}

// Prepares the drafts of the next step, once the tokens of this one are sampled.
void Engine::draft_next(const Plan& plan, double step_seconds) {
  Drafter::Step step = {.results = {},
                        .n_sequences = static_cast<int>(plan.size()),
                        .decodes = true,
                        .seconds = step_seconds};
  std::vector<Drafter::Result> results;
  std::vector<int> row(steps_.size());  // of each replica
  for (const Part& part : plan) {
    const int first_row = row[part.replica], n_known = part.n - part.n_drafts;
    row[part.replica] += part.n;
    step.n_drafts += part.n_drafts;
    step.longest = std::max(step.longest, part.n_drafts);
    step.decodes = step.decodes && part.last && n_known == 1;
    const auto it = running_.find(part.id);
    if (it == running_.end()) continue;
    const Scheduler& scheduler = replicas_.at(part.replica);
    const int n = scheduler.n_computed(part.id) - part.first;
    results.push_back({.advance = {.id = part.id,
                                   .replica = part.replica,
                                   .tokens = scheduler.tokens(part.id),
                                   .pages = scheduler.pages(part.id),
                                   .first = part.first,
                                   .n = n,
                                   .row = first_row,
                                   .n_drafts = room_for_drafts(part.id, it->second)},
                       .n_drafts = part.n_drafts,
                       .n_accepted = n - n_known});
  }
  step.results = results;
  drafter_.step_done(step);
}

// The last token that an answer may have is not drafted, because no token follows it.
int Engine::room_for_drafts(SequenceId id, const Running& r) const {
  const Scheduler& scheduler = replicas_.of(id);
  if (!scheduler.is_decoding(id)) return 0;
  const int64_t room = std::min<int64_t>(r.asked.request.max_new_tokens - r.n_generated,
                                         context_ - std::ssize(scheduler.tokens(id)));
  return static_cast<int>(std::clamp<int64_t>(room - 1, 0, kMaxDraftTokens));
}

// The stages of a pipeline compute shares of the sequences at the same time. Everything else is
// planned when nothing is in flight: until then steps are empty.
const Engine::Plan& Engine::schedule() {
  draft();
  const bool decodes = decodes_in_flight();
  flows_ = decodes || !in_flight_.empty();
  Step& step = in_flight_.emplace_back();
  for (int replica = 0; replica < replicas_.n(); ++replica) {
    Scheduler& scheduler = replicas_.at(replica);
    steps_[replica].clear();
    if (decodes)
      add_parts(replica, scheduler.plan_share(model_.grid().n_stages), step);
    else if (!flows_)
      add_parts(replica, scheduler.plan(), step);
    batches_[replica] = steps_[replica].batch();
  }
  return step.plan;
}

bool Engine::decodes_in_flight() const {
  bool has_several = false;
  if (pages_wait_) return false;
  for (int i = 0; i < replicas_.n() && model_.grid().n_stages > 1; ++i) {
    if (!replicas_.at(i).only_decodes()) return false;
    has_several = has_several || replicas_.at(i).n_running() > 1;
  }
  return has_several;
}

bool Engine::is_computing() const {
  return std::any_of(in_flight_.begin(), in_flight_.end(),
                     [](const Step& step) { return !step.plan.empty(); });
}

void Engine::add_parts(int replica, std::span<const Scheduler::Part> plan, Step& step) {
  const Scheduler& scheduler = replicas_.at(replica);
  StepArrays& arrays = steps_[replica];
  copy_pages(replica);
  for (const Scheduler::Part& part : plan) {
    const std::span<const int32_t> pages = scheduler.pages(part.id);
    arrays.add(scheduler.tokens_and_drafts(part.id), pages, part.first, part.n, part.n_logits);
    drafter_.will_compute(replica, pages, part.first, part.n);
    step.plan.push_back({part, replica});
  }
  step.n_tokens += arrays.n_tokens();
}

void Engine::forward(const Plan& plan) {
  for (const Part& part : plan) {
    Running& r = running_.at(part.id);
    if (r.started == Clock::time_point()) r.started = Clock::now();
  }
  prepare_masks(plan);
  if (flows_)
    model_.forward_in_flight(batches_, cache_);
  else
    model_.forward(batches_, cache_);
  if (masks_ready_.valid()) masks_ready_.get();
}

void Engine::sample(const Plan& plan) {
  find_rows(plan);
  for (size_t i = 0; i < plan.size(); ++i)
    if (i == 0 || plan[i].replica != plan[i - 1].replica) replicas_.at(plan[i].replica).computed();
  give_pages(plan);
  n_sampled_ = 0;
  std::vector<TokenChooser::Use> uses;
  uses.reserve(rows_.size());
  for (const LogitsRow& row : rows_) uses.push_back({sampler_of(row), row.n_ahead, row.replica});
  chooser_.begin(uses);
  for (size_t i = 0; i < rows_.size(); ++i) use_row(rows_[i], i);
}

// Copies the pages that the plan swaps out, swaps in or duplicates. The next plan knows the
// measured speed.
void Engine::copy_pages(int replica) {
  for (const PageCopy& copy : replicas_.at(replica).copies()) {
    drafter_.copied(replica, copy);
    model_.copy_page(cache_, replica, copy);
  }
  if (!model_.host_pages()) return;
  SwapRates rates = model_.host_pages()->rates();
  rates.computed_tokens_per_second = speed_.tokens_per_second();
  replicas_.set_rates(rates);
}

void Engine::give_pages(const Plan& plan) {
  for (const Part& part : plan) {
    const auto it = running_.find(part.id);
    if (it == running_.end() || !it->second.asked.on_page) continue;
    Running& r = it->second;
    if (!page_keys_) page_keys_.emplace(model_.key_bytes(cache_), kMaxArrivedPages);
    const Scheduler& scheduler = replicas_.of(part.id);
    const int n_wanted = static_cast<int>(r.asked.request.prompt.size()) - 1;
    const int n = scheduler.n_computed(part.id);
    const int n_pages = n >= n_wanted ? pages_for(n_wanted) : n / kPageSize;
    for (; r.n_given_pages < n_pages; ++r.n_given_pages) {
      BlockPool::Block keys = page_keys_->take();
      const int32_t page = scheduler.pages(part.id)[r.n_given_pages];
      model_.read_page(cache_, part.replica, page, keys.span());
      r.asked.on_page(r.n_given_pages, std::move(keys));
    }
  }
}

// Lists the rows of logits in the order of the step's logits.
void Engine::find_rows(const Plan& plan) {
  rows_.clear();
  for (const Part& part : plan) {
    const int end = part.first + part.n;
    const int first_sampled = end - 1 - part.n_drafts;
    for (int i = end - part.n_logits; i < end; ++i)
      rows_.push_back({part.id, i, part.last && i >= first_sampled, std::max(0, i - first_sampled),
                       part.replica});
  }
}

// Null for a row for which no token is sampled.
Sampler* Engine::sampler_of(const LogitsRow& row) {
  const auto it = running_.find(row.id);
  if (it == running_.end()) return nullptr;  // ended while its step was in flight
  Running& r = it->second;
  const Request& request = r.asked.request;
  if (!row.is_sampled || request.max_new_tokens == 0) return nullptr;
  if (!r.sampler)
    r.sampler = std::make_unique<Sampler>(request.sampling, vocabulary_, request.prompt);
  if (r.asked.constraint) r.sampler->allow(r.asked.constraint->allowed());
  return r.sampler.get();
}

// Only the sequences of this step fail, and of those in flight, for which nothing is computed.
void Engine::fail_step(const std::string& why) {
  if (masks_ready_.valid()) masks_ready_.get();
  for (int i = 0; i < replicas_.n(); ++i) replicas_.at(i).abandon();
  for (const Step& step : in_flight_) fail_parts(step.plan, why);
  in_flight_.clear();
  n_tokens_ = 0;
  count_step();
  deliver();
}

// Fails the sequences of a step that have not ended.
void Engine::fail_parts(const Plan& plan, const std::string& why) {
  for (const Part& part : plan) {
    if (!running_.contains(part.id)) continue;
    TokenEvent failure;
    failure.finish = FinishReason::kFailed;
    failure.error = why;
    emit(part.id, std::move(failure));
  }
}

// Nothing is computed after this: unfinished requests fail with the reason.
void Engine::fail_all(const std::string& why) {
  Orders late;
  {
    const std::lock_guard lock(mutex_);
    failure_ = why;
    std::swap(late, orders_);
    pages_taken_.notify_all();
  }
  TokenEvent failure;
  failure.finish = FinishReason::kFailed;
  failure.error = why;
  for (auto& [id, r] : running_) events_.push_back({id, r.receiver, failure});
  for (auto& [id, a] : arriving_) events_.push_back({id, a.receiver, failure});
  running_.clear();
  arriving_.clear();
  for (auto& [id, request] : late.requests)
    events_.push_back({id, std::make_shared<Receiver>(std::move(request.on_event)), failure});
  deliver();
}

// Computes the token masks of the sequences that this step samples, while the device computes it.
void Engine::prepare_masks(const Plan& plan) {
  if (!options_.masks) return;
  std::vector<std::shared_ptr<TokenConstraint>> constraints;
  for (const Part& part : plan) {
    const auto& constraint = running_.at(part.id).asked.constraint;
    if (part.last && constraint) constraints.push_back(constraint);
  }
  if (constraints.empty()) return;
  const auto done = std::make_shared<std::promise<void>>();
  masks_ready_ = done->get_future();
  options_.masks->push([constraints = std::move(constraints), done] {
    for (const auto& constraint : constraints) constraint->prepare();
    done->set_value();
  });
}

void Engine::use_row(const LogitsRow& row, size_t index) {
  const auto it = running_.find(row.id);
  if (it == running_.end()) return;  // the request has ended
  if (row.is_sampled && row.position >= replicas_.of(row.id).n_computed(row.id))
    return;  // a rejected draft
  Running& r = it->second;
  try {
    score_row(row, index, r);
    if (row.is_sampled) emit(row.id, next_event(row.id, r, index));
  } catch (const RunError&) {
    throw;
  } catch (const Error& error) {  // fails this sequence only
    TokenEvent failure;
    failure.finish = FinishReason::kFailed;
    failure.error = error.what();
    emit(row.id, std::move(failure));
  }
}

void Engine::score_row(const LogitsRow& row, size_t index, Running& r) {
  const auto& prompt = r.asked.request.prompt;
  const bool in_prompt = row.position < static_cast<int>(prompt.size());
  if (!in_prompt || row.position < r.asked.first_scored.value_or(INT_MAX)) return;
  if (r.asked.on_logits) return r.asked.on_logits(row.position, chooser_.logits(index));
  if (row.is_sampled) return;
  const int32_t token = prompt[row.position + 1];
  const Sampled s = chooser_.logprobs(index, token, r.asked.request.sampling.n_top_logprobs);
  r.prompt.push_back({token, s.logprob, {s.top.begin(), s.top.end()}});
}

TokenEvent Engine::next_event(SequenceId id, Running& r, size_t row) {
  const Request& request = r.asked.request;
  Scheduler& scheduler = replicas_.of(id);
  TokenConstraint* const constraint = r.asked.constraint.get();
  TokenEvent event;
  event.prompt = std::move(r.prompt);
  if (request.max_new_tokens == 0) {
    event.finish = FinishReason::kLength;
    return event;
  }
  if (constraint) r.sampler->allow(constraint->allowed());  // after an accepted draft
  const Sampled sampled = chooser_.token(row);
  ++n_sampled_;
  event.n_rejected = scheduler.n_drafts(id);
  const auto& stops = request.stop_ids;
  if (std::find(stops.begin(), stops.end(), sampled.token) != stops.end()) {
    event.finish = FinishReason::kStop;
    event.was_drafted =
        scheduler.is_drafted(id, sampled.token) && scheduler.append(id, sampled.token);
    event.n_rejected -= event.was_drafted;
    return event;
  }
  event.token = sampled.token;
  event.logprob = sampled.logprob;
  event.top.assign(sampled.top.begin(), sampled.top.end());
  event.was_drafted = scheduler.append(id, sampled.token);
  const bool full = static_cast<int64_t>(scheduler.tokens(id).size()) >= context_;
  if (++r.n_generated == request.max_new_tokens || full) event.finish = FinishReason::kLength;
  if (constraint) constraint->take(sampled.token);
  if (constraint && constraint->complete()) event.finish = FinishReason::kStop;
  event.n_rejected -= event.was_drafted;
  if (event.was_drafted && !event.finish) event.n_rejected = 0;  // the other drafts may follow
  return event;
}

void Engine::end_overdue() {
  const auto now = Clock::now();
  for (auto it = running_.begin(); it != running_.end();) {
    const auto& [id, r] = *it++;
    if (r.asked.deadline && *r.asked.deadline <= now) end(id, FinishReason::kDeadline);
  }
  for (auto it = arriving_.begin(); it != arriving_.end();) {
    const auto entry = it++;
    const auto& deadline = entry->second.asked.deadline;
    if (deadline && *deadline <= now) end_arriving(entry, FinishReason::kDeadline);
  }
}

// Ends a request before it is scheduled.
void Engine::end_arriving(std::map<SequenceId, Arriving>::iterator entry, FinishReason reason) {
  TokenEvent event;
  event.finish = reason;
  events_.push_back({entry->first, entry->second.receiver, std::move(event)});
  stop_fetching(entry->first);
  arriving_.erase(entry);
}

void Engine::stop_fetching(SequenceId id) {
  replicas_.dismiss(id);
  options_.prefixes->cancel(id);
}

void Engine::end(SequenceId id, FinishReason reason) {
  TokenEvent event;
  event.finish = reason;
  emit(id, std::move(event));
}

// Queues an event and removes the sequence if the event ends it.
void Engine::emit(SequenceId id, TokenEvent event) {
  const auto it = running_.find(id);
  event.started = it->second.started;
  event.cached_tokens = replicas_.of(id).cached_tokens(id);
  const bool ends = event.finish.has_value();
  events_.push_back({id, it->second.receiver, std::move(event)});
  if (!ends) return;
  replicas_.remove(id);
  running_.erase(it);
  drafter_.ended(id);
}

void Engine::deliver() {
  if (events_.empty()) return;
  auto events = std::make_shared<std::vector<Event>>(std::move(events_));
  events_.clear();
  if (!options_.output) return deliver_now(*events);
  options_.output->push([this, events] { deliver_now(*events); });
}

void Engine::deliver_now(const std::vector<Event>& events) {
  for (const Event& event : events)
    if (!(*event.receiver)(event.token) && !event.token.finish) abort(event.id);
}

void Engine::count_step() {
  const std::lock_guard lock(mutex_);
  counts_.scheduler = replicas_.counts();
  if (replicas_.n() > 1) {
    counts_.replicas.clear();
    for (int i = 0; i < replicas_.n(); ++i) counts_.replicas.push_back(replicas_.at(i).counts());
  }
  counts_.n_fetched_tokens = n_fetched_tokens_;
  if (n_tokens_ == 0) return;
  ++counts_.n_steps;
  counts_.n_computed_tokens += n_tokens_;
  counts_.n_generated_tokens += n_sampled_;
  const int size = std::bit_width(static_cast<unsigned>(n_tokens_ - 1));
  ++counts_.steps_of[std::min(size, EngineCounts::kStepSizes - 1)];
}

// Reads the counts once in a block of steps, and when nothing is left to compute. Returns null if
// there are no news.
std::shared_ptr<const ExpertUses> Engine::read_expert_uses() {
  if (n_tokens_ > 0) expert_window_->add_step(n_tokens_);
  if (!expert_window_->has_news() || !(expert_window_->is_due() || replicas_.empty())) return {};
  model_.read_expert_uses(read_uses_);
  expert_window_->read(read_uses_);
  auto uses = std::make_shared<const ExpertUses>(expert_window_->uses());
  const std::lock_guard lock(mutex_);
  expert_uses_ = uses;
  return uses;
}

std::shared_ptr<const ExpertHomes> Engine::expert_homes() const {
  return rebalancer_ ? rebalancer_->homes() : homes_;
}

bool Engine::rebalance() {
  check(rebalances(), "experts that move");
  const std::shared_ptr<const ExpertUses> uses = expert_uses();
  require(uses->n_steps > 0, "no step is counted yet: try again after some answers");
  const bool begins = rebalancer_->request(uses);
  const std::lock_guard lock(mutex_);
  ordered_.notify_one();
  return begins;
}

SequenceId Engine::submit(EngineRequest request) {
  require_runnable(request, model_.config().vocab, context_, vocabulary_);
  check(!request.on_logits || request.request.max_new_tokens == 0, "logits or an answer");
  const std::lock_guard lock(mutex_);
  require_run(failure_.empty(), "{}", failure_);
  orders_.requests.emplace_back(++last_id_, std::move(request));
  ordered_.notify_one();
  return last_id_;
}

void Engine::abort(SequenceId id) {
  const std::lock_guard lock(mutex_);
  orders_.aborts.push_back(id);
}

void Engine::forget_pages() {
  const std::lock_guard lock(mutex_);
  orders_.forget = true;
  ordered_.notify_one();
}

EngineCounts Engine::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::shared_ptr<const ExpertUses> Engine::expert_uses() const {
  const std::lock_guard lock(mutex_);
  return expert_uses_;
}

void Engine::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  pages_taken_.notify_all();
  ordered_.notify_one();
}

}  // namespace tandem
