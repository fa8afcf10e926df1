"""Settings: the schema of flags, its parser, the rules between them, and DeepSpeed's JSON."""

from ds_vit.config.flag import spelling
from ds_vit.config.parser import (
    build_parser,
    from_values,
    load_recipe,
    over_recipe,
    parse,
    read_values,
    read_words,
    to_yaml,
)
from ds_vit.config.rules import idle_flags
from ds_vit.config.schema import FLAGS, RunConfig, default_of

__all__ = [
    "FLAGS",
    "RunConfig",
    "build_parser",
    "default_of",
    "from_values",
    "idle_flags",
    "load_recipe",
    "over_recipe",
    "parse",
    "read_values",
    "read_words",
    "spelling",
    "to_yaml",
]
