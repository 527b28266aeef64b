"""What do other trainers run? A solved pair as the files of one of them, both arms."""

from __future__ import annotations

from smelt_budget.emit.axolotl import AXOLOTL
from smelt_budget.emit.hf import HF
from smelt_budget.emit.llama_factory import LLAMA_FACTORY
from smelt_budget.emit.maxtext import MAXTEXT
from smelt_budget.emit.megatron import MEGATRON
from smelt_budget.emit.megatron_bridge import MEGATRON_BRIDGE
from smelt_budget.emit.olmo_core import OLMO_CORE
from smelt_budget.emit.plain import JSON, YAML
from smelt_budget.emit.target import Target
from smelt_budget.emit.torchtitan import TORCHTITAN
from smelt_budget.emit.unrolled import HF_UNROLLED

ALL = (
    HF,
    HF_UNROLLED,
    MEGATRON,
    MEGATRON_BRIDGE,
    TORCHTITAN,
    OLMO_CORE,
    MAXTEXT,
    LLAMA_FACTORY,
    AXOLOTL,
    YAML,
    JSON,
)
TARGETS: dict[str, Target] = {target.name: target for target in ALL}
"""By the name that --to takes."""
