"""Every recipe parses, instantiates and takes two steps: SmolLM2's on a tiny Llama, Qwen3's on a tiny Qwen3."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from tests.tiny import tiny_model
from tests.tiny_text import tiny_tokenizer
from treespark.commands.training import run
from treespark.generation import generate

RECIPES = sorted(Path("recipes").glob("*.yaml"))
SMALL = {
    "model.drafter.init_args.num_layers": 1,
    "model.drafter.init_args.markov_rank": 8,
    "model.target_dtype": "float32",
    "data.max_length": 64,
    "data.num_anchors": 4,
    "data.micro_batches": 2,
    "trainer.max_steps": 2,
    "trainer.max_epochs": -1,
    "trainer.accelerator": "cpu",
    "trainer.precision": "32-true",
    "trainer.limit_val_batches": 1,
    "trainer.val_check_interval": 2,
    "trainer.check_val_every_n_epoch": "null",
    "trainer.enable_progress_bar": "false",
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Returns a family, a tiny target of it and a file of its answers."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param, torch.float32, layers=8).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    prompts = [{"prompt": f"{a} and {b}"} for a in ("the cat", "a hat") for b in ("one", "ten")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    generate(str(folder / "target"), str(folder / "prompts.jsonl"), str(folder / "train.jsonl"), max_new_tokens=16)
    return request.param, str(folder / "target"), str(folder / "train.jsonl")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_two_steps(recipe: Path, family: tuple[str, str, str], tmp_path: Path) -> None:
    """The recipe as it stands but for sizes, target and data; the drafter it leaves carries the recipe's policy."""
    name, target, answers = family
    if (name == "qwen3") != recipe.stem.startswith("qwen3"):
        pytest.skip("the other family's recipe")
    options = SMALL | {
        "model.target": target,
        "trainer.default_root_dir": str(tmp_path),
        "trainer.logger.init_args.tracking_uri": f"sqlite:///{tmp_path}/mlflow.db",
    }
    options |= {f"data.{part}": answers for part in ("train", "val", "test")}
    run("fit", ["--config", str(recipe), *(f"--{key}={value}" for key, value in options.items())])
    saved = json.loads((tmp_path / "drafter" / "config.json").read_text())
    wanted = yaml.safe_load(recipe.read_text())["model"]
    assert saved["tree_policy"]["class_path"] == wanted["policy"]["class_path"]
    assert saved["block_size"] == wanted["drafter"]["init_args"]["block_size"]
    assert saved["head_dim"] == 8 * wanted["drafter"]["init_args"]["head_dim_ratio"]
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()


def test_test_measures_and_decodes(
    family: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`treespark test --config R --ckpt_path C`: figures of the test file, then its plain, chain and tree decoding."""
    _, target, answers = family
    options = SMALL | {"model.target": target, "trainer.default_root_dir": str(tmp_path), "trainer.logger": "false"}
    options |= {f"data.{part}": answers for part in ("train", "val", "test")}
    arguments = ["--config=recipes/demo.yaml", *(f"--{key}={value}" for key, value in options.items())]
    run("fit", arguments)
    checkpoint, output = tmp_path / "checkpoints" / "last.ckpt", tmp_path / "results.json"
    extra = [f"--ckpt_path={checkpoint}", f"--output={output}", "--num_prompts=2", "--max_new_tokens=8"]
    assert run("test", [*arguments, *extra]) == 0
    assert "test/tau" in capsys.readouterr().out
    found = json.loads(output.read_text())
    assert [arm["name"] for arm in found["arms"]] == ["plain", "chain", "tree"]
    assert len(found["prompts"]) == 2


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_explains_itself(recipe: Path) -> None:
    """It opens with what it is and its run command, and its table row and its output folder carry its name."""
    text = recipe.read_text()
    assert text.startswith("# ")
    assert f"#   treespark fit --config {recipe}\n" in text
    assert f"default_root_dir: runs/{recipe.stem}\n" in text
    assert f"`{recipe.stem}.yaml`" in Path("recipes/README.md").read_text()


def test_siblings_differ_by_what_their_table_says() -> None:
    """The configurations of one target share everything but width, policy and the two tree losses."""
    for prefix in ("smollm2", "qwen3_4b", "qwen3_8b"):
        configs = [yaml.safe_load(path.read_text()) for path in RECIPES if path.stem.startswith(prefix)]
        for config in configs:
            config["trainer"].pop("default_root_dir")
            config["trainer"]["logger"]["init_args"].pop("run_name")
            config["model"]["drafter"]["init_args"].pop("head_dim_ratio")
            config["model"].pop("policy")
            for loss in config["model"]["losses"]:
                if loss["class_path"] in ("Survival", "Coverage"):
                    loss["init_args"].pop("coefficient")
        assert all(config == configs[0] for config in configs)


def test_shipped_data_is_the_targets_own() -> None:
    """Each shipped line has an answer with its token ids; the three files share no prompt."""
    seen: set[str] = set()
    for part, least in (("train", 300), ("val", 30), ("test", 40)):
        lines = [json.loads(line) for line in Path(f"recipes/data/{part}.jsonl").read_text().splitlines()]
        assert len(lines) >= least
        assert all(line["response_ids"] and line["response"] for line in lines)
        prompts = {re.sub(r"\W+", " ", line["prompt"].lower()) for line in lines}
        assert len(prompts) == len(lines)
        assert not prompts & seen
        seen |= prompts
