# SPDX-License-Identifier: MIT
"""Inside single updates: what they do to single tokens, and whose correction corrects.

    python experiments/probe.py            writes experiments/results/routing.csv, ratio.csv and cosine.csv
    python experiments/tables.py routing ratio cosine

The worlds of the sweeps `experts` and `length`, pushed as there: from the warm start, GSPO trains for some steps. Then,
within a step, after 1, 4 and 8 updates, every response of the rollout is scored again.

- `routing`: the log-ratios log w of tokens for which some layer would choose another expert than when they were
  sampled, and of all others; and of the same tokens with the routes replayed. With 2 experts, both used by every token,
  the model is dense and of the same active size: the control.
- `ratio`: the spread of log w over tokens and of log s over sequences, by length.
- `cosine`: after three updates, the gradient of the fourth minibatch under each ratio, none of it clipped, against the
  gradient of 4,096 fresh responses of the policy as it is then.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from rows import RESULTS, child, write
from run import CLAIMED, PUSHED, Learner, Settings, decomposed, harness, make_warm_start, train, warm_folder
from tqdm import tqdm

from grpo import group_advantages
from model import load_model, response_logprobs
from moe import routing_change

WORLDS = {
    "2 experts": {"experts": 2},
    "8 experts": {},
    "64 experts": {"experts": 64},
    "4 words": {"filler": 4, "max_new_tokens": 150},
    "8 words": {"filler": 8, "max_new_tokens": 225},
}
SEEDS = CLAIMED[:5]
FIRST = 6  # steps before anything is measured
STEPS = 4  # that are
AFTER = (1, 4, 8)  # updates of a step
BINS = ((2, 9), (10, 24), (25, 39), (40, 79), (80, 224))  # tokens in a response


def rescore(learner, rollout, settings, replay):
    """(log w, whether some layer would now choose other experts for the token, both (B, T); share of such choices)."""
    log_ratio = torch.zeros_like(rollout.logprobs)
    changed = torch.zeros_like(rollout.mask)
    counts = torch.zeros(2)
    for rows in train.micro_batches(rollout, range(len(rollout.mask)), settings):
        part = rollout.select(rows)
        routes = part.routes if replay else None
        logprobs, probs, packed = response_logprobs(
            learner.model, part.tokens, part.spans, routes=routes, output_router_probs=True
        )
        then = part.routes[:, :-1].flatten(0, 1)[packed].long()  # (N, L, K)
        now = probs.topk(then.size(-1)).indices
        counts += routing_change(probs, then)
        token_changed = (now.sort(-1).values != then.sort(-1).values).flatten(1).any(1)  # (N,)
        width = logprobs.size(1)
        flat = torch.zeros(len(rows) * (width - 1), dtype=torch.bool).index_copy(0, packed, token_changed)
        changed[rows, 1:width] = flat.view(len(rows), width - 1)  # what is computed at t - 1 predicts token t
        log_ratio[rows, :width] = logprobs - part.logprobs
    return torch.where(rollout.mask, log_ratio, 0), changed & rollout.mask, float(counts[0] / counts[1])


def quantile(x, q):
    """Of the absolute values; nan where there are too few to tell."""
    return float(x.abs().quantile(q)) if len(x) >= 20 else float("nan")


def routing_rows(learner, rollout, settings, about):
    """(rows, log w)"""
    log_ratio, changed, choices = rescore(learner, rollout, settings, False)
    replayed, _, _ = rescore(learner, rollout, settings, True)
    mask = rollout.mask
    shares = {"choices_changed": choices, "tokens_changed": float(changed.sum() / mask.sum())}
    rows = []
    for kind, chosen in (("changed", changed), ("same", mask & ~changed)):
        for replay, values in ((0, log_ratio), (1, replayed)):
            row = about | {"tokens": kind, "replay": replay, "count": int(chosen.sum())}
            for q in (0.5, 0.9, 0.99):
                row[f"q{100 * q:.0f}"] = quantile(values[chosen], q)
            rows.append(row | shares)
    return rows, log_ratio


def ratio_rows(log_ratio, rollout, about):
    """Coherence: 1 if the tokens of a response moved independently, sqrt(|y|) if they all moved together."""
    rows = []
    lengths = rollout.lengths.float()
    for low, high in BINS:
        chosen = (lengths >= low) & (lengths <= high)
        if chosen.sum() < 20:
            continue
        tokens = log_ratio[chosen][rollout.mask[chosen]]
        sequences = log_ratio[chosen].sum(1) / lengths[chosen]
        length = float(lengths[chosen].mean())
        sd_w = float(tokens.std())
        sd_s = float(sequences.std())
        row = about | {"length": f"{low}-{high}", "responses": int(chosen.sum()), "mean_length": length}
        rows.append(row | {"sd_log_w": sd_w, "sd_log_s": sd_s, "coherence": sd_s / sd_w * length**0.5})
    return rows


def gradient(learner, rollout, advantages, settings, rows, weight):
    """Of the unclipped objective with this weight, over these rows, as one vector."""
    learner.optimizer.zero_grad()
    rows = [row for row in rows if advantages[row] != 0]
    for micro_batch in train.micro_batches(rollout, rows, settings):
        part = rollout.select(micro_batch)
        logprobs = response_logprobs(learner.model, part.tokens, part.spans)
        loss = decomposed(
            weight, "no", logprobs, part.logprobs, advantages[micro_batch], part.mask, low=1, high=1, num_sequences=1
        )
        loss.backward()
    flat = torch.cat([p.grad.flatten() for p in learner.model.parameters()])
    learner.optimizer.zero_grad()
    return flat


def sampled(learner, settings, step):
    """Responses to the problems of a step by the policy as it is, and their advantages."""
    problems = train.problems_of(settings, step)
    rollout = train.respond(learner, problems, settings, step)
    return rollout, group_advantages(train.verify(problems, rollout.texts()), settings.group)


def cosine_rows(learner, rollout, advantages, settings, minibatch, step, about):
    fresh = 0
    for part in range(8):
        other, its_advantages = sampled(learner, settings, 1000 * (step + 1) + part)
        fresh = fresh + gradient(learner, other, its_advantages, settings, range(len(other.mask)), "no")
    other, its_advantages = sampled(learner, settings, 1000 * (step + 1) + 8)
    gradients = {"fresh, same size": gradient(learner, other, its_advantages, settings, minibatch, "no")}
    for weight in ("no", "token", "sequence"):
        gradients[f"stale, {weight} ratio"] = gradient(learner, rollout, advantages, settings, minibatch, weight)
    rows = []
    for name, g in gradients.items():
        rows.append(about | {"gradient": name, "cosine": float(torch.cosine_similarity(g, fresh, 0))})
    return rows


def probe(world, seed, warm):
    """One model: rows for the three files."""
    found = {"routing": [], "ratio": [], "cosine": []}
    settings = Settings(**PUSHED, **WORLDS[world], seed=seed, device="cpu")
    learner = Learner("gspo", load_model(warm)[0].train(), settings)
    for step in range(FIRST + STEPS):
        rollout, advantages = sampled(learner, settings, step)
        for done, minibatch in enumerate(train.random_minibatches(settings, step)):
            about = {"world": world, "seed": seed, "step": step + 1, "updates": done}
            if step >= FIRST and done == 3:
                found["cosine"] += cosine_rows(learner, rollout, advantages, settings, minibatch, step, about)
            rows = [row for row in minibatch if advantages[row] != 0]
            if rows:
                train.update(learner, rollout, advantages, rows, settings, step)
            if step >= FIRST and done + 1 in AFTER:
                about = about | {"updates": done + 1}
                with torch.no_grad():
                    rows, log_ratio = routing_rows(learner, rollout, settings, about)
                    found["routing"] += rows
                    found["ratio"] += ratio_rows(log_ratio, rollout, about)
    return found


def values_of(world, seed):
    return PUSHED | WORLDS[world] | {"seed": seed}


def main(argv):
    if argv[:1] == ["--child"]:
        torch.set_num_threads(1)
        _, world, seed, warm = argv
        print(json.dumps(probe(world, int(seed), warm)))
        return
    parser = harness.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="runs at a time")
    workers = parser.parse_args(argv).workers
    work = [(world, seed) for seed in SEEDS for world in WORLDS]

    def one(world, seed):
        make_warm_start(values_of(world, seed))
        _, printed = child(__file__, "--child", world, seed, warm_folder(values_of(world, seed)) / "warm.pt")
        return json.loads(printed.splitlines()[-1])

    found = {"routing": [], "ratio": [], "cosine": []}
    with ThreadPoolExecutor(workers) as pool:
        for rows in tqdm(pool.map(lambda x: one(*x), work), "probe", len(work)):
            for name in found:
                found[name] += rows[name]
    for name, rows in found.items():
        write(RESULTS / f"{name}.csv", rows, digits=4)


if __name__ == "__main__":
    harness.run_program(main)
