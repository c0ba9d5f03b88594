"""What the job's pods run: the command lines, read by the parsers of torchrun and of the trainer."""

import re
import subprocess

import pytest
from torch.distributed.run import get_args_parser

from tests.deploy.manifests import Helm, Manifest, of_kind, trainers
from worker_agent.training.__main__ import _parse

JOB_NAME = re.compile(r"[A-Za-z0-9._-]+")


def expand(arguments: list[str], variables: dict[str, str]) -> list[str]:
    """The arguments with $(NAME) replaced, as the kubelet does."""
    return [re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], argument) for argument in arguments]


def command_line(container: Manifest, variables: dict[str, str]) -> list[str]:
    """What torchrun is called with, by running the container's shell line with a torchrun that only prints it."""
    command = [*container["command"], *expand(container["args"], variables)]
    assert command[:2] == ["sh", "-c"]
    command[2] = f"torchrun() {{ printf '%s\\0' \"$@\"; }}; {command[2].removeprefix('exec ')}"
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("mode", ["sidecar", "deployment"])
def test_torchrun_and_the_trainer_understand_their_arguments(helm: Helm, mode: str):
    values = {"mode": mode, "trainer": {"enabled": True, "nodes": 3, "processesPerNode": 2}}
    manifests = helm.render(
        {**values, "trainer": {**values["trainer"], "args": ["--iterations", "7", "--policy=hydra"]}}
    )
    ranks = []
    for name, pods in (("leader", 1), ("workers", 2)):
        for index in range(pods):
            variables = {"JOB_COMPLETION_INDEX": str(index), "JOBSET_RESTART_ATTEMPT": "4"}
            launch = get_args_parser().parse_args(command_line(trainers(manifests)[name], variables))
            assert (launch.nnodes, launch.nproc_per_node, launch.master_port) == ("3", "2", 29500)
            assert (launch.module, launch.training_script) == (True, "worker_agent.training")
            ranks.append(launch.node_rank)
            options = _parse(launch.training_script_args)
            assert (options.attempt, options.iterations, options.policy) == (4, 7, "hydra")
            assert options.scheduler.endswith(":7421")
            assert JOB_NAME.fullmatch(options.job)
    assert ranks == [0, 1, 2], "pods in rank order, each once"


def test_jobs_of_one_shared_scheduler_have_different_names(helm: Helm):
    names = set()
    for release in ("one", "two"):
        manifests = helm.render({"trainer": {"enabled": True}}, release=release)
        names |= {a for c in trainers(manifests).values() for a in c["args"] if a.startswith("--job=")}
    assert len(names) == 2


def test_each_restart_of_the_jobset_is_a_new_attempt(helm: Helm):
    manifests = helm.render({"mode": "sidecar"})
    assert of_kind(manifests, "JobSet")[0]["spec"]["failurePolicy"]["maxRestarts"] > 0
    for trainer in trainers(manifests).values():
        (attempt,) = (v for v in trainer["env"] if v["name"] == "JOBSET_RESTART_ATTEMPT")
        # https://jobset.sigs.k8s.io: the controller sets this annotation on the pods of each attempt
        field = attempt["valueFrom"]["fieldRef"]["fieldPath"]
        assert field == "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
        assert "--attempt=$(JOBSET_RESTART_ATTEMPT)" in trainer["args"]
