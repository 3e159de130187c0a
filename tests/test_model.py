# SPDX-License-Identifier: MIT
import io
import os
import pickle

import pytest
import torch
from cases import fake_gpu

import model as model_module
import moe
from grpo import grpo_loss
from gspo import gspo_loss, gspo_token_loss
from model import (
    KVCache,
    ModelConfig,
    Transformer,
    checkpoint,
    load_model,
    score,
    split_by_length,
    token_logprobs,
)

SMALL = dict(
    vocab_size=30, width=16, layers=2, heads=4, kv_heads=2, experts=4, experts_per_token=2, expert_width=8, context=40
)


def make(seed=0, **sizes):
    torch.manual_seed(seed)
    return Transformer(ModelConfig(**(SMALL | sizes)))


def tokens(rows, length, seed=0, vocab=30):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def close(a, b, atol=2e-5):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=atol)


def test_shapes():
    logits, routes = make()(tokens(3, 7))
    assert logits.shape == (3, 7, 30) and routes.shape == (2, 3, 7, 2)


def test_causality():
    m, x = make(), tokens(2, 12)
    y = x.clone()
    y[:, 8:] = (y[:, 8:] + 1) % 30
    a, b = m(x)[0], m(y)[0]
    close(a[:, :8], b[:, :8])
    assert (a[:, 8] - b[:, 8]).abs().max() > 1e-3


def test_a_row_depends_neither_on_its_neighbours_nor_on_padding():
    m, x = make(), tokens(5, 9)
    together = m(x)[0]
    for i in range(5):
        close(m(x[i : i + 1])[0][0], together[i])
    padded = torch.cat([x, tokens(5, 6, seed=1)], 1)  # anything may stand there
    close(m(padded)[0][:, :9], together)


def test_attention_is_the_textbooks():
    """Positions, groups and scale against a direct computation: rotation matrices, loops over heads, explicit softmax."""
    m, t = make(), 6
    attention, d = m.blocks[0].attention, 4
    x = torch.randn(t, 16)
    q, k, v = attention.qkv(x).view(t, 8, d).split((4, 2, 2), 1)

    def norm_and_turn(heads):
        heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        out = torch.zeros_like(heads)
        for p in range(t):
            for i in range(d // 2):
                angle = torch.tensor(p * 10000.0 ** (-2 * i / d))
                c, s = angle.cos(), angle.sin()
                a, b = heads[p, :, 2 * i], heads[p, :, 2 * i + 1]
                out[p, :, 2 * i], out[p, :, 2 * i + 1] = c * a - s * b, s * a + c * b
        return out

    q, k = norm_and_turn(q), norm_and_turn(k)
    y = torch.zeros(t, 4, d)
    for h in range(4):
        for p in range(t):
            weights = (k[: p + 1, h // 2] @ q[p, h] / d**0.5).softmax(0)
            y[p, h] = weights @ v[: p + 1, h // 2]
    rotations = model_module.rotary(torch.arange(t), m.config)
    close(attention(x[None], rotations, (1, t))[0], attention.out(y.flatten(1)))


def test_cached_decode_equals_full_forward():
    m, x = make(), tokens(4, 20)
    full, routes = m(x)
    prompts = torch.tensor([5, 3, 8, 1])  # rows of different lengths side by side
    cache = KVCache(m, 4, 20)
    padded = torch.where(torch.arange(8) < prompts[:, None], x[:, :8], 0)
    with torch.no_grad():
        h, taken, _ = m.features(padded, cache=cache)
        for row, n in enumerate(prompts):
            close(m.head(h[row, :n]), full[row, :n])
            assert torch.equal(taken[:, row, :n], routes[:, row, :n])
        for step in range(12):
            at = prompts + step
            h, taken = m.decode(x.gather(1, at[:, None])[:, 0], at, cache)
            close(m.head(h), full[torch.arange(4), at])
            assert torch.equal(taken, routes[:, torch.arange(4), at])


def test_cache_shrinks_to_the_rows_that_are_left():
    m, x = make(), tokens(5, 12)
    full = m(x)[0]
    cache = KVCache(m, 5, 12)
    with torch.no_grad():
        m.features(x[:, :6], cache=cache)
        cache.shrink(3, source=torch.tensor([4]), target=torch.tensor([1]))  # rows 1 and 3 have ended
        for at in range(6, 12):
            left = torch.tensor([0, 4, 2])
            h, _ = m.decode(x[left, at], torch.full((3,), at), cache)
            close(m.head(h), full[left, at])


def test_score_equals_token_logprobs_in_value_and_gradient():
    """`score` skips padding and prompts; `token_logprobs` computes everything. Routing replay included."""
    m, x = make(), tokens(5, 14)
    spans = [(1, 14), (3, 4), (5, 9), (2, 12), (7, 8)]
    mask = torch.stack([(torch.arange(14) >= s) & (torch.arange(14) < e) for s, e in spans])
    for routes in (None, (m(x)[1] + 1) % 4):
        got, probs, read = score(m, x, spans, temperature=0.7, routes=routes)
        want = token_logprobs(m, x, temperature=0.7, routes=routes)
        close(got, torch.where(mask, want, 0), atol=1e-5)
        assert probs.shape == (2, sum(e - 1 for _, e in spans), 4) and len(read) == probs.size(1)
        weights = torch.rand(5, 14)
        grads = [torch.autograd.grad((w * weights * mask).sum(), list(m.parameters())) for w in (got, want)]
        for a, b in zip(*grads):
            close(a, b)


def test_rows_by_length():
    lengths = [5, 1, 9, 3, 3]
    assert split_by_length(lengths, 21) == [[1, 3, 4, 0, 2]] and split_by_length(lengths, 10) == [[1, 3, 4, 0], [2]]
    assert sorted(sum(split_by_length(lengths, 1), [])) == [0, 1, 2, 3, 4] and split_by_length([], 5) == []  # noqa: RUF017


def test_token_logprobs():
    m, x = make(), tokens(3, 10)
    for temperature in (1.0, 0.5):
        logprobs = token_logprobs(m, x, temperature=temperature)
        want = (m(x)[0][:, :-1] / temperature).log_softmax(-1).gather(-1, x[:, 1:, None])[..., 0]
        close(logprobs[:, 1:], want, atol=1e-5)
        assert (logprobs[:, 0] == 0).all() and logprobs.dtype == torch.float32


def test_replaying_the_routes_taken_is_a_no_op_bit_for_bit():
    m, x = make(), tokens(3, 10)
    logits, routes = m(x)
    again, same = m(x, routes=routes.to(torch.uint8))
    assert torch.equal(logits, again) and torch.equal(routes, same)
    assert torch.equal(token_logprobs(m, x), token_logprobs(m, x, routes=routes))


def test_replaying_foreign_routes_gives_the_router_gradient():
    m, x = make(), tokens(3, 10)
    token_logprobs(m, x, routes=(m(x)[1] + 1) % 4).sum().backward()
    assert all(block.moe.router.grad.abs().sum() > 0 for block in m.blocks)


def test_no_dropout_and_no_mode():
    m, x = make(), tokens(2, 5)
    assert torch.equal(m.train()(x)[0], m.eval()(x)[0])


def test_bad_input_says_so():
    m = make()
    with pytest.raises(ValueError, match="exceeds the model's context of 40"):
        m(tokens(1, 41))
    with pytest.raises(ValueError, match=r"must be \(L, B, T, K\)"):
        m(tokens(2, 5), routes=torch.zeros(2, 5, 2))
    for sizes, message in [
        (dict(width=18), "divisible by 2 x heads"),
        (dict(kv_heads=3), "divisible by kv_heads"),
        (dict(experts_per_token=5), "exceeds experts"),
        (dict(layers=0), "at least 1"),
        (dict(width=16.0), "whole number"),
        (dict(experts=300), "at most 256"),
    ]:
        with pytest.raises(ValueError, match=message):
            ModelConfig(**(SMALL | sizes))


def test_parameter_count():
    m = make(experts=4, experts_per_token=1)
    total, active = m.num_parameters()
    assert total == sum(p.numel() for p in m.parameters())
    experts = 2 * 4 * (16 * 16 + 8 * 16)
    assert active == total - experts * 3 // 4 - 30 * 16


# Devices: tensors that only claim to be on a GPU raise where one on the CPU would mix with them


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_backward_and_losses_stay_on_the_device(dtype, monkeypatch):
    if dtype == torch.bfloat16:  # what an NVIDIA GPU does
        monkeypatch.setattr(moe, "can_group", lambda *weights: True)
    with fake_gpu() as device:
        with device:  # only here, so that a forgotten device= elsewhere shows
            torch.set_default_dtype(dtype)
            m = Transformer(ModelConfig(**SMALL))
            torch.set_default_dtype(torch.float32)
            x = torch.randint(0, 30, (4, 9))
            old, mask, advantages = torch.zeros(4, 9), torch.ones(4, 9, dtype=torch.bool), torch.randn(4, 9)
        logprobs, _, _ = score(m, x, [(2, 9), (3, 5), (1, 7), (4, 6)])
        for loss, a in ((gspo_loss, advantages[:, 0]), (grpo_loss, advantages[:, 0]), (gspo_token_loss, advantages)):
            value, metrics = loss(logprobs, old, a, mask)
            value.backward(retain_graph=True)
            assert all(v.device == device for v in metrics.values())
        assert all(p.grad.device == device for p in m.parameters())
        token_logprobs(m, x, routes=m(x)[1])
        with pytest.raises(RuntimeError, match="device"):  # the check checks
            score(m, torch.zeros(4, 9, dtype=torch.long, device="cpu"), [(2, 9)] * 4)


# Checkpoints


def saved(tmp_path, **changes):
    content = checkpoint(make(), task="chain-sum") | changes
    torch.save(content, tmp_path / "m.pt")
    return tmp_path / "m.pt"


def test_checkpoint_round_trip(tmp_path):
    m, about = load_model(saved(tmp_path))
    assert about == {"task": "chain-sum"} and m.config == ModelConfig(**SMALL)
    assert torch.equal(m(tokens(2, 5))[0], make()(tokens(2, 5))[0])


def weights_with(name, value):
    weights = make().state_dict()
    weights[name] = value
    return weights


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": 2}, "has format 2, this program reads format 1"),
        ({"format": "1"}, "has format 1, this"),
        ({"extra": 1}, "not a checkpoint of this project"),
        ({"config": {"width": 16}}, "does not fit"),
        ({"config": SMALL | {"depth": 3}}, "unexpected keyword"),
        ({"config": SMALL | {"heads": 3}}, "divisible"),
        ({"config": SMALL | {"width": 10**9}}, "size mismatch"),
        ({"config": 5}, "does not fit"),
        ({"about": 5}, "does not fit"),
        ({"weights": {}}, "Missing key.*embed.weight"),
        ({"weights": 5}, "does not fit"),
        ({"weights": weights_with("new", torch.zeros(1))}, "Unexpected key.*new"),
        ({"weights": weights_with("norm.weight", torch.zeros(3))}, "size mismatch for norm.weight"),
        ({"weights": weights_with("norm.weight", 3)}, "norm.weight"),
        ({"weights": weights_with("norm.weight", torch.zeros(16).int())}, "norm.weight|gradient"),
    ],
)
def test_a_checkpoint_that_does_not_fit_says_why_in_one_line(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        load_model(saved(tmp_path, **changes))
    assert "\n" not in str(error.value) and "m.pt" in str(error.value)


def test_damaged_and_foreign_files(tmp_path):
    path = saved(tmp_path)
    whole = path.read_bytes()
    for content in (
        b"",
        whole[: len(whole) // 2],
        b"hello",
        whole[:-50],
        pickle.dumps({"format": 1}),
        b"PK\x03\x04junk",
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not a checkpoint"):
            load_model(path)
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="not a checkpoint of this project"):
        load_model(path)
    with pytest.raises(OSError):
        load_model(tmp_path / "none.pt")
    with pytest.raises(OSError):
        load_model(tmp_path)


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_a_malicious_pickle_executes_nothing(tmp_path):
    marker = str(tmp_path / "marker")
    buffer = io.BytesIO()
    torch.save({"format": 1, "config": Payload(marker), "weights": {}, "about": {}}, buffer)
    for content in (pickle.dumps(Payload(marker)), buffer.getvalue()):
        (tmp_path / "evil.pt").write_bytes(content)
        with pytest.raises(ValueError, match="not a checkpoint"):
            load_model(tmp_path / "evil.pt")
        assert not os.path.exists(marker)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)  # the payload works, where it is let in
    assert os.path.exists(marker)
