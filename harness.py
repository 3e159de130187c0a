# SPDX-License-Identifier: MIT
"""What keeps a run safe and visible. It knows no policy and no loss: a student of GSPO need not read it.

- settings: a dataclass, and the command line made of it;
- what a person can mend is one line and an exit status, not a traceback;
- several processes (torchrun), several threads, a device;
- a run's folder has a lock, and files that are the old or the new, never half of one;
- what is trained is saved and resumed; Ctrl-C, SIGTERM and SIGHUP let the step in hand end, save, and say how to go on;
- the lines, bars and curves that a person sees.
"""

import argparse
import errno
import io
import json
import os
import random
import shlex
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import field, fields, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout  # torch itself requires it
from torch.nn.utils import parameters_to_vector
from tqdm import tqdm

STATE_FORMAT = 4


class UserError(ValueError):
    """What a person can mend. `run_program` shows it as one line; `code` is the exit status."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


class Stopped(Exception):
    """A run was asked to stop, by this signal, and has saved its state."""

    def __init__(self, message, number):
        super().__init__(message)
        self.code = 128 + number


# Settings


def between(low, high):
    return f"from {low} to {high}", lambda x: low <= x <= high


def at_least(low):
    return f"at least {low}", lambda x: x >= low


natural = at_least(1)
positive = ("above 0 and finite", lambda x: 0 < x < float("inf"))


def flag(default, meaning, check=("", lambda x: True), *, section=None, **options):
    """A field of a dataclass of settings: its default, what it means, and what must hold of a value, e.g. `natural`.

    section: where --help puts this field and those after it. options: more for argparse, such as choices.
    """
    metadata = {"default": default, "meaning": meaning, "check": check, "section": section, "options": options}
    return field(default=None, metadata=metadata)


def as_typed(name, value=None):
    """("gspo_clip", [0.003, 0.004]) -> "--gspo-clip 0.003 0.004" """
    values = value if isinstance(value, list) else [value]
    return " ".join(["--" + name.replace("_", "-"), *(str(x) for x in values if x is not None)])


def complete(settings, preset):
    """Fill in what was not given (None), from the preset (a dict) or else the default. Checks all.

    So the command line, a saved settings.json and a call in a notebook obey the same rules. Raises ValueError.
    """
    for f in fields(settings):
        default = f.metadata["default"]
        value = getattr(settings, f.name)
        if value is None:
            value = preset.get(f.name, default)
        if isinstance(default, list):
            count = f.metadata["options"]["nargs"]
            if not isinstance(value, (list, tuple)) or not value or count not in ("+", len(value)):
                raise ValueError(f"{as_typed(f.name)}: {value!r} is not a list like {default}")
            value = [checked(f, x, type(default[0])) for x in value]
        else:
            value = checked(f, value, type(default))
        setattr(settings, f.name, value)


def checked(f, value, kind):
    """This value of a field, as an int, float or str. Raises ValueError."""
    words, holds = f.metadata["check"]
    choices = f.metadata["options"].get("choices", [value])
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{as_typed(f.name)}: {value!r} is no {kind.__name__}")
    if value not in choices:
        raise ValueError(f"{as_typed(f.name)}: invalid choice: {value!r} (choose from {', '.join(choices)})")
    if not holds(value):
        raise ValueError(f"{as_typed(f.name)}: {value} is not {words}")
    return value


class Parser(argparse.ArgumentParser):
    """argparse that names defaults, takes no abbreviations, and complains in one line."""

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False, **options)

    def error(self, message):
        raise UserError(printable(f"{message} (see --help)"))


def parse_settings(cls, argv, description):
    """(settings of this dataclass, resuming): of the command line, or of the run that --resume names.

    Raises UserError, in one line.
    """
    parser = Parser(description=description, argument_default=argparse.SUPPRESS)
    parser.add_argument("--resume", metavar="DIR", help="continue the run in DIR, with the settings it has")
    section = parser
    for f in fields(cls):
        default = f.metadata["default"]
        kind = type(default[0]) if isinstance(default, list) else type(default)
        if f.metadata["section"]:
            section = parser.add_argument_group(f.metadata["section"])
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        meaning = f"{f.metadata['meaning']} (default: {shown})"
        section.add_argument(as_typed(f.name), type=kind, help=meaning, **f.metadata["options"])
    given = vars(parser.parse_args(argv))
    folder = given.pop("resume", None)
    if folder is not None and given:
        raise UserError(f"--resume takes the settings of the run it continues: leave out {as_typed(min(given))}")
    try:
        given = given if folder is None else read_settings(Path(folder))
        return cls(**given), folder is not None
    except (TypeError, ValueError) as error:
        raise UserError(str(error) if folder is None else f"cannot resume {folder}: {error}") from error


def read_settings(folder):
    """The dict in a run's settings.json. Raises UserError where there is none."""
    path = folder / "settings.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return values | {"out": str(folder)}  # it may have been moved
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{path} does not hold the settings of a run ({error})") from error


# A program and its streams


def run_program(main):
    """main(the words of the command line). A UserError, a stop, and what the system refuses are one line each."""
    open_streams()
    code = 0
    message = ""
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except SystemExit as error:  # argparse leaves so after --help
        code = error.code
    except UserError as error:
        code = error.code
        message = str(error)
    except Stopped as stop:
        code = stop.code
        message = str(stop) if rank() == 0 else ""  # told once for all processes; a fault, by each for itself
    except BrokenPipeError:  # the reader has left, as `| head` does
        code = 141
    except OSError as error:
        code = 1
        reason = error.strerror or error
        message = f"cannot use {error.filename}: {reason}" if error.filename else f"the system refuses: {reason}"
        message += ". What was saved before is whole"
    except KeyboardInterrupt:  # before there was anything to save
        code = 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    with suppress(OSError):  # the terminal may be gone
        if message:
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:  # it takes no more: lest Python try again at its end, complain and exit with 120
            code = code or (141 if error.errno == errno.EPIPE else 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code:
        sys.exit(code)


def open_streams():
    """An absent stream becomes the null device; a character that a stream cannot show becomes a question mark."""
    for name, mode, options in (("stdin", "r", {"encoding": "utf-8-sig"}), ("stdout", "w", {}), ("stderr", "w", {})):
        if getattr(sys, name) is None:  # closed by the shell, or never there (pythonw, a daemon)
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
        if hasattr(getattr(sys, name), "reconfigure"):  # a notebook's streams lack it
            getattr(sys, name).reconfigure(errors="replace", **options)


def command(program, *words, **flags):
    """What a person can paste into a shell. Flags are written --name=value, so that a value may begin with a dash."""
    flags = [f"--{name}={value}" for name, value in flags.items()]
    return shlex.join(["python", program, *flags, *words])


def printable(text):
    """A text with control characters and line ends escaped: what a model writes must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


# Randomness, precision, devices, threads


def rng(*purpose):
    """A random.Random that depends on these words alone, e.g. rng(seed, "problems", step)."""
    return random.Random("/".join(map(str, purpose)))


def precision(dtype, device):
    """Context in which a model runs: plain float32, or bfloat16 products over float32 weights."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def pick_device(name="auto"):
    """torch.device for a name; "auto" takes cuda, then mps, then cpu. Raises UserError when it is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, there in available.items() if there)
    if not available.get(name):
        raise UserError(f"device {name} is not available here: try --device auto")
    return torch.device(name)


def side_by_side(function, items, device):
    """[function(item) for item in items]; on a CPU in threads that share its cores, unless processes do.

    On matrices as small as ours, torch's own threads gain little from a second core; two items at once gain half again.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(items))
    if device.type != "cpu" or workers <= 1 or dist.is_initialized():
        return [function(item) for item in items]
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(threads)


# Processes

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun():
    """Whether torchrun started this process: it sets all of these variables. Some alone are left from elsewhere."""
    return all(os.environ.get(name) for name in TORCHRUN)


def rank():
    return from_torchrun("RANK", at_least(0)) if under_torchrun() else 0


def world_size():
    return from_torchrun("WORLD_SIZE", natural) if under_torchrun() else 1


def from_torchrun(name, check):
    """The number that torchrun put into this variable. Raises UserError where it cannot have done so."""
    words, holds = check
    value = os.environ[name]
    if not value.isdecimal() or not holds(int(value)):
        unset = " ".join(TORCHRUN)
        raise UserError(f"{name} is {value!r}, not a number {words}: start with torchrun, or unset {unset}")
    return int(value)


def start_processes(device):
    """Join the other processes, where torchrun started us. Returns this process's device. Raises UserError."""
    if not under_torchrun():
        found = [name for name in TORCHRUN if name in os.environ]
        if found:
            log(f"note: {', '.join(found)} set, but not all that torchrun sets: ignored, this is one process")
        return device
    count = world_size()
    on_this_machine = from_torchrun("LOCAL_WORLD_SIZE", natural)
    if count > 1 and device.type == "mps":
        raise UserError("several processes cannot share an Apple GPU: add --device cpu")
    if count > 1 and device.type == "cuda" and on_this_machine > torch.cuda.device_count():
        gpus = torch.cuda.device_count()
        raise UserError(f"{on_this_machine} processes, but {gpus} GPUs: start fewer, or add --device cpu")
    # checked even for one process: one that takes itself for the second of one would say and save nothing
    for name, highest in (("RANK", count), ("LOCAL_RANK", on_this_machine), ("MASTER_PORT", 65536)):
        from_torchrun(name, between(0, highest - 1))
    if count == 1:
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def all_reduce(x, op=dist.ReduceOp.SUM):
    """Combine a tensor over the processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(x, op=op)
    return x


def gather(batch):
    """A dataclass of tensors, (B,) or (B, T, ...), with the rows of all processes in each of them."""
    if not dist.is_initialized():
        return batch
    return replace(batch, **{f.name: gather_rows(getattr(batch, f.name)) for f in fields(batch)})


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


# Files


def write(path, data):
    """Write bytes aside, flush them to the disk, rename: whoever opens `path` finds the old content or the new.

    Raises OSError that names `path`; then nothing is left aside.
    """
    if rank() == 0:
        aside = path.with_name(path.name + ".part")
        try:
            with open(aside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            rename(aside, path)
        except OSError as error:
            error.filename = str(path)  # a failing write or flush has none
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
    if dist.is_initialized():  # process 0 writes; the others wait for it
        dist.barrier()


def rename(aside, path):
    for attempt in range(11):
        try:
            return os.replace(aside, path)
        except PermissionError:  # on Windows, a virus scanner may hold a new file for a moment
            if attempt == 10:
                raise
            time.sleep(0.1)


def save(path, content):
    """torch.save, through memory, so that a full disk is an OSError like any other."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write(path, buffer.getbuffer())


def write_csv(path, records):
    """A line for each record (dicts with the same keys). Floats keep 7 digits, as many as float32 has."""
    lines = [",".join(records[0])]
    for record in records:
        cells = [f"{v:.7g}" if isinstance(v, float) else str(v) for v in record.values()]
        lines.append(",".join(cells))
    write(path, ("\n".join(lines) + "\n").encode("utf-8"))


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
            acquire(lock)
        settings = settings | {"out": str(folder)}
        check_same_settings(folder, settings)
        state = load_state(folder / "state.pt")
        results = ", ".join(sorted(path.name for path in folder.glob("*.csv")))
        if state is None and results:  # of a copy without its largest file, say: to begin anew would overwrite them
            raise UserError(f"{folder} holds {results} without a state.pt: choose another --out or delete it")
        finished = state is not None and state["phase"] == "done"
        if state is not None and not resuming and not finished:
            go_on = f"go on with {command('train.py', resume=folder)}, choose another --out or delete it"
            raise UserError(f"{folder} holds an unfinished run: {go_on}")
        write(folder / "settings.json", (json.dumps(settings, indent=1) + "\n").encode("utf-8"))
        yield None if finished and not resuming else state  # a finished run is run again, from its warm start
    finally:
        lock.release()


def acquire(lock):
    """Take the lock of a folder, which the system lifts when this process ends, however it ends."""
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        folder = Path(lock.lock_file).parent
        raise UserError(f"another run is writing to {folder}: let it end, or choose another --out") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS):
            error.filename = error.filename or lock.lock_file
            raise
        log(f"warning: {lock.lock_file}: {error.strerror}: nothing keeps a second run out of this folder")


def check_same_settings(folder, settings):
    """Raise UserError where the folder holds a run with other settings, or a state without any."""
    if (folder / "settings.json").exists():
        earlier = read_settings(folder)
        changes = [f"--{k} was {earlier.get(k)}, is {v}" for k, v in settings.items() if v != earlier.get(k)]
        if changes:
            changes = ", ".join(changes).replace("_", "-")
            raise UserError(f"{folder} holds a run with other settings ({changes}): choose another --out or delete it")
    elif (folder / "state.pt").exists():
        raise UserError(f"{folder} holds a state.pt without its settings.json: choose another --out or delete it")


# What is trained, saved and resumed


class Trainable:
    """A model, its optimizer and the records of its steps: what a run trains, saves and resumes."""

    def __init__(self, name, model):
        self.name = name
        self.model = model
        self.history = []
        self.device = next(model.parameters()).device
        # One fused kernel for the whole update where there is one: a third of the time of the plain loop.
        fused = self.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    def step(self, lr, loss):
        """Sum the gradients over the processes, clip their norm to 1, step. Returns the norm before clipping."""
        sum_gradients(self.model.parameters())
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        check_finite(loss=loss, gradient=grad_norm)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm


def check_finite(**quantities):
    """Raise FloatingPointError, naming the first of these tensors that holds a nan or inf."""
    for name, value in quantities.items():
        if not torch.isfinite(value).all():
            raise FloatingPointError(f"{name} is not finite")


@contextmanager
def keep_if_not_finite(learner, step, folder, **batch):
    """Where a nan or inf ends this step, save what led to it, beside the last good state. Raises UserError."""
    try:
        yield
        check_finite(weights=parameters_to_vector(learner.model.parameters()))
    except FloatingPointError as error:
        path = folder / f"not-finite-{learner.name}.pt"
        save(path, {"step": step + 1, "quantity": str(error), "weights": learner.model.state_dict(), **batch})
        where = f"step {step + 1}, {learner.name}: {error}"
        raise UserError(f"{where}; try a smaller --lr in another --out. What led to it is in {path}", code=1) from error


def save_state(folder, phase, step, learners, **more):
    """All that a resumed run needs, in one file: no crash can leave weights of one step beside records of another."""
    states = {}
    for x in learners:
        check_finite(weights=parameters_to_vector(x.model.parameters()))
        optimizer = x.optimizer.state_dict()
        states[x.name] = {"weights": x.model.state_dict(), "optimizer": optimizer, "history": x.history}
    save(folder / "state.pt", {"format": STATE_FORMAT, "phase": phase, "step": step, "learners": states, **more})


def load_state(path):
    """The saved state, or None where there is none yet. Raises UserError where the file is not a state."""
    if not path.exists():
        return None
    try:
        with open(path, "rb") as file:
            content = io.BytesIO(file.read())
    except OSError as error:
        error.filename = str(path)  # a failing read has none
        raise
    try:
        state = torch.load(content, map_location="cpu", weights_only=True)
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
def stoppable(folder):
    """Meanwhile Ctrl-C, SIGTERM and SIGHUP let the step in hand end (see `resumable`); a second one leaves at once."""
    asked = []

    def ask(number, frame):
        if asked:
            os._exit(128 + number)
        asked.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():  # only there can signals be caught
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it: so do we
                before[number] = signal.signal(number, ask)
    try:
        yield SimpleNamespace(folder=folder, asked=asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def resumable(phase, first, last, every, stop, learners, status=None, **more):
    """The steps from `first` to `last`, with a bar. After each, its work done: save if it is time to, stop if asked.

    The state is saved after every `every` steps and after the last. status: text for the bar; where there is no bar,
    as in a log file, for a line after each tenth of the steps.
    """
    hidden = None if rank() == 0 else True  # None: where the stream is no terminal
    bar = tqdm(range(first, last), phase, initial=first, total=last, mininterval=0.3, disable=hidden)
    for step in bar:
        yield step
        # once any process was asked to stop, all do, at the same step
        asked = torch.tensor(sum(stop.asked), device=learners[0].device)
        number = int(all_reduce(asked, dist.ReduceOp.MAX))
        if number or (step + 1) % every == 0 or step + 1 == last:
            save_state(stop.folder, phase, step + 1, learners, **more)
        if number:
            go_on = command("train.py", resume=stop.folder)
            raise Stopped(f"stopped after step {step + 1} of {phase}; go on with: {go_on}", number)
        if status and not bar.disable and step % 20 == 0:
            bar.set_postfix_str(status(), refresh=False)
        if status and bar.disable and (step + 1) % max(1, last // 10) == 0:
            log(f"{phase}, step {step + 1} of {last}: {status()}")


# What a person sees


def log(text=""):
    """A line above the bar, once for all processes."""
    if rank() == 0:
        try:
            tqdm.write(text)
            sys.stdout.flush()  # so that a log file too grows line by line
        except OSError as error:
            if error.errno != errno.EIO:  # that one says that the terminal was closed: the run is still to be saved
                error.filename = "standard output"
                raise


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
        line += "|"
        for key, (_, form, factor) in columns.items():
            line += f"{record[key] * factor:{form}} "
    log(line)


def sparkline(values, width=50):
    """The curve as text: means of at most `width` bins; the lowest bar is 0, the highest 1."""
    bars = "▁▂▃▄▅▆▇█"
    try:
        bars.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:  # a console that lacks them
        bars = "_.-:=+*#"
    bins = min(width, len(values))
    line = ""
    for i in range(bins):
        part = values[i * len(values) // bins : (i + 1) * len(values) // bins]
        mean = sum(part) / len(part)
        line += bars[min(7, int(8 * mean))] if mean == mean else " "  # a blank for nan
    return line
