"""The command ``dapo``: list and copy recipes, check the installation, run the demo.

Sub-commands import what they need when they run, so that ``dapo ls`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dapo_components import __version__
from dapo_components.recipe_files import (
    RecipeFileError,
    copy_recipe_file,
    list_configs,
    list_recipes,
    recipe_root,
    runnable_path,
    shadowing_package,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; those of the process if None.

    Returns:
        Exit status: 0 if it worked, 1 if ``dapo doctor`` found something broken, 2 for a user's mistake.
    """
    arguments = build_parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `dapo ls | head`: whoever read has seen enough; keep the interpreter from flushing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RecipeFileError, FileExistsError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; every sub-command stores its function as ``run``."""
    parser = argparse.ArgumentParser(prog="dapo", description="Recipes and demo of dapo_components.")
    parser.add_argument("--version", action="version", version=f"dapo-components {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("ls", help="list recipes and configs")
    command.set_defaults(run=_ls)

    command = commands.add_parser("cp", help="copy a recipe or config to edit it")
    command.add_argument("name", help="a name that `dapo ls` shows")
    command.add_argument("destination", help="file or folder")
    command.add_argument("--force", action="store_true", help="overwrite the destination")
    command.set_defaults(run=_cp)

    command = commands.add_parser("doctor", help="check versions, say what to type")
    command.set_defaults(run=_doctor)

    command = commands.add_parser("demo", help="train a small model on the CPU and show what it learned")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--output-dir", type=Path, default=Path("runs/demo"))
    command.set_defaults(run=_demo)

    command = commands.add_parser("demo-model", help="write a small model as a Hugging Face folder")
    command.add_argument("model", choices=("tiny", "smollm2-135m"))
    command.add_argument("folder", type=Path)
    command.add_argument("--seed", type=int, default=0, help="of the tiny model's random weights")
    command.set_defaults(run=_demo_model)
    return parser


def _ls(_: argparse.Namespace) -> int:
    for title, files in (("recipes", list_recipes()), ("configs", list_configs())):
        width = max((len(file.name) for file in files), default=0)
        print(title)
        for file in files:
            print(f"  {file.name:{width}}  {file.summary}".rstrip())
    print(f"\nin {recipe_root()}; copy one with: dapo cp <name> <destination>")
    return 0


def _cp(arguments: argparse.Namespace) -> int:
    copy = copy_recipe_file(arguments.name, arguments.destination, force=arguments.force)
    print(f"copied {arguments.name} to {copy}")
    if copy.suffix == ".yaml":
        return 0
    runnable = runnable_path(copy)
    shadow = shadowing_package(runnable)
    if shadow:
        print(
            f"warning: `tune run {runnable.as_posix()}` would import the installed package {shadow!r}; rename the copy"
        )
    elsewhere = [] if copy.resolve().is_relative_to(Path.cwd()) else [f"cd {copy.resolve().parent}"]
    run = f"tune run {runnable.as_posix()} --config tiny_cpu.yaml"
    first = "dapo demo  # once: makes the model that tiny_cpu trains"
    print("next:", *elsewhere, first, "dapo cp tiny_cpu tiny_cpu.yaml", run, sep="\n  ")
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from dapo_components.doctor import run_doctor

    return run_doctor()


def _demo(arguments: argparse.Namespace) -> int:
    from dapo_components.demo import run_demo

    return run_demo(arguments.output_dir, seed=arguments.seed)


def _demo_model(arguments: argparse.Namespace) -> int:
    if arguments.model == "tiny":
        from dapo_components.tiny_model import build_tiny

        print(f"wrote {build_tiny(arguments.folder, seed=arguments.seed)}")
    else:
        from dapo_components.demo_models import build_smollm2_135m

        print(f"wrote {build_smollm2_135m(arguments.folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
