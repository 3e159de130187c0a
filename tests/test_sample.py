# SPDX-License-Identifier: MIT
import random

import numpy as np
import pytest
import torch
from cases import fake_gpu

import sample
from model import ModelConfig, Transformer, token_logprobs
from sample import (
    BOS,
    EOS,
    PAD,
    THINK,
    choose,
    decode_response,
    encode_prompt,
    encode_response,
    generate,
    row_noise,
    tokenizer,
)

SIZES = dict(width=16, layers=2, heads=4, kv_heads=2, experts=4, experts_per_token=2, expert_width=8, context=64)
PROMPTS = ["9-1-4+7", "1+1", "2-3+4-5+6-7", "8"]


def make(seed=0, eos_bias=0.0, **sizes):
    torch.manual_seed(seed)
    m = Transformer(ModelConfig(**(SIZES | sizes)))
    if eos_bias:  # a constant input to the head, so that the end token can be made likely
        with torch.no_grad():
            m.norm.weight[0] = 0
            m.head.weight[EOS] = 0
            m.embed.weight[:, 0] = 0
            m.head.weight[EOS] += eos_bias * m.head.weight.std() * torch.sign(m.head.weight.mean(0))
    return m


# Tokenizer


def test_any_text_round_trips():
    rng = random.Random(0)
    texts = ["", "12+34=46\n", "3−7", "<think>1+1</think>", "<eos>", "\x00\r\n\t", "🙂é漢", "a" * 1000]
    texts += [
        "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0xD800), 0x10FFFF])) for _ in range(20))
        for _ in range(50)
    ]
    for text in texts:
        ids = tokenizer.encode_ordinary(text)
        assert tokenizer.decode(ids) == text and len(ids) == len(text.encode()) and all(i < 256 for i in ids)
        assert decode_response(ids) == text


def test_every_digit_is_a_token():
    assert len(tokenizer.encode_ordinary("1000000")) == 7


def test_special_tokens_come_from_the_template_alone():
    assert encode_prompt("<eos><think>") == [BOS, *b"<eos><think>"]
    assert encode_response("<think>1</think><answer>2</answer>") == [THINK, ord("1"), 260, 261, ord("2"), 262, EOS]
    with pytest.raises(ValueError, match="eos"):
        encode_response("<eos>")
    assert tokenizer.n_vocab == 263 == ModelConfig().vocab_size
    assert [tokenizer.decode([i]) for i in range(256, 263)] == list(sample.SPECIAL_TOKENS)


def test_unknown_ids_fail_clearly():
    for bad in (263, 10**6, -1):
        with pytest.raises(ValueError, match="outside the vocabulary of 263"):
            decode_response([65, bad])
    assert decode_response([65, EOS, 10**6]) == "A"  # what follows the end is never looked at


# Sampling


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_are_the_trainers(temperature):
    m = make()
    r = generate(m, PROMPTS, samples_per_prompt=3, max_new_tokens=20, temperature=temperature)
    want = token_logprobs(m, r.tokens, temperature=temperature)
    assert (want - r.logprobs)[r.mask].abs().max() < 1e-5
    assert (r.logprobs[~r.mask] == 0).all() and (r.entropy[~r.mask] == 0).all()


def test_recorded_routes_are_the_trainers():
    m = make(eos_bias=6.0)
    r = generate(m, PROMPTS, samples_per_prompt=8, max_new_tokens=30)
    routes = m(r.tokens)[1]
    for row, (_, end) in enumerate(r.spans):  # the last token was sampled, not read: it has no route
        assert torch.equal(
            routes[:, row, : end - 1].sort(-1).values, r.routes[:, row, : end - 1].long().sort(-1).values
        )
    assert r.routes.dtype == torch.uint8 and r.routes.shape == (2, *r.tokens.shape, 2)
    assert (r.routes[..., 0] != r.routes[..., 1]).all()  # padding too holds routes that could be replayed


def test_layout_of_a_rollout():
    m = make(eos_bias=6.0)
    r = generate(m, PROMPTS, samples_per_prompt=8, max_new_tokens=30)
    assert len(set(r.lengths.tolist())) > 3, "rows must end at different times for this test to mean anything"
    for row, (start, end) in enumerate(r.spans):
        prompt = encode_prompt(PROMPTS[row // 8])
        assert r.tokens[row, :start].tolist() == prompt
        assert (r.tokens[row, end:] == PAD).all()
        assert r.mask[row].nonzero()[:, 0].tolist() == list(range(start, end)) and r.lengths[row] == end - start
        response = r.tokens[row, start:end].tolist()
        assert EOS not in response[:-1]
        assert response[-1] == EOS or len(response) == 30  # the end token is kept, and masked in
    assert r.tokens.size(1) == max(end for _, end in r.spans)
    assert any(r.tokens[row, end - 1] == EOS for row, (_, end) in enumerate(r.spans))


def test_rows_do_not_depend_on_the_batch():
    """Each sample drawn alone, with its number in the whole, is the one drawn among the others."""
    m = make(eos_bias=6.0)
    whole = generate(m, PROMPTS, samples_per_prompt=4, max_new_tokens=24, seed=5)
    for i, prompt in enumerate(PROMPTS):
        part = generate(m, [prompt], samples_per_prompt=4, max_new_tokens=24, seed=5, first_row=4 * i)
        for g in range(4):
            (a, b), (c, d) = whole.spans[4 * i + g], part.spans[g]
            assert whole.tokens[4 * i + g, a:b].tolist() == part.tokens[g, c:d].tolist()
            torch.testing.assert_close(whole.logprobs[4 * i + g, a:b], part.logprobs[g, c:d], rtol=1e-4, atol=1e-5)
    longer = generate(m, PROMPTS, samples_per_prompt=4, max_new_tokens=26, seed=5)
    assert all(x[a : a + 24].tolist() == y[a:b].tolist()[:24] or b - a < 24
               for x, y, (a, b) in zip(longer.tokens, whole.tokens, whole.spans))  # fmt: skip


def test_ended_rows_leave_the_batch(monkeypatch):
    m, sizes = make(eos_bias=6.0), []
    decode = m.decode
    monkeypatch.setattr(m, "decode", lambda tokens, *args: (sizes.append(len(tokens)), decode(tokens, *args))[1])
    r = generate(m, PROMPTS, samples_per_prompt=8, max_new_tokens=30)
    alive = [int((r.lengths > step).sum()) for step in range(1, 30)]
    assert sizes == [n for n in alive if n]


def test_no_two_samples_share_noise():
    noise = row_noise(3, range(64), 50)
    assert len({tuple(row) for row in noise.tolist()}) == 64
    assert (row_noise(4, range(64), 50) != noise).all()
    r = generate(make(), ["1+1"], samples_per_prompt=16, max_new_tokens=20)
    assert len({tuple(row) for row in r.tokens.tolist()}) == 16


def test_noise_depends_on_seed_and_row_alone():
    noise = row_noise(7, range(10), 30)
    assert noise.dtype == np.float32 and 0 < noise.min() and noise.max() <= 1
    assert (row_noise(7, [8], 12)[0] == noise[8, :12]).all()
    assert abs(row_noise(0, range(200), 200).mean() - 0.5) < 0.01


def test_same_seed_same_samples():
    m = make()
    a, b, c = (generate(m, PROMPTS, samples_per_prompt=2, max_new_tokens=15, seed=s) for s in (1, 1, 2))
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.logprobs, b.logprobs)
    assert not torch.equal(a.tokens, c.tokens)


def test_greedy():
    m = make()
    r = generate(m, PROMPTS, samples_per_prompt=2, max_new_tokens=10, temperature=0, seed=1)
    assert torch.equal(r.tokens[::2], r.tokens[1::2])
    logits = m(r.tokens)[0]
    for row, (start, end) in enumerate(r.spans):
        assert torch.equal(r.tokens[row, start:end], logits[row, start - 1 : end - 1].argmax(-1))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_match_the_model(temperature):
    """Chi-square on a vocabulary of 6: joint frequencies of two tokens in a row, 35 degrees of freedom."""
    m = make(vocab_size=6)
    n = 20000
    r = generate(m, [[1, 2]], samples_per_prompt=n, max_new_tokens=2, temperature=temperature)
    pairs = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    rows = torch.cat([torch.tensor([[1, 2]]).expand(36, 2), pairs], 1)
    expected = n * token_logprobs(m, rows, temperature=temperature)[:, 2:].sum(1).exp()
    seen = torch.bincount(r.tokens[:, 2] * 6 + r.tokens[:, 3], minlength=36)
    assert ((seen - expected) ** 2 / expected).sum() < 66.6  # exceeded with probability 0.001
    assert expected.sum().item() == pytest.approx(n, rel=1e-4)


def test_choose_never_draws_what_has_no_probability():
    logits = torch.tensor([[-float("inf"), 0.0, -float("inf"), 0.0, -float("inf")]]).expand(4, 5)
    noise = torch.tensor([1e-9, 0.5, 0.50001, 1.0])
    token, logprob, _ = choose(logits, noise, 1.0)
    assert token.tolist() == [1, 1, 3, 3] and logprob.tolist() == pytest.approx([-0.693147] * 4)


def test_entropy_is_of_the_distribution_drawn_from():
    logits = torch.randn(3, 10)
    _, _, entropy = choose(logits, torch.full((3,), 0.5), 0.5)
    want = torch.distributions.Categorical(logits=logits / 0.5).entropy()
    torch.testing.assert_close(entropy, want)


def test_bad_input_says_so():
    m = make()
    for call, message in [
        (dict(prompts=[]), "at least one prompt"),
        (dict(prompts=["1"], samples_per_prompt=0), "at least one"),
        (dict(prompts=["1"], max_new_tokens=0), "at least one"),
        (dict(prompts=["1"], temperature=-1), "temperature is -1"),
        (dict(prompts=["1"], temperature=float("nan")), "temperature is nan"),
        (dict(prompts=[[]]), "a prompt is empty"),
        (dict(prompts=[[1, 263]]), "token 263 of a prompt is outside"),
        (dict(prompts=[[-1]]), "token -1 of a prompt is outside"),
        (dict(prompts=["1" * 60]), "exceed the context of 64"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(m, **({"max_new_tokens": 8} | call))


def test_the_sampler_stays_on_the_device(monkeypatch):
    """The whole loop, rows ending included, on tensors that claim to be on a GPU. The host's one look is stood in for."""
    looks = iter([[], [1, 4], [0], [], [0, 1]])
    monkeypatch.setattr(sample, "ended_places", lambda token: next(looks))
    with fake_gpu() as device:
        with device:
            m = Transformer(ModelConfig(**SIZES))
        r = generate(m, ["1+1", "2"], samples_per_prompt=3, max_new_tokens=5)
        for name in ("tokens", "mask", "logprobs", "entropy", "routes", "lengths"):
            assert getattr(r, name).device == device
