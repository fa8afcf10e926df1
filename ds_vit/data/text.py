"""Text to token ids: `--tokenizer`."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError, did_you_mean, first_line, read_object, require_package

_BYTES_CONTEXT_LENGTH = 256
_MOST_COUNTED = 5_000
_PADDING = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")


class Tokenizer(ABC):
    """Turns a caption into a fixed number of token ids.

    Args:
        context_length: ids of a caption, the start and end tokens included; at least 2.

    Attributes:
        name: the same for the same ids of each text; part of a run's identity.
        vocab_size: ids are below it.
        start_id, end_id: the first token and the last; `start_id` is None where the vocabulary has none.
        pad_id: follows the end token.
    """

    name: str
    vocab_size: int
    start_id: int | None
    end_id: int
    pad_id: int

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length

    @abstractmethod
    def tokens(self, text: str) -> Sequence[int]:
        """The ids of a text of any length, without the start and end tokens."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids int64 [context_length]: start, tokens, end, padding; of a text too long, its last tokens drop."""
        start = [] if self.start_id is None else [self.start_id]
        kept = self.tokens(text)[: self.context_length - len(start) - 1]
        ids = np.full(self.context_length, self.pad_id, dtype=np.int64)
        ids[: len(start) + len(kept) + 1] = [*start, *kept, self.end_id]
        return ids

    def is_cut(self, text: str) -> bool:
        """Whether `encode` drops tokens of a text."""
        return len(self.tokens(text)) + (self.start_id is not None) + 1 > self.context_length


class ByteTokenizer(Tokenizer):
    """A token a byte of UTF-8. The end token has the highest id, as CLIP's."""

    name = "bytes"
    vocab_size = 259
    pad_id, start_id, end_id = 256, 257, 258

    def tokens(self, text: str) -> bytes:
        """As `Tokenizer.tokens`."""
        return text.encode()


class ClipTokenizer(Tokenizer):
    """CLIP's byte-pair encoding of cleaned lower-case text (Radford et al. 2021), as open_clip has it; padded with 0.

    Raises:
        UserError: open_clip is not installed.
    """

    name = "clip"
    pad_id = 0

    def __init__(self, context_length: int) -> None:
        super().__init__(context_length)
        with require_package("open_clip_torch", "--tokenizer clip", ", or pass --tokenizer bytes"):
            from open_clip.tokenizer import SimpleTokenizer
        self._bpe = SimpleTokenizer()
        self.vocab_size = self._bpe.vocab_size
        self.start_id, self.end_id = self._bpe.sot_token_id, self._bpe.eot_token_id

    def vocabulary(self) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """Token → id, with OpenAI's names of the start and end tokens, and the merges in their order."""
        named = {self.start_id: "<|startoftext|>", self.end_id: "<|endoftext|>"}
        return {named.get(id_, token): id_ for token, id_ in self._bpe.encoder.items()}, [*self._bpe.bpe_ranks]

    def tokens(self, text: str) -> list[int]:
        """As `Tokenizer.tokens`."""
        return self._bpe.encode(text)


class FileTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`. The file's post-processor names the start and end tokens.

    The padding token is that of the tokenizer_config.json or special_tokens_map.json in its folder, as in transformers,
    else the one that the file pads with, else one of the usual names, else the end token.

    Raises:
        UserError: tokenizers is not installed, no such file, or one that does not end a text with one token.
    """

    def __init__(self, path: str, context_length: int) -> None:
        super().__init__(context_length)
        with require_package("tokenizers", f"--tokenizer {path}"):
            from tokenizers import Tokenizer as Library
        try:
            content = Path(path).read_bytes()
            self._library = Library.from_str(content.decode())
        except Exception as error:  # the library raises plain ones
            raise UserError(f"--tokenizer {path} cannot be read as a tokenizer.json ({first_line(error)})") from None
        self.name = f"tokenizer.json {hashlib.blake2b(content, digest_size=8).hexdigest()}"
        padding = self._library.padding
        self._library.no_padding()
        self._library.no_truncation()
        vocabulary = self._library.get_vocab()
        self.vocab_size = 1 + max(vocabulary.values())
        own, whole = self.tokens("a"), self._library.encode("a").ids
        starts = next((n for n in range(2) if whole[n:-1] == own), None)
        if not own or starts is None:
            form = f'"a" is {whole}, and {own} without special tokens'
            raise UserError(f"--tokenizer {path} must add one end token and at most one start token to a text; {form}")
        self.start_id, self.end_id = whole[0] if starts else None, whole[-1]
        usual = next((vocabulary[name] for name in _PADDING if name in vocabulary), self.end_id)
        of_file = padding["pad_id"] if padding else usual
        self.pad_id = vocabulary.get(_padding_beside(Path(path)), of_file)
        if self.pad_id != of_file:
            self.name += f" padded with {self.pad_id}"

    def tokens(self, text: str) -> list[int]:
        """As `Tokenizer.tokens`."""
        return self._library.encode(text, add_special_tokens=False).ids

    def save(self, path: str) -> None:
        """Write the file without its truncation and padding."""
        self._library.save(path)

    def token_of(self, id_: int) -> str:
        """The token with this id."""
        return str(self._library.id_to_token(id_))


def _padding_beside(path: Path) -> str:
    """The padding token that transformers' files in the folder of a tokenizer.json name; empty if they name none.

    Raises:
        UserError: such a file is not JSON.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = path.with_name(name)
        if not file.is_file():
            continue
        token = read_object(file, f"--tokenizer {path}: ").get("pad_token")
        if token := token.get("content") if isinstance(token, dict) else token:
            return str(token)
    return ""


def build_tokenizer(name: str, context_length: int | None, of_text_model: int = 0) -> Tokenizer:
    """The tokenizer of `--tokenizer`.

    Args:
        name: "bytes", "clip" or the path of a `tokenizer.json`.
        context_length: as for `Tokenizer`; None without `--context-length`: 256 for "bytes", else the next one.
        of_text_model: the context length of the published text model.

    Raises:
        UserError: there is no such tokenizer, or its library is not installed.
    """
    if name == "bytes":
        return ByteTokenizer(context_length or _BYTES_CONTEXT_LENGTH)
    context_length = context_length or of_text_model
    if name == "clip":
        return ClipTokenizer(context_length)
    if not os.path.isfile(name):
        near = did_you_mean(name, ["bytes", "clip"])
        raise UserError(f"--tokenizer {name} is none of bytes and clip, and no file{near}")
    return FileTokenizer(name, context_length)


def describe_cut_captions(source: Source, tokenizer: Tokenizer) -> list[str]:
    """A line for people if captions are too long for the tokenizer; of a large source, of evenly spaced images."""
    images = np.linspace(0, len(source) - 1, min(len(source), _MOST_COUNTED)).astype(np.int64)
    captions = [caption for image in images.tolist() for caption in source.captions(image)]
    num_cut = sum(map(tokenizer.is_cut, captions))
    if not num_cut:
        return []
    some = "" if len(images) == len(source) else f" of {len(images):,} images, of {len(source):,},"
    counted = f"{num_cut:,} of the {len(captions):,} captions{some}"
    return [f"{counted} are longer than --context-length {tokenizer.context_length} and lose their last tokens"]
