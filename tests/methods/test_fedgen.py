"""FedGen: the generator's losses, its training on the server, its use by clients."""

import functools

import jax
import jax.numpy as jnp
import linear_model
import numpy as np
import pytest
import toy
from golden_vectors import cases

from fedjax_pcdd.losses.generation import diversity, ensemble_loss, label_shares, latent_kl
from fedjax_pcdd.methods import Batch, Message, Setting
from fedjax_pcdd.methods.fedgen import FedGen
from fedjax_pcdd.methods.method import Evaluated, ServerContext
from fedjax_pcdd.models.generator import adam, draw_labels, generate, initialise_generator, train_generator

CLASSES, DIM, BATCH = 4, 5, 6
SETTING = Setting(CLASSES, DIM, num_clients=3, rounds=3, epochs=2, batch_size=BATCH, normalised=False)
COUNTS = jnp.array([[4.0, 1, 0, 0], [2, 0, 0, 0], [0, 5, 1, 0]])  # one sample of class 2, none of class 3
OWNED = [True, True, False, False]
WEIGHTS = jnp.array([0.4, 0.2, 0.4])
SMALL = {"hidden": 8, "noise_dim": 3, "generator_steps": 4, "generator_lr": 0.01}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("fedgen"))
def test_diversity_agrees_with_the_golden_vectors(g):
    noise, layer = jnp.asarray(g["in_noise"]), jnp.asarray(g["in_layer"])
    value, gradient = jax.value_and_grad(lambda x: diversity(noise, x))(layer)
    np.testing.assert_allclose(value, g["out_diversity"], 1e-9)
    np.testing.assert_allclose(gradient, g["out_grad_layer"], 1e-9, 1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("g", cases("fedgen"))
def test_teachers_loss_agrees_with_the_golden_vectors(g, broadcast):
    logits, labels, shares = (jnp.asarray(g[k]) for k in ("in_user_logits", "in_y", "in_label_weights"))
    value = ensemble_loss(logits, labels, shares.T, broadcast=broadcast)
    np.testing.assert_allclose(value, g["out_teacher_loss" + "_broadcast" * broadcast], 1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("fedgen"))
def test_divergence_agrees_with_the_golden_vectors(g):
    generated, logits = jnp.asarray(g["in_logits_gen"]), jnp.asarray(g["in_logits"])
    value, gradient = jax.value_and_grad(lambda x: latent_kl(generated, x))(logits)
    np.testing.assert_allclose(value, g["out_latent_kl"], 1e-9)
    np.testing.assert_allclose(gradient, g["out_grad_logits"], 1e-9, 1e-12)


def test_diversity_has_the_value_of_the_worked_example():
    value = diversity(jnp.array([[0.0], [1.0]]), jnp.array([[0.0], [2.0]]))
    np.testing.assert_allclose(value, np.exp(-1), 1e-6)


def test_diversity_is_1_for_identical_latents_and_less_for_others():
    noise = jax.random.uniform(jax.random.key(0), (6, 3))
    assert diversity(noise, jnp.ones((6, 2))) == 1
    assert 0 < diversity(noise, 9 * noise) < 1


def test_the_generated_side_of_the_divergence_has_no_gradient():
    gradient = jax.grad(lambda x: latent_kl(x, jnp.ones((2, 3))))(jnp.eye(2, 3))
    assert not gradient.any()


def test_samples_of_unknown_labels_add_nothing_but_stay_in_the_divisor():
    generated, logits = jnp.array([[2.0, 0.0], [0.0, 9.0]]), jnp.zeros((2, 2))
    value = latent_kl(generated, logits, valid=jnp.array([True, False]))
    np.testing.assert_allclose(value, latent_kl(generated[:1], logits[:1]) / 2, 1e-6)


def test_shares_of_an_owned_class_add_up_to_1():
    np.testing.assert_allclose(label_shares(COUNTS).sum(0), [1, 1, 1, 0])


def test_labels_are_drawn_from_exactly_the_allowed_classes():
    labels = draw_labels(jax.random.key(0), jnp.array([False, True, False, True]), 100)
    assert set(labels.tolist()) == {1, 3}


@pytest.mark.thorough
@pytest.mark.parametrize(("noise", "mean", "spread"), [("uniform", 0.5, 12**-0.5), ("gaussian", 0.0, 1.0)])
def test_noise_has_the_chosen_distribution(noise, mean, spread):
    generator = initialise_generator(jax.random.key(0), CLASSES, DIM, 50, 3)
    samples, _, _ = generate(generator, jax.random.key(1), jnp.zeros(200, int), CLASSES, noise=noise)
    assert samples.shape == (200, 50)
    np.testing.assert_allclose(samples.mean(), mean, atol=0.02)
    np.testing.assert_allclose(samples.std(), spread, rtol=0.03)
    assert (noise == "uniform") == bool((samples >= 0).all() and (samples <= 1).all())


@pytest.mark.thorough
def test_running_statistics_of_the_generator_move_only_in_training():
    generator = initialise_generator(jax.random.key(0), CLASSES, DIM, 2, 3)
    arguments = generator, jax.random.key(1), jnp.arange(CLASSES), CLASSES
    _, _, new_statistics = generate(*arguments, train=True)
    assert (new_statistics["batch_stats"]["norm"]["mean"] != generator["batch_stats"]["norm"]["mean"]).any()
    assert generate(*arguments)[2] == {}


@pytest.mark.thorough
def test_every_step_of_the_generator_draws_its_own_noise():
    optimiser = adam(0.01, 0.0)

    def trained_by(steps, generator, state):
        options = {"size": BATCH, "steps": steps, "noise": "uniform"}
        allowed = jnp.ones(CLASSES, bool)
        return train_generator(
            generator, state, optimiser, lambda _, z, y: (z[:, 0] * y).mean(), jax.random.key(2), allowed, **options
        )

    generator = initialise_generator(jax.random.key(0), CLASSES, DIM, 3, 8)
    start = generator, optimiser.init(generator["params"])
    two_steps, one_step_twice = (
        trained["params"]["fc1"]["kernel"]
        for trained, _ in (trained_by(2, *start), trained_by(1, *trained_by(1, *start)))
    )
    assert not np.allclose(two_steps, one_step_twice, atol=1e-4)


def small_fedgen(**options):
    return FedGen(**{**SMALL, **options}).configure(SETTING, None)[0]


def head(seed=0):
    keys = jax.random.split(jax.random.key(seed))
    return {"kernel": jax.random.normal(keys[0], (DIM, CLASSES)), "bias": jax.random.normal(keys[1], (CLASSES,))}


@functools.cache
def heads():
    return jax.tree.map(lambda *x: jnp.stack(x), *[head(k) for k in range(3)])


def initial_server(method, **changed):
    variables = {"params": {"head": head()}}
    return method.init_server(SETTING, variables, COUNTS, jax.random.key(0))._replace(**changed)


def message(counts=COUNTS):
    return Message(mean={"params": {}}, each=(heads(), counts))


@jax.jit
def _aggregate(method, server, message, weights, key):
    clients = jnp.arange(len(weights))
    server_context = ServerContext(None, SETTING, None, 0, clients, len(weights), key)
    return method.aggregate(server, message, weights, server_context)


def aggregated(method, server, message, weights=WEIGHTS, seed=0):
    return _aggregate(method, server, message, weights, jax.random.key(seed))


def generator_after(counts=COUNTS, trained=0, seed=0, **options):
    method = small_fedgen(**options)
    server = aggregated(method, initial_server(method, trained=jnp.array(trained)), message(counts), seed=seed)
    return server.generator["params"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"diversity": 50.0},
        {"generator_lr": 0.02},
        {"generator_lr_decay": 0.5},
        {"generator_wd": 0.5},
        {"generator_steps": 5},
        {"noise": "gaussian"},
        {"broadcast": True},
        {"synthetic_batch": 4},
        {"label_counts": "seen"},
    ],
    ids=str,
)
def test_each_option_of_the_generator_changes_it(options):
    counts = COUNTS + 1
    default, changed = (generator_after(counts, trained=1, **overrides)["fc2"]["kernel"] for overrides in ({}, options))
    assert jnp.abs(default - changed).max() > 1e-6


@pytest.mark.thorough
def test_the_generator_learns_what_the_heads_teach():
    method = small_fedgen(generator_lr=0.02, diversity=0.0)
    server = trained = initial_server(method)
    for _ in range(40):
        trained = aggregated(method, trained, message())

    def loss(generator):
        labels = jnp.arange(40) % 2
        _, features, _ = generate(generator, jax.random.key(3), labels, CLASSES)
        logits = features @ heads()["kernel"] + heads()["bias"][:, None]
        return ensemble_loss(logits, labels, label_shares(COUNTS))

    assert loss(trained.generator) < 0.3 * loss(server.generator)


@pytest.mark.thorough
def test_without_other_lessons_the_generator_learns_to_be_diverse():
    nothing_taught = Message(mean={"params": {}}, each=(jax.tree.map(jnp.zeros_like, heads()), COUNTS))
    method = small_fedgen(generator_lr=0.02, generator_wd=0.0)
    server = trained = initial_server(method)
    for _ in range(5):
        trained = aggregated(method, trained, nothing_taught)
    before, after = (
        diversity(*generate(s.generator, jax.random.key(3), jnp.arange(40) % 2, CLASSES)[:2]) for s in (server, trained)
    )
    assert after < before - 1e-3


def test_training_on_the_server_moves_the_generators_running_statistics():
    method = small_fedgen()
    server = initial_server(method)
    before, after = (s.generator["batch_stats"]["norm"] for s in (server, aggregated(method, server, message())))
    assert all((before[name] != after[name]).any() for name in ("mean", "var"))


@pytest.mark.thorough
def test_the_generator_knows_classes_with_more_than_one_sample():
    method = small_fedgen()
    np.testing.assert_array_equal(aggregated(method, initial_server(method), message()).known, OWNED)


@pytest.mark.thorough
def test_counts_of_seen_labels_make_no_missing_class_known():
    method = small_fedgen(label_counts="seen")
    np.testing.assert_array_equal(aggregated(method, initial_server(method), message(COUNTS + 1)).known, OWNED)


@pytest.mark.thorough
def test_clients_without_weight_teach_nothing():
    method, weights = small_fedgen(), jnp.array([0.5, 0.5, 0.0])
    known = aggregated(method, initial_server(method), message(), weights).known
    np.testing.assert_array_equal(known, [True, False, False, False])


@pytest.mark.thorough
def test_labels_of_clients_without_weight_take_no_share_from_the_others():
    method, weights = small_fedgen(), jnp.array([0.5, 0.5, 0.0])
    owners, others = (
        aggregated(method, initial_server(method), message(COUNTS.at[2].set(jnp.array(absent))), weights).generator
        for absent in ([9.0, 5, 1, 0], [0.0, 0, 0, 0])
    )
    jax.tree.map(np.testing.assert_array_equal, owners, others)


@pytest.mark.parametrize(("stale", "expected"), [("carry", [True, True, False, True]), ("drop", OWNED)])
def test_a_class_without_participants_is_carried_or_dropped(stale, expected):
    method = small_fedgen(stale=stale)
    server = initial_server(method, known=jnp.array([False, False, False, True]))
    np.testing.assert_array_equal(aggregated(method, server, message()).known, expected)


def test_without_any_labels_the_generator_is_not_trained():
    method = small_fedgen()
    server = initial_server(method)
    after = aggregated(method, server, message(0 * COUNTS))
    fields = ("generator", "optimiser", "trained")
    for field in fields:
        jax.tree.map(np.testing.assert_array_equal, getattr(after, field), getattr(server, field))


@pytest.mark.parametrize("trained", [0, 2])
def test_the_learning_rate_of_the_generator_decays(trained):
    options = {"generator_steps": 1, "generator_lr": 0.02, "generator_lr_decay": 0.5}
    before = initial_server(small_fedgen(**options)).generator["params"]
    largest_steps = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), generator_after(trained=trained, **options), before)
    np.testing.assert_allclose(max(jax.tree.leaves(largest_steps)), 0.02 * 0.5**trained, rtol=1e-3)  # Adam's first step


def test_weight_decay_of_the_generator_is_part_of_the_gradient():
    optimiser, params = adam(0.1, 0.01), jnp.ones(2)
    updates, _ = optimiser.update(jnp.zeros(2), optimiser.init(params), params)
    np.testing.assert_allclose(updates, -0.1, rtol=1e-4)  # decoupled decay would give -0.1 * 0.01


@pytest.mark.thorough
def test_the_generators_draws_depend_on_the_key_of_the_round():
    first, second = (generator_after(seed=round)["fc2"]["kernel"] for round in (0, 1))
    assert jnp.abs(first - second).max() > 1e-6


def test_the_server_state_has_only_arrays_of_plain_numbers():
    leaves = jax.tree.leaves(initial_server(small_fedgen()))
    assert {str(x.dtype) for x in leaves} <= {"float32", "int32", "uint32", "bool"}


@pytest.mark.parametrize(("dim", "hidden", "noise"), [(84, 256, 32), (512, 512, 64)])
def test_default_sizes_of_the_generator_follow_the_model(dim, hidden, noise):
    method = FedGen().configure(SETTING._replace(feature_dim=dim), None)[0]
    assert (method.hidden, method.noise_dim, method.synthetic_batch) == (hidden, noise, BATCH)


@jax.jit
def _penalty(method, params, features, server, batch, round, epoch):
    context = linear_model.context(method, [1] * CLASSES, features=DIM)
    context = context._replace(setting=SETTING, server=server, round=round, epoch=epoch)
    outputs = type("Outputs", (), {"logits": features @ params["kernel"] + params["bias"]})
    return method.penalty({"params": {"head": params}}, outputs, batch, context)


def penalty(known=OWNED, round=1, epoch=0, labels=(0, 1, 0, 1, 0, 1), gradient=False, mask=(1,) * BATCH, **options):
    """The loss terms of generated features; with `gradient`, their gradients for (head, features)."""
    method = small_fedgen(**options)
    features = jax.random.normal(jax.random.key(5), (BATCH, DIM))
    batch = Batch(features, jnp.array(labels), jnp.array(mask, float))
    server = initial_server(method, known=jnp.array(known))

    def value(params, features):
        return _penalty(method, params, features, server, batch, round, epoch)

    return jax.grad(value, (0, 1))(head(), features) if gradient else float(value(head(), features))


def log_softmax(x):
    x = np.asarray(x, float)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.thorough
def test_penalty_follows_its_formula_in_a_later_round_with_an_unknown_label():
    method, size, labels = small_fedgen(synthetic_batch=4), 4, np.array([0, 1, 2, 1, 0, 1])
    server = initial_server(method, known=jnp.array(OWNED))
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 2))
    drawn_labels = np.array(draw_labels(keys[0], server.known, size))
    generated_labels = jnp.concatenate([drawn_labels, labels])
    _, latents, _ = generate(server.generator, keys[1], generated_labels, CLASSES)
    kernel, bias = np.array(head()["kernel"]), np.array(head()["bias"])
    generated_log_probs = log_softmax(latents @ kernel + bias)
    predicted_log_probs = log_softmax(jax.random.normal(jax.random.key(5), (BATCH, DIM)) @ kernel + bias)
    head_loss = -generated_log_probs[np.arange(size), drawn_labels].mean() * size / BATCH
    divergence = (np.exp(generated_log_probs[size:]) * (generated_log_probs[size:] - predicted_log_probs)).sum(-1)
    weight = 0.98**2
    expected = weight * (head_loss + divergence[labels != 2].sum() / BATCH)
    np.testing.assert_allclose(penalty(round=2, labels=labels, synthetic_batch=size), expected, 1e-5)


@pytest.mark.thorough
def test_clients_draw_noise_of_the_chosen_distribution():
    assert abs(penalty(noise="gaussian") - penalty(noise="uniform")) > 1e-4


@pytest.mark.thorough
def test_no_term_counts_before_the_generator_knows_a_class():
    assert penalty(known=[False] * CLASSES) == 0
    assert not any(x.any() for x in jax.tree.leaves(penalty(known=[False] * CLASSES, gradient=True)))


@pytest.mark.thorough
def test_generated_features_train_the_head_alone():
    of_head, of_features = penalty(beta_kl=0.0, gradient=True)
    assert jnp.abs(of_head["kernel"]).max() > 1e-3
    assert not of_features.any()


@pytest.mark.thorough
def test_the_divergence_trains_the_features():
    assert jnp.abs(penalty(alpha=0.0, gradient=True)[1]).max() > 1e-3


def test_the_divergence_leaves_unknown_labels_out():
    assert penalty(alpha=0.0, labels=[3] * BATCH) == 0


def test_the_divergence_leaves_masked_samples_out():
    halves = [penalty(alpha=0.0, mask=mask) for mask in ([1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1])]
    np.testing.assert_allclose(np.mean(halves), penalty(alpha=0.0), 1e-5)
    assert abs(halves[0] - halves[1]) > 1e-3


def test_the_penalty_is_zero_with_zero_coefficients():
    assert penalty(alpha=0.0, beta_kl=0.0) == 0


@pytest.mark.parametrize("off", ["alpha", "beta_kl"])
def test_coefficients_decay_with_the_rounds(off):
    first, third = (penalty(round=r, decay=0.5, **{off: 0.0}) for r in (0, 2))
    np.testing.assert_allclose(third, first / 4, 1e-5)


def test_coefficients_stay_above_the_floor():
    np.testing.assert_allclose(penalty(round=900, floor=1.0), penalty(round=0), 1e-5)


def test_generated_features_are_used_only_in_the_first_synthetic_epochs():
    assert penalty(epoch=19) > 0
    assert penalty(epoch=20) == 0
    assert penalty(epoch=2, synthetic_epochs=2) == 0


@pytest.mark.thorough
def test_the_weight_of_generated_features_grows_with_their_number():
    few, many = (penalty(beta_kl=0.0, synthetic_batch=size) for size in (500, 1000))
    np.testing.assert_allclose(many / few, 2, 0.1)


def message_after_two_batches():
    method = small_fedgen(label_counts="seen")
    context = linear_model.context(method, [1] * CLASSES, features=DIM)
    variables = method.download(initial_server(method), ())
    batch = Batch(jnp.zeros(()), jnp.array([0, 0, 2]), jnp.array([1.0, 1.0, 0.0]))
    for _ in range(2):
        variables |= method.local_update(lambda _: Evaluated(0.0, {}, ()), lambda _: None, variables, batch, context)[1]
    return method.upload(variables, (), context)[1]


def test_counts_of_seen_labels_start_from_1():
    np.testing.assert_array_equal(message_after_two_batches().each[1], [5, 1, 1, 1])


@pytest.mark.thorough
def test_a_round_that_counts_seen_labels_teaches_the_classes_seen():
    simulated = toy.simulation("fedgen", label_counts="seen", generator_steps=2)
    state, _ = simulated.step(simulated.start(), 0)
    chosen = simulated.clients_of(0)[0]
    owned = {label for k in chosen for label in toy.OWNED[k] if toy.SIZES[k] > 1}
    assert set(np.flatnonzero(state.servers.known[0])) == owned


@pytest.mark.thorough
def test_label_counts_are_not_part_of_the_model_sent():
    assert set(message_after_two_batches().mean) == {"params"}
