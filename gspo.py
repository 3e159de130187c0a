# SPDX-License-Identifier: MIT
"""GSPO: one importance ratio per sequence. Equation numbers are those of Zheng et al. (arXiv 2507.18071).

`diff grpo.py gspo.py` is the lesson: the ratio, the objective, and the window, here hundreds of times narrower.
`python gspo.py` shows it on numbers. To copy: this file needs nothing but torch.
Letters: B sequences, T tokens, P prompts, G samples per prompt (the group).
Not in the paper: std is the sample one (ddof 1), plus `eps`; the sequence's mean log-ratio is capped. Beyond the cap
the gradient is 0, which for A < 0 is not counted as clipped: no window did it.
"""

import torch

LOG_RATIO_CAP = 20.0  # so that no finite input gives inf; e^20 = 5e8 is far outside every clip window


def gspo_loss(logprobs, old_logprobs, advantages, mask, *, clip_eps_low=3e-4, clip_eps_high=4e-4, num_sequences=None):
    """Equation 5, negated to be minimised: the sequence-level objective. No KL penalty: 2507.18071 omits it.

    logprobs, old_logprobs: (B, T); at [:, t] the log-probability *of* token t, by the trained and the sampling policy.
        Computed in float32 or better: what bfloat16 has lost cannot be brought back.
    advantages: (B,), one per sequence.
    mask: (B, T), 1 on response tokens, the end token included. Values elsewhere, even inf and nan, are ignored.
    clip_eps_low, clip_eps_high: the window [1 - low, 1 + high]; defaults from section 5.1 of the paper.
    num_sequences: the divisor. Default: the rows with a response token (TRL: all rows). For a part of a batch, pass
        the whole's count and add the losses up; metrics of parts do not add up to those of the whole.
    Returns (loss, metrics): the mean over sequences; a dict of detached scalars. Raises ValueError on other shapes.
    Without any response token, or any row, the loss and its gradient are 0, and the ratios in the metrics are 1.
    """
    new, old, advantages, mask, lengths, count = _prepare(logprobs, old_logprobs, advantages, mask, num_sequences)
    # Equation 7:  s_i = (pi(y_i | x) / pi_old(y_i | x))^(1/|y_i|) = exp(1/|y_i| sum_t log w_it)
    log_ratio = (new - old).sum(1, keepdim=True) / lengths  # (B, 1)
    ratio = log_ratio.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()
    # Equation 5:  J = 1/G sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)
    # Its gradient (equation 10) gives all tokens of a response the same weight s_i / |y_i|.
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages
    # `where`, not `min`: a ratio exactly on the window's edge keeps its gradient (clamp's is 0 there since torch 2.14)
    objective = torch.where(unclipped <= clipped, unclipped, clipped)  # (B, 1)
    loss = -objective.sum() / count
    return loss, _metrics(new, old, advantages, mask, lengths, ratio, clip_eps_low, clip_eps_high)


def group_advantages(rewards, group_size, *, eps=1e-6):
    """Rewards minus their group's mean, divided by its std: equation 6, which for GRPO is a part of equation 3.

    rewards: (B,) tensor or list; a group is group_size (G) consecutive rows. None (in a list) or nan (in a tensor)
        means unverifiable: left out of its group's statistics, advantage 0.
    Returns (B,), float32 or better; exactly 0 in a group of equal rewards. Raises ValueError unless G >= 2 divides B.
    """
    if not torch.is_tensor(rewards):
        rewards = torch.tensor([float("nan") if r is None else float(r) for r in rewards])
    if group_size < 2 or rewards.dim() != 1 or rewards.numel() % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)} must be (B,), in groups of {group_size}, at least 2")
    r = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32)).view(-1, group_size)  # (P, G)
    known = ~r.isnan()
    count = known.sum(1, keepdim=True).clamp(min=1)
    # Equation 6:  A_i = (r_i - mean(r_1..r_G)) / std(r_1..r_G)
    centred = torch.where(known, r - r.nanmean(1, keepdim=True), 0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    # Equal rewards must give exactly 0, yet r - mean may be a rounding error, which 1/eps would enlarge: compare.
    low = torch.where(known, r, float("inf")).amin(1, keepdim=True)
    high = torch.where(known, r, -float("inf")).amax(1, keepdim=True)
    return torch.where(high > low, centred / (std + eps), 0.0).flatten()


def _prepare(logprobs, old_logprobs, advantages, mask, num_sequences, *, per_token=False):
    """Checks shapes, and sets to 0 what the mask leaves out.

    Returns (new (B, T), old (B, T), advantages (B, 1) or (B, T), mask (B, T), lengths (B, 1), count: the divisor).
    """
    shape = logprobs.shape
    if len(shape) != 2 or old_logprobs.shape != shape or mask.shape != shape:
        shapes = [*map(tuple, (shape, old_logprobs.shape, mask.shape))]
        raise ValueError(f"logprobs, old_logprobs and mask must be (B, T), not {shapes}")
    if advantages.shape != (shape if per_token else shape[:1]):
        form = "(B, T)" if per_token else "(B,)"
        raise ValueError(f"advantages must be {form} beside logprobs {tuple(shape)}, not {tuple(advantages.shape)}")
    mask = mask != 0  # new even where it is bool: autograd refuses a tensor made under inference_mode
    filled = mask.any(1, keepdim=True)  # (B, 1)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    count = filled.sum() if num_sequences is None else torch.as_tensor(num_sequences)
    count = count.clamp(min=1)  # without any response token all terms are 0, and so is the loss
    # float32 or better: 1 + 3e-4 does not exist in bfloat16. `where` comes before any arithmetic, since inf * 0 is nan.
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    new = torch.where(mask, logprobs, 0).to(dtype)
    old = torch.where(mask, old_logprobs.detach(), 0).to(dtype)
    advantages = advantages.detach() if per_token else advantages.detach()[:, None]
    advantages = torch.where(mask if per_token else filled, advantages, 0).to(dtype)
    return new, old, advantages, mask, lengths, count


def _std(x, chosen):
    """Population standard deviation of the chosen entries; 0 where there are none."""
    count = chosen.sum().clamp(min=1)
    mean = torch.where(chosen, x, 0).sum() / count
    deviation = torch.where(chosen, x - mean, 0)
    return (deviation.square().sum() / count).sqrt()


@torch.no_grad()
def _metrics(new, old, advantages, mask, lengths, ratio, clip_eps_low, clip_eps_high):
    """Detached scalars. ratio: (B, T), or (B, 1), where a clipped sequence clips all its tokens."""
    tokens = mask.sum().clamp(min=1)
    filled = mask.any(1, keepdim=True)
    chosen = mask if ratio.shape == mask.shape else filled  # the entries of ratio that are not padding
    if not ratio.numel():  # no row, or no column: a masked ratio stands in, so that there is something to reduce
        ratio = ratio.new_ones(1, 1)
        chosen = mask.new_zeros(1, 1)
    count = chosen.sum().clamp(min=1)
    none = ~chosen.any()
    low = mask & (advantages < 0) & (ratio < 1 - clip_eps_low)  # (B, T)
    high = mask & (advantages > 0) & (ratio > 1 + clip_eps_high)
    log_ratio = (new - old).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    seq_log_ratio = ((new - old).sum(1, keepdim=True) / lengths).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)
    return {
        "clip_frac_low": low.sum() / tokens,
        "clip_frac_high": high.sum() / tokens,
        "clip_frac": (low | high).sum() / tokens,
        "ratio_mean": torch.where(none, 1, torch.where(chosen, ratio, 0).sum() / count),
        "ratio_min": torch.where(none, 1, torch.where(chosen, ratio, float("inf")).amin()),
        "ratio_max": torch.where(none, 1, torch.where(chosen, ratio, -float("inf")).amax()),
        "log_ratio_std": _std(log_ratio, mask),
        "seq_log_ratio_std": _std(seq_log_ratio, filled),
        # k3, an unbiased and never negative estimate of KL(pi_old || pi): http://joschu.net/blog/kl-approx.html
        "approx_kl": torch.where(mask, log_ratio.exp() - 1 - log_ratio, 0).sum() / tokens,
    }


def gspo_token_loss(
    logprobs, old_logprobs, advantages, mask, *, clip_eps_low=3e-4, clip_eps_high=4e-4, num_sequences=None
):
    """GSPO-token: as `gspo_loss`, with advantages (B, T). Equation 13, negated; equation 17 is its gradient."""
    prepared = _prepare(logprobs, old_logprobs, advantages, mask, num_sequences, per_token=True)
    new, old, advantages, mask, lengths, count = prepared
    log_ratio = (new - old).sum(1, keepdim=True) / lengths  # (B, 1)
    ratio = log_ratio.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()
    # Equation 14:  s_it = sg[s_i] pi(y_it) / sg[pi(y_it)], sg: stop-gradient; the value of s_i, token t's gradient
    token_log_ratio = log_ratio.detach() + (new - new.detach())  # (B, T)
    token_ratio = token_log_ratio.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()
    # Equation 13:  J = 1/G sum_i 1/|y_i| sum_t min(s_it A_it, clip(s_it, 1 - low, 1 + high) A_it)
    unclipped = token_ratio * advantages
    clipped = token_ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages
    objective = torch.where(unclipped <= clipped, unclipped, clipped)  # (B, T); 0 where masked, since A_it is
    objective = objective.sum(1, keepdim=True) / lengths  # (B, 1)
    loss = -objective.sum() / count
    return loss, _metrics(new, old, advantages, mask, lengths, ratio, clip_eps_low, clip_eps_high)


if __name__ == "__main__":  # a group of five responses of four tokens; an update moved their log-probs from -1
    advantages = group_advantages([1, 1, 0.5, 0, 0], 5)
    moves = torch.tensor([[30, -2, -29, 1], [30, -2, -25, 1], [9, -8, 7, 0], [-30, 2, 29, -1], [-30, 2, 25, -1]]) / 100
    old_logprobs = -torch.ones(5, 4)
    mask = torch.ones(5, 4)
    logprobs = (old_logprobs + moves).requires_grad_()
    gspo_loss(logprobs, old_logprobs, advantages, mask)[0].backward()
    # the loss has a minus and means over 5 responses of 4 tokens; 0 minus it, so that no -0.000 is printed
    weights = 0 - 5 * 4 * logprobs.grad
    a = advantages[:, None]
    w = moves.exp()
    s = moves.mean(1, keepdim=True).exp()
    token_level = torch.where((a > 0) & (w > 1.27) | (a < 0) & (w < 0.8), 0, a * w)
    print("     A | token ratios w              | GRPO: w A, 0 if clipped     |      s | GSPO: s A, 0 if clipped")
    for row in zip(a, w, token_level, s, weights):
        print(" | ".join(" ".join(f"{x:6.3f}" for x in cell.tolist()) for cell in row))
