#include "server/generation.h"

#include <utility>

#include "core/run_error.h"
#include "text/chat_format.h"

namespace tandem {
Generation::Generation(Setup setup, Engine& engine, const Tokenizer& tokenizer, Metrics& metrics,
                       std::function<void(const std::string&)> log)
    : setup_(std::move(setup)),
      engine_(engine),
      tokenizer_(tokenizer),
      metrics_(metrics),
      log_(std::move(log)) {
  for (size_t prompt = 0; prompt < setup_.prompts.size(); ++prompt) {
    const bool thinks =
        setup_.splits_reasoning && opens_thinking(tokenizer, setup_.prompts[prompt]);
    for (int i = 0; i < setup_.request.n; ++i) {
      Choice choice(thinks);
      choice.prompt = static_cast<int>(prompt);
      choice.all.index = static_cast<int>(choices_.size());
      choice.all.wants_logprobs = setup_.request.wants_logprobs();
      choices_.push_back(std::move(choice));
    }
  }
  n_unfinished_ = static_cast<int>(choices_.size());
}

void Generation::start(Send send) {
  send_ = std::move(send);
  for (size_t i = 0; i < choices_.size(); ++i) {
    SequenceId id = 0;
    try {
      id = engine_.submit(engine_request(static_cast<int>(i)));
    } catch (const RunError& error) {
      cancel();
      throw ApiError(503, error.what(), {}, "failed");
    } catch (const Error& error) {
      cancel();
      throw ApiError(400, error.what());
    }
    const std::lock_guard lock(mutex_);
    ids_.push_back(id);
    if (cancelled_) engine_.abort(id);
  }
}

void Generation::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  for (const SequenceId id : ids_) engine_.abort(id);
}

EngineRequest Generation::engine_request(int index) {
  const GenerationRequest& r = setup_.request;
  EngineRequest e;
  e.request.prompt = setup_.prompts[choices_[index].prompt];
  e.request.max_new_tokens = r.max_tokens.value_or(
      static_cast<int>(engine_.context() - static_cast<int64_t>(e.request.prompt.size())));
  e.request.sampling = r.sampling;
  e.request.sampling.seed += static_cast<uint64_t>(index);
  if (!r.ignore_eos) e.request.stop_ids = tokenizer_.stop_ids();
  e.request.stop_ids.insert(e.request.stop_ids.end(), r.stop_ids.begin(), r.stop_ids.end());
  e.request.sampling.min_new_tokens = r.min_tokens;
  e.request.sampling.held_back = e.request.stop_ids;
  if (setup_.grammar)
    e.constraint = std::make_shared<TokenConstraint>(
        setup_.grammar, tokenizer_,
        TokenConstraint::Options{.after_thinking = setup_.starts_in_reasoning,
                                 .end_tokens = e.request.stop_ids,
                                 .vocabulary = engine_.vocabulary_size()});
  if (r.echo && r.wants_logprobs()) e.first_scored = 0;
  const auto on_part = [self = shared_from_this(), index](const AnswerPart& part) {
    self->on_part(index, part);
  };
  const AnswerStream::Options answer = {.stops = r.stops,
                                        .skip_special = r.skip_special,
                                        .include_stop = r.include_stop,
                                        .min_new_tokens = r.min_tokens,
                                        .on_part = on_part};
  e.on_event = [stream = std::make_shared<AnswerStream>(tokenizer_, answer)](
                   const TokenEvent& event) { return stream->push(event); };
  if (r.timeout_seconds)
    e.deadline = setup_.received + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(*r.timeout_seconds));
  return e;
}

// Runs on the output thread, which all answers share: an exception ends only this generation.
void Generation::on_part(int index, const AnswerPart& part) {
  if (closed_) return;
  try {
    process(choices_[index], part);
  } catch (const std::exception& error) {
    fail(FinishReason::kFailed, ApiError(500, error.what()));
  }
}

void Generation::process(Choice& choice, const AnswerPart& part) {
  record_metrics(choice, part);
  if (part.finish == FinishReason::kFailed)
    return fail(*part.finish, ApiError(500, part.event->error));
  if (part.finish == FinishReason::kDeadline)
    return fail(*part.finish, ApiError(504, "the request timed out", "timeout", "timeout"));
  if (part.finish == FinishReason::kCancelled)
    return fail(*part.finish, ApiError(503, "the server is stopping", {}, "stopping"));
  ChoicePart piece = make_part(choice, part);
  if (streams()) {
    stream_part(choice, piece);
  } else {
    accumulate(choice, std::move(piece));
  }
  if (part.finish && --n_unfinished_ == 0) finish();
}

void Generation::record_metrics(Choice& c, const AnswerPart& part) {
  const auto now = Clock::now();
  c.n_tokens = part.n_tokens;
  c.cached_tokens = part.event->cached_tokens;
  c.accepted_drafts += part.event->was_drafted;
  c.rejected_drafts += part.event->n_rejected;
  c.started = part.event->started;
  if (part.event->token) {
    if (part.n_tokens == 1) {
      metrics_.first_token(seconds_between(setup_.received, now));
      c.first = now;
    } else {
      metrics_.next_token(seconds_between(c.last, now));
    }
    c.last = now;
  }
  if (!part.finish) return;
  const bool ran = c.started != Clock::time_point(), answered = c.n_tokens > 0;
  metrics_.finished({.reason = *part.finish,
                     .prompt_tokens = static_cast<int>(setup_.prompts[c.prompt].size()),
                     .generated_tokens = c.n_tokens,
                     .queue_seconds = ran ? seconds_between(setup_.received, c.started) : 0,
                     .prefill_seconds = answered ? seconds_between(c.started, c.first) : 0,
                     .decode_seconds = answered ? seconds_between(c.first, c.last) : 0,
                     .total_seconds = seconds_between(setup_.received, now)});
}

ChoicePart Generation::make_part(Choice& c, const AnswerPart& part) {
  ChoicePart piece;
  piece.index = c.all.index;
  piece.wants_logprobs = c.all.wants_logprobs;
  piece.text_offset = c.all.text_offset;
  piece.finish = part.finish;
  if (setup_.splits_reasoning) {
    ReasoningSplitter::Parts split = c.reasoning.push(part.text);
    piece.reasoning = std::move(split.reasoning);
    piece.text = std::move(split.content);
    if (part.finish) {
      split = c.reasoning.flush();
      piece.reasoning += split.reasoning;
      piece.text += split.content;
    }
  } else {
    piece.text = part.text;
  }
  if (setup_.parses_tool_calls) parse_tool_calls(c, piece);
  if (c.all.wants_logprobs) add_reports(c, *part.event, piece);
  for (const TokenReport& report : piece.tokens) c.all.text_offset += report.n_shown;
  if (setup_.request.echo && !c.begun)
    piece.text = tokenizer_.decode(setup_.prompts[c.prompt], true) + piece.text;
  return piece;
}

// Adds the reports of the prompt's tokens, if it is echoed, and of the new token.
void Generation::add_reports(const Choice& c, const TokenEvent& event, ChoicePart& piece) const {
  if (setup_.request.echo && !c.begun) {
    piece.tokens.push_back(report_of(setup_.prompts[c.prompt].front(), {}, {}, true));
    for (const ScoredToken& t : event.prompt)
      piece.tokens.push_back(report_of(t.token, t.logprob, t.top, true));
  }
  if (event.token)
    piece.tokens.push_back(
        report_of(*event.token, event.logprob, event.top, setup_.request.skip_special));
}

void Generation::parse_tool_calls(Choice& c, ChoicePart& piece) const {
  ToolCallParser::Parts parts = c.tools.push(piece.text);
  if (piece.finish) {
    ToolCallParser::Parts rest = c.tools.flush();
    parts.content += rest.content;
    for (ToolCall& call : rest.calls) parts.calls.push_back(std::move(call));
  }
  piece.text = std::move(parts.content);
  piece.calls = std::move(parts.calls);
  piece.first_call = c.n_calls;
  for (ToolCall& call : piece.calls) {
    if (call.id.empty())
      call.id = fmt::format("call_{}_{}_{}", setup_.info.id, piece.index, c.n_calls);
    ++c.n_calls;
  }
  piece.has_tool_calls = c.n_calls > 0;
}

// A chunk without text is sent only if it contains other content: clients of /v1/completions
// measure the time of tokens by chunks with text, and read usage only from those.
void Generation::stream_part(Choice& c, const ChoicePart& piece) {
  const GenerationRequest& r = setup_.request;
  std::string out;
  if (!std::exchange(c.begun, true) && r.endpoint == Endpoint::kChat)
    out += sse_event(role_chunk_json(setup_.info, piece.index));
  const bool has_content = !piece.text.empty() || !piece.reasoning.empty() ||
                           !piece.calls.empty() || !piece.tokens.empty() ||
                           piece.finish.has_value();
  if (r.endpoint == Endpoint::kGenerate) {
    c.all.text += piece.text;
    c.all.finish = piece.finish;
    if (has_content) out += sse_event(generate_json(setup_.info, c.all, usage()));
  } else if (has_content) {
    const bool in_all =
        r.continuous_usage || (!r.include_usage && r.endpoint == Endpoint::kCompletions);
    const bool in_last = !r.include_usage && piece.finish;
    std::optional<Usage> shown;
    if (in_all || in_last) shown = usage();
    out += sse_event(chunk_json(setup_.info, piece, shown));
  }
  if (!out.empty()) send_events(std::move(out));
}

void Generation::send_events(std::string events) {
  sent_events_ = true;
  send_({.status = 200, .bytes = std::move(events)});
}

void Generation::accumulate(Choice& c, ChoicePart piece) {
  c.begun = true;
  c.all.text += piece.text;
  c.all.reasoning += piece.reasoning;
  c.all.finish = piece.finish;
  c.all.has_tool_calls = piece.has_tool_calls;
  for (ToolCall& call : piece.calls) c.all.calls.push_back(std::move(call));
  for (TokenReport& token : piece.tokens) c.all.tokens.push_back(std::move(token));
}

void Generation::finish() {
  Output out{.status = 200, .bytes = {}, .last = true, .is_complete_body = !streams()};
  if (streams()) {
    if (setup_.request.include_usage) out.bytes = sse_event(usage_chunk_json(setup_.info, usage()));
    out.bytes += kDoneEvent;
  } else if (setup_.request.endpoint == Endpoint::kGenerate) {
    out.bytes = dump_json(generate_json(setup_.info, choices_.front().all, usage()));
  } else {
    std::vector<ChoicePart> all;
    for (Choice& c : choices_) {
      c.all.text_offset = 0;
      all.push_back(std::move(c.all));
    }
    out.bytes = dump_json(answer_json(setup_.info, all, usage()));
    choices_.front().all.finish = all.front().finish;
  }
  log_finished(choices_.front().all.finish.value_or(FinishReason::kStop));
  send_(std::move(out));
}

// Ends all answers of the request with an error.
void Generation::fail(FinishReason reason, const ApiError& error) {
  cancel();
  Output out{.status = 200, .bytes = {}, .last = true};
  if (sent_events_) {
    out.aborts_stream = true;
    out.bytes = sse_event(error_json(error));
  } else {
    out.is_complete_body = true;
    out.status = error.status;
    out.bytes = dump_json(error_json(error));
  }
  log_finished(reason);
  send_(std::move(out));
}

void Generation::log_finished(FinishReason reason) {
  closed_ = true;
  const Usage u = usage();
  const Choice& c = choices_.front();
  const auto now = Clock::now();
  log_(fmt::format("{} prompt={} cached={} generated={} answers={} first={:.3f}s total={:.3f}s {}",
                   setup_.info.id, u.prompt_tokens, u.cached_tokens, u.completion_tokens,
                   choices_.size(), c.n_tokens > 0 ? seconds_between(setup_.received, c.first) : 0,
                   seconds_between(setup_.received, now), finish_reason_name(reason)));
}

TokenReport Generation::report_of(int32_t token, std::optional<float> logprob,
                                  const std::vector<TokenLogprob>& top, bool skips_special) const {
  TokenReport report{.chosen = token_text(token, logprob), .top = {}};
  for (const TokenLogprob& t : top) report.top.push_back(token_text(t.token, t.logprob));
  report.n_shown = count_code_points(tokenizer_.decode({&token, 1}, skips_special));
  return report;
}

TokenText Generation::token_text(int32_t token, std::optional<float> logprob) const {
  constexpr float kMinLogprob = -9999;  // as in vLLM, since JSON has no infinity
  if (logprob) logprob = std::max(*logprob, kMinLogprob);
  return {tokenizer_.decode({&token, 1}), std::string(tokenizer_.bytes_of(token)), logprob};
}

// Counts each prompt once, however many answers it has.
Usage Generation::usage() const {
  Usage usage;
  for (const auto& prompt : setup_.prompts) usage.prompt_tokens += static_cast<int>(prompt.size());
  for (size_t i = 0; i < choices_.size(); ++i) {
    usage.completion_tokens += choices_[i].n_tokens;
    usage.accepted_drafts += choices_[i].accepted_drafts;
    usage.rejected_drafts += choices_[i].rejected_drafts;
    if (i % static_cast<size_t>(setup_.request.n) == 0)
      usage.cached_tokens += choices_[i].cached_tokens;
  }
  return usage;
}

}  // namespace tandem
