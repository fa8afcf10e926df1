"""Save the tokenizer of `launch/glyphs.sh`, and what `--dataset glyphs` holds out: three characters, and all names.

python launch/glyph_files.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

# This clone's package, installed or not, and not another clone's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.source import Source

SHOWN = ("latin capital letter e with acute", "latin small letter u with diaeresis", "latin small letter a with breve")
_SPECIAL = ("<pad>", "<start>", "<end>", "<unknown>")


def save_tokenizer(source: Source, path: Path) -> None:
    """Write a tokenizer.json with a token for each word of the captions."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    except ImportError:
        sys.exit("glyphs: tokenizers is not installed: bash launch/setup.sh text, or pip install tokenizers")
    tokenizer = Tokenizer(models.WordLevel(unk_token=_SPECIAL[3]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    captions = {caption for index in range(len(source)) for caption in source.captions(index)}
    trainer = trainers.WordLevelTrainer(special_tokens=[*_SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(sorted(captions), trainer)
    ends = [(token, _SPECIAL.index(token)) for token in _SPECIAL[1:3]]
    tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
    tokenizer.save(str(path))


def save_held_out(source: Source, folder: Path) -> None:
    """Write `<name>.png` for each of `SHOWN`, and `names.txt`."""
    names = [source.captions(index)[0] for index in range(len(source))]
    folder.mkdir(exist_ok=True)
    (folder / "names.txt").write_text("\n".join(names) + "\n")
    for name in SHOWN:
        source.image(names.index(name)).save(folder / f"{name.replace(' ', '-')}.png")


def main(folder: str) -> None:
    """Write `tokenizer.json` and `held-out/`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_tokenizer(open_source("glyphs", None, "train"), Path(folder) / "tokenizer.json")
    save_held_out(open_source("glyphs", None, "validation"), Path(folder) / "held-out")


if __name__ == "__main__":
    main(*sys.argv[1:])
