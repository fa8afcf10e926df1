"""`ds-vit from-open-clip`: commands of open_clip's trainer become commands of ours, and nothing is lost."""

import argparse
import functools
import shlex

import pytest
import timm

from ds_vit.config import timm_flags
from ds_vit.config.parser import build_parser, parse
from ds_vit.config.timm_command import ORIGINS, translate
from ds_vit.tasks.clip.tower import TEXT_MODELS

params = pytest.importorskip("open_clip_train.params")
START = "python -m open_clip_train.main"
SMALL = f"{START} --train-data pairs.csv --model ViT-B-16 --precision amp_bf16"


once = functools.cache(lambda command: translate([command], ORIGINS["from-open-clip"]))


def from_open_clip(command):
    """A translated command, its flags and its comments."""
    result = translate([command], ORIGINS["from-open-clip"])
    return result, shlex.join(result.words[result.words.index("--deepspeed_config") + 2 :]), "\n".join(result.notes)


def open_clips_flags():
    """Every flag of open_clip's trainer, from its own parser."""
    found = []

    def keep_flags(parser, args):
        found.extend(action for action in parser._actions if action.dest != "help")
        return argparse.Namespace(opt="timm")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", keep_flags)
        params.parse_args([])
    return found


def words_for(action):
    """Words that the flag takes, other than its default."""
    if action.nargs == 0:
        return [""]
    if action.choices:
        return [choice for choice in action.choices if choice != action.default]
    return {int: ["3"], float: ["0.3"]}.get(action.type, ["x/y.pt"])


def test_no_flag_is_dropped_in_silence():
    """A flag that leaves no trace in the translated command, its JSON or its comments; or one without an answer."""
    ours = build_parser()._option_string_actions
    for action in open_clips_flags():
        flag = action.option_strings[-1]
        name = flag.lstrip("-").replace("-", "_")
        words = ["1"] if timm_flags.words_of(name) != 0 else []
        assert (timm_flags.timm_answer(name, words, {name: words}) is None) == (flag in ours), flag
        data = "p/t" if flag == "--dataset-type" else "p/t.csv"  # a name that decides the type itself
        base = f"{START} --train-data {data} --resume z.pt --lr-scheduler const-cooldown --force-image-size 99 "
        base += " ".join(sorted({"--lock-image", "--lock-text"} - {flag}))
        for word in words_for(action):
            result = translate([f"{base} {flag} {word}"], ORIGINS["from-open-clip"])
            assert result != once(base), (flag, word)
            assert not [note for note in result.notes if "there is no flag" in note]


TARS = "--train-data '/data/cc12m/cc12m-train-{0000..2175}.tar' --train-num-samples 10968539 --dataset-type webdataset"
ACCEPTED = {
    # from open_clip's README
    f"torchrun --nproc_per_node 4 -m open_clip_train.main {TARS} --batch-size 320 --precision amp --workers 4 "
    "--imagenet-val /data/imagenet/validation/ --model ViT-B-32": (
        "--dataset 'wds//data/cc12m/cc12m-train-{0000..2175}.tar' --val-split '' --batch-size 320 --workers 4 "
        "--zeroshot /data/imagenet/validation/ --zeroshot-templates openai --task clip "
        "--model vit_base_patch32_clip_224"
    ),
    f"{START} --save-frequency 1 --zeroshot-frequency 1 --report-to tensorboard --train-data=/p/train.csv "
    "--val-data=/p/validation.csv --csv-img-key filepath --csv-caption-key title --imagenet-val=/p/imagenet/val/ "
    "--warmup 10000 --batch-size=128 --lr=1e-3 --wd=0.1 --epochs=30 --workers=8 --model ViT-B-16": (
        "--eval-interval 1 --dataset csv//p/train.csv --val-split /p/validation.csv --csv-img-key filepath "
        "--csv-caption-key title --zeroshot /p/imagenet/val/ --zeroshot-templates openai --warmup-steps 10000 "
        "--batch-size 128 --lr 1e-3 --weight-decay 0.1 --epochs 30 --workers 8"
    ),
    "srun --cpu_bind=v --accel-bind=gn python -u src/open_clip_train/main.py --save-frequency 1 --report-to wandb "
    "--train-data='/data/LAION-400M/{00000..41455}.tar' --warmup 2000 --batch-size=256 --epochs=32 --workers=8 "
    "--model ViT-B-32 --name 'ViT-B-32-Vanilla' --seed 0 --local-loss --gather-with-grad": (
        "--wandb --dataset 'wds//data/LAION-400M/{00000..41455}.tar' --val-split '' --warmup-steps 2000 "
        "--batch-size 256 --epochs 32 --workers 8 --task clip --model vit_base_patch32_clip_224 --text-model clip_base "
        "--tokenizer clip --output logs/ViT-B-32-Vanilla --seed 0 "
    ),
    f"{SMALL} --resume latest --name a --logs runs": ("--resume auto --output runs/a",),
    f"{SMALL} --resume logs/a/checkpoints/epoch_3.pt": ("--initial-checkpoint logs/a/checkpoints/epoch_3.pt",),
    f"{START} --train-data 'a/{{00..12}}.tar::b/{{00..41}}.tar' --dataset-resampled --model ViT-L-14-336-quickgelu": (
        "--data-dir 'wds/a/{00..12}.tar' 'wds/b/{00..41}.tar'",
        "--model vit_large_patch14_clip_quickgelu_336 --text-model clip_large_quickgelu",
    ),
    f"{START} --train-data 'a/{{00..12}}.tar::b/{{1..42}}.tar' --model ViT-B-16 --train-data-upsampling-factors 1::2": (
        "--data-weights 13 84",
    ),
    f"{SMALL} --save-frequency 0": ("--checkpoint-interval 0",),
    f"{SMALL} --siglip --accum-freq 4 --grad-checkpointing --torchcompile": (
        "--task siglip --model vit_base_patch16_clip_224 --text-model clip_base --tokenizer clip",
        "--grad-accum-steps 4 --grad-checkpointing --compile",
    ),
    f"{START} --train-data pairs.csv --siglip --model ViT-B-16-SigLIP-256": (
        "--task siglip --model vit_base_patch16_siglip_256 --text-model siglip_base --tokenizer tokenizer.json",
    ),
    f"{SMALL} --lock-image --lock-image-unlocked-groups 3": ("--lock-image --lock-image-unlocked-groups 2",),
    f"{SMALL} --lock-text --lock-text-unlocked-layers 2": ("--freeze text.token_embed text.pos_embed",),
    f"{SMALL} --val-data val/v.csv --val-frequency 2 --zeroshot-frequency 5 --imagenet-val d": (
        "--val-split val/v.csv",
        "--eval-interval 2",
    ),
    f"{SMALL} --lr-scheduler const-cooldown --epochs 10 --epochs-cooldown 2 --lr-cooldown-end 1e-6": (
        "--sched wsd",
        "--wsd-decay-fraction 0.2 --min-lr 1e-6",
    ),
    f"{SMALL} --force-quick-gelu --force-image-size 240 240 --image-resize-mode longest --val-data v.csv": (
        "vit_base_patch16_clip_quickgelu_224 --text-model clip_base_quickgelu",
        "--img-size 240 --crop-mode border",
    ),
}


@pytest.mark.parametrize("command", ACCEPTED)
def test_the_translated_command_is_one_of_ours(command):
    """A command that training rejects, or a flag with another's words."""
    result, flags, notes = from_open_clip(command)
    assert not result.is_rejected, notes
    assert "-m" not in result.words
    for part in [ACCEPTED[command]] if isinstance(ACCEPTED[command], str) else ACCEPTED[command]:
        assert part in flags
    config = parse(["--deepspeed_config", "x.json", *shlex.split(flags)])
    assert config.task in ("clip", "siglip")
    assert config.scale == (0.9, 1.0)


def test_defaults_are_open_clips():
    """A default of ds_vit's in a command that does not name the flag."""
    result, flags, notes = from_open_clip(f"{START} --train-data pairs.csv --model ViT-B-16")
    assert "--batch-size 64 --epochs 32 --weight-decay 0.2 --lr 5e-4 --warmup-steps 10000 --scale 0.9 1.0" in flags
    assert result.json["optimizer"]["params"] == {
        **{"lr": "auto", "weight_decay": "auto"},
        **{"betas": [0.9, 0.98], "eps": 1e-6},
    }
    assert result.json["torch_autocast"] == {"enabled": True, "dtype": "float16"}
    assert "(--precision amp_bf16)" in notes
    bf16, _, notes = from_open_clip(SMALL)
    assert bf16.json["torch_autocast"]["dtype"] == "bfloat16"
    assert "loss scale" not in notes
    assert "there is one source" in from_open_clip(f"{SMALL} --train-data-upsampling-factors 2")[2]
    assert from_open_clip(SMALL.replace("amp_bf16", "fp32"))[0].json.keys().isdisjoint({"torch_autocast", "bf16"})


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--model coca_ViT-L-14", "coca_ViT-L-14 has no counterpart"),
        ("--coca-caption-loss-weight 1", "CoCa is not here"),
        ("--model RN50", "RN50 has no counterpart"),
        ("--model ViT-H-14-quickgelu", "ViT-H-14-quickgelu has no counterpart"),
        ("--pretrained laion2b_s34b_b88k", "nothing is downloaded by a tag"),
        ("--train-data 'pipe:aws s3 cp s3://b/{0..9}.tar -'", "not on a pipe or a URL"),
        ("--dataset-type synthetic", "a run trains on tar files or tables on disk"),
        ("--distill-model ViT-L-14", "only classifiers are distilled here"),
        ("--aug-cfg scale='(0.4, 1.0)'", "each setting has a flag: --scale"),
        ("--opt timm/shampoo", "there is no optimizer shampoo here"),
        ("--train-data a.tar::b.tar --train-data-upsampling-factors 1", "several --data-dir are mixed"),
        ("pairs.csv", "'pairs.csv' follows no flag"),
    ],
)
def test_what_would_train_something_else_is_rejected(words, reason):
    """A command without the flag, which trains another model, on other data or from other weights."""
    command = f"{words} {SMALL}" if words == "pairs.csv" else f"{SMALL} {words}"
    result, _, notes = from_open_clip(SMALL + " --siglip " + words if words == "pairs.csv" else command)
    assert result.is_rejected
    assert f"still rejected: {'' if words == 'pairs.csv' else words.split()[0]}" in notes
    assert reason in notes


def test_a_command_without_training_data_only_evaluates():
    """A list of what such a command lacks for training, in place of the command that evaluates."""
    with pytest.raises(ValueError, match=r"no --train-data and only evaluates: ds-vit eval RUN\|FILE, with --zeroshot"):
        from_open_clip(f"{START} --imagenet-val d --model ViT-B-32 --pretrained x")


def test_models_exist():
    """A name of a tower that neither timm nor ds_vit has; a model of open_clip's that is forgotten."""
    list_pretrained = pytest.importorskip("open_clip").list_pretrained
    names = {name for name, _ in list_pretrained() if name.startswith("ViT-")}
    found = {name: timm_flags.timm_answer("model", [], {"model": [name]}, "open_clip") for name in names}
    words = {name: answer.words for name, answer in found.items() if not answer.is_refused}
    assert {words[name][3] for name in words} <= {*timm.list_models()}
    assert {words[name][5] for name in words} <= {*TEXT_MODELS}
    assert len(words) >= 15


def test_the_shell_still_expands_what_it_would_have():
    """Variables and `~` in single quotes, the command before `&&` as a launcher, and patterns that are quoted twice."""
    command = "cd open_clip/src && torchrun --node_rank=$SLURM_PROCID -m open_clip_train.main --logs ~/runs --name a"
    command += f"{SMALL.removeprefix(START)} --lock-text --lock-text-unlocked-layers 2"
    line = str(translate([command], ORIGINS["from-open-clip"])).splitlines()[-1]
    assert line.startswith('torchrun "--node_rank=$SLURM_PROCID" ')
    assert "--output ~/runs/a" in line
    assert "--freeze text.token_embed text.pos_embed 'text.blocks.[0-9]' text.blocks.10" in line
