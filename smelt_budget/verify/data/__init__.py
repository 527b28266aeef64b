"""Text for a short paired run: what is trained on, what is held out, and in which order. numpy only, no torch."""

from smelt_budget.verify.data.documents import Documents
from smelt_budget.verify.data.held_out import Batch, HeldOut
from smelt_budget.verify.data.load import load
from smelt_budget.verify.data.packed import Packed
from smelt_budget.verify.data.split import Split
from smelt_budget.verify.data.tokenise import Bytes, Subwords, Tokeniser
from smelt_budget.verify.data.yardsticks import Yardsticks, yardsticks

__all__ = [
    "Batch",
    "Bytes",
    "Documents",
    "HeldOut",
    "Packed",
    "Split",
    "Subwords",
    "Tokeniser",
    "Yardsticks",
    "load",
    "yardsticks",
]
