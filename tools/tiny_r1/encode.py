"""Samples to token ids: the chat template, the tokenizer, and right-padded batches of similar lengths."""

import json
from pathlib import Path

import jinja2
import tokenizers
import torch

from tools.tiny_r1 import data


class Encoder:
    def __init__(self, model_dir):
        self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
        config = json.loads((Path(model_dir) / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.bos, self.eos = config["bos_token"]["content"], config["eos_token"]["content"]
        self.eos_id = self.tokenizer.token_to_id(self.eos)
        self.template = jinja2.Environment().from_string(config["chat_template"])

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, messages):
        text = self.template.render(messages=messages, bos_token=self.bos, add_generation_prompt=True)
        return self.ids(text)

    def completion(self, text):
        return self.ids(text) + [self.eos_id]

    def sample(self, sample):
        """Returns (prompt ids, completion ids). Encoded apart: <think> and the newline after it end the prompt."""
        return self.prompt(sample.messages), self.completion(sample.completion)


def make_batch(pairs):
    """pairs of (prompt ids, completion ids) -> ids [batch, time], lengths [batch], first completion position [batch]."""
    lengths = torch.tensor([len(p) + len(c) for p, c in pairs])
    ids = torch.zeros(len(pairs), int(lengths.max()), dtype=torch.long)
    for row, (prompt, completion) in zip(ids, pairs):
        row[: len(prompt) + len(completion)] = torch.tensor(prompt + completion)
    return ids, lengths, torch.tensor([len(p) for p, _ in pairs])


def draw_batches(encoder, rng, max_digits, batch_tokens, n_batches=16):
    """About n_batches batches of at most batch_tokens padded tokens, each of samples of similar length, in random order."""
    pool, total = [], 0
    while total < n_batches * batch_tokens:
        pool.append(encoder.sample(data.draw_sample(rng, max_digits)))
        total += len(pool[-1][0]) + len(pool[-1][1])
    pool.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    batches, current = [], []
    for pair in pool:
        if current and (len(current) + 1) * (len(pair[0]) + len(pair[1])) > batch_tokens:
            batches.append(current)
            current = []
        current.append(pair)
    if current:
        batches.append(current)
    rng.shuffle(batches)
    return [make_batch(b) for b in batches]
