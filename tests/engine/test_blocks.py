"""Blocks: which are chosen for a device that launches kernels, and which loops remain in its program."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core

from fedjax_pcdd import models
from fedjax_pcdd.analysis.trained import look_after_training, look_between_rounds
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.availability import Availability
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine.blocks import PADDING, WAITING, Blocks, Pass, block_size, choose_blocks, choose_quantum
from fedjax_pcdd.engine.blocks import client_pass as pass_of
from fedjax_pcdd.engine.evaluation import by_client
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.schedule import layout
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local

step_lists = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@pytest.fixture
def gpu(monkeypatch):
    """Choices that depend on the backend are made as for a GPU; nothing is run."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def dirichlet(clients, alpha=0.1, samples=10_000, classes=10):
    """Number of samples of each client, for class shares drawn from a Dirichlet distribution."""
    rng = np.random.default_rng(0)
    return sum(rng.multinomial(samples // classes, rng.dirichlet(np.full(clients, alpha))) for _ in range(classes))


def simulated(sizes, lanes, *, name="fedavg", cohort=None, test_sizes=None, availability=None):
    """A simulation of a small perceptron on clients of these sizes, in batches of 20."""
    test_sizes = -(-np.asarray(sizes) // 5) if test_sizes is None else np.asarray(test_sizes)
    rng = np.random.default_rng(0)

    def split(sizes):
        total = int(sizes.sum())
        lists = tuple(np.split(np.arange(total), np.cumsum(sizes)[:-1]))
        return rng.integers(0, 256, (total, 2, 2, 1), np.uint8), rng.integers(0, 10, total), lists

    x, y, train = split(np.asarray(sizes))
    x_test, y_test, test = split(test_sizes)
    federation = Federation(Dataset("random", x, y, x_test, y_test, 10), Partition(train, test))
    method = METHODS[name]()
    plain = models.build("mlp", num_classes=10, image_shape=(2, 2, 1))
    local = Local(1, 20, "drop", "sgd", 0.01, 0.9, 0.0)
    return Simulation(
        method.build(plain), [Experiment(federation, method, local, 0, availability=availability)],
        pipeline=Pipeline(), cohort=cohort or len(sizes), execution=Execution(lanes=lanes),
    )  # fmt: skip


def loop_depths(simulation):
    """Depths of the loops of unknown length in a round's program: [1, 2] is one inside another."""
    arguments = simulation.arguments(simulation.start(), 0, simulation.plan(0))
    return list(_loop_depths(jax.make_jaxpr(simulation.round)(*arguments).jaxpr, 1))


def _loop_depths(jaxpr, depth):
    for equation in jaxpr.eqns:
        is_loop = equation.primitive.name == "while"
        if is_loop:
            yield depth
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                    yield from _loop_depths(getattr(inner, "jaxpr", inner), depth + is_loop)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedmr"])
@pytest.mark.parametrize("steps", [1, 3])
def test_equal_clients_with_a_lane_each_need_no_loop_of_unknown_length(gpu, name, steps):
    assert loop_depths(simulated([20 * steps] * 6, 6, name=name)) == []


@pytest.mark.thorough
def test_ten_times_as_many_equal_clients_add_no_loop(gpu):
    assert loop_depths(simulated([20] * 60, 60)) == loop_depths(simulated([20] * 6, 6)) == []


@pytest.mark.thorough
def test_equal_clients_in_fewer_lanes_need_one_loop_over_the_blocks(gpu):
    simulation = simulated([40] * 12, 5)
    assert loop_depths(simulation) == [1]
    assert simulation.plan(0)[0].num_segments == 3


@pytest.mark.thorough
@pytest.mark.parametrize("cohort", [100, 40])
def test_unequal_clients_with_a_lane_each_begin_and_end_together(gpu, cohort):
    simulation = simulated(dirichlet(100), 100, cohort=cohort)
    plan, jobs = simulation.plan(0)
    longest, test_pass = jobs.steps.max(), simulation.program.test_pass
    turns = longest + -(-simulation.experiments[0].federation.test_sizes.max() // test_pass.batch)
    assert turns <= 1.2 * longest + 40
    assert (plan.num_segments, plan.step_stop.max()) == (1, longest)
    # A loop over test batches; and one over steps if the longest job differs between cohorts.
    assert loop_depths(simulation) == [1] * (1 if cohort == 100 else 2)


DRAWN = Availability(np.ones((1, 4)), np.zeros(4))  # which clients are there is drawn, though all always are


@pytest.mark.parametrize(
    ("options", "steps"), [({}, 5), ({"cohort": 3}, 5), ({"cohort": 2}, 0), ({"availability": DRAWN}, 0)]
)
def test_unequal_clients_have_rounds_of_one_length_only_if_all_with_samples_always_take_part(gpu, options, steps):
    assert simulated([100, 20, 60, 0], 4, **options).program.blocks.steps == steps


def test_a_single_lane_has_the_blocks_of_a_cpu_on_every_backend(gpu):
    assert choose_blocks(np.array([3, 5]), 2, 1, everyone=True) == Blocks(together=True)


def test_a_cpu_loads_and_finishes_one_job_at_a_time():
    assert choose_blocks(np.array([3, 5]), 2, 2, everyone=True) == Blocks()


@settings(deadline=None, max_examples=60)
@given(step_lists, st.integers(2, 12))
def test_waiting_and_padding_are_bounded(steps, lanes):
    quantum = choose_quantum(steps, lanes)
    jobs, edges = layout(steps, lanes, quantum)
    assert edges[-1] <= WAITING * layout(steps, lanes, 1)[1][-1]
    ends, size = np.unique(jobs[:, 1], return_counts=True)[1], block_size(steps, lanes, quantum)
    assert size <= 8 or (-(-ends // size) * size).sum() <= PADDING * len(steps)


@pytest.mark.parametrize("lanes", [10, 32])
def test_unequal_clients_that_outnumber_lanes_need_fewer_turns_than_clients(gpu, lanes):
    plan, size = simulated(dirichlet(100), lanes).plan(0)[0], simulated(dirichlet(100), lanes).program.blocks.size
    segments = int(plan.num_segments)
    ends = np.diff(plan.finish_stop[: segments + 1])
    assert segments + (-(-ends // size)).sum() < 70


@settings(deadline=None, max_examples=60)
@given(step_lists, st.integers(0, 40))
def test_jobs_with_a_lane_each_end_together(steps, spare_lanes):
    assert choose_quantum(steps, len(steps) + spare_lanes) == max(steps)


@pytest.mark.parametrize(
    ("sizes", "size", "expected"),
    [
        ([30, 30, 0], 3, Pass(30, 1)),  # the samples of every client fit in one batch
        ([30, 10, 0], 3, Pass(30, 1)),
        ([90, 90], 10, Pass(10, 9)),  # all clients need equally many batches
        ([90, 10], 10, Pass(10)),
        ([90, 90], 1, Pass(90)),  # on a CPU a client without samples costs nothing
        ([900, 900], 1, Pass(100)),
    ],
)
def test_a_pass_bounds_the_samples_of_all_clients_of_a_block(sizes, size, expected):
    assert pass_of(np.array(sizes), 100, size) == expected


def test_a_pass_over_a_block_takes_no_more_samples_than_a_step_of_all_lanes(gpu):
    program = simulated([400] * 50, 50).program
    assert program.train_pass.batch * program.blocks.size <= 50 * 20


@pytest.mark.thorough
def test_augmentation_in_a_pass_does_not_depend_on_the_batch_size():
    def prototypes(size):
        simulation = toy.simulation(
            "fedmr", prototype_inputs="augmented", pipeline=Pipeline(flip=True), eval_batch=size, cohort=5
        )
        return toy.train(simulation, (0,))[0].servers.prototypes

    np.testing.assert_allclose(prototypes(4), prototypes(500), 1e-5, 1e-5)
    unaugmented = toy.train(toy.simulation("fedmr", pipeline=Pipeline(flip=True), cohort=5), (0,))[0].servers.prototypes
    assert np.abs(unaugmented - prototypes(500)).max() > 1e-3


def head_and_logits(data, server, variables, row, logits):
    return variables["params"]["head"]["kernel"] + row, logits(data.test.images[:3] / 255.0)


@pytest.mark.thorough
@pytest.mark.parametrize("block", [2, 3])
def test_analysing_models_in_blocks_equals_analysing_them_one_at_a_time(block):
    def analysed(**options):
        simulation = toy.simulation("fedrep", **options)
        state, (plan, jobs) = toy.train(simulation, (0,))[0], simulation.plan(1)
        sent = simulation.sent(plan, jobs, 1)
        arguments = simulation.methods, simulation.hyper_at(1), simulation.data, simulation.keys, state, sent
        after = jax.jit(look_after_training, static_argnums=(0, 1))(simulation.program, head_and_logits, *arguments)
        between = jax.jit(look_between_rounds, static_argnums=(0, 1))
        return after, between(
            simulation.program, head_and_logits, simulation.methods, simulation.data, state, np.arange(5)
        )

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), analysed(lanes=3, block=block), analysed())


@pytest.mark.thorough
@pytest.mark.parametrize("block", [2, 3])
def test_fine_tuning_in_blocks_equals_fine_tuning_without_blocks(block):
    def tuned(**options):
        simulation = toy.simulation(**options)
        variables = toy.train(simulation, (0,))[0].servers.variables
        tuner = simulation.tuner(2)
        assert tuner.program.blocks.size == simulation.program.blocks.size
        state, report = tuner.step(tuner.start(variables), 0)
        return state.servers, report

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), tuned(lanes=3, block=block), tuned())


@pytest.mark.parametrize("size", [3, 4, 5, 16])
def test_blocks_that_do_not_divide_the_clients_copy_none_of_them_and_are_traced_once(size):
    clients, traced = np.random.default_rng(0).normal(size=(10, 3000)).astype(np.float32), []

    def spread(client):
        traced.append(client)
        return jnp.sort(client)[-1] - client.min()

    program: Any = SimpleNamespace(blocks=Blocks(size))
    lowered = jax.jit(partial(by_client, program, spread)).lower(clients)
    assert len(traced) == 1
    compiled = lowered.compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 2.1 * min(size, 10) * clients[0].nbytes
    np.testing.assert_array_equal(compiled(clients), np.ptp(clients, 1))
