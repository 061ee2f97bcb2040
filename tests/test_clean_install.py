"""The wheel in an environment that holds torch, tensordict and what those two ask for, and nothing else."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
CORE = ("torch", "tensordict")
BLOCKS = (
    "dapo_components",
    "dapo_components.functional",
    "dapo_components.losses",
    "dapo_components.advantages",
    "dapo_components.filters",
    "dapo_components.rewards",
    "dapo_components.generation",
    "dapo_components.evaluation",
    "dapo_components.reporting",
    "dapo_components.collectors",
    "dapo_components.data",
    "dapo_components.data.keys",
    "dapo_components.data.component",
)


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def core_distributions() -> set[str]:
    """Names of torch, tensordict and everything they require, directly or not."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    waiting = list(CORE)
    while waiting:
        name = normalised(waiting.pop())
        if name in found:
            continue
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # required on other platforms only
        found.add(name)
        requirements = map(Requirement, lines)
        waiting += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    (path,) = folder.glob("dapo_components-*.whl")
    return path


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of a new environment: the core packages as links to those installed here, and the wheel unpacked."""
    environment = tmp_path_factory.mktemp("clean") / "env"
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    for name in core_distributions():
        distribution = importlib.metadata.distribution(name)
        tops = {
            Path(file).parts[0] for file in distribution.files or [] if Path(file).parts[0] not in ("..", "__pycache__")
        }
        for top in tops:
            if not top.endswith(".pth") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return environment / "bin/python"


def run(python: Path, *arguments: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([python, *arguments], capture_output=True, text=True, cwd=cwd, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_clean_environment_is_clean(clean_python, tmp_path):
    names = ("transformers", "torchtune", "datasets", "pyarrow", "tqdm", "pytest", "torch", "tensordict")
    code = f"import importlib.util, json; print(json.dumps([n for n in {names} if importlib.util.find_spec(n)]))"
    assert json.loads(run(clean_python, "-c", code, cwd=tmp_path)) == ["torch", "tensordict"]


def test_every_block_imports_and_works(clean_python, tmp_path):
    lines = [f"import {name}" for name in BLOCKS]
    lines += [
        "import torch",
        "from dapo_components.functional import soft_overlong_punishment",
        "print(soft_overlong_punishment(torch.tensor([80, 90, 120]), max_length=100, buffer_length=20).tolist())",
    ]
    assert run(clean_python, "-c", "\n".join(lines), cwd=tmp_path) == "[0.0, -0.5, -1.0]\n"


def test_the_command_copies_a_recipe_from_the_wheel(clean_python, tmp_path):
    assert "dapo_full" in run(clean_python, "-m", "dapo_components.cli", "ls", cwd=tmp_path)
    run(clean_python, "-m", "dapo_components.cli", "cp", "dapo_full", "my_dapo.py", cwd=tmp_path)
    assert "tune run my_dapo.py" in (tmp_path / "my_dapo.py").read_text("utf-8")


def test_the_wheel_holds_recipes_configs_and_the_start_up_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {path for path in (REPOSITORY / "recipes").rglob("*") if path.suffix in (".py", ".yaml")}
    expected = {f"dapo_components/_recipes/{path.relative_to(REPOSITORY / 'recipes').as_posix()}" for path in recipes}
    assert expected | {"dapo_components_startup.py", "dapo_components_startup.pth"} <= names
    assert {name.partition("/")[0] for name in names} == {
        "dapo_components",
        "dapo_components_startup.py",
        "dapo_components_startup.pth",
        next(name.partition("/")[0] for name in names if ".dist-info" in name),
    }
