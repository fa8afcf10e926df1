"""The memory of a rank at its fullest moment, from its layers and from what DeepSpeed keeps at each ZeRO stage.

The peak is the larger of two moments: one in the backward pass, when most activations are still held and gradients
already exist, and the update, which holds all gradients and copies of them. Held all the time are weights, masters, the
optimizer's state, an average, ZeRO's buckets, and at stage 3 the weights that are gathered.

This is the only model of memory: `--dry-run`, `--auto-batch`, `ds-vit plan` and a run's predicted peak use it.
Not counted: the loader, what collectives take within torch.distributed, the context of a GPU, its libraries and the
gaps of its allocator (2 to 3 GB), and what reference cycles hold until Python's collector runs.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_rules import Checkpointing, Precision, elements_of_bucket, sums_in_fp32
from ds_vit.config.schema import RunConfig
from ds_vit.models.layers import BlockLayer, Layer
from ds_vit.models.zoo import num_parameters
from ds_vit.optim.build import STATES_OF_FALLBACK
from ds_vit.optim.muon import Muon
from ds_vit.parallel.layout import Layout
from ds_vit.parallel.tensor.collectives import TensorParallel
from ds_vit.parallel.tensor.shard import rank_converters
from ds_vit.planner.counting import Kept, Temporary, kept_by_layers, temporary_memory

if TYPE_CHECKING:
    from ds_vit.config.deepspeed_keys import DeepSpeedJson

# Bytes of activations over those of fp32, at an MLP ratio of 4: under autocast the residual stream stays in fp32.
_AUTOCAST_OF_FP32 = 36 / 64
_ALIGNMENT = 8


def layers_of_rank(
    layers: Sequence[Layer],
    config: RunConfig,
    *,
    class_parallel: bool,
    compute: str,
    frozen: frozenset[str] = frozenset(),
) -> list[Layer]:
    """The layers as the first rank of a tensor-parallel group has them: sharded, cast and frozen, in place.

    Args:
        layers: all of a model, whole.
        config: the flags; see `rank_converters`.
        class_parallel: the classifier is sharded over classes.
        compute: torch's name of the weights' type.
        frozen: timm names of what is not trained.
    """
    dtype, tp = getattr(torch, compute), TensorParallel.planned(config)
    converters = rank_converters(config, tp, class_parallel=class_parallel, dtype=dtype, frozen=frozen)
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(dtype)
        for convert in converters:
            convert(layer)
    return list(layers)


def unaligned_matrices(layers: Sequence[Layer]) -> list[str]:
    """Weight matrices of a rank with a side that is no multiple of 8, by name and shape; those of all blocks once.

    Tensor Cores multiply 16-bit matrices fastest, or at all, in multiples of 8 (NVIDIA, "Matrix Multiplication
    Background User's Guide"). Matrices with less than 1 % of the parameters are left out.

    Args:
        layers: from `layers_of_rank`.
    """
    all_parameters = [pair for layer in layers for pair in layer.named_parameters()]
    total = sum(parameter.numel() for _, parameter in all_parameters)
    sizes: dict[str, int] = {}
    for name, parameter in all_parameters:
        if parameter.ndim == 2 and any(side % _ALIGNMENT for side in parameter.shape):
            without_number = re.sub(r"\.\d+\.", ".", name.removesuffix(".weight"))
            described = f"{without_number} {' x '.join(map(str, parameter.shape))}"
            sizes[described] = sizes.get(described, 0) + parameter.numel()
    return [described for described, size in sizes.items() if size >= 0.01 * total]


class LayerMemory(NamedTuple):
    """The memory of a layer on a rank.

    Attributes:
        parameters: number of elements.
        trained: elements that are trained.
        states: numbers that the optimizer keeps.
        kept: activations of an image that wait for the backward pass.
        back: temporary memory of the two passes.
        is_block: whether the layer can be recomputed.
        sizes: elements of each parameter.
    """

    parameters: int
    trained: int
    states: int
    kept: Kept
    back: Temporary
    is_block: bool
    sizes: tuple[int, ...] = ()

    @property
    def runs_forward_only(self) -> bool:
        """Whether nothing goes back through it: it is frozen, and so is all before it, as in a teacher."""
        return not self.trained and not self.kept.bytes


def memory_of_layers(layers: Sequence[Layer], *, states: int | None, fallback: frozenset[str]) -> list[LayerMemory]:
    """The parameters, optimizer states and activations of each layer of a rank.

    Args:
        layers: from `layers_of_rank`.
        states: numbers that the optimizer keeps of an element; None for evaluation only, which keeps nothing.
        fallback: timm names of which it keeps another number.
    """
    if states is None:
        nothing = 0, 0, Kept(0, None, 0, 0, 0, 0), Temporary(((0.0, 0.0),))
        return [LayerMemory(num_parameters(layer), *nothing, isinstance(layer, BlockLayer)) for layer in layers]
    found, kept, temporary = [], kept_by_layers(layers), temporary_memory(layers)
    for layer, of_layer, back in zip(layers, kept, temporary, strict=True):
        sizes = {name: parameter.numel() for name, parameter in layer.named_parameters() if parameter.requires_grad}
        of_optimizer, is_block = num_states(states, fallback, sizes), isinstance(layer, BlockLayer)
        every = tuple(parameter.numel() for parameter in layer.parameters())
        found.append(LayerMemory(sum(every), sum(sizes.values()), of_optimizer, of_layer, back, is_block, every))
    return found


def num_states(states: int, fallback: frozenset[str], sizes: Mapping[str, int]) -> int:
    """The numbers that an optimizer keeps of parameters, by their elements; the other arguments are as above."""
    return sum(size * (STATES_OF_FALLBACK if name in fallback else states) for name, size in sizes.items())


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank of one pipeline stage, the first of its tensor-parallel group.

    Attributes:
        parameters: how many it works with, its tensor slice of each (ZeRO-3 keeps a share of them).
        weights: in the type of the forward pass.
        gradients: of a step, as they wait for the update.
        masters: copies of the weights that ZeRO updates, in fp32 unless the JSON says bf16; 0 where it updates the
            weights themselves.
        optimizer: the optimizer's state.
        average: of the weights, with --model-ema or a teacher.
        activations: that wait for the backward pass at the fullest moment.
        buckets: in which ZeRO collects gradients.
        gathered: weights that autocast has cast.
        going_back: activations, temporary memory, the gradients so far and the weights that ZeRO-3 has gathered, at the
            fullest moment of the backward pass or of a teacher's forward pass.
        updating: gradients and copies of them while the optimizer steps.
    """

    parameters: int
    weights: int
    gradients: int
    masters: int
    optimizer: int
    average: int
    activations: int
    buckets: int = 0
    gathered: int = 0
    going_back: int = 0
    updating: int = 0

    @property
    def held(self) -> int:
        """Bytes that are held all the time."""
        return self.weights + self.masters + self.optimizer + self.average + self.buckets + self.gathered

    @property
    def together(self) -> int:
        """Bytes at the fullest moment."""
        return self.held + max(self.going_back, self.updating)

    @property
    def states(self) -> int:
        """Bytes that do not depend on the micro-batch."""
        return self.weights + self.gradients + self.masters + self.optimizer + self.average


_NAMES = {"optimizer": "optimizer state", "buckets": "ZeRO's buckets", "gathered": "gathered weights"}
_NAMES |= {"going_back": "backward pass with gradients so far", "updating": "update with all gradients"}
PARTS = {field.name: _NAMES.get(field.name, field.name) for field in fields(RankMemory) if field.name != "parameters"}
"""The parts of a rank's memory, for people."""


class MemoryRules:
    """The settings of a run that its memory and its time depend on, in addition to its layers.

    Args:
        json: DeepSpeed's, without "auto".
        layout: the degrees.
        precision: of the JSON.
        optimizer: its class; None for evaluation only.
        average: whether there is a moving average of the weights.
        checkpointing: of activations.
        rates: share of the trained weights with separate rates, which are applied to a copy of them.
        inputs: bytes of a sample, where all micro-batches of a step are held at once (coupled tasks); else 0.
        augmenting: bytes of an image while the device augments it, next to the step before; else 0.
        graphs: the memory of both passes is that of CUDA graphs, which keep it while the optimizer steps.
        loss: micro-batch → the most bytes that its loss takes between the two passes.

    Attributes:
        stage: of ZeRO.
        autocast: the weights are in fp32 and the products in 16 bits.
        of_type: bytes of a weight in the forward pass.
        of_gradient: bytes of a gradient that waits for the update.
        of_master: bytes of a master, and of each number of the optimizer.
        flat: gradients are written into flat memory bucket by bucket (engine/flat_gradient.py).
        sent_as: bytes of a gradient while the ranks sum it.
        bucket: bytes in which DeepSpeed collects gradients where they are not flat.
        persists: largest layer that ZeRO-3 keeps gathered until the step.
        whole_matrices: the optimizer gathers matrices that ZeRO has partitioned (Muon).
        in_host: the fields of `RankMemory` that offload keeps in host memory.
    """

    def __init__(
        self,
        json: DeepSpeedJson,
        layout: Layout,
        *,
        precision: Precision,
        optimizer: type[torch.optim.Optimizer] | None,
        average: bool,
        checkpointing: Checkpointing,
        rates: float = 0.0,
        inputs: int = 0,
        augmenting: int = 0,
        graphs: bool = False,
        loss: Callable[[int], int] = lambda micro_batch: 0,
    ) -> None:
        self.json, self.layout, self.average, self.checkpointing = json, layout, average, checkpointing
        self.rates, self.inputs, self.augmenting, self.graphs, self.loss = rates, inputs, augmenting, graphs, loss
        zero, stage = json.zero_optimization, json.zero_stage
        self.stage = stage
        self.autocast = "autocast" in precision.name
        self.of_type = 4 if precision.compute == "float32" else 2
        self.of_master = 2 if json.bf16.bf16_master_weights_and_grads else 4
        self.of_gradient = 4 if sums_in_fp32(json) else self.of_type
        self.flat = json.flat_gradients
        self.sent_as = {None: self.of_type, "fp32": 4}.get(json.communication_data_type, 2)
        bucket = 0 if self.flat else zero.reduce_bucket_size
        bucket *= self.of_gradient if stage == 1 else self.of_type
        bucket *= 2 if zero.overlap_comm else 1
        self.bucket = bucket * (2 if self.autocast and stage == 1 else 1)  # one for each type that it knows
        self.persists = zero.param_persistence_threshold
        self.whole_matrices = optimizer is not None and issubclass(optimizer, Muon)
        in_host = {"optimizer": ("masters", "optimizer"), "param": ("weights",)}
        self.in_host = frozenset(field for key in json.offloaded for field in in_host[key])


class _Run(NamedTuple):
    """Layers whose activations are allocated and freed together.

    Attributes:
        waiting: bytes of an image that wait for the backward pass.
        again: additional bytes of an image, of what is recomputed.
        layers: one, or a group.
        trained: parameters that are trained.
    """

    waiting: float
    again: float
    layers: Sequence[LayerMemory]
    trained: int


@dataclass(frozen=True)
class StageMemory:
    """The memory of a rank of one pipeline stage, by the micro-batch.

    Attributes:
        layers: of the stage.
        ahead: micro-batches under way at most: stage i of p has p - i (1F1B).
        rules: of the run.
    """

    layers: Sequence[LayerMemory]
    ahead: int
    rules: MemoryRules

    @cached_property
    def _runs(self) -> list[_Run]:
        """The layers by what is freed together: single ones, or the groups that are recomputed."""
        recomputing, runs = self.rules.checkpointing, []
        of_saved, of_expensive = (_AUTOCAST_OF_FP32, 0.5) if self.rules.autocast else (1.0, 1.0)
        for are_recomputed, found in itertools.groupby(
            self.layers, lambda layer: recomputing.interval > 0 and layer.is_block
        ):
            while group := list(itertools.islice(found, recomputing.interval if are_recomputed else 1)):
                waiting, again = of_saved * sum(layer.kept.bytes for layer in group), 0.0
                if are_recomputed:
                    waiting, again = 0.0, waiting
                if again:  # else frozen, and nothing before is trained: torch keeps nothing
                    first = group[0].kept
                    if not recomputing.cpu:
                        waiting += first.given
                        again -= first.given_saved
                    if recomputing.selective:
                        waiting += of_expensive * first.expensive
                        again -= of_expensive * first.expensive_saved
                runs.append(_Run(waiting, again, group, sum(layer.trained for layer in group)))
        return runs

    @cached_property
    def waiting(self) -> float:
        """Bytes of an image that wait for the backward pass."""
        return sum(run.waiting for run in self._runs)

    def states(self, *, accumulated: bool = False) -> RankMemory:
        """The memory without activations.

        Args:
            accumulated: in steps of several micro-batches.
        """
        rules, number = self.rules, sum(layer.parameters for layer in self.layers)
        trained, stage, dp = sum(layer.trained for layer in self.layers), rules.stage, rules.layout.dp
        share = dp if stage else 1
        gradients = rules.of_gradient * trained // (dp if stage >= 2 else 1)
        # The update casts a rank's share to the masters' type; DeepSpeed's copies it in any case.
        copies = rules.of_master * trained // share if rules.of_gradient != rules.of_master else 0
        if not rules.flat:
            copies = 4 * trained // dp if rules.of_gradient < 4 or stage < 3 else 0
        if rules.whole_matrices:  # matrices, their updates, and both again while they travel between ranks
            copies += 4 * (3 if dp > 1 else 2) * trained // dp
        # Weights that can be read from the masters are not kept in addition to them, unless the masters are elsewhere.
        is_one = stage > 0 and "masters" not in rules.in_host and rules.of_type == rules.of_master
        is_cast = stage == 3 and "masters" not in rules.in_host and dp > 1 and not is_one
        gathered = 2 * trained if rules.autocast and stage < 3 else 0  # what autocast has cast for this step
        copies += round(rules.of_master * rules.rates * trained / share)
        return RankMemory(
            parameters=number,
            weights=rules.of_type * (number - trained if is_cast else number) // (dp if stage == 3 else 1),
            gradients=gradients,
            masters=rules.of_master * trained // dp if stage and not is_one else 0,
            optimizer=rules.of_master * sum(layer.states for layer in self.layers) // share,
            average=4 * trained // share if rules.average else 0,
            activations=0,
            buckets=self._buffers(accumulated) if rules.flat or stage == 3 else rules.bucket if trained else 0,
            gathered=gathered if trained else 0,
            updating=gradients + copies,
        )

    def _of_units(self, accumulated: bool) -> int:
        """The buffers through which ZeRO-3 gathers weights and reduces gradients, a layer at a time."""
        rules, dp = self.rules, self.rules.layout.dp
        largest = max((layer.trained for layer in self.layers), default=0)
        if dp == 1:
            return rules.of_type * largest if accumulated and rules.of_gradient != rules.of_type else 0
        landing = rules.of_type * max((layer.parameters for layer in self.layers), default=0)
        return landing + rules.sent_as * (largest + largest // dp)

    @cached_property
    def _bucket(self) -> int:
        """Elements of the largest bucket of flat gradients."""
        trained = [layer for layer in self.layers if layer.trained]
        most = elements_of_bucket(self.rules.json, sum(layer.trained for layer in trained))
        return max([most, *(size for layer in trained for size in layer.sizes)]) if trained else 0

    def _buffers(self, accumulated: bool) -> int:
        """Bytes next to the flat gradients: of what is sent in another type or for others, and of what is added."""
        rules = self.rules
        if rules.stage == 3:
            return self._of_units(accumulated)
        shared = rules.stage == 2 and rules.layout.dp > 1
        sends = rules.layout.dp > 1 and (shared or rules.sent_as != rules.of_gradient)
        adds = accumulated and not shared
        return self._bucket * ((2 * rules.sent_as if sends else 0) + (rules.of_type if adds else 0))

    @cached_property
    def _stays(self) -> int:
        """Elements of the layers that ZeRO-3 keeps gathered until the step."""
        return sum(self._kept(layer.parameters) for layer in self.layers)

    def _kept(self, elements: int) -> int:
        return elements if self.rules.stage == 3 and self.rules.layout.dp > 1 and elements <= self.rules.persists else 0

    def of(self, batch: BatchSizes) -> RankMemory:
        """The memory with this micro-batch and accumulation."""
        micro_batch, under_way = batch.micro_batch, min(self.ahead, batch.accumulation)
        again = max((run.again for run in self._runs), default=0.0)
        activations = (self.waiting * under_way + again) * micro_batch
        states = self.states(accumulated=batch.accumulation > 1)
        is_first = self.ahead == self.rules.layout.pp  # of the stages: it holds the inputs of a coupled step
        inputs = self.rules.inputs * micro_batch if is_first and batch.accumulation > 1 else 0
        augmenting = self.rules.augmenting * micro_batch if is_first else 0
        going_back = round(self._going_back(batch, under_way)) + inputs * (batch.accumulation - under_way)
        pool = going_back - states.gradients if self.rules.graphs else 0
        return replace(
            states,
            activations=round(activations),
            going_back=going_back + augmenting,
            updating=states.updating + inputs * batch.accumulation + pool + augmenting,
        )

    def on_device(self, batch: BatchSizes) -> RankMemory:
        """The part of it in the accelerator's memory."""
        return on_device(self.of(batch), self.rules)

    def _going_back(self, batch: BatchSizes, under_way: int) -> float:
        """Activations, temporary memory and gradients, at the fullest moment of loss and backward pass.

        Args:
            batch: arithmetic.
            under_way: micro-batches whose activations are held.
        """
        rules, whole = self.rules, sum(run.trained for run in self._runs)
        share = whole / rules.layout.dp if rules.stage >= 2 else whole
        # Held from the start: flat gradients that no update frees, and those of earlier passes.
        frees = rules.stage == 0 or (rules.stage == 2 and rules.layout.dp > 1)
        held = (rules.flat and (rules.graphs or not frees)) or rules.stage == 3 or batch.accumulation > under_way
        waiting, done = self.waiting, 0
        fullest = rules.of_gradient * (share if held else 0) + batch.micro_batch * waiting * under_way
        fullest += rules.loss(batch.micro_batch) + rules.of_type * self._stays
        width = _AUTOCAST_OF_FP32 if rules.autocast else 1.0  # over what layers make in the types that they have
        made_by = functools.cache(lambda back: back.of(batch.micro_batch) * width)  # blocks that are alike share one
        for run in reversed(self._runs):
            so_far = rules.of_gradient * (share if held else min(done, share))
            if rules.flat:  # a pipeline collects them behind the pass
                so_far += rules.of_type * (done if rules.layout.pp > 1 else min(done, self._bucket))
            elif rules.stage == 2 and batch.accumulation > under_way:  # added when all of it is there
                so_far += rules.of_gradient * min(done, share)
            made = max(made_by(layer.back) for layer in run.layers)
            forward_only = all(layer.runs_forward_only for layer in run.layers)  # nothing waits while they run
            images = self.waiting * (under_way - 1) + run.again + (0 if forward_only else waiting)
            if rules.stage == 3 and rules.layout.dp > 1:
                sizes = [layer.parameters for layer in run.layers]
                made += rules.of_type * (self._stays + sum(sizes) - sum(map(self._kept, sizes)))
            fullest = max(fullest, so_far + made + batch.micro_batch * images)
            waiting -= run.waiting
            done += run.trained
        return fullest


def memory_by_stage(layers: Sequence[LayerMemory], bounds: Sequence[int], rules: MemoryRules) -> list[StageMemory]:
    """The memory of a rank of each pipeline stage.

    Args:
        layers: all of a model.
        bounds: stage i has the layers from bounds[i] up to, and without, bounds[i + 1].
        rules: of the run.
    """
    parts = list(itertools.pairwise(bounds))
    return [StageMemory(layers[start:stop], len(parts) - i, rules) for i, (start, stop) in enumerate(parts)]


def on_device(memory: RankMemory, rules: MemoryRules) -> RankMemory:
    """The part of it in the accelerator's memory."""
    return replace(memory, **dict.fromkeys(rules.in_host, 0))
