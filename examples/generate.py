"""Answers prompts together, a conversation, and one prompt as a stream.

    pip install .                        in the root of the repository
    python3 examples/generate.py [MODEL]
"""
import sys

from tandem import LLM, SamplingParams

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else None, allow_async_output_proc=True)

prompts = ["What is 478 + 356?", "What is 12 * 7?"]
greedy = SamplingParams(temperature=0, max_tokens=400)
for output in llm.chat([[{"role": "user", "content": p}] for p in prompts], greedy):
    print(f"{output.prompt[0]['content']} -> {output.outputs[0].text.splitlines()[-1]}")

params = SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=8, logprobs=1)
for output in llm.generate(["What is"], params):
    for answer in output.outputs:
        print(f"{answer.index}: {answer.text!r} ({answer.cumulative_logprob:.2f})")

for text in llm.stream([{"role": "user", "content": "What is 9 - 4?"}], greedy):
    print(text, end="", flush=True)
print()
