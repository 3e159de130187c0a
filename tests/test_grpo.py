# SPDX-License-Identifier: MIT
import math

import pytest
import torch
from cases import UNCLIPPED, hand_batch, random_batch, value_and_grad, window

from grpo import group_advantages, grpo_loss


@pytest.mark.parametrize(
    "options, expected",
    [(UNCLIPPED, -0.0301353065), ({}, -0.0301353065), (window(0.05, 0.06), 0.0225833750)],
    ids=["unclipped", "default", "narrow"],
)
def test_hand_computed_loss(options, expected):
    value, _, _ = value_and_grad(grpo_loss, hand_batch(), **options)
    assert value.item() == pytest.approx(expected, abs=5e-11)


def test_hand_computed_metrics():
    metrics = value_and_grad(grpo_loss, hand_batch(), **window(0.05, 0.06))[2]
    # advantage +1: ratios e^.2 e^.1 e^-.1 and e^-.1 e^.2 e^-.1, 3 above 1.06; -1: e^-.2 e^-.1 and e^.1, 2 below .95
    log_ratios = [0.2, 0.1, -0.1, -0.2, -0.1, 0.1, -0.1, 0.2, -0.1]
    mean = sum(log_ratios) / 9
    assert metrics["clip_frac_high"].item() == pytest.approx(3 / 9)
    assert metrics["clip_frac_low"].item() == pytest.approx(2 / 9)
    assert metrics["clip_frac"].item() == pytest.approx(5 / 9)
    assert metrics["ratio_mean"].item() == pytest.approx(sum(map(math.exp, log_ratios)) / 9)
    assert metrics["ratio_min"].item() == pytest.approx(math.exp(-0.2))
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(0.2))
    assert metrics["log_ratio_std"].item() == pytest.approx((sum((x - mean) ** 2 for x in log_ratios) / 9) ** 0.5)
    assert metrics["approx_kl"].item() == pytest.approx(sum(math.exp(x) - 1 - x for x in log_ratios) / 9)
    assert all(not m.requires_grad and m.dim() == 0 for m in metrics.values())


def test_gradient_is_equation_12():
    """d loss / d log pi(y_it) = - w_it A_i / (G |y_i|), each token with its own weight."""
    b = random_batch(1)
    _, grad, _ = value_and_grad(grpo_loss, b, **UNCLIPPED)
    ratio = (b["logprobs"] - b["old_logprobs"]).exp()
    expected = -ratio * b["advantages"][:, None] * b["mask"] / b["mask"].sum(1, keepdim=True) / 6
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=0)


def test_advantages_per_token_and_per_sequence_agree():
    b = random_batch(2)
    spread_out = b | {"advantages": b["advantages"][:, None].expand(6, 7).clone()}
    one, other = value_and_grad(grpo_loss, b), value_and_grad(grpo_loss, spread_out)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


# Group advantages


def test_advantages_by_hand():
    # group 1: mean .5, sample variance 4 * .25 / 3; group 2: mean .25, deviations .75 and -.25, variance .75 / 3
    a = group_advantages([1, 0, 0, 1, 0, 0, 1, 0], 4)
    s, t = math.sqrt(1 / 3) + 1e-6, 0.5 + 1e-6
    expected = [0.5 / s, -0.5 / s, -0.5 / s, 0.5 / s, -0.25 / t, -0.25 / t, 0.75 / t, -0.25 / t]
    torch.testing.assert_close(a, torch.tensor(expected))


@pytest.mark.parametrize("reward", [0, 1, 0.1, 1 / 3, 1e6, -7.3])
def test_equal_rewards_give_exactly_zero(reward):
    assert group_advantages([reward] * 7, 7).tolist() == [0.0] * 7


def test_statistics_are_the_groups_own():
    a = group_advantages([1.0, 2, 3, 10, 20, 30], 3)
    torch.testing.assert_close(a[:3], a[3:], rtol=1e-5, atol=1e-5)
    assert a[:3].sum().abs() < 1e-6


def test_unverifiable_is_left_out():
    a = group_advantages([1, None, 0, None, None, 1, None, None], 4)
    torch.testing.assert_close(a[:4], group_advantages([1, 0], 2)[[0, 0, 1, 1]] * torch.tensor([1.0, 0, 1, 0]))
    assert a[4:].tolist() == [0.0] * 4  # one known reward has nothing to be compared with
    assert group_advantages([None] * 3, 3).tolist() == [0.0] * 3
    nan = float("nan")
    assert torch.equal(a, group_advantages(torch.tensor([1, nan, 0, nan, nan, 1, nan, nan]), 4))


def test_permutation_within_a_group():
    rewards = torch.tensor([0.3, 0.9, 0.1, 0.5, 0.5])
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(group_advantages(rewards, 5)[order], group_advantages(rewards[order], 5))


def test_bad_groups_say_so():
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages([1.0, 0.0], 1)
    with pytest.raises(ValueError, match="groups of 3"):
        group_advantages([1.0, 0.0], 3)
    with pytest.raises(ValueError, match="groups of 2"):
        group_advantages(torch.zeros(2, 2), 2)


def test_dtypes():
    assert group_advantages(torch.tensor([1, 0]), 2).dtype == torch.float32
    assert group_advantages(torch.tensor([1.0, 0.0], dtype=torch.bfloat16), 2).dtype == torch.float32
    assert group_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), 2).dtype == torch.float64
    assert group_advantages([True, False], 2).tolist() == group_advantages([1.0, 0.0], 2).tolist()
