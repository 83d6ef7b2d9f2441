"""State-space and hybrid models behind the engine: packed prompts, answers are Hugging Face's own."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.coverage_models import MODELS, Model

from own_code import reference as own_code
from paged_mixer import generated
from sampling import some_of
from serving_factory import GREEDY, policies_of, read_all, wait_for
from tessera.serve.records import Ask, ServeSpec
from tessera.serve.service import Service
from tessera.serve.steps import served
from tessera.serve.text import ByteText

pytest.importorskip("transformers")

_BY_NAME = {model.name: model for model in MODELS}
_TEXT = _BY_NAME["llama"].sizes
_MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_d_ssm": 64,
}  # fmt: skip
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA_AND_ATTENTION = ["mamba", "attention"]
# Recurrence by name of the operator, with attention beside it, in turn with it, or without.
FURTHER = (
    Model("falcon_h1", "FalconH1ForCausalLM", {**_TEXT, **_MAMBA2}),
    Model("granitemoehybrid", "GraniteMoeHybridForCausalLM", {
        **_TEXT, **_MAMBA2, "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 32,
        "layer_types": _MAMBA_AND_ATTENTION, "layers_block_type": _MAMBA_AND_ATTENTION,
    }),
    Model("zamba2", "Zamba2ForCausalLM", {
        **_TEXT, "mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1,
        "chunk_size": 8, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1,
        "hybrid_layer_ids": [1], "mamba_expand": 2, "attention_head_dim": 16, "attention_hidden_size": 64,
    }),
    Model("nemotron_h", "NemotronHForCausalLM", {
        **_TEXT, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
        "chunk_size": 8, "layers_block_type": _MAMBA_AND_ATTENTION,
    }),
    Model("olmo_hybrid", "OlmoHybridForCausalLM", {
        **_TEXT, **_HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }),
    Model("kimi_linear", "KimiLinearForCausalLM", {
        **_TEXT, **_HYBRID, "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 4, "q_lora_rank": None, "num_experts": 2,
        "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "linear_attn_config": {
            "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1],
            "full_attn_layers": [2],
        },
    }),
)  # fmt: skip
NAMES = ("mamba2", "jamba", "qwen3_next", "mamba", "falcon_mamba", "bamba", "lfm2")
ALL = {name: _BY_NAME[name] for name in NAMES} | {model.name: model for model in FURTHER}
FEW = ("qwen3_next", "falcon_h1")


@pytest.mark.parametrize("name", some_of(ALL, FEW))
def test_answers_alone_and_sixteen_at_once_are_those_of_generate(name: str, tmp_path: Path) -> None:
    """Prompts of different lengths share steps with one another and with answers."""
    ALL[name].write(tmp_path)
    sizes: dict[str, Any] = {"capacity": 64, "max_batch_tokens": 40, "random_weights": True}
    model = served(str(tmp_path), ServeSpec(microbatches=1, rows=8, **sizes))
    plain = served(str(tmp_path), ServeSpec(microbatches=1, rows=8, joined=False, **sizes)).workloads[-1]
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 90) for _ in range(rng.randrange(1, 40))] for _ in range(16)]
    asks = [Ask(tuple(prompt), 8, GREEDY, ignores_end=True) for prompt in prompts]
    with (
        own_code(model, num_threads=1) as stepper,
        Service(stepper, policies_of(stepper, model.shape), model.shape, ByteText()) as service,
    ):
        alone = [told.numbers for told in wait_for(read_all(service, asks[:1]))]
        found = [told.numbers for told in wait_for(read_all(service, asks))]

    assert (True, True) == (model.shape.is_flat, model.shape.has_rows)
    assert generated(plain, prompts, 8) == found
    assert found[:1] == alone


def test_a_prompt_read_in_parts_leaves_the_state_of_a_whole_one(tmp_path: Path) -> None:
    """Through several steps, beside another sequence's rows."""
    ALL["mamba2"].write(tmp_path)
    spec = ServeSpec(microbatches=1, rows=4, capacity=64, max_batch_tokens=16, random_weights=True)
    workload = served(str(tmp_path), spec).workloads[-1]
    tokens, states = torch.randint(3, 90, (12,)), []
    for parts in ([12], [1, 7, 4]):
        state = {name: torch.ones_like(t) for name, t in workload.make_state(0).items()}
        read = 0
        for num in parts:
            inputs = {name: torch.zeros_like(t) for name, t in workload.make_inputs(0).items()}
            inputs["tokens"][:num] = tokens[read : read + num]
            inputs["query_starts"][1:] = num
            inputs["rows"][0] = 2 if read else -3
            workload.run(inputs, state)
            read += num
        states.append(state)
    for name, held in states[0].items():
        torch.testing.assert_close(held, states[1][name], rtol=1e-4, atol=1e-5)
        if name != "newest":
            assert bool((held[[0, 1, 3]] == 1).all())
