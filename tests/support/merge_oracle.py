"""The merge's formulas once more, in numpy f64 and plain loops: what a result is compared with.

Nothing here shares code or a library call with the product; sums are exact (``math.fsum``), only what the wire or the
state holds in f32 is rounded.
"""

from __future__ import annotations

import math

import numpy as np


def length(x):
    return math.sqrt(math.fsum(v * v for v in np.asarray(x, np.float64).ravel().tolist()))


def weight(tokens, steps):
    return tokens * tokens / steps


def avg(gradients, weights):
    whole = math.fsum(weights)
    if whole <= 0:
        return np.zeros(len(gradients[0]))
    return sum(w / whole * np.asarray(d, np.float64) for d, w in zip(gradients, weights, strict=True))


def rda(gradients, weights):
    whole = math.fsum(weights)
    if whole <= 0:
        return np.zeros(len(gradients[0]))
    lengths = [length(d) for d in gradients]
    radius = math.fsum(n * w for n, w in zip(lengths, weights, strict=True)) / whole
    direction = np.zeros(len(gradients[0]))
    for d, n, w in zip(gradients, lengths, weights, strict=True):
        if n:
            direction += w / whole / n * np.asarray(d, np.float64)
    size = length(direction)
    return avg(gradients, weights) if size < 1e-12 else direction * (radius / size)


def flat_spectrum(matrix):
    """By the eigenvectors of A'A (or AA'), not by an SVD: U V' = A (A'A)^(-1/2) on the range."""
    a = np.asarray(matrix, np.float64)
    if a.shape[0] < a.shape[1]:
        return flat_spectrum(a.T).T
    values, vectors = np.linalg.eigh(a.T @ a)
    sigma = np.sqrt(np.clip(values, 0.0, None))
    # squaring the spectrum halves the digits: zeros of A come out at 1e-8 of the largest, so matrices must be clear-cut
    keep = sigma > 1e-6 * sigma.max() if sigma.max() > 0 else np.zeros(len(sigma), bool)
    inverse = np.where(keep, 1.0 / np.where(keep, sigma, 1.0), 0.0)
    return sigma[keep].sum() / len(sigma) * (a @ (vectors * inverse) @ vectors.T)


def heloco(gradient, momentum, share=1.0):
    d, m = np.asarray(gradient, np.float64), np.asarray(momentum, np.float64)
    a, b = length(d), length(m)
    if min(a, b) < 1e-8:
        return d
    c = math.fsum((d * m).tolist()) / (a * b)
    if c >= 0.2:
        return d
    trust = a / (a + 3 * share * b + 1e-8)
    if c < 0:
        strength = min(-0.5 * c * trust, 0.5)
        return d - strength * c * a / b * m
    mix = min((1 - c) * trust, 1)
    turned = (1 - mix) / a * d + mix / b * m
    return turned * a / max(length(turned), 1e-8)


def outer(params, momentum, gradient, lr, mu):
    """In f32, each operation rounded: numpy's elementwise operations never fuse."""
    lr, mu = np.float32(lr), np.float32(mu)
    momentum = mu * momentum + gradient
    return params - lr * (gradient + mu * momentum), momentum


def merge(mode, numels, dims, gradients, weights, momentum, *, correction):
    parts, end = [], 0
    for index, numel in enumerate(numels):
        here = slice(end, end := end + numel)
        ds = [d[here] for d in gradients]
        if correction:
            ds = [heloco(d, momentum[here]) for d in ds]
        if mode == "avg":
            parts.append(avg(ds, weights))
        elif mode == "rda":
            parts.append(rda(ds, weights))
        else:
            parts.append(flat_spectrum(avg(ds, weights).reshape(dims[index])).ravel())
    return np.concatenate(parts)


def close(got, want, tolerance=1e-6):
    """Equal to ``tolerance`` of the largest wanted magnitude."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return got.shape == want.shape and bool(np.abs(got - want).max() <= tolerance * max(np.abs(want).max(), 1e-30))
