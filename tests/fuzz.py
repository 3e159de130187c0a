# SPDX-License-Identifier: MIT
"""rewards.py under fire: strings made to confuse a parser, through every public function.

    python tests/fuzz.py 100000

Checks that nothing but the documented ValueError of `safe_eval` is raised, that rewards are 0, 1 or None, that answers
are found in the text they come from, that text before the last marker changes nothing, and that a wrong number never
pays, and that no call takes more than 10 ms of processor time. Prints the slowest call and the peak of memory. The suite
runs a short version, without the time.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rewards import (  # noqa: E402
    accuracy_reward,
    countdown_reward,
    extract_answer,
    format_reward,
    is_equiv,
    parse_number,
    read_problem,
    safe_eval,
)

LINES = (ROOT / "tests" / "data" / "reward_cases.jsonl").read_text(encoding="utf-8").splitlines()
SEEDS = [json.loads(line)["completion"] for line in LINES]
PIECES = [
    "<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "\\fbox{", "}", "{", "####", "The answer is ", "Answer: ",
    "\\frac{", "\\frac12", "\\dfrac", "\\sqrt{", "\\text{", "\\left(", "\\times", "^{", "$", "$$", "\\(", "\\)", "\\%", "%",
    "1e999999999", "1e5", "9" * 70, "0" * 500, "1/0", "1/3", "-", "--", "+", "**", "//", "^", "!", ",", ".", "1,234", "1,2,3",
    "0x1F", "1_000", "٣", "½", "²", "４", "−", "×", "÷", "€", "inf", "nan", "None", "True", "__import__('os')", "lambda: 1",
    "().__class__", "(" * 60, ")" * 60, "-" * 120, "[" * 99, "\x00", "\ud800", "\u202e", "\n", "\t", " ", "or", "and", "apples",
    "3 + 8", "8-3", "(8-3)*5", "5 = 5", "x = ", "12:00", "a" * 300, "\\" * 50, "{" * 80, "$" * 80, "*" * 80, "\\text" * 40,
]  # fmt: skip
UNICODE = (*range(0x20, 0x7F), *range(0xA0, 0x250), *range(0x660, 0x66A), *range(0x2000, 0x2070), 0x1F600, 0x10FFFF)


def text(rng):
    """A random string: joined fragments, a mutated case from a bug report, or random characters."""
    kind = rng.random()
    if kind < 0.4:
        return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))
    if kind < 0.8:
        chars = list(rng.choice(SEEDS)) or [""]
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(chars))
            chars[at] = rng.choice(
                ["", chars[at] * 2, rng.choice(PIECES), rng.choice(string.printable), rng.choice(chars)]
            )
        return "".join(chars) * rng.choice([1, 1, 1, 2, 30])
    if kind < 0.9:
        return "".join(chr(rng.choice(UNICODE)) for _ in range(rng.randint(0, 60)))
    return "".join(rng.choice("0123456789.,/+-*() eE%$\\{}") for _ in range(rng.randint(0, 260)))


def timed(function, args, kwargs, times):
    """The call's result; its processor time, in seconds, is added to `times`."""
    began = time.thread_time()
    try:
        return function(*args, **kwargs)
    finally:
        times.append(time.thread_time() - began)


def attack(count, seed=0):
    """Raises AssertionError at the first surprise. Returns (seconds, function, arguments) of the slowest call."""
    rng, slowest = random.Random(seed), (0.0, "", "")

    def call(function, *args, **kwargs):
        nonlocal slowest
        times = []
        try:
            return timed(function, args, kwargs, times)
        finally:
            if times[0] > max(1e-3, slowest[0]):  # a pause of the machine does not come five times, slow work does
                for _ in range(4):
                    with suppress(ValueError):
                        timed(function, args, kwargs, times)
            slowest = max(slowest, (min(times), function.__name__, repr(args)[:200]))

    for _ in range(count):
        s, gold = text(rng), str(rng.randint(-99, 99))
        answers = [call(extract_answer, s, fallback=fallback) for fallback in (False, True)]
        for answer in answers:
            assert answer is None or (answer and answer == answer.strip()), s
        value = call(parse_number, s)
        assert value is None or isinstance(value, Fraction), s
        assert not call(is_equiv, s, s) or value is not None, s
        for other in (gold, "1/3"):
            assert call(is_equiv, s, other) in (True, False)
        try:
            value, numbers = call(safe_eval, s)
            assert isinstance(value, Fraction) and all(type(n) is int for n in numbers), s
        except ValueError:
            pass
        try:
            call(read_problem, rng.choice(["chain-sum", "countdown"]), s)
        except ValueError:
            pass
        messages = [{"role": "assistant", "content": s}]
        for completion in (s, messages):
            paid = call(accuracy_reward, [completion], [gold], fallback=rng.random() < 0.5)[0]
            assert paid in (0.0, 1.0), s
            assert call(accuracy_reward, [completion], [s])[0] in (0.0, 1.0, None), s
            assert call(format_reward, [completion], think_prefilled=rng.random() < 0.5)[0] in (0.0, 1.0), s
            assert call(countdown_reward, [completion], [[3, 5, 8]], [25])[0] in (0.0, 1.0), s
        # what stands before the last marker does not matter, and a wrong number there never pays
        wrong = str(int(gold) + rng.choice([-1, 1, 10]))
        before = s
        while "<think>" in before:  # cutting one out can leave another
            before = before.replace("<think>", "")
        assert extract_answer(f"{before}<answer>{wrong}</answer>") == wrong, s
        assert accuracy_reward([f"{before}<answer>{wrong}</answer>"], [gold]) == [0.0], s
        assert accuracy_reward([f"{before}<answer>{gold}</answer>"], [gold]) == [1.0], s
    return slowest


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    seconds, function, args = attack(count)
    print(f"{count} strings; slowest call {1e3 * seconds:.1f} ms: {function}{args}")
    if seconds > 0.01:
        sys.exit("fuzz.py: a call took more than 10 ms of processor time, five times in a row")
    tracemalloc.start()
    attack(count // 50, seed=1)
    print(f"peak of memory over {count // 50} more: {tracemalloc.get_traced_memory()[1] / 2**20:.1f} MiB")
