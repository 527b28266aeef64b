"""What Megatron and Megatron-Bridge are told: flags and fields, what is refused, what is said to be otherwise."""

import importlib.util
import json
import py_compile
import sys
import types
from dataclasses import make_dataclass
from pathlib import Path

import pytest

from smelt_budget.emit import folder, launch
from smelt_budget.emit.features import PLAIN, features
from smelt_budget.emit.launch import Layout
from smelt_budget.emit.megatron import MEGATRON
from smelt_budget.emit.megatron_bridge import MEGATRON_BRIDGE
from smelt_budget.emit.target import ARMS, Job, lines
from smelt_budget.emit.training import training
from smelt_budget.errors import BadInput
from smelt_budget.spec.model import checked
from smelt_budget.verify.pair import read_pair

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "smelt.yaml"
LOOP = {"start": 1, "stop": 3, "visits": 2, "residual_scale": 0.5}
BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT = {
    "num_key_value_heads": None,
    "head_dim": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "rope_interleave": True,
}


def job(fields=None, twin=None, layout=None, **asked):
    baseline = checked(BASE | (fields or {}))
    looped = checked(BASE | {"loop": LOOP} | (fields or {}) | (twin or {}))
    return Job("pair", baseline, looped, training(baseline, looped, 64, 2**16, 8, **asked), layout)


def values(text):
    """{flag: its words}, and no flag twice."""
    found = [line.split() for line in text.splitlines()]
    flags = {name: words for name, *words in found}
    assert len(flags) == len(found)
    return flags


@pytest.mark.parametrize("target", [MEGATRON, MEGATRON_BRIDGE])
def test_every_feature_is_answered(target):
    """All keys of features.py that a pair can have are looked at, none by default."""
    from smelt_budget.emit.megatron import ANSWERS

    keys = {key for key, _, _ in PLAIN} | {"loop", "residual_scale", "vocab_size", "init", "qk_norm", "schedule"}
    keys |= {"core", "balance.aux", "balance.bias", "balance.none", "z", "dense"}
    assert set(ANSWERS) == keys
    pair = job()
    assert len(lines(target, pair)) == len(features(pair.baseline, pair.twin, pair.training))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"lm_head_bias": True}, "lm-head bias"),
        ({"attention_bias": True, "attention_output_bias": True}, "attention output bias"),
        ({"attention_sinks": True}, "attention sinks"),
        ({"qk_norm": "full"}, "qk-norm: full"),
        ({"qk_norm": "head", "norm": "layer_norm"}, "qk-norm: head"),
        ({"norm": "layer_norm_no_bias"}, "normalisation: layer_norm_no_bias"),
        ({"norms_per_layer": 4}, "norms per layer"),
        ({"early_exit_gate": True}, "early-exit gate"),
        ({"router_bias": True}, "router bias"),
        ({"expert_bias": True}, "expert bias"),
        ({"swiglu_limit": 7.0}, "clamped SwiGLU"),
        ({"embedding_multiplier": 2.0}, "embedding multiplier"),
        ({"residual_multiplier": 0.5}, "residual multiplier"),
        ({"attention_multiplier": 0.5}, "attention multiplier"),
        ({"logits_scaling": 2.0}, "logits scaling"),
        ({"attention_chunk_size": 8, "layer_types": ("chunked_attention",) * 4}, "chunked attention"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, "stretched rotary positions"),
        ({"scoring_func": "sigmoid", "norm_topk_prob": False}, "renormalised top-k weights"),
        ({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}, "expert groups"),
        (LATENT | {"q_lora_rank": None}, "latent attention"),
        (LATENT | {"rope_interleave": False}, "latent attention"),
        (LATENT | {"rms_norm_eps": 1e-5}, "latent attention"),
        ({"rope_theta": 10000.5}, "rope_theta 10000.5: --rotary-base takes whole numbers"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1 with norm_topk_prob"),
    ],
)
@pytest.mark.parametrize("target", [MEGATRON, MEGATRON_BRIDGE])
def test_what_cannot_be_held_is_refused_by_name(target, fields, named):
    """Rather than emitted as something else."""
    pair = job(fields)
    with pytest.raises(BadInput, match=f"{target.name} cannot hold this pair") as caught:
        whole(target, pair)
    assert named in str(caught.value)


def whole(target, pair):
    lines(target, pair)
    target.emit(pair)


def test_a_bias_needs_sigmoid_scores():
    """megatron-core raises with softmax; the table says that the auxiliary loss takes its place."""
    (line,) = [line for line in lines(MEGATRON, job(balance="bias")) if line.feature == "balancing"]
    assert line.how == "otherwise"
    assert line.emitted == "auxiliary loss 0.01: the bias needs sigmoid scores here"
    flags = values(MEGATRON.emit(job(balance="bias")).files["twin/arguments.txt"])
    assert "--moe-router-enable-expert-bias" not in flags
    assert flags["--moe-router-load-balancing-type"] == ["aux_loss"]
    sigmoid = job({"scoring_func": "sigmoid"}, balance="bias")
    assert all(line.how == "as asked" for line in lines(MEGATRON, sigmoid))
    flags = values(MEGATRON.emit(sigmoid).files["twin/arguments.txt"])
    assert flags["--moe-router-bias-update-rate"] == ["0.001"]
    assert flags["--moe-router-load-balancing-type"] == ["none"]


def test_losses_are_shared_out_among_executed_layers():
    """Megatron adds up what `verify` averages: 4 layers of the baseline, 6 executed ones of the twin."""
    files = MEGATRON.emit(job()).files
    shares = [values(files[f"{arm}/arguments.txt"])["--moe-aux-loss-coeff"] for arm in ARMS]
    assert [float(share) for (share,) in shares] == [0.01 / 4, 0.01 / 6]
    assert [float(values(files[f"{arm}/arguments.txt"])["--moe-z-loss-coeff"][0]) for arm in ARMS] == [
        1e-3 / 4,
        1e-3 / 6,
    ]


def test_a_layout_is_written_down():
    """Parallel sizes, and stages as `launch.stages` cuts them; two stages of four layers, the core in the first."""
    layout = Layout("torchrun", nodes=2, gpus=4, tensor=2, expert=4, pipeline=2)
    pair = job(layout=layout)
    launch.check(layout, {arm: pair.spec(arm) for arm in ARMS}, 8, MEGATRON.parallel)
    made = MEGATRON.emit(pair)
    flags = values(made.files["twin/arguments.txt"])
    assert flags["--pipeline-model-parallel-layout"] == ["Ettt|tL"]
    assert values(made.files["baseline/arguments.txt"])["--pipeline-model-parallel-layout"] == ["Ett|ttL"]
    assert flags["--tensor-model-parallel-size"] == ["2"]
    assert flags["--expert-model-parallel-size"] == ["4"]
    assert flags["--expert-tensor-parallel-size"] == ["1"]
    assert "--sequence-parallel" in flags
    assert "local.txt" not in made.files  # Megatron's own norms have no sequence parallelism
    assert made.train["twin"] == ("pretrain.py", "@twin/arguments.txt", "@transformer_engine.txt")


def test_widths_divide_by_tensor_ranks():
    """Dense and shared widths are split, which `launch.check` does not look at."""
    fields = {"shared_expert_intermediate_size": 33, "mlp_only_layers": (0,), "intermediate_size": 66}
    with pytest.raises(BadInput, match="shared_expert_intermediate_size 33 does not divide by tensor 2"):
        MEGATRON.emit(job(fields, layout=Layout("local", gpus=2, tensor=2)))


def recorded():
    data = json.loads((HERE / "megatron_bridge_fields.json").read_text())
    return {name: set(words.split()) for name, words in data.items() if name not in ("version", "how")}


SECTIONS = {
    "train": "TrainingConfig",
    "validation": "ValidationConfig",
    "optimizer": "OptimizerConfig",
    "scheduler": "SchedulerConfig",
    "ddp": "DistributedDataParallelConfig",
    "dataset": "GPTDatasetConfig",
    "logger": "LoggerConfig",
    "tokenizer": "TokenizerConfig",
    "checkpoint": "CheckpointConfig",
    "rng": "RNGConfig",
}
BRIDGED = {
    "plain": {},
    "all": {
        "qk_norm": "head",
        "sliding_window": 9,
        "layer_types": ("full_attention", "sliding_attention") * 2,
        "mlp_only_layers": (0,),
        "intermediate_size": 96,
        "shared_expert_intermediate_size": 40,
        "shared_expert_gate": True,
        "scoring_func": "sigmoid",
        "router_correction_bias": True,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.5,
        "rope_interleave": True,
        "attention_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "latent": LATENT,
}


@pytest.mark.parametrize("name", BRIDGED)
def test_bridge_is_given_fields_it_has(name):
    """Every key against the fields recorded from megatron-bridge 0.6.2's sources; both arms."""
    fields = recorded()
    layout = Layout("local", gpus=2, pipeline=2)
    files = MEGATRON_BRIDGE.emit(job(BRIDGED[name], layout=layout)).files
    provider = "MLAModelProvider" if name == "latent" else "GPTModelProvider"
    for arm in ARMS:
        given = json.loads(files[f"{arm}.json"])
        assert set(given) - {"model"} == set(SECTIONS)
        assert set(given["model"]) <= fields[provider]
        assert all(set(given[section]) <= fields[kind] for section, kind in SECTIONS.items())


@pytest.mark.parametrize("name", BRIDGED)
def test_the_recipe_runs(tmp_path, monkeypatch, name):
    """It compiles, and against stand-ins that have the recorded fields and no others it builds both arms."""
    out = tmp_path / "pair"
    folder.write(out, MEGATRON_BRIDGE.emit(job(BRIDGED[name])).files, force=True)
    py_compile.compile(str(out / "recipe.py"), cfile=str(tmp_path / "recipe.pyc"), doraise=True)
    modules = {
        "megatron.bridge.models.gpt_provider": ["GPTModelProvider"],
        "megatron.bridge.models.mla_provider": ["MLAModelProvider"],
        "megatron.bridge.training.config": [
            *(kind for kind in SECTIONS.values() if kind not in ("TokenizerConfig", "DistributedDataParallelConfig")),
            "ConfigContainer",
        ],
        "megatron.bridge.training.tokenizers.config": ["TokenizerConfig"],
        "megatron.core.distributed": ["DistributedDataParallelConfig"],
    }
    fields, trained = recorded(), []
    for path, kinds in modules.items():
        module = types.ModuleType(path)
        for kind in kinds:
            setattr(module, kind, make_dataclass(kind, [(field, object, None) for field in sorted(fields[kind])]))
        monkeypatch.setitem(sys.modules, path, module)
    for path, name_, value in (
        ("megatron.bridge.training.gpt_step", "forward_step", "step"),
        ("megatron.bridge.training.pretrain", "pretrain", lambda config, step: trained.append((config, step))),
    ):
        module = types.ModuleType(path)
        setattr(module, name_, value)
        monkeypatch.setitem(sys.modules, path, module)
    layers = types.ModuleType("smelt_layers")
    layers.baseline, layers.twin = "baseline layers", "twin layers"
    monkeypatch.setitem(sys.modules, "smelt_layers", layers)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("recipe", out / "recipe.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    monkeypatch.setattr(sys, "argv", ["recipe.py", "twin", "dataset.data_path=/data/x", "train.train_iters=7"])
    recipe.main()
    ((config, step),) = trained
    assert step == "step"
    assert config.model.transformer_layer_spec == "twin layers"
    assert (config.dataset.data_path, config.train.train_iters) == ("/data/x", 7)
    assert config.model.vocab_size == 512
    assert config.model.should_pad_vocab is False
    assert recipe.baseline().model.num_layers == 4
    with pytest.raises(SystemExit, match="train has no field iterations"):
        recipe.changed(config, ["train.iterations=3"])


def test_the_example_is_emitted():
    """examples/smelt.yaml is held as asked in every respect."""
    solved = read_pair(EXAMPLE)
    pair = Job("smelt_pair", solved.baseline, solved.twin, training(solved.baseline, solved.twin, 4096))
    for target in (MEGATRON, MEGATRON_BRIDGE):
        assert {line.how for line in lines(target, pair)} == {"as asked"}
        assert target.emit(pair).train.keys() == set(ARMS)
