# SPDX-License-Identifier: MIT
"""What several test files share: one hand-computed batch, random batches, closed-form gradients, a tiny run."""

import contextlib
import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import harness
import train
from model import Transformer, load_model

ROOT = Path(train.__file__).parent

X = 0.0  # padding
HAND = {
    "logprobs": [[-1, -0.5, -2], [-0.7, -1.3, X], [-0.2, X, X], [-1.5, -0.1, -0.9]],
    "old_logprobs": [[-1.2, -0.6, -1.9], [-0.5, -1.2, X], [-0.3, X, X], [-1.4, -0.3, -0.8]],
    "mask": [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]],
    "advantages": [1.0, -1.0, -1.0, 1.0],
}
UNCLIPPED = {"clip_eps_low": 1e9, "clip_eps_high": 1e9}


TINY = (
    "--width 16 --layers 2 --heads 2 --kv-heads 1 --experts 4 --expert-width 16 --max-terms 2 --largest 3 --warm-steps 90 "
    "--warm-batch 16 --warm-lr 2e-2 --warm-think 0.2 --rl-steps 4 --prompts 4 --group 8 --minibatches 2 --eval-problems 4 "
    "--max-new-tokens 12 --save-every 2 --lr 1e-3"
).split()


def window(low, high):
    return {"clip_eps_low": low, "clip_eps_high": high}


def hand_batch(dtype=torch.float64):
    return {name: torch.tensor(value, dtype=dtype) for name, value in HAND.items()}


def random_batch(seed, rows=6, tokens=7, dtype=torch.float64, spread=0.3, per_token=False):
    """Rows of different lengths, the last one full, the first one of a single token. Advantages (B,) or (B, T)."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    lengths[0], lengths[-1] = 1, tokens
    old = -torch.rand(rows, tokens, generator=g, dtype=torch.float64) * 3
    return {
        "logprobs": (old + spread * torch.randn(rows, tokens, generator=g, dtype=torch.float64)).to(dtype),
        "old_logprobs": old.to(dtype),
        "advantages": torch.randn((rows, tokens)[: 1 + per_token], generator=g, dtype=torch.float64).to(dtype),
        "mask": (torch.arange(tokens) < lengths[:, None]).to(dtype),
    }


def response(log_ratios, advantage, per_token=False):
    """A batch of one response with these log-ratios, without padding."""
    log_ratios = torch.tensor([log_ratios], dtype=torch.float64)
    old = torch.zeros_like(log_ratios)
    advantages = torch.full(old.shape[: 1 + per_token], float(advantage), dtype=torch.float64)
    return {"logprobs": log_ratios, "old_logprobs": old, "advantages": advantages, "mask": old + 1}


def value_and_grad(loss, batch, **options):
    """(loss, gradient with respect to the log-probs, metrics)."""
    batch = dict(batch)
    logprobs = batch.pop("logprobs").clone().requires_grad_()
    value, metrics = loss(logprobs, **batch, **options)
    value.backward()
    return value.detach(), logprobs.grad, metrics


def assert_same(one, other, rows=slice(None), rtol=0.0, atol=0.0):
    """Of two results of `value_and_grad`: the same value, gradient (of these rows of the other) and metrics."""
    for a, b in ((one[0], other[0]), (one[1], other[1][rows]), (one[2], other[2])):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def run_alone(file, folder):
    """What a file of ours prints as a program, copied without the others into an empty folder."""
    shutil.copy(Path(__file__).parents[1] / file, folder)
    return subprocess.run([sys.executable, file], cwd=folder, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def fake_gpu():
    """A device that only claims to be there: shapes and devices are checked, nothing is computed.

    Any operator that meets tensors of two devices raises, as it would on a GPU. A CPU build of torch cannot run autograd
    on tensors that claim to be on "cuda", so the claim is one that torch lets a program make up. Yields the device.
    """
    if not hasattr(torch, "fakegpu"):
        pytest.skip("this torch cannot make up a device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTensorMode, "avoid_device_init", True)  # torch.tensor(list, device=...) too only claims
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield torch.device("fakegpu", 0)


def results(folder, timings=("seconds", "tokens_per_s")):
    """All that a finished run leaves, but for the times."""
    folder = Path(folder)
    found = {}
    for path in sorted(folder.glob("*.csv")):
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        found[path.name] = [{k: v for k, v in row.items() if k not in timings} for row in rows]
    for path in sorted(folder.glob("*.pt")):
        if path.name not in ("state.pt", "warm.pt"):
            found[path.name] = {k: v.numpy().tobytes() for k, v in load_model(path)[0].state_dict().items()}
    return found


# Runs of train.py


def run(monkeypatch, *argv):
    """train.py in this process. Returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, argv)])
    try:
        harness.run_program(train.main)
    except SystemExit as exit:
        return exit.code
    return 0


def settings(*argv):
    return parsed(*TINY, *argv)


def parsed(*argv):
    return harness.parse_settings(train.Settings, argv, "")[0]


def command(*argv, **kw):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, argv)], cwd=ROOT, env=env, capture_output=True, text=True, encoding="utf-8", **kw
    )


def make_learner(s, name="gspo"):
    torch.manual_seed(0)
    return train.Learner(name, Transformer(s.model_config), s)


def rollout_of(learner, s):
    return train.respond(learner, train.problems_of(s, 0), s, 0)


class AdamWByHand:
    """Kingma & Ba's formula with betas .9 and .95, eps 1e-8, no weight decay, on gradients clipped to norm 1."""

    def __init__(self, model):
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.m = {name: torch.zeros_like(p) for name, p in self.weights.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.weights.items()}
        self.steps = 0

    def step(self, grads, lr):
        """grads: {name: tensor}. Returns their norm."""
        self.steps += 1
        norm = sum(g.square().sum() for g in grads.values()).sqrt()
        for name, g in grads.items():
            g = g / max(1.0, float(norm))
            self.m[name] = 0.9 * self.m[name] + 0.1 * g
            self.v[name] = 0.95 * self.v[name] + 0.05 * g**2
            m = self.m[name] / (1 - 0.9**self.steps)
            v = self.v[name] / (1 - 0.95**self.steps)
            self.weights[name] = self.weights[name] - lr * m / (v.sqrt() + 1e-8)
        return norm

    def assert_like(self, trainable, lr):
        """The moments agree closely; the weights as far as rounding of gradients near 0, which Adam enlarges, lets them."""
        for name, p in trainable.model.named_parameters():
            state = trainable.optimizer.state[p]
            torch.testing.assert_close(state["exp_avg"], self.m[name], rtol=1e-3, atol=1e-6)
            torch.testing.assert_close(state["exp_avg_sq"], self.v[name], rtol=1e-3, atol=1e-6)
            difference = (p.detach() - self.weights[name]).abs()
            assert difference.mean() < 0.002 * lr and difference.max() < 0.2 * lr, name


def row_by_row(model, tokens, start):
    """Of one sequence (a list): log-probs of tokens[start:], and the router's probabilities (t, L, E) of its inputs."""
    x, _, probs = model.features(torch.tensor([tokens[:-1]]))
    logprobs = model.head(x)[0].log_softmax(-1)  # (t, V)
    return torch.stack([logprobs[place - 1, tokens[place]] for place in range(start, len(tokens))]), probs[0]


class Crash(BaseException):
    """Stands in for kill -9: nothing of ours catches it, what is on the disk stays as it is."""
