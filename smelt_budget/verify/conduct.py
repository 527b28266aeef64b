"""Who trains what? Two processes of one thread each, an arm to each, where there are two cores and no GPU; else one.

Side by side on two cores, two single-thread processes do 1.28 times the work of one with two threads, and give the
same bits every time (docs/log.md). Under torchrun every rank works on both arms, one after the other.

Whoever starts the processes may be killed: each notices and stops after its step, and until then holds the folder's
lock, which a resumed run waits for.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from smelt_budget.errors import BadInput, Infeasible, SmeltError
from smelt_budget.verify.asked import ARMS, Asked
from smelt_budget.verify.place import Place
from smelt_budget.verify.study import Study
from smelt_budget.verify.train import Interrupted
from smelt_budget.verify.worker import INTERRUPTED, Signals

Told = Callable[[dict[str, Any]], None]
Events = queue.SimpleQueue[dict[str, Any]]


def crews(device: str, cores: int) -> list[tuple[tuple[str, ...], int]]:
    """(arms, threads) of each process."""
    if device == "cpu" and cores >= 2:
        return [((arm,), cores // 2) for arm in ARMS]
    return [(ARMS, cores)]


def conduct(folder: Path, asked: Asked, told: Told) -> None:
    """Train both arms in processes of their own, events to `told`.

    Raises:
        Interrupted: stopped by a signal; everything done is on disk.
        SmeltError: what a worker could not go on with; the other one was stopped after its step.
    """
    events: Events = queue.SimpleQueue()  # the only queue that a signal handler may put into
    errors = list[dict[str, Any]]()
    workers = list[Any]()
    with alone(folder, told) as lock, stopping(workers, events) as signals:
        for arms, threads in crews(asked.device, usable_cores()):
            workers.append(start(folder, arms, threads, events, lock))
        running = len(workers)
        while running:
            event = events.get()
            if event["event"] == "gone":
                running -= 1
                code = event["worker"].wait()
                if code not in (0, INTERRUPTED) and not errors:
                    errors.append({"message": crashed(folder, event, code), "exit_code": 1})
                if code != 0:
                    stop(workers)
            elif event["event"] == "error":
                errors.append(event)
            else:
                told(event)
    if errors and not signals:
        kind = {2: BadInput, 3: Infeasible}.get(errors[0]["exit_code"], SmeltError)
        first, *rest = errors[0]["message"].split("\n")
        raise kind(first, *(line.strip() for line in rest))
    if signals or any(worker.returncode == INTERRUPTED for worker in workers):
        raise Interrupted


@contextlib.contextmanager
def alone(folder: Path, told: Told) -> Iterator[int]:
    """The only one at work in the folder; yields a file that the workers keep open, for its lock is theirs too."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told({"event": "note", "words": f"another process is at work in {folder}; waiting until it has stopped"})
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


@contextlib.contextmanager
def stopping(workers: list[Any], events: Events) -> Iterator[list[int]]:
    """SIGINT and SIGTERM are passed on to the workers, a second one ends them; the list holds those that came."""
    came: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        came.append(number)
        if len(came) == 1:
            events.put({"event": "note", "words": "stopping after the step at hand; Ctrl-C again quits at once"})
            stop(workers)
        else:
            stop(workers, signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop(workers)


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start(folder: Path, arms: tuple[str, ...], threads: int, events: Events, lock: int) -> Any:
    """A worker, and a thread that listens to it."""
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve the other worker (pytorch issue 80777)
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "smelt_budget.verify.worker", str(folder), str(threads), str(os.getpid()), *arms]
    log = (folder / f"{'-'.join(arms)}.log").open("w", encoding="utf-8")
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, pass_fds=[lock])
    log.close()
    assert worker.stdout is not None
    threading.Thread(target=listen, args=(worker, worker.stdout, arms, events), daemon=True).start()
    return worker


def listen(worker: Any, lines: IO[str], arms: tuple[str, ...], events: Events) -> None:
    """Put every event on the queue, and say when the worker is gone."""
    with lines:
        for line in lines:
            if line.startswith("{") and line.endswith("}\n"):  # a worker that is killed leaves half a line
                events.put(json.loads(line))
    events.put({"event": "gone", "worker": worker, "arms": arms})


def stop(workers: list[Any], how: signal.Signals = signal.SIGTERM) -> None:
    """Ask each to stop after its step."""
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(how)


def crashed(folder: Path, event: dict[str, Any], code: int) -> str:
    """What is known of a worker that did not say why it ended."""
    arms = " and ".join(event["arms"])
    log = folder / f"{'-'.join(event['arms'])}.log"
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["it left no message"]
    how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    hint = "; out of memory?" if code == -signal.SIGKILL else ""
    return f"the process training {arms} was {how}{hint}\n{last[0]}\nall of it: {log}\nfix: --resume goes on"


def conduct_ranks(folder: Path, asked: Asked, told: Told, rank: int, world: int) -> None:
    """Both arms on every rank of a torchrun group; the first rank speaks."""
    place = Place(asked.device, asked.precision, asked.compiled, asked.checkpointing, rank, world, asked.experts)
    stopping = Signals().listen()
    split = asked.split(folder)
    for arm in ARMS:
        Study(arm, asked, split, place, folder).run(told if rank == 0 else lambda event: None, stopping)
