"""The command line and recipes: every spelling of the contract, and refusals in plain words."""

import math
import re
from types import MappingProxyType

import pytest
import yaml

from ds_vit.config import parser as flags
from ds_vit.config.flag import spelling
from ds_vit.config.parser import help_of, parse
from ds_vit.config.schema import RunConfig

BASE = ["--deepspeed_config", "x.json", "--data-dir", "d"]

# Every flag that each release keeps, as a user of timm or DeepSpeed would write it.
SPELLINGS = """
    --model vit_tiny_patch16_224 | --num-classes 7 | --img-size 32 | --drop-path 0.2 | --initial-checkpoint w.pth
    --grad-checkpointing full | --grad-checkpointing selective | --grad-checkpointing 2 -b 4 | --dataset torch/cifar10
    --data-dir /data | --train-split a | --val-split b | --workers 2 | --workers auto | --aa rand-m9-mstd0.5-inc1
    --aug-repeats 3 | --scale 0.2 1.0 | --ratio 0.5 2 | --hflip 0 | --color-jitter 0.3 | --train-interpolation bicubic
    --crop-pct 0.9 | --mixup 0.8 | --cutmix 1.0 | --mixup-prob 0.5 --mixup 0.8 | --mixup-off-epoch 10 --mixup 0.8
    --smoothing 0 | --reprob 0.25 | --mean 0.5 0.5 0.5 | --std .5 .5 .5 | --epochs 3 | --max-steps 10 | --sched wsd
    --lr 1e-3 | --warmup-steps 5 | --warmup-epochs 1.5 | --warmup-lr 1e-6 | --min-lr 1e-5 | --layer-decay 1.0
    --model-ema-decay 0.9998 | --pp 1 | --tp 1 | --output o | --seed 7 | --resume none | --checkpoint-interval 0
    --checkpoint-interval 30m | --checkpoint-interval epoch | --keep-checkpoints 0 | --log-interval 5
    --eval-interval 2 | --eval-knn 5 | --batch-size 32 | --grad-accum-steps 4 | --deepspeed_config y.json
    --validation-batch-size 3
"""
# Further spellings, and flags with their own form: name and value.
FORMS = {
    "--model-kwargs depth=5 act_layer=gelu qk_norm=True qkv_bias=false pre_norm=FALSE": (
        "model_kwargs",
        {"depth": 5, "act_layer": "gelu", "qk_norm": True, "qkv_bias": False, "pre_norm": False},
    ),
    "--grad-checkpointing": ("grad_checkpointing", "full"),
    "--grad-checkpointing -b 4": ("grad_checkpointing", "full"),
    "--grad-checkpointing selective --no-grad-checkpointing": ("grad_checkpointing", ""),
    "-j 3": ("workers", 3),
    "-vb 32": ("validation_batch_size", 32),
    "--no-aug": ("no_aug", True),
    "--eval-knn": ("eval_knn", 20),
    "--deepspeed-config y.json": ("deepspeed_config", "y.json"),
}


@pytest.mark.parametrize("words", re.split(r"\s*[|\n]\s*", SPELLINGS.strip()))
def test_spelling(words):
    """A flag of the contract that stops being accepted as timm or DeepSpeed spells it."""
    flag, *first = re.split(r"(?= -)", words)[0].split()
    config = parse([*BASE, *words.split()])
    name = flag.strip("-").replace("-", "_")
    value = getattr(config, name)
    values = value if isinstance(value, tuple) else (value,)
    assert [type(item)(word) for item, word in zip(values, first, strict=True)] == [*values]
    assert name in config.model_fields_set


@pytest.mark.parametrize("words", FORMS)
def test_form(words):
    """A short flag, a switch, a flag whose value may be left out, or key=value pieces."""
    name, value = FORMS[words]
    config = parse([*BASE, *words.split()])
    assert getattr(config, name) == value
    assert name in config.model_fields_set


@pytest.mark.parametrize("words", ["--local_rank=3", "--local_rank 3", "--local-rank=3", "--deepspeed"])
def test_what_launchers_append_is_accepted_and_ignored(words):
    """DeepSpeed's launcher appends --local_rank=N; refusing it stops every launch."""
    assert parse([*BASE, *words.split()]) == parse(BASE)


def test_defaults_are_timms():
    """--no-aug alone leaves label smoothing on, as in timm."""
    config = parse([*BASE, "--no-aug"])
    assert (config.smoothing, config.reprob, config.aa, config.hflip, config.seed) == (0.1, 0.0, "", 0.5, 42)


REFUSED = {
    "--drop-pth 0.1": "there is no flag --drop-pth; the nearest is --drop-path",
    "--seed 3 stray": "'stray' follows no flag",
    "--img-size 32 48": "'48' follows no flag",
    "--compile --grad-checkpointing selective": "--compile makes one graph of fixed shapes; keep one",
    "--grad-checkpointing some": "full, selective or a number of blocks, at least 1 and at most 1,000, not some",
    "--eval-only --grad-checkpointing": "--grad-checkpointing has no effect with --eval-only",
    "--model-kwargs depth": "key=value pieces, not 'depth'",
    "--drop-path-compute kept": "there is no flag --drop-path-compute; it was removed: each branch is computed for all",
    "--allow-batch-change": "--allow-batch-change has no effect without --resume",
    "--rollback 2 --checkpoint-interval 0": "--rollback has no effect with --checkpoint-interval 0",
    "--checkpoint-interval 1h30m": "--checkpoint-interval 1h30m: write a number of optimizer steps, a time such",
    "--time-limit 60s --stop-before-seconds 80": "--stop-before-seconds 80 leaves nothing of --time-limit 60s; give",
    "--val-split= --eval-knn": "--eval-knn has no effect with --val-split ''",
    "--val-split test --val-fraction 0.5": "--val-split has no effect with --val-fraction",
    "--drop 0.1 --model-kwargs drop_rate=0.2": "--drop 0.1 and --model-kwargs drop_rate=0.2 are both given; keep one",
    "--aa rand-m99999": "--aa rand-m99999: the number of 'm99999' must be at most 101",
    "--checkpoint-interval 0m": "--checkpoint-interval 0m: a time must be above 0 and at most 100,000,000 seconds",
    "--auto-batch --memory 9999999999999999TiB": "write a number of bytes above 0, at most 2^60",
    "--auto-batch -b 4": "--auto-batch and --batch-size 4 are both given; keep one",
    "--compile --compile-mode fastest": "max-autotune-no-cudagraphs",
    "--output=": "--output '' names no folder; name one, or drop the flag",
    "--img-size-schedule 99999999:0": "99999999:0: a size must be at least 1 and at most 16,384 pixels",
    "--mean 0.5 0.5": "--mean must be one number or three",
    "--train-crop-mode rkrc --decode fast": "--decode has no effect with --train-crop-mode rkrc or rkrr",
    "--no-aug --reprob 0.2": "--reprob has no effect with --no-aug",
    "--aa rand-m9 --color-jitter 0.2": "--color-jitter has no effect under --aa",
    "--mixup 0.2 --cutmix 1 --cutmix-minmax 0.2 0.8": "--cutmix has no effect with --cutmix-minmax",
    "--mixup-off-epoch 3": "--mixup-off-epoch has no effect without --mixup, --cutmix or --cutmix-minmax",
    "--mixup 0.8 --mixup-switch-prob 0.3": "--mixup-switch-prob has no effect unless --mixup and --cutmix are both on",
    "--dataset digits": "--data-dir has no effect with --dataset digits",
    "--dataset glyphs --data-dir= --exif-rotation on": "--exif-rotation has no effect with --dataset digits or glyphs",
    "--csv-separator , --dataset hfds/x": "--csv-separator has no effect unless --dataset csv/… or --data-dir csv/…",
    "--csv-img-key x --dataset wds/x": "--csv-img-key has no effect unless --dataset csv/…, hfds/… or parquet/…",
    "--csv-caption-key x": "--csv-caption-key has no effect unless --dataset csv/…, hfds/…, parquet/… or wds/…",
    "--csv-separator || --dataset csv/x": "--csv-separator must be one character, not ||",
    "--sched constant --min-lr 1e-5": "--min-lr has no effect with --sched constant",
    "--warmup-steps 0 --warmup-lr 1e-6": "--warmup-lr has no effect with --warmup-steps 0",
    "--freeze blocks.* --linear-probe": "--freeze blocks.* and --linear-probe are both given; keep one",
}


NUMBERS = [name for name in RunConfig.flags() if RunConfig.kinds(name)[0].item in (int, float)]


def _range(name: str) -> list[float]:
    return [bound for _, bound in sorted(RunConfig.kinds(name)[0].bounds.items())]


def test_every_flag_of_numbers_has_a_finite_range():
    """A new flag without one, or with only one end."""
    ranges = {name: _range(name) for name in NUMBERS}
    assert {name: r for name, r in ranges.items() if not (len(r) == 2 and -math.inf < r[0] < r[1] < math.inf)} == {}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_range_is_refused(name):
    """A number that is none, or one that no machine can serve, from a program, a recipe or the command line."""
    kind, *more = RunConfig.kinds(name)
    low, high = _range(name)
    several = next((one.length for one in (kind, *more) if one.length is not None), None)
    for value in (math.nan, math.inf, -math.inf, 1e30, -1e30, 10**30, low - 1, high * 2):
        given = value if several is None else (value,) * (several or 3)
        settings = {"deepspeed_config": "x.json", "data_dir": "d", name: given}
        said = f"(?:{re.escape(RunConfig.range_of(name))}|takes (a )?whole numbers?( or auto)?), not "
        with pytest.raises(ValueError, match=f"{spelling(name)} {said}"):
            flags.from_values(settings)
        words = [spelling(name), *map(str, given)] if isinstance(given, tuple) else [f"{spelling(name)}={value}"]
        with pytest.raises(ValueError, match=re.escape(spelling(name))):
            parse([*BASE, *words])


def test_a_blank_output_folder():
    """A run in the working folder, or in one whose name nobody can see."""
    with pytest.raises(ValueError, match="--output must name a folder"):
        parse([*BASE, "--output", " "])


@pytest.mark.parametrize("words", REFUSED)
def test_refused_in_plain_words(words):
    """A contradiction, or a flag that would silently do nothing."""
    with pytest.raises(ValueError, match=re.escape(REFUSED[words])) as error:
        parse([*BASE, *words.split()])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        "--no-aug --hflip 0 --reprob 0 --aa none",
        "--sched constant --min-lr 0",
        "--mixup 0 --cutmix 0",
        "--warmup-steps 0",
        "--eval-only --sched constant --mixup 0 --no-model-ema --checkpoint-interval 0",
        "--val-split= --eval-interval 0",
        "--val-split= --no-aug --interpolation nearest",
        "--drop 0 --model-kwargs drop_rate=0.2",
    ],
)
def test_neutral_values_are_never_without_effect(words):
    """Scripts that write 0 or none everywhere must go through."""
    parse([*BASE, *words.split()])


FROM_A_PROGRAM = {
    "--deepspeed_config takes a word or a block, not ['a']": {"deepspeed_config": ["a"]},
    "--deepspeed_config: a key must be text, not 1": {"deepspeed_config": {1: 2}},
    "--data-dir takes one word or several, not {}": {"data_dir": {}},
    "--model-kwargs: a key must be text, not 1": {"model_kwargs": {1: 2}},
    "--augment-on takes cpu or device, not []": {"augment_on": []},
    "--augment-on takes cpu or device, not ['cpu']": {"augment_on": ["cpu"]},
    "--augment-on 3 is none of cpu, device": {"augment_on": 3},
    "--no-wandb and --set wandb.enabled are both given; keep one": {"wandb": False, "set": ["wandb.enabled=true"]},
}


@pytest.mark.parametrize("message", FROM_A_PROGRAM)
def test_a_programs_mistake_in_plain_words(message):
    """An invalid value that is also said to be missing, or a list that is shown as the valid word in it."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        flags.from_values({"deepspeed_config": "x.json", "data_dir": "d", **FROM_A_PROGRAM[message]})


def test_a_json_of_a_program_may_be_any_mapping():
    """A frozen mapping that is refused."""
    json = {"bf16": {"enabled": True}}
    assert flags.from_values({"deepspeed_config": MappingProxyType(json), "data_dir": "d"}).deepspeed_config == json


def test_a_help_text_has_one_lead():
    """ "--task clip, siglip: --lock-image: …", which reads as if it were two flags."""
    texts = [help_of(name) for name in RunConfig.flags()]
    assert [text for text in texts if re.match(r"--[^:]*: --", text)] == []
    assert sum(text.startswith("--task ") for text in texts) > 20


def test_no_data_and_no_json():
    """A run without data or JSON must be told what to give."""
    with pytest.raises(ValueError, match="--data-dir DIR"):
        parse(["--deepspeed_config", "x.json"])
    with pytest.raises(ValueError, match="--deepspeed_config FILE is missing"):
        parse(["--dataset", "digits"])


def test_recipe_and_command_line(tmp_path):
    """The command line has the last word; dashes and underscores are one; paths are found beside the recipe."""
    (tmp_path / "ds.json").write_text("{}")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "deepspeed_config: ds.json\ndata-dir: elsewhere\nepochs: 3\nmodel-kwargs: {depth: 2}\nmean: [0.1, 0.2, 0.3]\n"
        "no-aug: true\nlr: 1e-3\nwandb: null\n"
    )
    config = parse(["--recipe", str(recipe), "--epochs", "5"])
    assert config.deepspeed_config == str(tmp_path / "ds.json")
    assert (config.data_dir, config.epochs, config.no_aug) == ("elsewhere", 5, True)
    assert (config.model_kwargs, config.mean) == ({"depth": 2}, (0.1, 0.2, 0.3))
    assert config.lr == 1e-3  # YAML reads 1e-3 as text
    assert {"epochs", "lr", "no_aug"} <= config.model_fields_set
    assert "wandb" not in config.model_fields_set  # a null leaves it to the JSON
    assert "wandb" not in flags.from_values({"wandb": None}, str(recipe)).model_fields_set


SWITCHES = [name for name in RunConfig.flags() if RunConfig.kinds(name)[0].item is bool]


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_can_be_turned_off_over_a_recipe(tmp_path, name):
    """A recipe's "true" that the command line cannot take back."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{name}: true\n")
    twin = "--aug" if name == "no_aug" else "--no-" + name.replace("_", "-")
    config = parse(["--recipe", str(recipe), *BASE, twin])
    assert getattr(config, name) is False
    assert name in config.model_fields_set
    config = parse([*BASE, twin])
    assert getattr(config, name) is False


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("grad_checkpointing", "true", "full"),
        ("grad_checkpointing", "2", "2"),
        ("eval_knn", "true", 20),
    ],
)
def test_a_flag_whose_value_may_be_left_out(tmp_path, name, value, expected):
    """A recipe of a time when it was a switch; a twin that does not turn it off; a program's True or number."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{name}: {value}\n")
    words = ["--recipe", str(recipe), *BASE]
    assert getattr(parse(words), name) == expected
    config = parse([*words, "--no-" + name.replace("_", "-")])
    assert getattr(config, name) == config.default_of(name)
    assert name in config.model_fields_set
    settings = {"deepspeed_config": "x.json", "data_dir": "d", name: yaml.safe_load(value)}
    assert getattr(flags.from_values(settings), name) == expected


@pytest.mark.parametrize("name", ["exif_rotation", "class_parallel"])
def test_on_and_off_without_quotes(tmp_path, name):
    """A recipe's `on`, which YAML reads as true."""
    recipe = tmp_path / "r.yaml"
    for word in ("on", "off", "'on'"):
        recipe.write_text(f"tp: 2\n{name}: {word}\n")
        assert getattr(parse(["--recipe", str(recipe), *BASE]), name) == word.strip("'")


@pytest.mark.parametrize(("value", "lines"), [("auto", 0), ("kept", 1)])
def test_a_removed_setting_in_a_recipe_is_ignored(tmp_path, capsys, value, lines):
    """An old run's config.yaml that is an error, or a setting that is ignored in silence."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"drop_path: 0.1\ndrop_path_compute: {value}\n")
    assert parse(["--recipe", str(recipe), *BASE]).drop_path == 0.1
    said = capsys.readouterr().err
    assert said.count("\n") == said.count("drop_path_compute was removed and is ignored") == lines


def test_a_recipe_of_training_evaluates(tmp_path):
    """What a recipe says and evaluation does not need is left aside; on the command line it is refused."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("checkpoint_interval: 5\nlog_samples: true\nlr: 0.1\nmodel_ema: true\nimg_size: 32\nseed: 3\n")
    words = ["--recipe", str(recipe), *BASE]
    trained = parse(words)
    assert (trained.checkpoint_interval, trained.lr, trained.model_ema) == ("5", 0.1, True)
    config = parse([*words, "--eval-only"])
    assert (config.checkpoint_interval, config.log_samples, config.lr) == ("epoch", False, None)
    assert (config.model_ema, config.img_size, config.seed) == (False, 32, 3)
    assert not {"lr", "checkpoint_interval", "log_samples", "model_ema"} & config.model_fields_set
    with pytest.raises(ValueError, match="--lr has no effect with --eval-only"):
        parse([*words, "--eval-only", "--lr", "0.1"])


def test_what_the_command_line_makes_idle_in_a_recipe_is_left_aside(tmp_path):
    """A recipe that can be used with no word of it changed; its own mistakes are refused as ever."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("aa: rand-m9\nmixup: 0.8\nmixup_prob: 0.5\ncrop_pct: 0.9\ncolor_jitter: 0.0\n")
    words = ["--recipe", str(recipe), *BASE]
    config = parse([*words, "--no-aug", "--mixup", "0", "--val-split", ""])
    assert (config.aa, config.mixup_prob, config.crop_pct) == ("", 1.0, None)
    recipe.write_text("warmup_steps: 7\nfreeze: [blocks.0]\n")
    config = parse([*words, "--warmup-epochs", "2", "--linear-probe"])
    assert (config.warmup_steps, config.warmup_epochs, config.freeze, config.linear_probe) == (None, 2, (), True)
    recipe.write_text("aa: rand-m9\ncolor_jitter: 0.2\n")
    with pytest.raises(ValueError, match="--color-jitter has no effect under --aa"):
        parse(words)
    config = parse([*words, "--aa", "none"])
    assert (config.aa, config.color_jitter) == ("", 0.2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("profile_steps: 10:13", "10:13"),  # sexagesimal in YAML 1.1
        ("output: 20261128_2130", "20261128_2130"),
        ("output: 1.10", "1.10"),
        ("seed: 010", 10),  # octal
        ("output: ~/runs/$HOME", "~/runs/$HOME"),  # the shell's work
        ("freeze: [1128_2130, 010]", ("1128_2130", "010")),
        (
            "model_kwargs: {depth: &two 2, img_size: &sizes [8, 9]}\nepochs: *two\nscale: *sizes",
            {"depth": 2, "img_size": [8, 9]},
        ),
    ],
)
def test_a_recipe_means_what_the_command_line_means(tmp_path, text, expected):
    """A number of YAML that is another one, or a variable in a name that another program replaces."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    name = text.partition(":")[0]
    config = parse(["--recipe", str(recipe), *BASE])
    assert getattr(config, name) == expected
    recipe.write_text(flags.to_yaml({name: expected}))  # a run's config.yaml
    assert getattr(parse(["--recipe", str(recipe), *BASE]), name) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "line 2, column 1: malformed YAML"),
        ("- 1\n", "a recipe is a table of flags, not a list"),
        ("lr: 1e-3\nmodel: x\nlr: 1e-4\n", 'line 3, column 1: malformed YAML: "lr" is given twice'),
        ("model_kwargs: {depth: 2, depth: 3}\n", '"depth" is given twice'),
        ("checkpoint_interval: 1:30\n", "--checkpoint-interval 1:30: write"),
    ],
)
def test_bad_recipes(tmp_path, text, message):
    """A recipe's mistake must name the file and the place."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(["--recipe", str(recipe), *BASE])


def test_yaml_round_trip(tmp_path):
    """config.yaml must say the same again: every flag, written out and read back."""
    words = "--model-kwargs depth=3 --mixup 0.2 --scale 0.3 0.9 --no-aug --scale 0.08 1"
    config = parse([*BASE, *words.split()])
    values = {n: getattr(config, n) for n in RunConfig.flags() if getattr(config, n) is not None}
    path = tmp_path / "config.yaml"
    path.write_text(flags.to_yaml(values))
    again = parse(["--recipe", str(path)])
    assert again == config
    assert set(yaml.safe_load(path.read_text())) <= RunConfig.model_fields.keys()
