# SPDX-License-Identifier: MIT
"""From text to tokens and back, and batched sampling with a cache. Also a command: ask a checkpoint a question.

    python sample.py --checkpoint out/tiny-chain-sum-seed0/gspo.pt "9-1-4+7"
    python sample.py --checkpoint out/tiny-chain-sum-seed0/gspo.pt --samples 8 --temperature 1 < questions.txt

What a sampler for RL must get right, and how it is done here:
  - the log-probs are those of the distribution that was sampled from: the whole vocabulary, at the temperature used;
  - the end token is kept and masked in: the policy chose it, so it is trained;
  - the noise of a row depends on (seed, row) alone, so that no result depends on how rows are batched;
  - rows that have ended leave the batch at once, and a prompt is read once for all samples of its group.

Letters: P prompts, G samples per prompt (the group), B = P*G rows, T tokens, L layers, E experts, K experts per token.
"""

import sys
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import tiktoken
import torch

from model import KVCache

# 256 bytes and a few tags. Every digit is a token, so place value is not hidden by merges, and any text round-trips.
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<think>", "</think>", "<answer>", "</answer>")
tokenizer = tiktoken.Encoding(
    "bytes-and-tags",
    pat_str=r"(?s:.)",  # (?s: lets the dot match newlines too
    mergeable_ranks={bytes([byte]): byte for byte in range(256)},
    special_tokens={token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)},
)
PAD, BOS, EOS, THINK = (tokenizer.encode_single_token(token) for token in ("<pad>", "<bos>", "<eos>", "<think>"))


def encode_prompt(text):
    """The template of a prompt. What the text contains is data: "<eos>" typed by a user stays five characters."""
    return [BOS, *tokenizer.encode_ordinary(text)]


def encode_response(text):
    """Tokens of a worked solution: the one place where tags in a text become special tokens, since we wrote them."""
    return [*tokenizer.encode(text, allowed_special={"<think>", "</think>", "<answer>", "</answer>"}), EOS]


def decode_response(tokens):
    """Text of a response (list of ids), up to its end token. Raises ValueError for an id outside the vocabulary."""
    tokens = list(tokens)
    if EOS in tokens:
        tokens = tokens[: tokens.index(EOS)]
    unknown = [token for token in tokens if not 0 <= token < tokenizer.n_vocab]
    if unknown:
        raise ValueError(f"token id {unknown[0]} is outside the vocabulary of {tokenizer.n_vocab}")
    return tokenizer.decode(tokens)


@dataclass
class Rollout:
    """What `generate` returns. Row p*G + g is sample g of prompt p."""

    tokens: torch.Tensor  # (B, T) int64: prompt, response, padding on the right
    mask: torch.Tensor  # (B, T) bool: True on the response, its end token included
    logprobs: torch.Tensor  # (B, T) float32 of the sampled tokens, 0 elsewhere
    entropy: torch.Tensor  # (B, T) float32, in nats, of the distribution each token was drawn from, 0 elsewhere
    routes: torch.Tensor  # (B, T, L, K) uint8: the experts each token went through; arbitrary where none did
    lengths: torch.Tensor  # (B,) int64: tokens in the response

    @cached_property
    def spans(self):
        """For each row (start, end): its response is tokens[start:end], end token included. Computed once."""
        place = torch.arange(1, self.mask.size(1) + 1, device=self.mask.device)
        ends = (self.mask * place).amax(1)
        return list(zip((ends - self.lengths).tolist(), ends.tolist()))

    def cut(self, width, rows=slice(None)):
        """The first `width` places of these rows: a Rollout."""
        tensors = {}
        for field in fields(self):
            x = getattr(self, field.name)[rows]
            tensors[field.name] = x if x.dim() == 1 else x[:, :width]
        return Rollout(**tensors)

    def select(self, rows):
        """These rows (a list) alone, cut to the longest of them: a Rollout."""
        spans = [self.spans[row] for row in rows]
        part = self.cut(max((end for _, end in spans), default=0), rows)
        part.spans = spans  # known already: the device need not be asked
        return part

    def texts(self):
        """The responses as text, a list of B."""
        return [decode_response(row[start:end]) for row, (start, end) in zip(self.tokens.tolist(), self.spans)]


@torch.no_grad()
def generate(model, prompts, *, samples_per_prompt=1, max_new_tokens, temperature=1.0, seed=0, first_row=0):
    """Sample `samples_per_prompt` responses to each prompt; temperature 0 is greedy. Returns a Rollout.

    prompts: list of texts, or of lists of token ids. first_row: where this batch starts in a larger
    one, so that its parts draw the same noise as the whole. In greedy decoding the log-probs are those
    of temperature 1. Raises ValueError for an empty prompt, sizes below 1, or what does not fit the model's context.
    """
    prompts = [encode_prompt(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    check_request(model.config, prompts, samples_per_prompt, max_new_tokens, temperature)
    device = model.embed.weight.device
    group = samples_per_prompt
    rows = len(prompts) * group

    # Prefill: every prompt is read once; every sample of its group gets a copy of its keys and values.
    lengths = [len(prompt) for prompt in prompts]
    pad = PAD if PAD < model.config.vocab_size else 0  # a model of another vocabulary may lack it
    padded = torch.tensor([prompt + [pad] * (max(lengths) - len(prompt)) for prompt in prompts], device=device)
    slots = max(lengths) + max_new_tokens
    cache = KVCache(model, rows, slots)
    x, prompt_routes, _ = model.features(padded, cache=cache)
    out = empty_rollout(padded.repeat_interleave(group, 0), prompt_routes.repeat_interleave(group, 0), slots, pad)

    # Decode: one token per row and turn. row[i] is the row of the output that place i of the batch writes.
    noise = torch.from_numpy(row_noise(seed, range(first_row, first_row + rows), max_new_tokens)).to(device)
    row = torch.arange(rows, device=device)
    ends = torch.tensor(lengths, device=device)
    position = ends.repeat_interleave(group)  # (B,): where the next token goes
    x = x[torch.arange(len(prompts), device=device), ends - 1].repeat_interleave(group, dim=0)  # (B, C)
    for step in range(max_new_tokens):
        token, logprob, entropy = sample_token(model.head(x), noise[row, step], temperature)
        out.tokens[row, position] = token
        out.mask[row, position] = True
        out.logprobs[row, position] = logprob
        out.entropy[row, position] = entropy
        finished = finished_rows(token)
        if len(finished) == len(row) or step == max_new_tokens - 1:
            break
        if finished:
            row, position, token = compact(finished, cache, row, position, token)
        x, routes = model.decode(token, position, cache)
        out.routes[row, position] = routes.to(torch.uint8)
        position = position + 1

    # Collect: cut what no row can have filled.
    out.lengths = out.mask.sum(1)
    width = slots if step == max_new_tokens - 1 else int(out.mask.nonzero()[:, 1].max()) + 1
    return out.cut(width)


def check_request(config, prompts, samples_per_prompt, max_new_tokens, temperature):
    """Raise ValueError, saying why, where `generate` cannot do this. prompts: lists of token ids."""
    if not prompts or samples_per_prompt < 1 or max_new_tokens < 1:
        raise ValueError("generate needs at least one prompt, one sample and one new token")
    if temperature != 0 and not 1e-6 <= temperature < float("inf"):  # below that, logits overflow
        raise ValueError(f"temperature is {temperature}: it must be 0 (greedy), or 1e-6 and more")
    if not all(prompts):
        raise ValueError("a prompt is empty")
    for token in (token for prompt in prompts for token in prompt):
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"token {token} of a prompt is outside the vocabulary of {config.vocab_size}")
    longest = max(map(len, prompts))
    if longest + max_new_tokens > config.context:
        raise ValueError(f"{longest} prompt and {max_new_tokens} new tokens exceed the context of {config.context}")


def empty_rollout(prompts, routes, slots, pad):
    """A Rollout of (B, `slots`) places that holds the prompts (B, t) and their routes (B, t, L, K)."""
    rows, width, layers, k = routes.shape
    device = prompts.device
    tokens = torch.full((rows, slots), pad, device=device)
    tokens[:, :width] = prompts
    all_routes = torch.arange(k, dtype=torch.uint8, device=device).repeat(rows, slots, layers, 1)
    all_routes[:, :width] = routes.to(torch.uint8)
    mask = torch.zeros(rows, slots, dtype=torch.bool, device=device)
    logprobs = torch.zeros(rows, slots, device=device)
    return Rollout(tokens, mask, logprobs, torch.zeros_like(logprobs), all_routes, lengths=mask.sum(1))


def compact(finished, cache, *by_row):
    """Compaction: rows that have finished leave the batch, and the last ones move into the gaps.

        places       0 1 2 3 4     1 and 3 have finished: 4 moves to 1
        afterwards   0 4 2

    finished: a sorted list of places; by_row: (B,) tensors. Returns these without the finished rows.
    """
    left = len(by_row[0]) - len(finished)
    gaps = [place for place in finished if place < left]
    movers = [place for place in range(left, left + len(finished)) if place not in finished]
    source = torch.tensor(movers, dtype=torch.long, device=by_row[0].device)
    target = torch.tensor(gaps, dtype=torch.long, device=by_row[0].device)
    for x in by_row:
        x[target] = x[source]
    cache.compact(left, source, target)
    return [x[:left] for x in by_row]


def finished_rows(token):
    """The places of the batch that just drew the end token, a sorted list. Only here the host waits for the device."""
    return [place for place, finished in enumerate((token == EOS).tolist()) if finished]


def sample_token(logits, noise, temperature):
    """logits: (B, V); noise: (B,) in (0, 1] -> (token, its log-prob, the distribution's entropy), (B,) each."""
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    probs = logprobs.exp()
    if temperature == 0:
        token = logprobs.argmax(-1)
    else:  # inverse transform: the first token whose cumulated probability reaches the noise, which is > 0
        cumulated = probs.cumsum(-1)
        token = (cumulated < noise[:, None] * cumulated[:, -1:]).sum(-1)
    logprob = logprobs.gather(-1, token[:, None])[:, 0]
    entropy = -(probs * logprobs).sum(-1)
    return token, logprob, entropy


def row_noise(seed, rows, count):
    """(len(rows), count) float32 in (0, 1]: a counter-based generator (Philox) for each row, keyed by (seed, row)."""
    keys = [np.array([seed % 2**64, row], dtype=np.uint64) for row in rows]
    generators = [np.random.Generator(np.random.Philox(key=key)) for key in keys]
    return np.stack([1 - generator.random(count, dtype=np.float32) for generator in generators])


def main(argv):
    from harness import Parser, UserError, pick_device, printable  # here, so that all above can be copied without them
    from model import load_model
    from rewards import TASKS, extract_answer, read_problem, reward

    parser = Parser(description="Ask a trained checkpoint a question, and check its answer.")
    parser.add_argument("question", nargs="?", help="the problem, such as 9-1-4+7; without it, one a line from stdin")
    parser.add_argument("--checkpoint", required=True, help="a .pt file that train.py wrote")
    parser.add_argument("--samples", type=int, default=1, help="responses per question")
    parser.add_argument("--temperature", type=float, help="0 is greedy; if not given, 0 for one sample, 1 for several")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="longest response")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling noise")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="where to run")
    args = parser.parse_args(argv)
    options = {"samples_per_prompt": args.samples, "max_new_tokens": args.max_new_tokens, "seed": args.seed}
    options["temperature"] = args.temperature if args.temperature is not None else float(args.samples > 1)
    try:
        model, metadata = load_model(args.checkpoint, device=pick_device(args.device))
    except ValueError as error:  # it may quote what a damaged file holds
        raise UserError(printable(str(error))) from error
    if metadata.get("special_tokens") != list(SPECIAL_TOKENS) or model.config.vocab_size != tokenizer.n_vocab:
        raise UserError(f"{args.checkpoint} was trained with another vocabulary")
    if metadata.get("task") not in list(TASKS):  # a list, since a damaged file may name what no dict could hold
        raise UserError(f"{args.checkpoint} was trained on another task, {metadata.get('task')!r}")
    max_terms = metadata.get("max_terms", float("inf"))
    largest = metadata.get("largest", float("inf"))

    asked = False
    for question in [args.question] if args.question is not None else sys.stdin:
        # without byte order marks, and with ? for bytes that are no text
        question = question.replace("\ufeff", "").encode("utf-8", "replace").decode("utf-8").strip()
        if not question:
            continue
        asked = True
        try:
            problem = read_problem(metadata["task"], question)
        except ValueError as error:
            problem = None
            print(printable(f"sample.py: warning: {error}; answered unchecked"), file=sys.stderr)
        if problem and (len(problem.numbers) > max_terms or max(problem.numbers) > largest):
            trained_on = f"at most {max_terms} terms up to {largest}"
            warning = f"sample.py: warning: {question!r} is beyond what was trained on: {trained_on}"
            print(printable(warning), file=sys.stderr)
        try:
            texts = generate(model, [problem.prompt if problem else question], **options).texts()
        except ValueError as error:
            raise UserError(str(error)) from error
        print(printable(question))
        for text in texts:
            verdict = ""
            if problem:
                verdict = "correct" if reward(problem, [text]) == [1.0] else f"wrong, {problem.answer} is right"
                verdict = f"   [answer: {extract_answer(text)}; {verdict}]"
            print(f"  {printable(text + verdict)}", flush=True)
    if not asked:
        raise UserError("no question: give one as an argument, or one a line on standard input")


if __name__ == "__main__":
    from harness import run_program

    run_program(main)
