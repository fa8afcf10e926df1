"""People who come with timm's command line are told what stands here for each of its flags."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from timm.optim import get_optimizer_info

from ds_vit import cli
from ds_vit.config import timm_flags
from ds_vit.config.deepspeed_json import overlay
from ds_vit.config.parser import build_parser, from_values, parse
from ds_vit.config.schema import RunConfig
from ds_vit.config.timm_command import translate
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.build import optimizer_class
from ds_vit.train import main

BASE = ["--deepspeed_config", "x.json", "--data-dir", "d"]

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
NAMES = [name for names in timm_flags.ENTRIES[""] for name in names.split()]
HINTS = [timm_flags.timm_answer(name.strip("*!+"), ["x"], {name: ["x"]}).text for name in NAMES]


def test_each_flag_of_timm_is_one_of_ours_or_has_a_hint():
    """A flag of theirs that is answered by the flag that is spelled like it, or by nothing."""
    for flag in TIMM:
        name = flag.lstrip("-").replace("-", "_")
        words = ["1"] if timm_flags.words_of(name) != 0 else []
        answer = timm_flags.timm_answer(name, words, {name: words})
        if flag in OURS:
            assert answer is None, f"a hint for {flag}, which is here"
        else:
            assert problems_of(parse, [*BASE, flag, "1"])[0] == f"there is no flag {flag}; {answer.text}"


def test_hints_speak_of_flags_that_exist():
    """A hint that sends somebody to a second unknown flag, or one that hides a flag of ours."""
    said = {word for hint in HINTS for word in re.findall(r"(?<![\w-])--[a-z-]+", hint)}
    assert said
    assert said <= OURS | {"--to", "--amp-dtype"}, said - OURS
    assert not [name for name in RunConfig.flags() if timm_flags.timm_answer(name)]


def test_a_data_folder_without_a_flag(tmp_path):
    """timm's oldest habit: the data folder as the first word."""
    with pytest.raises(
        ValueError, match=re.escape(f"'{tmp_path}' follows no flag: give the data folder by --data-dir")
    ):
        parse([str(tmp_path), "--deepspeed_config", "x.json"])


def test_the_answer_uses_what_was_typed():
    """`--opt lamb` answered with AdamW."""
    for words, said in (
        (["--opt", "lamb"], '"optimizer": {"type": "Lamb", '),
        (["--opt=sgd", "--momentum", "0.8"], '"params": {"lr": "auto", "momentum": 0.8, "nesterov": true'),
        (["--amp", "--amp-dtype", "bfloat16"], '"torch_autocast": {"enabled": true, "dtype": "bfloat16"}'),
        (["--num-steps", "70"], "write --max-steps 70"),
        (["--opt-kwargs", "betas=(0.9, 0.95)"], '"optimizer": {"params": {"betas": [0.9, 0.95]}}'),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            parse([*BASE, *words])


def problems_of(read, *given):
    """What a source of settings rejects, by the first words of each problem."""
    with pytest.raises(UserError) as error:
        read(*given)
    return error.value.problems


def test_a_value_of_the_wrong_type_hides_no_other_problem(tmp_path, capsys):
    """A wrong value that argparse reports by itself, without the flags that are unknown or invalid too."""
    wrong = "--epochs three --lr-base 3 --opt lamb --foo 1 --sched cosin --scale 0.1 --bce-sum"
    words = [*BASE, *wrong.split()]
    begin = ["argument --scale: expected 2", "there is no flag --lr-base; write --lr 3", "there is no flag --opt; "]
    begin += ["there is no flag --foo", "--epochs takes a whole number, not 'three'"]
    begin += ["--sched cosin is none of cosine, linear, constant, wsd; ", "--bce-sum has no effect without --bce-loss"]
    found = problems_of(parse, words)
    assert_begin(found, begin)
    assert main(words) == 2
    first, *lines, remedy = capsys.readouterr().err.splitlines()
    assert first == f"train.py: error: {len(begin)} things are wrong:"
    assert lines == [f"  {problem}" for problem in found]
    assert "ds-vit from-timm 'COMMAND' translates a whole command of timm's" in remedy

    settings = {"scale": [0.1], "mean": [1, "a"], "no_aug": 1, "model": ["a"], "lr": True, "max_steps": 1.5, "epoch": 3}
    settings |= {"eval_only": ""}
    values = ["--scale takes 2 numbers, not 0.1", "--mean takes numbers, not 1 a", "--no-aug takes true or false, not"]
    values += ["--model takes a word, not ['a']", "--lr takes a number, not True", "--max-steps takes a whole number"]
    values += ['there is no flag "epoch"; the nearest is --epochs', "--eval-only takes true or false, not ''"]
    assert_begin(problems_of(from_values, {"deepspeed_config": "x.json", "data_dir": "d", **settings}), values)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(settings, sort_keys=False))
    both = ["there is no flag --foo", "--seed takes a whole number, not 'x'", *(f"{recipe}: {one}" for one in values)]
    assert_begin(problems_of(parse, [*BASE, "--recipe", str(recipe), "--foo", "--seed", "x"]), both)
    assert_begin(problems_of(from_values, {"seed": "x"}, str(recipe)), both[1:])


def assert_begin(found, beginnings):
    """Each problem in its place."""
    assert [problem[: len(said)] for problem, said in zip(found, beginnings, strict=True)] == beginnings


COMMAND = """
    torchrun --nproc_per_node 8 train.py /data/imagenet --model vit_small_patch16_224 -b 128 --opt lamb
    --opt-betas 0.9 0.95 --lr 4e-3 --mixup .8 --sched-on-updates --model-ema-v2 --experiment deit --amp --gp avg
    --model-kwargs depth=3 --grad-checkpointing --tta 2
"""


def flags_of(translation):
    """The words of a translated command after its JSON file."""
    return shlex.join(translation.words[translation.words.index("--deepspeed_config") + 2 :])


def test_a_command_of_timm_is_translated(tmp_path, monkeypatch):
    """A flag that is lost or that gets another's word, and a script that does not parse or that replaces a file."""
    result = translate([COMMAND])
    assert shlex.join(result.words[:4]) == "torchrun --nproc_per_node 8 launch/train.py"
    assert flags_of(result) == (
        "--data-dir /data/imagenet "
        "--model vit_small_patch16_224 -b 128 --clip-grad 1.0 --lr 4e-3 --mixup .8 --model-ema "
        "--output output/train/deit "
        "--model-kwargs global_pool=avg depth=3 --grad-checkpointing"
    )
    assert result.json["optimizer"] == {
        "type": "Lamb",
        "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.9, 0.95]},
    }
    assert result.json["torch_autocast"] == {"enabled": True, "dtype": "float16"}
    assert "bf16" not in result.json
    left = [note.split(": ")[1] for note in result.notes if note.startswith("left out")]
    assert left == ["--sched-on-updates", "--tta 2"]
    assert translate(COMMAND.split()) == result, "the words of a shell"
    assert "--output out/foo -b" in flags_of(translate(["train.py x --experiment foo --output out -b 8"]))
    assert "--output out -b" in flags_of(translate(["train.py x --output out -b 8"]))
    assert translate(["python train.py --dataset ImageFolder photos"]).words[-4:-2] == ("--lr", "0.1")
    spawned = translate(["python -m torch.distributed.launch --nproc_per_node=8 ./train.py photos"]).words
    assert spawned[:5] == ("python", "-m", "torch.distributed.launch", "--nproc_per_node=8", "launch/train.py")
    by_script = translate(["./distributed_train.sh 4 photos --lr 0.1"]).words
    assert by_script[:4] == ("torchrun", "--nproc_per_node", "4", "launch/train.py")
    monkeypatch.chdir(tmp_path)
    [script] = [word for word in translate([COMMAND]).words if word.endswith("train.py")]
    assert Path(script).is_file(), "a path of the clone, elsewhere"
    (tmp_path / "ds-vit").write_text('printf "%s\\n" "$@" > words')
    (tmp_path / "ds-vit").chmod(0o755)
    (tmp_path / "deepspeed.json").write_text("mine")
    plain = translate(["python3 train.py photos --lr-base 0.2 --sched tanh"])
    assert [result.is_rejected, plain.is_rejected] == [False, True]
    assert cli.main(["from-timm", "python train.py photos --sched tanh"]) == 2
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    subprocess.run(["bash", "-ec", str(plain)], check=True)
    words = (tmp_path / "words").read_text().split()
    assert words == ["train", *plain.words[2:]]
    assert words[3:] == shlex.split("--data-dir photos --lr 0.2 --lr-scale-by-batch linear --sched tanh")
    written = json.loads(Path(words[2]).read_text())
    assert written == plain.json
    assert written["optimizer"]["params"]["momentum"] == 0.9, "timm's default optimizer is SGD"
    assert "bf16" not in written
    Path(words[2]).write_text("edited")
    subprocess.run(["bash", "-ec", str(plain)], check=True)
    assert [Path(words[2]).read_text(), Path("deepspeed.json").read_text()] == ["edited", "mine"]
    for flags, added in (("5", False), ("6", True), ("49", True), ("50", False), ("20 --warmup-epochs 2", False)):
        found = flags_of(translate([f"train.py photos --epochs {flags}"]))
        assert ("--warmup-epochs 5" in found) == added, "timm warms up for 5 epochs of any run"


# Flags of timm → a word of the translated flags, and a word of the comment that says what is different; "" for none.
_DIFFERENT = {
    "--amp --amp-dtype bfloat16": ("", ""),
    "--amp": ("", "(--amp-dtype bfloat16)"),
    "--model-dtype bfloat16": ("", "weights are updated in fp32"),
    "--dataset ImageFolder": ("", "left out: --dataset ImageFolder: timm reads the folders of --data-dir"),
    "--dataset torch/cifar10": ("--dataset torch/cifar10", ""),
    "--dataset wds/imagenet --train-split t-{0..9}.tar": (
        "--dataset wds/ --train-split 't-{0..9}.tar'",
        "the name in wds/imagenet chooses none",
    ),
    "--epochs 5": ("--epochs 5", "timm warms up for 5 epochs, here all of the run"),
    "--epochs 5 --warmup-epochs 1": ("--epochs 5", ""),
    "--dataset hfds/x": ("--dataset hfds/x", "the Hub is not read"),
    "--dataset tfds/x": ("", "still rejected: --dataset tfds/x"),
    "--resume out/x.pth.tar": ("--initial-checkpoint out/x.pth.tar", "only weights: optimizer, schedule"),
    "--resume '' --initial-checkpoint a.pth": ("--initial-checkpoint a.pth", "names no checkpoint"),
    "--output out": ("--output out", "timm makes one in it"),
    "--opt lamb": ("--clip-grad 1.0", "limits the gradient's norm to 1 itself"),
    "--opt lamb --clip-grad 2": ("--clip-grad 2", ""),
    "--opt shampoo": ("", "still rejected: --opt shampoo"),
    "--clip-mode agc": ("", "still rejected: --clip-mode agc"),
    "--clip-mode norm": ("", "left out: --clip-mode norm"),
    "--cooldown-epochs 10": ("", "timm trains them after --epochs"),
    "--checkpoint-hist 3": ("--keep-checkpoints 3", "timm keeps the best"),
    "--aug-repeats 3": ("--aug-repeats 3", "on one rank too"),
    "--mixup 0.8": ("--mixup 0.8", "each pair has its own draw"),
    "--torchcompile inductor": ("--compile", "only the blocks"),
    "--in-chans 1": ("", "still rejected: --in-chans 1"),
    "--aug-splits 3": ("", "still rejected: --aug-splits 3"),
    "--aa rand-m9 --color-jitter 0.3": ("--aa rand-m9", "left out: --color-jitter: it has no effect under --aa"),
}
_KNOWN = "--num-classes 10 --model vit_tiny_patch16_224 --lr 0.1"


def test_each_change_of_meaning_has_a_comment():
    """A flag whose result differs here from timm's, and nothing says so; a comment about nothing."""
    for words, (flag, comment) in _DIFFERENT.items():
        result = translate([f"python train.py photos {_KNOWN} {words}"])
        assert flag in flags_of(result)
        others = [note for note in result.notes if "--sched-on-updates" not in note]
        assert (len(others) == 1 and comment in others[0]) if comment else not others, result.notes
        assert result.is_rejected == comment.startswith("still rejected")


def test_what_timm_does_without_a_flag_has_a_comment_too():
    """timm's defaults that a command does not name."""
    notes = translate(["python train.py photos --mixup 0.8"]).notes
    assert [note.split(":")[0] for note in notes] == ["--model", "--num-classes", "--sched-on-updates", "--mixup-mode"]


def test_no_flag_of_timm_is_dropped_in_silence():
    """A flag that leaves no trace in the translated command, its JSON or its comments."""
    base = f"python train.py photos {_KNOWN} --resume x.pth"
    without = translate([base])
    for flag in {*TIMM} - {"--local_rank"}:
        action = build_parser()._option_string_actions.get(flag)
        takes = action.nargs != 0 if action else timm_flags.words_of(flag.lstrip("-").replace("-", "_")) != 0
        assert translate([f"{base} {flag} {'7' * takes}"]) != without, flag


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("from-timm foo", "takes a command of timm's training, and foo starts another program"),
        ("from-timm", "and an empty one starts another program"),
        (
            "from-timm python validate.py photos",
            "python validate.py photos is none: ds-vit eval RUN|FILE does its work",
        ),
        ("from-timm python -m open_clip_train.main --train-data x.csv", "is one of open_clip's: ds-vit from-open-clip"),
        ("from-timm python src/training/main.py", "python src/training/main.py is one of open_clip's"),
        ("from-open-clip python train.py photos", "python train.py photos is one of timm's: ds-vit from-timm"),
        ("from-open-clip foo", "takes a command of open_clip's training, and foo starts another program"),
    ],
)
def test_a_command_of_another_program_is_an_error(command, said, capsys):
    """A translation of what is no command of this trainer."""
    for words in (command.split(), [command.partition(" ")[0], command.partition(" ")[2]]):
        assert cli.main(words) == 2
        seen = capsys.readouterr()
        assert not seen.out
        assert said in seen.err


def test_optimizers_of_timm_are_ours():
    """A type or an argument that the JSON does not take."""
    for name in timm_flags.OPTIMIZERS:
        block = overlay({}, timm_flags.timm_answer("opt", [name]).values, "")["optimizer"]
        optimizer_class(block["type"], {k: v for k, v in block["params"].items() if v != "auto"}, "x")
        assert get_optimizer_info(name)
