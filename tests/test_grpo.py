# SPDX-License-Identifier: MIT
"""What the twins share: group advantages, and every other function but the losses, word for word.

The losses of both are tested in `test_gspo.py`.
"""

import inspect
import math

import pytest
import torch

import grpo
import gspo
from grpo import group_advantages


def test_the_twins_share_all_but_the_losses_word_for_word():
    of_grpo, of_gspo = (
        {name: inspect.getsource(f) for name, f in vars(twin).items() if inspect.isfunction(f)} for twin in (grpo, gspo)
    )
    del of_grpo["grpo_loss"], of_gspo["gspo_loss"], of_gspo["gspo_token_loss"]
    assert of_grpo == of_gspo and "group_advantages" in of_grpo
    assert grpo.LOG_RATIO_CAP == gspo.LOG_RATIO_CAP


def test_advantages_by_hand():
    # group 1: mean .5, sample variance 4 * .25 / 3; group 2: mean .25, deviations .75 and -.25, variance .75 / 3
    for eps in (1e-6, 0.5):
        s, t = math.sqrt(1 / 3) + eps, 0.5 + eps
        expected = [0.5 / s, -0.5 / s, -0.5 / s, 0.5 / s, -0.25 / t, -0.25 / t, 0.75 / t, -0.25 / t]
        torch.testing.assert_close(group_advantages([1, 0, 0, 1, 0, 0, 1, 0], 4, eps=eps), torch.tensor(expected))


@pytest.mark.parametrize("reward", [0, 1, 0.1, 1 / 3, 1e6, -7.3])
def test_equal_rewards_give_exactly_zero(reward):
    assert group_advantages([reward] * 7, 7).tolist() == [0.0] * 7


def test_unverifiable_is_left_out():
    a = group_advantages([1, None, 0, None, None, 1, None, None], 4)
    torch.testing.assert_close(a[:4], group_advantages([1, 0], 2)[[0, 0, 1, 1]] * torch.tensor([1.0, 0, 1, 0]))
    assert a[4:].tolist() == [0.0] * 4  # one known reward has nothing to be compared with
    assert group_advantages([None] * 3, 3).tolist() == [0.0] * 3
    nan = float("nan")
    assert torch.equal(a, group_advantages(torch.tensor([1, nan, 0, nan, nan, 1, nan, nan]), 4))


def test_bad_groups_say_so():
    for rewards, size in (([1.0, 0.0], 1), ([1.0, 0.0], 0), ([1.0, 0.0], 3), (torch.zeros(2, 2), 2)):
        with pytest.raises(ValueError, match=f"groups of {size}, at least 2"):
            group_advantages(rewards, size)


def test_dtypes_and_no_gradient():
    for given, dtype in ((torch.int64, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert group_advantages(torch.tensor([1, 0], dtype=given), 2).dtype == dtype
    assert group_advantages([True, False], 2).tolist() == group_advantages([1.0, 0.0], 2).tolist()
    assert not group_advantages(torch.tensor([1.0, 0.0], requires_grad=True), 2).requires_grad
