"""The Dockerfiles, as far as they can be checked without an engine: sources, bases, extras, user and paths."""

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest

from tests.deploy.manifests import ROOT, Helm, containers, environment, pods

FILES = {"scheduler": ROOT / "deploy/docker/scheduler.Dockerfile", "trainer": ROOT / "deploy/docker/agent.Dockerfile"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(params=FILES)
def image(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    return instructions(request.param)


def instructions(name: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, arguments) of a Dockerfile, continued lines joined."""
    lines = [line for line in FILES[name].read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (word.upper(), " ".join(rest.split()))
        for word, _, rest in (s.partition(" ") for s in joined.split("\n"))
        if word
    ]


def of(image: list[tuple[str, str]], word: str) -> list[str]:
    return [arguments for instruction, arguments in image if instruction == word]


def final_stage(image: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return image[max(i for i, (word, _) in enumerate(image) if word == "FROM") :]


def build_context() -> set[str]:
    """The top-level names that .dockerignore lets into the build."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*", "everything is out unless it is named"
    return {rule[1:] for rule in rules if rule.startswith("!")}


def test_every_copied_source_exists_and_reaches_the_build(image):
    context = build_context()
    copied = [part for line in of(image, "COPY") if "--from" not in line for part in line.split()[:-1]]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source in context, f"{source} is left out by .dockerignore"


def test_the_build_gets_all_that_the_wheel_is_made_of(image):
    copied = {part for line in of(image, "COPY") if "--from" not in line for part in line.split()[:-1]}
    project, hatch = PROJECT["project"], PROJECT["tool"]["hatch"]["build"]
    needed = {
        "pyproject.toml",
        "protos",
        project["readme"],
        *project["license-files"],
        hatch["hooks"]["custom"]["path"],
        *hatch["targets"]["wheel"]["packages"],
    }
    assert needed <= copied


def test_outputs_of_this_machine_stay_out_of_the_build():
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    for output in (
        "scheduler_service/dashboard/static",
        "scheduler_service/dashboard/ui/generated",
        "a/__pycache__",
        "a/b/node_modules",
    ):
        assert any(fnmatch.fnmatch(output, rule) for rule in rules[rules.index("*") + 1 :] if rule[0] != "!"), output


def test_bases_have_a_tag_that_is_not_latest(image):
    defaults = dict(argument.split("=", 1) for argument in of(image, "ARG") if "=" in argument)
    for base in of(image, "FROM"):
        reference = re.sub(r"\$\{(\w+)\}", lambda name: defaults[name[1]], base.split()[0])
        name, _, tag = reference.partition(":")
        assert name == "python"
        assert re.fullmatch(r"3\.\d+-slim-[a-z]+", tag), reference
        assert f">={tag.split('-')[0]}" == PROJECT["project"]["requires-python"], "tested on the oldest Python we allow"


@pytest.mark.parametrize(("name", "extra"), [("scheduler", "service"), ("trainer", "training")])
def test_each_image_installs_the_extra_that_it_needs(name: str, extra: str):
    installed = re.findall(r"\.whl\)\[([a-z,]+)\]", " ".join(of(instructions(name), "RUN")))
    assert installed == [extra]
    assert extra in PROJECT["project"]["optional-dependencies"]


def test_the_scheduler_needs_no_torch():
    project = PROJECT["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["service"]]
    assert not [requirement for requirement in requirements if re.match(r"torch|flash.attn", requirement)]


@pytest.mark.parametrize("name", FILES)
def test_image_and_chart_agree_on_user_paths_and_ports(helm: Helm, name: str):
    image = final_stage(instructions(name))
    variables = dict(pair.split("=", 1) for line in of(image, "ENV") for pair in line.split())
    made = {Path(path) for line in of(image, "RUN") for path in re.findall(r"(/var/[\w/.-]+)", line)}
    for pod in pods(helm.render({"mode": "sidecar"})).values():
        for container in containers(pod):
            if container["name"] != name:
                continue
            user = pod["spec"]["securityContext"]
            assert of(image, "USER") == [f"{user['runAsUser']}:{user['runAsGroup']}"]
            shared = variables.keys() & environment(container).keys()
            assert "NUMBA_CACHE_DIR" in shared
            for variable in shared:
                assert environment(container)[variable] == variables[variable]
            exposed = {int(port) for line in of(image, "EXPOSE") for port in line.split()}
            assert exposed <= {port["containerPort"] for port in container["ports"]}
    assert made, "folders to write to exist for a plain `docker run` too"
