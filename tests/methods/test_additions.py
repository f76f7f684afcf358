"""What goes in front of a method: `X+sam`, `X+lesam`, `X+decorr`, and how these compose with one another."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct
from hooks import context, params, start

from fedjax_pcdd import methods, testing
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Evaluated, Step
from fedjax_pcdd.methods.wrappers import Addition, in_front

SUFFIXES = list(methods._ADDITIONS)
IDLE = {"sam": {"rho": 0.0}, "lesam": {"rho": 0.0}, "decorr": {"beta_dec": 0.0}}


def rest(*values):
    """Further cases of a claim that the other tests have a few of."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def trained(name, rounds=(0, 1, 2), **hyper):
    state, _ = toy.train(toy.simulation(method=methods.get(name)(**hyper)), rounds)
    return state


def assert_alike(one, other, **tolerance):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(a, b, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "same"), [("fedavg+sam", "fedsam"), ("fedavg+lesam", "fedlesam"), ("fedavg+decorr", "feddecorr")]
)
def test_in_front_of_fedavg_it_is_the_method_of_that_name(name, same):
    jax.tree.map(np.testing.assert_array_equal, trained(name).servers.variables, trained(same).servers.variables)


@pytest.mark.thorough
def test_in_front_of_fedcm_the_perturbation_of_fedsam_is_mofedsam():
    one, other = trained("fedcm+sam", rho=0.2, alpha=0.3), trained("mofedsam", rho=0.2, alpha=0.3)
    assert_alike(one.servers.variables, other.servers.variables)
    assert_alike(one.servers.direction, other.servers.direction)


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", IDLE)
@pytest.mark.parametrize("name", ["feddyn", "scaffold", *rest("fedprox", "moon", "fednova", "fedrod")])
def test_without_its_weight_it_leaves_a_method_and_its_clients_as_they_are(name, suffix):
    plain, added = trained(name), trained(f"{name}+{suffix}", **IDLE[suffix])
    assert_alike(plain.servers.variables, added.servers.variables)
    assert_alike(plain.clients, added.clients.own if suffix == "lesam" else added.clients)


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", IDLE)
@pytest.mark.parametrize("name", ["scaffold", "fedgela", *rest("feddyn", "feddc", "fedbabu")])
def test_it_changes_what_a_method_trains(name, suffix):
    plain, added = trained(name), trained(f"{name}+{suffix}")
    pairs = list(zip(*(jax.tree.leaves(s.servers.variables) for s in (plain, added)), strict=True))
    assert all(np.isfinite(b).all() for _, b in pairs)
    assert max(np.abs(a - b).max() for a, b in pairs) > 1e-5


def step_of(method, at, variables):
    """Where gradients of F = w^2 + the method's regulariser are taken in a step, and what the optimiser is given."""
    points, given = [], []

    def evaluate(variables):
        points.append(variables["params"])
        of_term = jax.grad(lambda p: jnp.asarray(method.regulariser(p, at), float))(variables["params"])
        return Evaluated(0.0, {}, jax.tree.map(lambda w, r: 2 * w + r, variables["params"], of_term))

    def step(gradients):
        given.append(gradients)
        return Step(jax.tree.map(jnp.zeros_like, gradients), ())

    method.local_update(evaluate, step, variables, None, at)
    return points, given[0]


def at_start(method, values):
    server, (client,) = start(method, np.asarray(values), (1,))
    return context(method, server, client)._replace(step=0)


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_what_feddyn_adds_to_a_gradient_is_as_at_w_under_the_perturbation_of_fedlesam():
    method = methods.get("feddyn+lesam")(rho=0.1, alpha=0.5)
    at = at_start(method, [1.0])
    at = at._replace(client=at.client._replace(received={"w": jnp.full(1, 3.0)}, seen=jnp.ones((), bool)))
    variables = params(np.array([1.4]))
    points, given = step_of(method, at, variables)
    np.testing.assert_allclose([p["w"] for p in points], [[1.5]], rtol=1e-9)
    expected = 2 * 1.5 + jax.grad(lambda p: method.regulariser(p, at))(variables["params"])["w"]
    np.testing.assert_allclose(given["w"], expected, rtol=1e-9)


@pytest.mark.usefixtures("x64")
def test_the_perturbation_of_fedsam_is_of_the_whole_objective_and_its_correction_of_the_second_gradient():
    method = methods.get("scaffold+sam")(rho=0.1)
    at = at_start(method, [1.0])
    at = at._replace(client={"w": jnp.full(1, 0.25)})
    points, given = step_of(method, at, at.start)
    np.testing.assert_allclose([p["w"] for p in points], [[1.0], [1.1]], rtol=1e-9)
    np.testing.assert_allclose(given["w"], 2 * 1.1 - 0.25, rtol=1e-9)


@pytest.mark.thorough
def test_what_is_frozen_is_not_perturbed():
    method = methods.get("fedbabu+sam")(rho=0.5)
    tree = {"backbone": jnp.asarray([3.0]), "head": jnp.asarray([4.0])}
    at = at_start(method, [1.0])
    frozen = method.trainable(tree, at)
    assert jax.tree.map(bool, frozen) == {"backbone": True, "head": False}
    points, _ = step_of(method, at, {"params": tree})
    np.testing.assert_allclose(points[1]["backbone"], [3.5], rtol=1e-6)
    np.testing.assert_array_equal(points[1]["head"], [4.0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["feddyn", "feddc", "scaffold"])
def test_the_model_received_last_lies_beside_what_clients_keep_anyway(name):
    simulated = toy.simulation(method=methods.get(f"{name}+lesam")())
    first = jax.tree.map(np.array, simulated.start())
    clients = trained(f"{name}+lesam", rounds=(0,)).clients
    plain = trained(name, rounds=(0,))
    assert_alike(plain.clients, clients.own)  # nobody has received anything before
    took_part = np.flatnonzero(clients.seen)
    assert len(took_part) == 3
    for kept, initial in zip(*map(jax.tree.leaves, (clients.received, first.servers.variables["params"])), strict=True):
        np.testing.assert_array_equal(kept[took_part], np.broadcast_to(initial, kept[took_part].shape))
    assert len(jax.tree.leaves(first.clients.own)) == len(jax.tree.leaves(plain.clients))


@pytest.mark.usefixtures("x64")
def test_with_scaffold_the_gradient_is_of_the_perturbed_point_and_the_controls_are_scaffolds():
    method = methods.get("scaffold+lesam")(rho=0.1)
    at = at_start(method, [1.0])
    control, received = {"w": jnp.full(1, 0.25)}, {"w": jnp.full(1, 3.0)}
    at = at._replace(client=at.client._replace(own=control, received=received, seen=jnp.ones((), bool)))
    points, given = step_of(method, at, params(np.array([1.4])))
    np.testing.assert_allclose([p["w"] for p in points], [[1.5]], rtol=1e-9)
    np.testing.assert_allclose(given["w"], 2 * 1.5 - 0.25, rtol=1e-9)
    kept, message = method.upload(params(np.array([0.4])), (), at)
    plain, alone = methods.get("scaffold")().upload(params(np.array([0.4])), (), at._replace(client=control))
    np.testing.assert_array_equal(kept.own["w"], plain["w"])
    np.testing.assert_array_equal(message.total["w"], alone.total["w"])
    np.testing.assert_array_equal(kept.received["w"], [1.0])


@pytest.mark.thorough
@pytest.mark.parametrize("claim", testing.CLAIMS, ids=lambda claim: claim.__name__)
@pytest.mark.parametrize("name", ["scaffold+lesam", *rest("feddyn+lesam")])
def test_states_of_two_methods_with_one_client_keep_the_contract(name, claim):
    claim(lambda **options: toy.simulation(method=methods.get(name)(), **options))


@struct.dataclass
class Counted(Addition):
    """FedAvg whose clients count their rounds."""

    class Client(NamedTuple):
        own: Any
        rounds: Any

    keeps: ClassVar[Any] = Client

    def init_client(self, setting, server, facts, key):
        return self.Client(super().init_client(setting, server, facts, key), jnp.zeros(()))

    def upload(self, variables, summary, context):
        own, message = super().upload(variables, summary, context._replace(client=context.client.own))
        return self.Client(own, context.client.rounds + 1), message


@pytest.mark.thorough
def test_several_additions_keep_something_with_a_client():
    counted = in_front(Counted, "counted")(methods.get("scaffold+lesam"), "scaffold+lesam")
    state, _ = toy.train(toy.simulation(method=counted()))
    expected = trained("scaffold+lesam")
    assert_alike(expected.servers.variables, state.servers.variables)
    assert_alike(expected.clients, state.clients.own)
    assert state.clients.rounds.sum() == 9


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fedsam+sam", "perturbs the weights already"),
        ("fedsam+lesam", "perturbs the weights already"),
        ("fedavg+sam+lesam", "perturbs the weights already"),
        ("fedsmoo+lesam", "fedsmoo has rho of its own"),
        ("ditto+sam", "ditto trains two models at a time"),
        ("fccl+sam", "or on what others sent"),
        ("fedrep+lesam", "not a method that averages models"),
        ("fedmr+decorr", "fedmr has form of its own"),
        ("solo+decorr", "not a method that averages models"),
    ],
)
def test_where_it_cannot_be_the_reason_is_one_sentence(name, reason):
    with pytest.raises(UserError, match=reason):
        methods.get(name)


@pytest.mark.thorough
def test_a_method_of_the_clients_own_models_can_look_for_flat_minima():
    for name in ("fedrep", "fedper", "solo"):
        state = trained(f"{name}+sam", rounds=(0, 1))
        assert all(np.isfinite(x).all() for x in map(np.asarray, jax.tree.leaves(state)))


@pytest.mark.thorough
def test_the_order_of_suffixes_does_not_matter():
    one = methods.get("fedprox+sam+prototypes+decorr+adam")
    assert one is methods.get("fedprox+adam+decorr+prototypes+sam")
    state = trained("fedprox+sam+prototypes+decorr+adam", rounds=(0, 1))
    assert state.servers.valid.any()
    assert all(np.isfinite(x).all() for x in map(np.asarray, jax.tree.leaves(state.servers)))


def test_the_paper_is_that_of_the_method_behind():
    assert methods.get("scaffold+sam")().traits().paper == methods.get("scaffold")().traits().paper
    assert methods.get("fedavgm+decorr")().traits().paper == methods.get("fedavgm")().traits().paper


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_addition_goes_in_front_of_fedprox(suffix):
    assert issubclass(methods.get(f"fedprox+{suffix}"), (methods.get("fedprox"), methods._ADDITIONS[suffix]))
