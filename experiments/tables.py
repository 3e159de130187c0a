# SPDX-License-Identifier: MIT
"""The tables of the sweeps, from the rows in experiments/results alone. Needs numpy.

    python experiments/tables.py pushed        quick-pushed: of the rows that --quick made; without a name: all tables

A cell is the mean over the seeds, and in parentheses the lowest and the highest. A difference is taken seed by seed
between runs from the same warm start; behind it stands on how many seeds it is above 0. Intervals and verdicts stand in
the table of claims alone (`claims.py`): what is looked at in passing gets none.
"""

import sys
from functools import partial

import numpy as np
from claims import BESIDE, CONTROLS, MEASURE, paired, signed
from rows import EXPLORED, PROBES, accuracy, groups, load, mean, refuse, select, values

# Cells: functions of the rows of a line.


def spread(column=MEASURE, **chosen):
    """Mean over the seeds, lowest, highest."""

    def cell(rows):
        numbers = list(values(rows, column, **chosen).values())
        return f"{np.mean(numbers):.3f} ({min(numbers):.2f}–{max(numbers):.2f})" if numbers else "–"

    return cell


def number(column, form, **chosen):
    """The mean over all rows, in this form; "–" where there are none."""

    def cell(rows):
        value = mean(rows, column, **chosen)
        return f"{value:{form}}" if value == value else "–"

    return cell


def lead(first, second, column=MEASURE):
    """How much higher the rows of `first` (a dict of what they have in their columns) stand than those of `second`."""

    def cell(rows):
        differences = list(paired(select(rows, **first), select(rows, **second), column).values())
        if not differences:
            return "–"
        ahead = sum(difference > 0 for difference in differences)
        return f"{signed(np.mean(differences))} ({ahead} of {len(differences)})"

    return cell


def arms(first, second, column=MEASURE):
    return lead({"arm": first}, {"arm": second}, column)


GSPO_GRPO = {"gspo − grpo": arms("gspo", "grpo")}
MEASURES = {
    "mean reward": spread(MEASURE), "best six": spread("best_six"), "accuracy": spread("accuracy"),
    "clipped": number("mean_clip_frac", ".1%"), "approx. KL": number("mean_approx_kl", ".4f"),
}  # fmt: skip


# Tables: lists of lines, first the head.


def table(by, cells, rows, **where):
    """A line for each group of the rows with the values `where`. by: {column that tells them apart: its heading}."""
    lines = [[*by.values(), *cells]]
    for key, here in groups(select(rows, **where), *by).items():
        lines.append([*key, *(cell(here) for cell in cells.values())])
    return lines


def thirds(row):
    """The mean reward of each third of a run's 36 steps."""
    rewards = [float(x) for x in row["reward_by_step"].split()]
    return {f"steps {i + 1}–{i + 12}": sum(rewards[i : i + 12]) / 12 for i in (0, 12, 24)}


def leads(pairs, rows):
    """A line for each pair of arms: on all three measures, and when it comes about. pairs: {words: (arm, arm)}."""
    rows = [row | thirds(row) for row in rows]
    when = list(thirds(rows[0]))
    lines = [["difference", "mean reward", "best six", "accuracy", *when]]
    for words, pair in pairs.items():
        lines.append([words, *(arms(*pair, column)(rows) for column in (MEASURE, *BESIDE, *when))])
    return lines


def split(rows, *columns):
    """The rows with the parts of their arms' names ("gspo, 64 experts") in columns of their own."""
    return [row | dict(zip(columns, row["arm"].split(", "))) for row in rows]


def of_regime(regime, rows):
    """The rows of `choices` of one regime, by rate and by width."""
    rows = select(split(rows, "regime", "objective", "lr", "width"), regime=regime)
    return sorted(rows, key=lambda row: (float(row["lr"]), float(row["width"][1:])))


def choice(regime, rows):
    """Rates and widths of one regime; the best of each objective in bold."""
    rows = of_regime(regime, rows)
    best = {}
    candidates = groups(rows, "objective", "lr", "width")
    most = max(map(len, candidates.values()))
    for (arm, lr, width), here in candidates.items():
        if len(here) == most:  # all seeds have been run
            best[arm] = max(best.get(arm, (-1.0, "", "")), (mean(here, MEASURE), lr, width))
    cells = {}
    for arm in ("gspo", "grpo"):
        cells[arm] = spread(MEASURE, objective=arm)
        cells[f"{arm} clipped"] = number("mean_clip_frac", ".1%", objective=arm)
    lines = table({"lr": f"{regime}: rate", "width": "window"}, cells, rows)
    for line in lines[1:]:
        for arm, place in (("gspo", 2), ("grpo", 4)):
            if arm in best and best[arm][1:] == (line[0], line[1]):
                line[place] = f"**{line[place]}**"
        line[1] = line[1].replace("x", "× ")
    return lines


UNITS = ("sequence", "token", "no")  # of the ratio, and of the clip


def all_pairs():
    """Of the objective taken apart: units of the ratio under each clip, then clips for each unit of the ratio."""
    pairs = {}
    for one, other in (("sequence", "token"), ("sequence", "no"), ("token", "no")):
        for fixed in UNITS:
            name = f"{one} − {other} ratio, {fixed} clip"
            pairs[name] = (f"{one} ratio, {fixed} clip", f"{other} ratio, {fixed} clip")
        for fixed in UNITS:
            name = f"{one} − {other} clip, {fixed} ratio"
            pairs[name] = (f"{fixed} ratio, {one} clip", f"{fixed} ratio, {other} clip")
    return pairs


THE_SAME = {f"control: {control.words}": control.gap for control in CONTROLS}


def by_experts(rows):
    """The rows of `experts`, the smallest number first."""
    return sorted(split(rows, "arm", "experts"), key=lambda row: int(row["experts"].split()[0]))


def experts(rows):
    learners = ("gspo", "grpo", "gspo+replay", "grpo+replay")
    replay = {f"{one}: replay − none": arms(f"{one}+replay", one) for one in ("gspo", "grpo")}
    cells = {learner: spread(arm=learner) for learner in learners} | GSPO_GRPO | replay
    return table({"experts": "mean reward"}, cells, by_experts(rows))


def length(rows):
    rows = split(rows, "arm", "words")
    cells = {
        "tokens": number("mean_length", ".0f"), "before RL": number("before", ".2f"), "gspo": spread(arm="gspo"),
        "grpo": spread(arm="grpo"), **GSPO_GRPO, "sd log w": number("mean_log_ratio_std", ".3f", arm="grpo"),
        "sd log s": number("mean_seq_log_ratio_std", ".4f", arm="grpo"),
        "clipped, gspo": number("mean_clip_frac", ".1%", arm="gspo"),
    }  # fmt: skip
    return table({"words": "after each step"}, cells, rows)


def sampler(window, rows):
    rows = select(split(rows, "arm", "window", "sampler", "old"), window=f"{window} window")
    cells = {}
    for arm in ("gspo", "grpo"):
        sampled = {"arm": arm, "old": "sampler"}
        again = {"arm": arm, "old": "recompute"}
        cells[f"{arm}, the sampler's log-probs"] = spread(**sampled)
        cells[f"{arm}: these − recomputed"] = lead(sampled, again)
        cells[f"{arm}: clipped"] = number("mean_clip_frac", ".1%", **sampled)
    return table({"sampler": f"{window} windows"}, cells, rows)


def quantiles(kind):
    """What fills a cell: two of log w's size; "–" where there are none."""

    def two(rows):
        return f"{mean(rows, 'q90', kind=kind):.3f}, {mean(rows, 'q99', kind=kind):.2f}".replace("nan, nan", "–")

    return two


def by_kind(rows):
    """The rows of `routing` for the worlds of experts. kind: whether a token's experts changed, and were replayed."""
    kinds = {"0": "{tokens} experts", "1": "{tokens} experts, replayed"}
    return [row | {"kind": kinds[row["replay"]].format(**row)} for row in rows if "experts" in row["world"]]


def routing(rows):
    cells = {}
    for what in ("choices", "tokens"):
        for n in ("1", "4", "8"):
            cells[f"{what} changed after {n}"] = number(f"{what}_changed", ".1%", updates=n, replay="0")
    return table({"world": "model"}, cells, by_kind(rows))


def tails(rows):
    kinds = ("same experts", "same experts, replayed", "changed experts", "changed experts, replayed")
    cells = {f"{kind}: q90, q99 of log w's size": quantiles(kind) for kind in kinds}
    return table({"world": "after 8 updates"}, cells, by_kind(rows), updates="8")


BY_LENGTH = ("8 experts", "4 words", "8 words")  # worlds that differ in the length of responses


def ratio(rows):
    cells = {
        "mean length": number("mean_length", ".3g"), "sd log w": number("sd_log_w", ".3g"),
        "sd log s": number("sd_log_s", ".3g"), "coherence": number("coherence", ".2f"),
    }  # fmt: skip
    rows = [row for row in rows if row["world"] in BY_LENGTH]
    return table({"world": "after 8 updates", "length": "tokens in a response"}, cells, rows, updates="8")


def laptop(rows):
    """One line for each learner."""
    lines = [["", "before: sampled", "greedy", "after: sampled", "greedy", "thinks", "tokens"]]
    for learner in ("gspo", "grpo"):
        line = [learner]
        for stage in ("before", "after"):
            results = select(rows, learner=learner, stage=stage)
            line += [f"{accuracy(results, way):.3f}" for way in ("sampled", "greedy")]
        first, *_, last = load(f"laptop-gpu/{learner}")
        line.append(" → ".join(f"{float(step['think_frac']):.0%}" for step in (first, last)))
        line.append(" → ".join(f"{float(step['length']):.0f}" for step in (first, last)))
        lines.append(line)
    return lines


GOALS = {  # of the ratio, or of what is measured
    "default_run": "130 s", "sample_natural": "3", "peak_memory": "at most 0.5", "rl_step_natural": "6",
    "laptop_step": "3", "warm_start": "2", "moe_e64_over_e8": "at most 1.5",
}  # fmt: skip


def bench(rows):
    lines = [["part", "ours", "peer", "unit", "ratio: median (lowest to highest)", "goal"]]
    for row in rows:
        ratio = "{ratio_median} ({ratio_min} to {ratio_max})".format(**row) if row["ratio_median"] else ""
        lines.append([f"`{row['part']}`", row["ours"], row["peer"], row["unit"], ratio, GOALS[row["part"]]])
    return lines


OBJECTIVES = {"gspo − grpo": ("gspo", "grpo")}
FILES = {"laptop": ("laptop-gpu/eval",)}  # whose rows, where not those of its own file
TABLES = {
    "choices": [partial(choice, "tuned"), partial(choice, "pushed"), partial(choice, "coarse")],
    "tuned": [partial(table, {"arm": "4e-4"}, MEASURES), partial(leads, OBJECTIVES)],
    "pushed": [partial(table, {"arm": "8e-4, eight updates"}, MEASURES),
               partial(leads, OBJECTIVES | all_pairs() | THE_SAME)],
    "pushed_best": [partial(table, {"arm": "best windows"}, MEASURES), partial(leads, OBJECTIVES)],
    "experts": [experts],
    "length": [length],
    "sampler": [partial(sampler, "default"), partial(sampler, "best")],
    "routing": [routing, tails],
    "ratio": [ratio],
    "cosine": [partial(table, {"world": "cosine with a fresh gradient"}, {
        gradient: spread("cosine", gradient=gradient)
        for gradient in ("fresh, same size", "stale, no ratio", "stale, token ratio", "stale, sequence ratio")})],
    "why": [partial(table, {"arm": ""}, {
        "accuracy": spread("after"), "drift, wrong": number("mean_wrong_drift", ".4f"),
        "drift, right": number("mean_right_drift", ".4f"), "lost, wrong": number("mean_wrong_lost", ".4f"),
        "clipped": number("mean_clip_frac", ".1%")})],
    "countdown": [partial(table, {"arm": ""}, {
        "accuracy before": spread("before"), "after": spread("after"),
        "thinks, at the end": number("late_think_frac", ".3f"), "tokens": number("late_length", ".0f")})],
    "laptop": [laptop],
    "bench": [bench],
}  # fmt: skip


def rows_of(asked):
    """The rows of a sweep; of quick-NAME, the quick ones. Ends the program where there are none."""
    name = asked.removeprefix("quick-")
    if name not in TABLES or (name != asked and name in (*PROBES, *EXPLORED, "laptop", "bench")):
        refuse(f"there is no sweep {asked}, only {', '.join(TABLES)}, and quick-NAME of those that run.py makes")
    return [row for file in FILES.get(name, (name,)) for row in load(asked.removesuffix(name) + file)]


def tables(asked):
    """The tables of a sweep, as text."""
    found = []
    rows = rows_of(asked)
    for make in TABLES[asked.removeprefix("quick-")]:
        head, *lines = make(rows)
        found.append("\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)))
    return found


if __name__ == "__main__":
    for asked in sys.argv[1:] or TABLES:
        print("\n\n".join(tables(asked)) + "\n")
