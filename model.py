# SPDX-License-Identifier: MIT
"""A decoder-only Mixture-of-Experts transformer, a small Qwen3-MoE: the policy.

Pre-norm RMSNorm, rotary positions (RoPE), grouped-query attention with QK-norm, SwiGLU experts (`moe.py`), no dropout
and nothing else that differs between training and sampling or that depends on a row's neighbours. Rows are padded on
the right, so causal attention alone keeps padding out of sight.

There are two ways in: whole rows (`features`), and one new token per row with a cache (`decode`). Then the log-probs of
given tokens: first plainly (`token_logprobs`), then the same without what training does not need
(`response_logprobs`, which a first reading may skip, and with it all that is said of packed tokens).

Letters: B rows, T tokens in a row, N packed tokens (those that are computed), S cache slots, C width, H query heads,
J key/value heads, D head size, L layers, E experts, K experts per token, V vocabulary.
"""

from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from moe import MoE

FORMAT = 2  # of a checkpoint file


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
        self.heads = config.heads
        self.kv_heads = config.kv_heads
        self.head_size = config.head_size
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_size, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.q_norm = nn.Parameter(torch.ones(config.head_size))
        self.k_norm = nn.Parameter(torch.ones(config.head_size))

    def project(self, x, rotations):
        """x: (..., C) -> queries (..., H, D), keys and values (..., J, D)."""
        d = self.head_size
        qk, v = self.qkv(x).unflatten(-1, (-1, d)).split((self.heads + self.kv_heads, self.kv_heads), dim=-2)
        # queries and keys are normalised and turned together: half the operators, which is what decoding waits for
        weight = torch.cat([self.q_norm.expand(self.heads, d), self.k_norm.expand(self.kv_heads, d)])
        qk = rotate(F.rms_norm(qk, (d,), eps=1e-6) * weight, rotations).to(v.dtype)
        q, k = qk.split((self.heads, self.kv_heads), dim=-2)
        return q, k, v

    def forward(self, x, rotations, shape, packed=None, cache=None):
        """Whole rows, each token seeing itself and those before it. x: (B, T, C), or (N, C) if `packed`; shape: (B, T).

        cache: (2, rows, J, S, D), to be filled with keys and values from slot 0, for all samples of each prompt.
        """
        q, k, v = self.project(x, rotations)
        k = in_rows(k, shape, packed)  # (B, J, T, D)
        v = in_rows(v, shape, packed)
        if cache is not None:
            cache[..., : shape[1], :] = torch.stack((k, v)).repeat_interleave(cache.size(1) // len(k), dim=1)
        y = F.scaled_dot_product_attention(in_rows(q, shape, packed), k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2)  # (B, T, H, D)
        y = y if packed is None else y.flatten(0, 1).index_select(0, packed)
        return self.out(y.flatten(-2))

    def decode(self, x, rotations, positions, visible, cache):
        """One new token per row, x: (B, C), for slot `positions` (B,) of the cache; visible: (B, S), those up to it."""
        q, k, v = self.project(x, rotations)
        rows = torch.arange(len(x), device=x.device)
        keys, values = cache
        keys[rows, :, positions] = k
        values[rows, :, positions] = v
        # Query heads that share a key head are batched as if they were positions, so that no key is copied. In plain
        # operators, since the fused kernel takes twice as long for so few queries per key.
        q = q.unflatten(1, (self.kv_heads, -1)) * self.head_size**-0.5  # (B, J, H/J, D)
        scores = q @ keys[:, :, : visible.size(1)].transpose(2, 3)  # (B, J, H/J, S)
        weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1)
        return self.out((weights @ values[:, :, : visible.size(1)]).flatten(1))


def in_rows(x, shape, packed):
    """x: (B, T, J, D), or (N, J, D) if `packed` -> (B, J, T, D), with zeros where nothing was computed."""
    if packed is not None:
        x = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy(0, packed, x)
    return x.view(*shape, *x.shape[-2:]).transpose(1, 2)


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
        config = model.config
        weight = model.embed.weight
        autocast = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
        shape = (config.layers, 2, rows, config.kv_heads, slots, config.head_size)
        self.kv = torch.zeros(shape, device=weight.device, dtype=dtype)  # a masked slot must not hold nan
        self.used = 0  # slots that any row may have filled so far

    def compact(self, rows, source, target):
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
        """tokens: (B, T) int64, right-padded with anything -> (logits (B, T, V), routes taken (B, T, L, K) int64).

        routes: the experts to use (routing replay), or None. ValueError for too long a sequence or another shape.
        """
        x, routes, _ = self.features(tokens, routes=routes)
        return self.head(x), routes

    def features(self, tokens, *, routes=None, packed=None, cache=None):
        """Whole rows: hidden states (B, T, C), routes taken (B, T, L, K), the router's probabilities (B, T, L, E).

        packed: (N,), which of the B*T tokens to compute: the leading ones of each row. Outputs then have N for B, T.
        cache: a `KVCache` to fill. routes, and what is raised: as in `forward`.
        """
        b, t = tokens.shape
        config = self.config
        if routes is not None and tuple(routes.shape) != (b, t, config.layers, config.experts_per_token):
            raise ValueError(f"routes {tuple(routes.shape)} must be (B, T, L, K), for tokens {(b, t)}")
        if t > config.context:
            raise ValueError(f"a sequence of {t} tokens exceeds the model's context of {config.context}")
        positions = torch.arange(t, device=tokens.device)
        if packed is not None:
            tokens = tokens.flatten()[packed]
            positions = positions[packed % t]
            routes = None if routes is None else routes.flatten(0, 1)[packed]
        if cache is not None:
            cache.used = t
        x = self.embed(tokens)
        rotations = rotary(positions, config)
        taken = []
        probs = []
        for layer, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache.kv[layer]
            x = x + block.attention(block.attention_norm(x), rotations, (b, t), packed, layer_cache)
            layer_routes = None if routes is None else routes[..., layer, :]
            y, chosen, p = block.moe(block.moe_norm(x), layer_routes)
            x = x + y
            taken.append(chosen)
            probs.append(p)
        return self.norm(x), torch.stack(taken, -2), torch.stack(probs, -2)

    def decode(self, tokens, positions, cache):
        """One new token per row, tokens (B,), at `positions` (B,): the hidden states (B, C), the routes (B, L, K)."""
        cache.used += 1
        visible = torch.arange(cache.used, device=tokens.device) <= positions[:, None]  # (B, S)
        x = self.embed(tokens)
        rotations = rotary(positions, self.config)
        taken = []
        for block, layer_cache in zip(self.blocks, cache.kv):
            x = x + block.attention.decode(block.attention_norm(x), rotations, positions, visible, layer_cache)
            y, routes, _ = block.moe(block.moe_norm(x))
            x = x + y
            taken.append(routes)
        return self.norm(x), torch.stack(taken, -2)

    def num_parameters(self):
        """(all, active per token): a token passes through K of E experts; an embedding is a look-up, not a product."""
        total = sum(p.numel() for p in self.parameters())
        experts = sum(block.moe.w_in.numel() + block.moe.w_out.numel() for block in self.blocks)
        unused = experts - experts * self.config.experts_per_token // self.config.experts
        return total, total - unused - self.embed.weight.numel()


def token_logprobs(model, tokens, *, temperature=1.0, routes=None):
    """log pi(tokens[:, t] | tokens[:, :t]) at [:, t], (B, T) in float32; column 0, which nothing predicts, is 0.

    tokens: (B, T), right-padded. temperature divides the logits, as in sampling. routes: (B, T, L, K) to replay.
    """
    routes = None if routes is None else routes[:, :-1]
    logits = model(tokens[:, :-1], routes=routes)[0].float() / temperature  # (B, T-1, V)
    logprobs = -F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return F.pad(logprobs.view(tokens[:, 1:].shape), (1, 0))


def response_logprobs(model, tokens, spans, *, temperature=1.0, routes=None, output_router_probs=False):
    """`token_logprobs`, for the responses only: the same values, less work. (B, T), 0 outside the responses.

        tokens      p p p r r e . .     p prompt, r response, e its end token, . padding
        packed      1 1 1 1 1 0 0 0     goes through the network: no padding, nor the last token, which predicts nothing
        scored      0 0 1 1 1 0 0 0     gets logits: predicts a token of the response
        of packed   0 0 1 1 1           the same, counted among the packed tokens

    spans: for each row (start, end): its prompt is tokens[:start], its response tokens[start:end], padding follows.
    With `output_router_probs` returns (logprobs, probs (N, L, E) of the N packed tokens, packed (N,): where these are
    among the B*(T-1) inputs).
    """
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:].flatten()

    def indices(chosen):
        return torch.tensor(np.flatnonzero(chosen).tolist(), dtype=torch.long, device=tokens.device)

    # found on the host, so that the device need not be asked how many there are
    starts, ends = np.array(spans, dtype=int).reshape(-1, 2).T[:, :, None]  # (B, 1) each
    position = np.arange(inputs.size(1))
    is_packed = position < ends - 1  # (B, T-1)
    is_scored = is_packed & (position >= starts - 1)
    packed = indices(is_packed)
    scored = indices(is_scored)
    scored_of_packed = indices(is_scored[is_packed])

    routes = None if routes is None else routes[:, :-1]
    x, _, probs = model.features(inputs, routes=routes, packed=packed)
    logits = model.head(x.index_select(0, scored_of_packed)).float() / temperature
    logprobs = -F.cross_entropy(logits, targets.index_select(0, scored), reduction="none")
    logprobs = logprobs.new_zeros(inputs.numel()).index_copy(0, scored, logprobs).view_as(inputs)
    logprobs = F.pad(logprobs, (1, 0))
    return (logprobs, probs, packed) if output_router_probs else logprobs


def split_by_length(lengths, tokens):
    """Split rows, given their lengths, into micro-batches of similar lengths and about equal work, some `tokens` each.

    That keeps padding small; only attention computes on it. Returns lists of row numbers.
    """
    total = max(1, sum(lengths))
    parts = max(1, round(total / tokens))
    batches = [[] for _ in range(parts)]
    done = 0
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        batches[done * parts // total].append(row)
        done += lengths[row]
    return [batch for batch in batches if batch]


def checkpoint(model, **metadata):
    """What a checkpoint file holds: the format's version, the model's sizes and weights, plain facts about it."""
    return {"format": FORMAT, "config": asdict(model.config), "weights": model.state_dict(), "metadata": metadata}


def load_model(path, *, device="cpu"):
    """(model in evaluation mode, the metadata it was saved with). No code in the file is ever executed.

    Raises OSError when it cannot be read, and ValueError, in one line, when it is no checkpoint of this format.
    """
    with open(path, "rb") as file:
        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises whatever it stumbles on, by the kind of damage
            raise ValueError(f"{path} is not a checkpoint, or is damaged ({type(error).__name__})") from error
    if not isinstance(saved, dict) or not {"format", "config", "weights"} <= saved.keys():
        raise ValueError(f"{path} is not a checkpoint of this project")
    if repr(saved["format"]) != repr(FORMAT):  # what a damaged file has here may not even be comparable
        raise ValueError(f"{path} has format {saved['format']!r:.20}, this program reads format {FORMAT}")
    try:
        with torch.device("meta"):  # no memory is taken for sizes that only the file claims
            model = Transformer(ModelConfig(**saved["config"]))
        model.load_state_dict(saved["weights"], assign=True)
        return model.float().to(device).eval(), dict(saved["metadata"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} does not fit this program: {reason}") from error
