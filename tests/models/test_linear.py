"""Linear maps with another product, whatever tensor parallelism has made of them."""

from types import SimpleNamespace

import torch
from torch import nn

from ds_vit.models.keyed_drop import mix_in
from ds_vit.models.linear import Linear
from ds_vit.parallel.tensor.region import RowLinear, SummandLinear


class Rounded(Linear):
    """Products of a rounded weight, as in fp8."""

    def product(self, x):
        return nn.functional.linear(x, self.weight.round(decimals=1))


def test_another_product_in_every_linear_map():
    # Catches: a conversion that takes the place of what a sharded map does besides its product.
    region, x = SimpleNamespace(leave=lambda summand: 10.0 * summand), torch.randn(2, 3)
    for kind in (None, RowLinear, SummandLinear):
        linear = nn.Linear(3, 4)
        if kind is not None:
            mix_in(linear, kind, region=region)
        mix_in(linear, Rounded)
        product = x @ linear.weight.round(decimals=1).T
        if kind is SummandLinear:
            summand, bias = linear(x)
            torch.testing.assert_close((summand, bias), (product, linear.bias))
        else:
            torch.testing.assert_close(linear(x), (1.0 if kind is None else 10.0) * product + linear.bias)
