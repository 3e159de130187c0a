# SPDX-License-Identifier: MIT
"""The figures of the sweeps, and the curves of any run. Needs numpy and matplotlib.

    python experiments/figures.py pushed     writes experiments/figures/pushed.svg; without a name: all that have rows
    python experiments/figures.py out/RUN    writes curves.svg into the folder of a run

GSPO is blue, GRPO orange, and nothing else has these colours (of Okabe and Ito, for all eyes). Text and axes are grey,
on no ground of their own: they can be read on light pages and on dark ones. A dot is a run, a dash or a line the mean.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
from claims import MEASURE
from rows import RESULTS, groups, load, mean, read, refuse, select, values
from tables import BY_LENGTH, UNITS, by_experts, by_kind, of_regime, split

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.scale import SymmetricalLogScale
except ModuleNotFoundError as error:
    refuse(f"{error.name} is missing: pip install -r experiments/requirements.txt")

BLUE = "#0072B2"
ORANGE = "#D55E00"
GREY = "#7f7f7f"
OTHERS = ("#009E73", "#CC79A7", "#999933", GREY)
HOLLOW = {"mfc": "none"}
LOOKS = {  # of what is not here, one of the other colours
    "gspo": {"color": BLUE}, "grpo": {"color": ORANGE},
    "gspo+replay": {"color": BLUE} | HOLLOW, "grpo+replay": {"color": ORANGE} | HOLLOW,
    "gspo, recomputed": {"color": BLUE} | HOLLOW, "grpo, recomputed": {"color": ORANGE} | HOLLOW,
}  # fmt: skip
WHY = {
    "gspo, both halves": {"color": BLUE}, "gspo, clips wrong answers": {"color": BLUE, "ls": "--"},
    "gspo, clips right answers": {"color": BLUE, "ls": ":"}, "gspo, never clips": {"color": OTHERS[1]},
    "grpo, never clips": {"color": ORANGE},
}  # fmt: skip
matplotlib.rcParams.update({
    "font.size": 10, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.25, "legend.frameon": False, "svg.hashsalt": "tiny-gspo", "savefig.transparent": True,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
})  # fmt: skip


def seeds(rows):
    """How many seeds each setting has: "5 seeds", or "5 to 20 seeds"."""
    counts = [len(groups(here, "seed")) for here in groups(rows, "arm").values()]
    return f"{min(counts)} seeds" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)} seeds"


# A panel draws rows on axes.


def dots(x, series, ax, rows, title, label="", column=MEASURE, ylabel="mean reward"):
    """At each value of the column x, of each of a series side by side: its seeds as dots, their mean as a dash."""
    ticks = [key for (key,) in groups(rows, x)]
    names = [name for (name,) in groups(rows, series)]
    for i, name in enumerate(names):
        look = {"color": OTHERS[i % 4]} | LOOKS.get(name, {})
        for spot, tick in enumerate(ticks):
            some = list(values(rows, column, **{x: tick, series: name}).values())
            if some:
                at = spot + 0.7 / len(names) * (i - (len(names) - 1) / 2)
                first = ax.plot([at] * len(some), some, "o", ms=3.5, mew=0.8, **look)
                ax.plot([at], [np.mean(some)], "_", ms=15, mew=2, color=look["color"])
        first[0].set_label(name)
    ax.set_xticks(range(len(ticks)), ticks)
    ax.set(title=f"{title}\n({seeds(rows)})", xlabel=label, ylabel=ylabel, xlim=(-0.5, len(ticks) - 0.5))


def series(rows, column):
    """Step by step, a line for each row: (rows, steps)."""
    return np.array([row[f"{column}_by_step"].split() for row in rows], float)


def curves(column, title, ax, rows, looks=LOOKS, **axis):
    """A column over the steps, the mean of the seeds, for each arm, or for those that `looks` names."""
    for (arm,), here in groups(rows, "arm").items():
        if arm in looks or looks is LOOKS:
            means = series(here, column).mean(0)
            look = {name: value for name, value in looks.get(arm, {}).items() if name != "mfc"}
            ax.plot(range(1, len(means) + 1), means, label=arm, **look)
    ax.set(title=f"{title} (mean of {seeds(rows)})" if "seed" in rows[0] else title, xlabel="step", **axis)


def banded(ax, rows, title, groups_of):
    """Reward over the steps: mean, and as a band the middle half of the seeds. groups_of: {label: (rows, look)}."""
    for label, (here, look) in groups_of.items():
        rewards = series(here, "reward")
        steps = range(1, rewards.shape[1] + 1)
        ax.plot(steps, rewards.mean(0), label=label, **look)
        ax.fill_between(steps, *np.quantile(rewards, (0.25, 0.75), 0), color=look["color"], alpha=0.2, lw=0)
    ax.set(title=title, ylim=(0, 1), ylabel="reward")


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
    lines = {}
    for file, words, ls in (("tuned", "at its best rate", "-"), ("pushed", "pushed", "--")):
        for arm in ("gspo", "grpo"):
            lines[f"{arm}, {words}"] = (select(rows, file=file, arm=arm), LOOKS[arm] | {"ls": ls})
    title = "They tie at their best rate; pushed to 8e-4 with\n8 updates both collapse, GSPO less"
    banded(ax, rows, title, lines)
    counts = [len(select(rows, file=file, arm="gspo")) for file in ("tuned", "pushed")]
    ax.set_xlabel(f"step ({counts[0]} seeds, pushed {counts[1]}; band: the middle half)")
    ax.legend(loc="lower left", ncols=2)


def widths(regime, title, ax, rows):
    """Mean reward against the window's width: seeds as dots, a line through the means."""
    rows = of_regime(regime, rows)
    for (name,), here in groups(rows, "objective").items():
        by_width = {float(width[1:]): list(values(some, MEASURE).values())
                    for (width,), some in groups(here, "width").items()}  # fmt: skip
        ax.plot(by_width.keys(), [np.mean(some) for some in by_width.values()], label=name, **LOOKS[name])
        for width, some in by_width.items():
            ax.plot([width] * len(some), some, ".", color=LOOKS[name]["color"], alpha=0.5)
    ax.set(title=f"{title}\n({seeds(rows)})", xscale="log", xlabel="window, times the default", ylabel="mean reward")
    ax.set_ylim(0.2, 0.9)
    ax.xaxis.set_major_formatter("{x:g}")


def apart(ax, rows):
    found = []
    for unit in UNITS:
        for clip in UNITS:
            cell = select(rows, arm=f"{unit} ratio, {clip} clip")
            found += [row | {"unit": f"{unit} ratio", "clip": f"{clip} clip"} for row in cell]
    dots("clip", "unit", ax, found, "Under a clip the token's ratio is the worst,\nwithout one it is the best")


def pushed_curves(ax, rows):
    lines = {arm: (select(rows, arm=arm), LOOKS[arm]) for arm in ("gspo", "grpo")}
    banded(ax, rows, "8e-4, eight updates, default windows:\nboth learn, then collapse, GSPO less", lines)
    ax.set_xlabel(f"step ({seeds(select(rows, arm='gspo'))}; band: the middle half)")


def experts(ax, rows):
    dots("experts", "learner", ax, by_experts(rows), "GSPO's lead is as large in a dense model;\nreplay helps neither")


def length(ax, rows):
    dots("words", "learner", ax, split(rows, "learner", "words"), "Pushed, by length", "random words after each step")


def sampler(window, title, ax, rows):
    rows = select(split(rows, "learner", "window", "sampler", "old"), window=f"{window} window")
    for row in rows:
        row["series"] = row["learner"] + (", recomputed" if row["old"] == "recompute" else "")
    dots("sampler", "series", ax, rows, title)
    ax.set_ylim(0.3, 0.9)


def tails(ax, rows):
    there = [row for row in by_kind(select(rows, updates="8")) if row["q99"] != "nan"]
    found = [row | {"arm": row["world"] + row["kind"]} for row in there]
    dots(
        "world",
        "kind",
        ax,
        found,
        "Token ratios by routing, after 8 updates",
        column="q99",
        ylabel="99th percentile of |log w|",
    )


def coherence(ax, rows):
    rows = [row for row in select(rows, updates="8") if row["world"] in BY_LENGTH]
    for i, ((world,), here) in enumerate(groups(rows, "world").items()):
        bins = groups(here, "length").values()
        x = [mean(some, "mean_length") for some in bins]
        ax.plot(x, [mean(some, "coherence") for some in bins], color=OTHERS[i], label=world)
        for at, some in zip(x, bins):
            numbers = values(some, "coherence").values()
            ax.plot([at] * len(numbers), numbers, ".", color=OTHERS[i], alpha=0.5)
    x = np.geomspace(2, max(mean(some, "mean_length") for some in groups(rows, "length").values()))
    ax.plot(x, np.sqrt(x), ":", color=GREY, label="all tokens move together")
    ax.plot(x, np.ones_like(x), "--", color=GREY, label="independent noise")
    ax.set(title="Do the tokens of a response move together?", xscale="log", yscale="log")
    ax.set(xlabel="tokens in a response", ylabel="coherence")


def cosines(ax, rows):
    found = [row | {"arm": row["world"] + row["gradient"]} for row in rows]
    dots(
        "world",
        "gradient",
        ax,
        found,
        "Whose correction corrects?",
        column="cosine",
        ylabel="cosine with a large fresh gradient",
    )


FIGURES = {  # of each: the files whose rows it shows, the width, and the panels
    "lesson": (("tuned", "pushed"), 9, [windows, two_regimes]),
    "choices": (("choices",), 9, [
        partial(widths, "pushed", "Pushed, GSPO bears windows up to × 10,\nGRPO only up to × 1"),
        partial(widths, "coarse", "With a 4-bit sampler GSPO wants a window\n× 30 to × 100, GRPO one of × 3 or more"),
    ]),
    "pushed": (("pushed",), 10, [pushed_curves, apart]),
    "experts": (("experts",), 7, [experts]),
    "length": (("length",), 7, [length]),
    "sampler": (("sampler",), 12, [
        partial(sampler, "default", "Default windows"),
        partial(sampler, "best", "Windows that were best with a 4-bit sampler"),
    ]),
    "routing": (("routing",), 7, [tails]),
    "ratio": (("ratio",), 6.5, [coherence]),
    "cosine": (("cosine",), 8, [cosines]),
    "why": (("why",), 12, [
        partial(curves, "reward", "reward", looks=WHY),
        partial(curves, "wrong_lost", "wrong tokens that lost e-fold", looks=WHY),
        partial(curves, "entropy", "entropy, nats", looks=WHY),
    ]),
    "countdown": (("countdown",), 9, [partial(curves, "reward", "reward"), partial(curves, "length", "length")]),
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
    there = [name for name, (files, _, _) in FIGURES.items() if all((RESULTS / f"{x}.csv").exists() for x in files)]
    for asked in names or there:
        name = asked.removeprefix("quick-")
        if name in FIGURES:
            files, width, panels = FIGURES[name]
            rows = [row | {"file": file} for file in files for row in load(asked.removesuffix(name) + file)]
            draw(width, panels, rows, Path(__file__).parent / "figures" / f"{asked}.svg")
        elif rows := rows_of_run(Path(asked)):
            draw(13, OF_A_RUN, rows, Path(asked) / "curves.svg")
        else:
            refuse(f"{asked} is neither a sweep with a figure ({', '.join(FIGURES)}) nor a folder with a run's steps")


if __name__ == "__main__":
    main(sys.argv[1:])
