"""Writes the held-out questions that tests ask tiny-r1: tests/data/tiny_r1_questions.json and tiny_r1_conversations.json.

    python -m tools.tiny_r1.questions --out tests/data

Single questions: [{"question", "answer", "completion"}], half plain, half stories, the promised forms included for each
operation. Conversations: [{"messages", "answer", "completion"}] with one to seven earlier turns, some with a system prompt.
`completion` is all the text the model should produce after the prompt, without the end-of-sentence token. Every final problem
is held out of training by data.is_held_out.
"""

import argparse
import random
from pathlib import Path

from tools.checkpoint_io import write_json
from tools.tiny_r1 import data

N_QUESTIONS, N_CONVERSATIONS = 240, 20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=2024)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "tiny_r1_questions.json", draw_questions(rng))
    write_json(out / "tiny_r1_conversations.json", draw_conversations(rng))


def draw_questions(rng):
    rows, asked = [], set()
    while len(rows) < N_QUESTIONS:
        problem = data.draw_problem(rng, max_digits=4, held_out=True)
        if problem not in asked:
            asked.add(problem)
            question = data.phrase(rng, problem, story=len(rows) % 2 == 1)
            rows.append({"question": question} | expectation(problem))
    return rows


def draw_conversations(rng):
    rows = []
    for i in range(N_CONVERSATIONS):
        messages = [{"role": "system", "content": rng.choice(data.SYSTEM_PROMPTS)}] if i % 4 == 0 else []
        messages += data.draw_history(rng, 1 + i % 7, max_digits=4)
        problem = data.draw_problem(rng, max_digits=4, held_out=True)
        messages.append({"role": "user", "content": data.phrase(rng, problem, story=i % 2 == 1)})
        rows.append({"messages": messages} | expectation(problem))
    return rows


def expectation(problem):
    return {"answer": str(problem.answer()), "completion": data.completion_of(problem)}


if __name__ == "__main__":
    main()
