"""Contract tests that every method must pass, for authors of methods: `check_method(FedKeep)`, in a test or a notebook.

A made-up federation covers the usual difficulties: five clients with 1 to 30 samples, classes that clients lack, a
class that no client has, a client that does not participate. Each claim is a function of `make(**options)`, which
returns the method's `Simulation` on that federation; `CLAIMS` lists them. A claim that does not hold raises an
AssertionError.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import assert_trees_all_close, assert_trees_all_equal
from flax import struct

from fedjax_pcdd import models
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation, hold_out
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine import schedule
from fedjax_pcdd.engine.devices import CompileClock
from fedjax_pcdd.engine.executables import compiled_once
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError, nearest, shortened
from fedjax_pcdd.methods.declared import misspelt
from fedjax_pcdd.methods.method import Local, Method
from fedjax_pcdd.training.config import as_read
from fedjax_pcdd.training.fields import options_of

CLASSES = 4
SIZES = (1, 23, 9, 14, 30)
OWNED = ((2,), (0, 1), (1, 2), (0, 1, 2), (0, 2))  # no client has class 3
ROUNDS = (0, 1, 2)

Make = Callable[..., Simulation]


def check_method(method: type[Method] | Method, *, as_fedavg: dict[str, Any] | None = None, **hyper: Any) -> None:
    """Run the contract tests of a method; takes about a minute.

    Args:
      method: a class, or an object with its hyper-parameters.
      as_fedavg: hyper-parameters that reduce the method to FedAvg with the method's own `weight`, so that it must give
        FedAvg's results; None if FedAvg is not a special case of it.
      hyper: hyper-parameters that differ from the defaults.

    Raises:
      AssertionError: a claim does not hold, or a function is named almost like a hook; the message names it.
      UserError: `method` is not a method, a hyper-parameter is unknown, a hook returns a wrong shape, or the method
        exchanges logits, for which there are no contract tests outside this package.
    """
    tested = _with(method, hyper)
    if tested.traits().exchange != "never":
        raise UserError(f"{type(tested).__name__} exchanges logits: check_method takes methods that do not.")
    if sentences := misspelt(tested, Method):
        raise AssertionError(sentences[0])
    programs: dict[Any, Simulation] = {}

    def make(**options: Any) -> Simulation:
        key = tuple(sorted(options.items()))
        if key not in programs:
            programs[key] = simulation(tested, **options)
        return programs[key]

    for claim in CLAIMS:
        with _named(tested, claim):
            try:
                claim(make)
            except AssertionError:
                if claim not in ROUNDED or not _holds_in_float64(claim, tested):
                    raise
    if as_fedavg is not None:
        reduced_method = _with(tested, as_fedavg)
        reduced = simulation(reduced_method)
        with _named(tested, reduces_to_fedavg):
            reduces_to_fedavg(reduced, simulation(_Weighing(reduced_method), held=tested.traits().validation))


@struct.dataclass
class _Weighing(Method):
    """FedAvg with the weights of another method."""

    other: Method

    def weight(self, facts):
        return self.other.weight(facts)


@contextmanager
def _named(method: Method, claim: Callable[..., None]) -> Iterator[None]:
    """Errors of a claim begin with the method and the claim in words."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{type(method).__name__}: {claim.__name__.replace('_', ' ')}: {error}") from error


def _with(method: type[Method] | Method, hyper: dict[str, Any]) -> Method:
    """The method with these hyper-parameters; UserError if it is not a method, or if a name or value is not valid."""
    instance = method() if isinstance(method, type) and issubclass(method, Method) else method
    if not isinstance(instance, Method):
        raise UserError(f"check_method takes a method or its class, as fp.FedProx, not {shortened(method)}.")
    available = options_of(type(instance))
    for name in hyper:
        if name not in available:
            raise UserError(f"{type(instance).__name__} has no hyper-parameter '{name}': {nearest(name, available)}")
    return as_read(replace(instance, **hyper))


def _holds_in_float64(claim: Callable[[Make], None], method: Method) -> bool:
    """Whether a claim only fails by float32's rounding, which FedDecorr, for example, magnifies a thousand times."""
    with jax.enable_x64(True):
        try:
            claim(partial(simulation, method, dtype=jnp.float64))
        except AssertionError:
            return False
    return True


def federation(seed: int = 0, noise: float = 40, unowned: int | None = None) -> Federation:
    """Five clients with 1 to 30 samples of 5x5 pixels; each class has its own mean image, plus noise (std `noise`).

    With `unowned`, the first training sample is nobody's: an image of that grey value.
    """
    rng = np.random.default_rng(seed)
    means = rng.integers(40, 216, (CLASSES, 5, 5, 1))

    def draw(sizes):
        labels = np.concatenate([rng.choice(owned, n) for owned, n in zip(OWNED, sizes, strict=True)])
        images = np.clip(means[labels] + rng.normal(0, noise, (len(labels), 5, 5, 1)), 0, 255).astype(np.uint8)
        bounds = np.cumsum(sizes)[:-1]
        return images, labels, tuple(np.split(np.arange(len(labels)), bounds))

    x_train, y_train, train = draw(SIZES)
    x_test, y_test, test = draw((4, 6, 5, 7, 6))
    if unowned is not None:
        x_train = np.concatenate([np.full_like(x_train[:1], unowned), x_train])
        y_train, train = np.concatenate([[unowned % CLASSES], y_train]), tuple(indices + 1 for indices in train)
    dataset = Dataset("toy", x_train, y_train, x_test, y_test, CLASSES)
    return Federation(dataset, Partition(train, test))


def public_images(count: int = 21, seed: int = 5) -> np.ndarray:
    """Unlabelled images [count, 5, 5, 1]."""
    return np.random.default_rng(seed).integers(0, 256, (count, 5, 5, 1)).astype(np.uint8)


def simulation(
    method: Method, *, lanes: int = 2, block: int | None = None, client_state: Any = "device", held: bool = False,
    dtype: Any = jnp.float32, last_batch: Any = "drop", unowned: int | None = None, eval_batch: int | None = None,
) -> Simulation:  # fmt: skip
    """The method on the made-up federation: three of five clients a round, two epochs of SGD with momentum.

    Args:
      held: hold out validation samples even if the method does not use any.
      unowned: as in `federation`.
      eval_batch: samples at a time in passes without training.
    """
    toy_federation = federation(unowned=unowned)
    if held or method.traits().validation:
        toy_federation = hold_out(toy_federation, 0.3, 0)
    model = models.build("mlp", num_classes=CLASSES, image_shape=toy_federation.image_shape)
    local = Local(epochs=2, batch_size=8, last_batch=last_batch, lr=0.05)
    public = (public_images(), Pipeline()) if method.traits().public else None
    return Simulation(
        method.build(model), [Experiment(toy_federation, method, local, 0)], pipeline=Pipeline(), cohort=3,
        rounds=len(ROUNDS), public=public,
        execution=Execution(
            lanes=lanes, block=block, client_state=client_state, eval_batch=eval_batch, dtype=dtype, param_dtype=dtype
        ),
    )  # fmt: skip


def train(simulated: Any, rounds: tuple[int, ...] = ROUNDS) -> tuple[Any, Any]:
    """Run these rounds; the final state and the last report."""
    state, report = simulated.start(), None
    for r in rounds:
        state, report = simulated.step(state, r)
    return state, report


def leaves(tree: Any) -> list[np.ndarray]:
    """The arrays of a tree, on the host."""
    return [np.array(x) for x in jax.tree.leaves(tree)]


def three_rounds_with_changing_cohorts_compile_once(make: Make) -> None:
    """Shapes depend on the federation alone."""
    simulated = make()
    state, _ = simulated.step(simulated.start(), 0)
    jax.block_until_ready(state)
    clock = CompileClock()
    cohorts = {tuple(simulated.clients_of(r)[0]) for r in ROUNDS}
    for r in ROUNDS[1:]:
        state, _ = jax.block_until_ready(simulated.step(state, r))
    assert len(cohorts) > 1
    assert (simulated.compilations, clock.count) == (1, 0), "a round was compiled again"


def lanes_do_not_change_results(make: Make) -> None:
    """Hooks see one client, whichever clients are trained beside it."""
    assert_trees_all_close(train(make()), train(make(lanes=1)), rtol=1e-5, atol=1e-5)


def blocks_do_not_change_results(make: Make) -> None:
    """Jobs that begin and end together run under one vmap, as on an accelerator."""
    together = make(lanes=3, block=3)
    assert together.program.blocks.together
    assert_trees_all_close(train(together, ROUNDS[:1]), train(make(lanes=1), ROUNDS[:1]), rtol=1e-5, atol=1e-5)


def client_state_on_the_host_does_not_change_results(make: Make) -> None:
    """Client state from `init_client` and `upload` may leave the device."""
    device = make()
    if not jax.tree.leaves(device.start().clients):
        return
    host = make(client_state="host")
    state, report = train(device)
    moved, moved_report = train(host)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(moved.clients))
    assert_trees_all_close((state, report), (moved, moved_report), rtol=1e-6, atol=1e-6)
    assert_trees_all_close(device.evaluate(state, personal=True), host.evaluate(moved, personal=True), rtol=0, atol=0)


def order_of_clients_does_not_change_results(make: Make) -> None:
    """Clients are a set."""
    simulated = make()
    jobs, batches = simulated.jobs(0)
    order = np.array([2, 0, 1])
    shuffled = jax.tree.map(lambda x: x[order], jobs)
    plan = schedule.pack([batches[i] for i in order], 2, steps=simulated.capacity)
    expected, _ = simulated.step(simulated.start(), 0)
    state, _ = simulated.step(simulated.start(), 0, (plan, shuffled))
    assert_trees_all_close(state, expected, rtol=1e-6, atol=1e-6)


def continuing_from_a_copied_state_is_bitwise_the_same(make: Make) -> None:
    """Everything that lasts between rounds is in the state."""
    simulated = make()
    state, _ = train(simulated, ROUNDS[:2])
    copy = jax.tree.map(lambda x: jnp.asarray(np.array(x)), state)
    straight, _ = train(simulated)
    resumed, _ = simulated.step(copy, 2)
    assert_trees_all_equal(straight, resumed)


def a_ragged_federation_gives_no_nan(make: Make) -> None:
    """A client with one sample, absent classes, and a client that never participates cause no NaN."""
    simulated = make()
    rounds = (0, 2)
    participants = {int(k) for r in rounds for k in simulated.clients_of(r)[0]}
    assert 0 in participants  # the client with one sample
    assert len(participants) < 5  # one never participates
    state, report = train(simulated, rounds)
    assert all(np.isfinite(x).all() for x in leaves(state)), "the state is not finite"
    assert np.isfinite(np.array(report.loss)).all(), "the loss is not finite"


def a_round_without_clients_changes_nothing(make: Make) -> None:
    """Without messages the server takes no step."""
    simulated = make()
    jobs, batches = simulated.jobs(0)
    empty_batches = [b[:0] for b in batches]
    plan = schedule.pack(empty_batches, 2, steps=simulated.capacity)
    jobs = jobs._replace(weight=jobs.weight * 0, steps=jobs.steps * 0)
    before = leaves(simulated.start())
    state, _ = simulated.step(simulated.start(), 0, (plan, jobs))
    assert_trees_all_equal(before, leaves(state))


def clients_outside_the_cohort_keep_their_state(make: Make) -> None:
    """A round reads and writes the state of its cohort only."""
    simulated = make()
    before, outside = simulated.start().clients, np.setdiff1d(np.arange(len(SIZES)), simulated.clients_of(0)[0])
    before = jax.tree.map(lambda x: np.array(x)[outside], before)
    state, _ = simulated.step(simulated.start(), 0)
    assert len(outside) > 0
    assert_trees_all_equal(before, jax.tree.map(lambda x: np.array(x)[outside], state.clients))


def padding_does_not_change_results(make: Make) -> None:
    """What fills up a batch counts nowhere: hooks multiply by `batch.mask`, and divide by its sum."""
    with compiled_once():
        black, white = (train(make(unowned=grey, last_batch="keep")) for grey in (0, 255))
    assert_trees_all_close(black, white, rtol=1e-6, atol=1e-6)


def batches_of_summarise_do_not_change_results(make: Make) -> None:
    """What `summarise` returns is added over batches of any size, in which padding counts nowhere."""
    assert_trees_all_close(train(make(eval_batch=8)), train(make()), rtol=1e-5, atol=1e-5)


CLAIMS: tuple[Callable[[Make], None], ...] = (
    three_rounds_with_changing_cohorts_compile_once,
    lanes_do_not_change_results,
    blocks_do_not_change_results,
    client_state_on_the_host_does_not_change_results,
    order_of_clients_does_not_change_results,
    continuing_from_a_copied_state_is_bitwise_the_same,
    a_ragged_federation_gives_no_nan,
    a_round_without_clients_changes_nothing,
    clients_outside_the_cohort_keep_their_state,
    padding_does_not_change_results,
    batches_of_summarise_do_not_change_results,
)

# Results that float32 may round differently.
ROUNDED = (lanes_do_not_change_results, blocks_do_not_change_results, batches_of_summarise_do_not_change_results)


def reduces_to_fedavg(simulated: Simulation, plain: Simulation) -> None:
    """Reduced to FedAvg, a method gives the results of FedAvg on the same model, `plain`."""
    (state, _), (expected, _) = train(simulated), train(plain)
    assert_trees_all_close(state.servers.variables, expected.servers.variables, rtol=1e-6, atol=1e-6)
