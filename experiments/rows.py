# SPDX-License-Identifier: MIT
"""Rows of what was measured: dicts, in the CSV files of results/, where all values are text. Standard library only."""

import csv
import os
import statistics
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
PROBES = ("routing", "ratio", "cosine")
EXPLORED = ("why", "countdown")  # of an earlier run.py


def refuse(message):
    """End the program with one line on stderr and exit status 2: what a person can mend."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    sys.exit(2)


def read(path):
    """The rows of a file; none where there is no file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path, rows, digits=5):
    """Rows of the same columns; floats keep so many digits. Whoever opens the file finds the old rows or the new."""
    aside = path.with_name(path.name + ".part")
    with open(aside, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.{digits}g}" if isinstance(v, float) else v for k, v in row.items()})
    os.replace(aside, path)


def append(path, row):
    """Add a row to a file, new or not."""
    write(path, [*read(path), row])


def load(name):
    """The rows of a sweep, or, by `quick-NAME`, of a quick one. Ends the program where there are none."""
    rows = read(RESULTS / f"{name}.csv")
    if not rows:
        refuse(f"{name} has no rows, run it first: {command(name)}")
    return rows


def command(name):
    """What a person types to get the rows of this name."""
    sweep = name.removeprefix("quick-")
    if name.startswith("laptop-gpu/"):
        return "python train.py --preset laptop-gpu --out experiments/results/laptop-gpu"
    if name in EXPLORED:
        return "git restore experiments/results (the run.py of commit d605f6f made them)"
    if name == "bench" or name in PROBES:
        return f"python experiments/{'bench' if name == 'bench' else 'probe'}.py"
    return f"python experiments/run.py {sweep}" + ("" if sweep == name else " --quick")


def select(rows, **chosen):
    """The rows that have these values."""
    return [row for row in rows if all(row[column] == value for column, value in chosen.items())]


def groups(rows, *columns):
    """{values of these columns: the rows that have them}, in the order of the rows."""
    found = {}
    for row in rows:
        found.setdefault(tuple(row[column] for column in columns), []).append(row)
    return found


def mean(rows, column, **chosen):
    """Of a column, over the rows that have these values. What is nan is left out; nan where nothing is left."""
    numbers = [float(row[column]) for row in select(rows, **chosen)]
    numbers = [x for x in numbers if x == x]
    return statistics.mean(numbers) if numbers else float("nan")  # exact: equal numbers have that mean


def values(rows, column, **chosen):
    """{seed: mean of the column} over the rows that have these values. A sweep has one row for each seed."""
    return {int(seed): mean(here, column) for (seed,), here in groups(select(rows, **chosen), "seed").items()}


def accuracy(rows, way):
    """`accuracy` of train.py, of rows of an eval.csv: sampled or greedy, over problems of three and more terms."""
    counted = [row for row in rows if int(row["terms"]) >= 3] or rows
    right = sum(float(row[way]) * int(row["problems"]) for row in counted)
    return right / sum(int(row["problems"]) for row in counted)


def environment(threads):
    """Of a process that is to use so many threads."""
    return os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def child(script, *words, expected=(0,)):
    """Run a script of ours in a process of one thread: (exit status, what it printed). Raises SystemExit on others."""
    command = [sys.executable, str(script), *map(str, words)]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True)
    if done.returncode not in expected:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.returncode, done.stdout
