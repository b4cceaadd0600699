"""Builds the tokenizer files of tiny-r1: DeepSeek-V3's byte-level BPE pipeline with a vocabulary of 512.

    python -m tools.tiny_r1.tokenizer --base-tokenizer DIR/tokenizer.json --out models/tiny-r1

The base file is a DeepSeek-V3 tokenizer.json. Its normalizer, pre-tokenizer, post-processor and decoder are kept, its
vocabulary, merges and added tokens are replaced:
  0..2      the three special tokens
  3..258    the 256 byte symbols in the official order (increasing code point)
  259..494  236 merges, learnt from the task's text cut at every digit, so that each digit stays a token of its own
  495..511  <think>, </think>, then the official added tokens from fim_hole to tool_sep in their order
"""

import argparse
import json
import random
import re
from pathlib import Path

import tokenizers

from tools.tiny_r1 import data
from tools.tiny_r1.chat_template import CHAT_TEMPLATE

VOCAB_SIZE = 512
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
N_CORPUS_SAMPLES = 20000


def main():
    args = parse_args()
    base = json.loads(Path(args.base_tokenizer).read_text(encoding="utf-8"))
    tail = ["<think>", "</think>"] + named_added_tokens(base)
    first_added = VOCAB_SIZE - len(tail)

    vocab, merges = learn_merges(base, tail, first_added, args.seed)
    tokenizer = dict(base)
    tokenizer["model"] = dict(base["model"], vocab=vocab, merges=merges)
    tokenizer["added_tokens"] = [
        added_token(i, t, special=True, normalized=False) for i, t in enumerate([BOS, EOS, PAD])
    ] + [
        added_token(first_added + i, t, special=t == "<|EOT|>", normalized=True) for i, t in enumerate(tail)
    ]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "tokenizer.json", tokenizer)
    write_json(out / "tokenizer_config.json", tokenizer_config())


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-tokenizer", required=True, help="tokenizer.json of DeepSeek-V3 or R1")
    parser.add_argument("--out", required=True, help="directory that receives tokenizer.json and tokenizer_config.json")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def named_added_tokens(base):
    """The official added tokens from fim_hole on, in id order (the ones before are placeholders)."""
    tokens = [t["content"] for t in sorted(base["added_tokens"], key=lambda t: t["id"])]
    return tokens[tokens.index("<｜fim▁hole｜>"):]


def learn_merges(base, added, vocab_size, seed):
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.Tokenizer.from_str(json.dumps(base)).pre_tokenizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(corpus_pieces(added, seed), trainer)
    model = json.loads(trained.to_str())["model"]
    check_layout(model)
    return model["vocab"], [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]


def corpus_pieces(added, seed):
    """Task text cut where the real pipeline cuts it before BPE anyway: at added tokens and at digits."""
    rng = random.Random(seed)
    cut = re.compile("|".join([r"\d+"] + [re.escape(t) for t in added]))
    for _ in range(N_CORPUS_SAMPLES):
        sample = data.draw_sample(rng, max_digits=4)
        for text in [m["content"] for m in sample.messages] + [sample.completion]:
            yield from (piece for piece in cut.split(text) if piece)


def check_layout(model):
    symbols = [t for t, i in sorted(model["vocab"].items(), key=lambda item: item[1])]
    assert symbols[:3] == [BOS, EOS, PAD] and symbols[3:259] == sorted(symbols[3:259]), "unexpected id order"
    assert len(symbols) == 259 + len(model["merges"]), "every id from 259 on must be the result of one merge"


def added_token(token_id, content, special, normalized):
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=normalized)
    return dict(id=token_id, content=content, **flags, special=special)


def tokenizer_config():
    def token(content):
        flags = dict(lstrip=False, normalized=True, rstrip=False, single_word=False)
        return {"__type": "AddedToken", "content": content, **flags}

    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": token(BOS),
        "clean_up_tokenization_spaces": False,
        "eos_token": token(EOS),
        "legacy": True,
        "model_max_length": 16384,
        "pad_token": token(EOS),
        "sp_model_kwargs": {},
        "unk_token": None,
        "tokenizer_class": "LlamaTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
