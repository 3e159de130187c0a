# SPDX-License-Identifier: MIT
r"""Verifiable maths: the checking of answers, then problems with worked solutions. Standard library only.

A reward that can be tricked will be tricked: RL searches for the hole. Hence one principle: an answer is exactly one
literal number, with a few things allowed around it: `[x =] [sign] [currency] number [%] [unit]`. Whatever is not that
is no answer. Now and then a right answer is refused. But a policy can learn a strict rule, and it would find the holes
in a list of exceptions. Work is bounded before anything is parsed. Numbers are exact `Fraction`s, read by [0-9]
patterns: nothing goes through `eval` or `float`, and no Unicode is folded (NFKC would turn 5² into 52). The `*_reward`
functions are called as TRL calls them. To see two problems, or to check an answer:

    python rewards.py
    python rewards.py "so \boxed{12}" 12
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
_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])")
_MARKER = re.compile(
    r"####|\b(?P<final>final\s)?answer[*_]*\s*(?:[:=]|is\b[*_]*(?:,?\s(?:therefore|thus|hence|then|so)\b,?)?\s*:?)"
    r"(?:[*_]+(?=\s))?(?:\s*(?:\\\[|\$\$)\s*\n)?",
    re.I,
)
_SENTENCE_END = re.compile(r"\.(?=[*_]*(?:\s+[^\s0-9]|\s*$))|\n")


def extract_answer(completion, *, fallback=False):
    r"""The text of the final answer in a completion (a string, or messages as in TRL), or None.

    Only the text after the last </think> counts; an unclosed <think> gives nothing. The first kind of marker to occur
    is taken, at its last occurrence: <answer>...</answer>; \boxed{...} or \fbox{...}, unless a "final answer is" after
    it gives a number; the sentence after ####, "answer is (therefore)" or "answer:". If it is empty or unterminated
    there is no answer. fallback: without any marker, the last number; and of a marker's sentence the number it ends in.
    """
    text = _text(completion).rsplit("</think>", 1)[-1]
    if "<think>" in text:
        return None
    boxes = list(_BOX.finditer(text))
    markers = list(_MARKER.finditer(text))
    sentence = ""
    if markers:
        sentence = _SENTENCE_END.split(text[markers[-1].end() :].lstrip(), maxsplit=1)[0]
    if "<answer>" in text:
        answer, closed, _ = text.rsplit("<answer>", 1)[1].partition("</answer>")
        if not closed:
            return None
    elif boxes:
        answer = _in_braces(text, boxes[-1].end())
        if markers and markers[-1]["final"] and markers[-1].start() > boxes[-1].start() and _read(sentence):
            answer = sentence
    elif markers:
        answer = sentence
        if fallback and not _read(sentence):
            answer = _last_number(sentence, at_the_end=True) or sentence
    elif fallback:
        return _last_number(text)
    else:
        return None
    return answer.strip() or None


def _text(completion):
    """A completion is a string, or a list of {"role", "content"} messages, the last of which is the answer's."""
    if not isinstance(completion, str):
        content = (completion[-1].get("content") or "") if completion else ""
        completion = content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)
    return _END_OF_TURN.sub("\n", completion)


def _in_braces(text, start):
    """What stands between the brace that opens there and the one that closes it; "" where either is missing."""
    text = text[start : start + MAX_ANSWER + 2].lstrip()
    depth = 0
    for i, character in enumerate(text):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth == 0:
            return text[1:i]
    return ""


_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3}){1,19}|[0-9]{1,60})"  # 12,345 but neither 12,34 nor 1,2,3
_PART = rf"(?:\{{ ?([+-]? ?{_INTEGER}) ?\}}|([0-9]))"  # of \frac{3}{4} or of \frac34
_SPELLINGS = [  # applied, from the inside outwards, until nothing changes
    (r"(?<=[0-9]) ?(?:\{ ?, ?\}(?:\\!)? ?|, ?\\! ?|\\[,;:])(?=[0-9]{3})", ","),  # thousands
    (r"\\[()\[\],;:!> ]|\\(?:q?quad|(?:thin|en)space|displaystyle|left|right)(?![A-Za-z])|\s+", " "),  # blanks
    (r"(?<=[^\s*(~])~|~(?= ?[A-Za-z}])", " "),  # a blank too, but ~5 is about 5
    (rf"\\[dtc]?frac ?{_PART} ?{_PART}", r" \1\2/\3\4 "),  # a/b; blanks around it, lest anything be glued to it
    (r" ?(?:\\times|\\cdot|[×·*x]) ?10 ?\^ ?(?:\{ ?([+-]?[0-9]+) ?\}|([+-]?[0-9]+))", r"e\1\2 "),
    (r"\\(?:(?:text|math)(?:bf|it|rm|sf|tt|up|normal)?|emph|operatorname|[mf]?box(?:ed)?) ?\{([^{}]*)\}", r" \1 "),
    (r"\*\*([^*]+)\*\*", r" \1 "),
]
_WRAPPINGS = [  # of a whole answer
    (r"^(\$\$?)([^$]+)\1", r" \2 "),  # $5$ and $5$ apples, but not the currency of $5
    (r"^\(([^()]*)\)$|^\{([^{}]*)\}$", r"\1\2"),
    (r"^[ *_`]+|[ *_`.,;]+$", ""),
]
_CURRENCY = r"\\?[$€£¥₹₩₽¢]"
# One letter is a variable, but for some units and the a of "a day"; letters that touch the number make it 5x or 3b.
_WORD = r"(?:[A-Za-z]{2,20}|[ghlmsL]|a(?= ))(?: ?\^ ?(?:-?[1-3]|\{ ?-?[1-3] ?\})|[²³])?\.?"
_TOUCHING = r"(?:[cdkm]m|[km]g|m[lLs]|min|hrs?|secs?|[km]ph|lbs?|ft|oz|USD|EUR|GBP)(?![A-Za-z])"
_NUMBER = re.compile(
    rf"(?:(?:[A-Za-z]|\\[a-z]+)? ?= ?)?(?P<sign>[+-]? ?(?:{_CURRENCY} ?)?|{_CURRENCY} ?[+-] ?)"
    rf"(?:(?:(?P<whole>{_INTEGER}) |(?P<top_sign>[+-]) ?)?(?P<top>{_INTEGER}) ?/"
    rf" ?(?P<bottom_sign>[+-]?) ?(?P<bottom>{_INTEGER})"
    rf"|(?P<decimal>{_INTEGER}(?:\.[0-9]{{0,60}})?|\.[0-9]{{1,60}})(?:[eE](?P<exponent>[+-]?[0-9]{{1,2}}))?)"
    rf"(?: ?(?P<percent>\\?%|per ?cent|pct)| ?{_CURRENCY}| ?(?:°|\^ ?(?:\\circ|\{{ ?\\circ ?\}})|\\degree) ?[CF]?)?"
    rf"(?P<unit>(?:,? | ?/ ?|(?={_TOUCHING})){_WORD}(?:(?:,? | ?/ ?|-){_WORD}){{0,24}})?"
)
# Words after a number must leave its value alone. One of up to three letters must be among these, for what is left of
# them is algebra, functions and slang (xy, ln, bn). A longer one must not be loaded.
_SHORT_WORDS = frozenset(
    "mm cm dm km m nm in ft yd mi ha sq cu g mg kg lb lbs oz ton l ml cl dl cc qt pt gal tsp s ms sec min h hr hrs day"
    " wk mo yr yrs am pm mph kph kmh fps rpm hz khz mhz kb mb gb tb w kw kwh kj deg rad mol pa kpa usd eur gbp inr yen"
    " won man men boy kid guy cat dog pig cow hen bee ant egg pie tea jam ice oil gum cup mug jar can box bag bed bus"
    " car van toy hat cap pen key row set lot pot pan tin tub bar bun nut way job lap run win hit leg arm eye map bet"
    " tie fan fee tax tip pet age a an the of in on at by for per to as is are was and but so he she it we you who has"
    " had did got her his its our all old new big red due ago now my me him be do go get buy out off too any rev mpg"
    " amp ohm cal atm bit".split()
)
_ONE = (
    r"(?:zero|nought|naught|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twent(?:y|ie)|hundred"
    r"|(?:thir|fou?r|fif|six|seven|eigh|nine)(?:teen|ty|tie)|thousand|milliard|[a-z]{1,9}illion)"
)
_LOADED = re.compile(  # cardinals, ordinals (a second is a time), scales, signs, hedges, operations, functions, Greek
    rf"{_ONE}{{1,4}}(?:e?s|ths?|fold)?"
    rf"|{_ONE}{{0,4}}(?:firsts?|thirds?|(?:fif|eigh|nin|twelf)ths?|hal(?:f|ves)|quarters?)"
    r"|dozen(?:s|ths?)?|gross|grand|lakhs?|lacs|crores?|myriads?|thou|mill|(?:per)?mil(?:le)?|permyriad|promille|basis"
    r"|minus|negatives?|below|beneath|under|subzero"
    r"|or|nor|not|never|n?either|else|otherwise|unless|except|about|around|roughly|nearly|almost|circa|perhaps|maybe"
    r"|approx(?:imately)?|possibly|probably|least|most|m(?:ax|in)imum|upwards?|above|counting|respectively|versus"
    r"|instead|rather|wrong|incorrect|false"
    r"|infinit[ey]|plus|added|subtracted|divided|multiplied|raised|power|squared|cubed|doubled?|tripled?|quadrupled?"
    r"|halved|twice|thrice|factorial|reciprocal|inverse|mod|modulo|sqrt|cbrt|root|frac|floor|ceil(?:ing)?|gcd|lcm|abs"
    r"|max|exp|log(?:arithm)?|ln|lg|(?:arc|ar|a)?(?:sin|cos|tan|cot|sec(?=h)|cosec|csc)h?"
    r"|(?:arc)?(?:co)?(?:sine|tangent|secant)"
    r"|alpha|beta|gamma|delta|(?:var)?epsilon|[bz]?eta|(?:var)?theta|iota|kappa|lambda|mu|nu|xi|omicron|pi"
    r"|(?:var)?rho|sigma|tau|upsilon|(?:var)?phi|chi|psi|omega",
    re.I,
)


def _spell(text, spellings):
    """The text with these (pattern, replacement) pairs applied until nothing changes."""
    before = None
    while text != before:
        before = text
        for pattern, spelling in spellings:
            text = re.sub(pattern, spelling, text)
    return text


def _are_loaded(words):
    """Whether words beside a number make it another or leave it open: a loaded one, a variable, "3 times" and more."""
    for word in words:
        if _LOADED.fullmatch(word) or (len(word) == 1 and word not in "aAICFghlmsL"):
            return True
    return "times" in words[:-1] or re.search(r"\band (?:up|more|over)\b", " ".join(words)) is not None


def _read(text):
    """(number, is it a fraction, is it a percentage) of a text, or None if it is no number. 15% gives 15."""
    text = str(text).replace("\N{MINUS SIGN}", "-").replace("\N{EN DASH}", "-")
    if len(text) > MAX_ANSWER:
        return None
    match = _NUMBER.fullmatch(_spell(text, _SPELLINGS + _WRAPPINGS))
    if not match:
        return None
    unit = re.findall("[A-Za-z]+", match["unit"] or "")
    if _are_loaded(unit) or unit[:1] in (["score"], ["MM"]):
        return None
    for word in unit:
        if len(word) <= 3 and word.lower() not in _SHORT_WORDS:
            return None
    written = match.group("whole", "top", "bottom", "decimal", "exponent")
    whole, top, bottom, decimal, exponent = (Fraction((part or "0").replace(",", "")) for part in written)
    value = decimal * Fraction(10) ** exponent
    if match["top"]:
        if bottom == 0 or (match["whole"] and (top >= bottom or match["bottom_sign"])):  # 1 5/4 is no mixed number
            return None
        value = whole + top / bottom
    for sign in match.group("sign", "top_sign", "bottom_sign"):
        if "-" in (sign or ""):
            value = -value  # the sign of -2 1/2 covers all of it
    return value, bool(match["top"]), bool(match["percent"])


_CALCULATION = re.compile("<<[^<>]{0,200}>>")  # GSM8K writes 3*4=<<3*4=12>>12
_SQUARE = re.compile(r"([0-9] ?(?:[A-Za-z]{2,20}|m|s)) ?\^ ?(?:[1-3]|\{ ?-?[1-3] ?\})")
_TO_NEXT_WORD = re.compile(r"(?:\\[A-Za-z]+|[^A-Za-z])*")
_NEXT_WORD = re.compile(r"(?:(?:,? | ?/ ?|-)?(?:an? |per )?[A-Za-z]+[²³]?(?: ?/ ?[A-Za-z]+[²³]?)?)?")
_NEXT_CLAUSE = re.compile(r" (?:in|for|from|on|at(?! least| most)|is|are|was|were|will|who|that|which|because|when) ")
_MAY_STAND_BEFORE = re.compile(
    r"(?:^|(?<![<>!~=])=>?|->|[→⇒]|(?<!\\)\b(?P<word>[A-Za-z]{2,}|[aAI])(?: of)?[.:,;(\['\"“]?) ?['\"“(\[]?$"
)
_JOINED = re.compile(  # 3 and 4, 3 feet 4, 3 cm by 4: a word between two numbers may only be a verb; more than 4
    r"[0-9][^A-Za-z0-9]*and$"
    r"|[0-9][^A-Za-z0-9,;:]*(?!(?:is|are|was|equals|makes|gives|leaves)$)[A-Za-z]+(?: and| of| by)?$"
    r"|\b(?:(?:out|square|cube) of|up to|than|per|over|times)$|(?:\b(?:not|never|cannot)|n['’]t) [a-z]+$",
    re.I,
)


def _last_number(text, *, at_the_end=False):
    r"""The last number of a text, or None if there is none or what is around it is not harmless.

    This finds its place: it begins as far left of the last digit as `_read` reads a number, and ends before the next
    word. It must be one with that word too (at_the_end: with all that follows), and the next three, up to a verb or a
    new clause, must leave it alone.
    """
    with_digit = [part for part in _SENTENCE_END.split(_CALCULATION.sub("", text[-2000:])) if re.search("[0-9]", part)]
    if not with_digit:
        return None
    sentence = " ".join(with_digit[-1].split())
    last = max(sentence.rfind(digit) for digit in "0123456789")
    sentence = _SQUARE.sub(r"\1²", _spell(sentence[max(0, last - 200) : last + 100], _SPELLINGS))
    last = max(sentence.rfind(digit) for digit in "0123456789")
    end = len(sentence[: _TO_NEXT_WORD.match(sentence, last).end()].rstrip(" .,;:/()[]'\"”"))
    what_is_counted = _NEXT_CLAUSE.split(sentence[end:])[0]
    if _are_loaded(re.findall("[A-Za-z]+", what_is_counted)[:3]):
        return None
    unit = sentence[end:] if at_the_end else _NEXT_WORD.match(sentence, end).group()
    for start in [0] + [match.end() for match in re.finditer(r"[ =>:(\['\"“]", sentence[:last])]:
        number = sentence[start:end]
        if last - start < 80 and not re.match(r"\* |[^=]*=", number) and _read(number):
            if _may_follow(sentence[:start], number) and _read(number + unit):
                return _spell(number, _SPELLINGS + _WRAPPINGS)
            return None
    return None


def _may_follow(before, number):
    """Whether what stands before a number leaves it alone: no other number's part, no hedge, no sum."""
    match = _MAY_STAND_BEFORE.search(before)
    if not match or (match["word"] and _are_loaded([match["word"]])) or _JOINED.search(before.rstrip(" ('\"")):
        return False
    return not (match["word"] and (number.startswith("+") or ("-" in number and re.search("[0-9]", before))))


def parse_number(text):
    r"""A text (or a number) as an exact `Fraction`; None if it is not exactly one literal number.

    A number is an integer (thousands grouped by `,` `{,}` `\,`), a decimal, a/b, \frac{a}{b}, a mixed number
    (-2\frac{1}{2} is -5/2), 1.5e3 or 1.5 \times 10^{3}; 28% is 7/25. A minus may be an en dash. A unit is a few words,
    bare or in \text{}, perhaps with ^2 or ^3, that neither hedge nor change the value: "72 clips", "5 km/h", "3 times",
    but not "5 sixths", "5 crore", "5 below zero", "5 or so", "5 sqrt", "5 alpha", "5 xy". Up to three letters it is one
    of a short list. LaTeX and Markdown wrappings are taken off first.
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
    predicted = _read(prediction)
    true = _read(gold)
    if predicted is None or true is None:
        return False
    a, a_is_fraction, a_is_percent = predicted
    b, _, b_is_percent = true
    pairs = [(a, b)]
    if a_is_percent and not b_is_percent:
        pairs.append((a / 100, b))
    if b_is_percent and not a_is_percent:
        pairs.append((a, b / 100))
    for x, y in pairs:
        if abs(x - y) <= Fraction(tol) and not (a_is_fraction and y.denominator == 1):
            return True
    return False


_OPERATORS = [("×", "*"), ("\\times", "*"), ("\\cdot", "*"), ("÷", "/"), ("\\div", "/"), ("−", "-"), ("–", "-")]


def safe_eval(expression):
    r"""(value, the integers used in order of appearance) of an expression in + - * / ( ) and integer literals.

    The numbers come from the parse tree, so none can hide in a comment or be glued from two. Blanks are collapsed,
    never deleted; × ÷ − – \times \cdot \div are read as * / -. Raises ValueError, and nothing else, for any other.
    """
    text = str(expression)
    for sign, operator in _OPERATORS:
        text = text.replace(sign, operator)
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
    r"""1.0 where a completion's answer equals the solution, 0.0 where not, None where the solution is no number.

    completions: strings or message lists; solution: numbers or texts. A text that is no number itself, such as the raw
    solutions of GSM8K (... #### 72) and MATH (... \boxed{5}), is read as a completion is, but two boxes that differ are
    none. None means "leave this sample out", in TRL and in `group_advantages`. ValueError when the lengths differ.
    """
    rewards = []
    for completion, gold in zip(completions, solution, strict=True):
        if parse_number(gold) is None:
            text = str(gold)
            boxes = {_in_braces(text, box.end()) for box in _BOX.finditer(text)}
            gold = extract_answer(text) if len({parse_number(box) for box in boxes}) < 2 else None
        if parse_number(gold) is None:
            rewards.append(None)
        else:
            rewards.append(float(is_equiv(extract_answer(completion, fallback=fallback), gold)))
    return rewards


def format_reward(completions, *, think_prefilled=False, **kwargs):
    """1.0 for <think>...</think><answer>...</answer>, each tag once, neither part blank, nothing around; else 0.0.

    think_prefilled: the opening <think> was part of the prompt, so that a completion starts inside it.
    """
    rewards = []
    for completion in completions:
        text = ("<think>" if think_prefilled else "") + _text(completion)
        pieces = [piece.strip() for piece in re.split("(</?(?:think|answer)>)", text)]  # texts and tags in turn
        fits = False
        if pieces[1::2] == ["<think>", "</think>", "<answer>", "</answer>"]:
            before, reasoning, between, answer, after = pieces[::2]
            fits = reasoning != "" and answer != "" and before == between == after == ""
        rewards.append(float(fits))
    return rewards


def countdown_reward(completions, nums, target, **kwargs):
    r"""1.0 where the answer is an expression that uses each given number once and equals the target; else 0.0.

    nums: lists of non-negative integers; target: numbers. `expression = target` will do as well, and so will \times and
    a full stop at the end, inside <answer> too: they change no number. None where the target is no number. Raises
    ValueError when the lengths differ.
    """
    rewards = []
    for completion, given, goal in zip(completions, nums, map(parse_number, target), strict=True):
        expression, *right = (extract_answer(completion) or "").removesuffix(".").split("=")
        try:
            value, used = safe_eval(expression)
        except ValueError:
            value = None  # equals no target
            used = []
        correct = value == goal and sorted(used) == sorted(given)
        if right:
            correct = correct and [parse_number(side) for side in right] == [goal]
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
    total = numbers[0]
    text = str(total)
    steps = []
    for sign, n in zip(signs, numbers[1:]):
        after = total + n if sign == "+" else total - n
        steps.append(f"{total}{sign}{n}={after}")
        total = after
        text += f"{sign}{n}"
    return Problem("chain-sum", text, str(total), tuple(numbers), " ".join(steps), str(total), str(total))


def _countdown(terms, largest, rng):
    """Random numbers, and a target that they reach with + and - between them.

    The reasoning is a search in a fixed order: all signs, the last one changing first, until the target is met.
    """
    numbers = [rng.randint(1, largest) for _ in range(terms)]
    all_signs = product("+-", repeat=terms - 1)
    tries = ["".join(f"{sign}{n}" for sign, n in zip(("", *signs), numbers)) for signs in all_signs]
    values = [int(safe_eval(expression)[0]) for expression in tries]
    target = rng.choice([value for value in values if value >= 0])  # there is one: all + is not negative
    guess = rng.choice(tries)
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


def main(arguments):
    """The verdict on an answer; without arguments two problems, each with a right and a wrong response."""
    if len(arguments) == 2:
        completion, gold = arguments
        answer = extract_answer(completion)
        verdict = {1.0: "right", 0.0: "wrong", None: "the gold is no number"}[accuracy_reward([completion], [gold])[0]]
        print(f"answer: {answer}\nnumber: {parse_number(answer)}\nverdict: {verdict}")
        return
    if arguments:
        sys.exit("usage: python rewards.py [COMPLETION GOLD]")
    responses = {
        "chain-sum": ["<think>9-1=8 8-4=4 4+7=11</think><answer>11</answer>", "<answer>9-1-4+7</answer>"],
        "countdown": ["<think>7+5+3=15 7+5-3=9</think><answer>7+5-3</answer>", "<answer>3*3</answer>"],
    }
    for task, example in EXAMPLES.items():
        problem = read_problem(task, example)
        print(f"{task}: {problem.prompt}")
        for response in responses[task]:
            print(f"  answer {reward(problem, [response])[0]}, format {format_reward([response])[0]}: {response}")
    print('To check an answer: python rewards.py "so \\boxed{12}" 12')


if __name__ == "__main__":
    main(sys.argv[1:])
