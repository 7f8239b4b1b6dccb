"""Settings: the paper's tables value for value, and a sentence for each wrong or idle flag."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from freshper.presets import CONFIG_A, CONFIG_DEFAULT, PRESETS

from envs import ENVS
from envs.frozenlake import FrozenLake
from freshper.backends import choose_backend
from freshper.config import Config
from freshper.engine_vllm import folder_of_weights, gpus_of_vllm
from freshper.flags import check_unchanged, parse_args
from freshper.trainer import MAX_GRAD_NORM, WARMUP_STEPS

ROOT = Path(__file__).parent.parent
TABLES = json.loads((ROOT / "tests/data/paper_tables.json").read_text())  # typed from the paper


def settings_of(flags):
    """Return the settings of a command line."""
    return parse_args(flags.split()).config


def paper_table(name, row):
    """Return a row of a table of the paper: column -> value."""
    return dict(zip(TABLES[name]["columns"], TABLES[name][row], strict=True))


@pytest.mark.parametrize("env", ENVS)
def test_the_paper_preset_holds_the_tables(env):
    """Tables 2, 3 and 4, section 4.1 and appendix F."""
    config = settings_of(f"--preset paper --env {env}")
    row = paper_table("env_details", env)
    assert config.model == f"Qwen/Qwen2.5-{row['model']}-Instruct"
    assert config.max_tokens == row["seq_len"]
    assert (config.max_turns or ENVS[env]().max_turns) == row["max_actions"]

    training = paper_table("training_config", env)
    assert config.micro_batch_size == training["micro_batch"]
    assert config.iterations == training["max_steps"]
    assert config.zero_stage == training["zero"]

    constants = {"warmup_steps": WARMUP_STEPS, "max_grad_norm": MAX_GRAD_NORM}
    expected = paper_table("config_comparison", row["config"]) | TABLES["common"]
    for name, value in expected.items():
        assert (constants.get(name) or getattr(config, name)) == value, name
    assert config.tau == (1000 if env == "aime" else 500)  # section 4.1
    assert config.batch_size == 128  # docs/differences.md
    assert config.slippery is (env == "frozenlake")  # docs/differences.md


@pytest.mark.parametrize(
    ("preset", "env"), [(preset, env) for preset in PRESETS for env in PRESETS[preset]]
)
def test_the_methods_differ_in_nothing_but_their_rows_of_table_5(preset, env):
    flags = f"--preset {preset} --env {env} --method"
    configs = {name: settings_of(f"{flags} {name}") for name in ("freshper", "per", "on_policy")}
    fresh, standard, on_policy = map(vars, configs.values())
    assert {k for k in fresh if fresh[k] != standard[k]} == {"method", "decay", "beta"}
    assert {k for k in fresh if fresh[k] != on_policy[k]} == {"method", "replay_ratio"}
    assert set(CONFIG_A) == set(CONFIG_DEFAULT)

    for method in ("freshper", "per") if (preset, env) == ("paper", "frozenlake") else ():
        row, config = paper_table("replay_config", method), configs[method]
        assert config.capacity == row["capacity"]
        assert config.replay_ratio == row["K"]
        assert (config.beta or None) == row["beta"]
        assert (config.tau if config.decay == "exponential" else None) == row["tau"]


def test_there_are_at_most_48_settings_and_help_explains_them_before_torch_is_imported():
    code = """if True:
        import atexit, runpy, sys
        slow = {"torch", "transformers", "datasets", "faiss"}
        atexit.register(lambda: print(slow & set(sys.modules)))
        sys.argv = ["train.py", "--help"]
        runpy.run_path("train.py", run_name="__main__")"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("set()\n")
    shown, fields = " ".join(done.stdout.split()), dataclasses.fields(Config)
    assert len(fields) <= 48
    for field in fields:
        assert f"{field.metadata['help']} [{field.default}]" in shown


PAPERS = "Qwen/Qwen2.5-0.5B-Instruct"
SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"
NOT_BOTH = "model tiny: a GPU or the paper's model is missing on this machine"
BOTH = f"model {PAPERS}: a GPU and the paper's model are on this machine"


@pytest.mark.parametrize(
    ("flags", "gpu", "cached", "model", "notes"),
    [
        ("", False, True, "tiny", (NOT_BOTH,)),
        ("", True, False, "tiny", (NOT_BOTH,)),
        ("", True, True, PAPERS, (BOTH,)),
        ("--preset tiny", True, True, "tiny", ()),
        ("--preset paper", False, False, PAPERS, ()),
        ("--env gsm8k --preset small", False, False, SMALL, ()),
        ("--env gsm8k --preset small --model someone/model", True, True, "someone/model", ()),
        ("--model someone/model", False, False, "someone/model", ()),
    ],
)
def test_the_numbers_follow_from_the_model(flags, gpu, cached, model, notes, monkeypatch):
    """A pretrained model never gets the tiny preset, nor a tiny one the paper's."""
    monkeypatch.setattr("freshper.flags.glob", lambda pattern: ["/dev/nvidia0"] * gpu)
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda *_: "config.json" if cached else None
    )
    config, flags_given, noted = parse_args(flags.split())
    expected = "small" if "small" in flags else "tiny" if model == "tiny" else "paper"
    assert (config.model, config.preset, noted) == (model, expected, notes)
    assert flags_given == tuple(re.findall(r"--(\w+)", flags))
    env = config.make_env()
    assert (env.style, env.cell_size) == (("terse", 14) if config.tiny else ("full", 56))


def test_what_follows_from_the_settings(tmp_path, monkeypatch, model_folder):
    monkeypatch.chdir(tmp_path)
    config = settings_of("")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.alpha = 0.5
    assert config.title() == "frozenlake (not slippery), freshper, preset tiny, seed 42"
    for preset, note in (("tiny", " (training starts along the way)"), ("paper", "")):
        cliff = settings_of(f"--env cliffwalking --preset {preset}")
        assert cliff.task() == f"cliffwalking{note}"
        assert cliff.make_env().along_the_way == bool(note)
    # no run overwrites another
    for name in ("out/frozenlake-freshper-42", "out/frozenlake-freshper-42-2"):
        assert config.folder() == Path(name)
        config.folder().mkdir(parents=True)
    # a folder of one of our models
    assert settings_of(f"--model {model_folder['text']}").preset == "tiny"
    assert settings_of("--slippery").make_env().slippery is True

    # at tau = 20
    for decay, factor in {"exponential": 0.36788, "polynomial": 0.5, "limit": 1.0}.items():
        function = settings_of(f"--decay {decay}").decay_function()
        assert function(20) == pytest.approx(factor, abs=1e-5)
    # before any drift is observed: five iterations of 2 + 4 steps
    assert settings_of("--tau auto --replay_ratio 4 --ppo_epochs 2").decay_function().tau == 30.0
    per = settings_of("--method per --iterations 11")
    assert per.decay_function()(20) == 1.0
    assert [per.beta_at(i) for i in (0, 5, 10)] == pytest.approx([0.4, 0.7, 1.0])
    assert config.beta_at(0) == config.beta_at(199) == 0.0


OF_A_RUN = "but must be the folder of a run:"

# flags, and below them how their sentence begins
SENTENCES = """
--env nowhere
    argument --env: invalid choice: 'nowhere' (choose from 'frozenlake',
--slippery maybe
    argument --slippery: invalid boolean value: 'maybe'
--zero_stage 4
    argument --zero_stage: invalid choice: 4 (choose from 0, 1, 2, 3)
--tau five
    argument --tau: invalid
--it 3
    unrecognized arguments: --it 3
--preset tiny --model a/b
    --preset is tiny, but must be paper with --env frozenlake and --model a/b
--preset small
    --preset is small, but must be tiny or paper; small is for --env gsm8k without --data
--preset small --env gsm8k --data a/b
    --preset is small, but must be tiny or paper; small is for --env gsm8k
--preset tiny --env gsm8k --model a/b
    --preset is tiny, but must be paper or small with --env gsm8k
--method on_policy --replay_ratio 4
    --replay_ratio is 4, but must be 0 with --method on_policy
--method per --decay exponential
    --decay is exponential, but must be none with --method per
--tau auto --decay polynomial
    --tau is auto, but must be a number with this --decay
--decay limit --tau 2 --ppo_epochs 3
    --tau is 2.0, but must be at least --ppo_epochs with --decay limit
--backend vllm+torch --engine_memory 1.5
    --engine_memory is 1.5, but must be above 0 and below 1
--resume=
    --resume is , but must be the folder of a run
--resume nowhere
    --resume is nowhere, but must be the folder of a run: [Errno 2] No such file or directory
--resume broken
    --resume is broken, but must be the folder of a run: Expecting property name
--resume other
    --resume is other, but must be the folder of a run: its config.json is not that of a run
--resume run --method per
    --method is per, but must be freshper as in the earlier run
--resume run --capacity 20000
    --capacity is 20000, but must be 10000 as in the earlier run
--resume run --max_turns 3
    --max_turns is 3, but must be 0 as in the earlier run
--resume run --slippery
    --slippery is True, but must be False as in the earlier run
--resume run --format_penalty 0.3
    --format_penalty is 0.3, but must be 0.15 as in the earlier run
--resume run --data rows.jsonl
    --data is rows.jsonl, but must be
--resume run --search_url http://localhost:1/retrieve
    --search_url is http://localhost:1/retrieve, but must be
--resume run --temperature 0.5
    --temperature is 0.5, but must be 0.99 as in the earlier run
--resume run --eval_episodes 8
    --eval_episodes is 8, but must be 256 as in the earlier run
--out elsewhere --resume run
    --out is elsewhere, but has no effect with --resume
--data questions.json
    --data is questions.json, but has no effect with --env frozenlake
--slippery True --env sokoban_simple
    --slippery is True, but has no effect with --env sokoban_simple
--tau 5 --method per
    --tau is 5.0, but has no effect with --method per and --decay none
--alpha 0.5 --method on_policy
    --alpha is 0.5, but has no effect with --method on_policy and --replay_ratio 0
--beta 0.4 --replay_ratio 0
    --beta is 0.4, but has no effect with --method freshper and --replay_ratio 0
--epsilon 0.5 --alpha 0
    --epsilon is 0.5, but has no effect with --alpha 0
--tau 9 --alpha 0
    --tau is 9.0, but has no effect with --alpha 0
--beta 0.4 --alpha 0
    --beta is 0.4, but has no effect with --alpha 0
--eviction lowest_priority --capacity 11520
    --eviction is lowest_priority, but has no effect with --capacity 11520 for 11520 episodes
--eviction lowest_priority --alpha 0
    --eviction is lowest_priority, but has no effect with --alpha 0
--dual_clip 3 --method on_policy
    --dual_clip is 3.0, but has no effect with --replay_ratio 0 and --ppo_epochs 1
--ratio_clip 0.1 --replay_ratio 0
    --ratio_clip is 0.1, but has no effect with --replay_ratio 0 and --ppo_epochs 1
--env gsm8k --data a/b
    --data is a/b, but must be empty with --model tiny, which reads generated questions
--zero_stage 1 --backend hf+torch
    --zero_stage is 1, but has no effect with --backend hf+torch
--engine_memory 0.3 --backend hf+deepspeed
    --engine_memory is 0.3, but has no effect with --backend hf+deepspeed
""".strip().splitlines()
SENTENCES = dict(zip(SENTENCES[::2], map(str.strip, SENTENCES[1::2]), strict=True))

# what is allowed, and below it values that are not
ALLOWED = """
above 0
    iterations=0 group_size=0 batch_size=-4 capacity=0 lr=0 advantage_clip=-1 temperature=0
0 or more
    replay_ratio=-1 seed=-1 kl_loss_coef=-0.1 top_k=-1 format_penalty=-1 max_turns=-1
above 0
    epsilon=0
0 or more
    truncated_is=-2
a finite number: 0, or from 1e-30 to 1e30
    tau=nan tau=inf lr=inf alpha=nan lr=1e39 tau=1e-320
at most 999999999
    seed=1000000000 seed=4294967296
at most 10000000
    capacity=10000000000 eval_every=100000000000000000000
at most max_tokens 512
    max_turns=513
between 0 and 1
    alpha=1.5 alpha=-0.1 beta=2 beta=-1
at least 1, or auto
    tau=0 tau=-5 tau=0.5
above 0 and at most 1
    top_p=0 top_p=1.5
0 or above 1
    dual_clip=-2 dual_clip=0.9
at least a batch
    capacity=10
a divisor of rollout_batch_size
    group_size=5
below max_tokens 512
    max_new_tokens=600
tiny, a folder with a config.json, or a hub id
    model=./no/such/folder model=nothing model=afile
a folder that does not exist yet
    out=afile
""".strip().splitlines()
for allowed, values in zip(ALLOWED[::2], ALLOWED[1::2], strict=True):
    for name, value in (word.split("=") for word in values.split()):
        shown = float(value) if type(getattr(Config, name)) is float else value
        SENTENCES[f"--{name}={value}"] = f"--{name} is {shown}, but must be {allowed}"


@pytest.mark.parametrize("flags", SENTENCES)
def test_bad_flags_get_one_sentence(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = json.dumps(dataclasses.asdict(settings_of("--backend hf+torch")))
    for name, content in {"run": run, "broken": "{oops", "other": '{"lr": 1.0}'}.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(content)
    Path("afile").write_text("no folder")
    before = sorted(Path().rglob("*"))

    with pytest.raises(SystemExit) as stop:
        parse_args(flags.split())
    assert stop.value.code == 2
    assert sorted(Path().rglob("*")) == before  # nothing is written
    (line,) = capsys.readouterr().err.splitlines()
    assert line.partition(": error: ")[2].startswith(SENTENCES[flags])


AUTO = "--preset is auto, but must be tiny with --env frozenlake and --model tiny"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("decay", "abc", "argument --decay: invalid choice: 'abc' (choose from"),
        ("iterations", 3.5, "argument --iterations: invalid int value: '3.5'"),
        ("lr", None, "argument --lr: invalid float value: 'None'"),
        ("lr", -1.0, "--lr is -1.0, but must be above 0"),
        ("slippery", [1], "argument --slippery: invalid boolean value: '[1]'"),
        ("batch_size", 20_000, "--capacity is 10000, but must be at least a batch"),
        ("preset", "auto", AUTO),
        ("a flag", 1, "its config.json is not that of a run of this version"),
    ],
)
def test_settings_of_an_earlier_run_pass_the_checks_of_flags(
    name, value, sentence, tmp_path, capsys
):
    stored = dataclasses.asdict(settings_of("--backend hf+torch"))
    (tmp_path / "config.json").write_text(json.dumps(stored))
    resumed = settings_of(f"--resume {tmp_path}")
    assert dataclasses.asdict(resumed) == stored | {"resume": str(tmp_path)}

    (tmp_path / "config.json").write_text(json.dumps(stored | {name: value}))
    with pytest.raises(SystemExit):
        settings_of(f"--resume {tmp_path}")
    assert f": error: --resume is {tmp_path}, {OF_A_RUN} {sentence}" in capsys.readouterr().err


def test_changed_settings_of_an_earlier_run_are_noted(tmp_path):
    stored = dataclasses.asdict(settings_of("--backend hf+torch"))
    (tmp_path / "config.json").write_text(json.dumps(stored))
    flags = f"--resume {tmp_path} --lr 0.5 --iterations 360"
    assert parse_args(flags.split()).notes == ("lr is 0.5, was 0.001",)


def test_resuming_may_change_what_comes_later_and_nothing_else():
    """The stored episodes and states are those of one problem."""
    earlier = dataclasses.asdict(settings_of(""))
    refused = set()
    for name in earlier:
        try:
            check_unchanged(earlier, earlier | {name: "another"})
        except ValueError:
            refused.add(name)
    later = """iterations save_every eval_every alpha tau beta replay_ratio batch_size ppo_epochs lr
    ratio_clip dual_clip advantage_clip entropy_coef micro_batch_size engine_memory out resume"""
    assert earlier.keys() - refused == set(later.split())


def test_off_is_no_flag_without_effect():
    """Arms of the comparisons: a flag that switches something off may be repeated."""
    assert settings_of("--method per --beta 0 --alpha 0 --eviction fifo").alpha == 0
    assert settings_of("--alpha 0 --decay limit --tau 9").tau == 9
    # No buffer, so its capacity limits nothing.
    assert settings_of("--method on_policy --rollout_batch_size 20000").capacity < 20_000
    assert settings_of("--method on_policy --ppo_epochs 3 --dual_clip 3").dual_clip == 3


def test_an_environment_gets_the_flags_that_it_lists(monkeypatch):
    monkeypatch.setitem(ENVS, "own", type("Own", (FrozenLake,), {}))
    env = settings_of("--env own --slippery --format_penalty 0.3 --max_turns 4").make_env()
    assert (env.slippery, env.format_penalty, env.max_turns) == (True, 0.3, 4)
    monkeypatch.setitem(ENVS, "own", type("Own", (FrozenLake,), {"settings": ()}))
    with pytest.raises(SystemExit):
        settings_of("--env own --slippery")


@pytest.mark.parametrize(
    ("flags", "gpu", "missing", "line"),
    [
        ("--model tiny", True, "", "backend hf+torch: on cpu"),
        ("--preset paper", False, "", "backend hf+torch: on cpu"),
        ("--preset paper", True, "deepspeed", "backend hf+torch: on cuda, without deepspeed"),
        ("--preset paper", True, "", "backend vllm+deepspeed: on cuda"),
        ("--backend vllm+torch", True, "vllm", "vllm+torch, but vllm is not installed: "),
        (
            "--preset paper --zero_stage 1",
            False,
            "",
            "1, but has no effect with --backend hf+torch",
        ),
        (
            "--model tiny",
            False,
            "",
            "hf+torch, but must train with deepspeed on the 2 ranks started",
        ),
    ],
)
def test_the_backend_follows_from_what_is_installed(flags, gpu, missing, line, monkeypatch):
    config, flags_given, _ = parse_args(flags.split())
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == missing else name
    )
    monkeypatch.setenv("WORLD_SIZE", "2" if "2 ranks" in line else "1")
    if line.startswith("backend"):
        chosen, notes = choose_backend(config, flags_given)
        assert notes == (line,)
        assert line.startswith(f"backend {chosen.backend}: ")
        assert choose_backend(chosen, flags_given) == (chosen, ())
    else:
        flag = "zero_stage" if "zero_stage" in flags else "backend"
        with pytest.raises(ValueError) as error:
            choose_backend(config, flags_given)
        assert str(error.value).startswith(f"--{flag} is {line}")


@pytest.mark.parametrize(
    ("visible", "ranks", "heads", "gpus", "idle"),
    [
        ("0", 1, (14, 2), [], ""),  # shared
        ("3,4", 1, (14, 2), ["4"], ""),
        ("3,4,5,6", 1, (14, 2), ["4", "5"], "6"),
        ("0,1,2,3,4,5,6,7", 4, (28, 4), ["4", "5", "6", "7"], ""),
        ("0,1,2,3,4,5", 1, (12, 12), ["1", "2", "3", "4"], "5"),
        ("0,1,2", 1, (9, 3), ["1"], "2"),  # SmolLM2
    ],
)
def test_vllm_takes_as_many_gpus_as_divide_the_heads(
    visible, ranks, heads, gpus, idle, monkeypatch, capsys
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    model = SimpleNamespace(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    assert gpus_of_vllm("cuda", model) == gpus
    said = capsys.readouterr().out
    assert said.startswith(f"GPUs {idle} stay idle") if idle else said == ""


def test_weights_of_a_model_have_the_same_path_in_each_run(text_policy, vision_policy):
    """Runs at the same time do not share it."""
    policies = text_policy, text_policy, vision_policy
    folders = [folder_of_weights(1, policy.model.config) for policy in policies]
    try:
        assert len(set(folders)) == 3
        os.rmdir(folders[0])
        assert folder_of_weights(1, text_policy.model.config) == folders[0]
    finally:
        for folder in folders:
            os.rmdir(folder)


@pytest.mark.parametrize("value", ["5m", "0", "-1", "nan"])
def test_a_wrong_time_limit_is_named(value):
    variables = os.environ | {"FRESHPER_TIMEOUT": value}
    command = [sys.executable, "-c", "import freshper.errors"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"FRESHPER_TIMEOUT is {value}, but must be a whole number")
