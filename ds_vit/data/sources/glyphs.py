"""`--dataset glyphs`: the characters of a font with their Unicode names as captions, without any download.

`ds_vit/data/glyphs/` holds DejaVu Sans 2.35 with its licence, and names.txt: the characters of the font that have a
name in Unicode 14. The list is a file because later versions of Python know further names. In that folder:

    python -c "import unicodedata as u; from fontTools.ttLib import TTFont; \
    [print(f'{c:04x} {u.name(chr(c)).lower()}') for c in sorted(TTFont('DejaVuSans.ttf').getBestCmap()) \
    if u.name(chr(c), '')]" > names.txt
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageFont

from ds_vit import randomness
from ds_vit.data.sources.captions import Captions
from ds_vit.data.sources.source import Source

_FOLDER = Path(__file__).resolve().parents[1] / "glyphs"
_SIDE = 32  # of an image, in pixels
_SIZES, _ANGLES = (16, 20, 24), (-12, 0, 12)  # pixels an em; degrees, counter-clockwise
_NUM_VARIANTS = len(_SIZES) * len(_ANGLES)
_UPRIGHT = _NUM_VARIANTS // 2  # the variant of the middle size and angle
_HELD_OUT = 580


@cache
def read_names() -> tuple[tuple[str, str], ...]:
    """All (character, name) in the order of the code points."""
    lines = (_FOLDER / "names.txt").read_text(encoding="ascii").splitlines()
    return tuple((chr(int(code, 16)), name) for code, _, name in (line.partition(" ") for line in lines))


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    # The basic layout, which every build of Pillow has; for single characters Raqm's is the same.
    return ImageFont.truetype(_FOLDER / "DejaVuSans.ttf", size, layout_engine=ImageFont.Layout.BASIC)


def _glyph(character: str, size: int) -> Image.Image | None:
    """What a character covers, in white on black, without a margin; None for one that covers nothing."""
    left, top, right, bottom = _font(size).getbbox(character)
    if right <= left or bottom <= top:
        return None
    width, height = int(right - left), int(bottom - top)
    mask, _ = _font(size).getmask2(character, mode="L")
    glyph = Image.frombytes("L", mask.size, bytes(mask))
    assert glyph.size == (width, height), f"{character!r}: {glyph.size}, not {(width, height)}"
    return glyph if glyph.getbbox() else None


def drawn(character: str, variant: int) -> Image.Image:
    """A character in black on white, centred, RGB: a pure function of its arguments.

    Args:
        character: of the font.
        variant: below 9; its size and its rotation.
    """
    size, angle = _SIZES[variant // len(_ANGLES)], _ANGLES[variant % len(_ANGLES)]
    image = Image.new("L", (_SIDE, _SIDE))
    glyph = _glyph(character, size)
    if glyph is not None:
        glyph.thumbnail((_SIDE, _SIDE))  # long arrows and domino tiles are wider
        image.paste(glyph, ((_SIDE - glyph.width) // 2, (_SIDE - glyph.height) // 2))
    image = image.rotate(angle, Image.Resampling.BICUBIC)
    return ImageChops.invert(image).convert("RGB")


def split_names(names: Sequence[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the characters for training and of those held out for evaluation, ascending.

    Held out are new combinations of known words: each word of a held-out name is also in a name for training. The
    choice depends only on the list. Characters that cover nothing (spaces, controls) stay for training.
    """
    uses = Counter(word for _, name in names for word in set(name.split()))
    held_out: list[int] = []
    for number in np.argsort(randomness.sample_keys(0, 0, np.arange(len(names))), kind="stable").tolist():
        character, name = names[number]
        words = set(name.split())
        if len(words) > 1 and min(uses[word] for word in words) > 1 and _glyph(character, _SIZES[0]) is not None:
            held_out.append(number)
            uses.subtract(words)
        if len(held_out) == _HELD_OUT:
            break
    training = np.setdiff1d(np.arange(len(names)), held_out)
    return training, np.sort(held_out)


class GlyphSource(Source):
    """5,810 characters of DejaVu Sans: each in 9 sizes and rotations for training, 580 held out in one for evaluation.

    The caption is the character's name in lower case ("latin small letter a with acute"). There are no classes.
    """

    class_names = ()
    has_captions = True

    def __init__(self, train: bool) -> None:
        names = read_names()
        self._numbers = split_names(names)[0 if train else 1]
        self._variants = range(_NUM_VARIANTS) if train else range(_UPRIGHT, _UPRIGHT + 1)
        self._characters = "".join(names[number][0] for number in self._numbers)
        self._captions = Captions.of([names[number][1]] for number in self._numbers)

    def __len__(self) -> int:
        return len(self._numbers) * len(self._variants)

    def image(self, index: int) -> Image.Image:
        """As `Source.image`."""
        number, variant = divmod(index, len(self._variants))
        return drawn(self._characters[number], self._variants[variant])

    def target(self, index: int) -> int:
        """0: all images are of one kind."""
        return 0

    def captions(self, index: int) -> tuple[str, ...]:
        """As `Source.captions`."""
        return self._captions[index // len(self._variants)]

    def identity(self) -> tuple[np.ndarray, ...]:
        """As `Source.identity`."""
        return self._numbers, np.array(self._variants), *self._captions.identity()

    def describe(self, index: int) -> str:
        """As `Source.describe`."""
        number, variant = divmod(index, len(self._variants))
        return f"glyphs[U+{ord(self._characters[number]):04X}, variant {self._variants[variant]}]"
