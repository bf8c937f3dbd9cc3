"""`treespark export` from a checkpoint to a folder that decodes alone; kills and damaged files; warm starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_text import save_tiny_target
from treespark.bench import bench
from treespark.cli import dispatch
from treespark.drafters import Drafter, DSparkDrafter
from treespark.drafters.source import open_drafter
from treespark.losses import CrossEntropy
from treespark.module import DraftingModule
from treespark.policies import Budgeted
from treespark.target import Target

ROOT = Path(__file__).parents[2]
OPTIONS: dict[str, Any] = {"num_layers": 1, "block_size": 3, "markov_rank": 4, "num_target_layers_tapped": 1}
POLICY = Budgeted(k=2, num_draft_nodes=6)


class Run:
    """A folder as `treespark fit` leaves it: checkpoints, resolved configuration, and a suite."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = Target.load(save_tiny_target(folder / "target"))
        self.module = self.make()
        checkpoint: dict[str, Any] = {"state_dict": self.module.state_dict(), "global_step": 7}
        self.module.on_save_checkpoint(checkpoint)
        checkpoint["treespark"]["chat_template_kwargs"] = {"enable_thinking": False}
        (folder / "run" / "checkpoints").mkdir(parents=True)
        self.checkpoint = str(folder / "run" / "checkpoints" / "best.ckpt")
        torch.save(checkpoint, self.checkpoint)
        (folder / "run" / "config.yaml").write_text("model:\n  learning_rate: 0.25\n")
        self.suite = str(folder / "suite.jsonl")
        Path(self.suite).write_text('{"prompt": "add 2 and 3"}\n{"prompt": "why is it so?"}\n')

    def make(self, seed: int = 0, **options: Any) -> DraftingModule:
        torch.manual_seed(seed)
        build = lambda spec: DSparkDrafter(spec, **OPTIONS)  # noqa: E731
        module = DraftingModule(str(self.folder / "target"), build, POLICY, [CrossEntropy()], **options)
        module.compose(self.target)
        return module


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("export"))


@pytest.mark.parametrize("form", ["deepspec", "speculators", "specforge"])
def test_export_and_bench_on_the_folder_alone(run: Run, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder carries tensors, policy, template options, provenance, a card; it gives the checkpoint's rounds."""
    output = run.folder / form
    words = ["export", "--ckpt_path", run.checkpoint, "--format", form, "--output", str(output)]
    assert dispatch(words) == 0, capsys.readouterr().err
    assert f"{form}, " in capsys.readouterr().out
    assert sorted(path.name for path in output.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((output / "config.json").read_text())
    assert config["tree_policy"] == POLICY.config() and config["sample_from_anchor"] is True
    assert config["chat_template_kwargs"] == {"enable_thinking": False}
    assert config["provenance"]["step"] == 7 and config["provenance"]["versions"]["torch"] == torch.__version__
    assert config["target_model_name_or_path"] == str(run.folder / "target")
    card = (output / "README.md").read_text()
    for text in ("learning_rate: 0.25", "Budgeted(k=2", "SHA-256", "Not measured", "enable_thinking"):
        assert text in card, text
    size = sum(path.stat().st_size for path in output.iterdir())
    held = load_file(output / "model.safetensors")
    assert size - sum(value.numel() * value.element_size() for value in held.values()) < 100_000
    loaded = Drafter.from_pretrained(output)
    assert loaded.is_bound == (form != "specforge")
    for key, value in run.module.drafter.trainable_state_dict().items():
        assert torch.equal(value, loaded.trainable_state_dict()[key])
    first, second = (
        bench(str(path), run.suite, max_new_tokens=6, modes="chain,tree", simulate=True)
        for path in (output, run.checkpoint)
    )
    assert first.prompts == second.prompts


def test_options(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Without embeddings, in another precision, from a folder, with a bench's figures in the card."""
    results = str(run.folder / "results.json")
    bench(run.checkpoint, run.suite, max_new_tokens=6, output=results)
    output = run.folder / "small"
    words = ["export", "--ckpt_path", str(run.folder / "deepspec"), "--format", "speculators", "--output", str(output)]
    if not (run.folder / "deepspec").exists():
        dispatch(["export", "--ckpt_path", run.checkpoint, "--format", "deepspec", "--output", words[2]])
    words += ["--without_embeddings", "true", "--dtype", "bfloat16", "--results", results]
    assert dispatch(words) == 0, capsys.readouterr().err
    held = load_file(output / "model.safetensors")
    assert "lm_head.weight" not in held and held["fc.weight"].dtype == torch.bfloat16
    card = (output / "README.md").read_text()
    assert "| suite | tree |" in card and "Command: `" in card and "another policy" in card
    assert not Drafter.from_pretrained(output).is_bound


def test_template_options_are_the_recorded_ones(run: Run) -> None:
    """Others need a flag, and the results say so."""
    options: dict[str, Any] = {"max_new_tokens": 4, "num_prompts": 1, "modes": "tree", "simulate": True}
    with pytest.raises(ValueError, match=r"trained with the chat template options \{'enable_thinking': False\}"):
        bench(run.checkpoint, run.suite, chat_template_kwargs={}, **options)
    other = bench(run.checkpoint, run.suite, chat_template_kwargs={}, allow_other_template=True, **options)
    assert other.settings["other_template"] is True
    assert bench(run.checkpoint, run.suite, **options).settings["other_template"] is False


WRONG: list[tuple[dict[str, str], str]] = [
    ({"format": "deepspeck"}, "Unknown format 'deepspeck'. Did you mean: deepspec"),
    ({"ckpt_path": "nowhere.ckpt"}, "no such"),
    ({"ckpt_path": "suite.jsonl"}, "not a checkpoint of `treespark fit`"),
    ({"output": "suite.jsonl"}, "is a file; give the name of a folder"),
    ({"results": "suite.jsonl"}, "is not valid JSON"),
    ({"dtype": "int4"}, "Unknown dtype 'int4'"),
    ({"target": "elsewhere"}, "was trained for the target"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_wrong_calls_are_one_line(
    run: Run,
    change: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run.folder)
    if change.get("target") and not Path("elsewhere").exists():
        save_tiny_target("elsewhere", seed=1)
    options = {"ckpt_path": run.checkpoint, "format": "deepspec", "output": "out"} | change
    assert dispatch(["export", *(word for key, value in options.items() for word in (f"--{key}", value))]) == 1
    shown = capsys.readouterr().err.rstrip("\n").splitlines()
    assert shown[-1].startswith("treespark export: ") and message in shown[-1], shown
    assert all("it/s]" in line for line in shown[:-1] if line), shown  # bars of the loading library
    assert not Path("out").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
import safetensors.torch
from treespark.drafters import Drafter
drafter = Drafter.from_pretrained(sys.argv[1])
die = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "weights":
    save = safetensors.torch.save_file
    def half(state, path, **options):
        save(state, path, **options)
        os.truncate(path, os.path.getsize(path) // 2)
        die()
    safetensors.torch.save_file = half
elif sys.argv[3] == "config":
    Path.write_text = die
else:
    Path.rename = die
drafter.save_pretrained(sys.argv[2])
"""


@pytest.mark.parametrize("moment", ["weights", "config", "rename"])
def test_a_kill_leaves_the_old_folder_or_none(run: Run, moment: str, tmp_path: Path) -> None:
    """Killed while writing tensors, before the configuration, and before the rename."""
    run.module.drafter.save_pretrained(tmp_path / "from")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "from"), str(tmp_path / "out"), moment]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    with pytest.raises(FileNotFoundError, match="no such folder"):
        Drafter.from_pretrained(tmp_path / "out")
    if moment != "rename":  # by then the folder is whole, under a hidden name
        for leftover in tmp_path.glob(".out.*/new"):
            with pytest.raises(FileNotFoundError, match="no config.json"):
                Drafter.from_pretrained(leftover)


def test_absurd_headers_are_refused_at_once(run: Run, tmp_path: Path) -> None:
    """Sizes that no file has cost neither time nor memory: the headers are compared before anything is built."""
    folder = tmp_path / "a"
    run.module.drafter.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    absurd = {"num_hidden_layers": 10**9, "head_dim": 10**12, "block_size": 10**9, "vocab_size": 10**12}
    absurd |= {"intermediate_size": 10**12, "markov_rank": 10**12}
    for key, value in absurd.items():
        changed = {name: item for name, item in config.items() if name != "target_spec"} | {key: value}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"the config says|another shape"):
            Drafter.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    body = (folder / "model.safetensors").read_bytes()
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}}).encode()
    for content in (len(header).to_bytes(8, "little") + header + b"\0" * 64, (2**62).to_bytes(8, "little") + body[8:]):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="damaged or not a safetensors file"):
            Drafter.from_pretrained(folder)


def test_checkpoint_files_are_compared_before_anything_is_built(run: Run, tmp_path: Path) -> None:
    """Options that claim absurd sizes, missing and mis-shaped tensors, half a file: one error each, at once."""
    saved = torch.load(run.checkpoint, weights_only=True)
    file = tmp_path / "wrong.ckpt"

    def message(content: dict[str, Any]) -> str:
        torch.save(content, file)
        with pytest.raises(ValueError, match=r"wrong\.ckpt") as error:
            open_drafter(file).load(run.target)
        return str(error.value)

    def claims(**changed: Any) -> dict[str, Any]:
        record = saved["treespark"]
        options = record["drafter"]["init_args"] | changed
        return saved | {"treespark": record | {"drafter": record["drafter"] | {"init_args": options}}}

    state = saved["state_dict"]
    for key in ("num_layers", "block_size"):
        assert f"recorded {key} is {10**9}" in message(claims(**{key: 10**9}))
    for key in ("head_dim", "intermediate_size", "markov_rank"):
        assert "Tensors of another shape" in message(claims(**{key: 10**9}))
    assert "Tensors are missing" in message(saved | {"state_dict": {k: v for k, v in state.items() if "norm" not in k}})
    assert "another shape" in message(saved | {"state_dict": state | {"drafter.norm.weight": torch.ones(3)}})
    assert "Unexpected tensors" in message(saved | {"state_dict": state | {"drafter.extra": torch.ones(3)}})
    file.write_bytes(Path(run.checkpoint).read_bytes()[:2000])
    with pytest.raises(ValueError, match="not a checkpoint of `treespark fit`"):
        open_drafter(file)


def test_pickles_and_foreign_indices_are_not_read(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    run.module.drafter.save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.rename(folder / "renamed.safetensors")
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors; found renamed\.safetensors"):
        Drafter.from_pretrained(folder)
    (folder / "renamed.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="Pickled weights can run code and are not read"):
        Drafter.from_pretrained(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../other.safetensors"}}))
    with pytest.raises(ValueError, match="files of the same folder"):
        Drafter.from_pretrained(folder)


def test_files_in_parts_are_read(run: Run, tmp_path: Path) -> None:
    """Large releases come in several files with an index."""
    from safetensors.torch import save_file

    folder = tmp_path / "a"
    run.module.drafter.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    keys = sorted(state)
    parts = {"model-00001-of-00002.safetensors": keys[::2], "model-00002-of-00002.safetensors": keys[1::2]}
    for name, part in parts.items():
        save_file({key: state[key] for key in part}, folder / name)
    names = {key: name for name, part in parts.items() for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    loaded = Drafter.from_pretrained(folder)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in run.module.drafter.state_dict().items())
    loaded.save_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_names_that_are_no_checkpoint() -> None:
    with pytest.raises(FileNotFoundError, match="no such folder, and no hub id .* A training leaves `drafter`"):
        Drafter.from_pretrained("nothing/like/this")
    with pytest.raises(FileNotFoundError, match="the hub gives no such checkpoint at revision abc"):
        Drafter.from_pretrained("nobody/nothing", revision="abc")
    with pytest.raises(FileNotFoundError, match="the hub gives no such checkpoint"):
        open_drafter("nobody/nothing")


def test_warm_start_of_a_training(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """init_from gives the saved function, also of a hub id's revision; two starts at once are refused."""
    run.module.drafter.save_pretrained(tmp_path / "a")
    module = run.make(seed=5, init_from=str(tmp_path / "a"))
    for key, value in run.module.drafter.trainable_state_dict().items():
        assert torch.equal(value, module.drafter.trainable_state_dict()[key])
    asked: list[tuple[str, str | None]] = []

    def download(name: str, revision: str | None, **options: Any) -> str:
        asked.append((name, revision))
        return str(tmp_path / "a")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    module = run.make(seed=5, init_from="owner/name", init_from_revision="v2")
    assert torch.equal(module.drafter.state_dict()["fc.weight"], run.module.drafter.state_dict()["fc.weight"])
    assert asked == [("owner/name", "v2")]
    with pytest.raises(ValueError, match="which has no revision 'v2'"):
        run.make(init_from=str(tmp_path / "a"), init_from_revision="v2")
    with pytest.raises(ValueError, match="init_from_revision needs init_from"):
        run.make(init_from_revision="v2")
    layers = run.make(seed=5, init_from_target_layers=[1]).drafter
    assert torch.equal(layers.state_dict()["norm.weight"], run.target.final_norm())
    with pytest.raises(ValueError, match="not both"):
        run.make(init_from="a", init_from_target_layers=[1])
