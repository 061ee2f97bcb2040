"""The recipes and configs that come with the package: what there is, and copies to edit."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from dataclasses import dataclass
from pathlib import Path


class RecipeFileError(Exception):
    """A copy that cannot be made as asked; the message says what to do."""


@dataclass(frozen=True)
class RecipeFile:
    """A recipe or a config.

    Args:
        name: What ``dapo cp`` calls it: the file name without its ending.
        path: Where it lies.
        summary: First line of its docstring or comment.
    """

    name: str
    path: Path
    summary: str


def recipe_root() -> Path:
    """Return the folder of the recipes: inside the installed package, or of the checkout.

    Raises:
        RecipeFileError: If there is neither.

    Example:
        >>> (recipe_root() / "configs").is_dir()
        True
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "_recipes", package.parent / "recipes"):
        if (folder / "configs").is_dir():
            return folder
    raise RecipeFileError(
        f"no recipes beside {package}; reinstall with: pip install --force-reinstall --no-deps dapo-components"
    )


def list_recipes() -> list[RecipeFile]:
    """Return the recipes, by name.

    Example:
        >>> "dapo_full" in [recipe.name for recipe in list_recipes()]
        True
    """
    return [
        RecipeFile(path.stem, path, _first_line(ast.get_docstring(ast.parse(path.read_text("utf-8")))))
        for path in sorted(recipe_root().glob("*.py"))
        if not path.name.startswith("_")
    ]


def list_configs() -> list[RecipeFile]:
    """Return the configs, by folder and name.

    Example:
        >>> "tiny_cpu" in [config.name for config in list_configs()]
        True
    """
    return [
        RecipeFile(path.stem, path, _first_line(path.read_text("utf-8").lstrip("# \n")))
        for path in sorted((recipe_root() / "configs").rglob("*.yaml"))
    ]


def copy_recipe_file(name: str, destination: str | Path, *, force: bool = False) -> Path:
    """Copy a recipe or config, and make the command in its first lines name the copy.

    Args:
        name: A name that ``dapo ls`` shows; its path or file name do too.
        destination: File to write, or a folder to write into; missing folders are made.
        force: Overwrite a file that exists.

    Returns:
        The file written.

    Raises:
        RecipeFileError: If there is no such recipe or config, or the destination exists and ``force`` is false.
    """
    source = _find(name)
    target = Path(destination)
    if target.is_dir() or str(destination).endswith(("/", "\\")):
        target = target / source.path.name
    if target.suffix != source.path.suffix:
        raise RecipeFileError(f"{name} is a {source.path.suffix} file; name the copy {target.stem}{source.path.suffix}")
    if target.exists() and not force:
        raise RecipeFileError(f"{target} exists; choose another name or add --force to overwrite it")
    text = source.path.read_text("utf-8")
    original = (Path("recipes") / source.path.relative_to(recipe_root())).as_posix()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text.replace(original, runnable_path(target).as_posix()), "utf-8")
    return target


def runnable_path(recipe: Path) -> Path:
    """Return the path of a recipe as ``tune run`` takes it: below the working directory, or below its own folder.

    ``tune run`` turns a relative path into a module name; absolute paths and ``..`` have none.

    Example:
        >>> runnable_path(Path("mine/my_dapo.py")).as_posix(), runnable_path(Path("/elsewhere/my_dapo.py")).as_posix()
        ('mine/my_dapo.py', 'my_dapo.py')
    """
    absolute = recipe.resolve()
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else Path(absolute.name)


def shadowing_package(recipe: str | Path) -> str | None:
    """Return the installed package that ``tune run`` would import instead of a recipe at this relative path.

    ``tune run a/b.py`` imports the module ``a.b`` and looks into the working directory last.

    Args:
        recipe: Path of the recipe, relative to the working directory.

    Example:
        >>> shadowing_package("json/my_dapo.py"), shadowing_package("my_dapo.py")
        ('json', None)
    """
    top = Path(recipe).with_suffix("").parts[0]
    if top == "recipes":
        return None  # the start-up file takes care of it
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    # A namespace package has no origin and merges with a folder of the same name.
    if spec is None or spec.origin is None:
        return None
    own = (Path.cwd() / top, Path.cwd() / f"{top}.py")
    found = Path(spec.origin).resolve()
    return None if any(found.is_relative_to(path) for path in own) else top


def _find(name: str) -> RecipeFile:
    files = list_recipes() + list_configs()
    wanted = Path(name).name.removesuffix(".py").removesuffix(".yaml")
    for file in files:
        if wanted == file.name:
            return file
    close = difflib.get_close_matches(wanted, [file.name for file in files], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise RecipeFileError(f"no recipe or config {name!r}{hint} (`dapo ls` lists them)")


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0].lstrip("# ")
