"""What every method with public images must fulfil, in an exchange between architectures or on the server."""

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
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.feddf import FedDF
from fedjax_pcdd.methods.participant import model_of
from fedjax_pcdd.testing import leaves

ONE, TWO = (0, 0, 0, 0, 0), (0, 1, 0, 1, 0)

# What is tested of each method: its options beside the defaults.
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


def some(*quick, of=BASIC, mark=pytest.mark.slow):
    """All these forms, the others than `quick` with the slow tests or those of a mark."""
    return [form if form in quick else pytest.param(form, marks=mark) for form in of]


fast_for_one = pytest.mark.parametrize("form", some("fccl", of=FORMS, mark=pytest.mark.thorough))


def groups(form, necks=TWO, **options):
    """The form on the toy federation, with SGD: the sign of Adam's first step is rounding where a gradient is 0."""
    name, hyper = FORMS[form]
    return toy.groups(name, necks=necks, **{"optimizer": "sgd", "lr": 0.02, **hyper, **options})


def at_server(lanes=2, **options):
    base = toy.simulation(cohort=5, optimizer="adam", lr=1e-3)
    method = FedDF(**SERVER | options)
    simulated = Simulation(
        base.program.model, [base.experiments[0]._replace(method=method)], pipeline=toy.PLAIN, cohort=3,
        execution=Execution(lanes=lanes), rounds=3, public=(toy.public_images(), toy.PLAIN),
    )  # fmt: skip
    return toy.shared(simulated)


def models(state, table):
    """The participants' variables in the federation's order, each a list of arrays."""
    held = {}
    for members, clients in zip(table.members, state.clients, strict=True):
        for row, k in enumerate(members):
            held[k] = [x[row] for x in leaves(model_of(clients))]
    return [held[k] for k in range(len(held))]


def test_the_two_contracts_together_cover_all_methods():
    here = {name for name, _ in FORMS.values()}
    assert {name for name, method in METHODS.items() if method().traits().needs_public} <= here
    assert here | set(test_contract.NAMES) == set(METHODS)


@pytest.mark.thorough
@every_form
def test_three_rounds_compile_once(form):
    assert_compiles_once(groups(form))


@pytest.mark.thorough
@pytest.mark.parametrize("form", some("fccl", "fml"))
def test_three_rounds_of_one_architecture_compile_once(form):
    assert_compiles_once(groups(form, ONE))


def assert_compiles_once(table):
    state, _ = jax.block_until_ready(table.step(table.start(), 0))
    clock = CompileClock()
    for r in (1, 2):
        state, _ = jax.block_until_ready(table.step(state, r))
    assert (table.compilations, clock.count) == (1, 0)


@pytest.mark.thorough
@every_form
def test_lanes_do_not_change_results(form):
    expected = toy.train(groups(form, lanes=1))
    assert_trees_all_close(toy.train(groups(form, lanes=2)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("form", some("fccl", of=FORMS))
def test_blocks_of_participants_do_not_change_results(form, x64):
    def outcome(**options):
        # Adam divides a gradient that is rounding by 1e-8.
        table = groups(form, dtype=jnp.float64, optimizer="sgd", **options)
        state, report = toy.train(table)
        counts = table.evaluate(state, personal=True), table.domain_correct(state)
        return state, report, counts, table.public_logits(state)

    expected = outcome(lanes=1)
    for block in (2, 3):
        assert_trees_all_close(outcome(lanes=3, block=block), expected, rtol=1e-10, atol=1e-10)


@fast_for_one
def test_continuing_from_a_copied_state_is_bitwise_the_same(form):
    assert_continues(groups(form))


def assert_continues(table):
    state, _ = toy.train(table, (0, 1))
    copy = jax.tree.map(lambda x: jnp.asarray(np.array(x)), state)
    straight, _ = toy.train(table)
    resumed, _ = table.step(copy, 2)
    for a, b in zip(leaves(straight), leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


@fast_for_one
def test_ragged_federation_gives_no_nan(form):
    assert_finite(*toy.train(groups(form)))


def assert_finite(state, report):
    assert all(np.isfinite(x).all() for x in leaves(state))
    assert np.isfinite(np.array(report.loss)).all()


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["fccl", "fccl-own-previous", "fedmatch"])
def test_public_batches_of_one_image_give_no_nan(form):
    state, _ = toy.train(groups(form, images=3, batch=1), (0, 1))
    assert all(np.isfinite(x).all() for x in leaves(state))


def empty_handed():
    """The toy federation, the third client without samples."""
    whole = toy.federation()
    train = list(whole.partition.train)
    train[2] = train[2][:0]
    return Federation(whole.dataset, Partition(tuple(train), whole.partition.test))


EMPTY = empty_handed()


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["fccl", "rcfl", "fml"])
def test_a_participant_without_samples_gives_no_nan(form):
    table = groups(form, parts=EMPTY)
    state, report = table.step(table.start(), 0)
    _, jobs = table.plan(0)
    assert all(np.isfinite(x).all() for x in leaves(state))
    assert set(jobs.row[jobs.steps > 0]) == {0, 1, 3, 4}
    assert np.isfinite(np.array(report.loss)[jobs.steps > 0]).all()


@pytest.mark.thorough
@pytest.mark.parametrize("form", some("fccl", "fml"))
def test_equal_models_in_several_groups_are_as_in_one(form):
    # Necks of None and 0 layers are the same model under two names.
    one, several = groups(form, ONE), groups(form, (0, None, 0, None, 0))
    assert (len(one.groups), len(several.groups)) == (1, 2)
    expected, report = toy.train(one, (0, 1))
    state, other = toy.train(several, (0, 1))
    assert_trees_all_close(models(state, several), models(expected, one), rtol=1e-5, atol=1e-5)
    assert_trees_all_close(other, report, rtol=1e-5, atol=1e-5)
    assert_trees_all_close(several.domain_correct(state), one.domain_correct(expected), rtol=0, atol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("form", some("fccl", of=["fccl", "rcfl", "fedmatch", "fml"]))
def test_order_of_participants_does_not_change_results(form):
    order = np.array([3, 0, 4, 2, 1])
    whole = toy.federation()
    parts = Partition(*(tuple(lists[k] for k in order) for lists in (whole.partition.train, whole.partition.test)))
    expected = groups(form)
    necks = tuple(TWO[k] for k in order)
    shuffled = groups(form, necks, parts=Federation(whole.dataset, parts))
    numbered(shuffled, order)
    state, _ = toy.train(shuffled, (0,))
    straight, _ = toy.train(expected, (0,))
    held = models(state, shuffled)
    assert_trees_all_close(
        [held[list(order).index(k)] for k in range(5)], models(straight, expected), rtol=1e-5, atol=1e-5
    )


def numbered(table, order):
    """Let participants draw and start as if they had their numbers in another order."""
    for members, group in zip(table.members, table.groups, strict=True):
        group.numbers = np.array([order[list(members)]], np.int32)
    own = table.initial

    def initial(g):
        members, table.members = table.members, tuple(tuple(int(order[k]) for k in m) for m in table.members)
        found = own(g)
        table.members = members
        return found

    table.initial = initial


@pytest.mark.thorough
def test_the_server_form_of_feddf_compiles_once():
    assert_compiles_once(at_server())


@pytest.mark.thorough
def test_lanes_do_not_change_the_server_form_of_feddf():
    assert_trees_all_close(toy.train(at_server(2)), toy.train(at_server(1)), rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_the_server_form_of_feddf_continues_to_the_same_bits():
    assert_continues(at_server())


@pytest.mark.thorough
def test_the_server_form_of_feddf_gives_no_nan():
    assert_finite(*toy.train(at_server()))
