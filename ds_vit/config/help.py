"""--help that teaches: the ten flags that matter first, the names of the others by group; --help-all has all texts."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from typing import Any, NoReturn

from ds_vit.fault_tolerance.errors import UserError

FIRST = (
    *("--deepspeed_config", "--recipe", "--model", "--data-dir", "--batch-size"),
    *("--epochs", "--lr", "--output", "--resume", "--dry-run"),
)
_WIDTH = 79


class Parser(argparse.ArgumentParser):
    """argparse whose errors are `UserError`, with the nearest of what may stand there."""

    def error(self, message: str) -> NoReturn:
        """As `ArgumentParser.error`.

        Raises:
            UserError: always.
        """
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:
            message = message.replace("argument COMMAND: invalid choice:", "there is no command")
            message += nearest(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        unknown = re.match(r"unrecognized arguments: (-[^ =]*)", message)
        if unknown:
            message = f"there is no flag {unknown[1]}{nearest(unknown[1], self.known_flags())}"
        raise UserError(message)

    def known_flags(self) -> list[str]:
        """The flags of this parser, and of its commands."""
        below = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        parsers = [parser for action in below for parser in action.choices.values()]
        return [*self._option_string_actions, *(flag for parser in parsers for flag in parser.known_flags())]


def nearest(word: str, words: list[str]) -> str:
    """ "; the nearest is …", empty where none is near."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"; the nearest is {close[0]}" if close else ""


class ShortHelp(argparse.Action):
    """-h and --help of a program with more than a hundred flags."""

    def __init__(self, **words: Any) -> None:
        super().__init__(**{**words, "nargs": 0, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS})

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        """Print it, and end."""
        print(short_help(parser), end="")
        parser.exit()


def short_help(parser: argparse.ArgumentParser) -> str:
    """The help of a parser of `build_parser`: `FIRST` with their texts, the others by name."""
    formatter = argparse.RawDescriptionHelpFormatter(parser.prog, width=_WIDTH)
    formatter.add_usage(parser.usage, [], [])
    formatter.add_text(parser.description)
    by_flag = parser._option_string_actions
    formatter.start_section("the ten that matter first")
    formatter.add_arguments([by_flag[flag] for flag in FIRST])
    formatter.end_section()
    shown = {by_flag[flag].dest for flag in FIRST}
    formatter.start_section("all others, explained by --help-all")
    for group in parser._action_groups[2:]:
        names = [
            next((word for word in action.option_strings if word.startswith("--")), action.option_strings[0])
            for action in group._group_actions
            if action.help != argparse.SUPPRESS and action.dest not in shown
        ]
        # A name is not broken at its dashes.
        words = textwrap.fill(" ".join(names), _WIDTH - 20, break_on_hyphens=False, break_long_words=False)
        formatter.add_text(f"{group.title:<13} " + words.replace("\n", "\n" + " " * 14))
    formatter.end_section()
    formatter.add_text(parser.epilog)
    return formatter.format_help()
