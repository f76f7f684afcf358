"""Pre-training and the exchange on public images: plain loops give the same, and hooks see no public labels."""

import copy
import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct
from participants import ALONE, ONE, SGD, arrays, assert_close, assert_equal, exchanged, row, same

from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.engine import pretraining
from fedjax_pcdd.engine.groups import Groups, Public, of_group
from fedjax_pcdd.engine.pretraining import pretrained
from fedjax_pcdd.engine.program import Evaluation, State
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.distillation import absolute_error
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Unlabelled
from fedjax_pcdd.methods.participant import Exchanging
from fedjax_pcdd.models.classifier import forward, initialise


@functools.partial(jax.jit, static_argnums=0)
def logits(model, variables, x):
    return forward(model, variables, x, train=True)[0].logits


@functools.partial(jax.jit, static_argnums=0)
def gradient_of_error(model, variables, x, target):
    def loss(params):
        return absolute_error(target, logits(model, {**variables, "params": params}, x))

    return jax.grad(loss)(variables["params"])


def by_hand(groups, round, *, carry):
    """FedMD's exchange as a loop over batches and participants: all send logits, then each steps by SGD, momentum 0.9.

    Args:
      carry: whether momentum is kept from batch to batch.
    """
    state, lr = groups.start(), 0.02
    participants = {}
    for members, group, clients in zip(groups.members, groups.groups, state.clients, strict=True):
        for k, client in zip(members, range(len(members)), strict=True):
            participants[k] = [group.program.model, row(clients, client), None]
    for index in groups.public_plan(round):
        x = prepare(toy.PLAIN, jnp.asarray(toy.public_images())[index], None, train=False)
        sent = {k: logits(model, v, x) for k, (model, v, _) in participants.items()}
        target = sum(sent.values()) / len(sent)
        for k, (model, v, momentum) in participants.items():
            gradient = gradient_of_error(model, v, x, target)
            if carry and momentum is not None:
                gradient = jax.tree.map(lambda g, m: g + 0.9 * m, gradient, momentum)
            params = jax.tree.map(lambda w, g: w - lr * g, v["params"], gradient)
            participants[k] = [model, {**v, "params": params}, gradient]
    return [participants[k][1] for k in range(len(participants))]


@pytest.mark.thorough
@pytest.mark.parametrize("optimiser", ["per_batch", "per_round"])
def test_the_exchange_equals_a_loop_in_which_all_send_logits_before_any_trains(optimiser):
    groups = toy.groups("fedmd", public_optimizer=optimiser, **SGD)
    clients = exchanged(groups)
    models = {}
    for members, group in zip(groups.members, clients, strict=True):
        models |= {k: row(group, i) for i, k in enumerate(members)}
    assert_close([models[k] for k in range(5)], arrays(by_hand(groups, 0, carry=optimiser == "per_round")))


def test_methods_see_public_images_without_labels():
    assert Unlabelled._fields == ("images", "prepare")
    assert Public._fields == ("images", "pipeline", "batch")


def test_public_epochs_are_passes_over_the_public_images():
    groups = toy.groups("fedmd", necks=ONE, public_epochs=3)
    plan = groups.public_plan(0)
    assert plan.shape == (6, 8)
    for epoch in plan.reshape(3, -1):
        assert len(set(epoch)) == 16
    assert not same(plan[:2], groups.public_plan(1)[:2])


def test_one_public_epoch_is_the_default():
    assert toy.groups("fedmd", necks=ONE).public_plan(0).shape == (2, 8)


@pytest.mark.thorough
def test_augmented_public_images_change_the_exchange():
    plain = exchanged(toy.groups("fedmd", necks=ONE, **SGD))
    flipped = exchanged(toy.groups("fedmd", necks=ONE, public=Pipeline(flip=True), **SGD))
    assert not same(plain, flipped)


@struct.dataclass
class Headed(METHODS["fedmd"]):
    """FedMD whose heads stand still."""

    def trainable(self, params, context):
        return {name: jax.tree.map(lambda _, name=name: name != "head", part) for name, part in params.items()}


@struct.dataclass
class Terse(METHODS["fedmd"]):
    def imitate(self, variables, batch, context):
        return super().imitate(variables, batch, context)[0]


def test_what_stands_still_does_not_count_in_the_norm_that_is_clipped():
    groups = toy.groups(method=Headed(), necks=ONE, images=8, clip=1e-3, **SGD)
    before, after = (arrays(clients)[0]["params"] for clients in (groups.start().clients, exchanged(groups)))
    assert_equal(before["head"], after["head"])
    moved = jax.tree.map(lambda old, new: ((new - old) ** 2).reshape(5, -1).sum(1), before, after)
    np.testing.assert_allclose(np.sqrt(sum(jax.tree.leaves(moved))), SGD["lr"] * 1e-3, rtol=1e-3)


@struct.dataclass
class Flat(METHODS["fedmd"]):
    """One target for all participants: a row of it would be that of an image."""

    def agree(self, public, spoken, counts):
        return public, spoken.mean(0)


@struct.dataclass
class Targets(METHODS["fedmd"]):
    def agree(self, public, spoken, counts):
        return spoken


@struct.dataclass
class Lossless(Exchanging):
    """Only says and agrees."""


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (Terse(), r"Terse\.imitate must return a tuple \(anything, a Mapping\), not"),
        (Flat(), r"Flat\.agree must return targets of shape \[5, 8\] and on; it has the shape \[8, 4\]\."),
        (Flat(consensus="per_round"), r"Flat\.agree must return targets of shape \[5, 21\] and on; it has the shape"),
        (Targets(), r"Targets\.agree must return a tuple \(anything, anything\), not"),
        (Lossless(), r"Lossless must define public_loss\(self, logits, target, context\), or imitate\."),
    ],
    ids=["imitate", "agree on a batch", "agree on all images", "only targets", "no loss"],
)
def test_what_hooks_of_an_exchange_return_is_checked(method, sentence):
    with pytest.raises(UserError, match=sentence):
        exchanged(toy.groups(method=method, necks=ONE))


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["drop", "keep"])
def test_a_batch_larger_than_every_client_is_one_step_on_all_its_samples(rule):
    small, large = (toy.groups("solo", batch_size=b, last_batch=rule, necks=ONE) for b in (30, 512))
    _, batches = large.jobs(0)
    assert [len(b) for b in batches] == [2] * 5
    assert [int((b >= 0).sum()) for b in batches] == [2 * n for n in toy.SIZES]
    assert_equal(arrays(small.step(small.start(), 0)[0].clients), arrays(large.step(large.start(), 0)[0].clients))


def test_strict_leaves_out_all_clients_if_the_batch_is_larger_than_each():
    groups = toy.groups("solo", batch_size=31, last_batch="strict")
    assert groups.steps.tolist() == [[0] * 5]


def test_local_epochs_may_differ_between_participants():
    _, batches = toy.groups("solo", own_epochs=(5, 1, 2, 3, 4)).jobs(0)
    assert [len(b) for b in batches] == [5, 3, 4, 6, 16]


@pytest.mark.thorough
def test_participants_begin_with_models_of_their_own():
    clients = arrays(toy.groups("solo", necks=ONE).start().clients)
    assert not same(row(clients, 0), row(clients, 1))


@pytest.mark.thorough
def test_pretraining_trains_each_participant_alone():
    groups = toy.groups("fccl", necks=ONE, epochs=2, **SGD)
    start = groups.start()
    before = arrays(start.clients[0].variables)
    after = pretrained(groups, start, epochs=2, batch_size=8)
    assert not same(before, after.clients[0].variables)
    single = toy.groups("solo", necks=(0,), parts=ALONE, **SGD)
    variables = jax.tree.map(lambda x: jnp.asarray(x[4:]), before)
    state = single.start()._replace(clients=(variables,))
    group = single.groups[0]
    group.numbers = np.array([[4]], np.int32)
    plan = group.plan(np.iinfo(np.int32).max)
    trained, _ = group.step(of_group(state, 0), np.iinfo(np.int32).max, plan)
    assert_close(arrays(row(after.clients[0].variables, 4)), arrays(row(trained.clients, 0)))


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", [{"lr_steps": (1,)}, {"local_steps": 1}])
def test_pretraining_has_the_first_learning_rate_and_counts_epochs_not_steps(schedule):
    groups = toy.groups("fccl", necks=ONE, epochs=2, **SGD)
    changed = copy.copy(groups)
    changed.local = dataclasses.replace(groups.local, **schedule)
    expected, actual = (arrays(pretrained(variant, variant.start(), 1, 8).clients) for variant in (groups, changed))
    assert_equal(expected, actual)


def test_public_and_private_pretraining_differ_in_draws_epochs_and_pipeline(monkeypatch):
    calls, flipped = [], Pipeline(flip=True)

    def record(groups, g, variables, round, federation, local, *, pipeline=None, **options):
        calls.append((round, local.epochs, local.batch_size, pipeline))
        return variables

    monkeypatch.setattr(pretraining, "_trained_alone", record)
    groups = toy.groups("fedmd", necks=ONE, labels=LABELS, transfer_epochs=3, public=flipped, **SGD)
    pretrained(groups, groups.start(), 5, 7, transfer=3)
    (public_round, *public_options), (private_round, *private_options) = calls
    assert public_round != private_round
    assert (public_options, private_options) == ([3, 7, flipped], [5, 7, None])


def decaying(groups, factor):
    """The groups with a learning rate that falls by a factor after the first round."""
    changed = copy.copy(groups)
    changed.groups = tuple(copy.copy(group) for group in groups.groups)
    for group in changed.groups:
        group.local = dataclasses.replace(group.local, lr_steps=(1,), lr_decay=factor)
    return changed


@pytest.mark.thorough
def test_an_exchange_has_the_learning_rate_of_its_round():
    groups = decaying(toy.groups("fedmd", necks=ONE, **SGD), 0.0)
    first, second = (arrays(groups.exchange(groups.start(), round).clients) for round in (0, 1))
    assert_equal(arrays(groups.start().clients), second)
    assert not same(first, second)


@struct.dataclass
class RateOfServer(METHODS["fedproto"]):
    def aggregate(self, server, message, weights, context):
        return server._replace(prototypes=jnp.full_like(server.prototypes, context.hyper.lr))


@pytest.mark.thorough
def test_the_server_of_all_groups_sees_the_learning_rate_of_its_round():
    groups = decaying(toy.groups(method=RateOfServer(), epochs=1, **SGD), 0.5)
    state, rates = groups.start(), []
    for round in (0, 1):
        state, _ = groups.step(state, round)
        rates.append([float(server.prototypes.min()) for server in state.servers["groups"]])
    np.testing.assert_allclose(rates, [[0.02, 0.02], [0.01, 0.01]], 1e-6)


LABELS = tuple(i % 7 for i in range(21))  # more classes than the private images have


@pytest.mark.thorough
def test_transfer_trains_all_but_the_head_on_public_labels():
    options = {"necks": ONE, "labels": LABELS, "transfer_epochs": 1, **SGD}
    groups = toy.groups("fedmd", **options)
    before = arrays(groups.start().clients[0])
    after = arrays(pretrained(groups, groups.start(), 0, batch_size=21, transfer=1).clients[0])
    model = groups.groups[0].program.model.clone(num_classes=7)
    x = prepare(toy.PLAIN, jnp.asarray(toy.public_images()), None, train=False)
    for k in range(5):
        body = {name: tree for name, tree in row(before, k)["params"].items() if name != "head"}
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), k)
        head = initialise(model, key, (5, 5, 1))["params"]["head"]

        def loss(params):
            logits = forward(model, {"params": params}, x, train=True)[0].logits
            return cross_entropy(logits, jnp.asarray(LABELS))

        gradients = jax.grad(loss)(body | {"head": head})
        expected = jax.tree.map(lambda w, g: w - 0.02 * g, body, {name: gradients[name] for name in body})
        assert_close({name: row(after, k)["params"][name] for name in body}, arrays(expected))
        assert not same(expected, body)
    assert_equal(after["params"]["head"], before["params"]["head"])


@pytest.mark.thorough
def test_pretraining_uses_both_public_and_private_images():
    groups = toy.groups("fedmd", labels=LABELS, transfer_epochs=1, **SGD)
    both = arrays(pretrained(groups, groups.start(), 1, 8, transfer=1).clients)
    private = arrays(pretrained(groups, groups.start(), 1, 8).clients)
    public = arrays(pretrained(groups, groups.start(), 0, 8, transfer=1).clients)
    assert not same(both, private)
    assert not same(both, public)
    for after_both, after_public in zip(both, public, strict=True):
        assert not same(after_both["params"]["head"], after_public["params"]["head"])


def test_transfer_needs_public_labels():
    with pytest.raises(UserError, match="set transfer_epochs=0"):
        toy.groups("fedmd", transfer_epochs=1)


def test_models_that_are_averaged_cannot_be_pretrained():
    groups = toy.groups("fedavg", necks=ONE)
    with pytest.raises(UserError, match="pre-trained"):
        pretrained(groups, groups.start(), 1, 8)


@pytest.mark.parametrize(
    ("name", "hyper", "message"),
    [("fedavg", {}, "averages models"), ("feddf", {}, "averages models"), ("fccl", {"average": "trained"}, "averaged")],
)
def test_averaged_models_need_one_architecture(name, hyper, message):
    with pytest.raises(UserError, match=message):
        toy.groups(name, **hyper)


@pytest.mark.parametrize(("name", "hyper"), [("fedmd", {}), ("feddf", {})])
def test_methods_that_use_public_images_are_refused_without_them(name, hyper):
    base = toy.groups("solo", necks=ONE)
    with pytest.raises(UserError, match="public"):
        Groups(toy.architectures(*ONE), base.federation, METHODS[name](**hyper), base.local, seed=0)


@pytest.mark.parametrize(
    ("option", "sentence"), [("local_statistics", "drop bn=local.$"), ("local_layers", "drop bn=local-layers.$")]
)
def test_own_models_and_local_norms_exclude_each_other(option, sentence):
    base, options = toy.groups("solo", necks=ONE), {option: True}
    with pytest.raises(UserError, match=sentence):
        Groups(toy.architectures(*ONE), base.federation, METHODS["solo"](), base.local, seed=0, **options)


@pytest.mark.thorough
def test_logits_on_public_images_are_those_of_each_participant():
    groups = toy.groups("fedmd", **SGD)
    state = groups.start()
    public_logits = groups.public_logits(state)
    assert public_logits.shape == (5, 21, toy.CLASSES)
    x = prepare(toy.PLAIN, jnp.asarray(toy.public_images()), None, train=False)
    for members, group, clients in zip(groups.members, groups.groups, state.clients, strict=True):
        for i, k in enumerate(members):
            np.testing.assert_allclose(
                public_logits[k], forward(group.program.model, row(clients, i), x, train=False)[0].logits, 1e-5, 1e-5
            )


@pytest.mark.parametrize("name", ["fedmd", "rcfl", "fedmatch"])
def test_equal_architectures_may_be_averaged_in_every_exchange(name):
    groups = toy.groups(name, necks=ONE, average="trained", common_start=False, **SGD)
    (clients,) = arrays(groups._averaged(groups.start(), "trained").clients)
    before = arrays(groups.start().clients[0])
    assert any(np.any(x[0] != x[1]) for x in jax.tree.leaves(before))
    assert_close(clients, jax.tree.map(lambda x: np.broadcast_to(x.mean(0), x.shape), before))


def test_averaged_models_start_equal_unless_common_start_is_off():
    def initial_clients(**hyper):
        return arrays(toy.groups("fedmd", necks=ONE, **hyper, **SGD).start().clients[0])

    averaged = initial_clients(average="trained")
    assert_equal(averaged, jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), averaged))
    for separate in (initial_clients(), initial_clients(average="trained", common_start=False)):
        assert any(np.any(x[0] != x[1]) for x in jax.tree.leaves(separate))


def test_weights_of_all_architectures_are_shares_of_the_samples_of_those_that_train():
    groups = toy.groups(last_batch="strict")  # client 0 has one sample, and makes no step
    sizes = np.array([0, *toy.SIZES[1:]])
    np.testing.assert_allclose(groups.plan(0)[1].weight, sizes / sizes.sum(), rtol=1e-6)


def test_accuracies_of_participants_are_in_the_order_of_the_federation():
    def evaluate(state, personal, members):
        return Evaluation((), np.array(members), 10 + np.array(members), {})

    groups = copy.copy(toy.groups())
    groups.groups = [SimpleNamespace(evaluate=functools.partial(evaluate, members=m)) for m in groups.members]
    counts = groups.evaluate(State({"groups": [(), ()]}, [(), ()], [(), ()]), personal=True)
    assert (counts.personal.tolist(), counts.local.tolist()) == ([0, 1, 2, 3, 4], [10, 11, 12, 13, 14])


@pytest.mark.thorough
def test_groups_of_one_architecture_equal_a_plain_simulation():
    groups = toy.groups("fedavg", necks=ONE, **SGD)
    plain = groups.groups[0]
    state, _ = groups.step(groups.start(), 0)
    expected, _ = plain.step(plain.start(), 0)
    assert_equal(arrays(state.servers["groups"][0]), arrays(expected.servers))
