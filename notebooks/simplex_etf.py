# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The simplex ETF, and why the mean of the local classifiers is the global one
#
# FedGELA (Fan et al., NeurIPS 2023) fixes the classifier of all clients as a simplex equiangular tight frame (ETF) and
# lets every client rescale it by its own class distribution. Notation: $C$ classes, $D$ features, $K$ clients, $n_{kc}$
# training samples of class $c$ on client $k$, $n_k = \sum_c n_{kc}$, $p_k = n_k / n$.
#
# ## Equal angles
#
# $$M = \sqrt{\tfrac{C}{C-1}}\; U\,\bigl(I_C - \tfrac1C \mathbf 1\mathbf 1^\top\bigr) \in \mathbb R^{D \times C},
# \qquad U^\top U = I_C,\quad D \ge C.$$

# %%
import matplotlib.pyplot as plt
import numpy as np

import fedjax_pcdd as fp
from fedjax_pcdd.analysis.angles import pairwise_angles
from fedjax_pcdd.losses.logit_adjustment import class_scales

C, D = 10, 64
M = fp.models.simplex_etf(D, C, seed=0)
gram = M.T @ M
np.testing.assert_allclose(gram, C / (C - 1) * np.eye(C) - 1 / (C - 1), atol=1e-12)
np.testing.assert_allclose(M.sum(1), 0, atol=1e-12)
angles = np.asarray(pairwise_angles(M.T))[np.triu_indices(C, 1)]
np.testing.assert_allclose(angles, np.degrees(np.arccos(-1 / (C - 1))), atol=1e-3)
print(f"all {len(angles)} angles are {angles.mean():.2f} degrees")

# %% [markdown]
# **No $C$ vectors can be further apart.** For unit vectors,
# $0 \le \|\sum_c v_c\|^2 = C + \sum_{c \ne c'} \langle v_c, v_{c'}\rangle$, so the largest of the $C(C-1)$ inner
# products is at least $-\tfrac{1}{C-1}$. The ETF attains this for all pairs at once; nothing else that we try does.

# %%
random = np.random.default_rng(0)
closest = []
for _ in range(2000):
    vectors = random.normal(size=(C, D))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    closest.append((vectors @ vectors.T)[np.triu_indices(C, 1)].max())
print(f"largest inner product: ETF {-1 / (C - 1):.3f}, best of 2000 random frames {min(closest):.3f}")
assert min(closest) > -1 / (C - 1)

# %% [markdown]
# For two classes the ETF is a line, for three a triangle, and the more classes there are, the closer the angles are to
# a right angle:

# %%
for classes, expected in ((2, 180.0), (3, 120.0), (10, 96.38), (100, 90.58)):
    found = np.degrees(np.arccos(-1 / (classes - 1)))
    assert abs(found - expected) < 0.005
    print(f"C = {classes:3d}: {found:.2f} degrees")

# %% [markdown]
# ## Phi: what a client makes of it
#
# Client $k$ trains with the logits $\kappa\,\Phi_{kc}\,\langle m_c, \hat h\rangle$, where $\Phi_{kc} = C\,n_{kc}/n_k$:
# classes of which it has many samples get long vectors and missing classes get none, so that the existing classes may
# use the space of the missing ones. The mean over classes of a client's $\Phi_k$ is 1. A client with all classes in
# equal parts has $\Phi_k = 1$ and trains on the global classifier as it is.

# %%
digits = fp.load_dataset("digits")
federation = fp.partition(digits, "dirichlet", clients=10, beta=0.1, seed=0)
counts = federation.class_counts.astype(float)
phi = np.stack([np.asarray(class_scales(own, counts)) for own in counts])
p = counts.sum(1) / counts.sum()

np.testing.assert_allclose(phi, C * counts / counts.sum(1, keepdims=True), rtol=1e-6)
np.testing.assert_allclose(phi.mean(1), 1, rtol=1e-6)
assert (phi[counts == 0] == 0).all()
np.testing.assert_allclose(np.asarray(class_scales(np.full(C, 7.0), counts)), 1, rtol=1e-6)

# %% [markdown]
# The engine keeps exactly this vector for every client:

# %%
history = fp.simulate(federation, fp.FedGELA(), rounds=1, local_epochs=1, batch_size=32, lanes=1, seed=0)
np.testing.assert_allclose(history.state.clients, phi, rtol=1e-6)

# %% [markdown]
# ## The mean of the local classifiers
#
# Client $k$'s classifier is $M\,\mathrm{diag}(\Phi_k)$. With the weights of the aggregation,
#
# $$\sum_k p_k\,\Phi_{kc} = \sum_k \frac{n_k}{n}\cdot\frac{C\,n_{kc}}{n_k} = C\,\frac{n_c}{n},$$
#
# which is 1 for all classes **if and only if the participants' data together are balanced**. Then
# $\sum_k p_k\,M\,\mathrm{diag}(\Phi_k) = M$: no client has to send a classifier, because the mean of all of them is
# already known. Otherwise the mean has the directions of $M$, and hence its angles, but its columns differ in length.

# %%
mean = p @ phi
print("sum_k p_k Phi_kc:", mean.round(3))
np.testing.assert_allclose(mean, C * counts.sum(0) / counts.sum(), rtol=1e-6)
assert np.abs(mean - 1).max() < 0.03  # the digits are nearly balanced, but not exactly

etf = np.asarray(history.state.servers.etf[0])
averaged = np.einsum("k,dc,kc->dc", p, etf, phi)
np.testing.assert_allclose(averaged, etf * mean, atol=1e-6)

# %% [markdown]
# **Where it fails.** If nine tenths of one class are removed, or only some of the clients take part, the mean of the
# participants' classifiers is no longer the global one. FedGELA uses $M$ all the same, and in the ablation with
# $\sqrt{\cdot}$ or $\exp$ in $\Phi$ the server must divide by $\sum_j p_j Q_{jc}$ for the rule to hold.

# %%
without = counts * np.where(np.arange(C) == 0, 0.1, 1)
unbalanced = C * without.sum(0) / without.sum()
few = counts[:3]
partial = few.sum(1) / few.sum() @ phi[:3]
print("one rare class:   ", unbalanced.round(2))
print("3 of 10 clients:  ", partial.round(2))
assert unbalanced[0] < 0.15
assert partial.max() > 2
assert partial.min() < 0.1

for function in ("sqrt", "exp"):
    server = np.stack(
        [np.asarray(class_scales(own, counts, function=function, gamma="serverscaled")) for own in counts]
    )
    local = np.stack([np.asarray(class_scales(own, counts, function=function, gamma="localgamma")) for own in counts])
    np.testing.assert_allclose(p @ server, 1, rtol=1e-5)
    assert np.abs(p @ local - 1).max() > 0.02
    print(f"{function:4s} divided by the server {(p @ server).round(2)[:3]}, by clients {(p @ local).round(2)[:3]} ...")

# %% [markdown]
# ## What the global prediction depends on
#
# Generic accuracy is computed from $\arg\max_c \langle m_c, \hat h\rangle$, which depends on neither $\kappa$ nor
# $\Phi$. A client's own prediction is $\arg\max_c \Phi_{kc}\langle m_c, \hat h\rangle$. There a missing class has
# logit 0, which **beats negative logits** of the classes that the client has. With all classes in the local softmax (as
# in the published code) a client can therefore predict a class that it has never seen.

# %%
features = random.normal(size=(2000, C)) @ fp.models.simplex_etf(C, C, seed=1)
scores = features / np.linalg.norm(features, axis=1, keepdims=True)
assert (scores.argmax(1) == (100 * scores).argmax(1)).all()
k = int(np.argmax((counts == 0).sum(1)))
named = (scores * phi[k]).argmax(1)
unseen = (counts[k][named] == 0).mean()
print(f"client {k} misses {(counts[k] == 0).sum()} classes; {100 * unseen:.0f} % of random features go to one of them")
assert unseen > 0

# %% [markdown]
# ## How the space is shared (the paper's Figure 3c, which is drawn by hand)
#
# For three classes, we colour every direction of the plane by the class that
# $\arg\max_c \Phi_{kc}\langle m_c, h\rangle$ predicts. Without $\Phi$ each class has a third. A client that lacks the
# third class and has as much of the first as of the second has $\Phi = (1.5, 1.5, 0)$: the logit 0 of the missing class
# wins where both others are negative, in a sector of 60 degrees, so that the shares are 5/12, 5/12 and 1/6. With only
# the client's own classes in the softmax they are 1/2 and 1/2.


# %%
def shares_of(vectors, scales, directions, present=None):
    """Share of the directions [n, D] predicted as each class, and the predictions; `present` limits the classes."""
    scores = directions @ vectors * scales
    if present is not None:
        scores = np.where(present, scores, -np.inf)
    return np.bincount(scores.argmax(1), minlength=len(scales)) / len(directions), scores.argmax(1)


turns = np.radians(np.arange(0, 360, 0.01) + 0.005)
circle = np.stack([np.cos(turns), np.sin(turns)], 1)
triangle = np.stack([np.cos(np.radians([0, 120, 240])), np.sin(np.radians([0, 120, 240]))])
own = np.array([True, True, False])
cases = {
    "without $\\Phi$": (np.ones(3), None, [1 / 3, 1 / 3, 1 / 3]),
    "all classes": (np.array([1.5, 1.5, 0]), None, [5 / 12, 5 / 12, 1 / 6]),
    "own classes": (np.array([1.5, 1.5, 0]), own, [1 / 2, 1 / 2, 0]),
}
figure, panels = plt.subplots(1, 3, figsize=(7.2, 2.6), layout="constrained", subplot_kw={"projection": "polar"})
for panel, (title, (scales, present, expected)) in zip(panels, cases.items(), strict=True):
    shares, named = shares_of(triangle, scales, circle, present)
    np.testing.assert_allclose(shares, expected, atol=1e-4)
    for c, colour in enumerate(("#0072B2", "#D55E00", "#009E73")):
        panel.fill_between(turns, 0, np.where(named == c, 1, np.nan), color=colour, lw=0)
    panel.set(yticks=[], xticks=np.radians([0, 120, 240]), xticklabels=["0", "1", "2"])
    panel.set_title(f"{title}: {', '.join(f'{100 * share:.0f} %' for share in shares)}", fontsize=9)

# %% [markdown]
# Now ten classes, and random directions in the span of the ETF. A client with two classes in equal parts predicts each
# of them for 38.4 % of the directions, and the eight missing ones together for 23.2 %. With three classes and counts
# 6 : 3 : 1 the shares of the three are 41.4, 30.8 and 18.0 %.

# %%
frame = fp.models.simplex_etf(C, C, seed=0)
directions = np.random.default_rng(0).normal(size=(200_000, C)) @ frame.T  # in the span: the ETF has rank C - 1
for counts, expected, missing in (
    ([1, 1], [0.384, 0.384], 0.232),
    ([6, 3, 1], [0.414, 0.308, 0.180], 0.098),
    ([1] * 10, [0.1] * 10, 0.0),
):
    scales = np.zeros(C)
    scales[: len(counts)] = C * np.array(counts) / sum(counts)
    shares, _ = shares_of(frame, scales, directions)
    np.testing.assert_allclose(shares[: len(counts)], expected, atol=0.003)
    assert abs(shares[len(counts) :].sum() - missing) < 0.003
    print(f"counts {counts}: {shares[: len(counts)].round(3)}, missing classes {shares[len(counts) :].sum():.3f}")
    present = scales > 0
    if len(counts) == 2:
        np.testing.assert_allclose(shares_of(frame, scales, directions, present)[0][:2], 0.5, atol=0.003)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.5), layout="constrained", width_ratios=(3, 2))
image = left.imshow(np.ma.masked_equal(phi.T, 0), origin="lower", cmap="viridis_r", aspect="auto", vmin=0)
left.set(xlabel="client", ylabel="class", title="$\\Phi_{kc}$ of digits, Dirichlet(0.1); blank is 0")
left.set(xticks=range(C), yticks=range(C))
figure.colorbar(image, ax=left)
for values, label, colour in (
    (mean, "all clients", "#0072B2"),
    (partial, "3 of 10 clients", "#D55E00"),
    (unbalanced, "class 0 made rare", "#009E73"),
):
    right.plot(values, "o-", ms=4, lw=1.2, color=colour, label=label)
right.axhline(1, color="0.6", lw=0.8, zorder=0)
right.set(xlabel="class", title="$\\sum_k p_k\\,\\Phi_{kc}$", xticks=range(C))
right.set_ylim(top=4.4)
right.legend(fontsize=8, frameon=False, loc="upper right")
right.spines[["top", "right"]].set_visible(False)
