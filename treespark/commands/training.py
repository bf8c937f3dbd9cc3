"""`treespark fit`, `validate` and `test`: Lightning's command line over our module and data."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import SIGTERMException

from treespark import registry
from treespark.commands.hints import HelpfulParser
from treespark.data import DraftingData
from treespark.module import DraftingModule
from treespark.tracking import RunRecord

HELP = {
    "fit": "Trains a drafter. `--config` names a recipe; every key of it is also an option.",
    "validate": "Computes the validation metrics of a checkpoint.",
    "test": "Computes the same metrics on the test file, then decodes it live: plain, chain and tree.",
}


# Of `treespark test`, for the live decoding: name -> (type, default, help).
DECODING_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "modes": (str, "plain,chain,tree", "Some of plain, chain and tree."),
    "num_prompts": (int | None, None, "Only the first so many prompts of the test file."),
    "max_new_tokens": (int, 128, "Most new tokens of an answer."),
    "output": (str | None, None, "File for the results (JSON)."),
}


class Parser(HelpfulParser, LightningArgumentParser):
    """Lightning's parser with our errors."""


class Checkpoints(ModelCheckpoint):
    """The best checkpoint and the last: Lightning saves after validations, this also after the very last step."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Saves `last.ckpt` at the last step (a later hook would record the unfinished epoch as finished)."""
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        if self.save_last and self.dirpath and trainer.global_step == trainer.max_steps:
            trainer.save_checkpoint(Path(self.dirpath) / f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}")


class DraftingCLI(LightningCLI):
    """Builds trainer, module and data from a recipe and its overrides, and keeps the resolved configuration."""

    exit_code = 0

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the checkpoints of a run: the best by `val/tau`, and the last."""
        parser.link_arguments("model.target", "data.target")
        parser.add_lightning_class_args(Checkpoints, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.monitor": "val/tau",
                "checkpoint.mode": "max",
                "checkpoint.filename": "best",
                "checkpoint.save_last": True,
                "checkpoint.enable_version_counter": False,
            }
        )
        parser.link_arguments("trainer.default_root_dir", "checkpoint.dirpath", compute_fn=checkpoint_folder)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """What Lightning offers, less `predict`."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name in HELP}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "test":
            for name, (kind, default, text) in DECODING_OPTIONS.items():
                parser.add_argument(f"--{name}", type=kind, default=default, help=text)
        return parser

    def after_test(self) -> None:
        """Decodes the test file live, as `treespark bench` does, and prints and keeps the results."""
        from treespark.bench import load_suite, make_arms, print_report
        from treespark.bench import run as run_bench

        options, data = self.config_init["test"], self.datamodule
        module: DraftingModule = self.model
        drafter = module.whole_drafter()
        drafter.recorded_policy = module.policy.config()
        limit = options["max_new_tokens"]
        suite = load_suite(
            data.test,
            module.target,
            chat_template_kwargs=data.chat_template_kwargs,
            num_prompts=options["num_prompts"],
            max_new_tokens=limit,
        )
        arms = make_arms(drafter, options["modes"])
        results = run_bench(module.target, drafter, [suite], arms, max_new_tokens=limit)
        if options["output"]:
            results.save(options["output"])
        print_report(results)
        self.exit_code = results.exit_code

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses the words that were given (Lightning would warn that they are not `sys.argv`)."""
        self.config = parser.parse_args(args)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Builds the trainer; the run's record gets the resolved configuration."""
        name = str(self.subcommand)
        text = self._parser(name).dump(self.config[name], skip_unset=False)
        self.trainer_defaults["callbacks"] = [RunRecord(config=text)]
        return super().instantiate_trainer(**kwargs)

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Any:
        if config.get("enable_checkpointing") is False:  # Lightning refuses the contradiction
            callbacks = [callback for callback in callbacks if not isinstance(callback, ModelCheckpoint)]
        return super()._instantiate_trainer(config, callbacks)


def checkpoint_folder(root: Any) -> str:
    """The folder of a run's checkpoints."""
    return str(Path(root or ".") / "checkpoints")


def run(name: str, argv: list[str]) -> int:
    """Runs one of the subcommands; returns the exit status, 1 when decoding gave another text than plain decoding.

    Raises:
        ValueError: For a wrong option, class or configuration, worded for the user.
    """
    return run_cli(DraftingCLI, name, argv, HELP)


def run_cli(cli_class: type[DraftingCLI], name: str, argv: list[str], texts: dict[str, str]) -> int:
    """Runs a command line over our module and data; `texts` has the help of Lightning's subcommands."""
    registry.load_all()
    quieten()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        cli = cli_class(
            DraftingModule,
            DraftingData,
            save_config_callback=None,  # RunRecord keeps the configuration, with any logger
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_class=Parser,
            parser_kwargs={command: {"description": text} for command, text in texts.items()} | {"prog": "treespark"},
            trainer_defaults={
                "logger": {"class_path": "treespark.tracking.Tracking"},
                "gradient_clip_val": 1.0,
            },
            args=[name, *argv],
        )
    except SIGTERMException:
        raise SystemExit(128 + signal.SIGTERM) from None  # Lightning would end with 0
    except MisconfigurationException as error:
        raise ValueError(str(error)) from error
    return cli.exit_code


def quieten() -> None:
    """Drops remarks of Lightning that are wrong here: a frozen target is meant, as are loaders without processes."""
    # Validation figures are summed over processes before they are logged.
    remarks = ("does not have many workers", "in eval mode at the start of", "LeafSpec.*deprecated", "sync_dist=True")
    for message in remarks:
        warnings.filterwarnings("ignore", message=f".*{message}")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "litlogger" not in record.getMessage() and "litmodels" not in record.getMessage()
    )
