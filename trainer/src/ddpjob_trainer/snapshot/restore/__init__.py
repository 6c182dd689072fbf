"""Go on from a snapshot: resume (choose, agree, bring) -> load (bytes) -> load_state (objects)."""
