# SPDX-License-Identifier: MIT
"""Imitation: a new model learns the language of worked solutions, before RL improves on it.

The field calls it supervised fine-tuning (SFT), or a cold start; its result is the warm start of RL. The loss is the
mean cross-entropy over the tokens of solutions that we wrote, plus the load-balance loss, which keeps every expert in
use. Most solutions only answer, some think first: RL is to find out which of the two pays.

Letters: N tokens, L layers, E experts.
"""

import time

import torch

import harness
from harness import UserError, all_reduce, log, rank, rng, world_size
from model import Transformer, checkpoint, load_model, response_logprobs, split_by_length
from moe import load_balance_loss
from rewards import worked_solution
from sample import PAD, encode_prompt, encode_response


def worked_solutions(settings, step):
    """(token lists, prompt lengths) of one batch: some think before they answer, most only answer."""
    draw = rng(settings.seed, "warm", step)
    solutions = []
    prompt_lengths = []
    for _ in range(settings.warm_batch):
        problem = settings.random_problem(draw)
        prompt = encode_prompt(problem.prompt)
        think = draw.random() < settings.warm_think
        solutions.append(prompt + encode_response(worked_solution(problem, think=think)))
        prompt_lengths.append(len(prompt))
    return solutions, prompt_lengths


def imitation_step(trainable, settings, step):
    """One optimizer step on one batch of worked solutions. Returns (loss per response token, tokens in the batch)."""
    solutions, prompt_lengths = worked_solutions(settings, step)
    lengths = [len(tokens) for tokens in solutions]
    response_tokens = sum(lengths) - sum(prompt_lengths)
    parameters = list(trainable.model.parameters())

    def loss_and_gradients(rows):
        """Of one micro-batch. The parts add up to the whole batch, but for the load-balance loss: each has its own."""
        longest = max(lengths[row] for row in rows)
        padded = [solutions[row] + [PAD] * (longest - lengths[row]) for row in rows]
        tokens = torch.tensor(padded, device=trainable.device)
        spans = [(prompt_lengths[row], lengths[row]) for row in rows]
        with harness.precision(settings.dtype, trainable.device):
            logprobs, probs, _ = response_logprobs(trainable.model, tokens, spans, output_router_probs=True)
        nll = -logprobs.sum() / response_tokens
        balance = []
        for p in probs.unbind(1):  # (N, E), of each layer
            balance.append(load_balance_loss(p, p.topk(settings.experts_per_token).indices))
        share = sum(lengths[row] for row in rows) / sum(lengths)
        loss = nll + settings.aux_coef * share * torch.stack(balance).mean()
        # returned, not left in .grad, where threads that run side by side would race to add theirs
        return nll.detach(), torch.autograd.grad(loss, parameters)

    # The micro-batches depend on the batch alone; each process takes its share of them.
    micro_batches = split_by_length(lengths, settings.micro_tokens)[rank() :: world_size()]
    loss = torch.zeros((), device=trainable.device)
    for part, gradients in harness.side_by_side(loss_and_gradients, micro_batches, trainable.device):
        loss += part
        for p, g in zip(parameters, gradients):
            p.grad = g if p.grad is None else p.grad + g
    # the rate rises over 100 steps and falls to a tenth at the end
    lr = settings.warm_lr * min(1.0, (step + 1) / 100) * (1 - 0.9 * step / settings.warm_steps)
    trainable.step(lr, all_reduce(loss))
    return loss, sum(lengths)


def warm_start(settings, device, stop, state):
    """The model that all learners start from: found in the folder, resumed from `state`, or trained from nothing."""
    path = settings.folder / "warm.pt"
    if path.exists():
        log(f"warm start: taken from {path}")
        try:
            model, metadata = load_model(path, device=device)
        except ValueError as error:
            raise UserError(str(error)) from error
        if model.config != settings.model_config:
            raise UserError(f"{path} has other sizes than this run: delete it, or choose another --out")
        if metadata != settings.metadata:
            raise UserError(f"{path} was trained on other problems than this run's: delete it, or choose another --out")
        return model.train()

    torch.manual_seed(settings.seed)
    trainable = harness.Trainable("warm", Transformer(settings.model_config).to(device))
    first = 0 if state is None else harness.restore([trainable], state)
    harness.save_state(settings.folder, "imitation", first, [trainable])
    began = time.perf_counter()
    loss = torch.zeros(())
    seen = 0
    steps = harness.resumable(
        "imitation", first, settings.warm_steps, 20 * settings.save_every, stop, [trainable], lambda: f"loss {loss:.3f}"
    )
    try:
        for step in steps:
            loss, tokens = imitation_step(trainable, settings, step)
            seen += tokens
    except FloatingPointError as error:
        raise UserError(f"warm start, step {step + 1}: {error}; try a smaller --warm-lr", code=1) from error
    if seen:  # of a run resumed after the last step there is no loss to tell
        log(f"warm start: {seen} tokens in {time.perf_counter() - began:.0f} s, loss {loss:.3f}")
    harness.save(path, checkpoint(trainable.model, **settings.metadata))
    return trainable.model
