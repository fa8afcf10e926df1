"""Patches of DeepSpeed: methods and functions of it that a run replaces, with the reason for each.

More are replaced elsewhere: engine/flat_gradient.py sums gradients and steps below ZeRO-3, engine/zero3.py gathers
and reduces at ZeRO-3, `Engine` wraps `_take_model_step` without ZeRO, to clip before it, and `ZeroMap.on_overflow`
wraps what ZeRO calls before it drops gradients. Private attributes are also used in engine/base.py (norms),
parallel/zero_map.py (where ZeRO keeps weights and gradients, and how weights return to the model) and
config/deepspeed_keys.py (removed keys).
"""
