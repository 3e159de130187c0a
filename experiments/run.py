# SPDX-License-Identifier: MIT
"""Sweeps: many short runs of `train.py`'s race that ask one question each, over seeds.

    python experiments/run.py pushed            all runs of one sweep, appended to experiments/results/pushed.csv
    python experiments/run.py pushed --quick    one seed, to experiments/results/quick-pushed.csv
    python experiments/claims.py                the verdicts, from the rows alone

A run is one learner on the default preset, in a process of its own with one thread; as many run at a time as there are
cores. A seed decides warm start, problems and noise, so settings are compared seed by seed, and all settings of a seed
are run before the next seed is. Rows that a sweep already has are not run again: after an interruption, start it again.
No run is left out: what a run that ended in nan did not reach counts as 0.

Choices (which rate, which window) are made on seeds 100 to 104, in `choices`, the same search for both objectives. What
is claimed uses seeds 20 to 39, on which nothing had been run when the table of claims was written (`claims.py`).

A row names the commit it was run on, and a hash of its warm start: the same seed gives another start on another kind of
processor, and only rows with the same start are compared. Run long sweeps from a clone, which stays as it is.
"""

import copy
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from rows import RESULTS, append, child, mean, read, select
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import harness  # noqa: E402
import train  # noqa: E402
from harness import at_least, between, flag  # noqa: E402
from imitate import warm_start  # noqa: E402
from model import load_model  # noqa: E402

SCRATCH = HERE.parent / "out" / "sweeps"
CHOOSING = range(100, 105)
CLAIMED = range(20, 40)
GSPO = (3e-3, 4e-3)  # the windows of the default run
GRPO = (0.2, 0.27)
NEVER = 1e9  # half a window that nothing leaves
PUSHED = {"lr": 8e-4, "minibatches": 8}


# What only experiments vary

FILLER = "so ok hm now then well yes and".split()
UNITS = ("own", "sequence", "token", "no")


@dataclass
class Settings(train.Settings):
    """Those of `train.py`, and what only experiments vary."""

    filler: int = flag(0, "random words after each step of a worked solution", at_least(0), section="the experiment")
    weight: str = flag("own", "whose ratio weighs a token's gradient (see `decomposed`)", choices=UNITS)
    clip: str = flag("own", "whose ratio decides what is clipped", choices=UNITS)
    sign: int = flag(0, "1: only right answers teach, -1: only wrong ones", between(-1, 1))
    bits: int = flag(32, "that the sampler's matrices are rounded to", between(2, 32))

    def random_problem(self, draw):
        problem = super().random_problem(draw)
        if not self.filler:
            return problem
        # seeded from a copy: `draw` goes on as without words, and no word tells what imitation draws from it next
        words = random.Random(copy.deepcopy(draw).random())
        steps = [" ".join([step, *words.choices(FILLER, k=self.filler)]) for step in problem.steps.split()]
        return replace(problem, steps=" ".join(steps))


DRIFTS = ("right_drift", "right_lost", "wrong_drift", "wrong_lost")


class Learner(train.Learner):
    """A learner whose loss and sampler are changed as the settings say, and who also records `drifts`."""

    def __init__(self, name, model, settings):
        super().__init__(name, model, settings)
        self.own_loss = self.loss
        self.loss = self.changed_loss
        self.metrics += DRIFTS

    def sampler(self):
        return super().sampler() if self.settings.bits == 32 else rounded(self.model, self.settings.bits)

    def changed_loss(self, logprobs, old_logprobs, advantages, mask, *, num_sequences=None):
        moved = drifts(logprobs.detach(), old_logprobs, advantages, mask)
        if self.settings.sign:
            advantages = torch.where(advantages * self.settings.sign > 0, advantages, 0)
        loss, metrics = self.own_loss(logprobs, old_logprobs, advantages, mask, num_sequences=num_sequences)
        if self.settings.weight != "own":
            loss = decomposed(
                self.settings.weight,
                self.settings.clip,
                logprobs,
                old_logprobs,
                advantages,
                mask,
                low=self.own_loss.keywords["clip_eps_low"],
                high=self.own_loss.keywords["clip_eps_high"],
                num_sequences=num_sequences or len(mask),
            )
        return loss, metrics | moved


def decomposed(weight, clip, logprobs, old_logprobs, advantages, mask, *, low, high, num_sequences):
    """Both objectives' gradient taken apart: -1/B sum_i 1/|y_i| sum_t keep_it weight_it A_i log pi(y_it).

    weight: "sequence" s_i, "token" w_it, "no" 1; the value that the ratio has, without a gradient of its own.
    clip: whose ratio decides `keep`: "sequence" s_i, "token" w_it, "no" 1.
    ("sequence", "sequence") has the gradient of `gspo_loss` (equation 10), ("token", "token") that of `grpo_loss` (12).
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0).detach()
    ratios = {
        "token": log_ratio.exp(),
        "sequence": (log_ratio.sum(1, keepdim=True) / lengths).exp(),
        "no": torch.ones_like(log_ratio),
    }
    a = advantages[:, None]
    keep = torch.where(a < 0, ratios[clip] >= 1 - low, ratios[clip] <= 1 + high)
    terms = torch.where(mask, keep * ratios[weight] * a * logprobs, 0)
    return -(terms.sum(1, keepdim=True) / lengths).sum() / num_sequences


def drifts(logprobs, old_logprobs, advantages, mask):
    """Of the tokens of right and of wrong responses: mean log-ratio, and the share of which e-fold less is left."""
    log_ratio = logprobs - old_logprobs
    moved = []
    for rows in (advantages > 0, advantages < 0):
        chosen = mask & rows[:, None]
        count = chosen.sum().clamp(min=1)
        moved.append(torch.where(chosen, log_ratio, 0).sum() / count)
        moved.append((chosen & (log_ratio < -1)).sum() / count)
    return dict(zip(DRIFTS, moved))


def rounded(model, bits):
    """A copy whose matrices are rounded to so many bits, each row on a scale of its own."""
    model = copy.deepcopy(model)
    levels = 2 ** (bits - 1) - 1
    for p in model.parameters():
        if p.dim() > 1:
            scale = p.data.abs().amax(-1, keepdim=True).clamp(min=1e-12) / levels
            p.data = (p.data / scale).round() * scale
    return model


# The sweeps


def arm(name, learner, seeds=20, **settings):
    """One setting of a sweep, to be run with this many of its seeds."""
    return {"arm": name, "learner": learner, "seeds": seeds, "settings": settings}


def scaled(objective, factor):
    """{setting: window}: the default window of this objective, so many times as wide."""
    window = GSPO if objective == "gspo" else GRPO
    return {f"{objective}_clip": [float(f"{half * factor:.2g}") for half in window]}


# What is chosen, for either objective by the same search: {regime: (what all its runs share, rates, widths)}.
# Widened for both objectives where the best of one lay at the edge: "pushed" below 0.1, "coarse" above 100. The 100 of
# "pushed" is about what a library's default epsilon makes of GSPO's window.
CHOICES = {
    "tuned": ({}, (1e-4, 2e-4, 4e-4, 8e-4), (0.3, 1, 3, 10)),
    "pushed": ({"minibatches": 8}, (8e-4,), (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)),
    "coarse": ({"bits": 4}, (2e-4,), (1, 3, 10, 30, 100, 300)),
}


def candidates(regime, objective):
    """The arms among which a rate and a window are chosen."""
    shared, rates, widths = CHOICES[regime]
    return [
        arm(f"{regime}, {objective}, {lr:g}, x{width:g}", objective, 5, lr=lr, **shared, **scaled(objective, width))
        for lr in rates
        for width in widths
    ]


def best(regime, objective):
    """{"lr": ..., "gspo_clip": ...}: of the candidates, what has the highest mean reward over its five seeds."""
    rows = read(RESULTS / "choices.csv")
    arms = candidates(regime, objective)
    if any(len(select(rows, arm=x["arm"])) < 5 for x in arms):
        raise harness.UserError(f"nothing is chosen yet for {regime}: first python experiments/run.py choices")
    settings = max(arms, key=lambda x: mean(rows, "mean_reward", arm=x["arm"]))["settings"]
    return {name: settings[name] for name in ("lr", f"{objective}_clip")}


def choices():
    """Which rate and which window, in each regime that is tuned?"""
    return [x for regime in CHOICES for objective in ("gspo", "grpo") for x in candidates(regime, objective)]


def tuned():
    """Each objective at its best."""
    return [arm(objective, objective, **best("tuned", objective)) for objective in ("gspo", "grpo")]


def pushed():
    """Where the rate is too high and the data stale: eight updates a step. And the objective taken apart."""
    arms = [arm(objective, objective, **PUSHED) for objective in ("gspo", "grpo")]
    for weight in ("sequence", "token", "no"):
        for clip, objective in (("sequence", "gspo"), ("token", "grpo"), ("no", "gspo")):
            window = {"gspo_clip": [NEVER, NEVER]} if clip == "no" else {}
            name = f"{weight} ratio, {clip} clip"
            arms.append(arm(name, objective, **PUSHED, weight=weight, clip=clip, **window))
    return arms


def pushed_best():
    """The same, each objective with its best window there."""
    return [arm(objective, objective, **PUSHED | best("pushed", objective)) for objective in ("gspo", "grpo")]


def experts():
    """How many experts, of which a token takes two? With two the model is dense: nothing is there to replay."""
    arms = []
    for count in (2, 8, 64):
        for learner in ("gspo", "grpo", "gspo+replay", "grpo+replay"):
            if count > 2 or "replay" not in learner:
                arms.append(arm(f"{learner}, {count} experts", learner, **PUSHED, experts=count))
    return arms


def length():
    """How long are the responses? Longer ones say more words that do not matter."""
    arms = []
    for words, tokens, seeds in ((0, 64, 20), (4, 150, 20), (8, 225, 10)):
        for objective in ("gspo", "grpo"):
            longer = {"filler": words, "max_new_tokens": tokens}
            arms.append(arm(f"{objective}, {words} words", objective, seeds, **PUSHED, **longer))
    return arms


def sampler():
    """How precise must the sampler be, and does it help to recompute its log-probs?"""
    samplers = {
        "float32": {},
        "bfloat16": {"sampler_dtype": "bfloat16"},
        "8 bits": {"bits": 8},
        "5 bits": {"bits": 5},
        "4 bits": {"bits": 4},
    }
    arms = []
    for objective in ("gspo", "grpo"):
        for window, settings in (("default", {"lr": 2e-4}), ("best", best("coarse", objective))):
            for sampler, rounding in samplers.items():
                for old in ("sampler", "recompute"):
                    claimed = sampler == "4 bits" or (sampler == "bfloat16" and window == "default")
                    name = f"{objective}, {window} window, {sampler}, {old}"
                    arms.append(arm(name, objective, 20 if claimed else 5, old_logprobs=old, **settings, **rounding))
    return arms


SWEEPS = {f.__name__: f for f in (choices, tuned, pushed, pushed_best, experts, length, sampler)}


# One run

# What a row keeps: means over the steps, and values step by step.
MEANS = (
    "clip_frac", "clip_frac_low", "clip_frac_high", "expert_change", "approx_kl", "grad_norm", "seconds", "length",
    "log_ratio_std", "seq_log_ratio_std", "entropy", "think_frac", *DRIFTS,
)  # fmt: skip
SERIES = ("length", "clip_frac")  # as far as the run came; beside them the rewards, up to the last step


def run_one(learner, values, warm, folder):
    """In a process of its own: prints a run's records and evaluation. values: its settings; warm: its warm start."""
    settings = Settings(**values, learners=[learner], out=str(folder), device="cpu", save_every=10**6)
    racing = Learner(learner, load_model(warm)[0].train(), settings)
    broke = False
    evaluation = []
    try:
        with harness.stoppable(folder) as stop:
            train.race([racing], settings, stop, first=0, before=[])
        evaluation = train.evaluate(racing.model, settings)
    except harness.UserError as error:
        broke = error.code == 1  # a nan
        if not broke:
            raise
    print(json.dumps({"history": racing.history, "evaluation": evaluation, "broke": broke}))


def warm_one(values, folder):
    """In a process of its own: the warm start of these settings, and its evaluation, into a folder."""
    settings = Settings(**values, out=str(folder), device="cpu", save_every=10**6)
    with harness.stoppable(folder) as stop:
        model = warm_start(settings, torch.device("cpu"), stop, None)
    print(json.dumps(train.evaluate(model, settings)))


WARM = ("seed", "experts", "filler", "max_new_tokens")  # settings of arms that imitation, or its evaluation, depends on


def warm_values(values):
    return {name: value for name, value in values.items() if name in WARM}


def warm_folder(values):
    """Where the warm start of such runs is kept."""
    return SCRATCH / ("warm-" + "-".join(f"{name}{value}" for name, value in sorted(warm_values(values).items())))


def make_warm_start(values):
    """Make it, unless it is there. Its evaluation comes last: where that is, all is."""
    folder = warm_folder(values)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "before.json").exists():
        _, printed = child(__file__, "--child", "warm", json.dumps(warm_values(values)), folder)
        (folder / "before.json").write_text(printed.splitlines()[-1], encoding="utf-8")


def fingerprint(path):
    """Eight hexadecimal digits that tell whether two warm starts have the same weights."""
    digest = hashlib.sha256()
    for weight in load_model(path)[0].state_dict().values():
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()[:8]


def as_text(values):
    """The settings of a run that are not the default's, as flags; the seed has a column of its own."""
    plain = vars(Settings())
    settings = vars(Settings(**values))
    changed = [f.name for f in fields(Settings) if settings[f.name] != plain[f.name] and f.name != "seed"]
    return " ".join(harness.as_typed(name, settings[name]) for name in changed)


def joined(numbers):
    """As a row keeps a series."""
    return " ".join(f"{x:.4g}" for x in numbers)


def measure(chosen, seed, commit, known):
    """Run one arm with one seed, unless a row of the same work is known. Returns its row."""
    values = chosen["settings"] | {"seed": seed}
    warm = warm_folder(values) / "warm.pt"
    same = {"learner": chosen["learner"], "settings": as_text(values), "seed": str(seed), "start": fingerprint(warm)}
    found = select(known, **same)
    if found:
        return found[0] | {"arm": chosen["arm"]}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        _, printed = child(__file__, "--child", "run", json.dumps(values), folder, chosen["learner"], warm)
    run = json.loads(printed.splitlines()[-1])
    history = run["history"]
    rewards = [record["reward"] for record in history]
    rewards += [0.0] * (Settings(**values).rl_steps - len(rewards))  # not reached
    before = json.loads((warm.parent / "before.json").read_text(encoding="utf-8"))
    row = {"arm": chosen["arm"]} | same | {"commit": commit, "before": train.accuracy(before, "sampled")}
    row["mean_reward"] = sum(rewards) / len(rewards)
    row["best_six"] = max(sum(rewards[i : i + 6]) / 6 for i in range(len(rewards) - 5))
    row["accuracy"] = 0.0 if run["broke"] else train.accuracy(run["evaluation"], "sampled")
    row["greedy"] = 0.0 if run["broke"] else train.accuracy(run["evaluation"], "greedy")
    for name in MEANS:
        row[f"mean_{name}"] = mean(history, name)
    row["reward_by_step"] = joined(rewards)
    for name in SERIES:
        row[f"{name}_by_step"] = joined(record[name] for record in history)
    return row | {"broke": int(run["broke"]), "seconds": round(time.perf_counter() - began)}


def sweep(name, quick, workers):
    """All runs of a sweep that its file does not hold yet, seed by seed. Sweeps share runs of the same work."""
    path = RESULTS / f"{'quick-' if quick else ''}{name}.csv"
    seeds = CHOOSING if name == "choices" else CLAIMED
    known = [row for other in sorted(RESULTS.glob("*.csv")) for row in read(other) if "start" in row]
    done = {(row["arm"], row["seed"]) for row in read(path)}
    runs = []
    for i, seed in enumerate([0] if quick else seeds):
        for chosen in SWEEPS[name]():
            if i < chosen["seeds"] and (chosen["arm"], str(seed)) not in done:
                runs.append((chosen, seed))
    commit = last_commit()

    def one(chosen, seed):
        return measure(chosen, seed, commit, known)

    with ThreadPoolExecutor(workers) as pool:
        starts = {warm_folder(chosen["settings"] | {"seed": seed}): (chosen, seed) for chosen, seed in runs}
        made = pool.map(lambda x: make_warm_start(x[0]["settings"] | {"seed": x[1]}), starts.values())
        for _ in tqdm(made, "warm starts", len(starts)):
            pass
        for row in tqdm(pool.map(lambda run: one(*run), runs), name, len(runs), smoothing=0):
            append(path, row)
    print(f"{len(read(path))} rows in {path}")


def last_commit():
    """The last one that changed what is run; with a plus if there are changes that are not committed."""
    git = ("git", "-C", str(HERE.parent))
    code = ("--", ":(glob)*.py", "experiments/run.py")
    found = subprocess.run([*git, "log", "-1", "--format=%h", *code], capture_output=True, text=True, check=True)
    changed = subprocess.run([*git, "status", "--porcelain", *code], capture_output=True, text=True, check=True)
    return found.stdout.strip() + ("+" if changed.stdout else "")


def main(argv):
    if argv[:1] == ["--child"]:
        torch.set_num_threads(1)
        task, values, folder, *more = argv[1:]
        if task == "warm":
            return warm_one(json.loads(values), Path(folder))
        learner, warm = more
        return run_one(learner, json.loads(values), warm, Path(folder))
    parser = harness.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", choices=tuple(SWEEPS), help="which")
    parser.add_argument("--quick", action="store_true", help="one seed, of those that were explored")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time")
    args = parser.parse_args(argv)
    sweep(args.sweep, args.quick, args.workers)


if __name__ == "__main__":
    harness.run_program(main)
