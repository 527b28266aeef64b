"""Pairs written by megatron-core's own builder are read as its own reader reads them."""

import importlib.util
import json
import subprocess
import sys

import pytest

from smelt_budget.verify.data import load

if importlib.util.find_spec("megatron") is None:
    pytest.skip("could not find 'megatron' (megatron-core)", allow_module_level=True)

PROGRAM = """
import json, sys
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
for kind in sys.argv[2:]:
    prefix = sys.argv[1] + kind
    r = numpy.random.default_rng(0)
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=getattr(numpy, kind))
    for _ in range(200):
        sizes = r.integers(1, 30, r.integers(1, 4)).tolist()
        ids = r.integers(1, 30_000, sum(sizes))
        ids[-1] = 0
        builder.add_document(torch.tensor(ids), sizes)
    builder.finalize(prefix + ".idx")
    read = IndexedDataset(prefix)
    ends = read.document_indices.tolist()
    print(json.dumps([[int(i) for s in range(a, b) for i in read[s]] for a, b in zip(ends, ends[1:])]))
"""


def test_megatrons_own_reader_agrees(tmp_path):
    """Exact; 200 documents of one to three sequences, each with an end-of-document id 0; three widths."""
    kinds = ["uint16", "int32", "int64"]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, f"{tmp_path}/", *kinds]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for kind, line in zip(kinds, done.stdout.splitlines()[-3:], strict=True):
        documents = [ids[:-1] for ids in json.loads(line) if len(ids) > 1]
        split = load([str(tmp_path / kind)], vocab_size=30_000, bos_id=0, cache=tmp_path)
        read = [side[i].tolist() for side in (split.train, split.held_out) for i in range(len(side))]
        assert sorted(read) == sorted(documents)
