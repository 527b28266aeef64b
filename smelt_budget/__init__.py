"""Find the looped Mixture-of-Experts transformer that costs exactly what an unlooped baseline costs.

The pipeline runs one way: `spec` (what is this model?) -> `ledger` (what does a token cost?) -> `solver`
(which looped shape costs the same?) -> `report`. `docs/conventions.md` holds the counting rules C1..C19.
"""

__version__ = "0.1.0"
