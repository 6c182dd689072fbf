"""Go on from a snapshot: resume (choose, bring, agree) -> load (bytes, objects)."""
