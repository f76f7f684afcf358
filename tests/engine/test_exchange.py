"""The exchange as participants and server see it: a plain loop gives the same, and nobody has public labels."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from participants import ALONE, ONE, SGD, arrays, assert_close, assert_equal, exchanged, row, same

from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.engine import pretraining
from fedjax_pcdd.engine.groups import Groups, Public, of_group
from fedjax_pcdd.engine.pretraining import pretrained
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.distillation import absolute_error
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Unlabelled
from fedjax_pcdd.models.classifier import forward, initialise


@functools.partial(jax.jit, static_argnums=0)
def logits(model, variables, x):
    return forward(model, variables, x, train=True)[0].logits


@functools.partial(jax.jit, static_argnums=0)
def gradient_of_error(model, variables, x, target):
    def loss(params):
        return absolute_error(target, logits(model, {**variables, "params": params}, x))

    return jax.grad(loss)(variables["params"])


def by_hand(table, round, *, carry):
    """FedMD's exchange with SGD of momentum 0.9, all logits first, in a loop over batches and participants.

    Args:
      carry: the momentum goes on from batch to batch.
    """
    state, lr = table.start(), 0.02
    held = {}
    for members, group, clients in zip(table.members, table.groups, state.clients, strict=True):
        for k, client in zip(members, range(len(members)), strict=True):
            held[k] = [group.program.model, row(clients, client), None]
    for index in table.public_plan(round):
        x = prepare(toy.PLAIN, jnp.asarray(toy.public_images())[index], None, train=False)
        said = {k: logits(model, v, x) for k, (model, v, _) in held.items()}
        target = sum(said.values()) / len(said)
        for k, (model, v, memory) in held.items():
            gradient = gradient_of_error(model, v, x, target)
            if carry and memory is not None:
                gradient = jax.tree.map(lambda g, m: g + 0.9 * m, gradient, memory)
            params = jax.tree.map(lambda w, g: w - lr * g, v["params"], gradient)
            held[k] = [model, {**v, "params": params}, gradient]
    return [held[k][1] for k in range(len(held))]


@pytest.mark.thorough
@pytest.mark.parametrize("optimiser", ["per_batch", "per_round"])
def test_the_exchange_is_a_plain_loop_in_which_all_speak_before_anybody_moves(optimiser):
    table = toy.groups("fedmd", public_optimizer=optimiser, **SGD)
    clients = exchanged(table)
    found = {}
    for members, group in zip(table.members, clients, strict=True):
        found |= {k: row(group, i) for i, k in enumerate(members)}
    assert_close([found[k] for k in range(5)], arrays(by_hand(table, 0, carry=optimiser == "per_round")))


def test_nothing_that_a_method_sees_of_public_images_has_labels():
    assert Unlabelled._fields == ("images", "prepare")
    assert Public._fields == ("images", "pipeline", "batch")


def test_public_epochs_are_passes_over_the_public_images():
    table = toy.groups("fedmd", necks=ONE, public_epochs=3)
    plan = table.public_plan(0)
    assert plan.shape == (6, 8)
    for epoch in plan.reshape(3, -1):
        assert len(set(epoch)) == 16
    assert not same(plan[:2], table.public_plan(1)[:2])


def test_one_pass_is_the_default():
    assert toy.groups("fedmd", necks=ONE).public_plan(0).shape == (2, 8)


@pytest.mark.thorough
def test_augmented_public_images_change_the_exchange():
    plain = exchanged(toy.groups("fedmd", necks=ONE, **SGD))
    flipped = exchanged(toy.groups("fedmd", necks=ONE, public=Pipeline(flip=True), **SGD))
    assert not same(plain, flipped)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["drop", "keep"])
def test_a_batch_larger_than_the_clients_is_one_step_on_all_they_have(rule):
    small, large = (toy.groups("solo", batch_size=b, last_batch=rule, necks=ONE) for b in (30, 512))
    _, batches = large.jobs(0)
    assert [len(b) for b in batches] == [2] * 5
    assert [int((b >= 0).sum()) for b in batches] == [2 * n for n in toy.SIZES]
    assert_equal(arrays(small.step(small.start(), 0)[0].clients), arrays(large.step(large.start(), 0)[0].clients))


def test_strict_leaves_out_clients_below_one_batch_though_it_is_larger_than_all():
    table = toy.groups("solo", batch_size=31, last_batch="strict")
    assert table.steps.tolist() == [[0] * 5]


def test_local_epochs_may_differ_between_participants():
    _, batches = toy.groups("solo", own_epochs=(5, 1, 2, 3, 4)).jobs(0)
    assert [len(b) for b in batches] == [5, 3, 4, 6, 16]


@pytest.mark.thorough
def test_participants_begin_with_models_of_their_own():
    clients = arrays(toy.groups("solo", necks=ONE).start().clients)
    assert not same(row(clients, 0), row(clients, 1))


@pytest.mark.thorough
def test_pretraining_is_training_of_each_alone():
    table = toy.groups("fccl", necks=ONE, epochs=2, **SGD)
    start = table.start()
    before = arrays(start.clients[0].variables)
    after = pretrained(table, start, epochs=2, batch_size=8)
    assert not same(before, after.clients[0].variables)
    lonely = toy.groups("solo", necks=(0,), parts=ALONE, **SGD)
    own = jax.tree.map(lambda x: jnp.asarray(x[4:]), before)
    held = lonely.start()._replace(clients=(own,))
    group = lonely.groups[0]
    group.numbers = np.array([[4]], np.int32)
    plan = group.plan(np.iinfo(np.int32).max)
    trained, _ = group.step(of_group(held, 0), np.iinfo(np.int32).max, plan)
    assert_close(arrays(row(after.clients[0].variables, 4)), arrays(row(trained.clients, 0)))


@pytest.mark.thorough
@pytest.mark.parametrize("rounds", [{"lr_steps": (1,)}, {"local_steps": 1}])
def test_pretraining_has_the_first_learning_rate_and_counts_epochs(rounds):
    table = toy.groups("fccl", necks=ONE, epochs=2, **SGD)
    changed = copy.copy(table)
    changed.local = dataclasses.replace(table.local, **rounds)
    first, other = (arrays(pretrained(one, one.start(), 1, 8).clients) for one in (table, changed))
    assert_equal(first, other)


def test_public_and_private_images_are_learnt_in_draws_epochs_and_a_pipeline_of_their_own(monkeypatch):
    told, flipped = [], Pipeline(flip=True)

    def alone(groups, g, variables, round, federation, local, *, pipeline=None, **more):
        told.append((round, local.epochs, local.batch_size, pipeline))
        return variables

    monkeypatch.setattr(pretraining, "_trained_alone", alone)
    table = toy.groups("fedmd", necks=ONE, labels=LABELS, transfer_epochs=3, public=flipped, **SGD)
    pretrained(table, table.start(), 5, 7, transfer=3)
    (public, *first), (private, *then) = told
    assert public != private
    assert (first, then) == ([3, 7, flipped], [5, 7, None])


LABELS = tuple(i % 7 for i in range(21))  # more classes than the private images have


@pytest.mark.thorough
def test_transfer_is_a_step_on_public_labels_for_the_body_alone():
    options = {"necks": ONE, "labels": LABELS, "transfer_epochs": 1, **SGD}
    table = toy.groups("fedmd", **options)
    before = arrays(table.start().clients[0])
    after = arrays(pretrained(table, table.start(), 0, batch_size=21, transfer=1).clients[0])
    model = table.groups[0].program.model.clone(num_classes=7)
    x = prepare(toy.PLAIN, jnp.asarray(toy.public_images()), None, train=False)
    for k in range(5):
        body = {name: tree for name, tree in row(before, k)["params"].items() if name != "head"}
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), k)
        head = initialise(model, key, (5, 5, 1))["params"]["head"]

        def loss(params):
            logits = forward(model, {"params": params}, x, train=True)[0].logits
            return cross_entropy(logits, jnp.asarray(LABELS))

        slopes = jax.grad(loss)(body | {"head": head})
        expected = jax.tree.map(lambda w, g: w - 0.02 * g, body, {name: slopes[name] for name in body})
        assert_close({name: row(after, k)["params"][name] for name in body}, arrays(expected))
        assert not same(expected, body)
    assert_equal(after["params"]["head"], before["params"]["head"])


@pytest.mark.thorough
def test_private_images_come_after_public_ones():
    table = toy.groups("fedmd", labels=LABELS, transfer_epochs=1, **SGD)
    both = arrays(pretrained(table, table.start(), 1, 8, transfer=1).clients)
    private = arrays(pretrained(table, table.start(), 1, 8).clients)
    public = arrays(pretrained(table, table.start(), 0, 8, transfer=1).clients)
    assert not same(both, private)
    assert not same(both, public)
    for one, other in zip(both, public, strict=True):
        assert not same(one["params"]["head"], other["params"]["head"])


def test_transfer_asks_for_labels():
    with pytest.raises(UserError, match="set transfer_epochs=0"):
        toy.groups("fedmd", transfer_epochs=1)


def test_models_that_are_averaged_cannot_be_pretrained():
    table = toy.groups("fedavg", necks=ONE)
    with pytest.raises(UserError, match="pre-trained"):
        pretrained(table, table.start(), 1, 8)


@pytest.mark.parametrize(
    ("name", "hyper", "word"),
    [("fedavg", {}, "averages models"), ("feddf", {}, "averages models"), ("fccl", {"average": "trained"}, "averaged")],
)
def test_what_is_averaged_needs_one_architecture(name, hyper, word):
    with pytest.raises(UserError, match=word):
        toy.groups(name, **hyper)


@pytest.mark.parametrize(("name", "hyper"), [("fedmd", {}), ("feddf", {})])
def test_public_images_are_asked_for(name, hyper):
    base = toy.groups("solo", necks=ONE)
    with pytest.raises(UserError, match="public"):
        Groups(toy.architectures(*ONE), base.federation, METHODS[name](**hyper), base.local, seed=0)


def test_own_models_and_local_statistics_exclude_each_other():
    base = toy.groups("solo", necks=ONE)
    with pytest.raises(UserError, match="bn=local"):
        Groups(toy.architectures(*ONE), base.federation, METHODS["solo"](), base.local, seed=0, local_statistics=True)


@pytest.mark.thorough
def test_logits_on_public_images_are_those_of_each_participant():
    table = toy.groups("fedmd", **SGD)
    state = table.start()
    found = table.public_logits(state)
    assert found.shape == (5, 21, toy.CLASSES)
    x = prepare(toy.PLAIN, jnp.asarray(toy.public_images()), None, train=False)
    for members, group, clients in zip(table.members, table.groups, state.clients, strict=True):
        for i, k in enumerate(members):
            np.testing.assert_allclose(
                found[k], forward(group.program.model, row(clients, i), x, train=False)[0].logits, 1e-5, 1e-5
            )


@pytest.mark.parametrize("name", ["fedmd", "rcfl", "fedmatch"])
def test_equal_architectures_may_be_averaged_in_every_exchange(name):
    table = toy.groups(name, necks=ONE, average="trained", **SGD)
    (clients,) = arrays(table._averaged(table.start(), "trained").clients)
    before = arrays(table.start().clients[0])
    assert_close(clients, jax.tree.map(lambda x: np.broadcast_to(x.mean(0), x.shape), before))


def test_models_that_are_averaged_begin_alike_unless_told_otherwise():
    def first(**hyper):
        return arrays(toy.groups("fedmd", necks=ONE, **hyper, **SGD).start().clients[0])

    averaged = first(average="trained")
    assert_equal(averaged, jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), averaged))
    for own in (first(), first(average="trained", common_start=False)):
        assert any(np.any(x[0] != x[1]) for x in jax.tree.leaves(own))


@pytest.mark.thorough
def test_one_architecture_of_a_common_model_is_a_plain_simulation():
    table = toy.groups("fedavg", necks=ONE, **SGD)
    plain = table.groups[0]
    state, _ = table.step(table.start(), 0)
    expected, _ = plain.step(plain.start(), 0)
    assert_equal(arrays(state.servers["groups"][0]), arrays(expected.servers))
