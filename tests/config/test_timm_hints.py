"""People who come with timm's command line are told what stands here for each of its flags."""

import re

import pytest

from ds_vit.config import parse, timm_hints
from ds_vit.config.flags import FIELDS
from ds_vit.config.parser import build_parser
from ds_vit.train import main

# Every flag of train.py in pytorch-image-models, of 0.6 to 1.0.31.
_FLAGS = """
    -c --config -d --data-dir --dataset --train-split --val-split --train-num-samples --val-num-samples
    --dataset-download --dataset-trust-remote-code --class-map --input-img-mode --input-key --target-key --model
    --pretrained --pretrained-path --initial-checkpoint --resume --no-resume-opt --num-classes --gp --img-size
    --in-chans --input-size --crop-pct --mean --std --interpolation -b --batch-size -vb --validation-batch-size
    --channels-last --fuser --grad-accum-steps --grad-checkpointing --fast-norm --model-kwargs --head-init-scale
    --head-init-bias --torchcompile-mode --torchscript --torchcompile --device --amp --amp-dtype --amp-impl
    --model-dtype --no-ddp-bb --synchronize-step --local_rank --device-modules --opt --opt-eps --opt-betas
    --momentum --weight-decay --clip-grad --clip-mode --layer-decay --layer-decay-min-scale
    --layer-decay-no-opt-scale --opt-kwargs --sched --sched-on-updates --lr --lr-base --lr-base-size
    --lr-base-scale --lr-noise --lr-noise-pct --lr-noise-std --lr-cycle-mul --lr-cycle-decay --lr-cycle-limit
    --lr-k-decay --warmup-lr --min-lr --epochs --epoch-repeats --start-epoch --decay-milestones --decay-epochs
    --warmup-epochs --warmup-prefix --cooldown-epochs --patience-epochs --decay-rate --dr --no-aug
    --train-crop-mode --scale --ratio --hflip --vflip --color-jitter --color-jitter-prob --grayscale-prob
    --gaussian-blur-prob --aa --aug-repeats --aug-splits --jsd-loss --bce-loss --bce-sum --bce-target-thresh
    --bce-pos-weight --reprob --remode --recount --resplit --mixup --cutmix --cutmix-minmax --mixup-prob
    --mixup-switch-prob --mixup-mode --mixup-off-epoch --smoothing --train-interpolation --drop --drop-connect
    --drop-path --drop-block --bn-momentum --bn-eps --sync-bn --dist-bn --split-bn --model-ema
    --model-ema-force-cpu --model-ema-decay --model-ema-warmup --seed --worker-seeding --log-interval
    --val-interval --recovery-interval --checkpoint-hist -j --workers --save-images --pin-mem --no-prefetcher
    --output --experiment --eval-metric --tta --use-multi-epochs-loader --log-wandb --wandb-project --wandb-tags
    --wandb-resume-id --apex-amp --native-amp --model-ema-v2 --naflex-loader --naflex-train-seq-lens
    --naflex-max-seq-len --naflex-patch-sizes --naflex-patch-size-probs --naflex-loss-scale --kd-model-name
    --kd-distill-type --kd-loss-type --distill-loss-weight --task-loss-weight --kd-temperature
    --kd-student-feature-dim --kd-teacher-feature-dim --kd-token-distill-type
"""
TIMM = _FLAGS.split()
OURS = {word for action in build_parser()._actions for word in action.option_strings}
HINTS = list(timm_hints._HINTS.values())


@pytest.mark.parametrize("flag", TIMM)
def test_each_flag_of_timm_is_one_of_ours_or_has_a_hint(flag):
    """A flag of timm's that is answered by the flag that is spelled like it, or by nothing."""
    hint = timm_hints.timm_hint(flag.lstrip("-").replace("-", "_"))
    if flag in OURS:
        assert hint is None, "a hint for a flag that is here"
        return
    assert hint
    with pytest.raises(ValueError, match=re.escape(f"there is no flag {flag}; {hint}")):
        parse(["--deepspeed_config", "x.json", "--data-dir", "d", flag, "1"])


def test_hints_speak_of_flags_that_exist():
    """A hint that sends somebody to a second unknown flag, or one that hides a flag of ours."""
    said = {word for hint in HINTS for word in re.findall(r"(?<![\w-])--[a-z-]+", hint)}
    assert said
    assert said <= OURS | {"--to"}, said - OURS
    assert not [name for name in FIELDS if timm_hints.timm_hint(name)]


def test_a_data_folder_without_a_flag(tmp_path):
    """timm's oldest habit: the data folder as the first word."""
    with pytest.raises(
        ValueError, match=re.escape(f"'{tmp_path}' follows no flag: give the data folder by --data-dir")
    ):
        parse([str(tmp_path), "--deepspeed_config", "x.json"])


def test_a_recipe_of_timm(tmp_path):
    """timm's args.yaml as a recipe."""
    recipe = tmp_path / "args.yaml"
    recipe.write_text("epochs: 3\nopt: adamw\n")
    with pytest.raises(ValueError, match='there is no flag "opt"; it is decided by the DeepSpeed JSON: "optimizer"'):
        parse(["--recipe", str(recipe)])


def test_what_a_person_sees(capsys):
    """The sentence, alone, on the terminal."""
    assert main(["--deepspeed_config", "x.json", "--dataset", "digits", "--amp"]) == 2
    said = capsys.readouterr().err
    assert "there is no flag --amp; it is decided by the DeepSpeed JSON" in said
    assert len(said.strip().splitlines()) == 1
