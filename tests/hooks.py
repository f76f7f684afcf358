"""Hooks of client and server without a simulation: contexts made by hand, messages reduced with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.methods.method import Context, Facts, Keys, Local, Message, ServerContext, Setting


def setting(clients, *, epochs=1, batch=1):
    return Setting(num_classes=1, feature_dim=1, num_clients=clients, rounds=1, epochs=epochs, batch_size=batch,
                   normalised=False)  # fmt: skip


def hyper(lr=0.1, momentum=0.0):
    return Local(lr=lr, momentum=momentum, weight_decay=0.0, clip=np.inf)


def params(values, **collections):
    """Variables whose only parameter is one array."""
    return {"params": {"w": jnp.asarray(values)}, **collections}


def facts(sizes, k):
    counts = jnp.asarray(sizes, jnp.result_type(float))[:, None]
    return Facts(k, counts[k], jnp.asarray(sizes[k], jnp.int32), counts)


def context(method, server, client, *, sizes=(1,), k=0, steps=1, epochs=1, batch=1, **local):
    """The context of client k after some steps, in a federation whose clients have these sizes."""
    start = method.download(server, client)
    run_setting = setting(len(sizes), epochs=epochs, batch=batch)
    keys = Keys.of(jax.random.key(0))
    return Context(None, run_setting, hyper(**local), server, client, start, facts(sizes, k), 0, epochs, steps, 0, keys)


def reduce(messages, weights):
    """The messages of a cohort reduced to one; the weights are normalised here."""
    weights = np.asarray(weights, float) / np.sum(weights)

    def total(scale, trees):
        return jax.tree.map(lambda *x: sum(s * v for s, v in zip(scale, x, strict=True)), *trees)

    mean = total(weights, [m.mean for m in messages])
    return Message(mean=mean, total=total(np.ones(len(weights)), [m.total for m in messages]))


def aggregate(method, server, messages, weights, *, clients):
    """The server after it aggregates the messages of a cohort out of this many clients."""
    cohort = np.arange(len(messages))
    server_context = ServerContext(None, setting(clients), hyper(), 0, cohort, len(messages), jax.random.key(0))
    return method.aggregate(server, reduce(messages, weights), np.asarray(weights), server_context)


def start(method, values, sizes, **collections):
    """The states of the server and of all clients before the first round."""
    counts = jnp.asarray(sizes)[:, None]
    run_setting, key = setting(len(sizes)), jax.random.key(0)
    server = method.init_server(run_setting, params(values, **collections), counts, key)
    return server, [method.init_client(run_setting, server, facts(sizes, k), key) for k in range(len(sizes))]
