# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # FedMR's Theorem 1: how far a missing class stays from its target
#
# The theorem is from Fan et al., TMLR 2023. Its proof models one dimension of a feature of a class: $r_t$ is its value
# in round $t$, $a$ is the value that the clients with the class want it to have, and $s_t$ is what the others make of
# it. Let $\hat p$ be the share of the clients with the class, $p'$ that of the other clients that change the dimension
# and $p$ that of those that leave it alone, with $\hat p + p + p' = 1$. Then
#
# $$r_{t+1} = \hat p\,a + p\,r_t + p'\,s_t + \xi_t, \qquad |a|, |s_t|, |r_0| \le G, \quad |\xi_t| \le \delta.$$
#
# The claim is, with $\Gamma_t = (1 - p^t) / (1 - p)$:
#
# $$|r_t - a| \;\le\; 2\,(1 - \hat p\,\Gamma_t)\,G + \delta\,\Gamma_t.$$
#
# The model's assumptions, that dimensions are independent and that seen ones are at their optimum, are not tested.

# %%
import matplotlib.pyplot as plt
import numpy as np


def gamma(p, t):
    """Gamma_t."""
    return (1 - p**t) / (1 - p)


def bound(p, p_hat, t, G, delta):
    """The right side of the claim."""
    return 2 * (1 - p_hat * gamma(p, t)) * G + delta * gamma(p, t)


# %% [markdown]
# ## It holds
#
# We make 20 000 random draws: shares from Dirichlet(1, 1, 1), up to 30 rounds, everything else anywhere in its range.

# %%
random = np.random.default_rng(0)
draws, rounds, G = 20_000, 30, 1.0
p_hat, p, p_other = random.dirichlet([1, 1, 1], draws).T
delta = random.uniform(0, 0.5, draws)
a, r = random.uniform(-G, G, (2, draws))
slack = np.inf
for t in range(1, rounds + 1):
    s, xi = random.uniform(-G, G, draws), random.uniform(-1, 1, draws) * delta
    r = p_hat * a + p * r + p_other * s + xi
    slack = min(slack, (bound(p, p_hat, t, G, delta) - np.abs(r - a)).min())
assert slack > -1e-9
print(f"smallest slack of {draws} draws over {rounds} rounds: {slack:.2e}")

# %% [markdown]
# ## It is attained
#
# If the others pull as far away as they are allowed to in every round, the error *is* the bound.

# %%
shares = {"p": 0.1, "p_hat": 0.6}
a, r, errors = 1.0, -1.0, []
for _ in range(4):
    r = shares["p_hat"] * a + shares["p"] * r + 0.3 * -1.0 - 0.05
    errors.append(a - r)
np.testing.assert_allclose(1 - np.array(errors), [0.15, 0.265, 0.2765, 0.27765], atol=1e-12)
np.testing.assert_allclose(errors, [0.85, 0.735, 0.7235, 0.72235], atol=1e-12)
np.testing.assert_allclose(errors, [bound(**shares, t=t, G=1, delta=0.05) for t in range(1, 5)], atol=1e-12)
print("errors of rounds 1 to 4, all equal to the bound:", np.round(errors, 5))

# %% [markdown]
# ## What is off in print
#
# * With $r_{t+1}$ on the left the exponent must be $t + 1$: the index is a slip.
# * $\Gamma_t$ *grows* with $t$, from 1 to $1 / (1 - p)$; the remark that it gets smaller is wrong. The bound falls
#   because $\hat p\,\Gamma_t$ grows, but its part with $\delta$ grows as well.
# * The limit is $2\,\frac{1 - p - \hat p}{1 - p}\,G + \frac{\delta}{1 - p}$. The error is zero only if $\hat p = 1 - p$
#   (no other client moves the dimension) *and* $\delta = 0$.

# %%
values = gamma(0.4, np.arange(1, 60))
assert (np.diff(values) >= 0).all()
assert values[0] == 1
assert abs(values[-1] - 1 / 0.6) < 1e-9
limit = 2 * (1 - 0.4 - 0.3) / 0.6 + 0.05 / 0.6
assert abs(bound(0.4, 0.3, 200, 1, 0.05) - limit) < 1e-12
assert bound(0.4, 0.6, 500, 1, 0) < 1e-12
assert bound(0.4, 0.6, 500, 1, 0.05) > 0.08

# %%
p, p_hat, delta, T = 0.4, 0.3, 0.05, 15
figure, axes = plt.subplots(figsize=(5.4, 3.4), layout="constrained")
r = random.uniform(-1, 1, 100)
paths = [np.abs(r - 1)]
for _ in range(T):
    r = p_hat + p * r + (1 - p - p_hat) * random.uniform(-1, 1, 100) + random.uniform(-delta, delta, 100)
    paths.append(np.abs(r - 1))
axes.plot(np.array(paths), color="0.8", lw=0.7)
worst = [-1.0]
for _ in range(T):
    worst.append(p_hat + p * worst[-1] - (1 - p - p_hat) - delta)
axes.plot(1 - np.array(worst), "o", ms=5, mfc="none", color="#D55E00", label="worst case")
axes.plot(range(T + 1), [bound(p, p_hat, t, 1, delta) for t in range(T + 1)], color="#0072B2", label="bound")
axes.set(xlabel="round $t$", ylabel="$|r_t - a|$", ylim=(0, None))
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
