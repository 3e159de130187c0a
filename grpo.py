# SPDX-License-Identifier: MIT
"""GRPO: one importance ratio per token (Shao et al., arXiv 2402.03300), as the GSPO paper states it.

Equations are those of arXiv 2507.18071. Read this file beside `gspo.py`: `diff grpo.py gspo.py` is the lesson.
Letters: B sequences, T tokens, G samples per prompt (the group).

Departures from the paper, each of them common practice:
  - the standard deviation of a group is the sample one (ddof 1) plus `eps`; the paper does not say which;
  - the log-ratio is capped at +-20 before `exp`, so that no finite input gives inf;
  - no KL penalty: the paper leaves it out as well.

To copy: this file needs nothing but torch.
"""

import torch

LOG_RATIO_CAP = 20.0  # e^20 = 5e8: far outside every clip window, far inside float32


def group_advantages(rewards, group_size, *, eps=1e-6):
    """Equation 3: each reward against the mean and standard deviation of its own group.

        A_i = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + eps)

    rewards: (B,) tensor or list; groups are consecutive rows. None (in a list) or nan (in a tensor) means
        unverifiable: left out of its group's statistics, advantage 0.
    group_size: G, at least 2; B must be a multiple of it.
    Returns (B,), float32 or better. A group whose rewards are all equal gives exactly 0.
    Raises ValueError when B and G do not fit.
    """
    if not torch.is_tensor(rewards):
        rewards = torch.tensor([float("nan") if r is None else float(r) for r in rewards])
    rewards = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    if group_size < 2:
        raise ValueError(f"group_size is {group_size}: a group needs at least 2 samples to compare")
    if rewards.dim() != 1 or rewards.numel() % group_size:
        raise ValueError(f"rewards {tuple(rewards.shape)} do not divide into groups of {group_size}")

    r = rewards.view(-1, group_size)  # (P, G)
    known = ~r.isnan()
    count = known.sum(1, keepdim=True)
    mean = torch.where(known, r, 0).sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(known, r - mean, 0)
    std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    # The rounded mean of equal rewards can be one unit off, and eps would blow that up: compare, do not subtract.
    low = torch.where(known, r, float("inf")).amin(1, keepdim=True)
    high = torch.where(known, r, -float("inf")).amax(1, keepdim=True)
    return torch.where(high > low, centred / (std + eps), 0.0).flatten()


def grpo_loss(logprobs, old_logprobs, advantages, mask, *, clip_eps_low=0.2, clip_eps_high=0.27, num_sequences=None):
    """Equation 2, negated to be minimised: the token-level objective.

    logprobs, old_logprobs: (B, T), log-probabilities of the tokens under the trained and the sampling policy.
    advantages: (B,), one per sequence; or (B, T), one per token.
    mask: (B, T), 1 on response tokens, the end token included. What stands elsewhere, inf and nan included, is ignored.
    clip_eps_low, clip_eps_high: the window [1 - low, 1 + high]; defaults from section 5.1 of the paper.
    num_sequences: what to divide by when this batch is a part of a larger one, so that the parts' losses add up to
        the whole's. Default: the rows here that have any response token.
    Returns (loss, metrics): a scalar, the mean over sequences of the mean over tokens; a dict of detached scalars.
    Raises ValueError when the shapes do not fit.
    """
    if not logprobs.shape == old_logprobs.shape == mask.shape or logprobs.dim() != 2:
        shapes = [tuple(x.shape) for x in (logprobs, old_logprobs, mask)]
        raise ValueError(f"logprobs, old_logprobs and mask must share one shape (B, T), not {shapes}")
    if advantages.shape not in (logprobs.shape[:1], logprobs.shape):
        raise ValueError(f"advantages {tuple(advantages.shape)} must be (B,) or (B, T) for {tuple(logprobs.shape)}")
    mask = mask.bool()
    lengths = mask.sum(1)  # (B,)
    filled = lengths > 0
    if num_sequences is None:
        num_sequences = filled.sum().clamp(min=1)

    # float32 or better: 1 + 3e-4 does not exist in bfloat16. `where` comes before any arithmetic, since inf * 0 is nan.
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    new = torch.where(mask, logprobs, 0).to(dtype)
    old = torch.where(mask, old_logprobs, 0).to(dtype).detach()
    advantages = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(mask)
    advantages = torch.where(mask, advantages, 0).to(dtype).detach()

    # Equation 3:  w_it = pi(y_it | x, y_i<t) / pi_old(y_it | x, y_i<t)
    log_ratio = (new - old).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)  # (B, T)
    ratio = log_ratio.exp()

    # Equation 2:  J = 1/G sum_i 1/|y_i| sum_t min(w_it A_i, clip(w_it, 1 - low, 1 + high) A_i)
    # Its gradient (equation 12) gives each token its own weight w_it.
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages
    # `where`, not `min`: a ratio exactly on the edge keeps its gradient, while clamp's is 0 there since torch 2.14
    objective = torch.where(unclipped <= clipped, unclipped, clipped)  # (B, T), 0 on padding
    loss = -(objective.sum(1) / lengths.clamp(min=1)).sum() / num_sequences

    with torch.no_grad():
        tokens = lengths.sum().clamp(min=1)
        low = mask & (advantages < 0) & (ratio < 1 - clip_eps_low)
        high = mask & (advantages > 0) & (ratio > 1 + clip_eps_high)
        seq_log_ratio = ((new - old).sum(1) / lengths.clamp(min=1)).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)  # (B,)
        metrics = {
            "clip_frac_low": low.sum() / tokens,
            "clip_frac_high": high.sum() / tokens,
            "clip_frac": (low | high).sum() / tokens,
            "ratio_mean": torch.where(mask, ratio, 0).sum() / tokens,
            "ratio_min": torch.where(mask, ratio, float("inf")).amin(),
            "ratio_max": torch.where(mask, ratio, -float("inf")).amax(),
            "log_ratio_std": _std(log_ratio, mask),
            "seq_log_ratio_std": _std(seq_log_ratio, filled),
            # k3, an unbiased and never negative estimate of KL(pi_old || pi): http://joschu.net/blog/kl-approx.html
            "approx_kl": torch.where(mask, log_ratio.exp() - 1 - log_ratio, 0).sum() / tokens,
        }
    return loss, metrics


def _std(x, chosen):
    """Population standard deviation of the chosen entries; 0 where there are none."""
    count = chosen.sum().clamp(min=1)
    mean = torch.where(chosen, x, 0).sum() / count
    return (torch.where(chosen, x - mean, 0).square().sum() / count).sqrt()
