"""Reading a recipe without a training: its module and data, as `treespark fit` would build them."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning.pytorch.cli import LightningArgumentParser

from treespark import registry
from treespark.commands.training import HELP, DraftingCLI, Parser, quieten
from treespark.data import DraftingData
from treespark.module import DraftingModule


class RecipeCLI(DraftingCLI):
    """Parses as `treespark fit` does, with further options, and builds module and data alone: no trainer, no logger."""

    options: ClassVar[dict[str, tuple[Any, Any, str]]]

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "fit":
            for name, (kind, default, text) in self.options.items():
                parser.add_argument(f"--{name}", type=kind, default=default, help=text)
        return parser

    def before_instantiate_classes(self) -> None:
        """Drops what a trainer alone needs, such as a tracking run."""
        for name in ("logger", "callbacks"):
            self.config["fit"]["trainer"][name] = None

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Builds none."""
        return None

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def read_recipe(
    words: list[str], options: dict[str, tuple[Any, Any, str]]
) -> tuple[DraftingModule, DraftingData, dict[str, Any]]:
    """Builds the module and the data of a recipe; the target is not loaded yet.

    Args:
        words: The words of the command line: `--config RECIPE`, overrides, and options.
        options: Further options: name -> (type, default, help).

    Returns:
        Module, data, and the options' values.

    Raises:
        ValueError: For a wrong option, class or configuration, worded for the user.
    """
    registry.load_all()
    quieten()
    cli = type("CLI", (RecipeCLI,), {"options": options})(
        DraftingModule,
        DraftingData,
        save_config_callback=None,
        seed_everything_default=0,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        parser_class=Parser,
        parser_kwargs={command: {"description": text} for command, text in HELP.items()} | {"prog": "treespark"},
        args=["fit", *words],
    )
    return cli.model, cli.datamodule, {name: cli.config["fit"][name] for name in options}
