"""Compiled blocks by themselves: one graph for all that do the same, and what eager blocks compute."""

import pytest
import torch
from compiling import counting_graphs
from vits import KINDS, images, our_model, shake, small_image_size, small_spec

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.compiled import compile_block, compile_function
from ds_vit.models.conversions import norms_in_fp32
from ds_vit.models.sequential import timm_names

# Those whose blocks have a forward of their own; in differential attention they differ by a number.
NAMES = {
    kind: KINDS[kind]
    for kind in (
        *("class token", "registers and layer scale", "parallel scaling", "two parallel branches"),
        *("residual post-norm", "Eva with rotary tables", "Eva with q and v biases", "learned rotary frequencies"),
    )
} | {"differential attention": "vit_dwee_patch16_reg1_gap_256"}


def two_models(name, dtype=torch.float32, **kwargs):
    """The same model eager and compiled, and images."""
    spec = small_spec(name, drop_path_rate=0.2, img_size=small_image_size(name), depth=4, **kwargs)
    models = our_model(spec).to(dtype), our_model(spec).to(dtype)
    for model in models:
        shake(model)
        if dtype != torch.float32:
            assert sum(map(norms_in_fp32, model.layers))
    function = compile_function()
    for layer in models[1].layers:
        compile_block(layer, function)
    return *models, images(spec, 4).to(dtype)


def outputs(model, pixels, step):
    """Training's logits and gradients, and evaluation's logits, at a step of its own keys."""
    keys = torch.arange(4) + 4 * step
    logits = model.train()(pixels, keys)
    gradients = torch.autograd.grad(logits.float().square().sum(), list(model.parameters()), allow_unused=True)
    with torch.no_grad():
        return logits.detach(), *(g for g in gradients if g is not None), model.eval()(pixels[:3], keys[:3])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", NAMES)
def test_one_graph_a_kind(kind):
    """A block that breaks the graph, or has one of its own; a mask of another block; weights of another block."""
    graphs = []
    # A number that differential attention has by its depth enters the graph in fp32, and 1 less it is rounded twice.
    within = {"rtol": 1e-6, "atol": 1e-6} if kind == "differential attention" else {"rtol": 0, "atol": 0}
    with counting_graphs(graphs, "eager"):
        eager, compiled, pixels = two_models(NAMES[kind], proj_drop_rate=0.1)
        assert timm_names(compiled) == timm_names(eager)
        for step in range(3):
            torch.testing.assert_close(outputs(compiled, pixels, step), outputs(eager, pixels, step), **within)
            assert len(graphs) == 4, "the first block, which drops no path, and the others; training and evaluation"


def test_sixteen_bits():
    """Norms in fp32 are functions of an instance: one a graph, not one a block."""
    graphs = []
    with counting_graphs(graphs, "eager"):
        eager, compiled, pixels = two_models(KINDS["registers and layer scale"], torch.bfloat16)
        for step in range(2):
            torch.testing.assert_close(outputs(compiled, pixels, step), outputs(eager, pixels, step), rtol=0, atol=0)
    assert len(graphs) == 4


def test_what_cannot_be_compiled_is_named():
    """A traceback of torch's in place of a sentence."""
    with counting_graphs([], "eager"):
        _, compiled, pixels = two_models(KINDS["class token"])
    block = compiled.layers[2].block
    block.attn.register_forward_hook(torch._dynamo.disable(lambda *_: None))
    with pytest.raises(UserError, match=r"^--compile: torch \S+ cannot compile Block: .*; drop --compile$") as raised:
        compiled(pixels, torch.arange(4))
    assert "\n" not in str(raised.value)
