# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lemma 1 of FedMR: when it holds, and when not
#
# FedMR (Fan et al., TMLR 2023, section 3.3.1) counters dimensional collapse with the Frobenius norm of a class's
# correlation matrix, and justifies this by a lemma. With the eigenvalues $\lambda_1, \dots, \lambda_d$ of the
# $d \times d$ matrix $M$,
#
# $$\sum_i (\lambda_i - \bar\lambda)^2 \;=\; \|M\|_F^2 - d .$$
#
# Making $\|M\|_F$ small then means making all eigenvalues equal, that is, using all dimensions alike.
#
# ## What is true for any symmetric matrix
#
# $\sum_i \lambda_i^2 = \|M\|_F^2$ and $\sum_i \lambda_i = \mathrm{tr}\,M$, so it always holds that
#
# $$\sum_i (\lambda_i - \bar\lambda)^2 = \|M\|_F^2 - \frac{(\mathrm{tr}\,M)^2}{d} .$$
#
# The lemma is the case $\mathrm{tr}\,M = d$, which holds for a correlation matrix, because its diagonal is 1.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from fedjax_pcdd.analysis.spectrum import correlation
from fedjax_pcdd.losses.decorrelation import intra_class

jax.config.update("jax_enable_x64", True)


def spread(matrix):
    """Sum of the squared deviations of the eigenvalues from their mean."""
    eigenvalues = np.linalg.eigvalsh(matrix)
    return np.sum((eigenvalues - eigenvalues.mean()) ** 2)


def as_the_lemma_says(matrix):
    """The right side of the lemma, ||M||_F^2 - d."""
    return np.sum(matrix**2) - len(matrix)


random = np.random.default_rng(0)
n, d = 24, 6
features = random.normal(size=(n, d)) @ random.normal(size=(d, d)) + 3

# %% [markdown]
# ## It holds: one divisor for everything
#
# Standardise each dimension with the divisor $n-1$ and divide $\hat Z^\top\hat Z$ by $n-1$ (or use $n$ both times).

# %%
M = correlation(features, unbiased=True)
np.testing.assert_allclose(np.diag(M), 1)
np.testing.assert_allclose(spread(M), as_the_lemma_says(M))
print(f"spread of the eigenvalues {spread(M):.4f}, lemma {as_the_lemma_says(M):.4f}")

# %% [markdown]
# ## It does not hold as printed: two divisors
#
# The paper defines the standard deviation with $\tfrac1n$ and the matrix with $\tfrac1{n-1}$. Then the diagonal is
# $\tfrac{n}{n-1}$, and the right side must be $\|M\|_F^2 - d\,\bigl(\tfrac{n}{n-1}\bigr)^2$. For a whole mini-batch the
# difference is small; for the few samples of a single class in it, it is not.

# %%
print("   n   spread    lemma   corrected   error of the lemma")
for size in (2, 3, 5, 10, 24):
    M = correlation(features[:size])
    corrected = np.sum(M**2) - d * (size / (size - 1)) ** 2
    error = as_the_lemma_says(M) - spread(M)
    np.testing.assert_allclose(np.diag(M), size / (size - 1))
    np.testing.assert_allclose(spread(M), corrected, rtol=1e-9)
    np.testing.assert_allclose(error, d * ((size / (size - 1)) ** 2 - 1), rtol=1e-9)
    print(f"{size:4d} {spread(M):8.3f} {as_the_lemma_says(M):8.3f} {corrected:11.3f} {error:12.3f}")

# %% [markdown]
# The smallest example, worked by hand, has the three samples $(0,0), (1,2), (2,1)$. Here
# $M = \begin{pmatrix}1.5&0.75\\0.75&1.5\end{pmatrix}$, $\|M\|_F^2 = 5.625$, and the spread is
# $1.125 = 5.625 - 2\cdot1.5^2$, not $5.625 - 2$.

# %%
three = np.array([[0.0, 0.0], [1.0, 2.0], [2.0, 1.0]])
M = correlation(three)
np.testing.assert_allclose(M, [[1.5, 0.75], [0.75, 1.5]])
np.testing.assert_allclose([np.sum(M**2), spread(M)], [5.625, 1.125])

# %% [markdown]
# ## It does not hold with dead dimensions
#
# After a ReLU some dimensions are 0 for all samples of a class. Their rows and columns of $M$ are 0, including the
# diagonal entries, so the trace is the number of living dimensions $d' < d$, and the spread is $\|M\|_F^2 - d'^2/d$.

# %%
dead = features.copy()
dead[:, :2] = 0
M = correlation(dead, unbiased=True)
living = 4
np.testing.assert_allclose(np.trace(M), living)
np.testing.assert_allclose(spread(M), np.sum(M**2) - living**2 / d)
assert abs(spread(M) - as_the_lemma_says(M)) > 1
print(f"spread {spread(M):.4f}, lemma {as_the_lemma_says(M):.4f}, with the trace {np.sum(M**2) - living**2 / d:.4f}")

# %% [markdown]
# ## What it is used for does hold
#
# All these right sides differ from $\|M\|_F^2$ by a constant, as long as the number of samples and the living
# dimensions stay the same. So a step against the gradient of the loss narrows the spectrum, both with the published
# code's form (off-diagonal entries, `offdiag`) and with the printed one (`frobenius`). Neither form changes when a
# dimension is shifted or stretched. We move the features of one class by gradient descent alone and watch the
# eigenvalues.


# %%
def eigenvalues_along(form, rate, steps=150):
    """Eigenvalues [steps, d] of the correlation matrix while the features descend the intra-class loss."""
    labels = jnp.zeros(n, int)
    slope = jax.jit(jax.grad(lambda z: intra_class(z, labels, 1, form=form)))
    z, seen = jnp.asarray(features), []
    for _ in range(steps):
        seen.append(np.linalg.eigvalsh(correlation(z, unbiased=True))[::-1])
        z = z - rate * slope(z)
    return np.array(seen)


paths = {"offdiag": eigenvalues_along("offdiag", 1.0), "frobenius": eigenvalues_along("frobenius", 0.6)}
for form, path in paths.items():
    before, after = path[0].var(), path[-1].var()
    np.testing.assert_allclose(path.sum(1), d, rtol=1e-6)
    assert after < 0.05 * before
    print(f"{form:10s} variance of the eigenvalues {before:.3f} -> {after:.5f}")

stretched = features * random.uniform(0.5, 3, d) + random.normal(size=d)
for form in paths:
    values = [float(intra_class(jnp.asarray(z), jnp.zeros(n, int), 1, form=form)) for z in (features, stretched)]
    np.testing.assert_allclose(*values, rtol=1e-6)

# %% [markdown]
# The two forms differ in size, by a factor of about $d(d-1)/n$. This is why weights that suit one do not suit the
# other, and why the weights in the paper's tables (0.001 to 0.1) fit the code's form: with $d = 512$ the printed form
# is thousands of times larger. (The next cell checks the exact relation for one class: with unbiased deviations,
# `offdiag` is $\tfrac{(n-1)^2}{n\,d(d-1)}\bigl(\|M\|_F^2 - d\bigr)$, the lemma's right side up to a factor.)

# %%
M = correlation(features, unbiased=True)
offdiag = float(intra_class(jnp.asarray(features), jnp.zeros(n, int), 1, form="offdiag"))
np.testing.assert_allclose(offdiag, (n - 1) ** 2 / (n * d * (d - 1)) * as_the_lemma_says(M), rtol=1e-6)

# %%
figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.1), layout="constrained", sharey=True)
for ax, (form, path) in zip(panels, paths.items(), strict=True):
    ax.plot(path, color="#0072B2", lw=1.4)
    ax.axhline(1, color="0.5", lw=0.8, ls="--")
    ax.set(title=f"{form}: eigenvalues while the loss falls", xlabel="step")
    ax.title.set_fontsize(10)
    ax.spines[["top", "right"]].set_visible(False)
panels[0].set_ylabel("eigenvalue")
