# SPDX-License-Identifier: MIT
"""Nothing lost: a run that crashes, stops or breaks anywhere goes on, and ends as an undisturbed one."""

import os
import re
import shutil
import signal

import pytest
import torch
from helpers import TINY, Crash, make_learner, results, run, settings

import harness
import imitate
import train


def crash_at(monkeypatch, count):
    """Let the count-th file operation of train.py be the last: half-way through writing, or right after renaming."""
    calls = iter(range(10**9))
    real = os.fsync, os.replace

    def fsync(number):
        if next(calls) == count:
            os.ftruncate(number, 100)
            raise Crash
        real[0](number)

    def replace(a, b):
        if next(calls) == count:
            raise Crash
        real[1](a, b)
        if next(calls) == count:
            raise Crash

    monkeypatch.setattr(harness.os, "fsync", fsync)
    monkeypatch.setattr(harness.os, "replace", replace)
    return calls


def test_how_many_file_operations_there_are(tmp_path, monkeypatch):
    calls = crash_at(monkeypatch, -1)
    assert run(monkeypatch, *TINY, "--out", tmp_path) == 0
    assert next(calls) == 3 * 21, "the crash tests below cover these"


@pytest.mark.parametrize("count", [0, 4, 5, 11, 23, 34, 40, 53, 59])
def test_resumed_after_a_crash_equals_uninterrupted(finished, tmp_path, monkeypatch, count):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        crash_at(patch, count)
        run(patch, *TINY, "--out", tmp_path)
    if (tmp_path / "settings.json").exists():
        assert run(monkeypatch, "--resume", tmp_path) == 0
    else:  # nothing had begun
        assert run(monkeypatch, *TINY, "--out", tmp_path) == 0
    assert results(tmp_path) == results(finished)


@pytest.mark.parametrize("at", [("imitation_step", 4), ("update", 5), ("rl_step", 3), ("rl_step", 7), ("evaluate", 2)])
def test_resumed_after_a_crash_between_saves(finished, tmp_path, monkeypatch, at):
    name, count = at
    module = imitate if name == "imitation_step" else train
    calls = iter(range(10**9))
    real = getattr(module, name)

    def crash(*args, **kwargs):
        if next(calls) == count:
            raise Crash
        return real(*args, **kwargs)

    if module is train:
        shutil.copy(finished / "warm.pt", tmp_path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        patch.setattr(module, name, crash)
        run(patch, *TINY, "--out", tmp_path)
    assert run(monkeypatch, "--resume", tmp_path) == 0
    assert results(tmp_path) == results(finished)


@pytest.mark.parametrize(
    "name, count, number, code",
    [
        ("imitation_step", 3, signal.SIGTERM, 143),
        ("update", 6, signal.SIGINT, 130),
        ("update", 5, signal.SIGTERM, 143),
    ],
)
def test_a_signal_saves_and_says_how_to_go_on(finished, tmp_path, monkeypatch, capsys, name, count, number, code):
    module = imitate if name == "imitation_step" else train
    calls = iter(range(10**9))
    real = getattr(module, name)

    def ask(*args):
        if next(calls) == count:
            signal.raise_signal(number)
        return real(*args)

    if module is train:
        shutil.copy(finished / "warm.pt", tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, ask)
        assert run(patch, *TINY, "--out", tmp_path) == code
    assert f"--resume={tmp_path}" in capsys.readouterr().err.splitlines()[-1]
    assert run(monkeypatch, "--resume", tmp_path) == 0
    assert results(tmp_path) == results(finished)


def test_an_unfinished_run_is_not_overwritten(tmp_path, monkeypatch, capsys):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        crash_at(patch, 30)
        run(patch, *TINY, "--out", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(monkeypatch, *TINY, "--out", tmp_path) == 2
    assert "unfinished run: go on with python train.py --resume" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_is_one_line_and_the_last_state_still_loads(finished, tmp_path, monkeypatch, capsys):
    calls = iter(range(10**9))
    real = os.fsync

    def full(number):
        if next(calls) >= 8:
            raise OSError(28, "No space left on device")
        real(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness.os, "fsync", full)
        assert run(patch, *TINY, "--out", tmp_path) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "No space left on device" in error and "is whole" in error
    assert run(monkeypatch, "--resume", tmp_path) == 0
    assert results(tmp_path) == results(finished)


def test_not_finite_stops_the_run_and_keeps_what_led_to_it(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, *TINY, "--out", tmp_path, "--lr", 1e38) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search("step [12], gspo: ", error) and "is not finite" in error and "not-finite-gspo.pt" in error
    kept = torch.load(tmp_path / "not-finite-gspo.pt", weights_only=True)
    assert {"step", "weights", "tokens", "logprobs", "advantages", "mask"} <= set(kept)
    state = harness.load_state(tmp_path / "state.pt")
    assert state["step"] == 0 and all(w.isfinite().all() for w in state["learners"]["gspo"]["weights"].values())


@pytest.mark.parametrize("quantity", ["loss", "gradient", "logprobs"])
def test_the_first_quantity_that_is_not_finite_is_named(tmp_path, monkeypatch, capsys, quantity):
    if quantity == "gradient":
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a: torch.tensor(float("nan")))
        s = settings()
        with pytest.raises(FloatingPointError, match="gradient"):
            make_learner(s).step(0.1, torch.tensor(0.0))
        return
    real = train.respond if quantity == "logprobs" else train.group_advantages

    def poisoned(*args):
        result = real(*args)
        (result.logprobs if quantity == "logprobs" else result)[...] = float("nan")
        return result

    monkeypatch.setattr(train, real.__name__, poisoned)
    assert run(monkeypatch, *TINY, "--out", tmp_path) == 1
    assert f"step 1, gspo: {quantity} is not finite" in capsys.readouterr().err
