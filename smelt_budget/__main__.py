"""`python -m smelt_budget` is `smelt-budget`."""

from smelt_budget.cli import main

if __name__ == "__main__":
    main()
