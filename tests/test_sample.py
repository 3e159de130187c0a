# SPDX-License-Identifier: MIT
import random

import numpy as np
import pytest
import torch
from helpers import fake_gpu

import sample
from model import KVCache, ModelConfig, Transformer, token_logprobs
from sample import (
    BOS,
    EOS,
    PAD,
    THINK,
    Rollout,
    compact,
    decode_response,
    encode_prompt,
    encode_response,
    finished_rows,
    generate,
    row_noise,
    sample_token,
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
    for _ in range(50):
        texts.append("".join(chr(rng.choice([rng.randrange(128), rng.randrange(0xD800), 0x10FFFF])) for _ in range(20)))
    for text in texts:
        ids = tokenizer.encode_ordinary(text)
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
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


@torch.no_grad()
def one_row_at_a_time(m, prompts, group, max_new_tokens, temperature, seed):
    """What `generate` does, slowly: each row alone, the whole of it through the model again for every token.

    Yields for each row its tokens, and the log-prob and the entropy of each sampled one.
    """
    for row, prompt in enumerate(prompt for prompt in prompts for _ in range(group)):
        tokens = encode_prompt(prompt)
        noise = torch.from_numpy(row_noise(seed, [row], max_new_tokens))
        logprobs = []
        entropies = []
        for step in range(max_new_tokens):
            logits, _ = m(torch.tensor([tokens]))
            token, logprob, entropy = sample_token(logits[:, -1], noise[:, step], temperature)
            tokens.append(token.item())
            logprobs.append(logprob.item())
            entropies.append(entropy.item())
            if token == EOS:
                break
        yield tokens, logprobs, entropies


@pytest.mark.parametrize("temperature, eos_bias", [(1.0, 6.0), (0.7, 6.0), (0.0, 0.0)])
def test_equals_sampling_one_row_at_a_time_without_a_cache(temperature, eos_bias):
    m = make(eos_bias=eos_bias)
    r = generate(m, PROMPTS, samples_per_prompt=4, max_new_tokens=12, temperature=temperature, seed=5)
    rows = list(one_row_at_a_time(m, PROMPTS, 4, 12, temperature, seed=5))
    assert len(rows) == len(r.tokens)
    if eos_bias:
        lengths = {len(logprobs) for _, logprobs, _ in rows}
        assert len(lengths) > 3, "rows must end at different times for this test to mean anything"
    for row, (tokens, logprobs, entropies) in enumerate(rows):
        start, end = r.spans[row]
        assert r.tokens[row, :end].tolist() == tokens
        assert r.logprobs[row, start:end].tolist() == pytest.approx(logprobs, abs=1e-5)
        assert r.entropy[row, start:end].tolist() == pytest.approx(entropies, abs=1e-5)


def test_logits_with_a_cache_equal_those_without(monkeypatch):
    """All of them, not only those of the tokens drawn, while rows end and others move into their places."""
    m = make(eos_bias=6.0)
    all_logits = []
    all_noise = []
    sampled = sample.sample_token

    def look(logits, noise, temperature):
        all_logits.append(logits)
        all_noise.append(noise)
        return sampled(logits, noise, temperature)

    monkeypatch.setattr(sample, "sample_token", look)
    r = generate(m, PROMPTS, samples_per_prompt=4, max_new_tokens=12, seed=5)
    full, _ = m(r.tokens)
    starts = torch.tensor([start for start, _ in r.spans])
    noise_of_rows = torch.from_numpy(row_noise(5, range(16), 12))
    for step, (logits, noise) in enumerate(zip(all_logits, all_noise)):
        alive = (r.lengths > step).nonzero()[:, 0]
        rows = (noise[:, None] == noise_of_rows[:, step]).nonzero()[:, 1]  # of which row each place's noise is
        assert torch.equal(rows.sort().values, alive)
        torch.testing.assert_close(logits, full[rows, starts[rows] + step - 1], rtol=1e-4, atol=2e-5)
    assert len(alive) < 16


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_are_the_trainers(temperature):
    m = make()
    r = generate(m, PROMPTS, samples_per_prompt=3, max_new_tokens=20, temperature=temperature)
    want = token_logprobs(m, r.tokens, temperature=temperature)
    assert (want - r.logprobs)[r.mask].abs().max() < 1e-5
    assert (r.logprobs[~r.mask] == 0).all()
    assert (r.entropy[~r.mask] == 0).all()


def test_recorded_routes_are_the_trainers():
    m = make(eos_bias=6.0)
    r = generate(m, PROMPTS, samples_per_prompt=8, max_new_tokens=30)
    _, routes = m(r.tokens)
    for row, (_, end) in enumerate(r.spans):  # the last token was sampled, not read: it has no route
        recorded = r.routes[row, : end - 1].long()
        assert torch.equal(routes[row, : end - 1].sort(-1).values, recorded.sort(-1).values)
    assert r.routes.dtype == torch.uint8
    assert r.routes.shape == (*r.tokens.shape, 2, 2)
    assert (r.routes[..., 0] != r.routes[..., 1]).all()  # padding too holds routes that could be replayed


def test_layout_of_a_rollout():
    m = make(eos_bias=6.0)
    r = generate(m, PROMPTS, samples_per_prompt=8, max_new_tokens=30)
    assert len(set(r.lengths.tolist())) > 3, "rows must end at different times for this test to mean anything"
    for row, (start, end) in enumerate(r.spans):
        prompt = encode_prompt(PROMPTS[row // 8])
        assert r.tokens[row, :start].tolist() == prompt
        assert (r.tokens[row, end:] == PAD).all()
        assert r.mask[row].nonzero()[:, 0].tolist() == list(range(start, end))
        assert r.lengths[row] == end - start
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
            start, end = whole.spans[4 * i + g]
            assert part.spans[g] == (start, end)
            assert whole.tokens[4 * i + g, :end].tolist() == part.tokens[g, :end].tolist()
            torch.testing.assert_close(whole.logprobs[4 * i + g, :end], part.logprobs[g, :end], rtol=1e-4, atol=1e-5)
            one = whole.routes[4 * i + g, : end - 1].sort(-1).values
            other = part.routes[g, : end - 1].sort(-1).values
            assert torch.equal(one, other)
    longer = generate(m, PROMPTS, samples_per_prompt=4, max_new_tokens=26, seed=5)
    for row, (start, end) in enumerate(whole.spans):
        if end - start == 24:  # it was cut, and would have gone on
            assert longer.tokens[row, :end].tolist() == whole.tokens[row, :end].tolist()


def test_finished_rows_leave_the_batch(monkeypatch):
    m = make(eos_bias=6.0)
    sizes = []
    decode = m.decode

    def look(tokens, positions, cache):
        sizes.append(len(tokens))
        return decode(tokens, positions, cache)

    monkeypatch.setattr(m, "decode", look)
    r = generate(m, PROMPTS, samples_per_prompt=8, max_new_tokens=30)
    alive = [int((r.lengths > step).sum()) for step in range(1, 30)]
    assert sizes == [n for n in alive if n]
    assert sizes[-1] < 32


def test_where_every_row_ends_at_once_nothing_is_decoded(monkeypatch):
    def always_ends(logits, noise, temperature):
        return torch.full_like(noise, EOS, dtype=torch.long), torch.zeros_like(noise), torch.zeros_like(noise)

    m = make()
    monkeypatch.setattr(m, "decode", None)
    monkeypatch.setattr(sample, "sample_token", always_ends)
    r = generate(m, PROMPTS, max_new_tokens=30)
    assert r.lengths.tolist() == [1] * 4
    assert r.texts() == [""] * 4
    assert r.tokens.size(1) == len(encode_prompt(PROMPTS[2])) + 1  # the longest prompt and the end token
    assert (r.tokens[r.mask] == EOS).all()


def test_no_two_samples_share_noise():
    noise = row_noise(3, range(64), 50)
    assert len({tuple(row) for row in noise.tolist()}) == 64
    assert (row_noise(4, range(64), 50) != noise).all()
    r = generate(make(), ["1+1"], samples_per_prompt=16, max_new_tokens=20)
    assert len({tuple(row) for row in r.tokens.tolist()}) == 16


def test_noise_depends_on_seed_and_row_alone():
    noise = row_noise(7, range(10), 30)
    assert noise.dtype == np.float32
    assert 0 < noise.min()
    assert noise.max() <= 1
    assert (row_noise(7, [8], 12)[0] == noise[8, :12]).all()
    assert abs(row_noise(0, range(200), 200).mean() - 0.5) < 0.01


def test_same_seed_same_samples():
    m = make()
    a, b, c = (generate(m, PROMPTS, samples_per_prompt=2, max_new_tokens=15, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.logprobs, b.logprobs)
    assert not torch.equal(a.tokens, c.tokens)


def test_greedy():
    m = make()
    r = generate(m, PROMPTS, samples_per_prompt=2, max_new_tokens=10, temperature=0, seed=1)
    assert torch.equal(r.tokens[::2], r.tokens[1::2])
    logits, _ = m(r.tokens)
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


def test_the_tokens_and_log_probs_of_a_distribution_by_hand():
    """Probabilities 1/8, 1/2, 3/8: noise up to 1/8 draws the first, up to 5/8 the second, above it the third."""
    noise = torch.tensor([1e-9, 0.124, 0.126, 0.624, 0.626, 1.0])
    logits = torch.tensor([0.125, 0.5, 0.375]).log().expand(6, 3) + 7.0  # a constant added to all changes nothing
    token, logprob, entropy = sample_token(logits, noise, 1.0)
    assert token.tolist() == [0, 0, 1, 1, 2, 2]
    assert logprob.tolist() == pytest.approx(np.log([0.125, 0.125, 0.5, 0.5, 0.375, 0.375]), abs=1e-6)
    expected = -(0.125 * np.log(0.125) + 0.5 * np.log(0.5) + 0.375 * np.log(0.375))
    assert entropy.tolist() == pytest.approx([expected] * 6, abs=1e-6)
    # at temperature 1/2 probabilities are squared, then scaled: 1/26, 16/26, 9/26
    token, logprob, _ = sample_token(logits, torch.full((6,), 0.05), 0.5)
    assert token.tolist() == [1] * 6
    assert logprob.tolist() == pytest.approx([np.log(16 / 26)] * 6, abs=1e-6)


def test_greedy_takes_the_likeliest_and_reports_the_distribution_of_temperature_1():
    logits = torch.tensor([[0.125, 0.5, 0.375], [0.8, 0.1, 0.1]]).log()
    token, logprob, entropy = sample_token(logits, torch.tensor([1.0, 1.0]), 0)
    assert token.tolist() == [1, 0]
    assert logprob.tolist() == pytest.approx(np.log([0.5, 0.8]), abs=1e-6)
    assert torch.equal(entropy, sample_token(logits, torch.ones(2), 1.0)[2])


def test_what_has_no_probability_is_never_drawn():
    logits = torch.tensor([[-float("inf"), 0.0, -float("inf"), 0.0, -float("inf")]]).expand(4, 5)
    noise = torch.tensor([1e-9, 0.5, 0.50001, 1.0])
    token, logprob, _ = sample_token(logits, noise, 1.0)
    assert token.tolist() == [1, 1, 3, 3]
    assert logprob.tolist() == pytest.approx([-0.693147] * 4)


def test_sampling_is_in_float32_whatever_the_logits_are():
    logits = torch.randn(4, 200).bfloat16()
    noise = torch.rand(4)
    for low, high in zip(sample_token(logits, noise, 0.7), sample_token(logits.float(), noise, 0.7)):
        assert torch.equal(low, high)


def test_entropy_is_of_the_distribution_drawn_from():
    logits = torch.randn(3, 10)
    _, _, entropy = sample_token(logits, torch.full((3,), 0.5), 0.5)
    want = torch.distributions.Categorical(logits=logits / 0.5).entropy()
    torch.testing.assert_close(entropy, want)


# Compaction


def test_finished_rows_are_those_that_drew_the_end_token():
    assert finished_rows(torch.tensor([5, EOS, PAD, EOS, 0])) == [1, 3]
    assert finished_rows(torch.tensor([5, PAD])) == []
    assert finished_rows(torch.tensor([EOS] * 3)) == [0, 1, 2]


def test_compaction_as_in_its_docstring():
    cache = KVCache(make(), 5, 4)
    row, position = compact([1, 3], cache, torch.arange(5), 10 * torch.arange(5))
    assert row.tolist() == [0, 4, 2]
    assert position.tolist() == [0, 40, 20]


@pytest.mark.parametrize("finished", [[0], [5], [0, 5], [4, 5], [0, 1], [1, 2, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
def test_compaction_keeps_each_row_that_goes_on_with_its_keys_and_values(finished):
    cache = KVCache(make(), 6, 4)
    cache.kv.normal_()
    cache.used = 3
    before = cache.kv.clone()
    position = 10 * torch.arange(6)
    row, position = compact(finished, cache, torch.arange(6), position)
    assert sorted(row.tolist()) == [i for i in range(6) if i not in finished]
    assert torch.equal(position, 10 * row)
    assert torch.equal(cache.kv[..., :3, :], before[:, :, row, :, :3])


# A rollout


def rollout():
    """Two rows: prompt 1 2 and response 5 6 <eos>; prompt 1 and response 7 cut short. Each field counts from its own."""
    tokens = torch.tensor([[1, 2, 53, 54, EOS, PAD], [1, 55, PAD, PAD, PAD, PAD]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]]).bool()
    logprobs = torch.arange(12.0).view(2, 6)
    routes = torch.arange(48).view(2, 6, 2, 2).to(torch.uint8)
    return Rollout(tokens, mask, logprobs, 100 + logprobs, routes, mask.sum(1))


def test_spans_and_texts_of_a_rollout():
    r = rollout()
    assert r.spans == [(2, 5), (1, 2)]
    assert r.texts() == ["56", "7"]


def test_the_texts_of_what_was_generated():
    m = make(eos_bias=6.0)
    r = generate(m, PROMPTS, samples_per_prompt=8, max_new_tokens=30)
    texts = r.texts()
    assert len(texts) == 32
    for row, (start, end) in enumerate(r.spans):
        assert texts[row] == tokenizer.decode([token for token in r.tokens[row, start:end].tolist() if token != EOS])


def test_a_rollout_is_cut_to_its_first_places():
    whole = rollout()
    part = whole.cut(5)
    for name in ("tokens", "mask", "logprobs", "entropy", "routes"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[:, :5])
    assert torch.equal(part.lengths, whole.lengths)
    assert part.spans == whole.spans


def test_rows_of_a_rollout_are_selected_and_cut_to_the_longest():
    whole = rollout()
    for rows, width in (([1, 0], 5), ([1], 2), ([0, 0, 1], 5)):
        part = whole.select(rows)
        for name in ("tokens", "mask", "logprobs", "entropy", "routes"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows][:, :width])
        assert torch.equal(part.lengths, whole.lengths[rows])
        assert part.spans == [whole.spans[row] for row in rows]
        del part.spans  # handed on, they are those that it would compute
        assert part.spans == [whole.spans[row] for row in rows]
        assert part.texts() == [whole.texts()[row] for row in rows]
    none = whole.select([])
    assert none.tokens.shape == (0, 0) and none.spans == none.texts() == []


# What does not fit


def test_bad_input_says_so():
    m = make()
    for call, message in [
        (dict(prompts=[]), "at least one prompt"),
        (dict(prompts=["1"], samples_per_prompt=0), "at least one"),
        (dict(prompts=["1"], max_new_tokens=0), "at least one"),
        (dict(prompts=["1"], temperature=-1), "temperature is -1"),
        (dict(prompts=["1"], temperature=float("nan")), "temperature is nan"),
        (dict(prompts=["1"], temperature=1e-40), "temperature is 1e-40"),
        (dict(prompts=[[]]), "a prompt is empty"),
        (dict(prompts=[[1, 263]]), "token 263 of a prompt is outside"),
        (dict(prompts=[[-1]]), "token -1 of a prompt is outside"),
        (dict(prompts=["1" * 60]), "exceed the context of 64"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(m, **({"max_new_tokens": 8} | call))


# Devices


def test_the_sampler_stays_on_the_device(monkeypatch):
    """The whole loop, rows ending included, on tensors that claim to be on a GPU. The host's one look is stood in for."""
    looks = iter([[], [1, 4], [0], [], [0, 1]])
    monkeypatch.setattr(sample, "finished_rows", lambda token: next(looks))
    with fake_gpu() as device:
        with device:
            m = Transformer(ModelConfig(**SIZES))
        r = generate(m, ["1+1", "2"], samples_per_prompt=3, max_new_tokens=5)
        for name in ("tokens", "mask", "logprobs", "entropy", "routes", "lengths"):
            assert getattr(r, name).device == device
