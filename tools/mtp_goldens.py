"""The golden values of the multi-token-prediction (MTP) layer of a checkpoint that stores one, for make_goldens.py and
make_t1.py.

For each length n: n + 1 random tokens, the layer's logits, and its logits when it is applied again to its own draft.
reference_model.py computes the stored numbers in double precision; MtpModel of transformers, in float32 and with a
cache, computes them a second time.
"""

import re
import tempfile

import numpy as np
import torch
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tools import checkpoint_io as io

LENGTHS = [17, 150, 200]
ALL_POSITIONS_LENGTH = 17  # mtp_logits of every position for this length, of the last position for the others
ROUTING_MARGIN = 0.01
DRAFT_MARGIN = 0.1  # of the largest logit: the draft is clear in bfloat16, whose errors stay below 0.02


def mtp_goldens(reference, model, decoded, seed):
    """reference: ReferenceModel, model: transformers' main model, decoded: the weights by name. Returns the tensors by
    name and the largest disagreement between the two, as a fraction of the largest logit.
    """
    layer = transformers_mtp(model, decoded)
    golden, worst = {}, 0.0
    for n in LENGTHS:
        tokens = draw_tokens(reference, n, np.random.default_rng(seed + n))
        values = mtp_values(reference, tokens)
        worst = max(worst, disagreement(model, layer, tokens, values))
        if n != ALL_POSITIONS_LENGTH:
            values[f"mtp_logits_{n}"] = values[f"mtp_logits_{n}"][-1]
        golden |= stored({f"mtp_tokens_{n}": tokens[:-1], f"mtp_next_tokens_{n}": tokens[1:]}, values)
    return golden, worst


def mtp_values(reference, tokens):
    """tokens [n + 1] -> the layer's logits [n, vocab] and the logits [vocab] of its second application."""
    n = len(tokens) - 1
    hidden = reference.hidden(tokens[:-1])
    return {f"mtp_logits_{n}": reference.mtp_logits(hidden, tokens[1:]),
            f"mtp_second_logits_{n}": reference.mtp_second_logits(hidden, tokens[1:])}


def stored(tokens, values):
    golden = {name: torch.tensor(ids, dtype=torch.int32) for name, ids in tokens.items()}
    return golden | {name: torch.from_numpy(v.astype(np.float32)) for name, v in values.items()}


def draw_tokens(reference, n, rng):
    """Draws n + 1 random tokens until no routing decision of the main model and of the MTP layer is closer than
    ROUTING_MARGIN and the draft's logit leads by DRAFT_MARGIN.
    """
    vocab = reference.c["vocab_size"]
    tokens = rng.integers(0, vocab, n + 1).tolist()
    while True:
        close = first_close_token(reference, tokens)
        if close is None:
            return tokens
        tokens[close] = int(rng.integers(0, vocab))


def first_close_token(reference, tokens):
    """Token i decides the main model's routing at position i and the MTP layer's at position i - 1; the last one also
    decides the draft and the second application. Returns None if every margin is kept.
    """
    routing, draft = margins(reference, tokens)
    close = np.flatnonzero(routing < ROUTING_MARGIN)
    if len(close) > 0:
        return min(close[0], len(tokens) - 1)
    return len(tokens) - 1 if draft < DRAFT_MARGIN else None


def margins(reference, tokens):
    """Returns the smallest routing margin that each token decides, with one more entry for the second application, and
    the draft's lead as a fraction of the largest logit.
    """
    hidden = reference.hidden(tokens[:-1])
    main = reference.margins
    logits = np.sort(reference.mtp_logits(hidden, tokens[1:])[-1])
    reference.mtp_second_logits(hidden, tokens[1:])  # its margins are those of both applications
    routing = np.minimum(np.append(main, [np.inf] * 2), np.append(np.inf, reference.margins))
    return routing, (logits[-1] - logits[-2]) / np.abs(logits).max()


def transformers_mtp(model, decoded):
    """The MTP layer in transformers, with the embedding and the head of model."""
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    model.config.num_nextn_predict_layers = 1
    model._keys_to_ignore_on_load_unexpected = [re.escape(prefix)]  # the layer that it loads; R1's is 61
    with tempfile.TemporaryDirectory() as directory:
        io.write_checkpoint(directory, {}, {n: t.float() for n, t in decoded.items() if n.startswith(prefix)})
        model.config.name_or_path = directory
        return MtpModel.from_pretrained(model).eval()


@torch.no_grad()
def disagreement(model, layer, tokens, values):
    """The largest difference between transformers and values (mtp_values()), as a fraction of the largest logit. The
    second application reads the first one's cache.
    """
    n = len(tokens) - 1
    cache = MtpCache(config=layer.config)
    hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state
    state = layer.forward_layer(0, hidden, torch.arange(n)[None], cache, input_ids=torch.tensor([tokens[1:]]))
    logits = model.lm_head(state)[0]
    draft = logits[-1].argmax().view(1, 1)
    state = layer.forward_layer(0, state[:, -1:], torch.tensor([[n]]), cache, input_ids=draft)
    second = model.lm_head(state)[0, 0]
    pairs = [(logits, values[f"mtp_logits_{n}"]), (second, values[f"mtp_second_logits_{n}"])]
    return max(np.abs(got.numpy() - want).max() / np.abs(want).max() for got, want in pairs)
