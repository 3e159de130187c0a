# SPDX-License-Identifier: MIT
"""The twins, grpo.py and gspo.py: by hand, by closed form, against peers; clipping, padding, precision, splitting."""

import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from helpers import UNCLIPPED, assert_same, hand_batch, random_batch, response, run_alone, value_and_grad, window

import grpo
import gspo
from grpo import grpo_loss
from gspo import gspo_loss, gspo_token_loss

PEERS = json.loads((Path(__file__).parent / "data" / "peer_losses.json").read_text(encoding="utf-8"))
TWINS = {"gspo": gspo_loss, "grpo": grpo_loss}


@pytest.fixture(params=[gspo_loss, grpo_loss, gspo_token_loss], ids=["gspo", "grpo", "gspo_token"])
def loss(request):
    return request.param


@pytest.fixture(params=[gspo, grpo], ids=["gspo", "grpo"])
def group_advantages(request):
    return request.param.group_advantages


def make(loss, seed, **options):
    return random_batch(seed, per_token=loss is gspo_token_loss, **options)


def single(loss, log_ratios, advantage):
    return response(log_ratios, advantage, per_token=loss is gspo_token_loss)


def functions(module):
    return {name: inspect.getsource(f) for name, f in vars(module).items() if inspect.isfunction(f)}


def test_the_twins_share_all_but_the_losses_word_for_word():
    of_grpo = functions(grpo)
    of_gspo = functions(gspo)
    del of_grpo["grpo_loss"], of_gspo["gspo_loss"], of_gspo["gspo_token_loss"]
    assert of_grpo == of_gspo
    assert "group_advantages" in of_grpo
    assert grpo.LOG_RATIO_CAP == gspo.LOG_RATIO_CAP


def test_the_twins_take_the_same_arguments():
    of_gspo = inspect.signature(gspo_loss)
    of_grpo = inspect.signature(grpo_loss)
    assert list(of_gspo.parameters) == list(of_grpo.parameters)
    assert of_gspo == inspect.signature(gspo_token_loss)


# By hand, by closed form, and against peers


@pytest.mark.parametrize("case", range(len(PEERS)))
def test_equals_what_trl_and_verl_print(case):
    case = dict(PEERS[case])
    batch = {k: torch.tensor(case.pop(k)) for k in ("logprobs", "old_logprobs", "advantages", "mask")}
    assert case
    for setting, expected in case.items():
        name, low, high = setting.split(":")
        value, grad, metrics = value_and_grad(TWINS[name], batch, **window(float(low), float(high)))
        for peer in ("trl_loss", "verl_loss"):
            assert value.item() == pytest.approx(expected[peer], rel=1e-6, abs=1e-7)
        torch.testing.assert_close(grad, torch.tensor(expected["grad"]), rtol=1e-6, atol=1e-8)
        assert metrics["clip_frac"].item() == pytest.approx(expected["clip_frac"], abs=1e-7)


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
    _, _, metrics = value_and_grad(loss, hand_batch(), **options)
    tokens = [0.2, 0.1, -0.1, -0.2, -0.1, 0.1, -0.1, 0.2, -0.1]  # log-ratios
    rows = [0.2 / 3, -0.15, 0.1, 0.0]
    ratios = [math.exp(x) for x in (rows if loss is gspo_loss else tokens)]
    # Of 9 tokens, advantages + + + - - - + + +. GSPO clips row 0 (3 tokens) above and row 1 (2 tokens) below; GRPO the
    # 3 tokens of e^.1 or e^.2 with a positive advantage above, the 2 of e^-.1 or e^-.2 with a negative one below.
    expected = {"clip_frac_high": 3 / 9, "clip_frac_low": 2 / 9, "clip_frac": 5 / 9}
    expected |= {"ratio_mean": sum(ratios) / len(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    for name, logs in (("log_ratio_std", tokens), ("seq_log_ratio_std", rows)):
        mean = sum(logs) / len(logs)
        expected[name] = math.sqrt(sum((x - mean) ** 2 for x in logs) / len(logs))
    expected["approx_kl"] = sum(math.exp(x) - 1 - x for x in tokens) / 9
    assert {name: m.item() for name, m in metrics.items()} == pytest.approx(expected)
    assert all(not m.requires_grad and m.dim() == 0 for m in metrics.values())


def test_gradient_is_equation_10_or_12_or_17(loss):
    """d loss / d log pi(y_it) = - ratio A / (G |y_i|): s_i A_i for GSPO, w_it A_i for GRPO, s_i A_it for GSPO-token."""
    b = make(loss, 1)
    length = b["mask"].sum(1, keepdim=True)
    log_ratio = (b["logprobs"] - b["old_logprobs"]) * b["mask"]
    ratio = (log_ratio if loss is grpo_loss else log_ratio.sum(1, keepdim=True) / length).exp()
    expected = -ratio * b["advantages"].view(6, -1) * b["mask"] / length / 6
    torch.testing.assert_close(value_and_grad(loss, b, **UNCLIPPED)[1], expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("options", [UNCLIPPED, {}, window(0.1, 0.1)], ids=["unclipped", "default", "wide"])
@pytest.mark.parametrize("spread", [0.3, 40.0], ids=["near", "beyond the cap"])
def test_gspo_token_equals_gspo_when_advantages_do(options, spread):
    b = random_batch(2, spread=spread)
    spread_out = b | {"advantages": b["advantages"][:, None].expand(6, 7)}
    one = value_and_grad(gspo_loss, b, **options)
    other = value_and_grad(gspo_token_loss, spread_out, **options)
    assert_same(one, other, rtol=1e-12, atol=1e-15)


def test_gspo_and_grpo_agree_on_policy_and_on_one_token_responses():
    b = random_batch(5)
    for batch in (b | {"old_logprobs": b["logprobs"]}, random_batch(6, tokens=1)):
        one = value_and_grad(gspo_loss, batch, **window(0.1, 0.2))
        other = value_and_grad(grpo_loss, batch, **window(0.1, 0.2))
        assert_same(one, other, rtol=1e-12, atol=1e-15)


def table(text):
    """The cells of a program's table without its heading, each a list of numbers as printed."""
    return [[cell.split() for cell in line.split("|")] for line in text.splitlines()[1:]]


def test_the_programs_show_what_each_objective_clips(tmp_path):
    of_gspo = table(run_alone("gspo.py", tmp_path))
    of_grpo = table(run_alone("grpo.py", tmp_path))
    assert of_grpo[0] == [["1.000"], ["1.350", "0.980", "0.748", "1.010"], ["0.000", "0.980", "0.748", "1.010"]]
    assert [row[:3] for row in of_gspo] == of_grpo  # the one line of GRPO in gspo.py does as grpo.py does
    assert of_gspo[0][3:] == [["1.000"], ["1.000"] * 4]
    assert of_gspo[1][3:] == [["1.010"], ["0.000"] * 4]


# Clipping


@pytest.mark.parametrize("ratio, advantage, clipped", [(1.5, 1, "high"), (1.5, -1, ""), (0.5, 1, ""), (0.5, -1, "low")])
def test_the_four_corners_of_clipping(loss, ratio, advantage, clipped):
    """Clipped is only what has already gone where the advantage pushes it: above with A > 0, below with A < 0."""
    value, grad, metrics = value_and_grad(loss, single(loss, [math.log(ratio)] * 2, advantage), **window(0.2, 0.3))
    assert value.item() == pytest.approx(-advantage * {"high": 1.3, "low": 0.8, "": ratio}[clipped])
    assert (grad == 0).all() == bool(clipped)
    assert metrics["clip_frac_high"] == (clipped == "high")
    assert metrics["clip_frac_low"] == (clipped == "low")
    assert metrics["clip_frac"] == bool(clipped)


def test_a_large_ratio_with_a_negative_advantage_is_not_clipped_a_second_time(loss):
    """The paper's and TRL's plain min. verl's "dual clip" would bound -A w at -A x 3, with no gradient beyond.

    By hand: w = 8 and 2, s = sqrt(8 x 2) = 4, A = -2. GRPO: (16 + 4) / 2 = 10, gradients 16 / 2 and 4 / 2.
    GSPO: 8, gradients 8 / 2 each.
    """
    value, grad, metrics = value_and_grad(loss, single(loss, [math.log(8), math.log(2)], -2))
    assert value.item() == pytest.approx(10 if loss is grpo_loss else 8)
    assert grad[0].tolist() == pytest.approx([8, 2] if loss is grpo_loss else [4, 4])
    assert metrics["clip_frac"] == 0


@pytest.mark.parametrize("loss, between", [(gspo_loss, 3.5e-4), (gspo_token_loss, 3.5e-4), (grpo_loss, 0.235)])
def test_the_default_windows_lower_half_is_the_narrow_one(loss, between):
    for advantage, clipped in ((1, False), (-1, True)):
        _, grad, metrics = value_and_grad(loss, single(loss, [math.log(1 + advantage * between)] * 2, advantage))
        assert (grad == 0).all() == clipped
        assert metrics["clip_frac"] == clipped


def clamp_of_torch_2_14(x, min=None, max=None, clamp=torch.Tensor.clamp):
    """Its gradient is 0 on the bounds as well."""
    return clamp(x, min, max) if max is None else torch.where((min < x) & (x < max), x, clamp(x.detach(), min, max))


@pytest.mark.parametrize("clamp", [torch.Tensor.clamp, clamp_of_torch_2_14])
@pytest.mark.parametrize("advantage, edge", [(1.0, 1.5), (-1.0, 0.5)])
def test_the_boundary_keeps_its_gradient(loss, advantage, edge, clamp, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "clamp", clamp)
    batch = single(loss, [math.log(edge)], advantage)
    ratio = batch["logprobs"].exp().item()  # the window's edge is put exactly where the ratio is
    options = window(1 - ratio, 9) if edge < 1 else window(9, ratio - 1)
    _, grad, metrics = value_and_grad(loss, batch, **options)
    assert grad.item() == pytest.approx(-ratio * advantage)
    assert metrics["clip_frac"] == 0


# The cap


def test_the_cap_is_20_and_for_gspo_comes_after_the_mean(loss):
    value, _, metrics = value_and_grad(loss, single(loss, [30.0, -10.0], 1), **UNCLIPPED)
    tokens = (math.exp(20) + math.exp(-10)) / 2
    assert value.item() == pytest.approx(-tokens if loss is grpo_loss else -math.exp(10))
    assert metrics["log_ratio_std"].item() == pytest.approx(15)
    assert metrics["seq_log_ratio_std"] == 0
    assert metrics["approx_kl"].item() == pytest.approx(tokens - 1 - (20 - 10) / 2, rel=1e-12)
    for log_ratio in (100.0, -100.0):
        for dtype in (torch.float32, torch.bfloat16):
            batch = {k: v.to(dtype) for k, v in single(loss, [log_ratio] * 2, -1).items()}
            value, grad, metrics = value_and_grad(loss, batch, **UNCLIPPED)
            assert value.item() == pytest.approx(math.exp(math.copysign(20, log_ratio)))
            assert all(x.isfinite().all() for x in (grad, *metrics.values()))


def test_beyond_the_cap_there_is_no_gradient_and_with_a_negative_advantage_no_clipping(loss):
    value, grad, metrics = value_and_grad(loss, single(loss, [21.0, 21.0], -1))
    assert value.item() == pytest.approx(math.exp(20))
    assert grad.tolist() == [[0, 0]]
    assert metrics["clip_frac"] == 0  # no window did it
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(20))
    value, grad, metrics = value_and_grad(loss, single(loss, [19.0, 19.0], -1))  # within it all is as ever
    assert grad[0].tolist() == pytest.approx([math.exp(19) / 2] * 2)
    _, _, metrics = value_and_grad(loss, single(loss, [21.0, 21.0], 1))
    assert metrics["clip_frac_high"] == 1  # and here the window did it


def test_one_token_beyond_the_cap_leaves_the_others_their_gradient():
    _, grad, _ = value_and_grad(grpo_loss, single(grpo_loss, [21.0, 1.0], -1))
    assert grad[0].tolist() == pytest.approx([0, math.e / 2])
    for of_gspo in (gspo_loss, gspo_token_loss):  # their mean, 11, is within it
        _, grad, _ = value_and_grad(of_gspo, single(of_gspo, [21.0, 1.0], -1))
        assert grad[0].tolist() == pytest.approx([math.exp(11) / 2] * 2)


# Padding, precision, splitting


@pytest.mark.parametrize("junk", [1e4, -1e4, float("inf"), -float("inf"), float("nan")])
def test_padding_changes_nothing_bit_for_bit(loss, junk):
    b = make(loss, 8, dtype=torch.float32)
    b["mask"][-1, 2] = 0  # a gap, as where a tool's answer stands
    clean = value_and_grad(loss, b)
    per_token = ["logprobs", "old_logprobs"]
    if loss is gspo_token_loss:
        per_token.append("advantages")
    junked = {name: b[name].masked_fill(b["mask"] == 0, junk) for name in per_token}
    for name in per_token:
        assert_same(value_and_grad(loss, b | {name: junked[name]}), clean)
    assert_same(value_and_grad(loss, b | junked), clean)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_equal_their_upcast(loss, dtype):
    b = make(loss, 11, dtype=dtype, spread=0.01)
    value, grad, metrics = value_and_grad(loss, {k: v.float() for k, v in b.items()})
    assert value.dtype == torch.float32
    assert_same(value_and_grad(loss, b), (value, grad.to(dtype), metrics))


@pytest.mark.parametrize("sizes", [(1, 5), (2, 2, 2), (1, 1, 1, 1, 1, 1), (0, 6)])
def test_any_split_adds_up_to_the_whole(loss, sizes):
    b = make(loss, 12)
    b["mask"][2] = 0  # counted neither in the whole nor in a part
    whole = value_and_grad(loss, b, **window(0.1, 0.1))
    parts = [dict(zip(b, rows)) for rows in zip(*(v.split(sizes) for v in b.values()))]
    results = [value_and_grad(loss, part, **window(0.1, 0.1), num_sequences=5) for part in parts]
    torch.testing.assert_close(sum(r[0] for r in results), whole[0], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), whole[1], rtol=1e-12, atol=1e-15)


# What comes in


@pytest.mark.parametrize("rows, tokens, masked_in", [(0, 5, 1), (3, 0, 1), (0, 0, 1), (3, 5, 0), (3, 1, 0)])
@pytest.mark.parametrize("num_sequences", [None, 0, 4])
def test_without_a_response_token_loss_and_gradient_are_0(loss, rows, tokens, masked_in, num_sequences):
    """No rows, no columns, or all masked: a mean over nothing would be nan, an extreme of nothing an error."""
    per_token = loss is gspo_token_loss
    batch = {
        "logprobs": torch.full((rows, tokens), -3.0),
        "old_logprobs": torch.full((rows, tokens), -1.0),
        "advantages": torch.ones((rows, tokens) if per_token else (rows,)),
        "mask": torch.full((rows, tokens), masked_in),
    }
    value, grad, metrics = value_and_grad(loss, batch, num_sequences=num_sequences)
    assert value.shape == ()
    assert value == 0
    assert grad.shape == (rows, tokens)
    assert (grad == 0).all()
    ratios = {"ratio_mean": 1.0, "ratio_min": 1.0, "ratio_max": 1.0}
    assert {name: m.item() for name, m in metrics.items()} == dict.fromkeys(metrics, 0.0) | ratios


def test_a_divisor_of_0_is_one_of_1(loss):
    """A process whose share holds no response passes 0; what it then adds must be finite."""
    b = make(loss, 13)
    assert_same(value_and_grad(loss, b, num_sequences=0), value_and_grad(loss, b, num_sequences=1))


def test_no_gradient_reaches_the_old_policy_or_the_advantages(loss):
    b = {k: v.requires_grad_(k != "mask") for k, v in make(loss, 14).items()}
    loss(**b)[0].backward()
    assert b["old_logprobs"].grad is None
    assert b["advantages"].grad is None
    assert b["logprobs"].grad is not None


@pytest.mark.parametrize("change", [{"mask": (6, 1)}, {"mask": (6,)}, {"old_logprobs": (7, 6)}, {"logprobs": (6, 1)}])
def test_log_probs_and_masks_that_do_not_fit_say_so(loss, change):
    b = make(loss, 15)
    shapes = {name: tuple(b[name].shape) for name in ("logprobs", "old_logprobs", "mask")} | change
    b |= {name: torch.zeros(shape) for name, shape in change.items()}
    with pytest.raises(ValueError) as error:
        loss(**b)
    assert str(error.value) == f"logprobs, old_logprobs and mask must be (B, T), not {list(shapes.values())}"


def test_log_probs_of_one_dimension_say_so(loss):
    with pytest.raises(ValueError, match=r"must be \(B, T\), not \[\(3,\), \(3,\), \(3,\)\]"):
        loss(*[torch.zeros(3)] * 4)


@pytest.mark.parametrize("shape", [(6,), (6, 7), (6, 1), (7,), (1, 6), ()])
def test_advantages_that_do_not_fit_say_so(loss, shape):
    right = (6, 7) if loss is gspo_token_loss else (6,)
    b = make(loss, 15) | {"advantages": torch.zeros(shape)}
    if shape == right:
        loss(**b)
        return
    form = "(B, T)" if loss is gspo_token_loss else "(B,)"
    with pytest.raises(ValueError) as error:
        loss(**b)
    assert str(error.value) == f"advantages must be {form} beside logprobs (6, 7), not {shape}"


def test_integer_and_bool_masks(loss):
    b = make(loss, 16)
    for dtype in (torch.int64, torch.bool, torch.float32):
        assert_same(value_and_grad(loss, b | {"mask": b["mask"].to(dtype)}), value_and_grad(loss, b))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_what_a_sampler_made_under_inference_mode_can_be_trained_on(loss, dtype):
    """autograd refuses to save such tensors for backward: the losses must not hand them on."""
    b = make(loss, 17)
    with torch.inference_mode():
        sampled = {name: b[name].clone() for name in ("old_logprobs", "advantages")}
        sampled["mask"] = b["mask"].to(dtype, copy=True)
    assert all(x.is_inference() for x in sampled.values())
    assert_same(value_and_grad(loss, b | sampled), value_and_grad(loss, b))


# Group advantages


def test_advantages_by_hand(group_advantages):
    # group 1: mean .5, sample variance 4 * .25 / 3; group 2: mean .25, deviations .75 and -.25, variance .75 / 3
    for eps in (1e-6, 0.5):
        s = math.sqrt(1 / 3) + eps
        t = 0.5 + eps
        expected = [0.5 / s, -0.5 / s, -0.5 / s, 0.5 / s, -0.25 / t, -0.25 / t, 0.75 / t, -0.25 / t]
        torch.testing.assert_close(group_advantages([1, 0, 0, 1, 0, 0, 1, 0], 4, eps=eps), torch.tensor(expected))


@pytest.mark.parametrize("reward", [0, 1, 0.1, 1 / 3, 1e6, -7.3])
def test_equal_rewards_give_exactly_zero(group_advantages, reward):
    assert group_advantages([reward] * 7, 7).tolist() == [0.0] * 7


def test_unverifiable_is_left_out(group_advantages):
    a = group_advantages([1, None, 0, None, None, 1, None, None], 4)
    torch.testing.assert_close(a[:4], group_advantages([1, 0], 2)[[0, 0, 1, 1]] * torch.tensor([1.0, 0, 1, 0]))
    assert a[4:].tolist() == [0.0] * 4  # one known reward has nothing to be compared with
    assert group_advantages([None] * 3, 3).tolist() == [0.0] * 3
    nan = float("nan")
    assert torch.equal(a, group_advantages(torch.tensor([1, nan, 0, nan, nan, 1, nan, nan]), 4))


def test_no_groups_have_no_advantages(group_advantages):
    for rewards in ([], torch.zeros(0), torch.zeros(0, dtype=torch.int64)):
        a = group_advantages(rewards, 4)
        assert a.shape == (0,)
        assert a.dtype == torch.float32


def test_bad_groups_say_so(group_advantages):
    for rewards, size in (([1.0, 0.0], 1), ([1.0, 0.0], 0), ([1.0, 0.0], 3), (torch.zeros(2, 2), 2)):
        with pytest.raises(ValueError, match=f"groups of {size}, at least 2"):
            group_advantages(rewards, size)


def test_dtypes_and_no_gradient(group_advantages):
    for given, dtype in ((torch.int64, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert group_advantages(torch.tensor([1, 0], dtype=given), 2).dtype == dtype
    assert group_advantages([True, False], 2).tolist() == group_advantages([1.0, 0.0], 2).tolist()
    assert not group_advantages(torch.tensor([1.0, 0.0], requires_grad=True), 2).requires_grad
