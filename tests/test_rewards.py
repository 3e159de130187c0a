# SPDX-License-Identifier: MIT
import json
import random
import string
from fractions import Fraction
from pathlib import Path

import fuzz
import pytest

import rewards
from rewards import (
    EXAMPLES,
    TASKS,
    Problem,
    accuracy_reward,
    countdown_reward,
    extract_answer,
    format_reward,
    is_equiv,
    make_problem,
    parse_number,
    read_problem,
    reward,
    safe_eval,
    worked_solution,
)
from sample import tokenizer

LINES = (Path(__file__).parent / "data" / "reward_cases.jsonl").read_text(encoding="utf-8").splitlines()
CASES = [json.loads(line) for line in LINES]


def score(case):
    """What our functions give a case from the public bug reports; None (unverifiable) pays nothing."""
    completion, gold, fallback = case["completion"], case["gold"], case["mode"] == "lenient"
    if case["task"] == "countdown":
        return countdown_reward([completion], [gold["numbers"]], [gold["target"]])[0]
    if case["task"] == "format":
        return format_reward([completion], think_prefilled="prefilled" in case["kind"])[0]
    if case["task"] == "tokenizer":
        ids = tokenizer.encode_ordinary(completion)
        digits_single = len(ids) == len(completion.encode())
        return int(tokenizer.decode(ids) == gold and digits_single)
    return accuracy_reward([completion], [gold], fallback=fallback)[0] or 0


@pytest.mark.parametrize("case", CASES, ids=[f"{c['id']}-{c['kind']}" for c in CASES])
def test_public_bug_reports(case):
    assert score(case) == case["expected"], case["note"]


def test_all_cases_are_there():
    assert len(CASES) == 102


# Extraction


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("<think>a", None),  # unclosed
        ("<think>a</think> b <think> \\boxed{5}", None),
        ("<answer>5</answer><answer>6", None),  # unterminated last
        ("<answer>5</answer><answer> </answer>", None),  # empty last
        ("\\boxed{5} \\boxed{}", None),
        ("\\boxed{5} \\boxed", None),
        ("\\boxed 5", None),
        ("\\boxed {5}", "5"),
        ("\\boxed{a{b}c}", "a{b}c"),
        ("\\boxed{\\{5\\}}", "\\{5\\}"),
        ("#### 5\n#### ", None),
        ("#### 5\nmore", "5"),
        ("The answer is 5. Then 6.", "5"),
        ("The answer is 3.5 m. Done", "3.5 m"),
        ("**Answer:** 5", "5"),
        ("the answer is 4; the answer is:", None),
        ("it is 5", None),
        ("\\boxed{5} so <answer>6</answer>", "6"),  # tags before boxes before lines before sentences
        ("<answer>6</answer> so \\boxed{5}", "6"),
    ],
)
def test_extraction(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("so 72.", "72"),
        ("2+3=5", "5"),
        ("1 1/4 cups", "1 1/4"),
        ("there are 3 and 4 left", "4"),
        ("(42)", "42"),
        ("none", None),
        ("<answer></answer> 5", None),  # a marker, though empty, forbids the fallback
        ("<think>5", None),
        ("<think>5</think> none", None),
    ],
)
def test_fallback(completion, answer):
    assert extract_answer(completion, fallback=True) == answer
    assert extract_answer(completion) is None


# Numbers


@pytest.mark.parametrize(
    "text, value",
    [
        ("7", 7), ("+7", 7), ("-7", -7), ("- 7", -7), ("−7", -7), ("007", 7), ("7.", 7), ("7.50", "15/2"), (".5", "1/2"),
        ("1,234,567.8", "6172839/5"), ("1{,}234", 1234), ("$1,000", 1000), ("-$5", -5), ("$-5", -5), ("5€", 5), ("£5", 5),
        ("5 %", "1/20"), ("5\\%", "1/20"), ("50 percent", "1/2"), ("1e3", 1000), ("1.5E-2", "3/200"), ("2e+2", 200),
        ("3/4", "3/4"), ("-3/4", "-3/4"), ("6/4", "3/2"), ("\\frac{3}{4}", "3/4"), ("\\frac{-3}{4}", "-3/4"),
        ("-\\tfrac34", "-3/4"), ("\\frac3{4}", "3/4"), ("2\\frac{1}{2}", "5/2"), ("-2 1/2", "-5/2"), ("x = 5", 5), ("= 5", 5),
        ("\\theta = 5", 5), ("$x=5$", 5), ("\\(5\\)", 5), ("\\[5\\]", 5), ("**5**", 5), ("__5__", 5), ("`5`", 5), ("(5)", 5), ("{5}", 5),
        ("\\text{5}", 5), ("\\mathrm{5}", 5), ("\\boxed{5}", 5), ("5 apples", 5), ("5 km/h", 5), ("5kg", 5), ("5°", 5),
        ("90^\\circ", 90), ("5 \\text{ cm}", 5), ("5, altogether", 5), ("5 days (exactly)", 5), ("10,\\!000", 10000),
    ],
)  # fmt: skip
def test_numbers(text, value):
    assert parse_number(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "-", ".", ",", "five", "3 or 4", "3, 4", "3-4", "3 - 4", "3 to 4", "3 and a half", "5 million", "two 5",
        "about 5", "not 5", "~5", "≈5", "±5", "--5", "+-5", "5!", "5?", "5x", "5 x", "5i", "5 pi", "5π", "5\\pi", "2^3", "2**3",
        "5²", "½", "5½", "1/0", "1//2", "1/2/3", "1.5/2", "1 5/4", "1 -1/4", "0,123", "1,23", "12,34,567", "1.2.3", "1,2,3",
        "1_000", "0x10", "0b1", "1e", "1e61", "1e999999999", "e5", "inf", "nan", "Infinity", "True", "٣", "５", "४",
        "12:00", "2026-12-02", "3b", "x_1 = 5", "x = y = 5", "4\\sqrt{2}", "\\sqrt{4}", "5 squared", "|5|", "[5]", "5 five",
        "5 minus 3", "5 times", "5 = 5", "5 > 3", "<5", "5\x00", "9" * 61, "5 " + "a" * 300, "2\\times3", "5\\\\6",
    ],
)  # fmt: skip
def test_not_one_number(text):
    assert parse_number(text) is None


def test_formatting_round_trips():
    rng = random.Random(0)
    for _ in range(2000):
        n, d = rng.randint(-(10**6), 10**6), rng.randint(1, 999)
        value, sign = Fraction(n, d), "-" if n < 0 else ""
        whole, part = divmod(abs(n), d)
        forms = [f"{n}/{d}", f"{sign}\\frac{{{abs(n)}}}{{{d}}}", f"\\boxed{{{n}/{d}}}", f"{sign}{abs(n):,}/{d}"]
        if whole and part:
            forms += [f"{sign}{whole} {part}/{d}", f"{sign}{whole}\\frac{{{part}}}{{{d}}}"]
        assert all(parse_number(form) == value for form in forms), (n, d)
        cents = Fraction(n, 100)
        decimal = f"{sign}{abs(n) // 100}.{abs(n) % 100:02d}"
        forms = [
            decimal,
            f"${decimal}$",
            f"{n}%",
            f"{n}e-2",
            f"{sign}${abs(n) // 100:,}.{abs(n) % 100:02d}",
            decimal + " m",
        ]
        assert all(parse_number(form) == cents for form in forms), n


# Equality


def test_equality_is_exact_and_tolerance_an_argument():
    assert is_equiv("0.1", "1/10") and not is_equiv("0.1000000000000000055511151231257827", "0.1")
    assert not is_equiv("3.14", "22/7") and is_equiv("3.14", "22/7", tol=0.01)
    assert is_equiv("1", "2", tol=1) and not is_equiv("1", "2.0001", tol=1)
    for tol in (-1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="tol"):
            is_equiv("1", "1", tol=tol)


def test_an_unevaluated_fraction_is_no_integer_answer():
    assert not is_equiv("84/7", "12") and not is_equiv("\\frac{84}{7}", "12") and is_equiv("12", "84/7")
    assert is_equiv("12.0", "12") and is_equiv("100%", "1")


def test_unparsable_equals_nothing():
    assert not is_equiv("x", "x") and not is_equiv("", "") and not is_equiv(None, "5") and is_equiv("5", 5)


def test_equality_is_symmetric():
    texts = ["1", "1.0", "100%", "1/2", "0.5", "2/4", "50%", "-1", "1e0", "\\frac{1}{2}", "7", "1,000", "1000"]
    for a in texts:
        for b in texts:
            assert is_equiv(a, b) == is_equiv(b, a)


# Expressions


def test_safe_eval():
    assert safe_eval("(8 - 3) * 5") == (25, [8, 3, 5])
    assert safe_eval("-3+8/3") == (Fraction(-1, 3), [3, 8, 3])
    assert safe_eval("2×3÷4−1") == (Fraction(1, 2), [2, 3, 4, 1])
    assert safe_eval(" 1\n+\t1 ") == (2, [1, 1])
    assert safe_eval("1/3*3") == (1, [1, 3, 3])


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "()", "1 2", "1+", "(1", "1)", "2**3", "7//2", "1.5", "1e3", "1_0", "0x1", "08", "a", "3(4)", "(3)(4)", "1,2",
        "[1]", "~1", "not 1", "1 if 1 else 1", "True", "1;2", "1#2", "1=1", "1==1", "1<2", "1|1", "1/0", "1/(2-2)", "٣", "1\x00",
        "__import__('os')", "lambda:1", "1" * 201, "(" * 150 + "1" + ")" * 150, "-" * 199 + "1" + "-", None, 5,
    ],
)  # fmt: skip
def test_safe_eval_refuses(text):
    with pytest.raises(ValueError):
        safe_eval(text)


def test_deep_but_short_expressions_are_fine():
    assert safe_eval("(" * 90 + "1" + ")" * 90) == (1, [1])
    assert safe_eval("-" * 100 + "1") == (1, [1])


# Rewards


def test_accuracy_reward_in_trls_calling_convention():
    """TRL passes messages (or texts), every column of the dataset as a list, and more keyword arguments."""
    completions = [
        [{"role": "assistant", "content": "<think>2+2</think><answer>4</answer>"}],
        [{"role": "assistant", "content": "<answer>5</answer>"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "\\boxed{4}"}]}],
        [{"role": "assistant", "content": None}],
        [],
        "<answer>4</answer>",
        "<answer>4</answer>",
    ]
    columns = {
        "prompts": [[{"role": "user", "content": "2+2"}]] * 7,
        "solution": ["4", "4", 4, "4", "4", None, "unknown"],
        "completion_ids": [[1]] * 7,
        "trainer_state": object(),
    }
    rewards = accuracy_reward(completions=completions, **columns)
    assert rewards == [1.0, 0.0, 1.0, 0.0, 0.0, None, None]
    assert all(r is None or type(r) is float for r in rewards)


def test_columns_must_fit():
    for bad in ("44", ["4"], ["4"] * 3):
        with pytest.raises(ValueError, match="one entry for each of the 2"):
            accuracy_reward(["a", "b"], bad)
    with pytest.raises(ValueError, match="nums"):
        countdown_reward(["a", "b"], [[1, 2]], [3, 3])


def test_countdown_uses_each_number_once():
    ask = lambda text, nums=(3, 5, 8), target=25: countdown_reward([f"<answer>{text}</answer>"], [nums], [target])[0]  # noqa: E731
    assert ask("(8-3)*5") == ask("5*(8-3)") == ask("(8-3)×5") == 1.0
    assert ask("8*3+1") == ask("25") == ask("(8-3)*5+0") == ask("(8-3)*5*1") == ask("(8-3)*5 = 25") == 0.0
    assert ask("3*8", (3, 8), 24.0) == 1.0 and ask("3*8", (3, 8), "24") == 1.0
    assert ask("6/4*2", (2, 4, 6), 3) == 1.0  # exact, through 3/2
    assert ask("3*8", (3, 8), "unknown") is None


def test_nothing_around_a_wrong_number_makes_it_right():
    rng = random.Random(1)
    for _ in range(500):
        gold, wrong = rng.sample(range(100), 2)
        junk = [
            "".join(rng.choice(string.ascii_letters + " .,;:!?") for _ in range(20)).replace("nswer", "") for _ in "ab"
        ]
        for form in ("<answer>{}</answer>", "\\boxed{{{}}}", "\n#### {}\n"):
            text = (
                f"{junk[0]} {gold} <answer>{gold}</answer> \\boxed{{{gold}}} #### {gold}\n{junk[1]}"
                if "ans" in form
                else ""
            )
            assert accuracy_reward([text + form.format(wrong) + f" {gold} " + junk[0]], [gold]) == [0.0]


def test_what_stands_before_the_last_marker_does_not_matter():
    for form in ("<answer>7</answer>", "\\boxed{7}", "#### 7", "The answer is 7."):
        for before in ("<think>8</think>", "8 ", "# 9\n", form.replace("7", "8") + "\n", "}{ \\frac{1}{2} "):
            assert extract_answer(before + form) == "7", (before, form)


# Problems


@pytest.mark.parametrize("task", TASKS)
def test_problems_and_worked_solutions(task):
    rng = random.Random(2)
    for _ in range(200):
        terms, held_out = rng.choice(TASKS[task]), rng.random() < 0.5
        problem = make_problem(task, terms, rng, largest=rng.choice([9, 99]), held_out=held_out)
        assert problem.held_out == held_out and len(problem.numbers) == terms and problem.task == task
        for think in (True, False):
            text = worked_solution(problem, think=think)
            assert reward(problem, [text, text + "0"]) == [1.0, 1.0] and text.startswith("<think>") == think
            assert format_reward([text]) == [float(think)]
        again = read_problem(task, problem.prompt)
        assert (again.prompt, again.answer, again.numbers) == (problem.prompt, problem.answer, problem.numbers)


def test_the_documented_example():
    problem = read_problem("chain-sum", EXAMPLES["chain-sum"])
    assert problem.answer == "11"
    assert worked_solution(problem, think=True) == "<think>9-1=8 8-4=4 4+7=11</think><answer>11</answer>"
    problem = read_problem("countdown", "8 5 3=25")
    assert (problem.prompt, problem.numbers) == ("3 5 8 = 25", (3, 5, 8))
    assert reward(problem, ["<answer>(8-3)*5</answer>", "<answer>25</answer>"]) == [1.0, 0.0]


def test_the_split_is_by_text_and_about_one_in_eight():
    problems = [
        Problem("chain-sum", f"{a}+{b}-{c}", "0", (a, b, c)) for a in range(10) for b in range(10) for c in range(10)
    ]
    assert 0.09 < sum(p.held_out for p in problems) / 1000 < 0.16
    assert all(p.held_out == Problem("countdown", p.prompt, "1", ()).held_out for p in problems)


def test_problems_that_are_none_say_so():
    with pytest.raises(ValueError, match="not a number"):
        Problem("chain-sum", "1+1", "two", (1, 1))
    for task, text in [
        ("chain-sum", "1*2"),
        ("chain-sum", "5"),
        ("chain-sum", ""),
        ("countdown", "1 2 = 3"),
        ("countdown", "x"),
    ]:
        with pytest.raises(ValueError, match="expected something like"):
            read_problem(task, text)
    with pytest.raises(ValueError, match="no chain-sum problem"):
        make_problem("chain-sum", 1, random.Random(0))
    with pytest.raises(ValueError, match="no algebra problem"):
        make_problem("algebra", 3, random.Random(0))


def test_no_evaluation_anywhere():
    source = Path(rewards.__file__).read_text(encoding="utf-8")
    for word in (" eval(", "literal_eval", "exec(", "float(text", "normalize(", "sympify", "import sympy"):
        assert word not in source


def test_under_fire():
    """A short version of `python tests/fuzz.py`, which also times and measures."""
    fuzz.attack(2000)
