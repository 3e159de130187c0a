# SPDX-License-Identifier: MIT
"""The sweeps' own arithmetic, and that what is written down of them is what the rows say."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import TINY, random_batch, window

import train
from grpo import grpo_loss
from gspo import gspo_loss

ROOT = Path(train.__file__).parent
sys.path.insert(0, str(ROOT / "experiments"))
import plot  # noqa: E402
import run  # noqa: E402


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


def test_rounding_to_bits():
    model = torch.nn.Linear(8, 4)
    rounded = run.rounded(model, 8)
    assert torch.equal(rounded.bias, model.bias) and not torch.equal(rounded.weight, model.weight)
    step = model.weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded.weight - model.weight).abs() <= step / 2 + 1e-6).all()


def test_one_run_of_a_sweep(tmp_path, monkeypatch):
    """With one sign of the advantage, from a warm start that is there; the loss of train.py itself is put back."""
    monkeypatch.setattr(train, "LOSSES", dict(train.LOSSES))
    for name in ("UPDATE_METRICS", "evaluate", "respond"):
        monkeypatch.setattr(train, name, getattr(train, name))
    setting = run.arm("x", "gspo", 1e-3, (0.1, 0.1), steps=4, weight="token", clip="no", bits=8)
    run.run_one(
        setting | {"seed": 0}, tmp_path, tmp_path / "none", flags=[w for w in TINY if w not in ("--lr", "1e-3")]
    )
    with open(tmp_path / "gspo.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and {*run.DRIFTS, "clip_frac"} < {*rows[0]}
    assert float(rows[0]["ratio_min"]) != 1  # a rounded sampler is not quite the trainer


def test_sweeps_name_each_setting_once():
    for settings in run.SWEEPS.values():
        works = [run.work(setting | {"variant": run.variant(setting), "seed": 0}) for setting in settings]
        assert len(set(works)) == len(works) and json.loads(json.dumps(settings))


def test_paired_differences():
    a, b = {0: 0.5, 1: 0.75, 2: 1.0, 3: 9.0}, {0: 0.25, 1: 0.5, 2: 0.75}
    assert plot.paired(a, b) == (0.25, 0.25, 0.25)  # seed 3 has no partner
    mean, low, high = plot.paired({0: 0.0, 1: 1.0}, {0: 0.0, 1: 0.0})
    assert (mean, low, high) == (0.5, 0, 1)


def test_an_interval_of_five_seeds_is_too_narrow():
    """It holds the truth in 85% of cases, as is written: differences drawn from a normal distribution of mean 0."""
    draws, none = np.random.default_rng(0).normal(size=(400, 5)), dict.fromkeys(range(5), 0.0)
    intervals = [plot.paired(dict(enumerate(differences)), none)[1:] for differences in draws]
    assert np.mean([low <= 0 <= high for low, high in intervals]) == pytest.approx(0.85, abs=0.03)


def test_rank_correlation_shares_the_ranks_of_ties():
    assert plot.rank_correlation([1, 2, 3, 9], [1, 4, 9, 81]) == pytest.approx(1)
    # ranks 1.5 1.5 3.5 3.5 and 1 2 3 4: the sum of products is 4, the roots of 4 and 5 divide it
    assert plot.rank_correlation([5, 5, 7, 7], [1, 2, 3, 4]) == pytest.approx(4 / 20**0.5)
    assert plot.rank_correlation([7, 5, 7, 5], [1, 1, 2, 2]) == pytest.approx(0)


def test_what_is_written_is_what_the_rows_say():
    """Every table of the sweeps in experiments/README.md is printed by plot.py, and every figure it shows is there."""
    text = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    swept = [name for name in plot.TABLES if name in text and f"plot.py {name}" in text]
    assert swept
    for name in swept:
        for table in plot.TABLES[name]():
            assert table in text, f"python experiments/plot.py {name} prints another table"
    for path in re.findall(r"\]\((figures/[^)]+)\)", text):
        assert (ROOT / "experiments" / path).stat().st_size > 1000
