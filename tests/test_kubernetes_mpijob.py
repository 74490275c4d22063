"""The file for Kubernetes: its fields, and the command lines in it. No cluster is needed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from launchers.mpirun import listed_hosts, split
from launchers.run import run

FILE = Path(__file__).parents[1] / "examples" / "kubernetes_mpijob.yaml"


@pytest.fixture(scope="module")
def documents():
    return {document["kind"]: document for document in yaml.safe_load_all(FILE.read_text())}


@pytest.fixture(scope="module")
def replicas(documents):
    return documents["MPIJob"]["spec"]["mpiReplicaSpecs"]


def pod(replica):
    return replica["template"]["spec"]


def container(replica):
    (only,) = pod(replica)["containers"]
    return only


def test_it_is_a_job_of_the_operator_with_more_ranks_than_workers(documents, replicas):
    job = documents["MPIJob"]
    assert job["apiVersion"] == "kubeflow.org/v2beta1"
    assert set(replicas) == {"Launcher", "Worker"}
    assert replicas["Launcher"]["replicas"] == 1
    assert job["spec"]["slotsPerWorker"] * replicas["Worker"]["replicas"] > 8  # comm.world(workers=8)
    assert job["spec"]["runPolicy"]["backoffLimit"] > 0
    assert {replica["restartPolicy"] for replica in replicas.values()} == {"OnFailure"}


def test_the_command_line_is_one_of_adaptive_run(replicas):
    launcher = container(replicas["Launcher"])
    assert launcher["command"] == ["adaptive"]
    assert launcher["args"][0] == "run"
    options, program = split(launcher["args"][1:])
    known = {name for parameter in run.params for name in parameter.opts}
    assert {word for word in options if word.startswith("-")} <= known, options
    assert program[0].endswith("train.py")
    grace = float(options[options.index("--grace") + 1])
    assert all(pod(replica)["terminationGracePeriodSeconds"] > grace for replica in replicas.values())


def test_all_pods_see_the_checkpoints(documents, replicas):
    claim = documents["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for replica in replicas.values():
        volumes = {volume["name"]: volume for volume in pod(replica)["volumes"]}
        assert volumes["checkpoints"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container(replica)["volumeMounts"]}
        assert set(mounts) == set(volumes)
        directory = container(replicas["Launcher"])["args"][-1]
        assert directory.startswith(mounts["checkpoints"])


def test_an_evicted_pod_signals_its_ranks(replicas):
    command = container(replicas["Worker"])["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["/bin/sh", "-c"]
    subprocess.run(["/bin/sh", "-n", "-c", command[2]], check=True)
    assert "pkill -TERM -x adaptive-rank" in command[2]  # the name that supervisors of ranks have
    assert len("adaptive-rank") <= 15  # the kernel cuts longer ones


def test_the_operators_hostfile_is_read(tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("train-worker-0.train.default.svc slots=4\ntrain-worker-1.train.default.svc slots=4\n")
    assert [host.slots for host in listed_hosts(hostfile, 1)] == [4, 4]
