"""What layers are looked at by: shapes on the meta device."""

import pytest
import torch

from ds_vit.models.alike import _NormsByShape


def of_norm(device, dtype, strided, affine):
    """Shape, strides and type of what a norm gives forward and back."""
    tokens = torch.ones(3, 4, 5, 8, device=device, dtype=dtype)
    if strided:
        tokens = tokens.transpose(1, 2)
    weight, bias = (torch.ones(8, device=device, dtype=dtype) if affine else None for _ in range(2))
    out, mean, rstd = torch.ops.aten.native_layer_norm(tokens, [8], weight, bias, 1e-6)
    back = torch.ops.aten.native_layer_norm_backward(out, tokens, [8], mean, rstd, weight, bias, [True, affine, affine])
    return [(one.shape, one.stride(), one.dtype) if one is not None else None for one in (out, mean, rstd, *back)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_norms_are_looked_at_as_they_run(strided, affine):
    # Catches: another layout in memory, whose copies would be counted; a gradient too many.
    with _NormsByShape():
        looked_at = of_norm("meta", torch.float32, strided, affine)
    ran = of_norm("cpu", torch.float32, strided, affine)
    if not affine:  # a kernel gives an undefined gradient
        looked_at, ran = looked_at[:4], ran[:4]
    assert looked_at == ran
