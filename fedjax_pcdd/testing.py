"""What every method must fulfil, for those who write one: `check_method(FedKeep)`, in a test or a notebook.

A made-up federation stands for all that goes wrong: five clients with 1 to 30 samples, classes that clients lack, a
class that no client has, a client that takes no part. Each claim is a function of `make(**options)`, which gives the
method's `Simulation` there; `CLAIMS` lists them. A claim that does not hold is an AssertionError.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import assert_trees_all_close, assert_trees_all_equal

from fedjax_pcdd import models
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation, hold_out
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine import schedule
from fedjax_pcdd.engine.devices import CompileClock
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.errors import UserError, nearest, shortened
from fedjax_pcdd.methods.method import Local, Method
from fedjax_pcdd.training.config import as_read
from fedjax_pcdd.training.fields import options_of

CLASSES = 4
SIZES = (1, 23, 9, 14, 30)
OWNED = ((2,), (0, 1), (1, 2), (0, 1, 2), (0, 2))  # class 3 is no client's
ROUNDS = (0, 1, 2)

Make = Callable[..., Simulation]


def check_method(method: type[Method] | Method, *, as_fedavg: dict[str, Any] | None = None, **hyper: Any) -> None:
    """Run the contract tests of a method; takes about a minute.

    Args:
      method: a class, or an object with its hyper-parameters.
      as_fedavg: hyper-parameters that switch its own part off, so that it must compute what FedAvg does; None where
        FedAvg is no special case of it.
      hyper: other hyper-parameters than the defaults.

    Raises:
      AssertionError: a claim that does not hold, by its name.
      UserError: no method, or a hyper-parameter that it has not; a hook that returns another shape than it should; a
        method that exchanges logits, which has no contract tests outside of this package.
    """
    tested = _with(method, hyper)
    if tested.traits().exchange != "never":
        raise UserError(f"{type(tested).__name__} exchanges logits: check_method takes methods that do not.")
    programs: dict[Any, Simulation] = {}

    def make(**options: Any) -> Simulation:
        key = tuple(sorted(options.items()))
        if key not in programs:
            programs[key] = simulation(tested, **options)
        return programs[key]

    for claim in CLAIMS:
        try:
            claim(make)
        except AssertionError as error:
            if claim in ROUNDED and _holds_in_float64(claim, tested):
                continue
            raise AssertionError(f"{type(tested).__name__}: {claim.__name__.replace('_', ' ')}: {error}") from error
    if as_fedavg is not None:
        off = simulation(_with(tested, as_fedavg))
        reduces_to_fedavg(off, simulation(Method(), held=tested.traits().validation))


def _with(method: type[Method] | Method, hyper: dict[str, Any]) -> Method:
    """The method with some hyper-parameters; UserError where it is none, or has none of such a name and value."""
    plain = method() if isinstance(method, type) and issubclass(method, Method) else method
    if not isinstance(plain, Method):
        raise UserError(f"check_method takes a method or its class, as fp.FedProx, not {shortened(method)}.")
    known = options_of(type(plain))
    for name in hyper:
        if name not in known:
            raise UserError(f"{type(plain).__name__} has no hyper-parameter '{name}': {nearest(name, known)}")
    return as_read(replace(plain, **hyper))


def _holds_in_float64(claim: Callable[[Make], None], method: Method) -> bool:
    """Whether no more than float32's rounding is against it: FedDecorr magnifies that a thousand times, say."""
    with jax.enable_x64(True):
        try:
            claim(partial(simulation, method, dtype=jnp.float64))
        except AssertionError:
            return False
    return True


def federation(seed: int = 0, noise: float = 40) -> Federation:
    """Five clients with 1 to 30 samples of 5x5 pixels; each class has its own mean image, and noise (std) about it."""
    rng = np.random.default_rng(seed)
    means = rng.integers(40, 216, (CLASSES, 5, 5, 1))

    def draw(sizes):
        labels = np.concatenate([rng.choice(owned, n) for owned, n in zip(OWNED, sizes, strict=True)])
        images = np.clip(means[labels] + rng.normal(0, noise, (len(labels), 5, 5, 1)), 0, 255).astype(np.uint8)
        bounds = np.cumsum(sizes)[:-1]
        return images, labels, tuple(np.split(np.arange(len(labels)), bounds))

    x_train, y_train, train = draw(SIZES)
    x_test, y_test, test = draw((4, 6, 5, 7, 6))
    dataset = Dataset("toy", x_train, y_train, x_test, y_test, CLASSES)
    return Federation(dataset, Partition(train, test))


def public_images(count: int = 21, seed: int = 5) -> np.ndarray:
    """Unlabelled images [count, 5, 5, 1]."""
    return np.random.default_rng(seed).integers(0, 256, (count, 5, 5, 1)).astype(np.uint8)


def simulation(
    method: Method, *, lanes: int = 2, block: int | None = None, client_state: Any = "device", held: bool = False,
    dtype: Any = jnp.float32,
) -> Simulation:  # fmt: skip
    """The method on the made-up federation: three of five clients a round, two epochs of SGD with momentum.

    Args:
      held: keep validation samples out of training for a method that looks at none, too.
    """
    parts = hold_out(federation(), 0.3, 0) if held or method.traits().validation else federation()
    plain = models.build("mlp", num_classes=CLASSES, image_shape=parts.image_shape)
    local = Local(epochs=2, batch_size=8, lr=0.05)
    public = (public_images(), Pipeline()) if method.traits().public else None
    return Simulation(
        method.build(plain), [Experiment(parts, method, local, 0)], pipeline=Pipeline(), cohort=3,
        rounds=len(ROUNDS), public=public,
        execution=Execution(lanes=lanes, block=block, client_state=client_state, dtype=dtype, param_dtype=dtype),
    )  # fmt: skip


def train(simulated: Any, rounds: tuple[int, ...] = ROUNDS) -> tuple[Any, Any]:
    """The state after some rounds, and the last report."""
    state, report = simulated.start(), None
    for r in rounds:
        state, report = simulated.step(state, r)
    return state, report


def leaves(tree: Any) -> list[np.ndarray]:
    """Its arrays, on the host."""
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
    """Hooks see one client, whoever is trained beside it."""
    assert_trees_all_close(train(make()), train(make(lanes=1)), rtol=1e-5, atol=1e-5)


def blocks_do_not_change_results(make: Make) -> None:
    """Jobs that begin and end together do so under one vmap, as on an accelerator."""
    together = make(lanes=3, block=3)
    assert together.program.blocks.together
    assert_trees_all_close(train(together, ROUNDS[:1]), train(make(lanes=1), ROUNDS[:1]), rtol=1e-5, atol=1e-5)


def client_state_on_the_host_does_not_change_results(make: Make) -> None:
    """What `init_client` and `upload` return may leave the device."""
    device = make()
    if not jax.tree.leaves(device.start().clients):
        return
    host = make(client_state="host")
    state, report = train(device)
    other, other_report = train(host)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(other.clients))
    assert_trees_all_close((state, report), (other, other_report), rtol=1e-6, atol=1e-6)
    assert_trees_all_close(device.evaluate(state, personal=True), host.evaluate(other, personal=True), rtol=0, atol=0)


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
    """All that lasts is in the state."""
    simulated = make()
    state, _ = train(simulated, ROUNDS[:2])
    copy = jax.tree.map(lambda x: jnp.asarray(np.array(x)), state)
    straight, _ = train(simulated)
    resumed, _ = simulated.step(copy, 2)
    assert_trees_all_equal(straight, resumed)


def a_ragged_federation_gives_no_nan(make: Make) -> None:
    """A client with one sample, absent classes, a client that takes no part."""
    simulated = make()
    rounds = (0, 2)
    chosen = {int(k) for r in rounds for k in simulated.clients_of(r)[0]}
    assert 0 in chosen  # the client with one sample
    assert len(chosen) < 5  # one never takes part
    state, report = train(simulated, rounds)
    assert all(np.isfinite(x).all() for x in leaves(state)), "the state is not finite"
    assert np.isfinite(np.array(report.loss)).all(), "the loss is not finite"


def a_round_without_clients_changes_nothing(make: Make) -> None:
    """No message, no step of the server."""
    simulated = make()
    jobs, batches = simulated.jobs(0)
    nothing = [b[:0] for b in batches]
    plan = schedule.pack(nothing, 2, steps=simulated.capacity)
    jobs = jobs._replace(weight=jobs.weight * 0, steps=jobs.steps * 0)
    before = leaves(simulated.start())
    state, _ = simulated.step(simulated.start(), 0, (plan, jobs))
    assert_trees_all_equal(before, leaves(state))


CLAIMS: tuple[Callable[[Make], None], ...] = (
    three_rounds_with_changing_cohorts_compile_once,
    lanes_do_not_change_results,
    blocks_do_not_change_results,
    client_state_on_the_host_does_not_change_results,
    order_of_clients_does_not_change_results,
    continuing_from_a_copied_state_is_bitwise_the_same,
    a_ragged_federation_gives_no_nan,
    a_round_without_clients_changes_nothing,
)

ROUNDED = (lanes_do_not_change_results, blocks_do_not_change_results)  # which float32 may round otherwise


def reduces_to_fedavg(simulated: Simulation, plain: Simulation) -> None:
    """With its own part switched off a method computes what FedAvg does.

    Args:
      plain: FedAvg on the same model.
    """
    (state, _), (expected, _) = train(simulated), train(plain)
    assert_trees_all_close(state.servers.variables, expected.servers.variables, rtol=1e-6, atol=1e-6)
