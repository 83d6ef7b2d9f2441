"""Folders with a small tokenizer, as checkpoints have one."""

import json
from pathlib import Path

WORDS = "Sphinx of black quartz, judge my vow: 漢字 and naïve façade; 🙂🙃 <|user|> <|end|>\n"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "<|user|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)


def make_text_folder(path: Path, template: str = TEMPLATE, vocab_size: int = 320) -> None:
    """A checkpoint's tokenizer: byte-level pairs over a few words, with special tokens and a template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|user|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator([WORDS] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>"],
        chat_template=template,
    )
    fast.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
