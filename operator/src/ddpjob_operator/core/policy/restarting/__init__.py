"""From a lost member to a new attempt, and who pays for it."""
