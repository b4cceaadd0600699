"""tandem runs DeepSeek-R1/V3 and its family. The classes have the names and the shape of vLLM's.

    from tandem import LLM, SamplingParams

    llm = LLM(model="./DeepSeek-R1")
    for output in llm.generate(["Once upon a time"], SamplingParams(temperature=0.6, max_tokens=200)):
        print(output.outputs[0].text)
"""
from tandem._library import TandemError, version
from tandem.llm import LLM
from tandem.outputs import CompletionOutput, Logprob, RequestOutput
from tandem.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "Logprob", "TandemError"]
__version__ = version()
