"""A checkpoint folder of quantised random weights, of the size of a published one.

    python benchmarks/packed_folder.py gpt-oss-20b mxfp4 FOLDER
    python benchmarks/packed_folder.py qwen3-8b fp8 FOLDER
    python benchmarks/packed_folder.py llama-3-8b gptq FOLDER
    python benchmarks/packed_folder.py qwen3-8b plain FOLDER      config.json alone, for --random-weights
    python benchmarks/packed_folder.py llama-3-8b gptq FOLDER --layers 8

Layers share their values: only sizes and layouts matter. Experts (mxfp4) or linear layers but the last one
are quantised, as published.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GROUP, BLOCK, MX = 128, 128, 32
SHARD_BYTES = 4 << 30
QWEN3_8B = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
}  # fmt: skip
Parts = dict[str, torch.Tensor]


def gptq(outputs: int, inputs: int) -> Parts:
    words = (inputs // GROUP, outputs // 8)
    return {
        ".qweight": torch.randint(-(1 << 31), 1 << 31, (inputs // 8, outputs)).int(),
        ".qzeros": torch.full(words, 0x77777777, dtype=torch.int32),
        ".scales": torch.full((inputs // GROUP, outputs), 0.2 / inputs**0.5, dtype=torch.float16),
        ".g_idx": (torch.arange(inputs) // GROUP).int(),
    }


def fp8(outputs: int, inputs: int) -> Parts:
    codes = torch.randint(0, 120, (outputs, inputs), dtype=torch.uint8).view(torch.float8_e4m3fn)
    blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
    return {".weight": codes, ".weight_scale_inv": torch.full(blocks, 1e-3)}


def mxfp4(experts: int, inputs: int, outputs: int) -> Parts:
    blocks = (experts, outputs, inputs // MX)
    return {
        "_blocks": torch.randint(0, 256, (*blocks, MX // 2), dtype=torch.uint8),
        "_scales": torch.full(blocks, 120, dtype=torch.uint8),
    }


METHODS: dict[str, tuple[dict[str, Any], Callable[..., Parts], tuple[str, ...]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq, ("proj.weight",)),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, fp8, ("proj.weight",)),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4, ("gate_up_proj", "down_proj")),
    "plain": ({}, gptq, ()),
}


def configuration(model: str, layers: int) -> Any:
    import transformers

    from tessera.capture.models.catalog import LANGUAGE

    family, sizes = ("qwen3", QWEN3_8B) if model == "qwen3-8b" else LANGUAGE[model][:2]
    sizes = {**sizes, **({"num_hidden_layers": layers} if layers else {})}
    return transformers.AutoConfig.for_model(family, **sizes, dtype="bfloat16", tie_word_embeddings=False)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """One token per byte; other tokens have a word each, so that every answer has text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*letters, *(f"w{number}" for number in range(len(letters), vocab_size))]
    pieces = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=pieces).save_pretrained(folder)


def write(model: str, method: str, folder: Path, layers: int) -> None:
    import transformers

    settings, make, suffixes = METHODS[method]
    config = configuration(model, layers)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(built).__name__]
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, config.vocab_size)
    document = json.loads(config.to_json_string(use_diff=False))
    if not suffixes:
        (folder / "config.json").write_text(json.dumps(document))
        return
    (folder / "config.json").write_text(json.dumps(document | {"quantization_config": settings}))
    values: dict[Any, Parts] = {}
    shards: list[Parts] = [{}]
    for name, tensor in built.state_dict().items():
        shape = tuple(tensor.shape)
        if name.endswith(suffixes):
            if shape not in values:
                values[shape] = make(*shape)
            base, parts = name.removesuffix(".weight"), values[shape]
        else:
            if (shape, "plain") not in values:
                values[shape, "plain"] = {"": torch.randn(shape).mul_(0.02).bfloat16()}
            base, parts = name, values[shape, "plain"]
        if sum(t.nbytes for t in shards[-1].values()) > SHARD_BYTES:
            shards.append({})
        shards[-1] |= {base + key: part.clone() for key, part in parts.items()}
    places: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    parser = argparse.ArgumentParser(description="A checkpoint folder of quantised random weights.")
    parser.add_argument("model", help="a built-in model, or qwen3-8b")
    parser.add_argument("method", choices=list(METHODS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=0, help="0: all of them")
    args = parser.parse_args()
    write(args.model, args.method, args.folder, args.layers)


if __name__ == "__main__":
    main()
