"""The run's configuration: flags, a YAML recipe and the DeepSpeed JSON come together here, and only here.

The command line and the recipe are generated from the table `RunConfig`. What cannot stand together is refused
(`rules.py`), in plain words, before any process group exists.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ds_vit.config.deepspeed_set import KEY_OF_FLAG, parse_set
from ds_vit.config.flags import FIELDS, SECTIONS, TYPES, RunConfig, default_of, spelling
from ds_vit.config.help import Parser, ShortHelp
from ds_vit.config.rules import EITHER, check, idle_names
from ds_vit.config.shipped import or_shipped
from ds_vit.config.timm_hints import timm_hint
from ds_vit.fault_tolerance.errors import UserError, first_line, read_text


def build_parser(
    program: str = "train.py",
    description: str = "Train a Vision Transformer through DeepSpeed: "
    "deepspeed launch/train.py --deepspeed_config FILE …",
    only: Collection[str] | None = None,
    show_defaults: bool = True,
    examples: str = "",
) -> argparse.ArgumentParser:
    """A command line, generated from RunConfig; a value left out is absent from the namespace.

    Args:
        program: its name in messages.
        description: what it does, for --help.
        only: the flags that it takes, by their recipe names; None for all.
        show_defaults: whether --help shows training's defaults.
        examples: commands, a line each, for the end of --help.
    """
    whole = only is None
    parser = Parser(
        prog=program,
        usage=f"{program} --deepspeed_config FILE [flags]" if whole else None,
        add_help=not whole,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description=description,
        epilog="Every switch has a twin that turns it off, over a recipe too: --no-model-ema; --aug for --no-aug.\n\n"
        + show_examples(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if whole:
        parser.add_argument("-h", "--help", action=ShortHelp, help="the flags that matter first, and all names")
        parser.add_argument("--help-all", action="help", help="every flag with its text")
    parser.add_argument("--recipe", metavar="FILE", help="YAML file of flags; the command line has the last word")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    groups = {section: parser.add_argument_group(section) for section in SECTIONS}
    for name, f in FIELDS.items():
        if only is not None and name not in only:
            continue
        meta = f.metadata
        group = groups[meta["section"]]
        names = [*meta["short"], spelling(name)]
        dashed = "--" + name.replace("_", "-")
        if dashed not in names:
            names.append(dashed)
        options: dict[str, Any] = {"help": _help(name, show_defaults), "dest": name}
        if isinstance(f.default, bool) or meta["const"] is not None:
            # The twin has the last word over a recipe's "true".
            twin = "--aug" if name == "no_aug" else f"--no{dashed[1:]}"
            off = default_of(name)
            group.add_argument(twin, action="store_const", const=off, dest=name, help=argparse.SUPPRESS)
        if isinstance(f.default, bool):
            group.add_argument(*names, action="store_true", **options)
            continue
        options |= {key: meta[key] for key in ("nargs", "choices", "metavar", "const") if meta[key] is not None}
        if meta["const"] is not None:
            options["nargs"] = "?"
        # --set may stand several times.
        group.add_argument(*names, type=TYPES[name], action="extend" if name == "set" else "store", **options)
    return parser


def show_examples(commands: str) -> str:
    """The end of a --help: commands that a person can copy, one a line."""
    return "examples:\n" + textwrap.indent(commands.strip(), "  ") if commands else ""


def _help(name: str, show_default: bool) -> str:
    default = default_of(name) if show_default else None
    shown = "" if default in (None, "", (), {}, False) else f" [{default}]"
    if isinstance(default, tuple) and default:
        shown = f" [{' '.join(f'{value:g}' for value in default)}]"
    return (FIELDS[name].metadata["help"] + shown).replace("%", "%%")


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_kwargs(pairs: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """`["patch_size=4", "act_layer=gelu"]` → `{"patch_size": 4, "act_layer": "gelu"}`, as timm's --model-kwargs.

    true and false are booleans however they are written; to timm "false" would be a true string.

    Raises:
        UserError: a piece without `=`.
    """
    if isinstance(pairs, Mapping):
        return dict(pairs)
    out: dict[str, Any] = {}
    for pair in pairs if isinstance(pairs, (list, tuple)) else [pairs]:
        key, equals, value = str(pair).partition("=")
        if not equals or not key:
            raise UserError(f"--model-kwargs takes key=value pieces, not {pair!r}")
        out[key.replace("-", "_")] = _literal(value)
    return out


def load_recipe(path: str) -> dict[str, Any]:
    """Read a YAML file of flags (dashes or underscores) into recipe names and values of the flags' types.

    A relative `deepspeed_config`, `data_dir` or `initial_checkpoint` is looked for beside the recipe first.

    Raises:
        UserError: the file is missing, malformed, or has an unknown key or a value of another type.
    """
    file = Path(or_shipped(path))
    try:
        data = yaml.safe_load(read_text(file, "--recipe ")) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}{where}: malformed YAML: {first_line(getattr(error, 'problem', error))}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: a recipe is a table of flags, not a {type(data).__name__}")
    out: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in FIELDS:
            raise UserError(f'{path}: there is no flag "{key}"{_instead(name)}')
        if name in out:
            raise UserError(f'{path}: "{key}" stands twice')
        out[name] = _from_yaml(name, value, path)

    def beside(path: str) -> str:
        return str(file.parent / path) if path and (file.parent / path).exists() else path

    for name in ("deepspeed_config", "data_dir", "initial_checkpoint"):
        if out.get(name):
            out[name] = [beside(path) for path in out[name]] if name == "data_dir" else beside(out[name])
    return out


def _from_yaml(name: str, value: Any, path: str) -> Any:
    """Give a YAML value the type that the command line would have given it."""
    f = FIELDS[name]
    meta = f.metadata
    if value is None:
        return default_of(name)
    if name == "model_kwargs":
        return parse_kwargs(value)
    wrong = UserError(f"{path}: {name}: {value!r} is not what {spelling(name)} takes")
    if isinstance(f.default, bool):
        if not isinstance(value, bool):
            raise wrong
        return value
    if meta["const"] is not None and isinstance(value, bool):
        return meta["const"] if value else f.default
    convert = TYPES[name]

    def one(item: Any) -> Any:
        if isinstance(item, (bool, list, dict)) or (convert is int and isinstance(item, float) and item != int(item)):
            raise wrong
        try:
            return convert(item)
        except (TypeError, ValueError):
            raise wrong from None

    if meta["nargs"] is not None:
        items = value if isinstance(value, list) else [value]
        if isinstance(meta["nargs"], int) and len(items) != meta["nargs"]:
            raise wrong
        return [one(item) for item in items]
    out = one(value)
    if meta["choices"] and out not in meta["choices"] and out != f.default:
        raise UserError(f"{path}: {name}: {out!r} is not one of {', '.join(meta['choices'])}")
    return out


def _refuse_second_side(argv: Sequence[str], word: str) -> None:
    """Height and width after --img-size, which takes one number; ValueError says so."""
    place = argv.index(word)
    if place >= 2 and argv[place - 2] == "--img-size":
        sides = f"{argv[place - 1]} {word}"
        raise UserError(f"--img-size takes one number, not {sides}: images are square here")


def _refuse_folder(given: Mapping[str, Any]) -> None:
    """A data folder that a flag has taken for its value, which may be left out."""
    for name, f in FIELDS.items():
        word, rule = given.get(name), f.metadata["rule"]
        if f.metadata["const"] and isinstance(word, str) and word and not rule.holds(word) and Path(word).is_dir():
            raise UserError(f"{spelling(name)} {rule.words}, not {word}: give the data folder by --data-dir {word}")


def _instead(name: str) -> str:
    """What to write in place of a name that is no flag: what stands for timm's flag, else the nearest of ours."""
    hint = timm_hint(name)
    if hint is not None:
        return f"; {hint}"
    close = difflib.get_close_matches(name, list(FIELDS), n=1, cutoff=0.6)
    return f"; the nearest is {spelling(close[0])}" if close else ""


def parse(
    argv: Sequence[str] | None = None, program: str = "train.py", examples: str = ""
) -> tuple[RunConfig, frozenset[str]]:
    """Read the command line and its recipe into one frozen table.

    Args:
        argv: the words; None for this process's.
        program: its name in --help.
        examples: as for `build_parser`.

    Returns:
        The table, and the names that were given (on the command line or in the recipe).

    Raises:
        UserError: an unknown flag (the nearest is named), a value of the wrong kind, or flags that cannot stand
            together or would have no effect.
    """
    return from_values(read_words(build_parser(program, examples=examples), argv))


def read_words(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, *, eval_only: bool = False
) -> dict[str, Any]:
    """What stands on a command line of `build_parser`, over what stands in its --recipe; nothing is checked together.

    Args:
        parser: from `build_parser`, with further arguments or without.
        argv: the words; None for this process's.
        eval_only: whether the program is one that evaluates, whatever the words are.

    Raises:
        UserError: an unknown flag (the nearest is named), or a value of the wrong kind.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse_second_side(argv, unknown[0])
        word = unknown[0].split("=")[0]
        if word.startswith("-"):
            raise UserError(f"there is no flag {word}{_instead(word.lstrip('-').replace('-', '_'))}")
        folder = f": give the data folder by --data-dir {word}" if Path(word).is_dir() else ""
        raise UserError(f"{word!r} follows no flag{folder}")
    given = vars(namespace)
    _refuse_folder(given)
    for name in ("local_rank", "deepspeed"):
        given.pop(name, None)
    recipe = given.pop("recipe", None)
    if "model_kwargs" in given:
        given["model_kwargs"] = parse_kwargs(given["model_kwargs"])
    return over_recipe(load_recipe(recipe), given, eval_only=eval_only) if recipe else given


def over_recipe(recipe: Mapping[str, Any], given: Mapping[str, Any], *, eval_only: bool = False) -> dict[str, Any]:
    """What is given, over a recipe; what the recipe says and this makes idle, or excludes, is left aside.

    A training run's config.yaml serves for its evaluation, and `--no-aug` needs no edited recipe. What is idle by the
    recipe itself stays in, for `check` to refuse.

    Args:
        recipe: from `load_recipe`.
        given: on the command line, by recipe names; other names are passed through.
        eval_only: as in `read_words`.
    """
    values = {**recipe, **given}
    aside: set[str] = set()
    if "set" in values:
        aside |= {flag for flag, key in KEY_OF_FLAG.items() if key in parse_set(given.get("set", ()))}
        excluded = {KEY_OF_FLAG.get(name) for name in given}
        kept = [pair for pair in recipe.get("set", ()) if pair.partition("=")[0] not in excluded]
        values["set"] = [*kept, *given.get("set", ())]
    if given.get("pp", recipe.get("pp")) != recipe.get("pp"):
        aside.add("pp_partition")  # bounds of another number of stages
    own = {name: value for name, value in values.items() if name in FIELDS}
    own["data_dir"] = _one_or_several(own.get("data_dir"))
    idle = idle_names(RunConfig(**{**own, **({"eval_only": True} if eval_only else {})}))
    aside |= idle - idle_names(RunConfig(**recipe))
    chosen = {name for name, value in given.items() if value is not False}  # --no-pretrained excludes nothing
    aside |= {other for pair in EITHER for name, other in (pair, pair[::-1]) if name in chosen and other not in given}
    return {name: value for name, value in values.items() if name in given or name not in aside}


def _one_or_several(folders: Any) -> Any:
    """--data-dir as `RunConfig` has it: one folder is a word, none the empty word."""
    if isinstance(folders, (list, tuple)) and len(folders) < 2:
        return folders[0] if folders else ""
    return folders or ""


def from_values(values: Mapping[str, Any]) -> tuple[RunConfig, frozenset[str]]:
    """The table from the values that were given, by their recipe names; see `parse`.

    Raises:
        UserError: an unknown name (the nearest flag is named), or flags that cannot stand together.
    """
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name, value in values.items():
        if name not in FIELDS:
            raise UserError(f'there is no setting "{name}"{_instead(name)}')
        const = FIELDS[name].metadata["const"]
        if const is not None and isinstance(value, bool):
            values[name] = const if value else default_of(name)
    if isinstance(values.get("deepspeed_config"), str | os.PathLike):
        values["deepspeed_config"] = or_shipped(str(values["deepspeed_config"]))
    if isinstance(values.get("grad_checkpointing"), int):
        values["grad_checkpointing"] = str(values["grad_checkpointing"])
    if values.get("aa") == "none":
        values["aa"] = ""
    if "data_dir" in values:
        values["data_dir"] = _one_or_several(values["data_dir"])
    config = RunConfig(**values)
    explicit = frozenset(values)
    check(config, explicit)
    return config, explicit


def to_yaml(values: Mapping[str, Any]) -> str:
    """A recipe that says the same again."""

    def plain(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        return dict(value) if isinstance(value, Mapping) else value

    return yaml.safe_dump({name: plain(value) for name, value in values.items()}, sort_keys=False, allow_unicode=True)
