from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dapo_components.doctor import Requirement, probe_imports, requirements_of, startup_fault

REPOSITORY = Path(__file__).parents[1]


def run_doctor(path: Path) -> subprocess.CompletedProcess[str]:
    """Run ``dapo doctor`` where ``path`` comes before the installed packages."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-m", "dapo_components.cli", "doctor"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY)


def add_distribution(site: Path, name: str, version: str, source: str) -> None:
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(source)
    (site / f"{name}-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (site / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)


@pytest.mark.slow
def test_this_environment_can_run_the_recipes(tmp_path):
    result = run_doctor(tmp_path)
    assert result.returncode == 0, result.stdout
    assert "The recipes can run." in result.stdout
    assert "FAILS" not in result.stdout


@pytest.mark.slow
def test_a_torchao_that_breaks_torchtune_is_named_with_its_remedy(tmp_path):
    add_distribution(tmp_path, "torchao", "0.18.0", "")
    result = run_doctor(tmp_path)
    assert result.returncode == 1
    assert "differs  torchao          0.18.0" in result.stdout
    assert "FAILS    import torchtune.training: ModuleNotFoundError: No module named 'torchao." in result.stdout
    assert 'pip install "torchao==0.15.0"' in result.stdout
    assert "The recipes cannot run yet." in result.stdout


def test_requirements_are_those_of_the_project_file():
    with open(REPOSITORY / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    for extra, lines in [(None, project["dependencies"]), ("recipes", project["optional-dependencies"]["recipes"])]:
        for requirement in requirements_of(extra):
            wanted = [
                line for line in lines if line.startswith(requirement.name) and line[len(requirement.name)] in "=><"
            ]
            assert len(wanted) == 1
            assert set(wanted[0][len(requirement.name) :].split(",")) == set(requirement.specifier.split(","))
        assert len(requirements_of(extra)) == len(lines)


def test_extras_do_not_leak_into_each_other():
    names = {requirement.name for requirement in requirements_of("torchrl")}
    assert names == {"tensordict", "torchrl"}


@pytest.mark.parametrize(
    ("installed", "satisfied", "status"), [("1.0", True, "ok"), ("2.0", False, "differs"), (None, False, "missing")]
)
def test_status(installed, satisfied, status):
    assert Requirement("x", "==1.0", installed, satisfied).status == status


def test_probe_reports_each_module_alone(tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text("print('noise')\nraise RuntimeError('first line\\nsecond line')")
    (tmp_path / "ends_the_process.py").write_text("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probe_imports(["json", "raises_at_import", "ends_the_process"]) == {
        "json": "",
        "raises_at_import": "RuntimeError: first line",
        "ends_the_process": "the interpreter ended with status 7 during the import",
    }


def test_start_up_file_is_installed():
    assert startup_fault() is None
