# SPDX-License-Identifier: MIT
"""The warm start."""

import copy
import shutil

import pytest
import torch
from helpers import TINY, AdamWByHand, Crash, results, row_by_row, run, settings

import harness
import imitate
from model import Transformer, split_by_length


@pytest.mark.parametrize("aux_coef, micro_tokens", [(0.01, 10**6), (0.5, 60)])
def test_imitation_by_hand(aux_coef, micro_tokens):
    """Steps 0 and 60 of 90: row by row, without packing, and with the optimizer's formula written out.

    The load-balance loss is one of each micro-batch, weighted by the micro-batch's share of the tokens.
    """
    s = settings("--aux-coef", str(aux_coef), "--micro-tokens", str(micro_tokens))
    torch.manual_seed(0)
    trainable = harness.Trainable("warm", Transformer(s.model_config))
    model = copy.deepcopy(trainable.model)
    hand = AdamWByHand(model)
    for step, lr in ((0, 2e-2 * 1 / 100), (60, 2e-2 * 61 / 100 * (1 - 0.9 * 60 / 90))):
        solutions, prompt_lengths = imitate.worked_solutions(s, step)
        rows = [row_by_row(model, *row) for row in zip(solutions, prompt_lengths)]
        loss = -torch.cat([logprobs for logprobs, _ in rows]).mean()
        lengths = [len(solution) for solution in solutions]
        parts = split_by_length(lengths, micro_tokens)
        assert (len(parts) > 1) == (micro_tokens == 60)
        for part in parts:
            share = sum(lengths[row] for row in part) / sum(lengths)
            probs = torch.cat([rows[row][1] for row in part])  # (N, L, E)
            for p in probs.unbind(1):  # two layers; four experts, of which two are chosen
                chosen = torch.zeros_like(p).scatter(1, p.topk(2).indices, 1.0)
                balance = 4 * (chosen.mean(0) / 2 * p.mean(0)).sum()
                loss = loss + aux_coef * share * balance / 2
        grads = torch.autograd.grad(loss, list(model.parameters()))
        norm = hand.step(dict(zip(hand.weights, grads)), lr)
        assert norm > 1, "the clipping must matter"
        model.load_state_dict(hand.weights)
        imitate.imitation_step(trainable, s, step)
    assert trainable.optimizer.param_groups[0]["lr"] == pytest.approx(lr)
    hand.assert_like(trainable, lr)


def test_the_learning_rate_of_imitation(monkeypatch):
    """It rises linearly over 100 steps, while it falls linearly to a tenth at the end."""
    s = settings("--warm-steps", "400", "--warm-batch", "1")
    torch.manual_seed(0)
    trainable = harness.Trainable("warm", Transformer(s.model_config))
    rates = []
    monkeypatch.setattr(trainable, "step", lambda lr, loss: rates.append(lr / 2e-2))
    for step in (0, 49, 99, 100, 200, 399):
        imitate.imitation_step(trainable, s, step)
    assert rates == pytest.approx([0.01, 0.444875, 0.77725, 0.775, 0.55, 0.10225])


def test_a_second_run_takes_the_warm_start_from_the_folder(finished, tmp_path, monkeypatch, capsys):
    shutil.copy(finished / "warm.pt", tmp_path)
    monkeypatch.setattr(imitate, "imitation_step", None)  # must not be needed again
    assert run(monkeypatch, *TINY, "--out", tmp_path) == 0
    assert "taken from" in capsys.readouterr().out and results(tmp_path) == results(finished)


def test_not_finite_in_the_warm_start(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, *TINY, "--out", tmp_path, "--warm-lr", 1e38) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "warm start, step" in error and "is not finite" in error and "--warm-lr" in error


def test_weights_that_are_not_finite_are_never_saved_as_a_warm_start(tmp_path, monkeypatch, capsys):
    real = imitate.imitation_step

    def poisoned(learner, *args):
        result = real(learner, *args)
        learner.model.norm.weight.data[0] = float("nan")
        return result

    monkeypatch.setattr(imitate, "imitation_step", poisoned)
    for steps in (40, 1):  # one ends at a save, one between saves
        assert run(monkeypatch, *TINY, "--warm-steps", steps, "--out", tmp_path / str(steps)) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert "warm start, step" in error and "is not finite" in error
        assert not list((tmp_path / str(steps)).glob("warm.pt"))


def test_resumed_after_a_crash_between_the_last_warm_step_and_its_checkpoint(tmp_path, monkeypatch):
    """The saved state is then that of the last step: nothing is left to imitate, but the checkpoint is not there yet."""
    flags = ["--warm-steps", 80]  # saved at 40 and at 80
    assert run(monkeypatch, *TINY, *flags, "--out", tmp_path / "whole") == 0

    def crash(*args, **kwargs):
        raise Crash

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        patch.setattr(imitate, "checkpoint", crash)
        run(patch, *TINY, *flags, "--out", tmp_path / "killed")
    assert run(monkeypatch, "--resume", tmp_path / "killed") == 0
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
