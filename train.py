# SPDX-License-Identifier: MIT
"""Race GSPO against GRPO: from the same warm start, on the same problems, with the same sampling noise.

    python train.py                                        both curves on a laptop's CPU in a minute or two
    python train.py --learners gspo grpo grpo+replay       add GRPO with routing replay
    python train.py --task countdown                       reach a target with given numbers, by search
    python train.py --preset laptop-gpu                    a larger model and longer sums, for a consumer GPU
    python train.py --resume out/tiny-chain-sum-seed0      go on after an interruption, bit for bit
    torchrun --nproc_per_node=2 train.py                   the same run on two processes

First the model imitates worked solutions (`imitate.py`). Then each learner, at each step (`rl_step`),
  1. samples G responses to each of P problems with its own policy;
  2. has them verified: reward 1 for a right answer, 0 for a wrong one;
  3. compares each reward with those of its group: advantages;
  4. splits the P*G responses into minibatches and takes one optimizer step on each. From the second one on, the
     policy is no longer the one that sampled, so the importance ratio matters: per sequence in GSPO, per token in GRPO.

Every random draw is a function of (seed, purpose, step, row) and of nothing else. That is why the learners can share
problems and noise, why a resumed run needs no random state, and why two processes draw what one does.

Letters: P problems, G responses per problem (the group), B = P*G rows, T tokens, N packed tokens, L layers, E experts,
K experts per token.
"""

import copy
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import harness
from grpo import group_advantages, grpo_loss
from gspo import gspo_loss
from harness import all_reduce, at_least, between, check_finite, flag, log, natural, positive, rank, rng, world_size
from imitate import warm_start
from model import ModelConfig, Transformer, checkpoint, response_logprobs, split_by_length
from moe import expert_load, routing_change
from rewards import EXAMPLES, TASKS, make_problem, reward
from sample import EOS, SPECIAL_TOKENS, THINK, generate

LOSSES = {"gspo": gspo_loss, "grpo": grpo_loss}


class Learner(harness.Trainable):
    """A policy with its optimizer and records, and how it learns: an objective, with or without routing replay."""

    def __init__(self, name, model, settings):
        super().__init__(name, model)
        objective, _, replay = name.partition("+")
        low, high = settings.gspo_clip if objective == "gspo" else settings.grpo_clip
        self.loss = partial(LOSSES[objective], clip_eps_low=low, clip_eps_high=high)
        self.replay = replay == "replay"
        self.settings = settings
        self.metrics = UPDATE_METRICS

    def sampler(self):
        """The model that samples: the policy, or on purpose an engine that is not quite the trainer, a rounded copy."""
        if self.settings.sampler_dtype == "bfloat16":
            return copy.deepcopy(self.model).to(torch.bfloat16)
        return self.model

    def logprobs(self, rollout):
        """The policy's log-probs of these responses, (B, T), and (changed, all) counts of its choices of experts."""
        routes = rollout.routes if self.replay else None
        options = {"temperature": self.settings.temperature, "routes": routes, "output_router_probs": True}
        with harness.precision(self.settings.dtype, self.device):
            logprobs, probs, packed = response_logprobs(self.model, rollout.tokens, rollout.spans, **options)
        sampled = rollout.routes[:, :-1].flatten(0, 1).index_select(0, packed)  # (N, L, K)
        return logprobs, routing_change(probs.detach(), sampled)


def rl_step(learner, problems, settings, step):
    """One step of one learner. Adds a record to its history; returns an example of what it said."""
    began = time.perf_counter()
    rollout = respond(learner, problems, settings, step)
    texts = rollout.texts()
    rewards = verify(problems, texts)
    advantages = group_advantages(rewards, settings.group).to(learner.device)
    if settings.old_logprobs == "recompute":
        rollout.logprobs = recompute(learner, rollout, settings)
    # In a group all right or all wrong, advantages and gradients are 0: its responses are left out of the updates.
    teaches = (advantages != 0).tolist()
    updates = []
    with harness.keep_if_not_finite(learner, step, settings.folder, advantages=advantages, **vars(rollout)):
        check_finite(logprobs=rollout.logprobs)
        for minibatch in random_minibatches(settings, step):
            rows = [row for row in minibatch if teaches[row]]
            if rows:
                updates.append(update(learner, rollout, advantages, rows, settings, step))
    seconds = time.perf_counter() - began
    record = measure(rollout, rewards, advantages, settings) | over_updates(updates, learner.metrics)
    speed = {"tokens_per_s": float(rollout.lengths.sum()) / seconds, "seconds": seconds}
    learner.history.append({"step": step + 1} | record | speed)
    return example(problems, texts, rewards, advantages)


def problems_of(settings, step):
    """The P problems of an RL step: the same for all learners."""
    draw = rng(settings.seed, "problems", step)
    return [settings.random_problem(draw) for _ in range(settings.prompts)]


def respond(learner, problems, settings, step):
    """A Rollout: G responses to each problem by the learner's policy. Each process samples its share, and gets all."""
    share = settings.prompts // world_size()
    first = rank() * share
    with harness.precision(settings.dtype, learner.device):
        rollout = generate(
            learner.sampler(),
            [problem.prompt for problem in problems[first : first + share]],
            samples_per_prompt=settings.group,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=rng(settings.seed, "sampling", step).getrandbits(64),
            first_row=first * settings.group,
        )
    return harness.gather(rollout)


def verify(problems, texts):
    """The reward of each response, by the rule of its problem: 1, 0, or None where it cannot be told."""
    group = len(texts) // len(problems)
    rewards = []
    for i, problem in enumerate(problems):
        rewards += reward(problem, texts[i * group : (i + 1) * group])
    return rewards


@torch.no_grad()
def recompute(learner, rollout, settings):
    """Old log-probs the conventional way: one more forward pass, before the first update. (B, T)"""
    old_logprobs = torch.zeros_like(rollout.logprobs)
    for micro_batch in micro_batches(rollout, range(len(old_logprobs)), settings):
        logprobs, _ = learner.logprobs(rollout.select(micro_batch))
        old_logprobs[micro_batch, : logprobs.size(1)] = logprobs
    return all_reduce(old_logprobs)


def micro_batches(rollout, rows, settings):
    """This process's share of these rows, split into micro-batches of similar lengths: lists of rows."""
    parts = split_by_length([rollout.spans[row][1] for row in rows], settings.micro_tokens)
    return [[rows[i] for i in part] for part in parts[rank() :: world_size()]]


def random_minibatches(settings, step):
    """Split the B rows at random: yields the rows of one optimizer step after the other."""
    size = settings.minibatch_size
    for epoch in range(settings.epochs):
        rows = list(range(settings.prompts * settings.group))
        rng(settings.seed, "minibatches", step, epoch).shuffle(rows)
        for first in range(0, len(rows), size):
            yield rows[first : first + size]


def update(learner, rollout, advantages, rows, settings, step):
    """One optimizer step on these rows of a minibatch. Returns its metrics."""
    loss = torch.zeros((), device=learner.device)
    changed = torch.zeros(2, device=learner.device)
    new_logprobs = torch.zeros_like(rollout.logprobs)
    # the count of the whole minibatch divides, so that the micro-batches' gradients add up to its gradient
    options = {"num_sequences": settings.minibatch_size}
    for micro_batch in micro_batches(rollout, rows, settings):
        part = rollout.select(micro_batch)
        logprobs, part_changed = learner.logprobs(part)
        part_loss, _ = learner.loss(logprobs, part.logprobs, advantages[micro_batch], part.mask, **options)
        part_loss.backward()
        loss += part_loss.detach()
        changed += part_changed
        new_logprobs[micro_batch, : logprobs.size(1)] = logprobs.detach()
    grad_norm = learner.step(settings.lr * min(1.0, (step + 1) / 5), all_reduce(loss))
    # second call, without gradient, for the metrics of the whole minibatch
    new_logprobs = all_reduce(new_logprobs)[rows]
    _, metrics = learner.loss(new_logprobs, rollout.logprobs[rows], advantages[rows], rollout.mask[rows])
    changed, choices = all_reduce(changed)
    return metrics | {"grad_norm": grad_norm, "expert_change": changed / choices}


def measure(rollout, rewards, advantages, settings):
    """What the responses of a step were like: a dict of floats."""
    mask = rollout.mask
    rewards = torch.tensor([float("nan") if r is None else r for r in rewards])
    thinks = ((rollout.tokens == THINK) & mask).any(1)
    ends = ((rollout.tokens == EOS) & mask).any(1)
    went_through = mask[:, :-1] & mask[:, 1:]  # a response's last token never goes through the network
    routes = rollout.routes[:, :-1][went_through]  # (N, L, K)
    load = torch.stack([expert_load(r, settings.experts) for r in routes.unbind(1)])  # (L, E)
    return {
        "reward": float(rewards.nanmean()),
        "accuracy": float((rewards == 1).float().mean()),
        "length": float(rollout.lengths.float().mean()),
        "think_frac": float(thinks.float().mean()),
        "truncated_frac": float(1 - ends.float().mean()),
        "entropy": float(rollout.entropy.sum() / mask.sum()),
        "load_imbalance": float(load.amax(1).mean()) * settings.experts,
        "zero_std_groups": float((advantages.view(-1, settings.group) == 0).all(1).float().mean()),
    }


UPDATE_METRICS = (
    "clip_frac", "clip_frac_low", "clip_frac_high", "ratio_mean", "ratio_min", "ratio_max", "log_ratio_std",
    "seq_log_ratio_std", "approx_kl", "grad_norm", "expert_change",
)  # fmt: skip


def over_updates(updates, names):
    """The means of these metrics over a step's updates, of extreme ratios the extremes; nan without any update."""
    if not updates:
        return dict.fromkeys(names, float("nan"))
    summary = {}
    for name in names:
        values = torch.stack([metrics[name] for metrics in updates])
        summary[name] = float(values.mean())
    summary["ratio_min"] = min(float(metrics["ratio_min"]) for metrics in updates)
    summary["ratio_max"] = max(float(metrics["ratio_max"]) for metrics in updates)
    return summary


def example(problems, texts, rewards, advantages):
    """The first problem that got both a right and a wrong response, with one of each and their advantages."""
    group = len(texts) // len(problems)
    for i, problem in enumerate(problems):
        of_group = rewards[i * group : (i + 1) * group]
        if 1 in of_group and 0 in of_group:
            shown = f"{problem.prompt} ({of_group.count(1)} of {group} right)"
            for word, value in (("right", 1), ("wrong", 0)):
                row = i * group + of_group.index(value)
                shown += f"\n        {word}, advantage {advantages[row]:+.2f}: {harness.printable(texts[row])}"
            return shown
    return "no problem got both right and wrong responses at this step"


LOG_COLUMNS = {  # of the CSV, as the log shows them: heading, format, factor
    "reward": (" reward", "7.3f", 1),
    "length": ("  len", "5.1f", 1),
    "think_frac": (" think%", "7.1f", 100),
    "clip_frac": ("  clip%", "7.2f", 100),
    "entropy": (" entropy", "8.3f", 1),
    "expert_change": (" expert%", "8.2f", 100),
    "seconds": ("    s", "5.2f", 1),
}


def race(learners, settings, stop, first, before):
    """In lockstep: at each step every learner gets the same problems and the same sampling noise."""
    for step in harness.resumable("RL", first, settings.rl_steps, settings.save_every, stop, learners, before=before):
        one_step = partial(rl_step, problems=problems_of(settings, step), settings=settings, step=step)
        examples = harness.side_by_side(one_step, learners, learners[0].device)
        harness.log_step(step, {learner.name: learner.history[-1] for learner in learners}, LOG_COLUMNS)
        for learner, text in zip(learners, examples):
            harness.write_csv(settings.folder / f"{learner.name}.csv", learner.history)
            if (step + 1) % 10 == 0:
                log(f"      {learner.name}: {text}")
                if all(record["zero_std_groups"] == 1 for record in learner.history[-10:]):
                    log("      for 10 steps no group held both right and wrong responses: nothing is left to learn")


def held_out_problems(settings):
    """The same held-out problems whatever the seed, so that seeds can be compared; fewest terms first."""
    problems = []
    for terms in settings.terms:
        draw = rng("evaluation", terms)
        found = {}
        for _ in range(20 * settings.eval_problems):  # of sums of two terms, only some 25 are held out
            problem = make_problem(settings.task, terms, draw, largest=settings.largest, held_out=True)
            found.setdefault(problem.prompt, problem)
        problems += list(found.values())[: settings.eval_problems]
    return problems


def evaluate(model, settings):
    """For each number of terms, accuracy sampled (once, at temperature 1) and greedy: a list of dicts."""
    problems = held_out_problems(settings)
    rewards = {"sampled": [], "greedy": []}
    for way, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        for first in range(0, len(problems), 256):  # as many at once as memory likes
            batch = problems[first : first + 256]
            prompts = [problem.prompt for problem in batch]
            options = {"max_new_tokens": settings.max_new_tokens, "temperature": temperature, "first_row": first}
            with harness.precision(settings.dtype, model.embed.weight.device):
                rollout = generate(model, prompts, **options)
            rewards[way] += verify(batch, rollout.texts())
    results = []
    for terms in settings.terms:
        rows = [row for row, problem in enumerate(problems) if len(problem.numbers) == terms]
        result = {"terms": terms}
        for way in rewards:
            result[way] = sum(rewards[way][row] for row in rows) / len(rows)
        results.append(result | {"problems": len(rows)})
    return results


def counted(results):
    """What accuracy is taken over: problems of three terms and more, since sums of two are nearly solved before RL."""
    return [r for r in results if r["terms"] >= 3] or results


def accuracy(results, way):
    """Of an evaluation, sampled or greedy: the share of right answers among the problems that are counted."""
    results = counted(results)
    return sum(r[way] * r["problems"] for r in results) / sum(r["problems"] for r in results)


def report(learners, before, after):
    """The table at the end."""
    terms = [r["terms"] for r in counted(before)]
    over = f"{terms[0]} to {terms[-1]} terms" if len(terms) > 1 else f"{terms[0]} terms"
    log(f"\nheld-out accuracy    {over:<20}sampled, by how many terms")
    log(f"{'':20}sampled  greedy    " + "".join(f"{r['terms']:7d}" for r in before))
    for label, results in {"before": before, **after}.items():
        cells = "".join(f"{r['sampled']:7.3f}" for r in results)
        log(f"  {label:<18}{accuracy(results, 'sampled'):7.3f} {accuracy(results, 'greedy'):7.3f}    {cells}")
    log("\nreward from the first step to the last")
    for learner in learners:
        rewards = [record["reward"] for record in learner.history]
        last = rewards[-10:]
        curve = harness.sparkline(rewards)
        log(f"  {learner.name:<12}{curve}  mean of the last {len(last)}: {sum(last) / len(last):.3f}")


def describe(settings, device):
    """Print the settings, with a note on those under which the race says less."""
    s = settings
    preset = vars(Settings(preset=s.preset, task=s.task))
    changed = []
    for name, value in vars(s).items():
        if name not in ("preset", "task", "learners", "seed", "out") and value != preset[name]:
            changed.append(harness.as_typed(name, value))
    with torch.device("meta"):
        total, active = Transformer(s.model_config).num_parameters()
    threads = f"{world_size()} x {torch.get_num_threads()} threads"
    log(
        f"{s.preset} preset, {s.task}, {' against '.join(s.learners)}, seed {s.seed}, into {s.folder}\n"
        f"  changed     {' '.join(changed) or 'nothing'}\n"
        f"  model       {total:,} parameters, of which a token uses {active:,}\n"
        f"  imitation   {s.warm_steps} steps of {s.warm_batch} worked solutions, {s.warm_think:.0%} of which think\n"
        f"  RL          {s.rl_steps} steps of {s.prompts} x {s.group} responses, learning rate {s.lr:g}\n"
        f"  running on  {device}, {s.dtype}, {threads}, torch {torch.__version__}"
    )
    if s.minibatches == s.epochs == 1:
        log("note: one minibatch and one epoch: every ratio is 1, so GSPO and GRPO have the same gradient")
    if s.temperature != 1:
        log(f"note: trained at temperature {s.temperature}, evaluated at 1 and greedily")


def run(settings, device, state, stop):
    """Warm start, race, evaluation: from nothing, or from where a saved state ends."""
    began = time.perf_counter()
    folder = settings.folder
    describe(settings, device)
    if state is not None and state["phase"] == "RL":  # it holds all that is needed
        models = [Transformer(settings.model_config).to(device) for _ in settings.learners]
    else:
        start = warm_start(settings, device, stop, state)
        state = None
        models = [copy.deepcopy(start) for _ in settings.learners]
    learners = [Learner(name, model, settings) for name, model in zip(settings.learners, models)]
    if state is None:
        first = 0
        before = evaluate(start, settings)
        harness.save_state(folder, "RL", 0, learners, before=before)
    else:
        first = harness.restore(learners, state)
        before = state["before"]
    log(f"before RL: accuracy {accuracy(before, 'sampled'):.3f} sampled, {accuracy(before, 'greedy'):.3f} greedy")

    race(learners, settings, stop, first, before)

    evaluations = harness.side_by_side(lambda learner: evaluate(learner.model, settings), learners, device)
    after = dict(zip(settings.learners, evaluations))
    table = []
    for learner in learners:
        for stage, results in (("before", before), ("after", after[learner.name])):
            table += [{"learner": learner.name, "stage": stage} | result for result in results]
        content = checkpoint(learner.model, learner=learner.name, **settings.metadata)
        harness.save(folder / f"{learner.name}.pt", content)
    harness.write_csv(folder / "eval.csv", table)
    harness.save_state(folder, "done", settings.rl_steps, learners, before=before)
    report(learners, before, after)
    log(f"\n{time.perf_counter() - began:.0f} s. In {folder}: eval.csv, and of each learner a .csv and a .pt")
    log(f"next: {harness.command('sample.py', EXAMPLES[settings.task], checkpoint=folder / f'{learners[0].name}.pt')}")


DTYPES = ("float32", "bfloat16")
LEARNERS = ("gspo", "grpo", "gspo+replay", "grpo+replay")
PRESETS = {
    "tiny": {},
    # 20M parameters, 2M of them active per token
    "laptop-gpu": {
        "width": 256, "layers": 4, "heads": 8, "kv_heads": 4, "experts": 32, "expert_width": 192,
        "max_terms": 10, "max_new_tokens": 128, "dtype": "bfloat16",
        "warm_steps": 800, "warm_lr": 2e-3, "rl_steps": 40, "micro_tokens": 4096,
    },
}  # fmt: skip
OF_TASK = {"countdown": {"max_new_tokens": 112}}  # a search takes more tokens than a sum
WINDOW = {"nargs": 2, "metavar": ("LOW", "HIGH")}


@dataclass
class Settings:
    """Every setting of a run, as the flags of the command line. What is not given is the preset's, or the default.

    Raises ValueError for a value that is wrong, and for values that do not go together.
    """

    preset: str = flag("tiny", "sizes to start from; flags beside it win", choices=tuple(PRESETS), section="the run")
    learners: list = flag(["gspo", "grpo"], "who races, from one warm start", nargs="+", choices=LEARNERS)
    seed: int = flag(0, "of all randomness", between(0, 2**63 - 1))
    out: str = flag("", "folder for the results; if none is given, out/PRESET-TASK-seedN")
    device: str = flag("auto", "auto takes cuda, then mps, then cpu", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = flag("float32", "of the matrix products (weights stay float32)", choices=DTYPES)
    micro_tokens: int = flag(900, "tokens of a micro-batch: what goes through the model at once in training", natural)
    save_every: int = flag(10, "RL steps between saved states (imitation: 20 times as many)", natural)

    task: str = flag("chain-sum", "sums, or countdowns of 3 or 4 terms", choices=tuple(TASKS), section="the task")
    max_terms: int = flag(6, "most terms of a sum", between(2, 10))
    largest: int = flag(9, "largest number in a problem", between(2, 99))
    eval_problems: int = flag(200, "held-out problems per number of terms", natural)

    width: int = flag(96, "model width C", natural, section="the model")
    layers: int = flag(2, "transformer blocks L", natural)
    heads: int = flag(4, "query heads H", natural)
    kv_heads: int = flag(2, "key/value heads J", natural)
    experts: int = flag(8, "experts per block E", natural)
    experts_per_token: int = flag(2, "experts that each token goes through, K", natural)
    expert_width: int = flag(96, "hidden width of one expert", natural)

    warm_steps: int = flag(1200, "steps of imitation before RL", natural, section="imitation")
    warm_batch: int = flag(64, "worked solutions per step of imitation", natural)
    warm_lr: float = flag(3e-3, "peak learning rate of imitation", positive)
    warm_think: float = flag(0.4, "share of worked solutions that reason before they answer", between(0, 1))
    aux_coef: float = flag(0.01, "weight of the load-balance loss in imitation (RL has none)", between(0, 1))

    rl_steps: int = flag(36, "RL steps of each learner", natural, section="reinforcement learning")
    prompts: int = flag(32, "problems per RL step, P", natural)
    group: int = flag(16, "responses per problem, G", at_least(2))
    minibatches: int = flag(4, "optimizer steps per pass over a step's responses", natural)
    epochs: int = flag(1, "passes over a step's responses", natural)
    lr: float = flag(2e-4, "learning rate of RL, after a linear warm-up of 5 steps", positive)
    temperature: float = flag(1.0, "of sampling, and of the log-probs that are trained", between(1e-6, 1e6))
    max_new_tokens: int = flag(64, "longest response; a longer one is cut and scored as it is", natural)
    gspo_clip: list = flag([3e-3, 4e-3], "GSPO's window [1 - LOW, 1 + HIGH]", positive, **WINDOW)
    grpo_clip: list = flag([0.2, 0.27], "GRPO's window [1 - LOW, 1 + HIGH]", positive, **WINDOW)
    old_logprobs: str = flag("sampler", "the sampler's, or one more pass", choices=("sampler", "recompute"))
    sampler_dtype: str = flag("float32", "bfloat16: an imprecise sampler, on purpose", choices=DTYPES)

    def __post_init__(self):
        preset = PRESETS.get(str(self.preset), {}) | OF_TASK.get(str(self.task), {})
        on_gpu = torch.cuda.is_available() and self.device in (None, "auto", "cuda")
        if not (on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)):
            preset.pop("dtype", None)  # bfloat16 only where the device has it natively
        harness.complete(self, preset)
        if self.prompts * self.group % self.minibatches:
            raise ValueError(f"--minibatches {self.minibatches} does not divide {self.prompts * self.group} responses")
        if len(set(self.learners)) < len(self.learners):
            raise ValueError("--learners names one twice")
        # <bos>, at most two digits and a sign for each term, and the target of a countdown
        longest_prompt = 1 + 3 * max(self.terms.stop, 6)
        if longest_prompt + self.max_new_tokens > self.model_config.context:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens} does not fit the context, {ModelConfig.context}")

    @property
    def folder(self):
        return Path(self.out or f"out/{self.preset}-{self.task}-seed{self.seed}")

    @property
    def model_config(self):
        return ModelConfig(**{name: value for name, value in vars(self).items() if name in ModelConfig.__annotations__})

    @property
    def metadata(self):
        """Saved with the weights: the special tokens, and what the model was trained on."""
        trained_on = {"task": self.task, "max_terms": self.terms[-1], "largest": self.largest}
        return {"special_tokens": list(SPECIAL_TOKENS), **trained_on}

    @property
    def terms(self):
        """How many terms a problem may have: a range."""
        return range(2, self.max_terms + 1) if self.task == "chain-sum" else TASKS[self.task]

    @property
    def minibatch_size(self):
        return self.prompts * self.group // self.minibatches

    def random_problem(self, draw):
        return make_problem(self.task, draw.choice(self.terms), draw, largest=self.largest)


def main(argv=()):
    """A run, as the words of the command line say; without any, the default run."""
    settings, resuming = harness.parse_settings(Settings, argv, __doc__.splitlines()[0])
    device = harness.pick_device(settings.device)
    if settings.prompts % world_size():
        raise harness.UserError(f"--prompts {settings.prompts} do not divide among {world_size()} processes")
    if device.type == "mps" and "bfloat16" in (settings.dtype, settings.sampler_dtype):
        # reported for some versions of torch (pytorch issue 195910): sampler and trainer would disagree unnoticed
        raise harness.UserError("bfloat16 attention on an Apple GPU may see future tokens: add --device cpu")
    device = harness.start_processes(device)
    with (
        harness.run_folder(settings.folder, vars(settings), resuming) as state,
        harness.stoppable(settings.folder) as stop,
    ):
        if state is not None and state["phase"] == "done":
            log(f"{settings.folder} holds a finished run: nothing to resume")
        else:
            run(settings, device, state, stop)


if __name__ == "__main__":
    harness.run_program(main)
