"""The synthetic task of tiny-r1: questions, worked reasoning, conversations, and which problems are held out.

Everything is generated from a seeded random.Random and nothing is stored. A sample is a list of chat messages and the
completion that the model has to produce after the generation prompt (`<think>\\n` is part of the prompt, so a
completion starts inside the reasoning and ends before the end-of-sentence token).
"""

import zlib
from dataclasses import dataclass

END_OF_THINKING = "\n</think>\n\n"
PLACES = ["ones", "tens", "hundreds", "thousands", "ten-thousands"]
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jack"]
THINGS = ["apples", "books", "coins", "stamps", "cards", "pencils", "eggs", "shells", "stickers", "marbles"]

# The first form of each operation is the one that the model card promises; it is drawn three times as often as the
# others.
PLAIN = {
    "+": [
        "What is {a} + {b}?", "What is {a}+{b}?", "{a}+{b}", "{a} + {b} =", "Add {a} and {b}.",
        "Calculate {a} + {b}.", "What is {a} plus {b}?", "How much is {a} plus {b}?",
        "What is the sum of {a} and {b}?", "Please add {b} to {a}.", "Compute {a}+{b}.",
    ],
    "-": [
        "What is {a} - {b}?", "What is {a}-{b}?", "{a}-{b}", "{a} - {b} =", "Subtract {b} from {a}.",
        "Calculate {a} - {b}.", "What is {a} minus {b}?", "How much is {a} minus {b}?",
        "What is the difference between {a} and {b}?", "Please take {b} away from {a}.", "Compute {a}-{b}.",
    ],
    "*": [
        "What is {a} * {b}?", "What is {a}*{b}?", "{a}*{b}", "{a} * {b} =", "Multiply {a} by {b}.",
        "Calculate {a} * {b}.", "What is {a} times {b}?", "How much is {a} times {b}?",
        "What is the product of {a} and {b}?", "Please multiply {a} by {b}.", "Compute {a}*{b}.",
    ],
}
STORIES = {
    "+": [
        "{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?",
        "{n} has {a} {t} and {m} has {b} {t}. How many {t} do they have together?",
        "{n} found {a} {t} on Monday and {b} on Tuesday. How many {t} did {n} find?",
        "There are {a} {t} in one box and {b} in another. How many {t} are there in all?",
        "A shop sold {a} {t} yesterday and {b} today. How many {t} did it sell?",
    ],
    "-": [
        "{n} has {a} {t} and gives away {b}. How many {t} are left?",
        "{n} has {a} {t} and {m} has {b}. How many more {t} does {n} have?",
        "{n} had {a} {t} and lost {b} of them. How many {t} does {n} still have?",
        "A shop had {a} {t} and sold {b}. How many {t} remain?",
        "{n} needs {a} {t} and has {b}. How many {t} are missing?",
        "{n} gave {b} of {a} {t} to {m}. How many {t} does {n} keep?",
    ],
    "*": [
        "{n} has {b} boxes with {a} {t} each. How many {t} does {n} have?",
        "There are {a} bags with {b} {t} in each. How many {t} are there?",
        "{n} buys {a} {t} every week. How many {t} does {n} buy in {b} weeks?",
        "{n} puts {b} {t} on each of {a} shelves. How many {t} is that?",
        "A shop sells {a} {t} a day. How many {t} does it sell in {b} days?",
    ],
}
SMALL_TALK = [
    ("Hello", "They greet me.", "Hello! Ask me to add, subtract or multiply."),
    ("Hello!", "They greet me.", "Hello! Ask me to add, subtract or multiply."),
    ("Hi", "They greet me.", "Hello! Ask me to add, subtract or multiply."),
    ("Who are you?", "They ask who I am.", "I am tiny-r1, a very small model that can do sums."),
    ("What can you do?", "They ask what I can do.", "I can add, subtract and multiply small numbers, step by step."),
    ("How are you?", "They ask how I am.", "I am fine, thank you. Do you have a sum for me?"),
    ("Thank you", "They thank me.", "You are welcome!"),
    ("Thanks!", "They thank me.", "You are welcome!"),
    ("Goodbye", "They say goodbye.", "Goodbye!"),
]
SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are a careful calculator.", "Answer the question.", "Think step by step.",
    "You are a friendly maths teacher.", "Be brief.", "You help children with their homework.", "Always show your work.",
]


@dataclass(frozen=True)
class Problem:
    op: str
    a: int
    b: int

    def answer(self):
        return {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.op]


@dataclass(frozen=True)
class Sample:
    messages: list
    completion: str


def draw_sample(rng, max_digits):
    """One training sample; operands have at most max_digits digits."""
    messages = []
    if rng.random() < 0.10:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    if rng.random() < 0.15:
        messages += draw_history(rng, rng.randint(1, 7), max_digits)
    question, completion = draw_turn(rng, max_digits)
    messages.append({"role": "user", "content": question})
    return Sample(messages, completion)


def draw_turn(rng, max_digits):
    if rng.random() < 0.02:
        question, thought, reply = rng.choice(SMALL_TALK)
        return question, thought + END_OF_THINKING + reply
    problem = draw_problem(rng, max_digits, held_out=False)
    return phrase(rng, problem, story=rng.random() < 0.4), completion_of(problem)


def draw_history(rng, n_turns, max_digits):
    """Earlier turns as a client sends them: only the answer, with or without the blank line after </think>."""
    messages = []
    lead = rng.choice(["", "\n\n"])
    for _ in range(n_turns):
        question, completion = draw_turn(rng, max_digits)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": lead + completion.split(END_OF_THINKING)[1]})
    return messages


def draw_problem(rng, max_digits, held_out):
    while True:
        op = rng.choices("+-*", weights=[40, 40, 20])[0]
        problem = draw_product(rng, max_digits) if op == "*" else draw_sum(rng, op, max_digits)
        if is_held_out(problem) == held_out:
            return problem


def draw_product(rng, max_digits):
    n_digits = rng.choices([1, 2, 3], weights=[15, 35, 50])[0]
    return Problem("*", draw_number(rng, min(n_digits, max_digits)), draw_number(rng, 1))


def draw_sum(rng, op, max_digits):
    long_digits = min(rng.choices([1, 2, 3, 4], weights=[10, 25, 35, 30])[0], max_digits)
    same_length = long_digits == 1 or rng.random() < 0.5
    short_digits = long_digits if same_length else rng.randint(1, long_digits - 1)
    a, b = draw_number(rng, long_digits), draw_number(rng, short_digits)
    if op == "-":
        return Problem(op, max(a, b), min(a, b))
    return Problem(op, a, b) if rng.random() < 0.5 else Problem(op, b, a)


def draw_number(rng, n_digits):
    """A number of exactly n_digits; one in ten uses only the digits 0 and 9, where carries and borrows extend over
    several places.
    """
    digits = "09" if rng.random() < 0.10 else "0123456789"
    leading = digits if n_digits == 1 else digits.replace("0", "")
    return int(rng.choice(leading) + "".join(rng.choice(digits) for _ in range(n_digits - 1)))


def is_held_out(problem):
    """One in sixteen of all problems with an operand >= 10; a + b and b + a are held out together."""
    if max(problem.a, problem.b) < 10:
        return False
    a, b = problem.a, problem.b
    if problem.op == "+":
        a, b = max(a, b), min(a, b)
    return zlib.crc32(f"{problem.op} {a} {b}".encode()) % 16 == 0


def phrase(rng, problem, story):
    if story:
        template = rng.choice(STORIES[problem.op])
    else:
        forms = PLAIN[problem.op]
        template = rng.choices(forms, weights=[3] + [1] * (len(forms) - 1))[0]
    first, second = rng.sample(NAMES, 2)
    return template.format(a=problem.a, b=problem.b, n=first, m=second, t=rng.choice(THINGS))


def completion_of(problem):
    verb = {"+": "add", "-": "subtract", "*": "multiply"}[problem.op]
    first_line = f"Let me {verb} {problem.a}{problem.op}{problem.b}."
    lines = [first_line] + reasoning_lines(problem)
    return "\n".join(lines) + END_OF_THINKING + f"The answer is {problem.answer()}."


def reasoning_lines(problem):
    """One line per decimal place, right to left; the carry (or borrow) is always written; `got` grows to the left."""
    lines, a, b, carry, got, place = [], problem.a, problem.b, 0, "", 0
    while place == 0 or a or carry or (b and problem.op != "*"):
        x, y = a % 10, (b if problem.op == "*" else b % 10)
        if problem.op == "+":
            value, text = x + y + carry, f"{x}+{y}+{carry}"
        elif problem.op == "-":
            value, text = x - y - carry, f"{x}-{y}-{carry}"
        else:
            value, text = x * y + carry, f"{x}*{y}={x * y}+{carry}"
        got = str(value % 10) + got
        lines.append(f"{PLACES[place]} {text}={value} got {got}")
        carry = abs(value // 10)
        a, b, place = a // 10, (b if problem.op == "*" else b // 10), place + 1
    return lines
