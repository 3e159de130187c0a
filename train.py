# SPDX-License-Identifier: MIT
"""Race GSPO against GRPO: from the same warm start, on the same problems, with the same sampling noise.

    python train.py                                        both curves on a laptop's CPU in a few minutes
    python train.py --learners gspo grpo grpo+replay       add GRPO with routing replay
    python train.py --task countdown                       reach a target with given numbers, by search
    python train.py --preset laptop-gpu                    a larger model and longer sums, for a consumer GPU
    python train.py --resume out/tiny-chain-sum-seed0      go on after an interruption, bit for bit
    torchrun --nproc_per_node=2 train.py                   the same run on two processes

First the model imitates worked solutions (the warm start). Then each learner, at each step (`rl_step`),
  1. samples G responses to each of P problems with its own policy;
  2. has them verified: reward 1 for a right answer, 0 for a wrong one;
  3. compares each reward with those of its group: advantages;
  4. splits the P*G responses into minibatches and takes one optimizer step on each. From the second one on, the
     policy is no longer the one that sampled, so the importance ratio matters: per sequence in GSPO, per token in GRPO.

Every random draw is a function of (seed, purpose, step, row) and of nothing else. That is why the learners can share
problems and noise, why a resumed run needs no random state, and why two processes draw what one does.

Letters: P problems, G responses per problem (the group), B = P*G rows, T tokens, L layers, K experts per token.
"""

import argparse
import copy
import random
import time
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils import parameters_to_vector

import harness
from grpo import group_advantages, grpo_loss
from gspo import gspo_loss
from harness import UserError, all_reduce, check_finite, fraction, log, natural, number, positive, rank, world_size
from model import ModelConfig, Transformer, checkpoint, load_model, score, split_by_length
from moe import expert_load, load_balance_loss, routing_change
from rewards import EXAMPLES, TASKS, make_problem, reward, worked_solution
from sample import EOS, PAD, SPECIAL_TOKENS, THINK, Rollout, encode_prompt, encode_response, generate

LOSSES = {"gspo": gspo_loss, "grpo": grpo_loss}
DTYPES = ("float32", "bfloat16")
LEARNERS = ("gspo", "grpo", "gspo+replay", "grpo+replay")
UPDATE_METRICS = (
    "clip_frac", "clip_frac_low", "clip_frac_high", "ratio_mean", "ratio_min", "ratio_max", "log_ratio_std",
    "seq_log_ratio_std", "approx_kl", "grad_norm", "expert_change",
)  # fmt: skip
PRESETS = {
    "tiny": {},
    # 20M parameters, 2M of them active per token
    "laptop-gpu": {
        "width": 256, "layers": 4, "heads": 8, "kv_heads": 4, "experts": 32, "expert_width": 192,
        "max_terms": 10, "max_new_tokens": 128, "dtype": "bfloat16",
        "warm_steps": 800, "warm_lr": 2e-3, "warm_chunk": 1400, "rl_steps": 40, "micro_tokens": 4096,
    },
}  # fmt: skip
OF_TASK = {"chain-sum": {}, "countdown": {"max_new_tokens": 112}}  # a search takes more tokens than a sum


def flags():
    """The parser of the command line: every setting, its default and its meaning."""
    parser = harness.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--resume", metavar="DIR", help="continue the run in DIR, with the settings it has")
    add = parser.add_argument_group("the run").add_argument
    add("--preset", default="tiny", choices=tuple(PRESETS), help="sizes to start from; flags beside it win")
    add("--learners", default=["gspo", "grpo"], nargs="+", choices=LEARNERS, help="who races, from one warm start")
    add("--seed", default=0, type=number(int, "0 to 2**63 - 1", lambda x: 0 <= x < 2**63), help="of all randomness")
    add("--out", default="", help="folder for the results; if none is given, out/PRESET-TASK-seedN")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="auto takes cuda, then mps, then cpu")
    add("--dtype", default="float32", choices=DTYPES, help="of the matrix products (weights stay float32)")
    add("--save-every", default=10, type=natural, help="RL steps between saved states (imitation: 20 times as many)")
    add = parser.add_argument_group("the task").add_argument
    add("--task", default="chain-sum", choices=tuple(TASKS), help="chain sums, or countdowns of 3 or 4 numbers")
    add("--max-terms", default=6, type=number(int, "2 to 10", lambda x: 2 <= x <= 10), help="most numbers in a sum")
    add("--largest", default=9, type=number(int, "2 to 99", lambda x: 2 <= x <= 99), help="largest number in a problem")
    add("--eval-problems", default=200, type=natural, help="held-out problems per number of terms")
    add = parser.add_argument_group("the model").add_argument
    add("--width", default=96, type=natural, help="model width C")
    add("--layers", default=2, type=natural, help="transformer blocks L")
    add("--heads", default=4, type=natural, help="query heads H")
    add("--kv-heads", default=2, type=natural, help="key/value heads J")
    add("--experts", default=8, type=natural, help="experts per block E")
    add("--experts-per-token", default=2, type=natural, help="experts that each token goes through, K")
    add("--expert-width", default=96, type=natural, help="hidden width of one expert")
    add = parser.add_argument_group("imitation").add_argument
    add("--warm-steps", default=1200, type=natural, help="steps of imitation before RL")
    add("--warm-batch", default=64, type=natural, help="worked solutions per step of imitation")
    add("--warm-lr", default=3e-3, type=positive, help="peak learning rate of imitation")
    add("--warm-think", default=0.4, type=fraction, help="share of worked solutions that reason before they answer")
    add("--warm-chunk", default=700, type=natural, help="tokens that go through the model at once in imitation")
    add("--aux-coef", default=0.01, type=fraction, help="weight of the load-balance loss in imitation (RL has none)")
    add = parser.add_argument_group("reinforcement learning").add_argument
    add("--rl-steps", default=36, type=natural, help="RL steps of each learner")
    add("--prompts", default=32, type=natural, help="problems per RL step, P")
    add("--group", default=16, type=number(int, "at least 2", lambda x: x >= 2), help="responses per problem, G")
    add("--minibatches", default=4, type=natural, help="optimizer steps per pass over a step's responses")
    add("--epochs", default=1, type=natural, help="passes over a step's responses")
    add("--lr", default=2e-4, type=positive, help="learning rate of RL, after a linear warm-up of 5 steps")
    add("--temperature", default=1.0, type=positive, help="of sampling, and of the log-probs that are trained")
    add("--max-new-tokens", default=64, type=natural, help="longest response; a longer one is cut and scored as it is")
    window = {"nargs": 2, "type": positive, "metavar": ("LOW", "HIGH")}
    add("--gspo-clip", default=[3e-3, 4e-3], **window, help="GSPO's window [1 - LOW, 1 + HIGH]")
    add("--grpo-clip", default=[0.2, 0.27], **window, help="GRPO's window [1 - LOW, 1 + HIGH]")
    add("--old-logprobs", default="sampler", choices=("sampler", "recompute"), help="the sampler's, or one more pass")
    add("--sampler-dtype", default="float32", choices=DTYPES, help="bfloat16: an imprecise sampler, on purpose")
    add("--micro-tokens", default=2048, type=natural, help="tokens that go through the model at once in RL training")
    return parser


class Settings(argparse.Namespace):
    """The values of all flags, and what follows from them."""

    @property
    def model_config(self):
        return ModelConfig(**{k: v for k, v in vars(self).items() if k in ModelConfig.__annotations__})

    @property
    def terms(self):
        return range(2, self.max_terms + 1) if self.task == "chain-sum" else TASKS[self.task]

    @property
    def folder(self):
        return Path(self.out or f"out/{self.preset}-{self.task}-seed{self.seed}")

    def check(self):
        """Raise ValueError for values that do not go together."""
        if self.prompts * self.group % self.minibatches:
            raise ValueError(f"--minibatches {self.minibatches} does not divide {self.prompts * self.group} responses")
        if len(set(self.learners)) < len(self.learners):
            raise ValueError("--learners names one twice")
        # <bos>, at most two digits and a sign for each number, and the target of a countdown
        longest_prompt = 1 + 3 * max(self.terms.stop, 6)
        if longest_prompt + self.max_new_tokens > self.model_config.context:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens} does not fit the context, {ModelConfig.context}")


def parse_settings(argv):
    """(settings, resuming): of the command line, or of the run that --resume names. Raises UserError."""
    parser = flags()
    folder = parser.parse_args(argv).resume
    typed = {word.split("=")[0] for word in argv if word.startswith("--")} - {"--resume"}
    if folder and typed:
        raise UserError(f"--resume takes the settings of the run it continues: leave out {min(typed)}")
    try:
        argv = as_flags(harness.read_settings(Path(folder))) if folder else argv
        asked = parser.parse_args(argv)  # twice: which preset, then what is not given is the preset's
        defaults = PRESETS[asked.preset] | OF_TASK[asked.task]
        on_gpu = torch.cuda.is_available() and asked.device in ("auto", "cuda")
        if not (on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)):
            defaults.pop("dtype", None)  # bfloat16 only where the device has it natively
        parser.set_defaults(**defaults)
        settings = parser.parse_args(argv, Settings())
        settings.check()
    except ValueError as error:
        raise UserError(f"cannot resume {folder}: {error}" if folder else str(error)) from error
    del settings.resume
    return settings, bool(folder)


def as_flags(values):
    """{"lr": 2e-4, "gspo_clip": [3e-3, 4e-3]} -> ["--lr", "0.0002", "--gspo-clip", "0.003", "0.004"]"""
    words = {"--" + k.replace("_", "-"): v if isinstance(v, list) else [v] for k, v in values.items()}
    return [word for flag, given in words.items() for word in (flag, *map(str, given))]


def rng(settings, *purpose):
    """A random.Random that depends on the seed and the purpose alone, e.g. rng(settings, "problems", step)."""
    return random.Random("/".join(map(str, (settings.seed, *purpose))))


class Learner:
    """A policy, its optimizer, an objective (none while imitating), and the records of its steps."""

    def __init__(self, name, model, settings):
        objective, _, replay = name.partition("+")
        self.name, self.model, self.replay, self.history = name, model, replay == "replay", []
        if objective in LOSSES:
            low, high = getattr(settings, f"{objective}_clip")
            self.loss = partial(LOSSES[objective], clip_eps_low=low, clip_eps_high=high)
        # One fused kernel for the whole update where there is one: a third of the time of the plain loop.
        fused = model.embed.weight.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    def step(self, lr, loss):
        """Sum the gradients over the processes, clip their norm to 1, step. Returns the norm before clipping."""
        harness.sum_gradients(self.model.parameters())
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        check_finite(loss=loss, gradient=grad_norm)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm


def about(settings):
    """Saved with the weights: the special tokens, and what the model was trained on."""
    trained_on = {"task": settings.task, "most_numbers": settings.terms[-1], "largest": settings.largest}
    return {"special_tokens": list(SPECIAL_TOKENS), **trained_on}


def precision(settings, device):
    """Context in which the model runs: plain float32, or bfloat16 products over float32 weights."""
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16")


def random_problem(settings, draw):
    return make_problem(settings.task, draw.choice(settings.terms), draw, largest=settings.largest)


def problems_of(settings, step):
    """The P problems of an RL step: the same for all learners."""
    draw = rng(settings, "problems", step)
    return [random_problem(settings, draw) for _ in range(settings.prompts)]


def worked_solutions(settings, step):
    """(token lists, prompt lengths) of one batch: some think before they answer, most only answer."""
    draw, solutions, prompt_lengths = rng(settings, "warm", step), [], []
    for _ in range(settings.warm_batch):
        problem = random_problem(settings, draw)
        prompt, think = encode_prompt(problem.prompt), draw.random() < settings.warm_think
        solutions.append(prompt + encode_response(worked_solution(problem, think=think)))
        prompt_lengths.append(len(prompt))
    return solutions, prompt_lengths


def imitate(learner, settings, step, device):
    """One step of imitation: mean cross-entropy over all response tokens of the batch. Returns (loss, tokens)."""
    solutions, prompt_lengths = worked_solutions(settings, step)
    lengths = [len(tokens) for tokens in solutions]
    response_tokens = sum(lengths) - sum(prompt_lengths)
    parameters = list(learner.model.parameters())

    def gradient(rows):
        longest = max(lengths[row] for row in rows)
        tokens = torch.tensor([solutions[row] + [PAD] * (longest - lengths[row]) for row in rows], device=device)
        with precision(settings, device):
            logprobs, probs, _ = score(learner.model, tokens, [(prompt_lengths[row], lengths[row]) for row in rows])
        nll = -logprobs.sum() / response_tokens
        balance = torch.stack([load_balance_loss(p, p.topk(settings.experts_per_token).indices) for p in probs]).mean()
        share = sum(lengths[row] for row in rows) / sum(lengths)
        return nll.detach(), torch.autograd.grad(nll + settings.aux_coef * share * balance, parameters)

    # The chunks depend on the batch alone; each process takes its share of them.
    chunks = split_by_length(lengths, settings.warm_chunk)[rank() :: world_size()]
    loss = torch.zeros((), device=device)
    for chunk_loss, gradients in harness.side_by_side(gradient, chunks, device):
        loss += chunk_loss
        for p, g in zip(parameters, gradients):
            p.grad = g if p.grad is None else p.grad + g
    # the rate rises over 100 steps and falls to a tenth at the end
    lr = settings.warm_lr * min(1.0, (step + 1) / 100) * (1 - 0.9 * step / settings.warm_steps)
    learner.step(lr, all_reduce(loss))
    return loss, sum(lengths)


def warm_start(settings, device, stop, state):
    """The model that all learners start from: cached in the run's folder, resumed, or trained from nothing."""
    path = settings.folder / "warm.pt"
    if path.exists():
        log(f"warm start: taken from {path}")
        try:
            model = load_model(path, device=device)[0].train()
        except ValueError as error:
            raise UserError(str(error)) from error
        if model.config != settings.model_config:
            raise UserError(f"{path} has other sizes than this run: delete it, or choose another --out")
        return model
    torch.manual_seed(settings.seed)
    learner = Learner("warm", Transformer(settings.model_config).to(device), settings)
    first = harness.restore([learner], state) if state is not None else 0
    loss, seen, began, every = torch.zeros(()), 0, time.perf_counter(), 20 * settings.save_every
    harness.save_state(settings.folder, "imitation", first, [learner])
    steps = harness.resumable("imitation", first, settings.warm_steps, every, stop, [learner], lambda: f"{loss:.3f}")
    try:
        for step in steps:
            loss, tokens = imitate(learner, settings, step, device)
            seen += tokens
    except FloatingPointError as error:
        raise UserError(f"warm start, step {step + 1}: {error}; try a smaller --warm-lr", code=1) from error
    log(f"warm start: {seen} tokens in {time.perf_counter() - began:.0f} s, loss {loss:.3f}")
    harness.save(path, checkpoint(learner.model, **about(settings)))
    return learner.model


def respond(learner, problems, settings, step, device):
    """A Rollout: G responses to each problem by the learner's policy. Each process samples its share, and gets all."""
    model, share = learner.model, settings.prompts // world_size()
    if settings.sampler_dtype == "bfloat16":  # an engine that is not quite the trainer: copied and rounded
        model = copy.deepcopy(model).to(torch.bfloat16)
    with precision(settings, device):
        rollout = generate(
            model,
            [problem.prompt for problem in problems[rank() * share : (rank() + 1) * share]],
            samples_per_prompt=settings.group,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=rng(settings, "sampling", step).getrandbits(64),
            first_row=rank() * share * settings.group,
        )
    if world_size() == 1:
        return rollout
    rows_first = vars(rollout) | {"routes": rollout.routes.movedim(0, 2)}  # (B, T, L, K)
    gathered = {name: harness.gather_rows(x) for name, x in rows_first.items()}
    return Rollout(**gathered | {"routes": gathered["routes"].movedim(2, 0)})


def verify(problems, texts, group):
    """The reward of each response, by the rule of its problem: 1, 0, or None where it cannot be told."""
    return [r for i, problem in enumerate(problems) for r in reward(problem, texts[i * group : (i + 1) * group])]


def random_minibatches(settings, step):
    """Split the B rows at random: yields the rows of one optimizer step after the other."""
    for epoch in range(settings.epochs):
        rows = list(range(settings.prompts * settings.group))
        rng(settings, "minibatches", step, epoch).shuffle(rows)
        size = len(rows) // settings.minibatches
        yield from (rows[i : i + size] for i in range(0, len(rows), size))


def chunks_of(rollout, rows, settings):
    """This process's share of these rows, by length: yields (rows, width), the width being that of the longest."""
    ends = [rollout.spans[row][1] for row in rows]
    for chunk in split_by_length(ends, settings.micro_tokens)[rank() :: world_size()]:
        yield [rows[i] for i in chunk], max(ends[i] for i in chunk)


def trainer_logprobs(learner, rollout, rows, width, settings):
    """The trainer's log-probs of some rows (b, t), and (changed, all) counts of expert choices."""
    tokens, routes = rollout.tokens[rows, :width], rollout.routes[:, rows, :width]  # (b, t), (L, b, t, K)
    options = {"temperature": settings.temperature, "routes": routes if learner.replay else None}
    with precision(settings, tokens.device):
        logprobs, probs, read = score(learner.model, tokens, [rollout.spans[row] for row in rows], **options)
    return logprobs, routing_change(probs.detach(), routes[:, :, :-1].flatten(1, 2).index_select(1, read))


@torch.no_grad()
def recompute(learner, rollout, settings):
    """Old log-probs the conventional way: one more forward pass, before the first update. (B, T)"""
    old_logprobs = torch.zeros_like(rollout.logprobs)
    for rows, width in chunks_of(rollout, range(len(old_logprobs)), settings):
        old_logprobs[rows, :width] = trainer_logprobs(learner, rollout, rows, width, settings)[0]
    return all_reduce(old_logprobs)


def update(learner, rollout, old_logprobs, advantages, rows, num_sequences, settings, step):
    """One optimizer step on those rows of a minibatch that have an advantage, chunk by chunk. Returns its metrics.

    num_sequences: how many rows the whole minibatch has; the loss is divided by it.
    """
    new_logprobs, loss = torch.zeros_like(old_logprobs), torch.zeros((), device=old_logprobs.device)
    changed = torch.zeros(2, device=old_logprobs.device)
    for chunk, width in chunks_of(rollout, rows, settings):
        logprobs, changed_here = trainer_logprobs(learner, rollout, chunk, width, settings)
        old, mask = old_logprobs[chunk, :width], rollout.mask[chunk, :width]
        chunk_loss, _ = learner.loss(logprobs, old, advantages[chunk], mask, num_sequences=num_sequences)
        chunk_loss.backward()
        loss += chunk_loss.detach()
        new_logprobs[chunk, :width] = logprobs.detach()
        changed += changed_here
    grad_norm = learner.step(settings.lr * min(1.0, (step + 1) / 5), all_reduce(loss))
    new, old = all_reduce(new_logprobs)[rows], old_logprobs[rows]
    _, metrics = learner.loss(new, old, advantages[rows], rollout.mask[rows])  # of the minibatch, not of its chunks
    changed, choices = all_reduce(changed)
    return metrics | {"grad_norm": grad_norm, "expert_change": changed / choices}


def measure(rollout, rewards, advantages, updates, settings):
    """What the responses of a step were like, and what its updates did (nan where there was none): a dict of floats."""
    mask, tokens = rollout.mask, rollout.tokens
    rewards = torch.tensor([float("nan") if r is None else r for r in rewards])
    routed = mask[:, :-1] & mask[:, 1:]  # a response's last token never goes through the network
    load = torch.stack([expert_load(r[:, :-1][routed], settings.experts) for r in rollout.routes])  # (L, E)
    reduce, of_updates = {"ratio_min": torch.min, "ratio_max": torch.max}, {}
    for name in UPDATE_METRICS:
        values = torch.tensor([float(metrics[name]) for metrics in updates] or [float("nan")])
        of_updates[name] = float(reduce.get(name, torch.mean)(values))
    return {
        "reward": float(rewards.nanmean()),
        "accuracy": float((rewards == 1).float().mean()),
        "length": float(rollout.lengths.float().mean()),
        "think_frac": float(((tokens == THINK) & mask).any(1).float().mean()),
        "cut_frac": float(1 - ((tokens == EOS) & mask).any(1).float().mean()),
        "entropy": float(rollout.entropy.sum() / mask.sum()),
        **of_updates,
        "load_imbalance": float(load.amax(1).mean()) * settings.experts,
        "zero_std_groups": float((advantages.view(-1, settings.group) == 0).all(1).float().mean()),
    }


def rl_step(learner, problems, settings, step, device):
    """One step of one learner. Adds a record to its history; returns an example of what it said."""
    began = time.perf_counter()
    rollout = respond(learner, problems, settings, step, device)
    texts = rollout.texts()
    rewards = verify(problems, texts, settings.group)
    advantages = group_advantages(rewards, settings.group)
    # In a group all right or all wrong, advantages and gradients are 0: its responses are left out of the updates. The
    # loss is still divided by the count of all.
    informative = (advantages != 0).tolist()
    advantages, updates = advantages.to(device), []
    old_logprobs = rollout.logprobs if settings.old_logprobs == "sampler" else recompute(learner, rollout, settings)
    try:
        check_finite(logprobs=old_logprobs)
        for minibatch in random_minibatches(settings, step):
            if rows := [row for row in minibatch if informative[row]]:
                updates.append(update(learner, rollout, old_logprobs, advantages, rows, len(minibatch), settings, step))
        check_finite(weights=parameters_to_vector(learner.model.parameters()))
    except FloatingPointError as error:  # save what led to it, beside the last good state
        path = settings.folder / f"not-finite-{learner.name}.pt"
        batch = {"tokens": rollout.tokens, "mask": rollout.mask, "old_logprobs": old_logprobs, "advantages": advantages}
        harness.save(path, {"step": step + 1, "quantity": str(error), "weights": learner.model.state_dict(), **batch})
        where = f"step {step + 1}, {learner.name}: {error}"
        raise UserError(f"{where}; try a smaller --lr in another --out. What led to it is in {path}", code=1) from error
    seconds = time.perf_counter() - began
    record = measure(rollout, rewards, advantages, updates, settings)
    speed = {"tokens_per_s": float(rollout.lengths.sum()) / seconds, "seconds": seconds}
    learner.history.append({"step": step + 1} | record | speed)
    return example(problems, texts, rewards, advantages, settings.group)


def example(problems, texts, rewards, advantages, group):
    """The first problem that got both a right and a wrong response, with one of each and their advantages."""
    for i, problem in enumerate(problems):
        of_group = rewards[i * group : (i + 1) * group]
        if 1 in of_group and 0 in of_group:
            shown = f"{problem.prompt} ({of_group.count(1)} of {group} right)"
            for word, value in (("right", 1), ("wrong", 0)):
                row = i * group + of_group.index(value)
                shown += f"\n        {word}, advantage {advantages[row]:+.2f}: {texts[row]}"
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


def race(learners, settings, device, stop, first, before):
    """In lockstep: at each step every learner gets the same problems and the same sampling noise."""
    for step in harness.resumable("RL", first, settings.rl_steps, settings.save_every, stop, learners, before=before):
        one_step = partial(rl_step, problems=problems_of(settings, step), settings=settings, step=step, device=device)
        examples = harness.side_by_side(one_step, learners, device)
        harness.log_step(step, {learner.name: learner.history[-1] for learner in learners}, LOG_COLUMNS)
        for learner, text in zip(learners, examples):
            harness.write_csv(settings.folder / f"{learner.name}.csv", learner.history)
            if (step + 1) % 10 == 0:
                log(f"      {learner.name}: {text}")
                if all(record["zero_std_groups"] == 1 for record in learner.history[-10:]):
                    log("      for 10 steps no group held both right and wrong responses: nothing is left to learn")


def held_out_problems(settings):
    """The same held-out problems whatever the seed, so that seeds can be compared; fewest numbers first."""
    problems = []
    for terms in settings.terms:
        draw, found = random.Random(f"evaluation/{terms}"), {}
        for _ in range(20 * settings.eval_problems):  # of sums of two numbers, only some 25 are held out
            problem = make_problem(settings.task, terms, draw, largest=settings.largest, held_out=True)
            found.setdefault(problem.prompt, problem)
        problems += list(found.values())[: settings.eval_problems]
    return problems


def evaluate(model, settings, device):
    """For each number of terms, accuracy sampled (once, at temperature 1) and greedy: a list of dicts."""
    problems, rewards, longest = held_out_problems(settings), {"sampled": [], "greedy": []}, settings.max_new_tokens
    for mode, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        for first in range(0, len(problems), 256):  # as many at once as memory likes
            batch = problems[first : first + 256]
            prompts, options = [problem.prompt for problem in batch], {"temperature": temperature, "first_row": first}
            with precision(settings, device):
                texts = generate(model, prompts, max_new_tokens=longest, **options).texts()
            rewards[mode] += verify(batch, texts, 1)
    results = []
    for terms in settings.terms:
        rows = [row for row, problem in enumerate(problems) if len(problem.numbers) == terms]
        means = {mode: sum(rewards[mode][row] for row in rows) / len(rows) for mode in rewards}
        results.append({"terms": terms, **means, "problems": len(rows)})
    return results


def accuracy(results, name):
    """Over the problems of three and more numbers: sums of two are nearly solved before RL."""
    results = [r for r in results if r["terms"] >= 3] or results
    return sum(r[name] * r["problems"] for r in results) / sum(r["problems"] for r in results)


def summary(learners, before, after):
    """The table at the end."""
    terms = [r["terms"] for r in before]
    numbers = f"{min(3, terms[-1])} to {terms[-1]} numbers" if terms[-1] > 3 else f"{terms[-1]} numbers"
    log(f"\nheld-out accuracy    {numbers:<20}sampled, by how many numbers")
    log(f"{'':20}sampled  greedy    " + "".join(f"{t:7d}" for t in terms))
    for label, results in {"before": before, **after}.items():
        cells = "".join(f"{r['sampled']:7.3f}" for r in results)
        log(f"  {label:<18}{accuracy(results, 'sampled'):7.3f} {accuracy(results, 'greedy'):7.3f}    {cells}")
    log("\nreward from the first step to the last")
    for learner in learners:
        rewards = [record["reward"] for record in learner.history]
        n, mean = len(rewards[-10:]), sum(rewards[-10:]) / len(rewards[-10:])
        log(f"  {learner.name:<12}{harness.sparkline(rewards)}  mean of the last {n}: {mean:.3f}")


def describe(settings, device):
    """Print the settings, with a note on those under which the race says less."""
    s, named = settings, ("preset", "task", "learners", "seed", "out")
    preset = vars(parse_settings(["--preset", s.preset, "--task", s.task])[0])
    changed = as_flags({k: v for k, v in vars(s).items() if k not in named and v != preset[k]})
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
    began, folder, racing = time.perf_counter(), settings.folder, state is not None and state["phase"] == "RL"
    describe(settings, device)
    start = warm_start(settings, device, stop, None if racing else state)
    learners = [Learner(name, copy.deepcopy(start), settings) for name in settings.learners]
    if racing:
        first, before = harness.restore(learners, state), state["before"]
    else:
        first, before = 0, evaluate(start, settings, device)
        harness.save_state(folder, "RL", 0, learners, before=before)
    log(f"before RL: accuracy {accuracy(before, 'sampled'):.3f} sampled, {accuracy(before, 'greedy'):.3f} greedy")

    race(learners, settings, device, stop, first, before)

    evaluations = harness.side_by_side(lambda learner: evaluate(learner.model, settings, device), learners, device)
    after, table = dict(zip(settings.learners, evaluations)), []
    for learner in learners:
        for stage, results in (("before", before), ("after", after[learner.name])):
            table += [{"learner": learner.name, "stage": stage} | result for result in results]
        harness.save(folder / f"{learner.name}.pt", checkpoint(learner.model, learner=learner.name, **about(settings)))
    harness.write_csv(folder / "eval.csv", table)
    harness.save_state(folder, "done", settings.rl_steps, learners, before=before)
    summary(learners, before, after)
    log(f"\n{time.perf_counter() - began:.0f} s. In {folder}: eval.csv, and of each learner a .csv and a .pt")
    question = ("--checkpoint", folder / f"{learners[0].name}.pt", EXAMPLES[settings.task])
    log(f"next: {harness.command('sample.py', *question)}")


def main(argv):
    settings, resuming = parse_settings(argv)
    device = harness.pick_device(settings.device)
    if settings.prompts % world_size():
        raise UserError(f"--prompts {settings.prompts} do not divide among {world_size()} processes")
    if device.type == "mps" and "bfloat16" in (settings.dtype, settings.sampler_dtype):
        # reported for some versions of torch (pytorch issue 195910): sampler and trainer would disagree unnoticed
        raise UserError("bfloat16 attention on an Apple GPU may see future tokens: use float32, or --device cpu")
    device = harness.start_processes(device)
    with (
        harness.run_folder(settings.folder, vars(settings), resuming) as state,
        harness.stoppable(settings.folder, device) as stop,
    ):
        if state is not None and state["phase"] == "done":
            log(f"{settings.folder} holds a finished run: nothing to resume")
        else:
            run(settings, device, state, stop)


if __name__ == "__main__":
    harness.run_program(main)
