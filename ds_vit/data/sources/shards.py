"""WebDataset shards on this machine's disks (`--dataset wds/…`), read at random through the indexes next to them."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import json
import multiprocessing
import os
import posixpath
import re
import tarfile
import uuid
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ds_vit.config.run_folder import written_whole
from ds_vit.data.decode import undecodable
from ds_vit.data.sources import listing
from ds_vit.data.sources.captions import CaptionKeys, Captions, caption_lines, check_matches, clean_captions
from ds_vit.data.sources.source import check_labels
from ds_vit.data.sources.tars import PackedSource, refuse_link
from ds_vit.fault_tolerance.errors import UserError, parse_json, read_object, read_text

CLASSES_FILE = "classes.json"
"""The names of the classes in the order of their numbers, next to the shards."""
PLAN_FILE = "{}.shards.json"
"""How many shards a split has that `ds-vit shards` packed, next to them."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_NUMBERED = re.compile(r"(.*?)(\d+)\.tar")


def open_shards(
    location: str, split: str, classes: Sequence[str] | None = None, captions: CaptionKeys | None = None
) -> ShardSource:
    """Open one split of WebDataset shards.

    Args:
        location: the folder of the shards, or the training split's shards themselves (`DIR/train-{000..127}.tar`).
        split: its name: `train` is `DIR/train-*.tar`, else `DIR/train/*.tar`, else `DIR/train.tar`. Or its shards
            (`val-{00..07}.tar`), from the folder.
        classes: the training split's, when this is the validation split.
        captions: as for `open_indexes`; the images then have captions and no classes.

    Raises:
        UserError: no such folder or split, a shard is missing, or what `ShardSource` refuses.
    """
    folder, of_training = os.path.split(location) if location.endswith(".tar") else (location, "")
    if split.endswith(".tar"):
        shards = _expanded(os.path.join(folder, split))
    elif of_training and "train" in listing.synonyms_of(split):
        shards = _expanded(location)
    else:
        shards = _of_split(folder or ".", split)
    if captions is not None:
        return ShardSource(shards, captions=captions)
    return ShardSource(shards, _class_names(os.path.dirname(shards[0])), classes)


def expand_braces(pattern: str) -> list[str]:
    """What a shell makes of braces: `a-{08..10}.tar` is `a-08.tar a-09.tar a-10.tar`, and `{a,b}` is `a b`."""
    pieces = []
    for number, piece in enumerate(_BRACES.split(pattern)):
        numbers = _RANGE.fullmatch(piece) if number % 2 else None
        if numbers:
            first, last = numbers.groups()
            pieces.append([f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)])
        else:
            pieces.append(piece.split(",") if number % 2 else [piece])
    return ["".join(chosen) for chosen in itertools.product(*pieces)]


def shard_name(split: str, number: int) -> str:
    """The name that `ds-vit shards` gives a shard."""
    return f"{split}-{number:06}.tar"


def _expanded(pattern: str) -> list[str]:
    """The shards of a pattern, all of which must be there."""
    return _require_all(expand_braces(pattern), pattern, "correct the range, or bring the shards")


def _require_all(shards: list[str], named_by: str, way_out: str) -> list[str]:
    missing = [path for path in shards if not os.path.isfile(path)]
    if missing or not shards:
        first = f", the first is {missing[0]}" if missing else ""
        counted = f"{len(missing)} of {len(shards)} shards are missing{first}"
        raise UserError(f"{named_by}: {counted}; {way_out}")
    return shards


def _of_split(folder: str, split: str) -> list[str]:
    """The shards of a split by its name."""
    if not os.path.isdir(folder):
        raise UserError(f"there is no folder of shards {folder}; give wds/FOLDER, or wds/FOLDER/train-{{000..127}}.tar")
    for name, form in itertools.product(listing.synonyms_of(split), ("{}-*.tar", "{}/*.tar", "{}.tar")):
        if shards := listing.in_natural_order(glob.glob(os.path.join(glob.escape(folder), form.format(name)))):
            _check_no_gap(shards)
            if os.path.isfile(plan := os.path.join(folder, PLAN_FILE.format(name))) and "-" in form:
                planned = read_object(plan, "")["shards"]
                _require_all([os.path.join(folder, shard_name(name, n)) for n in range(planned)], plan, "bring them")
            return shards
    raise listing.no_such_split(folder, split, f"shards {split}-*.tar", _pattern_hint(folder))


def _pattern_hint(folder: str) -> str:
    """How to name numbered shards without a split in their name, as img2dataset writes them: `{00000..00127}.tar`."""
    tars = [name for name in os.listdir(folder) if name.endswith(".tar") and not listing.hidden(name)]
    numbered = [found for name in listing.in_natural_order(tars) if (found := _NUMBERED.fullmatch(name))]
    if not numbered or len({found[1] for found in numbered}) > 1:
        return ""
    pattern = f"{numbered[0][1]}{{{numbered[0][2]}..{numbered[-1][2]}}}.tar"
    return f"; name the shards, 'wds/{os.path.join(folder, pattern)}', with --val-split '' if all are for training"


def _check_no_gap(shards: Sequence[str]) -> None:
    """Refuse numbered shards of which one in the middle is missing."""
    numbered = [_NUMBERED.fullmatch(path) for path in shards]
    for before, after in itertools.pairwise(numbered):
        if before and after and before[1] == after[1] and int(after[2]) > int(before[2]) + 1:
            missing = f"{before[1]}{int(before[2]) + 1:0{len(before[2])}}.tar"
            named = f"{os.path.basename(before[1])}{{{before[2]}..{after[2]}}}.tar"
            raise UserError(f"{missing} is missing; bring it, or name the shards to use, such as {named}")


def _class_names(folder: str) -> list[str] | None:
    path = os.path.join(folder, CLASSES_FILE)
    if not os.path.exists(path):
        return None
    names = parse_json(read_text(path, ""), path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise UserError(f"{path} must be a list of class names that differ, in the order of their numbers")
    return names


class ShardSource(PackedSource):
    """Samples of WebDataset shards, numbered in the order of the shards.

    Args:
        shards: the tar files, in their order.
        names: the class names in the order of their numbers, where something says so. Without it, class numbers are
            their names, and class names are numbered in natural order.
        classes: the training split's, when this is the validation split: it need not have an example of each.
        captions: as for `open_indexes`.

    Raises:
        UserError: shards that are damaged, a sample without a caption, a label that is none of the classes.
    """

    def __init__(
        self,
        shards: Sequence[str],
        names: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        captions: CaptionKeys | None = None,
    ) -> None:
        indexes = open_indexes(shards, captions)
        super().__init__(
            shards,
            np.repeat(np.arange(len(shards), dtype=np.int32), [len(index.paths) for index in indexes]),
            np.concatenate([index.paths for index in indexes]),
            *np.concatenate([index.places for index in indexes], axis=1),
        )
        self.left_out = dict(sum((Counter(index.left_out) for index in indexes), Counter()))
        self._states = [index.state for index in indexes]
        self._further = {
            name: np.concatenate([index.further.get(name, np.zeros_like(index.places)) for index in indexes], axis=1)
            for name in dict.fromkeys(itertools.chain.from_iterable(index.further for index in indexes))
        }
        self.entries = ("image", *self._further)
        if texts := [index.captions for index in indexes if index.captions is not None]:
            self.set_captions(Captions.joined(texts))
            return
        labels = [index.labels for index in indexes]
        named = any(part.dtype.kind == "S" for part in labels) or (names is None and _some_are_digits(classes or ()))
        whole = np.concatenate([part.astype(np.bytes_ if named else np.int64, copy=False) for part in labels])
        if named and len(bare := np.flatnonzero(whole == b"")):
            counted = f"{len(bare)} of {len(whole)} samples have no label, the first is {self.describe(bare[0])}"
            self.drop_classes(len(whole), f'{counted}; give each a .cls file, or a .json file with "label"')
            return
        self.class_names, self._targets = self._number(whole, names if names is not None else classes)

    def _number(self, labels: np.ndarray, known: Sequence[str] | None) -> tuple[tuple[str, ...], np.ndarray]:
        """Class names, and each sample's number among them."""
        if labels.dtype.kind == "S":
            found, place = np.unique(labels, return_inverse=True)
            found_names = [listing.class_name(os.fsdecode(name)) for name in found]
            known = known if known is not None else listing.number_classes(found_names)[0]
            number_of = {listing.class_name(name): number for number, name in enumerate(known)}
            numbers = np.array([number_of.get(name, -1) for name in found_names], dtype=np.int64)[place]
        else:
            numbers = labels
            known = known if known is not None else [str(number) for number in range(int(labels.max()) + 1)]
        check_labels(self, labels, numbers, known)
        return tuple(known), numbers

    def entry(self, name: str, index: int) -> Any:
        if name not in self._further:
            return super().entry(name, index)
        offset, size = self._further[name][:, index]
        if not offset:
            raise undecodable(f"{self.describe(index)}[{name}]", ValueError(f"its sample has no {name}"))
        return self.content(index, offset, size)

    def open_tar(self, number: int) -> BinaryIO:
        file = super().open_tar(number)
        if state_of(file) != self._states[number]:
            raise UserError(f"{self._tars[number]} has changed since its index was read; start again")
        return file


# ---- the index of a shard --------------------------------------------------------------------------------------------

# Next to a shard (`train-000.tar.index.npz`): where each sample's image lies, and its label; with captions in place
# of labels it is `train-000.tar.captions.npz`. Read from the tar once, so that any sample is one positioned read from
# then on. A shard is a tar whose files are grouped by their name up to the first dot: `cat/1.jpg` and `cat/1.cls` are
# one sample (github.com/webdataset/webdataset).

SUFFIX, SUFFIX_OF_CAPTIONS = ".index.npz", ".captions.npz"
DOT = "%2E"
"""A dot in the name of a file that `ds-vit shards` packed; a bare one would end the sample's key there."""
DOT_OF_SUFFIX = "%2e"
"""The last dot of a file that shares its stem with another one: `1.jpg` is packed as `1%2ejpg.jpg`."""
RESERVED = re.compile(r"__[^/]*__(?:$|/)")
"""How a name in a tar begins that WebDataset leaves out. `ds-vit shards` packs `__x__/1.jpg` as `./__x__/1.jpg`."""

FIRST_DOT = "a sample's name ends at the first dot of a file's name, and the image's suffix is all that follows"
"""The rule of WebDataset by which `22.05.jpg` is no image."""

_FORMATS = (12, 13)  # of labels, and of captions
_FURTHER = "further "
_JSON_LABELS = ("label", "cls")
_LABEL_SUFFIXES, _TEXT_SUFFIXES = (".cls", ".json"), (".txt", ".json")
_MOST_PROCESSES = 16  # each rank of a machine may be at it
_NUMBER = re.compile(r"-?[0-9]{1,9}")
_KEY = re.compile(r"((?:.*/)?[^./]+)(\.[^/]*)", re.DOTALL)


class ShardIndex(NamedTuple):
    """The samples of a shard, in the order in which their keys first occur.

    Attributes:
        paths: the images' names, bytes [N].
        places: offsets and sizes of the images' bytes in the shard, int64 [2, N].
        labels: class numbers int64 [N], or class names in UTF-8, bytes [N], empty for a sample without a label. Numbers
            of which one has leading zeros are str [N]: 007 is the number 7, and next to names of other shards a name.
        left_out: how many files were found that are not read, by suffix, or by a folder that is `RESERVED`.
        state: the shard's size and time of change (`state_of`) when it was read.
        further: images of the samples whose files are named `KEY.NAME.png` or alike, by NAME: their places, int64
            [2, N], 0 where a sample has none.
        captions: of the images, whose labels are then 0; None in an index of labels.
    """

    paths: np.ndarray
    places: np.ndarray
    labels: np.ndarray
    left_out: dict[str, int]
    state: tuple[int, int]
    further: dict[str, np.ndarray]
    captions: Captions | None = None


class _File(NamedTuple):
    """A file in a tar: its name there, and its bytes."""

    name: str
    offset: int
    size: int


def open_indexes(shards: Sequence[str], captions: CaptionKeys | None = None) -> list[ShardIndex]:
    """The indexes of shards; one that is missing, or made of another state of its shard, is made anew.

    Where nothing can be written next to a shard, its index serves this process only.

    Args:
        shards: the tars.
        captions: the key of captions in .json files, where captions are read; None to read labels.

    Raises:
        UserError: a shard is no whole uncompressed tar, a sample has no caption, or there is no image.
    """
    found = {shard: load_index(shard, captions) for shard in shards}
    missing = [shard for shard, index in found.items() if index is None]
    if len(missing) < 2:
        made = [make_index(shard, captions) for shard in missing]
    else:
        processes = min(len(missing), os.cpu_count() or 1, _MOST_PROCESSES)
        try:
            with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
                made = list(pool.map(partial(make_index, captions=captions), missing))
        except BrokenProcessPool:
            lost = f"a process that indexed {missing[0]} and others was killed; the machine may lack memory"
            raise UserError(f"{lost}. Finished indexes are kept: start again to continue") from None
    complete = found | dict(zip(missing, made, strict=True))
    return [index for shard in shards if (index := complete[shard]) is not None]


def state_of(file: BinaryIO) -> tuple[int, int]:
    """What an index must agree with: a shard's size in bytes, and when it was last changed, in nanoseconds."""
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


@contextlib.contextmanager
def one_at_a_time(path: str) -> Iterator[None]:
    """Hold the lock of an existing file, so that of many processes the first does the work and the others see it.

    On a file system without locks all of them work, each in a separate file.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "rb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_index(shard: str, captions: CaptionKeys | None = None) -> ShardIndex:
    """Read a shard's index from the tar, and write it next to it if that is possible."""
    with one_at_a_time(shard):
        index = load_index(shard, captions)  # another rank's, meanwhile
        if index is None:
            index = read_index(shard, captions)
            with contextlib.suppress(OSError):  # a read-only folder
                save_index(shard, index, captions)
        return index


def save_index(shard: str, index: ShardIndex, captions: CaptionKeys | None = None) -> None:
    """Write an index next to its shard, whole or not at all; any number of processes may do so at once."""
    more: dict[str, Any] = {f"{_FURTHER}{name}": places for name, places in index.further.items()}
    if captions is not None and index.captions is not None:
        names = ("text", "starts", "firsts")
        more |= {"caption_key": np.array(captions.caption), **dict(zip(names, index.captions.identity(), strict=True))}
    separate = f".{uuid.uuid4().hex[:16]}"  # processes of any host may be at it
    name = Path(_name_of_index(shard, captions))
    with written_whole(name, separate) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            state=np.array([_FORMATS[captions is not None], *index.state], dtype=np.int64),
            paths=index.paths,
            places=index.places,
            labels=index.labels,
            left_out=np.array(json.dumps(index.left_out)),
            **more,
        )


def _name_of_index(shard: str, captions: CaptionKeys | None) -> str:
    return shard + (SUFFIX if captions is None else SUFFIX_OF_CAPTIONS)


def load_index(shard: str, captions: CaptionKeys | None = None) -> ShardIndex | None:
    """The index next to a shard; None if there is none that fits it."""
    with open(shard, "rb") as file:
        state = state_of(file)
    try:
        with np.load(_name_of_index(shard, captions)) as arrays:
            if arrays["state"].tolist() != [_FORMATS[captions is not None], *state]:
                return None
            left_out = json.loads(str(arrays["left_out"]))
            texts = None
            if captions is not None:
                if str(arrays["caption_key"]) != captions.caption:
                    return None
                texts = Captions(arrays["text"], arrays["starts"], arrays["firsts"])
            further = {name.removeprefix(_FURTHER): arrays[name] for name in arrays if name.startswith(_FURTHER)}
            return ShardIndex(arrays["paths"], arrays["places"], arrays["labels"], left_out, state, further, texts)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def read_index(shard: str, captions: CaptionKeys | None = None) -> ShardIndex:
    """Read a shard's index from the tar."""
    with open(shard, "rb") as file:
        state = state_of(file)
        samples = _files_of_samples(file, shard)
        images = {key: files[suffix] for key, files in samples.items() if (suffix := _image_suffix(files))}
        if not images:
            dotted = next((f"; {name}: {FIRST_DOT}" for name in map(_dotted_image, samples.values()) if name), "")
            reserved = next((suffix for files in samples.values() for suffix in files if RESERVED.match(suffix)), "")
            packed = f"; {reserved} is left out, as by WebDataset: pack its files as ./{reserved}" if reserved else ""
            raise UserError(f"{shard} holds no images ({listing.SUPPORTED}){dotted}{packed}")
        texts = None if captions is None else _captions(samples, images, captions.caption, file, shard)
        labels = [_label(samples[key], file, shard) if texts is None else ("0", True) for key in images]
    label_array: np.ndarray = np.array([os.fsencode(label) for label, _ in labels], dtype=np.bytes_)
    if all(is_number for _, is_number in labels):
        numbers = label_array.astype(np.int64)
        label_array = numbers if (numbers.astype(np.bytes_) == label_array).all() else label_array.astype(np.str_)
    left_out: Counter[str] = Counter()
    for files in samples.values():
        image = _image_suffix(files)
        read = (image, *(_LABEL_SUFFIXES if texts is None else _TEXT_SUFFIXES))
        left_out.update(suffix for suffix in files if image is None or suffix not in read)
    return ShardIndex(
        np.array([os.fsencode(_unpacked_name(image.name)) for image in images.values()], dtype=np.bytes_),
        _places([*images.values()]),
        label_array,
        dict(left_out),
        state,
        _further([samples[key] for key in images]),
        texts,
    )


def _places(files: Sequence[_File | None]) -> np.ndarray:
    """Offsets and sizes of files in a shard, int64 [2, N]; 0 for None."""
    return np.array([(file.offset, file.size) if file else (0, 0) for file in files], dtype=np.int64).T


def _further(samples: Sequence[dict[str, _File]]) -> dict[str, np.ndarray]:
    """The places of `ShardIndex.further`."""
    found = [
        {posixpath.splitext(suffix[1:])[0]: file for suffix, file in files.items() if listing.is_image(suffix[1:])}
        for files in samples
    ]
    names = dict.fromkeys(itertools.chain.from_iterable(found))
    return {name: _places([of_sample.get(name) for of_sample in found]) for name in names}


def _files_of_samples(file: BinaryIO, shard: str) -> dict[str, dict[str, _File]]:
    """Key → suffix → file of all samples of a shard, in their order."""
    samples: dict[str, dict[str, _File]] = {}
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for info in tar:
                vars(tar)["members"] = []  # of a million, tarfile would keep each
                path = posixpath.normpath(info.name)
                if info.islnk() or listing.is_image(info.name):
                    refuse_link(info, shard)
                if not info.isreg() or listing.hidden(_unpacked_name(path)):
                    continue
                if reserved := RESERVED.match(info.name):
                    key, suffix = path, reserved[0]
                else:
                    named = _KEY.fullmatch(path)
                    key, suffix = (named[1], named[2].lower()) if named else (path, "")
                files = samples.setdefault(key, {})
                if suffix in files:
                    raise UserError(f"{shard} holds {key}{suffix} twice; a sample's files must differ by their suffix")
                files[suffix] = _File(info.name, info.offset_data, info.size)
            end = tar.offset
    except (tarfile.TarError, EOFError) as error:
        reason = f"cannot be read as an uncompressed tar ({error}); it may be cut short"
        raise UserError(f"{shard} {reason}: copy or make it again") from error
    if os.pread(file.fileno(), tarfile.BLOCKSIZE, end) != bytes(tarfile.BLOCKSIZE):
        where = f"after {len(samples)} samples, at byte {end}, a tar's end is missing"
        raise UserError(f"{shard} is cut short: {where}; copy or make it again")
    return samples


def _image_suffix(files: dict[str, _File]) -> str | None:
    return next((suffix for suffix in files if suffix in listing.IMAGE_EXTENSIONS), None)


def _dotted_image(files: dict[str, _File]) -> str:
    """The name of a file that would be the sample's image, had it one dot only; empty if there is none."""
    names = (file.name for suffix, file in files.items() if posixpath.splitext(suffix)[1] in listing.IMAGE_EXTENSIONS)
    return next(names, "") if _image_suffix(files) is None else ""


def _unpacked_name(name: str) -> str:
    """The name that an image had before `ds-vit shards` packed it."""
    if DOT_OF_SUFFIX in name:
        name = posixpath.splitext(name)[0].replace(DOT_OF_SUFFIX, ".")
    return name.replace(DOT, ".").removeprefix("./")


def _some_are_digits(classes: Sequence[str]) -> bool:
    """Whether digits are names of classes, other ones than their numbers."""
    return any(map(_NUMBER.fullmatch, classes)) and [*classes] != [str(number) for number in range(len(classes))]


def _label(files: dict[str, _File], shard: BinaryIO, shard_name: str) -> tuple[str, bool]:
    """A sample's label, from its .cls file, else from its .json file, and whether it is a number; empty for none."""
    label_file = next((files[suffix] for suffix in _LABEL_SUFFIXES if suffix in files), None)
    if label_file is None:
        return "", False
    data = _content(label_file, shard)
    if ".cls" in files:
        text = os.fsdecode(data).strip()
        return text, bool(_NUMBER.fullmatch(text))
    name = f"{shard_name}:{label_file.name}"
    fields = _fields(data, name)
    found = [fields[key] for key in _JSON_LABELS if key in fields]
    if found and (isinstance(found[0], bool) or not isinstance(found[0], (int, str))):
        raise UserError(f"{name}: the label {found[0]!r} is neither a class number nor a class name")
    if not found:
        return "", False
    return str(found[0]), isinstance(found[0], int) and bool(_NUMBER.fullmatch(str(found[0])))


def _content(file: _File, shard: BinaryIO) -> bytes:
    return os.pread(shard.fileno(), file.size, file.offset)


def _fields(data: bytes, name: str) -> dict[str, Any]:
    """The content of a .json file; empty if it is no table."""
    fields = parse_json(data, name)
    return fields if isinstance(fields, dict) else {}


def _captions(
    samples: Mapping[str, dict[str, _File]], keys: Collection[str], json_key: str, shard: BinaryIO, shard_name: str
) -> Captions:
    """The captions of the samples with an image: from .txt files, a caption per line, else a key of .json files.

    Args:
        samples: key of a sample → suffix → file.
        keys: of the samples with an image.
        json_key: of a caption or a list of captions in .json files, which then go before .txt files; "" for `caption`.
        shard: opened.
        shard_name: of the shard, for messages.
    """
    suffixes = (".json", ".txt") if json_key else (".txt", ".json")
    captions: dict[str, tuple[str, ...]] = {}
    for key, files in samples.items():
        suffix = next((suffix for suffix in suffixes if suffix in files), None)
        if suffix == ".txt":
            captions[key] = caption_lines(_content(files[suffix], shard))
        elif suffix == ".json":
            name = f"{shard_name}:{files[suffix].name}"
            value = _fields(_content(files[suffix], shard), name).get(json_key or "caption", ...)
            if value is ...:
                continue
            texts = value if isinstance(value, list) else [value]
            if not all(text is None or isinstance(text, str) or text != text for text in texts):  # NaN
                raise UserError(f"{name}: {json_key or 'caption'} is neither a text nor a list of texts")
            captions[key] = clean_captions(texts)
    check_matches(shard_name, [key for key in keys if key not in captions], captions.keys() - {*keys}, len(keys))
    return Captions.of(captions.get(key, ()) for key in keys)
