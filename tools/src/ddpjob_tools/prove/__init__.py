"""Prove that training goes on rightly: what audit, chaos and gpu-check have in common.

A verb starts runs (run, folder) and kills them (kill, disturb); inside, probe or the library writes
records; record reads them, compare finds the first difference, cause judges it, report has words.
Only `probe`, `machine` and `workload` import torch: they run in the processes that train.
"""
