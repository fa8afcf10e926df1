"""A task from outside: classes of video clips, whose frames are files, by a ViT that embeds tubelets (ViViT).

Arnab et al. 2021, "ViViT: A Video Vision Transformer", https://arxiv.org/abs/2103.15691: joint space-time attention.
A source has the data's new form, a field draws the frames and crops them alike, and a ViT's patch embedding is another.

Shapes: B samples, T frames, N tubelets, D width.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.models import VisionTransformer
from torch import nn

from ds_vit.config.flag import Settings, flag
from ds_vit.data.augment.steps import uniform
from ds_vit.data.decode import decode
from ds_vit.data.fields import ImageField
from ds_vit.data.sources.listing import NoSuchSplit, synonyms_of
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.keyed_drop import mix_in
from ds_vit.models.layers import Layer, take_apart
from ds_vit.tasks.classification.task import Classification


def make_clips(root: Path, *, frames: int = 6) -> Path:
    """ROOT/train and ROOT/val: noise that stays ("still") or moves one pixel a frame ("moving"), in each clip other."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 7)):
        for number in range(count):
            pixels = draw.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            folder = root / split / ("still", "moving")[number % 2] / f"{number:03}"
            folder.mkdir(parents=True)
            for frame in range(frames):
                Image.fromarray(np.roll(pixels, number % 2 * frame, axis=1)).save(folder / f"{frame:04}.png")
    return root


class FolderOfClips(Source):
    """ROOT/SPLIT/CLASS/CLIP/0000.png, …: a sample is a clip; its "image", which reports show, is the first frame."""

    entries = ("image", "frames")

    def __init__(self, root: Path) -> None:
        self.clips = sorted(path for path in root.glob("*/*") if path.is_dir())
        self.class_names = tuple(sorted({clip.parent.name for clip in self.clips}))

    def __len__(self) -> int:
        return len(self.clips)

    def entry(self, name: str, index: int) -> object:
        """As `Source.entry`; "frames" are the clip's files in order."""
        return sorted(self.clips[index].iterdir()) if name == "frames" else super().entry(name, index)

    def encoded(self, index: int) -> bytes:
        """As `Source.encoded`."""
        return self.entry("frames", index)[0].read_bytes()

    def target(self, index: int) -> int:
        """As `Source.target`."""
        return self.class_names.index(self.clips[index].parent.name)

    def describe(self, index: int) -> str:
        """As `Source.describe`."""
        return str(self.clips[index])


class ClipField(ImageField):
    """Consecutive frames from a drawn one on, all with the crop and flip of the sample's key: [B, T, 3, H, W]."""

    def __init__(self, image, augment, num_frames):
        super().__init__("clips", image, augment, entry="frames")
        self.shape = (num_frames, *self.shape)

    def read(self, sample):
        """As `Field.read`."""
        files, num_frames = sample["frames"], self.shape[0]
        if len(files) < num_frames:
            raise sample.damaged(f"it has {len(files)} frames, fewer than the {num_frames} of --frames")
        first = int(uniform(sample.key, "first frame") * (len(files) - num_frames + 1)) if self.augment else 0
        chosen = files[first : first + num_frames]
        return torch.stack([self.frame(decode(file.read_bytes(), str(file)), sample.key) for file in chosen])

    def frame(self, image, key):
        """The pixels of a frame: the key decides all that is drawn."""
        return self.transform(image, key)


class Tubelets(nn.Module):
    """In place of timm's `PatchEmbed`: [B, T, 3, H, W] to [B, N, D]."""

    def __init__(self, patches, num_frames, length):
        super().__init__()
        embed = patches.proj
        self.img_size, self.patch_size, self.grid_size = patches.img_size, patches.patch_size, patches.grid_size
        self.num_frames, self.num_patches = num_frames, num_frames // length * patches.num_patches
        size = (length, *self.patch_size)
        self.proj = nn.Conv3d(3, embed.out_channels, size, stride=size, device=embed.weight.device)

    def forward(self, clips):
        """Tubelets, first by time."""
        return self.proj(clips.transpose(1, 2)).flatten(2).transpose(1, 2)


class VideoViT(VisionTransformer):
    """Mixed in before a timm ViT whose patch embedding is `Tubelets`."""


class ClipEmbed(Layer):
    """Mixed in before the first layer of a `VideoViT`."""

    def example(self, samples):
        """As `Layer.example`: clips."""
        patches = self.patch_embed
        shape = (samples, patches.num_frames, 3, *patches.img_size)
        return (torch.empty(shape, dtype=patches.proj.weight.dtype, device="meta"),)


@take_apart.register
def _(model: VideoViT) -> list[Layer]:
    layers = take_apart.dispatch(VisionTransformer)(model)
    mix_in(layers[0], ClipEmbed)
    return layers


class VideoSettings(Settings):
    """The task's flags."""

    frames: int = flag(4, "frames of a clip")
    tubelet: int = flag(2, "frames of a tubelet")


class Video(Classification):
    """Classes of clips."""

    settings = (*Classification.settings, VideoSettings)

    @classmethod
    def open_source(cls, config, folder, split):
        """As `Task.open_source`."""
        roots = [root for name in synonyms_of(split) if (root := Path(folder, name)).is_dir()]
        if not roots:
            raise NoSuchSplit(f"{folder} has no {split}/ with CLASS/CLIP/ folders of frames")
        return FolderOfClips(roots[0])

    @classmethod
    def create_model(cls, spec, config, *, for_training):
        """As `Task.create_model`."""
        if config.frames % config.tubelet:
            raise UserError(f"--frames {config.frames} must be a multiple of --tubelet {config.tubelet}")
        model = super().create_model(spec, config, for_training=for_training)
        model.patch_embed = Tubelets(model.patch_embed, config.frames, config.tubelet)
        tokens = model.num_prefix_tokens + model.patch_embed.num_patches
        model.pos_embed = nn.Parameter(model.pos_embed.new_empty(1, tokens, model.embed_dim))
        mix_in(model, VideoViT)
        return model

    def fields(self, *, training):
        """As `Task.fields`."""
        _, targets = super().fields(training=training)
        return ClipField(self.image, self.config if training else None, self.config.frames), targets

    @cached_property
    def feature_fields(self):
        """As `Task.feature_fields`."""
        return self.evaluation_fields
