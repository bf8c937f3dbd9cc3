"""MLflow tracking that never stops a training, and the record of a run: configuration, environment, figure, drafter.

A tracking call that fails is a warning, once; a call that fails slowly (an unreachable server) is followed by a pause,
so that training does not wait for it again and again.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from treespark.environment import environment

DEFAULT_URI = "sqlite:///mlflow.db"
_SLOW = 1.0  # seconds; a failure that took so long is followed by 20 times as long without calls:
_PAUSE = 20  # at most 5 % of a training is waited
_MAX_LENGTH = 250  # MLflow's limit of a key; values are cut to the same length, the artifact config.yaml has them whole


class Tracking(MLFlowLogger):
    """Lightning's MLflow logger, made safe: every failure is a warning, and a run that was resumed is continued.

    The run is created at the first call that writes, not before, so that a resumed training can name its run.

    Args:
        experiment_name: Experiment that the run belongs to.
        run_name: Name of the run; MLflow invents one if None.
        tracking_uri: Where MLflow keeps runs: a database such as `sqlite:///mlflow.db`, a folder or a server. None
            takes MLFLOW_TRACKING_URI, or `sqlite:///mlflow.db` in the current folder.
        tags: Tags of the run.
        artifact_location: Where artifacts of a new experiment are kept; None leaves it to MLflow.
        run_id: An existing run to continue.
    """

    def __init__(
        self,
        experiment_name: str = "treespark",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        artifact_location: str | None = None,
        run_id: str | None = None,
    ) -> None:
        # MLflow would retry an unreachable server for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        for name in ("alembic", "mlflow.store.db.utils", "lightning.pytorch.loggers.mlflow"):
            logging.getLogger(name).setLevel(logging.ERROR)  # migrations of a new database are no news
        self.num_lost = 0
        self.end_status: Literal["FAILED", "KILLED"] | None = None
        self._paused_until = 0.0
        self._broken = False
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
        started = time.monotonic()
        try:
            super().__init__(experiment_name, run_name, uri, tags, artifact_location=artifact_location, run_id=run_id)
        except Exception as error:  # the client checks the address, and a database at once
            self._broken = True
            self._note_failure(f"open {uri}", error, started)

    def attempt(self, what: str, call: Callable[[], Any]) -> Any:
        """Returns call(), or None with a warning when it fails or tracking is paused after a slow failure."""
        if self._broken or time.monotonic() < self._paused_until:
            self.num_lost += 1
            return None
        started = time.monotonic()
        try:
            return call()
        except Exception as error:
            self._note_failure(what, error, started)
            return None

    def _note_failure(self, what: str, error: Exception, started: float) -> None:
        now = time.monotonic()
        if now - started >= _SLOW:
            self._paused_until = now + _PAUSE * (now - started)
        self.num_lost += 1
        if self.num_lost == 1:
            reason = " ".join(str(error).split()) or type(error).__name__
            rank_zero_warn(
                f"Tracking failed, training goes on; later failures are only counted. ({what}: {reason[:200]})"
            )

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The MLflow client; each of its calls is attempted as `attempt` says, in an existing run."""
        return _Guarded(self)

    def _open(self) -> None:
        if not self._initialized:
            _ = MLFlowLogger.experiment.fget(self)  # type: ignore[attr-defined]  # creates or finds the run
            atexit.register(self._close_unfinished)

    @property
    def run_id(self) -> str | None:
        """The run's id; creates the run if there is none yet. None while tracking fails."""
        if not self._initialized:
            self.attempt("create a run", self._open)
        return self._run_id if self._initialized else None

    @property
    def name(self) -> str | None:
        """The experiment's name; unlike its id, it needs no call."""
        return self._experiment_name

    @property
    def version(self) -> str | None:
        """The run's id if there is a run."""
        return self._run_id

    @property
    def save_dir(self) -> None:
        """None: what a run leaves in files stands in the trainer's `default_root_dir`."""
        return None

    @rank_zero_only
    def continue_run(self, run_id: str) -> None:
        """Continues an existing run instead of creating one; if this store has no such run, a new one is created."""
        if self._initialized or self._run_id is not None:
            return

        def reopen() -> None:
            from mlflow.exceptions import MlflowException

            try:
                self._mlflow_client.update_run(run_id, status="RUNNING")
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                rank_zero_warn(f"{self._tracking_uri} has no run {run_id} of the checkpoint; a new run is started.")
            else:
                self._run_id = run_id

        self.attempt(f"continue the run {run_id}", reopen)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Logs parameters under keys and values that MLflow accepts."""
        flat = flatten(params if isinstance(params, Mapping) else vars(params))
        self.attempt("log parameters", lambda: MLFlowLogger.log_hyperparams(self, flat))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Logs metrics at a step."""
        self.attempt("log metrics", lambda: MLFlowLogger.log_metrics(self, metrics, step))

    @rank_zero_only
    def log_file(self, path: str | Path, folder: str | None = None) -> None:
        """Stores a file as an artifact of the run, in a folder of its artifacts."""
        self.experiment.log_artifact(self.run_id, str(path), folder)

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Ends the run as FINISHED, FAILED, or KILLED after an interruption."""
        ended: str = self.end_status or status
        self.attempt("end the run", lambda: MLFlowLogger.finalize(self, ended))
        atexit.unregister(self._close_unfinished)
        if self.num_lost:
            rank_zero_info(f"Tracking: {self.num_lost} calls were lost.")

    def _close_unfinished(self) -> None:
        """At the interpreter's exit: a run that nobody ended has failed."""
        self.attempt("end the run", lambda: MLFlowLogger.finalize(self, "failed"))


class _Guarded:
    """The client as users see it: a call opens the run, and a failure is a warning."""

    def __init__(self, tracking: Tracking) -> None:
        self._tracking = tracking

    def __getattr__(self, name: str) -> Any:
        tracking = self._tracking

        def call(*args: Any, **kwargs: Any) -> Any:
            def attempted() -> Any:
                tracking._open()
                return getattr(tracking._mlflow_client, name)(*args, **kwargs)

            return tracking.attempt(name.replace("_", " "), attempted)

        return call


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns a configuration as short keys and values; a class stands under its option, its arguments below it.

    >>> flatten({"policy": {"class_path": "treespark.policies.Budgeted", "init_args": {"k": 4}}, "rate": 0.1})
    {'policy': 'Budgeted', 'policy.k': '4', 'rate': '0.1'}
    """
    flat: dict[str, str] = {}
    for name, value in params.items():
        key = re.sub(r"[^\w. /-]", "_", f"{prefix}{name}", flags=re.ASCII)[:_MAX_LENGTH]
        if (
            isinstance(value, list)
            and value
            and all(isinstance(item, Mapping) and "class_path" in item for item in value)
        ):
            value = {item["class_path"].rpartition(".")[2]: item.get("init_args") or "" for item in value}
        if isinstance(value, Mapping) and "class_path" in value:
            flat[key] = value["class_path"].rpartition(".")[2]
            value = value.get("init_args") or {}
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{key}.")
        else:
            flat[key] = str(value)[:_MAX_LENGTH]
    return flat


class RunRecord(Callback):
    """Keeps, in the run's folder and as MLflow artifacts, what it takes to understand and repeat a run.

    Written are `config.yaml` (the resolved configuration), `environment.json` (versions, git SHA, arguments, seed,
    hash of the data), `acceptance_by_position.png` after each validation, and after a training `drafter/`, the drafter
    as a checkpoint folder. Lightning's checkpoints keep the MLflow run's id: a resumed training continues the run.

    Args:
        config: The resolved configuration as YAML, if there is one.
        save_drafter: Whether a training that ends well writes `drafter/`.
    """

    def __init__(self, config: str | None = None, save_drafter: bool = True) -> None:
        self.config, self.save_drafter = config, save_drafter
        self._history: list[tuple[int, list[float]]] = []
        self._run_id: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """The run's id and the figure's history."""
        return {"run_id": self._run_id, "history": [(step, list(values)) for step, values in self._history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the run's id and the figure's history."""
        self._run_id, self._history = state_dict["run_id"], list(state_dict["history"])

    # The hooks of a stage's start come after a checkpoint's state was loaded, whatever the strategy.

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens or continues the run; records configuration and environment."""
        resumed = self._run_id is not None
        if resumed:
            for logger in _trackings(trainer):
                logger.continue_run(str(self._run_id))
        self._begin(trainer, f"resumed_at_step_{trainer.global_step}" if resumed else None)
        self._run_id = next((logger.version for logger in _trackings(trainer)), None) or self._run_id

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records a validation of its own."""
        if trainer.state.fn == "validate":
            self._begin(trainer, None)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records a test."""
        self._begin(trainer, None)

    @rank_zero_only
    def _begin(self, trainer: Trainer, folder: str | None) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if folder is None and self.config:  # a resumed run has its parameters, and MLflow refuses to change them
            parameters = _parameters(yaml.safe_load(self.config))
            for logger in _trackings(trainer):
                logger.log_hyperparams(parameters)
        texts = {"config.yaml": self.config, "environment.json": json.dumps(_record(trainer), indent=2)}
        with tempfile.TemporaryDirectory() as scratch:
            # Only a training owns the run's folder: validating a checkpoint must not replace what made it.
            home = Path(trainer.default_root_dir if trainer.state.fn == "fit" else scratch)
            home.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                if text is not None:
                    (home / name).write_text(text, encoding="utf-8")
                    for logger in _trackings(trainer):
                        logger.log_file(home / name, folder)

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws acceptance by position."""
        if trainer.sanity_checking or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        values: list[float] = []
        while (value := trainer.callback_metrics.get(f"val/acceptance/position_{len(values) + 1}")) is not None:
            values.append(float(value))
        if not values:
            return
        self._history = [entry for entry in self._history if entry[0] < trainer.global_step]
        self._history.append((trainer.global_step, values))
        path = Path(trainer.default_root_dir) / "acceptance_by_position.png"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draw_acceptance(self._history, path)
        except Exception as error:  # a figure is not worth a training
            rank_zero_warn(f"The acceptance figure could not be drawn: {error}")
            return
        for logger in _trackings(trainer):
            logger.log_file(path)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the drafter as a checkpoint folder, with the recorded policy and where it comes from."""
        gather: Any = getattr(pl_module, "whole_drafter", None)
        if gather is not None and self.save_drafter and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            # A sharded drafter is gathered by all processes and written by the first.
            self._write_drafter(trainer, pl_module, gather())

    @rank_zero_only
    def _write_drafter(self, trainer: Trainer, pl_module: LightningModule, drafter: Any) -> None:
        folder = Path(trainer.default_root_dir) / "drafter"
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        extra = {
            "provenance": _environment(trainer) | {"step": trainer.global_step},
            "chat_template_kwargs": getattr(data, "chat_template_kwargs", {}),
            "chat_template_sha256": getattr(data, "chat_template_sha256", None),
        }
        policy = getattr(pl_module, "policy", None)
        drafter.save_pretrained(folder, tree_policy=policy.config() if policy is not None else None, extra=extra)
        for logger in _trackings(trainer):
            logger.log_file(folder / "config.json", "drafter")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Notes how the run ends: killed by a signal, or failed."""
        killed = isinstance(exception, (KeyboardInterrupt, SIGTERMException))
        for logger in _trackings(trainer):
            logger.end_status = "KILLED" if killed else "FAILED"


def _trackings(trainer: Trainer) -> list[Tracking]:
    return [logger for logger in trainer.loggers if isinstance(logger, Tracking)]


def _parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that describes the experiment."""
    chosen = {key: config[key] for key in ("model", "data", "seed_everything") if key in config}
    skipped = ("callbacks", "logger", "default_root_dir")
    trainer = {key: value for key, value in config.get("trainer", {}).items() if key not in skipped}
    return chosen | {"trainer": {key: value for key, value in trainer.items() if value is not None}}


def _environment(trainer: Trainer) -> dict[str, Any]:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    seed = os.environ.get("PL_GLOBAL_SEED")
    return environment() | {
        "seed": int(seed) if seed else None,
        "data_hash": getattr(data, "data_hash", None),
        "world_size": trainer.world_size,
        "precision": str(trainer.precision),
    }


def _record(trainer: Trainer) -> dict[str, Any]:
    """The environment, and what the data is made of: options, hashes, the numbers that a mixture drew."""
    return _environment(trainer) | {"data_sources": getattr(trainer.datamodule, "data_sources", None)}  # type: ignore[attr-defined]


def draw_acceptance(history: list[tuple[int, list[float]]], path: Path) -> None:
    """Draws the share of rounds that accept position d, one line per validation, the latest in front.

    Args:
        history: (step, acceptance by position) of each validation.
        path: PNG file to write.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, (step, values) in enumerate(history):
        last = index == len(history) - 1
        color = "black" if last else colormaps["viridis"](index / max(1, len(history) - 1))
        label = f"step {step}" if last or index == 0 else None
        positions = range(1, len(values) + 1)
        axes.plot(positions, values, marker="o", color=color, alpha=1.0 if last else 0.5, label=label)
    axes.set(xlabel="position in the block", ylabel="share of rounds that accept it", ylim=(0, 1))
    axes.set_xticks(range(1, len(history[-1][1]) + 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
