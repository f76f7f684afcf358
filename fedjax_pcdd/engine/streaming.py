"""Samples that stay on the host, in arrays or mapped files: a round gets its cohort's, an evaluation gets chunks.

What a round sees is a `Data` whose samples are a *shard*: those of the jobs, job by job, so that positions replace the
numbers that samples have in the data set; `Samples.numbers` keeps these for random draws by sample. Shapes depend on
the federation alone. Each of several devices has a shard, of its own jobs. Memory holds two, as the next one is sent
while one is in use; if they do not fit, a round goes through *chunks* of its segments, and memory holds the samples of
two chunks' jobs.
Letters: J jobs, R rows, M samples of a shard, D devices, L lanes.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Lists
from fedjax_pcdd.data.mapped import Rows
from fedjax_pcdd.engine.mesh import EVERYWHERE, SPLIT, distribute, mesh_of, sharding
from fedjax_pcdd.engine.program import Data, Samples, samples_of, tests_of
from fedjax_pcdd.engine.schedule import Jobs, Plan, Shares, jobs_of, runs
from fedjax_pcdd.errors import UserError

_SHARDED = Samples(SPLIT, SPLIT, EVERYWHERE, SPLIT, EVERYWHERE, SPLIT, SPLIT)
SHARDS = Data(_SHARDED, _SHARDED, EVERYWHERE, EVERYWHERE)  # how data are placed on several devices
TESTS = Data(EVERYWHERE, _SHARDED, EVERYWHERE, EVERYWHERE)  # the same for a test of personal models
_OWN = ("images", "labels", "start", "numbers", "rows")  # the fields of `Samples` of which each device has its own
TESTED = 4096  # the most rows that are tested together, if that is more than a cohort


def own_shard(data: Data, tests: bool = False) -> Data:
    """This device's own part of data that are placed as in `SHARDS`, or if `tests` as in `TESTS`."""

    def own_samples(part: Samples) -> Samples:
        images, labels, start, numbers, rows = (getattr(part, name)[0] for name in _OWN)
        return Samples(images, labels, part.order, start, part.size, numbers, rows)

    return data._replace(train=data.train if tests else own_samples(data.train), test=own_samples(data.test))


class Split:
    """Training or test samples of all rows."""

    def __init__(self, images: Any, labels: Any, lists: Lists, rows: int):
        """For shards of at most `rows` rows."""
        self.images, self.labels, self.lists = Rows(images), labels, lists
        self.largest = np.append(0, np.cumsum(np.sort(lists.sizes)[::-1]))  # the most samples that so many rows have
        self.rows, self.room = rows, self.room_of(rows)  # room of a shard, in samples
        self.sizes = jnp.asarray(lists.sizes.astype(np.int32))

    def room_of(self, rows: int) -> int:
        """M of a shard of this many rows."""
        return max(1, int(self.largest[min(rows, len(self.lists))]))

    def shard(self, rows: np.ndarray, capacity: int | None = None) -> Samples:
        """The samples of some rows, one after another, in host arrays with room for those of `capacity` rows.

        Without a capacity they have the room that every round has.
        """
        sizes = self.lists.sizes[rows]
        total = int(sizes.sum())
        numbers = np.zeros(self.room_of(capacity) if capacity else self.room, np.int32)
        numbers[:total] = self.lists.flat[runs(self.lists.starts[rows], sizes)]
        start, row_numbers = self._table(capacity or self.rows)
        start[: len(rows)], row_numbers[: len(rows)] = np.cumsum(sizes) - sizes, rows
        return self._samples(numbers, total, start, row_numbers)

    def chunk(self, numbers: np.ndarray) -> Samples:
        """Samples by their numbers, which belong to no row."""
        return self._samples(numbers.astype(np.int32), len(numbers), *self._table(1))

    def _table(self, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and numbers of `capacity` rows, all unset."""
        return np.zeros(capacity, np.int32), np.full(capacity, len(self.lists), np.int32)

    def _samples(self, numbers: np.ndarray, total: int, start: np.ndarray, rows: np.ndarray) -> Samples:
        images = np.zeros((len(numbers), *self.images.shape), self.images.dtype)
        labels = np.zeros(len(numbers), np.int32)
        self.images.read(numbers[:total], images)
        labels[:total] = self.labels[numbers[:total]]
        arrays: Any = images, labels, _order(max(1, len(numbers))), start, self.sizes, numbers, rows
        return Samples(*arrays)


@lru_cache(8)  # of the shards and chunks of a simulation; more would stay on the device
def _order(size: int) -> Any:
    return jnp.arange(size, dtype=jnp.int32)


class Chunk(NamedTuple):
    """Some segments of a round."""

    first: np.int32
    stop: np.int32
    data: Data
    plan: Plan  # whose indices are positions in these data


class Streamed:
    """The samples of all experiments over one data set."""

    def __init__(
        self, federations: Sequence[Federation], rows: int, lanes: int, memory: int, public: Any, devices: int
    ):
        """Prepare, without reading any sample.

        Args:
          rows: the most jobs of a round that one device has.
          lanes: L, jobs that are trained at once.
          memory: bytes of a device's memory that samples may take.
          public: images [N, ...] that are on the device all the time, or None.

        Raises:
          UserError: the memory does not hold the samples of the jobs that are trained at once.
        """
        dataset, partitions = federations[0].dataset, [f.partition for f in federations]
        counts = np.concatenate([f.class_counts for f in federations])
        train, (images, labels, test) = Lists.join([p.train for p in partitions]), tests_of(federations)
        self._federations = federations
        self.memory, self.devices, self.lanes, self.whole = memory, devices, lanes, len(labels)
        self.train = Split(dataset.x_train, dataset.y_train, train, rows)
        self.test = Split(images, labels, test, rows)
        rooms = self._rooms_of_chunks(rows)
        self.chunked = rooms is not None  # whether a round goes through chunks
        if rooms:
            self.train.room, self.test.room = rooms
        public = () if public is None else jnp.asarray(public)
        counts = jnp.asarray(counts, jnp.result_type(float))
        train, test = (self._placed(split.chunk(np.zeros(0))) for split in (self.train, self.test))  # sizes alone
        self.known = distribute(Data(train, test, counts, public), devices)
        self._ahead: tuple[np.ndarray, Data] | None = None

    def _rooms_of_chunks(self, rows: int) -> list[int] | None:
        """M of a chunk of a round, for both splits, that fits half of the memory; None if a whole round does.

        The other half is for the samples that are sent meanwhile.
        """
        splits, memory = (self.train, self.test), self.memory // 2
        needed = [split.room * split.images.width for split in splits]
        if sum(needed) <= memory:
            return None
        least = [split.room_of(self.lanes) * split.images.width for split in splits]
        if self.devices > 1 or sum(least) > memory:
            at_once = needed if self.devices > 1 else least
            group = f"{rows} clients on each of {self.devices} devices" if self.devices > 1 else f"{self.lanes} clients"
            raise UserError(
                f"the samples of {group} have up to {sum(at_once) / 1e6:.3g} MB, more than half of the "
                f"{self.memory / 1e6:.3g} MB of `data_memory`, whose other half is for those that are sent meanwhile: "
                "allow more, or choose a smaller `cohort` or fewer `lanes`."
            )
        share = (memory - sum(least)) / (sum(needed) - sum(least))
        return [
            max(1, int(low + share * (high - low)) // split.images.width, split.room_of(self.lanes))
            for split, low, high in zip(splits, least, needed, strict=True)
        ]

    def _placed(self, samples: Samples) -> Samples:
        """The samples on all devices."""
        return distribute(jax.tree.map(jnp.asarray, samples), self.devices)

    def of_jobs(self, plan: Plan | Shares, jobs: Jobs) -> Data:
        """The data that the round of a plan sees."""
        rows = _members(plan, jobs)
        if self._ahead is None or not np.array_equal(self._ahead[0], rows):
            self._ahead = rows, self._gathered([device_rows[device_rows >= 0] for device_rows in rows])
        return self._ahead[1]

    def _gathered(self, rows: Sequence[np.ndarray], capacity: int | None = None) -> Data:
        """The data of each device's rows [D], with a capacity only tests; a process reads those of its own devices."""
        if self.devices == 1:
            return self.of_rows(rows[0])
        target = sharding(self.devices, SPLIT)
        assert target is not None
        mesh_devices = mesh_of(self.devices).devices.tolist()
        own_devices = [(d, device) for d, device in enumerate(mesh_devices) if device in target.addressable_devices]

        def split(part: Split) -> Samples:
            shards = [part.shard(rows[d], capacity) for d, _ in own_devices]

            def joined(name: str) -> Any:
                pieces = [
                    jax.device_put(getattr(shard, name)[None], device)
                    for shard, (_, device) in zip(shards, own_devices, strict=True)
                ]
                shape = (self.devices, *pieces[0].shape[1:])
                return jax.make_array_from_single_device_arrays(shape, target, pieces)

            images, labels, start, numbers, row_numbers = map(joined, _OWN)
            order, sizes = distribute((shards[0].order, part.sizes), self.devices)
            return Samples(images, labels, order, start, sizes, numbers, row_numbers)

        test = split(self.test)
        return self.known._replace(test=test) if capacity else self.known._replace(train=split(self.train), test=test)

    def of_rows(self, rows: np.ndarray) -> Data:
        """The data that lanes see for the jobs of a few rows, on one device."""
        return self.known._replace(train=self._placed(self.train.shard(rows)), test=self._placed(self.test.shard(rows)))

    def prefetch(self, plan: Plan | Shares, jobs: Jobs) -> None:
        """Gather and send the samples of the next round, while the device computes this one."""
        if not self.chunked:
            self.of_jobs(plan, jobs)

    def chunks(self, plan: Plan, jobs: Jobs) -> Iterator[Chunk]:
        """A round in as few chunks as the memory allows."""
        sizes, stop, count = self.sizes_of(jobs), 0, int(plan.num_segments)
        while not stop or stop < count:
            first, stop = stop, min(stop + 1, count)
            active = _active(plan, first, stop)
            while stop < count and self._fits(jobs.row[longer := _active(plan, first, stop + 1)]):
                active, stop = longer, stop + 1
            begin, end = plan.step_stop[first], plan.step_stop[stop]
            indices = np.full_like(plan.indices, -1)
            indices[begin:end] = renumbered(plan.indices[begin:end], sizes, active)
            yield Chunk(np.int32(first), np.int32(stop), self.of_rows(jobs.row[active]), plan._replace(indices=indices))
            if not count:
                break

    def _fits(self, rows: np.ndarray) -> bool:
        return all(split.lists.sizes[rows].sum() <= split.room for split in (self.train, self.test))

    def sizes_of(self, jobs: Jobs) -> np.ndarray:
        """Training samples [J] of the jobs with steps, 0 for others, in their order in a shard of all jobs."""
        return np.where(jobs.steps > 0, self.train.lists.sizes[jobs.row], 0)

    def tested_rows(self, cohort: int) -> int:
        """How many rows are tested together if their clients keep nothing."""
        fit = int(np.searchsorted(self.test.largest * self.test.images.width, self.memory // 4, "right")) - 1
        return max(1, min(max(cohort, TESTED), fit))

    def of_tests(self, rows: np.ndarray) -> Data:
        """The rows' own test samples; each device has those of its part of the rows."""
        capacity = len(rows) // self.devices
        if self.devices > 1:
            return self._gathered([np.unique(part) for part in np.split(rows, self.devices)], capacity)
        return self.known._replace(test=self._placed(self.test.shard(np.unique(rows), capacity)))

    def whole_test(self, batch: int) -> Iterator[Data]:
        """All test samples in chunks, whose batches are those that the whole set would have.

        Of m batches the i-th has every m-th sample, so a chunk of c batches has runs of c consecutive samples, m apart.
        """
        batches = -(-self.whole // batch)
        size = max(1, min(batches, self.memory // (4 * batch * self.test.images.width)))
        for first in range(0, batches, size):
            chunk = np.arange(first, min(first + size, batches))
            numbers = (chunk[None, :] + batches * np.arange(batch)[:, None]).ravel()
            yield self.known._replace(test=self._placed(self.test.chunk(numbers[numbers < self.whole])))

    @cached_property
    def tests(self) -> Samples:
        """All test samples on the device, for what needs them all at once; they stay there.

        Raises:
          UserError: the memory does not hold them.
        """
        size = self.whole * self.test.images.width
        if size > self.memory:
            raise UserError(
                f"`track` looks at all test samples, {size / 1e6:.3g} MB, more than the {self.memory / 1e6:.3g} MB "
                "of `data_memory`: allow more, or leave it out."
            )
        return samples_of(*tests_of(self._federations))


def _members(plan: Plan | Shares, jobs: Jobs) -> np.ndarray:
    """Rows [D, M] of each device's jobs with steps, -1 for none."""
    members = plan.members if isinstance(plan, Shares) else np.arange(len(jobs.row))[None]
    device_jobs = jobs_of(jobs, members)
    return np.where(device_jobs.steps > 0, device_jobs.row, -1)


def _active(plan: Plan, first: int, stop: int) -> np.ndarray:
    """Jobs that are in lanes during some segments, in increasing order."""
    loaded, finished = plan.load_job[: plan.load_stop[stop]], plan.finish_job[: plan.finish_stop[first]]
    return np.setdiff1d(loaded, finished)


def renumbered(indices: np.ndarray, sizes: np.ndarray, jobs: np.ndarray) -> np.ndarray:
    """Positions among the samples of all jobs, converted to positions among those of some; -1 stays.

    Args:
      sizes: [J] samples of each job.
      jobs: those whose samples are present, in their order.

    >>> renumbered(np.array([-1, 5, 3]), np.array([3, 1, 2]), np.array([1, 2])).tolist()
    [-1, 2, 0]
    """
    job_sizes, table = sizes[jobs], np.zeros(sizes.sum() + 1, np.int32)
    starts = np.cumsum(sizes) - sizes
    table[runs(starts[jobs], job_sizes)] = np.arange(job_sizes.sum())
    return np.where(indices >= 0, table[indices], -1).astype(np.int32)
