"""Quantities tracked of the models of a simulation: the global one, and the clients' right after local training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from flax import struct

from fedjax_pcdd.analysis.angles import Angles, class_angles, etf_angle
from fedjax_pcdd.analysis.quantities import QUANTITIES
from fedjax_pcdd.analysis.spectrum import eigenvalue_variance
from fedjax_pcdd.analysis.trained import STEPS, Observed, Steps, look_after_training
from fedjax_pcdd.analysis.views import View, class_means, client_probe, random_probe
from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.data.federation import hold_out
from fedjax_pcdd.engine.groups import of_group
from fedjax_pcdd.engine.program import samples_of
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.losses.decorrelation import intra_class
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.models import forward
from fedjax_pcdd.training.tracking import Tracker

ALL = tuple(QUANTITIES)


def tracked(simulated, names=ALL, rounds=0, **options):
    """The entry after some rounds, the values of the clients' models in the last of them, and the state."""
    tracker, state = Tracker(names, simulated, 0, **options), simulated.start()
    plan = simulated.plan(0)
    client_values = tracker.before(0, state, plan)
    for r in range(rounds):
        plan = simulated.plan(r)
        client_values = tracker.before(r, state, plan)
        state, _ = simulated.step(state, r, plan)
    return tracker.entry(state, plan[1], client_values), client_values, state


def first_local_values(simulated, names):
    """The values of each client's model after the first local training."""
    return Tracker(names, simulated, 0).before(0, simulated.start(), simulated.plan(0))[0]


def features_by_hand(simulated, variables, images):
    images = prepare(simulated.program.pipeline, np.asarray(images), None, train=False)
    return np.asarray(forward(simulated.program.model, variables, images, train=False)[0].features)


@pytest.mark.thorough
def test_features_of_a_pair_with_a_trained_head_are_not_normalised():
    simulated = toy.simulation("fml", method=METHODS["fml"](meme="mlp"))
    variables = simulated.initial(0)
    data, row = simulated.data, 0
    view = View(simulated.program, (), variables, lambda images: images, data.train, row, data.class_counts[row] > 0)
    means, counts = class_means(view)
    indices = toy.federation().partition.train[row]
    z, labels = (
        features_by_hand(simulated, variables, toy.federation().dataset.x_train[indices]),
        toy.federation().dataset.y_train[indices],
    )
    for c in np.flatnonzero(np.asarray(counts)):
        np.testing.assert_allclose(means[c], z[labels == c].mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_global_numbers_are_those_of_the_global_model():
    simulated = toy.simulation(cohort=5)
    entry, _, state = tracked(simulated, local=False)
    federation, variables = simulated.experiments[0].federation, jax.tree.map(lambda x: x[0], state.servers.variables)
    data, present = federation.dataset, federation.class_counts > 0
    z = features_by_hand(simulated, variables, data.x_test)
    means = np.stack([z[data.y_test == c].mean(0) if (data.y_test == c).any() else 0 * z[0] for c in range(4)])
    tested = np.isin(np.arange(4), data.y_test)
    for name, vectors, mask in (("angles", variables["params"]["head"]["kernel"].T, None), ("features", means, tested)):
        angles = [class_angles(vectors, present_classes, mask) for present_classes in present]
        for field in ("existing", "missing", "between", "all"):
            values = np.array([getattr(client_angles, field) for client_angles in angles])
            np.testing.assert_allclose(entry[name]["global"][field], values[values >= 0].mean(), rtol=1e-4)
    probe = random_probe(len(data.y_test), 0)
    np.testing.assert_allclose(entry["spectrum"]["global"]["variance"], eigenvalue_variance(z[probe[0]])[1], rtol=1e-4)
    loss = intra_class(z[probe[0]], data.y_test[probe[0]], 4)
    np.testing.assert_allclose(entry["intra"]["global"]["loss"], loss, rtol=1e-4)


def shares_by_hand(correct, federation):
    """Accuracies on the classes of each client and on the others, from correct predictions [K or 1, C]."""
    present, tests = federation.class_counts > 0, np.bincount(federation.dataset.y_test, minlength=4)
    accuracies = {}
    for name, chosen in (("existing", present), ("missing", ~present)):
        correct_sum, total = (np.broadcast_to(correct, present.shape) * chosen).sum(1), (tests * chosen).sum(1)
        accuracies[name] = (correct_sum[total > 0] / total[total > 0]).mean()
    return accuracies


@pytest.mark.thorough
@pytest.mark.parametrize("lanes", [1, 3])
def test_class_accuracy_of_client_models_is_that_on_all_test_samples(lanes):
    simulated = toy.simulation("solo", cohort=5, lanes=lanes)
    entry, _, state = tracked(simulated, ("classes",), rounds=1)
    expected = shares_by_hand(simulated.evaluator.personal(state, own=False), simulated.experiments[0].federation)
    assert entry["classes"]["local"] == pytest.approx(expected, rel=1e-6)
    assert entry["classes"]["global"] is None


@pytest.mark.thorough
def test_class_accuracy_of_the_global_model_is_over_the_classes_of_each_client():
    simulated = toy.simulation(cohort=5)
    entry, _, state = tracked(simulated, ("classes",), rounds=1, local=False)
    expected = shares_by_hand(simulated.evaluate(state).generic, simulated.experiments[0].federation)
    assert entry["classes"]["global"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.thorough
def test_validation_samples_do_not_count_in_class_accuracy():
    options = {"cohort": 5, "lanes": 1}
    experiment = toy.simulation("solo", **options).experiments[0]
    federation = hold_out(experiment.federation, 0.3, seed=0)
    plain = toy.simulation("solo", **options)
    simulated = Simulation(
        plain.program.model,
        [experiment._replace(federation=federation)],
        pipeline=plain.program.pipeline,
        cohort=5,
        rounds=3,
    )
    entry, _, state = tracked(simulated, ("classes",), rounds=1)
    expected = shares_by_hand(simulated.evaluator.personal(state, own=False)[:, :4], federation)
    assert entry["classes"]["local"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.thorough
def test_the_adapted_classifier_of_a_client_answers_for_its_classes_alone():
    """FedGELA's Phi of a missing class is 0, and with the softmax over the client's own classes it has no logit."""
    entry, *_ = tracked(toy.simulation("fedgela", cohort=5, denominator="present"), ("classes",), rounds=1)
    assert entry["classes"]["local"]["missing"] == 0
    assert entry["classes"]["local"]["existing"] > 0


@pytest.mark.thorough
def test_the_only_client_of_a_round_has_the_model_that_becomes_the_global_one():
    entry, *_ = tracked(toy.simulation(cohort=1, lanes=1), ("angles",), rounds=2)
    global_angles = {name: value for name, value in entry["angles"]["global"].items() if value is not None}
    assert global_angles
    assert {name: entry["angles"]["local"][name] for name in global_angles} == pytest.approx(global_angles, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("later", ["learning rate", "images"])
def test_a_later_round_is_measured_with_its_own_learning_rate_and_images(later):
    plain = toy.simulation(cohort=1, lanes=1)
    experiment, pipeline = plain.experiments[0], plain.program.pipeline
    if later == "learning rate":
        experiment = experiment._replace(local=dataclasses.replace(plain.local, lr_steps=(1,), lr_decay=0.1))
    else:
        pipeline = Pipeline(flip=True)
    simulated = Simulation(plain.program.model, [experiment], pipeline=pipeline, cohort=1, rounds=3)
    entry, *_ = tracked(simulated, ("angles",), rounds=2)
    global_angles = {name: value for name, value in entry["angles"]["global"].items() if value is not None}
    assert {name: entry["angles"]["local"][name] for name in global_angles} == pytest.approx(global_angles, rel=1e-5)


@pytest.mark.thorough
def test_a_client_without_a_step_is_not_measured():
    simulated = toy.simulation("solo", cohort=5, lanes=1, last_batch="strict")  # client 0 has one sample, a batch 8
    assert first_local_values(simulated, ("intra",))["intra"].shape == (4,)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"cohort": 2}, {"cohort": 5, "last_batch": "strict"}])
def test_the_global_model_is_measured_with_the_classes_of_trained_clients(options):
    simulated = toy.simulation(**options)
    entry, _, state = tracked(simulated, ("angles",), rounds=1, local=False)
    jobs = simulated.plan(0)[1]
    present = simulated.experiments[0].federation.class_counts[jobs.row[jobs.steps > 0]] > 0
    kernel = np.asarray(state.servers.variables["params"]["head"]["kernel"][0])
    for field in ("existing", "missing"):
        angles = np.array([getattr(class_angles(kernel.T, classes), field) for classes in present])
        assert entry["angles"]["global"][field] == pytest.approx(angles[angles >= 0].mean(), rel=1e-5)


def test_the_test_samples_of_the_probe_are_those_of_the_seed():
    simulated = toy.simulation()
    labels = simulated.experiments[0].federation.dataset.y_test
    for seed in (0, 3):
        np.testing.assert_array_equal(Tracker(("intra",), simulated, seed).probe, random_probe(len(labels), seed))


@pytest.mark.thorough
def test_local_numbers_are_those_of_the_clients_own_samples():
    simulated = toy.simulation("solo", cohort=5, lanes=1)
    entry, _, state = tracked(simulated, ("features", "spectrum", "intra"), rounds=1)
    federation = simulated.experiments[0].federation
    variances, losses, angles = [], [], []
    for k, indices in enumerate(federation.partition.train):
        labels, variables = federation.dataset.y_train[indices], jax.tree.map(lambda x, k=k: x[k], state.clients)
        z = features_by_hand(simulated, variables, federation.dataset.x_train[indices])
        variances += [eigenvalue_variance(z)[1]] if len(indices) >= 2 else []
        losses.append(intra_class(z, labels, 4))
        means = np.stack([z[labels == c].mean(0) if (labels == c).any() else 0 * z[0] for c in range(4)])
        angles.append(class_angles(means, federation.class_counts[k] > 0).existing)
    assert entry["spectrum"]["local"]["variance"] == pytest.approx(np.mean(variances), rel=1e-4)
    assert entry["intra"]["local"]["loss"] == pytest.approx(np.mean(losses), rel=1e-3)
    assert entry["features"]["local"]["existing"] == pytest.approx(np.mean([a for a in angles if a >= 0]), rel=1e-4)


@pytest.mark.thorough
def test_local_numbers_do_not_depend_on_lanes():
    one_lane, three_lanes = (
        first_local_values(toy.simulation("moon", cohort=5, lanes=lanes), ("angles",)) for lanes in (1, 3)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one_lane, three_lanes)


@pytest.mark.thorough
def test_measuring_leaves_the_state_unchanged():
    simulated = toy.simulation("solo", cohort=5, lanes=1)
    state = simulated.start()
    copy = jax.tree.map(np.array, state)
    Tracker(("intra",), simulated, 0).before(0, state, simulated.plan(0))
    jax.tree.map(np.testing.assert_array_equal, copy, jax.tree.map(np.array, state))


@pytest.mark.thorough
def test_local_numbers_do_not_depend_on_where_client_states_are():
    device, host = (
        first_local_values(toy.simulation("solo", cohort=2, lanes=1, client_state=client_state), ("intra",))
        for client_state in ("device", "host")
    )
    np.testing.assert_array_equal(device["intra"], host["intra"])


@pytest.mark.thorough
def test_an_etf_has_its_angle_in_the_global_and_in_local_models():
    entry, *_ = tracked(toy.simulation("fedgela", cohort=5), ("angles", "features", "intra"))
    assert {name: x.get("etf") for name, x in entry.items()} == dict.fromkeys(entry, etf_angle(4)) | {"intra": None}
    for model in ("global", "local"):
        assert entry["angles"][model]["all"] == pytest.approx(etf_angle(4), rel=1e-4)


@pytest.mark.thorough
def test_without_a_global_model_clients_are_measured_in_any_case():
    entry, *_ = tracked(toy.simulation("solo", cohort=5, lanes=1), ("intra",), local=False)
    assert entry["intra"]["global"] is None
    assert entry["intra"]["local"]["loss"] > 0


@pytest.mark.thorough
def test_no_track_local_trains_no_client_twice():
    entry, client_values, *_ = tracked(toy.simulation(cohort=5), ("angles",), local=False)
    assert client_values is None
    assert entry["angles"]["local"] is None
    assert entry["angles"]["global"]["all"] > 0


@pytest.mark.thorough
def test_participants_of_two_architectures_are_measured_between_rounds():
    simulated = toy.groups("fedmd")
    entry, client_values, state = tracked(simulated, ("angles",))
    kernels = [None] * 5
    for members, clients in zip(simulated.members, state.clients, strict=True):
        for row, k in enumerate(members):
            kernels[k] = np.asarray(clients["params"]["head"]["kernel"][row])
    present = simulated.federation.class_counts > 0
    angles = np.array([class_angles(w.T, classes).missing for w, classes in zip(kernels, present, strict=True)])
    assert client_values is None
    assert entry["angles"]["local"]["missing"] == pytest.approx(angles[angles >= 0].mean(), rel=1e-5)


@struct.dataclass
class Frozen(METHODS["fedavg"]):
    def trainable(self, params, context):
        return jax.tree.map(lambda _: False, params)


@pytest.mark.thorough
def test_gradients_of_parameters_that_are_not_trained_do_not_count():
    values = first_local_values(toy.simulation(method=Frozen(), clip=1e-6), ("gradients",))["gradients"]
    assert (values["norm"] == 0).all()
    assert (values["clipped"] == 0).all()


def test_the_probe_of_a_client_with_many_samples_is_spread_over_all_of_them():
    samples = samples_of(np.zeros(307), np.zeros(307), [np.arange(7), np.arange(7, 307)])
    index, mask = client_probe(View(None, None, None, None, samples, 1, None))
    assert mask.all()
    assert set(np.diff(index, prepend=5, append=307)) <= {2, 3}


def test_the_random_probe_holds_every_sample_once():
    assert np.unique(random_probe(1000, 3)).size == 7 * 128
    assert random_probe(5000, 3).shape == (10, 128)
    assert sorted(random_probe(60, 3)[0]) == list(range(60))


@pytest.mark.thorough
def test_the_gradient_of_a_single_step_is_what_moved_the_weights():
    options = {"cohort": 1, "lanes": 1, "epochs": 1, "batch_size": 64, "last_batch": "keep"}
    for clip, share in ((None, 0.0), (0.01, 1.0)):
        entry, *_ = tracked(toy.simulation(**options, clip=clip), ("gradients",), rounds=1)
        _, _, after = tracked(toy.simulation(**options), ("gradients",), rounds=1)
        before = toy.simulation(**options).start().servers.variables["params"]
        gradients = jax.tree.map(lambda w, v: (w - v) / 0.05 - 1e-4 * w, before, after.servers.variables["params"])
        assert entry["gradients"]["local"]["norm"] == pytest.approx(float(optax.tree.norm(gradients)), rel=1e-4)
        assert entry["gradients"]["local"]["clipped"] == share


@pytest.mark.thorough
def test_the_backbones_weights_are_measured_without_the_head():
    entry, client_values, state = tracked(toy.simulation(cohort=1, lanes=1), ("gradients",), rounds=1)
    norm = float(optax.tree.norm(state.servers.variables["params"]["backbone"]))
    assert entry["gradients"]["global"]["weights"] == pytest.approx(norm, rel=1e-5)
    assert client_values[0]["gradients"]["weights"] == pytest.approx([norm], rel=1e-5)  # the mean of one client


@pytest.mark.thorough
def test_a_step_counts_as_clipped_if_any_part_is():
    gradients, limits = {"a": jnp.float32(3.0), "b": jnp.float32(4.0)}, (4.5, 3.5, 2.0)
    start = Steps(*jnp.zeros(3))
    together, apart = ([start.after(gradients, limit, parts) for limit in limits] for parts in ((), ("b",)))
    assert [float(steps.clipped) for steps in together] == [1, 1, 1]
    assert [float(steps.clipped) for steps in apart] == [0, 1, 1]
    assert all(float(steps.norm) == pytest.approx(5) and steps.count == 1 for steps in (*together, *apart))


def test_over_several_steps_the_norm_is_a_mean_and_clipped_steps_are_a_share():
    program, variables = toy.simulation().program, {"params": {"backbone": {"w": jnp.ones(4)}, "head": jnp.ones(9)}}
    steps = Steps(count=jnp.float32(4), norm=jnp.float32(10), clipped=jnp.float32(1))
    view = View(program, (), variables, lambda images: images, (), 0, jnp.ones(4, bool), None, steps)
    assert QUANTITIES["gradients"].of_client(view) == {"norm": 2.5, "clipped": 0.25, "weights": 2}


def test_of_several_steps_in_one_local_update_the_last_counts():
    @struct.dataclass
    class Twice(METHODS["fedavg"]):
        def local_update(self, evaluate, step, variables, batch, context):
            step({"w": jnp.float32(3)})
            return jnp.float32(0), {}, step({"w": jnp.float32(5)})

    variables = {"params": {"w": jnp.float32(1)}, STEPS: Steps(*jnp.zeros(3))}
    observed = Observed(Twice(), (), lambda *_: (), of_steps=True)
    context = toy.context(start=variables, hyper=Local(clip=9.0))
    _, state, _ = observed.local_update(None, lambda gradients: gradients, variables, (), context)
    assert (state[STEPS].norm, state[STEPS].count) == (5, 1)


@pytest.mark.parametrize("name", ["classes", "angles", "features"])
def test_a_client_that_dropped_out_is_in_no_mean_over_clients(name):
    values, trained = np.array([0.25, 0.75, 0.5]), np.array([True, False, True])
    result = {"existing": values, "missing": values} if name == "classes" else Angles(*[values] * 4)
    assert QUANTITIES[name].overall(result, trained, np.zeros((1, 3), int), 4)["existing"] == 0.375


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["apfl", "fedsmoo", "scaffold"])
def test_watching_the_steps_changes_no_training(method):
    simulated = toy.simulation(method, cohort=5)
    plain, with_steps = (first_local_values(simulated, names) for names in (("intra",), ("intra", "gradients")))
    np.testing.assert_allclose(with_steps["intra"], plain["intra"], rtol=1e-5)
    assert (with_steps["gradients"]["norm"] > 0).all()


def class_counts_of_row(data, server, variables, row, logits):
    return data.class_counts[row]


@pytest.mark.thorough
def test_participants_of_several_architectures_are_looked_at_with_their_own_samples():
    groups = toy.groups("solo", necks=(0, 1, 2, 1, 0))
    state, (plans, _) = groups.start(), groups.plan(0)
    look = jax.jit(look_after_training, static_argnums=(0, 1))
    for g, (group, (plan, jobs)) in enumerate(zip(groups.groups, plans, strict=True)):
        arguments = group.methods, group.hyper_at(0), group.data, group.keys, of_group(state, g)
        counts = look(group.program, class_counts_of_row, *arguments, group.sent(plan, jobs, 0))
        np.testing.assert_array_equal(counts, toy.federation().class_counts[list(groups.members[g])])


@pytest.mark.thorough
def test_between_rounds_weights_are_measured_but_no_steps():
    groups = toy.groups("fedmd")
    entry = Tracker(("gradients",), groups, 0).entry(groups.start(), None, None)
    assert entry["gradients"]["local"]["norm"] is None
    assert entry["gradients"]["local"]["weights"] > 0
