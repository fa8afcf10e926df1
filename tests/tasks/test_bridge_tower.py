"""The task `bridgetower` against transformers' own model and loss."""

import json

import pytest
import torch
from bridge_towers import write_folder
from curves import assert_same_curve, train_in
from micro_batches import tensors_of
from project import write_config
from runs import refusal, resolved
from safetensors.torch import load_file

from ds_vit.models.param_groups import no_weight_decay_names
from ds_vit.tasks.bridgetower.tower import create_bridge_tower

transformers = pytest.importorskip("transformers", minversion="5")

GLOBAL_BATCH, STEPS, RTOL = 24, 3, 1e-5
SGD = {"type": "SGD", "params": {"lr": 0.0005}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model without dropout, except in attention."""
    return write_folder(tmp_path_factory.mktemp("pretrained"))


def command(output, folder, dp, accumulation, stage, *words):
    """The command line of a run."""
    config = write_config(output.with_suffix(".json"), stage, optimizer=SGD, gradient_clipping=0.0)
    argv = ["--task", "bridgetower", "--model", f"local-dir:{folder}", "--pretrained", "--dataset", "glyphs"]
    argv += ["--context-length", 24, "--workers", 0, "--val-split", "", "--epochs", 1, "--max-steps", STEPS]
    argv += ["--sched", "constant", "--warmup-steps", 0, "--log-interval", 1, "--checkpoint-interval", 0]
    argv += ["-b", GLOBAL_BATCH // dp // accumulation, "--grad-accum-steps", accumulation]
    return [str(word) for word in [*argv, "--deepspeed_config", config, "--output", output, *words]]


def train(ranks, output, folder, dp, *layout):
    """The rows of a run; `layout` is accumulation, ZeRO stage and further flags."""
    return train_in(ranks, dp, command(output, folder, dp, *layout))


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
    run = resolved(command(tmp_path_factory.mktemp("alone") / "run", folder, 1, 1, 0))
    task = run.model.task
    model = transformers.BridgeTowerForContrastiveLearning.from_pretrained(folder)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), **SGD["params"])
    rows = []
    for step, batch in enumerate(tensors_of(run, STEPS), start=1):
        ids, mask = batch["texts"], (batch["texts"] != task.tokenizer.pad_id).long()
        loss = model.train()(input_ids=ids, attention_mask=mask, pixel_values=batch["images"], return_loss=True).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
        optimizer.step()
        rows.append({"kind": "train", "step": step, "loss": loss.item(), "grad_norm": norm.item()})
    return rows, {name: parameter.detach() for name, parameter in model.named_parameters()}


# Ranks, accumulation and ZeRO stage; tests/parallel/test_layouts.py has more.
@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 4, 1), (1, 1, 0), (3, 1, 3)], ids=str)
def test_equals_transformers_on_the_concatenated_batch(ranks, tmp_path, folder, by_transformers, layout):
    # Catches: negatives of one rank or micro-batch only, factors of dp and accumulation, pairs compared the other way
    # round, a logit scale without a gradient or counted once a rank, a mask that is not transformers', parameters that
    # ZeRO-3 freed, weights under other names. SGD without clipping shows a wrong factor.
    rows = train(ranks, tmp_path / "run", folder, *layout)
    expected, weights = by_transformers
    assert_same_curve(expected, rows, rtol=RTOL)
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved.keys() == weights.keys()
    start = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        moved = (tensor - start[name]).norm()
        assert (saved[name].view(tensor.shape) - tensor).norm() <= 1e-4 * moved + 1e-6, name


# ---- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_transformers_loads_the_export(ranks, tmp_path):
    # Catches: a scale of another shape, attention dropout that stays 0, other names, values of another type.
    from ds_vit.weights.export import export

    folder = write_folder(tmp_path / "dropping", dropout=0.2)
    train(ranks, tmp_path / "run", folder, 1, 1, 3, "--max-steps", 1)
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
    assert model.task.image.img_size == (16, 16)
    assert model.task.image.mean == (0.4, 0.5, 0.6)
    assert model.task.image.interpolation == "bilinear"


REJECTED = {
    "--model vit_tiny_patch16_224": "takes local-dir:FOLDER",
    "--model local-dir:/nowhere": "config.json: No such file",
    "--img-size 32": "takes images of 16 pixels",
    "--context-length 90": "captions of at most 43 tokens",
    "--tokenizer clip": "pass the folder's tokenizer.json",
    "--set pipeline.activation_checkpoint_interval=1": "has no blocks to recompute",
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
