"""The public cases: models, issues and peers' counts with their right values (`public.jsonl`, each with its source).

Every case is either checked here, by its id or by its kind, or named in `NOT_OURS` with the reason.
"""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from smelt_budget.errors import BadInput
from smelt_budget.ledger import CONVENTIONS, Ledger, Setting
from smelt_budget.spec import read, read_mapping
from smelt_budget.spec.text import parse

CASES = {c["id"]: c for c in map(json.loads, Path(__file__).with_name("public.jsonl").read_text("utf-8").splitlines())}
FULL = CONVENTIONS["full-square"]
MIXTRAL, QWEN3, OLMOE = (read(n).spec for n in ("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b"))

NOT_OURS = {
    "hub-single-field-override": "a hub badge, not a model's description",
    "hub-packed-u32": "a count of packed words in a file",
    "hub-fp4-experts": "a count of packed words in a file",
    "iss-maxtext-678-mixtral": "a step's TFLOP/s on hardware",
    "iss-megatron-1784-act": "activation memory",
    "iss-megatron-4050-ep": "weights per rank",
    "iss-deepspeed-3619": "weights per rank",
    "iss-deepspeed-4723": "another program's counter",
    "iss-calflops-24-28": "another program's counter",
    "iss-pytorch-195460-cpu-sdpa": "torch's counter on a CPU kernel, for verify",
    "iss-pytorch-grouped-mm": "torch's counter on one op, for verify",
    "iss-pytorch-134804-184348": "torch's counter on one op, for verify",
    "peer-cookbook-int-ff": "what another program's command line cannot express",
    "iss-vllm-19029": "a server's concurrency",
    "iss-vllm-51041-derived": "a server's log line",
}


def counted(source, convention=FULL, context=4096, length=None):
    spec = source if not isinstance(source, dict) else read_mapping(source, "case").spec
    return Ledger(spec, Setting.of(spec, convention, context, length))


def own(**fields):
    """A small grouped-query MoE."""
    base = {
        "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    return read_mapping(base | fields, "own").spec


def refused(config, *words):
    with pytest.raises(BadInput) as error:
        read_mapping(config, "case")
    return all(word in str(error.value) for word in words)


# --- whole models --------------------------------------------------------------------------------------------------

KEYS = {
    "total_params": "total",
    "non_embedding_params": "non_embedding",
    "input_embedding_params": "input_embedding",
    "lm_head_params": "lm_head",
    "active_incl_both_embeddings": "active_with_embeddings",
    "active_excl_input_embedding": "active_with_lm_head",
    "active_non_embedding": "active_non_embedding",
}
MODELS = [i for i in CASES if i.startswith("pub-") and "model_type" in CASES[i]["input_config"]]


@pytest.mark.parametrize("case", MODELS)
def test_whole_model(case):
    """Totals, both embeddings, three meanings of active, KV bytes, routed parameters: exact integers."""
    right, ledger = CASES[case]["right_value"], counted(CASES[case]["input_config"])
    data = ledger.as_dict()
    assert {k: data["parameters"][v] for k, v in KEYS.items() if k in right} == {
        k: right[k] for k in KEYS if k in right
    }
    assert data["kv_cache"]["bytes_per_token"] == right["kv_bytes_per_token_bf16"]
    if "routed_expert_params" in right:
        routed = [r for r in ledger.rows if r.name in ("experts", "experts.bias")]
        assert sum(r.params * r.stored for r in routed) == right["routed_expert_params"]
    if "layer_visits" in right:
        assert data["kv_cache"]["executed_layers"] == data["layers"]["effective"] == right["layer_visits"]


DERIVED = [i for i in CASES if i.startswith("derived-") and "flops" not in i and "inkling" not in i]


@pytest.mark.parametrize("case", DERIVED)
def test_one_rule_at_a_time(case):
    """Tiny models, each with one switch, counted by transformers 5.24 on the meta device."""
    right, data = CASES[case]["right_value"], counted(CASES[case]["input_config"]).as_dict()["parameters"]
    assert (data["total"], data["non_embedding"]) == (right["total"], right["non_embedding"])
    assert (data["lm_head"] == 0) == right["tied"]


FLOPS = {i: i.removeprefix("derived-flops-") for i in CASES if i.startswith("derived-flops")}


@pytest.mark.parametrize("case", FLOPS)
def test_flops_of_published_models(case):
    """Linear part, attention per position, full and causal totals at 4096."""
    right, name = CASES[case]["right_value"], FLOPS[case].replace("granite-3.1", "granite-3.1")
    spec = read(name).spec
    per_position = counted(spec, length=Fraction(2)).forward_flops - counted(spec, length=Fraction(1)).forward_flops
    assert per_position == right["core_per_position"]
    assert counted(spec, length=Fraction(1)).forward_flops - per_position == right["linear"]
    assert counted(spec).forward_flops == right["full_attention"]
    assert counted(spec, length=Fraction(4097, 2)).forward_flops == right["causal_exact"]


TOTALS = {
    "hub-qwen3-06b-tied-stored-twice": "unique_params",
    "hub-gpt-oss-safeguard-mxfp4-scales": "true_params",
    "hub-glm45air-mtp-exact": "main_model",
    "iss-megatron-1475-mla": None,
}


@pytest.mark.parametrize("case", TOTALS)
def test_total(case):
    """Copies, quantisation scales and MTP layers in a checkpoint are not the model."""
    right, key = CASES[case]["right_value"], TOTALS[case]
    assert counted(CASES[case]["input_config"]).total == (right if key is None else right[key])


FULL_SQUARE = {
    "iss-trl-7069-mixtral": None,
    "iss-trl-7069-qwen3moe-control": None,
    "peer-litgpt-moe-flops": "right",
    "peer-levanter-headdim": "right",
    "peer-nanotron-moe": "right",
}


@pytest.mark.parametrize("case", FULL_SQUARE)
def test_full_attention_flops(case):
    """Forward FLOPs per token at 4096, whole square."""
    right, key = CASES[case]["right_value"], FULL_SQUARE[case]
    assert counted(CASES[case]["input_config"]).forward_flops == (right if key is None else right[key])


MEGATRON_GAPS = [i for i in CASES if i.startswith("peer-megatron-gap")]
NAMES = {"olmoe-1b-7b-0924": "olmoe-1b-7b"}


@pytest.mark.parametrize("case", MEGATRON_GAPS)
def test_what_megatrons_parameter_formula_misses(case):
    """qk-norm, biases and sinks: our vector rows but the norms are exactly its gap."""
    right, name = CASES[case]["right_value"], case.removeprefix("peer-megatron-gap-")
    ledger = counted(read(NAMES.get(name, name)).spec)
    missed = [r for r in ledger.rows if r.kind == "vector" and "norm." not in r.name and r.name != "final_norm"]
    assert sum(r.params * r.stored for r in missed) == right["missing"]
    assert ledger.total == right["right"]


# --- refusals ------------------------------------------------------------------------------------------------------

REFUSED = {
    "pub-huginn-0125": ({"model_type": "huginn_raven"}, "huginn_raven"),
    "iss-torchtitan-4441-dsv4": ({"model_type": "deepseek_v4"}, "deepseek_v4"),
    "iss-maxtext-4017-gemma4-shared": ({"model_type": "gemma4_text"}, "gemma4_text"),
    "iss-lmcache-3080-qwen35": ({"model_type": "qwen3_5_moe"}, "linear-attention"),
    "derived-inkling-pass1": ({}, "inkling2_loop_text"),
    "derived-inkling-pass2": ({}, "inkling2_loop_text"),
    "in-class-default-trap": ({}, "intermediate_size is missing"),
    "in-layer-lists": ({"model_type": "openelm"}, "differ by layer"),
    "iss-vllmfit-2-20-27-33": ({}, "text_config has no model_type"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    """What cannot be counted exactly is refused, and the refusal names it."""
    extra, word = REFUSED[case]
    assert refused(CASES[case]["input_config"] | extra, word)


# --- one fact each -------------------------------------------------------------------------------------------------


def tied_embeddings():
    tied, untied = counted(own(tie_word_embeddings=True)), counted(own())
    assert untied.total - tied.total == 64 * 100
    assert tied.forward_flops == untied.forward_flops


def lookup_is_free():
    embedding = next(r for r in counted(MIXTRAL).rows if r.kind == "embedding")
    assert counted(MIXTRAL).setting.flops(embedding) == 0


def latent_core():
    ledger = counted(CASES["iss-torchtitan-1923-mla-heads"]["input_config"])
    core = sum(ledger.setting.flops(r) for r in ledger.rows if r.kind == "attention")
    assert core == 61 * 2 * 128 * (192 + 128) * 4096


def matmul_parameters():
    case = CASES["iss-maxtext-llama3-golden"]
    rows = counted(case["input_config"]).rows
    matrices = sum(r.macs * r.run for r in rows if r.kind in ("matrix", "lm_head"))
    assert matrices == case["right_value"]["right_matmul_params"]


def real_dense_width():
    dense = next(r for r in counted(read("llama-3.1-8b").spec).rows if r.name == "dense")
    assert dense.macs == 3 * 4096 * 14336


def mtp_is_not_the_main_model():
    config = CASES["pub-glm-45-air"]["input_config"]
    assert counted(config | {"num_nextn_predict_layers": 0}).as_dict() == counted(config).as_dict()


def expert_width_counts():
    wide, narrow = counted(own(moe_intermediate_size=64)), counted(own())
    assert wide.forward_flops - narrow.forward_flops == 4 * 2 * 2 * 3 * 64 * 32


def kv_heads_save_cache_not_scores():
    few, many = counted(own(num_key_value_heads=1)), counted(own(num_key_value_heads=8))
    core = [[r.macs * r.run for r in ledger.rows if r.kind == "attention"] for ledger in (few, many)]
    assert core[0] == core[1]
    assert 8 * few.kv_elements_per_token == many.kv_elements_per_token


def qwen3_coder_width():
    spec = read_mapping(CASES["iss-nemo-rl-1144"]["input_config"], "case").spec
    assert spec.num_experts_per_tok * spec.moe_intermediate_size == 20480


def flops_follow_active_parameters():
    assert counted(own(num_experts=16)).forward_flops - counted(own()).forward_flops == 4 * 2 * 64 * 8  # router only


def head_size_is_read():
    spec = read_mapping(CASES["iss-veomni-125"]["input_config"], "case").spec
    assert (spec.head_dim, spec.hidden_size // spec.num_attention_heads) == (128, 64)


def verl(case):
    """verl charges the input embedding as a matmul and half the square."""
    config = CASES[case]["input_config"]
    tokens = sum(config["batch_seqlens"])
    ledger = counted({k: v for k, v in config.items() if k != "batch_seqlens"}, length=Fraction(2048))
    assert 3 * tokens * (ledger.forward_flops + 2 * ledger.input_embedding) == CASES[case]["right_value"]


def latent_switched_off():
    spec = own(multi_latent_attention=False, q_lora_rank=1536, qk_pos_emb_head_dim=64)
    assert spec == own()


def qk_norm_over_all_heads():
    spec = own(hidden_size=5120, num_attention_heads=40, num_key_value_heads=8, head_dim=128, qk_norm="full")
    norm = next(r for r in counted(spec).rows if r.name == "attention.qk_norm")
    assert norm.params == CASES["iss-olmocore-477-qknorm"]["right_value"]["right"]


def windows_keep_query_heads():
    windowed = counted(own(sliding_window=16), CONVENTIONS["smelt"], 64)
    scores = next(r for r in windowed.rows if r.name == "attention.scores")
    mean = Fraction(16 * 17 // 2 + 48 * 16, 64)
    assert windowed.setting.flops(scores) == 2 * 4 * 64 * mean  # 8 query heads of 8


def both_meanings_of_non_embedding():
    data, right = counted(OLMOE), CASES["peer-olmocore-nonembedding"]["right_value"]
    assert data.non_embedding == right["excluding_both"]
    assert data.non_embedding + data.lm_head == right["excluding_input_only"]


def scores_under_gqa():
    # 134217728 = 4 * 8 query heads * 512 * 512 positions * 16
    spec = own(num_attention_heads=8, num_key_value_heads=2, head_dim=16, num_hidden_layers=1)
    ledger = counted(spec, context=512)
    core = sum(ledger.setting.flops(r) for r in ledger.rows if r.kind == "attention") * 512
    assert core == CASES["iss-xformers-1404"]["right_value"]


def qwen_72b():
    case = CASES["iss-cookbook-36"]
    fields = {k: v for k, v in case["input_config"].items() if k != "model"}
    ledger = counted(fields | {"model_type": "qwen2", "num_hidden_layers": 80})
    assert ledger.total == case["right_value"]["right"]


def expert_flops_of_mixtral():
    experts = next(r for r in counted(MIXTRAL).rows if r.name == "experts")
    assert counted(MIXTRAL).setting.flops(experts) == CASES["peer-cookbook-ffn-hidden-ignored"]["right_value"]["right"]


def interleaved_dense_layers():
    moe = own(num_hidden_layers=12, mlp_only_layers=[0, 2, 4, 6, 8, 10], intermediate_size=32)
    ffn = sum(r.macs * r.run for r in counted(moe).rows if r.name in ("dense", "experts"))
    assert Fraction(ffn, 12 * 3 * 64 * 32) == Fraction(3, 2)


def loads_any_ratio():
    assert counted(CASES["peer-llmanalysis-hf-crash"]["input_config"]).total == 30_532_122_624


def causal_flops_with_wide_heads():
    case = CASES["peer-nemo-qwen3-formula"]
    assert counted(case["input_config"], length=Fraction(4097, 2)).forward_flops == case["right_value"]["right"]


def mixtral_is_46_7_billion():
    assert round(counted(MIXTRAL).total / 1e9, 1) == CASES["peer-nemo-autoconf"]["right_value"]["right"]


def cache_below_the_window():
    config = CASES["iss-hfmem-60"]["input_config"]
    kv = counted(config, context=100).as_dict()["kv_cache"]
    assert kv["bytes_per_token"] == CASES["iss-hfmem-60"]["right_value"]
    assert kv["bytes_at_context"] == 100 * CASES["iss-hfmem-60"]["right_value"]


def cache_of_a_latent():
    case = CASES["iss-hfmem-mla"]
    assert counted(case["input_config"]).as_dict()["kv_cache"]["bytes_per_token"] == case["right_value"]["right"]


def cache_from_heads_not_hidden():
    assert counted(own(head_dim=32)).kv_elements_per_token == 4 * 2 * 2 * 32


def total_not_active_for_weights():
    assert counted(QWEN3).total > 9 * counted(QWEN3).active_non_embedding


def flash_cache_is_latent():
    config = {**CASES["pub-deepseek-v2-lite"]["input_config"], "model_type": "glm4_moe_lite"}
    assert counted(config).as_dict()["kv_cache"]["bytes_per_token"] == 31_104


def null_head_dim(case):
    config = {k: v for k, v in CASES[case]["input_config"].items() if k != "model"}
    rest = {"model_type": "mistral", "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 32000}
    assert read_mapping(config | rest, "case").spec.head_dim == CASES[case]["right_value"]


def null_window():
    spec = read_mapping(CASES["pub-mixtral-8x7b"]["input_config"] | {"sliding_window": None}, "case").spec
    assert (spec.sliding_window, spec.layer_types) == (None, None)


def missing_kv_heads():
    case = CASES["in-kv-missing"]
    ledger = counted(case["input_config"] | {"model_type": "olmoe"})
    assert (ledger.spec.num_key_value_heads, ledger.total) == tuple(case["right_value"].values())


def expert_names():
    base = CASES["pub-olmoe-1b-7b"]["input_config"]
    rest = {k: v for k, v in base.items() if k not in ("num_experts", "num_experts_per_tok")}
    for count in CASES["in-expert-key-names"]["input_config"]:
        for top in ("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_k", "top_k_experts"):
            assert counted(rest | {count: 64, top: 8}).total == 6_919_161_856


def width_names():
    scout, maverick = read("llama-4-scout").spec, read("llama-4-maverick").spec
    assert (scout.moe_intermediate_size, scout.intermediate_size) == (8192, None)
    assert (maverick.moe_intermediate_size, maverick.intermediate_size) == (8192, 16384)
    assert read("dbrx").spec.moe_intermediate_size == 10752
    assert MIXTRAL.moe_intermediate_size == 14336


def shared_names():
    lite, qwen = read("deepseek-v2-lite").spec, read("qwen1.5-moe-a2.7b").spec
    assert (lite.shared_expert_intermediate_size, qwen.shared_expert_intermediate_size) == (2 * 1408, 5632)
    for none in (0, None):
        config = CASES["pub-glm-45-air"]["input_config"] | {"n_shared_experts": none}
        assert read_mapping(config, "case").spec.shared_expert_intermediate_size is None


def yaml_number(case):
    assert parse(CASES[case]["input_config"]["yaml"], "yaml")["x"] == CASES[case]["right_value"]


def yaml_pitfalls():
    numbers = parse("{a: 4e9, b: 017, c: 1:30, d: no, e: 1_000_000}", "yaml")
    assert numbers == {"a": 4e9, "b": 17, "c": "1:30", "d": "no", "e": 1_000_000}
    text = "hidden_size: {}\nnum_hidden_layers: 1\nvocab_size: 9\nnum_attention_heads: 1\nintermediate_size: 4"
    for typed in ("4,096", "4B", "95%", "1:30", "true", "", "4.5", "4e3"):
        assert refused(parse(text.format(typed), "yaml"), "hidden_size")
    for bad in (".inf", ".nan", "4\nhidden_size: 5"):
        with pytest.raises(BadInput):
            parse(text.format(bad), "yaml")


def one_expert_is_dense():
    sparse = own(num_experts=1, num_experts_per_tok=1)
    dense = own(num_experts=None, num_experts_per_tok=None, moe_intermediate_size=None, intermediate_size=32)
    assert counted(sparse).total == counted(dense).total


FACTS = {
    "iss-torchtitan-3225-tied": tied_embeddings,
    "iss-trl-6708-tied": tied_embeddings,
    "iss-torchtitan-452-embedding": lookup_is_free,
    "iss-torchtitan-1923-mla-heads": latent_core,
    "iss-maxtext-llama3-golden": matmul_parameters,
    "iss-megatron-682-ffn": real_dense_width,
    "iss-megatron-active-mtp": mtp_is_not_the_main_model,
    "iss-pai-485": expert_width_counts,
    "iss-megatron-deepspeed-350-gqa": kv_heads_save_cache_not_scores,
    "iss-nemo-rl-1144": qwen3_coder_width,
    "iss-primerl-778": flops_follow_active_parameters,
    "iss-veomni-125": head_size_is_read,
    "iss-verl-4959-causal": lambda: verl("iss-verl-4959-causal"),
    "iss-verl-dsv3-mla": lambda: verl("iss-verl-dsv3-mla"),
    "iss-slime-1980": latent_switched_off,
    "iss-olmocore-477-qknorm": qk_norm_over_all_heads,
    "iss-olmocore-475-swa-gqa": windows_keep_query_heads,
    "peer-olmocore-nonembedding": both_meanings_of_non_embedding,
    "iss-pytorch-177169-gqa": kv_heads_save_cache_not_scores,
    "iss-xformers-1404": scores_under_gqa,
    "iss-cookbook-36": qwen_72b,
    "peer-cookbook-ffn-hidden-ignored": expert_flops_of_mixtral,
    "peer-cookbook-interval": interleaved_dense_layers,
    "peer-llmanalysis-hf-crash": loads_any_ratio,
    "peer-nemo-qwen3-formula": causal_flops_with_wide_heads,
    "peer-nemo-autoconf": mixtral_is_46_7_billion,
    "iss-hfmem-60": cache_below_the_window,
    "iss-hfmem-mla": cache_of_a_latent,
    "iss-kvcalc-kolosal-2": cache_from_heads_not_hidden,
    "iss-llmfit-230": total_not_active_for_weights,
    "iss-lmdeploy-4366": flash_cache_is_latent,
    "in-headdim-null-1": lambda: null_head_dim("in-headdim-null-1"),
    "in-headdim-null-2": lambda: null_head_dim("in-headdim-null-2"),
    "in-sliding-null": null_window,
    "in-kv-missing": missing_kv_heads,
    "in-expert-key-names": expert_names,
    "in-width-key-names": width_names,
    "in-shared-key-names": shared_names,
    "in-yaml-sci-1": lambda: yaml_number("in-yaml-sci-1"),
    "in-yaml-sci-2": lambda: yaml_number("in-yaml-sci-2"),
    "in-yaml-sci-4": lambda: yaml_number("in-yaml-sci-4"),
    "in-yaml-pitfalls": yaml_pitfalls,
    "in-num-experts-1": one_expert_is_dense,
}


@pytest.mark.parametrize("case", FACTS)
def test_fact(case):
    """One fact from an issue or a peer; the function's name says it, the case holds source and right value."""
    FACTS[case]()


def test_every_case_is_accounted_for():
    """No case is dropped silently: checked above, or named with the reason why it is not ours."""
    checked = [
        MODELS, DERIVED, FLOPS, TOTALS, FULL_SQUARE, MEGATRON_GAPS, REFUSED, FACTS, NOT_OURS,
    ]  # fmt: skip
    names = [case for group in checked for case in group]
    assert sorted(names) == sorted(CASES)
