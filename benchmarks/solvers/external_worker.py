"""One peer, once: ``python external_worker.py PACKAGE SETTING THREADS GIVEN FOUND``, with numpy and that package."""

import sys
import time

import numpy as np


def prox_tv(given, setting, n_threads):
    import prox_tv as package

    method, iterations = setting.split()
    image = given["b"].reshape(tuple(given["shape"]))
    strength = float(given["radius"][0])
    start = time.perf_counter()
    found = package.tv1_2d(image, strength, n_threads=n_threads, method=method, max_iters=int(iterations))
    return found.ravel(), time.perf_counter() - start


def cut_pursuit(given, setting, n_threads):
    from pycut_pursuit.cp_d1_ql1b import cp_d1_ql1b

    n, edges = given["b"].size, given["edges"]
    order = np.argsort(edges[:, 0], kind="stable")
    first = np.zeros(n + 1, dtype=np.uint32)
    first[1:] = np.cumsum(np.bincount(edges[:, 0], minlength=n))
    adjacent = edges[order, 1].astype(np.uint32)
    values = np.ascontiguousarray(given["b"])
    options = {
        "edge_weights": np.ascontiguousarray(given["radius"][order]),
        "cp_dif_tol": float(setting),
        "cp_it_max": 50,
        "pfdr_rho": 1.5,
        "verbose": 0,
        "max_num_threads": n_threads,
    }
    start = time.perf_counter()
    component, levels = cp_d1_ql1b(values, 1.0, first, adjacent, **options)[:2]
    seconds = time.perf_counter() - start
    return levels[component], seconds


package, setting, n_threads, given, found = sys.argv[1:]
solve = {"prox_tv": prox_tv, "pycut-pursuit": cut_pursuit}[package]
theta, seconds = solve(np.load(given), setting, int(n_threads))
np.savez(found, theta=theta, seconds=seconds)
