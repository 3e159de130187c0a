# SPDX-License-Identifier: MIT
"""GSPO, and all that holds for both objectives: peers' vectors, clipping, padding, precision, splitting."""

import json
import math
from pathlib import Path

import pytest
import torch
from cases import UNCLIPPED, hand_batch, random_batch, value_and_grad, window

from grpo import grpo_loss
from gspo import gspo_loss

LOSSES = {"gspo": gspo_loss, "grpo": grpo_loss}
PEERS = json.loads((Path(__file__).parent / "data" / "peer_losses.json").read_text(encoding="utf-8"))
both = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


@pytest.mark.parametrize("case", range(len(PEERS)))
def test_equals_what_trl_and_verl_print(case):
    case = dict(PEERS[case])
    batch = {k: torch.tensor(case.pop(k)) for k in ("logprobs", "old_logprobs", "advantages", "mask")}
    assert case
    for setting, expected in case.items():
        name, low, high = setting.split(":")
        value, grad, metrics = value_and_grad(LOSSES[name], batch, **window(float(low), float(high)))
        for peer in ("trl_loss", "verl_loss"):
            assert value.item() == pytest.approx(expected[peer], rel=1e-6, abs=1e-7)
        torch.testing.assert_close(grad, torch.tensor(expected["grad"]), rtol=1e-6, atol=1e-8)
        assert metrics["clip_frac"].item() == pytest.approx(expected["clip_frac"], abs=1e-7)


# GSPO by hand and by closed form


@pytest.mark.parametrize(
    "options, expected",
    [(UNCLIPPED, -0.0257650528), ({}, 0.0261177295), (window(0.05, 0.06), -0.0012072705)],
    ids=["unclipped", "default", "wide"],
)
def test_hand_computed_loss(options, expected):
    value, _, _ = value_and_grad(gspo_loss, hand_batch(), **options)
    assert value.item() == pytest.approx(expected, abs=5e-11)  # ten decimals were computed by hand


def test_hand_computed_metrics():
    metrics = value_and_grad(gspo_loss, hand_batch())[2]
    s = [1.06893911, 0.86070798, 1.10517092, 1.0]
    logs = [math.log(x) for x in s]
    mean = sum(logs) / 4
    # row 0 (advantage 1, s above 1.0004, 3 tokens) and row 1 (advantage -1, s below 0.9997, 2 tokens), of 9 tokens
    assert metrics["clip_frac_high"].item() == pytest.approx(3 / 9)
    assert metrics["clip_frac_low"].item() == pytest.approx(2 / 9)
    assert metrics["clip_frac"].item() == pytest.approx(5 / 9)
    assert metrics["ratio_mean"].item() == pytest.approx(sum(s) / 4)
    assert metrics["ratio_min"].item() == pytest.approx(min(s))
    assert metrics["ratio_max"].item() == pytest.approx(max(s))
    assert metrics["seq_log_ratio_std"].item() == pytest.approx((sum((x - mean) ** 2 for x in logs) / 4) ** 0.5)
    assert all(not m.requires_grad and m.dim() == 0 for m in metrics.values())


def test_gradient_is_equation_10():
    """d loss / d log pi(y_it) = - s_i A_i / (G |y_i|), the same for all tokens of a response."""
    b = random_batch(1)
    _, grad, _ = value_and_grad(gspo_loss, b, **UNCLIPPED)
    length = b["mask"].sum(1, keepdim=True)
    s = (((b["logprobs"] - b["old_logprobs"]) * b["mask"]).sum(1, keepdim=True) / length).exp()
    expected = -s * b["advantages"][:, None] * b["mask"] / length / 6
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=0)


def test_gspo_token_equals_gspo_when_advantages_do():
    for seed, options in enumerate([UNCLIPPED, {}, window(0.1, 0.1)]):
        b = random_batch(seed)
        spread_out = b | {"advantages": b["advantages"][:, None].expand(6, 7).clone()}
        one, other = value_and_grad(gspo_loss, b, **options), value_and_grad(gspo_loss, spread_out, **options)
        for x, y in ((one[0], other[0]), (one[1], other[1]), *((one[2][k], other[2][k]) for k in one[2])):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-15)


def test_gspo_token_gradient_is_equation_17():
    """With different advantages in a row, each token has its own: - s_i A_it / (G |y_i|)."""
    b = random_batch(3)
    b["advantages"] = torch.randn(6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, grad, _ = value_and_grad(gspo_loss, b, **UNCLIPPED)
    length = b["mask"].sum(1, keepdim=True)
    s = (((b["logprobs"] - b["old_logprobs"]) * b["mask"]).sum(1, keepdim=True) / length).exp()
    torch.testing.assert_close(grad, -s * b["advantages"] * b["mask"] / length / 6, rtol=1e-12, atol=0)


def test_only_the_sum_over_a_row_matters_to_gspo():
    b = random_batch(4)
    shift = torch.zeros_like(b["logprobs"])
    shift[-1, 0], shift[-1, 3], shift[-1, 5] = 0.4, -0.3, -0.1
    moved = b | {"logprobs": b["logprobs"] + shift}
    gspo = [value_and_grad(gspo_loss, x, **UNCLIPPED)[0] for x in (b, moved)]
    grpo = [value_and_grad(grpo_loss, x, **UNCLIPPED)[0] for x in (b, moved)]
    torch.testing.assert_close(gspo[0], gspo[1], rtol=1e-12, atol=0)
    assert (grpo[0] - grpo[1]).abs() > 1e-5


# Both


def test_on_policy_gradients_are_equal():
    b = random_batch(5)
    b["old_logprobs"] = b["logprobs"].clone()
    gspo, grpo = value_and_grad(gspo_loss, b), value_and_grad(grpo_loss, b)
    torch.testing.assert_close(gspo[1], grpo[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(gspo[0], grpo[0], rtol=1e-12, atol=1e-15)
    assert gspo[2]["clip_frac"] == grpo[2]["clip_frac"] == 0


def test_one_token_responses_make_them_equal():
    b = random_batch(6, tokens=1)
    for options in (UNCLIPPED, window(0.1, 0.2)):
        gspo, grpo = value_and_grad(gspo_loss, b, **options), value_and_grad(grpo_loss, b, **options)
        torch.testing.assert_close(gspo[:2], grpo[:2], rtol=1e-12, atol=0)


@both
@pytest.mark.parametrize("options", [UNCLIPPED, window(0.1, 0.15)], ids=["unclipped", "clipped"])
def test_gradient_by_finite_differences(loss, options):
    b = random_batch(7)

    def f(logprobs):
        return loss(logprobs, b["old_logprobs"], b["advantages"], b["mask"], **options)[0]

    assert torch.autograd.gradcheck(f, b["logprobs"].clone().requires_grad_(), eps=1e-7, atol=1e-7, nondet_tol=0)


@both
@pytest.mark.parametrize(
    "ratio, advantage, clipped",
    [(1.5, 1, "high"), (1.5, -1, None), (0.5, 1, None), (0.5, -1, "low")],
    ids=["up+", "up-", "down+", "down-"],
)
def test_the_four_corners_of_clipping(loss, ratio, advantage, clipped):
    """Clipped is only what has already gone where the advantage pushes it: above with A > 0, below with A < 0."""
    batch = {
        "logprobs": torch.full((1, 2), math.log(ratio), dtype=torch.float64),
        "old_logprobs": torch.zeros(1, 2, dtype=torch.float64),
        "advantages": torch.tensor([float(advantage)], dtype=torch.float64),
        "mask": torch.ones(1, 2),
    }
    value, grad, metrics = value_and_grad(loss, batch, **window(0.2, 0.3))
    bound = {"high": 1.3, "low": 0.8, None: ratio}[clipped]
    assert value.item() == pytest.approx(-bound * advantage)
    assert (grad == 0).all() == (clipped is not None)
    assert metrics["clip_frac_high"].item() == (clipped == "high")
    assert metrics["clip_frac_low"].item() == (clipped == "low")
    assert metrics["clip_frac"].item() == (clipped is not None)


@both
@pytest.mark.parametrize("advantage, edge", [(1.0, 1.5), (-1.0, 0.5)])
def test_the_boundary_keeps_its_gradient(loss, advantage, edge):
    logprobs = torch.tensor([[math.log(edge)]], dtype=torch.float64)
    ratio = logprobs.exp().item()  # the window's edge is put exactly where the ratio is
    batch = {
        "logprobs": logprobs,
        "old_logprobs": torch.zeros(1, 1, dtype=torch.float64),
        "advantages": torch.tensor([advantage], dtype=torch.float64),
        "mask": torch.ones(1, 1),
    }
    _, grad, metrics = value_and_grad(loss, batch, **window(1 - ratio if edge < 1 else 9, ratio - 1 if edge > 1 else 9))
    assert grad.item() == pytest.approx(-ratio * advantage)
    assert metrics["clip_frac"] == 0


@both
@pytest.mark.parametrize("junk", [1e4, -1e4, float("inf"), -float("inf"), float("nan")])
def test_padding_changes_nothing_bit_for_bit(loss, junk):
    for per_token in (False, True):
        b = random_batch(8, dtype=torch.float32)
        if per_token:
            b["advantages"] = b["advantages"][:, None].expand(6, 7).clone()
        clean = value_and_grad(loss, b)
        pad = b["mask"] == 0
        for name in ("logprobs", "old_logprobs", *(["advantages"] if per_token else [])):
            dirty = b | {name: b[name].masked_fill(pad, junk)}
            got = value_and_grad(loss, dirty)
            assert torch.equal(got[0], clean[0]) and torch.equal(got[1], clean[1])
            assert all(torch.equal(got[2][k], clean[2][k]) for k in clean[2])
        wider = {k: torch.nn.functional.pad(v, (0, 3), value=junk) if v.dim() == 2 else v for k, v in b.items()}
        wider["mask"] = torch.nn.functional.pad(b["mask"], (0, 3))
        got = value_and_grad(loss, wider)
        torch.testing.assert_close(got[0], clean[0], rtol=1e-6, atol=1e-7)
        assert (got[1][:, 7:] == 0).all()


@both
def test_fully_masked_rows_add_nothing_and_are_not_counted(loss):
    b = random_batch(9)
    empty = {k: torch.cat([v, v[:2]]) for k, v in b.items()}
    empty["mask"][6:] = 0
    empty["advantages"][6:] = float("nan")
    empty["logprobs"][6:] = float("inf")
    one, other = value_and_grad(loss, b), value_and_grad(loss, empty)
    torch.testing.assert_close(one[0], other[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(one[1], other[1][:6], rtol=1e-12, atol=0)
    assert (other[1][6:] == 0).all()
    nothing = b | {"mask": torch.zeros_like(b["mask"])}
    value, grad, _ = value_and_grad(loss, nothing)
    assert value == 0 and (grad == 0).all()


@both
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_extreme_ratios_stay_finite(loss, log_ratio):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for sign in (1, -1):
            b = random_batch(10, dtype=dtype)
            b["logprobs"] = b["old_logprobs"] + log_ratio
            b["advantages"] = b["advantages"].abs() * sign
            value, grad, metrics = value_and_grad(loss, b, **UNCLIPPED)
            assert value.isfinite() and grad.isfinite().all()
            assert all(m.isfinite() for m in metrics.values())


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_equal_their_upcast(loss, dtype):
    b = random_batch(11, dtype=dtype, spread=0.01)
    up = {k: v.float() for k, v in b.items()}
    low, high = value_and_grad(loss, b), value_and_grad(loss, up)
    assert low[0].dtype == torch.float32
    assert torch.equal(low[0], high[0])
    assert torch.equal(low[1], high[1].to(dtype))
    assert all(torch.equal(low[2][k], high[2][k]) for k in low[2])


@both
@pytest.mark.parametrize("sizes", [(1, 5), (3, 3), (2, 2, 2), (1, 1, 1, 1, 1, 1)])
def test_any_split_adds_up_to_the_whole(loss, sizes):
    b = random_batch(12)
    b["mask"][2] = 0  # counted neither in the whole nor in a part
    whole = value_and_grad(loss, b, **window(0.1, 0.1))
    parts = [dict(zip(b, rows)) for rows in zip(*(v.split(sizes) for v in b.values()))]
    results = [value_and_grad(loss, part, **window(0.1, 0.1), num_sequences=5) for part in parts]
    torch.testing.assert_close(sum(r[0] for r in results), whole[0], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), whole[1], rtol=1e-12, atol=1e-15)


@both
def test_permuting_rows_permutes_the_gradient(loss):
    b = random_batch(13)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    one, other = value_and_grad(loss, b), value_and_grad(loss, {k: v[order] for k, v in b.items()})
    torch.testing.assert_close(one[0], other[0], rtol=1e-12, atol=1e-15)
    assert torch.equal(one[1][order], other[1])


@both
def test_length_does_not_weigh(loss):
    """A response of constant ratio counts the same however long it is: mean of sequence means, not of tokens."""
    b = {
        "logprobs": torch.full((2, 50), 0.1, dtype=torch.float64),
        "old_logprobs": torch.zeros(2, 50, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64),
        "mask": torch.ones(2, 50),
    }
    b["mask"][0, 1:] = 0
    assert value_and_grad(loss, b, **UNCLIPPED)[0].item() == pytest.approx(0, abs=1e-12)


@both
def test_no_gradient_reaches_the_old_policy(loss):
    b = random_batch(14)
    for name in ("old_logprobs", "advantages"):
        b[name] = b[name].clone().requires_grad_()
    logprobs = b.pop("logprobs").requires_grad_()
    loss(logprobs, **b)[0].backward()
    assert b["old_logprobs"].grad is None and b["advantages"].grad is None and logprobs.grad is not None


@both
def test_shapes_that_do_not_fit_say_so(loss):
    b = random_batch(15)
    for name, wrong in (
        ("advantages", torch.zeros(6, 1)),
        ("advantages", torch.zeros(7)),
        ("mask", torch.ones(6, 1)),
        ("old_logprobs", torch.zeros(7, 6)),
    ):
        with pytest.raises(ValueError, match=r"\(B, T\)"):
            loss(**(b | {name: wrong}))
    with pytest.raises(ValueError, match=r"\(B, T\)"):
        loss(torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.ones(3))


def test_integer_and_bool_masks():
    b = random_batch(16)
    for loss in LOSSES.values():
        values = [
            value_and_grad(loss, b | {"mask": b["mask"].to(t)})[0] for t in (torch.int64, torch.bool, torch.float32)
        ]
        assert values[0] == values[1] == values[2]
