"""Online, offline and hybrid training see the same losses; the command builds what the training asks for."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from tests.tiny_text import CHAT_TEMPLATE, save_tiny_target, tiny_tokenizer
from treespark.cli import dispatch
from treespark.commands.caching import parse_part
from treespark.data import DraftingData, MicroBatch, collate
from treespark.drafters import DSparkDrafter
from treespark.features import FeatureSource, Hybrid, Offline, Online
from treespark.generation import generate
from treespark.losses import L1, Confidence, Coverage, CrossEntropy, Survival
from treespark.module import DraftingModule
from treespark.policies import Budgeted

WORDS = ["one and one", "the cat sat", "add 3 to 4", "a red hat", "in the inn", "on a tree", "ten and ten", "her hat"]
DRAFTER = {"num_layers": 1, "block_size": 3, "markov_rank": 8, "num_target_layers_tapped": 2}
STEPS = 9  # more than two epochs of four steps


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, its answers, and a recipe for both."""
    folder = tmp_path_factory.mktemp("made")
    target = save_tiny_target(folder / "target", num_hidden_layers=6)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": words}) + "\n" for words in WORDS))
    generate(target, str(folder / "prompts.jsonl"), str(folder / "train.jsonl"), max_new_tokens=24, batch_size=4)
    recipe: dict[str, Any] = {
        "model": {
            "target": target,
            "drafter": {"class_path": "DSparkDrafter", "init_args": DRAFTER},
            "policy": {"class_path": "Budgeted", "init_args": {"k": 2, "num_draft_nodes": 6}},
            "losses": [{"class_path": "CrossEntropy"}, {"class_path": "Survival"}, {"class_path": "Coverage"}],
            "features": {"class_path": "Hybrid", "init_args": {"memory": 1.0, "disk": 0.0}},
        },
        "data": {"train": str(folder / "train.jsonl"), "num_anchors": 6, "batch_size": 2, "max_length": 64},
        "trainer": {
            "max_steps": 2,
            "accelerator": "cpu",
            "logger": False,
            "enable_progress_bar": False,
            "default_root_dir": str(folder / "run"),
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


class Losses(Callback):
    """Keeps the loss of every step, and the figures that were logged with the last."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(outputs["loss"].detach())


def train(made: Path, source: FeatureSource, steps: int = STEPS, **options: Any) -> Tensor:
    """The losses of some steps from the same start."""
    torch.manual_seed(0)
    module = DraftingModule(
        str(made / "target"),
        partial(DSparkDrafter, **DRAFTER),  # type: ignore[arg-type]
        Budgeted(2, 6),
        [CrossEntropy(), L1(), Confidence(), Survival(), Coverage()],
        learning_rate=1e-3,
        chunk_anchors=7,
        features=source,
    )
    sizes = {"num_anchors": 6, "batch_size": 2, "max_length": 64} | options
    data = DraftingData(str(made / "target"), train=str(made / "train.jsonl"), **sizes)
    losses = Losses()
    Trainer(
        max_steps=steps,
        callbacks=[losses],
        default_root_dir=made,
        logger=False,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, data)
    return torch.stack(losses.values)


@pytest.fixture(scope="module")
def online(made: Path) -> Tensor:
    """The losses with the target run at every step."""
    return train(made, Online())


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("float16", 1e-3), ("bfloat16", 1e-2)])
def test_the_three_sources_give_the_same_losses(
    made: Path, online: Tensor, tmp_path: Path, dtype: str, error: float
) -> None:
    """Nine steps over two epochs and more, from a cache that the command built and from one that grows in training."""
    cache = str(tmp_path / "cache")
    assert dispatch(["cache", "build", "--config", str(made / "recipe.yaml"), "--output", cache, "--dtype", dtype]) == 0
    offline, hybrid = Offline(cache), Hybrid(disk=1, folder=str(tmp_path / "hybrid"), dtype=dtype)
    for source in (offline, hybrid):
        torch.testing.assert_close(train(made, source), online, rtol=error, atol=0)
    assert offline.num_computed == 0 and offline.num_found == 2 * STEPS
    assert hybrid.num_computed == len(WORDS) and hybrid.num_found == 2 * STEPS - len(WORDS)


def test_offline_does_not_depend_on_order_batches_or_seeds(made: Path, tmp_path: Path) -> None:
    """Another seed, batch size and number of anchors are served by the same cache, which a longer text is not."""
    cache = str(tmp_path / "cache")
    assert dispatch(["cache", "build", "--config", str(made / "recipe.yaml"), "--output", cache]) == 0
    options = {"seed": 5, "batch_size": 3, "num_anchors": 4}
    expected = train(made, Online(), 4, **options)
    torch.testing.assert_close(train(made, Offline(cache), 4, **options), expected, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match=r"\d of 8 training documents are missing .*another max_length \(64 there, 40"):
        train(made, Offline(cache), max_length=40)


def test_rows_of_several_documents_and_rows_that_only_pad(made: Path, tmp_path: Path) -> None:
    """A packed row, a single document and a filling row in one micro-batch: the loss is the online one (1e-5)."""
    cache = str(tmp_path / "cache")
    assert dispatch(["cache", "build", "--config", str(made / "recipe.yaml"), "--output", cache]) == 0
    data = DraftingData(str(made / "target"), train=str(made / "train.jsonl"), max_length=64)
    samples = data.samples("train")
    batch = packed([[samples[0], samples[1], samples[2]], [samples[3]], []])
    found = []
    for source in (Online(), Offline(cache), Hybrid(disk=1, folder=str(tmp_path / "hybrid"))):
        torch.manual_seed(0)
        module = DraftingModule(
            str(made / "target"),
            partial(DSparkDrafter, **DRAFTER),  # type: ignore[arg-type]
            Budgeted(2, 6),
            [CrossEntropy(), Survival(), Coverage()],
            features=source,
        )
        module.configure_model()
        source.open(module.target, module.drafter.layer_ids)
        labels = module._labels(batch)
        parameters = [parameter for parameter in module.drafter.parameters() if parameter.requires_grad]
        drafts = iter([module._draft(batch, labels, module._features(batch))])
        value = module.objective(drafts, parameters, labels=[labels], reduce=lambda tensor: tensor, world_size=1)
        found.append(value.loss.detach())
    torch.testing.assert_close(torch.stack(found[1:]), found[0].expand(2), rtol=1e-5, atol=0)


def packed(rows: list[list[Any]]) -> MicroBatch:
    """A micro-batch of rows of documents; an empty row only pads."""
    return collate(rows, [list(range(len(row))) for row in rows], num_anchors=8, seed=0, epoch=0)


# The command ------------------------------------------------------------------------------------------------------


def test_plan_build_train_verify(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From recipe to training: the plan's bytes within 5 % of the build's, two parts, a training that switches the
    recipe to Offline on the command line, and a flipped bit that verify finds."""
    monkeypatch.chdir(tmp_path)
    recipe = ["--config", str(made / "recipe.yaml"), "--dtype", "float16", "--shard_mib", "0.02"]
    assert dispatch(["cache", "plan", *recipe, "--output", "cache", "--sample", "2"]) == 0
    text = capsys.readouterr().out
    assert not Path("cache").exists()
    assert all(word in text for word in ("documents", "tokens/s", "disk left", "× (2 + 1) × 32 × 2 bytes"))
    planned = int(next(line for line in text.splitlines() if line.strip().startswith("bytes")).split()[1])

    for part, words in (("2/2", "are left to other parts"), ("1/2", "complete")):
        assert dispatch(["cache", "build", *recipe, "--output", "cache", "--part", part]) == 0
        assert words in capsys.readouterr().out
    built = sum(path.stat().st_size for path in Path("cache").glob("shard-*"))
    assert planned == pytest.approx(built, rel=0.05)

    fit = ["fit", "--config", str(made / "recipe.yaml"), "--trainer.default_root_dir", "run"]
    assert dispatch([*fit, "--model.features", "Offline", "--model.features.folder", "cache"]) == 0
    assert yaml.safe_load(Path("run/config.yaml").read_text())["model"]["features"] == {
        "class_path": "treespark.features.Offline",
        "init_args": {"folder": "cache"},
    }
    # A run's own configuration is a recipe too, and says where the cache is.
    assert dispatch(["cache", "build", "--config", "run/config.yaml", "--dtype", "float16", "--shard_mib", "0.02"]) == 0
    assert "of them from before" in capsys.readouterr().out

    assert dispatch(["cache", "verify", "cache"]) == 0
    assert "every checksum is right" in capsys.readouterr().out
    shard = sorted(Path("cache").glob("shard-*"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert dispatch(["cache", "verify", "cache"]) == 1
    assert "shard-00001.safetensors is damaged" in capsys.readouterr().out


def test_a_cache_of_another_template_is_refused(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same target under another chat template: building into the folder and training from it say so."""
    words = ["--config", str(made / "recipe.yaml")]
    cache, other = str(tmp_path / "cache"), tmp_path / "other"
    assert dispatch(["cache", "build", *words, "--output", cache]) == 0
    shutil.copytree(made / "target", other)
    for stale in other.glob("chat_template*"):
        stale.unlink()
    tiny_tokenizer(CHAT_TEMPLATE.replace("message['role'] + '\n'", "message['role'] + ' '")).save_pretrained(other)
    words += ["--model.target", str(other)]
    assert dispatch(["cache", "build", *words, "--output", cache]) == 1
    said = capsys.readouterr().err
    assert "differs in " in said and "chat template (" in said
    assert dispatch(["fit", *words, "--model.features", "Offline", "--model.features.folder", cache]) == 1
    said = capsys.readouterr().err
    assert "8 of 8 training documents are missing" in said and "rendered with another chat template" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plant"], "Unknown action 'plant'. Did you mean: plan?"),
        (["verify"], "treespark cache verify DIR"),
        (["verify", "nowhere"], "nowhere holds no feature cache"),
        (["build", "--config", "recipe.yaml"], "output is missing"),
        (["build", "--config", "recipe.yaml", "--output", "x", "--part", "3/2"], "expected i/n with 1 <= i <= n"),
        (["build", "--config", "recipe.yaml", "--output", "x", "--dtype", "int8"], "stored as float16, bfloat16"),
        (["plan", "--config", "recipe.yaml", "--shard_mb", "3"], "Did you mean: --shard_mib?"),
        (["plan", "--config", "recipe.yaml", "--model.features", "Ofline"], "Unknown feature source 'Ofline'. Did you"),
        (["plan", "--config", "nosuch.yaml"], "nosuch.yaml"),
    ],
)
def test_wrong_calls_are_one_line(
    made: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was expected, what came."""
    monkeypatch.chdir(made)
    assert dispatch(["cache", *words]) == 1
    assert said in capsys.readouterr().err.strip().splitlines()[-1]


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    """With and without an action."""
    for words in (["cache"], ["cache", "--help"], ["cache", "build", "--help"]):
        assert dispatch(words) == 0
        text = capsys.readouterr().out
        assert all(word in text for word in ("--part", "--output", "--dtype", "--shard_mib", "verify DIR"))
    assert parse_part("2/4") == (2, 4)
