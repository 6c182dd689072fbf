"""The update at the end of a step: precision, the policy on NaN, clipping, optimizer, EMA."""
