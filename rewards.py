# SPDX-License-Identifier: MIT
"""Verifiable maths: problems with worked solutions, and the checking of answers. Standard library only.

A reward that can be tricked will be tricked: RL searches for the hole. Hence the rules of this file:
  - work is bounded before anything is parsed (length, digits, exponent), rather than timed;
  - only literal numbers count, read by our own [0-9] patterns and compared as exact `Fraction`s. Nothing is ever
    evaluated by `eval` or a computer algebra system, no text goes through `float()`, and no Unicode is folded
    (NFKC would turn "5 squared" written with a superscript into 52);
  - what is not understood as exactly one number is no answer; nothing is repaired, guessed or cut to fit.

The three `*_reward` functions follow the calling convention of TRL's reward functions: lists in, list out, further
columns as keyword arguments. To copy: this file needs nothing but Python.
"""

import ast
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER = 200  # characters of an answer, or of an arithmetic expression, that we are willing to parse
MAX_DIGITS = 60  # digits in a row
MAX_EXPONENT = 60  # of ten, in 1e60
MAX_COMPLETION_TAIL = 2000  # characters in which the fallback looks for the last number

# ---------------------------------------------------------------------------------------------------------------------
# Where the answer stands

_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])")
_ANSWER_IS = re.compile(r"\banswer[*_]{0,3}\s{0,9}(?:is\b[*_]{0,3}\s{0,9}:?|:|=)(?:[*_]{1,3}(?=\s))?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.?;](?=\s|$)|\n")


def extract_answer(completion, *, fallback=False):
    """The text of the final answer in a completion, or None.

    Only what follows the last </think> is read; an unclosed <think> gives nothing. Then the first of these markers
    that occurs at all, at its last occurrence: a complete <answer>...</answer>, a brace-matched \\boxed{...} or
    \\fbox{...}, the line after ####, the sentence after "answer is" or "answer:". A last marker that is empty or
    unterminated gives nothing, rather than an earlier one. `fallback=True`: without any marker, the last number.
    """
    text = completion.rsplit("</think>", 1)[-1]
    if "<think>" in text:
        return None
    if "<answer>" in text:
        answer, closed, _ = text.rsplit("<answer>", 1)[1].partition("</answer>")
        return _filled(answer) if closed else None
    boxes = list(_BOX.finditer(text))
    if boxes:
        # \boxed{\boxed{5}}: the last box stands inside another one, which is fine, since it is its whole content.
        return _filled(_braced(text, boxes[-1].end()))
    if "####" in text:
        return _filled(text.rsplit("####", 1)[1].split("\n", 1)[0])
    markers = list(_ANSWER_IS.finditer(text))
    if markers:
        return _filled(_SENTENCE_END.split(text[markers[-1].end() :], maxsplit=1)[0])
    return _last_number(text) if fallback else None


def _last_number(text):
    """The last word with a digit in it, with the integer before it if the two make a mixed number."""
    words = text[-MAX_COMPLETION_TAIL:].split()
    while words:
        word = words.pop().rsplit("=", 1)[-1].strip(".,;:?!\"'()[]{}<>")
        if re.search("[0-9]", word):
            mixed = words and re.fullmatch("[0-9]+/[0-9]+", word) and re.fullmatch("[+-]?[0-9]+", words[-1])
            return f"{words[-1]} {word}" if mixed else word
    return None


def _filled(answer):
    return answer.strip() or None if answer is not None else None


def _braced(text, start):
    """What stands inside the brace pair that opens at `start` (blanks before it allowed); None if it never closes."""
    while start < len(text) and text[start].isspace():
        start += 1
    if not text.startswith("{", start):
        return None
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)  # an escaped brace, \{ or \}, does not count
        if depth == 0:
            return text[start + 1 : start + brace.start()]
    return None


# ---------------------------------------------------------------------------------------------------------------------
# What number it is

_DIGITS = rf"[0-9]{{1,{MAX_DIGITS}}}"
_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3}){1,19}"  # 12,345 but neither 12,34 nor 1,2,3
_INTEGER = rf"(?:{_GROUPED}|{_DIGITS})(?![0-9])"
_SIGN = r"(?P<sign>[+-]?)\s*"
_CURRENCY = r"\\?[$€£¥₹₩₽¢]"
_FRACTION = (
    rf"(?P<top>{_INTEGER})\s*/\s*(?P<bottom>{_INTEGER})"
    rf"|\\[dtc]?frac\s*(?:\{{\s*(?P<topsign>[+-]?)\s*(?P<top2>{_INTEGER})\s*\}}|(?P<top3>[0-9]))"
    rf"\s*(?:\{{\s*(?P<bottom2>{_INTEGER})\s*\}}|(?P<bottom3>[0-9]))"
)
_NUMBER = re.compile(
    rf"(?:=\s*|(?:[A-Za-z]|\\[a-z]+)\s*=\s*)?{_SIGN}(?:{_CURRENCY}\s*)?(?P<sign2>[+-]?)\s*"
    rf"(?:(?:(?P<whole>{_DIGITS})(?:\s+|\s*(?=\\)))?(?:{_FRACTION})"
    rf"|(?P<integer>{_INTEGER})?(?:\.(?P<decimals>{_DIGITS})?)?(?:[eE](?P<exponent>[+-]?[0-9]{{1,4}}))?)"
    rf"(?P<rest>(?![0-9.,]*[0-9]).*)",
    re.DOTALL,
)
# Units that may touch their number; other letters that touch it make it a product (5x) or a code (3b).
_UNITS = re.compile(r"(?:mm|cm|dm|km|mg|kg|ml|mL|ms|min|hrs?|secs?|mph|kph|lbs?|ft|oz|USD|EUR|GBP)(?![A-Za-z])")
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b|per cent\b)")
_DEGREES = re.compile(r"\s*(?:°|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree)")
# Words after a number are a unit or a remark, unless they change the value, hedge, or hold a second number.
_NO_UNIT = re.compile(
    r"\b(?:or|and|to|vs|versus|either|maybe|not|no|than|plus|minus|times|over|divided|per|by|mod|modulo|point|dot|more|less|"
    r"squared?|cubed?|factorial|hundreds?|thousands?|[mb]illions?|trillions?|dozens?|scores?|half|halves|thirds?|"
    r"quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|hundredths?|thousandths?|zero|one|two|"
    r"three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty|seventy|eighty|"
    r"ninety|twice|double|pi|tau|inf|infinity|nan|wrong|incorrect|false|plusminus|squareroot|root|sqrt|log|sin|cos|"
    r"(?-i:[a-fi-kn-rt-zA-Z]))\b",  # single letters are variables, but for g h l m s
    re.IGNORECASE,
)
_REMARK = re.compile(r"(?:[,;:.]?(?:\s|$)|(?<=\S)[./'-](?=[^\W\d_])|[()]|[^\W\d_])*")
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("*", "*"), ("`", "`"))
_WRAPPERS += (("__", "__"), ("_", "_"), ("(", ")"), ("{", "}"))
_WRAPPING_MACRO = re.compile(
    r"\\(?:f?box(?:ed)?|text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|rm|it|sf)|mbox|displaystyle)?\s*(?=\{)"
)
_INNER_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|(?<=\S)~")


def parse_number(text):
    """The one literal number that a text is, exactly; None if it is none, or more than one.

    Read: integers and decimals (thousands groups allowed), a/b, \\frac{a}{b}, mixed numbers (-2\\frac{1}{2} is
    -(2 + 1/2)), 1.5e-3, percentages (28% is 7/25), a currency sign, a unit or a few words behind it, `x =` before
    it, Markdown and LaTeX wrapping. Not read: expressions (12*13, 5!, 2^3), lists, ranges, times, other scripts'
    digits, anything too long.
    """
    number = _parse(text)
    return None if number is None else number[0]


def _parse(text):
    """(value, whether it was written as a fraction), or None."""
    text = "" if text is None else str(text)  # a gold may be given as a number
    if len(text) > MAX_ANSWER:
        return None
    text = _unwrap(text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").replace(r",\!", ","))
    text = _SPACING.sub(" ", _INNER_TEXT.sub(r" \1 ", text)).strip()
    match = _NUMBER.fullmatch(text)
    if not match or (match["sign"] and match["sign2"]):
        return None
    if match["integer"] or match["decimals"]:
        value, is_fraction = _decimal(match["integer"] or "0", match["decimals"] or "", match["exponent"] or "0"), False
    else:
        value, is_fraction = _fraction(match), True
    if value is None:
        return None
    rest = match["rest"]
    if percent := _PERCENT.match(rest):
        value, rest = value / 100, rest[percent.end() :]
    elif unit := _UNITS.match(rest) or _DEGREES.match(rest) or re.match(r"\s*" + _CURRENCY, rest):
        rest = rest[unit.end() :]
    elif rest[:1].isalpha():
        return None
    # isnumeric: superscripts, fractions and other scripts' numerals are letters to a regular expression
    if any(c.isnumeric() for c in rest) or not _REMARK.fullmatch(rest.rstrip("*_`")) or _NO_UNIT.search(rest):
        return None
    return (-value if "-" in (match["sign"], match["sign2"]) else value), is_fraction


def _unwrap(text):
    """Strip Markdown, LaTeX maths delimiters and wrapping macros, outermost first."""
    for _ in range(MAX_ANSWER):  # each turn removes at least two characters
        text = text.strip().rstrip(".,;").rstrip()
        if (macro := _WRAPPING_MACRO.match(text)) and (inner := _braced(text, macro.end())) is not None:
            if macro.end() + len(inner) + 2 == len(text):
                text = inner
                continue
        for left, right in _WRAPPERS:
            if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
                text = text[len(left) : -len(right)]
                break
        else:
            return text
    return text


def _decimal(integer, decimals, exponent):
    if abs(int(exponent)) > MAX_EXPONENT:
        return None
    return Fraction(int(integer.replace(",", "") + decimals)) * Fraction(10) ** (int(exponent) - len(decimals))


def _fraction(match):
    top, bottom = (
        next((match[name] for name in names if match[name]), None)
        for names in (("top", "top2", "top3"), ("bottom", "bottom2", "bottom3"))
    )
    if top is None or bottom is None:
        return None
    top, bottom = int(top.replace(",", "")), int(bottom.replace(",", ""))
    if bottom == 0:
        return None
    value = Fraction(-top if match["topsign"] == "-" else top, bottom)
    if match["whole"] is None:
        return value
    if not 0 <= value < 1 or match["topsign"]:  # "1 5/4" is no mixed number, nor is "1 -1/4"
        return None
    return int(match["whole"]) + value


def is_equiv(prediction, gold, *, tol=0):
    """Whether two texts are the same number, exactly, or within `tol` (int, Fraction or finite float) of each other.

    For a gold that is an integer, an unevaluated a/b is not an answer: 84/7 echoes the question that 12 answers.
    Unparsable texts are equal to nothing, not even to themselves. Raises ValueError for a tolerance below 0.
    """
    if not 0 <= tol < float("inf"):
        raise ValueError(f"tol is {tol}: it must be 0 or more, and finite")
    predicted, correct = _parse(prediction), _parse(gold)
    if predicted is None or correct is None:
        return False
    if correct[0].denominator == 1 and predicted[1]:
        return False
    return abs(predicted[0] - correct[0]) <= Fraction(tol)


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic expressions

_EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def safe_eval(expression):
    """(value, the integers used in order of appearance) of an expression in + - * / ( ) and integer literals.

    The numbers come from the parse tree, so none can hide in a comment or be glued from two. Blanks are collapsed,
    never deleted; the signs × ÷ − are read as * / -. Raises ValueError, and nothing else, for any other text.
    """
    value, numbers, _ = _evaluate(expression)
    return value, numbers


def _evaluate(expression):
    """(value, numbers, steps): `safe_eval`, and each operation as a line such as 8-3=5, in order of evaluation."""
    if not isinstance(expression, str) or len(expression) > MAX_ANSWER:
        raise ValueError(f"not an expression of at most {MAX_ANSWER} characters")
    expression = " ".join(expression.replace("×", "*").replace("÷", "/").replace("\N{MINUS SIGN}", "-").split())
    if not _EXPRESSION.fullmatch(expression):
        raise ValueError("only integers, + - * / and parentheses are allowed")
    try:
        tree = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError("not a well-formed expression") from error
    numbers, steps = [], []

    def value(node):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
            operand = value(node.operand)
            return -operand if isinstance(node.op, ast.USub) else operand
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right, operator = value(node.left), value(node.right), _OPERATORS[type(node.op)]
            result = _apply(left, operator, right)
            steps.append(f"{left}{operator}{right}={result}")
            return result
        raise ValueError(f"{type(node).__name__} is not allowed")

    return Fraction(value(tree)), numbers, steps


def _apply(left, operator, right):
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if right == 0:
        raise ValueError("division by zero")
    return Fraction(left, right)


# ---------------------------------------------------------------------------------------------------------------------
# Rewards


def _text(completion):
    """A completion is a string, or a list of {"role", "content"} messages, the last of which is the answer's."""
    if isinstance(completion, str):
        return completion
    message = completion[-1] if completion else {}
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))


def _columns(completions, **columns):
    """Raise ValueError unless every column is a list with one entry per completion."""
    for name, column in columns.items():
        if isinstance(column, str) or len(column) != len(completions):
            raise ValueError(f"{name} must be a list with one entry for each of the {len(completions)} completions")


def accuracy_reward(completions, solution, *, fallback=False, **kwargs):
    """1.0 where a completion's answer equals the solution, 0.0 where not, None where the solution is no number.

    completions: list of strings or of message lists; solution: list of texts or numbers, of the same length.
    Raises ValueError when the lengths differ. None means "leave this sample out", in TRL and in `group_advantages`.
    """
    _columns(completions, solution=solution)
    rewards = []
    for completion, gold in zip(completions, solution):
        if parse_number(gold) is None:
            rewards.append(None)
            continue
        answer = extract_answer(_text(completion), fallback=fallback)
        rewards.append(float(answer is not None and is_equiv(answer, gold)))
    return rewards


_FORMAT = re.compile(r"<think>(?P<think>.*)</think>\s*<answer>(?P<answer>.*)</answer>", re.DOTALL)


def format_reward(completions, *, think_prefilled=False, **kwargs):
    """1.0 for <think>...</think><answer>...</answer>, each tag once, neither part blank, nothing around; else 0.0.

    think_prefilled: the opening <think> was part of the prompt, so that a completion starts inside it.
    """
    rewards = []
    for completion in completions:
        text = ("<think>" if think_prefilled else "") + _text(completion)
        once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
        match = _FORMAT.fullmatch(text.strip()) if once else None
        rewards.append(float(bool(match and match["think"].strip() and match["answer"].strip())))
    return rewards


def countdown_reward(completions, nums, target, **kwargs):
    """1.0 where the answer is an expression that uses each given number once and equals the target; else 0.0.

    nums: list of lists of non-negative integers; target: list of integers. None where the target is no number.
    Raises ValueError when the lengths differ.
    """
    _columns(completions, nums=nums, target=target)
    rewards = []
    for completion, given, goal in zip(completions, nums, target):
        goal, given = parse_number(goal), sorted(int(n) for n in given)
        try:
            value, used = safe_eval(extract_answer(_text(completion)))
            reward = float(value == goal and sorted(used) == given)
        except ValueError:
            reward = 0.0
        rewards.append(None if goal is None else reward)
    return rewards


# ---------------------------------------------------------------------------------------------------------------------
# Problems


@dataclass(frozen=True)
class Problem:
    """A question whose answer can be checked.

    prompt: what the model is shown; answer: the gold, as text; numbers: the numbers in it, whose count is the measure
    of difficulty; expression: the arithmetic that leads to the answer ("" where we were only told the question).
    Raises ValueError when the gold is not a number: such a problem could never be scored.
    """

    task: str
    prompt: str
    answer: str
    numbers: tuple
    expression: str = ""

    def __post_init__(self):
        if parse_number(self.answer) is None:
            raise ValueError(f"the answer of {self.prompt!r}, {self.answer!r}, is not a number")

    @property
    def held_out(self):
        """Whether this problem is for evaluation only: decided by its text alone, for one in eight."""
        return hashlib.sha256(self.prompt.encode()).digest()[0] % 8 == 0


TASKS = {"chain-sum": range(2, 11), "countdown": range(3, 5)}  # task: how many numbers a problem may have
EXAMPLES = {"chain-sum": "9-1-4+7", "countdown": "3 5 8 = 25"}


def make_problem(task, terms, rng, *, largest=9, held_out=False):
    """A random problem of `terms` numbers up to `largest`, from the training or the held-out share.

    rng: a random.Random. Raises ValueError for an unknown task or sizes it does not have.
    """
    if task not in TASKS or terms not in TASKS[task] or not 2 <= largest <= 99:
        raise ValueError(f"no {task} problem has {terms} numbers up to {largest}")
    make = _chain_sum if task == "chain-sum" else _countdown
    while True:
        problem = make(terms, largest, rng)
        if problem.held_out == held_out:
            return problem


def read_problem(task, text):
    """The problem that a text such as those in EXAMPLES states. Raises ValueError if it states none of this task."""
    if task == "chain-sum":
        text = "".join(text.split())
        if re.fullmatch(r"[0-9]{1,2}(?:[+-][0-9]{1,2}){1,9}", text):
            value, numbers = safe_eval(text)
            return Problem(task, text, str(value), tuple(numbers), text)
    else:
        text = " ".join(text.replace("=", " = ").split())
        if re.fullmatch(r"[1-9][0-9]?(?: [1-9][0-9]?){2,3} = [0-9]{1,2}", text):
            *numbers, target = [int(n) for n in text.replace("=", " ").split()]
            numbers = sorted(numbers)
            return Problem(task, f"{' '.join(map(str, numbers))} = {target}", str(target), tuple(numbers))
    counts = TASKS[task]
    raise ValueError(
        f"{text!r} is not a {task} problem: expected something like {EXAMPLES[task]!r}, "
        f"with {counts.start} to {counts.stop - 1} numbers of one or two digits"
    )


def reward(problem, completions):
    """Score several completions of one problem by the rule of its task."""
    n = len(completions)
    if problem.task == "countdown":
        return countdown_reward(completions, [problem.numbers] * n, [problem.answer] * n)
    return accuracy_reward(completions, [problem.answer] * n)


def worked_solution(problem, *, think):
    """What the warm start imitates: the answer blurted out, or the steps that lead to it and then the answer.

    The answer to a chain sum is a number; to a countdown, an expression.
    """
    answer = problem.expression if problem.task == "countdown" else problem.answer
    steps = f"<think>{' '.join(_evaluate(problem.expression)[2])}</think>" if think else ""
    return f"{steps}<answer>{answer}</answer>"


def _chain_sum(terms, largest, rng):
    numbers = [rng.randint(0, largest) for _ in range(terms)]
    total, text = numbers[0], str(numbers[0])
    for n in numbers[1:]:
        sign = rng.choice("+-")
        total, text = _apply(total, sign, n), f"{text}{sign}{n}"
    return Problem("chain-sum", text, str(total), tuple(numbers), text)


def _countdown(terms, largest, rng):
    """Join random pairs by random operators until one expression is left; keep it if its value is 0 to 99."""
    while True:
        numbers = sorted(rng.randint(1, largest) for _ in range(terms))
        parts = [(str(n), n) for n in numbers]
        while len(parts) > 1:
            (a, x), (b, y) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
            operator = rng.choice("+-*/")
            if operator == "/" and (y == 0 or x % y):
                operator = "*"
            a, b = (text if text.isdigit() else f"({text})" for text in (a, b))
            parts.append((a + operator + b, int(_apply(x, operator, y))))
        expression, value = parts[0]
        if 0 <= value <= 99:
            prompt = f"{' '.join(map(str, numbers))} = {value}"
            return Problem("countdown", prompt, str(value), tuple(numbers), expression)
