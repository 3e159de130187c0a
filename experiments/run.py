# SPDX-License-Identifier: MIT
"""Sweeps: many short runs of `train.py` that ask one question each, over seeds.

    python experiments/run.py edge             all runs of one sweep, appended to experiments/results/edge.csv
    python experiments/run.py edge --quick     one seed, in a few minutes, to experiments/results/quick-edge.csv
    python experiments/plot.py edge            the table and the figure, from the rows alone

A run is one learner on the default preset, in a process of its own with one thread; two run at a time on two cores. A
seed decides warm start, problems and noise, so settings are compared pairwise, seed by seed. Rows that a sweep already
has are not run again: after an interruption, start it again. No run is left out: one that ends in nan has accuracy 0.

Choices (which window) are made on seeds 100 to 102, `choose`; what is reported uses seeds 0 to 4, `seeds` 0 to 19.
"""

import argparse
import copy
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import train  # noqa: E402

RESULTS, SCRATCH = HERE / "results", HERE.parent / "out" / "sweeps"
REPORTED, SEEDS = range(5), {"choose": range(100, 103), "seeds": range(20)}
NEVER = 1e9  # half a window that nothing leaves
NOT_FINITE = 3  # exit status of a run that ended in nan

# The windows of the default run, and GRPO's best at the edge, as `choose` found (GSPO's best is its default).
GSPO, GRPO, NARROW = (3e-3, 4e-3), (0.2, 0.27), (0.006, 0.0081)
TUNED, EDGE = 2e-4, 8e-4
LONGER = "--max-terms 10 --max-new-tokens 96"


def arm(name, learner, lr, window, steps=36, **variant):
    """One setting. variant: `weight` and `clip` for `decomposed`; `sign`, for one sign of the advantage only; `bits`
    that the sampler's weights are rounded to; `flags` of train.py, and `world`, those that the warm start depends on.
    """
    return {"arm": name, "learner": learner, "lr": lr, "low": window[0], "high": window[1], "steps": steps, **variant}


def scaled(window, factor):
    return tuple(float(f"{half * factor:.2g}") for half in window)


WIDTHS = (0.03, 0.1, 0.3, 1, 3, 10)
EDGE_RATES = (1e-4, 2e-4, 4e-4, 8e-4, 1.2e-3, 1.6e-3)
EDGE_ARMS = (
    ("gspo", "gspo", GSPO),
    ("grpo", "grpo", GRPO),
    ("grpo, narrow", "grpo", NARROW),
    ("gspo+replay", "gspo+replay", GSPO),
    ("grpo+replay", "grpo+replay", GRPO),
)


def arm_of_updates(edge_arm, n, lr):
    """With n updates per step, each on an nth of its responses; 4 is the default."""
    name, learner, window = edge_arm
    return arm(f"{name}, {n} updates", learner, lr, window, **({"flags": f"--minibatches {n}"} if n != 4 else {}))


SWEEPS = {
    # Which window, for either objective, where the learning rate is too high? Which rate, at the default windows?
    "choose": [arm("gspo", "gspo", EDGE, scaled(GSPO, x)) for x in WIDTHS]
    + [arm("grpo", "grpo", EDGE, scaled(GRPO, x)) for x in WIDTHS]
    + [arm(f"{a}, rate", a, lr, window) for a, window in (("gspo", GSPO), ("grpo", GRPO)) for lr in EDGE_RATES[:3]],
    # At which learning rate does each of them break?
    "edge": [arm(name, learner, lr, window) for lr in EDGE_RATES for name, learner, window in EDGE_ARMS],
    # Does anything break slowly, just inside the edge?
    "slow": [arm(name, learner, 4e-4, window, steps=180) for name, learner, window in EDGE_ARMS[:2]],
    # Twenty seeds where five mislead; and GSPO's own gradient, rounded otherwise, as the control.
    "seeds": [arm(name, learner, EDGE, window) for name, learner, window in EDGE_ARMS]
    + [arm("gspo, rounded otherwise", "gspo", EDGE, GSPO, weight="sequence", clip="sequence")]
    + [arm(name, learner, 1.2e-3, window) for name, learner, window in EDGE_ARMS[:3]]
    + [arm_of_updates(x, 16, 4e-4) for x in EDGE_ARMS[:2]]
    + [arm_of_updates(x, 8, EDGE) for x in EDGE_ARMS]
    + [arm(f"{name}, longer", learner, EDGE, window, world=LONGER) for name, learner, window in EDGE_ARMS[:2]],
    # The ratio's unit, or the clip's?
    "unit": [
        arm(f"{weight} ratio, {clip} clip", "gspo", EDGE, NARROW if clip == "token" else GSPO, weight=weight, clip=clip)
        for weight in ("sequence", "token", "no")
        for clip in ("sequence", "token", "no")
    ],
    # How wide a window?
    "window": [
        arm(learner, learner, lr, (NEVER, NEVER) if x is None else scaled(window, x))
        for lr in (EDGE, TUNED)
        for learner, window in (("gspo", GSPO), ("grpo", GRPO))
        for x in (*WIDTHS[1:], None)
    ],
    # Which half of the window, and which half of the gradient?
    "why": [
        arm(f"{learner}, {name}", learner, EDGE, window, **variant)
        for learner, (low, high) in (("gspo", GSPO), ("grpo", NARROW))
        for name, window, variant in (
            ("both halves", (low, high), {}),
            ("clips wrong answers", (low, NEVER), {}),
            ("clips right answers", (NEVER, high), {}),
            ("never clips", (NEVER, NEVER), {}),
            ("right answers only, never clips", (NEVER, NEVER), {"sign": 1}),
            ("wrong answers only, never clips", (NEVER, NEVER), {"sign": -1}),
        )
    ],
    # How stale may the data be? One update on all responses of a step (the control: every ratio is 1), or up to 16.
    "staleness": [arm_of_updates(x, n, lr) for lr in EDGE_RATES[1:4] for n in (1, 2, 4, 8, 16) for x in EDGE_ARMS[:2]],
    # How precise must the sampler's log-probs be?
    "precision": [
        arm(f"{learner}, {sampler}, {old}", learner, lr, window, **rounding)
        for lr, coarse in ((TUNED, (8, 5, 4)), (EDGE, (8,)))
        for learner, _, window in EDGE_ARMS[:2]
        for sampler, old, rounding in (
            ("float32", "sampler", {}),
            ("bfloat16", "sampler", {"flags": "--sampler-dtype bfloat16"}),
            ("bfloat16", "recompute", {"flags": "--sampler-dtype bfloat16 --old-logprobs recompute"}),
            *((f"{bits} bits", "sampler", {"bits": bits}) for bits in coarse),
            *((f"{bits} bits", "recompute", {"bits": bits, "flags": "--old-logprobs recompute"}) for bits in coarse),
        )
    ],
    # Does the picture hold when responses are longer?
    "longer": [
        arm(name, learner, lr, window, world=LONGER) for lr in (TUNED, EDGE) for name, learner, window in EDGE_ARMS[:3]
    ],
    # Does search pay?
    "countdown": [
        arm(name, learner, TUNED, window, world="--task countdown") for name, learner, window in EDGE_ARMS[:2]
    ],
}


def decomposed(weight, clip, logprobs, old_logprobs, advantages, mask, *, low, high, num_sequences):
    """Both objectives' gradient taken apart: -1/B sum_i 1/|y_i| sum_t keep_it weight_it A_i log pi(y_it).

    weight: "sequence" s_i, "token" w_it, "no" 1; the value that the ratio has, without a gradient of its own.
    clip: whose ratio decides `keep`: "sequence" s_i, "token" w_it, "no" 1.
    ("sequence", "sequence") has the gradient of `gspo_loss` (equation 10), ("token", "token") that of `grpo_loss` (12).
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0).detach()
    ratios = {"token": log_ratio.exp(), "sequence": (log_ratio.sum(1, keepdim=True) / lengths).exp()}
    ratios["no"] = torch.ones_like(log_ratio)
    a, of_clip = advantages[:, None], ratios[clip]
    keep = torch.where(a < 0, of_clip >= 1 - low, of_clip <= 1 + high)
    terms = torch.where(mask, keep * ratios[weight] * a * logprobs, 0)
    return -(terms.sum(1, keepdim=True) / lengths).sum() / num_sequences


DRIFTS = ("right_drift", "right_lost", "wrong_drift", "wrong_lost")


def drifts(logprobs, old_logprobs, advantages, mask):
    """Of the tokens of right and of wrong responses: mean log-ratio, and the share of which e-fold less is left."""
    log_ratio, moved = logprobs - old_logprobs, []
    for rows in (advantages > 0, advantages < 0):
        chosen = mask & rows[:, None]
        count = chosen.sum().clamp(min=1)
        moved += [torch.where(chosen, log_ratio, 0).sum() / count, (chosen & (log_ratio < -1)).sum() / count]
    return dict(zip(DRIFTS, moved))


# What a row keeps of a run: means over its steps, and values step by step.
MEANS = (
    "reward", "clip_frac", "clip_frac_low", "clip_frac_high", "expert_change", "approx_kl", "grad_norm", "seconds",
    "log_ratio_std", "seq_log_ratio_std", *DRIFTS,
)  # fmt: skip
SERIES = ("reward", "entropy", "length", "clip_frac", "ratio_min", "ratio_max", "grad_norm", *DRIFTS)


def rounded(model, bits):
    """A copy whose matrices are rounded to so many bits, each row on a scale of its own."""
    model, levels = copy.deepcopy(model), 2 ** (bits - 1) - 1
    for p in model.parameters():
        if p.dim() > 1:
            scale = p.data.abs().amax(-1, keepdim=True).clamp(min=1e-12) / levels
            p.data = (p.data / scale).round() * scale
    return model


def run_one(setting, folder, cached, flags=()):
    """In a process of its own: `train.py` with one learner, its loss and its sampler changed as the setting says."""
    objective = setting["learner"].partition("+")[0]
    plain = train.LOSSES[objective]

    def loss(logprobs, old_logprobs, advantages, mask, *, clip_eps_low, clip_eps_high, num_sequences=None):
        moved = drifts(logprobs.detach(), old_logprobs, advantages, mask)
        if "sign" in setting:
            advantages = torch.where(advantages * setting["sign"] > 0, advantages, 0)
        window = {"clip_eps_low": clip_eps_low, "clip_eps_high": clip_eps_high}
        value, metrics = plain(logprobs, old_logprobs, advantages, mask, **window, num_sequences=num_sequences)
        if "weight" in setting and num_sequences is not None:  # the call whose gradient is taken
            parts = (setting["weight"], setting["clip"], logprobs, old_logprobs, advantages, mask)
            value = decomposed(*parts, low=clip_eps_low, high=clip_eps_high, num_sequences=num_sequences)
        return value, metrics | moved

    train.LOSSES[objective] = loss
    train.UPDATE_METRICS += DRIFTS
    if "bits" in setting:
        respond, generate = train.respond, train.generate

        def respond_rounded(*args):
            train.generate = lambda model, *a, **k: generate(rounded(model, setting["bits"]), *a, **k)
            try:
                return respond(*args)
            finally:
                train.generate = generate

        train.respond = respond_rounded
    evaluate, before = train.evaluate, cached / "before.json"

    def evaluate_once(*args):  # a warm start is evaluated once for all runs from it
        if before.exists() and not (folder / f"{setting['learner']}.csv").exists():
            return json.loads(before.read_text())
        return evaluate(*args)

    train.evaluate = evaluate_once
    options = {"out": folder, "device": "cpu", "save-every": 1000, "rl-steps": setting["steps"]}
    options |= {"seed": setting["seed"], "learners": setting["learner"], "lr": setting["lr"]}
    words = [word for k, v in options.items() for word in (f"--{k}", str(v))]
    words += [f"--{objective}-clip", str(setting["low"]), str(setting["high"])]
    words += [*setting.get("world", "").split(), *setting.get("flags", "").split(), *flags]
    try:
        train.main(words)
    except train.UserError as error:
        sys.exit(NOT_FINITE if error.code == 1 else str(error))


def warm_folder(world, seed):
    return SCRATCH / f"warm{world.replace(' ', '')}-{seed}"


def warm_starts(pool, needed):
    """Makes those of these (world, seed) that are not there yet."""
    missing = sorted((w, seed) for w, seed in needed if not (warm_folder(w, seed) / "before.json").exists())
    list(tqdm(pool.map(lambda x: child("warm", x[1], warm_folder(*x), x[0]), missing), "warm starts", len(missing)))


def warm(seed, folder, world):
    """In a process of its own: the warm start of a seed, and its evaluation."""
    settings, _ = train.parse_settings(["--seed", str(seed), "--out", str(folder), "--device", "cpu", *world.split()])
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu")
    with train.harness.stoppable(folder, device) as stop:
        model = train.warm_start(settings, device, stop, None)
    (folder / "before.json").write_text(json.dumps(train.evaluate(model, settings, device)))


def child(*words, script=__file__):
    """Runs a script of ours in a process with one thread. Returns (exit status, what it printed)."""
    command = [sys.executable, script, "--child", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, NOT_FINITE):
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.returncode, done.stdout


def read(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []


def accuracy(rows, stage, way):
    """As `train.py` has it, of the rows of a stage."""
    rows = [
        {"terms": int(r["terms"]), way: float(r[way]), "problems": int(r["problems"])}
        for r in rows
        if r["stage"] == stage
    ]
    return train.accuracy(rows, way)


def mean(steps, name):
    values = [float(r[name]) for r in steps if r[name] != "nan"]
    return sum(values) / len(values) if values else float("nan")


def variant(setting):
    """What else distinguishes a setting, as text."""
    names = ("weight", "clip", "sign", "bits", "flags", "world")
    return " ".join(f"{name}={setting[name]}" for name in names if name in setting)


def measure(setting, known):
    """Runs one setting with one seed, unless a row of the same work is known. Returns its row."""
    if same := known.get(work(setting)):
        return same | {"arm": setting["arm"]}
    seed, name = setting["seed"], "-".join(str(v).replace(" ", "_") for v in setting.values())
    cached, folder = warm_folder(setting.get("world", ""), seed), SCRATCH / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(cached / "warm.pt", folder)
    began = time.perf_counter()
    broke = child("run", json.dumps(setting), folder, cached)[0] == NOT_FINITE
    seconds = time.perf_counter() - began
    steps, evaluation = read(folder / f"{setting['learner']}.csv"), read(folder / "eval.csv")
    before = [r | {"stage": "before"} for r in json.loads((cached / "before.json").read_text())]
    late = steps[-10:]
    row = {name: setting[name] for name in ("arm", "learner", "lr", "low", "high", "steps", "variant", "seed")}
    row |= {"before": accuracy(before, "before", "sampled")}
    row["after"] = 0.0 if broke else accuracy(evaluation, "after", "sampled")
    row["greedy"] = 0.0 if broke else accuracy(evaluation, "after", "greedy")
    for column in ("reward", "think_frac", "length", "entropy"):
        row[f"late_{column}"] = mean(late, column)
    for column in MEANS:
        row[f"mean_{column}"] = mean(steps, column)
    row |= {f"{column}_by_step": " ".join(f"{float(r[column]):.4g}" for r in steps) for column in SERIES}
    row |= {"broke": int(broke), "seconds": round(seconds)}
    shutil.rmtree(folder)
    return {k: f"{v:.5g}" if isinstance(v, float) else str(v) for k, v in row.items()}


def work(row):
    """What was run, whatever it is called."""
    return (
        row["learner"],
        row["variant"],
        *(f"{float(row[name]):.5g}" for name in ("lr", "low", "high", "steps", "seed")),
    )


def sweep(name, seeds, path, workers):
    """All runs of a sweep that its file does not hold yet. Sweeps share runs of the same work."""
    known = {work(row): row for other in sorted(RESULTS.glob("*.csv")) for row in read(other) if "variant" in row}
    done = {(row["arm"], work(row)) for row in read(path)}
    runs = [(setting | {"variant": variant(setting), "seed": seed}) for seed in seeds for setting in SWEEPS[name]]
    runs = [run for run in runs if (run["arm"], work(run)) not in done]
    with ThreadPoolExecutor(workers) as pool:
        warm_starts(pool, {(run.get("world", ""), run["seed"]) for run in runs if work(run) not in known})
        for row in tqdm(pool.map(lambda run: measure(run, known), runs), name, len(runs), smoothing=0):
            new = not path.exists()
            with open(path, "a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, row.keys(), lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(row)


def main(argv):
    if argv[:1] == ["--child"]:
        torch.set_num_threads(1)
        task, *words = argv[1:]
        if task == "warm":
            return warm(int(words[0]), Path(words[1]), words[2])
        return run_one(json.loads(words[0]), *map(Path, words[1:]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", choices=tuple(SWEEPS))
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time (default: one per core)")
    args = parser.parse_args(argv)
    seeds = SEEDS.get(args.sweep, REPORTED)
    path = RESULTS / f"{'quick-' * args.quick}{args.sweep}.csv"
    sweep(args.sweep, seeds[:1] if args.quick else seeds, path, args.workers)
    print(f"{len(read(path))} rows in {path}")


if __name__ == "__main__":
    from harness import run_program

    run_program(main)
