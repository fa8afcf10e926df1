"""The task `bridgetower` against transformers' own model and loss, in every layout."""

import itertools
import json
from unittest import mock

import pytest
import torch
from bridge_towers import write_folder
from curves import assert_same_curve, largest_deviation, read_rows, train_in
from pairwise import cover
from project import write_config
from runs import refusal, resolved
from safetensors.torch import load_file

from ds_vit.models.bridge_tower import create_bridge_tower
from ds_vit.models.param_groups import no_weight_decay_names

transformers = pytest.importorskip("transformers", minversion="5")

GLOBAL_BATCH, STEPS, RTOL = 24, 3, 1e-5
SGD = {"type": "SGD", "params": {"lr": 0.0005}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.0005, "eps": 1e-6, "weight_decay": 0.05}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model without dropout, except in attention."""
    return write_folder(tmp_path_factory.mktemp("pretrained"))


def command(output, folder, dp, accumulation, stage, *words, optimizer=SGD, clip=0.0):
    """The command line of a run."""
    config = write_config(output.with_suffix(".json"), stage, optimizer=optimizer, gradient_clipping=clip)
    argv = ["--task", "bridgetower", "--model", f"local-dir:{folder}", "--pretrained", "--dataset", "glyphs"]
    argv += ["--context-length", 24, "--workers", 0, "--val-split", "", "--epochs", 1, "--max-steps", STEPS]
    argv += ["--sched", "constant", "--warmup-steps", 0, "--log-interval", 1, "--checkpoint-interval", 0]
    argv += ["-b", GLOBAL_BATCH // dp // accumulation, "--grad-accum-steps", accumulation]
    return [str(word) for word in [*argv, "--deepspeed_config", config, "--output", output, *words]]


def train(ranks, output, folder, dp, *layout, **settings):
    """The rows of a run; `layout` is accumulation, ZeRO stage and further flags."""
    return train_in(ranks, dp, command(output, folder, dp, *layout, **settings))


def test_weight_decay_is_that_of_transformers_except_for_vectors(folder):
    # Catches: position embeddings that do not decay, as timm's, or vectors that do.
    model = create_bridge_tower(f"local-dir:{folder}")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = trained.keys() - no_weight_decay_names(model)
    by_trainer = trained.keys() & {*transformers.Trainer.get_decay_parameter_names(None, model)}
    assert decayed == {name for name in by_trainer if trained[name].ndim > 1}
    assert sum("position_embedding" in name for name in decayed) == 2
    assert {"class_embedding", "logit_scale"} <= {name.rpartition(".")[2] for name in by_trainer - decayed}


# ---- against transformers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_transformers(folder, tmp_path_factory):
    """Rows and weights of transformers' model under torch's SGD, each global batch in one piece."""
    from ds_vit.data.device import finish_images, finish_texts
    from ds_vit.data.loader import train_loader
    from ds_vit.training.build import input_config

    run = resolved(command(tmp_path_factory.mktemp("alone") / "run", folder, 1, 1, 0))
    task, inputs = run.model.task, input_config(run)
    model = transformers.BridgeTowerForContrastiveLearning.from_pretrained(folder)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), **SGD["params"])
    shared = {"order": inputs.order, "share": inputs.share, "image": task.image, "augment": task.augment}
    loader = train_loader(
        inputs.train_source, **shared, mix=task.mix, stop_step=STEPS, tokenizer=task.tokenizer, load_targets=False
    )
    rows = []
    for step, batch in enumerate(loader, start=1):
        ids = finish_texts(batch, device="cpu")
        images = finish_images(batch, task.image, task.augment, device="cpu")
        mask = (ids != task.tokenizer.pad_id).long()
        loss = model.train()(input_ids=ids, attention_mask=mask, pixel_values=images, return_loss=True).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
        optimizer.step()
        rows.append({"kind": "train", "step": step, "loss": loss.item(), "grad_norm": norm.item()})
    return rows, {name: parameter.detach() for name, parameter in model.named_parameters()}


FACTORS = {"dp": [1, 2, 3], "accumulation": [1, 4], "stage": [0, 1, 2, 3]}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        product = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
        exhaustive = metafunc.config.getoption("--exhaustive")
        cases = product if exhaustive else cover(product, lambda case: case["dp"] * case["accumulation"])
        metafunc.parametrize("case", cases, ids=lambda case: ", ".join(f"{key} {case[key]}" for key in case))


@pytest.mark.one_in(2)
@pytest.mark.sampled(4)
def test_equals_transformers_on_the_concatenated_batch(ranks, tmp_path, folder, by_transformers, case):
    # Catches: negatives of one rank or micro-batch only, factors of dp and accumulation, pairs compared the other way
    # round, a logit scale without a gradient or counted once a rank, a mask that is not transformers', parameters that
    # ZeRO-3 freed, weights under other names. SGD without clipping shows a wrong factor.
    rows = train(ranks, tmp_path / "run", folder, *case.values())
    expected, weights = by_transformers
    assert_same_curve(expected, rows, rtol=RTOL)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved.keys() == weights.keys()
    start = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        moved = (tensor - start[name]).norm()
        assert (saved[name].view(tensor.shape) - tensor).norm() <= 1e-4 * moved + 1e-6, name


def test_rank_local_loss_is_seen(ranks, tmp_path, folder, by_transformers):
    # The published mistake (transformers #41874): each rank compares its own pairs only.
    argv = command(tmp_path / "run", folder, 2, 4, 1)
    assert ranks.run(2, train_rank_local, argv) == [0] * 2
    expected, rows = by_transformers[0], read_rows(tmp_path / "run")
    assert max(largest_deviation(expected, rows, key) for key in ("loss", "grad_norm")) > 1e-3


def train_rank_local(argv):
    """On a rank: the exit code of a run whose loss is over the rank's own pairs."""
    from ds_vit.tasks import bridge_tower
    from ds_vit.train import main

    def rank_local(images, texts, both, logits, gather, first):
        return loss(images, texts, both, logits, lambda rows: rows, 0)

    loss = bridge_tower.BridgeTowerTask.loss
    with mock.patch.object(bridge_tower.BridgeTowerTask, "loss", staticmethod(rank_local)):
        return main(argv)


# ---- dropout, resume -------------------------------------------------------------------------------------------------

TIGHT = {"optimizer": ADAMW, "clip": 0.5}


@pytest.fixture(scope="module")
def dropping(ranks, tmp_path_factory):
    """A pretrained folder with dropout, and the rows of one rank without accumulation and ZeRO."""
    path = write_folder(tmp_path_factory.mktemp("dropping"), dropout=0.2)
    return path, train(ranks, tmp_path_factory.mktemp("reference") / "run", path, 1, 1, 0, **TIGHT)


def test_dropout_is_keyed_and_resumes_in_another_layout(ranks, tmp_path, dropping):
    # Catches: dropout of a process's generator, masks of another pass, tables without values and a logit scale that a
    # checkpoint lacks.
    path, expected = dropping
    halves = ("--max-steps", 2, "--checkpoint-interval", 2)
    train(ranks, tmp_path / "run", path, 3, 1, 2, *halves, **TIGHT)
    rows = train(ranks, tmp_path / "run", path, 1, 4, 3, "--resume", "auto", **TIGHT)
    assert_same_curve(expected, rows, rtol=RTOL)


def test_dropout_drops(ranks, tmp_path, dropping, folder):
    # Else the test above would show nothing.
    rows = train(ranks, tmp_path / "run", folder, 1, 1, 0, "--max-steps", 1, **TIGHT)
    assert abs(rows[0]["loss"] / dropping[1][0]["loss"] - 1) > 1e-3


# ---- export ----------------------------------------------------------------------------------------------------------


def test_transformers_loads_the_export(ranks, tmp_path, dropping):
    # Catches: a scale of another shape, attention dropout that stays 0, other names, values of another type.
    from ds_vit.weights import export

    train(ranks, tmp_path / "run", dropping[0], 1, 1, 3, "--max-steps", 1)
    difference = export(tmp_path / "run", "hf")
    assert difference.within
    assert difference.largest < 1e-6
    model = transformers.BridgeTowerForContrastiveLearning.from_pretrained(difference.folder)
    text = model.config.text_config
    assert (text.hidden_dropout_prob, text.attention_probs_dropout_prob) == (0.2, 0.1)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[name].view(tensor.shape)), name


# ---- what is read and rejected ---------------------------------------------------------------------------------------


def test_draws_initial_values_without_pretrained(folder, tmp_path):
    # Catches: a parameter or a table that transformers' initialisation would leave unset.
    from ds_vit.models.keyed_init import initialise

    run = resolved([word for word in command(tmp_path / "run", folder, 1, 1, 0) if word != "--pretrained"])
    [layer] = run.model.task.layers(run.model.whole)
    initialise(run.model.whole, [layer], seed=0, device="cpu")
    assert layer.bridgetower.text_model.embeddings.position_ids[0, -1] == 299
    assert layer.logit_scale.item() == pytest.approx(2.6592)


def test_says_what_it_decides(folder, tmp_path):
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.4, 0.5, 0.6], "resample": 2}))
    model = resolved(command(tmp_path / "run", folder, 1, 1, 0)).model
    (folder / "preprocessor_config.json").unlink()
    assert [note for note in model.notes if note.startswith("attention dropout is 0, in place of 0.1")]
    assert model.image.img_size == (16, 16)
    assert model.image.mean == (0.4, 0.5, 0.6)
    assert model.image.interpolation == "bilinear"


REJECTED = {
    "--tp 2": "ZeRO-3 partitions its parameters",
    "--pp 2": "ZeRO-3 partitions its parameters",
    "--model vit_tiny_patch16_224": "takes local-dir:FOLDER",
    "--model local-dir:/nowhere": "config.json: No such file",
    "--img-size 32": "takes images of 16 pixels",
    "--context-length 90": "captions of at most 43 tokens",
    "--tokenizer clip": "pass the folder's tokenizer.json",
    "--grad-checkpointing full": "without timm's blocks",
    "--set pipeline.activation_checkpoint_interval=1": "has no blocks to recompute",
    "--drop 0.1": "config.json in the folder of --model describes the model",
    "--text-width 64": "it is of --task clip and siglip",
}


@pytest.mark.parametrize("flags", REJECTED)
def test_flags_without_effect_are_rejected(capsys, tmp_path, folder, flags):
    assert REJECTED[flags] in refusal(capsys, [*command(tmp_path / "run", folder, 1, 1, 0), *flags.split()])


def test_another_kind_of_folder_is_rejected(capsys, tmp_path, folder):
    config = json.loads((folder / "config.json").read_text())
    for name, changed in {"clip": {**config, "model_type": "clip"}, "no heads": {**config}}.items():
        changed.pop("contrastive_hidden_size")
        (tmp_path / "config.json").write_text(json.dumps(changed))
        said = refusal(capsys, command(tmp_path / "run", tmp_path, 1, 1, 0))
        assert ("'clip'" if name == "clip" else "no contrastive_hidden_size") in said
