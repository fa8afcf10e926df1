"""The properties of an optimizer besides its arithmetic, so that no other code asks which one it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn


class OptimizerRules:
    """The rules of an elementwise optimizer that treats all parameters alike; another one overrides what differs.

    An optimizer of this package has its rules as its class attribute `rules`; those of others are in build.py.

    Attributes:
        own_arguments: arguments of the JSON that are for these rules, and not for the constructor.
        spelled_otherwise: arguments of DeepSpeed's optimizer of this name, and what to write instead.
        shown_to_deepspeed: the JSON's block may be read by DeepSpeed, which then knows the optimizer by its name.
    """

    own_arguments: ClassVar[frozenset[str]] = frozenset()
    spelled_otherwise: ClassVar[Mapping[str, str]] = MappingProxyType({})
    shown_to_deepspeed: ClassVar[bool] = True

    def notes(self, arguments: Mapping[str, Any]) -> list[str]:
        """Lines for people about what these arguments of the JSON mean here."""
        return []

    def fallback(self, model: nn.Module, arguments: Mapping[str, Any]) -> frozenset[str] | None:
        """timm names of the parameters that get another update, in groups with `use_fallback`; None: all alike.

        Args:
            model: the whole one; only its parameters' names and shapes are read.
            arguments: of the JSON, `own_arguments` among them.

        Raises:
            UserError: an argument that does not fit the model.
        """
        return None

    def identity(self, fallback: frozenset[str] | None) -> dict[str, Any]:
        """What must be the same in a run that resumes from a checkpoint, as plain data."""
        return {}

    def rows(self, trained: Collection[str], fallback: frozenset[str] | None) -> list[tuple[str, str]]:
        """Rows for the table of a run's start.

        Args:
            trained: timm names of the trained parameters.
            fallback: what `fallback` gave.
        """
        return []
