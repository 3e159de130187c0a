# SPDX-License-Identifier: MIT
"""The figures of the sweeps, and the curves of any run. Needs numpy and matplotlib.

    python experiments/figures.py edge       writes experiments/figures/edge.svg; without a name: all figures
    python experiments/figures.py out/RUN    writes curves.svg into the folder of a run

GSPO is blue, GRPO orange, and nothing else has these colours (of Okabe and Ito, for all eyes). Text and axes are grey,
on no ground of their own: they can be read on light pages and on dark ones.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
from rows import groups, mean, read, refuse, select, values
from tables import paired, rows_of

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.scale import SymmetricalLogScale
except ModuleNotFoundError as error:
    refuse(f"{error.name} is missing: pip install -r experiments/requirements.txt")

BLUE = "#0072B2"
ORANGE = "#D55E00"
GREY = "#7f7f7f"
OTHERS = ("#009E73", "#CC79A7", "#E69F00", GREY)
LOOKS = {  # of what is not here, one of the other colours
    "gspo": {"color": BLUE}, "grpo": {"color": ORANGE}, "grpo, narrow": {"color": OTHERS[0], "ls": "--"},
    "gspo+replay": {"color": BLUE, "ls": ":"}, "grpo+replay": {"color": ORANGE, "ls": ":"},
}  # fmt: skip
WHY = {
    "gspo, both halves": {"color": BLUE}, "gspo, clips wrong answers": {"color": BLUE, "ls": "--"},
    "gspo, clips right answers": {"color": BLUE, "ls": ":"}, "gspo, never clips": {"color": OTHERS[1]},
    "grpo, never clips": {"color": ORANGE},
}  # fmt: skip
LABELS = {
    "lr": "learning rate", "updates": "updates per step", "window": "tokens clipped, % (0.001: none)",
    "experts": "experts", "length": "tokens in a response", "after": "held-out accuracy", "coherence": "coherence",
    "cosine": "cosine with a large fresh gradient", "q99": "99th percentile of |log w|",
}  # fmt: skip
matplotlib.rcParams.update({
    "font.size": 10, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.25, "legend.frameon": False, "svg.hashsalt": "tiny-gspo", "savefig.transparent": True,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
})  # fmt: skip


def seeds(rows):
    """How many seeds each setting has: "5 seeds", or "5 to 20 seeds"."""
    columns = [column for column in ("arm", "lr", "window", "updates", "experts") if column in rows[0]]
    counts = [len(groups(here, "seed")) for here in groups(rows, *columns).values()]
    return f"{min(counts)} seeds" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)} seeds"


# A panel draws rows on axes.


def dots(x, series, title, ax, rows, column="after", place=None, scale="linear", joined=False, **where):
    """At each value of x (columns), of each of a series side by side: its seeds as dots, their mean as a dash.

    joined: a line through the means instead. place: where on the x-axis some rows are; without it, evenly.
    """
    rows = select(rows, **where)
    ticks = list(groups(rows, *x))
    names = list(groups(rows, series))
    for i, (name,) in enumerate(names):
        here = groups(select(rows, **{series: name}), *x)
        shift = (0.2 if joined else 0.6) / len(names) * (i - (len(names) - 1) / 2)
        at = [place(some) if place else ticks.index(key) + shift for key, some in here.items()]
        by_seed = [list(values(some, column).values()) for some in here.values()]
        look = LOOKS.get(name, {"color": OTHERS[i % 4]}) | ({} if joined else {"ls": "", "marker": "_", "ms": 12})
        ax.plot(at, [np.mean(some) for some in by_seed], label=name, **look)
        for spot, some in zip(at, by_seed):
            ax.plot([spot] * len(some), some, ".", color=look["color"], alpha=0.5, ms=5)
    if column == "after":
        ax.axhline(mean(rows, "before"), color=GREY, lw=1, label="before RL")
        ax.set_ylim(0, 1)
    if place:
        ax.set_xscale(scale)
    else:
        texts = ["\n".join(key).replace(", ", "\n") for key in ticks]
        ax.set_xticks(range(len(ticks)), texts, fontsize=7 if len(ticks) > 6 else 9)
    ax.set(title=f"{title} ({seeds(rows)})", xlabel=LABELS.get(x[0], ""), ylabel=LABELS[column])


def curves(column, title, ax, rows, looks=LOOKS, **axis):
    """A column over the steps, the mean of the seeds, for each arm, or for those that `looks` names."""
    for i, ((arm,), here) in enumerate(groups(rows, "arm").items()):
        if arm in looks or looks is LOOKS:
            lines = [row[f"{column}_by_step"].split() for row in here]
            shortest = min(map(len, lines))
            series = np.array([line[:shortest] for line in lines], float)
            look = looks.get(arm, {"color": OTHERS[i % 4]})
            ax.plot(range(1, shortest + 1), np.nanmean(series, 0), label=arm, **look)
    ax.set(title=f"{title} (mean of {seeds(rows)})" if "seed" in rows[0] else title, xlabel="step", **axis)


def gap(a, b, x, ax, rows, **look):
    """The paired difference of two arms, and its interval."""
    middle, low, high = paired(values(rows, arm=a), values(rows, arm=b))
    ax.errorbar(x, middle, [[middle - low], [high - middle]], ls="", ms=4, capsize=3, **look)
    ax.axhline(0, color=GREY, lw=1)


def edge_gaps(ax, rows):
    rates = groups(rows, "lr")
    for i, (a, b) in enumerate((("grpo, narrow", "grpo"), ("gspo", "grpo"), ("grpo+replay", "grpo"))):
        for j, here in enumerate(rates.values()):
            gap(a, b, j + 0.2 * (i - 1), ax, here, color=OTHERS[i], marker="o", label=f"{a} − {b}")
    ax.set_xticks(range(len(rates)), [lr for (lr,) in rates])
    ax.set(title=f"Paired differences, 95% intervals ({seeds(rows)})", xlabel="learning rate")


def staleness_gaps(ax, rows):
    looks = dict(zip(("2", "4", "8", "16"), zip(OTHERS, "os^D")))
    for (_, updates), here in groups(rows, "lr", "updates").items():
        if updates in looks:
            color, marker = looks[updates]
            x = mean(here, "mean_log_ratio_std", arm="grpo")
            gap("gspo", "grpo", x, ax, here, color=color, marker=marker, label=f"{updates} updates")
    ax.set(xscale="log", xlabel="spread of the token ratios (sd log w, grpo)", title=f"gspo − grpo ({seeds(rows)})")


def coherence(ax, rows):
    title = "Is the mean over a response noise?"
    place = partial(mean, column="mean_length")
    dots(["length"], "lr", title, ax, rows, "coherence", place, joined=True, experts="8", updates="4")
    x = np.linspace(2, 60)
    ax.plot(x, np.sqrt(x), ":", color=GREY, label="all tokens move together")
    ax.plot(x, np.ones_like(x), "--", color=GREY, label="independent noise")


def windows(ax, rows):
    """One response, as `gspo.py` prints it: four token ratios in GRPO's window, their one ratio in GSPO's."""
    w = np.exp([0.30, -0.02, -0.29, 0.01])
    s = np.exp(np.mean(np.log(w)))
    ax.fill_between([0.5, 4.5], 0.8, 1.27, color=ORANGE, alpha=0.2, lw=0)
    ax.fill_between([4.7, 5.3], 1 - 3e-4, 1 + 4e-4, color=BLUE, lw=1)
    inside = w <= 1.27  # for a right answer only the upper end clips
    ax.plot(np.arange(1, 5)[inside], w[inside], "o", color=ORANGE, ms=9)
    ax.plot(np.arange(1, 5)[~inside], w[~inside], "o", color=ORANGE, ms=9, mfc="none", mew=2)
    ax.plot(5, s, "o", color=BLUE, ms=9)
    ax.annotate("cut: this token\nteaches nothing", (1.15, w[0]), (1.6, 1.35), color=GREY, va="center")
    ax.annotate("kept: of a right answer\nonly the upper end cuts", (3.2, w[2]), color=GREY, va="center")
    ax.annotate("GRPO's window,\n0.8 to 1.27", (2.5, 1.16), color=ORANGE, ha="center", va="center")
    ax.annotate("GSPO's:\n0.9997\nto 1.0004", (5, 1.08), color=BLUE, ha="center", va="bottom")
    ax.set_xticks(range(1, 6), [*(f"w{sub}" for sub in "₁₂₃₄"), "s"])
    ax.set(title="A right answer of four tokens:\nGRPO cuts one, GSPO keeps it whole", ylabel="new / old probability")
    ax.set(xlim=(0.4, 5.7), ylim=(0.65, 1.45))
    ax.grid(False)


def two_regimes(ax, rows):
    """Reward over the steps: mean and band, that of the middle half of the seeds."""
    for lr, updates, ls, words in (("2e-4", "4", "-", "default"), ("8e-4", "8", "--", "pushed")):
        for arm, color in (("gspo", BLUE), ("grpo", ORANGE)):
            here = select(rows, lr=lr, updates=updates, arm=arm)
            series = np.array([row["reward_by_step"].split() for row in here], float)
            steps = range(1, series.shape[1] + 1)
            ax.plot(steps, series.mean(0), color=color, ls=ls, label=f"{arm}, {words}")
            ax.fill_between(steps, *np.quantile(series, (0.25, 0.75), 0), color=color, alpha=0.2, lw=0)
    counts = [len(select(rows, lr=lr, updates=n, arm="gspo")) for lr, n in (("2e-4", "4"), ("8e-4", "8"))]
    ax.set(title="They tie at the default rate; pushed to 8e-4 with\n8 updates both collapse, GSPO less", ylim=(0, 1))
    ax.set(xlabel=f"step ({counts[0]} seeds, pushed {counts[1]}; band: the middle half)", ylabel="reward")
    ax.legend(loc="lower left", ncols=2)


def clipped(rows):
    """Per cent of the tokens; where there is none, 0.001."""
    return max(100 * mean(rows, "mean_clip_frac"), 1e-3)


SOURCE = {"lesson": "staleness"}  # whose rows a figure shows, where not those of its own name
FIGURES = {  # of each sweep: the width, and the panels
    "lesson": (9, [windows, two_regimes]),
    "edge": (11, [partial(dots, ["lr"], "arm", "Where each breaks", joined=True), edge_gaps]),
    "slow": (9, [partial(curves, "reward", "reward at 4e-4"), partial(curves, "entropy", "entropy at 4e-4")]),
    "unit": (6.5, [partial(dots, ["tail"], "head", "The ratio's unit, and the clip's, at 8e-4", sweep="unit")]),
    "window": (9, [
        partial(dots, ["window"], "arm", f"learning rate {lr}", place=clipped, scale="log", joined=True, lr=lr)
        for lr in ("2e-4", "8e-4")
    ]),
    "why": (12, [
        partial(curves, "reward", "reward", looks=WHY),
        partial(curves, "wrong_lost", "wrong tokens that lost e-fold", looks=WHY),
        partial(curves, "entropy", "entropy, nats", looks=WHY),
    ]),
    "staleness": (14, [
        *(partial(dots, ["updates"], "arm", f"learning rate {lr}", joined=True, lr=lr)
          for lr in ("2e-4", "4e-4", "8e-4")),
        staleness_gaps,
    ]),
    "precision": (13, [
        partial(dots, ["middle", "last"], "head", f"learning rate {lr}", lr=lr) for lr in ("2e-4", "8e-4")
    ]),
    "routing": (9, [
        partial(dots, ["experts"], "kind", f"learning rate {lr}", column="q99", updates="4", lr=lr)
        for lr in ("2e-4", "8e-4")
    ]),
    "ratio": (6.5, [coherence]),
    "cosine": (6.5, [partial(dots, ["gradient"], "lr", "Whose correction corrects?", column="cosine", experts="8")]),
    "longer": (6.5, [partial(dots, ["lr"], "arm", "Sums of two to ten numbers")]),
    "countdown": (9, [partial(curves, "reward", "reward"), partial(curves, "length", "length")]),
}  # fmt: skip
OF_A_RUN = [
    partial(curves, "reward", "reward"), partial(curves, "think_frac", "share that thinks"),
    partial(curves, "entropy", "entropy"),
    partial(curves, "clip_frac", "share clipped", yscale=SymmetricalLogScale(None, linthresh=1e-3)),
]  # fmt: skip


def draw(width, panels, rows, path):
    figure = Figure((width, 4), layout="constrained")
    named = {}
    for ax, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        panel(ax=ax, rows=rows)
        if not ax.get_legend():
            named |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(named.values(), named, loc="outside lower center", ncols=2 if len(panels) == 1 else 5)
    figure.savefig(path, metadata={"Date": None})
    print(f"written to {path}")


def rows_of_run(folder):
    """Each learner's CSV as one row, as a sweep keeps it."""
    rows = []
    for path in sorted(folder.glob("*.csv")):
        steps = read(path)
        if steps and "think_frac" in steps[0]:
            series = {f"{column}_by_step": " ".join(step[column] for step in steps) for column in steps[0]}
            rows.append(series | {"arm": path.stem})
    return rows


def main(names):
    for asked in names or FIGURES:
        if asked.removeprefix("quick-") in FIGURES:
            path = Path(__file__).parent / "figures" / f"{asked}.svg"
            draw(*FIGURES[asked.removeprefix("quick-")], rows_of(SOURCE.get(asked, asked)), path)
        elif rows := rows_of_run(Path(asked)):
            draw(13, OF_A_RUN, rows, Path(asked) / "curves.svg")
        else:
            refuse(f"{asked} is neither a sweep with a figure ({', '.join(FIGURES)}) nor a folder with a run's steps")


if __name__ == "__main__":
    main(sys.argv[1:])
