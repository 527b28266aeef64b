"""The looped Mixture-of-Experts transformer itself, in torch, as the paper draws it; it knows no cost."""

from smelt_budget.model.cache import Cache
from smelt_budget.model.generate import Sampling, generate
from smelt_budget.model.initialise import initialise
from smelt_budget.model.transformer import Output, Step, Transformer
from smelt_budget.model.weights import load, save

__all__ = ["Cache", "Output", "Sampling", "Step", "Transformer", "generate", "initialise", "load", "save"]
