"""Ditto and APFL: personal models beside a global one that is trained as if they did not exist."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct
from participants import (
    MODEL,
    NORMED,
    arrays,
    assert_close,
    context,
    images,
    logits,
    normed_variables,
    row,
    same,
    variables,
)

import fedjax_pcdd as fp
from fedjax_pcdd import methods, models, testing
from fedjax_pcdd.data.federation import hold_out
from fedjax_pcdd.engine.planning import Experiment, Planner
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.methods import validated_step
from fedjax_pcdd.methods.apfl import APFL
from fedjax_pcdd.methods.ditto import Ditto
from fedjax_pcdd.methods.method import Batch, Evaluated, Local, Method, Server, Step
from fedjax_pcdd.methods.personal_copy import PERSONAL, copy_of, with_copy, without_copy
from fedjax_pcdd.models.classifier import forward, initialise

SETTINGS = [Ditto(), APFL(adapt="step"), APFL(mix="logits", adapt="step")]
each_method = pytest.mark.parametrize("method", SETTINGS, ids=["ditto", "apfl", "apfl-logits"])


def normed(cls):
    """The method on a model with batch norm."""

    @struct.dataclass
    class Normed(cls):
        def build(self, model):
            return model.clone(feature_norm=True)

    return Normed


@pytest.mark.thorough
@each_method
def test_clipping_and_statistics_of_the_global_model_are_fedavgs(method):
    fields = {name: getattr(method, name) for name in method.__dataclass_fields__}
    normed_method, normed_fedavg = normed(type(method))(**fields), normed(Method)()
    options = {"clip": 0.05, "lanes": 1}
    testing.reduces_to_fedavg(
        toy.simulation(method=normed_method, **options), toy.simulation(method=normed_fedavg, **options)
    )


@pytest.mark.thorough
@each_method
def test_training_and_evaluation_with_local_statistics_are_finite(method):
    fields = {name: getattr(method, name) for name in method.__dataclass_fields__}
    simulated = toy.simulation(method=normed(type(method))(**fields), lanes=1, local_statistics=True)
    state, _ = toy.train(simulated, (0,))
    assert np.isfinite(simulated.evaluate(state, personal=True).personal).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(arrays(state)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "personal_models"),
    [(Ditto(lam=0.0), lambda clients: clients), (APFL(alpha=1.0), lambda clients: clients.model)],
    ids=["ditto", "apfl"],
)
def test_personal_models_independent_of_the_global_one_equal_solo(method, personal_models):
    state, _ = toy.train(toy.simulation(method=method))
    solo, _ = toy.train(toy.simulation("solo"))
    assert_close(personal_models(arrays(state).clients), arrays(solo).clients, 1e-5)


@pytest.mark.thorough
def test_personal_epochs_of_ditto_leave_the_global_model_equal_to_fedavgs():
    options = {"clip": 0.05, "lanes": 1}
    ditto, fedavg = (toy.simulation(method=m, **options) for m in (normed(Ditto)(personal_epochs=1), normed(Method)()))
    assert ditto.epochs.tolist() == [epochs + 1 for epochs in fedavg.epochs]
    testing.reduces_to_fedavg(ditto, fedavg)


@pytest.mark.thorough
@pytest.mark.parametrize("epochs", [1, (2, 1, 1, 1, 1)])
def test_dittos_personal_model_trains_for_personal_epochs(epochs):
    whole_batches = {"batch_size": 64, "last_batch": "keep"}  # one batch per epoch, with the same samples in each
    solo, _ = toy.train(toy.simulation("solo", epochs=3, **whole_batches))
    state, _ = toy.train(toy.simulation(method=Ditto(lam=0.0, personal_epochs=3), epochs=epochs, **whole_batches))
    assert_close(arrays(state).clients, arrays(solo).clients, 1e-5)


def test_running_statistics_of_dittos_models_move_only_in_their_own_epochs():
    model = MODEL.clone(feature_norm=True)
    both = with_copy(*(variables(seed, model) for seed in (0, 1)))
    batch = Batch(images(), jnp.zeros(8, int), jnp.ones(8))
    for epoch, moving, still in ((0, without_copy, copy_of), (1, copy_of, without_copy)):
        run = context(model=model, epoch=jnp.asarray(epoch), epochs=jnp.asarray(2))
        after = both | Ditto(personal_epochs=1).loss(both, batch, run)[1]
        assert same(still(after), still(both))
        assert not same(moving(after)["batch_stats"], moving(both)["batch_stats"])


def test_personal_epochs_need_local_epochs():
    with pytest.raises(UserError, match="give local_epochs"):
        Planner([Experiment(toy.federation(), Ditto(personal_epochs=1), Local(local_steps=3), 0)], 3)


def with_validation(method, share=0.3, lanes=1, **options):
    """A simulation with one whole batch per epoch, whose validation samples are held out of training."""
    federation = hold_out(toy.federation(), share, 0) if share else toy.federation()
    local = Local(1, 64, "keep", "sgd", 0.1, 0.0, 0.0, None)
    model = method.build(models.build("mlp", num_classes=toy.CLASSES, image_shape=federation.image_shape))
    return Simulation(
        model, [Experiment(federation, method, local, 0)], pipeline=toy.PLAIN, cohort=5, rounds=3,
        **toy.options(lanes=lanes, **options),
    )  # fmt: skip


def start_far_from_global(simulated):
    """A state whose personal models are far from the global one."""
    state = simulated.start()
    rng = np.random.default_rng(0)
    return state._replace(clients=jax.tree.map(lambda x: x + rng.normal(0, 0.3, x.shape), state.clients))


CANDIDATES = (0.0, 1.0, 9.0)
DITTO_WITH_CANDIDATES = Ditto(lambda_candidates="0,1,9")


def validation_loss(simulated, variables, k):
    indices = simulated.federations[0].validation[k]
    data = simulated.federations[0].dataset
    outputs = logits(variables, jnp.asarray(data.x_train[indices] / 255.0, jnp.float32), simulated.program.model)
    return float(cross_entropy(outputs, jnp.asarray(data.y_train[indices])))


@pytest.mark.thorough
def test_each_personal_model_takes_the_candidate_of_least_validation_loss():
    states = [
        arrays(with_validation(m).step(start_far_from_global(with_validation(m)), 0)[0]) for m in map(Ditto, CANDIDATES)
    ]
    simulated = with_validation(DITTO_WITH_CANDIDATES)
    chosen = arrays(simulated.step(start_far_from_global(simulated), 0)[0])
    best = []
    for k in range(5):
        candidates = [row(state.clients, k) for state in states]
        if len(simulated.federations[0].validation[k]):
            losses = [validation_loss(simulated, jax.tree.map(jnp.asarray, v), k) for v in candidates]
            assert len(set(losses)) == 3
            best.append(int(np.argmin(losses)))
            assert_close(row(chosen.clients, k), candidates[best[-1]])
    assert len(set(best)) > 1  # not the same candidate for all clients
    assert_close(chosen.servers, states[0].servers)


@pytest.mark.thorough
def test_each_validation_sample_counts_once_whatever_the_size_of_its_batch():
    def sum_over_batches(function):
        labels, masks = jnp.asarray([0, 1, 2, 0]), jnp.asarray([[1.0, 1, 1, 1], [1, 0, 0, 0]])
        return sum(function(Batch(images(4), labels, mask)) for mask in masks)

    outputs = logits(normed_variables(0), images(4), NORMED)  # in eval mode
    expected = 4 * cross_entropy(outputs, jnp.asarray([0, 1, 2, 0])) + cross_entropy(outputs[:1], jnp.asarray([0]))
    known = context(model=NORMED, validation=sum_over_batches)
    loss = validated_step.validation_loss(Method(), normed_variables(0), known)
    np.testing.assert_allclose(loss, expected, 1e-6)


LABELLED = Batch(images(4), jnp.asarray([0, 1, 2, 0]), jnp.ones(4))


def local_update(method, start, **known):
    """What a local step of a model with batch norm returns whose gradients are 0."""
    client_context = context(model=NORMED, start=start, **known)

    def evaluate(variables):
        loss, state = method.loss(variables, LABELLED, client_context)
        return Evaluated(loss, state, jax.tree.map(jnp.zeros_like, variables["params"]))

    def step(gradients):
        return Step(jax.tree.map(jnp.negative, gradients), ())

    return method.local_update(evaluate, step, start, LABELLED, client_context)


def trained_statistics(own):
    """Running statistics of a model with batch norm after a batch in training mode."""
    return forward(NORMED, own, LABELLED.images, train=True)[1]


@pytest.mark.thorough
def test_a_candidate_is_judged_by_the_running_statistics_after_its_step():
    w, v = normed_variables(0), normed_variables(1)
    start, losses = with_copy(w, v), []

    def over_validation_samples(function):
        losses.append(function(LABELLED))
        return losses[-1]

    with jax.disable_jit():
        local_update(Ditto(lambda_candidates="0"), start, validation=over_validation_samples)
    outputs = logits({**v, **trained_statistics(v)}, LABELLED.images, NORMED)
    np.testing.assert_allclose(losses, [4 * cross_entropy(outputs, LABELLED.labels)], 1e-5)


def test_a_candidate_whose_loss_is_nan_is_not_chosen():
    assert validated_step.least([1.0, 2.0, 3.0], lambda number: jnp.where(number == 1, jnp.nan, number)) == 2


@pytest.mark.thorough
def test_a_client_without_validation_samples_takes_dittos_first_candidate():
    one_first, nine_first = (
        with_validation(Ditto(lambda_candidates=candidates), share=0.01) for candidates in ("1,9", "9,1")
    )
    assert not one_first.federations[0].validation.sizes.any()
    for simulated, lam in ((one_first, 1.0), (nine_first, 9.0)):
        state, plain = (
            arrays(s.step(start_far_from_global(s), 0)[0]) for s in (simulated, with_validation(Ditto(lam), share=0.01))
        )
        assert_close(state.clients, plain.clients)


@pytest.mark.thorough
@pytest.mark.parametrize("method", [DITTO_WITH_CANDIDATES, Ditto(lambda_candidates="0,1,9", personal_epochs=1)])
def test_lanes_and_blocks_do_not_change_results_with_candidates(method):
    expected = toy.train(with_validation(method))
    for options in ({"lanes": 3}, {"lanes": 5, "block": 5}):
        assert_close(arrays(toy.train(with_validation(method, **options))[0]), arrays(expected[0]))


@pytest.mark.thorough
def test_a_single_candidate_acts_as_lambda():
    with_lambda, with_candidate = (toy.train(with_validation(m))[0] for m in (Ditto(2.0), Ditto(lambda_candidates="2")))
    assert_close(arrays(with_lambda), arrays(with_candidate))


def test_dittos_candidates_need_validation_samples_and_data_on_the_device():
    with pytest.raises(UserError, match="keep some with validation"):
        with_validation(DITTO_WITH_CANDIDATES, share=None)
    with pytest.raises(UserError, match="data=device"):
        with_validation(DITTO_WITH_CANDIDATES, stream=10**6)


@pytest.mark.thorough
def test_a_run_of_ditto_may_choose_its_lambda():
    federation = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=3, beta=0.3)
    method, options = fp.Ditto(lambda_candidates="0,2"), {"rounds": 2, "local_epochs": 1, "batch_size": 50, "lanes": 1}
    with pytest.raises(UserError, match="keep some with validation"):
        fp.simulate(federation, method, **options)
    summary = fp.simulate(federation, method, validation=0.2, **options).summary
    assert summary["pa_last"] > 0.3


@pytest.mark.parametrize("candidates", ["a", "1,", "-1,2", "nan", "inf,1"])
def test_candidates_that_are_not_numbers_from_zero_up_are_refused(candidates):
    with pytest.raises(UserError, match="must be numbers from 0 up"):
        advice(Ditto(lambda_candidates=candidates))


def test_a_candidate_that_overshoots_is_advised_against():
    assert "`lambda_candidates=1,21` diverges" in advice(Ditto(lambda_candidates="1,21"))[0]
    assert not advice(Ditto(99.0, lambda_candidates="1,19"))


@pytest.mark.thorough
def test_ditto_may_keep_only_the_optimiser_of_the_personal_model():
    def trained(method, **options):
        federation, local = toy.federation(), Local(2, 8, "keep", "sgd", 0.05, 0.9, 1e-4, None)
        model = models.build("mlp", num_classes=toy.CLASSES, image_shape=federation.image_shape)
        experiments = [Experiment(federation, method, local, 0)]
        simulated = Simulation(model, experiments, pipeline=toy.PLAIN, cohort=5, rounds=3, **options)
        return arrays(toy.train(simulated, (0, 1))[0])

    fresh, fedavg = trained(Ditto()), trained(Method())
    personal_kept = trained(Ditto(kept_optimizer="own"), keeps_optimiser=True)
    both_kept = trained(Ditto(), keeps_optimiser=True)
    assert_close(personal_kept.servers.variables, fedavg.servers.variables)
    assert_differ(both_kept.servers.variables, fedavg.servers.variables)
    assert_differ(personal_kept.clients, fresh.clients)


def assert_differ(first, second):
    assert max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True)) > 1e-4


def test_dittos_pull_is_lambda_times_the_distance():
    start = with_copy({"params": {"w": jnp.zeros(3)}}, {"params": {"w": jnp.full(3, 9.0)}})
    params = {"w": jnp.full(3, 5.0), PERSONAL: {"w": jnp.asarray([1.0, -2.0, 0.0])}}
    gradient = jax.grad(Ditto(lam=0.5).regulariser)(params, toy.context(start=start))
    np.testing.assert_array_equal(gradient["w"], 0)
    np.testing.assert_array_equal(gradient[PERSONAL]["w"], [0.5, -1, 0])


def test_dittos_gradient_vanishes_at_the_minimum_in_closed_form():
    a, b, lam, w = 2.0, 3.0, 0.5, -1.0
    start = with_copy({"params": {"w": jnp.asarray(w)}}, {"params": {"w": jnp.zeros(())}})

    def slope(v):
        pull = jax.grad(Ditto(lam=lam).regulariser)({"w": 0.0, PERSONAL: {"w": v}}, toy.context(start=start))
        return a * (v - b) + pull[PERSONAL]["w"]

    np.testing.assert_allclose(slope((a * b + lam * w) / (a + lam)), 0, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ditto", "apfl"])
def test_ditto_and_apfl_combine_with_prototypes(name):
    state, _ = toy.train(toy.simulation(method=methods.get(f"{name}+prototypes")()), (0, 1))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(arrays(state)))
    assert np.array(state.servers.valid).any()


@pytest.mark.thorough
def test_check_method_gives_validation_samples_to_a_method_that_needs_them():
    testing.check_method(DITTO_WITH_CANDIDATES, as_fedavg={})


def advice(method, lr=0.1, momentum=0.0):
    return method.configure(None, Local(lr=lr, momentum=momentum, weight_decay=0.0, clip=jnp.inf))[1]


@pytest.mark.parametrize(("lam", "momentum", "unstable"), [(19.0, 0.0, False), (21.0, 0.0, True), (21.0, 0.9, False)])
def test_a_proximal_step_that_overshoots_is_advised_against(lam, momentum, unstable):
    assert bool(advice(Ditto(lam=lam), momentum=momentum)) == unstable


def test_settings_without_a_personal_or_a_global_part_are_advised_against():
    assert "`lam`" in advice(Ditto(lam=0.0))[0]
    assert "`adapt=step`" in advice(APFL(alpha=0.0))[0]
    assert "learn alone" in advice(APFL(alpha=1.0))[0]
    assert not advice(APFL())
    assert not advice(APFL(alpha=0.0, adapt="step"))


@pytest.mark.parametrize("mix", ["parameters", "logits"])
@pytest.mark.parametrize(("alpha", "model_index"), [(0.0, 0), (1.0, 1)])
def test_the_ends_of_the_mixture_are_the_two_models(mix, alpha, model_index):
    w, v = (initialise(MODEL, jax.random.key(seed), (5, 5, 1)) for seed in (0, 1))
    method = APFL(alpha=alpha, mix=mix)
    client = method.init_client(None, Server(v), None, None)
    variables = method.personal_variables(Server(w), client)
    mixed = method.logits(MODEL, variables, images(), Server(w), client, scope="personal")
    np.testing.assert_allclose(mixed, logits((w, v)[model_index], images()), rtol=1e-5, atol=1e-6)


def blend(v, w):
    return jax.tree.map(lambda x, y: 0.25 * x + 0.75 * y, v, w)


def mixture_of_normed_models(mix):
    """A method, the models v and w with statistics of their own, and the variables that a client trains."""
    w, v = normed_variables(0), normed_variables(1)
    method = APFL(alpha=0.25, mix=mix)
    client = method.init_client(None, Server(v), None, None)
    return method, v, w, method.download(Server(w), client)


@pytest.mark.parametrize("mix", ["parameters", "logits"])
def test_predictions_mix_parameters_and_running_statistics_or_logits(mix):
    method, v, w, variables = mixture_of_normed_models(mix)
    mixed = method.logits(NORMED, variables, images(), Server(w), scope="personal")
    outputs = [logits(own, images(), NORMED) for own in (v, w)]
    expected = logits(blend(v, w), images(), NORMED) if mix == "parameters" else blend(*outputs)
    np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(logits(blend(v, w), images(), NORMED), blend(*outputs), atol=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("mix", ["parameters", "logits"])
def test_statistics_of_the_own_model_are_those_of_the_mixtures_passes(mix):
    method, v, w, variables = mixture_of_normed_models(mix)
    state = local_update(method, variables, step=0)[1]
    passed = {**v, "params": blend(v, w)["params"]} if mix == "parameters" else v
    assert_close(arrays(state[PERSONAL]), arrays(trained_statistics(passed)))
    assert_close(arrays({"batch_stats": state["batch_stats"]}), arrays(trained_statistics(w)))


@pytest.mark.thorough
def test_alpha_moves_at_the_rate_of_the_models_unless_it_has_its_own():
    w, v = normed_variables(0), normed_variables(1)
    changes = []
    for alpha_lr in (None, 0.02, 0.04):
        method = APFL(adapt="step", alpha_lr=alpha_lr)
        start = method.download(Server(w), method.init_client(None, Server(v), None, None))
        changes.append(local_update(method, start, hyper=Local(lr=0.02), step=0)[2].updates["alpha"])
    np.testing.assert_allclose(changes[1], changes[0], 1e-6)
    np.testing.assert_allclose(changes[2], 2 * changes[0], 1e-5)
    assert 0 < abs(changes[0]) < 0.1


@pytest.mark.thorough
def test_alpha_adapts_only_if_asked():
    weights = {}
    for adapt in ("never", "round", "step"):
        state, _ = toy.train(toy.simulation("apfl", adapt=adapt))
        weights[adapt] = np.array(state.clients.alpha)
        assert ((weights[adapt] >= 0) & (weights[adapt] <= 1)).all()
    np.testing.assert_array_equal(weights["never"], 0.5)
    assert (weights["round"] != 0.5).any()
    assert (weights["step"] != weights["round"]).any()
