"""What a user installs: the wheel, and the oldest runtime libraries that it claims to work with."""

import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("hydra_cp-*.whl"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_holds_packages_generated_protos_and_the_built_dashboard(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    for expected in (
        "scheduler_service/domain/plan.py",
        "worker_agent/__init__.py",
        "hydracp/__init__.py",
        "hydracp/v1/planner_pb2.py",
        "hydracp/v1/planner_pb2_grpc.py",
        "scheduler_service/dashboard/static/index.html",
        "scheduler_service/simulation/presets/models/deepseek_v3.yaml",
        "scheduler_service/simulation/published/attention_h100.csv",
    ):
        assert expected in names
    assert not [name for name in names if name.startswith(("tests/", "deploy/", "scheduler_service/dashboard/ui/"))]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_generated_code_and_planner_work_with_the_oldest_grpcio_and_protobuf_that_the_wheel_allows(
    wheel: Path, tmp_path: Path
):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = [
        requirement.split(",")[0].replace(">=", "==")
        for requirement in project["dependencies"]
        if requirement.startswith(("grpcio>", "protobuf>"))
    ]
    assert len(floors) == 2
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", str(wheel), *floors]
    subprocess.run(install, check=True, timeout=600)
    check = (
        "from hydracp.v1 import planner_pb2_grpc\n"
        "from scheduler_service.domain import Batch, Pool\n"
        "from scheduler_service.planning import plan_iteration\n"
        "print(plan_iteration(Batch([40, 7, 3]), Pool(ranks=4, token_budget=16)).digest)\n"
    )
    ran = subprocess.run([str(python), "-c", check], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    version = subprocess.run(
        [str(python.with_name("hydra-cp")), "version"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert version.returncode == 0, version.stderr
