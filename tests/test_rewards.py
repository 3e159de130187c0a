# SPDX-License-Identifier: MIT
import json
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import fuzz
import pytest

import rewards
from sample import tokenizer

CASES = [json.loads(line) for line in fuzz.LINES]
assert len(CASES) == 141


def score(case):
    """What our functions give a case from the public bug reports; None (unverifiable) pays nothing."""
    completion, gold = case["completion"], case["gold"]
    if case["task"] == "countdown":
        return rewards.countdown_reward([completion], [gold["numbers"]], [gold["target"]])[0]
    if case["task"] == "format":
        return rewards.format_reward([completion], think_prefilled="prefilled" in case["kind"])[0]
    if case["task"] == "tokenizer":
        ids = tokenizer.encode_ordinary(completion)
        return int(tokenizer.decode(ids) == gold and len(ids) == len(completion.encode()))
    return rewards.accuracy_reward([completion], [gold], fallback=case["mode"] == "lenient")[0] or 0


@pytest.mark.parametrize("case", CASES, ids=[f"{c['id']}-{c['kind']}" for c in CASES])
def test_public_bug_reports(case):
    assert score(case) == case["expected"], case["note"]


EXTRACTED = [
    ("<think>a", None),  # unclosed
    ("<think>a</think> b <think> \\boxed{5}", None),
    ("<answer>5</answer><answer>6", None), ("<answer>5</answer><answer> </answer>", None),  # unterminated, empty last
    ("\\boxed{5} \\boxed{}", None), ("\\boxed{5} \\boxed", None), ("\\boxed 5", None), ("\\boxed{5} \\boxes{6}", "5"), ("\\boxed {5}", "5"),
    ("\\boxed{a{b}c}", "a{b}c"), ("\\boxed{\\{5\\}}", "\\{5\\}"), ("#### 5\n#### ", None),
    ("#### 5\nmore", "5"), ("####\n5", "5"), ("#### 5. So", "5"), ("#### Answer: 5", "5"),
    ("The answer is 5. Then 6.", "5"), ("The answer is 3.5 m. Done", "3.5 m"), ("The answer is 5. 6", "5. 6"),
    ("**Answer:** 5", "5"), ("**The answer is 5.** So", "5"), ("The answer is:\n\\[\n5\n\\]", "5"),
    ("the answer is 4; the answer is:", None), ("it is 5", None),
    ("#### 5<|eot_id|>6", "5"), ("Answer: 5</s>", "5"), ("The answer is 5.<|im_end|>\n<|im_start|>user", "5"),
    ("\\boxed{5} so <answer>6</answer>", "6"), ("<answer>6</answer> so \\boxed{5}", "6"),  # tags before boxes
    ("The answer is therefore 3.", "3"), ("The answer is, thus, $3$", "$3$"), ("The answer is therefore not 3.", "not 3"),
    ("\\boxed{6}. The final answer is 5.", "5"), ("\\boxed{6}. The final answer is right.", "6"),
    ("Final answer: 5, or \\boxed{6}", "6"), ("\\boxed{" + "5" * 300 + "}", None),
    ("\\boxed{6} so the answer is 5", "6"), ("The answer is 5\n#### 6", "6"), ("#### 6\nThe answer is 5", "5"),
]  # fmt: skip
LAST_NUMBERS = [
    ("so 72.", "72"), ("2+3=5", "5"), ("1 1/4 cups", "1 1/4"), ("there are 3 left, then 4 left", "4"), ("(42)", "42"),
    ("none", None), ("<answer></answer> 5", None),  # a marker, though empty, forbids the fallback
    ("<think>5", None), ("<think>5</think> none", None), ("so \\(42\\)<|im_end|>", "42"),
    ("x = - 5", "- 5"), ("it moves by - 2.", "- 2"), ("- $5", "- $5"), ("5 / 6", "5 / 6"), ("so \\(\\frac{1}{2}\\)", "1/2"), ("\\text{5}", "5"),
    ("so $-\\frac{3}{8}$ of it", "- 3/8"), ("= 50 %", "50 %"), ("it is 50\\% of them", "50\\%"), ("it costs \\$1,200 a month", "\\$1,200"),
    ("so 2\\frac12 cups", "2 1/2"), ("so 3.2 \\times 10^{3}", "3.2e3"), ("**Total:** 5", "5"), ("Total:5", "5"), ("5 m^3 of sand", "5"), ("so 5°C", "5°"),
    ("5\\text{ cm}^2", "5"), ("$18/2 = $<<18/2=9>>9 each", "$9"), ("60 miles - 35 miles = 25 miles between the stops", "25"),
    ("it rang 22 times", "22"), ("she read 240 pages in two weeks", "240"), ("10 cats, the other half is 20", "20"), ("it is so (since 4+6=10)", "10"), ("in 13 years", "13"),
]  # fmt: skip


# What stands around the last number is another number, a sign, a hedge, a sum, a part of something: no answer.
NO_LAST_NUMBERS = [
    "3 million", "it is 3 hundred", "4 dozen", "4 sixths", "4 eleven", "4 xy", "4 sqrt", "4 alpha", "4x", "4 x", "4\\pi", "4i", "3 below zero",
    "it is 3 degrees Celsius below zero", "negative 3", "minus 3", "about 3", "at least 3", "3 at most", "more than 3", "up to 3", "not 3",
    "≈ 3", "\\approx 3", "~3", "> 3", ">= 3", "!= 3", "\\ne 3", "10 ^ 3", "2^3", "2**3", "x^2", "x_2", "sqrt( 16 )", "\\sqrt 16", "\\sqrt{16}",
    "log 8", "sin(5)", "f(5)", "5!", "|5|", "3 * 4", "3 x 4", "3 \\times 4", "3 + 4", "3 - 4", "3-4", "3–4", "9 apples - 4 apples", "12 cm by 5 cm", "it can't be 5", "it is not the 5", "9 red apples - 4", "exp(4)", "9 cats / 4",
    "apples + 4", "3 mod 4", "3 times 4", "5 times as many", "1, 2, 3", "n = 1, 2, 3", "(3, 4)", "1, 2 and 3", "3 and 4", "3 or 4", "3 to 4",
    "12 \\text{ and } 13", "3 out of 4", "out of 4", "1 in 4", "3 per 4", "3:4", "12:30", "4 hours 2 minutes", "4 hours and 2 minutes", "half of 4",
    "square root of 4", "twice 4", "1.2.3", "12,34", "1 000", "1_000", "0x10", "--5", "5 ± 1", "A5", "COVID-19", "room 5b", "the 3rd",
    "\\frac{5}{x}", "\\frac{x}{2}", "10^{n+5}", "5 and a half", "5 or more", "5 apples or six", "5 apples and six pears",
]  # fmt: skip


def test_extraction():
    assert [(text, rewards.extract_answer(text)) for text, _ in EXTRACTED] == EXTRACTED
    assert [(text, rewards.extract_answer(text, fallback=True)) for text, _ in LAST_NUMBERS] == LAST_NUMBERS
    assert not any(rewards.extract_answer(text) for text, _ in LAST_NUMBERS)
    assert [text for text in NO_LAST_NUMBERS if rewards.extract_answer(text, fallback=True)] == []


def test_of_a_markers_sentence_the_fallback_takes_the_number_it_ends_in():
    ends_in_34 = [
        "Final Answer: the largest n is 34.",
        "The answer is: n = 34 apples.",
        "Answer: The area of $ABC$ is $34$. I hope so.",
    ]
    for text in ends_in_34:
        assert rewards.accuracy_reward([text], ["34"], fallback=True) == [1.0], text
    others = [
        "the largest n is not 34",
        "either 33 or 34",
        "at most 34",
        "34 or 35",
        "1, 2, 34",
        "n > 34",
        "it is 34 million",
        "33 + 34",
        "34: no",
    ]
    for text in others:
        assert rewards.accuracy_reward([f"Final answer: {text}."], ["34"], fallback=True) == [0.0], text
    assert rewards.accuracy_reward(ends_in_34[:1], ["34"]) == [0.0]


def test_what_stands_before_the_last_marker_does_not_matter():
    for form in ("<answer>7</answer>", "\\boxed{7}", "#### 7", "The answer is 7."):
        for before in ("<think>8</think>", "8 ", form.replace("7", "8") + "\n", "}{ \\frac{1}{2} ", "<|end|>"):
            assert rewards.extract_answer(before + form) == "7", (before, form)


NUMBERS = [
    ("7", 7), ("+7", 7), ("-7", -7), ("- 7", -7), ("−7", -7), ("007", 7), ("7.", 7), ("7.50", "15/2"), (".5", "1/2"),
    ("1,234,567.8", "6172839/5"), ("1{,}234", 1234), ("10,\\!000", 10000), ("10\\;000", 10000), ("$1,000", 1000), ("-$5", -5),
    ("$-5", -5), ("5€", 5), ("£5", 5), ("\\$5", 5), ("5 %", "1/20"), ("5\\%", "1/20"), ("50 percent", "1/2"), ("$5\\%$", "1/20"),
    ("1e3", 1000), ("1.5E-2", "3/200"), ("2e+2", 200), ("1.5 \\times 10^{-2}", "3/200"), ("2·10^2", 200), ("2 x 10^{ 2 }", 200),
    ("3/4", "3/4"), ("-3/4", "-3/4"), ("\\frac{3}{4}", "3/4"), ("\\frac{-3}{4}", "-3/4"), ("-\\tfrac34", "-3/4"),
    ("\\frac3{4}", "3/4"), ("\\frac 3 4", "3/4"), ("2\\frac{1}{2}", "5/2"), ("-2 1/2", "-5/2"), ("2\\ \\frac12 cups", "5/2"),
    ("x = 5", 5), ("= 5", 5), ("\\theta = 5", 5), ("$x=5$", 5), ("\\(5\\)", 5), ("\\[5\\]", 5), ("$$5$$", 5), ("**5**", 5),
    ("__5__", 5), ("`5`", 5), ("(5)", 5), ("{5}", 5), ("\\text{5}", 5), ("\\mathrm{5}", 5), ("\\boxed{5}", 5), ("5**", 5),
    ("\\mathbf{\\frac{1}{2}}", "1/2"), ("\\left(5\\right)", 5), ("5 apples", 5), ("5, altogether", 5), ("5 km/h", 5), ("5kg", 5),
    ("5km/h", 5), ("$5/day", 5), ("5 dollars a day", 5), ("5 miles per hour", 5), ("5\\text{ m/s}^{2}", 5), ("5 m^3", 5),
    ("5 cm²", 5), ("5~\\text{kg}", 5), ("5 sq. ft.", 5), ("$5$ apples", 5), ("**5** apples", 5), ("5°", 5), ("5°C", 5),
    ("4\\mathrm{~m}", 4), ("12 \\mathrm{~cm}^{2}", 12), ("7\\text{~cm}", 7), ("12\\mathrm{~km} / \\mathrm{h}", 12), ("x~=~5", 5), ("5~\\%", "1/20"),
    ("2~\\frac12", "5/2"), ("\\frac{3}{-4}", "-3/4"), ("\\frac{-3}{-4}", "3/4"), ("-\\frac{-3}{4}", "3/4"), ("-\\frac{3}{- 4}", "3/4"), ("3/-4", "-3/4"),
    ("–5", -5), ("– $5", -5), ("11,\\! 111", 11111), ("14{, }916", 14916), ("14 {,} 916", 14916), ("75\\textnormal{ miles}", 75), ("75 \\textsf{cm}", 75),
    ("75\\emph{ miles}", 75), ("75\\textup{ m}", 75), ("75 \\operatorname{miles}", 75), ("28 pct", "7/25"), ("28\\% of the students", "7/25"),
    ("90^\\circ", 90), ("90^{\\circ} F", 90), ("5 \\text{ cm}", 5), ("\\text{5 apples}", 5),
]  # fmt: skip
NO_NUMBERS = [
    "", " ", "-", ".", ",", "five", "3 or 4", "3, 4", "3-4", "3 - 4", "3–4", "3 to 4", "3 and a half", "5 million", "two 5",
    "about 5", "not 5", "5 not 6", "5 or more", "5 and up", "5, or six", "5 six", "~5", "≈5", "±5", "5 \\pm 1", "at least 5", "5 at least", "--5", "+-5",
    "-$-5", "5!", "5?", "5x", "5 x", "5xy", "5i", "5 pi", "5 pi²", "5π", "5\\pi", "5 x^2", "2^3", "2**3", "10^3", "5²", "½", "5½",
    "1/0", "1//2", "1/2/3", "1.5/2", "1 5/4", "1 -1/4", "\\frac123", "2\\frac{1}{-4}", "2\\frac{-1}{4}", "\\frac{3}{--4}", "= ~5", "**~5**", "5~6", "5~x", "1,\\,234", "1, 234", "1{,}23", "5\\textsuperscript{2}",
    "75\\emph{ or so}", "75\\operatorname{xy}", "5\\alpha", "\\frac{1}{2}3", "1/\\frac12", "0,123", "1,23", "12,34,567",
    "1\\,23", "1 000", "1.2.3", "1.234,5", "1,2,3", "1_000", "0x10", "0b1", "1e", "1e999", "1e999999999", "e5", "inf", "nan",
    "Infinity", "True", "٣", "５", "४", "12:00", "2026-12-02", "3b", "5m", "x_1 = 5", "x = y = 5", "x = 5, y = 6", "x > 5", "4\\sqrt{2}",
    "\\sqrt{4}", "5 squared", "5 times 4", "5 times x", "5 times two", "3 fifths", "2 dozen", "|5|", "[5]", "\\{5\\}", "(5)(6)", "**5** **6**", "$5$6$", "$5 or $6",
    "5/six", "5/x", "5%%", "5% or 6%", "5 days (exactly)", "5 minus 3", "5 = 5", "5 > 3", "<5", "7; print(1)", "7, print(1)", "7 # 8",
    "4 hours 2 minutes", "5\x00", "9" * 61, "5 " + "a" * 300, "5" + " " * 300, "9" * 60 + (" " + "a" * 20) * 8, "2\\times3", "2 \\times 1000", "1.5×10³", "5\\\\6", None,
]  # fmt: skip


def test_numbers():
    assert [(text, rewards.parse_number(text)) for text, _ in NUMBERS] == [
        (text, Fraction(value)) for text, value in NUMBERS
    ]
    assert [text for text in NO_NUMBERS if rewards.parse_number(text) is not None] == []


# Words after a number that change it or leave it open, by family; and words that only say what is counted.
LOADED = """
    eleven; twenty-one; twentyone; ninety; over eleven; mod eleven; point eleven; by two; to eleven; out of nine; five hundred; a hundred
    sixths; ninths; tenths; thirds; halves; half; quarters; eighths; twelfths; twentieths; twenty-fifths; hundredths; millionths; first
    crore; crores; lakh; MM; permil; dozenths; bn; mn; tn; mil; k; K; M; B; grand; quadrillion; zillion; milliard; gross; score; dozen; per mille; permille; thou
    below zero; negative; degrees below; minus; subzero; under par; units in the negative
    or so; or more; at most; at least; approximately; maybe; perhaps; not; nor six; unless negative; max; and up; and more; and a half; else
    plus x; divided by three; squared; cubed; doubled; halved; twice; to the power of two; to the fourth; modulo seven; reciprocal
    xy; ab; abc; XY; pq/r; x; n; x y; percent of x; ln; log; sin; exp; sqrt; arctan; sinh; cosec; cosine; root; factorial; gcd; floor
    alpha; Beta; theta; pi; mu; xi; phi; psi; tau; omega; varepsilon; LAMBDA
"""
HARMLESS = """
    clips; apples; times; dollars a day; cups of tea; packs of gum; miles per hour; days a week; more apples; years old; points; seconds
    km; mm; m; kg; g; L; mL; lb; oz; ft; in; min; hrs; mph; km/h; m/s; cm^2; m^3; sq. ft.; kWh; cats; men; kids; eggs; pie; bus; age
    percentage points; square feet; cubic meters; degrees Celsius; pairs of shoes; apples, altogether; apples and oranges; of them; in all
    roots; floors; cubes; tents; tenants; often; logs; tangents; sigmas; thirsty people; powerful cars; stones; pavilions
"""


@pytest.mark.parametrize("form", ["5 {}", "5 \\text{{ {}}}", "$5$ {}", "x = 5.0 {}", "\\mathbf{{5}} {}"])
def test_words_after_a_number(form):
    families = re.split(r"[;\n]\s*", LOADED.strip())
    assert [word for word in families if rewards.parse_number(form.format(word)) is not None] == []
    counted = re.split(r"[;\n]\s*", HARMLESS.strip())
    assert [word for word in counted if rewards.parse_number(form.format(word)) != 5] == []


def test_cardinals_and_ordinals_are_a_grammar():
    """Every number up to a hundred in words, and what it is the denominator of."""
    ones = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
    tens = "twenty thirty forty fifty sixty seventy eighty ninety".split()
    words = ones + tens + [f"{ten}{gap}{one}" for ten in tens for one in ones[:9] for gap in ("-", " ", "")]
    irregular = {
        "one": "first",
        "three": "third",
        "five": "fifth",
        "eight": "eighth",
        "nine": "ninth",
        "twelve": "twelfth",
    }
    for word in words:
        stem, last = re.fullmatch(f"(.*?)({'|'.join([*irregular, 'two', '[a-z]+?'])})", word).groups()
        ordinal = stem + irregular.get(last, re.sub("y$", "ie", last) + "th")
        for said in (word, word.title()) if last == "two" else (word, ordinal, ordinal + "s", ordinal.upper()):
            assert rewards.parse_number(f"5 {said}") is None, said
            assert rewards.extract_answer(f"it is 5 {said}", fallback=True) is None, said


def test_formatting_round_trips():
    rng = random.Random(0)
    for _ in range(1000):
        n, d = rng.randint(-(10**6), 10**6), rng.randint(1, 999)
        value, sign = Fraction(n, d), "-" if n < 0 else ""
        whole, part = divmod(abs(n), d)
        forms = [f"{n}/{d}", f"{sign}\\frac{{{abs(n)}}}{{{d}}}", f"\\boxed{{{n}/{d}}}", f"{sign}{abs(n):,}/{d}"]
        if whole and part:
            forms += [f"{sign}{whole} {part}/{d}", f"{sign}{whole}\\frac{{{part}}}{{{d}}}"]
        assert all(rewards.parse_number(form) == value for form in forms), (n, d)
        cents = f"{abs(n) // 100:,}.{abs(n) % 100:02d}"
        forms = f"{sign}{cents};${sign}{cents}$;{n}%;{n}e-2;{n} \\times 10^{{-2}};{sign}${cents} per m".split(";")
        assert all(rewards.parse_number(form) == Fraction(n, 100) for form in forms), n


EQUAL = [("0.1", "1/10"), ("12", "84/7"), ("12.0", "12"), ("3/20", "15%"), ("5", 5), ("1e3", "1,000"), ("-0", "0")]
UNEQUAL = [
    ("0.1000000000000000055511151231257827", "0.1"), ("3.14", "22/7"), ("84/7", "12"), ("\\frac{84}{7}", "12"), ("84/7", "12%"),
    ("x", "x"), ("", ""), (None, "5"), ("0.28", "28"), ("9007199254740993", "9007199254740992"),
]  # fmt: skip


def test_equality_is_exact_and_tolerance_an_argument():
    assert [pair for pair in EQUAL if not rewards.is_equiv(*pair)] == []
    assert [pair for pair in UNEQUAL if rewards.is_equiv(*pair)] == []
    assert rewards.is_equiv("3.14", "22/7", tol=0.01) and rewards.is_equiv("1", "2", tol=1)
    assert not rewards.is_equiv("1", "2.0001", tol=1) and not rewards.is_equiv("15%", "16%", tol=0.5)
    for tol in (-1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="tol"):
            rewards.is_equiv("1", "1", tol=tol)


def test_a_percentage_is_its_value_or_its_bare_number_and_equality_symmetric():
    equal = {"15%": "15 0.15 3/20 15%", "1500%": "15 1500 1500%", "0.15%": "0.15 3/20 0.15%", "15": "15% 15 1500%"}
    texts = "15% 15 0.15 3/20 1500% 1500 0.15% -15% 28".split()
    for a in equal:
        for b in texts:
            assert rewards.is_equiv(a, b) == rewards.is_equiv(b, a) == (b in equal[a].split()), (a, b)


EXPRESSIONS = [
    ("(8 - 3) * 5", 25, [8, 3, 5]), ("-3+8/3", "-1/3", [3, 8, 3]), ("+1/3*3", 1, [1, 3, 3]), ("2×3÷4−1", "1/2", [2, 3, 4, 1]),
    (" 1\n+\t1 ", 2, [1, 1]), ("(" * 90 + "1" + ")" * 90, 1, [1]), ("-" * 100 + "1", 1, [1]),
]  # fmt: skip
NO_EXPRESSIONS = [
    "", " ", "()", "1 2", "1+", "(1", "1)", "2**3", "7//2", "1.5", "1e3", "1_0", "0x1", "08", "a", "3(4)", "(3)(4)", "1,2",
    "[1]", "~1", "not 1", "1 if 1 else 1", "True", "1;2", "1#2", "1=1", "1==1", "1<2", "1|1", "1/0", "1/(2-2)", "٣", "1\x00",
    "__import__('os')", "lambda:1", "1" * 201, "(" * 150 + "1" + ")" * 150, "-" * 199 + "1" + "-", None,
]  # fmt: skip


def test_safe_eval():
    for text, value, numbers in EXPRESSIONS:
        assert rewards.safe_eval(text) == (Fraction(value), numbers)
    for text in NO_EXPRESSIONS:
        with pytest.raises(ValueError):
            rewards.safe_eval(text)


def test_accuracy_reward_in_trls_calling_convention():
    """TRL passes messages (or texts), every column of the dataset as a list, and more keyword arguments."""
    parts = [{"type": "text", "text": "\\boxed{4}"}]
    said = ["<think>2+2</think><answer>4</answer>", "<answer>5</answer>", parts, None]
    completions = [[{"role": "assistant", "content": content}] for content in said] + [[], "#### 4", "#### 4"]
    others = {
        "prompts": [[{"role": "user", "content": "2+2"}]] * 7,
        "completion_ids": [[1]] * 7,
        "trainer_state": object(),
    }
    solution = ["4", "4", 4, "4", "4", None, "unknown"]
    paid = rewards.accuracy_reward(completions=completions, solution=solution, **others)
    assert paid == [1.0, 0.0, 1.0, 0.0, 0.0, None, None]
    assert all(r is None or type(r) is float for r in paid)


GSM8K = "She has 40-9=<<40-9=31>>31 left.\n#### 31"
SOLUTIONS = [
    (GSM8K, 31), ("#### 1,031", 1031), ("The chance is $\\frac{4}{14}$, that is $\\boxed{\\frac{2}{7}}$.", "2/7"), ("so $\\boxed{x = 5}$", 5),
    ("\\boxed{4\\mathrm{~m}}", 4), ("$\\boxed{5}$, again \\boxed{5.0}.", 5), ("\\boxed{\\boxed{5}}", 5), ("The answer is 5.", 5), ("long " * 500 + "\\boxed{5}", 5),
    ("The roots are $\\boxed{1}$ and $\\boxed{2}$.", None), ("\\boxed{2} or $\\boxed{x}$", None), ("there are 5 left", None), ("#### five", None),
    ("#### ", None), ("\\boxed{5 \\text{ or } 6}", None), ("\\boxed{5 crore}", None), ("", None), (None, None),
]  # fmt: skip


def test_a_gold_may_be_a_whole_solution():
    for solution, number in SOLUTIONS:
        right, wrong = (None, None) if number is None else (1.0, 0.0)
        said = [f"\\boxed{{{number}}}", "\\boxed{30}"]
        assert rewards.accuracy_reward(said, [solution] * 2, fallback=True) == [right, wrong], solution


def test_nothing_may_stand_around_the_four_tags():
    whole = ["<think>a</think>", "<answer>4</answer>"]
    assert rewards.format_reward(["".join(whole), " \n".join(["", *whole, ""])]) == [1.0, 1.0]
    assert rewards.format_reward(["b".join(["", *whole]), "b".join(whole), "b".join([*whole, ""])]) == [0.0] * 3
    assert (
        rewards.format_reward([whole[0], whole[1], "<think> </think>" + whole[1], whole[0] + "<answer> </answer>"])
        == [0.0] * 4
    )


def test_columns_must_fit():
    for bad in ("4", ["4"], ["4"] * 3):
        with pytest.raises(ValueError):
            rewards.accuracy_reward(["a", "b"], bad)
    with pytest.raises(ValueError):
        rewards.countdown_reward(["a", "b"], [[1, 2]], [3, 3])


def test_countdown_uses_each_number_once():
    def ask(text, nums=(3, 5, 8), target=25):
        return rewards.countdown_reward([f"<answer>{text}</answer>"], [nums], [target])[0]

    assert ask("(8-3)*5") == ask("5*(8-3)") == ask("(8-3)×5") == ask("(8-3)*5 = 25") == ask("(8-3)*5=25.0") == 1.0
    assert ask("8*3+1") == ask("25") == ask("(8-3)*5+0") == ask("(8-3)*5*1") == ask("(8-3)*5 =") == ask("") == 0.0
    for wrong in ("(8-3)*5=24", "25=(8-3)*5", "(8-3)*5=5*5", "(8-3)*5=25=25", "8+3+5=25"):
        assert ask(wrong) == 0.0
    assert ask("3*8", (3, 8), 24.0) == 1.0 and ask("3*8", (3, 8), "24") == 1.0
    assert ask("6/4*2", (2, 4, 6), 3) == 1.0  # exact, through 3/2
    assert ask("3*8", (3, 8), "unknown") is None
    for right in ("(8-3)\\times 5", "(8-3)\\cdot5", "(8-3)*5.", "(8-3)*5 = 25.", "(8 – 3)*5", "50\\div 2"):
        assert ask(right, (50, 2) if "50" in right else (3, 5, 8)) == 1.0, right
    for wrong in ("(8-3)\\timesx5", "(8-3)*5..", "(8-3).*5", "(8-3)*5!.", ".", "25.", "(8-3)*5 = 24."):
        assert ask(wrong) == 0.0, wrong


@pytest.mark.parametrize("task", rewards.TASKS)
def test_problems_and_worked_solutions(task):
    rng = random.Random(2)
    for _ in range(200):
        terms, held_out = rng.choice(rewards.TASKS[task]), rng.random() < 0.5
        problem = rewards.make_problem(task, terms, rng, largest=rng.choice([9, 99]), held_out=held_out)
        assert problem.held_out == held_out and len(problem.numbers) == terms and problem.task == task
        for think in (True, False):
            text = rewards.worked_solution(problem, think=think)
            assert rewards.reward(problem, [text]) == [1.0] or (task == "countdown" and not think)  # there, a guess
            assert text.startswith("<think>") == think and rewards.format_reward([text]) == [float(think)]
        steps = [step.split("=") for step in problem.steps.split()]
        assert all(rewards.safe_eval(left)[0] == int(right) for left, right in steps)
        assert steps[-1][1] == problem.answer and (len(steps) == terms - 1 or task == "countdown")
        again = rewards.read_problem(task, problem.prompt)
        assert (again.prompt, again.answer, again.numbers) == (problem.prompt, problem.answer, problem.numbers)


def test_the_documented_example():
    problem = rewards.read_problem("chain-sum", rewards.EXAMPLES["chain-sum"])
    assert rewards.worked_solution(problem, think=True) == "<think>9-1=8 8-4=4 4+7=11</think><answer>11</answer>"
    problem = rewards.read_problem("countdown", "3 5  8=25")
    assert problem.prompt == "3 5 8 = 25" and rewards.reward(problem, ["<answer>(8-3)*5</answer>"]) == [1.0]


def test_a_countdown_is_searched_in_a_fixed_order_up_to_the_first_hit():
    rng, right = random.Random(0), 0
    for _ in range(300):
        problem = rewards.make_problem("countdown", 4, rng)
        a, b, c, d = problem.numbers
        order = [f"{a}{p}{b}{q}{c}{r}{d}" for p in "+-" for q in "+-" for r in "+-"]
        tried = [step.split("=") for step in problem.steps.split()]
        assert [expression for expression, _ in tried] == order[: len(tried)] and tried[-1][0] == problem.solution
        assert problem.answer not in [value for _, value in tried[:-1]] and int(problem.answer) >= 0
        right += rewards.reward(problem, [f"<answer>{problem.guess}</answer>"])[0]
    assert 20 < right < 90  # a guess is right for one in eight, or a little more where signs cancel


def test_the_split_is_by_text_and_about_one_in_eight():
    problems = [rewards.Problem("chain-sum", f"{n // 100}+{n // 10 % 10}-{n % 10}", "0", ()) for n in range(1000)]
    assert 0.09 < sum(p.held_out for p in problems) / 1000 < 0.16
    assert all(p.held_out == rewards.Problem("countdown", p.prompt, "1", (1,)).held_out for p in problems)


def test_problems_that_are_none_say_so():
    with pytest.raises(ValueError, match="no solution"):
        rewards.worked_solution(rewards.read_problem("countdown", rewards.EXAMPLES["countdown"]), think=False)
    not_chain_sums, not_countdowns = ["1*2", "5", "", "1 2+3", "100+1"], ["1 2 = 3", "1 2 3 = 1000", "x"]
    for text in not_chain_sums + not_countdowns:
        with pytest.raises(ValueError, match="expected something like"):
            rewards.read_problem("chain-sum" if text in not_chain_sums else "countdown", text)
    for task, terms in (("chain-sum", 1), ("algebra", 3)):
        with pytest.raises(ValueError, match=f"no {task} problem"):
            rewards.make_problem(task, terms, random.Random(0))


def test_alone_in_an_empty_folder_as_a_program(tmp_path):
    copy = tmp_path / "rewards.py"
    copy.write_bytes(Path(rewards.__file__).read_bytes())
    run = lambda *argv: subprocess.run([sys.executable, copy, *argv], cwd=tmp_path, capture_output=True, text=True)  # noqa: E731
    assert run("so \\boxed{12}", "12").stdout.split() == "answer: 12 number: 12 verdict: right".split()
    wrong = run("12")
    assert wrong.returncode == 1
    assert wrong.stderr == "usage: python rewards.py [COMPLETION GOLD]\n"
    shown = run()
    assert shown.returncode == 0
    rewards_shown = re.findall("answer (...), format (...): (<think>)?", shown.stdout)
    assert rewards_shown == [("1.0", "1.0", "<think>"), ("0.0", "0.0", "")] * 2
    assert shown.stdout.endswith('python rewards.py "so \\boxed{12}" 12\n')


def test_no_evaluation_anywhere():
    source = Path(rewards.__file__).read_text(encoding="utf-8")
    for word in (" eval(", "literal_eval", "exec(", "float(text", "normalize(", "sympify", "import sympy"):
        assert word not in source


def test_under_fire():
    fuzz.attack(1000)
