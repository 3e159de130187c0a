# SPDX-License-Identifier: MIT
"""The warm start."""

import pytest
from helpers import TINY, Crash, results, run

import imitate


def test_a_second_run_takes_the_warm_start_from_the_folder(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, *TINY, "--out", tmp_path) == 0
    first = results(tmp_path)
    monkeypatch.setattr(imitate, "imitation_step", None)  # must not be needed again
    assert run(monkeypatch, *TINY, "--out", tmp_path) == 0
    assert "taken from" in capsys.readouterr().out and results(tmp_path) == first


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
