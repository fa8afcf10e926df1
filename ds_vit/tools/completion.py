"""`ds-vit completion bash`: what a shell needs to complete commands, flags and values; written by shtab.

The script is static: pressing Tab starts no Python. It knows the commands and models of the day it was written.
"""

from __future__ import annotations

import argparse

import shtab

from ds_vit import config as flags
from ds_vit.models import supported_names
from ds_vit.tools import evaluate, predict
from ds_vit.weights import commands as weights_commands


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """A script for a shell to source.

    Args:
        parser: of `ds-vit`; the commands that read their command line themselves get their flags in it.
        shell: "bash", "zsh" or "tcsh".
    """
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    commands.choices |= {
        "train": flags.build_parser("ds-vit train"),
        "eval": evaluate.build_parser("ds-vit eval"),
        **{name: predict.build_parser(name) for name in ("predict", "embed")},
        **{name: weights_commands.build_parser(name) for name in ("export", "import")},
    }
    _complete_values(parser)
    return shtab.complete(parser, shell)


def _complete_values(parser: argparse.ArgumentParser) -> None:
    """Say what may stand behind a flag where the parser itself does not: names of models, files, folders."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _complete_values(below)
        elif "--model" in action.option_strings:
            action.choices = supported_names()
        elif not action.choices and action.nargs != 0:
            words = str(action.metavar or "")
            if words.startswith(("DIR", "FOLDER", "RUN")) or "--output" in action.option_strings:
                vars(action)["complete"] = shtab.DIRECTORY if "FILE" not in words else shtab.FILE
            elif "FILE" in words or words.startswith(("IMAGE", "PATH", "SOURCE")):
                vars(action)["complete"] = shtab.FILE
