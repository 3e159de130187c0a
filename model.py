# SPDX-License-Identifier: MIT
"""A decoder-only Mixture-of-Experts transformer, a small Qwen3-MoE: the policy.

Pre-norm RMSNorm, rotary positions (RoPE), grouped-query attention with QK-norm, SwiGLU experts (`moe.py`), no dropout
and nothing else that differs between training and sampling or that depends on a row's neighbours. Rows are padded on
the right, so causal attention alone keeps padding out of sight.

Letters: B sequences, T tokens, S cache slots, C width, H query heads, J key/value heads, D head size, L layers,
E experts, K experts per token, V vocabulary.
"""

from dataclasses import asdict, dataclass

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
    def __init__(self, config):
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.qkv = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_size, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.q_norm = nn.Parameter(torch.ones(config.head_size))
        self.k_norm = nn.Parameter(torch.ones(config.head_size))

    def forward(self, x, rotations, cache=None, layer=0, step=None):
        b, t, c = x.shape
        h, j, d = self.heads, self.kv_heads, self.head_size
        q, k, v = self.qkv(x).view(b, t, h + 2 * j, d).split((h, j, j), dim=2)  # (B, T, H or J, D)
        q = rotate(F.rms_norm(q, (d,), self.q_norm, 1e-6), rotations).to(v.dtype)
        k = rotate(F.rms_norm(k, (d,), self.k_norm, 1e-6), rotations).to(v.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or J, T, D)

        if step is None:  # whole sequences from position 0, to train on or to fill the cache with
            if cache is not None:
                cache.k[layer, :, :, :t], cache.v[layer, :, :, :t] = k, v
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # (B, H, T, D)
        else:  # one token per row, each at its own position
            rows, positions, visible = step
            keys, values = cache.k[layer], cache.v[layer]  # (B, J, S, D)
            keys[rows, :, positions], values[rows, :, positions] = k[:, :, 0], v[:, :, 0]
            keys, values = keys[:, :, : cache.used], values[:, :, : cache.used]
            # The H/J query heads of a key head stand where query positions would: no key is copied for them.
            q = q.reshape(b, j, h // j, d)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible).view(b, h, 1, d)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


def rotate(x, rotations):
    """x: (B, T, H, D), its neighbouring pairs read as complex numbers; rotations: (B or 1, T, D/2). float32 inside."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations[:, :, None]).flatten(-2)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.moe = MoE(config.width, config.experts, config.experts_per_token, config.expert_width)

    def forward(self, x, rotations, routes=None, **cached):
        x = x + self.attention(self.attention_norm(x), rotations, **cached)
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
        return self.head(x), routes

    def features(self, tokens, *, routes=None, cache=None, positions=None):
        """The last hidden state (B, T, C), the routes taken (L, B, T, K) and the router's probabilities (L, B, T, E).

        cache: a `KVCache` to fill from slot 0, or, with positions (B,), to decode one token per row: tokens is then
        (B, 1), and its row b goes to slot positions[b] and attends to all slots up to it.
        """
        config, (b, t), device = self.config, tokens.shape, tokens.device
        if routes is not None and tuple(routes.shape) != (config.layers, b, t, config.experts_per_token):
            raise ValueError(f"routes {tuple(routes.shape)} must be (L, B, T, K), for tokens {(b, t)}")
        if cache is not None:
            cache.used += t
        if (cache.used if cache is not None else t) > config.context:
            raise ValueError(f"a sequence of {t} tokens exceeds the model's context of {config.context}")
        step = None
        if positions is None:
            rotations = rotary(torch.arange(t, device=device), config)[None]  # (1, T, D/2)
        else:
            rotations = rotary(positions, config)[:, None]  # (B, 1, D/2)
            visible = torch.arange(cache.used, device=device) <= positions[:, None]  # (B, S)
            step = (torch.arange(b, device=device), positions, visible[:, None, None])
        x = self.embed(tokens)  # (B, T, C)
        all_routes, all_probs = [], []
        for layer, block in enumerate(self.blocks):
            replay = None if routes is None else routes[layer]
            x, taken, probs = block(x, rotations, replay, cache=cache, layer=layer, step=step)
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


def score(model, tokens, *, temperature=1.0, routes=None):
    """(logprobs (B, T), probs (L, B, T-1, E)): `token_logprobs`, and the router's probabilities on the way."""
    if routes is not None:
        routes = routes[:, :, :-1]
    x, _, probs = model.features(tokens[:, :-1], routes=routes)  # what follows the last token is of no interest
    logits = model.head(x).float() / temperature  # (B, T-1, V)
    targets = tokens[:, 1:]
    logprobs = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return F.pad(logprobs, (1, 0)), probs


def token_logprobs(model, tokens, *, temperature=1.0, routes=None):
    """log pi(tokens[:, t] | tokens[:, :t]) at [:, t], (B, T) in float32; column 0, which nothing predicts, is 0.

    tokens: (B, T), right-padded. temperature divides the logits, as in sampling. routes: (L, B, T, K) to replay.
    """
    return score(model, tokens, temperature=temperature, routes=routes)[0]


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
