"""Docstrings as Markdown: formulas get their signs, indices and exponents; nothing else is treated as markup."""

import html
import re

_LETTERS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "eta": "η", "theta": "θ", "kappa": "κ", "lambda": "λ", "mu": "μ",
    "nu": "ν", "xi": "ξ", "rho": "ρ", "phi": "φ", "psi": "ψ", "sigma": "σ", "tau": "τ", "omega": "ω", "epsilon": "ε",
    "Delta": "Δ", "Phi": "Φ",
}  # fmt: skip
_SIGNS = {"<=": "≤", ">=": "≥", "<-": "←", "->": "→", "||": "‖", " * ": " · ", " - ": " − "}
_GREEK = re.compile(rf"(?<![A-Za-z0-9])(?<![\w-]-)({'|'.join(_LETTERS)})(?![a-z])")
_GROUP = r"(\{[^}]*\}|\([^)]*\)|\w+(?:[+-]\d)?|\+)"
_INDEX = re.compile(rf"((?<!\w)(?:\w\d?|mean)|‖)_{_GROUP}")
_POWER = re.compile(rf"\^{_GROUP}")
_MARKUP = {ord(sign): f"&#{ord(sign)};" for sign in "*_[]|"}


def typeset(text: str) -> str:
    """One line or paragraph as Markdown; text in backticks stays as it is.

    >>> typeset("mu1 * L_intra + ||w - w^t||^2 <= c, see `a_b`")
    'μ1 · L<sub>intra</sub> + ‖w − w<sup>t</sup>‖<sup>2</sup> ≤ c, see `a_b`'
    >>> typeset("w^{t+1} = sum_{k} p_k w_k [B, C], weight_decay")
    'w<sup>t+1</sup> = Σ<sub>k</sub> p<sub>k</sub> w<sub>k</sub> &#91;B, C&#93;, weight&#95;decay'
    >>> typeset("c_k^+ - rho ||psi||_1")
    'c<sub>k</sub><sup>+</sup> − ρ ‖ψ‖<sub>1</sub>'
    """
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _formulas(part) for part in parts)


def _formulas(text: str) -> str:
    for plain, sign in _SIGNS.items():
        text = text.replace(plain, sign)
    text = html.escape(text, quote=False)
    text = _GREEK.sub(lambda match: _LETTERS[match[1]], re.sub(r"\bsum_", "Σ_", text))
    text = _INDEX.sub(lambda match: f"{match[1]}<sub>{_inner(match[2])}</sub>", text)
    text = _POWER.sub(lambda match: f"<sup>{_inner(match[1])}</sup>", text)
    return text.translate(_MARKUP)


def _inner(text: str) -> str:
    return _INDEX.sub(r"\1<sub>\2</sub>", text.strip("{}"))


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a docstring as Markdown; indented ones are formulas or code and stay as they are."""
    texts = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if not part.strip():
            continue
        if part.startswith("    "):
            texts.append(f"```text\n{part}\n```")
        else:
            texts.append(typeset(" ".join(part.split())))
    return texts
