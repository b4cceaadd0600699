"""Optimisers for tiny-r1: Muon for attention, dense and shared matrices, Adam for everything else.

Muon (K. Jordan, 2024) replaces the momentum of a matrix by the nearest orthogonal one, found by a Newton-Schulz iteration.
Matrices of one shape are orthogonalised together in batched products.
"""

import torch

MUON_LR, EXPERT_LR, ADAM_LR = 0.01, 0.002, 0.004
MUON_DECAY, MUON_MOMENTUM = 0.01, 0.95


def build(model):
    """Returns [Muon, Adam]; each parameter group keeps its full rate in `base_lr` for the schedule."""
    muon, experts, rest = [], [], []
    for name, p in model.named_parameters():
        if "experts_gate_up" in name or "experts_down" in name:
            experts.append(p)
        elif p.ndim == 2 and not name.endswith(("embed_tokens", "lm_head", "mlp.gate")):
            muon.append(p)
        else:
            rest.append(p)
    groups = [dict(params=experts, lr=EXPERT_LR), dict(params=rest, lr=ADAM_LR)]
    optimizers = [Muon(muon), torch.optim.Adam(groups, betas=(0.9, 0.98), eps=1e-10)]
    for group in (g for o in optimizers for g in o.param_groups):
        group["base_lr"] = group["lr"]
    return optimizers


class Muon(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, dict(lr=MUON_LR))

    @torch.no_grad()
    def step(self):
        lr = self.param_groups[0]["lr"]
        by_shape = {}
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            by_shape.setdefault(p.shape, []).append(p)
        for (n_out, n_in), params in by_shape.items():
            updates = orthogonalised(torch.stack([self.nesterov(p) for p in params]))
            rate = lr * max(1.0, n_out / n_in) ** 0.5
            for p, update in zip(params, updates):
                p.mul_(1 - lr * MUON_DECAY).add_(update, alpha=-rate)

    def nesterov(self, p):
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.lerp_(p.grad, 1 - MUON_MOMENTUM)
        return p.grad.lerp(momentum, MUON_MOMENTUM)


def orthogonalised(g, steps=5):
    """Batched quintic Newton-Schulz iteration with Muon's coefficients; g [n, out, in]."""
    tall = g.shape[1] > g.shape[2]
    x = g.transpose(1, 2) if tall else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.transpose(1, 2) if tall else x
