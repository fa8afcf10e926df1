"""--img-size-schedule: the size of a step, timm's own numbers at each, one curve in every layout and over a resume."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from curves import assert_same_curve, read_rows, train_in, train_rows
from project import ROOT
from runs import resolved

from ds_vit.config.units import parse_schedule
from ds_vit.data.image_sizes import ImageSizes, size_schedule
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.layers import take_apart
from ds_vit.models.sequential import SequentialViT, SizeSwitch
from ds_vit.models.zoo import ModelSpec, create_model
from ds_vit.planner.counting import Flops
from ds_vit.training.resolve.record import identity_of, rates_of
from ds_vit.training.resume import Resume, check_same_run
from ds_vit.training.step_log import StepLog

CONFIGS = ROOT / "ds_configs"
SCHEDULE = "8:0,12:0.4,16:0.8"  # five steps: 8 8 12 12 16
RUN = [
    *("--dataset", "digits", "--workers", "0", "--max-steps", "5", "--log-interval", "1", "--warmup-steps", "1"),
    *("--img-size-schedule", SCHEDULE, "--checkpoint-interval", "3", "--reprob", "0.5", "--mixup", "0.8"),
    *("--cutmix", "1.0", "--keep-checkpoints", "0", "-vb", "60"),
]
KWARGS = ("--model-kwargs", "patch_size=4", "embed_dim=32", "depth=3", "num_heads=2")
VIT = ("--model", "vit_tiny_patch16_224", *KWARGS)
ROPE = ("--model", "vit_small_patch16_rope_mixed_224", *KWARGS)


def config(stage):
    return ("--deepspeed_config", CONFIGS / f"cpu_zero{stage}_fp32.json")


def test_the_size_of_a_step():
    """A boundary that is off by one, by rounding too."""
    sizes = size_schedule("128:0,160:0.4,224:0.8", 10)
    assert [sizes.at(step) for step in range(10)] == [128] * 4 + [160] * 4 + [224] * 2
    assert size_schedule("8:0,16:0.1", 30).firsts == (0, 3)  # 0.1 * 30 is a bit over 3


def test_sizes_that_are_drawn():
    """A size that depends on more than seed and step, or that is never drawn."""
    sizes = ImageSizes((8, 12, 16), seed=3)
    drawn = [sizes.at(step) for step in range(600)]
    assert all(150 < drawn.count(size) < 250 for size in sizes.sizes)
    assert drawn != [ImageSizes((8, 12, 16), seed=4).at(step) for step in range(600)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("128", "takes SIZE:SHARE,"),
        ("128:0,large:0.5", "takes SIZE:SHARE,"),
        ("128:0.1,224:0.5", "must begin with 0 and grow"),
        ("128:0,160:0.5,224:0.5", "must begin with 0 and grow"),
        ("128:0,224:1", "all below 1"),
        ("224:0,128:0.5", "no other may be larger"),
        ("0:0,128:0.5", "a size must be at least"),
        ("128:0,224:nan", "all below 1"),
    ],
)
def test_schedules_that_are_refused(text, said):
    """A run that ends at another size than it is evaluated at, or that never trains at one."""
    with pytest.raises(UserError, match=said):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*VIT, "--img-size", "8"], "--img-size is 8"),
        ([*VIT, "--compile"], "--compile makes one graph of fixed shapes"),
        ([*VIT, "--max-steps", "2"], "2 steps are too few"),
        (
            ["--model", "vit_tiny_patch16_224"],
            "images of 8 pixels are no multiple of the patch size 16 .*; the nearest for --img-size-schedule is 16",
        ),
        (["--model", "vit_tiny_r_s16_p8_224", "--img-size-schedule", "32:0,64:0.5"], "takes one size;"),
        ([*VIT, "--train-img-sizes", "8", "16"], "keep one"),
        ([*VIT, "--img-size-schedule", "", "--train-img-sizes", "16"], "two sizes or more"),
        ([*VIT, "--task", "mae", "--mixup", "0", "--cutmix", "0"], "positions are of one size"),
    ],
)
def test_runs_that_are_refused_before_any_rank_starts(argv, said):
    """What would fail, or train otherwise than was asked for, on the ranks."""
    with pytest.raises(UserError, match=said):
        resolved([*RUN, *config(1), *argv])


def test_a_size_stays_at_its_step_when_a_run_goes_on(monkeypatch):
    """Shares of another number of steps: images that shrink again in the middle of a run, without a word."""
    run = [*RUN, *config(1), *VIT, "--sched", "constant"]
    plans = [resolved([*run, "--max-steps", steps]) for steps in (5, 10)]
    first, second = map(identity_of, plans)
    state = {"run": first, "config": {}}
    resume = Resume(SimpleNamespace(path="step-5", state=state, kinds=()), falls_back=False)
    check_same_run(resume, first, {})
    with pytest.raises(UserError, match=r"12 from step 3, .* there and .* 12 from step 5, .*--allow-schedule-change"):
        check_same_run(resume, second, {})
    # As the command line asks for it.
    state |= {"schedule": rates_of(plans[0]), "global_batch": plans[0].batch.global_batch}
    monkeypatch.setattr("ds_vit.training.resolve.find_resume", lambda config: resume)
    words = ["--max-steps", 10, "--resume", "step-5", "--allow-schedule-change"]
    [note, *_] = resolved([*run, *words]).output.notes
    assert "img size schedule: 8 from step 1, 12 from step 3" in note


def test_flops_are_those_of_all_steps_of_a_row():
    """A rate over many steps beside the cost of the last one."""
    log = StepLog.__new__(StepLog)
    log.inputs, log._since = SimpleNamespace(data=SimpleNamespace(sizes=size_schedule("8:0,16:0.5", 4))), 1
    log.flops = {8: Flops(1, 3), 16: Flops(4, 12)}
    assert log._training_flops(4) == (3 + 12 + 12) / 3
    assert log._training_flops(5) == 12


@pytest.mark.slow
def test_crops_on_the_device_have_the_size_of_the_step(ranks):
    """Images that are made at the last size whatever the step's."""
    run = [*RUN, *config(1), *VIT, "-b", 8, "--max-steps", 5, "--epochs", 1]
    on_cpu, on_device = (train_in(ranks, 1, [*run, "--augment-on", where]) for where in ("cpu", "device"))
    assert_same_curve(on_cpu, on_device, rtol=2e-3)


@pytest.mark.parametrize(
    "name",
    [
        *("vit_tiny_patch16_224", "vit_base_patch16_siglip_224", "vit_small_patch14_reg4_dinov2"),
        *("vit_small_patch16_rope_mixed_224", "vit_small_patch16_dinov3", "eva02_tiny_patch14_224"),
    ],
)
def test_each_size_is_timms_own(name):
    """Positions resampled otherwise than timm does, a rotary table of another grid, traces of a size at the last."""
    kwargs = {"patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 2}
    spec = ModelSpec(name, num_classes=5, img_size=16, model_kwargs=kwargs)
    torch.manual_seed(0)
    model = create_model(spec, device="cpu").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    layers = SequentialViT(take_apart(model)).eval()
    import timm

    theirs = timm.create_model(name, num_classes=5, img_size=16, dynamic_img_size=True, **kwargs).eval()
    theirs.load_state_dict(model.state_dict())
    images = {size: torch.randn(3, 3, size, size) for size in (8, 12, 16)}
    keys = torch.arange(3)
    before = layers(images[16], keys)
    sizes = SizeSwitch(layers.layers, (4, 4))
    for size in (8, 12, 16, 8):
        sizes.set(size)
        torch.testing.assert_close(layers(images[size], keys), theirs(images[size]), rtol=1e-5, atol=1e-5)
    sizes.set(16)
    assert torch.equal(layers(images[16], keys), before)


@pytest.fixture(scope="module")
def one(ranks, tmp_path_factory):
    """The run on one rank, its folder: (of a table of positions, of learned rotary frequencies)."""
    folder = tmp_path_factory.mktemp("one")
    for name, model in (("vit", VIT), ("rope", ROPE)):
        train_in(ranks, 1, [*RUN, *model, *config(0), "-b", 16, "--output", folder / name])
    return folder


# model: ranks, ZeRO stage, flags
LAYOUTS = [
    (VIT, 2, 2, ["-b", 16, "--tp", 2, "--sequence-parallel"]),
    (VIT, 2, 3, ["-b", 4, "--grad-accum-steps", 2, "--grad-checkpointing"]),
    (ROPE, 2, 1, ["-b", 8, "--grad-accum-steps", 2, "--pp", 2]),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("model", "world", "stage", "cut"), LAYOUTS, ids=str)
def test_every_layout_has_the_curve_of_one_rank(ranks, one, model, world, stage, cut):
    """Shapes of the size before between stages or tensor ranks; other images; a table of positions that is replaced."""
    rows = train_in(ranks, world, [*RUN, *model, *config(stage), *cut])
    assert_same_curve(read_rows(one / ("vit" if model is VIT else "rope")), rows, rtol=1e-5)


def test_it_goes_on_in_another_layout(ranks, one):
    """A size that is counted from the process's start; a checkpoint that knows another grid."""
    checkpoint = one / "vit" / "checkpoints" / "step-00000003"
    argv = [*RUN, *VIT, *config(1), "-b", 8, "--grad-accum-steps", 2, "--pp", 2, "--resume", checkpoint]
    rows = train_in(ranks, 2, argv)
    assert [row["step"] for row in train_rows(rows)] == [4, 5]
    whole = [row for row in read_rows(one / "vit") if row["step"] > 3]
    assert_same_curve(whole, rows, rtol=1e-5)
    with pytest.raises(UserError, match="give the same --img-size-schedule"):
        resolved([*argv, "--img-size-schedule", "8:0,16:0.8"], world=2)


@pytest.mark.slow
def test_drawn_sizes_in_another_layout(ranks, tmp_path):
    """Ranks that draw each for itself, or by what was done since the process began."""
    argv = [*RUN, *VIT, "--img-size-schedule", "", "--train-img-sizes", 16, 8, 12]
    whole = train_in(ranks, 1, [*argv, *config(1), "-b", 16, "--output", tmp_path / "one"])
    drawn = ImageSizes((8, 12, 16), seed=42)
    assert len({drawn.at(step) for step in range(3, 5)}) + len({drawn.at(step) for step in range(3)}) > 2
    checkpoint = tmp_path / "one" / "checkpoints" / "step-00000003"
    cut = ["-b", 8, "--grad-accum-steps", 2, "--tp", 2, "--resume", checkpoint]
    rows = train_in(ranks, 2, [*argv, *config(2), *cut])
    assert_same_curve([row for row in whole if row["step"] > 3], rows, rtol=1e-5)


def test_figures_are_those_of_the_size(one):
    """TFLOP/s of images that are larger than they were; an evaluation of smaller images than the model's."""
    rows = train_rows(read_rows(one / "vit"))
    flops = [row["tflops_per_accelerator"] / row["images_per_second"] for row in rows]
    assert math.isclose(flops[0], flops[1])
    assert math.isclose(flops[2], flops[3])
    assert flops[0] < flops[2] < flops[4]
    plan = resolved([*RUN, *VIT, *config(0), "-b", 16])
    assert plan.model.task.image.img_size == (16, 16)
    assert plan.model.task.fields(training=False)[0].shape == (3, 16, 16)
