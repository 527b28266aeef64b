"""LLaMA-Factory's own training on a CPU: `python llama_factory_on_cpu.py ARM.yaml CHANGES.json`, in the emitted folder.

It imports torchaudio for models that hear; its library wants a GPU's torch, so an empty module stands there.
"""

import importlib.machinery
import json
import sys
import types
from pathlib import Path

import yaml

silent = types.ModuleType("torchaudio")
silent.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
sys.modules["torchaudio"] = silent

from llamafactory.train.tuner import run_exp  # noqa: E402

if __name__ == "__main__":
    run_exp(yaml.safe_load(Path(sys.argv[1]).read_text()) | json.loads(Path(sys.argv[2]).read_text()))
