"""Additions in front of a method: `X+sam`, `X+lesam`, `X+decorr`, and how they compose with one another."""

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct
from hooks import context, hyper, params, setting, start

from fedjax_pcdd import methods, testing
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Evaluated, Step
from fedjax_pcdd.methods.wrappers import Addition, extended, in_front

SUFFIXES = list(methods._ADDITIONS)
SWITCHED_OFF = {"sam": {"rho": 0.0}, "lesam": {"rho": 0.0}, "decorr": {"beta_dec": 0.0}}


def slow_cases(*values):
    """Further cases of a parametrised claim, which run only with the slow tests."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def trained(name, rounds=(0, 1, 2), **hyper):
    state, _ = toy.train(toy.simulation(method=methods.get(name)(**hyper)), rounds)
    return state


def assert_alike(tree, other, **tolerance):
    for leaf, other_leaf in zip(*map(jax.tree.leaves, (tree, other)), strict=True):
        np.testing.assert_allclose(leaf, other_leaf, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "standalone"), [("fedavg+sam", "fedsam"), ("fedavg+lesam", "fedlesam"), ("fedavg+decorr", "feddecorr")]
)
def test_fedavg_with_an_addition_is_the_method_of_that_name(name, standalone):
    jax.tree.map(np.testing.assert_array_equal, trained(name).servers.variables, trained(standalone).servers.variables)


@pytest.mark.thorough
def test_fedcm_with_sam_is_mofedsam():
    composed, mofedsam = trained("fedcm+sam", rho=0.2, alpha=0.3), trained("mofedsam", rho=0.2, alpha=0.3)
    assert_alike(composed.servers.variables, mofedsam.servers.variables)
    assert_alike(composed.servers.direction, mofedsam.servers.direction)


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", SWITCHED_OFF)
@pytest.mark.parametrize("name", ["feddyn", "scaffold", *slow_cases("fedprox", "moon", "fednova", "fedrod")])
def test_a_switched_off_addition_changes_neither_the_model_nor_client_state(name, suffix):
    plain, added = trained(name), trained(f"{name}+{suffix}", **SWITCHED_OFF[suffix])
    assert_alike(plain.servers.variables, added.servers.variables)
    assert_alike(plain.clients, added.clients.own if suffix == "lesam" else added.clients)


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", SWITCHED_OFF)
@pytest.mark.parametrize("name", ["scaffold", "fedgela", *slow_cases("feddyn", "feddc", "fedbabu")])
def test_an_addition_changes_the_trained_model(name, suffix):
    plain, added = trained(name), trained(f"{name}+{suffix}")
    leaf_pairs = list(zip(*(jax.tree.leaves(s.servers.variables) for s in (plain, added)), strict=True))
    assert all(np.isfinite(b).all() for _, b in leaf_pairs)
    assert max(np.abs(a - b).max() for a, b in leaf_pairs) > 1e-5


def step_of(method, step_context, variables):
    """Where one step takes gradients of F = w^2 + the regulariser, and the gradients passed to the optimiser."""
    points, passed_gradients = [], []

    def evaluate(variables):
        points.append(variables["params"])
        regulariser_gradient = jax.grad(lambda p: jnp.asarray(method.regulariser(p, step_context), float))(
            variables["params"]
        )
        return Evaluated(0.0, {}, jax.tree.map(lambda w, r: 2 * w + r, variables["params"], regulariser_gradient))

    def step(gradients):
        passed_gradients.append(gradients)
        return Step(jax.tree.map(jnp.zeros_like, gradients), ())

    method.local_update(evaluate, step, variables, None, step_context)
    return points, passed_gradients[0]


def first_step_context(method, values):
    server, (client,) = start(method, np.asarray(values), (1,))
    return context(method, server, client)._replace(step=0)


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_with_lesam_feddyns_regulariser_has_its_gradient_at_the_unperturbed_w():
    method = methods.get("feddyn+lesam")(rho=0.1, alpha=0.5)
    step_context = first_step_context(method, [1.0])
    step_context = step_context._replace(
        client=step_context.client._replace(received={"w": jnp.full(1, 3.0)}, seen=jnp.ones((), bool))
    )
    variables = params(np.array([1.4]))
    points, gradients = step_of(method, step_context, variables)
    np.testing.assert_allclose([p["w"] for p in points], [[1.5]], rtol=1e-9)
    expected = 2 * 1.5 + jax.grad(lambda p: method.regulariser(p, step_context))(variables["params"])["w"]
    np.testing.assert_allclose(gradients["w"], expected, rtol=1e-9)


@pytest.mark.usefixtures("x64")
def test_with_sam_scaffold_corrects_the_gradient_at_the_perturbed_point():
    method = methods.get("scaffold+sam")(rho=0.1)
    step_context = first_step_context(method, [1.0])
    step_context = step_context._replace(client={"w": jnp.full(1, 0.25)})
    points, gradients = step_of(method, step_context, step_context.start)
    np.testing.assert_allclose([p["w"] for p in points], [[1.0], [1.1]], rtol=1e-9)
    np.testing.assert_allclose(gradients["w"], 2 * 1.1 - 0.25, rtol=1e-9)


@pytest.mark.thorough
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedproc+sam", "fedgen+sam"])
def test_statistics_of_both_passes_are_running_statistics_alone(name):
    """Not what a method collects about its samples; the toy model has no batch norm."""
    own = {"fedproc+sam": {"prototype_features": "last_epoch"}, "fedgen+sam": {"label_counts": "seen"}}[name]
    first, both = (trained(name, (0, 1), rho=0.5, statistics=kind, **own) for kind in ("first", "both"))
    assert_alike(first, both, rtol=0, atol=0)


def test_frozen_parameters_are_not_perturbed():
    method = methods.get("fedbabu+sam")(rho=0.5)
    parameters = {"backbone": jnp.asarray([3.0]), "head": jnp.asarray([4.0])}
    step_context = first_step_context(method, [1.0])
    trainable = method.trainable(parameters, step_context)
    assert jax.tree.map(bool, trainable) == {"backbone": True, "head": False}
    points, _ = step_of(method, step_context, {"params": parameters})
    np.testing.assert_allclose(points[1]["backbone"], [3.5], rtol=1e-6)
    np.testing.assert_array_equal(points[1]["head"], [4.0])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["feddyn", "feddc", "scaffold"])
def test_lesam_keeps_the_last_received_model_beside_the_methods_client_state(name):
    simulated = toy.simulation(method=methods.get(f"{name}+lesam")())
    initial_state = jax.tree.map(np.array, simulated.start())
    clients = trained(f"{name}+lesam", rounds=(0,)).clients
    plain_state = trained(name, rounds=(0,))
    assert_alike(plain_state.clients, clients.own)  # no client has received a model before
    participants = np.flatnonzero(clients.seen)
    assert len(participants) == 3
    for received, initial in zip(
        *map(jax.tree.leaves, (clients.received, initial_state.servers.variables["params"])), strict=True
    ):
        np.testing.assert_array_equal(received[participants], np.broadcast_to(initial, received[participants].shape))
    assert len(jax.tree.leaves(initial_state.clients.own)) == len(jax.tree.leaves(plain_state.clients))


@pytest.mark.usefixtures("x64")
def test_lesam_in_front_of_scaffold_perturbs_the_gradient_not_the_control():
    method = methods.get("scaffold+lesam")(rho=0.1)
    step_context = first_step_context(method, [1.0])
    control, received = {"w": jnp.full(1, 0.25)}, {"w": jnp.full(1, 3.0)}
    step_context = step_context._replace(
        client=step_context.client._replace(own=control, received=received, seen=jnp.ones((), bool))
    )
    points, gradients = step_of(method, step_context, params(np.array([1.4])))
    np.testing.assert_allclose([p["w"] for p in points], [[1.5]], rtol=1e-9)
    np.testing.assert_allclose(gradients["w"], 2 * 1.5 - 0.25, rtol=1e-9)
    client_state, message = method.upload(params(np.array([0.4])), (), step_context)
    scaffold_control, scaffold_message = methods.get("scaffold")().upload(
        params(np.array([0.4])), (), step_context._replace(client=control)
    )
    np.testing.assert_array_equal(client_state.own["w"], scaffold_control["w"])
    np.testing.assert_array_equal(message.total["w"], scaffold_message.total["w"])
    np.testing.assert_array_equal(client_state.received["w"], [1.0])


@pytest.mark.thorough
@pytest.mark.parametrize("claim", testing.CLAIMS, ids=lambda claim: claim.__name__)
@pytest.mark.parametrize("name", ["scaffold+lesam", *slow_cases("feddyn+lesam")])
def test_methods_with_lesam_beside_their_own_client_state_keep_the_contract(name, claim):
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
        inner_state, message = super().upload(variables, summary, context._replace(client=context.client.own))
        return self.Client(inner_state, context.client.rounds + 1), message


@pytest.mark.thorough
def test_two_additions_can_both_keep_client_state():
    counted = in_front(Counted, "counted", methods.get("scaffold+lesam"), "scaffold+lesam")
    state, _ = toy.train(toy.simulation(method=counted()))
    expected_state = trained("scaffold+lesam")
    assert_alike(expected_state.servers.variables, state.servers.variables)
    assert_alike(expected_state.clients, state.clients.own)
    assert state.clients.rounds.sum() == 9


class Drifted(NamedTuple):
    variables: Any
    drift: Any


class Anew(methods.METHODS["fedavg"]):
    """Keeps the last step on the server, in a state that it makes anew in each round."""

    def init_server(self, setting, variables, class_counts, key):
        return Drifted(variables, jax.tree.map(jnp.zeros_like, variables))

    def aggregate(self, server, message, weights, context):
        return Drifted(message.mean, jax.tree.map(jnp.subtract, message.mean, server.variables))


class Replacing(Anew):
    """The same, by changing what it was given."""

    def aggregate(self, server, message, weights, context):
        return server._replace(**super().aggregate(server, message, weights, context)._asdict())


def with_suffixes(cls, *suffixes):
    for suffix in suffixes:
        cls = in_front(methods.known_suffixes()[suffix], suffix, cls, cls.__name__)
    return cls


@pytest.mark.thorough
def test_a_servers_state_made_anew_keeps_what_suffixes_keep_in_it():
    states = [toy.train(toy.simulation(method=with_suffixes(struct.dataclass(cls), "prototypes", "adam")()))[0].servers
              for cls in (Anew, Replacing)]  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert states[0]._fields == ("variables", "drift", "prototypes", "valid", "moments")


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"variables": {"params": {}}}, "must be a NamedTuple if a suffix is to add to it, not a dict"),
        (Drifted({"params": {}}, ()), "has a field drift, as what the suffix keeps: rename it"),
    ],
)
def test_a_servers_state_that_cannot_be_added_to_is_refused(state, sentence):
    with pytest.raises(UserError, match=sentence):
        extended(state, drift=())


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
        ("feddecorr+decorr", "feddecorr has beta_dec of its own"),
        ("solo+decorr", "not a method that averages models"),
    ],
)
def test_an_unsuitable_addition_is_refused_with_its_reason(name, reason):
    with pytest.raises(UserError, match=reason):
        methods.get(name)


@pytest.mark.parametrize(
    ("suffix", "needs"),
    [
        ("lesam", "FedLESAM needs a method that averages models"),
        ("decorr", "FedDecorr needs a method that averages models"),
        ("sam", "a perturbation needs a method that trains on local data alone"),
    ],
)
def test_an_addition_is_refused_by_a_form_that_it_does_not_fit(suffix, needs):
    cls = methods.get(f"feddf+{suffix}")
    assert cls().configure(setting(3), hyper())[0].form == "server"
    with pytest.raises(UserError, match=f"{needs} in this form: drop the suffix"):
        cls(form="participants").configure(setting(3), hyper())


@pytest.mark.thorough
def test_methods_with_personal_models_can_be_combined_with_sam():
    for name in ("fedrep", "fedper", "solo"):
        state = trained(f"{name}+sam", rounds=(0, 1))
        assert all(np.isfinite(x).all() for x in map(np.asarray, jax.tree.leaves(state)))


@pytest.mark.thorough
def test_the_order_of_suffixes_does_not_matter():
    composed = methods.get("fedprox+sam+prototypes+decorr+adam")
    assert composed is methods.get("fedprox+adam+decorr+prototypes+sam")
    state = trained("fedprox+sam+prototypes+decorr+adam", rounds=(0, 1))
    assert state.servers.valid.any()
    assert all(np.isfinite(x).all() for x in map(np.asarray, jax.tree.leaves(state.servers)))


def test_a_method_with_an_addition_names_the_paper_of_the_base_method():
    assert methods.get("scaffold+sam")().traits().paper == methods.get("scaffold")().traits().paper
    assert methods.get("fedavgm+decorr")().traits().paper == methods.get("fedavgm")().traits().paper


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_addition_goes_in_front_of_fedprox(suffix):
    assert issubclass(methods.get(f"fedprox+{suffix}"), (methods.get("fedprox"), methods._ADDITIONS[suffix]))
