# SPDX-License-Identifier: MIT
"""Tables and figures of the sweeps, from the rows in experiments/results alone; and the curves of any run.

    python experiments/plot.py edge                         prints the tables, writes experiments/figures/edge.svg
    python experiments/plot.py quick-edge                   the same of a quick sweep
    python experiments/plot.py out/tiny-chain-sum-seed0     writes curves.svg into the folder of a run

Accuracies are sampled, over some 800 held-out problems of three and more numbers. A difference is taken seed by seed;
in brackets its 95% interval, by bootstrap over the seeds (10,000 resamples). With five seeds it is too narrow: it holds
the truth in 85% of cases, and at the edge of stability it misled us (`seeds`). The figures need matplotlib, the tables
only numpy.
"""

import csv
import sys
from itertools import product
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#56B4E9", "#E69F00", "#CC79A7", "#000000")  # Okabe and Ito: for all eyes
NEVER = 1e9  # as in run.py
QUICK = False  # whether the rows of quick sweeps are asked for


def load(name):
    """The rows of a file; those of a quick sweep, where they are asked for and there."""
    quick = HERE / "results" / f"quick-{name}.csv"
    path = quick if QUICK and quick.exists() else HERE / "results" / f"{name}.csv"
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def values(rows, column="after", **chosen):
    """{seed: value} of the rows that have these values, e.g. arm="gspo", lr=2e-4."""

    def same(text, value):
        return float(text) == value if isinstance(value, float) else text == value

    return {int(r["seed"]): float(r[column]) for r in rows if all(same(r[k], v) for k, v in chosen.items())}


def distinct(rows, column, kind=str):
    return list(dict.fromkeys(kind(r[column]) for r in rows))


def mean(by_seed):
    return np.mean(list(by_seed.values()))


def spread(by_seed):
    """Mean, smallest, largest."""
    return f"{mean(by_seed):.3f} ({min(by_seed.values()):.2f}–{max(by_seed.values()):.2f})"


def paired(a, b):
    """Mean difference over the seeds that both have, and its 95% bootstrap interval: (mean, low, high)."""
    differences = np.array([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])
    draws = np.random.default_rng(0).integers(0, len(differences), (10_000, len(differences)))
    return (differences.mean(), *np.quantile(differences[draws].mean(1), (0.025, 0.975)))


def difference(a, b):
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*paired(a, b))


def table(head, lines):
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines))


def rate(lr):
    """2e-4 and 1.2e-3, as they are typed."""
    return f"{float(lr):.1e}".replace(".0e", "e").replace("e-0", "e-")


def half(x):
    return "never" if x == NEVER else f"{x:g}"


# One function per sweep for its tables, as text.


def choose_tables():
    rows, windows, rates = load("choose"), [], []
    for arm in ("gspo", "grpo"):
        for low, high in dict.fromkeys((float(r["low"]), float(r["high"])) for r in rows if r["arm"] == arm):
            windows.append([arm, f"−{half(low)} +{half(high)}", spread(values(rows, arm=arm, low=low))])
        by_rate = [values(rows, arm=f"{arm}, rate", lr=lr) for lr in (1e-4, 2e-4, 4e-4)]
        rates.append([arm, *map(spread, by_rate)])
    yield table(["at 8e-4", "window", "accuracy after"], windows)
    yield table(["default windows", "1e-4", "2e-4", "4e-4"], rates)


def with_more_seeds(name):
    """The rows of a sweep, and of `seeds` those that are more of the same runs."""

    def work(row):  # what was run, as in run.py, but for the seed
        return tuple(row[column] for column in ("learner", "lr", "low", "high", "steps", "variant"))

    rows = load(name)
    arms, known = {work(r): r["arm"] for r in rows}, {(work(r), r["seed"]) for r in rows}
    more = [] if QUICK else [r for r in load("seeds") if work(r) in arms and (work(r), r["seed"]) not in known]
    return rows + [r | {"arm": arms[work(r)]} for r in more]


def edge_tables():
    rows = with_more_seeds("edge")
    arms, rates = distinct(rows, "arm"), distinct(rows, "lr", float)
    lines = [[rate(lr), *(spread(values(rows, arm=arm, lr=lr)) for arm in arms)] for lr in rates]
    yield table(["learning rate", *arms], lines)
    pairs = (("gspo", "grpo"), ("grpo, narrow", "grpo"), ("gspo", "grpo, narrow"))
    pairs += (("grpo+replay", "grpo"), ("gspo+replay", "gspo"))
    lines = [
        [rate(lr), *(difference(values(rows, arm=a, lr=lr), values(rows, arm=b, lr=lr)) for a, b in pairs)]
        for lr in rates
    ]
    yield table(["learning rate", *(f"{a} − {b}" for a, b in pairs)], lines)
    lines = []
    for lr in rates:
        means = [
            mean(values(rows, name, arm=arm, lr=lr))
            for name in ("mean_clip_frac", "late_think_frac")
            for arm in arms[:3]
        ]
        lines.append([rate(lr), *(f"{100 * x:.1f}%" for x in means)])
    yield table(["learning rate", *(f"clipped, {a}" for a in arms[:3]), *(f"thinks, {a}" for a in arms[:3])], lines)


def efficiency_tables():
    """At the rate that was best for each objective on the seeds of choice."""
    chosen, rows = load("choose"), load("edge")
    best, lines = {}, []
    for arm in ("gspo", "grpo"):
        means = {lr: mean(values(chosen, arm=f"{arm}, rate", lr=lr)) for lr in (1e-4, 2e-4, 4e-4)}
        best[arm] = max(means, key=means.get)
        cells = [spread(values(rows, name, arm=arm, lr=best[arm])) for name in ("mean_reward", "after", "mean_seconds")]
        lines.append([arm, rate(best[arm]), *cells])
    a, b = ({name: values(rows, name, arm=arm, lr=best[arm]) for name in ("mean_reward", "after", "mean_seconds")}
            for arm in ("gspo", "grpo"))  # fmt: skip
    lines.append(["gspo − grpo", "", *(difference(a[name], b[name]) for name in a)])
    yield table(["", "its best rate", "reward, mean of 36 steps", "accuracy after", "seconds per step"], lines)


def slow_tables():
    rows = load("slow")
    lines = [[arm, spread(values(rows, arm=arm)), spread(values(rows, "late_reward", arm=arm))]
             for arm in distinct(rows, "arm")]  # fmt: skip
    lines.append(["gspo − grpo", *(difference(*(values(rows, name, arm=arm) for arm in ("gspo", "grpo")))
                                   for name in ("after", "late_reward"))])  # fmt: skip
    yield table(["180 steps at 4e-4", "accuracy after", "reward, last 10 steps"], lines)


def seeds_tables():
    rows, lines = load("seeds"), []
    pairs = (
        (8e-4, "gspo", "grpo"),
        (8e-4, "gspo, rounded otherwise", "grpo"),
        (8e-4, "gspo, rounded otherwise", "gspo"),
        (8e-4, "grpo, narrow", "grpo"),
        (8e-4, "grpo, narrow", "gspo"),
        (8e-4, "grpo+replay", "grpo"),
        (8e-4, "gspo+replay", "gspo"),
        (1.2e-3, "gspo", "grpo"),
        (1.2e-3, "grpo, narrow", "grpo"),
        (1.2e-3, "grpo, narrow", "gspo"),
        (8e-4, "gspo, 8 updates", "grpo, 8 updates"),
        (8e-4, "grpo, narrow, 8 updates", "grpo, 8 updates"),
        (8e-4, "grpo, narrow, 8 updates", "gspo, 8 updates"),
        (8e-4, "grpo+replay, 8 updates", "grpo, 8 updates"),
        (8e-4, "gspo+replay, 8 updates", "gspo, 8 updates"),
        (4e-4, "gspo, 16 updates", "grpo, 16 updates"),
        (8e-4, "gspo, longer", "grpo, longer"),
    )
    parts = {"seeds 0 to 4": range(5), "seeds 5 to 19": range(5, 20), "all twenty": range(20)}
    for lr, a, b in pairs:
        a_by_seed, b_by_seed = (values(rows, arm=arm, lr=lr) for arm in (a, b))
        cells = [difference({s: x for s, x in a_by_seed.items() if s in part}, b_by_seed) for part in parts.values()]
        ahead = sum(a_by_seed[seed] > b_by_seed[seed] for seed in a_by_seed)
        lines.append([rate(lr), f"{a} − {b}", *cells, f"{ahead} of {len(a_by_seed)}"])
    yield table(["rate", "", *parts, "above 0"], lines)


def unit_tables():
    rows, units = load("unit"), ("sequence", "token", "no")

    def of(weight, clip):
        return values(rows, arm=f"{weight} ratio, {clip} clip")

    lines = [[f"{weight} ratio", *(spread(of(weight, clip)) for clip in units)] for weight in units]
    yield table(["", *(f"{clip} clip" for clip in units)], lines)
    lines = [
        [f"sequence − token ratio, {clip} clip", difference(of("sequence", clip), of("token", clip))] for clip in units
    ]
    lines += [[f"sequence − no ratio, {clip} clip", difference(of("sequence", clip), of("no", clip))] for clip in units]
    for weight in units:
        lines.append([f"{weight} ratio, sequence clip − no clip", difference(of(weight, "sequence"), of(weight, "no"))])
        lines.append([f"{weight} ratio, token clip − no clip", difference(of(weight, "token"), of(weight, "no"))])
    edge = load("edge")
    for arm, unit in (("gspo", "sequence"), ("grpo, narrow", "token")):
        again = difference(of(unit, unit), values(edge, arm=arm, lr=8e-4))
        lines.append([f"control: {unit} ratio, {unit} clip − {arm}, the same gradient rounded otherwise", again])
    against_grpo = difference(of("sequence", "sequence"), values(edge, arm="grpo", lr=8e-4))
    lines.append(["control: sequence ratio, sequence clip − grpo", against_grpo])
    yield table(["difference", "accuracy"], lines)


def window_tables():
    rows = load("window")
    for lr in distinct(rows, "lr", float):
        lines = []
        for arm in ("gspo", "grpo"):
            for low in distinct([r for r in rows if r["arm"] == arm], "low", float):
                chosen = {"arm": arm, "lr": lr, "low": low}
                high = float(next(r for r in rows if r["arm"] == arm and float(r["low"]) == low)["high"])
                clipped = 100 * mean(values(rows, "mean_clip_frac", **chosen))
                lines.append([arm, f"−{half(low)} +{half(high)}", f"{clipped:.2f}%", spread(values(rows, **chosen))])
        yield table([f"at {rate(lr)}", "window", "tokens clipped", "accuracy after"], lines)


def why_tables():
    rows, lines = load("why"), []
    for arm in distinct(rows, "arm"):
        both = values(rows, arm=arm.split(", ")[0] + ", both halves")
        against = "" if arm.endswith("both halves") else difference(values(rows, arm=arm), both)
        columns = ("mean_wrong_drift", "mean_right_drift", "mean_wrong_lost", "mean_clip_frac")
        cells = [f"{mean(values(rows, name, arm=arm)):.4f}" for name in columns]
        lines.append([arm, spread(values(rows, arm=arm)), against, *cells])
    head = ["", "accuracy after", "against both halves", "drift, wrong", "drift, right", "lost, wrong", "clipped"]
    yield table(head, lines)


CANDIDATES = {  # what may tell the regimes apart: whose rows, which column
    "learning rate": ("grpo", "lr"),
    "sd log w": ("grpo", "mean_log_ratio_std"),
    "tokens of wrong responses that lost e-fold": ("grpo", "mean_wrong_lost"),
    "drift of wrong responses": ("grpo", "mean_wrong_drift"),
    "gradient norm": ("grpo", "mean_grad_norm"),
    "clipped, gspo": ("gspo", "mean_clip_frac"),
    "accuracy after, grpo": ("grpo", "after"),
}


def staleness_cells():
    """For each rate and number of updates: (rate, updates, rows of gspo, rows of grpo, the means of CANDIDATES)."""
    rows = with_more_seeds("staleness")
    rates = distinct(rows, "lr", float)
    others = [r for r in with_more_seeds("edge") if r["arm"] in ("gspo", "grpo") and float(r["lr"]) not in rates]
    rows += [r | {"arm": f"{r['arm']}, 4 updates"} for r in others]
    for lr, n in product(sorted(distinct(rows, "lr", float)), (1, 2, 4, 8, 16)):
        of = {
            x: [r for r in rows if r["arm"] == f"{x}, {n} updates" and float(r["lr"]) == lr] for x in ("gspo", "grpo")
        }
        if of["gspo"]:
            means = {name: mean(values(of[arm], column)) for name, (arm, column) in CANDIDATES.items()}
            yield lr, n, of["gspo"], of["grpo"], {"updates per step": n} | means


def rank_correlation(x, y):
    """Spearman's: of the ranks, where equal values share the mean of theirs."""
    ranks = [(v[:, None] > v).sum(1) + (v[:, None] == v).sum(1) / 2 for v in (np.array(x), np.array(y))]
    return np.corrcoef(*ranks)[0, 1]


def staleness_tables():
    lines, gaps, candidates = [], [], []
    for lr, n, *rows, means in staleness_cells():
        gspo, grpo = map(values, rows)
        cells = [rate(lr), str(n), str(len(gspo)), spread(gspo), spread(grpo), difference(gspo, grpo)]
        cells.append(f"{means['sd log w']:.3f}")
        cells += [f"{100 * means['tokens of wrong responses that lost e-fold']:.2f}%"]
        lines.append([*cells, f"{100 * means['clipped, gspo']:.1f}%"])
        if n > 1:
            gaps.append(paired(gspo, grpo)[0])
            candidates.append(means)
    head = ["rate", "updates", "seeds", "gspo", "grpo", "gspo − grpo", "sd log w, grpo", "lost, grpo", "clipped, gspo"]
    yield table(head, lines)
    ranks = {name: rank_correlation([means[name] for means in candidates], gaps) for name in candidates[0]}
    lines = [[name, f"{ranks[name]:+.2f}"] for name in sorted(ranks, key=lambda name: -abs(ranks[name]))]
    yield table(["over the cells with two and more updates", "rank correlation with gspo − grpo"], lines)


def samplers(rows):
    """Of the rows at one rate: the samplers' precisions with the origins of the old log-probs, coarser and coarser."""
    return list(dict.fromkeys(tuple(r["arm"].split(", ")[1:]) for r in rows))


def precision_tables():
    everything = load("precision")
    for lr in distinct(everything, "lr", float):
        rows, lines = [r for r in everything if float(r["lr"]) == lr], []
        for sampler in samplers(rows):
            cells = []
            for learner in ("gspo", "grpo"):
                arm, exact = f"{learner}, {', '.join(sampler)}", values(rows, arm=f"{learner}, float32, sampler")
                against = "" if sampler[0] == "float32" else difference(values(rows, arm=arm), exact)
                clipped = f"{100 * mean(values(rows, 'mean_clip_frac', arm=arm)):.2f}%"
                cells += [spread(values(rows, arm=arm)), against, clipped]
            lines.append([*sampler, *cells])
        columns = [cell for learner in ("gspo", "grpo") for cell in (learner, "against float32", "clipped")]
        yield table([f"sampler, at {rate(lr)}", "old log-probs", *columns], lines)


def longer_tables():
    rows = with_more_seeds("longer")
    arms, rates = distinct(rows, "arm"), distinct(rows, "lr", float)
    lines = []
    for lr in rates:
        by_arm = [values(rows, arm=arm, lr=lr) for arm in arms]
        length, sd = (mean(values(rows, x, arm="grpo", lr=lr)) for x in ("late_length", "mean_log_ratio_std"))
        cells = [f"{mean(values(rows, 'before', arm='grpo', lr=lr)):.3f}", *map(spread, by_arm)]
        lines.append([rate(lr), f"{length:.0f}", f"{sd:.3f}", *cells, difference(*by_arm[:2])])
    yield table(["rate", "tokens at the end", "sd log w, grpo", "before", *arms, "gspo − grpo"], lines)


def countdown_tables():
    rows, lines = load("countdown"), []
    for arm in distinct(rows, "arm"):
        before, after = values(rows, "before", arm=arm), values(rows, arm=arm)
        end = [mean(values(rows, f"late_{name}", arm=arm)) for name in ("think_frac", "length")]
        lines.append([arm, spread(before), spread(after), difference(after, before), f"{end[0]:.3f}", f"{end[1]:.0f}"])
    yield table(["", "before", "after", "gain", "thinks, at the end", "tokens"], lines)


def mean_of(rows, column, **chosen):
    """Mean of a column over the seeds and steps that have these values; nan where there is none."""
    numbers = [float(r[column]) for r in rows if all(r[k] == v for k, v in chosen.items())]
    numbers = [x for x in numbers if x == x]
    return np.mean(numbers) if numbers else float("nan")


def routing_tables():
    rows = load("routing")
    counts, changes, sizes = distinct(rows, "updates"), [], []
    for lr, experts in product(distinct(rows, "lr"), distinct(rows, "experts")):
        here = {"lr": lr, "experts": experts}
        cells = []
        for column in ("choices_changed", "tokens_changed"):
            cells += [f"{100 * mean_of(rows, column, **here, updates=n, replay='0'):.2f}%" for n in counts]
        changes.append([rate(lr), experts, *cells])
        cells = []
        for kind in ("same", "changed"):
            for replay in "01":
                chosen = here | {"updates": counts[-1], "tokens": kind, "replay": replay}
                q = [mean_of(rows, c, **chosen) for c in ("q90", "q99")]
                cells.append("–" if q[0] != q[0] else f"{q[0]:.3f}, {q[1]:.2f}")
        sizes.append([rate(lr), experts, *cells])
    head = [f"{what} changed after {n}" for what in ("choices", "tokens") for n in counts]
    yield table(["rate", "experts", *head], changes)
    head = ["same experts: q90, q99 of log w's size", "same, replayed", "changed: q90, q99", "changed, replayed"]
    yield table([f"after {counts[-1]} updates, rate", "experts", *head], sizes)


def ratio_tables():
    rows, lines = [r for r in load("ratio") if r["experts"] == "8"], []
    counts = distinct(rows, "updates")
    for lr in distinct(rows, "lr"):
        for length in distinct(rows, "length"):
            here = {"lr": lr, "length": length}
            columns = ("mean_length", "sd_log_w", "sd_log_s")
            cells = [f"{mean_of(rows, column, **here, updates=counts[-1]):.3g}" for column in columns]
            cells += [f"{mean_of(rows, 'coherence', **here, updates=n):.2f}" for n in counts]
            lines.append([rate(lr), length, *cells])
    head = ["rate", "length", "mean", f"sd log w after {counts[-1]} updates", "sd log s"]
    yield table([*head, *(f"coherence after {n}" for n in counts)], lines)


def cosine_tables():
    rows, lines = [r for r in load("cosine") if r["experts"] == "8"], []
    for lr in distinct(rows, "lr"):
        by_seed = {
            name: {int(s): mean_of(rows, "cosine", lr=lr, gradient=name, seed=s) for s in distinct(rows, "seed")}
            for name in distinct(rows, "gradient")
        }
        for name, cosines in by_seed.items():
            ours = name in ("stale, token ratio", "stale, sequence ratio")
            against = difference(cosines, by_seed["stale, no ratio"]) if ours else ""
            lines.append([rate(lr), name, spread(cosines), against])
    yield table(["learning rate", "gradient", "cosine with the fresh one", "against no ratio"], lines)


def laptop_tables():
    lines = []
    rows = load("laptop-gpu/eval")
    for learner in ("gspo", "grpo"):
        steps = load(f"laptop-gpu/{learner}")
        cells = []
        for stage in ("before", "after"):
            some = [r for r in rows if (r["learner"], r["stage"]) == (learner, stage) and int(r["terms"]) >= 3]
            problems = [int(r["problems"]) for r in some]
            cells += [
                f"{np.average([float(r[way]) for r in some], weights=problems):.3f}" for way in ("sampled", "greedy")
            ]
        thinks = [f"{100 * float(steps[i]['think_frac']):.0f}%" for i in (0, -1)]
        lengths = [f"{float(steps[i]['length']):.0f}" for i in (0, -1)]
        lines.append([learner, *cells, " → ".join(thinks), " → ".join(lengths)])
    yield table(["", "before: sampled", "greedy", "after: sampled", "greedy", "thinks", "tokens"], lines)


GOALS = {  # of the ratio, or of what is measured
    "default_run": "130 s", "sample_natural": "3", "peak_memory": "at most 0.5", "rl_step_natural": "6",
    "laptop_step": "3", "warm_start": "2", "second_core": "1.6",
    "moe_e64_over_e8": "at most 1.5", "flop_bound": "at most 2",
}  # fmt: skip


def bench_tables():
    lines = []
    for r in load("bench"):
        ratio = f"{r['ratio_median']} ({r['ratio_min']} to {r['ratio_max']})" if r["ratio_median"] else ""
        lines.append([f"`{r['part']}`", r["ours"], r["peer"], r["unit"], ratio, GOALS.get(r["part"], "")])
    yield table(["part", "ours", "peer", "unit", "ratio: median (lowest to highest)", "goal"], lines)


# Figures


def axes(columns, width=9.0, height=3.6):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "tiny-gspo",
        "axes.prop_cycle": plt.cycler(color=COLOURS), "legend.frameon": False, "axes.grid": True, "grid.alpha": 0.25,
    })  # fmt: skip
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained", facecolor="white", squeeze=False)


def write(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    print(f"written to {path}")


def line_with_seeds(ax, x, by_seed, label, colour, **style):
    """A line through the means, a faint dot for each seed."""
    ax.plot(x, [mean(b) for b in by_seed], color=colour, label=label, **style)
    for place, b in zip(x, by_seed):
        ax.plot([place] * len(b), list(b.values()), ".", color=colour, alpha=0.35, markersize=5)


def edge_figure():
    rows = with_more_seeds("edge")
    rates = distinct(rows, "lr", float)
    figure, ((left, right),) = axes(2)
    styles = {"gspo": "-", "grpo": "-", "grpo, narrow": "--", "gspo+replay": ":", "grpo+replay": ":"}
    for (arm, style), colour in zip(styles.items(), (0, 1, 1, 0, 1)):
        line_with_seeds(left, rates, [values(rows, arm=arm, lr=lr) for lr in rates], arm, COLOURS[colour], ls=style)
    before = mean(values(rows, "before", arm="gspo", lr=rates[0]))
    left.axhline(before, color="grey", lw=1)
    left.annotate("before RL", (rates[0], before), xytext=(0, 4), textcoords="offset points", color="grey")
    left.set(xscale="log", xlabel="learning rate", ylabel="held-out accuracy", ylim=(0, 1), title="Where each breaks")
    left.legend(loc="lower left")
    pairs = (("gspo", "grpo", 0), ("grpo, narrow", "grpo", 2), ("grpo+replay", "grpo", 5))
    for i, (a, b, colour) in enumerate(pairs):
        d = np.array([paired(values(rows, arm=a, lr=lr), values(rows, arm=b, lr=lr)) for lr in rates])
        x = np.array(rates) * 1.06 ** (i - 1)
        right.errorbar(x, d[:, 0], [d[:, 0] - d[:, 1], d[:, 2] - d[:, 0]], fmt="o", ms=4, capsize=3,
                       color=COLOURS[colour], label=f"{a} − {b}")  # fmt: skip
    right.axhline(0, color="black", lw=1)
    right.set(xscale="log", xlabel="learning rate", title="Paired differences, 95% intervals")
    right.legend(loc="upper left")
    for ax in (left, right):
        ax.set_xticks(rates, [rate(lr) for lr in rates], rotation=30)
        ax.minorticks_off()
    return figure


def curves(ax, rows, column, arms):
    """Mean over the seeds of a column `..._by_step`, for each arm."""
    for arm, style in arms.items():
        lines = [r[f"{column}_by_step"].split() for r in rows if r["arm"] == arm]
        shortest = min(map(len, lines))
        series = np.array([[float(v) for v in line[:shortest]] for line in lines])
        ax.plot(range(1, shortest + 1), np.nanmean(series, 0), label=arm, **style)
    ax.set(xlabel="step")


def slow_figure():
    rows = load("slow")
    figure, ((left, right),) = axes(2)
    for ax, column in ((left, "reward"), (right, "entropy")):
        curves(ax, rows, column, {"gspo": {"color": COLOURS[0]}, "grpo": {"color": COLOURS[1]}})
        ax.set(title=f"{column}, mean of the seeds, 4e-4")
    left.legend()
    return figure


def unit_figure():
    rows, units = load("unit"), ("sequence", "token", "no")
    figure, ((ax,),) = axes(1, 6)
    for i, weight in enumerate(units):
        by_seed = [values(rows, arm=f"{weight} ratio, {clip} clip") for clip in units]
        line_with_seeds(
            ax, [x + (i - 1) * 0.1 for x in range(3)], by_seed, f"{weight} ratio", COLOURS[i], ls="", marker="_", ms=14
        )
    ax.set_xticks(range(3), [f"{clip} clip" for clip in units])
    ax.set(ylabel="held-out accuracy", ylim=(0, 1), title="The ratio's unit, and the clip's, at the edge (8e-4)")
    ax.legend()
    return figure


def window_figure():
    rows = load("window")
    rates = sorted(distinct(rows, "lr", float))
    figure, panels = axes(2)
    for ax, lr in zip(panels[0], rates):
        for arm, colour in (("gspo", 0), ("grpo", 1)):
            lows = distinct([r for r in rows if r["arm"] == arm], "low", float)
            by_seed = [values(rows, arm=arm, lr=lr, low=low) for low in lows]
            clipped = [mean(values(rows, "mean_clip_frac", arm=arm, lr=lr, low=low)) for low in lows]
            x = [max(100 * share, 1e-3) for share in clipped]
            line_with_seeds(ax, x, by_seed, arm, COLOURS[colour], marker="o", ms=4)
        ax.set(xscale="log", xlabel="tokens clipped, % (0.001: none)", ylim=(0, 1), title=f"learning rate {rate(lr)}")
    panels[0][0].set(ylabel="held-out accuracy")
    panels[0][0].legend(loc="lower right")
    return figure


def why_figure():
    rows = load("why")
    figure, panels = axes(3, 11, 4)
    styles = {
        "gspo, both halves": {"color": COLOURS[0]},
        "gspo, clips wrong answers": {"color": COLOURS[0], "ls": "--"},
        "gspo, clips right answers": {"color": COLOURS[0], "ls": ":"},
        "gspo, never clips": {"color": COLOURS[5]},
        "grpo, never clips": {"color": COLOURS[1]},
    }
    titles = {"reward": "reward", "wrong_lost": "wrong tokens that lost e-fold", "entropy": "entropy, nats"}
    for ax, (column, title) in zip(panels[0], titles.items()):
        curves(ax, rows, column, styles)
        ax.set(title=title)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def staleness_figure():
    cells = list(staleness_cells())
    figure, ((*panels, last),) = axes(4, 13, 3.4)
    for ax, lr in zip(panels, (2e-4, 4e-4, 8e-4)):
        here = [cell for cell in cells if cell[0] == lr]
        counts = [n for _, n, *_ in here]
        for arm, colour, place in (("gspo", 0, 2), ("grpo", 1, 3)):
            line_with_seeds(ax, counts, [values(cell[place]) for cell in here], arm, COLOURS[colour])
        before = mean(values(here[0][2], "before"))
        ax.axhline(before, color="grey", lw=1)
        ax.annotate("before RL", (1, before), xytext=(0, -12), textcoords="offset points", color="grey", fontsize=8)
        ax.set(xscale="log", xlabel="updates per step", ylim=(0, 1), title=f"learning rate {rate(lr)}")
        ax.set_xticks(counts, map(str, counts))
        ax.minorticks_off()
    panels[0].set(ylabel="held-out accuracy")
    panels[0].legend(loc="lower left")
    for _, n, gspo, grpo, means in (cell for cell in cells if cell[1] > 1):
        x, (y, low, high) = means["sd log w"], paired(values(gspo), values(grpo))
        last.errorbar([x], [y], [[y - low], [high - y]], fmt="o", ms=4, capsize=2, color=COLOURS[2])
        last.annotate(str(n), (x, y), xytext=(4, 3), textcoords="offset points", fontsize=8)
    last.axhline(0, color="black", lw=1)
    last.set(xscale="log", xlabel="spread of the token ratios (sd log w, grpo)", title="gspo − grpo (number: updates)")
    return figure


def precision_figure():
    everything = load("precision")
    figure, panels = axes(2, 12)
    for ax, lr in zip(panels[0], distinct(everything, "lr", float)):
        rows = [r for r in everything if float(r["lr"]) == lr]
        ways = samplers(rows)
        for i, (arm, colour) in enumerate((("gspo", 0), ("grpo", 1))):
            by_seed = [values(rows, arm=f"{arm}, {', '.join(way)}") for way in ways]
            places = [x + 0.2 * (i - 0.5) for x in range(len(ways))]
            line_with_seeds(ax, places, by_seed, arm, COLOURS[colour], ls="", marker="_", ms=14)
        ax.set(ylim=(0, 1), title=f"learning rate {rate(lr)}")
        ax.set_xticks(range(len(ways)), ["\n".join(way) for way in ways], fontsize=8)
    panels[0][0].set(ylabel="held-out accuracy")
    panels[0][0].legend(loc="lower left")
    return figure


def routing_figure():
    rows = [r for r in load("routing") if r["updates"] == "4" and r["experts"] != "2"]
    figure, panels = axes(2)
    kinds = (
        ("same", "0", "experts the same", 0),
        ("changed", "0", "experts changed", 1),
        ("changed", "1", "changed, replayed", 4),
    )
    for ax, lr in zip(panels[0], distinct(rows, "lr")):
        for i, (tokens, replay, label, colour) in enumerate(kinds):
            experts = distinct(rows, "experts")
            heights = [mean_of(rows, "q99", lr=lr, experts=e, tokens=tokens, replay=replay) for e in experts]
            ax.bar([x + 0.27 * (i - 1) for x in range(3)], heights, 0.25, color=COLOURS[colour], label=label)
        ax.set(title=f"learning rate {rate(lr)}", xlabel="experts")
        ax.set_xticks(range(3), experts)
    panels[0][0].set(ylabel="99th percentile of |log w|")
    panels[0][0].legend(loc="upper left")
    return figure


def ratio_figure():
    rows = [r for r in load("ratio") if r["experts"] == "8" and r["updates"] == "4"]
    figure, ((ax,),) = axes(1, 6)
    for lr, colour in zip(distinct(rows, "lr"), (0, 1)):
        bins = distinct(rows, "length")
        x = [mean_of(rows, "mean_length", lr=lr, length=length) for length in bins]
        y = [mean_of(rows, "coherence", lr=lr, length=length) for length in bins]
        ax.plot(x, y, "o-", color=COLOURS[colour], label=f"measured, {rate(lr)}")
    x = np.linspace(2, 60)
    ax.plot(x, np.sqrt(x), ":", color="grey", label="all tokens move together")
    ax.plot(x, np.ones_like(x), "--", color="grey", label="independent noise")
    ax.set(xlabel="tokens in a response", ylabel="coherence", ylim=(0, 8), title="Is the mean over a response noise?")
    ax.legend()
    return figure


def cosine_figure():
    rows = [r for r in load("cosine") if r["experts"] == "8"]
    names, (figure, ((ax,),)) = distinct(rows, "gradient"), axes(1, 6)
    for i, (lr, colour) in enumerate(zip(distinct(rows, "lr"), (0, 1))):
        by_seed = [
            {int(s): mean_of(rows, "cosine", lr=lr, gradient=name, seed=s) for s in distinct(rows, "seed")}
            for name in names
        ]
        places = [x + 0.2 * (i - 0.5) for x in range(len(names))]
        line_with_seeds(ax, places, by_seed, rate(lr), COLOURS[colour], ls="", marker="_", ms=14)
    ax.set(ylabel="cosine with a large fresh gradient", title="Whose correction corrects?")
    ax.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8)
    ax.legend()
    return figure


def longer_figure():
    rows = with_more_seeds("longer")
    figure, ((ax,),) = axes(1, 6)
    rates = distinct(rows, "lr", float)
    for i, arm in enumerate(distinct(rows, "arm")):
        by_seed = [values(rows, arm=arm, lr=lr) for lr in rates]
        places = [x + 0.2 * (i - 1) for x in range(len(rates))]
        line_with_seeds(ax, places, by_seed, arm, COLOURS[i], ls="", marker="_", ms=14)
    ax.set(ylabel="held-out accuracy", ylim=(0, 1), title="Sums of two to ten numbers")
    ax.set_xticks(range(len(rates)), [rate(lr) for lr in rates])
    ax.legend(loc="lower left")
    return figure


def countdown_figure():
    rows = load("countdown")
    figure, ((left, right),) = axes(2)
    for ax, column in ((left, "reward"), (right, "length")):
        curves(ax, rows, column, {"gspo": {"color": COLOURS[0]}, "grpo": {"color": COLOURS[1]}})
        ax.set(title=f"{column}, mean of the seeds")
    left.legend()
    return figure


def run_figure(folder):
    """Curves of one run: each learner's CSV."""
    figure, panels = axes(4, 13, 3.2)
    columns = {
        "reward": "reward",
        "think_frac": "share that thinks",
        "clip_frac": "share clipped",
        "entropy": "entropy",
    }
    for path in sorted(set(folder.glob("*.csv")) - {folder / "eval.csv"}):
        steps = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        for ax, (column, title) in zip(panels[0], columns.items()):
            ax.plot([int(r["step"]) for r in steps], [float(r[column]) for r in steps], label=path.stem)
            ax.set(title=title, xlabel="step")
    panels[0][2].set_yscale("symlog", linthresh=1e-3)
    panels[0][0].legend()
    return figure


TABLES = {name.removesuffix("_tables"): f for name, f in list(globals().items()) if name.endswith("_tables")}
FIGURES = {name.removesuffix("_figure"): f for name, f in list(globals().items()) if name.endswith("_figure")}


def show(asked):
    """Print the tables of a sweep and draw its figure, or draw the curves of a run."""
    global QUICK
    name = asked.removeprefix("quick-")
    QUICK = name != asked
    if name in TABLES:
        print("\n\n".join(TABLES[name]()) + "\n")
        if name in FIGURES:
            write(FIGURES[name](), HERE / "figures" / f"{asked}.svg")
    elif list(Path(asked).glob("*.csv")):
        write(run_figure(Path(asked)), Path(asked) / "curves.svg")
    else:
        sys.exit(f"plot.py: {asked} is neither a sweep ({', '.join(TABLES)}) nor the folder of a run")


def main(argv):
    for asked in argv or TABLES:
        try:
            show(asked)
        except FileNotFoundError as error:
            missing = f"plot.py: {asked} has no rows yet ({error.filename}): python experiments/run.py {asked}"
            if argv:
                sys.exit(missing)
            print(missing, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
