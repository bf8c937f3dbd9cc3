"""`treespark doctor`: what would ruin a training, told before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import treespark

HELP = "Examines the run that `treespark fit` would start with the same options: what would ruin it, and what it takes."


def linked_rooms(package: Path) -> list[str]:
    """Returns a sentence for each of the two linked folders that is missing, as in a checkout without symbolic links.

    Args:
        package: The package's folder.
    """
    return [
        f"{package / name} is no folder but should be a link to ../{name}: the checkout has no symbolic links. On "
        "Windows, switch on developer mode and clone again with `git clone -c core.symlinks=true`."
        for name in ("losses", "policies")
        if not (package / name).is_dir()
    ]


def run(name: str, argv: list[str]) -> int:
    """Examines the run that `treespark fit` would start with the same words; returns 1 if anything would ruin it.

    Raises:
        ValueError: For a wrong option, class or configuration, worded for the user.
    """
    broken = linked_rooms(Path(treespark.__file__).parent)
    if broken:  # nothing below could even be imported
        raise ValueError(" ".join(broken))
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.cli import LightningArgumentParser

    from treespark.commands.training import DraftingCLI, run_cli
    from treespark.doctor import Report, Surroundings, examine

    report = Report()

    class Doctor(DraftingCLI):
        """Builds what `fit` builds, and examines it instead of training."""

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            try:
                return super().instantiate_trainer(**kwargs)
            except (MisconfigurationException, ValueError) as error:
                report.fail("trainer", str(error))
            return None

        def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
            self._subcommand_parsers["fit"].prog = f"treespark {name}"
            super().parse_arguments(parser, args)

        def _run_subcommand(self, subcommand: str) -> None:
            trainer, around = self.trainer, Surroundings()
            if trainer is not None:
                around = Surroundings(
                    folder=Path(trainer.default_root_dir),
                    device=trainer.strategy.root_device,
                    prepare=trainer.precision_plugin.convert_module,
                    precision=trainer.precision_plugin.train_step_context,
                    num_steps=trainer.max_steps if trainer.max_steps > 0 else None,
                    num_epochs=max(trainer.max_epochs or 0, 0),
                    num_processes=trainer.world_size,
                )
                self.datamodule.trainer = self.model.trainer = trainer
                with report.guard("trainer"):
                    self.model.check_trainer()
                self.model.trainer = None
            examine(report, self.model, self.datamodule, around)
            report.conclude()
            self.exit_code = report.exit_code

    return run_cli(Doctor, "fit", argv, {"fit": HELP})
