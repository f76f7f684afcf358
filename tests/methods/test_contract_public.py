"""Contract tests of all methods with public images, in an exchange between architectures and on the server."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_contract
import toy
from chex import assert_trees_all_close

from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine.devices import CompileClock
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.feddf import FedDF
from fedjax_pcdd.methods.participant import model_of
from fedjax_pcdd.testing import leaves

ONE_ARCHITECTURE, TWO_ARCHITECTURES = (0, 0, 0, 0, 0), (0, 1, 0, 1, 0)

# The forms in which methods are tested: a method and its options that differ from the defaults.
FORMS = {
    "fccl": ("fccl", {}),
    "fccl-own-previous": ("fccl", {"own": "previous", "public_optimizer": "per_round", "optimizer": "adam"}),
    "fedmd": ("fedmd", {}),
    "fedmd-per-round": ("fedmd", {"consensus": "per_round", "public_epochs": 2}),
    "rcfl": ("rcfl", {}),
    "feddf-participants": ("feddf", {"form": "participants"}),
    "fedmatch": ("fedmatch", {"confidence": 0.3}),
    "fml": ("fml", {"meme": "mlp"}),
    "solo": ("solo", {}),
}
SERVER = {"server_steps": 3, "server_batch": 8}
every_form = pytest.mark.parametrize("form", FORMS)
BASIC = ["fccl", "fedmd-per-round", "rcfl", "feddf-participants", "fedmatch", "fml"]


def form_cases(*quick, of=BASIC, mark=pytest.mark.slow):
    """All these forms as cases; those not in `quick` run only with the slow tests, or those of another mark."""
    return [form if form in quick else pytest.param(form, marks=mark) for form in of]


fast_for_one = pytest.mark.parametrize("form", form_cases("fccl", of=FORMS, mark=pytest.mark.thorough))


def groups_of(form, necks=TWO_ARCHITECTURES, **options):
    """The form on the toy federation, with SGD: the sign of Adam's first step is rounding where a gradient is 0."""
    name, hyper = FORMS[form]
    return toy.groups(name, necks=necks, **{"optimizer": "sgd", "lr": 0.02, **hyper, **options})


def feddf_at_server(lanes=2, **options):
    base = toy.simulation(cohort=5, optimizer="adam", lr=1e-3)
    method = FedDF(**SERVER | options)
    simulated = Simulation(
        base.program.model, [base.experiments[0]._replace(method=method)], pipeline=toy.PLAIN, cohort=3,
        execution=Execution(lanes=lanes), rounds=3, public=(toy.public_images(), toy.PLAIN),
    )  # fmt: skip
    return toy.shared(simulated)


def models(state, groups):
    """The participants' variables in the federation's order, each a list of arrays."""
    participant_models = {}
    for members, clients in zip(groups.members, state.clients, strict=True):
        for row, k in enumerate(members):
            participant_models[k] = [x[row] for x in leaves(model_of(clients))]
    return [participant_models[k] for k in range(len(participant_models))]


def test_the_two_contracts_together_cover_all_methods():
    tested_here = {name for name, _ in FORMS.values()}
    assert {name for name, method in METHODS.items() if method().traits().needs_public} <= tested_here
    assert tested_here | set(test_contract.NAMES) == set(METHODS)


@pytest.mark.thorough
@every_form
def test_three_rounds_compile_once(form):
    assert_compiles_once(groups_of(form))


@pytest.mark.thorough
@pytest.mark.parametrize("form", form_cases("fccl", "fml"))
def test_three_rounds_of_one_architecture_compile_once(form):
    assert_compiles_once(groups_of(form, ONE_ARCHITECTURE))


def assert_compiles_once(simulated):
    state, _ = jax.block_until_ready(simulated.step(simulated.start(), 0))
    clock = CompileClock()
    for r in (1, 2):
        state, _ = jax.block_until_ready(simulated.step(state, r))
    assert (simulated.compilations, clock.count) == (1, 0)


@pytest.mark.thorough
@every_form
def test_lanes_do_not_change_results(form):
    expected = toy.train(groups_of(form, lanes=1))
    assert_trees_all_close(toy.train(groups_of(form, lanes=2)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("form", form_cases("fccl", of=FORMS))
def test_blocks_of_participants_do_not_change_results(form, x64):
    def outcome(**options):
        # Adam divides a gradient that is rounding by 1e-8.
        groups = groups_of(form, dtype=jnp.float64, optimizer="sgd", **options)
        state, report = toy.train(groups)
        counts = groups.evaluate(state, personal=True), groups.domain_correct(state)
        return state, report, counts, groups.public_logits(state)

    expected = outcome(lanes=1)
    for block in (2, 3):
        assert_trees_all_close(outcome(lanes=3, block=block), expected, rtol=1e-10, atol=1e-10)


@fast_for_one
def test_continuing_from_a_copied_state_is_bitwise_the_same(form):
    assert_continues(groups_of(form))


def assert_continues(simulated):
    state, _ = toy.train(simulated, (0, 1))
    copied = jax.tree.map(lambda x: jnp.asarray(np.array(x)), state)
    straight, _ = toy.train(simulated)
    resumed, _ = simulated.step(copied, 2)
    for a, b in zip(leaves(straight), leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


@fast_for_one
def test_ragged_federation_gives_no_nan(form):
    assert_finite(*toy.train(groups_of(form)))


def assert_finite(state, report):
    assert all(np.isfinite(x).all() for x in leaves(state))
    assert np.isfinite(np.array(report.loss)).all()


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["fccl", "fccl-own-previous", "fedmatch"])
def test_public_batches_of_one_image_give_no_nan(form):
    state, _ = toy.train(groups_of(form, images=3, batch=1), (0, 1))
    assert all(np.isfinite(x).all() for x in leaves(state))


def with_empty_client():
    """The toy federation with a third client that has no samples."""
    federation = toy.federation()
    train = list(federation.partition.train)
    train[2] = train[2][:0]
    return Federation(federation.dataset, Partition(tuple(train), federation.partition.test))


WITH_EMPTY_CLIENT = with_empty_client()


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["fccl", "rcfl", "fml"])
def test_a_participant_without_samples_gives_no_nan(form):
    groups = groups_of(form, parts=WITH_EMPTY_CLIENT)
    state, report = groups.step(groups.start(), 0)
    _, jobs = groups.plan(0)
    assert all(np.isfinite(x).all() for x in leaves(state))
    assert set(jobs.row[jobs.steps > 0]) == {0, 1, 3, 4}
    assert np.isfinite(np.array(report.loss)[jobs.steps > 0]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("form", form_cases("fccl", "fml"))
def test_equal_models_in_several_groups_train_as_in_one_group(form):
    # Necks of None and 0 layers are the same model under two names.
    one_group, several_groups = groups_of(form, ONE_ARCHITECTURE), groups_of(form, (0, None, 0, None, 0))
    assert (len(one_group.groups), len(several_groups.groups)) == (1, 2)
    expected, report = toy.train(one_group, (0, 1))
    state, other_report = toy.train(several_groups, (0, 1))
    assert_trees_all_close(models(state, several_groups), models(expected, one_group), rtol=1e-5, atol=1e-5)
    assert_trees_all_close(other_report, report, rtol=1e-5, atol=1e-5)
    assert_trees_all_close(several_groups.domain_correct(state), one_group.domain_correct(expected), rtol=0, atol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("form", form_cases("fccl", of=["fccl", "rcfl", "fedmatch", "fml"]))
def test_order_of_participants_does_not_change_results(form):
    order = np.array([3, 0, 4, 2, 1])
    federation = toy.federation()
    partition = Partition(
        *(tuple(lists[k] for k in order) for lists in (federation.partition.train, federation.partition.test))
    )
    original = groups_of(form)
    necks = tuple(TWO_ARCHITECTURES[k] for k in order)
    shuffled = groups_of(form, necks, parts=Federation(federation.dataset, partition))
    renumber(shuffled, order)
    shuffled_state, _ = toy.train(shuffled, (0,))
    original_state, _ = toy.train(original, (0,))
    shuffled_models = models(shuffled_state, shuffled)
    assert_trees_all_close(
        [shuffled_models[list(order).index(k)] for k in range(5)],
        models(original_state, original),
        rtol=1e-5,
        atol=1e-5,
    )


def renumber(groups, order):
    """Let participant i draw and start as participant order[i] of the original federation."""
    for members, group in zip(groups.members, groups.groups, strict=True):
        group.numbers = np.array([order[list(members)]], np.int32)
    original_initial = groups.initial

    def initial(g):
        members, groups.members = groups.members, tuple(tuple(int(order[k]) for k in m) for m in groups.members)
        variables = original_initial(g)
        groups.members = members
        return variables

    groups.initial = initial


@pytest.mark.thorough
def test_the_server_form_of_feddf_compiles_once():
    assert_compiles_once(feddf_at_server())


@pytest.mark.thorough
def test_lanes_do_not_change_the_server_form_of_feddf():
    assert_trees_all_close(toy.train(feddf_at_server(2)), toy.train(feddf_at_server(1)), rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_the_server_form_of_feddf_continues_bitwise_from_a_copied_state():
    assert_continues(feddf_at_server())


@pytest.mark.thorough
def test_the_server_form_of_feddf_gives_no_nan():
    assert_finite(*toy.train(feddf_at_server()))
