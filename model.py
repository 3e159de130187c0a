# SPDX-License-Identifier: MIT
"""A decoder-only Mixture-of-Experts transformer, a small Qwen3-MoE: the policy.

Pre-norm RMSNorm, rotary positions (RoPE), grouped-query attention with QK-norm, SwiGLU experts (`moe.py`), no dropout
and nothing else that differs between training and sampling or that depends on a row's neighbours. Rows are padded on
the right, so causal attention alone keeps padding out of sight.

Letters: B sequences, T tokens in a row, N tokens of a batch in reading order, S cache slots, C width, H query heads,
J key/value heads, D head size, L layers, E experts, K experts per token, V vocabulary.
"""

from dataclasses import asdict, dataclass
from functools import partial

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
        sizes = {name: value for name, value in vars(self).items() if name != "rope_theta"}
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
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


class KVCache:
    """Keys and values of all layers, (L, B, J, S, D), allocated once. A token's slot is its position in its row."""

    def __init__(self, config, rows, slots, *, device, dtype):
        shape = (config.layers, rows, config.kv_heads, slots, config.head_size)
        self.k = torch.zeros(shape, device=device, dtype=dtype)  # zeros: a masked slot must not hold nan
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.used = 0  # slots that any row may have filled so far

    def copy_prompts(self, prompts, copies):
        """Take over the slots of a smaller cache, each of its rows `copies` times in a row."""
        self.used = prompts.used
        self.k[:, :, :, : self.used] = prompts.k[:, :, :, : self.used].repeat_interleave(copies, dim=1)
        self.v[:, :, :, : self.used] = prompts.v[:, :, :, : self.used].repeat_interleave(copies, dim=1)

    def shrink(self, rows, source, target):
        """Keep the first `rows` rows, after moving those at `source` (indices) to `target`. Nothing is allocated."""
        for cache in (self.k, self.v):
            cache[:, target, :, : self.used] = cache[:, source, :, : self.used]
        self.k, self.v = self.k[:, :rows], self.v[:, :rows]


def rotary(positions, config):
    """Rotations of RoPE (Su et al., arXiv 2104.09864) as unit complex numbers: positions (...) -> (..., D/2).

    Complex, since one multiplication then turns all pairs: a third of the time of the halves-and-concatenate form.
    """
    exponents = torch.arange(0, config.head_size, 2, device=positions.device) / config.head_size
    angles = positions[..., None] * config.rope_theta**-exponents
    return torch.complex(angles.cos(), angles.sin())


class Attention(nn.Module):
    """Grouped-query attention with QK-norm. How tokens lie in rows is not its business: `attend` knows."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_size, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.q_norm = nn.Parameter(torch.ones(config.head_size))
        self.k_norm = nn.Parameter(torch.ones(config.head_size))

    def forward(self, x, rotations, attend):
        h, j, d = self.heads, self.kv_heads, self.head_size
        qk, v = self.qkv(x).unflatten(-1, (-1, d)).split((h + j, j), dim=1)  # (N, H + J, D), (N, J, D)
        # queries and keys are normalised and turned together: half the operators, which is what decoding waits for
        weight = torch.cat([self.q_norm.expand(h, d), self.k_norm.expand(j, d)])
        q, k = rotate(F.rms_norm(qk, (d,), eps=1e-6) * weight, rotations).to(v.dtype).split((h, j), dim=1)
        return self.out(attend(q, k, v).flatten(1))  # (N, H, D) -> (N, C)


def attend_rows(q, k, v, rows, packing, cache=None, layer=0):
    """Causal attention within whole rows. q: (N, H, D), k, v: (N, J, D); rows: (B, T); packing: see `features`."""

    def unpack(x):  # (N, H, D) -> (B, H, T, D)
        x = x if packing is None else x.index_select(0, packing.source)
        return x.unflatten(0, rows).transpose(1, 2)

    q, k, v = unpack(q), unpack(k), unpack(v)
    if cache is not None:
        cache.k[layer, :, :, : rows[1]], cache.v[layer, :, :, : rows[1]] = k, v
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
    return y if packing is None else y.index_select(0, packing.read)  # (N, H, D)


def attend_cache(q, k, v, positions, visible, cache, layer):
    """One new token per row, N = B. positions: (B,), its slot; visible: (B, 1, 1, S), the slots up to it."""
    rows = torch.arange(len(q), device=q.device)
    keys, values = cache.k[layer], cache.v[layer]  # (B, J, S, D)
    keys[rows, :, positions], values[rows, :, positions] = k, v
    # The H/J query heads of a key head stand where query positions would, so no key is copied for them. In plain
    # operators, since the fused kernel takes twice as long for so few queries per key.
    q = q.unflatten(1, (k.size(1), -1)) * q.size(-1) ** -0.5  # (B, J, H/J, D)
    scores = q @ keys[:, :, : cache.used].transpose(2, 3)  # (B, J, H/J, S)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ values[:, :, : cache.used]).flatten(1, 2)  # (B, H, D)


def rotate(x, rotations):
    """x: (N, H, D), its neighbouring pairs read as complex numbers; rotations: (N, D/2). float32 inside."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations[:, None]).flatten(-2)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.moe = MoE(config.width, config.experts, config.experts_per_token, config.expert_width)

    def forward(self, x, rotations, attend, routes=None):
        x = x + self.attention(self.attention_norm(x), rotations, attend)
        y, routes, probs = self.moe(self.moe_norm(x), routes)
        return x + y, routes, probs


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

        routes: (L, B, T, K), the experts to use (routing replay); None lets the router choose.
        Raises ValueError when the sequence exceeds `config.context` or the routes have another shape.
        """
        x, routes, _ = self.features(tokens, routes=routes)
        return self.head(x).unflatten(0, tokens.shape), routes.unflatten(1, tokens.shape)

    def features(self, tokens, *, routes=None, packing=None, cache=None, positions=None):
        """The last hidden states (N, C), the routes taken (L, N, K) and the router's probabilities (L, N, E).

        N counts the B*T tokens in reading order, or, with a `Packing`, the tokens that are read at all: padding is not,
        and a prompt that several rows share is read once; only attention then computes on whole rows. With positions
        (B,), instead of whole rows one new token per row, tokens (B, 1): row b goes to slot positions[b] of the cache
        and sees all slots up to it.
        cache: a `KVCache` to add to. routes: as in `forward`. Raises ValueError as `forward` does.
        """
        config, (b, t), device = self.config, tokens.shape, tokens.device
        if routes is not None:
            if tuple(routes.shape) != (config.layers, b, t, config.experts_per_token):
                raise ValueError(f"routes {tuple(routes.shape)} must be (L, B, T, K), for tokens {(b, t)}")
            routes = routes.flatten(1, 2)  # (L, B*T, K)
            routes = routes if packing is None else routes.index_select(1, packing.read)
        if cache is not None:
            cache.used += t
        if (t if cache is None else cache.used) > config.context:
            raise ValueError(f"a sequence of {t} tokens exceeds the model's context of {config.context}")
        flat = tokens.flatten()
        if positions is None:
            at = torch.arange(t, device=device).repeat(b)
            if packing is not None:
                flat, at = flat.index_select(0, packing.read), at.index_select(0, packing.read)
            attend = partial(attend_rows, rows=(b, t), packing=packing, cache=cache)
        else:
            at, slots = positions, torch.arange(cache.used, device=device)
            visible = (slots <= positions[:, None])[:, None, None]  # (B, 1, 1, S)
            attend = partial(attend_cache, positions=positions, visible=visible, cache=cache)
        rotations = rotary(at, config)  # (N, D/2)
        x = self.embed(flat)  # (N, C)
        all_routes, all_probs = [], []
        for layer, block in enumerate(self.blocks):
            replay = None if routes is None else routes[layer]
            x, taken, probs = block(x, rotations, partial(attend, layer=layer), replay)
            all_routes.append(taken)
            all_probs.append(probs)
        return self.norm(x), torch.stack(all_routes), torch.stack(all_probs)

    def new_cache(self, rows, slots):
        """An empty `KVCache` for this model, on its device and in its dtype."""
        weight = self.embed.weight
        autocast = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
        return KVCache(self.config, rows, slots, device=weight.device, dtype=dtype)

    def num_parameters(self):
        """(all, active per token): a token passes through K of E experts; an embedding is a look-up, not a product."""
        total = sum(p.numel() for p in self.parameters())
        experts = sum(block.moe.w_in.numel() + block.moe.w_out.numel() for block in self.blocks)
        unused = experts - experts * self.config.experts_per_token // self.config.experts
        return total, total - unused - self.embed.weight.numel()


class Packing:
    """Which tokens of a padded batch (B, T) are read, and where each place of the batch finds its token among them.

    spans: for each row (start, end): its prompt is tokens[:start], its response tokens[start:end], padding follows.
    groups: for each row the number of its group; the rows of a group have the same prompt, which is read once.
    Computed on the host, so that the device need not be asked how many tokens there are.
    """

    def __init__(self, spans, width, groups, device):
        starts, ends = np.array(spans).T[:, :, None]  # (B, 1) each
        place, row = np.arange(width), np.arange(len(spans))[:, None]
        leader = row  # the first row of each row's group
        if groups is not None:
            _, first, group = np.unique(groups, return_index=True, return_inverse=True)
            leader = first[group].reshape(-1, 1)
        inside, borrowed = place < ends, (place < starts) & (leader != row)
        is_read = inside & ~borrowed  # (B, T)
        number = (np.cumsum(is_read) - 1).reshape(is_read.shape)  # of each read token, 0..N-1
        source = np.where(borrowed, number[leader[:, 0]], np.where(inside, number, 0))
        scored = (place >= starts - 1) & (place < ends)  # predicts a token of the response

        def index(values):
            return torch.tensor(values.tolist(), device=device)

        self.read = index(np.flatnonzero(is_read))  # (N,), indices into the B*T places
        self.source = index(source.flatten())  # (B*T,), indices into the N tokens
        self.scored, self.scored_source = index(np.flatnonzero(scored)), index(source[scored])  # (M,) each


def split_by_length(lengths, tokens):
    """Split rows, given their lengths, into chunks of similar length and about equal work, of some `tokens` each.

    Padding, which attention alone computes on, is then small. Returns lists of row numbers.
    """
    parts = max(1, round(sum(lengths) / tokens))
    chunks, done = [[] for _ in range(parts)], 0
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        chunks[done * parts // sum(lengths)].append(row)
        done += lengths[row]
    return [chunk for chunk in chunks if chunk]


def score(model, tokens, spans, *, temperature=1.0, routes=None, groups=None):
    """`token_logprobs` of the responses alone, for training: nothing is computed for padding, nor predicted in prompts.

    spans, groups: see `Packing`. Returns (logprobs (B, T), 0 outside the responses; probs (L, N, E), the router's, of
    the N tokens that were read; read (N,), where those are among the B*(T-1) inputs: last tokens are only predicted).
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    packing = Packing([(start, end - 1) for start, end in spans], inputs.size(1), groups, tokens.device)
    x, _, probs = model.features(inputs, routes=None if routes is None else routes[:, :, :-1], packing=packing)
    logits = model.head(x.index_select(0, packing.scored_source)).float() / temperature  # (M, V)
    logprobs = -F.cross_entropy(logits, targets.index_select(0, packing.scored), reduction="none")
    logprobs = logprobs.new_zeros(inputs.numel()).index_copy(0, packing.scored, logprobs).view_as(inputs)
    return F.pad(logprobs, (1, 0)), probs, packing.read


def token_logprobs(model, tokens, *, temperature=1.0, routes=None):
    """log pi(tokens[:, t] | tokens[:, :t]) at [:, t], (B, T) in float32; column 0, which nothing predicts, is 0.

    tokens: (B, T), right-padded. temperature divides the logits, as in sampling. routes: (L, B, T, K) to replay.
    """
    if routes is not None:
        routes = routes[:, :, :-1]
    logits = model(tokens[:, :-1], routes=routes)[0].float() / temperature  # (B, T-1, V)
    logprobs = -F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return F.pad(logprobs.unflatten(0, (len(tokens), -1)), (1, 0))


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
    if not isinstance(saved, dict) or not isinstance(saved.get("format"), int):
        raise ValueError(f"{path} is not a checkpoint of this project")
    if saved["format"] != FORMAT:
        raise ValueError(f"{path} has format {saved['format']}, this program reads format {FORMAT}")
    if saved.keys() != {"format", "config", "weights", "about"}:
        raise ValueError(f"{path} must hold format, config, weights and about; it holds {', '.join(map(str, saved))}")
    if not isinstance(saved["about"], dict):
        raise ValueError(f"{path} does not say what it is about")
    try:
        config = ModelConfig(**saved["config"])
        with torch.device("meta"):  # no memory is taken for sizes that only the file claims
            model = Transformer(config)
        check_weights(model, saved["weights"])
        model.load_state_dict(saved["weights"], assign=True)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} does not fit this program: {error}") from error
    return model.to(device).eval(), saved["about"]


def check_weights(model, weights):
    """Raise ValueError, naming the first one, unless the weights are the model's in name, shape and dtype."""
    expected = model.state_dict()
    for name in [*expected, *weights]:
        if name not in weights:
            raise ValueError(f"weight {name} is missing")
        if name not in expected:
            raise ValueError(f"weight {name} is unknown")
        if not torch.is_tensor(weights[name]) or weights[name].shape != expected[name].shape:
            raise ValueError(f"weight {name} has another shape than {tuple(expected[name].shape)}")
        if weights[name].dtype != expected[name].dtype:
            raise ValueError(f"weight {name} is {weights[name].dtype}, not {expected[name].dtype}")
