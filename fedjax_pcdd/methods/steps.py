"""How much a client's gradients weigh in its local update: the effective number of steps, which momentum increases."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.methods.method import Local, Setting


def effective_steps(
    steps: jax.Array | int, momentum: jax.Array | float, pull: jax.Array | float = 0.0, *, most: int = 0
) -> jax.Array:
    """FedNova's a_k: how much gradients weigh in (w^t - w_k) / eta.

    It is the sum of the coefficients, which equals their l1 norm as long as none is negative (pull below about 1).
    One step is m <- rho m + 1 - pull a, a <- a + m, from zeros, as of an optimiser that begins anew. It gives tau
    without momentum, (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) with it, and a <- (1 - pull) a + 1 for a
    proximal term alone.

    >>> round(float(effective_steps(5, 0.9)), 4)
    13.1441

    Args:
      steps: tau_k, local steps that the client made; may be traced.
      momentum: rho in [0, 1).
      pull: eta * mu of a proximal term (mu / 2) ||w - w^t||^2.
      most: largest number of steps of any client, which bounds the work; 0 if not known.

    Returns:
      Scalar; 0 for no steps.
    """
    dtype = jnp.result_type(float)
    one, zero = jnp.ones((), dtype), jnp.zeros((), dtype)
    step = jnp.array([[1 - pull, momentum, one], [-pull, momentum, one], [zero, zero, one]], dtype)
    steps = jnp.asarray(steps, jnp.int32)

    def double(bit, carry):
        power, state = carry
        product = jnp.matmul(power, state, precision="highest")
        return jnp.matmul(power, power, precision="highest"), jnp.where((steps >> bit) & 1, product, state)

    # Repeated squaring of the linear map: at most 31 rounds, where a loop over the steps would have thousands.
    start = jnp.array([0, 0, 1], dtype)
    return jax.lax.fori_loop(0, most.bit_length() or 31, double, (step, start))[1][0]


def momentum_advice(
    name: str,
    momentum: jax.Array | float,
    remedy: str = "`step_normaliser=a_k`",
    effect: str = "amplifies its correction of the gradient about {:.3g} times and may diverge",
) -> list[str]:
    """Advice for a method that corrects gradients: momentum amplifies the correction 1 / (1 - rho) times.

    Returns:
      One sentence; none below a momentum of 0.1, which amplifies hardly anything (FedRL has 1e-4).
    """
    rho = float(momentum)
    if rho < 0.1:
        return []
    effect = effect.format(1 / (1 - rho))
    return [f"{name} with `momentum={rho:g}` {effect}: set {remedy}, or `momentum=0` as the paper has it."]


def optimiser_advice(name: str, hyper: Local, remedy: str = "") -> list[str]:
    """Advice for a method that takes a client's update, divided by its steps and the learning rate, for a gradient.

    Returns:
      One sentence if the local optimiser is not SGD: other updates are not gradients times a rate.
    """
    if hyper.optimizer == "sgd":
        return []
    return [
        f"{name} takes its clients' updates for sums of gradients, which with `optimizer={hyper.optimizer}` they are "
        f"not, so that it may learn little: set `optimizer=sgd`{remedy}."
    ]


def kept_advice(name: str, setting: Setting, hyper: Local) -> list[str]:
    """Advice for a method that divides an update by a_k, which begins without momentum.

    With momentum that is kept, an update also holds gradients of earlier rounds. Of FedCM (alpha 0.1, momentum 0.9, 10
    steps) a linear loss then multiplies the direction by 1.6 a round, of SCAFFOLD the deviation of 5 steps by 1.07.

    Returns:
      One sentence; none for an optimiser that begins anew, or below a momentum of 0.1.
    """
    if not setting.keeps_optimiser or float(hyper.momentum) < 0.1:
        return []
    return [
        f"{name} with `optimizer_state=kept` takes momentum of earlier rounds for gradients of the last one and may "
        "diverge: drop `optimizer_state`, or set `momentum=0`."
    ]


def state_advice(name: str, setting: Setting, hyper: Local, *, counts_momentum: bool) -> list[str]:
    """Advice for a method that keeps on each client its update divided by K steps, as an estimate of its gradient.

    The deviation of these states from their mean is multiplied by 1 - A / K a round, with A = a_k for tau steps,
    whatever the data: it shrinks to 0 for K = A, and for K = tau it grows at a momentum of 0.9 from the fourth step on.

    Args:
      counts_momentum: whether K is a_k, not the number of steps.

    Returns:
      One sentence if that diverges, or may diverge without clipping; none below a momentum of 0.1.
    """
    rho = float(hyper.momentum)
    if rho < 0.1:
        return []
    if counts_momentum:
        unclipped = f"{name} with `momentum={rho:g}` and without clipping may not stay finite: set `grad_clip=10`."
        return [] if np.isfinite(hyper.clip) else [unclipped]
    stretch = float(effective_steps(setting.steps, rho)) / setting.steps if setting.steps else 1 / (1 - rho)
    return [
        f"{name} with `momentum={rho:g}` and `step_normaliser=steps` multiplies the error of its clients' states by "
        f"{1 - stretch:.3g} in a round of {setting.steps} local steps, and so diverges: set `step_normaliser=auto`, or "
        "`momentum=0` as the paper has it."
    ] * (stretch >= 2)
