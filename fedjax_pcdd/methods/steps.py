"""How much a client's gradients weigh in its local update: the count of steps that momentum stretches."""

import jax
import jax.numpy as jnp


def effective_steps(steps: jax.Array | int, momentum: jax.Array | float, pull: jax.Array | float = 0.0) -> jax.Array:
    """FedNova's a_k: how much gradients weigh in (w^t - w_k) / eta.

    It is the sum of the coefficients, which is their l1 norm while none is negative (pull below about 1).
    One step is m <- rho m + 1 - pull a, a <- a + m, from zeros. It gives tau without momentum,
    (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho) with it, and a <- (1 - pull) a + 1 for a proximal term alone.

    >>> round(float(effective_steps(5, 0.9)), 4)
    13.1441

    Args:
      steps: tau_k, local steps that the client made; may be traced.
      momentum: rho in [0, 1).
      pull: eta * mu of a proximal term (mu / 2) ||w - w^t||^2.

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

    # Powers of two of the linear map: 31 products at most, where a loop over the steps would have thousands.
    start = jnp.array([0, 0, 1], dtype)
    return jax.lax.fori_loop(0, 31, double, (step, start))[1][0]


def momentum_advice(
    name: str,
    momentum: jax.Array | float,
    remedy: str = "`step_normaliser=a_k`",
    effect: str = "amplifies its correction of the gradient about {:.3g} times and may diverge",
) -> list[str]:
    """What to tell a user whose method corrects gradients that momentum amplifies 1 / (1 - rho) times.

    Returns:
      One sentence; none below a momentum of 0.1, which amplifies nothing to speak of (FedRL has 1e-4).
    """
    rho = float(momentum)
    if rho < 0.1:
        return []
    effect = effect.format(1 / (1 - rho))
    return [f"{name} with `momentum={rho:g}` {effect}: set {remedy}, or `momentum=0` as the paper has it."]
