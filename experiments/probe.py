# SPDX-License-Identifier: MIT
"""Inside single updates: what they do to single tokens, and whose correction corrects.

    python experiments/probe.py            writes experiments/results/routing.csv, ratio.csv and cosine.csv
    python experiments/plot.py routing ratio cosine

From the warm start, GSPO trains for some steps. Then, within a step, after 1, 2 and 4 updates, every response of the
rollout is scored again. `routing`: the log-ratios log w of tokens for which some layer would choose another expert than
when they were sampled, and of all others; and of the same tokens with the routes replayed. With 2 experts, both used by
every token, the model is dense and of the same active size: the control. `ratio`: the spread of log w over tokens and
of log s over sequences, by length. `cosine`: after three updates, the gradient of the fourth minibatch under each
ratio, none of it clipped, against the gradient of 4,096 fresh responses of the policy as it is then.
"""

import argparse
import csv
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))
import run
from run import train

EXPERTS, FIRST, STEPS = (2, 8, 32, 64), 6, 4
BINS = ((2, 9), (10, 24), (25, 39), (40, 64))  # tokens in a response
QUANTILES = (0.5, 0.9, 0.99)


def rescore(learner, rollout, settings, replay):
    """(log w, whether some layer would now choose other experts for the token, both (B, T); share of such choices)."""
    log_ratio, changed = torch.zeros_like(rollout.logprobs), torch.zeros_like(rollout.mask)
    counts = torch.zeros(2)
    for rows, width in train.chunks_of(rollout, range(len(rollout.mask)), settings):
        routes = rollout.routes[:, rows, :width]
        spans = [rollout.spans[row] for row in rows]
        tokens = rollout.tokens[rows, :width]
        logprobs, probs, read = train.score(learner.model, tokens, spans, routes=routes if replay else None)
        then = routes[:, :, :-1].flatten(1, 2).index_select(1, read).long()
        now = probs.topk(then.size(-1)).indices
        counts += train.routing_change(probs, then)
        token_changed = (now.sort(-1).values != then.sort(-1).values).flatten(2).any(-1).any(0)  # (N,)
        flat = torch.zeros(len(rows) * (width - 1), dtype=torch.bool).index_copy(0, read, token_changed)
        changed[rows, 1:width] = flat.view(len(rows), width - 1)  # what is read at t - 1 predicts token t
        log_ratio[rows, :width] = logprobs - rollout.logprobs[rows, :width]
    return torch.where(rollout.mask, log_ratio, 0), changed & rollout.mask, float(counts[0] / counts[1])


def quantiles(x):
    """Of the absolute values; nan where there are too few to tell."""
    return [float(x.abs().quantile(q)) if len(x) >= 20 else float("nan") for q in QUANTILES]


def routing_rows(learner, rollout, settings, about):
    (log_ratio, changed, choices), (replayed, _, _) = (rescore(learner, rollout, settings, r) for r in (False, True))
    rows, mask = [], rollout.mask
    for kind, chosen in (("changed", changed), ("same", mask & ~changed)):
        for replay, values in ((0, log_ratio), (1, replayed)):
            q = dict(zip(("q50", "q90", "q99"), quantiles(values[chosen])))
            shares = {"choices_changed": choices, "tokens_changed": float(changed.sum() / mask.sum())}
            rows.append(about | {"tokens": kind, "replay": replay, "count": int(chosen.sum())} | q | shares)
    return rows, log_ratio


def ratio_rows(log_ratio, rollout, about):
    """Coherence: 1 if the tokens of a response moved independently, sqrt(|y|) if they all moved together."""
    rows, lengths = [], rollout.lengths.float()
    for low, high in BINS:
        chosen = (lengths >= low) & (lengths <= high)
        tokens = log_ratio[chosen][rollout.mask[chosen]]
        sequences, length = log_ratio[chosen].sum(1) / lengths[chosen], float(lengths[chosen].mean())
        sd_w, sd_s = (float(x.std()) if len(sequences) >= 20 else float("nan") for x in (tokens, sequences))
        coherence = sd_s * length**0.5 / sd_w if sd_w else float("nan")
        rows.append(about | {"length": f"{low}–{high}", "responses": int(chosen.sum()), "mean_length": length,
                             "sd_log_w": sd_w, "sd_log_s": sd_s, "coherence": coherence})  # fmt: skip
    return rows


def gradient(learner, rollout, advantages, settings, rows, weight):
    """Of the unclipped objective with this weight, over these rows, as one vector."""
    learner.optimizer.zero_grad()
    rows = [row for row in rows if advantages[row] != 0]
    for chunk, width in train.chunks_of(rollout, rows, settings):
        tokens, spans = rollout.tokens[chunk, :width], [rollout.spans[row] for row in chunk]
        logprobs, _, _ = train.score(learner.model, tokens, spans)
        old, mask = rollout.logprobs[chunk, :width], rollout.mask[chunk, :width]
        parts = weight, "no", logprobs, old, advantages[chunk], mask
        run.decomposed(*parts, low=1, high=1, num_sequences=1).backward()
    flat = torch.cat([p.grad.flatten() for p in learner.model.parameters()])
    learner.optimizer.zero_grad()
    return flat


def sampled(learner, settings, step):
    """Responses to the problems of a step by the policy as it is, and their advantages."""
    problems = train.problems_of(settings, step)
    rollout = train.respond(learner, problems, settings, step, torch.device("cpu"))
    rewards = train.verify(problems, rollout.texts(), settings.group)
    return rollout, train.group_advantages(rewards, settings.group)


def cosine_rows(learner, rollout, advantages, settings, minibatch, step, about):
    fresh = 0
    for part in range(8):
        other, its_advantages = sampled(learner, settings, 1000 * (step + 1) + part)
        fresh = fresh + gradient(learner, other, its_advantages, settings, range(len(other.mask)), "no")
    other, its_advantages = sampled(learner, settings, 1000 * (step + 1) + 8)
    rows = {"fresh, same size": gradient(learner, other, its_advantages, settings, minibatch, "no")}
    for weight in ("no", "token", "sequence"):
        rows[f"stale, {weight} ratio"] = gradient(learner, rollout, advantages, settings, minibatch, weight)
    return [about | {"gradient": k, "cosine": float(torch.cosine_similarity(g, fresh, 0))} for k, g in rows.items()]


def probe(experts, seed, lr, folder):
    """One model: rows for the three files."""
    found = {"routing": [], "ratio": [], "cosine": []}
    flags = ["--seed", str(seed), "--experts", str(experts), "--lr", str(lr), "--device", "cpu"]
    settings, _ = train.parse_settings(flags)
    model = train.load_model(folder / "warm.pt")[0].train()
    learner = train.Learner("gspo", model, settings)
    for step in range(FIRST + STEPS):
        rollout, advantages = sampled(learner, settings, step)
        for i, minibatch in enumerate(train.random_minibatches(settings, step)):
            about = {"experts": experts, "seed": seed, "lr": lr, "step": step + 1, "updates": i}
            if step >= FIRST and i == 3:
                found["cosine"] += cosine_rows(learner, rollout, advantages, settings, minibatch, step, about)
            rows = [row for row in minibatch if advantages[row] != 0]
            if rows:
                train.update(learner, rollout, rollout.logprobs, advantages, rows, len(minibatch), settings, step)
            if step >= FIRST and i in (0, 1, 3):
                with torch.no_grad():
                    rows, log_ratio = routing_rows(learner, rollout, settings, about | {"updates": i + 1})
                    found["routing"] += rows
                    found["ratio"] += ratio_rows(log_ratio, rollout, about | {"updates": i + 1})
    return found


def main(argv):
    if argv[:1] == ["--child"]:
        torch.set_num_threads(1)
        experts, seed, lr, folder = argv[1:]
        print(json.dumps(probe(int(experts), int(seed), float(lr), Path(folder))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time (default: one per core)")
    workers = parser.parse_args(argv).workers
    work = [(e, seed, lr) for seed in run.REPORTED for e in EXPERTS for lr in (run.TUNED, run.EDGE)]
    found = {"routing": [], "ratio": [], "cosine": []}
    with ThreadPoolExecutor(workers) as pool:
        worlds = {e: f"--experts {e}" if e != 8 else "" for e in EXPERTS}
        run.warm_starts(pool, {(worlds[e], seed) for e, seed, _ in work})
        jobs = pool.map(lambda x: run.child(*x, run.warm_folder(worlds[x[0]], x[1]), script=__file__), work)
        for _, printed in tqdm(jobs, "probe", len(work)):
            for name, rows in json.loads(printed).items():
                found[name] += rows
    for name, rows in found.items():
        rows = [{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
        with open(run.RESULTS / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
