"""The verdicts of experiments/claims.py, against values worked out by hand."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))
import claims
from claims import Claim, holm, interval, sign_flip_p, verdict


def test_p_is_the_share_of_sign_flips_as_far_from_zero():
    # of the 8 sums ±1 ±2 ±3: 6, 4, 2, 0, 0, -2, -4, -6
    assert sign_flip_p(np.array([1.0, 2.0, 3.0])) == 2 / 8
    assert sign_flip_p(np.array([-1.0, 2.0, 3.0])) == 4 / 8
    assert sign_flip_p(np.zeros(3)) == 1


def test_p_equals_its_slow_twin():
    values = np.random.default_rng(0).normal(0.3, 1, 9)
    flipped = [abs(np.dot(signs, values)) for signs in itertools.product((1, -1), repeat=9)]
    assert sign_flip_p(values) == np.mean(np.array(flipped) >= abs(values.sum()) - 1e-12)


def test_interval_of_subset_means():
    # the means of the 7 subsets: 0, 3, 6, 1.5, 3, 4.5, 3; with three values nothing can be left out but the outermost
    assert interval(np.array([0.0, 3.0, 6.0])) == (0, 6)


def test_interval_and_p_agree():
    """What the interval just excludes has p about .05, what it just includes more."""
    values = np.random.default_rng(1).normal(0, 1, 10)
    low, high = interval(values)
    for edge in (low, high):
        assert sign_flip_p(values - edge) == pytest.approx(0.05, abs=0.006)
    assert low < values.mean() < high


def test_interval_covers_the_truth():
    rng = np.random.default_rng(2)
    covered = []
    for _ in range(600):
        low, high = interval(rng.normal(0.5, 1, 8))
        covered.append(low < 0.5 < high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.03)  # three standard errors


def test_holm_by_hand():
    # in order .01 * 4, .02 * 3, .03 * 2 but not below the one before, .9
    assert holm([0.03, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert holm([0.6, 0.7]) == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("paper", "effect", "bounds", "p", "expected"),
    [
        (1, 0.1, (0.05, 0.15), 0.01, "yes"),
        (1, -0.1, (-0.15, -0.05), 0.01, "the other way"),
        (0, 0.1, (0.05, 0.15), 0.01, "no"),
        (1, 0.015, (0.011, 0.019), 0.001, "yes"),  # small but sure
        (1, 0.001, (-0.01, 0.012), 0.8, "a tie"),
        (0, 0.001, (-0.01, 0.012), 0.8, "a tie"),
        (1, 0.03, (-0.01, 0.07), 0.2, "open"),
        (1, 0.1, (0.05, 0.15), 0.05, "open"),
    ],
)
def test_verdicts_follow_the_rule(paper, effect, bounds, p, expected):
    assert verdict(Claim(1, "", "", (), paper=paper), effect, bounds, p) == expected


def rows_of(path, arms, starts=None):
    """A sweep's file: {arm: values by seed}."""
    lines = ["arm,seed,start,mean_reward,best_six,accuracy"]
    for arm, values in arms.items():
        for seed, value in enumerate(values):
            start = (starts or {}).get((arm, seed), f"s{seed}")
            lines.append(f'"{arm}",{seed},{start},{value},{value},{value}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_gaps_are_taken_seed_by_seed_from_the_same_start(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    arms = {"a": [0.5, 0.7, 0.9], "b": [0.4, 0.5, 0.1], "c, x": [0.3, 0.3], "d": [0.3, 0.2, 0.9]}
    rows_of(tmp_path / "s.csv", arms, starts={("b", 2): "elsewhere"})
    assert claims.differences(Claim(1, "", "s", ("a", "b"))) == pytest.approx([0.1, 0.2])
    assert claims.differences(Claim(1, "", "s", ("a", "b"), ("c, x", "d"))) == pytest.approx([0.1, 0.1])


def test_no_verdict_before_all_seeds_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    monkeypatch.setattr(claims, "CONTROLS", ())
    rng = np.random.default_rng(0)
    rows_of(tmp_path / "s.csv", {"a": 0.5 + rng.random(20) / 10, "b": 0.4 + rng.random(20) / 10})
    rows_of(tmp_path / "t.csv", {"a": [0.9] * 19, "b": [0.1] * 19})
    both = (Claim(1, "full", "s", ("a", "b")), Claim(2, "short", "t", ("a", "b")))
    monkeypatch.setattr(claims, "CLAIMS", both)
    _, _, full, short = claims.table()
    assert "**yes**" in full and full.endswith("| 20 |")
    assert short == "| 2 | short | above 0 |  |  |  |  |  |  |  | 19 of 20 |"
    # two lines stand in the table, so the first p counts twice although the other is not known yet
    ps = [cell.strip() for cell in full.split("|")][6:8]
    assert float(ps[1]) == pytest.approx(2 * float(ps[0]), rel=0.05)


def test_the_arms_of_the_table_exist(monkeypatch):
    import run

    monkeypatch.setattr(run, "best", lambda regime, objective: {"lr": 2e-4, f"{objective}_clip": [0.1, 0.2]})
    for claim in (*claims.CLAIMS, *claims.CONTROLS):
        arms = {x["arm"]: x["seeds"] for x in run.SWEEPS[claim.sweep]()}
        for arm in (*claim.gap, *claim.minus):
            assert arms[arm] >= claim.seeds
