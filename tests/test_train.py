# SPDX-License-Identifier: MIT
"""The wiring: a run from end to end, resuming after a crash anywhere, two processes, and every way to ask for nonsense."""

import copy
import dataclasses
import io
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import kill
import pytest
import torch
from cases import TINY, fake_gpu, results

import harness
import imitate
import sample
import train
from model import ModelConfig, Transformer, checkpoint, load_model, token_logprobs
from sample import Rollout

ROOT = Path(train.__file__).parent


def run(monkeypatch, *argv):
    """train.py in this process. Returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, argv)])
    try:
        harness.run_program(train.main)
    except SystemExit as exit:
        return exit.code
    return 0


def settings(*argv):
    return parsed(*TINY, *argv)


def parsed(*argv):
    return harness.parse_settings(train.Settings, argv, "")[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished tiny run, to compare with."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run(monkeypatch, *TINY, "--out", folder) == 0
    return folder


# A run


def test_what_a_run_leaves(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"gspo.csv", "grpo.csv", "gspo.pt", "grpo.pt", "eval.csv", "settings.json", "state.pt"} <= names
    left = results(finished)
    for name in ("gspo", "grpo"):
        rows = left[f"{name}.csv"]
        assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
        wanted = (
            "reward accuracy length think_frac entropy clip_frac ratio_mean log_ratio_std seq_log_ratio_std approx_kl "
        )
        wanted += "grad_norm expert_change zero_std_groups load_imbalance"
        assert set(wanted.split()) < set(rows[0])
        model, metadata = load_model(finished / f"{name}.pt")
        assert metadata["task"] == "chain-sum" and metadata["learner"] == name and model.config.width == 16
    rows = left["eval.csv"]
    assert [*rows[0]] == ["learner", "stage", "terms", "sampled", "greedy", "problems"]
    assert {(r["learner"], r["stage"]) for r in rows} == {(a, b) for a in ("gspo", "grpo") for b in ("before", "after")}
    assert {r["terms"] for r in rows} == {"2"}


def test_learners_start_equal_and_share_problems_and_noise(finished):
    left = results(finished)
    first, other = left["gspo.csv"][0], left["grpo.csv"][0]
    for name in ("reward", "length", "think_frac", "entropy"):
        assert first[name] == other[name]
    assert left["gspo.pt"] != left["grpo.pt"]
    assert any(float(row["grad_norm"]) > 0 for row in left["gspo.csv"]), (
        "the tiny run must have something to learn from"
    )


def test_same_seed_same_bytes_and_other_seed_others(finished, tmp_path, monkeypatch):
    assert run(monkeypatch, *TINY, "--out", tmp_path / "a") == 0
    assert results(tmp_path / "a") == results(finished)
    assert run(monkeypatch, *TINY, "--out", tmp_path / "b", "--seed", 1) == 0
    assert results(tmp_path / "b") != results(finished)


def test_learners_in_threads_do_what_they_do_one_after_the_other(tmp_path, monkeypatch):
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert run(monkeypatch, *TINY, "--micro-tokens", 60, "--out", tmp_path / str(threads)) == 0
    finally:
        torch.set_num_threads(1)
    one, two = results(tmp_path / "1"), results(tmp_path / "2")
    assert one["eval.csv"] == two["eval.csv"]
    for name in ("gspo", "grpo"):
        assert [row["reward"] for row in one[f"{name}.csv"]] == [row["reward"] for row in two[f"{name}.csv"]]
        for a, b in zip(one[f"{name}.pt"].values(), two[f"{name}.pt"].values()):
            torch.testing.assert_close(
                *(torch.frombuffer(bytearray(x), dtype=torch.float32) for x in (a, b)), rtol=0, atol=1e-4
            )


def test_a_second_run_takes_the_warm_start_from_the_folder(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, *TINY, "--out", tmp_path) == 0
    first = results(tmp_path)
    monkeypatch.setattr(imitate, "imitation_step", None)  # must not be needed again
    assert run(monkeypatch, *TINY, "--out", tmp_path) == 0
    assert "taken from" in capsys.readouterr().out and results(tmp_path) == first


def test_one_minibatch_makes_the_objectives_equal(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, *TINY, "--minibatches", 1, "--out", tmp_path) == 0
    left = results(tmp_path)
    for row, other in zip(left["gspo.csv"], left["grpo.csv"]):
        assert row["reward"] == other["reward"] and {row["clip_frac"], other["clip_frac"]} < {"0", "nan"}
    assert "same gradient" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        "--learners gspo+replay grpo+replay",
        "--task countdown --epochs 2",
        "--old-logprobs recompute --temperature 0.8",
        "--sampler-dtype bfloat16 --dtype bfloat16",
    ],
)
def test_other_ways_to_run(tmp_path, monkeypatch, flags):
    assert run(monkeypatch, *TINY, "--rl-steps", 2, "--out", tmp_path, *flags.split()) == 0
    for name, rows in results(tmp_path).items():
        assert name.endswith(".pt") or name == "eval.csv" or [row["step"] for row in rows] == ["1", "2"]


def test_reward_rises(tmp_path, monkeypatch):
    """Sums of two digits, seconds of imitation, seconds of RL."""
    flags = "--layers 1 --warm-steps 80 --warm-think 0 --rl-steps 40 --prompts 8 --lr 2e-3 --gspo-clip 0.03 0.04"
    assert run(monkeypatch, *TINY, *flags.split(), "--out", tmp_path) == 0
    for name in ("gspo", "grpo"):
        rewards = [float(row["reward"]) for row in results(tmp_path)[f"{name}.csv"]]
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards


# Old log-probs, replay, accumulation


def rollout_of(learner, s):
    return train.respond(learner, train.problems_of(s, 0), s, 0)


def make_learner(s, name="gspo"):
    torch.manual_seed(0)
    return train.Learner(name, Transformer(s.model_config), s)


def test_the_samplers_logprobs_are_the_trainers():
    s = settings()
    learner = make_learner(s)
    rollout = rollout_of(learner, s)
    assert (train.recompute(learner, rollout, s) - rollout.logprobs)[rollout.mask].abs().max() < 1e-5


@pytest.mark.parametrize("name", ["gspo", "grpo", "gspo+replay"])
def test_chunks_and_their_order_do_not_change_an_update(name):
    """Length-sorted chunks of any size give the gradient of the whole minibatch at once."""
    grads = []
    for micro_tokens in (10**6, 60, 1):
        s = settings("--micro-tokens", str(micro_tokens))
        learner = make_learner(s, name)
        rollout = rollout_of(learner, s)
        advantages = torch.randn(32, generator=torch.Generator().manual_seed(0))
        learner.optimizer.step = lambda *a: None
        learner.optimizer.zero_grad = lambda *a, **k: None
        s.prompts, s.group, s.minibatches = 1, 12, 1  # the divisor is that of a whole minibatch of 12
        rollout.logprobs = rollout.logprobs - 0.1 * rollout.mask
        measured = train.update(learner, rollout, advantages, list(range(3, 15)), s, 0)
        assert measured["expert_change"] == 0
        grads.append([*measured.values(), *(p.grad for p in learner.model.parameters())])
        chunks = len(train.micro_batches(rollout, range(32), s))
        assert chunks == {10**6: 1, 1: 32}.get(micro_tokens, chunks) and (micro_tokens != 60 or 1 < chunks < 32)
    for other in grads[1:]:
        for a, b in zip(grads[0], other):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_responses_without_advantage_are_left_out_and_change_nothing(monkeypatch):
    """The gradient of a step's update equals that of the loss over all rows at once, those of advantage 0 among them."""
    s = settings("--micro-tokens", "60", "--minibatches", "1")
    learner, problems, seen, real = make_learner(s), train.problems_of(s, 0), [], train.response_logprobs
    rewards = [1.0] * 8 + [1.0, 0.0] * 4 + [0.0] * 8 + [0.0, 1.0, 1.0, 1.0] * 2  # two of four groups teach
    monkeypatch.setattr(train, "verify", lambda *args: rewards)
    monkeypatch.setattr(
        train,
        "response_logprobs",
        lambda model, tokens, *a, **k: (seen.append(len(tokens)), real(model, tokens, *a, **k))[1],
    )
    learner.optimizer.step = learner.optimizer.zero_grad = lambda *a, **k: None
    rollout = rollout_of(learner, s)
    train.rl_step(learner, problems, s, 0)
    assert sum(seen) == 16 and len(seen) > 1
    logprobs = token_logprobs(learner.model, rollout.tokens)
    loss, _ = learner.loss(logprobs, rollout.logprobs, train.group_advantages(rewards, 8), rollout.mask)
    want = torch.autograd.grad(loss, list(learner.model.parameters()))
    scale = min(1.0, 1 / torch.cat([g.flatten() for g in want]).norm().item())  # the norm is clipped to 1
    for p, b in zip(learner.model.parameters(), want):
        torch.testing.assert_close(p.grad, b * scale, rtol=1e-3, atol=1e-6)


def test_a_step_that_teaches_nothing_changes_nothing(monkeypatch):
    s = settings()
    learner = make_learner(s)
    before = copy.deepcopy(learner.model.state_dict())
    monkeypatch.setattr(train, "verify", lambda *args: [1.0] * 32)
    train.rl_step(learner, train.problems_of(s, 0), s, 0)
    assert not learner.optimizer.state and all(torch.equal(a, before[k]) for k, a in learner.model.state_dict().items())
    record = learner.history[0]
    assert record["reward"] == record["zero_std_groups"] == 1 and math.isnan(record["clip_frac"])
    monkeypatch.setattr(train, "verify", lambda *args: [1.0, 1.0, None, 1.0] * 6 + [1.0, 0.0, None, 1.0] * 2)
    train.rl_step(learner, train.problems_of(s, 0), s, 0)
    assert (
        learner.history[1]["zero_std_groups"] == 0.75
    )  # a group of equal rewards, one of them unknown, teaches nothing


def test_the_last_token_of_a_response_counts_for_no_expert():
    """It never goes through the network, so what stands in its routes is arbitrary."""
    s = settings()
    rollout = rollout_of(make_learner(s), s)
    last = torch.tensor([end - 1 for _, end in rollout.spans])
    readings = []
    for junk in (0, 3):
        rollout.routes[torch.arange(32), last] = junk
        readings.append(train.measure(rollout, [1.0] * 32, torch.zeros(32), s)["load_imbalance"])
    assert readings[0] == readings[1] > 1


def test_the_learning_rate_of_rl_warms_up():
    """Linearly, over 5 steps."""
    s, rates = settings(), []
    for step in (0, 1, 4, 5):
        learner = make_learner(s)
        rollout = rollout_of(learner, s)
        train.update(learner, rollout, torch.ones(32), list(range(8)), s, step)
        rates.append(learner.optimizer.param_groups[0]["lr"] / s.lr)
    assert rates == pytest.approx([0.2, 0.4, 1, 1])


def test_replay_trains_through_the_samplers_experts():
    s = settings()
    plain, replay = make_learner(s, "gspo"), make_learner(s, "gspo+replay")
    rollout = rollout_of(plain, s)
    foreign = dataclasses.replace(rollout, routes=(rollout.routes + 1) % 4)
    a, counts = plain.logprobs(foreign)
    b, _ = replay.logprobs(foreign)
    packed = sum(end - 1 for _, end in rollout.spans)  # a last token does not go through the network
    assert (a - b).abs().max() > 1e-4  # other experts, other log-probs
    assert counts[0] > 0 and counts[1] == 2 * 2 * packed
    assert torch.equal(plain.logprobs(rollout)[0], replay.logprobs(rollout)[0])
    assert plain.logprobs(rollout)[1][0] == 0


def test_minibatches_are_a_partition():
    s = settings("--epochs", "2")
    batches = list(train.random_minibatches(s, 3))
    assert [len(b) for b in batches] == [16] * 4
    assert sorted(batches[0] + batches[1]) == sorted(batches[2] + batches[3]) == [*range(32)]
    assert batches[0] != batches[2] and batches == list(train.random_minibatches(s, 3)) != list(
        train.random_minibatches(s, 4)
    )


def test_no_evaluation_problem_is_trained_on():
    s = settings("--prompts", "64", "--max-terms", "3")
    held_out = {p.prompt for p in train.held_out_problems(s)}
    seen = {p.prompt for step in range(20) for p in train.problems_of(s, step)}
    for step in range(50):
        rows, lengths = imitate.worked_solutions(s, step)
        seen |= {bytes(row[1:n]).decode() for row, n in zip(rows, lengths)}
    assert len(seen) > 100 and not seen & held_out


def test_a_whole_step_stays_on_the_device(monkeypatch):
    """Imitation, sampling, both losses, backward, clipping and the optimizer, on tensors that claim to be on a GPU."""
    s = settings("--max-new-tokens", "4")
    looks = iter([[], [0, 3], [1], []] * 10)
    monkeypatch.setattr("sample.finished_rows", lambda token: next(looks))
    monkeypatch.setattr(harness, "check_finite", lambda **quantities: None)  # looks at values, of which there are none
    monkeypatch.setattr(Rollout, "spans", [(4, 6)] * 32)
    with fake_gpu() as device:
        for name in ("gspo", "grpo+replay"):
            with device:
                learner = train.Learner(name, Transformer(s.model_config), s)
            imitate.imitation_step(learner, s, 0)
            rollout = train.respond(learner, train.problems_of(s, 0), s, 0)
            with device:
                advantages = torch.zeros(32)
            measured = train.update(learner, rollout, advantages, list(range(8)), s, 0)
            old = train.recompute(learner, rollout, s)
            assert {x.device for x in (*measured.values(), old, *learner.model.parameters())} == {device}
            state = [v for p in learner.optimizer.state.values() for k, v in p.items() if k != "step"]
            assert state and all(v.device == device for v in state)


# Nothing lost


class Crash(BaseException):
    """Stands in for kill -9: nothing of ours catches it, what is on the disk stays as it is."""


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
    calls, real = iter(range(10**9)), getattr(module, name)

    def crash(*args, **kwargs):
        if next(calls) == count:
            raise Crash
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        patch.setattr(module, name, crash)
        run(patch, *TINY, "--out", tmp_path)
    assert run(monkeypatch, "--resume", tmp_path) == 0
    assert results(tmp_path) == results(finished)


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
    calls, real = iter(range(10**9)), getattr(module, name)

    def ask(*args):
        if next(calls) == count:
            signal.raise_signal(number)
        return real(*args)

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
    calls, real = iter(range(10**9)), os.fsync

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


def test_a_collapse_is_reported_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "verify", lambda problems, texts: [0.0] * len(texts))
    assert run(monkeypatch, *TINY, "--out", tmp_path, "--rl-steps", 13, "--learners", "gspo") == 0
    out = capsys.readouterr().out
    assert out.count("for 10 steps no group held both") == 1


# Nonsense


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--speed 3", "unrecognized arguments: --speed"),
        ("--learners gspo ppo", "invalid choice: 'ppo'"),
        ("--learners gspo gspo", "names one twice"),
        ("--width 18 --heads 4", "divisible by 2 x heads"),
        ("--kv-heads 3", "divisible by kv_heads"),
        ("--experts 1", "experts_per_token 2 exceeds experts 1"),
        ("--experts 300", "at most 256"),
        ("--group 1", "--group: 1 is not at least 2"),
        ("--prompts 3 --group 3 --minibatches 2", "--minibatches 2 does not divide 9 responses"),
        ("--rl-steps 0", "--rl-steps: 0 is not at least 1"),
        ("--warm-steps -5", "--warm-steps: -5 is not at least 1"),
        ("--temperature 0", "--temperature: 0.0 is not from 1e-06 to"),
        ("--lr nan", "--lr: nan is not above 0"),
        ("--lr 0", "--lr: 0.0 is not above 0"),
        ("--lr fast", "invalid float value: 'fast'"),
        ("--gspo-clip 0 1", "--gspo-clip: 0.0 is not above 0"),
        ("--gspo-clip 0.1", "expected 2 arguments"),
        ("--seed -1", "--seed: -1 is not from 0 to"),
        ("--max-terms 11", "from 2 to 10"),
        ("--largest 100", "100 is not from 2 to 99"),
        ("--max-new-tokens 1000", "does not fit the context"),
        ("--warm-think 1.5", "from 0 to 1"),
        ("--task algebra", "invalid choice: 'algebra'"),
        ("--device cuda", "device cuda is not available"),
        ("--resume nowhere --lr 1", "leave out --lr"),
        ("--resume nowhere", "cannot resume nowhere"),
        ("--resum x", "unrecognized arguments"),
    ],
)
def test_one_clear_line(tmp_path, monkeypatch, capsys, flags, message):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(tmp_path)
    tiny = [] if "--resume" in flags else TINY
    assert run(monkeypatch, *tiny, *flags.split()) == 2
    err = capsys.readouterr().err.strip()
    assert message in err and len(err.splitlines()) == 1 and err.startswith("train.py: ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_settings_says_which(finished, monkeypatch, capsys):
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    assert run(monkeypatch, *TINY, "--out", finished, "--lr", 0.5) == 2
    assert "--lr was 0.001, is 0.5" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("mine")
    assert run(monkeypatch, *TINY, "--out", tmp_path / "file" / "run") == 1
    assert "cannot use" in capsys.readouterr().err and (tmp_path / "file").read_text() == "mine"
    assert run(monkeypatch, *TINY, "--out", tmp_path / "file") == 1


def test_damaged_folders_say_so(finished, tmp_path, monkeypatch, capsys):
    for name, content in [
        ("settings.json", b"{"),
        ("settings.json", b'{"lr": "x"}'),
        ("settings.json", b"[]"),
        ("state.pt", b"x"),
    ]:
        folder = tmp_path / f"{name}{len(content)}"
        folder.mkdir()
        for path in finished.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / name).write_bytes(content)
        for argv in (["--resume", folder], [*TINY, "--out", folder]):
            assert run(monkeypatch, *argv) == 2
            err = capsys.readouterr().err.strip()
            assert name in err and len(err.splitlines()) == 1


def test_help_explains_every_flag(monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    flags = ["--" + name.replace("_", "-") for name in vars(settings())]
    assert len(flags) > 35 and all(flag in text for flag in flags)
    for section in ("the run", "the task", "the model", "imitation", "reinforcement learning"):
        assert f"{section}:" in text


def test_what_was_typed_wins_over_a_preset_even_if_it_is_the_default(finished, monkeypatch, capsys):
    assert parsed("--preset", "laptop-gpu", "--width", "96", "--lr=2e-4").width == 96
    for typed in ("--lr 2e-4", "--lr=2e-4"):
        assert run(monkeypatch, "--resume", finished, *typed.split()) == 2
        assert "leave out --lr" in capsys.readouterr().err


def test_the_run_says_what_was_changed(capsys):
    for argv, changed in (
        (["--task", "countdown"], "nothing"),
        (["--lr", "1e-3", "--layers", "3"], "--layers 3 --lr 0.001"),
    ):
        train.describe(parsed(*argv), torch.device("cpu"))
        assert f"changed     {changed}\n" in capsys.readouterr().out


def test_presets_fit():
    laptop = parsed("--preset", "laptop-gpu", "--lr", "1")
    assert laptop.width == 256 and laptop.lr == 1.0  # a flag beside the preset wins
    with torch.device("meta"):
        total, active = Transformer(laptop.model_config).num_parameters()
    assert 15e6 < total < 25e6 and active < total / 4


# The command line as a person types it; two processes


def command(*argv, **kw):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, argv)], cwd=ROOT, env=env, capture_output=True, text=True, encoding="utf-8", **kw
    )


def test_sample_command(finished, tmp_path, capsys, monkeypatch):
    def ask(*argv, stdin="", checkpoint=finished / "gspo.pt"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            monkeypatch.setattr(sys, "argv", ["sample.py", "--checkpoint", str(checkpoint), *argv])
            harness.run_program(sample.main)
        except SystemExit as exit:
            assert exit.code in (1, 2)
        return capsys.readouterr()

    done = ask("9-1-4+7", "--samples", "2", "--max-new-tokens", "8")
    assert done.out.startswith("9-1-4+7\n") and done.out.count("11 is right") == 2
    done = ask(stdin="1+1\n\nwhat is love\n")
    assert "1+1\n" in done.out and "what is love\n" in done.out
    assert "warning" in done.err and "not a chain-sum problem" in done.err
    torch.manual_seed(0)
    ours = Transformer(ModelConfig(width=16, heads=2, expert_width=16))
    tokens = {"special_tokens": list(sample.SPECIAL_TOKENS)}
    for name, content in {
        "foreign": {"a": 1},
        "vocabulary": checkpoint(ours, task="chain-sum", special_tokens=[]),
        "task": checkpoint(ours, **tokens),
        "tasks": checkpoint(ours, task=[], **tokens),
    }.items():
        torch.save(content, tmp_path / f"{name}.pt")
    (tmp_path / "bad.pt").write_bytes(b"junk")
    for argv, options, message in [
        (["--samples", "0", "1+1"], {}, "at least one"),
        (["--temperature", "-1", "1+1"], {}, "temperature is -1"),
        (["--temperature", "hot", "1+1"], {}, "invalid float value: 'hot' (see --help)"),
        ([], {}, "no question"),
        ([], {"stdin": "\n  \n"}, "no question"),
        (["1+1"], {"checkpoint": "none.pt"}, "none.pt: No such file"),
        (["1+1"], {"checkpoint": tmp_path / "bad.pt"}, "not a checkpoint"),
        (["1+1"], {"checkpoint": tmp_path / "foreign.pt"}, "not a checkpoint of this project"),
        (["1+1"], {"checkpoint": tmp_path / "vocabulary.pt"}, "another vocabulary"),
        (["1+1"], {"checkpoint": tmp_path / "task.pt"}, "another task, None"),
        (["1+1"], {"checkpoint": tmp_path / "tasks.pt"}, "another task, []"),
    ]:
        done = ask(*argv, **options)
        assert message in done.err and len(done.err.splitlines()) == 1 and done.out == "", argv


def torchrun(*argv, script="train.py"):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ["--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    return command("-m", "torch.distributed.run", *address, script, *TINY, *argv, timeout=100)


def test_two_processes_do_what_one_does(finished, tmp_path):
    done = torchrun("--out", tmp_path)
    assert done.returncode == 0, done.stderr
    one, two = results(finished), results(tmp_path)
    assert one["eval.csv"] == two["eval.csv"]
    for name in ("gspo", "grpo"):
        for row, other in zip(one[f"{name}.csv"], two[f"{name}.csv"], strict=True):
            for key in ("reward", "accuracy", "length", "think_frac", "zero_std_groups"):
                assert row[key] == other[key], (key, row["step"])
            for key in (
                "clip_frac",
                "grad_norm",
                "expert_change",
                "entropy",
                "approx_kl",
                "load_imbalance",
                "ratio_mean",
            ):
                assert float(row[key]) == pytest.approx(float(other[key]), rel=2e-3, abs=1e-5, nan_ok=True), (
                    key,
                    row["step"],
                )
        a, b = (load_model(folder / f"{name}.pt")[0].state_dict() for folder in (finished, tmp_path))
        assert max((a[k] - b[k]).abs().max() for k in a) < 1e-5


def test_what_breaks_in_one_process_ends_both(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import harness
import train
real = train.generate
def generate(*args, **options):
    rollout = real(*args, **options)
    if harness.rank() == 1:
        rollout.logprobs[0, 0] = float("nan")
    return rollout
train.generate = generate
harness.run_program(train.main)
""",
        encoding="utf-8",
    )
    done = torchrun("--warm-steps", "1", "--out", tmp_path / "out", script=str(script))
    assert done.returncode != 0 and "step 1, gspo: logprobs is not finite" in done.stderr
    kept = torch.load(tmp_path / "out" / "not-finite-gspo.pt", weights_only=True)
    assert kept["step"] == 1 and harness.load_state(tmp_path / "out" / "state.pt")["step"] == 0


def test_killed_for_real_and_resumed():
    """A short version of `python tests/kill.py`."""
    kill.kill_and_compare(1)


def test_processes_that_do_not_divide_the_problems_are_refused(tmp_path, monkeypatch, capsys):
    for name in harness.TORCHRUN:
        monkeypatch.setenv(name, {"RANK": "0", "LOCAL_RANK": "0"}.get(name, "2"))
    assert run(monkeypatch, *TINY, "--prompts", "3", "--group", "4", "--out", tmp_path / "out") == 2
    assert "--prompts 3 do not divide among 2 processes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
