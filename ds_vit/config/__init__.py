"""Settings: the schema of flags, its parser, the rules between them, and DeepSpeed's JSON."""

from ds_vit.config.flag import spelling
from ds_vit.config.outside import config_class
from ds_vit.config.parser import (
    Parser,
    build_parser,
    config_of_words,
    from_values,
    load_recipe,
    over_recipe,
    parse,
    read_values,
    read_words,
    to_yaml,
)
from ds_vit.config.rules import idle_flags
from ds_vit.config.schema import RunConfig

__all__ = [
    "Parser",
    "RunConfig",
    "build_parser",
    "config_class",
    "config_of_words",
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
