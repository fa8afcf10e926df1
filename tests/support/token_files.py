"""A small Hugging Face `tokenizer.json`."""

from __future__ import annotations

from pathlib import Path

import pytest


def write_tokenizer(path: Path, template: str, **padding) -> str:
    """A byte-level tokenizer with the special tokens <s>, </s> and <pad>."""
    library = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<pad>"]
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel()
    made.train_from_iterator(["a small cat", "a small dog"], trainer)
    if template:
        numbered = list(zip(special, range(3), strict=True))
        made.post_processor = library.processors.TemplateProcessing(single=template, special_tokens=numbered)
    if padding:
        made.enable_padding(**padding)
    made.enable_truncation(3)
    made.save(str(path))
    return str(path)
