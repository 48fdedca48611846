"""HSAP: hierarchical sequence-aware parallel training on packed sequences."""
