"""Settings: the paper's tables value for value, and a sentence for a wrong or idle flag."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from compare import EXHIBITS
from envs import ENVS
from envs.base import UserError
from envs.frozenlake import FrozenLake
from freshper.backends import join_ranks, make_env
from freshper.config import Config, Preset
from freshper.engine_hf import Sampling
from freshper.flags import parse_args
from freshper.priority import age_decay
from freshper.reinforce import RATIO_CLIP
from freshper.report import task
from freshper.run import folder_of
from freshper.trainer import MAX_GRAD_NORM, WARMUP_STEPS

ROOT = Path(__file__).parent.parent
TABLES = json.loads((ROOT / "tests/data/paper_tables.json").read_text())  # typed from the paper


def settings_of(flags):
    """Return the settings of a command line."""
    return parse_args(flags.split())


def refusal(flags, capsys):
    """Return the one sentence that a command line is refused with."""
    with pytest.raises(SystemExit) as stop:
        settings_of(flags)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.partition(": error: ")[2]


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

    settings = vars(config) | vars(Sampling()) | {"ratio_clip": RATIO_CLIP}
    settings |= {"warmup_steps": WARMUP_STEPS, "max_grad_norm": MAX_GRAD_NORM}
    expected = paper_table("config_comparison", row["config"]) | TABLES["common"]
    assert {name: settings[name] for name in expected} == expected
    assert config.tau == (1000 if env == "aime" else 500)  # section 4.1
    assert config.batch_size == 128  # docs/differences.md
    assert config.slippery is (env == "frozenlake")  # docs/differences.md


def test_the_arms_of_table_3_have_its_numbers():
    a, default, wide = (settings_of(f"--method {arm}") for arm in EXHIBITS["config"])
    for config, name in ((a, "A"), (default, "Default")):
        expected = paper_table("config_comparison", name)
        assert {column: getattr(config, column) for column in expected} == expected
    assert wide == dataclasses.replace(a, advantage_clip=20.0)


@pytest.mark.parametrize("preset", get_args(Preset))
@pytest.mark.parametrize("env", ENVS)
def test_the_methods_differ_in_nothing_but_their_rows_of_table_5(preset, env):
    flags = f"--preset {preset} --env {env} --method"
    configs = {name: settings_of(f"{flags} {name}") for name in ("freshper", "per", "on_policy")}
    fresh, standard, on_policy = map(vars, configs.values())
    assert {k for k in fresh if fresh[k] != standard[k]} == {"method", "decay", "beta"}
    assert {k for k in fresh if fresh[k] != on_policy[k]} == {"method", "replay_ratio"}

    for method in ("freshper", "per") if (preset, env) == ("paper", "frozenlake") else ():
        config = configs[method]
        tau = config.tau if config.decay == "exponential" else None
        numbers = [config.capacity, config.replay_ratio, tau, config.beta or None]
        assert numbers == TABLES["replay_config"][method]


def test_help_shows_what_will_run_before_torch_is_imported():
    code = """if True:
        import atexit, runpy, sys
        slow = {"torch", "transformers", "datasets", "faiss", "pandas"}
        atexit.register(lambda: print(slow & set(sys.modules)))
        sys.argv = ["train.py", "--env", "gsm8k", "--seed", "5", "--help"]
        runpy.run_path("train.py", run_name="__main__")"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("set()\n")
    shown, config = " ".join(done.stdout.split()), settings_of("--env gsm8k --seed 5")
    assert config.iterations == 600
    for name, value in vars(config).items():
        text = re.split(f" --{name}[ ,]", shown)[1].partition(f" [{value}]")[0]
        assert len(text.split()) > 2, name
    assert "priority exponent, P(i) ~ p_i^alpha (section 4.1: 0.6) [0.6]" in shown


def test_what_follows_from_the_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = settings_of("")
    assert task(config) == "frozenlake"
    assert task(settings_of("--env gsm8k")) == "gsm8k (generated questions)"
    assert task(settings_of("--env gsm8k --preset paper")) == "gsm8k (openai/gsm8k:main)"
    for preset, along_the_way in (("tiny", True), ("paper", False)):
        cliff = settings_of(f"--env cliffwalking --preset {preset}")
        assert make_env(cliff).along_the_way == along_the_way
    env, large = make_env(config), make_env(settings_of("--preset paper"))
    assert (env.style, env.cell_size, large.style, large.cell_size) == ("terse", 14, "full", 56)
    # no run overwrites another
    for name in ("out/frozenlake-freshper-42", "out/frozenlake-freshper-42-2"):
        assert folder_of(config) == Path(name)
        folder_of(config).mkdir(parents=True)
    # at tau = 20
    factors = {"exponential": 0.36788, "polynomial": 0.5, "limit": 1.0, "none": 1.0}
    for decay, factor in factors.items():
        assert age_decay(Config(decay=decay, tau=20.0))(20) == pytest.approx(factor, abs=1e-5)
    per = settings_of("--method per --iterations 11")
    assert [per.beta_at(i) for i in (1, 6, 11)] == pytest.approx([0.4, 0.7, 1.0])
    assert config.beta_at(1) == config.beta_at(200) == 0.0


# A range, a rule, no effect, a wrong choice: flags, and how their sentence begins.
SENTENCES = f"""\
--env nowhere | argument --env: invalid choice: 'nowhere' (choose from 'frozenlake',
--tau auto | argument --tau: invalid float value: 'auto'
--it 3 | unrecognized arguments: --it 3
--lr nan | --lr is nan, but must be above 0 and finite
--out run | --out is run, but must be a folder that does not exist yet
--lr inf | --lr is inf, but must be above 0
--dual_clip 0.9 | --dual_clip is 0.9, but must be 0 or above 1
--beta 1.5 | --beta is 1.5, but must be between 0 and 1
--seed {2**63} | --seed is {2**63}, but must be 0 or more and below 2^63
--max_turns=-1 | --max_turns is -1, but must be 0 or more
--model a/b | --model is a/b, but --preset tiny takes tiny models only
--model {300 * "a"} | --model is aaa
--preset small --model tiny | --model is tiny, but --preset tiny takes tiny models only
--capacity 10 | --capacity is 10, but --capacity must be at least --batch_size and
--batch_size 10001 | --batch_size is 10001, but --capacity must be at least --batch
--method per --decay exponential | --decay is exponential, but must be none with --method
--data x --env aime | --data is x, but must be empty with --preset tiny
--zero_stage 3 | --zero_stage is 3, but has no effect unless DeepSpeed trains
--zero_stage 3 --backend hf+deepspeed | --zero_stage is 3, but hf+deepspeed needs
--backend hf+deepspeed --preset paper --env nq_search | --backend is hf+deepspeed, but hf+
--slippery --env gsm8k | --slippery has no effect with --env gsm8k
--alpha 1 --method on_policy | --alpha is 1.0, but has no effect without replay (--method on
--tau 5 --method per | --tau is 5.0, but has no effect with --decay none
--resume nowhere | --resume is nowhere, which has no run: [Errno 2] No such file
--resume broken | --resume is broken, which has no run: Expecting property name
--resume other | --resume is other, which has no run: Config.__init__() got an unexp
--resume old | --tau is -5.0, but must be above 0
--resume evil | --resume is evil, which has no run: its base_priority is 'evil'
--resume few --lr 0.5 | --lr is 0.5, but only iterations and micro_batch_size can
--resume run --lr 0.5 | --lr is 0.5, but only iterations and micro_batch_size can
--resume run --iterations 0 | --iterations is 0, but must be above 0"""


@pytest.mark.parametrize("line", SENTENCES.split("\n"))
def test_bad_flags_get_one_sentence(line, tmp_path, monkeypatch, capsys):
    """The system takes no name of a file with 300 characters."""
    monkeypatch.chdir(tmp_path)
    run = vars(settings_of(""))
    folders = {"run": run, "other": {"no": 1.0}}
    folders |= {"few": {}, "old": run | {"tau": -5.0}, "evil": run | {"base_priority": "evil"}}
    for name, settings in folders.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(settings))
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{oops")
    before = sorted(Path().rglob("*"))
    flags, sentence = line.split(" | ")
    assert refusal(flags, capsys).startswith(sentence)
    assert sorted(Path().rglob("*")) == before  # nothing is written


def test_resuming_keeps_all_settings_but_two(tmp_path):
    stored = vars(settings_of("--env aime --seed 7"))
    (tmp_path / "config.json").write_text(json.dumps(stored))
    resumed = stored | {"resume": str(tmp_path)}
    assert vars(parse_args(["--resume", str(tmp_path)])) == resumed
    longer = parse_args(["--resume", str(tmp_path), "--iterations", "999", "--env", "aime"])
    assert vars(longer) == resumed | {"iterations": 999}


def test_a_tilde_is_the_home_folder_also_after_an_equals_sign(tmp_path, monkeypatch):
    """No shell expands it there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings_of("--out=~/run").out == f"{tmp_path}/run"
    paper = settings_of("--env aime --preset paper --model=~/model --data=~/rows.csv")
    assert (paper.model, paper.data) == (f"{tmp_path}/model", f"{tmp_path}/rows.csv")
    (tmp_path / "config.json").write_text(json.dumps(vars(settings_of(""))))
    assert settings_of("--resume=~").resume == str(tmp_path)


def test_off_is_no_flag_without_effect():
    """Arms of the comparisons: a flag that switches something off may be repeated."""
    assert settings_of("--method per --beta 0 --alpha 0 --eviction fifo").alpha == 0
    assert settings_of("--alpha 0 --decay limit --tau 9").tau == 9
    # No buffer, so its capacity limits nothing.
    assert settings_of("--method on_policy --rollout_batch_size 20000").capacity < 20_000


def test_an_environment_gets_the_flags_that_it_lists(monkeypatch, capsys):
    monkeypatch.setitem(ENVS, "own", type("Own", (FrozenLake,), {}))
    env = make_env(settings_of("--env own --slippery --format_penalty 0.3 --max_turns 4"))
    assert (env.slippery, env.format_penalty, env.max_turns) == (True, 0.3, 4)
    monkeypatch.setitem(ENVS, "own", type("Own", (FrozenLake,), {"settings": ()}))
    sentence = "--slippery has no effect with --env own"
    assert refusal("--env own --slippery", capsys) == sentence
    assert settings_of("--env own --preset small --model a/b").lr == 3e-5


def test_a_backend_that_cannot_run_here_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as if it were not installed
    sentence = r"^--backend is hf\+deepspeed, but deepspeed is not installed \(docs/gpus.md\)$"
    with pytest.raises(UserError, match=sentence):
        join_ranks(settings_of("--backend hf+deepspeed"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"^--backend is hf\+torch, but several ranks need deep"):
        join_ranks(settings_of(""))


def test_a_gpu_is_used_if_torch_finds_one_and_the_model_is_not_tiny(monkeypatch):
    paper, tiny = settings_of("--preset paper"), settings_of("")
    for found, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr("torch.cuda.is_available", lambda found=found: found)
        assert (paper.device, tiny.device) == (device, "cpu")
