# SPDX-License-Identifier: MIT
"""What the README says is what the code does: its commands, columns, numbers and line counts."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from cases import TINY

import harness
import train

ROOT = Path(train.__file__).parent
sys.path.insert(0, str(ROOT / "experiments"))
import tables  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"^(?:python|torchrun [^ ]+) train\.py.*$", README, re.M)))


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


def test_what_we_found_is_what_the_rows_say():
    """Each number with its interval in the README stands in a table that tables.py prints."""
    found = README[README.index("## What we found") : README.index("## The files")]
    printed = "\n".join(table for name in tables.TABLES for table in tables.tables(name))
    numbers = re.findall(r"[+−-]?\d\.\d{3}(?: \[[^\]]+\])?", found)
    assert len(numbers) >= 5
    for number in numbers:
        assert number in printed, number
