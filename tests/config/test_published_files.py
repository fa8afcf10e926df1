"""Other people's DeepSpeed files (tests/support/published_files.py) run as they are."""

from __future__ import annotations

import json

import pytest
from curves import train_in
from published_files import FILES, RUN, WIDTH

from ds_vit.config import parse
from ds_vit.launching.process import Process
from ds_vit.training.resolve import resolve_run


def words_for(tmp_path, data):
    """The command line; --lr and -b where the file leaves them to it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    words = [*RUN, "--deepspeed_config", str(path)]
    if data.get("optimizer", {}).get("params", {}).get("lr", "auto") == "auto":
        words += ["--lr", "0.001"]
    return words + (["-b", "4"] if data["train_batch_size"] == "auto" else [])


@pytest.mark.parametrize("source", FILES)
def test_a_published_file_is_resolved(tmp_path, source):
    """A file that works elsewhere and ends here in a traceback, in DeepSpeed's own words, or in "auto"."""
    data = FILES[source]
    config, explicit = parse(words_for(tmp_path, data))
    plan = resolve_run(config, explicit, Process("env", 0, 1, 0, 1), on_cpu=True)
    told, asked = plan.deepspeed.json, data["zero_optimization"]
    assert '"auto"' not in json.dumps(told)
    assert plan.deepspeed.zero_stage == asked["stage"]
    assert plan.deepspeed.precision.name == ("bf16" if data["bf16"]["enabled"] is True else "fp32")
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


def test_llavas_offloaded_file_trains(ranks, tmp_path):
    """bf16 by name beside fp16 "auto" was two precisions at once on a GPU without bf16; a key by its other name."""
    data = FILES["haotian-liu/LLaVA scripts/zero3_offload.json"]
    assert len(train_in(ranks, 1, words_for(tmp_path, data))) == 4
    config, explicit = parse(words_for(tmp_path, data))
    plan = resolve_run(config, explicit, Process("env", 0, 1, 0, 1), on_cpu=False)
    assert plan.deepspeed.precision.name == "bf16"
    assert plan.deepspeed.json["fp16"]["enabled"] is False
