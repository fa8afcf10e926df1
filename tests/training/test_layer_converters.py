"""Which converters a run applies to its layers, and in which order."""

from types import SimpleNamespace

import pytest

from ds_vit.config.deepspeed_keys import DeepSpeedJson
from ds_vit.config.deepspeed_rules import Checkpointing, Precision
from ds_vit.config.schema import RunConfig
from ds_vit.engine.settings import EngineSettings
from ds_vit.parallel.groups import Groups
from ds_vit.parallel.layout import Layout
from ds_vit.training.build_engine import layer_converters
from ds_vit.training.run import Model

# ZeRO stage, type, type of norms, tp, compiled, the pipeline's bounds: the converters in their order.
ALL = "shard_layer cast_block_buffers norms_in_fp32 freeze compute_class_token skip_idle_modules _partition"
PLAIN = "freeze compute_class_token skip_idle_modules"
CASES = [
    (1, "float32", "float32", 1, False, (0, 4), PLAIN),
    (2, "bfloat16", "model", 1, False, (0, 4), f"cast_block_buffers {PLAIN}"),
    (3, "float32", "float32", 2, False, (0, 3, 4), "shard_layer freeze skip_idle_modules _partition"),
    (3, "bfloat16", "float32", 2, False, (0, 4), ALL),
    (3, "float32", "float32", 1, True, (0, 4), f"{PLAIN} _partition compile_block"),
]


@pytest.mark.parametrize(("stage", "compute", "norms", "tp", "compiled", "bounds", "expected"), CASES)
def test_what_is_done_to_a_layer_in_order(stage, compute, norms, tp, compiled, bounds, expected):
    """A layer that ZeRO-3 takes before it is cut would be cut in its shares; a frozen one after it would be trained."""
    reads_class_token = Model.reads_class_token.fget(SimpleNamespace(bounds=bounds))
    engine = EngineSettings(
        path="",
        json=DeepSpeedJson.of({"zero_optimization": {"stage": stage}}),
        precision=Precision(compute, compute),
        checkpointing=Checkpointing(),
        graphs=False,
    )
    model = SimpleNamespace(class_parallel=False, frozen=frozenset(), reads_class_token=reads_class_token)
    run = SimpleNamespace(config=RunConfig(norm_dtype=norms, tp=tp, compile=compiled), model=model, engine=engine)
    groups = Groups(Layout(tp=tp), rank=0, tp=object() if tp > 1 else None)
    names = []
    for converter in layer_converters(run, groups):
        function = getattr(converter, "func", converter)  # a partial's
        names.append(function.__qualname__.split(".")[0])
    assert names == expected.split()
