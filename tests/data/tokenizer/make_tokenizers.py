#!/usr/bin/env python3
"""Makes the small tokenizers of this folder and the ids that they must give according to independent libraries.

    pip install tokenizers==0.23.3 tiktoken==0.14.0
    python3 make_tokenizers.py

Writes v3/, v2/, pairs/ (tokenizer.json in the form of DeepSeek-V3's, DeepSeek-V2's, and V3's with merges as pairs and
ignore_merges) and kimi/ (tiktoken.model), each with tokenizer_config.json and vectors.json: a list of {"text", "ids",
"literal_ids" (added tokens taken as plain text), "decoded", "decoded_without_special"}.
"""
import argparse
import base64
import json
import random
from pathlib import Path

import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent

V3_SPLITS = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
# The letters of the second pattern are a few of the official ranges; the constructs are the same.
V2_SPLITS = [
    "[\r\n]",
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖＡ-Ｚａ-ｚ𐐀-𐑏]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    "\\s+$",
    "[一-龥ࠀ-一가-\\uD7FF]+",
]
KIMI_PATTERN = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])
NEVER_IN_UTF8 = [0xC0, 0xC1, *range(0xF5, 0x100)]

CORPUS = """
A tokenizer cuts text into pieces and gives each piece a number. The pieces that occur often are long, the rare ones
are short, and whatever was never seen falls apart into single bytes. So nothing is ever lost: the text can always be
put together again from the numbers. Don't we all like that? It's what we've got, and we'll keep it; they're happy.
The train leaves at 10:45 and arrives at 12:30. There are 365 days in a year, 1,024 bytes in a kibibyte.
int main(int argc, char** argv) { for (int i = 0; i < argc; ++i) std::printf("%s\\n", argv[i]); return 0; }
def encode(text): return [vocabulary[piece] for piece in split(text) if piece in vocabulary]
    if (value == nullptr) { throw std::runtime_error("value is missing"); }
\tindent with a tab, and  two  spaces   or three.
分词器把文本切成小块，并给每一块一个编号。常见的块比较长，少见的块比较短。没有见过的内容会变成单个字节。
这是一个测试，那也是一个测试。我们在中国学习，他们在日本工作。人工智能的模型需要大量的文本。
これはテストです。テキストを小さな部分に分けて、それぞれに番号を付けます。カタカナとひらがな。
이것은 시험입니다. 글을 작은 조각으로 나누고 번호를 붙입니다.
Это проверка. Текст делится на части, и каждая часть получает номер. Größe, Straße, élève, naïve, señor.
Ο διαιρέτης κόβει το κείμενο. هذا اختبار للنص. यह एक परीक्षण है। 😀🌍🚀 ½ ① ٣
"""


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    corpus = [line + "\n" for line in CORPUS.split("\n")] * 4
    texts = make_texts(random.Random(20240607), 260)
    alphabet = [c for _, c in sorted(byte_characters().items(), key=lambda item: item[1])]

    specials = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
    v3 = train(corpus, V3_SPLITS, alphabet, specials, 400)
    first = max(v3["model"]["vocab"].values()) + 1
    tail = ["<think>", "</think>", "<｜fim▁hole｜>", "<｜User｜>", "<｜Assistant｜>", "<|EOT|>", "<｜tool▁sep｜>"]
    v3["added_tokens"] += [added(first + i, text, special=text == "<|EOT|>", normalized=True)
                           for i, text in enumerate(tail)]
    write(HERE / "v3", v3, config(specials), texts)

    pairs = train(corpus, V3_SPLITS, alphabet, specials, 120)
    pairs["model"]["merges"] = [merge.split(" ") for merge in pairs["model"]["merges"]]
    pairs["model"]["ignore_merges"] = True
    vocab = pairs["model"]["vocab"]
    for word in ["Ġtokenizer", "æµ", "vocabulary", "測試"]:  # tokens that no merge gives
        mapped = word if all(c in alphabet for c in word) else "".join(byte_characters()[b] for b in word.encode())
        vocab.setdefault(mapped, len(vocab))
    pairs["added_tokens"] += [added(len(vocab), "<｜User｜>"), added(len(vocab) + 1, "<｜User｜><", special=True)]
    write(HERE / "pairs", pairs, config(specials), texts)

    in_utf8 = [c for c in alphabet if c not in {byte_characters()[b] for b in NEVER_IN_UTF8}]
    v2 = train(corpus, V2_SPLITS, in_utf8, [], 300, digits=True)
    first = max(v2["model"]["vocab"].values()) + 1
    v2_specials = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
    v2["added_tokens"] = [added(first + i, text, special=True) for i, text in enumerate(v2_specials)]
    v2["added_tokens"] += [added(first + 2 + i, text, normalized=True) for i, text in enumerate("øöúÿõ÷ûýÀùÁþü")]
    write(HERE / "v2", v2, config(v2_specials), texts)

    kimi = train(corpus, [KIMI_PATTERN], alphabet, [], 300)
    write_kimi(HERE / "kimi", kimi["model"]["vocab"], texts)


def byte_characters():
    """The character that represents each byte in byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def train(corpus, splits, alphabet, specials, n_merges, digits=False):
    """The tokenizer.json of a byte-level BPE trained on `corpus`, as an object."""
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits]
    if digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=len(specials) + len(alphabet) + n_merges, special_tokens=specials, initial_alphabet=alphabet,
        show_progress=False))
    file = json.loads(tokenizer.to_str())
    file["normalizer"] = {"type": "Sequence", "normalizers": []}
    file["model"]["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in file["model"]["merges"]]
    return file


def added(token_id, content, special=False, normalized=False):
    return {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": normalized, "special": special}


def config(specials):
    return {"add_bos_token": True, "add_eos_token": False,
            "bos_token": {"__type": "AddedToken", "content": specials[0]}, "eos_token": specials[1],
            "pad_token": specials[1], "unk_token": None, "tokenizer_class": "LlamaTokenizerFast"}


def write(folder, file, tokenizer_config, texts):
    folder.mkdir(exist_ok=True)
    dump(folder / "tokenizer.json", file)
    dump(folder / "tokenizer_config.json", tokenizer_config)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    literal = Tokenizer.from_str(json.dumps(file | {"added_tokens": []}))
    vectors = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        vectors.append({"text": text, "ids": ids, "literal_ids": literal.encode(text, add_special_tokens=False).ids,
                        "decoded": decoded(tokenizer, file, ids, False),
                        "decoded_without_special": decoded(tokenizer, file, ids, True)})
    dump_lines(folder / "vectors.json", vectors)


def decoded(tokenizer, file, ids, skip_special):
    """Decodes as the tokenizers library does, except for added tokens such as "ü", whose text that library takes for
    byte-level characters.
    """
    alphabet = set(byte_characters().values())
    latin = {t["id"]: t["content"] for t in file["added_tokens"] if len(t["content"]) == 1 and t["content"] in alphabet}
    if not latin.keys() & set(ids):
        return tokenizer.decode(ids, skip_special_tokens=skip_special)
    special = {t["id"] for t in file["added_tokens"] if t["special"]}
    characters = {c: b for b, c in byte_characters().items()}
    text = b""
    for i in ids:
        if i in latin:
            text += latin[i].encode()
        elif not (skip_special and i in special):
            token = tokenizer.id_to_token(i)
            known = all(c in characters for c in token)
            text += bytes(characters[c] for c in token) if known else token.encode()
    return text.decode(errors="replace")


def write_kimi(folder, vocab, texts):
    folder.mkdir(exist_ok=True)
    characters = {c: b for b, c in byte_characters().items()}
    ranks = {bytes(characters[c] for c in token): i for token, i in vocab.items()}
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    random.Random(7).shuffle(lines)
    (folder / "tiktoken.model").write_text("".join(lines))
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 9: "[EOT]",
             10: "<|im_system|>", 17: "<|im_middle|>", 254: "[UNK]", 255: "[PAD]"}
    named = {len(ranks) + i: name for i, name in names.items()}
    reserved = range(len(ranks), len(ranks) + 256)
    special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in reserved}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    dump(folder / "tokenizer_config.json", {
        "added_tokens_decoder": {str(i): {"content": name} | flags for i, name in named.items()},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer"})
    encoding = tiktoken.Encoding("kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    vectors = []
    for text in texts + ["<|im_user|>user<|im_middle|>Hi<|im_end|>", f"[EOS]<|reserved_token_{len(ranks) + 30}|>[BOS"]:
        ids = encoding.encode(text, allowed_special="all")
        vectors.append({"text": text, "ids": ids, "literal_ids": encoding.encode_ordinary(text),
                        "decoded": encoding.decode(ids),
                        "decoded_without_special": encoding.decode([i for i in ids if i < len(ranks)])})
    dump_lines(folder / "vectors.json", vectors)


POOLS = [
    [chr(c) for c in range(32, 127)], list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"), list("    \n\t") + ["\r\n"],
    list(" \t\n\r\x0b\x0c\x85\xa0\u1680\u180e\u2000\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"), list("0123456789½①٣Ⅳ²०𝟘〇㊀"),
    list("的一是不了在有人这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后么"),
    list("㐀㑇𠀀𪛖龥龦豈﨎々〆ヶ、。「」・ー"), list("これはテストですカタカナひらがなーゝヾ゛゠ヿ"), list("이것은시험입니다각힣가"), list("😀🌍🦙👩🏽❤️🇩🇪👨‍👩‍👧✨☃"),
    [chr(c) for c in range(0x300, 0x310)] + ["\u20dd", "\u0903", "\u093e"], list("ЭтопроверкаЁёїҖ"), list("Οδιαιρέτηςκόβει"),
    list("هذااختبارللنص٣ًّ"), list("यहएकपरीक्षणहै"), list("กขฃคฅฆงั้า"), [chr(c) for c in range(32)] + ["\x7f", "\x80", "\x9f", "\u200d", "\ufffd", "\u00ad", "\ue000"],
    list("「」、。，！？：；（）“”‘’—…·《》!?.,;:'\"-_/\\@#$%^&*()[]{}<>|~`+=¡¿€£©™±×÷"), list("ÀÁÂÄßàáâäçèéêëñöøùúûüýþÿĀŁœƒǅǆſªºµ"),
]
WORDS = ["don't", "I'll", "WE'VE", "IT'S", "'ſ", "hello", "World", "tokenizer", " tokenizer", "vocabulary", "測試", "return", "std::vector<int>",
         "#include", "foo_bar", "HTTPServer", "http://a.b/c?d=1", "3.14", "1,000,000", "0x1F", " the", " of", "\n\n", "    ", " \n ",
         "<|EOT|>", "<think>", "</think>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
         "<｜fim▁hole｜", "<｜tool▁sep｜>", "<", "<｜", "Führer", "分词器", "我们在中国", "テキスト", "проверка", "  two  "]


def make_texts(rng, n):
    texts = ["", " ", "\n", "Hello!", "x  1", "a\n\n\nb", "trailing   ", "   leading", "\u3000全角", "e\u0301",
             " " * 40 + "x", "a" * 200, "的" * 60, "<｜User｜><｜User｜>", "\x00", "1234567890", "<｜User｜><think>"]
    for i in range(n):
        parts = []
        pools = POOLS if i % 2 else rng.sample(POOLS, 3)
        for _ in range(rng.randint(1, 7)):
            pool = rng.choice(pools)
            parts += [rng.choice(pool) for _ in range(rng.randint(1, 5))]
            if rng.random() < 0.4:
                parts.append(rng.choice(WORDS))
        texts.append("".join(parts))
    return texts


def dump(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def dump_lines(path, values):
    lines = ",\n".join(json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values)
    path.write_text("[\n" + lines + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
