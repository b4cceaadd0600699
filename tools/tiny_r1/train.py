"""Trains tiny-r1 from scratch on two CPU cores and saves the float32 parameters.

    OMP_WAIT_POLICY=passive python -m tools.tiny_r1.train --model-dir models/tiny-r1 --out tiny-r1.pt

model-dir needs tokenizer.json and tokenizer_config.json, which tokenizer.py writes. Everything is seeded; the
schedule counts tokens, not minutes, so a busy machine only takes longer. README.md states what to expect.
"""

import argparse
import random
import time

import torch
import torch.nn.functional as F

from tools.tiny_r1 import data
from tools.tiny_r1 import optim
from tools.tiny_r1.config import CONFIG
from tools.tiny_r1.encode import Encoder, draw_batches, make_batch
from tools.tiny_r1.model import TinyDeepseek

BATCH_TOKENS = 1500
WARMUP, DECAY_FROM = 0.02, 0.30  # fractions of all tokens; after DECAY_FROM the rates decrease linearly to zero
CURRICULUM = [(0.08, 2), (0.17, 3), (1.01, 4)]  # (up to this fraction of the tokens, most digits of an operand)
MTP_FROM, MTP_WEIGHT = 0.40, 0.3
BIAS_STEP = 0.01
N_EVALUATIONS, N_EVALUATION_PROBLEMS = 16, 384


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    rng = random.Random(args.seed)
    encoder, model = Encoder(args.model_dir), TinyDeepseek(CONFIG)
    optimizers = optim.build(model)
    held_out = draw_held_out(encoder, random.Random(1000 + args.seed), N_EVALUATION_PROBLEMS)
    seen, next_evaluation, started = 0, 0, time.time()
    while seen < args.tokens:
        max_digits = next(digits for until, digits in CURRICULUM if seen / args.tokens < until)
        for batch in draw_batches(encoder, rng, max_digits, BATCH_TOKENS):
            progress = min(seen / args.tokens, 1.0)
            losses = train_step(model, optimizers, batch, progress)
            seen += int(batch[1].sum())
            if seen >= next_evaluation:
                report(model, held_out, seen, losses, time.time() - started)
                torch.save(model.state_dict(), args.out)
                next_evaluation += args.tokens / N_EVALUATIONS
    report(model, held_out, seen, losses, time.time() - started)
    torch.save(model.state_dict(), args.out)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", required=True, help="directory with tokenizer.json and tokenizer_config.json")
    parser.add_argument("--out", required=True, help="file for the trained float32 parameters")
    parser.add_argument("--tokens", type=float, default=6.5e6, help="training tokens, prompts included")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def train_step(model, optimizers, batch, progress):
    factor = min(1.0, (progress + 1e-4) / WARMUP, (1.0 - progress) / (1.0 - DECAY_FROM))
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
    use_mtp = progress >= MTP_FROM
    main_loss, mtp_loss = losses_of(model, batch, use_mtp)
    (main_loss + MTP_WEIGHT * mtp_loss).backward()
    for optimizer in optimizers:
        optimizer.step()
    for router in model.routers() if use_mtp else model.routers()[:-1]:
        balance(router, BIAS_STEP * factor)
    return main_loss.item(), mtp_loss.item()


def losses_of(model, batch, use_mtp):
    """Cross-entropy over completion tokens only, of the main head and of the MTP head (one token further)."""
    ids, lengths, first = batch
    hidden = model(ids, lengths)
    main_loss = masked_loss(model, hidden, batch, offset=1)
    if not use_mtp:
        return main_loss, torch.zeros(())
    return main_loss, masked_loss(model, model.forward_mtp(hidden, ids, lengths), batch, offset=2)


def masked_loss(model, hidden, batch, offset):
    ids, lengths, first = batch
    rows, columns = completion_targets(ids, lengths, first)
    return F.cross_entropy(model.logits(hidden[rows, columns - offset]), ids[rows, columns])


def completion_targets(ids, lengths, first):
    time = torch.arange(ids.shape[1])
    return ((time >= first[:, None]) & (time < lengths[:, None])).nonzero(as_tuple=True)


@torch.no_grad()
def balance(router, step):
    """Auxiliary-loss-free balancing (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): the bias of underloaded experts
    rises, that of overloaded ones falls.
    """
    router.bias += step * torch.sign(router.load.mean() - router.load)
    router.bias -= router.bias.mean()


def draw_held_out(encoder, rng, count):
    pairs = []
    for i in range(count):
        problem = data.draw_problem(rng, max_digits=4, held_out=True)
        messages = [{"role": "user", "content": data.phrase(rng, problem, story=i % 2 == 1)}]
        pairs.append(encoder.sample(data.Sample(messages, data.completion_of(problem))))
    return pairs


@torch.no_grad()
def exact_matches(model, pairs, chunk=64):
    """Teacher-forced: if every argmax equals the reference, greedy generation is identical. Returns (bools, MTP hit
    rate).
    """
    exact, hits, total = [], 0, 0
    for i in range(0, len(pairs), chunk):
        batch = make_batch(pairs[i:i + chunk])
        ids, lengths, first = batch
        hidden = model(ids, lengths)
        rows, columns = completion_targets(ids, lengths, first)
        wrong = model.logits(hidden[rows, columns - 1]).argmax(-1) != ids[rows, columns]
        exact += (torch.bincount(rows[wrong], minlength=len(ids)) == 0).tolist()
        draft = model.logits(model.forward_mtp(hidden, ids, lengths)[rows, columns - 2]).argmax(-1)
        hits, total = hits + int((draft == ids[rows, columns]).sum()), total + len(rows)
    return exact, hits / total


def report(model, held_out, seen, losses, seconds):
    exact, mtp = exact_matches(model, held_out)
    spread = max(float(r.load.max() / r.load.mean()) for r in model.routers()[:-1])
    print(
        f"{seen / 1e6:.2f} M tokens  {seconds / 60:.1f} min  loss {losses[0]:.4f} mtp {losses[1]:.4f}  "
        f"exact {100 * sum(exact) / len(exact):.1f} %  mtp {100 * mtp:.1f} %  load {spread:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
