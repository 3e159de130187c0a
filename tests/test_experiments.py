# SPDX-License-Identifier: MIT
"""The sweeps' own arithmetic, and that what is written down of them is what the rows say."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import TINY, random_batch, window

import harness
import train
from grpo import grpo_loss
from gspo import gspo_loss

ROOT = Path(train.__file__).parent
sys.path.insert(0, str(ROOT / "experiments"))
import claims  # noqa: E402
import rows  # noqa: E402
import run  # noqa: E402
import tables  # noqa: E402

# What the sweeps change


def gradient(weight, clip, batch, low, high):
    logprobs = batch["logprobs"].clone().requires_grad_()
    parts = logprobs, batch["old_logprobs"], batch["advantages"], batch["mask"].bool()
    run.decomposed(weight, clip, *parts, low=low, high=high, num_sequences=6).backward()
    return logprobs.grad


@pytest.mark.parametrize(
    "unit, loss, low, high", [("sequence", gspo_loss, 0.03, 0.04), ("token", grpo_loss, 0.2, 0.27)]
)
def test_taken_apart_and_put_together_again(unit, loss, low, high):
    batch = random_batch(1)
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss(logprobs, *(batch[k] for k in ("old_logprobs", "advantages", "mask")), **window(low, high))[0].backward()
    assert (logprobs.grad == 0).sum() > (batch["mask"] == 0).sum(), "something must be clipped"
    torch.testing.assert_close(gradient(unit, unit, batch, low, high), logprobs.grad)


def test_no_ratio_and_no_clip_is_the_plain_policy_gradient():
    batch = random_batch(2)
    lengths = batch["mask"].sum(1, keepdim=True)
    want = -batch["mask"] * batch["advantages"][:, None] / lengths / 6
    torch.testing.assert_close(gradient("no", "no", batch, 0.2, 0.27), want)


def test_drifts_by_hand():
    """Right: moves 0.5 and -1.5 of two tokens, one of which lost e-fold. Wrong: one token, -2. No advantage: none."""
    new = torch.tensor([[-0.5, -2.5], [-3.0, -9.0], [-7.0, -7.0]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    moved = run.drifts(new, torch.tensor([[-1.0]]).expand(3, 2), torch.tensor([1.0, -1.0, 0.0]), mask)
    assert {name: float(value) for name, value in moved.items()} == {
        "right_drift": -0.5, "right_lost": 0.5, "wrong_drift": -2, "wrong_lost": 1,
    }  # fmt: skip


def test_rounding_to_bits():
    model = torch.nn.Linear(8, 4)
    rounded = run.rounded(model, 8)
    assert torch.equal(rounded.bias, model.bias) and not torch.equal(rounded.weight, model.weight)
    step = model.weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded.weight - model.weight).abs() <= step / 2 + 1e-6).all()


def test_words_that_do_not_matter_leave_the_problems_as_they_are():
    plain, wordy = run.Settings(), run.Settings(filler=4)
    for seed in range(5):
        problem = plain.random_problem(harness.rng(seed))
        longer = wordy.random_problem(harness.rng(seed))
        assert longer.prompt == problem.prompt and longer.answer == problem.answer
        steps = problem.steps.split()
        assert [word for word in longer.steps.split() if word not in run.FILLER] == steps
        assert len(longer.steps.split()) == 5 * len(steps)


def test_no_word_tells_whether_a_solution_thinks():
    """Imitation draws it from the same generator next: each word comes first as often where that is below .4 or not."""
    wordy = run.Settings(filler=1)
    first = {True: [], False: []}
    for seed in range(600):
        draw = harness.rng(seed)
        _, word, *_ = wordy.random_problem(draw).steps.split()
        first[draw.random() < 0.4].append(word)
    for word in run.FILLER:
        for found in first.values():
            assert 0.06 < found.count(word) / len(found) < 0.2, word


# One run


def tiny(**more):
    """The settings of a run of seconds, for `run_one` and `warm_one`, which choose folder and learners themselves."""
    values = vars(harness.parse_settings(run.Settings, TINY, "")[0]) | more
    return {name: value for name, value in values.items() if name not in ("out", "device", "save_every", "learners")}


def test_one_run_of_a_sweep(tmp_path, capsys):
    """A warm start, then a run with a sampler of 8 bits on right answers alone."""
    for name in ("warm", "run"):
        (tmp_path / name).mkdir()
    run.warm_one(tiny(), tmp_path / "warm")
    values = tiny(weight="token", clip="no", bits=8, sign=1)
    run.run_one("gspo", values, tmp_path / "warm" / "warm.pt", tmp_path / "run")
    before, done = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line[:1] in "[{")
    assert [row["problems"] for row in before] == [row["problems"] for row in done["evaluation"]] == [4]
    assert not done["broke"]
    history = done["history"]
    assert len(history) == 4 and {*run.DRIFTS, "clip_frac"} < {*history[0]}
    assert history[0]["ratio_min"] != 1  # a rounded sampler is not quite the trainer


def test_a_run_that_breaks_counts_as_nothing_from_there(tmp_path, monkeypatch):
    """In a row: three steps of reward 1, then nan; the steps that it did not reach count as 0, and so does accuracy."""
    folder = run.warm_folder({"seed": 7})
    record = dict.fromkeys(("reward", *run.MEANS, *run.SERIES), 1.0)
    printed = json.dumps({"history": [record] * 3, "evaluation": [], "broke": True})
    monkeypatch.setattr(run, "child", lambda *words: (0, printed))
    monkeypatch.setattr(run, "fingerprint", lambda path: "abcd")
    monkeypatch.setattr(run, "SCRATCH", tmp_path)
    folder = run.warm_folder({"seed": 7})
    folder.mkdir()
    evaluation = [{"terms": 3, "sampled": 0.5, "greedy": 0.5, "problems": 4}]
    (folder / "before.json").write_text(json.dumps(evaluation), encoding="utf-8")
    chosen = run.arm("x", "gspo", lr=1e-3)
    row = run.measure(chosen, 7, "c0ffee", known=[])
    assert row["reward_by_step"].split() == ["1"] * 3 + ["0"] * 33
    assert row["mean_reward"] == 3 / 36 and row["best_six"] == 3 / 6 and row["accuracy"] == 0 and row["before"] == 0.5
    assert (row["commit"], row["start"], row["seed"], row["settings"]) == ("c0ffee", "abcd", "7", "--lr 0.001")
    again = run.measure(chosen | {"arm": "y"}, 7, "later", known=[{k: str(v) for k, v in row.items()}])
    assert again["arm"] == "y" and again["commit"] == "c0ffee"  # the same work is not run twice


def test_sweeps_name_each_setting_once(monkeypatch):
    monkeypatch.setattr(run, "best", lambda regime, objective: {"lr": 3e-4, f"{objective}_clip": [0.5, 0.5]})
    for name, arms in ((name, make()) for name, make in run.SWEEPS.items()):
        works = {(arm["learner"], run.as_text(arm["settings"])) for arm in arms}
        assert len(works) == len({arm["arm"] for arm in arms}) == len(arms), name


def test_the_best_is_that_of_the_highest_mean_reward(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    with pytest.raises(harness.UserError, match="nothing is chosen yet for coarse"):
        run.best("coarse", "gspo")
    found = []
    for i, arm in enumerate(run.candidates("coarse", "gspo")):
        found += [
            {"arm": arm["arm"], "seed": seed, "mean_reward": 0.9 if i == 2 else 0.5 + 0.01 * i} for seed in range(5)
        ]
    rows.write(tmp_path / "choices.csv", found)
    assert run.best("coarse", "gspo") == {"lr": 2e-4, "gspo_clip": [0.03, 0.04]}


# Rows and tables


def test_rows_are_appended(tmp_path):
    rows.append(tmp_path / "x.csv", {"a": 0.1234567, "b": "x, y"})
    rows.append(tmp_path / "x.csv", {"a": 2, "b": ""})
    assert rows.read(tmp_path / "x.csv") == [{"a": "0.12346", "b": "x, y"}, {"a": "2", "b": ""}]


def made_up(name):
    """Rows of a sweep or probe as its script would write them, two seeds; the second start of "grpo" is another one."""
    if name in rows.PROBES:
        world = {"world": "8 experts", "seed": "20", "step": "7", "updates": "8"}
        if name == "routing":
            tails = {
                "tokens": "same",
                "replay": "0",
                "q90": "0.1",
                "q99": "0.2",
                "choices_changed": "0.01",
                "tokens_changed": "0.02",
            }
            return [world | tails, world | tails | {"tokens": "changed", "q90": "nan", "q99": "nan"}]
        if name == "ratio":
            return [
                world | {"length": "2-9", "mean_length": "4", "sd_log_w": "0.5", "sd_log_s": "0.25", "coherence": "1"}
            ]
        return [world | {"gradient": "stale, no ratio", "cosine": "0.25"}]
    found = []
    for arm in run.SWEEPS[name]():
        for seed in (20, 21):
            start = "other" if arm["learner"] == "grpo" and seed == 21 else "same"
            row = {"arm": arm["arm"], "learner": arm["learner"], "seed": str(seed), "start": start, "before": "0.5"}
            row |= dict.fromkeys(
                ("mean_reward", "best_six", "accuracy"), "0.25" if arm["learner"] == "grpo" else "0.75"
            )
            row |= dict.fromkeys((f"mean_{column}" for column in run.MEANS), "0.125")
            found.append(row | {"reward_by_step": " ".join(["0.5"] * 36)})
    return found


@pytest.fixture
def results_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "best", lambda regime, objective: {"lr": 3e-4, f"{objective}_clip": [0.5, 0.5]})
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    for name in (*run.SWEEPS, *rows.PROBES):
        rows.write(tmp_path / f"{name}.csv", made_up(name))
    return tmp_path


def test_every_sweep_has_its_tables(results_folder):
    """The first difference is of one seed only, since the other's two runs began from different warm starts."""
    found = {name: tables.tables(name) for name in (*run.SWEEPS, *rows.PROBES)}
    assert "| gspo | 0.750 (0.75–0.75) |" in found["tuned"][0]
    assert "| gspo − grpo | +.500 (1 of 1) | +.500 (1 of 1) | +.500 (1 of 1) | +.000 (0 of 1) |" in found["tuned"][1]
    assert len(found["pushed"][1].splitlines()) == 2 + 1 + 18 + 2
    assert found["choices"][0].count("**") == 4  # of the best of either objective
    assert "| 64 experts | 0.750 (0.75–0.75) | 0.250 (0.25–0.25) |" in found["experts"][0]
    assert "| 8 words | 0 | 0.50 |" in found["length"][0]
    assert "| 4 bits | 0.750 (0.75–0.75) | +.000 (0 of 2) | 12.5% | 0.250" in found["sampler"][1]
    assert found["routing"][0].endswith("| 8 experts | – | – | 1.0% | – | – | 2.0% |")
    assert "| 8 experts | 0.100, 0.20 | – | – | – |" in found["routing"][1]
    assert "| 8 experts | 2-9 | 4 | 0.5 | 0.25 | 1.00 |" in found["ratio"][0]
    assert "| 8 experts | – | 0.250 (0.25–0.25) | – | – |" in found["cosine"][0]


@pytest.mark.parametrize("name", ["nothing", "quick-laptop", "quick-tuned"])
def test_tables_of_what_is_not_there(name, capsys):
    with pytest.raises(SystemExit):
        tables.tables(name)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_is_written_is_what_the_rows_say():
    """Every table that is announced by its command is what that command prints, and every figure shown is there."""
    for file in ("README.md", "SPEED.md"):
        text = (ROOT / "experiments" / file).read_text(encoding="utf-8")
        announced = [name for name in tables.TABLES if f"tables.py {name}`" in text]
        assert announced, file
        for name in announced:
            for table in tables.tables(name):
                assert table in text, f"python experiments/tables.py {name} prints another table than {file} has"
        for path in re.findall(r"\]\((figures/[^)]+)\)", text):
            assert (ROOT / "experiments" / path).stat().st_size > 1000


def test_the_claims_are_what_the_script_prints():
    assert "\n".join(claims.table()) in (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
