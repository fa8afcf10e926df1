"""What calibration times: products of matrices, attention, a copy, small operations, a block of timm's.

Each maker gives a function to call; its sizes are such that a call is long beside the host's time for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from ds_vit.models import ModelSpec, create_model, take_apart
from ds_vit.planner.hardware import Accelerator
from ds_vit.planner.layers import as_a_rank_has_them
from ds_vit.planner.work import work_of_layers

ROWS = {"cpu": 1024, "cuda": 16384}
OTHER = {"cpu": 64, "cuda": 512}  # least dimension of the products of the type that runs here do not compute in
_LEAST_WIDTH = {"cpu": 384, "cuda": 512}  # of a ViT worth planning: a lesser dimension is a few images' rows
WIDTHS = {"cpu": (64, 192, 384, 768), "cuda": (512, 1024, 2048, 4096, 8192)}
COPY = {"cpu": 2**26, "cuda": 2**32}
_BLOCK = {"cpu": ("vit_small_patch16_224", 2), "cuda": ("vit_large_patch16_224", 64)}  # and images
ATTENTION = {"cpu": (4, 6), "cuda": (64, 16)}  # images and heads
OPERATIONS = 200  # for one wait of the host


def _layers(rows: int, width: int) -> int:
    """Products one after the other: where rows are few the weights decide, and come from memory, as in a model."""
    return 4 if rows < width else 1


def shape(least: int, kind: str) -> tuple[int, int]:
    """(rows, width) of the products whose least dimension is measured."""
    width = max(least, _LEAST_WIDTH[kind])
    return (ROWS[kind] if least == width else least), width


def products(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """[rows, width] x [width, 4 width] and the two products of its backward pass, in several layers."""
    a = torch.randn(rows, width, device=device, dtype=dtype)
    layers = [torch.randn(width, 4 * width, device=device, dtype=dtype) for _ in range(_layers(rows, width))]
    back = torch.randn(rows, 4 * width, device=device, dtype=dtype)
    return lambda: [(a @ b, back @ b.t(), a.t() @ back) for b in layers]


def product_flops(rows: int, width: int) -> int:
    """FLOPs of `products`."""
    return _layers(rows, width) * 3 * 2 * rows * width * 4 * width


def attention(images: int, heads: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Fused attention with heads of 64 and 197 tokens, forward and back."""
    q, k, v = (torch.randn(images, heads, 197, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    back = torch.randn_like(q)
    return lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), back)


def attention_flops(images: int, heads: int) -> int:
    """FLOPs of `attention`: its backward pass has five products for the forward pass's two."""
    return (2 + 5) * 2 * images * heads * 197**2 * 64


def copy(size: int, device: torch.device) -> Callable[[], object]:
    """A copy of so many bytes."""
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def operations(device: torch.device) -> Callable[[], object]:
    """Small operations, one after the other."""
    small = torch.zeros(8, device=device)
    return lambda: [small.add_(1.0) for _ in range(OPERATIONS)]


class Block:
    """A block of timm's, for what is no product of matrices in it: norms, GELU, sums, copies, and new memory for each.

    Args:
        dtype: of weights and tokens.
        device: that computes.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        name, self.images = _BLOCK[device.type]
        spec = ModelSpec(name, model_kwargs={"depth": 2})  # the last block computes less
        model = create_model(spec)
        compute = str(dtype).removeprefix("torch.")
        layers = as_a_rank_has_them(
            take_apart(model), tp=1, sequence_parallel=False, class_parallel=False, compute=compute, norms_fp32=False
        )
        work = work_of_layers(model, layers, dtype)[1]
        self._passes = work.forward, work.backward
        self.block = create_model(spec, device=str(device)).blocks[0].to(dtype)
        self._tokens = torch.randn(self.images, 197, model.embed_dim, device=device, dtype=dtype, requires_grad=True)
        self._back = torch.randn_like(self._tokens)

    def step(self) -> object:
        """Forward and back."""
        return torch.autograd.grad(self.block(self._tokens), (self._tokens, *self.block.parameters()), self._back)

    def rest(self, products: Accelerator, seconds: float) -> float:
        """Bytes a second of what is no product.

        Args:
            products: whose products of matrices and attention have been measured.
            seconds: of a step of the block.
        """
        of_type = self._tokens.element_size()
        multiplying = sum(
            product.seconds(products, of_type, self.images) for one in self._passes for product in one.products
        )
        # Where another program came between the measurements, nothing or less would be left: a block's rest takes more.
        rest = max(seconds - multiplying, 0.1 * seconds)
        return self.images * sum(one.bytes for one in self._passes) / rest
