"""Other people's DeepSpeed files (tests/support/published_files.py) run as they are, or are refused with the reason."""

from __future__ import annotations

import json

import pytest
from curves import train_in
from published_files import FILES, RUN, WIDTH

from ds_vit.config import parse
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process
from ds_vit.training.resolve import resolve_run

REFUSED = {
    "hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_config.json": 'no key "comms_config"; it reads "comms_logger"',
    "bigscience-workshop/bigscience train/tr11-176B-ml/tr11-176B-ml.slurm": "bf16.enabled at ZeRO stage 0 .* use stage",
    "microsoft/Megatron-DeepSpeed ds_zero2_config_bf16.json": 'old name; call the block "bf16"',
    "microsoft/DeepSpeedExamples cifar/ds_config.json": "fp16_master_weights_and_grads.* CPU Adam, and here torch",
    "microsoft/DeepSpeedExamples cifar/ds_config_onebitlamb.json": "no optimizer 'OneBitLamb' here; the nearest is",
    "microsoft/DeepSpeedExamples bing_bert/deepspeed_bsz64k_lamb_config_seq128.json": "Sparse Attention has been",
    "microsoft/unilm beit/utils.py": 'no key "optimizer.adam_w_mode"; it reads "optimizer.params.adam_w_mode"',
    "baaivision/EVA EVA-CLIP/rei/training/deepspeed_config.json": 'it reads "data_types.grad_accum_dtype"',
    "OpenGVLab/InternVL segmentation/zero_configs/adam_zero1_amp.json": "Apex AMP .* been removed. Use DeepSpeed",
}


def words_for(tmp_path, data):
    """The command line; --lr and -b where the file leaves them to it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    words = [*RUN, "--deepspeed_config", str(path)]
    if data.get("optimizer", {}).get("params", {}).get("lr", "auto") == "auto":
        words += ["--lr", "0.001"]
    return words + (["-b", "4"] if data["train_batch_size"] == "auto" else [])


@pytest.mark.parametrize("source", FILES)
def test_a_published_file_runs_or_is_refused_with_the_reason(tmp_path, source):
    """A file that works elsewhere and ends here in a traceback, in DeepSpeed's own words, or in "auto"."""
    data = FILES[source]
    config, explicit = parse(words_for(tmp_path, data))
    on_cpu = data.get("fp16", {}).get("enabled") is not True  # there "auto" is neither precision, on any machine
    one_rank = Process("env", 0, 1, 0, 1)
    if source in REFUSED:
        with pytest.raises(UserError, match=REFUSED[source]):
            resolve_run(config, explicit, one_rank, on_cpu=on_cpu)
        return
    plan = resolve_run(config, explicit, one_rank, on_cpu=on_cpu)
    told, asked = plan.deepspeed.json, data["zero_optimization"]
    assert '"auto"' not in json.dumps(told)
    assert plan.deepspeed.zero_stage == asked["stage"]
    assert plan.deepspeed.precision.name == next(
        (name for name in ("bf16", "fp16") if data.get(name, {}).get("enabled") is True), "fp32"
    )
    for key, resolved in (
        *((("reduce_bucket_size", WIDTH * WIDTH),) if asked["stage"] < 3 else ()),  # idle at stage 3
        ("stage3_prefetch_bucket_size", int(0.9 * WIDTH * WIDTH)),
        ("stage3_param_persistence_threshold", 10 * WIDTH),
    ):
        assert told["zero_optimization"].get(key) == (resolved if asked.get(key) == "auto" else asked.get(key))
    params = data.get("optimizer", {}).get("params", {"betas": "auto"})
    if "betas" in params:
        assert told["optimizer"]["params"]["betas"] == [0.9, 0.999]
        assert told["optimizer"]["params"]["eps"] == 1e-8


def test_the_table_of_refusals_names_files_that_are_there():
    """A source that was renamed in one place would be expected to run."""
    assert REFUSED.keys() < FILES.keys()


def test_llavas_offloaded_file_trains(ranks, tmp_path):
    """bf16 by name beside fp16 "auto" was two precisions at once on a GPU without bf16; a key by its other name."""
    data = FILES["haotian-liu/LLaVA scripts/zero3_offload.json"]
    assert len(train_in(ranks, 1, words_for(tmp_path, data))) == 4
    config, explicit = parse(words_for(tmp_path, data))
    plan = resolve_run(config, explicit, Process("env", 0, 1, 0, 1), on_cpu=False)
    assert plan.deepspeed.precision.name == "bf16"
    assert plan.deepspeed.json["fp16"]["enabled"] is False
