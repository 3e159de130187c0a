# SPDX-License-Identifier: MIT
"""What a person types: nonsense is one clear line, and every flag is explained. Also the command of sample.py."""

import io
import json
import sys

import pytest
import torch
from helpers import TINY, parsed, run, settings

import harness
import sample
import train
from model import ModelConfig, Transformer, checkpoint


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--speed 3", "unrecognized arguments: --speed"),
        ("--learners gspo ppo", "invalid choice: 'ppo'"),
        ("--learners gspo gspo", "names one twice"),
        ("--width 18 --heads 4", "divisible by 2 x heads"),
        ("--kv-heads 3", "divisible by kv_heads"),
        ("--experts 1", "experts_per_token 2 exceeds experts 1"),
        ("--experts 300", "at most 256"),
        ("--group 1", "--group: 1 is not at least 2"),
        ("--prompts 3 --group 3 --minibatches 2", "--minibatches 2 does not divide 9 responses"),
        ("--rl-steps 0", "--rl-steps: 0 is not at least 1"),
        ("--warm-steps -5", "--warm-steps: -5 is not at least 1"),
        ("--temperature 0", "--temperature: 0.0 is not from 1e-06 to"),
        ("--lr nan", "--lr: nan is not above 0"),
        ("--lr 0", "--lr: 0.0 is not above 0"),
        ("--lr fast", "invalid float value: 'fast'"),
        ("--gspo-clip 0 1", "--gspo-clip: 0.0 is not above 0"),
        ("--gspo-clip 0.1", "expected 2 arguments"),
        ("--seed -1", "--seed: -1 is not from 0 to"),
        ("--max-terms 11", "from 2 to 10"),
        ("--largest 100", "100 is not from 2 to 99"),
        ("--max-new-tokens 1000", "does not fit the context"),
        ("--warm-think 1.5", "from 0 to 1"),
        ("--task algebra", "invalid choice: 'algebra'"),
        ("--device cuda", "device cuda is not available"),
        ("--resume nowhere --lr 1", "leave out --lr"),
        ("--resume nowhere", "cannot resume nowhere"),
        ("--resum x", "unrecognized arguments"),
    ],
)
def test_one_clear_line(tmp_path, monkeypatch, capsys, flags, message):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.chdir(tmp_path)
    tiny = [] if "--resume" in flags else TINY
    assert run(monkeypatch, *tiny, *flags.split()) == 2
    err = capsys.readouterr().err.strip()
    assert message in err and len(err.splitlines()) == 1 and err.startswith("train.py: ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_settings_says_which(finished, monkeypatch, capsys):
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    assert run(monkeypatch, *TINY, "--out", finished, "--lr", 0.5) == 2
    assert "--lr was 0.001, is 0.5" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("mine")
    assert run(monkeypatch, *TINY, "--out", tmp_path / "file" / "run") == 1
    assert "cannot use" in capsys.readouterr().err and (tmp_path / "file").read_text() == "mine"
    assert run(monkeypatch, *TINY, "--out", tmp_path / "file") == 1


def test_damaged_folders_say_so(finished, tmp_path, monkeypatch, capsys):
    for name, content in [
        ("settings.json", b"{"),
        ("settings.json", b'{"lr": "x"}'),
        ("settings.json", b"[]"),
        ("state.pt", b"x"),
    ]:
        folder = tmp_path / f"{name}{len(content)}"
        folder.mkdir()
        for path in finished.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / name).write_bytes(content)
        for argv in (["--resume", folder], [*TINY, "--out", folder]):
            assert run(monkeypatch, *argv) == 2
            err = capsys.readouterr().err.strip()
            assert name in err and len(err.splitlines()) == 1


def test_settings_in_a_notebook():
    """What is not given is the preset's, or the default."""
    s = train.Settings(lr=8e-4)
    assert (s.lr, s.preset, s.width, s.rl_steps, s.learners) == (8e-4, "tiny", 96, 36, ["gspo", "grpo"])
    s = train.Settings(lr=8e-4, preset="laptop-gpu", task="countdown")
    assert (s.lr, s.width, s.rl_steps, s.group, s.max_new_tokens) == (8e-4, 256, 40, 16, 112)
    s = train.Settings(lr=1, gspo_clip=(1, 0.5))
    assert repr((s.lr, s.gspo_clip)) == "(1.0, [1.0, 0.5])"  # an int where a float is meant; a tuple for a list
    s.learners.clear()
    assert train.Settings().learners == ["gspo", "grpo"]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"rl_steps": "4"}, "--rl-steps: '4' is no int"),
        ({"rl_steps": 4.5}, "--rl-steps: 4.5 is no int"),
        ({"rl_steps": 4.0}, "--rl-steps: 4.0 is no int"),
        ({"rl_steps": True}, "--rl-steps: True is no int"),
        ({"rl_steps": [4]}, "--rl-steps: [4] is no int"),
        ({"lr": "x"}, "--lr: 'x' is no float"),
        ({"lr": True}, "--lr: True is no float"),
        ({"lr": float("nan")}, "--lr: nan is not above 0"),
        ({"out": 5}, "--out: 5 is no str"),
        ({"task": []}, "--task: [] is no str"),
        ({"task": "algebra"}, "--task: invalid choice: 'algebra' (choose from "),
        ({"preset": "huge"}, "--preset: invalid choice: 'huge'"),
        ({"dtype": "float16"}, "--dtype: invalid choice: 'float16'"),
        ({"gspo_clip": 0.1}, "--gspo-clip: 0.1 is not a list like [0.003, 0.004]"),
        ({"gspo_clip": [0.1]}, "--gspo-clip: [0.1] is not a list like"),
        ({"gspo_clip": [0.1, 0.1, 0.1]}, "--gspo-clip: [0.1, 0.1, 0.1] is not a list like"),
        ({"gspo_clip": [0.1, "0.1"]}, "--gspo-clip: '0.1' is no float"),
        ({"gspo_clip": [0.1, None]}, "--gspo-clip: None is no float"),
        ({"learners": "gspo"}, "--learners: 'gspo' is not a list like"),
        ({"learners": []}, "--learners: [] is not a list like"),
        ({"learners": ["gspo", "ppo"]}, "--learners: invalid choice: 'ppo'"),
    ],
)
def test_settings_of_a_wrong_kind_are_one_line(wrong, message):
    with pytest.raises(ValueError) as error:
        train.Settings(**wrong)
    assert str(error.value).startswith(message)
    assert len(str(error.value).splitlines()) == 1


def test_a_settings_file_with_another_kind_of_value_is_not_resumed(finished, tmp_path, monkeypatch, capsys):
    """It is refused in one line, and what is in the folder stays as it is."""
    for path in finished.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = json.loads((finished / "settings.json").read_text(encoding="utf-8"))
    for name, value in [
        ("rl_steps", "4"),
        ("rl_steps", 4.5),
        ("rl_steps", True),
        ("rl_steps", None),
        ("lr", "1e-3"),
        ("lr", None),
        ("task", 1),
        ("task", None),
        ("learners", "gspo"),
        ("learners", ["gspo", None]),
        ("learners", None),
        ("gspo_clip", [0.003]),
        ("gspo_clip", {"low": 0.003, "high": 0.004}),
        ("speed", 3),
    ]:
        (tmp_path / "settings.json").write_text(json.dumps(whole | {name: value}), encoding="utf-8")
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert run(monkeypatch, "--resume", tmp_path) == 2, (name, value)
        done = capsys.readouterr()
        assert len(done.err.strip().splitlines()) == 1 and done.out == ""
        assert str(tmp_path) in done.err and name.replace("_", "-") in done.err
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_help_explains_every_flag(monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    flags = ["--" + name.replace("_", "-") for name in vars(settings())]
    assert len(flags) > 35 and all(flag in text for flag in flags)
    for section in ("the run", "the task", "the model", "imitation", "reinforcement learning"):
        assert f"{section}:" in text


def test_what_was_typed_wins_over_a_preset_even_if_it_is_the_default(finished, monkeypatch, capsys):
    assert parsed("--preset", "laptop-gpu", "--width", "96", "--lr=2e-4").width == 96
    for typed in ("--lr 2e-4", "--lr=2e-4"):
        assert run(monkeypatch, "--resume", finished, *typed.split()) == 2
        assert "leave out --lr" in capsys.readouterr().err


def test_the_run_says_what_was_changed(capsys):
    for argv, changed in (
        (["--task", "countdown"], "nothing"),
        (["--lr", "1e-3", "--layers", "3"], "--layers 3 --lr 0.001"),
    ):
        train.describe(parsed(*argv), torch.device("cpu"))
        assert f"changed     {changed}\n" in capsys.readouterr().out


def test_presets_fit():
    laptop = parsed("--preset", "laptop-gpu", "--lr", "1")
    assert laptop.width == 256 and laptop.lr == 1.0  # a flag beside the preset wins
    with torch.device("meta"):
        total, active = Transformer(laptop.model_config).num_parameters()
    assert 15e6 < total < 25e6 and active < total / 4


def test_sample_command(finished, tmp_path, capsys, monkeypatch):
    def ask(*argv, stdin="", checkpoint=finished / "gspo.pt"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            monkeypatch.setattr(sys, "argv", ["sample.py", "--checkpoint", str(checkpoint), *argv])
            harness.run_program(sample.main)
        except SystemExit as exit:
            assert exit.code in (1, 2)
        return capsys.readouterr()

    done = ask("9-1-4+7", "--samples", "2", "--max-new-tokens", "8")
    assert done.out.startswith("9-1-4+7\n") and done.out.count("11 is right") == 2
    done = ask(stdin="1+1\n\nwhat is love\n")
    assert "1+1\n" in done.out and "what is love\n" in done.out
    assert "warning" in done.err and "not a chain-sum problem" in done.err
    torch.manual_seed(0)
    ours = Transformer(ModelConfig(width=16, heads=2, expert_width=16))
    tokens = {"special_tokens": list(sample.SPECIAL_TOKENS)}
    for name, content in {
        "foreign": {"a": 1},
        "vocabulary": checkpoint(ours, task="chain-sum", special_tokens=[]),
        "task": checkpoint(ours, **tokens),
        "tasks": checkpoint(ours, task=[], **tokens),
    }.items():
        torch.save(content, tmp_path / f"{name}.pt")
    (tmp_path / "bad.pt").write_bytes(b"junk")
    for argv, options, message in [
        (["--samples", "0", "1+1"], {}, "at least one"),
        (["--temperature", "-1", "1+1"], {}, "temperature is -1"),
        (["--temperature", "hot", "1+1"], {}, "invalid float value: 'hot' (see --help)"),
        ([], {}, "no question"),
        ([], {"stdin": "\n  \n"}, "no question"),
        (["1+1"], {"checkpoint": "none.pt"}, "none.pt: No such file"),
        (["1+1"], {"checkpoint": tmp_path / "bad.pt"}, "not a checkpoint"),
        (["1+1"], {"checkpoint": tmp_path / "foreign.pt"}, "not a checkpoint of this project"),
        (["1+1"], {"checkpoint": tmp_path / "vocabulary.pt"}, "another vocabulary"),
        (["1+1"], {"checkpoint": tmp_path / "task.pt"}, "another task, None"),
        (["1+1"], {"checkpoint": tmp_path / "tasks.pt"}, "another task, []"),
    ]:
        done = ask(*argv, **options)
        assert message in done.err and len(done.err.splitlines()) == 1 and done.out == "", argv
