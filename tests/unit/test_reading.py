"""What a file may hold, and what its reader says: YAML 1.2 and JSON, wrappers, harmless and harmful keys."""

import json
from pathlib import Path

import pytest

from smelt_budget.errors import BadInput
from smelt_budget.spec import builtin, read, read_mapping
from smelt_budget.spec.text import LARGEST, parse

TEN_LINES = """\
hidden_size: 64
num_hidden_layers: 4
vocab_size: 1_000
num_attention_heads: 4
num_key_value_heads: 2
num_experts: 8
num_experts_per_tok: 2
moe_intermediate_size: 32
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("   \n", "is empty"),
        ("- 1\n- 2\n", "holds a list, not a mapping"),
        ("just words", "holds text, not a mapping"),
        ("a: 1\na: 2", 'duplicate key "a"'),
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ("a:\t1", "indent with spaces"),
        ("\ta: 1", "indent with spaces"),
        ("a: &x [1]\nb: *x", "uses a YAML alias (*x)"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("---\na: 1\n---\nb: 2", "not YAML"),
        ("a: .nan", "a is nan, not a finite number"),
        ("a: .inf", "a is inf, not a finite number"),
        ('{"a": NaN}', "a is nan, not a finite number"),
        ("1: 2", "the key 1 is a number, not text"),
        ("a: 2026-13-45", "cannot build"),
        ("a: 2026-01-01", "which no field takes"),
        ("a: " + "[" * 40 + "]" * 40, "nested more than 32 deep"),
        ("[" * 100_000, "nested"),
        ('{"a":' * 100_000, "nested"),
        ("a: " + "9" * 5000, "cannot build"),
        ('{"a": ' + "9" * 5000 + "}", "digit"),
        ('{"a": 1,}}', "not JSON"),
        ("a: 1\x00", "not YAML"),
    ],
)
def test_text_that_is_no_model(text, words):
    """Each with a reason; nothing is executed and nothing unfolds."""
    with pytest.raises(BadInput) as error:
        parse(text, "file")
    assert words in str(error.value)


def test_billion_laughs_is_refused_before_it_unfolds():
    """Nine levels of ten aliases are a billion words."""
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    with pytest.raises(BadInput, match="alias"):
        parse(bomb, "bomb")


def test_yaml_flow_mapping_is_not_mistaken_for_json():
    """A brace opens both."""
    assert parse("{hidden_size: 64, tie: no}", "flow") == {"hidden_size": 64, "tie": "no"}


def test_files_of_every_kind(tmp_path):
    """BOM and CRLF are read; UTF-16, binary, huge and missing files, folders without config.json are refused."""
    good = tmp_path / "base.yaml"
    good.write_bytes(b"\xef\xbb\xbf" + TEN_LINES.replace("\n", "\r\n").encode())
    assert read(str(good)).spec.vocab_size == 1000
    (tmp_path / "config.json").write_text(json.dumps(parse(TEN_LINES, "x")))
    assert read(str(tmp_path)).spec == read(str(good)).spec
    bad = {
        "utf16.yaml": (TEN_LINES.encode("utf-16"), "UTF-16"),
        "binary.yaml": (b"hidden_size: \xff\xfe\x00", "not UTF-8"),
        "huge.yaml": (b"#" * (LARGEST + 1), "larger than 4 MiB"),
    }
    for name, (data, words) in bad.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadInput, match=words):
            read(str(tmp_path / name))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"holds no config.json"):
        read(str(tmp_path / "empty"))
    with pytest.raises(BadInput, match=r"did you mean .*qwen3-30b-a3b"):
        read("qwen3-30b")


def test_a_file_wins_over_a_built_in_name(tmp_path, monkeypatch):
    """Names are looked up only where no such file exists."""
    monkeypatch.chdir(tmp_path)
    Path("dbrx").write_text(TEN_LINES)
    assert read("dbrx").spec.hidden_size == 64


def test_a_wrapper_is_opened_and_said_so():
    """The language model inside a multimodal config; the outer tie flag holds where the inner has none."""
    inner = builtin.load("qwen3-30b-a3b")["config"]
    inner = {k: v for k, v in inner.items() if k != "tie_word_embeddings"}
    reading = read_mapping({"model_type": "some_vl", "text_config": inner, "tie_word_embeddings": True}, "wrapped")
    assert reading.spec.tie_word_embeddings
    assert "read text_config of a some_vl model" in reading.notes[0]
    deep = {"model_type": "omni", "thinker_config": {"text_config": inner}}
    assert read_mapping(deep, "deep").spec.num_experts == 128
    with pytest.raises(BadInput, match="cannot be counted exactly"):
        read_mapping({"model_type": "x", "text_config": {"model_type": "qwen3_next"}}, "wrapped")


@pytest.mark.parametrize("key", ["num_mamba_layers", "expert_parallel_width", "use_mla", "attn_layer_period", "bias"])
def test_an_unknown_key_that_could_change_a_count_is_an_error(key):
    """In a Hugging Face config and in own YAML alike."""
    for base in (builtin.load("mixtral-8x7b")["config"], parse(TEN_LINES, "own")):
        with pytest.raises(BadInput, match=key):
            read_mapping(base | {key: 4}, "case")


def test_harmless_keys_are_listed():
    """Known to change no width, count or layer: read past, and named on -v."""
    extra = {
        "initializer_range": 0.02,
        "router_jitter_noise": 0.0,
        "attention_dropout": 0.0,
        "architectures": ["X"],
        "bos_token_id": 1,
    }
    reading = read_mapping(builtin.load("mixtral-8x7b")["config"] | extra, "case")
    assert set(extra) <= set(reading.harmless)
    assert read_mapping(parse(TEN_LINES, "own") | {"init_std": 0.02}, "own").harmless == ("init_std",)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("qwen3-30b-a3b", {"use_qk_norm": False}, "use_qk_norm"),
        ("qwen3-30b-a3b", {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size"),
        ("mixtral-8x7b", {"attention_bias": True}, "attention_bias"),
        ("mixtral-8x7b", {"num_experts": 4}, "one quantity, two values"),
        ("mixtral-8x7b", {"num_local_experts": None}, "num_experts is missing"),
        ("mixtral-8x7b", {"kv_lora_rank": 512}, "kv_lora_rank"),
        ("gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, "linear_attention"),
        ("gpt-oss-20b", {"head_dim": "64"}, "not a whole number"),
        ("deepseek-v3", {"first_k_dense_replace": 61}, "leaves no MoE layer"),
        ("deepseek-v3", {"n_shared_experts": True}, "not a whole number"),
        ("minimax-m2", {"attn_type_list": [0] * 62}, "attn_type_list"),
        ("llama-4-scout", {"moe_layers": [99]}, "moe_layers"),
        ("dbrx", {"attn_config": 3}, "attn_config"),
        ("dbrx", {"num_hidden_layers": "x"}, "num_hidden_layers"),
        ("olmoe-1b-7b", {"head_dim": 64}, "q_norm"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [99]}, "below 48"),
        ("llama-4-scout", {"no_rope_layers": [[1]] * 48}, "no_rope_layers"),
        (
            "qwen3-8b",
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": None},
            "max_window_layers",
        ),
    ],
)
def test_contradictions_and_wrong_types_in_a_config(name, change, words):
    """A config that says two things, or the wrong kind of thing, is refused with the key."""
    with pytest.raises(BadInput) as error:
        read_mapping(builtin.load(name)["config"] | change, "case")
    assert words in str(error.value)


PUBLISHED_EXTRAS = {
    "minimax-m2": {
        "mlp_intermediate_size": 8192,
        "mtp_transformer_layers": 1,
        "layernorm_mlp_beta": 1.0,
        "router_jitter_noise": 0.0,
    },
    "llama-4-scout": {
        "_attn_implementation_autoset": True,
        "for_llm_compressor": False,
        "cache_implementation": "hybrid",
    },
    "mixtral-8x7b": {"unsloth_fixed": True, "num_logits_to_keep": 0, "some_future_flag": None},
    "qwen3-30b-a3b": {"quantization": {"group_size": 64, "bits": 4}, "max_window_layers": 48},
    "deepseek-v3": {"quantization_config": {"fmt": "e4m3"}, "topk_method": "noaux_tc", "ep_size": 1, "seq_aux": True},
    "ouro-1.4b": {
        "early_exit_step": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 24,
    },
}


@pytest.mark.parametrize("name", PUBLISHED_EXTRAS)
def test_keys_of_really_published_files_are_no_obstacle(name):
    """What uploads and re-saves carry beside the shape; null is absent."""
    config = builtin.load(name)["config"]
    reading = read_mapping(config | PUBLISHED_EXTRAS[name], "published")
    assert reading.spec == read_mapping(config, "published").spec
    read = {"use_sliding_window", "sliding_window", "topk_method"}
    assert set(reading.harmless) >= PUBLISHED_EXTRAS[name].keys() - read


def test_dbrx_as_uploaded():
    """The nested configs of the real file repeat every default of a config; none of them decides anything."""
    config = builtin.load("dbrx")["config"]
    clutter = {
        "tie_word_embeddings": True, "is_encoder_decoder": False, "top_k": 50, "max_length": 20, "model_type": "",
        "architectures": None, "add_cross_attention": False, "torchscript": False, "hidden_size": 6144,
    }  # fmt: skip
    nested = {key: config[key] | clutter for key in ("attn_config", "ffn_config")}
    nested["ffn_config"] |= {"moe_jitter_eps": 0.01, "uniform_expert_assignment": False, "ffn_act_fn": {"name": "silu"}}
    assert read_mapping(config | nested | {"resid_pdrop": 0.0}, "dbrx").spec == read("dbrx").spec


def test_minimax_m2_under_its_older_name():
    """model_type minimax with M2's architecture is M2."""
    config = builtin.load("minimax-m2")["config"] | {"model_type": "minimax", "architectures": ["MiniMaxM2ForCausalLM"]}
    assert read_mapping(config, "m2").spec == read("minimax-m2").spec


@pytest.mark.parametrize(
    "kinds", [[["dense"]] * 27, ["dense"] * 26, ["sparse", "dense"] + ["sparse"] * 25, ["dense"] * 27]
)
def test_layer_kinds_of_glm_lite_are_whole(kinds):
    """One of dense, then sparse, for each layer, and no other number of dense layers beside it."""
    config = builtin.load("deepseek-v2-lite")["config"] | {"model_type": "glm4_moe_lite", "mlp_layer_types": kinds}
    with pytest.raises(BadInput):
        read_mapping(config, "case")


@pytest.mark.parametrize(
    "setting",
    [
        {"convention": [1]},
        {"convention": "mine"},
        {"context": -5},
        {"context": 10**23},
        {"attention_length": "abc"},
        [1],
    ],
)
def test_a_pairs_setting_is_checked(tmp_path, setting):
    """It was written by solve; anything else is refused with the file named."""
    pair = tmp_path / "smelt.yaml"
    one = {"spec": parse(TEN_LINES, "x")}
    pair.write_text(json.dumps({"baseline": one, "twin": one, "setting": setting}))
    with pytest.raises(BadInput, match="not one that solve wrote"):
        read(f"{pair}#twin")


def test_lightning_attention_is_refused_by_name():
    """MiniMax-Text-01's class default has it in every other layer."""
    config = builtin.load("mixtral-8x7b")["config"] | {"model_type": "minimax"}
    for extra in ({}, {"layer_types": ["linear_attention", "full_attention"] * 16}, {"attn_type_list": [0] * 32}):
        with pytest.raises(BadInput, match="lightning"):
            read_mapping(config | extra, "case")


def test_one_arm_of_a_pair(tmp_path):
    """smelt.yaml#twin; without an arm the file is refused with both fixes."""
    pair = tmp_path / "smelt.yaml"
    one = parse(TEN_LINES, "x")
    pair.write_text(json.dumps({"baseline": {"spec": one}, "twin": {"spec": one | {"num_experts": 9}}}))
    assert read(f"{pair}#twin").spec.num_experts == 9
    assert read(f"{pair}#baseline").spec.num_experts == 8
    with pytest.raises(BadInput, match="holds a solved pair"):
        read(str(pair))
