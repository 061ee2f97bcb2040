"""Let ``tune run recipes/x.py`` find the ``recipes`` folder of the working directory.

torchtune installs a top-level package ``recipes`` whose import raises, and ``tune run`` turns the path of a recipe into
the module ``recipes.x`` while it puts the working directory last. A ``.pth`` file imports this module at start-up of
``tune run`` and of the processes it starts, and of nothing else; it gives the name ``recipes`` to the user's folder.
"""

import logging
import os
import sys

# Set by `tune run`, inherited by the processes of --nproc_per_node and by spawned workers; empty without a folder.
FOLDER_VARIABLE = "DAPO_COMPONENTS_RECIPES"


def recipe_folder(argv: list[str], cwd: str) -> str | None:
    """Return the ``recipes`` folder that a command line means.

    Args:
        argv: ``sys.argv`` of the process.
        cwd: Working directory.

    Returns:
        The folder, ``""`` for a ``tune run`` of something else, None for other programs.
    """
    program = os.path.basename(argv[0]).removesuffix(".exe").removesuffix("-script.py")
    if program != "tune" or argv[1:2] != ["run"]:
        return None
    for argument in argv[2:]:
        if argument.startswith("recipes/") and argument.endswith(".py") and os.path.isfile(os.path.join(cwd, argument)):
            return os.path.join(cwd, "recipes")
    return ""


def claim_recipes() -> None:
    """Bind the module name ``recipes`` to the user's folder where there is one."""
    folder = recipe_folder(sys.argv, os.getcwd())
    if folder is not None:
        os.environ[FOLDER_VARIABLE] = folder
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None:
        return
    # torchao says so at every import beside a newer torch; nothing here uses those extensions.
    logging.getLogger("torchao").addFilter(lambda record: "Skipping import of cpp extensions" not in str(record.msg))
    if os.path.isdir(folder) and "recipes" not in sys.modules:
        module = type(sys)("recipes")
        module.__path__ = [folder]
        sys.modules["recipes"] = module


try:
    claim_recipes()
except (OSError, IndexError):  # e.g. the working directory was deleted; start-up of Python must go on
    pass
