# SPDX-License-Identifier: MIT
"""The objectives: by hand, by closed form, against peers; clipping, padding, precision, splitting."""

import json
import math
from pathlib import Path

import pytest
import torch
from cases import UNCLIPPED, assert_same, hand_batch, random_batch, response, run_alone, value_and_grad, window

from grpo import grpo_loss
from gspo import gspo_loss, gspo_token_loss

LOSSES = {"gspo": gspo_loss, "grpo": grpo_loss}
PEERS = json.loads((Path(__file__).parent / "data" / "peer_losses.json").read_text(encoding="utf-8"))
each = pytest.mark.parametrize("loss", [gspo_loss, grpo_loss, gspo_token_loss])


def make(loss, seed, **options):
    return random_batch(seed, per_token=loss is gspo_token_loss, **options)


def single(loss, log_ratios, advantage):
    return response(log_ratios, advantage, per_token=loss is gspo_token_loss)


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


# By hand and by closed form


@pytest.mark.parametrize(
    "loss, options, expected",
    [
        (gspo_loss, UNCLIPPED, -0.0257650528),
        (gspo_loss, {}, 0.0261177295),
        (gspo_loss, window(0.05, 0.06), -0.0012072705),
        (grpo_loss, UNCLIPPED, -0.0301353065),
        (grpo_loss, {}, -0.0301353065),
        (grpo_loss, window(0.05, 0.06), 0.0225833750),
    ],
)
def test_hand_computed_loss(loss, options, expected):
    value, _, _ = value_and_grad(loss, hand_batch(), **options)
    assert value.item() == pytest.approx(expected, abs=5e-11)  # ten decimals were computed by hand


@pytest.mark.parametrize("loss, options", [(gspo_loss, {}), (grpo_loss, window(0.05, 0.06))])
def test_hand_computed_metrics(loss, options):
    metrics = value_and_grad(loss, hand_batch(), **options)[2]
    tokens, rows = [0.2, 0.1, -0.1, -0.2, -0.1, 0.1, -0.1, 0.2, -0.1], [0.2 / 3, -0.15, 0.1, 0.0]  # log-ratios
    ratios = [math.exp(x) for x in (rows if loss is gspo_loss else tokens)]
    # Of 9 tokens, advantages + + + - - - + + +. GSPO clips row 0 (3 tokens) above and row 1 (2 tokens) below; GRPO the
    # 3 tokens of e^.1 or e^.2 with a positive advantage above, the 2 of e^-.1 or e^-.2 with a negative one below.
    expected = {"clip_frac_high": 3 / 9, "clip_frac_low": 2 / 9, "clip_frac": 5 / 9}
    expected |= {"ratio_mean": sum(ratios) / len(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    for name, logs in (("log_ratio_std", tokens), ("seq_log_ratio_std", rows)):
        expected[name] = (sum((x - sum(logs) / len(logs)) ** 2 for x in logs) / len(logs)) ** 0.5
    expected["approx_kl"] = sum(math.exp(x) - 1 - x for x in tokens) / 9
    assert {name: m.item() for name, m in metrics.items()} == pytest.approx(expected)
    assert all(not m.requires_grad and m.dim() == 0 for m in metrics.values())


@each
def test_gradient_is_equation_10_or_12_or_17(loss):
    """d loss / d log pi(y_it) = - ratio A / (G |y_i|): s_i A_i for GSPO, w_it A_i for GRPO, s_i A_it for GSPO-token."""
    b = make(loss, 1)
    length = b["mask"].sum(1, keepdim=True)
    log_ratio = (b["logprobs"] - b["old_logprobs"]) * b["mask"]
    ratio = (log_ratio if loss is grpo_loss else log_ratio.sum(1, keepdim=True) / length).exp()
    expected = -ratio * b["advantages"].view(6, -1) * b["mask"] / length / 6
    torch.testing.assert_close(value_and_grad(loss, b, **UNCLIPPED)[1], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [UNCLIPPED, {}, window(0.1, 0.1)], ids=["unclipped", "default", "wide"])
def test_gspo_token_equals_gspo_when_advantages_do(options):
    b = random_batch(2)
    spread_out = b | {"advantages": b["advantages"][:, None].expand(6, 7)}
    one, other = value_and_grad(gspo_loss, b, **options), value_and_grad(gspo_token_loss, spread_out, **options)
    assert_same(one, other, rtol=1e-12, atol=1e-15)


def test_gspo_and_grpo_agree_on_policy_and_on_one_token_responses():
    b = random_batch(5)
    for batch in (b | {"old_logprobs": b["logprobs"]}, random_batch(6, tokens=1)):
        one, other = (value_and_grad(loss, batch, **window(0.1, 0.2)) for loss in (gspo_loss, grpo_loss))
        assert_same(one, other, rtol=1e-12, atol=1e-15)


def test_the_programs_show_what_each_objective_clips(tmp_path):
    first, second = (
        [[cell.split() for cell in line.split("|")] for line in run_alone(file, tmp_path).splitlines()[1:]]
        for file in ("gspo.py", "grpo.py")
    )
    assert second[0] == [["1.000"], ["1.350", "0.980", "0.748", "1.010"], ["0.000", "0.980", "0.748", "1.010"]]
    assert [row[:3] for row in first] == second  # the one line of GRPO in gspo.py does as grpo.py does
    assert first[0][3:] == [["1.000"], ["1.000"] * 4] and first[1][3:] == [["1.010"], ["0.000"] * 4]


# Clipping


@each
@pytest.mark.parametrize("ratio, advantage, clipped", [(1.5, 1, "high"), (1.5, -1, ""), (0.5, 1, ""), (0.5, -1, "low")])
def test_the_four_corners_of_clipping(loss, ratio, advantage, clipped):
    """Clipped is only what has already gone where the advantage pushes it: above with A > 0, below with A < 0."""
    value, grad, metrics = value_and_grad(loss, single(loss, [math.log(ratio)] * 2, advantage), **window(0.2, 0.3))
    assert value.item() == pytest.approx(-advantage * {"high": 1.3, "low": 0.8, "": ratio}[clipped])
    assert (grad == 0).all() == bool(clipped)
    assert metrics["clip_frac_high"] == (clipped == "high") and metrics["clip_frac_low"] == (clipped == "low")
    assert metrics["clip_frac"] == bool(clipped)


@pytest.mark.parametrize("loss, between", [(gspo_loss, 3.5e-4), (gspo_token_loss, 3.5e-4), (grpo_loss, 0.235)])
def test_the_default_windows_lower_half_is_the_narrow_one(loss, between):
    for advantage, clipped in ((1, False), (-1, True)):
        _, grad, metrics = value_and_grad(loss, single(loss, [math.log(1 + advantage * between)] * 2, advantage))
        assert (grad == 0).all() == clipped and metrics["clip_frac"] == clipped


def clamp_of_torch_2_14(x, min=None, max=None, clamp=torch.Tensor.clamp):
    """Its gradient is 0 on the bounds as well."""
    return clamp(x, min, max) if max is None else torch.where((min < x) & (x < max), x, clamp(x.detach(), min, max))


@each
@pytest.mark.parametrize("clamp", [torch.Tensor.clamp, clamp_of_torch_2_14])
@pytest.mark.parametrize("advantage, edge", [(1.0, 1.5), (-1.0, 0.5)])
def test_the_boundary_keeps_its_gradient(loss, advantage, edge, clamp, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "clamp", clamp)
    batch = single(loss, [math.log(edge)], advantage)
    ratio = batch["logprobs"].exp().item()  # the window's edge is put exactly where the ratio is
    options = window(1 - ratio, 9) if edge < 1 else window(9, ratio - 1)
    _, grad, metrics = value_and_grad(loss, batch, **options)
    assert grad.item() == pytest.approx(-ratio * advantage) and metrics["clip_frac"] == 0


# Padding, precision, splitting


@each
@pytest.mark.parametrize("junk", [1e4, -1e4, float("inf"), -float("inf"), float("nan")])
def test_padding_changes_nothing_bit_for_bit(loss, junk):
    b = make(loss, 8, dtype=torch.float32)
    b["mask"][-1, 2] = 0  # a gap, as where a tool's answer stands
    clean = value_and_grad(loss, b)
    for name in ("logprobs", "old_logprobs", *(["advantages"] if loss is gspo_token_loss else [])):
        assert_same(value_and_grad(loss, b | {name: b[name].masked_fill(b["mask"] == 0, junk)}), clean)


@each
@pytest.mark.parametrize("shift", [2.0, -2.0])  # all ratios above 1, or below: the 1 of padding must not show
def test_fully_masked_rows_add_nothing_and_are_not_counted(loss, shift):
    b = make(loss, 9)
    b["logprobs"] += shift
    empty = {k: torch.cat([v, torch.full_like(v[:2], float("nan"))]) for k, v in b.items()}
    empty["mask"][6:] = 0
    other = value_and_grad(loss, empty)
    assert_same(value_and_grad(loss, b), other, rows=slice(6), rtol=1e-12)
    assert (other[1][6:] == 0).all()
    assert other[2]["ratio_min"] > 1 if shift > 0 else other[2]["ratio_max"] < 1
    value, grad, _ = value_and_grad(loss, b | {"mask": torch.zeros_like(b["mask"])})
    assert value == 0 and (grad == 0).all()


@each
def test_the_cap_is_20_and_for_gspo_comes_after_the_mean(loss):
    value, _, metrics = value_and_grad(loss, single(loss, [30.0, -10.0], 1), **UNCLIPPED)
    tokens = (math.exp(20) + math.exp(-10)) / 2
    assert value.item() == pytest.approx(-tokens if loss is grpo_loss else -math.exp(10))
    assert metrics["log_ratio_std"].item() == pytest.approx(15) and metrics["seq_log_ratio_std"] == 0
    assert metrics["approx_kl"].item() == pytest.approx(tokens - 1 - (20 - 10) / 2, rel=1e-12)
    for log_ratio in (100.0, -100.0):
        for dtype in (torch.float32, torch.bfloat16):
            batch = {k: v.to(dtype) for k, v in single(loss, [log_ratio] * 2, -1).items()}
            value, grad, metrics = value_and_grad(loss, batch, **UNCLIPPED)
            assert value.item() == pytest.approx(math.exp(math.copysign(20, log_ratio)))
            assert all(x.isfinite().all() for x in (grad, *metrics.values()))


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_equal_their_upcast(loss, dtype):
    b = make(loss, 11, dtype=dtype, spread=0.01)
    value, grad, metrics = value_and_grad(loss, {k: v.float() for k, v in b.items()})
    assert value.dtype == torch.float32
    assert_same(value_and_grad(loss, b), (value, grad.to(dtype), metrics))


@each
@pytest.mark.parametrize("sizes", [(1, 5), (2, 2, 2), (1, 1, 1, 1, 1, 1)])
def test_any_split_adds_up_to_the_whole(loss, sizes):
    b = make(loss, 12)
    b["mask"][2] = 0  # counted neither in the whole nor in a part
    whole = value_and_grad(loss, b, **window(0.1, 0.1))
    parts = [dict(zip(b, rows)) for rows in zip(*(v.split(sizes) for v in b.values()))]
    results = [value_and_grad(loss, part, **window(0.1, 0.1), num_sequences=5) for part in parts]
    torch.testing.assert_close(sum(r[0] for r in results), whole[0], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), whole[1], rtol=1e-12, atol=1e-15)


# What comes in


@each
def test_no_gradient_reaches_the_old_policy_or_the_advantages(loss):
    b = {k: v.requires_grad_(k != "mask") for k, v in make(loss, 14).items()}
    loss(**b)[0].backward()
    assert b["old_logprobs"].grad is None and b["advantages"].grad is None and b["logprobs"].grad is not None


@each
def test_shapes_that_do_not_fit_say_so(loss):
    b, per_token = make(loss, 15), loss is gspo_token_loss
    message = r"must be \(B, T\), advantages " + (r"\(B, T\)" if per_token else r"\(B,\)")
    wrong_advantages = [torch.zeros(shape) for shape in ((6,) if per_token else (6, 7), (6, 1), (7,), ())]
    for change in (
        *({"advantages": wrong} for wrong in wrong_advantages),
        {"mask": torch.ones(6, 1)},
        {"old_logprobs": torch.zeros(7, 6)},
        {k: torch.zeros(3) for k in b},
    ):
        with pytest.raises(ValueError, match=message):
            loss(**(b | change))


@each
def test_integer_and_bool_masks(loss):
    b = make(loss, 16)
    for dtype in (torch.int64, torch.bool, torch.float32):
        assert_same(value_and_grad(loss, b | {"mask": b["mask"].to(dtype)}), value_and_grad(loss, b))
