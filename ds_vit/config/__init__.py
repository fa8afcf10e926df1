"""Settings: the one table of flags, its parser, the rules between them, and DeepSpeed's JSON in and out."""

from ds_vit.config.flags import FIELDS, RunConfig, default_of, spelling
from ds_vit.config.parser import (
    build_parser,
    from_values,
    load_recipe,
    over_recipe,
    parse,
    parse_kwargs,
    read_words,
    to_yaml,
)
from ds_vit.config.rules import check, idle_names

__all__ = [
    "FIELDS",
    "RunConfig",
    "build_parser",
    "check",
    "default_of",
    "from_values",
    "idle_names",
    "load_recipe",
    "over_recipe",
    "parse",
    "parse_kwargs",
    "read_words",
    "spelling",
    "to_yaml",
]
