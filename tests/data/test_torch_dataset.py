"""A program's own torch data set as a source."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

from ds_vit.api import _sources
from ds_vit.data.sources.datasets import as_source
from ds_vit.fault_tolerance.errors import UserError


class Pairs(list):
    """A list as a data set."""

    def __init__(self, items, **attributes):
        super().__init__(items)
        vars(self).update(attributes)


GREY = np.full((2, 3), 7, np.uint8)


def test_items_give_what_the_data_set_does_not_say():
    # Catches: classes that depend on which of them occurs first, an image left grey.
    source = as_source(Pairs([(Image.fromarray(GREY), 2), (GREY, 0)]))
    assert source.class_names == ("0", "1", "2")
    assert [source.target(0), source.target(1)] == [2, 0]
    assert source.image(1).mode == "RGB"
    assert source.image(1).size == (3, 2)
    assert as_source(source) is source


def test_targets_and_classes_are_taken_at_their_word():
    # Catches: a data set of a million files that is decoded once to learn its classes.
    seen = []

    class Counting(Pairs):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    source = as_source(Counting([(GREY, 1)] * 4, targets=[1, 1, 0, 1], classes=["a", "b"]))
    assert (source.class_names, source.target(2), seen) == (("a", "b"), 0, [0])


@pytest.mark.parametrize(
    ("of_training", "own", "names"),
    [
        (("a", "b"), {}, ("a", "b")),
        (("0", "1"), {"classes": ["a", "b"]}, ("0", "1")),
        (("a", "b"), {"classes": ["b", "a"]}, ("b", "a")),
        (("a", "b", "c"), {"classes": ["b", "c"]}, ("b", "c")),
    ],
)
def test_images_of_validation_with_other_classes(of_training, own, names):
    # Catches: class numbers of other classes that count as those of training, as where a class has no folder.
    assert as_source(Pairs([(GREY, 1)], **own), of_training).class_names == names
    if names != of_training:
        with pytest.raises(UserError, match="or others in another order"):
            _sources(Pairs([(GREY, 1)], classes=of_training), Pairs([(GREY, 1)], **own), {})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "a int is no data set: give a Source, or a torch Dataset with a length"),
        (Pairs([]), "Pairs is not (image, class number) for each of its 0 items"),
        (Pairs([GREY]), "is not (image, class number)"),
        (Pairs([(GREY, 0.5)]), "is not (image, class number)"),
        (Pairs([(GREY, 0)] * 2, targets=[0]), "for each of its 2 items"),
        (Pairs([(GREY, 2)], classes=["a", "b"]), "has targets from 2 to 2, and 2 classes are named"),
        (Pairs([(GREY, -1)]), "has targets from -1 to -1, and 0 classes"),
        (Pairs([(GREY / 255, 0)]), "the image is a float64 array (2, 3), not a PIL image or a uint8 or uint16 array"),
        (Pairs([(GREY[None, None], 0)]), "Pairs[0]: the image is a uint8 array (1, 1, 2, 3), not a PIL image or a"),
        (Pairs([(np.zeros((7, 9, 9), np.uint8), 0)]), "the image is a uint8 array (9, 9, 7), not a PIL image or a"),
        (
            Pairs([("cat.jpg", 0)]),
            "the image is a str, not a PIL image or a uint8 or uint16 array [H, W], [H, W, C] or",
        ),
    ],
)
def test_what_is_no_such_data_set(data, message):
    # Catches: a traceback in a worker process, an hour later.
    with pytest.raises(UserError, match=re.escape(message)):
        as_source(data)
