# SPDX-License-Identifier: MIT
"""Several processes: torchrun, and a process that is killed."""

import socket

import kill
import pytest
import torch
from helpers import ROOT, TINY, command, results, run

import harness
from model import load_model


def torchrun(*argv, script="train.py"):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ["--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    return command("-m", "torch.distributed.run", *address, script, *TINY, *argv, timeout=100)


def test_two_processes_do_what_one_does(finished, tmp_path):
    done = torchrun("--out", tmp_path)
    assert done.returncode == 0, done.stderr
    one, two = results(finished), results(tmp_path)
    assert one["eval.csv"] == two["eval.csv"]
    for name in ("gspo", "grpo"):
        for row, other in zip(one[f"{name}.csv"], two[f"{name}.csv"], strict=True):
            for key in ("reward", "accuracy", "length", "think_frac", "zero_std_groups"):
                assert row[key] == other[key], (key, row["step"])
            for key in (
                "clip_frac",
                "grad_norm",
                "expert_change",
                "entropy",
                "approx_kl",
                "load_imbalance",
                "ratio_mean",
            ):
                assert float(row[key]) == pytest.approx(float(other[key]), rel=2e-3, abs=1e-5, nan_ok=True), (
                    key,
                    row["step"],
                )
        a, b = (load_model(folder / f"{name}.pt")[0].state_dict() for folder in (finished, tmp_path))
        assert max((a[k] - b[k]).abs().max() for k in a) < 1e-5


def test_what_breaks_in_one_process_ends_both(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import harness
import train
real = train.generate
def generate(*args, **options):
    rollout = real(*args, **options)
    if harness.rank() == 1:
        rollout.logprobs[0, 0] = float("nan")
    return rollout
train.generate = generate
harness.run_program(train.main)
""",
        encoding="utf-8",
    )
    done = torchrun("--warm-steps", "1", "--out", tmp_path / "out", script=str(script))
    assert done.returncode != 0 and "step 1, gspo: logprobs is not finite" in done.stderr
    kept = torch.load(tmp_path / "out" / "not-finite-gspo.pt", weights_only=True)
    assert kept["step"] == 1 and harness.load_state(tmp_path / "out" / "state.pt")["step"] == 0


def test_killed_for_real_and_resumed(finished):
    """A short version of `python tests/stress/kill.py`."""
    kill.kill_and_compare(1, finished, seconds=1)


def test_processes_that_do_not_divide_the_problems_are_refused(tmp_path, monkeypatch, capsys):
    for name in harness.TORCHRUN:
        monkeypatch.setenv(name, {"RANK": "0", "LOCAL_RANK": "0"}.get(name, "2"))
    assert run(monkeypatch, *TINY, "--prompts", "3", "--group", "4", "--out", tmp_path / "out") == 2
    assert "--prompts 3 do not divide among 2 processes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
