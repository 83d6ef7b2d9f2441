"""Steps of tokens: any mix of sequences over shared pages gives what transformers generates."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.coverage_models import MODELS, Model

from families import LANGUAGE
from paged_mixer import Mixer, generated
from sampling import examples, num_layers, some_of
from tessera.capture import Workload, build, record, record_step
from tessera.capture.models import another, recurrent
from tessera.capture.models.paged import FLAT, ROWS, SPLIT, layout_of, max_positions
from tessera.capture.models.pages import PageMask
from tessera.errors import CaptureError
from tessera.execute.reference import Replay
from tessera.ir import BufferKind, Step
from tessera.kernels import PAGE
from tessera.kernels.tensors import same_bits
from tessera.serve.records import ServeSpec
from tessera.serve.steps import served

BY_NAME = {model.name: model for model in MODELS}
SEQUENCES, TOKENS, POSITIONS = 4, 12, 512
NUM_NEW = examples(12, 5)
LAYOUTS = {
    "gpt2": FLAT,
    "opt": FLAT,
    "gpt_neox": FLAT,
    "gemma2": FLAT,
    "gemma3_text": FLAT,
    "qwen3_moe": FLAT,
    "gpt_oss": FLAT,
    "deepseek_v3": FLAT,
    "falcon": SPLIT,
    "bloom": SPLIT,
    "mpt": SPLIT,
    "mamba": FLAT,
    "mamba2": FLAT,
    "jamba": FLAT,
    "qwen3_next": FLAT,
    "recurrent_gemma": ROWS,
}


def step_of(place: str, layout: str = FLAT, sequences: int = SEQUENCES, **more: Any) -> Step:
    """A step of a built-in model or a folder."""
    tokens = {FLAT: TOKENS, SPLIT: 2 * sequences}.get(layout, sequences)
    random_weights = Path(place).is_dir()
    return Step(place, "tokens", sequences, tokens, reserve=POSITIONS, random_weights=random_weights, **more)


@cache
def built(name: str, layout: str = FLAT, sequences: int = SEQUENCES) -> Workload:
    """The step of a built-in model, made once."""
    return build(step_of(name, layout, sequences))


@cache
def seeing() -> Workload:
    """The step of a built-in model that sees."""
    return build(step_of("tiny-qwen2.5-vl", pictures=True))


def folder_step(model: Model, place: Path, layout: str) -> Workload:
    """The step of a small model of an architecture."""
    model.write(place)
    return build(step_of(str(place), layout))


def prompts_of(num: int, seed: int = 0) -> list[list[int]]:
    """Prompts of different lengths, within and across pages."""
    random = Random(seed)
    return [[random.randrange(3, 90) for _ in range(random.choice([1, 3, 7, 17, 30]))] for _ in range(num)]


def check_answers(workload: Workload, num: int = 7) -> None:
    """Prompts in random parts, mixed with answers of others, are answered as by generate."""
    prompts = prompts_of(examples(num, min(num, SEQUENCES + 1)))

    assert generated(workload, prompts, NUM_NEW) == Mixer(workload).answers(prompts, NUM_NEW)


# What is unlike in each layout: windows, sinks, experts, latent attention, biases, recurrences of every kind.
FEW = ("gpt2", "gemma3_text", "gpt_oss", "deepseek_v3", "falcon", "mpt", "mamba2", "jamba", "qwen3_next")


@pytest.mark.parametrize("name", some_of(LAYOUTS, FEW))
def test_answers_are_those_of_generate(name: str, tmp_path: Path) -> None:
    """Whatever layers a model has, and however it is called."""
    workload = folder_step(BY_NAME[name], tmp_path, LAYOUTS[name])

    assert LAYOUTS[name] == layout_of(workload.module).kind
    check_answers(workload)


BUILT_IN = (("tiny-llama", FLAT), ("tiny-gpt-oss", FLAT), ("tiny-mamba", FLAT))


@pytest.mark.parametrize(("name", "layout"), some_of(BUILT_IN, BUILT_IN[:1]))
def test_answers_of_built_in_models_are_those_of_generate(name: str, layout: str) -> None:
    """The names of the catalogue."""
    check_answers(built(name, layout), num=5)


@pytest.mark.parametrize(
    ("name", "windows", "num_tensors"),
    [("mistral", (6,), 2), ("gpt_oss", (0, 6), 1), ("llama", (), 2), ("gemma3_text", (0, 6, 6, 6), 1)],
)
def test_layers_of_a_window_have_a_page_table(
    name: str, windows: tuple[int, ...], num_tensors: int, tmp_path: Path
) -> None:
    """Layers of different tables share the tensors of their pages."""
    sizes = {**BY_NAME[name].sizes, **({"sliding_window": 6} if windows else {})}
    if name == "gemma3_text":
        kinds = ["full_attention" if n == 2 else "sliding_attention" for n in range(4)]
        sizes |= {"num_hidden_layers": 4, "layer_types": kinds}
    workload = folder_step(replace(BY_NAME[name], sizes=sizes), tmp_path, FLAT)
    keys = [name for name in workload.make_state(0) if name.startswith("keys.")]

    assert (windows, windows) == (layout_of(workload.module).windows, workload.step.windows)
    assert len(keys) == num_tensors
    check_answers(workload)


def test_latent_attention_keeps_latents(tmp_path: Path) -> None:
    """Pages hold the latent and the rotated key that all heads share, and nothing by head."""
    sizes = BY_NAME["deepseek_v3"].sizes
    state = folder_step(BY_NAME["deepseek_v3"], tmp_path, FLAT).make_state(0)

    assert (POSITIONS // PAGE, PAGE, 1, sizes["kv_lora_rank"]) == state["keys.0"].shape
    assert (POSITIONS // PAGE, PAGE, 1, sizes["qk_rope_head_dim"]) == state["values.0"].shape


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_plain_decode_steps_attend_to_latents_too(name: str, tmp_path: Path) -> None:
    """No buffer holds the keys and values of all heads and positions."""
    sizes, batch, positions = BY_NAME[name].sizes, 2, 128
    BY_NAME[name].write(tmp_path)
    trace = record(build(Step(str(tmp_path), "decode", batch, positions, random_weights=True)))
    expanded = 4 * batch * positions * sizes["num_attention_heads"] * sizes["v_head_dim"]
    made = [b.size_bytes for b in trace.buffers if b.kind is BufferKind.TEMPORARY]

    assert max(made) < expanded


def test_attention_of_a_models_own_with_windows_is_masked_right(tmp_path: Path) -> None:
    """Local layers of GPT-Neo count back from the last of their keys, which is the row's newest."""
    sizes = {**BY_NAME["gpt_neo"].sizes, "window_size": 6}
    workload = folder_step(Model("gpt_neo", "GPTNeoForCausalLM", sizes), tmp_path, SPLIT)

    check_answers(workload)


def test_many_layers_in_16_bits_are_packed_too(tmp_path: Path) -> None:
    """Rounding, which many layers amplify, is no other recurrence."""
    sizes = {**BY_NAME["mamba2"].sizes, "num_hidden_layers": 64, "hidden_size": 64, "num_heads": 16}
    workload = folder_step(
        Model("mamba2", "Mamba2ForCausalLM", {**sizes, "dtype": "bfloat16"}), tmp_path, FLAT
    )

    assert FLAT == layout_of(workload.module).kind
    assert {torch.bfloat16} == {t.dtype for t in workload.weights().values()}


def test_another_recurrence_in_16_bits_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong decay changes logits less than 16-bit rounding does: the check computes with 32 bits."""
    scan, parameters = recurrent.FUNCTIONS["mamba2_chunk_scan"]

    def faster(states: Any, call: Any) -> Any:
        call.A = 3 * call.A
        return scan(states, call)

    monkeypatch.setitem(recurrent.FUNCTIONS, "mamba2_chunk_scan", (faster, parameters))
    sizes = {**BY_NAME["mamba2"].sizes, "dtype": "bfloat16"}
    layout = layout_of(folder_step(Model("mamba2", "Mamba2ForCausalLM", sizes), tmp_path, ROWS).module)

    assert ROWS == layout.kind
    assert "differ from those of its plain forward" in layout.reason


def test_a_smaller_step_goes_on_with_the_same_state() -> None:
    """Steps of several sizes over one model and one state: the small one uses the first rows."""
    large = built("tiny-mamba")
    small = another(large, step_of("tiny-mamba", sequences=2, rows=SEQUENCES))
    shapes = [{n: t.shape for n, t in w.make_state(0).items()} for w in (large, small)]
    prompts = prompts_of(2)
    mixer = Mixer(small)

    assert shapes[0] == shapes[1]
    assert generated(small, prompts, NUM_NEW) == mixer.answers(prompts, NUM_NEW)
    assert all(not t[2:].any() for t in mixer.state.values())


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mamba"])
def test_what_is_not_used_disturbs_nothing(name: str) -> None:
    """Padding, unused sequences and the first page may hold anything: the others' logits keep their bits."""
    workload = built(name, sequences=8)
    inputs, state = workload.make_inputs(3), workload.make_state(3)
    used = int(inputs["query_starts"][-1])
    num = int((inputs["lengths"] > 0).sum())
    assert used < len(inputs["tokens"])
    assert num < len(inputs["lengths"])
    other = {n: t.clone() for n, t in inputs.items()}
    other["tokens"][used:] = 7
    other["positions"][used:] = 3
    changed = {n: t.clone() for n, t in state.items()}
    unused = 0
    if "rows" in inputs:
        rows = {int(r) if r >= 0 else -1 - int(r) for r in inputs["rows"][:num]}
        unused = next(r for r in range(8) if r not in rows)
    for held in changed.values():
        held[unused] = 5.0
    logits = [workload.run(i, s)["logits"][:num] for i, s in ((inputs, state), (other, changed))]

    assert torch.equal(*logits)


@cache
def of_sizes(sequences: int, tokens: int) -> Workload:
    """A step of the tiny Llama."""
    return build(Step("tiny-llama", "tokens", sequences, tokens, reserve=256))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("sequences", "tokens"), [(8, 8), (4, 64), (1, 5)])
def test_examples_are_legal(sequences: int, tokens: int, seed: int) -> None:
    """Pages of different sequences are disjoint, new tokens are a sequence's newest, page 0 is nobody's."""
    workload = of_sizes(sequences, tokens)
    for inputs in (workload.make_inputs(seed), workload.follow(workload.make_inputs(seed), 1, {})):
        given = {name: tensor.tolist() for name, tensor in inputs.items()}
        owned: list[int] = []
        for s, length in enumerate(given["lengths"]):
            first, after = given["query_starts"][s : s + 2]
            assert 0 <= after - first <= length
            assert length == 0 or after > first
            start = given["page_starts"][s]
            pages = given["pages"][start : start + -(-length // PAGE)]
            owned += pages
            for place, position in zip(
                range(first, after), range(length - after + first, length), strict=True
            ):
                assert position == given["positions"][place]
                assert pages[position // PAGE] * PAGE + position % PAGE == given["slots"][place]
        assert len(set(owned)) == len(owned) >= 1
        assert 0 not in owned
        assert max(owned) < 256 // PAGE
        assert not any(given["slots"][given["query_starts"][-1] :])


@pytest.mark.parametrize("name", some_of(LANGUAGE, ("tiny-gpt-oss", "tiny-mamba")))
def test_a_trace_replays_to_the_same_bits(name: str) -> None:
    """Attention is one launch a layer, and the state is what the step keeps."""
    workload = built(name)
    trace = record(workload)
    inputs, state = workload.make_inputs(2), workload.make_state(2)
    again = {n: t.clone() for n, t in state.items()}
    outputs = workload.run(inputs, again)
    replayed = Replay(trace, workload.weights(), inputs, state).run_in_program_order()
    attention = [
        trace.kernel_of(i).name == "tessera.paged_attention.default" for i in range(len(trace.launches))
    ]

    assert (0 if name == "tiny-mamba" else num_layers()) == sum(attention)
    assert set(state) == {trace.buffers[b].name for b in trace.buffers_of(BufferKind.STATE)}
    assert all(same_bits(t, replayed.outputs[n]) for n, t in outputs.items())
    assert all(same_bits(t, replayed.state[n]) for n, t in again.items())


def test_a_step_can_be_recorded_without_a_gpu_and_weights() -> None:
    """The same launches on fake tensors as on real ones."""
    step = step_of("tiny-llama")
    fake, real = record_step(step, "fake"), record_step(step)
    names = [[t.kernel_of(i).name for i in range(len(t.launches))] for t in (fake, real)]

    assert [num_layers()] * 2 == [each.count("tessera.paged_attention.default") for each in names]


def test_a_picture_stands_in_the_place_of_its_tokens() -> None:
    """Where `is_image` says so, the embedding is the picture's and the token does not matter."""
    workload = seeing()
    inputs = workload.make_inputs(0)
    inputs["is_image"][0] = True
    other = {n: t.clone() for n, t in inputs.items()}
    other["tokens"][0] += 1
    plain = {n: t.clone() for n, t in inputs.items()}
    plain["image"] = plain["image"] + 1.0
    first, same, changed = (workload.run(i, workload.make_state(0))["logits"] for i in (inputs, other, plain))

    assert torch.equal(first, same)
    assert not torch.equal(first, changed)


def test_tokens_that_are_not_used_are_no_pictures() -> None:
    """They share a slot of the first page: what they write must not depend on which of them is last."""
    workload = seeing()
    for inputs in map(workload.make_inputs, range(10)):
        assert not inputs["is_image"][inputs["query_starts"][-1] :].any()


def test_text_is_answered_as_by_generate_by_a_model_that_sees() -> None:
    """Without pictures, positions in time, height and width are those of the text."""
    check_answers(seeing(), num=3)


@pytest.mark.parametrize(("sequences", "tokens", "positions"), [(4, 3, 256), (4, 8, 250), (4, 8, PAGE)])
def test_sizes_that_make_no_step_are_refused(sequences: int, tokens: int, positions: int) -> None:
    """Fewer tokens than sequences, pages that are not full, or no page beside the first."""
    with pytest.raises(CaptureError, match="Use"):
        build(Step("tiny-llama", "tokens", sequences, tokens, reserve=positions))


def test_a_model_with_a_recurrence_of_its_own_reads_one_token_of_each_sequence(tmp_path: Path) -> None:
    """More tokens than sequences are refused in one line."""
    with pytest.raises(CaptureError, match="reads one token of each sequence a step"):
        folder_step(BY_NAME["recurrent_gemma"], tmp_path, FLAT)


def test_a_service_says_why_it_reads_one_token_of_each_sequence(tmp_path: Path) -> None:
    """Before steps are captured; a packed model says nothing."""
    BY_NAME["recurrent_gemma"].write(tmp_path)
    reason = served(str(tmp_path), ServeSpec(rows=2, capacity=16, random_weights=True)).reason

    assert "its layers keep a state of their own" == reason
    assert not served("tiny-mamba", ServeSpec(rows=2, capacity=16)).reason


@pytest.mark.parametrize("name", ["rwkv", "t5", "bert"])
def test_a_model_that_cannot_be_served_is_refused(name: str, tmp_path: Path) -> None:
    """A memory of its own, an encoder-decoder, an encoder."""
    BY_NAME[name].write(tmp_path)
    with pytest.raises(CaptureError, match="not served by steps"):
        build(step_of(str(tmp_path)))


def test_prompts_that_attend_in_both_directions_are_refused(tmp_path: Path) -> None:
    """Steps read a prompt from its beginning."""
    sizes = {**BY_NAME["gemma3_text"].sizes, "use_bidirectional_attention": True}
    with pytest.raises(CaptureError, match="attend in both directions"):
        folder_step(Model("gemma3_text", "Gemma3ForCausalLM", sizes), tmp_path, FLAT)


def test_a_model_whose_attention_reads_other_values_than_it_keeps_is_split(tmp_path: Path) -> None:
    """DiffLlama attends twice to the same keys, with halves of its values."""
    sizes = {**BY_NAME["llama"].sizes, "head_dim": 8}
    workload = folder_step(Model("diffllama", "DiffLlamaForCausalLM", sizes), tmp_path, SPLIT)

    assert SPLIT == layout_of(workload.module).kind
    check_answers(workload)


def test_biases_of_positions_are_not_rounded_otherwise(tmp_path: Path) -> None:
    """Falcon's have 8 bits: counted from the end of a long row, those of neighbours would be the same."""
    sizes = {**BY_NAME["falcon"].sizes, "alibi": True, "max_position_embeddings": 2048}
    Model("falcon", "FalconForCausalLM", sizes).write(tmp_path)
    workload = build(replace(step_of(str(tmp_path), sequences=1), reserve=16 * POSITIONS, rows=TOKENS // 2))
    given = {name: torch.zeros_like(t) for name, t in workload.make_inputs(0).items()}
    tokens = torch.arange(3, 3 + TOKENS)
    given |= {"tokens": tokens, "positions": torch.arange(TOKENS), "slots": PAGE + torch.arange(TOKENS)}
    given["pages"][0], given["query_starts"][1], given["lengths"][0] = 1, TOKENS, TOKENS
    plain = workload.module(input_ids=tokens[None], use_cache=False).logits[0, -1]

    torch.testing.assert_close(workload.run(given, workload.make_state(0))["logits"][0], plain)


def test_checks_of_a_distribution_are_no_reads(tmp_path: Path) -> None:
    """Gemma 3n drops activations below a quantile of a normal distribution, whose arguments torch checks."""
    sizes = {
        **BY_NAME["gemma3_text"].sizes,
        "activation_sparsity_pattern": [0.9, 0.0],
        "num_kv_shared_layers": 0,
    }
    kinds = ["sliding_attention", "full_attention"]
    sizes |= {"layer_types": kinds, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
    check_answers(folder_step(Model("gemma3n_text", "Gemma3nForCausalLM", sizes), tmp_path, FLAT))


EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
OWN_WAYS = {
    "dbrx": (FLAT, {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": 96,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 5, "moe_top_k": 2},
    }),
    "longcat_flash": (FLAT, {
        **BY_NAME["deepseek_v3"].sizes, "num_layers": 1, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16,
        "moe_topk": 2, "zero_expert_num": 3, "n_routed_experts": 5, "head_dim": 8,
    }),
    "jetmoe": (FLAT, {**BY_NAME["llama"].sizes, **EXPERTS, "kv_channels": 8, "num_attention_heads": 4}),
    "minimax": (ROWS, {**BY_NAME["llama"].sizes, **EXPERTS, "head_dim": 8, "block_size": 8}),
    "doge": (SPLIT, {**BY_NAME["llama"].sizes, "keep_window_size": 64}),
    "bart": (FLAT, {**BY_NAME["bart"].sizes, "forced_eos_token_id": None}),
}  # fmt: skip


@pytest.mark.parametrize("family", OWN_WAYS)
def test_models_with_ways_of_their_own_are_answered_as_by_generate(family: str, tmp_path: Path) -> None:
    """Experts in loops over values, a cache of its own class, masks per head, positions that are counted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    layout, sizes = OWN_WAYS[family]
    model = Model(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], sizes)
    workload = folder_step(model, tmp_path, layout)

    assert layout == layout_of(workload.module).kind
    check_answers(workload)


def test_a_refusal_names_the_cause_and_no_error_of_a_library(tmp_path: Path) -> None:
    sizes = {"embedding_dim": 64, "hidden_size": 64, "num_blocks": 1, "num_heads": 4, "qk_dim_factor": 1.0}
    Model("xlstm", "xLSTMForCausalLM", {**sizes, "vocab_size": 64}).write(tmp_path)
    reason = "it takes no cache but its own; its cache keeps more than a row for each sequence"

    with pytest.raises(CaptureError, match=f"no way to call it works: {reason}. Serve another"):
        build(step_of(str(tmp_path)))


def test_layers_that_no_page_holds_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    """The folder has none."""
    sizes = {**BY_NAME["deepseek_v3"].sizes, "layer_types": ["heavily_compressed_attention"] * 2}
    Model("deepseek_v4", "DeepseekV4ForCausalLM", sizes).write(tmp_path)

    with pytest.raises(CaptureError, match="its cache has layers of its own kind, heavily_compressed_attent"):
        build(replace(step_of(str(tmp_path)), random_weights=False))


def test_positions_that_do_not_begin_at_zero_are_refused(tmp_path: Path) -> None:
    """RoBERTa counts from the number of its padding token: its answers would be others."""
    sizes = {**BY_NAME["roberta"].sizes, "is_decoder": True}
    with pytest.raises(CaptureError, match="its logits differ from those of its plain forward"):
        folder_step(Model("roberta", "RobertaForCausalLM", sizes), tmp_path, FLAT)


LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 64, "factor": 2.0,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "kind", "rotary", "most"),
    [("phi3", "Phi3", LONG, 64), ("minicpm3", "MiniCPM3", LONG, 64), ("llama", "Llama", DYNAMIC, 128)],
)
def test_frequencies_do_not_follow_the_longest_sequence_of_a_step(
    family: str, kind: str, rotary: dict[str, Any], most: int, tmp_path: Path
) -> None:
    """They are those of sequences up to a length, and no longer ones are served."""
    like = BY_NAME["deepseek_v3" if family == "minicpm3" else "llama"]
    sizes = {**like.sizes, "rope_parameters": rotary, "original_max_position_embeddings": most}
    workload = folder_step(Model(family, f"{kind}ForCausalLM", sizes), tmp_path, FLAT)

    assert (FLAT, most) == (layout_of(workload.module).kind, max_positions(workload.module))
    check_answers(workload)


LLAMA4 = {
    "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 64, "attn_scale": 500.0,
    "attention_chunk_size": 16,
}  # fmt: skip


def test_layers_that_count_their_tokens_have_positions(tmp_path: Path) -> None:
    """Llama 4 scales queries by the number of tokens before them."""
    sizes = {**BY_NAME["llama"].sizes, **LLAMA4, "no_rope_layers": [0, 0], "floor_scale": 8}
    workload = folder_step(Model("llama4_text", "Llama4ForCausalLM", sizes), tmp_path, FLAT)

    assert FLAT == layout_of(workload.module).kind
    check_answers(workload)


def test_layers_that_count_their_tokens_are_refused_by_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a number of tokens they would get the right answers."""
    sizes = {**BY_NAME["llama"].sizes, **LLAMA4, "no_rope_layers": [1, 0], "floor_scale": 8192}
    Model("llama4_text", "Llama4ForCausalLM", sizes).write(tmp_path)
    monkeypatch.setattr("tessera.capture.models.pages.chunk_of", lambda config: 0)
    with pytest.raises(CaptureError, match=r"masks hide more.*; its layers count the tokens before a row"):
        build(step_of(str(tmp_path)))


LATENT = BY_NAME["deepseek_v3"].sizes
INDEXED = {**LATENT, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16}


@pytest.mark.parametrize(
    ("family", "kind", "sizes"),
    [
        ("llama4_text", "Llama4", {**LLAMA4, "no_rope_layers": [1, 0], "attention_chunk_size": 64}),
        ("deepseek_v32", "DeepseekV32", INDEXED),
        ("glm_moe_dsa", "GlmMoeDsa", INDEXED),
    ],
)
def test_chunks_and_selected_keys_are_served_up_to_the_length_at_which_attention_is_full(
    family: str, kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """A sequence is one chunk at most, or no longer than the number of keys that an indexer selects."""
    given = {**BY_NAME["llama"].sizes, **sizes}
    workload = folder_step(Model(family, f"{kind}ForCausalLM", given), tmp_path, FLAT)

    assert (FLAT, 64) == (layout_of(workload.module).kind, max_positions(workload.module))
    check_answers(workload)


def test_a_rule_that_is_no_window_is_refused() -> None:
    """Chunks hide tokens that a window would show; without a limit of positions they are refused."""

    def chunked(_: Any, __: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q // 8 == k // 8)

    def told(size: int) -> SimpleNamespace:
        return SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=size)

    for config in (None, told(16)):
        with pytest.raises(ValueError, match="hide more"):
            _ = PageMask(mask_function=chunked, local_size=8, config=config).window
    assert not PageMask(mask_function=chunked, local_size=8, config=told(8)).window


@pytest.mark.parametrize("name", ["gpt2", "mamba2"])
def test_a_token_below_zero_is_one_that_the_step_before_chose(name: str, tmp_path: Path) -> None:
    """The same bits as with the token itself, and the next step finds what this one chose."""
    workload = folder_step(BY_NAME[name], tmp_path, LAYOUTS[name])
    inputs = next(found for n in range(9) if ((found := workload.make_inputs(n))["tokens"] < 0).any())
    state = workload.make_state(0)
    known, tokens = {name: tensor.clone() for name, tensor in state.items()}, inputs["tokens"]
    meant = torch.where(tokens < 0, state["newest"][(-1 - tokens).clamp_min(0)], tokens)
    found = workload.run(inputs, state)
    plain = workload.run({**inputs, "tokens": meant}, known)

    assert torch.equal(plain["logits"], found["logits"])
    assert all(torch.equal(known[name], tensor) for name, tensor in state.items())
    assert torch.equal(found["next_tokens"], state["newest"][: len(found["next_tokens"])])


@pytest.mark.parametrize("tokens", [SEQUENCES + 1, 2 * SEQUENCES])
def test_a_step_barely_larger_than_its_sequences_has_example_inputs(tokens: int) -> None:
    """Every sequence of the example has a token, however few more tokens there are."""
    workload = build(replace(step_of("tiny-llama"), context=tokens))

    for seed in range(20):
        assert workload.make_inputs(seed)["tokens"].numel()
