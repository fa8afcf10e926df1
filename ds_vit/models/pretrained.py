"""timm's pretrained weights of a name (`--pretrained`), from the local Hugging Face cache or else from the Hub.

The cache lies where huggingface_hub has it ($HF_HUB_CACHE, $HF_HOME/hub), so that a mirror of it is used by the
same variables. A file that is there is taken without asking the network. Of the processes of a host one downloads: the
others wait at huggingface_hub's lock of the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from timm.models._hub import HF_WEIGHTS_NAME, _get_safe_alternatives

from ds_vit.fault_tolerance.errors import UserError, first_line
from ds_vit.models.zoo import TimmViT


class Pretrained(NamedTuple):
    """A file of timm's weights.

    Attributes:
        path: of the file, in the cache.
        name: the model's name with its tag.
        source: the repository and its revision, for people.
    """

    path: Path
    name: str
    source: str


def tagged_name(model: TimmViT) -> str:
    """A model's timm name with the tag of its weights: the one given, else timm's default; without, if it has none."""
    cfg = model.pretrained_cfg
    return f"{cfg['architecture']}.{cfg['tag']}" if cfg.get("tag") else cfg["architecture"]


def find_pretrained(model: TimmViT) -> Pretrained:
    """timm's weights of a model's name, downloaded if they are not in the cache.

    Args:
        model: from `create_model`; its `pretrained_cfg` says which.

    Raises:
        UserError: timm has none of that name, or they are not here and cannot be downloaded; one sentence says which
            file to bring, and where to put it.
    """
    cfg, name = model.pretrained_cfg, tagged_name(model)
    repository = cfg.get("hf_hub_id")
    if not repository:
        if cfg.get("url"):
            raise UserError(
                f"--pretrained: the weights of {name} are not on the Hugging Face Hub; bring {cfg['url']} and give "
                "that file by --initial-checkpoint"
            )
        raise UserError(
            f"--pretrained: timm has no weights of {name}; drop the flag, or take one of the names of "
            "`timm.list_pretrained('vit_*')`"
        )
    whole = cfg.get("hf_hub_filename") or HF_WEIGHTS_NAME
    files = [*_get_safe_alternatives(whole), whole]  # timm's order: safetensors first
    cached = (try_to_load_from_cache(repository, file) for file in files)
    path = next((found for found in cached if isinstance(found, str)), None) or _download(name, repository, files)
    return Pretrained(Path(path), name, f"{repository}, revision {Path(path).parent.name[:12]}")


def _download(name: str, repository: str, files: list[str]) -> str:
    """The first of the files that the repository has; UserError if none can be had."""
    why = "the repository has no such file"
    for file in files:
        try:
            return hf_hub_download(repository, file)
        except LocalEntryNotFoundError as error:  # no connection; an EntryNotFoundError too
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else first_line(error.__cause__ or error)
            break
        except EntryNotFoundError:
            continue
        except (HfHubHTTPError, OSError) as error:
            why = first_line(error)
            break
    folder = Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}", "snapshots", "main")
    raise UserError(
        f"--pretrained: the weights of {name} are not in the Hugging Face cache and cannot be downloaded ({why}): "
        f"bring {constants.ENDPOINT}/{repository}/resolve/main/{files[0]} and put it at {folder / files[0]}, or give "
        "that file by --initial-checkpoint in place of --pretrained"
    )
