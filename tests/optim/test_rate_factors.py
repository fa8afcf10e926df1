"""Rates by parameter against a plain loop with a parameter group for each: layer decay, a task's factors, held ones."""

import functools
import math

import oracle
import pytest
import torch
from curves import assert_same_curve, train_in, train_rows
from project import write_config
from runs import DIGITS, refusal
from safetensors.torch import load_file
from seam_tasks import WithRates

from ds_vit.models.zoo import ModelSpec, create_model
from ds_vit.optim.rate_factors import layer_scales, rate_factors
from ds_vit.tasks.task import cosine

KWARGS = oracle.DEEP_KWARGS | {"depth": 3}
LAYER_DECAY, STEPS = 0.7, 6
# Optimizer; pp, dp, tp and ZeRO stage.
CASES = [
    ("adamw", (1, 2, 1, 3)),
    ("lamb", (1, 1, 2, 1)),
    ("sgd", (1, 2, 1, 0)),
    ("muon", (1, 2, 1, 2)),
    ("lars", (1, 2, 1, 1)),
    ("sgd", (2, 1, 1, 1)),
    ("adamw", (1, 1, 2, 3)),
    ("muon", (1, 1, 2, 3)),
    ("lamb", (1, 2, 1, 3)),
]


def plain_optimizer(kind, model, held_steps=WithRates.HELD_EPOCHS, *, with_state=True):
    """timm's optimizer with a group for each parameter, whose rate and decay are set before each step."""
    optimizer = oracle.timm_optimizer(kind, model, layer_decay=LAYER_DECAY)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer.param_groups = [
        {**group, "params": [parameter], "name": names[parameter], "base": (group["lr"], group["weight_decay"])}
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    steps = iter(range(1, STEPS + 1))

    def set_rates(*_):
        step = next(steps)
        for group in optimizer.param_groups:
            factor = WithRates.PATCH_FACTOR if group["name"].startswith("patch_embed.") else 1.0
            held = step <= held_steps and group["name"].startswith("head.")
            lr, decay = group["base"]
            group["lr"] = 0.0 if held else lr * factor
            if decay:
                group["weight_decay"] = cosine(step, oracle.WEIGHT_DECAY, WithRates.WEIGHT_DECAY_END, STEPS)
            if held and not with_state:
                group["params"][0].grad = None

    optimizer.register_step_pre_hook(set_rates)
    return optimizer


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """32 CIFAR-10 images, a batch an epoch, and random initial weights."""
    return oracle.cifar_with_weights(real_images, tmp_path_factory.mktemp("rates"), **KWARGS)


@pytest.fixture(scope="module")
def plain(cifar):
    """The plain loop's rows of an optimizer; the arguments are those of `plain_optimizer`."""

    @functools.cache
    def rows(kind, **how):
        make = functools.partial(plain_optimizer, **how)
        return oracle.train_plainly(cifar, kind, make, model_kwargs=KWARGS, steps=STEPS).rows

    return rows


def train(ranks, folder, kind, layout, output, *words):
    """The rows of a run in a layout; STEPS steps unless `words` say otherwise."""
    more = ("--task", "seam_tasks:WithRates", "--layer-decay", LAYER_DECAY, "--max-steps", STEPS, *words)
    argv = oracle.command(folder, kind, layout, output, *more, model_kwargs=KWARGS)
    return train_rows(train_in(ranks, math.prod(layout[:3]), argv))


def assert_same(expected, rows):
    """The rounding of the weights that norms and orthogonalization carry on shows in the gradient norm."""
    assert_same_curve(expected, rows, rtol=1e-5, keys=("loss",))
    assert_same_curve(expected, rows, rtol=1e-4, keys=("grad_norm",))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "layout"), CASES, ids=str)
def test_rates_are_those_of_parameter_groups(ranks, cifar, plain, tmp_path, kind, layout):
    # Catches: a factor that misses a shard, a held parameter that decays, a schedule that is one step off.
    assert_same(plain(kind), train(ranks, cifar, kind, layout, tmp_path / "run"))


def test_held_parameters_stay_to_the_bit(ranks, cifar, tmp_path):
    # Catches: weights that a step and the way back round.
    train(ranks, cifar, "adamw", (1, 2, 1, 1), tmp_path / "run", "--max-steps", 3, "--epochs", STEPS)
    begun, ended = load_file(str(cifar / "weights.safetensors")), load_file(str(tmp_path / "run" / "model.safetensors"))
    same = {name for name in begun if torch.equal(begun[name], ended[name])}
    assert same == {"head.weight", "head.bias"}


@pytest.mark.slow
def test_a_resumed_run_holds_on(ranks, cifar, plain, tmp_path):
    # Catches: epochs or the horizon counted from the resumption.
    first = ("--max-steps", 2, "--epochs", STEPS, "--checkpoint-interval", 2)
    train(ranks, cifar, "adamw", (1, 2, 1, 2), tmp_path / "run", *first)
    rows = train(ranks, cifar, "adamw", (1, 1, 2, 1), tmp_path / "run", "--epochs", STEPS, "--resume", "auto")
    assert_same(plain("adamw"), rows)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_state_that_stands_still_would_be_seen(plain, kind):
    # A parameter that is frozen for three steps has other moments after them than one at a rate of 0.
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same(plain(kind), plain(kind, with_state=False))


def test_layers_of_a_model_with_further_towers():
    # Catches: a frozen teacher that counts as a layer above the head, a head in another tower below the blocks.
    spec = ModelSpec("vit_tiny_patch16_224", num_classes=0, img_size=32, model_kwargs={"depth": 2})
    alone = layer_scales(create_model(spec, for_training=False), 0.5)
    assert (alone["patch_embed.proj.weight"], alone["blocks.0.norm1.weight"], alone["norm.weight"]) == (0.25, 0.5, 1.0)
    whole = create_model(spec, for_training=False)
    whole.teacher = create_model(spec, for_training=False).requires_grad_(False)
    taught = layer_scales(whole, 0.5)
    assert {name: scale for name, scale in taught.items() if not name.startswith("teacher.")} == alone
    whole.projector = torch.nn.Linear(2, 2, device="meta")
    scales = layer_scales(whole, 0.5)
    assert scales["projector.weight"] == 1.0
    assert {name: scales[name] for name in alone} == {name: scale / 2 for name, scale in alone.items()}


def test_factors_multiply():
    model = create_model(ModelSpec("vit_tiny_patch16_224", 10, 32, model_kwargs={"depth": 2}), for_training=True)
    assert rate_factors(model, None, {}) == rate_factors(model, 1.0, {"head.bias": 1.0}) == {}
    factors = rate_factors(model, 0.5, {"patch_embed.proj.weight": 0.2})
    assert factors["patch_embed.proj.weight"] == pytest.approx(0.2 * 0.5**3)
    assert (factors["pos_embed"], factors["head.weight"]) == (0.5**3, 1.0)
    with pytest.raises(AssertionError, match="no parameters: "):
        rate_factors(model, 0.5, {"patch_embed.weight": 0.2})


def test_an_optimizer_whose_update_is_not_proportional_is_refused(capsys, cifar, tmp_path):
    lion = {"optimizer": {"type": "Lion", "params": {"lr": 0.1, "corrected_weight_decay": True}}}
    words = ("--task", "seam_tasks:WithRates")
    argv = oracle.command(cifar, "sgd", (1, 1, 1, 1), tmp_path / "run", *words, blocks=lion, model_kwargs=KWARGS)
    line = refusal(capsys, argv)
    assert (
        "--task seam_tasks:WithRates, which has rates by parameter, does not work with corrected_weight_decay of Lion"
        in line
    )


def test_a_schedule_of_no_weight_decay_is_refused(capsys, tmp_path):
    config = write_config(tmp_path / "ds.json", 1, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    words = ("--model-kwargs", "patch_size=4", "embed_dim=24", "depth=1", "num_heads=2", "--local-crops-size", 8)
    words += ("--task", "dino", "--weight-decay-end", 0.4, "--deepspeed_config", config, "--output", tmp_path / "run")
    assert "--weight-decay-end 0.4 has no effect: there is no weight decay to begin" in refusal(
        capsys, [*DIGITS, *words]
    )
