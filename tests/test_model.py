# SPDX-License-Identifier: MIT
import io
import os
import pickle

import pytest
import torch
from helpers import fake_gpu

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
    response_logprobs,
    split_by_length,
    token_logprobs,
)

SMALL = dict(
    vocab_size=30, width=16, layers=2, heads=4, kv_heads=2, experts=4, experts_per_token=2, expert_width=8, context=40
)
SPANS = [(1, 14), (3, 4), (5, 9), (2, 12), (7, 8)]  # of 5 rows, some full, some of one response token


def make(seed=0, **sizes):
    torch.manual_seed(seed)
    return Transformer(ModelConfig(**(SMALL | sizes)))


def tokens(rows, length, seed=0, vocab=30):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def random_routes(rows, length, seed=0):
    """Two different experts of the four for each token and layer: (B, T, L, K)."""
    scores = torch.rand(rows, length, 2, 4, generator=torch.Generator().manual_seed(seed))
    return scores.topk(2).indices


def close(a, b, atol=2e-5):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=atol)


def test_shapes():
    logits, routes = make()(tokens(3, 7))
    assert logits.shape == (3, 7, 30)
    assert routes.shape == (3, 7, 2, 2)


def test_causality():
    m = make()
    x = tokens(2, 12)
    y = x.clone()
    y[:, 8:] = (y[:, 8:] + 1) % 30
    a, _ = m(x)
    b, _ = m(y)
    close(a[:, :8], b[:, :8])
    assert (a[:, 8] - b[:, 8]).abs().max() > 1e-3


def test_a_row_depends_neither_on_its_neighbours_nor_on_padding():
    m = make()
    x = tokens(5, 9)
    together, _ = m(x)
    for i in range(5):
        close(m(x[i : i + 1])[0][0], together[i])
    padded = torch.cat([x, tokens(5, 6, seed=1)], 1)  # anything may stand there
    close(m(padded)[0][:, :9], together)


def test_attention_is_the_textbooks():
    """Positions, groups and scale against a direct computation: rotation matrices, loops over heads, explicit softmax."""
    m = make()
    attention = m.blocks[0].attention
    t = 6
    d = 4
    x = torch.randn(t, 16)
    q, k, v = attention.qkv(x).view(t, 8, d).split((4, 2, 2), 1)

    def norm_and_turn(heads):
        heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        out = torch.zeros_like(heads)
        for p in range(t):
            for i in range(d // 2):
                angle = torch.tensor(p * 10000.0 ** (-2 * i / d))
                a = heads[p, :, 2 * i]
                b = heads[p, :, 2 * i + 1]
                out[p, :, 2 * i] = angle.cos() * a - angle.sin() * b
                out[p, :, 2 * i + 1] = angle.sin() * a + angle.cos() * b
        return out

    q = norm_and_turn(q)
    k = norm_and_turn(k)
    y = torch.zeros(t, 4, d)
    for h in range(4):
        for p in range(t):
            weights = (k[: p + 1, h // 2] @ q[p, h] / d**0.5).softmax(0)
            y[p, h] = weights @ v[: p + 1, h // 2]
    rotations = model_module.rotary(torch.arange(t), m.config)
    close(attention(x[None], rotations, (1, t))[0], attention.out(y.flatten(1)))


def test_no_dropout_and_no_mode():
    m = make()
    x = tokens(2, 5)
    assert torch.equal(m.train()(x)[0], m.eval()(x)[0])


def test_parameter_count():
    m = make(experts=4, experts_per_token=1)
    total, active = m.num_parameters()
    assert total == sum(p.numel() for p in m.parameters())
    experts = 2 * 4 * (16 * 16 + 8 * 16)
    assert active == total - experts * 3 // 4 - 30 * 16


def test_how_a_new_model_starts():
    """Embeddings of std 0.5; what is added to the residual stream shrunk by the root of twice the layers."""
    torch.manual_seed(0)
    model = Transformer(ModelConfig(width=96, layers=2))
    assert model.embed.weight.std().item() == pytest.approx(0.5, rel=0.02)
    width = model.blocks[0].moe.w_out.size(1)
    assert model.blocks[0].moe.w_out.std().item() == pytest.approx(width**-0.5 / 2, rel=0.02)
    assert model.blocks[0].moe.w_in.std().item() == pytest.approx(96**-0.5, rel=0.02)


# The cache


@torch.no_grad()
def test_cached_decode_equals_full_forward():
    m = make()
    x = tokens(4, 20)
    full, routes = m(x)
    prompts = torch.tensor([5, 3, 8, 1])  # rows of different lengths side by side
    cache = KVCache(m, 4, 20)
    padded = torch.where(torch.arange(8) < prompts[:, None], x[:, :8], 0)
    h, taken, _ = m.features(padded, cache=cache)
    for row, n in enumerate(prompts):
        close(m.head(h[row, :n]), full[row, :n])
        assert torch.equal(taken[row, :n], routes[row, :n])
    for step in range(12):
        at = prompts + step
        h, taken = m.decode(x.gather(1, at[:, None])[:, 0], at, cache)
        close(m.head(h), full[torch.arange(4), at])
        assert torch.equal(taken, routes[torch.arange(4), at])


@torch.no_grad()
def test_a_prompt_read_once_serves_all_samples_of_its_group():
    m = make()
    x = tokens(2, 6)
    once = KVCache(m, 6, 8)
    m.features(x, cache=once)
    thrice = KVCache(m, 6, 8)
    m.features(x.repeat_interleave(3, 0), cache=thrice)
    assert once.used == thrice.used == 6
    close(once.kv, thrice.kv)
    assert once.kv[..., :6, :].abs().amin(-1).all()


def test_compaction_moves_rows_as_plain_indexing_does():
    cache = KVCache(make(), 5, 12)
    assert cache.kv.shape == (2, 2, 5, 2, 12, 4)
    cache.kv.normal_()
    cache.used = 7
    expected = cache.kv[:, :, [0, 4, 2], :, :7].clone()
    storage = cache.kv.data_ptr()
    cache.compact(3, source=torch.tensor([4]), target=torch.tensor([1]))  # rows 1 and 3 have ended
    assert cache.kv.shape == (2, 2, 3, 2, 12, 4)
    assert torch.equal(cache.kv[..., :7, :], expected)
    assert cache.kv.data_ptr() == storage  # nothing is allocated
    nothing = torch.tensor([], dtype=torch.long)
    cache.compact(2, source=nothing, target=nothing)  # the last row has ended: there is no gap
    assert torch.equal(cache.kv[..., :7, :], expected[:, :, :2])


@torch.no_grad()
def test_decoding_goes_on_after_compaction():
    m = make()
    x = tokens(5, 12)
    full, _ = m(x)
    cache = KVCache(m, 5, 12)
    m.features(x[:, :6], cache=cache)
    left = torch.tensor([0, 4, 2])
    cache.compact(3, source=torch.tensor([4]), target=torch.tensor([1]))
    for at in range(6, 12):
        h, _ = m.decode(x[left, at], torch.full((3,), at), cache)
        close(m.head(h), full[left, at])


# Log-probs of given tokens


def test_token_logprobs():
    m = make()
    x = tokens(3, 10)
    for temperature in (1.0, 0.5):
        logprobs = token_logprobs(m, x, temperature=temperature)
        want = (m(x)[0][:, :-1] / temperature).log_softmax(-1).gather(-1, x[:, 1:, None])[..., 0]
        close(logprobs[:, 1:], want, atol=1e-5)
        assert (logprobs[:, 0] == 0).all()
        assert logprobs.dtype == torch.float32


def one_row_at_a_time(m, x, spans, temperature, routes):
    """What `response_logprobs` returns, slowly: a forward pass for each row without its padding, token by token."""
    out = torch.zeros(x.shape)
    for row, (start, end) in enumerate(spans):
        row_routes = None if routes is None else routes[row : row + 1, :end]
        logits, _ = m(x[row : row + 1, :end], routes=row_routes)
        for t in range(start, end):
            out[row, t] = (logits[0, t - 1] / temperature).log_softmax(-1)[x[row, t]]
    return out


@pytest.mark.parametrize("routes", [None, random_routes(5, 14)], ids=["routed", "replayed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_response_logprobs_equal_those_of_each_row_alone(routes, temperature):
    """In value and gradient; and `token_logprobs`, which computes everything, is a third way to the same."""
    m = make()
    x = tokens(5, 14)
    mask = torch.stack([(torch.arange(14) >= start) & (torch.arange(14) < end) for start, end in SPANS])
    ways = [
        one_row_at_a_time(m, x, SPANS, temperature, routes),
        response_logprobs(m, x, SPANS, temperature=temperature, routes=routes),
        torch.where(mask, token_logprobs(m, x, temperature=temperature, routes=routes), 0),
    ]
    weights = torch.rand(5, 14)
    gradients = [torch.autograd.grad((logprobs * weights).sum(), list(m.parameters())) for logprobs in ways]
    for logprobs, gradient in zip(ways[1:], gradients[1:]):
        close(logprobs, ways[0], atol=1e-5)
        assert (logprobs[~mask] == 0).all()
        assert logprobs.dtype == torch.float32
        for a, b in zip(gradient, gradients[0]):
            close(a, b)


def test_response_logprobs_hand_over_the_routers_probabilities_of_the_packed_tokens():
    m = make()
    x = tokens(5, 14)
    logprobs, probs, packed = response_logprobs(m, x, SPANS, output_router_probs=True)
    assert torch.equal(logprobs, response_logprobs(m, x, SPANS))
    places = []  # all but the last token of each row, prompt included, in rows of 13
    for row, (_, end) in enumerate(SPANS):
        places += range(13 * row, 13 * row + end - 1)
    assert packed.tolist() == places
    assert probs.shape == (len(places), 2, 4)
    _, _, everywhere = m.features(x[:, :-1])
    close(probs, everywhere.flatten(0, 1)[packed])


def test_response_logprobs_never_look_at_padding():
    m = make()
    x = tokens(5, 14)
    other = x.clone()
    for row, (_, end) in enumerate(SPANS):
        other[row, end:] = 29 - other[row, end:]
    assert not torch.equal(x, other)
    assert torch.equal(response_logprobs(m, x, SPANS), response_logprobs(m, other, SPANS))


def test_a_row_without_a_response_scores_nothing():
    m = make()
    x = tokens(3, 6)
    spans = [(2, 2), (1, 1), (0, 0)]
    logprobs = response_logprobs(m, x, spans)
    assert logprobs.shape == (3, 6)
    assert (logprobs == 0).all()
    logprobs.sum().backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in m.parameters())


def test_no_rows_and_no_response_tokens():
    """(0, T) and (B, 0): empty results whose gradients are 0, not an error from inside torch."""
    m = make()
    for tokens in (torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 1, dtype=torch.long)):
        assert token_logprobs(m, tokens).shape == response_logprobs(m, tokens, []).shape == tokens.shape
    m.zero_grad()
    response_logprobs(m, torch.zeros(2, 4, dtype=torch.long), [(2, 2), (3, 3)]).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in m.parameters())


def test_rows_by_length():
    lengths = [5, 1, 9, 3, 3]
    assert split_by_length(lengths, 21) == [[1, 3, 4, 0, 2]]
    assert split_by_length(lengths, 10) == [[1, 3, 4, 0], [2]]
    assert split_by_length([], 5) == []
    batches = split_by_length(lengths, 1)
    assert sorted(row for batch in batches for row in batch) == [0, 1, 2, 3, 4]
    assert split_by_length([], 10) == [] and split_by_length([0, 0], 10) == [[0, 1]]


# Routing replay


def test_replaying_the_routes_taken_is_a_no_op_bit_for_bit():
    m = make()
    x = tokens(3, 10)
    logits, routes = m(x)
    again, same = m(x, routes=routes.to(torch.uint8))
    assert torch.equal(logits, again)
    assert torch.equal(routes, same)
    assert torch.equal(token_logprobs(m, x), token_logprobs(m, x, routes=routes))
    assert torch.equal(response_logprobs(m, x, [(2, 10)] * 3), response_logprobs(m, x, [(2, 10)] * 3, routes=routes))


def test_replayed_routes_are_those_of_their_own_row_token_and_layer():
    """As many rows as layers and tokens, so that no check of shapes could tell (B, T, L, K) from another order."""
    m = make()
    x = tokens(2, 2)
    routes = random_routes(2, 2)
    logits, used = m(x, routes=routes)
    assert torch.equal(used, routes)
    for row in range(2):
        close(m(x[row : row + 1], routes=routes[row : row + 1])[0][0], logits[row])
    for layer in range(2):  # the last token of row 1 alone goes through other experts
        changed = routes.clone()
        changed[1, 1, layer] = torch.tensor([e for e in range(4) if e not in routes[1, 1, layer]])
        moved = (m(x, routes=changed)[0] - logits).abs().amax(-1)
        assert (moved > 1e-3).tolist() == [[False, False], [False, True]]
        _, used = m(x, routes=changed)
        assert torch.equal(used, changed)
    close(m.features(x, routes=routes)[2][:, :, 0], m.features(x)[2][:, :, 0])  # layer 0's router saw the same


def test_replaying_foreign_routes_gives_the_router_gradient():
    m = make()
    x = tokens(3, 10)
    token_logprobs(m, x, routes=(m(x)[1] + 1) % 4).sum().backward()
    assert all(block.moe.router.grad.abs().sum() > 0 for block in m.blocks)


# What does not fit


def test_bad_input_says_so():
    m = make()
    with pytest.raises(ValueError, match="exceeds the model's context of 40"):
        m(tokens(1, 41))
    for shape in ((2, 5, 2), (2, 3, 5, 2), (3, 5, 2, 1), (3, 4, 2, 2)):
        with pytest.raises(ValueError, match=r"must be \(B, T, L, K\), for tokens \(3, 5\)"):
            m(tokens(3, 5), routes=torch.zeros(shape))


@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(width=18), "divisible by 2 x heads"),
        (dict(kv_heads=3), "divisible by kv_heads"),
        (dict(experts_per_token=5), "exceeds experts"),
        (dict(layers=0), "at least 1"),
        (dict(width=16.0), "whole number"),
        (dict(experts=300), "at most 256"),
    ],
)
def test_sizes_that_do_not_fit_say_so(sizes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**(SMALL | sizes))


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
            old = torch.zeros(4, 9)
            mask = torch.ones(4, 9, dtype=torch.bool)
            advantages = torch.randn(4, 9)
        logprobs = response_logprobs(m, x, [(2, 9), (3, 5), (1, 7), (4, 6)])
        for loss, a in ((gspo_loss, advantages[:, 0]), (grpo_loss, advantages[:, 0]), (gspo_token_loss, advantages)):
            value, metrics = loss(logprobs, old, a, mask)
            value.backward(retain_graph=True)
            assert all(v.device == device for v in metrics.values())
        assert all(p.grad.device == device for p in m.parameters())
        token_logprobs(m, x, routes=m(x)[1])
        with pytest.raises(RuntimeError, match="device"):  # the check checks
            response_logprobs(m, torch.zeros(4, 9, dtype=torch.long, device="cpu"), [(2, 9)] * 4)


# Checkpoints


def saved(tmp_path, **changes):
    content = checkpoint(make(), task="chain-sum") | changes
    torch.save(content, tmp_path / "m.pt")
    return tmp_path / "m.pt"


def test_checkpoint_round_trip(tmp_path):
    m, metadata = load_model(saved(tmp_path))
    assert metadata == {"task": "chain-sum"}
    assert m.config == ModelConfig(**SMALL)
    assert not m.training
    assert torch.equal(m(tokens(2, 5))[0], make()(tokens(2, 5))[0])


def test_a_checkpoint_holds_its_format_sizes_weights_and_facts():
    content = checkpoint(make(), task="chain-sum")
    assert content.keys() == {"format", "config", "weights", "metadata"}
    assert content["format"] == 2
    assert content["config"] == SMALL | {"rope_theta": 10000.0}
    assert content["metadata"] == {"task": "chain-sum"}


def test_a_checkpoint_of_the_first_format_is_refused_in_one_line(tmp_path):
    content = checkpoint(make(), task="chain-sum") | {"format": 1}
    content["about"] = content.pop("metadata")  # as they were called in it
    path = tmp_path / "old.pt"
    torch.save(content, path)
    with pytest.raises(ValueError) as error:
        load_model(path)
    assert str(error.value) == f"{path} has format 1, this program reads format 2"


def weights_with(name, value):
    weights = make().state_dict()
    weights[name] = value
    return weights


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"format": 1}, "has format 1, this program reads format 2"),
        ({"format": 3}, "has format 3, this program reads format 2"),
        ({"format": "2"}, "has format '2', this"),
        ({"format": torch.ones(2)}, r"has format tensor\(\[1., 1.\]\), this"),
        ({"config": {"width": 16}}, "does not fit"),
        ({"config": SMALL | {"depth": 3}}, "unexpected keyword"),
        ({"config": SMALL | {"heads": 3}}, "divisible"),
        ({"config": SMALL | {"width": 10**9}}, "size mismatch"),
        ({"config": 5}, "does not fit"),
        ({"metadata": 5}, "does not fit"),
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
    assert "\n" not in str(error.value)
    assert "m.pt" in str(error.value)


@pytest.mark.parametrize("name", ["format", "config", "weights", "metadata"])
def test_a_checkpoint_that_lacks_something_says_so(tmp_path, name):
    content = checkpoint(make(), task="chain-sum")
    del content[name]
    torch.save(content, tmp_path / "m.pt")
    message = "does not fit this program: 'metadata'" if name == "metadata" else "is not a checkpoint of this project"
    with pytest.raises(ValueError, match=f"m.pt {message}"):
        load_model(tmp_path / "m.pt")


def test_damaged_and_foreign_files(tmp_path):
    path = saved(tmp_path)
    whole = path.read_bytes()
    for content in (
        b"",
        whole[: len(whole) // 2],
        b"hello",
        whole[:-50],
        pickle.dumps({"format": 2}),
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
    torch.save({"format": 2, "config": Payload(marker), "weights": {}, "metadata": {}}, buffer)
    for content in (pickle.dumps(Payload(marker)), buffer.getvalue()):
        (tmp_path / "evil.pt").write_bytes(content)
        with pytest.raises(ValueError, match="not a checkpoint"):
            load_model(tmp_path / "evil.pt")
        assert not os.path.exists(marker)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)  # the payload works, where it is let in
    assert os.path.exists(marker)
