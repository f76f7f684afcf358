"""Ditto and APFL: own models beside a global one that is trained as if they were not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct
from participants import MODEL, arrays, assert_close, images, logits

from fedjax_pcdd import methods, testing
from fedjax_pcdd.engine.planning import Experiment, Planner
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.apfl import APFL
from fedjax_pcdd.methods.ditto import Ditto
from fedjax_pcdd.methods.method import Local, Method, Server
from fedjax_pcdd.methods.personal_copy import PERSONAL, with_copy
from fedjax_pcdd.models.classifier import initialise

SETTINGS = [Ditto(), APFL(adapt="step"), APFL(mix="logits", adapt="step")]
of_each = pytest.mark.parametrize("method", SETTINGS, ids=["ditto", "apfl", "apfl-logits"])


def normed(cls):
    """The method on a model with batch norm."""

    @struct.dataclass
    class Normed(cls):
        def build(self, model):
            return model.clone(feature_norm=True)

    return Normed


@of_each
def test_clipping_and_statistics_of_the_global_model_are_fedavgs(method):
    fields = {name: getattr(method, name) for name in method.__dataclass_fields__}
    own, plain = normed(type(method))(**fields), normed(Method)()
    options = {"clip": 0.05, "lanes": 1}
    testing.reduces_to_fedavg(toy.simulation(method=own, **options), toy.simulation(method=plain, **options))


@of_each
def test_local_statistics_go_with_the_global_model(method):
    fields = {name: getattr(method, name) for name in method.__dataclass_fields__}
    simulated = toy.simulation(method=normed(type(method))(**fields), lanes=1, local_statistics=True)
    state, _ = toy.train(simulated, (0,))
    assert np.isfinite(simulated.evaluate(state, personal=True).personal).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(arrays(state)))


@pytest.mark.parametrize(
    ("method", "model"),
    [(Ditto(lam=0.0), lambda clients: clients), (APFL(alpha=1.0), lambda clients: clients.model)],
    ids=["ditto", "apfl"],
)
def test_own_models_that_see_nothing_of_the_global_one_are_solos(method, model):
    state, _ = toy.train(toy.simulation(method=method))
    solo, _ = toy.train(toy.simulation("solo"))
    assert_close(model(arrays(state).clients), arrays(solo).clients, 1e-5)


def test_epochs_of_dittos_own_model_leave_the_global_one_to_fedavg():
    options = {"clip": 0.05, "lanes": 1}
    own, plain = (toy.simulation(method=m, **options) for m in (normed(Ditto)(personal_epochs=1), normed(Method)()))
    assert own.epochs.tolist() == [epochs + 1 for epochs in plain.epochs]
    testing.reduces_to_fedavg(own, plain)


def test_dittos_own_model_trains_for_its_own_epochs():
    whole = {"batch_size": 64, "last_batch": "keep"}  # one batch an epoch, which has the same samples in every one
    solos, _ = toy.train(toy.simulation("solo", epochs=3, **whole))
    state, _ = toy.train(toy.simulation(method=Ditto(lam=0.0, personal_epochs=3), epochs=1, **whole))
    assert_close(arrays(state).clients, arrays(solos).clients, 1e-5)


def test_own_epochs_need_epochs():
    with pytest.raises(UserError, match="give local_epochs"):
        Planner([Experiment(toy.federation(), Ditto(personal_epochs=1), Local(local_steps=3), 0)], 3)


def test_dittos_pull_is_lambda_times_the_distance():
    start = with_copy({"params": {"w": jnp.zeros(3)}}, {"params": {"w": jnp.full(3, 9.0)}})
    params = {"w": jnp.full(3, 5.0), PERSONAL: {"w": jnp.asarray([1.0, -2.0, 0.0])}}
    gradient = jax.grad(Ditto(lam=0.5).regulariser)(params, toy.context(start=start))
    np.testing.assert_array_equal(gradient["w"], 0)
    np.testing.assert_array_equal(gradient[PERSONAL]["w"], [0.5, -1, 0])


def test_ditto_tends_to_the_minimum_of_the_sheet():
    a, b, lam, w = 2.0, 3.0, 0.5, -1.0
    start = with_copy({"params": {"w": jnp.asarray(w)}}, {"params": {"w": jnp.zeros(())}})

    def slope(v):
        pull = jax.grad(Ditto(lam=lam).regulariser)({"w": 0.0, PERSONAL: {"w": v}}, toy.context(start=start))
        return a * (v - b) + pull[PERSONAL]["w"]

    np.testing.assert_allclose(slope((a * b + lam * w) / (a + lam)), 0, atol=1e-6)


@pytest.mark.parametrize("name", ["ditto", "apfl"])
def test_they_may_have_prototypes_too(name):
    state, _ = toy.train(toy.simulation(method=methods.get(f"{name}+prototypes")()), (0, 1))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(arrays(state)))
    assert np.array(state.servers.valid).any()


def advice(method, lr=0.1, momentum=0.0):
    return method.configure(None, Local(lr=lr, momentum=momentum, weight_decay=0.0, clip=jnp.inf))[1]


@pytest.mark.parametrize(("lam", "momentum", "unstable"), [(19.0, 0.0, False), (21.0, 0.0, True), (21.0, 0.9, False)])
def test_a_proximal_step_that_overshoots_is_advised_against(lam, momentum, unstable):
    assert bool(advice(Ditto(lam=lam), momentum=momentum)) == unstable


def test_settings_without_anything_personal_are_advised_against():
    assert "`lam`" in advice(Ditto(lam=0.0))[0]
    assert "`adapt=step`" in advice(APFL(alpha=0.0))[0]
    assert "learn alone" in advice(APFL(alpha=1.0))[0]
    assert not advice(APFL())
    assert not advice(APFL(alpha=0.0, adapt="step"))


@pytest.mark.parametrize("mix", ["parameters", "logits"])
@pytest.mark.parametrize(("alpha", "answers"), [(0.0, 0), (1.0, 1)])
def test_the_ends_of_the_mixture_are_the_two_models(mix, alpha, answers):
    w, v = (initialise(MODEL, jax.random.key(seed), (5, 5, 1)) for seed in (0, 1))
    method = APFL(alpha=alpha, mix=mix)
    client = method.init_client(None, Server(v), None, None)
    variables = method.personal_variables(Server(w), client)
    mixed = method.logits(MODEL, variables, images(), Server(w), client, scope="personal")
    np.testing.assert_allclose(mixed, logits((w, v)[answers], images()), rtol=1e-5, atol=1e-6)


def test_alpha_moves_only_when_asked_to():
    weights = {}
    for adapt in ("never", "round", "step"):
        state, _ = toy.train(toy.simulation("apfl", adapt=adapt))
        weights[adapt] = np.array(state.clients.alpha)
        assert ((weights[adapt] >= 0) & (weights[adapt] <= 1)).all()
    np.testing.assert_array_equal(weights["never"], 0.5)
    assert (weights["round"] != 0.5).any()
    assert (weights["step"] != weights["round"]).any()
