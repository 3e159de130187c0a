# SPDX-License-Identifier: MIT
"""Kill a tiny run at random moments, resume it each time, and compare it with one that was never disturbed.

    python tests/stress/kill.py 10

Every kill is SIGKILL to the process, after a random share of the time that an undisturbed run takes; whether it hits the
warm start, an update, an evaluation or a save is left to chance. The suite kills once; it also crashes runs at chosen
file operations (test_resume.py). Windows has no SIGKILL; there, `kill` ends a process as abruptly.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import TINY, results  # noqa: E402

RUN = [*TINY, "--save-every", "1"]  # a save after every step


def start(*argv):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "train.py", *map(str, argv)], cwd=ROOT, env=env, **quiet)


def start_or_resume(folder):
    """A process that is about to do something: most of a short one is importing torch, and that is over."""
    lock = folder / ".lock"
    started = (folder / "settings.json").exists()
    lock.unlink(missing_ok=True)
    process = start("--resume", folder) if started else start(*RUN, "--out", folder)
    while process.poll() is None and not lock.exists():
        time.sleep(0.01)
    return process


def whole_run(folder):
    """An undisturbed run. Returns its seconds, without those of importing torch."""
    process = start_or_resume(folder)
    began = time.perf_counter()
    assert process.wait() == 0
    return time.perf_counter() - began


def kill_and_compare(kills, whole, seconds, seed=None):
    """whole, seconds: an undisturbed run, and how long it took. Returns how many kills came before the run had ended.

    Raises AssertionError where anything differs.
    """
    rng = random.Random(seed)
    hits = 0
    with tempfile.TemporaryDirectory() as parent:
        killed = Path(parent) / "killed"
        for _ in range(kills):
            process = start_or_resume(killed)
            time.sleep(seconds * rng.random())
            hits += process.poll() is None
            process.kill()
            process.wait()
        assert start_or_resume(killed).wait() == 0
        assert results(killed) == results(whole)
    return hits


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    total = 0
    with tempfile.TemporaryDirectory() as folder:
        seconds = whole_run(Path(folder))
        for i in range(count):  # a fresh run for each, or the later ones would only hit what is left of it
            kills = 1 + i % 2
            total += kill_and_compare(kills, Path(folder), seconds, seed=i)
            print(f"run {i + 1}: killed {kills}x, resumed: equal", flush=True)
    print(f"{total} kills hit a live run; every resumed run equals the undisturbed one")
