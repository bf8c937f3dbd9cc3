"""The command on a tiny saved target: loading, files, the report, and every wrong input in one table."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.tiny_text import save_tiny_target, tiny_tokenizer
from treespark.bench import Difference, Results, Summary, bench, load_suite, print_report
from treespark.drafters import DSparkDrafter
from treespark.drafters.source import open_drafter
from treespark.policies import Budgeted, Chain
from treespark.target import Target

OPTIONS: dict[str, Any] = {"num_layers": 1, "block_size": 4, "markov_rank": 8, "num_target_layers_tapped": 1}
RECORDED = Budgeted(k=2, num_draft_nodes=6).config()


class Files:
    """A target, a drafter for it as folder and as checkpoint, and a suite."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target_name = save_tiny_target(folder / "target")
        self.target = Target.load(self.target_name)
        torch.manual_seed(0)
        drafter = DSparkDrafter(self.target.spec, **OPTIONS)
        drafter.bind(self.target)
        self.drafter = str(folder / "drafter")
        drafter.save_pretrained(self.drafter, tree_policy=RECORDED)
        self.trained = drafter.trainable_state_dict()
        self.checkpoint = str(folder / "last.ckpt")
        record = {
            "drafter": drafter.config(),
            "policy": RECORDED,
            "target": self.target_name,
            "fingerprint": self.target.spec.fingerprint,
        }
        state = {f"drafter.{name}": value for name, value in self.trained.items()}
        torch.save({"treespark": record, "state_dict": state, "epoch": 0}, self.checkpoint)
        self.suite = self.write(
            "held_out.jsonl",
            '{"id": "a-1", "category": "code", "prompt": "add 2 and 3"}',
            "",
            '{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why is it so?"}]}',
            '{"turns": ["name a river", "and a lake"]}',
        )

    def write(self, name: str, *lines: str) -> str:
        path = self.folder / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("bench"))


def test_end_to_end(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """Folder, two suites, added policy: tables on the screen, and a JSON file with everything that is needed again."""
    other = files.write("other.jsonl", '{"prompt": "one more"}')
    output = str(files.folder / "results" / "out.json")
    results = bench(
        files.drafter,
        f"{files.suite},{other}",
        policies="Budgeted(k=2,num_draft_nodes=4)",
        max_new_tokens=8,
        output=output,
        dtype="float64",
        seed=3,
    )
    assert results.exit_code == 0
    shown = capsys.readouterr().out
    for text in (
        "held_out (3 prompts)",
        "other (1 prompts)",
        "mean over 2 suites (4 prompts)",
        "chain *",
        "x plain",
        "3/3",
    ):
        assert text in shown, text
    assert "another policy than the one recorded" in shown and "identical to plain decoding's" in shown
    assert "speed tree/plain: " in shown and "tau tree/chain: " in shown

    record = json.loads(Path(output).read_text())
    assert record["complete"] and record["outputs"] == {
        "judged": True,
        "ok": True,
        "num_compared_tokens": sum(t["num_compared"] for p in record["prompts"] for t in p["trials"].values()),
        "num_differences": 0,
        "allowed_differences": 0,
        "num_judged_tokens": 0,
        "num_near_ties": 0,
        "largest_margin": None,
        "num_misses": 0,
    }
    assert record["seed"] == 3 and record["dtype"] == "float64" and record["argv"]
    assert {"python", "torch", "transformers", "treespark"} <= record["versions"].keys()
    assert {"cpu", "accelerators", "num_threads", "device"} <= record["hardware"].keys()
    assert (
        record["target"]["fingerprint"] == files.target.spec.fingerprint == record["drafters"][""]["target_fingerprint"]
    )
    assert record["drafters"][""]["recorded_policy"] == RECORDED and record["drafters"][""]["path"] == files.drafter
    assert (
        len(record["drafters"][""]["sha256"]) == 64
        and record["drafters"][""]["config"]["class_path"] == "DSparkDrafter"
    )
    assert [suite["num_prompts"] for suite in record["suites"]] == [3, 1]
    assert all(len(suite["sha256"]) == 64 for suite in record["suites"])
    assert [arm["marked"] for arm in record["arms"]] == [False, True, False, True]
    assert record["arms"][2]["policy"] == RECORDED
    assert len(record["summaries"]) == 3 * 4 and len(record["prompts"]) == 4
    assert [prompt["id"] for prompt in record["prompts"]] == ["a-1", "3", "4", "1"]
    assert "add 2" not in json.dumps(record)  # records, no texts
    assert {item["comparison"] for item in record["intervals"]} >= {"tau tree/chain", "speed chain/plain"}
    assert record["settings"]["max_new_tokens"] == 8 and record["settings"]["modes"] == ["plain", "chain", "tree"]

    again = Results.load(output)
    assert again.to_dict() == results.to_dict()
    assert isinstance(again.summary("tree", "held_out"), Summary)
    assert not list(Path(output).parent.glob(".*"))  # no temporary file is left


def test_checkpoint_equals_folder(files: Files) -> None:
    """A training run's checkpoint decodes as the exported folder does, under the recorded policy."""
    loaded = [open_drafter(path) for path in (files.drafter, files.checkpoint)]
    assert [source.target_name for source in loaded] == [files.target_name] * 2
    drafters = [source.load(files.target) for source in loaded]
    for drafter in drafters:
        assert drafter.recorded_policy == RECORDED and drafter.is_bound and not drafter.training
        for name, value in drafter.trainable_state_dict().items():
            assert torch.equal(value, files.trained[name])
    first, second = (
        bench(path, files.suite, max_new_tokens=6, modes="chain,tree", simulate=True, num_prompts=2)
        for path in (files.drafter, files.checkpoint)
    )
    assert first.prompts == second.prompts and len(first.prompts) == 2


def test_checkpoint_of_the_module(files: Files) -> None:
    """What the training module writes is what is read here."""
    from treespark.losses import CrossEntropy
    from treespark.module import DraftingModule

    module = DraftingModule(files.target_name, lambda spec: DSparkDrafter(spec, **OPTIONS), Chain(), [CrossEntropy()])
    module.compose(files.target)
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    path = files.folder / "module.ckpt"
    torch.save(checkpoint, path)
    drafter = open_drafter(path).load(files.target)
    assert drafter.recorded_policy == Chain().config()
    for name, value in drafter.trainable_state_dict().items():
        assert torch.equal(value, module.drafter.trainable_state_dict()[name])


def test_simulated_report(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """Without live decoding there is nothing to time: no such columns, no verdict, nan becomes null in the file."""
    output = str(files.folder / "simulated.json")
    results = bench(files.drafter, [files.suite], simulate=True, max_new_tokens=8, output=output)
    shown = capsys.readouterr().out
    assert "simulated" in shown and "tok/s" not in shown and "Outputs:" not in shown
    assert results.arm_names == ["chain", "tree"] and not results.judged
    summary = json.loads(Path(output).read_text())["summaries"][0]
    assert summary["single_throughput"] is None and summary["tau"] >= 1
    assert math.isnan(results.summary("tree").speed_ratio)


def test_differences_are_loud(files: Files) -> None:
    """A difference that no near-tie excuses is printed with its place and called an error."""
    results = bench(files.drafter, files.suite, max_new_tokens=4, num_prompts=1)
    results.differences.append(Difference("held_out", 0, "a-1", "tree", 2, 0.5, False))
    assert results.exit_code == 1
    console = Console(file=io.StringIO(), width=120)
    print_report(results, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tree, held_out[0] id a-1, token 2: logit gap 0.5, NOT a near-tie" in text and "ERROR" in text


def test_turns_messages_and_prompts(files: Files) -> None:
    """`turns` gives its first turn, rendered like a prompt of that text."""
    suite = load_suite(files.suite, files.target)
    assert suite.name == "held_out" and [prompt.id for prompt in suite.prompts] == ["a-1", "3", "4"]
    text = tiny_tokenizer().decode(suite.prompts[2].ids)
    assert text == "<|im_start|>user\nname a river<|im_end|>\n<|im_start|>assistant\n"
    assert "system\nbe brief" in tiny_tokenizer().decode(suite.prompts[1].ids)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"suites": "absent.jsonl"}, "absent.jsonl: no such data file"),
    ({"suites": ""}, "Nothing to evaluate"),
    ({"suites": ["empty.jsonl"]}, "nothing to evaluate, the file has no line"),
    ({"suites": "broken.jsonl"}, "broken.jsonl:2: not valid JSON"),
    ({"suites": "turns.jsonl"}, "turns.jsonl:1: 'turns' must be a non-empty list of texts"),
    ({"suites": "both.jsonl"}, "both.jsonl:1: expected exactly one of 'prompt', 'messages' and 'turns'"),
    ({"suites": "long.jsonl"}, "exceeds the 512 positions"),
    ({"num_prompts": 0}, "num_prompts must be at least 1"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ({"output": "."}, "is a folder; give the name of a file"),
    ({"threads": 0}, "threads must be at least 1"),
    ({"modes": "plain,trees"}, "Unknown mode 'trees'. Did you mean: tree"),
    ({"policies": "Budgeted(k=2,num_draft_nodes=99)"}, "choose 1 to 14"),
    ({"drafter": "nowhere"}, "nowhere: no such drafter"),
    ({"drafter": "empty.jsonl"}, "not a checkpoint of `treespark fit`"),
    ({"drafter": "foreign.ckpt"}, "not a checkpoint of `treespark fit`"),
    ({"target": "elsewhere"}, "The drafter was made for the target"),
    ({"drafter": "last.ckpt", "target": "elsewhere"}, "was trained for the target"),
    ({"dtype": "int8"}, "Unknown dtype 'int8'"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_wrong_input(files: Files, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives one error that names the file or the option."""
    monkeypatch.chdir(files.folder)
    files.write("empty.jsonl", "")
    files.write("broken.jsonl", '{"prompt": "x"}', "{nothing}")
    files.write("turns.jsonl", '{"turns": []}')
    files.write("both.jsonl", '{"turns": ["a"], "prompt": "b"}')
    files.write("long.jsonl", json.dumps({"prompt": "0 1 " * 300}))
    if "foreign.ckpt" in options.values():
        torch.save({"state_dict": {}}, "foreign.ckpt")
    if "elsewhere" in options.values() and not Path("elsewhere").exists():
        save_tiny_target("elsewhere", seed=1)
    arguments = {"drafter": files.drafter, "suites": files.suite, "max_new_tokens": 4} | options
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        bench(**arguments)
    assert message in str(error.value), str(error.value)


def test_results_of_something_else(files: Files) -> None:
    path = files.write("other.json", "[]")
    with pytest.raises(ValueError, match="expected a file of `treespark bench`"):
        Results.load(path)
    with pytest.raises(ValueError, match="not valid JSON"):
        Results.load(files.write("cut.json", '{"format": 1'))


def test_command_line(files: Files) -> None:
    """The signature is the command line: every option parses, policies with commas in brackets included."""
    import inspect

    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(bench, as_group=False)
    words = ["--drafter", "d", "--suites", "a.jsonl,b.jsonl", "--modes", "plain,tree", "--simulate", "true"]
    words += ["--policies", "Budgeted(k=4,num_draft_nodes=16),Chain", "--num_prompts", "4", "--threads", "2"]
    config = parser.parse_args(words)
    assert config.suites == "a.jsonl,b.jsonl" and config.policies == "Budgeted(k=4,num_draft_nodes=16),Chain"
    assert config.simulate is True and config.num_prompts == 4
    text = inspect.getdoc(bench) or ""
    assert all(f"    {name}:" in text for name in inspect.signature(bench).parameters)
