"""Checkpoints: what is written is what is read, bit for bit, and nothing else is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smelt_budget.errors import BadInput
from smelt_budget.model import initialise, load, save, weights
from smelt_budget.model.weights import INDEX, SINGLE


def state(model):
    return {name: x.clone() for name, x in model.state_dict().items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture
def moe(build, fields_of):
    """Biases, dense layer, shared expert and sections."""
    return build(fields_of("biases", "sectioned"))


@pytest.mark.parametrize("shard", [10**9, 2000])
def test_round_trip(model, fields, build, tmp_path, monkeypatch, shard):
    """Bit-exact, in one file and in shards; each physical layer is stored once, whatever its visits."""
    monkeypatch.setattr(weights, "SHARD_BYTES", shard)
    save(model, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 5 if shard == 2000 else files == [tmp_path / SINGLE]
    stored = {name: x for file in files for name, x in load_file(file).items()}
    assert sum(x.numel() for x in stored.values()) == sum(x.numel() for x in model.state_dict().values()) - (
        model.lm_head.weight.numel() if fields.get("tie_word_embeddings") else 0
    )
    if shard == 2000:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in stored.values())
        assert all(len(load_file(f)) == 1 or sum(x.nbytes for x in load_file(f).values()) <= shard for f in files)
    assert_same(state(load(build(fields, seed=1), tmp_path)), state(model))


def test_a_correction_is_stored_once_it_has_moved(build, fields_of, tmp_path):
    """And read as zero where it is not there."""
    fields = fields_of("groups", "sectioned")
    model = initialise(build(fields), 0)
    model.layers[1].mlp.gate.e_score_correction_bias[2] = 0.5
    save(model, tmp_path)
    stored = load_file(tmp_path / SINGLE)
    assert [name for name in stored if "correction" in name] == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert_same(state(load(build(fields, seed=1), tmp_path)), state(model))


def test_dtype_stays_the_models(moe, build, fields_of, tmp_path):
    """fp32 on disk into a bf16 model: rounded, as copying rounds."""
    save(moe, tmp_path)
    half = load(build(fields_of("biases", "sectioned"), seed=1).to(torch.bfloat16), tmp_path)
    assert_same(state(half), state(moe.to(torch.bfloat16)))
    assert half.lm_head.weight.dtype == torch.bfloat16


def broken(change, tmp_path):
    """The checkpoint in one file, with its tensors changed."""
    tensors = load_file(tmp_path / SINGLE)
    change(tensors)
    save_file(tensors, tmp_path / SINGLE)


EXPERT = "model.layers.2.mlp.experts.8.up_proj.weight"
CHANGES = {
    "missing": (lambda t: t.pop(EXPERT), f"missing: {EXPERT}"),
    "unknown": (lambda t: t.update(extra=torch.ones(1)), "unknown: extra"),
    "wrong shape": (lambda t: t.update({EXPERT: torch.ones(16, 8)}), rf"{EXPERT} is \[16, 8\], the model's is \[8, 16"),
    "transposed vector": (lambda t: t.update({"model.norm.weight": torch.ones(1, 16)}), r"is \[1, 16\]"),
    "quantised": (lambda t: t.update({EXPERT: torch.ones(8, 16, dtype=torch.int8)}), "not plain floats.* is I8"),
    "eight-bit floats": (lambda t: t.update({EXPERT: torch.ones(8, 16).to(torch.float8_e4m3fn)}), "is F8_E4M3"),
    "many": (lambda t: [t.pop(name) for name in list(t) if ".3." in name], r"missing: and \d+ more"),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_what_does_not_fit_is_refused_whole(moe, build, fields_of, tmp_path, change, said):
    """By name; the model keeps every weight it had."""
    save(moe, tmp_path)
    broken(change, tmp_path)
    assert_refused(build(fields_of("biases", "sectioned"), seed=1), tmp_path, said)


def assert_refused(other, folder, said):
    before = state(other)
    with pytest.raises(BadInput, match=said):
        load(other, folder)
    assert_same(state(other), before)


def test_damaged_files_are_refused_whole(moe, build, fields_of, tmp_path, monkeypatch):
    """Nothing there, cut short, empty, no index, an index that leaves its folder, a shard that is not there."""
    other = build(fields_of("biases", "sectioned"), seed=1)
    assert_refused(other, tmp_path, "holds neither")
    monkeypatch.setattr(weights, "SHARD_BYTES", 2000)
    save(moe, tmp_path)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    whole = last.read_bytes()
    for content in (whole[:-1], whole[:5], b""):
        last.write_bytes(content)
        assert_refused(other, tmp_path, "cannot be read")
    last.unlink()
    assert_refused(other, tmp_path, "cannot be read")
    last.write_bytes(whole)
    good = (tmp_path / INDEX).read_text()
    for index in ("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}', "[" * 10**5, "\x00"):
        (tmp_path / INDEX).write_text(index)
        assert_refused(other, tmp_path, "not an index")
    outside = tmp_path / "inside"
    outside.mkdir()
    for name in (f"../{last.name}", str(last), f"inside/../{last.name}", "", ".", "..", 3):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        assert_refused(other, tmp_path, "outside its folder|cannot be read")
    (tmp_path / INDEX).write_text(good)
    assert_same(state(load(other, tmp_path)), state(moe))


def test_a_name_in_two_shards_is_refused(moe, build, fields_of, tmp_path, monkeypatch):
    """Which of the two is meant cannot be known."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 2000)
    save(moe, tmp_path)
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    save_file(load_file(first) | load_file(second), second)
    assert_refused(build(fields_of("biases", "sectioned"), seed=1), tmp_path, "stand in two files")


def test_an_earlier_checkpoint_does_not_shine_through(moe, build, fields_of, tmp_path, monkeypatch):
    """Saved over each other, in shards and in one file, the last one counts."""
    fields = fields_of("biases", "sectioned")
    for seed, shard in enumerate((10**9, 2000, 10**9)):
        monkeypatch.setattr(weights, "SHARD_BYTES", shard)
        last = build(fields, seed=seed)
        save(last, tmp_path)
        assert (tmp_path / SINGLE).exists() != (tmp_path / INDEX).exists()
        assert_same(state(load(build(fields, seed=9), tmp_path)), state(last))


PEAK = """
import sys, threading, time, torch
from pathlib import Path
from smelt_budget.model import Transformer, load, save
from smelt_budget.spec.model import checked

torch.set_num_threads(1)
model = Transformer(checked({"hidden_size": 512, "num_hidden_layers": 1, "vocab_size": 64, "num_attention_heads": 4,
    "num_experts": 64, "num_experts_per_tok": 1, "moe_intermediate_size": 512}))
for p in model.parameters():
    torch.nn.init.ones_(p)
own = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
save(model, Path(sys.argv[1]))
seen, done = [own()], threading.Event()
def look():
    while not done.is_set():
        seen.append(own())
        time.sleep(0.001)
looking = threading.Thread(target=look)
looking.start()
load(model, Path(sys.argv[1]))
done.set()
looking.join()
print(1024 * (max(seen) - seen[0]) / sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc/self/status")
def test_loading_does_not_hold_the_weights_twice(tmp_path):
    """200 MB in one file: memory of its own, above that of the model, stays a fraction (the mapped file is shared)."""
    told = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], check=True, capture_output=True, text=True)
    assert float(told.stdout) < 0.3
