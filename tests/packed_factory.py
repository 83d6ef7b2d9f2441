"""Small checkpoints of quantised weights in their published layouts, and their dequantised models.

Each method quantises every linear layer of a random model (experts for MXFP4), writes the packed tensors as
the quantiser's tools do, and puts the numbers that they stand for into the model itself.
"""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GROUP, BLOCK, VOCAB = 32, 32, 258
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = dict[str, torch.Tensor]


def _words(columns: list[torch.Tensor], bits: int) -> torch.Tensor:
    """Codes side by side in 32-bit words, the first lowest."""
    word = torch.zeros_like(columns[0], dtype=torch.int64)
    for place, column in enumerate(columns):
        word |= column.long() << (bits * place)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def _grouped(weight: torch.Tensor, bits: int, groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes, scales [N, G], zeros [N, G] and the numbers; `groups`: the group of each column."""
    num = int(groups.max()) + 1
    low = torch.stack([weight[:, groups == g].amin(1) for g in range(num)], 1).clamp_max(0)
    high = torch.stack([weight[:, groups == g].amax(1) for g in range(num)], 1).clamp_min(0)
    most = (1 << bits) - 1
    scales = ((high - low) / most).half()
    zeros = (-low / scales.float()).round().clamp(0, most).long()
    wide, zero = scales.float()[:, groups], zeros[:, groups]
    codes = (weight / wide + zero).round().clamp(0, most).long()
    return codes, scales, zeros, (codes - zero).float() * wide


def gptq(
    weight: torch.Tensor, bits: int = 4, ordered: bool = False, group: int = GROUP
) -> tuple[Parts, torch.Tensor]:
    """As AutoGPTQ: eight codes of one output in a word, zeros less one; the last group may be smaller."""
    columns = weight.shape[1]
    groups = torch.arange(columns) // group
    if ordered:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    codes, scales, zeros, numbers = _grouped(weight, bits, groups)
    each, most = 32 // bits, (1 << bits) - 1
    stored, by_input = (zeros.t() - 1) & most, codes.t()
    parts = {
        ".qweight": _words([by_input[i::each] for i in range(each)], bits),
        ".qzeros": _words([stored[:, i::each] for i in range(each)], bits),
        ".scales": scales.t().contiguous(),
        ".g_idx": groups.int(),
    }
    return parts, numbers


def awq(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """As AutoAWQ's GEMM version: eight outputs in a word, interleaved."""
    codes, scales, zeros, numbers = _grouped(weight, 4, torch.arange(weight.shape[1]) // GROUP)
    parts = {
        ".qweight": _words([codes.t()[:, i::8] for i in AWQ_COLUMNS], 4),
        ".qzeros": _words([zeros.t()[:, i::8] for i in AWQ_COLUMNS], 4),
        ".scales": scales.t().contiguous(),
    }
    return parts, numbers


def pack_quantized(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """As compressed-tensors: eight inputs in a word, zeros packed along outputs."""
    codes, scales, zeros, numbers = _grouped(weight, 4, torch.arange(weight.shape[1]) // GROUP)
    padded, rows = (torch.nn.functional.pad(t, (0, -t.shape[1] % 8, 0, 0)) for t in (codes, zeros.t()))
    parts = {
        ".weight_packed": _words([padded[:, i::8] for i in range(8)], 4),
        ".weight_scale": scales,
        ".weight_zero_point": _words([rows.t()[i::8] for i in range(8)], 4),
        ".weight_shape": torch.tensor(weight.shape),
    }
    return parts, numbers


def fp8_blocks(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """As DeepSeek V3 and Qwen3: a scale per square block, larger than 1 / scale is stored."""
    rows, columns = (-(-n // BLOCK) for n in weight.shape)
    scales = torch.zeros(rows, columns)
    numbers, codes = torch.zeros_like(weight), torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            place = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[place] = codes[place].float() * scales[i, j]
    return {".weight": codes, ".weight_scale_inv": scales}, numbers


def fp8_rows(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """As compressed-tensors: a scale per output."""
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight / scales.float()).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales.float()


def fp8_tensor(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """As ModelOpt: one scale, and one of the inputs that is not used."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scale, ".input_scale": scale * 2}, codes.float() * scale


def int8_rows(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """As compressed-tensors: a scale per output."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().to(torch.int8)
    return {".weight": codes, ".weight_scale": scales}, codes.float() * scales


def mxfp4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """As gpt-oss: experts [E, inputs, outputs] in blocks of 32 inputs, two codes in a byte."""
    by_row = weight.transpose(1, 2)
    blocks = by_row.unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    codes = (blocks / 2.0 ** exponents[..., None]).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    numbers = (E2M1[codes] * 2.0 ** exponents[..., None]).flatten(-2).transpose(1, 2)
    parts = {
        "_blocks": (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8),
        "_scales": (exponents + 127).to(torch.uint8),
    }
    return parts, numbers.contiguous()


def _compressed(kind: str, bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "group_size": GROUP if kind == "pack-quantized" else None}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


def _wide(weight: torch.Tensor) -> bool:
    """True for a layer that a test quantises in another way than others."""
    return weight.shape[1] > 64


_MIXED = _compressed("mixed-precision", 4) | {
    "config_groups": {
        "group_0": {"format": "pack-quantized", "weights": {"num_bits": 4, "group_size": GROUP}},
        "group_1": {"format": "float-quantized", "weights": {"num_bits": 8}},
    }
}

METHODS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], tuple[Parts, torch.Tensor]]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq),
    "gptq-ordered": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, lambda w: gptq(w, ordered=True)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, lambda w: gptq(w, 8)),
    "gptq-64": ({"quant_method": "gptq", "bits": 4, "group_size": 64}, lambda w: gptq(w, group=64)),
    "gptq-64-ordered": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
        lambda w: gptq(w, ordered=True, group=64),
    ),
    "gptq-mixed": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "dynamic": {"+:.*down_proj": {"bits": 8}}},
        lambda w: gptq(w, 8 if _wide(w) else 4),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "int4": (_compressed("pack-quantized", 4), pack_quantized),
    "int4-fp8": (_MIXED, lambda w: fp8_rows(w) if _wide(w) else pack_quantized(w)),
    "int8": (_compressed("int-quantized", 8), int8_rows),
    "fp8-rows": (_compressed("float-quantized", 8), fp8_rows),
    "fp8-tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, fp8_blocks),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4),
}

SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}


def write_folder(
    folder: Path, method: str, family: str = "llama", intermediate: int = 96, layers: int = 2
) -> Any:
    """Writes a random checkpoint of a family; returns its dequantised model."""
    import transformers

    settings, quantise = METHODS[method]
    config = transformers.AutoConfig.for_model(
        family, hidden_size=64, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=128,
        tie_word_embeddings=False, **SIZES[family],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (parameter.shape[-1] ** -0.5))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)  # in the published names
    tensors = _saved(folder)
    published, dequantised = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        is_expert = method == "mxfp4" and name.endswith(("gate_up_proj", "down_proj"))
        is_layer = method != "mxfp4" and name.endswith(("proj.weight", "dense_h_to_4h.weight"))
        dequantised[name] = tensor
        if is_expert or is_layer:
            parts, dequantised[name] = quantise(tensor)
            base = name if is_expert else name.removesuffix(".weight")
            published |= {base + key: part.contiguous() for key, part in parts.items()}
        else:
            published[name] = tensor
    save_file(dequantised, folder / "model.safetensors", {"format": "pt"})
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    save_file(published, folder / "model.safetensors", {"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"quantization_config": settings}))
    return reference


def write_words(folder: Path) -> None:
    """A tokenizer whose text shows the tokens: "t7 t30"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def generated(model: Any, prompt: list[int], num: int) -> list[int]:
    """Greedy tokens of Hugging Face's generate."""
    given = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=num, **options)
    return [int(token) for token in out[0, len(prompt) :]]


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def serve_words(folder: Path, *words: str, devices: str = "emu:a100,emu:l40s") -> list[str]:
    """The command of a service."""
    sizes = ["--devices", devices, "--port", "0", "--seqs", "4", "--effort", "quick", "--json"]
    return ["serve", str(folder), *sizes, *words]


@contextmanager
def serving(folder: Path, *words: str, devices: str = "emu:a100,emu:l40s") -> Iterator[str]:
    """Address of a service."""
    command = [sys.executable, "-m", "tessera", *serve_words(folder, *words, devices=devices)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def post(url: str, **body: Any) -> Any:
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, kind), timeout=120) as answer:
        return json.load(answer)


def answer(url: str, model: str, prompt: list[int], num: int = 24) -> list[str]:
    document = post(f"{url}/v1/completions", model=model, prompt=prompt, max_tokens=num, temperature=0)
    assert model == document["model"]
    return str(document["choices"][0]["text"]).split()


def words(model: Any, prompt: list[int], num: int = 24) -> list[str]:
    return [f"t{token}" for token in generated(model, prompt, num)]
