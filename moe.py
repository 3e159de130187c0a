# SPDX-License-Identifier: MIT
"""Mixture of experts: a router picks K of E small networks per token. With routing replay and a load-balance loss.

As in Qwen3-MoE: softmax over all experts, the K largest probabilities renormalised to sum to 1, SwiGLU experts, no
shared expert. There is no capacity limit: a token's output never depends on which other tokens share its batch, so
that the sampler and the trainer compute the same function. The router runs in float32 whatever the rest does, since
rounding could pick another expert.

Letters: N tokens, C model width, F expert width, E experts, K experts per token.

Routing replay (section 5.3 of arXiv 2507.18071): the experts to use are given, as the sampler recorded them. Only the
choice is replayed. The weights come from the current router, so it still gets a gradient.

To copy: this file needs nothing but torch. To see routing and replay on eight tokens: `python moe.py`.
"""

import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    """Top-k routed SwiGLU experts: y = sum_k weight_k * W_out[e_k] (silu(W_gate[e_k] x) * (W_up[e_k] x))."""

    def __init__(self, width, experts, experts_per_token, expert_width):
        super().__init__()
        self.experts_per_token = experts_per_token
        self.router = nn.Parameter(torch.randn(experts, width) * width**-0.5)
        self.w_in = nn.Parameter(torch.randn(experts, width, 2 * expert_width) * width**-0.5)  # gate, up
        self.w_out = nn.Parameter(torch.randn(experts, expert_width, width) * expert_width**-0.5)

    def forward(self, x, routes=None):
        """x: (..., C); routes: (..., K) integers, the experts to use, or None to let the router choose.

        Returns (y (..., C), routes (..., K) as used, int64, probs (..., E), the router's probabilities in float32).
        """
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.router.float())  # (..., E)
        probs = logits.softmax(-1)
        routes = probs.topk(self.experts_per_token).indices if routes is None else routes.long()
        # Softmax of the chosen logits: the chosen probabilities, scaled to sum to 1, even if all are 0 (under replay).
        weights = logits.gather(-1, routes).softmax(-1)  # (..., K)
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        w_in = self.w_in.to(dtype)
        w_out = self.w_out.to(dtype)
        run = grouped_experts if can_group(routes.numel(), w_in, w_out) else all_experts
        rows = x.flatten(0, -2).to(dtype)  # (N, C)
        y = run(rows, routes.flatten(0, -2), weights.flatten(0, -2).to(dtype), w_in, w_out)
        return y.view(x.shape), routes, probs


def all_experts(x, routes, weights, w_in, w_out):
    """Every expert on every token, times its weight, which is 0 where the token did not choose it.

    x: (N, C); routes, weights: (N, K); w_in: (E, C, 2F); w_out: (E, F, C). Returns (N, C). E/K times the work needed,
    but on any device, in any dtype, without a wait for the GPU: the readable twin of `grouped_experts`.
    """
    dense = x.new_zeros(len(x), len(w_in)).scatter_add(1, routes, weights)  # (N, E)
    gate, up = (x @ w_in).chunk(2, dim=-1)  # (E, N, F) each
    y = (F.silu(gate) * up) @ w_out  # (E, N, C)
    return (dense.T[..., None] * y).sum(0)


def grouped_experts(x, routes, weights, w_in, w_out):
    """The same by sorting: rows of one expert become neighbours, and two grouped matrix products do all experts.

    experts of 3 tokens, K = 2:  2 0 | 1 2 | 0 1   sorted:  0 0 | 1 1 | 2 2   of the tokens  0 2 | 1 2 | 0 1
    """
    k = routes.size(1)
    experts, order = routes.flatten().sort(stable=True)  # (N*K,)
    token = order // k
    # where each expert's rows end; unlike bincount, this needs no look at the data (no GPU synchronisation)
    ends = torch.searchsorted(experts, torch.arange(len(w_in), device=x.device), right=True, out_int32=True)
    gate, up = F.grouped_mm(x.index_select(0, token), w_in, offs=ends).chunk(2, dim=-1)  # (N*K, F) each
    y = F.grouped_mm(F.silu(gate) * up, w_out, offs=ends)  # (N*K, C)
    y = y * weights.flatten().index_select(0, order)[:, None]
    return torch.zeros_like(x).index_add(0, token, y)


def routing_change(probs, routes):
    """(2,): how many of the router's choices, as it is now, the sampler had not made; and how many there are.

    probs: (N, L, E), the router's now; routes: (N, L, K), the sampler's. Under replay the changes are not acted on.
    """
    now = probs.topk(routes.size(-1)).indices  # (N, L, K)
    changed = (now[..., :, None] != routes[..., None, :]).all(-1)
    return torch.stack([changed.sum(), torch.tensor(changed.numel(), device=changed.device)])


def expert_load(routes, experts):
    """(E,): the share of all choices that fell on each expert. routes: (N, K)."""
    load = F.one_hot(routes.long(), experts).sum((0, 1)).float()
    return load / load.sum().clamp(min=1)


def load_balance_loss(probs, routes):
    """Equations 4 to 6 of the Switch Transformer (arXiv 2101.03961) for top-k: E * sum_e load_e * mean prob_e.

    probs: (N, E); routes: (N, K); of N tokens, padding excluded. 1 when all is even, at most E/K, 0 without tokens.
    Used in the warm start. Off in RL: the reward does not ask for it.
    """
    mean = probs.sum(0) / max(1, len(probs))
    return probs.size(1) * (expert_load(routes, probs.size(1)) * mean).sum()


def can_group(rows, *weights):
    """Whether `grouped_experts` can and should run on these weights, for so many rows (tokens times K).

    `F.grouped_mm` (torch 2.10 on) takes rows of a multiple of 16 bytes: float32 or bfloat16 on a CPU; bfloat16 on an
    NVIDIA GPU of capability 8 or more. Below 9 it loops over the experts and waits, which pays only for many rows.
    """
    device = weights[0].device
    dtype = weights[0].dtype
    fits = all(size * w.element_size() % 16 == 0 for w in weights for size in w.shape[1:])
    if not fits or not hasattr(F, "grouped_mm"):
        return False
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.version.hip is None:
        return torch.cuda.get_device_capability(device)[0] >= (8 if rows >= 4096 else 9)
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)


if __name__ == "__main__":
    torch.manual_seed(0)
    layer = MoE(width=16, experts=8, experts_per_token=2, expert_width=16)
    x = torch.randn(8, 16)
    _, sampled, probs = layer(x)
    layer.router.data += 0.1 * torch.randn(8, 16)  # as training would move it
    _, routed, moved = layer(x)
    _, replayed, _ = layer(x, sampled)  # the same choice, weighted by the router as it is now
    print("experts and their weights; *: the choice changed")
    print("token | as sampled       | router moved       | moved, replayed")
    for token in range(8):
        cells = []
        for routes, p in ((sampled, probs), (routed, moved), (replayed, moved)):
            chosen = routes[token].sort().values
            first, second = p[token, chosen] / p[token, chosen].sum()
            cells.append(f"{chosen[0]} {chosen[1]}   {first:.2f} {second:.2f}")
        changed = set(sampled[token].tolist()) != set(routed[token].tolist())
        cells[1] += " *" if changed else "  "
        print(f"{token:5} |", " | ".join(cells))
