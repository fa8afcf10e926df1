"""Text to token ids: `--tokenizer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from ds_vit.fault_tolerance.errors import UserError

BYTES_CONTEXT_LENGTH = 256
"""Of the `bytes` tokenizer, by default."""


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


def build_tokenizer(name: str, context_length: int) -> Tokenizer:
    """The tokenizer of `--tokenizer`.

    Args:
        name: "bytes".
        context_length: as for `Tokenizer`.

    Raises:
        UserError: there is no such tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer(context_length)
    raise UserError(f"there is no --tokenizer {name}; there is bytes")
