"""Update the parameters: precision, the policy on NaN, clipping, optimizer, EMA."""
