"""Models from a folder or repository, as timm names them: `local-dir:FOLDER` and `hf-hub:ORG/NAME`.

Their config.json names the architecture, its constructor's arguments and the preprocessing; the weights are next to it.
Files of the Hub come from huggingface_hub's cache ($HF_HUB_CACHE, $HF_HOME/hub; a cached file is used without the
network) or are downloaded. One process per host downloads; the others wait at huggingface_hub's file lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError, RemoteEntryNotFoundError
from timm.models import parse_model_name
from timm.models._hub import load_model_config_from_path

from ds_vit.fault_tolerance.errors import UserError, first_line


class Described(NamedTuple):
    """A model, as arguments of timm's factory.

    Attributes:
        name: a timm name, with its tag if one was given.
        pretrained_cfg: of its config.json; None for timm's own.
        arguments: of the constructor, from its config.json.
    """

    name: str
    pretrained_cfg: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = {}

    @property
    def architecture(self) -> str:
        """The name without the tag."""
        return self.name.split(".")[0]


def describe(model: str) -> Described:
    """Resolve a --model.

    Raises:
        UserError: a malformed name; no such folder or repository, or a config.json that is not timm's.
    """
    try:
        source, where = parse_model_name(model)
    except ValueError as error:
        raise UserError(f"--model {model}: {first_line(error)}") from None
    if source is None:
        return Described(model)
    if source == "hf-hub":
        folder = hub_file(where, ["config.json"], f"--model {model}: its config.json is").parent
    else:
        folder = Path(where)
    try:
        pretrained_cfg, name, arguments = load_model_config_from_path(folder)
    except FileNotFoundError:
        raise UserError(f"--model {model}: there is no {folder / 'config.json'}") from None
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        reason = "it names no timm architecture" if isinstance(error, KeyError) else first_line(error)
        raise UserError(
            f"--model {model}: {folder / 'config.json'} is not timm's: {reason}; `ds-vit import` reads other tools'"
        ) from None
    if source == "hf-hub":
        pretrained_cfg |= {"source": source, "hf_hub_id": where, "file": None}
    return Described(name, pretrained_cfg, arguments)


def hub_file(repository: str, files: Sequence[str], what: str, way_out: str = "") -> Path:
    """The first of several files that exists in a repository, downloaded if it is not in the cache.

    Args:
        repository: ORG/NAME, or ORG/NAME@REVISION.
        files: names, the preferred one first.
        what: the beginning of the error, as in "its config.json is".
        way_out: the end of the error.

    Raises:
        UserError: none is in the cache or can be downloaded; the message names the file and where to put it.
    """
    repository, _, revision = repository.partition("@")
    try:
        cached = [try_to_load_from_cache(repository, file, revision=revision or None) for file in files]
    except HFValidationError as error:
        raise UserError(f"{what} in no repository: {first_line(error)}") from None
    if path := next((path for path in cached if isinstance(path, str)), None):
        return Path(path)
    for file in files:
        try:
            return Path(hf_hub_download(repository, file, revision=revision or None))
        except RemoteEntryNotFoundError as error:
            reason = first_line(error)
        except (HTTPError, LocalEntryNotFoundError, OSError) as error:  # no other file can be downloaded either
            reason = first_line(error.__cause__ or error)
            break
    folder = Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}", "snapshots", revision or "main")
    address = f"{constants.ENDPOINT}/{repository}/resolve/{revision or 'main'}/{files[0]}"
    raise UserError(
        f"{what} not in the Hugging Face cache and cannot be downloaded ({reason}): download {address} to "
        f"{folder / files[0]}{way_out}"
    )
