# SPDX-License-Identifier: MIT
"""What surrounds a run: copied folders, files and locks that fail, streams that are absent, full or closed, terminals."""

import errno
import fcntl
import io
import os
import pty
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, TINY, results, run

import harness
import imitate
import rewards
import sample
import train

SHORT = [*TINY, "--warm-steps", "2", "--rl-steps", "1"]
NASTY = "\x1b[31m \a \0 \r\n \u202e \x9b \ud800"  # colours, a bell, a line end, right to left, a C1 control, no text
ESCAPED = r"\x1b[31m \x07 \x00 \r\n \u202e \x9b \ud800"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stop_at(monkeypatch, count, number, *argv):
    """A run that gets this signal in its count-th RL step. Returns its exit code."""
    real = train.rl_step
    calls = iter(range(1, 10**9))

    def ask(*args, **options):
        if next(calls) == count:
            signal.raise_signal(number)
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "rl_step", ask)
        return run(patch, *argv)


# Folders: a fallback never writes over what it falls back from


def test_a_folder_copied_without_its_warm_start_goes_on_from_its_state(finished, tmp_path, monkeypatch):
    assert stop_at(monkeypatch, 5, signal.SIGHUP, *TINY, "--out", tmp_path / "run") == 129
    shutil.copytree(tmp_path / "run", tmp_path / "copy", ignore=lambda *args: ["warm.pt"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "warm_start", None)  # not even called
        assert run(patch, "--resume", tmp_path / "copy") == 0
    assert results(tmp_path / "copy") == results(finished)


@pytest.mark.parametrize("argv", [["--resume"], [*TINY, "--out"]])
def test_results_without_their_state_are_not_overwritten(finished, tmp_path, monkeypatch, capsys, argv):
    shutil.copytree(finished, tmp_path / "copy", ignore=lambda *args: ["state.pt", ".lock"])
    before = contents(tmp_path / "copy")
    assert run(monkeypatch, *argv, tmp_path / "copy") == 2
    assert "holds eval.csv, grpo.csv, gspo.csv without a state.pt" in capsys.readouterr().err
    assert contents(tmp_path / "copy").items() >= before.items()


def test_a_warm_start_of_other_problems_is_refused(finished, tmp_path, monkeypatch, capsys):
    shutil.copy(finished / "warm.pt", tmp_path)
    assert run(monkeypatch, *TINY, "--task", "countdown", "--out", tmp_path) == 2
    assert "warm.pt was trained on other problems" in capsys.readouterr().err
    assert (tmp_path / "warm.pt").read_bytes() == (finished / "warm.pt").read_bytes()
    assert not (tmp_path / "state.pt").exists()


def test_a_state_that_cannot_be_read_is_not_called_damaged(finished, tmp_path, monkeypatch, capsys):
    shutil.copy(finished / "settings.json", tmp_path)
    (tmp_path / "state.pt").mkdir()
    assert run(monkeypatch, "--resume", tmp_path) == 1
    assert f"cannot use {tmp_path}/state.pt: Is a directory" in capsys.readouterr().err


def test_no_loss_is_told_where_imitation_had_ended(tmp_path, monkeypatch, capsys):
    real = imitate.harness.save

    def full(path, content):
        if path.name == "warm.pt":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imitate.harness, "save", full)
        assert run(patch, *SHORT, "--out", tmp_path) == 1
    assert "warm start: " in capsys.readouterr().out
    assert run(monkeypatch, "--resume", tmp_path) == 0
    assert "warm start: " not in capsys.readouterr().out


# Files and locks


def test_a_file_that_cannot_be_written_whole_is_left_as_it_was(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    path = tmp_path / "a"
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as too_large:
            harness.write(path, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(harness.os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error") as broken:
        harness.write(path, b"new")
    for error in (too_large, broken):
        assert error.value.filename == str(path)
    assert contents(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_lock_that_the_file_system_refuses_is_one_warning(tmp_path, monkeypatch, capsys, number):
    def flock(file, how):
        if how & fcntl.LOCK_EX:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    if number == errno.EIO:  # no matter of what the file system can do
        with pytest.raises(OSError) as broken, harness.run_folder(tmp_path, {}, resuming=False):
            pass
        assert broken.value.filename == str(tmp_path / ".lock")
        return
    with harness.run_folder(tmp_path, {}, resuming=False) as state:
        assert state is None
    assert capsys.readouterr().out.count("warning: ") == 1


# Streams


def test_real_processes_without_streams(finished, tmp_path):
    checkpoint = f"--checkpoint={finished / 'gspo.pt'}"
    out = tmp_path / "run"
    cases = [
        (["train.py", *SHORT, "--out", out], "<&- >&- 2>&-", 0),
        (["sample.py", checkpoint], "<&-", 2),  # no question
        (["gspo.py"], "<&- >&- 2>&-", 0),
        (["rewards.py"], "<&- >&- 2>&-", 0),
        (["rewards.py", "1", "2", "3"], "2>&-", 1),
    ]
    started = []
    for words, streams, code in cases:
        line = f"exec {shlex.join([sys.executable, *map(str, words)])} {streams}"
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(["sh", "-c", line], cwd=ROOT, env=env, stdout=-1, stderr=-1, text=True)
        started.append((process, code))
    for process, code in started:
        told, err = process.communicate(timeout=100)
        assert process.returncode == code and told == "" and "Traceback" not in err and "ignored" not in err, err
        assert err == "" or "no question" in err
    assert {"eval.csv", "gspo.pt", "grpo.pt"} <= contents(out).keys()


@pytest.fixture
def ask(finished, monkeypatch):
    """sample.py in this process. Returns its exit code."""

    def ask(*argv):
        monkeypatch.setattr(sys, "argv", ["sample.py", "--checkpoint", str(finished / "gspo.pt"), *argv])
        try:
            harness.run_program(sample.main)
        except SystemExit as exit:
            return exit.code
        return 0

    return ask


def test_any_stream_may_be_absent(ask, monkeypatch):
    for absent, argv, code in (("stdin", [], 2), ("stdout", ["1+1"], 0), ("stderr", ["9+9"], 0), ("stderr", [], 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO("\ufeff\n\n"))  # a byte order mark and blank lines: no question
            patch.setattr(sys, absent, None)
            assert ask(*argv) == code, absent


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_full_streams_end_with_the_right_status(ask, tmp_path, monkeypatch, capsys):
    for program in (lambda: run(monkeypatch, *SHORT, "--out", tmp_path / "run"), lambda: ask("--help")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", open("/dev/full", "w", encoding="utf-8"))
            assert program() == 1
            sys.stdout.flush()  # Python does it at its end: it must not fail again, or the status would be 120
    assert "cannot use standard output: No space left on device" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", open("/dev/full", "w", encoding="utf-8"))
        assert ask("--bogus") == 2
        sys.stderr.flush()


def test_help_to_a_reader_that_has_left(ask, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", open(writer, "w", encoding="utf-8"))
        assert ask("--help") == 141
        sys.stdout.flush()
    assert capsys.readouterr().err == ""


class Stream(io.StringIO):
    """A stream without an encoding; writing to it fails with this error number, if there is one."""

    encoding = None

    def __init__(self, number=None):
        super().__init__()
        self.number = number

    def write(self, text):
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)


def test_log_and_curve_on_odd_streams(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Stream())
    harness.log(harness.sparkline([0, 1, float("nan"), 2]))
    assert sys.stdout.getvalue() == "_# #\n"
    assert harness.sparkline([]) == ""
    monkeypatch.setattr(sys, "stdout", Stream(errno.EIO))
    harness.log("the terminal was closed")
    monkeypatch.setattr(sys, "stdout", Stream(errno.ENOSPC))
    with pytest.raises(OSError) as full:
        harness.log("the disk is full")
    assert full.value.filename == "standard output"


def test_a_log_file_grows_line_by_line(tmp_path, monkeypatch):
    with open(tmp_path / "log", "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        harness.log("first")
        assert (tmp_path / "log").read_text(encoding="utf-8") == "first\n"


# Terminals and signals


def on_a_terminal(*argv):
    """train.py as the leader of a session on a terminal of its own. Returns (process, the terminal's other end)."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    take = "import fcntl, runpy, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); del sys.argv[0]; "
    take += "runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [sys.executable, "-c", take, "train.py", *map(str, argv)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), its)
    process = subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **streams)
    os.close(its)
    return process, ours


def test_a_terminal_has_a_bar_and_may_close_in_mid_run(finished, tmp_path, monkeypatch):
    process, terminal = on_a_terminal(*TINY, "--out", tmp_path)
    seen = b""
    while b"before RL" not in seen:
        seen += os.read(terminal, 10000)
    os.close(terminal)  # now it gets SIGHUP, and what it says meets EIO
    assert process.wait(timeout=100) == 129, seen
    assert b"imitation:   0%" in seen and b"imitation, step" not in seen
    assert harness.load_state(tmp_path / "state.pt")["phase"] == "RL"
    assert run(monkeypatch, "--resume", tmp_path) == 0
    assert results(tmp_path) == results(finished)


def test_where_there_is_no_terminal_imitation_logs_lines(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, *SHORT, "--warm-steps", 30, "--out", tmp_path) == 0
    done = capsys.readouterr()
    assert done.out.count("imitation, step ") == 10 and "%|" not in done.err


def test_nohup_ignores_sighup(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with harness.stoppable(tmp_path) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.asked == []
    finally:
        signal.signal(signal.SIGHUP, before)


# Variables of torchrun


@pytest.mark.parametrize("name, value", [("RANK", "1"), ("WORLD_SIZE", "2"), ("WORLD_SIZE", ""), ("LOCAL_RANK", "abc")])
def test_one_variable_of_torchrun_alone_is_a_note(monkeypatch, capsys, name, value):
    monkeypatch.setenv(name, value)
    assert harness.start_processes(torch.device("cpu")) == torch.device("cpu")
    assert harness.rank() == 0 and harness.world_size() == 1
    assert capsys.readouterr().out.startswith(f"note: {name} set, but not all that torchrun sets")


@pytest.mark.parametrize(
    "changed",
    [
        {"RANK": "1"},  # the second of one: it would neither speak nor save
        {"RANK": "x"},
        {"RANK": "-1"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "abc"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"MASTER_PORT": "http"},
    ],
)
def test_variables_that_torchrun_cannot_have_set_are_one_line(tmp_path, monkeypatch, capsys, changed):
    sane = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (sane | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} | changed).items():
        monkeypatch.setenv(name, value)
    assert run(monkeypatch, *SHORT, "--out", tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert err.startswith(f"train.py: {next(iter(changed))} is ") and len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


# What is shown, what is pasted


def test_what_a_model_writes_and_a_user_types_cannot_steer_the_terminal(ask, monkeypatch, capsys):
    monkeypatch.setattr(sample, "generate", lambda *args, **options: SimpleNamespace(texts=lambda: [NASTY]))
    assert ask("1+1 " + NASTY.replace("\ud800", "")) == 0
    assert ask("1+1", NASTY) == 2  # a second question: argparse repeats it
    done = capsys.readouterr()
    assert f"\n  {ESCAPED}" in done.out
    assert (done.out + done.err).replace("\n", "").isprintable()
    assert len(done.err.splitlines()) == 2
    problem = rewards.read_problem("chain-sum", "1+1")
    texts = ["<answer>2</answer>", NASTY]
    shown = train.example([problem], texts, [1.0, 0.0], torch.tensor([1.0, -1.0]))
    assert shown.splitlines()[-1].endswith(ESCAPED) and len(shown.splitlines()) == 3
    assert texts[1] == NASTY


def test_what_a_damaged_checkpoint_holds_cannot_either(ask, finished, tmp_path, monkeypatch, capsys):
    saved = torch.load(finished / "gspo.pt", weights_only=True)
    saved["config"][NASTY] = 1
    torch.save(saved, tmp_path / "m.pt")
    assert ask("--checkpoint", str(tmp_path / "m.pt"), "1+1") == 2
    err = capsys.readouterr().err
    assert r"\x1b[31m" in err and err.rstrip("\n").isprintable()


def test_a_folder_of_any_name_can_be_resumed_as_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("-x", 'it\'s "$HOME" of\nmine', "~ünï"):
        assert stop_at(monkeypatch, 1, signal.SIGHUP, *SHORT, f"--out={folder}") == 129
        _, _, printed = capsys.readouterr().err.partition("go on with: ")
        python, program, *words = shlex.split(printed)
        assert (python, program, words) == ("python", "train.py", [f"--resume={folder}"])
        assert run(monkeypatch, *words) == 0
        _, _, printed = capsys.readouterr().out.partition("next: ")
        assert shlex.split(printed)[2] == f"--checkpoint={folder}/gspo.pt"
