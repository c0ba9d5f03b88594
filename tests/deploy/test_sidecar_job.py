"""The sidecar example at work: the rendered containers, run as processes of this machine."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.manifests import ROOT, Helm, Manifest, containers, environment, job_templates, of_kind, pods

STARTED_S, TRAINED_S, STOPPED_S = 180, 240, 40


class Machine:
    """Stands in for the cluster: names resolve to loopback, ports are free ones, each volume is a folder.

    A claim is one folder for all pods, an emptyDir is each pod's own.
    """

    def __init__(self, folder: Path, pods: dict[str, Manifest], leader: str):
        self.folder, self.pods, self.leader = folder, pods, leader
        self.ports = {port: free_port() for port in ("7421", "7422", "29500")}

    def start(self, pod: str, container: Manifest) -> subprocess.Popen[bytes]:
        """Start a container of a pod; its output goes to a file named after both."""
        variables = {"JOB_COMPLETION_INDEX": "0", "JOBSET_RESTART_ATTEMPT": "0"}
        variables |= {name: self._local(value, pod, container) for name, value in environment(container).items()}
        arguments = [*container.get("command", entrypoint()), *container["args"]]
        arguments = [self._local(argument, pod, container) for argument in arguments]
        arguments = [re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], argument) for argument in arguments]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self.log(pod, container["name"]).open("wb") as log:
            return subprocess.Popen(
                arguments, env={"PATH": path, "OMP_NUM_THREADS": "1", **variables},
                stdout=log, stderr=log, cwd=self.folder, start_new_session=True,
            )  # fmt: skip

    def log(self, pod: str, container: str) -> Path:
        return self.folder / f"{pod}-{container}.log"

    def volume(self, pod: str, name: str) -> Path:
        (volume,) = (volume for volume in self.pods[pod]["spec"]["volumes"] if volume["name"] == name)
        if "cache" in name:
            folder = ROOT / "build" / "numba"  # compiled code is kept between runs of the test
        elif "persistentVolumeClaim" in volume:
            folder = self.folder / volume["persistentVolumeClaim"]["claimName"]
        else:
            folder = self.folder / pod / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _local(self, text: str, pod: str, container: Manifest) -> str:
        text = text.replace(self.leader, "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
        folders = {mount["mountPath"]: str(self.volume(pod, mount["name"])) for mount in container["volumeMounts"]}
        text = re.sub("|".join(folders), lambda path: folders[path[0]], text)
        for port, free in self.ports.items():
            text = re.sub(rf"(?<=[:=]){port}$", str(free), text)
        return text


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def entrypoint() -> list[str]:
    """The entry point of the scheduler's image."""
    dockerfile = (ROOT / "deploy/docker/scheduler.Dockerfile").read_text()
    return json.loads(re.search(r"^ENTRYPOINT (.*)$", dockerfile, re.M)[1])


@contextmanager
def ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Nothing outlives the test."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_for_probe(address: str, probe: Manifest, process: subprocess.Popen[bytes], log: Path) -> None:
    """Ask as the kubelet does, until the answer is SERVING."""
    end = time.monotonic() + STARTED_S
    request = health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])
    with grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            try:
                answer = check(request, timeout=probe["timeoutSeconds"], wait_for_ready=True)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError as error:
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    raise
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(STARTED_S + TRAINED_S + STOPPED_S)
def test_rendered_sidecar_job_trains_by_the_plans_of_its_own_scheduler(helm: Helm, tmp_path: Path):
    trainer = {"nodes": 2, "processesPerNode": 1}  # each pod with a folder of its own
    arguments = shlex.split("--iterations 3 --batch 8 --budget 8192")
    manifests = helm.render({"mode": "sidecar", "trainer": {**trainer, "args": arguments}})
    name = of_kind(manifests, "JobSet")[0]["metadata"]["name"]
    found = pods(manifests)
    machine = Machine(tmp_path, found, f"{name}-leader-0-0.{name}")
    sidecar, leader = containers(found["leader"])
    (worker,) = containers(found["workers"])
    assert {job["spec"]["parallelism"] for job in job_templates(manifests).values()} == {1}

    processes = [scheduler := machine.start("leader", sidecar)]
    with ended(processes):
        address = f"127.0.0.1:{machine.ports['7421']}"
        wait_for_probe(address, sidecar["startupProbe"], scheduler, machine.log("leader", "scheduler"))
        wait_for_probe(address, sidecar["livenessProbe"], scheduler, machine.log("leader", "scheduler"))
        trainers = {pod: machine.start(pod, container) for pod, container in (("workers", worker), ("leader", leader))}
        processes += trainers.values()
        for pod, trainer in trainers.items():
            assert trainer.wait(timeout=TRAINED_S) == 0, machine.log(pod, "trainer").read_text()[-6000:]

        lines = (machine.volume("leader", "output") / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["origin"] for line in lines] == ["service"] * 3
        assert list(machine.volume("leader", "history").iterdir()), "the history is on its volume"

        # The pod ends when its trainer has: the sidecar is told to stop, and does so in the time that it is given.
        scheduler.send_signal(signal.SIGTERM)
        assert scheduler.wait(timeout=STOPPED_S) == 0, machine.log("leader", "scheduler").read_text()[-4000:]
