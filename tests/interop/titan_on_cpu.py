"""One rank of a real torchtitan run, on a CPU: what torchtitan does not do there is put in its place.

    torchrun --nproc-per-node 2 titan_on_cpu.py WEIGHTS RESULT_FOLDER --module ... --config ...

The device is the CPU, attention is torch's own (flex attention has no backward there), experts stay in fp32, gloo
sums gradients and exchanges uneven parts by the call that takes them. Everything else is torchtitan's: parsing, FSDP,
data, loss, optimiser, schedule, balancing.
"""

import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torchtitan.tools.utils as device  # noqa: E402

NOTHING = dict.fromkeys(("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize"), lambda *_: None)
device.device_type, device.device_module = (
    "cpu",
    SimpleNamespace(
        **NOTHING,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=lambda *_: "cpu",
        get_device_properties=lambda *_: SimpleNamespace(total_memory=2**30),
        memory_stats=lambda *_: {},
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    ),
)

from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13
    torch.distributed.set_timeout = lambda *_, **__: None


def exchanged(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group=None) -> None:
    """`all_to_all` of parts that differ in size."""
    sizes = [len(x) for x in outputs], [len(x) for x in inputs]
    together = torch.cat(outputs)
    torch.distributed.all_to_all_single(together, torch.cat(inputs), *sizes, group=group)
    for output, part in zip(outputs, together.split(sizes[0]), strict=True):
        output.copy_(part)


torch.distributed.all_to_all = exchanged
WHOLE = StateDictOptions(full_state_dict=True)


def main(weights: str, results: str, arguments: list[str]) -> None:
    """Train, and keep what was seen and what came out."""
    config = ConfigManager().parse_args(arguments)
    torch.Tensor.bfloat16 = lambda self: self
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    trainer = config.build()
    (model,) = trainer.model_parts
    model.get_attention_masks = lambda positions: {"full": None}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    set_model_state_dict(model, torch.load(weights), options=WHOLE)
    rank = torch.distributed.get_rank()
    batches, losses = [], []
    process, body = trainer.post_dataloading_process, trainer.fwd_bwd_fn

    def seen(input_dict, labels):
        batches.append(tuple(plain(x) for x in (input_dict["input"], input_dict["positions"], labels)))
        inputs, labels, kwargs = process(input_dict, labels)
        return inputs, labels, kwargs | {"attention_masks": {"full": None}}

    def kept(*arguments):
        losses.append(body(*arguments))
        return losses[-1]

    trainer.post_dataloading_process, trainer.fwd_bwd_fn = seen, kept
    trainer.train()
    after = get_model_state_dict(model, options=WHOLE)
    after = {name: plain(x) for name, x in after.items()}
    told = {"batches": batches, "losses": [float(loss) for loss in losses], "after": after}
    torch.save(told, Path(results) / f"rank-{rank}.pt")
    trainer.close()
    torch.distributed.destroy_process_group()


def plain(x: torch.Tensor) -> torch.Tensor:
    """The numbers alone: torchtitan marks tensors with what lies on which rank."""
    return torch.from_numpy((x.full_tensor() if isinstance(x, DTensor) else x).detach().numpy().copy())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
