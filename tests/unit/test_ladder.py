"""The grid of the paper as our ladder plans it, and what it takes, against printed values and hand-worked ones."""

import json
from pathlib import Path

import pytest

from smelt_budget.emit.launch import Layout
from smelt_budget.errors import BadInput
from smelt_budget.ladder.gpus import GPUS, gpu
from smelt_budget.ladder.grid import Grid, cells, read_grid
from smelt_budget.ladder.memory import Split, memory
from smelt_budget.ladder.solved import solved
from smelt_budget.ladder.study import Means, planned, runs
from smelt_budget.ledger import Ledger, Setting
from smelt_budget.spec import ModelSpec, read

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "smelt_cells.json"
PRINTED = {f"{cell['scale']}-S{cell['S_label']}": cell for cell in json.loads(GOLDEN.read_text(encoding="utf-8"))}
ONE_GPU = Layout("torchrun", 1, 1)


def means(**changed):
    return Means(**{"gpu": gpu("h100"), "mfu": 0.4, "layout": Layout("torchrun", 1, 8), **changed})


def plan(grid, **changed):
    wanted = cells(grid, "grid")
    pairs = {cell.name: pair for cell, pair, _, _ in solved(wanted, "A pair") if pair is not None}
    return planned(grid, "grid", wanted, pairs, means(**changed))


def grid(**changed):
    fields = {"name": "one", "scales": {"small": "smelt-200m-s95"}, "horizons": {"stable_steps": [3000, 7000]}}
    return Grid.model_validate(fields | changed)


@pytest.fixture(scope="module")
def paper():
    return plan(read_grid(None), price=2.0)


@pytest.fixture(scope="module")
def small():
    return plan(grid(), price=2.0)


def test_the_twelve_baselines_are_the_papers(paper):
    """H, depth, experts as printed, the other widths as those that reproduce every digit (exact)."""
    assert [cell["name"] for cell in paper["cells"]] == list(PRINTED)
    for cell in paper["cells"]:
        spec, printed = cell["baseline"]["spec"], PRINTED[cell["name"]]
        base, widths = printed["published"]["base"], printed["inferred"]["base"]
        assert [spec[f] for f in ("hidden_size", "num_hidden_layers", "num_experts", "num_experts_per_tok")] == [
            base[f] for f in ("H", "L", "E", "topk")
        ]
        assert spec["moe_intermediate_size"] == widths["expert_ffn"]
        assert spec["num_attention_heads"] * spec["head_dim"] == widths["q_width"]
        assert spec["num_key_value_heads"] * spec["head_dim"] == widths["kv_width"]
        final_norm = base["H"]  # not in the formula that was found for the printed totals
        norms = 6 * 2 * base["H"] * base["L"]  # gains, which that formula charges and rule C5 does not
        assert cell["baseline"]["ledger"]["parameters"]["non_embedding"] == widths["total"] + final_norm
        assert cell["arms"]["baseline"]["training_flops_per_token"] == widths["F_train"] - norms


def test_gaps_within_the_papers(paper):
    """Printed mismatch over the 12 cells: FLOPs 3.9, params 1.0, KV 3.6 %; and in each cell none above its largest."""
    for cell in paper["cells"]:
        gaps, printed = cell["gaps"], PRINTED[cell["name"]]
        for name, most in (("flops", 0.039), ("non_embedding_parameters", 0.010), ("kv_cache", 0.036)):
            assert abs(gaps[name]) <= most
        twin, base = printed["inferred"]["smelt"], printed["inferred"]["base"]
        theirs = [twin["F_train"] / base["F_train"], twin["total"] / base["total"]]
        theirs.append(1.5 * twin["kv_width"] / base["kv_width"])  # 1.5 times as many executed layers
        assert max(map(abs, gaps.values())) <= max(abs(ratio - 1) for ratio in theirs)
        assert sum(map(abs, gaps.values())) < sum(abs(ratio - 1) for ratio in theirs)


def test_sparsity_as_printed(paper):
    """Baselines to the printed tenth of a point; twins as near to their baseline as the paper's are to theirs."""
    for cell in paper["cells"]:
        printed = PRINTED[cell["name"]]["published"]["base"]["S_pct"]
        assert abs(100 * cell["sparsity"]["baseline"] - printed) <= 0.0501
        assert abs(cell["sparsity"]["twin"] - cell["sparsity"]["baseline"]) < 0.005


def test_horizons_as_printed(paper):
    """D = 20.5, 31.0, 62.4, 114.9, 167.3, 215.6 B (section 6; rounded)."""
    found = [run["tokens"] for run in paper["horizons"]["runs"]]
    assert [round(tokens / 1e9, 1) for tokens in found] == [20.5, 31.0, 62.4, 114.9, 167.3, 215.6]
    assert paper["horizons"]["separate_tokens"] == sum(found)
    assert paper["horizons"]["shared_tokens"] == 196_075 * 256 * 4096 + 6 * 10**10


def test_the_window_of_the_grid(paper):
    """The fitted window is printed as 1.3e19 to 2.2e21 training FLOPs."""
    assert [f"{end:.1e}" for end in paper["window"]["baseline"]] == ["1.3e+19", "2.2e+21"]


def test_gpu_hours_and_cost_by_hand(small):
    """GPU-hours = D (F + 6 H V) / (0.4 x 989.5e12 x 3600), two units of money each; totals are sums."""
    cell = small["cells"][0]
    tokens = 7000 * 256 * 4096 + 2 * 10**10
    for arm in ("baseline", "twin"):
        spec, one = cell[arm]["spec"], cell["arms"][arm]
        head = 6 * spec["hidden_size"] * spec["vocab_size"]
        flops = cell[arm]["ledger"]["flops"]["training_per_token"]
        hours = tokens * (flops + head) / (0.4 * 989.5e12 * 3600)
        assert one["shared"]["training_flops"] == tokens * flops
        assert one["shared"]["gpu_hours"] == pytest.approx(hours, rel=1e-12)
        assert one["shared"]["cost"] == pytest.approx(2 * hours, rel=1e-12)
        assert one["shared"]["days"] == pytest.approx(hours / 8 / 24, rel=1e-12)
    both = small["totals"]["both"]
    assert both["shared"]["cost"] == pytest.approx(sum(cell["arms"][a]["shared"]["cost"] for a in cell["arms"]))
    assert both["separate"]["tokens"] == 2 * (10_000 * 256 * 4096 + 2 * 10**10)
    assert both["shared"]["runs"] == 4


def test_a_convention_with_the_lm_head_counts_it_once():
    """Under megatron the head is in F already."""
    found = plan(grid(convention="megatron"))["cells"][0]["arms"]["baseline"]
    assert found["lm_head_flops_per_token"] == 0
    assert found["shared"]["work"] == found["shared"]["training_flops"]


def test_no_price_no_cost():
    """Nothing is guessed."""
    found = plan(grid())
    assert found["totals"]["both"]["shared"]["cost"] is None


SPEC = ModelSpec(
    hidden_size=64, num_hidden_layers=4, vocab_size=100, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
LOOPED = SPEC.replace(loop={"start": 1, "stop": 3, "visits": 2, "residual_scale": 0.5})


def split(layout=ONE_GPU, shard="none", recompute="none"):
    return Split(layout, shard, recompute, micro_batch=2, context=8, batch_sequences=64)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b", "granite-3.1-3b-a800m"])
def test_one_gpu_holds_every_parameter_once(name):
    """18 bytes a parameter (Megatron-LM's count for bf16 weights and fp32 gradients), of the ledger's total."""
    spec = read(name).spec
    held = memory(spec, split())
    total = Ledger(spec, Setting.of(spec)).total
    assert held["weights"] == 2 * total
    assert held["gradients"] == 4 * total
    assert held["states"] == 12 * total


def test_sharding_as_megatron_counts_it():
    """6 + 12 / d with the optimizer shared; 18 / d and two gathered layers with everything shared."""
    total = Ledger(SPEC, Setting.of(SPEC)).total
    layer = (Ledger(SPEC, Setting.of(SPEC)).non_embedding - 64) // 4
    eight = Layout("torchrun", 1, 8)
    held = memory(SPEC, split(eight, "optimizer"))
    assert (held["weights"] + held["gradients"], held["states"]) == (6 * total, round(12 * total / 8))
    held = memory(SPEC, split(eight, "full"))
    assert held["weights"] == round(2 * total / 8 + 2 * 2 * layer)
    assert held["gradients"] == round(4 * total / 8)


def test_expert_and_tensor_ranks_share_what_is_theirs():
    """Experts by expert ranks, everything else by tensor ranks."""
    experts = 4 * 8 * 3 * 64 * 32
    rest = Ledger(SPEC, Setting.of(SPEC)).total - experts
    held = memory(SPEC, split(Layout("torchrun", 1, 8, tensor=2, expert=4)))
    assert held["gradients"] == 4 * (rest / 2 + experts / 4)


def test_activations_by_hand():
    """One layer: 2H(4) + 2(q + 2kv) + 2q + 4n + 4E + K(4H + 6F); the head 4H + 4V; 16 tokens."""
    layer = 8 * 64 + 2 * (64 + 64) + 2 * 64 + 4 * 4 + 4 * 8 + 2 * (4 * 64 + 6 * 32)
    head = 4 * 64 + 4 * 100
    assert memory(SPEC, split())["activations"] == 16 * (4 * layer + head)
    assert memory(LOOPED, split())["activations"] == 16 * (6 * layer + head), "each visit is kept"
    assert memory(LOOPED, split(recompute="full"))["activations"] == 16 * (6 * 2 * 64 + layer + head)


def test_pipeline_stages_keep_the_core_together():
    """Two stages of the looped model: its first holds p micro-batches in flight (1F1B)."""
    whole, halved = (memory(LOOPED, split(Layout("torchrun", 1, ways, pipeline=ways))) for ways in (1, 2))
    assert halved["states"] < whole["states"]
    assert halved["total"] < whole["total"]


def test_more_nodes_are_tried(paper):
    """1.6B at S 97: 54e9 parameters at 18 bytes are 121 GB on each of 8 GPUs, and 4 nodes hold a quarter."""
    note = next(note for note in paper["notes"] if note.startswith("does not fit into 80 GB"))
    assert "1.6B-S97 baseline" in note
    assert note.endswith("tried: all fit with --nodes 4")
    fits = plan(Grid.model_validate(read_grid(None).model_dump() | {"scales": {"b": read_grid(None).scales["1.6B"]}}),
                layout=Layout("torchrun", 4, 8))  # fmt: skip
    assert all(one["memory"]["fits"] for cell in fits["cells"] for one in cell["arms"].values())


def test_a_layout_that_does_not_divide_is_named():
    """Cell, arm, field and by how much."""
    with pytest.raises(BadInput, match="small: twin: num_key_value_heads 3 does not divide by tensor 2"):
        plan(grid(), layout=Layout("torchrun", 1, 8, tensor=2))


def test_expert_parallel_steps_the_counts():
    """Expert ranks share experts, so the solver is asked for multiples."""
    asked = cells(grid(solve={"experts_multiple": 4}), "grid", experts_multiple=8)[0].request.lattice
    assert asked.experts_multiple % 8 == 0
    assert (
        cells(grid(solve={"experts_multiple": 16}), "grid", experts_multiple=8)[0].request.lattice.experts_multiple
        == 16
    )


def test_sparsities_move_the_experts():
    """S asked 0.9 and 0.95: the baseline's own S comes within half a step of one expert."""
    found = plan(grid(sparsities=[0.9, 0.95], scales={"q": "qwen3-30b-a3b", "dense": "qwen3-0.6b"}))
    assert [cell["name"] for cell in found["cells"]] == ["q-S90", "q-S95", "dense-S90", "dense-S95"]
    for cell, sparsity in zip(found["cells"], [0.9, 0.95] * 2, strict=True):
        assert cell["sparsity"]["baseline"] == pytest.approx(sparsity, abs=0.002)


BAD = {
    "foo: 3": "foo: unknown key",
    "experts: {S85: '64'}": "experts.S85: is text, not a whole number",
    "experts: {S85: 64}\nsparsities: [0.9]": "experts and sparsities",
    "sparsities: [1.5]": "sparsities.0",
    "sparsities: []": "sparsities",
    "sparsities: [0.9, 0.9]": "stands twice",
    "horizons: {stable_steps: [5000, 4000]}": "horizons.stable_steps: branch points",
    "horizons: {stable_steps: [1000]}": "warmup_steps 2000 is not below",
    "horizons: {decay_tokens: 1.5}": "horizons.decay_tokens",
    "solve: {head: uniform}": "solve.head: unknown key",
    "solve: {heads: many}": "solve.heads: is not one of",
    "solve: {span: true}": "solve.span",
    "attention_length: 0.5": "attention_length 0.5 is below 1",
    "convention: mine": "convention: is not one of",
    "experts: {../S: 64}": "cannot name a folder",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_key_is_named(line, tmp_path):
    """Strict: every error says which key."""
    path = tmp_path / "grid.yaml"
    path.write_text(f"name: x\nscales: {{a: qwen3-30b-a3b}}\n{line}\n", encoding="utf-8")
    with pytest.raises(BadInput) as raised:
        read_grid(path)
    assert BAD[line] in str(raised.value)


def test_a_scale_that_cannot_be_counted_is_named():
    """And experts set in two places."""
    with pytest.raises(BadInput, match=r"grid: scales.a is not a model"):
        cells(grid(scales={"a": {"hidden_size": 3}}), "grid")
    fields = SPEC.compact()
    with pytest.raises(BadInput, match=r"scales.a.num_experts stands beside experts"):
        cells(grid(scales={"a": fields}, experts={"S": 8}), "grid")
    with pytest.raises(BadInput, match="is dense"):
        cells(grid(scales={"a": "qwen3-0.6b"}, experts={"S": 8}), "grid")


def test_a_scales_file_lies_beside_its_grid(tmp_path):
    """Whatever the working directory."""
    (tmp_path / "mine.yaml").write_text(json.dumps(SPEC.compact()), encoding="utf-8")
    (tmp_path / "grid.yaml").write_text("name: x\nscales: {a: mine.yaml}\n", encoding="utf-8")
    assert cells(read_grid(tmp_path / "grid.yaml"), "grid")[0].given == SPEC


def test_gpus():
    """A peak is the printed one without sparsity; what is given replaces it and is said."""
    assert (GPUS["h100"].tflops, GPUS["b200"].tflops) == (1979 / 2, 4500 / 2)
    own = gpu("h100", 500, 64)
    assert (own.tflops, own.memory) == (500, 64)
    assert "--gpu-tflops" in own.source
    with pytest.raises(BadInput, match="there is no GPU"):
        gpu("tpu")
    with pytest.raises(BadInput, match="--gpu-tflops"):
        gpu("h100", 989e12)


def test_the_runs_are_what_law_fit_reads(paper):
    """With losses of the published laws put in, the published gain at 1e21 and S 95 % comes out: 15.8 %."""
    from smelt_budget.laws.forms import SMELT
    from smelt_budget.laws.frontier import frontier, gain
    from smelt_budget.laws.runs import checked
    from smelt_budget.laws.study import study

    rows = runs(paper)
    assert len(rows) == 2 * 72
    for row in rows:
        k = SMELT.presets["smelt-baseline" if row["arm"] == "baseline" else "smelt-looped"]
        size = k["A"] * (1 - row["sparsity"]) ** k["b"] / row["flops_per_token"] ** k["a"]
        row["loss"] = k["E"] + size + k["K"] / row["tokens"] ** k["c"]
    arms = checked(rows, SMELT, "runs.csv")
    fitted = study(SMELT, arms, "runs.csv", starts=10, draws=0)["arms"]
    own = [{n: c["value"] for n, c in fitted[arm]["coefficients"].items()} for arm in ("baseline", "twin")]
    assert gain(*(frontier(k, 0.95) for k in own), 1e21) == pytest.approx(0.158, abs=0.002)
