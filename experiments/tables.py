# SPDX-License-Identifier: MIT
"""The tables of the sweeps, from the rows in experiments/results alone. Needs numpy.

    python experiments/tables.py edge          quick-edge: of the rows that --quick made; without a name: all tables

Accuracies are sampled, over some 800 held-out problems of three and more terms. A difference is taken seed by seed; in
brackets its 95% interval, by bootstrap over the seeds (10,000 resamples). With five seeds it is too narrow: it holds
the truth in 85% of cases, and at the edge of stability it misled us (`seeds`).
"""

import sys
from itertools import product

import numpy as np
from rows import PROBES, accuracy, groups, load, mean, refuse, select, values

NEVER = 1e9  # half a window that nothing leaves, as in run.py


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


def readable(row):
    """With the rate as it is typed, the window as text, and the arm's name in parts: head, tail; head, middle, last."""
    if "lr" in row:
        row = row | {"lr": f"{float(row['lr']):.1e}".replace(".0e", "e").replace("e-0", "e-")}
    if "low" in row:
        low, high = ("never" if float(row[half]) == NEVER else f"{float(row[half]):g}" for half in ("low", "high"))
        row = row | {"window": f"−{low} +{high}"}
    head, _, tail = row.get("arm", row.get("gradient", "")).partition(", ")
    middle, _, last = tail.partition(", ")
    return row | {"head": head, "tail": tail, "middle": middle, "last": last}


# A table is a list of lines, the first of which is its head. A cell is a function: of a line's rows, and of all rows.


def table(by, *cells, **where):
    """A function of rows: a line for each group of those that have the values `where`.

    by: {column that tells the groups apart: heading}; cells: (heading, cell).
    """

    def make(rows):
        rows = select(rows, **where)
        lines = [[*by.values(), *(heading for heading, _ in cells)]]
        for key, here in groups(rows, *by).items():
            lines.append([*key, *(cell(here, rows) for _, cell in cells)])
        return lines

    return make


def number(column, form, **chosen):
    """Cell: the mean of a column, over those of the rows that have these values."""
    return lambda here, _: f"{mean(here, column, **chosen):{form}}"


def seeds_of(column="after", **chosen):
    """Cell: the mean over the seeds, and the extremes."""
    return lambda here, _: spread(values(here, column, **chosen))


def gap(a, b, column="after"):
    """Cell: arm a minus arm b."""
    return lambda here, _: difference(values(here, column, arm=a), values(here, column, arm=b))


def against(tail, column="after", **chosen):
    """Cell: minus the arm of the same head with this tail, at the same rate; empty for itself, and where none is."""

    def cell(here, everything):
        here = select(here, **chosen)
        same = groups(here, "head", "lr")
        base = [row for row in select(everything, tail=tail) if (row["head"], row["lr"]) in same]
        return difference(values(here, column), values(base, column)) if base and base != here else ""

    return cell


def race(by, columns):
    """A function of rows: a line for GSPO, for GRPO, and for their difference. columns: {column: heading}."""

    def make(rows):
        lines = table(by, *((heading, seeds_of(column)) for column, heading in columns.items()))(rows)
        gaps = [gap("gspo", "grpo", column)(rows, rows) for column in columns]
        return [*lines, ["gspo − grpo", *[""] * (len(by) - 1), *gaps]]

    return make


PAIRS = (
    ("gspo", "grpo"), ("gspo, rounded otherwise", "grpo"), ("gspo, rounded otherwise", "gspo"), ("grpo, narrow", "grpo"),
    ("grpo, narrow", "gspo"), ("grpo+replay", "grpo"), ("gspo+replay", "gspo"),
)  # fmt: skip
PARTS = {"seeds 0 to 4": range(5), "seeds 5 to 19": range(5, 20), "all twenty": range(20)}


def seeds(rows):
    lines = [["rate", "", *PARTS, "above 0"]]
    for lr, end in (
        ("8e-4", ""),
        ("1.2e-3", ""),
        ("8e-4", ", 8 updates"),
        ("4e-4", ", 16 updates"),
        ("8e-4", ", longer"),
    ):
        for a, b in PAIRS:
            one = values(rows, lr=lr, arm=a + end)
            other = values(rows, lr=lr, arm=b + end)
            if one and other:
                parts = [{seed: x for seed, x in one.items() if seed in part} for part in PARTS.values()]
                ahead = sum(one[seed] > other[seed] for seed in one.keys() & other.keys())
                gaps = [difference(part, other) for part in parts]
                lines.append([lr, f"{a}{end} − {b}{end}", *gaps, f"{ahead} of {len(one)}"])
    return lines


UNITS = ("sequence", "token", "no")  # of the ratio, and of the clip
ROUNDED = ", the same gradient rounded otherwise"
CONTROLS = (("sequence", "gspo", ROUNDED), ("token", "grpo, narrow", ROUNDED), ("sequence", "grpo", ""))


def unit_gaps(rows):
    arm = "{} ratio, {} clip".format
    pairs = []
    for x, clip in product(("token", "no"), UNITS):
        pairs.append((f"sequence − {arm(x, clip)}", arm("sequence", clip), arm(x, clip)))
    for x, clip in product(UNITS, ("sequence", "token")):
        pairs.append((f"{arm(x, clip)} − no clip", arm(x, clip), arm(x, "no")))
    for x, other, note in CONTROLS:
        pairs.append((f"control: {arm(x, x)} − {other}{note}", arm(x, x), other))
    return [["difference", "accuracy"], *([label, gap(a, b)(rows, rows)] for label, a, b in pairs)]


CANDIDATES = {  # what may tell the regimes apart: whose rows, which column
    "updates per step": ("gspo", "updates"), "learning rate": ("grpo", "lr"), "sd log w": ("grpo", "mean_log_ratio_std"),
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


def quantiles(**chosen):
    """Cell: two of log w's size."""
    return lambda here, _: f"{mean(here, 'q90', **chosen):.3f}, {mean(here, 'q99', **chosen):.2f}".replace(
        "nan, nan", "–"
    )


def laptop(rows):
    lines = [["", "before: sampled", "greedy", "after: sampled", "greedy", "thinks", "tokens"]]
    for (learner,), here in groups(rows, "learner").items():
        stages = [select(here, stage=stage) for stage in ("before", "after")]
        cells = [f"{accuracy(stage, way):.3f}" for stage in stages for way in ("sampled", "greedy")]
        for column, form in (("think_frac", ".0%"), ("length", ".0f")):
            cells.append(" → ".join(f"{float(step[column]):{form}}" for step in select(here, stage="step")))
        lines.append([learner, *cells])
    return lines


GOALS = {  # of the ratio, or of what is measured
    "default_run": "130 s", "sample_natural": "3", "peak_memory": "at most 0.5", "rl_step_natural": "6",
    "laptop_step": "3", "warm_start": "2", "second_core": "1.6",
    "moe_e64_over_e8": "at most 1.5", "flop_bound": "at most 2",
}  # fmt: skip


def bench(rows):
    lines = [["part", "ours", "peer", "unit", "ratio: median (lowest to highest)", "goal"]]
    for row in rows:
        ratio = "{ratio_median} ({ratio_min} to {ratio_max})".format(**row) if row["ratio_median"] else ""
        lines.append([f"`{row['part']}`", row["ours"], row["peer"], row["unit"], ratio, GOALS.get(row["part"], "")])
    return lines


def efficiency_rows(sweep):
    """At the rate that was best for each objective on the seeds of choice."""
    found = []
    for arm in ("gspo", "grpo"):
        rates = groups(select(sweep("choose"), arm=f"{arm}, rate"), "lr")
        (best,) = max(rates, key=lambda lr: mean(rates[lr], "after"))
        found += select(sweep("edge"), arm=arm, lr=best)
    return found


def staleness_rows(sweep):
    """By rate and updates. At other rates, `edge` has the runs with four updates."""
    rows = sweep("staleness")
    rates = groups(rows, "lr")
    rows += [row for row in sweep("edge") if row["arm"] in ("gspo", "grpo") and (row["lr"],) not in rates]
    rows = [row | {"arm": row["head"], "updates": row["tail"].removesuffix(" updates") or "4"} for row in rows]
    return sorted(rows, key=lambda row: (float(row["lr"]), int(row["updates"])))


def routing_rows(sweep):
    """By rate; `kind` says what became of the tokens' experts, and which were used when they were scored."""
    kinds = {"same0": "same experts", "same1": "same, replayed", "changed0": "changed", "changed1": "changed, replayed"}
    rows = [row | {"kind": kinds[row["tokens"] + row["replay"]]} for row in sweep("routing")]
    return sorted(rows, key=lambda row: float(row["lr"]))


def laptop_rows(sweep):
    """Of the evaluation, and of the first step and the last."""
    rows = sweep("laptop-gpu/eval")
    for learner in ("gspo", "grpo"):
        first, *_, last = sweep(f"laptop-gpu/{learner}")
        rows += [step | {"learner": learner, "stage": "step"} for step in (first, last)]
    return rows


JOINED = {  # tables of several files' rows
    "efficiency": efficiency_rows,
    "unit": lambda sweep: sweep("unit") + select(sweep("edge"), lr="8e-4"),
    "staleness": staleness_rows,
    "routing": routing_rows,
    "laptop": laptop_rows,
}


def numbers(form, headings, **chosen):
    return [(heading, number(column, form, **chosen)) for column, heading in headings.items()]


def rounded_sampler(head):
    against_exact = ("against float32", against("float32, sampler", head=head))
    return [(head, seeds_of(head=head)), against_exact, ("clipped", number("mean_clip_frac", ".2%", head=head))]


AFTER = ("accuracy after", seeds_of())
GAP = ("gspo − grpo", gap("gspo", "grpo"))
RATE = {"lr": "learning rate"}
COUNTS = ("1", "2", "4")
ARMS = ("gspo", "grpo", "grpo, narrow", "gspo+replay", "grpo+replay")
OF_ARMS = [(arm, seeds_of(arm=arm)) for arm in ARMS]
EDGE_PAIRS = (PAIRS[0], PAIRS[3], ("gspo", "grpo, narrow"), *PAIRS[5:])
WHY = {"mean_wrong_drift": "drift, wrong", "mean_right_drift": "drift, right", "mean_wrong_lost": "lost, wrong"}

TABLES = {
    "choose": [
        table({"arm": "at 8e-4", "window": "window"}, AFTER, tail=""),
        table({"head": "default windows"}, *((lr, seeds_of(lr=lr)) for lr in ("1e-4", "2e-4", "4e-4")), tail="rate"),
    ],
    "edge": [
        table(RATE, *OF_ARMS),
        table(RATE, *((f"{a} − {b}", gap(a, b)) for a, b in EDGE_PAIRS)),
        table(RATE, *((f"clipped, {arm}", number("mean_clip_frac", ".1%", arm=arm)) for arm in ARMS[:3]),
              *((f"thinks, {arm}", number("late_think_frac", ".1%", arm=arm)) for arm in ARMS[:3])),
    ],
    "efficiency": [race({"arm": "", "lr": "its best rate"}, {
        "mean_reward": "reward, mean of 36 steps", "after": "accuracy after", "mean_seconds": "seconds per step"})],
    "slow": [race({"arm": "180 steps at 4e-4"}, {"after": "accuracy after", "late_reward": "reward, last 10 steps"})],
    "seeds": [seeds],
    "unit": [table({"head": ""}, *((f"{x} clip", seeds_of(tail=f"{x} clip")) for x in UNITS), sweep="unit"), unit_gaps],
    "window": [
        table({"arm": f"at {lr}", "window": "window"}, ("tokens clipped", number("mean_clip_frac", ".2%")), AFTER, lr=lr)
        for lr in ("8e-4", "2e-4")
    ],
    "why": [table({"arm": ""}, AFTER, ("against both halves", against("both halves")),
                  *numbers(".4f", WHY | {"mean_clip_frac": "clipped"}))],
    "staleness": [
        table({"lr": "rate", "updates": "updates"}, ("seeds", lambda here, _: str(len(groups(here, "seed")))),
              *OF_ARMS[:2], GAP, ("sd log w, grpo", number("mean_log_ratio_std", ".3f", arm="grpo")),
              ("lost, grpo", number("mean_wrong_lost", ".2%", arm="grpo")),
              ("clipped, gspo", number("mean_clip_frac", ".1%", arm="gspo"))),
        ranks,
    ],
    "precision": [
        table({"middle": f"sampler, at {lr}", "last": "old log-probs"},
              *rounded_sampler("gspo"), *rounded_sampler("grpo"), lr=lr)
        for lr in ("2e-4", "8e-4")
    ],
    "longer": [
        table({"lr": "rate"}, ("tokens at the end", number("late_length", ".0f", arm="grpo")),
              *numbers(".3f", {"mean_log_ratio_std": "sd log w, grpo", "before": "before"}, arm="grpo"), *OF_ARMS[:3], GAP)
    ],
    "countdown": [
        table({"arm": ""}, ("before", seeds_of("before")), ("after", seeds_of()),
              ("gain", lambda here, _: difference(values(here), values(here, "before"))),
              *numbers(".3f", {"late_think_frac": "thinks, at the end"}), *numbers(".0f", {"late_length": "tokens"}))
    ],
    "routing": [
        table({"lr": "rate", "experts": "experts"}, *(
            (f"{what} changed after {n}", number(f"{what}_changed", ".2%", updates=n, replay="0"))
            for what in ("choices", "tokens") for n in COUNTS)),
        table({"lr": "after 4 updates, rate", "experts": "experts"},
              ("same experts: q90, q99 of log w's size", quantiles(tokens="same", replay="0")),
              ("same, replayed", quantiles(tokens="same", replay="1")),
              ("changed: q90, q99", quantiles(tokens="changed", replay="0")),
              ("changed, replayed", quantiles(tokens="changed", replay="1")), updates="4"),
    ],
    "ratio": [
        table({"lr": "rate", "length": "length"}, *numbers(".3g", {
            "mean_length": "mean", "sd_log_w": "sd log w after 4 updates", "sd_log_s": "sd log s"}, updates="4"),
            *((f"coherence after {n}", number("coherence", ".2f", updates=n)) for n in COUNTS), experts="8")
    ],
    "cosine": [table(RATE | {"gradient": "gradient"}, ("cosine with the fresh one", seeds_of("cosine")),
                     ("against no ratio", against("no ratio", "cosine")), experts="8")],
    "laptop": [laptop],
    "bench": [bench],
}  # fmt: skip


def rows_of(asked):
    """The rows that the tables and the figure of a sweep show; of quick-NAME, the quick ones. Else ends the program."""
    name = asked.removeprefix("quick-")
    if name not in TABLES or (name != asked and name in (*PROBES, "laptop", "bench")):
        refuse(f"there is no sweep {asked}, only {', '.join(TABLES)}, and quick-NAME of those that run.py makes")
    prefix = asked.removesuffix(name)

    def sweep(file):
        return [readable(row) | {"sweep": file} for row in load(prefix + file)]

    return JOINED[name](sweep) if name in JOINED else sweep(name)


def markdown(lines):
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (lines[0], ["---"] * len(lines[0]), *lines[1:]))


def tables(asked):
    """The tables of a sweep, as text."""
    rows = rows_of(asked)
    return [markdown(make(rows)) for make in TABLES[asked.removeprefix("quick-")]]


if __name__ == "__main__":
    for asked in sys.argv[1:] or TABLES:
        print("\n\n".join(tables(asked)) + "\n")
