from pathlib import Path

import pytest

from atoll.errors import UsageError
from hostos.installation import OWN_FILES, check_beside, check_installation


def _installed(folder: Path) -> Path:
    for name, own_file in OWN_FILES.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
        (folder / name / own_file).touch()
    return folder


def test_six_packages_in_one_folder_are_accepted(tmp_path: Path) -> None:
    home = _installed(tmp_path / "site")
    check_installation([str(home)], home)


@pytest.mark.parametrize("name", sorted(OWN_FILES))
def test_a_module_of_the_same_name_earlier_on_the_path_is_refused_by_name(tmp_path: Path, name: str) -> None:
    home = _installed(tmp_path / "site")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / f"{name}.py").touch()
    with pytest.raises(UsageError, match=rf"{name}\.py shadows .*'{name}'"):
        check_installation([str(mine), str(home)], home)


def test_a_package_overwritten_by_another_distribution_is_refused(tmp_path: Path) -> None:
    home = _installed(tmp_path / "site")
    (home / "worker" / OWN_FILES["worker"]).unlink()
    with pytest.raises(UsageError, match="installed over it"):
        check_installation([str(home)], home)


def test_a_namesake_beside_the_job_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "coordinator.py").touch()
    with pytest.raises(UsageError, match=r"coordinator\.py .* rename it"):
        check_beside(tmp_path / "job.py")


def test_a_job_file_with_ordinary_neighbours_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "model.py").touch()
    check_beside(tmp_path / "job.py")
