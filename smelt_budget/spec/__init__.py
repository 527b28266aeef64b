"""What is this model? Reads descriptions into one frozen spec; knows no costs and imports no torch."""

from smelt_budget.spec.blocks import Core, Loop, RopeScaling
from smelt_budget.spec.model import ModelSpec
from smelt_budget.spec.read import Reading, read, read_mapping

__all__ = ["Core", "Loop", "ModelSpec", "Reading", "RopeScaling", "read", "read_mapping"]
