"""Who trains what? Two processes of one thread each, an arm to each, where there are two cores and no GPU; else one.

Side by side on two cores, two single-thread processes do 1.28 times the work of one with two threads, and give the
same bits every time (docs/log.md). Under torchrun every rank works on both arms, one after the other.
"""

from __future__ import annotations

import contextlib
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
    events: queue.Queue[dict[str, Any]] = queue.Queue()
    workers = [start(folder, arms, threads, events) for arms, threads in crews(asked.device, usable_cores())]
    errors = list[dict[str, Any]]()
    with stopping(workers) as signals:
        running = len(workers)
        while running:
            event = events.get()
            if event["event"] == "gone":
                running -= 1
                code = event["worker"].wait()
                if code not in (0, INTERRUPTED):
                    if not errors:
                        errors.append({"message": crashed(folder, event, code), "exit_code": 1})
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
def stopping(workers: list[Any]) -> Iterator[list[int]]:
    """SIGINT and SIGTERM are passed on to the workers; the list holds those that came."""
    came: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        came.append(number)
        stop(workers)

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


def start(folder: Path, arms: tuple[str, ...], threads: int, events: queue.Queue[dict[str, Any]]) -> Any:
    """A worker, and a thread that listens to it."""
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve the other worker (pytorch issue 80777)
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-m", "smelt_budget.verify.worker", str(folder), str(threads), *arms]
    log = (folder / f"{'-'.join(arms)}.log").open("w", encoding="utf-8")
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    log.close()
    assert worker.stdout is not None
    threading.Thread(target=listen, args=(worker, worker.stdout, arms, events), daemon=True).start()
    return worker


def listen(worker: Any, lines: IO[str], arms: tuple[str, ...], events: queue.Queue[dict[str, Any]]) -> None:
    """Put every event on the queue, and say when the worker is gone."""
    for line in lines:
        if line.startswith("{"):
            events.put(json.loads(line))
    events.put({"event": "gone", "worker": worker, "arms": arms})


def stop(workers: list[Any]) -> None:
    """Ask each to stop after its step."""
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(signal.SIGTERM)


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
    place = Place(asked.device, asked.precision, asked.compiled, asked.checkpointing, rank, world)
    stopping = Signals().listen()
    split = asked.split(folder)
    for arm in ARMS:
        Study(arm, asked, split, place, folder).run(told if rank == 0 else lambda event: None, stopping)
