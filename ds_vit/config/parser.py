"""The command line and recipes: flags, a YAML file and program values become one `RunConfig`.

All of it is generated from the schema (`schema.py`); `rules.py` checks the result before any process group exists.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

import ds_vit
from ds_vit.config.deepspeed_json import without
from ds_vit.config.flag import SECTIONS, spelling, texts_of
from ds_vit.config.outside import config_class
from ds_vit.config.rules import find_problems, flags_set_by, idle_flags, replacements
from ds_vit.config.schema import KEY_OF_FLAG, RunConfig, tasks_of, what_is_wrong
from ds_vit.config.timm_flags import Given, split_words, timm_answer
from ds_vit.config.units import parse_set
from ds_vit.fault_tolerance.errors import UserError, did_you_mean, first_line, read_text

FIRST = (
    *("--deepspeed_config", "--recipe", "--model", "--data-dir", "--batch-size"),
    *("--epochs", "--lr", "--output", "--resume", "--dry-run"),
)
"""The flags that the short --help explains."""
_REMOVED = {"drop_path_compute": ("auto", "each branch is computed for all samples, as in timm")}
"""Removed flags that did not move the curve beyond rounding → their default, and what holds instead."""
_WIDTH = 79
_PACKAGE = Path(ds_vit.__file__).resolve().parent


def or_shipped(path: str) -> str:
    """A path, or the file of this name that comes with ds_vit, as in `ds_configs/zero1_bf16.json`.

    Args:
        path: as a person wrote it. An existing file is used as it is.
    """
    if not path or Path(path).exists() or Path(path).parts[:1] not in (("ds_configs",), ("launch",)):
        return path
    roots = (_PACKAGE / "shipped", _PACKAGE.parent)  # of a wheel (setup.py puts them there), and of a clone
    return next((str(root / path) for root in roots if (root / path).is_file()), path)


class Parser(argparse.ArgumentParser):
    """argparse with `UserError`s that name the nearest valid word.

    Attributes:
        config: the class of the settings whose flags it takes.
    """

    config: type[RunConfig] = RunConfig

    def error(self, message: str) -> NoReturn:
        """As `ArgumentParser.error`.

        Raises:
            UserError: always.
        """
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message = message.replace("argument COMMAND: invalid choice:", "there is no command")
            message += did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        if unknown := re.match(r"unrecognized arguments: (-[^ =]*)", message):
            message = f"there is no flag {unknown[1]}{did_you_mean(unknown[1], self._option_string_actions)}"
        raise UserError(message)


def at_least(low: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """The type of a program's own argument that takes finite numbers from `low` on."""

    def read(text: str) -> Any:
        number = kind(text)
        if not low <= number < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {low:g}, not {text}")
        return number

    read.__name__ = kind.__name__  # in argparse's message about other words
    return read


class ShortHelp(argparse.Action):
    """-h and --help of a program with more than a hundred flags: `FIRST` with texts, the others by name."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print the short help and exit."""
        assert isinstance(parser, Parser)
        flags, by_flag = parser.config.flags(), parser._option_string_actions
        formatter = argparse.RawDescriptionHelpFormatter(parser.prog, width=_WIDTH)
        formatter.add_usage(parser.usage, [], [])
        formatter.add_text(parser.description)
        formatter.start_section("the ten that matter first")
        formatter.add_arguments([by_flag[flag] for flag in FIRST])
        formatter.end_section()
        formatter.start_section("all others, explained by --help-all")
        explained = {by_flag[flag].dest for flag in FIRST}
        indent, width = " " * 14, _WIDTH - 6
        rows = textwrap.TextWrapper(width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
        for section in SECTIONS:
            names = [spelling(name) for name in flags if flags[name].section == section and name not in explained]
            if names:
                formatter.add_text(rows.fill(f"{section:<13} {' '.join(names)}"))
        formatter.end_section()
        formatter.add_text(parser.epilog)
        print(formatter.format_help(), end="")
        parser.exit()


def build_parser(
    program: str = "train.py",
    description: str = "Train a Vision Transformer through DeepSpeed: "
    "deepspeed launch/train.py --deepspeed_config FILE …",
    only: Collection[str] | None = None,
    show_defaults: bool = True,
    examples: str = "",
    config: type[RunConfig] = RunConfig,
) -> Parser:
    """A command line, generated from the schema; a flag that is not given is absent from the namespace.

    Args:
        program: its name in messages.
        description: its purpose, for --help.
        only: the flags that it takes, by their recipe names; None for all.
        show_defaults: whether --help shows training's defaults.
        examples: commands, a line each, for the end of --help.
        config: the class of the settings (`config_of_words`).
    """
    whole = only is None
    parser = Parser(
        prog=program,
        usage=f"{program} --deepspeed_config FILE [flags]" if whole else None,
        add_help=not whole,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description=description,
        epilog="Each on/off flag has an opposite, which overrides a recipe too: --no-model-ema; --aug for --no-aug.\n\n"
        + show_examples(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if whole:
        parser.add_argument(
            "-h", "--help", action=ShortHelp, nargs=0, help="the flags that matter first, and all names"
        )
        parser.add_argument("--help-all", action="help", help="every flag with its text")
    parser.add_argument("--recipe", metavar="FILE", help="YAML file of flags; the command line overrides it")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    parser.config = config
    groups = {section: parser.add_argument_group(section) for section in SECTIONS}
    for name, meta in config.flags().items():
        if only is None or name in only:
            _add_flag(groups[meta.section], name, config, show_defaults)
    return parser


def _add_flag(group: argparse._ArgumentGroup, name: str, config: type[RunConfig], show_default: bool) -> None:
    """Add a flag, and its opposite."""
    meta, default, kinds = config.flags()[name], config.default_of(name), config.kinds(name)
    dashed = "--" + name.replace("_", "-")
    names = [*meta.short, *dict.fromkeys((spelling(name), dashed))]
    text = help_of(name, config, show_default=show_default).replace("%", "%%")
    if isinstance(default, bool) or meta.const is not None:
        # The opposite overrides a recipe's "true".
        opposite = "--aug" if name == "no_aug" else f"--no{dashed[1:]}"
        group.add_argument(opposite, dest=name, action="store_const", const=default, help=argparse.SUPPRESS)
    if isinstance(default, bool):
        group.add_argument(*names, dest=name, action="store_true", help=text)
        return
    metavar = f"{{{','.join(kinds[0].words)}}}" if kinds[0].words else None
    options = {"const": meta.const, "nargs": _nargs(name, config), "metavar": meta.metavar or metavar}
    given = {key: value for key, value in options.items() if value is not None}
    # --set may be given several times.
    group.add_argument(*names, dest=name, action="extend" if name == "set" else "store", help=text, **given)


def _nargs(name: str, config: type[RunConfig]) -> int | str | None:
    """How many words follow a flag, as argparse writes it."""
    if config.flags()[name].const is not None:
        return "?"
    if name == "color_jitter":
        return None  # several numbers only from a recipe or a program, as in timm
    lengths = {kind.length for kind in config.kinds(name)} - {None}
    return "*" if config.kinds(name)[0].item is dict else (lengths.pop() or "+") if lengths else None


def show_examples(text: str) -> str:
    """The end of a --help: the commands of a text, such as a module's docstring, a line each."""
    commands = [f"  {line}" for line in text.splitlines() if re.match(r"(ds-vit|deepspeed|torchrun) ", line)]
    return "\n".join(["examples:", *commands]) if commands else ""


def shown_default(name: str, config: type[RunConfig] = RunConfig) -> str:
    """The default of a flag as --help writes it; empty where it says nothing."""
    default = config.default_of(name)
    if isinstance(default, tuple):
        return " ".join(f"{value:g}" for value in default)
    return "" if default in (None, "", {}, False) else str(default)


def help_of(name: str, config: type[RunConfig] = RunConfig, *, show_default: bool = True) -> str:
    """The text of a flag: its tasks, its meaning, its default."""
    text, default = config.flags()[name].text, shown_default(name, config) if show_default else ""
    # A text that begins with the flag it needs, "--lock-image: …", names the task by it.
    task = f"--task {', '.join(tasks_of(name))}: " if tasks_of(name) and not text.startswith("--") else ""
    return f"{task}{text}{default and f' [{default}]'}"


@functools.cache
def print_once(line: str) -> None:
    """Print a line to stderr if it has not been printed yet, as where a recipe is read more than once."""
    print(line, file=sys.stderr)


class _RecipeLoader(yaml.SafeLoader):
    """YAML 1.1 in which a key that is given twice is an error, and a flag's number a word, as on the command line.

    As numbers, 10:13 would be 613, 010 would be 8, and the folder 1128_2130 would be 11282130.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value]
        for number, key in enumerate(keys):
            if any(key.value == before.value for before in keys[:number]):
                raise yaml.composer.ComposerError(problem=f'"{key.value}" is given twice', problem_mark=key.start_mark)
        return node

    def get_single_node(self) -> yaml.Node | None:
        root = super().get_single_node()
        if isinstance(root, yaml.MappingNode):
            root.value = [(key, self._in_words(value)) for key, value in root.value]
        return root

    def _in_words(self, value: yaml.Node) -> yaml.Node:
        """A flag's value with words for numbers, in a list too. Nodes stay: an alias in a block may share them."""
        if isinstance(value, yaml.SequenceNode):
            return yaml.SequenceNode(value.tag, [*map(self._word, value.value)], value.start_mark, value.end_mark)
        return self._word(value)

    def _word(self, value: yaml.Node) -> yaml.Node:
        is_number = value.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        tag = self.DEFAULT_SCALAR_TAG
        return yaml.ScalarNode(tag, value.value, value.start_mark, value.end_mark) if is_number else value


def _read_recipe(path: str) -> dict[str, Any]:
    """The contents of a recipe by recipe names, as YAML has them; UserError if it is missing or malformed."""
    file = Path(or_shipped(path))
    try:
        data = yaml.load(read_text(file, "--recipe "), _RecipeLoader) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}{where}: malformed YAML: {first_line(getattr(error, 'problem', error))}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: a recipe is a table of flags, not a {type(data).__name__}")
    names = [str(key).replace("-", "_") for key in data]
    for key, name in zip(data, names, strict=True):
        if names.count(name) > 1:
            raise UserError(f'{path}: "{key}" is given twice')
    return dict(zip(names, data.values(), strict=True))


def _class_of(values: Mapping[str, Any], recipe: str | None) -> type[RunConfig]:
    """The class of the settings of some values over a recipe, whose problems are found elsewhere."""
    stored: dict[str, Any] = {}
    with contextlib.suppress(UserError):
        stored = _read_recipe(recipe) if recipe else {}
    return config_class({**stored, **values})


def config_of_words(argv: Sequence[str] | None, recipe: str | None = None) -> type[RunConfig]:
    """The class of the settings of a command line, whose --task or recipe may name a task from outside.

    Args:
        argv: the words; None for this process's.
        recipe: the one without a --recipe.

    Raises:
        UserError: as `config_class`.
    """
    flags, _ = split_words(sys.argv[1:] if argv is None else argv)
    given = {name: own[0] for name, (_, own) in flags.items() if name in ("task", "recipe") and own}
    return _class_of(given, given.pop("recipe", recipe))


def load_recipe(path: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a YAML file of flags (dashes or underscores) into recipe names and values of the flags' types.

    A relative `deepspeed_config`, `data_dir` or `initial_checkpoint` is first looked up next to the recipe.

    Args:
        path: of the file.
        given: values that override it; those of another task lack the flags of the recipe's.

    Raises:
        UserError: the file is missing or malformed; or each unknown key and each invalid value.
    """
    file, values = Path(or_shipped(path)), _read_recipe(path)
    for name in _REMOVED.keys() & values:
        default, instead = _REMOVED[name]
        if values.pop(name) != default:
            print_once(f"{path}: {name} was removed and is ignored: {instead}")
    kind, of_others = config_class({**values, **(given or {})}), set()
    with contextlib.suppress(UserError):  # the recipe's task is not needed where another is given
        of_others = values.keys() & config_class(values).flags().keys() - kind.flags().keys()
    read = {name: value for name, value in values.items() if name not in of_others}
    out, problems = read_values(read, f"{path}: ", kind)
    problems += [f'{path}: "{name}" is a flag of --task {values["task"]} only; drop it' for name in sorted(of_others)]
    if problems:
        raise UserError(*problems)

    out = {name: value for name, value in out.items() if values[name] is not None}  # a null was not given

    def relative_to_file(path: str) -> str:
        return str(file.parent / path) if path and (file.parent / path).exists() else path

    for name in ("deepspeed_config", "data_dir", "initial_checkpoint"):
        if isinstance(given := out.get(name), (str, tuple)):
            out[name] = relative_to_file(given) if isinstance(given, str) else tuple(map(relative_to_file, given))
    return out


def read_values(
    values: Mapping[str, Any], where: str = "", kind: type[RunConfig] = RunConfig
) -> tuple[dict[str, Any], list[str]]:
    """Values with the types of their flags, without those that are invalid; and all that is wrong with them.

    Args:
        values: words of a command line, or values of a recipe or a program, by recipe names.
        where: what each problem begins with.
        kind: the class of the settings.
    """
    words, known = {name: _words(value) for name, value in values.items()}, [*map(spelling, kind.flags())]
    config, wrong = what_is_wrong({name: value for name, value in values.items() if name in kind.flags()}, kind)
    for name in values.keys() - kind.flags().keys():
        wrong[name] = [f'there is no flag "{name}"{_instead(name, words, known)}']
    problems = [where + problem for name in values for problem in wrong.get(name, ())]
    return {name: getattr(config, name) for name in values if name in config.model_fields_set}, problems


def _instead(name: str, typed: Given, known: Collection[str]) -> str:
    """What replaces a name that is not a flag: the equivalent of timm's flag, else the nearest flag.

    Args:
        name: with underscores.
        typed: everything that was given, with its words.
        known: the flags of the program.
    """
    if name in _REMOVED:
        return f"; it was removed: {_REMOVED[name][1]}; drop it"
    answer = timm_answer(name, typed[name], typed)
    if answer is not None:
        return f"; {answer.text}"
    return did_you_mean(spelling(name), known, cutoff=0.6)


def _words(value: Any) -> list[str]:
    """A value of a recipe or a program as words of a command line."""
    return [] if isinstance(value, bool) or value is None else texts_of(value)


def parse(argv: Sequence[str] | None = None, program: str = "train.py", examples: str = "") -> RunConfig:
    """Read the command line and its recipe.

    Args:
        argv: the words; None for this process's.
        program: its name in --help.
        examples: as for `build_parser`.

    Returns:
        The settings; `model_fields_set` are those that were given (on the command line or in the recipe).

    Raises:
        UserError: unknown flags (with the nearest), invalid values, incompatible flags and flags without effect; all
            at once.
    """
    parser = build_parser(program, examples=examples, config=config_of_words(argv))
    given, recipe, problems = _split(parser, argv)
    remedy = "ds-vit from-timm 'COMMAND' translates a whole command of timm's, ds-vit from-open-clip one of open_clip's"
    remedy *= len(problems) > 1
    return from_values(given, recipe, problems, remedy)


def read_words(parser: Parser, argv: Sequence[str] | None = None, *, eval_only: bool = False) -> dict[str, Any]:
    """The values of a command line of `build_parser`, over its --recipe; combinations are not checked.

    Args:
        parser: from `build_parser`, with further arguments or without.
        argv: the words; None for this process's.
        eval_only: whether the program only evaluates.

    Raises:
        UserError: unknown flags (with the nearest), or invalid values; all at once.
    """
    given, recipe, problems = _split(parser, argv)
    # A program converts and checks its own arguments, which may have the name of a flag.
    of_flags = {action.dest for action in parser._actions if action.type is None} & parser.config.flags().keys()
    typed = {name: value for name, value in given.items() if name in of_flags}
    own, invalid = read_values(typed, kind=parser.config)
    problems += invalid
    stored = _load_with(recipe, given, problems)
    if problems:
        raise UserError(*problems)
    return over_recipe(stored, {**given, **own}, eval_only=eval_only)


def _load_with(
    recipe: str | None, given: Mapping[str, Any], problems: Sequence[str], remedy: str = ""
) -> dict[str, Any]:
    """The recipe, empty without one; its problems are raised with others."""
    try:
        return load_recipe(recipe, given) if recipe else {}
    except UserError as error:
        raise UserError(*problems, *error.problems, remedy=remedy) from None


def _split(parser: Parser, argv: Sequence[str] | None) -> tuple[dict[str, Any], str | None, list[str]]:
    """The words of a command line by the names of their arguments, its recipe, and the problems of all other words."""
    words = list(sys.argv[1:] if argv is None else argv)
    problems: list[str] = []
    parser.exit_on_error = False
    while True:
        try:
            namespace, unknown = parser.parse_known_args(words)
            break
        except argparse.ArgumentError as error:  # the next attempt leaves this flag out, and so finds further problems
            problems.append(str(error))
            flag = (error.argument_name or "").split("/")
            kept = [word for word in words if word.partition("=")[0] not in flag]
            if kept == words:
                raise UserError(*problems) from None
            words = kept
        except UserError as error:
            raise UserError(*problems, *error.problems) from None
    given = vars(namespace)
    flags, stray = split_words(unknown)
    typed = {name: _words(value) for name, value in given.items()}
    typed |= {name: words for name, (_, words) in flags.items()}
    if problems:
        stray = []  # they may be words of a flag that was left out
    known = parser._option_string_actions
    problems += [f"there is no flag {flag}{_instead(name, typed, known)}" for name, (flag, _) in flags.items()]
    for word in stray:
        folder = f": give the data folder by --data-dir {word}" if Path(word).is_dir() else ""
        problems.append(f"{word!r} follows no flag{folder}")
    if given.get("output") == "":  # a recipe's null is the default folder
        problems.append("--output '' names no folder; name one, or drop the flag")
    for name in ("local_rank", "deepspeed"):
        given.pop(name, None)
    return given, given.pop("recipe", None), problems


def over_recipe(recipe: Mapping[str, Any], given: Mapping[str, Any], *, eval_only: bool = False) -> dict[str, Any]:
    """The given values over a recipe's, without the recipe's values that they exclude or leave without effect.

    So a training run's config.yaml serves for its evaluation, and `--no-aug` needs no edited recipe. Values without
    effect in the recipe itself stay, for `from_values` to reject.

    Args:
        recipe: from `load_recipe`.
        given: on the command line, by recipe names; other names and invalid values are passed through.
        eval_only: as in `read_words`.
    """
    values = {**recipe, **given}
    kind = config_class(values)
    valid, _ = read_values(given, kind=kind)
    dropped: set[str] = set()
    if "set" in values:
        pairs = valid.get("set", given.get("set", ()))
        dropped |= flags_set_by(pairs)
        excluded = [key for name, key in KEY_OF_FLAG.items() if name in given]
        values["set"] = (*_set_without(recipe.get("set", ()), excluded), *pairs)
    if given.get("pp", recipe.get("pp")) != recipe.get("pp"):
        dropped.add("pp_partition")  # bounds for another number of stages
    own = {**recipe, **valid, **({"eval_only": True} if eval_only else {})}
    dropped |= idle_flags(kind.model_construct(**own)).keys() - idle_flags(kind.model_construct(**recipe)).keys()
    chosen = {name for name, value in given.items() if value is not False}  # --no-pretrained excludes nothing
    dropped |= {other for name, other in replacements(kind) if name in chosen}
    return {name: value for name, value in values.items() if name in given or name not in dropped}


def _set_without(pairs: Sequence[str], keys: Collection[str]) -> Iterator[str]:
    """The pieces of --set without some keys of the JSON, also in a block."""
    for pair in pairs:
        given = parse_set([pair])
        kept = without(given, keys)
        yield from [pair] if kept == given else (f"{key}={json.dumps(value)}" for key, value in kept.items())


def from_values(
    values: Mapping[str, Any], recipe: str | None = None, others: Sequence[str] = (), remedy: str = ""
) -> RunConfig:
    """The settings from values by their recipe names, over a recipe; see `parse`.

    Args:
        values: of a command line or a program.
        recipe: the path of a recipe.
        others: problems that are already known, and are raised with those that are found.
        remedy: a last line for all problems.

    Raises:
        UserError: unknown names (with the nearest flag), invalid values, or incompatible flags; all at once.
    """
    kind = _class_of(values, recipe)
    given, invalid_values = read_values(values, kind=kind)
    problems = [*others, *invalid_values]
    invalid: dict[str, Any] = {
        name: str(value) for name, value in values.items() if name in kind.flags() and name not in given
    }
    if recipe:
        given = over_recipe(_load_with(recipe, values, problems, remedy), given)
    if isinstance(given.get("deepspeed_config"), str):
        given["deepspeed_config"] = or_shipped(given["deepspeed_config"])
    given = {name: value for name, value in given.items() if values.get(name, value) is not None}  # a null is not given
    config = kind.model_validate(given)
    problems += find_problems(config, invalid)
    if problems:
        raise UserError(*problems, remedy=remedy)
    return config


def to_yaml(values: Mapping[str, Any]) -> str:
    """A recipe with these values."""

    def plain(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        return dict(value) if isinstance(value, Mapping) else value

    return yaml.safe_dump({name: plain(value) for name, value in values.items()}, sort_keys=False, allow_unicode=True)
