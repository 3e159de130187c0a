# SPDX-License-Identifier: MIT
"""The tables of the sweeps, from the rows in experiments/results alone. Needs numpy.

    python experiments/tables.py edge          quick-edge: of the rows that --quick made; without a name: all tables

Accuracies are sampled, over some 800 held-out problems of three and more terms. A difference is taken seed by seed; in
brackets its 95% interval, by bootstrap over the seeds (10,000 resamples). With five seeds it is too narrow: it holds
the truth in 85% of cases, and at the edge of stability it misled us (`seeds`).
"""

import sys
from functools import partial

import numpy as np
from rows import PROBES, accuracy, groups, load, mean, refuse, select, values


def spread(by_seed):
    """Mean, smallest, largest."""
    numbers = list(by_seed.values())
    return f"{np.mean(numbers):.3f} ({min(numbers):.2f}–{max(numbers):.2f})" if numbers else "–"


def paired(a, b):
    """Mean difference over the seeds that both have, and its 95% bootstrap interval: (mean, low, high)."""
    differences = np.array([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])
    if len(differences) == 0:
        return (np.nan, np.nan, np.nan)
    draws = np.random.default_rng(0).integers(0, len(differences), (10_000, len(differences)))
    return (differences.mean(), *np.quantile(differences[draws].mean(1), (0.025, 0.975)))


def difference(a, b):
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*paired(a, b)) if a.keys() & b.keys() else "–"


def rank_correlation(x, y):
    """Spearman's: of the ranks, where equal values share the mean of theirs."""
    ranks = [(v[:, None] > v).sum(1) + (v[:, None] == v).sum(1) / 2 for v in (np.array(x), np.array(y))]
    return np.corrcoef(*ranks)[0, 1]


# Rows, with what their tables and figures tell them apart by


def readable(row):
    """With the rate as it is typed, the window as text, and the arm's name in parts: head, tail; head, middle, last."""
    if "lr" in row:
        row = row | {"lr": f"{float(row['lr']):.1e}".replace(".0e", "e").replace("e-0", "e-")}
    if "low" in row:  # run.py writes 1e9 for half a window that nothing leaves
        row = row | {"window": f"−{float(row['low']):g} +{float(row['high']):g}".replace("1e+09", "never")}
    head, _, tail = row.get("arm", row.get("gradient", "")).partition(", ")
    middle, _, last = tail.partition(", ")
    return row | {"head": head, "tail": tail, "middle": middle, "last": last}


def efficiency(sweep):
    """At the rate that was best for each objective on the seeds of choice."""
    found = []
    for arm in ("gspo", "grpo"):
        rates = groups(select(sweep("choose"), arm=f"{arm}, rate"), "lr")
        (best,) = max(rates, key=lambda lr: mean(rates[lr], "after"))
        found += select(sweep("edge"), arm=arm, lr=best)
    return found


def staleness(sweep):
    """By rate and updates. At other rates, `edge` has the runs with four updates."""
    rows = sweep("staleness")
    rates = groups(rows, "lr")
    rows += [row for row in sweep("edge") if row["arm"] in ("gspo", "grpo") and (row["lr"],) not in rates]
    rows = [row | {"arm": row["head"], "updates": row["tail"].removesuffix(" updates") or "4"} for row in rows]
    return sorted(rows, key=lambda row: (float(row["lr"]), int(row["updates"])))


def routing(sweep):
    """By rate. kind: whether a token's experts changed, and whether those of the sampler were replayed."""
    kinds = {"0": "experts {tokens}", "1": "{tokens}, replayed"}
    rows = [row | {"kind": kinds[row["replay"]].format(**row)} for row in sweep("routing")]
    return sorted(rows, key=lambda row: float(row["lr"]))


def laptop(sweep):
    """One row for each learner."""
    rows = []
    for learner in ("gspo", "grpo"):
        row = {"learner": learner}
        for stage in ("before", "after"):
            results = select(sweep("laptop-gpu/eval"), learner=learner, stage=stage)
            row |= {f"{stage} {way}": f"{accuracy(results, way):.3f}" for way in ("sampled", "greedy")}
        first, *_, last = sweep(f"laptop-gpu/{learner}")
        row["thinks"] = " → ".join(f"{float(step['think_frac']):.0%}" for step in (first, last))
        row["tokens"] = " → ".join(f"{float(step['length']):.0f}" for step in (first, last))
        rows.append(row)
    return rows


GOALS = {  # of the ratio, or of what is measured
    "default_run": "130 s", "sample_natural": "3", "peak_memory": "at most 0.5", "rl_step_natural": "6",
    "laptop_step": "3", "warm_start": "2", "second_core": "1.6",
    "moe_e64_over_e8": "at most 1.5", "flop_bound": "at most 2",
}  # fmt: skip


def bench(sweep):
    rows = []
    for row in sweep("bench"):
        ratio = "{ratio_median} ({ratio_min} to {ratio_max})".format(**row) if row["ratio_median"] else ""
        rows.append(row | {"name": f"`{row['part']}`", "ratio": ratio, "goal": GOALS.get(row["part"], "")})
    return rows


ROWS = {  # where they are not those of one file, as they are there
    "efficiency": efficiency,
    "unit": lambda sweep: sweep("unit") + select(sweep("edge"), lr="8e-4"),
    "staleness": staleness,
    "routing": routing,
    "laptop": laptop,
    "bench": bench,
}


def rows_of(asked):
    """The rows that the tables and the figure of a sweep show; of quick-NAME, the quick ones. Else ends the program."""
    name = asked.removeprefix("quick-")
    if name not in TABLES or (name != asked and name in (*PROBES, "laptop", "bench")):
        refuse(f"there is no sweep {asked}, only {', '.join(TABLES)}, and quick-NAME of those that run.py makes")

    def sweep(file):
        return [readable(row) | {"sweep": file} for row in load(asked.removesuffix(name) + file)]

    return ROWS[name](sweep) if name in ROWS else sweep(name)


def table(by, cells, rows, minus=False, **where):
    """A list of lines, first the head: a line for each group of the rows with the values `where`.

    by: {column that tells the groups apart: heading}. minus: with one more line, for GSPO minus GRPO.
    """
    rows = select(rows, **where)
    lines = [[*by.values(), *(heading for heading, _ in cells)]]
    for key, here in groups(rows, *by).items():
        lines.append([*key, *(what(here) if callable(what) else text(here, rows, **what) for _, what in cells)])
    if minus:
        gaps = [text(rows, rows, **what | {"arm": "gspo", "minus": "grpo"}) for _, what in cells]
        lines.append(["gspo − grpo", *[""] * (len(by) - 1), *gaps])
    return lines


def cell(heading, column="after", form="", **more):
    """(heading, what `text` takes)."""
    return heading, {"column": column, "form": form, **more}


def gap(a, b):
    return cell(f"{a} − {b}", arm=a, minus=b)


def text(here, rows, column, form, minus="", against="", **chosen):
    """Of those rows of a line that have the values `chosen`: the mean of a column, in this form.

    Without a form: mean and extremes over the seeds; or the difference from the arm `minus`; or that from the arm whose
    name has the same head and the tail `against`, at the same rate, empty where that is itself or nowhere.
    """
    part = select(here, **chosen)
    if form:
        return f"{mean(part, column):{form}}"
    if minus:
        return difference(values(part, column), values(here, column, arm=minus))
    if against:
        same = groups(part, "head", "lr")
        base = [row for row in select(rows, tail=against) if (row["head"], row["lr"]) in same]
        return difference(values(part, column), values(base, column)) if base and base != part else ""
    return spread(values(part, column))


PAIRS = (
    ("gspo", "grpo"), ("gspo, rounded otherwise", "grpo"), ("gspo, rounded otherwise", "gspo"),
    ("grpo, narrow", "grpo"), ("grpo, narrow", "gspo"), ("grpo+replay", "grpo"), ("gspo+replay", "gspo"),
)  # fmt: skip
PARTS = {"seeds 0 to 4": range(5), "seeds 5 to 19": range(5, 20), "all twenty": range(20)}


def seeds(rows):
    lines = [["rate", "", *PARTS, "above 0"]]
    for setting in ("8e-4", "1.2e-3", "8e-4, 8 updates", "4e-4, 16 updates", "8e-4, longer"):
        lr, comma, name = setting.partition(", ")
        for a, b in PAIRS:
            one = values(rows, lr=lr, arm=a + comma + name)
            other = values(rows, lr=lr, arm=b + comma + name)
            if one and other:
                parts = [{seed: x for seed, x in one.items() if seed in part} for part in PARTS.values()]
                ahead = sum(one[seed] > other[seed] for seed in one.keys() & other.keys())
                cells = [*(difference(part, other) for part in parts), f"{ahead} of {len(one)}"]
                lines.append([lr, f"{a}{comma}{name} − {b}{comma}{name}", *cells])
    return lines


UNITS = ("sequence", "token", "no")  # of the ratio, and of the clip
ROUNDED = ", the same gradient rounded otherwise"


def unit_gaps(rows):
    arm = "{} ratio, {} clip".format
    pairs = {}
    for other in ("token", "no"):
        for clip in UNITS:
            pairs[f"sequence − {arm(other, clip)}"] = (arm("sequence", clip), arm(other, clip))
    for ratio in UNITS:
        for clip in ("sequence", "token"):
            pairs[f"{arm(ratio, clip)} − no clip"] = (arm(ratio, clip), arm(ratio, "no"))
    for x, other, note in (("sequence", "gspo", ROUNDED), ("token", "grpo, narrow", ROUNDED), ("sequence", "grpo", "")):
        pairs[f"control: {arm(x, x)} − {other}{note}"] = (arm(x, x), other)
    lines = [[label, difference(values(rows, arm=a), values(rows, arm=b))] for label, (a, b) in pairs.items()]
    return [["difference", "accuracy"], *lines]


CANDIDATES = {  # what may tell the regimes apart: whose rows, which column
    "updates per step": ("gspo", "updates"), "learning rate": ("grpo", "lr"),
    "sd log w": ("grpo", "mean_log_ratio_std"),
    "tokens of wrong responses that lost e-fold": ("grpo", "mean_wrong_lost"),
    "drift of wrong responses": ("grpo", "mean_wrong_drift"), "gradient norm": ("grpo", "mean_grad_norm"),
    "clipped, gspo": ("gspo", "mean_clip_frac"), "accuracy after, grpo": ("grpo", "after"),
}  # fmt: skip


def ranks(rows):
    cells = [here for (_, updates), here in groups(rows, "lr", "updates").items() if updates != "1"]
    gaps = [paired(values(here, arm="gspo"), values(here, arm="grpo"))[0] for here in cells]
    found = {}
    for name, (arm, column) in CANDIDATES.items():
        found[name] = rank_correlation([mean(here, column, arm=arm) for here in cells], gaps)
    head = ["over the cells with two and more updates", "rank correlation with gspo − grpo"]
    return [head, *([name, f"{found[name]:+.2f}"] for name in sorted(found, key=lambda name: -abs(found[name])))]


def quantiles(kind):
    """What fills a cell: two of log w's size; "–" where there are none."""

    def two(rows):
        return f"{mean(rows, 'q90', kind=kind):.3f}, {mean(rows, 'q99', kind=kind):.2f}".replace("nan, nan", "–")

    return two


def sampler(head):
    exact = cell("against float32", against="float32, sampler", head=head)
    return [cell(head, head=head), exact, cell("clipped", "mean_clip_frac", ".2%", head=head)]


RATE = {"lr": "learning rate"}
WINDOW = {"arm": "at 8e-4", "window": "window"}
AFTER = cell("accuracy after")
COUNTS = ("1", "2", "4")
ARMS = ("gspo", "grpo", "grpo, narrow", "gspo+replay", "grpo+replay")
SAMPLERS = sampler("gspo") + sampler("grpo")
OF_ARMS = [cell(arm, arm=arm) for arm in ARMS]

TABLES = {
    "choose": [
        partial(table, WINDOW, [AFTER], tail=""),
        partial(table, {"head": "default windows"}, [cell(lr, lr=lr) for lr in ("1e-4", "2e-4", "4e-4")], tail="rate"),
    ],
    "edge": [
        partial(table, RATE, OF_ARMS),
        partial(table, RATE, [gap("gspo", "grpo"), gap("grpo, narrow", "grpo"), gap("gspo", "grpo, narrow"),
                              gap("grpo+replay", "grpo"), gap("gspo+replay", "gspo")]),
        partial(table, RATE, [cell(f"clipped, {arm}", "mean_clip_frac", ".1%", arm=arm) for arm in ARMS[:3]]
                + [cell(f"thinks, {arm}", "late_think_frac", ".1%", arm=arm) for arm in ARMS[:3]]),
    ],
    "efficiency": [partial(table, {"arm": "", "lr": "its best rate"}, [
        cell("reward, mean of 36 steps", "mean_reward"), AFTER, cell("seconds per step", "mean_seconds")], minus=True)],
    "slow": [partial(
        table, {"arm": "180 steps at 4e-4"}, [AFTER, cell("reward, last 10 steps", "late_reward")], minus=True)],
    "seeds": [seeds],
    "unit": [
        partial(table, {"head": ""}, [cell(f"{clip} clip", tail=f"{clip} clip") for clip in UNITS], sweep="unit"),
        unit_gaps,
    ],
    "window": [
        partial(table, WINDOW | {"arm": f"at {lr}"}, [cell("tokens clipped", "mean_clip_frac", ".2%"), AFTER], lr=lr)
        for lr in ("8e-4", "2e-4")
    ],
    "why": [partial(table, {"arm": ""}, [
        AFTER, cell("against both halves", against="both halves"), cell("drift, wrong", "mean_wrong_drift", ".4f"),
        cell("drift, right", "mean_right_drift", ".4f"), cell("lost, wrong", "mean_wrong_lost", ".4f"),
        cell("clipped", "mean_clip_frac", ".4f")])],
    "staleness": [
        partial(table, {"lr": "rate", "updates": "updates"}, [
            ("seeds", lambda rows: str(len(groups(rows, "seed")))), *OF_ARMS[:2], gap("gspo", "grpo"),
            cell("sd log w, grpo", "mean_log_ratio_std", ".3f", arm="grpo"),
            cell("lost, grpo", "mean_wrong_lost", ".2%", arm="grpo"),
            cell("clipped, gspo", "mean_clip_frac", ".1%", arm="gspo")]),
        ranks,
    ],
    "precision": [
        partial(table, {"middle": f"sampler, at {lr}", "last": "old log-probs"}, SAMPLERS, lr=lr)
        for lr in ("2e-4", "8e-4")
    ],
    "longer": [partial(table, {"lr": "rate"}, [
        cell("tokens at the end", "late_length", ".0f", arm="grpo"),
        cell("sd log w, grpo", "mean_log_ratio_std", ".3f", arm="grpo"),
        cell("before", "before", ".3f", arm="grpo"), *OF_ARMS[:3], gap("gspo", "grpo")])],
    "countdown": [partial(table, {"arm": ""}, [
        cell("before", "before"), cell("after"),
        ("gain", lambda rows: difference(values(rows), values(rows, "before"))),
        cell("thinks, at the end", "late_think_frac", ".3f"), cell("tokens", "late_length", ".0f")])],
    "routing": [
        partial(table, {"lr": "rate", "experts": "experts"}, [
            cell(f"{what} changed after {n}", f"{what}_changed", ".2%", updates=n, replay="0")
            for what in ("choices", "tokens") for n in COUNTS]),
        partial(table, {"lr": "after 4 updates, rate", "experts": "experts"}, [
            ("same experts: q90, q99 of log w's size", quantiles("experts same")),
            ("same, replayed", quantiles("same, replayed")), ("changed: q90, q99", quantiles("experts changed")),
            ("changed, replayed", quantiles("changed, replayed"))], updates="4"),
    ],
    "ratio": [partial(table, {"lr": "rate", "length": "length"}, [
        cell("mean", "mean_length", ".3g", updates="4"),
        cell("sd log w after 4 updates", "sd_log_w", ".3g", updates="4"),
        cell("sd log s", "sd_log_s", ".3g", updates="4"),
        *(cell(f"coherence after {n}", "coherence", ".2f", updates=n) for n in COUNTS)], experts="8")],
    "cosine": [partial(table, RATE | {"gradient": "gradient"}, [
        cell("cosine with the fresh one", "cosine"), cell("against no ratio", "cosine", against="no ratio")],
        experts="8")],
    "laptop": [partial(table, {
        "learner": "", "before sampled": "before: sampled", "before greedy": "greedy",
        "after sampled": "after: sampled", "after greedy": "greedy", "thinks": "thinks", "tokens": "tokens"}, [])],
    "bench": [partial(table, {
        "name": "part", "ours": "ours", "peer": "peer", "unit": "unit", "ratio": "ratio: median (lowest to highest)",
        "goal": "goal"}, [])],
}  # fmt: skip


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
