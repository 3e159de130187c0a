# SPDX-License-Identifier: MIT
r"""Verifiable maths: the checking of answers, then problems with worked solutions. Standard library only.

A reward that can be tricked will be tricked: RL searches for the hole. Hence one principle: an answer is exactly one
literal number, with a few things allowed around it: `[x =] [sign] [currency] number [% | unit]`. Whatever is not that
is no answer. Now and then a right answer is refused. But a policy can learn a strict rule, and it would find the holes
in a list of exceptions. Work is bounded before anything is parsed. Numbers are exact `Fraction`s, read by [0-9]
patterns: nothing goes through `eval` or `float`, and no Unicode is folded (NFKC would turn 5² into 52). The `*_reward`
functions are called as TRL calls them. To try: python rewards.py "so \boxed{12}" 12
"""

import ast
import hashlib
import re
import sys
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from operator import add, mul, neg, pos, sub, truediv

MAX_ANSWER = 200  # characters of an answer, or of an arithmetic expression, that we are willing to parse
TASKS = {"chain-sum": range(2, 11), "countdown": range(3, 5)}  # task: how many numbers a problem may have
EXAMPLES = {"chain-sum": "9-1-4+7", "countdown": "7 5 3 = 9"}

_END_OF_TURN = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>|</s>|<eos>|<end_of_turn>")  # <|im_end|> and the like
_MARKER = re.compile(r"####|\banswer[*_]*\s*(?:is\b[*_]*\s*:?|[:=])(?:[*_]+(?=\s))?(?:\s*(?:\\\[|\$\$)\s*\n)?", re.I)
_WITH_DIGIT = re.compile(r"(?<![^\s=])(?:[+-]?[0-9]+ (?=[0-9]+/[0-9]))?[^\s=]*[0-9][^\s=]*")  # 1 1/4 is one
_SENTENCE_END = re.compile(r"\.(?=[*_]*(?:\s+[^\s0-9]|\s*$))|\n")


def extract_answer(completion, *, fallback=False):
    r"""The text of the final answer in a completion (a string, or messages as in TRL), or None.

    Only the text after the last </think> counts; an unclosed <think> gives nothing. The first kind of marker to occur
    is taken, at its last occurrence: <answer>...</answer>; \boxed{...} or \fbox{...}; the sentence after ####, "answer
    is" or "answer:". If it is empty or unterminated there is no answer. fallback: without any marker, the last number.
    """
    text = _text(completion).rsplit("</think>", 1)[-1]
    if "<think>" in text:
        return None
    if "<answer>" in text:
        answer, closed, _ = text.rsplit("<answer>", 1)[1].partition("</answer>")
        answer = answer if closed else ""
    elif boxes := list(re.finditer(r"\\f?box(?:ed)?(?![A-Za-z])", text)):
        inside = text[boxes[-1].end() :].lstrip()[: MAX_ANSWER + 2]
        end = next((i for i in range(len(inside)) if inside.count("{", 0, i + 1) == inside.count("}", 0, i + 1)), 0)
        answer = inside[1:end]  # nothing where the brace never opens or never closes
    elif markers := list(_MARKER.finditer(text)):
        answer = _SENTENCE_END.split(text[markers[-1].end() :].lstrip(), maxsplit=1)[0]
    elif fallback and (numbers := _WITH_DIGIT.findall(text[-2000:])):
        answer = numbers[-1].strip(".,;:?!\"'()[]{}<>\\*_`")
    else:
        return None
    return answer.strip() or None


def _text(completion):
    """A completion is a string, or a list of {"role", "content"} messages, the last of which is the answer's."""
    if not isinstance(completion, str):
        content = (completion[-1].get("content") or "") if completion else ""
        completion = content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
    return _END_OF_TURN.sub("\n", completion)


_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,19}|[0-9]{1,60})"  # 12,345 but neither 12,34 nor 1,2,3
_PART = rf"(?:\{{ ?([+-]?{_INTEGER}) ?\}}|([0-9]))"  # of \frac{3}{4} or of \frac34
_SPELLINGS = (  # applied, from the inside outwards, until nothing changes
    (r"(?<=[0-9])(?:\{,\}|,\\!|\\[,;:])(?=[0-9]{3})", ","),  # thousands
    (r"\\[()\[\],;:! ]|\\(?:q?quad|displaystyle|left|right)(?![A-Za-z])|(?<=[0-9])~|\s+", " "),  # blanks
    (rf"\\[dtc]?frac ?{_PART} ?{_PART}", r" \1\2/\3\4 "),  # a/b; blanks around it, lest anything be glued to it
    (r" ?(?:\\times|\\cdot|[×·*x]) ?10 ?\^ ?(?:\{ ?([+-]?[0-9]+) ?\}|([+-]?[0-9]+))", r"e\1\2 "),
    (r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm)|mbox|f?box|boxed) ?\{([^{}]*)\}|\*\*([^*]+)\*\*", r" \1\2 "),
    (r"^(\$\$?)([^$]+)\1", r" \2 "),  # $5$ and $5$ apples, but not the currency of $5
    (r"^\(([^()]*)\)$|^\{([^{}]*)\}$", r"\1\2"),
    (r"^[ *_`]+|[ *_`.,;]+$", ""),
)
_CURRENCY = r"\\?[$€£¥₹₩₽¢]"
# One letter is a variable, but for the a of "a day"; letters that touch the number make it 5x or 3b. Some are units:
_WORD = r"(?:[A-Za-z]{2,20}|[ghlmsL]|a(?= ))(?: ?\^ ?(?:-?[1-3]|\{-?[1-3]\})|[²³])?\.?"
_TOUCHING = r"(?:[cdkm]m|[km]g|m[lLs]|min|hrs?|secs?|[km]ph|lbs?|ft|oz|USD|EUR|GBP)(?![A-Za-z])"
_NUMBER = re.compile(
    rf"(?:(?:[A-Za-z]|\\[a-z]+)? ?= ?)?(?P<sign>[+-]? ?(?:{_CURRENCY} ?)?|{_CURRENCY} ?[+-] ?)"
    rf"(?:(?:(?P<whole>{_INTEGER}) )?(?P<top>{_INTEGER}) ?/ ?(?P<bottom>{_INTEGER})"
    rf"|(?P<decimal>{_INTEGER}(?:\.[0-9]{{0,60}})?|\.[0-9]{{1,60}})(?:[eE](?P<exponent>[+-]?[0-9]{{1,2}}))?)"
    rf"(?: ?(?P<percent>\\?%|per ?cent)| ?{_CURRENCY}| ?(?:°|\^ ?(?:\\circ|\{{ ?\\circ ?\}})|\\degree) ?[CF]?"
    rf"|(?P<unit>(?:,? | ?/ ?|(?={_TOUCHING})){_WORD}(?:(?:,? | ?/ ?|-){_WORD}){{0,7}}))?"
)
_NO_UNIT = re.compile(  # words that hedge, that change the value, that are a second number
    r"(?i)\b(?:or|and|to|not|least|most|plus|minus|times|squared|cubed|factorial|pi|dozens?|lakhs?|half|halves|thirds?"
    r"|quarters?|fifths?|(?:hundred|thousand|[mbtr]+illion)(?:s|ths?)?"
    r"|one|two|three|four|five|six|seven|eight|nine|ten)(?![a-z])"
)


def _read(text):
    """(number, is it a fraction, is it a percentage) of a text, or None if it is no number. 15% gives 15."""
    text, before = str(text).replace("\N{MINUS SIGN}", "-"), None
    while text != before and len(text) <= MAX_ANSWER:
        before = text
        for pattern, spelling in _SPELLINGS:
            text = re.sub(pattern, spelling, text)
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_ANSWER else None
    if not match or _NO_UNIT.search(match["unit"] or ""):
        return None
    written = match.group("whole", "top", "bottom", "decimal", "exponent")
    whole, top, bottom, decimal, exponent = (Fraction((part or "0").replace(",", "")) for part in written)
    if match["top"] and (bottom == 0 or (match["whole"] and top >= bottom)):  # 1 5/4 is no mixed number
        return None
    value = whole + top / bottom if match["top"] else decimal * Fraction(10) ** exponent
    negative = "-" in match["sign"]  # the sign of -2 1/2 covers all of it
    return (-value if negative else value), bool(match["top"]), bool(match["percent"])


def parse_number(text):
    r"""A text (or a number) as an exact `Fraction`; None if it is not exactly one literal number.

    A number is an integer (thousands grouped by `,` `{,}` `\,`), a decimal, a/b, \frac{a}{b}, a mixed number
    (-2\frac{1}{2} is -5/2), 1.5e3 or 1.5 \times 10^{3}; 28% is 7/25. A unit is a few words, bare or in \text{}, perhaps
    with ^2 or ^3, that neither hedge nor change the value. LaTeX and Markdown wrappings are taken off first.
    """
    value, _, is_percent = _read(text) or (None, False, False)
    return value / 100 if is_percent else value


def is_equiv(prediction, gold, *, tol=0):
    """Whether two texts are the same number, exactly, or within `tol` (int, Fraction or finite float) of each other.

    A percentage beside a plain number stands for its value or for its bare number: 15% is 0.15, and 15. Where the gold
    is an integer, 84/7 is no answer: it echoes the question. ValueError for a tolerance below 0.
    """
    if not 0 <= tol < float("inf"):
        raise ValueError(f"tol is {tol}: it must be 0 or more, and finite")
    a, b = _read(prediction), _read(gold)
    if a is None or b is None:
        return False
    (a, a_fraction, a_percent), (b, _, b_percent) = a, b
    pairs = [(a, b)] if a_percent == b_percent else [(a, b), (a / 100, b) if a_percent else (a, b / 100)]
    return any(abs(a - b) <= Fraction(tol) and not (a_fraction and b.denominator == 1) for a, b in pairs)


def safe_eval(expression):
    """(value, the integers used in order of appearance) of an expression in + - * / ( ) and integer literals.

    The numbers come from the parse tree, so none can hide in a comment or be glued from two. Blanks are collapsed,
    never deleted; the signs × ÷ − are read as * / -. Raises ValueError, and nothing else, for any other text.
    """
    text = str(expression).replace("×", "*").replace("÷", "/").replace("\N{MINUS SIGN}", "-")
    if not re.fullmatch(rf"[0-9+\-*/()\s]{{1,{MAX_ANSWER}}}", text):
        raise ValueError(f"not at most {MAX_ANSWER} characters of integers, + - * / and parentheses")
    operators = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv, ast.UAdd: pos, ast.USub: neg}
    numbers = []

    def value(node):
        if isinstance(node, ast.Constant):  # an integer, by the characters it is made of
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, (ast.UnaryOp, ast.BinOp)) and type(node.op) in operators:
            operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
            return operators[type(node.op)](*map(value, operands))
        raise ValueError(f"{type(node).__name__} is not allowed")

    try:
        return value(ast.parse(" ".join(text.split()), mode="eval").body), numbers
    except (SyntaxError, MemoryError, RecursionError, ZeroDivisionError) as error:
        raise ValueError(f"no value: {error}") from error


def accuracy_reward(completions, solution, *, fallback=False, **kwargs):
    """1.0 where a completion's answer equals the solution, 0.0 where not, None where the solution is no number.

    completions: strings or message lists; solution: texts or numbers. Raises ValueError when the lengths differ. None
    means "leave this sample out", in TRL and in `group_advantages`.
    """
    answers = [extract_answer(completion, fallback=fallback) for completion in completions]
    pairs = zip(answers, solution, strict=True)
    return [None if parse_number(gold) is None else float(is_equiv(answer, gold)) for answer, gold in pairs]


def format_reward(completions, *, think_prefilled=False, **kwargs):
    """1.0 for <think>...</think><answer>...</answer>, each tag once, neither part blank, nothing around; else 0.0.

    think_prefilled: the opening <think> was part of the prompt, so that a completion starts inside it.
    """
    rewards = []
    for completion in completions:
        text = ("<think>" if think_prefilled else "") + _text(completion)
        pieces = [piece.strip() for piece in re.split("(</?(?:think|answer)>)", text)]  # texts and tags in turn
        tags_fit = pieces[1::2] == ["<think>", "</think>", "<answer>", "</answer>"]
        rewards.append(float(tags_fit and [bool(piece) for piece in pieces[::2]] == [False, True, False, True, False]))
    return rewards


def countdown_reward(completions, nums, target, **kwargs):
    """1.0 where the answer is an expression that uses each given number once and equals the target; else 0.0.

    nums: lists of non-negative integers; target: numbers. `expression = target` will do as well. None where the target
    is no number. Raises ValueError when the lengths differ.
    """
    rewards = []
    for completion, given, goal in zip(completions, nums, map(parse_number, target), strict=True):
        expression, *right = (extract_answer(completion) or "").split("=")
        try:
            value, used = safe_eval(expression)
        except ValueError:
            value, used = None, []
        correct = value == goal and sorted(used) == sorted(given) and [*map(parse_number, right)] in ([], [goal])
        rewards.append(None if goal is None else float(correct))
    return rewards


@dataclass(frozen=True)
class Problem:
    """A question whose answer can be checked. Of a countdown that a user typed, the last three are ""."""

    task: str
    prompt: str  # what the model is shown
    answer: str  # the gold, as text
    numbers: tuple  # those in the prompt; their count is the measure of difficulty
    steps: str = ""  # the reasoning that leads to the solution
    solution: str = ""  # what the model is to answer: a number, or the expression that reaches a countdown's target
    guess: str = ""  # what is answered without reasoning: in a sum the right number, in a countdown any expression

    @property
    def held_out(self):
        """Whether this problem is for evaluation only: decided by its text alone, for one in eight."""
        return hashlib.sha256(self.prompt.encode()).digest()[0] % 8 == 0


def make_problem(task, terms, rng, *, largest=9, held_out=False):
    """A random problem of `terms` numbers up to `largest`; rng: random.Random. ValueError for sizes no problem has."""
    if task not in TASKS or terms not in TASKS[task] or not 2 <= largest <= 99:
        raise ValueError(f"no {task} problem has {terms} numbers up to {largest}")
    while True:
        if task == "chain-sum":
            numbers = [rng.randint(0, largest) for _ in range(terms)]
            problem = _chain_sum(numbers, [rng.choice("+-") for _ in numbers[1:]])
        else:
            problem = _countdown(terms, largest, rng)
        if problem.held_out == held_out:
            return problem


def _chain_sum(numbers, signs):
    total, text, steps = numbers[0], str(numbers[0]), []
    for sign, n in zip(signs, numbers[1:]):
        after = total + n if sign == "+" else total - n
        steps.append(f"{total}{sign}{n}={after}")
        total, text = after, f"{text}{sign}{n}"
    return Problem("chain-sum", text, str(total), tuple(numbers), " ".join(steps), str(total), str(total))


def _countdown(terms, largest, rng):
    """Random numbers, and a target that they reach with + and - between them.

    The reasoning is a search in a fixed order: all signs, the last one changing first, until the target is met.
    """
    numbers = [rng.randint(1, largest) for _ in range(terms)]
    all_signs = product("+-", repeat=terms - 1)
    tries = ["".join(f"{sign}{n}" for sign, n in zip(("", *signs), numbers)) for signs in all_signs]
    values = [int(safe_eval(expression)[0]) for expression in tries]
    target, guess = rng.choice([value for value in values if value >= 0]), rng.choice(tries)  # all + is not negative
    found = values.index(target)
    steps = " ".join(f"{expression}={value}" for expression, value in zip(tries[: found + 1], values))
    prompt = f"{' '.join(map(str, numbers))} = {target}"
    return Problem("countdown", prompt, str(target), tuple(numbers), steps, tries[found], guess)


def read_problem(task, text):
    """The problem that a text such as those in EXAMPLES states. Raises ValueError if it states none of this task."""
    if task == "chain-sum" and re.fullmatch(r"\s*[0-9]{1,2}(?:\s*[+-]\s*[0-9]{1,2}){1,9}\s*", text):
        return _chain_sum([int(n) for n in re.findall("[0-9]+", text)], re.findall("[+-]", text))
    if task == "countdown" and re.fullmatch(r"\s*(?:[1-9][0-9]?\s+){2,3}[1-9][0-9]?\s*=\s*[0-9]{1,3}\s*", text):
        *numbers, target = [int(n) for n in re.findall("[0-9]+", text)]
        return Problem(task, f"{' '.join(map(str, numbers))} = {target}", str(target), tuple(numbers))
    raise ValueError(f"{text!r} is not a {task} problem: expected something like {EXAMPLES[task]!r}")


def reward(problem, completions):
    """The rewards of several completions of one problem, by the rule of its task."""
    if problem.task == "countdown":
        return countdown_reward(completions, [problem.numbers] * len(completions), [problem.answer] * len(completions))
    return accuracy_reward(completions, [problem.answer] * len(completions))


def worked_solution(problem, *, think):
    """What the warm start imitates: only an answer, or the steps that lead to the right one and then that."""
    if not problem.solution:
        raise ValueError(f"no solution of {problem.prompt!r} is known")
    if not think:
        return f"<answer>{problem.guess}</answer>"
    return f"<think>{problem.steps}</think><answer>{problem.solution}</answer>"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python rewards.py COMPLETION GOLD")
    completion, gold = sys.argv[1:]
    answer = extract_answer(completion)
    verdict = {1.0: "right", 0.0: "wrong", None: "the gold is no number"}[accuracy_reward([completion], [gold])[0]]
    print(f"answer: {answer}\nnumber: {parse_number(answer)}\nverdict: {verdict}")
