"""The flags of `--task clip` and `--task siglip`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_vit.config.flag import IDENTITY, WEIGHTS, Blocks, Settings, Width, flag
from ds_vit.tasks.flags import TableSettings, TokenSettings, ZeroShotSettings


class TextTowerSettings(Settings, section="model", scope=WEIGHTS):
    """The text tower and the features of both towers."""

    text_model: str = flag("", "text tower (clip_base, siglip_base)", metavar="NAME")
    text_width: Width | None = flag(None, "width of the text tower")
    text_depth: Blocks | None = flag(None, "blocks of the text tower")
    text_heads: Blocks | None = flag(None, "attention heads of the text tower")
    text_pool: Literal["", "end", "last", "map"] = flag(
        "", "feature of a caption: its end token, its last token, or attention pooling"
    )
    embed_dim: Width | None = flag(None, "width of the features of both towers")


class LockSettings(Settings, section="model", scope=IDENTITY):
    """Towers that are not trained."""

    lock_image: bool = flag(False, "freeze the image tower except its projection")
    lock_image_unlocked_groups: Annotated[int, Field(ge=0, le=10_000)] = flag(
        0, "--lock-image: groups of layers at its end that are trained", needs="lock_image"
    )
    lock_text: bool = flag(False, "freeze the text tower")


SETTINGS = (TextTowerSettings, LockSettings, TokenSettings, TableSettings, ZeroShotSettings)
