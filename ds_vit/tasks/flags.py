"""Flags that several tasks have: of captions, and of classes that are told apart by captions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_vit.config.flag import EVALUATION, FREE, NOTED, RECORDED, WEIGHTS, Settings, checked, flag

ONE_CHARACTER = checked("must be one character", lambda text: len(text.replace("\\t", "\t")) <= 1)


class TokenSettings(Settings, section="model", scope=WEIGHTS):
    """Captions as tokens."""

    tokenizer: str = flag("bytes", "bytes (UTF-8), clip or a tokenizer.json", metavar="bytes|clip|PATH")
    context_length: Annotated[int, Field(ge=2, le=2**16)] | None = flag(
        None, "tokens of a caption (bytes: 256, else 77, 64 and 50)"
    )


class TableSettings(Settings, section="data", scope=FREE | RECORDED):
    """Columns of images and captions."""

    csv_img_key: str = flag(
        "",
        "column of images (csv/: filepath)",
        needs="dataset=csv/*|hfds/*|parquet/* or data_dir=csv/*|hfds/*|parquet/*",
        metavar="NAME",
    )
    csv_caption_key: str = flag(
        "",
        "column of captions, or key in .json files (csv/: title)",
        needs="dataset=csv/*|hfds/*|parquet/*|wds/* or data_dir=csv/*|hfds/*|parquet/*|wds/*",
        metavar="NAME",
    )
    csv_separator: Annotated[str, ONE_CHARACTER] = flag(
        "",
        "--dataset csv/…: separator of the columns, such as \\t or , (default: the one in the header)",
        needs="dataset=csv/* or data_dir=csv/*",
        metavar="CHAR",
    )


class ZeroShotSettings(Settings, section="run", scope=NOTED | EVALUATION):
    """Classification by captions."""

    zeroshot: str = flag(
        "", "data to classify by the names of its classes, as --dataset or --data-dir name it", metavar="NAME|DIR"
    )
    zeroshot_templates: str = flag(
        "simple",
        "--zeroshot: sentences of a class: none, simple, openai or a file",
        needs="zeroshot",
        metavar="none|simple|openai|FILE",
    )
