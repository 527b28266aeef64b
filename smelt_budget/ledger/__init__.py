"""What does one token cost, and why? One row per weight; every total is made from the rows."""

from smelt_budget.ledger.conventions import CONVENTIONS, Convention
from smelt_budget.ledger.ledger import Ledger, Setting, Totals, totalled, totals
from smelt_budget.ledger.rows import Row, rows

__all__ = ["CONVENTIONS", "Convention", "Ledger", "Row", "Setting", "Totals", "rows", "totalled", "totals"]
