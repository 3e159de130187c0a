# SPDX-License-Identifier: MIT
"""Rows: what the scripts here measure, in the CSV files of results/, and what several of them do with it.

Standard library only. A row is a dict; read from a file, its values are text.
"""

import csv
import os
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
MORE_SEEDS = ("edge", "staleness", "longer")  # sweeps of whose runs `seeds` has some with more seeds
COMMANDS = {  # what writes the rows that no sweep of run.py does; of these there are no quick ones
    "routing": "python experiments/probe.py",
    "ratio": "python experiments/probe.py",
    "cosine": "python experiments/probe.py",
    "bench": "python experiments/bench.py",
    "laptop-gpu": "python train.py --preset laptop-gpu --out experiments/results/laptop-gpu",
}


def refuse(message):
    """End the program with one line on stderr. Exit status 2, as for all that a person can mend."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


def read(path):
    """The rows of a file; none where there is no file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path, rows, digits=5):
    """Rows with the same columns; floats keep so many digits. Whoever opens the file finds the old rows or the new."""
    aside = path.with_name(path.name + ".part")
    with open(aside, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.{digits}g}" if isinstance(v, float) else v for k, v in row.items()})
    os.replace(aside, path)


def append(path, row, digits=5):
    """One more row; the columns are those of the rows that are there."""
    write(path, [*read(path), row], digits)


def load(name):
    """The rows of a sweep, of a quick one by `quick-NAME`. Ends the program where there are none."""
    found = read(RESULTS / f"{name}.csv")
    if not found:
        refuse(f"{name} has no rows, run it first: {command(name)}")
    if name in MORE_SEEDS:
        arms = {setting(row): row["arm"] for row in found}
        known = {work(row) for row in found}
        for row in read(RESULTS / "seeds.csv"):
            if setting(row) in arms and work(row) not in known:
                found.append(row | {"arm": arms[setting(row)]})
    return found


def command(name):
    """What a person types to get the rows of this name."""
    sweep = name.removeprefix("quick-")
    quick = "" if sweep == name else " --quick"
    return COMMANDS.get(sweep.partition("/")[0], f"python experiments/run.py {sweep}{quick}")


def setting(row):
    """What was run, whatever it is called and whatever the seed. Numbers may be numbers or text."""
    numbers = [f"{float(row[name]):.5g}" for name in ("lr", "low", "high", "steps")]
    return (row["learner"], row["variant"], *numbers)


def work(row):
    """What was run, whatever it is called: where it is the same, so is the run."""
    return (*setting(row), int(row["seed"]))


def select(rows, **chosen):
    """The rows that have these values, e.g. arm="gspo", lr=2e-4: a float is compared as a number."""

    def same(text, value):
        return float(text) == value if isinstance(value, float) else text == value

    return [row for row in rows if all(same(row[column], value) for column, value in chosen.items())]


def values(rows, column="after", **chosen):
    """{seed: value of the column} of the rows that have these values."""
    return {int(row["seed"]): float(row[column]) for row in select(rows, **chosen)}


def mean(rows, column, **chosen):
    """Of a column, over the rows that have these values. What is nan is left out; nan where nothing is left."""
    numbers = [float(row[column]) for row in select(rows, **chosen)]
    numbers = [x for x in numbers if x == x]
    return sum(numbers) / len(numbers) if numbers else float("nan")


def distinct(rows, column, kind=str):
    """The values of a column, in the order of the rows."""
    return list(dict.fromkeys(kind(row[column]) for row in rows))


def accuracy(rows, way):
    """`accuracy` of train.py, of rows of an eval.csv: over problems of three and more terms, sampled or greedy."""
    counted = [row for row in rows if int(row["terms"]) >= 3] or rows
    right = sum(float(row[way]) * int(row["problems"]) for row in counted)
    return right / sum(int(row["problems"]) for row in counted)


def environment(threads=1):
    """The variables of a process that is to compute with so many threads."""
    return os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def child(script, *words, expected=(0,)):
    """Run a script of ours in a process of one thread. Returns (exit status, what it printed).

    Raises SystemExit, with the end of what it said, where the exit status is not an expected one.
    """
    command = [sys.executable, str(script), *map(str, words)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode not in expected:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.returncode, done.stdout
