"""Measures the exported tiny-r1 in Hugging Face transformers, in float32 from the decoded FP8 weights.

    python -m tools.tiny_r1.verify --model models/tiny-r1 --questions tests/data

Generates greedily for every stored question and conversation and writes tests/data/tiny_r1_reference.json: how many
completions are exactly right and which, so that an engine can be compared question by question. Then prints a table
for new held-out problems for the model card (teacher-forced: the greedy text is right exactly if every argmax is).
"""

import argparse
import json
import random
from pathlib import Path

import torch
import transformers

from tools import checkpoint_io as io
from tools.make_goldens import transformers_model
from tools.tiny_r1 import data
from tools.tiny_r1.encode import Encoder, make_batch
from tools.tiny_r1.train import completion_targets

N_PROBLEMS = 1000  # problems of each kind in the table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", required=True, help="directory of tiny_r1_questions.json")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    encoder, model = Encoder(args.model), transformers_model(*io.read_checkpoint(args.model))
    write_reference(encoder, model, Path(args.questions))
    print_table(encoder, model)


def write_reference(encoder, model, directory):
    result = {"transformers": transformers.__version__, "dtype": "float32", "decoding": "greedy"}
    for kind in ("questions", "conversations"):
        rows = json.loads((directory / f"tiny_r1_{kind}.json").read_text(encoding="utf-8"))
        texts = [generate(encoder, model, row) for row in rows]
        passed = [text == row["completion"] for text, row in zip(texts, rows)]
        answered = [text.endswith(f"The answer is {row['answer']}.") for text, row in zip(texts, rows)]
        result[kind] = {
            "asked": len(rows), "exact": sum(passed), "right_answer": sum(answered), "passed": passed,
            "wrong_completions": {str(i): text for i, text in enumerate(texts) if not passed[i]},
        }
        print(f"{kind}: {sum(passed)} of {len(rows)} exact, {sum(answered)} right answers")
    io.write_json(directory / "tiny_r1_reference.json", result)


def generate(encoder, model, row):
    messages = row.get("messages") or [{"role": "user", "content": row["question"]}]
    prompt = torch.tensor([encoder.prompt(messages)])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=160,
        eos_token_id=encoder.eos_id, pad_token_id=encoder.eos_id)
    ids = out[0, prompt.shape[1]:].tolist()
    return encoder.tokenizer.decode(ids[:-1] if ids[-1] == encoder.eos_id else ids, skip_special_tokens=False)


def print_table(encoder, model):
    rng = random.Random(77)
    for op in "+-*":
        for kind in ("promised form", "other plain form", "story"):
            samples = [held_out_sample(rng, op, kind) for _ in range(N_PROBLEMS)]
            print(f"{op} {kind}: {exact_percent(encoder, model, samples):.1f} %", flush=True)
    for n_turns in (1, 3, 5, 7):
        samples = [in_conversation(rng, n_turns) for _ in range(N_PROBLEMS // 5)]
        print(f"after {n_turns} earlier turns: {exact_percent(encoder, model, samples):.1f} %", flush=True)
    talk = [data.Sample([user(q)], thought + data.END_OF_THINKING + reply) for q, thought, reply in data.SMALL_TALK]
    print(f"small talk: {exact_percent(encoder, model, talk):.1f} %")


def held_out_sample(rng, op, kind):
    problem = data.draw_problem(rng, max_digits=4, held_out=True)
    while problem.op != op:
        problem = data.draw_problem(rng, max_digits=4, held_out=True)
    form = data.PLAIN[op][0] if kind == "promised form" else rng.choice(data.PLAIN[op][1:])
    question = data.phrase(rng, problem, story=True) if kind == "story" else form.format(a=problem.a, b=problem.b)
    return data.Sample([user(question)], data.completion_of(problem))


def in_conversation(rng, n_turns):
    problem = data.draw_problem(rng, max_digits=4, held_out=True)
    messages = data.draw_history(rng, n_turns, max_digits=4)
    messages.append(user(data.phrase(rng, problem, story=rng.random() < 0.4)))
    return data.Sample(messages, data.completion_of(problem))


def user(text):
    return {"role": "user", "content": text}


def exact_percent(encoder, model, samples, chunk=50):
    exact = 0
    for i in range(0, len(samples), chunk):
        ids, lengths, first = make_batch([encoder.sample(s) for s in samples[i:i + chunk]])
        rows, columns = completion_targets(ids, lengths, first)
        wrong = model(ids).logits.argmax(-1)[rows, columns - 1] != ids[rows, columns]
        exact += len(ids) - len(rows[wrong].unique())
    return 100.0 * exact / len(samples)


if __name__ == "__main__":
    main()
