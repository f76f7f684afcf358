"""Ditto and APFL: own models beside a global one that is trained as if they were not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct
from participants import MODEL, arrays, assert_close, context, images, logits, row, variables

import fedjax_pcdd as fp
from fedjax_pcdd import methods, models, testing
from fedjax_pcdd.data.federation import hold_out
from fedjax_pcdd.engine.planning import Experiment, Planner
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.methods import validated_step
from fedjax_pcdd.methods.apfl import APFL
from fedjax_pcdd.methods.ditto import Ditto
from fedjax_pcdd.methods.method import Batch, Local, Method, Server
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


@pytest.mark.thorough
@of_each
def test_clipping_and_statistics_of_the_global_model_are_fedavgs(method):
    fields = {name: getattr(method, name) for name in method.__dataclass_fields__}
    own, plain = normed(type(method))(**fields), normed(Method)()
    options = {"clip": 0.05, "lanes": 1}
    testing.reduces_to_fedavg(toy.simulation(method=own, **options), toy.simulation(method=plain, **options))


@pytest.mark.thorough
@of_each
def test_local_statistics_go_with_the_global_model(method):
    fields = {name: getattr(method, name) for name in method.__dataclass_fields__}
    simulated = toy.simulation(method=normed(type(method))(**fields), lanes=1, local_statistics=True)
    state, _ = toy.train(simulated, (0,))
    assert np.isfinite(simulated.evaluate(state, personal=True).personal).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(arrays(state)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "model"),
    [(Ditto(lam=0.0), lambda clients: clients), (APFL(alpha=1.0), lambda clients: clients.model)],
    ids=["ditto", "apfl"],
)
def test_own_models_that_see_nothing_of_the_global_one_are_solos(method, model):
    state, _ = toy.train(toy.simulation(method=method))
    solo, _ = toy.train(toy.simulation("solo"))
    assert_close(model(arrays(state).clients), arrays(solo).clients, 1e-5)


@pytest.mark.thorough
def test_epochs_of_dittos_own_model_leave_the_global_one_to_fedavg():
    options = {"clip": 0.05, "lanes": 1}
    own, plain = (toy.simulation(method=m, **options) for m in (normed(Ditto)(personal_epochs=1), normed(Method)()))
    assert own.epochs.tolist() == [epochs + 1 for epochs in plain.epochs]
    testing.reduces_to_fedavg(own, plain)


@pytest.mark.thorough
@pytest.mark.parametrize("epochs", [1, (2, 1, 1, 1, 1)])
def test_dittos_own_model_trains_for_its_own_epochs(epochs):
    whole = {"batch_size": 64, "last_batch": "keep"}  # one batch an epoch, which has the same samples in every one
    solos, _ = toy.train(toy.simulation("solo", epochs=3, **whole))
    state, _ = toy.train(toy.simulation(method=Ditto(lam=0.0, personal_epochs=3), epochs=epochs, **whole))
    assert_close(arrays(state).clients, arrays(solos).clients, 1e-5)


def test_own_epochs_need_epochs():
    with pytest.raises(UserError, match="give local_epochs"):
        Planner([Experiment(toy.federation(), Ditto(personal_epochs=1), Local(local_steps=3), 0)], 3)


def validated(method, share=0.3, lanes=1, **options):
    """One whole batch an epoch, and validation samples that are no training samples."""
    parts = hold_out(toy.federation(), share, 0) if share else toy.federation()
    local = Local(1, 64, "keep", "sgd", 0.1, 0.0, 0.0, None)
    model = method.build(models.build("mlp", num_classes=toy.CLASSES, image_shape=parts.image_shape))
    return Simulation(
        model, [Experiment(parts, method, local, 0)], pipeline=toy.PLAIN, cohort=5, rounds=3,
        **toy.options(lanes=lanes, **options),
    )  # fmt: skip


def apart(simulated):
    """A state whose own models are far from the global one."""
    state = simulated.start()
    chance = np.random.default_rng(0)
    return state._replace(clients=jax.tree.map(lambda x: x + chance.normal(0, 0.3, x.shape), state.clients))


CANDIDATES = (0.0, 1.0, 9.0)
CHOOSING = Ditto(lambda_candidates="0,1,9")


def validation_loss(simulated, variables, k):
    held = simulated.federations[0].validation[k]
    data = simulated.federations[0].dataset
    answers = logits(variables, jnp.asarray(data.x_train[held] / 255.0, jnp.float32), simulated.program.model)
    return float(cross_entropy(answers, jnp.asarray(data.y_train[held])))


@pytest.mark.thorough
def test_of_dittos_candidates_each_own_model_takes_the_one_with_the_least_validation_loss():
    ways = [arrays(validated(m).step(apart(validated(m)), 0)[0]) for m in map(Ditto, CANDIDATES)]
    simulated = validated(CHOOSING)
    chosen = arrays(simulated.step(apart(simulated), 0)[0])
    best = []
    for k in range(5):
        own = [row(way.clients, k) for way in ways]
        if len(simulated.federations[0].validation[k]):
            losses = [validation_loss(simulated, jax.tree.map(jnp.asarray, v), k) for v in own]
            assert len(set(losses)) == 3
            best.append(int(np.argmin(losses)))
            assert_close(row(chosen.clients, k), own[best[-1]])
    assert len(set(best)) > 1  # not the same one for everybody
    assert_close(chosen.servers, ways[0].servers)


@pytest.mark.thorough
def test_each_validation_sample_counts_once_whatever_its_batch():
    def total(function):
        labels, masks = jnp.asarray([0, 1, 2, 0]), jnp.asarray([[1.0, 1, 1, 1], [1, 0, 0, 0]])
        return sum(function(Batch(images(4), labels, mask)) for mask in masks)

    answers = logits(variables(), images(4))
    expected = 4 * cross_entropy(answers, jnp.asarray([0, 1, 2, 0])) + cross_entropy(answers[:1], jnp.asarray([0]))
    found = validated_step.validation_loss(Method(), variables(), context(validation=total))
    np.testing.assert_allclose(found, expected, 1e-6)


def test_a_candidate_whose_loss_is_not_a_number_is_not_taken():
    assert validated_step.least([1.0, 2.0, 3.0], lambda number: jnp.where(number == 1, jnp.nan, number)) == 2


@pytest.mark.thorough
def test_a_client_without_validation_samples_takes_dittos_first_candidate():
    first, other = (validated(Ditto(lambda_candidates=given), share=0.01) for given in ("1,9", "9,1"))
    assert not first.federations[0].validation.sizes.any()
    for simulated, lam in ((first, 1.0), (other, 9.0)):
        state, plain = (arrays(s.step(apart(s), 0)[0]) for s in (simulated, validated(Ditto(lam), share=0.01)))
        assert_close(state.clients, plain.clients)


@pytest.mark.thorough
@pytest.mark.parametrize("method", [CHOOSING, Ditto(lambda_candidates="0,1,9", personal_epochs=1)])
def test_candidates_change_nothing_with_lanes_or_blocks(method):
    expected = toy.train(validated(method))
    for options in ({"lanes": 3}, {"lanes": 5, "block": 5}):
        assert_close(arrays(toy.train(validated(method, **options))[0]), arrays(expected[0]))


@pytest.mark.thorough
def test_one_candidate_is_dittos_lambda():
    one, other = (toy.train(validated(m))[0] for m in (Ditto(2.0), Ditto(lambda_candidates="2")))
    assert_close(arrays(one), arrays(other))


def test_dittos_candidates_ask_for_validation_samples():
    with pytest.raises(UserError, match="keep some with validation"):
        validated(CHOOSING, share=None)
    with pytest.raises(UserError, match="data=device"):
        validated(CHOOSING, stream=10**6)


@pytest.mark.thorough
def test_a_run_of_ditto_may_choose_its_lambda():
    federation = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=3, beta=0.3)
    method, given = fp.Ditto(lambda_candidates="0,2"), {"rounds": 2, "local_epochs": 1, "batch_size": 50, "lanes": 1}
    with pytest.raises(UserError, match="keep some with validation"):
        fp.simulate(federation, method, **given)
    chosen = fp.simulate(federation, method, validation=0.2, **given).summary
    assert chosen["pa_last"] > 0.3


@pytest.mark.parametrize("given", ["a", "1,", "-1,2", "nan", "inf,1"])
def test_dittos_candidates_are_numbers(given):
    with pytest.raises(UserError, match="must be numbers from 0 up"):
        advice(Ditto(lambda_candidates=given))


def test_a_candidate_that_overshoots_is_advised_against():
    assert "`lambda_candidates=1,21` diverges" in advice(Ditto(lambda_candidates="1,21"))[0]
    assert not advice(Ditto(99.0, lambda_candidates="1,19"))


@pytest.mark.thorough
def test_of_kept_optimisers_the_own_models_may_be_the_only_one():
    def trained(method, **options):
        parts, local = toy.federation(), Local(2, 8, "keep", "sgd", 0.05, 0.9, 1e-4, None)
        model = models.build("mlp", num_classes=toy.CLASSES, image_shape=parts.image_shape)
        experiments = [Experiment(parts, method, local, 0)]
        kept = Simulation(model, experiments, pipeline=toy.PLAIN, cohort=5, rounds=3, **options)
        return arrays(toy.train(kept, (0, 1))[0])

    fresh, fedavg = trained(Ditto()), trained(Method())
    own = trained(Ditto(kept_optimizer="own"), keeps_optimiser=True)
    both = trained(Ditto(), keeps_optimiser=True)
    assert_close(own.servers.variables, fedavg.servers.variables)
    assert_differ(both.servers.variables, fedavg.servers.variables)
    assert_differ(own.clients, fresh.clients)


def assert_differ(one, other):
    assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True)) > 1e-4


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


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ditto", "apfl"])
def test_they_may_have_prototypes_too(name):
    state, _ = toy.train(toy.simulation(method=methods.get(f"{name}+prototypes")()), (0, 1))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(arrays(state)))
    assert np.array(state.servers.valid).any()


@pytest.mark.thorough
def test_a_method_that_looks_at_validation_samples_has_some_in_its_contract_tests():
    testing.check_method(CHOOSING, as_fedavg={})


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


@pytest.mark.thorough
def test_alpha_moves_only_when_asked_to():
    weights = {}
    for adapt in ("never", "round", "step"):
        state, _ = toy.train(toy.simulation("apfl", adapt=adapt))
        weights[adapt] = np.array(state.clients.alpha)
        assert ((weights[adapt] >= 0) & (weights[adapt] <= 1)).all()
    np.testing.assert_array_equal(weights["never"], 0.5)
    assert (weights["round"] != 0.5).any()
    assert (weights["step"] != weights["round"]).any()
