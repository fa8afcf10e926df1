"""LAMB, LARS, Muon, layer-wise decay and the moving average are timm's, in every layout."""

import oracle
import per_parameter as timm_side
import pytest
import torch
from curves import assert_same_curve, train_in
from pairwise import cover
from per_parameter import NUM_IMAGES, command, furthest
from safetensors.torch import load_file

# A norm follows the weights, whose rounding the trust ratios carry on: it may differ as much as they do.
LOSS_RTOL, NORM_RTOL, WEIGHT_RTOL = 1e-5, 1e-4, 1e-4
LAYOUTS = [
    (pp, dp, tp, stage)
    for pp in (1, 2, 4)
    for dp in (1, 2, 4)
    for tp in (1, 2)
    for stage in ((0, 1, 2, 3) if pp == 1 else (0, 1))
    if pp * dp * tp <= 8
]


def name(layout):
    """A test's id."""
    return "pp{}-dp{}-tp{}-zero{}".format(*layout)


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """32 CIFAR-10 images and random initial weights."""
    folder = tmp_path_factory.mktemp("per-parameter")
    oracle.cifar_folder(real_images / "cifar10" / "train.tar", folder, NUM_IMAGES, "train")
    oracle.write_weights(folder / "weights.safetensors", num_classes=10, **timm_side.KWARGS)
    return folder


@pytest.fixture(scope="module")
def plain(cifar):
    """timm's curve, weights and average, by optimizer."""
    return {kind: timm_side.train_plainly(cifar, kind) for kind in timm_side.BLOCKS}


def train(ranks, folder, kind, layout, output, **changes):
    """Our run: its rows, final weights and average."""
    pp, dp, tp, _ = layout
    rows = train_in(ranks, pp * dp * tp, command(folder, kind, layout, output, **changes))
    return rows, load_file(str(output / "model.safetensors")), load_file(str(output / "ema.safetensors"))


def assert_same(ours, theirs):
    """Curve, weights and average."""
    assert_same_curve(theirs[0], ours[0], rtol=LOSS_RTOL, keys=("loss",))
    assert_same_curve(theirs[0], ours[0], rtol=NORM_RTOL, keys=("grad_norm",))
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        part, tensor = furthest(a, b)
        assert part <= WEIGHT_RTOL, f"{tensor}: {part:.2e} relative"


@pytest.mark.parametrize("kind", timm_side.BLOCKS)
def test_the_reference_moves_and_is_clipped(cifar, plain, kind):
    """A reference that stands still, or whose clipping does nothing, proves nothing."""
    rows, weights, average = plain[kind]
    assert min(row["grad_norm"] for row in rows) > 3 * timm_side.CLIP
    assert abs(rows[-1]["loss"] - rows[0]["loss"]) > 0.02 * rows[0]["loss"]
    assert furthest(weights, load_file(str(cifar / "weights.safetensors")))[0] > 100 * WEIGHT_RTOL
    assert furthest(weights, average)[0] > 100 * WEIGHT_RTOL


def cases():
    """Every pair of degrees and stages with LAMB, in as many ranks as they can have; every pair of these and an
    optimizer with the others, which share its map, in as few; all of them if asked for.
    """
    product = [
        {"kind": kind, **dict(zip(("pp", "dp", "tp", "stage"), layout, strict=True))}
        for kind in ("lamb", "lars", "layer decay", "muon")
        for layout in LAYOUTS
    ]
    largest_first = product[::-1]
    chosen = cover([case for case in largest_first if case["kind"] == "lamb"])
    others = [case for case in product if case["kind"] != "lamb"]
    chosen += cover(sorted(others, key=lambda case: case["pp"] * case["dp"] * case["tp"]))
    for case in product:
        kind, *layout = case.values()
        marks = () if case in chosen else pytest.mark.exhaustive
        yield pytest.param(kind, tuple(layout), id=f"{kind}-{name(layout)}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), list(cases()))
def test_equals_timm(ranks, cifar, plain, kind, layout, tmp_path):
    """A norm over the wrong ranks, a segment off by one, padding that counts, an average of the wrong weights."""
    assert_same(train(ranks, cifar, kind, layout, tmp_path / "run"), plain[kind])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stage"), [("lamb", 1), ("lamb", 2), ("lamb", 3), ("muon", 2)])
def test_offloaded(ranks, cifar, plain, kind, stage, tmp_path):
    """An offloaded optimizer that is not told where parameters lie."""
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 100_000}
    ours = train(ranks, cifar, kind, (1, 2, 1, stage), tmp_path / "run", precision={"zero_optimization": zero})
    assert_same(ours, plain[kind])


OPTIONS = [
    ("lamb", {"trust_clip": True, "lr": 0.05}, None),
    ("lamb", {"always_adapt": True}, None),
    ("lamb", {"decoupled_decay": True}, None),
    ("lamb", {"decoupled_decay": True}, 0.7),
    ("lamb", {"grad_averaging": False}, None),
    ("lamb", {"bias_correction": False}, None),
    ("lamb", {"betas": [0.8, 0.95]}, 0.7),
    ("lars", {"nesterov": True}, None),
    ("lars", {"momentum": 0.0, "always_adapt": True}, None),
    ("lars", {"trust_clip": True, "trust_coeff": 2.0, "lr": 0.1}, 0.7),
    ("lars", {"dampening": 0.3}, 0.7),
    ("sgd", {"nesterov": True}, 0.7),
    ("muon", {"nesterov": True, "momentum": 0.8}, 0.7),
    ("muon", {"conv_mode": "batched", "adjust_lr_fn": "original", "fallback_lr_scale": 0.1}, None),
    ("muon", {"fallback_list": ["head.*", "blocks.1.*"], "betas": [0.8, 0.9], "scale_eps": True}, None),
    ("muon", {"ns_coefficients": "polar_express", "ns_steps": 3, "safety_factor": 1.01, "adjust_lr_fn": None}, 0.7),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "params", "layer_decay"), OPTIONS, ids=str)
def test_options_equal_timm(ranks, cifar, kind, params, layer_decay, tmp_path):
    """An option that is read otherwise than timm reads it, and layer-wise decay of another optimizer."""
    theirs = timm_side.train_plainly(cifar, kind, layer_decay=layer_decay, **params)
    words = ["--layer-decay", layer_decay] if layer_decay else []
    # Two ranks are enough to read an option wrong. Muon's are about whole matrices, which slices have not.
    layout = (1, 1, 2, 1) if kind == "muon" or layer_decay else (1, 2, 1, 1)
    ours = train(ranks, cifar, kind, layout, tmp_path / "run", params=params, words=words)
    assert_same(ours, theirs)


def train_naively(argv):
    """On a rank: LAMB as it would be without the map, one trust ratio for everything that an optimizer sees."""
    from ds_vit.optim.segmented import SegmentedTensors
    from ds_vit.train import main

    def flat_norms(self, *lists):
        norms = [torch.linalg.vector_norm(torch.cat([t.view(-1) for t in tensors])) for tensors in lists]
        return torch.stack(norms)[:, None].expand(-1, len(self.names))

    SegmentedTensors.norms = flat_norms
    return main(argv)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_flat_trust_ratio_is_seen(ranks, cifar, plain, stage, tmp_path, monkeypatch):
    """The comparison must fail for what an optimizer under ZeRO does by itself (DeepSpeed #88)."""
    monkeypatch.setattr("curves.train_main", train_naively)
    ours = train(ranks, cifar, "lamb", (1, 1, 1, stage), tmp_path / "run")
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same(ours, plain["lamb"])


def train_slices_apart(argv):
    """On a rank: Muon as it would be if each tensor-parallel rank orthogonalized what it has."""
    from ds_vit.optim.matrices import WholeMatrices
    from ds_vit.train import main

    def apply_(self, tensors, work):
        for segment in self._own:
            own = segment.of(tensors[self._number[segment.block]].view(-1))
            own.copy_(work(own.view(segment.tp_slice.local_shape)).reshape(-1))

    WholeMatrices.apply_ = apply_
    return main(argv)


def test_orthogonal_slices_are_seen(ranks, cifar, plain, tmp_path, monkeypatch):
    """The comparison must fail for slices that are orthogonalized one by one."""
    monkeypatch.setattr("curves.train_main", train_slices_apart)
    ours = train(ranks, cifar, "muon", (1, 1, 2, 1), tmp_path / "run")
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same(ours, plain["muon"])


def test_bf16_iterations_stay_near(ranks, cifar, plain, tmp_path):
    """An ns_dtype that is not taken; more than the rounding of bf16, which the iteration makes larger."""
    params = {"ns_dtype": "bfloat16"}
    theirs = timm_side.train_plainly(cifar, "muon", **params)
    ours = train(ranks, cifar, "muon", (1, 2, 2, 1), tmp_path / "run", params=params)
    assert_same_curve(theirs[0], ours[0], rtol=5e-3, keys=("loss",))
    assert_same_curve(theirs[0][:2], ours[0][:2], rtol=LOSS_RTOL, keys=("loss",))
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(plain["muon"][0][:2], ours[0][:2], rtol=LOSS_RTOL, keys=("loss",))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("blocks", ["45", "345"])
def test_stages_with_different_groups(ranks, cifar, tmp_path, blocks, stage):
    """Pipeline stages that wait for each other in the norm of a group, or in a checkpoint of what one of them has."""
    # The second stage has three groups and the first two: decayed weights that AdamW updates are on the second alone.
    # With all of its blocks left to AdamW it has two again, and no momentum of Muon's.
    params = {"fallback_list": ["head.*", f"blocks.[{blocks}].*"], "fallback_lr_scale": 0.1}
    words = ["--pp-partition", "0,4,8", "--checkpoint-interval", 5]
    ours = train(ranks, cifar, "muon", (2, 2, 1, stage), tmp_path / "run", params=params, words=words)
    assert_same(ours, timm_side.train_plainly(cifar, "muon", **params))
    files = sorted(path.stem for path in (tmp_path / "run" / "checkpoints" / "step-00000005").glob("optimizer-*"))
    assert files == ["optimizer-exp_avg", "optimizer-exp_avg_sq", "optimizer-momentum_buffer"]


def measure(argv):
    """On a rank: what the moving average and a LAMB step cost, counted."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from zero_layouts import start

    from ds_vit.optim.ema import Ema

    engine = start(argv)
    zero_map = engine.zero_map
    base = zero_map.base
    calls = []
    all_reduce = torch.distributed.all_reduce

    def counting(tensor, *args, **kwargs):
        calls.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *args, **kwargs)

    for group, shards in enumerate([[s for s in zero_map.shards if s.group == g] for g in (0, 1)]):
        base.param_groups[group]["params"] = [shard.parameter for shard in shards]
    for shard in zero_map.shards:
        shard.parameter.grad = torch.ones_like(shard.tensor).view_as(shard.parameter)
    torch.distributed.all_reduce = counting
    base.step()
    torch.distributed.all_reduce = all_reduce
    adapted = sum(len(s.names) for s in zero_map.shards if base.param_groups[s.group]["weight_decay"])
    ratios = base.trust_ratios()

    ema = Ema(zero_map, 0.9)
    held = sum(t.untyped_storage().nbytes() for t in ema.tensors)
    elements = sum(segment.length for shard in zero_map.shards for segment in shard.segments)
    padding = sum(shard.tensor.numel() for shard in zero_map.shards) - elements

    class Largest(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.clone.default:
                self.made = max(self.made, out.numel())
            return out

    Ema._CHUNK = 1000
    with Largest() as largest, ema.swapped():
        pass
    groups = len(base.param_groups)
    engine.close()
    return calls, adapted, len(ratios), held, elements, padding, largest.made, groups


@pytest.mark.parametrize("stage", [1, 3])
def test_cost(ranks, cifar, stage, tmp_path):
    """One collective of 2·P numbers a step, 4 bytes an element of the average, no copy of a shard to evaluate it."""
    from zero_layouts import words

    argv = words(cifar, stage, {"optimizer": timm_side.BLOCKS["lamb"]}, tmp_path / "config.json")
    for calls, adapted, ratios, held, elements, padding, largest, groups in ranks.run(2, measure, argv):
        assert calls == [2 * adapted * 4]
        assert ratios == adapted
        assert held == 4 * (elements + padding)
        assert padding < 64 + 2 * adapted * (stage == 3) * 2
        assert 0 < largest <= 1000
        assert groups <= 2


def by_both_ways(argv):
    """On a rank: the arithmetic by segments with one call for all of them, and with a factor for every element."""
    from zero_layouts import start

    from ds_vit.optim.segmented import SegmentedTensors

    engine = start(argv)
    results = []
    for one_call in (True, False):
        tensors = SegmentedTensors(engine.zero_map, [s.parameter for s in engine.zero_map.shards])
        tensors._one_call = one_call
        factors = torch.rand(len(tensors.names), generator=torch.Generator().manual_seed(1))
        flats = [torch.arange(s.tensor.numel(), dtype=torch.float32) for s in engine.zero_map.shards]
        others = [flat.flip(0) for flat in flats]
        tensors.mul_(flats, factors)
        tensors.addcmul_(flats, others, factors)
        tensors.lerp_(flats, others, factors)
        views = tensors.views(flats)
        results.append(torch.cat(views) if views else torch.zeros(0))
    engine.close()
    return torch.equal(*results), results[0].numel()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_both_ways_of_arithmetic_agree(ranks, cifar, stage, tmp_path):
    """The GPU's way, on the CPU: a factor that lands on a neighbour."""
    from zero_layouts import words

    for same, elements in ranks.run(2, by_both_ways, words(cifar, stage, {}, tmp_path / "config.json")):
        assert same
        assert elements > 1000
