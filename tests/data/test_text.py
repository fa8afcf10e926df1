"""Captions: tokens, the built-in glyphs, and images that go with their texts."""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from micro_batches import fields_of, load, loader_of
from PIL import Image
from token_files import write_tokenizer

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.decode import undecodable
from ds_vit.data.rows import EvalRows
from ds_vit.data.sampler import Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.captions import Captions
from ds_vit.data.sources.combined import mixed
from ds_vit.data.sources.datasets import drawn, open_source, read_names
from ds_vit.data.sources.source import Source
from ds_vit.data.text import build_tokenizer, describe_cut_captions
from ds_vit.fault_tolerance.errors import UserError

BYTES = build_tokenizer("bytes", 24)
SETTINGS = {"image": ImageConfig((8, 8)), "augment": AugmentConfig(no_aug=True), "mix": MixConfig()}


class Pairs(Source):
    """30 images of one grey, with 1 to 3 captions that name it; every fifth cannot be decoded, one has no caption."""

    class_names = ()
    has_captions = True

    def __init__(self, texts: Sequence[Sequence[str]] | None = None) -> None:
        made = ([f"{n}, caption {c}" for c in range(1 + n % 3)] if n != 7 else [] for n in range(30))
        self.table = Captions.of(texts or made)

    def __len__(self) -> int:
        return len(self.table)

    def image(self, index: int) -> Image.Image:
        if index % 5 == 4:
            raise undecodable(self.describe(index), ValueError("damaged"))
        return Image.new("RGB", (8, 8), (8 * index, 0, 0))

    def target(self, index: int) -> int:
        return 0

    def captions(self, index: int) -> tuple[str, ...]:
        return self.table[index]

    def describe(self, index: int) -> str:
        return f"pair {index}"


def text_of(ids: torch.Tensor) -> str:
    """The text of a row of the bytes tokenizer."""
    assert ids[0] == BYTES.start_id
    end = ids.tolist().index(BYTES.end_id)
    assert set(ids.tolist()[end + 1 :]) <= {BYTES.pad_id}
    return bytes(ids.tolist()[1:end]).decode()


def test_bytes():
    """Would catch a lost end token, an id outside of the vocabulary, or padding that is a byte."""
    ids = BYTES.encode("aß")
    assert ids.dtype == np.int64
    assert ids.tolist() == [257, 97, 195, 159, 258, *[256] * 19]
    assert BYTES.encode("x" * 100).tolist() == [257, *[120] * 22, 258]
    assert [BYTES.is_cut("x" * n) for n in (22, 23)] == [False, True]
    assert BYTES.vocab_size == 1 + max(BYTES.start_id, BYTES.end_id, BYTES.pad_id)
    assert BYTES.encode("").tolist() == [257, 258, *[256] * 22]


@pytest.mark.parametrize("length", [8, 77])
def test_clip_is_open_clip(length):
    """Would catch another cut, padding or cleaning than that of open_clip, whose weights expect its ids."""
    reference = pytest.importorskip("open_clip.tokenizer", reason="open_clip_torch is not installed").SimpleTokenizer()
    tokenizer = build_tokenizer("clip", length)
    texts = ["", "a photo of a  Cat &amp; dog’s 12 ñandú", "word " * 90, "latin small letter a with acute"]
    ours = np.stack([tokenizer.encode(text) for text in texts])
    assert ours.tolist() == reference(texts, context_length=length).tolist()
    assert [tokenizer.is_cut(text) for text in texts[::2]] == [False, True]
    assert (tokenizer.vocab_size, tokenizer.end_id) == (49408, 49407)


@pytest.mark.parametrize(
    ("template", "padding", "special"),
    [("<s> $A </s>", {}, (0, 1, 2)), ("$A </s>", {"pad_id": 1, "pad_token": "</s>", "length": 9}, (None, 1, 1))],
    ids=["start and end", "end"],
)
def test_a_file_is_its_library(tmp_path, template, padding, special):
    """Would catch the file's own truncation or padding, and a lost special token."""
    tokenizer = build_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", template, **padding), 12)
    library = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.no_truncation()
    library.enable_padding(pad_id=special[2], length=12)
    assert (tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id) == special
    for text in ("", "a small cat", "ß"):
        assert tokenizer.encode(text).tolist() == library.encode(text).ids
    assert tokenizer.encode("zyx" * 9).tolist()[-1] == 1
    assert tokenizer.vocab_size == library.get_vocab_size()
    moved = build_tokenizer(write_tokenizer(tmp_path / "other.json", template, **padding), 9)
    assert moved.name == tokenizer.name
    assert pickle.loads(pickle.dumps(tokenizer)).encode("dog").tolist() == tokenizer.encode("dog").tolist()


def test_padding_of_the_folder(tmp_path):
    """Would catch SigLIP's files, whose vocabulary has <pad> and whose tokenizer_config.json pads with </s>."""
    path = write_tokenizer(tmp_path / "tokenizer.json", "$A </s>")
    guessed = build_tokenizer(path, 12)
    assert guessed.pad_id == 2
    for file, token in (("special_tokens_map.json", {"content": "</s>"}), ("tokenizer_config.json", "</s>")):
        (tmp_path / file).write_text(json.dumps({"pad_token": token}))
        tokenizer = build_tokenizer(path, 12)
        assert (tokenizer.pad_id, tokenizer.encode("a").tolist()[-1]) == (1, 1)
        assert tokenizer.name == f"{guessed.name} padded with 1"  # other ids
        (tmp_path / file).unlink()
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config.json is not JSON"):
        build_tokenizer(path, 12)


def test_tokenizers_that_are_refused_in_one_line(tmp_path, monkeypatch):
    """Would catch a traceback, and a text tower that finds no end token."""
    with pytest.raises(
        UserError, match="--tokenizer byte is none of bytes and clip, and no file; the nearest is bytes"
    ):
        build_tokenizer("byte", 8)
    (tmp_path / "text.json").write_text("no tokenizer")
    with pytest.raises(UserError, match=r"text.json cannot be read as a tokenizer.json"):
        build_tokenizer(str(tmp_path / "text.json"), 8)
    for template in ("", "<s> $A", "<s> <s> $A </s>"):
        with pytest.raises(UserError, match="must add one end token and at most one start token"):
            build_tokenizer(write_tokenizer(tmp_path / "wrong.json", template), 8)
    monkeypatch.setitem(sys.modules, "open_clip.tokenizer", None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs open_clip_torch .*: pip install open_clip_torch"):
        build_tokenizer("clip", 8)
    with pytest.raises(UserError, match=r"needs tokenizers .*: pip install tokenizers"):
        build_tokenizer(str(tmp_path / "wrong.json"), 8)


def test_the_context_length_without_its_flag(tmp_path):
    """Would catch captions cut to the length of a text model that counts other tokens."""
    path = write_tokenizer(tmp_path / "tokenizer.json", "$A </s>")
    assert [build_tokenizer(name, None, 64).context_length for name in ("bytes", path)] == [256, 64]


def test_captions_that_are_cut_are_counted():
    """Would catch a run that trains on beginnings of texts and never says so."""
    pairs = Pairs([["x" * n] for n in range(30)])
    expected = "7 of the 30 captions are longer than --context-length 24 and lose their last tokens"
    assert describe_cut_captions(pairs, BYTES) == [expected]
    assert describe_cut_captions(pairs, build_tokenizer("bytes", 31)) == []


def test_images_go_with_their_texts():
    """Would catch a replacement that brings only one of the two, in training and in evaluation."""
    options = {**SETTINGS, "on_bad_image": "skip", "tokenizer": BYTES}
    batches = [*load(Pairs(), Share(0, 1, 12), **options)]
    drawn = {text_of(ids) for batch in batches for ids in batch.packed["texts"]}
    assert len([text for text in drawn if text.startswith("2,")]) > 1, "an image's captions are never drawn"
    fields, rows = fields_of(Pairs(), SETTINGS["image"], tokenizer=BYTES), EvalRows(30, Share(0, 1, 12))
    batches += loader_of(Pairs(), fields, rows, on_bad_image="skip")
    for batch in batches:
        pixels, texts = batch.packed["images"].pixels[batch.rows.valid], batch.packed["texts"][batch.rows.valid]
        for image, ids in zip(pixels, texts, strict=True):
            assert text_of(ids).startswith(f"{int(image[0, 0, 0]) // 8}, ")
    texts = [text_of(ids) for batch in batches[-3:] for ids in batch.packed["texts"][batch.rows.valid]]
    assert texts == [f"{n}, caption 0" for n in range(30) if n % 5 != 4 and n != 7], (
        "evaluation takes the first caption"
    )
    assert {reason for batch in batches for n, reason in batch.skipped if n == 7} == {
        "its caption is empty or not UTF-8"
    }


def test_captions_are_part_of_the_fingerprint_and_pass_through():
    """Would catch a run that resumes with other texts, and a part or a mixture that loses them."""
    source = Pairs()
    other = Pairs([[text.upper() for text in source.captions(number)] for number in range(30)])
    assert source.fingerprint == Pairs().fingerprint != other.fingerprint
    both = mixed([source, other], (1, 2))
    assert both.has_captions
    assert both.captions(31) == ("1, CAPTION 0", "1, CAPTION 1")
    assert both.target(31) == 0
    assert both.fingerprint != mixed([source, source], (1, 2)).fingerprint
    assert not mixed([source, source], classes=()).class_names
    assert not open_source("digits", None, "train").has_captions
    with pytest.raises(LookupError, match="has no captions"):
        open_source("digits", None, "train").captions(0)
    part = open_source("glyphs", None, "train[:1%]")
    whole = open_source("glyphs", None, "train")
    assert part.has_captions
    assert part.captions(3) in {whole.captions(index) for index in range(len(whole))}


# Glyphs


def test_the_list_of_glyphs_is_fixed():
    """Would catch another list, another split or another numbering, by a new version of Python or NumPy."""
    names = read_names()
    assert len(names) == len({name for _, name in names}) == 5810
    assert dict(names)["á"] == "latin small letter a with acute"
    train, val = (open_source("glyphs", None, split) for split in ("train", "validation"))
    assert (len(train), len(val)) == (9 * 5230, 580)
    assert train.captions(9 * 60) == train.captions(9 * 60 + 8)
    listed = "\n".join(val.captions(index)[0] for index in range(len(val)))
    assert hashlib.blake2b(listed.encode(), digest_size=8).hexdigest() == "51ca72c1af7a1eaa"


def test_glyphs_are_pictures_of_their_characters():
    """Would catch an empty or clipped picture, one for several characters, and variants that are alike.

    Pixels are not recorded: FreeType's versions differ in them.
    """
    val = open_source("glyphs", None, "validation")
    ink = [255 - np.asarray(val.image(index))[..., 0] for index in range(len(val))]
    assert {(image.shape, int(image.max()) > 100) for image in ink} == {((32, 32), True)}
    middle = [np.average(np.indices(image.shape), axis=(1, 2), weights=image) for image in ink]
    assert np.abs(np.mean(middle, axis=0) - 15.5).max() < 1
    assert len({image.tobytes() for image in ink}) > 0.95 * len(ink)
    assert len({drawn("R", variant).tobytes() for variant in range(9)}) == 9
    sizes = [(np.asarray(drawn("R", variant)) < 128).sum() for variant in (1, 4, 7)]
    assert sizes == sorted(sizes)
    assert drawn("R", 3).tobytes() == drawn("R", 3).tobytes()
    assert np.asarray(drawn(" ", 4)).min() == 255
