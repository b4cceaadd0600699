"""How a prompt is answered."""
import dataclasses
import random
from ctypes import c_char_p, c_int32, sizeof
from typing import Dict, List, Optional, Union

from tandem._library import Bias, Request, c_array


@dataclasses.dataclass
class SamplingParams:
    """Names, meanings and defaults are vLLM's. `max_tokens=None` is the rest of the context."""
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Optional[int] = None
    stop: Union[None, str, List[str]] = None
    stop_token_ids: Optional[List[int]] = None
    ignore_eos: bool = False
    max_tokens: Optional[int] = 16
    min_tokens: int = 0
    logprobs: Optional[int] = None
    logit_bias: Optional[Dict[int, float]] = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self):
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.n < 1:
            raise ValueError(f"n {self.n}: must be 1 or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens}: must be 1 or more, or None")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty {self.repetition_penalty}: must be above 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be above 0 and at most 1")

    def requests(self, default_seed=None):
        """n requests without a prompt. Answers differ by their seeds, as in `tandem serve`."""
        seed = self.seed if self.seed is not None else default_seed
        seed = random.getrandbits(63) if seed is None else seed
        return [self._request((seed + i) % 2**64) for i in range(self.n)]

    def _request(self, seed):
        request = Request(size=sizeof(Request), max_tokens=self.max_tokens or 0, min_tokens=self.min_tokens,
                          temperature=self.temperature, top_p=self.top_p, top_k=max(self.top_k, 0), min_p=self.min_p,
                          repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty,
                          frequency_penalty=self.frequency_penalty, seed=seed, ignore_eos=self.ignore_eos,
                          keep_special=not self.skip_special_tokens, include_stop=self.include_stop_str_in_output,
                          want_logprobs=self.logprobs is not None, n_top_logprobs=self.logprobs or 0)
        # The structure keeps the arrays alive.
        request.stops, request.n_stops = c_array(c_char_p, (s.encode() for s in self.stop or []))
        request.stop_tokens, request.n_stop_tokens = c_array(c_int32, self.stop_token_ids or [])
        request.biases, request.n_biases = c_array(Bias, (Bias(int(t), b) for t, b in (self.logit_bias or {}).items()))
        return request
