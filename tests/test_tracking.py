"""Tracking in a local MLflow database: what a run leaves, how it ends and goes on, and that failures only warn."""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from treespark.environment import environment
from treespark.tracking import RunRecord, Tracking, flatten


class Line(LightningModule):
    """A module of one weight that logs acceptance by position: position d of validation v is v / (10 d)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.num_validations = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.weight - 1).square().sum()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.num_validations += 1
        for position in (1, 2):
            self.log(f"val/acceptance/position_{position}", self.num_validations / (10 * position))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(20, 1))  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(1, 1))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new database; creating one takes seconds, copying it none."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    assert Tracking(tracking_uri=f"sqlite:///{path}").num_lost == 0
    return path


@pytest.fixture
def uri(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A database of its own in the current folder, and the environment as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    yield f"sqlite:///{tmp_path}/mlflow.db"
    import mlflow

    mlflow.set_tracking_uri(None)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)


CONFIG = (
    "seed_everything: 3\nmodel:\n  policy:\n    class_path: treespark.policies.Budgeted\n    init_args:\n      k: 4\n"
)


def trainer(tracking: Any, steps: int, *callbacks: Callback, config: str | None = CONFIG) -> Trainer:
    return Trainer(
        max_steps=steps,
        val_check_interval=2,
        logger=tracking,
        callbacks=[RunRecord(config), *callbacks],
        default_root_dir="run",
        accelerator="cpu",
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def only_run(uri: str) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return run


def artifacts(uri: str, folder: str | None = None) -> set[str]:
    from mlflow import MlflowClient

    return {file.path for file in MlflowClient(uri).list_artifacts(only_run(uri).info.run_id, folder)}


def test_a_run_has_parameters_metrics_and_artifacts(uri: str) -> None:
    """Everything that a run is understood by is found in MLflow and in the run's folder."""
    trainer(Tracking(tracking_uri=uri), 4).fit(Line())
    run = only_run(uri)
    assert run.info.status == "FINISHED"
    assert run.data.params["model.policy"] == "Budgeted"
    assert run.data.params["model.policy.k"] == "4"
    assert run.data.params["seed_everything"] == "3"
    assert run.data.metrics["val/acceptance/position_2"] == pytest.approx(2 / 20)
    assert artifacts(uri) == {"config.yaml", "environment.json", "acceptance_by_position.png"}
    assert Path("run/config.yaml").read_text() == CONFIG
    record = json.loads(Path("run/environment.json").read_text())
    assert record["versions"]["torch"] == torch.__version__
    assert Path("run/acceptance_by_position.png").read_bytes().startswith(b"\x89PNG")


class Stop(Callback):
    """Raises an exception at the second step."""

    def __init__(self, exception: BaseException) -> None:
        self.exception = exception

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            raise self.exception


@pytest.mark.parametrize(
    ("exception", "status"),
    [(RuntimeError("broken"), "FAILED"), (SIGTERMException(), "KILLED"), (KeyboardInterrupt(), "KILLED")],
    ids=["error", "sigterm", "interrupt"],
)
def test_a_stopped_run_is_not_left_running(exception: BaseException, status: str, uri: str) -> None:
    """An error fails the run; a signal kills it."""
    import signal

    handler = signal.getsignal(signal.SIGINT)  # Lightning ignores further interrupts while it shuts down
    try:
        with pytest.raises((RuntimeError, SystemExit)):
            trainer(Tracking(tracking_uri=uri), 4, Stop(exception)).fit(Line())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert only_run(uri).info.status == status


def test_a_resumed_training_continues_the_run(uri: str) -> None:
    """One run with the metrics of both halves; the second configuration is kept beside the first."""

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            trainer.save_checkpoint("middle.ckpt")

    trainer(Tracking(tracking_uri=uri), 2, Save()).fit(Line())
    changed = CONFIG.replace("k: 4", "k: 2")
    trainer(Tracking(tracking_uri=uri), 5, config=changed).fit(Line(), ckpt_path="middle.ckpt", weights_only=False)
    run = only_run(uri)
    assert run.info.status == "FINISHED"
    from mlflow import MlflowClient

    history = MlflowClient(uri).get_metric_history(run.info.run_id, "train/loss")
    assert [metric.step for metric in history] == [0, 1, 2, 3, 4]
    assert "resumed_at_step_2/config.yaml" in artifacts(uri, "resumed_at_step_2")


def test_an_unknown_run_is_replaced(uri: str) -> None:
    """A checkpoint from elsewhere names a run that this store has not: a warning, and a new run."""
    tracking = Tracking(tracking_uri=uri)
    with pytest.warns(UserWarning, match="has no run"):
        tracking.continue_run("0" * 32)
    assert tracking.run_id == only_run(uri).info.run_id


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "nonsense://x"])
def test_without_a_store_training_goes_on(address: str, uri: str) -> None:
    """A refusing server, or an address that is none: one warning, and the same weights as without tracking."""
    tracked, untracked = Line(), Line()
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracking = Tracking(tracking_uri=address)
        trainer(tracking, 4).fit(tracked)
    assert time.monotonic() - started < 60
    assert sum("Tracking failed" in str(warning.message) for warning in caught) == 1
    assert tracking.num_lost > 1
    trainer(False, 4).fit(untracked)
    assert torch.equal(tracked.weight, untracked.weight)
    assert Path("run/config.yaml").is_file()


def test_a_slow_failure_is_followed_by_a_pause(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fails after 1 s stops further ones for 20 s: at most 5 % of the time is waited."""
    tracking = Tracking(tracking_uri=uri)
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    calls = []

    def fail() -> None:
        calls.append(clock[0])
        clock[0] += 1.0
        raise ConnectionError("no answer")

    with pytest.warns(UserWarning, match="no answer"):
        tracking.attempt("call", fail)
    for later in (101.5, 120.9, 121.1):
        clock[0] = later
        tracking.attempt("call", fail)
    assert calls == [100.0, 121.1]
    assert tracking.num_lost == 4


def test_user_calls_are_safe_too(uri: str) -> None:
    """`logger.experiment` is the client; a call that it refuses is a warning."""
    tracking = Tracking(tracking_uri=uri)
    tracking.experiment.set_tag(tracking.run_id, "colour", "green")
    assert only_run(uri).data.tags["colour"] == "green"
    with pytest.warns(UserWarning, match="Tracking failed"):
        tracking.experiment.log_metric(tracking.run_id, "rate", "not a number")


def test_parameters_are_short_and_clean() -> None:
    """Classes stand under their option; keys keep MLflow's characters; nothing is longer than 250."""
    losses = [{"class_path": "a.L1", "init_args": {"coefficient": 0.5}}, {"class_path": "b.Mine"}]
    flat = flatten({"losses": losses, "odd key!?": "x" * 9999, "list": [1, 2], "none": None, "none of it": []})
    assert flat["losses.L1.coefficient"] == "0.5"
    assert flat["losses.Mine"] == ""
    assert flat["odd key__"] == "x" * 250
    assert flat["list"] == "[1, 2]"
    assert flat["none"] == "None"


def test_many_long_parameters_are_stored(uri: str) -> None:
    """More than MLflow takes in one call, with values longer than it takes."""
    tracking = Tracking(tracking_uri=uri)
    tracking.log_hyperparams({f"name {i}?": "v" * 10_000 for i in range(250)})
    assert tracking.num_lost == 0
    assert len(only_run(uri).data.params) == 250


def test_environment_names_no_machine() -> None:
    """Versions and hardware are recorded, the host's name is not."""
    import platform

    text = json.dumps(environment())
    assert torch.__version__ in text
    node = platform.node()
    assert not node or len(node) < 6 or node not in text
