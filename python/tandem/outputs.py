"""What LLM.generate returns: vLLM's classes, as far as their fields exist here."""
import dataclasses
from typing import Dict, List, Optional, Union


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: Optional[int] = None  # 1: the likeliest token; None: not among the reported ones


@dataclasses.dataclass
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: List[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: Optional[float] = None
    logprobs: Optional[List[Dict[int, Logprob]]] = None  # for each token of the answer
    finish_reason: Optional[str] = None  # "stop", "length", "cancelled"

    def finished(self):
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestOutput:
    request_id: str
    prompt: Union[None, str, list]  # text or messages; None where tokens were given
    prompt_token_ids: List[int]
    outputs: List[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = False
