# SPDX-License-Identifier: MIT
"""What keeps a run safe and visible: one run in a folder, text in and out, files, devices, threads."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import TINY

import harness
import sample
import train
from model import ModelConfig, Transformer, checkpoint
from sample import Rollout

ROOT = Path(harness.__file__).parent


def start(*argv, **options):
    env = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    return subprocess.Popen([sys.executable, *map(str, argv)], cwd=ROOT, env=env, **pipes, **options)


# One run in a folder


def test_a_second_run_in_a_folder_is_refused_and_a_killed_one_can_be_resumed(tmp_path):
    run = [*TINY, "--rl-steps", "400", "--save-every", "1", "--learners", "gspo", "--out", tmp_path]
    first = start("train.py", *run)
    while not (tmp_path / "gspo.csv").exists():
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.05)
    for second in (["--resume", tmp_path], run):
        with pytest.raises(harness.UserError, match="another run is writing to"):
            train.main([*map(str, second)])
    assert first.poll() is None
    first.kill()  # the lock dies with its process
    first.wait()
    steps = len((tmp_path / "gspo.csv").read_text(encoding="utf-8").splitlines())
    settings = harness.read_settings(tmp_path)
    with harness.run_folder(tmp_path, settings, resuming=True) as state:
        assert state["phase"] == "RL" and 0 <= steps - 1 - state["step"] <= 1


def test_the_lock_is_given_back_when_a_run_ends(tmp_path):
    for _ in range(2):
        with harness.run_folder(tmp_path, {"out": str(tmp_path)}, resuming=False) as state:
            assert state is None


# Text in and out


@pytest.fixture(scope="module")
def checkpoint_file(tmp_path_factory):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(width=16, heads=2, expert_width=16))
    path = tmp_path_factory.mktemp("with blank") / "m.pt"
    tokens = list(sample.SPECIAL_TOKENS)
    torch.save(checkpoint(model, task="chain-sum", special_tokens=tokens, max_terms=6, largest=9), path)
    return path


def test_any_text_can_be_asked_and_any_answer_shown(checkpoint_file):
    lines = [b"\xef\xbb\xbf1+2", "1\u22122".encode(), b"1+\xff", b"7+8"]  # a byte order mark, U+2212, no UTF-8
    words = ("sample.py", "--checkpoint", checkpoint_file, "--samples", "4", "--temperature", "8")
    started = [start(*words, env={"PYTHONIOENCODING": encoding}) for encoding in ("cp1252", "utf-8", "ascii")]
    for process in started:
        out, err = process.communicate(b"\n".join(lines))
        assert process.returncode == 0 and b"Traceback" not in err, err
        assert out.count(b"correct]") + out.count(b"is right]") >= 8  # the first and the last were read
        assert b"'1+2' is not" not in err and err.count(b"not a chain-sum problem") <= 2


def test_bytes_that_are_no_text_as_an_argument(checkpoint_file):
    process = start("sample.py", "--checkpoint", checkpoint_file, os.fsdecode(b"1+\xff"))
    out, err = process.communicate()
    assert process.returncode == 0 and out.startswith(b"1+?") and b"answered unchecked" in err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE, and no head")
def test_a_reader_that_leaves_ends_the_program_quietly(checkpoint_file, tmp_path):
    asked = start("sample.py", "--checkpoint", checkpoint_file, "--samples", "200", "1+2")
    trained = start("train.py", *TINY, "--out", tmp_path)
    for process in (asked, trained):
        process.stdout.close()
    for process in (asked, trained):
        err = process.stderr.read().decode()
        assert process.wait() == 141 and "Traceback" not in err and "BrokenPipe" not in err and "cannot use" not in err


def test_a_question_beyond_what_was_trained_on_is_answered_with_a_warning(checkpoint_file, capsys):
    for question, beyond in [("1+2", False), ("12+5-3", True), ("1+1+1+1+1+1+1+1", True)]:
        sample.main(["--checkpoint", str(checkpoint_file), "--max-new-tokens", "4", question])
        done = capsys.readouterr()
        assert done.out.startswith(question) and ("beyond what was trained on" in done.err) == beyond


def test_sparkline(monkeypatch):
    assert harness.sparkline([0, 0.5, 1]) == "▁▅█" and len(harness.sparkline([0.5] * 1000)) == 50
    monkeypatch.setattr(sys, "stdout", open(os.devnull, "w", encoding="cp1252"))
    assert harness.sparkline([0, 0.5, 1]) == "_=#"


def test_in_a_notebook(tmp_path, monkeypatch):
    """Its streams lack `reconfigure`; a program is called with a list; a program that ends well does not exit."""

    class Stream:
        encoding = "UTF-8"

        def write(self, text):
            return len(text)

        def flush(self):
            pass

        def isatty(self):
            return False

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Stream())
    argv = [*TINY, "--warm-steps", "2", "--rl-steps", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    harness.run_program(train.main)
    assert (tmp_path / "eval.csv").exists()


def test_commands_to_paste_survive_blanks(tmp_path, capsys):
    folder = tmp_path / "my runs"
    train.main([*TINY, "--warm-steps", "2", "--rl-steps", "1", "--out", str(folder)])
    assert f"next: python sample.py '--checkpoint={folder}/gspo.pt' 9-1-4+7" in capsys.readouterr().out.splitlines()
    assert harness.command("train.py", resume=folder) == f"python train.py '--resume={folder}'"


# Files, devices, threads


def test_a_file_held_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    held, real = iter([True, True, False]), os.replace

    def replace(*args):
        if next(held):
            raise PermissionError(13, "held by a virus scanner")
        real(*args)

    monkeypatch.setattr(harness.os, "replace", replace)
    monkeypatch.setattr(harness.time, "sleep", lambda seconds: None)
    harness.write(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    monkeypatch.setattr(
        harness.os, "replace", lambda *args: (_ for _ in ()).throw(PermissionError(13, "open in Excel"))
    )
    with pytest.raises(PermissionError):
        harness.write(tmp_path / "a", b"newer")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_devices_that_several_processes_cannot_share_are_refused(monkeypatch):
    for name in harness.TORCHRUN:
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device, message in [
        ("mps", "Apple GPU: add --device cpu"),
        ("cuda", "2 processes, but 1 GPUs: .*--device cpu"),
    ]:
        with pytest.raises(harness.UserError, match=message):
            harness.start_processes(torch.device(device))
    with pytest.raises(harness.UserError, match="device tpu is not available"):
        harness.pick_device("tpu")


def test_low_precision_is_chosen_or_refused_by_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for native, dtype in [(True, "bfloat16"), (False, "float32")]:  # older cards only emulate it
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native)
        assert harness.parse_settings(train.Settings, ["--preset", "laptop-gpu"], "")[0].dtype == dtype
        assert (
            harness.parse_settings(train.Settings, ["--preset", "laptop-gpu", "--device", "cpu"], "")[0].dtype
            == "float32"
        )
    monkeypatch.setattr(harness, "pick_device", lambda name: torch.device("mps"))
    for flag in ("--dtype", "--sampler-dtype"):
        with pytest.raises(harness.UserError, match="Apple GPU"):
            train.main([*TINY, flag, "bfloat16"])


def test_side_by_side_keeps_order_and_raises():
    torch.set_num_threads(2)
    try:
        device, seen = torch.device("cpu"), []
        assert harness.side_by_side(lambda x: (x, torch.get_num_threads()), [3, 1, 2], device) == [
            (3, 1),
            (1, 1),
            (2, 1),
        ]
        with pytest.raises(ZeroDivisionError):
            harness.side_by_side(lambda x: seen.append(1 / x), [1, 0], device)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# Processes


def rows(count=3, places=4):
    """A batch with every kind of tensor that is gathered."""
    tokens = torch.arange(count * places).view(count, places)
    return Rollout(
        tokens=tokens,
        mask=tokens % 3 == 0,
        logprobs=-tokens / 7,
        entropy=tokens / 9,
        routes=torch.arange(count * places * 4, dtype=torch.uint8).view(count, places, 2, 2),
        lengths=torch.arange(count),
    )


def test_outside_processes_nothing_is_gathered():
    batch = rows()
    assert harness.gather(batch) is batch


def test_the_rows_of_one_process_are_gathered_as_they_are():
    """In values, shapes and dtypes, bool among them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        gathered = harness.gather(rows())
    finally:
        dist.destroy_process_group()
    for name, value in vars(rows()).items():
        assert getattr(gathered, name).dtype == value.dtype
        assert torch.equal(getattr(gathered, name), value), name


# The optimizer


def test_two_optimizer_steps_by_hand():
    """AdamW with betas 0.9 and 0.95, eps 1e-8, no weight decay; a gradient longer than 1 is clipped, a shorter one not.

    Two entries of the gradients are as small as eps, so that eps matters.
    """
    model = torch.nn.Linear(4, 1, bias=False)
    start = torch.tensor([[3.0, -2.0, 1.0, 0.5]])
    model.weight.data = start.clone()
    trainable = harness.Trainable("tiny", model)
    wanted = start.double()
    m = torch.zeros(1, 4, dtype=torch.float64)
    v = torch.zeros(1, 4, dtype=torch.float64)
    for step, gradient, length, lr in [
        (1, [3.0, -4.0, 2e-8, 0.0], 5.0, 0.1),
        (2, [0.3, 0.4, -1e-8, 3e-8], 0.5, 0.05),
    ]:
        model.weight.grad = torch.tensor([gradient])
        assert trainable.step(lr, torch.tensor(0.0)).item() == pytest.approx(length)
        assert model.weight.grad is None
        g = torch.tensor([gradient], dtype=torch.float64) / max(1.0, length)
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g**2
        wanted = wanted - lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        torch.testing.assert_close(model.weight.data.double(), wanted, rtol=0, atol=2e-6)
