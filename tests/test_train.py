# SPDX-License-Identifier: MIT
"""A run from end to end, and one RL step: old log-probs, replay, micro-batches, what is left out."""

import copy
import dataclasses
import math

import pytest
import torch
from helpers import TINY, AdamWByHand, fake_gpu, make_learner, results, rollout_of, row_by_row, run, settings

import harness
import imitate
import train
from model import Transformer, load_model, token_logprobs
from sample import Rollout


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
    assert run(monkeypatch, *TINY, "--warm-steps", 30, "--rl-steps", 2, "--out", tmp_path, *flags.split()) == 0
    for name, rows in results(tmp_path).items():
        assert name.endswith(".pt") or name == "eval.csv" or [row["step"] for row in rows] == ["1", "2"]


def test_reward_rises(tmp_path, monkeypatch):
    """Sums of two digits, seconds of imitation, seconds of RL."""
    flags = "--layers 1 --warm-steps 80 --warm-think 0 --rl-steps 25 --prompts 8 --lr 3e-3 --gspo-clip 0.03 0.04"
    assert run(monkeypatch, *TINY, *flags.split(), "--out", tmp_path) == 0
    for name in ("gspo", "grpo"):
        rewards = [float(row["reward"]) for row in results(tmp_path)[f"{name}.csv"]]
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards


def test_a_collapse_is_reported_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "verify", lambda problems, texts: [0.0] * len(texts))
    assert run(monkeypatch, *TINY, "--out", tmp_path, "--rl-steps", 13, "--learners", "gspo") == 0
    out = capsys.readouterr().out
    assert out.count("for 10 steps no group held both") == 1


# Old log-probs, replay, accumulation


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
    learner = make_learner(s)
    problems = train.problems_of(s, 0)
    seen = []
    real = train.response_logprobs
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


@pytest.mark.parametrize("name, low, high", [("gspo", 0.003, 0.004), ("grpo", 0.2, 0.27)])
def test_two_updates_by_hand(name, low, high):
    """Row by row and token by token, the textbook's formula, a gradient clipped to 1, AdamW; at step 2 of the warm-up."""
    s = settings("--micro-tokens", "60")
    learner = make_learner(s, name)
    model = copy.deepcopy(learner.model)
    hand = AdamWByHand(model)
    rollout = rollout_of(learner, s)
    advantages = 30 * torch.randn(32, generator=torch.Generator().manual_seed(0))  # so that norms are above 1
    for minibatch in (range(16), range(16, 32)):
        objective = 0
        for row in minibatch:
            start, end = rollout.spans[row]
            new, _ = row_by_row(model, rollout.tokens[row, :end].tolist(), start)
            log_ratios = new - rollout.logprobs[row, start:end]
            ratios = log_ratios.exp() if name == "grpo" else log_ratios.mean().exp()[None]
            a = advantages[row]
            terms = torch.minimum(ratios * a, ratios.clamp(1 - low, 1 + high) * a)
            objective = objective + terms.mean() / 16
        grads = torch.autograd.grad(-objective, list(model.parameters()))
        assert hand.step(dict(zip(hand.weights, grads)), 1e-3 * 2 / 5) > 1
        model.load_state_dict(hand.weights)
        train.update(learner, rollout, advantages, list(minibatch), s, step=1)
    hand.assert_like(learner, 1e-3 * 2 / 5)


def test_accuracy_is_over_three_terms_and_more():
    results = [
        {"terms": 2, "sampled": 1.0, "greedy": 1.0, "problems": 100},
        {"terms": 3, "sampled": 0.5, "greedy": 1.0, "problems": 10},
        {"terms": 4, "sampled": 0.25, "greedy": 0.0, "problems": 30},
    ]
    assert train.accuracy(results, "sampled") == (5 + 7.5) / 40 and train.accuracy(results, "greedy") == 10 / 40
    assert train.accuracy(results[:1], "sampled") == 1  # where there is nothing else


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
    s = settings()
    rates = []
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
