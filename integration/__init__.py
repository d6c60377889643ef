"""Tests of the package inside the real engine, with the real model; run by ``make integration``."""
