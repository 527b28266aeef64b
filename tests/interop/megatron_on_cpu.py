"""Run a script of megatron-core's training loop without a GPU: `python megatron_on_cpu.py pretrain.py ARGUMENTS`.

Megatron asks for a GPU throughout; here tensors said to be on one are made on the CPU, streams and events do nothing,
and nothing is compiled. Only for tests: what is computed is the real package's.
"""

import contextlib
import runpy
import sys
import types

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Whatever is said to be on a GPU is on the CPU, and says that it is on one where Megatron insists."""

    def __torch_function__(self, function, _types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if name == "to" and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], "cpu", *args[2:])
        result = function(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if name == "type" and isinstance(result, str) else result


class Stream:
    """A stream or an event, on which everything is done already."""

    def __init__(self, *_args, **_named):
        pass

    def nothing(self, *_args):
        return None

    wait_stream = wait_event = synchronize = record = __exit__ = nothing

    def __enter__(self):
        return self

    def record_event(self, *_args):
        return Stream()

    def elapsed_time(self, _other):
        return 1.0

    def query(self):
        return True


def always(value=None):
    """A function of its own each time, for torch._dynamo keeps rules by function."""
    return lambda *_args, **_named: value


STANDINS = {
    "is_available": always(True),
    "_lazy_init": always(),
    "current_device": always("cpu"),
    "device_count": always(1),
    "get_device_capability": always((9, 0)),
    "get_device_name": always("cpu"),
    "get_device_properties": always(types.SimpleNamespace(total_memory=1 << 34, major=9, minor=0)),
    "mem_get_info": always((1 << 34, 1 << 34)),
    "memory_stats": always({}),
    "is_current_stream_capturing": always(False),
    "current_stream": lambda *_args: Stream(),
    "default_stream": lambda *_args: Stream(),
    "Stream": Stream,
    "Event": type("Event", (Stream,), {}),
    "stream": lambda *_args: contextlib.nullcontext(),
    "get_rng_state": lambda *_args, **_named: torch.get_rng_state(),
    "memory_allocated": always(0),
    "max_memory_allocated": always(0),
    "memory_reserved": always(0),
    "max_memory_reserved": always(0),
    "synchronize": always(),
    "set_device": always(),
    "empty_cache": always(),
    "set_rng_state": always(),
    "manual_seed": always(),
    "reset_peak_memory_stats": always(),
}

if __name__ == "__main__":
    for name, standin in STANDINS.items():
        setattr(torch.cuda, name, standin)
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = always(), always()
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_args, **_named: self
    torch.optim.Optimizer._accelerator_graph_capture_health_check = always()
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_args: contextlib.nullcontext()
    sys.argv = sys.argv[1:]
    with OnCpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
