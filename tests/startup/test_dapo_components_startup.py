"""The start-up file with stand-in recipes; ``tests/recipes`` runs the real ones through ``tune run``."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import dapo_components_startup
import pytest
from dapo_components_startup import recipe_folder

REPOSITORY = Path(__file__).parents[2]
STAND_IN = "import os, sys; print('ran', __name__, sys.argv[1:], os.environ.get('RANK'), flush=True)\n"


def tune(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sysconfig.get_path("scripts")) / "tune"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([program, "run", *arguments], capture_output=True, text=True, cwd=cwd, env=environment)


@pytest.fixture
def own_recipes(tmp_path: Path) -> Path:
    """A folder as a user's project has it: recipes without ``__init__.py``, which Python alone would not find."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/x.py").write_text(STAND_IN)
    return tmp_path


def test_installed_file_is_the_repositorys():
    installed = Path(dapo_components_startup.__file__)
    for end in (".py", ".pth"):
        source = REPOSITORY / f"startup/dapo_components_startup{end}"
        assert installed.with_suffix(end).read_text() == source.read_text(), "reinstall: pip install --no-deps -e ."


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/bin/tune", "run", "recipes/x.py", "--config", "c.yaml"], "recipes"),
        (["/bin/tune", "run", "--nproc_per_node", "2", "recipes/x.py", "--config", "c.yaml"], "recipes"),
        (["C:/Scripts/tune.exe", "run", "recipes/x.py"], "recipes"),
        (["/bin/tune", "run", "full_finetune_single_device", "--config", "recipes/x.yaml"], ""),
        (["/bin/tune", "run", "recipes/missing.py"], ""),
        (["/bin/tune", "ls", "recipes/x.py"], None),
        (["/bin/pytest", "run", "recipes/x.py"], None),
        (["-m", "run"], None),
    ],
)
def test_which_command_lines_mean_the_folder(own_recipes, argv, expected):
    found = recipe_folder(argv, str(own_recipes))
    assert found == (str(own_recipes / "recipes") if expected == "recipes" else expected)


@pytest.mark.slow
def test_one_process_runs_the_users_recipe(own_recipes):
    result = tune("recipes/x.py", "--config", "c.yaml", cwd=own_recipes)
    assert result.stdout == "ran __main__ ['--config', 'c.yaml'] None\n", result.stderr
    assert "Skipping import of cpp extensions" not in result.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_run_the_users_recipe(own_recipes):
    result = tune("--nproc_per_node", "2", "recipes/x.py", "--config", "c.yaml", cwd=own_recipes)
    ran = sorted(line for line in result.stdout.splitlines() if line.startswith("ran"))
    assert ran == [f"ran __main__ ['--config', 'c.yaml'] {rank}" for rank in (0, 1)], result.stderr


def test_other_programs_are_left_alone(own_recipes):
    code = "import sys; print('recipes' in sys.modules, 'dapo_components_startup' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=own_recipes, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_a_deleted_working_directory_does_not_stop_python(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir '{gone}' && '{sys.executable}' -c 'print(1)' run"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=gone)
    assert result.stdout == "1\n", result.stderr
