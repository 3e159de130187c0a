# SPDX-License-Identifier: MIT
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import run_alone

import moe
from moe import MoE, all_experts, can_group, expert_load, grouped_experts, load_balance_loss, routing_change

# Layers


def make(width=16, experts=8, k=2, expert_width=12, seed=0):
    torch.manual_seed(seed)
    return MoE(width, experts, k, expert_width)


def textbook(layer, x):
    """One token at a time, from the formula: softmax, top k, renormalise, sum of gated SwiGLU experts."""
    out = []
    for token in x:
        probs = (layer.router @ token).softmax(0)
        top = probs.topk(layer.experts_per_token)
        y = 0
        for p, e in zip(top.values / top.values.sum(), top.indices):
            gate, up = (token @ layer.w_in[e]).chunk(2)
            y = y + p * ((F.silu(gate) * up) @ layer.w_out[e])
        out.append(y)
    return torch.stack(out)


def test_equals_the_formula_token_by_token():
    layer = make()
    x = torch.randn(20, 16)
    crowd = torch.cat([x[:1].expand(100, 16), x])  # many tokens on one expert: nothing is dropped
    torch.testing.assert_close(layer(crowd)[0][99:], textbook(layer, crowd[99:]), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm: all_experts serves")
@pytest.mark.parametrize("experts, k", [(8, 2), (64, 2), (4, 4), (5, 1)])
def test_fast_path_equals_the_plain_one_in_value_and_gradient(experts, k):
    results = []
    for run in (grouped_experts, all_experts):
        torch.manual_seed(1)
        x = torch.randn(50, 16, requires_grad=True)
        w_in = torch.randn(experts, 16, 24, requires_grad=True)
        w_out = torch.randn(experts, 12, 16, requires_grad=True)
        weights = torch.rand(50, k, requires_grad=True)
        routes = torch.rand(50, experts).topk(k).indices  # some experts get no token
        assert can_group(50 * k, w_in, w_out)
        y = run(x, routes, weights, w_in, w_out)
        y.backward(torch.randn(50, 16, generator=torch.Generator().manual_seed(2)))
        results.append((y, x.grad, w_in.grad, w_out.grad, weights.grad))
    for fast, slow in zip(*results):
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-4)


def test_odd_sizes_and_float64_and_a_torch_without_grouped_mm_take_the_plain_path(monkeypatch):
    assert not can_group(9, torch.zeros(2, 6, 5))
    assert not can_group(9, torch.zeros(2, 8, 8, dtype=torch.float64))
    monkeypatch.setattr(moe, "grouped_experts", None)
    layer = make(width=6, expert_width=5)
    x = torch.randn(9, 6)
    torch.testing.assert_close(layer(x)[0], textbook(layer, x), rtol=1e-5, atol=1e-6)
    assert layer.double()(x.double())[0].dtype == torch.float64
    monkeypatch.delattr(F, "grouped_mm", raising=False)
    layer = make()
    x = torch.randn(9, 16)
    torch.testing.assert_close(layer(x)[0], textbook(layer, x), rtol=1e-5, atol=1e-6)


def test_replaying_the_routes_taken_is_a_no_op_bit_for_bit():
    layer = make()
    x = torch.randn(3, 5, 16, requires_grad=True)
    y, routes, _ = layer(x)
    grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    again, same, _ = layer(x, routes.to(torch.uint8))
    grads_again = torch.autograd.grad(again.square().sum(), [x, *layer.parameters()])
    assert torch.equal(y, again)
    assert torch.equal(routes, same)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again))


def test_replaying_foreign_routes_uses_them_and_trains_the_router():
    layer = make()
    x = torch.randn(6, 16)
    foreign = (layer(x)[1] + 1) % 8
    y, routes, probs = layer(x, foreign)
    assert torch.equal(routes, foreign)
    weights = probs.gather(-1, foreign)
    weights = weights / weights.sum(-1, keepdim=True)
    expected = all_experts(x, foreign, weights, layer.w_in, layer.w_out)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    assert layer.router.grad.abs().sum() > 0


def test_replaying_experts_of_no_probability_stays_finite():
    layer = make(32, 8, 2, 32)
    x = torch.randn(20, 32)
    layer.router.data *= 400
    y, _, probs = layer(x, (-layer(x)[2]).topk(2).indices)
    y.square().sum().backward()
    assert (probs.amin(-1) == 0).any()
    assert y.isfinite().all()
    assert layer.router.grad.isfinite().all()


def test_the_router_stays_in_float32():
    """Its probabilities are bit for bit those of float32, whatever precision the rest of the layer has."""
    layer = make()
    x = torch.randn(200, 16)
    expected = F.linear(x, layer.router).softmax(-1)
    rounded = F.linear(x.bfloat16(), layer.router.bfloat16()).float().softmax(-1)
    choices = expected.topk(2).indices
    assert not torch.equal(rounded.topk(2).indices, choices), "rounding must matter for this test to mean anything"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, routes, probs = layer(x)
    assert y.dtype == torch.bfloat16
    assert probs.dtype == torch.float32
    assert torch.equal(probs, expected)
    assert torch.equal(routes, choices)
    layer = layer.bfloat16()
    y, _, probs = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.equal(probs, F.linear(x.bfloat16().float(), layer.router.float()).softmax(-1))


@pytest.mark.parametrize("shape", [(0, 16), (0, 5, 16), (3, 0, 16)])
@pytest.mark.parametrize("width", [16, 6])  # the fast path and the plain one
def test_no_tokens_pass_through(shape, width):
    layer = make(width=width, expert_width=width)
    y, routes, probs = layer(torch.randn(*shape[:-1], width))
    assert y.shape == (*shape[:-1], width)
    assert routes.shape == (*shape[:-1], 2)
    assert probs.shape == (*shape[:-1], 8)
    (y.sum() + probs.sum()).backward()
    assert all((p.grad == 0).all() for p in layer.parameters())


# What is said of routes


def test_expert_load_by_hand():
    routes = torch.tensor([[0, 1], [0, 2], [0, 1]])
    assert expert_load(routes, 4).tolist() == pytest.approx([3 / 6, 2 / 6, 1 / 6, 0])
    assert expert_load(routes.to(torch.uint8), 4).tolist() == pytest.approx([3 / 6, 2 / 6, 1 / 6, 0])
    assert expert_load(routes[:0], 4).tolist() == [0, 0, 0, 0]


def test_load_balance_loss_by_hand():
    routes = torch.tensor([[0, 1], [0, 2], [0, 1]])
    probs = torch.tensor([[0.6, 0.3, 0.1, 0.0], [0.5, 0.1, 0.4, 0.0], [0.7, 0.2, 0.1, 0.0]])
    mean = [1.8 / 3, 0.6 / 3, 0.6 / 3, 0]
    expected = 4 * (3 / 6 * mean[0] + 2 / 6 * mean[1] + 1 / 6 * mean[2])
    assert load_balance_loss(probs, routes).item() == pytest.approx(expected)
    even = torch.tensor([[0, 1], [2, 3]])
    assert load_balance_loss(torch.full((2, 4), 0.25), even).item() == pytest.approx(1)
    one_pair = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    assert load_balance_loss(one_pair, torch.tensor([[0, 1]])).item() == pytest.approx(4 / 2)  # its most, E/K
    probs = torch.tensor([[0.7, 0.3], [0.6, 0.4]], requires_grad=True)
    load_balance_loss(probs, torch.tensor([[0], [0]])).backward()
    assert probs.grad.tolist() == [[1, 0], [1, 0]]  # E * load_e / N: away from the expert that has all the load


def test_load_balance_loss_of_no_tokens_is_0():
    probs = torch.zeros(0, 4, requires_grad=True)
    balance = load_balance_loss(probs, torch.zeros(0, 2, dtype=torch.long))
    assert balance == 0
    balance.backward()
    assert probs.grad.shape == (0, 4)


def test_routing_change_by_hand():
    """Of 2 tokens and 2 layers, K = 2: the order of the experts does not matter, nor which of the two was replaced."""
    probs = torch.tensor(
        [
            [[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]],  # now 0 1 and 3 2
            [[0.4, 0.1, 0.3, 0.2], [0.0, 0.6, 0.1, 0.3]],  # now 0 2 and 1 3
        ]
    )
    same = torch.tensor([[[1, 0], [3, 2]], [[0, 2], [3, 1]]])
    assert routing_change(probs, same).tolist() == [0, 8]
    one_each = torch.tensor([[[1, 3], [3, 0]], [[0, 2], [2, 1]]])  # but none in layer 0 of token 1
    assert routing_change(probs, one_each).tolist() == [3, 8]
    both = torch.tensor([[[2, 3], [0, 1]], [[3, 1], [2, 0]]])
    assert routing_change(probs, both).tolist() == [8, 8]
    assert routing_change(probs, both.to(torch.uint8)).tolist() == [8, 8]  # as the sampler records them
    assert routing_change(probs[:0], both[:0]).tolist() == [0, 0]


# The two paths: which is taken, and at what cost


@pytest.mark.parametrize(
    "capability, dtype, few, many",
    [
        ((7, 5), torch.bfloat16, False, False),  # Turing: F.grouped_mm is not to be had
        ((8, 9), torch.bfloat16, False, True),  # Ampere, Ada: it loops and waits, which many rows outweigh
        ((9, 0), torch.bfloat16, True, True),
        ((9, 0), torch.float32, False, False),
    ],
)
def test_which_gpu_groups(monkeypatch, capability, dtype, few, many):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(F, "grouped_mm", None, raising=False)
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(8, 96, 96), element_size=lambda: 2)
    assert [can_group(rows, weight) for rows in (64, 10**5)] == [few, many]
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not can_group(10**5, weight)


def test_the_plain_path_needs_few_operators():
    """On a device where each operator is a launch and a wait hurts, their number is what counts: not one per expert."""
    counts = []
    for experts in (4, 64):
        x = torch.randn(5, 8)
        w_in = torch.randn(experts, 8, 12)
        w_out = torch.randn(experts, 6, 8)
        with torch.profiler.profile() as profile:
            all_experts(x, torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2), w_in, w_out)
        counts.append(len(profile.events()))
    assert counts[0] == counts[1]


def test_the_program_shows_what_replay_holds_fixed(tmp_path):
    choices = []
    weights = []
    for line in run_alone("moe.py", tmp_path).splitlines()[2:]:
        cells = [cell.split() for cell in line.split("|")[1:]]
        choices.append([cell[:2] for cell in cells])
        weights.append([cell[2:4] for cell in cells])
        marked = cells[1][-1] == "*"
        assert marked == (cells[0][:2] != cells[1][:2])
    sampled, moved, replayed = zip(*choices)
    assert len(sampled) == 8
    assert replayed == sampled
    assert moved != sampled
    assert all(of_sampled != of_replayed for of_sampled, _, of_replayed in weights)
