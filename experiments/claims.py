# SPDX-License-Identifier: MIT
"""The paper's claims at this size: what was to be compared, written down before the runs, and the verdicts by rule.

    python experiments/claims.py            prints the table, from the rows in experiments/results alone (numpy)

Each line compares two arms of a sweep seed by seed, on seeds 20 to 39: how much higher is the first one's measure? Or
two such gaps: how much larger is the first?

- effect: the mean over the seeds.
- interval: the middle 95% of the means of all subsets of the seeds: exact where differences are symmetric about their
  mean (Hartigan 1969, "Using subsample values as typical values").
- p: the share of all ways to flip the differences' signs that give a mean as far from 0: the same assumption, exact.
- Holm: p, corrected for the number of lines (Holm 1979): that one of them all comes out below .05 by chance alone has a
  probability of at most .05.
- verdict: below .05 after Holm "yes", as the paper has it, or "the other way" ("no", where the paper has none of a
  difference); else, if the whole interval is within .02 of 0, "a tie"; else "open". None before all seeds are there.

The primary measure is the mean reward over a run's steps: how much was learnt and kept. Beside it, without a verdict,
stand the effects on the best mean of six consecutive steps (how far it got) and on held-out accuracy at the end (what
is left).
"""

from dataclasses import dataclass

import numpy as np
from rows import RESULTS, read, refuse, select

MEASURE = "mean_reward"
BESIDE = ("best_six", "accuracy")
TIE = 0.02


@dataclass(frozen=True)
class Claim:
    """What is compared: the gap between two arms, or that gap minus another one."""

    claim: int  # of the paper's four, as the README counts them; 0: a control, no claim of the paper
    words: str
    sweep: str
    gap: tuple  # (arm, arm): the measure of the first minus that of the second
    minus: tuple = ()  # another such gap, to be taken off
    paper: int = 1  # what the paper lets one expect: 1 above 0, 0 no difference
    seeds: int = 20


CLAIMS = (
    Claim(1, "the objectives, pushed, default windows", "pushed", ("gspo", "grpo")),
    Claim(1, "the objectives, pushed, each at its best window", "pushed_best", ("gspo", "grpo")),
    Claim(
        1,
        "the ratio's unit, under the sequence's clip",
        "pushed",
        ("sequence ratio, sequence clip", "token ratio, sequence clip"),
    ),
    Claim(
        1,
        "the clip's unit, with the sequence's ratio",
        "pushed",
        ("sequence ratio, sequence clip", "sequence ratio, token clip"),
    ),
    Claim(
        1,
        "the gap with 4 filler words a step minus that with none",
        "length",
        ("gspo, 4 words", "grpo, 4 words"),
        ("gspo, 0 words", "grpo, 0 words"),
    ),
    Claim(
        1,
        "the gap with 8 filler words a step minus that with none",
        "length",
        ("gspo, 8 words", "grpo, 8 words"),
        ("gspo, 0 words", "grpo, 0 words"),
        seeds=10,
    ),
    Claim(
        2,
        "the gap with 64 experts minus that of a dense model",
        "experts",
        ("gspo, 64 experts", "grpo, 64 experts"),
        ("gspo, 2 experts", "grpo, 2 experts"),
    ),
    Claim(2, "replay for GRPO, 64 experts", "experts", ("grpo+replay, 64 experts", "grpo, 64 experts")),
    Claim(2, "replay for GSPO, 64 experts", "experts", ("gspo+replay, 64 experts", "gspo, 64 experts"), paper=0),
    Claim(
        2, "GSPO without replay, GRPO with it, 64 experts", "experts", ("gspo, 64 experts", "grpo+replay, 64 experts")
    ),
    Claim(3, "the objectives, each at its best rate and window", "tuned", ("gspo", "grpo")),
    Claim(
        4,
        "the sampler's log-probs or recomputed ones, bfloat16, GSPO",
        "sampler",
        ("gspo, default window, bfloat16, sampler", "gspo, default window, bfloat16, recompute"),
        paper=0,
    ),
    Claim(
        4,
        "the sampler's log-probs or recomputed ones, 4 bits: GSPO's gap minus GRPO's",
        "sampler",
        ("gspo, default window, 4 bits, sampler", "gspo, default window, 4 bits, recompute"),
        ("grpo, default window, 4 bits, sampler", "grpo, default window, 4 bits, recompute"),
    ),
    Claim(
        4,
        "the same, windows that were best on the sampler's log-probs",
        "sampler",
        ("gspo, best window, 4 bits, sampler", "gspo, best window, 4 bits, recompute"),
        ("grpo, best window, 4 bits, sampler", "grpo, best window, 4 bits, recompute"),
    ),
    Claim(
        4,
        "the objectives on the sampler's log-probs, 4 bits, best windows",
        "sampler",
        ("gspo, best window, 4 bits, sampler", "grpo, best window, 4 bits, sampler"),
    ),
)

# The same gradient, rounded otherwise: how far apart do chance alone and chaos take two such runs?
CONTROLS = (
    Claim(0, "GSPO and itself taken apart", "pushed", ("gspo", "sequence ratio, sequence clip"), paper=0),
    Claim(0, "GRPO and itself taken apart", "pushed", ("grpo", "token ratio, token clip"), paper=0),
)


def paired(first, second, column):
    """{seed: difference} of two arms' rows, of the seeds that both have run from the same start."""
    one, other = ({int(row["seed"]): (row["start"], float(row[column])) for row in rows} for rows in (first, second))
    common = [seed for seed in sorted(one) if seed in other and one[seed][0] == other[seed][0]]
    return {seed: one[seed][1] - other[seed][1] for seed in common}


def gap(rows, arms, column):
    return paired(*(select(rows, arm=arm) for arm in arms), column)


def differences(claim, column=MEASURE):
    """The values of a claim's contrast, one a seed, as far as there are rows."""
    rows = read(RESULTS / f"{claim.sweep}.csv")
    found = gap(rows, claim.gap, column)
    if claim.minus:
        other = gap(rows, claim.minus, column)
        found = {seed: found[seed] - other[seed] for seed in found if seed in other}
    return np.array(list(found.values()))


def subset_sums(values):
    """(sums, counts) of all 2^n subsets, the empty one first."""
    sums = np.zeros(1)
    counts = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums, sums + value])
        counts = np.concatenate([counts, counts + 1])
    return sums, counts


def interval(values):
    """(low, high): the middle 95% of the means of all subsets but the empty one."""
    sums, counts = subset_sums(values)
    means = np.sort(sums[1:] / counts[1:])
    outside = max(1, int(0.025 * len(sums)))  # of the 2^n gaps that they leave, at either end
    return means[outside - 1], means[-outside]


def sign_flip_p(values):
    """Two-sided: the share of the 2^n choices of signs that give a sum as far from 0 as this one."""
    sums, _ = subset_sums(values)
    flipped = 2 * sums - values.sum()  # a subset keeps its sign, the others change theirs
    return float(np.mean(np.abs(flipped) >= abs(values.sum()) - 1e-12))


def holm(ps):
    """Holm's correction: the smallest p times their number, the next times one less, and none below one before it."""
    corrected = np.empty(len(ps))
    highest = 0.0
    for i, k in enumerate(np.argsort(ps, kind="stable")):
        highest = max(highest, min(1.0, ps[k] * (len(ps) - i)))
        corrected[k] = highest
    return corrected


def verdict(claim, effect, bounds, p):
    """By rule. p: after Holm's correction."""
    if p < 0.05:
        if claim.paper == 0:
            return "no"
        return "yes" if effect > 0 else "the other way"
    if -TIE < bounds[0] and bounds[1] < TIE:
        return "a tie"
    return "open"


def signed(x):
    """+.048, as the tables have it"""
    return f"{x:+.3f}".replace("0.", ".", 1)


def line(claim, values, p=None, corrected=None):
    """Cells of a row of the table, from the claim's differences; without p no verdict is due."""
    cells = [claim.claim or "control", claim.words, "" if claim in CONTROLS else ("0", "above 0")[claim.paper]]
    if len(values) < claim.seeds:
        return [*cells, *[""] * 7, f"{len(values)} of {claim.seeds}"]
    bounds = interval(values)
    cells += [signed(values.mean()), f"{signed(bounds[0])} to {signed(bounds[1])}"]
    if p is None:
        cells += ["", "", ""]
    else:
        cells += [f"{p:.2g}", f"{corrected:.2g}", f"**{verdict(claim, values.mean(), bounds, corrected)}**"]
    return [*cells, *(signed(differences(claim, column).mean()) for column in BESIDE), len(values)]


def table():
    """Lines of Markdown: a row for each claim, then the controls."""
    found = [differences(claim) for claim in CLAIMS]
    ps = []
    for claim, values in zip(CLAIMS, found):
        # what is not run yet counts as 1: that corrects the others the most
        ps.append(sign_flip_p(values) if len(values) >= claim.seeds else 1.0)
    head = "claim,compared,expected,effect,95% interval,p,Holm,verdict,best six,accuracy,seeds".split(",")
    rows = [head, ["---"] * len(head)]
    rows += [line(*cells) for cells in zip(CLAIMS, found, ps, holm(ps))]
    rows += [line(control, differences(control)) for control in CONTROLS]
    return [f"| {' | '.join(map(str, row))} |" for row in rows]


if __name__ == "__main__":
    if not any((RESULTS / f"{claim.sweep}.csv").exists() for claim in CLAIMS):
        refuse("there are no rows yet: python experiments/run.py runs a sweep")
    print("\n".join(table()))
