"""PyTorch's data sets and loaders, by the real library."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

import adaptive as ad
import collectives as comm
from adaptive.data.adapters import examples_of
from adaptive.data.shards import stream_of
from adaptive.data.stream import Stream
from tests.mpirun import run
from tests.speed import limit

COVERS = ("adaptive/data/forks.py", "adaptive/data/loader_processes.py")

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch.utils import data as td  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than there are cores
N = 24
PLAN = [(4, 3), (2, 6), (5, 0), (4, 4), (3, 6), (7, 2), (5, 5)]  # 56 examples: two epochs and a part of the third


def opened(data):
    return Stream(stream_of(data, 2, range(2)), seed=0, workers=range(2))


def walk(stream, plan=PLAN):
    """The numbers of the examples that are taken, in order."""
    seen = []
    for sizes in plan:
        share = stream.take(sizes)
        stream.prefetch(sizes)
        stream.advance(sizes)
        seen += [int(i) for batch in share.batches if batch is not None for i in number_of(batch)]
    return seen


def number_of(batch):
    """Each example holds its number somewhere: as `i`, or as its first leaf."""
    found = batch["i"] if isinstance(batch, dict) else batch[0] if isinstance(batch, tuple | list) else batch
    return np.asarray(found).reshape(len(found), -1)[:, 0]


def check_epochs_and_restores(make):
    """Each example once per epoch, and the same examples from any step on as in an unbroken run."""
    stream = opened(make())
    whole = walk(stream)
    stream.close()
    assert sorted(whole[:N]) == sorted(whole[N : 2 * N]) == list(range(N))
    for steps in (2, 5):
        first, other = opened(make()), opened(make())
        begun = walk(first, PLAN[:steps])
        other.go_on(first.cursors, first.place())
        assert begun + walk(other, PLAN[steps:]) == whole
        first.close()
        other.close()
    return whole


# --- data sets with an index ------------------------------------------------------------------------------------------


def of_items(make):
    class Items(td.Dataset):
        def __len__(self):
            return N

        def __getitem__(self, index):
            return make(index)

    return Items()


def image(index):
    return pytest.importorskip("PIL.Image").fromarray(np.full((2, 2, 3), index, np.uint8))


NUMBERS = torch.arange(N)
HALF = N // 2
WITH_INDEX = {
    "TensorDataset": lambda: td.TensorDataset(NUMBERS, torch.ones(N, 3)),
    "StackDataset": lambda: td.StackDataset(i=NUMBERS, x=torch.ones(N, 3)),
    "ConcatDataset": lambda: td.ConcatDataset([td.TensorDataset(NUMBERS[:HALF]), td.TensorDataset(NUMBERS[HALF:])]),
    "Subset": lambda: td.Subset(td.TensorDataset(torch.arange(100) - 50), range(50, 50 + N)),
    "random_split": lambda: td.random_split(
        td.TensorDataset(torch.cat([NUMBERS, NUMBERS])[:N]), [N, 0], torch.Generator().manual_seed(1)
    )[0],
    "of dicts": lambda: of_items(lambda i: {"i": i, "x": torch.ones(2)}),
    "of tuples": lambda: of_items(lambda i: (torch.tensor(i), np.ones(2), 1.5)),
    "of lists in dicts": lambda: of_items(lambda i: {"i": i, "x": [1, 2]}),
    "of ndarrays": lambda: of_items(lambda i: np.full(3, i)),
    "of tensors": lambda: of_items(lambda i: torch.full((3,), i)),
    "of images": lambda: of_items(lambda i: {"i": i, "x": np.asarray(image(i))}),
}


@pytest.mark.parametrize("kind", WITH_INDEX)
def test_a_data_set_is_taken_by_its_index(kind):
    whole = check_epochs_and_restores(WITH_INDEX[kind])
    assert whole[:N] != whole[N : 2 * N]  # shuffled
    assert opened(td.DataLoader(WITH_INDEX[kind](), batch_size=5, shuffle=True)).data.length == N


def test_a_loaders_data_set_is_used_and_its_ignored_settings_are_named():
    sampler = td.DistributedSampler(range(N), num_replicas=3, rank=1)
    loader = td.DataLoader(WITH_INDEX["of dicts"](), batch_size=4, sampler=sampler, worker_init_fn=print)
    data = examples_of(loader)
    assert len(data) == N
    unused = (
        "batch_size=4, shuffling, the DistributedSampler's division by 3, worker_init_fn and drop_last have no effect"
    )
    assert unused in data.notes[0]
    assert examples_of(td.DataLoader(WITH_INDEX["of dicts"](), num_workers=3)).num_readers == 3


def test_a_loader_trains():
    def driver(state, batch):
        return state, {"sum": comm.all_reduce(batch["i"].sum(), op="sum")}

    loader = td.DataLoader(WITH_INDEX["StackDataset"](), batch_size=4, shuffle=True)
    with ad.Program(driver, jnp.zeros(()), loader, global_batch=N, resizable=False) as program:
        report = program.step()
        assert float(report.metrics["sum"]) == N * (N - 1) / 2
        assert "is used, by index" in report.notes[0]


def test_a_collate_function_is_called_for_each_example():
    def collate(examples):
        return torch.stack([e[0] for e in examples]) + 0.5, [torch.tensor([1.0])]

    data = examples_of(td.DataLoader(td.TensorDataset(NUMBERS), collate_fn=collate))
    x, (one,) = data.rows(np.array([3, 1]))
    assert (x.tolist(), one.tolist()) == ([3.5, 1.5], [1, 1])
    assert "its collate_fn for each alone" in data.notes[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sampler": td.WeightedRandomSampler([1.0] * N, N)}, "sampler is a WeightedRandomSampler, which picks"),
        ({"sampler": td.SubsetRandomSampler(range(3))}, "sampler is a SubsetRandomSampler, which picks"),
        ({"sampler": td.RandomSampler(range(N), replacement=True)}, "sampler is a RandomSampler, which picks"),
        ({"batch_sampler": [[0, 1], [2]]}, "batch_sampler is a list, which picks"),
        ({"collate_fn": lambda rows: torch.zeros(3)}, "collate_fn makes an array of shape (3,) of one example"),
    ],
)
def test_a_loader_with_another_meaning_is_refused(options, says):
    with pytest.raises(ad.DataError) as error:
        examples_of(td.DataLoader(WITH_INDEX["TensorDataset"](), **options))
    assert says in str(error.value)


# --- what is iterated -------------------------------------------------------------------------------------------------


def stream_of_numbers(start=0, stop=N, *, divides=True, shuffles=False, raises=None, make=None):
    """An `IterableDataset`, of a class that other processes cannot import."""
    make = make or (lambda i: {"i": i, "x": torch.full((2,), float(i))})

    class Numbers(td.IterableDataset):
        def __iter__(self):
            worker = td.get_worker_info()
            own = slice(worker.id, None, worker.num_workers) if worker and divides else slice(None)
            numbers = np.arange(start, stop)[own]
            for i in np.random.permutation(numbers) if shuffles else numbers:
                if i == raises:
                    raise ArithmeticError("no such number")
                if i == -1:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield make(int(i))

    return Numbers()


def batched(data, **options):
    return ad.data.from_iterator(td.DataLoader(data, **options), batched=True)


ITERATED = {
    "IterableDataset": stream_of_numbers,
    "ChainDataset": lambda: td.ChainDataset([stream_of_numbers(0, HALF), stream_of_numbers(HALF)]),
    "loader": lambda: td.DataLoader(stream_of_numbers(), batch_size=5),
    "loader without batches": lambda: td.DataLoader(stream_of_numbers(), batch_size=None),
    "loader, shuffled": lambda: batched(WITH_INDEX["of dicts"](), batch_size=5, shuffle=True),
    "loader, batch sampler": lambda: batched(
        WITH_INDEX["of dicts"](), batch_sampler=td.BatchSampler(td.RandomSampler(range(N)), 7, drop_last=False)
    ),
    "loader, sampler": lambda: batched(WITH_INDEX["of dicts"](), sampler=td.SubsetRandomSampler(range(N))),
    "loader of a function": lambda: ad.data.from_iterator(
        lambda: td.DataLoader(stream_of_numbers(), batch_size=7), batched=True
    ),
}
WITH_WORKERS = {
    "2 workers": lambda: td.DataLoader(stream_of_numbers(), batch_size=5, num_workers=2),
    "3 workers that shuffle": lambda: td.DataLoader(stream_of_numbers(shuffles=True), batch_size=2, num_workers=3),
    "2 workers that persist": lambda: td.DataLoader(
        stream_of_numbers(), batch_size=5, num_workers=2, persistent_workers=True, worker_init_fn=lambda w: None
    ),
}


@pytest.mark.parametrize("kind", ITERATED)
def test_an_iterated_run_is_restored_to_the_same_examples(kind):
    check_epochs_and_restores(ITERATED[kind])


@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_a_run_whose_loader_has_workers_is_restored_to_the_same_examples(kind):
    check_epochs_and_restores(WITH_WORKERS[kind])
    assert not workers_here()


def test_a_loaders_shuffling_depends_on_the_epoch_and_its_own_generator_alone():
    def order(seed, **options):
        torch.manual_seed(seed)  # as processes that are not seeded alike
        stream = opened(batched(WITH_INDEX["of dicts"](), batch_size=5, **options))
        seen = walk(stream)
        stream.close()
        return seen

    first = order(1, shuffle=True)
    assert order(2, shuffle=True) == first
    assert first[:N] != first[N : 2 * N]
    of_seeds = [order(1, shuffle=True, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]
    assert of_seeds[0] == of_seeds[1] != of_seeds[2]
    assert of_seeds[0] != first


def test_the_users_loader_is_not_changed():
    loader = td.DataLoader(WITH_INDEX["of dicts"](), batch_size=5, shuffle=True, num_workers=1)
    before = dict(vars(loader))
    stream = opened(ad.data.from_iterator(loader, batched=True))
    walk(stream, PLAN[:1])
    stream.close()
    assert vars(loader) == before
    assert loader.sampler.generator is None
    assert loader.multiprocessing_context is None


def workers_here():
    """Workers of loaders that this process has started, once those that were ended have had time to go."""
    for _ in range(int(10 * limit(10))):
        servers = [p for p in psutil.Process().children() if "multiprocessing.forkserver" in " ".join(p.cmdline())]
        found = [child for server in servers for child in server.children()]
        if not found:
            break
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("persists", [False, True])
def test_workers_end_when_the_stream_is_closed_in_mid_epoch(persists):
    loader = td.DataLoader(stream_of_numbers(), batch_size=2, num_workers=2, persistent_workers=persists)
    stream = opened(loader)
    walk(stream, [(3, 3)])
    stream.close()
    assert not workers_here()


def test_workers_that_the_user_starts_otherwise_are_left_so():
    for method, says in (("spawn", "as its multiprocessing_context says"), ("fork", "forked from a server process")):
        epochs = ad.data.torch_loaders.LoaderEpochs()
        loader = td.DataLoader(stream_of_numbers(), num_workers=1, multiprocessing_context=method)
        epochs._take(loader)
        assert says in epochs.notes[0]
        assert (epochs._loader.multiprocessing_context is loader.multiprocessing_context) == (method == "spawn")


def test_an_error_in_a_loader_worker_has_its_stack():
    stream = opened(td.DataLoader(stream_of_numbers(raises=9), batch_size=2, num_workers=2))
    with pytest.raises(ArithmeticError, match="no such number") as error:
        walk(stream)
    assert "in __iter__" in str(error.value)
    stream.close()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        opened(td.DataLoader(stream_of_numbers(-1), batch_size=2, num_workers=1))


def test_data_that_loader_workers_cannot_receive_is_refused():
    loader = td.DataLoader(stream_of_numbers(make=(i for i in range(3)).__next__), num_workers=1)
    with pytest.raises(ad.DataError, match="what they need cannot be sent to other processes") as error:
        opened(loader)
    assert "set num_workers=0" in str(error.value)


# --- what is refused, and warned of -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ad.data.from_iterator(td.DataLoader(stream_of_numbers(), batch_size=8)), "(batch_size=8)"),
        (lambda: ad.data.from_iterator(td.DataLoader(range(N), batch_sampler=[[0]])), "the DataLoader yields batches"),
        (lambda: opened(ad.data.from_iterator(lambda: td.DataLoader(range(N)))), "the DataLoader yields batches"),
        (lambda: opened(batched(stream_of_numbers(), batch_size=None)), "If these are examples, leave out batched"),
        (lambda: opened(td.DataLoader(stream_of_numbers(), num_workers=2, in_order=False)), "has in_order=False"),
        (lambda: batched(range(N), sampler=td.DistributedSampler(range(N), 3, 1)), "are one of 3 parts"),
    ],
)
def test_loaders_of_batches_or_parts_are_refused(make, says):
    with pytest.raises(ad.DataError) as error:
        make()
    assert says in str(error.value)


def test_each_worker_may_be_given_a_part_of_its_own():
    def of_worker(worker, workers, epoch):
        sampler = td.DistributedSampler(range(N), workers, worker, shuffle=False)
        return td.DataLoader(WITH_INDEX["of dicts"](), sampler=sampler, batch_size=2)

    stream = opened(ad.data.from_iterator(of_worker, batched=True))
    assert walk(stream, [(3, 3)]) == [0, 2, 4, 1, 3, 5]
    stream.close()


@pytest.mark.parametrize(
    ("data", "warned"),
    [
        (lambda: stream_of_numbers(divides=False), True),
        (stream_of_numbers, False),
        (lambda: stream_of_numbers(make=lambda i: {"i": 1}), False),  # examples that are equal anyway
        (lambda: stream_of_numbers(make=lambda i: {"i": i // 8}), False),  # some that are
    ],
)
def test_data_that_each_worker_reads_completely_causes_a_warning(data, warned, caplog):
    with caplog.at_level(logging.WARNING, "adaptive"):
        stream = opened(td.DataLoader(data(), batch_size=4, num_workers=2))
        for _ in range(2):
            walk(stream)
        stream.close()
    said = [record.getMessage() for record in caplog.records if "example occurs 2 times" in record.getMessage()]
    assert len(said) == warned
    assert all("torch.utils.data.get_worker_info().id" in text for text in said)


# --- jobs -------------------------------------------------------------------------------------------------------------

SCRIPT = """
    import os, random, sys, time
    assert os.environ.setdefault("STARTED_BY", str(os.getpid())) == str(os.getpid()), "the script is run again"
    import jax.numpy as jnp, numpy as np
    import adaptive as ad, collectives as comm
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Numbers(IterableDataset):
        def __iter__(self):
            worker = get_worker_info()
            numbers = list(range(worker.id, 24, worker.num_workers))
            random.shuffle(numbers)
            for i in numbers:
                yield {"i": torch.tensor(i)}

    def driver(state, batch):
        return state, comm.all_gather(batch["i"])

    loader = DataLoader(Numbers(), batch_size=5, num_workers=2, worker_init_fn=lambda worker: None)
    data = ad.data.from_iterator(loader, batched=True)
    with comm.world() as world, ad.Program(driver, jnp.zeros(()), data, global_batch=6, world=world) as program:
        seen = []
        for report in program.run(epochs=int(sys.argv[1])):
            seen += np.ravel(report.metrics).tolist()
            if len(sys.argv) > 2:
                print("step", flush=True)
        epochs = [seen[k : k + 24] for k in range(0, len(seen), 24)]
        if world.rank == 0:
            print([sorted(epoch) == list(range(24)) for epoch in epochs], len(set(map(tuple, epochs))))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_loaders_with_workers_go_through_epochs_on_several_ranks(script):
    assert run([script, "3"], n=2).stdout.strip() == "[True, True, True] 3"


def test_workers_end_with_a_training_process_that_is_killed(script):
    job = subprocess.Popen([sys.executable, script, "1000000", "and say so"], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout.readline() == "step\n"
        started = psutil.Process(job.pid).children(recursive=True)
        assert len([p for p in started if "multiprocessing.forkserver" in " ".join(p.cmdline())]) >= 1
    finally:
        job.kill()
        job.wait()
        job.stdout.close()
    _, left = psutil.wait_procs(started, timeout=limit(30))
    assert not left
