"""The tokenizer of a text tower as transformers' files, checked against the run's ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_vit.data.text import ClipTokenizer, FileTokenizer, Tokenizer, build_tokenizer
from ds_vit.models.text_tower import TextSettings

_SAMPLES = ("", "a photo of a cat", "Wow! 3 dogs  (naïve Ünï) ...", "latin small letter a with acute, " * 40)
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def write_tokenizer(name: str, settings: TextSettings, folder: Path) -> str:
    """Write tokenizer.json and tokenizer_config.json, which `AutoTokenizer.from_pretrained` loads.

    Args:
        name: --tokenizer of the run.
        settings: of the text tower.
        folder: of the export.

    Returns:
        Why there is no tokenizer in the folder, a line for people; "" if there is one.
    """
    reason = _write(build_tokenizer(name, settings.context_length), name, settings, folder)
    if reason:
        for file in _FILES:
            (folder / file).unlink(missing_ok=True)
        return f"the folder has no tokenizer: {reason}"
    return ""


def _write(tokenizer: Tokenizer, name: str, settings: TextSettings, folder: Path) -> str:
    if isinstance(tokenizer, ClipTokenizer):
        if not _ignores_padding(settings):
            return "this text tower sees the padding of --tokenizer clip, id 0, which transformers reads as '!'"
        from transformers import CLIPTokenizer

        own = CLIPTokenizer(*tokenizer.vocabulary(), model_max_length=settings.context_length)
        own.save_pretrained(str(folder))
    elif isinstance(tokenizer, FileTokenizer):
        tokenizer.save(str(folder / "tokenizer.json"))
        special = {"bos": tokenizer.start_id, "eos": tokenizer.end_id, "pad": tokenizer.pad_id}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": settings.context_length,
            **{f"{key}_token": tokenizer.token_of(id_) for key, id_ in special.items() if id_ is not None},
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    else:
        return f"transformers has no counterpart of --tokenizer {name}, whose ids this text tower takes"
    return _difference(tokenizer, settings, folder)


def _ignores_padding(settings: TextSettings) -> bool:
    """Whether what follows the end token of a caption changes nothing."""
    return settings.causal and settings.pool == "end"


def _difference(tokenizer: Tokenizer, settings: TextSettings, folder: Path) -> str:
    """What differs between the ids of the folder's tokenizer and the run's; "" if nothing does."""
    from transformers import AutoTokenizer

    written = AutoTokenizer.from_pretrained(str(folder))

    def seen(ids: NDArray[np.int64]) -> list[int]:
        end = int((ids == settings.end_id).argmax()) + 1 if _ignores_padding(settings) else len(ids)
        return [int(one) for one in ids[:end]]

    for text in _SAMPLES:
        theirs = np.array(written(text, padding="max_length", truncation=True)["input_ids"])
        ids = seen(tokenizer.encode(text))
        if seen(theirs) != ids:
            return f"transformers reads {text[:40]!r} as {seen(theirs)[:8]}, and the run as {ids[:8]}"
    return ""
