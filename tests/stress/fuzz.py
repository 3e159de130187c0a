# SPDX-License-Identifier: MIT
"""rewards.py under fire: strings made to confuse a parser, through every public function.

    python tests/stress/fuzz.py 100000

Only the documented ValueError may be raised, rewards are 0, 1 or None, text before the last marker changes nothing, a
wrong number never pays, and no call takes more than 10 ms of processor time. The suite runs it short and untimed.
"""

import json
import random
import string
import sys
import time
import tracemalloc
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import rewards  # noqa: E402

LINES = (ROOT / "tests" / "data" / "reward_cases.jsonl").read_text(encoding="utf-8").splitlines()
SEEDS = [json.loads(line)["completion"] for line in LINES]
PIECES = [
    "<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "\\fbox{", "}", "{", "####", "The answer is ", "Answer: ",
    "\\frac{", "\\frac12", "\\dfrac", "\\sqrt{", "\\text{", "\\left(", "\\times", "^{", "$", "$$", "\\(", "\\)", "\\%", "%",
    "1e999999999", "1e5", "9" * 70, "0" * 500, "1/0", "1/3", "-", "--", "+", "**", "//", "^", "!", ",", ".", "1,234", "1,2,3",
    "0x1F", "1_000", "٣", "½", "²", "４", "−", "×", "÷", "€", "inf", "nan", "None", "True", "__import__('os')", "lambda: 1",
    "().__class__", "(" * 60, ")" * 60, "-" * 120, "[" * 99, "\x00", "\ud800", "\u202e", "\n", "\t", " ", "or", "and", "apples",
    "3 + 8", "8-3", "(8-3)*5", "5 = 5", "x = ", "12:00", "a" * 300, "\\" * 50, "{" * 80, "$" * 80, "*" * 80, "\\text" * 40,
    "<|im_end|>", "</s>", " per day", "m^3", " a", ", ", "\\,000", "\\,", "\\!", " \\times 10^{3}", "x10^", "answer", " is", "*",
]  # fmt: skip
UNICODE = (*range(0x20, 0x7F), *range(0xA0, 0x250), *range(0x660, 0x66A), *range(0x2000, 0x2070), 0x1F600, 0x10FFFF)


def text(rng):
    """A random string: joined fragments, one repeated, a mutated case from a bug report, or random characters."""
    kind = rng.random()
    if kind < 0.4:
        return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))
    if kind < 0.8:
        chars = list(rng.choice(SEEDS)) or [""]
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(chars))
            pieces = rng.choices(PIECES, k=2)
            chars[place] = rng.choice(["", chars[place] * 2, *pieces, rng.choice(string.printable)])
        return "".join(chars) * rng.choice([1, 1, 1, 2, 30])
    if kind < 0.9:
        return "".join(chr(rng.choice(UNICODE)) for _ in range(rng.randint(0, 60)))
    if kind < 0.91:
        start, fragment, end = rng.choices(PIECES, k=3)
        return start + fragment * (16000 // len(fragment)) + end
    return "".join(rng.choice("0123456789.,/+-*() eE%$\\{}") for _ in range(rng.randint(0, 260)))


def timed(function, args, kwargs, times):
    """The call's result; its processor time, in seconds, is added to `times`."""
    began = time.thread_time()
    try:
        return function(*args, **kwargs)
    finally:
        times.append(time.thread_time() - began)


class Calls:
    """Calls public functions of rewards.py, and remembers the slowest call."""

    def __init__(self):
        self.seconds = 0.0
        self.slowest = ""

    def __call__(self, name, *args, **kwargs):
        """What the call returns or raises."""
        function = getattr(rewards, name)
        times = []
        try:
            return timed(function, args, kwargs, times)
        finally:
            if times[0] > max(1e-3, self.seconds):  # a pause of the machine does not come five times, slow work does
                for _ in range(4):
                    with suppress(ValueError):
                        timed(function, args, kwargs, times)
            if min(times) > self.seconds:
                self.seconds = min(times)
                self.slowest = f"{name}({str(args)[:200]}), {len(str(args))} characters"


def attack(count, seed=0):
    """Raises AssertionError at the first surprise, with the string that caused it. Returns the `Calls` it made."""
    rng = random.Random(seed)
    call = Calls()
    for _ in range(count):
        s = text(rng)
        gold = str(rng.randint(-99, 99))
        fallback = rng.random() < 0.5
        attack_parsers(call, s, gold, rng)
        attack_rewards(call, s, gold, fallback)
        attack_last_marker(call, s, gold, rng)
    return call


def attack_parsers(call, s, gold, rng):
    for answer in (call("extract_answer", s), call("extract_answer", s, fallback=True)):
        assert answer is None or (answer and answer == answer.strip()), s
    value = call("parse_number", s)
    assert value is None or isinstance(value, Fraction), s
    to_itself = call("is_equiv", s, s)
    assert to_itself in ([False] if value is None else [True, False]), s  # 84/7 is no answer to 84/7
    assert call("is_equiv", s, gold) in (True, False), s
    assert call("is_equiv", gold, s) in (True, False), s
    with suppress(ValueError):
        value, numbers = call("safe_eval", s)
        assert isinstance(value, Fraction), s
        assert all(type(n) is int for n in numbers), s
    with suppress(ValueError):
        call("read_problem", rng.choice(["chain-sum", "countdown"]), s)


def attack_rewards(call, s, gold, fallback):
    for completion in (s, [{"role": "assistant", "content": s}]):
        assert call("accuracy_reward", [completion], [gold], fallback=fallback)[0] in (0.0, 1.0), s
        assert call("accuracy_reward", [completion], [s])[0] in (0.0, 1.0, None), s
        assert call("format_reward", [completion], think_prefilled=fallback)[0] in (0.0, 1.0), s
        assert call("countdown_reward", [completion], [[3, 5, 8]], [25])[0] in (0.0, 1.0), s


def attack_last_marker(call, s, gold, rng):
    """What comes before the last marker changes nothing: right is paid, wrong is not."""
    wrong = str(int(gold) + rng.choice([-1, 1, 10]))
    before = s
    while "<think>" in before:  # cutting one out can leave another
        before = before.replace("<think>", "")
    for said in (wrong, gold):
        for form in ("<answer>{}</answer>", "</think>\\boxed{{{}}}", "</think>#### {}\n"):
            completion = before + form.format(said) + f" {gold} "
            assert call("extract_answer", completion) == said, s
            assert call("accuracy_reward", [completion], [gold]) == [float(said == gold)], s


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    calls = attack(count)
    print(f"{count} strings; slowest call {1e3 * calls.seconds:.1f} ms: {calls.slowest}")
    if calls.seconds > 0.01:
        sys.exit("fuzz.py: a call took more than 10 ms of processor time, five times in a row")
    tracemalloc.start()
    attack(count // 50, seed=1)
    print(f"peak of memory over {count // 50} more: {tracemalloc.get_traced_memory()[1] / 2**20:.1f} MiB")
