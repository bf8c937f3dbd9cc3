"""The command line: its speed, its errors, and a run from recipe to checkpoint, resumed and repeated."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.tiny_text import save_tiny_target
from treespark.cli import COMMANDS, dispatch
from treespark.commands import training  # noqa: F401  # Lightning keeps the stream it first meets as its log
from treespark.commands.functions import spell_out
from treespark.commands.hints import explain
from treespark.data import hash_files

ROOT = Path(__file__).parent.parent

RECIPE: dict[str, Any] = {
    "trainer": {
        "max_steps": 4,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
        "val_check_interval": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "logger": False,
        "default_root_dir": "run",
    },
    "model": {
        "target": "target",
        "drafter": {
            "class_path": "DSparkDrafter",
            "init_args": {
                "num_layers": 1,
                "block_size": 3,
                "markov_rank": 4,
                "num_target_layers_tapped": 1,
                "mask_token_id": 3,
            },
        },
        "policy": {"class_path": "Budgeted", "init_args": {"k": 2, "num_draft_nodes": 6}},
        "losses": [{"class_path": "CrossEntropy"}, {"class_path": "Survival", "init_args": {"coefficient": 1.0}}],
    },
    "data": {"train": "answers.jsonl", "val": "answers.jsonl", "test": "answers.jsonl", "num_anchors": 4},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target, its answers as `treespark generate` writes them, and a recipe."""
    folder = tmp_path_factory.mktemp("cli")
    save_tiny_target(folder / "target")
    lines = [json.dumps({"prompt": f"what is {i} + {i + 1}?"}) for i in range(10)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (folder / "my_module.py").write_text(
        "from treespark.losses import CrossEntropy\n"
        "class MyLoss(CrossEntropy):\n"
        '    """A loss of the user\'s own."""\n'
        "    def __init__(self, coefficient: float = 1.0, gamma: float = 4.0, sharpness: float = 1.0) -> None:\n"
        "        super().__init__(coefficient, gamma)\n"
        "        self.sharpness = sharpness\n"
    )
    words = ["--target", "target", "--prompts", "prompts.jsonl", "--output", "answers.jsonl", "--max_new_tokens", "16"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert dispatch(["generate", *words]) == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, as the current one."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def seconds(code: str, times: int = 5) -> float:
    """Median processor time of a fresh interpreter that runs `code`: as its wall time, but deaf to other work."""
    taken = []
    for _ in range(times):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=ROOT)
        after = os.times()
        taken.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return statistics.median(taken)


def test_help_and_list_answer_at_once() -> None:
    """`--help` in a second; `list` in the time of `import torch` and 0.7 s."""
    run = "from treespark.cli import dispatch; dispatch([{!r}])"
    assert seconds(run.format("--help")) < 1.0
    assert seconds(run.format("list")) < seconds("import torch") + 0.7


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each, and the same text without any word."""
    assert dispatch(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert dispatch([]) == 0
    assert capsys.readouterr().out == text


def test_list_shows_one_line_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    """Name and the first line of the docstring."""
    assert dispatch(["list", "policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["BestFirst", "Budgeted", "Chain", "DDTree"]
    assert all(len(line.split()) > 3 for line in lines)
    assert dispatch(["list", "formats"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["DFlashFormat", "deepspec", "specforge", "speculators"]  # as `export --format` calls those written


def test_entry_points() -> None:
    """`python -m treespark` is the same command."""
    done = subprocess.run([sys.executable, "-m", "treespark", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("treespark ")


WRONG = [  # words of a call, what the line must say
    (["fitt"], "Unknown subcommand 'fitt'. Did you mean: fit?"),
    (["list", "polices"], "Unknown kind 'polices'. Did you mean: policies?"),
    (["fit"], "model.target is missing"),
    (["doctor", "--config", "option.yaml"], "model.drafter: Unknown option 'num_layer'. Did you mean: num_layers?"),
    (["fit", "--config", "nosuch.yaml"], "config: File does not exist"),
    (["fit", "--config", "broken.yaml"], "Problems parsing config"),
    (["fit", "--config", "stray.yaml"], "Unknown option 'modle'. Did you mean: model?"),
    (["fit", "--config", "key.yaml"], "Unknown option 'data.trian'. Did you mean: data.train?"),
    (["fit", "--config", "option.yaml"], "model.drafter: Unknown option 'num_layer'. Did you mean: num_layers?"),
    (["fit", "--config", "loss.yaml"], "model.losses: Unknown loss 'Survivl'. Did you mean: Survival?"),
    (["fit", "-c", "recipe.yaml", "--model.drafter", "DSparkDraftr"], "Did you mean: DSparkDrafter?"),
    (["fit", "-c", "recipe.yaml", "--model.policy", "Budgetd"], "model.policy: Unknown policy 'Budgetd'. Did you mean"),
    (
        ["fit", "-c", "recipe.yaml", "--model.policy", "Survival"],
        "Unknown policy 'Survival'. Available: BestFirst, Budgeted, Chain, DDTree",
    ),
    (["fit", "-c", "recipe.yaml", "--model.policy.kk", "2"], "model.policy: Unknown option 'kk'. Did you mean: k?"),
    (["fit", "-c", "recipe.yaml", "--model.policy.k", "x"], "model.policy: k: Expected a <class 'int'>. Got value: x"),
    (["fit", "-c", "recipe.yaml", "--model.policy.k", "0"], "k >= 1, got 0."),
    (["fit", "-c", "recipe.yaml", "--model.losses+=my_module.MyLos"], "module 'my_module' has no attribute 'MyLos'"),
    (["fit", "-c", "recipe.yaml", "--model.losses+=nosuch.MyLoss"], "No module named 'nosuch'"),
    (["fit", "-c", "recipe.yaml", "--model.rate", "1"], "Unknown option --model.rate."),
    (["fit", "-c", "recipe.yaml", "--learning_rate=1"], "Did you mean: --model.learning_rate?"),
    (
        ["fit", "-c", "recipe.yaml", "--trainer.callbacks+=EarlyStoping"],
        "Unknown callback 'EarlyStoping'. Did you mean",
    ),
    (["fit", "-c", "recipe.yaml", "--data.train", "nosuch.jsonl"], "nosuch.jsonl"),
    (["fit", "-c", "recipe.yaml", "--trainer.accumulate_grad_batches", "2"], "data.micro_batches"),
    (["bench", "--suites", "answers.jsonl"], "drafter"),
    (["bench", "--drafter", "nosuch", "--suites", "answers.jsonl"], "nosuch: no such drafter"),
    (["generate", "--target", "target", "--prompts", "nosuch.jsonl", "--output", "x.jsonl"], "nosuch.jsonl"),
]


@pytest.fixture(scope="module")
def wrong(made: Path) -> Path:
    """The folder with recipes that are wrong in one place each."""
    text = (made / "recipe.yaml").read_text()
    (made / "broken.yaml").write_text("model: [\n")
    (made / "stray.yaml").write_text(text + "modle: 3\n")
    (made / "key.yaml").write_text(text.replace("  train:", "  trian:"))
    (made / "option.yaml").write_text(text.replace("num_layers:", "num_layer:"))
    (made / "loss.yaml").write_text(text.replace("Survival", "Survivl"))
    return made


@pytest.mark.parametrize(("words", "said"), WRONG, ids=lambda item: " ".join(item) if isinstance(item, list) else "")
def test_an_error_is_one_line(
    words: list[str],
    said: str,
    wrong: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last line on stderr says what is wrong, with suggestions; no traceback."""
    monkeypatch.chdir(wrong)
    monkeypatch.delenv("TREESPARK_DEBUG", raising=False)
    assert dispatch(words) == 1
    error = capsys.readouterr().err
    line = error.strip().splitlines()[-1]
    assert line.startswith("treespark")
    assert said in line
    assert "Traceback" not in error
    assert "import path" not in line


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """TREESPARK_DEBUG=1 keeps the frames."""
    monkeypatch.setenv("TREESPARK_DEBUG", "1")
    assert dispatch(["list", "polices"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_messages_that_nobody_reworded_become_one_line() -> None:
    """Line breaks and the vain try to read a value as a file are dropped."""
    raw = "Parser key \"model.rate\":\n  - Expected a path but x either not accessible\n  - Expected a <class 'float'>"
    assert explain(raw) == "model.rate: Expected a <class 'float'>"


def test_lists_are_given_as_words() -> None:
    """`--suites a b` is a list, a bare switch is on; a list that is one already and other options stay."""

    def function(suites: list[str], output: str = "", simulate: bool = False) -> None: ...

    assert spell_out(function, ["--suites", "a", "b", "--output", "c"]) == ["--suites", '["a", "b"]', "--output", "c"]
    assert spell_out(function, ["--suites", '["a"]']) == ["--suites", '["a"]']
    assert spell_out(function, ["--simulate", "--suites", "a"]) == ["--simulate", "true", "--suites", '["a"]']
    assert spell_out(function, ["--simulate", "false"]) == ["--simulate", "false"]
    assert spell_out(function, ["--simulate", "--suites", "a"]) == ["--simulate", "true", "--suites", '["a"]']
    assert spell_out(function, ["--simulate", "false"]) == ["--simulate", "false"]


def weights(folder: Path, run: str, name: str = "last") -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / run / "checkpoints" / f"{name}.ckpt")["state_dict"]
    return state


def test_fit_leaves_a_run_that_repeats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints, configuration, environment, figure and drafter; `fit --config` of the saved one gives equal weights.

    The overrides are in the saved configuration: 3 depths became 2, and a loss of the user's own was added.
    """
    words = ["--model.drafter.block_size", "2", "--model.losses+=my_module.MyLoss", "--model.losses.sharpness", "2.5"]
    assert dispatch(["fit", "--config", "recipe.yaml", *words]) == 0
    for name in ("config.yaml", "environment.json", "acceptance_by_position.png", "drafter/model.safetensors"):
        assert (folder / "run" / name).stat().st_size > 0, name
    saved = yaml.safe_load((folder / "run/config.yaml").read_text())["model"]
    assert saved["drafter"]["init_args"]["block_size"] == 2
    assert saved["losses"][-1] == {
        "class_path": "my_module.MyLoss",
        "init_args": {"coefficient": 1.0, "gamma": 4.0, "sharpness": 2.5},
    }
    config = json.loads((folder / "run/drafter/config.json").read_text())
    assert config["tree_policy"]["class_path"] == "Budgeted"
    assert config["provenance"]["versions"]["torch"] == torch.__version__

    assert dispatch(["fit", "--config", "run/config.yaml", "--trainer.default_root_dir", "again"]) == 0
    first, second = weights(folder, "run"), weights(folder, "again")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert (folder / "run/checkpoints/best.ckpt").is_file()

    sources = json.loads((folder / "run/environment.json").read_text())["data_sources"]
    assert sources["train"] == {"dataset": "answers.jsonl", "sha256": hash_files(["answers.jsonl"])}
    assert len(config["chat_template_sha256"]) == 64

    capsys.readouterr()
    words = ["test", "--config", "run/config.yaml", "--ckpt_path", "run/checkpoints/last.ckpt"]
    assert dispatch([*words, "--data.chat_template_kwargs", "{enable_thinking: false}"]) == 1
    assert "trained on prompts rendered with chat_template_kwargs {}" in capsys.readouterr().err
    assert dispatch(words) == 0
    assert "test/tau" in capsys.readouterr().out
    words = ["--drafter", "run/checkpoints/last.ckpt", "--suites", "answers.jsonl", "--num_prompts", "2"]
    assert dispatch(["bench", *words, "--max_new_tokens", "8", "--output", "results.json"]) == 0
    assert json.loads((folder / "results.json").read_text())


def test_the_last_checkpoint_is_of_the_last_step(folder: Path) -> None:
    """3 steps with a validation after each second: `last` is step 3, `best` step 2; a resumed run goes on to 5."""
    words = ["--config", "recipe.yaml", "--trainer.max_steps"]
    assert dispatch(["fit", *words, "3"]) == 0
    steps = {name: torch.load(folder / f"run/checkpoints/{name}.ckpt")["global_step"] for name in ("best", "last")}
    assert steps == {"best": 2, "last": 3}
    assert dispatch(["fit", *words, "5", "--ckpt_path", "run/checkpoints/last.ckpt"]) == 0
    assert torch.load(folder / "run/checkpoints/last.ckpt")["global_step"] == 5


def test_a_changed_option_beats_the_checkpoint(folder: Path) -> None:
    """What a checkpoint was trained with does not override the command line when it is resumed."""
    assert dispatch(["fit", "--config", "recipe.yaml", "--trainer.max_steps", "1"]) == 0
    words = ["--ckpt_path", "run/checkpoints/last.ckpt", "--model.learning_rate", "0.125", "--trainer.max_steps", "2"]
    assert dispatch(["fit", "--config", "recipe.yaml", *words]) == 0
    assert yaml.safe_load((folder / "run/config.yaml").read_text())["model"]["learning_rate"] == 0.125
    checkpoint = torch.load(folder / "run/checkpoints/last.ckpt")
    assert checkpoint["lr_schedulers"][0]["base_lrs"] == [0.125]
