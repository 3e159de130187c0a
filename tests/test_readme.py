# SPDX-License-Identifier: MIT
"""What the README says is what the code does: its commands, columns, numbers and line counts."""

import math
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from helpers import TINY

import gspo
import harness
import train

ROOT = Path(train.__file__).parent
sys.path.insert(0, str(ROOT / "experiments"))
import claims  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"(?:^|`)((?:python|torchrun [^ ]+) train\.py[^`\n]*)", README, re.M)))


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one_that_train_takes(line, monkeypatch):
    """They run, at their smallest setting, in the script that decides what lands."""
    words = shlex.split(re.split(r"train\.py", re.split(r"\s{3,}|  \(", line)[0])[1])
    if "--help" in words:
        return
    monkeypatch.setattr(harness, "read_settings", lambda folder: {"lr": 1e-3})
    harness.parse_settings(train.Settings, words, "")


def test_there_are_commands():
    assert len(COMMANDS) >= 6


def test_the_example_is_what_the_program_prints(capsys):
    runpy.run_path(str(ROOT / "gspo.py"), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    block = re.search(r"```\n(     A \|.*?)```", README, re.S).group(1).splitlines()
    assert len(block) == 3 and block == printed[:3]


def exercise(number):
    """The lines of code in the answer to an exercise."""
    answers = README[README.index("<details>") : README.index("</details>")]
    block = re.search(rf"^{number}\. [^`]*?(?:`[^`\n]+`[^`]*?)*```python\n(.*?)```", answers, re.S | re.M).group(1)
    return [line.removeprefix("   ") for line in block.splitlines() if line.strip()]


def test_the_answer_with_gmpo_is_gmpo():
    """Put into gspo.py, the three lines give the geometric mean of ratios that were clipped at e^±0.4."""
    source = (ROOT / "gspo.py").read_text(encoding="utf-8")
    line = "    log_ratio = (new - old).sum(1, keepdim=True) / lengths  # (B, 1)\n"
    module = {"__name__": "gmpo"}
    exec(source.replace(line, "\n".join([*exercise(4), ""]), 1), module)
    moves = torch.tensor([[0.5, -0.1, -0.6], [0.5, -0.1, -0.6]])
    advantages = torch.tensor([1.0, -1.0])
    loss, _ = module["gspo_loss"](moves, 0 * moves, advantages, moves != 0, clip_eps_low=1e9, clip_eps_high=1e9)
    right = math.exp((0.4 - 0.1 - 0.6) / 3)  # only the upper end is clipped
    wrong = math.exp((0.5 - 0.1 - 0.4) / 3)
    assert loss.item() == pytest.approx(-(right - wrong) / 2)


def test_the_answer_with_an_advantage_per_turn():
    names = {"torch": torch, "gspo_token_loss": gspo.gspo_token_loss, "turn": torch.tensor([[0, 0, 1]])}
    for move, kept in ((0.0, [1, 1, -1]), (0.01, [0, 0, -1]), (-0.01, [1, 1, 0])):
        logprobs = torch.full((1, 3), move).requires_grad_()
        names |= {"logprobs": logprobs, "old_logprobs": torch.zeros(1, 3), "mask": torch.ones(1, 3)}
        exec("\n".join(exercise(5)), names)
        names["loss"].backward()
        torch.testing.assert_close(logprobs.grad, -torch.tensor([kept]) * math.exp(move) / 3)


def test_the_diff_is_the_real_one():
    block = re.search(r"```diff\n(.*?)```", README, re.S).group(1).splitlines()
    sources = {name: (ROOT / f"{name}.py").read_text(encoding="utf-8").splitlines() for name in ("grpo", "gspo")}
    for line in block:
        assert line[0] in "-+ "
        for name, sign in (("grpo", "-"), ("gspo", "+")):
            if line[0] in (sign, " "):
                assert line[1:] in sources[name], line


def test_every_column_is_explained(tmp_path):
    train.main([*TINY, "--warm-steps", "2", "--rl-steps", "1", "--out", str(tmp_path)])
    columns = (tmp_path / "gspo.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    shown = {"step", "accuracy", *train.LOG_COLUMNS, "clip_frac_low", "clip_frac_high"}
    for column in set(columns) - shown:
        assert f"`{column}`" in README, column
    for heading, _, _ in train.LOG_COLUMNS.values():
        assert re.search(rf"^\| {re.escape(heading.strip())} \|", README, re.M), heading


def test_line_counts():
    listed = dict(re.findall(r"^\| `(\w+\.py)` \| (\d+) \|", README, re.M))
    assert set(listed) == {path.name for path in ROOT.glob("*.py")}
    for name, lines in listed.items():
        assert int(lines) == len((ROOT / name).read_text(encoding="utf-8").splitlines()), name


def test_what_we_found_is_what_the_claims_say():
    """Each effect in the README stands in a line of the table of claims, with its interval and its verdict."""
    found = README[README.index("## What we found") : README.index("## The files")]
    printed = [line.split(" | ") for line in claims.table()]
    rows = [line.strip("| ").split(" | ") for line in found.splitlines() if re.search(r"\| [+-]\.\d", line)]
    assert rows
    for row in rows:
        effect, interval = row[-2].split(", ")
        assert any(line[3:5] == [effect, interval] and line[7] == row[-1] for line in printed), row
