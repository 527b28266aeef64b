"""Do formula, weights and executed operations agree, and does the pair train? Reads what `solve` wrote."""
