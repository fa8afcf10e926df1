"""ViTs larger than timm's own, as further names of timm's `VisionTransformer`; `--model` takes them like any other.

Sources: ViT-e from PaLI (Chen et al. 2022, arXiv:2209.06794, table 10), ViT-22B from Dehghani et al. 2023
(arXiv:2302.05442, table 1): attention and MLP in parallel, normalised queries and keys, no bias in the projections of
queries, keys and values or in norms, attention pooling. "Scaling Vision Model Training Platforms with PyTorch"
(Aggarwal et al. 2022) names sizes from 1B to 120B without their shapes. Of these the 10B is that of one of its authors
(ronghanghu/vit_10b_fsdp_example); the others are ours: heads of 128, an MLP of four times the width, and a depth that
makes the parameters those of the name.
"""

from functools import partial
from typing import Any

from timm.layers import LayerNorm
from timm.models import VisionTransformer, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import ParallelScalingBlock, _cfg

_22B = {
    "block_fn": ParallelScalingBlock,
    "qkv_bias": False,
    "qk_norm": True,
    "norm_layer": partial(LayerNorm, eps=1e-6, bias=False),
}
_AVERAGE = {"class_token": False, "global_pool": "avg", "fc_norm": False}

SIZES: dict[str, dict[str, Any]] = {
    "vit_3b_patch14_224": {"embed_dim": 2048, "depth": 60, "num_heads": 16, **_AVERAGE},
    "vit_e_patch14_224": {
        **{"embed_dim": 1792, "depth": 56, "num_heads": 16, "mlp_ratio": 15360 / 1792},
        **{"class_token": False, "global_pool": "map"},
    },
    "vit_5b_patch14_224": {"embed_dim": 3072, "depth": 44, "num_heads": 24, **_AVERAGE},
    "vit_10b_patch14_224": {"embed_dim": 5120, "depth": 32, "num_heads": 32, **_AVERAGE},
    "vit_15b_patch14_224": {"embed_dim": 5120, "depth": 48, "num_heads": 40, **_AVERAGE},
    "vit_22b_patch14_224": {
        **{"embed_dim": 6144, "depth": 48, "num_heads": 48, "class_token": False, "global_pool": "map"},
        **_22B,
    },
    "vit_25b_patch14_224": {"embed_dim": 6144, "depth": 56, "num_heads": 48, **_AVERAGE},
    "vit_60b_patch14_224": {"embed_dim": 10240, "depth": 48, "num_heads": 80, **_AVERAGE},
    "vit_120b_patch14_224": {"embed_dim": 12288, "depth": 66, "num_heads": 96, **_AVERAGE},
}
"""timm's constructor arguments of each name; patches are of 14 pixels, images of 224."""

default_cfgs = generate_default_cfgs({name: _cfg() for name in SIZES})


def _register(name: str, arguments: dict[str, Any]) -> None:
    def build(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
        return build_model_with_cfg(VisionTransformer, name, pretrained, **{"patch_size": 14, **arguments, **kwargs})

    build.__name__ = name
    register_model(build)


for _name, _arguments in SIZES.items():
    _register(_name, _arguments)
