#include "engine/rebalancer.h"

#include <algorithm>
#include <utility>

#include "offload/balance/hot_experts.h"

namespace tandem {

const char* name_of(RebalanceReport::State state) {
  constexpr const char* kNames[] = {"none", "planning", "loading", "done", "failed"};
  return kNames[static_cast<int>(state)];
}

namespace {

std::vector<SharedLayer> shared_layers(const ExpertUses& uses, const ExpertHomes& homes) {
  std::vector<SharedLayer> layers;
  for (int layer = 0; layer < std::ssize(uses.of_layer); ++layer)
    if (const std::vector<int64_t>& counts = uses.of_layer[layer]; !counts.empty())
      layers.push_back({layer, homes.on_gpu[layer], {counts.begin(), counts.end()}});
  return layers;
}

std::vector<LayerUse> layer_uses(const ExpertUses& uses, const ExpertHomes& homes) {
  std::vector<LayerUse> layers;
  for (int layer = 0; layer < std::ssize(uses.of_layer); ++layer) {
    const std::vector<int64_t>& counts = uses.of_layer[layer];
    if (counts.empty()) continue;
    LayerUse& of_layer = layers.emplace_back(LayerUse{.layer = layer,
                                                      .ranks = homes.ranks_of_layer[layer],
                                                      .owners = homes.ranks[layer],
                                                      .use = {counts.begin(), counts.end()}});
    for (std::vector<int>& ranks : of_layer.owners) {
      for (int& rank : ranks) rank -= static_cast<int>(of_layer.ranks.first);
      std::sort(ranks.begin(), ranks.end());
    }
  }
  return layers;
}

}  // namespace

bool is_uneven(const ExpertUses& uses, const ExpertHomes& homes, double below) {
  if (!homes.fixed.empty())
    return movable_balancedness(layer_uses(uses, homes), homes.fixed) < below;
  return loads_of(uses, homes).balancedness < below;
}

bool misses_hot_experts(const ExpertUses& uses, const ExpertHomes& homes, double below) {
  const GpuShareOfUses share = gpu_share_of_uses(shared_layers(uses, homes));
  return share.now < below * share.best;
}

RebalancePlan plan_for(const ExpertUses& uses, const ExpertHomes& homes) {
  if (homes.exchanges_with_gpu())
    return plan_hot_experts(shared_layers(uses, homes), kHotExpertsAtOnce);
  return plan_rebalance(
      layer_uses(uses, homes),
      {.n_of_host = homes.n_of_host, .n_groups = homes.n_groups, .fixed = homes.fixed});
}

Rebalancer::Rebalancer(StepRunner& model, ExpertHomes homes, Options options)
    : model_(model),
      options_(std::move(options)),
      homes_(std::make_shared<ExpertHomes>(std::move(homes))) {
  check(model.mover() != nullptr, "the model has a mover of experts");
}

Rebalancer::~Rebalancer() {
  if (planning_.valid()) planning_.wait();
}

bool Rebalancer::request(std::shared_ptr<const ExpertUses> uses) {
  const std::lock_guard lock(mutex_);
  if (busy_) return false;
  requested_ = std::move(uses);
  busy_ = true;
  report_ = {.state = State::kPlanning, .number = report_.number + 1};
  return true;
}

RebalanceReport Rebalancer::report() const {
  const std::lock_guard lock(mutex_);
  return report_;
}

std::shared_ptr<const ExpertHomes> Rebalancer::homes() const {
  const std::lock_guard lock(mutex_);
  return homes_;
}

bool Rebalancer::is_busy() const {
  const std::lock_guard lock(mutex_);
  return busy_;
}

void Rebalancer::between_steps(const std::shared_ptr<const ExpertUses>& news) {
  if (!is_busy()) {
    if (news) take_new_homes();
    if (!news || !is_due(*news) || !request(news)) return;
  }
  switch (phase_) {
    case Phase::kIdle:
      begin();
      break;
    case Phase::kPlanning:
      if (planning_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) take_plan();
      break;
    case Phase::kLoading:
    case Phase::kStopping:
      if (Clock::now() - polled_ >= kPollInterval) follow_loading();
      break;
  }
}

bool Rebalancer::is_due(const ExpertUses& uses) const {
  return options_.is_due && Clock::now() - began_ >= options_.period &&
         options_.is_due(uses, *homes());
}

// Owners that have changed without a move, such as workers that have come.
void Rebalancer::take_new_homes() {
  std::shared_ptr<const ExpertHomes> homes = model_.mover()->new_homes();
  if (!homes) return;
  const std::lock_guard lock(mutex_);
  homes_ = std::move(homes);
}

void Rebalancer::begin() {
  began_ = Clock::now();
  take_new_homes();
  std::shared_ptr<const ExpertUses> uses;
  {
    const std::lock_guard lock(mutex_);
    uses = std::exchange(requested_, {});
  }
  planning_ = std::async(std::launch::async, [this, uses, homes = homes()] {
    const auto start = Clock::now();
    RebalancePlan plan = options_.plan(*uses, *homes);
    change_report([&](RebalanceReport& r) { r.plan_seconds = seconds_since(start); });
    return plan;
  });
  phase_ = Phase::kPlanning;
}

void Rebalancer::take_plan() {
  plan_of_waves_ = planning_.get();
  wave_ = 0;
  change_report([&](RebalanceReport& r) {
    r.state = State::kLoading;
    r.n_layers = plan_of_waves_.n_layers;
    r.n_waves = static_cast<int>(plan_of_waves_.waves.size());
    r.n_experts = plan_of_waves_.n_arrivals;
    r.before = plan_of_waves_.before;
    r.after = plan_of_waves_.after;
  });
  load_next();
}

void Rebalancer::load_next() {
  if (wave_ == plan_of_waves_.waves.size()) return end(State::kDone);
  model_.load_experts(plan_of_waves_.waves[wave_]);
  phase_ = Phase::kLoading;
}

void Rebalancer::follow_loading() {
  polled_ = Clock::now();
  const std::span<const MoveStatus> ranks = model_.move_status();
  const auto count = [&](MoveStatus::State state) {
    return std::count_if(ranks.begin(), ranks.end(),
                         [&](const auto& r) { return r.state == state; });
  };
  if (phase_ == Phase::kStopping) {
    if (count(MoveStatus::State::kIdle) == std::ssize(ranks)) end(State::kFailed);
    return;
  }
  const auto failed = std::find_if(ranks.begin(), ranks.end(), [](const MoveStatus& r) {
    return r.state == MoveStatus::State::kFailed;
  });
  if (failed != ranks.end()) {
    const bool is_of_workers = !homes()->fixed.empty();  // the reason names the worker
    stop(ranks.size() == 1 || is_of_workers
             ? failed->why.data()
             : fmt::format("rank {} cannot load its experts: {}", failed - ranks.begin(),
                           failed->why.data()));
  } else if (count(MoveStatus::State::kLoaded) == std::ssize(ranks)) {
    move_wave(ranks);
  }
}

// Once all ranks have given up what they loaded, the rebalance has failed.
void Rebalancer::stop(std::string why) {
  change_report([&](RebalanceReport& r) { r.error = std::move(why); });
  model_.keep_experts();
  phase_ = Phase::kStopping;
}

void Rebalancer::move_wave(std::span<const MoveStatus> loaded) {
  double load = 0, prepare = 0;
  int64_t bytes = 0;
  for (const MoveStatus& r : loaded) {
    load = std::max(load, r.load_seconds);
    prepare = std::max(prepare, r.prepare_seconds);
    bytes += r.n_bytes;
  }
  const auto start = Clock::now();
  model_.move_experts();
  const std::span<const MoveStatus> moved = model_.move_status();  // all ranks have moved
  const double pause = seconds_since(start);
  // A worker of the first rank was lost after it had loaded, so nothing has moved.
  if (moved[0].state == MoveStatus::State::kFailed) return stop(moved[0].why.data());
  auto homes = std::make_shared<ExpertHomes>(*this->homes());
  homes->apply(plan_of_waves_.waves[wave_++]);
  change_report([&](RebalanceReport& r) {
    ++r.n_waves_moved;
    r.n_bytes += bytes;
    r.load_seconds += load;
    r.prepare_seconds += prepare;
    r.longest_pause_seconds = std::max(r.longest_pause_seconds, pause);
    homes_ = std::move(homes);
  });
  load_next();
}

void Rebalancer::end(State state) {
  phase_ = Phase::kIdle;
  plan_of_waves_ = {};
  change_report([&](RebalanceReport& r) {
    r.state = state;
    busy_ = false;
  });
}

template <class Change>
void Rebalancer::change_report(Change change) {
  const std::lock_guard lock(mutex_);
  change(report_);
}

}  // namespace tandem
