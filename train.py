# SPDX-License-Identifier: MIT
"""Race GSPO against GRPO: from the same warm start, on the same problems, with the same sampling noise.

    python train.py                                        both curves on a laptop's CPU in a few minutes
    python train.py --learners gspo grpo grpo+replay       add GRPO with routing replay
    python train.py --task countdown                       reach a target with given numbers
    python train.py --preset laptop-gpu                    a larger model and longer sums, for a consumer GPU
    python train.py --resume out/tiny-chain-sum-seed0      go on after an interruption, bit for bit
    torchrun --nproc_per_node=2 train.py                   the same run on two processes

One step of one learner, in the order of the code below:
  1. sample G responses to each of P problems, with the learner's own policy;
  2. verify them: reward 1 for a right answer, 0 for a wrong one;
  3. compare within each group of G: advantages;
  4. split the P*G responses into minibatches, one optimizer step each. From the second one on the policy is no
     longer the one that sampled, so the importance ratio matters: per sequence in GSPO, per token in GRPO.

Every random draw is a function of (seed, purpose, step, row) and of nothing else. That is why the learners can share
problems and noise, why a resumed run needs no random state, and why two processes do what one does.
"""

import argparse
import copy
import dataclasses
import hashlib
import io
import json
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from grpo import group_advantages, grpo_loss
from gspo import gspo_loss
from model import ModelConfig, Transformer, check_weights, checkpoint, load_model, score
from moe import expert_load, load_balance_loss
from rewards import EXAMPLES, TASKS, make_problem, reward, worked_solution
from sample import EOS, PAD, SPECIAL_TOKENS, THINK, encode_prompt, encode_response, generate, pick_device, tokenizer

LOSSES = {"gspo": gspo_loss, "grpo": grpo_loss}
LEARNERS = ("gspo", "grpo", "gspo+replay", "grpo+replay")
STATE_FORMAT = 1
COLLAPSED_AFTER = 10  # steps in a row without one group of mixed rewards
EXAMPLE_EVERY = 10  # steps
EVAL_ROWS = 256  # problems that are answered at once in evaluation

# ---------------------------------------------------------------------------------------------------------------------
# Settings


def setting(default, text, **extra):
    return field(default=default, metadata={"help": text, **extra})


def flag(name):
    return "--" + name.replace("_", "-")


@dataclass
class Settings:
    """Every flag, its default and its meaning: `--help` is made of this."""

    preset: str = setting("tiny", "sizes to start from; flags given beside it win", choices=("tiny", "laptop-gpu"))
    task: str = setting("chain-sum", "which problems to solve", choices=tuple(TASKS))
    learners: tuple = setting(("gspo", "grpo"), "who races, in lockstep from one warm start", choices=LEARNERS)
    seed: int = setting(0, "decides everything that is random")
    out: str = setting("", "folder for the results (default: out/PRESET-TASK-seedN)")
    device: str = setting("auto", "auto takes cuda, then mps, then cpu", choices=("auto", "cpu", "cuda", "mps"))
    dtype: str = setting("float32", "of the matrix products (weights stay float32)", choices=("float32", "bfloat16"))

    max_terms: int = setting(6, "most numbers in a chain sum (a countdown has 3 or 4)")
    largest: int = setting(9, "largest number in a problem")
    eval_problems: int = setting(200, "held-out problems per number of terms")

    width: int = setting(96, "model width C")
    layers: int = setting(2, "transformer blocks L")
    heads: int = setting(4, "query heads H")
    kv_heads: int = setting(2, "key/value heads")
    experts: int = setting(8, "experts per block E")
    experts_per_token: int = setting(2, "experts that each token goes through, K")
    expert_width: int = setting(96, "hidden width of one expert")

    warm_steps: int = setting(1200, "steps of imitation before RL")
    warm_batch: int = setting(64, "worked solutions per step of imitation")
    warm_lr: float = setting(3e-3, "peak learning rate of imitation")
    warm_think: float = setting(0.4, "share of worked solutions that reason before they answer")
    warm_chunk: int = setting(700, "tokens that go through the model at once in imitation")
    aux_coef: float = setting(0.01, "weight of the load-balance loss in imitation (RL has none)")

    rl_steps: int = setting(36, "RL steps of each learner")
    prompts: int = setting(32, "problems per RL step, P")
    group: int = setting(16, "responses per problem, G")
    minibatches: int = setting(4, "optimizer steps per pass over a step's responses")
    epochs: int = setting(1, "passes over a step's responses")
    lr: float = setting(2e-4, "learning rate of RL, after a linear warm-up of 5 steps")
    temperature: float = setting(1.0, "of sampling, and of the log-probs that are trained")
    max_new_tokens: int = setting(64, "longest response; longer ones are cut and score what they score")
    gspo_clip: tuple = setting((3e-3, 4e-3), "GSPO's window [1 - LOW, 1 + HIGH]", metavar=("LOW", "HIGH"))
    grpo_clip: tuple = setting((0.2, 0.27), "GRPO's window [1 - LOW, 1 + HIGH]", metavar=("LOW", "HIGH"))
    old_logprobs: str = setting(
        "sampler",
        "old log-probs: the sampler's own, or a forward pass of the trainer",
        choices=("sampler", "recompute"),
    )
    sampler_dtype: str = setting(
        "float32", "bfloat16 makes the sampler an imprecise engine on purpose", choices=("float32", "bfloat16")
    )
    save_every: int = setting(10, "RL steps between saved states (warm start: 20 times as many)")
    micro_tokens: int = setting(2048, "tokens that go through the model at once in RL training")

    def __post_init__(self):
        counts = "eval_problems warm_steps warm_batch rl_steps prompts minibatches epochs max_new_tokens save_every"
        for name in [*counts.split(), "micro_tokens", "warm_chunk"]:
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}: it must be at least 1")
        if self.seed < 0:
            raise ValueError(f"--seed is {self.seed}: it must be 0 or more")
        for name in ("lr", "warm_lr", "temperature"):
            if not 0 < getattr(self, name) < float("inf"):
                hint = " (RL needs samples that differ)" if name == "temperature" else ""
                raise ValueError(f"{flag(name)} is {getattr(self, name)}: it must be above 0{hint}")
        if not 0 <= self.warm_think <= 1:
            raise ValueError(f"--warm-think is {self.warm_think}: it is a share, from 0 to 1")
        if not 0 <= self.aux_coef < float("inf"):
            raise ValueError(f"--aux-coef is {self.aux_coef}: it must be 0 or more")
        for name in ("gspo_clip", "grpo_clip"):
            low, high = getattr(self, name)
            if not (0 < low < float("inf") and 0 < high < float("inf")):
                raise ValueError(f"{flag(name)} is {low} {high}: both must be above 0")
        if self.group < 2:
            raise ValueError(f"--group is {self.group}: a group needs at least 2 responses to compare")
        if self.prompts * self.group % self.minibatches:
            raise ValueError(
                f"--prompts {self.prompts} x --group {self.group} responses do not divide into "
                f"--minibatches {self.minibatches}"
            )
        if len(set(self.learners)) < len(self.learners):
            raise ValueError("--learners names one twice")
        if self.task == "chain-sum" and self.max_terms not in TASKS["chain-sum"]:
            raise ValueError(f"--max-terms is {self.max_terms}: a chain sum has 2 to {TASKS['chain-sum'].stop - 1}")
        if not 2 <= self.largest <= 99:
            raise ValueError(f"--largest is {self.largest}: it must be 2 to 99")
        longest = 1 + self.max_new_tokens + 3 * max(self.terms.stop, 6)
        if longest > ModelConfig.context:
            raise ValueError(
                f"--max-new-tokens {self.max_new_tokens} does not fit the context of {ModelConfig.context}"
            )
        self.model_config  # noqa: B018 - raises for sizes that do not fit together

    @property
    def model_config(self):
        names = ("width", "layers", "heads", "kv_heads", "experts", "experts_per_token", "expert_width")
        return ModelConfig(vocab_size=tokenizer.n_vocab, **{name: getattr(self, name) for name in names})

    @property
    def terms(self):
        return range(2, self.max_terms + 1) if self.task == "chain-sum" else TASKS[self.task]

    @property
    def folder(self):
        return Path(self.out or f"out/{self.preset}-{self.task}-seed{self.seed}")


PRESETS = {
    "tiny": {},
    # 45M parameters, 8M of them active per token. Weights, gradients and Adam's two moments take 16 bytes a parameter
    # and learner, 1.5 GB for two; activations (micro_tokens) and the sampler's cache stay below 4 GB in bfloat16.
    "laptop-gpu": {
        "width": 384, "layers": 6, "heads": 8, "kv_heads": 4,
        "experts": 32, "experts_per_token": 4, "expert_width": 192,
        "max_terms": 10, "largest": 99, "max_new_tokens": 160, "dtype": "bfloat16",
        "warm_steps": 6000, "warm_batch": 256, "warm_lr": 1e-3,
        "rl_steps": 200, "prompts": 64, "lr": 2e-5, "micro_tokens": 16384, "warm_chunk": 16384,
    },
}  # fmt: skip


def parse_settings(argv):
    """(settings, resuming): of the command line, or of the run that --resume names. Exits if wrong."""
    parser = argparse.ArgumentParser(
        description="Race GSPO against GRPO on a tiny Mixture-of-Experts model, from one warm start.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = lambda message: fail(f"{message} (see --help)", code=2)
    parser.add_argument("--resume", metavar="DIR", help="continue the run in DIR, with the settings it has")
    for f in dataclasses.fields(Settings):
        kind = type(f.default[0] if isinstance(f.default, tuple) else f.default)
        count = {"nargs": 2 if kind is float else "+"} if isinstance(f.default, tuple) else {}
        options = {key: value for key, value in f.metadata.items() if key != "help"}
        parser.add_argument(flag(f.name), default=f.default, type=kind, help=f.metadata["help"], **count, **options)
    args = parser.parse_args(argv)
    if args.resume is not None:
        return resumed_settings(args, parser), True
    preset = dict(PRESETS[args.preset])
    if preset.get("dtype") == "bfloat16" and not (torch.cuda.is_available() and torch.cuda.is_bf16_supported()):
        del preset["dtype"]  # a preset asks for it only where the device has it
    parser.set_defaults(**preset)
    values = vars(parser.parse_args(argv))
    del values["resume"]
    try:
        return Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}), False
    except ValueError as error:
        fail(str(error), code=2)


def resumed_settings(args, parser):
    for name, value in vars(args).items():
        if name != "resume" and value != parser.get_default(name):
            fail(f"--resume takes its settings from the run it continues: leave out {flag(name)}", code=2)
    path = Path(args.resume) / "settings.json"
    try:
        return dataclasses.replace(read_settings(path), out=args.resume)
    except OSError as error:
        fail(f"cannot resume {args.resume}: {error.strerror}: {error.filename}", code=2)
    except ValueError as error:
        fail(f"cannot resume {args.resume}: {error}", code=2)


def read_settings(path):
    """The settings of an earlier run. Raises OSError, or ValueError where the file does not hold settings."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} does not hold the settings of a run of this version ({error})") from error


class End(Exception):
    """Ends the program with one line and an exit code, once progress bars are closed."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code


def fail(message, code=1):
    raise End(f"train.py: {message}", code)


# ---------------------------------------------------------------------------------------------------------------------
# Randomness, processes, device


def draw(settings, *purpose):
    """A generator that depends on the seed and the purpose alone, e.g. draw(settings, "problems", step)."""
    return random.Random("/".join(map(str, (settings.seed, *purpose))))


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def processes():
    return dist.get_world_size() if dist.is_initialized() else 1


def meet():
    """Wait until all processes are here."""
    if dist.is_initialized():
        dist.barrier()


def total(x):
    """Sum a tensor over the processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def gather_rows(x):
    """Concatenate the (B, ...) tensors of all processes; where (B, T), each is first padded with 0 to the longest."""
    if not dist.is_initialized():
        return x
    if x.dim() == 2:
        longest = torch.tensor(x.size(1), device=x.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        x = torch.nn.functional.pad(x, (0, int(longest) - x.size(1)))
    parts = [torch.empty_like(x) for _ in range(processes())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def sum_gradients(model):
    """One all-reduce for all gradients. Each process has already divided by the global count."""
    if not dist.is_initialized():
        return
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    flat = total(torch.cat([p.grad.flatten() for p in parameters]))
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(grad.view_as(p))


def start_processes(settings):
    """Join the other processes where torchrun started us; returns this one's device."""
    device, count = pick_device(settings.device), int(os.environ.get("WORLD_SIZE", "1"))
    if settings.prompts % count:
        raise ValueError(f"--prompts {settings.prompts} do not divide among {count} processes")
    if count == 1:
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def side_by_side(function, items, device):
    """[function(item) for item in items]; on a CPU in threads that share its cores.

    On matrices as small as ours, torch's own threads gain little from a second core: two learners at once, or two parts
    of a batch, gain half as much again. Several processes have divided the cores already.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(items))
    if device.type != "cpu" or workers == 1 or dist.is_initialized():
        return [function(item) for item in items]
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(threads)


def precision(settings, device):
    """Context in which the model runs: plain float32, or bfloat16 products over float32 weights."""
    if settings.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------------------
# Nothing lost: files, signals, numbers that are none


def write_atomically(path, data):
    """Write bytes aside, flush them to the disk, rename: whoever opens `path` finds the old content or the new."""
    aside = path.with_name(path.name + ".part")
    with open(aside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def save(path, content):
    """torch.save, atomically. Through memory, so that a full disk is an OSError like any other."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getbuffer())


def write_rows(path, rows):
    """A CSV, a line per row (dicts with the same keys), atomically."""
    text = ",".join(rows[0]) + "\n" + "".join(csv_line(row) for row in rows)
    write_atomically(path, text.encode("utf-8"))


def csv_line(row):
    return ",".join(f"{v:.7g}" if isinstance(v, float) else str(v) for v in row.values()) + "\n"


class Stop:
    """Ctrl-C and SIGTERM let the step in hand end and the run be saved; a second one leaves at once."""

    def __init__(self):
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number, frame):
        if self.signal:
            os._exit(128 + self.signal)
        self.signal = number

    def agreed(self, device):
        """Whether to stop now: once any process was asked to, all do, at the same step."""
        asked = torch.tensor(self.signal, device=device)
        if dist.is_initialized():
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        self.signal = int(asked) if self.signal == 0 else self.signal
        return self.signal != 0


def stop_run(stop, folder, where):
    meet()  # none leaves, and closes its connections, while another still writes
    raise End(f"stopped {where}; all is saved. Go on with: python train.py --resume {folder}", 128 + stop.signal)


def save_state(folder, phase, step, learners, before=()):
    """All that a resumed run needs, in one file: no crash can leave weights of one step beside rows of another."""
    if rank() == 0:
        content = {
            "format": STATE_FORMAT,
            "phase": phase,
            "step": step,
            "learners": {
                learner.name: {
                    "weights": learner.model.state_dict(),
                    "optimizer": learner.optimizer.state_dict(),
                    "rows": learner.rows,
                }
                for learner in learners
            },
            "before": list(before),
        }
        save(folder / "state.pt", content)


def load_state(folder):
    """The saved state, or None where there is none yet. Raises ValueError where the file is not a state."""
    path = folder / "state.pt"
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        known = isinstance(state, dict) and state.get("format") == STATE_FORMAT
    except Exception as error:  # torch.load raises whatever it stumbles on, by the kind of damage
        raise ValueError(f"{path} is damaged ({type(error).__name__})") from error
    if not known:
        raise ValueError(f"{path} was not written by this version")
    return state


def restore(learner, saved):
    """Bring a learner to a saved state. Raises ValueError where the two do not fit."""
    try:
        check_weights(learner.model, saved["weights"])
        learner.model.load_state_dict(saved["weights"])
        learner.optimizer.load_state_dict(saved["optimizer"])
        learner.rows = list(saved["rows"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the saved state of {learner.name} does not fit: {error}") from error


class NotFinite(Exception):
    """A loss, gradient or weight became nan or inf."""


def check_finite(**quantities):
    """Raise NotFinite, naming the first of these tensors that holds a nan or inf."""
    for name, value in quantities.items():
        if not torch.isfinite(value).all():
            raise NotFinite(name)


# ---------------------------------------------------------------------------------------------------------------------
# Learners


@dataclass
class Learner:
    """A policy, its optimizer and an objective."""

    name: str
    model: Transformer
    optimizer: torch.optim.Optimizer
    loss: object = None
    replay: bool = False
    rows: list = field(default_factory=list)  # of its CSV
    example: str = ""  # to be shown after this step


def make_learner(name, model, settings, lr):
    objective, _, replay = name.partition("+")
    clip = getattr(settings, f"{objective}_clip", None)  # None while imitating
    loss = clip and partial(LOSSES[objective], clip_eps_low=clip[0], clip_eps_high=clip[1])
    # One fused kernel for the whole update where there is one: a third of the time of the plain loop.
    fused = model.embed.weight.device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    return Learner(name, model, optimizer, loss, replay == "replay")


def by_length(lengths, tokens):
    """Split rows, given their lengths, into chunks of similar length and about equal work, of some `tokens` each.

    Padding, which attention alone computes on, is then small. It cannot change a loss: each chunk's is divided by the
    count of the whole minibatch.
    """
    parts = max(1, round(sum(lengths) / tokens))
    chunks, done = [[] for _ in range(parts)], 0
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        chunks[done * parts // sum(lengths)].append(row)
        done += lengths[row]
    return [chunk for chunk in chunks if chunk]


def optimizer_step(learner, lr, loss):
    """Sum the gradients over the processes, clip their norm to 1, step. Returns the norm before clipping."""
    sum_gradients(learner.model)
    grad_norm = torch.nn.utils.clip_grad_norm_(learner.model.parameters(), 1.0)
    check_finite(loss=loss, gradient=grad_norm)
    for group in learner.optimizer.param_groups:
        group["lr"] = lr
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return grad_norm


# ---------------------------------------------------------------------------------------------------------------------
# Warm start: imitation of worked solutions


def warm_key(settings, device):
    """Names a warm start by all that determines it, so that a cached one is never taken for another."""
    names = [f.name for f in dataclasses.fields(Settings) if f.name.startswith("warm_")]
    names += ["task", "seed", "max_terms", "largest", "width", "layers", "heads", "kv_heads", "experts"]
    names += ["experts_per_token", "expert_width", "aux_coef", "dtype"]
    facts = [(name, getattr(settings, name)) for name in names]
    facts += [torch.__version__, device.type, torch.get_num_threads(), processes()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def warm_batch(settings, step):
    """(token lists, prompt lengths): worked solutions, some of which think first and most of which blurt it out."""
    rng = draw(settings, "warm", step)
    rows, prompt_lengths = [], []
    for _ in range(settings.warm_batch):
        problem = make_problem(settings.task, rng.choice(settings.terms), rng, largest=settings.largest)
        prompt = encode_prompt(problem.prompt)
        think = rng.random() < settings.warm_think
        rows.append(prompt + encode_response(worked_solution(problem, think=think)))
        prompt_lengths.append(len(prompt))
    return rows, prompt_lengths


def imitate(learner, settings, step, device):
    """One step of imitation: mean cross-entropy over all response tokens of the batch. Returns (loss, tokens)."""
    rows, prompt_lengths = warm_batch(settings, step)
    lengths = [len(row) for row in rows]
    all_tokens, response_tokens = sum(lengths), sum(lengths) - sum(prompt_lengths)
    parameters = list(learner.model.parameters())

    def gradient(chunk):
        longest = max(lengths[row] for row in chunk)
        tokens = torch.tensor([rows[row] + [PAD] * (longest - lengths[row]) for row in chunk], device=device)
        with precision(settings, device):
            logprobs, probs, _ = score(learner.model, tokens, [(prompt_lengths[row], lengths[row]) for row in chunk])
        nll = -logprobs.sum() / response_tokens
        balance = torch.stack([load_balance_loss(p, p.topk(settings.experts_per_token).indices) for p in probs]).mean()
        share = sum(lengths[row] for row in chunk) / all_tokens
        return nll.detach(), torch.autograd.grad(nll + settings.aux_coef * share * balance, parameters)

    # The chunks depend on the batch alone; each process takes its share of them.
    chunks = by_length(lengths, settings.warm_chunk)[rank() :: processes()]
    loss = torch.zeros((), device=device)
    for part, gradients in side_by_side(gradient, chunks, device):
        loss += part
        for p, g in zip(parameters, gradients):
            p.grad = g if p.grad is None else p.grad + g
    lr = settings.warm_lr * min(1.0, (step + 1) / 100) * (1 - 0.9 * step / settings.warm_steps)
    total(loss)
    optimizer_step(learner, lr, loss)
    return loss, all_tokens


def warm_start(settings, device, folder, stop, state):
    """The model that all learners start from: cached, resumed or trained from nothing."""
    path = folder / f"warm-{warm_key(settings, device)}.pt"
    if path.exists():
        say(f"warm start: taken from {path}")
        return load_model(path, device=device)[0].train()
    torch.manual_seed(settings.seed)
    learner = make_learner("warm", Transformer(settings.model_config).to(device), settings, settings.warm_lr)
    first = 0
    if state is not None and state["phase"] == "warm":
        restore(learner, state["learners"]["warm"])
        first = state["step"]
    say(f"warm start: imitating {settings.warm_steps * settings.warm_batch} worked solutions")
    save_state(folder, "warm", first, [learner])
    began, seen = time.perf_counter(), 0
    for step in (bar := progress("warm start", first, settings.warm_steps)):
        try:
            loss, tokens = imitate(learner, settings, step, device)
            stopping = stop.agreed(device)
            saving = stopping or (step + 1) % (20 * settings.save_every) == 0
            if saving or step + 1 == settings.warm_steps:
                check_finite(**dict(learner.model.named_parameters()))
        except NotFinite as error:
            fail(f"warm start, step {step + 1}: {error} is not finite; a smaller --warm-lr is the first thing to try")
        seen += tokens
        if step % 20 == 0:
            bar.set_postfix_str(f"loss {loss:.3f}, {seen / (time.perf_counter() - began):.0f} tokens/s", refresh=False)
        if saving:
            save_state(folder, "warm", step + 1, [learner])
        if stopping:
            stop_run(stop, folder, f"after step {step + 1} of the warm start")
    if rank() == 0:
        save(path, checkpoint(learner.model, task=settings.task, special_tokens=list(SPECIAL_TOKENS)))
    if seen:  # not so when the run was stopped after the last step
        say(f"warm start: {seen} tokens in {time.perf_counter() - began:.0f} s, loss {loss:.3f}")
    return learner.model


# ---------------------------------------------------------------------------------------------------------------------
# Reinforcement learning


def respond(learner, problems, settings, step, device):
    """Sample G responses to each problem of this process, with the learner's own policy. Returns a Rollout."""
    model = learner.model
    if settings.sampler_dtype == "bfloat16":  # an engine that is not quite the trainer: copied and rounded
        model = copy.deepcopy(model).to(torch.bfloat16)
    with precision(settings, device):
        return generate(
            model,
            [problem.prompt for problem in problems],
            samples_per_prompt=settings.group,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=draw(settings, "sampling", step).getrandbits(64),
            first_row=rank() * len(problems) * settings.group,
        )


def verify(problems, texts, group):
    """The reward of each response, by the rule of its problem: 1, 0, or None where it cannot be told."""
    return [r for i, problem in enumerate(problems) for r in reward(problem, texts[i * group : (i + 1) * group])]


def minibatches(settings, step):
    """Split all P*G responses at random: yields the rows of one optimizer step after the other."""
    for epoch in range(settings.epochs):
        rows = list(range(settings.prompts * settings.group))
        draw(settings, "minibatches", step, epoch).shuffle(rows)
        size = len(rows) // settings.minibatches
        for i in range(settings.minibatches):
            yield rows[i * size : (i + 1) * size]


def chunks(rollout, rows, settings):
    """Split rows of a rollout by length: yields (rows, part), part being what to index its (B, T) tensors with."""
    ends = [end for _, end in rollout.spans]
    for chunk in by_length([ends[row] for row in rows], settings.micro_tokens):
        chosen = [rows[i] for i in chunk]
        yield chosen, (torch.tensor(chosen, device=rollout.tokens.device), slice(0, max(ends[row] for row in chosen)))


def rescore(learner, rollout, rows, part, settings):
    """The trainer's log-probs of a part of a rollout (b, t), and (changed, all) counts of expert choices."""
    spans, routes = rollout.spans, rollout.routes[:, part[0], part[1]]  # (L, b, t, K)
    with precision(settings, rollout.tokens.device):
        logprobs, probs, read = score(
            learner.model,
            rollout.tokens[part],
            [spans[row] for row in rows],
            temperature=settings.temperature,
            routes=routes if learner.replay else None,
            groups=[row // settings.group for row in rows],
        )
    return logprobs, routing_change(probs.detach(), routes[:, :, :-1].flatten(1, 2).index_select(1, read))


@torch.no_grad()
def recompute(learner, rollout, settings):
    """Old log-probs the conventional way: one more forward pass, before the first update. (B, T)"""
    old = torch.zeros_like(rollout.logprobs)
    for rows, part in chunks(rollout, range(len(old)), settings):
        old[part] = rescore(learner, rollout, rows, part, settings)[0]
    return old


def update(learner, rollout, old, advantages, rows, settings, step):
    """One optimizer step on one minibatch. rows: their numbers among all processes' rows; each process does its own.

    Returns the log-probs before the step (B, T), the gradient's norm, and (changed, all) counts of expert choices.
    """
    first = rank() * len(old)
    ours = [row - first for row in rows if 0 <= row - first < len(old)]
    new, loss = torch.zeros_like(old), torch.zeros((), device=old.device)
    changed = torch.zeros(2, device=old.device)
    for chunk, part in chunks(rollout, ours, settings):
        logprobs, changed_here = rescore(learner, rollout, chunk, part, settings)
        mask = rollout.mask[part]
        part_loss, _ = learner.loss(logprobs, old[part], advantages[part[0]], mask, num_sequences=len(rows))
        part_loss.backward()
        loss += part_loss.detach()
        new[part] = logprobs.detach()
        changed += changed_here
    lr = settings.lr * min(1.0, (step + 1) / 5)
    return new, optimizer_step(learner, lr, total(loss)), changed


def routing_change(probs, routes):
    """(expert choices the router would make now and the sampler had not made, all choices), over N tokens.

    probs: (L, N, E), the router's now; routes: (L, N, K), the sampler's. Under replay the changes are not acted on.
    """
    now = probs.topk(routes.size(-1)).indices  # (L, N, K)
    changed = (now[..., :, None] != routes[..., None, :]).all(-1)
    return torch.stack([changed.sum(), torch.tensor(changed.numel(), device=changed.device)])


def measure(learner, rollout, rewards, old, advantages, updates, settings, step, seconds):
    """The CSV row of one step: what the responses were like, and what the updates did. Over all processes."""
    rewards = gather_rows(torch.tensor([float("nan") if r is None else r for r in rewards], device=old.device))
    groups = rewards.view(-1, settings.group)
    mask, old, entropy = gather_rows(rollout.mask.float()).bool(), gather_rows(old), gather_rows(rollout.entropy)
    advantages, lengths = gather_rows(advantages), gather_rows(rollout.lengths)
    thinks = gather_rows(((rollout.tokens == THINK) & rollout.mask).any(1).float())
    ended = gather_rows(((rollout.tokens == EOS) & rollout.mask).any(1).float())
    load = torch.stack([expert_load(routes[rollout.mask], settings.experts) for routes in rollout.routes])
    load = total(load * rollout.mask.sum()) / mask.sum()  # (L, E)
    changed = total(sum(changed for _, _, changed in updates))

    shown = []  # the losses' own metrics, of each whole minibatch, whatever chunks and processes it was spread over
    for rows, (new, _, _) in zip(minibatches(settings, step), updates):
        rows, new = torch.tensor(rows, device=old.device), gather_rows(new)
        shown.append(learner.loss(new[rows], old[rows], advantages[rows], mask[rows])[1])
    metrics = {name: torch.stack([m[name] for m in shown]) for name in shown[0]}
    return {
        "step": step + 1,
        "reward": float(rewards.nanmean()),
        "accuracy": float((rewards == 1).float().mean()),
        "length": float(lengths.float().mean()),
        "think_frac": float(thinks.mean()),
        "cut_frac": float(1 - ended.mean()),
        "entropy": float(entropy.sum() / mask.sum()),
        **{name: float(metrics[name].mean()) for name in ("clip_frac", "clip_frac_low", "clip_frac_high")},
        "ratio_mean": float(metrics["ratio_mean"].mean()),
        "ratio_min": float(metrics["ratio_min"].min()),
        "ratio_max": float(metrics["ratio_max"].max()),
        **{name: float(metrics[name].mean()) for name in ("log_ratio_std", "seq_log_ratio_std", "approx_kl")},
        "grad_norm": float(sum(norm for _, norm, _ in updates)) / len(updates),
        "expert_change": float(changed[0] / changed[1]),
        "load_imbalance": float(load.amax(1).mean()) * settings.experts,
        "zero_std_groups": float((groups.amax(1) == groups.amin(1)).float().mean()),
        "tokens_per_s": float(lengths.sum()) / seconds,
        "seconds": seconds,
    }


def learn(learner, problems, settings, step, device, folder):
    """One step of one learner: sample, verify, compare, update. Adds a row to its CSV."""
    began = time.perf_counter()
    rollout = respond(learner, problems, settings, step, device)
    texts = rollout.texts()
    rewards = verify(problems, texts, settings.group)
    advantages = group_advantages(rewards, settings.group).to(device)
    old = rollout.logprobs if settings.old_logprobs == "sampler" else recompute(learner, rollout, settings)
    try:
        check_finite(logprobs=total(old.sum()))  # all processes give up, or none
        updates = [
            update(learner, rollout, old, advantages, rows, settings, step) for rows in minibatches(settings, step)
        ]
        check_finite(**dict(learner.model.named_parameters()))
    except NotFinite as error:
        give_up(learner, step, error, folder, rollout, old, advantages)
    seconds = time.perf_counter() - began
    learner.rows.append(measure(learner, rollout, rewards, old, advantages, updates, settings, step, seconds))
    if (step + 1) % EXAMPLE_EVERY == 0:
        learner.example = example(learner, problems, texts, rewards, advantages, settings.group)


def reinforce(learners, settings, device, folder, stop, first, before):
    """The race, in lockstep: at each step every learner meets the same problems and the same sampling noise."""
    for step in progress("RL", first, settings.rl_steps):
        problems = training_problems(settings, step)
        one_step = partial(learn, problems=problems, settings=settings, step=step, device=device, folder=folder)
        side_by_side(one_step, learners, device)
        report(learners, step, folder)
        stopping = stop.agreed(device)
        if stopping or (step + 1) % settings.save_every == 0 or step + 1 == settings.rl_steps:
            save_state(folder, "rl", step + 1, learners, before)
        if stopping:
            stop_run(stop, folder, f"after RL step {step + 1}")


def training_problems(settings, step):
    """This process's share of the problems of a step."""
    rng = draw(settings, "problems", step)
    problems = [
        make_problem(settings.task, rng.choice(settings.terms), rng, largest=settings.largest)
        for _ in range(settings.prompts)
    ]
    share = settings.prompts // processes()
    return problems[rank() * share : (rank() + 1) * share]


def give_up(learner, step, error, folder, rollout, old, advantages):
    """Keep what led to a nan or inf beside, not over, the last good state, and end the run."""
    path = folder / f"not-finite-{learner.name}.pt"
    if rank() == 0:
        content = {"step": step + 1, "quantity": str(error), "weights": learner.model.state_dict()}
        tensors = {"tokens": rollout.tokens, "mask": rollout.mask, "old_logprobs": old, "advantages": advantages}
        save(path, content | tensors)
    meet()
    fail(
        f"step {step + 1}, {learner.name}: {error} is not finite. What led to it is in {path}, "
        f"the last good state in {folder / 'state.pt'}; a smaller --lr in another --out is the first thing to try"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def held_out_problems(settings):
    """The same held-out problems whatever the seed, so that seeds can be compared; fewest numbers first."""
    problems = {}
    for terms in settings.terms:
        rng, found = random.Random(f"evaluation/{terms}"), set()
        for _ in range(20 * settings.eval_problems):  # of sums of two digits, only some 25 are held out
            problem = make_problem(settings.task, terms, rng, largest=settings.largest, held_out=True)
            if problem.prompt not in found and len(found) < settings.eval_problems:
                found.add(problem.prompt)
                problems[problem.prompt] = problem
    return list(problems.values())


def evaluate(model, settings, device, stop):
    """Rows for eval.csv: for each number of terms, accuracy sampled (once, at temperature 1) and greedy."""
    problems = held_out_problems(settings)
    right = torch.zeros(settings.terms.stop, 2, device=device)  # by number of terms, and by way of decoding
    for way, temperature in enumerate((1.0, 0.0)):
        for first in range(rank() * EVAL_ROWS, len(problems), processes() * EVAL_ROWS):
            some = problems[first : first + EVAL_ROWS]
            with precision(settings, device):
                rollout = generate(
                    model,
                    [problem.prompt for problem in some],
                    max_new_tokens=settings.max_new_tokens,
                    temperature=temperature,
                    first_row=first,
                )
            for problem, point in zip(some, verify(some, rollout.texts(), 1)):
                right[len(problem.numbers), way] += point
    total(right)
    if stop.agreed(device):
        stop_run(stop, settings.folder, "during an evaluation")
    rows = []
    for terms in settings.terms:
        count = sum(len(problem.numbers) == terms for problem in problems)
        sampled, greedy = (right[terms] / count).tolist()
        rows.append({"terms": terms, "sampled": sampled, "greedy": greedy, "problems": count})
    return rows


def average(rows, name):
    """Accuracy over the problems of three and more numbers: sums of two are learnt by heart."""
    rows = [row for row in rows if row["terms"] >= 3] or rows
    return sum(row[name] * row["problems"] for row in rows) / sum(row["problems"] for row in rows)


# ---------------------------------------------------------------------------------------------------------------------
# What a person sees


def say(text=""):
    if rank() == 0:
        tqdm.write(text)


def progress(name, first, last):
    """The steps from `first` to `last`, with a bar."""
    slow = 0.3 if sys.stderr.isatty() else 15  # seconds; a log file gets a line now and then, not a flicker
    return tqdm(range(first, last), name, initial=first, total=last, mininterval=slow, disable=rank() != 0)


def report(learners, step, folder):
    """A line for all learners, a CSV row for each; an example now and then; a word when nothing is left to learn."""
    if rank() != 0:
        return
    if step % 20 == 0:
        say(" " * 5 + "".join(f"| {learner.name:<50}" for learner in learners))
        say(" step" + "| reward   len  think%   clip%  entropy  expert%     s " * len(learners))
    line = f"{step + 1:5d}"
    for learner in learners:
        row = learner.rows[-1]
        line += f"| {row['reward']:6.3f} {row['length']:5.1f} {100 * row['think_frac']:7.1f} "
        line += f"{100 * row['clip_frac']:7.2f} {row['entropy']:8.3f} {100 * row['expert_change']:8.2f} "
        line += f"{row['seconds']:5.2f} "
    say(line)
    for learner in learners:
        path = folder / f"{learner.name}.csv"
        if len(learner.rows) == 1:
            write_rows(path, learner.rows)
        else:
            with open(path, "a", encoding="utf-8", newline="") as file:
                file.write(csv_line(learner.rows[-1]))
        if learner.example:
            say(learner.example)
            learner.example = ""
        if collapsed_at(learner) == step + 1:
            say(
                f"      {learner.name}: for {COLLAPSED_AFTER} steps no group held both right and wrong responses; "
                f"with reward {learner.rows[-1]['reward']:.2f} everywhere, nothing is left to learn from"
            )


def collapsed_at(learner):
    """The step that ended the first long row of steps without any group of mixed rewards; 0 if there was none."""
    run = 0
    for row in learner.rows:
        run = run + 1 if row["zero_std_groups"] == 1 else 0
        if run == COLLAPSED_AFTER:
            return row["step"]
    return 0


def example(learner, problems, texts, rewards, advantages, group):
    """The first problem that got both a right and a wrong response, with one of each and their advantages."""
    for i, problem in enumerate(problems):
        rows = range(i * group, (i + 1) * group)
        right, wrong = ([row for row in rows if rewards[row] == value] for value in (1, 0))
        if right and wrong:
            lines = [f"      {learner.name}: {problem.prompt} ({len(right)} of {group} right)"]
            for word, row in (("right", right[0]), ("wrong", wrong[0])):
                lines.append(f"        {word}, advantage {advantages[row]:+.2f}: {texts[row]}")
            return "\n".join(lines)
    return f"      {learner.name}: no problem got both right and wrong responses at this step"


def sparkline(values, width=50):
    """The curve as text: means of at most `width` bins; the lowest bar is 0, the highest 1."""
    bins = min(width, len(values))
    parts = [values[i * len(values) // bins : (i + 1) * len(values) // bins] for i in range(bins)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * sum(part) / len(part)))] for part in parts)


def summary(learners, before, after):
    """The table at the end."""
    terms = [row["terms"] for row in before]
    numbers = f"{min(3, terms[-1])} to {terms[-1]} numbers" if terms[-1] > 3 else f"{terms[-1]} numbers"
    say(f"\nheld-out accuracy    {numbers:<20}sampled, by how many numbers")
    say(f"{'':20}sampled  greedy    " + "".join(f"{t:7d}" for t in terms))
    for label, rows in [("before", before), *((learner.name, after[learner.name]) for learner in learners)]:
        cells = "".join(f"{row['sampled']:7.3f}" for row in rows)
        say(f"  {label:<18}{average(rows, 'sampled'):7.3f} {average(rows, 'greedy'):7.3f}    {cells}")
    say("\nreward from the first step to the last")
    for learner in learners:
        rewards = [row["reward"] for row in learner.rows]
        late = rewards[-10:]
        note = f"   nothing left to learn from since step {at}" if (at := collapsed_at(learner)) else ""
        say(
            f"  {learner.name:<12}{sparkline(rewards)}  mean of the last {len(late)}: {sum(late) / len(late):.3f}{note}"
        )


def describe(settings, device):
    """The resolved configuration, and a word on settings under which the race shows less than it seems to."""
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        value = settings.folder if f.name == "out" else value
        say(f"  {f.name:<18}{' '.join(map(str, value)) if isinstance(value, tuple) else value}")
    with torch.device("meta"):
        every, active = Transformer(settings.model_config).num_parameters()
    say(f"  {'parameters':<18}{every:,}, of which a token uses {active:,}")
    threads = torch.get_num_threads()
    say(f"  {'running on':<18}{device}, {settings.dtype}, {processes()} x {threads} threads, torch {torch.__version__}")
    if settings.minibatches == settings.epochs == 1:
        say("note: one minibatch and one epoch: every ratio is 1, so GSPO and GRPO have the same gradient")
    if settings.temperature != 1:
        say(f"note: temperature {settings.temperature}: trained at this temperature, evaluated at 1 and greedily")
    if settings.group < 4:
        say(f"note: the standard deviation of {settings.group} rewards says little: advantages are nearly signs")


# ---------------------------------------------------------------------------------------------------------------------


def open_folder(settings, resuming):
    """Make the output folder, or find a run with these settings in it. Returns the saved state, or None."""
    folder, path = settings.folder, settings.folder / "settings.json"
    if path.exists():
        earlier, now = (dataclasses.asdict(s) for s in (read_settings(path), settings))
        differ = [name for name in now if name != "out" and now[name] != earlier[name]]
        if differ:
            changes = ", ".join(f"{flag(name)} was {earlier[name]}, is {now[name]}" for name in differ)
            raise ValueError(f"{folder} holds a run with other settings ({changes}): choose another --out or delete it")
    state = load_state(folder)
    meet()  # all have looked before the first one writes
    if state is not None and not resuming:
        if state["phase"] != "done":
            raise ValueError(
                f"{folder} holds an unfinished run: go on with --resume {folder}, choose another --out or delete it"
            )
        state = None  # finished: run it again, from the cached warm start
    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(dataclasses.asdict(settings), indent=1) + "\n").encode("utf-8"))
    return state


def run(settings, resuming):
    began = time.perf_counter()
    device = start_processes(settings)
    state = open_folder(settings, resuming)
    folder, stop = settings.folder, Stop()
    if state is not None and state["phase"] == "done":
        say(f"{folder} holds a finished run: nothing to resume")
        return meet()
    describe(settings, device)

    start = warm_start(settings, device, folder, stop, state)
    learners = [make_learner(name, copy.deepcopy(start), settings, settings.lr) for name in settings.learners]
    if state is not None and state["phase"] == "rl":
        first, before = state["step"], state["before"]
        for learner in learners:
            restore(learner, state["learners"][learner.name])
            if first and rank() == 0:  # rows after the saved step, if there are any, are cut: they will come again
                write_rows(folder / f"{learner.name}.csv", learner.rows)
    else:
        first, before = 0, evaluate(start, settings, device, stop)
        save_state(folder, "rl", 0, learners, before)
    say(f"before RL: accuracy {average(before, 'sampled'):.3f} sampled, {average(before, 'greedy'):.3f} greedy")

    reinforce(learners, settings, device, folder, stop, first, before)

    evaluations = side_by_side(lambda learner: evaluate(learner.model, settings, device, stop), learners, device)
    after = {learner.name: evaluation for learner, evaluation in zip(learners, evaluations)}
    if rank() == 0:
        rows = []
        for learner in learners:
            for stage, results in (("before", before), ("after", after[learner.name])):
                rows += [{"learner": learner.name, "stage": stage} | row for row in results]
            facts = {"task": settings.task, "special_tokens": list(SPECIAL_TOKENS), "learner": learner.name}
            save(folder / f"{learner.name}.pt", checkpoint(learner.model, **facts))
        write_rows(folder / "eval.csv", rows)
    save_state(folder, "done", settings.rl_steps, learners, before)
    summary(learners, before, after)
    files = " ".join(f"{learner.name}.csv {learner.name}.pt" for learner in learners)
    say(f"\n{time.perf_counter() - began:.0f} s. In {folder}: {files} eval.csv")
    say(f'next: python sample.py --checkpoint {folder / learners[0].name}.pt "{EXAMPLES[settings.task]}"')
    meet()


def main():
    for stream in (sys.stdout, sys.stderr):  # a console that lacks a character shows ? instead of failing
        stream.reconfigure(errors="replace")
    try:
        settings, resuming = parse_settings(sys.argv[1:])
        try:
            run(settings, resuming)
        except ValueError as error:
            fail(str(error), code=2)
        except OSError as error:
            where, why = error.filename or settings.folder, error.strerror or error
            fail(f"cannot use {where}: {why}. What was saved before is whole")
    except KeyboardInterrupt:  # before there was anything to save
        sys.exit(130)
    except End as end:
        if rank() == 0 or end.code < 128:  # each failing process says so; a stop is told once
            print(end, file=sys.stderr, flush=True)
        sys.exit(end.code)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
