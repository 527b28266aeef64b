"""Was every operation of the forward pass counted? Those without multiply-adds are on a list, by name.

torch's FLOP counter knows matrix products and convolutions, and passes everything else over in silence: fused
attention on a CPU and grouped matrix products count as 0 there (pytorch issue 195460). So whatever runs must be known
to the counter, or stand below.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

NAMES = """
# arithmetic on elements
add sub rsub mul div neg pow rsqrt sqrt exp log sin cos sigmoid silu square clamp clamp_min maximum minimum where
floor_divide remainder reciprocal bitwise_and bitwise_or bitwise_not logical_not eq ne lt le gt ge logaddexp addcmul
# reductions and their combinations
sum mean amax max min logsumexp _softmax _log_softmax _safe_softmax cumsum topk sort var any
nll_loss_forward native_layer_norm _fused_rms_norm
# making, moving and shaping tensors
arange zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_full new_empty scalar_tensor
empty_strided tril _to_copy copy_ clone detach lift_fresh fill_ zero_
view _unsafe_view reshape transpose t permute expand unsqueeze squeeze select slice split split_with_sizes cat stack
unbind alias masked_fill index index_put index_put_ gather scatter scatter_add embedding index_select
repeat_interleave roll
"""
ELEMENTWISE = frozenset(name for line in NAMES.splitlines() if not line.startswith("#") for name in line.split())
"""aten operations that do no multiply-add; in-place forms count as their plain ones."""


class Seen(TorchDispatchMode):
    """Records what runs and is neither counted nor listed."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and remember it if nobody knows it."""
        packet = func._overloadpacket
        name = packet.__name__
        listed = func.namespace == "aten" and (name in ELEMENTWISE or name.removesuffix("_") in ELEMENTWISE)
        if packet not in flop_registry and not listed:
            self.unknown.add(f"{func.namespace}.{name}")
        return func(*args, **(kwargs or {}))

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Names, sorted."""
        return tuple(sorted(self.unknown))
