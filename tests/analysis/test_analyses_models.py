"""What is tracked of the models of a simulation: the global one, and the clients' right after local training."""

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
from fedjax_pcdd.analysis.trained import STEPS, Steps, Watched
from fedjax_pcdd.analysis.views import View, class_means, random_probe
from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.data.federation import hold_out
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.losses.decorrelation import intra_class
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.models import forward
from fedjax_pcdd.training.tracking import Tracker

ALL = tuple(QUANTITIES)


def tracked(simulated, names=ALL, rounds=0, **options):
    """The entry after some rounds, with what was seen of the clients before the last, and the state."""
    tracker, state = Tracker(names, simulated, 0, **options), simulated.start()
    plan = simulated.plan(0)
    seen = tracker.before(0, state, plan)
    for r in range(rounds):
        plan = simulated.plan(r)
        seen = tracker.before(r, state, plan)
        state, _ = simulated.step(state, r, plan)
    return tracker.entry(state, plan[1], seen), seen, state


def seen_first(simulated, names):
    """What is seen of each client after the first local training."""
    return Tracker(names, simulated, 0).before(0, simulated.start(), simulated.plan(0))[0]


def features_by_hand(simulated, variables, images):
    images = prepare(simulated.program.pipeline, np.asarray(images), None, train=False)
    return np.asarray(forward(simulated.program.model, variables, images, train=False)[0].features)


@pytest.mark.thorough
def test_features_of_a_pair_with_a_trained_head_count_as_they_are():
    simulated = toy.simulation("fml", method=METHODS["fml"](meme="mlp"))
    variables = simulated.initial(0)
    data, row = simulated.data, 0
    view = View(simulated.program, (), variables, lambda images: images, data.train, row, data.class_counts[row] > 0)
    means, counts = class_means(view)
    own = toy.federation().partition.train[row]
    z, labels = (
        features_by_hand(simulated, variables, toy.federation().dataset.x_train[own]),
        toy.federation().dataset.y_train[own],
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
    seen = np.isin(np.arange(4), data.y_test)
    for name, vectors, known in (("angles", variables["params"]["head"]["kernel"].T, None), ("features", means, seen)):
        each = [class_angles(vectors, own, known) for own in present]
        for field in ("existing", "missing", "between", "all"):
            values = np.array([getattr(one, field) for one in each])
            np.testing.assert_allclose(entry[name]["global"][field], values[values >= 0].mean(), rtol=1e-4)
    probe = random_probe(len(data.y_test), 0)
    np.testing.assert_allclose(entry["spectrum"]["global"]["variance"], eigenvalue_variance(z[probe[0]])[1], rtol=1e-4)
    loss = intra_class(z[probe[0]], data.y_test[probe[0]], 4)
    np.testing.assert_allclose(entry["intra"]["global"]["loss"], loss, rtol=1e-4)


def shares_by_hand(correct, federation):
    """Accuracies on the classes of each client and on the others, from correct predictions [K or 1, C]."""
    present, number = federation.class_counts > 0, np.bincount(federation.dataset.y_test, minlength=4)
    each = {}
    for name, chosen in (("existing", present), ("missing", ~present)):
        right, of = (np.broadcast_to(correct, present.shape) * chosen).sum(1), (number * chosen).sum(1)
        each[name] = (right[of > 0] / of[of > 0]).mean()
    return each


@pytest.mark.thorough
@pytest.mark.parametrize("lanes", [1, 3])
def test_accuracy_by_classes_of_the_clients_models_is_that_of_their_answers_to_all_tests(lanes):
    simulated = toy.simulation("solo", cohort=5, lanes=lanes)
    entry, _, state = tracked(simulated, ("classes",), rounds=1)
    by_hand = shares_by_hand(simulated.evaluator.personal(state, own=False), simulated.experiments[0].federation)
    assert entry["classes"]["local"] == pytest.approx(by_hand, rel=1e-6)
    assert entry["classes"]["global"] is None


@pytest.mark.thorough
def test_accuracy_by_classes_of_the_global_model_is_over_the_classes_of_each_client():
    simulated = toy.simulation(cohort=5)
    entry, _, state = tracked(simulated, ("classes",), rounds=1, local=False)
    by_hand = shares_by_hand(simulated.evaluate(state).generic, simulated.experiments[0].federation)
    assert entry["classes"]["global"] == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.thorough
def test_validation_samples_are_no_tests_of_classes():
    known = {"cohort": 5, "lanes": 1}
    whole = toy.simulation("solo", **known).experiments[0]
    held = hold_out(whole.federation, 0.3, seed=0)
    one = toy.simulation("solo", **known)
    simulated = Simulation(
        one.program.model, [whole._replace(federation=held)], pipeline=one.program.pipeline, cohort=5, rounds=3
    )
    entry, _, state = tracked(simulated, ("classes",), rounds=1)
    by_hand = shares_by_hand(simulated.evaluator.personal(state, own=False)[:, :4], held)
    assert entry["classes"]["local"] == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.thorough
def test_the_adapted_classifier_of_a_client_answers_for_its_classes():
    """FedGELA's Phi of a missing class is 0, and with the softmax over the client's own classes it has no logit."""
    entry, *_ = tracked(toy.simulation("fedgela", cohort=5, denominator="present"), ("classes",), rounds=1)
    assert entry["classes"]["local"]["missing"] == 0
    assert entry["classes"]["local"]["existing"] > 0


@pytest.mark.thorough
def test_the_only_client_of_a_round_has_the_model_that_becomes_the_global_one():
    entry, *_ = tracked(toy.simulation(cohort=1, lanes=1), ("angles",), rounds=2)
    known = {name: value for name, value in entry["angles"]["global"].items() if value is not None}
    assert known
    assert {name: entry["angles"]["local"][name] for name in known} == pytest.approx(known, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("later", ["learning rate", "images"])
def test_a_later_round_is_looked_at_with_its_own_learning_rate_and_images(later):
    one = toy.simulation(cohort=1, lanes=1)
    experiment, pipeline = one.experiments[0], one.program.pipeline
    if later == "learning rate":
        experiment = experiment._replace(local=dataclasses.replace(one.local, lr_steps=(1,), lr_decay=0.1))
    else:
        pipeline = Pipeline(flip=True)
    simulated = Simulation(one.program.model, [experiment], pipeline=pipeline, cohort=1, rounds=3)
    entry, *_ = tracked(simulated, ("angles",), rounds=2)
    known = {name: value for name, value in entry["angles"]["global"].items() if value is not None}
    assert {name: entry["angles"]["local"][name] for name in known} == pytest.approx(known, rel=1e-5)


@pytest.mark.thorough
def test_a_client_without_a_step_is_not_looked_at():
    simulated = toy.simulation("solo", cohort=5, lanes=1, last_batch="strict")  # client 0 has one sample, a batch 8
    assert seen_first(simulated, ("intra",))["intra"].shape == (4,)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"cohort": 2}, {"cohort": 5, "last_batch": "strict"}])
def test_the_global_model_is_looked_at_with_the_classes_of_those_who_trained(options):
    simulated = toy.simulation(**options)
    entry, _, state = tracked(simulated, ("angles",), rounds=1, local=False)
    jobs = simulated.plan(0)[1]
    present = simulated.experiments[0].federation.class_counts[jobs.row[jobs.steps > 0]] > 0
    kernel = np.asarray(state.servers.variables["params"]["head"]["kernel"][0])
    for field in ("existing", "missing"):
        angles = np.array([getattr(class_angles(kernel.T, own), field) for own in present])
        assert entry["angles"]["global"][field] == pytest.approx(angles[angles >= 0].mean(), rel=1e-5)


def test_the_test_samples_that_are_looked_at_are_those_of_the_seed():
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
    for k, own in enumerate(federation.partition.train):
        labels, variables = federation.dataset.y_train[own], jax.tree.map(lambda x, k=k: x[k], state.clients)
        z = features_by_hand(simulated, variables, federation.dataset.x_train[own])
        variances += [eigenvalue_variance(z)[1]] if len(own) >= 2 else []
        losses.append(intra_class(z, labels, 4))
        means = np.stack([z[labels == c].mean(0) if (labels == c).any() else 0 * z[0] for c in range(4)])
        angles.append(class_angles(means, federation.class_counts[k] > 0).existing)
    assert entry["spectrum"]["local"]["variance"] == pytest.approx(np.mean(variances), rel=1e-4)
    assert entry["intra"]["local"]["loss"] == pytest.approx(np.mean(losses), rel=1e-3)
    assert entry["features"]["local"]["existing"] == pytest.approx(np.mean([a for a in angles if a >= 0]), rel=1e-4)


@pytest.mark.thorough
def test_what_is_seen_does_not_depend_on_lanes():
    one, two = (seen_first(toy.simulation("moon", cohort=5, lanes=lanes), ("angles",)) for lanes in (1, 3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, two)


@pytest.mark.thorough
def test_looking_leaves_the_state_as_it_was():
    simulated = toy.simulation("solo", cohort=5, lanes=1)
    state = simulated.start()
    copy = jax.tree.map(np.array, state)
    Tracker(("intra",), simulated, 0).before(0, state, simulated.plan(0))
    jax.tree.map(np.testing.assert_array_equal, copy, jax.tree.map(np.array, state))


@pytest.mark.thorough
def test_clients_on_the_host_are_seen_as_those_on_the_device():
    device, host = (
        seen_first(toy.simulation("solo", cohort=2, lanes=1, client_state=place), ("intra",))
        for place in ("device", "host")
    )
    np.testing.assert_array_equal(device["intra"], host["intra"])


@pytest.mark.thorough
def test_an_etf_has_its_angle_everywhere():
    entry, *_ = tracked(toy.simulation("fedgela", cohort=5), ("angles", "features", "intra"))
    assert {name: one.get("etf") for name, one in entry.items()} == dict.fromkeys(entry, etf_angle(4)) | {"intra": None}
    for model in ("global", "local"):
        assert entry["angles"][model]["all"] == pytest.approx(etf_angle(4), rel=1e-4)


@pytest.mark.thorough
def test_without_a_global_model_clients_are_looked_at_in_any_case():
    entry, *_ = tracked(toy.simulation("solo", cohort=5, lanes=1), ("intra",), local=False)
    assert entry["intra"]["global"] is None
    assert entry["intra"]["local"]["loss"] > 0


@pytest.mark.thorough
def test_no_track_local_trains_nobody_twice():
    entry, seen, *_ = tracked(toy.simulation(cohort=5), ("angles",), local=False)
    assert seen is None
    assert entry["angles"]["local"] is None
    assert entry["angles"]["global"]["all"] > 0


@pytest.mark.thorough
def test_participants_of_two_architectures_are_seen_between_rounds():
    simulated = toy.groups("fedmd")
    entry, seen, state = tracked(simulated, ("angles",))
    kernels = [None] * 5
    for members, clients in zip(simulated.members, state.clients, strict=True):
        for row, k in enumerate(members):
            kernels[k] = np.asarray(clients["params"]["head"]["kernel"][row])
    owned = simulated.federation.class_counts > 0
    angles = np.array([class_angles(w.T, own).missing for w, own in zip(kernels, owned, strict=True)])
    assert seen is None
    assert entry["angles"]["local"]["missing"] == pytest.approx(angles[angles >= 0].mean(), rel=1e-5)


def test_the_random_probe_holds_every_sample_once():
    assert np.unique(random_probe(1000, 3)).size == 7 * 128
    assert random_probe(5000, 3).shape == (10, 128)
    assert sorted(random_probe(60, 3)[0]) == list(range(60))


@pytest.mark.thorough
def test_of_one_step_the_gradient_is_what_moved_the_weights():
    known = {"cohort": 1, "lanes": 1, "epochs": 1, "batch_size": 64, "last_batch": "keep"}
    for clip, share in ((None, 0.0), (0.01, 1.0)):
        entry, *_ = tracked(toy.simulation(**known, clip=clip), ("gradients",), rounds=1)
        _, _, after = tracked(toy.simulation(**known), ("gradients",), rounds=1)
        before = toy.simulation(**known).start().servers.variables["params"]
        moved = jax.tree.map(lambda w, v: (w - v) / 0.05 - 1e-4 * w, before, after.servers.variables["params"])
        assert entry["gradients"]["local"]["norm"] == pytest.approx(float(optax.tree.norm(moved)), rel=1e-4)
        assert entry["gradients"]["local"]["clipped"] == share


@pytest.mark.thorough
def test_the_backbones_weights_are_measured_without_the_head():
    entry, seen, state = tracked(toy.simulation(cohort=1, lanes=1), ("gradients",), rounds=1)
    norm = float(optax.tree.norm(state.servers.variables["params"]["backbone"]))
    assert entry["gradients"]["global"]["weights"] == pytest.approx(norm, rel=1e-5)
    assert seen[0]["gradients"]["weights"] == pytest.approx([norm], rel=1e-5)  # the mean of one client


@pytest.mark.thorough
def test_a_step_is_clipped_where_any_part_is():
    gradients, limits = {"a": jnp.float32(3.0), "b": jnp.float32(4.0)}, (4.5, 3.5, 2.0)
    together, apart = ([Steps.none().after(gradients, limit, own) for limit in limits] for own in ((), ("b",)))
    assert [float(one.clipped) for one in together] == [1, 1, 1]
    assert [float(one.clipped) for one in apart] == [0, 1, 1]
    assert all(float(one.norm) == pytest.approx(5) and one.count == 1 for one in (*together, *apart))


def test_of_several_steps_the_norm_is_a_mean_and_the_clipped_ones_are_a_share():
    program, variables = toy.simulation().program, {"params": {"backbone": {"w": jnp.ones(4)}, "head": jnp.ones(9)}}
    steps = Steps(count=jnp.float32(4), norm=jnp.float32(10), clipped=jnp.float32(1))
    view = View(program, (), variables, lambda images: images, (), 0, jnp.ones(4, bool), None, steps)
    assert QUANTITIES["gradients"].of_client(view) == {"norm": 2.5, "clipped": 0.25, "weights": 2}


def test_of_several_steps_that_a_method_asks_for_at_once_the_last_counts():
    @struct.dataclass
    class Twice(METHODS["fedavg"]):
        def local_update(self, evaluate, step, variables, batch, context):
            step({"w": jnp.float32(3)})
            return jnp.float32(0), {}, step({"w": jnp.float32(5)})

    variables = {"params": {"w": jnp.float32(1)}, STEPS: Steps.none()}
    watched = Watched(Twice(), (), lambda *_: (), of_steps=True)
    context = toy.context(start=variables, hyper=Local(clip=9.0))
    _, state, _ = watched.local_update(None, lambda given: given, variables, (), context)
    assert (state[STEPS].norm, state[STEPS].count) == (5, 1)


@pytest.mark.parametrize("name", ["classes", "angles", "features"])
def test_a_client_that_was_lost_is_in_no_mean_over_the_clients(name):
    values, trained = np.array([0.25, 0.75, 0.5]), np.array([True, False, True])
    shown = {"existing": values, "missing": values} if name == "classes" else Angles(*[values] * 4)
    assert QUANTITIES[name].overall(shown, trained, np.zeros((1, 3), int), 4)["existing"] == 0.375


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["apfl", "fedsmoo", "scaffold"])
def test_watching_the_steps_changes_no_training(method):
    simulated = toy.simulation(method, cohort=5)
    plain, watched = (seen_first(simulated, names) for names in (("intra",), ("intra", "gradients")))
    np.testing.assert_allclose(watched["intra"], plain["intra"], rtol=1e-5)
    assert (watched["gradients"]["norm"] > 0).all()


@pytest.mark.thorough
def test_between_rounds_nobody_has_taken_a_step():
    groups = toy.groups("fedmd")
    entry = Tracker(("gradients",), groups, 0).entry(groups.start(), None, None)
    assert entry["gradients"]["local"]["norm"] is None
    assert entry["gradients"]["local"]["weights"] > 0
