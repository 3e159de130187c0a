# SPDX-License-Identifier: MIT
"""GSPO: one importance ratio per sequence, as the reward belongs to the sequence (Zheng et al., arXiv 2507.18071).

Equations are those of the paper. Read this file beside `grpo.py`: `diff grpo.py gspo.py` is the lesson.
Letters: B sequences, T tokens, G samples per prompt (the group).

Departures from the paper, each of them common practice:
  - the log-ratio is capped at +-20 before `exp`, after the mean, so that no finite input gives inf;
  - no KL penalty: the paper leaves it out as well.

Advantages are GRPO's (equation 6): `group_advantages` in `grpo.py`.
To copy: this file needs nothing but torch.
"""

import torch

LOG_RATIO_CAP = 20.0  # e^20 = 5e8: far outside every clip window, far inside float32


def gspo_loss(logprobs, old_logprobs, advantages, mask, *, clip_eps_low=3e-4, clip_eps_high=4e-4, num_sequences=None):
    """Equation 5, negated to be minimised: the sequence-level objective; with per-token advantages, GSPO-token.

    logprobs, old_logprobs: (B, T), log-probabilities of the tokens under the trained and the sampling policy.
    advantages: (B,), one per sequence; or (B, T), one per token, which makes it GSPO-token (equations 13 and 14).
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
    per_token = advantages.dim() == 2
    mask = mask.bool()
    lengths = mask.sum(1)  # (B,)
    filled = lengths > 0
    if num_sequences is None:
        num_sequences = filled.sum().clamp(min=1)

    # float32 or better: 1 + 3e-4 does not exist in bfloat16. `where` comes before any arithmetic, since inf * 0 is nan.
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    new = torch.where(mask, logprobs, 0).to(dtype)
    old = torch.where(mask, old_logprobs, 0).to(dtype).detach()
    advantages = torch.where(mask if per_token else filled, advantages, 0).to(dtype).detach()

    # Equation 7:  s_i = (pi(y_i | x) / pi_old(y_i | x))^(1/|y_i|) = exp(1/|y_i| sum_t log w_it)
    seq_log_ratio = ((new - old).sum(1) / lengths.clamp(min=1)).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)  # (B,)
    ratio = seq_log_ratio.exp()

    # Equation 5:  J = 1/G sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)
    # Its gradient (equation 10) gives all tokens of a response the same weight s_i / |y_i|.
    if per_token:
        # Equation 14:  s_it = sg[s_i] pi(y_it) / sg[pi(y_it)]: the value of s_i, the gradient of token t alone
        ratio = ratio.detach()[:, None] * (new - new.detach()).exp()  # (B, T)
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages
    # `where`, not `min`: a ratio exactly on the edge keeps its gradient, while clamp's is 0 there since torch 2.14
    objective = torch.where(unclipped <= clipped, unclipped, clipped)  # (B,) or (B, T), 0 where nothing is
    if per_token:
        # Equation 13:  J = 1/G sum_i 1/|y_i| sum_t min(s_it A_it, clip(s_it, 1 - low, 1 + high) A_it)
        objective = objective.sum(1) / lengths.clamp(min=1)
    loss = -objective.sum() / num_sequences

    with torch.no_grad():
        tokens = lengths.sum().clamp(min=1)
        low = (advantages < 0) & (ratio < 1 - clip_eps_low)
        high = (advantages > 0) & (ratio > 1 + clip_eps_high)
        if not per_token:  # a clipped sequence clips all its tokens
            low, high = low[:, None], high[:, None]
        low, high = mask & low, mask & high  # (B, T)
        ratio = seq_log_ratio.exp()  # (B,)
        log_ratio = (new - old).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP)  # (B, T)
        metrics = {
            "clip_frac_low": low.sum() / tokens,
            "clip_frac_high": high.sum() / tokens,
            "clip_frac": (low | high).sum() / tokens,
            "ratio_mean": torch.where(filled, ratio, 0).sum() / filled.sum().clamp(min=1),
            "ratio_min": torch.where(filled, ratio, float("inf")).amin(),
            "ratio_max": torch.where(filled, ratio, -float("inf")).amax(),
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
