"""The file for Kubernetes: its command lines, and what all pods have. No cluster is needed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from launchers.mpirun import listed_hosts, split
from launchers.run import run

FILE = Path(__file__).parents[1] / "examples" / "kubernetes_mpijob.yaml"


@pytest.fixture(scope="module")
def pods():
    """The pods of launcher and worker, each with its only container."""
    documents = {document["kind"]: document for document in yaml.safe_load_all(FILE.read_text())}
    replicas = documents["MPIJob"]["spec"]["mpiReplicaSpecs"]
    found = {kind: replica["template"]["spec"] for kind, replica in replicas.items()}
    return {kind: {**pod, "container": pod["containers"][0]} for kind, pod in found.items()}


def test_the_command_line_is_one_of_adaptive_run(pods):
    launcher = pods["Launcher"]["container"]
    assert (launcher["command"], launcher["args"][0]) == (["adaptive"], "run")
    options, program = split(launcher["args"][1:])
    known = {name for parameter in run.params for name in parameter.opts}
    assert {word for word in options if word.startswith("-")} <= known, options
    assert program[0].endswith("train.py")
    grace = float(options[options.index("--grace") + 1])
    assert all(pod["terminationGracePeriodSeconds"] > grace for pod in pods.values())


def test_all_pods_see_the_checkpoints(pods):
    directory = pods["Launcher"]["container"]["args"][-1]
    for pod in pods.values():
        (volume,) = [volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        (path,) = [mount["mountPath"] for mount in pod["container"]["volumeMounts"] if mount["name"] == volume]
        assert directory.startswith(path)


def test_an_evicted_pod_signals_its_ranks(pods):
    command = pods["Worker"]["container"]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["/bin/sh", "-c"]
    subprocess.run(["/bin/sh", "-n", "-c", command[2]], check=True)
    assert "pkill -TERM -x adaptive-rank" in command[2]  # the name that supervisors of ranks have


def test_the_operators_hostfile_is_read(tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("train-worker-0.train.default.svc slots=4\ntrain-worker-1.train.default.svc slots=4\n")
    assert [host.slots for host in listed_hosts(hostfile, 1)] == [4, 4]
