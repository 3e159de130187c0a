# SPDX-License-Identifier: MIT
"""A decoder-only Mixture-of-Experts transformer, a small Qwen3-MoE: the policy.

Pre-norm RMSNorm, rotary positions (RoPE), grouped-query attention with QK-norm, SwiGLU experts (`moe.py`), no dropout
and nothing else that differs between training and sampling or that depends on a row's neighbours. Rows are padded on
the right, so causal attention alone keeps padding out of sight.

There are two ways in: whole rows (`features`), and one new token per row with a cache (`decode`). Then the log-probs of
given tokens: first plainly (`token_logprobs`), then the same without what training does not need (`score`).

Letters: B rows, T tokens in a row, N tokens that are read, S cache slots, C width, H query heads, J key/value heads,
D head size, L layers, E experts, K experts per token, V vocabulary.
"""

from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from moe import MoE

FORMAT = 1  # of a checkpoint file


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. Raises ValueError where they do not fit together."""

    vocab_size: int = 263  # 256 bytes and 7 special tokens, see sample.py
    width: int = 96  # C
    layers: int = 2  # L
    heads: int = 4  # H
    kv_heads: int = 2  # J
    experts: int = 8  # E
    experts_per_token: int = 2  # K
    expert_width: int = 96
    context: int = 256  # the longest sequence, in tokens
    rope_theta: float = 10000.0

    def __post_init__(self):
        for name, value in vars(self).items():
            if name != "rope_theta" and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} must be divisible by 2 x heads ({self.heads}): RoPE turns pairs")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be divisible by kv_heads {self.kv_heads}")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds experts {self.experts}")
        if self.experts > 256:
            raise ValueError(f"experts is {self.experts}: at most 256, since routes are recorded as bytes")

    @property
    def head_size(self):
        return self.width // self.heads


def rotary(positions, config):
    """The rotations of RoPE (Su et al., arXiv 2104.09864): positions (...) -> (..., D/2), unit complex numbers.

    A query and a key are turned by angles in proportion to their positions. Their product then depends on how far apart
    they are, and on nothing else of where they stand. Pairs of numbers are read as complex ones: one product turns all.
    """
    exponents = torch.arange(0, config.head_size, 2, device=positions.device) / config.head_size
    angles = positions[..., None] * config.rope_theta**-exponents
    return torch.complex(angles.cos(), angles.sin())


def rotate(x, rotations):
    """x: (..., H, D), neighbours read as complex numbers; rotations: (..., D/2). float32 inside."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations[..., None, :]).flatten(-2)


class Attention(nn.Module):
    """Grouped-query attention with QK-norm: H query heads share J heads of keys and values."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_size, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.q_norm = nn.Parameter(torch.ones(config.head_size))
        self.k_norm = nn.Parameter(torch.ones(config.head_size))

    def project(self, x, rotations):
        """x: (..., C) -> queries (..., H, D), keys and values (..., J, D)."""
        h, j, d = self.heads, self.kv_heads, self.head_size
        qk, v = self.qkv(x).unflatten(-1, (-1, d)).split((h + j, j), dim=-2)
        # queries and keys are normalised and turned together: half the operators, which is what decoding waits for
        weight = torch.cat([self.q_norm.expand(h, d), self.k_norm.expand(j, d)])
        q, k = rotate(F.rms_norm(qk, (d,), eps=1e-6) * weight, rotations).to(v.dtype).split((h, j), dim=-2)
        return q, k, v

    def forward(self, x, rotations, shape, read=None, cache=None):
        """Whole rows, each token seeing itself and those before it. x: (B, T, C), or (N, C) with `read`; shape: (B, T).

        cache: (2, rows, J, S, D), to be filled with keys and values from slot 0, for all samples of each prompt.
        """
        q, k, v = self.project(x, rotations)
        if read is not None:  # back to their places in the rows, with zeros for what was not read
            q, k, v = (y.new_zeros(shape[0] * shape[1], *y.shape[1:]).index_copy(0, read, y) for y in (q, k, v))
        q, k, v = (y.view(*shape, *y.shape[-2:]).transpose(1, 2) for y in (q, k, v))  # (B, H, T, D), (B, J, T, D)
        if cache is not None:
            cache[..., : shape[1], :] = torch.stack((k, v)).repeat_interleave(cache.size(1) // len(k), dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)  # (B, T, H, D)
        y = y if read is None else y.flatten(0, 1).index_select(0, read)
        return self.out(y.flatten(-2))

    def decode(self, x, rotations, positions, visible, cache):
        """One new token per row, x: (B, C), for slot `positions` (B,) of the cache; visible: (B, S), those up to it."""
        q, k, v = self.project(x, rotations)
        rows, (keys, values) = torch.arange(len(x), device=x.device), cache
        keys[rows, :, positions], values[rows, :, positions] = k, v
        # Query heads that share a key head are batched as if they were positions, so that no key is copied. In plain
        # operators, since the fused kernel takes twice as long for so few queries per key.
        q = q.unflatten(1, (self.kv_heads, -1)) * self.head_size**-0.5  # (B, J, H/J, D)
        scores = q @ keys[:, :, : visible.size(1)].transpose(2, 3)  # (B, J, H/J, S)
        weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1)
        return self.out((weights @ values[:, :, : visible.size(1)]).flatten(1))


class Block(nn.Module):
    """What `features` and `decode` go through: x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.moe = MoE(config.width, config.experts, config.experts_per_token, config.expert_width)


class KVCache:
    """Keys and values of all layers, (L, 2, B, J, S, D), allocated once. A token's slot is its position in its row."""

    def __init__(self, model, rows, slots):
        config, weight = model.config, model.embed.weight
        autocast = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
        shape = (config.layers, 2, rows, config.kv_heads, slots, config.head_size)
        self.kv = torch.zeros(shape, device=weight.device, dtype=dtype)  # a masked slot must not hold nan
        self.used = 0  # slots that any row may have filled so far

    def shrink(self, rows, source, target):
        """Keep the first `rows` rows, after moving those at `source` (indices) to `target`. Nothing is allocated."""
        self.kv[:, :, target, :, : self.used] = self.kv[:, :, source, :, : self.used]
        self.kv = self.kv[:, :, :rows]


class Transformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        for block in self.blocks:  # what is added to the residual stream starts small (GPT-2)
            for weight in (block.attention.out.weight, block.moe.w_out):
                weight.data.mul_((2 * config.layers) ** -0.5)

    def forward(self, tokens, *, routes=None):
        """tokens: (B, T) int64, right-padded with anything -> (logits (B, T, V), routes taken (L, B, T, K) int64).

        routes: the experts to use (routing replay), or None. ValueError for too long a sequence or another shape.
        """
        x, routes, _ = self.features(tokens, routes=routes)
        return self.head(x), routes

    def features(self, tokens, *, routes=None, read=None, cache=None):
        """Whole rows: hidden states (B, T, C), routes taken (L, B, T, K), the router's probabilities (L, B, T, E).

        read: (N,), which of the B*T tokens to compute: the leading ones of each row. Outputs then have N for B, T.
        cache: a `KVCache` to fill. routes, and what is raised: as in `forward`.
        """
        (b, t), config = tokens.shape, self.config
        if routes is not None and tuple(routes.shape) != (config.layers, b, t, config.experts_per_token):
            raise ValueError(f"routes {tuple(routes.shape)} must be (L, B, T, K), for tokens {(b, t)}")
        if t > config.context:
            raise ValueError(f"a sequence of {t} tokens exceeds the model's context of {config.context}")
        positions = torch.arange(t, device=tokens.device)
        if read is not None:
            tokens, positions = tokens.flatten()[read], positions[read % t]
            routes = None if routes is None else routes.flatten(1, 2)[:, read]
        if cache is not None:
            cache.used = t
        x, rotations, taken, probs = self.embed(tokens), rotary(positions, config), [], []
        for layer, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache.kv[layer]
            x = x + block.attention(block.attention_norm(x), rotations, (b, t), read, layer_cache)
            y, chosen, p = block.moe(block.moe_norm(x), None if routes is None else routes[layer])
            x = x + y
            taken.append(chosen)
            probs.append(p)
        return self.norm(x), torch.stack(taken), torch.stack(probs)

    def decode(self, tokens, positions, cache):
        """One new token per row, tokens (B,), at `positions` (B,): the hidden states (B, C), the routes (L, B, K)."""
        cache.used += 1
        visible = torch.arange(cache.used, device=tokens.device) <= positions[:, None]  # (B, S)
        x, rotations, taken = self.embed(tokens), rotary(positions, self.config), []
        for block, layer_cache in zip(self.blocks, cache.kv):
            x = x + block.attention.decode(block.attention_norm(x), rotations, positions, visible, layer_cache)
            y, routes, _ = block.moe(block.moe_norm(x))
            x = x + y
            taken.append(routes)
        return self.norm(x), torch.stack(taken)

    def num_parameters(self):
        """(all, active per token): a token passes through K of E experts; an embedding is a look-up, not a product."""
        total = sum(p.numel() for p in self.parameters())
        experts = sum(block.moe.w_in.numel() + block.moe.w_out.numel() for block in self.blocks)
        unused = experts - experts * self.config.experts_per_token // self.config.experts
        return total, total - unused - self.embed.weight.numel()


def token_logprobs(model, tokens, *, temperature=1.0, routes=None):
    """log pi(tokens[:, t] | tokens[:, :t]) at [:, t], (B, T) in float32; column 0, which nothing predicts, is 0.

    tokens: (B, T), right-padded. temperature divides the logits, as in sampling. routes: (L, B, T, K) to replay.
    """
    routes = None if routes is None else routes[:, :, :-1]
    logits = model(tokens[:, :-1], routes=routes)[0].float() / temperature  # (B, T-1, V)
    logprobs = -F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return F.pad(logprobs.unflatten(0, (len(tokens), -1)), (1, 0))


def score(model, tokens, spans, *, temperature=1.0, routes=None):
    """`token_logprobs`, for the responses only: the same values, less work.

        tokens   p p p r r e . .     p prompt, r response, e its end token, . padding
        read     1 1 1 1 1 0 0 0     goes through the network: no padding, nor the last token, which predicts nothing
        scored   0 0 1 1 1 0 0 0     gets logits: predicts a token of the response

    spans: for each row (start, end): its prompt is tokens[:start], its response tokens[start:end], padding follows.
    Returns (logprobs (B, T), 0 outside the responses; probs (L, N, E), the router's, of the N tokens that were read;
    read (N,), where those are among the B*(T-1) inputs).
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    # computed on the host, so that the device need not be asked how many tokens there are
    place, (starts, ends) = np.arange(inputs.size(1)), np.array(spans).T[:, :, None]
    is_read = place < ends - 1  # (B, T-1)
    is_scored = is_read & (place >= starts - 1)
    indices = (np.flatnonzero(x).tolist() for x in (is_read, is_scored, is_scored[is_read]))
    read, scored, scored_of_read = (torch.tensor(x, device=tokens.device) for x in indices)
    x, _, probs = model.features(inputs, routes=None if routes is None else routes[:, :, :-1], read=read)
    logits = model.head(x.index_select(0, scored_of_read)).float() / temperature
    logprobs = -F.cross_entropy(logits, targets.index_select(0, scored), reduction="none")
    logprobs = logprobs.new_zeros(inputs.numel()).index_copy(0, scored, logprobs).view_as(inputs)
    return F.pad(logprobs, (1, 0)), probs, read


def split_by_length(lengths, budget):
    """Split rows, given their lengths, into chunks of similar length and about equal work, some `budget` tokens each.

    That keeps padding small; only attention computes on it. Returns lists of row numbers.
    """
    parts = max(1, round(sum(lengths) / budget))
    chunks, done = [[] for _ in range(parts)], 0
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        chunks[done * parts // sum(lengths)].append(row)
        done += lengths[row]
    return [chunk for chunk in chunks if chunk]


def checkpoint(model, **about):
    """What a checkpoint file holds: the format's version, the model's sizes and weights, facts about it."""
    return {"format": FORMAT, "config": asdict(model.config), "weights": model.state_dict(), "about": about}


def load_model(path, *, device="cpu"):
    """(model in evaluation mode, the plain facts it was saved with). No code in the file is ever executed.

    Raises OSError when it cannot be read, and ValueError, in one line, when it is no checkpoint of this format.
    """
    with open(path, "rb") as file:
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises whatever it stumbles on, by the kind of damage
            raise ValueError(f"{path} is not a checkpoint, or is damaged ({type(error).__name__})") from error
    if not isinstance(saved, dict) or saved.keys() != {"format", "config", "weights", "about"}:
        raise ValueError(f"{path} is not a checkpoint of this project")
    if saved["format"] != FORMAT:
        raise ValueError(f"{path} has format {saved['format']}, this program reads format {FORMAT}")
    try:
        with torch.device("meta"):  # no memory is taken for sizes that only the file claims
            model = Transformer(ModelConfig(**saved["config"]))
        model.load_state_dict(saved["weights"], assign=True)
        return model.float().to(device).eval(), dict(saved["about"])
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} does not fit this program: {reason}") from error
