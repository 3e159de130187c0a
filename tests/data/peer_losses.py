# SPDX-License-Identifier: MIT
"""Where `peer_losses.json` comes from: the losses of TRL and verl on shared inputs, computed by their own code.

`tests/test_losses.py` compares ours with it, so that the tests need neither library. To compute it again, from the
repository's root, in an environment of its own (verl asks for older versions of packages that its losses never use):

    python -m venv peers
    peers/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.24.0 accelerate==1.15.0 datasets==5.2.0
    peers/bin/pip install ray==2.60.0 tensordict==0.15.3 omegaconf==2.4.0 codetiming==1.4.0 orjson==3.13.0
    peers/bin/pip install --no-deps verl==0.9.1
    OMP_NUM_THREADS=1 peers/bin/python tests/data/peer_losses.py

It prints the largest difference from the file, and adds the cases that the file lacks. The numbers that are there stay,
since a processor may compute another ninth digit. The file is a list of cases. A case has `logprobs`, `old_logprobs`,
`mask` (B, T), `advantages` (B,), float32, and for each setting, "objective:low:high", these:

trl_loss, verl_loss: must be the same, and are checked here to be.
grad: of either loss with respect to logprobs.
clip_frac: verl's pg_clipfrac, the share of tokens that the window clips.
verl_dual_clip_loss, verl_dual_clip_grad: only where they differ from the above. Where A < 0, verl's loss "vanilla" clips
    a second time, the ratio at clip_ratio_c = 3 (dual clip, arXiv 1912.09729), unless told otherwise. GSPO's paper, TRL
    and this repository do not. `verl_loss` is with clip_ratio_c out of reach. verl's "gspo" has no dual clip.

The inputs of the first cases are kept as they are in the file; those of the last, with ratios above 3, are drawn here.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from trl import GRPOTrainer
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

FILE = Path(__file__).with_name("peer_losses.json")
INPUTS = ("logprobs", "old_logprobs", "mask", "advantages")
KEPT = 12  # cases whose inputs are read; in these no ratio is above 3
SETTINGS = ("gspo:0.0003:0.0004", "gspo:0.05:0.06", "grpo:0.2:0.27", "grpo:0.01:0.02")
NEVER = 1e9  # a dual clip that clips nothing
ACCELERATOR = Accelerator(cpu=True)


def far_inputs(seed, rows=8, tokens=12):
    """Responses with A < 0 of which some tokens, or most, have become more than three times as likely."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=g)
    old_logprobs = -1.5 - 2.5 * torch.rand(rows, tokens, generator=g)
    row_moves = torch.linspace(-1, 1.5, rows)[:, None]
    moves = row_moves + 0.8 * torch.randn(rows, tokens, generator=g)
    advantages = torch.randn(rows, generator=g)
    advantages[-3:] = -advantages[-3:].abs() - 0.1
    return {
        "logprobs": (old_logprobs + moves).clamp(max=-0.01),
        "old_logprobs": old_logprobs,
        "mask": (torch.arange(tokens) < lengths).int(),
        "advantages": advantages,
    }


def trl_loss(batch, logprobs, objective, low, high):
    """GRPOTrainer's own `_compute_loss`, on log-probs that are given instead of computed by a model."""
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, torch.zeros_like(logprobs), None),
        importance_sampling_level={"gspo": "sequence", "grpo": "token"}[objective],
        loss_type="grpo",
        epsilon_low=low,
        epsilon_high=high,
        args=SimpleNamespace(delta=None),
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        _metrics={"train": defaultdict(list)},
    )
    prompt = torch.zeros(len(logprobs), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.zeros_like(batch["mask"]),
        "completion_mask": batch["mask"],
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old_logprobs"],
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def verl_loss(batch, logprobs, objective, low, high, dual_clip):
    """(loss, metrics), by the function that verl's actor calls."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual_clip,
    )
    loss = get_policy_loss_fn({"gspo": "gspo", "grpo": "vanilla"}[objective])
    return loss(
        old_log_prob=batch["old_logprobs"],
        log_prob=logprobs,
        advantages=batch["advantages"][:, None].expand_as(logprobs),
        response_mask=batch["mask"],
        loss_agg_mode="seq-mean-token-mean",
        config=config,
    )


def grad_of(loss, logprobs):
    return torch.autograd.grad(loss, logprobs)[0]


def outcome(batch, setting):
    objective, low, high = setting.split(":")
    low = float(low)
    high = float(high)
    logprobs = batch["logprobs"].clone().requires_grad_()
    trl = trl_loss(batch, logprobs, objective, low, high)
    verl, metrics = verl_loss(batch, logprobs, objective, low, high, NEVER)
    dual, _ = verl_loss(batch, logprobs, objective, low, high, 3.0)
    grad = grad_of(trl, logprobs)
    torch.testing.assert_close(trl, verl, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad, grad_of(verl, logprobs), rtol=1e-6, atol=1e-8)
    found = {
        "trl_loss": numbers(trl),
        "verl_loss": numbers(verl),
        "grad": numbers(grad),
        "clip_frac": numbers(torch.tensor(metrics["actor/pg_clipfrac"])),
    }
    if dual != verl:
        found["verl_dual_clip_loss"] = numbers(dual)
        found["verl_dual_clip_grad"] = numbers(grad_of(dual, logprobs))
    return found


def numbers(tensor):
    """As lists, with the nine digits that tell one float32 from the next."""
    if tensor.dim():
        return [numbers(part) for part in tensor]
    if not tensor.is_floating_point():
        return tensor.item()
    return float(f"{tensor.item():.9g}")


def flat(outcomes):
    """All losses, gradients and shares of one setting, in one row."""
    return torch.cat([torch.tensor(value, dtype=torch.float64).flatten() for value in outcomes.values()])


def main():
    before = json.loads(FILE.read_text(encoding="utf-8"))
    batches = [{name: torch.tensor(case[name]) for name in INPUTS} for case in before[:KEPT]]
    batches += [far_inputs(seed) for seed in range(4)]
    cases = []
    for batch in batches:
        case = {name: numbers(batch[name]) for name in INPUTS}
        for setting in SETTINGS:
            case[setting] = outcome(batch, setting)
        cases.append(case)
    largest = 0.0
    for old, new in zip(before, cases):
        for setting in SETTINGS:
            largest = max(largest, (flat(old[setting]) - flat(new[setting])).abs().max().item())
    print(f"{len(before)} cases were there, and differ by at most {largest:.1e}; {len(cases) - len(before)} are new")
    if largest > 1e-6:
        raise SystemExit("that is more than rounding: nothing is written")
    FILE.write_text(json.dumps(before + cases[len(before) :]), encoding="utf-8")


if __name__ == "__main__":
    main()
