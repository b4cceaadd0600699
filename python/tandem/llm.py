"""A model in this process."""
import json
import os
import queue
import sys
import threading
import weakref
from ctypes import byref, c_int32, c_void_p, sizeof, string_at

from tandem import _library
from tandem._library import Hooks, Options, Request, c_array, library, require_ok
from tandem.outputs import CompletionOutput, Logprob, RequestOutput
from tandem.sampling_params import SamplingParams

_FINISH = {_library.STOP: "stop", _library.LENGTH: "length", _library.CANCELLED: "cancelled"}


def _encoded(text):
    return None if text is None else os.fsencode(text)


class LLM:
    """Loads a checkpoint: a folder as on Hugging Face, or None for the small model of the package.

    The parameters after `model` have vLLM's names where vLLM has them:
    device                  "cpu", "cuda", or "auto": the GPU if it takes the model
    max_model_len           tokens of a prompt with its answer; default: the model's, at most 8192
    max_num_seqs            answers computed at a time
    max_num_batched_tokens  tokens per step
    kv_tokens               tokens of KV cache for all answers; default: as gpu_memory_utilization allows
    gpu_memory_utilization  fraction of the memory left after loading, on the GPU or the CPU, for the KV cache
    enable_prefix_caching   keep the KV cache of prompts
    allow_async_output_proc tokens become text while the next step is computed
    experts                 "fp8", "bf16", "int8" or "int4": format of the routed experts; default: as stored
    placement               a file that `tandem plan --out` wrote
    cache                   folder of the packed cache
    threads                 one is pinned to each core; default: all cores
    num_speculative_tokens  most tokens drafted per step, at most 8; 0: 4
    draft                   "mtp": by the model's layer for multi-token prediction, "lookup": from what the text has
                            had before, "auto" (default): by either, as many as are measured to pay, "off"
    seed                    of sampling parameters without one; None: another one each time
    tensor_parallel_size    1
    trust_remote_code       has no effect: code of a checkpoint is never run
    on_warning              called with a line of text; default: it is written to standard error

    Raises ValueError for what the caller can correct, and TandemError for other failures. A `with` statement
    or close() frees the model before the object is collected.
    """

    def __init__(self, model=None, *, device="cpu", max_model_len=None, max_num_seqs=None,
                 max_num_batched_tokens=None, kv_tokens=None, gpu_memory_utilization=None,
                 enable_prefix_caching=True, allow_async_output_proc=True, experts=None, placement=None, cache=None,
                 threads=0, num_speculative_tokens=0, draft=None, seed=None, tensor_parallel_size=1, trust_remote_code=False,
                 on_warning=None):
        if tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size {tensor_parallel_size}: a model runs on one GPU and the CPU")
        self._seed = seed
        warn = on_warning or (lambda line: print("warning: " + line, file=sys.stderr))
        self._on_warning = _library.ON_WARNING(lambda _, line: warn(line.decode(errors="replace")))
        options = Options(size=sizeof(Options), device=device.encode(), threads=threads, context=max_model_len or 0,
                          max_running=max_num_seqs or 0, step_tokens=max_num_batched_tokens or 0,
                          kv_tokens=kv_tokens or 0, kv_fraction=gpu_memory_utilization or 0,
                          experts=_encoded(experts), placement=_encoded(placement), cache=_encoded(cache),
                          no_prefix_cache=not enable_prefix_caching, draft_tokens=num_speculative_tokens,
                          draft=_encoded(draft),
                          no_async_output=not allow_async_output_proc, on_warning=self._on_warning)
        self._model = c_void_p()
        require_ok(library.tandem_open(_encoded(model), byref(options), byref(self._model)))
        self._close = weakref.finalize(self, library.tandem_close, self._model)

    def generate(self, prompts, sampling_params=None, use_tqdm=True):
        """Answers the prompts together: texts, {"prompt": text} or {"prompt_token_ids": ids}; one or a list.

        sampling_params: one for all, or a list with one for each. Returns a RequestOutput for each prompt, in
        their order. use_tqdm: show on a terminal how many answers have ended.
        """
        return self._answer(_as_list(prompts), sampling_params, use_tqdm)

    def chat(self, messages, sampling_params=None, use_tqdm=True):
        """Like generate() for conversations: a list of messages, or a list of such lists."""
        several = bool(messages) and isinstance(messages[0], (list, tuple))
        conversations = [{"messages": list(m)} for m in (messages if several else [messages])]
        return self._answer(conversations, sampling_params, use_tqdm)

    def stream(self, prompt, sampling_params=None):
        """Yields the text of one answer as it is generated. A list of messages is a conversation.

        The answer is cancelled when the generator is closed.
        """
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"n {params.n}: a stream has one answer")
        if isinstance(prompt, (list, tuple)):
            prompt = {"messages": list(prompt)}
        request = params.requests(self._seed)[0]
        _set_prompt(request, prompt)
        texts = queue.SimpleQueue()

        def on_token(token):
            texts.put(string_at(token.text, token.text_bytes).decode())

        call = _Call(self._open_model(), [request], on_token, on_end=lambda: texts.put(None))
        with call:
            while (text := texts.get()) is not None:
                if text:
                    yield text
        call.require_success()

    def tokenize(self, prompt):
        """Token ids of a prompt as generate() takes it, or of a list of messages."""
        request = Request(size=sizeof(Request))
        _set_prompt(request, {"messages": prompt} if isinstance(prompt, list) else prompt)
        return self._tokens_of(request)

    def describe(self):
        """A dictionary: model, context, vocabulary, device, isa, threads, load_seconds."""
        return json.loads(library.tandem_describe(self._open_model()))

    def close(self):
        self._close()
        self._model = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _open_model(self):
        if self._model is None:
            raise ValueError("the model is closed")
        return self._model

    def _tokens_of(self, request):
        n = library.tandem_count_tokens(self._open_model(), byref(request), None, 0)
        if n < 0:
            raise ValueError(_library.last_error())
        ids = (c_int32 * n)()
        library.tandem_count_tokens(self._open_model(), byref(request), ids, n)
        return list(ids)

    def _answer(self, prompts, sampling_params, shows_progress):
        params = sampling_params if isinstance(sampling_params, (list, tuple)) else [sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(params)} sampling_params: give one, or one for each")
        requests, answers, outputs = [], [], []
        for i, (prompt, param) in enumerate(zip(prompts, params)):
            param = param or SamplingParams()
            ours = param.requests(self._seed)
            for request in ours:
                _set_prompt(request, prompt)
            counts_logprobs = param.logprobs is not None
            choices = [CompletionOutput(index=j, logprobs=[] if counts_logprobs else None,
                                        cumulative_logprob=0.0 if counts_logprobs else None) for j in range(param.n)]
            shown = prompt if isinstance(prompt, str) else prompt.get("prompt", prompt.get("messages"))
            outputs.append(RequestOutput(str(i), shown, self._tokens_of(ours[0]), choices))
            requests += ours
            answers += [(outputs[-1], choice) for choice in choices]
        progress = _Progress(len(answers), shows_progress)

        def on_token(token):
            output, choice = answers[token.index]
            _append(choice, token)
            if choice.index == 0:
                output.num_cached_tokens = token.cached_tokens
            if token.finish:
                output.finished = all(c.finished() for c in output.outputs)
                progress.ended()

        call = _Call(self._open_model(), requests, on_token)
        with call:
            call.wait()
        call.require_success()
        return outputs


class _Call:
    """A call of tandem_generate on a thread of its own, so that a signal can interrupt the caller at any point.

    Calls on_token there for each token, and on_end. Leaving a `with` statement ends all answers.
    """

    def __init__(self, model, requests, on_token, on_end=lambda: None):
        self._cancelled = False
        self._error = None  # what on_token or the call raised
        self._thread = threading.Thread(target=self._run, args=(model, requests, on_token, on_end), daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._cancelled = True
        self._thread.join()

    def wait(self):
        self._thread.join()

    def require_success(self):
        if self._error is not None:
            raise self._error

    def _run(self, model, requests, on_token, on_end):
        def take(_, token):
            try:
                if not self._cancelled:
                    on_token(token.contents)
            except BaseException as error:
                self._error, self._cancelled = error, True
            return int(self._cancelled)

        hooks = Hooks(on_token=_library.ON_TOKEN(take), cancelled=_library.CANCELLED_HOOK(lambda _: self._cancelled))
        array, n = c_array(Request, requests)
        try:
            require_ok(library.tandem_generate(model, array, n, byref(hooks)))
        except (ValueError, _library.TandemError) as error:
            self._error = self._error or error
        on_end()


def _as_list(prompts):
    return [prompts] if isinstance(prompts, (str, dict)) else list(prompts)


def _set_prompt(request, prompt):
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if not isinstance(prompt, dict):
        raise ValueError(f"a prompt is a text or a dictionary, not {type(prompt).__name__}")
    if "prompt_token_ids" in prompt:
        request.tokens, request.n_tokens = c_array(c_int32, prompt["prompt_token_ids"])
    elif "messages" in prompt:
        request.messages = json.dumps(prompt["messages"]).encode()
    elif "prompt" in prompt:
        request.text = _text_bytes(prompt["prompt"])
    else:
        raise ValueError("a prompt has one of prompt, prompt_token_ids and messages")


def _text_bytes(text):
    if "\0" in text:
        raise ValueError("a prompt cannot contain the character U+0000")
    return text.encode()


def _append(choice, token):
    """Adds what a token brings to an answer."""
    choice.text += string_at(token.text, token.text_bytes).decode()
    if token.token >= 0:
        choice.token_ids.append(token.token)
        if choice.logprobs is not None:
            reported = {token.token: Logprob(token.logprob)}
            for rank in range(token.n_top):
                likely = token.top[rank]
                reported[likely.token] = Logprob(likely.logprob, rank + 1)
            choice.logprobs.append(reported)
            choice.cumulative_logprob += token.logprob
    choice.finish_reason = _FINISH.get(token.finish)


class _Progress:
    """A line on a terminal's standard error."""

    def __init__(self, total, is_wanted):
        self._total, self._done = total, 0
        self._shown = is_wanted and total > 1 and sys.stderr.isatty()

    def ended(self):
        self._done += 1
        if self._shown:
            end = "\n" if self._done == self._total else "\r"
            print(f"{self._done} of {self._total} answers", end=end, file=sys.stderr, flush=True)
