# SPDX-License-Identifier: MIT
"""What keeps a run safe and visible. It knows no policy and no loss: a student of GSPO need not read it.

- what a person can mend is one line and an exit status, not a traceback;
- a run's folder has a lock, and files that are the old or the new, never half of one;
- Ctrl-C and SIGTERM let the step in hand end, save, and say how to go on;
- several processes (torchrun), several threads, a device;
- the lines, bars and curves that a person sees.
"""

import argparse
import io
import json
import os
import shlex
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout  # torch itself requires it
from torch.nn.utils import parameters_to_vector
from tqdm import tqdm

STATE_FORMAT = 3


class UserError(ValueError):
    """What a person can mend. `run_program` shows it as one line; `code` is the exit status."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


class Parser(argparse.ArgumentParser):
    """argparse that names defaults, takes no abbreviations, and complains in one line."""

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False, **options)

    def error(self, message):
        raise UserError(f"{message} (see --help)")


def number(kind, words, holds):
    """A type for argparse: an int or a float of which `holds` is true, in words."""

    def read(text):
        if holds(value := kind(text)):
            return value
        raise argparse.ArgumentTypeError(f"{text} is not {words}")

    read.__name__ = kind.__name__  # argparse names it where the text is no number at all
    return read


natural = number(int, "at least 1", lambda x: x >= 1)
positive = number(float, "above 0 and finite", lambda x: 0 < x < float("inf"))
fraction = number(float, "from 0 to 1", lambda x: 0 <= x <= 1)


def run_program(main, argv=None):
    """main(argv). A UserError, or what the system refuses, ends the program with one line. A bug is shown as one."""
    for stream, options in ((sys.stdin, {"encoding": "utf-8-sig"}), (sys.stdout, {}), (sys.stderr, {})):
        if hasattr(stream, "reconfigure"):  # a notebook's streams lack it
            stream.reconfigure(errors="replace", **options)  # ? for a character that the console lacks
    code, message = 0, ""
    try:
        main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except UserError as error:
        code, message = error.code, str(error)
    except BrokenPipeError:  # the reader has left, as `| head` does: nobody is there to be told
        code = 141
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        code, message = 1, f"cannot use {error.filename}: {error.strerror or error}. What was saved before is whole"
    except KeyboardInterrupt:  # before there was anything to save
        code = 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if message and (rank() == 0 or code < 128):  # each process tells its own fault; a stop is told once
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    if code:
        sys.exit(code)


def rank():
    return int(os.environ.get("RANK", "0"))  # set by torchrun


def world_size():
    return int(os.environ.get("WORLD_SIZE", "1"))


def all_reduce(x, op=dist.ReduceOp.SUM):
    """Combine a tensor over the processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(x, op=op)
    return x


def gather_rows(x):
    """The rows of all processes, in every process. x: (B,) or (B, T, ...), padded with 0 to the longest T."""
    if x.dim() > 1:
        longest = all_reduce(torch.tensor(x.size(1), device=x.device), dist.ReduceOp.MAX)
        x = torch.cat([x, x.new_zeros(x.size(0), int(longest) - x.size(1), *x.shape[2:])], dim=1)
    wire = x.to(torch.uint8) if x.dtype == torch.bool else x.contiguous()
    parts = [torch.empty_like(wire) for _ in range(world_size())]
    dist.all_gather(parts, wire)
    return torch.cat(parts).to(x.dtype)


def sum_gradients(parameters):
    """One all-reduce for all gradients. Each process has already divided by the global count."""
    if dist.is_initialized():
        parameters = list(parameters)
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = all_reduce(torch.cat([p.grad.flatten() for p in parameters]))
        for p, grad in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad.copy_(grad.view_as(p))


def pick_device(name="auto"):
    """torch.device for a name; "auto" takes cuda, then mps, then cpu. Raises UserError when it is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = next(kind for kind, there in available.items() if there) if name == "auto" else name
    if not available.get(name):
        raise UserError(f"device {name} is not available here: try --device auto")
    return torch.device(name)


def start_processes(device):
    """Join the other processes, where torchrun started us. Returns this process's device. Raises UserError."""
    if world_size() == 1:
        return device
    if device.type == "mps":
        raise UserError("several processes cannot share an Apple GPU: add --device cpu")
    if device.type == "cuda":
        processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()  # of this machine
        if processes > gpus:
            raise UserError(f"{processes} processes, but {gpus} GPUs: start fewer, or add --device cpu")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def side_by_side(function, items, device):
    """[function(item) for item in items]; on a CPU in threads that share its cores, unless processes do.

    On matrices as small as ours, torch's own threads gain little from a second core; two items at once gain half again.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(items))
    if device.type != "cpu" or workers == 1 or dist.is_initialized():
        return [function(item) for item in items]
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(threads)


def write(path, data):
    """Write bytes aside, flush them to the disk, rename: whoever opens `path` finds the old content or the new."""
    if rank() == 0:
        aside = path.with_name(path.name + ".part")
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        for attempt in range(11):
            try:
                os.replace(aside, path)
                break
            except PermissionError:  # on Windows, a virus scanner may hold a new file for a moment
                if attempt == 10:
                    raise
                time.sleep(0.1)
    if dist.is_initialized():  # process 0 writes; the others wait for it
        dist.barrier()


def save(path, content):
    """torch.save, through memory, so that a full disk is an OSError like any other."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write(path, buffer.getbuffer())


def write_csv(path, records):
    """A line for each record (dicts with the same keys). Floats keep 7 digits, as many as float32 has."""
    lines = [[f"{v:.7g}" if isinstance(v, float) else str(v) for v in record.values()] for record in records]
    write(path, "".join(",".join(line) + "\n" for line in (records[0], *lines)).encode("utf-8"))


def read_settings(folder):
    """The dict in a run's settings.json. Raises UserError where there is none."""
    try:
        values = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        return values | {"out": str(folder)}  # it may have been moved
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{folder / 'settings.json'} does not hold the settings of a run ({error})") from error


def command(*words):
    """What a person can paste into a shell."""
    return shlex.join(["python", *map(str, words)])


@contextmanager
def run_folder(folder, settings, resuming):
    """Make the folder of a run, or find a run with these settings (a dict) in it, and lock it.

    Yields its saved state, or None if there is none. Raises UserError where another run is at work in it, where
    the settings differ, and, unless `resuming`, where there is an unfinished run.
    """
    lock = FileLock(folder / ".lock")
    try:
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)  # the system lifts it when this process ends, however it ends
        settings = settings | {"out": str(folder)}
        earlier = read_settings(folder) if (folder / "settings.json").exists() else settings
        changes = [f"--{k} was {earlier.get(k)}, is {v}" for k, v in settings.items() if v != earlier.get(k)]
        if changes:
            changes = ", ".join(changes).replace("_", "-")
            raise UserError(f"{folder} holds a run with other settings ({changes}): choose another --out or delete it")
        state = load_state(folder / "state.pt")
        finished = state is not None and state["phase"] == "done"
        if state is not None and not resuming and not finished:
            go_on = f"go on with {command('train.py', '--resume', folder)}, choose another --out or delete it"
            raise UserError(f"{folder} holds an unfinished run: {go_on}")
        write(folder / "settings.json", (json.dumps(settings, indent=1) + "\n").encode("utf-8"))
        yield None if finished and not resuming else state  # a finished run is run again, from its warm start
    except Timeout as error:
        raise UserError(f"another run is writing to {folder}: let it end, or choose another --out") from error
    finally:
        lock.release()


def check_finite(**quantities):
    """Raise FloatingPointError, naming the first of these tensors that holds a nan or inf."""
    for name, value in quantities.items():
        if not torch.isfinite(value).all():
            raise FloatingPointError(f"{name} is not finite")


def save_state(folder, phase, step, learners, **more):
    """All that a resumed run needs, in one file: no crash can leave weights of one step beside records of another."""
    states = {}
    for x in learners:
        check_finite(weights=parameters_to_vector(x.model.parameters()))
        weights, optimizer = x.model.state_dict(), x.optimizer.state_dict()
        states[x.name] = {"weights": weights, "optimizer": optimizer, "history": x.history}
    save(folder / "state.pt", {"format": STATE_FORMAT, "phase": phase, "step": step, "learners": states, **more})


def load_state(path):
    """The saved state, or None where there is none yet. Raises UserError where the file is not a state."""
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["format"] == STATE_FORMAT:
            return state
    except Exception as error:  # torch.load raises whatever it stumbles on, by the kind of damage
        raise UserError(f"{path} is damaged ({type(error).__name__})") from error
    raise UserError(f"{path} was not written by this version")


def restore(learners, state):
    """Take learners back to a saved state. Returns the steps done; raises UserError where the state does not fit."""
    try:
        for x in learners:
            saved = state["learners"][x.name]
            x.model.load_state_dict(saved["weights"])
            x.optimizer.load_state_dict(saved["optimizer"])
            x.history = list(saved["history"])
        return state["step"]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the saved state does not fit ({type(error).__name__})") from error


@contextmanager
def stoppable(folder, device):
    """Meanwhile Ctrl-C and SIGTERM let the step in hand end (see `resumable`); a second one leaves at once."""
    asked = []

    def ask(number, frame):
        if asked:
            os._exit(128 + number)
        asked.append(number)

    in_main_thread = threading.current_thread() is threading.main_thread()  # only there can signals be caught
    before = {n: signal.signal(n, ask) for n in (signal.SIGINT, signal.SIGTERM)} if in_main_thread else {}
    try:
        yield SimpleNamespace(folder=folder, device=device, asked=asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def resumable(phase, first, last, every, stop, learners, status=lambda: "", **more):
    """The steps from `first` to `last`, with a bar. After each, its work done: save if it is time to, stop if asked.

    The state is saved after every `every` steps and after the last. status: text for the bar.
    """
    slow = 0.3 if getattr(sys.stderr, "isatty", bool)() else 15  # seconds: a log file gets a line now and then
    bar = tqdm(range(first, last), phase, initial=first, total=last, mininterval=slow, disable=rank() != 0)
    for step in bar:
        yield step
        # once any process was asked to stop, all do, at the same step
        asked = int(all_reduce(torch.tensor(sum(stop.asked), device=stop.device), dist.ReduceOp.MAX))
        if asked or (step + 1) % every == 0 or step + 1 == last:
            save_state(stop.folder, phase, step + 1, learners, **more)
        if asked:
            go_on = command("train.py", "--resume", stop.folder)
            raise UserError(f"stopped after step {step + 1} of {phase}; go on with: {go_on}", code=128 + asked)
        if step % 20 == 0:
            bar.set_postfix_str(status(), refresh=False)


def log(text=""):
    """A line above the bar, once for all processes."""
    if rank() == 0:
        tqdm.write(text)


def log_step(step, records, columns):
    """A line for one step: of each named record the chosen columns; above every twentieth line, their headings.

    columns: {key of a record: (heading, format, factor)}; a heading is as wide as its format.
    """
    if step % 20 == 0:
        headings = " ".join(heading for heading, _, _ in columns.values())
        log("     " + "".join(f"| {name:<{len(headings)}}" for name in records))
        log(" step" + f"|{headings} " * len(records))
    line = f"{step + 1:5d}"
    for record in records.values():
        line += "|" + "".join(f"{record[key] * factor:{form}} " for key, (_, form, factor) in columns.items())
    log(line)


def sparkline(values, width=50):
    """The curve as text: means of at most `width` bins; the lowest bar is 0, the highest 1."""
    bars = "▁▂▃▄▅▆▇█"
    try:
        bars.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:  # a console that lacks them
        bars = "_.-:=+*#"
    bins = min(width, len(values))
    parts = [values[i * len(values) // bins : (i + 1) * len(values) // bins] for i in range(bins)]
    return "".join(bars[min(7, int(8 * sum(part) / len(part)))] for part in parts)
