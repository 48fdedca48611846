"""Mutation: valid plans with something changed, and oracles that say whether what is left is still right."""
