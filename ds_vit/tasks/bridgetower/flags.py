"""The flags of `--task bridgetower`."""

from __future__ import annotations

from ds_vit.tasks.flags import TableSettings, TokenSettings

SETTINGS = (TokenSettings, TableSettings)
