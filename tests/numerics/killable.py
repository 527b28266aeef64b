"""Training that can be killed at any moment, forked from a process that has torch loaded: a start costs no seconds.

One JSON object a line on stdin asks for a run: {"folder", "arms"} works as a worker does, {"folder"} alone conducts
both arms in processes of their own. {"die": n} kills it just before its n-th change of the disk, {"limit": bytes}
limits its files. On stdout stand the events pid, those of the run, changes (of the disk), and status: the exit code,
negative for a signal.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch

from smelt_budget.errors import SmeltError
from smelt_budget.verify import study
from smelt_budget.verify.asked import read_asked
from smelt_budget.verify.conduct import conduct
from smelt_budget.verify.train import Interrupted
from smelt_budget.verify.worker import Signals, told, work

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}
WRITES = os.O_WRONLY | os.O_RDWR


def watched(folder, die, changes):
    """Count every change that Python makes in the folder, and die before one of them."""

    def hook(event, arguments):
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if (writes or event in CHANGES) and str(folder) in str(arguments[0]):
            changes[0] += 1
            if changes[0] == die:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def conducted(folder):
    """Both arms in processes of their own; returns the exit code of the command."""
    try:
        conduct(folder, read_asked(folder), told)
    except Interrupted:
        return 130
    except SmeltError as error:
        told({"event": "error", "message": str(error)})
        return error.exit_code
    return 0


def run(folder, arms=None, die=None, limit=None, few=True):
    """In the forked process; `few` looks at few rows of a trained model."""
    if few:
        study.SINK_ROWS = study.RECALL_ROWS = 4
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    changes = [0]
    watched(folder, die, changes)
    at = Path(folder)
    code = conducted(at) if arms is None else work(at, arms, Signals().listen(), 1)
    told({"event": "changes", "count": changes[0]})
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # loads what its first use loads
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            told({"event": "pid", "pid": os.getpid()})
            run(**json.loads(line))
        told({"event": "status", "status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})
