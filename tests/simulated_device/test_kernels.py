"""Blocks as inductor and Triton compile them for an H100, on a machine without a GPU: each kind, both passes.

The graphs are traced on fake tensors with attention as products of matrices, and lowered as for CUDA; each of their
Triton kernels is compiled to sm_90, in the first of the configurations that a GPU would choose from. Nothing is run.
"""

from __future__ import annotations

import contextlib
import os
import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from vits import KINDS, small_image_size, small_spec

from ds_vit.models.layers import BlockLayer, Layer, take_apart
from ds_vit.models.zoo import create_model
from ds_vit.planner.counting import kept_by_layers

# The others differ outside their blocks.
DIFFERING = KINDS.keys() - {"average pool", "attention pool", "pre-norm and CLIP", "convolutional stem"}
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    **{"major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32, "gcnArchName": "", "is_integrated": 0},
    **{"max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "regs_per_multiprocessor": 65536},
    **{"shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448, "L2_cache_size": 50 * 2**20},
    **{"total_memory": 80 * 2**30, "clock_rate": 1980000, "memory_clock_rate": 2619000, "memory_bus_width": 5120},
)


@contextlib.contextmanager
def pretend_h100() -> Iterator[None]:
    """torch, inductor and Triton take this machine for one with an H100, as far as compiling goes."""
    import triton
    from torch._inductor import config
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    answers = {"_get_device_properties": H100, "get_device_properties": H100, "get_device_capability": (9, 0)}
    answers |= {"is_available": True, "current_device": 0, "device_count": 1, "_lazy_init": None}
    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
    launchers = ("use_static_cuda_launcher", "use_static_triton_launcher")  # which keep no machine code to look at
    settings = {"compile_threads": 1, **{name: False for name in launchers if hasattr(config, name)}}
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer, create=True))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu"))
        stack.enter_context(config.patch(settings))
        triton.runtime.driver.set_active(driver)
        yield


def traced(layer: Layer, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A layer's forward and backward pass as one graph, and tensors of its arguments' shapes.

    Args:
        layer: on the meta device.
        inputs: tokens, and what follows them.
    """
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention import SDPBackend, sdpa_kernel

    own = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}

    def both_passes(gradient: torch.Tensor, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given, weights = arguments[: len(inputs)], dict(zip(own, arguments[len(inputs) :], strict=True))
        outputs, *_ = torch.func.functional_call(layer, weights, (given,))
        wanted = [argument for argument in arguments if argument.requires_grad]
        gradients = torch.autograd.grad(outputs, wanted, gradient, allow_unused=True)
        return (outputs, *(found for found in gradients if found is not None))

    meta = [inputs[0], *inputs, *own.values()]
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.MATH):
        arguments = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in meta]
        for argument, tensor in zip(arguments[1:], meta[1:], strict=True):
            argument.requires_grad_(tensor is inputs[0] or isinstance(tensor, torch.nn.Parameter))
        graph = make_fx(both_passes, decomposition_table=select_decomp_table())(*arguments)
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    return graph, meta


def lowered(graph: torch.fx.GraphModule, meta: list[torch.Tensor]) -> dict[str, str]:
    """The graph's Triton kernels: name → source."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        there = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda:0") for tensor in meta]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*there)
    lowering = GraphLowering(graph, cpp_wrapper=False)
    with V.set_graph_handler(lowering), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        lowering.run(*there)
        code, *_ = lowering.codegen()
    return dict(
        re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", getattr(code, "value", str(code)), re.DOTALL)
    )


def machine_code(name: str, source: str) -> bytes:
    """A kernel's cubin."""
    from torch._inductor.codecache import PyCodeCache

    kernel = getattr(PyCodeCache.load(source), name)
    if kernel.configs:  # else another block has the same
        kernel.configs = kernel.configs[:1]
        kernel.precompile(warm_cache_only=True)
    return kernel.compile_results[0].kernel.asm["cubin"]


def compile_blocks(folder: Path, kinds: Sequence[str]) -> dict[str, list[bytes]]:
    """On a rank: the beginnings of the machine code of each kind of block."""
    os.environ |= {"TRITON_CACHE_DIR": str(folder / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    found = {}
    with pretend_h100():
        for kind in kinds:
            name = KINDS[kind]
            model = create_model(small_spec(name, img_size=small_image_size(name)))
            layers = take_apart(model)
            place = next(number for number, layer in enumerate(layers) if isinstance(layer, BlockLayer))
            graph, meta = traced(layers[place].train(), kept_by_layers(layers)[place].inputs)
            found[kind] = [machine_code(*kernel)[:4] for kernel in lowered(graph, meta).items()]
    return found


@pytest.mark.slow
def test_each_kind_of_block_becomes_machine_code(ranks, tmp_path, request):
    """Catches: an operation of ours without a lowering for CUDA, and a kernel that Triton or ptxas refuses."""
    pytest.importorskip("triton", reason="torch is a build for the CPU: Triton comes with those for GPUs")
    every = 1 if request.config.getoption("--exhaustive") else 7
    [found] = ranks.run(1, compile_blocks, tmp_path, sorted(DIFFERING)[::every], timeout=240)
    for kind, kernels in found.items():
        assert len(kernels) > 5, kind
        assert set(kernels) == {b"\x7fELF"}, kind
